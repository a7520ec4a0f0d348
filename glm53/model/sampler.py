"""Draws tokens on the device for the rows of a step, and keeps the penalty marks of each session."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from glm53.hip import Array, Device, Stream
from glm53.ops import sampling
from glm53.sampling import LOGPROBS_MAX, SamplingParams
from glm53.spec import DType


@dataclass(frozen=True)
class Drawn:
    """One drawn token. token_id -1: the logits held no finite number."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


class Sampler:
    """Device state of the sampler for `sessions_max` sessions: parameters of the rows of a step, marks of seen tokens (made when first needed)."""

    def __init__(self, device: Device, stream: Stream, sessions_max: int, vocab: int):
        self.device, self.stream, self.sessions_max, self.vocab = device, stream, sessions_max, vocab
        make = lambda dtype, *shape: Array.empty(device, dtype, shape, category="sampling")
        self.params = make(DType.U8, sessions_max, sampling.ROW_BYTES)
        self.tokens = make(DType.I32, sessions_max)
        self.logprobs = make(DType.F32, sessions_max)
        self.top_ids = make(DType.I32, sessions_max, LOGPROBS_MAX)
        self.top_logprobs = make(DType.F32, sessions_max, LOGPROBS_MAX)
        self.slots = make(DType.I32, sessions_max)
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

    def draw(self, logits: Array, rows: Sequence[tuple[int, SamplingParams, int, int]]) -> list[Drawn]:
        """One token per row of logits [rows, vocab] f32; rows: (slot, params, seed, position of the token drawn). Waits for the device."""
        count = len(rows)
        packed = sampling.pack_rows([(params, seed, position, slot if params.penalises else -1) for slot, params, seed, position in rows])
        self.params.slice(0, count).upload(packed, self.stream)
        wants_top = any(params.logprobs for _, params, _, _ in rows)
        cut = lambda array: array.slice(0, count)
        tops = (cut(self.top_ids), cut(self.top_logprobs)) if wants_top else None
        sampling.sample(self.stream, logits, cut(self.params), self.seen, cut(self.tokens), cut(self.logprobs), tops)
        if self.seen is not None and any(params.penalises for _, params, _, _ in rows):
            slots = np.array([slot if params.penalises else -1 for slot, params, _, _ in rows], np.int32)
            cut(self.slots).upload(slots, self.stream)
            sampling.mark_seen(self.stream, self.seen, cut(self.tokens), cut(self.slots))
        tokens, logprobs = cut(self.tokens).numpy(self.stream), cut(self.logprobs).numpy(self.stream)
        ids = values = None
        if tops is not None:
            ids, values = tops[0].numpy(self.stream), tops[1].numpy(self.stream)
        drawn = []
        for i, (_, params, _, _) in enumerate(rows):
            top: tuple[tuple[int, float], ...] = ()
            if ids is not None and values is not None and params.logprobs:
                top = tuple((int(t), float(v)) for t, v in zip(ids[i][: params.logprobs], values[i][: params.logprobs], strict=True) if t >= 0)
            drawn.append(Drawn(int(tokens[i]), float(logprobs[i]), top))
        return drawn
