"""Drawing tokens on the device, with log-probabilities and penalty marks. Kernels: sampling.hip."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from glm53.hip import Array, Stream
from glm53.ops.args import mark_seen_args, sample_args, sample_row
from glm53.ops.contract import Cost, Dims, ceil_div, launch
from glm53.spec import DType

ROW_BYTES = ctypes.sizeof(sample_row)


class DrawSettings(Protocol):
    """What `pack_rows` reads of a request's settings; `glm53.sampling.SamplingParams` is one, and checks the ranges."""

    @property
    def temperature(self) -> float: ...
    @property
    def top_p(self) -> float: ...
    @property
    def top_k(self) -> int: ...
    @property
    def min_p(self) -> float: ...
    @property
    def repetition_penalty(self) -> float: ...
    @property
    def logprobs(self) -> int | None: ...


def pack_rows(rows: Sequence[tuple[DrawSettings, int, int, int]]) -> np.ndarray:
    """[rows, ROW_BYTES] uint8 for `sample`. Each row: (settings, seed in [0, 2^64), position of the token drawn, row of `seen` or -1)."""
    packed = (sample_row * len(rows))()
    for row, (settings, seed, position, seen_row) in zip(packed, rows, strict=True):
        row.seed = seed
        row.position = position
        row.seen_row = seen_row
        row.temperature = settings.temperature
        row.top_p = settings.top_p
        row.min_p = settings.min_p
        row.repetition_penalty = settings.repetition_penalty
        row.top_k = settings.top_k
        row.n_logprobs = settings.logprobs or 0
    return np.frombuffer(bytes(packed), np.uint8).reshape(len(rows), ROW_BYTES).copy()


def sample(
    stream: Stream,
    logits: Array,
    params: Array,
    seen: Array | None,
    tokens: Array,
    logprobs: Array,
    tops: tuple[Array, Array] | None,
) -> None:
    """tokens[r]: drawn from logits[r] by repetition penalty, temperature, top-k, top-p, min-p, then Philox 4x32-10 at (seed, position).

    logits [rows, vocab] f32, params [rows, ROW_BYTES] u8 from `pack_rows`, seen [sessions, vocab] u8 (1: penalised; None: no row has a
    penalty), tokens [rows] i32, logprobs [rows] f32: of the token drawn, by the raw logits. tops: ids [rows, n] i32 and logprobs [rows, n]
    f32 of the most probable tokens, descending, -1 and -inf past a row's n_logprobs; n <= 32. vocab <= 524,288. Ties to the lowest token.
    Token -1 and log-probability -inf if no logit is above -inf; NaN counts as -inf. The token is a function of the row's logits and
    settings alone, the same on every device (integer probabilities, see sampling.hip). Raises ContractError.
    """
    d = Dims("sample")
    d.match("logits", logits, "rows", "vocab", dtype=DType.F32)
    d.match("params", params, "rows", ROW_BYTES, dtype=DType.U8)
    d.match("tokens", tokens, "rows", dtype=DType.I32)
    d.match("logprobs", logprobs, "rows", dtype=DType.F32)
    limits = stream.device.kernel("sample").constants
    d.require(d["vocab"] <= limits["vocab_max"], f"vocab is {d['vocab']}, expected at most {limits['vocab_max']}")
    d.require(params.address % 8 == 0, f"params is at address {params.address:#x}, expected a multiple of 8")
    args = sample_args(logits=logits.address, params=params.address, tokens=tokens.address, logprobs=logprobs.address, vocab=d["vocab"])
    if seen is not None:
        d.match("seen", seen, "sessions", "vocab", dtype=DType.U8)
        args.seen = seen.address
    if tops is not None:
        d.match("top ids", tops[0], "rows", "n", dtype=DType.I32)
        d.match("top logprobs", tops[1], "rows", "n", dtype=DType.F32)
        d.require(d["n"] <= limits["logprobs_max"], f"top ids dim 1 is {d['n']}, expected at most {limits['logprobs_max']}")
        args.top_ids, args.top_logprobs, args.max_logprobs = tops[0].address, tops[1].address, d["n"]
    launch(stream, "sample", (d["rows"], 1, 1), args)


def cost_sample(rows: int, vocab: int) -> Cost:
    """Cost of one reading of the logits; filters read them up to nine times more, from the cache where a row fits."""
    return Cost(bytes=4 * rows * vocab, flops=0)


def mark_seen(stream: Stream, seen: Array, tokens: Array, seen_rows: Array) -> None:
    """seen[seen_rows[i], tokens[i]] = 1. Entries with a negative row, or a token outside [0, vocab), are skipped.

    seen [sessions, vocab] u8, tokens [count] i32, seen_rows [count] i32, each below sessions. Raises ContractError.
    """
    d = Dims("mark_seen")
    d.match("seen", seen, "sessions", "vocab", dtype=DType.U8)
    d.match("tokens", tokens, "count", dtype=DType.I32)
    d.match("seen_rows", seen_rows, "count", dtype=DType.I32)
    args = mark_seen_args(seen=seen.address, tokens=tokens.address, seen_rows=seen_rows.address, count=d["count"], vocab=d["vocab"])
    launch(stream, "mark_seen", (ceil_div(d["count"], stream.device.kernel("mark_seen").block), 1, 1), args)


def cost_mark_seen(count: int) -> Cost:
    return Cost(bytes=9 * count, flops=0)
