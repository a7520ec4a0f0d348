"""Links between devices, opened with the kernel whose stores are to be checked; the matrix of all of them on this machine; the exchange of sums."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import combinations
from typing import Any

import numpy as np

from glm53.check.litmus import Broken, Result, report
from glm53.errors import Glm53Error, LinkStuck
from glm53.hip import Array, Device, Link, PeerAccess, Stream, runtime
from glm53.ops import litmus
from glm53.ops.exchange import Exchange, Sums
from glm53.spec import DType

EXCHANGE_VALUES, EXCHANGE_ROUNDS = 6144, 100  # one row of GLM-5.3, exchanges of a check


def open_link(a: Device, b: Device, mode: PeerAccess) -> Link:
    """`Link.probe` with the kernel that copies words; arguments, result and errors are its own."""
    return Link.probe(a, b, mode, litmus.copy_words)


def link_matrix() -> list[dict[str, Any]]:
    """One row per ordered pair of devices of the runtime in use, in order of (source, target); none for a single device.

    source, target: indices; peer_access: copies and kernels of the source reach the target's memory; checked: a payload arrived unchanged, by peer
    access or staged; bytes_per_s, latency_us: of copies, None if not checked; reason: why there is no peer access or no link, else "".
    Raises LinkStuck if a device does not come back; its memory and the devices stay open then.
    """
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        devices = [Device(index) for index in range(runtime.select().device_count)]
        for device in devices:
            stack.callback(device.close)
        for a, b in combinations(devices, 2):
            try:
                rows += _rows(a, b)
            except LinkStuck:
                stack.pop_all()
                raise
    return sorted(rows, key=lambda row: (row["source"], row["target"]))


def _rows(a: Device, b: Device) -> list[dict[str, Any]]:
    try:
        with open_link(a, b, PeerAccess.AUTO) as link:
            return [
                {
                    "source": way.source,
                    "target": way.target,
                    "peer_access": link.peer,
                    "checked": True,
                    "bytes_per_s": round(way.bytes_per_s),
                    "latency_us": round(way.latency_us, 2),
                    "reason": link.reason,
                }
                for way in link.ways.values()
            ]
    except LinkStuck:
        raise
    except Glm53Error as error:
        none = {"peer_access": False, "checked": False, "bytes_per_s": None, "latency_us": None, "reason": str(error)}
        return [{"source": source.index, "target": target.index, **none} for source, target in ((a, b), (b, a))]


def sum_exchange(a: Device, b: Device, rounds: int = EXCHANGE_ROUNDS) -> Result:
    """`exchange_litmus` on a link of its own."""

    def body(stack: ExitStack) -> str:
        return _sums_both_ways(stack, stack.enter_context(open_link(a, b, PeerAccess.ON)), rounds)

    return report("sum exchange", body)


def exchange_litmus(link: Link, rounds: int = EXCHANGE_ROUNDS) -> Result:
    """Sums of an `Exchange` in kernels against copies, on a link with peer access: the same bits on both devices, round after round, recorded on both
    sides and replayed; and how long a round takes."""
    return report("sum exchange", lambda stack: _sums_both_ways(stack, link, rounds))


def _sums_both_ways(stack: ExitStack, link: Link, rounds: int) -> str:
    a, b = link.devices
    streams = (_kept(stack, a.stream()), _kept(stack, b.stream()))
    rng = np.random.default_rng(1)
    low, high, x = (rng.standard_normal((1, EXCHANGE_VALUES), np.float32) for _ in range(3))
    sums = (_array(stack, a, low, DType.F32), _array(stack, b, high, DType.F32))
    results, times = [], []
    for way in (_replayed, _copied):
        held = [_array(stack, device, x, DType.BF16) for device in (a, b)]
        requests = [Sums(part, array, array) for part, array in zip(sums, held, strict=True)]
        times.append(way(stack, link, streams, requests, rounds))
        results += [array.bits() for array in held]
    if not all((bits == results[0]).all() for bits in results[1:]):
        raise Broken(f"devices {a.index} and {b.index}: sums differ between sides, or between kernels and copies")
    text = f"{rounds} sums of {EXCHANGE_VALUES} values on devices {a.index} and {b.index}"
    return f"{text}, {times[0]:.1f} us each replayed, by copies {times[1]:.1f} with their launches"


def _replayed(stack: ExitStack, link: Link, streams: tuple[Stream, Stream], requests: Sequence[Sums], rounds: int) -> float:
    """Two replays of the rounds by kernels; microseconds of a round in the second, by the events of the first device."""
    exchange = stack.enter_context(Exchange(link, EXCHANGE_VALUES, fast=True))
    counters = [_array(stack, device, np.zeros(1, np.uint32), DType.U32) for device in link.devices]
    graphs = []
    for side, stream in enumerate(streams):
        with stream.capture() as capture:
            for index in range(1, rounds + 1):
                exchange.enqueue(side, stream, requests[side], counters[side], rounds, index)
        graphs.append(capture.graph)
        stack.callback(capture.graph.close)
    start, end = (link.devices[0].event(timing=True) for _ in range(2))
    stack.callback(start.close)
    stack.callback(end.close)
    for step in range(2):
        for counter in counters:
            counter.upload(np.array([step], np.uint32))
        start.record(streams[0])
        for graph, stream in zip(graphs, streams, strict=True):
            graph.launch(stream)
        end.record(streams[0])
        exchange.check(streams)
    return end.elapsed_us(start) / rounds


def _copied(stack: ExitStack, link: Link, streams: tuple[Stream, Stream], requests: Sequence[Sums], rounds: int) -> float:
    """Twice the rounds by copies; microseconds of a round, enqueueing included."""
    exchange = stack.enter_context(Exchange(link, EXCHANGE_VALUES, fast=False))
    started = time.perf_counter()
    for _ in range(2 * rounds):
        exchange.enqueue_both(streams, requests)
    exchange.check(streams)
    return (time.perf_counter() - started) / (2 * rounds) * 1e6


def _kept(stack: ExitStack, stream: Stream) -> Stream:
    stack.callback(stream.close)
    return stream


def _array(stack: ExitStack, device: Device, values: np.ndarray, dtype: DType) -> Array:
    array = Array.from_numpy(device, values, dtype, category="litmus")
    stack.callback(array.buffer.free)
    return array
