"""The sides of an engine as one: sessions that are the same on all of them, passes of prompt rows and steps that run on all of them together.

Invariants: outside a call every side has the same slots in use, with the same number of rows; both sides of a pair get the same work in the same
order, and neither waits for the other longer than the exchanges' budget. A call that fails leaves the rows that were there before it
(`all_or_nothing`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from glm53.errors import DeviceLost
from glm53.kv import HostTier, ResidentTier, Runs
from glm53.model.forward import REPLICATED, PromptRows, Walk, Workspace
from glm53.model.pair import Pair, Passed
from glm53.model.side import Side
from glm53.model.step import Drawing
from glm53.spec import DType

Meet = Callable[[Sequence[Passed]], None]


def together(walks: Sequence[Walk], meet: Meet) -> None:
    """Runs the walks of all sides from one meeting to the next; `meet` gets what each side has there. If one raises, all are closed."""
    try:
        for requests in zip(*walks, strict=True):
            meet(requests)
    finally:
        for walk in walks:
            walk.close()


@dataclass
class Parked:
    """A session without devices: each side's history as its tier keeps it, index keys [planes, rows, key_bytes] u8 of all sides, and the MTP layer's
    state [hidden], None without it. Once complete its arrays are never written: forks share them."""

    rows: int
    histories: tuple[Any, ...]
    keys: np.ndarray
    terminal: np.ndarray | None


class Stage:
    """One side, or the two of a pair. Sides are given up with `close`."""

    def __init__(self, sides: Sequence[Side], pair: Pair | None):
        assert len(sides) == (1 if pair is None else 2)
        self.sides, self.pair = tuple(sides), pair
        self.number = 0  # of the next step, as the devices count them
        self._cut_off = False  # launches of a step or pass may be missing
        self._records = not any(side.step.tier.gathers_on_host for side in sides) and (pair is None or pair.records)
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
                if side.drafter is not None:
                    side.drafter.forget(slot)
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

    def fork(self, source: int, rows: int) -> int:
        """A new history with the first `rows` rows of another one; its slot. Raises with nothing opened."""
        with ExitStack() as undo:
            slots: list[int] = []
            for side in self.sides:
                slot = side.tier.fork(source, rows)
                undo.callback(side.tier.close, slot)
                side.keys.fork(source, slot, rows)
                undo.callback(side.keys.release, slot)
                if side.drafter is not None:
                    side.drafter.fork(source if rows == self.rows(source) else None, slot)
                slots.append(slot)
            assert len(set(slots)) == 1, f"the sides forked into slots {slots}"
            undo.pop_all()
        return slots[0]

    def park(self, slot: int) -> Parked:
        """Ends a session on the devices and keeps it in host memory. Raises with the session still open."""
        rows = self.rows(slot)
        keys = np.empty((self.first.keys.shape.planes, rows, self.first.keys.shape.row_bytes), np.uint8)
        for side in self.sides:
            side.tier.settle(slot)
            if rows:
                side.keys.export(slot, 0, keys)
        terminal = self.hidden_state(slot)
        copies = [side.tier.host_copy(slot) for side in self.sides]
        histories = tuple(side.tier.detach(slot, copy) for side, copy in zip(self.sides, copies, strict=True))  # type: ignore[arg-type]
        for side in self.sides:
            side.keys.release(slot)
        return Parked(rows, histories, keys, terminal)

    def resume(self, parked: Parked) -> int:
        """A parked session on the devices again; its slot. Raises with the session still parked."""
        with ExitStack() as undo:
            slots: list[int] = []
            for index, side in enumerate(self.sides):
                slot = side.tier.attach(parked.histories[index])
                undo.callback(self._detach_again, side, slot, parked, index)
                side.keys.open(slot)
                undo.callback(side.keys.release, slot)
                if parked.rows:
                    side.keys.adopt(slot, parked.keys, parked.rows)
                if side.drafter is not None:
                    side.drafter.set_state(slot, parked.terminal)
                slots.append(slot)
            assert len(set(slots)) == 1, f"the sides resumed in slots {slots}"
            undo.pop_all()
        return slots[0]

    def _detach_again(self, side: Side, slot: int, parked: Parked, index: int) -> None:
        histories = list(parked.histories)
        held: Any = histories[index] if isinstance(side.tier, ResidentTier) else None  # its rows as they were
        histories[index] = side.tier.detach(slot, held)
        parked.histories = tuple(histories)

    def discard(self, parked: Parked) -> None:
        """Gives up a parked session."""
        for side, history in zip(self.sides, parked.histories, strict=True):
            side.tier.discard(history)

    def new_parked(self, rows: int) -> Parked:
        """A parked session with room for `rows` rows, which `adopt` brings. Raises with nothing taken."""
        shape = self.first.keys.shape
        keys = np.empty((shape.planes, rows, shape.row_bytes), np.uint8)
        return Parked(rows, self._on_every_side([partial(side.tier.new_parked, rows) for side in self.sides]), keys, None)

    def fork_parked(self, parked: Parked, rows: int) -> Parked:
        """A parked session with the first `rows` rows of another one. No slot is needed. Raises with nothing taken."""
        calls = [partial(side.tier.fork_parked, history, rows) for side, history in zip(self.sides, parked.histories, strict=True)]
        terminal = parked.terminal if rows == parked.rows else None
        return Parked(rows, self._on_every_side(calls), parked.keys[:, :rows], terminal)

    def resume_fork(self, parked: Parked, rows: int) -> int:
        """A new history with the first `rows` rows of a parked session, which stays as it is; its slot. Raises with nothing opened."""
        part = self.fork_parked(parked, rows)
        try:
            return self.resume(part)
        except BaseException:
            self.discard(part)
            raise

    def truncate_parked(self, parked: Parked, rows: int) -> None:
        """Keeps the first `rows` rows of a parked session."""
        parked.histories = tuple(side.tier.truncate_parked(history, rows) for side, history in zip(self.sides, parked.histories, strict=True))
        parked.rows, parked.keys, parked.terminal = rows, parked.keys[:, :rows], parked.terminal if rows == parked.rows else None

    def _on_every_side(self, calls: Sequence[Callable[[], Any]]) -> tuple[Any, ...]:
        """Detached histories that the calls make, one a side."""
        with ExitStack() as undo:
            made: list[Any] = []
            for side, call in zip(self.sides, calls, strict=True):
                made.append(call())
                undo.callback(side.tier.discard, made[-1])
            undo.pop_all()
        return tuple(made)

    def truncate(self, slot: int, rows: int) -> None:
        """Keeps the first `rows` rows, also where it raises."""
        with ExitStack() as steps:  # each has its turn, whatever another one raises
            for side in self.sides:
                steps.callback(side.keys.truncate, slot, rows)
                steps.callback(side.tier.truncate, slot, rows)
                if side.drafter is not None:
                    steps.callback(side.drafter.forget, slot)

    def settle(self, slot: int) -> None:
        """Waits until every row of a session has its permanent place on every side."""
        for side in self.sides:
            side.tier.settle(slot)

    def export(self, slot: int | Parked, section: str, first: int, target: np.ndarray) -> None:
        """Copies what a session file keeps of settled rows from `first` on: target [planes, rows, row_bytes] u8. section: "rows", those of the owner,
        or "keys", of every side those that it has."""
        if isinstance(slot, Parked):
            self._export_parked(slot, section, first, target)
        elif section == "rows":
            self.first.tier.export(slot, first, target)
        else:
            for side in self.sides:
                side.keys.export(slot, first, target)

    def _export_parked(self, parked: Parked, section: str, first: int, target: np.ndarray) -> None:
        if section == "rows":
            self.first.tier.export_parked(parked.histories[0], first, target)
        else:
            target[:] = parked.keys[:, first : first + target.shape[1]]

    def hidden_state(self, slot: int | Parked) -> np.ndarray | None:
        """[hidden] as raw elements: the main model's hidden state of a session's last row, as the MTP layer needs it. None: it is not known."""
        if isinstance(slot, Parked):
            return slot.terminal
        return None if self.first.drafter is None else self.first.drafter.state(slot)

    def adopt(self, slot: int | Parked, section: str, first: int, data: np.ndarray, rows_max: int) -> None:
        """The counterpart of `export`: appends to the rows, or to the keys, of every side; in the end there are `rows_max`. Planes of the MTP layer
        that are lacking become zeros; those that are too many are left out. Raises with the history in a state that only `close` is for."""
        if isinstance(slot, Parked):
            self._adopt_parked(slot, section, first, data)
            return
        for side in self.sides:
            if section == "mtp.hidden":
                if side.drafter is not None:
                    side.stream.upload(side.drafter.terminal.slice(slot, slot + 1).address, data.copy())
                continue
            store, planes = (side.tier, side.tier.layout.planes) if section == "rows" else (side.keys, side.keys.shape.planes)
            store.adopt(slot, _with_planes(data, planes), rows_max)

    def _adopt_parked(self, parked: Parked, section: str, first: int, data: np.ndarray) -> None:
        if section == "keys":
            parked.keys[:, first : first + data.shape[1]] = _with_planes(data, len(parked.keys))
        elif section == "rows":
            for side, history in zip(self.sides, parked.histories, strict=True):
                side.tier.adopt_parked(history, first, _with_planes(data, side.tier.layout.planes))
        elif self.first.drafter is not None:
            whole = self.first.drafter.terminal.dtype is DType.F32
            parked.terminal = data.reshape(-1).copy().view(np.float32 if whole else np.uint16)  # as `state` gives it

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
        try:
            together(walks, self._meet_prompts)
        except BaseException:
            self._cut()
            raise
        self._advance_keys([(slot, count)])
        for side in self.sides:  # at most two passes are queued, so that an interrupt in a long prompt waits for no more than those
            side.passes.rotate()
            side.passes[0].synchronize()
            side.passes[0].record(side.stream)

    def step(self, runs: Runs, drawings: Sequence[Drawing | None], graphs: bool) -> None:
        """Enqueues one step of `runs`, whose rows and tokens stand in the sides' steps; drawings: of each side. Raises with no row added.

        With `graphs` the first step of a kind is enqueued launch by launch (it loads the kernels), the second is recorded, all later ones are
        replayed; a pair does so where its exchanges are kernels. The bits are the same.
        """
        try:
            self._enqueue(runs, runs, drawings, graphs)
            self._accept_rows(runs)
        except BaseException:
            self._abandon(runs)
            raise
        self._advance_keys(runs)

    def round(self, runs: Runs, room: Runs, drawings: Sequence[Drawing | None], graphs: bool) -> None:
        """As `step`; its rows may write so many positions as `room` says and belong to nobody before `accept`."""
        try:
            self._enqueue(runs, room, drawings, graphs)
        except BaseException:
            self._abandon(runs)
            raise

    def phase_ends(self, slot: int, rows: int) -> bool:
        """Whether a history that the device holds as a whole would outgrow that by so many rows: then the host has to know how many they are."""
        return any(isinstance(side.tier, HostTier) and side.tier.outgrows(slot, rows) for side in self.sides)

    def accept(self, runs: Runs) -> None:
        """So many rows of a round stay. Raises with none of them kept."""
        try:
            self._accept_rows(runs)
        except BaseException:
            self._abandon(runs)
            raise
        self._advance_keys(runs)

    def _advance_keys(self, runs: Runs) -> None:
        for side in self.sides:
            for slot, n in runs:
                side.keys.advance(slot, n)

    def _accept_rows(self, runs: Runs) -> None:
        for side in self.sides:
            side.step.tier.accept(runs)

    def _enqueue(self, runs: Runs, room: Runs, drawings: Sequence[Drawing | None], graphs: bool) -> None:
        for side in self.sides:
            for slot, n in room:
                side.keys.reserve(slot, side.keys.rows(slot) + n)
        self._ready()
        for side in self.sides:
            side.step.tier.begin(room)
        self._run(sum([n for _, n in runs]), drawings, graphs and self._records)
        self.number = (self.number + 1) % (1 << 32)
        for side in self.sides:
            side.step.tier.ended(runs)

    def _abandon(self, runs: Runs) -> None:
        """After a failure the sessions have the rows that they had before on every side, which their keys count until all is well, and devices are
        told anew before their next use."""
        for side in self.sides:
            rows = {slot: side.keys.rows(slot) for slot, _ in runs}
            side.step.tier.abandon(rows)
            if side.drafter is not None:
                side.drafter.abandon(rows)

    def _run(self, count: int, drawings: Sequence[Drawing | None], graphs: bool) -> None:
        pairs = list(zip(self.sides, drawings, strict=True))
        recorded = [side.step.graph(count, drawing) for side, drawing in pairs] if graphs else [None]
        try:
            if all(recorded):
                for side, graph in zip(self.sides, recorded, strict=True):
                    assert graph is not None
                    graph.launch(side.stream)
                return
            together([side.step.walk(count, drawing) for side, drawing in pairs], self._meeting())
        except BaseException:
            self._cut()
            raise

    def _meeting(self) -> Meet:
        """Passes the values of one step between the sides."""
        if self.pair is None:
            return _nothing
        compare = partial(self._compare, [side.step.work for side in self.sides])
        return self.pair.meeting([(side.stream, side.step.exchanged) for side in self.sides], compare)

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

    def _cut(self) -> None:
        """Launches may be missing, and one side may have been given work that the other has not."""
        self._cut_off = True
        if self.pair is not None:
            self.pair.unsure = True

    def _ready(self) -> None:
        """After a failure: selections start from zeros. Of a pair both devices have finished (waits of exchanges are bounded), mailboxes and step
        numbers start anew."""
        unsure = self.pair is not None and self.pair.unsure
        if self._cut_off or unsure:
            for side in self.sides:
                side.reset_selections()
            self._cut_off = False
        if self.pair is None or not unsure:
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


def _with_planes(data: np.ndarray, planes: int) -> np.ndarray:
    """data [.., rows, row_bytes] cut to `planes` planes, or filled up with zeros."""
    if len(data) >= planes:
        return data[:planes]
    return np.concatenate([data, np.zeros((planes - len(data), *data.shape[1:]), np.uint8)])


def _nothing(requests: Sequence[Passed]) -> None:
    raise AssertionError(f"a single device met with {requests}")
