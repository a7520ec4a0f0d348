"""Calls of tools in a model's text, as GLM-4.5 and later write them, to those of the OpenAI API, piece by piece.

    <tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value>...</tool_call>

White space around names, keys and tags does not count. A value is a string where the tool's schema says string alone, and JSON elsewhere; what is no
JSON of a type that the schema knows is a string too.

What is not a call comes back as content: a call of a tool that was not declared, and one that ends within its name. A call whose name has been read
is a call from then on, in a stream as in a whole answer; if its text ends too early, its arguments end there, as cut-off JSON, and the finish reason
is not "tool_calls". String arguments are given on as they come, others once they have ended, or the text has: a value that can be no string is then
cut off where the text is, while one that might be a string or not is left out.
"""

from __future__ import annotations

import enum
import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"
KEY_OPEN, KEY_CLOSE = "<arg_key>", "</arg_key>"
VALUE_OPEN, VALUE_CLOSE = "<arg_value>", "</arg_value>"
NAME_LENGTH_MAX = 256
NAME_ROOM = 2 * NAME_LENGTH_MAX  # characters in which a call's name must end, with the space around it
REFERENCES_MAX = 16  # that follow each other
PARTS_MAX = 200  # of a schema that are looked at for its types
TYPES = frozenset(("string", "integer", "number", "boolean", "null", "object", "array"))


@dataclass(frozen=True)
class Tool:
    """A declared function. parameters: a JSON schema of its arguments, an object."""

    name: str
    parameters: Mapping[str, Any]

    def property(self, key: str) -> object:
        """The schema of an argument; an empty one if nothing is said of it."""
        properties = resolved(self.parameters, self.parameters).get("properties")
        return properties.get(key, {}) if isinstance(properties, Mapping) else {}

    def types(self, key: str) -> frozenset[str]:
        """JSON types that an argument may have."""
        return schema_types(self.property(key), self.parameters)


