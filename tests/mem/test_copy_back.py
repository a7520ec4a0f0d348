"""Histories with a ring, byte by byte: a simulated ring and extents are driven by the decisions alone, beside a naive twin.

Rows are numbers that name history, position and how often the position was rewritten. A copy lands at a random time between its enqueueing
and its completion and reads the ring when it lands, so a slot overwritten too early, an extent given back too early, or a boundary that moved
too far all end in a row that reads back wrong.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import pytest

from glm53.mem.extents import ExtentPool, ExtentShape
from glm53.mem.history import CopyBatch, ExtentCopy, History, HistoryState, OutOfExtents, Rollback

BASE = 1 << 20
POISON = -1


@dataclass
class Session:
    """One history, its simulated ring, and the twin's view: the rows it must read back and how far each has come."""

    history: History
    ring: np.ndarray
    rows: list[int] = field(default_factory=list)
    progress: list[int] = field(default_factory=list)  # per row: 0 in the ring, 1 enqueued, 2 committed
    last_batch_first: int = 0
    enqueued: list[CopyBatch] = field(default_factory=list)  # not completed, oldest first
    landed: set[CopyBatch] = field(default_factory=set)
    table: list[int] = field(default_factory=list)  # addresses that the device was told

    def prefix(self, least: int) -> int:
        """Rows before the first one that has not come as far as `least`."""
        return next((i for i, p in enumerate(self.progress) if p < least), len(self.progress))


