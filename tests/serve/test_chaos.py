"""A crowd of clients on real sockets: whoever stays gets the right text, whatever fails, and nothing is left."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from crowd import CLIENTS, KINDS, Crowd, Held, lose_device
from serve_scene import running

from glm53 import Engine
from glm53.hip import runtime

SECONDS = 4.0
RSS_GROWTH_BYTES = 48 << 20  # of short runs, in which the allocator has not settled yet


@pytest.fixture
def engine(demo_path: Path) -> Iterator[Engine]:
    """Three sessions at once, and so much host memory that prompts are dropped for others."""
    with Engine.open(demo_path, context_rows_max=512, sessions_max=3, prefill_chunk_rows=32, hot_rows=512, host_kv_gib=0.02) as engine:
        yield engine


def test_nothing_is_left_and_every_text_is_right(engine: Engine) -> None:
    with running(engine, waiting_max=200, queue_timeout_s=30.0, keeps_prompts=True) as served:
        crowd = Crowd(served)
        crowd.run(1.5)  # pools reach the size that they keep
        before = Held.now(served)
        crowd.run(SECONDS, seed=1)
        assert set(crowd.done) == set(KINDS) and crowd.done.total() > 2 * CLIENTS
        served.loop.call(served.loop._scheduler.check).result(10)
        assert not served.loop._jobs and not served.loop._batch.by_serial
        after = Held.now(served)
        assert after.memory == before.memory
        assert after.sockets <= before.sockets and after.threads <= before.threads
        assert after.rss_bytes < before.rss_bytes + RSS_GROWTH_BYTES, (before, after)
        served.loop.call(served.loop._batch.close).result(10)  # what is kept at rest goes
        sessions = [served.engine.session() for _ in range(served.engine.sessions_max)]
        for session in sessions:
            session.close()
    assert not served.loop._thread.is_alive()


def test_failing_calls_and_a_lost_device(engine: Engine) -> None:
    if runtime.select().name != "cpu":
        pytest.skip("faults are the cpu runtime's to choose")
    with running(engine, waiting_max=200, queue_timeout_s=30.0, keeps_prompts=True) as served:
        crowd = Crowd(served)
        crowd.run(3.0, seed=2, faults=True)
        crowd.run(1.0, seed=3)  # all is well again
        served.loop.call(served.loop._scheduler.check).result(10)
        served.loop.call(engine.stage.check).result(10)
        lose_device(served)
