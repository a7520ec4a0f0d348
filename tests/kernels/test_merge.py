"""The selection of a pair on two devices: keys, scores and lists of each, exchanged by kernels or by copies, give what a single device selects."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial

import numpy as np
import pytest

from glm53.check import reference_merge as reference
from glm53.check import reference_selection
from glm53.check.case import Bench, draw
from glm53.check.cases_merge import EXTENT, SIDES, around_extents, local_scores, outputs, put_scores
from glm53.check.cases_selection import fill_scores, i32, lay_out
from glm53.check.cases_step_select import open_selector
from glm53.check.links import open_link
from glm53.hip import Array, Device, PeerAccess, Stream
from glm53.hip.buffer import MemoryKind
from glm53.mem.extents import ExtentShape
from glm53.ops import history, merge, selection
from glm53.ops.contract import ContractError
from glm53.ops.merge import Lists
from glm53.ops.step import SumMail
from glm53.ops.step_parts import Patience
from glm53.ops.step_select import Drawn, Selector
from glm53.spec import DType, Shard

POLLS = 20_000_000
Make = Callable[..., Array]


class Ends:
    """Both ends of exchanges of at most `rows` rows: streams, mailboxes, step counters, error flags. Everything ends with `stack`."""

    def __init__(self, stack: ExitStack, pair: Sequence[Device], rows: int, k: int, per_step: int = 1, budget: int = POLLS):
        self.rows, self.k, self.per_step, self.budget = rows, k, per_step, budget
        self.link = stack.enter_context(open_link(pair[0], pair[1], PeerAccess.ON))
        self.benches = [stack.enter_context(Bench(device)) for device in pair]
        self.streams = [device.stream() for device in pair]
        for bench, stream in zip(self.benches, self.streams, strict=True):
            stack.callback(stream.close)
            bench.stream = stream
        self.capacity = merge.select_words(rows) + 3
        self.boxes = [device.alloc(16 * self.capacity, "mailboxes", MemoryKind.UNCACHED) for device in pair]
        for box in self.boxes:
            Array(box, DType.U64, (2 * self.capacity,)).upload(np.zeros(2 * self.capacity, np.uint64))
        self.counters = [bench.put(np.zeros(1, np.uint32)) for bench in self.benches]
        self.errors = [bench.put(np.zeros(1, np.uint32)) for bench in self.benches]

    def count(self, steps: int) -> None:
        """Steps done, on both sides."""
        for counter, stream in zip(self.counters, self.streams, strict=True):
            counter.upload(np.array([steps % (1 << 32)], np.uint32), stream)

    def put(self, scores: np.ndarray, positions: np.ndarray) -> list[Lists]:
        """The lists of both sides, with outputs of their own."""
        found = []
        for bench, share in zip(self.benches, SIDES, strict=True):
            entries, counts = reference.local_lists(scores, positions, self.k, share, EXTENT)
            found.append(Lists(bench.put(entries), bench.put(counts), bench.put(positions), *outputs(bench, len(positions), self.k)))
        return found

    def exchange(self, side: int, lists: Lists, index: int = 1) -> None:
        out, own = self.boxes[1 - side].address, self.boxes[side].address
        counter, error, stream = self.counters[side], self.errors[side], self.streams[side]
        merge.exchange(stream, lists, out, own, counter, self.per_step, index, self.capacity, error, self.budget)

    def by_copies(self, lists: Sequence[Lists]) -> None:
        others = [(bench.poison(DType.U64, lists[0].entries.shape), bench.poison(DType.I32, lists[0].counts.shape)) for bench in self.benches]
        for side in (0, 1):
            for source, target in zip((lists[side].entries, lists[side].counts), others[1 - side], strict=True):
                self.link.copy(source, target, self.streams[side], self.streams[1 - side])
        for side in (0, 1):
            merge.merge(self.streams[side], lists[side], *others[side])

    def expect(self, lists: Sequence[Lists], scores: np.ndarray, positions: np.ndarray) -> None:
        """Both sides have what a single device selects, and nobody waited in vain."""
        selected, counts = reference_selection.topk(scores, positions, self.k)
        for bench, side, error in zip(self.benches, lists, self.errors, strict=True):
            np.testing.assert_array_equal(bench.read(side.selected), selected)
            np.testing.assert_array_equal(bench.read(side.selected_counts), counts)
            assert bench.read(error)[0] == 0

    def select(self, side: int, lists: Lists, selector: Selector, index: int = 1, blocks: int | None = None) -> None:
        """`exchange`, and before it the lists of what `selector` has scored, in one launch."""
        out, own, patience = self.boxes[1 - side].address, self.boxes[side].address, Patience(self.budget)
        mail = SumMail(out, own, self.capacity, self.counters[side], self.per_step, index, self.errors[side], patience)
        merge.select(self.streams[side], selector, lists, SIDES[side], EXTENT, mail, blocks)


def batch(seed: int, rows: int, columns: int, kind: str = "ties") -> tuple[np.ndarray, np.ndarray]:
    """Scores and positions of some rows: long and short contexts, ends of extents, rows not in use."""
    rng = np.random.default_rng(seed)
    return fill_scores(kind, rows, columns, seed), rng.choice(i32(around_extents(48, columns)), rows)


def test_both_ways_select_what_one_device_selects(pair: tuple[Device, Device]) -> None:
    with ExitStack() as stack:
        ends = Ends(stack, pair, 8, 48)
        for number, kind in enumerate(("random", "equal", "ties", "signed-zeros", "infinite")):
            scores, positions = batch(number, 8, 600, kind)
            ends.count(number)
            lists = ends.put(scores, positions)
            for side in (0, 1):
                ends.exchange(side, lists[side])
            ends.expect(lists, scores, positions)
            copied = ends.put(scores, positions)
            ends.by_copies(copied)
            ends.expect(copied, scores, positions)


@pytest.mark.parametrize("k", (1, 5, 300, 2048))
def test_widths(pair: tuple[Device, Device], k: int) -> None:
    columns = 3 * k + 200
    with ExitStack() as stack:
        ends = Ends(stack, pair, 3, k)
        scores, positions = fill_scores("random", 3, columns, k), i32([columns - 1, k, k - 1])
        lists = ends.put(scores, positions)
        for side in (1, 0):
            ends.exchange(side, lists[side])
        ends.expect(lists, scores, positions)


@pytest.mark.parametrize(
    ("kind", "k", "columns", "blocks"),
    [
        ("random", 48, 600, 5),
        ("ties", 48, 600, 1),
        ("equal", 300, 9000, 3),  # more than a side may send: it chooses first
        ("ascending", 2048, 30000, 6),  # all that one side selects is listed by one block
        ("descending", 2048, 30000, 6),
        ("random", 2048, 12000, 2),
        ("signed-zeros", 20, 400, 4),
        ("infinite", 100, 500, 2),
        ("low-byte", 1, 300, 3),
    ],
)
def test_lists_and_merge_in_one_launch(pair: tuple[Device, Device], kind: str, k: int, columns: int, blocks: int) -> None:
    """Rows that are the identity, of which a side holds nothing, and long ones, twice in a row: what one device selects."""
    positions = i32([columns - 1, k, k - 1, -1, min(columns - 1, EXTENT - 1), columns // 2])
    with ExitStack() as stack:
        ends = Ends(stack, pair, len(positions), k)
        selectors = []
        for bench, share in zip(ends.benches, SIDES, strict=True):
            selectors.append(stack.enter_context(open_selector(bench, len(positions), max(share.rows_of(columns, EXTENT), 1), k)))
        for number in (1, 2):
            scores, lists = fill_scores(kind, len(positions), columns, number), []
            ends.count(number)
            for bench, share, selector in zip(ends.benches, SIDES, selectors, strict=True):
                put_scores(bench, selector, local_scores(scores, positions, share, selector.context), positions, share)
                scratch = bench.poison(DType.U64, (len(positions), k)), bench.poison(DType.I32, (len(positions),))
                lists.append(Lists(*scratch, bench.put(positions), *outputs(bench, len(positions), k)))
            for side in (number % 2, 1 - number % 2):
                ends.select(side, lists[side], selectors[side], blocks=blocks)
            ends.expect(lists, scores, positions)


def test_many_in_a_row_without_a_stop(pair: tuple[Device, Device]) -> None:
    """None waits for the host, in some rows the contexts come and go: a side that ran ahead by two would read the wrong words."""
    rounds = 60
    with ExitStack() as stack:
        ends = Ends(stack, pair, 2, 20, per_step=rounds)
        done = []
        for number in range(rounds):
            scores, positions = batch(number, 2, 300, "random")
            done.append((ends.put(scores, positions), scores, positions))
        for side in (0, 1):
            for index, (lists, _, _) in enumerate(done):
                ends.exchange(side, lists[side], index + 1)
        for lists, scores, positions in done:
            ends.expect(lists, scores, positions)


def test_any_schedule_selects_the_same(pair: tuple[Device, Device], control: ctypes.CDLL) -> None:
    with ExitStack() as stack:
        ends = Ends(stack, pair, 2, 30, per_step=3)
        for seed in range(1, 21):
            ends.count(seed)
            batches = [batch(10 * seed + i, 2, 200) for i in range(3)]
            lists = [ends.put(*values) for values in batches]
            control.glm53_cpu_seed(seed, 1)
            for side in (seed % 2, 1 - seed % 2):
                for index in range(3):
                    ends.exchange(side, lists[index][side], index + 1)
            copied = ends.put(*batches[0])
            ends.by_copies(copied)
            for found, values in ((copied, batches[0]), *zip(lists, batches, strict=True)):
                ends.expect(found, *values)
            control.glm53_cpu_seed(0, 0)


def test_replayed_graphs_and_numbers_that_wrap(pair: tuple[Device, Device]) -> None:
    """Two exchanges recorded on each side; counter, positions and lists change between replays, and the number passes 2^32."""
    with ExitStack() as stack:
        ends = Ends(stack, pair, 2, 25, per_step=2)
        first = (1 << 31) - 3
        lists = [ends.put(*batch(index, 2, 250)) for index in range(2)]
        graphs = []
        for side in (0, 1):
            pair[side].kernel("exchange_lists")
            with ends.streams[side].capture() as capture:
                for index in (0, 1):
                    ends.exchange(side, lists[index][side], index + 1)
            graphs.append(capture.graph)
            stack.callback(graphs[-1].close)
        for step in range(8):
            batches = [batch(1000 + 2 * step + index, 2, 250) for index in (0, 1)]
            ends.count(first + step)
            for both, (scores, positions) in zip(lists, batches, strict=True):
                for side, share in enumerate(SIDES):
                    entries, counts = reference.local_lists(scores, positions, ends.k, share, EXTENT)
                    for array, values in ((both[side].entries, entries), (both[side].counts, counts), (both[side].positions, positions)):
                        array.upload(values, ends.streams[side])
            for graph, stream in zip(graphs, ends.streams, strict=True):
                graph.launch(stream)
            for both, values in zip(lists, batches, strict=True):
                ends.expect(both, *values)


def test_a_silent_side_is_an_error_and_no_position_is_out_of_range(pair: tuple[Device, Device]) -> None:
    scores, positions = fill_scores("random", 3, 300, 3), i32([299, 10, 25])
    with ExitStack() as stack:
        ends = Ends(stack, pair, 3, 20, per_step=5, budget=50)
        ends.count(7)
        for index in (2, 3):  # the second asks once
            lists = ends.put(scores, positions)
            ends.exchange(0, lists[0], index)
            bench, side = ends.benches[0], lists[0]
            assert bench.read(ends.errors[0])[0] == 35 + index
            selected, counts = bench.read(side.selected), bench.read(side.selected_counts)
            np.testing.assert_array_equal(counts, [0, 11, 0])
            np.testing.assert_array_equal(selected[1, :11], np.arange(11))
            assert (selected[[0, 2]] == -1).all() and (selected[1, 11:] == -1).all()


class Whole:
    """Keys of some sessions, and query rows: on one device, and in halves on two."""

    def __init__(self, dtype: DType, k: int):
        self.dtype, self.k, self.contexts, self.heads, self.dim = dtype, k, (500, 130), 32, 128
        self.keys = [draw(3 + s, (1, n, self.dim), dtype) for s, n in enumerate(self.contexts)]
        self.sessions = i32([0, 1, 0, 1, 0, 0])
        self.positions = i32([499, 129, 64, 63, -1, 320])
        self.query, self.gate = draw(1, (6, self.heads, self.dim), dtype), draw(2, (6, self.heads))

    def arrays(self, bench: Bench) -> tuple[Array, Array]:
        return bench.put(self.query, self.dtype), bench.put(self.gate)

    def place(self, bench: Bench) -> tuple[Array, Array]:
        return bench.put(self.sessions), bench.put(self.positions)

    def single(self, bench: Bench, stream: Stream, prompt: bool) -> tuple[np.ndarray, np.ndarray]:
        """(selected, counts) of one device that has all keys."""
        store, (sessions, positions) = lay_out(bench, self.keys, EXTENT, self.dtype), self.place(bench)
        out = outputs(bench, 6, self.k)
        if prompt:
            scores = bench.poison(DType.F32, (6, 500))
            selection.index_score(stream, *self.arrays(bench), store.tables, sessions, positions, scores, store.shape, plane=0, context=500)
            selection.topk(stream, scores, positions, *out)
        else:
            selector = Selector.make(bench.device, 6, 500, self.k, "check")
            selector.score(stream, *self.arrays(bench), store.tables, sessions, positions, store.shape, 0)
            selector.topk(stream, positions, *out)
            stream.synchronize()
            selector.free()
        return bench.read(out[0]), bench.read(out[1])

    def store(self, bench: Bench, stream: Stream, share: Shard) -> tuple[Array, ExtentShape]:
        """A side's tables, all rows appended to them."""
        shape = ExtentShape(EXTENT, 1, self.dim * self.dtype.item_bytes)
        extents = shape.extents_for(share.rows_of(max(self.contexts), EXTENT))
        memory = bench.poison(DType.U8, (2 * extents, shape.extent_bytes))
        tables = bench.put((memory.address + np.arange(2 * extents) * shape.extent_bytes).astype(np.uint64).reshape(2, extents))
        rows = np.concatenate([session[0] for session in self.keys])
        sessions = i32(np.repeat([0, 1], self.contexts))
        positions = i32(np.concatenate([np.arange(n) for n in self.contexts]))
        history.append(stream, bench.put(rows, self.dtype), tables, bench.put(sessions), bench.put(positions), shape, plane=0, share=share)
        return tables, shape

    def lists(self, bench: Bench, stream: Stream, share: Shard, prompt: bool, stack: ExitStack) -> Lists:
        (tables, shape), (sessions, positions) = self.store(bench, stream, share), self.place(bench)
        out = bench.poison(DType.U64, (6, self.k)), bench.poison(DType.I32, (6,))
        columns = share.rows_of(500, EXTENT)
        if prompt:
            scores = bench.poison(DType.F32, (6, columns))
            selection.index_score(stream, *self.arrays(bench), tables, sessions, positions, scores, shape, plane=0, context=500, share=share)
            selection.topk(stream, scores, positions, *out, share=share, extent_rows=EXTENT)
        else:
            selector = Selector.make(bench.device, 6, columns, self.k, "check")
            stack.callback(selector.free)
            selector.score(stream, *self.arrays(bench), tables, sessions, positions, shape, 0, share=share)
            selector.topk(stream, positions, *out, share=share, extent_rows=EXTENT)
        return Lists(*out, positions, *outputs(bench, 6, self.k))


