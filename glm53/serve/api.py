"""The HTTP API: routes, access, limits, and what is asked of the engine. `Api.app` is an ASGI application; `Api.start` gives it an engine."""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from glm53.engine import Engine
from glm53.errors import Glm53Error
from glm53.sampling import SamplingParams
from glm53.serve.answers import ChatForm, CompletionForm, Form
from glm53.serve.fields import ApiError, Fields, parse_object
from glm53.serve.generation import CLIENT_LEFT, RETRY_AFTER_S, Asked, Generation, api_error, error_response, json_response
from glm53.serve.loop import Loop
from glm53.serve.protocol import COMPLETION_TOKENS, Call, chat_call, completion_call, tokenize_call
from glm53.serve.reasoning import starts_thinking

OPEN_PATHS = ("/health", "/ready", "/version")  # answered without a key
log = logging.getLogger("glm53.serve")


@dataclass(frozen=True)
class ServeConfig:
    """Settings of a server. names: that the model answers to, the first is the one it is listed under."""

    names: tuple[str, ...]
    version: str
    api_keys: tuple[str, ...] = ()  # none: everybody
    allowed_origins: tuple[str, ...] = ()  # for CORS; none: off
    waiting_max: int = 64  # requests that wait for a session
    queue_timeout_s: float = 60.0
    body_bytes_max: int = 32 << 20
    chunks_per_step: int = 1
    decode_max: int = 0  # 0: as many as sessions


