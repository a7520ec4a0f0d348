"""What requests get from one another and what they may hold: prompts that are kept, turns, room, deadlines. Texts are those of each request alone."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from loop_scene import SETTINGS, Client, check_free, ends_of, running

from glm53 import Engine, SamplingParams
from glm53.errors import Glm53Error
from glm53.hip import runtime
from glm53.prices import SHARE, _once, books_of
from glm53.request import Request
from glm53.sched.admission import Limit
from glm53.sched.scheduler import Drop, Park, Rest, Resume, Start
from glm53.serve.loop import Busy, Cancelled, Expired, Loop, NeverFits

WORDS = [(i * 29 + i // 7) % 64 for i in range(150)]  # one long text; prompts are its beginnings


@pytest.fixture(scope="module")
def engine(small_path: Path) -> Iterator[Engine]:
    with Engine.open(small_path, **SETTINGS) as engine:
        yield engine


@pytest.fixture(scope="module", params=[("0", "host"), ("2", "host"), ("0", "resident")], ids=["", "mtp", "resident"])
def each_engine(small_path: Path, engine: Engine, request: pytest.FixtureRequest) -> Iterator[Engine]:
    if request.param == ("0", "host"):
        yield engine
        return
    with Engine.open(small_path, mtp=request.param[0], kv_tier=request.param[1], **SETTINGS) as other:
        yield other


def params(seed: int, tokens: int = 12) -> SamplingParams:
    return SamplingParams(temperature=0.9, seed=seed, max_tokens=tokens, repetition_penalty=1.0 + seed % 2 / 10, ignore_eos=True)


def asked(loop: Loop, prompt: list[int], how: SamplingParams, owner: str = "") -> Request:
    request = loop.engine.request(prompt, how)
    request.owner = owner
    return request


def ask(loop: Loop, prompt: list[int], how: SamplingParams, owner: str = "") -> Client:
    client = Client()
    client.job = loop.submit([asked(loop, prompt, how, owner)], [client.events.put])[0]
    return client


def alone(engine: Engine, prompt: list[int], how: SamplingParams) -> list[int]:
    return list(engine.generate(prompt, how).token_ids)  # type: ignore[union-attr]


def watched(loop: Loop) -> list[object]:
    """The actions that the scheduler will give out."""
    seen: list[object] = []
    real = loop._scheduler.next

    def watch() -> object:
        action = real()
        if action is not None:
            seen.append(action)
        return action

    loop._scheduler.next = watch  # type: ignore[method-assign, assignment]
    return seen


def test_a_later_prompt_begins_with_the_rows_of_an_earlier_one(each_engine: Engine) -> None:
    expected = [alone(each_engine, WORDS[:rows], params(rows)) for rows in (100, 130, 70)]
    with running(each_engine) as loop:
        seen = watched(loop)
        for index, (rows, reused) in enumerate(((100, 0), (130, 100), (70, 69))):
            client = ask(loop, WORDS[:rows], params(rows))
            assert client.end() == "length" and client.tokens == expected[index]
            assert client.reused_rows == reused, index
        assert ask(loop, WORDS[:100], params(1), "another").reused_rows == 0
        assert sum(action.take for action in seen if isinstance(action, Start)) >= 1, "no history was handed on"
        loop.call(loop._scheduler.check).result(10)


def test_nothing_is_kept_where_that_is_off(engine: Engine) -> None:
    with running(engine, keeps=False) as loop:
        for _ in range(2):
            client = ask(loop, WORDS[:100], params(3))
            client.end()
            assert client.reused_rows == 0
        loop.call(lambda: check_free(engine)).result(10)


def test_parked_histories_are_begun_with_too(each_engine: Engine) -> None:
    """More texts than slots: all but the last ones are parked when they are asked for again."""
    texts = [[(one * (owner + 3) + owner) % 64 for one in WORDS[:90]] for owner in range(5)]
    expected = [alone(each_engine, [*text, 5, 6], params(2)) for text in texts]
    with running(each_engine) as loop:
        seen = watched(loop)
        for text in texts:
            ask(loop, text, params(1)).end()
        for text, right in zip(texts, expected, strict=True):
            client = ask(loop, [*text, 5, 6], params(2))
            client.end()
            assert client.tokens == right and client.reused_rows == 90
        assert any(isinstance(action, Rest) for action in seen)


def test_a_parked_history_serves_two_different_prompts(each_engine: Engine) -> None:
    """Forked while it is parked, and it stays."""
    prompts = [[*WORDS[:80], 1, 2], [*WORDS[:80], 3, 4]]
    expected = [alone(each_engine, prompt, params(2)) for prompt in prompts]
    with running(each_engine) as loop:
        ask(loop, WORDS[:90], params(1)).end()
        for owner in range(3):  # push it out of its slot
            ask(loop, [(one * 5 + owner) % 64 for one in WORDS[:70]], params(1), "other").end()
        kept = next(iter(loop._scheduler.shelf))
        assert not kept.open and len(kept.tokens) == 90
        for prompt, right in zip(prompts, expected, strict=True):
            client = ask(loop, prompt, params(2))
            client.end()
            assert client.tokens == right and client.reused_rows == 80
        assert len(kept.tokens) == 90 and kept.key in loop._scheduler.shelf


def test_the_choices_of_one_prompt_share_it(each_engine: Engine) -> None:
    prompt = WORDS[:130]
    expected = [alone(each_engine, prompt, params(seed)) for seed in range(5)]
    with running(each_engine) as loop:
        seen = watched(loop)
        clients = [Client() for _ in range(5)]
        loop.submit([asked(loop, prompt, params(seed)) for seed in range(5)], [client.events.put for client in clients])
        for seed, client in enumerate(clients):
            assert client.end() == "length" and client.tokens == expected[seed], seed
        assert sorted(client.reused_rows for client in clients) == [0, 129, 129, 129, 129]
        assert any(isinstance(action, Start) and action.parent is not None for action in seen), "nobody began with a running one's rows"


@pytest.mark.parametrize("seed", range(2))
def test_requests_that_take_turns_are_what_they_would_be_alone(each_engine: Engine, seed: int) -> None:
    """Nine requests on three slots, a turn being five steps; some are cancelled in any state."""
    rng = random.Random(seed)
    prompts = [WORDS[i : i + rng.choice((3, 40, 70, 100))] for i in range(9)]
    expected = [alone(each_engine, prompt, params(i, 40)) for i, prompt in enumerate(prompts)]
    with running(each_engine, parked_max=6) as loop:
        loop._scheduler.quantum = 5
        seen = watched(loop)
        clients = [ask(loop, prompt, params(i, 40), rng.choice("ab")) for i, prompt in enumerate(prompts)]
        gone = rng.sample(range(9), 2)
        for index in gone:
            clients[index].token(rng.randrange(1, 20))
            loop.cancel([clients[index].job])  # type: ignore[list-item]
        for index, client in enumerate(clients):
            end = client.end()
            assert isinstance(end, Cancelled) or end == "length"
            assert client.tokens == expected[index][: len(client.tokens)] and (index in gone or len(client.tokens) == 40), index
        parks = [action.serial for action in seen if isinstance(action, Park)]
        assert len(parks) >= 6 and any(isinstance(action, Resume) for action in seen)
        loop.call(loop._scheduler.check).result(10)


def test_a_session_whose_request_is_parked_gets_its_rows(each_engine: Engine) -> None:
    with running(each_engine, parked_max=6) as loop, each_engine.session() as session, each_engine.session() as twin:
        expected = [token for chunk in twin.stream(WORDS[:70], params(5, 30)) for token in chunk.token_ids]
        held = (twin.tokens, twin.pending, twin._prompt_rows)
        twin.close()
        loop._scheduler.quantum = 4
        seen = watched(loop)
        others = [ask(loop, WORDS[i : i + 9], params(i, 60)) for i in range(4)]
        request = asked(loop, WORDS[:70], params(5, 30))
        request.session = session
        client = Client()
        job = loop.submit([request], [client.events.put])[0]
        assert client.end() == "length" and client.tokens == expected
        assert (session.tokens, session.pending, session._prompt_rows) == held
        assert any(isinstance(action, Park) and action.serial == job.serial for action in seen)
        for other in others:
            other.end()


def limited(loop: Loop, host_rows: int) -> None:
    """As if the host had room for so many rows."""
    limits = [
        limit if limit.place != "host" else Limit("host", loop.books.cost(host_rows, False)[-1], "--host-kv-gib 1") for limit in loop.books.limits
    ]
    loop.books.limits = tuple(limits)


def test_room_is_asked_for_before_anything_starts(engine: Engine) -> None:
    with running(engine) as loop:
        limited(loop, 2 * 64)
        with pytest.raises(NeverFits) as refused:
            ask(loop, WORDS[:140], params(1, 100))
        for part in ("192 rows", "at host", "history rows", "index keys while parked", "--host-kv-gib 1", "for 128 rows"):
            assert part in str(refused.value), str(refused.value)
        first = ask(loop, WORDS[:60], params(1, 60))  # two extents
        second = ask(loop, WORDS[:61], params(2, 60))  # two more: it waits until the first one has ended
        small = ask(loop, WORDS[:5], params(3, 5), "small")  # not overtaking
        first.token(2)
        assert second.events.empty() and loop.load().waiting >= 1
        for client in (first, second, small):
            assert client.end() == "length"
        assert second.tokens == alone(engine, WORDS[:61], params(2, 60))


def test_kept_prompts_make_room(engine: Engine) -> None:
    with running(engine) as loop:
        limited(loop, 4 * 64)
        seen = watched(loop)
        for start in range(0, 60, 10):
            client = ask(loop, WORDS[start : start + 70], params(start, 20))
            assert client.end() == "length"
            loop.call(loop._scheduler.check).result(10)
        assert sum(isinstance(action, Drop) for action in seen) >= 3


def test_memory_never_runs_out_behind_the_door(each_engine: Engine) -> None:
    """Many requests with a host of few rows and turns: the pools never hold more than the books say."""
    rng = random.Random(5)
    with running(each_engine, parked_max=3) as loop:
        limited(loop, 6 * 64)
        loop._scheduler.quantum = 3
        loop.call(lambda: None).result(10)
        most = 0
        real = loop._act

        def act(action: object) -> None:
            nonlocal most
            real(action)  # type: ignore[arg-type]
            loop._scheduler.check()
            most = max(most, each_engine.tier.pool.used if each_engine.config.kv_tier == "host" else 0)

        loop._act = act  # type: ignore[method-assign, assignment]
        prompts = [WORDS[i : i + rng.randrange(1, 120)] for i in range(24)]
        clients = [ask(loop, prompt, params(i, rng.randrange(1, 50)), rng.choice("ab")) for i, prompt in enumerate(prompts)]
        for client in clients:
            assert client.end() == "length"
        assert most <= 6


@pytest.mark.parametrize(("tier", "mtp"), [("host", "2"), ("resident", "0")])
def test_a_device_of_little_memory_is_enough_for_whom_it_admits(small_path: Path, tier: str, mtp: str) -> None:
    """Room for one and a half of the longest histories, in truth: an allocation beyond it fails."""
    with Engine.open(small_path, kv_tier=tier, mtp=mtp, **SETTINGS) as engine:
        prompts = [WORDS[i : i + rows] for i, rows in enumerate((1, 150, 30, 100, 64, 150, 7, 90, 150, 150))]
        with Engine.open(small_path, kv_tier=tier, mtp=mtp, **SETTINGS) as other:
            expected = [alone(other, prompt, params(i, 30)) for i, prompt in enumerate(prompts)]
        longest, once = books_of(engine).cost(engine.tier.rows_max, True)[0], _once(engine, engine.stage.first)
        ballast = engine.device.alloc(engine.device.free_bytes() - int((1.5 * longest + once) / SHARE) - 4096, category="ballast")
        with running(engine, parked_max=3) as loop:
            loop._scheduler.quantum = 5
            seen = watched(loop)
            clients = [ask(loop, prompt, params(i, 30)) for i, prompt in enumerate(prompts)]
            for index, client in enumerate(clients):
                assert client.end() == "length" and client.tokens == expected[index], (index, client.last)
            assert any(isinstance(action, Park | Rest) for action in seen)
            ballast.free()  # what is left is looked at with every session open


def test_deadlines(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(monotonic=lambda: 100.0)
    monkeypatch.setattr("glm53.serve.loop.time", clock)
    with running(engine) as loop:
        clients = [Client() for _ in range(3)]
        requests = [asked(loop, WORDS[:20], params(i, 150)) for i in range(3)]
        for request, deadline in zip(requests, (99.0, 110.0, 1000.0), strict=True):
            request.deadline = deadline
        loop.submit(requests, [client.events.put for client in clients])
        clients[1].token(3)
        clock.monotonic = lambda: 111.0
        late, running_late, fine = (client.end() for client in clients)
        assert isinstance(late, Expired) and not clients[0].started
        assert isinstance(running_late, Expired) and 3 <= len(clients[1].tokens) < 150
        assert fine == "length" and clients[2].tokens == alone(engine, WORDS[:20], params(2, 150))


def test_a_deadline_ends_a_request_that_nothing_can_start(engine: Engine) -> None:
    """No action is due: the thread wakes up for the deadline alone."""
    with running(engine) as loop, engine.session() as session:
        session.prefill(WORDS[:100])
        limited(loop, 2 * 64)
        request = asked(loop, WORDS[:30], params(1))
        request.deadline = time.monotonic() + 0.2
        client = Client()
        loop.submit([request], [client.events.put])
        assert isinstance(client.end(5.0), Expired) and loop.load().waiting == 0
        with pytest.raises(Busy):
            loop.call(lambda: loop.promise(64)).result(10)
        with pytest.raises(NeverFits):
            loop.call(lambda: loop.promise(1000)).result(10)


@pytest.mark.parametrize(
    ("api", "calls"), [("hipModuleLaunchKernel", 40), ("hipMemcpyAsync", 30), ("hipEventSynchronize", 8), ("hipMemcpy2DAsync", 4)]
)
def test_faults_end_what_they_hit_and_leave_the_books_right(engine: Engine, api: str, calls: int) -> None:
    if runtime.select().name != "cpu":
        pytest.skip("faults are the cpu runtime's to choose")
    rng = random.Random(api)
    prompts = [WORDS[i % 3 : i % 3 + 60 + 10 * (i % 4)] for i in range(8)]
    expected = [alone(engine, prompt, params(i, 14)) for i, prompt in enumerate(prompts)]
    with running(engine, parked_max=4) as loop:
        loop._scheduler.quantum = 4
        for _ in range(2):
            clients = [ask(loop, prompt, params(i, 14)) for i, prompt in enumerate(prompts)]
            for index, end in enumerate(ends_of(clients, api, rng.randint(1, calls))):
                assert isinstance(end, Glm53Error) or clients[index].tokens == expected[index], (api, index)
            loop.call(loop._scheduler.check).result(10)
            loop.call(engine.stage.check).result(10)
        assert loop.fatal is None
