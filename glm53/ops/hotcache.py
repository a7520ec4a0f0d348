"""Where rows lie: references of rows to write, plans of rows to read, and the hot cache of the host tier. Kernels: hotcache.hip.

References and spaces: docs/decisions/0003-host-tier.md. rows: query rows of the launch; round: the rows of one session in one step, all served by
one block. States are rows of `pack_states`; whoever changes slot tables and states does it in stream order with the rounds.
"""

from __future__ import annotations

import ctypes
import enum
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Self, TypeVar

import numpy as np

from glm53.hip import Array, Device, Stream
from glm53.mem.extents import GroupPlace
from glm53.ops.args import Args
from glm53.ops.contract import Cost, Dims, ceil_div, launch
from glm53.ops.history import ExtentLayout
from glm53.ops.history_args import finish_round_args, hot_plan_args, kv_state, place_args, plan_args, slots_args
from glm53.spec import DType

STATE_BYTES = ctypes.sizeof(kv_state)
RoundArgs = TypeVar("RoundArgs", bound=Args)
COUNTERS = 8  # u64 a session and group; `Counter` names the ones in use
ENTRIES_MAX = (1 << 21) - 1  # selected rows of one launch: three counts of a round share 64 bits


class Counter(enum.IntEnum):
    """Index into the counters of a session and group. They only grow; `SlotTables.reset` clears them."""

    HITS = 0  # rows found in a cache slot
    MISSES = 1  # rows fetched into a cache slot
    RECENT_HITS = 2  # rows found in the ring, or in the hot buffer while it holds the whole history
    DUPLICATE_MISSES = 3  # rows that an earlier query row of the round missed: no fetch of their own
    EVICTIONS = 4  # rows that lost their slot to a miss
    UNCACHED = 5  # rows fetched into staging because the round uses every slot


@dataclass(frozen=True)
class SlotTables:
    """Which history row each cache slot holds, one table per session and selection group. `decision 0003` has the rules.

    slot_of [sessions, groups, positions] i32: slot of a position, -1 none; position_of [sessions, groups, slots] i32, -1 free; used, filled
    [sessions, groups, slots] u32: rounds of the last use and of a fill that no later round has found, 0 none; hands [sessions, groups] u32:
    next slot to consider; counters [sessions, groups, 8] u64. 4 bytes a position and 12 a slot, per session and group.
    """

    slot_of: Array
    position_of: Array
    used: Array
    filled: Array
    hands: Array
    counters: Array

    @classmethod
    def make(cls, device: Device, sessions: int, groups: int, positions: int, slots: int, category: str) -> Self:
        """Tables in memory of their own, contents undefined: `reset` each session before its first round."""
        shapes = {
            "slot_of": (DType.I32, (sessions, groups, positions)),
            "position_of": (DType.I32, (sessions, groups, slots)),
            "used": (DType.U32, (sessions, groups, slots)),
            "filled": (DType.U32, (sessions, groups, slots)),
            "hands": (DType.U32, (sessions, groups)),
            "counters": (DType.U64, (sessions, groups, COUNTERS)),
        }
        return cls(**allocate(device, shapes, category))

    def arrays(self) -> tuple[Array, ...]:
        return (self.slot_of, self.position_of, self.used, self.filled, self.hands, self.counters)

    def reset(self, stream: Stream, session: int) -> None:
        """Enqueues: no slot of this session holds anything, hands and counters are zero."""
        if not 0 <= session < len(self.hands):
            raise ValueError(f"reset: session is {session}, wanted 0 to {len(self.hands) - 1}")
        for array in self.arrays():
            row_bytes = array.nbytes // len(array)
            stream.fill(array.address + session * row_bytes, 0xFF if array.dtype is DType.I32 else 0, row_bytes)

    def free(self) -> None:
        _free(self.arrays())

    def bind(self, d: Dims) -> None:
        """Matches the tables as dims sessions, groups, positions, slots."""
        d.match("slot_of", self.slot_of, "sessions", "groups", "positions", dtype=DType.I32)
        d.match("position_of", self.position_of, "sessions", "groups", "slots", dtype=DType.I32)
        d.match("used", self.used, "sessions", "groups", "slots", dtype=DType.U32)
        d.match("filled", self.filled, "sessions", "groups", "slots", dtype=DType.U32)
        d.match("hands", self.hands, "sessions", "groups", dtype=DType.U32)
        d.match("counters", self.counters, "sessions", "groups", COUNTERS, dtype=DType.U64)


