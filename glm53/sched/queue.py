"""Which request an engine works on next. Pure: events in (`add`, `finish`), actions out (`next`), no clock, no randomness.

A request moves WAITING → PREFILLING → DECODING; `finish` removes it from anywhere, at any time. It holds a session from its first chunk on, and
`sessions_max` of them are there. The free ones belong to the requests that have waited longest, in order of arrival. `park` takes the session of a
decoding request away, `resume` gives it one again.

`chunks_per_step` says how prompts and decode steps share the device. None, for a batch that starts and ends together: prompts first. N, for serving:
while some request decodes, at most N chunks of prompt rows lie between two steps, and while some prompt could go on, one step lies between two groups
of N chunks; so neither starves. Chunks go in turn to the prompt that came first and to the one with the fewest rows left: a short prompt does not
wait for a long one, and the first one gets half of the chunks at least.

`decode_max` bounds the rows of a step. More decoding requests than that take turns: a group keeps its place for `TURN_STEPS` steps, which lets steps
run ahead of the host, then those that have waited longest get theirs. A request therefore decodes again after at most
ceil(decoding / decode_max) turns.

Chunks of a prompt begin at multiples of `chunk_rows` whatever else runs, so that a request's bits do not depend on its neighbours.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from itertools import count, islice

TURN_STEPS = 32  # steps that a group of decoding requests keeps its place, if others wait for one


class Phase(enum.Enum):
    WAITING = "waiting"  # holds no memory
    PREFILLING = "prefilling"  # holds a session; some prompt rows are computed
    DECODING = "decoding"  # one row per step


@dataclass
class Ticket:
    """Scheduling state of one request."""

    serial: int
    prompt_rows: int
    order: int  # of arrival here
    phase: Phase = Phase.WAITING
    prefilled_rows: int = 0
    last_turn: int = 0  # the turn in which it last had a place among the decoding rows, or got its first token


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
    """Decides the next action for the requests it holds. decode_max: rows of a step, 0: as many as there are sessions."""

    def __init__(self, sessions_max: int, chunk_rows: int, chunks_per_step: int | None = None, decode_max: int = 0):
        assert sessions_max > 0 and chunk_rows > 0 and decode_max >= 0 and (chunks_per_step is None or chunks_per_step > 0)
        self.sessions_max, self.chunk_rows, self.chunks_per_step = sessions_max, chunk_rows, chunks_per_step
        self.decode_max = min(decode_max, sessions_max) or sessions_max
        self._waiting: dict[int, Ticket] = {}  # by serial, in order of arrival
        self._running: dict[int, Ticket] = {}  # in the order in which they got their sessions
        self._parked: dict[int, Ticket] = {}
        self._next_serial, self._order = 0, count()
        self._chunks = 0  # since the last step
        self._shortest_next = False  # whose turn the next chunk is
        self._turn, self._turn_steps = 0, 0
        self._places: list[int] = []  # serials that decode in this turn

    def __len__(self) -> int:
        return len(self._waiting) + len(self._running) + len(self._parked)

    @property
    def waiting(self) -> int:
        """Requests without a session."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Requests that hold a session."""
        return len(self._running)

    def add(self, prompt_rows: int, serial: int | None = None, done_rows: int = 0) -> int:
        """A new request with a prompt of `prompt_rows` >= 1 rows, the first `done_rows` of which are there already; returns its serial, which is the
        caller's if that gives one."""
        assert prompt_rows >= 1 and 0 <= done_rows < prompt_rows
        if serial is None:
            serial, self._next_serial = self._next_serial, self._next_serial + 1
        assert serial not in self._waiting and serial not in self._running and serial not in self._parked
        self._waiting[serial] = Ticket(serial, prompt_rows, next(self._order), prefilled_rows=done_rows)
        return serial

    def prompt_left(self, serial: int) -> int:
        """Rows of a request's prompt that no chunk has been given out for; 0 for one that decodes."""
        ticket = self._running.get(serial) or self._waiting.get(serial)
        return 0 if ticket is None else ticket.prompt_rows - ticket.prefilled_rows

    def park(self, serial: int) -> None:
        """A decoding request gives its session back until `resume`."""
        ticket = self._running.pop(serial)
        assert ticket.phase is Phase.DECODING, f"request {serial} is parked while it is {ticket.phase.value}"
        self._parked[serial] = ticket
        self._leave(serial)

    def resume(self, serial: int) -> None:
        """A parked request decodes again."""
        assert len(self._running) < self.sessions_max
        self._running[serial] = self._parked.pop(serial)

    def next(self) -> Prefill | Step | None:
        """The next action, or None when there is no request. A chunk or step counts as done once it is returned."""
        decoding = [t for t in self._running.values() if t.phase is Phase.DECODING]
        if not decoding or self.chunks_per_step is None or self._chunks < self.chunks_per_step:
            prompts = self._prompts()
            if prompts:
                return self._chunk(prompts)
        return self._step(decoding) if decoding else None

    def _prompts(self) -> list[Ticket]:
        """Requests whose prompt may get the next chunk, in order of arrival: those with a session, and as many waiting ones as sessions are free."""
        prompts = [t for t in self._running.values() if t.phase is Phase.PREFILLING]
        return sorted((*prompts, *islice(self._waiting.values(), self.sessions_max - len(self._running))), key=lambda t: t.order)

    def _chunk(self, prompts: list[Ticket]) -> Prefill:
        ticket = prompts[0]
        if self.chunks_per_step is not None:
            if self._shortest_next:
                ticket = min(prompts, key=lambda t: t.prompt_rows - t.prefilled_rows)
            self._shortest_next = not self._shortest_next
        if ticket.phase is Phase.WAITING:
            self._running[ticket.serial] = self._waiting.pop(ticket.serial)
        start = ticket.prefilled_rows
        stop = min(start - start % self.chunk_rows + self.chunk_rows, ticket.prompt_rows)
        last = stop == ticket.prompt_rows
        ticket.prefilled_rows = stop
        ticket.phase = Phase.DECODING if last else Phase.PREFILLING
        ticket.last_turn = self._turn  # it has just got a token: those that wait for a place go before it
        self._chunks += 1
        return Prefill(ticket.serial, start, stop, last)

    def _step(self, decoding: list[Ticket]) -> Step:
        self._chunks = 0
        if len(decoding) <= self.decode_max:
            self._places, self._turn_steps = [t.serial for t in decoding], 0
            for ticket in decoding:
                ticket.last_turn = self._turn
            return Step(tuple(self._places))
        if self._turn_steps >= TURN_STEPS:
            self._turn, self._turn_steps, self._places = self._turn + 1, 0, []
        free = self.decode_max - len(self._places)
        if free > 0:  # a new turn, or a request of this one has ended
            places = set(self._places)
            chosen = sorted((t for t in decoding if t.serial not in places), key=lambda t: (t.last_turn, t.serial))[:free]
            self._places += [t.serial for t in chosen]
        for serial in self._places:
            self._running[serial].last_turn = self._turn
        self._turn_steps += 1
        return Step(tuple(self._places))

    def finish(self, serial: int) -> None:
        """The request has ended (stop, length, error or cancelled) and holds nothing any more."""
        if self._waiting.pop(serial, None) is None and self._parked.pop(serial, None) is None:
            del self._running[serial]
            self._leave(serial)

    def _leave(self, serial: int) -> None:
        if serial in self._places:
            self._places.remove(serial)

    def check(self) -> None:
        """AssertionError if an invariant does not hold."""
        assert len(self._running) <= self.sessions_max, "more running requests than sessions"
        assert len(self._waiting.keys() | self._running.keys() | self._parked.keys()) == len(self)
        orders = [ticket.order for ticket in self._waiting.values()]
        assert orders == sorted(orders), "the waiting ones are not in order of arrival"
        assert all(t.phase is Phase.WAITING and t.prefilled_rows < t.prompt_rows for t in self._waiting.values())
        assert all(t.phase is Phase.DECODING for t in self._parked.values())
        for ticket in self._running.values():
            assert 0 < ticket.prefilled_rows <= ticket.prompt_rows
            assert ticket.phase is (Phase.DECODING if ticket.prefilled_rows == ticket.prompt_rows else Phase.PREFILLING)
            assert ticket.prefilled_rows % self.chunk_rows == 0 or ticket.phase is Phase.DECODING
            assert ticket.last_turn <= self._turn
        assert len(set(self._places)) == len(self._places) <= self.decode_max
        assert all(serial in self._running and self._running[serial].phase is Phase.DECODING for serial in self._places)
        assert 0 <= self._turn_steps <= TURN_STEPS
