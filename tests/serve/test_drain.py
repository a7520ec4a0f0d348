"""What a server that ends, and one that is waited for in vain, answers: each kind of request alone."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from typing import Any

import pytest
from serve_scene import Served

from glm53.serve.drain import Drain

COMPLETIONS = "/v1/completions"


@pytest.mark.parametrize(("begun", "sent"), [(False, [503]), (True, [200])])
def test_a_request_that_is_cancelled_at_the_end_raises_nothing(begun: bool, sent: list[int]) -> None:
    """As uvicorn does with those that do not end: a 503 where nothing has been sent."""
    statuses: list[int] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if begun:
            await send({"type": "http.response.start", "status": 200, "headers": []})
        await asyncio.sleep(60)

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    async def run() -> None:
        drain = Drain(app)
        task = asyncio.ensure_future(drain({"type": "http", "path": COMPLETIONS, "method": "POST"}, send, send))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        assert not await drain.idle(0.01, asyncio.Event())
        drain.ending.set()
        task.cancel()
        await task
        assert await drain.idle(0.01, asyncio.Event())

    asyncio.run(run())
    assert statuses == sent


def test_a_body_that_does_not_come_gets_408(serve_with: Callable[..., Any]) -> None:
    """The others are not touched: parts may come slowly."""
    with serve_with(body_silence_s=0.4) as served:
        whole = b'{"prompt": [1], "max_tokens": 1}'
        silent, slow = begun(served, len(whole)), begun(served, len(whole))
        started = time.monotonic()
        for index, byte in enumerate(whole):
            slow.sendall(bytes([byte]))
            if index % 10 == 0:
                time.sleep(0.2)  # four times: longer than the bound in all
        assert slow.recv(1000).startswith(b"HTTP/1.1 200 ")
        answer = b""
        while part := silent.recv(1000):  # the connection is closed
            answer += part
        assert answer.startswith(b"HTTP/1.1 408 ") and b'"code":"request_timeout"' in answer and 0.4 < time.monotonic() - started < 5
        for sock in (silent, slow):
            sock.close()


def begun(served: Served, byte_count: int) -> socket.socket:
    """A connection that has sent the head of a request."""
    sock = socket.create_connection(("127.0.0.1", served.port), timeout=30)
    sock.sendall(f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: {byte_count}\r\n\r\n".encode())
    return sock
