"""The sides of an engine as one: sessions that are the same on all of them, passes of prompt rows and steps that run on all of them together.

Invariants: outside a call every side has the same slots in use, with the same number of rows; both sides of a pair get the same work in the same
order, and neither waits for the other longer than the exchanges' budget. A call that fails leaves the rows that were there before it
(`all_or_nothing`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import numpy as np

from glm53.errors import DeviceLost
from glm53.kv import Runs
from glm53.model.forward import REPLICATED, PromptRows, Walk, Workspace
from glm53.model.pair import Pair, Passed
from glm53.model.side import Side
from glm53.model.step import Drawing

Meet = Callable[[Sequence[Passed]], None]


def together(walks: Sequence[Walk], meet: Meet) -> None:
    """Runs the walks of all sides from one meeting to the next; `meet` gets what each side has there. If one raises, all are closed."""
    try:
        for requests in zip(*walks, strict=True):
            meet(requests)
    finally:
        for walk in walks:
            walk.close()  # type: ignore[attr-defined]


class Stage:
    """One side, or the two of a pair. Sides are given up with `close`."""

    def __init__(self, sides: Sequence[Side], pair: Pair | None):
        assert len(sides) == (1 if pair is None else 2)
        self.sides, self.pair = tuple(sides), pair
        self.number = 0  # of the next step, as the devices count them
        self._clear()

    @property
    def first(self) -> Side:
        """The single device, or the owner: where results are read."""
        return self.sides[0]

    # Sessions

    def open(self) -> int:
        """A new, empty history on every side; its slot. Raises with nothing opened."""
        with ExitStack() as undo:
            slots = []
            for side in self.sides:
                slot = side.tier.open()
                undo.callback(side.tier.close, slot)
                slots.append(side.keys.open(slot))
                undo.callback(side.keys.release, slot)
            assert len(set(slots)) == 1, f"the sides opened slots {slots}"
            undo.pop_all()
        return slots[0]

    def close(self, slots: Sequence[int]) -> None:
        """Gives the sessions' memory back, of every one, also when a device refuses to be waited for."""
        with ExitStack() as steps:  # each has its turn, the last one first
            for side in self.sides:
                for slot in slots:
                    steps.callback(side.tier.close, slot)
                    steps.callback(side.keys.release, slot)

    def rows(self, slot: int) -> int:
        """Rows of a history."""
        return self.first.tier.rows(slot)

    @contextmanager
    def all_or_nothing(self, slot: int) -> Iterator[None]:
        """Whatever raises inside, the session has the rows that it had before, on every side."""
        rows = self.rows(slot)
        try:
            yield
        except BaseException:
            for side in self.sides:
                if side.tier.rows(slot) > rows:
                    side.tier.drop(slot, rows)
                if side.keys.rows(slot) > rows:
                    side.keys.truncate(slot, rows)
            raise

    def truncate(self, slot: int, rows: int) -> None:
        """Keeps the first `rows` rows, also where it raises."""
        with ExitStack() as steps:  # each has its turn, whatever another one raises
            for side in self.sides:
                steps.callback(side.keys.truncate, slot, rows)
                steps.callback(side.tier.truncate, slot, rows)

    def settle(self, slot: int) -> None:
        """Waits until every row of a session has its permanent place on every side."""
        for side in self.sides:
            side.tier.settle(slot)

    def chunk_rows(self, slot: int, wanted: int) -> int:
        """How many of `wanted` prompt rows the next pass may hold."""
        return min(side.tier.chunk_rows(slot, wanted) for side in self.sides)

    # Work

    def prefill(self, slot: int, ids: list[int]) -> None:
        """Computes the next prompt rows of a session in one pass; the logits of the last one stand in row 0 of every side's step."""
        start, count = self.rows(slot), len(ids)
        positions = np.arange(start, start + count, dtype=np.int32)
        batch = PromptRows(np.array(ids, np.int32), positions, np.full(count, slot, np.int32))
        for side in self.sides:
            side.keys.reserve(slot, start + count)
        self._ready()
        walks = [side.forward.walk(batch, side.step.logits.slice(0, 1)) for side in self.sides]
        with self._unsure():
            together(walks, self._meet_prompts)
        for side in self.sides:
            side.keys.advance(slot, count)
        for side in self.sides:  # at most two passes are queued, so that an interrupt in a long prompt waits for no more than those
            side.passes.rotate()
            side.passes[0].synchronize()
            side.passes[0].record(side.stream)

    def step(self, runs: Runs, drawings: Sequence[Drawing | None], graphs: bool) -> None:
        """Enqueues one step of `runs`, whose rows and tokens stand in the sides' steps; drawings: of each side. Raises with no row added.

        With `graphs` the first step of a kind is enqueued launch by launch (it loads the kernels), the second is recorded, all later ones are
        replayed; a pair does so where its exchanges are kernels. The bits are the same.
        """
        count = sum(n for _, n in runs)
        for side in self.sides:
            for slot, n in runs:
                side.keys.reserve(slot, side.keys.rows(slot) + n)
        self._ready()
        begun: list[Side] = []
        try:
            for side in self.sides:
                side.step.tier.begin(runs)
                begun.append(side)
            self._run(count, drawings, graphs)
            self.number = (self.number + 1) % (1 << 32)
            for side in self.sides:
                side.step.tier.finish(runs)
        except BaseException:
            for side in begun:
                side.step.tier.abandon(runs)
            raise
        for side in self.sides:
            for slot, n in runs:
                side.keys.advance(slot, n)

    def _run(self, count: int, drawings: Sequence[Drawing | None], graphs: bool) -> None:
        graphs = graphs and not any(side.step.tier.gathers_on_host for side in self.sides) and (self.pair is None or self.pair.records)
        pairs = list(zip(self.sides, drawings, strict=True))
        recorded = [side.step.graph(count, drawing) for side, drawing in pairs] if graphs else []
        with self._unsure():
            if recorded and all(recorded):
                for side, graph in zip(self.sides, recorded, strict=True):
                    assert graph is not None
                    graph.launch(side.stream)
                return
            together([side.step.walk(count, drawing) for side, drawing in pairs], self._meeting())

    def _meeting(self) -> Meet:
        """Passes the values of one step between the sides."""
        if self.pair is None:
            return _nothing
        compare = partial(self._compare, [side.step.work for side in self.sides])
        return self.pair.meeting([(side.stream, side.step.counter) for side in self.sides], self.first.step.exchanges, compare)

    def _meet_prompts(self, requests: Sequence[Passed]) -> None:
        assert self.pair is not None
        compare = partial(self._compare, [side.forward.work for side in self.sides])
        self.pair.exchange_prompts([side.stream for side in self.sides], requests, compare)

    def _compare(self, works: Sequence[Workspace], rows: int) -> None:
        """Raises if the sides differ in what they compute alike, of the first `rows` rows."""
        assert self.pair is not None
        for name in REPLICATED:
            self.pair.compare([side.stream for side in self.sides], [work.cut(name, rows) for work in works], name)

    # Failures of a pair

    @contextmanager
    def _unsure(self) -> Iterator[None]:
        """If the inside raises, one side may have been given work that the other has not."""
        try:
            yield
        except BaseException:
            if self.pair is not None:
                self.pair.unsure = True
            raise

    def _ready(self) -> None:
        """After a failure: both devices have finished (waits of exchanges are bounded), mailboxes and step numbers start anew."""
        if self.pair is None or not self.pair.unsure:
            return
        for side in self.sides:
            side.device.synchronize()
        self.pair.reset()
        for side in self.sides:
            side.step.restart(self.number)
        self._clear()
        self.pair.unsure = False

    def _clear(self) -> None:
        """So that what is compared and has not been computed yet is the same on both sides."""
        if self.pair is None or not self.pair.checks:
            return
        for side in self.sides:
            for work in (side.step.work, side.forward.work):
                work.clear(side.stream)

    def raise_silent(self) -> None:
        """Raises LinkError if an exchange of an enqueued step got no answer. Waits for the devices."""
        if self.pair is not None and self.pair.fast:
            self.pair.raise_silent([int(self.pair.side(i).error.numpy(side.stream)[0]) for i, side in enumerate(self.sides)])

    def check(self) -> None:
        """Invariants of all bookkeeping, and that the sides agree."""
        for side in self.sides:
            side.tier.check()
            side.keys.check()

    def free(self) -> None:
        """Waits for the devices and gives back what the sides hold; their devices end after it."""
        try:
            for side in self.sides:
                side.device.synchronize()
            for side in self.sides:
                side.step.close()
                side.tier.free()
            if self.pair is not None:
                self.pair.close()
        except DeviceLost:
            pass  # nothing on a lost device can be given back; the process's end does it


def _nothing(requests: Sequence[Passed]) -> None:
    raise AssertionError(f"a single device met with {requests}")