def resolved(schema: object, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """A schema with its own `$ref` followed; empty for what is none."""
    for _ in range(REFERENCES_MAX):
        if not isinstance(schema, Mapping):
            return {}
        reference = schema.get("$ref")
        if not isinstance(reference, str) or not reference.startswith("#"):
            return schema
        target: Any = root
        for part in reference[1:].split("/")[1:]:
            target = target.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(target, Mapping) else None
        schema = target
    return {}


def schema_types(schema: object, root: Mapping[str, Any], budget: list[int] | None = None) -> frozenset[str]:
    """JSON types that a schema allows, as far as it says so. budget: parts that may be looked at, one number, which goes down."""
    budget = [PARTS_MAX] if budget is None else budget
    budget[0] -= 1
    schema, found = resolved(schema, root), TYPES
    said = schema.get("type")
    if isinstance(said, str):
        found &= {said}
    elif isinstance(said, list):
        found &= {one for one in said if isinstance(one, str)}
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        found &= {name for value in values for name in types_of(value)}
    for name in ("anyOf", "oneOf", "allOf"):
        parts = schema.get(name)
        if isinstance(parts, list) and parts and budget[0] > 0:
            each = [schema_types(part, root, budget) for part in parts]
            found &= frozenset.intersection(*each) if name == "allOf" else frozenset.union(*each)
    return found


def types_of(value: object) -> frozenset[str]:
    """Names of the JSON types that a value belongs to."""
    if isinstance(value, bool):
        return frozenset(("boolean",))
    if isinstance(value, (int, float)):
        return frozenset(("integer", "number")) if isinstance(value, int) or value.is_integer() else frozenset(("number",))
    names = {str: "string", type(None): "null", dict: "object", list: "array"}
    return frozenset((names[type(value)],))


def value_json(text: str, types: frozenset[str]) -> str:
    """The JSON text of an argument that the model wrote as `text` and that may have these types."""
    if types != {"string"}:
        try:
            value = json.loads(text)
            if "string" not in types or types_of(value) & types:
                return json.dumps(value, ensure_ascii=False, allow_nan=False)
        except (ValueError, RecursionError):
            pass
    return json.dumps(text, ensure_ascii=False)


@dataclass(frozen=True)
class CallPart:
    """What a piece of text adds to the index-th call: its id and name, once and first, or more of its arguments' JSON text."""

    index: int
    call_id: str | None
    name: str | None
    arguments: str


class _State(enum.Enum):
    TEXT = "outside of calls"
    NAME = "behind <tool_call>"
    CALL = "between two arguments"
    KEY = "behind <arg_key>"
    GAP = "between a key and its value"
    STRING = "in a value that is given on as it comes"
    VALUE = "in a value that is read as a whole"


class ToolParser:
    """Splits a text, given in pieces of any size, into content and calls; all of it is the same for every way to cut the text.

    parallel: else only the first call counts, and others are left out. complete: calls that have ended as they should.
    """

    def __init__(self, tools: Sequence[Tool], parallel: bool = True):
        self._tools = {tool.name: tool for tool in tools}
        self._parallel = parallel
        self._state = _State.TEXT
        self._held = ""  # not used yet
        self._space = ""  # white space in front of a call, which is content only if that is no call
        self._content: list[str] = []
        self._parts: list[CallPart] = []
        self._count = 0
        self._tool: Tool | None = None
        self._keys: set[str] = set()  # of the call
        self._key: str | None = None  # of the value; None: it is not to be given on
        self.complete = 0

    @property
    def inside(self) -> bool:
        """Whether the text has ended within a call that counts, so far."""
        return self._state not in (_State.TEXT, _State.NAME) and (self._parallel or self._count == 1)

    def push(self, text: str) -> tuple[str, list[CallPart]]:
        """What is certain with this piece: content, and parts of calls."""
        self._held += text
        steps = {
            _State.TEXT: self._text,
            _State.NAME: self._name,
            _State.CALL: self._call,
            _State.KEY: self._read_key,
            _State.GAP: self._gap,
            _State.STRING: self._string,
            _State.VALUE: self._value,
        }
        while steps[self._state]():
            pass
        return self._take()

    def finish(self) -> tuple[str, list[CallPart]]:
        """What was held back, at the end of the text."""
        if self._state is _State.NAME:
            self._content.append(self._space + CALL_OPEN + self._held)
        elif self._state is _State.TEXT and (self._held.strip() or not self._count):
            self._content.append(self._held)
        elif self._state is _State.VALUE and self._key is not None and self._tool is not None and "string" not in self._tool.types(self._key):
            self._argue(self._held[: len(self._held) - _overlap(self._held, VALUE_CLOSE)].strip())
        self._held = ""
        return self._take()

    def _take(self) -> tuple[str, list[CallPart]]:
        content, parts = "".join(self._content), self._parts
        self._content, self._parts = [], []
        return content, parts

    # One step of each state: whether there may be another one.

    def _text(self) -> bool:
        at = self._held.find(CALL_OPEN)
        if at >= 0:
            text, self._held = self._held[:at], self._held[at + len(CALL_OPEN) :]
            self._content.append(text.rstrip())
            self._space, self._state = text[len(text.rstrip()) :], _State.NAME
            return True
        free = self._held[: len(self._held) - _overlap(self._held, CALL_OPEN)].rstrip()
        self._content.append(free)
        self._held = self._held[len(free) :]
        return False

    def _name(self) -> bool:
        at, _ = _first(self._held, (KEY_OPEN, CALL_CLOSE))
        name = self._held[:at].strip() if at >= 0 else ""
        end = at if at >= 0 else len(self._held) - max(_overlap(self._held, one) for one in (KEY_OPEN, CALL_CLOSE))
        if end > NAME_ROOM or (at >= 0 and name not in self._tools):
            self._content.append(self._space + CALL_OPEN)
            self._state = _State.TEXT
            return True
        if at < 0:
            return False
        self._held, self._tool, self._keys = self._held[at:], self._tools[name], set()
        self._count += 1
        self._state = _State.CALL
        self._add(CallPart(self._count - 1, f"call_{uuid.uuid4().hex[:24]}", name, ""))
        return True

    def _call(self) -> bool:
        tag = self._skip_to((KEY_OPEN, CALL_CLOSE, CALL_OPEN))
        if tag is None:
            return False
        self._state = _State.KEY
        if tag != KEY_OPEN:
            self._end_call(tag)
        return True

    def _end_call(self, tag: str) -> None:
        self._argue("}" if self._keys else "{}")
        self.complete += 1
        self._state, self._space = _State.TEXT if tag == CALL_CLOSE else _State.NAME, ""

    def _read_key(self) -> bool:
        at, tag = _first(self._held, (KEY_CLOSE, CALL_CLOSE))
        if at < 0:
            return False
        self._key = self._held[:at].strip()
        self._held, self._state = self._held[at + len(tag) :], _State.GAP
        if tag == CALL_CLOSE:
            self._end_call(tag)
        return True

    def _gap(self) -> bool:
        tag = self._skip_to((VALUE_OPEN, KEY_OPEN, CALL_CLOSE))
        if tag is None:
            return False
        if tag == KEY_OPEN:
            self._state = _State.KEY
        elif tag == CALL_CLOSE:
            self._end_call(tag)
        else:
            self._open_value()
        return True

    def _open_value(self) -> None:
        assert self._tool is not None and self._key is not None
        self._state = _State.VALUE
        if self._key in self._keys:  # JSON objects name a key once
            self._key = None
            return
        opening = ", " if self._keys else "{"
        self._keys.add(self._key)
        self._argue(opening + json.dumps(self._key, ensure_ascii=False) + ": ")
        if self._tool.types(self._key) == {"string"}:
            self._state = _State.STRING
            self._argue('"')

    def _string(self) -> bool:
        at = self._held.find(VALUE_CLOSE)
        end = at if at >= 0 else len(self._held) - _overlap(self._held, VALUE_CLOSE)
        self._argue(json.dumps(self._held[:end], ensure_ascii=False)[1:-1])
        self._held = self._held[end:]
        if at < 0:
            return False
        self._argue('"')
        self._held, self._state = self._held[len(VALUE_CLOSE) :], _State.CALL
        return True

    def _value(self) -> bool:
        at = self._held.find(VALUE_CLOSE)
        if at < 0:
            return False
        if self._key is not None:
            assert self._tool is not None
            self._argue(value_json(self._held[:at], self._tool.types(self._key)))
        self._held, self._state = self._held[at + len(VALUE_CLOSE) :], _State.CALL
        return True

    def _skip_to(self, tags: tuple[str, ...]) -> str | None:
        """Drops the text up to and with the first of these tags."""
        at, tag = _first(self._held, tags)
        if at >= 0:
            self._held = self._held[at + len(tag) :]
            return tag
        self._held = self._held[len(self._held) - max(_overlap(self._held, one) for one in tags) :]
        return None

    def _argue(self, arguments: str) -> None:
        if arguments:
            self._add(CallPart(self._count - 1, None, None, arguments))

    def _add(self, part: CallPart) -> None:
        if part.index == 0 or self._parallel:
            self._parts.append(part)


def _first(text: str, tags: Sequence[str]) -> tuple[int, str]:
    """Where the first of these tags begins, and which one; -1 if none is there."""
    return min(((at, tag) for tag in tags if (at := text.find(tag)) >= 0), default=(-1, ""))


def _overlap(text: str, tag: str) -> int:
    """Characters at the end of `text` that begin `tag`, not all of it."""
    return next((n for n in range(min(len(text), len(tag) - 1), 0, -1) if text.endswith(tag[:n])), 0)
