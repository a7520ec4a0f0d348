"""Two devices that share a model give what one gives, bit for bit, by kernels that wait for each other and by copies; and what fails leaves both
sides with the same rows. A few seeds of everything; `scripts/soak` runs many.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tier_scene
from tier_scene import RING, VOCAB

from glm53 import Completion, Engine, SamplingParams
from glm53.errors import DeviceMemoryError, Glm53Error, HipError, InputError, LinkError
from glm53.hip import Graph, runtime
from glm53.model.pair import PairSide

MODEL: dict[str, Any] = {"layers": 5, "seed": 12, "overrides": {"moe_intermediate_size": 192}}
BF16: dict[str, Any] = {"seed": 13, "real_widths": True, "dtype": "bfloat16", "scale": 0.5, "overrides": {"moe_intermediate_size": 128}}
WAYS = ("auto", "off")  # exchanges by kernels, by copies
PROMPTS = [[(i * 37 + 11) % VOCAB for i in range(300)], [5, 3, 1], [(i * 5 + 2) % VOCAB for i in range(90)]]
PARAMS = SamplingParams(temperature=0.8, top_p=0.9, repetition_penalty=1.1, seed=3, max_tokens=6, logprobs=3, ignore_eos=True)
FAULTS = ("hipMalloc", "hipMemcpyAsync", "hipMemcpyPeerAsync", "hipModuleLaunchKernel", "hipEventRecord", "hipStreamWaitEvent", "hipGraphLaunch")
KINDS = ("allocations", "allocated_bytes", "host_allocations", "streams", "events", "queued")


@pytest.fixture(autouse=True)
def two_devices() -> None:
    if runtime.select().device_count < 2:
        pytest.skip("a pair needs two devices")


def pair(path: Path, p2p: str, tier: str = "host", **changes: Any) -> Engine:
    sizes = {"hot_rows": RING + 40} if tier == "host" else {}
    return Engine.open(path, **tier_scene.settings(devices=(0, 1), p2p=p2p, kv_tier=tier, **(sizes | changes)))


@pytest.mark.parametrize("p2p", WAYS)
@pytest.mark.parametrize(("tier", "seed"), [("host", 1), ("host", 2), ("resident", 3)])
def test_pair_is_single(p2p: str, tier: str, seed: int, make_checkpoint: Callable[..., Path]) -> None:
    """Prompts, steps of 1 to 8 rows, appends, rollbacks: every logit of the pair is that of one device."""
    path, calls = make_checkpoint(**MODEL), tier_scene.script(seed, prompt_rows=300, calls=20)
    with tier_scene.open_resident(path) as single:
        expected = tier_scene.play(single, calls)
    with pair(path, p2p, tier) as both:
        assert both.stage.pair is not None and both.stage.pair.fast is (p2p == "auto"), both.notes
        tier_scene.assert_same_bits(expected, tier_scene.play(both, calls), f"{p2p} {tier}")
        tier_scene.assert_all_given_back(both, f"{p2p} {tier}")


def test_steps_of_many_rows(make_checkpoint: Callable[..., Path]) -> None:
    """18 rows a step: 16 blocks of 1,024 work-items wait on either device at once, each on a stack of its own."""
    path = make_checkpoint(layers=3, vocab=64, topk=32, seed=7, mtp=True, overrides={"moe_intermediate_size": 128})
    with tier_scene.open_resident(path, sessions_max=3) as single:
        expected = single.generate([[1, 2, 3], [4, 5], [6] * 30], PARAMS)
    with pair(path, "auto", sessions_max=3, mtp=5) as both:
        assert both.generate([[1, 2, 3], [4, 5], [6] * 30], PARAMS) == expected
    if runtime.select().name == "cpu":
        assert len(Path("/proc/self/maps").read_text().splitlines()) < 20_000, "of 65,530 that a process may have"


@pytest.mark.parametrize("weights", ["auto", "q8q4"])
@pytest.mark.parametrize("way", [*WAYS, "products", "products, checked"])
def test_bf16_and_quantised(way: str, weights: str, make_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """products: the kernels of products add the other side's sums, as on GPUs."""
    path, calls = make_checkpoint(**BF16), tier_scene.script(5, prompt_rows=240, calls=6)
    changes: dict[str, Any] = {"dtype": "bf16", "kv_format": "q8g64", "weights": weights}
    with tier_scene.open_resident(path, **changes) as single:
        expected = tier_scene.play(single, calls)
    if way.startswith("products"):
        monkeypatch.setattr(PairSide, "adds_in_products", property(lambda side: side.pair.fast))
    with pair(path, "off" if way == "off" else "auto", check_pair=way.endswith("checked"), **changes) as both:
        tier_scene.assert_same_bits(expected, tier_scene.play(both, calls), f"{way} {weights}")


