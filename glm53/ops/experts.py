"""Mixture of experts: router, grouping of (row, slot) pairs by expert, expert products, weighted sum. Kernels: router.hip, experts.hip.

pair = row * slots + slot. T: f32 or bf16 activations, W: weight format. Existing products T_W: f32_f32, f32_bf16, bf16_bf16; of prefill rows also
f32_q8g64, f32_q4g64, bf16_q8g64, bf16_q4g64.
"""

from __future__ import annotations

from glm53.hip import Array, Stream
from glm53.ops.args import expert_matmul_args, expert_sort_args, expert_sum_args, router_args
from glm53.ops.contract import Cost, Dims, ceil_div, launch, variant
from glm53.ops.halves import half_of
from glm53.ops.matrix import GROUP, Matrix, matrix_bytes
from glm53.spec import DType, WeightFormat

_T = (DType.F32, DType.BF16)
_VARIANTS = ("f32_f32", "f32_bf16", "bf16_bf16", "f32_q8g64", "f32_q4g64", "bf16_q8g64", "bf16_q4g64")


def router(
    stream: Stream,
    logits: Array,
    bias: Array,
    ids: Array,
    weights: Array,
    *,
    n_group: int,
    topk_group: int,
    normalise: bool,
    scaling: float,
) -> None:
    """Picks `slots` experts a row by sigmoid(logit) + bias, in order of decreasing choice, ties to the lowest id; weighs them by sigmoid(logit).

    logits [rows, experts] f32, bias [experts] f32, ids [rows, slots] i32, weights [rows, slots] f32. With n_group > 1 only experts of the
    topk_group best groups compete; a group's score is the sum of its two best choices. normalise: weights are divided by (their sum + 1e-20);
    then times `scaling`. experts <= 256, slots <= 16. A NaN logit goes last and shows as a NaN weight if it must be picked.
    Raises ContractError. Source: DeepSeek-V3's noaux_tc router as in transformers `glm_moe_dsa`.
    """
    d = Dims("router")
    d.match("logits", logits, "rows", "experts", dtype=DType.F32)
    d.match("bias", bias, "experts", dtype=DType.F32)
    d.match("ids", ids, "rows", "slots", dtype=DType.I32)
    d.match("weights", weights, "rows", "slots", dtype=DType.F32)
    limits = stream.device.kernel("router").constants
    experts, slots = d["experts"], d["slots"]
    d.require(experts <= limits["experts_max"], f"experts is {experts}, expected at most {limits['experts_max']}")
    d.require(n_group >= 1 and experts % n_group == 0, f"n_group is {n_group}, expected a divisor of experts={experts}")
    d.require(1 <= topk_group <= n_group, f"topk_group is {topk_group}, expected 1 to n_group={n_group}")
    open_experts = experts // n_group * topk_group
    d.require(slots <= min(open_experts, limits["slots_max"]), f"slots is {slots}, expected at most {min(open_experts, limits['slots_max'])}")
    args = router_args(
        logits=logits.address,
        bias=bias.address,
        ids=ids.address,
        weights=weights.address,
        experts=experts,
        k=slots,
        n_group=n_group,
        topk_group=topk_group,
        normalise=int(normalise),
        scaling=scaling,
    )
    launch(stream, "router", (d["rows"], 1, 1), args)


def cost_router(rows: int, experts: int, slots: int) -> Cost:
    return Cost(bytes=4 * (rows * (experts + 2 * slots) + experts), flops=rows * (5 * experts + 3 * slots))


def expert_sort(stream: Stream, ids: Array, offsets: Array, sorted_pairs: Array) -> None:
    """Groups pairs by expert: those of expert e are sorted_pairs[offsets[e] .. offsets[e + 1]), ascending.

    ids [rows, slots] i32, each in [0, experts); offsets [experts + 1] i32; sorted_pairs [rows, slots] i32. experts <= 256.
    Raises ContractError.
    """
    d = Dims("expert_sort")
    d.match("ids", ids, "rows", "slots", dtype=DType.I32)
    d.match("offsets", offsets, "experts + 1", dtype=DType.I32)
    d.match("sorted_pairs", sorted_pairs, "rows", "slots", dtype=DType.I32)
    d.distinct("sorted_pairs", sorted_pairs, "ids", ids)
    experts, limit = d["experts + 1"] - 1, stream.device.kernel("expert_sort").constants["experts_max"]
    d.require(1 <= experts <= limit, f"offsets dim 0 is {experts + 1}, expected 2 to {limit + 1}")
    args = expert_sort_args(
        ids=ids.address,
        offsets=offsets.address,
        sorted_pairs=sorted_pairs.address,
        pairs=d["rows"] * d["slots"],
        experts=experts,
    )
    launch(stream, "expert_sort", (1, 1, 1), args)


