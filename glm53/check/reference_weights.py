"""numpy references of the weight formats: codes and scales, exact, the values a reader makes of them, and the counter-based weights."""

from __future__ import annotations

import numpy as np

from glm53.hip.array import bf16_from_f32
from glm53.spec import WeightFormat

GROUP = 64
_F16_INFINITY = np.uint16(0x7C00)
_Q4_FACTORS = np.arange(35, 27, -1).astype(np.float32) / np.float32(-280)  # of the extreme: -1 / 8 and seven smaller ones
_ONE = np.float32(1)


def quantise(x: np.ndarray, format: WeightFormat) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(codes u8 [.., n, k or k / 2], scales u16 [.., n, k / 64], bad [.., n] bool) of float32 x [.., n, k]. A group that is not finite or whose scale
    exceeds f16 makes its row bad and is stored as zeros."""
    groups = np.ascontiguousarray(x, np.float32).reshape(-1, GROUP)
    with np.errstate(all="ignore"):
        good = np.asarray(np.isfinite(groups).all(axis=1))
        groups = np.where(good[:, None], groups, np.float32(0))
        scales = _q8_scales(groups) if format is WeightFormat.Q8G64 else _q4_scales(groups)
        good &= (scales & np.uint16(0x7FFF)) < _F16_INFINITY
        scales = np.where(good, scales, np.uint16(0))
        step = scales.view(np.float16).astype(np.float32)[:, None]
        low, high = (-127, 127) if format is WeightFormat.Q8G64 else (-8, 7)
        codes = np.where(step == 0, np.float32(0), np.clip(np.rint(groups / np.where(step == 0, _ONE, step)), low, high)).astype(np.int8)
    shape = x.shape
    if format is WeightFormat.Q4G64:
        biased = (codes + 8).astype(np.uint8)
        raw: np.ndarray = (biased[:, 0::2] | (biased[:, 1::2] << 4)).reshape(*shape[:-1], shape[-1] // 2)
    else:
        raw = codes.view(np.uint8).reshape(shape)
    by_row = (*shape[:-1], shape[-1] // GROUP)
    bad = np.asarray(~good.reshape(by_row).all(axis=-1))
    return raw, scales.reshape(by_row), bad


def _q8_scales(groups: np.ndarray) -> np.ndarray:
    amax = np.abs(groups).max(axis=1)
    scale = (amax / np.float32(127)).astype(np.float16)
    # One step up where a value would round past 127: f16 subnormals, a scale of 0 for a group that is not zero included.
    beyond = (amax > 0) & np.isfinite(scale) & (amax >= np.float32(127.5) * scale.astype(np.float32))
    return (scale.view(np.uint16) + beyond).astype(np.uint16)


def _q4_scales(groups: np.ndarray) -> np.ndarray:
    extreme = np.take_along_axis(groups, np.abs(groups).argmax(axis=1)[:, None], axis=1)
    tries = (extreme * _Q4_FACTORS).astype(np.float16)
    errors = np.stack([_squared_error(groups, tries[:, i].astype(np.float32)) for i in range(len(_Q4_FACTORS))], axis=1)
    best = np.take_along_axis(tries.view(np.uint16), errors.argmin(axis=1)[:, None], axis=1)[:, 0]
    best = np.where(np.isfinite(tries[:, 0]), best, _F16_INFINITY)
    return np.where(best & np.uint16(0x7FFF), best, np.uint16(0)).astype(np.uint16)


def _squared_error(groups: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Sums in the order of the columns, each step a fused multiply-add: exact in float64, then rounded to float32."""
    codes = np.clip(np.rint(groups / np.where(scale == 0, _ONE, scale)[:, None]), -8, 7)
    off = (codes.astype(np.float64) * scale[:, None] - groups).astype(np.float32).astype(np.float64)
    total = np.zeros(len(groups), np.float32)
    for column in range(GROUP):
        total = (off[:, column] * off[:, column] + total).astype(np.float32)
    return np.where(scale == 0, np.inf, total)


def values(codes: np.ndarray, scales: np.ndarray, format: WeightFormat) -> np.ndarray:
    """The float32 values [.., n, k] of codes u8 and scales u16; exact."""
    if format is WeightFormat.Q8G64:
        numbers = codes.view(np.int8).astype(np.float32)
    else:
        numbers = np.stack([codes & 15, codes >> 4], axis=-1).reshape(*codes.shape[:-1], -1).astype(np.float32) - np.float32(8)
    return numbers * np.repeat(scales.view(np.float16).astype(np.float32), GROUP, axis=-1)


def _hash(seed: int, counter: np.ndarray) -> np.ndarray:
    """SplitMix64 of a counter; all mod 2^64."""
    with np.errstate(over="ignore"):
        z = np.uint64(seed) + (counter.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def random_plain(count: int, seed: int, step: float, mean: float, format: WeightFormat) -> np.ndarray:
    """Raw elements [count]: float32, or uint16 bits of bf16."""
    per_word = 4 if format is WeightFormat.F32 else 8
    stream = _hash(seed, np.arange(-(-count // per_word) * 2))
    numbers = stream.view(np.int32) >> 8 if format is WeightFormat.F32 else stream.view(np.int16)
    exact = numbers[:count].astype(np.float64) * np.float64(np.float32(step)) + np.float64(np.float32(mean))
    return exact.astype(np.float32) if format is WeightFormat.F32 else bf16_from_f32(exact.astype(np.float32))


def random_quantised(count: int, seed: int, scale: int, format: WeightFormat) -> tuple[np.ndarray, np.ndarray]:
    """(codes u8, scales u16) of `count` weights, flat."""
    raw = _hash(seed, np.arange(count * format.bits // 64)).view(np.uint8)
    signs = np.zeros(count // GROUP, np.uint64)
    if format is WeightFormat.Q8G64:
        raw = np.where(raw == 0x80, np.uint8(0x81), raw)
    else:
        signs = _hash(~seed & (1 << 64) - 1, np.arange(count // GROUP)) >> np.uint64(63)
    return raw, (np.uint64(scale) | signs << np.uint64(15)).astype(np.uint16)
