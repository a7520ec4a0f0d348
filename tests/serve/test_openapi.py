"""The OpenAPI document: it has every route, names every field that is read, and random requests made from it get the answers that it promises."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import content_type_conformance, negative_data_rejection, response_schema_conformance, status_code_conformance
from serve_scene import NAME, Served, running

from glm53 import Engine, SamplingParams
from glm53.serve import protocol
from glm53.serve.fields import Fields
from glm53.serve.openapi import OPERATIONS, Bounds, openapi_document, schemas
from glm53.serve.session_files import SessionFiles

EXAMPLES = 12  # an operation
# Fields of a call that are read to be refused: asking for what is not there must not pass in silence.
REFUSED = {*protocol.REFUSED, *protocol.CHAT_REFUSED, *protocol.COMPLETION_REFUSED, "best_of", "functions", "function_call"}


@pytest.fixture(scope="module")
def small(demo_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Few tokens fit, so that no call is long."""
    files = SessionFiles(tmp_path_factory.mktemp("files"), 8 << 20)
    settings = {"context_rows_max": 64, "sessions_max": 2, "prefill_chunk_rows": 32, "hot_rows": 256}
    with Engine.open(demo_path, **settings) as engine, running(engine, waiting_max=3, sessions_per_key=5, session_files=files) as served:
        yield served


def document(served: Served) -> dict[str, Any]:
    status, _, answer = served.request("GET", "/openapi.json")
    assert status == 200
    return answer  # type: ignore[no-any-return]


def test_every_route_is_there(small: Served) -> None:
    app: Any = small.api.app
    routes = {(route.path.replace(":path", ""), method.lower()) for route in app.app.app.routes for method in route.methods - {"HEAD"}}
    given = document(small)
    assert {(path, method) for path, methods in given["paths"].items() for method in methods} == routes
    assert given["openapi"] == "3.1.0" and len({one.name for one in OPERATIONS}) == len(OPERATIONS)
    for schema in given["components"]["schemas"].values():
        jsonschema_rs.meta.validate(schema)


def test_bounds_are_those_of_the_code(small: Served) -> None:
    chat = document(small)["components"]["schemas"]["ChatRequest"]["properties"]
    assert chat["n"]["maximum"] == 5 and chat["max_tokens"]["maximum"] == 63 and chat["model"]["anyOf"][0]["enum"] == [NAME]
    message = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "temperature": 0}
    for name, schema in chat.items():
        for bound, step in (("minimum", -1), ("exclusiveMinimum", 0), ("maximum", 1)):
            if bound in schema and name not in ("top_logprobs",):
                status, _, answer = small.request("POST", "/v1/chat/completions", message | {name: schema[bound] + step})
                assert status == 400 and answer["error"]["param"] == name, (name, bound, answer)
                if step:
                    status, _, answer = small.request("POST", "/v1/chat/completions", message | {name: schema[bound]})
                    assert status == 200 or answer["error"]["code"] == "context_length_exceeded", (name, bound, answer)


@pytest.mark.parametrize(
    ("schema", "call", "body"), [("ChatRequest", protocol.chat_call, "messages"), ("CompletionRequest", protocol.completion_call, "prompt")]
)
def test_every_field_that_is_read_is_documented(schema: str, call: Any, body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    every: list[Fields] = []
    monkeypatch.setattr(protocol, "Fields", lambda *given: every.append(Fields(*given)) or every[-1])  # type: ignore[func-returns-value]
    for newer in ("max_tokens", "max_completion_tokens"):
        call({body: [{"role": "user", "content": "x"}] if body == "messages" else "x", newer: 1}, SamplingParams())
    read = {name for one in every if not one.path for name in one.names}
    documented = set(schemas(Bounds((NAME,), 64, 100, 4))[schema]["properties"])
    assert read - REFUSED == documented


def test_an_unknown_field_is_ignored_and_said_once(small: Served, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("DEBUG", "glm53.serve"):
        for _ in range(2):
            status, _, answer = small.request("POST", "/v1/completions", {"prompt": "x", "max_tokens": 1, "no_such_field": {"a": 1}, "user": "me"})
            assert status == 200, answer
    assert ["no_such_field" in one.getMessage() and "ignored" in one.getMessage() for one in caplog.records].count(True) == 1


def test_keys_are_part_of_it() -> None:
    given = openapi_document("1", Bounds((NAME,), None, None, 3), True)
    assert given["components"]["securitySchemes"] == {"key": {"type": "http", "scheme": "bearer"}}
    secured = {path for path, methods in given["paths"].items() for one in methods.values() if "security" in one}
    assert secured == {path for path in given["paths"] if path.startswith("/v1")} | {"/tokenize", "/detokenize"}


CHECKS = (status_code_conformance, content_type_conformance, response_schema_conformance)


@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
def test_random_requests(small: Served, mode: GenerationMode) -> None:
    """No answer is the server's fault, each has a documented status, type and shape. What the document allows is carried out, or refused for what no
    schema can say; what it does not allow is refused."""
    schema = schemathesis.openapi.from_dict(document(small))
    schema.config.update(base_url=f"http://127.0.0.1:{small.port}")
    statuses = {}
    for result in schema.get_all_operations():
        operation = result.ok()
        if mode is GenerationMode.POSITIVE or operation.body:
            statuses[operation.label] = answers_to(operation, mode)
    if mode is GenerationMode.POSITIVE:
        assert len(statuses) == len(OPERATIONS)
        for label in ("POST /v1/chat/completions", "POST /v1/completions", "POST /v1/sessions", "POST /tokenize", "GET /metrics"):
            assert 200 in statuses[label], statuses


@pytest.mark.parametrize(
    ("path", "body", "name"), [("chat/completions", {"messages": [{"role": "user", "content": "x"}]}, "Chat"), ("completions", {"prompt": "x"}, "")]
)
def test_chunks_are_as_documented(small: Served, path: str, body: dict[str, Any], name: str) -> None:
    given = document(small)
    chunk = jsonschema_rs.validator_for({"$ref": f"#/components/schemas/{name or ''}CompletionChunk", "components": given["components"]})
    events = small.events(f"/v1/{path}", body | {"max_tokens": 5, "logprobs": name == "Chat" or 2, "stream_options": {"include_usage": True}})
    assert events.pop() == "[DONE]" and len(events) > 3
    for event in events:
        chunk.validate(json.loads(event))


def answers_to(operation: Any, mode: GenerationMode) -> set[int]:
    """Statuses of random requests, each of which was checked."""
    seen: set[int] = set()

    @settings(max_examples=EXAMPLES, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck), phases=[Phase.generate])
    @given(case=operation.as_strategy(generation_mode=mode))
    def call(case: Any) -> None:
        response = case.call(timeout=30)
        seen.add(response.status_code)
        assert response.status_code < 500 or response.status_code in (504, 507), response.content  # a deadline, a full disk
        case.validate_response(response, checks=[*CHECKS, negative_data_rejection])
        if mode is GenerationMode.POSITIVE and response.status_code != 200:
            assert beyond_schemas(response.status_code, response.json()["error"]), (case.body, response.json())

    call()
    return seen


def beyond_schemas(status: int, error: dict[str, Any]) -> bool:
    """Whether a refusal is due to what exists, to what there is room for, or to two fields together."""
    if status in (404, 409, 429, 504, 507) or error["code"] == "context_length_exceeded":
        return True
    param = error["param"] or ""
    formed = param.startswith(("tools", "tool_choice", "response_format", "structured_outputs", "guided_"))  # grammars, and two at a time
    return formed or param in ("top_logprobs", "stream_options", "session_id", "rows") or "texts asked at once" in error["message"]
