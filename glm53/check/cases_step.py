"""Cases of the products of a decode step: sums bit for bit against the reference of their order, epilogues and parts bit for bit against the
operations that they stand for, rows alone against rows together.

Widths cross the borders of the kernels: groups of 64, k = 1024 from where waves share a column, groups in flight, the panel of x in LDS; blocks of
columns; odd widths and odd addresses for plain weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from glm53.check import reference_step as reference
from glm53.check.case import Bench, Case, draw, round_to
from glm53.check.compare import EXACT, TOLERANCES, Comparison, compare, worst_of
from glm53.check.reference_step import Weights, draw_weights
from glm53.hip import Array, Device
from glm53.mem.extents import ExtentShape
from glm53.ops import basic, experts, history, rows, step, step_parts
from glm53.ops.halves import Halves
from glm53.ops.matrix import Matrix
from glm53.spec import WHOLE, DType, RowFormat, Shard, WeightFormat

F32, BF16 = DType.F32, DType.BF16
T = (F32, BF16)
EPS = 1e-5
ROWS = (1, 2, 3, 4, 5, 8, 16)
Epilogue, Segment = step.Epilogue, step.Segment
FORMATS = {F32: (WeightFormat.F32, WeightFormat.BF16, WeightFormat.Q8G64), BF16: (WeightFormat.BF16, WeightFormat.Q8G64)}
TILE_ARCHS = ("gfx11", "gfx12", "sm_")  # whose matrix tiles add in an order of their own


def _same_bits(weights: Weights, dtype: DType, device: Device) -> bool:
    """Whether the reference has the order of additions of this device: matrix tiles add plain weights in an order of their own."""
    return dtype is F32 or weights.format.quantised or not device.arch.startswith(TILE_ARCHS)


def _expect_sums(
    name: str, got: np.ndarray, want: np.ndarray, x: np.ndarray, weights: Weights, dtype: DType, stored: DType, device: Device
) -> Comparison:
    """Sums of dtype x: bit for bit where the reference has their order, else within rounding errors of sum |x||w|."""
    if _same_bits(weights, dtype, device):
        return compare(name, got, round_to(want, stored), EXACT)
    scale = np.abs(x).astype(np.float64) @ np.abs(weights.values).swapaxes(-1, -2)
    return compare(name, got, round_to(want, stored), stored, scale)


def _expect(name: str, got: np.ndarray, x: np.ndarray, weights: Weights, dtype: DType, stored: DType, device: Device) -> Comparison:
    want = (reference.sums if dtype is F32 else reference.tile_sums)(x, weights)
    return _expect_sums(name, got, want, x, weights, dtype, stored, device)


def put_matrix(bench: Bench, weights: Weights) -> Matrix:
    codes, scales = weights.stored
    plain = {WeightFormat.F32: F32, WeightFormat.BF16: BF16}.get(weights.format)
    return Matrix(bench.put(codes, plain), None if scales is None else bench.put(scales), weights.format)


def put_halves(bench: Bench, rows: int, n: int) -> Halves:
    halves = Halves.make(bench.device, rows, n)
    bench.keep(halves.partial, halves.arrivals)
    return halves


def frequencies(dim: int) -> np.ndarray:
    return (1.0 / 8e6 ** (np.arange(0, dim, 2) / dim)).astype(np.float32)


def _product(count: int, n: int, k: int, dtype: DType, weight_format: WeightFormat, device: Device) -> Comparison:
    """Both stores of one product."""
    x, weights = draw(1, (count, k), dtype), draw_weights(2, (n, k), weight_format)
    with Bench(device) as bench:
        dx, matrix = bench.put(x, dtype), put_matrix(bench, weights)
        exact, stored = bench.poison(F32, (count, n)), bench.poison(dtype, (count, n))
        step.gemv(bench.stream, dx, [Segment(matrix, exact, Epilogue.STORE_F32), Segment(matrix, stored)])
        sums = bench.read(exact)
        return worst_of(
            _expect("sums", sums, x, weights, dtype, F32, device),
            compare("stored", bench.read(stored), round_to(sums, dtype), EXACT),
        )


def _rows_alone(n: int, k: int, dtype: DType, weight_format: WeightFormat, device: Device) -> Comparison:
    """With a norm and a second segment: every row alone against all of them and against groups of them."""
    x, weights, norm = draw(3, (11, k), dtype), draw_weights(4, (n, k), weight_format), draw(5, (k,), dtype)
    with Bench(device) as bench:
        matrix, other, dnorm = put_matrix(bench, weights), put_matrix(bench, draw_weights(6, (3, k), weight_format)), bench.put(norm, dtype)

        def run(values: np.ndarray) -> np.ndarray:
            y, z = bench.poison(dtype, (len(values), n)), bench.poison(F32, (len(values), 3))
            segments = [Segment(matrix, y), Segment(other, z, Epilogue.STORE_F32)]
            step.gemv(bench.stream, bench.put(values, dtype), segments, norm=dnorm, eps=EPS)
            return np.concatenate([bench.read(y), bench.read(z)], axis=1)

        alone = np.concatenate([run(x[r : r + 1]) for r in range(len(x))])
        for count in (2, 3, 4, 7):
            compare(f"{count} rows against each alone", run(x[:count]), alone[:count], EXACT)
        return compare("rows in reverse order against each alone", run(x[::-1]), alone[::-1], EXACT)


def _normed(count: int, k: int, dtype: DType, weight_format: WeightFormat, device: Device) -> Comparison:
    """f32: h is rms_norm's output, and the products are those of h. bf16: sums in the order of the wave product."""
    x, norm, weights = draw(7, (count, k), dtype, 3.0), draw(8, (k,), dtype), draw_weights(9, (21, k), weight_format)
    with Bench(device) as bench:
        dx, dnorm, matrix = bench.put(x, dtype), bench.put(norm, dtype), put_matrix(bench, weights)
        if dtype is BF16:
            y = bench.poison(F32, (count, 21))
            step.gemv(bench.stream, dx, [Segment(matrix, y, Epilogue.STORE_F32)], norm=dnorm, eps=EPS)
            normed = reference.rms_norm(x, norm, EPS)
            want = reference.tile_normed_sums(x, norm, EPS, weights)
            size = np.abs(normed) @ np.abs(weights.values).T
            # Rounding of x * norm to bf16, which plain weights need: half an ulp, 2^-8, of each product.
            rounding = 0.0 if weight_format.quantised else 2.0**-8
            slack = reference.quantisation_error(normed, weights) + rounding * size
            near = replace(TOLERANCES[F32], cosine=1e-5)
            compare("y against float64", bench.read(y), (normed @ weights.values.T).astype(np.float32), near, size + slack / near.absolute)
            return _expect_sums("y", bench.read(y), want, normed.astype(np.float32), weights, dtype, F32, device)
        h, y, want_h, want_y = (bench.poison(dtype, (count, width)) for width in (k, 21, k, 21))
        step.gemv(bench.stream, dx, [Segment(matrix, y)], norm=dnorm, eps=EPS, h=h)
        basic.rms_norm(bench.stream, dx, dnorm, want_h, EPS)
        step.gemv(bench.stream, want_h, [Segment(matrix, want_y)])
        return worst_of(compare("h", bench.bits(h), bench.bits(want_h)), compare("y", bench.bits(y), bench.bits(want_y)))


