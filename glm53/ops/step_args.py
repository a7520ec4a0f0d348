"""Argument structs of the kernels of a decode step (docs/decisions/0004-step-graph.md). Conventions: `args`."""

from __future__ import annotations

from ctypes import c_float, c_uint32, c_uint64, c_void_p

from glm53.ops.args import Args
from glm53.ops.history_args import fetch_args
from glm53.ops.pair_args import exchange_lists_args, sum_mail_args


class step_rows_args(Args):
    """Part ROWS of step_gemv, one block a query row: finishes what kv_a and the indexer's wk gave. History row: latent = norm of the first
    columns, rope part turned, stored at refs[r] as store_rows does. Index key (null: none): layer norm, RoPE on its first columns, appended as
    append does. On the owner of a pair the packed row also goes to the peer's mailbox, from which the peer's part takes it."""

    _fields_ = [
        ("row", c_void_p),  # [rows, latent + rope] T
        ("row_norm", c_void_p),  # [latent] T
        ("refs", c_void_p),  # [rows] u64; 0: the row is skipped
        ("error", c_void_p),  # [1] u32; null for unquantised formats
        ("key", c_void_p),  # [rows, key_width] T, or null
        ("key_norm", c_void_p),  # [key_width] T
        ("key_bias", c_void_p),  # [key_width] T
        ("key_tables", c_void_p),  # [sessions, key_table_stride] u64 extents of index keys
        ("sessions", c_void_p),  # [rows] i32
        ("outbox", c_void_p),  # [rows, row_bytes / 4] u64: mail number << 32 | word, on the owner of a pair; or null
        ("inbox", c_void_p),  # the same, on the peer: row, row_norm and error are null then; or null
        ("mail_counter", c_void_p),  # [1] u32: steps done; number = 2 * (counter * mail_per_step + mail_index) + 1
        ("mail_error", c_void_p),  # [1] u32: number of mail that did not come, or 0
        ("mail_budget", c_uint64),  # polls of one wait
        ("offsets", c_uint64 * 4),  # of the four spaces, in bytes
        ("row_eps", c_float),
        ("key_eps", c_float),
        ("row_format", c_uint32),  # 0 f32, 1 bf16, 2 q8g64, as WeightFormat
        ("latent", c_uint32),
        ("rope", c_uint32),
        ("row_bytes", c_uint32),
        ("key_width", c_uint32),
        ("key_table_stride", c_uint32),
        ("key_extent_rows", c_uint32),
        ("key_plane", c_uint32),
        ("key_side", c_uint32),  # keys of positions whose extent's number is key_side modulo key_sides are stored, in tables of these extents alone
        ("key_sides", c_uint32),  # 1 or 2
        ("mail_per_step", c_uint32),
        ("mail_index", c_uint32),
    ]


class step_give_args(Args):
    """Part GIVE of step_gemv, a block for each 256 entries of a query row: looks them up in the hot cache; the round's last block gives slots to what
    was missed and completes plan, fetch list and counters. Fields as hot_plan_args, and arrivals."""

    _fields_ = [
        ("selected", c_void_p),
        ("counts", c_void_p),
        ("sessions", c_void_p),
        ("round_starts", c_void_p),
        ("tables", c_void_p),
        ("states", c_void_p),
        ("slot_of", c_void_p),
        ("position_of", c_void_p),
        ("used", c_void_p),
        ("filled", c_void_p),
        ("hands", c_void_p),
        ("counters", c_void_p),
        ("plan", c_void_p),
        ("fetch_sources", c_void_p),
        ("fetch_targets", c_void_p),
        ("fetch_positions", c_void_p),
        ("fetch_counts", c_void_p),
        ("arrivals", c_void_p),  # [rounds, 4] u32, 0 before and after
        ("source_offset_bytes", c_uint64),
        ("k", c_uint32),  # at most 2,048
        ("table_stride", c_uint32),
        ("extent_rows", c_uint32),
        ("row_bytes", c_uint32),
        ("ring_rows", c_uint32),
        ("slots", c_uint32),
        ("positions", c_uint32),
        ("groups", c_uint32),
        ("group", c_uint32),
        ("source_stride_bytes", c_uint32),
        ("rows", c_uint32),
        ("rounds", c_uint32),
    ]


