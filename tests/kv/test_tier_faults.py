"""The host tier when a HIP call fails: a typed error, no row added, everything conserved, the same bits when the call is made again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import fault_scene
import numpy as np
import pytest
from fault_scene import FRESH, STEADY, Expected, Scene

from glm53.hip import runtime

SAMPLES = 5  # failing calls of each API, the first and the last among them


@pytest.fixture(scope="module")
def path(make_checkpoint: Callable[..., Path]) -> Path:
    if runtime.select().name != "cpu":
        pytest.skip("faults are the cpu runtime's to choose")
    return make_checkpoint(**fault_scene.CHECKPOINT)


@pytest.fixture(scope="module")
def expected(path: Path) -> Expected:
    return fault_scene.undisturbed(path)


@pytest.fixture(scope="module")
def warm(path: Path) -> Iterator[Scene]:
    with Scene(path) as scene:
        scene.play([])
        yield scene


def sampled(calls: int) -> list[int]:
    return sorted({int(n) for n in np.linspace(1, calls, min(SAMPLES, calls)).round()})


@pytest.mark.parametrize("api", STEADY)
def test_a_failing_call_adds_no_row_and_loses_none(api: str, warm: Scene, expected: Expected) -> None:
    assert expected.calls[api] > 0, f"the scene makes no {api}"
    for nth in sampled(expected.calls[api]):
        outcome = fault_scene.fail(warm, api, nth, expected, conserved=True)
        assert outcome != "survived", f"{api} {nth} failed and nobody noticed"


@pytest.mark.parametrize("api", FRESH)
def test_a_failing_allocation_of_a_fresh_tier(api: str, path: Path, expected: Expected) -> None:
    calls = expected.calls_fresh[api]
    assert calls > 0, f"the scene makes no {api}"
    idle = fault_scene.live()
    for nth in sampled(calls):
        with Scene(path, **FRESH[api]) as scene:
            # What is made ahead of need, and key slabs larger than need, may fail unnoticed.
            fault_scene.fail(scene, api, nth, expected, conserved=False)
        assert fault_scene.live() == idle, f"{api} {nth}"
