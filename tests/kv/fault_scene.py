"""One session's life on the host tier, in which the n-th call of one HIP API fails, beside a session that must not notice.

Used by the tests (a sample of every API's calls) and by `scripts/soak` (all of them).
"""

from __future__ import annotations

import ctypes
import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from glm53 import Engine
from glm53.engine import Session
from glm53.errors import DeviceMemoryError, HipError
from glm53.hip import runtime
from glm53.kv import HostTier

VOCAB = 64
SETTINGS: dict[str, Any] = {
    "dtype": "f32",
    "kv_tier": "host",
    "hot_rows": 192 + 40,
    "context_rows_max": 512,
    "extent_rows": 64,
    "prefill_chunk_rows": 128,
    "sessions_max": 2,
    "host_chunk_mib": 2,
}
CHECKPOINT = {"layers": 4, "vocab": VOCAB, "topk": 32, "seed": 7}
KINDS = ("allocations", "allocated_bytes", "host_allocations", "registrations", "streams", "events", "queued")

# APIs that a warm engine calls all the time, and those that only a fresh one calls. The values: fields of HostTierConfig, and settings, that make it
# call them.
STEADY: dict[str, dict[str, Any]] = {
    "hipMemcpyAsync": {},
    "hipMemcpy2DAsync": {"copy_back": "copy2d"},
    "hipMemsetAsync": {},
    "hipModuleLaunchKernel": {},
    "hipEventCreateWithFlags": {},
    "hipEventRecord": {},
    "hipEventSynchronize": {},
    "hipEventQuery": {},
    "hipStreamWaitEvent": {},
    "hipStreamSynchronize": {},
}
FRESH: dict[str, dict[str, Any]] = {
    "hipMalloc": {},
    "hipHostRegister": {},
    "hipHostGetDevicePointer": {},
    "hipHostMalloc": {"host_memory": "hostmalloc"},
}


def ids(seed: int, count: int) -> list[int]:
    return [(i * 37 + seed * 11 + i * i % 7) % VOCAB for i in range(count)]


# The prompt fits the hot buffer, then it streams; steps miss; a short append goes through the hot cache; rollbacks cross copies and extents.
CALLS: list[tuple[str, Any]] = [
    ("prefill", ids(1, 130)),
    ("step", ids(2, 3)),
    ("prefill", ids(3, 120)),
    ("step", ids(4, 2)),
    ("step", ids(5, 8)),
    ("prefill", ids(6, 5)),
    ("settle", None),
    ("truncate", 250),
    ("step", ids(7, 8)),
    ("truncate", 120),
    ("prefill", ids(8, 80)),
    ("step", ids(9, 1)),
]
BYSTANDER_PROMPT, BYSTANDER_STEP = ids(20, 260), ids(21, 3)


def control() -> ctypes.CDLL:
    """The cpu runtime's own symbols."""
    return runtime.control()


def live() -> dict[str, int]:
    return {kind: control().glm53_cpu_live(kind.encode()) for kind in KINDS}


class Scene:
    """An engine with a session that stays open; `play` runs the calls in another one."""

    def __init__(self, path: Path, **settings: Any):
        self.engine = Engine.open(path, **SETTINGS | settings)
        assert isinstance(self.engine.tier, HostTier)
        self.tier = self.engine.tier
        self.bystander = self.engine.session()
        self.bystander.prefill(BYSTANDER_PROMPT)

    def __enter__(self) -> Scene:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.engine.close()

    def configure(self, fields: dict[str, Any]) -> None:
        """How copies are made from now on."""
        self.tier.config = dataclasses.replace(self.tier.config, **{"copy_back": None} | fields)

    def play(self, probes: list[np.ndarray], record: bool = False) -> tuple[list[np.ndarray], list[str]]:
        """Results of the calls, and the errors met. A call that fails must have left the session as it was; it is made again after a probe.

        probes: logits of a step, taken back, before each call: written if `record`, else what a probe after an error must give.
        """
        found: list[np.ndarray] = []
        errors: list[str] = []
        session = self._attempt(self.engine.session, errors)
        for index, (kind, value) in enumerate(CALLS):
            rows = session.rows
            if record:
                probes.append(self._probe(session))
            call = (lambda: self.tier.settle(session.slot)) if kind == "settle" else (lambda kind=kind, value=value: getattr(session, kind)(value))
            try:
                result = call()
            except (HipError, DeviceMemoryError) as error:
                errors.append(f"{kind}: {error}")
                assert session.rows == (value if kind == "truncate" else rows), f"{kind} failed and left {session.rows} of {rows} rows"
                self.tier.check()
                self.engine.keys.check()
                expected = probes[index + (kind == "truncate")]
                np.testing.assert_array_equal(self._probe(session), expected, err_msg=f"a step after {errors}")
                result = call()
            if result is not None:
                found.append(result)
        self._attempt(session.close, errors, again=False)
        return found, errors

    def _attempt(self, call: Any, errors: list[str], again: bool = True) -> Any:
        try:
            return call()
        except (HipError, DeviceMemoryError) as error:
            errors.append(str(error))
            return call() if again else None

    def _probe(self, session: Session) -> np.ndarray:
        rows = session.rows
        logits = session.step(BYSTANDER_STEP)
        session.truncate(rows)
        return logits

    def bystand(self) -> np.ndarray:
        """A step of the other session, taken back at once."""
        return self._probe(self.bystander)

    def quiet(self) -> tuple[dict[str, int], int]:
        """Live objects of the runtime once nothing is under way, and extents in use."""
        self.tier.settle(self.bystander.slot)
        for stream in (self.engine.stage.first.stream, self.tier.copy_stream, self.tier.side_stream):
            stream.synchronize()
        return live(), self.tier.pool.used