def _halves(count: int, n: int, k: int, dtype: DType, weight_format: WeightFormat, device: Device) -> Comparison:
    """RESIDUAL in place; of bf16 x two blocks share their columns. Twice: arrivals are 0 again. Each row as by itself."""
    x, weights, residual = draw(33, (count, k), dtype), draw_weights(34, (n, k), weight_format), draw(35, (count, n), dtype, 8.0)
    with Bench(device) as bench:
        matrix, halves = put_matrix(bench, weights), put_halves(bench, count, n) if dtype is BF16 else None

        def run(rows: slice) -> np.ndarray:
            y = bench.put(residual[rows], dtype)
            step.gemv(bench.stream, bench.put(x[rows], dtype), [Segment(matrix, y, Epilogue.RESIDUAL)], residual=y, halves=halves)
            return bench.read(y)

        got = run(slice(0, count))
        compare("again", run(slice(0, count)), got, EXACT)
        for r in range(count):
            compare(f"row {r} alone", run(slice(r, r + 1)), got[r : r + 1], EXACT)
        want = round_to(residual + reference.half_sums(x, weights, dtype), dtype)
        if _same_bits(weights, dtype, device):
            return compare("y", got, want, EXACT)
        return compare("y", got, want, dtype, np.abs(x) @ np.abs(weights.values).T + np.abs(residual))