@pytest.mark.parametrize("prompt", (True, False), ids=("prompt", "step"))
@pytest.mark.parametrize("dtype", (DType.F32, DType.BF16), ids=("f32", "bf16"))
def test_keys_in_two_halves(pair: tuple[Device, Device], dtype: DType, prompt: bool) -> None:
    """From index keys to the selection: prompt rows with copies, decode rows with the exchange."""
    for k in (48, 129):
        whole = Whole(dtype, k)
        with ExitStack() as stack:
            ends = Ends(stack, pair, 6, k)
            want = whole.single(ends.benches[0], ends.streams[0], prompt)
            lists = [whole.lists(ends.benches[side], ends.streams[side], SIDES[side], prompt, stack) for side in (0, 1)]
            if prompt:
                ends.by_copies(lists)
            else:
                for side in (0, 1):
                    ends.exchange(side, lists[side])
            for bench, side in zip(ends.benches, lists, strict=True):
                np.testing.assert_array_equal(bench.read(side.selected), want[0])
                np.testing.assert_array_equal(bench.read(side.selected_counts), want[1])
            for stream in ends.streams:
                stream.synchronize()


# Contracts


def lists_of(make: Make, k: int = 8, **changes: Array | Drawn | None) -> Lists:
    arrays = {"entries": make(DType.U64, 2, k), "counts": make(DType.I32, 2), "positions": make(DType.I32, 2)}
    arrays |= {"selected": make(DType.I32, 2, k), "selected_counts": make(DType.I32, 2)}
    return Lists(**(arrays | changes))  # type: ignore[arg-type]