class step_place_args(Args):
    """Part PLACE of step_gemv, one block a query row: references of its selection into extents. Fields as plan_args."""

    _fields_ = [
        ("selected", c_void_p),  # [rows, k] i32
        ("counts", c_void_p),  # [rows] i32
        ("tables", c_void_p),  # [sessions, table_stride] u64
        ("sessions", c_void_p),  # [rows] i32
        ("plan", c_void_p),  # [rows, k] u64 row references, 0 past counts[r]
        ("k", c_uint32),
        ("table_stride", c_uint32),
        ("extent_rows", c_uint32),
        ("row_bytes", c_uint32),
        ("rows", c_uint32),
        ("_pad", c_uint32),
    ]


class step_router_args(Args):
    """Part ROUTER of step_gemv: when the last block of segment 0 (the router's logits, f32) is done, that block picks the experts as `router`
    does."""

    _fields_ = [
        ("bias", c_void_p),  # [experts] f32
        ("ids", c_void_p),  # [rows, k] i32 out
        ("weights", c_void_p),  # [rows, k] f32 out
        ("arrivals", c_void_p),  # [1] u32, 0 before and after
        ("experts", c_uint32),
        ("k", c_uint32),
        ("n_group", c_uint32),
        ("topk_group", c_uint32),
        ("normalise", c_uint32),
        ("scaling", c_float),
    ]


class step_gemv_args(Args):
    """Up to four products of the same x: y_s[b, r, n] = x[b, r] @ w_s[b, n]^T, after an optional RMS norm of x, with an epilogue each, and a part
    that runs in extra blocks. Grid: (part_blocks + blocks of all segments, 1, batch); the part runs at block_z 0. Epilogues: 0 y in T; 1 y in
    f32; 2 RoPE on columns [rope_offset, rope_offset + rope_dim) of each head_stride columns, y in T; 3 SiLU: weight rows j and n + j give y[j]
    = T(silu(gate)) * up; 4 y = residual + the sums of both halves of k, f32, segment 0 alone and no norm (bf16: step_halves). Parts: 0 none, 1
    ROWS (a block for each row; one more rehearses GIVE), 2 GIVE, 3 FETCH, 4 ROUTER (no extra blocks), 5 PLACE. Decision 0004 has the order of
    additions."""

    _fields_ = [
        ("x", c_void_p),  # [batch, rows, k] T
        ("norm", c_void_p),  # [k] T, or null: no norm
        ("h", c_void_p),  # [rows, k] T out, or null: the normed rows; beside bf16 x a share by each block of the router
        ("residual", c_void_p),  # [rows, n] T with the strides of y, epilogue 4; may be y
        ("positions", c_void_p),  # [rows] i32, epilogue 2 and part ROWS
        ("inv_freq", c_void_p),  # [rope_dim / 2] f32, likewise
        ("partial", c_void_p),  # [blocks of columns, 2, sums of a block] f32, epilogue 4 with bf16 x: two blocks share the columns, each half of k
        ("arrivals", c_void_p),  # [blocks of columns] u32, likewise; 0 before and after
        ("codes", c_void_p * 4),  # [batch, n, k] in the segment's format; null: no such segment
        ("scales", c_void_p * 4),  # [batch, n, k / 64] f16, quantised formats
        ("y", c_void_p * 4),  # [batch, rows, n]
        ("part_rows", step_rows_args),
        ("part_give", step_give_args),
        ("part_fetch", fetch_args),
        ("part_router", step_router_args),
        ("part_place", step_place_args),
        ("mail", sum_mail_args),  # epilogue 4 with bf16 x on a side of a pair: k is one half, the other device's sums are added
        ("tells", c_void_p),  # [2] u32, or null; bf16 x and part GIVE: its products tell by it that they are stored (hipsrc/kernels/stored.h)
        ("awaits", c_void_p),  # `tells` of the launch before, or null; bf16 x and part FETCH: its products wait for that alone
        ("x_batch_stride", c_uint64),
        ("y_batch_stride", c_uint64),
        ("x_stride", c_uint32),  # between rows
        ("rows", c_uint32),
        ("k", c_uint32),
        ("eps", c_float),
        ("n", c_uint32 * 4),  # columns of y
        ("y_stride", c_uint32 * 4),
        ("format", c_uint32 * 4),  # WeightFormat
        ("epilogue", c_uint32 * 4),
        ("head_stride", c_uint32 * 4),  # epilogue 2
        ("rope_offset", c_uint32 * 4),
        ("blocks", c_uint32 * 4),  # of each segment in one batch, x in bf16
        ("rope_dim", c_uint32),
        ("part", c_uint32),
        ("part_blocks", c_uint32),
        ("rounds", c_uint32),  # of GIVE and FETCH
        ("wide", c_uint32),  # 1: 32 lanes, or 8 waves, share a column: k >= 1,024; of halves, or of one half alone, the first half of k
        ("waiting_blocks", c_uint32),  # the first blocks, which may wait for another device: those of part ROWS with an inbox; all with mail
        ("narrow", c_uint32),  # 1: a block has 16 rows of weights; wide, one row of bf16 x; epilogue 4 with mail alone
        ("turns", c_uint32),  # step_*_crowd_*: the equal shares that the rows are divided into
    ]


