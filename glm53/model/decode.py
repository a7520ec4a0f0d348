"""Decode steps that run ahead of the host: a step is enqueued before the tokens of the one before it have been read.

The device moves tokens, positions and sampling counters on by itself, accepts or drops drafts and makes new ones (`mtp`); the host reads each step's
record from a ring in host memory after the step's event. A row of a request that turns out to have ended one step earlier is computed in vain and
dropped with its session.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from glm53.errors import Glm53Error
from glm53.hip import Event
from glm53.kv import Runs
from glm53.model.pair import Passed
from glm53.model.sampler import DrawKind, Drawn, DrawRow, drawn_rows
from glm53.model.side import Side, rows_ahead
from glm53.model.stage import Stage
from glm53.model.step import Drawing
from glm53.ops import mtp
from glm53.ops.step_state import Draws, Record, Ring, read_record, record_words
from glm53.sampling import LOGPROBS_MAX
from glm53.spec import RowFormat

RING_STEPS = 8  # records kept; more than the steps that are ever in flight


class StepRow(NamedTuple):
    """One row of a decode step: the history row at `position` of session `slot` is computed from `token`, the token after it drawn.

    token: None if the step before drew it and the host has not read it.
    """

    draw: DrawRow
    token: int | None

    @property
    def slot(self) -> int:
        return self.draw.slot

    @property
    def position(self) -> int:
        """Of the history row, one before the token drawn."""
        return self.draw.position - 1

    def following(self, tokens: int) -> StepRow:
        """The same request's row once so many more tokens are drawn."""
        slot, params, seed, position, mask = self.draw
        return StepRow(DrawRow(slot, params, seed, position + tokens, mask), None)


class Ticket:
    """A step in flight: of each row the newest token, and with it `depth` drafts. number: of the step. While the round before
    is in flight, `rows` have its positions."""

    def __init__(self, rows: tuple[StepRow, ...], depth: int, number: int, kind: DrawKind, done: tuple[Event, ...]):
        self.rows, self.depth, self.number, self.kind, self.done = rows, depth, number, kind, done
        self.tops = LOGPROBS_MAX if kind.tops else 0
        self.drawn: list[list[Drawn]] | None = None  # by row: one token, or those that a round accepted and the one behind them
        self.error: Glm53Error | None = None  # of the step as a whole
        self.bad_row: int | None = None  # a row whose history row could not be quantised
        self.ended: set[int] = set()  # sessions that were closed since


@dataclass
class DraftCounts:
    """Of rounds: by depth how many drafts of that depth were verified, and how many accepted."""

    offered: list[int]
    accepted: list[int]
    rounds: int = 0  # of one session each
    tokens: int = 0  # drawn in them

    def add(self, depth: int, accepted: int) -> None:
        self.rounds += 1
        self.tokens += accepted + 1
        for place in range(depth):
            self.offered[place] += 1
            self.accepted[place] += place < accepted


class _Tokens:
    """Of one side: the ring that its steps leave their records in, and an event after each step."""

    def __init__(self, side: Side):
        words = max(record_words(side.step.rows_max, LOGPROBS_MAX), mtp.record_words(side.step.rows_max, 0, LOGPROBS_MAX))
        self.side = side
        self._host = side.device.host_alloc(RING_STEPS * words * 4, category="token ring")
        self.ring = Ring(self._host.array.view(np.uint32).reshape(RING_STEPS, words), self._host.device_address)
        self.events = [side.device.event() for _ in range(RING_STEPS)]
        self._drawings: dict[tuple[object, ...], Drawing] = {}

    def drawing(self, kind: DrawKind) -> Drawing:
        """A step that draws one token a row."""
        key = (kind, self.side.sampler.seen is None)
        if key not in self._drawings:
            self._drawings[key] = Drawing(key, partial(self._draw, kind))
        return self._drawings[key]

    def _draw(self, kind: DrawKind, count: int) -> Generator[Passed, None, Draws]:
        sampler, step, drafter = self.side.sampler, self.side.step, self.side.drafter
        sampler.enqueue(step.logits.slice(0, count), kind)
        cut = lambda array: array.slice(0, count)
        if drafter is not None:
            yield from drafter.store_each(count)
        return Draws(cut(sampler.tokens), cut(sampler.logprobs), sampler.tops(count, kind), cut(step.rows.positions), cut(sampler.params), self.ring)

    def round(self, sessions: int, depth: int, kind: DrawKind) -> Drawing:
        """A step that verifies drafts and makes new ones."""
        drafter = self.side.drafter
        assert drafter is not None
        return Drawing(("round", sessions, depth, kind), lambda _: drafter.round(sessions, depth, kind, self.ring))

    def start(self, sessions: int, depth: int, kind: DrawKind) -> Drawing:
        """A step that only makes drafts."""
        drafter = self.side.drafter
        assert drafter is not None
        return Drawing(("start", sessions, depth, kind), lambda _: drafter.start(sessions, depth, kind), alone=True)

    def given(self, count: int) -> Drawing | None:
        """A step of given rows, which draws nothing; the MTP layer gets their rows too."""
        drafter = self.side.drafter
        return None if drafter is None else Drawing(("given",), lambda _: drafter.store(count))

    def close(self) -> None:
        for event in self.events:
            event.close()
        self._host.free()


