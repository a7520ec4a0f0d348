"""Weights quantised while they are loaded, and drawn on the device: bits, bytes, notes, refusals."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from glm53.check.reference_weights import quantise
from glm53.config import EngineConfig, read_config
from glm53.errors import CheckpointError, DeviceMemoryError, InputError
from glm53.hip import Device
from glm53.model import weights as module
from glm53.model.checkpoint import Checkpoint
from glm53.model.layout import array_plans
from glm53.model.names import match
from glm53.model.random_weights import random_weights, random_weights_bytes
from glm53.model.weights import MoeWeights, Weights, load_weights
from glm53.ops.matrix import Matrix
from glm53.spec import DType, WeightFormat
from tests.conftest import ROOT, load_script

Make = Callable[..., Path]
SMALL = {"layers": 4, "vocab": 64}


@pytest.fixture(scope="module")
def device() -> Iterator[Device]:
    with Device(0) as device:
        yield device


@pytest.fixture(scope="module")
def maker(make_checkpoint: Make) -> ModuleType:
    make_checkpoint(**SMALL)
    return sys.modules["script_make_checkpoint"]


def load(path: Path, device: Device, dtype: DType = DType.BF16, **options: Any) -> Weights:
    with Checkpoint.open(path) as checkpoint:
        return load_weights(checkpoint, read_config(path), device, dtype, **options)


VARIANTS: list[dict[str, Any]] = [
    {},
    {"dtype": "bfloat16", "mtp": True},
    {"fp8": True, "mtp": True},
    {"packed_experts": True, "dtype": "bfloat16"},
    {"fp8": True, "real_widths": True, "overrides": {"intermediate_size": 192, "moe_intermediate_size": 128, "hidden_size": 320}},
]


@pytest.mark.parametrize("dtype", [DType.F32, DType.BF16], ids=lambda d: d.label)
@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_quantised_values(make_checkpoint: Make, maker: ModuleType, device: Device, options: dict[str, Any], dtype: DType) -> None:
    """Every matrix has the bits of the numpy quantiser on the stored values, or is bf16 where its columns are no multiple of 64."""
    tests = load_script(ROOT / "tests" / "model" / "test_weights.py")
    path = make_checkpoint(**SMALL, **options)
    stored, values, spec = {n: kind for n, (kind, _) in maker.read_stored(path).items()}, maker.read_checkpoint(path), read_config(path)
    weights = load(path, device, dtype, load_mtp=True, weights="q8q4")
    seen, narrow = set(), set()
    try:
        for item, expected, names in tests.all_arrays(weights, spec, values):
            if not isinstance(item, Matrix) or ".mlp.gate." in names[0]:
                stays_bf16 = expected.ndim > 1 and stored[names[0]] == "BF16"
                wanted_dtype = DType.F32 if ".mlp.gate." in names[0] or (dtype is DType.F32 and not stays_bf16) else DType.BF16
                assert item.dtype is wanted_dtype, names[0]
                continue
            wanted = WeightFormat.Q4G64 if ".experts." in names[0] else WeightFormat.Q8G64
            if expected.shape[-1] % 64:
                wanted = WeightFormat.BF16
                narrow.add(expected.shape[-1])
            assert (item.format, item.shape) == (wanted, expected.shape), names[0]
            seen.add(wanted)
            if item.scales is None:
                assert np.array_equal(item.codes.bits(), maker.to_bf16(np.ascontiguousarray(expected))), names[0]
                continue
            codes, scales, bad = quantise(expected, wanted)
            assert not bad.any()
            assert np.array_equal(item.scales.bits(), scales) and np.array_equal(item.codes.bits(), codes), names[0]
        assert {WeightFormat.Q8G64, WeightFormat.Q4G64} <= seen
        assert {int(note.split(" columns")[0].split()[-1]) for note in weights.notes if "stays bf16" in note} == narrow
        assert device.allocated_bytes() == {"weights": weights.nbytes}
    finally:
        weights.free()
    assert not device.live


def test_quantised_in_small_pieces(make_checkpoint: Make, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_checkpoint(**SMALL, fp8=True)
    whole = load(path, device, weights="q8q4")
    monkeypatch.setattr(module, "SLOT_BYTES_MAX", 1)
    pieces = load(path, device, weights="q8q4")
    for a, b in zip(whole.buffers, pieces.buffers, strict=True):
        assert np.array_equal(raw(a), raw(b))
    whole.free()
    pieces.free()


def raw(buffer: Any) -> np.ndarray:
    return module.Array(buffer, DType.U8, (buffer.byte_count,)).bits()


def test_narrow_columns_are_named(make_checkpoint: Make, device: Device) -> None:
    path = make_checkpoint(**SMALL, overrides={"moe_intermediate_size": 96})
    weights = load(path, device, weights="q8q4")
    mlp = weights.layers[2].mlp
    assert isinstance(mlp, MoeWeights)
    assert (mlp.down.format, mlp.gate_up.format, mlp.router.format) == (WeightFormat.BF16, WeightFormat.Q4G64, WeightFormat.F32)
    assert "mlp.down stays bf16 in 2 layers: its 96 columns are no multiple of 64" in weights.notes
    weights.free()


@pytest.mark.parametrize("weights", ["f32", "bf16"])
def test_plain_formats(make_checkpoint: Make, device: Device, weights: str) -> None:
    """bf16 rounds an f32 run's matrices; f32 widens a bf16 checkpoint's."""
    path = make_checkpoint(**SMALL, dtype="float32" if weights == "bf16" else "bfloat16")
    with Checkpoint.open(path) as checkpoint:
        plans = array_plans(match(checkpoint, read_config(path)), DType.F32, False, weights)
    vectors = {p.format for p in plans if len(p.shape) == 1 or p.key.endswith("router")}
    others = {half.format for p in plans if not (len(p.shape) == 1 or p.key.endswith("router")) for half in p.halves or (p,)}
    assert vectors == {WeightFormat.F32} and others == {WeightFormat[weights.upper()]}
    loaded = load(path, device, DType.F32, weights=weights)
    assert loaded.embed.dtype.label == loaded.lm_head.format.label == loaded.layers[0].wk.format.label == weights
    loaded.free()


def test_f32_weights_need_f32_activations() -> None:
    with pytest.raises(InputError, match="weights is f32, expected auto, q8q4 or bf16 with dtype bf16"):
        EngineConfig(weights="f32")
    assert EngineConfig(weights="f32", dtype="f32").weights == "f32"


def test_tied_head_is_quantised_beside_the_embedding(make_checkpoint: Make, rewrite: Callable[..., Path], device: Device) -> None:
    path = rewrite(make_checkpoint(**SMALL), lambda t: t.pop("lm_head.weight"), lambda c: c.update(tie_word_embeddings=True))
    weights = load(path, device, weights="q8q4")
    assert weights.lm_head.format is WeightFormat.Q8G64 and weights.embed.dtype is DType.BF16
    weights.free()
    assert not device.live


@pytest.mark.parametrize(("name", "options", "bad"), [
    ("model.layers.2.mlp.experts.5.down_proj.weight", {"dtype": "float32"}, np.float32("nan")),
    ("model.layers.0.self_attn.kv_b_proj.weight", {"dtype": "bfloat16", "real_widths": True}, np.uint16(0x7F80)),
    ("model.layers.0.self_attn.o_proj.weight", {"fp8": True}, np.uint8(0x7F)),
    ("model.layers.0.self_attn.o_proj.weight_scale_inv", {"fp8": True}, np.float32("inf")),
])  # fmt: skip
def test_what_is_not_finite_is_refused_without_a_scan(
    make_checkpoint: Make, rewrite: Callable[..., Path], device: Device, name: str, options: dict[str, Any], bad: Any
) -> None:
    def spoil(tensors: dict[str, tuple[str, np.ndarray]]) -> None:
        tensors[name][1].reshape(-1)[-1] = bad

    path = rewrite(make_checkpoint(**SMALL, **options), spoil)
    with pytest.raises(CheckpointError, match=rf"{name} .* holds 1 values that are NaN or infinite, the first at"):
        load(path, device, weights="q8q4")
    assert not device.live


def test_what_no_scale_can_hold_is_refused(make_checkpoint: Make, rewrite: Callable[..., Path], device: Device) -> None:
    name = "model.layers.2.mlp.experts.5.down_proj.weight"

    def spoil(tensors: dict[str, tuple[str, np.ndarray]]) -> None:
        tensors[name][1].reshape(-1)[7] = 1e6

    path = rewrite(make_checkpoint(**SMALL), spoil)
    with pytest.raises(CheckpointError, match=r"one of 16 tensors\) holds values too large for the f16 scales of q4g64, expected at most 524,032"):
        load(path, device, weights="q8q4")
    assert not device.live


def test_memory_check_counts_quantised_sizes(make_checkpoint: Make, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_checkpoint(**SMALL, fp8=True)
    weights = load(path, device, weights="q8q4")
    nbytes = weights.nbytes
    weights.free()
    monkeypatch.setattr(device, "free_bytes", lambda: nbytes)
    with pytest.raises(DeviceMemoryError, match=rf"{nbytes} B of weights|of weights, the rest for loading"):
        load(path, device, weights="q8q4")
    monkeypatch.setattr(device, "free_bytes", lambda: 2 * nbytes)  # not enough for bf16
    load(path, device, weights="q8q4").free()
    with pytest.raises(DeviceMemoryError):
        load(path, device)


# Weights drawn on the device


@pytest.mark.parametrize("weights", ["q8q4", "bf16"])
def test_random_weights(make_checkpoint: Make, device: Device, weights: str) -> None:
    spec = read_config(make_checkpoint(**SMALL))
    first, again, other = (random_weights(device, spec, DType.BF16, weights, seed) for seed in (5, 5, 6))
    same = [np.array_equal(raw(a), raw(b)) for a, b in zip(first.buffers, again.buffers, strict=True)]
    differs = [not np.array_equal(raw(a), raw(b)) for a, b in zip(first.buffers, other.buffers, strict=True)]
    # The scales of q8g64 are one constant, whatever the seed.
    assert all(same) and sum(differs) >= len(differs) // 2
    assert first.nbytes == random_weights_bytes(spec, DType.BF16, weights)
    mlp = first.layers[2].mlp
    assert isinstance(mlp, MoeWeights)
    assert mlp.gate_up.format is (WeightFormat.Q4G64 if weights == "q8q4" else WeightFormat.BF16)
    assert abs(first.final_norm.numpy().mean() - 1) < 0.02 and np.abs(mlp.bias.numpy()).max() < 0.02
    assert first.embed.numpy().std() == pytest.approx(1, rel=0.02)
    if weights == "bf16":
        assert first.layers[0].o.codes.numpy().std() == pytest.approx(1 / math.sqrt(8 * first.layers[0].o.shape[1]), rel=0.05)
    for made in (first, again, other):
        made.free()
    assert not device.live


def test_random_weights_free_everything_on_failure(make_checkpoint: Make, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, calls = read_config(make_checkpoint(**SMALL)), 0
    real = device.alloc

    def failing(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > 20:
            raise DeviceMemoryError("out of luck")
        return real(*args, **kwargs)

    monkeypatch.setattr(device, "alloc", failing)
    with pytest.raises(DeviceMemoryError, match="out of luck"):
        random_weights(device, spec, DType.BF16)
    assert not device.live


def test_real_width_stage_size(release_config: dict[str, Any], tmp_path: Path) -> None:
    """Layers 30 to 39 of the released model: what the benchmarks' stage takes."""
    import dataclasses
    import json

    (tmp_path / "config.json").write_text(json.dumps(release_config))
    spec = read_config(tmp_path)
    stage = dataclasses.replace(
        spec, n_layers=10, layer_is_full=(True, *spec.layer_is_full[31:40]), layer_is_sparse=spec.layer_is_sparse[30:40], n_mtp_layers=0
    )
    nbytes = random_weights_bytes(stage, DType.BF16)
    experts = 10 * 256 * 3 * 2048 * 6144 * 17 // 32
    assert experts < nbytes < experts + 9e9


def test_format_measurement_runs(demo_path: Path) -> None:
    """What decision 0005 rests on, in its tiny form."""
    table = load_script(ROOT / "scripts" / "measure_weight_formats.py").measure(demo_path, noise_weights=1 << 14)
    searched, plain, zero_point = (table[name] for name in ("(c) as (b), best of 8 scales", "(b) extreme / -8, codes -8..7", "(d) in groups of 128"))
    for data in ("Gaussian", "Laplace", demo_path.name):
        assert searched[data] < plain[data] < table["(a) amax / 7, codes -7..7"][data]
        assert searched[data] < zero_point[data] and searched["bits"] == zero_point["bits"]
