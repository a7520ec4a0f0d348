"""numpy references of the products of a decode step: weights in each format, and sums in the order that decision 0004 fixes ("Bits")."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from glm53.check.case import draw
from glm53.hip.array import bf16_from_f32
from glm53.spec import DType, WeightFormat

GROUP = 64  # columns that share a scale
LONG_K = 1024  # from here on 32 lanes share a dot product, below 4
CHUNK = {WeightFormat.F32: 4, WeightFormat.BF16: 8, WeightFormat.Q8G64: 16, WeightFormat.Q4G64: 32}


@dataclass(frozen=True)
class Weights:
    """A matrix [.., n, k]. codes: float32 values, or the signed codes; scales [.., n, k / 64] float32, exact in f16, quantised formats only."""

    codes: np.ndarray
    scales: np.ndarray | None
    format: WeightFormat

    @property
    def values(self) -> np.ndarray:
        """float64, exact."""
        wide = self.codes.astype(np.float64)
        return wide if self.scales is None else wide * np.repeat(self.scales.astype(np.float64), GROUP, axis=-1)

    @property
    def stored(self) -> tuple[np.ndarray, np.ndarray | None]:
        """Codes and scales as the bits in memory: f32, bf16 as u16, q8g64 as u8, q4g64 two codes a byte; f16 as u16."""
        if self.scales is None:
            return (self.codes if self.format is WeightFormat.F32 else bf16_from_f32(self.codes)), None
        scales = self.scales.astype(np.float16).view(np.uint16)
        if self.format is WeightFormat.Q8G64:
            return self.codes.astype(np.int8).view(np.uint8), scales
        nibbles = (self.codes.astype(np.int32) + 8).astype(np.uint8)
        return nibbles[..., 0::2] | nibbles[..., 1::2] << np.uint8(4), scales


def draw_weights(seed: int, shape: tuple[int, ...], weight_format: WeightFormat) -> Weights:
    """Weights of about unit size. Every code occurs, the extremes too; scales of both signs, a zero and a subnormal f16 among them."""
    if not weight_format.quantised:
        return Weights(draw(seed, shape, DType.F32 if weight_format is WeightFormat.F32 else DType.BF16), None, weight_format)
    rng = np.random.default_rng(seed)
    top = 1 << (weight_format.bits - 1)
    codes = rng.integers(-top, top, shape).astype(np.float32)
    scales = (rng.standard_normal((*shape[:-1], shape[-1] // GROUP)) / top).astype(np.float16).astype(np.float32)
    scales.flat[0] = np.float32(2.0**-20)
    if scales.size > 3:
        scales.flat[3] = 0
    return Weights(codes, scales, weight_format)


def _fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """float32 a * b + c, rounded once: the product is exact in float64; that the sum is rounded twice shows in 1 of 2^29."""
    return (a.astype(np.float64) * b.astype(np.float64) + c.astype(np.float64)).astype(np.float32)


def sums(x: np.ndarray, weights: Weights) -> np.ndarray:
    """x [.., rows, k] float32 times weights [.., n, k]: [.., rows, n] float32, bit for bit in the order of the kernels."""
    k, chunk = x.shape[-1], CHUNK[weights.format]
    lanes = 32 if k >= LONG_K else 4
    rounds = -(-k // (lanes * chunk))
    padding = [(0, 0)] * (x.ndim - 1) + [(0, rounds * lanes * chunk - k)]
    wide_x = np.pad(x, padding).reshape(*x.shape[:-1], 1, rounds, lanes, chunk)
    wide_w = np.pad(weights.codes, padding).reshape(*weights.codes.shape[:-2], 1, -1, rounds, lanes, chunk)
    lane = np.zeros((*np.broadcast_shapes(wide_x.shape[:-3], wide_w.shape[:-3]), lanes), np.float32)
    for step in range(rounds):
        part = lane if weights.scales is None else np.zeros_like(lane)
        for j in range(chunk):
            part = _fma(wide_x[..., step, :, j], wide_w[..., step, :, j], part)
        if weights.scales is not None:
            group = np.minimum((step * lanes + np.arange(lanes)) * chunk // GROUP, k // GROUP - 1)  # past k: the sum of a chunk of zeros
            part = _fma(part, weights.scales[..., None, :, :][..., group], lane)
        lane = part
    while lane.shape[-1] > 1:
        half = lane.shape[-1] // 2
        lane = lane[..., :half] + lane[..., half:]
    return lane[..., 0]


WAVES, CHAINS = 8, 8  # of the wave product, gemv_tiles.h


def tile_sums(x: np.ndarray, weights: Weights) -> np.ndarray:
    """The same in the order of the wave product without matrix tiles: 8 chains a group of 64, and from LONG_K on 8 waves that take groups in turn."""
    k = x.shape[-1]
    waves, groups = (WAVES if k >= LONG_K else 1), -(-k // GROUP)
    turns = -(-groups // waves)
    padding = [(0, 0)] * (x.ndim - 1) + [(0, turns * waves * GROUP - k)]
    shape = (turns, waves, GROUP // CHAINS, CHAINS)
    wide_x = np.pad(x, padding).reshape(*x.shape[:-1], 1, *shape)
    wide_w = np.pad(weights.codes, padding).reshape(*weights.codes.shape[:-2], 1, -1, *shape)
    chains = np.zeros((*np.broadcast_shapes(wide_x.shape[:-4], wide_w.shape[:-4]), waves, CHAINS), np.float32)
    for turn in range(turns):
        part = chains if weights.scales is None else np.zeros_like(chains)
        for j in range(GROUP // CHAINS):
            part = _fma(wide_x[..., turn, :, j, :], wide_w[..., turn, :, j, :], part)
        if weights.scales is not None:
            group = np.minimum(turn * waves + np.arange(waves), groups - 1)  # past k: sums of zeros
            part = _fma(part, weights.scales[..., None, :, :][..., group, None], chains)
        chains = part
    while chains.shape[-1] > 1:
        half = chains.shape[-1] // 2
        chains = chains[..., :half] + chains[..., half:]
    total = chains[..., 0, 0]
    for wave in range(1, waves):
        total = total + chains[..., wave, 0]
    return total
