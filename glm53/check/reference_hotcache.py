"""Twin of the hot cache's decisions: one session's table of one selection group, in plain Python. Rules: docs/decisions/0003-host-tier.md.

Exact: every reference, fetch, table entry and counter equals what the kernels write. Addresses are left out; `reference_of` adds them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from glm53.ops.hotcache import COUNTERS, Counter
from glm53.spec import Space


class Place(NamedTuple):
    """Where a row is read: slot `row` of the hot buffer, or row `row` of the round's staging rows."""

    space: Space
    row: int


class Fetch(NamedTuple):
    position: int
    target: Place


class RoundPlan(NamedTuple):
    places: list[list[Place]]  # per query row, in the order of its selection
    fetches: list[Fetch]


@dataclass
class StateTwin:
    """What the groups of a session share, as `kv_state`. tag: of the current round, 1 to 2^32 - 1."""

    full: bool = True
    boundary: int = 0
    tag: int = 1

    def finish_round(self) -> None:
        self.tag = 1 if self.tag == 2**32 - 1 else self.tag + 1


def reference_of(place: Place, hot: int, row_bytes: int, staging_first: int) -> int:
    """The row reference. hot: address of slot 0; staging_first: staging row of the round's first miss."""
    if place.space is Space.HOT:
        return hot + place.row * row_bytes
    return (staging_first + place.row) * row_bytes | Space.STAGING


class HotCacheTwin:
    """Cache slots of one session and group. state belongs to the session: whoever drives the twins moves it on once for all groups."""

    def __init__(self, state: StateTwin, slots: int, ring_rows: int):
        self.state = state
        self.slots = slots
        self.ring_rows = ring_rows
        self.slot_of: dict[int, int] = {}
        self.position_of: list[int | None] = [None] * slots
        self.used = [0] * slots
        self.filled = [0] * slots
        self.hand = 0
        self.counters = [0] * COUNTERS  # by Counter

    def plan(self, rows: list[list[int]]) -> RoundPlan:
        """One round: rows[t] are the positions that query row t selected, different from each other."""
        missed: list[int] = []
        where = [[self._look_up(position, missed) for position in row] for row in rows]
        targets = {position: self._make_room(position, miss) for miss, position in enumerate(missed)}
        places = [[place or targets[position] for place, position in zip(found, row, strict=True)] for found, row in zip(where, rows, strict=True)]
        return RoundPlan(places, [Fetch(position, targets[position]) for position in missed])

    def _look_up(self, position: int, missed: list[int]) -> Place | None:
        """The place of a row that lies on the device, else None, with the position among `missed`."""
        if self.state.full or position >= self.state.boundary:
            self.counters[Counter.RECENT_HITS] += 1
            return Place(Space.HOT, position if self.state.full else position % self.ring_rows)
        slot = self.slot_of.get(position)
        if slot is not None and self.filled[slot] != self.state.tag:
            self.counters[Counter.HITS] += 1
            self.used[slot] = self.state.tag
            self.filled[slot] = 0
            return Place(Space.HOT, self.ring_rows + slot)
        if position in missed:
            self.counters[Counter.DUPLICATE_MISSES] += 1
            return None
        if slot is not None:  # the group is planned a second time in this round
            self._drop(slot)
        missed.append(position)
        return None

    def _make_room(self, position: int, miss: int) -> Place:
        """The next slot that this round does not use, or a staging row."""
        for step in range(self.slots):
            slot = (self.hand + step) % self.slots
            if self.used[slot] == self.state.tag:
                continue
            if self.position_of[slot] is not None:
                self.counters[Counter.EVICTIONS] += 1
                self._drop(slot)
            self._hold(slot, position)
            self.used[slot] = self.filled[slot] = self.state.tag
            self.hand = (slot + 1) % self.slots
            self.counters[Counter.MISSES] += 1
            return Place(Space.HOT, self.ring_rows + slot)
        self.counters[Counter.UNCACHED] += 1
        return Place(Space.STAGING, miss)

    def forget(self, first: int, last: int) -> None:
        """Positions [first, last) are no longer found."""
        for position in [p for p in self.slot_of if first <= p < last]:
            self._drop(self.slot_of[position])

    def abandon(self) -> None:
        """What the current round filled is no longer found. The caller then moves the state on."""
        for slot in range(self.slots):
            if self.filled[slot] == self.state.tag:
                self._drop(slot)

    def seed(self, first: int, last: int, slot: int) -> None:
        """Positions first + i lie in slots slot + i; what was there, and other slots of these positions, are forgotten."""
        self.forget(first, last)
        for position in range(first, last):
            at = slot + position - first
            self._drop(at)
            self._hold(at, position)
            self.used[at] = 0

    def _hold(self, slot: int, position: int) -> None:
        self.position_of[slot] = position
        self.slot_of[position] = slot

    def _drop(self, slot: int) -> None:
        position = self.position_of[slot]
        if position is not None:
            del self.slot_of[position]
        self.position_of[slot] = None
        self.filled[slot] = 0

    def check(self) -> None:
        """Raises AssertionError unless slot_of and position_of are inverse to each other and a slot without a row has no fill."""
        held = {position: slot for slot, position in enumerate(self.position_of) if position is not None}
        assert held == self.slot_of, "slot_of and position_of disagree"
        assert all(self.filled[slot] == 0 for slot, position in enumerate(self.position_of) if position is None), "a free slot has a fill"
        assert 0 <= self.hand < self.slots
