"""The host tier: every history in host RAM, behind a hot buffer per session that the device manages.

Owns host slabs, hot buffers, slot tables, staging and the copy stream, and turns the decisions of `glm53.mem` into enqueued work. What happens
inside a pass is in `host_passes`. The rules are those of docs/decisions/0003-host-tier.md.

Invariants: rows before a session's boundary are in its extents in stream order; a ring slot is overwritten only when its row is there too; tables
change only on `stream`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from glm53.errors import InputError
from glm53.hip import Array, Buffer, Device, Event, Stream
from glm53.kv.host_passes import FullPass, StepPass, StreamPass
from glm53.kv.passes import Pass, PassRows, RowLayout
from glm53.kv.slabs import Slab, free_slabs, make_slabs
from glm53.mem.extents import ExtentPool
from glm53.mem.history import CopyBatch, History, OutOfExtents
from glm53.ops import hotcache, rows
from glm53.spec import DType

COPY_BATCH_ROWS = 64
ROUND_TAG_MAX = 2**32 - 1


@dataclass(frozen=True)
class HostTierConfig:
    """Sizes and methods of the host tier; see the options of the same names."""

    hot_rows: int
    step_rows_max: int  # query rows of one session in a step, all sessions together
    extent_rows: int
    sessions_max: int
    rows_max: int  # rows of one session
    topk: int
    host_bytes: int = 0  # page-locked at start; 0: grows chunk by chunk
    chunk_bytes: int = 256 << 20
    method: str = "register"  # how host memory is page-locked: register or hostmalloc
    copy_back: str = "copy2d"  # or "kernel"
    fetch: str = "kernel"  # or "copy": the host gathers missed rows (where kernels cannot read host memory)
    first_round: int = 1  # round tag of new sessions; tests start near the wrap

    @property
    def ring_rows(self) -> int:
        """Two batches and the widest step, a multiple of the batch."""
        return self.ring_rows_for(self.step_rows_max)

    @staticmethod
    def ring_rows_for(step_rows_max: int) -> int:
        return -(-(2 * COPY_BATCH_ROWS + step_rows_max) // COPY_BATCH_ROWS) * COPY_BATCH_ROWS

    @property
    def slots(self) -> int:
        """Cache slots of a session and group."""
        return self.hot_rows - self.ring_rows

    def __post_init__(self) -> None:
        if self.slots < 1:
            raise InputError(
                f"hot_rows: got {self.hot_rows}, wanted more than the ring of {self.ring_rows} rows "
                f"(two batches of {COPY_BATCH_ROWS} and {self.step_rows_max} rows of a step)"
            )


@dataclass
class Session:
    """Host side of one session. `full`: its rows lie at their own positions in the hot buffer, nothing is looked up."""

    slot: int
    history: History
    hot: Buffer
    full: bool = True
    round: int = 1
    seed_slot: int = 0  # cache slot that the next prompt row seeds
    copies: list[tuple[CopyBatch, Event]] = field(default_factory=list)  # enqueued, oldest first


class HostTier:
    """Histories of up to `sessions_max` sessions in host RAM. All work is ordered on `stream`; copies run on a stream of their own."""

    def __init__(
        self,
        device: Device,
        stream: Stream,
        layout: RowLayout,
        config: HostTierConfig,
        progress: Callable[[int, int, str], None] | None = None,
    ):
        self.device, self.stream, self.layout, self.config = device, stream, layout, config
        self.rows_max = config.rows_max
        self.shape = layout.extent_shape(config.extent_rows)
        self.pool = ExtentPool(self.shape)
        self.slabs: list[Slab] = []
        self.sessions: dict[int, Session] = {}
        self._free_slots = list(range(config.sessions_max - 1, -1, -1))
        self.copy_stream, self.side_stream = device.stream(), device.stream()
        self.hot_plane_bytes = config.hot_rows * layout.row_bytes
        self.group_planes_max = max(len(group) for group in layout.groups)
        step_rows = config.step_rows_max
        extents = self.shape.extents_for(config.rows_max)
        make = Array.empty
        self.tables = make(device, DType.U64, (config.sessions_max, extents), category="tables")
        self.states = make(device, DType.U8, (config.sessions_max, hotcache.STATE_BYTES), category="tables")
        self.slot_tables = hotcache.SlotTables.make(
            device, config.sessions_max, len(layout.groups), config.rows_max, config.slots, category="slot maps"
        )
        for slot in range(config.sessions_max):
            self.slot_tables.reset(stream, slot)
        self.fetch_list = hotcache.FetchList.make(device, step_rows, config.topk, config.sessions_max, category="workspace")
        self.round_starts = make(device, DType.I32, (config.sessions_max + 1,), category="workspace")
        self.round_sessions = make(device, DType.I32, (config.sessions_max,), category="workspace")
        self.refs = make(device, DType.U64, (config.rows_max,), category="workspace")
        self.staging_plane_bytes = step_rows * config.topk * layout.row_bytes
        self.staging = device.alloc(self.group_planes_max * self.staging_plane_bytes, category="staging")
        self.linear: list[Buffer] = []
        if config.host_bytes:
            self._add_slabs(make_slabs(device, config.host_bytes, config.chunk_bytes, config.method, "host history", progress))

    # Sessions

    def open(self) -> int:
        if not self._free_slots:
            raise InputError(f"all {len(self.sessions)} sessions are in use; close one first or open the engine with a larger sessions_max")
        hot = self.device.alloc(self.layout.planes * self.hot_plane_bytes, category="hot cache")
        slot = self._free_slots.pop()
        history = History(self.pool, ring_rows=self.config.hot_rows)
        self.sessions[slot] = Session(slot, history, hot, round=self.config.first_round)
        self.slot_tables.reset(self.stream, slot)
        self.upload_states([slot])
        return slot

    def close(self, slot: int) -> None:
        """Ends a history. The bookkeeping is right even where the device is lost and refuses to be waited for."""
        session = self.sessions.pop(slot)
        try:
            for stream in (self.copy_stream, self.side_stream, self.stream):
                stream.synchronize()
        finally:
            session.history.close()
            self._free_slots.append(slot)
            for _, event in session.copies:
                event.close()
            session.hot.free()

    def rows(self, slot: int) -> int:
        return self.sessions[slot].history.rows

    def chunk_rows(self, slot: int, wanted: int) -> int:
        """A short tail behind a long history comes through the hot cache in steps; anything else at once, streamed or into the hot buffer."""
        session = self.sessions[slot]
        if session.full or not self.gathers(session, wanted):
            return wanted
        return min(wanted, self.config.step_rows_max)

    def gathers(self, session: Session, wanted: int) -> bool:
        """Whether `wanted` rows select fewer old rows than there are, so that fetching misses moves less than streaming every layer."""
        return not session.full and wanted * self.config.topk < session.history.rows

    def begin(self, rows: PassRows, prefill: bool) -> Pass:
        runs = rows.runs
        for slot, first, last in runs:
            session = self.sessions[slot]
            self.poll(session)
            self.reserve(session, int(rows.positions[first]) + last - first)
        if prefill:
            assert len(runs) == 1, "a prompt chunk belongs to one session"
            session, count = self.sessions[runs[0][0]], len(rows.positions)
            if session.full and session.history.rows + count <= self.config.hot_rows:
                return FullPass(self, session, rows)
            if session.full or not self.gathers(session, count) or count > self.config.step_rows_max:
                return StreamPass(self, session, rows)
        for slot, first, last in runs:
            session = self.sessions[slot]
            if session.full and session.history.rows + last - first > self.config.hot_rows:
                self.leave_full(session)
            self.make_room(session, last - first)
        return StepPass(self, rows)

    def truncate(self, slot: int, rows: int) -> None:
        """Keeps the first `rows` rows: waits for copies of the others, makes their slots unfindable in stream order."""
        session = self.sessions[slot]
        rollback = session.history.truncate(rows)
        for batch in rollback.wait_for:
            self._complete_through(session, batch)
        session.history.rolled_back(rollback)
        first, last = rollback.forget
        if last > first and not session.full:
            hotcache.forget(self.stream, self.states, self.slot_tables, slot, first, last)
        self.upload_table(session)
        self.upload_states([slot])

    def settle(self, slot: int) -> None:
        """Brings every row of the session to host memory and waits for it: committed rows equal logical rows after."""
        session = self.sessions[slot]
        self.copy_out(session, session.history.settle())
        while session.copies:
            self._complete_first(session)
        self.apply_boundary(session)

    def counters(self) -> dict[int, np.ndarray]:
        """Counters of each open session: [groups, 8] u64, in the order of `hotcache.COUNTERS`. Waits for the device."""
        every = self.slot_tables.counters.numpy(self.stream)
        return {slot: every[slot] for slot in self.sessions}

    def counter_totals(self) -> dict[str, int]:
        """Sums over groups and over the sessions last opened in each slot, by counter name, and the bytes that misses brought from host memory."""
        every = self.slot_tables.counters.numpy(self.stream).astype(np.int64)
        totals = {counter.name.lower(): int(every[:, :, counter].sum()) for counter in hotcache.Counter}
        planes = np.array([len(group) for group in self.layout.groups])
        fetched = every[:, :, hotcache.Counter.MISSES] + every[:, :, hotcache.Counter.UNCACHED]
        return totals | {"bytes_from_host": int((fetched * planes).sum()) * self.layout.row_bytes}

    # Used by the passes

    def reserve(self, session: Session, row_count: int) -> None:
        """Extents for `row_count` rows; page-locks another chunk of host memory when there are none. DeviceMemoryError leaves all as it was."""
        if row_count > self.config.rows_max:
            raise InputError(f"history: {row_count} rows asked, the tier was opened for {self.config.rows_max} rows a session")
        try:
            grown = session.history.reserve(row_count)
        except OutOfExtents as short:
            extents = max(short.missing, self.config.chunk_bytes // self.shape.extent_bytes)
            extents = min(extents, max(short.missing, self.shape.extents_for(self.config.rows_max)))
            size = extents * self.shape.extent_bytes
            self._add_slabs(make_slabs(self.device, size, size, self.config.method, "host history"))
            grown = session.history.reserve(row_count)
        if grown:
            self.upload_table(session)

    def _add_slabs(self, slabs: list[Slab]) -> None:
        for slab in slabs:
            self.slabs.append(slab)
            self.pool.add_slab(slab.device_address, slab.byte_count // self.shape.extent_bytes)

    def host_address(self, device_address: int) -> int:
        """The host's name of an address inside a slab."""
        slab, offset = self._slab_of(device_address)
        return slab.host_address + offset

    def host_bytes(self, device_address: int, byte_count: int) -> np.ndarray:
        """A view of `byte_count` bytes of a slab."""
        slab, offset = self._slab_of(device_address)
        return slab.array[offset : offset + byte_count]

    def _slab_of(self, device_address: int) -> tuple[Slab, int]:
        for slab in self.slabs:
            offset = device_address - slab.device_address
            if 0 <= offset < slab.byte_count:
                return slab, offset
        raise AssertionError(f"{device_address:#x} lies in no slab")

    def upload_table(self, session: Session) -> None:
        addresses = session.history.addresses
        table = np.zeros((1, self.tables.shape[1]), np.uint64)
        table[0, : len(addresses)] = addresses
        self.tables.slice(session.slot, session.slot + 1).upload(table, self.stream)

    def upload_states(self, slots: list[int]) -> None:
        """Sends hot address, phase, boundary and round of some sessions to the device, in stream order."""
        for slot in slots:
            session = self.sessions[slot]
            packed = hotcache.pack_states([(session.hot.address, session.full, session.history.boundary, session.round)])
            self.states.slice(slot, slot + 1).upload(packed, self.stream)

    def leave_full(self, session: Session) -> None:
        """The history outgrows the hot buffer: rows behind the ring become cache slots, the first ring_rows slots become the ring."""
        self.settle(session.slot)
        ring, held = self.config.ring_rows, min(session.history.rows, self.config.hot_rows)
        session.history.leave_full(ring)
        session.full = False
        if held > ring:
            hotcache.seed(self.stream, self.states, self.slot_tables, session.slot, ring, held, 0)
            session.seed_slot = (held - ring) % self.config.slots
        self.upload_states([session.slot])

    def make_room(self, session: Session, count: int) -> None:
        """Ring slots for `count` rows: the stream waits for the copies of the rows that they overwrite."""
        for _ in range(session.history.room(count)):
            self.stream.wait(session.copies[0][1])
            self._complete_first(session)

    def written(self, session: Session, count: int) -> None:
        """`count` rows were enqueued behind the present ones: batches that are complete go to host memory, the boundary follows."""
        session.history.advance(count)
        self.copy_out(session, session.history.next_copies())
        self.apply_boundary(session)

    def apply_boundary(self, session: Session) -> None:
        """Moves the device's boundary to where the history has it, after the copies that it passes."""
        if session.history.boundary_moved():
            for batch, event in session.copies:
                if batch.first < session.history.boundary:
                    self.stream.wait(event)
            self.upload_states([session.slot])

    def copy_out(self, session: Session, batches: list[CopyBatch]) -> None:
        """Enqueues the copies of some batches, each one strided operation for all planes, after what the main stream has enqueued."""
        if not batches:
            return
        written = self.device.event()
        written.record(self.stream)
        self.copy_stream.wait(written)
        row_bytes, ring = self.layout.row_bytes, session.history.ring_rows
        for batch in batches:
            source = session.hot.address + batch.first % ring * row_bytes
            extent = session.history.addresses[batch.first // self.shape.extent_rows]
            target = extent + batch.first % self.shape.extent_rows * row_bytes
            length = (batch.last - batch.first) * row_bytes
            if self.config.copy_back == "copy2d":
                self.copy_stream.copy_2d(self.host_address(target), self.shape.plane_bytes, source, self.hot_plane_bytes, length, self.layout.planes)
            else:
                rows.copy_planes(
                    self.copy_stream,
                    source,
                    target,
                    source_plane_bytes=self.hot_plane_bytes,
                    target_plane_bytes=self.shape.plane_bytes,
                    length_bytes=length,
                    planes=self.layout.planes,
                )
            done = self.device.event()
            done.record(self.copy_stream)
            session.copies.append((batch, done))
            session.history.copy_enqueued(batch)
        written.close()

    def poll(self, session: Session) -> None:
        """Takes note of copies that have completed, without waiting."""
        while session.copies and session.copies[0][1].query():
            self._complete_first(session)

    def _complete_first(self, session: Session) -> None:
        batch, event = session.copies.pop(0)
        event.synchronize()
        event.close()
        session.history.copy_completed(batch)

    def _complete_through(self, session: Session, batch: CopyBatch) -> None:
        while any(pending == batch for pending, _ in session.copies):
            self._complete_first(session)

    def next_round(self, session: Session) -> None:
        """The host's copy of the round tag, which skips 0."""
        session.round = session.round + 1 if session.round < ROUND_TAG_MAX else 1

    def linear_buffers(self, row_count: int) -> list[Buffer]:
        """Two buffers of at least `row_count` rows of one layer each; grown in steps so that a long prompt allocates seldom."""
        wanted = row_count * self.layout.row_bytes
        if not self.linear or self.linear[0].byte_count < wanted:
            self.free_linear()
            rounded = min(-(-row_count // 4096) * 4096, max(self.config.rows_max, row_count)) * self.layout.row_bytes
            self.linear = [self.device.alloc(max(wanted, rounded), category="staging") for _ in range(2)]
        return self.linear

    def free_linear(self) -> None:
        while self.linear:
            self.linear.pop().free()

    def check(self) -> None:
        """Invariants of pool and histories; every extent in use belongs to a session."""
        self.pool.check()
        used = 0
        for session in self.sessions.values():
            session.history.check()
            used += session.history.reserved_rows // self.shape.extent_rows
        assert used == self.pool.capacity - self.pool.free, f"histories hold {used} extents, the pool lent {self.pool.capacity - self.pool.free}"

    def free(self) -> None:
        """Gives everything back, host memory included."""
        for slot in list(self.sessions):
            self.close(slot)
        self.free_linear()
        for array in (self.tables, self.states, self.round_starts, self.round_sessions, self.refs):
            array.free()
        self.slot_tables.free()
        self.fetch_list.free()
        self.staging.free()
        free_slabs(self.slabs)


__all__ = ["HostTier", "HostTierConfig", "Session"]