def test_merge_refuses(make: Make) -> None:
    stream = make(DType.U32, 1).device.default_stream
    other = make(DType.U64, 2, 8), make(DType.I32, 2)
    with pytest.raises(ContractError, match=r"merge_lists: selected dim 1 is 7, expected k=8"):
        merge.merge(stream, lists_of(make, selected=make(DType.I32, 2, 7)), *other)
    with pytest.raises(ContractError, match="other_entries is i64, expected u64"):
        merge.merge(stream, lists_of(make), make(DType.I64, 2, 8), other[1])
    with pytest.raises(ContractError, match="k is 2049, expected at most 2048"):
        merge.merge(stream, lists_of(make, 2049), make(DType.U64, 2, 2049), other[1])
    drawn = Drawn(make(DType.I32, 3, 7), make(DType.U32, 1))
    with pytest.raises(ContractError, match=r"drawn.selections dim 1 is 7, expected k=8"):
        merge.merge(stream, lists_of(make, drawn=drawn), *other)


def test_exchange_refuses(make: Make) -> None:
    word, box = make(DType.U32, 1), make(DType.U64, 100)
    exchange = partial(merge.exchange, word.device.default_stream, lists_of(make), box.address, box.address, word)
    with pytest.raises(ContractError, match="capacity is 33, expected at least 34 words for 2 rows of 8 entries"):
        exchange(1, 1, 33, word, POLLS)
    for index in (0, 4):
        with pytest.raises(ContractError, match=f"index is {index}, expected 1 to per_step=3"):
            exchange(3, index, 34, word, POLLS)
    with pytest.raises(ContractError, match="budget is 0"):
        exchange(1, 1, 34, word, 0)


