"""The buffer pool by itself: exact long-lived capacities, bounded waste, and cached bytes that never cost more than the peak of the lent ones."""

from __future__ import annotations

import random

import pytest

from glm53.mem.pool import Allocate, BufferPool, Life, Use

MIB = 1 << 20


class Device:
    """The binding: allocations by index, as `glm53.kv.blocks` has them."""

    def __init__(self) -> None:
        self.pool = BufferPool()
        self.blocks: dict[int, int] = {}  # index -> bytes

    def get(self, byte_count: int, life: Life) -> int:
        decision = self.pool.request(byte_count, life)
        if isinstance(decision, Use):
            return decision.index
        self.release(decision.release)
        index = self.pool.adopt(byte_count, life)
        assert index not in self.blocks, "a place was given twice"
        self.blocks[index] = byte_count
        return index

    def release(self, indices: tuple[int, ...]) -> None:
        for index in indices:
            del self.blocks[index]


def filled(*sizes: int) -> tuple[Device, list[int]]:
    """A pool with cached blocks of these sizes, and their indices."""
    device = Device()
    indices = [device.get(size, Life.TEMPORARY) for size in sizes]
    for index in indices:
        device.pool.give_back(index)
    return device, indices


def test_long_lived_buffers_do_not_retain_oversized_blocks() -> None:
    device, prefill = filled(*(size * MIB for size in (1, 16, 64, 128, 256)))
    sizes = [40_000, MIB // 2, MIB - 1, 60 * MIB, 128 * MIB, 255 * MIB]
    held = [device.get(size, Life.LONG) for size in sizes]
    device.pool.check()
    assert [device.blocks[index] for index in held] == sizes, "a long-lived buffer got a larger block"
    assert held[4] == prefill[3], "a block of exactly the bytes was not used"
    device.release(device.pool.make_room(1 << 40))
    assert sum(device.blocks.values()) == sum(sizes) == device.pool.lent_bytes and device.pool.cached_bytes == 0


def test_temporaries_take_the_best_fit_up_to_the_waste_bound() -> None:
    device, (of_200, of_100, of_120, of_110) = filled(200_000, 100_000, 120_000, 110_000)
    pool = device.pool
    assert [pool.request(96_000, Life.TEMPORARY) for _ in range(3)] == [Use(of_100), Use(of_110), Use(of_120)]
    assert pool.request(160_000, Life.TEMPORARY) == Use(of_200)
    pool.give_back(of_200)
    assert pool.request(159_999, Life.TEMPORARY) == Allocate((of_200,)), "a fourth more is 199,998 bytes; with both, more than was ever lent"
    pool.check()


def test_a_growing_temporary_does_not_leave_its_smaller_ones_behind() -> None:
    device = Device()
    for rows in range(1, 200):
        pair = [device.get(rows * 4096, Life.TEMPORARY) for _ in range(2)]
        assert sum(device.blocks.values()) <= 2 * rows * 4096, f"at {rows}: {device.blocks}"
        for index in pair:
            device.pool.give_back(index)
        device.pool.check()


def test_room_is_the_fewest_blocks_that_suffice() -> None:
    device, (of_4, of_2, of_8) = filled(4 * MIB, 2 * MIB, 8 * MIB)
    assert device.pool.make_room(0) == device.pool.make_room(-1) == ()
    assert device.pool.make_room(3 * MIB) == (of_4,), "the smallest block that suffices"
    assert device.pool.make_room(9 * MIB) == (of_8, of_2)
    assert device.pool.make_room(1) == () and device.pool.cached_bytes == 0
    device.pool.check()


def test_refusals() -> None:
    pool = BufferPool()
    for size in (0, -5):
        with pytest.raises(ValueError, match="wanted at least one"):
            pool.request(size, Life.LONG)
    index = pool.adopt(1024, Life.LONG)
    pool.give_back(index)
    with pytest.raises(AssertionError, match="CACHED, wanted LENT"):
        pool.give_back(index)
    assert pool.make_room(1) == (index,)
    with pytest.raises(AssertionError, match="ABSENT, wanted LENT"):
        pool.give_back(index)
    pool.check()


@pytest.mark.parametrize("field, value, message", [("capacity", 4096, "hold 4096"), ("state", 1, "life"), ("asked", 1, "hold 1024")])
def test_check_finds_a_corrupted_block(field: str, value: int, message: str) -> None:
    pool = BufferPool()
    index = pool.adopt(1024, Life.LONG)
    pool.check()
    pool._blocks[field][index] = value
    with pytest.raises(AssertionError, match=message):
        pool.check()


@pytest.mark.parametrize("seed", range(6))
def test_random_requests(seed: int) -> None:
    """Decisions match a brute-force search, no block has two owners, and the bytes match the device's."""
    rng = random.Random(seed)
    device = Device()
    pool = device.pool
    live: list[int] = []
    peak = 0
    for _ in range(600):
        if live and rng.random() < 0.48:
            pool.give_back(live.pop(rng.randrange(len(live))))
        else:
            size, life = rng.choice([rng.randint(1, 9000), 4096]), rng.choice(list(Life))
            most = size if life is Life.LONG else size * 125 // 100
            fits = sorted((capacity, index) for index, capacity in device.blocks.items() if index not in live and size <= capacity <= most)
            index = device.get(size, life)
            assert index not in live, "a block has two owners"
            assert index == fits[0][1] if fits else device.blocks[index] == size
            live.append(index)
        pool.check()
        lent = sum(device.blocks[index] for index in live)
        peak = max(peak, lent)
        assert (lent, sum(device.blocks.values())) == (pool.lent_bytes, pool.lent_bytes + pool.cached_bytes)
        assert sum(device.blocks.values()) <= peak
