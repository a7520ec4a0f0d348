"""Calls of tools in a model's text: what they are, and that it does not matter how the text is cut into pieces."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm53.serve.tools import CALL_CLOSE, CALL_OPEN, KEY_CLOSE, KEY_OPEN, VALUE_CLOSE, VALUE_OPEN, Tool, ToolParser

WEATHER = Tool(
    "get_weather",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "unit": {"enum": ["C", "F"]},
            "where": {"$ref": "#/$defs/place"},
            "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "exact": {"type": "boolean"},
        },
        "$defs": {"place": {"type": "object"}},
    },
)
NOW = Tool("now", {})
TOOLS = (WEATHER, NOW)
Calls = list[tuple[str, str]]  # name, arguments


def call_text(name: str, *arguments: tuple[str, str], gap: str = "") -> str:
    parts = [f"{KEY_OPEN}{key}{KEY_CLOSE}{gap}{VALUE_OPEN}{value}{VALUE_CLOSE}{gap}" for key, value in arguments]
    return f"{CALL_OPEN}{name}{gap}{''.join(parts)}{CALL_CLOSE}"


def read(pieces: list[str], parallel: bool = True) -> tuple[str, Calls, ToolParser]:
    """Content and calls of a text in pieces; a call's id and name come first and once, and every piece of arguments belongs to it."""
    parser, content, calls = ToolParser(TOOLS, parallel), "", []
    for piece, last in [*((piece, False) for piece in pieces), ("", True)]:
        text, parts = parser.finish() if last else parser.push(piece)
        content += text
        for part in parts:
            if part.name is not None:
                assert part.index == len(calls) and part.call_id is not None and part.call_id.startswith("call_") and part.arguments == ""
                calls.append((part.name, ""))
            else:
                assert part.index == len(calls) - 1 and part.call_id is None and part.arguments
                calls[-1] = (calls[-1][0], calls[-1][1] + part.arguments)
    return content, calls, parser


def test_arguments_are_typed_by_the_schema() -> None:
    arguments = [
        ("city", ' New "York"\n'),
        ("days", "3"),
        ("unit", "C"),
        ("where", '{"lat": 1.5, "tags": ["a"]}'),
        ("note", "null"),
        ("exact", "true"),
        ("extra", "5"),
        ("more", "five"),
    ]
    content, calls, parser = read([call_text("get_weather", *arguments)])
    assert content == "" and [name for name, _ in calls] == ["get_weather"] and parser.complete == 1 and not parser.inside
    assert json.loads(calls[0][1]) == {
        "city": ' New "York"\n',
        "days": 3,
        "unit": "C",
        "where": {"lat": 1.5, "tags": ["a"]},
        "note": None,
        "exact": True,
        "extra": 5,
        "more": "five",
    }


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("city", "5", "5"),
        ("city", "null", "null"),
        ("city", "", ""),
        ("unit", "5", "5"),
        ("note", "5", "5"),
        ("note", "a b", "a b"),
        ("days", "soon", "soon"),
        ("days", " 3 ", 3),
        ("days", "[1]", [1]),
        ("days", "1e999", "1e999"),
        ("days", "NaN", "NaN"),
        ("where", "{" * 5000, "{" * 5000),
        ("exact", "True", "True"),
        ("city", "</arg_valu", "</arg_valu"),
        ("city", "<tool_call>now</tool_call>", "<tool_call>now</tool_call>"),
        ("city", "\u2028é\x00", "\u2028é\x00"),
    ],
)
def test_values(key: str, text: str, value: Any) -> None:
    _, calls, _ = read(list(call_text("get_weather", (key, text))))
    assert json.loads(calls[0][1]) == {key: value}


def test_text_around_calls() -> None:
    one, two = call_text("now"), call_text("get_weather", ("days", "2"), gap="\n")
    content, calls, parser = read([f"Let me see.\n\n{one}\n{two}\n And now?"])
    assert content == "Let me see.\n And now?" and calls == [("now", "{}"), ("get_weather", '{"days": 2}')] and parser.complete == 2
    assert read([f"a {one}\n"])[0] == "a" and read(["a \n"])[0] == "a \n"
    assert read([f"{one}{two}"], parallel=False)[1] == [("now", "{}")]


