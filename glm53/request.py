"""Requests of an engine: a prompt with its sampling settings, what it has drawn so far, and what callers see of that."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from glm53.errors import Glm53Error, InputError
from glm53.model.decode import StepRow, Ticket
from glm53.model.sampler import Drawn, DrawRow
from glm53.model.stage import Parked
from glm53.sampling import SamplingParams
from glm53.tokenizer import StopMatcher, StreamDecoder

Prompt = str | Sequence[int]


class Constraint(Protocol):
    """What a request may draw next; it moves on with each token that it drew. For one request alone."""

    @property
    def mask(self) -> np.ndarray:
        """[ceil(vocab / 32)] u32: bit i of word w says whether token 32 w + i may be next."""

    def accept(self, token_id: int) -> bool:
        """Takes a token in that the mask allows; True if nothing may follow it. Raises InputError where the constraint is too complex to go on."""


@dataclass(frozen=True)
class TokenLogprob:
    """Log-probability of a token under the raw logits (natural log), and of the most probable ones."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # (token id, log-probability), most probable first


@dataclass(frozen=True)
class Chunk:
    """What one step added to one request. `text` may lag behind the tokens: it never holds half a character or a possible stop string."""

    index: int  # which of the prompts given
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: (
        str | None
    )  # None: goes on; "stop": end-of-sequence token, stop string or end of the constraint; "length": max_tokens or context limit


@dataclass(frozen=True)
class Completion:
    """A finished request. Given to SamplingParams, `seed` repeats it."""

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]  # an end-of-sequence token is not part of it
    text: str
    finish_reason: str
    logprobs: tuple[TokenLogprob, ...]
    seed: int
    reused_rows: int = field(default=0, compare=False)  # prompt tokens that were not computed again, but came from a session


class Lender(Protocol):
    """What a request needs of the session that it continues; see `glm53.session.Session`."""

    def lend(self, prompt: Sequence[int], may_cut: bool, begin: Callable[[], tuple[int, int]] | None) -> tuple[int, int]: ...
    def take_back(self, slot: int | None, parked: Parked | None, tokens: Sequence[int], prompt_rows: int, sampling: SamplingParams) -> None: ...
    def lost(self) -> None: ...


@dataclass
class Request:
    """One running request: its tokens and what turns them into text."""

    index: int
    prompt: list[int]
    params: SamplingParams
    seed: int
    decoder: StreamDecoder | None
    matcher: StopMatcher
    constraint: Constraint | None = None
    slot: int = -1  # of both stores while it runs
    parked: Parked | None = None  # its history while it has no slot
    spoiled: bool = False  # it ended with an error of its own: nobody may begin with its rows
    reused_rows: int = 0  # of its prompt, from a session that was there when it started
    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    deadline: float | None = None  # `time.monotonic()` at which it ends, if it has not
    owner: str = ""  # rows are shared between requests of one owner alone
    session: Lender | None = None  # whose history it continues and leaves its rows to; None: a history of its own
    may_cut: bool = True  # rows of the session's prompts that its own does not have

    @property
    def kept_rows(self) -> int:
        """Rows that a history of its tokens has when it ends now: none for the token drawn last, unless another one was drawn behind it."""
        ended = self.finish_reason == "stop" and not self.matcher.stopped
        return len(self.prompt) + len(self.tokens) - (1 if self.tokens and not ended else 0)

    def draw_row(self) -> DrawRow:
        """How it draws its next token."""
        mask = self.constraint.mask if self.constraint is not None else None
        return DrawRow(self.slot, self.params, self.seed, len(self.prompt) + len(self.tokens), mask)

    def step_row(self) -> StepRow:
        """Its next decode row, from the token drawn last."""
        return StepRow(self.draw_row(), self.tokens[-1])

    def ends_next(self, context_rows_max: int) -> bool:
        """Whether the token being drawn is its last, whatever it is."""
        tokens = len(self.tokens) + 1
        return tokens >= self.params.max_tokens or len(self.prompt) + tokens >= context_rows_max

    def accept(self, drawn: Drawn, eos_token_ids: Sequence[int], context_rows_max: int) -> Chunk:
        """Takes a drawn token into the request and says what it adds. Raises Glm53Error if there was none to draw, InputError if its constraint
        cannot go on."""
        token, params = drawn.token_id, self.params
        if token < 0:
            raise Glm53Error(
                f"the logits for position {len(self.prompt) + len(self.tokens)} hold no finite number; check the weights (--check-weights), "
                "then the device (glm53 selftest)"
            )
        ends = token in params.stop_token_ids or (token in eos_token_ids and not params.ignore_eos)
        text, ends_here = "", False
        if not ends:
            self.tokens.append(token)
            text = self.matcher.push(self.decoder.push(token)) if self.decoder else ""
            ends_here = self.constraint is not None and self.constraint.accept(token)
        if ends or ends_here or self.matcher.stopped:
            self.finish_reason = "stop"
        elif len(self.tokens) >= params.max_tokens or len(self.prompt) + len(self.tokens) >= context_rows_max:
            self.finish_reason = "length"
        if self.finish_reason and self.decoder and not self.matcher.stopped:
            text += self.matcher.push(self.decoder.finish()) + self.matcher.finish()
        logprobs: tuple[TokenLogprob, ...] = ()
        if params.logprobs is not None and not ends:
            logprobs = (TokenLogprob(token, drawn.logprob, drawn.top[: params.logprobs]),)
        return Chunk(self.index, text, () if ends else (token,), logprobs, self.finish_reason)