@dataclass(frozen=True)
class FetchList:
    """What a round must bring from host memory. The list of round i starts at round_starts[i] * k and has counts[i] entries.

    sources [rows * k] u64: plane l of the row, in its host extent as the device sees it, lies at this + l * row_bytes; targets [rows * k] u64: row
    reference, Space.HOT or Space.STAGING; positions [rows * k] i32; counts [rounds] i32.
    """

    sources: Array
    targets: Array
    positions: Array
    counts: Array

    @classmethod
    def make(cls, device: Device, rows: int, k: int, rounds: int, category: str) -> Self:
        """Lists for launches of at most `rows` query rows and `rounds` rounds."""
        shapes = {
            "sources": (DType.U64, (rows * k,)),
            "targets": (DType.U64, (rows * k,)),
            "positions": (DType.I32, (rows * k,)),
            "counts": (DType.I32, (rounds,)),
        }
        return cls(**allocate(device, shapes, category))

    def free(self) -> None:
        _free((self.sources, self.targets, self.positions, self.counts))


def _free(arrays: Iterable[Array]) -> None:
    """Frees each of them, whatever another one raises."""
    with ExitStack() as steps:
        for array in arrays:
            steps.callback(array.free)


def allocate(device: Device, shapes: Mapping[str, tuple[DType, tuple[int, ...]]], category: str) -> dict[str, Array]:
    """All arrays or none."""
    made: dict[str, Array] = {}
    try:
        for name, (dtype, shape) in shapes.items():
            made[name] = Array.empty(device, dtype, shape, category)
    except BaseException:
        for array in made.values():
            array.free()
        raise
    return made


def pack_states(states: Iterable[tuple[int, bool, int, int]]) -> np.ndarray:
    """[sessions, 24] u8 of (hot_address, full, boundary, round) per session, the layout of `kv_state`. round: 1 to 2^32 - 1."""
    packed = bytearray()
    for hot, full, boundary, tag in states:
        if not 1 <= tag < 1 << 32:
            raise ValueError(f"pack_states: round is {tag}, wanted 1 to 2^32 - 1")
        packed += kv_state(hot, full, boundary, tag, 0)
    return np.frombuffer(packed, np.uint8).reshape(-1, STATE_BYTES)


def _match_rows(d: Dims, refs: Array, positions: Array) -> None:
    d.match("positions", positions, "rows", dtype=DType.I32)
    d.match("refs", refs, "rows", dtype=DType.U64)


def _match_states(d: Dims, states: Array) -> None:
    d.match("states", states, "sessions", STATE_BYTES, dtype=DType.U8)


def _require_row_bytes(d: Dims, row_bytes: int) -> None:
    d.require(row_bytes > 0 and row_bytes % 16 == 0, f"row_bytes is {row_bytes}, expected a positive multiple of 16")


def _launch_place(stream: Stream, name: str, d: Dims, args: place_args) -> None:
    args.rows = d["rows"]
    launch(stream, name, (ceil_div(d["rows"], stream.device.kernel(name).block), 1, 1), args)


def place_extent(stream: Stream, sessions: Array, positions: Array, tables: Array, refs: Array, shape: ExtentLayout) -> None:
    """refs[r] = reference, in Space.EXTENT, of row positions[r] of session sessions[r]; 0 where the position is negative (padding).

    sessions, positions [rows] i32; tables [sessions, extents] u64, the extents of these positions present; refs [rows] u64. Raises
    ContractError.
    """
    d = Dims("place_extent")
    _match_rows(d, refs, positions)
    d.match("sessions", sessions, "rows", dtype=DType.I32)
    d.match("tables", tables, "sessions", "extents", dtype=DType.U64)
    _require_row_bytes(d, shape.row_bytes)
    args = place_args(
        sessions=sessions.address,
        positions=positions.address,
        tables=tables.address,
        refs=refs.address,
        table_stride=d["extents"],
        extent_rows=shape.extent_rows,
        row_bytes=shape.row_bytes,
    )
    _launch_place(stream, "place_extent", d, args)


