"""`glm53 serve` at its end, as a process: what runs gets an answer, what comes is refused, and a second signal ends the wait."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("uvicorn")

COMPLETIONS = "/v1/completions"
LONG = {"prompt": "In the beginning", "max_tokens": 30000, "ignore_eos": True}


class Process:
    """A server that is ready. log: lines of its standard error, once it has ended."""

    def __init__(self, process: subprocess.Popen[str], port: int):
        self.process, self.port, self.log = process, port, ""

    def ask(self, method: str, path: str, body: Any = None) -> tuple[int, dict[str, str], bytes]:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.request(method, path, None if body is None else json.dumps(body), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
        finally:
            connection.close()

    def runs(self, count: int) -> None:
        """Waits until so many requests run."""
        until = time.monotonic() + 20
        while f'num_requests_running{{model_name="demo"}} {count}.0' not in self.ask("GET", "/metrics")[2].decode():
            assert time.monotonic() < until
            time.sleep(0.05)

    def signal(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def ends(self) -> None:
        assert self.process.stderr is not None
        self.log = self.process.stderr.read()
        assert self.process.wait(30) == 0, self.log


@contextmanager
def started(model: Path, arguments: Sequence[str]) -> Iterator[Process]:
    command = [sys.executable, "-m", "glm53", "serve", str(model), "--port", "0", "--served-model-name", "demo", "--prefill-chunk-rows", "32"]
    process = subprocess.Popen([*command, *arguments], env=os.environ, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        found = None
        while found is None:
            line = process.stderr.readline()
            assert line
            found = re.search(r"ready on http://127\.0\.0\.1:(\d+)/v1", line)
        yield Process(process, int(found[1]))
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def beside(server: Process, bodies: Sequence[dict[str, Any]]) -> tuple[list[threading.Thread], dict[int, tuple[int, dict[str, str], bytes]]]:
    """Requests, each in a thread, and their answers."""
    answers: dict[int, tuple[int, dict[str, str], bytes]] = {}

    def ask(index: int) -> None:
        answers[index] = server.ask("POST", COMPLETIONS, bodies[index])

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(len(bodies))]
    for thread in threads:
        thread.start()
    return threads, answers


def check_ended(answers: dict[int, tuple[int, dict[str, str], bytes]]) -> None:
    """A whole answer and a stream that the end of the server cut."""
    status, headers, raw = answers[0]
    assert status == 503 and json.loads(raw)["error"]["code"] == "unavailable" and int(headers["retry-after"]) >= 1
    events = answers[1][2].decode().split("\n\n")
    assert answers[1][0] == 200 and events[-2:] == ["data: [DONE]", ""]
    assert json.loads(events[-3][6:])["error"]["code"] == "unavailable"


def test_requests_at_the_end_of_their_time_get_an_answer(demo_path: Path) -> None:
    """A whole answer, a stream and half a body; and new requests meanwhile."""
    with started(demo_path, ["--shutdown-timeout", "1"]) as server:
        half = socket.create_connection(("127.0.0.1", server.port), timeout=30)
        half.sendall(f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{{".encode())
        threads, answers = beside(server, [LONG, LONG | {"stream": True}])
        server.runs(2)
        server.signal()
        until = time.monotonic() + 5
        while (refused := server.ask("POST", COMPLETIONS, {"prompt": "x", "max_tokens": 1}))[0] == 200:
            assert time.monotonic() < until
        assert refused[0] == 503 and json.loads(refused[2])["error"]["code"] == "unavailable"
        assert int(refused[1]["retry-after"]) >= 1 and refused[1]["connection"] == "close"
        assert server.ask("GET", "/ready")[0] == 503 and server.ask("GET", "/health")[0] == 200
        for thread in threads:
            thread.join(30)
        check_ended(answers)
        assert half.recv(1000).startswith(b"HTTP/1.1 503 ")
        half.close()
        server.ends()
        assert "Traceback" not in server.log and "are ended before they are done: 3" in server.log, server.log
        assert re.search(r"2 requests in \d+ s \(stop 0, length 0, abort 2, error 0\)", server.log), server.log


def test_a_second_signal_ends_the_wait(demo_path: Path) -> None:
    with started(demo_path, ["--shutdown-timeout", "60"]) as server:
        threads, answers = beside(server, [LONG, LONG | {"stream": True}])
        server.runs(2)
        server.signal()
        while server.ask("GET", "/ready")[0] == 200:
            time.sleep(0.02)
        again = time.monotonic()
        server.signal()
        for thread in threads:
            thread.join(30)
        check_ended(answers)
        server.ends()
        assert time.monotonic() - again < 10 and "Traceback" not in server.log


def test_requests_that_end_in_time_are_whole(demo_path: Path) -> None:
    with started(demo_path, ["--shutdown-timeout", "60"]) as server:
        threads, answers = beside(server, [LONG | {"max_tokens": 100}, LONG | {"max_tokens": 100, "stream": True}])
        server.runs(2)
        begun = time.monotonic()
        server.signal()
        for thread in threads:
            thread.join(30)
        assert json.loads(answers[0][2])["usage"]["completion_tokens"] == 100
        assert answers[1][2].endswith(b"data: [DONE]\n\n") and b'"error"' not in answers[1][2]
        server.ends()
        assert time.monotonic() - begun < 30 and "are ended before" not in server.log
