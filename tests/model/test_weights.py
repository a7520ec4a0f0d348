"""Device arrays against the checkpoint's values, bit for bit; memory taken, given back, and never taken on bad input."""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from glm53.config import read_config
from glm53.errors import CheckpointError, DeviceMemoryError, HipError
from glm53.hip import Device, runtime
from glm53.model import weights as module
from glm53.model.checkpoint import Checkpoint
from glm53.model.weights import DenseWeights, Item, LayerWeights, MoeWeights, Weights, load_weights
from glm53.ops.matrix import Matrix
from glm53.spec import DType, ModelSpec

Make = Callable[..., Path]
Values = dict[str, np.ndarray]
SMALL = {"layers": 4, "vocab": 64}
STEM = "model.layers.{}."


@pytest.fixture(scope="module")
def device() -> Iterator[Device]:
    with Device(0) as device:
        yield device


@pytest.fixture(scope="module")
def maker(make_checkpoint: Make) -> ModuleType:
    make_checkpoint(**SMALL)
    return sys.modules["script_make_checkpoint"]


def load(path: Path, device: Device, dtype: DType, **options: Any) -> Weights:
    with Checkpoint.open(path) as checkpoint:
        return load_weights(checkpoint, read_config(path), device, dtype, **options)


def layer_arrays(layer: LayerWeights, base: str, spec: ModelSpec, values: Values) -> Iterator[tuple[Item, np.ndarray, list[str]]]:
    """(array or matrix, expected float32 values, stored names it comes from) of one layer, written out again from the checkpoint's names."""

    def one(array: Item, *names: str) -> tuple[Item, np.ndarray, list[str]]:
        full = [base + name for name in names]
        return array, np.concatenate([values[name] for name in full]), full

    yield one(layer.input_norm, "input_layernorm.weight")
    yield one(layer.post_norm, "post_attention_layernorm.weight")
    for array, name in ((layer.q_a, "q_a_proj"), (layer.q_b, "q_b_proj"), (layer.kv_a, "kv_a_proj_with_mqa"), (layer.o, "o_proj")):
        yield one(array, f"self_attn.{name}.weight")
    yield one(layer.q_a_norm, "self_attn.q_a_layernorm.weight")
    yield one(layer.kv_a_norm, "self_attn.kv_a_layernorm.weight")
    name = base + "self_attn.kv_b_proj.weight"
    heads = values[name].reshape(spec.n_heads, spec.qk_nope_head_dim + spec.v_head_dim, spec.kv_lora_rank)
    yield layer.wk, heads[:, : spec.qk_nope_head_dim].transpose(0, 2, 1), [name]
    yield layer.wv, heads[:, spec.qk_nope_head_dim :], [name]
    if layer.indexer is not None:
        yield one(layer.indexer.wq_b, "self_attn.indexer.wq_b.weight")
        yield one(layer.indexer.wk, "self_attn.indexer.wk.weight")
        yield one(layer.indexer.k_norm_weight, "self_attn.indexer.k_norm.weight")
        yield one(layer.indexer.k_norm_bias, "self_attn.indexer.k_norm.bias")
        yield one(layer.indexer.weights_proj, "self_attn.indexer.weights_proj.weight")
    mlp = layer.mlp
    dense, prefix = (mlp, "mlp.") if isinstance(mlp, DenseWeights) else (mlp.shared, "mlp.shared_experts.")
    yield one(dense.gate_up, prefix + "gate_proj.weight", prefix + "up_proj.weight")
    yield one(dense.down, prefix + "down_proj.weight")
    if isinstance(mlp, MoeWeights):
        yield one(mlp.router, "mlp.gate.weight")
        yield one(mlp.bias, "mlp.gate.e_score_correction_bias")
        for array, packed, parts in ((mlp.gate_up, "gate_up_proj", ("gate", "up")), (mlp.down, "down_proj", ("down",))):
            name = f"{base}mlp.experts.{packed}"
            if name in values:
                yield array, values[name], [name]
                continue
            names = [f"mlp.experts.{e}.{part}_proj.weight" for e in range(spec.n_routed_experts) for part in parts]
            array, expected, full = one(array, *names)
            yield array, expected.reshape(array.shape), full


