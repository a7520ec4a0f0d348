"""Streams of a session that are left, suspended and gone on with: what the history has then, and that no call in between changes the text."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from glm53 import Engine, SamplingParams
from glm53.errors import DeviceLost, InputError, LifetimeError
from glm53.model.stage import Stage
from glm53.sched.sessions import SessionState
from glm53.session import Session
from glm53.sessionfile import SessionFile

GREEDY = SamplingParams(temperature=0.0, seed=3, max_tokens=24, ignore_eos=True)
PENALISED = SamplingParams(temperature=0.8, repetition_penalty=1.6, seed=5, max_tokens=40, ignore_eos=True)
WAYS: list[dict[str, Any]] = [{"mtp": 0}, {"mtp": 3}, {"mtp": 3, "kv_tier": "resident"}]
PROMPT = "In the beginning"


@pytest.fixture(scope="module")
def engines(demo_path: Path) -> Iterator[list[Engine]]:
    """One a way, on the demo model, whose drafts are accepted. The first one has none."""
    with ExitStack() as stack:
        yield [stack.enter_context(open_engine(demo_path, **way)) for way in WAYS]


def open_engine(path: Path, **changes: Any) -> Engine:
    return Engine.open(path, **{"context_rows_max": 1024, "hot_rows": 512, "sessions_max": 3} | changes)


def rest(stream: Iterator[Any]) -> list[int]:
    return [token for chunk in stream for token in chunk.token_ids]


def test_a_stream_that_is_left_leaves_what_was_seen(engines: list[Engine]) -> None:
    """After any number of tokens, closed or dropped, read or gone on with at once; the text after it is that without drafts."""
    plain, drafts = engines[:2]
    prompt = plain.encode(PROMPT)
    inside = 0  # how often a round had drawn more than was taken
    for count in range(1, 10):
        texts = []
        for engine in (plain, drafts):
            with engine.session() as session:
                stream = session.stream(prompt, GREEDY)
                seen = [token for _ in range(count) for token in next(stream).token_ids]
                inside += engine.stage.rows(session.slot) > len(prompt) + count - 1
                if count % 3 == 0:
                    stream.close()  # type: ignore[attr-defined]
                elif count % 3 == 1:
                    del stream
                    gc.collect()
                assert [*session.tokens, *session.pending] == [*prompt, *seen] and session.rows == len(prompt) + count - 1
                if count % 2:
                    session.settle()
                    assert engine.stage.rows(session.slot) == session.rows
                texts.append((seen, rest(session.stream(" of the war", GREEDY)), rest(session.stream((), GREEDY)), session.rows))
        assert texts[0] == texts[1], count
    assert inside > 3, "rounds were left in the middle"


def parked(session: Session, other: Session, folder: Path) -> None:
    """The slot is another session's meanwhile, which fills it with marks of its own."""
    engine = session._engine
    session.park()
    with engine.session() as taker:  # type: ignore[attr-defined]
        rest(taker.stream("And the king said unto the people", replace(PENALISED, seed=9, repetition_penalty=2.0)))


def forked(session: Session, other: Session, folder: Path) -> None:
    with session.fork() as fork:
        rest(fork.stream((), replace(PENALISED, seed=1)))


BETWEEN: dict[str, Callable[[Session, Session, Path], object]] = {
    "settle": lambda session, other, folder: session.settle(),
    "park": parked,
    "fork": forked,
    "save": lambda session, other, folder: session.save(folder / "s"),
    "other": lambda session, other, folder: rest(other.stream("And the king", replace(PENALISED, seed=8, max_tokens=5))),
}


@pytest.mark.parametrize("between", BETWEEN)
def test_calls_between_two_tokens_change_no_text(between: str, engines: list[Engine], tmp_path: Path) -> None:
    """The marks of a repetition penalty too are those of the tokens so far, wherever the session has been."""
    with engines[0].session() as session:
        expected = rest(session.stream(PROMPT, PENALISED))
    for engine, way in zip(engines, WAYS, strict=True):
        with engine.session() as other, engine.session() as session:
            stream = session.stream(PROMPT, PENALISED)
            got: list[int] = []
            for count in (4, 3, 2):
                got += [token for _ in range(count) for token in next(stream).token_ids]
                BETWEEN[between](session, other, tmp_path)
            assert got + rest(stream) == expected, way


CHANGES: dict[str, Callable[[Session], object]] = {
    "truncate to what it has": lambda session: session.truncate(session.rows),
    "truncate": lambda session: session.truncate(2),
    "step": lambda session: session.step([5]),
    "cut and step": lambda session: (session.truncate(session.rows - 1), session.step([5])),
    "prefill": lambda session: session.prefill([5]),
    "stream": lambda session: next(iter(session.stream((), GREEDY))),
}


