"""Checks of the selection of a pair: keys and scores of each side, the lists of prompt rows and of decode rows, merges, words of the mailboxes.

Whatever the sides do together is compared with the single device: its scores bit by bit, its selection.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from glm53.check import reference_merge as reference
from glm53.check import reference_selection
from glm53.check import reference_step_select as step_reference
from glm53.check.case import Bench, Case, draw
from glm53.check.cases_selection import Histories, Scoring, fill_scores, i32, lay_out
from glm53.check.cases_step_select import open_selector
from glm53.check.compare import Comparison, compare, worst_of
from glm53.hip import Array, Device
from glm53.mem.extents import ExtentShape
from glm53.ops import history, merge, selection
from glm53.ops.merge import Lists
from glm53.ops.step_select import Drawn, Selector
from glm53.spec import DType, Shard

SIDES = (Shard(0, 2), Shard(1, 2))
EXTENT = 64  # rows
POLLS = 1000


def around_extents(k: int, columns: int) -> tuple[int, ...]:
    """Positions at k, and right before, at and behind the borders of the first extents."""
    borders = (-1, 0, k - 1, k, k + 1, columns - 1, *(e * EXTENT + d for e in (1, 2, 3, 4) for d in (-1, 0, 1)))
    return tuple(dict.fromkeys(p for p in borders if -1 <= p < columns))


# Keys and scores


def run_append(dtype: DType, device: Device) -> Comparison:
    """Rows of two sessions at extent borders and padding, on each side: those it holds at their rows, everything else as it was."""
    width, extents = 24, 3
    shape = ExtentShape(EXTENT, 2, width * dtype.item_bytes)
    sessions, positions = i32([0, 0, 1, 1, 0, 1, 0, 1, 0]), i32([0, 63, 64, 127, 128, 191, 192, -1, 320])
    x, done = draw(5, (len(positions), width), dtype), []
    for share in SIDES:
        with Bench(device) as bench:
            memory = bench.poison(DType.U8, (2 * extents, shape.planes, EXTENT, shape.row_bytes))
            addresses = (memory.address + np.arange(2 * extents) * shape.extent_bytes).astype(np.uint64).reshape(2, extents)
            dx = bench.put(x, dtype)
            history.append(bench.stream, dx, bench.put(addresses), bench.put(sessions), bench.put(positions), shape, plane=1, share=share)
            raw, want = bench.bits(dx).view(np.uint8).reshape(len(x), -1), np.full(memory.shape, 0xFF, np.uint8)
            for row, session, position in zip(raw, sessions, positions, strict=True):
                if position >= 0 and position // EXTENT % 2 == share.index:
                    q = np.searchsorted(reference.held_positions(share, EXTENT, 1000), position)
                    want[session * extents + q // EXTENT, 1, q % EXTENT] = row
            done.append(compare(f"keys of side {share.index}", bench.read(memory), want))
    return worst_of(*done)


def side_store(bench: Bench, keys: list[np.ndarray], share: Shard, extent_rows: int, dtype: DType) -> Histories:
    """A side's tables and keys; a session of which it holds nothing has one extent of NaN."""
    held = [session[:, reference.held_positions(share, extent_rows, session.shape[1])] for session in keys]
    nothing = np.full((keys[0].shape[0], 1, keys[0].shape[2]), np.nan, np.float32)
    return lay_out(bench, [session if session.shape[1] else nothing for session in held], extent_rows, dtype)


