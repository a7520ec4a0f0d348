"""The small kernels of speculative decoding with the MTP layer, between its passes and the verify pass of the main model. Kernels: mtp.hip.

A round: S sessions of k drafts each, 1 <= k <= 5; R = S * (k + 1) verify rows. Row s * (k + 1) of session s has the token drawn last, row
s * (k + 1) + i draft i. Every function enqueues one launch of a fixed grid and raises ContractError where arrays do not fit; all that changes from
round to round lies in device memory, so that a round may be recorded once and replayed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from glm53.hip import Array, Stream
from glm53.ops.contract import U32_LIMIT, Cost, Dims, ceil_div, launch, variant
from glm53.ops.mtp_args import accept_args, advance_args, join_inputs_args, mark_drafts_args, move_rows_args
from glm53.ops.sampling import ROW_BYTES
from glm53.ops.step_state import RECORD_HEAD_WORDS, Ring
from glm53.spec import DType

MOVES_MAX = 6  # of a launch


def join_inputs(stream: Stream, x: Array, hidden: Array, x_norm: Array, hidden_norm: Array, y: Array, eps: float) -> None:
    """Input of the MTP layer's projection: columns [0, n) of y are rms_norm(x), columns [n, 2 n) rms_norm(hidden), with the bits of `basic.rms_norm`.

    x, hidden [rows, n] T: embeddings and hidden states; x_norm, hidden_norm [n] T; y [rows, 2 * n] T. T f32 or bf16. Source: eh_proj of vLLM's
    and SGLang's DeepSeek MTP, embedding half first.
    """
    d = Dims("join_inputs")
    d.match("x", x, "rows", "n", dtype=(DType.F32, DType.BF16))
    d.match("hidden", hidden, "rows", "n", dtype=x.dtype)
    d.match("x_norm", x_norm, "n", dtype=x.dtype)
    d.match("hidden_norm", hidden_norm, "n", dtype=x.dtype)
    d.match("y", y, "rows", 2 * d["n"], dtype=x.dtype)
    d.distinct("x", x, "y", y)
    d.distinct("hidden", hidden, "y", y)
    d.require(eps > 0, f"eps is {eps}, expected a positive number")
    args = join_inputs_args(
        x=x.address, hidden=hidden.address, x_norm=x_norm.address, hidden_norm=hidden_norm.address, y=y.address, n=d["n"], eps=eps
    )
    launch(stream, variant("join_inputs", ("f32", "bf16"), x.dtype), (d["rows"], 2, 1), args)


def cost_join_inputs(x: Array) -> Cost:
    """Of x and hidden: one read and one write; 4 operations a value."""
    return Cost(4 * x.nbytes + 2 * x.shape[1] * x.dtype.item_bytes, 8 * x.shape[0] * x.shape[1])


@dataclass(frozen=True)
class Record:
    """One round as the ring has it; the first three as in `step_state.Record`. accepted [S]: drafts that the target drew as well; tokens, logprobs
    [S, k + 1]: what it drew, of which the first accepted + 1 count; tops None or (ids, logprobs) [S, k + 1, n]."""

    step: int
    row_error: int
    link_error: int
    accepted: np.ndarray
    tokens: np.ndarray
    logprobs: np.ndarray
    tops: tuple[np.ndarray, np.ndarray] | None


def record_words(sessions: int, drafts: int, tops: int) -> int:
    """Words of the record of a round."""
    return RECORD_HEAD_WORDS + sessions * (1 + (drafts + 1) * (2 + 2 * tops))


def read_record(ring: Ring, step: int, sessions: int, drafts: int, tops: int) -> Record:
    """The record of step number `step`, a round, which has been completed: waited for by its event."""
    words = ring.words[step % ring.words.shape[0]]
    body = words[RECORD_HEAD_WORDS : record_words(sessions, drafts, tops)].reshape(sessions, -1)
    rows = body[:, 1:].reshape(sessions, drafts + 1, 2 + 2 * tops)
    part = lambda columns, dtype: np.ascontiguousarray(columns).view(dtype)
    split = (part(rows[..., 2 : 2 + tops], np.int32), part(rows[..., 2 + tops :], np.float32)) if tops else None
    accepted, tokens, logprobs = part(body[:, 0], np.int32), part(rows[..., 0], np.int32), part(rows[..., 1], np.float32)
    return Record(int(words[0]), int(words[1]), int(words[2]), accepted.copy(), tokens.copy(), logprobs.copy(), split)


def accept(
    stream: Stream,
    *,
    tokens: Array,
    drawn: Array,
    positions: Array,
    params: Array,
    draft_params: Array,
    accepted: Array,
    front_tokens: Array,
    front_positions: Array,
    last: Array,
    slots: Array,
    seen: Array | None,
    logprobs: Array,
    tops: tuple[Array, Array] | None,
    ring: Ring,
    counter: Array,
    error: Array,
    link_error: Array | None = None,
) -> None:
    """Ends a verify pass. a = drafts of a session before the first that the target did not draw itself: draft i counts if row i has a position and
    the draw of row i - 1 is its token. n = the session's position in row 0, before; negative: no session there, positions and params stay.

    In: drawn [R] i32, the target's draws (row r: the token at positions[r] + 1; -1: none) with logprobs [R] f32 and tops None or (ids [R, t] i32,
    logprobs [R, t] f32); slots [S] i32, each session's row of seen, negative: none; counter [1] u32, steps done.
    In and out: tokens [R] i32, drafts in rows i > 0; row 0 becomes the token drawn last, max(0, drawn[a]). positions [R] i32, -1: no draft there;
    row i becomes n + a + 1 + i. params [R, ROW_BYTES] u8 of `sampling.pack_rows`: .position becomes that of the row + 1. seen [slots, vocab] u8 or
    None: drawn[0 .. a] are marked in row slots[s] where params of row 0 have a seen_row >= 0. error [1] u32: put in the record, then 0.
    Out: accepted [S] i32 = a. last [S] i32 = s * (k + 1) + a. front_tokens, front_positions [R] i32: max(0, drawn[i]) and n + 1 + i for i <= a, else
    0 and -1: what the MTP layer reads next. draft_params [k, S, ROW_BYTES] u8: of draft j + 1 those of row 0 with position n + a + 2 + j and, if
    row 0 has a seen_row >= 0, seen_row slots[s].

    The record of the round (`read_record`) goes to ring at the counter, which stays: `step_state.end` without draws moves it on. link_error [1] u32
    or None: as there. Every block of the launch is one session's; they share no rows, if slots are distinct.
    """
    d = Dims("accept_drafts")
    d.match("draft_params", draft_params, "drafts", "sessions", ROW_BYTES, dtype=DType.U8)
    drafts, sessions = d["drafts"], d["sessions"]
    _require_drafts(d, stream, drafts)
    d.bind("rows", sessions * (drafts + 1), "sessions * (drafts + 1)")
    i32_rows = {"tokens": tokens, "drawn": drawn, "positions": positions, "front_tokens": front_tokens, "front_positions": front_positions}
    for name, array in i32_rows.items():
        d.match(name, array, "rows", dtype=DType.I32)
    d.match("params", params, "rows", ROW_BYTES, dtype=DType.U8)
    d.match("logprobs", logprobs, "rows", dtype=DType.F32)
    for name, array in (("accepted", accepted), ("last", last), ("slots", slots)):
        d.match(name, array, "sessions", dtype=DType.I32)
    for name, array in (("params", params), ("draft_params", draft_params)):
        d.require(array.address % 8 == 0, f"{name} is at address {array.address:#x}, expected a multiple of 8")
    d.match("counter", counter, 1, dtype=DType.U32)
    d.match("error", error, 1, dtype=DType.U32)
    args = accept_args(
        **{name: array.address for name, array in i32_rows.items()},
        params=params.address,
        draft_params=draft_params.address,
        accepted=accepted.address,
        last=last.address,
        slots=slots.address,
        logprobs=logprobs.address,
        error=error.address,
        counter=counter.address,
        sessions=sessions,
        drafts=drafts,
    )
    if seen is not None:
        d.match("seen", seen, "seen rows", "vocab", dtype=DType.U8)
        args.seen, args.vocab = seen.address, d["vocab"]
    if link_error is not None:
        d.match("link_error", link_error, 1, dtype=DType.U32)
        args.link_error = link_error.address
    _add_record(d, args, tops, ring)
    launch(stream, "accept_drafts", (sessions, 1, 1), args)


def _require_drafts(d: Dims, stream: Stream, drafts: int) -> None:
    most = stream.device.kernel(d.op).constants["drafts_max"]
    d.require(1 <= drafts <= most, f"drafts is {drafts}, expected 1 to {most}")


def _add_record(d: Dims, args: accept_args, tops: tuple[Array, Array] | None, ring: Ring) -> None:
    count = 0
    if tops is not None:
        d.match("top ids", tops[0], "rows", "tops", dtype=DType.I32)
        d.match("top logprobs", tops[1], "rows", "tops", dtype=DType.F32)
        count = d["tops"]
        args.top_ids, args.top_logprobs = tops[0].address, tops[1].address
    steps, words = ring.words.shape
    needed = record_words(d["sessions"], d["drafts"], count)
    text = f"ring records have {words} words, expected at least {needed} for {d['sessions']} sessions, {d['drafts']} drafts and {count} tops"
    d.require(needed <= words, text)
    args.ring, args.ring_steps, args.record_words, args.tops = ring.device_address, steps, words, count


@dataclass(frozen=True)
class Move:
    """Rows of `source` go to `target`; a row is everything behind dim 0. Any types, rows of the same number of bytes, a multiple of 4."""

    source: Array
    target: Array

    @property
    def row_bytes(self) -> int:
        return self.source.nbytes // self.source.shape[0]


def move_rows(stream: Stream, moves: Sequence[Move], count: int, source_index: Array | None = None, target_index: Array | None = None) -> None:
    """target[target_index[n]] = source[source_index[n]] for n < count, for each of up to 6 moves.

    source_index, target_index [count] i32 in device memory, rows of every source or target; None: n itself; negative: that n is skipped. No target
    shares bytes with a source or another target, and target_index has no row twice. 16-byte words where addresses and rows are multiples of 16.
    """
    d = Dims("move_rows")
    d.require(1 <= len(moves) <= MOVES_MAX, f"got {len(moves)} moves, expected 1 to {MOVES_MAX}")
    d.bind("count", count, "count")
    args = move_rows_args()
    for field, index in (("source_index", source_index), ("target_index", target_index)):
        if index is not None:
            d.match(field, index, "count", dtype=DType.I32)
            setattr(args, field, index.address)
    for i, move in enumerate(moves):
        sides = ((f"source {i}", move.source, source_index), (f"target {i}", move.target, target_index))
        for name, array, index in sides:
            d.require(len(array.shape) >= 1, f"{name} has shape [], expected rows behind dim 0")
            d.match(name, array, *[None] * len(array.shape))
            d.require(array.address % 4 == 0, f"{name} is at address {array.address:#x}, expected a multiple of 4")
            if index is None:
                d.require(array.shape[0] >= count, f"{name} dim 0 is {array.shape[0]}, expected at least count={count}")
        row_bytes = move.target.nbytes // move.target.shape[0]
        d.require(row_bytes == move.row_bytes, f"target {i} has rows of {row_bytes} bytes, expected {move.row_bytes}, as source {i}")
        text = f"source {i} has rows of {row_bytes} bytes, expected a multiple of 4 below 2^32"
        d.require(row_bytes % 4 == 0 and row_bytes < U32_LIMIT, text)
        for j, other in enumerate(moves):
            d.distinct(f"target {i}", move.target, f"source {j}", other.source)
            if j < i:
                d.distinct(f"target {i}", move.target, f"target {j}", other.target)
        args.source[i], args.target[i], args.row_words[i] = move.source.address, move.target.address, row_bytes // 4
    blocks = ceil_div(max(args.row_words), stream.device.kernel("move_rows").constants["words"])
    launch(stream, "move_rows", (blocks, count, len(moves)), args)


def cost_move_rows(moves: Sequence[Move], count: int) -> Cost:
    """One read and one write of every row; indices not counted."""
    return Cost(2 * count * sum(move.row_bytes for move in moves), 0)


def advance(stream: Stream, drawn: Array, tokens: Array, draft: int, draft_tokens: Array, draft_positions: Array) -> None:
    """Draft number `draft` of each session, 1 to k, has been drawn: it becomes a row of the verify pass and the input of the next draft.

    drawn [S] i32; tokens [R] i32: row s * (k + 1) + draft = max(0, drawn[s]); draft_tokens [S] i32 = the same; draft_positions [S] i32 = 1 more where
    it is not negative.
    """
    d = Dims("advance_drafts")
    d.match("drawn", drawn, "sessions", dtype=DType.I32)
    d.match("tokens", tokens, "rows", dtype=DType.I32)
    d.match("draft_tokens", draft_tokens, "sessions", dtype=DType.I32)
    d.match("draft_positions", draft_positions, "sessions", dtype=DType.I32)
    drafts = _drafts_of(d)
    d.require(1 <= draft <= drafts, f"draft is {draft}, expected 1 to {drafts}, the drafts of a session")
    args = advance_args(
        drawn=drawn.address,
        tokens=tokens.address,
        draft_tokens=draft_tokens.address,
        draft_positions=draft_positions.address,
        sessions=d["sessions"],
        drafts=drafts,
        draft=draft,
    )
    launch(stream, "advance_drafts", (1, 1, 1), args)


def mark_drafts(stream: Stream, seen: Array, slots: Array, tokens: Array, scratch: Array) -> None:
    """Penalty marks of each verify row: row s * (k + 1) + i of scratch = row slots[s] of seen, with tokens of rows 1 .. i of the session marked too.

    seen [slots, vocab] u8, 0 or 1; slots [S] i32, negative: rows of that session are left alone; tokens [R] i32, those outside [0, vocab) are not
    marked; scratch [R, vocab] u8. What a draw behind these drafts has seen.
    """
    d = Dims("mark_drafts")
    d.match("slots", slots, "sessions", dtype=DType.I32)
    d.match("tokens", tokens, "rows", dtype=DType.I32)
    d.match("seen", seen, "seen rows", "vocab", dtype=DType.U8)
    d.match("scratch", scratch, "rows", "vocab", dtype=DType.U8)
    d.distinct("seen", seen, "scratch", scratch)
    d.require(d["vocab"] < 1 << 31, f"vocab is {d['vocab']}, expected less than 2^31")
    drafts = _drafts_of(d)
    _require_drafts(d, stream, drafts)
    args = mark_drafts_args(seen=seen.address, slots=slots.address, tokens=tokens.address, scratch=scratch.address, vocab=d["vocab"], drafts=drafts)
    launch(stream, "mark_drafts", (ceil_div(d["vocab"], stream.device.kernel("mark_drafts").constants["tokens"]), d["sessions"], 1), args)


def cost_mark_drafts(scratch: Array, sessions: int) -> Cost:
    """One read of a session's row of marks, one write of each of its rows."""
    return Cost(scratch.nbytes + sessions * scratch.shape[1], 0)


def _drafts_of(d: Dims) -> int:
    """Drafts a session, of d["rows"] verify rows."""
    rows, sessions = d["rows"], d["sessions"]
    d.require(rows % sessions == 0 and rows > sessions, f"tokens dim 0 is {rows}, expected a multiple of sessions={sessions}, and at least twice it")
    return rows // sessions - 1
