"""Checks of a decode step's selection: scores, exact top-k with ties of every kind, plans, and the hot cache's round in two launches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np

from glm53.check import cases_selection as common
from glm53.check import reference_selection as reference
from glm53.check import reference_step_select as step_reference
from glm53.check.case import Bench, Case, draw
from glm53.check.cases_hotcache import SHAPE, SOURCE, TAG_LAST, TierCheck, counters, draw_tables, i32
from glm53.check.cases_selection import Histories, Scoring, fill_scores, lay_out
from glm53.check.cases_step import put_halves
from glm53.check.cases_weights import put_matrix
from glm53.check.compare import Comparison, compare, worst_of
from glm53.hip import Array, Device
from glm53.mem.extents import ExtentShape
from glm53.ops import step, step_experts, step_parts
from glm53.ops.hotcache import FetchList
from glm53.ops.matrix import Matrix, WeightFormat
from glm53.ops.rows import FetchPlanes, fetch_list_args
from glm53.ops.step_args import step_give_args
from glm53.ops.step_select import ARRIVAL_WORDS, Drawn, ExtentPlace, HotPlace, Selector, give_args, place_args
from glm53.spec import DType, Space

ROWS_MAX = 16


@contextmanager
def open_selector(bench: Bench, rows: int, context: int, k: int) -> Iterator[Selector]:
    """A selector whose scores and entries are poisoned, checked at its end: what must be zero between steps is."""
    selector = Selector.make(bench.device, rows, context, k, "check")
    try:
        for array in (selector.scores, selector.entries, selector.entry_counts):
            bench.stream.fill(array.address, 0xFF, array.nbytes)
        yield selector
        for name in ("histogram", "arrivals"):
            left = bench.read(getattr(selector, name))
            compare(f"{name} after the step", left, np.zeros_like(left))
    finally:
        selector.free()


# Scores


def run_score(case: Scoring, k: int, device: Device) -> Comparison:
    """Against the reference; f32 bit by bit against index_score; each row alone, in larger extents, on a grid of its own: the same bits."""
    with Bench(device) as bench:
        keys = [draw(7 + s, (case.planes, n, case.dim), case.dtype) for s, n in enumerate(case.contexts)]
        query, gate = draw(1, (len(case.rows), case.heads, case.dim), case.dtype), draw(2, (len(case.rows), case.heads))
        positions, columns = i32([p for _, p in case.rows]), max(case.contexts)
        histories = lay_out(bench, keys, case.extent_rows, case.dtype)
        got, histograms = score(bench, case, k, histories, query, gate, case.rows)
        want, scale = reference.index_scores(query, gate, [keys[s][case.plane] for s, _ in case.rows], positions, columns)
        scored = [r for r, p in enumerate(positions) if p >= k]
        result = compare("scores", got.view(np.float32)[scored], want[scored], DType.F32, scale[scored])
        for r, position in enumerate(positions):
            visible = position + 1 if position >= k else 0
            if visible < columns:
                compare(f"columns past row {r}", got[r, visible:], np.full(columns - visible, 0xFFFFFFFF, np.uint32))
            compare(f"histogram of row {r}", histograms[r], step_reference.histogram(got[r, :visible].view(np.float32)))
        if case.dtype is DType.F32:
            compare("index_score", got[scored], bench.bits(common.score(bench, case, histories, query, gate, case.rows))[scored])
        wider = lay_out(bench, keys, 2 * case.extent_rows, case.dtype)
        for r in scored:
            alone, _ = score(bench, case, k, wider, query[r : r + 1], gate[r : r + 1], case.rows[r : r + 1], 1 + 2 * r)
            compare(f"row {r} alone, larger extents", alone[0], got[r])
        return result


def score(
    bench: Bench,
    case: Scoring,
    k: int,
    histories: Histories,
    query: np.ndarray,
    gate: np.ndarray,
    rows: tuple[tuple[int, int], ...],
    blocks: int | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """(bits of the scores [rows, columns], histograms [rows, bins]); then ends the step, so that the selector is as it was."""
    sessions, positions = bench.put(i32([s for s, _ in rows])), bench.put(i32([p for _, p in rows]))
    with open_selector(bench, len(rows), max(case.contexts), k) as selector:
        tables = (histories.tables, sessions, positions, histories.shape)
        selector.score(bench.stream, bench.put(query, case.dtype), bench.put(gate), *tables, case.plane, blocks)
        found = bench.bits(selector.scores)[:, : max(case.contexts)], bench.read(selector.histogram)
        selected, counts = bench.poison(DType.I32, (len(rows), k)), bench.poison(DType.I32, (len(rows),))
        selector.topk(bench.stream, positions, selected, counts)
    return found


_SCORINGS = (
    (Scoring("released-f32", 32, 128, DType.F32, ((0, 299), (1, 63), (0, -1), (1, 64)), (300, 65)), 64),
    (Scoring("released-bf16", 32, 128, DType.BF16, ((0, 130), (1, 64), (1, 65), (1, 5)), (200, 66), planes=3, plane=2), 20),
    (Scoring("few-heads-bf16", 20, 128, DType.BF16, ((0, 699), (0, 15), (0, 16)), (700,)), 12),
    (Scoring("tiny", 32, 32, DType.F32, tuple((r % 3, (29 * r) % 70) for r in range(9)), (70, 71, 128), planes=2, plane=1), 7),
    (Scoring("odd", 5, 20, DType.F32, ((0, 31), (0, 32), (0, 33), (1, 127), (1, 128)), (34, 129)), 1),
    (Scoring("most-heads", 64, 64, DType.BF16, ((0, 3), (0, 63)), (64,)), 2),
)


# Top-k


def choose(bench: Bench, selector: Selector, scores: np.ndarray, positions: np.ndarray, blocks: int) -> tuple[np.ndarray, np.ndarray]:
    """(selected, counts) of given scores: what step_score leaves is written from here."""
    k, columns = selector.k, selector.scores.shape[1]
    held = np.full((len(scores), columns), np.inf, np.float32)  # would be chosen if it were read
    histograms = np.zeros(selector.histogram.shape, np.uint32)
    for r, position in enumerate(positions):
        held[r, : position + 1] = scores[r, : position + 1]
        if position >= k:
            histograms[r] = step_reference.histogram(scores[r, : position + 1])
    selector.scores.upload(held, bench.stream)
    selector.histogram.upload(histograms, bench.stream)
    selected, counts = bench.poison(DType.I32, (len(scores), k)), bench.poison(DType.I32, (len(scores),))
    selector.topk(bench.stream, bench.put(positions), selected, counts, blocks=blocks)
    return bench.read(selected), bench.read(counts)


def run_topk(kind: str, k: int, positions: tuple[int, ...], columns: int, device: Device) -> Comparison:
    """Twice with different scores, so that what one step leaves behind shows in the next; by one block a row, then by five."""
    with Bench(device) as bench, open_selector(bench, len(positions), columns, k) as selector:
        done = []
        for seed, blocks in ((k + columns, 1), (k, 5)):
            scores = fill_scores(kind, len(positions), columns, seed)
            want, want_counts = reference.topk(scores, i32(positions), k)
            selected, counts = choose(bench, selector, scores, i32(positions), blocks)
            done += [compare("counts", counts, want_counts), compare("selected", selected, want)]
        return worst_of(*done)


_KINDS = ("random", "equal", "ties", "signed-zeros", "relu", "infinite", "ascending", "descending", "low-byte")


def product_beside(bench: Bench) -> tuple[Array, Matrix, Array]:
    """x, weight and y of a product that carries a part."""
    return bench.put(np.ones((1, 64), np.float32)), Matrix.plain(bench.put(np.ones((4, 64), np.float32))), bench.poison(DType.F32, (1, 4))


# Both launches, with plans


def run_select(rows: int, dtype: DType, device: Device) -> Comparison:
    """Selection and plan in extents of `rows` rows: exact for the scores that were computed; each row alone gives the same."""
    contexts, k, heads, dim = (900, 333), 48, 32, 128
    places = [(r % 2, (577 * r + 41) % contexts[r % 2] if r % 5 else -(r % 2)) for r in range(rows)]
    addresses, shape = draw_tables(2, max(contexts)), ExtentShape(64, 3, 656)
    with Bench(device) as bench:
        histories = lay_out(bench, [draw(3 + s, (1, n, dim), dtype) for s, n in enumerate(contexts)], 64, dtype)
        query, gate = draw(1, (rows, heads, dim), dtype), draw(2, (rows, heads))
        place = ExtentPlace(bench.put(addresses), shape)
        x, weight, y = product_beside(bench)

        def run(first: int, stop: int, selector: Selector) -> list[np.ndarray]:
            count = stop - first
            sessions, positions = (bench.put(i32([p[i] for p in places[first:stop]])) for i in (0, 1))
            out = bench.poison(DType.I32, (count, k)), bench.poison(DType.I32, (count,)), bench.poison(DType.U64, (count, k))
            arrays = bench.put(query[first:stop], dtype), bench.put(gate[first:stop]), histories.tables, sessions, positions
            selector.score(bench.stream, *arrays, histories.shape, 0)
            selector.topk(bench.stream, positions, *out[:2])
            args = place_args(*out[:2], sessions, place, out[2])
            step.gemv(bench.stream, x, [step.Segment(weight, y)], part=step_parts.PlacePart(args, count))
            return [bench.read(array) for array in out]

        with open_selector(bench, ROWS_MAX, max(contexts), k) as selector:
            selected, counts, plan = run(0, rows, selector)
            scores = bench.read(selector.scores)
            for r in range(rows):
                for name, whole, alone in zip(("selected", "counts", "plan"), (selected, counts, plan), run(r, r + 1, selector), strict=True):
                    compare(f"{name} of row {r} alone", alone[0], whole[r])
        want, want_counts = reference.topk(np.where(np.isnan(scores[:rows]), 0, scores[:rows]), i32([p for _, p in places]), k)
        want_plan = np.zeros((rows, k), np.uint64)
        for r, (session, _) in enumerate(places):
            p = want[r, : want_counts[r]]
            want_plan[r, : len(p)] = addresses[session, p // 64] + (p % 64 * shape.row_bytes + Space.EXTENT).astype(np.uint64)
        return worst_of(compare("counts", counts, want_counts), compare("selected", selected, want), compare("plan", plan, want_plan))


# The hot cache's round by part GIVE


class StepTierCheck(TierCheck):
    """A `TierCheck` whose rounds run as in a decode step: step_topk with the selections given to it, then GIVE beside a product."""

    def __init__(self, bench: Bench, **sizes: int):
        super().__init__(bench, **sizes)
        rows, k = sizes["rows_max"], sizes["k"]
        self.selector = Selector.make(bench.device, rows, k + 1, k, "check")
        self.selector.scores.upload(np.zeros(self.selector.scores.shape, np.float32))
        self.histogram = np.tile(step_reference.histogram(np.zeros(k + 1, np.float32)), (rows, 1))
        self.index, self.found, self.full = bench.put(np.zeros(1, np.uint32)), bench.poison(DType.I32, (rows, k)), bench.put(i32([k] * rows))
        self.arrivals = bench.put(np.zeros((sizes["sessions"] + 1, ARRIVAL_WORDS), np.uint32))
        self.x, self.weight, self.y = product_beside(bench)

    def launch_round(self, group: int, selected: Array, counts: Array, sessions: Array, round_starts: Array, plan: Array) -> None:
        stream, lengths = self.bench.stream, counts.numpy(self.bench.stream)
        place = HotPlace(self.device_states, self.slots, group, self.ring_rows, SHAPE.row_bytes)
        found, positions = self.found.view(selected.shape), self.full.view(counts.shape)
        self.selector.histogram.upload(self.histogram, stream)
        self.selector.topk(stream, positions, found, counts, Drawn(selected, self.index))
        compare("selected", self.bench.read(found), self.bench.read(selected))
        compare("counts", self.bench.read(counts), lengths)
        args = give_args(found, counts, sessions, round_starts, self.tables, place, plan, self.fetch, SOURCE, self.arrivals)
        self.launch_parts(args, len(lengths))
        compare("arrivals", self.bench.read(self.arrivals), np.zeros(self.arrivals.shape, np.uint32))

    def launch_parts(self, args: step_give_args, rows: int) -> None:
        step.gemv(self.bench.stream, self.x, [step.Segment(self.weight, self.y)], part=step_parts.GivePart(args, rows))
        compare("the product beside", self.bench.read(self.y), np.full((1, 4), 64, np.float32))

    def close(self) -> None:
        self.selector.free()


class StoredTierCheck(StepTierCheck):
    """GIVE beside products that tell when they are stored, and behind them products of their heads that wait for that alone, beside a short FETCH."""

    HEADS, COLUMNS, LATENT = 8, 128, 64

    def __init__(self, bench: Bench, **sizes: int):
        super().__init__(bench, **sizes)
        rows, width = sizes["rows_max"], self.HEADS * self.COLUMNS
        self.x = bench.put(draw(1, (rows, 1024)), DType.BF16)
        self.weight, _ = put_matrix(bench, draw(2, (width, 1024)), WeightFormat.Q8G64)
        self.heads_weight, _ = put_matrix(bench, draw(3, (self.HEADS, self.LATENT, self.COLUMNS)), WeightFormat.Q8G64)
        self.q = bench.poison(DType.BF16, (rows, width))
        self.latent = bench.poison(DType.BF16, (rows, self.HEADS, self.LATENT))
        self.want = [bench.read(array) for array in self.run(None, None)]
        u64, i32_ = DType.U64, DType.I32
        self.none = FetchList(
            bench.poison(u64, (rows * sizes["k"],)), bench.poison(u64, (rows * sizes["k"],)), bench.poison(i32_, (1,)), bench.put(i32([0]))
        )
        self.tells = bench.put(np.zeros(2, np.uint32))

    def run(self, give: step_parts.GivePart | None, fetch: step_parts.FetchPart | None) -> tuple[Array, Array]:
        stream, rows = self.bench.stream, self.x.shape[0]
        step.gemv(stream, self.x, [step.Segment(self.weight, self.q)], part=give)
        step.per_head(stream, self.q.view((rows, self.HEADS, self.COLUMNS)), self.heads_weight, self.latent, part=fetch)
        return self.q, self.latent

    def launch_parts(self, args: step_give_args, rows: int) -> None:
        for array in (self.q, self.latent):
            self.bench.stream.fill(array.address, 0xFF, array.nbytes)
        planes = FetchPlanes(self.bench.poison(DType.U8, (1, 1, 16)), 0, 16, 16, 16)
        fetch = step_parts.FetchPart(fetch_list_args(self.none, self.bench.put(i32([0, 1])), range(1), planes, self.k, 3), 3, 1, self.tells)
        got = self.run(step_parts.GivePart(args, rows, self.tells), fetch)
        for name, array, want in zip(("products", "of heads"), got, self.want, strict=True):
            compare(name, self.bench.read(array), want)
        compare("tells", self.bench.read(self.tells)[:1], np.zeros(1, np.uint32))


@contextmanager
def open_tier(bench: Bench, kind: type[StepTierCheck], **sizes: int) -> Iterator[StepTierCheck]:
    check = kind(bench, **sizes)
    try:
        yield check
    finally:
        check.close()


def run_rules(device: Device) -> Comparison:
    """The rounds of cases_hotcache.run_rules, by the other path."""
    sizes = {"sessions": 2, "groups": 2, "positions": 128, "slots": 6, "ring_rows": 8, "k": 8, "rows_max": 4, "tag": TAG_LAST - 2}
    with Bench(device) as bench, open_tier(bench, StepTierCheck, **sizes) as check:
        check.plan_round(1, {0: [[0, 5, 100]]})
        check.finish([0])
        check.set_state(0, full=False, boundary=96)
        check.plan_round(1, {0: [[1, 2, 100], [2, 3, 101]]})
        compare("counters", i32(counters(check, 0, 1)), i32([0, 3, 5, 1, 0, 0]))
        check.finish([0])
        check.plan_round(1, {0: [[3, 10, 11, 12], [1, 2]]})
        check.finish([0])
        check.plan_round(1, {0: [[20], [1]]})
        compare("counters", i32(counters(check, 0, 1)), i32([4, 7, 5, 1, 1, 0]))
        check.finish([0])
        result = check.plan_round(1, {0: [list(range(30, 38)), [30, 37, 1], [1, 38]]}, padding=1)
        compare("counters", i32(counters(check, 0, 1)), i32([6, 12, 5, 3, 6, 4]))
        return result


def run_wide(k: int, rows: int, slots: int, device: Device, kind: type[StepTierCheck] = StepTierCheck) -> Comparison:
    """Selections beyond many work-items and a tile of slots: all missed, all found, then half of them moved on."""
    sizes = {"sessions": 1, "groups": 1, "positions": 8 * k + 8, "slots": slots, "ring_rows": 64, "k": k, "rows_max": rows, "tag": 1}
    with Bench(device) as bench, open_tier(bench, kind, **sizes) as check:
        check.set_state(0, full=False, boundary=8 * k)
        for shift in (0, 0, k // 2):
            selected = [[3 * i + shift + r for i in range(k - r)] for r in range(rows)]
            result = check.plan_round(0, {0: selected})
            check.finish([0])
        return result


def add_wide(bench: Bench, part: step_parts.FetchPart | None) -> Array:
    """y = residual + x @ w^T, two rows of 2,112 values and 200 columns."""
    x, residual = bench.put(draw(1, (2, 2112)), DType.BF16), bench.put(draw(2, (2, 200)), DType.BF16)
    weight, _ = put_matrix(bench, draw(3, (200, 2112)), WeightFormat.Q8G64)
    y = bench.poison(DType.BF16, residual.shape)
    step.gemv(bench.stream, x, [step.Segment(weight, y, step.Epilogue.RESIDUAL)], residual=residual, halves=put_halves(bench, *y.shape), part=part)
    return y


def act_of_experts(bench: Bench, part: step_parts.FetchPart | None, dtype: DType = DType.BF16) -> Array:
    """Routed experts of three rows of 1,088 values, two of five experts a row, 72 columns."""
    x, ids = bench.put(draw(1, (3, 1088)), dtype), bench.put(i32([[4, 1], [1, 0], [2, 4]]))
    weight, _ = put_matrix(bench, draw(2, (5, 144, 1088)), WeightFormat.Q4G64)
    act = bench.poison(dtype, (3, 2, 72))
    step_experts.experts(bench.stream, x, ids, weight, act, part)
    return act


# What part FETCH runs beside; the outputs are the same without it.
_BESIDE: dict[str, Callable[[Bench, step_parts.FetchPart | None], Array]] = {
    "added": add_wide,
    "experts": act_of_experts,
    "experts-f32": partial(act_of_experts, dtype=DType.F32),
}


def run_fetch_part(row_bytes: int, counts: tuple[int, ...], blocks: int, device: Device, beside: str | None = None) -> Comparison:
    """Part FETCH: the lists of all rounds, dealt over few blocks; planes 1 and 2 of host rows into hot slots and staging rows; all bytes compared.

    beside: one of _BESIDE.
    """
    k, layers, source_rows = 12, 3, 50
    rng, starts = np.random.default_rng(row_bytes + blocks), i32([2 * i for i in range(len(counts) + 1)])
    history = rng.integers(0, 255, (source_rows, layers, row_bytes)).astype(np.uint8)
    places, rows = rng.permutation(2 * k * len(counts)), rng.integers(0, source_rows, 2 * k * len(counts))
    want = np.full((2, layers - 1, len(places), row_bytes), 0xFF, np.uint8)  # hot, staging
    sources, targets = (np.full(len(places), 0xDEAD, np.uint64) for _ in range(2))
    with Bench(device) as bench, device.host_alloc(history.nbytes, category="check") as host:
        host.array[:] = history.reshape(-1)
        hot, staging = bench.poison(DType.U8, (layers, *want.shape[2:])), bench.poison(DType.U8, want.shape[1:])
        for i, count in enumerate(counts):
            for entry in range(int(starts[i]) * k, int(starts[i]) * k + count):
                staged, slot = entry % 3 == 0, int(places[entry])
                sources[entry] = host.device_address + int(rows[entry]) * layers * row_bytes
                targets[entry] = slot * row_bytes + (int(Space.STAGING) if staged else hot.address)
                want[int(staged), :, slot] = history[rows[entry], 1:]
        fetch = FetchList(bench.put(sources), bench.put(targets), bench.put(np.zeros(1, np.int32)), bench.put(i32(counts)))
        plane_bytes = want[0, 0].nbytes
        planes = FetchPlanes(staging, 1, plane_bytes, plane_bytes, row_bytes)
        part = step_parts.FetchPart(fetch_list_args(fetch, bench.put(starts), range(1, layers), planes, k, blocks), blocks, len(counts))
        if beside is not None:
            outputs = [bench.read(_BESIDE[beside](bench, some)) for some in (None, part)]
            compare(beside, outputs[1], outputs[0])
        else:
            x, weight, y = product_beside(bench)
            step.gemv(bench.stream, x, [step.Segment(weight, y)], part=part)
        compare("plane 0", bench.read(hot)[0], np.full_like(want[0, 0], 0xFF))
        return worst_of(compare("hot", bench.read(hot)[1:], want[0]), compare("staging", bench.read(staging), want[1]))


def _case(name: str, run: Callable[[Device], Comparison], thorough: bool = False) -> Case:
    return Case("step-select", name, run, thorough)


CASES = [
    *(_case(f"score-{case.name}", partial(run_score, case, k)) for case, k in _SCORINGS),
    *(_case(f"topk-{kind}", partial(run_topk, kind, 48, common.around(48, 700), 700)) for kind in _KINDS),
    _case("topk-k1", partial(run_topk, "random", 1, (0, 1, 77), 96)),
    _case("topk-odd-k", partial(run_topk, "ties", 37, (36, 37, 299), 300)),
    _case("topk-k2048-9000", partial(run_topk, "random", 2048, (8999, 2048), 9000)),
    _case("topk-equal-9000", partial(run_topk, "equal", 2048, (8999,), 9000)),
    _case("topk-million", partial(run_topk, "random", 2048, (1_048_575,), 1_048_576), thorough=True),
    _case("topk-million-equal", partial(run_topk, "equal", 2048, (1_048_575,), 1_048_576), thorough=True),
    *(_case(f"select-{dtype.label}-r{rows}", partial(run_select, rows, dtype)) for rows in (1, 2, 3, 4, 8, 16) for dtype in (DType.F32, DType.BF16)),
    *(
        _case(f"fetch-part-{size}-b{blocks}", partial(run_fetch_part, size, (5, 0, 24, 1, 3), blocks))
        for size, blocks in ((656, 3), (1152, 1), (16, 4))
    ),
    *(_case(f"fetch-part-656-{beside}", partial(run_fetch_part, 656, (5, 0, 24, 1, 3), 16, beside=beside)) for beside in _BESIDE),
    *(_case(f"fetch-part-656-{beside}-one-list", partial(run_fetch_part, 656, (24,), 7, beside=beside)) for beside in _BESIDE),
    _case("give-rules", run_rules),
    _case("give-wide-k300", partial(run_wide, 300, 3, 2000)),
    _case("give-wide-k1025-overflow", partial(run_wide, 1025, 2, 1030)),
    _case("give-wide-k2048-one-row", partial(run_wide, 2048, 1, 3000)),
    _case("give-wide-k1025-one-row-overflow", partial(run_wide, 1025, 1, 700)),
    _case("give-stored-one-row", partial(run_wide, 2048, 1, 3000, kind=StoredTierCheck)),
    _case("give-stored-rows", partial(run_wide, 300, 3, 2000, kind=StoredTierCheck)),
]