class Plan(Protocol):
    """What a batch asks of its queue."""

    def finish(self, serial: int) -> None: ...


@dataclass
class Batch:
    """Requests that run together, by their serials in the queue, and the step in flight with rows of `serials`, some of which may have ended since.

    A request whose chunk says so, or that `Engine.drop` ended, is in neither the queue nor `by_serial` any more.
    """

    queue: Plan
    by_serial: dict[int, Request] = field(default_factory=dict)
    serials: tuple[int, ...] = ()
    ticket: Ticket | None = None

    def finish(self, serial: int, request: Request) -> bool:
        """The request has left; whether its history, if it has one, ends with it. Has taken place also where it raises."""
        self.queue.finish(serial)
        return True


@dataclass
class Outcome:
    """What an action added: chunks by serial, and requests that it ended with an error of their own; nobody else is concerned by that.

    error: the device refused to be waited for when memory was given back.
    """

    chunks: list[tuple[int, Chunk]] = field(default_factory=list)
    failed: list[tuple[int, Glm53Error]] = field(default_factory=list)
    error: Glm53Error | None = None


def fresh_seed() -> int:
    """A seed from the system's entropy."""
    return secrets.randbits(64)


def is_single(prompts: Prompt | Sequence[Prompt]) -> bool:
    """One prompt, rather than a list of prompts. Raises InputError for what is neither."""
    if isinstance(prompts, str):
        return True
    if isinstance(prompts, np.ndarray):
        return prompts.ndim == 1
    if not isinstance(prompts, (list, tuple)):
        raise InputError(f"prompts: got {type(prompts).__name__}, wanted a text, a list of token ids, or a list of such prompts")
    return bool(prompts) and not any(isinstance(p, (str, list, tuple, np.ndarray)) for p in prompts)


def integers(ids: Sequence[int]) -> list[int]:
    if not isinstance(ids, (list, tuple, np.ndarray)):
        raise InputError(f"prompt: got {type(ids).__name__}, wanted a text or a list of token ids")
    wrong = [i for i in ids if isinstance(i, bool) or not isinstance(i, (int, np.integer))]
    if wrong:
        raise InputError(f"prompt: got {wrong[0]!r} among the token ids, wanted integers")
    return [int(i) for i in ids]
