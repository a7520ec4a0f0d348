"""Checks of index score, top-k and attention: several sessions in shuffled extents, contexts around k and around extents."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from glm53.check import reference_selection as reference
from glm53.check.case import Bench, Case, draw, round_to
from glm53.check.compare import Comparison, compare, worst_of
from glm53.check.reference_rows import row_bits, row_values
from glm53.hip import Array, Device
from glm53.mem.extents import ExtentShape
from glm53.ops import attention, selection
from glm53.spec import DType, Offsets, RowFormat, Space


@dataclass
class Histories:
    """Rows of some sessions in device memory, extents in shuffled order; what no session wrote is NaN."""

    shape: ExtentShape
    tables: Array  # [sessions, extents] u64
    addresses: np.ndarray  # the same on the host
    sessions: list[np.ndarray]  # [planes, context, width] float32


def lay_out(bench: Bench, sessions: list[np.ndarray], extent_rows: int, dtype: DType) -> Histories:
    planes, _, width = sessions[0].shape
    shape = ExtentShape(extent_rows, planes, width * dtype.item_bytes)
    counts = [shape.extents_for(session.shape[1]) for session in sessions]
    order = np.random.default_rng(extent_rows).permutation(sum(counts))
    extents = np.full((sum(counts), planes, extent_rows, width), np.nan, np.float32)
    addresses = np.zeros((len(sessions), max(counts)), np.uint64)
    place = iter(order)
    for s, session in enumerate(sessions):
        for e in range(counts[s]):
            at = int(next(place))
            part = session[:, e * extent_rows : (e + 1) * extent_rows]
            extents[at, :, : part.shape[1]] = part
            addresses[s, e] = at * shape.extent_bytes
    memory = bench.put(extents, dtype)
    for s, count in enumerate(counts):
        addresses[s, :count] += np.uint64(memory.address)
    return Histories(shape, bench.put(addresses), addresses, sessions)


def i32(values: object) -> np.ndarray:
    return np.asarray(values, np.int32)


# Index score


@dataclass(frozen=True)
class Scoring:
    name: str
    heads: int
    dim: int
    dtype: DType
    rows: tuple[tuple[int, int], ...]  # (session, position)
    contexts: tuple[int, ...]  # rows of each session
    extent_rows: int = 64
    planes: int = 1
    plane: int = 0


def score(bench: Bench, case: Scoring, histories: Histories, query: np.ndarray, gate: np.ndarray, rows: tuple[tuple[int, int], ...]) -> Array:
    """Runs the kernel; scores [rows, columns], poisoned before."""
    columns = max(case.contexts)
    scores = bench.poison(DType.F32, (len(rows), columns))
    selection.index_score(
        bench.stream,
        bench.put(query, case.dtype),
        bench.put(gate),
        histories.tables,
        bench.put(i32([s for s, _ in rows])),
        bench.put(i32([p for _, p in rows])),
        scores,
        histories.shape,
        plane=case.plane,
        context=max(p for _, p in rows) + 1,
    )
    return scores


def run_score(case: Scoring, device: Device) -> Comparison:
    with Bench(device) as bench:
        keys = [draw(7 + s, (case.planes, n, case.dim), case.dtype) for s, n in enumerate(case.contexts)]
        query, gate = draw(1, (len(case.rows), case.heads, case.dim), case.dtype), draw(2, (len(case.rows), case.heads))
        scores = score(bench, case, lay_out(bench, keys, case.extent_rows, case.dtype), query, gate, case.rows)
        positions = i32([p for _, p in case.rows])
        want, scale = reference.index_scores(query, gate, [keys[s][case.plane] for s, _ in case.rows], positions, max(case.contexts))
        result = compare("scores", bench.read(scores), want, DType.F32, scale)
        # A row's bits depend neither on its neighbours nor on the extents.
        wider = lay_out(bench, keys, 2 * case.extent_rows, case.dtype)
        bits = bench.bits(scores)
        for r, row in enumerate(case.rows):
            alone = bench.bits(score(bench, case, wider, query[r : r + 1], gate[r : r + 1], (row,)))
            compare(f"row {r} alone, larger extents", alone[0, : row[1] + 1], bits[r, : row[1] + 1])
        return result


_SCORINGS = (
    Scoring("released-f32", 32, 128, DType.F32, ((0, 199), (1, 63), (0, 0)), (200, 64)),
    Scoring("released-bf16", 32, 128, DType.BF16, ((0, 130), (1, 64), (1, 65)), (200, 66), planes=3, plane=2),
    Scoring("tiny", 32, 32, DType.F32, tuple((r % 3, (29 * r) % 70) for r in range(9)), (70, 71, 128), planes=2, plane=1),
    Scoring("odd", 5, 20, DType.F32, ((0, 31), (0, 32), (0, 33), (1, 127), (1, 128)), (34, 129)),
    Scoring("one-head", 1, 4, DType.F32, ((0, 2),), (3,)),
    Scoring("most-heads", 64, 64, DType.BF16, ((0, 3),), (64,)),
)


# Top-k


def fill_scores(kind: str, rows: int, columns: int, seed: int) -> np.ndarray:
    """Scores of a kind that has to do with ties, signs or order."""
    rng = np.random.default_rng(seed)
    normal = rng.standard_normal((rows, columns)).astype(np.float32)
    if kind == "equal":
        return np.zeros((rows, columns), np.float32)
    if kind == "ties":
        return np.round(normal * 2).astype(np.float32)
    if kind == "signed-zeros":
        zeros = np.where(rng.random((rows, columns)) < 0.5, np.float32(-0.0), np.float32(0.0))
        return np.select([normal > 1.5, normal > 1], [np.float32(np.nan), np.float32(0.5)], zeros).astype(np.float32)
    if kind == "relu":
        return np.maximum(normal - 1, 0).astype(np.float32)
    if kind == "infinite":
        return np.where(normal > 1, np.float32(np.inf), np.where(normal < 0, np.float32(-np.inf), normal)).astype(np.float32)
    if kind == "ascending":
        return np.broadcast_to(np.arange(columns, dtype=np.float32), (rows, columns)).copy()
    if kind == "descending":
        return np.broadcast_to(-np.arange(columns, dtype=np.float32), (rows, columns)).copy()
    if kind == "low-byte":  # keys that differ in their last bits only
        return (np.float32(1.0).view(np.uint32) + rng.integers(0, 5, (rows, columns)).astype(np.uint32)).view(np.float32)
    return normal


def run_topk(kind: str, k: int, positions: tuple[int, ...], columns: int, device: Device) -> Comparison:
    scores = fill_scores(kind, len(positions), columns, k + columns)
    for r, position in enumerate(positions):
        scores[r, position + 1 :] = np.inf  # would be chosen if it were read
    want, want_counts = reference.topk(scores, i32(positions), k)
    with Bench(device) as bench:
        selected, counts = bench.poison(DType.I32, (len(positions), k)), bench.poison(DType.I32, (len(positions),))
        selection.topk(bench.stream, bench.put(scores), bench.put(i32(positions)), selected, counts)
        return worst_of(compare("counts", bench.read(counts), want_counts), compare("selected", bench.read(selected), want))


def around(k: int, columns: int) -> tuple[int, ...]:
    """Positions whose context is 0, 1, one below, at, above k, and the longest."""
    return tuple(p for p in (-1, 0, k - 2, k - 1, k, k + 1, columns - 1) if -1 <= p < columns)


_KINDS = ("random", "equal", "ties", "signed-zeros", "relu", "infinite", "ascending", "descending", "low-byte")


# Attention


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


ROWS = 150  # history rows of an attention case
# One offset a space: below and above 2^31 and 2^32, and backwards.
SPACE_OFFSETS: Offsets = (-(5 << 31), 3 << 31, 7 << 33, -16)


def place_rows(bench: Bench, raw: np.ndarray) -> np.ndarray:
    """[4, rows] u64 references of rows [rows, row_bytes] u8: every row lies once in each space, in an order of the space's own."""
    rng = np.random.default_rng(41)
    refs = np.zeros((len(Space), len(raw)), np.uint64)
    for space in Space:
        order = rng.permutation(len(raw))
        memory = bench.put(raw[order])
        slots = np.argsort(order).astype(np.uint64)
        payloads = slots * np.uint64(raw.shape[1]) + np.uint64((memory.address - SPACE_OFFSETS[space]) % (1 << 64))
        refs[space] = payloads | np.uint64(space)
    return refs


