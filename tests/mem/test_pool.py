"""The buffer pool against a simulated device: exact long-lived capacities, bounded waste, room, and accounting by capacity."""

from __future__ import annotations

import random

import numpy as np
import pytest

from glm53.errors import DeviceMemoryError
from glm53.mem.ledger import Ledger
from glm53.mem.pool import CACHED_CATEGORY, Allocate, Block, BufferPool, Life, Use

MIB = 1 << 20
PLACE = "device 0"


class Device:
    """A device's allocator: first fit over `size` bytes, and the binding that does what the pool decides."""

    def __init__(self, pool: BufferPool, size: int):
        self.pool, self.size = pool, size
        self.spans: dict[int, int] = {}  # address -> bytes

    @property
    def used(self) -> int:
        return sum(self.spans.values())

    def malloc(self, byte_count: int) -> int | None:
        address = 4096
        for begin in sorted(self.spans):
            if begin - address >= byte_count:
                break
            address = begin + self.spans[begin]
        if address + byte_count > 4096 + self.size:
            return None
        self.spans[address] = byte_count
        return address

    def release(self, blocks: tuple[Block, ...]) -> None:
        for block in blocks:
            assert self.spans.pop(block.address) == block.capacity
            self.pool.released(block)

    def get(self, byte_count: int, life: Life, category: str) -> Block | None:
        decision = self.pool.request(byte_count, life, category)
        if isinstance(decision, Use):
            return decision.block
        self.release(decision.release)
        while (address := self.malloc(decision.capacity)) is None:
            more = self.pool.make_room(1)
            if not more:
                return None
            self.release(more)
        return self.pool.adopt(address, decision.capacity, byte_count, life, category)


def device_of(size: int = 1024 * MIB, **options: int) -> Device:
    return Device(BufferPool(PLACE, Ledger(), **options), size)


def got(block: Block | None) -> Block:
    assert block is not None
    return block


