"""A session: one history with its tokens, driven by its caller row by row or token by token, saved and restored."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Protocol

import numpy as np

from glm53 import persist
from glm53.config import EngineConfig
from glm53.errors import InputError, LifetimeError
from glm53.hip import Array, Device
from glm53.model.decode import Decoder, StepRow
from glm53.model.sampler import Drawn
from glm53.model.stage import Stage
from glm53.request import Chunk, Prompt, Request, integers
from glm53.sampling import SamplingParams
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
    def _depth(self) -> int: ...
    def _close_sessions(self, slots: Sequence[int]) -> None: ...


class Session:
    """One history driven row by row, greedy or otherwise: the caller picks the tokens. Close it, or use a `with` block.

    Prompt rows and step rows are of different classes (docs/decisions/0001-two-row-classes.md): two sessions that made the same calls have the
    same bits.

    sampling: parameters of the last call of `stream`, with the seed that it drew from; saved and restored with the history. None at first.
    """

    def __init__(self, engine: SessionEngine):
        self._engine = engine
        self._tokens: list[int] = []
        self._pending: list[int] = []  # the token that `stream` drew last, until it has a row
        self._saves = 0  # under way
        self.sampling: SamplingParams | None = None
        with engine._turn:
            engine._check_open()
            self._slot: int | None = engine.stage.open()

    @property
    def slot(self) -> int:
        if self._slot is None:
            raise LifetimeError("the session is used after close(); next: open another one")
        return self._slot

    @property
    def rows(self) -> int:
        """Rows of the history: tokens computed so far."""
        return self._engine.stage.rows(self.slot)

    @property
    def tokens(self) -> tuple[int, ...]:
        """Token ids of the history, one a row."""
        return tuple(self._tokens)

    def prefill(self, ids: Sequence[int]) -> np.ndarray:
        """Appends prompt rows; logits [vocab] f32 after the last one. If it raises, no row was appended."""
        engine, every = self._engine, integers(ids)
        engine._check_open()
        engine._check_ids(every, self.rows)
        with engine._turn, engine.stage.all_or_nothing(self.slot):
            engine._prefill(self.slot, every)
            logits = engine._read_logits(1, engine.stage.first.prompt_row_error)[0]
            self._appended(every)
        return logits

    def step(self, ids: Sequence[int]) -> np.ndarray:
        """Appends 1 to `Engine.step_rows_max` step rows, as decode or verification does; logits [len(ids), vocab] f32. If it raises, no
        row was appended."""
        engine, every = self._engine, integers(ids)
        engine._check_open()
        engine._check_ids(every, self.rows)
        if len(every) > engine.step_rows_max:
            raise InputError(f"step: got {len(every)} tokens, wanted at most {engine.step_rows_max}; use prefill for more")
        with engine._turn, engine.stage.all_or_nothing(self.slot):
            engine.decoder.run_rows([(self.slot, len(every))], every, [self.rows])
            logits = engine._read_logits(len(every), engine.stage.first.step_row_error)
            self._appended(every)
        return logits

    def _appended(self, ids: Sequence[int]) -> None:
        self._tokens += ids
        self._pending = []

    def stream(self, prompt: Prompt = (), params: SamplingParams | None = None) -> Iterator[Chunk]:
        """Appends a prompt (text or token ids) and continues it token by token, as `Engine.stream` does.

        An empty prompt goes on from the token drawn last, as if that call had not ended: with its seed the tokens are those of one longer call. The
        token drawn last gets its row with whatever follows it. params: None takes those of the last call, else `Engine.default_params()`. Rows that
        were appended stay if the iterator is closed early. Raises InputError before anything runs.
        """
        engine = self._engine
        engine._check_open()
        ids = engine.encode(prompt) if isinstance(prompt, str) and prompt else integers(prompt or ())
        if params is None:
            params = self.sampling or engine.default_params()
        if not ids and not self._pending:
            raise InputError("stream: nothing to go on from: the prompt is empty and no token was drawn before; next: give a prompt")
        engine._check_ids([*self._pending, *ids], self.rows)
        request = engine._request(0, [*self._tokens, *self._pending, *ids], params)
        self.sampling = replace(params, seed=request.seed)
        return self._continue(request, ids)

    def _continue(self, request: Request, ids: list[int]) -> Iterator[Chunk]:
        engine, rows = self._engine, self.rows
        while request.finish_reason is None:
            with engine._turn:
                engine._check_open()
                if self.rows != rows:
                    raise LifetimeError(f"stream: the session has {self.rows} rows, {rows} when the last token was drawn; next: call stream again")
                chunks = self._draw(request, ids)
                ids, rows = [], self.rows
            yield from chunks

    def _draw(self, request: Request, ids: list[int]) -> list[Chunk]:
        """Appends the token drawn last, `ids` if there are any, and draws: one token, or with drafts as many as stand."""
        engine, fed = self._engine, [*self._pending, *ids]
        request.slot = self.slot
        with engine.stage.all_or_nothing(request.slot):
            if not request.tokens:
                engine._mark_prompt(request)
            if ids:
                engine._prefill(request.slot, fed)
                drawn = [engine._draw_first(request)]
            else:
                drawn = engine.decoder.draw(StepRow(request.draw_row(), fed[0]), engine._depth())
        chunks: list[Chunk] = []
        for one in drawn:  # the row of each is that of the token before it
            self._appended(fed)
            chunks.append(request.accept(one, engine.spec.eos_token_ids, engine.context_rows_max))
            self._pending = fed = list(chunks[-1].token_ids)
            if request.finish_reason is not None:
                break
        if len(self._tokens) < self.rows:  # drafts that stood behind the end
            engine.decoder.settle()
            engine.stage.truncate(request.slot, len(self._tokens))
        return chunks

    def truncate(self, rows: int) -> None:
        """Keeps the first `rows` rows. Raises InputError outside [0, rows]; has taken place also where it raises a HipError."""
        self._engine._check_open()
        if not is_whole(rows) or not 0 <= rows <= self.rows:
            raise InputError(f"truncate: got {rows!r}, wanted 0 to {self.rows}, the rows of this session")
        with self._engine._turn:
            self._refuse_while_saved("truncate")
            del self._tokens[int(rows) :]
            self._pending = []
            self._engine.stage.truncate(self.slot, rows)

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
            slot = self.slot
            engine.stage.settle(slot)
            tokens, pending = self._tokens.copy(), tuple(self._pending)
            self._saves += 1
        try:
            header = persist.Format(engine.config, engine.spec, engine.fingerprint, engine.stage).header(len(tokens), self.sampling, pending)
            return persist.save_session(engine.stage, engine._turn, engine._check_open, header, slot, tokens, path, progress)
        finally:
            with engine._turn:
                self._saves -= 1

    def _refuse_while_saved(self, call: str) -> None:
        if self._saves:
            raise LifetimeError(f"{call}: the session is being saved; next: wait until save has returned")

    def close(self) -> None:
        """Gives the history back. Idempotent. Raises LifetimeError while it is being saved."""
        self._refuse_while_saved("close")
        slot, self._slot = self._slot, None
        if slot is not None and not self._engine.device.closed:
            with self._engine._turn:
                self._engine._close_sessions([slot])

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def is_whole(value: object) -> bool:
    """A whole number, numpy's included; True and False are none."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)