class Simulation:
    """Memory of a pool and its sessions. `step` does one random operation; `verify` reads everything back."""

    def __init__(self, seed: int, extent_rows: int, ring_rows: int, extents: int, hot_rows: int = 0):
        self.rng = random.Random(seed)
        self.shape = ExtentShape(extent_rows, planes=1, row_bytes=16)
        self.pool = ExtentPool(self.shape)
        self.pool.add_slab(BASE, extents)
        self.memory = np.full((extents, extent_rows), POISON, np.int64)
        self.ring_rows = ring_rows
        self.buffer_rows = hot_rows or ring_rows  # new histories fill it before they leave_full
        self.sessions: list[Session] = []
        self.serial = 0
        self.done: dict[str, int] = {}

    def extent_rows_of(self, session: Session, row: int) -> tuple[int, int]:
        place, offset = divmod(row, self.shape.extent_rows)
        return (session.history.addresses[place] - BASE) // self.shape.extent_bytes, offset

    def copy_extent(self, copy: ExtentCopy | None) -> None:
        if copy is not None:
            self.memory[copy.target, : copy.rows] = self.memory[copy.source, : copy.rows]

    def land(self, session: Session, batch: CopyBatch) -> None:
        if batch in session.landed:
            return
        session.landed.add(batch)
        for row in range(*batch):
            self.memory[self.extent_rows_of(session, row)] = session.ring[row % session.history.ring_rows]

    def complete(self, session: Session, batch: CopyBatch) -> None:
        self.land(session, batch)
        session.history.copy_completed(batch)
        session.enqueued.remove(batch)
        session.landed.discard(batch)
        for row in range(*batch):
            if row < len(session.progress):
                session.progress[row] = 2

    def enqueue(self, session: Session, batches: list[CopyBatch]) -> None:
        for batch in batches:
            session.history.copy_enqueued(batch)
            for before in session.enqueued:  # the main stream waits for what the new boundary passes
                self.land(session, before)
            session.enqueued.append(batch)
            session.last_batch_first = batch.first
            session.progress[batch.first : batch.last] = [1] * (batch.last - batch.first)

    def grow(self, session: Session, rows: int) -> bool:
        """Extents for `rows` more rows and a private tail; False if the pool is exhausted, with nothing changed."""
        free = self.pool.free
        if len(session.rows) + rows <= session.history.ready_rows:
            self.done["ready"] = self.done.get("ready", 0) + 1
            return True
        try:
            self.copy_extent(session.history.private_tail())
            session.history.reserve(len(session.rows) + rows)
        except OutOfExtents as short:
            assert short.missing > 0 and self.pool.free in (free, free - 1)
            return False
        if self.rng.random() < 0.8:
            told = session.history.told
            session.table[told:] = session.history.addresses[told:]
            session.history.table_sent()
        return True

    def write(self, session: Session) -> None:
        """A step: more rows than are accepted go to the ring, as a verify step or one launched ahead does."""
        history, present = session.history, len(session.rows)
        written = self.rng.randint(1, self.ring_rows - 127)
        accepted = self.rng.randint(0, written)
        if not self.grow(session, accepted):
            return
        if present + written > history.ring_rows:
            self.leave_full(session)
        waits = history.room(written)
        lost = range(max(0, present + written - history.ring_rows))  # rows whose slots go
        assert all(p < history.boundary for p in lost[-1:]), "room allowed a slot that the boundary needs"
        assert waits == sum(any(row in lost for row in range(*batch)) for batch in session.enqueued)
        for batch in list(session.enqueued)[:waits]:
            self.complete(session, batch)
        assert history.room(written) == 0
        for row in range(present, present + written):
            self.serial += 1
            session.ring[row % session.history.ring_rows] = self.serial
            if row < present + accepted:
                session.rows.append(self.serial)
                session.progress.append(0)
        history.advance(accepted)
        self.enqueue(session, history.next_copies())

    def finish_copies(self, session: Session) -> None:
        self.enqueue(session, session.history.settle())
        for batch in list(session.enqueued):
            self.complete(session, batch)

    def leave_full(self, session: Session) -> None:
        if session.history.ring_rows == self.buffer_rows != self.ring_rows:
            self.finish_copies(session)
            session.history.leave_full(self.ring_rows)
            session.last_batch_first = len(session.rows)
            self.done["leave_full"] = self.done.get("leave_full", 0) + 1

    def bypass(self, session: Session) -> None:
        """A large append: settled first, then rows go straight to extents."""
        count = self.rng.randint(1, 200)
        if not self.grow(session, count):
            return
        self.leave_full(session)
        self.finish_copies(session)
        session.history.bypass(count)
        for row in range(len(session.rows), len(session.rows) + count):
            self.serial += 1
            self.memory[self.extent_rows_of(session, row)] = self.serial
            session.rows.append(self.serial)
            session.progress.append(2)
        session.last_batch_first = len(session.rows)

    def settle(self, session: Session) -> None:
        if not self.grow(session, 0):
            return
        self.enqueue(session, session.history.settle())

    def truncate(self, session: Session) -> None:
        keep = self.rng.choice([self.rng.randint(0, len(session.rows)), max(0, len(session.rows) - self.rng.randint(0, 80))])
        before, boundary = len(session.rows), session.history.boundary
        rollback = session.history.truncate(keep)
        assert set(rollback.wait_for) == {batch for batch in session.enqueued if batch.last > keep}
        assert rollback.forget == (keep, before) and rollback.boundary == min(boundary, keep)
        if rollback.wait_for:
            assert session.history.state is HistoryState.ROLLING_BACK and len(session.history.addresses) * self.shape.extent_rows >= before
        waiting = list(rollback.wait_for)
        self.rng.shuffle(waiting)
        for batch in waiting:
            self.complete(session, batch)
        session.history.rolled_back(rollback)
        assert (session.history.boundary, session.history.committed_rows) == (rollback.boundary, rollback.committed_rows)
        del session.rows[keep:], session.progress[keep:]
        session.last_batch_first = min(session.last_batch_first, keep)

    def fork(self, session: Session) -> None:
        rows = self.rng.randint(0, session.history.committed_rows)
        try:
            fork = session.history.fork(rows, ring_rows=self.ring_rows)
        except OutOfExtents as short:
            assert short.missing == 1 and self.pool.free == 0 and rows % self.shape.extent_rows
            return
        assert (fork.copy is None) == (rows % self.shape.extent_rows == 0)
        self.copy_extent(fork.copy)
        ring = np.full(self.ring_rows, POISON, np.int64)
        self.sessions.append(Session(fork.history, ring, session.rows[:rows], [2] * rows, rows))

    def close(self, session: Session) -> None:
        for batch in session.enqueued:
            self.land(session, batch)
        session.history.close()
        self.sessions.remove(session)

    def step(self) -> None:
        if not self.sessions or (len(self.sessions) < 5 and self.rng.random() < 0.05):
            self.sessions.append(Session(History(self.pool, self.buffer_rows), np.full(self.buffer_rows, POISON, np.int64)))
        session = self.rng.choice(self.sessions)
        if self.rng.random() < 0.5 and session.enqueued:
            self.land(session, self.rng.choice(session.enqueued))
        if self.rng.random() < 0.3 and session.enqueued:
            self.complete(session, self.rng.choice(session.enqueued))
        action = self.rng.choices(["write", "settle", "truncate", "bypass", "fork", "close"], [70, 5, 10, 5, 6 if len(self.sessions) < 7 else 0, 2])[
            0
        ]
        self.done[action] = self.done.get(action, 0) + 1
        getattr(self, action)(session)

    def verify(self) -> None:
        self.pool.check()
        used: set[int] = set()
        for session in self.sessions:
            history = session.history
            history.check()
            used |= set(history.extents)
            assert history.rows == len(session.rows)
            assert history.committed_rows == session.prefix(2) and history.enqueued_rows == session.prefix(1)
            assert history.boundary == session.last_batch_first and history.pending == session.enqueued
            assert session.table[: history.told] == history.addresses[: history.told], "the device's table is out of date"
            boundary = history.boundary
            table = [(address - BASE) // self.shape.extent_bytes for address in history.addresses]
            flat = self.memory[table].reshape(-1)[:boundary]
            ring = session.ring[np.arange(boundary, history.rows) % history.ring_rows]
            assert np.array_equal(np.concatenate([flat, ring]), np.array(session.rows, np.int64)), "a row reads back wrong"
        assert used == set(range(self.pool.capacity)) - {e for e in range(self.pool.capacity) if self.pool.references(e) == 0}
        references = [sum(extent in session.history.extents for session in self.sessions) for extent in range(self.pool.capacity)]
        assert references == [self.pool.references(extent) for extent in range(self.pool.capacity)], "an extent leaked"


@pytest.mark.parametrize("ring_rows, hot_rows", [(128, 0), (192, 0), (256, 0), (192, 300), (192, 448)])
@pytest.mark.parametrize("extent_rows", [64, 192])
@pytest.mark.parametrize("seed", range(3))
def test_rows_read_back_through_the_boundary(seed: int, extent_rows: int, ring_rows: int, hot_rows: int) -> None:
    simulation = Simulation(seed, extent_rows, ring_rows, extents=24, hot_rows=hot_rows)
    for _ in range(500):
        simulation.step()
        simulation.verify()
    assert {"write", "settle", "truncate", "bypass", "fork", "ready"} <= simulation.done.keys()
    assert not hot_rows or "leave_full" in simulation.done
    for session in list(simulation.sessions):
        simulation.close(session)
    simulation.pool.check()
    assert simulation.pool.free == simulation.pool.capacity


def ring_history(ring_rows: int = 128, extents: int = 8, extent_rows: int = 64) -> History:
    pool = ExtentPool(ExtentShape(extent_rows, 1, 16))
    pool.add_slab(BASE, extents)
    history = History(pool, ring_rows)
    history.reserve(extents * extent_rows)
    return history


def step(history: History, rows: int) -> list[CopyBatch]:
    history.advance(rows)
    due = history.next_copies()
    for batch in due:
        history.copy_enqueued(batch)
    return due


def test_batches_are_due_when_their_last_row_is_written_and_move_the_boundary_one_behind() -> None:
    history = ring_history(256)
    assert step(history, 63) == [] and history.boundary == 0
    assert step(history, 1) == [CopyBatch(0, 64)] and history.boundary == 0 and history.enqueued_rows == 64
    assert not history.boundary_moved()
    assert step(history, 64) == [CopyBatch(64, 128)] and history.boundary == 64
    assert history.boundary_moved() and not history.boundary_moved()
    assert history.committed_rows == 0, "enqueued is not completed"
    history.copy_completed(CopyBatch(64, 128))
    assert history.committed_rows == 0, "committed rows are a prefix"
    history.copy_completed(CopyBatch(0, 64))
    assert history.committed_rows == 128 and history.pending == []


def test_batch_after_an_unaligned_settle_or_truncate_is_short() -> None:
    history = ring_history(256)
    step(history, 70)
    assert history.settle() == [CopyBatch(64, 70)]
    history.copy_enqueued(CopyBatch(64, 70))
    assert history.settle() == [] and history.boundary == 64
    assert step(history, 58) == [CopyBatch(70, 128)] and history.boundary == 70
    for batch in history.pending:
        history.copy_completed(batch)
    assert history.truncate(100) == Rollback(100, (), (100, 128), 70, 100)
    assert step(history, 28) == [CopyBatch(100, 128)]


def test_room_counts_the_completions_of_the_slots_that_go() -> None:
    history = ring_history(128)
    step(history, 1)
    for _ in range(127):
        assert history.room(1) == 0
        step(history, 1)
    assert history.pending == [CopyBatch(0, 64), CopyBatch(64, 128)]
    assert history.room(0) == 0 and history.room(1) == 1 and history.room(64) == 1
    with pytest.raises(AssertionError, match="behind the boundary 64"):
        history.room(65)
    with pytest.raises(AssertionError, match="1 completions to wait for"):
        history.advance(1)
    history.copy_completed(CopyBatch(0, 64))
    assert history.room(1) == 0
    history.advance(1)
    assert History(ExtentPool(ExtentShape(64, 1, 16))).room(10**9) == 0, "a resident history has no ring to wait for"


@pytest.mark.parametrize("ring_rows", [128, 192, 320])
def test_widest_step_always_has_room_once_copies_are_enqueued(ring_rows: int) -> None:
    widest = ring_rows - 127
    for offset in range(64):
        history = ring_history(ring_rows, extents=32)
        step(history, offset)
        for _ in range(8):
            for batch in history.pending[: history.room(widest)]:
                history.copy_completed(batch)
            step(history, widest)


def test_rollback_waits_for_copies_of_rows_that_go_and_keeps_what_they_hold() -> None:
    history = ring_history(256)
    step(history, 140)
    with pytest.raises(AssertionError, match="truncate to 141"):
        history.truncate(141)
    rollback = history.truncate(100)
    assert rollback == Rollback(100, (CopyBatch(64, 128),), (100, 140), 64, 0)
    assert history.state is HistoryState.ROLLING_BACK and history.rows == 140
    history.check()
    with pytest.raises(AssertionError, match="rolling back"):
        history.advance(1)
    with pytest.raises(AssertionError, match="1 copies still under way"):
        history.rolled_back(rollback)
    history.copy_completed(CopyBatch(64, 128))
    with pytest.raises(AssertionError, match="no rollback to 99"):
        history.rolled_back(Rollback(99, (), (99, 140), 0, 0))
    history.rolled_back(rollback)
    assert (history.rows, history.enqueued_rows, history.committed_rows, history.reserved_rows) == (100, 100, 0, 128)
    history.copy_completed(CopyBatch(0, 64))
    assert history.committed_rows == 100
    history.rolled_back(history.truncate(90))
    with pytest.raises(AssertionError, match="no rollback"):
        history.rolled_back(rollback)
    history.check()


def test_a_buffer_that_is_not_outgrown_becomes_a_ring() -> None:
    history = ring_history(ring_rows=300, extents=16)
    step(history, 300)
    with pytest.raises(AssertionError, match="leave_full first"):
        history.room(1)
    with pytest.raises(AssertionError, match="with 0 of 300 rows committed: settle first"):
        history.leave_full(192)
    for batch in history.settle():
        history.copy_enqueued(batch)
    for batch in history.pending:
        history.copy_completed(batch)
    for wrong in (0, 64, 130, 320):
        with pytest.raises(AssertionError, match="ring"):
            history.leave_full(wrong)
    history.leave_full(192)
    assert (history.boundary, history.committed_rows, history.ring_rows) == (300, 300, 192) and history.boundary_moved()
    assert step(history, 20) == [CopyBatch(300, 320)]
    history.check()


def test_bypass_needs_settled_rows() -> None:
    history = ring_history(256)
    step(history, 10)
    with pytest.raises(AssertionError, match="settle first"):
        history.bypass(100)
    for batch in history.settle():
        history.copy_enqueued(batch)
        history.copy_completed(batch)
    history.bypass(100)
    assert (history.rows, history.committed_rows, history.boundary) == (110, 110, 110)
    assert step(history, 18) == [CopyBatch(110, 128)]


def test_copies_are_refused_out_of_order_twice_or_beyond_the_rows() -> None:
    history = ring_history(256)
    history.advance(130)
    for wrong in (CopyBatch(64, 128), CopyBatch(0, 65), CopyBatch(0, 0)):
        with pytest.raises(AssertionError, match="enqueued"):
            history.copy_enqueued(wrong)
    history.copy_enqueued(CopyBatch(0, 64))
    history.copy_enqueued(CopyBatch(64, 128))
    with pytest.raises(AssertionError, match="wanted an end"):
        history.copy_enqueued(CopyBatch(128, 131))
    history.copy_completed(CopyBatch(64, 128))
    for wrong in (CopyBatch(64, 128), CopyBatch(0, 63)):
        with pytest.raises(AssertionError, match="twice or never"):
            history.copy_completed(wrong)


def test_fork_shares_full_extents_and_a_shared_tail_refuses_writes() -> None:
    history = ring_history(256, extents=4)
    pool = history._pool
    step(history, 150)
    with pytest.raises(AssertionError, match="settle first"):
        history.fork(150)
    for batch in [*history.pending, *history.settle()]:
        if batch not in history.pending:
            history.copy_enqueued(batch)
        history.copy_completed(batch)
    assert pool.free == 0
    with pytest.raises(OutOfExtents):
        history.fork(150)
    pool.check()
    fork = history.fork(128, ring_rows=0)
    assert fork.copy is None and fork.history.extents == history.extents[:2] and fork.history.ring_rows == 0
    fork.history.truncate(100)
    assert fork.history.shared_tail
    with pytest.raises(AssertionError, match="private_tail first"):
        fork.history.advance(1)
    with pytest.raises(OutOfExtents):
        fork.history.private_tail()
    pool.add_slab(BASE + (1 << 20), 1)
    assert fork.history.private_tail() == ExtentCopy(source=history.extents[1], target=4, rows=36)
    assert fork.history.private_tail() is None
    fork.history.advance(1)
    for each in (history, fork.history):
        each.check()
        each.close()
        each.check()
        with pytest.raises(AssertionError, match="closed"):
            each.reserve(1)
        with pytest.raises(AssertionError, match="closed"):
            each.copy_completed(CopyBatch(0, 1))
        with pytest.raises(AssertionError, match="closed twice"):
            each.close()
    assert pool.free == pool.capacity
    pool.check()


@pytest.mark.parametrize(
    "field, value, message",
    [("committed", 10, "begin at"), ("boundary", 200, "boundary"), ("rows", 9999, "reserved"), ("ring_rows", 64, "in a ring of 64")],
)
def test_check_finds_a_corrupted_count(field: str, value: int, message: str) -> None:
    history = ring_history(256)
    step(history, 140)
    history.check()
    history._record[field] = value
    with pytest.raises(AssertionError, match=message):
        history.check()
