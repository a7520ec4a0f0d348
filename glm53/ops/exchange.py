"""The sum of two devices' halves of a product, on both at once: through mailboxes in one kernel, or by copies and `halves.join`; the same bits.

Source of the word format: the low-latency protocol of collective libraries, a value and its number in one 8-byte store. Kernel: exchange.hip.
"""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType
from typing import Self

import numpy as np

from glm53.errors import LinkError
from glm53.hip import Array, Device, Link, Stream
from glm53.hip.buffer import Buffer, MemoryKind
from glm53.ops import halves
from glm53.ops.contract import Cost, Dims, ceil_div, launch
from glm53.ops.pair_args import exchange_args
from glm53.spec import DType

POLLS = 20_000_000  # of one wait: seconds, where a poll gives way for 0.1 us
_T = (DType.F32, DType.BF16)
_CATEGORY = "mailboxes"


class SumExchange:
    """y = T(residual + (p0 + p1)) on both devices of a link, p0 from its first device, p1 from its second.

    `fast`: in-kernel, for a link with peer access; else copies. Every add must reach both devices, in the same order. Invariants: words of exchange n
    lie in set n % 2 of a mailbox; a side that is still reading set n % 2 has not sent what exchange n + 1 waits for. Buffers end with `close()`.
    """

    def __init__(self, link: Link, values_max: int, fast: bool, budget: int = POLLS):
        if fast and not link.peer:
            a, b = (device.index for device in link.devices)
            raise LinkError(f"devices {a} and {b}: in-kernel exchange asked for without peer access ({link.reason}); next: fast=False")
        self.link, self.values_max, self.fast, self.budget = link, values_max, fast, budget
        self._number = 0
        with ExitStack() as undo:
            self._undo = undo
            if fast:
                self._mailboxes = tuple(self._mailbox(device) for device in link.devices)
                self._sequences = tuple(self._zeros(device, DType.U32, 1) for device in link.devices)
                self._errors = tuple(self._zeros(device, DType.U32, 1) for device in link.devices)
            else:
                self._others = tuple(self._zeros(device, DType.F32, values_max) for device in link.devices)
            self._undo = undo.pop_all()

    def _mailbox(self, device: Device) -> Buffer:
        words = np.zeros(2 * self.values_max, np.uint64)
        buffer = device.alloc(words.nbytes, _CATEGORY, MemoryKind.UNCACHED)
        self._undo.callback(buffer.free)
        Array(buffer, DType.U64, words.shape).upload(words)
        return buffer

    def _zeros(self, device: Device, dtype: DType, count: int) -> Array:
        array = Array.from_numpy(device, np.zeros(count, np.float32 if dtype is DType.F32 else np.uint32), dtype, category=_CATEGORY)
        self._undo.callback(array.buffer.free)
        return array

    def add(
        self,
        streams: tuple[Stream, Stream],
        sums: tuple[Array, Array],
        residuals: tuple[Array, Array],
        ys: tuple[Array, Array],
    ) -> None:
        """Enqueues the exchange of one product on both devices.

        streams, then each side's sums [rows, n] f32, residual and y [rows, n] T on its device; y may be residual. At most `values_max` values.
        After a side that did not answer, y is undefined and `check` raises. Raises ContractError.
        """
        for side in (0, 1):  # both before either starts: a side whose other half is refused would wait for it
            d = Dims("exchange_sums")
            d.match("sums", sums[side], "rows", "n", dtype=DType.F32)
            d.match("residual", residuals[side], "rows", "n", dtype=_T)
            d.match("y", ys[side], "rows", "n", dtype=residuals[side].dtype)
            count = d["rows"] * d["n"]
            d.require(count <= self.values_max, f"sums have {count} values, expected at most {self.values_max}")
            d.require(sums[side].shape == sums[0].shape, f"side 1's sums are {sums[side].shape}, expected {sums[0].shape} as side 0's")
        self._number += 1
        if self.fast:
            for side in (0, 1):
                self._launch(side, streams[side], sums[side], residuals[side], ys[side])
            return
        others = [Array(array.buffer, DType.F32, sums[0].shape) for array in self._others]
        self.link.copy(sums[0], others[1], streams[0], streams[1])
        self.link.copy(sums[1], others[0], streams[1], streams[0])
        halves.join(streams[0], sums[0], others[0], residuals[0], ys[0])
        halves.join(streams[1], others[1], sums[1], residuals[1], ys[1])

    def _launch(self, side: int, stream: Stream, sums: Array, residual: Array, y: Array) -> None:
        count = sums.shape[0] * sums.shape[1]
        args = exchange_args(
            sums=sums.address,
            outbox=self._mailboxes[1 - side].address,
            inbox=self._mailboxes[side].address,
            residual=residual.address,
            y=y.address,
            sequence=self._sequences[side].address,
            error=self._errors[side].address,
            budget=self.budget,
            count=count,
            capacity=self.values_max,
            index=self._number % (1 << 32),
        )
        name = f"exchange_sums_{y.dtype.label}"
        launch(stream, name, (ceil_div(count, stream.device.kernel(name).block), 1, 1), args)

    def check(self, streams: tuple[Stream, Stream]) -> None:
        """Waits for what was enqueued. Raises LinkError, naming both devices, if a side did not answer within the budget."""
        for stream in streams:
            stream.synchronize()
        if not self.fast:
            return
        silent = [(int(error.numpy()[0]), side) for side, error in enumerate(self._errors) if error.numpy()[0]]
        if silent:
            number, side = min(silent)
            here, there = self.link.devices[side].index, self.link.devices[1 - side].index
            raise LinkError(
                f"device {here} got no answer from device {there} in exchange {number} within {self.budget} polls; next: look for the first error of "
                f"device {there}, or run with --p2p off"
            )

    def close(self) -> None:
        """Frees the mailboxes. No exchange may be running."""
        self._undo.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def cost_exchange(count: int, item_bytes: int) -> Cost:
    """Of one side: sums, words sent and received, residual and y."""
    return Cost(count * (4 + 8 + 8 + 2 * item_bytes), 2 * count)
