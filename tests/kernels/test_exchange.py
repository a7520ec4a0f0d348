"""What two devices of a pair exchange: kernels and copies give the same bits on both sides, recorded or not, and a silent side is an error."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import numpy as np
import pytest

from glm53.check import reference_merge
from glm53.check.case import round_to
from glm53.check.links import open_link, sum_exchange
from glm53.errors import Glm53Error, LinkError
from glm53.hip import Array, Device, Link, PeerAccess, Stream
from glm53.mem.extents import ExtentShape
from glm53.ops import rows as row_ops
from glm53.ops import step, step_parts, step_state
from glm53.ops.contract import ContractError
from glm53.ops.exchange import Exchange, Parts, Request, Rows, Sums
from glm53.ops.matrix import Matrix
from glm53.ops.merge import Lists
from glm53.ops.sampling import ROW_BYTES
from glm53.spec import DType, RowFormat, Shard, Space

F32, BF16, U32 = DType.F32, DType.BF16, DType.U32
Pair = tuple[Device, Device]
TOP_K, POSITIONS = 16, 300


def put(device: Device, values: np.ndarray, dtype: DType | None = None) -> Array:
    return Array.from_numpy(device, values, dtype, category="test")


def number(device: Device, value: int) -> Array:
    return put(device, np.array([value], np.uint32))


@dataclass
class Bench:
    """An exchange with a stream and a counter a side. Requests of one call are one step."""

    pair: Pair
    link: Link
    exchange: Exchange
    streams: tuple[Stream, Stream]
    counters: list[Array]
    row_errors: list[Array]
    rounds: list[Array]

    @classmethod
    def open(
        cls, stack: ExitStack, pair: Pair, fast: bool, words_max: int = 4096, *, budget: int | None = None, mail_words: int = 0, staged: bool = False
    ) -> Bench:
        link = stack.enter_context(open_link(*pair, PeerAccess.OFF if staged else PeerAccess.ON))
        exchange = stack.enter_context(Exchange(link, words_max, fast, budget, mail_words=mail_words))
        streams = (pair[0].stream(), pair[1].stream())
        for stream in streams:
            stack.callback(stream.close)
        counters, row_errors = ([number(device, 0) for device in pair] for _ in range(2))
        return cls(pair, link, exchange, streams, counters, row_errors, [put(device, np.full(1, -1, np.int32)) for device in pair])

    def enqueue(self, steps: Sequence[Sequence[Request]]) -> None:
        """Exchange i of a step: steps[side][i], both sides alike, and the counters move on."""
        if self.exchange.fast:
            for side in (0, 1):
                self.enqueue_side(side, steps[side])
            return
        for both in zip(*steps, strict=True):
            self.exchange.enqueue_both(self.streams, both)

    def enqueue_side(self, side: int, requests: Sequence[Request]) -> None:
        for index, request in enumerate(requests, 1):
            self.exchange.enqueue(side, self.streams[side], request, self.counters[side], len(requests), index)
        self.count(side)

    def count(self, side: int) -> None:
        step_state.end(self.streams[side], self.counters[side], self.row_errors[side], self.rounds[side], None, None)

    def check(self) -> None:
        self.exchange.check(self.streams)


def run_sums(bench: Bench, shape: tuple[int, int], dtype: DType, rounds: int) -> None:
    """Rounds with new sums each, x = T(x + (p0 + p1)) over and over, against numpy."""
    rng = np.random.default_rng(rounds)
    x = round_to(rng.standard_normal(shape, np.float32), dtype)
    held = [put(device, x, dtype) for device in bench.pair]
    for _ in range(rounds):
        parts = [rng.standard_normal(shape, np.float32) for _ in bench.pair]
        sums = [put(device, part) for device, part in zip(bench.pair, parts, strict=True)]
        bench.enqueue([[Sums(part, array, array)] for part, array in zip(sums, held, strict=True)])
        bench.check()
        x = round_to(x + (parts[0] + parts[1]), dtype)
    for array in held:
        assert (array.numpy() == x).all()


@dataclass
class Step:
    """A step of four exchanges of all kinds on both sides; `begin` gives it new values and poisons the results, `verify` compares."""

    bench: Bench
    rows: int = 3
    low: int = 130
    high: int = 66

    def __post_init__(self) -> None:
        n = self.low + self.high
        self.seed = 0
        self.sums: list[Array] = []
        self.x: list[Array] = []
        self.y: list[Array] = []
        self.mine: list[Array] = []
        self.whole: list[Array] = []
        self.ids: list[Array] = []
        self.all_ids: list[Array] = []
        self.lists: list[Lists] = []
        for device, width in zip(self.bench.pair, (self.low, self.high), strict=True):
            make = [(self.sums, F32, n), (self.x, BF16, n), (self.y, BF16, n), (self.mine, BF16, width), (self.whole, BF16, n)]
            make += [(self.ids, DType.I32, width), (self.all_ids, DType.I32, n)]
            for arrays, dtype, columns in make:
                arrays.append(Array.empty(device, dtype, (self.rows, columns), category="test"))
            entries, selected = (Array.empty(device, dtype, (self.rows, TOP_K), category="test") for dtype in (DType.U64, DType.I32))
            counts, positions, selected_counts = (Array.empty(device, DType.I32, (self.rows,), category="test") for _ in range(3))
            self.lists.append(Lists(entries, counts, positions, selected, selected_counts))

    @property
    def requests(self) -> list[list[Request]]:
        return [
            [Sums(self.sums[s], self.x[s], self.y[s]), Parts(self.mine[s], self.whole[s]), self.lists[s], Parts(self.ids[s], self.all_ids[s])]
            for s in (0, 1)
        ]

    def begin(self) -> None:
        self.seed += 1
        rng = np.random.default_rng(self.seed)
        x = round_to(rng.standard_normal(self.x[0].shape, np.float32), BF16)
        parts = []
        positions = rng.integers(0, POSITIONS, self.rows).astype(np.int32)
        scores = rng.integers(-40, 40, (self.rows, POSITIONS)).astype(np.float32)  # ties
        for s in (0, 1):
            part = rng.standard_normal(self.sums[s].shape, np.float32)
            parts.append(part)
            values = [(self.sums[s], part), (self.x[s], x), (self.mine[s], rng.standard_normal(self.mine[s].shape, np.float32))]
            values += [(self.y[s], x * np.nan), (self.whole[s], x * np.nan), (self.ids[s], rng.integers(-9, 9, self.ids[s].shape, np.int32))]
            values += [(self.all_ids[s], np.full(self.all_ids[s].shape, 77, np.int32))]
            for array, value in values:
                array.upload(value)
            entries, counts = reference_merge.local_lists(scores, positions, TOP_K, Shard(s, 2), 64)
            lists = self.lists[s]
            lists.entries.upload(entries)
            for array, value in ((lists.counts, counts), (lists.positions, positions), (lists.selected, entries * 0 + 7)):
                array.upload(value.astype(np.int32))
        best = [np.sort(np.argsort(-scores[r, : p + 1], kind="stable")[:TOP_K]) for r, p in enumerate(positions)]
        self.selected = [np.pad(row, (0, TOP_K - len(row)), constant_values=-1) for row in best]
        self.wanted = round_to(x + (parts[0] + parts[1]), BF16)

    def verify(self) -> None:
        for s in (0, 1):
            np.testing.assert_array_equal(self.y[s].numpy(), self.wanted)
            np.testing.assert_array_equal(self.whole[s].numpy(), np.concatenate([array.numpy() for array in self.mine], axis=1))
            np.testing.assert_array_equal(self.lists[s].selected.numpy(), self.selected)
            np.testing.assert_array_equal(self.all_ids[s].numpy(), np.concatenate([array.numpy() for array in self.ids], axis=1))


WAYS = pytest.mark.parametrize("way", ("kernels", "copies", "staged"))


def opened(stack: ExitStack, pair: Pair, way: str, words_max: int = 4096, mail_words: int = 0) -> Bench:
    return Bench.open(stack, pair, way == "kernels", words_max, mail_words=mail_words, staged=way == "staged")


@WAYS
@pytest.mark.parametrize("dtype", (F32, BF16))
@pytest.mark.parametrize("shape", ((1, 1), (1, 6144), (3, 257), (3, 6144)))
def test_every_way_gives_the_plain_sum(pair: Pair, way: str, shape: tuple[int, int], dtype: DType) -> None:
    with ExitStack() as stack:
        run_sums(opened(stack, pair, way, 3 * 6144), shape, dtype, 4)


@WAYS
@pytest.mark.parametrize(("rows", "low", "high"), ((1, 2, 4), (3, 130, 66), (1, 6144, 6144), (2, 64, 20_000), (5, 8000, 258)))
def test_every_way_joins_parts(pair: Pair, way: str, rows: int, low: int, high: int) -> None:
    """A part of 40,000 words takes more than one round of all blocks."""
    with ExitStack() as stack:
        bench = opened(stack, pair, way, rows * max(low + high, 2 * TOP_K + 1))
        steps = Step(bench, rows, low, high)
        for _ in range(3):
            steps.begin()
            bench.enqueue(steps.requests)
            bench.check()
            steps.verify()


def test_more_than_two_hundred_in_a_row_without_a_stop(pair: Pair) -> None:
    """None waits for the host: a side that ran ahead by two would read words of the wrong exchange."""
    shape, rounds = (1, 700), 250
    parts = np.random.default_rng(3).standard_normal((rounds, 2, *shape)).astype(np.float32)
    with ExitStack() as stack:
        bench = opened(stack, pair, "kernels", shape[1])
        sums = [[put(device, part) for device, part in zip(pair, both, strict=True)] for both in parts]
        held = [put(device, np.zeros(shape, np.float32)) for device in pair]
        bench.enqueue([[Sums(both[side], held[side], held[side]) for both in sums] for side in (0, 1)])
        bench.check()
        want = np.zeros(shape, np.float32)
        for low, high in parts:
            want = want + (low + high)
        for array in held:
            assert (array.numpy() == want).all()


@pytest.mark.parametrize("way", ("kernels", "copies"))
def test_any_schedule_gives_the_same(pair: Pair, control: ctypes.CDLL, way: str) -> None:
    with ExitStack() as stack:
        bench = opened(stack, pair, way)
        steps = Step(bench)
        for seed in range(1, 21):
            steps.begin()
            control.glm53_cpu_seed(seed, 1)
            bench.enqueue(steps.requests)
            bench.check()
            control.glm53_cpu_seed(0, 0)
            steps.verify()


@pytest.mark.parametrize("seed", (0, 5, 6))
def test_recorded_steps_count_on(pair: Pair, control: ctypes.CDLL, seed: int) -> None:
    """Both sides' graphs, replayed with new values: all that changes from step to step is read from the counter."""
    with ExitStack() as stack:
        bench = opened(stack, pair, "kernels")
        steps = Step(bench)
        graphs = []
        for side in (0, 1):
            with bench.streams[side].capture() as capture:
                for index, request in enumerate(steps.requests[side], 1):
                    bench.exchange.enqueue(side, bench.streams[side], request, bench.counters[side], 4, index)
            graphs.append(capture.graph)
            stack.callback(capture.graph.close)
        for _ in range(30 if seed else 200):
            steps.begin()
            control.glm53_cpu_seed(seed, 1 if seed else 0)
            for side in (0, 1):
                graphs[side].launch(bench.streams[side])
                bench.count(side)
            bench.check()
            control.glm53_cpu_seed(0, 0)
            steps.verify()


