"""The engine on the cpu runtime when the order of the device's work and the success of its calls are chosen for it.

Seeded scheduling runs any work that HIP's rules allow to run next, so a missing order shows as other bits. Fault injection fails the nth
call of one API: the request ends with a typed error, nothing stays allocated, and the next request works.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from glm53 import Completion, Engine, SamplingParams
from glm53.errors import DeviceMemoryError, HipError
from glm53.hip import runtime
from glm53.kv import HostTier

PROMPTS = [[(i * 37 + 11) % 64 for i in range(70)], [5, 3, 1], [(i * 5 + 2) % 64 for i in range(40)]]
SETTINGS = {"dtype": "f32", "context_rows_max": 192, "extent_rows": 64, "prefill_chunk_rows": 32, "sessions_max": 2}
PARAMS = SamplingParams(temperature=0.8, top_p=0.9, repetition_penalty=1.1, seed=3, max_tokens=4, logprobs=3, ignore_eos=True)
KINDS = ("allocations", "allocated_bytes", "host_allocations", "streams", "events", "queued")
SEEDS = range(1, 7)
SAMPLES = 7  # failing calls of each API, the first and the last among them


@pytest.fixture(scope="module")
def control() -> Iterator[ctypes.CDLL]:
    """The cpu runtime's own symbols; its settings are put back at the end."""
    if runtime.select().name != "cpu":
        pytest.skip("schedules and faults are the cpu runtime's to choose")
    library = runtime.control()
    yield library
    library.glm53_cpu_seed(0, 0)


@pytest.fixture(scope="module")
def path(make_checkpoint: Callable[..., Path]) -> Path:
    return make_checkpoint(layers=4, vocab=64, topk=32, seed=7)


def live(control: ctypes.CDLL) -> dict[str, int]:
    return {kind: control.glm53_cpu_live(kind.encode()) for kind in KINDS}


def scenario(engine: Engine) -> tuple[list[Completion], np.ndarray]:
    """Three requests on two sessions, with several chunks and extents, then the logits of one of them."""
    done = engine.generate(PROMPTS, PARAMS)
    return done, engine.generate_logits(PROMPTS[0], 3)[1]


def test_no_schedule_changes_a_bit(control: ctypes.CDLL, path: Path) -> None:
    with Engine.open(path, **SETTINGS) as engine:
        expected, logits = scenario(engine)
    traces = set()
    for seed in SEEDS:
        control.glm53_cpu_seed(seed, 1)
        try:
            with Engine.open(path, **SETTINGS) as engine:
                found, seeded_logits = scenario(engine)
            trace = ctypes.create_string_buffer(1 << 16)
            control.glm53_cpu_trace(trace, ctypes.c_uint64(len(trace)))
            traces.add(trace.value)
        finally:
            control.glm53_cpu_seed(0, 0)
        assert found == expected, f"schedule {seed}"
        np.testing.assert_array_equal(seeded_logits, logits, err_msg=f"schedule {seed}")
    assert len(traces) > 1, "every seed gave one and the same schedule"


def sampled(calls: int) -> list[int]:
    """At most SAMPLES call numbers from 1 to `calls`, evenly spread, both ends among them."""
    return sorted({int(n) for n in np.linspace(1, calls, min(SAMPLES, calls)).round()})


REQUEST_APIS = ("hipMalloc", "hipMemcpyAsync", "hipModuleLaunchKernel", "hipEventCreateWithFlags", "hipEventRecord", "hipStreamSynchronize")


@pytest.mark.parametrize("api", REQUEST_APIS)
def test_a_failing_call_ends_the_request_only(control: ctypes.CDLL, path: Path, api: str) -> None:
    def fresh() -> Engine:
        return Engine.open(path, **SETTINGS)

    with fresh() as engine:
        before = control.glm53_cpu_calls(api.encode())
        expected, _ = scenario(engine)
        calls = control.glm53_cpu_calls(api.encode()) - before
    assert calls > 0, f"the scenario makes no {api}"
    idle = live(control)
    for nth in sampled(calls):
        with fresh() as engine:
            control.glm53_cpu_fail(api.encode(), nth, 2)
            try:
                found, _ = scenario(engine)
                survived = True
            except (HipError, DeviceMemoryError):
                survived = False
            finally:
                control.glm53_cpu_fail(api.encode(), 0, 0)
            if survived:
                assert api == "hipMalloc" and found == expected, f"{api} {nth} failed and nobody noticed"  # a smaller slab will do
            for store in (engine.tier, engine.keys):
                store.check()
                assert store.pool.free == store.pool.capacity, f"{api} {nth}: the failed request kept extents"
            assert engine.generate(PROMPTS, PARAMS) == expected, f"{api} {nth}: the next requests differ"
        assert live(control) == idle, f"{api} {nth}"


OPEN_APIS = ("hipMalloc", "hipHostMalloc", "hipMemcpyAsync", "hipModuleLaunchKernel", "hipStreamCreateWithFlags", "hipEventCreateWithFlags")


@pytest.mark.parametrize("api", OPEN_APIS)
def test_a_failing_call_while_opening_leaves_nothing(control: ctypes.CDLL, path: Path, api: str) -> None:
    idle = live(control)
    before = control.glm53_cpu_calls(api.encode())
    with Engine.open(path, **SETTINGS) as engine:
        calls = control.glm53_cpu_calls(api.encode()) - before
        expected = engine.generate(PROMPTS[1], PARAMS)
    assert calls > 0, f"opening makes no {api}"
    for nth in sampled(calls):
        control.glm53_cpu_fail(api.encode(), nth, 2)
        try:
            with Engine.open(path, **SETTINGS) as engine:
                control.glm53_cpu_fail(api.encode(), 0, 0)
                # Only the litmus loops report a failed call instead of raising it: the engine opened with a fallback.
                assert isinstance(engine.tier, HostTier)
                assert engine.tier.config.fetch == "copy" or not engine.decoder.graphs, f"{api} {nth} failed and nobody noticed"
                assert engine.generate(PROMPTS[1], PARAMS) == expected, f"{api} {nth}: the fallback differs"
        except (HipError, DeviceMemoryError):
            pass
        finally:
            control.glm53_cpu_fail(api.encode(), 0, 0)
        assert live(control) == idle, f"{api} {nth}"
    with Engine.open(path, **SETTINGS) as engine:
        assert engine.generate(PROMPTS[1], PARAMS) == expected
