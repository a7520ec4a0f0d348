"""numpy references of the selection of a decode step: exact, given the scores. Index scores themselves: reference_selection."""

from __future__ import annotations

import numpy as np

BIN_SHIFT = 20  # a bin holds the order keys that share their upper 12 bits


def order_keys(scores: np.ndarray) -> np.ndarray:
    """u32 keys in the order of the scores: -0 equals +0, NaN counts as -inf."""
    bits = np.where(np.isnan(scores), np.float32(-np.inf), scores + np.float32(0)).astype(np.float32).view(np.uint32)
    return np.where(bits >> 31 != 0, ~bits, bits | np.uint32(1 << 31)).astype(np.uint32)


def threshold(scores: np.ndarray, k: int) -> tuple[int, int]:
    """(bin of the k-th largest of `scores` [n], how many of that bin belong to the k largest). k <= n."""
    bins = np.sort(order_keys(scores) >> np.uint32(BIN_SHIFT))[::-1]
    found = int(bins[k - 1])
    return found, k - int((bins > found).sum())
