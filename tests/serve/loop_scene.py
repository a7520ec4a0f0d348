"""A loop without HTTP on a small random model, and clients that collect the events of their requests."""

from __future__ import annotations

import queue
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from glm53 import Engine
from glm53.errors import Glm53Error, HipError
from glm53.hip import runtime
from glm53.request import Chunk
from glm53.serve.loop import Event, Job, Load, Loop, Started

PROMPTS = [[(i * 37 + seed) % 64 for i in range(rows)] for seed, rows in enumerate((1, 5, 31, 32, 33, 64, 70, 100))]
SETTINGS: dict[str, Any] = {"dtype": "f32", "context_rows_max": 192, "extent_rows": 64, "prefill_chunk_rows": 32, "sessions_max": 3, "hot_rows": 224}


@contextmanager
def running(engine: Engine, waiting_max: int = 64, **settings: Any) -> Iterator[Loop]:
    """A loop, which must end with nothing left."""
    loop = Loop(engine, waiting_max, **settings)
    try:
        yield loop
    finally:
        loop.close()
    assert loop.load() == Load(0, 0) and not loop._jobs and not loop._batch.by_serial and not len(loop._scheduler)
    assert not loop._thread.is_alive()
    if loop.fatal is None:
        check_free(engine)


def check_free(engine: Engine) -> None:
    """Every session can be opened, and no store has an extent in use."""
    sessions = [engine.session() for _ in range(engine.sessions_max)]
    for session in sessions:
        session.close()
    for store in (engine.tier, engine.keys):
        store.check()
        assert store.pool.free == store.pool.capacity


class Client:
    """Collects the events of one request."""

    def __init__(self) -> None:
        self.events: queue.Queue[Event] = queue.Queue()
        self.tokens: list[int] = []
        self.started = 0
        self.reused_rows = 0
        self.job: Job | None = None
        self.last: str | Glm53Error | None = None

    def token(self, count: int) -> None:
        """Reads until so many tokens are there."""
        while len(self.tokens) < count and self.last is None:
            self._read(30.0)

    def end(self, timeout_s: float = 30.0) -> str | Glm53Error:
        """Reads to the last event: the finish reason, or the error."""
        while self.last is None:
            self._read(timeout_s)
        assert self.events.empty(), "an event after the last one"
        assert self.started == 1 or isinstance(self.last, Glm53Error)
        return self.last

    def _read(self, timeout_s: float) -> None:
        event = self.events.get(timeout=timeout_s)
        if isinstance(event, Started):
            self.started += 1
            self.reused_rows = event.reused_rows
        elif isinstance(event, Chunk):
            self.tokens += event.token_ids
            self.last = event.finish_reason
        else:
            self.last = event.error


def ends_of(clients: Sequence[Client], api: str, nth: int) -> list[str | Glm53Error]:
    """Reads all of them to their ends while the nth call of an API from now on fails; whom that hits ends with an error of the device."""
    control = runtime.control()
    control.glm53_cpu_fail(api.encode(), nth, 2)
    try:
        ends = [client.end() for client in clients]
    finally:
        control.glm53_cpu_fail(api.encode(), 0, 0)
    for end in ends:
        assert not isinstance(end, Glm53Error) or isinstance(end, HipError) or "memory" in str(end), end
    return ends
