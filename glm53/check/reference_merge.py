"""numpy references of what a side of a pair holds, lists and merges: exact, since integers decide."""

from __future__ import annotations

import numpy as np

from glm53.check.reference_step_select import order_keys
from glm53.spec import Shard


def held_positions(share: Shard, extent_rows: int, positions: int) -> np.ndarray:
    """Which of the first `positions` positions a side holds, ascending, i64: row q of the side is element q."""
    all_positions = np.arange(positions)
    return all_positions[all_positions // extent_rows % share.count == share.index]


def local_lists(scores: np.ndarray, positions: np.ndarray, k: int, share: Shard, extent_rows: int) -> tuple[np.ndarray, np.ndarray]:
    """(entries [rows, k] u64, 0 past the count; counts [rows] i32) of the scores [rows, columns] of all positions, as a side lists its own."""
    entries, counts = np.zeros((len(positions), k), np.uint64), np.zeros(len(positions), np.int32)
    for r, position in enumerate(positions):
        if position < k:
            continue
        held = held_positions(share, extent_rows, position + 1)
        found = order_keys(scores[r, held]).astype(np.uint64) << np.uint64(32) | (np.uint64(0xFFFFFFFF) - held.astype(np.uint64))
        best = np.sort(np.argsort(found)[::-1][:k])
        entries[r, : len(best)], counts[r] = found[best], len(best)
    return entries, counts


def mailbox_words(entries: np.ndarray, counts: np.ndarray, number: int) -> tuple[np.ndarray, np.ndarray]:
    """(words [rows * (2 k + 1)] u64 that a side posts in exchange `number`, which of them are posted): keys, ~positions, count of each row."""
    rows, k = entries.shape
    values, posted = np.zeros((rows, 2 * k + 1), np.uint64), np.zeros((rows, 2 * k + 1), bool)
    values[:, :k], values[:, k : 2 * k], values[:, 2 * k] = entries >> np.uint64(32), entries & np.uint64(0xFFFFFFFF), counts
    there = np.arange(k) < counts[:, None]
    posted[:, :k], posted[:, k : 2 * k], posted[:, 2 * k] = there, there, True
    return (values | np.uint64(number) << np.uint64(32)).reshape(-1), posted.reshape(-1)
