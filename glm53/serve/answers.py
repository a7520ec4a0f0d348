"""The objects that the API sends: whole answers, and chunks of a stream. Knows neither engine nor HTTP."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from glm53.request import Chunk, TokenLogprob
from glm53.serve.reasoning import Splitter
from glm53.tokenizer import Tokenizer

LOGPROB_MIN = -9999.0  # JSON has no infinity; the value that vLLM sends


@dataclass
class Piece:
    """What one chunk adds to a choice."""

    reasoning: str
    text: str
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: str | None


@dataclass
class Choice:
    """One of the texts of an answer, as far as it has come."""

    index: int
    splitter: Splitter
    reasoning: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    tokens: int = 0
    reasoning_tokens: int = 0
    reused_rows: int = 0
    finish_reason: str | None = None

    def add(self, chunk: Chunk) -> Piece:
        """Takes a chunk in."""
        self.tokens += len(chunk.token_ids)
        self.reasoning_tokens += len(chunk.token_ids) if self.splitter.thinking else 0
        reasoning, text = self.splitter.push(chunk.text)
        if chunk.finish_reason is not None:
            reasoning += self.splitter.finish()
        self.reasoning.append(reasoning)
        self.texts.append(text)
        self.logprobs += chunk.logprobs
        self.finish_reason = chunk.finish_reason
        return Piece(reasoning, text, chunk.logprobs, chunk.finish_reason)


def usage(prompt_tokens: int, cached_tokens: int, choices: Sequence[Choice]) -> dict[str, Any]:
    """Tokens read and drawn. An end-of-sequence token is not counted."""
    drawn = sum(choice.tokens for choice in choices)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": drawn,
        "total_tokens": prompt_tokens + drawn,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": sum(choice.reasoning_tokens for choice in choices)},
    }


class Form:
    """How an endpoint words its answers. with_logprobs: whether the caller asked for them."""

    prefix = whole_object = chunk_object = ""

    def __init__(self, model: str, tokenizer: Tokenizer | None, with_logprobs: bool):
        self.tokenizer, self.with_logprobs = tokenizer, with_logprobs
        self._head: dict[str, Any] = {"id": self.prefix + uuid.uuid4().hex, "created": int(time.time()), "model": model}

    def whole(self, choices: Sequence[Choice], used: dict[str, Any]) -> dict[str, Any]:
        """An answer in one piece."""
        return self._head | {"object": self.whole_object, "choices": [self._whole(choice) for choice in choices], "usage": used}

    def chunk(self, choices: Sequence[dict[str, Any]], used: dict[str, Any] | None, with_usage: bool) -> dict[str, Any]:
        """A chunk of a stream. with_usage: the caller asked for usage, which the last chunk alone has."""
        return self._head | {"object": self.chunk_object, "choices": list(choices)} | ({"usage": used} if with_usage else {})

    def opening(self, choice: Choice) -> dict[str, Any] | None:
        """What a stream says of a choice before its first piece."""
        return None

    def piece(self, choice: Choice, piece: Piece) -> dict[str, Any]:
        """A piece of a choice in a stream."""
        raise NotImplementedError

    def _whole(self, choice: Choice) -> dict[str, Any]:
        raise NotImplementedError

    def _token(self, token_id: int) -> tuple[str, bytes]:
        raw = self.tokenizer.token_bytes(token_id) if self.tokenizer is not None else b""
        return raw.decode("utf-8", errors="replace"), raw


class ChatForm(Form):
    """`/v1/chat/completions`."""

    prefix, whole_object, chunk_object = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def opening(self, choice: Choice) -> dict[str, Any]:
        return {"index": choice.index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}

    def piece(self, choice: Choice, piece: Piece) -> dict[str, Any]:
        delta = {name: text for name, text in (("reasoning_content", piece.reasoning), ("content", piece.text)) if text}
        return {"index": choice.index, "delta": delta, "logprobs": self._logprobs(piece.logprobs), "finish_reason": piece.finish_reason}

    def _whole(self, choice: Choice) -> dict[str, Any]:
        reasoning, text = "".join(choice.reasoning), "".join(choice.texts)
        message: dict[str, Any] = {"role": "assistant", "content": None if choice.splitter.thinking else text, "refusal": None}
        message["reasoning_content"] = reasoning or None
        return {"index": choice.index, "message": message, "logprobs": self._logprobs(choice.logprobs), "finish_reason": choice.finish_reason}

    def _logprobs(self, logprobs: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if not self.with_logprobs or not logprobs:
            return None
        tops = lambda one: {"top_logprobs": [self._entry(token, value) for token, value in one.top]}
        return {"content": [self._entry(one.token_id, one.logprob) | tops(one) for one in logprobs], "refusal": None}

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        text, raw = self._token(token_id)
        return {"token": text, "logprob": max(logprob, LOGPROB_MIN), "bytes": list(raw)}


class CompletionForm(Form):
    """`/v1/completions`."""

    prefix, whole_object, chunk_object = "cmpl-", "text_completion", "text_completion"

    def __init__(self, model: str, tokenizer: Tokenizer | None, with_logprobs: bool):
        super().__init__(model, tokenizer, with_logprobs)
        self._offsets: dict[int, int] = {}  # characters of a choice whose logprobs were sent

    def piece(self, choice: Choice, piece: Piece) -> dict[str, Any]:
        return {
            "index": choice.index,
            "text": piece.text,
            "logprobs": self._logprobs(choice.index, piece.logprobs),
            "finish_reason": piece.finish_reason,
        }

    def _whole(self, choice: Choice) -> dict[str, Any]:
        text = "".join(choice.texts)
        return {
            "index": choice.index,
            "text": text,
            "logprobs": self._logprobs(choice.index, choice.logprobs),
            "finish_reason": choice.finish_reason,
        }

    def _logprobs(self, index: int, logprobs: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if not self.with_logprobs or not logprobs:
            return None
        tokens = [self._token(one.token_id)[0] for one in logprobs]
        offsets, at = [], self._offsets.get(index, 0)
        for token in tokens:
            offsets.append(at)
            at += len(token)
        self._offsets[index] = at
        return {
            "tokens": tokens,
            "token_logprobs": [max(one.logprob, LOGPROB_MIN) for one in logprobs],
            "top_logprobs": [{self._token(token)[0]: max(value, LOGPROB_MIN) for token, value in one.top} for one in logprobs],
            "text_offset": offsets,
        }
