"""Drafts of the MTP layer change the speed and nothing else: tokens, log-probabilities, finish reasons and the sessions' memory are those without."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tier_scene
from tier_scene import RING, VOCAB

from glm53 import Completion, Engine, SamplingParams
from glm53.errors import HipError, InputError
from glm53.hip import runtime

MODEL: dict[str, Any] = {"layers": 5, "seed": 12, "mtp": True, "overrides": {"moe_intermediate_size": 192}}
PROMPTS = [[(i * 37 + 11) % VOCAB for i in range(300)], [5, 3, 1], [(i * 5 + 2) % VOCAB for i in range(90)]]
GREEDY = SamplingParams(temperature=0.0, seed=1, max_tokens=40, logprobs=3, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.8, top_p=0.9, repetition_penalty=1.1, seed=3, max_tokens=40, logprobs=3, ignore_eos=True)
SHORT = SamplingParams(temperature=0.8, top_p=0.9, repetition_penalty=1.1, seed=3, max_tokens=8, logprobs=3, ignore_eos=True)
PARAMS = pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])


def completions(engine: Engine, params: SamplingParams, prompts: list[list[int]] = PROMPTS) -> list[Completion]:
    found = engine.generate(prompts, params)
    assert isinstance(found, list)
    return found


@PARAMS
@pytest.mark.parametrize(("mtp", "hot_rows"), [("1", RING + 40), ("2", 2048), ("3", RING + 40), ("5", RING + 70), ("auto", RING + 40)])
def test_drafts_change_nothing(mtp: str, hot_rows: int, params: SamplingParams, make_checkpoint: Callable[..., Path]) -> None:
    """Three requests on two sessions; histories in their hot buffers, beyond them, and out of one into the other on the way."""
    path = make_checkpoint(**MODEL)
    with tier_scene.open_resident(path) as plain:
        expected = completions(plain, params)
    with tier_scene.open_host(path, hot_rows, mtp=mtp) as engine:
        assert completions(engine, params) == expected
        counts = engine.draft_counts()
        assert counts.rounds > 10 and counts.tokens >= counts.rounds and counts.offered[0] >= counts.accepted[0]
        tier_scene.assert_all_given_back(engine, mtp)


def test_drafts_are_accepted(demo_path: Path) -> None:
    """The trained layer's drafts: most first ones stand, and a round draws nearly two tokens or more on average. Greedy and sampled."""
    prompts = ["In the beginning", "And the king said unto", "He took the letter and"]
    for params in (SamplingParams(temperature=0.0, seed=1, max_tokens=60, ignore_eos=True), SamplingParams(temperature=0.7, seed=1, max_tokens=60)):
        with Engine.open(demo_path, context_rows_max=512, sessions_max=3, hot_rows=512) as plain:
            expected = plain.generate(prompts, params)
        with Engine.open(demo_path, context_rows_max=512, sessions_max=3, hot_rows=512, mtp=3) as engine:
            assert engine.generate(prompts, params) == expected
            counts = engine.draft_counts()
            assert counts.accepted[0] > 0.5 * counts.offered[0] and counts.tokens > 1.8 * counts.rounds, counts


@pytest.mark.parametrize("p2p", ["auto", "off"])
def test_two_devices(p2p: str, make_checkpoint: Callable[..., Path]) -> None:
    if runtime.select().device_count < 2:
        pytest.skip("a pair needs two devices")
    path = make_checkpoint(**MODEL)
    with tier_scene.open_resident(path) as plain:
        expected = completions(plain, SAMPLED)
    with tier_scene.open_host(path, RING + 40, mtp=3, devices=(0, 1), p2p=p2p) as engine:
        assert completions(engine, SAMPLED) == expected
        tier_scene.assert_all_given_back(engine, p2p)
    with tier_scene.open_host(path, RING + 40, mtp=2, devices=(0, 1), p2p=p2p, check_pair=True) as engine:
        assert completions(engine, GREEDY, PROMPTS[1:2])[0].token_ids


@pytest.mark.parametrize(("changes", "fields"), [({"graphs": False}, {}), ({"kv_tier": "resident"}, {}), ({}, {"fetch": "copy"})], ids=str)
def test_other_ways(changes: dict[str, Any], fields: dict[str, Any], make_checkpoint: Callable[..., Path]) -> None:
    path = make_checkpoint(**MODEL)
    with tier_scene.open_resident(path) as plain:
        expected = completions(plain, GREEDY)
    with tier_scene.tier_config(**fields), Engine.open(path, **tier_scene.settings(**({"hot_rows": RING + 40, "mtp": 2} | changes))) as engine:
        assert completions(engine, GREEDY) == expected


def test_rejected_every_time(make_checkpoint: Callable[..., Path]) -> None:
    """Weights of the layer that can only be wrong: every draft is dropped, the text stays."""
    path = make_checkpoint(**MODEL)
    with tier_scene.open_resident(path) as plain:
        expected = completions(plain, GREEDY)
    for poison in (np.nan, 1e30, 0.0):
        with tier_scene.open_host(path, RING + 40, mtp=3) as engine:
            norm = engine.weights.mtp.norm
            norm.upload(np.full(norm.shape, poison, np.float32))
            assert completions(engine, GREEDY) == expected, poison
            if np.isnan(poison):  # such a draft is token 0
                assert engine.draft_counts().accepted[0] <= sum(done.token_ids.count(0) for done in expected)


