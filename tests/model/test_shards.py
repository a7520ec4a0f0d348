"""Two sides of a model against the whole, byte for byte; what cannot be split is refused; memory taken and given back."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from glm53.config import read_config
from glm53.errors import CheckpointError, DeviceMemoryError, HipError, InputError
from glm53.hip import Array, Device
from glm53.model import random_weights as drawing
from glm53.model import weights as module
from glm53.model.checkpoint import Checkpoint
from glm53.model.layout import shard_spec, shard_widths
from glm53.model.random_weights import random_weights, random_weights_bytes
from glm53.model.weights import Item, Weights, load_weights
from glm53.ops.matrix import Matrix
from glm53.spec import DType, ModelSpec, Shard

Make = Callable[..., Path]
Rewrite = Callable[..., Path]
SMALL = {"layers": 4, "vocab": 65}
SIDES = (Shard(0, 2), Shard(1, 2))
ROWS, COLUMNS, GATE_UP = "rows", "columns", "gate_up"
SPLIT = {  # docs/decisions/0006-pair.md
    "q_b": ROWS, "wk": ROWS, "wv": ROWS, "lm_head": ROWS, "o": COLUMNS, "down": COLUMNS, "embed": COLUMNS, "gate_up": GATE_UP, "kv_a": "owner",
}  # fmt: skip


@pytest.fixture(scope="module")
def device() -> Iterator[Device]:
    with Device(0) as device:
        yield device


def load(path: Path, device: Device, dtype: DType = DType.BF16, shard: Shard | None = None, **options: Any) -> Weights:
    if shard is not None:
        options["shard"] = shard
    with Checkpoint.open(path) as checkpoint:
        return load_weights(checkpoint, read_config(path), device, dtype, **options)


def items_of(value: Any, path: str = "") -> Iterator[tuple[str, Item]]:
    """(path, array or matrix) of everything in the weights."""
    if isinstance(value, (Array, Matrix)):
        yield path, value
    elif isinstance(value, tuple):
        for i, item in enumerate(value):
            yield from items_of(item, f"{path}.{i}")
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            if field.name != "buffers":
                yield from items_of(getattr(value, field.name), f"{path}.{field.name}")


def how(path: str) -> str | None:
    return None if "indexer" in path else SPLIT.get(path.rsplit(".", 1)[-1])


def stored(item: Item) -> list[np.ndarray]:
    """Codes and scales, or the values, as raw elements."""
    return [array.bits() for array in (item.arrays if isinstance(item, Matrix) else (item,))]


def together(kind: str | None, owner: np.ndarray, peer: np.ndarray, name: str) -> np.ndarray:
    if kind is None:
        assert np.array_equal(owner, peer), name
        return owner
    if kind == GATE_UP:
        halves = [np.split(side, 2, axis=-2) for side in (owner, peer)]
        return np.concatenate([part for which in (0, 1) for part in (halves[0][which], halves[1][which])], axis=-2)
    return np.concatenate([owner, peer], axis=0 if kind == ROWS else -1)


def expected_first(path: str, shape: tuple[int, ...], spec: ModelSpec) -> tuple[int, ...]:
    """Shape of the owner's matrix, whose whole is `shape`."""
    kind, half = how(path), lambda k: math.ceil(k / 128) * 64
    if kind == "owner":
        return shape
    if path.endswith("embed"):
        return (shape[0], math.ceil(shape[1] / 16) * 8)
    if kind == COLUMNS:
        return (*shape[:-1], half(shape[-1]))
    if kind == GATE_UP:
        return (*shape[:-2], 2 * half(shape[-2] // 2), shape[-1])
    return shape if kind is None else (spec.vocab_size // 2 + spec.vocab_size % 2 if "head" in path else shape[0] // 2, *shape[1:])


def check_sides(whole: Weights, owner: Weights, peer: Weights, spec: ModelSpec) -> None:
    """Both sides put together are the whole; and their bytes are what they hold."""
    seen, both, shared = set(), 0, 0
    items = [dict(items_of(weights)) for weights in (whole, owner, peer)]
    owned = {path for path in items[0] if how(path) == "owner"}
    assert items[0].keys() == items[1].keys() == items[2].keys() | owned and not items[2].keys() & owned
    for path, item in items[0].items():
        sides = [side[path] for side in items[1:] if path in side]
        assert sides[0].shape == expected_first(path, item.shape, spec), path
        if isinstance(item, Matrix):
            assert {side.format for side in sides if isinstance(side, Matrix)} == {item.format}, path
        for expected, *parts in zip(stored(item), *(stored(side) for side in sides), strict=True):
            assert np.array_equal(parts[0] if path in owned else together(how(path), *parts, path), expected), path
        seen.add(how(path))
        both += sum(side.nbytes for side in sides)
        shared += item.nbytes if how(path) is None else 0
    assert seen == {None, ROWS, COLUMNS, GATE_UP, "owner"}
    assert owner.nbytes + peer.nbytes == both == whole.nbytes + shared
    assert peer.nbytes <= owner.nbytes < whole.nbytes


VARIANTS: list[dict[str, Any]] = [
    {"overrides": {"moe_intermediate_size": 192}},  # 128 + 64
    {"dtype": "bfloat16", "mtp": True, "overrides": {"moe_intermediate_size": 200}},  # 128 + 72: not quantised
    {"fp8": True, "mtp": True, "overrides": {"moe_intermediate_size": 320}},  # 192 + 128, which starts inside a block of scales and ends in the next
    {"packed_experts": True, "dtype": "bfloat16", "overrides": {"moe_intermediate_size": 128}},
    {"fp8": True, "real_widths": True, "heads": 2, "overrides": {"intermediate_size": 200, "moe_intermediate_size": 256, "hidden_size": 264}},
]


@pytest.mark.parametrize(("dtype", "weights"), [
    (DType.F32, "auto"), (DType.F32, "f32"), (DType.F32, "q8q4"), (DType.BF16, "auto"), (DType.BF16, "q8q4"),
], ids=lambda value: value if isinstance(value, str) else value.label)  # fmt: skip
@pytest.mark.parametrize("options", VARIANTS, ids=str)
def test_sides_are_the_whole(make_checkpoint: Make, device: Device, options: dict[str, Any], dtype: DType, weights: str) -> None:
    path = make_checkpoint(**SMALL, **options)
    whole, owner, peer = loaded = [load(path, device, dtype, shard, weights=weights, load_mtp=True) for shard in (None, *SIDES)]
    assert (whole.mtp is not None) == options.get("mtp", False)
    check_sides(whole, owner, peer, read_config(path))
    assert whole.notes == owner.notes and peer.notes == tuple(note for note in whole.notes if not note.startswith("kv_a "))
    assert device.allocated_bytes() == {"weights": sum(w.nbytes for w in loaded)}
    for w in loaded:
        w.free()
    assert not device.live


@pytest.mark.parametrize("weights", ["auto", "q8q4"])
def test_demo(demo_path: Path, device: Device, weights: str) -> None:
    """All widths of the demo model split evenly: each side has half of what is split."""
    whole, owner, peer = loaded = [load(demo_path, device, shard=shard, weights=weights) for shard in (None, *SIDES)]
    check_sides(whole, owner, peer, read_config(demo_path))
    replicated = sum(item.nbytes for path, item in items_of(owner) if how(path) is None)
    owned = sum(item.nbytes for path, item in items_of(owner) if how(path) == "owner")
    assert owner.nbytes - owned == peer.nbytes == replicated + (whole.nbytes - replicated - owned) // 2
    for w in loaded:
        w.free()


@pytest.mark.parametrize("weights", ["auto", "q8q4"])
def test_packed_fp8_experts(make_checkpoint: Make, rewrite: Rewrite, device: Device, weights: str) -> None:
    """Scale blocks of each expert start anew; up rows of the owner start inside one, at row 320."""
    rng = np.random.default_rng(3)

    def quantise(tensors: dict[str, tuple[str, np.ndarray]]) -> None:
        for name in [n for n in tensors if n.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
            shape = tensors[name][1].shape
            scales = rng.uniform(0.5, 2, (shape[0], -(-shape[1] // 128), -(-shape[2] // 128))).astype(np.float32)
            tensors[name] = ("F8_E4M3", rng.integers(0, 0x7F, shape, np.uint8))
            tensors[name + "_scale_inv"] = ("F32", scales)

    path = rewrite(make_checkpoint(**SMALL, packed_experts=True, overrides={"moe_intermediate_size": 320}), quantise)
    whole, owner, peer = loaded = [load(path, device, shard=shard, weights=weights) for shard in (None, *SIDES)]
    check_sides(whole, owner, peer, read_config(path))
    for w in loaded:
        w.free()


@pytest.mark.parametrize("options", [VARIANTS[2], VARIANTS[3]], ids=str)
def test_pieces_smaller_than_a_tensor(make_checkpoint: Make, device: Device, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    path = make_checkpoint(**SMALL, **options)
    whole = load(path, device, DType.F32)
    monkeypatch.setattr(module, "SLOT_BYTES_MAX", 1)  # one row of scale blocks, or one row, at a time
    owner, peer = (load(path, device, DType.F32, shard) for shard in SIDES)
    check_sides(whole, owner, peer, read_config(path))
    for w in (whole, owner, peer):
        w.free()


@pytest.mark.parametrize("weights", ["auto", "q8q4"])
def test_tied_head(make_checkpoint: Make, rewrite: Rewrite, device: Device, weights: str) -> None:
    """The head of a side is rows of the embedding's whole, which it has columns of."""
    source = make_checkpoint(**SMALL, **VARIANTS[0])
    path = rewrite(source, lambda t: t.pop("lm_head.weight"), lambda c: c.update(tie_word_embeddings=True))
    loaded = [load(path, device, shard=shard, weights=weights) for shard in (None, *SIDES)]
    assert [w.lm_head.shape[0] for w in loaded] == [65, 33, 32]
    for expected, *parts in zip(*(stored(w.lm_head) for w in loaded), strict=True):
        assert np.array_equal(np.concatenate(parts), expected)
    assert len({w.lm_head.format for w in loaded}) == 1
    for w in loaded:
        w.free()
    assert not device.live


@pytest.mark.parametrize("shard", SIDES, ids=lambda s: f"side{s.index}")
def test_progress_ends_at_the_total(make_checkpoint: Make, device: Device, shard: Shard) -> None:
    calls: list[tuple[int, int, str]] = []
    load(make_checkpoint(**SMALL, **VARIANTS[2]), device, shard=shard, progress=lambda *call: calls.append(call)).free()
    done = [count for count, _, _ in calls]
    assert len({total for _, total, _ in calls}) == 1
    assert done == sorted(done) and done[-1] == calls[-1][1]


@pytest.mark.parametrize(("field", "value", "side"), [("weight", 0x7F, 1), ("weight_scale_inv", np.inf, 1)])
def test_what_is_not_finite_is_refused_by_its_side(
    make_checkpoint: Make, rewrite: Rewrite, device: Device, field: str, value: Any, side: int
) -> None:
    """The last element of a matrix is the second side's."""
    name = f"model.layers.2.mlp.experts.5.down_proj.{field}"

    def spoil(tensors: dict[str, tuple[str, np.ndarray]]) -> None:
        tensors[name][1].reshape(-1)[-1] = value

    path = rewrite(make_checkpoint(**SMALL, **VARIANTS[2]), spoil)
    with pytest.raises(CheckpointError, match=rf"{name} .* holds 1 values that are NaN or infinite"):
        load(path, device, shard=SIDES[side], weights="q8q4")
    assert not device.live
    load(path, device, shard=SIDES[1 - side], weights="q8q4").free()


# What cannot be split


REFUSED: list[tuple[dict[str, int], str]] = [
    ({"n_heads": 7}, r"self_attn\.q_b_proj\.weight: got 7 heads, wanted an even number"),
    ({"n_heads": 2}, r"self_attn\.o_proj\.weight: got 1 heads with 32 of 64 columns, wanted heads that end with the first half of the columns, 64"),
    ({"n_heads": 6}, r"self_attn\.o_proj\.weight: got 3 heads with 96 of 192 columns, .* 128"),
    (
        {"dense_width": 64},
        r"mlp\.down_proj\.weight: got 64 columns, 64 for the first device and 0 for the second, wanted a multiple of 64, at least 64",
    ),
    (
        {"dense_width": 40},
        r"mlp\.down_proj\.weight: got 40 columns, 40 for the first device and 0 for the second, wanted a multiple of 8, at least 64",
    ),
    (
        {"expert_width": 136},
        r"mlp\.experts\.\*\.down_proj\.weight: got 136 columns, 128 .* and 8 for the second, wanted a multiple of 8, at least 64",
    ),
    ({"expert_width": 100}, r"mlp\.experts\.\*\.down_proj\.weight: got 100 columns, 64 .* and 36 for the second, wanted a multiple of 8, at"),
    ({"n_shared_experts": 0}, r"mlp\.shared_experts\.down_proj\.weight: got 0 columns"),
    ({"vocab_size": 1}, r"lm_head\.weight: got 1 row, wanted at least 2"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED, ids=lambda v: str(v) if isinstance(v, dict) else "")
def test_refusals(make_checkpoint: Make, change: dict[str, int], message: str) -> None:
    spec = dataclasses.replace(read_config(make_checkpoint(**SMALL, **VARIANTS[0])), **change)
    shard_widths(spec, Shard())
    for shard in SIDES:
        with pytest.raises(InputError, match=f"two devices cannot share {message}.*; run this model on one device"):
            shard_widths(spec, shard)


def test_refused_before_anything_is_allocated(make_checkpoint: Make, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_checkpoint(layers=4, vocab=64)  # experts of width 64
    load(path, device).free()
    monkeypatch.setattr(device, "alloc", lambda *_, **__: pytest.fail("allocated"))
    with pytest.raises(InputError, match=r"mlp\.experts\.\*\.down_proj\.weight: got 64 columns"):
        load(path, device, shard=SIDES[0])


def test_unused_widths_are_not_asked(make_checkpoint: Make) -> None:
    spec = dataclasses.replace(read_config(make_checkpoint(**SMALL, **VARIANTS[0])), dense_width=64, layer_is_sparse=(True,) * 4)
    assert len(shard_widths(spec, SIDES[1]).expert) == 64


@pytest.mark.parametrize(("index", "count"), [(0, 0), (0, 3), (2, 2), (-1, 2), (1, 1)])
def test_no_such_side(index: int, count: int) -> None:
    with pytest.raises(ValueError, match=rf"shard {index} of {count}, wanted 0 of 1, 0 of 2 or 1 of 2"):
        Shard(index, count)


# Shapes of a side


def test_shape_of_a_side(make_checkpoint: Make) -> None:
    spec = read_config(make_checkpoint(**SMALL, **VARIANTS[0]))
    assert shard_spec(spec, Shard()) == spec
    owner, peer = (shard_spec(spec, shard) for shard in SIDES)
    assert (owner.n_heads, owner.dense_width, owner.expert_width, owner.shared_width, owner.vocab_size) == (spec.n_heads // 2, 192, 128, 128, 33)
    assert (peer.n_heads, peer.dense_width, peer.expert_width, peer.shared_width, peer.vocab_size) == (spec.n_heads // 2, 128, 64, 64, 32)
    same = {f.name for f in dataclasses.fields(spec)} - {"n_heads", "dense_width", "expert_width", "vocab_size"}
    assert all(getattr(side, name) == getattr(spec, name) for side in (owner, peer) for name in same)
    with pytest.raises(InputError, match=r"shared_experts\.down_proj\.weight: got 192 of 384 columns on side 0, wanted 2 x 128"):
        shard_spec(dataclasses.replace(spec, n_shared_experts=2), SIDES[0])


def test_released_widths(release_config: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(release_config))
    spec = read_config(tmp_path)
    widths = shard_widths(spec, SIDES[1])
    assert widths.heads == range(32, 64) and widths.vocab == range(77440, 154880)
    assert (widths.dense, widths.expert, widths.shared) == (range(6144, 12288), range(1024, 2048), range(1024, 2048))


# Memory


def test_memory_is_planned_for_the_side(make_checkpoint: Make, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the whole does not fit, a side does; where a side does not, nothing is allocated."""
    path = make_checkpoint(layers=4, vocab=64, real_widths=True, overrides={"moe_intermediate_size": 1024, "intermediate_size": 1024})
    whole, owner = load(path, device), load(path, device, shard=SIDES[0])
    needs, side_needs = whole.nbytes, owner.nbytes
    whole.free()
    owner.free()
    monkeypatch.setattr(device, "free_bytes", lambda: needs)
    with pytest.raises(DeviceMemoryError, match=rf"\({needs} B \(.*\) of weights"):
        load(path, device)
    load(path, device, shard=SIDES[0]).free()
    monkeypatch.setattr(device, "free_bytes", lambda: side_needs)
    monkeypatch.setattr(device, "alloc", lambda *_, **__: pytest.fail("allocated"))
    with pytest.raises(DeviceMemoryError, match=rf"\({side_needs} B \(.*\) of weights"):
        load(path, device, shard=SIDES[0])


@pytest.mark.parametrize("target", ["alloc", "dequant", "quantise", "split_kv_b"])
@pytest.mark.parametrize("shard", SIDES, ids=lambda s: f"side{s.index}")
def test_any_failure_frees_everything(make_checkpoint: Make, device: Device, monkeypatch: pytest.MonkeyPatch, target: str, shard: Shard) -> None:
    """The first and a middle call of each kind fail."""
    owner: Any = device if target == "alloc" else module.ops
    real, path = getattr(owner, target), make_checkpoint(**SMALL, **VARIANTS[2])
    for fail_at in (0, 3):
        calls = 0

        def failing(*args: Any, fail_at: int = fail_at, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls > fail_at:
                raise HipError("hipInjected", 2, "out of luck")
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, target, failing)
        before = device.free_bytes()
        with pytest.raises(HipError, match="out of luck"):
            load(path, device, shard=shard, weights="q8q4")
        assert not device.live and device.free_bytes() == before


# Weights drawn on the device


@pytest.mark.parametrize("weights", ["q8q4", "bf16"])
@pytest.mark.parametrize("options", [VARIANTS[0], VARIANTS[1], {"overrides": {"moe_intermediate_size": 2048}}], ids=str)
def test_random_weights(make_checkpoint: Make, device: Device, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], weights: str) -> None:
    """Experts of width 2,048 are copied on the device, 1,000 of their 4,096 rows at a time; the scales of smaller ones by way of the host."""
    monkeypatch.setattr(drawing, "GRID_YZ_MAX", 1000)
    spec = dataclasses.replace(read_config(make_checkpoint(**SMALL, **options)), n_mtp_layers=0)
    whole, owner, peer = loaded = [random_weights(device, spec, DType.BF16, weights, 5, shard) for shard in (Shard(), *SIDES)]
    check_sides(whole, owner, peer, spec)
    assert [w.nbytes for w in loaded] == [random_weights_bytes(spec, DType.BF16, weights, shard) for shard in (Shard(), *SIDES)]
    assert device.allocated_bytes() == {"weights": sum(w.nbytes for w in loaded)}
    for w in loaded:
        w.free()


def test_random_weights_free_everything_on_failure(make_checkpoint: Make, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, calls, real = read_config(make_checkpoint(**SMALL, **VARIANTS[0])), 0, device.alloc
    before = device.free_bytes()

    def failing(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > 40:
            raise DeviceMemoryError("out of luck")
        return real(*args, **kwargs)

    monkeypatch.setattr(device, "alloc", failing)
    with pytest.raises(DeviceMemoryError, match="out of luck"):
        random_weights(device, spec, DType.BF16, shard=SIDES[1])
    assert not device.live and device.free_bytes() == before


def test_released_stage_halves(release_config: dict[str, Any], tmp_path: Path) -> None:
    """Ten layers of the released widths: each side has half of what is split, and the replicated rest is small."""
    (tmp_path / "config.json").write_text(json.dumps(release_config))
    spec = read_config(tmp_path)
    stage = dataclasses.replace(
        spec, n_layers=10, layer_is_full=(True, *spec.layer_is_full[31:40]), layer_is_sparse=spec.layer_is_sparse[30:40], n_mtp_layers=0
    )
    whole, owner, peer = (random_weights_bytes(stage, DType.BF16, shard=shard) for shard in (Shard(), *SIDES))
    kv_a = 10 * (512 + 64) * (6144 + 6144 // 64 * 2)  # q8g64, the owner's
    assert owner - peer == kv_a and 0.5 < owner / whole < 0.54
