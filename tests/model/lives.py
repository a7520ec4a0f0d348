"""Random lives of many sessions: appended to, truncated, forked, parked, saved, restored, closed, against a naive twin. For the tests and the soak.

The twin is an engine with histories in device memory and no sharing: a fork there is a new session to which the same calls are made once more.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from glm53 import Engine
from glm53.errors import DeviceMemoryError, HipError, LinkError
from glm53.sched.sessions import SessionState
from glm53.session import Session

Call = tuple[str, Any]


@dataclass
class Life:
    """One session, its twin, and every call that made it what it is."""

    session: Session
    twin: Session
    calls: list[Call] = field(default_factory=list)
    parked: bool = False


class Fault(Protocol):
    """A failing call of the runtime, chosen by the test."""

    def arm(self, rng: random.Random) -> None: ...

    def clear(self) -> None: ...


FAILURES = (HipError, DeviceMemoryError, LinkError)


class World:
    """Sessions of both engines. `engine` and `naive` have room for `sessions_max` sessions each; vocab: token ids to draw from."""

    def __init__(self, engine: Engine, naive: Engine, folder: Path, seed: int, vocab: int, rows_max: int):
        self.engine, self.naive, self.folder, self.rng, self.vocab, self.rows_max = engine, naive, folder, random.Random(seed), vocab, rows_max
        self.lives: list[Life] = []
        self.done: dict[str, int] = {}
        self.failures = 0
        self.fault: Fault | None = None  # makes one of the next calls of the runtime fail, and is told when the operation has ended

    def ids(self, most: int) -> list[int]:
        return [self.rng.randrange(self.vocab) for _ in range(self.rng.randint(1, most))]

    def act(self) -> None:
        """One operation on one session; what it gives is compared bit for bit."""
        kinds = {"open": 2, "prefill": 6, "step": 10, "truncate": 4, "fork": 3, "park": 2, "save": 2, "close": 1, "settle": 1}
        kind = self.rng.choices(list(kinds), list(kinds.values()))[0]
        awake = sum(not life.parked for life in self.lives)
        if not self.lives or kind == "open":
            if awake >= self.engine.sessions_max or len(self.lives) >= self.naive.sessions_max:
                return
            self.lives.append(Life(self.engine.session(), self.naive.session()))
            kind = "open"
        else:
            life = self.rng.choice(self.lives)
            if life.parked and awake >= self.engine.sessions_max and kind not in ("close", "fork", "truncate", "save", "park"):
                return  # no slot to come back to
            if kind == "fork" and ((not life.parked and awake >= self.engine.sessions_max) or len(self.lives) >= self.naive.sessions_max):
                return
            self._try(kind, life)
        self.done[kind] = self.done.get(kind, 0) + 1
        self.engine.stage.check()

    def _try(self, kind: str, life: Life) -> None:
        """The operation, during which a call may fail: then the session has the rows that it had, and its twin was not told."""
        rows = life.session.rows
        if self.fault is not None and self.rng.random() < 0.5:
            self.fault.arm(self.rng)
        try:
            getattr(self, f"_{kind}")(life)
        except FAILURES:
            self.failures += 1
            assert kind in ("truncate", "close") or life.session.rows == rows, f"{kind} failed and left {life.session.rows} of {rows} rows"
        finally:
            self._clear()
        if kind != "close":
            life.parked = life.session.state is SessionState.PARKED

    def _clear(self) -> None:
        if self.fault is not None:
            self.fault.clear()

    def _play(self, session: Session, call: Call) -> np.ndarray | None:
        return getattr(session, call[0])(call[1])

    def _both(self, life: Life, call: Call) -> None:
        got = self._play(life.session, call)
        self._clear()  # the twin's calls never fail
        wanted = self._play(life.twin, call)
        if wanted is not None:
            np.testing.assert_array_equal(got, wanted, err_msg=f"{call[0]} after {[c[0] for c in life.calls]}")
        life.calls.append(call)
        assert life.session.rows == life.twin.rows and life.session.tokens == life.twin.tokens

    def _prefill(self, life: Life) -> None:
        ids = self.ids(90)
        if life.session.rows + len(ids) < self.rows_max:
            self._both(life, ("prefill", ids))

    def _step(self, life: Life) -> None:
        ids = self.ids(4)
        if life.session.rows + len(ids) < self.rows_max:
            self._both(life, ("step", ids))

    def _truncate(self, life: Life) -> None:
        call = ("truncate", self.rng.randint(0, life.session.rows))
        try:
            self._play(life.session, call)
        finally:  # it has taken place also where it raises
            self._clear()
            self._play(life.twin, call)
            life.calls.append(call)

    def _settle(self, life: Life) -> None:
        life.session.settle()

    def _fork(self, life: Life) -> None:
        rows = self.rng.randint(0, life.session.rows)
        made = life.session.fork(rows)
        self._clear()
        twin = self.naive.session()
        for call in life.calls:
            self._play(twin, call)
        twin.truncate(rows)
        self.lives.append(Life(made, twin, [*life.calls, ("truncate", rows)], parked=life.parked))

    def _park(self, life: Life) -> None:
        life.session.park()

    def _save(self, life: Life) -> None:
        """Saved, closed and restored."""
        path = self.folder / "session"
        life.session.save(path)
        try:
            life.session.close()
        finally:
            try:
                life.session = self.engine.restore(path, parked=life.parked)
            except FAILURES:
                self.failures += 1
                self._clear()
                life.session = self.engine.restore(path, parked=life.parked)

    def _close(self, life: Life) -> None:
        self.lives.remove(life)
        try:
            life.session.close()
        finally:
            self._clear()
            life.twin.close()

    def end(self) -> None:
        """Closes what is left; nothing is held any more."""
        for life in self.lives.copy():
            self._close(life)
        for side in self.engine.stage.sides:
            for store in (side.tier, side.keys):
                store.check()
                assert store.pool.free == store.pool.capacity, f"device {side.device.index} keeps extents"
