"""Matrix products of prompt rows, with weights stored [n, k] in any weight format. Decode rows have products of their own: `step`.

The bits of a row depend on its own x and on w only, never on how many rows are beside it. Sums are in f32. Method: hipsrc/kernels/matmul.hip.
"""

from __future__ import annotations

from glm53.hip import Array, Stream
from glm53.ops.args import matmul_args
from glm53.ops.contract import Cost, Dims, ceil_div, launch, variant
from glm53.ops.halves import half_of
from glm53.ops.matrix import GROUP, Matrix
from glm53.spec import DType, WeightFormat

_VARIANTS = (
    "bf16_f32_f32",
    *(f"{types[0]}_{w}_{types[1]}" for w in ("bf16", "q8g64", "q4g64") for types in (("f32", "f32"), ("bf16", "bf16"), ("bf16", "f32"))),
    "f32_f32_f32",
)
_FLOATS = (DType.F32, DType.BF16)
TILE_COLS = TILE_ROWS = 64  # outputs of a block, as in the LAUNCH lines of matmul.hip


def _launch(stream: Stream, types: tuple[DType, WeightFormat, DType], args: matmul_args, batch: int) -> None:
    name = variant("matmul_tile", _VARIANTS, *types)
    launch(stream, name, (ceil_div(args.n, TILE_COLS), ceil_div(args.rows, TILE_ROWS), batch), args)


def matmul(stream: Stream, x: Array, w: Matrix, y: Array, residual: Array | None = None) -> None:
    """y = Y(x w^T), with a residual Y(Y(x w^T) + residual).

    x [rows, k] X, w [n, k] W, y and residual [rows, n] Y; residual may be y itself, x must not overlap y. Variants X_W_Y: f32_W_f32 and
    bf16_W_f32 with any W, bf16_W_bf16 with any but f32. Enqueues one kernel. Raises ContractError.
    """
    dims = Dims("matmul")
    dims.match("x", x, "rows", "k", dtype=_FLOATS)
    dims.match("w", w, "n", "k")
    dims.match("y", y, "rows", "n", dtype=_FLOATS)
    if residual is not None:
        dims.match("residual", residual, "rows", "n", dtype=y.dtype)
    dims.distinct("x", x, "y", y)
    rows, n, k = dims["rows"], dims["n"], dims["k"]
    residual_address = 0 if residual is None else residual.address
    args = matmul_args(x.address, w.codes.address, w.scales_address, residual_address, y.address, 0, 0, 0, rows, n, k, k, k, n)
    _launch(stream, (x.dtype, w.format, y.dtype), args, batch=1)


def matmul_half(stream: Stream, x: Array, w: Matrix, half: int | None, y: Array) -> None:
    """y = x[:, part] w[:, part]^T, part the first half of k (0) or the rest (1), as `halves.half_of` divides it; None: all of k, which on a side of a
    pair is one half of the whole's.

    x [rows, k] X, w [n, k] W, y [rows, n] f32; x must not overlap y. Variants X_W: f32_W and bf16_W with any W. The other half and `halves.join`
    complete the product. Enqueues one kernel. Raises ContractError.
    """
    dims = Dims("matmul_half")
    dims.match("x", x, "rows", "k", dtype=_FLOATS)
    dims.match("w", w, "n", "k")
    dims.match("y", y, "rows", "n", dtype=DType.F32)
    dims.distinct("x", x, "y", y)
    rows, n, k = dims["rows"], dims["n"], dims["k"]
    first, count = (0, k) if half is None else half_of(k, half)
    args = matmul_args(
        x=x.address + first * x.dtype.item_bytes,
        w=w.codes.address + first * w.format.bits // 8,
        scales=w.scales_address and w.scales_address + first // GROUP * 2,
        y=y.address,
        rows=rows,
        n=n,
        k=count,
        x_stride=k,
        w_stride=k,
        y_stride=n,
    )
    _launch(stream, (x.dtype, w.format, y.dtype), args, batch=1)


def per_head(stream: Stream, x: Array, w: Matrix, y: Array) -> None:
    """y[r, h] = Y(x[r, h, :k] w[h]^T): one product per head, over the first k columns of each head of x.

    x [rows, heads, head_columns] X with head_columns >= k, w [heads, n, k] W, y [rows, heads, n] Y; x must not overlap y. Variants as
    `matmul`.
    """
    dims = Dims("per_head")
    dims.match("x", x, "rows", "heads", "head_columns", dtype=_FLOATS)
    dims.match("w", w, "heads", "n", "k")
    dims.match("y", y, "rows", "heads", "n", dtype=_FLOATS)
    dims.distinct("x", x, "y", y)
    rows, heads, n, k, columns = (dims[name] for name in ("rows", "heads", "n", "k", "head_columns"))
    dims.require(k <= columns, f"w dim 2 is {k}, expected at most head_columns={columns} (bound by x dim 2)")
    args = matmul_args(
        x=x.address,
        w=w.codes.address,
        scales=w.scales_address,
        y=y.address,
        x_batch_stride=columns,
        w_batch_stride=n * k,
        y_batch_stride=n,
        rows=rows,
        n=n,
        k=k,
        x_stride=heads * columns,
        w_stride=k,
        y_stride=heads * n,
    )
    _launch(stream, (x.dtype, w.format, y.dtype), args, batch=heads)


def cost_matmul(x: Array, w: Matrix, y: Array, residual: Array | None = None) -> Cost:
    """Of `matmul` and `per_head` (whose x may have more columns than are read)."""
    k, n = w.shape[-1], w.shape[-2]
    products = x.shape[0] * (x.shape[1] if len(x.shape) == 3 else 1)
    read = products * k * x.dtype.item_bytes + w.nbytes + (0 if residual is None else residual.nbytes)
    return Cost(read + y.nbytes, 2 * products * n * k)