@pytest.mark.parametrize("start", ((1 << 30) - 2, (1 << 32) - 2))
def test_numbers_wrap(pair: Pair, start: int) -> None:
    """The number, counter * 4 + index, and the counter itself; the mailboxes are new, and 0 is a number like others."""
    with ExitStack() as stack:
        bench = opened(stack, pair, "kernels")
        steps = Step(bench)
        for counter in bench.counters:
            counter.upload(np.array([start], np.uint32))
        for _ in range(5):
            steps.begin()
            bench.enqueue(steps.requests)
            bench.check()
            steps.verify()


def test_the_first_number_may_be_zero(pair: Pair) -> None:
    """An empty word of a mailbox is not taken for one."""
    with ExitStack() as stack:
        bench = opened(stack, pair, "kernels", 64)
        for counter in bench.counters:
            counter.upload(np.array([(1 << 32) - 1], np.uint32))
        run_sums(bench, (1, 64), F32, 4)


@pytest.mark.parametrize("silent", (0, 1))
def test_a_silent_side_is_an_error_that_names_both(pair: Pair, silent: int) -> None:
    """Later exchanges of the side that waited do not wait; after a reset the next ones are right."""
    here = 1 - silent
    with ExitStack() as stack:
        budget = 600 if pair[0].runtime.name == "cpu" else 1_000_000  # a second: the sides of the later rounds are launched one after the other
        bench = Bench.open(stack, pair, fast=True, budget=budget)
        steps = Step(bench)
        steps.begin()
        bench.enqueue_side(here, steps.requests[here])
        expected = rf"device {here} got no answer from device {silent} in exchange \d within {budget} polls; next: .*--p2p off"
        with pytest.raises(LinkError, match=expected):
            bench.check()
        assert bench.exchange.errors(silent).numpy()[0] == 0
        bench.exchange.reset()
        for counter in bench.counters:
            counter.upload(np.array([1], np.uint32))
        bench.check()
        steps.begin()
        bench.enqueue(steps.requests)
        bench.check()
        steps.verify()


