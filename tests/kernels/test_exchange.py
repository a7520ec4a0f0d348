"""The sum of two devices' halves: kernels and copies give the bits of the plain sum on both sides, in order, and a silent side is an error."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np
import pytest

from glm53.check.case import round_to
from glm53.check.links import open_link, sum_exchange
from glm53.errors import Glm53Error, LinkError
from glm53.hip import Array, Device, Link, PeerAccess, Stream, runtime
from glm53.ops.contract import ContractError
from glm53.ops.exchange import SumExchange
from glm53.spec import DType

F32, BF16 = DType.F32, DType.BF16


@pytest.fixture
def pair() -> Iterator[tuple[Device, Device]]:
    if runtime.select().device_count < 2:
        pytest.skip("needs two devices")
    devices = (Device(0), Device(1))
    yield devices
    for device in devices:
        device.close(free_buffers=True)


@pytest.fixture
def control() -> Iterator[ctypes.CDLL]:
    """The cpu runtime's own symbols; faults and seeds end with the test."""
    if runtime.select().name != "cpu":
        pytest.skip("needs the cpu runtime")
    library = runtime.control()
    yield library
    library.glm53_cpu_seed(0, 0)


def streams_of(stack: ExitStack, pair: tuple[Device, Device]) -> tuple[Stream, Stream]:
    streams = (pair[0].stream(), pair[1].stream())
    for stream in streams:
        stack.callback(stream.close)
    return streams


def opened(stack: ExitStack, pair: tuple[Device, Device], mode: PeerAccess) -> Link:
    return stack.enter_context(open_link(*pair, mode))


def run(
    pair: tuple[Device, Device], exchange: SumExchange, streams: tuple[Stream, Stream], shape: tuple[int, int], dtype: DType, rounds: int
) -> None:
    """Rounds with new sums each, x = T(x + (p0 + p1)) over and over, against numpy."""
    rng = np.random.default_rng(rounds)
    x = round_to(rng.standard_normal(shape, np.float32), dtype)
    held = tuple(Array.from_numpy(device, x, dtype) for device in pair)
    for _ in range(rounds):
        parts = [rng.standard_normal(shape, np.float32) for _ in pair]
        sums = tuple(Array.from_numpy(device, part) for device, part in zip(pair, parts, strict=True))
        exchange.add(streams, (sums[0], sums[1]), (held[0], held[1]), (held[0], held[1]))
        exchange.check(streams)
        x = round_to(x + (parts[0] + parts[1]), dtype)
        for array in sums:
            array.buffer.free()
    for array in held:
        assert (array.numpy() == x).all()
        array.buffer.free()


@pytest.mark.parametrize("dtype", (F32, BF16))
@pytest.mark.parametrize("shape", ((1, 1), (1, 6144), (3, 257)))
def test_both_ways_give_the_plain_sum(pair: tuple[Device, Device], shape: tuple[int, int], dtype: DType) -> None:
    with ExitStack() as stack:
        link, streams = opened(stack, pair, PeerAccess.ON), streams_of(stack, pair)
        for fast in (True, False):
            with SumExchange(link, 3 * 6144, fast) as exchange:
                run(pair, exchange, streams, shape, dtype, 7)


def test_more_than_two_hundred_in_a_row_without_a_stop(pair: tuple[Device, Device]) -> None:
    """None waits for the host: a side that ran ahead by two would read words of the wrong exchange."""
    shape, rounds = (1, 700), 250
    parts = np.random.default_rng(3).standard_normal((rounds, 2, *shape)).astype(np.float32)
    with ExitStack() as stack:
        link, streams = opened(stack, pair, PeerAccess.ON), streams_of(stack, pair)
        exchange = stack.enter_context(SumExchange(link, shape[1], fast=True))
        sums = [[Array.from_numpy(device, part) for device, part in zip(pair, both, strict=True)] for both in parts]
        held = tuple(Array.from_numpy(device, np.zeros(shape, np.float32)) for device in pair)
        for a, b in sums:
            exchange.add(streams, (a, b), (held[0], held[1]), (held[0], held[1]))
        exchange.check(streams)
        want = np.zeros(shape, np.float32)
        for low, high in parts:
            want = want + (low + high)
        for array in held:
            assert (array.numpy() == want).all()


