"""The scheduler of a server: which request gets a slot and memory, who makes room, and what runs next. Pure: events in, actions out; no clock.

A request waits, is started, and runs until `finish`; on the way it may be parked and resumed. Before it starts, the longest history that it can get
is charged to it (`Books`), so that it ends without anybody else's help. Room is made in this order: automatic histories at rest are dropped, those at
rest that hold a slot are parked, and where requests may be parked, one that has decoded for `quantum` steps gives its slot to the one that waits
longest. Owners take turns; of one owner the request that came first is next. Nobody overtakes a request that waits for bytes, but parked ones, which
have theirs.

A prompt begins with the rows that a history at rest or a decoding request of its owner has already; where the prompt under way of another one will
soon have more of them, it waits for that. Chunks and steps of those that run are the `Queue`'s.

Invariants (`Scheduler.check` proves them):
- running requests and open histories at rest together have at most `sessions_max` slots;
- every running, parked and resting history is charged, and no place beyond its limit unless named sessions alone are to blame;
- a request is parked after a turn of `quantum` steps, and none is started while more than `parked_max` are.
"""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass, field

from glm53.sched.admission import Books, Cost
from glm53.sched.queue import Prefill, Queue, Step
from glm53.sched.shelf import HEAD_ROWS, Kept, Shelf, Tokens, common, head_of

QUANTUM_STEPS = 256  # that a request decodes before it may be parked


@dataclass(frozen=True)
class Start:
    """Give request `serial` a history with the first `rows` rows of a history at rest, `kept`, or of the running request `parent`; without either an
    empty one. take: the history at rest becomes the request's own. Answered by `started` or `finish`."""

    serial: int
    rows: int = 0
    kept: int | None = None
    parent: int | None = None
    take: bool = False


@dataclass(frozen=True)
class Park:
    """Bring the history of decoding request `serial` to host memory; its slot is free then."""

    serial: int


@dataclass(frozen=True)
class Resume:
    """Give the parked request `serial` a slot again."""

    serial: int


@dataclass(frozen=True)
class Rest:
    """Park the history at rest `key`. If it cannot be, answered by `not_rested`, or for an automatic one, which has to end then, by `let_go`."""

    key: int


@dataclass(frozen=True)
class Drop:
    """Give up the automatic history at rest `key`."""

    key: int


Action = Start | Park | Resume | Rest | Drop | Prefill | Step


class State(enum.Enum):
    """Of a request."""

    WAITING = "waiting"
    STARTING = "starting"  # `Start` was given out and has not been answered
    RUNNING = "running"
    PARKED = "parked"


@dataclass
class Client:
    """A request. rows_max: of its history, the longest that it can get; session: key of the named history that it continues."""

    serial: int
    owner: str
    prompt: Tokens
    rows_max: int
    session: int | None
    since: int  # when it began to wait, in events
    state: State = State.WAITING
    steps: int = 0  # since it got its slot
    waits_for: int | None = None  # whose prompt it will begin with
    lends: int = field(init=False)  # first rows of its prompt that others may begin with: prompt rows, none that its session had drawn
    head: bytes = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.head, self.lends = head_of(self.prompt[:-1]), len(self.prompt)


@dataclass(frozen=True)
class Leaving:
    """What a request leaves: the key of its history at rest, tokens of its prompt rows, all its rows, and whether it has a slot."""

    key: int
    tokens: Tokens
    rows: int
    named: bool
    open: bool


