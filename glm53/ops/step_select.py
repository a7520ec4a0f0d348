"""The selection of a decode step: index scores, exact top-k and where the selected rows lie. Kernels: step_select.hip; GIVE: hotcache.h.

Two launches of fixed grids, everything that changes in device memory: they may be captured once and replayed. rows: query rows of the launch, each
of a session (a row of the tables) and at a position; -1 marks a row that is not in use. T: f32 or bf16. Selections equal those of ops.selection on
the same scores; references and misses are those of ops.hotcache.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Self

from glm53.hip import Array, Device, Stream
from glm53.mem.extents import ExtentShape
from glm53.ops import hotcache
from glm53.ops.contract import Cost, Dims, ceil_div, launch, variant
from glm53.ops.history import ExtentLayout
from glm53.ops.hotcache import FetchList, SlotTables
from glm53.ops.step_args import step_give_args, step_score_args, step_topk_args
from glm53.spec import DType

_T = (DType.F32, DType.BF16)
_VARIANTS = ("f32", "bf16")
WORD_COLUMNS = 32  # positions of a bitmap word
BITMAP_WORDS = 4  # a bitmap is whole multiples of 16 bytes
CONTEXT_MAX = 1 << 30
# Blocks of all rows together, a compute unit. step_score waits for memory, and two of its blocks fit a unit; step_topk has a launch's worth of work
# for a quarter of the units at a million positions, and each of its blocks must arrive before the last can begin.
SCORE_BLOCKS_PER_UNIT = 2.0
TOPK_BLOCKS_PER_UNIT = 0.25


@dataclass(frozen=True)
class ExtentPlace:
    """Selected rows lie in extents: references in Space.EXTENT. tables [sessions, extents] u64."""

    tables: Array
    shape: ExtentLayout


@dataclass(frozen=True)
class HotPlace:
    """Selected rows are looked up in the hot cache of a session's group. states [sessions, 24] u8 (`hotcache.pack_states`)."""

    states: Array
    slots: SlotTables
    group: int
    ring_rows: int
    row_bytes: int


@dataclass(frozen=True)
class Drawn:
    """Selections given instead of chosen, for benchmarks and tests: row r gets selections[(index[0] + r) mod draws].

    selections [draws, k] i32, ascending and visible to the row, -1 past their end; index [1] u32. Rows whose context is no longer than k keep their
    own selection.
    """

    selections: Array
    index: Array