def test_end_of_text_inside_a_round(make_checkpoint: Callable[..., Path]) -> None:
    """A stop token, a stop length and the context's end among accepted drafts: what is behind them is dropped."""
    path = make_checkpoint(**MODEL)
    with tier_scene.open_resident(path, context_rows_max=320) as plain:
        tokens = plain.generate(PROMPTS[0], SamplingParams(temperature=0.0, seed=1, max_tokens=100, ignore_eos=True)).token_ids
        assert len(tokens) == 20  # the context's end
        cases = [SamplingParams(temperature=0.0, seed=1, max_tokens=n, ignore_eos=True) for n in (1, 2, 3, 4, 7)]
        cases += [SamplingParams(temperature=0.0, seed=1, max_tokens=100, ignore_eos=True, stop_token_ids=(token,)) for token in tokens[1:8]]
        cases.append(SamplingParams(temperature=0.0, seed=1, max_tokens=100, ignore_eos=True))
        expected = [plain.generate(PROMPTS[0], params) for params in cases]
    with tier_scene.open_host(path, RING + 40, mtp=5, context_rows_max=320) as engine:
        assert [engine.generate(PROMPTS[0], params) for params in cases] == expected
        tier_scene.assert_all_given_back(engine, "ends")


def test_sessions_step_by_step(make_checkpoint: Callable[..., Path]) -> None:
    """Calls with given rows give the same logits, MTP or not; requests between them as well."""
    path, calls = make_checkpoint(**MODEL), tier_scene.script(6, prompt_rows=260, calls=15)
    with tier_scene.open_resident(path) as plain:
        expected, drawn = tier_scene.play(plain, calls), completions(plain, GREEDY)
    with tier_scene.open_host(path, RING + 40, mtp=2) as engine:
        tier_scene.assert_same_bits(expected, tier_scene.play(engine, calls), "given rows")
        assert completions(engine, GREEDY) == drawn
        tier_scene.assert_same_bits(expected, tier_scene.play(engine, calls), "given rows after requests")


def test_a_session_picks_its_depth(demo_path: Path) -> None:
    """By its own rounds, not those of others: the policy hears of every one, and the text is that without drafts."""
    params = SamplingParams(temperature=0.0, seed=1, max_tokens=50, ignore_eos=True)
    text: dict[str, str] = {}
    for mtp in ("0", "auto"):
        with Engine.open(demo_path, context_rows_max=512, sessions_max=2, hot_rows=512, mtp=mtp) as engine, engine.session() as session:
            text[mtp] = "".join(chunk.text for chunk in session.stream("In the beginning", params))
            policy = session._policy
            assert (policy is None) == (mtp == "0")
            if policy is not None:
                policy.check()
                assert policy.time_us(3) and policy.tokens(1) != 1.7, "rounds of three drafts were timed, and their acceptance is no longer a guess"
                assert engine.session()._policy.tokens(1) == 1.7, "another session begins with the guess"  # type: ignore[union-attr]
    assert text["0"] == text["auto"]


def test_schedule_seeds(make_checkpoint: Callable[..., Path]) -> None:
    if runtime.select().name != "cpu":
        pytest.skip("schedule seeds exist on the cpu runtime only")
    path = make_checkpoint(**MODEL)
    with tier_scene.open_resident(path) as plain:
        expected = completions(plain, SHORT)
    with tier_scene.open_host(path, RING + 40, mtp=3) as engine:
        for seed in (1, 2, 3):
            with tier_scene.schedule(seed):
                assert completions(engine, SHORT) == expected, f"schedule seed {seed}"


@pytest.mark.parametrize("api", ["hipMemcpyAsync", "hipModuleLaunchKernel", "hipGraphLaunch", "hipEventRecord"])
def test_failures_end_the_requests_only(api: str, make_checkpoint: Callable[..., Path]) -> None:
    if runtime.select().name != "cpu":
        pytest.skip("faults are the cpu runtime's to choose")
    control = runtime.control()
    with tier_scene.open_host(make_checkpoint(**MODEL), RING + 40, mtp=3) as engine:
        before = control.glm53_cpu_calls(api.encode())
        expected = completions(engine, SHORT, PROMPTS[1:])
        calls = control.glm53_cpu_calls(api.encode()) - before
        for nth in sorted({int(n) for n in np.linspace(1, calls, min(4, calls)).round()}):
            control.glm53_cpu_fail(api.encode(), nth, 2)
            try:
                assert completions(engine, SHORT, PROMPTS[1:]) == expected, f"{api} {nth}"
            except HipError:
                pass
            finally:
                control.glm53_cpu_fail(api.encode(), 0, 0)
            tier_scene.assert_all_given_back(engine, f"{api} {nth}")
            assert completions(engine, SHORT, PROMPTS[1:]) == expected, f"{api} {nth}: the next requests differ"


def test_refused(make_checkpoint: Callable[..., Path]) -> None:
    with pytest.raises(InputError, match=r"mtp is 2 and .* has no MTP layer, expected 0"):
        Engine.open(make_checkpoint(layers=2, vocab=64, topk=32, seed=7), dtype="f32", mtp=2)
    with pytest.raises(InputError, match="mtp is '6'"):
        Engine.open(make_checkpoint(**MODEL), dtype="f32", mtp=6)
