"""A session: one history with its tokens, driven by its caller row by row or token by token, saved and restored."""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, cast

import numpy as np

from glm53 import persist
from glm53.config import EngineConfig
from glm53.errors import DeviceLost, InputError, InUse, LifetimeError, WouldCut
from glm53.hip import Array, Device
from glm53.model.decode import Decoder, StepRow
from glm53.model.sampler import Drawn
from glm53.model.stage import Parked, Stage
from glm53.request import Chunk, Prompt, Request, integers
from glm53.sampling import SamplingParams
from glm53.sched.drafts import DepthPolicy
from glm53.sched.sessions import Life, SessionState
from glm53.sessionfile import Header
from glm53.spec import ModelSpec

Progress = Callable[[int, int, str], None]


class SessionEngine(Protocol):
    """What a session needs of its engine."""

    config: EngineConfig
    spec: ModelSpec
    stage: Stage
    decoder: Decoder
    fingerprint: str | None
    context_rows_max: int
    step_rows_max: int
    _turn: threading.RLock

    @property
    def device(self) -> Device: ...
    def encode(self, text: str) -> list[int]: ...
    def default_params(self) -> SamplingParams: ...
    def _check_open(self) -> None: ...
    def _check_ids(self, ids: list[int], rows: int = 0) -> None: ...
    def _prefill(self, slot: int, ids: list[int]) -> None: ...
    def _read_logits(self, count: int, row_error: Array) -> np.ndarray: ...
    def _request(self, index: int, ids: list[int], params: SamplingParams) -> Request: ...
    def _mark_prompt(self, request: Request) -> None: ...
    def _draw_first(self, request: Request) -> Drawn: ...
    def _close_sessions(self, slots: Sequence[int]) -> None: ...
    def _held(self, session: Session) -> Session: ...


TAIL_ROWS = 16  # at the end of a prompt, whose tokens may be others as soon as text follows
_SERIALS = itertools.count()