def run_scores(case: Scoring, k: int, device: Device) -> Comparison:
    """Both kernels on both sides: the bits of the single device at the positions that the side holds, all other columns as they were."""
    positions, context = i32([p for _, p in case.rows]), max(case.contexts)
    done = []
    with Bench(device) as bench:
        keys = [draw(7 + s, (case.planes, n, case.dim), case.dtype) for s, n in enumerate(case.contexts)]
        query = bench.put(draw(1, (len(case.rows), case.heads, case.dim), case.dtype), case.dtype)
        gate, places = bench.put(draw(2, (len(case.rows), case.heads))), (bench.put(i32([s for s, _ in case.rows])), bench.put(positions))

        def scores_of(store: Histories, share: Shard) -> list[np.ndarray]:
            """Bits of the scores of index_score, of step_score, and its histograms."""
            columns = max(share.rows_of(context, case.extent_rows), 1)
            out = bench.poison(DType.F32, (len(case.rows), columns))
            fixed = query, gate, store.tables, *places
            selection.index_score(bench.stream, *fixed, out, store.shape, plane=case.plane, context=context, share=share)
            with open_selector(bench, len(case.rows), columns, k) as selector:
                selector.score(bench.stream, *fixed, store.shape, case.plane, share=share)
                found = bench.bits(selector.scores)[:, :columns], bench.read(selector.histogram)
                selector.reset(bench.stream)
            return [bench.bits(out), *found]

        whole = scores_of(lay_out(bench, keys, case.extent_rows, case.dtype), Shard())
        for share in SIDES:
            got = scores_of(side_store(bench, keys, share, case.extent_rows, case.dtype), share)
            for r, position in enumerate(positions):
                held = reference.held_positions(share, case.extent_rows, position + 1)
                scored = len(held) if position >= k else 0
                for name, bits, single, visible in zip(("index_score", "step_score"), got[:2], whole[:2], (len(held), scored), strict=True):
                    want = np.full_like(bits[r], 0xFFFFFFFF)
                    want[:visible] = single[r, held[:visible]]
                    done.append(compare(f"{name} of row {r}, side {share.index}", bits[r], want))
                compare(f"histogram of row {r}", got[2][r], step_reference.histogram(got[1][r, :scored].view(np.float32)))
    return worst_of(*done)


# Lists and merges


def local_scores(scores: np.ndarray, positions: np.ndarray, share: Shard, columns: int) -> np.ndarray:
    """A side's scores [rows, columns]; what it may not read is +inf and would be chosen."""
    held = reference.held_positions(share, EXTENT, scores.shape[1])
    local = np.full((len(scores), columns), np.inf, np.float32)
    for r, position in enumerate(positions):
        n = share.rows_of(int(position) + 1, EXTENT)
        local[r, :n] = scores[r, held[:n]]
    return local


def outputs(bench: Bench, rows: int, k: int) -> tuple[Array, Array]:
    return bench.poison(DType.I32, (rows, k)), bench.poison(DType.I32, (rows,))


def compare_lists(bench: Bench, lists: tuple[Array, Array], want: tuple[np.ndarray, np.ndarray]) -> Comparison:
    """Entries past a count stay as they were: poison."""
    past = np.arange(want[0].shape[1]) >= want[1][:, None]
    return worst_of(
        compare("list counts", bench.read(lists[1]), want[1]),
        compare("entries", bench.read(lists[0]), np.where(past, np.uint64(0xFFFFFFFFFFFFFFFF), want[0])),
    )


def run_prompt(kind: str, k: int, positions: tuple[int, ...], columns: int, device: Device) -> Comparison:
    """topk on each side, then the merge as each side sees it: the selection of the whole."""
    scores, done = fill_scores(kind, len(positions), columns, k + columns), []
    selected_want, counts_want = reference_selection.topk(scores, i32(positions), k)
    with Bench(device) as bench:
        at = bench.put(i32(positions))
        lists = []
        for share in SIDES:
            local = local_scores(scores, i32(positions), share, max(share.rows_of(columns, EXTENT), 1))
            out = bench.poison(DType.U64, (len(positions), k)), bench.poison(DType.I32, (len(positions),))
            selection.topk(bench.stream, bench.put(local), at, *out, share=share, extent_rows=EXTENT)
            done.append(compare_lists(bench, out, reference.local_lists(scores, i32(positions), k, share, EXTENT)))
            lists.append(out)
        for side in (0, 1):
            selected, counts = outputs(bench, len(positions), k)
            merge.merge(bench.stream, Lists(*lists[side], at, selected, counts), *lists[1 - side])
            done += [compare("counts", bench.read(counts), counts_want), compare("selected", bench.read(selected), selected_want)]
    return worst_of(*done)


def put_scores(bench: Bench, selector: Selector, local: np.ndarray, positions: np.ndarray, share: Shard) -> None:
    """Scores of a side as step_score leaves them."""
    held, histograms = np.full((len(local), selector.scores.shape[1]), np.inf, np.float32), np.zeros(selector.histogram.shape, np.uint32)
    held[:, : local.shape[1]] = local
    for r, position in enumerate(positions):
        if position >= selector.k:
            histograms[r] = step_reference.histogram(local[r, : share.rows_of(int(position) + 1, EXTENT)])
    selector.scores.upload(held, bench.stream)
    selector.histogram.upload(histograms, bench.stream)


def step_lists(bench: Bench, selector: Selector, local: np.ndarray, positions: np.ndarray, share: Shard, blocks: int) -> tuple[Array, Array]:
    """Lists of step_topk."""
    put_scores(bench, selector, local, positions, share)
    out = bench.poison(DType.U64, (len(local), selector.k)), bench.poison(DType.I32, (len(local),))
    selector.topk(bench.stream, bench.put(positions), *out, blocks=blocks, share=share, extent_rows=EXTENT)
    return out


