"""Routed experts of a decode step: gate and up with SiLU, then down of routed and shared experts. Kernels: step_experts.hip.

Weights in any format (`Matrix`), few rows. docs/decisions/0004-step-graph.md has the order of additions; a row's bits depend on its own x, ids
and weights only. pair = row * slots + slot. T: f32 or bf16 activations.
"""

from __future__ import annotations

from collections.abc import Mapping

from glm53.hip import Array, Stream
from glm53.ops.contract import U32_LIMIT, Cost, Dims, ceil_div, launch, on_sm
from glm53.ops.halves import Halves
from glm53.ops.matrix import GROUP, Matrix
from glm53.ops.step import SumMail, kernel_for
from glm53.ops.step_args import step_down_args, step_experts_args
from glm53.ops.step_blocks import blocks_at_once
from glm53.ops.step_parts import FetchPart, bind_fetch
from glm53.spec import DType, WeightFormat

_T = (DType.F32, DType.BF16)
# Formats with a kernel: of the routed weights, and of the shared expert's.
_ROUTED = {
    DType.F32: (WeightFormat.F32, WeightFormat.BF16, WeightFormat.Q4G64),
    DType.BF16: (WeightFormat.BF16, WeightFormat.Q8G64, WeightFormat.Q4G64),
}
_SHARED = {
    DType.F32: (WeightFormat.F32, WeightFormat.BF16, WeightFormat.Q8G64),
    DType.BF16: (WeightFormat.BF16, WeightFormat.Q8G64),
}
_PAIRS_MAX = 0xFFFF  # the bf16 kernel counts the pairs of an expert in 16 bits
_EXPERTS_MAX = 16_384  # a kernel of several rows on sm_90 counts the pairs of all experts in workgroup memory
_CODES = {WeightFormat.F32: DType.F32, WeightFormat.BF16: DType.BF16, WeightFormat.Q8G64: DType.U8, WeightFormat.Q4G64: DType.U8}


