"""How a server ends: new requests are refused while those that run go on; when their time is over they end with an answer all the same."""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from glm53.serve.access import OPEN_PATHS
from glm53.serve.fields import ApiError
from glm53.serve.generation import RETRY_AFTER_S, error_response


def shutting_down() -> ApiError:
    """The answer of a server that ends."""
    message = "the server is shutting down; next: try again later, at a server that has been started again"
    return ApiError(message, 503, code="unavailable", retry_after_s=RETRY_AFTER_S)


class Drain:
    """ASGI middleware around the routes. Belongs to the event loop.

    Attributes: begun: requests are refused, but for those that show the server's state; ending: is set when those that run must end.
    """

    def __init__(self, app: ASGIApp):
        self.app, self.begun, self.running = app, False, 0
        self.ending = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        if self.begun and (scope["path"] not in OPEN_PATHS or scope["path"] == "/ready"):
            await self._refuse(scope, receive, send)
            return
        answering = False

        async def noted(message: Message) -> None:
            nonlocal answering
            answering = True
            await send(message)

        self.running += 1
        self._idle.clear()
        try:
            await self.app(scope, receive, noted)
        except asyncio.CancelledError:  # by uvicorn, whose patience with one that neither reads nor ends is over
            if not self.ending.is_set():
                raise
            if not answering:
                await self._refuse(scope, receive, send)
        finally:
            self.running -= 1
            if not self.running:
                self._idle.set()

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = error_response(shutting_down())
        response.headers["Connection"] = "close"
        await response(scope, receive, send)

    async def idle(self, timeout_s: float, hurry: asyncio.Event) -> bool:
        """Waits until no request runs; False when the time is over or `hurry` is set before."""
        waits = [asyncio.ensure_future(one.wait()) for one in (self._idle, hurry)]
        try:
            await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in waits:
                one.cancel()
        return self._idle.is_set()
