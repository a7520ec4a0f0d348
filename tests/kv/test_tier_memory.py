"""Memory of the host tier: what a session costs on the device, and host memory that is page-locked chunk by chunk, ahead of need, or not at all."""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

from glm53.errors import DeviceMemoryError, HipError
from glm53.hip import Device
from glm53.kv import HostTier, HostTierConfig, RowLayout
from glm53.kv import slabs as slabs_module
from glm53.kv.slabs import Slab, SlabAhead, free_slabs, make_slabs
from glm53.kv.store import RowStore
from glm53.mem.extents import ExtentShape
from glm53.mem.ledger import HOST, Ledger
from glm53.spec import RowFormat

CHUNK = 1 << 16
LAYOUT = RowLayout(RowFormat.BF16, latent=8, rope=8, groups=((0, 1), (2,)))  # 32 bytes a row and layer
SIZES: dict[str, Any] = {"hot_rows": 256, "step_rows_max": 8, "extent_rows": 1024, "sessions_max": 2, "topk": 32}


@pytest.fixture
def ledger() -> Ledger:
    return Ledger()


@pytest.fixture
def device(ledger: Ledger) -> Iterator[Device]:
    with Device(0, watch=partial(ledger.count, "device 0")) as device:
        yield device
        # Closing without free_buffers proves that each test gave everything back.


def session_bytes(device: Device, ledger: Ledger, rows: int) -> tuple[dict[str, int], dict[str, int]]:
    """Device bytes by category that a session of `rows` rows adds, and all of them."""
    stream = device.stream()
    tier = HostTier(device, stream, LAYOUT, HostTierConfig(rows_max=rows, **SIZES))
    keys = RowStore(device, stream, ExtentShape(1024, 2, 16), 2, rows, "index keys")
    before = ledger.by_place()["device 0"]
    slot = tier.open()
    keys.reserve(keys.open(slot), rows)
    tier.reserve(tier.sessions[slot], rows)
    assert tier.sessions[slot].history.reserved_rows >= rows
    places = ledger.by_place()
    assert places[HOST]["host history"] >= rows * LAYOUT.planes * LAYOUT.row_bytes
    tier.check()
    tier.free()
    keys.free()
    assert ledger.total() == 0 and ledger.peak("device 0") >= sum(places["device 0"].values())
    every = places["device 0"]
    return {name: size - before.get(name, 0) for name, size in every.items() if size != before.get(name, 0)}, every


def test_device_bytes_of_a_session_do_not_grow_with_its_rows(device: Device, ledger: Ledger) -> None:
    (small, all_small), (large, all_large) = (session_bytes(device, ledger, rows) for rows in (51_200, 1_048_576))
    assert small.keys() == large.keys() == {"index keys", "hot cache"}
    assert small["hot cache"] == large["hot cache"] == SIZES["hot_rows"] * LAYOUT.planes * LAYOUT.row_bytes
    # Of what all sessions share, tables and maps grow with the longest session, and the row references of a pass.
    assert {name for name in all_large if all_large[name] != all_small[name]} == {"index keys", "tables", "slot maps", "workspace"}


@pytest.mark.parametrize("method", ["register", "hostmalloc"])
@pytest.mark.parametrize("nth", [1, 2, 5])
def test_a_chunk_that_fails_undoes_the_others(method: str, nth: int, device: Device, ledger: Ledger, control: ctypes.CDLL) -> None:
    told: list[int] = []
    live = lambda: [control.glm53_cpu_live(what) for what in (b"registrations", b"host_allocations")]
    before = live()
    slabs = make_slabs(device, 5 * CHUNK - 4096, CHUNK, method, "host history", lambda done, total, what: told.append(done))
    assert [slab.byte_count for slab in slabs] == [CHUNK] * 4 + [CHUNK - 4096] and told == sorted(told) and told[-1] == 5 * CHUNK - 4096
    assert ledger.by_place() == {HOST: {"host history": 5 * CHUNK - 4096}}
    free_slabs(slabs)
    control.glm53_cpu_fail(b"hipHostRegister" if method == "register" else b"hipHostMalloc", nth, 2)
    with pytest.raises(DeviceMemoryError, match=rf"host history: chunk \d of 5, .* by {method} .*memlock limit .*ttm\.pages_limit.*AMD advises"):
        make_slabs(device, 5 * CHUNK - 4096, CHUNK, method, "host history")
    assert ledger.total(HOST) == 0 and live() == before