def _epilogues(count: int, k: int, dtype: DType, weight_format: WeightFormat, device: Device) -> Comparison:
    """Segments of different epilogues in one launch, against STORE and the operations one by one. One position is padding."""
    heads, stride, rope = 3, 24, step.Rope(24, 16, 8)
    x = draw(10, (count, k), dtype)
    positions = np.linspace(0, 1_048_575, count).astype(np.int32)
    if count > 1:
        positions[0] = -1
    widths = (45, heads * stride, 2 * 41, 5)  # of the weights: as it is, rope, SiLU, f32
    with Bench(device) as bench:
        dx, dpositions, dfrequencies = bench.put(x, dtype), bench.put(positions), bench.put(frequencies(rope.dim))
        matrices = [put_matrix(bench, draw_weights(12 + i, (n, k), weight_format)) for i, n in enumerate(widths)]
        plain = [bench.poison(dtype, (count, n)) for n in widths[:3]] + [bench.poison(F32, (count, widths[3]))]
        stored = [Segment(m, y) for m, y in zip(matrices, plain, strict=True)]
        stored[3] = replace(stored[3], epilogue=Epilogue.STORE_F32)
        step.gemv(bench.stream, dx, stored)
        as_it_is, act = bench.poison(dtype, (count, 45)), bench.poison(dtype, (count, 41))
        turned, sums = bench.poison(dtype, (count, widths[1])), bench.poison(F32, (count, widths[3]))
        segments = [
            Segment(matrices[0], as_it_is),
            Segment(matrices[1], turned, Epilogue.ROPE, rope),
            Segment(matrices[2], act, Epilogue.SILU),
            Segment(matrices[3], sums, Epilogue.STORE_F32),
        ]
        step.gemv(bench.stream, dx, segments, positions=dpositions, inv_freq=dfrequencies)
        want_act = bench.poison(dtype, (count, 41))
        basic.silu_mul(bench.stream, plain[2], want_act)
        by_head = Array(plain[1].buffer, dtype, (count, heads, stride))
        basic.rope(bench.stream, by_head, bench.put(np.maximum(positions, 0)), dfrequencies, rope.offset)
        return worst_of(
            compare("stored", bench.bits(as_it_is), bench.bits(plain[0])),
            compare("rope", bench.bits(turned), bench.bits(plain[1])),
            compare("silu", bench.bits(act), bench.bits(want_act)),
            compare("f32", bench.bits(sums), bench.bits(plain[3])),
        )


def _per_head(count: int, heads: int, n: int, k: int, columns: int, dtype: DType, weight_format: WeightFormat, device: Device) -> Comparison:
    x, weights = draw(16, (count, heads, columns), dtype), draw_weights(17, (heads, n, k), weight_format)
    with Bench(device) as bench:
        y = bench.poison(dtype, (count, heads, n))
        step.per_head(bench.stream, bench.put(x, dtype), put_matrix(bench, weights), y)
        return _expect("per_head", bench.read(y).transpose(1, 0, 2), x[..., :k].transpose(1, 0, 2), weights, dtype, dtype, device)


def _against_float64(dtype: DType, weight_format: WeightFormat, device: Device) -> Comparison:
    """The values themselves, by a sum that knows nothing of the order: a few rounding errors of sum |x||w|, and of x beside scaled formats."""
    x, weights = draw(18, (2, 2048), dtype), draw_weights(19, (33, 2048), weight_format)
    with Bench(device) as bench:
        y = bench.poison(F32, (2, 33))
        step.gemv(bench.stream, bench.put(x, dtype), [Segment(put_matrix(bench, weights), y, Epilogue.STORE_F32)])
        values = weights.values.T
        size = np.abs(x) @ np.abs(values)
        if dtype is BF16:
            size += reference.quantisation_error(x, weights) / TOLERANCES[F32].absolute
        return compare("values", bench.read(y), (x.astype(np.float64) @ values).astype(np.float32), F32, size)


@dataclass(frozen=True)
class Scene:
    """Query rows of two sessions, one of them padding; history rows go to slots of `memory`, keys to `extents`."""

    sessions: np.ndarray
    positions: np.ndarray


def _scene(count: int) -> Scene:
    positions = (np.arange(count) * 37 % 128).astype(np.int32)
    if count > 2:
        positions[2] = -1
    return Scene((np.arange(count) % 2).astype(np.int32), positions)