@dataclass(frozen=True)
class Expected:
    """What an undisturbed run gives."""

    results: list[np.ndarray]
    probes: list[np.ndarray]  # see `Scene.play`
    bystander: np.ndarray
    calls: dict[str, int]  # of each API in `Scene.play`, on a warm engine
    calls_fresh: dict[str, int]  # and on a fresh one, the first session included


def undisturbed(path: Path) -> Expected:
    count = lambda api: int(control().glm53_cpu_calls(api.encode()))
    fresh = {}
    for method in ({}, {"host_memory": "hostmalloc"}):
        with Scene(path, **method) as scene:
            before = {api: count(api) for api in FRESH}
            results, errors = scene.play([])
            scene.tier.host._ahead.close()
            assert not errors
            fresh |= {api: count(api) - before[api] for api, settings in FRESH.items() if settings == method}
            bystander = scene.bystand()
            calls: dict[str, int] = {}
            for fields in ({"copy_back": "copy2d"}, {}):
                scene.configure(fields)
                before = {api: count(api) for api in STEADY}
                scene.play([])
                calls |= {api: count(api) - before[api] for api, needed in STEADY.items() if needed == fields}
    probes: list[np.ndarray] = []
    with Scene(path) as scene:
        scene.play(probes, record=True)
    return Expected(results, probes, bystander, calls, fresh)


def fail(scene: Scene, api: str, nth: int, expected: Expected, conserved: bool) -> str:
    """Plays the calls with the nth call of `api` failing, and asserts what must hold after.

    "raised", "survived" if nothing was raised, or "not reached": how often an API is called may depend on the schedule.
    conserved: the scene was played before, so that nothing is allocated for good any more.
    """
    label = f"{api} {nth}"
    scene.configure(STEADY.get(api, {}))
    before, accounts = scene.quiet(), scene.engine.ledger.snapshot()
    made = control().glm53_cpu_calls(api.encode())
    control().glm53_cpu_seed(nth, 1)  # work left on a stream by the failed call then runs late
    control().glm53_cpu_fail(api.encode(), nth, 2)
    try:
        results, errors = scene.play(expected.probes)
    finally:
        control().glm53_cpu_fail(api.encode(), 0, 0)
        control().glm53_cpu_seed(0, 0)
    reached = control().glm53_cpu_calls(api.encode()) - made >= nth
    scene.tier.check()
    scene.engine.keys.check()
    scene.engine.ledger.check()
    assert len(errors) <= 1, f"{label}: one call failed and {errors} were raised"
    for index, (want, got) in enumerate(zip(expected.results, results, strict=True)):
        np.testing.assert_array_equal(want, got, err_msg=f"{label}, result {index}, after {errors}")
    np.testing.assert_array_equal(scene.bystand(), expected.bystander, err_msg=f"{label}: the other session, after {errors}")
    if conserved:
        assert scene.quiet() == before, f"{label}: {errors}"
        scene.engine.ledger.conserved(accounts)
    else:
        assert scene.quiet()[1] == before[1], f"{label}: {errors}"
    return "raised" if errors else "survived" if reached else "not reached"
