"""The extent pool and histories against a naive twin under random operations, and their refusals."""

from __future__ import annotations

import heapq
import random

import numpy as np
import pytest

from glm53.mem.extents import ExtentPool, ExtentShape, GroupedShape
from glm53.mem.history import History, OutOfExtents

SHAPE = ExtentShape(extent_rows=64, planes=3, row_bytes=48)


def pool_of(extents: int) -> ExtentPool:
    pool = ExtentPool(SHAPE)
    pool.add_slab(1 << 20, extents)
    return pool


def test_shape_arithmetic() -> None:
    assert SHAPE.extent_bytes == 64 * 3 * 48
    assert SHAPE.plane_bytes == 64 * 48
    assert [SHAPE.extents_for(rows) for rows in (0, 1, 64, 65)] == [0, 1, 1, 2]


@pytest.mark.parametrize("groups", [(3,), (1, 2), (2, 1), (1, 1, 1)])
def test_group_major_rows_are_disjoint_and_where_the_views_have_them(groups: tuple[int, ...]) -> None:
    shape = GroupedShape(64, 3, 48, groups)
    assert (shape.extent_bytes, shape.extents_for(65)) == (SHAPE.extent_bytes, 2)
    words = np.zeros(shape.extent_bytes, np.uint8)
    plane = 0
    for group, (planes, view) in enumerate(zip(groups, shape.views(words), strict=True)):
        place = shape.place(group)
        assert shape.first_plane(group) == plane and view.shape == (64, planes, 48) and np.shares_memory(view, words)
        for row, index in np.ndindex(64, planes):
            offset = place.row_offset(row + 640, plane + index)
            assert not words[offset : offset + 48].any(), "rows overlap"
            view[row, index] = 1 + plane + index
            assert (words[offset : offset + 48] == 1 + plane + index).all()
        plane += planes
    assert words.all()
    if groups == (1, 1, 1):
        assert [shape.place(group).row_offset(5, group) for group in range(3)] == [group * SHAPE.plane_bytes + 5 * 48 for group in range(3)]


@pytest.mark.parametrize("groups", [(), (2,), (2, 2), (0, 3), (4, -1)])
def test_groups_that_are_not_the_planes(groups: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="groups of"):
        GroupedShape(64, 3, 16, groups)


@pytest.mark.parametrize("rows, planes, row_bytes", [(0, 1, 16), (63, 1, 16), (64, 0, 16), (64, 1, 0), (64, 1, 20)])
def test_shape_refuses(rows: int, planes: int, row_bytes: int) -> None:
    with pytest.raises(ValueError):
        ExtentShape(rows, planes, row_bytes)


def test_slabs_must_not_overlap() -> None:
    pool = pool_of(4)
    with pytest.raises(ValueError, match="overlaps"):
        pool.add_slab((1 << 20) + 3 * SHAPE.extent_bytes, 1)
    pool.add_slab((1 << 20) + 4 * SHAPE.extent_bytes, 1)
    pool.check()
    assert pool.capacity == 5


def test_host_addresses_lie_beside_device_addresses() -> None:
    pool = ExtentPool(SHAPE)
    pool.add_slab(1 << 20, 2, host_address=1 << 40)
    pool.add_slab(1 << 21, 1)
    taken = pool.take_many(3)
    assert taken is not None and pool.used == 3
    size = SHAPE.extent_bytes
    assert [pool.address(e) for e in taken] == list(pool.addresses(taken)) == [1 << 20, (1 << 20) + size, 1 << 21]
    assert [pool.host_address(e) for e in taken] == [1 << 40, (1 << 40) + size, 0]
    with pytest.raises(ValueError, match="overlaps the slab at 0x10000000000"):
        pool.add_slab(1 << 22, 1, host_address=(1 << 40) + size)
    assert pool.capacity == 3
    pool.check()


@pytest.mark.parametrize("address, extents, host_address", [(0, 1, 0), (8, 1, 0), (16, 0, 0), (16, 1, 8), (16, 1, -16)])
def test_slab_refuses(address: int, extents: int, host_address: int) -> None:
    pool = ExtentPool(SHAPE)
    with pytest.raises(ValueError, match="wanted positive, 16-byte aligned"):
        pool.add_slab(address, extents, host_address)
    assert pool.capacity == 0 and pool.take() is None