def test_a_record_tells_of_a_silent_side(pair: Pair) -> None:
    """0 on a device alone; the flag stays, so that later exchanges do not wait."""
    device, tops = pair[0], 0
    words = step_state.record_words(1, tops)
    with device.host_alloc(16 * words * 4, category="test") as host:
        ring = step_state.Ring(host.array.view(np.uint32).reshape(16, words), host.device_address)
        token, logprob, position = (put(device, np.zeros(1, dtype)) for dtype in (np.int32, np.float32, np.int32))
        draws = step_state.Draws(token, logprob, None, position, put(device, np.zeros((1, ROW_BYTES), np.uint8)), ring)
        flag, rounds = number(device, 77), put(device, np.full(1, -1, np.int32))
        for link_error, wanted in ((flag, 77), (None, 0)):
            step_state.end(device.default_stream, number(device, 5), number(device, 9), rounds, None, draws, link_error)
            device.synchronize()
            record = step_state.read_record(ring, 5, 1, tops)
            assert (record.step, record.row_error, record.link_error) == (5, 9, wanted)
        assert flag.numpy()[0] == 77


def test_the_default_budget_ends_in_seconds(pair: Pair) -> None:
    """Of as many blocks as can wait: an error of the exchange, not of the device."""
    with ExitStack() as stack:
        bench = opened(stack, pair, "kernels", 32 * 1024)
        values = put(pair[0], np.ones((1, 32 * 1024), np.float32))
        bench.exchange.enqueue(0, bench.streams[0], Sums(values, values, values), bench.counters[0], 1, 1)
        with pytest.raises(LinkError, match="device 0 got no answer from device 1 in exchange 1"):
            bench.check()