class Scheduler:
    """See the module. keeps: prompts stay at rest after their requests. The other settings are those of `Queue`."""

    def __init__(
        self,
        books: Books,
        sessions_max: int,
        chunk_rows: int,
        chunks_per_step: int = 1,
        decode_max: int = 0,
        parked_max: int = 0,
        quantum: int = QUANTUM_STEPS,
        keeps: bool = True,
    ):
        self.books, self.shelf, self.keeps = books, Shelf(), keeps
        self.sessions_max, self.parked_max, self.quantum = sessions_max, parked_max, quantum
        self._queue = Queue(sessions_max, chunk_rows, chunks_per_step, decode_max)
        self._clients: dict[int, Client] = {}
        self._waiting: dict[str, deque[int]] = {}  # by owner, whose turn comes in the order of the keys
        self._parked: dict[int, Client] = {}  # from the one parked first on
        self._running: dict[int, Client] = {}  # with a slot, those being started too
        self._replaced: deque[Kept] = deque()  # to be dropped
        self._promised: set[int] = set()
        self._serial = self._events = 0
        self._stale = False  # something has changed since nobody could be given a slot

    def __len__(self) -> int:
        return len(self._clients)

    @property
    def slots_used(self) -> int:
        """Slots of running requests and of histories at rest."""
        return len(self._running) + self.shelf.open_count + sum(kept.open for kept in self._replaced)

    # Events

    def add(self, owner: str, prompt: Tokens, rows_max: int, session: int | None = None) -> int:
        """A request arrives; its serial. `Books.never(rows_max)` has been asked."""
        serial, self._serial = self._serial, self._serial + 1
        self._event()
        self.shelf.unstick()
        self._clients[serial] = Client(serial, owner, prompt, rows_max, session, self._events)
        self._waiting.setdefault(owner, deque()).append(serial)
        return serial

    def started(self, serial: int, reused_rows: int) -> None:
        """The request has its history, with so many rows of its prompt."""
        client = self._clients[serial]
        assert client.state is State.STARTING
        self._event()
        client.state = State.RUNNING
        if reused_rows <= client.lends:  # no drawn rows are left
            client.lends = len(client.prompt)
        self._queue.add(len(client.prompt), serial, reused_rows)

    def leaves(self, serial: int, rows: int) -> bool:
        """Whether the first `rows` prompt rows of a request are worth keeping when it ends."""
        client = self._clients[serial]
        if not self.keeps or client.state not in (State.RUNNING, State.PARKED) or rows < HEAD_ROWS:
            return False
        return not self.shelf.covers(client.owner, client.prompt[:rows])

    def finish(self, serial: int, leaving: Leaving | None = None) -> None:
        """The request has ended: stop, length, error, cancelled or past its deadline, at any moment."""
        client = self._clients.pop(serial)
        self._event()
        self.shelf.unstick()
        if client.state is State.WAITING:
            self._unqueue(client)
        elif client.state is not State.STARTING:
            self._queue.finish(serial)
        self._running.pop(serial, None)
        self._parked.pop(serial, None)
        self.books.release(("request", serial))
        if leaving is not None:
            self._put(Kept(leaving.key, client.owner, leaving.tokens, leaving.rows, leaving.named, leaving.open))

    def hold(self, key: int, owner: str, tokens: Tokens, rows: int, is_open: bool) -> None:
        """A named session is at rest, or has changed there: its rows, the first of which are the prompt rows `tokens`."""
        if key in self.shelf:
            kept = self.shelf[key]
            if (kept.rows, kept.open, len(kept.tokens), kept.owner) == (rows, is_open, len(tokens), owner) and common(kept.tokens, tokens) == len(
                tokens
            ):
                return
            self.shelf.take(key)
        self._event()
        self._put(Kept(key, owner, tokens, rows, True, is_open))

    def let_go(self, key: int) -> None:
        """A history at rest has ended, or has been lent."""
        if key in self.shelf:
            self._event()
            self.shelf.take(key)
            self.books.release(("kept", key))

    def not_rested(self, key: int) -> None:
        """`Rest` failed, and the named session has its slot still. It is asked again when a request has come or gone."""
        self._event()
        kept = self.shelf[key]
        kept.open = kept.stuck = True
        self.books.charge(("kept", key), self.books.cost(kept.rows, True))

    def _event(self) -> None:
        self._events += 1
        self._stale = True

    def _put(self, kept: Kept) -> None:
        self._replaced += self.shelf.put(kept)
        self.books.charge(("kept", kept.key), self.books.cost(kept.rows, kept.open))

    # Actions

    def next(self) -> Action | None:
        """The next action, or None: there is no request, or all wait for what nobody here can give. An action counts as done once it is returned."""
        if self._replaced:
            kept = self._replaced.popleft()
            self.books.release(("kept", kept.key))
            return Drop(kept.key)
        if self._stale:
            action = self._make_way()
            if action is not None:
                return action
            self._stale = False
        done = self._queue.next()
        if isinstance(done, Step):
            for serial in done.serials:
                client = self._running[serial]
                client.steps += 1
                self._stale |= client.steps == self.quantum
        elif isinstance(done, Prefill):
            self._stale |= done.last
        return done

    def promise(self, rows: int) -> tuple[int | None, Drop | None]:
        """Host memory for a history of `rows` rows that no request asks for, until `redeem`: its key, or what makes room first; neither: not now."""
        cost = self.books.cost(rows, False)
        fits, drop = self._host_room(cost, (0,) * len(cost), None)
        if not fits:
            return None, drop
        key, self._serial = self._serial, self._serial + 1
        self._promised.add(key)
        self.books.charge(("promised", key), cost)
        return key, None

    def redeem(self, key: int) -> None:
        """The history is there, and held, or will not be."""
        self._event()
        self._promised.discard(key)
        self.books.release(("promised", key))

    def _make_way(self) -> Action | None:
        """What brings the request that has waited longest nearer to a slot."""
        waiting = [client for client in (next(iter(self._parked.values()), None), self._head()) if client is not None]
        for client in sorted(waiting, key=lambda client: client.since):
            action = self._resume(client) if client.state is State.PARKED else self._start(client)
            if action is not None:
                return action
        return None

    def _head(self) -> Client | None:
        """The next one to be started, of the owner whose turn it is."""
        for serials in self._waiting.values():
            for serial in serials:
                client = self._clients[serial]
                if client.waits_for is None or not self._queue.prompt_left(client.waits_for):
                    client.waits_for = self._better(client)
                    if client.waits_for is None:
                        return client
        return None

    def _better(self, client: Client) -> int | None:
        """The request whose prompt under way will soon have more rows of this one's than any history has now."""
        if not self._begins_anew(client):
            return None
        best = 0, -1
        for other in self._running.values():
            if other.owner == client.owner and other.head == client.head and self._left(other):
                best = max(best, (common(other.prompt[: other.lends], client.prompt[:-1]), other.serial))
        shared, serial = best
        if shared < HEAD_ROWS:
            return None
        gained = shared - self._match(client)[2]
        return serial if gained >= self._left(self._running[serial]) - 1 else None

    def _left(self, client: Client) -> int:
        return len(client.prompt) if client.state is State.STARTING else self._queue.prompt_left(client.serial)

    def _begins_anew(self, client: Client) -> bool:
        """Whether it may begin with any rows that its prompt has: it continues no session, or one without rows and slot."""
        own = None if client.session is None else self.shelf.get(client.session)
        return client.session is None or (own is not None and own.rows == 0 and not own.open)

    def _match(self, client: Client) -> tuple[Kept | None, Client | None, int]:
        """What a request begins with: a history at rest or a decoding request, and rows of it."""
        if client.session is not None and not self._begins_anew(client):
            return self.shelf.get(client.session), None, 0
        prompt = client.prompt[:-1]
        kept, rows = self.shelf.longest(client.owner, prompt)
        parent = None
        for other in self._running.values():
            if other.owner != client.owner or other.head != client.head or self._left(other) or other.lends <= rows:
                continue
            shared = common(other.prompt[: other.lends], prompt)
            if shared > rows and shared >= HEAD_ROWS:
                kept, parent, rows = None, other, shared
        return kept, parent, rows

    def _start(self, client: Client) -> Action | None:
        if len(self._parked) > self.parked_max:  # one of them has just been parked for another one's sake
            return None
        kept, parent, rows = self._match(client)
        takes = kept is not None and (kept.key == client.session or (not kept.named and len(kept.tokens) == rows))
        while True:
            action, fits = self._room(client.rows_max, kept, takes, may_park=len(self._parked) < self.parked_max)
            if action is not None:
                return action
            if fits:
                break
            if kept is None or kept.named or takes:
                return None
            takes = True  # the others that begin with it lose it
        self._unqueue(client)
        self._running[client.serial] = client
        client.state, client.steps = State.STARTING, 0
        if kept is not None:
            if takes:
                self.let_go(kept.key)
            else:
                self.shelf.use(kept.key)
        if client.session is not None:
            if kept is not None and kept.key == client.session and len(kept.tokens) < kept.rows:
                client.lends = common(kept.tokens, client.prompt)
            self.let_go(client.session)
        self.books.charge(("request", client.serial), self.books.cost(client.rows_max, True))
        return Start(client.serial, rows, kept.key if kept else None, parent.serial if parent else None, takes)

    def _resume(self, client: Client) -> Action | None:
        action, fits = self._room(client.rows_max, None, True, self.books.of(("request", client.serial)), may_park=True)
        if not fits:
            return action
        self._queue.resume(client.serial)
        self._running[client.serial] = self._parked.pop(client.serial)
        client.state, client.steps = State.RUNNING, 0
        self.books.charge(("request", client.serial), self.books.cost(client.rows_max, True))
        self._event()
        return Resume(client.serial)

    def _room(self, rows: int, kept: Kept | None, takes: bool, held: Cost | None = None, may_park: bool = False) -> tuple[Action | None, bool]:
        """An action that makes room for a history of `rows` rows and its slot, or whether there is. kept: is spared, and given back if it `takes` it;
        held: is given back too."""
        books, spared = self.books, None if kept is None else kept.key
        cost, in_host = books.cost(rows, True), books.cost(rows, False)
        back = held or (0,) * len(cost)
        if kept is not None and takes:
            back = _plus(back, books.of(("kept", kept.key)))
        fits, drop = self._host_room(in_host, back, spared)
        if not fits:
            return drop, False
        own_slot = kept is not None and takes and kept.open
        if books.fits(cost, back) and (own_slot or self.slots_used < self.sessions_max):
            return None, True
        resting = self.shelf.to_park(spared)
        if resting is not None:
            return self._rest(resting), False
        if may_park and not (kept is not None and not kept.named and not takes and kept.open):
            tired = max((one for one in self._running.values() if one.steps >= self.quantum), key=lambda one: (one.steps, -one.serial), default=None)
            if tired is not None:
                return self._park(tired), False
        return None, False

    def _host_room(self, cost: Cost, back: Cost, spared: int | None) -> tuple[bool, Drop | None]:
        """Whether there is host memory for `cost` once `back` is given back; if not, what to drop first, where dropping is enough."""
        if self.books.fits(cost, back):
            return True, None
        going = self.shelf.to_drop(spared)
        for one in going:
            back = _plus(back, self.books.of(("kept", one.key)))
        return False, self._drop(going[0]) if going and self.books.fits(cost, back) else None

    def _drop(self, kept: Kept) -> Drop:
        self.let_go(kept.key)
        return Drop(kept.key)

    def _rest(self, kept: Kept) -> Rest:
        kept.open = False
        self.books.charge(("kept", kept.key), self.books.cost(kept.rows, False))
        return Rest(kept.key)

    def _park(self, client: Client) -> Park:
        self._queue.park(client.serial)
        self._event()
        self._parked[client.serial] = self._running.pop(client.serial)
        client.state, client.since = State.PARKED, self._events
        self.books.charge(("request", client.serial), self.books.cost(client.rows_max, False))
        return Park(client.serial)

    def _unqueue(self, client: Client) -> None:
        """It waits no more; its owner's next turn comes after that of all others."""
        serials = self._waiting.pop(client.owner)
        serials.remove(client.serial)
        if serials:
            self._waiting[client.owner] = serials

    def check(self) -> None:
        """AssertionError if an invariant does not hold."""
        self.books.check()
        self.shelf.check()
        self._queue.check()
        assert self.slots_used <= self.sessions_max, f"{self.slots_used} slots of {self.sessions_max} are used"
        assert len(self._parked) <= (self.parked_max + self.sessions_max if self.parked_max else 0)
        waiting = [serial for serials in self._waiting.values() for serial in serials]
        assert sorted([*waiting, *self._running, *self._parked]) == sorted(self._clients)
        held = {("request", serial) for serial in (*self._running, *self._parked)}
        held |= {("kept", kept.key) for kept in (*self.shelf, *self._replaced)}
        held |= {("promised", key) for key in self._promised}
        assert held == set(self.books.holders), "what is charged is not what is held"
        if not any(kept.named for kept in self.shelf):
            assert all(used <= limit.byte_count for used, limit in zip(self.books.charged, self.books.limits, strict=True)), self.books.charged
        assert all(client.steps >= self.quantum for client in self._parked.values())


def _plus(one: Cost, other: Cost) -> Cost:
    return tuple(a + b for a, b in zip(one, other, strict=True))
