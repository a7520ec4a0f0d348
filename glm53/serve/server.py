"""A server process: listens at once, loads the model beside that, serves until a signal, ends what runs within a bound."""

from __future__ import annotations

import asyncio
import copy
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from logging import getLogger
from types import FrameType
from typing import Any

import uvicorn

from glm53 import heap
from glm53.engine import Engine
from glm53.errors import InputError
from glm53.serve.api import Api, ServeConfig

log = getLogger("glm53.serve")
Progress = Callable[[int, int, str], None]


class _Interrupted(Exception):
    """A signal came while the model was being loaded."""


class _Server(uvicorn.Server):
    """uvicorn's, but signals only tell us: the first sets `signalled`, the next one `hurried`, later ones are not ours. `should_exit` ends it."""

    def __init__(self, options: uvicorn.Config):
        super().__init__(options)
        self.signals, self.signalled, self.hurried = 0, asyncio.Event(), asyncio.Event()
        self._before: dict[int, Any] = {}  # handlers

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.signals += 1
        if self.signals == 2:
            self._hand_back()  # whatever hangs, a third signal ends the process
        self._aio.call_soon_threadsafe((self.signalled if self.signals == 1 else self.hurried).set)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        self._aio = asyncio.get_running_loop()
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        self._before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            self._hand_back()

    def _hand_back(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. port 0: any free one. Raises InputError where the address cannot be had."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        return socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        raise InputError(f"--host {host} --port {port}: {error}; next: give another port, or end the process that has this one") from None


def serve(
    config: ServeConfig,
    sock: socket.socket,
    open_engine: Callable[[Progress], Engine],
    progress: Progress,
    ready: Callable[[Engine], None],
    shutdown_timeout_s: float = 30.0,
    log_level: str = "info",
    log_stats: bool = True,
) -> None:
    """Serves until SIGINT or SIGTERM, then refuses new requests, gives running ones `shutdown_timeout_s` or until another signal, ends them with an
    answer and closes the engine.

    open_engine(progress) runs in a thread while /ready answers 503; what it raises is raised here. ready: is called when requests are taken.
    log_stats: whether a line says every few seconds what is being done.
    """
    api = Api(config)
    logging = copy.deepcopy(uvicorn.config.LOGGING_CONFIG)
    logging["handlers"]["access"]["stream"] = "ext://sys.stderr"  # as all that is not asked for
    logging["loggers"]["glm53"] = {"handlers": ["default"], "level": log_level.upper(), "propagate": False}
    options = uvicorn.Config(
        api.app,
        log_config=logging,
        log_level=log_level,
        timeout_graceful_shutdown=1,  # for clients that do not read what was sent: the requests have ended by then
        server_header=False,
        ws="none",
        lifespan="off",
    )
    server = _Server(options)

    def watched(done: int, total: int, name: str) -> None:
        if server.signals:
            raise _Interrupted
        progress(done, total, name)

    async def run() -> None:
        serving = asyncio.ensure_future(server.serve(sockets=[sock]))
        signalled = asyncio.ensure_future(server.signalled.wait())
        engine: Engine | None = None
        lines: asyncio.Future[None] | None = None
        try:
            try:
                engine = await asyncio.to_thread(open_engine, watched)
            except _Interrupted:
                return
            api.start(engine)
            heap.settle()
            stats = api.stats()
            lines = asyncio.ensure_future(stats.run()) if log_stats else None
            ready(engine)
            await asyncio.wait({serving, signalled}, return_when=asyncio.FIRST_COMPLETED)
            await api.drain(shutdown_timeout_s, server.hurried)
            log.info(stats.last_line())
        finally:
            signalled.cancel()
            if lines is not None:
                lines.cancel()
            server.should_exit = True
            try:
                await serving
            finally:
                await asyncio.to_thread(_close, api, engine)

    asyncio.run(run())


def _close(api: Api, engine: Engine | None) -> None:
    api.close()
    if engine is not None:
        engine.close()
