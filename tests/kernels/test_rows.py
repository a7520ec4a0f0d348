"""A row's bits do not depend on how many rows are beside it, whichever kernel takes them: products of 2 to 20 rows against each row alone."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from glm53.check.case import Bench, draw, round_to
from glm53.check.cases_selection import SPACE_OFFSETS, place_rows
from glm53.check.cases_step import put_halves, put_matrix
from glm53.check.reference_rows import row_bits
from glm53.check.reference_step import draw_weights
from glm53.check.reference_step_experts import draw_weights as draw_experts
from glm53.hip import Array, Device
from glm53.ops import step, step_attention, step_experts
from glm53.ops.step import Epilogue, Segment
from glm53.spec import DType, RowFormat, Space, WeightFormat

F32, BF16 = DType.F32, DType.BF16
Q8, Q4 = WeightFormat.Q8G64, WeightFormat.Q4G64
ROWS = (2, 4, 5, 8, 9, 12, 13, 20)
HISTORY = 150  # rows that a plan refers to


def compare_with_single_rows(rows: int, product: Callable[[slice], np.ndarray]) -> None:
    """product(rows of a slice): the bits of their outputs, one row after the other."""
    together = product(slice(0, rows))
    assert together.shape[0] == rows and len({row.tobytes() for row in together}) == rows
    for row in range(rows):
        np.testing.assert_array_equal(product(slice(row, row + 1))[0], together[row], err_msg=f"row {row} of {rows}")


def values(seed: int, shape: tuple[int, ...]) -> np.ndarray:
    """Rows of different sizes, so that none can stand for another."""
    x = draw(seed, shape, BF16)
    return round_to(x * np.exp2(np.arange(shape[0]) % 7 - 3).reshape(-1, *(1,) * (len(shape) - 1)).astype(np.float32), BF16)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("k", [192, 1088, 2560])
@pytest.mark.parametrize("normed", [False, True], ids=["plain", "normed"])
def test_gemv(device: Device, k: int, rows: int, normed: bool) -> None:
    n = 83
    x, norm = values(1, (rows, k)), draw(2, (k,), BF16)
    with Bench(device) as bench:
        weight, gate_up = (put_matrix(bench, draw_weights(seed, (count, k), Q8)) for seed, count in ((3, n), (4, 2 * n)))
        scale = bench.put(norm, BF16) if normed else None

        def product(some: slice) -> np.ndarray:
            part = bench.put(x[some], BF16)
            sums, act = bench.poison(F32, (len(x[some]), n)), bench.poison(BF16, (len(x[some]), n))
            step.gemv(bench.stream, part, [Segment(weight, sums, Epilogue.STORE_F32)], norm=scale, eps=1e-5)
            step.gemv(bench.stream, part, [Segment(gate_up, act, Epilogue.SILU)], norm=scale, eps=1e-5)
            return np.concatenate([bench.bits(sums).view(np.uint16), bench.bits(act)], axis=1)

        compare_with_single_rows(rows, product)


@pytest.mark.parametrize("rows", [2, 5, 11, 12])
@pytest.mark.parametrize(("k", "n"), [(1088, 13_000), (6144, 9_000)])
def test_gemv_of_many_columns(device: Device, k: int, n: int, rows: int) -> None:
    """More columns than blocks that run at once have, of a head: sets one after the other, the last one of all not whole; rows in shares."""
    x, norm = values(1, (rows, k)), draw(2, (k,), BF16)
    with Bench(device) as bench:
        weight, scale = put_matrix(bench, draw_weights(3, (n, k), Q8)), bench.put(norm, BF16)

        def product(some: slice) -> np.ndarray:
            sums = bench.poison(F32, (len(x[some]), n))
            step.gemv(bench.stream, bench.put(x[some], BF16), [Segment(weight, sums, Epilogue.STORE_F32)], norm=scale, eps=1e-5)
            return bench.bits(sums)

        compare_with_single_rows(rows, product)


@pytest.mark.parametrize("rows", [2, 8, 10, 23])
@pytest.mark.parametrize("k", [1088, 7232])
def test_router(device: Device, k: int, rows: int) -> None:
    """Logits, h, the experts picked and what is beside them; 7,232 values of f32 weights are more than a block has room for at once."""
    experts, slots, n = 63, 8, 48
    x, norm = values(1, (rows, k)), draw(2, (k,), BF16)
    with Bench(device) as bench:
        router, gate_up = put_matrix(bench, draw_weights(3, (experts, k), WeightFormat.F32)), put_matrix(bench, draw_weights(4, (2 * n, k), Q8))
        scale, bias, arrivals = bench.put(norm, BF16), bench.put(draw(5, (experts,), F32), F32), bench.put(np.zeros(1, np.uint32), DType.U32)

        def product(some: slice) -> np.ndarray:
            count = len(x[some])
            logits, act, h = bench.poison(F32, (count, experts)), bench.poison(BF16, (count, n)), bench.poison(BF16, (count, k))
            ids, weights = bench.poison(DType.I32, (count, slots)), bench.poison(F32, (count, slots))
            segments = [Segment(router, logits, Epilogue.STORE_F32), Segment(gate_up, act, Epilogue.SILU)]
            part = step.RouterPart(bias, ids, weights, arrivals, n_group=1, topk_group=1, normalise=True, scaling=2.5)
            step.gemv(bench.stream, bench.put(x[some], BF16), segments, norm=scale, eps=1e-5, h=h, part=part)
            return np.concatenate([bench.bits(y).view(np.uint16) for y in (logits, act, h, ids, weights)], axis=1)

        compare_with_single_rows(rows, product)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("k", [384, 4224])
def test_halves(device: Device, k: int, rows: int) -> None:
    n = 300
    x, residual = values(1, (rows, k)), draw(2, (rows, n), BF16)
    with Bench(device) as bench:
        weight, scratch = put_matrix(bench, draw_weights(3, (n, k), Q8)), put_halves(bench, rows, n)

        def product(some: slice) -> np.ndarray:
            y = bench.put(residual[some], BF16)
            step.gemv(bench.stream, bench.put(x[some], BF16), [Segment(weight, y, Epilogue.RESIDUAL)], residual=y, halves=scratch)
            return bench.bits(y)

        compare_with_single_rows(rows, product)
        compare_with_single_rows(rows, product)  # arrivals are 0 again


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("weight_format", [Q8, Q4], ids=lambda f: f.label)
@pytest.mark.parametrize("k", [192, 1088])
def test_experts(device: Device, k: int, rows: int, weight_format: WeightFormat) -> None:
    """Experts that few and many rows share; one id is outside.."""
    compare_experts(device, rows, weight_format, k=k, n=72, down_k=128, width=805, slots=3, experts=5)


@pytest.mark.parametrize("rows", (3, 35))
@pytest.mark.parametrize("weight_format", [Q8, Q4], ids=lambda f: f.label)
@pytest.mark.parametrize("k, n, down_k, slots", [(20480, 24, 64, 4), (2560, 40, 2112, 8)])
def test_experts_of_other_shapes(device: Device, k: int, n: int, down_k: int, slots: int, rows: int, weight_format: WeightFormat) -> None:
    """More pairs than blocks at once; rows of x that a block has no room for; down of one half, of many runs and of parts of one."""
    compare_experts(device, rows, weight_format, k=k, n=n, down_k=down_k, width=70, slots=slots, experts=9)


def compare_experts(
    device: Device, rows: int, weight_format: WeightFormat, *, k: int, n: int, down_k: int, width: int, slots: int, experts: int
) -> None:
    """Routed experts and down. k: also of the shared expert's down."""
    rng = np.random.default_rng(rows)
    x, shared_act = values(1, (rows, k)), values(2, (rows, k))
    ids = np.stack([rng.permutation(experts)[:slots] for _ in range(rows)]).astype(np.int32)
    ids[rows // 2, 1] = experts
    weights, residual = rng.random((rows, slots), np.float32), draw(3, (rows, width), BF16)
    with Bench(device) as bench:
        gate_up = put_matrix(bench, draw_experts(4, (experts, 2 * n, k), weight_format))
        down, shared = (
            put_matrix(bench, draw_experts(seed, shape, f)) for seed, shape, f in ((5, (experts, width, down_k), weight_format), (6, (width, k), Q8))
        )
        scratch = put_halves(bench, rows, width)

        def product(some: slice) -> np.ndarray:
            count = len(x[some])
            chosen: Array = bench.put(ids[some])
            act, y = bench.poison(BF16, (count, slots, n)), bench.poison(BF16, (count, width))
            step_experts.experts(bench.stream, bench.put(x[some], BF16), chosen, gate_up, act)
            part = bench.put(draw(7, (rows, slots, down_k), BF16)[some], BF16)
            held = (bench.put(weights[some]), down, bench.put(shared_act[some], BF16), shared, bench.put(residual[some], BF16))
            step_experts.down(bench.stream, part, chosen, *held, y, scratch)
            return np.concatenate([bench.bits(act).reshape(count, -1), bench.bits(y)], axis=1)

        compare_with_single_rows(rows, product)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("v, latent, splits", [(256, 512, 32), (72, 128, 3)])
def test_expand(device: Device, rows: int, v: int, latent: int, splits: int) -> None:
    """Rows of few and of all splits, and one of none, whose partial results are never read."""
    heads = 3
    rng = np.random.default_rng(rows)
    partial, tops, masses = (rng.standard_normal(shape, np.float32) for shape in ((rows, heads, splits, latent), *2 * ((rows, heads, splits),)))
    counts = rng.integers(1, 64 * splits + 1, rows).astype(np.int32)
    counts[0] = 64 * splits
    counts[-1] = 0
    for row in range(rows):
        partial[row, :, -(-counts[row] // 64) :] = np.nan
    with Bench(device) as bench:
        wv = put_matrix(bench, draw_experts(1, (heads, v, latent), Q8))

        def product(some: slice) -> np.ndarray:
            held = step_attention.Partials(bench.put(partial[some]), bench.put(tops[some]), bench.put(np.abs(masses[some]) + 1))
            o = bench.poison(BF16, (len(partial[some]), heads, v))
            step_attention.expand(bench.stream, held, bench.put(counts[some]), wv, o)
            return bench.bits(o).reshape(o.shape[0], -1)

        compare_with_single_rows(rows, product)
        assert not product(slice(rows - 1, rows)).any()


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("heads, rope, splits", [(5, 64, 3), (36, 40, 11), (64, 64, 3)])
def test_attend_expand(device: Device, rows: int, heads: int, rope: int, splits: int) -> None:
    """Rows of few and of all splits, and one of none; heads and columns of v that fill no block."""
    rng, latent, nope, v, k = np.random.default_rng(rows), 512, 24, 136, 64 * splits - 5
    counts = rng.integers(1, k + 1, rows).astype(np.int32)
    counts[0], counts[-1] = k, 0
    raw, _ = row_bits(draw(1, (HISTORY, latent + rope), BF16), latent, RowFormat.Q8G64)
    q_latent, q = draw(2, (rows, heads, latent), BF16, 0.3), draw(3, (rows, heads, nope + rope), BF16, 0.3)
    with Bench(device) as bench:
        refs, plan = place_rows(bench, raw), np.full((rows, k), 1 << 44, np.uint64)
        for row, count in enumerate(counts):
            plan[row, :count] = refs[rng.integers(0, len(Space), count), rng.integers(0, HISTORY, count)]
        wv = put_matrix(bench, draw_experts(4, (heads, v, latent), Q8))

        def product(some: slice) -> np.ndarray:
            count = len(q[some])
            partials = step_attention.Partials(*(bench.poison(DType.F32, (count, heads, splits, *of)) for of in ((latent,), (), ())))
            o = bench.poison(BF16, (count, heads, v))
            step_attention.attend_expand(
                bench.stream,
                bench.put(q_latent[some], BF16),
                bench.put(q[some], BF16),
                bench.put(plan[some]),
                bench.put(counts[some]),
                partials,
                wv,
                o,
                offsets=SPACE_OFFSETS,
                row_format=RowFormat.Q8G64,
                rope_offset=nope,
                scale=(nope + rope) ** -0.5,
            )
            return bench.bits(o).reshape(count, -1)

        compare_with_single_rows(rows, product)
        assert not product(slice(rows - 1, rows)).any()
