"""Texts that must follow a grammar: JSON schemas, expressions and Lark grammars to the mask of each next token. Through llguidance (extra `serve`).

A grammar is a text in llguidance's Lark dialect; JSON schemas and regular expressions become expressions of it. Compiling is bounded by llguidance's
limits and may take 0.1 s, so it does not belong on an event loop. Knows no model and no device.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from glm53.errors import InputError
from glm53.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

GRAMMAR_LENGTH_MAX = 1 << 18  # characters
KEPT_GRAMMARS = 32  # compiled, for requests that follow each other
WHITESPACE = r"(\x20|\x0A[\x20\x09]{0,24})?"  # between the parts of a JSON text; bounded, or a model may write nothing else


def json_expression(schema: Mapping[str, Any]) -> str:
    """A JSON text that is valid under the schema. Raises InputError if it is nested too deeply."""
    try:
        return "%json " + json.dumps({**schema, "x-guidance": {"whitespace_pattern": WHITESPACE}})
    except RecursionError:
        raise InputError("the schema is nested too deeply") from None


def regex_expression(regex: str) -> str:
    """A text that the regular expression (Rust's syntax, no look-around) matches as a whole. Raises InputError if it is not Unicode."""
    from llguidance import regex_to_lark

    _check_unicode(regex)
    return f"/{regex_to_lark(regex, 'd')}/"


def literal(text: str) -> str:
    """Just this text."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")  # which Lark's texts do not hold


def lark_of(grammar: str) -> str:
    """A Lark grammar from one in Lark or in llama.cpp's GBNF. Raises InputError."""
    from llguidance.gbnf_to_lark import any_to_lark

    _check_length(grammar)
    try:
        return any_to_lark(grammar)
    except Exception as error:  # the converter raises its own kinds, and others for texts it does not expect
        raise InputError(f"the grammar is neither Lark nor GBNF: {error}") from None


class Grammars:
    """Constraints for the texts of one model. From any thread. eos_token_ids: of them one may follow where the grammar is complete."""

    def __init__(self, tokenizer: Tokenizer, vocab: int, eos_token_ids: Sequence[int]):
        self._tokenizer, self.vocab, self.eos_token_ids = tokenizer, vocab, tuple(eos_token_ids)
        self._lock = threading.Lock()
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._free: dict[str, list[np.ndarray]] = {}  # by mark

    def constraint(self, grammar: str, after: str | None = None) -> GrammarConstraint:
        """What a text in this grammar (Lark) may be; with `after`, the text up to and with that mark is free. Raises InputError for a grammar that is
        wrong, not supported, or too large."""
        _check_length(grammar)
        _check_unicode(grammar)
        with self._lock:
            matcher = self._compiled.get(grammar) or self._compile(grammar)
            self._compiled[grammar] = matcher
            self._compiled.move_to_end(grammar)
            if len(self._compiled) > KEPT_GRAMMARS:
                self._compiled.popitem(last=False)
            if after is not None and after not in self._free:
                self._free[after] = self._free_masks(after)
            own = matcher.deep_copy()
        return GrammarConstraint(own, self._tokenizer, self.vocab, None if after is None else _FreeText(after.encode(), self._free[after]))

    def _compile(self, grammar: str) -> LLMatcher:
        import llguidance

        text = llguidance.LLMatcher.grammar_from_lark(grammar)
        matcher = llguidance.LLMatcher(self._tokens, text, log_level=0, limits=llguidance.LLParserLimits(verbose_errors=False))
        if matcher.is_error():
            raise InputError(f"the grammar or schema is not supported: {_short(matcher.get_error())}")
        _next_mask(matcher.deep_copy())  # refused now, not behind a thinking that goes first
        return matcher

    @cached_property
    def _tokens(self) -> LLTokenizer:
        import llguidance

        eos = [token for token in self.eos_token_ids if token < self.vocab]
        if not eos:
            raise InputError("this model has no end-of-sequence token, which constrained texts need")
        wrapper = llguidance.TokenizerWrapper(_Tokens(self._tokenizer, self.vocab, eos[0]))
        return llguidance.LLTokenizer(wrapper, n_vocab=self.vocab, eos_token=eos)

    def _free_masks(self, mark: str) -> list[np.ndarray]:
        """Masks of the free text by how much of the mark its end may be: no end-of-sequence token, and none that goes on behind the mark, whose end
        would be outside the grammar."""
        wanted = mark.encode()
        allowed = np.ones((len(wanted), 32 * -(-self.vocab // 32)), bool)
        allowed[:, [token for token in self.eos_token_ids if token < self.vocab]] = False
        last = wanted[-1:]
        for token in range(self.vocab):
            data = self._tokenizer.token_bytes(token)
            if last not in data[:-1]:
                continue
            for done in range(len(wanted)):
                if wanted in (wanted[:done] + data)[:-1]:
                    allowed[done, token] = False
        return list(np.packbits(allowed, axis=1, bitorder="little").view(np.uint32))


class GrammarConstraint:
    """The `Constraint` of one request: where its text stands in the grammar. Not for two threads at once."""

    def __init__(self, matcher: LLMatcher, tokenizer: Tokenizer, vocab: int, free: _FreeText | None):
        self._matcher, self._tokenizer, self._free = matcher, tokenizer, free
        self._words = -(-vocab // 32)
        self._mask = self._next() if free is None else free.mask

    @property
    def mask(self) -> np.ndarray:
        """[ceil(vocab / 32)] u32: the tokens that may be next."""
        return self._mask

    def accept(self, token_id: int) -> bool:
        """Takes a token in; True if the text is complete and nothing may follow. Raises InputError where llguidance's limits are met."""
        if self._free is not None:
            self._mask = self._free.push(self._tokenizer.token_bytes(token_id))
            if self._free.closed:
                self._free, self._mask = None, self._next()
            return False
        if not self._matcher.consume_token(token_id):
            raise InputError(f"the text cannot be held in its grammar: {_short(self._matcher.get_error())}")
        if self._matcher.is_stopped() and not self._matcher.is_error():
            return True
        self._mask = self._next()
        return False

    def _next(self) -> np.ndarray:
        bits = _next_mask(self._matcher)
        return np.frombuffer(bits.ljust(4 * self._words, b"\0")[: 4 * self._words], np.uint32)


class _FreeText:
    """Text before a mark, and how much of the mark its end is."""

    def __init__(self, mark: bytes, masks: Sequence[np.ndarray]):
        self._mark, self._masks, self._end = mark, masks, b""
        self.closed = False

    @property
    def mask(self) -> np.ndarray:
        return self._masks[len(self._end)]

    def push(self, data: bytes) -> np.ndarray:
        text = self._end + data
        self.closed = text.endswith(self._mark)
        most = min(len(text), len(self._mark) - 1)
        self._end = b"" if self.closed else self._mark[: next((n for n in range(most, 0, -1) if text.endswith(self._mark[:n])), 0)]
        return self.mask


class _Tokens:
    """A tokenizer as llguidance wants it."""

    def __init__(self, tokenizer: Tokenizer, vocab: int, eos_token_id: int):
        self._tokenizer = tokenizer
        self.eos_token_id, self.bos_token_id = eos_token_id, None
        self.tokens = [tokenizer.token_bytes(token) for token in range(vocab)]
        self.special_token_ids = sorted(token for token in tokenizer.special_ids if token < vocab)

    def __call__(self, text: bytes | str) -> list[int]:
        return self._tokenizer.encode(text.decode("utf-8") if isinstance(text, bytes) else text)


def _check_length(grammar: str) -> None:
    if len(grammar) > GRAMMAR_LENGTH_MAX:
        raise InputError(f"the grammar has {len(grammar)} characters, at most {GRAMMAR_LENGTH_MAX} are taken; next: a smaller grammar or schema")


def _check_unicode(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InputError(f"the grammar is not valid Unicode: lone surrogate at character {error.start}") from None


def _next_mask(matcher: LLMatcher) -> bytes:
    """The bits of the tokens that may be next. Raises InputError where there are none, or it is too much to find them."""
    bits = matcher.compute_bitmask()
    if matcher.is_error():
        error = _short(matcher.get_error())
        reason = "no text can be complete under it, or it refers to itself without end" if error == "NoExtensionBias" else error
        raise InputError(f"the grammar or schema is too complex: {reason}; next: a simpler one")
    return bits


def _short(error: str) -> str:
    """llguidance's message without what it shows of the text that we made for it."""
    said = re.split(r"\n\s*\d+ \| ", error)[0].replace("<non-verbose/>", "")
    said = re.sub(r'^(at \d+\(\d+\): failed to compile JSON schema: |at 1\(8\): |failed to parse "%json": )', "", said.strip())
    return " ".join(said.split())[:600]
