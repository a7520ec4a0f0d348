"""Attention of a decode step in two launches: splits of the planned rows, then their join and wv; or in three. Kernels: step_attention.hip."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from glm53.hip import Array, Device, Stream
from glm53.ops.contract import Cost, Dims, ceil_div, launch, on_sm
from glm53.ops.matrix import GROUP, Matrix
from glm53.ops.rows import format_variant, row_size, space_offsets
from glm53.ops.step_args import step_attend_args, step_expand_args, step_join_args
from glm53.spec import DType, Offsets, RowFormat, WeightFormat

SPLIT = 64  # planned rows of one partial result
WIDTH_UNIT = 8  # latent, rope and the columns before the rope part of q are multiples of it
MANY_EXPAND = "step_expand_many_bf16"  # of several rows and q8g64 weights on sm_90: the same bits
MANY_ATTEND = {"step_attend_bf16_q8g64": "step_attend_many_bf16_q8g64"}  # likewise: three blocks share a multiprocessor
# On sm_90: up to so many rows the kernel for one row expands faster, its blocks one after the other, and two blocks of attention a multiprocessor are
# enough for all.
FEW_ROWS = 2
# Likewise, of so many rows and more, with bf16 queries and q8g64 rows and weights (`attend_expand`): three launches, which store no partial results,
# for latent 512.
JOINED = ("step_weigh_bf16_q8g64", "step_join_bf16_q8g64", "step_expand_joined_bf16")
JOINED_ROWS = 4
LATENT, ROPE_MAX = 512, 64
# Kernels with the same bits whose blocks do not share a multiprocessor: for one query row, which has fewer blocks than there are multiprocessors.
ONE_ROW = {"step_attend_bf16_q8g64": "step_attend_one_bf16_q8g64", "step_expand_bf16": "step_expand_one_bf16"}


def kernel_for(name: str, rows: int) -> str:
    """The kernel that a launch of `rows` query rows takes: `name`, or the one with the same bits for a single row, where there is one."""
    return ONE_ROW.get(name, name) if rows == 1 else name


@dataclass(frozen=True)
class Partials:
    """What `attend` leaves for `expand`, of each row, head and split of 64 planned rows. s: scores, as in `attend`.

    partial [rows, heads, splits, latent] f32: sum of exp(s - top) * latent; tops and masses [rows, heads, splits] f32: the largest s, and the sum of
    exp(s - top). Splits past a row's count hold what they held before.
    """

    partial: Array
    tops: Array
    masses: Array

    @classmethod
    def make(cls, device: Device, rows: int, heads: int, topk: int, latent: int, category: str = "") -> Self:
        """Arrays for up to `topk` planned rows a query row, contents undefined."""
        shape = (rows, heads, ceil_div(topk, SPLIT))
        partial = Array.empty(device, DType.F32, (*shape, latent), category)
        tops, masses = (Array.empty(device, DType.F32, shape, category) for _ in range(2))
        return cls(partial, tops, masses)

    def slice(self, start: int, stop: int) -> Self:
        """Those of query rows [start, stop)."""
        return type(self)(self.partial.slice(start, stop), self.tops.slice(start, stop), self.masses.slice(start, stop))

    def free(self) -> None:
        for array in (self.partial, self.tops, self.masses):
            array.free()


def _match_partials(d: Dims, partials: Partials) -> None:
    d.match("partials.partial", partials.partial, "rows", "heads", "splits", "latent", dtype=DType.F32)
    d.match("partials.tops", partials.tops, "rows", "heads", "splits", dtype=DType.F32)
    d.match("partials.masses", partials.masses, "rows", "heads", "splits", dtype=DType.F32)


def _require_words(d: Dims, **arrays: Array) -> None:
    """Kernels read these in words of 16 bytes."""
    for name, array in arrays.items():
        d.require(array.address % 16 == 0, f"{name} is at address {array.address:#x}, expected a multiple of 16")


def attend(
    stream: Stream,
    q_latent: Array,
    q: Array,
    plan: Array,
    counts: Array,
    partials: Partials,
    *,
    offsets: Offsets,
    row_format: RowFormat,
    rope_offset: int,
    scale: float,
) -> None:
    """partials of softmax(s) @ latent by splits of 64 planned rows, s[n] = (<q_latent[r, h], latent[n]> + <q[r, h, rope_offset:], rope[n]>) * scale.

    q_latent [rows, heads, latent] T, q [rows, heads, head_dim] T, plan [rows, k] u64, counts [rows] i32, offsets, row_format and T as
    `attention.attend`; partials for at least k planned rows. A row with counts[r] <= 0 writes nothing. latent <= 512, latent + rope <= 576; latent,
    head_dim and rope_offset are multiples of 8. T = f32: f32 throughout. T = bf16: products of bf16 with f32 sums; the softmax weight (times the
    scale of a q8g64 group) is rounded to bf16. The bits of a row depend neither on other rows nor on where its history lies. Raises ContractError.
    Source: DeepSeek-V2's MLA, absorbed; FlashDecoding's splits.
    """
    d = Dims("step_attend")
    d.match("q_latent", q_latent, "rows", "heads", "latent", dtype=(DType.F32, DType.BF16))
    d.match("q", q, "rows", "heads", "head_dim", dtype=q_latent.dtype)
    d.match("plan", plan, "rows", "k", dtype=DType.U64)
    d.match("counts", counts, "rows", dtype=DType.I32)
    _match_partials(d, partials)
    name = kernel_for(format_variant("step_attend", q_latent.dtype, row_format), d["rows"])
    if d["rows"] > FEW_ROWS and on_sm(stream):
        name = MANY_ATTEND.get(name, name)
    limits = stream.device.kernel(name).constants
    rope = d["head_dim"] - rope_offset
    d.require(0 <= rope_offset <= d["head_dim"], f"rope_offset is {rope_offset}, expected 0 to head_dim={d['head_dim']}")
    for what, value in (("latent", d["latent"]), ("head_dim", d["head_dim"]), ("rope_offset", rope_offset)):
        d.require(value % WIDTH_UNIT == 0, f"{what} is {value}, expected a multiple of {WIDTH_UNIT}")
    d.require(d["latent"] <= limits["latent_max"], f"latent is {d['latent']}, expected at most {limits['latent_max']}")
    d.require(d["latent"] + rope <= limits["width_max"], f"latent + rope is {d['latent'] + rope}, expected at most {limits['width_max']}")
    splits = ceil_div(d["k"], limits["split"])
    d.require(d["splits"] >= splits, f"partials have {d['splits']} splits, expected at least {splits} for k={d['k']}")
    row_size("step_attend", row_format, d["latent"], rope)
    _require_words(d, q_latent=q_latent, q=q)
    args = step_attend_args(
        q_latent=q_latent.address,
        q=q.address,
        plan=plan.address,
        counts=counts.address,
        partial=partials.partial.address,
        tops=partials.tops.address,
        masses=partials.masses.address,
        heads=d["heads"],
        latent=d["latent"],
        rope=rope,
        k=d["k"],
        splits=d["splits"],
        q_head_stride=d["head_dim"],
        q_rope_offset=rope_offset,
        scale=scale,
    )
    args.offsets[:] = space_offsets("step_attend", offsets)
    launch(stream, name, (splits, ceil_div(d["heads"], limits["heads"]), d["rows"]), args)


def expand(stream: Stream, partials: Partials, counts: Array, wv: Matrix, o: Array) -> None:
    """o[r, h] = T(o_latent @ wv[h]^T), o_latent = T(the splits of partials joined in ascending order); zeros where counts[r] <= 0.

    counts [rows] i32, as `attend` had it; wv [heads, v, latent] in any weight format, o [rows, heads, v] T (f32 or bf16). latent <= 512 and a
    multiple of 8, at most 128 splits. Sums in f32, in the order of decision 0004. A row's bits do not depend on other rows. Raises
    ContractError. Source: FlashDecoding's reduction, DeepSeek-V2's MLA.
    """
    d = Dims("step_expand")
    _match_partials(d, partials)
    d.match("counts", counts, "rows", dtype=DType.I32)
    d.match("wv", wv.codes, "heads", "v", d["latent"] // 2 if wv.format is WeightFormat.Q4G64 else "latent")
    d.match("o", o, "rows", "heads", "v", dtype=(DType.F32, DType.BF16))
    name = kernel_for(f"step_expand_{o.dtype.label}", d["rows"])
    many = d["rows"] > 1 and o.dtype is DType.BF16 and wv.format is WeightFormat.Q8G64 and on_sm(stream)
    if many and d["rows"] <= FEW_ROWS:
        many, name = False, ONE_ROW[name]
    if many:
        name = MANY_EXPAND
    limits = stream.device.kernel(name).constants
    d.require(d["latent"] <= limits["latent_max"], f"latent is {d['latent']}, expected at most {limits['latent_max']}")
    d.require(d["latent"] % WIDTH_UNIT == 0, f"latent is {d['latent']}, expected a multiple of {WIDTH_UNIT}")
    d.require(d["splits"] <= limits["splits_max"], f"partials have {d['splits']} splits, expected at most {limits['splits_max']}")
    _require_words(d, wv=wv.codes)
    args = step_expand_args(
        partial=partials.partial.address,
        tops=partials.tops.address,
        masses=partials.masses.address,
        counts=counts.address,
        codes=wv.codes.address,
        scales=wv.scales.address if wv.scales is not None else 0,
        o=o.address,
        rows=d["rows"],
        heads=d["heads"],
        latent=d["latent"],
        v=d["v"],
        k=d["splits"] * SPLIT,
        splits=d["splits"],
        format=wv.format,
    )
    if many:  # rows_each of expand_rows.h
        each = min(ceil_div(d["rows"], limits["groups"]), limits["rows"])
        grid = (ceil_div(d["rows"], each), 1, d["heads"])
    else:
        grid = (d["rows"], ceil_div(d["v"], limits["columns"]), d["heads"])
    launch(stream, name, grid, args)


def joined_places(partials: Partials) -> tuple[int, ...]:
    """Where in the memory of partial results lie, in place of these, weights, scales, codes and x of step_join_args; then the end."""
    rows, heads, splits, latent = partials.partial.shape
    splits *= rows
    sizes = (ceil_div(heads, 16) * 16 * splits * SPLIT * 4, splits * latent * 4, splits * SPLIT * latent, rows * heads * latent * 2)
    return tuple(partials.partial.address + sum(sizes[:i]) for i in range(len(sizes) + 1))


def attend_expand(
    stream: Stream,
    q_latent: Array,
    q: Array,
    plan: Array,
    counts: Array,
    partials: Partials,
    wv: Matrix,
    o: Array,
    *,
    offsets: Offsets,
    row_format: RowFormat,
    rope_offset: int,
    scale: float,
) -> None:
    """`attend`, then `expand`: the same bits in o, and the same contracts. partials hold afterwards what nobody else can read."""
    q8 = row_format is RowFormat.Q8G64 and wv.format is WeightFormat.Q8G64 and q.dtype is DType.BF16
    fits = q8 and len(q) >= JOINED_ROWS and joined_places(partials)[-1] <= partials.partial.address + partials.partial.nbytes
    if not (fits and on_sm(stream)):
        attend(stream, q_latent, q, plan, counts, partials, offsets=offsets, row_format=row_format, rope_offset=rope_offset, scale=scale)
        expand(stream, partials, counts, wv, o)
        return
    d = Dims("step_attend_expand")
    d.match("q_latent", q_latent, "rows", "heads", LATENT, dtype=DType.BF16)
    d.match("q", q, "rows", "heads", "head_dim", dtype=DType.BF16)
    d.match("plan", plan, "rows", "k", dtype=DType.U64)
    d.match("counts", counts, "rows", dtype=DType.I32)
    d.match("partials.partial", partials.partial, "rows", "heads", "splits", LATENT, dtype=DType.F32)
    _match_partials(d, partials)
    d.match("wv", wv.codes, "heads", "v", LATENT)
    d.match("o", o, "rows", "heads", "v", dtype=DType.BF16)
    weigh, join, product = (stream.device.kernel(name).constants for name in JOINED)
    rope, splits = d["head_dim"] - rope_offset, ceil_div(d["k"], SPLIT)
    d.require(0 <= rope <= ROPE_MAX, f"rope_offset is {rope_offset}, expected head_dim={d['head_dim']} less 0 to {ROPE_MAX}")
    for what, value in (("head_dim", d["head_dim"]), ("rope_offset", rope_offset)):
        d.require(value % WIDTH_UNIT == 0, f"{what} is {value}, expected a multiple of {WIDTH_UNIT}")
    d.require(splits <= d["splits"] <= join["splits_max"], f"partials have {d['splits']} splits, expected {splits} to {join['splits_max']}")
    row_size("step_attend_expand", row_format, LATENT, rope)
    _require_words(d, q_latent=q_latent, q=q, wv=wv.codes)
    weights, scales, codes, x, _ = joined_places(partials)
    args = step_join_args(
        q_latent=q_latent.address,
        q=q.address,
        plan=plan.address,
        counts=counts.address,
        weights=weights,
        scales=scales,
        codes=codes,
        tops=partials.tops.address,
        masses=partials.masses.address,
        x=x,
        heads=d["heads"],
        rope=rope,
        k=d["k"],
        splits=d["splits"],
        q_head_stride=d["head_dim"],
        q_rope_offset=rope_offset,
        scale=scale,
    )
    args.offsets[:] = space_offsets("step_attend_expand", offsets)
    launch(stream, JOINED[0], (splits, ceil_div(d["heads"], weigh["heads"]), d["rows"]), args)
    launch(stream, JOINED[1], (LATENT // join["columns"], ceil_div(d["heads"], join["heads"]), d["rows"]), args)
    expand_args = step_expand_args(
        partial=x,
        codes=wv.codes.address,
        scales=wv.scales.address if wv.scales is not None else 0,
        o=o.address,
        rows=d["rows"],
        heads=d["heads"],
        latent=LATENT,
        v=d["v"],
        format=wv.format,
    )
    launch(stream, JOINED[2], (ceil_div(d["v"], product["columns"]), ceil_div(d["rows"], product["rows"]), d["heads"]), expand_args)


def cost_attend(rows: int, heads: int, latent: int, rope: int, selected: int, item_bytes: int, row_bytes: int) -> Cost:
    """Cost with `selected` history rows of `row_bytes` a query row, each read once a query row."""
    splits = ceil_div(selected, SPLIT)
    moved = rows * heads * ((latent + rope) * item_bytes + splits * (latent + 2) * 4) + rows * selected * (row_bytes + 8)
    return Cost(bytes=moved, flops=2 * rows * heads * selected * (2 * latent + rope))


def cost_expand(rows: int, heads: int, latent: int, v: int, selected: int, item_bytes: int, weight_format: WeightFormat) -> Cost:
    """Cost with `selected` planned rows a query row, weights read once."""
    splits, weights = ceil_div(selected, SPLIT), heads * v * latent
    weight_bytes = weights * weight_format.bits // 8 + (weights // GROUP * 2 if weight_format.quantised else 0)
    moved = rows * heads * (splits * (latent + 2) * 4 + v * item_bytes) + weight_bytes
    return Cost(bytes=moved, flops=2 * rows * heads * latent * (splits + v))
