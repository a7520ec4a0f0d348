"""The OpenAPI document (3.1) that the server gives of itself: every route, with the bounds that the code which reads bodies has.

Bounds and names come from the tables of that code and from the server's settings; `tests/serve/test_openapi.py` sends what the document allows and
what it does not, and compares names with those that the code asks for.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from glm53.sampling import LOGPROBS_MAX
from glm53.serve.formats import CHOICES_MAX as FORMAT_CHOICES_MAX
from glm53.serve.protocol import CHOICES_MAX, EFFORTS, PROMPTS_MAX, ROLES, SAMPLING, STOP_IDS_MAX, STOP_LENGTH_MAX, STOPS_MAX, TIMEOUT_S
from glm53.serve.session_files import NAME_PATTERN
from glm53.serve.session_routes import ROWS_MAX
from glm53.serve.sessions import ID_PATTERN, RESERVED_IDS
from glm53.serve.tool_use import TOOLS_MAX
from glm53.serve.tools import NAME_LENGTH_MAX

Schema = dict[str, Any]
JSON, EVENTS, TEXT = "application/json", "text/event-stream", "text/plain"
STRING: Schema = {"type": "string"}
FLAG: Schema = {"type": "boolean"}
COUNT: Schema = {"type": "integer", "minimum": 0}


@dataclass(frozen=True)
class Bounds:
    """What a server takes. context: tokens of a history, None while the model is being loaded; texts: of one call."""

    names: tuple[str, ...]
    context: int | None
    vocab: int | None
    texts: int


@dataclass(frozen=True)
class Operation:
    """A method of a path. body, answer: names of schemas; kind: media type of the answer. refusals: statuses beside those that every route has."""

    path: str
    method: str
    name: str
    summary: str
    answer: str | None
    body: str | None = None
    body_needed: bool = True
    kind: str = JSON
    refusals: tuple[int, ...] = ()
    streams: bool = False  # events instead, with `stream`
    parameters: tuple[str, ...] = field(default=())


SESSION_TEXT = (
    "The session to continue; one prompt and n 1. The prompt or the messages are the whole text from its beginning, not what is new: rows that the "
    "session shares with it are not computed again, and those behind are cut. Where that would cut rows of earlier prompts, the answer is 409 unless "
    "session_cut is true; rows of drawn tokens are always cut where the prompt differs."
)
SESSION_ID: Schema = STRING | {"pattern": f"^{ID_PATTERN}$", "not": {"enum": list(RESERVED_IDS)}}
FILE_NAME: Schema = STRING | {"pattern": f"^{NAME_PATTERN}$"}
PARAMETERS: dict[str, Schema] = {"id": SESSION_ID, "name": FILE_NAME, "model": STRING | {"minLength": 1}}
BODY = (400, 408, 413)
GENERATES = (*BODY, 404, 409, 429, 499, 503, 504)
ENGINE = (503,)
SESSION = ("id",)
OPERATIONS = (
    Operation("/v1/chat/completions", "post", "chat", "Answer a conversation.", "ChatCompletion", "ChatRequest", refusals=GENERATES, streams=True),
    Operation("/v1/completions", "post", "complete", "Continue texts.", "Completion", "CompletionRequest", refusals=GENERATES, streams=True),
    Operation("/v1/models", "get", "models", "List the names of the model.", "ModelList"),
    Operation("/v1/models/{model}", "get", "model", "Show a name of the model.", "Model", refusals=(404,), parameters=("model",)),
    Operation("/tokenize", "post", "tokenize", "Token ids of a text or a conversation.", "Tokens", "TokenizeRequest", refusals=(*BODY, 404, 503)),
    Operation("/detokenize", "post", "detokenize", "The text of token ids.", "Prompt", "DetokenizeRequest", refusals=(*BODY, 404, 503)),
    Operation("/v1/sessions", "get", "sessions", "List the key's sessions.", "SessionList", refusals=ENGINE),
    Operation("/v1/sessions", "post", "makeSession", "Make an empty session.", "Session", "NewSession", False, refusals=(*BODY, 409, 429, 503)),
    Operation("/v1/sessions/restore", "post", "restore", "Make a session of a file.", "Session", "Restore", refusals=(*BODY, 404, 409, 429, 503)),
    Operation("/v1/sessions/files", "get", "files", "List the key's session files.", "FileList", refusals=(400, 503)),
    Operation("/v1/sessions/files/{name}", "delete", "deleteFile", "Delete a file.", "DeletedFile", refusals=(400, 404, 503), parameters=("name",)),
    Operation("/v1/sessions/{id}", "get", "session", "Show a session.", "Session", refusals=(404, 503), parameters=SESSION),
    Operation("/v1/sessions/{id}", "delete", "deleteSession", "End a session.", "DeletedSession", refusals=(404, 409, 503), parameters=SESSION),
    Operation(
        "/v1/sessions/{id}/fork",
        "post",
        "fork",
        "Make a session of a session's first rows.",
        "Session",
        "Fork",
        False,
        refusals=(*BODY, 404, 409, 429, 503),
        parameters=SESSION,
    ),
    Operation(
        "/v1/sessions/{id}/truncate",
        "post",
        "truncate",
        "Keep a session's first rows.",
        "Session",
        "Truncate",
        refusals=(*BODY, 404, 409, 503),
        parameters=SESSION,
    ),
    Operation(
        "/v1/sessions/{id}/save",
        "post",
        "save",
        "Write a session to a file.",
        "SavedFile",
        "Save",
        refusals=(*BODY, 404, 409, 503, 507),
        parameters=SESSION,
    ),
    Operation("/health", "get", "health", "200 while the process can serve, also while it loads.", None, refusals=ENGINE),
    Operation("/ready", "get", "ready", "200 while requests are taken.", None, refusals=ENGINE),
    Operation("/version", "get", "version", "The server's version.", "Version"),
    Operation("/metrics", "get", "metrics", "Figures in the text format of Prometheus.", "Text", kind=TEXT),
    Operation("/openapi.json", "get", "document", "This document.", "Document"),
)
STATUSES = {
    400: "The request is wrong; the message says what, what was wanted and what to do.",
    401: "The key is missing or wrong.",
    404: "What is named does not exist, or is another key's.",
    408: "The rest of the body did not come.",
    409: "The session is at work, or would be cut, or the name is taken.",
    413: "The body is too large.",
    429: "As many as may are there already; Retry-After says when to come again, where time helps.",
    499: "The request was cancelled.",
    500: "The server is at fault.",
    503: "The model is being loaded, the device is lost, or the server is shutting down: a stream that had begun ends with this error and [DONE].",
    504: "The request's time was over before its first token.",
    507: "The files would need more than they may have, or than the disk has.",
}


def openapi_document(version: str, bounds: Bounds, with_keys: bool) -> dict[str, Any]:
    """The document. with_keys: whether requests need an API key."""
    paths: dict[str, Any] = {}
    for one in OPERATIONS:
        paths.setdefault(one.path, {})[one.method] = _operation(one, with_keys)
    components: dict[str, Any] = {"schemas": schemas(bounds)}
    if with_keys:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "glm53", "version": version, "description": "GLM-5.3 over the OpenAI API, and named sessions beside it."},
        "paths": paths,
        "components": components,
    }


def _operation(one: Operation, with_keys: bool) -> dict[str, Any]:
    open_path = not one.path.startswith("/v1") and one.body is None
    content = {} if one.answer is None else {one.kind: {"schema": _ref(one.answer)}}
    if one.streams:
        chunk = STRING | {"contentMediaType": JSON, "contentSchema": {"anyOf": [_ref(f"{one.answer}Chunk"), _ref("Error")]}}
        content[EVENTS] = {"schema": _object({"data": {"anyOf": [chunk, {"const": "[DONE]"}]}}, closed=False)}
    statuses = sorted({*one.refusals, 500, *([] if open_path or not with_keys else [401])})
    made: dict[str, Any] = {
        "operationId": one.name,
        "summary": one.summary,
        "responses": {
            "200": {"description": "Done.", **({"content": content} if content else {})},
            **{str(status): {"description": STATUSES[status], "content": {JSON: {"schema": _ref("Error")}}} for status in statuses},
        },
    }
    if with_keys and not open_path:
        made["security"] = [{"key": []}]
    if one.parameters:
        made["parameters"] = [{"name": name, "in": "path", "required": True, "schema": PARAMETERS[name]} for name in one.parameters]
    if one.body is not None:
        made["requestBody"] = {"required": one.body_needed, "content": {JSON: {"schema": _ref(one.body)}}}
    return made


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _object(properties: Schema, required: tuple[str, ...] | None = None, closed: bool = True) -> Schema:
    """required: None: all of them. Answers are closed; bodies are open, since unknown fields are ignored."""
    made: Schema = {"type": "object", "properties": properties, "required": list(properties if required is None else required)}
    return made | ({"additionalProperties": False} if closed else {})


def _or_null(schema: Schema) -> Schema:
    plain = isinstance(schema.get("type"), str) and "enum" not in schema
    return schema | {"type": [schema["type"], "null"]} if plain else {"anyOf": [schema, {"type": "null"}]}


def _body(properties: Schema, required: tuple[str, ...] = ()) -> Schema:
    """A body: what is not required may be null, which is as good as absent."""
    return _object({name: one if name in required else _or_null(one) for name, one in properties.items()}, required, closed=False)


def _list_of(item: Schema) -> Schema:
    return _object({"object": {"const": "list"}, "data": {"type": "array", "items": item}})


def schemas(bounds: Bounds) -> dict[str, Schema]:
    """Every schema of the document, by name."""
    return {**_requests(bounds), **_text_answers(), **_session_schemas()}


def _requests(bounds: Bounds) -> dict[str, Schema]:
    most = {} if bounds.context is None else {"maximum": bounds.context - 1}
    token: Schema = COUNT | ({} if bounds.vocab is None else {"maximum": bounds.vocab - 1})
    tokens: Schema = {"type": "array", "items": token}
    prompt_ids = tokens | {"minItems": 1} | ({} if bounds.context is None else {"maxItems": bounds.context - 1})
    text = STRING | {"minLength": 1}
    stop = STRING | {"minLength": 1, "maxLength": STOP_LENGTH_MAX}
    texts = min(CHOICES_MAX, bounds.texts)
    common: Schema = {
        "model": {"type": "string", "enum": list(bounds.names)},
        "max_tokens": {"type": "integer", "minimum": 1} | most,
        "max_completion_tokens": {"type": "integer", "minimum": 1} | most,
        "n": {"type": "integer", "minimum": 1, "maximum": texts},
        **{name: span.schema() for name, span in SAMPLING.items()},
        "stop": {"anyOf": [stop, {"type": "array", "items": stop, "maxItems": STOPS_MAX}]},
        "stop_token_ids": {"type": "array", "items": COUNT, "maxItems": STOP_IDS_MAX},
        "ignore_eos": FLAG,
        "timeout_s": TIMEOUT_S.schema(),
        "stream": FLAG,
        "stream_options": _body({"include_usage": FLAG}) | {"description": "Needs stream."},
        **_formats(),
        "session_id": STRING | {"description": SESSION_TEXT, "pattern": f"^{ID_PATTERN}$"},
        "session_cut": FLAG | {"description": "Rows of earlier prompts that this one does not share may be cut from the session."},
    }
    messages: Schema = {"type": "array", "minItems": 1, "items": _ref("Message")}
    template: Schema = {"reasoning_effort": STRING | {"enum": list(EFFORTS)}, "chat_template_kwargs": {"type": "object"}, "tools": _tools()}
    logprobs: Schema = {"type": "integer", "minimum": 0, "maximum": LOGPROBS_MAX}
    part = _object({"type": {"const": "text"}, "text": STRING}, closed=False)
    content: Schema = {"anyOf": [STRING, {"type": "array", "items": part}]}
    chat = {"messages": messages, **_tool_choice(), "logprobs": FLAG, "top_logprobs": logprobs | {"description": "Needs logprobs."}}
    prompts: Schema = {"anyOf": [text, prompt_ids, {"type": "array", "items": {"anyOf": [text, prompt_ids]}, "minItems": 1}]}
    prompts["anyOf"][2]["maxItems"] = min(PROMPTS_MAX, bounds.texts)
    return {
        "Message": {
            "anyOf": [
                _object({"role": {"enum": [role for role in ROLES if role != "assistant"]}, "content": content}, closed=False),
                _body({"role": {"const": "assistant"}, "content": content, "reasoning_content": STRING, "reasoning": STRING}, ("role",)),
            ]
        },
        "ChatRequest": _body(common | chat | template, ("messages",)),
        "CompletionRequest": _body(common | {"prompt": prompts, "logprobs": logprobs}, ("prompt",)),
        "TokenizeRequest": {
            "anyOf": [
                _body({"model": common["model"], "prompt": STRING, "return_token_strs": FLAG}, ("prompt",)) | {"not": _has("messages")},
                _body(
                    {"model": common["model"], "messages": messages, "return_token_strs": FLAG, "add_generation_prompt": FLAG} | template,
                    ("messages",),
                )
                | {"not": _has("prompt")},
            ]
        },
        "DetokenizeRequest": _body({"model": common["model"], "tokens": tokens}),
    }


def _tools() -> Schema:
    name = STRING | {"minLength": 1, "maxLength": NAME_LENGTH_MAX, "pattern": "^[A-Za-z0-9_.-]+$"}
    function = _body({"name": name, "description": STRING, "parameters": {"type": "object"}, "strict": FLAG}, ("name",))
    return _array(_object({"type": {"const": "function"}, "function": function}, closed=False)) | {"maxItems": TOOLS_MAX}


def _tool_choice() -> Schema:
    one = _object({"type": {"const": "function"}, "function": _object({"name": STRING}, closed=False)}, closed=False)
    some = _object({"mode": {"enum": ["auto", "required"]}, "tools": _array(one) | {"minItems": 1, "maxItems": TOOLS_MAX}}, closed=False)
    allowed = _object({"type": {"const": "allowed_tools"}, "allowed_tools": some}, closed=False)
    return {"tool_choice": {"anyOf": [{"enum": ["none", "auto", "required"]}, one, allowed]}, "parallel_tool_calls": FLAG}


def _formats() -> Schema:
    """Fields that say what form a text must have, one of them at most."""
    schema: Schema = {"type": "object", "description": "A JSON schema."}
    texts = _array(STRING | {"minLength": 1}) | {"minItems": 1, "maxItems": FORMAT_CHOICES_MAX}
    kinds: Schema = {"json": schema, "regex": STRING, "choice": texts, "grammar": STRING, "json_object": FLAG}
    of_schema = _body({"name": STRING, "description": STRING, "strict": FLAG, "schema": schema}, ("schema",))
    wholes = _object({"type": {"enum": ["text", "json_object"]}}, closed=False)
    of_json = _object({"type": {"const": "json_schema"}, "json_schema": of_schema}, closed=False)
    nothing: Schema = {"type": "object", "maxProperties": 0}
    return {
        "response_format": {"anyOf": [wholes, of_json, nothing]},
        "structured_outputs": {"anyOf": [*(_object({name: one}) for name, one in kinds.items()), nothing]},
        **{f"guided_{name}": one for name, one in kinds.items()},
    }


def _has(name: str) -> Schema:
    return {"required": [name], "properties": {name: {"not": {"type": "null"}}}}


def _text_answers() -> dict[str, Schema]:
    usage = _object(
        {
            "prompt_tokens": COUNT,
            "completion_tokens": COUNT,
            "total_tokens": COUNT,
            "prompt_tokens_details": _object({"cached_tokens": COUNT}),
            "completion_tokens_details": _object({"reasoning_tokens": COUNT}),
        }
    )
    token: Schema = {"token": STRING, "logprob": {"type": "number"}, "bytes": {"type": "array", "items": COUNT | {"maximum": 255}}}
    chat_logprobs = _object({"content": {"type": "array", "items": _object(token | {"top_logprobs": _array(_object(token))})}, "refusal": {}})
    numbers, strings = _array({"type": "number"}), _array(STRING)
    top = _array({"type": "object", "additionalProperties": {"type": "number"}})
    logprobs = _object({"tokens": strings, "token_logprobs": numbers, "top_logprobs": top, "text_offset": _array(COUNT)})
    message = _object(
        {"role": {"const": "assistant"}, "content": _or_null(STRING), "refusal": {}, "reasoning_content": _or_null(STRING)}, closed=False
    )
    ends: Schema = {"enum": ["stop", "length", "tool_calls"]}
    head: Schema = {"id": STRING, "created": COUNT, "model": STRING}
    chosen = _object({"index": COUNT, "message": message, "logprobs": _or_null(chat_logprobs), "finish_reason": ends})
    continued = _object({"index": COUNT, "text": STRING, "logprobs": _or_null(logprobs), "finish_reason": ends})
    delta = _object({"role": {"const": "assistant"}, "content": STRING, "reasoning_content": STRING, "tool_calls": {"type": "array"}}, ())
    ends_or_not = {"enum": [*ends["enum"], None]}
    said = _object({"index": COUNT, "delta": delta, "logprobs": _or_null(chat_logprobs), "finish_reason": ends_or_not})
    goes_on = _object({"index": COUNT, "text": STRING, "logprobs": _or_null(logprobs), "finish_reason": ends_or_not})
    name, nothing = _or_null(STRING), {"type": "null"}
    model = {"id": STRING, "object": {"const": "model"}, "created": COUNT, "owned_by": STRING, "root": STRING, "parent": nothing}
    return {
        "Error": _object({"error": _object({"message": STRING | {"minLength": 1}, "type": STRING, "param": name, "code": name})}),
        "ChatCompletion": _object(head | {"object": {"const": "chat.completion"}, "choices": _array(chosen), "usage": usage}),
        "Completion": _object(head | {"object": {"const": "text_completion"}, "choices": _array(continued), "usage": usage}),
        "ChatCompletionChunk": _chunk(head, "chat.completion.chunk", said, usage),
        "CompletionChunk": _chunk(head, "text_completion", goes_on, usage),
        "Model": _object(model | {"max_model_len": _or_null(COUNT)}),
        "ModelList": _list_of(_ref("Model")),
        "Tokens": _object({"count": COUNT, "max_model_len": COUNT, "tokens": _array(COUNT), "token_strs": _or_null(strings)}),
        "Prompt": _object({"prompt": STRING}),
        "Version": _object({"version": STRING}),
        "Text": STRING,
        "Document": {"type": "object"},
    }


def _chunk(head: Schema, kind: str, choice: Schema, usage: Schema) -> Schema:
    every = head | {"object": {"const": kind}, "choices": _array(choice)}
    return _object(every | {"usage": _or_null(usage)}, tuple(every))


def _array(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _session_schemas() -> dict[str, Schema]:
    rows: Schema = {"type": "integer", "minimum": 0, "maximum": ROWS_MAX}
    figures = {"created": COUNT, "last_used": COUNT, "model": STRING, "state": STRING, "rows": COUNT, "prompt_rows": COUNT, "host_bytes": COUNT}
    session, file = {"id": STRING, "object": {"const": "session"}}, {"name": STRING, "object": {"const": "session.file"}}
    return {
        "Session": _object(session | figures),
        "SessionList": _list_of(_ref("Session")),
        "DeletedSession": _object(session | {"deleted": {"const": True}}),
        "SavedFile": _object(file | {"bytes": COUNT, "rows": COUNT}),
        "FileList": _list_of(_object(file | {"bytes": COUNT, "created": COUNT})),
        "DeletedFile": _object(file | {"deleted": {"const": True}}),
        "NewSession": _body({"id": SESSION_ID}),
        "Fork": _body({"rows": rows, "id": SESSION_ID}),
        "Truncate": _body({"rows": rows}, ("rows",)),
        "Save": _body({"name": FILE_NAME}, ("name",)),
        "Restore": _body({"name": FILE_NAME, "id": SESSION_ID}, ("name",)),
    }
