"""Calls on a session drawn from a seed, made on the resident and on the host tier: for the tests and for `scripts/soak`."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from glm53 import Engine
from glm53.hip import runtime
from glm53.model import side as side_module

VOCAB, TOPK, RING = 512, 64, 192
Call = tuple[str, Any]  # ("prefill", ids) | ("step", ids) | ("truncate", rows) | ("settle", None)


def script(seed: int, prompt_rows: int, calls: int) -> list[Call]:
    """A prompt, then steps of 1 to 8 rows, appends, rollbacks and settles, drawn from a seed."""
    rng = random.Random(seed)
    ids = lambda count: [rng.randrange(VOCAB) for _ in range(count)]
    rows, made = prompt_rows, [("prefill", ids(prompt_rows))]
    for _ in range(calls):
        kind = rng.choices(["step", "prefill", "truncate", "settle"], [12, 2, 2, 1])[0]
        if kind == "step":
            made.append((kind, ids(rng.choice([1, 1, 1, 2, 3, 8]))))
            rows += len(made[-1][1])
        elif kind == "prefill":
            made.append((kind, ids(rng.choice([1, 5, 40, 130]))))
            rows += len(made[-1][1])
        elif kind == "truncate":
            rows = max(1, rows - rng.choice([1, 3, 8, 60, 200]))
            made.append((kind, rows))
        else:
            made.append((kind, None))
    return made


def play(engine: Engine, calls: list[Call]) -> list[np.ndarray]:
    """Logits of every call that gives some."""
    found = []
    with engine.session() as session:
        for kind, value in calls:
            if kind == "settle":
                engine.stage.settle(session.slot)
            else:
                result = getattr(session, kind)(value)
                if result is not None:
                    found.append(result)
            engine.stage.check()
    return found


def assert_same_bits(expected: list[np.ndarray], got: list[np.ndarray], label: str) -> None:
    assert len(expected) == len(got)
    for index, (a, b) in enumerate(zip(expected, got, strict=True)):
        np.testing.assert_array_equal(a, b, err_msg=f"{label}, result {index}")


def settings(**changes: Any) -> dict[str, Any]:
    shared = {"dtype": "f32", "context_rows_max": 4096, "prefill_chunk_rows": 64, "extent_rows": 64, "host_chunk_mib": 2, "sessions_max": 2}
    return shared | changes


def open_resident(path: Path, **changes: Any) -> Engine:
    return Engine.open(path, kv_tier="resident", **settings(**changes))


def open_host(path: Path, hot_rows: int, **changes: Any) -> Engine:
    return Engine.open(path, kv_tier="host", hot_rows=hot_rows, **settings(**changes))


@contextmanager
def tier_config(**fixed: Any) -> Iterator[None]:
    """Engines opened inside have these fields of HostTierConfig, which no engine setting chooses."""
    original = side_module.HostTierConfig

    def make(**sizes: Any) -> Any:
        return original(**sizes | fixed)

    make.ring_rows_for = original.ring_rows_for  # type: ignore[attr-defined]
    side_module.HostTierConfig = make  # type: ignore[assignment, misc]
    try:
        yield
    finally:
        side_module.HostTierConfig = original  # type: ignore[misc]


def compare(path: Path, hot_rows: int, calls: list[Call], label: str, **changes: Any) -> None:
    """Both tiers make the same calls and give the same bits; nothing is left behind."""
    with open_resident(path, **changes) as resident:
        expected = play(resident, calls)
    with open_host(path, hot_rows, **changes) as host:
        assert_same_bits(expected, play(host, calls), label)
        assert_all_given_back(host, label)


def assert_all_given_back(engine: Engine, label: str) -> None:
    """No session is open, and no side of the engine keeps extents of one."""
    for side in engine.stage.sides:
        for store in (side.tier, side.keys):
            store.check()
            assert store.pool.free == store.pool.capacity, f"{label}: device {side.device.index} keeps extents"


@contextmanager
def schedule(seed: int) -> Iterator[None]:
    """The cpu runtime picks the next queue at random, from a seed."""
    control = runtime.control()
    control.glm53_cpu_seed(seed, 1)
    try:
        yield
    finally:
        control.glm53_cpu_seed(0, 0)
