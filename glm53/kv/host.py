"""The host tier: every history in host RAM, behind a hot buffer per session that the device manages.

Owns host slabs, hot buffers, slot tables, staging and the copy stream, and turns the decisions of `glm53.mem` into enqueued work. What happens
inside a pass is in `host_passes`. The rules are those of docs/decisions/0003-host-tier.md.

Invariants: rows before a session's boundary are in its extents in stream order; a ring slot is overwritten only when its row is there too; tables
change only on `stream`.

Failures. The host's record of a session (its history, its round, where its rows were) changes only by whole passes. A call that fails half way
has left work on the streams and tables that nobody can tell: it sets the rows back to what they were before the call (`drop`), which touches no
device, and marks the session. Before its next use the streams are drained and what the device knows of it is built again from the record
(`_restore`); that can fail and be tried again like any other call. So a call that raises has added no rows, and a truncate that raises has been
made. Other sessions lose nothing: they wait for the drain.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field

import numpy as np

from glm53.errors import HipError, InputError
from glm53.hip import Array, Buffer, Device, Event, Stream
from glm53.kv import host_lives
from glm53.kv.blocks import DeviceBlocks
from glm53.kv.extents import HostExtents
from glm53.kv.host_passes import FullPass, StepPass, StreamPass
from glm53.kv.passes import Pass, PassRows, RowLayout
from glm53.kv.store import send_table
from glm53.mem.extents import ExtentPool
from glm53.mem.history import COPY_ROWS, CopyBatch, History, Rollback
from glm53.mem.pool import Life
from glm53.ops import hotcache, rows
from glm53.spec import DType

ROUND_TAG_MAX = 2**32 - 1
LINEAR_STEP_ROWS = 4096  # linear buffers are multiples of it, so that a long prompt allocates seldom


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
    fetch: str = "kernel"  # or "copy": the host gathers missed rows (where kernels cannot read and write host memory)
    copy_back: str | None = None  # "kernel" or "copy2d"; None: by kernel where misses are fetched by kernel
    first_round: int = 1  # round tag of new sessions; tests start near the wrap

    @property
    def copies_by_kernel(self) -> bool:
        return (self.copy_back or self.fetch) == "kernel"

    @property
    def ring_rows(self) -> int:
        """Two batches and the widest step, a multiple of the batch."""
        return self.ring_rows_for(self.step_rows_max)

    @staticmethod
    def ring_rows_for(step_rows_max: int) -> int:
        return -(-(2 * COPY_ROWS + step_rows_max) // COPY_ROWS) * COPY_ROWS

    @property
    def slots(self) -> int:
        """Cache slots of a session and group."""
        return self.hot_rows - self.ring_rows

    def __post_init__(self) -> None:
        if self.slots < 1:
            raise InputError(
                f"hot_rows: got {self.hot_rows}, wanted more than the ring of {self.ring_rows} rows "
                f"(two batches of {COPY_ROWS} and {self.step_rows_max} rows of a step)"
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
    # A call failed half way: see the module's docstring.
    unsure: bool = False  # the device may know other things than this record
    cold: bool = False  # what the cache slots hold is not what their tables say
    kept_rows: int | None = None  # rows that stay; those behind them are of the failed call
    rollback: Rollback | None = None  # of a truncate that failed while it waited

    @property
    def rows(self) -> int:
        return self.history.rows if self.kept_rows is None else self.kept_rows


class HostTier:
    """Histories of up to `sessions_max` sessions in host RAM. All work is ordered on `stream`; copies run on a stream of their own.

    Raises DeviceMemoryError or HipError with nothing left allocated.
    """

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
        self.shape = layout.host_shape(config.extent_rows)
        self.sessions: dict[int, Session] = {}
        self.parked: list[History] = []  # without a slot
        self._free_slots = list(range(config.sessions_max - 1, -1, -1))
        self._closed_counters = np.zeros((len(layout.groups), hotcache.COUNTERS), np.int64)  # of sessions that have been closed, by group
        self._undrained = False  # a failed call may have left work on a stream that no other stream waits for
        self.hot_plane_bytes = config.hot_rows * layout.row_bytes
        self.group_planes_max = max(len(group) for group in layout.groups)
        self.staging_plane_bytes = config.step_rows_max * config.topk * layout.row_bytes
        with ExitStack() as owned:
            self._allocate(owned, progress)
            self._owned = owned.pop_all()

    def _allocate(self, owned: ExitStack, progress: Callable[[int, int, str], None] | None) -> None:
        """Everything that lives as long as the tier; `owned` gives it back."""
        device, layout, config = self.device, self.layout, self.config
        extents = self.shape.extents_for(config.rows_max)

        def make(dtype: DType, shape: tuple[int, ...], category: str) -> Array:
            array = Array.empty(device, dtype, shape, category=category)
            owned.callback(array.free)
            return array

        self.blocks = DeviceBlocks(device)  # hot buffers and temporaries
        owned.callback(self.blocks.free)
        self.host = HostExtents(device, self.shape, config.chunk_bytes, config.method, "host history", chunk_extents_max=extents)
        owned.callback(self.host.free)
        self.tables = make(DType.U64, (config.sessions_max, extents), "tables")
        self.states = make(DType.U8, (config.sessions_max, hotcache.STATE_BYTES), "tables")
        groups = len(layout.groups)
        self.group_planes = make(DType.U32, (groups, 2), "tables")
        self.group_planes.upload(np.array([(group[0], len(group)) for group in layout.groups], np.uint32), self.stream)
        self.slot_tables = hotcache.SlotTables.make(device, config.sessions_max, groups, config.rows_max, config.slots, category="slot maps")
        owned.callback(self.slot_tables.free)
        for slot in range(config.sessions_max):
            self.slot_tables.reset(self.stream, slot)
        self.fetch_list = hotcache.FetchList.make(device, config.step_rows_max, config.topk, config.sessions_max, category="workspace")
        owned.callback(self.fetch_list.free)
        self.round_starts = make(DType.I32, (config.sessions_max + 1,), "workspace")
        self.round_sessions = make(DType.I32, (config.sessions_max,), "workspace")
        self.refs = make(DType.U64, (config.rows_max,), "workspace")
        self.staging = device.alloc(self.group_planes_max * self.staging_plane_bytes, category="staging")
        owned.callback(self.staging.free)
        self._turn = device.event()  # of `order`, anew each time: a wait keeps to the record that came before it
        owned.callback(self._turn.close)
        self.copy_stream = device.stream()
        owned.callback(self.copy_stream.close)
        self.side_stream = device.stream()
        owned.callback(self.side_stream.close)
        owned.callback(self._drain)
        if config.host_bytes:
            self.host.prepare(config.host_bytes, progress)

    @property
    def pool(self) -> ExtentPool:
        """Extents of all histories."""
        return self.host.pool

    # Sessions

    def open(self) -> int:
        """A new, empty history. Raises InputError when all are in use, DeviceMemoryError or HipError with nothing changed."""
        if not self._free_slots:
            raise InputError(f"all {len(self.sessions)} sessions are in use; close one first or open the engine with a larger sessions_max")
        slot = self._free_slots[-1]
        hot = self.blocks.lend(self.layout.planes * self.hot_plane_bytes, Life.LONG, "hot cache")
        try:
            self.slot_tables.reset(self.stream, slot)
            session = Session(slot, History(self.pool, ring_rows=self.config.hot_rows), hot, round=self.config.first_round)
            self.upload_states(session)
        except BaseException:
            self.blocks.put_back(hot)
            raise
        self.sessions[self._free_slots.pop()] = session
        return slot

    def close(self, slot: int) -> None:
        """Ends a history. It has ended also where this raises, because the device is lost or refuses to be waited for."""
        session = self.sessions.pop(slot)
        with ExitStack() as steps:  # each has its turn, the last one first
            steps.callback(self.blocks.put_back, session.hot)
            for _, event in session.copies:
                steps.callback(event.close)
            steps.callback(self._free_slots.append, slot)
            steps.callback(session.history.close)
            steps.callback(self._count_closed, slot)
            self._undrained = True  # until it is drained: whoever gets the hot buffer or the extents waits for it
            self._drain()

    def fork(self, source: int, rows: int) -> int:
        return host_lives.fork(self, source, rows)

    def host_copy(self, slot: int) -> None:
        return None

    def detach(self, slot: int, host_copy: None) -> History:
        return host_lives.detach(self, slot)

    def attach(self, parked: History) -> int:
        return host_lives.attach(self, parked)

    def discard(self, parked: History) -> None:
        host_lives.discard(self, parked)

    def new_parked(self, rows: int) -> History:
        return host_lives.new_parked(self)

    def adopt_parked(self, parked: History, first: int, data: np.ndarray) -> None:
        assert first == parked.rows, f"row {first} behind {parked.rows} rows"
        self.host.reserve(parked, first + data.shape[1])  # piece by piece, so that no caller's turn is long
        host_lives.write(self, parked, data)

    def export_parked(self, parked: History, first: int, target: np.ndarray) -> None:
        host_lives.export(self, parked, first, target)

    def fork_parked(self, parked: History, rows: int) -> History:
        return host_lives.fork_parked(self, parked, rows)

    def truncate_parked(self, parked: History, rows: int) -> History:
        parked.rolled_back(parked.truncate(rows))
        return parked

    def rows(self, slot: int) -> int:
        return self.sessions[slot].rows

    def chunk_rows(self, slot: int, wanted: int) -> int:
        """A short tail behind a long history comes through the hot cache in steps; anything else at once, streamed or into the hot buffer."""
        session = self.sessions[slot]
        if session.full or not self.gathers(session, wanted):
            return wanted
        return min(wanted, self.config.step_rows_max)

    def gathers(self, session: Session, wanted: int) -> bool:
        """Whether `wanted` rows select fewer old rows than there are, so that fetching misses moves less than streaming every layer."""
        return not session.full and wanted * self.config.topk < session.rows

    def begin(self, rows: PassRows, prefill: bool, attend: bool = True) -> Pass:
        """See `Tier`. Raises with the histories as they were; only `InputError` and `DeviceMemoryError` leave their caches untouched."""
        runs = rows.runs
        self.ready([slot for slot, _, _ in runs])
        for slot, first, last in runs:
            session = self.sessions[slot]
            self.poll(session)
            self.reserve(session, int(rows.positions[first]) + last - first)
        self.grow_ahead()
        made = self._pass_for(rows, prefill, attend)
        try:
            made.start()
        except BaseException:
            made.abandon()
            raise
        return made

    def _pass_for(self, rows: PassRows, prefill: bool, attend: bool) -> StepPass | FullPass | StreamPass:
        if prefill:
            assert len(rows.runs) == 1, "a prompt chunk belongs to one session"
            session, count = self.sessions[rows.runs[0][0]], len(rows.positions)
            if session.full and session.rows + count <= self.config.hot_rows:
                return FullPass(self, session, rows)
            if session.full or not self.gathers(session, count) or count > self.config.step_rows_max:
                return StreamPass(self, session, rows, attend)
        return StepPass(self, rows)

    def export(self, slot: int, first: int, target: np.ndarray) -> None:
        """See `Tier`. Uses neither device nor streams."""
        host_lives.export(self, self.sessions[slot].history, first, target)

    def adopt(self, slot: int, data: np.ndarray, rows_max: int) -> None:
        """See `Tier`. The cache stays cold."""
        session, first, rows = self.sessions[slot], self.rows(slot), data.shape[1]
        self.ready([slot])
        host_lives.make_room(self, session.history, rows_max)
        self.reserve(session, max(rows_max, first + rows))
        try:
            if session.full:
                self.leave_full(session)
            host_lives.write(self, session.history, data)
            self.upload_states(session)
        except BaseException:
            self.drop(slot, first)
            raise

    def truncate(self, slot: int, rows: int) -> None:
        """Keeps the first `rows` rows: waits for copies of the others, makes their slots unfindable in stream order. Done also where it raises."""
        session = self.sessions[slot]
        try:
            self.ready([slot])
            rollback = session.rollback = session.history.truncate(rows)
            for batch in rollback.wait_for:
                while any(pending == batch for pending, _ in session.copies):
                    self._complete_first(session)
            session.history.rolled_back(rollback)
            session.rollback = None
            first, last = rollback.forget
            if last > first and not session.full:
                hotcache.forget(self.stream, self.states, self.slot_tables, slot, first, last)
            self.upload_states(session)
        except BaseException:
            self.drop(slot, rows)
            raise

    def settle(self, slot: int) -> None:
        """Brings every row of the session to host memory and waits for it: committed rows equal logical rows after."""
        session = self.sessions[slot]
        self.ready([slot])
        try:
            self.bring_home(session)
        except BaseException:
            self.drop(slot, session.rows)
            raise

    def pending_rows(self) -> int:
        """Rows of all sessions that are not known to be in host memory yet."""
        return sum(session.rows - min(session.history.committed_rows, session.rows) for session in self.sessions.values())

    def counters(self) -> dict[int, np.ndarray]:
        """Counters of each open session: [groups, 8] u64, in the order of `hotcache.Counter`. Waits for the device."""
        every = self.slot_tables.counters.numpy(self.stream)
        return {slot: every[slot] for slot in self.sessions}

    def _count_closed(self, slot: int) -> None:
        self._closed_counters += self.slot_tables.counters.slice(slot, slot + 1).numpy(self.stream)[0].astype(np.int64)

    def counter_totals(self) -> dict[str, int]:
        """Sums over groups and over the sessions last opened in each slot, by counter name, and the bytes that misses brought from host memory."""
        return self._named_totals(self.slot_tables.counters.numpy(self.stream).astype(np.int64))

    def counter_totals_since_start(self) -> dict[str, int]:
        """As `counter_totals`, of every session that there ever was: these only grow. Waits for the device."""
        return self._named_totals(np.array([self._closed_counters, *self.counters().values()], np.int64))

    def _named_totals(self, every: np.ndarray) -> dict[str, int]:
        """every: counters [sessions, groups, 8]."""
        totals = {counter.name.lower(): int(every[:, :, counter].sum()) for counter in hotcache.Counter}
        planes = np.array([len(group) for group in self.layout.groups])
        fetched = every[:, :, hotcache.Counter.MISSES] + every[:, :, hotcache.Counter.UNCACHED]
        return totals | {"bytes_from_host": int((fetched * planes).sum()) * self.layout.row_bytes}

    # After failures

    def drop(self, slot: int, rows: int) -> None:
        """A call on this session failed half way: it has its first `rows` rows again. Bookkeeping only, and it never fails."""
        session = self.sessions[slot]
        assert 0 <= rows <= session.rows, f"drop to {rows} of {session.rows} rows"
        session.kept_rows, session.unsure, self._undrained = rows, True, True

    def ready(self, slots: list[int]) -> None:
        """Before any work: what failed calls left behind is waited for, and these sessions are whole again."""
        if self._undrained:
            self._drain()
        for slot in slots:
            if self.sessions[slot].unsure:
                self._restore(self.sessions[slot])

    def _drain(self) -> None:
        """Waits for everything that was enqueued. If a stream refuses, the whole device is waited for before that is raised."""
        try:
            for stream in (self.copy_stream, self.side_stream, self.stream):
                stream.synchronize()
        except HipError:
            self.device.synchronize()
            self._undrained = False
            raise
        self._undrained = False

    def _restore(self, session: Session) -> None:
        """Tells the device everything about a session again, from the host's record. The streams are drained. May be repeated."""
        history = session.history
        while session.copies:
            self._complete_first(session)
        if session.rollback is not None:
            history.rolled_back(session.rollback)
            session.rollback = None
        if session.kept_rows is not None:
            history.truncate(session.kept_rows)
            session.kept_rows = None
        if session.cold:
            self.slot_tables.reset(self.stream, session.slot)
            session.seed_slot = 0
        history.table_lost()
        self.upload_table(session)
        self.upload_states(session)
        if not session.full:
            hotcache.forget(self.stream, self.states, self.slot_tables, session.slot, history.rows, self.config.rows_max)
            hotcache.abandon(self.stream, self.states, self.slot_tables, session.slot, self.config.rows_max)
            self.next_round(session)
        session.cold = session.unsure = False

    # Used by the passes

    def outgrows(self, slot: int, rows: int) -> bool:
        """Whether a history that lies in its hot buffer as a whole would not with so many more rows."""
        session = self.sessions[slot]
        return session.full and session.history.rows + rows > self.config.hot_rows

    def reserve(self, session: Session, row_count: int) -> None:
        """Extents for `row_count` rows; page-locks another chunk of host memory when there are none. DeviceMemoryError leaves all as it was."""
        if row_count > self.config.rows_max:
            raise InputError(f"history: {row_count} rows asked, the tier was opened for {self.config.rows_max} rows a session")
        if row_count <= session.history.ready_rows:
            return
        host_lives.own_tail(self, session)
        try:
            self.host.reserve(session.history, row_count)
            self.upload_table(session)
        except HipError:
            self.drop(session.slot, session.rows)
            raise

    def grow_ahead(self) -> None:
        """Has the next chunk page-locked by a thread when the next 2 * extent_rows rows of every open session would not find extents."""
        wanted = 2 * len(self.sessions)  # at most, as every row has an extent
        if wanted > self.pool.free:
            wanted = sum(self._wanted_ahead(session) for session in self.sessions.values())
        self.host.grow_ahead(wanted)

    def _wanted_ahead(self, session: Session) -> int:
        rows = min(session.rows + 2 * self.shape.extent_rows, self.config.rows_max)
        return max(0, self.shape.extents_for(rows) - session.history.reserved_rows // self.shape.extent_rows)

    def upload_table(self, session: Session) -> None:
        """Sends the addresses of extents that the device does not have, in stream order."""
        send_table(self.stream, self.tables, session.slot, session.history)

    def upload_states(self, session: Session) -> None:
        """Sends hot address, phase, boundary and round of a session to the device, in stream order."""
        packed = hotcache.pack_states([(session.hot.address, session.full, session.history.boundary, session.round)])
        self.stream.upload(self.states.address + session.slot * hotcache.STATE_BYTES, packed)

    def leave_full(self, session: Session) -> None:
        """The history outgrows the hot buffer: rows behind the ring become cache slots, the first ring_rows slots become the ring."""
        self.bring_home(session)
        ring, held = self.config.ring_rows, min(session.history.rows, self.config.hot_rows)
        session.history.leave_full(ring)
        session.full = False
        if held > ring:
            hotcache.seed(self.stream, self.states, self.slot_tables, session.slot, ring, held, 0)
            session.seed_slot = (held - ring) % self.config.slots
        self.upload_states(session)

    def make_room(self, session: Session, count: int) -> None:
        """Ring slots for `count` rows: waits for the copies of the rows that they overwrite."""
        for _ in range(session.history.room(count)):
            self._complete_first(session)

    def written(self, session: Session, count: int) -> None:
        """`count` rows were enqueued behind the present ones: batches that are complete go to host memory, the boundary follows."""
        session.history.advance(count)
        self.copy_out(session, session.history.next_copies())
        self.apply_boundary(session)

    def bring_home(self, session: Session) -> None:
        """What `settle` does, inside a call that drops the session's rows if it fails."""
        self.copy_out(session, session.history.settle())
        while session.copies:
            self._complete_first(session)
        self.apply_boundary(session)

    def apply_boundary(self, session: Session) -> None:
        """Moves the device's boundary to where the history has it, after the copies that it passes."""
        if session.history.boundary_moved():
            for batch, event in session.copies:
                if batch.first < session.history.boundary:
                    self.stream.wait(event)
            self.upload_states(session)

    def mark(self, stream: Stream) -> Event:
        """An event that happens when what `stream` has enqueued is done. The caller closes it."""
        event = self.device.event()
        try:
            event.record(stream)
        except BaseException:
            event.close()
            raise
        return event

    def order(self, first: Stream, then: Stream) -> None:
        """What `then` enqueues from now on starts after what `first` has enqueued."""
        self._turn.record(first)
        then.wait(self._turn)

    def copy_out(self, session: Session, batches: list[CopyBatch]) -> None:
        """Enqueues the copies of some batches, each one launch or one strided copy a plane, after what the main stream has enqueued."""
        if not batches:
            return
        self.order(self.stream, self.copy_stream)
        row_bytes, ring = self.layout.row_bytes, session.history.ring_rows
        for batch in batches:
            source = session.hot.address + batch.first % ring * row_bytes
            extent = session.history.addresses[batch.first // self.shape.extent_rows]
            if self.config.copies_by_kernel:
                rows.copy_back(
                    self.copy_stream,
                    source,
                    extent,
                    self.group_planes,
                    self.shape,
                    source_plane_bytes=self.hot_plane_bytes,
                    first_row=batch.first % self.shape.extent_rows,
                    rows=batch.last - batch.first,
                )
            else:
                self._copy_planes_out(source, self.host.host_address(extent), batch)
            session.copies.append((batch, self.mark(self.copy_stream)))
            session.history.copy_enqueued(batch)

    def _copy_planes_out(self, source: int, home: int, batch: CopyBatch) -> None:
        """One strided copy a plane, where kernels cannot write host memory. home: host address of the batch's extent."""
        row_bytes = self.layout.row_bytes
        for index, layers in enumerate(self.layout.groups):
            place = self.shape.place(index)
            for plane in layers:
                target = home + place.row_offset(batch.first, plane)
                from_plane = source + plane * self.hot_plane_bytes
                self.copy_stream.copy_2d(target, place.stride_bytes, from_plane, row_bytes, row_bytes, batch.last - batch.first)

    def poll(self, session: Session) -> None:
        """Takes note of copies that have completed, without waiting."""
        while session.copies and session.copies[0][1].query():
            self._complete_first(session)

    def _complete_first(self, session: Session) -> None:
        batch, event = session.copies[0]
        event.synchronize()
        session.copies.pop(0)
        session.history.copy_completed(batch)
        event.close()

    def next_round(self, session: Session) -> None:
        """The host's copy of the round tag, which skips 0."""
        session.round = session.round + 1 if session.round < ROUND_TAG_MAX else 1

    def linear_buffer(self, row_count: int) -> Buffer:
        """A temporary for at least `row_count` rows of one layer."""
        rows = max(min(-(-row_count // LINEAR_STEP_ROWS) * LINEAR_STEP_ROWS, self.config.rows_max), row_count)
        return self.blocks.lend(rows * self.layout.row_bytes, Life.TEMPORARY, "staging")

    def check(self) -> None:
        """Invariants of pools and histories; every extent in use belongs to a session or a parked history, or to several."""
        self.pool.check()
        self.blocks.check()
        histories = [session.history for session in self.sessions.values()] + self.parked
        for history in histories:
            history.check()
        used = len({extent for history in histories for extent in history.extents})
        assert used == self.pool.capacity - self.pool.free, f"histories hold {used} extents, the pool lent {self.pool.capacity - self.pool.free}"

    def free(self) -> None:
        """Gives everything back, host memory included. Again is not an error."""
        with ExitStack() as steps:  # each has its turn, the last one first
            steps.push(self._owned)
            for slot in self.sessions:
                steps.callback(self.close, slot)


__all__ = ["HostTier", "HostTierConfig", "Session"]
