"""Decode steps that run ahead of the host: a step is enqueued before the tokens of the one before it have been read.

The device moves tokens, positions and sampling counters on by itself; the host reads each step's record from a ring in host memory after the step's
event. A row of a request that turns out to have ended one step earlier is computed in vain and dropped with its session.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from glm53.errors import Glm53Error
from glm53.hip import Event
from glm53.kv import Runs
from glm53.model.sampler import DrawKind, Drawn, DrawRow, drawn_rows
from glm53.model.side import Side
from glm53.model.stage import Stage
from glm53.model.step import Drawing
from glm53.ops.step_state import Draws, Ring, read_record, record_words
from glm53.sampling import LOGPROBS_MAX
from glm53.spec import RowFormat

RING_STEPS = 8  # records kept; more than the steps that are ever in flight


@dataclass(frozen=True)
class StepRow:
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

    def following(self) -> StepRow:
        """The same request's row in the next step."""
        return StepRow(DrawRow(self.draw.slot, self.draw.params, self.draw.seed, self.draw.position + 1), None)


class Ticket:
    """A step in flight."""

    def __init__(self, rows: tuple[StepRow, ...], number: int, tops: int, done: tuple[Event, ...]):
        self.rows, self.number, self.tops, self.done = rows, number, tops, done
        self.drawn: list[Drawn] | None = None
        self.error: Glm53Error | None = None  # of the step as a whole
        self.bad_row: int | None = None  # a row whose history row could not be quantised


class _Tokens:
    """Of one side: the ring that its steps leave their records in, and an event after each step."""

    def __init__(self, side: Side):
        words = record_words(side.step.rows_max, LOGPROBS_MAX)
        self.side = side
        self._host = side.device.host_alloc(RING_STEPS * words * 4, category="token ring")
        self.ring = Ring(self._host.array.view(np.uint32).reshape(RING_STEPS, words), self._host.device_address)
        self.events = [side.device.event() for _ in range(RING_STEPS)]

    def drawing(self, kind: DrawKind) -> Drawing:
        sampler, step = self.side.sampler, self.side.step

        def draw(count: int) -> Draws:
            sampler.enqueue(step.logits.slice(0, count), kind)
            cut = lambda array: array.slice(0, count)
            return Draws(
                cut(sampler.tokens), cut(sampler.logprobs), sampler.tops(count, kind), cut(step.rows.positions), cut(sampler.params), self.ring
            )

        return Drawing((kind, sampler.seen is None), draw)

    def close(self) -> None:
        for event in self.events:
            event.close()
        self._host.free()


class Decoder:
    """Runs steps of decode rows on all sides of a stage. `graphs`: replay recorded steps."""

    def __init__(self, stage: Stage, graphs: bool):
        self.stage, self.graphs = stage, graphs
        self._tokens = [_Tokens(side) for side in stage.sides]
        self._in_flight: deque[Ticket] = deque()
        self._ahead: tuple[StepRow, ...] = ()  # what the device would compute next, token and position being there

    def launch(self, rows: Sequence[StepRow]) -> Ticket:
        """Enqueues one step. Raises with no row added; what other steps draw can still be collected."""
        every = tuple(rows)
        runs = [(row.slot, 1) for row in every]
        kind = DrawKind.of([row.draw for row in every])
        while len(self._in_flight) >= RING_STEPS - 1:
            self._collect_first()
        if not self.follows(every):
            self.flush()
            tokens = np.array([row.token for row in every], np.int32)
            for side in self.stage.sides:
                side.upload_step(runs, [row.position for row in every], tokens)
                side.sampler.upload([row.draw for row in every])
        self._ahead = ()
        number = self.stage.number
        events = tuple(tokens.events[number % RING_STEPS] for tokens in self._tokens)
        self.stage.step(runs, [tokens.drawing(kind) for tokens in self._tokens], self.graphs)
        for side, event in zip(self.stage.sides, events, strict=True):
            event.record(side.stream)
        ticket = Ticket(every, number, LOGPROBS_MAX if kind.tops else 0, events)
        self._in_flight.append(ticket)
        self._ahead = tuple(row.following() for row in every)
        return ticket

    def follows(self, rows: Sequence[StepRow]) -> bool:
        """Whether the device has the tokens of these rows, from the step launched last."""
        key = lambda row: (row.draw.slot, row.draw.position, row.draw.seed)
        return bool(self._ahead) and [key(row) for row in rows] == [key(row) for row in self._ahead]

    def run_rows(self, runs: Runs, tokens: Sequence[int], first_positions: Sequence[int]) -> None:
        """Enqueues a step of given tokens that draws nothing; its logits stand in the sides' `step.logits`. Raises with no row added."""
        self.settle()
        for side in self.stage.sides:
            side.upload_step(list(runs), list(first_positions), np.array(tokens, np.int32))
        self.stage.step(runs, [None] * len(self._tokens), self.graphs)

    def collect(self, ticket: Ticket) -> list[Drawn]:
        """What a step drew, by row, and in `ticket.bad_row` a row that could not be stored. Waits for it. Raises LinkError if the sides of a pair did
        not hear from each other in it."""
        while ticket.drawn is None:
            self._collect_first()
        if ticket.error is not None:
            raise ticket.error
        return ticket.drawn

    def flush(self) -> None:
        """Waits for all steps in flight and keeps what they drew."""
        while self._in_flight:
            self._collect_first()

    def settle(self) -> None:
        """As `flush`, and the next step starts from the host's tokens: somebody else is about to use the sampler or the step's rows."""
        self.flush()
        self._ahead = ()

    def close(self) -> None:
        """Gives the rings back. The devices have finished."""
        for tokens in self._tokens:
            tokens.close()

    def _collect_first(self) -> None:
        ticket = self._in_flight[0]
        for event in ticket.done:
            event.synchronize()  # where this raises, the step is still in flight
        self._in_flight.popleft()
        records = [read_record(tokens.ring, ticket.number, len(ticket.rows), ticket.tops) for tokens in self._tokens]
        record = records[0]
        if record.step != ticket.number:
            raise Glm53Error(f"step {ticket.number} left the record of step {record.step}; next: glm53 selftest, or --no-graphs")
        if self.stage.pair is not None:
            ticket.error = self.stage.pair.step_error(records)
        ticket.bad_row = record.row_error - 1 if record.row_error else None
        ticket.drawn = drawn_rows([row.draw for row in ticket.rows], record.tokens, record.logprobs, record.tops)


def row_error_text(row: int) -> str:
    """What to say of a row of a pass that could not be quantised."""
    return (
        f"row {row} of a pass holds a value that {RowFormat.Q8G64.value} cannot store (not finite, or beyond f16 scales); "
        "check the weights (--check-weights) or use --kv-format bf16"
    )
