"""Matrix products of a decode step, with the norm before and what follows them in the same launch. Kernel: step.hip.

One launch computes up to four products of the same x by weights of one format, each with an epilogue, and may carry a part: other work of the
step in blocks of its own. A row's bits depend on its own x, the weights and k alone (docs/decisions/0004-step-graph.md, Bits).
T: f32 or bf16, the activation type. Weights: bf16 and q8g64, with f32 activations also f32.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass

from glm53.hip import Array, Stream
from glm53.ops import crowd
from glm53.ops.contract import Cost, Dims, ceil_div, launch, on_sm, require_index
from glm53.ops.halves import Halves, first_half, half_of
from glm53.ops.matrix import GROUP, Matrix
from glm53.ops.pair_args import exchange_lists_args, sum_mail_args
from glm53.ops.step_args import step_gemv_args
from glm53.ops.step_blocks import MANY, blocks_at_once, product_blocks, shared_rows
from glm53.ops.step_parts import FetchPart, GivePart, Part, Patience, RouterPart, bind_part, require_rope
from glm53.spec import DType, WeightFormat

SEGMENTS_MAX = 4
_T = (DType.F32, DType.BF16)
_FORMATS = {DType.F32: (WeightFormat.F32, WeightFormat.BF16, WeightFormat.Q8G64), DType.BF16: (WeightFormat.BF16, WeightFormat.Q8G64)}
LONG_K = 1024  # long_k of the LAUNCH lines in step.hip: products of this k on are wide
_VALUES_MAX = 1 << 32  # of a weight: kernels count them in 32 bits


class Epilogue(enum.IntEnum):
    """What becomes of the f32 sums. Every step rounds to T, as the model does."""

    STORE = 0  # y = T(sum)
    STORE_F32 = 1  # y = sum, f32
    ROPE = 2  # T(sum), then rotary embedding
    SILU = 3  # weight rows j and n + j: y[j] = T(T(silu(T(gate))) * T(up))
    RESIDUAL = 4  # y = T(residual + (sum of the first half of k + sum of the rest)), as halves.half_of divides k


@dataclass(frozen=True)
class Rope:
    """Columns [offset, offset + dim) of each head of `head_stride` columns turn, in pairs (2i, 2i + 1). All even."""

    head_stride: int
    offset: int
    dim: int


@dataclass(frozen=True)
class Segment:
    """One product: weight [n, k] ([2n, k] for SILU: gate rows, then up rows), y [rows, n] in T (f32 for STORE_F32)."""

    weight: Matrix
    y: Array
    epilogue: Epilogue = Epilogue.STORE
    rope: Rope | None = None


@dataclass(frozen=True)
class SumMail:
    """How the kernel of a product, of which each device of a pair has half of k, adds the other device's sums. `ops.exchange.Products`.

    outbox: address of [2, words_max] u64 in the other device's uncached memory; inbox: of as many of this one's; number of the exchange: counter *
    per_step + index, counter [1] u32 on this device; error [1] u32: number of an exchange that got no answer, or 0.
    """

    outbox: int
    inbox: int
    words_max: int
    counter: Array
    per_step: int
    index: int
    error: Array
    patience: Patience

    def bind(self, d: Dims, args: sum_mail_args | exchange_lists_args, words: int, blocks: int) -> None:
        """Fills `args` for an exchange of so many words by a launch of so many blocks. Raises ContractError."""
        d.match("mail.counter", self.counter, 1, dtype=DType.U32)
        d.match("mail.error", self.error, 1, dtype=DType.U32)
        d.require(words <= self.words_max, f"y has {words} values, expected at most the {self.words_max} words of a mailbox")
        require_index(d, "mail.index", self.index, self.per_step)
        args.outbox, args.inbox, args.counter, args.error = self.outbox, self.inbox, self.counter.address, self.error.address
        args.capacity, args.per_step, args.index, args.budget = self.words_max, self.per_step, self.index, self.patience.of(blocks)


def gemv(
    stream: Stream,
    x: Array,
    segments: Sequence[Segment],
    *,
    norm: Array | None = None,
    eps: float = 0.0,
    h: Array | None = None,
    residual: Array | None = None,
    halves: Halves | None = None,
    whole_k: int | None = None,
    mail: SumMail | None = None,
    positions: Array | None = None,
    inv_freq: Array | None = None,
    part: Part | None = None,
) -> None:
    """y_s = epilogue(h @ weight_s^T) for each of 1 to 4 segments, h = T(norm * T(x / sqrt(mean(x^2) + eps))), or x where norm is None.

    x [rows, k] T; norm [k] T; h [rows, k] T out: the normed rows, with bf16 x of a launch with RouterPart alone. residual [rows, n] T, of a
    RESIDUAL segment, which is the only one and has no norm, may be its y; bf16 x wants halves with it. whole_k: x and weights are one half
    (halves.half_of) of a product of that many k, on a device of a pair: the sums have the bits of that half inside RESIDUAL, halves.join adds both;
    STORE_F32 segments alone, no norm; or with mail, beside bf16 x, one RESIDUAL segment, to which the launch adds the other device's sums, for which
    every one of its blocks waits. positions [rows] i32, below 2^21, negative: padding; inv_freq [dim / 2] f32, each at most 1: of ROPE segments and
    RowsPart. No output may overlap x or another output. All weights have one format, but for the router's (RouterPart). k: any beside f32 x, with
    bf16 x a multiple of 8 from 64 on, quantised a multiple of 64. bf16 x and norm start at multiples of 16 bytes; x enters scaled formats as
    integers of 16 bits a group (wave_product.h).
    Enqueues one kernel. Raises ContractError.
    """
    d = Dims("step_gemv")
    d.match("x", x, "rows", "k", dtype=_T)
    d.require(1 <= len(segments) <= SEGMENTS_MAX, f"got {len(segments)} segments, expected 1 to {SEGMENTS_MAX}")
    _require_units(d, "x", x)
    args = step_gemv_args(x=x.address, x_stride=d["k"], rows=d["rows"], k=d["k"], eps=eps)
    if norm is not None:
        d.match("norm", norm, "k", dtype=x.dtype)
        _require_units(d, "norm", norm)
        d.require(eps > 0, f"eps is {eps}, expected a positive number")
        args.norm = norm.address
    if h is not None:
        d.match("h", h, "rows", "k", dtype=x.dtype)
        d.require(norm is not None, "h is given, expected a norm with it: without one h is x")
        stored = x.dtype is DType.F32 or isinstance(part, RouterPart)
        d.require(stored, "h is given beside bf16 x without a RouterPart, expected None: only the router stores it; next: ops.basic.rms_norm")
        d.distinct("h", h, "x", x)
        args.h = h.address
    if positions is not None:
        d.match("positions", positions, "rows", dtype=DType.I32)
        args.positions = positions.address
    if inv_freq is not None:
        d.match("inv_freq", inv_freq, "rope pairs", dtype=DType.F32)
        args.inv_freq, args.rope_dim = inv_freq.address, 2 * d["rope pairs"]
    for index, segment in enumerate(segments):
        _bind_segment(d, args, index, segment, x, residual)
    _bind_wide(d, args, segments, whole_k, norm, mail)
    added = any(segment.epilogue is Epilogue.RESIDUAL for segment in segments)
    if added:
        _bind_halves(d, args, x.dtype, segments, halves, norm, part, mail)
    if isinstance(part, RouterPart):
        d.require(segments[0].epilogue is Epilogue.STORE_F32, f"segment 0 is {segments[0].epilogue.name}, expected STORE_F32: the router's logits")
    bind_part(d, args, part, x, stream)
    kernel = _kernel(d, stream, x, [segment.weight for segment in segments], isinstance(part, RouterPart), added and x.dtype is DType.BF16)
    if x.dtype is DType.BF16 and mail is None and on_sm(stream):
        silu = any(segment.epilogue is Epilogue.SILU for segment in segments)
        kernel = crowd.kernel(args, stream.device, added, len(segments) > 1 or silu) or kernel
    at_once = blocks_at_once(stream) if "_one_" in kernel and not args.partial else 0
    weight_rows = [segment.weight.shape[0] for segment in segments]
    blocks = product_blocks(args, stream, kernel, weight_rows, at_once)
    by_rings = x.dtype is DType.BF16 and segments[-1].weight.format.quantised and on_sm(stream)
    if by_rings and args.rows > 1 and args.wide and not added and kernel != crowd.HEAD and not isinstance(part, RouterPart):
        kernel, blocks = shared_rows(args, stream, kernel, weight_rows, blocks)
    blocks += args.part_blocks
    if mail is not None:
        mail.bind(d, args.mail, d["rows"] * d["n0"], blocks)
        args.waiting_blocks = blocks
    launch(stream, kernel, (blocks, 1, 1), args)


def per_head(stream: Stream, x: Array, weight: Matrix, y: Array, part: Part | None = None) -> None:
    """y[r, h] = T(x[r, h, :k] @ weight[h]^T): one product a head, over the first k columns of each head of x.

    x [rows, heads, columns] T, columns >= k, bf16: a multiple of 8, at a multiple of 16 bytes; weight [heads, n, k]; y [rows, heads, n] T, which must
    not overlap x. part: FETCH or GIVE, whose blocks run beside those of head 0. Enqueues one kernel. Raises ContractError.
    """
    d = Dims("step_per_head")
    d.match("x", x, "rows", "heads", "columns", dtype=_T)
    d.require(len(weight.shape) == 3, f"weight has shape {list(weight.shape)}, expected 3 dims [heads, n, k]")
    for dim, size, axis in zip(("heads", "n", "k"), weight.shape, range(3), strict=True):
        d.bind(dim, size, f"weight dim {axis}")
    d.match("y", y, "rows", "heads", "n", dtype=x.dtype)
    d.distinct("x", x, "y", y)
    heads, n, k, columns = (d[name] for name in ("heads", "n", "k", "columns"))
    _require_units(d, "x", x)
    d.require(k <= columns, f"weight dim 2 is {k}, expected at most columns={columns} (bound by x dim 2)")
    d.require(part is None or isinstance(part, GivePart | FetchPart), f"part is {type(part).__name__}, expected GivePart or FetchPart")
    d.require(not isinstance(part, GivePart) or part.tells is None, "part has tells, expected None: products of heads do not tell")
    args = step_gemv_args(x=x.address, x_batch_stride=columns, y_batch_stride=n, x_stride=heads * columns, rows=d["rows"], k=k)
    args.wide = int(k >= LONG_K)
    _bind_matrix(d, args, 0, weight)
    args.y[0], args.n[0], args.y_stride[0] = y.address, n, heads * n
    bind_part(d, args, part, x, stream)
    kernel = _kernel(d, stream, x, [weight], router=False, halves=False)
    launch(stream, kernel, (args.part_blocks + heads * product_blocks(args, stream, kernel, [n]), 1, 1), args)


def _require_units(d: Dims, name: str, array: Array) -> None:
    """What the products of bf16 x read in 16 bytes: each row of `array`."""
    fits = array.dtype is DType.F32 or (array.address % 16 == 0 and array.shape[-1] % 8 == 0)
    d.require(fits, f"{name} has rows of {array.shape[-1]} at {array.address:#x}, expected multiples of 8 and of 16 beside bf16 x")


def _kernel(d: Dims, stream: Stream, x: Array, weights: Sequence[Matrix], router: bool, halves: bool) -> str:
    """The kernel for T and the weights' format; the router, whose segment 0 has another, and halves of k have their own.

    Among those with the same bits: the one for one row of x, or on sm_90 the one whose blocks take more rows, where that makes fewer blocks.
    """
    dtype = x.dtype
    if router:
        d.require(weights[0].format is WeightFormat.F32, f"weight 0 is {weights[0].format.label}, expected f32: the router's")
    for index, weight in enumerate(weights):
        k, address = weight.shape[-1], weight.codes.address
        fits = dtype is DType.F32 or (k >= GROUP and k % 8 == 0 and address % 16 == 0)
        d.require(fits, f"weight {index} has k={k} at {address:#x}, expected multiples of 8 and of 16, k >= {GROUP}, beside bf16 x")
    plain = list(enumerate(weights))[int(router) :]
    taken = plain[0][1].format if plain else _FORMATS[dtype][0]
    names = ", ".join(known.label for known in _FORMATS[dtype])
    for index, weight in plain:
        d.require(weight.format in _FORMATS[dtype], f"weight {index} is {weight.format.label}, expected one of {names} beside {dtype.label} x")
        d.require(weight.format is taken, f"weight {index} is {weight.format.label}, expected {taken.label}, the format of weight {plain[0][0]}")
    kind = "halves" if halves else "gemv_router" if router else "gemv"
    kernel, many = (kernel_for(f"step_{kind}{which}", dtype, taken, x.shape[0]) for which in ("", MANY))
    if dtype is DType.F32 or not taken.quantised or x.shape[0] == 1 or not on_sm(stream):
        return kernel
    turns = [ceil_div(x.shape[0], stream.device.kernel(name).constants["rows"]) for name in (kernel, many)]
    return many if turns[1] < turns[0] else kernel


def kernel_for(kind: str, dtype: DType, format: WeightFormat, rows: int) -> str:
    """The kernel of this kind (step_gemv, ..) for `rows` rows of x: one row of bf16 x times weights with scales has kernels of its own."""
    one = "_one" if rows == 1 and dtype is DType.BF16 and format.quantised else ""
    return f"{kind}{one}_{dtype.label}_{format.label}"


def _bind_matrix(d: Dims, args: step_gemv_args, index: int, weight: Matrix) -> None:
    d.match(f"codes of weight {index}", weight.codes, *weight.codes.shape)
    args.codes[index], args.format[index] = weight.codes.address, weight.format
    values = math.prod(weight.shape)
    d.require(values < _VALUES_MAX, f"weight {index} has {values} values, expected less than {_VALUES_MAX}")
    if weight.scales is not None:
        d.match(f"scales of weight {index}", weight.scales, *weight.scales.shape)
        row_bytes = args.k * weight.format.bits // 8
        aligned = weight.codes.address % 16 == 0 and row_bytes % 16 == 0 and args.k % GROUP == 0
        d.require(aligned, f"weight {index} lies at {weight.codes.address:#x}, rows of {row_bytes} bytes; expected multiples of 16")
        args.scales[index] = weight.scales.address


def _bind_segment(d: Dims, args: step_gemv_args, index: int, segment: Segment, x: Array, residual: Array | None) -> None:
    weight, y, epilogue, rope = segment.weight, segment.y, segment.epilogue, segment.rope
    d.require(len(weight.shape) == 2, f"weight {index} has shape {list(weight.shape)}, expected 2 dims [n, k]")
    d.bind("k", weight.shape[1], f"weight {index} dim 1")
    n = f"n{index}"
    d.match(f"y {index}", y, "rows", n, dtype=DType.F32 if epilogue is Epilogue.STORE_F32 else x.dtype)
    rows_wanted = d[n] * (2 if epilogue is Epilogue.SILU else 1)
    d.require(weight.shape[0] == rows_wanted, f"weight {index} dim 0 is {weight.shape[0]}, expected {rows_wanted} (bound by y {index} dim 1)")
    d.distinct("x", x, f"y {index}", y)
    _bind_matrix(d, args, index, weight)
    args.y[index], args.n[index], args.y_stride[index], args.epilogue[index] = y.address, d[n], d[n], epilogue
    d.require(
        (rope is not None) is (epilogue is Epilogue.ROPE), f"segment {index} is {epilogue.name} with rope {rope}, expected a rope exactly for ROPE"
    )
    if rope is not None:
        even = not (rope.head_stride % 2 or rope.offset % 2 or rope.dim % 2)
        d.require(even and 0 <= rope.offset <= rope.head_stride - rope.dim, f"{rope}: expected even numbers, columns within the head")
        d.require(d[n] % rope.head_stride == 0, f"y {index} dim 1 is {d[n]}, expected a multiple of head_stride={rope.head_stride}")
        require_rope(d, args, rope.dim, f"segment {index}")
        args.head_stride[index], args.rope_offset[index] = rope.head_stride, rope.offset
    if epilogue is Epilogue.RESIDUAL:
        if residual is None:
            d.fail(f"segment {index} is RESIDUAL and residual is None, expected an array [rows, n]")
        d.match("residual", residual, "rows", n, dtype=x.dtype)
        args.residual = residual.address


def _bind_wide(d: Dims, args: step_gemv_args, segments: Sequence[Segment], whole_k: int | None, norm: Array | None, mail: SumMail | None) -> None:
    """Which of the two orders of additions the launch has."""
    k, epilogue = args.k, Epilogue.STORE_F32 if mail is None else Epilogue.RESIDUAL
    d.require(mail is None or whole_k is not None, "mail is given without whole_k, expected the k of the whole product")
    if whole_k is not None:
        parts = [half_of(whole_k, half)[1] for half in range(2)]
        d.require(k in parts, f"k is {k}, expected {parts[0]} or {parts[1]}, a half of whole_k={whole_k}")
        stored = norm is None and all(segment.epilogue is epilogue for segment in segments)
        what = f"whole_k is given, expected {epilogue.name} segments and no norm"
        d.require(stored, f"{what}: a half of a product is {'not normed' if mail else 'neither normed nor rounded'}")
    halved = whole_k if whole_k is not None else k if any(segment.epilogue is Epilogue.RESIDUAL for segment in segments) else None
    args.wide = int((k if halved is None else first_half(halved)) >= LONG_K)


def _bind_halves(
    d: Dims,
    args: step_gemv_args,
    dtype: DType,
    segments: Sequence[Segment],
    halves: Halves | None,
    norm: Array | None,
    part: Part | None,
    mail: SumMail | None,
) -> None:
    d.require(len(segments) == 1, f"a RESIDUAL segment is one of {len(segments)}, expected it alone")
    d.require(norm is None and (part is None or isinstance(part, FetchPart)), "a RESIDUAL segment has no norm and no part but FETCH")
    if mail is not None:
        d.require(dtype is DType.BF16, "mail is given beside f32 x, expected bf16; next: STORE_F32 and an exchange of Sums")
        return
    if dtype is DType.F32:  # one block computes both
        return
    if halves is None:
        d.fail("segment 0 is RESIDUAL and halves is None, expected Halves beside bf16 x")
    halves.check(d, d["rows"], d["n0"])
    args.partial, args.arrivals = halves.partial.address, halves.arrivals.address


def cost_gemv(x: Array, segments: Sequence[Segment], *, norm: Array | None = None, h: Array | None = None, residual: Array | None = None) -> Cost:
    """Of `gemv` without its part: every operand once, weights as they are stored."""
    rows, k = x.shape
    arrays = [x, *(segment.y for segment in segments), *(a for a in (norm, h, residual) if a is not None)]
    weights = sum(segment.weight.nbytes for segment in segments)
    products = sum(segment.weight.shape[0] for segment in segments)
    return Cost(sum(a.nbytes for a in arrays) + weights, rows * k * (2 * products + (4 if norm is not None else 0)))


def cost_per_head(x: Array, weight: Matrix, y: Array) -> Cost:
    """Of `per_head` without its part; only the first k columns of a head of x are read."""
    heads, n, k = weight.shape
    rows = x.shape[0]
    return Cost(rows * heads * k * x.dtype.item_bytes + weight.nbytes + y.nbytes, 2 * rows * heads * n * k)
