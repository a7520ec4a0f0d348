"""Drawing tokens on the device, with log-probabilities and penalty marks. Kernels: sampling.hip.

One to three launches of fixed grids, everything that changes in device memory: they may be captured once and replayed.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol, Self

import numpy as np

from glm53.hip import Array, Device, Stream
from glm53.ops import hotcache
from glm53.ops.args import sample_args, sample_chunk, sample_row, sample_state
from glm53.ops.contract import Cost, Dims, ceil_div, launch
from glm53.spec import DType

ROW_BYTES = ctypes.sizeof(sample_row)
BLOCKS_PER_UNIT = 6  # of all rows together, a compute unit: as many as run at a time


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


def mask_words(vocab: int) -> int:
    """Words of a row of `masks`: a bit a token, the lowest of word 0 first."""
    return ceil_div(vocab, 32)


def pack_rows(rows: Sequence[tuple[DrawSettings, int, int, int]], mask_rows: Sequence[int] | None = None) -> np.ndarray:
    """[rows, ROW_BYTES] uint8 for `sample`. Each row: (settings, seed in [0, 2^64), position of the token drawn, row of `seen` or -1).

    mask_rows: of each row its row of `masks` or -1; None: no row has one.
    """
    packed = (sample_row * len(rows))()
    for row, mask_row, (settings, seed, position, seen_row) in zip(packed, mask_rows or [-1] * len(rows), rows, strict=True):
        row.seed = seed
        row.position = position
        row.seen_row = seen_row
        row.temperature = settings.temperature
        row.top_p = settings.top_p
        row.min_p = settings.min_p
        row.repetition_penalty = settings.repetition_penalty
        row.top_k = settings.top_k
        row.n_logprobs = settings.logprobs or 0
        row.mask_row = mask_row
    return np.frombuffer(bytes(packed), np.uint8).reshape(len(rows), ROW_BYTES).copy()


class Stage(IntEnum):
    """How many launches rows need, by their settings: what each stage does, the stages before it do not."""

    BEST = 1  # greedy rows, log-probabilities, most probable tokens
    DRAW = 2  # drawn rows without top-k and top-p
    CUT = 3  # drawn rows with top-k or top-p

    @classmethod
    def of(cls, rows: Sequence[DrawSettings]) -> Stage:
        """What all of these rows need together."""
        drawn = [row for row in rows if row.temperature != 0.0 and row.top_k != 1]
        if any(row.top_k > 0 or row.top_p < 1.0 for row in drawn):
            return cls.CUT
        return cls.DRAW if drawn else cls.BEST


@dataclass(frozen=True)
class SampleScratch:
    """What the launches of a draw hand on, for at most `rows` rows: 8 bytes a token and row, and about 20 KiB a row.

    records [rows, chunks, RECORD_BYTES] u8; groups [rows, chunks, groups] u64; states [rows, STATE_BYTES] u8; masses [rows, bins] u64;
    counts [rows, bins] u32; entries [rows, vocab] u64; arrivals [rows] u32, 0 between launches.
    """

    records: Array
    groups: Array
    states: Array
    masses: Array
    counts: Array
    entries: Array
    arrivals: Array

    @classmethod
    def make(cls, device: Device, rows_max: int, vocab: int, category: str) -> Self:
        """Raises ContractError, DeviceMemoryError."""
        d, limits = Dims("sample"), device.kernel("sample_best").constants
        d.require(rows_max >= 1, f"rows_max is {rows_max}, expected at least 1")
        d.require(1 <= vocab <= limits["vocab_max"], f"vocab is {vocab}, expected 1 to {limits['vocab_max']}")
        chunks = ceil_div(vocab, limits["chunk"])
        shapes = {
            "records": (DType.U8, (rows_max, chunks, ctypes.sizeof(sample_chunk))),
            "groups": (DType.U64, (rows_max, chunks, limits["groups"])),
            "states": (DType.U8, (rows_max, ctypes.sizeof(sample_state))),
            "masses": (DType.U64, (rows_max, limits["bins"])),
            "counts": (DType.U32, (rows_max, limits["bins"])),
            "entries": (DType.U64, (rows_max, vocab)),
            "arrivals": (DType.U32, (rows_max,)),
        }
        scratch = cls(**hotcache.allocate(device, shapes, category))
        scratch.reset(device.default_stream)
        device.default_stream.synchronize()
        return scratch

    def reset(self, stream: Stream) -> None:
        """Enqueues zeros where the kernels expect them: after a launch that failed half way."""
        stream.fill(self.arrivals.address, 0, self.arrivals.nbytes)

    def free(self) -> None:
        with ExitStack() as steps:
            for array in (self.records, self.groups, self.states, self.masses, self.counts, self.entries, self.arrivals):
                steps.callback(array.free)

    def bind(self, d: Dims, args: sample_args) -> None:
        """Fills the scratch fields of a launch of d["rows"] rows and d["vocab"] tokens."""
        rows_max, vocab = self.entries.shape
        d.require(d["rows"] <= rows_max, f"logits dim 0 is {d['rows']}, expected at most {rows_max}, the scratch's rows_max")
        d.require(d["vocab"] == vocab, f"logits dim 1 is {d['vocab']}, expected {vocab}, the scratch's vocab")
        args.records, args.groups, args.states = self.records.address, self.groups.address, self.states.address
        args.masses, args.counts, args.entries = self.masses.address, self.counts.address, self.entries.address
        args.arrivals, args.chunks = self.arrivals.address, self.records.shape[1]
        device = self.entries.device
        most = device.kernel("sample_bins").constants["chunks_max"]
        each = min(most, ceil_div(args.chunks * d["rows"], BLOCKS_PER_UNIT * device.properties.compute_units))
        args.blocks = ceil_div(args.chunks, each)


def sample(
    stream: Stream,
    scratch: SampleScratch,
    logits: Array,
    params: Array,
    seen: Array | None,
    tokens: Array,
    logprobs: Array,
    tops: tuple[Array, Array] | None,
    stage: Stage = Stage.CUT,
    marks: bool = False,
    masks: Array | None = None,
) -> None:
    """tokens[r]: drawn from logits[r] by mask, repetition penalty, temperature, top-k, top-p, min-p, then Philox 4x32-10 at (seed, position).

    logits [rows, vocab] f32, params [rows, ROW_BYTES] u8 from `pack_rows`, seen [sessions, vocab] u8 (1: penalised; None: no row has a
    penalty), tokens [rows] i32, logprobs [rows] f32: of the token drawn, by the raw logits. tops: ids [rows, n] i32 and logprobs [rows, n]
    f32 of the most probable tokens, descending, -1 and -inf past a row's n_logprobs; n <= 32. vocab <= 524,288, rows <= 65,535. Ties to the
    lowest token. Token -1 and log-probability -inf if no logit that may be drawn is above -inf; NaN counts as -inf. The token is a function of
    the row's logits, settings and mask alone, the same on every device (integer probabilities, see sampling.hip). stage: at least `Stage.of` the
    rows' settings; more costs time and changes nothing. marks: sets seen[seen_row, token] for every row with a row of `seen`; then no two rows
    may share one. masks [.., mask_words(vocab)] u32: bits of the tokens that rows with a mask_row may draw; None: no row has one. Raises
    ContractError.
    """
    d = Dims("sample")
    d.match("logits", logits, "rows", "vocab", dtype=DType.F32)
    d.match("params", params, "rows", ROW_BYTES, dtype=DType.U8)
    d.match("tokens", tokens, "rows", dtype=DType.I32)
    d.match("logprobs", logprobs, "rows", dtype=DType.F32)
    d.require(params.address % 8 == 0, f"params is at address {params.address:#x}, expected a multiple of 8")
    args = sample_args(logits=logits.address, params=params.address, tokens=tokens.address, logprobs=logprobs.address, vocab=d["vocab"])
    if seen is not None:
        d.match("seen", seen, "sessions", "vocab", dtype=DType.U8)
        args.seen, args.marks = seen.address, int(marks)
    if tops is not None:
        d.match("top ids", tops[0], "rows", "n", dtype=DType.I32)
        d.match("top logprobs", tops[1], "rows", "n", dtype=DType.F32)
        n_max = stream.device.kernel("sample_best").constants["logprobs_max"]
        d.require(d["n"] <= n_max, f"top ids dim 1 is {d['n']}, expected at most {n_max}")
        args.top_ids, args.top_logprobs, args.max_logprobs = tops[0].address, tops[1].address, d["n"]
    if masks is not None:
        d.match("masks", masks, "mask rows", mask_words(d["vocab"]), dtype=DType.U32)
        args.masks = masks.address
    scratch.bind(d, args)
    grid = (args.blocks, d["rows"], 1)
    launch(stream, "sample_best", grid, args)
    if stage is Stage.CUT:
        launch(stream, "sample_bins", grid, args)
    if stage is not Stage.BEST:
        launch(stream, "sample_draw", grid, args)


def cost_sample(rows: int, vocab: int) -> Cost:
    """Cost of one reading of the logits; the other launches read them again, from the cache where they fit."""
    return Cost(bytes=4 * rows * vocab, flops=0)
