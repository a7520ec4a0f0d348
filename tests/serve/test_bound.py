"""Requests that continue a session, and calls on the loop's thread."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from loop_scene import PROMPTS, Client, running

from glm53 import Engine, SamplingParams
from glm53.errors import InUse, LifetimeError
from glm53.serve.loop import Cancelled, Load, Loop, Stopped
from glm53.session import Session

PARAMS = SamplingParams(temperature=0.9, seed=5, max_tokens=9, repetition_penalty=1.1)


@pytest.fixture(scope="module")
def engine(small_engine: Engine) -> Engine:
    return small_engine


def ask(loop: Loop, session: Session, prompt: list[int], params: SamplingParams = PARAMS) -> Client:
    client = Client()
    request = loop.engine.request(prompt, params)
    request.session = session
    client.job = loop.submit([request], [client.events.put])[0]
    return client


def state_of(session: Session) -> tuple[object, ...]:
    return session.tokens, session.pending, session.rows, session._prompt_rows, session.sampling


def bits(session: Session) -> bytes:
    """Of every row of the main layers; those of the MTP layer are for drafts alone."""
    tier = session._engine.stage.first.tier
    session.settle()
    rows = session.rows
    target = np.empty((tier.layout.planes, rows, tier.layout.row_bytes), np.uint8)
    tier.export(session.slot, 0, target)
    return target[: session._engine.spec.n_layers].tobytes()


@pytest.mark.parametrize("stop", [(), (3, 9, 17, 20, 33, 40)])
def test_a_request_that_continues_a_session_is_a_stream_of_it(engine: Engine, stop: tuple[int, ...]) -> None:
    """Three turns, the last one after a part of the history was taken back."""
    params = SamplingParams(temperature=0.9, seed=5, max_tokens=9, repetition_penalty=1.1, stop_token_ids=stop)
    with running(engine) as loop, engine.session() as session, engine.session() as twin:
        for turn, (kept, more) in enumerate(((0, PROMPTS[5]), (None, PROMPTS[1]), (40, PROMPTS[2]))):
            if kept is not None:
                twin.truncate(kept)
            held, asked = twin.rows, [*twin.tokens, *twin.pending, *more]
            expected = [token for chunk in twin.stream(more, params) for token in chunk.token_ids]
            client = ask(loop, session, asked, params)
            client.end()
            assert client.tokens == expected, turn
            assert client.reused_rows == held
            assert loop.call(lambda: state_of(session)).result(10) == state_of(twin), turn
            assert loop.call(lambda: bits(session)).result(10) == bits(twin), turn


def test_a_request_that_is_cancelled_leaves_its_rows(engine: Engine) -> None:
    with running(engine) as loop, engine.session() as session:
        many = SamplingParams(max_tokens=80, ignore_eos=True, seed=1)
        client = ask(loop, session, PROMPTS[3], many)
        client.token(5)
        with pytest.raises(LifetimeError, match="prefilling"):
            loop.call(lambda: session.truncate(0)).result(10)
        loop.cancel([client.job])
        assert isinstance(client.end(), Cancelled)
        drawn = client.tokens
        assert list(session.tokens) == [*PROMPTS[3], *drawn][:-1] and session.pending == (drawn[-1],)
        rest = [token for chunk in session.stream((), SamplingParams(max_tokens=5, ignore_eos=True, seed=1)) for token in chunk.token_ids]
        whole = engine.generate(PROMPTS[3], SamplingParams(max_tokens=len(drawn) + 5, ignore_eos=True, seed=1))
        assert list(whole.token_ids) == drawn + rest  # type: ignore[union-attr]


def test_one_request_at_a_time_and_none_of_a_closed_session(engine: Engine) -> None:
    with running(engine) as loop, engine.session() as session:
        first = ask(loop, session, PROMPTS[3], SamplingParams(max_tokens=60, ignore_eos=True))
        with pytest.raises(InUse, match="another request"):
            ask(loop, session, PROMPTS[4])
        assert first.end() == "length"
        assert ask(loop, session, [*PROMPTS[3], 1]).end() in ("stop", "length")
        session.park()
        assert ask(loop, session, [*PROMPTS[3], 2]).end() in ("stop", "length")
        session.close()
        assert "closed" in str(ask(loop, session, PROMPTS[4]).end())
        assert loop.fatal is None


def test_calls_run_between_two_actions(engine: Engine) -> None:
    with running(engine) as loop:
        client = Client()
        loop.submit([engine.request(PROMPTS[2], SamplingParams(max_tokens=40, ignore_eos=True))], [client.events.put])
        assert loop.call(lambda: threading.current_thread().name).result(10) == "glm53 loop"
        with pytest.raises(ZeroDivisionError):
            loop.call(lambda: 1 // 0).result(10)
        assert client.end() == "length" and loop.load() == Load(0, 0)
    with pytest.raises(Stopped):
        loop.call(lambda: 0).result(10)
