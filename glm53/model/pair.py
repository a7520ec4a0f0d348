"""What the devices of a pair share: the link, the exchanges of steps and of prompt rows, the owner's row mail (docs/decisions/0006-pair.md)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from glm53.config import MTP_DEPTH_MAX
from glm53.errors import Glm53Error, LinkError
from glm53.hip import Array, Link, Stream
from glm53.ops.exchange import Exchange, Lists, Parts, Products, Request, Rows, Sums
from glm53.ops.merge import select_words
from glm53.ops.merge import words as list_words
from glm53.ops.step_parts import RowMail
from glm53.spec import ModelSpec, Shard

SIDES = (Shard(0, 2), Shard(1, 2))


class StepRecord(Protocol):
    """What both sides' records of a step are compared by."""

    @property
    def link_error(self) -> int: ...

    @property
    def tokens(self) -> Sequence[int] | np.ndarray: ...


@dataclass(frozen=True)
class Packed:
    """History rows of a layer of prompt rows, [rows, row_bytes] u8: the owner's bytes become the peer's."""

    rows: Array


Passed = Request | Packed  # what passes between the sides


def numbered(walk: Iterable[Passed]) -> Iterator[tuple[int, Request]]:
    """Requests with their number in the step, from 1. Rows go one way, through a mailbox of their own; they have none and are left out."""
    number = 0
    for request in walk:
        assert not isinstance(request, Packed), "a step passes no packed prompt rows"
        if not isinstance(request, Rows):
            number += 1
            yield number, request


@dataclass(frozen=True)
class PairSide:
    """What a side knows of its pair. error [1] u32 on its device: number of an exchange that got no answer, or 0."""

    pair: Pair
    shard: Shard

    @property
    def spec(self) -> ModelSpec:
        """The shape of the whole model."""
        return self.pair.spec

    @property
    def error(self) -> Array:
        return self.pair.steps.errors(self.shard.index)

    @property
    def adds_in_products(self) -> bool:
        """Whether kernels of bf16 products add the other side's sums themselves. On the cpu runtime a kernel that waits runs work-item by work-item,
        which takes ten times as long as products do there: an exchange of its own costs less."""
        return self.pair.fast and self.pair.link.devices[0].runtime.name != "cpu"

    def mail(self, index: int, counter: Array) -> RowMail:
        """How history rows pass from the owner to the peer in a step: those of main layer `index`, from n_layers on those of the MTP layer."""
        return self.pair.steps.mail(self.shard.index, counter, self.spec.n_layers + MTP_DEPTH_MAX, index)

    def enqueue(self, stream: Stream, request: Request, exchanged: Array, index: int) -> None:
        """This side's half of exchange `index` of a step, from 1, by a kernel; exchanged [1] u32: exchanges of the steps before."""
        self.pair.steps.enqueue(self.shard.index, stream, request, exchanged, 1, index)


