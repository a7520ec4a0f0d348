"""The queue against its own promises under random arrivals and endings."""

from __future__ import annotations

import random

import pytest

from glm53.sched.queue import Prefill, Queue, Step


def test_one_request_prefills_in_chunks_then_decodes() -> None:
    queue = Queue(sessions_max=2, chunk_rows=4)
    serial = queue.add(9)
    actions = [queue.next() for _ in range(4)]
    assert actions == [
        Prefill(serial, 0, 4, False),
        Prefill(serial, 4, 8, False),
        Prefill(serial, 8, 9, True),
        Step((serial,)),
    ]
    queue.finish(serial)
    assert queue.next() is None


def test_waits_for_a_free_session() -> None:
    queue = Queue(sessions_max=1, chunk_rows=8)
    first, second = queue.add(3), queue.add(3)
    assert queue.next() == Prefill(first, 0, 3, True)
    assert queue.next() == Step((first,))
    queue.finish(first)
    assert queue.next() == Prefill(second, 0, 3, True)


@pytest.mark.parametrize("seed", range(20))
def test_random_traffic(seed: int) -> None:
    rng = random.Random(seed)
    queue = Queue(sessions_max=rng.randint(1, 4), chunk_rows=rng.randint(1, 16))
    prompt_rows: dict[int, int] = {}
    computed: dict[int, int] = {}
    for _ in range(300):
        if rng.random() < 0.2:
            rows = rng.randint(1, 40)
            serial = queue.add(rows)
            prompt_rows[serial], computed[serial] = rows, 0
        action = queue.next()
        queue.check()
        if isinstance(action, Prefill):
            assert action.start == computed[action.serial] < action.stop <= prompt_rows[action.serial]
            computed[action.serial] = action.stop
            assert action.last == (action.stop == prompt_rows[action.serial])
        elif isinstance(action, Step):
            assert 0 < len(action.serials) <= queue.sessions_max and len(set(action.serials)) == len(action.serials)
            assert all(computed[s] == prompt_rows[s] for s in action.serials)
            for serial in action.serials:
                if rng.random() < 0.3:
                    queue.finish(serial)
                    del prompt_rows[serial], computed[serial]
        else:
            assert not prompt_rows
