"""Cases of the weight formats: quantised bits exact, corners of the scales, what cannot be stored, weights drawn on the device, and the prefill
products with quantised weights, which must have the bits of the same products with the dequantised weights in f32."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import numpy as np

from glm53.check import reference_basic, reference_experts
from glm53.check import reference_weights as reference
from glm53.check.case import Bench, Case, draw, round_to
from glm53.check.compare import EXACT, Comparison, Mismatch, Tolerance, compare, worst_of
from glm53.hip import Array, Device
from glm53.hip.array import f32_from_e4m3
from glm53.ops import experts, matmul, weights
from glm53.ops.matrix import Matrix
from glm53.spec import DType, WeightFormat

F32, BF16, F8, U8, U16, U32 = DType.F32, DType.BF16, DType.F8E4M3, DType.U8, DType.U16, DType.U32
QUANTISED = (WeightFormat.Q8G64, WeightFormat.Q4G64)
# The values are exact in f32, so only the product rounds: as the plain products of cases_basic.
TOLERANCE = {
    F32: Tolerance(1e-6, 1e-6, 1e-9, "float32 sum against a float64 one: a few rounding errors of 6e-8 of sum |x||w|"),
    BF16: Tolerance(2e-6, 2**-7 * 1.001, 1e-4, "the float32 sum may fall on the other side of a tie: one bf16 ulp"),
}


def put_matrix(bench: Bench, values: np.ndarray, format: WeightFormat) -> tuple[Matrix, np.ndarray]:
    """(a matrix on the device, the float32 values that its readers see) of float32 values [.., n, k], by the numpy reference."""
    if not format.quantised:
        dtype = F32 if format is WeightFormat.F32 else BF16
        return Matrix.plain(bench.put(values, dtype)), round_to(values, dtype)
    codes, scales, bad = reference.quantise(values, format)
    assert not bad.any()
    return Matrix(bench.put(codes), bench.put(scales), format), reference.values(codes, scales, format)


def poisoned(bench: Bench, format: WeightFormat, shape: tuple[int, ...]) -> Matrix:
    *rest, k = shape
    return Matrix(bench.poison(U8, (*rest, k * format.bits // 8)), bench.poison(U16, (*rest, k // 64)), format)


# Quantiser


def corner_groups(format: WeightFormat, largest: float) -> np.ndarray:
    """[groups, 64] float32: zeros, one value, ties of codes and of magnitudes with either sign, f16 limits of the scale, subnormals.

    largest: scale of the largest groups, 65,504 where the values are not rounded up to beyond f16.
    """
    rng = np.random.default_rng(31)
    rows = [np.zeros(64), -np.zeros(64), np.eye(1, 64, 63)[0], -np.eye(1, 64, 0)[0], np.full(64, 0.3), np.full(64, -7.0)]
    ties = np.arange(64) - 31.5
    rows += [ties, -ties, np.where(np.arange(64) % 2, 8.0, -8.0), np.where(np.arange(64) % 2, -8.0, 8.0)]
    noise = rng.standard_normal(64)
    rows += [noise * 10.0**e for e in (-45, -40, -20, -9, -8, -7, -6, -5, -4, -3, -2, 2, 4)]
    divisor = 127 if format is WeightFormat.Q8G64 else 8
    for limit in (largest, 2.0**-24, 2.0**-14):
        for near in (0.499, 0.5, 0.501, 0.999, 1.0, 1.0005, 1.499, 1.5, 1.501):
            group = noise / np.abs(noise).max() * 0.9 * divisor * min(limit * near, largest)
            group[17] = divisor * min(limit * near, largest)
            rows.append(group)
    return np.stack(rows).astype(np.float32)


def _compare_quantised(name: str, y: Matrix, x: np.ndarray, bench: Bench) -> Comparison:
    codes, scales, bad = reference.quantise(x, y.format)
    assert y.scales is not None and not bad.any()
    compare(f"{name} scales", bench.read(y.scales), scales)
    result = compare(f"{name} codes", bench.read(y.codes), codes)
    back, amax = reference.values(codes, scales, y.format).reshape(-1, 64), np.abs(x).reshape(-1, 64).max(axis=1, keepdims=True)
    # Independent of the reference's search: a q8 value is within half a step, a q4 value within the step of the smallest scale tried.
    limit = amax / 127 * 0.51 + 2**-25 * 1.01 if y.format is WeightFormat.Q8G64 else amax * 0.2 + amax / 16 + 2**-21
    if (np.abs(back - x.reshape(-1, 64)) > limit).any():
        raise Mismatch(f"{name}: a value is further from its weight than the format allows")
    return result


def run_quantise(x: np.ndarray, source: DType, format: WeightFormat, device: Device) -> Comparison:
    with Bench(device) as bench:
        values, y, error = round_to(x, source), poisoned(bench, format, x.shape), bench.put(np.zeros(1, np.uint32))
        weights.quantise(bench.stream, bench.put(values, source), None, y, error)
        compare("error", bench.read(error), np.zeros(1, np.uint32))
        return _compare_quantised("quantise", y, values, bench)


def run_quantise_f8(rows: int, k: int, format: WeightFormat, device: Device) -> Comparison:
    rng = np.random.default_rng(rows * k)
    codes = rng.integers(0, 0x7F, (rows, k)).astype(np.uint8) | rng.integers(0, 2, (rows, k)).astype(np.uint8) << 7
    block = np.exp(rng.standard_normal((-(-rows // 128), -(-k // 128)))).astype(np.float32) * np.float32(1e-3)
    x = f32_from_e4m3(codes) * block.repeat(128, 0).repeat(128, 1)[:rows, :k]
    with Bench(device) as bench:
        y, error = poisoned(bench, format, x.shape), bench.put(np.zeros(1, np.uint32))
        weights.quantise(bench.stream, bench.put(codes, F8), bench.put(block), y, error)
        compare("error", bench.read(error), np.zeros(1, np.uint32))
        return _compare_quantised("quantise", y, x, bench)


def run_refused(bad: float, format: WeightFormat, source: DType, device: Device) -> Comparison:
    """The flag names the last bad row; bad groups are zeros, all others as ever."""
    x = draw(41, (9, 192), source)
    x[2, 5], x[6, 191], x[6, 0] = bad, bad, -bad
    with Bench(device) as bench:
        y, error = poisoned(bench, format, x.shape), bench.put(np.zeros(1, np.uint32))
        weights.quantise(bench.stream, bench.put(x, source), None, y, error)
        compare("error", bench.read(error), np.array([7], np.uint32))
        codes, scales, _ = reference.quantise(x, format)
        assert y.scales is not None
        return worst_of(compare("codes", bench.read(y.codes), codes), compare("scales", bench.read(y.scales), scales))


# Random weights


def run_fill(count: int, format: WeightFormat, mean: float, device: Device) -> Comparison:
    seed, std = 0x9E3779B97F4A7C15 - count, 0.02
    with Bench(device) as bench:
        if not format.quantised:
            dtype = F32 if format is WeightFormat.F32 else BF16
            guarded = bench.poison(dtype, (count + 8,))
            weights.fill_random(bench.stream, Matrix.plain(guarded.view((count,))), seed, std, mean)
            step = std * math.sqrt(3) / (1 << (23 if dtype is F32 else 15))
            got = guarded.bits(bench.stream)
            compare("past the end", got[count:].view(np.uint8), np.full(8 * dtype.item_bytes, 0xFF, np.uint8))
            want = reference.random_plain(count, seed, step, mean, format)
            result = compare("fill", got[:count].view(f"u{dtype.item_bytes}"), want.view(f"u{dtype.item_bytes}"))
            drawn = bench.read(guarded)[:count]
        else:
            w = poisoned(bench, format, (count // 64, 64))
            weights.fill_random(bench.stream, w, seed, std)
            assert w.scales is not None
            scales = bench.read(w.scales).reshape(-1)
            codes, signed = reference.random_quantised(count, seed, int(scales[0]) & 0x7FFF, format)
            compare("scales", scales, signed)
            result = compare("codes", bench.read(w.codes).reshape(-1), codes)
            drawn = reference.values(codes.reshape(count // 64, -1), signed.reshape(-1, 1), format)
        if count >= 4096:
            _require_moments(drawn.astype(np.float64), mean, std)
        return result


def _require_moments(drawn: np.ndarray, mean: float, std: float) -> None:
    """Within five standard errors; a uniform variance has one of std^2 * sqrt(0.8 / n)."""
    n = drawn.size
    if abs(drawn.mean() - mean) > 5 * std / math.sqrt(n) + 2**-9 * abs(mean) or abs(drawn.std() / std - 1) > 5 * math.sqrt(0.8 / n) / 2 + 2**-9:
        raise Mismatch(f"fill_random: mean {drawn.mean():.3e} and deviation {drawn.std():.4e} of {n} weights, expected {mean} and {std}")


# Prefill products


@dataclass(frozen=True)
class Product:
    rows: int
    n: int
    k: int
    residual: bool = False


def run_product(p: Product, types: tuple[DType, DType], format: WeightFormat, device: Device) -> Comparison:
    """Against the reference, against the f32 kernel on the dequantised weights bit by bit, and a row alone against the row among others."""
    x, residual = draw(51, (p.rows, p.k), types[0]), draw(53, (p.rows, p.n), types[1])
    with Bench(device) as bench:
        w, values = put_matrix(bench, draw(52, (p.n, p.k)), format)
        start = bench.put(residual, types[1])

        def multiply(matrix: Matrix, inputs: np.ndarray, x_dtype: DType, y_dtype: DType, added: Array | None) -> Array:
            y = bench.poison(y_dtype, (len(inputs), p.n))
            matmul.matmul(bench.stream, bench.put(inputs, x_dtype), matrix, y, added)
            return y

        got = multiply(w, x, *types, start if p.residual else None)
        want, scale = reference_basic.matmul(x, values, residual if p.residual else None, types[1])
        result = compare("matmul", bench.read(got), want, TOLERANCE[types[1]], scale)
        exact = bench.read(multiply(Matrix.plain(bench.put(values)), x, F32, F32, None))
        plain = round_to(exact, types[1])
        compare("f32 weights", bench.read(got), round_to(plain + residual, types[1]) if p.residual else plain, EXACT)
        alone = multiply(w, x[-1:], *types, start.slice(p.rows - 1, p.rows) if p.residual else None)
        compare("last row alone", bench.bits(alone)[0], bench.bits(got)[-1])
        return result


def run_per_head(shape: tuple[int, int, int, int, int], dtype: DType, format: WeightFormat, device: Device) -> Comparison:
    rows, heads, n, k, columns = shape
    x = draw(54, (rows, heads, columns), dtype)
    with Bench(device) as bench:
        w, values = put_matrix(bench, draw(55, (heads, n, k)), format)
        y = bench.poison(dtype, (rows, heads, n))
        matmul.per_head(bench.stream, bench.put(x, dtype), w, y)
        want, scale = reference_basic.matmul(x[..., :k].transpose(1, 0, 2), values, None, dtype)
        return compare("per_head", bench.read(y), want.transpose(1, 0, 2), TOLERANCE[dtype], scale.transpose(1, 0, 2))


def run_experts(rows: int, slots: int, count: int, n: int, k: int, dtype: DType, format: WeightFormat, device: Device) -> Comparison:
    """Every second expert has no token."""
    x = draw(56, (rows, k), dtype)
    rng = np.random.default_rng(57)
    ids = np.stack([rng.permutation(np.arange(0, count, 2))[:slots] for _ in range(rows)]).astype(np.int32)
    with Bench(device) as bench:
        w, values = put_matrix(bench, draw(58, (count, n, k)), format)
        some_ids, y = bench.put(ids), bench.poison(dtype, (rows, slots, n))
        order = (bench.poison(DType.I32, (count + 1,)), bench.poison(DType.I32, ids.shape))
        experts.expert_sort(bench.stream, some_ids, *order)
        experts.expert_matmul(bench.stream, bench.put(x, dtype), w, y, order)
        want, scale = reference_experts.expert_matmul(x, values, ids)
        result = compare("y", bench.read(y), round_to(want, dtype), TOLERANCE[dtype], scale)
        plain, expert = bench.poison(dtype, (1, n)), int(ids[-1, -1])
        one = w.rows(expert * n, (expert + 1) * n)
        matmul.matmul(bench.stream, bench.put(x[-1:], dtype), one, plain)
        compare("plain product", bench.bits(plain)[0], bench.bits(y)[-1, -1])
        return result


def _quantise_cases() -> list[Case]:
    cases = []
    for format in QUANTISED:
        for source in (F32, BF16):
            name = f"{source.label}_{format.label}"
            corners = corner_groups(format, 65504.0 if source is F32 else 65280.0)
            cases.append(Case("quantise", f"{name}-corners", partial(run_quantise, corners, source, format)))
            for rows, k in ((1, 64), (5, 192), (67, 320)):
                cases.append(Case("quantise", f"{name}-{rows}x{k}", partial(run_quantise, draw(k, (rows, k), spread=0.02), source, format)))
        cases.append(Case("quantise", f"f32_{format.label}-heavy_tails", partial(run_quantise, draw(3, (64, 512)) ** 3, F32, format)))
        for rows, k in ((1, 64), (129, 192), (257, 448)):
            cases.append(Case("quantise", f"f8_{format.label}-{rows}x{k}", partial(run_quantise_f8, rows, k, format)))
        for bad in (math.nan, math.inf, 127 * 65520.0 if format is WeightFormat.Q8G64 else 8 * 65520.0):
            cases.append(Case("quantise", f"f32_{format.label}-refuses-{bad:g}", partial(run_refused, bad, format, F32)))
        cases.append(Case("quantise", f"bf16_{format.label}-refuses-nan", partial(run_refused, math.nan, format, BF16)))
    return cases


def _fill_cases() -> list[Case]:
    cases = []
    for format in WeightFormat:
        for count in (64, 4096 + 64, 100_032):
            cases.append(Case("fill_random", f"{format.label}-{count}", partial(run_fill, count, format, 0.0)))
        if not format.quantised:
            cases.append(Case("fill_random", f"{format.label}-odd", partial(run_fill, 8205, format, 1.0)))
    return cases


def _product_cases() -> list[Case]:
    cases = []
    products = [Product(rows, 65, 192) for rows in (1, 2, 3, 4, 8, 16)] + [Product(65, 64, 64), Product(67, 130, 320, True), Product(5, 1, 128)]
    for format in QUANTISED:
        for types in ((F32, F32), (BF16, BF16), (BF16, F32)):
            label = f"{types[0].label}_{format.label}_{types[1].label}"
            for p in products:
                name = f"{label}-{p.rows}x{p.n}x{p.k}{'-residual' if p.residual else ''}"
                cases.append(Case("matmul_tile", name, partial(run_product, p, types, format)))
        for dtype in (F32, BF16):
            for shape in ((1, 3, 20, 64, 64), (7, 5, 33, 64, 100), (67, 2, 65, 192, 256)):
                name = f"{dtype.label}-{format.label}-{'x'.join(map(str, shape))}"
                cases.append(Case("per_head_tile", name, partial(run_per_head, shape, dtype, format)))
            for shape in ((1, 1, 1, 1, 64), (9, 4, 16, 65, 128), (130, 1, 3, 40, 192)):
                name = f"tile-{dtype.label}-{format.label}-{'x'.join(map(str, shape))}"
                cases.append(Case("experts", name, partial(run_experts, *shape, dtype, format)))
    return cases


CASES = _quantise_cases() + _fill_cases() + _product_cases()