class Pair:
    """Exchanges of the steps by kernels (`fast`), else by copies; those of prompt rows by copies.

    checks: after every exchange both sides' values are compared; steps are not recorded then. unsure: a failure may have left one side with work
    that the other has not.
    """

    def __init__(self, link: Link, spec: ModelSpec, fast: bool, checks: bool, step_rows_max: int, chunk_rows_max: int, row_bytes: int):
        self.link, self.spec, self.fast, self.checks = link, spec, fast, checks
        self.unsure = False
        vocab = -(-spec.vocab_size // 2)
        words = lambda rows: max(rows * max(spec.hidden_size, vocab), list_words(rows, spec.index_topk))
        with ExitStack() as undo:
            self.steps = Exchange(link, max(words(step_rows_max), select_words(step_rows_max)), fast, mail_words=step_rows_max * row_bytes // 4)
            undo.callback(self.steps.close)
            self.prompts = Exchange(link, max(list_words(chunk_rows_max, spec.index_topk), chunk_rows_max * spec.hidden_size, vocab), fast=False)
            undo.callback(self.prompts.close)
            self._undo = undo.pop_all()

    @property
    def records(self) -> bool:
        """Whether steps can be recorded: all of a side's work is kernels of its own device."""
        return self.fast and not self.checks

    def side(self, index: int) -> PairSide:
        return PairSide(self, SIDES[index])

    def meeting(self, ends: Sequence[tuple[Stream, Array]], compare: Callable[[int], None]) -> Callable[[Sequence[Passed]], None]:
        """What joins the sides of one step; ends: stream and `exchanged` (PairSide.enqueue) of each; compare(rows): see `exchange_prompts`."""
        streams, number = [stream for stream, _ in ends], 0

        def meet(requests: Sequence[Passed]) -> None:
            nonlocal number
            low, high = requests
            assert not isinstance(low, Packed) and not isinstance(high, Packed), "a step passes no packed prompt rows"
            number += not isinstance(low, Rows)
            if not self.fast:
                self.steps.enqueue_both(streams, (low, high))
            elif not isinstance(low, Rows):
                for index, request in enumerate((low, high)):
                    self.side(index).enqueue(streams[index], request, ends[index][1], number)
            if self.checks:
                self._compare(streams, requests, compare)

        return meet

    def exchange_prompts(self, streams: Sequence[Stream], requests: Sequence[Passed], compare: Callable[[int], None]) -> None:
        """Passes values of prompt rows between the sides. compare(rows), with `checks`: raises if what both sides computed alike differs."""
        low, high = requests
        if isinstance(low, Packed) and isinstance(high, Packed):
            self.link.copy(low.rows, high.rows, *streams)
        else:
            assert not isinstance(low, Packed) and not isinstance(high, Packed)
            self.prompts.enqueue_both(streams, (low, high))
        if self.checks:
            self._compare(streams, requests, compare)

    def _compare(self, streams: Sequence[Stream], requests: Sequence[Passed], compare: Callable[[int], None]) -> None:
        """Waits, and raises Glm53Error if the sides hold different bits of what they now both have."""
        kind, rows = type(requests[0]).__name__.lower(), 0
        for arrays in zip(*(_shared(request) for request in requests), strict=True):
            self.compare(streams, arrays, f"after an exchange of {kind}")
            rows = arrays[0].shape[0]
        compare(rows)

    def compare(self, streams: Sequence[Stream], arrays: Sequence[Array], what: str) -> None:
        """Waits, and raises Glm53Error if the two arrays, one on each side, differ in a bit."""
        owner, peer = (array.bits(stream).reshape(-1) for array, stream in zip(arrays, streams, strict=True))
        wrong = np.flatnonzero(owner.view(np.uint8) != peer.view(np.uint8)) // owner.itemsize  # not as values: NaN is no other NaN
        if wrong.size:
            devices, first = " and ".join(str(device.index) for device in self.link.devices), int(wrong[0])
            raise Glm53Error(
                f"devices {devices} differ in {what}: element {first} of {list(arrays[0].shape)} is {owner[first]} and {peer[first]}, expected the "
                "same bits; next: glm53 selftest, --p2p off"
            )

    def raise_silent(self, flags: Sequence[int]) -> None:
        """Raises LinkError, naming both devices, if a flag says that an exchange got no answer; the pair is unsure then. flags: by side."""
        self.unsure = self.unsure or any(flags)
        self.steps.raise_silent(flags)

    def step_error(self, records: Sequence[StepRecord]) -> Glm53Error | None:
        """What is wrong with a step that left these records on the two sides."""
        try:
            self.raise_silent([record.link_error for record in records])
        except LinkError as error:
            return error
        if not self.checks or all(np.array_equal(records[0].tokens, record.tokens) for record in records):
            return None
        drawn = " and ".join(str(np.asarray(record.tokens).tolist()) for record in records)
        self.unsure = True
        return Glm53Error(f"the devices of a pair drew {drawn} in one step, expected the same tokens; next: glm53 selftest, --p2p off")

    def reset(self) -> None:
        """Both devices have finished: exchanges start anew."""
        self.steps.reset()

    def close(self) -> None:
        """Ends mailboxes and link. No exchange may be running."""
        try:
            self._undo.close()
        finally:
            self.link.close()


def _shared(request: Passed) -> tuple[Array, ...]:
    """The arrays that both sides hold after an exchange."""
    if isinstance(request, Products):
        return request.shared
    if isinstance(request, Sums):
        return (request.y,)
    if isinstance(request, Parts):
        return (request.whole,)
    if isinstance(request, Lists):
        return (request.selected, request.selected_counts)
    if isinstance(request, Packed):
        return (request.rows,)
    return ()