def _match_weight(d: Dims, name: str, matrix: Matrix, *dims: str) -> None:
    """Binds or compares [.., k] of a matrix. One expert's matrix is below 4 GiB, and what is read in 16 bytes is aligned to them."""
    for axis, (dim, size) in enumerate(zip(dims, matrix.shape, strict=True)):
        d.bind(dim, size, f"{name} dim {axis}")
    d.match(name, matrix.codes, *(None,) * len(dims), dtype=_CODES[matrix.format])
    n, k = matrix.shape[-2:]
    d.require(n * k * matrix.format.bits // 8 < U32_LIMIT, f"{name} has {n} x {k} weights a matrix, expected less than 4 GiB")
    if matrix.format.quantised:
        _require_aligned(d, f"{name} codes", matrix.codes)


def _require_format(d: Dims, name: str, matrix: Matrix, dtype: DType, formats: Mapping[DType, tuple[WeightFormat, ...]]) -> None:
    wanted = " or ".join(f.label for f in formats[dtype])
    d.require(matrix.format in formats[dtype], f"{name} is {matrix.format.label}, expected {wanted} with activations in {dtype.label}")


def _require_aligned(d: Dims, name: str, array: Array) -> None:
    d.require(array.address % 16 == 0, f"{name} is at address {array.address:#x}, expected a multiple of 16 where weights are quantised")


def _require_wave(d: Dims, name: str, array: Array, weight_name: str, matrix: Matrix) -> None:
    """What the products of bf16 activations read in 16 bytes: each row of `array` and of `matrix`."""
    k = matrix.shape[-1]
    d.require(k >= GROUP and k % 8 == 0, f"{weight_name} has k={k}, expected a multiple of 8, at least {GROUP}, beside bf16 activations")
    for label, held in ((name, array), (f"{weight_name} codes", matrix.codes)):
        d.require(held.address % 16 == 0, f"{label} is at address {held.address:#x}, expected a multiple of 16 beside bf16 activations")


def _scales(matrix: Matrix) -> int | None:
    return None if matrix.scales is None else matrix.scales.address


def experts(stream: Stream, x: Array, ids: Array, weight: Matrix, act: Array, part: FetchPart | None = None) -> None:
    """act[r, s] = T(T(silu(gate)) * up), gate and up = T(x[r] @ w^T) with the gate and the up rows of expert ids[r, s].

    x [rows, k] T, ids [rows, slots] i32, weight [experts, 2 * n, k] (n gate rows, then n up rows), act [rows, slots, n] T. An id outside
    [0, experts) gives zeros. Formats: T f32: f32, bf16, q4g64; T bf16: bf16, q8g64, q4g64, with k a multiple of 8 from 64 on, x and codes at
    multiples of 16 bytes. At most 65,535 pairs and 16,384 experts; fast for few rows. part: FETCH runs in blocks beside the products of two rows and
    more. Raises ContractError. Source: as matmul and silu_mul round.
    """
    d = Dims("step_experts")
    d.match("x", x, "rows", "k", dtype=_T)
    d.match("ids", ids, "rows", "slots", dtype=DType.I32)
    _match_weight(d, "weight", weight, "experts", "2n", "k")
    _require_format(d, "weight", weight, x.dtype, _ROUTED)
    d.require(d["2n"] % 2 == 0, f"weight dim 1 is {d['2n']}, expected gate and up rows, an even number")
    d.bind("n", d["2n"] // 2, "weight dim 1 / 2")
    d.match("act", act, "rows", "slots", "n", dtype=x.dtype)
    d.distinct("act", act, "x", x)
    d.require(d["rows"] * d["slots"] <= _PAIRS_MAX, f"x has {d['rows']} rows of {d['slots']} slots, expected at most {_PAIRS_MAX:,} pairs")
    d.require(d["experts"] <= _EXPERTS_MAX, f"weight has {d['experts']} experts, expected at most {_EXPERTS_MAX:,}")
    if weight.format.quantised:
        _require_aligned(d, "x", x)
    if x.dtype is DType.BF16:
        _require_wave(d, "x", x, "weight", weight)
    name = kernel_for("step_experts", x.dtype, weight.format, d["rows"])
    args = step_experts_args(
        x=x.address,
        ids=ids.address,
        codes=weight.codes.address,
        scales=_scales(weight),
        act=act.address,
        rows=d["rows"],
        slots=d["slots"],
        experts=d["experts"],
        n=d["n"],
        k=d["k"],
        format=weight.format,
    )
    if part is not None:
        d.require(d["rows"] > 1, "part is given beside one row of x, expected None; next: FETCH beside another product")
        d.require(part.awaits is None, "part has awaits, expected None: experts wait for the launch before")
        bind_fetch(d, args, part)
    pairs, at_once = d["rows"] * d["slots"], _blocks_that_share(stream, name)
    if at_once:
        args.blocks = max(at_once - args.part_blocks, pairs)  # so that no share is longer than the columns of a turn
        launch(stream, name, (args.part_blocks + args.blocks, 1, 1), args)
        return
    columns = ceil_div(d["n"], stream.device.kernel(name).constants["cols"])
    launch(stream, name, (ceil_div(args.part_blocks, columns) + pairs, columns, 1), args)


def _blocks_that_share(stream: Stream, kernel: str) -> int:
    """How many blocks of a kernel share the work of its launch: those that run at once; 0: each has an output of its own."""
    resident = stream.device.kernel(kernel).constants.get("resident", 0)
    return resident * stream.device.properties.compute_units if on_sm(stream) else 0


def down(
    stream: Stream,
    act: Array,
    ids: Array,
    weights: Array,
    weight: Matrix,
    shared_act: Array,
    shared: Matrix,
    residual: Array,
    y: Array,
    halves: Halves | None = None,
    mail: SumMail | None = None,
) -> None:
    """y[r] = T(residual[r] + (sum over s of (weights[r, s] * act[r, s]) @ down^T + shared_act[r] @ shared^T)), slots ascending, in f32.

    act [rows, slots, k] T, ids [rows, slots] i32, weights [rows, slots] f32, weight [experts, n, k], shared_act [rows, shared_k] T, shared
    [n, shared_k], residual and y [rows, n] T; y may be residual. slots <= 16. Formats of weight: as `experts`; of shared: bf16, q8g64 and, with
    T f32, f32. An id outside [0, experts) adds zeros. T bf16: k and shared_k as k of `experts`, as the addresses; weights * act enters scaled formats
    as integers of 16 bits a group, plain ones as bf16; halves wanted. T f32: weights[r, s] multiplies the sum. Both halves of k and of shared_k
    (`halves.half_of`) have a sum of their own; these are added last. mail, T bf16, instead of halves, on a device of a pair: the matrices are one
    half of k and of shared_k, as those of `down_half`, and the launch adds the other device's sums, for which every one of its blocks waits. Raises
    ContractError. Source: the sum of transformers' grouped_mm experts, without its roundings to T on the way.
    """
    d = Dims("step_down")
    args = _down_args(d, act, ids, weights, weight, shared_act, shared, ("y", y))
    for label, array in (("residual", residual), ("y", y)):
        d.match(label, array, "rows", "n", dtype=act.dtype)
    args.residual = residual.address
    if mail is not None:
        d.require(act.dtype is DType.BF16, "mail is given beside f32 act, expected bf16; next: down_half and an exchange of Sums")
    elif act.dtype is DType.BF16:
        if halves is None:
            d.fail("halves is None, expected Halves beside bf16 act")
        halves.check(d, d["rows"], d["n"])
        args.partial, args.arrivals = halves.partial.address, halves.arrivals.address
    _launch_down(d, stream, act.dtype, weight.format, args, mail)


def down_half(stream: Stream, act: Array, ids: Array, weights: Array, weight: Matrix, shared_act: Array, shared: Matrix, total: Array) -> None:
    """total[r] = (sum over s of (weights[r, s] * act[r, s]) @ down^T) + shared_act[r] @ shared^T, f32: what one device of a pair adds to `down`.

    The matrices are one half of k and of shared_k, those of the first device or of the second; total [rows, n] f32 has the bits of that half inside
    `down` of the whole matrices; `halves.join` adds both. Everything else as `down`. Enqueues one kernel. Raises ContractError.
    """
    d = Dims("step_down_half")
    args = _down_args(d, act, ids, weights, weight, shared_act, shared, ("total", total))
    d.match("total", total, "rows", "n", dtype=DType.F32)
    _launch_down(d, stream, act.dtype, weight.format, args)


def _down_args(
    d: Dims, act: Array, ids: Array, weights: Array, weight: Matrix, shared_act: Array, shared: Matrix, output: tuple[str, Array]
) -> step_down_args:
    """What `down` and `down_half` have in common. output: its name and array, whose shape and dtype the caller checks."""
    name, y = output
    d.match("act", act, "rows", "slots", "k", dtype=_T)
    d.match("ids", ids, "rows", "slots", dtype=DType.I32)
    d.match("weights", weights, "rows", "slots", dtype=DType.F32)
    _match_weight(d, "weight", weight, "experts", "n", "k")
    d.match("shared_act", shared_act, "rows", "shared_k", dtype=act.dtype)
    _match_weight(d, "shared", shared, "n", "shared_k")
    _require_format(d, "weight", weight, act.dtype, _ROUTED)
    _require_format(d, "shared", shared, act.dtype, _SHARED)
    d.distinct(name, y, "act", act)
    d.distinct(name, y, "shared_act", shared_act)
    for label, matrix, array in (("act", weight, act), ("shared_act", shared, shared_act)):
        if matrix.format.quantised:
            _require_aligned(d, label, array)
    if act.dtype is DType.BF16:
        _require_wave(d, "act", act, "weight", weight)
        _require_wave(d, "shared_act", shared_act, "shared", shared)
    return step_down_args(
        act=act.address,
        ids=ids.address,
        weights=weights.address,
        codes=weight.codes.address,
        scales=_scales(weight),
        shared_act=shared_act.address,
        shared_codes=shared.codes.address,
        shared_scales=_scales(shared),
        y=y.address,
        rows=d["rows"],
        slots=d["slots"],
        experts=d["experts"],
        n=d["n"],
        k=d["k"],
        shared_k=d["shared_k"],
        format=weight.format,
        shared_format=shared.format,
    )


def _launch_down(d: Dims, stream: Stream, dtype: DType, weight_format: WeightFormat, args: step_down_args, mail: SumMail | None = None) -> None:
    name = f"step_down_{dtype.label}_{weight_format.label}"
    limits = stream.device.kernel(name).constants
    d.require(args.slots <= limits["slots_max"], f"slots is {args.slots}, expected at most {limits['slots_max']}")
    columns = limits["cols"]
    scaled = weight_format.quantised and args.shared_format == WeightFormat.Q8G64
    if mail is not None and scaled and args.rows * ceil_div(args.n, columns // 2) <= blocks_at_once(stream):
        name, columns = f"step_down_narrow_{dtype.label}_{weight_format.label}", columns // 2
    sets = ceil_div(args.n, columns)
    if args.partial and args.rows > 1 and scaled and on_sm(stream):
        name = f"step_down_rows_{dtype.label}_{weight_format.label}"
        args.blocks = max(_blocks_that_share(stream, name), args.rows)
        launch(stream, name, (args.blocks, 1, 1), args)
        return
    if mail is not None:
        mail.bind(d, args.mail, args.rows * args.n, args.rows * sets)
        args.waiting_blocks = args.rows * sets
    launch(stream, name, (args.rows, sets * (2 if args.partial else 1), 1), args)


def _matrix_bytes(n: int, k: int, weight_format: WeightFormat) -> int:
    return n * k * weight_format.bits // 8 + (n * (k // GROUP) * 2 if weight_format.quantised else 0)


def cost_experts(rows: int, slots: int, active_experts: int, n: int, k: int, item_bytes: int, weight_format: WeightFormat) -> Cost:
    """Cost with the weights of each of `active_experts` read once."""
    pairs = rows * slots
    data = rows * k * item_bytes + pairs * (n * item_bytes + 4)
    return Cost(bytes=data + active_experts * _matrix_bytes(2 * n, k, weight_format), flops=pairs * (4 * n * k + 5 * n))


def cost_down(
    rows: int,
    slots: int,
    active_experts: int,
    n: int,
    k: int,
    shared_k: int,
    item_bytes: int,
    weight_format: WeightFormat,
    shared_format: WeightFormat,
) -> Cost:
    """Cost with the weights of each of `active_experts` and of the shared expert read once."""
    data = rows * (slots * (k * item_bytes + 8) + (shared_k + 2 * n) * item_bytes)
    held = active_experts * _matrix_bytes(n, k, weight_format) + _matrix_bytes(n, shared_k, shared_format)
    return Cost(bytes=data + held, flops=rows * n * (2 * slots * k + 2 * shared_k + 2 * slots + 2))
