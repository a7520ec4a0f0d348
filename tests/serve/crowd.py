"""Many clients of one server that abort, leave, read slowly, keep sessions and send nonsense, some while calls of the device fail."""

from __future__ import annotations

import gc
import json
import os
import random
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serve_scene import Served

from glm53 import Completion, SamplingParams
from glm53.hip import runtime
from glm53.serve.loop import Load

CLIENTS, VARIANTS = 32, 12
PATH, CHAT = "/v1/completions", "/v1/chat/completions"
TEXTS = ["In the beginning", "Once upon a time there was", "And it came to pass " * 12, "The king of the land " * 8]
KINDS = ("whole", "streamed", "leaves", "leaves at once", "reads slowly", "too long", "malformed", "keeps a session", "holds to a schema", "is late")
FAULTS = ("hipModuleLaunchKernel", "hipMemcpyAsync", "hipEventSynchronize", "hipEventRecord")
FAILED = (500, 503)  # answers to whom a fault has hit
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}}, "required": ["n"], "additionalProperties": False}


def body_of(index: int) -> dict[str, Any]:
    return {"prompt": TEXTS[index % len(TEXTS)], "max_tokens": 4 + index * 7 % 20, "seed": index, "temperature": 0.8, "ignore_eos": index % 3 == 0}


def expected_texts(served: Served) -> list[str]:
    """What each body gets alone."""
    found = []
    for index in range(VARIANTS):
        body = body_of(index)
        params = SamplingParams(top_p=0.95, temperature=0.8, max_tokens=body["max_tokens"], seed=index, ignore_eos=body["ignore_eos"])
        one = served.engine.generate(body["prompt"], params)
        assert isinstance(one, Completion)
        found.append(one.text)
    return found


@dataclass(frozen=True)
class Held:
    """What a process with an idle server has."""

    memory: dict[str, int]  # by place, of the ledger
    sockets: int
    threads: int
    rss_bytes: int

    @classmethod
    def now(cls, served: Served) -> Held:
        served.request("GET", "/health")
        time.sleep(0.3)
        gc.collect()
        memory = {place: sum(parts.values()) for place, parts in served.engine.memory_by_place().items()}
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        return cls(memory, _sockets(), threading.active_count(), int(status["VmRSS"].split()[0]) << 10)


