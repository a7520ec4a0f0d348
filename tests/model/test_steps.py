"""Decode steps: recorded or launched, alone or batched, one row or several, ahead of the host or not - the same bits, and nothing left behind."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from glm53 import Engine, SamplingParams
from glm53.errors import Glm53Error, InputError
from glm53.model.decode import RING_STEPS
from glm53.ops.step_state import Ring, record_words

VOCAB = 512  # of make_checkpoint
MODEL = {"layers": 5, "seed": 12}
SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, max_tokens=24, seed=7, ignore_eos=True, logprobs=3, repetition_penalty=1.1)
SETTINGS: dict[str, Any] = {"dtype": "f32", "context_rows_max": 1024, "prefill_chunk_rows": 64}


def prompt(seed: int, count: int) -> list[int]:
    return [int(i) for i in np.random.default_rng(seed).integers(0, VOCAB, count)]


@pytest.fixture(scope="module")
def path(make_checkpoint: Callable[..., Path]) -> Path:
    return make_checkpoint(**MODEL)


def opened(path: Path, **settings: Any) -> Engine:
    return Engine.open(path, **(SETTINGS | settings))


@pytest.mark.parametrize("tier", ["host", "resident"])
def test_recorded_steps_equal_launched_steps(path: Path, tier: str) -> None:
    ids = prompt(1, 200)
    found = []
    for graphs in (True, False):
        with opened(path, kv_tier=tier, hot_rows=300, graphs=graphs) as engine:
            found.append((engine.generate(ids, SAMPLED), engine.generate_logits(ids, 12)))
            assert (engine.step.launches(1) is not None) is graphs
            assert any("graph" in note for note in engine.notes) is graphs
    (one, (tokens, logits)), (other, (other_tokens, other_logits)) = found
    assert one == other and tokens == other_tokens
    np.testing.assert_array_equal(logits.view(np.uint32), other_logits.view(np.uint32))


def test_a_verify_step_equals_single_rows(path: Path) -> None:
    ids, following = prompt(2, 150), prompt(3, 21)
    with opened(path, kv_tier="host", hot_rows=300) as engine:
        with engine.session() as session:
            session.prefill(ids)
            single = np.concatenate([session.step([token]) for token in following])
        for widths in ([1, 2, 3, 4, 5, 6], [8, 8, 5], [7, 7, 7]):
            with engine.session() as session:
                session.prefill(ids)
                starts = np.cumsum([0, *widths])
                several = np.concatenate([session.step(following[a:b]) for a, b in itertools.pairwise(starts)])
            np.testing.assert_array_equal(several.view(np.uint32), single.view(np.uint32), err_msg=str(widths))


def test_requests_of_different_lengths_equal_each_alone(path: Path) -> None:
    """Requests end at different steps, some by a stop token, while others run ahead."""
    prompts = [prompt(10 + i, 30 + 17 * i) for i in range(5)]
    params = [
        SamplingParams(temperature=0.8, seed=i, max_tokens=5 + 6 * i, ignore_eos=True, repetition_penalty=1.0 + 0.1 * (i % 2)) for i in range(5)
    ]
    with opened(path, sessions_max=3, kv_tier="host", hot_rows=300) as engine:
        alone = [engine.generate(p, q) for p, q in zip(prompts, params, strict=True)]
        stops = [
            SamplingParams(
                temperature=0.8,
                seed=q.seed,
                max_tokens=q.max_tokens,
                ignore_eos=True,
                repetition_penalty=q.repetition_penalty,
                stop_token_ids=(one.token_ids[len(one.token_ids) // 2],),
            )
            for q, one in zip(params, alone, strict=True)
        ]
        assert engine.generate(prompts, params) == alone
        stopped = engine.generate(prompts, stops)
        for one, short in zip(alone, stopped, strict=True):
            assert short.finish_reason == "stop" and one.token_ids[: len(short.token_ids)] == short.token_ids
        assert not engine.tier.sessions and engine.tier.pool.free == engine.tier.pool.capacity
        engine.tier.check()


def test_two_threads_share_an_engine(path: Path) -> None:
    """Each runs ahead; the steps of one come between those of the other."""
    prompts = [prompt(20 + i, 80) for i in range(2)]
    with opened(path, sessions_max=2) as engine:
        alone = [engine.generate(p, SAMPLED) for p in prompts]
        found: list[Any] = [None, None]

        def run(index: int) -> None:
            found[index] = engine.generate(prompts[index], SAMPLED)

        for _ in range(3):
            threads = [threading.Thread(target=run, args=(i,)) for i in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert found == alone


def test_a_stream_closed_early_leaves_the_engine_usable(path: Path) -> None:
    ids = prompt(5, 60)
    with opened(path) as engine:
        expected = engine.generate(ids, SAMPLED)
        for stop_after in range(1, 5):
            stream = engine.stream(ids, SAMPLED)
            got = [next(stream).token_ids[0] for _ in range(stop_after)]
            stream.close()
            assert tuple(got) == expected.token_ids[:stop_after]
            assert not engine.tier.sessions
        assert engine.generate(ids, SAMPLED) == expected


def test_the_context_limit_ends_a_request_that_runs_ahead(path: Path) -> None:
    with opened(path, context_rows_max=128, kv_tier="resident") as engine:
        done = engine.generate(prompt(6, 120), SamplingParams(temperature=0, max_tokens=500, ignore_eos=True))
        assert done.finish_reason == "length" and len(done.token_ids) == 8


def test_a_step_is_few_launches(path: Path) -> None:
    """12 on a full layer, 9 on a shared one (docs/decisions/0004-step-graph.md), a dense layer one less, and first, head, sampler, last."""
    with opened(path) as engine:
        engine.generate(prompt(7, 40), SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
        spec = engine.spec
        wanted = 4 + sum((12 if full else 9) - (0 if sparse else 1) for full, sparse in zip(spec.layer_is_full, spec.layer_is_sparse, strict=True))
        assert engine.step.launches(1) == wanted


def test_ring_of_records_is_refused_if_it_does_not_wrap() -> None:
    assert RING_STEPS & (RING_STEPS - 1) == 0
    with pytest.raises(ValueError, match="power of two"):
        Ring(np.zeros((3, record_words(1, 0)), np.uint32), 0)


def test_a_row_that_cannot_be_stored_fails_its_own_request_alone(demo_path: Path) -> None:
    """The embedding of the first token drawn is NaN, so the row after it cannot be quantised; nobody else may notice."""
    bad, good = [2, 3, 5, 7], [11, 13]
    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, seed=1)
    with Engine.open(demo_path, context_rows_max=256, sessions_max=2) as engine:
        expected = engine.generate(good, greedy)
        token = engine.generate(bad, SamplingParams(temperature=0, max_tokens=1)).token_ids[0]
        assert token not in expected.token_ids and token not in good
        engine.weights.embed.slice(token, token + 1).upload(np.full((1, engine.spec.hidden_size), np.nan, np.float32))
        for _ in range(2):
            with pytest.raises(Glm53Error, match="q8g64 cannot store"):
                engine.generate(bad, greedy)
            assert engine.generate(good, greedy) == expected
        stopped = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, stop_token_ids=(token,))
        assert engine.generate(bad, stopped).finish_reason == "stop"  # the bad row was computed in vain
        assert engine.generate(good, greedy) == expected
        pair = engine.generate([bad, good], [stopped, greedy])
        assert pair[0].finish_reason == "stop" and pair[1].token_ids == expected.token_ids
        for ahead in range(1, 4):
            other, stream = engine.stream(good, greedy), engine.stream(bad, greedy)
            found = [next(other).token_ids[0] for _ in range(ahead)]
            with pytest.raises(Glm53Error, match="q8g64 cannot store"):
                list(stream)
            found += [chunk.token_ids[0] for chunk in other]
            assert tuple(found) == expected.token_ids
        with engine.session() as session, pytest.raises(InputError, match=r"truncate: got 0.5"):
            session.truncate(0.5)  # type: ignore[arg-type]
