"""First and last kernel of a decode step, and the record of a step that the host reads. Kernels: step_state.hip."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from glm53.hip import Array, Stream
from glm53.ops.args import Args
from glm53.ops.contract import Dims, ceil_div, launch, variant
from glm53.ops.history import ExtentLayout
from glm53.ops.sampling import ROW_BYTES
from glm53.ops.step import SumMail
from glm53.ops.step_args import step_begin_args, step_end_args
from glm53.spec import DType

RECORD_HEAD_WORDS = 3  # step number, row error, exchange error


@dataclass(frozen=True)
class RowPlace:
    """Where new rows go. tables [sessions, extents] u64: into extents; states [sessions, STATE_BYTES] u8: into the hot buffer."""

    shape: ExtentLayout
    tables: Array | None = None
    states: Array | None = None
    ring_rows: int = 0


@dataclass(frozen=True)
class Half:
    """Which columns of the embedding a device of a pair has: those of side 0 come first. mail: how it gets the others."""

    side: int
    mail: SumMail


def begin(
    stream: Stream, tokens: Array, embed: Array, x: Array, positions: Array, sessions: Array, refs: Array, place: RowPlace, half: Half | None = None
) -> None:
    """x[r] = embed[tokens[r]] (NaN for a token outside the vocabulary) and refs[r] = reference of row positions[r] of its session (0: padding).

    tokens, positions, sessions [rows] i32; embed [vocab, hidden] W; x [rows, hidden] T; refs [rows] u64. Variants T_W: f32_f32, f32_bf16, bf16_bf16.
    half: on a device of a pair, whose table has a part of the columns; x then has all of them, those of the other device through its mailbox.
    """
    d = Dims("step_begin")
    for name, array in (("tokens", tokens), ("positions", positions), ("sessions", sessions)):
        d.match(name, array, "rows", dtype=DType.I32)
    d.match("embed", embed, "vocab", "hidden", dtype=(DType.F32, DType.BF16))
    d.match("x", x, "rows", "hidden" if half is None else "columns", dtype=(DType.F32, DType.BF16))
    d.match("refs", refs, "rows", dtype=DType.U64)
    d.require((place.tables is None) is not (place.states is None), "place has tables and states, expected exactly one of them")
    name = variant("step_begin", ("f32_f32", "f32_bf16", "bf16_bf16"), x.dtype, embed.dtype)
    args = step_begin_args(
        table=embed.address,
        tokens=tokens.address,
        x=x.address,
        sessions=sessions.address,
        positions=positions.address,
        tables=0 if place.tables is None else place.tables.address,
        states=0 if place.states is None else place.states.address,
        refs=refs.address,
        hidden=d["hidden"],
        vocab=d["vocab"],
        place=1 if place.states is None else 2,
        table_stride=0 if place.tables is None else place.tables.shape[1],
        extent_rows=place.shape.extent_rows,
        row_bytes=place.shape.row_bytes,
        ring_rows=place.ring_rows,
    )
    columns, widest = stream.device.kernel(name).constants["cols"], d["hidden"]
    if half is not None:
        other, each = d["columns"] - d["hidden"], 4 // x.dtype.item_bytes
        whole = other > 0 and d["hidden"] % each == other % each == 0
        d.require(whole, f"x has {d['columns']} columns, the table {d['hidden']}, expected more, and whole words of both")
        args.side, args.other_hidden, widest = half.side, other, max(d["hidden"], other)
        args.waiting_blocks = d["rows"] * ceil_div(widest, columns)
        half.mail.bind(d, args.mail, d["rows"] * widest // each, args.waiting_blocks)
    launch(stream, name, (d["rows"], ceil_div(widest, columns), 1), args)


@dataclass(frozen=True)
class Draws:
    """What a step drew, on the device, and where its record goes.

    tokens [rows] i32, logprobs [rows] f32, tops None or (ids [rows, n] i32, logprobs [rows, n] f32), positions [rows] i32,
    params [rows, ROW_BYTES] u8; ring [steps, words] u32 in host memory as the device sees it, steps a power of two.
    """

    tokens: Array
    logprobs: Array
    tops: tuple[Array, Array] | None
    positions: Array
    params: Array
    ring: Ring


@dataclass(frozen=True)
class Ring:
    """Records of the last steps in host memory: `words` [steps, record_words] u32 there, `device_address` for kernels."""

    words: np.ndarray
    device_address: int

    def __post_init__(self) -> None:
        steps = self.words.shape[0]
        if self.words.dtype != np.uint32 or steps & (steps - 1):
            raise ValueError(f"ring: got {self.words.dtype} for {steps} steps, wanted uint32 for a power of two")


class Record(NamedTuple):
    """One step as the ring has it. row_error: 1 + a row that could not be quantised, or 0; link_error: number of an exchange of a pair that got no
    answer, in this step or before it, or 0. tokens, logprobs [rows]; tops None or (ids, logprobs) [rows][n]."""

    step: int
    row_error: int
    link_error: int
    tokens: Sequence[int]
    logprobs: Sequence[float]
    tops: tuple[Sequence[Sequence[int]], Sequence[Sequence[float]]] | None


def record_words(rows: int, tops: int) -> int:
    """Words of a record."""
    return RECORD_HEAD_WORDS + rows * (2 + 2 * tops)


def read_record(ring: Ring, step: int, rows: int, tops: int) -> Record:
    """The record of step number `step`, which has been completed: waited for by its event."""
    row = f"if{tops}i{tops}f" if tops else "if"
    number, row_error, link_error, *body = struct.unpack_from("<3I" + row * rows, ring.words[step % ring.words.shape[0]])
    width = 2 + 2 * tops
    starts = range(2, rows * width, width)
    split = ([body[i : i + tops] for i in starts], [body[i + tops : i + 2 * tops] for i in starts]) if tops else None
    return Record(number, row_error, link_error, body[::width], body[1::width], split)


def end(
    stream: Stream,
    counter: Array,
    error: Array,
    rounds: Array,
    states: Array | None,
    draws: Draws | None,
    link_error: Array | None = None,
    exchanged: tuple[Array, int] | None = None,
) -> None:
    """Moves on what changes from step to step: counter [1] u32, round tags in states [sessions, STATE_BYTES] u8 of the sessions in rounds
    [rounds] i32 (negative: padding), and with `draws` positions and sampling counters by one, after writing the record of the step. error [1] u32;
    link_error [1] u32: that of a pair's exchanges (`ops.exchange.Exchange.errors`), None on a device alone;
    exchanged: exchanges done [1] u32 of a pair, and how many this step had.
    """
    d = Dims("step_end")
    d.match("counter", counter, 1, dtype=DType.U32)
    d.match("error", error, 1, dtype=DType.U32)
    d.match("rounds", rounds, "rounds", dtype=DType.I32)
    args: Args = step_end_args(
        states=0 if states is None else states.address,
        round_sessions=rounds.address,
        error=error.address,
        counter=counter.address,
        rounds=d["rounds"],
    )
    if link_error is not None:
        d.match("link_error", link_error, 1, dtype=DType.U32)
        args.link_error = link_error.address
    if exchanged is not None:
        d.match("exchanged", exchanged[0], 1, dtype=DType.U32)
        args.exchanged, args.exchanges = exchanged[0].address, exchanged[1]
    if draws is not None:
        _add_draws(d, args, draws)
    launch(stream, "step_end", (1, 1, 1), args)


def _add_draws(d: Dims, args: Args, draws: Draws) -> None:
    d.match("tokens", draws.tokens, "rows", dtype=DType.I32)
    d.match("logprobs", draws.logprobs, "rows", dtype=DType.F32)
    d.match("positions", draws.positions, "rows", dtype=DType.I32)
    d.match("params", draws.params, "rows", ROW_BYTES, dtype=DType.U8)
    tops = 0
    if draws.tops is not None:
        d.match("top ids", draws.tops[0], "rows", "tops", dtype=DType.I32)
        d.match("top logprobs", draws.tops[1], "rows", "tops", dtype=DType.F32)
        tops = d["tops"]
        args.top_ids, args.top_logprobs = draws.tops[0].address, draws.tops[1].address
    steps, words = draws.ring.words.shape
    needed = record_words(d["rows"], tops)
    d.require(needed <= words, f"ring records have {words} words, expected at least {needed} for {d['rows']} rows and {tops} tops")
    args.tokens, args.logprobs, args.positions, args.params = (a.address for a in (draws.tokens, draws.logprobs, draws.positions, draws.params))
    args.ring, args.rows, args.tops, args.ring_steps, args.record_words = draws.ring.device_address, d["rows"], tops, steps, words
