"""Named sessions of a server's clients: made, continued by requests, forked, cut, saved and restored; each one its owner's alone.

A session of another owner is answered exactly as one that does not exist. One thing at a time is done with a session: a request that continues it, or
one of the calls here; whoever comes meanwhile is refused. What a call has begun ends also when its client has left, and the session is free then.

The registry belongs to the event loop. Short work runs on the loop's thread between two actions of the engine; files are written and read in threads
of their own, which take the engine's turn piece by piece. A session at rest keeps its slot until the scheduler has another use for it; what is done
with it here parks it.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from glm53.engine import Engine
from glm53.errors import Glm53Error, InUse, LifetimeError
from glm53.serve.fields import ApiError
from glm53.serve.generation import RETRY_AFTER_S, api_error
from glm53.serve.loop import Loop, Stopped
from glm53.serve.session_files import SavedFile, SessionFiles
from glm53.session import Session
from glm53.sessionfile import SessionFile

ID_PATTERN = r"[A-Za-z0-9_-]{1,64}"
RESERVED_IDS = ("files", "restore")  # these follow /v1/sessions/ in routes of their own
FILE_THREADS = 2  # saves and restores at once
T = TypeVar("T")


@dataclass(eq=False)
class Named:
    """A session with a name. rows, prompt_rows, host_bytes: when it last came to rest."""

    id: str
    owner: str
    session: Session
    created: int = field(default_factory=lambda: int(time.time()))
    last_used: int = field(default_factory=lambda: int(time.time()))
    doing: str = ""  # "" at rest
    rows: int = 0
    prompt_rows: int = 0
    host_bytes: int = 0

    def note(self, engine: Engine) -> None:
        """Takes its figures down; at rest, on the loop's thread."""
        self.rows, self.prompt_rows = self.session.rows, self.session.prompt_rows
        shape = engine.tier.pool.shape
        keys = len(engine.spec.full_layers) * engine.keys.shape.row_bytes
        self.host_bytes = -(-self.rows // engine.config.extent_rows) * shape.extent_bytes + self.rows * keys

    @contextmanager
    def at(self, doing: str) -> Iterator[None]:
        """Raises ApiError 409 unless it is at rest."""
        self.take(doing)
        try:
            yield
        finally:
            self.release()

    def take(self, doing: str) -> None:
        if self.doing:
            message = f"the session {self.id!r} is {self.doing}; next: wait until that has ended, or use a fork of it"
            raise ApiError(message, 409, "session_id", "session_in_use")
        self.doing, self.last_used = doing, int(time.time())

    def release(self) -> None:
        self.doing = ""


class Sessions:
    """See the module. per_owner: sessions of an owner at most. files: None where sessions cannot be saved."""

    def __init__(self, loop: Loop, per_owner: int, files: SessionFiles | None):
        self._loop, self._engine, self._per_owner, self._files = loop, loop.engine, per_owner, files
        self._named: dict[tuple[str, str], Named] = {}
        self._coming: set[tuple[str, str]] = set()  # names of sessions that are being made
        self._tasks: set[asyncio.Task[Any]] = set()
        self._threads = ThreadPoolExecutor(FILE_THREADS, "glm53 session files")
        self._closing = False

    def close(self) -> None:
        """Ends saves and restores, which leave nothing behind, and waits for their threads. The sessions go with the engine."""
        self._closing = True
        self._threads.shutdown(wait=True, cancel_futures=True)

    def find(self, owner: str, session_id: str) -> Named:
        """Raises ApiError 404."""
        named = self._named.get((owner, session_id))
        if named is None:
            raise ApiError(f"there is no session {session_id[:64]!r}; POST /v1/sessions makes one", 404, "session_id", "session_not_found")
        return named

    async def several(self, owner: str) -> list[Named]:
        """The owner's, in order of creation, with their figures as they are."""
        return await self.noted([named for (whose, _), named in self._named.items() if whose == owner])

    async def noted(self, several: Sequence[Named]) -> list[Named]:
        """The same, after their figures were taken down; those at work keep the last ones."""

        def note() -> None:
            for named in several:
                if not named.doing and named.session.state.value != "closed":
                    named.note(self._engine)

        await self._call(note)
        return list(several)

    async def create(self, owner: str, session_id: str | None) -> Named:
        """A session without rows."""
        return await self._make(owner, session_id, partial(self._call, partial(self._engine.session, parked=True)))

    async def fork(self, owner: str, session_id: str, rows: int | None, new_id: str | None) -> Named:
        """A new session with the first `rows` rows of another one, None: all."""
        named = self.find(owner, session_id)

        async def fork() -> Session:
            with named.at("being forked"):
                return await self._call(lambda: self._forked(named, rows))

        return await self._make(owner, new_id, fork)

    async def truncate(self, owner: str, session_id: str, rows: int) -> Named:
        """Keeps the first `rows` rows."""
        named = self.find(owner, session_id)

        def cut() -> None:
            self._resting(named, rows).truncate(rows)
            named.note(self._engine)

        async def truncate() -> Named:
            with named.at("being truncated"):
                await self._call(cut)
                return named

        return await self._to_its_end(truncate)

    async def delete(self, owner: str, session_id: str) -> None:
        """Ends a session; its name is free at once."""
        named = self.find(owner, session_id)
        named.take("being deleted")
        del self._named[owner, session_id]
        await self._to_its_end(partial(self._call, named.session.close))

    async def save(self, owner: str, session_id: str, name: str) -> tuple[int, int]:
        """Writes a session to a file of the owner's; bytes of the file, and the session's rows."""
        files, named = self._with_files(), self.find(owner, session_id)
        files.path(owner, name)

        def save() -> int:
            with files.reported(name), files.room(owner, name, named.session.file_bytes()) as path:
                return named.session.save(path, self._watched)

        async def parked_and_saved() -> tuple[int, int]:
            with named.at("being saved"):
                rows = await self._call(lambda: self._resting(named).rows)
                return await self._in_thread(save), rows

        return await self._to_its_end(parked_and_saved)

    async def restore(self, owner: str, name: str, new_id: str | None) -> Named:
        """A new session from a file of the owner's."""
        files = self._with_files()
        with files.reported(name):
            path: Path = files.existing(owner, name)

        def rows() -> int:
            with files.reported(name), SessionFile(path) as file:
                return file.header.rows

        def read() -> Session:
            with files.reported(name):
                return self._engine.restore(path, self._watched, parked=True)

        async def restore() -> Session:
            count = await self._in_thread(rows)
            promised = await self._call(lambda: self._loop.promise(count))
            try:
                return await self._in_thread(read)
            finally:
                await self._call(lambda: self._loop.redeem(promised))

        return await self._make(owner, new_id, restore)

    async def saved(self, owner: str) -> list[SavedFile]:
        """Files of the owner."""
        files = self._with_files()
        with files.reported(""):
            return await asyncio.to_thread(files.files, owner)

    async def remove_file(self, owner: str, name: str) -> None:
        """Deletes a file of the owner's."""
        files = self._with_files()
        with files.reported(name):
            await asyncio.to_thread(files.remove, owner, name)

    # How work is done

    def _with_files(self) -> SessionFiles:
        if self._files is None:
            raise ApiError("this server keeps no session files; next: start it with --session-dir DIRECTORY", code="no_session_dir")
        return self._files

    def _resting(self, named: Named, rows: int | None = None) -> Session:
        """Parked, so that nothing here needs a slot or the device. On the loop's thread. Raises ApiError for rows that it has not."""
        if rows is not None and rows > named.session.rows:
            raise ApiError(f"rows: got {rows}, wanted 0 to {named.session.rows}, the rows of the session", param="rows")
        named.session.park()
        return named.session

    def _forked(self, named: Named, rows: int | None) -> Session:
        session = self._resting(named, rows)
        with self._loop.room(session.rows if rows is None else rows):
            return session.fork(rows)

    def _watched(self, done: int, total: int, name: str) -> None:
        """Progress of a file."""
        if self._closing:
            raise Stopped("the server is shutting down")

    async def _make(self, owner: str, session_id: str | None, make: Callable[[], Awaitable[Session]]) -> Named:
        """Names what `make` gives, unless the name is taken or the owner has too many."""
        key = (owner, "session-" + secrets.token_hex(12) if session_id is None else _checked_id(session_id))
        if key in self._named or key in self._coming:
            raise ApiError(f"there is a session {key[1]!r} already; next: choose another id, or delete it", 409, "id", "session_exists")
        held = sum(whose == owner for whose, _ in (*self._named, *self._coming))
        if held >= self._per_owner:
            message = f"{held} sessions are there, at most {self._per_owner} may be (--sessions-per-key); next: delete one"
            raise ApiError(message, 429, code="too_many_sessions", retry_after_s=RETRY_AFTER_S)
        self._coming.add(key)

        async def made() -> Named:
            try:
                session = await make()
                session.owner = owner
                named = Named(key[1], owner, session)
                await self._call(partial(named.note, self._engine))
                self._named[key] = named
                return named
            finally:
                self._coming.discard(key)

        return await self._to_its_end(made)

    async def _call(self, function: Callable[[], T]) -> T:
        """On the loop's thread. Raises ApiError."""
        return await _answered(asyncio.wrap_future(self._loop.call(function)))

    async def _in_thread(self, function: Callable[[], T]) -> T:
        """In a thread for files. Raises ApiError."""
        try:
            future = self._threads.submit(function)
        except RuntimeError:
            raise api_error(Stopped("the server is shutting down")) from None
        return await _answered(asyncio.wrap_future(future))

    async def _to_its_end(self, work: Callable[[], Awaitable[T]]) -> T:
        """Whoever waits may leave; the work goes on."""
        task: asyncio.Task[T] = asyncio.ensure_future(work())
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return await asyncio.shield(task)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # seen, also where nobody waits for it any more


async def _answered(future: asyncio.Future[T]) -> T:
    try:
        return await future
    except InUse as error:
        raise ApiError(str(error), 409, "session_id", "session_in_use") from None
    except LifetimeError as error:  # its device is lost, or the engine is being closed
        raise api_error(Stopped(str(error))) from None
    except Glm53Error as error:
        raise api_error(error) from None


def _checked_id(session_id: str) -> str:
    if not re.fullmatch(ID_PATTERN, session_id, re.ASCII) or session_id in RESERVED_IDS:
        raise ApiError(f"id: wanted 1 to 64 of A-Z a-z 0-9 _ -, and none of {', '.join(RESERVED_IDS)}", param="id")
    return session_id
