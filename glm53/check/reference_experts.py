"""numpy references of the mixture of experts: router, grouping, expert products, weighted sum."""

from __future__ import annotations

import numpy as np

from glm53.check.case import round_to
from glm53.spec import DType


def router(
    logits: np.ndarray, bias: np.ndarray, slots: int, n_group: int = 1, topk_group: int = 1, normalise: bool = True, scaling: float = 1.0
) -> tuple[np.ndarray, np.ndarray]:
    """(ids [rows, slots] i32, weights [rows, slots] f32), experts in order of decreasing choice, ties to the lowest id, NaN last.

    Raises ValueError if two choices that decide are closer than f32 rounding without being equal: another exp could swap them.
    """
    with np.errstate(over="ignore"):
        affinity = (np.float32(1.0) / (np.float32(1.0) + np.exp(-logits.astype(np.float32)))).astype(np.float32)
    choice = affinity + bias.astype(np.float32)
    choice = np.where(np.isnan(choice), np.float32(-np.inf), choice)
    rows, experts = choice.shape
    open_to_choice = np.ones((rows, experts), bool)
    if n_group > 1:
        grouped = choice.reshape(rows, n_group, -1)
        best_two = -np.sort(-grouped, axis=2)[:, :, :2]
        groups = np.argsort(-best_two.sum(axis=2), axis=1, kind="stable")[:, :topk_group]
        open_to_choice = np.zeros((rows, n_group), bool)
        np.put_along_axis(open_to_choice, groups, True, axis=1)
        open_to_choice = np.repeat(open_to_choice, experts // n_group, axis=1)
    # Two keys: open experts first, then by choice; lexsort is stable, so equal ones stay in id order.
    order = np.stack([np.lexsort((-choice[r], ~open_to_choice[r])) for r in range(rows)])
    _require_clear(np.take_along_axis(choice, order, axis=1)[:, : slots + 1])
    ids = order[:, :slots].astype(np.int32)
    weights = np.take_along_axis(affinity, ids, axis=1).astype(np.float64)
    if normalise:
        weights = weights / (weights.sum(axis=1, keepdims=True) + 1e-20)
    return ids, (weights * scaling).astype(np.float32)


def _require_clear(best: np.ndarray) -> None:
    with np.errstate(invalid="ignore"):
        gaps = np.abs(np.diff(best.astype(np.float64), axis=1))
    close = (gaps > 0) & (gaps < 4e-7)
    if close.any():
        raise ValueError(f"the case has a near tie of {gaps[close].min():.1e} between choices: take another seed")


def expert_sort(ids: np.ndarray, experts: int) -> tuple[np.ndarray, np.ndarray]:
    """(offsets [experts + 1] i32, sorted pairs [pairs] i32)"""
    flat = ids.reshape(-1)
    offsets = np.concatenate([[0], np.cumsum(np.bincount(flat, minlength=experts))]).astype(np.int32)
    return offsets, np.argsort(flat, kind="stable").astype(np.int32)


def expert_matmul(x: np.ndarray, w: np.ndarray, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """y [rows, slots, n] f32 before rounding to T, and its error scale.

    x [rows, k] or [rows, slots, k], w [experts, n, k], ids [rows, slots].
    """
    per_slot = x if x.ndim == 3 else np.repeat(x[:, None, :], ids.shape[1], axis=1)
    x64, w64 = per_slot.astype(np.float64), w.astype(np.float64)[ids]
    y = np.einsum("rsk,rsnk->rsn", x64, w64)
    return y.astype(np.float32), np.einsum("rsk,rsnk->rsn", np.abs(x64), np.abs(w64))


def expert_sum(expert_out: np.ndarray, weights: np.ndarray, shared: np.ndarray, residual: np.ndarray, dtype: DType) -> np.ndarray:
    """y [rows, width], exact: a chain of fused multiply-adds in f32 over the slots, one cast, then + shared and + residual, each rounded.

    A fused step is a float64 product (exact) and sum rounded to float32; the second rounding changes about 1 of 2^29 steps.
    """
    total = np.zeros(shared.shape, np.float32)
    for slot in range(weights.shape[1]):
        total = (weights[:, slot, None].astype(np.float64) * expert_out[:, slot].astype(np.float64) + total).astype(np.float32)
    return round_to(round_to(round_to(total, dtype) + shared, dtype) + residual, dtype)