@dataclass(frozen=True)
class Selector:
    """Scratch of selections of at most `rows` rows and `context` positions: 12 bytes a position and row, and 16 KiB a row.

    scores [rows, columns] f32; histogram [rows, bins] u32; bitmap [rows, words] u32; candidates [rows, columns] u64; candidate_counts [rows] u32;
    threshold [rows, 2] u32; arrivals [2, rows] u32. Between steps histogram, bitmap, counts and arrivals are 0.
    """

    context: int
    k: int
    scores: Array
    histogram: Array
    bitmap: Array
    candidates: Array
    candidate_counts: Array
    threshold: Array
    arrivals: Array

    @classmethod
    def make(cls, device: Device, rows_max: int, context: int, k: int, category: str) -> Self:
        """context: above every position. k: rows of a selection, at most 2,048. Raises ContractError, DeviceMemoryError."""
        d = Dims("step_select")
        k_max, bins = device.kernel("step_topk").constants["k_max"], device.kernel("step_score_f32").constants["bins"]
        d.require(rows_max >= 1, f"rows_max is {rows_max}, expected at least 1")
        d.require(1 <= k <= k_max, f"k is {k}, expected 1 to {k_max}")
        d.require(1 <= context <= CONTEXT_MAX, f"context is {context}, expected 1 to {CONTEXT_MAX}")
        words = ceil_div(context, WORD_COLUMNS)
        columns = words * WORD_COLUMNS
        shapes = {
            "scores": (DType.F32, (rows_max, columns)),
            "histogram": (DType.U32, (rows_max, bins)),
            "bitmap": (DType.U32, (rows_max, ceil_div(words, BITMAP_WORDS) * BITMAP_WORDS)),
            "candidates": (DType.U64, (rows_max, columns)),
            "candidate_counts": (DType.U32, (rows_max,)),
            "threshold": (DType.U32, (rows_max, 2)),
            "arrivals": (DType.U32, (2, rows_max)),
        }
        selector = cls(context, k, **hotcache.allocate(device, shapes, category))
        selector.reset(device.default_stream)
        device.default_stream.synchronize()
        return selector

    def reset(self, stream: Stream) -> None:
        """Enqueues zeros where the kernels expect them: after a launch that failed half way."""
        for array in (self.histogram, self.bitmap, self.candidate_counts, self.arrivals):
            stream.fill(array.address, 0, array.nbytes)

    def free(self) -> None:
        with ExitStack() as steps:
            for array in (self.scores, self.histogram, self.bitmap, self.candidates, self.candidate_counts, self.threshold, self.arrivals):
                steps.callback(array.free)

    def _bind(self, d: Dims, positions: Array, sessions: Array) -> None:
        d.match("positions", positions, "rows", dtype=DType.I32)
        d.match("sessions", sessions, "rows", dtype=DType.I32)
        rows_max = len(self.scores)
        d.require(d["rows"] <= rows_max, f"positions dim 0 is {d['rows']}, expected at most {rows_max}, the selector's rows_max")
        d.match("selector.scores", self.scores, rows_max, "columns", dtype=DType.F32)

    def score(
        self,
        stream: Stream,
        query: Array,
        gate: Array,
        tables: Array,
        sessions: Array,
        positions: Array,
        shape: ExtentShape,
        plane: int,
        blocks: int | None = None,
    ) -> None:
        """scores[r, p] = sum_j gate[r, j] * heads^-1/2 * max(0, <query[r, j], key[p]> * dim^-1/2) for p <= positions[r], where positions[r] >= k.

        query [rows, heads, dim] T, gate [rows, heads] f32, tables [sessions, extents] u64 of index-key extents, sessions, positions [rows] i32.
        shape: row_bytes = dim * sizeof(T). Positions lie below `context` (not checked: device data). heads <= 64, dim <= 128, heads * dim <= 4096.
        blocks: blocks a row, None: from the compute units. A score's bits depend on the row's query, gates and key alone. Raises ContractError.
        Source: lightning indexer of DeepSeek-V3.2.
        """
        d = Dims("step_score")
        d.match("query", query, "rows", "heads", "dim", dtype=_T)
        d.match("gate", gate, "rows", "heads", dtype=DType.F32)
        d.match("tables", tables, "sessions_max", "extents", dtype=DType.U64)
        self._bind(d, positions, sessions)
        name = variant("step_score", _VARIANTS, query.dtype)
        heads, dim, limits = d["heads"], d["dim"], stream.device.kernel(name).constants
        d.require(heads <= limits["heads_max"] and dim <= limits["dim_max"], f"heads is {heads}, dim {dim}, expected at most 64 and 128")
        d.require(heads * dim <= limits["query_max"], f"heads * dim is {heads * dim}, expected at most {limits['query_max']}")
        d.require(shape.row_bytes == dim * query.dtype.item_bytes, f"shape.row_bytes is {shape.row_bytes}, expected dim * {query.dtype.item_bytes}")
        d.require(shape.extent_rows % limits["tile"] == 0, f"shape.extent_rows is {shape.extent_rows}, expected a multiple of {limits['tile']}")
        d.require(0 <= plane < shape.planes, f"plane is {plane}, expected below {shape.planes}")
        blocks = _blocks(d, stream.device, SCORE_BLOCKS_PER_UNIT, blocks)
        args = step_score_args(
            q=query.address,
            gate=gate.address,
            tables=tables.address,
            sessions=sessions.address,
            positions=positions.address,
            scores=self.scores.address,
            histogram=self.histogram.address,
            threshold=self.threshold.address,
            arrivals=self.arrivals.address,
            heads=heads,
            dim=dim,
            table_stride=d["extents"],
            extent_rows=shape.extent_rows,
            plane=plane,
            key_bytes=shape.row_bytes,
            score_stride=d["columns"],
            k=self.k,
            blocks=blocks,
            key_scale=dim**-0.5,
            head_scale=heads**-0.5,
        )
        launch(stream, name, (blocks, d["rows"], 1), args)

    def topk(
        self,
        stream: Stream,
        positions: Array,
        sessions: Array,
        selected: Array,
        counts: Array,
        plan: Array | None,
        place: ExtentPlace | HotPlace | None,
        drawn: Drawn | None = None,
        blocks: int | None = None,
    ) -> None:
        """The counts[r] = min(k, positions[r] + 1) positions of the largest scores, ascending, ties to the lowest position; and their plan.

        After `score` of the same rows. selected [rows, k] i32, -1 past counts[r]; counts [rows] i32; plan [rows, k] u64, 0 past counts[r], None
        where place is None. ExtentPlace: references as `hotcache.plan_extent` writes them. HotPlace: what lies on the device as `hotcache.hot_plan`
        finds it (found slots are pinned), misses are left for part GIVE (`give_args`). -0 equals +0, NaN counts as -inf. Raises ContractError.
        """
        d = Dims("step_topk")
        self._bind(d, positions, sessions)
        d.match("selected", selected, "rows", self.k, dtype=DType.I32)
        d.match("counts", counts, "rows", dtype=DType.I32)
        d.require((plan is None) == (place is None), f"plan is {plan}, place {place}, expected both or neither")
        blocks = _blocks(d, stream.device, TOPK_BLOCKS_PER_UNIT, blocks)
        args = step_topk_args(
            scores=self.scores.address,
            positions=positions.address,
            sessions=sessions.address,
            threshold=self.threshold.address,
            histogram=self.histogram.address,
            bitmap=self.bitmap.address,
            candidates=self.candidates.address,
            candidate_counts=self.candidate_counts.address,
            arrivals=self.arrivals.address + self.arrivals.nbytes // 2,
            selected=selected.address,
            counts=counts.address,
            score_stride=d["columns"],
            bitmap_stride=self.bitmap.shape[1],
            k=self.k,
            blocks=blocks,
        )
        if plan is not None:
            d.match("plan", plan, "rows", self.k, dtype=DType.U64)
            args.plan = plan.address
        if isinstance(place, ExtentPlace):
            _set_extents(d, args, place)
        elif place is not None:
            _set_hot(d, args, place)
        if drawn is not None:
            d.match("drawn.selections", drawn.selections, "draws", self.k, dtype=DType.I32)
            d.match("drawn.index", drawn.index, 1, dtype=DType.U32)
            args.drawn, args.draw_index, args.draws = drawn.selections.address, drawn.index.address, d["draws"]
        launch(stream, "step_topk", (blocks, d["rows"], 1), args)


