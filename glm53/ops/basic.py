"""Embeddings, norms, rotary embedding, gated activation. T: type of the activations, f32 or bf16; W: type of the weights.

Every function enqueues one kernel on `stream` and returns at once; ContractError if shapes, types or devices do not fit. `cost_*` gives
what the call with the same arrays moves and computes. Formulas: hipsrc/kernels/basic.hip.
"""

from __future__ import annotations

from glm53.hip import Array, Stream
from glm53.ops.args import embed_args, norm_args, rope_args, silu_mul_args
from glm53.ops.contract import U32_LIMIT, Cost, Dims, ceil_div, launch, variant
from glm53.spec import DType

ACTIVATIONS = (DType.F32, DType.BF16)
_EMBED_VARIANTS = ("f32_f32", "f32_bf16", "bf16_bf16")
_T_VARIANTS = ("f32", "bf16")


def embed(stream: Stream, tokens: Array, table: Array, y: Array) -> None:
    """y[r] = table[tokens[r]]; a token outside [0, vocab) gives a row of NaN.

    tokens [rows] i32, table [vocab, hidden] W, y [rows, hidden] T. Variants T_W: f32_f32, f32_bf16, bf16_bf16.
    """
    dims = Dims("embed")
    dims.match("tokens", tokens, "rows", dtype=DType.I32)
    dims.match("table", table, "vocab", "hidden", dtype=ACTIVATIONS)
    dims.match("y", y, "rows", "hidden", dtype=ACTIVATIONS)
    name = variant("embed", _EMBED_VARIANTS, y.dtype, table.dtype)
    args = embed_args(table.address, tokens.address, y.address, dims["hidden"], dims["vocab"])
    launch(stream, name, (dims["rows"], ceil_div(dims["hidden"], 1024), 1), args)


def cost_embed(tokens: Array, table: Array, y: Array) -> Cost:
    return Cost(tokens.nbytes + len(tokens) * table.shape[1] * table.dtype.item_bytes + y.nbytes, 0)


def _norm(op: str, stream: Stream, x: Array, weight: Array, bias: Array | None, y: Array, eps: float) -> None:
    dims = Dims(op)
    dims.match("x", x, "rows", "columns", dtype=ACTIVATIONS)
    dims.match("y", y, "rows", "columns", dtype=x.dtype)
    dims.match("weight", weight, "width", dtype=x.dtype)
    if bias is not None:
        dims.match("bias", bias, "width", dtype=x.dtype)
    width, columns = dims["width"], dims["columns"]
    dims.require(width <= columns, f"weight dim 0 is {width}, expected at most columns={columns} (bound by x dim 1)")
    dims.require(eps > 0, f"eps is {eps}, expected a positive number")
    bias_address = 0 if bias is None else bias.address
    args = norm_args(x.address, weight.address, bias_address, y.address, width, columns, columns, eps)
    launch(stream, variant(op, _T_VARIANTS, x.dtype), (dims["rows"], 1, 1), args)


def rms_norm(stream: Stream, x: Array, weight: Array, y: Array, eps: float) -> None:
    """y = weight * T(x / sqrt(mean(x^2) + eps)) over the first `width` columns; other columns of y are left alone.

    x, y [rows, columns] T; weight [width] T, width <= columns; y may be x. Source: transformers' GlmMoeDsaRMSNorm, which rounds to T before
    it scales.
    """
    _norm("rms_norm", stream, x, weight, None, y, eps)


def layer_norm(stream: Stream, x: Array, weight: Array, bias: Array, y: Array, eps: float) -> None:
    """y = T((x - mean) / sqrt(var + eps) * weight + bias) over the first `width` columns.

    x, y [rows, columns] T; weight, bias [width] T, width <= columns; y may be x. var is that of the centred values, divided by width.
    """
    _norm("layer_norm", stream, x, weight, bias, y, eps)


def cost_norm(x: Array, weight: Array) -> Cost:
    """Of rms_norm and layer_norm: one read and one write of the normed columns; 4 operations a value."""
    values = x.shape[0] * weight.shape[0]
    return Cost(2 * values * x.dtype.item_bytes + weight.nbytes, 4 * values)


def rope(stream: Stream, x: Array, positions: Array, inv_freq: Array, offset: int) -> None:
    """Rotates the pairs (2i, 2i + 1) of columns [offset, offset + dim) of every head by positions[r] * inv_freq[i], in place.

    x [rows, heads, head_columns] T; positions [rows] i32, 0 <= position < 2^21; inv_freq [dim / 2] f32, each at most 1. The angle is an f32
    product, sine and cosine are rounded to T, as in transformers; pairs stay where they are.
    """
    dims = Dims("rope")
    dims.match("x", x, "rows", "heads", "head_columns", dtype=ACTIVATIONS)
    dims.match("positions", positions, "rows", dtype=DType.I32)
    dims.match("inv_freq", inv_freq, "pairs", dtype=DType.F32)
    dim, columns = 2 * dims["pairs"], dims["head_columns"]
    text = f"columns [{offset}, {offset + dim}) rotate, expected within head_columns={columns} (bound by x dim 2)"
    dims.require(offset >= 0 and offset + dim <= columns, text)
    args = rope_args(x.address, positions.address, inv_freq.address, dims["heads"] * columns, columns, dims["heads"], offset, dim)
    launch(stream, variant("rope", _T_VARIANTS, x.dtype), (dims["rows"], 1, 1), args)


def cost_rope(x: Array, inv_freq: Array) -> Cost:
    """Reads and writes the rotated columns; 6 operations a pair, sine and cosine not counted."""
    pairs = x.shape[0] * x.shape[1] * inv_freq.shape[0]
    return Cost(4 * pairs * x.dtype.item_bytes + 4 * x.shape[0] + inv_freq.nbytes, 6 * pairs)


def silu_mul(stream: Stream, x: Array, y: Array) -> None:
    """y = T(silu(gate)) * up with x [rows, 2 * width] T = gate columns, then up columns; y [rows, width] T; rows * width < 2^32."""
    dims = Dims("silu_mul")
    dims.match("y", y, "rows", "width", dtype=ACTIVATIONS)
    dims.match("x", x, "rows", 2 * dims["width"], dtype=y.dtype)
    dims.distinct("x", x, "y", y)
    count = dims["rows"] * dims["width"]
    dims.require(count < U32_LIMIT, f"rows * width is {count}, expected less than 2^32")
    args = silu_mul_args(x.address, y.address, count, dims["width"], 0)
    launch(stream, variant("silu_mul", _T_VARIANTS, y.dtype), (ceil_div(count, 1024), 1, 1), args)


def cost_silu_mul(x: Array, y: Array) -> Cost:
    """5 operations a value: negate, exp, add, divide, multiply."""
    return Cost(x.nbytes + y.nbytes, 5 * y.shape[0] * y.shape[1])