@pytest.mark.parametrize("action", ["address", "host_address", "share", "release"])
def test_free_and_foreign_extents_are_refused(action: str) -> None:
    pool = pool_of(2)
    for extent in (1, 2, -1):
        with pytest.raises(AssertionError, match=f"of extent {extent}, which is free"):
            getattr(pool, action)(extent)
    with pytest.raises(AssertionError, match="of 2"):
        pool.references(2)
    with pytest.raises(AssertionError, match="take of -1"):
        pool.take_many(-1)
    pool.check()


@pytest.mark.parametrize("seed", range(3))
def test_many_extents_come_lowest_first(seed: int) -> None:
    """100,000 extents in batches against a heap of Python's own, references included."""
    rng = np.random.default_rng(seed)
    pool, count = pool_of(100_000), 100_000
    free, held = list(range(count)), np.zeros(count, np.int64)
    for _ in range(60):
        batch = int(rng.integers(1, 5000))
        if rng.random() < 0.6 and batch <= len(free):
            taken = pool.take_many(batch)
            assert taken is not None and taken.tolist() == [heapq.heappop(free) for _ in range(batch)]
            held[taken] += 1
        elif held.any():
            some = rng.permutation(np.flatnonzero(held))[:batch]
            if rng.random() < 0.3:
                pool.share_many(some)
                held[some] += 1
            else:
                held[some] -= 1
                freed = some[held[some] == 0].tolist()
                assert pool.release_many(some) == len(freed)
                for extent in freed:
                    heapq.heappush(free, extent)
        assert pool.free == len(free) and np.array_equal(pool.reference_counts(np.arange(count)), held)
        pool.check()


@pytest.mark.parametrize("field, value, message", [("references", 1, "zero counts"), ("references", -1, "negative"), ("address", 1 << 20, "overlap")])
def test_check_finds_a_corrupted_extent(field: str, value: int, message: str) -> None:
    pool = pool_of(4)
    pool._extents[field][2] = value
    with pytest.raises(AssertionError, match=message):
        pool.check()


def test_reserve_takes_nothing_when_short() -> None:
    pool = pool_of(2)
    history = History(pool)
    with pytest.raises(OutOfExtents) as short:
        history.reserve(3 * 64)
    assert short.value.missing == 1 and pool.free == 2 and history.reserved_rows == 0


def test_released_twice_is_refused() -> None:
    pool = pool_of(1)
    extent = pool.take()
    assert extent is not None and pool.release(extent)
    with pytest.raises(AssertionError, match="free"):
        pool.release(extent)


@pytest.mark.parametrize("seed", range(20))
def test_random_operations_match_a_twin(seed: int) -> None:
    rng = random.Random(seed)
    pool = ExtentPool(SHAPE)
    next_address = 1 << 20
    histories: list[tuple[History, int]] = []  # with the twin's row count
    memory: dict[int, int] = {}  # address -> owner, as the twin sees it
    for _ in range(400):
        action = rng.choice(["open", "grow", "grow", "grow", "truncate", "close", "slab"])
        if action == "slab" and rng.random() < 0.3:
            extents = rng.randint(1, 4)
            pool.add_slab(next_address, extents)
            next_address += extents * SHAPE.extent_bytes + rng.choice([0, 16, 4096])
        elif action == "open":
            histories.append((History(pool), 0))
        elif histories:
            index = rng.randrange(len(histories))
            history, rows = histories[index]
            if action == "grow":
                more = rng.randint(1, 200)
                try:
                    history.reserve(rows + more)
                    history.advance(more)
                    histories[index] = (history, rows + more)
                except OutOfExtents as short:
                    assert short.missing == SHAPE.extents_for(rows + more) - history.reserved_rows // 64 - pool.free
            elif action == "truncate":
                keep = rng.randint(0, rows)
                history.truncate(keep)
                histories[index] = (history, keep)
            elif action == "close":
                history.close()
                histories.pop(index)
        pool.check()
        memory = {}
        for owner, (history, rows) in enumerate(histories):
            history.check()
            assert history.rows == rows and rows <= history.reserved_rows
            for address in history.addresses:
                assert address not in memory, "two histories share an extent"
                memory[address] = owner
        assert pool.capacity - pool.free == len(memory)
    for history, _ in histories:
        history.close()
    assert pool.free == pool.capacity
    pool.check()


def test_shared_extent_outlives_one_owner() -> None:
    pool = pool_of(1)
    extent = pool.take()
    assert extent is not None
    pool.share(extent)
    assert not pool.release(extent) and pool.free == 0
    assert pool.release(extent) and pool.free == 1
    pool.check()
