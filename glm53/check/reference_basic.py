"""numpy references of the first kernel families, in the order of hipsrc/kernels: written from the formulas, not from the kernels.

Arrays are float32 with values already rounded to the element type; `dtype` is where the model rounds. Sums are float64 inside.
"""

from __future__ import annotations

import numpy as np

from glm53.check.case import round_to
from glm53.hip.array import f32_from_e4m3
from glm53.spec import DType


def embed(tokens: np.ndarray, table: np.ndarray) -> np.ndarray:
    """[rows, hidden]; a token outside the table gives NaN."""
    valid = (tokens >= 0) & (tokens < len(table))
    return np.where(valid[:, None], table[np.where(valid, tokens, 0)], np.float32(np.nan))


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float, dtype: DType) -> np.ndarray:
    """T(w * T(x / sqrt(mean(x^2) + eps)))"""
    mean = np.mean(x.astype(np.float64) ** 2, axis=-1, keepdims=True)
    normed = round_to((x / np.sqrt(mean + np.float64(np.float32(eps)))).astype(np.float32), dtype)
    return round_to(weight * normed, dtype)


def layer_norm(x: np.ndarray, weight: np.ndarray, bias: np.ndarray, eps: float, dtype: DType) -> np.ndarray:
    """T((x - mean) / sqrt(var + eps) * w + b)"""
    wide = x.astype(np.float64)
    centred = wide - wide.mean(axis=-1, keepdims=True)
    normed = centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + np.float64(np.float32(eps)))
    return round_to((normed * weight + bias).astype(np.float32), dtype)


def rope(x: np.ndarray, positions: np.ndarray, inv_freq: np.ndarray, offset: int, dtype: DType) -> np.ndarray:
    """x [rows, heads, columns] with columns [offset, offset + 2 len(inv_freq)) rotated in pairs; the angle is a float32 product."""
    angle = (positions.astype(np.float32)[:, None] * inv_freq[None, :]).astype(np.float64)
    cos = round_to(np.cos(angle).astype(np.float32), dtype)[:, None, :]
    sin = round_to(np.sin(angle).astype(np.float32), dtype)[:, None, :]
    out = x.copy()
    stop = offset + 2 * len(inv_freq)
    even, odd = x[..., offset:stop:2].astype(np.float64), x[..., offset + 1 : stop : 2].astype(np.float64)
    out[..., offset:stop:2] = even * cos - odd * sin
    out[..., offset + 1 : stop : 2] = odd * cos + even * sin
    return round_to(out, dtype)


def silu_mul(x: np.ndarray, dtype: DType) -> np.ndarray:
    """T(T(silu(gate)) * up) of [rows, 2 * width]"""
    gate, up = np.split(x, 2, axis=-1)
    with np.errstate(over="ignore"):
        activated = round_to((gate / (1 + np.exp(-gate.astype(np.float64)))).astype(np.float32), dtype)
    return round_to(activated * up, dtype)


def matmul(x: np.ndarray, w: np.ndarray, residual: np.ndarray | None, dtype: DType) -> tuple[np.ndarray, np.ndarray]:
    """(Y(Y(x w^T) + residual), sum |x||w| of each output: the scale of its rounding errors). Leading axes are batched as numpy does."""
    with np.errstate(over="ignore", invalid="ignore"):
        wide = np.swapaxes(w, -1, -2).astype(np.float64)
        y = round_to((x.astype(np.float64) @ wide).astype(np.float32), dtype)
        scale = np.abs(x).astype(np.float64) @ np.abs(wide)
        if residual is not None:
            y = round_to(y + residual, dtype)
            scale = scale + np.abs(residual)
    return y, scale


def dequant(x: np.ndarray, scale: np.ndarray | None, dtype: DType) -> np.ndarray:
    """x: uint8 e4m3 codes or float32; scale [ceil(rows / 128), ceil(cols / 128)]"""
    values = f32_from_e4m3(x) if x.dtype == np.uint8 else x
    if scale is not None:
        spread = np.repeat(np.repeat(scale, 128, axis=0), 128, axis=1)
        values = values * spread[: x.shape[0], : x.shape[1]]
    return round_to(values, dtype)


def split_kv_b(kv_b: np.ndarray, heads: int, nope: int) -> tuple[np.ndarray, np.ndarray]:
    """(wk [heads, latent, nope], wv [heads, v, latent]) of kv_b [heads * (nope + v), latent]"""
    by_head = kv_b.reshape(heads, -1, kv_b.shape[-1])
    return np.ascontiguousarray(by_head[:, :nope].transpose(0, 2, 1)), np.ascontiguousarray(by_head[:, nope:])
