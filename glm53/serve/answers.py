"""The objects that the API sends: whole answers, and chunks of a stream. Knows neither engine nor HTTP."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from glm53.request import Chunk, TokenLogprob
from glm53.serve.reasoning import Splitter
from glm53.serve.tools import CallPart, ToolParser
from glm53.tokenizer import StreamDecoder, Tokenizer

LOGPROB_MIN = -9999.0  # JSON has no infinity; the value that vLLM sends


@dataclass
class Piece:
    """What one chunk adds to a choice."""

    reasoning: str
    text: str
    calls: list[CallPart]
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: str | None

    @property
    def silent(self) -> bool:
        """Whether it says nothing."""
        return not (self.reasoning or self.text or self.calls or self.logprobs or self.finish_reason)


@dataclass
class Choice:
    """One of the texts of an answer, as far as it has come. parser: finds calls of tools in it; logprobs: of the tokens behind the thinking."""

    index: int
    splitter: Splitter
    parser: ToolParser | None = None
    reasoning: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    calls: list[CallPart] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    tokens: int = 0
    reasoning_tokens: int = 0
    reused_rows: int = 0
    finish_reason: str | None = None

    def add(self, chunk: Chunk) -> Piece:
        """Takes a chunk in."""
        thinking, reason = self.splitter.thinking, chunk.finish_reason
        end_token = reason == "stop" and not chunk.token_ids
        self.tokens += len(chunk.token_ids) + end_token
        self.reasoning_tokens += len(chunk.token_ids) if thinking else 0
        reasoning, text = self.splitter.push(chunk.text)
        if reason is not None:
            reasoning += self.splitter.finish()
        calls: list[CallPart] = []
        if self.parser is not None:
            text, calls = self.parser.push(text)
            if reason is not None:
                last, parts = self.parser.finish()
                text, calls = text + last, calls + parts
                if reason == "stop" and self.parser.complete and not self.parser.inside:
                    reason = "tool_calls"
        logprobs = () if thinking else chunk.logprobs
        self.reasoning.append(reasoning)
        self.texts.append(text)
        self.calls += calls
        self.logprobs += logprobs
        self.finish_reason = reason
        return Piece(reasoning, text, calls, logprobs, reason)


def usage(prompt_tokens: int, cached_tokens: int, choices: Sequence[Choice]) -> dict[str, Any]:
    """Tokens read and drawn, an end-of-sequence token among them."""
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

    def piece(self, choice: Choice, piece: Piece) -> list[dict[str, Any]]:
        """A piece of a choice in a stream: one after the other."""
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

    def piece(self, choice: Choice, piece: Piece) -> list[dict[str, Any]]:
        delta: dict[str, Any] = {name: text for name, text in (("reasoning_content", piece.reasoning), ("content", piece.text)) if text}
        deltas = [delta] if delta or not piece.calls else []
        deltas += [{"tool_calls": [_call_delta(part)]} for part in piece.calls]
        said: list[dict[str, Any]] = [{"index": choice.index, "delta": one, "logprobs": None, "finish_reason": None} for one in deltas]
        said[0]["logprobs"], said[-1]["finish_reason"] = self._logprobs(piece.logprobs), piece.finish_reason
        return said

    def _whole(self, choice: Choice) -> dict[str, Any]:
        reasoning, text = "".join(choice.reasoning), "".join(choice.texts)
        silent = choice.splitter.thinking or (choice.calls and not text)
        message: dict[str, Any] = {"role": "assistant", "content": None if silent else text, "refusal": None}
        message["reasoning_content"] = reasoning or None
        if choice.calls:
            message["tool_calls"] = _calls(choice.calls)
        return {"index": choice.index, "message": message, "logprobs": self._logprobs(choice.logprobs), "finish_reason": choice.finish_reason}

    def _logprobs(self, logprobs: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if not self.with_logprobs or not logprobs:
            return None
        tops = lambda one: {"top_logprobs": [self._entry(token, value) for token, value in one.top]}
        return {"content": [self._entry(one.token_id, one.logprob) | tops(one) for one in logprobs], "refusal": None}

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        text, raw = self._token(token_id)
        return {"token": text, "logprob": max(logprob, LOGPROB_MIN), "bytes": list(raw)}


def _call_delta(part: CallPart) -> dict[str, Any]:
    if part.name is None:
        return {"index": part.index, "function": {"arguments": part.arguments}}
    return {"index": part.index, "id": part.call_id, "type": "function", "function": {"name": part.name, "arguments": ""}}


def _calls(parts: Sequence[CallPart]) -> list[dict[str, Any]]:
    """Whole calls of their parts."""
    calls: list[dict[str, Any]] = []
    for part in parts:
        if part.name is not None:
            calls.append({"id": part.call_id, "type": "function", "function": {"name": part.name, "arguments": ""}})
        calls[part.index]["function"]["arguments"] += part.arguments
    return calls


class CompletionForm(Form):
    """`/v1/completions`."""

    prefix, whole_object, chunk_object = "cmpl-", "text_completion", "text_completion"

    def __init__(self, model: str, tokenizer: Tokenizer | None, with_logprobs: bool):
        super().__init__(model, tokenizer, with_logprobs)
        self._read: dict[int, tuple[StreamDecoder | None, int]] = {}  # of each choice: its bytes so far, and their characters

    def piece(self, choice: Choice, piece: Piece) -> list[dict[str, Any]]:
        logprobs = self._logprobs(choice.index, piece.logprobs)
        return [{"index": choice.index, "text": piece.text, "logprobs": logprobs, "finish_reason": piece.finish_reason}]

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
        return {
            "tokens": [self._name(one.token_id) for one in logprobs],
            "token_logprobs": [max(one.logprob, LOGPROB_MIN) for one in logprobs],
            "top_logprobs": [self._top(one) for one in logprobs],
            "text_offset": self._text_offsets(index, logprobs),
        }

    def _name(self, token_id: int) -> str:
        """A token's text; its bytes as OpenAI and vLLM write them, `bytes:\\xe2\\x80`, where they are no text."""
        text, raw = self._token(token_id)
        return text if text.encode("utf-8") == raw else "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def _top(self, one: TokenLogprob) -> dict[str, float]:
        """The most probable tokens, and the drawn one; of two with one name the drawn or the more probable."""
        top = {self._name(token): max(value, LOGPROB_MIN) for token, value in reversed(one.top)}
        return dict(reversed(top.items())) | {self._name(one.token_id): max(one.logprob, LOGPROB_MIN)}

    def _text_offsets(self, index: int, logprobs: Sequence[TokenLogprob]) -> list[int]:
        """Where in the text each token begins; a token within a character, where that one does."""
        fresh = None if self.tokenizer is None else StreamDecoder(self.tokenizer)
        decoder, at = self._read.get(index, (fresh, 0))
        offsets = []
        for one in logprobs:
            offsets.append(at)
            at += 0 if decoder is None else len(decoder.push(one.token_id))
        self._read[index] = decoder, at
        return offsets
