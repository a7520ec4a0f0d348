"""What the API refuses, in which shape, and what it does when it is full."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from serve_scene import NAME, Served, running

from glm53 import SamplingParams
from glm53.serve.loop import Load

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "Hello"}]
LONG = {"prompt": "In the beginning", "max_tokens": 400, "ignore_eos": True, "seed": 1}

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}}
UNKNOWN = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "objekt"}}, "required": ["a"]}}}


ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [{"type": "function", "function": {"name": "g"}}]}}


def topped(**keywords: Any) -> dict[str, Any]:
    """A call that must be made of a tool whose parameters say more."""
    function = TOOL["function"]
    tool = {"type": "function", "function": {**function, "parameters": function["parameters"] | keywords}}  # type: ignore[dict-item,index]
    return {"messages": MESSAGES, "tools": [tool], "tool_choice": "required"}


def schema_of(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


WRONG: list[tuple[str, Any, int, str | None]] = [
    (CHAT, b"{", 400, None),
    (CHAT, b"\xff\xfe", 400, None),
    (CHAT, b"[" * 100_000, 400, None),
    (CHAT, b'{"messages": NaN}', 400, None),
    (CHAT, b'{"n": ' + b"9" * 5000 + b"}", 400, None),
    (CHAT, [], 400, None),
    (CHAT, {}, 400, "messages"),
    (CHAT, {"messages": []}, 400, "messages"),
    (CHAT, {"messages": ["Hello"]}, 400, "messages"),
    (CHAT, {"messages": [{"role": "king", "content": "x"}]}, 400, "messages[0].role"),
    (CHAT, {"messages": [{"role": "user"}]}, 400, "messages[0].content"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages[0].content"),
    (CHAT, {"messages": MESSAGES, "model": "gpt"}, 404, "model"),
    (CHAT, {"messages": MESSAGES, "model": 3}, 400, "model"),
    (CHAT, {"messages": MESSAGES, "temperature": -1}, 400, "temperature"),
    (CHAT, {"messages": MESSAGES, "temperature": "hot"}, 400, "temperature"),
    (CHAT, {"messages": MESSAGES, "temperature": 10**400}, 400, "temperature"),
    (CHAT, b'{"messages": [{"role": "user", "content": "x"}], "temperature": 1e999}', 400, "temperature"),
    (CHAT, {"messages": MESSAGES, "top_p": 0}, 400, "top_p"),
    (CHAT, {"messages": MESSAGES, "top_k": -2}, 400, "top_k"),
    (CHAT, {"messages": MESSAGES, "n": 0}, 400, "n"),
    (CHAT, {"messages": MESSAGES, "n": True}, 400, "n"),
    (CHAT, {"messages": MESSAGES, "n": 128}, 400, "n"),
    (CHAT, {"messages": MESSAGES, "max_tokens": 0}, 400, "max_tokens"),
    (CHAT, {"messages": MESSAGES, "max_completion_tokens": 511}, 400, "max_completion_tokens"),
    (CHAT, {"messages": MESSAGES, "seed": 2**64}, 400, "seed"),
    (CHAT, {"messages": MESSAGES, "stop": [""]}, 400, "stop"),
    (CHAT, {"messages": MESSAGES, "stop": ["x"] * 17}, 400, "stop"),
    (CHAT, {"messages": MESSAGES, "stop_token_ids": [-1]}, 400, "stop_token_ids"),
    (CHAT, {"messages": MESSAGES, "top_logprobs": 2}, 400, "top_logprobs"),
    (CHAT, {"messages": MESSAGES, "logprobs": True, "top_logprobs": 21}, 400, "top_logprobs"),
    (CHAT, {"messages": MESSAGES, "stream": "yes"}, 400, "stream"),
    (CHAT, {"messages": MESSAGES, "stream_options": {"include_usage": True}}, 400, "stream_options"),
    (CHAT, {"messages": MESSAGES, "stream": True, "stream_options": {"include_usage": 1}}, 400, "stream_options.include_usage"),
    (CHAT, {"messages": MESSAGES, "tools": [{"type": "function"}]}, 400, "tools[0].function.name"),
    (CHAT, {"messages": MESSAGES, "tools": [{"type": "browser"}]}, 400, "tools[0].type"),
    (CHAT, {"messages": MESSAGES, "tools": [TOOL, TOOL]}, 400, "tools"),
    (CHAT, {"messages": MESSAGES, "tools": "f"}, 400, "tools"),
    (CHAT, {"messages": MESSAGES, "tool_choice": "required"}, 400, "tool_choice"),
    (CHAT, {"messages": MESSAGES, "tools": [TOOL], "tool_choice": "sometimes"}, 400, "tool_choice"),
    (CHAT, {"messages": MESSAGES, "tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, 400, "tool_choice"),
    (CHAT, {"messages": MESSAGES, "tools": [UNKNOWN], "tool_choice": "required"}, 400, "tools"),
    (CHAT, {"messages": MESSAGES, "tools": [TOOL], "tool_choice": ALLOWED}, 400, "tool_choice"),
    (CHAT, {"messages": MESSAGES, "tools": [TOOL], "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto"}}}, 400, "tool_choice"),
    (CHAT, topped(anyOf=[{"required": ["a"]}]), 400, "tools"),
    (CHAT, topped(type="array"), 400, "tools"),
    (CHAT, {"messages": MESSAGES, "functions": [{"name": "f"}]}, 400, "functions"),
    (CHAT, {"messages": MESSAGES, "response_format": {"type": "xml"}}, 400, "response_format.type"),
    (CHAT, {"messages": MESSAGES, "response_format": {"type": "json_schema"}}, 400, "response_format.json_schema.schema"),
    (CHAT, {"messages": MESSAGES, "response_format": schema_of({"type": "objekt"})}, 400, "response_format.json_schema.schema"),
    (CHAT, {"messages": MESSAGES, "response_format": schema_of({"not": {}})}, 400, "response_format.json_schema.schema"),
    (CHAT, {"messages": MESSAGES, "response_format": schema_of({"enum": ["x" * 300_000]})}, 400, "response_format.json_schema.schema"),
    (CHAT, {"messages": MESSAGES, "guided_regex": "("}, 400, "guided_regex"),
    (CHAT, {"messages": MESSAGES, "guided_choice": []}, 400, "guided_choice"),
    (CHAT, {"messages": MESSAGES, "guided_json": "{"}, 400, "guided_json"),
    (CHAT, {"messages": MESSAGES, "guided_json": False}, 400, "guided_json"),
    (CHAT, {"messages": MESSAGES, "guided_json": {"$ref": "#"}}, 400, "guided_json"),
    (CHAT, {"messages": MESSAGES, "structured_outputs": {"json": False}}, 400, "structured_outputs.json"),
    (CHAT, {"messages": MESSAGES, "guided_grammar": "root ::= ("}, 400, "guided_grammar"),
    (CHAT, {"messages": MESSAGES, "structured_outputs": {"json": {}, "regex": "a"}}, 400, "structured_outputs"),
    (CHAT, {"messages": MESSAGES, "structured_outputs": {"colour": "red"}}, 400, "structured_outputs.colour"),
    (CHAT, {"messages": MESSAGES, "guided_regex": "a", "response_format": {"type": "json_object"}}, 400, "guided_regex"),
    (CHAT, {"messages": MESSAGES, "reasoning_effort": "huge"}, 400, "reasoning_effort"),
    (COMPLETIONS, {"prompt": "x", "response_format": schema_of({"type": "objekt"})}, 400, "response_format.json_schema.schema"),
    (CHAT, {"messages": MESSAGES, "presence_penalty": 1}, 400, "presence_penalty"),
    (CHAT, {"messages": MESSAGES, "echo": True}, 400, "echo"),
    (CHAT, {"messages": MESSAGES, "allowed_token_ids": [5]}, 400, "allowed_token_ids"),
    (CHAT, {"messages": MESSAGES, "bad_words": ["x"]}, 400, "bad_words"),
    (CHAT, {"messages": MESSAGES, "continue_final_message": True}, 400, "continue_final_message"),
    (CHAT, {"messages": MESSAGES, "add_generation_prompt": False}, 400, "add_generation_prompt"),
    (CHAT, {"messages": MESSAGES, "include_reasoning": False}, 400, "include_reasoning"),
    (CHAT, {"messages": MESSAGES, "modalities": ["text", "audio"]}, 400, "modalities"),
    (COMPLETIONS, {"prompt": "x", "prompt_logprobs": 1}, 400, "prompt_logprobs"),
    (COMPLETIONS, {"prompt": "x", "truncate_prompt_tokens": 4}, 400, "truncate_prompt_tokens"),
    (COMPLETIONS, {"prompt": "x", "allowed_token_ids": [5]}, 400, "allowed_token_ids"),
    (CHAT, {"messages": MESSAGES, "chat_template_kwargs": {"self": 1}}, 400, "chat_template_kwargs"),
    (CHAT, {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "3"}}]}]}, 400, "messages[0].tool_calls"),
    (COMPLETIONS, {}, 400, "prompt"),
    (COMPLETIONS, {"prompt": ""}, 400, "prompt"),
    (COMPLETIONS, {"prompt": []}, 400, "prompt"),
    (COMPLETIONS, {"prompt": [1, "x"]}, 400, "prompt"),
    (COMPLETIONS, {"prompt": [True]}, 400, "prompt"),
    (COMPLETIONS, {"prompt": [99999]}, 400, "prompt"),
    (COMPLETIONS, {"prompt": [-1]}, 400, "prompt"),
    (COMPLETIONS, b'{"prompt": "\\ud800"}', 400, "prompt"),
    (COMPLETIONS, {"prompt": [1] * 512}, 400, "prompt"),
    (COMPLETIONS, {"prompt": "x", "echo": True}, 400, "echo"),
    (COMPLETIONS, {"prompt": "x", "logprobs": True}, 400, "logprobs"),
    (COMPLETIONS, {"prompt": "x", "best_of": 3}, 400, "best_of"),
    ("/tokenize", {}, 400, "prompt"),
    ("/tokenize", {"prompt": "x", "messages": MESSAGES}, 400, "prompt"),
    ("/tokenize", {"messages": MESSAGES, "continue_final_message": True}, 400, "continue_final_message"),
    ("/detokenize", {"tokens": [4096]}, 400, "tokens"),
    ("/detokenize", {"tokens": "x"}, 400, "tokens"),
    ("/nothing", {}, 404, None),
    ("/v1/models", {}, 405, None),
]


@pytest.mark.parametrize(("path", "body", "status", "param"), WRONG, ids=range(len(WRONG)))
def test_bad_requests(served: Served, path: str, body: Any, status: int, param: str | None) -> None:
    found, _, answer = served.request("POST", path, body)
    assert found == status, answer
    error = answer["error"]
    assert error.keys() == {"message", "type", "param", "code"} and error["param"] == param and error["message"]
    assert served.loop.load() == Load(0, 0)


def test_what_asks_for_nothing_is_fine(served: Served) -> None:
    nothing = {"echo": False, "bad_words": [], "allowed_token_ids": None, "continue_final_message": False, "add_generation_prompt": True}
    more = {"include_reasoning": True, "modalities": ["text"], "guided_json_object": False, "prompt_logprobs": None, "max_tokens": 1}
    assert served.request("POST", CHAT, {"messages": MESSAGES} | nothing | more)[0] == 200


def test_refusals_say_what_helps(served: Served) -> None:
    """Neither the grammar that stands for a schema nor llguidance's names for its troubles."""
    for schema, said in (
        ({"$ref": "#"}, "refers to itself without end"),
        ({"not": {}}, 'Unimplemented keys: ["not"]'),
        ({"type": "objekt"}, "Invalid type: objekt"),
        ({"type": "string", "pattern": "(?=a)"}, "look-around"),
    ):
        for effort in ("none", "high"):  # also where a thinking goes before
            body = {"messages": MESSAGES, "reasoning_effort": effort, "response_format": schema_of(schema), "max_tokens": 4}
            status, _, answer = served.request("POST", CHAT, body)
            message = answer["error"]["message"]
            assert status == 400 and said in message, answer
            assert not any(word in message for word in ("x-guidance", "%json", "start:", "NoExtensionBias", "verbose")), message


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
NAMES = ["model", "messages", "prompt", "temperature", "top_p", "top_k", "min_p", "seed", "n", "stop", "stream", "stream_options", "logprobs"]
NAMES += [
    "top_logprobs",
    "max_completion_tokens",
    "stop_token_ids",
    "chat_template_kwargs",
    "reasoning_effort",
    "tool_choice",
    "tokens",
    "logit_bias",
]
PATHS = (CHAT, COMPLETIONS, "/tokenize", "/detokenize")


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.sampled_from(PATHS), st.dictionaries(st.sampled_from(NAMES), JSON, max_size=5), st.booleans())
def test_no_input_is_the_servers_fault(served: Served, path: str, given: dict[str, Any], valid: bool) -> None:
    """Random fields, half of the time around a request that would run."""
    base: dict[str, Any] = {"messages": MESSAGES, "prompt": "x", "max_tokens": 1} if path in (CHAT, COMPLETIONS) else {}
    body = (base if valid else {}) | given | {"max_tokens": 1}
    status, _, answer = served.request("POST", path, json.dumps(body).encode())
    assert status < 500 and (status == 200 or "error" in answer), answer