def test_what_is_no_call_is_content() -> None:
    for text in (
        call_text("delete_all", ("city", "x")),
        f"see\n {call_text('', ('city', 'x'))}",
        f"{CALL_OPEN}get_wea",
        f" {CALL_OPEN}now",
        f"{CALL_OPEN}{'x' * 2000}",
        CALL_CLOSE,
        "<tool_cal",
        "a < b",
    ):
        assert read(list(text))[:2] == (text, []), text
    content, calls, _ = read([f"{CALL_OPEN}what {call_text('now')}"])
    assert content == f"{CALL_OPEN}what" and calls == [("now", "{}")]


def test_calls_that_end_too_early_keep_what_they_have() -> None:
    whole = call_text("get_weather", ("city", "Paris"), ("days", "2"))
    for end in range(len(whole)):
        content, calls, parser = read([whole[:end]])
        if calls:
            assert content == "" and json.dumps({"city": "Paris", "days": 2}).startswith(calls[0][1]) and parser.inside and not parser.complete
        else:
            assert content == whole[:end] and not parser.inside


def test_what_came_of_a_value_that_is_no_string_is_kept() -> None:
    """An object, a number and a flag are cut off where the text is; what might be a string, or is a key that came before, says nothing."""
    where = '{"lat": 1.5, "tags": ["a"]}'
    whole = call_text("get_weather", ("where", where), ("days", "12"))
    seen = set()
    for end in range(len(whole)):
        for pieces in ([whole[:end]], list(whole[:end])):
            calls = read(pieces)[1]
            if calls:
                assert f'{{"where": {where}, "days": 12}}'.startswith(calls[0][1]), whole[:end]
                seen.add(calls[0][1])
    assert {'{"where": {"lat": 1.5, "ta', f'{{"where": {where}, "days": 1'} <= seen
    for key in ("note", "extra"):
        cut = call_text("get_weather", (key, "12"))
        assert read([cut[: cut.index("12") + 2]])[1] == [("get_weather", f'{{"{key}": ')]
    twice = call_text("get_weather", ("days", "1"), ("days", "2"))
    assert read([twice[: twice.rindex("2") + 1]])[1] == [("get_weather", '{"days": 1')]


def test_damaged_calls_are_read_as_far_as_they_make_sense() -> None:
    key = f"{KEY_OPEN}days{KEY_CLOSE}"
    for damaged in (
        f"{CALL_OPEN}get_weather{key}{key}{VALUE_OPEN}2{VALUE_CLOSE}{CALL_CLOSE}",  # a key without a value
        f"{CALL_OPEN}get_weather{key} is {VALUE_OPEN}2{VALUE_CLOSE} and {CALL_CLOSE}",  # text in between
        f"{CALL_OPEN}get_weather{key}{VALUE_OPEN}2{VALUE_CLOSE}{key}{VALUE_OPEN}3{VALUE_CLOSE}{CALL_CLOSE}",  # a key twice
        f"{CALL_OPEN}get_weather{key}{VALUE_OPEN}2{VALUE_CLOSE}{KEY_OPEN}unit{CALL_CLOSE}",  # a key that does not end
    ):
        assert read(list(damaged))[1] == [("get_weather", '{"days": 2}')], damaged
    unclosed = f"{CALL_OPEN}get_weather{key}{VALUE_OPEN}2{VALUE_CLOSE}{call_text('now')}"
    assert read(list(unclosed))[1] == [("get_weather", '{"days": 2}'), ("now", "{}")]


TAGS = (CALL_OPEN, CALL_CLOSE, KEY_OPEN, KEY_CLOSE, VALUE_OPEN, VALUE_CLOSE)
WORDS = st.sampled_from((*TAGS, "get_weather", "now", "city", "days", "note", "3", "null", '"', "\\", " ", "\n", "é", "<", "</", "x"))
PLAIN = st.text(st.sampled_from('ab<>/_ \n"\\é'), max_size=12)
REAL = st.builds(
    call_text,
    st.sampled_from(("get_weather", "now", "nobody")),
    st.tuples(st.sampled_from(("city", "days", "other")), PLAIN | st.sampled_from(("1", "[2, 3]", "null"))),
    gap=st.sampled_from(("", "\n")),
)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_cut_of_the_text_gives_the_same(data: st.DataObject) -> None:
    text = "".join(data.draw(st.lists(WORDS | PLAIN | REAL, max_size=14)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    whole = read([text])
    for pieces in ([text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)], list(text)):
        found = read(pieces)
        assert found[:2] == whole[:2] and (found[2].complete, found[2].inside) == (whole[2].complete, whole[2].inside)
    for _, arguments in whole[1][: whole[2].complete]:
        assert isinstance(json.loads(arguments), dict)
