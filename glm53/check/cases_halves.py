"""Cases of products that a pair of devices shares: two products by the shards of the weights, joined, are the product of the whole, bit by bit.

A shard is what `model.layout` gives a side: the columns of `half_of(k)`, as a matrix of its own. Widths cross the borders of the orders of additions:
k whose first half is wide (1,024 and more) while the second is not, groups of 64 and chunks that the second half does not fill.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from glm53.check import reference_step_experts
from glm53.check.case import Bench, Case, draw
from glm53.check.cases_experts import expert_ids
from glm53.check.cases_step import FORMATS, put_halves, put_matrix
from glm53.check.cases_step_experts import ROUTED, Down, draw_down
from glm53.check.compare import Comparison, compare, worst_of
from glm53.check.reference_step import Weights, draw_weights
from glm53.hip import Array, Device
from glm53.ops import experts, halves, matmul, step, step_experts
from glm53.ops.matrix import Matrix
from glm53.ops.step import SumMail
from glm53.ops.step_parts import Patience
from glm53.spec import DType, WeightFormat

F32, BF16 = DType.F32, DType.BF16
ROWS = (1, 3, 9)
NUMBER, POLLS = 7, 1000


def shard(weights: Weights, half: int) -> Weights:
    """The columns of a side."""
    first, count = halves.half_of(weights.codes.shape[-1], half)
    scales = None if weights.scales is None else weights.scales[..., first // 64 : (first + count) // 64]
    return Weights(weights.codes[..., first : first + count], scales, weights.format)


def columns(values: np.ndarray, half: int) -> np.ndarray:
    first, count = halves.half_of(values.shape[-1], half)
    return values[..., first : first + count]


def run_gemv(rows: int, n: int, k: int, dtype: DType, weight_format: WeightFormat, device: Device) -> Comparison:
    """A RESIDUAL segment, and STORE_F32 by each shard."""
    x, weights, residual = draw(41, (rows, k), dtype), draw_weights(42, (n, k), weight_format), draw(43, (rows, n), dtype, 8.0)
    with Bench(device) as bench:
        held, whole, joined = bench.put(residual, dtype), bench.poison(dtype, (rows, n)), bench.poison(dtype, (rows, n))
        scratch = put_halves(bench, rows, n) if dtype is BF16 else None
        segment = step.Segment(put_matrix(bench, weights), whole, step.Epilogue.RESIDUAL)
        step.gemv(bench.stream, bench.put(x, dtype), [segment], residual=held, halves=scratch)
        totals = [bench.poison(F32, (rows, n)) for _ in range(2)]
        for half, total in enumerate(totals):
            alone = step.Segment(put_matrix(bench, shard(weights, half)), total, step.Epilogue.STORE_F32)
            step.gemv(bench.stream, bench.put(columns(x, half), dtype), [alone], whole_k=k)
        halves.join(bench.stream, totals[0], totals[1], held, joined)
        result = compare("y", bench.bits(joined), bench.bits(whole))
        if dtype is F32:
            return result

        def product(half: int, mail: SumMail, y: Array) -> None:
            segment = step.Segment(put_matrix(bench, shard(weights, half)), y, step.Epilogue.RESIDUAL)
            step.gemv(bench.stream, bench.put(columns(x, half), dtype), [segment], residual=held, whole_k=k, mail=mail)

        return worst_of(result, _added(bench, totals, whole, product))


def _added(bench: Bench, totals: Sequence[Array], whole: Array, product: Callable[[int, SumMail, Array], None]) -> Comparison:
    """The product of each side beside words of the other that are already there: it posts its own `totals` and has the bits of `whole`. product(half,
    mail, y) enqueues it."""
    words = [bench.bits(total).reshape(-1).astype(np.uint64) | np.uint64(NUMBER << 32) for total in totals]
    capacity = words[0].size + 3
    counter, error = bench.put(np.array([NUMBER // 2], np.uint32)), bench.put(np.zeros(1, np.uint32))
    results = []
    for half in range(2):
        box = np.full((2, capacity), 1 << 32, np.uint64)
        want = box.copy()
        box[NUMBER % 2, : words[0].size], want[NUMBER % 2, : words[0].size] = words[1 - half], words[half]
        inbox, outbox = bench.put(box), bench.put(np.full_like(box, 1 << 32))
        y = bench.poison(BF16, whole.shape)
        product(half, SumMail(outbox.address, inbox.address, capacity, counter, 2, NUMBER % 2, error, Patience(POLLS, shared=True)), y)
        results.append(compare(f"y of side {half}", bench.bits(y), bench.bits(whole)))
        results.append(compare(f"words of side {half}", bench.bits(outbox).view(np.uint32), want.view(np.uint32)))
    results.append(compare("error", bench.bits(error), np.zeros(1, np.uint32)))
    return worst_of(*results)


def run_parts(rows: int, low: int, high: int, dtype: DType, device: Device) -> Comparison:
    """Columns of both sides, put side by side."""
    parts = [draw(45 + i, (rows, n), dtype) for i, n in enumerate((low, high))]
    with Bench(device) as bench:
        held, whole = [bench.put(part, dtype) for part in parts], bench.poison(dtype, (rows, low + high))
        halves.join_parts(bench.stream, held[0], held[1], whole)
        return compare("whole", bench.bits(whole), np.concatenate([bench.bits(part) for part in held], axis=1))


def run_down(case: Down, device: Device) -> Comparison:
    i = draw_down(case)
    with Bench(device) as bench:
        held, ids, mix = bench.put(i.residual, case.dtype), bench.put(i.ids), bench.put(i.mix)
        whole, joined = (bench.poison(case.dtype, i.residual.shape) for _ in range(2))
        scratch = put_halves(bench, case.rows, case.n) if case.dtype is BF16 else None
        acts = bench.put(i.act, case.dtype), bench.put(i.shared_act, case.dtype)
        matrices = put_matrix(bench, i.weights), put_matrix(bench, i.shared)
        step_experts.down(bench.stream, acts[0], ids, mix, matrices[0], acts[1], matrices[1], held, whole, scratch)
        totals = [bench.poison(F32, i.residual.shape) for _ in range(2)]

        def operands(half: int) -> tuple[Array, Array, Array, Matrix, Array, Matrix]:
            act, shared_act = (bench.put(columns(values, half), case.dtype) for values in (i.act, i.shared_act))
            weight, shared = (put_matrix(bench, shard(weights, half)) for weights in (i.weights, i.shared))
            return act, ids, mix, weight, shared_act, shared

        for half, total in enumerate(totals):
            step_experts.down_half(bench.stream, *operands(half), total)
        halves.join(bench.stream, totals[0], totals[1], held, joined)
        result = compare("y", bench.bits(joined), bench.bits(whole))
        if case.dtype is F32:
            return result

        def product(half: int, mail: SumMail, y: Array) -> None:
            step_experts.down(bench.stream, *operands(half), held, y, mail=mail)

        return worst_of(result, _added(bench, totals, whole, product))


def run_prompt(rows: int, n: int, k: int, dtype: DType, weight_format: WeightFormat, device: Device) -> Comparison:
    """Prompt rows: each half of a product of the whole is the product by the shard."""
    x, weights = draw(44, (rows, k), dtype), draw_weights(45, (n, k), weight_format)
    results = []
    with Bench(device) as bench:
        dx, matrix = bench.put(x, dtype), put_matrix(bench, weights)
        for half in range(2):
            of_whole, alone = bench.poison(F32, (rows, n)), bench.poison(F32, (rows, n))
            matmul.matmul_half(bench.stream, dx, matrix, half, of_whole)
            matmul.matmul(bench.stream, bench.put(columns(x, half), dtype), put_matrix(bench, shard(weights, half)), alone)
            results.append(compare(f"half {half}", bench.bits(of_whole), bench.bits(alone)))
    return worst_of(*results)


def run_prompt_experts(rows: int, n: int, k: int, dtype: DType, weight_format: WeightFormat, device: Device) -> Comparison:
    """The same of routed experts, whose products have activations of their own."""
    slots, count = 2, 3
    ids = expert_ids("random", rows, slots, count)
    x, weights = draw(46, (rows, slots, k), dtype), reference_step_experts.draw_weights(47, (count, n, k), weight_format)
    results = []
    with Bench(device) as bench:
        order = (bench.poison(DType.I32, (count + 1,)), bench.poison(DType.I32, ids.shape))
        experts.expert_sort(bench.stream, bench.put(ids), *order)
        dx, matrix = bench.put(x, dtype), put_matrix(bench, weights)
        for half in range(2):
            of_whole, alone = (bench.poison(dtype, (rows, slots, n)) for _ in range(2))
            experts.expert_matmul(bench.stream, dx, matrix, of_whole, order, half)
            experts.expert_matmul(bench.stream, bench.put(columns(x, half), dtype), put_matrix(bench, shard(weights, half)), alone, order)
            results.append(compare(f"half {half}", bench.bits(of_whole), bench.bits(alone)))
    return worst_of(*results)


# (n, k): narrow; a wide first half and a second that is not; both wide, equal and unequal. Ragged ones for weights without scales.
_WIDTHS = ((37, 128), (35, 1984), (40, 2048), (18, 2432))
_RAGGED = {F32: ((7, 65), (35, 131), (19, 2049)), BF16: ((35, 200), (19, 2040), (40, 2120))}


def _widths(dtype: DType, weight_format: WeightFormat) -> tuple[tuple[int, int], ...]:
    return _WIDTHS if weight_format.quantised else _WIDTHS + _RAGGED[dtype]


def _products() -> list[Case]:
    cases = []
    for dtype in (F32, BF16):
        for weight_format in FORMATS[dtype]:
            for i, (n, k) in enumerate(_widths(dtype, weight_format)):
                rows = ROWS[i % 3]
                name = f"gemv-{dtype.label}_{weight_format.label}-{rows}x{n}x{k}"
                cases.append(Case("halves", name, partial(run_gemv, rows, n, k, dtype, weight_format)))
        for weight_format in WeightFormat:
            for i, (n, k) in enumerate(_widths(dtype, weight_format)):
                rows = ROWS[i % 3]
                name = f"{dtype.label}_{weight_format.label}-{rows}x{n}x{k}"
                cases.append(Case("halves", f"prompt-{name}", partial(run_prompt, rows, n, k, dtype, weight_format)))
                if weight_format is not WeightFormat.F32 or dtype is F32:
                    cases.append(Case("halves", f"prompt-experts-{name}", partial(run_prompt_experts, rows, n, k, dtype, weight_format)))
    return cases


def _downs() -> list[Case]:
    cases = []
    for dtype, formats in ROUTED.items():
        plain = WeightFormat.F32 if dtype is F32 else WeightFormat.BF16
        for weight_format in formats:
            shared = WeightFormat.Q8G64 if weight_format.quantised else weight_format
            base = Down("", 1, 3, 5, 37, 128, dtype, weight_format, shared_k=1984, shared_format=shared)
            some = [base, replace(base, rows=3, slots=4, k=1984, n=21, shared_k=128, kind="outside"), replace(base, rows=9, slots=2, k=2432, n=7)]
            if not weight_format.quantised:
                ragged = (131, 2049) if dtype is F32 else (200, 2056)
                some.append(replace(base, rows=3, k=ragged[0], shared_k=ragged[1], shared_format=plain, kind="outside"))
            for case in some:
                name = f"down-{dtype.label}_{weight_format.label}-{case.rows}x{case.slots}x{case.n}x{case.k}+{case.shared_k}"
                cases.append(Case("halves", name, partial(run_down, case)))
    return cases


def _parts() -> list[Case]:
    sizes = ((1, 256, 256, BF16), (3, 130, 128, BF16), (2, 33, 32, F32), (9, 1000, 1, F32))
    return [Case("halves", f"parts-{t.label}-{rows}x{low}+{high}", partial(run_parts, rows, low, high, t)) for rows, low, high, t in sizes]


CASES = _products() + _downs() + _parts()
