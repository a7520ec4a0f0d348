"""Cases of embeddings, norms, rotary embedding, gated activation, matrix products, append, weight conversion and the copy kernels.

Sizes cross the thresholds of the kernels: 1 to 9 rows (row groups of the step product), one below and above tiles of 32 and 64, slices of
8, odd widths, width 1. Row independence is checked bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from glm53.check import reference_basic as reference
from glm53.check.case import Bench, Case, draw, round_to
from glm53.check.compare import EXACT, SAME_ROUNDING, Comparison, Mismatch, Tolerance, compare, worst_of
from glm53.hip import Array, Device
from glm53.ops import basic, history, litmus, matmul, weights
from glm53.ops.contract import ContractError
from glm53.ops.matrix import Matrix
from glm53.spec import DType

F32, BF16 = DType.F32, DType.BF16
EPS = 1e-5
MATMUL_TYPES = ((F32, F32, F32), (F32, BF16, F32), (BF16, BF16, BF16), (BF16, BF16, F32), (BF16, F32, F32))
# Each output is one float32 sum: its error stays within a few eps (2^-24) of sum |x||w|; then it is rounded once, with a residual twice.
MATMUL_TOLERANCE = {
    F32: Tolerance(1e-6, 1e-6, 1e-9, "float32 sum against a float64 one: a few rounding errors of 6e-8 of sum |x||w|"),
    BF16: Tolerance(2e-6, 2**-7 * 1.001, 1e-4, "the float32 sum may fall on the other side of a tie: one bf16 ulp"),
}


def _embed(rows: int, hidden: int, types: tuple[DType, DType], device: Device) -> Comparison:
    table = draw(1, (37, hidden), types[1])
    tokens = np.random.default_rng(2).integers(0, 37, rows).astype(np.int32)
    tokens[-1] = 36
    if rows > 4:
        tokens[1], tokens[2] = -1, 37
    with Bench(device) as bench:
        y = bench.poison(types[0], (rows, hidden))
        basic.embed(bench.stream, bench.put(tokens), bench.put(table, types[1]), y)
        return compare("embed", bench.read(y), reference.embed(tokens, table), EXACT)


@dataclass(frozen=True)
class Norm:
    """width: normed columns of `columns`; fill: what the rows hold."""

    rows: int
    width: int
    columns: int
    fill: str = "normal"


def _norm_input(norm: Norm, dtype: DType) -> np.ndarray:
    x = draw(3, (norm.rows, norm.columns), dtype)
    if norm.fill == "zero":
        x[:, : norm.width] = 0
    if norm.fill == "huge":
        x *= np.float32(1e17)
    if norm.fill == "tiny":
        x *= np.float32(1e-6)
    if norm.fill == "offset":
        x += np.float32(100)
    return round_to(x, dtype)


def _norm(kind: str, norm: Norm, dtype: DType, in_place: bool, device: Device) -> Comparison:
    x = _norm_input(norm, dtype)
    weight, bias = draw(4, (norm.width,), dtype), draw(5, (norm.width,), dtype)
    head = x[:, : norm.width]
    with Bench(device) as bench:
        dx, dw, db = bench.put(x, dtype), bench.put(weight, dtype), bench.put(bias, dtype)
        y = dx if in_place else bench.poison(dtype, x.shape)
        rest = x[:, norm.width :] if in_place else np.full_like(x[:, norm.width :], np.nan)
        if kind == "rms_norm":
            want = reference.rms_norm(head, weight, EPS, dtype)
            basic.rms_norm(bench.stream, dx, dw, y, EPS)
        else:
            want = reference.layer_norm(head, weight, bias, EPS, dtype)
            basic.layer_norm(bench.stream, dx, dw, db, y, EPS)
        got = bench.read(y)
        if norm.width < norm.columns:
            compare(f"{kind} columns past width", got[:, norm.width :], rest, EXACT)
        # A common offset of 100 costs the centred values 7 bits before anything is normed.
        scale = 128.0 if norm.fill == "offset" else 1.0
        return compare(kind, got[:, : norm.width], want, SAME_ROUNDING[dtype], scale)


@dataclass(frozen=True)
class Rope:
    rows: int
    heads: int
    columns: int
    offset: int
    dim: int
    last: int  # position of the last row


def _rope(rope: Rope, dtype: DType, device: Device) -> Comparison:
    x = draw(6, (rope.rows, rope.heads, rope.columns), dtype)
    positions = np.linspace(0, rope.last, rope.rows).astype(np.int32)
    positions[-1] = rope.last
    inv_freq = (np.float32(1) / np.float32(8e6) ** (np.arange(0, rope.dim, 2, dtype=np.float32) / np.float32(rope.dim))).astype(np.float32)
    with Bench(device) as bench:
        y = bench.put(x, dtype)
        basic.rope(bench.stream, y, bench.put(positions), bench.put(inv_freq), rope.offset)
        got, want = bench.read(y), reference.rope(x, positions, inv_freq, rope.offset, dtype)
        rotated = np.zeros(rope.columns, bool)
        rotated[rope.offset : rope.offset + rope.dim] = True
        compare("rope columns outside", got[..., ~rotated], x[..., ~rotated], EXACT) if not rotated.all() else None
        return compare("rope", got, want, SAME_ROUNDING[dtype], scale=np.abs(x).max())


def _silu_mul(rows: int, width: int, spread: float, dtype: DType, device: Device) -> Comparison:
    x = draw(7, (rows, 2 * width), dtype, spread)
    with Bench(device) as bench:
        y = bench.poison(dtype, (rows, width))
        basic.silu_mul(bench.stream, bench.put(x, dtype), y)
        return compare("silu_mul", bench.read(y), reference.silu_mul(x, dtype), SAME_ROUNDING[dtype])


@dataclass(frozen=True)
class Product:
    rows: int
    n: int
    k: int
    residual: str = "none"  # none, separate, in_place
    fill: str = "normal"  # normal, zero_rows, huge


def _product(product: Product, types: tuple[DType, DType, DType], device: Device) -> Comparison:
    rows, n, k = product.rows, product.n, product.k
    x, w, residual = draw(8, (rows, k), types[0]), draw(9, (n, k), types[1]), draw(10, (rows, n), types[2])
    if product.fill == "zero_rows":
        x[::2] = 0
    if product.fill == "huge":
        x[-1] = np.float32(3e38)
        w[:, :] = np.abs(w) + 1
        x, w = round_to(x, types[0]), round_to(w, types[1])
    given = None if product.residual == "none" else residual
    want, scale = reference.matmul(x, w, given, types[2])
    with Bench(device) as bench:
        start = bench.put(residual, types[2])
        y = start if product.residual == "in_place" else bench.poison(types[2], (rows, n))
        matmul.matmul(bench.stream, bench.put(x, types[0]), Matrix.plain(bench.put(w, types[1])), y, None if given is None else start)
        return compare("matmul", bench.read(y), want, MATMUL_TOLERANCE[types[2]], scale)


def _per_head(rows: int, heads: int, n: int, k: int, columns: int, dtype: DType, device: Device) -> Comparison:
    x, w = draw(11, (rows, heads, columns), dtype), draw(12, (heads, n, k), dtype)
    want, scale = reference.matmul(x[..., :k].transpose(1, 0, 2), w, None, dtype)
    with Bench(device) as bench:
        y = bench.poison(dtype, (rows, heads, n))
        matmul.per_head(bench.stream, bench.put(x, dtype), Matrix.plain(bench.put(w, dtype)), y)
        return compare("per_head", bench.read(y), want.transpose(1, 0, 2), MATMUL_TOLERANCE[dtype], scale.transpose(1, 0, 2))


def _bits_alone(name: str, run: Callable[[Bench, np.ndarray], Array], x: np.ndarray, counts: tuple[int, ...], device: Device) -> Comparison:
    """Every row must have the same bits alone, among `counts` rows and elsewhere; `run` takes rows and gives one output row for each."""
    with Bench(device) as bench:
        alone = np.stack([bench.bits(run(bench, x[r : r + 1]))[0] for r in range(len(x))])
        for count in counts:
            for start in range(0, len(x) - count + 1, count):
                got = bench.bits(run(bench, x[start : start + count]))
                compare(f"{name}: rows {start} to {start + count} against each alone", got, alone[start : start + count])
        return compare(f"{name}: rows in reverse order against each alone", bench.bits(run(bench, x[::-1])), alone[::-1])


def _matmul_rows(types: tuple[DType, DType, DType], device: Device) -> Comparison:
    w = draw(13, (67, 151), types[1])

    def run(bench: Bench, x: np.ndarray) -> Array:
        y = bench.poison(types[2], (len(x), 67))
        matmul.matmul(bench.stream, bench.put(x, types[0]), Matrix.plain(bench.put(w, types[1])), y)
        return y

    x = draw(14, (70, 151), types[0])
    return _bits_alone("matmul", run, x, (2, 3, 5, 7, 9, len(x)), device)


def _norm_rows(dtype: DType, device: Device) -> Comparison:
    weight = draw(15, (77,), dtype)

    def run(bench: Bench, x: np.ndarray) -> Array:
        y = bench.poison(dtype, x.shape)
        basic.rms_norm(bench.stream, bench.put(x, dtype), bench.put(weight, dtype), y, EPS)
        return y

    return _bits_alone("rms_norm", run, draw(16, (9, 77), dtype), (3, 9), device)


@dataclass(frozen=True)
class Layout:
    extent_rows: int
    planes: int
    row_bytes: int


def _append(width: int, dtype: DType, device: Device) -> Comparison:
    """Rows of three sessions at positions around extent borders, one padding row; everything else in the extents must stay as it was."""
    row_bytes = (width * dtype.item_bytes + 15) // 16 * 16
    layout = Layout(64, 3, row_bytes)
    extent_bytes = layout.extent_rows * layout.planes * row_bytes
    sessions = np.array([0, 2, 1, 1, 0, 2, 0], np.int32)
    positions = np.array([0, 63, 64, 127, 191, 128, -1], np.int32)
    x = draw(17, (len(positions), width), dtype)
    with Bench(device) as bench:
        extents = bench.poison(DType.U8, (9, extent_bytes))
        order = np.random.default_rng(18).permutation(9)
        addresses = (extents.address + order * extent_bytes).astype(np.uint64).reshape(3, 3)
        dx = bench.put(x, dtype)
        history.append(bench.stream, dx, bench.put(addresses), bench.put(sessions), bench.put(positions), layout, plane=1)
        raw = bench.bits(dx).view(np.uint8).reshape(len(x), -1)
        want = np.full((9, layout.planes, layout.extent_rows, row_bytes), 0xFF, np.uint8)
        for row, session, position in zip(raw, sessions, positions, strict=True):
            if position >= 0:
                want[order[session * 3 + position // 64], 1, position % 64, : len(row)] = row
        return compare("append", bench.read(extents).reshape(want.shape), want)


def _dequant(rows: int, cols: int, source: DType, target: DType, scaled: bool, device: Device) -> Comparison:
    rng = np.random.default_rng(19)
    if source is DType.F8E4M3:
        x = rng.integers(0, 256, (rows, cols)).astype(np.uint8)
        x.flat[: min(256, x.size)] = np.arange(min(256, x.size))
    else:
        x = draw(20, (rows, cols), source)
    scale = np.exp(rng.standard_normal((-(-rows // 128), -(-cols // 128)))).astype(np.float32) if scaled else None
    with Bench(device) as bench:
        y = bench.poison(target, (rows, cols))
        weights.dequant(bench.stream, bench.put(x, source), None if scale is None else bench.put(scale), y)
        return compare("dequant", bench.read(y), reference.dequant(x, scale, target), EXACT)


def _split(heads: int, nope: int, v: int, latent: int, dtype: DType, device: Device) -> Comparison:
    kv_b = draw(21, (heads * (nope + v), latent), dtype)
    with Bench(device) as bench:
        wk, wv = bench.poison(dtype, (heads, latent, nope)), bench.poison(dtype, (heads, v, latent))
        weights.split_kv_b(bench.stream, bench.put(kv_b, dtype), wk, wv)
        want_k, want_v = reference.split_kv_b(kv_b, heads, nope)
        return worst_of(compare("wk", bench.read(wk), want_k, EXACT), compare("wv", bench.read(wv), want_v, EXACT))


def _copy(count: int, device: Device) -> Comparison:
    x = np.random.default_rng(22).integers(0, 2**32, (count, 4)).astype(np.uint32)
    with Bench(device) as bench:
        y = bench.poison(DType.U32, (count + 1, 4))
        litmus.copy_words(bench.stream, bench.put(x).address, y.address, count)
        return compare("copy_words", bench.read(y), np.concatenate([x, np.full((1, 4), 2**32 - 1, np.uint32)]))


def _counter(device: Device) -> Comparison:
    state, step = np.array([5, 6, 7], np.uint64), np.array([11], np.uint64)
    with Bench(device) as bench:
        ds, dt = bench.put(state), bench.put(step)
        value = 6
        for _ in range(3):
            litmus.counter_step(bench.stream, ds, dt, slot=1)
            value = (value * 6364136223846793005 + 11) % 2**64
        return compare("counter_step", bench.read(ds), np.array([5, value, 7], np.uint64))


def _zero_rows(device: Device) -> Comparison:
    """An empty batch is refused before anything is launched."""
    with Bench(device) as bench:
        full = bench.poison(F32, (1, 8))
        empty = full.slice(0, 0)
        weight = bench.poison(F32, (8,))
        calls: dict[str, Callable[[], None]] = {
            "rms_norm": lambda: basic.rms_norm(bench.stream, empty, weight, empty, EPS),
            "matmul": lambda: matmul.matmul(bench.stream, empty, Matrix.plain(bench.poison(F32, (4, 8))), bench.poison(F32, (1, 4)).slice(0, 0)),
        }
        for name, call in calls.items():
            try:
                call()
            except ContractError:
                continue
            raise Mismatch(f"{name} accepted a batch of zero rows, expected ContractError")
        return compare("zero rows", bench.bits(full), np.full((1, 8), 2**32 - 1, np.uint32))


def _basic_cases() -> list[Case]:
    cases = [
        Case("embed", f"{t.label}_{w.label}-{rows}x{hidden}", partial(_embed, rows, hidden, (t, w)))
        for t, w in ((F32, F32), (F32, BF16), (BF16, BF16))
        for rows, hidden in ((1, 1), (5, 257), (9, 1025))
    ]
    norms = [Norm(rows, 96, 96) for rows in range(1, 10)] + [Norm(3, 1, 1), Norm(2, 255, 255), Norm(2, 1027, 1027), Norm(5, 512, 576)]
    norms += [Norm(2, 64, 64, "zero"), Norm(2, 300, 300, "huge"), Norm(2, 33, 33, "tiny"), Norm(3, 128, 128, "offset")]
    for dtype in (F32, BF16):
        for norm in norms:
            for kind in ("rms_norm", "layer_norm"):
                # One value is its own mean: layer norm gives the bias. x^2 of "huge" stays below the largest float32.
                name = f"{dtype.label}-{norm.rows}x{norm.width}of{norm.columns}-{norm.fill}"
                cases.append(Case(kind, name, partial(_norm, kind, norm, dtype, False)))
        cases.append(Case("rms_norm", f"{dtype.label}-in_place", partial(_norm, "rms_norm", Norm(4, 512, 576), dtype, True)))
        cases.append(Case("layer_norm", f"{dtype.label}-in_place", partial(_norm, "layer_norm", Norm(4, 128, 128), dtype, True)))
        cases.append(Case("rms_norm", f"{dtype.label}-rows_alone", partial(_norm_rows, dtype)))
        for rope in (
            Rope(1, 1, 64, 0, 64, 0),
            Rope(9, 3, 256, 192, 64, 1_048_575),
            Rope(64, 1, 576, 512, 64, 1_048_575),
            Rope(5, 7, 128, 0, 64, 4096),
            Rope(2, 2, 8, 3, 2, 77),
            Rope(3, 5, 31, 5, 22, 65_537),
        ):
            name = f"{dtype.label}-{rope.rows}x{rope.heads}x{rope.columns}-{rope.offset}+{rope.dim}-to{rope.last}"
            cases.append(Case("rope", name, partial(_rope, rope, dtype)))
        for rows, width, spread in ((1, 1, 1.0), (3, 341, 4.0), (9, 513, 1.0), (2, 100, 60.0)):
            cases.append(Case("silu_mul", f"{dtype.label}-{rows}x{width}-spread{spread:g}", partial(_silu_mul, rows, width, spread, dtype)))
    return [*cases, Case("contract", "zero_rows", _zero_rows)]


def _matmul_cases() -> list[Case]:
    products = [Product(rows, 65, 131) for rows in range(1, 10)]
    products += [Product(1, 1, 1), Product(2, 31, 7), Product(3, 33, 8), Product(4, 32, 64), Product(16, 64, 63), Product(17, 96, 72)]
    products += [Product(5, 40, 257, "separate"), Product(6, 70, 65, "in_place"), Product(4, 9, 200, "none", "zero_rows")]
    products += [Product(3, 10, 40, "none", "huge"), Product(65, 63, 33), Product(64, 64, 32, "in_place"), Product(130, 129, 95)]
    cases = []
    for types in MATMUL_TYPES:
        label = "_".join(dtype.label for dtype in types)
        for p in products:
            cases.append(Case("matmul", f"{label}-{p.rows}x{p.n}x{p.k}-{p.residual}-{p.fill}", partial(_product, p, types)))
        cases.append(Case("matmul", f"{label}-rows_alone", partial(_matmul_rows, types)))
        cases.append(Case("matmul", f"{label}-long_k", partial(_product, Product(3, 48, 6144), types), thorough=True))
    for dtype in (F32, BF16):
        for shape in ((1, 3, 20, 12, 12), (7, 5, 33, 24, 40), (67, 2, 65, 70, 71)):
            name = f"{dtype.label}-{'x'.join(map(str, shape))}"
            cases.append(Case("per_head", name, partial(_per_head, *shape, dtype)))
    return cases


def _memory_cases() -> list[Case]:
    cases = []
    for dtype in (F32, BF16):
        for width in (1, 33, 128, 576):
            cases.append(Case("append", f"{dtype.label}-{width}", partial(_append, width, dtype)))
        for shape in ((1, 1, 1, 1), (3, 24, 40, 33), (2, 192, 256, 512)):
            name = f"{dtype.label}-{'x'.join(map(str, shape))}"
            cases.append(Case("split_kv_b", name, partial(_split, *shape, dtype), thorough=shape[1] > 100))
    kinds = ((DType.F8E4M3, F32), (DType.F8E4M3, BF16), (BF16, F32), (F32, BF16), (BF16, BF16), (F32, F32))
    for source, target in kinds:
        for rows, cols in ((1, 256), (3, 7), (129, 130), (576, 136), (2, 2056)):
            name = f"{source.label}_{target.label}-{rows}x{cols}"
            cases.append(Case("dequant", f"{name}-scaled", partial(_dequant, rows, cols, source, target, True)))
            if source is not DType.F8E4M3:
                cases.append(Case("dequant", f"{name}-plain", partial(_dequant, rows, cols, source, target, False)))
    cases += [Case("copy_words", str(count), partial(_copy, count)) for count in (1, 255, 1024, 3000)]
    return [*cases, Case("counter_step", "three", _counter)]


CASES = _basic_cases() + _matmul_cases() + _memory_cases()
