"""Host tier and resident tier: the same calls give the same bits, whatever fits the hot buffer, and nothing is left behind."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from glm53 import Engine, SamplingParams
from glm53.errors import InputError
from glm53.hip import runtime
from glm53.kv import HostTier

VOCAB, TOPK, RING = 512, 64, 192
Call = tuple[str, Any]  # ("prefill", ids) | ("step", ids) | ("truncate", rows) | ("settle", None)


def script(seed: int, prompt_rows: int, calls: int) -> list[Call]:
    """A prompt, then steps of 1 to 8 rows, appends, rollbacks and settles, drawn from a seed."""
    rng = random.Random(seed)
    ids = lambda count: [rng.randrange(VOCAB) for _ in range(count)]
    rows, made = prompt_rows, [("prefill", ids(prompt_rows))]
    for _ in range(calls):
        kind = rng.choices(["step", "prefill", "truncate", "settle"], [12, 2, 2, 1])[0]
        if kind == "step":
            made.append((kind, ids(rng.choice([1, 1, 1, 2, 3, 8]))))
            rows += len(made[-1][1])
        elif kind == "prefill":
            made.append((kind, ids(rng.choice([1, 5, 40, 130]))))
            rows += len(made[-1][1])
        elif kind == "truncate":
            rows = max(1, rows - rng.choice([1, 3, 8, 60, 200]))
            made.append((kind, rows))
        else:
            made.append((kind, None))
    return made


def play(engine: Engine, calls: list[Call]) -> list[np.ndarray]:
    """Logits of every call that gives some."""
    found = []
    with engine.session() as session:
        for kind, value in calls:
            if kind == "settle":
                engine.tier.settle(session.slot)
            else:
                result = getattr(session, kind)(value)
                if result is not None:
                    found.append(result)
            engine.tier.check()
    return found


def assert_same_bits(expected: list[np.ndarray], got: list[np.ndarray], label: str) -> None:
    assert len(expected) == len(got)
    for index, (a, b) in enumerate(zip(expected, got, strict=True)):
        np.testing.assert_array_equal(a, b, err_msg=f"{label}, result {index}")


def engines(path: Path, hot_rows: int, **settings: Any) -> tuple[Engine, Engine]:
    shared: dict[str, Any] = {"dtype": "f32", "context_rows_max": 4096, "prefill_chunk_rows": 64, "extent_rows": 64, "host_chunk_mib": 2} | settings
    return Engine.open(path, kv_tier="resident", **shared), Engine.open(path, kv_tier="host", hot_rows=hot_rows, **shared)


@pytest.mark.parametrize("hot_rows", [RING + 1, RING + TOPK + 1, 320, 512, 2048])
@pytest.mark.parametrize("seed", [1, 2])
def test_same_calls_same_bits(hot_rows: int, seed: int, make_checkpoint: Callable[..., Path]) -> None:
    resident, host = engines(make_checkpoint(seed=12), hot_rows)
    with resident, host:
        calls = script(seed, prompt_rows=300, calls=40)
        assert_same_bits(play(resident, calls), play(host, calls), f"hot_rows {hot_rows}, seed {seed}")
        tier = host.tier
        assert isinstance(tier, HostTier) and tier.pool.free == tier.pool.capacity


@pytest.mark.parametrize("row_format", ["bf16", "q8g64"])
def test_row_formats(row_format: str, make_checkpoint: Callable[..., Path]) -> None:
    path = make_checkpoint(seed=13, real_widths=True, dtype="bfloat16", scale=0.5)
    resident, host = engines(path, 320, dtype="bf16", kv_format=row_format)
    with resident, host:
        calls = script(5, prompt_rows=400, calls=20)
        assert_same_bits(play(resident, calls), play(host, calls), row_format)


def test_history_twenty_times_the_hot_rows(make_checkpoint: Callable[..., Path]) -> None:
    resident, host = engines(make_checkpoint(seed=12), RING + 8, prefill_chunk_rows=256)
    with resident, host:
        calls = script(7, prompt_rows=2000, calls=12)
        assert_same_bits(play(resident, calls), play(host, calls), "long")


def test_no_host_read_while_the_history_fits(make_checkpoint: Callable[..., Path]) -> None:
    _, host = engines(make_checkpoint(seed=12), 512)
    with host, host.session() as session:
        session.prefill([i % VOCAB for i in range(300)])
        for token in range(60):
            session.step([token])
        counters = host.tier.counters()[session.slot]
        assert counters[:, 2].sum() > 0 and counters[:, [1, 3, 5]].sum() == 0, counters


def test_counters_replay(make_checkpoint: Callable[..., Path]) -> None:
    """Decisions do not depend on when copies complete: hits and misses are the same in every run."""
    path = make_checkpoint(seed=12)
    found = []
    for _ in range(2):
        _, host = engines(path, RING + 100)
        with host, host.session() as session:
            session.prefill([i * 7 % VOCAB for i in range(500)])
            for token in range(100):
                session.step([token * 5 % VOCAB])
            found.append(host.tier.counters()[session.slot])
    np.testing.assert_array_equal(found[0], found[1])
    assert found[0][:, 0].sum() > 0 and found[0][:, 1].sum() > 0


def test_batched_sessions_equal_each_alone(make_checkpoint: Callable[..., Path]) -> None:
    path = make_checkpoint(seed=12)
    resident, host = engines(path, RING + 100, sessions_max=3)
    prompts = [[(i * k + 3) % VOCAB for i in range(n)] for k, n in ((7, 500), (11, 90), (13, 300))]
    params = SamplingParams(temperature=0.0, max_tokens=80, ignore_eos=True, logprobs=5)
    with resident, host:
        expected = [resident.generate(p, params) for p in prompts]
        got = host.generate(prompts, params)
        for a, b in zip(expected, got, strict=True):
            assert a.token_ids == b.token_ids and a.logprobs == b.logprobs


def test_round_tags_wrap(make_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    import glm53.engine as engine_module

    make = engine_module.HostTierConfig
    wrapped = lambda **sizes: make(first_round=2**32 - 4, **sizes)
    wrapped.ring_rows_for = make.ring_rows_for  # type: ignore[attr-defined]
    monkeypatch.setattr(engine_module, "HostTierConfig", wrapped)
    resident, host = engines(make_checkpoint(seed=12), RING + 80)
    with resident, host:
        calls = script(3, prompt_rows=300, calls=25)
        assert_same_bits(play(resident, calls), play(host, calls), "wrap")


@pytest.mark.skipif("runtime.select().name != 'cpu'", reason="schedule seeds exist on the cpu runtime only")
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_schedule_seeds(seed: int, make_checkpoint: Callable[..., Path]) -> None:
    resident, host = engines(make_checkpoint(seed=12), RING + 40)
    control = runtime.control()
    with resident, host:
        calls = script(4, prompt_rows=260, calls=25)
        expected = play(resident, calls)
        control.glm53_cpu_seed(seed, 1)
        try:
            assert_same_bits(expected, play(host, calls), f"schedule seed {seed}")
        finally:
            control.glm53_cpu_seed(0, 0)


def test_too_few_hot_rows(demo_path: Path) -> None:
    with pytest.raises(InputError, match="hot_rows"):
        Engine.open(demo_path, hot_rows=RING)
