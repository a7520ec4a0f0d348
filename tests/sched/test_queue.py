"""The queue against its own promises under random arrivals and endings."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from glm53.sched.queue import TURN_STEPS, Prefill, Queue, Step


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


def serving(queue: Queue, steps: int) -> list[Prefill | Step | None]:
    return [queue.next() for _ in range(steps)]


def test_chunks_and_steps_alternate_while_requests_decode() -> None:
    queue = Queue(sessions_max=2, chunk_rows=4, chunks_per_step=1)
    first = queue.add(3)
    assert queue.next() == Prefill(first, 0, 3, True)
    second = queue.add(9)
    assert serving(queue, 6) == [
        Step((first,)),
        Prefill(second, 0, 4, False),
        Step((first,)),
        Prefill(second, 4, 8, False),
        Step((first,)),
        Prefill(second, 8, 9, True),
    ]
    assert queue.next() == Step((first, second))


def test_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    queue = Queue(sessions_max=2, chunk_rows=4, chunks_per_step=1)
    long, short = queue.add(400), queue.add(4)
    actions = serving(queue, 3)
    assert Prefill(short, 0, 4, True) in actions and Prefill(long, 0, 4, False) in actions


def test_a_free_session_belongs_to_whoever_waited_longest() -> None:
    queue = Queue(sessions_max=1, chunk_rows=4, chunks_per_step=1)
    first, long, short = queue.add(4), queue.add(40), queue.add(4)
    queue.next()
    queue.finish(first)
    assert queue.next() == Prefill(long, 0, 4, False)
    queue.finish(long)
    assert queue.next() == Prefill(short, 0, 4, True)
    assert (queue.running, queue.waiting, len(queue)) == (1, 0, 1)


def test_decoding_requests_take_turns() -> None:
    queue = Queue(sessions_max=5, chunk_rows=4, chunks_per_step=1, decode_max=2)
    serials = [queue.add(1) for _ in range(5)]
    while queue.waiting:
        queue.next()
    since = dict.fromkeys(serials, 0)
    for _ in range(20 * TURN_STEPS):
        action = queue.next()
        queue.check()
        assert isinstance(action, Step) and len(action.serials) == 2
        since = {serial: 0 if serial in action.serials else steps + 1 for serial, steps in since.items()}
        assert max(since.values()) <= 3 * TURN_STEPS, "a request waited for more than ceil(5 / 2) turns"


@dataclass
class Client:
    prompt_rows: int
    tokens: int  # that it draws until it ends
    computed: int = 0
    idle: int = 0  # actions since it got something, while it held a session and decoded, or came first of the prompts


@pytest.mark.parametrize("seed", range(12))
def test_a_day_of_traffic(seed: int) -> None:
    """Requests come in bursts, end, fail and are cancelled at any moment; nobody starves, everybody is served in the order promised."""
    rng = random.Random(seed)
    sessions_max, decode_max, chunks = rng.randint(1, 12), rng.randint(0, 6), rng.randint(1, 3)
    queue = Queue(sessions_max, chunk_rows=rng.randint(1, 64), chunks_per_step=chunks, decode_max=decode_max)
    most = min(decode_max, sessions_max) or sessions_max
    clients: dict[int, Client] = {}
    since_step = ended = 0
    for minute in range(1440):
        if rng.random() < (0.4 if minute % 240 < 60 else 0.02):
            for _ in range(rng.randint(1, 6)):
                rows = rng.choice((1, rng.randint(1, 64), rng.randint(1, 4000)))
                clients[queue.add(rows)] = Client(rows, rng.randint(1, 60))
        for serial in [serial for serial in clients if rng.random() < 0.01]:  # cancelled in any phase
            queue.finish(serial)
            del clients[serial]
        for _ in range(rng.randint(1, 20)):
            action = queue.next()
            queue.check()
            if action is None:
                assert not clients
                break
            got = {action.serial} if isinstance(action, Prefill) else set(action.serials)
            started = [serial for serial, client in clients.items() if client.computed]
            decoding = [serial for serial in started if clients[serial].computed == clients[serial].prompt_rows]
            if isinstance(action, Prefill):
                client = clients[action.serial]
                assert action.start == client.computed < action.stop <= client.prompt_rows and action.start % queue.chunk_rows == 0
                if action.start == 0:
                    before = [serial for serial in clients if serial < action.serial and not clients[serial].computed]
                    assert len(started) + len(before) < sessions_max, "overtook somebody on the way to the last session"
                client.computed = action.stop
                assert action.last == (action.stop == client.prompt_rows)
                since_step += 1
                assert not decoding or since_step <= chunks, "prompts hold decoding requests up"
            else:
                assert got <= set(decoding) and 0 < len(got) == len(action.serials) == min(most, len(decoding))
                since_step = 0
            turns = -(-sessions_max // most) + 1
            first = next((serial for serial in clients if serial not in decoding), None)
            for serial, client in clients.items():
                owed = serial in decoding or (serial == first and (serial in started or len(started) < sessions_max))
                client.idle = client.idle + 1 if owed and serial not in got else 0
                assert client.idle <= (turns * TURN_STEPS * (chunks + 1) if serial in decoding else 4), f"request {serial} starves"
            for serial in got:
                client = clients[serial]
                if isinstance(action, Step):
                    client.tokens -= 1
                if client.tokens <= 0:
                    queue.finish(serial)
                    del clients[serial]
                    ended += 1
    assert ended > 10