class Api:
    """See the module. Before `start` every route that needs the engine answers 503."""

    def __init__(self, config: ServeConfig):
        self.config = config
        self._engine: Engine | None = None
        self._loop: Loop | None = None
        self._created = int(time.time())
        self.app = self._make_app()

    def start(self, engine: Engine) -> None:
        """Takes requests from now on. The engine stays its caller's, to be closed after `close`."""
        self._loop = Loop(engine, self.config.waiting_max, self.config.chunks_per_step, self.config.decode_max)
        self._engine = engine

    def close(self) -> None:
        """Ends every request and the loop's thread. Idempotent."""
        if self._loop is not None:
            self._loop.close()

    def _make_app(self) -> Starlette:
        posts: dict[str, Callable[[Request], Any]] = {
            "/v1/chat/completions": self._chat,
            "/v1/completions": self._completions,
            "/tokenize": self._tokenize,
            "/detokenize": self._detokenize,
        }
        gets: dict[str, Callable[[Request], Any]] = {
            "/v1/models": self._models,
            "/v1/models/{model:path}": self._model,
            "/health": self._health,
            "/ready": self._ready,
            "/version": self._version,
        }
        routes = [Route(path, made, methods=["POST"]) for path, made in posts.items()]
        routes += [Route(path, made, methods=["GET"]) for path, made in gets.items()]
        middleware = [Middleware(_Keys, keys=self.config.api_keys)]
        if self.config.allowed_origins:
            cors = Middleware(CORSMiddleware, allow_origins=list(self.config.allowed_origins), allow_methods=["*"], allow_headers=["*"])
            middleware.insert(0, cors)
        handlers: dict[Any, Any] = {ApiError: _on_api_error, HTTPException: _on_http_error, ClientDisconnect: _on_left, Exception: _on_bug}
        return Starlette(routes=routes, middleware=middleware, exception_handlers=handlers)

    # State

    async def _health(self, request: Request) -> Response:
        """200 as long as the process can serve, loading included; 503 when its device is lost."""
        fatal = self._loop.fatal if self._loop is not None else None
        if fatal is not None:
            raise ApiError(str(fatal), 503, code="engine_dead")
        return Response(status_code=200)

    async def _ready(self, request: Request) -> Response:
        self._serving()
        return await self._health(request)

    async def _version(self, request: Request) -> Response:
        return json_response({"version": self.config.version})

    def _serving(self) -> tuple[Engine, Loop]:
        if self._engine is None or self._loop is None:
            raise ApiError("the model is being loaded", 503, code="loading", retry_after_s=RETRY_AFTER_S)
        return self._engine, self._loop

    # Models

    def _card(self, name: str) -> dict[str, Any]:
        engine = self._engine
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "glm53",
            "root": self.config.names[0],
            "parent": None,
            "max_model_len": engine.context_rows_max if engine is not None else None,
        }

    async def _models(self, request: Request) -> Response:
        return json_response({"object": "list", "data": [self._card(name) for name in self.config.names]})

    async def _model(self, request: Request) -> Response:
        name = request.path_params["model"]
        self._check_model(name)
        return json_response(self._card(name))

    def _check_model(self, name: str | None) -> str:
        if name is not None and name not in self.config.names:
            raise ApiError(f"the model {name[:200]!r} does not exist; here is {', '.join(self.config.names)}", 404, "model", "model_not_found")
        return name or self.config.names[0]

    # Text

    async def _tokenize(self, request: Request) -> Response:
        engine, _ = self._serving()
        body = await self._body(request)
        self._check_model(Fields(body).text("model"))
        text, messages, settings = tokenize_call(body)
        if messages is not None:
            ids = (await asyncio.to_thread(_chat_prompt, engine, messages, settings))[0]
        else:
            ids = await asyncio.to_thread(_encode, engine, text or "")
        out: dict[str, Any] = {"count": len(ids), "max_model_len": engine.context_rows_max, "tokens": ids, "token_strs": None}
        if Fields(body).flag("return_token_strs") and engine.tokenizer is not None:
            out["token_strs"] = [engine.tokenizer.token_bytes(i).decode("utf-8", errors="replace") for i in ids]
        return json_response(out)

    async def _detokenize(self, request: Request) -> Response:
        engine, _ = self._serving()
        fields = Fields(await self._body(request))
        self._check_model(fields.text("model"))
        ids = fields.several("tokens", int, "a list of token ids", self.config.body_bytes_max)
        wrong = next((i for i in ids if not 0 <= i < engine.spec.vocab_size), None)
        if wrong is not None:
            raise ApiError(f"tokens: token id {wrong}, wanted ids in [0, {engine.spec.vocab_size})", param="tokens")
        if engine.tokenizer is None:
            raise ApiError("this model has no tokenizer.json")
        return json_response({"prompt": await asyncio.to_thread(engine.tokenizer.decode, ids, False)})

    # Generation

    async def _chat(self, request: Request) -> Generation:
        engine, loop = self._serving()
        call = chat_call(await self._body(request), engine.default_params())
        model = self._check_model(call.model)
        ids, thinking = await asyncio.to_thread(_chat_prompt, engine, call.messages, call.settings)
        form = ChatForm(model, engine.tokenizer, call.logprobs is not None)
        asked = await asyncio.to_thread(_asked, engine, call, [ids], None, thinking, form)
        return Generation(self._fitting(loop, asked), asked, self.config.queue_timeout_s)

    async def _completions(self, request: Request) -> Generation:
        engine, loop = self._serving()
        call = completion_call(await self._body(request), engine.default_params())
        form = CompletionForm(self._check_model(call.model), engine.tokenizer, call.logprobs is not None)
        prompts = [await asyncio.to_thread(_encode, engine, one) if isinstance(one, str) else one for one in call.prompts]
        asked = await asyncio.to_thread(_asked, engine, call, prompts, COMPLETION_TOKENS, False, form)
        return Generation(self._fitting(loop, asked), asked, self.config.queue_timeout_s)

    def _fitting(self, loop: Loop, asked: Asked) -> Loop:
        """Refuses a call that would be too much even for an idle server."""
        most = self.config.waiting_max + loop.engine.sessions_max
        if len(asked.requests) > most:
            raise ApiError(f"{len(asked.requests)} texts asked at once (prompts times n), this server takes at most {most}", param="n")
        return loop

    async def _body(self, request: Request) -> dict[str, Any]:
        most = self.config.body_bytes_max
        too_large = ApiError(f"the body is larger than {most} bytes", 413, code="request_too_large")
        stated = request.headers.get("content-length", "")
        if stated.isdecimal() and int(stated[:20]) > most:
            raise too_large
        raw = bytearray()
        async for part in request.stream():
            raw += part
            if len(raw) > most:
                raise too_large
        return parse_object(bytes(raw))


