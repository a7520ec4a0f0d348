"""Checks of router, grouping, expert products and weighted sum: ties, NaN, groups, experts without tokens, all tokens on one expert."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from glm53.check import reference_experts as reference
from glm53.check.case import Bench, Case, draw, round_to
from glm53.check.compare import EXACT, Comparison, compare, worst_of
from glm53.hip import Array, Device
from glm53.ops import experts, matmul
from glm53.ops.halves import half_of, join
from glm53.ops.matrix import Matrix
from glm53.spec import DType

# Router


@dataclass(frozen=True)
class Routing:
    name: str
    rows: int
    experts: int
    slots: int
    n_group: int = 1
    topk_group: int = 1
    normalise: bool = True
    logits: str = "random"  # random, equal, steps (ties), nan, extreme


def router_logits(case: Routing) -> np.ndarray:
    logits = draw(case.experts, (case.rows, case.experts), spread=2.0)
    if case.logits == "equal":
        return np.zeros_like(logits)
    if case.logits == "steps":
        return np.round(logits).astype(np.float32)
    if case.logits == "nan":
        logits[:, ::3] = np.nan
        logits[-1] = np.nan
    if case.logits == "extreme":
        logits[:, ::4], logits[:, 1::4], logits[:, 2::4] = np.inf, -np.inf, 3e38
    return logits


def run_router(case: Routing, device: Device) -> Comparison:
    logits = router_logits(case)
    tied = case.logits in ("equal", "steps", "extreme")
    bias = np.zeros(case.experts, np.float32) if tied else draw(9, (case.experts,), spread=0.1)
    want_ids, want_weights = reference.router(logits, bias, case.slots, case.n_group, case.topk_group, case.normalise, 2.5)
    with Bench(device) as bench:
        ids, weights = bench.poison(DType.I32, want_ids.shape), bench.poison(DType.F32, want_weights.shape)
        experts.router(
            bench.stream,
            bench.put(logits),
            bench.put(bias),
            ids,
            weights,
            n_group=case.n_group,
            topk_group=case.topk_group,
            normalise=case.normalise,
            scaling=2.5,
        )
        return worst_of(compare("ids", bench.read(ids), want_ids), compare("weights", bench.read(weights), want_weights, DType.F32))


_ROUTINGS = (
    Routing("released", 9, 256, 8),
    Routing("tiny", 3, 16, 4),
    Routing("not-normalised", 2, 16, 4, normalise=False),
    Routing("one", 1, 1, 1),
    Routing("all", 2, 7, 7),
    Routing("most-slots", 2, 33, 16),
    Routing("groups", 8, 256, 8, n_group=8, topk_group=4),
    Routing("groups-of-one", 4, 12, 3, n_group=12, topk_group=5),
    Routing("groups-tied", 2, 64, 6, n_group=4, topk_group=2, logits="equal"),
    Routing("groups-steps", 5, 64, 8, n_group=8, topk_group=3, logits="steps"),
    Routing("equal", 2, 256, 8, logits="equal"),
    Routing("steps", 9, 100, 8, logits="steps"),
    Routing("nan", 3, 30, 8, logits="nan"),
    Routing("nan-groups", 3, 32, 8, n_group=4, topk_group=2, logits="nan"),
    Routing("extreme", 2, 32, 9, logits="extreme"),
)


# Grouping


def expert_ids(kind: str, rows: int, slots: int, count: int) -> np.ndarray:
    """[rows, slots] i32 in [0, count), distinct in a row except for kind "one"."""
    rng = np.random.default_rng(rows * 31 + slots)
    if kind == "one":
        return np.full((rows, slots), count - 1, np.int32)
    pool = np.arange(0, count, 2) if kind == "half" else np.arange(count)  # half: every second expert has no token
    return np.stack([rng.permutation(pool)[:slots] for _ in range(rows)]).astype(np.int32)


def run_sort(kind: str, rows: int, slots: int, count: int, device: Device) -> Comparison:
    ids = expert_ids(kind, rows, slots, count)
    want_offsets, want_pairs = reference.expert_sort(ids, count)
    with Bench(device) as bench:
        offsets, pairs = bench.poison(DType.I32, (count + 1,)), bench.poison(DType.I32, ids.shape)
        experts.expert_sort(bench.stream, bench.put(ids), offsets, pairs)
        return worst_of(compare("offsets", bench.read(offsets), want_offsets), compare("sorted pairs", bench.read(pairs).reshape(-1), want_pairs))


# Expert products


@dataclass(frozen=True)
class Product:
    name: str
    rows: int
    slots: int
    experts: int
    n: int
    k: int
    x_dtype: DType = DType.F32
    w_dtype: DType = DType.F32
    kind: str = "random"
    x_per_slot: bool = False


def run_product(case: Product, device: Device) -> Comparison:
    """Against the reference, alone against together, and against the plain product bit by bit."""
    x_shape = (case.rows, case.slots, case.k) if case.x_per_slot else (case.rows, case.k)
    x, w = draw(21, x_shape, case.x_dtype), draw(22, (case.experts, case.n, case.k), case.w_dtype)
    ids = expert_ids(case.kind, case.rows, case.slots, case.experts)
    with Bench(device) as bench:
        weights = Matrix.plain(bench.put(w, case.w_dtype))

        def multiply(of: slice) -> Array:
            some_ids = bench.put(ids[of])
            y = bench.poison(case.x_dtype, (*some_ids.shape, case.n))
            order = (bench.poison(DType.I32, (case.experts + 1,)), bench.poison(DType.I32, some_ids.shape))
            experts.expert_sort(bench.stream, some_ids, *order)
            experts.expert_matmul(bench.stream, bench.put(x[of], case.x_dtype), weights, y, order)
            return y

        together = multiply(slice(0, case.rows))
        want, scale = reference.expert_matmul(x, w, ids)
        result = compare("y", bench.read(together), round_to(want, case.x_dtype), case.x_dtype, scale)
        bits, last = bench.bits(together), case.rows - 1
        compare("last row alone", bench.bits(multiply(slice(last, last + 1)))[0], bits[last])
        plain = bench.poison(case.x_dtype, (1, case.n))
        row = x[last, -1] if case.x_per_slot else x[last]
        one = Matrix.plain(bench.put(w[ids[last, -1]], case.w_dtype))
        matmul.matmul(bench.stream, bench.put(row[None], case.x_dtype), one, plain)
        compare("plain product", bench.bits(plain)[0], bits[last, -1])
        return result


_PRODUCTS = (
    Product("one", 1, 1, 1, 1, 1),
    Product("odd", 5, 2, 4, 33, 17, x_per_slot=True),
    Product("tiny", 9, 4, 16, 128, 256),
    Product("half-without-tokens", 7, 3, 8, 65, 72, kind="half"),
    Product("all-on-one", 130, 1, 5, 40, 64, kind="one"),
    Product("f32-bf16", 3, 2, 4, 64, 96, w_dtype=DType.BF16),
    Product("bf16", 6, 4, 8, 96, 130, DType.BF16, DType.BF16),
    Product("bf16-per-slot", 66, 2, 3, 35, 64, DType.BF16, DType.BF16, x_per_slot=True),
)


# Weighted sum


def run_sum(rows: int, slots: int, width: int, dtype: DType, device: Device) -> Comparison:
    out, weights, shared = draw(31, (rows, slots, width), dtype), np.abs(draw(32, (rows, slots))), draw(33, (rows, width))
    want = reference.expert_sum(out, weights, shared, np.zeros_like(shared), DType.F32)
    with Bench(device) as bench:
        total = bench.put(shared)
        experts.expert_sum(bench.stream, bench.put(out, dtype), bench.put(weights), total)
        return compare("total", bench.read(total), want, EXACT)


# Halves of k


def run_half(rows: int, slots: int, count: int, n: int, k: int, dtype: DType, device: Device) -> Comparison:
    """Each half of an expert product and of a plain one is the product of those columns alone, bit by bit."""
    x, w, ids = draw(35, (rows, slots, k), dtype), draw(36, (count, n, k), dtype), expert_ids("random", rows, slots, count)
    results = []
    with Bench(device) as bench:
        some_ids, dx, dw = bench.put(ids), bench.put(x, dtype), Matrix.plain(bench.put(w, dtype))
        order = (bench.poison(DType.I32, (count + 1,)), bench.poison(DType.I32, ids.shape))
        experts.expert_sort(bench.stream, some_ids, *order)
        for half in (0, 1):
            first, length = half_of(k, half)
            part = slice(first, first + length)
            of_half, alone = bench.poison(dtype, (rows, slots, n)), bench.poison(dtype, (rows, slots, n))
            experts.expert_matmul(bench.stream, dx, dw, of_half, order, half)
            some = Matrix.plain(bench.put(w[..., part], dtype))
            experts.expert_matmul(bench.stream, bench.put(x[..., part], dtype), some, alone, order)
            results.append(compare(f"experts, half {half}", bench.bits(of_half), bench.bits(alone), EXACT))
            plain, plain_alone = bench.poison(DType.F32, (rows, n)), bench.poison(DType.F32, (rows, n))
            one, one_alone = Matrix.plain(bench.put(w[0], dtype)), Matrix.plain(bench.put(w[0][:, part], dtype))
            matmul.matmul_half(bench.stream, bench.put(x[:, 0], dtype), one, half, plain)
            matmul.matmul(bench.stream, bench.put(x[:, 0, part], dtype), one_alone, plain_alone)
            results.append(compare(f"plain, half {half}", bench.bits(plain), bench.bits(plain_alone), EXACT))
    return worst_of(*results)


def run_join(rows: int, n: int, dtype: DType, in_place: bool, device: Device) -> Comparison:
    low, high, residual = draw(37, (rows, n)), draw(38, (rows, n)), draw(39, (rows, n), dtype)
    with Bench(device) as bench:
        held = bench.put(residual, dtype)
        y = held if in_place else bench.poison(dtype, (rows, n))
        join(bench.stream, bench.put(low), bench.put(high), held, y)
        return compare("y", bench.read(y), round_to(residual + (low + high), dtype), EXACT)


CASES = [
    *(Case("router", case.name, partial(run_router, case)) for case in _ROUTINGS),
    Case("experts", "sort-released", partial(run_sort, "random", 64, 8, 256)),
    Case("experts", "sort-one-pair", partial(run_sort, "random", 1, 1, 1)),
    Case("experts", "sort-all-on-one", partial(run_sort, "one", 33, 4, 16)),
    Case("experts", "sort-half-empty", partial(run_sort, "half", 257, 4, 16)),
    Case("experts", "sort-1025-pairs", partial(run_sort, "random", 1025, 1, 7)),
    *(Case("experts", f"product-{case.name}", partial(run_product, case)) for case in _PRODUCTS),
    Case("experts", "sum-f32", partial(run_sum, 9, 8, 257, DType.F32)),
    Case("experts", "sum-one", partial(run_sum, 2, 1, 64, DType.F32)),
    Case("experts", "sum-bf16", partial(run_sum, 5, 4, 300, DType.BF16)),
    *(
        Case("experts", f"half-{dtype.label}-{k}", partial(run_half, 5, 3, 4, 70, k, dtype))
        for dtype, k in ((DType.F32, 192), (DType.F32, 130), (DType.BF16, 256))
    ),
    Case("matmul_tile", "join-f32", partial(run_join, 3, 700, DType.F32, False)),
    Case("matmul_tile", "join-bf16", partial(run_join, 5, 411, DType.BF16, True)),
]
