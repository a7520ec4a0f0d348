"""A hot cache in a known state above a host history whose bytes say which row they belong to, for `bench_gather`.

The state of the tables is kept as a snapshot and put back before each round, so that every repetition meets the same cache with another selection,
and the number of misses is exact.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from glm53.errors import Glm53Error
from glm53.hip import Array, Device, Graph, Stream
from glm53.kv.slabs import free_slabs, make_slabs
from glm53.mem.extents import GroupedShape
from glm53.ops import hotcache, rows
from glm53.ops.hotcache import Counter, FetchList, SlotTables
from glm53.spec import DType, RowFormat

ROW_BYTES = RowFormat.Q8G64.row_bytes(512, 64)
WORDS = ROW_BYTES // 8  # 64-bit words of a row
RING_ROWS = 192
TAG = 7  # of the measured round
RUNS = 16  # stretches of positions that are cached
CHUNK_BYTES = 256 << 20
POISON = np.uint64(0xA5A5A5A5A5A5A5A5)


class Fill(enum.Enum):
    """State of the cache when the round begins."""

    FREE = "half of the slots free"
    FULL = "full, all slots used a round ago"
    PINNED = "the same, this round's hits right at the hand"  # the search for a slot passes over all of them


@dataclass(frozen=True)
class Sizes:
    """k selected rows of a history, `hot_rows` of them on the device in each of `layers` planes."""

    k: int
    hot_rows: int
    layers: int
    extent_rows: int

    @property
    def slots(self) -> int:
        return self.hot_rows - RING_ROWS

    @property
    def shape(self) -> GroupedShape:
        """One selection group: the planes of a row lie side by side."""
        return GroupedShape(self.extent_rows, self.layers, ROW_BYTES, (self.layers,))

    def cached(self, fill: Fill) -> int:
        return self.slots // 2 if fill is Fill.FREE else self.slots

    def check(self, history_rows: int) -> None:
        """Raises Glm53Error where a history cannot give k hits and k misses."""
        wanted = self.slots + max(self.k, self.slots // 4)
        if self.slots < 2 * max(self.k, RUNS) or history_rows < wanted:
            raise Glm53Error(
                f"sizes: {self.hot_rows} hot rows, history of {history_rows}, k {self.k}; wanted at least {RING_ROWS + 2 * max(self.k, RUNS)} "
                f"hot rows and {wanted} rows of history; next: more rows or a smaller --k"
            )


def pattern(positions: np.ndarray, plane: int) -> np.ndarray:
    """[rows, 82] u64: the bytes of history rows, all words of all rows and planes different."""
    seed = (positions.astype(np.uint64) * np.uint64(64) + np.uint64(plane)) * np.uint64(0x9E3779B97F4A7C15)
    words = seed[:, None] + np.arange(WORDS, dtype=np.uint64) * np.uint64(0xC2B2AE3D27D4EB4F)
    words ^= words >> np.uint64(29)
    words *= np.uint64(0xBF58476D1CE4E5B9)
    return words


class HostRows:
    """`row_count` patterned rows of all planes in page-locked extents that lie in shuffled order."""

    def __init__(self, device: Device, row_count: int, sizes: Sizes, method: str):
        shape = sizes.shape
        count = shape.extents_for(row_count)
        per_slab = max(1, CHUNK_BYTES // shape.extent_bytes)
        self.slabs = make_slabs(device, count * shape.extent_bytes, per_slab * shape.extent_bytes, method, "host history")
        order = np.random.default_rng(1).permutation(count)
        addresses = np.empty((1, count), np.uint64)
        for extent, place in enumerate(order.tolist()):
            slab, offset = self.slabs[place // per_slab], place % per_slab * shape.extent_bytes
            addresses[0, extent] = slab.device_address + offset
            (held,) = shape.views(slab.array[offset : offset + shape.extent_bytes])
            positions = np.arange(extent * shape.extent_rows, (extent + 1) * shape.extent_rows)
            for plane in range(shape.planes):
                held[:, plane] = pattern(positions, plane).view(np.uint8)
        self.table = Array.from_numpy(device, addresses, category="tables")

    def free(self) -> None:
        self.table.free()
        free_slabs(self.slabs)


@dataclass(frozen=True)
class Snapshot:
    """Tables and state of one fill, in device memory, and the position of each slot (-1 free) on the host."""

    arrays: tuple[Array, ...]
    position_of: np.ndarray


class Scene:
    """One session and selection group above `history_rows` rows of `host`, and graphs of one gather."""

    def __init__(self, device: Device, stream: Stream, sizes: Sizes, host: HostRows, history_rows: int):
        sizes.check(history_rows)
        self.device, self.stream, self.sizes, self.host, self.history_rows = device, stream, sizes, host, history_rows
        make = lambda values, category="workspace": Array.from_numpy(device, values, category=category)
        self.hot = Array.empty(device, DType.U64, (sizes.layers, sizes.hot_rows, WORDS), category="hot cache")
        self.staging = Array.empty(device, DType.U64, (sizes.layers, sizes.k, WORDS), category="staging")
        self.tables = SlotTables.make(device, 1, 1, history_rows, sizes.slots, category="slot maps")
        self.states = make(hotcache.pack_states([(self.hot.address, False, history_rows, TAG)]))
        self.fetch_list = FetchList.make(device, 1, sizes.k, 1, category="workspace")
        self.plan = Array.empty(device, DType.U64, (1, sizes.k), category="workspace")
        self.selected = Array.empty(device, DType.I32, (1, sizes.k), category="workspace")
        self.counts = make(np.array([sizes.k], np.int32))
        self.sessions = make(np.zeros(1, np.int32))
        self.round_starts = make(np.array([0, 1], np.int32))
        self._banks: list[Array] = []
        full = self._snapshot(Fill.FULL)
        self.snapshots = {Fill.FREE: self._snapshot(Fill.FREE), Fill.FULL: full, Fill.PINNED: full}

    def _snapshot(self, fill: Fill) -> Snapshot:
        """Seeds the cache in RUNS stretches of slots and keeps the tables. The hand points at the first free slot, or at slot 0."""
        sizes, rng = self.sizes, np.random.default_rng(2)
        position_of = np.full(sizes.slots, -1, np.int64)
        first_slot = sizes.slots - sizes.cached(fill)
        self.tables.reset(self.stream, 0)
        bounds = np.linspace(first_slot, sizes.slots, RUNS + 1).astype(int)
        section = self.history_rows // RUNS
        for run in range(RUNS):
            slot, length = int(bounds[run]), int(bounds[run + 1] - bounds[run])
            first = run * section + int(rng.integers(section - length + 1))
            hotcache.seed(self.stream, self.states, self.tables, 0, first, first + length, slot)
            position_of[slot : slot + length] = np.arange(first, first + length)
        used = np.where(position_of >= 0, TAG - 1, 0).astype(np.uint32).reshape(1, 1, -1)
        self.tables.used.upload(used, self.stream)
        copies = []
        for array in self.tables.arrays():
            copy = Array.empty(self.device, array.dtype, array.shape, category="snapshots")
            self.stream.copy(copy.address, array.address, array.nbytes)
            copies.append(copy)
        self.stream.synchronize()
        return Snapshot(tuple(copies), position_of)

    def restore(self, fill: Fill, _index: int = 0) -> None:
        """Enqueues: the tables are as the fill says, before each repetition alike."""
        for copy, array in zip(self.snapshots[fill].arrays, self.tables.arrays(), strict=True):
            self.stream.copy(array.address, copy.address, array.nbytes)

    def misses(self, rate: int) -> int:
        """Missed rows at `rate` percent."""
        return round(self.sizes.k * rate / 100)

    def selections(self, fill: Fill, rate: int, count: int, seed: int) -> np.ndarray:
        """[count, k] i32: positions, ascending; `misses(rate)` of them are in no slot."""
        position_of, rng, missed = self.snapshots[fill].position_of, np.random.default_rng([seed, rate]), self.misses(rate)
        held = position_of[position_of >= 0]
        absent = np.ones(self.history_rows, bool)
        absent[held] = False
        others = np.flatnonzero(absent)
        drawn = np.empty((count, self.sizes.k), np.int32)
        for i in range(count):
            hits = self.sizes.k - missed
            found = held[:hits] if fill is Fill.PINNED else rng.choice(held, hits, replace=False, shuffle=False)
            drawn[i] = np.sort(np.concatenate([found, rng.choice(others, missed, replace=False, shuffle=False)]))
        return drawn

    def bank(self, selections: np.ndarray) -> Array:
        """Selections in device memory, for `select`."""
        self._banks.append(Array.from_numpy(self.device, selections, category="selections"))
        return self._banks[-1]

    def select(self, bank: Array, index: int, first: int = 0) -> None:
        """Enqueues: selection `first + index` of a bank is the next round's."""
        self.stream.copy(self.selected.address, bank.address + (first + index) * self.selected.nbytes, self.selected.nbytes)

    def gather(self, parts: Sequence[range], blocks: int | None) -> None:
        """Enqueues the round: the decision, then a fetch for each part of the planes."""
        sizes = self.sizes
        hotcache.hot_plan(
            self.stream,
            self.selected,
            self.counts,
            self.sessions,
            self.round_starts,
            self.host.table,
            self.states,
            self.tables,
            0,
            self.plan,
            self.fetch_list,
            sizes.shape.place(0),
            RING_ROWS,
        )
        for planes in parts:
            rows.fetch(
                self.stream,
                self.fetch_list,
                self.round_starts,
                planes=planes,
                staging=self.staging,
                staging_plane_first=0,
                hot_plane_bytes=sizes.hot_rows * ROW_BYTES,
                staging_plane_bytes=sizes.k * ROW_BYTES,
                row_bytes=ROW_BYTES,
                k=sizes.k,
                blocks=blocks,
            )

    def graph(self, parts: Sequence[range], blocks: int | None = None) -> Graph:
        """The round as a graph. Runs it once before, so that nothing is loaded during the capture."""
        self.restore(Fill.FULL)
        self.selected.upload(self.selections(Fill.FULL, 0, 1, 0), self.stream)
        self.gather(parts, blocks)
        with self.stream.capture() as capture:
            self.gather(parts, blocks)
        return capture.graph

    def verify(self, graph: Graph, fill: Fill, rate: int, seed: int) -> None:
        """One round with every byte behind the plan compared, and the counters. Raises Glm53Error naming the first wrong row."""
        sizes, stream = self.sizes, self.stream
        selection, position_of = self.selections(fill, rate, 1, seed), self.snapshots[fill].position_of
        hot = np.full(self.hot.shape, POISON, np.uint64)
        slots = np.flatnonzero(position_of >= 0)
        for plane in range(sizes.layers):
            hot[plane, RING_ROWS + slots] = pattern(position_of[slots], plane)
        self.hot.upload(hot, stream)
        self.staging.upload(np.full(self.staging.shape, POISON, np.uint64), stream)
        self.plan.upload(np.zeros(self.plan.shape, np.uint64), stream)
        self.restore(fill)
        self.selected.upload(selection, stream)
        graph.launch(stream)
        hot, staging, plan = self.hot.numpy(stream), self.staging.numpy(stream), self.plan.numpy(stream)[0]
        space, payload = plan & np.uint64(3), plan & ~np.uint64(15)
        staged = space != 0
        index = np.where(staged, payload // np.uint64(ROW_BYTES), (payload - np.uint64(self.hot.address)) // np.uint64(ROW_BYTES)).astype(np.int64)
        outside = (index < 0) | (index >= np.where(staged, sizes.k, sizes.hot_rows)) | (plan == 0)
        if outside.any():
            raise Glm53Error(f"gather: {int(outside.sum())} plan entries point nowhere, the first is {plan[outside][0]:#x}")
        for plane in range(sizes.layers):
            got = hot[plane, np.where(staged, 0, index)]
            got[staged] = staging[plane, index[staged]]
            wrong = (got != pattern(selection[0], plane)).any(axis=1)
            if wrong.any():
                first = int(np.flatnonzero(wrong)[0])
                raise Glm53Error(
                    f"gather: {fill.value}, {rate} % misses: {int(wrong.sum())} of {sizes.k} rows of plane {plane} hold other bytes than the oracle; "
                    f"the first is position {int(selection[0, first])}, plan entry {int(plan[first]):#x}"
                )
        counters = self.tables.counters.numpy(stream)[0, 0]
        fetched, found, wanted = int(counters[Counter.MISSES] + counters[Counter.UNCACHED]), int(counters[Counter.HITS]), self.misses(rate)
        if (fetched, found) != (wanted, sizes.k - wanted):
            raise Glm53Error(f"gather: {fetched} rows fetched and {found} found, wanted {wanted} fetched of {sizes.k}")

    def free(self) -> None:
        for snapshot in {id(s): s for s in self.snapshots.values()}.values():
            for array in snapshot.arrays:
                array.free()
        others = (self.hot, self.staging, self.states, self.plan, self.selected, self.counts, self.sessions, self.round_starts)
        for array in (*others, *self._banks):
            array.free()
        self.tables.free()
        self.fetch_list.free()
