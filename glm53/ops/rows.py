"""History rows written, fetched and moved in bulk. Kernels: rows.hip. Row references and spaces: docs/decisions/0003-host-tier.md.

Addresses are device addresses and may be those of registered host memory. Offsets and plane strides are taken mod 2^64: a negative one is a
distance backwards. Everything is in multiples of 16 bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from glm53.hip import Array, Buffer, Device, Stream
from glm53.mem.extents import GroupedShape
from glm53.ops.contract import ContractError, Cost, Dims, ceil_div, launch
from glm53.ops.history_args import copy_back_args, copy_planes_args, fetch_args, plane_rows_args, read_rows_args, store_rows_args
from glm53.ops.pair_args import place_rows_args
from glm53.spec import DType, Offsets, RowFormat

if TYPE_CHECKING:
    from glm53.ops.hotcache import FetchList

ADDRESS_LIMIT = 1 << 64
LIST_WORDS_LIMIT = 1 << 31  # 16-byte words of one fetch list
READ_UNIT = 8  # values a work-item of read_rows reads; ROW_UNIT of row_format.h
# Copy blocks a compute unit, of one part and of all parts together; each block has 16 KiB in flight, and a link's bandwidth times its latency is
# some 100 KiB. From 33 to 264 blocks a plane took the same on an H200.
BLOCKS_PER_UNIT = 2
BLOCKS_PER_UNIT_MAX = 8

# Activation type, row format: what has a kernel.
FORMATS = {
    (DType.F32, RowFormat.F32),
    (DType.BF16, RowFormat.BF16),
    (DType.F32, RowFormat.Q8G64),
    (DType.BF16, RowFormat.Q8G64),
}


def format_variant(op: str, dtype: DType, row_format: RowFormat) -> str:
    """Kernel name `op_T_format`. Raises ContractError naming the pairs that exist."""
    if (dtype, row_format) not in FORMATS:
        existing = ", ".join(sorted(f"{t.label}_{f.value}" for t, f in FORMATS))
        raise ContractError(f"{op}: no variant {dtype.label}_{row_format.value}; existing: {existing}")
    return f"{op}_{dtype.label}_{row_format.value}"


def row_size(op: str, row_format: RowFormat, latent: int, rope: int) -> int:
    """Bytes of a row. Raises ContractError where the format cannot hold these widths."""
    try:
        return row_format.row_bytes(latent, rope)
    except ValueError as error:
        raise ContractError(f"{op}: {error}") from None


def space_offsets(op: str, offsets: Offsets) -> tuple[int, int, int, int]:
    """The offsets mod 2^64 for an argument struct. Raises ContractError if one would break the alignment of rows."""
    bad = [offset for offset in offsets if offset % 16 or not -ADDRESS_LIMIT < offset < ADDRESS_LIMIT]
    if len(offsets) != 4 or bad:
        raise ContractError(f"{op}: offsets are {offsets}, expected one of each of the 4 spaces, multiples of 16 below 2^64")
    hot, extent, staging, linear = (offset % ADDRESS_LIMIT for offset in offsets)
    return hot, extent, staging, linear


def byte_size(memory: Array | Buffer) -> int:
    return memory.nbytes if isinstance(memory, Array) else memory.byte_count


def copy_blocks(device: Device, word_count: int, parts: int, words_per_block: int) -> int:
    """Grid x of a copy of `word_count` 16-byte words in each of `parts` parts: enough for the work, at most BLOCKS_PER_UNIT a compute unit for
    a part and BLOCKS_PER_UNIT_MAX for all of them."""
    units = device.properties.compute_units
    most = max(1, min(BLOCKS_PER_UNIT * units, BLOCKS_PER_UNIT_MAX * units // parts))
    return max(1, min(most, ceil_div(word_count, words_per_block)))


def store_rows(
    stream: Stream,
    x: Array,
    refs: Array,
    *,
    offsets: Offsets,
    row_format: RowFormat,
    latent: int,
    rope: int | None = None,
    column: int = 0,
    error: Array | None = None,
) -> None:
    """Writes row r of x, [latent | rope], to the row reference refs[r] in `row_format`; a reference of 0 is skipped.

    x [rows, columns] T, read from `column` on, columns past latent + rope are ignored (rope None: all columns from there); refs [rows] u64,
    distinct; error [1] u32, needed by q8g64 and unused by the others: set to the largest 1 + r whose row holds a value that is not finite, or a
    scale above 65,504 (a magnitude from 65,520 * 127 on); it is never cleared here, and such a row's bytes are unspecified.
    T and format: f32 and f32, bf16 and bf16, or either and q8g64. q8g64, per 64 latent values: scale = f16(amax / 127), one f16 step up
    if a value would round past 127 (subnormal scales only); q = rint(x / scale), ties to even; rope as bf16. Raises ContractError.
    """
    d = Dims("store_rows")
    d.match("x", x, "rows", "columns", dtype=(DType.F32, DType.BF16))
    d.match("refs", refs, "rows", dtype=DType.U64)
    name = format_variant("store_rows", x.dtype, row_format)
    left = d["columns"] - column
    d.require(0 <= column < d["columns"], f"column is {column}, expected 0 to {d['columns'] - 1} (bound by x dim 1)")
    rope = left - latent if rope is None else rope
    d.require(latent >= 1 and rope >= 0, f"latent is {latent}, rope {rope}, expected at least 1 and 0")
    behind = f" - {column}" if column else ""
    d.require(latent + rope <= left, f"latent + rope is {latent + rope}, expected at most columns={d['columns']}{behind} (bound by x dim 1)")
    quantised = row_format is RowFormat.Q8G64
    if quantised:
        d.require(error is not None, "error is None, expected a [1] u32 array: q8g64 reports values that are not finite there")
    if error is not None:
        d.match("error", error, 1, dtype=DType.U32)
    args = store_rows_args(
        x=x.address + column * x.dtype.item_bytes,
        refs=refs.address,
        error=error.address if quantised and error is not None else None,
        x_stride=d["columns"],
        latent=latent,
        rope=rope,
        row_bytes=row_size("store_rows", row_format, latent, rope),
    )
    args.offsets[:] = space_offsets("store_rows", offsets)
    launch(stream, name, (d["rows"], 1, 1), args)


def cost_store_rows(rows: int, width: int, item_bytes: int, row_bytes: int) -> Cost:
    return Cost(bytes=rows * (width * item_bytes + row_bytes + 8), flops=0)


def place_rows(stream: Stream, rows: Array, refs: Array, *, offsets: Offsets) -> None:
    """Copies packed row r to the row reference refs[r]; a reference of 0 is skipped.

    rows [rows, row_bytes] u8, row_bytes and its address multiples of 16, as store_rows writes it through references of the linear space; refs [rows]
    u64, distinct. The rows that one device of a pair has quantised reach both so. Raises ContractError.
    """
    d = Dims("place_rows")
    d.match("rows", rows, "rows", "row_bytes", dtype=DType.U8)
    d.match("refs", refs, "rows", dtype=DType.U64)
    d.require(d["row_bytes"] % 16 == 0 and rows.address % 16 == 0, f"rows have {d['row_bytes']} bytes at {rows.address:#x}, expected multiples of 16")
    args = place_rows_args(rows=rows.address, refs=refs.address, row_bytes=d["row_bytes"])
    args.offsets[:] = space_offsets("place_rows", offsets)
    launch(stream, "place_rows", (d["rows"], 1, 1), args)


def cost_place_rows(rows: int, row_bytes: int) -> Cost:
    return Cost(bytes=rows * (2 * row_bytes + 8), flops=0)


@dataclass(frozen=True)
class FetchPlanes:
    """Where fetched rows come from and go to. Source of plane l: sources[e] + l * row_bytes (host extents, as the device sees them). Target: a hot
    reference plus l * hot_plane_bytes, or a staging reference's payload plus staging + (l - staging_plane_first) * staging_plane_bytes.
    staging: None if no entry points there. Bytes are multiples of 16.
    """

    staging: Array | Buffer | None
    staging_plane_first: int
    hot_plane_bytes: int
    staging_plane_bytes: int
    row_bytes: int


def fetch_list_args(fetch: FetchList, round_starts: Array, planes: range, places: FetchPlanes, k: int, blocks: int) -> fetch_args:
    """Arguments of a fetch of `planes`, list i from entry round_starts[i] * k on, dealt over `blocks` blocks. Raises ContractError."""
    d = Dims("fetch")
    d.match("round_starts", round_starts, None, dtype=DType.I32)
    rounds = round_starts.shape[0] - 1
    d.match("counts", fetch.counts, None, dtype=DType.I32)
    d.require(1 <= rounds <= fetch.counts.shape[0], f"round_starts has {rounds} rounds, expected 1 to {fetch.counts.shape[0]}, the size of counts")
    d.match("sources", fetch.sources, "entries", dtype=DType.U64)
    d.match("targets", fetch.targets, "entries", dtype=DType.U64)
    d.require(1 <= k <= d["entries"], f"k is {k}, expected 1 to entries={d['entries']} (bound by sources dim 0)")
    d.require(planes.step == 1 and len(planes) > 0 and planes.start >= 0, f"planes is {planes}, expected an ascending, non-empty range")
    row_bytes, staging = places.row_bytes, places.staging
    d.require(row_bytes > 0 and row_bytes % 16 == 0, f"row_bytes is {row_bytes}, expected a multiple of 16")
    strides = (places.hot_plane_bytes, places.staging_plane_bytes)
    d.require(all(stride % 16 == 0 for stride in strides), f"plane strides are {strides}, expected multiples of 16")
    list_bytes = d["entries"] * len(planes) * row_bytes
    d.require(list_bytes // 16 < LIST_WORDS_LIMIT, f"the lists hold {list_bytes} bytes, expected below 2^35; next: fewer rows")
    if staging is not None:
        first = places.staging_plane_first
        needed = (planes.stop - 1 - first) * places.staging_plane_bytes
        d.require(0 <= first <= planes.start, f"staging_plane_first is {first}, expected 0 to {planes.start}")
        d.require(needed < byte_size(staging), f"staging has {byte_size(staging)} bytes, its last plane starts at {needed}")
    d.require(0 < blocks < 1 << 20, f"blocks is {blocks}, expected 1 to 2^20 - 1")
    return fetch_args(
        sources=fetch.sources.address,
        targets=fetch.targets.address,
        counts=fetch.counts.address,
        round_starts=round_starts.address,
        staging=None if staging is None else staging.address,
        hot_plane_bytes=places.hot_plane_bytes % ADDRESS_LIMIT,
        staging_plane_bytes=places.staging_plane_bytes % ADDRESS_LIMIT,
        k=k,
        row_bytes=row_bytes,
        plane_first=planes.start,
        planes=len(planes),
        staging_plane_first=places.staging_plane_first,
        blocks=blocks,
    )


def fetch(
    stream: Stream,
    fetch: FetchList,
    round_starts: Array,
    *,
    planes: range,
    staging: Array | Buffer | None,
    staging_plane_first: int,
    hot_plane_bytes: int,
    staging_plane_bytes: int,
    row_bytes: int,
    k: int,
    blocks: int | None = None,
) -> None:
    """Copies the rows of every round's fetch list, for each plane l of `planes`, in stream order before attention reads them. The planes of a row are
    one stretch at its source.

    fetch: sources, targets [at least rows * k] u64, counts [at least rounds] i32; list i starts at entry round_starts[i] * k. round_starts
    [rounds + 1] i32. From staging to row_bytes: `FetchPlanes`. blocks: blocks a round, None: from the compute units. Lists may be empty. Raises
    ContractError.
    """
    places = FetchPlanes(staging, staging_plane_first, hot_plane_bytes, staging_plane_bytes, row_bytes)
    rounds = max(1, round_starts.shape[0] - 1)
    if blocks is None:
        block_words = stream.device.kernel("fetch_rows").constants["words"]
        list_words = fetch.sources.shape[0] // rounds * len(planes) * (places.row_bytes // 16)
        blocks = copy_blocks(stream.device, list_words, rounds, block_words)
    args = fetch_list_args(fetch, round_starts, planes, places, k, blocks)
    launch(stream, "fetch_rows", (blocks, rounds, 1), args)


def cost_fetch(rows: int, planes: int, row_bytes: int) -> Cost:
    """Cost of `rows` listed rows; half of the row bytes cross the link."""
    return Cost(bytes=planes * rows * (2 * row_bytes + 16), flops=0)


def copy_back(
    stream: Stream,
    source_address: int,
    extent_address: int,
    groups: Array,
    shape: GroupedShape,
    *,
    source_plane_bytes: int,
    first_row: int,
    rows: int,
) -> None:
    """Copies a batch of rows, all planes, from a plane-major buffer to rows [first_row, first_row + rows) of a host extent.

    Row r of plane l comes from source + l * source_plane_bytes + r * row_bytes. groups [groups, 2] u32: first plane and planes of each of `shape`.
    The extent as the device sees it. Addresses and strides are multiples of 16. rows 0: nothing. Raises ContractError.
    """
    d = Dims("copy_back")
    d.match("groups", groups, len(shape.groups), 2, dtype=DType.U32)
    text = f"rows [{first_row}, {first_row + rows})"
    d.require(0 <= first_row <= first_row + rows <= shape.extent_rows, f"{text}, expected within the {shape.extent_rows} of an extent")
    d.require(
        (source_address | extent_address | source_plane_bytes) % 16 == 0,
        f"source {source_address:#x}, extent {extent_address:#x}, plane bytes {source_plane_bytes}: expected multiples of 16",
    )
    if rows == 0:
        return
    words = rows * max(shape.groups) * shape.row_bytes // 16
    d.require(words < LIST_WORDS_LIMIT, f"{text} of {max(shape.groups)} planes hold {words * 16} bytes, expected below 2^35")
    blocks = copy_blocks(stream.device, words, len(shape.groups), stream.device.kernel("copy_back").constants["words"])
    args = copy_back_args(
        source=source_address,
        extent=extent_address,
        groups=groups.address,
        source_plane_bytes=source_plane_bytes % ADDRESS_LIMIT,
        extent_rows=shape.extent_rows,
        first_row=first_row,
        rows=rows,
        row_bytes=shape.row_bytes,
        blocks=blocks,
    )
    launch(stream, "copy_back", (blocks, len(shape.groups), 1), args)


def cost_copy_back(rows: int, planes: int, row_bytes: int) -> Cost:
    """Cost of a batch; half of the bytes cross the link."""
    return Cost(bytes=2 * rows * planes * row_bytes, flops=0)


def copy_planes(
    stream: Stream,
    source_address: int,
    target_address: int,
    *,
    source_plane_bytes: int,
    target_plane_bytes: int,
    length_bytes: int,
    planes: int,
) -> None:
    """target + l * target_plane_bytes = source + l * source_plane_bytes, length_bytes each, for every plane l < planes.

    The copy-kernel form of a strided copy, at the speed of the memory or the link. All six numbers are multiples of 16
    where they are bytes or addresses; the stretches must not overlap. length_bytes 0 or planes 0: nothing. Raises ContractError.
    """
    d = Dims("copy_planes")
    d.require(length_bytes >= 0 and planes >= 0, f"length_bytes is {length_bytes}, planes {planes}, expected at least 0")
    numbers = (source_address, target_address, source_plane_bytes, target_plane_bytes, length_bytes)
    text = f"source {source_address:#x}, target {target_address:#x}, plane bytes {source_plane_bytes} and {target_plane_bytes}"
    d.require(all(n % 16 == 0 for n in numbers), f"{text}, length {length_bytes}: expected multiples of 16")
    if length_bytes == 0 or planes == 0:
        return
    block_words = stream.device.kernel("copy_planes").constants["words"]
    blocks = copy_blocks(stream.device, length_bytes // 16, planes, block_words)
    args = copy_planes_args(
        source=source_address,
        target=target_address,
        source_plane_bytes=source_plane_bytes % ADDRESS_LIMIT,
        target_plane_bytes=target_plane_bytes % ADDRESS_LIMIT,
        length_bytes=length_bytes,
        blocks=blocks,
    )
    launch(stream, "copy_planes", (blocks, planes, 1), args)


def cost_copy_planes(length_bytes: int, planes: int) -> Cost:
    return Cost(bytes=2 * length_bytes * planes, flops=0)


def gather_plane(
    stream: Stream,
    table_row: Array | int,
    target: Array | Buffer | int,
    *,
    plane_offset_bytes: int,
    stride_bytes: int,
    rows: int,
    extent_rows: int,
    row_bytes: int,
) -> None:
    """target[p] = row p of one plane of a session's host extents, p < rows: one layer's history in a linear buffer.

    table_row: [extents] u64 extent addresses (or [1, extents], or the address of such a row), those of the first rows present; row p lies at
    table[p / extent_rows] + plane_offset_bytes + p % extent_rows * stride_bytes (`GroupPlace.row_offset` of row 0, and its stride).
    target: memory of at least rows * row_bytes bytes, or its address. rows 0: nothing. Raises ContractError.
    """
    _move_plane(stream, "gather_plane", table_row, target, plane_offset_bytes, stride_bytes, 0, rows, extent_rows, row_bytes)


def scatter_plane(
    stream: Stream,
    table_row: Array | int,
    source: Array | Buffer | int,
    *,
    plane_offset_bytes: int,
    stride_bytes: int,
    first: int,
    rows: int,
    extent_rows: int,
    row_bytes: int,
) -> None:
    """Row p of one plane of a session's host extents = source[p], first <= p < first + rows. Otherwise as `gather_plane`. Raises ContractError."""
    _move_plane(stream, "scatter_plane", table_row, source, plane_offset_bytes, stride_bytes, first, rows, extent_rows, row_bytes)