def _held(positions: np.ndarray, extent_rows: int, share: Shard) -> np.ndarray:
    """Rows of these positions in the tables of a side; -1: padding, or of the other side."""
    extents = positions // extent_rows
    rows = extents // share.count * extent_rows + positions % extent_rows
    return np.where((positions >= 0) & (extents % share.count == share.index), rows, -1).astype(np.int32)


def _rows_part(count: int, latent: int, rope: int, row_format: RowFormat, dtype: DType, with_key: bool, share: Shard, device: Device) -> Comparison:
    """Part ROWS beside a product, against rms_norm, rope, store_rows, layer_norm, rope and append; nothing else in memory may change."""
    scene, key_width, k = _scene(count), -(-rope // 8) * 8 + 24, 72
    row_bytes = row_format.row_bytes(latent, rope)
    shape = ExtentShape(64, 2, key_width * dtype.item_bytes)
    row, key = draw(20, (count, latent + rope), dtype, 2.0), draw(21, (count, key_width), dtype)
    if count > 1:
        row[1, 0] = np.inf if row_format is RowFormat.Q8G64 else row[1, 0]
    norms = [draw(22 + i, (width,), dtype) for i, width in enumerate((latent, key_width, key_width))]
    with Bench(device) as bench:
        refs = np.zeros(count, np.uint64)
        offsets = (0, 1 << 20, 0, 0)
        sessions, positions, inv_freq = bench.put(scene.sessions), bench.put(scene.positions), bench.put(frequencies(rope))
        row_norm, key_norm, key_bias = (bench.put(norm, dtype) for norm in norms)
        x, matrix = bench.put(draw(25, (count, k), dtype), dtype), put_matrix(bench, draw_weights(26, (19, k), WeightFormat.BF16))

        def outputs(run: Callable[[Array, Array, Array, Array, Array, Array], None]) -> list[np.ndarray]:
            memory, extents = bench.poison(DType.U8, (count + 1, row_bytes)), bench.poison(DType.U8, (4, shape.extent_rows * 2 * shape.row_bytes))
            for r in range(count):
                refs[r] = 0 if scene.positions[r] < 0 else memory.address + (count - r) * row_bytes - offsets[r % 2] + r % 2
            tables = (extents.address + np.arange(4, dtype=np.uint64)[[[2, 0], [1, 3]]] * np.uint64(extents.nbytes // 4)).astype(np.uint64)
            error = bench.put(np.zeros(1, np.uint32))
            run(bench.put(row, dtype), bench.put(key, dtype), bench.put(refs), bench.put(tables), error, bench.poison(dtype, (count, 19)))
            return [bench.read(memory), bench.read(extents), bench.read(error)]

        def fused(drow: Array, dkey: Array, drefs: Array, tables: Array, error: Array, y: Array) -> None:
            part = step_parts.RowsPart(drow, row_norm, EPS, drefs, offsets, row_format, latent, error)
            if with_key:
                part = replace(part, key=dkey, key_norm=key_norm, key_bias=key_bias, key_eps=1e-6, key_tables=tables, sessions=sessions)
                part = replace(part, key_shape=shape, key_plane=1, key_share=share)
            step.gemv(bench.stream, x, [Segment(matrix, y)], positions=positions, inv_freq=inv_freq, part=part)
            plain = bench.poison(dtype, y.shape)
            step.gemv(bench.stream, x, [Segment(matrix, plain)])
            compare("the product beside the part", bench.bits(y), bench.bits(plain))

        def single(drow: Array, dkey: Array, drefs: Array, tables: Array, error: Array, _y: Array) -> None:
            clamped = bench.put(np.maximum(scene.positions, 0))
            basic.rms_norm(bench.stream, drow, row_norm, drow, EPS)
            basic.rope(bench.stream, drow.reshape(count, 1, latent + rope), clamped, inv_freq, latent)
            rows.store_rows(bench.stream, drow, drefs, offsets=offsets, row_format=row_format, latent=latent, error=error)
            if with_key:
                basic.layer_norm(bench.stream, dkey, key_norm, key_bias, dkey, 1e-6)
                basic.rope(bench.stream, dkey.reshape(count, 1, key_width), clamped, inv_freq, 0)
                history.append(bench.stream, dkey, tables, sessions, bench.put(_held(scene.positions, 64, share)), shape, 1)

        got, want = outputs(fused), outputs(single)
        return worst_of(*(compare(name, g, w) for name, g, w in zip(("history rows", "index keys", "error"), got, want, strict=True)))


def _mail(count: int, latent: int, rope: int, row_format: RowFormat, dtype: DType, device: Device) -> Comparison:
    """Packed rows that one part ROWS posts and another takes: the same bytes at references of its own, skipped rows untouched. Mail of another number
    is waited for in vain: its number shows, and nothing is stored."""
    row_bytes, skipped, index, per_step, steps = row_format.row_bytes(latent, rope), 2, 3, 5, 0x33333333
    row, memories = draw(37, (count, latent + rope), dtype, 2.0), []
    with Bench(device) as bench:
        positions, inv_freq = bench.put(np.arange(count, dtype=np.int32)), bench.put(frequencies(rope))
        x, matrix = bench.put(draw(25, (count, 72), dtype), dtype), put_matrix(bench, draw_weights(26, (19, 72), WeightFormat.BF16))
        counter, row_error, mail_error = (bench.put(np.array([value], np.uint32)) for value in (steps, 0, 0))
        box = bench.put(np.zeros(count * row_bytes // 4, np.uint64))
        row_norm = bench.put(draw(38, (latent,), dtype), dtype)

        def run(receive: bool, mail_index: int) -> np.ndarray:
            memory = bench.poison(DType.U8, (count, row_bytes))
            refs = (memory.address + np.arange(count, dtype=np.uint64)[:: -1 if receive else 1] * np.uint64(row_bytes)).astype(np.uint64)
            refs[skipped:][:1] = 0
            mail = step_parts.RowMail(box.address, box.shape[0], receive, counter, per_step, mail_index, mail_error, step_parts.Patience(1000))
            mine = (None, None) if receive else (bench.put(row, dtype), row_norm)
            part = step_parts.RowsPart(mine[0], mine[1], EPS, bench.put(refs), (0, 0, 0, 0), row_format, latent, row_error, mail=mail)
            y = bench.poison(dtype, (count, 19))
            step.gemv(bench.stream, x, [Segment(matrix, y)], positions=positions, inv_freq=inv_freq, part=part)
            memories.append(bench.read(memory))
            return memories[-1][:: -1 if receive else 1]

        sent, taken = run(False, index), run(True, index)
        results = [compare("rows taken", taken, sent), compare("mail error", bench.read(mail_error), np.zeros(1, np.uint32))]
        number = (2 * (steps * per_step + index) + 1) % (1 << 32)
        used = np.arange(count) != skipped
        numbers = (bench.read(box) >> np.uint64(32)).reshape(count, -1)
        results.append(compare("numbers", numbers, np.where(used[:, None], number, 0).astype(np.uint64) + np.zeros_like(numbers)))
        late = run(True, index + 1)
        wanted = np.array([(number + 2) % (1 << 32)], np.uint32)
        return worst_of(*results, compare("late", late, np.full_like(late, 0xFF)), compare("late error", bench.read(mail_error), wanted))


def _router_part(
    count: int, n_experts: int, slots: int, groups: tuple[int, int], k: int, dtype: DType, weight_format: WeightFormat, device: Device
) -> Comparison:
    """Part ROUTER twice (the counter of arrivals must be 0 again), with a norm, beside another segment: logits and h in the order of the kernels, and
    router on the same logits. Each row as by itself."""
    x, bias, norm = draw(27, (count, k), dtype), draw(28, (n_experts,), F32, 0.1), draw(36, (k,), dtype)
    n_group, topk_group = groups
    gate = draw_weights(29, (n_experts, k), WeightFormat.F32)
    with Bench(device) as bench:
        dx, dnorm, dbias, arrivals = bench.put(x, dtype), bench.put(norm, dtype), bench.put(bias), bench.put(np.zeros(1, np.uint32))
        router, other = put_matrix(bench, gate), put_matrix(bench, draw_weights(30, (34, k), weight_format))

        def run(rows: slice) -> tuple[Array, ...]:
            some = bench.put(x[rows], dtype)
            n = some.shape[0]
            logits, act, h = bench.poison(F32, (n, n_experts)), bench.poison(dtype, (n, 17)), bench.poison(dtype, (n, k))
            ids, weights = bench.poison(DType.I32, (n, slots)), bench.poison(F32, (n, slots))
            part = step_parts.RouterPart(dbias, ids, weights, arrivals, n_group, topk_group, normalise=True, scaling=2.5)
            segments = [Segment(router, logits, Epilogue.STORE_F32), Segment(other, act, Epilogue.SILU)]
            step.gemv(bench.stream, some, segments, norm=dnorm, eps=EPS, h=h, part=part)
            return logits, act, h, ids, weights

        if dtype is F32:
            want = bench.poison(dtype, (count, k))
            basic.rms_norm(bench.stream, dx, dnorm, want, EPS)
            want_h = bench.read(want)
            want_logits = reference.sums(want_h, gate)
        else:
            want_logits, want_h = reference.router_sums(x, norm, EPS, gate.codes)
        results = []
        for _ in range(2):
            logits, act, h, ids, weights = run(slice(0, count))
            want_ids, want_weights = bench.poison(DType.I32, (count, slots)), bench.poison(F32, (count, slots))
            picked = (want_ids, want_weights)
            experts.router(bench.stream, logits, dbias, *picked, n_group=n_group, topk_group=topk_group, normalise=True, scaling=2.5)
            results += [
                compare("logits", bench.read(logits), want_logits, EXACT),
                compare("h", bench.read(h), want_h, EXACT),
                compare("ids", bench.read(ids), bench.read(want_ids)),
                compare("weights", bench.bits(weights), bench.bits(want_weights)),
                compare("arrivals", bench.read(arrivals), np.zeros(1, np.uint32)),
            ]
        for r in range(count):
            alone = run(slice(r, r + 1))
            names = ("logits", "act", "h", "ids", "weights")
            for name, one, every in zip(names, alone, (logits, act, h, ids, weights), strict=True):
                compare(f"{name} of row {r} alone", bench.bits(one)[0], bench.bits(every)[r])
        return worst_of(*results)


def _odd_address(device: Device) -> Comparison:
    """Weights and f32 x that start between two multiples of 16 bytes: element loads, the same bits."""
    x, weights = draw(31, (3, 1040), F32), draw_weights(32, (7, 1040), WeightFormat.F32)
    with Bench(device) as bench:
        flat_x, flat_w = (bench.put(np.concatenate([[0.5], a.ravel()]).astype(np.float32)) for a in (x, weights.codes))
        shifted = [Array(a.buffer, F32, shape, a.offset_bytes + F32.item_bytes) for a, shape in ((flat_x, x.shape), (flat_w, (7, 1040)))]
        y = bench.poison(F32, (3, 7))
        step.gemv(bench.stream, shifted[0], [Segment(Matrix.plain(shifted[1]), y, Epilogue.STORE_F32)])
        return _expect("sums", bench.read(y), x, weights, F32, F32, device)


def _product_cases() -> list[Case]:
    cases = []
    for dtype in T:
        for weight_format in FORMATS[dtype]:
            label = f"{dtype.label}_{weight_format.label}"
            shapes = [(count, 37, 192) for count in ROWS] + [(1, 1, 64), (3, 130, 960), (2, 19, 1088), (5, 18, 2048), (1, 5, 3136)]
            shapes += [(3, 300, 128), (9, 70, 1024), (8, 5, 6208), (1, 4300, 1088)]
            if dtype is F32 and not weight_format.quantised:
                shapes += [(2, 1, 1), (3, 6, 7), (5, 35, 131), (2, 18, 1027), (1, 3, 2500)]
            if weight_format is WeightFormat.BF16:
                shapes += [(2, 1, 72), (3, 6, 120), (5, 35, 136), (2, 40, 1064), (9, 3, 2504)]
            for count, n, k in shapes:
                cases.append(Case("step_gemv", f"{label}-{count}x{n}x{k}", partial(_product, count, n, k, dtype, weight_format)))
            cases.append(Case("step_gemv", f"{label}-spans", partial(_product, 4, 3, 8192 + 320, dtype, weight_format)))
            cases.append(Case("step_gemv", f"{label}-float64", partial(_against_float64, dtype, weight_format)))
            for n, k in ((9, 128), (6, 1152)):
                cases.append(Case("step_gemv", f"{label}-rows_alone-{k}", partial(_rows_alone, n, k, dtype, weight_format)))
            columns = 1100 if dtype is F32 else 1104
            for shape in ((1, 3, 20, 64, 64), (5, 2, 33, 192, 256), (2, 2, 5, 1024, columns), (9, 2, 300, 128, 128)):
                name = f"{label}-{'x'.join(map(str, shape))}"
                cases.append(Case("step_per_head", name, partial(_per_head, *shape, dtype, weight_format)))
            shapes = [(1, 37, 64), (3, 300, 192), (2, 19, 1088), (9, 70, 2048), (4, 33, 2112), (1, 5, 6208), (17, 260, 128)]
            if weight_format is WeightFormat.BF16:
                shapes += [(2, 35, 72), (3, 19, 200), (1, 40, 2120)]
            if dtype is F32 and not weight_format.quantised:
                shapes += [(2, 3, 1), (3, 35, 65), (2, 18, 131), (1, 5, 2049), (2, 2, 16450)]
            for count, n, k in shapes:
                cases.append(Case("step_halves", f"{label}-{count}x{n}x{k}", partial(_halves, count, n, k, dtype, weight_format)))
    cases.append(Case("step_gemv", "f32-odd_address", partial(_odd_address)))
    return cases


def _fused_cases() -> list[Case]:
    cases = []
    for dtype in T:
        for count, k in ((1, 64), (2, 6144), (3, 1088), (4, 2048), (5, 512), (10, 3072)):
            for weight_format in (WeightFormat.BF16, WeightFormat.Q8G64):
                name = f"{dtype.label}_{weight_format.label}-{count}x{k}"
                cases.append(Case("step_norm", name, partial(_normed, count, k, dtype, weight_format)))
        plain_weights = FORMATS[dtype][0]
        for count, k in ((1, 33), (3, 1029), (4, 16448)) if dtype is F32 else ((1, 72), (3, 1032), (4, 16456)):
            name = f"{dtype.label}_{plain_weights.label}-{count}x{k}"
            cases.append(Case("step_norm", name, partial(_normed, count, k, dtype, plain_weights)))
        for count in (1, 2, 3, 4, 8, 11):
            for weight_format in FORMATS[dtype]:
                k = 1152 if count in (3, 11) else 128
                name = f"{dtype.label}_{weight_format.label}-{count}x{k}"
                cases.append(Case("step_epilogues", name, partial(_epilogues, count, k, dtype, weight_format)))
        plain = RowFormat.F32 if dtype is F32 else RowFormat.BF16
        for count, latent, rope, row_format, with_key in (
            (1, 512, 64, plain, True),
            (5, 512, 64, RowFormat.Q8G64, True),
            (3, 256, 4, RowFormat.Q8G64, False),
            (4, 40, 8, plain, True),
            (8, 2304, 4, RowFormat.Q8G64, True),
        ):
            name = f"{dtype.label}_{row_format.value}-{count}x{latent}+{rope}{'-key' if with_key else ''}"
            cases.append(Case("step_rows", name, partial(_rows_part, count, latent, rope, row_format, dtype, with_key, WHOLE)))
            for share in (Shard(0, 2), Shard(1, 2)) if with_key else ():
                case = partial(_rows_part, count, latent, rope, row_format, dtype, with_key, share)
                cases.append(Case("step_rows", f"{name}-side{share.index}", case))
            name = f"{dtype.label}_{row_format.value}-{count}x{latent}+{rope}"
            cases.append(Case("step_mail", name, partial(_mail, count, latent, rope, row_format, dtype)))
        for count, n_experts, slots, groups, k, weight_format in (
            (1, 256, 8, (1, 1), 1088, WeightFormat.Q8G64),
            (3, 16, 4, (4, 2), 72, WeightFormat.BF16),
            (4, 61, 3, (1, 1), 33 if dtype is F32 else 88, FORMATS[dtype][0]),
            (9, 16, 4, (1, 1), 6272, WeightFormat.Q8G64),
            (8, 128, 8, (8, 4), 64, WeightFormat.Q8G64),
        ):
            name = f"{dtype.label}_{weight_format.label}-{count}x{n_experts}-{slots}of{groups[1]}of{groups[0]}x{k}"
            case = partial(_router_part, count, n_experts, slots, groups, k, dtype, weight_format)
            cases.append(Case("step_router", name, case))
    return cases


CASES = _product_cases() + _fused_cases()
