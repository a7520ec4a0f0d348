"""Compiled loops of the bookkeeping, over structured numpy arrays.

Every function has one explicit signature, so that nothing is compiled at its first call in a decode step and the cache on disk holds one
entry each. They do no input checks of their own beyond a refusal code: their callers in this package assert first and word the message.
Imported only by the stateful modules (`extents`, `pool`, `history`); importing it imports numba.
"""

from __future__ import annotations

import numpy as np
from numba import from_dtype, njit, types

COPY_ROWS = 64  # rows of a full copy-back batch; batches never cross a multiple of it

EXTENT = np.dtype([("address", np.uint64), ("host_address", np.uint64), ("references", np.int64)])
BLOCK = np.dtype([("capacity", np.int64), ("asked", np.int64), ("state", np.int64)])
HISTORY = np.dtype(
    [
        ("rows", np.int64),
        ("enqueued", np.int64),
        ("committed", np.int64),
        ("boundary", np.int64),
        ("ring_rows", np.int64),
        ("batches", np.int64),  # in use, from the front of the history's BATCH array
    ]
)
BATCH = np.dtype([("first", np.int64), ("last", np.int64), ("state", np.int64)])

# Values of BATCH.state and BLOCK.state; the enums in `history` and `pool` name them.
BATCH_ENQUEUED, BATCH_COMPLETED = 1, 2
BLOCK_ABSENT, BLOCK_CACHED = 0, 1

BEYOND_BOUNDARY = -1  # refusal of ring_waits and advance_rows
NOT_PENDING, TWICE = -1, -2  # refusals of complete_batch

_i8 = types.int64
_ids = types.Array(_i8, 1, "C")
_extents = types.Array(from_dtype(EXTENT), 1, "C")
_blocks = types.Array(from_dtype(BLOCK), 1, "C")
_history = types.Array(from_dtype(HISTORY), 1, "C")
_batches = types.Array(from_dtype(BATCH), 1, "C")


@njit(_i8(_extents, _ids), cache=True)
def first_unused(extents, ids):  # type: ignore[no-untyped-def]
    """Position in `ids` of the first id that is no extent in use; -1 if all are."""
    for k in range(ids.shape[0]):
        if ids[k] < 0 or ids[k] >= extents.shape[0] or extents[ids[k]].references <= 0:
            return k
    return -1


@njit(types.void(_extents, _ids, _i8, _ids), cache=True)
def extents_take(extents, heap, free, out):  # type: ignore[no-untyped-def]
    """Pops the `len(out)` lowest ids of the min-heap `heap[:free]` into `out`, with one reference each. O(log free) an id."""
    for k in range(out.shape[0]):
        taken = heap[0]
        free -= 1
        last = heap[free]
        i = 0
        while True:
            child = 2 * i + 1
            if child >= free:
                break
            if child + 1 < free and heap[child + 1] < heap[child]:
                child += 1
            if heap[child] >= last:
                break
            heap[i] = heap[child]
            i = child
        if free > 0:
            heap[i] = last
        extents[taken].references = 1
        out[k] = taken