def requests(engine: Engine) -> list[Completion]:
    found = engine.generate(PROMPTS, PARAMS)
    assert isinstance(found, list)
    return found


@pytest.mark.parametrize("p2p", WAYS)
def test_batches_and_recorded_steps(p2p: str, make_checkpoint: Callable[..., Path]) -> None:
    """Requests side by side, sampled with penalties; enough steps that they are recorded and replayed where exchanges are kernels."""
    path, params = (
        make_checkpoint(**MODEL),
        SamplingParams(temperature=0.8, repetition_penalty=1.1, seed=3, max_tokens=40, logprobs=3, ignore_eos=True),
    )
    with tier_scene.open_resident(path) as single:
        expected = single.generate(PROMPTS, params)
    with pair(path, p2p) as both:
        assert both.generate(PROMPTS, params) == expected
        assert all((side.step.launches(1) is not None) is (p2p == "auto") for side in both.stage.sides)
        with both.session() as session:
            session.prefill(PROMPTS[0])
            for token in range(5):
                session.step([token])
            owner, peer = both.cache_counters_by_device().values()
        assert owner == peer and owner["misses"] > 0
        for place in ("device 0", "device 1"):
            assert both.memory_by_place()[place]["weights"] > 0


def test_sides_share_weights_and_keys(make_checkpoint: Callable[..., Path]) -> None:
    """Each side holds about half of the weights, and the index keys of every second extent."""
    path = make_checkpoint(**MODEL)
    with tier_scene.open_resident(path) as single, pair(path, "auto") as both, both.session() as session:
        owner, peer = (side.weights.nbytes for side in both.stage.sides)
        assert owner + peer < 1.3 * single.weights.nbytes and peer <= owner
        session.prefill([i % VOCAB for i in range(300)])
        held = [len(side.keys.addresses(session.slot)) for side in both.stage.sides]
        assert held == [3, 2]  # extents of 64 rows


@pytest.mark.parametrize("p2p", WAYS)
def test_no_schedule_changes_a_bit(p2p: str, control: ctypes.CDLL, make_checkpoint: Callable[..., Path]) -> None:
    path, calls = make_checkpoint(**MODEL), tier_scene.script(4, prompt_rows=200, calls=8)
    with tier_scene.open_resident(path) as single:
        expected, drawn = tier_scene.play(single, calls), requests(single)
    with pair(path, p2p) as both:
        for seed in (1, 2, 3):
            with tier_scene.schedule(seed):
                tier_scene.assert_same_bits(expected, tier_scene.play(both, calls), f"schedule seed {seed}")
                assert requests(both) == drawn, f"schedule seed {seed}"


def live(control: ctypes.CDLL) -> dict[str, int]:
    return {kind: control.glm53_cpu_live(kind.encode()) for kind in KINDS}


