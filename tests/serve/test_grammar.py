"""Grammars against random walks through their masks: what comes out parses and fits, whatever was drawn; what cannot be is refused."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import jsonschema_rs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm53.errors import InputError
from glm53.grammar import GrammarConstraint, Grammars, json_expression, lark_of, literal, regex_expression
from glm53.serve.tool_grammar import calls_grammar
from glm53.serve.tools import Tool, ToolParser
from glm53.tokenizer import Tokenizer

EOS = (4076, 4083, 4085)
VOCAB = 4096
MARK = "</think>"


@pytest.fixture(scope="module")
def tokenizer(demo_path: Path) -> Tokenizer:
    return Tokenizer.open(demo_path)


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer, VOCAB, EOS)


def allowed(constraint: GrammarConstraint) -> np.ndarray:
    """Ids that the mask allows."""
    return np.flatnonzero(np.unpackbits(constraint.mask.view(np.uint8), bitorder="little"))


def walk(constraint: GrammarConstraint, tokenizer: Tokenizer, seed: int, steps: int = 300) -> str | None:
    """A text of tokens drawn at random from the masks, short ones more often, which end it sooner; None if it did not end."""
    rng, ids = np.random.default_rng(seed), list[int]()
    lengths = np.array([max(len(tokenizer.token_bytes(token)), 1) for token in range(VOCAB)])
    every = np.where(np.isin(np.arange(VOCAB), EOS), 8.0, 1 / lengths**2)
    for _ in range(steps):
        choice = allowed(constraint)
        assert len(choice), "nothing may follow and nothing says so"
        token = int(rng.choice(choice, p=every[choice] / every[choice].sum()))
        if token in EOS:
            return tokenizer.decode(ids, skip_special=False)
        ids.append(token)
        if constraint.accept(token):
            return tokenizer.decode(ids, skip_special=False)
    return None


def takes(constraint: GrammarConstraint, tokenizer: Tokenizer, text: str) -> bool:
    """Whether a text, and no more, is in the grammar."""
    done = False
    for token in tokenizer.encode(text):
        if done or token not in allowed(constraint):
            return False
        done = constraint.accept(token)
    return done or EOS[0] in allowed(constraint)


SCHEMAS: list[dict[str, Any]] = [
    {"type": "integer", "minimum": -3, "maximum": 400},
    {"enum": ["a", 'b "c"', 3, None, True]},
    {
        "type": "object",
        "properties": {"a": {"type": "boolean"}, "b": {"type": "string", "maxLength": 5}},
        "required": ["a"],
        "additionalProperties": False,
    },
    {"type": "array", "items": {"anyOf": [{"type": "null"}, {"const": "x"}]}, "minItems": 1, "maxItems": 4},
    {"$ref": "#/$defs/tree", "$defs": {"tree": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 1}}},
    {"type": "string", "pattern": "^[a-c]{2,4}$"},
]


@pytest.mark.parametrize("schema", SCHEMAS, ids=range(len(SCHEMAS)))
def test_every_text_fits_its_schema(schema: dict[str, Any], grammars: Grammars, tokenizer: Tokenizer) -> None:
    ended = 0
    for seed in range(6):
        text = walk(grammars.constraint(f"start: {json_expression(schema)}\n"), tokenizer, seed)
        if text is not None:
            jsonschema_rs.validate(schema, json.loads(text))
            ended += 1
    assert ended > 2


PARAMETERS: list[dict[str, Any]] = [
    {},
    {"type": "object", "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}, "s": {"type": "string", "maxLength": 6}}},
    {"properties": {"s": {"type": "string", "enum": ["a b", 'c"d\n']}}, "required": ["s"]},
    {"properties": {"s": {"type": "string", "pattern": "[0-9]", "maxLength": 4, "minLength": 2}}, "required": ["s"]},
    {"properties": {"s": {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "null"}]}, "t": {"type": ["integer", "string"], "maxLength": 2}}},
    {"properties": {"s": {"oneOf": [{"const": "k"}, {"enum": ["l", "m"]}]}, "b": {"type": "boolean"}}, "required": ["b", "s"]},
    {
        "properties": {"o": {"$ref": "#/$defs/o"}},
        "required": ["o"],
        "$defs": {"o": {"properties": {"x": {"const": 1}}, "additionalProperties": False}},
    },
    {"$ref": "#/definitions/p", "definitions": {"p": {"type": "object", "properties": {"q": {"type": "boolean"}}, "required": ["q"]}}},
]


@pytest.mark.parametrize("parameters", PARAMETERS, ids=range(len(PARAMETERS)))
def test_every_forced_call_fits_its_tool(parameters: dict[str, Any], grammars: Grammars, tokenizer: Tokenizer) -> None:
    tools = (Tool('odd "name"', parameters), Tool("none", {}))
    schemas = {tools[0].name: {**parameters, "type": "object"}, "none": {"maxProperties": 0}}
    found = 0
    for seed in range(6):
        text = walk(grammars.constraint(calls_grammar(tools[: 1 + seed % 2], parallel=True)), tokenizer, seed)
        if text is None:
            continue
        parser = ToolParser(tools)
        content, parts = parser.push(text)
        assert content + parser.finish()[0] == "" and parser.complete and not parser.inside
        names = [part.name for part in parts if part.name is not None]
        for index, name in enumerate(names):
            arguments = json.loads("".join(part.arguments for part in parts if part.index == index))
            jsonschema_rs.validate(schemas[name], arguments)
            found += 1
    assert found > 2


ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}}
EITHER = [{"required": ["a"]}, {"required": ["b"]}]
LOOP = {"$ref": "#/$defs/A", "$defs": {"A": {"$ref": "#/$defs/A"}}}


def text_argument(**schema: Any) -> dict[str, Any]:
    return {"properties": {"t": {"type": "string", **schema}}}


@pytest.mark.parametrize(
    ("keyword", "parameters"),
    [
        ("allOf", ARGUMENTS | {"allOf": EITHER}),
        ("anyOf", ARGUMENTS | {"anyOf": EITHER}),
        ("oneOf", ARGUMENTS | {"oneOf": EITHER}),
        ("not", ARGUMENTS | {"not": {"required": ["a"]}}),
        ("not", ARGUMENTS | {"not": {}}),
        ("if", ARGUMENTS | {"if": EITHER[0], "then": EITHER[1]}),
        ("minProperties", ARGUMENTS | {"minProperties": 2, "required": ["a"]}),
        ("maxProperties", ARGUMENTS | {"maxProperties": 1}),
        ("dependentRequired", ARGUMENTS | {"dependentRequired": {"a": ["b"]}}),
        ("patternProperties", ARGUMENTS | {"patternProperties": {"^a": {"minimum": 3}}}),
        ("type", ARGUMENTS | {"type": "array"}),
        ("type", ARGUMENTS | {"type": ["string", "null"]}),
        ("required", ARGUMENTS | {"required": ["c"], "additionalProperties": False}),
        ("$ref", {"$ref": "#/$defs/A", "required": ["a"], "$defs": {"A": ARGUMENTS}}),
        ("$ref", {"$ref": "#/$defs/B", "$defs": {"A": ARGUMENTS}}),
        ("$ref", LOOP),
        ("$ref", {"properties": {"next": {"type": "array", "items": {"$ref": "#"}}}}),
        ("allOf", text_argument(allOf=[{"minLength": 1}, {"maxLength": 2}])),
        ("not", text_argument(**{"not": {"const": "a"}})),
        ("maxLength", text_argument(enum=["abc"], maxLength=2)),
        ("pattern", text_argument(anyOf=[{"minLength": 3}, {"const": "x"}], pattern="x")),
        ("oneOf", text_argument(oneOf=[{"minLength": 1}, {"const": "x"}])),
    ],
)
def test_what_a_call_cannot_be_held_to_is_refused(keyword: str, parameters: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="'mover'") as raised:
        calls_grammar([Tool("mover", parameters)], True)
    assert keyword in str(raised.value) and "not supported" in str(raised.value)


def test_what_a_schema_says_beside_its_arguments_holds(grammars: Grammars, tokenizer: Tokenizer) -> None:
    """Keywords that forbid nothing which the grammar allows, and arguments that only `required` and `additionalProperties` know of."""
    call = lambda *arguments: "<tool_call>f" + "".join(f"<arg_key>{k}</arg_key><arg_value>{v}</arg_value>" for k, v in arguments) + "</tool_call>"
    parameters = ARGUMENTS | {
        "required": ["a", "c"],
        "minProperties": 2,
        "maxProperties": 3,
        "additionalProperties": {"type": "boolean"},
        "title": "F",
    }
    grammar = calls_grammar([Tool("f", {"$ref": "#/$defs/F", "$defs": {"F": parameters}})], False)
    for arguments, fits in (((("a", 1), ("c", "true")), True), ((("a", 1), ("b", "x"), ("c", "true")), True), ((("a", 1), ("c", 5)), False)):
        assert takes(grammars.constraint(grammar), tokenizer, call(*arguments)) == fits
    grammar = calls_grammar([Tool("f", text_argument(oneOf=[{"const": "x"}, {"enum": ["y", "z"]}]) | {"type": ["object", "null"]})], False)
    for value, fits in (("y", True), ("a", False)):
        assert takes(grammars.constraint(grammar), tokenizer, call(("t", value))) == fits


@settings(max_examples=60, deadline=None)
@given(text=st.text(min_size=1, max_size=8), other=st.text(min_size=1, max_size=8))
def test_a_literal_is_itself_alone(text: str, other: str, grammars: Grammars, tokenizer: Tokenizer) -> None:
    constraint = lambda: grammars.constraint(f"start: {literal(text)}\n")
    assert takes(constraint(), tokenizer, text)
    assert takes(constraint(), tokenizer, other) == (text == other)


def test_expressions_and_grammars(grammars: Grammars, tokenizer: Tokenizer) -> None:
    for regex, good, bad in ((r"a/\d+", "a/12", "a/"), ("a\nb|c", "a\nb", "a b"), ("(?i)yes", "YES", "no")):
        constraint = lambda regex=regex: grammars.constraint(f"start: {regex_expression(regex)}\n")
        assert takes(constraint(), tokenizer, good) and not takes(constraint(), tokenizer, bad)
    for grammar in ('start: "x" /[0-9]/+\n', 'root ::= "x" [0-9]+\n'):
        assert takes(grammars.constraint(lark_of(grammar)), tokenizer, "x12")


def test_the_text_before_the_mark_is_free(grammars: Grammars, tokenizer: Tokenizer) -> None:
    constraint = grammars.constraint('start: "yes"\n', MARK)
    assert len(allowed(constraint)) == VOCAB - len(EOS) and not set(EOS) & set(allowed(constraint))
    for token in tokenizer.encode("well </ think> no <</thin", parse_special=True):
        assert not constraint.accept(token) and len(allowed(constraint)) >= VOCAB - 100
    for token in (*tokenizer.encode(" or </"), *tokenizer.encode("think"), *tokenizer.encode(">")):  # the mark in pieces
        assert not constraint.accept(token)
    assert all(b"yes".startswith(tokenizer.token_bytes(int(token))) for token in allowed(constraint))


class Tokens:
    """A tokenizer with tokens that go on behind the mark."""

    words = (b"<end>", MARK.encode(), b"<", b"/think", b">", b"> {", b"{", b"a</think>{", b"k>", b"/thin", b"k>x")
    special_ids = frozenset((0,))

    def token_bytes(self, token_id: int) -> bytes:
        return self.words[token_id] if token_id < len(self.words) else b""

    def encode(self, text: str) -> list[int]:
        return [self.words.index(character.encode()) for character in text]


def test_no_token_carries_text_beyond_the_mark() -> None:
    grammars = Grammars(Tokens(), 40, (0,))  # type: ignore[arg-type]
    constraint = grammars.constraint('start: "{"\n', MARK)
    names = lambda: {Tokens.words[token] for token in allowed(constraint) if token < len(Tokens.words)}
    every = set(Tokens.words[1:]) - {b"a</think>{"}
    assert names() == every
    for token, missing in ((2, set()), (9, {b"k>x"}), (2, set()), (3, {b"> {"}), (6, set()), (2, set()), (3, {b"> {"})):
        assert not constraint.accept(token) and names() == every - missing, token
    assert not constraint.accept(4) and names() == {b"{"} and constraint.accept(6)


def test_what_cannot_be_is_refused_soon(grammars: Grammars) -> None:
    deep: dict[str, Any] = {}
    for _ in range(500):
        deep = {"type": "array", "items": deep}
    wide = {"anyOf": [{"$ref": "#/$defs/w"}] * 40, "$defs": {"w": {"anyOf": [{"$ref": "#/$defs/w"}] * 40}}}
    refused: list[str] = [
        "start: missing\n",
        "",
        "start: start\n",
        f"start: {json_expression({'type': 'objekt'})}\n",
        f"start: {json_expression({'type': 'array', 'uniqueItems': True})}\n",
        f"start: {json_expression({'minimum': 5, 'maximum': 1, 'type': 'integer'})}\n",
        f"start: {json_expression(deep)}\n",
        f"start: {json_expression({'enum': ['x' * 300_000]})}\n",
        f"start: {regex_expression('a(?=b)')}\n",
        'start: "\ud800"\n',
        calls_grammar([Tool("f", {"properties": {"a": deep}, "required": ["a"]})], True),
    ]
    with pytest.raises(InputError, match="4096 arguments"):
        calls_grammar([Tool("f", {"properties": {f"a{i}": {} for i in range(5000)}})], True)
    began = time.monotonic()
    for grammar in refused:
        with pytest.raises(InputError):
            grammars.constraint(grammar)
    calls_grammar([Tool("f", {"properties": {"a": wide}, "$defs": wide["$defs"]})], True)  # whatever becomes of it
    assert time.monotonic() - began < 5
    with pytest.raises(InputError, match="neither Lark nor GBNF"):
        lark_of("root ::= (")
