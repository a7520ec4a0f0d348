"""Argument structs of the kernels: the one place where their fields are written down; those of a decode step are in `step_args`, those of
history rows in `history_args`, those of a pair in `pair_args`.

Each kernel takes one of these by value. hipsrc/args_header.py writes the C twins with a static assertion per offset. No imports but ctypes.
Field comments: `name [shape] dtype`. T = the activation type of the kernel variant (f32 or bf16), W = its weight type.
Strides are in elements unless the name says bytes. rows = query rows of this launch.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int32, c_uint32, c_uint64, c_void_p


class Args(ctypes.Structure):
    """Base of the argument structs. Pointers first, then 8-byte, then 4-byte fields, so that no compiler inserts padding."""


class embed_args(Args):
    """y[r] = table[token[r]]"""

    _fields_ = [
        ("table", c_void_p),  # [vocab, hidden] W
        ("tokens", c_void_p),  # [rows] i32; outside [0, vocab): a row of NaN
        ("y", c_void_p),  # [rows, hidden] T
        ("hidden", c_uint32),
        ("vocab", c_uint32),
    ]


class norm_args(Args):
    """RMS norm: y = w * T(x / sqrt(mean(x^2) + eps)); layer norm: y = w * (x - mean) / sqrt(var + eps) + bias"""

    _fields_ = [
        ("x", c_void_p),  # [rows, width] T, row stride x_stride
        ("weight", c_void_p),  # [width] T
        ("bias", c_void_p),  # [width] T, layer norm only, else null
        ("y", c_void_p),  # [rows, width] T, row stride y_stride
        ("width", c_uint32),
        ("x_stride", c_uint32),
        ("y_stride", c_uint32),
        ("eps", c_float),
    ]


class rope_args(Args):
    """Interleaved rotary embedding, in place on columns [offset, offset + dim) of each head of each row."""

    _fields_ = [
        ("x", c_void_p),  # [rows, heads, head_stride] T, row stride row_stride
        ("positions", c_void_p),  # [rows] i32
        ("inv_freq", c_void_p),  # [dim / 2] f32
        ("row_stride", c_uint32),
        ("head_stride", c_uint32),
        ("heads", c_uint32),
        ("offset", c_uint32),
        ("dim", c_uint32),
    ]


class matmul_args(Args):
    """y[b, r, n] = sum_k x[b, r, k] * w[b, n, k] (+ residual[b, r, n]); `batch` independent products, e.g. one per head."""

    _fields_ = [
        ("x", c_void_p),  # [batch, rows, k] X
        ("w", c_void_p),  # [batch, n, k] W: codes
        ("scales", c_void_p),  # [batch, n, k / 64] f16, or null where W is not quantised
        ("residual", c_void_p),  # [batch, rows, n] Y with the strides of y, or null; may be y itself
        ("y", c_void_p),  # [batch, rows, n] Y
        ("x_batch_stride", c_uint64),
        ("w_batch_stride", c_uint64),
        ("y_batch_stride", c_uint64),
        ("rows", c_uint32),
        ("n", c_uint32),
        ("k", c_uint32),
        ("x_stride", c_uint32),  # between rows
        ("w_stride", c_uint32),
        ("y_stride", c_uint32),
    ]


class silu_mul_args(Args):
    """y = T(silu(gate)) * up, from rows that hold gate then up"""

    _fields_ = [
        ("x", c_void_p),  # [rows, 2 * width] T: gate columns, then up columns
        ("y", c_void_p),  # [rows, width] T
        ("count", c_uint64),  # rows * width
        ("width", c_uint32),
        ("_pad", c_uint32),
    ]


class append_args(Args):
    """Writes one row per query row into its session's extents: row p, or on a side of a pair row share::row_of(p), lies at
    table[session][row / extent_rows] + (plane * extent_rows + row % extent_rows) * row_bytes."""

    _fields_ = [
        ("x", c_void_p),  # [rows, width] T, row stride x_stride
        ("tables", c_void_p),  # [sessions, table_stride] u64 extent addresses
        ("sessions", c_void_p),  # [rows] i32 session index
        ("positions", c_void_p),  # [rows] i32; negative: padding, skipped, as are positions of the other side
        ("x_stride", c_uint32),
        ("width", c_uint32),
        ("table_stride", c_uint32),
        ("extent_rows", c_uint32),
        ("plane", c_uint32),
        ("row_bytes", c_uint32),
        ("side", c_uint32),  # of `sides`, which is 1 on a single device
        ("sides", c_uint32),
    ]


class index_score_args(Args):
    """score[r, p] = sum_j gate[r, j] * head_scale * max(0, <q[r, j], key[p]> * key_scale) for p <= positions[r]; other columns untouched"""

    _fields_ = [
        ("q", c_void_p),  # [rows, heads, dim] T
        ("gate", c_void_p),  # [rows, heads] f32
        ("tables", c_void_p),  # [sessions, table_stride] u64 index-key extents
        ("sessions", c_void_p),  # [rows] i32
        ("positions", c_void_p),  # [rows] i32
        ("scores", c_void_p),  # [rows, score_stride] f32; a side of a pair has the columns and keys of its own rows (share.h)
        ("heads", c_uint32),
        ("dim", c_uint32),
        ("table_stride", c_uint32),
        ("extent_rows", c_uint32),
        ("plane", c_uint32),
        ("key_bytes", c_uint32),  # bytes of one index key, dim * sizeof(T)
        ("score_stride", c_uint32),
        ("key_scale", c_float),
        ("head_scale", c_float),
        ("side", c_uint32),
        ("sides", c_uint32),
        ("_pad", c_uint32),
    ]


class topk_args(Args):
    """The min(k, positions[r] + 1) positions with the largest score, ties to the lowest position, written in ascending position order."""

    _fields_ = [
        ("scores", c_void_p),  # [rows, score_stride] f32; columns past positions[r] are not read, and none while positions[r] < k
        ("positions", c_void_p),  # [rows] i32; -1: no position, count 0
        ("selected", c_void_p),  # [rows, k] i32; entries past counts[r] are -1; null on a side of a pair
        ("best", c_void_p),  # [rows, k] u64: the list of a side (merge.h); entries past counts[r] stay as they are; null on a single device
        ("counts", c_void_p),  # [rows] i32; of a list 0 where positions[r] < k
        ("score_stride", c_uint32),
        ("k", c_uint32),
        ("extent_rows", c_uint32),  # of the index keys; unused on a single device
        ("side", c_uint32),
        ("sides", c_uint32),
        ("_pad", c_uint32),
    ]


class attend_args(Args):
    """Absorbed MLA attention over the planned rows: score = (<q_latent, latent> + <q_rope, rope>) * scale, softmax in f32 over the rows of
    the plan in plan order, out[r, h] = sum_n p[n] * latent[n]. Row formats f32, bf16, q8g64 (store_rows_args); values are read into f32."""

    _fields_ = [
        ("q_latent", c_void_p),  # [rows, heads, latent] T
        ("q", c_void_p),  # [rows, heads, q_head_stride] T; the rope part starts at q_rope_offset of each head
        ("plan", c_void_p),  # [rows, k] u64 row references
        ("counts", c_void_p),  # [rows] i32
        ("out", c_void_p),  # [rows, heads, latent] T
        ("offsets", c_uint64 * 4),  # of the four spaces, in bytes
        ("rows", c_uint32),
        ("heads", c_uint32),
        ("latent", c_uint32),
        ("rope", c_uint32),
        ("k", c_uint32),
        ("q_head_stride", c_uint32),
        ("q_rope_offset", c_uint32),
        ("scale", c_float),
    ]


class router_args(Args):
    """Sigmoid router with correction bias: pick by sigmoid + bias (groups first if n_group > 1), weigh by sigmoid, ties to the lowest."""

    _fields_ = [
        ("logits", c_void_p),  # [rows, experts] f32
        ("bias", c_void_p),  # [experts] f32
        ("ids", c_void_p),  # [rows, k] i32, in order of decreasing choice
        ("weights", c_void_p),  # [rows, k] f32
        ("experts", c_uint32),
        ("k", c_uint32),
        ("n_group", c_uint32),
        ("topk_group", c_uint32),
        ("normalise", c_uint32),  # 1: divide by the sum of the chosen + 1e-20
        ("scaling", c_float),
    ]


class expert_sort_args(Args):
    """Groups the rows * k (row, slot) pairs by expert, stable by pair index. One block."""

    _fields_ = [
        ("ids", c_void_p),  # [pairs] i32
        ("offsets", c_void_p),  # [experts + 1] i32: first sorted index of each expert
        ("sorted_pairs", c_void_p),  # [pairs] i32: pair = row * k + slot
        ("pairs", c_uint32),
        ("experts", c_uint32),
    ]


class expert_matmul_args(Args):
    """For each pair p with expert e: y[p] = x[row(p)] @ w[e]^T, where row(p) = p / pairs_per_row. Pairs come grouped by expert (offsets,
    sorted_pairs)."""

    _fields_ = [
        ("x", c_void_p),  # [.., k] T
        ("w", c_void_p),  # [experts, n, k] W: codes
        ("scales", c_void_p),  # [experts, n, k / 64] f16, or null where W is not quantised
        ("y", c_void_p),  # [pairs, n] T
        ("offsets", c_void_p),  # [experts + 1] i32
        ("sorted_pairs", c_void_p),  # [pairs] i32
        ("w_expert_stride", c_uint64),
        ("pairs_per_row", c_uint32),  # top-k for gate/up (x per row), 1 for down (x per pair)
        ("n", c_uint32),
        ("k", c_uint32),
        ("stride", c_uint32),  # between rows of x and of w: k, or more where a part of k is multiplied
    ]


class expert_sum_args(Args):
    """sum[r] = (sum over slots of weight * expert_out) + sum[r], in f32, slots ascending"""

    _fields_ = [
        ("expert_out", c_void_p),  # [rows, k, width] T
        ("weights", c_void_p),  # [rows, k] f32
        ("sum", c_void_p),  # [rows, width] f32: the shared expert's, then both
        ("k", c_uint32),
        ("width", c_uint32),
    ]


class sample_row(Args):
    """Sampling parameters of one row, in device memory."""

    _fields_ = [
        ("seed", c_uint64),
        ("position", c_uint32),  # position of the token being drawn: the counter of the generator
        ("seen_row", c_int32),  # row of `seen`, -1: no repetition penalty
        ("temperature", c_float),  # 0: greedy
        ("top_p", c_float),
        ("min_p", c_float),
        ("repetition_penalty", c_float),
        ("top_k", c_uint32),  # 0: off
        ("n_logprobs", c_uint32),  # 0 to max_logprobs
        ("mask_row", c_int32),  # row of `masks`, -1: every token may be drawn
        ("_pad", c_uint32),
    ]


class sample_chunk(Args):
    """What one block finds out about its tokens of a row, in device memory. An entry: order key << 32 | ~token, the first of the order largest."""

    _fields_ = [
        ("raw", c_uint64),  # entry of the largest raw logit
        ("best", c_uint64),  # of the largest allowed one after the repetition penalty
        ("mass", c_uint64),  # of the tokens that are kept for sure
        ("sum", c_float),  # sum exp(l - largest) of the raw logits
        ("_pad", c_uint32),
    ]


class sample_state(Args):
    """What the launches of a draw tell each other about a row, in device memory."""

    _fields_ = [
        ("mass_before", c_uint64),  # of the bins before `sure`
        ("total", c_uint64),  # mass of the row before any filter
        ("raw_key", c_uint32),  # order key of the largest raw logit
        ("key", c_uint32),  # of the largest allowed one after the repetition penalty
        ("log_total", c_float),  # log(sum exp(l - largest)) of the raw logits
        ("sure", c_uint32),  # tokens of the bins before are kept
        ("last", c_uint32),  # tokens of the bins after are dropped
        ("count_left", c_uint32),  # tokens that top-k keeps of the bins between; 0: all
        ("listed", c_uint32),  # tokens of the bins between
        ("_pad", c_uint32),
    ]


class sample_args(Args):
    """Draws one token per row: mask, repetition penalty, temperature, top-k, top-p, min-p, then the inverse distribution at a Philox 4x32-10 draw
    keyed by (seed, position). Log-probabilities are those of the raw logits (before mask, penalty, temperature and filters). Of all three kernels."""

    _fields_ = [
        ("logits", c_void_p),  # [rows, vocab] f32
        ("params", c_void_p),  # [rows] sample_row
        ("seen", c_void_p),  # [.., vocab] u8, 1: the token stands in the prompt or output; null if no row has a penalty
        ("masks", c_void_p),  # [.., ceil(vocab / 32)] u32, bit i of word w: token 32 w + i may be drawn; null if no row has a mask
        ("tokens", c_void_p),  # [rows] i32 out; -1 if no logit that may be drawn is above -inf
        ("logprobs", c_void_p),  # [rows] f32 out: of the token drawn; or null
        ("top_ids", c_void_p),  # [rows, max_logprobs] i32 out, or null
        ("top_logprobs", c_void_p),  # [rows, max_logprobs] f32 out, or null
        ("records", c_void_p),  # [rows, chunks] sample_chunk scratch
        ("groups", c_void_p),  # [rows, chunks, 16] u64 scratch: largest entry of each 128 tokens
        ("states", c_void_p),  # [rows] sample_state scratch
        ("masses", c_void_p),  # [rows, bins] u64 scratch
        ("counts", c_void_p),  # [rows, bins] u32 scratch
        ("entries", c_void_p),  # [rows, vocab] u64 scratch
        ("arrivals", c_void_p),  # [rows] u32 scratch, 0 between launches
        ("vocab", c_uint32),
        ("chunks", c_uint32),
        ("blocks", c_uint32),  # of a row
        ("max_logprobs", c_uint32),
        ("marks", c_uint32),  # 1: tokens drawn are marked in `seen`; then no two rows share a row of it
        ("_pad", c_uint32),
    ]


class dequant_args(Args):
    """y[r, c] = W(float(x[r, c]) * scale[r / 128, c / 128]); scale null: a plain conversion (e4m3 needs one)."""

    _fields_ = [
        ("x", c_void_p),  # [rows, cols] e4m3, bf16 or f32
        ("scale", c_void_p),  # [ceil(rows / 128), ceil(cols / 128)] f32 or null
        ("y", c_void_p),  # [rows, cols] W
        ("rows", c_uint32),
        ("cols", c_uint32),
    ]


class quantise_args(Args):
    """Codes and scales of x, or of float(x[r, c]) * block_scale[r / 128, c / 128], in a quantised weight format (weight_format.h). What is not
    finite, or needs a scale beyond f16, sets error[0] to 1 + r (atomically, the largest stays)."""

    _fields_ = [
        ("x", c_void_p),  # [rows, k] e4m3, bf16 or f32
        ("block_scale", c_void_p),  # [ceil(rows / 128), ceil(k / 128)] f32 or null
        ("codes", c_void_p),  # [rows, k] in the format
        ("scales", c_void_p),  # [rows, k / 64] f16
        ("error", c_void_p),  # [1] u32
        ("groups", c_uint32),  # rows * k / 64
        ("row_groups", c_uint32),  # k / 64
    ]


class fill_random_args(Args):
    """Weights from a counter: the bits of 16-byte word i depend on seed and i only. Plain: value = mean + step * a uniform integer of 24 (f32) or 16
    (bf16) bits, signed. Quantised: uniform codes; every scale is `scale`, in q4g64 with a sign drawn for the group."""

    _fields_ = [
        ("codes", c_void_p),  # [count] W
        ("scales", c_void_p),  # [count / 64] f16, or null where W is not quantised
        ("count", c_uint64),  # weights
        ("seed", c_uint64),
        ("mean", c_float),
        ("step", c_float),
        ("scale", c_uint32),  # f16 bits
        ("_pad", c_uint32),
    ]


class split_kv_b_args(Args):
    """kv_b [heads, nope + v, latent] -> wk [heads, latent, nope] (transposed) and wv [heads, v, latent]"""

    _fields_ = [
        ("kv_b", c_void_p),  # [heads * (nope + v), latent] W
        ("wk", c_void_p),  # [heads, latent, nope] W
        ("wv", c_void_p),  # [heads, v, latent] W
        ("heads", c_uint32),
        ("nope", c_uint32),
        ("v", c_uint32),
        ("latent", c_uint32),
    ]


class litmus_args(Args):
    """Message passing: the sender stores data words, then the sequence number; the receiver waits for the number and checks the data."""

    _fields_ = [
        ("mailbox", c_void_p),  # [1 + words] u64: sequence, then data
        ("reply", c_void_p),  # [1] u64: sequence echoed by the receiver
        ("result", c_void_p),  # [2] u64: rounds done, first bad round + 1
        ("budget", c_uint64),  # polls per wait
        ("rounds", c_uint32),
        ("words", c_uint32),
    ]


class counter_args(Args):
    """One node of the graph litmus: state[slot] = state[slot] * 6364136223846793005 + step[0], so that order and count show in the result."""

    _fields_ = [
        ("state", c_void_p),  # [slots] u64
        ("step", c_void_p),  # [1] u64, changes between replays
        ("slot", c_uint32),
        ("_pad", c_uint32),
    ]


class copy_words_args(Args):
    """y[i] = x[i] for count 16-byte words; x may be registered host memory or a peer's."""

    _fields_ = [
        ("x", c_void_p),
        ("y", c_void_p),
        ("count", c_uint64),
    ]
