"""Products in two halves of k: the sum of prompt rows (matmul.hip), and what two blocks need of a decode step (step_halves.hip, step_experts.hip).

Products whose k a pair of devices shares (o, down) are computed as two halves of k, which are added in f32, on one device as on two
(docs/decisions/0004-step-graph.md, Bits).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from glm53.hip import Array, Device, Stream
from glm53.ops.contract import Dims, ceil_div, launch
from glm53.ops.pair_args import join_halves_args, join_parts_args
from glm53.spec import DType

_COLUMNS, _WAVES = 32, 8  # COLS and WAVES of wave_product.h
_ROWS = (8, 10)  # `rows` of the LAUNCH lines of step_halves.hip


@dataclass(frozen=True)
class Halves:
    """partial [..] f32, arrivals [..] u32, 0 before and after each launch. One launch at a time may use them."""

    partial: Array
    arrivals: Array

    @classmethod
    def make(cls, device: Device, rows: int, n: int) -> Halves:
        """For up to `rows` rows and `n` columns."""
        partial = Array.empty(device, DType.F32, (_partial_floats(rows, n),), category="workspace")
        return cls(partial, Array.from_numpy(device, np.zeros(_sets(rows, n), np.uint32), category="workspace"))

    def check(self, d: Dims, rows: int, n: int) -> None:
        """Raises ContractError if they are too small for `rows` rows of `n` columns."""
        d.match("halves.partial", self.partial, None, dtype=DType.F32)
        d.match("halves.arrivals", self.arrivals, None, dtype=DType.U32)
        for name, array, wanted in (("partial", self.partial, _partial_floats(rows, n)), ("arrivals", self.arrivals, _sets(rows, n))):
            d.require(
                array.shape[0] >= wanted, f"halves.{name} has {array.shape[0]} items, expected at least {wanted} for {rows} rows of {n} columns"
            )


def first_half(k: int) -> int:
    """Values of k in the first half: whole groups of 64."""
    return ceil_div(k, 128) * 64


def half_of(k: int, half: int) -> tuple[int, int]:
    """(first value, number of values) of half 0 or 1 of k. Half 1 of k up to 64 is empty."""
    if half not in (0, 1):
        raise ValueError(f"half is {half}, expected 0 or 1")
    low = min(first_half(k), k)
    return (low, k - low) if half else (0, low)


def join(stream: Stream, low: Array, high: Array, residual: Array, y: Array) -> None:
    """y = T(residual + (low + high)): both halves of a product of prompt rows.

    low, high [rows, n] f32, residual and y [rows, n] T, f32 or bf16; y may be residual. Enqueues one kernel. Raises ContractError.
    """
    d = Dims("join_halves")
    for name, array in (("low", low), ("high", high)):
        d.match(name, array, "rows", "n", dtype=DType.F32)
    d.match("residual", residual, "rows", "n", dtype=(DType.F32, DType.BF16))
    d.match("y", y, "rows", "n", dtype=residual.dtype)
    count = d["rows"] * d["n"]
    args = join_halves_args(low=low.address, high=high.address, residual=residual.address, y=y.address, count=count)
    name = f"join_halves_{y.dtype.label}"
    launch(stream, name, (ceil_div(count, stream.device.kernel(name).constants["values"]), 1, 1), args)


def join_parts(stream: Stream, low: Array, high: Array, whole: Array) -> None:
    """whole [rows, n0 + n1] = columns of low [rows, n0], then of high [rows, n1], whose rows are whole words of 32 bits. Raises ContractError."""
    d = Dims("join_parts")
    d.match("low", low, "rows", "n0")
    d.match("high", high, "rows", "n1", dtype=low.dtype)
    d.match("whole", whole, "rows", d["n0"] + d["n1"], dtype=low.dtype)
    words = [d[n] * low.dtype.item_bytes // 4 for n in ("n0", "n1")]
    d.require(all(d[n] * low.dtype.item_bytes % 4 == 0 for n in ("n0", "n1")), f"rows have {d['n0']} and {d['n1']} values, expected whole words")
    args = join_parts_args(low=low.address, high=high.address, whole=whole.address, low_words=words[0], high_words=words[1])
    launch(stream, "join_parts", (ceil_div(sum(words), stream.device.kernel("join_parts").block), d["rows"], 1), args)


def _sets(rows: int, n: int) -> int:
    """Sets of columns, each with rows of its own at most."""
    return rows * ceil_div(n, _COLUMNS)


def _partial_floats(rows: int, n: int) -> int:
    """Two halves of whole sets, which short products give to each wave."""
    short = max(ceil_div(rows, each) * each for each in _ROWS) * ceil_div(n, _WAVES * _COLUMNS) * _WAVES * _COLUMNS
    return 2 * max(_sets(rows, n) * _ROWS[0] * _COLUMNS, short)