def test_refusals(pair: Pair) -> None:
    with ExitStack() as stack:
        with pytest.raises(LinkError, match="devices 0 and 1: in-kernel exchange asked for without peer access"):
            Bench.open(stack, pair, fast=True, staged=True)
        fast, slow = (Bench.open(stack, pair, fast, 64) for fast in (True, False))
        make = [lambda *shape, dtype=np.float32, d=device: put(d, np.ones(shape, dtype)) for device in pair]
        wide, good = make[0](1, 65), make[0](1, 64)
        refused: list[tuple[str, Request]] = [
            ("sums have 65 values, expected at most 64", Sums(wide, wide, wide)),
            ("residual dim 1 is 65", Sums(good, wide, wide)),
            ("mine has 64 columns, expected fewer than whole's 64", Parts(good, make[0](1, 64))),
            ("parts have 65 words, expected at most 64", Parts(make[0](1, 3), make[0](1, 68))),
            ("mine and whole overlap", Parts(good.view((64, 1)), good.view((32, 2)).view((64, 1)))),
            ("expected a type of 2 or 4 bytes", Parts(make[0](1, 4, dtype=np.uint8), make[0](1, 8, dtype=np.uint8))),
            (r"rows of the sides have \[4, 6\] bytes", Parts(make[0](1, 2, dtype=np.uint16), make[0](1, 5, dtype=np.uint16))),
        ]
        for text, request in refused:
            with pytest.raises(ContractError, match=text):
                fast.exchange.enqueue(0, fast.streams[0], request, fast.counters[0], 1, 1)
            with pytest.raises(ContractError, match=text):
                slow.exchange.enqueue_both(slow.streams, (request, request))
        sums = Sums(good, good, good)
        with pytest.raises(ContractError, match="index is 3, expected 1 to per_step=2"):
            fast.exchange.enqueue(0, fast.streams[0], sums, fast.counters[0], 2, 3)
        with pytest.raises(ContractError, match="expected the device of side 0"):
            fast.exchange.enqueue(0, fast.streams[0], sums, fast.counters[1], 1, 1)
        with pytest.raises(ContractError, match="next: enqueue_both"):
            slow.exchange.enqueue(0, slow.streams[0], sums, slow.counters[0], 1, 1)
        with pytest.raises(ContractError, match=r"next: enqueue$"):
            fast.exchange.enqueue_both(fast.streams, (sums, sums))
        with pytest.raises(ContractError, match="expected one kind"):
            slow.exchange.enqueue_both(slow.streams, (sums, Parts(good, good)))
        with pytest.raises(ContractError, match="side 1's sums"):
            odd = make[1](1, 63)
            slow.exchange.enqueue_both(slow.streams, (sums, Sums(odd, odd, odd)))
        with pytest.raises(ContractError, match="expected 1 to mail_words=0"):
            slow.exchange.enqueue_both(slow.streams, (Rows(1, 656), Rows(1, 656)))
        with pytest.raises(ValueError, match="mail_words is 0"):
            fast.exchange.mail(0, fast.counters[0], 1, 0)
        for bench in (fast, slow):
            bench.check()
            np.testing.assert_array_equal(good.numpy(), 1)
            run_sums(bench, (1, 64), F32, 3)


