"""Argument structs of the kernels of history rows: references and plans, the hot cache, copies between device and host memory. As in `args`.

Row references and spaces, and how rows lie in extents of device and of host memory: docs/decisions/0003-host-tier.md.
"""

from __future__ import annotations

from ctypes import c_int32, c_uint32, c_uint64, c_void_p

from glm53.ops.args import Args


class plan_args(Args):
    """Plan of rows that need no look-up. extent: payload = address of plane 0 of the row in its extent. linear: payload = position * row_bytes.
    Row references: docs/decisions/0003-host-tier.md."""

    _fields_ = [
        ("selected", c_void_p),  # [rows, k] i32
        ("counts", c_void_p),  # [rows] i32
        ("tables", c_void_p),  # [sessions, table_stride] u64; extent only, else null
        ("sessions", c_void_p),  # [rows] i32; extent only, else null
        ("plan", c_void_p),  # [rows, k] u64 row references, 0 past counts[r]
        ("k", c_uint32),
        ("table_stride", c_uint32),
        ("extent_rows", c_uint32),
        ("row_bytes", c_uint32),
    ]


class kv_state(Args):
    """State of one session of the host tier, in device memory."""

    _fields_ = [
        ("hot", c_uint64),  # address of plane 0, slot 0 of its hot buffer
        ("full", c_uint32),  # 1: row p lies at slot p, no tables are used
        ("boundary", c_int32),  # rows at and past it lie in the ring, rows before it in RAM (and perhaps in a slot)
        ("round", c_uint32),  # tag of the current round, never 0
        ("_pad", c_uint32),
    ]


class place_args(Args):
    """References of the rows about to be written. extent: the row of the session's extent; hot: slot p if full, else p mod ring_rows;
    linear: p * row_bytes. One thread a row; negative positions give 0."""

    _fields_ = [
        ("sessions", c_void_p),  # [rows] i32
        ("positions", c_void_p),  # [rows] i32
        ("tables", c_void_p),  # [sessions, table_stride] u64; extent only, else null
        ("states", c_void_p),  # [sessions] kv_state; hot only, else null
        ("refs", c_void_p),  # [rows] u64 out
        ("rows", c_uint32),
        ("table_stride", c_uint32),
        ("extent_rows", c_uint32),
        ("row_bytes", c_uint32),
        ("ring_rows", c_uint32),
        ("_pad", c_uint32),
    ]


class store_rows_args(Args):
    """Writes row r of x, [latent | rope] T, to refs[r] in the row format: as it is (f32, bf16), or quantised (q8g64: latent i8, latent / 64 f16
    scales, rope bf16; scale = f16(amax / 127) per 64 values, value = rint(x / scale) with the rounded scale, ties to even, scale 0 gives zeros).
    A non-finite value sets error[0] to 1 + r (atomically, the largest stays)."""

    _fields_ = [
        ("x", c_void_p),  # [rows, latent + rope] T, row stride x_stride
        ("refs", c_void_p),  # [rows] u64; 0: the row is skipped
        ("error", c_void_p),  # [1] u32; null for unquantised formats
        ("offsets", c_uint64 * 4),  # of the four spaces, in bytes
        ("x_stride", c_uint32),
        ("latent", c_uint32),
        ("rope", c_uint32),
        ("row_bytes", c_uint32),
    ]


class hot_plan_args(Args):
    """One round of one selection group: looks up every selected row, gives slots to misses, writes plan and fetch list. Block i serves the rows
    [round_starts[i], round_starts[i + 1]) of one session; fetch list i starts at round_starts[i] * k. Counters: 0 hits, 1 misses fetched
    into slots, 2 recent hits (ring or full), 3 duplicate misses, 4 evictions, 5 uncached rows (fetched into staging)."""

    _fields_ = [
        ("selected", c_void_p),  # [rows, k] i32, unique within a row
        ("counts", c_void_p),  # [rows] i32
        ("sessions", c_void_p),  # [rows] i32
        ("round_starts", c_void_p),  # [rounds + 1] i32
        ("tables", c_void_p),  # [sessions, table_stride] u64 addresses of host extents as the device sees them
        ("states", c_void_p),  # [sessions] kv_state
        ("slot_of", c_void_p),  # [sessions, groups, positions] i32: cache slot, -1 none, -2 - m: miss m of this round
        ("position_of", c_void_p),  # [sessions, groups, slots] i32, -1 free
        ("used", c_void_p),  # [sessions, groups, slots] u32: round of the last use
        ("filled", c_void_p),  # [sessions, groups, slots] u32: round of the fill, 0 once it was found in a later round
        ("hands", c_void_p),  # [sessions, groups] u32: next slot to consider for eviction
        ("counters", c_void_p),  # [sessions, groups, 8] u64
        ("plan", c_void_p),  # [rows, k] u64 out, 0 past counts[r]
        ("fetch_sources", c_void_p),  # [rows * k] u64 out: plane l of the row lies at this + l * row_bytes, for the planes of the group
        ("fetch_targets", c_void_p),  # [rows * k] u64 out: reference in the hot or the staging space
        ("fetch_positions", c_void_p),  # [rows * k] i32 out
        ("fetch_counts", c_void_p),  # [rounds] i32 out
        ("source_offset_bytes", c_uint64),  # source of row p: its extent + source_offset_bytes + p % extent_rows * source_stride_bytes
        ("k", c_uint32),
        ("table_stride", c_uint32),
        ("extent_rows", c_uint32),
        ("row_bytes", c_uint32),
        ("ring_rows", c_uint32),
        ("slots", c_uint32),  # cache slots = hot_rows - ring_rows; cache slot c is slot ring_rows + c of the hot buffer
        ("positions", c_uint32),
        ("groups", c_uint32),
        ("group", c_uint32),
        ("source_stride_bytes", c_uint32),
    ]