def run_step(kind: str, k: int, positions: tuple[int, ...], columns: int, device: Device) -> Comparison:
    """step_topk on each side, twice with different scores, by one block a row, then by five."""
    done = []
    with Bench(device) as bench:
        for share in SIDES:
            local_columns = max(share.rows_of(columns, EXTENT), 1)
            with open_selector(bench, len(positions), local_columns, k) as selector:
                for seed, blocks in ((k + columns, 1), (k, 5)):
                    scores = fill_scores(kind, len(positions), columns, seed)
                    local = local_scores(scores, i32(positions), share, local_columns)
                    lists = step_lists(bench, selector, local, i32(positions), share, blocks)
                    done.append(compare_lists(bench, lists, reference.local_lists(scores, i32(positions), k, share, EXTENT)))
    return worst_of(*done)


def run_drawn(device: Device) -> Comparison:
    """Drawn selections take the place of what is merged, in rows that are not the identity; draws wrap around."""
    k, positions, draws = 20, i32([5, 300, 20, 19, 250]), 3
    rng = np.random.default_rng(6)
    drawn = np.full((draws, k), -1, np.int32)
    for i, count in enumerate((20, 7, 0)):
        drawn[i, :count] = np.sort(rng.choice(20, count, replace=False))
    scores = fill_scores("random", len(positions), 301, 4)
    want, want_counts = reference_selection.topk(scores, positions, k)
    for r, position in enumerate(positions):
        if position >= k:
            want[r] = drawn[(8 + r) % draws]
            want_counts[r] = (want[r] >= 0).sum()
    with Bench(device) as bench:
        lists = [[bench.put(array) for array in reference.local_lists(scores, positions, k, share, EXTENT)] for share in SIDES]
        selected, counts = outputs(bench, len(positions), k)
        given = Drawn(bench.put(drawn), bench.put(np.array([8], np.uint32)))
        merge.merge(bench.stream, Lists(lists[0][0], lists[0][1], bench.put(positions), selected, counts, given), lists[1][0], lists[1][1])
        return worst_of(compare("counts", bench.read(counts), want_counts), compare("selected", bench.read(selected), want))


# Words of a mailbox


def run_exchange(kind: str, k: int, positions: tuple[int, ...], columns: int, steps: int, number: int, device: Device) -> Comparison:
    """The exchange of each side beside words that are already there: what it posts, what it selects. steps: in a row, numbers from `number` on."""
    rows, at, done = len(positions), i32(positions), []
    capacity = merge.words(rows, k) + 5
    stale = np.uint64(0xFFFFFFFFFFFFFFFF)  # number -1: a word that has not come
    with Bench(device) as bench:
        error = bench.put(np.zeros(1, np.uint32))
        for step in range(number, number + steps):
            scores = fill_scores(kind, rows, columns, step % 1000)
            want = reference_selection.topk(scores, at, k)
            sent = [reference.mailbox_words(*reference.local_lists(scores, at, k, share, EXTENT), step % (1 << 32)) for share in SIDES]
            first = step % 2 * capacity
            for side in (0, 1):
                lists = reference.local_lists(scores, at, k, SIDES[side], EXTENT)
                boxes = [np.full(2 * capacity, stale), np.full(2 * capacity, stale)]
                for box, (words, posted) in zip(boxes, (sent[side], sent[1 - side]), strict=True):
                    box[first : first + len(words)][posted] = words[posted]
                outbox, inbox, counter = (
                    bench.poison(DType.U64, (2 * capacity,)),
                    bench.put(boxes[1]),
                    bench.put(np.array([step - 1], np.uint64).astype(np.uint32)),
                )
                selected, counts = outputs(bench, rows, k)
                own = Lists(bench.put(lists[0]), bench.put(lists[1]), bench.put(at), selected, counts)
                merge.exchange(bench.stream, own, outbox.address, inbox.address, counter, 1, 1, capacity, error, POLLS)
                done += [compare("selected", bench.read(selected), want[0]), compare("counts", bench.read(counts), want[1])]
                compare("posted words", bench.read(outbox), boxes[0])
        return worst_of(*done, compare("error", bench.read(error), np.zeros(1, np.uint32)))