class Decoder:
    """Runs steps of decode rows on all sides of a stage. `graphs`: replay recorded steps. depth_max: drafts of a step at most."""

    def __init__(self, stage: Stage, graphs: bool, depth_max: int):
        self.stage, self.graphs = stage, graphs
        self.drafts = DraftCounts([0] * depth_max, [0] * depth_max)
        self._tokens = [_Tokens(side) for side in stage.sides]
        self._events = list(zip(*(tokens.events for tokens in self._tokens), strict=True))  # of every side, by place in the ring
        self._in_flight: deque[Ticket] = deque()
        self._next: tuple[StepRow, ...] = ()  # what the devices would compute next, tokens and positions being there
        self._next_depth, self._next_kind = 0, DrawKind.of([])

    def launch(self, rows: Sequence[StepRow], depth: int = 0) -> Ticket:
        """Enqueues one step of these rows, each with `depth` drafts: none where a row has a mask, which is of one token. Raises with no row added;
        what other steps draw can still be collected."""
        every = tuple(rows)
        if self._follows(every, depth):
            return self._enqueue(every, depth, self._next_kind)
        kind = DrawKind.of([row.draw for row in every])
        self.settle()
        self._upload(every, depth, kind)
        return self._enqueue(every, depth, kind)

    def ahead(self, ticket: Ticket) -> Ticket | None:
        """The step after the one launched last, from what that will draw; None where the host has to know first."""
        if not self._in_flight or self._in_flight[-1] is not ticket:
            return None
        rows, depth = ticket.rows, ticket.depth
        if ticket.kind.masks:
            return None
        if any(self.stage.phase_ends(row.slot, self._pending(row.slot) + rows_ahead(depth)) for row in rows if depth):
            return None
        return self._enqueue(rows if depth else tuple([row.following(1) for row in rows]), depth, ticket.kind)

    def _follows(self, rows: tuple[StepRow, ...], depth: int) -> bool:
        """Whether the devices have tokens and drafts of these rows, from the step launched last. Masks come from the host, for each step anew."""
        if self._in_flight or depth != self._next_depth or not rows or len(rows) != len(self._next) or self._next_kind.masks:
            return False
        for (draw, _), (told, _) in zip(rows, self._next, strict=True):
            if (draw.slot, draw.position, draw.seed) != (told.slot, told.position, told.seed):
                return False
            if draw.params is not told.params or draw.mask is not None:
                return False
        return True

    def _upload(self, rows: tuple[StepRow, ...], depth: int, kind: DrawKind) -> None:
        """The devices get the rows' tokens and settings; with drafts, the first ones are made in a step of their own."""
        width, count = depth + 1, len(rows)
        runs = [(row.slot, width) for row in rows]
        positions, tokens = [row.position for row in rows], np.zeros((count, width), np.int32)
        tokens[:, 0] = np.array([row.token for row in rows], np.int32)
        draws = [row.following(i).draw for row in rows for i in range(width)]
        for side in self.stage.sides:
            side.upload_step(runs, positions, tokens.reshape(-1))
            side.sampler.upload(draws, own_marks=depth > 0)
            if side.drafter is not None and depth:
                side.drafter.upload(runs, positions, tokens[:, 0].tolist(), [row.draw for row in rows], depth)
        if depth:
            room = [(row.slot, rows_ahead(depth)) for row in rows]
            self.stage.round(runs, room, [side.start(count, depth, kind) for side in self._tokens], self.graphs)

    def _enqueue(self, rows: tuple[StepRow, ...], depth: int, kind: DrawKind) -> Ticket:
        while len(self._in_flight) >= RING_STEPS - 1:
            self._collect_first()
        self._next = ()
        number = self.stage.number
        events = self._events[number % RING_STEPS]
        if depth:
            runs = [(row.slot, depth + 1) for row in rows]
            room = [(row.slot, self._pending(row.slot) + rows_ahead(depth)) for row in rows]
            self.stage.round(runs, room, [tokens.round(len(rows), depth, kind) for tokens in self._tokens], self.graphs)
        else:
            self.stage.step([(row.draw.slot, 1) for row in rows], [tokens.drawing(kind) for tokens in self._tokens], self.graphs)
        for side, event in zip(self.stage.sides, events, strict=True):
            event.record(side.stream)
        ticket = Ticket(rows, depth, number, kind, events)
        self._in_flight.append(ticket)
        self._next_depth, self._next_kind = depth, kind
        return ticket

    def _pending(self, slot: int) -> int:
        """Rows that rounds in flight may add to a session."""
        return sum(ticket.depth + 1 for ticket in self._in_flight if ticket.depth and any(row.slot == slot for row in ticket.rows))

    def run_rows(self, runs: Runs, tokens: Sequence[int], first_positions: Sequence[int]) -> None:
        """Enqueues a step of given tokens that draws nothing; its logits stand in the sides' `step.logits`. Raises with no row added."""
        self.settle()
        for side in self.stage.sides:
            side.upload_step(list(runs), list(first_positions), np.array(tokens, np.int32))
        self.stage.step(runs, [side.given(len(tokens)) for side in self._tokens], self.graphs)

    def collect(self, ticket: Ticket) -> list[list[Drawn]]:
        """What a step drew, by row, and in `ticket.bad_row` a row that could not be stored. Waits for it. Raises LinkError if the sides of a pair did
        not hear from each other in it."""
        while ticket.drawn is None:
            self._collect_first()
        if ticket.error is not None:
            raise ticket.error
        return ticket.drawn

    def draw(self, row: StepRow, depth: int) -> list[Drawn]:
        """One step of one row with `depth` drafts, now; the tokens that it drew, for each of which the session has a row more. Raises as `collect`,
        and Glm53Error if a row could not be stored."""
        ticket = self.launch([row], depth)
        drawn = self.collect(ticket)[0]
        if ticket.bad_row is not None:
            raise Glm53Error(row_error_text(ticket.bad_row))
        return drawn

    def flush(self) -> None:
        """Waits for all steps in flight and keeps what they drew."""
        while self._in_flight:
            self._collect_first()

    def settle(self) -> None:
        """As `flush`, and the next step starts from the host's tokens: somebody else is about to use the sampler or the step's rows."""
        self.flush()
        self._next = ()

    def forget(self, slots: Sequence[int]) -> None:
        """These sessions are about to be closed: steps in flight are not theirs any more."""
        for ticket in self._in_flight:
            ticket.ended.update(slots)

    def close(self) -> None:
        """Gives the rings back. The devices have finished."""
        for tokens in self._tokens:
            tokens.close()

    def _collect_first(self) -> None:
        ticket = self._in_flight[0]
        for event in ticket.done:
            event.synchronize()  # where this raises, the step is still in flight
        self._in_flight.popleft()
        if ticket.depth:
            self._read_round(ticket)
        else:
            self._read_step(ticket)
        assert ticket.drawn is not None
        following = tuple([row.following(len(drawn)) for row, drawn in zip(ticket.rows, ticket.drawn, strict=True)])
        if not self._in_flight:
            self._next = following
        elif ticket.depth:
            self._in_flight[0].rows = following

    def _read_step(self, ticket: Ticket) -> None:
        records = [read_record(tokens.ring, ticket.number, len(ticket.rows), ticket.tops) for tokens in self._tokens]
        record = records[0]
        self._note(ticket, records)
        draws = drawn_rows([row.draw for row in ticket.rows], record.tokens, record.logprobs, record.tops)
        ticket.drawn = [[one] for one in draws]

    def _read_round(self, ticket: Ticket) -> None:
        """Reads what a round drew, and gives the rows that stay to their sessions."""
        sessions, depth = len(ticket.rows), ticket.depth
        records = [mtp.read_record(tokens.ring, ticket.number, sessions, depth, ticket.tops) for tokens in self._tokens]
        record = records[0]
        self._note(ticket, records)
        ticket.drawn = []
        for index, row in enumerate(ticket.rows):
            count = int(record.accepted[index]) + 1
            tops = None if record.tops is None else (record.tops[0][index, :count].tolist(), record.tops[1][index, :count].tolist())
            tokens, logprobs = record.tokens[index, :count].tolist(), record.logprobs[index, :count].tolist()
            ticket.drawn.append(drawn_rows([row.draw] * count, tokens, logprobs, tops))
            if row.slot not in ticket.ended:
                self.drafts.add(depth, count - 1)
        if ticket.bad_row is not None:
            ticket.bad_row //= depth + 1
        stay = [(row.slot, len(drawn)) for row, drawn in zip(ticket.rows, ticket.drawn, strict=True) if row.slot not in ticket.ended]
        self.stage.accept(stay)

    def _note(self, ticket: Ticket, records: Sequence[Record] | Sequence[mtp.Record]) -> None:
        record = records[0]
        if record.step != ticket.number:
            raise Glm53Error(f"step {ticket.number} left the record of step {record.step}; next: glm53 selftest, or --no-graphs")
        if self.stage.pair is not None:
            ticket.error = self.stage.pair.step_error(records)
        ticket.bad_row = record.row_error - 1 if record.row_error else None


def row_error_text(row: int) -> str:
    """What to say of a row of a pass that could not be quantised."""
    return (
        f"row {row} of a pass holds a value that {RowFormat.Q8G64.value} cannot store (not finite, or beyond f16 scales); "
        "check the weights (--check-weights) or use --kv-format bf16"
    )
