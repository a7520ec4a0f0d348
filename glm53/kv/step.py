"""What the tiers do for a decode step: bookkeeping around it on the host, and the memory that its kernels are recorded with.

A step is recorded once and replayed (docs/decisions/0004-step-graph.md), so everything a kernel is given here stays valid as long as the tier:
what changes lies in device memory. `begin` and `ended` stand around each replay, on the host; between them the step is enqueued. `accept` follows at
once, or when the host knows how many of its rows stay.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from glm53.hip import Array, Device, Stream
from glm53.kv.host import HostTier
from glm53.kv.host_passes import gather_misses
from glm53.kv.resident import ResidentTier
from glm53.ops import rows, step_select
from glm53.ops.step_parts import FetchPart, GivePart, PlacePart
from glm53.ops.step_select import ARRIVAL_WORDS, ExtentPlace, HotPlace
from glm53.ops.step_state import RowPlace
from glm53.spec import DType, Offsets

Runs = Sequence[tuple[int, int]]  # (session, query rows) in the order of the rows
# Extra blocks that fetch, 24 KiB in flight each; those that a short list leaves without rows end at once. Beside absorption there is room for many; o
# of one row leaves room for 12 on an H200: many more would wait for blocks of products to end, or make those wait. Experts of several rows have as
# many blocks less, and take so long that few suffice.
LEADER_BLOCKS, FOLLOWER_BLOCKS, SEVERAL_BLOCKS = 64, 16, 8


@dataclass(frozen=True)
class StepRows:
    """Device arrays of a step's query rows: positions, sessions, refs [rows_max] i32, i32, u64; round r is rows [round_starts[r],
    round_starts[r + 1]) of session round_sessions[r] (-1: padding, no rows)."""

    positions: Array
    sessions: Array
    refs: Array
    round_starts: Array  # [rounds_max + 1] i32
    round_sessions: Array  # [rounds_max] i32

    @classmethod
    def make(cls, device: Device, rows_max: int, sessions_max: int) -> StepRows:
        make = lambda dtype, count: Array.empty(device, dtype, (count,), category="workspace")
        rounds_max = min(rows_max, sessions_max)
        i32, u64 = DType.I32, DType.U64
        return cls(make(i32, rows_max), make(i32, rows_max), make(u64, rows_max), make(i32, rounds_max + 1), make(i32, rounds_max))

    def rounds(self, row_count: int) -> int:
        """Rounds of a step of `row_count` rows, padding included."""
        return min(row_count, self.round_sessions.shape[0])

    def upload(self, runs: Runs, first_positions: Sequence[int], stream: Stream) -> None:
        """Rows of `runs`, the first row of each at first_positions."""
        counts = [count for _, count in runs]
        total, rounds = sum(counts), self.rounds(sum(counts))
        positions = np.concatenate([np.arange(p, p + n) for p, n in zip(first_positions, counts, strict=True)]).astype(np.int32)
        sessions = np.repeat([slot for slot, _ in runs], counts).astype(np.int32)
        starts = np.full(rounds + 1, total, np.int32)
        starts[: len(runs) + 1] = np.cumsum([0, *counts])
        owners = np.full(rounds, -1, np.int32)
        owners[: len(runs)] = [slot for slot, _ in runs]
        for array, values in ((self.positions, positions), (self.sessions, sessions), (self.round_starts, starts), (self.round_sessions, owners)):
            array.slice(0, len(values)).upload(values, stream)


class TierStep(Protocol):
    """One tier's side of a step. `row_count` is the number of query rows that a step is recorded for."""

    row_place: RowPlace
    looks_up: bool  # `plan` is a GivePart
    gathers_on_host: bool  # kernels cannot read host memory: `gather` brings the misses, and no step can be recorded

    @property
    def states(self) -> Array | None:
        """Whose round tags the step's last kernel moves on."""

    def offsets(self, layer: int) -> Offsets: ...

    def plan(self, layer: int, selected: Array, counts: Array, plan: Array) -> GivePart | PlacePart:
        """Finds the rows that the full layer `layer` has selected for its group: plan[r, i] says where row selected[r, i] lies."""

    def fetch(self, layer: int, row_count: int) -> FetchPart | None:
        """Brings the misses of a layer, and of further ones of its group; None if nothing is left to bring for it. Asked for each layer in turn."""

    def gather(self, layer: int, row_count: int) -> None:
        """Where `gathers_on_host`: brings the misses of all layers of the group of `layer`; waits for the device."""

    def begin(self, runs: Runs) -> None:
        """Room for the rows. If it raises, `abandon` comes next."""

    def ended(self, runs: Runs) -> None:
        """The step is enqueued; its last kernel moves the sessions' rounds on."""

    def accept(self, runs: Runs) -> None:
        """So many rows of an enqueued step belong to their sessions. If it raises, none of them do."""

    def abandon(self, rows: Mapping[int, int]) -> None:
        """The step failed, wherever: the sessions have so many rows."""


