"""Links between devices, opened with the kernel whose stores are to be checked; the matrix of all of them on this machine; the exchange of sums."""

from __future__ import annotations

import time
from contextlib import ExitStack
from itertools import combinations
from typing import Any

import numpy as np

from glm53.check.litmus import Broken, Result, report
from glm53.errors import Glm53Error, LinkStuck
from glm53.hip import Array, Device, Link, PeerAccess, Stream, runtime
from glm53.ops import litmus
from glm53.ops.exchange import SumExchange
from glm53.spec import DType

EXCHANGE_VALUES, EXCHANGE_ROUNDS = 6144, 50  # one row of GLM-5.3, exchanges of a check


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
    """`SumExchange` in kernels against copies: the same bits on both devices, round after round with new values; and how long a round takes."""

    def body(stack: ExitStack) -> str:
        link = stack.enter_context(open_link(a, b, PeerAccess.ON))
        fast, slow = (stack.enter_context(SumExchange(link, EXCHANGE_VALUES, way)) for way in (True, False))
        streams = (_kept(stack, a.stream()), _kept(stack, b.stream()))
        rng = np.random.default_rng(1)
        shape = (1, EXCHANGE_VALUES)
        low, high, x = (rng.standard_normal(shape, np.float32) for _ in range(3))
        sums = (_array(stack, a, low, DType.F32), _array(stack, b, high, DType.F32))
        results, seconds = [], []
        for exchange in (fast, slow):
            held = (_array(stack, a, x, DType.BF16), _array(stack, b, x, DType.BF16))
            started = time.perf_counter()
            for _ in range(rounds):
                exchange.add(streams, sums, held, held)
            exchange.check(streams)
            seconds.append((time.perf_counter() - started) / rounds * 1e6)
            results += [array.bits() for array in held]
        if not all((bits == results[0]).all() for bits in results[1:]):
            raise Broken(f"devices {a.index} and {b.index}: sums differ between sides, or between kernels and copies")
        text = f"{rounds} sums of {EXCHANGE_VALUES} values on devices {a.index} and {b.index}"
        return f"{text}, {seconds[0]:.1f} us each, by copies {seconds[1]:.1f}; launches included"

    return report("sum exchange", body)


def _kept(stack: ExitStack, stream: Stream) -> Stream:
    stack.callback(stream.close)
    return stream


def _array(stack: ExitStack, device: Device, values: np.ndarray, dtype: DType) -> Array:
    array = Array.from_numpy(device, values, dtype, category="litmus")
    stack.callback(array.buffer.free)
    return array
