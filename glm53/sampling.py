"""How the next token is drawn: `SamplingParams`, checked when it is made."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from glm53.errors import InputError

LOGPROBS_MAX = 20


@dataclass(frozen=True)
class SamplingParams:
    """Settings of one request. Names and meanings are those of vLLM and of the OpenAI API.

    Order of the filters: repetition penalty, temperature, top-k, top-p, min-p. Ties go to the lowest token id. The draw depends on nothing but
    the logits, `seed` and the position of the token, so a request gives the same text whatever else runs.

    Raises InputError naming the field, the value and the range.
    """

    temperature: float = 1.0  # 0: greedy, the most probable token
    top_p: float = 1.0  # (0, 1]; smallest set of most probable tokens with at least this mass
    top_k: int = 0  # 0: off
    min_p: float = 0.0  # [0, 1]; drop tokens less probable than min_p times the most probable
    repetition_penalty: float = 1.0  # > 0; 1: off; divides positive, multiplies negative logits of tokens in the prompt or output
    seed: int | None = None  # 0 .. 2^64 - 1; None: a fresh one, reported in the result
    max_tokens: int = 256  # at most this many new tokens
    stop: tuple[str, ...] = ()  # the text ends before the first of these strings
    stop_token_ids: tuple[int, ...] = ()  # ends the text like an end-of-sequence token
    ignore_eos: bool = False
    logprobs: int | None = None  # None: off; n: log-probability of each token and of the n most probable, n <= 20

    def __post_init__(self) -> None:
        for field in fields(self):  # NaN and infinity pass no range check below
            value = getattr(self, field.name)
            if field.type == "float" and (isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value)):
                raise InputError(f"{field.name}: got {value!r}, wanted a finite number")
            if field.type in ("int", "int | None") and value is not None and (isinstance(value, bool) or not isinstance(value, int)):
                raise InputError(f"{field.name}: got {value!r}, wanted an integer")
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name in ("stop", "stop_token_ids"):
            if not isinstance(getattr(self, name), (list, tuple)):
                raise InputError(f"{name}: got {getattr(self, name)!r}, wanted a list or tuple")
            object.__setattr__(self, name, tuple(getattr(self, name)))
        self._range("ignore_eos", isinstance(self.ignore_eos, bool), "True or False")
        self._range("temperature", self.temperature >= 0, ">= 0 (0 is greedy)")
        self._range("top_p", 0 < self.top_p <= 1, "in (0, 1]")
        self._range("top_k", 0 <= self.top_k < 2**31, ">= 0 (0 is off)")
        self._range("min_p", 0 <= self.min_p <= 1, "in [0, 1]")
        self._range("repetition_penalty", self.repetition_penalty > 0, "> 0 (1 is off)")
        self._range("seed", self.seed is None or 0 <= self.seed < 2**64, "in [0, 2^64)")
        self._range("max_tokens", self.max_tokens >= 1, ">= 1")
        self._range("logprobs", self.logprobs is None or 0 <= self.logprobs <= LOGPROBS_MAX, f"in [0, {LOGPROBS_MAX}] or None")
        self._range("stop", all(isinstance(s, str) and s for s in self.stop), "non-empty strings")
        self._range("stop_token_ids", all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in self.stop_token_ids), "token ids >= 0")

    def _range(self, name: str, holds: bool, wanted: str) -> None:
        if not holds:
            raise InputError(f"{name}: got {getattr(self, name)!r}, wanted {wanted}")

    @property
    def penalises(self) -> bool:
        return self.repetition_penalty != 1.0