class step_experts_args(Args):
    """act[p, j] = T(T(silu(gate)) * up) of pair p = row * slots + slot at expert ids[p], with gate and up in T. Grid: (pairs, blocks of columns), or
    (blocks that share the work, at least as many as pairs). part_blocks of FETCH come before those; in a grid of pairs they fill whole columns."""

    _fields_ = [
        ("x", c_void_p),  # [rows, k] T, normed
        ("ids", c_void_p),  # [rows, slots] i32; outside [0, experts): the pair gives zeros
        ("codes", c_void_p),  # [experts, 2 * n, k]: gate rows, then up rows
        ("scales", c_void_p),  # [experts, 2 * n, k / 64] f16, or null
        ("act", c_void_p),  # [rows * slots, n] T
        ("rows", c_uint32),
        ("slots", c_uint32),
        ("experts", c_uint32),
        ("n", c_uint32),
        ("k", c_uint32),
        ("format", c_uint32),
        ("blocks", c_uint32),  # of products, where they share the work
        ("part_blocks", c_uint32),  # of part FETCH
        ("rounds", c_uint32),
        ("_pad", c_uint32),
        ("part_fetch", fetch_args),
    ]


class step_down_args(Args):
    """y[r, c] = T(residual[r, c] + (sum over slots ascending of (weight * act) @ down[expert]^T + shared_act @ shared_down^T)) in f32; T f32: weight
    times the slot's sum. The sums of both halves of k are added last. On a device of a pair k is one half: with mail, T bf16, the other device's sums
    are added; without a residual y = the sum. Grid: (rows, blocks of columns; T bf16 with both halves: 2 of each), or (blocks that share
    the work, at least as many as rows)."""

    _fields_ = [
        ("act", c_void_p),  # [rows * slots, k] T
        ("ids", c_void_p),  # [rows, slots] i32
        ("weights", c_void_p),  # [rows, slots] f32
        ("codes", c_void_p),  # [experts, n, k]
        ("scales", c_void_p),  # [experts, n, k / 64] f16, or null
        ("shared_act", c_void_p),  # [rows, shared_k] T
        ("shared_codes", c_void_p),  # [n, shared_k]
        ("shared_scales", c_void_p),
        ("residual", c_void_p),  # [rows, n] T; may be y; or null
        ("y", c_void_p),  # [rows, n] T; without a residual f32
        ("partial", c_void_p),  # [rows, blocks of columns, 2, sums of a block] f32, T bf16: two blocks share the columns, each half of k
        ("arrivals", c_void_p),  # [rows, blocks of columns] u32, likewise; 0 before and after
        ("mail", sum_mail_args),
        ("rows", c_uint32),
        ("slots", c_uint32),
        ("experts", c_uint32),
        ("n", c_uint32),
        ("k", c_uint32),
        ("shared_k", c_uint32),
        ("format", c_uint32),
        ("shared_format", c_uint32),
        ("waiting_blocks", c_uint32),  # the first blocks, which may wait for another device: all with mail
        ("blocks", c_uint32),  # of the launch, where they share the work
    ]


class step_attend_args(Args):
    """One split of the planned rows (64 of them) for 16 heads of one query row: partial sums of softmax(s) * latent, s as attend_args. Splits past
    counts[r] are not written. Grid: (splits, ceil(heads / 16), rows)."""

    _fields_ = [
        ("q_latent", c_void_p),  # [rows, heads, latent] T
        ("q", c_void_p),  # [rows, heads, q_head_stride] T; the rope part starts at q_rope_offset of each head
        ("plan", c_void_p),  # [rows, k] u64 row references
        ("counts", c_void_p),  # [rows] i32
        ("partial", c_void_p),  # [rows, heads, splits, latent] f32: sum of exp(s - top) * latent
        ("tops", c_void_p),  # [rows, heads, splits] f32: largest s of the split
        ("masses", c_void_p),  # [rows, heads, splits] f32: sum of exp(s - top)
        ("offsets", c_uint64 * 4),  # of the four spaces, in bytes
        ("heads", c_uint32),
        ("latent", c_uint32),
        ("rope", c_uint32),
        ("k", c_uint32),
        ("splits", c_uint32),  # ceil(k / 64)
        ("q_head_stride", c_uint32),
        ("q_rope_offset", c_uint32),
        ("scale", c_float),
    ]


