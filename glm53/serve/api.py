"""The HTTP API: routes, access, limits, and what is asked of the engine. `Api.app` is an ASGI application; `Api.start` gives it an engine."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from glm53.engine import Engine
from glm53.errors import DeviceMemoryError, Glm53Error, InputError
from glm53.grammar import GrammarConstraint, Grammars
from glm53.prices import SHARE
from glm53.sampling import SamplingParams
from glm53.serve.access import Counted, Keys, owner_of
from glm53.serve.answers import ChatForm, CompletionForm, Form
from glm53.serve.drain import Drain, shutting_down
from glm53.serve.fields import ApiError, Fields, parse_object
from glm53.serve.figures import FigureReader, Figures
from glm53.serve.generation import CLIENT_LEFT, RETRY_AFTER_S, Asked, Generation, api_error, error_response, json_response
from glm53.serve.loop import Loop
from glm53.serve.metrics import CONTENT_TYPE, Metrics
from glm53.serve.openapi import Bounds, openapi_document
from glm53.serve.protocol import CHOICES_MAX, COMPLETION_TOKENS, Call, ChatCall, chat_call, completion_call, tokenize_call
from glm53.serve.reasoning import THINK_CLOSE, starts_thinking
from glm53.serve.session_files import SessionFiles
from glm53.serve.session_routes import SessionRoutes
from glm53.serve.sessions import Named, Sessions
from glm53.serve.stats import StatsLog, room_lines

Handler = Callable[[Request], Awaitable[Any]]
ANSWERS_S = 2.0  # for the last answers of a server that ends
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
    body_silence_s: float = 60.0  # between two parts of a body at most
    chunks_per_step: int = 1
    decode_max: int = 0  # 0: as many as sessions
    parked_max: int | None = None  # requests in turns beside those with a slot; None: as many again
    keeps_prompts: bool = True
    device_share: float = SHARE  # of the device memory that is free once the engine is open, for histories
    default_tokens: int = 4096  # that a request without max_tokens gets at least, where the context and the memory hold them
    request_timeout_s: float | None = None  # for requests that do not say
    sessions_per_key: int = 64  # named ones
    session_files: SessionFiles | None = None  # where they are saved; None: nowhere


class Api:
    """See the module. Before `start` every route that needs the engine answers 503."""

    def __init__(self, config: ServeConfig):
        self.config = config
        self._engine: Engine | None = None
        self._grammars: Grammars | None = None
        self._loop: Loop | None = None
        self._figures: FigureReader | None = None
        self._sessions: Sessions | None = None
        self._created = int(time.time())
        self.metrics = Metrics(config.names[0])
        self.app = self._make_app()

    def start(self, engine: Engine) -> None:
        """Takes requests from now on. The engine stays its caller's, to be closed after `close`. Raises DeviceMemoryError if no request would fit."""
        config = self.config
        parked_max = engine.sessions_max if config.parked_max is None else config.parked_max
        settings = (config.waiting_max, config.chunks_per_step, config.decode_max, parked_max, config.keeps_prompts, config.device_share)
        self._loop = Loop(engine, *settings)
        rows = min(engine.config.extent_rows, engine.context_rows_max)
        refusal = self._loop.books.never(rows)
        if refusal is not None:
            raise DeviceMemoryError(
                f"no request would fit: {refusal}; next: raise --gpu-memory-utilization or --host-kv-gib, lower --max-num-seqs or --hot-rows, "
                "or use --kv-tier host"
            )
        self._figures = FigureReader(self._loop)
        self._sessions = Sessions(self._loop, self.config.sessions_per_key, self.config.session_files)
        if engine.tokenizer is not None:
            self._grammars = Grammars(engine.tokenizer, engine.spec.vocab_size, engine.spec.eos_token_ids)
        self._engine = engine

    def close(self) -> None:
        """Ends every request, saves and restores, and the loop's thread. Idempotent."""
        if self._sessions is not None:
            self._sessions.close()
        if self._loop is not None:
            self._loop.close()

    async def drain(self, timeout_s: float, hurry: asyncio.Event) -> None:
        """Refuses new requests, gives those that run `timeout_s` or until `hurry` is set, then ends them with an answer, and closes."""
        drain = self._drain
        drain.begun = True
        if drain.running:
            log.info("requests that still run: %d, for %g s at most or until another signal", drain.running, timeout_s)
        if not await drain.idle(timeout_s, hurry):
            log.warning("requests that are ended before they are done: %d", drain.running)
        drain.ending.set()
        await asyncio.to_thread(self.close)
        await drain.idle(ANSWERS_S, asyncio.Event())

    def _make_app(self) -> ASGIApp:
        handlers: dict[str, dict[str, Handler]] = {
            "/v1/chat/completions": {"POST": self._chat},
            "/v1/completions": {"POST": self._completions},
            "/v1/models": {"GET": self._models},
            "/v1/models/{model:path}": {"GET": self._model},
            "/tokenize": {"POST": self._tokenize},
            "/detokenize": {"POST": self._detokenize},
            "/health": {"GET": self._health},
            "/ready": {"GET": self._ready},
            "/version": {"GET": self._version},
            "/metrics": {"GET": self._metrics},
            "/openapi.json": {"GET": self._document},
            **SessionRoutes(self.config.names[0], self._sessions_open, partial(self._body, may_be_empty=True)).handlers(),
        }
        routes = [Route(path, _by_method(methods), methods=list(methods)) for path, methods in handlers.items()]
        middleware = [Middleware(Keys, keys=self.config.api_keys)]
        if self.config.allowed_origins:
            cors = Middleware(CORSMiddleware, allow_origins=list(self.config.allowed_origins), allow_methods=["*"], allow_headers=["*"])
            middleware.insert(0, cors)
        on_error: dict[Any, Any] = {ApiError: _on_api_error, HTTPException: _on_http_error, ClientDisconnect: _on_left, Exception: _on_bug}
        self._drain = Drain(Starlette(routes=routes, middleware=middleware, exception_handlers=on_error))
        return Counted(self._drain, self.metrics.answered)

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

    def stats(self) -> StatsLog:
        """Of a server that takes requests; says at once what there is room for."""
        _, loop = self._serving()
        for line in room_lines(loop):
            log.info(line)
        return StatsLog(self.metrics, loop.load, self.figures)

    async def figures(self) -> Figures | None:
        """The engine's figures, not older than a few seconds where it answers; None before `start`."""
        return await self._figures.read() if self._figures is not None else None

    async def _metrics(self, request: Request) -> Response:
        self.metrics.figures = await self.figures()
        self.metrics.load = self._loop.load() if self._loop is not None else None
        return Response(self.metrics.text(), media_type=CONTENT_TYPE)

    def _sessions_open(self) -> Sessions:
        self._serving()
        assert self._sessions is not None
        return self._sessions

    def _serving(self) -> tuple[Engine, Loop]:
        if self._engine is None or self._loop is None:
            raise ApiError("the model is being loaded", 503, code="loading", retry_after_s=RETRY_AFTER_S)
        return self._engine, self._loop

    async def _document(self, request: Request) -> Response:
        engine = self._engine
        context, vocab = (None, None) if engine is None else (engine.context_rows_max, engine.spec.vocab_size)
        bounds = Bounds(self.config.names, context, vocab, self._texts_max())
        return json_response(openapi_document(self.config.version, bounds, bool(self.config.api_keys)))

    def _texts_max(self) -> int:
        """Texts of one call at most, even on an idle server."""
        return self.config.waiting_max + (1 if self._engine is None else self._engine.sessions_max)

    def _choices_max(self) -> int:
        return min(CHOICES_MAX, self._texts_max())

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
        ids = fields.integers("tokens", "a list of token ids", self.config.body_bytes_max)
        wrong = next((i for i in ids if not 0 <= i < engine.spec.vocab_size), None)
        if wrong is not None:
            raise ApiError(f"tokens: token id {wrong}, wanted ids in [0, {engine.spec.vocab_size})", param="tokens")
        if engine.tokenizer is None:
            raise ApiError("this model has no tokenizer.json")
        return json_response({"prompt": await asyncio.to_thread(engine.tokenizer.decode, ids, False)})

    # Generation

    async def _chat(self, request: Request) -> Generation:
        engine, loop = self._serving()
        call = chat_call(await self._body(request), engine.default_params(), self._choices_max())
        model = self._check_model(call.model)
        ids, thinking = await asyncio.to_thread(_chat_prompt, engine, call.messages, call.settings)
        form = ChatForm(model, engine.tokenizer, call.logprobs is not None)
        asked = await asyncio.to_thread(_asked, loop, self.config, self._grammars, call, [ids], None, thinking, form)
        asked = replace(asked, tools=call.tools)
        named = self._bind(asked, call, request)
        return Generation(self._fitting(loop, asked), asked, self.config.queue_timeout_s, self.metrics, named)

    async def _completions(self, request: Request) -> Generation:
        engine, loop = self._serving()
        call = completion_call(await self._body(request), engine.default_params(), self._choices_max())
        form = CompletionForm(self._check_model(call.model), engine.tokenizer, call.logprobs is not None)
        prompts = [await asyncio.to_thread(_encode, engine, one) if isinstance(one, str) else one for one in call.prompts]
        asked = await asyncio.to_thread(_asked, loop, self.config, self._grammars, call, prompts, COMPLETION_TOKENS, False, form)
        named = self._bind(asked, call, request)
        return Generation(self._fitting(loop, asked), asked, self.config.queue_timeout_s, self.metrics, named)

    def _bind(self, asked: Asked, call: Call, request: Request) -> Named | None:
        """Says whose requests these are, and which session they continue, if any."""
        owner, named = owner_of(request), None
        if call.session_id is not None:
            named = self._sessions_open().find(owner, call.session_id)
            if len(asked.requests) > 1:
                raise ApiError(f"session_id: got {len(asked.requests)} texts at once, wanted one prompt and n 1", param="session_id")
        for one in asked.requests:
            one.owner, one.session, one.may_cut = owner, None if named is None else named.session, call.session_cut
        return named

    def _fitting(self, loop: Loop, asked: Asked) -> Loop:
        """Refuses a call that would be too much even for an idle server."""
        most = self._texts_max()
        if len(asked.requests) > most:
            raise ApiError(f"{len(asked.requests)} texts asked at once (prompts times n), this server takes at most {most}", param="n")
        return loop

    async def _body(self, request: Request, may_be_empty: bool = False) -> dict[str, Any]:
        most = self.config.body_bytes_max
        too_large = ApiError(f"the body is larger than {most} bytes", 413, code="request_too_large")
        stated = request.headers.get("content-length", "")
        if stated.isdecimal() and int(stated[:20]) > most:
            raise too_large
        raw, parts = bytearray(), request.stream()
        while (part := await self._part(parts)) is not None:
            raw += part
            if len(raw) > most:
                raise too_large
        return {} if may_be_empty and not raw else parse_object(bytes(raw))

    async def _part(self, parts: AsyncIterator[bytes]) -> bytes | None:
        """The next part of a body, None behind the last one. Raises ApiError 408 for a client that is silent, 503 when the server ends."""

        async def read() -> bytes | None:
            return await anext(parts, None)

        reading, ending = asyncio.ensure_future(read()), asyncio.ensure_future(self._drain.ending.wait())
        try:
            await asyncio.wait({reading, ending}, timeout=self.config.body_silence_s, return_when=asyncio.FIRST_COMPLETED)
            if reading.done():
                return reading.result()
            if ending.done():
                raise shutting_down()
            message = f"nothing of the body came for {self.config.body_silence_s:g} s, wanted all of it; next: send the request again"
            raise ApiError(message, 408, code="request_timeout")
        finally:
            reading.cancel()
            ending.cancel()


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


