"""A stage for benchmarks: embedding, some consecutive layers of a real-width GLM-5.3, final norm and head, with random weights made on the device
and a history of any length filled without prefill. Selections are natural, or drawn so that a given number of rows misses the hot cache in every
step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from glm53.config import EngineConfig
from glm53.engine import Engine
from glm53.hip import Array, Device
from glm53.model.pair import SIDES
from glm53.model.random_weights import random_weights
from glm53.model.side import Side
from glm53.model.weights import Weights
from glm53.ops.weights import random_array
from glm53.spec import WHOLE, DType, ModelSpec, RowFormat

FULL_LAYERS = (0, 1, 2, *range(6, 78, 4))  # of the released models
BLOCKS = 61  # different random blocks of rows and keys that fill a history; a prime, so that extents and layers do not line up


def real_spec(layers: range) -> ModelSpec:
    """The stage of these layers of GLM-5.3; its first layer is made full, since a selection must come from somewhere."""
    full = tuple(layer in FULL_LAYERS or layer == layers.start for layer in layers)
    return ModelSpec(
        vocab_size=154_880,
        hidden_size=6144,
        n_layers=len(layers),
        n_heads=64,
        q_lora_rank=2048,
        kv_lora_rank=512,
        qk_nope_head_dim=192,
        qk_rope_head_dim=64,
        v_head_dim=256,
        dense_width=12_288,
        expert_width=2048,
        n_routed_experts=256,
        n_experts_per_tok=8,
        n_shared_experts=1,
        n_group=1,
        topk_group=1,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
        index_n_heads=32,
        index_head_dim=128,
        index_topk=2048,
        rope_theta=8e6,
        rms_norm_eps=1e-5,
        latent_norm_eps=1e-6,
        max_position_embeddings=1 << 20,
        layer_is_full=full,
        layer_is_sparse=tuple(layer >= 3 for layer in layers),
        n_mtp_layers=0,
        eos_token_ids=(154_820,),
        tie_word_embeddings=False,
    )


def tiny_spec(layers: int = 3) -> ModelSpec:
    """The same shape at a size for tests."""
    return dataclasses.replace(
        real_spec(range(30, 30 + layers)),
        vocab_size=512,
        hidden_size=128,
        n_heads=4,
        q_lora_rank=64,
        kv_lora_rank=64,
        qk_nope_head_dim=64,
        qk_rope_head_dim=16,
        v_head_dim=32,
        dense_width=128,
        expert_width=128,
        n_routed_experts=16,
        n_experts_per_tok=2,
        index_n_heads=32,
        index_head_dim=32,
        index_topk=64,
        max_position_embeddings=1 << 16,
        eos_token_ids=(1,),
    )


def row_blocks(spec: ModelSpec, row_format: RowFormat, rows: int, seed: int) -> np.ndarray:
    """[BLOCKS, rows, row_bytes] u8: rows whose values are about normal."""
    random = np.random.default_rng(seed)
    latent, rope = spec.kv_lora_rank, spec.qk_rope_head_dim
    values = random.standard_normal((BLOCKS, rows, latent + rope), np.float32)
    if row_format is RowFormat.F32:
        return values.view(np.uint8)
    bits = (values.view(np.uint32) >> 16).astype(np.uint16)
    if row_format is RowFormat.BF16:
        return bits.view(np.uint8)
    codes = np.clip(np.rint(values[..., :latent] * 40), -127, 127).astype(np.int8).view(np.uint8)
    scales = np.full((BLOCKS, rows, latent // 64), 1 / 40, np.float16).view(np.uint8)
    return np.concatenate([codes, scales, np.ascontiguousarray(bits[..., latent:]).view(np.uint8)], axis=-1)


@dataclass(frozen=True)
class Draws:
    """Selections of successive steps. A window of top-k places slides over a permutation of the rows, `misses` places a step: every row that
    enters was last selected so long ago that a circular cache of fewer slots than rows has given its slot away."""

    selections: np.ndarray  # [draws, k] i32, ascending

    @classmethod
    def make(cls, rows: int, k: int, misses: int, seed: int, draws_max: int = 4096) -> Draws:
        """misses: rows that enter in each step, 0 to k."""
        if misses == 0:
            return cls(np.sort(np.random.default_rng(seed).permutation(rows)[:k])[None, :].astype(np.int32))
        steps = min(rows // misses, draws_max)
        places = (
            np.random.default_rng(seed).permutation(rows)[: steps * misses] if steps * misses >= k else np.random.default_rng(seed).permutation(rows)
        )
        index = (np.arange(steps)[:, None] * misses + np.arange(k)[None, :]) % len(places)
        return cls(np.sort(places[index], axis=1).astype(np.int32))


class Stage:
    """Engines of one spec and one set of weights, on one device or on the two of a pair, each with its own tier and history."""

    def __init__(self, devices: Sequence[Device], spec: ModelSpec, dtype: DType, weights: str, seed: int = 1):
        self.devices, self.spec, self.dtype = tuple(devices), spec, dtype
        shards = (WHOLE,) if len(self.devices) == 1 else SIDES
        self.weights: list[Weights] = [
            random_weights(device, spec, dtype, weights, seed=seed, shard=shard) for device, shard in zip(self.devices, shards, strict=True)
        ]

    def engine(self, draws: Draws | None = None, **settings: object) -> Engine:
        """An engine on the stage's weights; `settings` as EngineConfig."""
        devices = self._fresh_devices()
        drawn = None if draws is None else [Array.from_numpy(device, draws.selections, category="draws") for device in devices]
        return Engine(self._config(settings), self.spec, devices, self.weights, None, drawn=drawn)

    def without_layers(self, **settings: object) -> Engine:
        """An engine of embedding, final norm and head alone, whose time is not that of the layers."""
        spec = dataclasses.replace(self.spec, n_layers=1, layer_is_full=(True,), layer_is_sparse=(True,))
        weights = [dataclasses.replace(side, layers=()) for side in self.weights]
        return Engine(self._config(settings), spec, self._fresh_devices(), weights, None)

    def _config(self, settings: dict[str, object]) -> EngineConfig:
        return EngineConfig.of(dtype=self.dtype.label, devices=tuple(device.index for device in self.devices), **settings)

    def _fresh_devices(self) -> list[Device]:
        """An engine closes its devices, with everything that was allocated through them."""
        return [Device(device.index) for device in self.devices]

    def fill(self, engine: Engine, slot: int, rows: int, seed: int) -> None:
        """A history of `rows` rows for an open session: random rows and index keys, the same for the same seed in every tier and on every side."""
        extent_rows = engine.config.extent_rows
        blocks = row_blocks(self.spec, engine.tier.layout.row_format, extent_rows, seed)
        planes = np.arange(engine.tier.layout.planes)
        for side in engine.stage.sides:
            for first in range(0, rows, extent_rows):
                extent = blocks[(first // extent_rows * 7 + planes * 13 + seed) % BLOCKS, : min(extent_rows, rows - first)]
                side.tier.adopt(slot, np.ascontiguousarray(extent), rows)
            self._fill_keys(side, slot, rows, seed)

    def _fill_keys(self, side: Side, slot: int, rows: int, seed: int) -> None:
        keys, stream = side.keys, side.stream
        keys.reserve(slot, rows)
        block = keys.shape.extent_bytes
        source = random_array(stream, self.dtype, (BLOCKS, block // self.dtype.item_bytes), seed=seed, std=1.0)
        for index, address in enumerate(keys.addresses(slot)):
            extent = index * side.shard.count + side.shard.index
            stream.copy(address, source.address + (extent * 7 + seed) % BLOCKS * block, block)
        stream.synchronize()
        source.free()
        keys.advance(slot, rows)