class fetch_args(Args):
    """Copies the rows of the fetch lists for planes [plane_first, plane_first + planes). Source of plane l: source + l * row_bytes; the planes of a
    row are one stretch; target: hot + l * hot_plane_bytes, or staging_address + (l - staging_plane_first) * staging_plane_bytes + payload."""

    _fields_ = [
        ("sources", c_void_p),  # [rows * k] u64
        ("targets", c_void_p),  # [rows * k] u64
        ("counts", c_void_p),  # [rounds] i32
        ("round_starts", c_void_p),  # [rounds + 1] i32
        ("staging", c_void_p),  # staging rows of plane staging_plane_first
        ("hot_plane_bytes", c_uint64),
        ("staging_plane_bytes", c_uint64),
        ("k", c_uint32),
        ("row_bytes", c_uint32),
        ("plane_first", c_uint32),
        ("planes", c_uint32),
        ("staging_plane_first", c_uint32),
        ("blocks", c_uint32),  # grid x: the list is dealt out over them
    ]


class finish_round_args(Args):
    """After the last layer of a step: the round tag of each session moves on (skipping 0), so that its fills can be found."""

    _fields_ = [
        ("states", c_void_p),  # [sessions] kv_state
        ("round_sessions", c_void_p),  # [rounds] i32
        ("rounds", c_uint32),
        ("_pad", c_uint32),
    ]


class slots_args(Args):
    """Changes to all slot tables of one session. forget: positions [first, last) are no longer found. abandon: what the current round filled is no
    longer found, its claims (-2 - m) are dropped for positions [0, last), and the round moves on. seed: positions first + i lie in cache slots
    slot + i, i < last - first; what was there is forgotten."""

    _fields_ = [
        ("states", c_void_p),  # [sessions] kv_state
        ("slot_of", c_void_p),  # as hot_plan_args
        ("position_of", c_void_p),
        ("used", c_void_p),
        ("filled", c_void_p),
        ("session", c_uint32),
        ("groups", c_uint32),
        ("positions", c_uint32),
        ("slots", c_uint32),
        ("first", c_int32),
        ("last", c_int32),
        ("slot", c_uint32),
        ("_pad", c_uint32),
    ]


class copy_planes_args(Args):
    """target + l * target_plane_bytes = source + l * source_plane_bytes, length_bytes each, for every plane l (grid y). Multiples of 16 bytes."""

    _fields_ = [
        ("source", c_void_p),
        ("target", c_void_p),
        ("source_plane_bytes", c_uint64),
        ("target_plane_bytes", c_uint64),
        ("length_bytes", c_uint64),
        ("blocks", c_uint32),  # grid x
        ("_pad", c_uint32),
    ]


class plane_rows_args(Args):
    """Rows [first, first + rows) of one plane of a session's host extents, into a linear buffer (gather_plane) or from it (scatter_plane)."""

    _fields_ = [
        ("table", c_void_p),  # [extents] u64: one session's row of the tables
        ("linear", c_void_p),  # [first + rows, row_bytes]
        ("plane_offset_bytes", c_uint64),  # row p: its extent + plane_offset_bytes + p % extent_rows * stride_bytes
        ("first", c_uint32),
        ("rows", c_uint32),
        ("extent_rows", c_uint32),
        ("row_bytes", c_uint32),
        ("stride_bytes", c_uint32),
        ("blocks", c_uint32),  # grid
    ]


class copy_back_args(Args):
    """A batch of rows, all planes, from a plane-major buffer into a group-major extent. Row r of plane l: source + l * source_plane_bytes + r *
    row_bytes; extent + (extent_rows * first + (first_row + r) * planes + l - first) * row_bytes, `first` and `planes` those of its group (grid y)."""

    _fields_ = [
        ("source", c_void_p),
        ("groups", c_void_p),  # [groups, 2] u32: first plane, planes
        ("extent", c_uint64),  # its address, as the device sees it
        ("source_plane_bytes", c_uint64),
        ("extent_rows", c_uint32),
        ("first_row", c_uint32),  # of the extent: the batch's first
        ("rows", c_uint32),
        ("row_bytes", c_uint32),
        ("blocks", c_uint32),  # grid x
        ("_pad", c_uint32),
    ]


class read_rows_args(Args):
    """out[r, i] = values of the row that plan[r, index[r, i]] refers to, as T (read_rows), or its bytes (copy_rows). Reference 0: zeros."""

    _fields_ = [
        ("plan", c_void_p),  # [rows, plan_k] u64 row references
        ("index", c_void_p),  # [rows, k] i32 in [0, plan_k); or null: i
        ("out", c_void_p),  # [rows, k, latent + rope] T, or [rows, k, row_bytes] u8
        ("offsets", c_uint64 * 4),  # of the four spaces, in bytes
        ("k", c_uint32),
        ("plan_k", c_uint32),
        ("latent", c_uint32),
        ("rope", c_uint32),
        ("row_bytes", c_uint32),
        ("_pad", c_uint32),
    ]
