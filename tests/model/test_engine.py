"""The engine as its users meet it: results, independence of what runs beside, refusals, and that nothing stays allocated."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from glm53 import Engine, SamplingParams
from glm53.errors import CheckpointError, DeviceMemoryError, InputError, LifetimeError
from glm53.hip import Device

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
PROMPTS = ["In the beginning", "It was a bright cold day in April, and the clocks", "The Lord said unto", "My dear Mr. Bennet,"]


@pytest.fixture(autouse=True)
def stores_stay_sound(request: pytest.FixtureRequest) -> Iterator[None]:
    if "demo_engine" in request.fixturenames:
        engine: Engine = request.getfixturevalue("demo_engine")
        yield
        for store in (engine.tier, engine.keys):
            store.check()
            assert store.pool.free == store.pool.capacity, "a finished request kept extents"
    else:
        yield


def test_generates_and_streams_the_same(demo_engine: Engine) -> None:
    done = demo_engine.generate(PROMPTS[0], GREEDY)
    chunks = list(demo_engine.stream(PROMPTS[0], GREEDY))
    assert len(done.token_ids) == 12 and done.finish_reason == "length"
    assert "".join(c.text for c in chunks) == done.text == demo_engine.tokenizer.decode(done.token_ids)
    assert tuple(t for c in chunks for t in c.token_ids) == done.token_ids
    assert [c.finish_reason for c in chunks] == [None] * 11 + ["length"]


FILTERED = SamplingParams(temperature=0.9, top_p=0.9, top_k=40, min_p=0.01, repetition_penalty=1.2, seed=5, max_tokens=12)


@pytest.mark.parametrize("params", [GREEDY, FILTERED])
def test_batched_equals_alone(demo_engine: Engine, params: SamplingParams) -> None:
    alone = [demo_engine.generate(p, params) for p in PROMPTS]
    together = demo_engine.generate(PROMPTS, params)
    for a, b in zip(alone, together, strict=True):
        assert a.token_ids == b.token_ids and a.text == b.text
    more_than_sessions = demo_engine.generate(PROMPTS + PROMPTS[:2], params)
    assert [c.token_ids for c in more_than_sessions] == [c.token_ids for c in alone + alone[:2]]


def test_batched_logits_equal_alone_bit_for_bit(demo_engine: Engine) -> None:
    every = [demo_engine.generate(p, SamplingParams(temperature=0.0, max_tokens=6, logprobs=20)) for p in PROMPTS]
    together = demo_engine.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=6, logprobs=20))
    assert [c.logprobs for c in every] == [c.logprobs for c in together]
    for entry in every[0].logprobs:
        assert entry.top[0] == (entry.token_id, entry.logprob) and len(entry.top) == 20
        assert all(a[1] >= b[1] for a, b in itertools.pairwise(entry.top))


def test_chunk_size_leaves_every_bit_alone(make_checkpoint: Callable[..., Path]) -> None:
    path = make_checkpoint(seed=3)
    ids = [(i * 37 + 11) % 512 for i in range(150)]
    reference = None
    for chunk in (1, 7, 64, 150):
        with Engine.open(path, dtype="f32", prefill_chunk_rows=chunk, context_rows_max=512) as engine:
            tokens, logits = engine.generate_logits(ids, 6)
        if reference is None:
            reference = (tokens, logits)
        assert tokens == reference[0]
        np.testing.assert_array_equal(logits, reference[1], err_msg=f"chunk {chunk}")


@pytest.mark.parametrize("tier", ["host", "resident"])
def test_requests_wait_for_the_slots_that_sessions_leave(make_checkpoint: Callable[..., Path], tier: str) -> None:
    prompts, greedy = [[1, 2, 3], [4, 5], [6]], SamplingParams(temperature=0.0, max_tokens=4)
    with Engine.open(make_checkpoint(seed=3), dtype="f32", kv_tier=tier, sessions_max=3, context_rows_max=512) as engine:
        want = [done.token_ids for done in engine.generate(prompts, greedy)]
        with engine.session() as first, engine.session() as second:
            first.prefill([7, 8])
            assert [done.token_ids for done in engine.generate(prompts, greedy)] == want
            with engine.session(), pytest.raises(InputError, match="all 3 sessions are in use; close one first"):
                engine.generate(prompts, greedy)
            assert not second.tokens
        assert [done.token_ids for done in engine.generate(prompts, greedy)] == want


def test_extent_size_leaves_every_bit_alone(make_checkpoint: Callable[..., Path]) -> None:
    path = make_checkpoint(seed=3)
    ids = [(i * 37 + 11) % 512 for i in range(150)]
    found = []
    for extent_rows in (64, 128, 1024):
        with Engine.open(path, dtype="f32", extent_rows=extent_rows, context_rows_max=512) as engine:
            found.append(engine.generate_logits(ids, 4)[1])
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_array_equal(found[0], found[2])


def test_seed_repeats_and_differs(demo_engine: Engine) -> None:
    sample = lambda seed: demo_engine.generate(PROMPTS[0], SamplingParams(seed=seed, max_tokens=12)).token_ids
    assert sample(1) == sample(1)
    assert len({sample(seed) for seed in range(4)}) > 1
    fresh = demo_engine.generate(PROMPTS[0], SamplingParams(max_tokens=12))
    assert sample(fresh.seed) == fresh.token_ids


def test_stop_string_cuts_exactly(demo_engine: Engine) -> None:
    free = demo_engine.generate(PROMPTS[0], SamplingParams(temperature=0.0, max_tokens=40)).text
    for stop in (free[10:14], free[3:4], free[-5:]):
        done = demo_engine.generate(PROMPTS[0], SamplingParams(temperature=0.0, max_tokens=40, stop=(stop,)))
        assert done.text == free[: free.index(stop)] and done.finish_reason == "stop"
        assert "".join(c.text for c in demo_engine.stream(PROMPTS[0], SamplingParams(temperature=0.0, max_tokens=40, stop=(stop,)))) == done.text


def test_stop_token_ends_without_its_text(demo_engine: Engine) -> None:
    free = demo_engine.generate(PROMPTS[0], GREEDY)
    stop = free.token_ids[5]
    first = free.token_ids.index(stop)
    done = demo_engine.generate(PROMPTS[0], SamplingParams(temperature=0.0, max_tokens=12, stop_token_ids=(stop,)))
    assert done.token_ids == free.token_ids[:first] and done.finish_reason == "stop"


def test_repetition_penalty_avoids_the_prompt(demo_engine: Engine) -> None:
    ids = demo_engine.encode("the the the the the the")
    done = demo_engine.generate(ids, SamplingParams(temperature=0.0, max_tokens=20, repetition_penalty=1e6, ignore_eos=True))
    positive_logits_only = set(done.token_ids)
    assert len(positive_logits_only) == 20, "a token came twice under a penalty of a million"


def test_chat_answers_inside_the_template(demo_engine: Engine) -> None:
    ids = demo_engine.tokenizer.encode_chat([{"role": "user", "content": "Who are you?"}], reasoning_effort="low")
    done = demo_engine.generate(ids, SamplingParams(temperature=0.0, max_tokens=40))
    assert done.finish_reason == "stop" and "model" in done.text


def test_context_limit_ends_a_request(make_checkpoint: Callable[..., Path]) -> None:
    with Engine.open(make_checkpoint(seed=3), dtype="f32", context_rows_max=70) as engine:
        done = engine.generate(list(range(60)), SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True))
        assert len(done.token_ids) == 10 and done.finish_reason == "length"
        with pytest.raises(InputError, match="at most 69"):
            engine.generate(list(range(70)))


def test_abandoned_stream_gives_its_memory_back(demo_engine: Engine) -> None:
    stream = demo_engine.stream(PROMPTS, GREEDY)
    next(stream)
    assert demo_engine.tier.pool.free < demo_engine.tier.pool.capacity
    stream.close()


@pytest.mark.parametrize(
    "prompt, text",
    [("", "empty"), ([], "empty"), ([4096], "token id 4096"), ([-1], "token id -1"), ([1] * 4096, "4096 tokens")],
)
def test_bad_prompts(demo_engine: Engine, prompt: str | list[int], text: str) -> None:
    with pytest.raises(InputError, match=text):
        demo_engine.generate([prompt] if prompt == [] else prompt, GREEDY)


@pytest.mark.parametrize(
    "name, value",
    [
        ("temperature", -0.1), ("temperature", float("nan")), ("top_p", 0.0), ("top_p", 1.1), ("top_k", -1), ("top_k", 1.5), ("min_p", -0.1),
        ("min_p", 2.0), ("repetition_penalty", 0.0), ("seed", -1), ("seed", 2**64), ("max_tokens", 0), ("logprobs", 21), ("stop", ("",)),
        ("stop_token_ids", (-1,)), ("temperature", "hot"),
    ],
)  # fmt: skip
def test_bad_sampling_parameters(name: str, value: object) -> None:
    with pytest.raises(InputError, match=name):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("name, value", [("stop", 3), ("stop_token_ids", 3), ("stop_token_ids", (True,)), ("ignore_eos", "yes")])
def test_sampling_parameters_of_wrong_type(name: str, value: object) -> None:
    with pytest.raises(InputError, match=name):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("prompt", [None, 5, b"abc", {"a": 1}, [1.5], [True], [[1, 2], [None]], [1, "a"], "\ud800"])
def test_prompts_of_wrong_type(demo_engine: Engine, prompt: object) -> None:
    with pytest.raises(InputError):
        demo_engine.generate(prompt, GREEDY)


@pytest.mark.parametrize("params", [5, {"temperature": 0}, [{"temperature": 0}], [GREEDY, GREEDY]])
def test_params_of_wrong_type(demo_engine: Engine, params: object) -> None:
    with pytest.raises(InputError, match="params"):
        demo_engine.generate(["a"], params)


def test_numpy_prompts(demo_engine: Engine) -> None:
    ids = demo_engine.encode(PROMPTS[0])
    assert demo_engine.generate(np.array(ids), GREEDY).token_ids == demo_engine.generate(ids, GREEDY).token_ids
    assert len(demo_engine.generate(np.array([ids, ids]), GREEDY)) == 2


def test_threads_take_turns(demo_engine: Engine) -> None:
    alone = [demo_engine.generate(p, GREEDY).token_ids for p in PROMPTS[:3]]
    with ThreadPoolExecutor(3) as pool:
        assert [c.token_ids for c in pool.map(lambda p: demo_engine.generate(p, GREEDY), PROMPTS[:3])] == alone


def test_two_streams_at_once(demo_engine: Engine) -> None:
    alone = [demo_engine.generate(p, GREEDY).text for p in PROMPTS[:2]]
    both = zip(*(demo_engine.stream(p, GREEDY) for p in PROMPTS[:2]), strict=True)
    texts = list(zip(*((a.text, b.text) for a, b in both), strict=True))
    assert ["".join(t) for t in texts] == alone


def test_two_engines_of_one_process(demo_engine: Engine, make_checkpoint: Callable[..., Path]) -> None:
    before = demo_engine.generate(PROMPTS[0], GREEDY).token_ids
    with Engine.open(make_checkpoint(seed=3), dtype="f32", context_rows_max=64) as other:
        assert len(other.generate([1, 2, 3], GREEDY).token_ids) == 12
        assert demo_engine.generate(PROMPTS[0], GREEDY).token_ids == before
    assert demo_engine.generate(PROMPTS[0], GREEDY).token_ids == before


def test_use_after_close(make_checkpoint: Callable[..., Path]) -> None:
    with Engine.open(make_checkpoint(seed=3), dtype="f32", context_rows_max=64) as engine:
        stream = engine.stream([1, 2, 3], GREEDY)
        next(stream)
    for use in (lambda: next(stream), lambda: engine.generate([1, 2, 3]), lambda: engine.generate_logits([1], 1)):
        with pytest.raises(LifetimeError, match=r"after close\(\)"):
            use()
    engine.close()
    assert engine.memory() == {}


@pytest.mark.parametrize("text", ['{"temperature": "hot"}', '{"top_p": 0}', "{"])
def test_bad_generation_config_allocates_nothing(make_checkpoint: Callable[..., Path], tmp_path: Path, text: str) -> None:
    path = shutil.copytree(make_checkpoint(seed=3), tmp_path / "copy")
    (path / "generation_config.json").write_text(text)
    with Device(0) as device:
        before = device.free_bytes()
        with pytest.raises(CheckpointError, match=r"generation_config\.json"):
            Engine.open(path)
        assert device.free_bytes() == before


def test_unknown_setting(demo_path: Path) -> None:
    with pytest.raises(InputError, match="prefil_chunk_rows"):
        Engine.open(demo_path, prefil_chunk_rows=3)


@pytest.mark.parametrize("spare_mib, category", [(20, "weights"), (600, "workspace")])
def test_not_enough_device_memory(demo_path: Path, spare_mib: int, category: str) -> None:
    """600 MiB hold the weights and what a driver takes for streams, but not the workspace of 16,384 rows."""
    with Device(0) as device:
        ballast = device.alloc(device.free_bytes() - (spare_mib << 20), category="ballast")
        before = device.free_bytes()
        with pytest.raises(DeviceMemoryError, match=category) as caught:
            Engine.open(demo_path, dtype="f32", prefill_chunk_rows=16384)
        assert "free" in str(caught.value)
        if device.arch == "host":  # drivers keep what they took for streams and kernels
            assert device.free_bytes() == before
        ballast.free()


def test_history_that_does_not_fit_ends_the_request_only(demo_path: Path) -> None:
    with Engine.open(demo_path, dtype="f32", kv_tier="resident", context_rows_max=8192, extent_rows=1024) as engine:
        ballast = engine.device.alloc(engine.device.free_bytes() - (30 << 20), category="ballast")
        prompt = engine.encode("And it came to pass that ") * 300
        with pytest.raises(DeviceMemoryError, match="history"):
            engine.generate(prompt, GREEDY)
        ballast.free()
        for store in (engine.tier, engine.keys):
            store.check()
        assert len(engine.generate(PROMPTS[0], GREEDY).token_ids) == 12


def test_missing_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json"):
        Engine.open(tmp_path)