@njit(_i8(_extents, _ids, _i8, _ids), cache=True)
def extents_release(extents, heap, free, ids):  # type: ignore[no-untyped-def]
    """Drops one reference of each id, pushes those that become free on the heap; returns how many did. O(log free) an id."""
    freed = 0
    for k in range(ids.shape[0]):
        extent = ids[k]
        extents[extent].references -= 1
        if extents[extent].references == 0:
            i = free + freed
            freed += 1
            while i > 0 and heap[(i - 1) // 2] > extent:
                heap[i] = heap[(i - 1) // 2]
                i = (i - 1) // 2
            heap[i] = extent
    return freed


@njit(_i8(_blocks, _i8, _i8), cache=True)
def best_block(blocks, capacity_min, capacity_max):  # type: ignore[no-untyped-def]
    """Smallest cached block with a capacity in [capacity_min, capacity_max], the lowest index among equals; -1 if there is none."""
    best = -1
    for i in range(blocks.shape[0]):
        capacity = blocks[i].capacity
        if blocks[i].state == BLOCK_CACHED and capacity_min <= capacity <= capacity_max and (best < 0 or capacity < blocks[best].capacity):
            best = i
    return best


@njit(_i8(_blocks, _i8, _ids), cache=True)
def blocks_for_room(blocks, wanted, out):  # type: ignore[no-untyped-def]
    """Cached blocks to release so that `wanted` bytes come back, into `out`; returns how many.

    Largest first, and as the last one the smallest that suffices: few releases, and the least surplus for that number.
    """
    count = 0
    while wanted > 0:
        fit, largest = -1, -1
        for i in range(blocks.shape[0]):
            if blocks[i].state != BLOCK_CACHED:
                continue
            chosen = False
            for k in range(count):
                chosen = chosen or out[k] == i
            if chosen:
                continue
            capacity = blocks[i].capacity
            if capacity >= wanted and (fit < 0 or capacity < blocks[fit].capacity):
                fit = i
            if largest < 0 or capacity > blocks[largest].capacity:
                largest = i
        pick = fit if fit >= 0 else largest
        if pick < 0:
            break
        out[count] = pick
        count += 1
        wanted -= blocks[pick].capacity
    return count


@njit(_i8(_history, _batches, _i8), cache=True)
def ring_waits(history, batches, rows):  # type: ignore[no-untyped-def]
    """Completions still missing before `rows` more rows may be written to the ring; BEYOND_BOUNDARY if waiting cannot help."""
    h = history[0]
    if h.ring_rows == 0:
        return 0
    overwritten = h.rows + rows - h.ring_rows  # rows below this one lose their slots
    if overwritten > h.boundary or (overwritten > 0 and h.ring_rows % COPY_ROWS != 0):
        return BEYOND_BOUNDARY
    waits = 0
    for i in range(h.batches):
        if batches[i].first < overwritten and batches[i].state == BATCH_ENQUEUED:
            waits += 1
    return waits


@njit(_i8(_history, _batches, _i8), cache=True)
def advance_rows(history, batches, rows):  # type: ignore[no-untyped-def]
    """Counts `rows` more rows if the ring has room for them, else returns what `ring_waits` says and changes nothing."""
    waits = ring_waits(history, batches, rows)
    if waits != 0:
        return waits
    h = history[0]
    h.rows += rows
    if h.ring_rows == 0:
        h.enqueued = h.committed = h.boundary = h.rows
    return 0


@njit(_i8(_history, _i8, _batches), cache=True)
def due_batches(history, short_last, out):  # type: ignore[no-untyped-def]
    """Batches of the rows that are written but not enqueued, into `out`; the last, unfinished one only if `short_last`."""
    first, rows = history[0].enqueued, history[0].rows
    count = 0
    while first < rows:
        last = (first // COPY_ROWS + 1) * COPY_ROWS
        if last > rows:
            if not short_last:
                break
            last = rows
        out[count].first, out[count].last = first, last
        count += 1
        first = last
    return count


@njit(types.void(_history, _batches), cache=True)
def retire_batches(history, batches):  # type: ignore[no-untyped-def]
    """Drops completed batches from the front; committed becomes the first row of the first batch under way."""
    h = history[0]
    done = 0
    while done < h.batches and batches[done].state == BATCH_COMPLETED:
        done += 1
    if done:
        for i in range(done, h.batches):
            batches[i - done] = batches[i]
        h.batches -= done
    h.committed = batches[0].first if h.batches > 0 else h.enqueued


@njit(_i8(_history, _batches, _i8, _i8), cache=True)
def complete_batch(history, batches, first, last):  # type: ignore[no-untyped-def]
    """Marks a batch as completed and moves `committed` over the completed front. NOT_PENDING or TWICE: refused, nothing changed."""
    for i in range(history[0].batches):
        if batches[i].first == first and batches[i].last == last:
            if batches[i].state == BATCH_COMPLETED:
                return TWICE
            batches[i].state = BATCH_COMPLETED
            retire_batches(history, batches)
            return 0
    return NOT_PENDING


@njit(_i8(_history, _batches, _i8, _batches), cache=True)
def truncate_rows(history, batches, rows, waits):  # type: ignore[no-untyped-def]
    """Cuts rows, enqueued, committed and boundary to `rows`, unless batches under way touch rows behind it.

    Those go to `waits`, their number is returned, and nothing is changed.
    """
    h = history[0]
    count = 0
    for i in range(h.batches):
        if batches[i].last > rows and batches[i].state == BATCH_ENQUEUED:
            waits[count].first, waits[count].last = batches[i].first, batches[i].last
            count += 1
    if count > 0:
        return count
    while h.batches > 0 and batches[h.batches - 1].first >= rows:
        h.batches -= 1
    if h.batches > 0:
        batches[h.batches - 1].last = min(batches[h.batches - 1].last, rows)
    h.rows = rows
    h.enqueued = min(h.enqueued, rows)
    h.boundary = min(h.boundary, rows)
    retire_batches(history, batches)
    return 0