def all_arrays(weights: Weights, spec: ModelSpec, values: Values) -> Iterator[tuple[Item, np.ndarray, list[str]]]:
    ends: tuple[tuple[Item, str], ...] = ((weights.embed, "model.embed_tokens"), (weights.final_norm, "model.norm"), (weights.lm_head, "lm_head"))
    for array, name in ends:
        yield array, values[name + ".weight"], [name + ".weight"]
    for i, layer in enumerate(weights.layers):
        assert (layer.indexer is not None) == spec.layer_is_full[i]
        assert isinstance(layer.mlp, MoeWeights) == spec.layer_is_sparse[i]
        yield from layer_arrays(layer, STEM.format(i), spec, values)
    if weights.mtp is not None:
        base = STEM.format(spec.n_layers)
        mtp = weights.mtp
        ends = ((mtp.enorm, "enorm"), (mtp.hnorm, "hnorm"), (mtp.eh_proj, "eh_proj"), (mtp.norm, "shared_head.norm"))
        for array, name in ends:
            yield array, values[f"{base}{name}.weight"], [f"{base}{name}.weight"]
        yield from layer_arrays(mtp.layer, base, spec, values)


def check_all(weights: Weights, path: Path, values: Values, maker: ModuleType, dtype: DType) -> None:
    stored = {name: kind for name, (kind, _) in maker.read_stored(path).items()}
    spec = read_config(path)
    total = 0
    for array, expected, names in all_arrays(weights, spec, values):
        is_router = ".mlp.gate." in names[0]
        stays_bf16 = expected.ndim > 1 and all(stored[name] == "BF16" for name in names)
        wanted = DType.F32 if is_router or (dtype is DType.F32 and not stays_bf16) else DType.BF16
        assert (array.dtype, array.shape) == (wanted, expected.shape), names[0]
        bits = expected if wanted is DType.F32 else maker.to_bf16(np.ascontiguousarray(expected))
        codes = array.codes if isinstance(array, Matrix) else array
        assert np.array_equal(codes.bits(), bits), names[0]
        total += array.nbytes
    assert total == weights.nbytes


VARIANTS: list[dict[str, Any]] = [
    {},
    {"dtype": "bfloat16", "mtp": True},
    {"fp8": True, "mtp": True},
    {"packed_experts": True, "dtype": "bfloat16"},
    {"fp8": True, "real_widths": True, "overrides": {"intermediate_size": 200, "moe_intermediate_size": 72, "hidden_size": 264}},
]


@pytest.mark.parametrize("dtype", [DType.F32, DType.BF16], ids=lambda d: d.label)
@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_values(make_checkpoint: Make, maker: ModuleType, device: Device, options: dict[str, Any], dtype: DType) -> None:
    path = make_checkpoint(**SMALL, **options)
    weights = load(path, device, dtype, load_mtp=True)
    try:
        assert (weights.mtp is not None) == options.get("mtp", False)
        check_all(weights, path, maker.read_checkpoint(path), maker, dtype)
        assert device.allocated_bytes() == {"weights": weights.nbytes}
    finally:
        weights.free()
    assert not device.live


def test_demo_values(demo_path: Path, maker: ModuleType, device: Device) -> None:
    weights = load(demo_path, device, DType.BF16)
    try:
        assert weights.mtp is None
        check_all(weights, demo_path, maker.read_checkpoint(demo_path), maker, DType.BF16)
    finally:
        weights.free()