def _encode(engine: Engine, text: str) -> list[int]:
    try:
        return engine.encode(text)
    except Glm53Error as error:
        raise ApiError(str(error), param="prompt") from None


def _chat_prompt(engine: Engine, messages: Sequence[dict[str, Any]], settings: dict[str, Any]) -> tuple[list[int], bool]:
    """Token ids of a conversation, and whether the reply starts inside its thinking."""
    if engine.tokenizer is None:
        raise ApiError("this model has no tokenizer.json: use /v1/completions with token ids")
    try:
        text = engine.tokenizer.render_chat(messages, **settings)
        return engine.tokenizer.encode(text, parse_special=True), starts_thinking(text)
    except Glm53Error as error:
        raise ApiError(str(error), param="messages") from None
    except (ArithmeticError, RecursionError, LookupError, TypeError, ValueError) as error:  # a template on values of any type
        raise ApiError(f"the chat template refuses these messages: {error}", param="messages") from None


def _asked(engine: Engine, call: Call, prompts: Sequence[list[int]], tokens: int | None, thinking: bool, form: Form) -> Asked:
    """A call's requests. tokens: how many to draw if the call does not say; None: what the context holds. Raises ApiError for what never fits."""
    params: SamplingParams
    requests, context = [], engine.context_rows_max
    for ids in prompts:
        room = context - len(ids)
        if call.max_tokens is not None and call.max_tokens > room > 0:
            raise ApiError(
                f"this model's maximum context length is {context} tokens: the prompt has {len(ids)} and {call.max_tokens} were asked for, "
                f"{room} at most; shorten the prompt or lower {call.max_tokens_name}",
                param=call.max_tokens_name,
                code="context_length_exceeded",
            )
        for index in range(call.n):
            params = call.choice_params(index, call.max_tokens or max(min(tokens or room, room), 1))
            try:
                requests.append(engine.request(ids, params))
            except Glm53Error as error:
                if room <= 0:
                    message = f"this model's maximum context length is {context} tokens: the prompt has {len(ids)}, wanted at most {context - 1}"
                    raise ApiError(message, param="messages" if thinking else "prompt", code="context_length_exceeded") from None
                raise api_error(error) from None
    return Asked(requests, sum(map(len, prompts)), call.n, thinking, call.stream, call.include_usage, form)


class _Keys:
    """Lets only those in who have a key, if there are keys."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]):
        self.app, self._keys = app, [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._keys and scope["path"] not in OPEN_PATHS and not self._known(scope):
            error = ApiError("wrong or missing API key; next: send Authorization: Bearer KEY", 401, code="invalid_api_key")
            await error_response(error)(scope, receive, send)
            return
        await self.app(scope, receive, send)

    def _known(self, scope: Scope) -> bool:
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        kind, _, token = given.partition(b" ")
        matches = [hmac.compare_digest(token.strip(), key) for key in self._keys]  # all of them, so that time tells nothing
        return kind.lower() == b"bearer" and any(matches)


async def _on_api_error(request: Request, error: ApiError) -> Response:
    return error_response(error)


async def _on_http_error(request: Request, error: HTTPException) -> Response:
    message = f"{request.method} {request.url.path[:200]}: {error.detail}"
    answer = error_response(ApiError(message, error.status_code))
    answer.headers.update(error.headers or {})
    return answer


async def _on_left(request: Request, error: ClientDisconnect) -> Response:
    return Response(status_code=CLIENT_LEFT)


async def _on_bug(request: Request, error: Exception) -> Response:
    log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return error_response(ApiError("the server failed; its log says why", 500, code="internal_error"))