def test_tokens_and_text(served: Served) -> None:
    tokenizer = served.engine.tokenizer
    assert tokenizer is not None
    ids = tokenizer.encode("Hello <|user|> é")
    status, _, answer = served.request("POST", "/tokenize", {"prompt": "Hello <|user|> é", "return_token_strs": True})
    assert (status, answer["tokens"], answer["count"], answer["max_model_len"]) == (200, ids, len(ids), 512) and len(answer["token_strs"]) == len(ids)
    assert served.request("POST", "/detokenize", {"tokens": ids})[2] == {"prompt": "Hello <|user|> é"}
    chat = served.request("POST", "/tokenize", {"messages": MESSAGES})[2]
    assert chat["tokens"] == tokenizer.encode_chat(MESSAGES)


def test_state_routes(served: Served) -> None:
    assert served.request("GET", "/health")[0] == served.request("GET", "/ready")[0] == 200
    assert served.request("GET", "/version")[2] == {"version": "test"}


def test_a_server_that_loads_says_so() -> None:
    with running(None) as served:
        assert served.request("GET", "/health")[0] == 200
        for method, path in (("GET", "/ready"), ("POST", CHAT), ("POST", COMPLETIONS), ("POST", "/tokenize"), ("POST", "/detokenize")):
            status, headers, answer = served.request(method, path, {"messages": MESSAGES, "prompt": "x"} if method == "POST" else None)
            assert (status, answer["error"]["code"]) == (503, "loading") and int(headers["retry-after"]) >= 1
        assert served.request("GET", "/v1/models")[2]["data"][0]["max_model_len"] is None