class Session:
    """One history driven row by row, greedy or otherwise: the caller picks the tokens. Close it, or use a `with` block.

    Prompt rows and step rows are of different classes (docs/decisions/0001-two-row-classes.md): two sessions that made the same calls have the
    same bits.

    sampling: parameters of the last call of `stream`, with the seed that it drew from; saved and restored with the history. None at first. notes: a
    JSON object of the caller's, likewise. States: glm53/sched/sessions.py; a parked session is resumed by the next call that needs it.
    """

    def __init__(self, engine: SessionEngine, slot: int | None = None, parked: Parked | None = None):
        """slot: of a history that is open already and becomes this session's. parked: a history without a slot that does."""
        self._engine = engine
        self.serial = next(_SERIALS)  # order of opening
        self._prompt_rows = 0  # first rows that were all computed as prompt rows
        self._life = Life()
        self._parked: Parked | None = parked
        self._tokens: list[int] = []
        self._pending: list[int] = []  # the token that `stream` gave last, until it has a row
        self._ahead: deque[Drawn] = deque()  # tokens that a round drew and `stream` has not given; their rows are behind those of `_tokens`
        self._fed: list[int] = []  # tokens of the row or rows before the first of them
        self._marked: Request | None = None  # whose repetition penalty the marks of the slot are
        self._saves = 0  # under way
        self._policy = DepthPolicy(engine.config.drafts_max) if engine.config.mtp == "auto" else None
        self._timed_depth = -1  # drafts of the round before
        self.sampling: SamplingParams | None = None
        self.notes: Mapping[str, Any] = {}
        self.owner = ""  # requests of the same owner may begin with its rows
        self.lent = False  # to a request that continues it
        self.changes = 0  # of its rows
        with engine._turn:
            engine._check_open()
            self._slot: int | None = engine.stage.open() if slot is None and parked is None else slot
            if parked is not None:
                self._life.state = SessionState.PARKED

    @property
    def slot(self) -> int:
        """Of the tiers. Raises LifetimeError after `close`, and while the session is parked."""
        if self._slot is None:
            raise LifetimeError(f"the session is {self.state.value}; next: {'resume()' if self._parked is not None else 'open another one'}")
        return self._slot

    @property
    def state(self) -> SessionState:
        """See glm53/sched/sessions.py."""
        return SessionState.SAVING if self._saves and self._life.state is SessionState.READY else self._life.state

    @property
    def rows(self) -> int:
        """Rows of the history: tokens computed so far, those that `stream` has given and their prompts."""
        if self._ahead:
            return len(self._tokens)
        return self._parked.rows if self._parked is not None else self._engine.stage.rows(self.slot)

    @contextmanager
    def _at_work(self, state: SessionState, call: str) -> Iterator[int]:
        """The engine's turn, in a state of work; gives the slot, resumed if it was parked."""
        engine = self._engine
        with engine._turn:
            engine._check_open()
            if self._parked is not None:
                self._resume()
            self._life.go(state, call)
            try:
                self._drop_ahead()
                yield self.slot
            except DeviceLost:
                self._life.state = SessionState.FAILED
                raise
            finally:
                if self._life.state is state:
                    self._life.rest(self.rows)

    def _drop_ahead(self) -> None:
        """The history has the tokens that the caller of `stream` has seen and no others, whatever a round drew beyond them."""
        if self._ahead:
            self._ahead.clear()
            self._marked = None
            self._engine.decoder.settle()
            self._engine.stage.truncate(self.slot, len(self._tokens))

    def settle(self) -> None:
        """Waits until every row is in its permanent place: host RAM with the host tier."""
        with self._at_work(SessionState.SETTLING, "settle") as slot:
            self._engine.stage.settle(slot)

    def fork(self, rows: int | None = None) -> Session:
        """A new session with the first `rows` rows of this one, None: all. Full extents are shared, at most one is copied; each goes its own way from
        here. Its bits are those of a session that made the same calls. That of a parked session is parked too. Raises InputError outside [0, rows] or
        when all sessions are in use, DeviceMemoryError, HipError, with nothing opened."""
        engine = self._engine
        with engine._turn:
            engine._check_open()
            kept = self._checked("fork", self.rows if rows is None else rows)
            if self._parked is not None:
                return self._made_from(type(self)(engine, parked=engine.stage.fork_parked(self._parked, kept)), kept)
            with self._at_work(SessionState.SETTLING, "fork") as slot:
                engine.decoder.settle()
                made = self._made_from(type(self)(engine, engine.stage.fork(slot, kept)), kept)
                made._life.rest(made.rows)
        return made

    def _checked(self, call: str, rows: object) -> int:
        if not is_whole(rows) or not 0 <= cast(int, rows) <= self.rows:
            raise InputError(f"{call}: got {rows!r}, wanted 0 to {self.rows}, the rows of this session")
        return int(cast(int, rows))

    def _made_from(self, made: Session, kept: int) -> Session:
        """A fork of `kept` rows gets what belongs to them."""
        made._tokens, made.sampling = self._tokens[:kept], self.sampling
        made._prompt_rows = min(self._prompt_rows, kept)
        made._pending = self._pending.copy() if kept == self.rows else []
        made.notes = self.notes
        return self._engine._held(made)

    def park(self) -> None:
        """Gives the device's memory and the slot back; the history stays in host RAM until the next call that needs it, or `resume`. Again is not an
        error. Raises LifetimeError while it is being saved; InputError, HipError with the session as it was."""
        with self._engine._turn:
            engine = self._engine
            engine._check_open()
            if self._parked is not None:
                return
            self._refuse_while_saved("park")
            self._life.check(SessionState.PARKED, "park")
            slot = self.slot
            self._drop_ahead()
            engine.decoder.settle()
            parked = engine.stage.park(slot)
            self._life.go(SessionState.PARKED, "park")
            self._slot, self._parked = None, parked

    def resume(self) -> None:
        """Undoes `park`; nothing to do for an open session that is not parked. Raises InputError when all sessions are in use, DeviceMemoryError,
        HipError, with the session still parked; LifetimeError after `close`."""
        with self._engine._turn:
            self._engine._check_open()
            if self._parked is not None:
                self._resume()
            elif self._life.state in (SessionState.CLOSED, SessionState.FAILED):
                self._life.check(SessionState.READY, "resume")

    # A request that continues it

    def lend(self, prompt: Sequence[int], may_cut: bool, begin: Callable[[], tuple[int, int]] | None) -> tuple[int, int]:
        """The history becomes that of a request with this prompt: rows of other tokens are cut, and the last token's row too; more prompt rows than
        the last few only with `may_cut`. The slot, resumed if it was parked, and the rows that are left. begin: opens a history of first prompt rows
        that takes the place of this one, which is parked and empty; its slot and rows. Until `take_back` other calls raise LifetimeError. Raises
        InUse for a session at work, WouldCut, InputError for one that has ended; else as `resume`, `truncate` and `begin`, with the session at
        rest."""
        engine = self._engine
        with engine._turn:
            engine._check_open()
            if self.state in (SessionState.CLOSED, SessionState.FAILED):
                raise InputError(f"the session is {self.state.value}; next: open another one")
            if self._saves or self.state not in (SessionState.CREATED, SessionState.READY, SessionState.PARKED):
                raise InUse(f"the session is {self.state.value}; next: wait for it, or fork it")
            shared = common_rows(self._tokens, prompt)
            if self._prompt_rows - shared > min(TAIL_ROWS, (self._prompt_rows + 1) // 2) and not may_cut:
                raise WouldCut(
                    f"the session has {self.rows} rows, the first {self._prompt_rows} of them of prompts, and this prompt shares {shared}; the "
                    "others would be cut: a prompt is the whole text from its beginning, not what is new; next: send that, begin another session "
                    "or a fork, or permit the cut with session_cut: true"
                )
            if begin is not None:
                self._begin(prompt, begin)
            if self._parked is not None:
                self._resume()
            self._drop_ahead()
            kept = common_rows(self._tokens, prompt[:-1])
            if kept < self.rows:
                self.truncate(kept)
            self._pending = []
            self._life.go(SessionState.PREFILLING, "request")
            self.lent = True
            return self.slot, kept

    def _begin(self, prompt: Sequence[int], begin: Callable[[], tuple[int, int]]) -> None:
        if self._tokens or self._parked is None:
            raise InUse("another call has given the session rows; next: ask again")
        slot, rows = begin()
        self._engine.stage.discard(self._parked)
        self._slot, self._parked, self._marked = slot, None, None
        self._tokens, self._prompt_rows = list(prompt[:rows]), rows
        self._life.rest(rows)

    def take_back(self, slot: int | None, parked: Parked | None, tokens: Sequence[int], prompt_rows: int, sampling: SamplingParams) -> None:
        """The request has ended, and its history, open in `slot` or parked, has the rows of the first of `tokens`; what has no row is pending. Rows
        below `prompt_rows` that the session did not have were computed as prompt rows."""
        self._slot, self._parked = slot, parked
        self.changes += 1
        rows, before = self.rows, len(self._tokens)
        if self._prompt_rows == before:
            self._prompt_rows = max(before, min(prompt_rows, rows))
        self._tokens, self._pending = list(tokens[:rows]), list(tokens[rows:]) if rows >= prompt_rows else []
        self.sampling, self.lent = sampling, False
        self._life.rest(rows)

    def lost(self) -> None:
        """Its rows could not be brought to what they should be: the slot is another's, and the session is good for `close` alone."""
        self._slot, self.lent = None, False
        self._life.state = SessionState.FAILED

    def _resume(self) -> None:
        assert self._parked is not None
        self._slot = self._engine.stage.resume(self._parked)
        rows, self._parked, self._marked = self._parked.rows, None, None
        self._life.rest(rows)

    @property
    def prompt_rows(self) -> int:
        """The first rows that were all computed as prompt rows: other requests of its owner may begin with them."""
        return self._prompt_rows

    @property
    def tokens(self) -> tuple[int, ...]:
        """Token ids of the history, one a row."""
        return tuple(self._tokens)

    @property
    def pending(self) -> tuple[int, ...]:
        """The token that `stream` gave last, as long as it has no row."""
        return tuple(self._pending)

    def prefill(self, ids: Sequence[int]) -> np.ndarray:
        """Appends prompt rows; logits [vocab] f32 after the last one. If it raises, no row was appended."""
        engine, every = self._engine, integers(ids)
        engine._check_open()
        engine._check_ids(every, self.rows)
        with self._at_work(SessionState.PREFILLING, "prefill") as slot, engine.stage.all_or_nothing(slot):
            engine._prefill(slot, every)
            logits = engine._read_logits(1, engine.stage.first.prompt_row_error)[0]
            self._appended(every, prompt=True)
        return logits

    def step(self, ids: Sequence[int]) -> np.ndarray:
        """Appends 1 to `Engine.step_rows_max` step rows, as decode or verification does; logits [len(ids), vocab] f32. If it raises, no
        row was appended."""
        engine, every = self._engine, integers(ids)
        engine._check_open()
        engine._check_ids(every, self.rows)
        if len(every) > engine.step_rows_max:
            raise InputError(f"step: got {len(every)} tokens, wanted at most {engine.step_rows_max}; use prefill for more")
        with self._at_work(SessionState.DECODING, "step") as slot, engine.stage.all_or_nothing(slot):
            engine.decoder.run_rows([(slot, len(every))], every, [self.rows])
            logits = engine._read_logits(len(every), engine.stage.first.step_row_error)
            self._appended(every)
        return logits

    def _appended(self, ids: Sequence[int], prompt: bool = False) -> None:
        if prompt and self._prompt_rows == len(self._tokens):
            self._prompt_rows += len(ids)
        self._tokens += ids
        self._pending = []
        self.changes += 1

    @property
    def parked(self) -> Parked | None:
        """Its history while it is parked."""
        return self._parked

    def common_prompt_rows(self, ids: Sequence[int]) -> int:
        """How many of the first rows are prompt rows of these tokens; 0 for a session that is closed."""
        if self._slot is None and self._parked is None:
            return 0
        return common_rows(self._tokens[: self._prompt_rows], ids)

    def branch(self, rows: int) -> int:
        """The slot of a new history with the first `rows` rows of this one, which stays as it is, open or parked. The engine's turn is its caller's.
        Raises InputError when all sessions are in use, DeviceMemoryError, HipError, with nothing opened."""
        stage = self._engine.stage
        return stage.fork(self.slot, rows) if self._parked is None else stage.resume_fork(self._parked, rows)

    def stream(self, prompt: Prompt = (), params: SamplingParams | None = None) -> Iterator[Chunk]:
        """Appends a prompt (text or token ids) and continues it token by token, as `Engine.stream` does.

        An empty prompt goes on from the token drawn last, as if that call had not ended: with its seed the tokens are those of one longer call. The
        token drawn last gets its row with whatever follows it. params: None takes those of the last call, else `Engine.default_params()`. However it
        ends, the history has the tokens that the iterator gave and no others, with drafts and without. Calls that do not change the history may come
        between two tokens. Raises InputError before anything runs; the iterator LifetimeError where another call has changed the history.
        """
        engine = self._engine
        engine._check_open()
        ids = engine.encode(prompt) if isinstance(prompt, str) and prompt else integers(prompt or ())
        if params is None:
            params = self.sampling or engine.default_params()
        if not isinstance(params, SamplingParams):
            raise InputError(f"params: got {type(params).__name__}, wanted SamplingParams")
        if not ids and not self._pending:
            raise InputError("stream: nothing to go on from: the prompt is empty and no token was drawn before; next: give a prompt")
        engine._check_ids([*self._pending, *ids], self.rows)
        request = engine._request(0, [*self._tokens, *self._pending, *ids], params)
        self.sampling = replace(params, seed=request.seed)
        return self._continue(request, ids, self.changes)

    def _continue(self, request: Request, ids: list[int], changes: int) -> Iterator[Chunk]:
        """A token at a time: what a round drew behind it becomes part of the history when it is given, and is drawn again if a call comes between."""
        while request.finish_reason is None:
            with self._engine._turn:
                chunk = self._next_chunk(request, ids, changes)
            changes, ids = self.changes, []
            yield chunk

    def _next_chunk(self, request: Request, ids: list[int], changes: int) -> Chunk:
        self._engine._check_open()
        if self.changes != changes and self._life.state not in (SessionState.CLOSED, SessionState.FAILED):
            raise LifetimeError(f"stream: another call has changed the history, which has {self.rows} rows now; next: call stream again")
        if self._ahead and self._marked is request:
            return self._give(request)
        with self._at_work(SessionState.PREFILLING if ids else SessionState.DECODING, "stream"):
            self._draw(request, ids)
            return self._give(request, prompt=bool(ids))

    def _draw(self, request: Request, ids: list[int]) -> None:
        """Appends the token given last, `ids` if there are any, and draws: one token, or with drafts as many as stand."""
        engine, fed = self._engine, [*self._pending, *ids]
        request.slot = self.slot
        with engine.stage.all_or_nothing(request.slot):
            if self._marked is not request:
                engine.decoder.settle()  # what comes next follows this request's settings
                engine._mark_prompt(request)
                self._marked = request
            if ids:
                engine._prefill(request.slot, fed)
                drawn = [engine._draw_first(request)]
            else:
                drawn = self._round(StepRow(request.draw_row(), fed[0]))
        self._ahead.extend(drawn)
        self._fed = fed

    def _give(self, request: Request, prompt: bool = False) -> Chunk:
        """The first token that was drawn and not given yet: its history has the row of the token before it now."""
        engine, drawn = self._engine, self._ahead.popleft()
        self._appended(self._fed, prompt)
        chunk = request.accept(drawn, engine.spec.eos_token_ids, engine.context_rows_max)
        self._pending = self._fed = list(chunk.token_ids)
        return chunk

    def _round(self, row: StepRow) -> list[Drawn]:
        """One step, with as many drafts as paid in this session so far."""
        decoder, policy = self._engine.decoder, self._policy
        if policy is None:
            return decoder.draw(row, self._engine.config.drafts_max)
        depth, started = policy.depth(), time.perf_counter()
        drawn = decoder.draw(row, depth)
        step_us = (time.perf_counter() - started) * 1e6 if depth == self._timed_depth else None  # the first of a kind is recorded, or starts drafts
        self._timed_depth = depth
        policy.add(depth, [len(drawn) - 1], step_us)
        return drawn

    def truncate(self, rows: int) -> None:
        """Keeps the first `rows` rows; the token drawn last, which has none, goes too.

        A token that is given again gets a prompt row, whose last bits differ from those of the step row that `stream` gave it
        (docs/decisions/0001-two-row-classes.md): to repeat sampled draws exactly, truncate to where a prompt began and stream that again.
        A parked session stays so. Raises InputError outside [0, rows]; has taken place also where it raises a HipError.
        """
        engine = self._engine
        with engine._turn:
            engine._check_open()
            kept = self._checked("truncate", rows)
            self._refuse_while_saved("truncate")
            if self._parked is not None:
                self._cut(kept)
                engine.stage.truncate_parked(self._parked, kept)
                return
            with self._at_work(SessionState.SETTLING, "truncate") as slot:
                self._cut(kept)
                engine.decoder.settle()
                engine.stage.truncate(slot, kept)

    def _cut(self, rows: int) -> None:
        del self._tokens[rows:]
        self.changes += 1
        self._pending, self._prompt_rows = [], min(self._prompt_rows, rows)

    def save(self, path: str | Path, progress: Progress | None = None) -> int:
        """Writes the history, its tokens and `sampling` to a file that `Engine.restore` reads; bytes of the file.

        The file is on the disk and complete when this returns; until then an older one of that name stays as it was, also through a kill or a power
        failure. Other sessions go on meanwhile, and so may this one by rows that the file does not get; truncate and close refuse. Memory: four
        pieces of the file, each 8 MiB or 64 rows. progress(bytes_done, bytes_total, section). Raises SessionFileError for what the file system
        refuses (no space, no permission, the file is being saved already), HipError; nothing is left.
        """
        engine = self._engine
        with engine._turn:
            engine._check_open()
            source: int | Parked
            if self._parked is not None:
                source = self._parked
            else:
                with self._at_work(SessionState.SETTLING, "save") as source:
                    engine.stage.settle(source)
            header, tokens, hidden = self._header(), self._tokens.copy(), engine.stage.hidden_state(source)
            self._saves += 1
        try:
            return persist.save_session(engine.stage, engine._turn, engine._check_open, header, source, tokens, hidden, path, progress)
        finally:
            with engine._turn:
                self._saves -= 1

    def file_bytes(self) -> int:
        """Bytes of the file that `save` would write now."""
        header = self._header()
        return header.file_bytes(len(header.encode()))

    def _header(self) -> Header:
        engine = self._engine
        form = persist.Format(engine.config, engine.spec, engine.fingerprint, engine.stage)
        return form.header(len(self._tokens), self.sampling, tuple(self._pending), self._prompt_rows, self.notes)

    def _refuse_while_saved(self, call: str) -> None:
        if self._saves:
            raise LifetimeError(f"{call}: the session is being saved; next: wait until save has returned")

    def close(self) -> None:
        """Gives the history back. Idempotent. Raises LifetimeError while it is being saved."""
        self._refuse_while_saved("close")
        if self.lent:
            raise LifetimeError("close: the session is a request's; next: end the request first")
        slot, parked, self._slot, self._parked = self._slot, self._parked, None, None
        self._ahead.clear()
        self._life.state = SessionState.CLOSED
        if self._engine.device.closed:
            return
        with self._engine._turn:
            if parked is not None:
                self._engine.stage.discard(parked)
            if slot is not None:
                self._engine._close_sessions([slot])

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def common_rows(own: Sequence[int], other: Sequence[int]) -> int:
    """How many of the first tokens are the same."""
    most = min(len(own), len(other))
    differ = np.flatnonzero(np.array(own[:most]) != np.array(other[:most]))
    return int(differ[0]) if differ.size else most


def is_whole(value: object) -> bool:
    """A whole number, numpy's included; True and False are none."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)
