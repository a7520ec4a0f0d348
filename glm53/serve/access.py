"""Who may ask, and what is counted of every answer: ASGI middleware around the routes.

An API key stands for an owner, whose name is a hash of the key: what belongs to one owner (sessions, histories that prompts may start from) no other
one sees. Without keys everybody is the owner "".
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Sequence

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from glm53.serve.fields import ApiError
from glm53.serve.generation import error_response

OPEN_PATHS = ("/health", "/ready", "/version", "/metrics", "/openapi.json")  # answered without a key: they show nothing of what anybody asks
Answered = Callable[[str | None, str, int], None]  # route, method, status
_OWNER = "glm53.owner"  # in the scope


def owner_of(request: Request) -> str:
    """Whose request it is."""
    owner: str = request.scope.get(_OWNER, "")
    return owner


def owner_name(key: str) -> str:
    """Owner of a key, fit for a directory's name. The key cannot be told from it."""
    return hashlib.sha256(b"glm53 owner " + key.encode()).hexdigest()[:32]


class Keys:
    """Lets only those in who have a key, if there are keys."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]):
        self.app, self._keys = app, [(key.encode(), owner_name(key)) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._keys:
            owner = self._owner(scope)
            if owner is None and scope["path"] not in OPEN_PATHS:
                error = ApiError("wrong or missing API key; next: send Authorization: Bearer KEY", 401, code="invalid_api_key")
                await error_response(error)(scope, receive, send)
                return
            scope[_OWNER] = owner or ""
        await self.app(scope, receive, send)

    def _owner(self, scope: Scope) -> str | None:
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        kind, _, token = given.partition(b" ")
        matches = [owner for key, owner in self._keys if hmac.compare_digest(token.strip(), key)]  # all of them, so that time tells nothing
        return matches[0] if matches and kind.lower() == b"bearer" else None


class Counted:
    """Tells `answered` of every answer that begins."""

    def __init__(self, app: ASGIApp, answered: Answered):
        self.app, self._answered = app, answered

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def counting(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._answered(getattr(scope.get("route"), "path", None), scope["method"], message["status"])
            await send(message)

        await self.app(scope, receive, counting)
