"""numpy references of index score, top-k and attention: float64 where a tolerance applies, exact where the result is a set.

Keys and history rows come in as plain arrays in position order; extents are the kernel's business.
"""

from __future__ import annotations

import numpy as np


def index_scores(query: np.ndarray, gate: np.ndarray, keys: list[np.ndarray], positions: np.ndarray, columns: int) -> tuple[np.ndarray, np.ndarray]:
    """Scores [rows, columns] f32, NaN past positions[r], and their error scale (the sum of absolute products).

    query [rows, heads, dim], gate [rows, heads], keys[r] [context, dim] of the row's session, positions [rows].
    """
    rows, heads, dim = query.shape
    scores = np.full((rows, columns), np.nan, np.float32)
    scale = np.ones((rows, columns))
    for r, position in enumerate(positions):
        visible = keys[r][: position + 1].astype(np.float64)
        q, weight = query[r].astype(np.float64), gate[r].astype(np.float64) * heads**-0.5
        similarity = np.maximum(0.0, q @ visible.T * dim**-0.5)  # ReLU before the head weighting
        scores[r, : position + 1] = weight @ similarity
        scale[r, : position + 1] = np.abs(weight) @ (np.abs(q) @ np.abs(visible).T) * dim**-0.5
    return scores, scale


def topk(scores: np.ndarray, positions: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """(selected [rows, k] i32, counts [rows] i32): largest scores up to each position, ties to the lowest, ascending, -1 past the count."""
    rows = len(positions)
    selected, counts = np.full((rows, k), -1, np.int32), np.zeros(rows, np.int32)
    for r, position in enumerate(positions):
        visible = scores[r, : position + 1]
        visible = np.where(np.isnan(visible), -np.inf, visible)
        best_first = np.argsort(-visible, kind="stable")  # stable: equal scores stay in position order; -0 equals +0
        chosen = np.sort(best_first[:k])
        counts[r] = len(chosen)
        selected[r, : len(chosen)] = chosen
    return selected, counts


def attend(q_latent: np.ndarray, q_rope: np.ndarray, history: list[np.ndarray], scale: float) -> tuple[np.ndarray, np.ndarray]:
    """Output [rows, heads, latent] f32 and its error scale.

    q_latent [rows, heads, latent], q_rope [rows, heads, rope], history[r] [count, latent + rope]: the planned rows in plan order.
    """
    latent = q_latent.shape[2]
    out, size = np.zeros(q_latent.shape, np.float32), np.ones(q_latent.shape)
    for r, planned in enumerate(history):
        if len(planned) == 0:
            continue
        q = np.concatenate([q_latent[r], q_rope[r]], axis=1).astype(np.float64)
        rows = planned.astype(np.float64)
        s = q @ rows.T * scale
        weights = np.exp(s - s.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        out[r] = weights @ rows[:, :latent]
        # A score's rounding error is proportional to its sum of absolute products, and moves a weight by that factor.
        swing = np.maximum(1.0, (np.abs(q) @ np.abs(rows).T * scale).max(axis=1, keepdims=True))
        size[r] = weights @ np.abs(rows[:, :latent]) * swing
    return out, size