def test_long_runs_leave_nothing(control: ctypes.CDLL, make_checkpoint: Callable[..., Path]) -> None:
    """More than 200 steps in a row, sessions opened and closed 100 times, then the engine: no event, registration or peer access stays."""
    path = make_checkpoint(layers=2, vocab=64, topk=32, seed=7, overrides={"moe_intermediate_size": 128})
    idle = live(control)
    with pair(path, "auto") as both:
        params = SamplingParams(temperature=0.0, seed=1, max_tokens=210, ignore_eos=True)
        first = both.generate([1, 2, 3], params)
        counts = live(control)
        for _ in range(100):
            with both.session() as session:
                session.prefill([1, 2, 3])
        assert live(control) == counts
        assert both.generate([1, 2, 3], params) == first
        tier_scene.assert_all_given_back(both, "long run")
    assert live(control) == idle


# Failures


def sampled(calls: int, most: int) -> list[int]:
    """At most `most` call numbers from 1 to `calls`, evenly spread, both ends among them."""
    return sorted({int(n) for n in np.linspace(1, calls, min(most, calls)).round()})


@pytest.mark.parametrize("api", FAULTS)
def test_a_failing_call_ends_the_request_only(api: str, control: ctypes.CDLL, make_checkpoint: Callable[..., Path]) -> None:
    """Whichever side it hits: the next requests are right, and no side keeps anything."""
    path = make_checkpoint(**MODEL)
    with pair(path, "auto") as both:
        before = control.glm53_cpu_calls(api.encode())
        expected = requests(both)
        calls = control.glm53_cpu_calls(api.encode()) - before
        assert calls > 0, f"the requests make no {api}"
        for nth in sampled(calls, 6):
            control.glm53_cpu_fail(api.encode(), nth, 2)
            try:
                assert requests(both) == expected, f"{api} {nth} failed, and the requests gave something else"
            except (HipError, DeviceMemoryError, LinkError):
                pass
            finally:
                control.glm53_cpu_fail(api.encode(), 0, 0)
            tier_scene.assert_all_given_back(both, f"{api} {nth}")
            assert requests(both) == expected, f"{api} {nth}: the next requests differ"


@pytest.mark.parametrize("api", ["hipMemcpyAsync", "hipMemcpyPeerAsync", "hipModuleLaunchKernel", "hipEventRecord"])
def test_a_failing_call_adds_no_row_on_either_side(api: str, control: ctypes.CDLL, make_checkpoint: Callable[..., Path]) -> None:
    path = make_checkpoint(**MODEL)
    with pair(path, "auto", graphs=False) as both, both.session() as session:  # a step makes the same calls every time
        session.prefill(PROMPTS[0])
        for work in (lambda: session.step([7]), lambda: session.prefill(PROMPTS[2])):
            rows = session.rows
            before = control.glm53_cpu_calls(api.encode())
            expected = work()
            calls = control.glm53_cpu_calls(api.encode()) - before
            session.truncate(rows)
            failures = 0
            for nth in sampled(calls, 4):
                control.glm53_cpu_fail(api.encode(), nth, 2)
                try:
                    np.testing.assert_array_equal(work(), expected, err_msg=f"{api} {nth}")  # copy-back makes some calls one time and not the other
                    session.truncate(rows)
                except (HipError, LinkError):
                    failures += 1
                finally:
                    control.glm53_cpu_fail(api.encode(), 0, 0)
                assert [side.tier.rows(session.slot) for side in both.stage.sides] == [rows, rows], f"{api} {nth}"
                assert [side.keys.rows(session.slot) for side in both.stage.sides] == [rows, rows], f"{api} {nth}"
                np.testing.assert_array_equal(work(), expected, err_msg=f"{api} {nth}")
                session.truncate(rows)
            assert failures or not calls, f"{api}: no call failed"


