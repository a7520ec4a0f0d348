"""The pool of the host tier on a device: sessions behind large blocks that a prefill left, cached memory given back before memory is wanting."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

from glm53.errors import DeviceMemoryError
from glm53.hip import Array, Device
from glm53.kv import HostTier, HostTierConfig, RowLayout
from glm53.kv.blocks import CACHED, DeviceBlocks
from glm53.kv.passes import PassRows
from glm53.mem.ledger import Ledger
from glm53.mem.pool import Life
from glm53.spec import RowFormat

LAYOUT = RowLayout(RowFormat.BF16, latent=8, rope=8, groups=((0, 1), (2,)))  # 32 bytes a row and layer
SIZES: dict[str, Any] = {"hot_rows": 256, "step_rows_max": 8, "extent_rows": 1024, "sessions_max": 4, "topk": 32, "rows_max": 1 << 14}
HOT_BYTES = SIZES["hot_rows"] * LAYOUT.planes * LAYOUT.row_bytes


@pytest.fixture
def ledger() -> Ledger:
    return Ledger()


@pytest.fixture
def device(ledger: Ledger) -> Iterator[Device]:
    with Device(0, watch=partial(ledger.count, "device 0")) as device:
        yield device
        # Closing without free_buffers proves that each test gave everything back.


def append(tier: HostTier, slot: int, count: int, attend: bool = True) -> None:
    """`count` rows of a prompt, written by nobody."""
    first = tier.rows(slot)
    positions, sessions = np.arange(first, first + count, dtype=np.int32), np.full(count, slot, np.int32)
    arrays = [Array.from_numpy(tier.device, values, category="test") for values in (positions, sessions)]
    tier_pass = tier.begin(PassRows(positions, sessions, *arrays), prefill=True, attend=attend)
    for layer in range(LAYOUT.planes):
        tier_pass.before_store(layer)
        tier_pass.before_attention(layer)
        tier_pass.after_attention(layer)
    tier_pass.finish()
    tier.stream.synchronize()
    for array in arrays:
        array.free()


def account(ledger: Ledger, category: str) -> int:
    return ledger.by_place()["device 0"].get(category, 0)


def test_hot_buffers_do_not_keep_the_large_blocks_of_a_prefill(device: Device, ledger: Ledger) -> None:
    tier = HostTier(device, device.stream(), LAYOUT, HostTierConfig(**SIZES))
    staging = account(ledger, "staging")
    # Blocks a little larger than a hot buffer, that a best fit would take, and much larger ones.
    oversized = [tier.blocks.lend(size, Life.TEMPORARY, "staging") for size in (HOT_BYTES + 1, HOT_BYTES * 5 // 4, 1 << 20, 1 << 22)]
    for buffer in oversized:
        tier.blocks.put_back(buffer)
    assert account(ledger, "staging") == staging and account(ledger, CACHED) == sum(buffer.byte_count for buffer in oversized)
    slots = [tier.open() for _ in range(3)]
    hot = [tier.sessions[slot].hot for slot in slots]
    assert [buffer.byte_count for buffer in hot] == [HOT_BYTES] * 3 and not {id(buffer) for buffer in hot} & {id(buffer) for buffer in oversized}
    assert account(ledger, "hot cache") == 3 * HOT_BYTES
    tier.check()
    tier.blocks.give_back_cached()
    assert account(ledger, CACHED) == 0, "large blocks stay behind small buffers"
    tier.close(slots[1])
    assert account(ledger, CACHED) == HOT_BYTES
    again = tier.open()
    assert tier.sessions[again].hot is hot[1], "a block of exactly the bytes was not used again"
    tier.free()
    assert ledger.total() == 0


def test_streamed_prompts_share_their_buffers_and_leave_them_behind(device: Device, ledger: Ledger) -> None:
    tier = HostTier(device, device.stream(), LAYOUT, HostTierConfig(**SIZES))
    fixed = {name: account(ledger, name) for name in ("staging", "workspace", "tables", "slot maps")}
    first, second = tier.open(), tier.open()
    linear = 4096 * LAYOUT.row_bytes
    for slot in (first, second, first):
        append(tier, slot, 1000)
        assert account(ledger, CACHED) == 2 * linear and {name: account(ledger, name) for name in fixed} == fixed
    append(tier, second, 5000)
    assert account(ledger, CACHED) == 4 * linear, "the smaller buffers stay behind the larger ones"
    tier.check()
    tier.close(first)
    tier.close(second)
    assert tier.blocks.pool.lent_bytes == 0 and account(ledger, CACHED) <= 4 * linear + 2 * HOT_BYTES
    tier.free()
    assert ledger.total() == 0


def test_cached_memory_is_given_back_before_an_allocation_fails(device: Device, ledger: Ledger, control: ctypes.CDLL) -> None:
    blocks = DeviceBlocks(device)
    kept, spare = blocks.lend(4096, Life.LONG, "hot cache"), blocks.lend(1 << 20, Life.TEMPORARY, "staging")
    blocks.put_back(spare)
    control.glm53_cpu_fail(b"hipMalloc", 1, 2)
    other = device.alloc(512, category="index keys")  # by somebody who knows nothing of the blocks
    assert spare.freed and not kept.freed and ledger.by_place() == {"device 0": {"hot cache": 4096, "index keys": 512}}
    # With nothing cached the error is told, and so is that of a second attempt that fails too.
    control.glm53_cpu_fail(b"hipMalloc", 1, 2)
    with pytest.raises(DeviceMemoryError, match="not enough memory for staging"):
        blocks.lend(1 << 20, Life.TEMPORARY, "staging")
    blocks.check()
    with pytest.raises(DeviceMemoryError, match=r"not enough memory for staging.*asked"):
        blocks.lend(1 << 60, Life.TEMPORARY, "staging")
    blocks.check()
    other.free()
    blocks.free()
    assert not device.spare and ledger.total() == 0


def test_an_append_without_attention_brings_nothing_in(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    from glm53.kv import host_passes

    gathered: list[int] = []
    gather_plane = host_passes.rows.gather_plane
    monkeypatch.setattr(host_passes.rows, "gather_plane", lambda *args, **named: (gathered.append(named["rows"]), gather_plane(*args, **named)))
    tier = HostTier(device, device.stream(), LAYOUT, HostTierConfig(**SIZES))
    slot = tier.open()
    append(tier, slot, 600)
    append(tier, slot, 500)
    assert gathered == [600] * LAYOUT.planes
    append(tier, slot, 500, attend=False)
    assert gathered == [600] * LAYOUT.planes, "earlier rows were brought in and nobody reads them"
    tier.free()


def test_a_cache_appends_without_bringing_the_history_in(monkeypatch: pytest.MonkeyPatch) -> None:
    from glm53.kv import KvCache, host_passes

    monkeypatch.setattr(host_passes.rows, "gather_plane", lambda *args, **named: pytest.fail("the history was brought in"))
    rng = np.random.default_rng(3)
    rows = rng.standard_normal((900, 3, 16)).astype(np.float32)
    sizes = {"hot_rows": 256, "topk_max": 32, "rows_max": 2048, "extent_rows": 64}
    with KvCache(layers=3, latent=8, rope=8, row_format="f32", **sizes) as cache, cache.open() as session:
        for first, last in ((0, 300), (300, 305), (305, 600), (600, 900)):
            session.append(rows[first:last])
        positions = rng.permutation(900)[: 8 * 32].reshape(8, 32)
        for layer in range(3):
            np.testing.assert_array_equal(session.gather(layer, positions).numpy()[0], rows[positions, layer])
        assert cache.ledger()[f"device {cache.device.index}"][CACHED] > 0