def run_attend(case: Attending, device: Device) -> Comparison:
    """Against the reference, each row alone, and with every row read from one space: the same bits."""
    rng, rows, k = np.random.default_rng(3), len(case.counts), max(max(case.counts), 1)
    raw, _ = row_bits(draw(11, (ROWS, case.latent + case.rope), case.dtype), case.latent, case.row_format)
    q_latent = draw(12, (rows, case.heads, case.latent), case.dtype, case.spread)
    q = draw(13, (rows, case.heads, case.nope + case.rope), case.dtype, case.spread)
    chosen = [rng.integers(0, ROWS, count) for count in case.counts]  # any order, repeats allowed: the plan decides
    scale = (case.nope + case.rope) ** -0.5
    with Bench(device) as bench:
        refs = place_rows(bench, raw)
        mixed, hot = np.zeros((rows, k), np.uint64), np.zeros((rows, k), np.uint64)
        for r, p in enumerate(chosen):
            mixed[r, : len(p)] = refs[rng.integers(0, len(Space), len(p)), p]
            hot[r, : len(p)] = refs[Space.HOT, p]

        def attend(plan: np.ndarray, of: slice) -> Array:
            out = bench.poison(case.dtype, q_latent[of].shape)
            attention.attend(
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

        together = attend(mixed, slice(0, rows))
        history = row_values(raw, case.latent, case.row_format)
        want, size = reference.attend(q_latent, q[:, :, case.nope :], [history[p] for p in chosen], scale)
        result = compare("out", bench.read(together), round_to(want, case.dtype), case.dtype, size)
        bits = bench.bits(together)
        compare("all rows hot", bench.bits(attend(hot, slice(0, rows))), bits)
        for r in range(rows):
            compare(f"row {r} alone", bench.bits(attend(mixed, slice(r, r + 1)))[0], bits[r])
        return result


def run_scales(device: Device) -> Comparison:
    """Every finite f16 as the scale of a group, read through attention: with one row in the plan the output is its latent, exactly."""
    patterns = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)
    scales = patterns[np.isfinite(patterns.view(np.float16))].reshape(-1, 8)  # 63,488 patterns, 8 a row
    latent, rope, rows = 512, 8, len(scales)
    raw = np.zeros((rows, RowFormat.Q8G64.row_bytes(latent, rope)), np.uint8)
    raw[:, :latent] = np.resize(np.arange(1, 256), rows * latent).reshape(rows, latent)  # i8 1 to 127, -128 to -1
    raw[:, latent : latent + 16] = scales.view(np.uint8)
    with Bench(device) as bench:
        out = bench.poison(DType.F32, (rows, 1, latent))
        memory = bench.put(raw)
        plan = np.arange(rows, dtype=np.uint64)[:, None] * np.uint64(raw.shape[1]) + np.uint64(Space.LINEAR)
        q_latent, q = (bench.put(np.zeros((rows, 1, width), np.float32)) for width in (latent, rope))
        counts, offsets = bench.put(np.ones(rows, np.int32)), (0, 0, 0, memory.address)
        attention.attend(
            bench.stream, q_latent, q, bench.put(plan), counts, out, offsets=offsets, row_format=RowFormat.Q8G64, rope_offset=0, scale=1.0
        )
        return compare("latent", bench.read(out)[:, 0], row_values(raw, latent, RowFormat.Q8G64)[:, :latent])


