"""The form that an answer's text must have: `response_format` of the OpenAI API, and `structured_outputs` and `guided_*` as vLLM names them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from glm53.errors import InputError
from glm53.grammar import json_expression, lark_of, literal, regex_expression
from glm53.serve.fields import ApiError, Fields

CHOICES_MAX = 1024
KINDS = ("json", "regex", "choice", "grammar", "json_object")


@dataclass(frozen=True)
class Format:
    """grammar: Lark. expression: of which it consists, if it is one. param: the field that asked for it."""

    grammar: str
    expression: str | None
    param: str


def read_format(fields: Fields) -> Format | None:
    """What a body asks for; None: any text. Raises ApiError 400, also where two fields ask for something."""
    found = [one for one in (_response_format(fields), _structured(fields), *_guided(fields)) if one is not None]
    if len(found) > 1:
        raise ApiError(f"{found[1].param} and {found[0].param} both say what form the text must have, wanted one", param=found[1].param)
    return found[0] if found else None


def _response_format(fields: Fields) -> Format | None:
    given = fields.inner("response_format")
    kind = given.text("type")
    if not given.values or kind == "text":
        return None
    if kind == "json_object":
        return _format("json_object", True, fields, "response_format")
    if kind != "json_schema":
        raise given.wrong("type", "text, json_object or json_schema")
    inner = given.inner("json_schema")
    if not inner.has("schema"):
        raise inner.wrong("schema", "a JSON schema")
    return _format("json", inner.values["schema"], inner, "schema")


def _structured(fields: Fields) -> Format | None:
    given = fields.inner("structured_outputs")
    asked = [name for name in KINDS if _asks(given, name, name)]
    other = sorted(name for name in given.values if name not in KINDS and given.has(name))
    if other:
        given.refuse(other[0], f"known are {', '.join(KINDS)}", (False, ""))
    if len(asked) > 1 or (given.values and not asked):
        raise fields.wrong("structured_outputs", f"an object with one of {', '.join(KINDS)}")
    return _format(asked[0], given.values[asked[0]], given, asked[0]) if asked else None


def _guided(fields: Fields) -> list[Format]:
    names = [kind for kind in KINDS if _asks(fields, f"guided_{kind}", kind)]
    return [_format(kind, fields.values[f"guided_{kind}"], fields, f"guided_{kind}") for kind in names]


def _asks(fields: Fields, name: str, kind: str) -> bool:
    """Whether a field is there and asks for a form: false asks for none where it is a flag, and is wrong elsewhere."""
    return fields.has(name) and not (kind == "json_object" and fields.values[name] is False)


def _format(kind: str, value: Any, fields: Fields, name: str) -> Format:
    param = fields.path + name
    try:
        if kind == "grammar":
            if not isinstance(value, str):
                raise fields.wrong(name, "a grammar in Lark or GBNF, as a text")
            return Format(lark_of(value), None, param)
        expression = _expression(kind, value, fields, name)
    except InputError as error:
        raise ApiError(f"{param}: {error}", param=param) from None
    return Format(f"start: {expression}\n", expression, param)


def _expression(kind: str, value: Any, fields: Fields, name: str) -> str:
    if kind == "json_object":
        return json_expression({"type": "object"})
    if kind == "json":
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except (ValueError, RecursionError):
                value = None
        if not isinstance(value, Mapping):
            raise fields.wrong(name, "a JSON schema, an object")
        return json_expression(value)
    if kind == "regex":
        if not isinstance(value, str) or not value:
            raise fields.wrong(name, "a regular expression")
        return regex_expression(value)
    fits = isinstance(value, list) and 0 < len(value) <= CHOICES_MAX and all(isinstance(one, str) and one for one in value)
    if not fits:
        raise fields.wrong(name, f"a list of 1 to {CHOICES_MAX} texts, none empty")
    return " | ".join(literal(one) for one in value)