def place_hot(stream: Stream, sessions: Array, positions: Array, states: Array, refs: Array, ring_rows: int, row_bytes: int) -> None:
    """refs[r] = reference, in Space.HOT, of the slot of row positions[r]: slot p while the state is full, else ring slot p mod ring_rows;
    0 where the position is negative.

    sessions, positions [rows] i32; states [sessions, 24] u8; refs [rows] u64. Raises ContractError.
    """
    d = Dims("place_hot")
    _match_rows(d, refs, positions)
    d.match("sessions", sessions, "rows", dtype=DType.I32)
    _match_states(d, states)
    _require_row_bytes(d, row_bytes)
    d.require(ring_rows > 0, f"ring_rows is {ring_rows}, expected at least 1")
    args = place_args(
        sessions=sessions.address,
        positions=positions.address,
        states=states.address,
        refs=refs.address,
        row_bytes=row_bytes,
        ring_rows=ring_rows,
    )
    _launch_place(stream, "place_hot", d, args)


def place_linear(stream: Stream, positions: Array, refs: Array, row_bytes: int) -> None:
    """refs[r] = reference, in Space.LINEAR, of row positions[r] of a linear buffer; 0 where the position is negative.

    positions [rows] i32; refs [rows] u64. Raises ContractError.
    """
    d = Dims("place_linear")
    _match_rows(d, refs, positions)
    _require_row_bytes(d, row_bytes)
    _launch_place(stream, "place_linear", d, place_args(positions=positions.address, refs=refs.address, row_bytes=row_bytes))


def _match_plan(d: Dims, selected: Array, counts: Array, plan: Array) -> None:
    d.match("selected", selected, "rows", "k", dtype=DType.I32)
    d.match("counts", counts, "rows", dtype=DType.I32)
    d.match("plan", plan, "rows", "k", dtype=DType.U64)


def _launch_plan(stream: Stream, name: str, d: Dims, args: plan_args) -> None:
    launch(stream, name, (ceil_div(d["k"], stream.device.kernel(name).block), d["rows"], 1), args)


def plan_extent(stream: Stream, selected: Array, counts: Array, tables: Array, sessions: Array, plan: Array, shape: ExtentLayout) -> None:
    """plan[r, i] = reference, in Space.EXTENT, of row selected[r, i] of session sessions[r]; 0 past counts[r].

    selected [rows, k] i32, counts [rows] i32, tables [sessions, extents] u64, sessions [rows] i32, plan [rows, k] u64. Raises ContractError.
    """
    d = Dims("plan_extent")
    _match_plan(d, selected, counts, plan)
    d.match("tables", tables, "sessions", "extents", dtype=DType.U64)
    d.match("sessions", sessions, "rows", dtype=DType.I32)
    _require_row_bytes(d, shape.row_bytes)
    args = plan_args(
        selected=selected.address,
        counts=counts.address,
        tables=tables.address,
        sessions=sessions.address,
        plan=plan.address,
        k=d["k"],
        table_stride=d["extents"],
        extent_rows=shape.extent_rows,
        row_bytes=shape.row_bytes,
    )
    _launch_plan(stream, "plan_extent", d, args)


def plan_linear(stream: Stream, selected: Array, counts: Array, plan: Array, row_bytes: int) -> None:
    """plan[r, i] = reference, in Space.LINEAR, of row selected[r, i]; 0 past counts[r].

    selected [rows, k] i32, counts [rows] i32, plan [rows, k] u64. Raises ContractError.
    """
    d = Dims("plan_linear")
    _match_plan(d, selected, counts, plan)
    _require_row_bytes(d, row_bytes)
    args = plan_args(selected=selected.address, counts=counts.address, plan=plan.address, k=d["k"], row_bytes=row_bytes)
    _launch_plan(stream, "plan_linear", d, args)


def cost_plan(rows: int, k: int) -> Cost:
    """Selection read and plan written; the table lies in the cache."""
    return Cost(bytes=rows * (12 * k + 8), flops=0)


