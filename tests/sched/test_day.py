"""A day of traffic from a seed against a scheduler whose engine only counts: budgets, slots, endings and fairness after every event."""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest

from glm53.sched.admission import Books, Limit, Price
from glm53.sched.queue import Prefill, Step
from glm53.sched.scheduler import Action, Drop, Leaving, Park, Rest, Resume, Scheduler, Start
from glm53.sched.shelf import common
from tests.conftest import ROOT, load_script

CHUNK, QUANTUM, SLOTS = 64, 24, 4
EXTENT, ROW_BYTES, KEY_BYTES, HOT_BYTES = 64, 10, 2, 500
CONTEXT = 1500
WAIT_MAX = 4000  # events without progress: 30 requests of at most 220 steps or so, on four slots


def make_books(rng: random.Random) -> Books:
    prices = [
        Price("host", "history rows", False, extent_rows=EXTENT, extent_bytes=EXTENT * ROW_BYTES),
        Price("device 0", "hot cache", True, each=HOT_BYTES),
        Price("device 0", "index keys", True, extent_rows=EXTENT, extent_bytes=EXTENT * KEY_BYTES),
    ]
    host = rng.choice((1700, 3000, 8000)) * ROW_BYTES
    device = rng.choice((HOT_BYTES + 1600 * KEY_BYTES, SLOTS * HOT_BYTES + 3200 * KEY_BYTES, 10**6))
    return Books(prices, [Limit("host", host, "--host-kv-gib"), Limit("device 0", device, "--gpu-memory-utilization")])


@dataclass
class History:
    """What the engine has of a history."""

    rows: int
    reserved: int
    open: bool


@dataclass
class Asked:
    """A request, as its client knows it."""

    serial: int
    owner: str
    prompt: np.ndarray
    tokens_max: int
    session: int | None
    born: int
    history: History | None = None
    drawn: int = 0
    turn: int = 0  # tokens since its slot
    reused: int = -1
    last_progress: int = 0

    @property
    def rows_max(self) -> int:
        return len(self.prompt) + self.tokens_max