class step_expand_args(Args):
    """o[r, h] = T(o_latent[r, h] @ wv[h]^T), o_latent = T(the splits joined, ascending); zeros where counts[r] is 0."""

    _fields_ = [
        ("partial", c_void_p),  # as step_attend_args
        ("tops", c_void_p),
        ("masses", c_void_p),
        ("counts", c_void_p),  # [rows] i32
        ("codes", c_void_p),  # [heads, v, latent]
        ("scales", c_void_p),  # [heads, v, latent / 64] f16, or null
        ("o", c_void_p),  # [rows, heads, v] T
        ("rows", c_uint32),
        ("heads", c_uint32),
        ("latent", c_uint32),
        ("v", c_uint32),
        ("k", c_uint32),
        ("splits", c_uint32),
        ("format", c_uint32),
        ("_pad", c_uint32),
    ]


class step_join_args(Args):
    """step_attend_args in two launches without partial results, for several query rows (attend_rows.h): weights, scales, tops and masses by the
    first, x by the second. Grids: (splits, ceil(heads / 32), rows), then (latent / 64, ceil(heads / 16), rows)."""

    _fields_ = [
        ("q_latent", c_void_p),  # to counts: as step_attend_args
        ("q", c_void_p),
        ("plan", c_void_p),
        ("counts", c_void_p),
        ("weights", c_void_p),  # [rows, ceil(heads / 16), splits, 16, 64] f32: exp(s - top of the split), as join has them in LDS
        ("scales", c_void_p),  # [rows, splits, 8, 64] f32: of the planned rows' groups
        ("codes", c_void_p),  # [rows, splits, 8, 64, 64] i8: of the same, as join has them in LDS
        ("tops", c_void_p),  # tops and masses as step_attend_args
        ("masses", c_void_p),
        ("x", c_void_p),  # [rows, heads, 512] bf16: the splits joined, ascending; zeros where counts[r] is 0
        ("offsets", c_uint64 * 4),
        ("heads", c_uint32),
        ("rope", c_uint32),
        ("k", c_uint32),
        ("splits", c_uint32),
        ("q_head_stride", c_uint32),
        ("q_rope_offset", c_uint32),
        ("scale", c_float),
        ("_pad", c_uint32),
    ]


class step_score_args(Args):
    """index_score_args for a step, and the first part of the selection: histogram[r, key >> 20] counts the order keys (scan.h) of all positions <=
    positions[r], on a side of a pair of those that it holds. Rows with positions[r] < k do nothing. Grid: (blocks, rows), fixed."""

    _fields_ = [
        ("q", c_void_p),  # [rows, heads, dim] T
        ("gate", c_void_p),  # [rows, heads] f32
        ("tables", c_void_p),  # [sessions, table_stride] u64 index-key extents
        ("sessions", c_void_p),  # [rows] i32
        ("positions", c_void_p),  # [rows] i32
        ("scores", c_void_p),  # [rows, score_stride] f32
        ("histogram", c_void_p),  # [rows, 4096] u32, zero before; bin 128 j + 4 i + b lies at 128 i + 4 j + b, i < 32, b < 4
        ("heads", c_uint32),
        ("dim", c_uint32),
        ("table_stride", c_uint32),
        ("extent_rows", c_uint32),
        ("plane", c_uint32),
        ("key_bytes", c_uint32),
        ("score_stride", c_uint32),
        ("k", c_uint32),
        ("blocks", c_uint32),
        ("key_scale", c_float),
        ("head_scale", c_float),
        ("side", c_uint32),
        ("sides", c_uint32),
        ("_pad", c_uint32),
    ]