def test_nothing_is_left(pair: Pair, control: ctypes.CDLL) -> None:
    with ExitStack() as stack:
        link = stack.enter_context(open_link(*pair, PeerAccess.ON))
        before = [device.allocated_bytes() for device in pair]
        for fast in (True, False):
            for _ in range(100):
                Exchange(link, 256, fast, mail_words=64).close()
        assert [device.allocated_bytes() for device in pair] == before
        for call in (b"hipMalloc", b"hipExtMallocWithFlags"):
            for nth in range(1, 5):
                control.glm53_cpu_fail(call, nth, 2)
                try:
                    with Exchange(link, 256, fast=True, mail_words=64):
                        pass
                except Glm53Error:
                    pass
                finally:
                    control.glm53_cpu_fail(call, 0, 0)
                assert [device.allocated_bytes() for device in pair] == before, f"{call!r} {nth}"


LATENT, ROPE, KEY, ROWS = 512, 8, 24, 3
EXTENT_ROWS, EXTENTS = 64, 2


@dataclass
class Layers:
    """Part ROWS of two layers on both sides of a pair, and on one device alone; a step has rows of three sessions, one of them padding."""

    bench: Bench
    row_format: RowFormat = RowFormat.Q8G64
    layers: int = 2

    def __post_init__(self) -> None:
        self.row_bytes = self.row_format.row_bytes(LATENT, ROPE)
        self.shape = ExtentShape(EXTENT_ROWS, 1, KEY * 2)
        self.step = 0
        self.sides = [self._side(self.bench.pair[0], Shard()), *(self._side(self.bench.pair[i], Shard(i, 2)) for i in (0, 1))]

    def _side(self, device: Device, share: Shard) -> dict[str, Array]:
        rng = np.random.default_rng(7)  # weights are the same everywhere
        extents = np.full((ROWS * EXTENTS, self.shape.extent_rows * self.shape.row_bytes), 0xFF, np.uint8)
        keys = put(device, extents)
        table = np.arange(ROWS * EXTENTS, dtype=np.uint64).reshape(ROWS, EXTENTS) * np.uint64(extents.shape[1]) + np.uint64(keys.address)
        history = put(device, np.full((ROWS * self.layers, self.row_bytes), 0xFF, np.uint8))
        floats = {"x": (ROWS, 64), "weight": (19, 64), "row_norm": (LATENT,), "key_norm": (KEY,), "key_bias": (KEY,)}
        side = {name: put(device, rng.standard_normal(shape, np.float32), BF16) for name, shape in floats.items()}
        side |= {"keys": keys, "tables": put(device, table), "history": history, "y": put(device, np.zeros((ROWS, 19), np.float32), BF16)}
        for layer in range(self.layers):
            refs = np.arange(ROWS, dtype=np.uint64) * np.uint64(self.row_bytes) + np.uint64(history.address + layer * ROWS * self.row_bytes)
            refs[1] = 0
            side[f"refs{layer}"] = put(device, refs)
            side[f"row{layer}"] = put(device, np.zeros((ROWS, LATENT + ROPE), np.float32), BF16)
            side[f"key{layer}"] = put(device, np.zeros((ROWS, KEY), np.float32), BF16)
        frequencies = (1.0 / 1e4 ** (np.arange(0, ROPE, 2) / ROPE)).astype(np.float32)
        side |= {"sessions": put(device, np.arange(ROWS, dtype=np.int32)), "inv_freq": put(device, frequencies), "error": number(device, 0)}
        return side | {"positions": put(device, np.zeros(ROWS, np.int32))}

    def begin(self) -> None:
        """New rows and keys, and positions that walk through both extents."""
        rng = np.random.default_rng(self.step)
        rows, keys = rng.standard_normal((self.layers, ROWS, LATENT + ROPE), np.float32), rng.standard_normal((self.layers, ROWS, KEY), np.float32)
        for side in self.sides:
            side["positions"].upload(np.array([17 * self.step % 128, -1, 61 + self.step % 7], np.int32))
            for layer in range(self.layers):
                side[f"row{layer}"].upload(rows[layer])
                side[f"key{layer}"].upload(keys[layer])
        self.step += 1

    def launch(self, stream: Stream, index: int, layer: int, mail: step_parts.RowMail | None) -> None:
        """index: 0 alone, 1 owner, 2 peer."""
        side = self.sides[index]
        part = step_parts.RowsPart(
            side[f"row{layer}"],
            side["row_norm"],
            1e-5,
            side[f"refs{layer}"],
            (0, 0, 0, 0),
            self.row_format,
            LATENT,
            side["error"],
            side[f"key{layer}"],
            side["key_norm"],
            side["key_bias"],
            1e-6,
            side["tables"],
            side["sessions"],
            self.shape,
            key_share=Shard(index - 1, 2) if index else Shard(),
            mail=mail,
        )
        if mail is not None and mail.receive:
            part = replace(part, row=None, row_norm=None, error=None)
        segment = step.Segment(Matrix.plain(side["weight"]), side["y"])
        step.gemv(stream, side["x"], [segment], positions=side["positions"], inv_freq=side["inv_freq"], part=part)

    def verify(self) -> None:
        """Alone, owner and peer have the same rows; the sides have the keys of their extents, one after the other."""
        alone, owner, peer = self.sides
        wanted = alone["history"].numpy()
        np.testing.assert_array_equal(owner["history"].numpy(), wanted)
        np.testing.assert_array_equal(peer["history"].numpy(), wanted)
        assert (wanted.reshape(self.layers, ROWS, -1)[:, 1] == 0xFF).all() and not (wanted.reshape(self.layers, ROWS, -1)[:, 0] == 0xFF).all()
        keys = alone["keys"].numpy().reshape(ROWS, EXTENTS, -1)
        for side, held in enumerate((owner, peer)):
            mine = held["keys"].numpy().reshape(ROWS, EXTENTS, -1)
            np.testing.assert_array_equal(mine[:, 0], keys[:, side])
            assert (mine[:, 1] == 0xFF).all()