def test_long_lived_buffers_do_not_retain_oversized_blocks() -> None:
    device = device_of()
    pool, ledger = device.pool, device.pool.ledger
    prefill = [got(device.get(size * MIB, Life.TEMPORARY, "activations")) for size in (1, 16, 64, 128, 256)]
    for block in prefill:
        pool.give_back(block)
    assert pool.cached_bytes == ledger.balance(PLACE, CACHED_CATEGORY).byte_count == 465 * MIB
    sizes = [40_000, MIB // 2, MIB - 300, 60 * MIB, 255 * MIB]
    held = [got(device.get(size, Life.LONG, "hot cache")) for size in sizes]
    pool.check()
    assert [block.capacity for block in held] == [pool.capacity_for(size) for size in sizes], "a long-lived buffer got a larger block"
    assert not {block.address for block in held} & {block.address for block in prefill}
    assert ledger.balance(PLACE, "hot cache").byte_count == sum(block.capacity for block in held)
    for block in pool.trim():
        device.release((block,))
    assert device.used == ledger.total(PLACE) == sum(pool.capacity_for(size) for size in sizes), "large blocks stay behind small buffers"


def test_long_lived_request_takes_a_cached_block_of_its_very_capacity() -> None:
    device = device_of()
    block = got(device.get(1000, Life.TEMPORARY, "activations"))
    device.pool.give_back(block)
    assert device.pool.request(1024, Life.LONG, "tables") == Use(block)
    assert device.pool.wasted_bytes == 0 and device.pool.ledger.balance(PLACE, "tables").byte_count == 1024
    device.pool.check()


def test_temporaries_take_the_best_fit_up_to_the_waste_bound() -> None:
    device = device_of(waste_max_percent=25)
    blocks = {size: got(device.get(size * 1024, Life.TEMPORARY, "activations")) for size in (200, 100, 120, 110)}
    for block in blocks.values():
        device.pool.give_back(block)
    pool = device.pool
    assert pool.request(96 * 1024, Life.TEMPORARY, "a") == Use(blocks[100])
    assert pool.request(96 * 1024, Life.TEMPORARY, "a") == Use(blocks[110])
    assert pool.request(96 * 1024, Life.TEMPORARY, "a") == Use(blocks[120])
    assert pool.request(159 * 1024, Life.TEMPORARY, "a") == Allocate(159 * 1024, ()), "25 % are 198.75 KiB"
    assert pool.request(160 * 1024, Life.TEMPORARY, "a") == Use(blocks[200])
    assert pool.wasted_bytes == (4 + 14 + 24 + 40) * 1024
    pool.check()


def test_accounting_is_by_capacity() -> None:
    device = device_of(alignment_bytes=4096)
    block = got(device.get(1, Life.LONG, "tables"))
    assert block.capacity == 4096 == device.pool.lent_bytes == device.pool.ledger.total(PLACE) and device.pool.wasted_bytes == 4095


def test_limit_is_kept_by_releasing_first() -> None:
    device = device_of(limit_bytes=10 * MIB)
    pool = device.pool
    small, large, middle = (got(device.get(size * MIB, Life.TEMPORARY, "a")) for size in (1, 5, 3))
    for block in (small, large, middle):
        pool.give_back(block)
    decision = pool.request(4 * MIB - 100, Life.LONG, "rows")
    assert decision == Allocate(4 * MIB, (middle,)), "3 MiB too much: the smallest block that suffices"
    pool.check()
    with pytest.raises(ValueError, match="release first"):
        pool.adopt(1 << 30, 4 * MIB, 4 * MIB - 100, Life.LONG, "rows")
    assert pool.allocated_bytes == 9 * MIB, "a leaving block counts until the device has it"
    device.release((middle,))
    got(device.get(4 * MIB, Life.LONG, "rows"))
    before = pool.ledger.snapshot()
    with pytest.raises(DeviceMemoryError, match=r"device 0: 7340032 B \(7.0 MiB\) for rows do not fit: the limit is 10485760 B"):
        pool.request(7 * MIB, Life.LONG, "rows")
    pool.ledger.conserved(before)
    assert pool.request(6 * MIB, Life.LONG, "rows") == Allocate(6 * MIB, (large, small))
    pool.check()


def test_limit_that_is_one_byte_short_refuses() -> None:
    device = device_of(limit_bytes=10 * MIB - 1)
    device.pool.give_back(got(device.get(4 * MIB, Life.TEMPORARY, "a")))
    with pytest.raises(DeviceMemoryError, match="do not fit"):
        device.pool.request(10 * MIB, Life.LONG, "rows")
    assert device.pool.request(10 * MIB - 256, Life.LONG, "rows") == Allocate(10 * MIB - 256, (Block(0, 4096, 4 * MIB),))


def test_trim_keeps_what_is_asked() -> None:
    device = device_of()
    for block in [got(device.get(size * MIB, Life.TEMPORARY, "a")) for size in (4, 2, 8)]:
        device.pool.give_back(block)
    assert device.pool.trim(14 * MIB) == ()
    assert [block.capacity // MIB for block in device.pool.trim(7 * MIB)] == [8]
    assert [block.capacity // MIB for block in device.pool.trim()] == [4, 2]
    assert device.pool.trim() == () and device.pool.cached_bytes == 0
    device.pool.check()


def test_refusals() -> None:
    for options in ({"alignment_bytes": 0}, {"alignment_bytes": 48}, {"limit_bytes": -1}, {"waste_max_percent": -1}):
        with pytest.raises(ValueError, match="wanted"):
            BufferPool(PLACE, Ledger(), **options)
    pool = BufferPool(PLACE, Ledger())
    for size, category in ((0, "a"), (-5, "a"), (1, CACHED_CATEGORY)):
        with pytest.raises(ValueError, match="wanted at least one"):
            pool.request(size, Life.LONG, category)
        with pytest.raises(ValueError, match="wanted at least one"):
            pool.adopt(4096, 256, size, Life.LONG, category)
    for address, capacity in ((4096, 512), (4097, 256), (0, 256), (4096, 128)):
        with pytest.raises(ValueError, match="wanted an address"):
            pool.adopt(address, capacity, 200, Life.LONG, "a")
    block = pool.adopt(4096, 1024, 1000, Life.LONG, "a")
    for address in (4096, 4096 + 768, 4096 - 256):
        with pytest.raises(ValueError, match="overlaps the block at 0x1000"):
            pool.adopt(address, 512, 512, Life.LONG, "a")
    with pytest.raises(AssertionError, match="LENT, wanted LEAVING"):
        pool.released(block)
    pool.give_back(block)
    with pytest.raises(AssertionError, match="CACHED, wanted LENT"):
        pool.give_back(block)
    with pytest.raises(AssertionError, match="not in the pool"):
        pool.give_back(Block(0, 8192, 1024))
    with pytest.raises(AssertionError, match="not in the pool"):
        pool.give_back(Block(99, 4096, 1024))
    (leaving,) = pool.trim()
    with pytest.raises(AssertionError, match="LEAVING, wanted LENT"):
        pool.give_back(leaving)
    pool.released(leaving)
    with pytest.raises(AssertionError, match="not in the pool"):
        pool.released(leaving)
    pool.check()
    pool.ledger.conserved({})


@pytest.mark.parametrize("field, value, message", [("capacity", 4096, "hold 4096"), ("state", 1, "category"), ("asked", 1, "hold 1024")])
def test_check_finds_a_corrupted_block(field: str, value: int, message: str) -> None:
    pool = BufferPool(PLACE, Ledger())
    block = pool.adopt(4096, 1024, 1000, Life.LONG, "a")
    pool.check()
    pool._blocks[field][block.index] = value
    with pytest.raises(AssertionError, match=message):
        pool.check()


@pytest.mark.parametrize("limit", [0, 60_000])
@pytest.mark.parametrize("seed", range(6))
def test_random_requests_on_a_small_device(seed: int, limit: int) -> None:
    """Every lent byte is written by its owner and read back, decisions match a brute-force search, the books match the device."""
    rng = random.Random(seed)
    device = device_of(80_000, limit_bytes=limit)
    pool, memory = device.pool, np.zeros(4096 + 80_000, np.int64)
    live: list[tuple[Block, int, Life]] = []
    cached: list[Block] = []
    for serial in range(1, 600):
        if live and rng.random() < 0.45:
            block, owner, _ = live.pop(rng.randrange(len(live)))
            assert (memory[block.address : block.address + block.capacity] == owner).all(), "two owners of a byte"
            pool.give_back(block)
            cached.append(block)
        else:
            size, life = rng.randint(1, 9000), rng.choice(list(Life))
            aligned = -(-size // 256) * 256
            most = aligned if life is Life.LONG else max(aligned, size * 125 // 100)
            fits = sorted((block.capacity, block.index, block) for block in cached if aligned <= block.capacity <= most)
            try:
                block = device.get(size, life, rng.choice(["rows", "tables"]))
            except DeviceMemoryError:
                assert limit and not fits and pool.lent_bytes + aligned > limit
                continue
            cached = [old for old in cached if device.spans.get(old.address) == old.capacity and old != block]
            if block is None:
                assert not fits and not cached, "refused with cached blocks left"
                continue
            assert not fits or block == fits[0][2]
            memory[block.address : block.address + block.capacity] = serial
            live.append((block, serial, life))
        pool.check()
        assert device.used == pool.allocated_bytes == pool.ledger.total(PLACE)
        assert pool.cached_bytes == sum(block.capacity for block in cached)
    for block, _, _ in live:
        pool.give_back(block)
    device.release(pool.trim())
    pool.check()
    pool.ledger.conserved({})
    assert not device.spans