def round_args(
    op: str,
    struct: type[RoundArgs],
    selected: Array,
    counts: Array,
    sessions: Array,
    round_starts: Array,
    tables: Array,
    states: Array,
    slots: SlotTables,
    group: int,
    plan: Array,
    fetch: FetchList,
    source: GroupPlace,
    ring_rows: int,
) -> RoundArgs:
    """Arguments of one round of each session, as hot_plan_args has them, for the operation `op`. Arrays as for `hot_plan`. Raises ContractError."""
    d = Dims(op)
    _match_plan(d, selected, counts, plan)
    d.match("sessions", sessions, "rows", dtype=DType.I32)
    d.match("round_starts", round_starts, None, dtype=DType.I32)
    slots.bind(d)
    d.match("tables", tables, "sessions", "extents", dtype=DType.U64)
    _match_states(d, states)
    d.match("fetch.sources", fetch.sources, "entries", dtype=DType.U64)
    d.match("fetch.targets", fetch.targets, "entries", dtype=DType.U64)
    d.match("fetch.positions", fetch.positions, "entries", dtype=DType.I32)
    d.match("fetch.counts", fetch.counts, None, dtype=DType.I32)
    rounds, entries = len(round_starts) - 1, d["rows"] * d["k"]
    d.require(rounds >= 1, f"round_starts dim 0 is {len(round_starts)}, expected at least 2")
    d.require(len(fetch.counts) >= rounds, f"fetch.counts dim 0 is {len(fetch.counts)}, expected at least rounds={rounds}")
    d.require(d["entries"] >= entries, f"fetch.sources dim 0 is {d['entries']}, expected at least rows * k = {entries}")
    d.require(entries <= ENTRIES_MAX, f"rows * k is {entries}, expected at most {ENTRIES_MAX}")
    d.require(0 <= group < d["groups"], f"group is {group}, expected 0 to {d['groups'] - 1}")
    d.require(ring_rows > 0, f"ring_rows is {ring_rows}, expected at least 1")
    _require_row_bytes(d, source.row_bytes)
    d.require(
        source.stride_bytes % source.row_bytes == 0 and 0 < source.stride_bytes < 1 << 32 and source.offset_bytes % 16 == 0,
        f"source has rows {source.stride_bytes} bytes apart from {source.offset_bytes} on, expected multiples of {source.row_bytes} and 16",
    )
    return struct(
        selected=selected.address,
        counts=counts.address,
        sessions=sessions.address,
        round_starts=round_starts.address,
        tables=tables.address,
        states=states.address,
        **{name: getattr(slots, name).address for name in ("slot_of", "position_of", "used", "filled", "hands", "counters")},
        plan=plan.address,
        **{f"fetch_{name}": getattr(fetch, name).address for name in ("sources", "targets", "positions", "counts")},
        k=d["k"],
        table_stride=d["extents"],
        source_offset_bytes=source.offset_bytes,
        source_stride_bytes=source.stride_bytes,
        extent_rows=source.extent_rows,
        row_bytes=source.row_bytes,
        ring_rows=ring_rows,
        slots=d["slots"],
        positions=d["positions"],
        groups=d["groups"],
        group=group,
    )


def hot_plan(
    stream: Stream,
    selected: Array,
    counts: Array,
    sessions: Array,
    round_starts: Array,
    tables: Array,
    states: Array,
    slots: SlotTables,
    group: int,
    plan: Array,
    fetch: FetchList,
    source: GroupPlace,
    ring_rows: int,
) -> None:
    """One round of selection group `group` for each session: plan of the selected rows, and what must be fetched before it is read.

    Round i: rows [round_starts[i], round_starts[i + 1]), all of session sessions[round_starts[i]]; rounds with entries have different sessions,
    a round may be empty or of zero counts (padding). All rows are looked up, and the slots found pinned, before a slot is given away;
    misses get slots in order of (row, place in the row); without an unpinned slot they go to staging row round_starts[i] * k + m. A row
    missed twice is fetched once. Equal inputs give equal outputs on every target.

    selected [rows, k] i32, positions of one row differ from each other; counts, sessions [rows] i32; round_starts [rounds + 1] i32 ascending;
    tables [sessions, extents] u64: host extents as the device sees them; states [sessions, 24] u8; plan [rows, k] u64, 0 past counts[r];
    fetch: for at least rows * k entries and `rounds` rounds; source: where the group's rows lie in host extents. Unchecked, for it is device data:
    positions below that of the slot tables, below the hot rows while full, and in an extent that is present where they lie before the boundary.
    Raises ContractError.
    """
    args = round_args(
        "hot_plan", hot_plan_args, selected, counts, sessions, round_starts, tables, states, slots, group, plan, fetch, source, ring_rows
    )
    launch(stream, "hot_plan", (len(round_starts) - 1, 1, 1), args)


