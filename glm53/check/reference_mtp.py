"""numpy references of the kernels of mtp.hip, session by session and row by row: written from the rules, not from the kernels."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from glm53.check.reference_basic import rms_norm
from glm53.ops.args import sample_row
from glm53.ops.sampling import ROW_BYTES
from glm53.spec import DType


def join_inputs(x: np.ndarray, hidden: np.ndarray, x_norm: np.ndarray, hidden_norm: np.ndarray, eps: float, dtype: DType) -> np.ndarray:
    """[rows, 2 * n]"""
    return np.concatenate([rms_norm(x, x_norm, eps, dtype), rms_norm(hidden, hidden_norm, eps, dtype)], axis=1)


@dataclass(frozen=True)
class Round:
    """What `accept` reads and writes, by session s and row i, shapes [S, k + 1] unless it says otherwise; as `ops.mtp.accept` has them.

    params [S, k + 1, ROW_BYTES] u8; draft_params [k, S, ROW_BYTES] u8; slots, accepted, last [S] i32; seen [slots, vocab] u8 or None.
    """

    tokens: np.ndarray
    drawn: np.ndarray
    positions: np.ndarray
    params: np.ndarray
    slots: np.ndarray
    seen: np.ndarray | None
    draft_params: np.ndarray
    accepted: np.ndarray
    front_tokens: np.ndarray
    front_positions: np.ndarray
    last: np.ndarray

    @property
    def drafts(self) -> int:
        return self.tokens.shape[1] - 1


def accepted_drafts(tokens: np.ndarray, drawn: np.ndarray, positions: np.ndarray) -> int:
    """Of one session, [k + 1] each: row 0 has the token before the drafts."""
    count = 0
    while count + 1 < len(tokens) and positions[0] >= 0 and positions[count + 1] >= 0 and 0 <= drawn[count] == tokens[count + 1]:
        count += 1
    return count


def with_params(row: np.ndarray, **values: int) -> np.ndarray:
    """Bytes [ROW_BYTES] of parameters with some fields replaced."""
    params = sample_row.from_buffer_copy(row.tobytes())
    for name, value in values.items():
        setattr(params, name, value)
    return np.frombuffer(bytes(params), np.uint8)


def params_of(row: np.ndarray) -> sample_row:
    return sample_row.from_buffer_copy(row.tobytes())


def accept(before: Round) -> Round:
    """The round after a verify pass."""
    after = copy.deepcopy(before)
    for s in range(len(before.slots)):
        n, slot, settings = int(before.positions[s, 0]), int(before.slots[s]), before.params[s, 0]
        a = accepted_drafts(before.tokens[s], before.drawn[s], before.positions[s])
        penalises = params_of(settings).seen_row >= 0
        after.accepted[s], after.last[s] = a, s * (before.drafts + 1) + a
        after.tokens[s, 0] = max(0, before.drawn[s, a])
        after.front_tokens[s], after.front_positions[s] = 0, -1
        for j in range(before.drafts):
            after.draft_params[j, s] = with_params(settings, seen_row=slot if penalises else -1)
            if n >= 0:
                after.draft_params[j, s] = with_params(after.draft_params[j, s], position=n + a + 2 + j)
        if n < 0:
            continue
        for i in range(before.drafts + 1):
            after.positions[s, i] = n + a + 1 + i
            after.params[s, i] = with_params(before.params[s, i], position=n + a + 2 + i)
        for i in range(a + 1):
            after.front_tokens[s, i], after.front_positions[s, i] = max(0, before.drawn[s, i]), n + 1 + i
            if after.seen is not None and penalises and slot >= 0 and before.drawn[s, i] >= 0:
                after.seen[slot, before.drawn[s, i]] = 1
    return after


def move_rows(
    moves: Sequence[tuple[np.ndarray, np.ndarray]], count: int, source_index: np.ndarray | None, target_index: np.ndarray | None
) -> list[np.ndarray]:
    """The targets after the move; moves: (source, target) by rows."""
    targets = [target.copy() for _, target in moves]
    for n in range(count):
        source_row, target_row = (n if index is None else int(index[n]) for index in (source_index, target_index))
        if source_row >= 0 and target_row >= 0:
            for (source, _), target in zip(moves, targets, strict=True):
                target[target_row] = source[source_row]
    return targets


def mark_drafts(seen: np.ndarray, slots: np.ndarray, tokens: np.ndarray, scratch: np.ndarray) -> np.ndarray:
    """scratch [S, k + 1, vocab] afterwards; tokens [S, k + 1]."""
    marks = scratch.copy()
    for s, slot in enumerate(slots):
        for i in range(tokens.shape[1] if slot >= 0 else 0):
            marks[s, i] = seen[slot]
            for token in tokens[s, 1 : i + 1]:
                if 0 <= token < seen.shape[1]:
                    marks[s, i, token] = 1
    return marks


def blank_params(shape: tuple[int, ...]) -> np.ndarray:
    """Parameters of bytes 0xff, [*shape, ROW_BYTES]: what a kernel leaves out shows."""
    return np.full((*shape, ROW_BYTES), 0xFF, np.uint8)
