"""First come, first served: prompts are prefilled chunk by chunk in order of arrival, then all running requests decode together.

A request moves WAITING → PREFILLING → DECODING; `finish` removes it from anywhere. At most `sessions_max` requests are past WAITING at once
(each holds a session's memory).

Invariants (`Queue.check`): a request is in exactly one phase; running requests <= sessions_max; prefilled rows <= prompt rows; only a request
whose prompt is wholly prefilled decodes.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Phase(enum.Enum):
    WAITING = "waiting"  # holds no memory
    PREFILLING = "prefilling"  # holds a session; some prompt rows are computed
    DECODING = "decoding"  # one row per step


@dataclass
class Ticket:
    """Scheduling state of one request."""

    serial: int
    prompt_rows: int
    phase: Phase = Phase.WAITING
    prefilled_rows: int = 0


@dataclass(frozen=True)
class Prefill:
    """Compute prompt rows [start, stop) of request `serial`; `last`: sample the first token from row stop - 1."""

    serial: int
    start: int
    stop: int
    last: bool


@dataclass(frozen=True)
class Step:
    """Compute one row for each of these requests and sample its next token."""

    serials: tuple[int, ...]


class Queue:
    """Decides the next action for a set of requests."""

    def __init__(self, sessions_max: int, chunk_rows: int):
        assert sessions_max > 0 and chunk_rows > 0
        self.sessions_max, self.chunk_rows = sessions_max, chunk_rows
        self._tickets: dict[int, Ticket] = {}
        self._next_serial = 0

    def add(self, prompt_rows: int) -> int:
        """A new request with a prompt of `prompt_rows` >= 1 rows; returns its serial."""
        assert prompt_rows >= 1
        serial, self._next_serial = self._next_serial, self._next_serial + 1
        self._tickets[serial] = Ticket(serial, prompt_rows)
        return serial

    def _running(self) -> list[Ticket]:
        return [t for t in self._tickets.values() if t.phase in (Phase.PREFILLING, Phase.DECODING)]

    def next(self) -> Prefill | Step | None:
        """The next action, or None when every request has finished. A prefill chunk counts as done once it is returned."""
        running = self._running()
        ticket = next((t for t in running if t.phase is Phase.PREFILLING), None)
        if ticket is None and len(running) < self.sessions_max:
            ticket = next((t for t in self._tickets.values() if t.phase is Phase.WAITING), None)
        if ticket is not None:
            start = ticket.prefilled_rows
            stop = min(start + self.chunk_rows, ticket.prompt_rows)
            last = stop == ticket.prompt_rows
            ticket.prefilled_rows = stop
            ticket.phase = Phase.DECODING if last else Phase.PREFILLING
            return Prefill(ticket.serial, start, stop, last)
        if running:
            return Step(tuple(t.serial for t in running))
        return None

    def finish(self, serial: int) -> None:
        """The request has ended (stop, length, error or cancelled) and holds nothing any more."""
        del self._tickets[serial]

    def check(self) -> None:
        assert len(self._running()) <= self.sessions_max, "more running requests than sessions"
        for ticket in self._tickets.values():
            assert 0 <= ticket.prefilled_rows <= ticket.prompt_rows
            assert (ticket.phase is Phase.DECODING) == (ticket.prefilled_rows == ticket.prompt_rows)
            assert (ticket.phase is Phase.WAITING) == (ticket.prefilled_rows == 0)