def _blocks(d: Dims, device: Device, per_unit: float, blocks: int | None) -> int:
    """Grid x: no result depends on it."""
    if blocks is None:
        return max(1, int(per_unit * device.properties.compute_units / d["rows"]))
    d.require(0 < blocks < 1 << 16, f"blocks is {blocks}, expected 1 to 2^16 - 1")
    return blocks


def _set_extents(d: Dims, args: step_topk_args, place: ExtentPlace) -> None:
    d.match("place.tables", place.tables, "sessions_max", "extents", dtype=DType.U64)
    d.require(place.shape.row_bytes % 16 == 0, f"place.shape.row_bytes is {place.shape.row_bytes}, expected a multiple of 16")
    args.place, args.tables, args.table_stride = 1, place.tables.address, d["extents"]
    args.extent_rows, args.row_bytes = place.shape.extent_rows, place.shape.row_bytes


def _set_hot(d: Dims, args: step_topk_args, place: HotPlace) -> None:
    slots = place.slots
    slots.bind(d)
    d.match("place.states", place.states, None, hotcache.STATE_BYTES, dtype=DType.U8)
    d.require(0 <= place.group < d["groups"], f"place.group is {place.group}, expected 0 to {d['groups'] - 1}")
    d.require(place.ring_rows > 0, f"place.ring_rows is {place.ring_rows}, expected at least 1")
    d.require(place.row_bytes > 0 and place.row_bytes % 16 == 0, f"place.row_bytes is {place.row_bytes}, expected a positive multiple of 16")
    args.place, args.states, args.group, args.groups = 2, place.states.address, place.group, d["groups"]
    args.slot_of, args.used, args.filled = slots.slot_of.address, slots.used.address, slots.filled.address
    args.slots, args.table_positions = d["slots"], d["positions"]
    args.ring_rows, args.row_bytes = place.ring_rows, place.row_bytes


def cost_score(rows: int, heads: int, dim: int, context: int, item_bytes: int) -> Cost:
    """Cost of `rows` rows that all see `context` positions of one session: queries and keys read, scores written."""
    return Cost(bytes=(rows * heads * dim + context * dim) * item_bytes + 4 * rows * context, flops=2 * rows * context * heads * (dim + 1))


def cost_topk(rows: int, k: int, context: int) -> Cost:
    """Every score read once, a bitmap written and read, selection and plan written."""
    return Cost(bytes=rows * (4 * context + context // 4 + 12 * k), flops=0)


def give_args(
    selected: Array,
    counts: Array,
    sessions: Array,
    round_starts: Array,
    tables: Array,
    place: HotPlace,
    plan: Array,
    fetch: FetchList,
    shape: ExtentLayout,
) -> step_give_args:
    """Arguments of part GIVE of step_gemv: the misses that `Selector.topk` left in `plan` get slots, as `hotcache.hot_plan` gives them.

    Arrays as for `hotcache.hot_plan`: selected [rows, k] i32, counts, sessions [rows] i32, round_starts [rounds + 1] i32, tables [sessions, extents]
    u64 and shape of host extents, plan [rows, k] u64, fetch for rows * k entries and all rounds. The block of round i completes the plan, the fetch
    list, the slot tables and the counters of its session and group. Raises ContractError.
    """
    return hotcache.round_args(
        "give",
        step_give_args,
        selected,
        counts,
        sessions,
        round_starts,
        tables,
        place.states,
        place.slots,
        place.group,
        plan,
        fetch,
        shape,
        place.ring_rows,
    )