def test_pieces_smaller_than_a_tensor(make_checkpoint: Make, maker: ModuleType, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SLOT_BYTES_MAX", 1)  # one row of scale blocks, or one row, at a time
    path = make_checkpoint(**SMALL, fp8=True, mtp=True)
    weights = load(path, device, DType.BF16, load_mtp=True)
    try:
        check_all(weights, path, maker.read_checkpoint(path), maker, DType.BF16)
    finally:
        weights.free()


def test_packed_fp8_experts(make_checkpoint: Make, rewrite: Callable[..., Path], maker: ModuleType, device: Device) -> None:
    """Scale blocks of each expert start anew: 2 x 96 rows are two blocks, the second ragged."""
    rng = np.random.default_rng(3)
    expected: Values = {}

    def quantise(tensors: dict[str, tuple[str, np.ndarray]]) -> None:
        for name in [n for n in tensors if n.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
            shape = tensors[name][1].shape
            codes = rng.integers(0, 0x7F, shape, np.uint8)
            scales = rng.uniform(0.5, 2, (shape[0], -(-shape[1] // 128), -(-shape[2] // 128))).astype(np.float32)
            full = scales.repeat(128, 1).repeat(128, 2)[:, : shape[1], : shape[2]]
            expected[name] = maker.e4m3_values()[codes] * full
            tensors[name] = ("F8_E4M3", codes)
            tensors[name + "_scale_inv"] = ("F32", scales)

    path = rewrite(make_checkpoint(**SMALL, packed_experts=True, overrides={"moe_intermediate_size": 96}), quantise)
    weights = load(path, device, DType.F32)
    try:
        mlp = weights.layers[2].mlp
        assert isinstance(mlp, MoeWeights)
        assert np.array_equal(mlp.gate_up.codes.numpy(), expected["model.layers.2.mlp.experts.gate_up_proj"])
        assert np.array_equal(mlp.down.codes.numpy(), expected["model.layers.2.mlp.experts.down_proj"])
    finally:
        weights.free()


def test_tied_head_is_the_embedding(make_checkpoint: Make, rewrite: Callable[..., Path], device: Device) -> None:
    path = rewrite(make_checkpoint(**SMALL), lambda t: t.pop("lm_head.weight"), lambda c: c.update(tie_word_embeddings=True))
    weights = load(path, device, DType.BF16)
    assert weights.lm_head.codes is weights.embed
    weights.free()
    assert not device.live


@pytest.mark.parametrize("check", [False, True])
def test_progress_ends_at_the_total(make_checkpoint: Make, device: Device, check: bool) -> None:
    path = make_checkpoint(**SMALL, fp8=True)
    calls: list[tuple[int, int, str]] = []
    load(path, device, DType.BF16, check=check, progress=lambda *call: calls.append(call)).free()
    stored = sum(info.nbytes for info in Checkpoint.open(path).tensors.values())
    assert {total for _, total, _ in calls} == {stored * (2 if check else 1)}
    done = [count for count, _, _ in calls]
    assert done == sorted(done) and done[-1] == calls[-1][1]


NAN_CASES = [
    ({"dtype": "float32"}, "model.layers.2.mlp.experts.5.down_proj.weight", np.float32("nan"), r"\(F32 \[256, 64\]\)"),
    ({"dtype": "float32"}, "model.norm.weight", np.float32("-inf"), r"\(F32 \[256\]\)"),
    ({"dtype": "bfloat16"}, "lm_head.weight", np.uint16(0xFF80), r"\(BF16 \[64, 256\]\)"),
    ({"fp8": True}, "model.layers.0.self_attn.o_proj.weight", np.uint8(0xFF), r"\(F8_E4M3 \[256, 128\]\)"),
    ({"fp8": True}, "model.layers.0.self_attn.o_proj.weight_scale_inv", np.float32("inf"), r"\(F32 \[2, 1\]\)"),
    ({"fp8": True, "mtp": True}, "model.layers.4.enorm.weight", np.uint16(0x7FC0), r"\(BF16 \[256\]\)"),
]


@pytest.mark.parametrize(("options", "name", "bad", "text"), NAN_CASES, ids=[case[1] for case in NAN_CASES])
def test_check_finds_what_is_not_finite(
    make_checkpoint: Make,
    rewrite: Callable[..., Path],
    device: Device,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    name: str,
    bad: Any,
    text: str,
) -> None:
    monkeypatch.setattr(module, "SCAN_BYTES", 256)  # several steps a tensor, the index counted across them

    def spoil(tensors: dict[str, tuple[str, np.ndarray]]) -> None:
        flat = tensors[name][1].reshape(-1)
        flat[[flat.size // 2, flat.size - 1]] = bad

    path = rewrite(make_checkpoint(**SMALL, **options), spoil)
    with pytest.raises(CheckpointError, match=text) as caught:
        load(path, device, DType.F32, check=True)
    shape = Checkpoint.open(path).tensors[name].shape
    size = int(np.prod(shape))
    count = 1 if size // 2 == size - 1 else 2
    first = [int(i) for i in np.unravel_index(size // 2, shape)]
    assert name + " (" in str(caught.value) and f"holds {count} values that are NaN or infinite, the first at {first}" in str(caught.value)
    assert not device.live
    load(path, device, DType.F32).free()  # not asked, not looked at


def test_check_accepts_sound_weights(make_checkpoint: Make, device: Device) -> None:
    load(make_checkpoint(**SMALL, fp8=True, mtp=True), device, DType.F32, check=True).free()
    assert not device.live


def test_too_little_memory_is_said_first(make_checkpoint: Make, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "free_bytes", lambda: 1_000_000)
    monkeypatch.setattr(device, "alloc", lambda *_: pytest.fail("allocated"))
    with pytest.raises(DeviceMemoryError, match=r"weights: \d+ B .* needed .* 1000000 B .* free"):
        load(make_checkpoint(**SMALL), device, DType.F32)


@pytest.mark.parametrize("target", ["alloc", "host_alloc", "event", "dequant", "split_kv_b"])
def test_any_failure_frees_everything(make_checkpoint: Make, device: Device, monkeypatch: pytest.MonkeyPatch, target: str) -> None:
    """The first, a middle and a late call of each kind fail."""
    owner: Any = module.ops if target in ("dequant", "split_kv_b") else device
    real = getattr(owner, target)
    path = make_checkpoint(**SMALL, fp8=True)
    for fail_at in (0, 1, 3, 40):
        calls = 0

        def failing(*args: Any, fail_at: int = fail_at, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls > fail_at:
                raise HipError("hipInjected", 2, "out of luck")
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, target, failing)
        if fail_at >= {"host_alloc": 1, "event": 2, "split_kv_b": 4}.get(target, 100):
            continue  # the load makes fewer such calls
        before = device.free_bytes()
        with pytest.raises(HipError, match="out of luck"):
            load(path, device, DType.BF16)
        assert not device.live
        assert device.free_bytes() == before


INJECTED = [
    ("hipMalloc", (1, 2, 40)),
    ("hipHostMalloc", (1,)),
    ("hipEventCreateWithFlags", (1, 2)),
    ("hipEventRecord", (1, 30)),
    ("hipMemcpyAsync", (1, 30)),
    ("hipModuleLaunchKernel", (1, 30)),
    ("hipDeviceSynchronize", (1,)),
]


@pytest.mark.parametrize(("api", "nths"), INJECTED, ids=[api for api, _ in INJECTED])
def test_failing_calls_leave_nothing_live(make_checkpoint: Make, device: Device, api: str, nths: tuple[int, ...]) -> None:
    """The cpu runtime fails the nth call of an API and counts what is live: memory, streams, events."""
    if device.runtime.name != "cpu":
        pytest.skip("fault injection is the cpu runtime's")
    library = runtime.control()

    def live() -> dict[str, int]:
        kinds = ("allocations", "allocated_bytes", "host_allocations", "streams", "events", "queued")
        return {kind: library.glm53_cpu_live(kind.encode()) for kind in kinds}

    path = make_checkpoint(**SMALL, fp8=True)
    load(path, device, DType.BF16).free()  # the code object is loaded on first use and stays
    before = live()
    for nth in nths:
        library.glm53_cpu_fail(api.encode(), ctypes.c_uint64(nth), 2)
        try:
            with pytest.raises((HipError, DeviceMemoryError)):
                load(path, device, DType.BF16)
        finally:
            library.glm53_cpu_fail(api.encode(), ctypes.c_uint64(0), 0)
        assert live() == before


def test_mismatch_allocates_nothing(make_checkpoint: Make, rewrite: Callable[..., Path], device: Device) -> None:
    path = rewrite(make_checkpoint(**SMALL), config=lambda c: c.update(q_lora_rank=47))
    with pytest.raises(CheckpointError, match=r"shape: model\.layers\.0\.self_attn\.q_a_proj\.weight is \[48, 256\], expected \[47, 256\]"):
        load(path, device, DType.F32)
    assert not device.live


def status_kib(field: str) -> int:
    return next(int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field + ":"))


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's high-water mark of resident memory")
def test_resident_memory_holds_one_copy(make_checkpoint: Make, device: Device) -> None:
    """On the cpu runtime the device's memory is resident as well: the growth is arrays and staging memory, and no copy of the files."""
    path = make_checkpoint(real_widths=True, vocab=8192, overrides={"hidden_size": 768})
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before = status_kib("VmRSS")
    weights = load(path, device, DType.F32)
    grown = (status_kib("VmHWM") - before) * 1024
    nbytes = weights.nbytes
    weights.free()
    assert nbytes > 200e6
    assert grown <= (nbytes if device.runtime.name == "cpu" else 0) + 120e6


def test_weights_are_frozen() -> None:
    assert all(dataclasses.fields(kind) and kind.__dataclass_params__.frozen for kind in (Weights, LayerWeights, MoeWeights, DenseWeights))
