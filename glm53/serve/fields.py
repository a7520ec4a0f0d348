"""Reading of request bodies: JSON of any shape to checked values, with errors as the OpenAI API words them. Knows no engine."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

IGNORED_MAX = 256  # names of ignored fields that are remembered
log = logging.getLogger("glm53.serve")
_ignored: set[str] = set()


class ApiError(Exception):
    """An answer other than success, in OpenAI's shape. param: the field at fault; retry_after_s: goes into the header Retry-After."""

    def __init__(self, message: str, status: int = 400, param: str | None = None, code: str | None = None, retry_after_s: int | None = None):
        super().__init__(message)
        self.message, self.status, self.param, self.code, self.retry_after_s = message, status, param, code, retry_after_s

    @property
    def kind(self) -> str:
        """The API's error type of the status."""
        named = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
        return named.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")

    def body(self) -> dict[str, Any]:
        """The object that the API sends."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


def parse_object(raw: bytes) -> dict[str, Any]:
    """A body as a JSON object. Raises ApiError 400 for what is none."""
    try:
        value = json.loads(raw.decode("utf-8"), parse_constant=_refuse_constant)
    except RecursionError:
        raise ApiError("the body is nested too deeply") from None
    except ValueError as error:  # UnicodeDecodeError and numbers of too many digits among them
        raise ApiError(f"the body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ApiError(f"the body is {_shown(value)}, wanted a JSON object")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _shown(value: object) -> str:
    """A value in a message, cut short."""
    try:
        text = json.dumps(value)
    except (RecursionError, ValueError):
        text = type(value).__name__
    return text if len(text) <= 80 else text[:77] + "..."


@dataclass(frozen=True)
class Span:
    """The numbers that a field may be. whole: integers alone; low_open: `low` itself not."""

    low: float
    high: float
    whole: bool = False
    low_open: bool = False

    def schema(self) -> dict[str, Any]:
        """In JSON Schema."""
        return {"type": "integer" if self.whole else "number", "exclusiveMinimum" if self.low_open else "minimum": self.low, "maximum": self.high}


class _Read(dict[str, Any]):
    """An object that remembers which of its values were asked for."""

    def __init__(self, values: Mapping[str, Any]):
        super().__init__(values)
        self.names: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        self.names.add(name)
        return super().get(name, default)


def whole(value: object) -> int | None:
    """An integer as JSON writes it, 3 or 3.0; None for anything else."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


class Fields:
    """Values of an object by name. null counts as absent. path: of the object in the body, for messages."""

    def __init__(self, values: Mapping[str, Any], path: str = ""):
        self.values, self.path = _Read(values), path

    @property
    def names(self) -> frozenset[str]:
        """What was asked for so far, whether it was there or not."""
        return frozenset(self.values.names)

    def note_ignored(self) -> None:
        """Says in the log, once a name, which fields are here that nothing has asked for: they change nothing."""
        for name in self.values.keys() - self.values.names - _ignored:
            if len(_ignored) < IGNORED_MAX:
                _ignored.add(name)
                log.debug("the body's field %.100r is none that this server knows; it is ignored", name)

    def has(self, name: str) -> bool:
        return self.values.get(name) is not None

    def wrong(self, name: str, wanted: str) -> ApiError:
        """The error for a value that is not what it must be."""
        return ApiError(f"{self.path}{name}: got {_shown(self.values.get(name))}, wanted {wanted}", param=self.path + name)

    def text(self, name: str) -> str | None:
        value = self.values.get(name)
        if value is not None and not isinstance(value, str):
            raise self.wrong(name, "a string")
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return value

    def integer(self, name: str, low: int, high: int) -> int | None:
        value = self.values.get(name)
        number = whole(value)
        if value is not None and (number is None or not low <= number <= high):
            raise self.wrong(name, f"an integer from {low} to {high}")
        return number

    def spanned(self, name: str, span: Span) -> float | None:
        """A number of a span."""
        if span.whole:
            return self.integer(name, int(span.low), int(span.high))
        return self.number(name, span.low, span.high, span.low_open)

    def number(self, name: str, low: float, high: float, low_open: bool = False) -> float | None:
        value = self.values.get(name)
        if value is None:
            return None
        fits = isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high and not (low_open and value == low)
        if not fits or not math.isfinite(value):
            raise self.wrong(name, f"a number {'above' if low_open else 'from'} {low:g} to {high:g}")
        return float(value)

    def inner(self, name: str) -> Fields:
        value = self.values.get(name)
        if value is not None and not isinstance(value, dict):
            raise self.wrong(name, "an object")
        return Fields(value or {}, f"{self.path}{name}.")

    def several(self, name: str, kind: type, wanted: str, most: int) -> Sequence[Any]:
        """A list of values of one type; empty if absent."""
        value = self.values.get(name)
        if value is None:
            return ()
        if not isinstance(value, list) or len(value) > most or any(not isinstance(one, kind) or isinstance(one, bool) for one in value):
            raise self.wrong(name, wanted)
        return value

    def integers(self, name: str, wanted: str, most: int) -> list[int]:
        """A list of integers; empty if absent."""
        value = self.values.get(name)
        numbers = [] if value is None else [whole(one) for one in value] if isinstance(value, list) and len(value) <= most else [None]
        if None in numbers:
            raise self.wrong(name, wanted)
        return [number for number in numbers if number is not None]

    def refuse(self, name: str, why: str, harmless: Sequence[object] = ()) -> None:
        """Raises ApiError if a field that is not supported asks for something; `harmless`: values that ask for nothing."""
        value = self.values.get(name)
        if value is not None and not any(type(value) is type(one) and value == one for one in harmless):
            raise ApiError(f"{self.path}{name} is not supported: {why}", param=self.path + name, code="unsupported_parameter")
