"""numpy references of the selection of a decode step: exact, given the scores. Index scores themselves: reference_selection."""

from __future__ import annotations

import numpy as np

BIN_SHIFT = 20  # a bin holds the order keys that share their upper 12 bits
BINS_EACH, BIN_PARTS = 4, 32  # bins side by side in a histogram, and parts that neighbours are spread over


def order_keys(scores: np.ndarray) -> np.ndarray:
    """u32 keys in the order of the scores: -0 equals +0, NaN counts as -inf."""
    bits = np.where(np.isnan(scores), np.float32(-np.inf), scores + np.float32(0)).astype(np.float32).view(np.uint32)
    return np.where(bits >> 31 != 0, ~bits, bits | np.uint32(1 << 31)).astype(np.uint32)


def histogram(scores: np.ndarray) -> np.ndarray:
    """[bins] u32: how many of `scores` [n] have each value of the upper 12 bits of their order key; bin b as `step_score_args` has it."""
    counts = np.bincount(order_keys(scores) >> np.uint32(BIN_SHIFT), minlength=1 << (32 - BIN_SHIFT)).astype(np.uint32)
    return counts.reshape(-1, BIN_PARTS, BINS_EACH).transpose(1, 0, 2).reshape(-1)
