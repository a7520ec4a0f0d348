"""Argument structs of what two devices of a pair do together, as `args`. Numbers and mailboxes: hipsrc/kernels/mailbox.h."""

from __future__ import annotations

from ctypes import c_uint32, c_uint64, c_void_p

from glm53.ops.args import Args


class join_halves_args(Args):
    """y = T(residual + (low + high)). low, high [count] f32, residual, y [count] T; y may be residual"""

    _fields_ = [("low", c_void_p), ("high", c_void_p), ("residual", c_void_p), ("y", c_void_p), ("count", c_uint64)]


class sum_mail_args(Args):
    """How a kernel that makes sums posts them and gets those of the other device (hipsrc/kernels/sum_mail.h); outbox null: it does not"""

    _fields_ = [
        ("outbox", c_void_p),  # [2, capacity] u64 in the other device's uncached memory: number << 32 | value
        ("inbox", c_void_p),  # [2, capacity] u64, uncached: what the other side stores
        ("counter", c_void_p),  # [1] u32: steps done; number = counter * per_step + index
        ("error", c_void_p),  # [1] u32: number of an exchange that got no answer, or 0
        ("budget", c_uint64),  # polls of one wait
        ("capacity", c_uint32),
        ("per_step", c_uint32),
        ("index", c_uint32),  # from 1
        ("_pad", c_uint32),
    ]


class exchange_args(Args):
    """y = T(residual + (p0 + p1)): sums of this side and of the other, whose words come through mailboxes"""

    _fields_ = [
        ("sums", c_void_p),  # [count] f32: of this side
        ("outbox", c_void_p),  # [2, capacity] u64 in the other device's uncached memory: number << 32 | value
        ("inbox", c_void_p),  # [2, capacity] u64, uncached: what the other side stores
        ("residual", c_void_p),  # [count] T; may be y
        ("y", c_void_p),  # [count] T
        ("counter", c_void_p),  # [1] u32: steps done; number = counter * per_step + index
        ("error", c_void_p),  # [1] u32: number of an exchange that got no answer, or 0
        ("budget", c_uint64),  # polls of one wait
        ("count", c_uint32),
        ("capacity", c_uint32),
        ("per_step", c_uint32),
        ("index", c_uint32),  # from 1
        ("blocks", c_uint32),  # grid x
        ("_pad", c_uint32),
    ]


class exchange_parts_args(Args):
    """whole = the columns of side 0, then those of side 1, of elements of any type that fill words of 32 bits"""

    _fields_ = [
        ("mine", c_void_p),  # [rows, my_words] u32
        ("outbox", c_void_p),  # as exchange_args
        ("inbox", c_void_p),
        ("whole", c_void_p),  # [rows, my_words + other_words] u32
        ("counter", c_void_p),
        ("error", c_void_p),
        ("budget", c_uint64),
        ("rows", c_uint32),
        ("my_words", c_uint32),
        ("other_words", c_uint32),
        ("side", c_uint32),  # 0: mine come first
        ("capacity", c_uint32),
        ("per_step", c_uint32),
        ("index", c_uint32),
        ("blocks", c_uint32),
    ]


class join_parts_args(Args):
    """whole[r] = low[r], then high[r]"""

    _fields_ = [
        ("low", c_void_p),  # [rows, low_words] u32
        ("high", c_void_p),  # [rows, high_words] u32
        ("whole", c_void_p),  # [rows, low_words + high_words] u32
        ("low_words", c_uint32),
        ("high_words", c_uint32),
    ]


class place_rows_args(Args):
    """Copies packed row r to refs[r]."""

    _fields_ = [
        ("rows", c_void_p),  # [rows, row_bytes] u8, 16-byte aligned
        ("refs", c_void_p),  # [rows] u64; 0: the row is skipped
        ("offsets", c_uint64 * 4),  # of the four spaces, in bytes
        ("row_bytes", c_uint32),  # a multiple of 16
        ("_pad", c_uint32),
    ]


class merge_args(Args):
    """The selection of topk_args from the lists of both sides of a pair (hipsrc/kernels/merge.h), for each row. Grid: rows."""

    _fields_ = [
        ("entries", c_void_p),  # [rows, k] u64: list of this side, ascending by position; entries past counts[r] are not looked at
        ("counts", c_void_p),  # [rows] i32
        ("other_entries", c_void_p),  # [rows, k] u64 of the other side; null where they are received
        ("other_counts", c_void_p),  # [rows] i32, likewise
        ("positions", c_void_p),  # [rows] i32; below k: the identity, and no list is looked at
        ("drawn", c_void_p),  # [draws, k] i32 that replace the selection, as step_topk_args; or null
        ("draw_index", c_void_p),  # [1] u32
        ("selected", c_void_p),  # [rows, k] i32 out, -1 past selected_counts[r]
        ("selected_counts", c_void_p),  # [rows] i32 out
        ("k", c_uint32),
        ("draws", c_uint32),
    ]


class exchange_lists_args(Args):
    """merge_args with the other side's lists through mailboxes (mailbox.h). Words of row r at r * (2 k + 1): keys [k], ~positions [k], count."""

    _fields_ = [
        ("lists", merge_args),
        ("outbox", c_void_p),  # [2, capacity] u64 in the other device's uncached memory
        ("inbox", c_void_p),  # [2, capacity] u64, uncached
        ("counter", c_void_p),  # [1] u32: steps done
        ("error", c_void_p),  # [1] u32: number of an exchange that got no answer, or 0
        ("budget", c_uint64),  # polls of one wait
        ("per_step", c_uint32),
        ("index", c_uint32),  # of the exchange in its step, from 1
        ("capacity", c_uint32),  # words of a set, at least rows * (2 k + 1)
        ("waiting_blocks", c_uint32),  # the first blocks, which may wait for the other device: all
    ]
