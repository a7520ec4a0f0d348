"""One call of the API in the loop: its choices, what happens when it ends early, and its answer, whole or as server-sent events.

A call that has been answered, refused or left by its client holds nothing in the loop: every way out of `Generation.__call__` cancels what is left.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.responses import Response

from glm53.errors import DeviceMemoryError, Glm53Error, InputError, InUse, WouldCut
from glm53.request import Chunk, Request
from glm53.serve.answers import Choice, Form, usage
from glm53.serve.fields import ApiError
from glm53.serve.loop import Busy, Cancelled, Event, Expired, Failed, Loop, NeverFits, Started, Stopped
from glm53.serve.metrics import Meter, Metrics
from glm53.serve.reasoning import Splitter
from glm53.serve.tool_use import ToolUse

if TYPE_CHECKING:
    from glm53.serve.sessions import Named

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
CLIENT_LEFT = 499  # nginx's status; nobody reads it
RETRY_AFTER_S = 1


def api_error(error: Glm53Error) -> ApiError:
    """The answer for an error of the engine or the loop."""
    if isinstance(error, Busy):
        return ApiError(str(error), 429, code="engine_busy", retry_after_s=RETRY_AFTER_S)
    if isinstance(error, Stopped):
        return ApiError(str(error), 503, code="unavailable", retry_after_s=RETRY_AFTER_S)
    if isinstance(error, DeviceMemoryError):
        return ApiError(str(error), 503, code="insufficient_memory", retry_after_s=RETRY_AFTER_S)
    if isinstance(error, Cancelled):
        return ApiError(str(error), CLIENT_LEFT, code="cancelled")
    if isinstance(error, Expired):
        return ApiError(str(error), 504, code="deadline_exceeded")
    if isinstance(error, InUse):
        return ApiError(str(error), 409, "session_id", "session_in_use")
    if isinstance(error, WouldCut):
        return ApiError(str(error), 409, "session_cut", "session_would_be_cut")
    if isinstance(error, NeverFits):
        return ApiError(str(error), 400, code="never_fits")
    if isinstance(error, InputError):
        return ApiError(str(error), 400)
    return ApiError(str(error), 500, code="engine_error")


def json_bytes(value: object) -> bytes:
    """ASCII JSON: lone surrogates of a client's text come back as the escapes that they came as."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode("ascii")


def json_response(value: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A response with a JSON body."""
    return Response(json_bytes(value), status, headers, media_type="application/json")


def error_response(error: ApiError) -> Response:
    """The response that an ApiError stands for."""
    headers = {} if error.retry_after_s is None else {"Retry-After": str(error.retry_after_s)}
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if error.status in (408, 413):  # what is left of the body is not read
        headers["Connection"] = "close"
    return json_response(error.body(), error.status, headers)


@dataclass(frozen=True)
class Asked:
    """A call that is ready to run. requests: of each prompt its n choices, one prompt after the other; thinking: their texts start inside a thinking
    block."""

    requests: Sequence[Request]
    prompt_tokens: int
    n: int
    thinking: bool
    stream: bool
    include_usage: bool
    form: Form
    tools: ToolUse | None = None


class Generation:
    """An ASGI response that runs a call. queue_timeout_s: it is refused if no choice has started by then. named: the session that it continues."""

    def __init__(self, loop: Loop, asked: Asked, queue_timeout_s: float, metrics: Metrics, named: Named | None = None):
        self._loop, self._asked, self._timeout_s, self._metrics, self._named = loop, asked, queue_timeout_s, metrics, named
        parser = lambda: None if asked.tools is None else asked.tools.parser()
        self._choices = [Choice(index, Splitter(asked.thinking), parser()) for index in range(len(asked.requests))]
        self._events: asyncio.Queue[tuple[Choice, Event]] = asyncio.Queue()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises ApiError as long as nothing has been sent."""
        aio = asyncio.get_running_loop()

        def put(choice: Choice, meter: Meter, event: Event) -> None:
            aio.call_soon_threadsafe(self._take, choice, meter, event)

        meters = [self._metrics.meter(len(request.prompt)) for request in self._asked.requests]
        sinks = [partial(put, choice, meter) for choice, meter in zip(self._choices, meters, strict=True)]
        if self._named is not None:
            self._named.take("continued by a request")
        try:
            jobs = self._loop.submit(self._asked.requests, sinks)
        except Glm53Error as error:
            self._release()
            raise api_error(error) from None
        work = asyncio.ensure_future(self._answer(scope, receive, send))
        gone = asyncio.ensure_future(_disconnect(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
        finally:
            self._loop.cancel(jobs)
            for task in (work, gone):
                task.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)

    def _release(self) -> None:
        """The session, if there is one, has the request's rows and is at rest."""
        if self._named is not None:
            self._named.release()

    def _take(self, choice: Choice, meter: Meter, event: Event) -> None:
        meter.take(event)
        if _is_last(event):
            self._release()
        self._events.put_nowait((choice, event))

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        first = await self._first()
        if not self._asked.stream:
            async for _ in self._pieces(first):
                pass
            await json_response(self._asked.form.whole(self._choices, self._usage()))(scope, receive, send)
            return
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        try:
            async for chunk in self._pieces(first):
                await _event(send, json_bytes(chunk))
            if self._asked.include_usage:
                await _event(send, json_bytes(self._asked.form.chunk([], self._usage(), True)))
        except ApiError as error:
            await _event(send, json_bytes(error.body()))
        await _event(send, b"[DONE]")
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _first(self) -> tuple[Choice, Event]:
        """The first event, before which nothing can be said of the status."""
        try:
            return await asyncio.wait_for(self._events.get(), self._timeout_s)
        except TimeoutError:
            load = self._loop.load()
            raise ApiError(
                f"no room became free in {self._timeout_s:g} s (requests that run: {load.running}, that wait: {load.waiting}); next: try again later",
                429,
                code="engine_busy",
                retry_after_s=max(RETRY_AFTER_S, int(self._timeout_s)),
            ) from None

    async def _pieces(self, first: tuple[Choice, Event]) -> AsyncIterator[dict[str, Any]]:
        """Chunks of the stream, until every choice has ended. Raises ApiError if one fails."""
        form, asked = self._asked.form, self._asked
        left, (choice, event) = len(self._choices), first
        while True:
            if isinstance(event, Failed):
                raise api_error(event.error)
            if isinstance(event, Started):
                choice.reused_rows = event.reused_rows
                opening = form.opening(choice)
                said = [] if opening is None else [opening]
            else:
                piece = choice.add(event)
                left -= event.finish_reason is not None
                said = [] if piece.silent or not asked.stream else form.piece(choice, piece)
            for one in said:
                yield form.chunk([one], None, asked.include_usage)
            if not left:
                return
            choice, event = await self._events.get()

    def _usage(self) -> dict[str, Any]:
        n = self._asked.n
        cached = sum(max(choice.reused_rows for choice in self._choices[at : at + n]) for at in range(0, len(self._choices), n))
        return usage(self._asked.prompt_tokens, cached, self._choices)


def _is_last(event: Event) -> bool:
    return isinstance(event, Failed) or (isinstance(event, Chunk) and event.finish_reason is not None)


async def _event(send: Send, data: bytes) -> None:
    await send({"type": "http.response.body", "body": b"data: " + data + b"\n\n", "more_body": True})
    await asyncio.sleep(0)  # events may stand in line: that the client has gone must be seen before the next one


async def _disconnect(receive: Receive) -> None:
    """Returns when the client has gone. The body has been read."""
    while (await receive())["type"] != "http.disconnect":
        pass