class step_topk_args(Args):
    """Second part: the selection, or list, of topk_args, exact, positions ascending. The bin that holds the k-th largest key comes from the
    histogram. Grid: (blocks, rows), fixed."""

    _fields_ = [
        ("scores", c_void_p),  # [rows, score_stride] f32
        ("positions", c_void_p),  # [rows] i32
        ("histogram", c_void_p),  # [rows, 4096] u32
        ("cleared", c_void_p),  # [rows, 4096] u32, 0 after: the histogram, for the next step; another one where a launch is repeated
        ("entries", c_void_p),  # [rows, score_stride] u64 scratch: of each block, what may be selected, positions ascending
        ("entry_counts", c_void_p),  # [rows, count_stride] u32 scratch: how many, a block
        ("arrivals", c_void_p),  # [rows] u32, 0 before and after
        ("drawn", c_void_p),  # [draws, k] i32 ascending positions, then -1, that replace the selection, for benchmarks and tests; or null
        ("draw_index", c_void_p),  # [1] u32: draws used are (index + row) mod draws
        ("selected", c_void_p),  # [rows, k] i32 out, -1 past counts[r]; null on a side of a pair
        ("best", c_void_p),  # [rows, k] u64 out, as topk_args; null on a single device
        ("counts", c_void_p),  # [rows] i32 out
        ("score_stride", c_uint32),  # a multiple of 32
        ("count_stride", c_uint32),  # at least blocks
        ("k", c_uint32),
        ("blocks", c_uint32),
        ("draws", c_uint32),
        ("extent_rows", c_uint32),  # of the index keys; unused on a single device
        ("side", c_uint32),
        ("sides", c_uint32),
    ]


class select_both_args(Args):
    """The selection of a pair in one launch: step_topk_args of a side, `best` scratch; where the selection goes, as exchange_lists_args without
    lists; words of row r at r * (2 * 4096 + 1): keys [4096], ~positions [4096], count. Grid: (topk.blocks, rows)."""

    _fields_ = [("topk", step_topk_args), ("mail", exchange_lists_args)]


class step_begin_args(Args):
    """x[r] = embedding of tokens[r], and the reference of the row that query row r is about to write: place 1 in its session's extent, place 2
    in the hot buffer (place_args). Grid: (rows, blocks of 1,024 columns)."""

    _fields_ = [
        ("table", c_void_p),  # [vocab, hidden] W
        ("tokens", c_void_p),  # [rows] i32; outside [0, vocab): a row of NaN
        ("x", c_void_p),  # [rows, hidden] T
        ("sessions", c_void_p),  # [rows] i32
        ("positions", c_void_p),  # [rows] i32; negative: padding, its reference is 0
        ("tables", c_void_p),  # [sessions, table_stride] u64, place 1
        ("states", c_void_p),  # [sessions] kv_state, place 2
        ("refs", c_void_p),  # [rows] u64 out
        ("hidden", c_uint32),
        ("vocab", c_uint32),
        ("place", c_uint32),
        ("table_stride", c_uint32),
        ("extent_rows", c_uint32),
        ("row_bytes", c_uint32),
        ("ring_rows", c_uint32),
        ("side", c_uint32),  # of a pair: 0 has the first columns
        ("other_hidden", c_uint32),  # columns of the table that the other device has, 0: none; hidden: those of this one
        ("waiting_blocks", c_uint32),  # all with mail, else 0
        ("mail", sum_mail_args),  # of words of two columns (T = bf16) or one; it then puts both sides' columns into x
    ]


class step_end_args(Args):
    """After the last layer: the round tags of the sessions move on, the step counter too; if tokens were drawn, positions and sampling
    counters move on by one and a record goes to the ring in host memory. Record: step number, row error, exchange error, then per row token,
    bits of its log-probability, and `tops` ids and `tops` log-probabilities. One block."""

    _fields_ = [
        ("tokens", c_void_p),  # [rows] i32 drawn, or null: none were
        ("logprobs", c_void_p),  # [rows] f32
        ("top_ids", c_void_p),  # [rows, tops] i32; unused where tops is 0
        ("top_logprobs", c_void_p),  # [rows, tops] f32
        ("positions", c_void_p),  # [rows] i32; negative stays
        ("params", c_void_p),  # [rows] sample_row
        ("states", c_void_p),  # [sessions] kv_state, or null: no hot cache
        ("round_sessions", c_void_p),  # [rounds] i32; negative: padding
        ("error", c_void_p),  # [1] u32 of the row quantiser, 0 after a record
        ("link_error", c_void_p),  # [1] u32 of the exchanges of a pair; or null
        ("counter", c_void_p),  # [1] u32: steps done
        ("exchanged", c_void_p),  # [1] u32: exchanges of a pair done, which moves on by `exchanges`; or null
        ("ring", c_void_p),  # [ring_steps, record_words] u32 in host memory
        ("rows", c_uint32),
        ("rounds", c_uint32),
        ("tops", c_uint32),
        ("ring_steps", c_uint32),  # a power of two
        ("record_words", c_uint32),
        ("exchanges", c_uint32),
    ]