def _sockets() -> int:
    """Open sockets of this process, the clients' and the server's."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the descriptor of the listing itself
            found.append(os.readlink(f"/proc/self/fd/{name}").startswith("socket:"))
    return sum(found)


class Crowd:
    """Clients that act at random until their time is over; `done` counts what they did."""

    def __init__(self, served: Served):
        self.served, self.expected = served, expected_texts(served)
        self.done: Counter[str] = Counter()
        self._failing = False  # faults are let loose: a request may end with an error of the device
        self._wrong: list[BaseException] = []

    def run(self, seconds: float, seed: int = 0, faults: bool = False) -> None:
        """Raises the first thing that a client found wrong; at the end nothing runs or waits."""
        self._failing, until = faults, time.monotonic() + seconds
        threads = [threading.Thread(target=self._client, args=(number, seed, until)) for number in range(CLIENTS)]
        for thread in threads:
            thread.start()
        if faults:
            self._fail_calls(random.Random(seed), until)
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive(), "a client waits for ever"
        if self._wrong:
            raise self._wrong[0]
        self.served.wait_for(Load(0, 0))

    def _fail_calls(self, rng: random.Random, until: float) -> None:
        control = runtime.control()
        while time.monotonic() < until:
            api = rng.choice(FAULTS)
            control.glm53_cpu_fail(api.encode(), rng.randint(1, 30), rng.choice((2, 999)))
            time.sleep(0.2)
            control.glm53_cpu_fail(api.encode(), 0, 0)

    def _client(self, number: int, seed: int, until: float) -> None:
        rng = random.Random(seed * 1000 + number)
        try:
            while time.monotonic() < until:
                kind, index = rng.choice(KINDS), rng.randrange(VARIANTS)
                self._act(kind, index, rng, f"client-{number}")
                self.done[kind] += 1
        except BaseException as error:
            self._wrong.append(error)

    def _post(self, path: str, body: Any, *allowed: int) -> tuple[int, Any]:
        status, _, answer = self.served.request("POST", path, body)
        assert status in allowed or (self._failing and status in FAILED), f"{path}: {status} {answer}"
        return status, answer

    def _act(self, kind: str, index: int, rng: random.Random, name: str) -> None:
        body, served = body_of(index), self.served
        if kind == "whole":
            status, answer = self._post(PATH, body, 200)
            assert status != 200 or answer["choices"][0]["text"] == self.expected[index], answer
        elif kind == "streamed":
            self._stream(body, self.expected[index])
        elif kind == "too long":
            _, answer = self._post(PATH, body | {"max_tokens": 512}, 400)
            assert answer["error"]["code"] == "context_length_exceeded", answer
        elif kind == "malformed":
            self._post(PATH, json.dumps(body).encode()[: rng.randint(0, 30)], 400)
        elif kind == "keeps a session":
            self._session(body, self.expected[index], name)
        elif kind == "holds to a schema":
            self._schema(index)
        elif kind == "is late":
            status, answer = self._post(PATH, body | {"timeout_s": rng.choice((0.001, 0.05))}, 200, 504)
            assert status != 200 or answer["choices"][0]["text"] == self.expected[index], answer
        else:
            with served.open(PATH, body | {"stream": rng.random() < 0.7, "n": rng.randint(1, 3)}) as sock:
                if kind == "leaves":
                    sock.recv(rng.randint(1, 2000))
                elif kind == "reads slowly":
                    for _ in range(5):
                        sock.recv(16)
                        time.sleep(0.02)

    def _stream(self, body: dict[str, Any], expected: str) -> None:
        status, _, raw = self.served.request("POST", PATH, body | {"stream": True})
        if status != 200:
            assert self._failing and status in FAILED, raw
            return
        events = raw.decode().split("\n\n")
        assert events.pop() == "" and events.pop() == "data: [DONE]"
        parts = [json.loads(event.removeprefix("data: ")) for event in events]
        text = "".join(part["choices"][0]["text"] for part in parts if "choices" in part)
        if any("error" in part for part in parts):
            assert self._failing and expected.startswith(text), parts
        else:
            assert text == expected

    def _session(self, body: dict[str, Any], expected: str, name: str) -> None:
        """Made, asked, asked again behind its own answer, forked, cut, deleted."""
        status, _ = self._post("/v1/sessions", {"id": name}, 200, 201, 429)  # 429: memory is short
        if status >= 400:
            return
        try:
            status, answer = self._post(PATH, body | {"session_id": name}, 200)
            if status != 200:
                return
            assert answer["choices"][0]["text"] == expected
            longer = body | {"prompt": body["prompt"] + expected + " and then", "session_id": name}
            status, answer = self._post(PATH, longer, 200)
            assert status != 200 or answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0, answer
            status, _ = self._post(f"/v1/sessions/{name}/fork", {"id": f"{name}-fork"}, 200, 201, 429)
            if status < 400:
                self._post(f"/v1/sessions/{name}-fork/truncate", {"rows": 1}, 200)
        finally:
            for one in (name, f"{name}-fork"):
                self.served.request("DELETE", f"/v1/sessions/{one}")

    def _schema(self, index: int) -> None:
        form = {"type": "json_schema", "json_schema": {"name": "one", "schema": SCHEMA}}
        messages = [{"role": "user", "content": TEXTS[index % len(TEXTS)]}]
        body = {"messages": messages, "max_tokens": 40, "seed": index, "response_format": form, "chat_template_kwargs": {"enable_thinking": False}}
        status, answer = self._post(CHAT, body, 200)
        if status == 200 and answer["choices"][0]["finish_reason"] == "stop":
            value = json.loads(answer["choices"][0]["message"]["content"])
            assert value.keys() == {"n"} and value["n"] in range(10), answer


def lose_device(served: Served) -> None:
    """The device is lost while clients wait: all of them get an error, the server says that it is dead, and nothing waits for ever."""
    ended: list[int] = []
    ask = lambda index: ended.append(served.request("POST", PATH, body_of(index % 8) | {"max_tokens": 200, "ignore_eos": True})[0])
    threads = [threading.Thread(target=ask, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    time.sleep(0.2)
    runtime.control().glm53_cpu_fail(b"hipEventSynchronize", 1, 719)  # hipErrorLaunchFailure
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive(), "a client waits for a lost device"
    runtime.control().glm53_cpu_fail(b"hipEventSynchronize", 0, 0)
    assert len(ended) == 8 and set(ended) <= {200, *FAILED} and set(ended) & set(FAILED), ended
    assert served.request("GET", "/health")[0] == 503 and served.request("POST", PATH, body_of(0))[0] == 503
    served.loop._thread.join(10)
    assert not served.loop._thread.is_alive()
