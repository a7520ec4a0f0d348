"""The grammar of calls that a model has to make: the format of `tools`, names as declared, arguments valid under the tools' schemas.

Arguments come in the order of the schema, optional ones may be left out, others are not allowed. A string argument is written raw, as the chat
template has it, and keeps its enum, const, pattern and length, while `format` says nothing; everything else is JSON under its own schema. Keywords
that this does not express are refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from glm53.errors import InputError
from glm53.grammar import json_expression, literal, regex_expression
from glm53.serve.tools import CALL_CLOSE, CALL_OPEN, KEY_CLOSE, KEY_OPEN, VALUE_CLOSE, VALUE_OPEN, Tool, resolved, schema_types

VALUES_MAX = 4096  # arguments of all tools, and alternatives of them
LENGTH_MAX = 10_000  # of a bounded string; longer bounds say nothing
# Keywords of JSON Schema that say something of an object or a string and are not expressed here, with values of them that say nothing.
TOP_REFUSED: dict[str, tuple[object, ...]] = {
    **dict.fromkeys(("allOf", "anyOf", "oneOf", "not", "if", "const", "enum", "$dynamicRef", "$recursiveRef", "propertyNames"), ()),
    **{name: ({},) for name in ("dependentRequired", "dependentSchemas", "dependencies", "patternProperties")},
}
STRING_REFUSED = ("allOf", "not", "if", "$dynamicRef", "$recursiveRef")
STRING_LIMITS = ("pattern", "minLength", "maxLength")
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
        named, required = arguments_of(tool)
        parts = [literal(CALL_OPEN + tool.name)]
        for key, schema in named.items():
            opening = literal(KEY_OPEN + key + KEY_CLOSE + VALUE_OPEN)
            try:
                argument = f"{opening} {self._value(schema, root)}"
            except NotExpressed as error:
                raise InputError(f"the argument {key[:200]!r} of the tool {tool.name!r}: {error}") from None
            parts.append(argument if key in required else f"({argument})?")
        return self._rule("call_", " ".join([*parts, literal(CALL_CLOSE)]))

    def _value(self, schema: object, root: Mapping[str, Any]) -> str:
        """An argument and the tag behind it."""
        self._count()
        if schema_types(schema, root) == {"string"}:
            return self._string(schema, root)
        definitions = {name: root[name] for name in ("$defs", "definitions") if name in root}
        body = {**schema, **definitions} if isinstance(schema, Mapping) else definitions
        outside = next((one for one in _references(body) if not one.startswith(("#/$defs/", "#/definitions/"))), None)
        if outside is not None:
            raise NotExpressed(f"$ref {outside[:200]!r} is not supported in a call that must be made, wanted one into $defs")
        return f"{self._rule('json_', json_expression(body))} {literal(VALUE_CLOSE)}"

    def _string(self, given: object, root: Mapping[str, Any]) -> str:
        self._count()
        schema = resolved(given, root)
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        several = [name for name in ("allOf", "anyOf", "oneOf") if isinstance(schema.get(name), list)]
        single = [name for name in several if len(schema[name]) == 1]
        refused = [name for name in STRING_REFUSED if name in schema and name not in single]
        beside = [name for name in STRING_LIMITS if name in schema] + [name for name in several if name not in refused]
        if isinstance(values, list) and not refused and not beside:
            return f"({' | '.join(literal(value + VALUE_CLOSE) for value in values if isinstance(value, str))})"
        if several == beside and len(several) == 1 and not refused and values is None:
            if several[0] == "oneOf" and not single and not _disjoint(schema["oneOf"], root):
                raise NotExpressed("oneOf of texts is not supported in a call that must be made, but for const and enum without a text twice")
            return f"({' | '.join(self._string(part, root) for part in schema[several[0]])})"
        wrong = refused or (several and beside) or (beside if isinstance(values, list) else [])
        if wrong:
            with_others = "" if refused else " beside other keywords"
            raise NotExpressed(f"{wrong[0]}{with_others} is not supported for texts in a call that must be made")
        limits = [ANYTHING, f"~{VALUE_END}"]
        if isinstance(schema.get("pattern"), str):
            limits.append(_pattern(schema["pattern"]))
        low, high = (schema.get(name) for name in ("minLength", "maxLength"))
        if _is_length(low) or _is_length(high):
            limits.append(f"/(?s:.{{{low if _is_length(low) else 0},{high if _is_length(high) else ''}}})/")
        return self._rule("STRING_", f"( {' & '.join(limits)} ) {literal(VALUE_CLOSE)}")


class NotExpressed(InputError):
    """A schema asks for what the grammar does not say."""


def arguments_of(tool: Tool) -> tuple[dict[str, Any], list[str]]:
    """Schemas of the arguments that a call may have, and names of those that it must have. Raises InputError for a schema that says more."""
    schema, required = _top(tool)
    given, others = schema.get("properties", {}), schema.get("additionalProperties", True)
    if not isinstance(given, Mapping):
        raise _not_expressed(tool, "properties", "wanted an object")
    never = [key for key, one in given.items() if one is False]
    named = {key: one for key, one in given.items() if one is not False}
    for key in required:
        if key in never or (key not in named and (others is False or schema.get("unevaluatedProperties") is False)):
            raise _not_expressed(tool, "required", f"it names {key[:200]!r}, which may not be there")
        named.setdefault(key, others)
    for name, wrong in (("minProperties", lambda bound: bound > len(set(required))), ("maxProperties", lambda bound: bound < len(named))):
        bound = schema.get(name)
        if bound is not None and (isinstance(bound, bool) or not isinstance(bound, int | float) or wrong(bound)):
            raise _not_expressed(tool, name)
    return named, required


def _top(tool: Tool) -> tuple[Mapping[str, Any], list[str]]:
    """The object schema of a tool's arguments, and its `required`."""
    schema: Any = tool.parameters
    while isinstance(schema, Mapping) and isinstance(schema.get("$ref"), str):
        beside = [name for name in schema if name in (*TOP_REFUSED, "properties", "required", "additionalProperties")]
        target = resolved({"$ref": schema["$ref"]}, tool.parameters)
        if beside or not target or "$ref" in target:
            raise _not_expressed(tool, "$ref", "wanted one into $defs, alone")
        schema = target
    for name, harmless in TOP_REFUSED.items():
        if name in schema and schema[name] not in harmless:
            raise _not_expressed(tool, name)
    kinds = schema.get("type", "object")
    if kinds != "object" and not (isinstance(kinds, list) and "object" in kinds):
        raise _not_expressed(tool, "type", "wanted object")
    required = schema.get("required", [])
    if not isinstance(required, list) or any(not isinstance(key, str) for key in required):
        raise _not_expressed(tool, "required", "wanted a list of names")
    return schema, required


