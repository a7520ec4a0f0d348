"""Closing when a call that gives memory back fails: a clear error, all the rest given back, nothing left in the ledger."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import fault_scene
import numpy as np
import pytest
from fault_scene import Scene

from glm53.errors import HipError
from glm53.hip import Device, runtime
from glm53.kv import KvCache
from glm53.mem.ledger import Ledger

LEFT: dict[str, dict[str, int]] = {  # by failing call: what stays alive
    "hipFree": {"allocations": 1},
    "hipHostUnregister": {"registrations": 1},
    "hipHostFree": {"host_allocations": 1},
    "hipStreamDestroy": {"streams": 1},
    "hipStreamSynchronize": {},
}
METHOD: dict[str, dict[str, Any]] = {"hipHostFree": {"host_memory": "hostmalloc"}}
INVALID = 1  # hipErrorInvalidValue


@pytest.fixture(autouse=True)
def cpu() -> Iterator[None]:
    if runtime.select().name != "cpu":
        pytest.skip("faults are the cpu runtime's to choose")
    yield
    for api in LEFT:
        fault_scene.control().glm53_cpu_fail(api.encode(), 0, 0)


def calls(api: str) -> int:
    return int(fault_scene.control().glm53_cpu_calls(api.encode()))


def check_close(api: str, opened: Callable[[], tuple[Any, Ledger]]) -> None:
    """`opened` gives something to close and the ledger of its memory; a sample of the calls of `api` that closing makes fails."""
    made, _ = opened()
    before = calls(api)
    made.close()
    count = calls(api) - before
    assert count > 0, f"closing makes no {api}"
    for nth in sorted({1, (count + 1) // 2, count}):
        idle = fault_scene.live()
        made, ledger = opened()
        fault_scene.control().glm53_cpu_fail(api.encode(), nth, INVALID)
        with pytest.raises(HipError, match=api):
            made.close()
        ledger.conserved({})
        now = fault_scene.live()
        left = {kind: now[kind] - idle[kind] for kind in now if kind != "allocated_bytes" and now[kind] != idle[kind]}
        assert left == LEFT[api], f"{api} {nth} of {count} failed and {left} are left"
        made.close()  # again is not an error


@pytest.mark.parametrize("api", LEFT)
def test_closing_an_engine(api: str, make_checkpoint: Callable[..., Path]) -> None:
    path = make_checkpoint(**fault_scene.CHECKPOINT)

    def opened() -> tuple[Any, Ledger]:
        engine = Scene(path, **METHOD.get(api, {})).engine
        assert engine.ledger.total() > 0
        return engine, engine.ledger

    check_close(api, opened)


@pytest.mark.parametrize("lent", [False, True])
@pytest.mark.parametrize(("tier", "api"), [*(("host", api) for api in LEFT), *(("resident", api) for api in LEFT if not api.startswith("hipHost"))])
def test_closing_a_cache(tier: str, api: str, lent: bool) -> None:
    devices: list[Device] = []
    sizes: dict[str, Any] = {"hot_rows": 256, "topk_max": 32, "rows_max": 2048, "extent_rows": 64, "row_format": "f32", "sessions_max": 2}

    def opened() -> tuple[Any, Ledger]:
        ledger = Ledger()
        device = Device(0, watch=partial(ledger.count, "device 0"))
        devices.append(device)
        cache = KvCache(device, tier=tier, layers=2, latent=8, rope=8, **sizes, **METHOD.get(api, {}))
        for _ in range(2):
            session = cache.open()
            session.append(np.ones((600, 2, 16), np.float32))
            session.gather(0, np.arange(32)[None, :])
        if not lent:
            cache._owns_device = True  # as where the cache opened it
        return cache, ledger

    check_close(api, opened)
    for device in devices:
        assert device.closed or lent
        device.close()  # nothing of the cache is left on a device that stays the caller's