def run_silence(device: Device) -> Comparison:
    """One word of one row does not come: the error, and that row selects nothing; rows beside it and identities are right. Later waits ask once."""
    k, positions = 9, i32([100, 4, 200])
    scores = fill_scores("random", 3, 201, 1)
    want = reference_selection.topk(scores, positions, k)
    words, posted = reference.mailbox_words(*reference.local_lists(scores, positions, k, SIDES[1], EXTENT), 2)
    capacity, done = merge.words(3, k), []
    with Bench(device) as bench:
        own = [bench.put(array) for array in reference.local_lists(scores, positions, k, SIDES[0], EXTENT)]
        error, counter = bench.put(np.zeros(1, np.uint32)), bench.put(np.ones(1, np.uint32))
        outbox = bench.poison(DType.U64, (2 * capacity,))
        for missing in (3, k + 3, 2 * k):  # a key, a position, the count
            box = np.zeros(2 * capacity, np.uint64)
            box[:capacity][posted] = words[posted]
            box[missing] = 0
            selected, counts = outputs(bench, 3, k)
            lists = Lists(own[0], own[1], bench.put(positions), selected, counts)
            merge.exchange(bench.stream, lists, outbox.address, bench.put(box).address, counter, 1, 1, capacity, error, POLLS)
            nothing, no_count = want[0].copy(), want[1].copy()
            nothing[0], no_count[0] = -1, 0
            done += [compare("selected", bench.read(selected), nothing), compare("counts", bench.read(counts), no_count)]
            done.append(compare("error", bench.read(error), np.array([2], np.uint32)))
        return worst_of(*done)


def _case(name: str, run: Callable[[Device], Comparison], thorough: bool = False) -> Case:
    return Case("merge", name, run, thorough)


_SCORINGS = (
    (Scoring("released-f32", 32, 128, DType.F32, ((0, 299), (1, 63), (0, -1), (1, 64), (0, 128)), (300, 65)), 64),
    (Scoring("released-bf16", 32, 128, DType.BF16, ((0, 130), (1, 64), (1, 65), (1, 5), (0, 699)), (700, 66), planes=3, plane=2), 20),
    (Scoring("tiny", 32, 32, DType.F32, tuple((r % 3, (29 * r) % 70) for r in range(9)), (70, 71, 192), planes=2, plane=1), 7),
    (Scoring("first-extent", 5, 20, DType.F32, ((0, 31), (0, 63)), (64,)), 3),
)
_KINDS = ("random", "equal", "ties", "signed-zeros", "relu", "infinite", "ascending", "descending", "low-byte")
_MANY = around_extents(48, 700)

CASES = [
    *(_case(f"append-{dtype.label}", partial(run_append, dtype)) for dtype in (DType.F32, DType.BF16)),
    *(_case(f"scores-{case.name}", partial(run_scores, case, k)) for case, k in _SCORINGS),
    *(_case(f"prompt-{kind}", partial(run_prompt, kind, 48, _MANY, 700)) for kind in _KINDS),
    *(_case(f"step-{kind}", partial(run_step, kind, 48, _MANY, 700)) for kind in _KINDS),
    *(_case(f"exchange-{kind}", partial(run_exchange, kind, 48, (699, 48, 64, 47, 300), 700, 2, 5)) for kind in _KINDS),
    _case("prompt-k1", partial(run_prompt, "ties", 1, around_extents(1, 300), 300)),
    _case("prompt-odd-k", partial(run_prompt, "ties", 37, around_extents(37, 300), 300)),
    _case("prompt-k130", partial(run_prompt, "ties", 130, around_extents(130, 330), 330)),
    _case("prompt-k2048", partial(run_prompt, "random", 2048, (2047, 2048, 2111, 2112, 3000, 5000), 5001)),
    _case("prompt-equal-k2048", partial(run_prompt, "equal", 2048, (2048, 4500), 5001)),
    _case("step-k2048", partial(run_step, "random", 2048, (2048, 2200, 8999), 9000)),
    _case("step-equal-k2048", partial(run_step, "equal", 2048, (8999,), 9000)),
    _case("step-k1", partial(run_step, "ties", 1, around_extents(1, 300), 300)),
    _case("exchange-k1", partial(run_exchange, "ties", 1, (0, 1, 63, 64, 299), 300, 2, 8)),
    _case("exchange-k2048", partial(run_exchange, "random", 2048, (8999, 2048), 9000, 1, 1)),
    _case("exchange-wraps", partial(run_exchange, "ties", 33, (140, 7), 150, 4, (1 << 32) - 2)),
    _case("drawn", run_drawn),
    _case("silence", run_silence),
]