def _move_plane(
    stream: Stream,
    name: str,
    table_row: Array | int,
    linear: Array | Buffer | int,
    plane_offset_bytes: int,
    stride_bytes: int,
    first: int,
    rows: int,
    extent_rows: int,
    row_bytes: int,
) -> None:
    d = Dims(name)
    d.require(rows >= 0 and first >= 0 and extent_rows > 0, f"rows is {rows}, first {first}, extent_rows {extent_rows}, expected at least 0, 0 and 1")
    d.require(row_bytes > 0 and row_bytes % 16 == 0, f"row_bytes is {row_bytes}, expected a multiple of 16")
    d.require(plane_offset_bytes % 16 == 0, f"plane_offset_bytes is {plane_offset_bytes}, expected a multiple of 16")
    d.require(stride_bytes % 16 == 0 and row_bytes <= stride_bytes < 1 << 32, f"stride_bytes is {stride_bytes}, expected {row_bytes} or more, of 16")
    d.require(rows * row_bytes // 16 < LIST_WORDS_LIMIT, f"{rows} rows hold {rows * row_bytes} bytes, expected below 2^35")
    if rows == 0:
        return
    last = first + rows
    extents = ceil_div(last, extent_rows)
    if isinstance(table_row, Array):
        d.match("table_row", table_row, *table_row.shape, dtype=DType.U64)
        d.require(table_row.nbytes >= 8 * extents, f"table_row has {table_row.nbytes // 8} extents, {last} rows need {extents}")
    if not isinstance(linear, int):
        d.require(byte_size(linear) >= last * row_bytes, f"the linear buffer has {byte_size(linear)} bytes, {last} rows need {last * row_bytes}")
    address = linear if isinstance(linear, int) else linear.address
    d.require(address % 16 == 0, f"the linear buffer is at {address:#x}, expected a multiple of 16")
    blocks = copy_blocks(stream.device, rows * row_bytes // 16, 1, stream.device.kernel(name).constants["words"])
    args = plane_rows_args(
        table=table_row.address if isinstance(table_row, Array) else table_row,
        linear=address,
        plane_offset_bytes=plane_offset_bytes % ADDRESS_LIMIT,
        first=first,
        rows=rows,
        extent_rows=extent_rows,
        row_bytes=row_bytes,
        stride_bytes=stride_bytes,
        blocks=blocks,
    )
    launch(stream, name, (blocks, 1, 1), args)


def cost_gather_plane(rows: int, row_bytes: int) -> Cost:
    """Of both ways."""
    return Cost(bytes=2 * rows * row_bytes, flops=0)


def _match_read(d: Dims, plan: Array, index: Array | None, out: Array, row_bytes: int) -> read_rows_args:
    """Matches what both readers take; out [rows, k, ...] has bound rows and k."""
    d.match("plan", plan, "rows", "plan_k", dtype=DType.U64)
    if index is None:
        d.require(d["k"] == d["plan_k"], f"out dim 1 is {d['k']}, expected plan_k={d['plan_k']} (bound by plan dim 1): index is None")
    else:
        d.match("index", index, "rows", "k", dtype=DType.I32)
    return read_rows_args(
        plan=plan.address,
        index=None if index is None else index.address,
        out=out.address,
        k=d["k"],
        plan_k=d["plan_k"],
        row_bytes=row_bytes,
    )


def read_rows(
    stream: Stream,
    plan: Array,
    index: Array | None,
    out: Array,
    *,
    offsets: Offsets,
    row_format: RowFormat,
    latent: int,
) -> None:
    """out[r, i] = the values of the row that plan[r, index[r, i]] refers to; zeros for a reference of 0.

    plan [rows, plan_k] u64; index [rows, k] i32 in [0, plan_k), unchecked, or None: out has k = plan_k; out [rows, k, latent + rope] T, f32
    or bf16 (one rounding, to nearest even). Any row format with any T. Raises ContractError.
    """
    d = Dims("read_rows")
    d.match("out", out, "rows", "k", "width", dtype=(DType.F32, DType.BF16))
    rope = d["width"] - latent
    d.require(latent >= 1 and rope >= 0, f"latent is {latent}, rope {rope}, expected at least 1 and 0")
    args = _match_read(d, plan, index, out, row_size("read_rows", row_format, latent, rope))
    args.latent, args.rope = latent, rope
    args.offsets[:] = space_offsets("read_rows", offsets)
    name = f"read_rows_{row_format.value}_{out.dtype.label}"
    block = stream.device.kernel(name).block
    launch(stream, name, (ceil_div(d["k"] * ceil_div(d["width"], READ_UNIT), block), d["rows"], 1), args)


def copy_rows(stream: Stream, plan: Array, index: Array | None, out: Array, *, offsets: Offsets) -> None:
    """out[r, i] = the bytes of the row that plan[r, index[r, i]] refers to; zeros for a reference of 0.

    plan, index as for `read_rows`; out [rows, k, row_bytes] u8, row_bytes a multiple of 16. Raises ContractError.
    """
    d = Dims("copy_rows")
    d.match("out", out, "rows", "k", "row_bytes", dtype=DType.U8)
    d.require(d["row_bytes"] % 16 == 0 and out.address % 16 == 0, f"out dim 2 is {d['row_bytes']} at {out.address:#x}, expected multiples of 16")
    args = _match_read(d, plan, index, out, d["row_bytes"])
    args.offsets[:] = space_offsets("copy_rows", offsets)
    block = stream.device.kernel("copy_rows").block
    launch(stream, "copy_rows", (ceil_div(d["k"] * (d["row_bytes"] // 16), block), d["rows"], 1), args)


def cost_read_rows(rows: int, k: int, row_bytes: int, out_bytes: int) -> Cost:
    """out_bytes: of one row of the output. Source rows are counted once an entry, also where they repeat."""
    return Cost(bytes=rows * k * (row_bytes + out_bytes + 12), flops=0)