def test_keys_sizes_and_origins(serve_with: Callable[..., Any]) -> None:
    with serve_with(api_keys=("one", "two"), body_bytes_max=2000, allowed_origins=("https://here",)) as served:
        for header in (None, "Bearer three", "Basic one", "one", "Bearer "):
            headers = {} if header is None else {"Authorization": header}
            status, sent, answer = served.request("GET", "/v1/models", headers=headers)
            assert (status, answer["error"]["code"]) == (401, "invalid_api_key") and "www-authenticate" in {name.lower() for name in sent}
        key = {"Authorization": "Bearer two"}
        assert served.request("GET", "/v1/models", headers=key)[0] == 200 == served.request("GET", "/health")[0]
        status, _, answer = served.request("POST", COMPLETIONS, {"prompt": "x" * 2000}, key)
        assert (status, answer["error"]["code"]) == (413, "request_too_large")
        for origin, allowed in (("https://here", "https://here"), ("https://there", None)):
            assert served.request("GET", "/health", headers={"Origin": origin})[1].get("access-control-allow-origin") == allowed


def test_no_origin_is_allowed_by_default(served: Served) -> None:
    assert "access-control-allow-origin" not in served.request("GET", "/health", headers={"Origin": "https://here"})[1]


def test_a_full_server_lets_some_wait_and_refuses_others(serve_with: Callable[..., Any]) -> None:
    with serve_with(waiting_max=1, queue_timeout_s=0.3) as served:
        held = [served.open(COMPLETIONS, LONG | {"stream": True}) for _ in range(3)]
        served.wait_for(Load(3, 0))
        slow: list[tuple[int, dict[str, str], Any]] = []
        waiting = threading.Thread(target=lambda: slow.append(served.request("POST", COMPLETIONS, LONG | {"stream": True})))
        started = time.monotonic()
        waiting.start()
        served.wait_for(Load(3, 1))
        status, headers, answer = served.request("POST", COMPLETIONS, LONG)
        assert (status, answer["error"]["code"]) == (429, "engine_busy") and int(headers["retry-after"]) >= 1
        said = "got 1 request beside 1 that have not started and 3 that run, wanted at most 1 waiting beside 3 running"
        assert said in answer["error"]["message"], answer
        for path, body in ((COMPLETIONS, LONG), (CHAT, {"messages": MESSAGES})):
            assert "wanted an integer from 1 to 4" in served.request("POST", path, body | {"n": 5})[2]["error"]["message"]
        waiting.join()
        if slow[0][0] != 200:  # none of the three has ended within the bound
            assert slow[0][0] == 429 and time.monotonic() - started >= 0.3 and int(slow[0][1]["retry-after"]) >= 1
        for sock in held:
            sock.close()
        served.wait_for(Load(0, 0))


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_its_request(served: Served, stream: bool) -> None:
    socks = [served.open(COMPLETIONS, LONG | {"stream": stream, "n": 2}) for _ in range(3)]
    served.wait_for(Load(3, 3))
    for sock in socks:
        sock.close()
    left = time.monotonic()
    served.wait_for(Load(0, 0))
    assert time.monotonic() - left < 1.0
    status, _, answer = served.request("POST", COMPLETIONS, {"prompt": "In the beginning", "temperature": 0, "model": NAME})
    alone = served.engine.generate("In the beginning", SamplingParams(temperature=0.0, max_tokens=16))
    assert status == 200 and answer["choices"][0]["text"] == alone.text