def cost_hot_plan(rows: int, k: int, misses: int, slots_examined: int) -> Cost:
    """Selection and plan, 12 bytes of slot tables an entry; 60 bytes a miss (lists, tables, plan again); tags of the slots examined."""
    return Cost(bytes=rows * (24 * k + 8) + 60 * misses + 4 * slots_examined, flops=0)


def finish_round(stream: Stream, states: Array, round_sessions: Array) -> None:
    """After the last layer of a step: the round tag of each session moves on, so that its fills can be found.

    states [sessions, 24] u8; round_sessions [rounds] i32, each session once, a negative one is padding. Raises ContractError.
    """
    d = Dims("finish_round")
    _match_states(d, states)
    d.match("round_sessions", round_sessions, "rounds", dtype=DType.I32)
    args = finish_round_args(states=states.address, round_sessions=round_sessions.address, rounds=d["rounds"])
    launch(stream, "finish_round", (ceil_div(d["rounds"], stream.device.kernel("finish_round").block), 1, 1), args)


def _slots_args(d: Dims, states: Array, slots: SlotTables, session: int, first: int, last: int, slot: int = 0) -> slots_args:
    slots.bind(d)
    _match_states(d, states)
    d.require(0 <= session < d["sessions"], f"session is {session}, expected 0 to {d['sessions'] - 1}")
    d.require(0 <= first <= last <= d["positions"], f"positions [{first}, {last}), expected ordered and within [0, {d['positions']})")
    return slots_args(
        states=states.address,
        **{name: getattr(slots, name).address for name in ("slot_of", "position_of", "used", "filled")},
        session=session,
        groups=d["groups"],
        positions=d["positions"],
        slots=d["slots"],
        first=first,
        last=last,
        slot=slot,
    )


def _launch_slots(stream: Stream, name: str, count: int, args: slots_args) -> None:
    """One work-item for each of `count` slots or positions of each group."""
    launch(stream, name, (ceil_div(count, stream.device.kernel(name).block), args.groups, 1), args)


def forget(stream: Stream, states: Array, slots: SlotTables, session: int, first: int, last: int) -> None:
    """Positions [first, last) of one session are no longer found, in any group: for a rollback. Between rounds. Raises ContractError."""
    args = _slots_args(Dims("forget"), states, slots, session, first, last)
    _launch_slots(stream, "forget", args.slots, args)


def abandon(stream: Stream, states: Array, slots: SlotTables, session: int, last: int) -> None:
    """Ends the current round of one session without its fills: they are no longer found, and the round tag moves on. Instead of
    `finish_round`. last: above every position that was selected; claims below it that a failed launch left are dropped. Raises ContractError.
    """
    args = _slots_args(Dims("abandon"), states, slots, session, 0, last)
    _launch_slots(stream, "abandon", max(args.slots, last), args)
    launch(stream, "next_round", (1, 1, 1), args)


def seed(stream: Stream, states: Array, slots: SlotTables, session: int, first: int, last: int, slot: int) -> None:
    """Positions first + i of one session are found in cache slots slot + i from now on, i < last - first, in every group. The caller has brought
    the rows there. What these slots held is forgotten, and so are other slots of these positions. Between rounds. Raises ContractError.
    """
    d = Dims("seed")
    args = _slots_args(d, states, slots, session, first, last, slot)
    d.require(0 <= slot <= d["slots"] - (last - first), f"slots [{slot}, {slot + last - first}), expected within [0, {d['slots']})")
    if last > first:
        _launch_slots(stream, "seed", last - first, args)
