"""numpy references of a step's attention, float64: the partial result of each split, and the join with wv."""

from __future__ import annotations

import numpy as np

from glm53.check.case import round_to
from glm53.check.reference_selection import attend
from glm53.spec import DType, WeightFormat

SPLIT = 64


def weight_values(codes: np.ndarray, scales: np.ndarray | None, weight_format: WeightFormat) -> np.ndarray:
    """The float32 values [.., n, k] of a matrix: codes as in `Matrix` (f32 values for F32 and BF16), scales [.., n, k / 64] f16; exact."""
    if scales is None:
        return codes
    if weight_format is WeightFormat.Q4G64:
        nibbles = np.stack([codes & 15, codes >> 4], axis=-1).reshape(*codes.shape[:-1], -1)
        values = nibbles.astype(np.float32) - np.float32(8)
    else:
        values = codes.view(np.int8).astype(np.float32)
    return values * np.repeat(scales.astype(np.float32), 64, axis=-1)


def split_attend(
    q_latent: np.ndarray, q_rope: np.ndarray, history: list[np.ndarray], scale: float, splits: int, dtype: DType
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(mean [rows, heads, splits, latent], its error scale, tops [rows, heads, splits], their error scale, masses): mean is partial / mass. All are
    NaN where a split has no planned row. Scale of mean: as `attend` for f32; for bf16 the sum of |p||latent|, to which the roundings of p are
    proportional. Arguments as `reference_selection.attend`."""
    rows, heads, latent = q_latent.shape
    mean, size = np.full((rows, heads, splits, latent), np.nan, np.float32), np.ones((rows, heads, splits, latent))
    tops, top_size = np.full((rows, heads, splits), np.nan, np.float32), np.ones((rows, heads, splits))
    masses = np.full((rows, heads, splits), np.nan, np.float32)
    for r, planned in enumerate(history):
        q = np.concatenate([q_latent[r], q_rope[r]], axis=1).astype(np.float64)
        for s in range(-(-len(planned) // SPLIT)):
            part = planned[s * SPLIT : (s + 1) * SPLIT].astype(np.float64)
            scores = q @ part.T * scale
            tops[r, :, s] = scores.max(axis=1)
            masses[r, :, s] = np.exp(scores - scores.max(axis=1, keepdims=True)).sum(axis=1)
            top_size[r, :, s] = (np.abs(q) @ np.abs(part).T * scale).max(axis=1)
            out, error = attend(q_latent[r : r + 1], q_rope[r : r + 1], [part], scale)
            mean[r, :, s], size[r, :, s] = out[0], error[0]
            if dtype is DType.BF16:
                weights = np.exp(scores - scores.max(axis=1, keepdims=True))
                size[r, :, s] = weights @ np.abs(part[:, :latent]) / weights.sum(axis=1, keepdims=True)
    return mean, size, tops, top_size, masses


def expand(
    partial: np.ndarray, tops: np.ndarray, masses: np.ndarray, counts: np.ndarray, wv: np.ndarray, dtype: DType
) -> tuple[np.ndarray, np.ndarray]:
    """(o [rows, heads, v] f32 before its rounding, its error scale). o_latent is rounded to dtype. wv [heads, v, latent]."""
    rows, heads = partial.shape[:2]
    o, size = np.zeros((rows, heads, wv.shape[1]), np.float32), np.ones((rows, heads, wv.shape[1]))
    for r, count in enumerate(counts):
        used = -(-max(int(count), 0) // SPLIT)
        if used == 0:
            continue
        top = tops[r, :, :used].astype(np.float64)
        weights = np.exp(top - top.max(axis=1, keepdims=True))
        joined = np.einsum("hs,hsc->hc", weights, partial[r, :, :used].astype(np.float64))
        joined /= (weights * masses[r, :, :used]).sum(axis=1, keepdims=True)
        x = round_to(joined.astype(np.float32), dtype).astype(np.float64)
        o[r] = np.einsum("hc,hvc->hv", x, wv.astype(np.float64))
        # A joined value next to a tie may round to its other neighbour, which moves a product by up to an ulp of T.
        size[r] = np.einsum("hc,hvc->hv", np.abs(x), np.abs(wv).astype(np.float64)) * (1 if dtype is DType.F32 else 16)
    return o, size
