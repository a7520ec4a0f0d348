"""The grammar of calls that a model has to make: the format of `tools`, names as declared, arguments valid under the tools' schemas.

Arguments come in the order of the schema, optional ones may be left out, others are not allowed. A string argument is written raw, as the chat
template has it, and keeps its enum, const, pattern and length; everything else is JSON under its own schema.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from glm53.errors import InputError
from glm53.grammar import json_expression, literal, regex_expression
from glm53.serve.tools import CALL_CLOSE, CALL_OPEN, KEY_CLOSE, KEY_OPEN, VALUE_CLOSE, VALUE_OPEN, Tool, resolved, schema_types

VALUES_MAX = 4096  # arguments of all tools, and alternatives of them
LENGTH_MAX = 10_000  # of a bounded string; longer bounds say nothing
ANYTHING = "/(?s:.*)/"
VALUE_END = f"/(?s:.*){VALUE_CLOSE.replace('/', chr(92) + '/')}(?s:.*)/"


def calls_grammar(tools: Sequence[Tool], parallel: bool, reply: str | None = None) -> str:
    """Lark: one call of one of these tools, with `parallel` one or more; with `reply`, an expression, a text of that kind instead is fine too. Raises
    InputError for schemas that are too much."""
    rules = _Rules()
    try:
        each = [rules.call(tool) for tool in tools]
    except RecursionError:
        raise InputError("the tools' schemas are nested too deeply") from None
    start = "call+" if parallel else "call"
    lines = [f"start: {start}" if reply is None else f"start: {start} | reply", f"call: {' | '.join(each)}", *rules.lines]
    return "\n".join(lines if reply is None else [*lines, f"reply: {reply}"]) + "\n"


class _Rules:
    """Lines of a Lark grammar, with names of their own."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._values = 0

    def _rule(self, prefix: str, body: str) -> str:
        name = f"{prefix}{len(self.lines)}"
        self.lines.append(f"{name}: {body}")
        return name

    def _count(self) -> None:
        self._values += 1
        if self._values > VALUES_MAX:
            raise InputError(f"the tools have more than {VALUES_MAX} arguments and alternatives together; next: fewer tools, or simpler ones")

    def call(self, tool: Tool) -> str:
        root = tool.parameters
        schema = resolved(root, root)
        properties = schema.get("properties")
        named: dict[str, Any] = dict(properties) if isinstance(properties, Mapping) else {}
        asked = schema.get("required")
        required = [key for key in asked if isinstance(key, str)] if isinstance(asked, list) else []
        parts = [literal(CALL_OPEN + tool.name)]
        for key in [*named, *(key for key in required if key not in named)]:
            opening = literal(KEY_OPEN + key + KEY_CLOSE + VALUE_OPEN)
            argument = f"{opening} {self._value(named.get(key, {}), root)}"
            parts.append(argument if key in required else f"({argument})?")
        return self._rule("call_", " ".join([*parts, literal(CALL_CLOSE)]))

    def _value(self, schema: object, root: Mapping[str, Any]) -> str:
        """An argument and the tag behind it."""
        self._count()
        if schema_types(schema, root) == {"string"}:
            return self._string(schema, root)
        definitions = {name: root[name] for name in ("$defs", "definitions") if name in root}
        body = {**definitions, **schema} if isinstance(schema, Mapping) else definitions
        return f"{self._rule('json_', json_expression(body))} {literal(VALUE_CLOSE)}"

    def _string(self, given: object, root: Mapping[str, Any]) -> str:
        self._count()
        schema = resolved(given, root)
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(values, list):
            return f"({' | '.join(literal(value + VALUE_CLOSE) for value in values if isinstance(value, str))})"
        for name in ("anyOf", "oneOf"):
            if isinstance(schema.get(name), list):
                return f"({' | '.join(self._string(part, root) for part in schema[name])})"
        limits = [ANYTHING, f"~{VALUE_END}"]
        if isinstance(schema.get("pattern"), str):
            limits.append(_pattern(schema["pattern"]))
        low, high = (schema.get(name) for name in ("minLength", "maxLength"))
        if _is_length(low) or _is_length(high):
            limits.append(f"/(?s:.{{{low if _is_length(low) else 0},{high if _is_length(high) else ''}}})/")
        return self._rule("STRING_", f"( {' & '.join(limits)} ) {literal(VALUE_CLOSE)}")


def _is_length(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= LENGTH_MAX


def _pattern(pattern: str) -> str:
    """A text in which the pattern is found, as JSON schemas mean it."""
    front = "" if pattern.startswith("^") else "(?s:.*)"
    ends = pattern.endswith("$") and not pattern.endswith("\\$")
    body = pattern.removeprefix("^")
    return regex_expression(f"{front}(?:{body[:-1] if ends else body}){'' if ends else '(?s:.*)'}")
