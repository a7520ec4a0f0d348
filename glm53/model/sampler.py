"""Draws tokens on the device for the rows of a step, and keeps the penalty marks of each session."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from glm53.hip import Array, Device, Stream
from glm53.ops import sampling
from glm53.sampling import LOGPROBS_MAX, SamplingParams
from glm53.spec import DType


class Drawn(NamedTuple):
    """One drawn token. token_id -1: the logits held no finite number."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


class DrawRow(NamedTuple):
    """How one row draws: penalty marks of session `slot`, settings, seed, and the position of the token drawn.

    mask [mask_words(vocab)] u32: the tokens that it may draw; None: all of them.
    """

    slot: int
    params: SamplingParams
    seed: int
    position: int
    mask: np.ndarray | None = None


class DrawKind(NamedTuple):
    """What the sampler's launches depend on beside the number of rows."""

    tops: bool  # the most probable tokens are wanted
    penalises: bool  # penalty marks are read and kept
    masks: bool  # some row may not draw every token
    stage: sampling.Stage

    @classmethod
    def of(cls, rows: Sequence[DrawRow]) -> DrawKind:
        every = [row.params for row in rows]
        masks = any(row.mask is not None for row in rows)
        return cls(any(params.logprobs for params in every), any(params.penalises for params in every), masks, sampling.Stage.of(every))


class Sampler:
    """Device state of the sampler: parameters, results and scratch of at most `rows_max` rows; of `sessions_max` sessions a mask and marks of
    seen tokens (these made when first needed)."""

    def __init__(self, device: Device, stream: Stream, rows_max: int, sessions_max: int, vocab: int):
        self.device, self.stream, self.sessions_max, self.vocab = device, stream, sessions_max, vocab
        make = lambda dtype, *shape: Array.empty(device, dtype, shape, category="sampling")
        self.params = make(DType.U8, rows_max, sampling.ROW_BYTES)
        self.tokens = make(DType.I32, rows_max)
        self.logprobs = make(DType.F32, rows_max)
        self.top_ids = make(DType.I32, rows_max, LOGPROBS_MAX)
        self.top_logprobs = make(DType.F32, rows_max, LOGPROBS_MAX)
        self.scratch = sampling.SampleScratch.make(device, rows_max, vocab, category="sampling")
        self.masks = make(DType.U32, sessions_max, sampling.mask_words(vocab))
        self.seen: Array | None = None

    def begin(self, slot: int, prompt: Sequence[int] | None) -> None:
        """A session starts in `slot`; with a prompt, its tokens are marked for the repetition penalty."""
        if prompt is None:
            return
        if self.seen is None:
            self.seen = Array.empty(self.device, DType.U8, (self.sessions_max, self.vocab), category="sampling")
        marks = np.zeros((1, self.vocab), np.uint8)
        marks[0, list(prompt)] = 1
        self.seen.slice(slot, slot + 1).upload(marks, self.stream)

    def upload(self, rows: Sequence[DrawRow], own_marks: bool = False) -> None:
        """Settings and masks of the rows that the next launches draw for; of a session at most one row has a mask. own_marks: row i of them has row i
        of the marks, not its session's."""
        marks = [(index if own_marks else row.slot) if row.params.penalises else -1 for index, row in enumerate(rows)]
        masks = [-1 if row.mask is None else row.slot for row in rows]
        packed = sampling.pack_rows([(row.params, row.seed, row.position, mark) for row, mark in zip(rows, marks, strict=True)], masks)
        for row in rows:
            if row.mask is not None:
                self.masks.slice(row.slot, row.slot + 1).upload(row.mask[None], self.stream)
        self.params.slice(0, len(rows)).upload(packed, self.stream)

    def tops(self, count: int, kind: DrawKind) -> tuple[Array, Array] | None:
        """Where the most probable tokens of `count` rows go, if they are wanted: ids and log-probabilities [count, LOGPROBS_MAX]."""
        return (self.top_ids.slice(0, count), self.top_logprobs.slice(0, count)) if kind.tops else None

    def enqueue(self, logits: Array, kind: DrawKind) -> None:
        """Draws tokens[r] from logits[r] [rows, vocab] f32 by the settings uploaded, and marks them as seen; rows are of different sessions."""
        count = logits.shape[0]
        cut = lambda array: array.slice(0, count)
        seen = self.seen if kind.penalises else None
        outputs = (cut(self.tokens), cut(self.logprobs), self.tops(count, kind))
        masks = self.masks if kind.masks else None
        sampling.sample(self.stream, self.scratch, logits, cut(self.params), seen, *outputs, stage=kind.stage, marks=True, masks=masks)

    def draw(self, logits: Array, rows: Sequence[DrawRow]) -> list[Drawn]:
        """One token per row of logits [rows, vocab] f32, now. Waits for the device."""
        count, kind = len(rows), DrawKind.of(rows)
        self.upload(rows)
        self.enqueue(logits, kind)
        read = lambda array: array.slice(0, count).numpy(self.stream).tolist()
        tops = (read(self.top_ids), read(self.top_logprobs)) if kind.tops else None
        return drawn_rows(rows, read(self.tokens), read(self.logprobs), tops)


def drawn_rows(
    rows: Sequence[DrawRow],
    tokens: Sequence[int],
    logprobs: Sequence[float],
    tops: tuple[Sequence[Sequence[int]], Sequence[Sequence[float]]] | None,
) -> list[Drawn]:
    """What was drawn for each row: tokens, logprobs [rows], tops None or (ids, logprobs) [rows][n]."""
    if tops is None:
        return [Drawn(token, logprob, ()) for token, logprob in zip(tokens, logprobs, strict=True)]
    drawn = []
    for row, token, logprob, *found in zip(rows, tokens, logprobs, *tops, strict=True):
        pairs = list(zip(*found, strict=True))[: row.params.logprobs or 0]
        drawn.append(Drawn(token, logprob, tuple(pair for pair in pairs if pair[0] >= 0)))
    return drawn
