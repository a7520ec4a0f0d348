"""Argument structs of the small kernels of speculative decoding with the MTP layer, as `args`.

A round: S sessions of k drafts each, R = S * (k + 1) verify rows; row s * (k + 1) + i of session s has the token drawn last (i = 0) or draft i.
"""

from __future__ import annotations

from ctypes import c_float, c_uint32, c_void_p

from glm53.ops.args import Args


class join_inputs_args(Args):
    """y[r] = rms_norm(x[r]), then rms_norm(hidden[r]); each as norm_args has it. Grid: (rows, 2)."""

    _fields_ = [
        ("x", c_void_p),  # [rows, n] T
        ("hidden", c_void_p),  # [rows, n] T
        ("x_norm", c_void_p),  # [n] T
        ("hidden_norm", c_void_p),  # [n] T
        ("y", c_void_p),  # [rows, 2 * n] T
        ("n", c_uint32),
        ("eps", c_float),
    ]


class accept_args(Args):
    """The end of a verify pass: how many drafts the target drew as well, and all that the next rows need of it. Grid: a block a session."""

    _fields_ = [
        ("tokens", c_void_p),  # [rows] i32: rows i > 0 hold draft i; row 0 of a session becomes the token drawn last
        ("drawn", c_void_p),  # [rows] i32: the target's draws; -1: nothing could be drawn
        ("positions", c_void_p),  # [rows] i32: of the rows; -1: no draft there; row 0 negative: no session there
        ("params", c_void_p),  # [rows] sample_row
        ("draft_params", c_void_p),  # [drafts, sessions] sample_row out
        ("accepted", c_void_p),  # [sessions] i32 out
        ("front_tokens", c_void_p),  # [rows] i32 out
        ("front_positions", c_void_p),  # [rows] i32 out
        ("last", c_void_p),  # [sessions] i32 out: the row whose draw came last
        ("slots", c_void_p),  # [sessions] i32: rows of `seen`
        ("seen", c_void_p),  # [.., vocab] u8; or null: nothing is marked
        ("logprobs", c_void_p),  # [rows] f32
        ("top_ids", c_void_p),  # [rows, tops] i32; unused where tops is 0
        ("top_logprobs", c_void_p),  # [rows, tops] f32
        ("error", c_void_p),  # [1] u32 of the row quantiser, 0 after
        ("link_error", c_void_p),  # [1] u32 of the exchanges of a pair; or null
        ("counter", c_void_p),  # [1] u32: steps done
        ("ring", c_void_p),  # [ring_steps, record_words] u32 in host memory
        ("sessions", c_uint32),
        ("drafts", c_uint32),  # 1 to 5
        ("vocab", c_uint32),
        ("tops", c_uint32),
        ("ring_steps", c_uint32),  # a power of two
        ("record_words", c_uint32),
    ]


class move_rows_args(Args):
    """target[m][target_index[n]] = source[m][source_index[n]] for each of the moves. Grid: (blocks of 4,096 bytes, rows moved, moves)."""

    _fields_ = [
        ("source", c_void_p * 6),  # [.., row_words] u32
        ("target", c_void_p * 6),  # [.., row_words] u32
        ("source_index", c_void_p),  # [count] i32, negative: skipped; or null: row n
        ("target_index", c_void_p),  # as source_index
        ("row_words", c_uint32 * 6),
    ]


class advance_args(Args):
    """A draft becomes the input of the next one. One block."""

    _fields_ = [
        ("drawn", c_void_p),  # [sessions] i32
        ("tokens", c_void_p),  # [sessions, drafts + 1] i32: column `draft` is written
        ("draft_tokens", c_void_p),  # [sessions] i32 out
        ("draft_positions", c_void_p),  # [sessions] i32: one more, where not negative
        ("sessions", c_uint32),
        ("drafts", c_uint32),
        ("draft", c_uint32),  # 1 to drafts
        ("_pad", c_uint32),
    ]


class mark_drafts_args(Args):
    """scratch[s * (drafts + 1) + i] = seen[slots[s]], with tokens of rows 1 .. i of session s marked. Grid: (blocks of 4,096 tokens, sessions)."""

    _fields_ = [
        ("seen", c_void_p),  # [.., vocab] u8, 0 or 1
        ("slots", c_void_p),  # [sessions] i32; negative: skipped
        ("tokens", c_void_p),  # [sessions, drafts + 1] i32; outside [0, vocab): not marked
        ("scratch", c_void_p),  # [sessions * (drafts + 1), vocab] u8 out
        ("vocab", c_uint32),
        ("drafts", c_uint32),  # 1 to 5
    ]
