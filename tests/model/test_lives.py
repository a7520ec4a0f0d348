"""Lives of sessions: forks, parking, truncation into shared extents, prompts that begin with a held session's rows; states; random lives."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tier_scene
from lives import World
from tier_scene import RING, VOCAB

from glm53 import Engine, SamplingParams
from glm53.errors import DeviceMemoryError, InputError, LifetimeError
from glm53.hip import runtime
from glm53.sched.sessions import SessionState

MODEL: dict[str, Any] = {"layers": 5, "seed": 12, "mtp": True, "overrides": {"moe_intermediate_size": 192}}
TINY: dict[str, Any] = {"layers": 3, "vocab": 64, "topk": 32, "seed": 7, "mtp": True, "overrides": {"moe_intermediate_size": 128}}
PROMPT = [(i * 37 + 11) % VOCAB for i in range(300)]
WAYS: list[dict[str, Any]] = [
    {"kv_tier": "host", "hot_rows": RING + 40},
    {"kv_tier": "host", "hot_rows": 2048, "mtp": 2},
    {"kv_tier": "resident"},
    {"kv_tier": "host", "hot_rows": RING + 40, "devices": (0, 1), "mtp": 1},
]


def open_engine(path: Path, sessions_max: int = 4, **changes: Any) -> Engine:
    if len(changes.get("devices", (0,))) > runtime.select().device_count:
        pytest.skip("a pair needs two devices")
    return Engine.open(path, **tier_scene.settings(sessions_max=sessions_max, **changes))


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_fork_is_a_session_that_made_the_same_calls(way: dict[str, Any], make_checkpoint: Callable[..., Path]) -> None:
    path = make_checkpoint(**MODEL)
    with tier_scene.open_resident(path) as plain, open_engine(path, **way) as engine:
        for rows in (0, 1, 63, 64, 65, 128, 299, 300, 304):
            with plain.session() as expected, engine.session() as source:
                for session in (expected, source):
                    session.prefill(PROMPT)
                    session.step([1, 2, 3, 4])
                fork = source.fork(rows)
                expected.truncate(rows)
                assert fork.rows == rows and fork.tokens == tuple([*PROMPT, 1, 2, 3, 4][:rows])
                source.step([9])  # each goes its own way
                np.testing.assert_array_equal(fork.prefill([7, 8]), expected.prefill([7, 8]), err_msg=f"fork at {rows}")
                np.testing.assert_array_equal(fork.step([5]), expected.step([5]), err_msg=f"fork at {rows}")
                with plain.session() as other:
                    other.prefill(PROMPT)
                    other.step([1, 2, 3, 4])
                    other.step([9])
                    np.testing.assert_array_equal(source.step([6]), other.step([6]), err_msg=f"source of a fork at {rows}")
                fork.close()
        tier_scene.assert_all_given_back(engine, str(way))


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_forks_share_full_extents(way: dict[str, Any], make_checkpoint: Callable[..., Path]) -> None:
    """Extents of 64 rows: a fork at 300 rows takes one of its own."""
    with open_engine(make_checkpoint(**MODEL), **way) as engine, engine.session() as source:
        source.prefill(PROMPT)
        before = [side.tier.pool.free for side in engine.stage.sides]
        with source.fork():
            taken = [a - side.tier.pool.free for a, side in zip(before, engine.stage.sides, strict=True)]
            assert all(-5 <= count <= 1 for count in taken), taken  # a pool may have grown by a chunk meanwhile
            for side in engine.stage.sides:
                assert side.tier.pool.used == 6


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_truncate_into_a_shared_extent(way: dict[str, Any], make_checkpoint: Callable[..., Path]) -> None:
    path = make_checkpoint(**MODEL)
    with tier_scene.open_resident(path) as plain, open_engine(path, **way) as engine, engine.session() as source, plain.session() as expected:
        source.prefill(PROMPT)
        expected.prefill(PROMPT)
        fork = source.fork(256)
        for session in (source, fork):
            session.truncate(100)
            session.prefill([3, 1, 4] if session is source else [2, 7])
        expected.truncate(100)
        expected.prefill([3, 1, 4])
        np.testing.assert_array_equal(source.step([5]), expected.step([5]))
        expected.truncate(100)
        expected.prefill([2, 7])
        np.testing.assert_array_equal(fork.step([5]), expected.step([5]))
        fork.close()


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_park_and_resume(way: dict[str, Any], make_checkpoint: Callable[..., Path]) -> None:
    """A parked session has no slot and no device memory; the next call that needs it brings it back as it was."""
    path = make_checkpoint(**MODEL)
    with tier_scene.open_resident(path, sessions_max=1) as plain, open_engine(path, sessions_max=1, **way) as engine:
        with plain.session() as expected:
            expected.prefill(PROMPT)
            wanted = [expected.step([1, 2]), expected.prefill([7] * 20), expected.step([3])]
        with engine.session() as session:
            session.prefill(PROMPT)
            got = [session.step([1, 2])]
            session.park()
            assert session.state is SessionState.PARKED and session.rows == 302 and len(session.tokens) == 302
            for side in engine.stage.sides:
                assert side.keys.pool.used == 0
            with engine.session() as other:  # takes the only slot
                other.prefill([1, 2, 3])
                with pytest.raises(InputError, match="all 1 sessions are in use"):
                    session.step([1])
                assert session.state is SessionState.PARKED
            got.append(session.prefill([7] * 20))
            session.park()
            session.park()
            session.resume()
            got.append(session.step([3]))
            tier_scene.assert_same_bits(wanted, got, str(way))
            session.park()
        tier_scene.assert_all_given_back(engine, str(way))


def test_states_and_refusals(make_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    with open_engine(make_checkpoint(**TINY), kv_tier="resident") as engine:
        session = engine.session()
        assert session.state is SessionState.CREATED
        session.prefill([1, 2, 3])
        assert session.state is SessionState.READY
        stream = session.stream([4, 5], SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True))
        next(stream)
        assert session.state is SessionState.READY
        stream.close()
        session.truncate(0)
        assert session.state is SessionState.CREATED and session.rows == 0
        session.save(tmp_path / "empty")
        with engine.restore(tmp_path / "empty") as restored:
            assert restored.state is SessionState.CREATED
        for rows in (-1, 1, 0.0, True, "0"):
            with pytest.raises(InputError, match="fork: got"):
                session.fork(rows)  # type: ignore[arg-type]
        session.close()
        session.close()
        assert session.state is SessionState.CLOSED
        for call in (
            session.settle,
            session.fork,
            lambda: session.step([1]),
            lambda: session.prefill([1]),
            lambda: session.truncate(0),
            session.park,
        ):
            with pytest.raises(LifetimeError, match="the session is closed; next: open another one"):
                call()


def test_a_fork_that_fails_opens_nothing(make_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    with open_engine(make_checkpoint(**MODEL), **WAYS[0]) as engine, engine.session() as source:
        source.prefill(PROMPT)
        expected = source.step([1])
        source.truncate(300)

        def refuse(*_: Any) -> Any:
            raise DeviceMemoryError("index keys: out of luck")

        with monkeypatch.context() as patch:
            patch.setattr(engine.keys, "fork", refuse)
            with pytest.raises(DeviceMemoryError, match="out of luck"):
                source.fork()
        assert len(engine.tier.sessions) == 1
        np.testing.assert_array_equal(source.step([1]), expected)
        with engine.session(), engine.session(), engine.session(), pytest.raises(InputError, match="all 4 sessions are in use"):
            source.fork()


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_prompts_start_from_held_rows(way: dict[str, Any], make_checkpoint: Callable[..., Path]) -> None:
    """The text is that without reuse; rows that were computed as steps are not taken."""
    path, params = make_checkpoint(**MODEL), SamplingParams(temperature=0.0, seed=1, max_tokens=8, ignore_eos=True, logprobs=2)
    with tier_scene.open_resident(path) as plain:
        prompts = [PROMPT, [*PROMPT[:200], 1, 2, 3], PROMPT[:150], [*PROMPT, 9], PROMPT[:30], [5, 6]]
        expected = [plain.generate(prompt, params) for prompt in prompts]
    with open_engine(path, **way) as engine:
        with engine.session() as held:
            held.prefill(PROMPT[:250])
            held.step(PROMPT[250:252])
            held.prefill(PROMPT[252:])
            got = [engine.generate(prompt, params) for prompt in prompts]
        assert got == expected
        assert [done.reused_rows for done in got] == [250, 200, 149, 250, 0, 0]
        assert engine.generate(PROMPT, params).reused_rows == 0  # nobody holds them any more
        tier_scene.assert_all_given_back(engine, str(way))


class FailingCalls:
    """The cpu runtime fails the nth call of an API, both drawn."""

    APIS = (
        "hipMemcpyAsync",
        "hipMemcpy2DAsync",
        "hipModuleLaunchKernel",
        "hipEventRecord",
        "hipStreamWaitEvent",
        "hipMalloc",
        "hipStreamSynchronize",
    )

    def __init__(self) -> None:
        self._control, self._api = runtime.control(), self.APIS[0]

    def arm(self, rng: random.Random) -> None:
        self._api = rng.choice(self.APIS)
        self._control.glm53_cpu_fail(self._api.encode(), rng.choice((1, 2, 3, 5, 8, 13, 21)), 2)

    def clear(self) -> None:
        self._control.glm53_cpu_fail(self._api.encode(), 0, 0)


@pytest.mark.parametrize("way", [WAYS[0], WAYS[2], WAYS[3]], ids=str)
def test_random_lives_with_failing_calls(way: dict[str, Any], make_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    if runtime.select().name != "cpu":
        pytest.skip("faults are the cpu runtime's to choose")
    path = make_checkpoint(**TINY)
    with open_engine(path, sessions_max=4, **way) as engine, tier_scene.open_resident(path, sessions_max=8) as naive:
        world = World(engine, naive, tmp_path, seed=11, vocab=64, rows_max=600)
        world.fault = FailingCalls()
        for _ in range(200):
            world.act()
        world.fault = None
        world.end()
        assert world.failures > 5, (world.failures, world.done)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_random_lives(way: dict[str, Any], make_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    path = make_checkpoint(**TINY)
    with open_engine(path, sessions_max=4, **way) as engine, tier_scene.open_resident(path, sessions_max=8) as naive:
        world = World(engine, naive, tmp_path, seed=5, vocab=64, rows_max=600)
        for _ in range(120):
            world.act()
        world.end()
        assert {"fork", "park", "save", "truncate", "step", "prefill", "stream"} <= world.done.keys() and world.left > 3, world.done
        assert sum(world.done.values()) > 2 * sum(world.skipped.values()), (world.done, world.skipped)


def test_random_lives_with_drafts_that_stand(demo_path: Path, tmp_path: Path) -> None:
    """On the demo model, whose drafts are accepted: streams are left inside rounds."""
    with open_engine(demo_path, sessions_max=4, kv_tier="host", hot_rows=RING + 40, mtp=3) as engine:
        with tier_scene.open_resident(demo_path, sessions_max=8) as naive:
            world = World(engine, naive, tmp_path, seed=3, vocab=2000, rows_max=600)
            while world.done["stream"] < 20:
                world.act()
            world.end()
        assert sum(engine.draft_counts().accepted) > 20 and world.left > 3, engine.draft_counts()
