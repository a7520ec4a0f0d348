"""numpy references of the history rows: the bytes of each format, exact, and what a reader makes of them."""

from __future__ import annotations

import numpy as np

from glm53.hip.array import bf16_from_f32, f32_from_bf16
from glm53.spec import RowFormat

GROUP = 64  # latent values of one q8g64 scale
_F16_INFINITY = np.uint16(0x7C00)


def row_bits(rows: np.ndarray, latent: int, row_format: RowFormat) -> tuple[np.ndarray, np.ndarray]:
    """Bytes [n, row_bytes] u8 of rows [n, latent + rope] float32, and which rows cannot be stored [n] bool (their bytes are not defined)."""
    if row_format is RowFormat.Q8G64:
        return _quantised(rows, latent)
    raw = np.ascontiguousarray(rows, np.float32) if row_format is RowFormat.F32 else bf16_from_f32(rows)
    return raw.view(np.uint8).reshape(len(rows), -1), np.zeros(len(rows), bool)


def _quantised(rows: np.ndarray, latent: int) -> tuple[np.ndarray, np.ndarray]:
    n = len(rows)
    groups = np.asarray(rows[:, :latent], np.float32).reshape(n, latent // GROUP, GROUP)
    rope = bf16_from_f32(rows[:, latent:])
    with np.errstate(all="ignore"):
        amax = np.abs(groups).max(axis=2)
        scale = (amax / np.float32(127)).astype(np.float16)
        # One step up where a value would round past 127: f16 subnormals, a scale of 0 for a group that is not zero included.
        beyond = (amax > 0) & np.isfinite(scale) & (amax.astype(np.float64) >= 127.5 * scale.astype(np.float64))
        scale = (scale.view(np.uint16) + beyond).astype(np.uint16)
        bad = ~(np.isfinite(amax) & (scale < _F16_INFINITY)).all(axis=1) | ~np.isfinite(f32_from_bf16(rope)).all(axis=1)
        step = scale.view(np.float16).astype(np.float32)[:, :, None]
        quotient = np.where(step > 0, groups / np.where(step > 0, step, np.float32(1)), np.float32(0))
        values = np.clip(np.rint(np.nan_to_num(quotient)), -127, 127).astype(np.int8)
    parts = [values.reshape(n, latent).view(np.uint8), scale.view(np.uint8).reshape(n, -1), rope.view(np.uint8).reshape(n, -1)]
    return np.concatenate(parts, axis=1), bad


def row_values(raw: np.ndarray, latent: int, row_format: RowFormat) -> np.ndarray:
    """The float32 values [n, latent + rope] that a reader sees in rows [n, row_bytes] u8; exact."""
    raw = np.ascontiguousarray(raw)
    if row_format is RowFormat.F32:
        return raw.view(np.float32)
    if row_format is RowFormat.BF16:
        return f32_from_bf16(raw.view(np.uint16))
    scales = np.ascontiguousarray(raw[:, latent : latent + latent // GROUP * 2]).view(np.float16).astype(np.float32)
    values = raw[:, :latent].view(np.int8).astype(np.float32) * np.repeat(scales, GROUP, axis=1)
    rope = f32_from_bf16(np.ascontiguousarray(raw[:, latent + latent // GROUP * 2 :]).view(np.uint16))
    return np.concatenate([values, rope], axis=1)


def oracle_bytes(session: int, layer: int, rows: np.ndarray, rewrites: np.ndarray, row_bytes: int) -> np.ndarray:
    """[n, row_bytes] u8 whose every byte depends on session, layer, row, its place in the row and how often the row was rewritten.

    A wrong source is seen with probability 255/256 a byte, so over a row for certain.
    """
    place = np.arange(row_bytes, dtype=np.uint64)
    key = (np.uint64(session) << np.uint64(56)) ^ (np.uint64(layer) << np.uint64(48))
    mixed = (key ^ (rewrites.astype(np.uint64) << np.uint64(40)) ^ (rows.astype(np.uint64) << np.uint64(12)))[:, None] ^ place
    for multiplier in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB):
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(multiplier)
    return (mixed >> np.uint64(56)).astype(np.uint8)
