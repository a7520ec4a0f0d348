"""Random lives of many sessions: appended to, drawn from, truncated, forked, parked, saved, restored, closed, against a naive twin. For the tests and
the soak.

The twin is an engine with histories in device memory, no sharing and no drafts: a fork there is a new session to which the same calls are made once
more, and a stream that was left is one of so many tokens.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from glm53 import Engine, SamplingParams
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


POOLS = ("cached", "history", "host history", "index keys")  # what the ledger says of pools, which grow and keep what they have
ONCE = ("drafts", "sampling")  # penalty marks, made when first needed
APPEND, ROWS_MOST = ("prefill", "step", "stream"), 90  # operations that append, and how many rows at most
FAILURES = (HipError, DeviceMemoryError, LinkError)


class World:
    """Sessions of both engines. `engine` and `naive` have room for `sessions_max` sessions each; vocab: token ids to draw from.

    done, skipped: operations by kind that took place, and that could not (no slot, no room). left: streams that were left before their end.
    """

    def __init__(self, engine: Engine, naive: Engine, folder: Path, seed: int, vocab: int, rows_max: int):
        self.engine, self.naive, self.folder, self.rng, self.vocab, self.rows_max = engine, naive, folder, random.Random(seed), vocab, rows_max
        self.lives: list[Life] = []
        self.done: Counter[str] = Counter()
        self.skipped: Counter[str] = Counter()
        self.failures = self.left = 0
        self.before = engine.ledger.snapshot()
        self.fault: Fault | None = None  # makes one of the next calls of the runtime fail, and is told when the operation has ended

    def ids(self, most: int) -> list[int]:
        return [self.rng.randrange(self.vocab) for _ in range(self.rng.randint(1, most))]

    def act(self) -> None:
        """One operation on one session; what it gives is compared bit for bit."""
        kinds = {"open": 2, "prefill": 6, "step": 6, "stream": 6, "truncate": 4, "fork": 3, "park": 2, "save": 2, "close": 1, "settle": 1}
        kind = self.rng.choices(list(kinds), list(kinds.values()))[0] if self.lives else "open"
        life = self.rng.choice(self.lives) if kind != "open" else None
        if not self._possible(kind, life):
            self.skipped[kind] += 1
            return
        if life is None:
            self.lives.append(Life(self.engine.session(), self.naive.session()))
        else:
            self._try(kind, life)
        self.done[kind] += 1
        self.engine.stage.check()

    def _possible(self, kind: str, life: Life | None) -> bool:
        """Whether there is a slot for the operation, and room for its rows."""
        awake = sum(not one.parked for one in self.lives) < self.engine.sessions_max
        if life is None:
            return awake and len(self.lives) < self.naive.sessions_max
        if kind == "fork":
            return (life.parked or awake) and len(self.lives) < self.naive.sessions_max
        if kind in APPEND and life.session.rows + ROWS_MOST >= self.rows_max:
            return False
        return awake or not life.parked or kind in ("close", "truncate", "save", "park")

    def _try(self, kind: str, life: Life) -> None:
        """The operation, during which a call may fail: then the session has the rows that it had, and its twin was not told."""
        rows = life.session.rows
        if self.fault is not None and self.rng.random() < 0.5:
            self.fault.arm(self.rng)
        try:
            getattr(self, f"_{kind}")(life)
        except FAILURES:
            self.failures += 1
            assert kind in ("truncate", "close", "stream") or life.session.rows == rows, f"{kind} failed and left {life.session.rows} of {rows} rows"
        finally:
            self._clear()
        if kind != "close":
            life.parked = life.session.state is SessionState.PARKED

    def _clear(self) -> None:
        if self.fault is not None:
            self.fault.clear()

    def _play(self, session: Session, call: Call) -> np.ndarray | None:
        if call[0] == "stream":
            for _ in session.stream(*call[1]):
                pass
            return None
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
        self._both(life, ("prefill", self.ids(90)))

    def _step(self, life: Life) -> None:
        self._both(life, ("step", self.ids(4)))

    def _stream(self, life: Life) -> None:
        """Tokens drawn behind a prompt, or behind the token drawn last; half of the streams are left before their end, by `close` or just so."""
        rng, session = self.rng, life.session
        params = SamplingParams(
            temperature=rng.choice([0.0, 0.7, 1.2]),
            top_p=rng.choice([1.0, 0.9]),
            repetition_penalty=rng.choice([1.0, 1.0, 1.4]),
            seed=rng.randrange(2**64),
            max_tokens=rng.randint(1, 20),
            ignore_eos=True,
        )
        ids = [] if session.pending and rng.random() < 0.4 else self.ids(40)
        taken = params.max_tokens if rng.random() < 0.5 else rng.randint(1, params.max_tokens)
        stream, got = session.stream(ids, params), list[int]()
        try:
            for chunk in itertools.islice(stream, taken):
                got += chunk.token_ids
            if taken < params.max_tokens:
                self.left += 1
                if rng.random() < 0.5:
                    stream.close()  # type: ignore[attr-defined]
        finally:  # what was drawn before a failing call stays
            self._clear()
            if got:
                wanted = [token for chunk in life.twin.stream(ids, replace(params, max_tokens=len(got))) for token in chunk.token_ids]
                life.calls.append(("stream", (ids, replace(params, max_tokens=len(got)))))
                assert got == wanted, f"stream of {ids} with {params}, {taken} tokens taken"
            assert (session.tokens, session.pending) == (life.twin.tokens, life.twin.pending)

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
        """Closes what is left; nothing is held any more but pools that have grown, and what is made when it is first needed."""
        for life in self.lives.copy():
            self._close(life)
        for side in self.engine.stage.sides:
            for store in (side.tier, side.keys):
                store.check()
                assert store.pool.free == store.pool.capacity, f"device {side.device.index} keeps extents"
        self.engine.ledger.check()
        for difference in self.engine.ledger.differences(self.before):
            grown = difference.now.allocations - difference.before.allocations
            assert (difference.category in POOLS and grown > 0) or (difference.category in ONCE and grown == 1), str(difference)