def _constraint(grammars: Grammars | None, call: Call, thinking: bool) -> GrammarConstraint | None:
    """What one text of a call may be. Compiles: not on the event loop."""
    if call.format is None:
        return None
    if grammars is None:
        raise ApiError(f"{call.format.param}: this model has no tokenizer.json, which constrained texts need", param=call.format.param)
    try:
        return grammars.constraint(call.format.grammar, THINK_CLOSE if thinking else None)
    except InputError as error:
        raise ApiError(f"{call.format.param}: {error}", param=call.format.param) from None


def _asked(
    loop: Loop,
    config: ServeConfig,
    grammars: Grammars | None,
    call: Call,
    prompts: Sequence[list[int]],
    tokens: int | None,
    thinking: bool,
    form: Form,
) -> Asked:
    """A call's requests. tokens: how many to draw if the call does not say; None: see `Loop.tokens_for`. Raises ApiError for what never fits."""
    params: SamplingParams
    engine = loop.engine
    requests, context = [], engine.context_rows_max
    timeout_s = call.timeout_s or config.request_timeout_s
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
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
            most = loop.tokens_for(len(ids), config.default_tokens)
            params = call.choice_params(index, call.max_tokens or min(tokens or most, most))
            try:
                requests.append(engine.request(ids, params, constraint=_constraint(grammars, call, thinking)))
                requests[-1].deadline = deadline
            except Glm53Error as error:
                if room <= 0:
                    message = f"this model's maximum context length is {context} tokens: the prompt has {len(ids)}, wanted at most {context - 1}"
                    raise ApiError(message, param="messages" if isinstance(call, ChatCall) else "prompt", code="context_length_exceeded") from None
                refused = api_error(error)
                refused.param = "messages" if isinstance(call, ChatCall) else "prompt"
                raise refused from None
    return Asked(requests, sum(map(len, prompts)), call.n, thinking, call.stream, call.include_usage, form)


def _by_method(handlers: dict[str, Handler]) -> Handler:
    """One handler for the methods of a path, so that a 405 names them all."""

    async def handle(request: Request) -> Any:
        return await handlers["GET" if request.method == "HEAD" else request.method](request)

    return handle


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
