"""The loop without HTTP: many requests at once, cancelled and failing at any moment, give what each gives alone, and leave nothing behind."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence

import pytest
from loop_scene import PROMPTS, Client, check_free, ends_of, running

from glm53 import Completion, Engine, SamplingParams
from glm53.errors import DeviceLost, Glm53Error
from glm53.hip import runtime
from glm53.request import Chunk
from glm53.serve.loop import Busy, Cancelled, Event, Job, Loop, Stopped


@pytest.fixture(scope="module")
def engine(small_engine: Engine) -> Engine:
    return small_engine


def params_of(index: int) -> SamplingParams:
    return SamplingParams(temperature=0.9, top_p=0.9, seed=index, max_tokens=4 + index * 5 % 23, repetition_penalty=1.0 + index % 2 / 10)


def submit(loop: Loop, index: int) -> tuple[Job, Client]:
    client = Client()
    request = loop.engine.request(PROMPTS[index % len(PROMPTS)], params_of(index))
    return loop.submit([request], [client.events.put])[0], client


_ALONE: dict[int, Completion] = {}  # by index, of whichever engine came first: MTP does not change a text


def alone(engine: Engine, indices: Sequence[int]) -> dict[int, Completion]:
    """What the engine gives for each request alone."""
    for index in indices:
        if index not in _ALONE:
            one = engine.generate(PROMPTS[index % len(PROMPTS)], params_of(index))
            assert isinstance(one, Completion)
            _ALONE[index] = one
    return _ALONE


@pytest.mark.parametrize(("chunks_per_step", "decode_max"), [(1, 0), (2, 1), (1, 2)])
def test_many_at_once_give_what_each_gives_alone(engine: Engine, chunks_per_step: int, decode_max: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("glm53.sched.queue.TURN_STEPS", 2)  # groups change while steps are in flight
    expected = alone(engine, range(16))
    with running(engine, chunks_per_step=chunks_per_step, decode_max=decode_max) as loop:
        clients = [submit(loop, index)[1] for index in range(16)]
        for index, client in enumerate(clients):
            assert client.end() == expected[index].finish_reason and tuple(client.tokens) == expected[index].token_ids, index


@pytest.mark.parametrize("seed", range(2))
def test_requests_cancelled_at_any_moment_leave_the_others_alone(engine: Engine, seed: int) -> None:
    rng = random.Random(seed)
    expected = alone(engine, range(24))
    with running(engine, decode_max=rng.choice((0, 2))) as loop:
        clients: dict[int, tuple[Job, Client]] = {}
        threads = [threading.Timer(rng.random() / 4, lambda i=index: clients.__setitem__(i, submit(loop, i))) for index in range(24)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
            for job, _ in rng.sample(list(clients.values()), len(clients) // 12):
                loop.cancel([job, job])
        ends = {index: client.end() for index, (_, client) in clients.items()}
        for index, end in ends.items():
            client = clients[index][1]
            if isinstance(end, Cancelled):
                assert tuple(client.tokens) == expected[index].token_ids[: len(client.tokens)]
            else:
                assert end == expected[index].finish_reason and tuple(client.tokens) == expected[index].token_ids, index
        assert len(ends) == 24


def test_a_request_that_cannot_draw_ends_alone(engine: Engine) -> None:
    expected = alone(engine, range(3))
    with running(engine) as loop:
        requests = [engine.request(PROMPTS[index], params_of(index)) for index in range(3)]

        def accept(*_: object) -> Chunk:
            raise Glm53Error("no finite number")

        requests[1].accept = accept  # type: ignore[method-assign]
        clients = [Client() for _ in requests]
        loop.submit(requests, [client.events.put for client in clients])
        ends = [client.end() for client in clients]
        assert isinstance(ends[1], Glm53Error) and "no finite" in str(ends[1])
        for index in (0, 2):
            assert ends[index] == expected[index].finish_reason and tuple(clients[index].tokens) == expected[index].token_ids


@pytest.mark.parametrize(
    ("api", "calls"), [("hipModuleLaunchKernel", 40), ("hipMemcpyAsync", 20), ("hipEventSynchronize", 4), ("hipEventRecord", 10)]
)
def test_a_failing_call_ends_what_it_was_for_and_no_more(engine: Engine, api: str, calls: int) -> None:
    """One of the first `calls` calls fails. Few, since the cpu runtime is slow as long as a failure is due."""
    if runtime.select().name != "cpu":
        pytest.skip("faults are the cpu runtime's to choose")
    rng = random.Random(api)
    expected = alone(engine, range(12))
    failed = 0
    with running(engine) as loop:
        for _ in range(2):
            clients = [submit(loop, index)[1] for index in range(12)]
            ends = ends_of(clients, api, rng.randint(1, calls))
            failed += sum(isinstance(end, Glm53Error) for end in ends)
            for index, (end, client) in enumerate(zip(ends, clients, strict=True)):
                if not isinstance(end, Glm53Error):
                    assert end == expected[index].finish_reason and tuple(client.tokens) == expected[index].token_ids, (api, index)
        assert loop.fatal is None
    assert 0 < failed <= 2 * 3, "more failed than one action can hold"


def test_a_lost_device_ends_everything_and_says_so(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(engine) as loop:
        lost = DeviceLost("hipStreamSynchronize", 719, "unspecified launch failure")
        real, calls = engine.act, iter(range(1000))

        def act(*arguments: object) -> object:
            if next(calls) == 9:
                raise lost
            return real(*arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(engine, "act", act)
        ends = [client.end() for _, client in [submit(loop, index) for index in range(8)]]
        assert lost in ends and all(end is lost or isinstance(end, str) for end in ends)
        assert loop.fatal is lost
        with pytest.raises(Stopped, match="launch failure"):
            submit(loop, 0)
    monkeypatch.undo()
    check_free(engine)


def test_limits_and_closing(engine: Engine) -> None:
    with running(engine, waiting_max=2) as loop:
        clients = []
        with pytest.raises(Busy, match="wanted at most 2 waiting beside 3 running"):
            for _ in range(20):
                clients.append(submit(loop, 3)[1])
        assert len(clients) >= 5
        with pytest.raises(Busy):
            loop.submit([engine.request(PROMPTS[0], params_of(0))] * 6, [lambda event: None] * 6)
        loop.close()
        ends = [client.end() for client in clients]
        assert all(isinstance(end, (str, Stopped)) for end in ends) and any(isinstance(end, Stopped) for end in ends)
        with pytest.raises(Stopped, match="shutting down"):
            submit(loop, 0)


def test_a_listener_that_raises_ends_its_own_request_only(engine: Engine) -> None:
    expected = alone(engine, [5])
    with running(engine) as loop:

        def broken(event: Event) -> None:
            raise RuntimeError("gone")

        loop.submit([engine.request(PROMPTS[2], SamplingParams(max_tokens=100, ignore_eos=True))], [broken])
        client = submit(loop, 5)[1]
        assert client.end() == expected[5].finish_reason and tuple(client.tokens) == expected[5].token_ids