def test_lists_are_refused_where_they_do_not_fit(device: Device, make: Make) -> None:
    stream, positions, counts = device.default_stream, make(DType.I32, 2), make(DType.I32, 2)
    scores, entries = make(DType.F32, 2, 64), make(DType.U64, 2, 8)
    with pytest.raises(ContractError, match="selected is u64, expected i32"):
        selection.topk(stream, scores, positions, entries, counts)
    with pytest.raises(ContractError, match="selected is i32, expected u64"):
        selection.topk(stream, scores, positions, make(DType.I32, 2, 8), counts, share=SIDES[0], extent_rows=64)
    with pytest.raises(ContractError, match=r"extent_rows is None, expected that of the keys beside share=Shard\(index=1, count=2\)"):
        selection.topk(stream, scores, positions, entries, counts, share=SIDES[1])
    selector = Selector.make(device, 2, 64, 8, "check")
    drawn = Drawn(make(DType.I32, 3, 8), make(DType.U32, 1))
    with pytest.raises(ContractError, match=r"drawn is given beside share=.*, expected None; next: drawn of merge.Lists"):
        selector.topk(stream, positions, entries, counts, drawn=drawn, share=SIDES[0], extent_rows=64)
    selector.free()


def test_costs() -> None:
    """By hand at the released width: two lists of 2,048 entries of 8 bytes, a selection of 4 bytes each; words of 8 bytes, two an entry."""
    assert merge.words(3, 2048) == 3 * 4097
    assert merge.cost_merge(1, 2048).bytes == 2048 * (8 + 8 + 4)
    assert merge.cost_exchange(2, 2048).bytes == 2 * (2048 * (8 + 4) + 2 * 8 * 4097)
