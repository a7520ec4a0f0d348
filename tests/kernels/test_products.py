"""What kernels exchange that make it: sums of products, the columns of an embedding. The bits of one device that has both halves, under any
schedule, and a silent side is an error. cases_halves.py has the words that products post; selections: test_merge.py."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field

import numpy as np
import pytest

from glm53.check.case import round_to
from glm53.check.links import open_link
from glm53.errors import LinkError
from glm53.hip import Array, Device, PeerAccess, Stream
from glm53.mem.extents import ExtentShape
from glm53.ops import step, step_state
from glm53.ops.contract import ContractError
from glm53.ops.exchange import Exchange, Products
from glm53.ops.halves import Halves, half_of
from glm53.ops.matrix import Matrix
from glm53.ops.step import SumMail
from glm53.ops.step_state import Half, RowPlace
from glm53.spec import DType

BF16 = DType.BF16
Pair = tuple[Device, Device]


def put(device: Device, values: np.ndarray, dtype: DType | None = None) -> Array:
    return Array.from_numpy(device, values, dtype, category="test")


@dataclass
class Product:
    """x += w @ v^T on both sides of a pair, each with half of k, and on one device alone."""

    pair: Pair
    rows: int
    k: int = 256
    n: int = 72
    number: int = 0  # of exchanges done
    held: list[list[Array]] = field(default_factory=list)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.rows)
        v, weight = rng.standard_normal((self.rows, self.k), np.float32), rng.standard_normal((self.n, self.k), np.float32)
        self.x = rng.standard_normal((self.rows, self.n), np.float32)
        device = self.pair[0]
        self.whole = put(device, self.x, BF16)
        segment = step.Segment(Matrix.plain(put(device, weight, BF16)), self.whole, step.Epilogue.RESIDUAL)
        scratch = Halves.make(device, self.rows, self.n)
        step.gemv(device.default_stream, put(device, v, BF16), [segment], residual=self.whole, halves=scratch)
        device.synchronize()
        self.streams = [device.stream() for device in self.pair]
        self.counters = [put(device, np.zeros(1, np.uint32)) for device in self.pair]
        for side, device in enumerate(self.pair):
            first, count = half_of(self.k, side)
            columns = [np.ascontiguousarray(values[:, first : first + count]) for values in (v, weight)]
            self.held.append([put(device, values, BF16) for values in (*columns, self.x)])

    def request(self, side: int) -> Products:
        """Of one side; its y becomes the residual at first."""
        v, weight, y = self.held[side]
        y.upload(self.x)
        segment, stream = step.Segment(Matrix.plain(weight), y, step.Epilogue.RESIDUAL), self.streams[side]
        return Products(lambda mail: step.gemv(stream, v, [segment], residual=y, whole_k=self.k, mail=mail), (y,))

    def enqueue(self, exchange: Exchange, side: int) -> None:
        exchange.enqueue(side, self.streams[side], self.request(side), self.counters[side], 1 << 20, self.number + 1)


def opened(stack: ExitStack, pair: Pair, rows: int, fast: bool = True, budget: int | None = None) -> tuple[Exchange, Product]:
    link = stack.enter_context(open_link(*pair, PeerAccess.ON))
    exchange = stack.enter_context(Exchange(link, 9 * 72, fast, budget))
    product = Product(pair, rows)
    for stream in product.streams:
        stack.callback(Stream.close, stream)
    return exchange, product


@pytest.mark.parametrize("rows", (1, 3, 9))
def test_the_bits_of_one_device_under_any_schedule(pair: Pair, control: ctypes.CDLL, rows: int) -> None:
    with ExitStack() as stack:
        exchange, product = opened(stack, pair, rows)
        for seed in range(8):
            control.glm53_cpu_seed(seed, 1 if seed else 0)
            for side in (0, 1):
                product.enqueue(exchange, side)
            exchange.check(product.streams)
            product.number += 1
            control.glm53_cpu_seed(0, 0)
            for side in (0, 1):
                np.testing.assert_array_equal(product.held[side][2].bits(), product.whole.bits())


def test_a_wait_ends(pair: Pair) -> None:
    """A side that gets no answer says so and stores nothing."""
    with ExitStack() as stack:
        exchange, product = opened(stack, pair, 3, budget=600)
        product.enqueue(exchange, 0)
        with pytest.raises(LinkError, match="device 0 got no answer from device 1 in exchange 1"):
            exchange.check(product.streams)
        np.testing.assert_array_equal(product.held[0][2].numpy(), round_to(product.x, BF16))


def test_copies_do_not_pass_products(pair: Pair) -> None:
    with ExitStack() as stack:
        exchange, product = opened(stack, pair, 3, fast=False)
        with pytest.raises(ContractError, match="side 0 passes Products, side 1 Products, expected one kind that copies can pass"):
            exchange.enqueue_both(product.streams, [product.request(side) for side in (0, 1)])


def halves_under_any_schedule(
    pair: Pair, control: ctypes.CDLL, words: int, make: Callable[[int, Stream], tuple[Callable[[SumMail], None], Array]], want: np.ndarray
) -> None:
    """make(side, stream): what a side enqueues and the array that then holds `want` on both; six exchanges, each under another schedule."""
    with ExitStack() as stack:
        exchange = stack.enter_context(Exchange(stack.enter_context(open_link(*pair, PeerAccess.ON)), words, fast=True))
        streams = [device.stream() for device in pair]
        for stream in streams:
            stack.callback(Stream.close, stream)
        counters = [put(device, np.zeros(1, np.uint32)) for device in pair]
        launches, found = zip(*(make(side, stream) for side, stream in enumerate(streams)), strict=True)
        for number in range(6):
            for array in found:
                array.upload(np.zeros(array.shape, want.dtype))
            control.glm53_cpu_seed(number, 1 if number else 0)
            for side in (number % 2, 1 - number % 2):
                exchange.enqueue(side, streams[side], Products(launches[side], (found[side],)), counters[side], 1, number + 1)
            exchange.check(streams)
            control.glm53_cpu_seed(0, 0)
            for array in found:
                np.testing.assert_array_equal(array.numpy(), want)


@pytest.mark.parametrize(("dtype", "low", "high"), [(BF16, 1100, 1090), (BF16, 64, 64), (DType.F32, 1030, 70)])
def test_columns_of_an_embedding(pair: Pair, control: ctypes.CDLL, dtype: DType, low: int, high: int) -> None:
    """Halves of unequal widths, over the border of a block; a token outside the vocabulary is a row of NaN on both."""
    table = round_to(np.random.default_rng(low).standard_normal((50, low + high), np.float32), dtype)
    tokens = np.array([7, 0, 50, 49], np.int32)
    want = np.where((tokens < 50)[:, None], table[np.minimum(tokens, 49)], np.float32(np.nan))

    def make(side: int, stream: Stream) -> tuple[Callable[[SumMail], None], Array]:
        device, columns = pair[side], slice(low) if side == 0 else slice(low, None)
        x = Array.empty(device, dtype, want.shape, category="test")
        embed, positions = put(device, np.ascontiguousarray(table[:, columns]), dtype), put(device, np.full(4, -1, np.int32))
        place = RowPlace(ExtentShape(64, 1, 16), tables=put(device, np.zeros((1, 1), np.uint64)))
        rest = (positions, put(device, np.zeros(4, np.int32)), put(device, np.zeros(4, np.uint64)), place)
        ids = put(device, tokens)
        return lambda mail: step_state.begin(stream, ids, embed, x, *rest, Half(side, mail)), x

    halves_under_any_schedule(pair, control, 4 * max(low, high), make, want)