def test_an_interrupted_preparation_gives_everything_back(device: Device, ledger: Ledger) -> None:
    def stop(done: int, total: int, what: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_slabs(device, 5 * CHUNK, CHUNK, "register", "host history", stop)
    assert ledger.total(HOST) == 0


def test_release_says_how_long_it_took_and_has_a_bound(device: Device, ledger: Ledger, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "glm53")
    free_slabs(make_slabs(device, 2 * CHUNK, CHUNK, "register", "host history"))
    assert "released 131072 B (128.0 KiB) of host memory in" in caplog.text and ledger.total(HOST) == 0
    made = make_slabs(device, 2 * CHUNK, CHUNK, "register", "host history")
    free_slabs(list(made), seconds_max=-1)
    assert "stay page-locked until the process ends" in caplog.text and ledger.total(HOST) == 2 * CHUNK
    for slab in made:
        slab.free()
        slabs_module._left.remove(slab)


def test_the_next_slab_is_ready_before_it_is_needed(device: Device, ledger: Ledger) -> None:
    config = HostTierConfig(rows_max=1 << 14, chunk_bytes=4 * 1024 * LAYOUT.planes * LAYOUT.row_bytes, **SIZES)  # 4 extents a slab
    tier = HostTier(device, device.stream(), LAYOUT, config)
    session = tier.sessions[tier.open()]
    tier.reserve(session, 2048)
    tier.grow_ahead()
    assert tier.pool.capacity == 4 and tier.host._ahead._coming is None, "2 free extents hold the next 2 * extent_rows rows"
    tier.reserve(session, 3000)
    session.history.bypass(3000)  # as after a prompt
    tier.grow_ahead()
    coming = tier.host._ahead._coming
    assert coming is not None
    coming.result()
    tier.reserve(session, 3000)
    assert tier.pool.capacity == 4
    tier.grow_ahead()
    assert tier.pool.capacity == 8
    tier.check()
    tier.free()
    assert ledger.total() == 0


def test_a_failure_ahead_of_need_is_told_when_it_matters(device: Device, control: ctypes.CDLL, caplog: pytest.LogCaptureFixture) -> None:
    config = HostTierConfig(rows_max=1 << 14, chunk_bytes=2 * 1024 * LAYOUT.planes * LAYOUT.row_bytes, **SIZES)
    tier = HostTier(device, device.stream(), LAYOUT, config)
    session = tier.sessions[tier.open()]
    tier.reserve(session, 1)
    for outcome in ("raised", "logged"):
        tier.reserve(session, tier.pool.capacity * 1024)
        session.history.bypass(tier.pool.capacity * 1024 - session.history.rows)
        control.glm53_cpu_fail(b"hipHostRegister", 1, 2)
        tier.grow_ahead()
        tier.grow_ahead()
        assert tier.host._ahead._coming is not None
        with pytest.raises(DeviceMemoryError, match="chunk 1 of 1"):
            tier.host._ahead._coming.result()
        if outcome == "raised":
            with pytest.raises(DeviceMemoryError, match="chunk 1 of 1"):
                tier.reserve(session, tier.pool.capacity * 1024 + 1)
            tier.check()
    tier.free()
    assert "was not needed: host history: chunk 1 of 1" in caplog.text


def test_closing_waits_for_the_slab_on_its_way(device: Device, ledger: Ledger) -> None:
    going = threading.Event()

    def slow(byte_count: int) -> Slab:
        going.wait(5)
        return make_slabs(device, byte_count, byte_count, "register", "host history")[0]

    ahead = SlabAhead(slow)
    ahead.start(CHUNK)
    ahead.start(CHUNK)
    assert ahead.ready() is None
    threading.Timer(0.05, going.set).start()
    ahead.close()
    assert ledger.total(HOST) == 0 and ledger.peak(HOST) == CHUNK


@pytest.mark.parametrize("api", ["hipEventCreateWithFlags", "hipMemcpyAsync", "hipEventRecord"])
def test_a_table_that_could_not_be_sent_is_sent_by_the_next_reserve(api: str, device: Device, control: ctypes.CDLL) -> None:
    stream = device.stream()
    store = RowStore(device, stream, ExtentShape(64, 1, 16), 2, 1024, "index keys")
    slot = store.open()
    store.reserve(slot, 64)
    control.glm53_cpu_fail(api.encode(), 1, 2)
    with pytest.raises(HipError, match=api):
        store.reserve(slot, 200)
    store.check()
    store.reserve(slot, 200)
    np.testing.assert_array_equal(store.tables.numpy(stream)[slot, :4], store._histories[slot].addresses)
    store.free()


@pytest.mark.parametrize("api", ["hipEventCreateWithFlags", "hipMemcpyAsync", "hipEventRecord"])
def test_a_session_is_made_whole_before_its_next_use(api: str, device: Device, control: ctypes.CDLL) -> None:
    """What the failed call left on a stream is waited for, the extents it took are given back, and the next one sends its table."""
    tier = HostTier(device, device.stream(), LAYOUT, HostTierConfig(rows_max=1 << 14, **SIZES))
    slot = tier.open()
    session = tier.sessions[slot]
    tier.reserve(session, 1024)
    control.glm53_cpu_fail(api.encode(), 1, 2)
    with pytest.raises(HipError, match=api):
        tier.reserve(session, 5000)
    control.glm53_cpu_seed(ctypes.c_uint64(1), 1)
    try:
        for _ in range(200):
            tier.side_stream.fill(tier.staging.address, 1, tier.staging.byte_count)
        tier.ready([slot])
        assert tier.side_stream.query(), "work of a failed call is still under way"
    finally:
        control.glm53_cpu_seed(ctypes.c_uint64(0), 0)
    tier.check()
    assert tier.pool.used == 0, "a session without rows keeps extents"
    tier.reserve(session, 5000)
    np.testing.assert_array_equal(tier.tables.numpy(tier.stream)[slot, :5], session.history.addresses)
    tier.free()
