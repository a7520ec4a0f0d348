"""A history: the rows of one session, as a list of extents, and how far its new rows have come back from the device.

Resident tier (`ring_rows` 0): a row is in its extent as soon as it is written. Host tier: new rows are written to a device ring, where row p
lies at slot p mod ring_rows, and go to their extents in batches of 64 rows:

    row     0 ....... committed ....... enqueued ....... rows
            copy completed |  copies under way |  in the ring only
    read    from extents .. boundary .. from the ring .......

    batch:  due --copy_enqueued--> ENQUEUED --copy_completed--> COMPLETED, and gone once all before it are completed

The boundary, the first row that is read from the ring, moves when a batch is enqueued, to that batch's first row. Before work that uses the
new boundary, the device's main stream waits for the copies of all batches below it; so the boundary depends on row counts only, never on when
a copy completes.

Invariants (`History.check` proves them):
- 0 <= committed <= enqueued <= rows <= reserved rows = extents * extent_rows, and boundary <= enqueued;
- the batches under way are disjoint, ascending, cover [committed, enqueued) and cross no multiple of 64;
- rows - boundary <= ring_rows: what is read from the ring is still there; a slot is overwritten only when its old row is committed and
  behind the boundary;
- an extent that holds a row >= committed is private (reference count 1) once a row at or behind it may be written: full extents may be shared,
  and a shared tail, which a truncate can leave, refuses every write until `private_tail` has replaced it.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from glm53.mem import compiled
from glm53.mem.extents import ExtentIds, ExtentPool

COPY_ROWS = compiled.COPY_ROWS
_ROWS, _ENQUEUED, _COMMITTED, _BOUNDARY, _RING_ROWS, _BATCHES = range(6)  # as in compiled.HISTORY


class OutOfExtents(Exception):
    """The pool has too few free extents. `missing` says how many more are needed; nothing was taken."""

    def __init__(self, missing: int):
        self.missing = missing
        super().__init__(f"{missing} more extents are needed")


class HistoryState(enum.Enum):
    """Life of a history.

    OPEN --truncate, with copies to wait for--> ROLLING_BACK --rolled_back--> OPEN --close--> CLOSED; close is legal from ROLLING_BACK too.
    """

    OPEN = "open"  # everything is legal
    ROLLING_BACK = "rolling back"  # only copy_completed, rolled_back, close and reading are legal
    CLOSED = "closed"  # only reading is legal; there are no rows and no extents


class BatchState(enum.IntEnum):
    """State of a copy-back batch that the history keeps."""

    ENQUEUED = compiled.BATCH_ENQUEUED  # its bytes may be on their way: neither its ring slots nor its extent rows may be written
    COMPLETED = compiled.BATCH_COMPLETED  # waits only for batches before it, so that committed rows are a prefix


class CopyBatch(NamedTuple):
    """Rows [first, last) that go from the ring to their extent in one copy. Lies in one extent and does not wrap in the ring."""

    first: int
    last: int


@dataclass(frozen=True)
class ExtentCopy:
    """Rows [0, rows) of every plane of one extent, to be copied into another before either is written. Ids of the pool."""

    source: int
    target: int
    rows: int


@dataclass(frozen=True)
class Rollback:
    """What a truncate asks of the binding: first wait for `wait_for`, then make positions [forget[0], forget[1]) unfindable in stream order.

    `boundary` and `committed_rows` hold once it is done (`committed_rows` at least: other copies may complete meanwhile).
    """

    rows: int
    wait_for: tuple[CopyBatch, ...]
    forget: tuple[int, int]
    boundary: int
    committed_rows: int


@dataclass(frozen=True)
class Fork:
    """A forked history and the copy of its partial extent, None if it has none."""

    history: History
    copy: ExtentCopy | None


class History:
    """Rows of one token history in a pool.

    `ring_rows` is the size of the device buffer that new rows are written to, 0 for the resident tier. A multiple of 64, at least 128, is a
    ring that wraps; any other size is a buffer in which row p lies at slot p and that the history may fill but not outgrow: `leave_full` comes
    first. Not thread-safe.
    """

    def __init__(self, pool: ExtentPool, ring_rows: int = 0):
        assert ring_rows >= 0, f"ring_rows: got {ring_rows}, wanted at least 0"
        self._pool = pool
        self._ids: ExtentIds = np.empty(0, np.int64)
        self._addresses: list[int] = []  # of _ids
        self._told = 0
        self._ready_rows = 0
        self._record: npt.NDArray[Any] = np.zeros(1, compiled.HISTORY)
        self._numbers: npt.NDArray[np.int64] = self._record.view(np.int64)
        self._record["ring_rows"] = ring_rows
        self._batches: npt.NDArray[Any] = np.zeros(4, compiled.BATCH)
        self._state = HistoryState.OPEN
        self._rollback: Rollback | None = None  # the one under way
        self._boundary_told = 0

    # Reading

    @property
    def state(self) -> HistoryState:
        return self._state

    @property
    def ring_rows(self) -> int:
        """Slots of the device buffer for new rows; 0: resident."""
        return self._numbers.item(_RING_ROWS)

    @property
    def rows(self) -> int:
        """Rows written."""
        return self._numbers.item(_ROWS)

    @property
    def enqueued_rows(self) -> int:
        """Rows whose copy to the extents is enqueued. Enqueued is not completed."""
        return self._numbers.item(_ENQUEUED)

    @property
    def committed_rows(self) -> int:
        """Rows known to be in their extents, and all rows before them too."""
        return self._numbers.item(_COMMITTED)

    @property
    def boundary(self) -> int:
        """First row that is read from the ring; the rows before it are read from extents."""
        return self._numbers.item(_BOUNDARY)

    @property
    def pending(self) -> list[CopyBatch]:
        """Batches enqueued and not completed, oldest first."""
        held = self._batches[: self._numbers.item(_BATCHES)]
        return [CopyBatch(first, last) for first, last, state in held.tolist() if state == BatchState.ENQUEUED]

    @property
    def reserved_rows(self) -> int:
        """Rows that fit without taking another extent."""
        return len(self._ids) * self._pool.shape.extent_rows

    @property
    def extents(self) -> list[int]:
        """Extent ids by position."""
        return [int(extent) for extent in self._ids]

    @property
    def addresses(self) -> list[int]:
        """Extent addresses on the device by position; valid until the next reserve, private_tail, truncate or close. Not to be changed."""
        return self._addresses

    @property
    def told(self) -> int:
        """How many of `addresses`, from the front, the device's table has, as `table_sent` left it."""
        return self._told

    @property
    def ready_rows(self) -> int:
        """Rows that may be there with nothing to be done first: no reserve, no private_tail, no table. 0: it is not known whether there are any."""
        return self._ready_rows

    @property
    def shared_tail(self) -> bool:
        """Whether the extent of the next row to be copied or written is shared, so that `private_tail` must come before any write."""
        place = self.enqueued_rows // self._pool.shape.extent_rows
        return place < len(self._ids) and self._pool.references(int(self._ids[place])) > 1

    # Growing

    def reserve(self, rows: int) -> bool:
        """Makes room for `rows` rows in all. True if extents were taken, so that the device's table is out of date.

        Raises OutOfExtents with nothing taken.
        """
        self._assert_open("reserve")
        wanted = self._pool.shape.extents_for(rows) - len(self._ids)
        if wanted <= 0:
            return False
        taken = self._pool.take_many(wanted)
        if taken is None:
            raise OutOfExtents(wanted - self._pool.free)
        self._set_ids(len(self._ids), taken)
        return True

    def private_tail(self) -> ExtentCopy | None:
        """Replaces a shared tail by an extent of its own; the copy to make before the next write, or None if the tail is private.

        The device's table is out of date after a copy. Raises OutOfExtents with nothing changed.
        """
        self._assert_open("private_tail")
        if not self.shared_tail:
            return None
        place, used = divmod(self.enqueued_rows, self._pool.shape.extent_rows)
        shared, own = int(self._ids[place]), self._pool.take()
        if own is None:
            raise OutOfExtents(1)
        self._pool.release(shared)
        self._set_ids(place, np.concatenate([np.array([own], np.int64), self._ids[place + 1 :]]))
        return ExtentCopy(shared, own, used)

    def room(self, rows: int) -> int:
        """Completions, oldest batch of `pending` first, to wait for before `rows` more rows may be written to the ring, accepted or not.

        Due batches are enqueued first; then any number up to `ring_rows - 127` has an answer. A step launched ahead counts its rows too.
        """
        assert rows >= 0, f"room for {rows} rows"
        waits = int(compiled.ring_waits(self._record, self._batches, rows))
        assert waits != compiled.BEYOND_BOUNDARY, self._beyond(rows)
        return waits

    def advance(self, rows: int) -> None:
        """`rows` accepted rows were written behind the present ones."""
        self._assert_writable("advance", rows)
        waits = compiled.advance_rows(self._record, self._batches, rows)
        assert waits != compiled.BEYOND_BOUNDARY, self._beyond(rows)
        assert waits == 0, f"advance by {rows} rows overwrites ring slots of rows on their way: {waits} completions to wait for first"

    def bypass(self, rows: int) -> None:
        """`rows` rows were brought to their extents past the ring, and that has completed. Legal only when all rows before are committed."""
        self._assert_writable("bypass", rows)
        assert self.committed_rows == self.rows, f"bypass with {self.committed_rows} of {self.rows} rows committed: settle first"
        self._set_settled(self.rows + rows)

    def leave_full(self, ring_rows: int) -> None:
        """The first `ring_rows` slots of the buffer become a ring that wraps, empty: every row so far is read from its extent."""
        self._assert_open("leave_full")
        assert ring_rows >= 2 * COPY_ROWS and ring_rows % COPY_ROWS == 0, f"ring_rows: got {ring_rows}, wanted a multiple of 64, at least 128"
        assert ring_rows <= self.ring_rows, f"ring of {ring_rows} rows in a buffer of {self.ring_rows}"
        assert self.committed_rows == self.rows, f"leave_full with {self.committed_rows} of {self.rows} rows committed: settle first"
        self._record["ring_rows"] = ring_rows
        self._set_settled(self.rows)

    def move(self, ring_rows: int) -> None:
        """The device buffer for new rows is another one, a ring of `ring_rows` slots with nothing in it: every row is read from its extent."""
        self._assert_open("move")
        assert self.committed_rows == self.rows, f"move with {self.committed_rows} of {self.rows} rows committed: settle first"
        self._record["ring_rows"] = ring_rows
        self._set_settled(self.rows)
        self.table_lost()

    def table_sent(self) -> None:
        """The device's table has every address, in stream order."""
        self._told = len(self._ids)
        self._ready_rows = 0 if self.shared_tail else self.reserved_rows

    def table_lost(self) -> None:
        """What the device's table has is not known."""
        self._told = self._ready_rows = 0

    def _set_settled(self, rows: int) -> None:
        for name in ("rows", "enqueued", "committed", "boundary"):
            self._record[name] = rows

    # Copy-back

    def next_copies(self) -> list[CopyBatch]:
        """Batches that are due: [64n, 64n + 64) once row 64n + 63 is written; the first one short if a short one came before it."""
        return self._due(short_last=False)

    def settle(self) -> list[CopyBatch]:
        """Batches that bring every row to its extent; the last one may be short. Once they are completed, committed rows equal rows."""
        return self._due(short_last=True)

    def _due(self, short_last: bool) -> list[CopyBatch]:
        self._assert_open("copies")
        enqueued = self.enqueued_rows
        waiting = self.rows - enqueued
        if waiting == 0 or (not short_last and waiting < COPY_ROWS - enqueued % COPY_ROWS):
            return []
        found = np.zeros(waiting // COPY_ROWS + 2, compiled.BATCH)
        count = compiled.due_batches(self._record, int(short_last), found)
        return [CopyBatch(first, last) for first, last, _ in found[:count].tolist()]

    def copy_enqueued(self, batch: CopyBatch) -> None:
        """The copy of a batch of `next_copies` or `settle` is enqueued, in their order. Moves the boundary to the batch's first row."""
        self._assert_writable("copy_enqueued", 0)
        first, last = batch
        assert first == self.enqueued_rows, f"copy of [{first}, {last}) enqueued, the next one begins at {self.enqueued_rows}"
        end = (first // COPY_ROWS + 1) * COPY_ROWS
        assert first < last <= min(end, self.rows), f"copy of [{first}, {last}) enqueued, wanted an end in ({first}, {min(end, self.rows)}]"
        count = self._numbers.item(_BATCHES)
        if count == len(self._batches):
            self._batches = np.concatenate([self._batches, np.zeros(count, compiled.BATCH)])
        self._batches[count] = (first, last, BatchState.ENQUEUED)
        self._record["batches"] = count + 1
        self._record["enqueued"] = last
        self._record["boundary"] = first

    def copy_completed(self, batch: CopyBatch) -> None:
        """A batch of `pending` is in its extent. In any order: committed rows follow the completed front."""
        assert self._state is not HistoryState.CLOSED, "copy_completed on a closed history"
        refusal = compiled.complete_batch(self._record, self._batches, *batch)
        assert refusal == 0, f"copy of [{batch.first}, {batch.last}) completed twice or never enqueued; pending: {self.pending}"

    def boundary_moved(self) -> bool:
        """Whether the boundary differs from when this was last asked, so that the device has to be told."""
        told, self._boundary_told = self._boundary_told, self.boundary
        return told != self._boundary_told

    # Rollback, end, fork

    def truncate(self, rows: int) -> Rollback:
        """Keeps the first `rows` rows and gives back the extents behind them.

        Done when it returns, unless there are copies to wait for: then the history is ROLLING_BACK until each of them is `copy_completed` and
        `rolled_back` is called, which does it.
        """
        self._assert_open("truncate")
        before = self.rows
        assert 0 <= rows <= before, f"truncate to {rows} of {before} rows"
        self._ready_rows = 0
        waits = np.zeros(len(self._batches), compiled.BATCH)
        under_way = [batch.first for batch in self.pending if batch.last <= rows]
        boundary, committed = min(self.boundary, rows), min([*under_way, self.enqueued_rows, rows])
        count = compiled.truncate_rows(self._record, self._batches, rows, waits)
        wait_for = tuple(CopyBatch(first, last) for first, last, _ in waits[:count].tolist())
        rollback = Rollback(rows, wait_for, (rows, before), boundary, committed)
        if wait_for:
            self._state, self._rollback = HistoryState.ROLLING_BACK, rollback
        else:
            self._release_behind(rows)
        return rollback

    def rolled_back(self, rollback: Rollback) -> None:
        """Every copy of `rollback.wait_for` has completed: the rows go. Nothing is left to do where there was nothing to wait for."""
        if self._state is HistoryState.OPEN:
            assert not rollback.wait_for and rollback.rows == self.rows, f"no rollback to {rollback.rows} rows is under way"
            return
        assert self._state is HistoryState.ROLLING_BACK and rollback == self._rollback, f"no rollback to {rollback.rows} rows is under way"
        left = compiled.truncate_rows(self._record, self._batches, rollback.rows, np.zeros(len(self._batches), compiled.BATCH))
        assert left == 0, f"rolled_back with {left} copies still under way that touch rows behind {rollback.rows}"
        self._state, self._rollback = HistoryState.OPEN, None
        self._release_behind(rollback.rows)

    def close(self) -> None:
        """Gives back every extent. The caller has made sure that no copy and no kernel still works on them; pending batches are forgotten."""
        assert self._state is not HistoryState.CLOSED, "a history closed twice"
        self._record["batches"] = 0
        self._set_settled(0)
        self._release_behind(0)
        self.table_lost()
        self._state, self._rollback = HistoryState.CLOSED, None

    def _release_behind(self, rows: int) -> None:
        keep = self._pool.shape.extents_for(rows)
        if keep < len(self._ids):
            self._pool.release_many(self._ids[keep:])
            self._set_ids(keep, self._ids[:0])

    def fork(self, rows: int, ring_rows: int | None = None) -> Fork:
        """A history with the first `rows` rows of this one, all committed (settle first). Full extents are shared, at most one is copied.

        `ring_rows` of the new history: this one's if not given. Its ring is empty. Raises OutOfExtents with nothing changed.
        """
        self._assert_open("fork")
        assert 0 <= rows <= self.committed_rows, f"fork at {rows} with {self.committed_rows} rows committed: settle first"
        full, tail = divmod(rows, self._pool.shape.extent_rows)
        own = self._pool.take_many(1 if tail else 0)
        if own is None:
            raise OutOfExtents(1)
        fork = History(self._pool, self.ring_rows if ring_rows is None else ring_rows)
        self._pool.share_many(self._ids[:full])
        fork._set_ids(0, np.concatenate([self._ids[:full], own]))
        fork._set_settled(rows)
        return Fork(fork, ExtentCopy(int(self._ids[full]), int(own[0]), tail) if tail else None)

    def _set_ids(self, place: int, ids: ExtentIds) -> None:
        """The extents from `place` on are these."""
        self._ids = np.concatenate([self._ids[:place], ids])
        self._addresses[place:] = self._pool.addresses(ids).tolist()
        self._told, self._ready_rows = min(self._told, place), 0

    # Assertions

    def _assert_open(self, action: str) -> None:
        assert self._state is HistoryState.OPEN, f"{action} on a history that is {self._state.value}"

    def _assert_writable(self, action: str, rows: int) -> None:
        if rows >= 0 and self.rows + rows <= self._ready_rows:
            return
        self._assert_open(action)
        assert rows >= 0 and self.rows + rows <= self.reserved_rows, f"{action} by {rows} beyond {self.reserved_rows} reserved rows"
        assert not self.shared_tail, f"{action} into a shared extent: private_tail first"

    def _beyond(self, rows: int) -> str:
        return (
            f"{rows} rows behind {self.rows} overwrite ring slots (of {self.ring_rows}) behind the boundary {self.boundary}: "
            f"enqueue due copies {self.next_copies()} or leave_full first, or write fewer rows at once"
        )

    def check(self) -> None:
        """Proves the invariants; AssertionError names what differs."""
        rows, enqueued, committed, boundary = self.rows, self.enqueued_rows, self.committed_rows, self.boundary
        assert 0 <= rows <= self.reserved_rows, f"{rows} rows in {self.reserved_rows} reserved"
        assert 0 <= committed <= enqueued <= rows, f"committed {committed}, enqueued {enqueued}, rows {rows}"
        assert boundary <= enqueued, f"boundary {boundary} above {enqueued} enqueued rows"
        held = self._batches[: self._numbers.item(_BATCHES)]
        first = committed
        for batch in held:
            assert batch["first"] == first < batch["last"], f"batch {batch} does not begin at {first}"
            assert (batch["last"] - 1) // COPY_ROWS == first // COPY_ROWS, f"batch {batch} crosses a multiple of {COPY_ROWS}"
            first = int(batch["last"])
        assert first == enqueued, f"batches end at {first}, {enqueued} rows are enqueued"
        assert len(held) == 0 or held[0]["state"] == BatchState.ENQUEUED, "a completed front batch was not retired"
        if self.ring_rows:
            assert rows - boundary <= self.ring_rows, f"rows [{boundary}, {rows}) in a ring of {self.ring_rows}"
        else:
            assert committed == boundary == rows, f"resident history with committed {committed}, boundary {boundary}, rows {rows}"
        assert len(np.unique(self._ids)) == len(self._ids), "an extent stands twice in one history"
        counts = self._pool.reference_counts(self._ids)
        assert (counts > 0).all(), "a history holds a free extent"
        tail = committed // self._pool.shape.extent_rows
        assert (counts[tail + 1 :] == 1).all(), "an extent behind the committed rows is shared"
        assert tail >= len(counts) or counts[tail] == 1 or committed == rows, "rows are on their way into a shared extent"
        assert self.addresses == self._pool.addresses(self._ids).tolist(), "addresses are out of date"
        assert 0 <= self._told <= len(self._ids), f"{self._told} of {len(self._ids)} addresses told"
        writable = self._state is HistoryState.OPEN and self._told == len(self._ids) and not self.shared_tail
        assert self._ready_rows in ((0, self.reserved_rows) if writable else (0,)), f"{self._ready_rows} rows ready of {self.reserved_rows}"
        assert (self._state is HistoryState.ROLLING_BACK) == (self._rollback is not None), "rollback and state differ"
        assert self._state is not HistoryState.CLOSED or (rows == 0 and len(self._ids) == 0), "a closed history holds rows or extents"