@pytest.mark.parametrize("row_format", (RowFormat.Q8G64, RowFormat.BF16))
@WAYS
def test_the_owners_packed_rows_reach_the_peer(pair: Pair, control: ctypes.CDLL, way: str, row_format: RowFormat) -> None:
    """Every few layers a sum exchange keeps the sides together, as in a step; the peer's launch may come first."""
    with ExitStack() as stack:
        bench = opened(stack, pair, way, 64, ROWS * row_format.row_bytes(LATENT, ROPE) // 4)
        scene, counters = Layers(bench, row_format), [number(device, 0) for device in pair]
        sums = [put(device, np.ones((1, 64), np.float32)) for device in pair]
        rows = Rows(ROWS, scene.row_bytes)
        for seed in range(12):
            scene.begin()
            control.glm53_cpu_seed(seed, 1 if seed else 0)
            for layer in range(scene.layers):
                scene.launch(pair[0].default_stream, 0, layer, None)
                order = (1, 0) if seed % 2 and bench.exchange.fast else (0, 1)
                for side in order:
                    if side == 1 and not bench.exchange.fast:
                        bench.exchange.enqueue_both(bench.streams, (rows, rows))
                    mail = bench.exchange.mail(side, bench.counters[side], scene.layers, layer)
                    scene.launch(bench.streams[side], side + 1, layer, mail)
                requests = [Sums(array, array, array) for array in sums]
                if bench.exchange.fast:
                    for side in (0, 1):
                        bench.exchange.enqueue(side, bench.streams[side], requests[side], counters[side], 1 << 20, 1 + seed * scene.layers + layer)
                else:
                    bench.exchange.enqueue_both(bench.streams, requests)
            for side in (0, 1):
                bench.count(side)
            bench.check()
            pair[0].synchronize()
            control.glm53_cpu_seed(0, 0)
            scene.verify()


def test_a_row_that_is_not_sent(pair: Pair) -> None:
    """The peer's wait ends, its flag says so, and nothing is stored."""
    with ExitStack() as stack:
        bench = Bench.open(stack, pair, fast=True, budget=600, mail_words=1024)
        scene = Layers(bench)
        scene.begin()
        scene.launch(bench.streams[1], 2, 0, bench.exchange.mail(1, bench.counters[1], 2, 0))
        with pytest.raises(LinkError, match="device 1 got no answer from device 0"):
            bench.check()
        assert (scene.sides[2]["history"].numpy() == 0xFF).all()


@pytest.mark.parametrize("way", ("peer", "staged"))
def test_prompt_rows_are_copied_packed(pair: Pair, way: str) -> None:
    """The owner quantises into a linear buffer, which is copied, and both sides place what it holds."""
    rows, row_bytes = 50, RowFormat.Q8G64.row_bytes(LATENT, ROPE)
    rng = np.random.default_rng(1)
    with ExitStack() as stack:
        bench = Bench.open(stack, pair, fast=False, staged=way == "staged")
        packed = [put(device, np.zeros((rows, row_bytes), np.uint8)) for device in pair]
        linear = put(pair[0], np.arange(rows, dtype=np.uint64) * np.uint64(row_bytes) + np.uint64(Space.LINEAR))
        x, error = put(pair[0], rng.standard_normal((rows, LATENT + ROPE), np.float32), BF16), number(pair[0], 0)
        offsets = (0, 0, 0, packed[0].address)
        row_ops.store_rows(bench.streams[0], x, linear, offsets=offsets, row_format=RowFormat.Q8G64, latent=LATENT, error=error)
        bench.link.copy(packed[0], packed[1], *bench.streams)
        got, slots = [], rng.permutation(rows)
        for device, stream, array in zip(pair, bench.streams, packed, strict=True):
            history = put(device, np.full((rows, row_bytes), 0xFF, np.uint8))
            refs = put(device, slots.astype(np.uint64) * np.uint64(row_bytes) + np.uint64(history.address))
            row_ops.place_rows(stream, array, refs, offsets=(0, 0, 0, 0))
            stream.synchronize()
            got.append(history.numpy())
        np.testing.assert_array_equal(got[0], got[1])
        np.testing.assert_array_equal(got[0][slots], packed[0].numpy())
        assert not (got[0] == 0xFF).all(axis=1).any()


def test_selftest_line(pair: Pair) -> None:
    result = sum_exchange(*pair, rounds=5)
    assert result.passed and "5 sums of 6144 values on devices 0 and 1" in result.detail, result.detail
