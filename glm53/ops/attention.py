"""Absorbed MLA attention over planned history rows. Kernel: attention.hip."""

from __future__ import annotations

from glm53.hip import Array, Stream
from glm53.ops.args import attend_args
from glm53.ops.contract import Cost, Dims, ceil_div, launch
from glm53.ops.rows import format_variant, row_size, space_offsets
from glm53.spec import DType, Offsets, RowFormat


def attend(
    stream: Stream,
    q_latent: Array,
    q: Array,
    plan: Array,
    counts: Array,
    out: Array,
    *,
    offsets: Offsets,
    row_format: RowFormat,
    rope_offset: int,
    scale: float,
) -> None:
    """out[r, h] = sum_n softmax(s)[n] * latent[n], s[n] = (<q_latent[r, h], latent[n]> + <q[r, h, rope_offset:], rope[n]>) * scale.

    q_latent [rows, heads, latent] T (the nope part of the query times WK), q [rows, heads, head_dim] T, already rotated; plan [rows, k] u64,
    counts [rows] i32, out [rows, heads, latent] T. plan[r, n], n < counts[r], is the reference of a history row [latent | rope]: payload (bits 4
    and up) + offsets[space (bits 0 and 1)] is its address in this layer (docs/decisions/0003-host-tier.md), a multiple of 16. counts[r] = 0
    gives zeros. T and row_format: f32 and f32, bf16 and bf16, or either and q8g64, whose values are read into f32 exactly.
    latent <= 512, latent + head_dim - rope_offset <= 576. Softmax and sums in f32, rows in plan order; the bits do not depend on where a row
    lies. Raises ContractError. Source: DeepSeek-V2's MLA, absorbed form.
    """
    d = Dims("attend")
    d.match("q_latent", q_latent, "rows", "heads", "latent", dtype=(DType.F32, DType.BF16))
    d.match("q", q, "rows", "heads", "head_dim", dtype=q_latent.dtype)
    d.match("plan", plan, "rows", "k", dtype=DType.U64)
    d.match("counts", counts, "rows", dtype=DType.I32)
    d.match("out", out, "rows", "heads", "latent", dtype=q_latent.dtype)
    d.distinct("out", out, "q_latent", q_latent)
    d.distinct("out", out, "q", q)
    name = format_variant("attend", q_latent.dtype, row_format)
    limits = stream.device.kernel(name).constants
    rope = d["head_dim"] - rope_offset
    d.require(0 <= rope_offset <= d["head_dim"], f"rope_offset is {rope_offset}, expected 0 to head_dim={d['head_dim']}")
    d.require(d["latent"] <= limits["latent_max"], f"latent is {d['latent']}, expected at most {limits['latent_max']}")
    d.require(d["latent"] + rope <= limits["width_max"], f"latent + rope is {d['latent'] + rope}, expected at most {limits['width_max']}")
    row_size("attend", row_format, d["latent"], rope)
    args = attend_args(
        q_latent=q_latent.address,
        q=q.address,
        plan=plan.address,
        counts=counts.address,
        out=out.address,
        rows=d["rows"],
        heads=d["heads"],
        latent=d["latent"],
        rope=rope,
        k=d["k"],
        q_head_stride=d["head_dim"],
        q_rope_offset=rope_offset,
        scale=scale,
    )
    args.offsets[:] = space_offsets("attend", offsets)
    launch(stream, name, (ceil_div(d["heads"], limits["heads"]), d["rows"], 1), args)


def cost_attend(rows: int, heads: int, latent: int, rope: int, selected: int, item_bytes: int, row_bytes: int) -> Cost:
    """Cost with `selected` history rows of `row_bytes` a query row, each read once a query row."""
    moved = rows * heads * (2 * latent + rope) * item_bytes + rows * selected * (row_bytes + 8)
    return Cost(bytes=moved, flops=2 * rows * heads * selected * (2 * latent + rope))