class ResidentStep:
    """Rows go to extents in device memory and are read there."""

    states: Array | None = None
    looks_up = False
    gathers_on_host = False

    def __init__(self, tier: ResidentTier, step_rows: StepRows):
        self.tier, self.store, self.rows = tier, tier.store, step_rows
        self.row_place = RowPlace(self.store.shape, tables=self.store.tables)
        self._place = ExtentPlace(self.store.tables, self.store.shape)

    def offsets(self, layer: int) -> Offsets:
        return (0, layer * self.store.shape.plane_bytes, 0, 0)

    def plan(self, layer: int, selected: Array, counts: Array, plan: Array) -> PlacePart:
        rows = selected.shape[0]
        return PlacePart(step_select.place_args(selected, counts, self.rows.sessions.slice(0, rows), self._place, plan), rows)

    def fetch(self, layer: int, row_count: int) -> None:
        return None

    def gather(self, layer: int, row_count: int) -> None:
        raise AssertionError("a resident step gathers nothing")

    def begin(self, runs: Runs) -> None:
        for session, count in runs:
            self.store.reserve(session, self.store.rows(session) + count)

    def ended(self, runs: Runs) -> None:
        pass

    def accept(self, runs: Runs) -> None:
        for session, count in runs:
            self.store.advance(session, count)

    def abandon(self, rows: Mapping[int, int]) -> None:
        for session, count in rows.items():
            self.store.truncate(session, count)


class HostStep:
    """Rows go to hot buffers; selected rows are looked up there, misses come from host memory."""

    looks_up = True

    def __init__(self, tier: HostTier, step_rows: StepRows):
        self.tier, self.rows = tier, step_rows
        self.states = tier.states
        self.row_place = RowPlace(tier.shape, states=tier.states, ring_rows=tier.config.ring_rows)
        self.gathers_on_host = tier.config.fetch == "copy"
        rounds_max = step_rows.round_sessions.shape[0]
        counts = Array.from_numpy(tier.device, np.zeros((rounds_max + 1, ARRIVAL_WORDS), np.uint32), category="workspace")
        self.counts = counts  # what blocks of a launch count in
        self._arrivals, self._stored = counts.slice(0, rounds_max), counts.slice(rounds_max, rounds_max + 1).view((ARRIVAL_WORDS,))
        self._first_rows = list(range(rounds_max))  # first query row of each round; as `begin` has it, else one row a round

    def _group(self, layer: int) -> int:
        return self.tier.layout.group_of(layer)

    def offsets(self, layer: int) -> Offsets:
        tier = self.tier
        leader = tier.layout.groups[self._group(layer)][0]
        staging = tier.staging.address + (layer - leader) * tier.staging_plane_bytes
        return (layer * tier.hot_plane_bytes, 0, staging, 0)

    def plan(self, layer: int, selected: Array, counts: Array, plan: Array) -> GivePart:
        tier, row_count = self.tier, selected.shape[0]
        rounds = self.rows.rounds(row_count)
        args = step_select.give_args(
            selected,
            counts,
            self.rows.sessions.slice(0, row_count),
            self.rows.round_starts.slice(0, rounds + 1),
            tier.tables,
            HotPlace(tier.states, tier.slot_tables, self._group(layer), tier.config.ring_rows, tier.layout.row_bytes),
            plan,
            tier.fetch_list,
            tier.shape.place(self._group(layer)),
            self._arrivals,
        )
        return GivePart(args, row_count, self._stored)

    def fetch(self, layer: int, row_count: int) -> FetchPart | None:
        """The leader's misses beside its absorption; those of each follower beside the o, or of several rows the experts, of the layer before."""
        tier, rounds = self.tier, self.rows.rounds(row_count)
        layers = tier.layout.groups[self._group(layer)]
        if self.gathers_on_host:
            return None
        places = rows.FetchPlanes(
            tier.staging,
            layers[0],
            tier.hot_plane_bytes,
            tier.staging_plane_bytes,
            tier.layout.row_bytes,
        )
        starts = self.rows.round_starts.slice(0, rounds + 1)
        leads = layer == layers[0]
        blocks = LEADER_BLOCKS if leads else FOLLOWER_BLOCKS if row_count == 1 else SEVERAL_BLOCKS
        args = rows.fetch_list_args(tier.fetch_list, starts, range(layer, layer + 1), places, tier.config.topk, blocks)
        return FetchPart(args, blocks, rounds, self._stored if leads else None)

    def gather(self, layer: int, row_count: int) -> None:
        rounds = self.rows.rounds(row_count)
        layers = self.tier.layout.groups[self._group(layer)]
        gather_misses(self.tier, self.rows.round_starts.slice(0, rounds + 1), self._first_rows, range(layers[0], layers[-1] + 1))

    def begin(self, runs: Runs) -> None:
        tier = self.tier
        tier.ready([slot for slot, _ in runs])
        if self.gathers_on_host:
            self._first_rows = [0, *itertools.accumulate(count for _, count in runs)][:-1]
        for slot, count in runs:
            session = tier.sessions[slot]
            tier.poll(session)
            tier.reserve(session, session.rows + count)
        tier.grow_ahead()
        for slot, count in runs:
            session = tier.sessions[slot]
            if session.full and session.history.rows + count > tier.config.hot_rows:
                tier.leave_full(session)
            tier.make_room(session, count)

    def ended(self, runs: Runs) -> None:
        for slot, _ in runs:
            self.tier.next_round(self.tier.sessions[slot])

    def accept(self, runs: Runs) -> None:
        for slot, count in runs:
            self.tier.written(self.tier.sessions[slot], count)

    def abandon(self, rows: Mapping[int, int]) -> None:
        self.tier.stream.fill(self.counts.address, 0, self.counts.nbytes)  # a launch may have failed half way
        for slot, count in rows.items():
            self.tier.drop(slot, count)


def step_of(tier: HostTier | ResidentTier, step_rows: StepRows) -> TierStep:
    """The tier's side of steps with these rows."""
    return ResidentStep(tier, step_rows) if isinstance(tier, ResidentTier) else HostStep(tier, step_rows)