def test_any_schedule_gives_the_same(pair: tuple[Device, Device], control: ctypes.CDLL) -> None:
    with ExitStack() as stack:
        link, streams = opened(stack, pair, PeerAccess.ON), streams_of(stack, pair)
        for fast in (True, False):
            exchange = stack.enter_context(SumExchange(link, 6144, fast))
            for seed in range(1, 21):
                control.glm53_cpu_seed(seed, 1)
                run(pair, exchange, streams, (1, 300), BF16, 4)
                control.glm53_cpu_seed(0, 0)


def test_numbers_wrap(pair: tuple[Device, Device]) -> None:
    with ExitStack() as stack:
        link, streams = opened(stack, pair, PeerAccess.ON), streams_of(stack, pair)
        exchange = stack.enter_context(SumExchange(link, 64, fast=True))
        exchange._number = (1 << 32) - 4
        run(pair, exchange, streams, (1, 64), F32, 8)


def test_a_silent_side_is_an_error_that_names_both(pair: tuple[Device, Device]) -> None:
    with ExitStack() as stack:
        link, streams = opened(stack, pair, PeerAccess.ON), streams_of(stack, pair)
        exchange = stack.enter_context(SumExchange(link, 64, fast=True, budget=50))
        ones = Array.from_numpy(pair[0], np.ones((1, 64), np.float32))
        for number in (1, 2, 3):
            exchange._number = number
            exchange._launch(0, streams[0], ones, ones, ones)
        with pytest.raises(LinkError, match=r"device 0 got no answer from device 1 in exchange \d within 50 polls; next: .*--p2p off"):
            exchange.check(streams)


def test_refusals(pair: tuple[Device, Device]) -> None:
    with ExitStack() as stack:
        streams = streams_of(stack, pair)
        staged = opened(stack, pair, PeerAccess.OFF)
        with pytest.raises(LinkError, match="devices 0 and 1: in-kernel exchange asked for without peer access"):
            SumExchange(staged, 64, fast=True)
        for link, fast in ((staged, False), (opened(stack, pair, PeerAccess.ON), True)):
            exchange = stack.enter_context(SumExchange(link, 64, fast))
            arrays = tuple(Array.from_numpy(device, np.ones((1, 65), np.float32)) for device in pair)
            both = (arrays[0], arrays[1])
            with pytest.raises(ContractError, match="sums have 65 values, expected at most 64"):
                exchange.add(streams, both, both, both)


@pytest.mark.parametrize("mode", (PeerAccess.ON, PeerAccess.OFF))
def test_a_refused_side_starts_neither(pair: tuple[Device, Device], mode: PeerAccess) -> None:
    """The other side does not wait for it, and the next exchange is right."""
    with ExitStack() as stack:
        link, streams = opened(stack, pair, mode), streams_of(stack, pair)
        exchange = stack.enter_context(SumExchange(link, 64, fast=mode is PeerAccess.ON, budget=1000))
        good, odd = (tuple(Array.from_numpy(device, np.ones((1, n), np.float32)) for device in pair) for n in (64, 63))
        sides = (good[0], good[1])
        for second, ys in ((odd[1], sides), (Array.from_numpy(pair[1], np.ones((1, 64), np.uint32)), sides), (odd[1], (good[0], odd[1]))):
            with pytest.raises(ContractError):
                exchange.add(streams, (good[0], second), ys, ys)
            exchange.check(streams)
            np.testing.assert_array_equal(good[0].numpy(), 1)
        run(pair, exchange, streams, (1, 64), F32, 3)


def test_nothing_is_left(pair: tuple[Device, Device], control: ctypes.CDLL) -> None:
    with ExitStack() as stack:
        link = opened(stack, pair, PeerAccess.ON)
        before = [device.allocated_bytes() for device in pair]
        for fast in (True, False):
            for _ in range(100):
                SumExchange(link, 256, fast).close()
        assert [device.allocated_bytes() for device in pair] == before
        for call in (b"hipMalloc", b"hipExtMallocWithFlags"):
            for nth in range(1, 5):
                control.glm53_cpu_fail(call, nth, 2)
                try:
                    with SumExchange(link, 256, fast=True):
                        pass
                except Glm53Error:
                    pass
                finally:
                    control.glm53_cpu_fail(call, 0, 0)
                assert [device.allocated_bytes() for device in pair] == before, f"{call!r} {nth}"


def test_selftest_line(pair: tuple[Device, Device]) -> None:
    result = sum_exchange(*pair, rounds=5)
    assert result.passed and "5 sums of 6144 values on devices 0 and 1" in result.detail, result.detail
