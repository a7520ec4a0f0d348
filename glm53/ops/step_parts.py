"""Parts of launches of step_gemv: other work of a decode step in blocks beside its products. Kernel: step.hip.

T: f32 or bf16, the type of x. Which launch carries which part: docs/decisions/0004-step-graph.md.
"""

from __future__ import annotations

from dataclasses import dataclass

from glm53.hip import Array, Stream
from glm53.ops.contract import U32_LIMIT, Dims, ceil_div, on_sm
from glm53.ops.history import ExtentLayout
from glm53.ops.history_args import fetch_args
from glm53.ops.rows import format_variant, row_size, space_offsets
from glm53.ops.step_args import step_experts_args, step_gemv_args, step_give_args, step_place_args, step_router_args, step_rows_args
from glm53.spec import WHOLE, DType, Offsets, RowFormat, Shard, WeightFormat

GIVE_ENTRIES = 256  # of a row, that a block of GIVE looks up
_PART_ROWS, _PART_GIVE, _PART_FETCH, PART_ROUTER, _PART_PLACE = 1, 2, 3, 4, 5
_STRANDS = 16  # blocks that wait at once on the cpu runtime: resident_blocks of its spin.h
_ROW_FORMATS = {RowFormat.F32: WeightFormat.F32, RowFormat.BF16: WeightFormat.BF16, RowFormat.Q8G64: WeightFormat.Q8G64}


