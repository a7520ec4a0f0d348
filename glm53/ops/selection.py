"""Sparse selection: index scores and exact top-k. Kernels: indexer.hip, topk.hip.

rows: query rows of the launch, each of a session (a row of the table) and at a position; a position of -1 marks a row that is not in use.
T: f32 or bf16, the activation type. share: the side of a pair that scores the positions in its own extents (docs/decisions/0006-pair.md). Row q of
its tables, which is column q of its scores, is the q-th of these positions; positions in arguments and results are those of the whole.
"""

from __future__ import annotations

from glm53.hip import Array, Stream
from glm53.mem.extents import ExtentShape
from glm53.ops.args import index_score_args, topk_args
from glm53.ops.contract import Cost, Dims, ceil_div, launch, variant
from glm53.spec import WHOLE, DType, Shard

_T = (DType.F32, DType.BF16)
_VARIANTS = ("f32", "bf16")


def index_score(
    stream: Stream,
    query: Array,
    gate: Array,
    tables: Array,
    sessions: Array,
    positions: Array,
    scores: Array,
    shape: ExtentShape,
    *,
    plane: int,
    context: int,
    share: Shard = WHOLE,
) -> None:
    """scores[r, p] = sum_j gate[r, j] * heads^-1/2 * max(0, <query[r, j], key[p]> * dim^-1/2) for p <= positions[r].

    query [rows, heads, dim] T, gate [rows, heads] f32, tables [sessions, extents] u64, sessions [rows] i32, positions [rows] i32,
    scores [rows, columns] f32. shape: of the index-key extents, row_bytes = dim * sizeof(T). context: above every position (host side);
    columns and the table must reach it, those of a side the rows that it holds of it. Columns past positions[r] stay as they are. A score's
    bits are the same on a side and in the whole. heads <= 64, dim <= 128, heads * dim <= 4096. Raises ContractError.
    Source: lightning indexer of DeepSeek-V3.2; ReLU before the head weighting.
    """
    d = Dims("index_score")
    d.match("query", query, "rows", "heads", "dim", dtype=_T)
    d.match("gate", gate, "rows", "heads", dtype=DType.F32)
    d.match("tables", tables, "sessions", "extents", dtype=DType.U64)
    d.match("sessions", sessions, "rows", dtype=DType.I32)
    d.match("positions", positions, "rows", dtype=DType.I32)
    d.match("scores", scores, "rows", "columns", dtype=DType.F32)
    name = variant("index_score", _VARIANTS, query.dtype)
    heads, dim = d["heads"], d["dim"]
    limits = stream.device.kernel(name).constants
    d.require(heads <= limits["heads_max"] and dim <= limits["dim_max"], f"heads is {heads}, dim {dim}, expected at most 64 and 128")
    d.require(heads * dim <= limits["query_max"], f"heads * dim is {heads * dim}, expected at most {limits['query_max']}")
    d.require(shape.row_bytes == dim * query.dtype.item_bytes, f"shape.row_bytes is {shape.row_bytes}, expected dim * {query.dtype.item_bytes}")
    d.require(0 <= plane < shape.planes, f"plane is {plane}, expected below {shape.planes}")
    keys = share.rows_of(max(context, 0), shape.extent_rows)
    wanted = f"at least 1 and at most columns={d['columns']} keys (bound by scores dim 1)"
    d.require(context >= 1 and keys <= d["columns"], f"context is {context} with {keys} keys, expected {wanted}")
    d.require(shape.extents_for(keys) <= d["extents"], f"context {context} needs {shape.extents_for(keys)} extents, tables has {d['extents']}")
    if keys == 0:
        return
    args = index_score_args(
        q=query.address,
        gate=gate.address,
        tables=tables.address,
        sessions=sessions.address,
        positions=positions.address,
        scores=scores.address,
        heads=heads,
        dim=dim,
        table_stride=d["extents"],
        extent_rows=shape.extent_rows,
        plane=plane,
        key_bytes=shape.row_bytes,
        score_stride=d["columns"],
        key_scale=dim**-0.5,
        head_scale=heads**-0.5,
        side=share.index,
        sides=share.count,
    )
    launch(stream, name, (ceil_div(keys, limits["tile"]), d["rows"], 1), args)


def cost_index_score(rows: int, heads: int, dim: int, context: int, item_bytes: int) -> Cost:
    """Cost of `rows` rows that all see `context` positions of one session."""
    return Cost(bytes=(rows * heads * dim + context * dim) * item_bytes + 4 * rows * context, flops=2 * rows * context * heads * (dim + 1))


def topk(
    stream: Stream, scores: Array, positions: Array, selected: Array, counts: Array, share: Shard = WHOLE, extent_rows: int | None = None
) -> None:
    """The counts[r] = min(k, positions[r] + 1) positions of the largest scores[r, 0..positions[r]], ascending, ties to the lowest position.

    scores [rows, columns] f32, columns past positions[r] are not read, and none at all while positions[r] < k; positions [rows] i32;
    selected [rows, k] i32, -1 past counts[r]; counts [rows] i32. positions[r] < columns wherever positions[r] >= k (not checked: device
    data). -0 equals +0, NaN counts as -inf. Exact: integers decide. share, extent_rows of its keys: a side writes its list for `ops.merge` instead,
    selected [rows, k] u64, entries past counts[r] = min(k, rows that the side holds) left as they are; 0 where positions[r] < k.
    Raises ContractError.
    """
    d = Dims("topk")
    d.match("scores", scores, "rows", "columns", dtype=DType.F32)
    d.match("positions", positions, "rows", dtype=DType.I32)
    target = selection_target(d, selected, "k", share, extent_rows)
    d.match("counts", counts, "rows", dtype=DType.I32)
    args = topk_args(
        scores=scores.address,
        positions=positions.address,
        counts=counts.address,
        score_stride=d["columns"],
        k=d["k"],
        **target,
    )
    launch(stream, "topk", (d["rows"], 1, 1), args)


def selection_target(d: Dims, selected: Array, k: str | int, share: Shard, extent_rows: int | None) -> dict[str, int]:
    """Fields of topk_args and step_topk_args that say where a selection [rows, k], or a side's list, goes. Raises ContractError."""
    d.match("selected", selected, "rows", k, dtype=DType.I32 if share.count == 1 else DType.U64)
    d.require(share.count == 1 or (extent_rows or 0) > 0, f"extent_rows is {extent_rows}, expected that of the keys beside share={share}")
    field = "selected" if share.count == 1 else "best"
    return {field: selected.address, "extent_rows": extent_rows or 0, "side": share.index, "sides": share.count}


def cost_topk(rows: int, k: int, context: int) -> Cost:
    """Cost with every score read once; the kernel reads a row six times, from the cache where it fits."""
    return Cost(bytes=4 * rows * (context + k), flops=0)