def test_what_does_not_fit_is_refused_with_the_numbers(serve_with: Callable[..., Any]) -> None:
    """As if the device had room for a few rows of index keys and one hot cache."""
    with serve_with() as served:
        books = served.loop.books
        one = books.cost(200, True)
        books.limits = tuple(
            replace(limit, byte_count=cost) if limit.place != "host" else limit for limit, cost in zip(books.limits, one, strict=True)
        )
        status, _, answer = served.request("POST", COMPLETIONS, {"prompt": [1] * 20, "max_tokens": 400})
        assert (status, answer["error"]["code"]) == (400, "never_fits")
        for part in ("420 rows", "device 0", "hot cache", "index keys", "--gpu-memory-utilization 0.9"):
            assert part in answer["error"]["message"], answer
        texts = [served.open(COMPLETIONS, {"prompt": [index] * 20, "max_tokens": 100, "ignore_eos": True}) for index in range(3)]
        served.wait_for(Load(1, 2))  # three slots, and memory for one of them
        for sock in texts:
            assert sock.recv(20).startswith(b"HTTP/1.1 200")
            sock.close()


@pytest.mark.parametrize("stream", [True, False])
def test_a_request_past_its_deadline_gets_504(served: Served, stream: bool) -> None:
    late = LONG | {"timeout_s": 0.05, "n": 3}
    status, _, answer = served.request("POST", COMPLETIONS, late | {"stream": stream})
    if status == 200:  # a stream that had begun ends with the error
        assert stream and b'"code":"deadline_exceeded"' in answer and answer.endswith(b"data: [DONE]\n\n")
    else:
        assert (status, answer["error"]["code"]) == (504, "deadline_exceeded")
    assert served.request("POST", COMPLETIONS, LONG | {"timeout_s": 0})[0] == 400
    served.wait_for(Load(0, 0))


def test_the_server_has_a_deadline_of_its_own(serve_with: Callable[..., Any]) -> None:
    with serve_with(request_timeout_s=0.05) as served:
        status, _, answer = served.request("POST", COMPLETIONS, LONG | {"n": 3})
        assert (status, answer["error"]["code"]) == (504, "deadline_exceeded")
        assert served.request("POST", COMPLETIONS, {"prompt": [1], "max_tokens": 1, "timeout_s": 30})[0] == 200
