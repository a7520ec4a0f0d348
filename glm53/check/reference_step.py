"""numpy references of the products of a decode step: weights in each format, and sums in the order that decision 0004 fixes ("Bits")."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from glm53.check.case import draw, round_to
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


def sums(x: np.ndarray, weights: Weights, wide: bool | None = None) -> np.ndarray:
    """x [.., rows, k] float32 times weights [.., n, k]: [.., rows, n] float32, bit for bit in the kernels' order. wide: 32 lanes; by k if None."""
    k, chunk = x.shape[-1], CHUNK[weights.format]
    lanes = 32 if (k >= LONG_K if wide is None else wide) else 4
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


WAVES, CHAINS, RUN = 8, 8, 4  # of the wave product, wave_product.h
QUANTISED_ERROR = 2.0**-15 * 1.01  # of an element of x beside scaled formats, relative to the largest |x| of its group
_Products = Sequence[tuple[np.ndarray, Weights]]


def _whole_groups(values: np.ndarray, count: int = 1) -> np.ndarray:
    """[.., k] with zeros up to a multiple of count * 64."""
    return np.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, -values.shape[-1] % (count * GROUP))])


def quantised(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(q [.., groups, 64] int64, scale [.., groups] float32) of x [.., k] float32: x ~ q * scale, as put_x of wave_product.h makes them."""
    groups = _whole_groups(x).reshape(*x.shape[:-1], -1, GROUP)
    top = np.abs(groups).max(axis=-1).view(np.uint32).astype(np.int64)
    exponent = np.maximum((top + 0x20000) >> 23, 27) - 127
    q = np.rint(np.ldexp(groups.astype(np.float64), 14 - exponent[..., None])).astype(np.int64)
    return q, np.ldexp(np.float32(1), exponent - 14).astype(np.float32)


def quantisation_error(x: np.ndarray, weights: Weights) -> np.ndarray:
    """[.., rows, n]: at most what the rounding of x beside scaled formats makes of sum x w."""
    if weights.scales is None:
        return np.zeros((*x.shape[:-1], weights.codes.shape[-2]))
    top = np.abs(_whole_groups(x).reshape(*x.shape[:-1], -1, GROUP)).max(axis=-1).astype(np.float64)
    size = np.abs(weights.values).reshape(*weights.codes.shape[:-1], -1, GROUP).sum(axis=-1)
    return QUANTISED_ERROR * (top @ size.swapaxes(-1, -2))


def _wave_sum(products: _Products, groups: list[tuple[int, int]]) -> np.ndarray:
    """What one wave adds: `groups` are (product, group)."""
    if products[0][1].scales is None:
        padded = [(_whole_groups(x)[..., :, None, :], _whole_groups(w.codes)[..., None, :, :]) for x, w in products]
        chains = np.zeros((*np.broadcast_shapes(padded[0][0].shape[:-1], padded[0][1].shape[:-1]), CHAINS), np.float32)
        for product, group in groups:
            for at in range(group * GROUP, (group + 1) * GROUP, CHAINS):
                x, w = (values[..., at : at + CHAINS] for values in padded[product])
                chains = _fma(x, w, chains)
        while chains.shape[-1] > 1:
            half = chains.shape[-1] // 2
            chains = chains[..., :half] + chains[..., half:]
        return np.asarray(chains[..., 0])
    total = np.zeros((*products[0][0].shape[:-1], products[0][1].codes.shape[-2]), np.float32)
    integers = [quantised(x) for x, _ in products]
    for product, group in groups:
        (q, x_scale), weights = integers[product], products[product][1]
        assert weights.scales is not None
        codes = weights.codes[..., group * GROUP : (group + 1) * GROUP].astype(np.int64)
        whole = (q[..., group, :] @ codes.swapaxes(-1, -2)).astype(np.float32)
        total = _fma(whole, weights.scales[..., None, :, group] * x_scale[..., :, None, group], total)
    return total


def tile_sums_of(products: _Products, wide: bool) -> np.ndarray:
    """Sum of x [.., rows, k] times weights [.., n, k] over several products of one k and format: [.., rows, n] float32, in the order of the wave
    product without matrix tiles; that of scaled formats is the order of all targets. wide: 8 waves take runs of 4 groups in turn, product after
    product, and are added in order.
    """
    groups = -(-products[0][0].shape[-1] // GROUP)
    runs = [[(i, g) for g in range(first, min(first + RUN, groups))] for i in range(len(products)) for first in range(0, groups, RUN)]
    waves = WAVES if wide else 1
    total = _wave_sum(products, [g for run in runs[::waves] for g in run])
    for wave in range(1, waves):
        total = total + _wave_sum(products, [g for run in runs[wave::waves] for g in run])
    return total


def tile_sums(x: np.ndarray, weights: Weights) -> np.ndarray:
    """One product by itself."""
    return tile_sums_of([(x, weights)], x.shape[-1] >= LONG_K)


def halves_of(x: np.ndarray, weights: Weights) -> list[tuple[np.ndarray, Weights]]:
    """The two halves of a product that have sums of their own: the first ceil(k / 128) groups, and the others."""
    first = -(-x.shape[-1] // (2 * GROUP)) * GROUP
    halves = []
    for part, groups in ((slice(0, first), slice(0, first // GROUP)), (slice(first, None), slice(first // GROUP, None))):
        scales = None if weights.scales is None else weights.scales[..., groups]
        halves.append((x[..., part], Weights(weights.codes[..., part], scales, weights.format)))
    return halves


def half_sums(x: np.ndarray, weights: Weights, dtype: DType) -> np.ndarray:
    """The product of dtype x as the sum of those of its halves; wide if the first half is."""
    low, high = halves_of(x, weights)
    wide = low[0].shape[-1] >= LONG_K

    def product(half: tuple[np.ndarray, Weights]) -> np.ndarray | np.float32:
        if not half[0].shape[-1]:
            return np.float32(0)
        return sums(*half, wide) if dtype is DType.F32 else tile_sums_of([half], wide)

    return np.asarray(product(low) + product(high))


def _scale(squares: np.ndarray, k: int, eps: float) -> np.ndarray:
    return np.float32(1) / np.sqrt(squares / np.float32(k) + np.float32(eps))


def rms_norm(x: np.ndarray, norm: np.ndarray, eps: float) -> np.ndarray:
    """float64, no rounding."""
    wide = x.astype(np.float64)
    return np.asarray(wide / np.sqrt((wide**2).mean(axis=-1, keepdims=True) + eps) * norm.astype(np.float64))


def _butterfly(lanes: np.ndarray) -> np.ndarray:
    while lanes.shape[-1] > 1:
        half = lanes.shape[-1] // 2
        lanes = lanes[..., :half] + lanes[..., half:]
    return np.asarray(lanes[..., 0])


def tile_normed_sums(x: np.ndarray, norm: np.ndarray, eps: float, weights: Weights) -> np.ndarray:
    """rms_norm(x) [rows, k] times weights [n, k], as the wave product does it: x * norm is multiplied, the sums are scaled."""
    k = x.shape[-1]
    wide = k >= LONG_K
    waves = WAVES if wide else 1
    lanes = _whole_groups(x, RUN).reshape(len(x), -1, 32, 8)
    squares = np.zeros(len(x), np.float32)
    for wave in range(waves):
        sums = np.zeros((len(x), 32), np.float32)
        for run in range(wave, lanes.shape[1], waves):
            for i in range(8):
                sums = _fma(lanes[:, run, :, i], lanes[:, run, :, i], sums)
        squares = squares + _butterfly(sums)
    scaled = x * norm
    if weights.scales is None:
        scaled = round_to(scaled, DType.BF16)
    return tile_sums_of([(scaled, weights)], wide) * _scale(squares, k, eps)[:, None]


def _item_sums(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """sum x w over the last axis, by 256 work-items: chunk c of 4 values is item c % 256's; a butterfly over 32 items, then eights in order."""
    shape = np.broadcast_shapes(x.shape, w.shape)
    padding = -shape[-1] % 1024
    x, w = (np.pad(np.broadcast_to(v, shape), [(0, 0)] * (len(shape) - 1) + [(0, padding)]).reshape(*shape[:-1], -1, 256, 4) for v in (x, w))
    items = np.zeros((*shape[:-1], 256), np.float32)
    for turn in range(x.shape[-3]):
        for j in range(4):
            items = _fma(x[..., turn, :, j], w[..., turn, :, j], items)
    waves = _butterfly(items.reshape(*shape[:-1], 8, 32))
    total = np.zeros(shape[:-1], np.float32)
    for wave in range(8):
        total = total + waves[..., wave]
    return total


def router_sums(x: np.ndarray, norm: np.ndarray, eps: float, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(logits [rows, n] float32, h [rows, k] bf16) of bf16 x [rows, k], norm [k] and f32 weights [n, k], in the order of step.hip's router."""
    scale = _scale(_item_sums(x, x), x.shape[-1], eps)[:, None]
    logits = _item_sums((x * norm)[:, None, :], weights[None]) * scale
    return logits, round_to(norm * round_to(x * scale, DType.BF16), DType.BF16)