@dataclass
class Engine:
    """Counts bytes as a real one would need them, independently of the scheduler's books."""

    books: Books
    asked: dict[int, Asked] = field(default_factory=dict)
    kept: dict[int, tuple[str, np.ndarray, History, bool]] = field(default_factory=dict)

    def histories(self) -> Iterator[History]:
        yield from (one.history for one in self.asked.values() if one.history is not None)
        yield from (history for _, _, history, _ in self.kept.values())

    def check(self, slots: int) -> None:
        host = device = used = 0
        for one in self.histories():
            assert one.rows <= one.reserved
            extents = -(-one.reserved // EXTENT)
            host += extents * EXTENT * ROW_BYTES
            if one.open:
                used += 1
                device += HOT_BYTES + extents * EXTENT * KEY_BYTES
        assert used <= slots, "more histories with a slot than slots"
        assert host <= self.books.limits[0].byte_count and device <= self.books.limits[1].byte_count, "memory beyond its limit"


class Day:
    """One run; `log` is what the scheduler decided."""

    def __init__(self, seed: int, arrivals: int):
        self.rng = random.Random(seed)
        books = make_books(self.rng)
        self.parked_max = (0, 2, 6)[seed % 3]
        self.keeps = seed % 4 != 3
        decode_max = self.rng.choice((0, 2))
        self.scheduler = Scheduler(books, SLOTS, CHUNK, self.rng.choice((1, 2)), decode_max, self.parked_max, QUANTUM, self.keeps)
        self.engine = Engine(books)
        self.left, self.now, self.log = arrivals, 0, []
        self.keys = iter(range(1, 1 << 30))
        self.texts = {owner: np.array([self.rng.randrange(50) for _ in range(CONTEXT)], np.int32) for owner in "abc"}
        self.ends = {"stop": 0, "aborted": 0, "deadline": 0, "fault": 0, "refused": 0}
        self.reused = self.begun = self.parks = self.longest_wait = 0

    def run(self) -> None:
        while self.left or len(self.scheduler):
            self.now += 1
            busy = len(self.scheduler)
            if self.left and self.rng.random() < (0.04 if busy < 30 else 0.005):
                self.arrive()
            if self.rng.random() < 0.01:
                self.disturb()
            action = self.scheduler.next()
            if action is None and len(self.scheduler):
                assert self.engine.kept or not self.engine.asked, "requests wait, nothing runs and nothing is held"
                assert any(named for _, _, _, named in self.engine.kept.values()), "nobody can go on"
                self.close_session()
            if action is not None:
                self.log.append(action)
                self.do(action)
            if self.now % 7 == 0 or self.now < 2000:
                self.scheduler.check()
            self.engine.check(SLOTS)
            for one in self.engine.asked.values():
                self.longest_wait = max(self.longest_wait, self.now - one.last_progress)
        while (action := self.scheduler.next()) is not None:
            self.do(action)

    def arrive(self) -> None:
        rng, owner = self.rng, self.rng.choice("aaaabc")
        self.left -= 1
        session = None
        free = [key for key, (_, _, _, named) in self.engine.kept.items() if named and not any(a.session == key for a in self.engine.asked.values())]
        if free and rng.random() < 0.5:
            session = rng.choice(free)
            owner = self.engine.kept[session][0]
        rows = int(min(1200, rng.lognormvariate(4.5, 1.3) + 1))
        prompt = self.texts[owner][:rows].copy()
        if rng.random() < 0.7:
            prompt[rng.randrange(rows) :] += rng.randrange(3)
        tokens = rng.choice((1, 5, 40, 200))
        for _ in range(rng.choice((1, 1, 1, 3)) if session is None else 1):
            if self.scheduler.books.never(rows + tokens):
                self.ends["refused"] += 1
                continue
            serial = self.scheduler.add(owner, prompt, rows + tokens, session)
            self.engine.asked[serial] = Asked(serial, owner, prompt, tokens, session, self.now, last_progress=self.now)
        if rng.random() < 0.1 and sum(named for _, _, _, named in self.engine.kept.values()) < 3:
            self.open_session(owner)

    def open_session(self, owner: str) -> None:
        """An empty named session."""
        while True:
            promised, drop = self.scheduler.promise(0)
            if drop is None:
                break
            self.do(drop)
        if promised is not None:
            key = next(self.keys)
            self.engine.kept[key] = (owner, np.zeros(0, np.int32), History(0, 0, False), True)
            self.scheduler.hold(key, owner, np.zeros(0, np.int32), 0, False)
            self.scheduler.redeem(promised)

    def close_session(self) -> None:
        key = next(key for key, (_, _, _, named) in self.engine.kept.items() if named)
        busy = [one.serial for one in self.engine.asked.values() if one.session == key]
        for serial in busy:
            self.end(serial, "aborted")
        self.scheduler.let_go(key)
        del self.engine.kept[key]

    def disturb(self) -> None:
        if self.engine.asked:
            self.end(self.rng.choice(sorted(self.engine.asked)), self.rng.choice(("aborted", "deadline")))

    def end(self, serial: int, how: str) -> None:
        one = self.engine.asked.pop(serial)
        self.ends[how] += 1
        history, leaving = one.history, None
        if one.session is not None and history is not None:
            rows = history.rows
            leaving = Leaving(one.session, one.prompt[: min(history.rows, len(one.prompt))], rows, True, history.open)
            self.engine.kept[one.session] = (one.owner, leaving.tokens, History(rows, rows, history.open), True)
        elif history is not None and how != "fault":
            rows = min(history.rows, len(one.prompt))
            if self.scheduler.leaves(serial, rows):
                leaving = Leaving(next(self.keys), one.prompt[:rows], rows, False, history.open)
                self.engine.kept[leaving.key] = (one.owner, leaving.tokens, History(rows, rows, history.open), False)
        self.scheduler.finish(serial, leaving)

    def do(self, action: Action) -> None:
        if isinstance(action, Start):
            self.start(action)
        elif isinstance(action, Park):
            one = self.engine.asked[action.serial]
            assert one.history is not None and one.turn >= QUANTUM
            one.history.open = False
            self.parks += 1
        elif isinstance(action, Resume):
            one = self.engine.asked[action.serial]
            assert one.history is not None and not one.history.open
            one.history.open, one.turn, one.last_progress = True, 0, self.now
        elif isinstance(action, Rest):
            if self.rng.random() < 0.02 and self.engine.kept[action.key][3]:
                self.scheduler.not_rested(action.key)
            elif self.rng.random() < 0.02 and not self.engine.kept[action.key][3]:
                del self.engine.kept[action.key]
                self.scheduler.let_go(action.key)
            else:
                self.engine.kept[action.key][2].open = False
        elif isinstance(action, Drop):
            assert not self.engine.kept.pop(action.key)[3], "a named session is dropped"
        elif isinstance(action, Prefill):
            one = self.engine.asked[action.serial]
            assert one.history is not None and one.history.open and action.start == one.history.rows
            one.history.rows, one.last_progress = action.stop, self.now
            if action.last:
                self.draw(one)
        elif isinstance(action, Step):
            if self.rng.random() < 0.002:
                self.end(max(action.serials), "fault")
            for serial in action.serials:
                if serial in self.engine.asked:
                    one = self.engine.asked[serial]
                    assert one.history is not None and one.history.open
                    one.history.rows += 1
                    one.turn += 1
                    self.draw(one)

    def start(self, action: Start) -> None:
        one = self.engine.asked[action.serial]
        own = None if one.session is None else self.engine.kept[one.session]
        if action.kept is not None:
            owner, tokens, _, named = self.engine.kept[action.kept]
            assert owner == one.owner and (named == (one.session == action.kept) or not action.take)
            assert own is None or one.session == action.kept or own[2].rows == 0  # an empty session begins with other rows
            reused = common(tokens, one.prompt[:-1]) if one.session == action.kept else action.rows
            self.begun += own is not None and one.session != action.kept
            assert common(tokens, one.prompt[:-1]) >= reused
            if action.take:
                del self.engine.kept[action.kept]
        elif action.parent is not None:
            parent = self.engine.asked[action.parent]
            assert parent.history is not None and parent.history.open and parent.drawn and parent.owner == one.owner
            reused = action.rows
            assert common(parent.prompt, one.prompt[:-1]) >= reused
        else:
            reused = 0
        if one.session is not None:
            self.engine.kept.pop(one.session, None)
        if self.rng.random() < 0.01:
            if own is not None and one.session is not None:
                self.engine.kept[one.session] = own
                self.end(action.serial, "fault")
                self.scheduler.hold(one.session, own[0], own[1], own[2].rows, own[2].open)
            else:
                self.end(action.serial, "fault")
            return
        one.history, one.reused, one.last_progress = History(reused, one.rows_max, True), reused, self.now
        self.reused += reused
        self.scheduler.started(action.serial, reused)

    def draw(self, one: Asked) -> None:
        one.drawn += 1
        one.last_progress = self.now
        if one.drawn == one.tokens_max or self.rng.random() < 0.01:
            self.end(one.serial, "stop")


@pytest.mark.parametrize("seed", range(5))
def test_a_day(seed: int) -> None:
    """Ten thousand requests and more, all seeds together."""
    day = Day(seed, 1500)
    day.run()
    scheduler = day.scheduler
    scheduler.check()
    assert not day.engine.asked and len(scheduler) == 0
    for key in [key for key, (_, _, _, named) in day.engine.kept.items() if named]:
        scheduler.let_go(key)
        del day.engine.kept[key]
    assert {kept.key for kept in scheduler.shelf} == set(day.engine.kept)
    for kept in list(scheduler.shelf):
        scheduler.let_go(kept.key)
    assert not any(scheduler.books.charged), "something is charged and nobody is there"
    assert day.ends["stop"] > 1000 and day.ends["aborted"] and day.ends["deadline"] and day.ends["fault"]
    assert day.longest_wait < WAIT_MAX, "somebody starves"
    assert day.reused > (20_000 if day.keeps else 0)
    assert day.begun or not day.keeps, "no empty session began with what another text has"
    assert bool(day.parks) == bool(day.parked_max)


def test_the_same_day_twice() -> None:
    first, second = Day(7, 300), Day(7, 300)
    first.run()
    second.run()
    assert first.log == second.log


def test_a_step_of_64_sessions_takes_little() -> None:
    taken = load_script(ROOT / "scripts" / "bench_sched.py").measure(64, 400, False)
    print(f"{statistics.median(taken):.0f} us a step")
    assert statistics.median(taken) <= 200.0
