"""What the two devices of a pair pass to each other: through mailboxes in one kernel, or by copies and a kernel of its own; the same bits.

Source of the word format: the low-latency protocol of collective libraries, a value and its number in one 8-byte store. Kernels: exchange.hip; packed
rows are posted and taken by part ROWS of step_gemv; lists of a selection: ops/merge.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import numpy as np

from glm53.errors import LinkError
from glm53.hip import Array, Device, Link, Stream
from glm53.hip.buffer import Buffer, MemoryKind
from glm53.ops import halves, merge
from glm53.ops.contract import Cost, Dims, ceil_div, launch, require_index
from glm53.ops.merge import Lists
from glm53.ops.pair_args import exchange_args, exchange_parts_args
from glm53.ops.step import SumMail
from glm53.ops.step_parts import Patience, RowMail
from glm53.spec import DType

POLLS = 10_000_000  # of one wait: about ten seconds of a device, where a poll is an access to uncached memory and a sleep of 0.1 us
POLLS_CPU = 30_000  # on the cpu runtime, of all blocks of a kernel together: seconds, and less than what it takes for a deadlock
_T = (DType.F32, DType.BF16)
_CATEGORY = "mailboxes"


@dataclass(frozen=True)
class Sums:
    """y = T(residual + (p0 + p1)): sums [rows, n] f32 of this side, residual and y [rows, n] T; y may be residual."""

    sums: Array
    residual: Array
    y: Array


@dataclass(frozen=True)
class Products:
    """What a kernel exchanges that makes it, the sums of a product or a selection: launch(mail) enqueues it on the side's stream. shared: what both
    sides then have. In kernels alone."""

    launch: Callable[[SumMail], None]
    shared: tuple[Array, ...]


@dataclass(frozen=True)
class Parts:
    """whole [rows, n0 + n1] = the columns of side 0, then those of side 1; mine [rows, n_side]. Any dtype of 2 or 4 bytes whose rows are whole words
    of 32 bits; not overlapping."""

    mine: Array
    whole: Array


@dataclass(frozen=True)
class Rows:
    """The packed rows of `rows` query rows of a layer, row_bytes each, from the owner's part ROWS to the peer's (`Exchange.mail`)."""

    rows: int
    row_bytes: int


Request = Sums | Products | Parts | Lists | Rows


class Exchange:
    """Mailboxes of a link's two devices, for every kind of exchange: side 0 is the link's first device, the owner of a pair, side 1 the peer.

    `fast`: in kernels, for a link with peer access; else by copies. words_max: most words of 32 bits that a side sends in one exchange; mail_words:
    of the packed rows of a step (rows * row_bytes / 4), 0: none. budget: polls of one wait, None: seconds.

    Invariants: an exchange has a number, counter * per_step + index, one more than the one before it on both sides; words of exchange n lie in set
    n % 2 of a mailbox; a side that is still reading set n % 2 has not sent what exchange n + 1 waits for. Mail has one set (hipsrc/kernels/step.hip).
    A wait that ends in vain sets the side's error flag, and no later one of that side waits, until `reset`. Buffers end with `close()`.
    """

    def __init__(self, link: Link, words_max: int, fast: bool, budget: int | None = None, *, mail_words: int = 0):
        if fast and not link.peer:
            a, b = (device.index for device in link.devices)
            raise LinkError(f"devices {a} and {b}: in-kernel exchange asked for without peer access ({link.reason}); next: fast=False")
        self.link, self.words_max, self.fast, self.mail_words = link, words_max, fast, mail_words
        on_cpu = link.devices[0].runtime.name == "cpu"
        self.patience = Patience(budget or (POLLS_CPU if on_cpu else POLLS), shared=on_cpu and budget is None)
        with ExitStack() as undo:
            self._undo = undo
            owner, peer = link.devices
            self._errors = tuple(self._zeros(device, DType.U32, 1) for device in link.devices)
            self._inboxes = tuple(self._mailbox(device, 2 * words_max) for device in link.devices) if fast else ()
            self._others = () if fast else tuple(self._zeros(device, DType.U32, words_max) for device in link.devices)
            self._mail_in = self._mailbox(peer, mail_words) if mail_words else None
            self._mail_out = self._zeros(owner, DType.U64, mail_words) if mail_words and not fast else self._mail_in
            self.reset()
            self._undo = undo.pop_all()

    def _mailbox(self, device: Device, words: int) -> Array:
        buffer: Buffer = device.alloc(8 * words, _CATEGORY, MemoryKind.UNCACHED)
        self._undo.callback(buffer.free)
        return Array(buffer, DType.U64, (words,))

    def _zeros(self, device: Device, dtype: DType, count: int) -> Array:
        array = Array.from_numpy(device, np.zeros(count, np.uint64 if dtype is DType.U64 else np.uint32), dtype, category=_CATEGORY)
        self._undo.callback(array.buffer.free)
        return array

    def reset(self) -> None:
        """Empties the mailboxes and clears the errors, on both sides. Neither device may be working on an exchange."""
        for error in self._errors:
            error.upload(np.zeros(1, np.uint32))
        for inbox in self._inboxes:  # a word of a set is empty with a number of the other set
            inbox.upload(np.repeat(np.array([1 << 32, 0], np.uint64), self.words_max))
        for mail in (self._mail_in, self._mail_out):
            if mail is not None:
                mail.upload(np.zeros(self.mail_words, np.uint64))

    def errors(self, side: int) -> Array:
        """[1] u32 on the device of `side`: number of an exchange that got no answer, or 0."""
        return self._errors[side]

    def mail(self, side: int, counter: Array, per_step: int, index: int) -> RowMail:
        """What part ROWS of `side` needs to send (0) or take (1) the packed rows of layer `index` of `per_step`, from 0; counter [1] u32 there.

        Without `fast`, `enqueue_both` with Rows comes between the two launches. Raises ValueError if there is no room for mail.
        """
        box = self._mail_in if side else self._mail_out
        if box is None:
            raise ValueError("Exchange.mail: mail_words is 0, expected the words of the packed rows of a step")
        return RowMail(box.address, self.mail_words, bool(side), counter, per_step, index, self._errors[side], self.patience)

    def enqueue(self, side: int, stream: Stream, request: Request, counter: Array, per_step: int, index: int) -> None:
        """One side's kernel of exchange number counter * per_step + index, `fast` alone; Rows: none. The other side's must be enqueued as well.

        counter [1] u32 on the side's device, index from 1: read when the kernel runs, so that a recorded launch counts on. After a side that did not
        answer, the result is undefined and its error flag is set. Raises ContractError.
        """
        d = Dims("exchange")
        d.require(self.fast, "enqueue wants in-kernel exchange; next: enqueue_both")
        d.match("counter", counter, 1, dtype=DType.U32)
        require_index(d, "index", index, per_step)
        d.require(counter.device is self.link.devices[side], f"counter is on {counter.device}, expected the device of side {side}")
        if isinstance(request, Rows):
            return
        outbox, inbox, error = self._inboxes[1 - side], self._inboxes[side], self._errors[side]
        if isinstance(request, Products):
            request.launch(SumMail(outbox.address, inbox.address, self.words_max, counter, per_step, index, error, self.patience))
            return
        if isinstance(request, Lists):
            budget = self.patience.of(request.entries.shape[0])
            merge.exchange(stream, request, outbox.address, inbox.address, counter, per_step, index, self.words_max, error, budget)
            return
        args: exchange_args | exchange_parts_args
        if isinstance(request, Sums):
            args, name = _sums_args(self, request), f"exchange_sums_{request.y.dtype.label}"
            count = args.count
        else:
            args, name = _parts_args(self.words_max, request, side), "exchange_parts"
            count = args.rows * max(args.my_words, args.other_words)
        constants = stream.device.kernel(name).constants
        blocks = min(ceil_div(count, constants["words"]), constants["blocks_max"])
        args.outbox, args.inbox, args.counter, args.error = outbox.address, inbox.address, counter.address, error.address
        args.capacity, args.per_step, args.index, args.blocks = self.words_max, per_step, index, blocks
        args.budget = self.patience.of(blocks)
        launch(stream, name, (blocks, 1, 1), args)

    def enqueue_both(self, streams: Sequence[Stream], requests: Sequence[Request]) -> None:
        """An exchange by copies, of any link, on both sides: streams and requests of side 0 and of side 1, of one kind. Raises ContractError."""
        d = Dims("exchange")
        low, high = requests
        d.require(not self.fast, "enqueue_both is for exchange by copies; next: enqueue")
        if isinstance(low, Sums) and isinstance(high, Sums):
            for request in (low, high):
                _sums_args(self, request)
            d.require(low.sums.shape == high.sums.shape, f"side 1's sums are {high.sums.shape}, expected {low.sums.shape} as side 0's")
            others = self._swap(streams, low.sums, high.sums)
            halves.join(streams[0], low.sums, others[0], low.residual, low.y)
            halves.join(streams[1], others[1], high.sums, high.residual, high.y)
        elif isinstance(low, Parts) and isinstance(high, Parts):
            sides = (_parts_args(self.words_max, low, 0), _parts_args(self.words_max, high, 1))
            shape = (sides[1].rows, sides[1].other_words, sides[1].my_words)
            wanted = (sides[0].rows, sides[0].my_words, sides[0].other_words)
            d.require(shape == wanted, f"side 1 has (rows, words of side 0, of side 1) {shape}, expected {wanted} as side 0")
            others = self._swap(streams, low.mine, high.mine)
            halves.join_parts(streams[0], low.mine, others[0], low.whole)
            halves.join_parts(streams[1], others[1], high.mine, high.whole)
        elif isinstance(low, Lists) and isinstance(high, Lists):
            self._swap_lists(d, streams, low, high)
        elif isinstance(low, Rows) and low == high:
            words = low.rows * low.row_bytes // 4
            d.require(1 <= words <= self.mail_words, f"{low} has {words} words, expected 1 to mail_words={self.mail_words}")
            assert self._mail_in is not None and self._mail_out is not None
            self.link.copy(self._mail_out.slice(0, words), self._mail_in.slice(0, words), streams[0], streams[1])
        else:
            kinds = [type(request).__name__ for request in requests]
            d.fail(f"side 0 passes {kinds[0]}, side 1 {kinds[1]}, expected one kind that copies can pass, Rows the same")

    def _swap(self, streams: Sequence[Stream], low: Array, high: Array) -> tuple[Array, Array]:
        """Side 1's array on side 0, and side 0's on side 1."""
        others = (Array(self._others[0].buffer, high.dtype, high.shape), Array(self._others[1].buffer, low.dtype, low.shape))
        self.link.copy(low, others[1], streams[0], streams[1])
        self.link.copy(high, others[0], streams[1], streams[0])
        return others

    def _swap_lists(self, d: Dims, streams: Sequence[Stream], low: Lists, high: Lists) -> None:
        """Entries, then counts, and the merge on both sides."""
        shape = low.entries.shape
        d.require(len(shape) == 2 and shape == high.entries.shape, f"side 1's entries are {high.entries.shape}, expected {shape} as side 0's, 2 dims")
        d.require(low.counts.shape == high.counts.shape == shape[:1], f"counts are {low.counts.shape} and {high.counts.shape}, expected {shape[:1]}")
        needed = merge.words(*shape)
        d.require(needed <= self.words_max, f"lists have {needed} words, expected at most {self.words_max}")
        copies = []
        for source, lists in enumerate((low, high)):
            target = 1 - source
            buffer = self._others[target].buffer
            entries, counts = Array(buffer, DType.U64, shape), Array(buffer, DType.I32, shape[:1], lists.entries.nbytes)
            self.link.copy(lists.entries, entries, streams[source], streams[target])
            self.link.copy(lists.counts, counts, streams[source], streams[target])
            copies.append((entries, counts))
        merge.merge(streams[0], low, *copies[1])
        merge.merge(streams[1], high, *copies[0])

    def raise_silent(self, numbers: Sequence[int]) -> None:
        """Raises LinkError, naming both devices, if a side's error flag (side 0's, side 1's) is the number of an exchange; 0, 0: returns."""
        silent = [(number, side) for side, number in enumerate(numbers) if number]
        if silent:
            number, side = min(silent)
            here, there = self.link.devices[side].index, self.link.devices[1 - side].index
            raise LinkError(
                f"device {here} got no answer from device {there} in exchange {number} within {self.patience.polls} polls; next: look for the first "
                f"error of device {there}, or run with --p2p off"
            )

    def check(self, streams: Sequence[Stream]) -> None:
        """Waits for what was enqueued, then `raise_silent` of the flags."""
        for stream in streams:
            stream.synchronize()
        self.raise_silent([int(error.numpy()[0]) for error in self._errors])

    def close(self) -> None:
        """Frees the mailboxes. No exchange may be running."""
        self._undo.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _sums_args(exchange: Exchange, request: Sums) -> exchange_args:
    d = Dims("exchange_sums")
    d.match("sums", request.sums, "rows", "n", dtype=DType.F32)
    d.match("residual", request.residual, "rows", "n", dtype=_T)
    d.match("y", request.y, "rows", "n", dtype=request.residual.dtype)
    count = d["rows"] * d["n"]
    d.require(count <= exchange.words_max, f"sums have {count} values, expected at most {exchange.words_max}")
    return exchange_args(sums=request.sums.address, residual=request.residual.address, y=request.y.address, count=count)


