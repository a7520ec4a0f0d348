"""Many clients over real sockets that abort, leave, read slowly and send nonsense: whoever stays gets the right text, and nothing is left."""

from __future__ import annotations

import json
import os
import random
import threading
import time
from collections.abc import Callable
from typing import Any

from serve_scene import Served

from glm53 import Completion, SamplingParams
from glm53.serve.loop import Load

CLIENTS, SECONDS, VARIANTS = 32, 3.0, 12
PATH = "/v1/completions"
TEXTS = ["In the beginning", "Once upon a time there was", "And it came to pass " * 12, "The king of the land " * 8]
KINDS = ("whole", "streamed", "leaves", "leaves at once", "reads slowly", "too long", "malformed")


def body_of(index: int) -> dict[str, Any]:
    return {"prompt": TEXTS[index % len(TEXTS)], "max_tokens": 4 + index * 7 % 20, "seed": index, "temperature": 0.8, "ignore_eos": index % 3 == 0}


def expected_texts(served: Served) -> list[str]:
    found = []
    for index in range(VARIANTS):
        body = body_of(index)
        params = SamplingParams(top_p=0.95, temperature=0.8, max_tokens=body["max_tokens"], seed=index, ignore_eos=body["ignore_eos"])
        one = served.engine.generate(body["prompt"], params)
        assert isinstance(one, Completion)
        found.append(one.text)
    return found


def act(served: Served, kind: str, index: int, expected: str, rng: random.Random) -> None:
    """One request of one client."""
    body = body_of(index)
    if kind == "whole":
        status, _, answer = served.request("POST", PATH, body)
        assert status == 200 and answer["choices"][0]["text"] == expected, answer
    elif kind == "streamed":
        events = served.events(PATH, body)
        assert events.pop() == "[DONE]"
        assert "".join(json.loads(event)["choices"][0]["text"] for event in events) == expected
    elif kind == "too long":
        status, _, answer = served.request("POST", PATH, body | {"max_tokens": 512})
        assert status == 400 and answer["error"]["code"] == "context_length_exceeded", answer
    elif kind == "malformed":
        assert served.request("POST", PATH, json.dumps(body).encode()[: rng.randint(0, 30)])[0] == 400
    else:
        with served.open(PATH, body | {"stream": rng.random() < 0.7, "n": rng.randint(1, 3)}) as sock:
            if kind == "leaves":
                sock.recv(rng.randint(1, 2000))
            elif kind == "reads slowly":
                for _ in range(5):
                    sock.recv(16)
                    time.sleep(0.02)


def sockets() -> int:
    """Open sockets of this process, the clients' and the server's."""
    count = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            count += os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
        except OSError:  # the descriptor of the listing itself
            continue
    return count


def test_nothing_is_left_and_every_text_is_right(serve_with: Callable[..., Any]) -> None:
    faults: list[BaseException] = []
    done: list[str] = []
    with serve_with(waiting_max=200, queue_timeout_s=30.0) as served:
        expected = expected_texts(served)

        def client(number: int, until: float) -> None:
            rng = random.Random(number)
            try:
                while time.monotonic() < until:
                    kind, index = rng.choice(KINDS), rng.randrange(VARIANTS)
                    act(served, kind, index, expected[index], rng)
                    done.append(kind)
            except BaseException as error:
                faults.append(error)

        def crowd(seconds: float) -> None:
            until = time.monotonic() + seconds
            threads = [threading.Thread(target=client, args=(number, until)) for number in range(CLIENTS)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
                assert not thread.is_alive(), "a client waits for ever"
            served.wait_for(Load(0, 0))

        crowd(0.5)  # pools reach the size that they keep
        served.request("GET", "/health")
        time.sleep(0.2)
        before = (served.engine.memory_by_place(), sockets())
        crowd(SECONDS)
        assert not faults, faults[0]
        assert set(done) == set(KINDS) and len(done) > 2 * CLIENTS
        time.sleep(0.2)
        assert not served.loop._jobs and not served.loop._batch.by_serial
        memory = served.engine.memory_by_place()
        assert {place: sum(parts.values()) for place, parts in memory.items()} == {place: sum(parts.values()) for place, parts in before[0].items()}
        assert sockets() <= before[1], "sockets are left"
        sessions = [served.engine.session() for _ in range(served.engine.sessions_max)]
        for session in sessions:
            session.close()
    assert not served.loop._thread.is_alive()
