"""Random lives of many sessions: appended to, truncated, forked, parked, saved, restored, closed, against a naive twin. For the tests and the soak.

The twin is an engine with histories in device memory and no sharing: a fork there is a new session to which the same calls are made once more.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from glm53 import Engine
from glm53.session import Session

Call = tuple[str, Any]


@dataclass
class Life:
    """One session, its twin, and every call that made it what it is."""

    session: Session
    twin: Session
    calls: list[Call] = field(default_factory=list)
    parked: bool = False


class World:
    """Sessions of both engines. `engine` and `naive` have room for `sessions_max` sessions each; vocab: token ids to draw from."""

    def __init__(self, engine: Engine, naive: Engine, folder: Path, seed: int, vocab: int, rows_max: int):
        self.engine, self.naive, self.folder, self.rng, self.vocab, self.rows_max = engine, naive, folder, random.Random(seed), vocab, rows_max
        self.lives: list[Life] = []
        self.done: dict[str, int] = {}

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
            if life.parked and awake >= self.engine.sessions_max and kind != "close":
                return  # no slot to come back to
            if kind in ("fork",) and (awake + life.parked >= self.engine.sessions_max or len(self.lives) >= self.naive.sessions_max):
                return
            getattr(self, f"_{kind}")(life)
            if kind not in ("park", "close"):
                life.parked = False
        self.done[kind] = self.done.get(kind, 0) + 1
        self.engine.stage.check()

    def _play(self, session: Session, call: Call) -> np.ndarray | None:
        return getattr(session, call[0])(call[1])

    def _both(self, life: Life, call: Call) -> None:
        got, wanted = self._play(life.session, call), self._play(life.twin, call)
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
        self._both(life, ("truncate", self.rng.randint(0, life.session.rows)))

    def _settle(self, life: Life) -> None:
        life.session.settle()

    def _fork(self, life: Life) -> None:
        rows = self.rng.randint(0, life.session.rows)
        made, twin = life.session.fork(rows), self.naive.session()
        for call in life.calls:
            self._play(twin, call)
        twin.truncate(rows)
        self.lives.append(Life(made, twin, [*life.calls, ("truncate", rows)]))

    def _park(self, life: Life) -> None:
        life.session.park()
        life.parked = True

    def _save(self, life: Life) -> None:
        """Saved, closed and restored."""
        path = self.folder / "session"
        life.session.save(path)
        life.session.close()
        life.session = self.engine.restore(path)

    def _close(self, life: Life) -> None:
        life.session.close()
        life.twin.close()
        self.lives.remove(life)

    def end(self) -> None:
        """Closes what is left; nothing is held any more."""
        for life in self.lives.copy():
            self._close(life)
        for side in self.engine.stage.sides:
            for store in (side.tier, side.keys):
                store.check()
                assert store.pool.free == store.pool.capacity, f"device {side.device.index} keeps extents"
