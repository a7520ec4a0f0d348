"""Checks of a step's attention: splits against float64 and bit for bit alone, batched and by space; the join with wv in every weight format."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from glm53.check import reference_step_attention as reference
from glm53.check.case import Bench, Case, draw, round_to
from glm53.check.cases_selection import ROWS, SPACE_OFFSETS, i32, place_rows
from glm53.check.compare import TOLERANCES, Comparison, compare, worst_of
from glm53.check.reference_rows import row_bits, row_values
from glm53.check.reference_selection import attend as whole_attend
from glm53.hip import Array, Device
from glm53.ops import step_attention
from glm53.ops.matrix import Matrix
from glm53.ops.step_attention import SPLIT, Partials
from glm53.spec import DType, RowFormat, Space, WeightFormat

ROUNDED_WEIGHTS = replace(TOLERANCES[DType.BF16], absolute=2**-8, reason="each softmax weight is rounded to bf16, by at most 2^-8 of itself")
NOWHERE = np.uint64(1 << 44)  # a reference that must not be followed


@dataclass(frozen=True)
class Attending:
    name: str
    heads: int
    latent: int
    rope: int
    nope: int
    dtype: DType
    row_format: RowFormat
    counts: tuple[int, ...]
    spread: float = 1.0  # of the queries: large values make the softmax sharp


def poisoned(bench: Bench, rows: int, heads: int, splits: int, latent: int) -> Partials:
    shape = (rows, heads, splits)
    return Partials(bench.poison(DType.F32, (*shape, latent)), bench.poison(DType.F32, shape), bench.poison(DType.F32, shape))


def run_attend(case: Attending, device: Device) -> Comparison:
    """Splits against the reference; each row alone and all rows from one space give the same bits; splits past a count stay as they were."""
    rng, rows, k = np.random.default_rng(3), len(case.counts), max(*case.counts, 1) + 3
    splits = -(-k // SPLIT)
    raw, _ = row_bits(draw(11, (ROWS, case.latent + case.rope), case.dtype), case.latent, case.row_format)
    q_latent = draw(12, (rows, case.heads, case.latent), case.dtype, case.spread)
    q = draw(13, (rows, case.heads, case.nope + case.rope), case.dtype, case.spread)
    chosen = [rng.integers(0, ROWS, max(count, 0)) for count in case.counts]
    scale = (case.nope + case.rope) ** -0.5
    with Bench(device) as bench:
        refs = place_rows(bench, raw)
        mixed, hot = np.full((rows, k), NOWHERE), np.full((rows, k), NOWHERE)
        for r, p in enumerate(chosen):
            mixed[r, : len(p)] = refs[rng.integers(0, len(Space), len(p)), p]
            hot[r, : len(p)] = refs[Space.HOT, p]

        def attend(plan: np.ndarray, of: slice) -> Partials:
            out = poisoned(bench, len(plan[of]), case.heads, splits, case.latent)
            step_attention.attend(
                bench.stream,
                bench.put(q_latent[of], case.dtype),
                bench.put(q[of], case.dtype),
                bench.put(plan[of]),
                bench.put(i32(case.counts)[of]),
                out,
                offsets=SPACE_OFFSETS,
                row_format=case.row_format,
                rope_offset=case.nope,
                scale=scale,
            )
            return out

        def bits(partials: Partials) -> list[np.ndarray]:
            return [bench.bits(array) for array in (partials.partial, partials.tops, partials.masses)]

        together = attend(mixed, slice(0, rows))
        history = [row_values(raw, case.latent, case.row_format)[p] for p in chosen]
        mean, size, tops, top_size, masses = reference.split_attend(q_latent, q[:, :, case.nope :], history, scale, splits, case.dtype)
        got_masses = bench.read(together.masses)
        got_mean = bench.read(together.partial) / np.where(np.isnan(masses), np.float32(np.nan), got_masses)[..., None]
        results = [
            compare("tops", bench.read(together.tops), tops, DType.F32, np.maximum(top_size, 1)),
            compare("masses", got_masses, masses, DType.F32, masses * np.maximum(top_size, 1)),
            compare("partial / mass", got_mean, mean, ROUNDED_WEIGHTS if case.dtype is DType.BF16 else case.dtype, size),
        ]
        all_bits = bits(together)
        for got, want in zip(bits(attend(hot, slice(0, rows))), all_bits, strict=True):
            compare("all rows hot", got, want)
        for r, count in enumerate(case.counts):
            used = -(-max(count, 0) // SPLIT)
            for got, want in zip(bits(attend(mixed, slice(r, r + 1))), all_bits, strict=True):
                compare(f"row {r} alone", got[0], want[r])
                if used < splits:
                    compare(f"row {r} past its count", want[r, :, used:], np.full_like(want[r, :, used:], 0xFFFFFFFF))
        return worst_of(*results)


@dataclass(frozen=True)
class Expanding:
    name: str
    heads: int
    latent: int
    v: int
    dtype: DType
    weights: WeightFormat
    counts: tuple[int, ...]


def draw_matrix(bench: Bench, seed: int, shape: tuple[int, ...], weight_format: WeightFormat) -> tuple[Matrix, np.ndarray]:
    """A random matrix on the device and the float32 values it stands for. Quantised: every code, scales of either sign and 0."""
    if not weight_format.quantised:
        dtype = DType.F32 if weight_format is WeightFormat.F32 else DType.BF16
        values = draw(seed, shape, dtype, shape[-1] ** -0.5)
        return Matrix.plain(bench.put(values, dtype)), values
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 256, (*shape[:-1], shape[-1] * weight_format.bits // 8), np.uint8)
    spread = shape[-1] ** -0.5 / (1 << (weight_format.bits - 2))
    scales = (rng.standard_normal((*shape[:-1], shape[-1] // 64)) * spread).astype(np.float16)
    scales[0, 0, 0] = 0
    matrix = Matrix(bench.put(codes), bench.put(scales.view(np.uint16)), weight_format)
    return matrix, reference.weight_values(codes, scales, weight_format)


def run_expand(case: Expanding, device: Device) -> Comparison:
    """The join of random splits against the reference; each row alone gives the same bits; what lies past a count is not read into a result."""
    rows, splits = len(case.counts), -(-max(*case.counts, 1) // SPLIT) + 1
    rng = np.random.default_rng(5)
    partial_values = draw(21, (rows, case.heads, splits, case.latent), DType.F32, 4.0)
    tops = draw(22, (rows, case.heads, splits), DType.F32, 2.0)
    masses = rng.uniform(1, 64, tops.shape).astype(np.float32)
    for r, count in enumerate(case.counts):
        used = -(-max(count, 0) // SPLIT)
        for values in (partial_values, tops, masses):
            values[r, :, used:] = np.nan
    with Bench(device) as bench:
        wv, weights = draw_matrix(bench, 23, (case.heads, case.v, case.latent), case.weights)

        def expand(of: slice) -> Array:
            partials = Partials(*(bench.put(values[of]) for values in (partial_values, tops, masses)))
            o = bench.poison(case.dtype, (len(tops[of]), case.heads, case.v))
            step_attention.expand(bench.stream, partials, bench.put(i32(case.counts)[of]), wv, o)
            return o

        together = expand(slice(0, rows))
        want, size = reference.expand(partial_values, tops, masses, i32(case.counts), weights, case.dtype)
        result = compare("o", bench.read(together), round_to(want, case.dtype), case.dtype, size)
        for r in range(rows):
            compare(f"row {r} alone", bench.bits(expand(slice(r, r + 1)))[0], bench.bits(together)[r])
        return result


def run_both(device: Device) -> Comparison:
    """Released widths from queries to o: against the float64 attention of the whole plan, times wv."""
    heads, latent, rope, v, rows, k, dtype = 5, 512, 64, 256, 2, 300, DType.BF16
    raw, _ = row_bits(draw(31, (ROWS, latent + rope), dtype), latent, RowFormat.Q8G64)
    q_latent, q = draw(32, (rows, heads, latent), dtype, 0.3), draw(33, (rows, heads, rope), dtype, 0.3)
    counts, scale = i32([k, 65]), 256**-0.5
    chosen = [np.random.default_rng(34 + r).integers(0, ROWS, count) for r, count in enumerate(counts)]
    with Bench(device) as bench:
        refs = place_rows(bench, raw)
        plan = np.full((rows, k), NOWHERE)
        for r, p in enumerate(chosen):
            plan[r, : len(p)] = refs[Space.EXTENT, p]
        wv, weights = draw_matrix(bench, 35, (heads, v, latent), WeightFormat.Q8G64)
        partials, o = poisoned(bench, rows, heads, -(-k // SPLIT), latent), bench.poison(dtype, (rows, heads, v))
        count_array = bench.put(counts)
        step_attention.attend(
            bench.stream,
            bench.put(q_latent, dtype),
            bench.put(q, dtype),
            bench.put(plan),
            count_array,
            partials,
            offsets=SPACE_OFFSETS,
            row_format=RowFormat.Q8G64,
            rope_offset=0,
            scale=scale,
        )
        step_attention.expand(bench.stream, partials, count_array, wv, o)
        history = row_values(raw, latent, RowFormat.Q8G64)
        planned = [history[p] for p in chosen]
        o_latent, _ = whole_attend(q_latent, q, planned, scale)
        _, size, *_ = reference.split_attend(q_latent, q, planned, scale, -(-k // SPLIT), dtype)
        want = np.einsum("rhc,hvc->rhv", o_latent.astype(np.float64), weights.astype(np.float64))
        # Rounding errors of different columns are independent: they add as squares.
        allowed = np.sqrt(np.einsum("rhc,hvc->rhv", size[:, :, 0] ** 2, weights.astype(np.float64) ** 2))
        return compare("o", bench.read(o), want.astype(np.float32), ROUNDED_WEIGHTS, allowed)


_F32, _BF16, _Q8 = RowFormat.F32, RowFormat.BF16, RowFormat.Q8G64
_SIXTEEN = (64, 1, 65, 0, 17, 33, 128, 16, 63, 2, 129, 32, 31, 15, 127, 48)
_ATTENDINGS = (
    Attending("released-f32", 16, 512, 64, 192, DType.F32, _F32, (130, -1)),
    Attending("released-bf16", 20, 512, 64, 192, DType.BF16, _BF16, (100, 17, 64)),
    Attending("released-f32-q8g64", 8, 512, 64, 192, DType.F32, _Q8, (65,)),
    Attending("released-bf16-q8g64", 64, 512, 64, 192, DType.BF16, _Q8, (150, 33)),
    Attending("tiny-f32", 4, 40, 16, 24, DType.F32, _F32, _SIXTEEN),
    Attending("tiny-bf16", 4, 40, 16, 24, DType.BF16, _BF16, _SIXTEEN),
    Attending("half-step", 3, 48, 8, 0, DType.BF16, _BF16, (66, 8)),  # the rope part ends within a step of 16 columns
    Attending("no-rope", 2, 512, 0, 16, DType.BF16, _Q8, (70,)),
    Attending("narrow", 1, 8, 8, 0, DType.F32, _F32, (5, 150)),
    Attending("sharp", 3, 264, 8, 0, DType.BF16, _BF16, (90, 8), spread=20.0),
)
_EXPANDINGS = (
    *(Expanding(f"released-bf16-{w.label}", 3, 512, 256, DType.BF16, w, (300, 64, 0)) for w in WeightFormat),
    Expanding("released-f32-q8g64", 2, 512, 256, DType.F32, WeightFormat.Q8G64, (65,)),
    Expanding("released-f32", 2, 512, 256, DType.F32, WeightFormat.F32, (1, 130)),
    Expanding("2048-rows", 1, 512, 130, DType.BF16, WeightFormat.Q4G64, (2048, 1025)),
    Expanding("tiny-f32", 4, 40, 24, DType.F32, WeightFormat.F32, _SIXTEEN),
    Expanding("tiny-bf16", 4, 40, 24, DType.BF16, WeightFormat.BF16, _SIXTEEN),
    Expanding("odd-v", 5, 64, 131, DType.BF16, WeightFormat.Q8G64, (64, -1, 7, 200)),
)
CASES = [
    *(Case("attention", f"step-attend-{case.name}", partial(run_attend, case)) for case in _ATTENDINGS),
    *(Case("attention", f"step-expand-{case.name}", partial(run_expand, case)) for case in _EXPANDINGS),
    Case("attention", "step-attend-expand", run_both),
]