@dataclass(frozen=True)
class Patience:
    """Polls of one wait. `shared`: the blocks of a kernel take turns, as on the cpu runtime, and divide them."""

    polls: int
    shared: bool = False

    def of(self, blocks: int) -> int:
        return max(1, self.polls // min(blocks, _STRANDS)) if self.shared else self.polls


@dataclass(frozen=True)
class RowMail:
    """Packed rows between the devices of a pair: words that part ROWS posts (the owner) or takes (`receive`, the peer). `ops.exchange.Exchange.mail`.

    box: address of [words_max] u64, for query row r from r * row_bytes / 4 on: the peer's uncached memory, or without in-kernel exchange the
    side's own; number of the mail: 2 * (counter * per_step + index) + 1, counter [1] u32 on the device of the part; error [1] u32: number of mail
    that did not come in time, or 0.
    """

    box: int
    words_max: int
    receive: bool
    counter: Array
    per_step: int
    index: int
    error: Array
    patience: Patience


@dataclass(frozen=True)
class RowsPart:
    """Finishes the new history rows, and the new index keys where `key` is given; one block a query row.

    row [rows, latent + rope] T: what kv_a gave. Its first `latent` columns get the RMS norm (row_norm [latent] T, row_eps), the others RoPE; the row
    is stored at refs [rows] u64 (0: skipped) as ops.rows.store_rows does; error [1] u32 for q8g64. key [rows, width] T: layer norm (key_norm,
    key_bias [width] T, key_eps), RoPE on its first columns, stored as ops.history.append does with key_tables [sessions, extents] u64, sessions
    [rows] i32, key_shape (row_bytes = width * sizeof(T)), key_plane. Same bits as those operations one by one. A negative position: no key.
    key_share: of a pair's side, which stores the keys of positions in its own extents alone; key_tables list these one after the other.
    mail: the owner of a pair sends the packed row, the peer receives it and has neither row nor row_norm; a reference of 0 is skipped on both.
    give_follows: a launch soon after has a GivePart; where launches overlap a block more goes through its code.
    """

    row: Array | None
    row_norm: Array | None
    row_eps: float
    refs: Array
    offsets: Offsets
    row_format: RowFormat
    latent: int
    error: Array | None = None
    key: Array | None = None
    key_norm: Array | None = None
    key_bias: Array | None = None
    key_eps: float = 0.0
    key_tables: Array | None = None
    sessions: Array | None = None
    key_shape: ExtentLayout | None = None
    key_plane: int = 0
    key_share: Shard = WHOLE
    mail: RowMail | None = None
    give_follows: bool = False


@dataclass(frozen=True)
class GivePart:
    """Looks the selected rows up in the hot cache and gives slots to misses; a block for each 256 entries of a query row.

    tells [at least 2] u32, its first word 0 between launches: the products beside this part tell by it that they are stored, where x is bf16.
    """

    args: step_give_args
    rows: int
    tells: Array | None = None


@dataclass(frozen=True)
class PlacePart:
    """References of the selected rows into extents; one block a query row."""

    args: step_place_args
    rows: int


@dataclass(frozen=True)
class FetchPart:
    """Copies the rows of all rounds' fetch lists, the planes of `args`, by `blocks` blocks.

    awaits: `tells` of the launch just before: the products beside this part wait for its products alone, not for its GivePart, where x is bf16.
    """

    args: fetch_args
    blocks: int
    rounds: int
    awaits: Array | None = None


@dataclass(frozen=True)
class RouterPart:
    """Picks the experts as ops.experts.router does, when the logits are done: those of segment 0, STORE_F32.

    Segment 0 has f32 weights; the others may have another format. bias [experts] f32, ids [rows, slots] i32, weights [rows, slots] f32,
    arrivals [1] u32, 0 before and after.
    """

    bias: Array
    ids: Array
    weights: Array
    arrivals: Array
    n_group: int
    topk_group: int
    normalise: bool
    scaling: float


Part = RowsPart | GivePart | PlacePart | FetchPart | RouterPart


def bind_part(d: Dims, args: step_gemv_args, part: Part | None, x: Array, stream: Stream) -> None:
    """Fills what a launch of step_gemv with these x and bound dims has of its part. Raises ContractError."""
    if isinstance(part, RowsPart):
        args.part, args.part_blocks = _PART_ROWS, d["rows"] + int(part.give_follows and on_sm(stream))
        _bind_rows(d, args, part, x.dtype)
    elif isinstance(part, GivePart):
        d.require(part.rows == part.args.rows >= 1, f"GivePart has {part.rows} rows, its args {part.args.rows}, expected the same and at least 1")
        args.part, args.part_blocks, args.part_give = _PART_GIVE, part.rows * ceil_div(part.args.k, GIVE_ENTRIES), part.args
        args.tells = _stored_words(d, part.tells, x)
    elif isinstance(part, PlacePart):
        d.require(part.rows == part.args.rows >= 1, f"PlacePart has {part.rows} rows, its args {part.args.rows}, expected the same and at least 1")
        args.part, args.part_blocks, args.part_place = _PART_PLACE, part.rows, part.args
    elif isinstance(part, FetchPart):
        args.part = _PART_FETCH
        bind_fetch(d, args, part)
        args.awaits = _stored_words(d, part.awaits, x)
    elif isinstance(part, RouterPart):
        args.part = PART_ROUTER
        _bind_router(d, args, part)


def bind_fetch(d: Dims, args: step_gemv_args | step_experts_args, part: FetchPart) -> None:
    """Fills what a launch has of a FetchPart. Raises ContractError."""
    d.require(part.rounds >= 1 and part.blocks >= 1, f"FetchPart has {part.rounds} rounds and {part.blocks} blocks, expected at least 1")
    args.part_blocks, args.rounds, args.part_fetch = part.blocks, part.rounds, part.args


def _stored_words(d: Dims, words: Array | None, x: Array) -> int | None:
    """Address of what products of bf16 x tell by, or wait for."""
    if words is None or x.dtype is not DType.BF16:
        return None
    d.match("tells", words, None, dtype=DType.U32)
    d.require(words.shape[0] >= 2, f"tells has {words.shape[0]} words, expected at least 2")
    return words.address


def _bind_rows(d: Dims, args: step_gemv_args, part: RowsPart, dtype: DType) -> None:
    d.match("refs", part.refs, "rows", dtype=DType.U64)
    p: step_rows_args = args.part_rows
    latent = part.latent
    if part.mail is not None and part.mail.receive:
        d.require(part.row is None and part.row_norm is None, "row or row_norm is given with mail to receive, expected None: the row comes packed")
        rope = args.rope_dim
        require_rope(d, args, rope, "RowsPart")
    else:
        rope = _bind_row(d, args, part, dtype)
    format_variant("step_gemv", dtype, part.row_format)
    p.refs = part.refs.address
    p.offsets[:] = space_offsets("step_gemv", part.offsets)
    p.row_eps, p.row_format, p.latent, p.rope = part.row_eps, _ROW_FORMATS[part.row_format], latent, rope
    p.row_bytes = row_size("step_gemv", part.row_format, latent, rope)
    _require_lds(d, "row", (latent + rope) * dtype.item_bytes)
    if part.mail is not None:
        _bind_mail(d, args, part.mail)
    if part.key is not None:
        _bind_key(d, p, part, part.key, rope, dtype)


def _bind_row(d: Dims, args: step_gemv_args, part: RowsPart, dtype: DType) -> int:
    """The row that is finished here; its columns that turn."""
    if part.row is None or part.row_norm is None:
        d.fail("row or row_norm is None, expected both: only mail to receive brings the row packed")
    d.match("row", part.row, "rows", "row columns", dtype=dtype)
    d.match("row_norm", part.row_norm, "latent", dtype=dtype)
    latent, rope = part.latent, d["row columns"] - part.latent
    d.require(d["latent"] == latent and rope >= 0, f"latent is {latent}, expected row_norm's {d['latent']}, at most the row's {d['row columns']}")
    d.require(part.row_eps > 0, f"row_eps is {part.row_eps}, expected a positive number")
    require_rope(d, args, rope, "RowsPart")
    p: step_rows_args = args.part_rows
    quantised = part.row_format is RowFormat.Q8G64
    if quantised and part.error is None:
        d.fail("error is None, expected a [1] u32 array: q8g64 reports values that are not finite there")
    if part.error is not None:
        d.match("error", part.error, 1, dtype=DType.U32)
        p.error = part.error.address if quantised else None
    p.row, p.row_norm = part.row.address, part.row_norm.address
    return rope


def _bind_mail(d: Dims, args: step_gemv_args, mail: RowMail) -> None:
    p: step_rows_args = args.part_rows
    d.match("mail.counter", mail.counter, 1, dtype=DType.U32)
    d.match("mail.error", mail.error, 1, dtype=DType.U32)
    words = d["rows"] * p.row_bytes // 4
    d.require(words <= mail.words_max, f"mail has room for {mail.words_max} words, expected {words} for {d['rows']} rows of {p.row_bytes} bytes")
    d.require(0 <= mail.index < mail.per_step < U32_LIMIT, f"mail.index is {mail.index}, expected 0 to below per_step={mail.per_step}")
    if mail.receive:
        p.inbox, args.waiting_blocks = mail.box, d["rows"]
    else:
        p.outbox = mail.box
    p.mail_counter, p.mail_error, p.mail_budget = mail.counter.address, mail.error.address, mail.patience.of(d["rows"])
    p.mail_per_step, p.mail_index = mail.per_step, mail.index


def _require_lds(d: Dims, name: str, row_bytes: int) -> None:
    d.require(row_bytes <= 32768, f"a {name} is {row_bytes} bytes, expected at most 32768: it is finished in LDS")


def _bind_key(d: Dims, p: step_rows_args, part: RowsPart, key: Array, rope: int, dtype: DType) -> None:
    arrays = (part.key_norm, part.key_bias, part.key_tables, part.sessions)
    norm, bias, tables, sessions = arrays
    shape = part.key_shape
    if norm is None or bias is None or tables is None or sessions is None or shape is None:
        d.fail("key is given, expected key_norm, key_bias, key_tables, sessions and key_shape with it")
    d.match("key", key, "rows", "key width", dtype=dtype)
    d.match("key_norm", norm, "key width", dtype=dtype)
    d.match("key_bias", bias, "key width", dtype=dtype)
    d.match("key_tables", tables, "session slots", "key extents", dtype=DType.U64)
    d.match("sessions", sessions, "rows", dtype=DType.I32)
    width = d["key width"]
    d.require(part.key_eps > 0, f"key_eps is {part.key_eps}, expected a positive number")
    d.require(rope <= width, f"key width is {width}, expected at least the {rope} columns that turn")
    d.require(shape.row_bytes == width * dtype.item_bytes, f"key_shape.row_bytes is {shape.row_bytes}, expected {width * dtype.item_bytes}")
    d.require(0 <= part.key_plane < shape.planes, f"key_plane is {part.key_plane}, expected one of the {shape.planes} planes of the extents")
    _require_lds(d, "key", width * dtype.item_bytes)
    p.key, p.key_norm, p.key_bias, p.key_tables, p.sessions = (a.address for a in (key, norm, bias, tables, sessions))
    p.key_eps, p.key_width, p.key_table_stride = part.key_eps, width, d["key extents"]
    p.key_extent_rows, p.key_plane = shape.extent_rows, part.key_plane
    p.key_side, p.key_sides = part.key_share.index, part.key_share.count


def _bind_router(d: Dims, args: step_gemv_args, part: RouterPart) -> None:
    d.match("bias", part.bias, "n0", dtype=DType.F32)
    d.match("ids", part.ids, "rows", "slots", dtype=DType.I32)
    d.match("weights", part.weights, "rows", "slots", dtype=DType.F32)
    d.match("arrivals", part.arrivals, 1, dtype=DType.U32)
    experts, slots = d["n0"], d["slots"]
    d.require(experts <= 256, f"experts is {experts}, expected at most 256")
    d.require(part.n_group >= 1 and experts % part.n_group == 0, f"n_group is {part.n_group}, expected a divisor of experts={experts}")
    d.require(1 <= part.topk_group <= part.n_group, f"topk_group is {part.topk_group}, expected 1 to n_group={part.n_group}")
    most = min(experts // part.n_group * part.topk_group, 16)
    d.require(slots <= most, f"slots is {slots}, expected at most {most}")
    args.part_router = step_router_args(
        bias=part.bias.address,
        ids=part.ids.address,
        weights=part.weights.address,
        arrivals=part.arrivals.address,
        experts=experts,
        k=slots,
        n_group=part.n_group,
        topk_group=part.topk_group,
        normalise=int(part.normalise),
        scaling=part.scaling,
    )


def require_rope(d: Dims, args: step_gemv_args, dim: int, who: str) -> None:
    d.require(bool(args.positions and args.inv_freq), f"{who} turns columns, expected positions and inv_freq")
    d.require(args.rope_dim == dim, f"{who} turns {dim} columns, expected {args.rope_dim} (bound by inv_freq dim 0)")
