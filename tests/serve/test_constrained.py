"""Texts that have a form, and calls of tools, through the official client: what comes must parse and fit, whatever the model would have said."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import openai
import pytest
from serve_scene import NAME, Served, running

from glm53 import Engine, SamplingParams

MESSAGES: Any = [{"role": "user", "content": "Hello"}]
SEEDS = range(3)
ASKED: dict[str, Any] = {"model": NAME, "messages": MESSAGES, "temperature": 1.0, "max_tokens": 400, "reasoning_effort": "low"}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 12},
        "age": {"type": "integer", "minimum": 1, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["kind", "tall", 'odd "one"']}, "minItems": 1, "maxItems": 3},
        "home": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/place"}]},
    },
    "required": ["name", "age", "tags", "home"],
    "additionalProperties": False,
    "$defs": {"place": {"type": "object", "properties": {"lat": {"type": "boolean"}}, "required": ["lat"], "additionalProperties": False}},
}
MOVE: Any = {
    "type": "function",
    "function": {
        "name": "move",
        "description": "Moves a piece",
        "parameters": {
            "type": "object",
            "properties": {
                "piece": {"type": "string", "enum": ["king", "a rook"]},
                "to": {"type": "string", "pattern": "^[a-h][1-8]$"},
                "note": {"type": "string", "maxLength": 10},
                "steps": {"type": "integer", "minimum": 1, "maximum": 7},
                "from": {"anyOf": [{"type": "string", "maxLength": 4}, {"type": "null"}]},
                "path": {"$ref": "#/$defs/squares"},
            },
            "required": ["piece", "to", "steps", "from", "path"],
            "$defs": {"squares": {"type": "array", "items": {"enum": ["a1", "h8"]}, "maxItems": 2}},
        },
    },
}
FREE_MOVE: Any = {"type": "function", "function": {"name": "move"}}  # a short prompt, and arguments of which nothing is known
PASS: Any = {"type": "function", "function": {"name": "pass-turn"}}
PARAMETERS = {"move": MOVE["function"]["parameters"], "pass-turn": {"type": "object", "maxProperties": 0}}
CALLED = "<tool_call>move<arg_key>piece</arg_key><arg_value>king</arg_value><arg_key>steps</arg_key><arg_value>2</arg_value></tool_call>"
SAID = 'start: "I will." "\\n" CALL CALL\nCALL: "' + CALLED + '"\n'  # what a model that was trained to call tools might write


@pytest.fixture(scope="module")
def served(demo_path: Path) -> Iterator[Served]:
    """The demo model with room for prompts that declare tools, and with drafts."""
    settings: dict[str, Any] = {"context_rows_max": 1024, "sessions_max": 3, "prefill_chunk_rows": 128, "hot_rows": 1024, "mtp": "2"}
    with Engine.open(demo_path, **settings) as engine, running(engine) as server:
        yield server


@pytest.fixture
def client(served: Served) -> Iterator[Any]:
    with openai.OpenAI(base_url=served.url, api_key="none", max_retries=0) as made:
        yield made


def chat(client: Any, **asked: Any) -> Any:
    return client.chat.completions.create(**ASKED | asked)


def streamed(client: Any, **asked: Any) -> tuple[str | None, list[tuple[str, str, str]], str]:
    """Content, calls (id, name, arguments) and finish reason of a stream, whose shape is checked."""
    content, calls, reason = None, [], None
    for chunk in chat(client, stream=True, **asked):
        choice = chunk.choices[0]
        assert reason is None, "nothing comes behind the finish reason"
        reason = choice.finish_reason
        if choice.delta.content:
            content = (content or "") + choice.delta.content
        for part in choice.delta.tool_calls or []:
            if part.function.name is not None:
                assert part.index == len(calls) and part.type == "function" and part.id.startswith("call_") and part.function.arguments == ""
                calls.append((part.id, part.function.name, ""))
            else:
                assert part.index == len(calls) - 1 and part.id is None and part.function.arguments
                calls[-1] = (*calls[-1][:2], calls[-1][2] + part.function.arguments)
    assert reason is not None
    return content, calls, reason


def check_calls(message: Any) -> None:
    for call in message.tool_calls:
        assert call.type == "function" and re.fullmatch("call_[0-9a-f]{24}", call.id)
        jsonschema_rs.validate(PARAMETERS[call.function.name], json.loads(call.function.arguments))
    assert len({call.id for call in message.tool_calls}) == len(message.tool_calls)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_schema_holds(client: Any, seed: int) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": SCHEMA}}
    choice = chat(client, seed=seed, response_format=form).choices[0]
    assert choice.finish_reason == "stop" and choice.message.tool_calls is None
    jsonschema_rs.validate(SCHEMA, json.loads(choice.message.content))
    assert streamed(client, seed=seed, response_format=form) == (choice.message.content, [], "stop")


def test_other_forms(client: Any) -> None:
    for seed in (1, 2):
        choice = chat(client, seed=seed, max_tokens=80, response_format={"type": "json_object"}).choices[0]
        assert choice.finish_reason == "length" or isinstance(json.loads(choice.message.content), dict)
        for extra in ({"guided_regex": "(no|yes), [0-9]{3}/7"}, {"structured_outputs": {"regex": "(no|yes), [0-9]{3}/7"}}):
            assert re.fullmatch("(no|yes), [0-9]{3}/7", chat(client, seed=seed, extra_body=extra).choices[0].message.content)
        for extra in ({"guided_choice": ['a "b"', "c\n\\d"]}, {"structured_outputs": {"choice": ['a "b"', "c\n\\d"]}}):
            assert chat(client, seed=seed, extra_body=extra).choices[0].message.content in ('a "b"', "c\n\\d")
        for grammar in ('start: "x" /[0-9]/ tail\ntail: "!" | "?"\n', 'root ::= "x" [0-9] tail\ntail ::= "!" | "?"\n'):
            assert re.fullmatch("x[0-9][!?]", chat(client, seed=seed, extra_body={"guided_grammar": grammar}).choices[0].message.content)
        extra = {"guided_json": json.dumps({"enum": [1, "two"]})}
        reply = client.completions.create(model=NAME, prompt="In the beginning", seed=seed, max_tokens=20, extra_body=extra)
        assert json.loads(reply.choices[0].text) in (1, "two") and reply.choices[0].finish_reason == "stop"


def test_the_form_begins_behind_the_thinking(client: Any) -> None:
    for seed in SEEDS:
        choice = chat(client, seed=seed, reasoning_effort="high", n=2, extra_body={"guided_choice": ["yes", "no"]}).choices[seed % 2]
        assert choice.message.content in ("yes", "no") if choice.finish_reason == "stop" else choice.message.content is None
        assert choice.message.reasoning_content and "yes" not in choice.message.reasoning_content[-5:]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_required_call_is_made_and_fits(client: Any, seed: int) -> None:
    choice = chat(client, seed=seed, tools=[MOVE, PASS], tool_choice="required", parallel_tool_calls=False).choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content is None and len(choice.message.tool_calls) == 1
    check_calls(choice.message)
    named: Any = {"type": "function", "function": {"name": "move"}}
    choice = chat(client, seed=seed, tools=[MOVE, PASS], tool_choice=named).choices[0]
    assert choice.finish_reason == "tool_calls" and [call.function.name for call in choice.message.tool_calls] == ["move"]
    check_calls(choice.message)
    if seed == 0:  # one stream is enough
        content, calls, reason = streamed(client, seed=seed, tools=[MOVE, PASS], tool_choice=named)
        assert (content, reason) == (None, "tool_calls")
        assert [call[1:] for call in calls] == [("move", choice.message.tool_calls[0].function.arguments)]


def test_allowed_tools_are_a_choice_among_all(client: Any) -> None:
    allowed = lambda mode: {
        "type": "allowed_tools",
        "allowed_tools": {"mode": mode, "tools": [{"type": "function", "function": {"name": "pass-turn"}}]},
    }
    for seed in SEEDS:
        choice: Any = allowed("required")
        message = chat(client, seed=seed, tools=[FREE_MOVE, PASS], tool_choice=choice, parallel_tool_calls=False).choices[0].message
        assert [call.function.name for call in message.tool_calls] == ["pass-turn"]
    asked: dict[str, Any] = {"seed": 3, "tools": [FREE_MOVE, PASS], "extra_body": {"guided_grammar": SAID}}
    assert chat(client, **asked).choices[0].message.tool_calls
    assert chat(client, **asked, tool_choice=allowed("auto")).choices[0].message.tool_calls is None


def test_a_schema_that_only_forced_calls_must_keep(client: Any) -> None:
    parameters = {"type": "object", "anyOf": [{"required": ["piece"]}]}
    tool: Any = {"type": "function", "function": {"name": "move", "parameters": parameters}}
    assert chat(client, seed=1, tools=[tool], max_tokens=2).choices[0].finish_reason == "length"
    with pytest.raises(openai.BadRequestError, match=r"anyOf.*'move'"):
        chat(client, seed=1, tools=[tool], tool_choice="required")


def test_several_calls_may_be_required(client: Any) -> None:
    choice = chat(client, seed=1, tools=[PASS], tool_choice="required", max_tokens=60).choices[0]
    check_calls(choice.message)
    assert choice.finish_reason in ("tool_calls", "length") and {call.function.name for call in choice.message.tool_calls} == {"pass-turn"}


def test_calls_in_a_text(client: Any) -> None:
    asked: dict[str, Any] = {"seed": 3, "tools": [FREE_MOVE], "extra_body": {"guided_grammar": SAID}}
    choice = chat(client, **asked).choices[0]
    assert choice.message.content == "I will." and choice.finish_reason == "tool_calls"
    assert [call.function.arguments for call in choice.message.tool_calls] == ['{"piece": "king", "steps": 2}'] * 2
    content, calls, reason = streamed(client, **asked)
    assert (content, reason) == ("I will.", "tool_calls") and [call[2] for call in calls] == ['{"piece": "king", "steps": 2}'] * 2
    choice = chat(client, **asked, parallel_tool_calls=False).choices[0]
    assert len(choice.message.tool_calls) == 1
    for other in ({"tool_choice": "none"}, {"tools": [PASS]}, {"tools": openai.NOT_GIVEN}):  # not looked for, or not of a tool that was declared
        choice = chat(client, **asked | other).choices[0]
        assert choice.message.content == "I will.\n" + CALLED * 2 and choice.message.tool_calls is None and choice.finish_reason == "stop"


def test_a_cut_off_call_says_so(client: Any) -> None:
    asked: dict[str, Any] = {"seed": 3, "tools": [FREE_MOVE], "extra_body": {"guided_grammar": 'start: "' + CALLED + '"\n'}}
    used = chat(client, **asked).usage
    prefixes = set()
    for fewer in (1, 4, 7):
        choice = chat(client, **asked, max_tokens=used.completion_tokens - fewer).choices[0]
        if choice.message.tool_calls:
            arguments = choice.message.tool_calls[0].function.arguments
            assert '{"piece": "king", "steps": 2}'.startswith(arguments)
            assert choice.finish_reason == "length" or arguments.endswith("}")
            prefixes.add(arguments)
    assert len(prefixes) > 1


def test_a_form_or_a_call(client: Any) -> None:
    """response_format with tools: either the text has the form, or it is calls."""
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object", "properties": {}, "additionalProperties": False}}}
    for seed in SEEDS:
        message = chat(client, seed=seed, tools=[PASS], response_format=form, parallel_tool_calls=False).choices[0].message
        assert message.tool_calls or json.loads(message.content) == {}


def test_earlier_calls_and_results_are_in_the_prompt(served: Served, client: Any) -> None:
    call: Any = {"id": "call_1", "type": "function", "function": {"name": "move", "arguments": '{"piece": "king", "steps": 2}'}}
    turns: Any = [
        {"role": "user", "content": "Move"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "done"},
    ]
    _, _, told = served.request("POST", "/tokenize", {"messages": turns, "tools": [MOVE]})
    _, _, text = served.request("POST", "/detokenize", {"tokens": told["tokens"]})
    assert CALLED in text["prompt"] and "<|observation|><tool_response>done</tool_response>" in text["prompt"]
    assert json.dumps(MOVE, ensure_ascii=False) in text["prompt"]
    reply = chat(client, messages=turns, tools=[MOVE], max_tokens=4, reasoning_effort=openai.NOT_GIVEN)
    assert reply.usage.prompt_tokens == told["count"]


def test_requests_beside_a_constrained_one_keep_their_texts(served: Served, client: Any) -> None:
    params = [SamplingParams(temperature=0.9, top_p=0.95, seed=seed, max_tokens=60, ignore_eos=True) for seed in range(2)]
    alone = [served.engine.generate("In the beginning", one).text for one in params]
    found: dict[int, str] = {}

    def ask(index: int) -> None:
        extra = {"ignore_eos": True}
        reply = client.completions.create(model=NAME, prompt="In the beginning", temperature=0.9, seed=index, max_tokens=60, extra_body=extra)
        found[index] = reply.choices[0].text

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    form: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
    jsonschema_rs.validate(SCHEMA, json.loads(chat(client, seed=1, response_format=form).choices[0].message.content))
    for thread in threads:
        thread.join()
    assert [found[0], found[1]] == alone