def cost_expert_sort(pairs: int, experts: int) -> Cost:
    return Cost(bytes=4 * (3 * pairs + experts + 1), flops=0)


def expert_matmul(stream: Stream, x: Array, w: Matrix, y: Array, order: tuple[Array, Array], half: int | None = None) -> None:
    """y[r, s] = x[r] @ w[e]^T, or x[r, s] @ w[e]^T where x has slots of its own; e is the expert of the pair.

    x [rows, k] or [rows, slots, k] T, w [experts, n, k] W, y [rows, slots, n] T, order (offsets [experts + 1] i32, sorted_pairs [rows, slots] i32)
    from expert_sort. half: 0 or 1, that part of k alone (`halves.half_of`). Sums as matmul's; a pair's bits depend on its x and w only. Raises
    ContractError.
    """
    d = Dims("expert_matmul")
    offsets, sorted_pairs = order
    d.match("sorted_pairs", sorted_pairs, "rows", "slots", dtype=DType.I32)
    if len(x.shape) == 3:
        d.match("x", x, "rows", "slots", "k", dtype=_T)
    else:
        d.match("x", x, "rows", "k", dtype=_T)
    d.match("w", w, "experts", "n", "k")
    d.match("y", y, "rows", "slots", "n", dtype=x.dtype)
    d.distinct("y", y, "x", x)
    n, k = d["n"], d["k"]
    first, count = (0, k) if half is None else half_of(k, half)
    args = expert_matmul_args(
        x=x.address + first * x.dtype.item_bytes,
        w=w.codes.address + first * w.format.bits // 8,
        scales=w.scales_address and w.scales_address + first // GROUP * 2,
        y=y.address,
        w_expert_stride=n * k,
        pairs_per_row=1 if len(x.shape) == 3 else d["slots"],
        n=n,
        k=count,
        stride=k,
    )
    d.match("offsets", offsets, d["experts"] + 1, dtype=DType.I32)
    name = variant("expert_matmul_tile", _VARIANTS, x.dtype, w.format)
    args.offsets, args.sorted_pairs = offsets.address, sorted_pairs.address
    launch(stream, name, (ceil_div(n, stream.device.kernel(name).constants["cols"]), d["experts"], 1), args)


def cost_expert_matmul(pairs: int, active_experts: int, n: int, k: int, item_bytes: int, format: WeightFormat) -> Cost:
    """Cost with the weights of each of `active_experts` read once."""
    return Cost(bytes=pairs * (n + k) * item_bytes + active_experts * matrix_bytes(format, (n, k)), flops=2 * pairs * n * k)


def expert_sum(stream: Stream, expert_out: Array, weights: Array, total: Array) -> None:
    """total[r] = (sum_s weights[r, s] * expert_out[r, s]) + total[r] in f32, slots ascending: of one half of the experts' down product.

    expert_out [rows, slots, width] T, weights [rows, slots] f32, total [rows, width] f32, before: the shared expert's. Raises ContractError.
    Source: rounding of transformers' grouped_mm experts, whose output is in T.
    """
    d = Dims("expert_sum")
    d.match("expert_out", expert_out, "rows", "slots", "width", dtype=_T)
    d.match("weights", weights, "rows", "slots", dtype=DType.F32)
    d.match("total", total, "rows", "width", dtype=DType.F32)
    d.distinct("total", total, "expert_out", expert_out)
    name = variant("expert_sum", ("f32", "bf16"), expert_out.dtype)
    args = expert_sum_args(expert_out=expert_out.address, weights=weights.address, sum=total.address, k=d["slots"], width=d["width"])
    launch(stream, name, (ceil_div(d["width"], stream.device.kernel(name).block), d["rows"], 1), args)


def cost_expert_sum(rows: int, slots: int, width: int, item_bytes: int) -> Cost:
    return Cost(bytes=rows * (width * (slots * item_bytes + 8) + 4 * slots), flops=rows * width * (2 * slots + 1))
