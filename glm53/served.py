"""The histories of a server's requests: begun from one another, parked and resumed, kept at rest. Does what `glm53.sched.scheduler` decides.

An automatic history at rest has the prompt rows of a request that has ended. Their bits are those that any later request would compute, so that no
text depends on what is kept. Named ones are the engine's open `Session`s, which their users drive between two actions; `sync` sees what they did.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from glm53.errors import DeviceLost, Glm53Error, LinkStuck
from glm53.model.decode import Decoder
from glm53.model.stage import Parked, Stage
from glm53.request import Batch, Outcome, Request
from glm53.sched.queue import Prefill, Step
from glm53.sched.scheduler import Action, Drop, Leaving, Park, Rest, Resume, Scheduler, Start
from glm53.sched.sessions import SessionState
from glm53.sched.shelf import Tokens
from glm53.session import Session


class ServedEngine(Protocol):
    """What this needs of an engine."""

    stage: Stage
    decoder: Decoder
    _turn: threading.RLock

    def act(self, action: Prefill | Step, batch: Batch) -> Outcome: ...
    def collect(self, batch: Batch) -> Outcome: ...
    def drop(self, serials: Sequence[int], batch: Batch) -> None: ...
    def sessions(self) -> list[Session]: ...
    def _mark_prompt(self, request: Request) -> None: ...
    def _close_sessions(self, slots: Sequence[int]) -> None: ...


@dataclass
class Held:
    """An automatic history at rest: in a slot, or parked."""

    slot: int
    parked: Parked | None = None


@dataclass
class Seen:
    """A named session as the scheduler knows it."""

    session: Session
    changes: int
    rows: int
    is_open: bool
    owner: str


class Served(Batch):
    """Requests of a scheduler on an engine. All calls are of one thread."""

    def __init__(self, engine: ServedEngine, scheduler: Scheduler):
        super().__init__(scheduler)
        self.engine, self.scheduler = engine, scheduler
        self._kept: dict[int, Held] = {}  # by key, odd
        self._named: dict[int, Seen] = {}  # by key, even
        self._next_key = 1
        self.parks = 0  # of requests, so that others got their slots

    def enter(self, request: Request, rows_max: int) -> int:
        """The request waits for its turn; its serial. rows_max: of its history."""
        self.sync()
        key = _key(request.session) if isinstance(request.session, Session) else None
        serial = self.scheduler.add(request.owner, np.array(request.prompt, np.int32), rows_max, key)
        self.by_serial[serial] = request
        return serial

    def act(self, action: Action) -> Outcome:
        """Does an action of the scheduler. Raises as `Engine.act`, of `Park` what the step in flight raises; of what concerns histories at rest only
        the loss of the device."""
        engine = self.engine
        if isinstance(action, Prefill | Step):
            return engine.act(action, self)
        done = Outcome()
        with engine._turn:
            if isinstance(action, Start):
                self._start(action)
            elif isinstance(action, Park):
                done = engine.collect(self)
                if action.serial in self.by_serial:
                    self.parks += 1
                    self._park(action.serial, done)
            elif isinstance(action, Resume):
                self._resume(self.by_serial[action.serial])
            elif isinstance(action, Rest):
                self._rest(action.key)
            else:
                self._drop(action)
        return done

    # Requests

    def _start(self, action: Start) -> None:
        engine, request = self.engine, self.by_serial[action.serial]
        engine.decoder.settle()
        if isinstance(request.session, Session):
            key = _key(request.session)
            self._named.pop(key, None)
            anew = action.parent is not None or action.kept not in (None, key)
            begin = (lambda: (self._source(action), action.rows)) if anew else None
            try:
                request.slot, request.reused_rows = request.session.lend(request.prompt, request.may_cut, begin)
            finally:
                if action.take and action.kept in self._kept:  # it was not begun with
                    self._drop(Drop(action.kept))
        else:
            request.slot, request.reused_rows = self._source(action), action.rows
        engine._mark_prompt(request)
        self.scheduler.started(action.serial, request.reused_rows)

    def _source(self, action: Start) -> int:
        """A history with the rows that the action says; its slot."""
        stage, rows = self.engine.stage, action.rows
        if action.parent is not None:
            return stage.fork(self.by_serial[action.parent].slot, rows)
        if action.kept is None:
            return stage.open()
        if action.take:
            return self._take(self._kept.pop(action.kept), rows)
        if action.kept in self._named:
            return self._named[action.kept].session.branch(rows)
        held = self._kept[action.kept]
        return stage.fork(held.slot, rows) if held.parked is None else stage.resume_fork(held.parked, rows)

    def _take(self, held: Held, rows: int) -> int:
        stage = self.engine.stage
        try:
            if held.parked is not None:
                held.slot, held.parked = stage.resume(held.parked), None
            if rows < stage.rows(held.slot):
                stage.truncate(held.slot, rows)
        except BaseException:
            self._end(held)
            raise
        return held.slot

    def _park(self, serial: int, done: Outcome) -> None:
        """A request that cannot be parked ends."""
        request = self.by_serial[serial]
        try:
            self.engine.decoder.settle()
            request.parked = self.engine.stage.park(request.slot)
            request.slot = -1
        except (DeviceLost, LinkStuck):
            raise
        except Glm53Error as error:
            request.spoiled = True
            done.failed.append((serial, error))
            self.engine.drop([serial], self)

    def _resume(self, request: Request) -> None:
        assert request.parked is not None
        self.engine.decoder.settle()
        request.slot = self.engine.stage.resume(request.parked)
        request.parked = None
        self.engine._mark_prompt(request)

    def finish(self, serial: int, request: Request) -> bool:
        """See `Batch.finish`: its prompt rows stay at rest if they are worth it, those of a session go back to that."""
        has_history, leaving = request.slot >= 0 or request.parked is not None, None
        try:
            if request.session is not None and has_history:
                assert isinstance(request.session, Session)
                leaving = self._give_back(request, request.session)
            elif has_history and not request.spoiled:
                leaving = self._keep(serial, request)
            elif request.parked is not None:
                self.engine.stage.discard(request.parked)
        except BaseException:
            slot, request.slot = request.slot, -1
            self.engine._close_sessions([slot] if slot >= 0 else [])
            raise
        finally:
            request.parked = None
            if leaving is not None:
                request.slot = -1
            self.scheduler.finish(serial, leaving)
            if leaving is None and request.session is not None:
                self.sync()
        return request.slot >= 0

    def _keep(self, serial: int, request: Request) -> Leaving | None:
        stage = self.engine.stage
        rows = min(len(request.prompt), request.parked.rows if request.parked is not None else stage.rows(request.slot))
        if not self.scheduler.leaves(serial, rows):
            if request.parked is not None:
                stage.discard(request.parked)
            return None
        held = Held(request.slot, request.parked)
        if held.parked is None:
            self.engine.decoder.settle()
            stage.truncate(held.slot, rows)
        key, self._next_key = self._next_key, self._next_key + 2
        self._kept[key] = held
        all_rows = rows if held.parked is None else held.parked.rows
        return Leaving(key, np.array(request.prompt[:rows], np.int32), all_rows, False, held.parked is None)

    def _give_back(self, request: Request, session: Session) -> Leaving | None:
        """The session has the rows that it would have if every token had been read before the next step was enqueued."""
        engine, slot = self.engine, request.slot
        try:
            if request.parked is None:
                engine.decoder.settle()
                if request.kept_rows < engine.stage.rows(slot):
                    engine.stage.truncate(slot, request.kept_rows)
        except BaseException:
            session.lost()
            raise
        request.slot = -1
        params = replace(request.params, seed=request.seed)
        at = slot if request.parked is None else None
        session.take_back(at, request.parked, [*request.prompt, *request.tokens], len(request.prompt), params)
        seen = self._named[_key(session)] = _seen(session)
        return Leaving(_key(session), _tokens(session), seen.rows, True, seen.is_open)

    # Histories at rest

    def _rest(self, key: int) -> None:
        """Parks one. An automatic one that cannot be parked ends."""
        seen = self._named.get(key)
        try:
            self.engine.decoder.settle()
            if seen is not None:
                seen.session.park()
                seen.is_open = False
            else:
                held = self._kept[key]
                held.parked = self.engine.stage.park(held.slot)
        except (DeviceLost, LinkStuck):
            raise
        except Glm53Error:
            if seen is not None:
                self.scheduler.not_rested(key)
            else:
                self.scheduler.let_go(key)
                self._drop(Drop(key))

    def _drop(self, action: Drop) -> None:
        try:
            self._end(self._kept.pop(action.key))
        except (DeviceLost, LinkStuck):
            raise
        except Glm53Error:
            pass  # the device refused to be waited for; the history has ended all the same

    def _end(self, held: Held) -> None:
        if held.parked is not None:
            self.engine.stage.discard(held.parked)
        else:
            self.engine._close_sessions([held.slot])

    def sync(self) -> None:
        """The scheduler learns what the users of named sessions have done."""
        with self.engine._turn:
            self._sync()

    def _sync(self) -> None:
        there = {_key(session): session for session in self.engine.sessions() if session.state not in (SessionState.CLOSED, SessionState.FAILED)}
        for key in [key for key in self._named if key not in there]:
            del self._named[key]
            self.scheduler.let_go(key)
        for key, session in there.items():
            if session.lent:
                continue
            now, before = _seen(session), self._named.get(key)
            if before != now:
                self._named[key] = now
                self.scheduler.hold(key, session.owner, _tokens(session), now.rows, now.is_open)

    def promise(self, rows: int) -> int | None:
        """See `Scheduler.promise`; what makes room is done."""
        while True:
            key, drop = self.scheduler.promise(rows)
            if drop is None:
                return key
            self.act(drop)

    def close(self) -> None:
        """Ends the automatic histories at rest."""
        with self.engine._turn, ExitStack() as steps:
            while self._kept:
                key, held = self._kept.popitem()
                self.scheduler.let_go(key)
                steps.callback(self._end, held)


def _key(session: Session) -> int:
    return 2 * session.serial


def _tokens(session: Session) -> Tokens:
    return np.array(session.tokens[: session.prompt_rows], np.int32)


def _seen(session: Session) -> Seen:
    return Seen(session, session.changes, session.rows, session.parked is None, session.owner)
