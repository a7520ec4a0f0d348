"""The selection of a decode step: index scores, exact top-k, and where the selected rows lie. Kernels: step_select.hip; parts GIVE and PLACE of
step_gemv: hotcache.h.

Launches of fixed grids, everything that changes in device memory: they may be captured once and replayed. rows: query rows of the launch, each
of a session (a row of the tables) and at a position; -1 marks a row that is not in use. T: f32 or bf16. Selections equal those of ops.selection on
the same scores; references and misses are those of ops.hotcache. share: the side of a pair whose scores and lists these are, as in ops.selection.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Self

from glm53.hip import Array, Device, Stream
from glm53.mem.extents import ExtentShape, GroupPlace
from glm53.ops import hotcache
from glm53.ops.contract import Cost, Dims, ceil_div, launch, variant
from glm53.ops.history import ExtentLayout
from glm53.ops.hotcache import FetchList, SlotTables
from glm53.ops.selection import selection_target
from glm53.ops.step_args import step_give_args, step_place_args, step_score_args, step_topk_args
from glm53.spec import WHOLE, DType, Shard

_T = (DType.F32, DType.BF16)
_VARIANTS = ("f32", "bf16")
COLUMN_STEP = 32  # rows of scores are whole multiples
ARRIVAL_WORDS = 4  # u32 a round that part GIVE counts in
GIVE_K_MAX = 2048  # entries of a row that the last block of GIVE has
CONTEXT_MAX = 1 << 30
BLOCKS_MAX = (1 << 16) - 1  # of step_score, a row
# Blocks of all rows together, a compute unit. step_score waits for memory, and two of its blocks fit a unit; so do two of step_topk, of which those
# without positions end at once.
SCORE_BLOCKS_PER_UNIT = 2.0
TOPK_BLOCKS_PER_UNIT = 1.0


@dataclass(frozen=True)
class ExtentPlace:
    """Selected rows lie in extents: references in Space.EXTENT. tables [sessions, extents] u64 of history rows."""

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
    """Scratch of selections of at most `rows` rows and `context` positions: 12 bytes a position and row, and 20 KiB a row.

    scores [rows, columns] f32; histogram [rows, bins] u32; entries [rows, columns] u64; entry_counts [rows, blocks] u32; arrivals [rows] u32. Between
    steps histogram and arrivals are 0.
    """

    context: int
    k: int
    scores: Array
    histogram: Array
    entries: Array
    entry_counts: Array
    arrivals: Array

    @classmethod
    def make(cls, device: Device, rows_max: int, context: int, k: int, category: str) -> Self:
        """context: above every position, of a side the rows that it holds of that, at least 1. k: rows of a selection, at most 2,048. Raises
        ContractError, DeviceMemoryError."""
        d = Dims("step_select")
        k_max, blocks_max = (device.kernel("step_topk").constants[name] for name in ("k_max", "blocks_max"))
        bins = device.kernel("step_score_f32").constants["bins"]
        d.require(rows_max >= 1, f"rows_max is {rows_max}, expected at least 1")
        d.require(1 <= k <= k_max, f"k is {k}, expected 1 to {k_max}")
        d.require(1 <= context <= CONTEXT_MAX, f"context is {context}, expected 1 to {CONTEXT_MAX}")
        columns = ceil_div(context, COLUMN_STEP) * COLUMN_STEP
        shapes = {
            "scores": (DType.F32, (rows_max, columns)),
            "histogram": (DType.U32, (rows_max, bins)),
            "entries": (DType.U64, (rows_max, columns)),
            "entry_counts": (DType.U32, (rows_max, blocks_max)),
            "arrivals": (DType.U32, (rows_max,)),
        }
        selector = cls(context, k, **hotcache.allocate(device, shapes, category))
        selector.reset(device.default_stream)
        device.default_stream.synchronize()
        return selector

    def reset(self, stream: Stream) -> None:
        """Enqueues zeros where the kernels expect them: after a launch that failed half way."""
        for array in (self.histogram, self.arrivals):
            stream.fill(array.address, 0, array.nbytes)

    def free(self) -> None:
        with ExitStack() as steps:
            for array in (self.scores, self.histogram, self.entries, self.entry_counts, self.arrivals):
                steps.callback(array.free)

    def _bind(self, d: Dims, positions: Array) -> None:
        d.match("positions", positions, "rows", dtype=DType.I32)
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
        share: Shard = WHOLE,
    ) -> None:
        """scores[r, p] = sum_j gate[r, j] * heads^-1/2 * max(0, <query[r, j], key[p]> * dim^-1/2) for p <= positions[r], where positions[r] >= k.

        query [rows, heads, dim] T, gate [rows, heads] f32, tables [sessions, extents] u64 of index-key extents, sessions, positions [rows] i32.
        shape: row_bytes = dim * sizeof(T). Positions lie below `context` (not checked: device data). heads <= 64, dim <= 128, heads * dim <= 4096.
        blocks: blocks a row, None: from the compute units. A score's bits depend on the row's query, gates and key alone. A side has the tables and
        columns of its own rows. Raises ContractError.
        Source: lightning indexer of DeepSeek-V3.2.
        """
        d = Dims("step_score")
        d.match("query", query, "rows", "heads", "dim", dtype=_T)
        d.match("gate", gate, "rows", "heads", dtype=DType.F32)
        d.match("tables", tables, "sessions_max", "extents", dtype=DType.U64)
        self._bind(d, positions)
        d.match("sessions", sessions, "rows", dtype=DType.I32)
        name = variant("step_score", _VARIANTS, query.dtype)
        heads, dim, limits = d["heads"], d["dim"], stream.device.kernel(name).constants
        d.require(heads <= limits["heads_max"] and dim <= limits["dim_max"], f"heads is {heads}, dim {dim}, expected at most 64 and 128")
        d.require(heads * dim <= limits["query_max"], f"heads * dim is {heads * dim}, expected at most {limits['query_max']}")
        d.require(shape.row_bytes == dim * query.dtype.item_bytes, f"shape.row_bytes is {shape.row_bytes}, expected dim * {query.dtype.item_bytes}")
        d.require(shape.extent_rows % limits["tile"] == 0, f"shape.extent_rows is {shape.extent_rows}, expected a multiple of {limits['tile']}")
        d.require(0 <= plane < shape.planes, f"plane is {plane}, expected below {shape.planes}")
        blocks = _blocks(d, stream.device, SCORE_BLOCKS_PER_UNIT, blocks, BLOCKS_MAX)
        args = step_score_args(
            q=query.address,
            gate=gate.address,
            tables=tables.address,
            sessions=sessions.address,
            positions=positions.address,
            scores=self.scores.address,
            histogram=self.histogram.address,
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
            side=share.index,
            sides=share.count,
        )
        launch(stream, name, (blocks, d["rows"], 1), args)

    def topk(
        self,
        stream: Stream,
        positions: Array,
        selected: Array,
        counts: Array,
        drawn: Drawn | None = None,
        blocks: int | None = None,
        cleared: Array | None = None,
        share: Shard = WHOLE,
        extent_rows: int | None = None,
    ) -> None:
        """The counts[r] = min(k, positions[r] + 1) positions of the largest scores, ascending, ties to the lowest position.

        After `score` of the same rows. positions [rows] i32; selected [rows, k] i32, -1 past counts[r]; counts [rows] i32. blocks: a row, None:
        from the compute units. cleared: a histogram of another selector that is zeroed instead of this one's, so that a benchmark can repeat the
        launch. -0 equals +0, NaN counts as -inf. share, extent_rows of its keys: a side writes its list as `ops.selection.topk`; what is drawn takes
        effect in the merge. Raises ContractError.
        """
        d = Dims("step_topk")
        d.require(drawn is None or share.count == 1, f"drawn is given beside share={share}, expected None; next: drawn of merge.Lists")
        args = self.topk_args(d, stream.device, positions, selected, counts, blocks, share, extent_rows)
        if cleared is not None:
            d.match("cleared", cleared, *self.histogram.shape, dtype=DType.U32)
            args.cleared = cleared.address
        if drawn is not None:
            d.match("drawn.selections", drawn.selections, "draws", self.k, dtype=DType.I32)
            d.match("drawn.index", drawn.index, 1, dtype=DType.U32)
            args.drawn, args.draw_index, args.draws = drawn.selections.address, drawn.index.address, d["draws"]
        launch(stream, "step_topk", (args.blocks, d["rows"], 1), args)

    def topk_args(
        self, d: Dims, device: Device, positions: Array, selected: Array, counts: Array, blocks: int | None, share: Shard, extent_rows: int | None
    ) -> step_topk_args:
        """Of `topk` without what is drawn; binds rows. Raises ContractError."""
        self._bind(d, positions)
        target = selection_target(d, selected, self.k, share, extent_rows)
        d.match("counts", counts, "rows", dtype=DType.I32)
        count_stride = self.entry_counts.shape[1]
        return step_topk_args(
            scores=self.scores.address,
            positions=positions.address,
            histogram=self.histogram.address,
            cleared=self.histogram.address,
            entries=self.entries.address,
            entry_counts=self.entry_counts.address,
            arrivals=self.arrivals.address,
            counts=counts.address,
            score_stride=d["columns"],
            count_stride=count_stride,
            k=self.k,
            blocks=_blocks(d, device, TOPK_BLOCKS_PER_UNIT, blocks, count_stride),
            **target,
        )


def _blocks(d: Dims, device: Device, per_unit: float, blocks: int | None, most: int) -> int:
    """Grid x: no result depends on it."""
    if blocks is None:
        return min(most, max(1, int(per_unit * device.properties.compute_units / d["rows"])))
    d.require(0 < blocks <= most, f"blocks is {blocks}, expected 1 to {most}")
    return blocks


def cost_score(rows: int, heads: int, dim: int, context: int, item_bytes: int) -> Cost:
    """Cost of `rows` rows that all see `context` positions of one session: queries and keys read, scores written."""
    return Cost(bytes=(rows * heads * dim + context * dim) * item_bytes + 4 * rows * context, flops=2 * rows * context * heads * (dim + 1))


def cost_topk(rows: int, k: int, context: int) -> Cost:
    """Every score read once, the selection written."""
    return Cost(bytes=rows * (4 * context + 4 * k), flops=0)


def give_args(
    selected: Array,
    counts: Array,
    sessions: Array,
    round_starts: Array,
    tables: Array,
    place: HotPlace,
    plan: Array,
    fetch: FetchList,
    source: GroupPlace,
    arrivals: Array,
) -> step_give_args:
    """Arguments of part GIVE of step_gemv: the plan of every row, its misses given slots, as `hotcache.hot_plan` does.

    Arrays as for `hotcache.hot_plan`: selected [rows, k] i32, k at most 2,048, counts, sessions [rows] i32, round_starts [rounds + 1] i32, tables
    [sessions, extents] u64 of host extents and source, the group's place in them, plan [rows, k] u64, fetch for rows * k entries and all rounds.
    arrivals [at least rounds, 4] u32, 0 before and after. A block for each 256 entries of a query row, in any order: the last one of round i
    completes plan, fetch list, slot tables and counters of its session and group. A row that is in no round has no plan. Raises ContractError.
    """
    args = hotcache.round_args(
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
        source,
        place.ring_rows,
    )
    d = Dims("give")
    rounds = round_starts.shape[0] - 1
    d.match("arrivals", arrivals, None, ARRIVAL_WORDS, dtype=DType.U32)
    d.require(arrivals.shape[0] >= rounds, f"arrivals dim 0 is {arrivals.shape[0]}, expected at least rounds={rounds}")
    d.require(args.k <= GIVE_K_MAX, f"k is {args.k}, expected at most {GIVE_K_MAX}")
    args.arrivals, args.rows, args.rounds = arrivals.address, counts.shape[0], rounds
    return args


def place_args(selected: Array, counts: Array, sessions: Array, place: ExtentPlace, plan: Array) -> step_place_args:
    """Arguments of part PLACE of step_gemv, a block for each query row: plan[r, i] as `hotcache.plan_extent` writes it.

    selected [rows, k] i32, counts, sessions [rows] i32, plan [rows, k] u64. Raises ContractError.
    """
    d = Dims("place")
    d.match("selected", selected, "rows", "k", dtype=DType.I32)
    d.match("counts", counts, "rows", dtype=DType.I32)
    d.match("sessions", sessions, "rows", dtype=DType.I32)
    d.match("plan", plan, "rows", "k", dtype=DType.U64)
    d.match("place.tables", place.tables, "sessions_max", "extents", dtype=DType.U64)
    d.require(place.shape.row_bytes % 16 == 0, f"place.shape.row_bytes is {place.shape.row_bytes}, expected a multiple of 16")
    return step_place_args(
        selected=selected.address,
        counts=counts.address,
        tables=place.tables.address,
        sessions=sessions.address,
        plan=plan.address,
        k=d["k"],
        table_stride=d["extents"],
        extent_rows=place.shape.extent_rows,
        row_bytes=place.shape.row_bytes,
        rows=d["rows"],
    )