def test_a_suspended_stream_ends_where_the_history_was_changed(engines: list[Engine]) -> None:
    engine = engines[1]
    for name, change in CHANGES.items():
        with engine.session() as session:
            stream = session.stream(PROMPT, PENALISED)
            for _ in range(3):
                next(stream)
            change(session)
            tokens = session.tokens
            with pytest.raises(LifetimeError, match="stream: another call has changed the history"):
                next(stream)
            assert session.tokens == tokens, name
            assert len(rest(session.stream(" and", GREEDY))) == 24
    session = engine.session()
    stream = session.stream(PROMPT, PENALISED)
    next(stream)
    session.close()
    with pytest.raises(LifetimeError, match="the session is closed"):
        next(stream)


def test_each_stream_draws_with_its_own_settings(engines: list[Engine]) -> None:
    """Also where it follows one with the same seed at once, whose next step the device is ready for."""
    for engine, way in zip(engines, WAYS, strict=True):
        hot = replace(GREEDY, temperature=1.5, max_tokens=12)
        texts = []
        for settles in (True, False):
            with engine.session() as session:
                first = rest(session.stream(PROMPT, GREEDY))
                if settles:
                    engine.decoder.settle()
                texts.append((first, rest(session.stream((), hot))))
        assert texts[0] == texts[1], way


def test_a_save_has_the_hidden_row_of_its_cut(engines: list[Engine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it is written the session goes on."""
    with engines[1].session() as session:
        rest(session.stream(PROMPT, replace(GREEDY, max_tokens=9)))
        session.step([8])
        session.save(tmp_path / "before")
        export, calls = Stage.export, []

        def going_on(stage: Stage, *arguments: Any) -> None:
            if not calls:
                calls.append(session.step([9]))
            export(stage, *arguments)

        with monkeypatch.context() as patch:
            patch.setattr(Stage, "export", going_on)
            session.save(tmp_path / "during")
        assert calls
    found = []
    for name in ("before", "during"):
        with SessionFile(tmp_path / name) as file:
            found.append({(section.name, first): data.tobytes() for section, first, data in file.pieces()})
    assert any(found[0]["mtp.hidden", 0]) and found[0] == found[1]


def test_prompts_begin_with_the_rows_of_restored_sessions(engines: list[Engine], tmp_path: Path) -> None:
    """A file says which rows were computed as prompt rows; those drawn behind them are not taken."""
    engine, prompt = engines[0], list(range(50, 350))
    expected = engine.generate([*prompt, 7, 8], GREEDY)
    with engine.session() as session:
        session.prefill(prompt)
        session.step([7])
        session.save(tmp_path / "s")
    assert engine.generate([*prompt, 7, 8], GREEDY).reused_rows == 0
    for from_parked in (False, True):
        with engine.restore(tmp_path / "s", parked=from_parked) as session:
            state = session.state
            assert session.prompt_rows == 300 and (state is SessionState.PARKED) == from_parked
            for _ in range(2):  # the history that is begun with stays as it is
                got = engine.generate([*prompt, 7, 8], GREEDY)
                assert got == expected and got.reused_rows == 300 and session.state is state
            assert session.tokens == (*prompt, 7) and len(session.step([9])) == 1


def test_refusals(engines: list[Engine], tmp_path: Path) -> None:
    engine = engines[0]
    session = engine.session()
    session.prefill([1, 2, 3])
    with pytest.raises(InputError, match="params: got str, wanted SamplingParams"):
        session.stream("x", "y")  # type: ignore[arg-type]
    session.close()
    with pytest.raises(LifetimeError, match="resume: the session is closed; next: open another one"):
        session.resume()


def test_a_session_whose_device_is_lost_has_failed(demo_path: Path, control: Any) -> None:
    """It is good for `close` alone; what it was given then says so."""
    with open_engine(demo_path) as engine:
        lose(engine, control)


def lose(engine: Engine, control: Any) -> None:
    session = engine.session()
    session.prefill([1, 2, 3])
    control.glm53_cpu_fail(b"hipModuleLaunchKernel", 1, 719)
    with pytest.raises(DeviceLost):
        session.step([4])
    assert session.state is SessionState.FAILED
    for call in (session.settle, session.resume, session.park, lambda: session.step([1]), lambda: next(session.stream([1], GREEDY))):
        with pytest.raises(LifetimeError, match="the session is failed; next: close it and open the engine again"):
            call()
    session.close()
    assert session.state is SessionState.CLOSED


def test_logits_of_a_history_that_was_left(engines: list[Engine]) -> None:
    """Rows behind a round that was left have the bits of a session without drafts."""
    logits = []
    for engine in engines:
        with engine.session() as session:
            stream = session.stream(PROMPT, GREEDY)
            for _ in range(6):
                next(stream)
            logits.append(session.prefill([*session.pending, 40, 41]))
    np.testing.assert_array_equal(logits[0], logits[1])
    np.testing.assert_array_equal(logits[0], logits[2])
