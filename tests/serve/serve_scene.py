"""A server on a real socket, the demo model behind it, and raw requests to it."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from typing import Any

import uvicorn

from glm53 import Engine
from glm53.serve.api import Api, ServeConfig
from glm53.serve.loop import Load, Loop
from glm53.serve.server import listen

NAME = "demo"


@dataclass
class Served:
    """A running server."""

    api: Api
    given: Engine | None
    port: int

    @property
    def engine(self) -> Engine:
        assert self.given is not None
        return self.given

    @property
    def loop(self) -> Loop:
        assert self.api._loop is not None
        return self.api._loop

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def request(self, method: str, path: str, body: object = None, headers: dict[str, str] | None = None) -> tuple[int, dict[str, str], Any]:
        """Status, headers and body, JSON or raw. body: raw if bytes."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            raw = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
            connection.request(method, path, raw, {"Content-Type": "application/json"} | (headers or {}))
            answer = connection.getresponse()
            text = answer.read()
            kind = answer.getheader("content-type", "")
            return answer.status, dict(answer.getheaders()), json.loads(text) if text and kind.startswith("application/json") else text
        finally:
            connection.close()

    def events(self, path: str, body: dict[str, Any]) -> list[str]:
        """The data of a stream's events, as sent."""
        status, headers, raw = self.request("POST", path, body | {"stream": True})
        assert status == 200 and headers["content-type"].startswith("text/event-stream"), raw
        parts = raw.decode().split("\n\n")
        assert parts.pop() == "" and all(part.startswith("data: ") for part in parts)
        return [part[6:] for part in parts]

    def open(self, path: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> socket.socket:
        """A connection that has sent a request and read nothing."""
        raw = json.dumps(body).encode()
        sock = socket.create_connection(("127.0.0.1", self.port), timeout=30)
        every = {"Host": "x", "Content-Type": "application/json", "Content-Length": str(len(raw))} | (headers or {})
        sock.sendall((f"POST {path} HTTP/1.1\r\n" + "".join(f"{name}: {value}\r\n" for name, value in every.items()) + "\r\n").encode() + raw)
        return sock

    def wait_for(self, load: Load, timeout_s: float = 10.0) -> None:
        """Until so many requests run and wait."""
        until = time.monotonic() + timeout_s
        while self.loop.load() != load:
            assert time.monotonic() < until, f"{self.loop.load()}, wanted {load}"
            time.sleep(0.005)


@contextmanager
def running(engine: Engine | None, **settings: Any) -> Iterator[Served]:
    """A server; without an engine one whose model is still being loaded."""
    api = Api(ServeConfig(names=(NAME,), version="test", **({"keeps_prompts": False} | settings)))
    sock = listen("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(api.app, log_level="error", timeout_graceful_shutdown=5, ws="none", lifespan="off"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
    thread.start()
    try:
        while not server.started:
            time.sleep(0.005)
        if engine is not None:
            api.start(engine)
        yield Served(api, engine, sock.getsockname()[1])
    finally:
        server.should_exit = True
        thread.join(20)
        api.close()
        sock.close()
        assert not thread.is_alive()