def _parts_args(words_max: int, request: Parts, side: int) -> exchange_parts_args:
    d = Dims("exchange_parts")
    mine, whole = request.mine, request.whole
    d.match("mine", mine, "rows", "columns")
    d.match("whole", whole, "rows", "row", dtype=mine.dtype)
    d.distinct("mine", mine, "whole", whole)
    d.require(mine.dtype.item_bytes in (2, 4), f"mine is {mine.dtype.label}, expected a type of 2 or 4 bytes")
    d.require(d["columns"] < d["row"], f"mine has {d['columns']} columns, expected fewer than whole's {d['row']}: the other side has the rest")
    sizes = [columns * mine.dtype.item_bytes for columns in (d["columns"], d["row"] - d["columns"])]
    d.require(all(size % 4 == 0 for size in sizes), f"rows of the sides have {sizes} bytes, expected multiples of 4")
    d.require(mine.address % 4 == 0 and whole.address % 4 == 0, "mine and whole: expected addresses that are multiples of 4")
    words = d["rows"] * max(sizes) // 4
    d.require(words <= words_max, f"parts have {words} words, expected at most {words_max}")
    return exchange_parts_args(mine=mine.address, whole=whole.address, rows=d["rows"], my_words=sizes[0] // 4, other_words=sizes[1] // 4, side=side)


def cost_sums(count: int, item_bytes: int) -> Cost:
    """Of one side: sums, words sent and received, residual and y."""
    return Cost(count * (4 + 8 + 8 + 2 * item_bytes), 2 * count)


def cost_parts(my_words: int, other_words: int) -> Cost:
    """Of one side: its part read, sent and stored, the other's received and stored."""
    return Cost(my_words * (4 + 8 + 4) + other_words * (8 + 4), 0)