_F32, _BF16, _Q8 = RowFormat.F32, RowFormat.BF16, RowFormat.Q8G64
_ATTENDINGS = (
    Attending("released-f32", 8, 512, 64, 192, DType.F32, _F32, (256, 1, 0)),
    Attending("released-bf16", 12, 512, 64, 192, DType.BF16, _BF16, (100, 17)),
    Attending("released-f32-q8g64", 8, 512, 64, 192, DType.F32, _Q8, (100, 1, 0, 9)),
    Attending("released-bf16-q8g64", 12, 512, 64, 192, DType.BF16, _Q8, (40, 17)),
    Attending("tiny", 4, 40, 16, 24, DType.F32, _F32, (64, 31, 8, 7, 9, 1, 2, 15, 16)),
    Attending("tiny-bf16", 4, 40, 16, 24, DType.BF16, _BF16, (64, 31, 8)),
    Attending("odd", 9, 37, 11, 4, DType.F32, _F32, (3, 0, 13)),  # 48 values: rows of 192 bytes
    Attending("narrow", 1, 3, 1, 1, DType.F32, _F32, (5, 150)),
    Attending("half-unit", 2, 16, 4, 0, DType.F32, _F32, (9,)),  # a row ends within a work-item's eight values
    Attending("q8g64-one-group", 3, 64, 23, 8, DType.F32, _Q8, (33, 8, 0)),  # rope starts at byte 66, a row ends within eight values
    Attending("q8g64-three-groups", 2, 192, 61, 0, DType.BF16, _Q8, (21,)),
    Attending("sharp", 3, 260, 4, 0, DType.F32, _F32, (90, 8), spread=20.0),
    Attending("no-rope", 2, 64, 0, 16, DType.F32, _F32, (21,)),
)


def _case(name: str, run: Callable[[Device], Comparison], thorough: bool = False) -> Case:
    return Case("selection" if not name.startswith("attend") else "attention", name, run, thorough)


CASES = [
    *(_case(f"index-score-{case.name}", partial(run_score, case)) for case in _SCORINGS),
    *(_case(f"topk-{kind}-k{k}", partial(run_topk, kind, k, around(k, 700), 700)) for kind in _KINDS for k in (1, 64, 256)),
    _case("topk-tiles", partial(run_topk, "ties", 2048, (2047, 2048, 2049, 4095, 4096, 6000), 6001)),
    _case("topk-9-rows", partial(run_topk, "relu", 33, tuple(range(28, 37)), 40)),
    _case("topk-million", partial(run_topk, "random", 2048, (1_048_575,), 1_048_576), thorough=True),
    _case("topk-million-equal", partial(run_topk, "equal", 2048, (1_048_575,), 1_048_576), thorough=True),
    *(_case(f"attend-{case.name}", partial(run_attend, case)) for case in _ATTENDINGS),
    _case("attend-every-scale", run_scales),
]