@pytest.mark.parametrize("index", [0, 1])
def test_one_side_runs_out_of_host_memory(index: int, make_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_checkpoint(**MODEL)
    with pair(path, "auto") as both, both.session() as session:
        session.prefill(PROMPTS[0])
        rows, tier = session.rows, both.stage.sides[index].tier

        def refuse(*_: Any) -> Any:
            raise DeviceMemoryError("host history: out of luck")

        with monkeypatch.context() as patch:
            patch.setattr(tier, "reserve", refuse)
            for work in (lambda: session.prefill(PROMPTS[0]), lambda: session.step([3, 4])):
                with pytest.raises(DeviceMemoryError, match="out of luck"):
                    work()
                assert [side.tier.rows(session.slot) for side in both.stage.sides] == [rows, rows]
        got = session.step([3, 4])
    with tier_scene.open_resident(path) as single, single.session() as session:
        session.prefill(PROMPTS[0])
        np.testing.assert_array_equal(got, session.step([3, 4]))


def test_a_silent_peer_is_an_error_that_names_both(make_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The peer's graph is never launched: the owner's waits end, the request fails, the next one is right."""
    path, params = make_checkpoint(**MODEL), SamplingParams(temperature=0.0, seed=1, max_tokens=8, ignore_eos=True)
    launch = Graph.launch
    with pair(path, "auto") as both:
        expected = both.generate(PROMPTS[0], params)
        with monkeypatch.context() as patch:
            patch.setattr(Graph, "launch", lambda graph, stream: launch(graph, stream) if stream.device.index == 0 else None)
            with pytest.raises(LinkError, match="device 0 got no answer from device 1"):
                both.generate(PROMPTS[0], params)
        tier_scene.assert_all_given_back(both, "silent peer")
        assert both.generate(PROMPTS[0], params) == expected


@pytest.mark.parametrize("p2p", WAYS)
def test_check_pair_finds_a_difference(p2p: str, make_checkpoint: Callable[..., Path]) -> None:
    path = make_checkpoint(**MODEL)
    with pair(path, p2p, check_pair=True) as both:
        expected = requests(both)
        scale = both.stage.sides[1].weights.layers[2].post_norm
        values = scale.numpy()
        scale.upload(values + np.float32(0.5))
        with pytest.raises(Glm53Error, match="devices 0 and 1 differ in h: element"):
            requests(both)
        scale.upload(values)
        assert requests(both) == expected


# What is asked for


def test_refused(make_checkpoint: Callable[..., Path], demo_path: Path) -> None:
    with pytest.raises(InputError, match=r"two devices cannot share mlp\.experts.*64 columns.*run this model on one device"):
        Engine.open(make_checkpoint(layers=5, seed=12), devices=(0, 1), dtype="f32")
    with pytest.raises(InputError, match="device 7 does not exist"):
        Engine.open(demo_path, devices=(0, 7))


@pytest.mark.parametrize("way", ["single", "auto", "off"])
def test_a_step_after_a_failed_launch(control: ctypes.CDLL, make_checkpoint: Callable[..., Path], way: str) -> None:
    """Also where the selection of a step is missing, whose scores have been counted: the next step is right."""
    api = b"hipModuleLaunchKernel"
    path = make_checkpoint(layers=3, seed=7, overrides=MODEL["overrides"])
    engine = tier_scene.open_host(path, RING + 40, graphs=False) if way == "single" else pair(path, way, graphs=False)
    with engine, engine.session() as session:
        session.prefill(PROMPTS[0])
        rows = session.rows
        before = control.glm53_cpu_calls(api)
        expected = session.step([7])
        calls = control.glm53_cpu_calls(api) - before
        assert calls > 20
        for nth in sampled(calls, calls if way == "single" else 12):
            session.truncate(rows)
            control.glm53_cpu_fail(api, nth, 2)
            try:
                with pytest.raises(Glm53Error):
                    session.step([7])
            finally:
                control.glm53_cpu_fail(api, 0, 0)
            assert session.rows == rows, f"launch {nth}"
            assert np.array_equal(session.step([7]), expected), f"launch {nth}: the next step differs"