def _not_expressed(tool: Tool, keyword: str, why: str = "") -> InputError:
    reason = f": {why}" if why else ""
    return InputError(
        f"{keyword} in the parameters of the tool {tool.name!r} is not supported in a call that must be made{reason}; "
        "next: leave it out, move it into an argument, or use tool_choice auto and no response_format"
    )


def _references(schema: Any) -> Iterator[str]:
    """Every `$ref` in a schema; what only looks like one, in a const, is taken for one too."""
    if isinstance(schema, Mapping):
        if isinstance(schema.get("$ref"), str):
            yield schema["$ref"]
        for one in schema.values():
            yield from _references(one)
    elif isinstance(schema, list):
        for one in schema:
            yield from _references(one)


def _disjoint(parts: Sequence[object], root: Mapping[str, Any]) -> bool:
    """Whether these are texts that are named, none of them twice."""
    each = [resolved(part, root) for part in parts]
    texts = [[one["const"]] if "const" in one else one.get("enum") for one in each]
    if any(not isinstance(some, list) for some in texts):
        return False
    every = [text for some in texts for text in set(map(str, some or []))]
    return len(set(every)) == len(every)


def _is_length(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= LENGTH_MAX


def _pattern(pattern: str) -> str:
    """A text in which the pattern is found, as JSON schemas mean it."""
    front = "" if pattern.startswith("^") else "(?s:.*)"
    ends = pattern.endswith("$") and not pattern.endswith("\\$")
    body = pattern.removeprefix("^")
    return regex_expression(f"{front}(?:{body[:-1] if ends else body}){'' if ends else '(?s:.*)'}")
