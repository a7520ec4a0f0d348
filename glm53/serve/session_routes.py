"""The routes of sessions and their files, below /v1/sessions: bodies to calls of the registry, and their answers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from glm53.serve.access import owner_of
from glm53.serve.fields import Fields
from glm53.serve.generation import json_response
from glm53.serve.sessions import Named, Sessions

ROWS_MAX = 1 << 30
Handler = Callable[[Request], Awaitable[Any]]
Body = Callable[[Request], Awaitable[dict[str, Any]]]


class SessionRoutes:
    """serving: the registry, or ApiError 503. body: reads a JSON object within the server's bounds."""

    def __init__(self, model: str, serving: Callable[[], Sessions], body: Body):
        self._model, self._serving, self._body = model, serving, body

    def handlers(self) -> dict[str, dict[str, Handler]]:
        """By path and method, those that others are prefixes of first."""
        return {
            "/v1/sessions": {"GET": self._list, "POST": self._create},
            "/v1/sessions/restore": {"POST": self._restore},
            "/v1/sessions/files": {"GET": self._files},
            "/v1/sessions/files/{name}": {"DELETE": self._remove_file},
            "/v1/sessions/{id}": {"GET": self._get, "DELETE": self._delete},
            "/v1/sessions/{id}/fork": {"POST": self._fork},
            "/v1/sessions/{id}/truncate": {"POST": self._truncate},
            "/v1/sessions/{id}/save": {"POST": self._save},
        }

    def _card(self, named: Named) -> dict[str, Any]:
        return {
            "id": named.id,
            "object": "session",
            "created": named.created,
            "last_used": named.last_used,
            "model": self._model,
            "state": named.doing or "at rest",
            "rows": named.rows,
            "prompt_rows": named.prompt_rows,
            "host_bytes": named.host_bytes,
        }

    async def _list(self, request: Request) -> Response:
        several = await self._serving().several(owner_of(request))
        return json_response({"object": "list", "data": [self._card(named) for named in several]})

    async def _get(self, request: Request) -> Response:
        sessions = self._serving()
        named = sessions.find(owner_of(request), request.path_params["id"])
        return json_response(self._card((await sessions.noted([named]))[0]))

    async def _create(self, request: Request) -> Response:
        sessions, fields = self._serving(), Fields(await self._body(request))
        return json_response(self._card(await sessions.create(owner_of(request), fields.text("id"))))

    async def _delete(self, request: Request) -> Response:
        session_id = request.path_params["id"]
        await self._serving().delete(owner_of(request), session_id)
        return json_response({"id": session_id, "object": "session", "deleted": True})

    async def _fork(self, request: Request) -> Response:
        sessions, fields = self._serving(), Fields(await self._body(request))
        rows, new_id = fields.integer("rows", 0, ROWS_MAX), fields.text("id")
        return json_response(self._card(await sessions.fork(owner_of(request), request.path_params["id"], rows, new_id)))

    async def _truncate(self, request: Request) -> Response:
        sessions, fields = self._serving(), Fields(await self._body(request))
        rows = fields.integer("rows", 0, ROWS_MAX)
        if rows is None:
            raise fields.wrong("rows", "the number of rows to keep")
        return json_response(self._card(await sessions.truncate(owner_of(request), request.path_params["id"], rows)))

    async def _save(self, request: Request) -> Response:
        sessions, owner, session_id = self._serving(), owner_of(request), request.path_params["id"]
        name = _name(Fields(await self._body(request)))
        byte_count, rows = await sessions.save(owner, session_id, name)
        return json_response({"object": "session.file", "name": name, "bytes": byte_count, "rows": rows})

    async def _restore(self, request: Request) -> Response:
        sessions, fields = self._serving(), Fields(await self._body(request))
        return json_response(self._card(await sessions.restore(owner_of(request), _name(fields), fields.text("id"))))

    async def _files(self, request: Request) -> Response:
        files = await self._serving().saved(owner_of(request))
        data = [{"name": one.name, "object": "session.file", "bytes": one.byte_count, "created": one.changed} for one in files]
        return json_response({"object": "list", "data": data})

    async def _remove_file(self, request: Request) -> Response:
        name = request.path_params["name"]
        await self._serving().remove_file(owner_of(request), name)
        return json_response({"name": name, "object": "session.file", "deleted": True})


def _name(fields: Fields) -> str:
    name = fields.text("name")
    if name is None:
        raise fields.wrong("name", "the name of a file")
    return name
