"""Matrix products with weights stored [n, k]. Two classes of kernel: "step" (few rows: decode, verify) and "tile" (prompt rows).

Within a class the bits of a row depend on its own x and on w only, never on how many rows are beside it; between the classes only tolerance
holds. Both take any number of rows; step is the fast one up to about 16. Sums are in f32. Method: hipsrc/kernels/matmul.hip.
"""

from __future__ import annotations

from glm53.hip import Array, Stream
from glm53.ops.args import matmul_args
from glm53.ops.contract import Cost, Dims, ceil_div, launch, variant
from glm53.spec import DType

_VARIANTS = ("f32_f32_f32", "f32_bf16_f32", "bf16_bf16_bf16", "bf16_bf16_f32", "bf16_f32_f32")
_FLOATS = (DType.F32, DType.BF16)
STEP_COLS = 32  # output columns a block, as in the LAUNCH lines of matmul.hip
TILE_COLS = TILE_ROWS = 64


def _launch(stream: Stream, dims: Dims, kind: str, types: tuple[DType, DType, DType], args: matmul_args, batch: int) -> None:
    dims.require(kind in ("step", "tile"), f"kind is {kind!r}, expected 'step' or 'tile'")
    name = variant(f"matmul_{kind}", _VARIANTS, *types)
    columns, row_blocks = (STEP_COLS, 1) if kind == "step" else (TILE_COLS, ceil_div(args.rows, TILE_ROWS))
    launch(stream, name, (ceil_div(args.n, columns), row_blocks, batch), args)


def matmul(stream: Stream, x: Array, w: Array, y: Array, residual: Array | None = None, kind: str = "step") -> None:
    """y = Y(x w^T), with a residual Y(Y(x w^T) + residual).

    x [rows, k] X, w [n, k] W, y and residual [rows, n] Y; residual may be y itself, x must not overlap y. Variants X_W_Y: f32_f32_f32,
    f32_bf16_f32, bf16_bf16_bf16, bf16_bf16_f32, bf16_f32_f32. kind: "step" or "tile". Enqueues one kernel.
    """
    dims = Dims("matmul")
    dims.match("x", x, "rows", "k", dtype=_FLOATS)
    dims.match("w", w, "n", "k", dtype=_FLOATS)
    dims.match("y", y, "rows", "n", dtype=_FLOATS)
    if residual is not None:
        dims.match("residual", residual, "rows", "n", dtype=y.dtype)
    dims.distinct("x", x, "y", y)
    rows, n, k = dims["rows"], dims["n"], dims["k"]
    residual_address = 0 if residual is None else residual.address
    args = matmul_args(x.address, w.address, residual_address, y.address, 0, 0, 0, rows, n, k, k, k, n)
    _launch(stream, dims, kind, (x.dtype, w.dtype, y.dtype), args, batch=1)


def per_head(stream: Stream, x: Array, w: Array, y: Array, kind: str = "step") -> None:
    """y[r, h] = Y(x[r, h, :k] w[h]^T): one product per head, over the first k columns of each head of x.

    x [rows, heads, head_columns] X with head_columns >= k, w [heads, n, k] W, y [rows, heads, n] Y; x must not overlap y. Variants as
    `matmul`.
    """
    dims = Dims("per_head")
    dims.match("x", x, "rows", "heads", "head_columns", dtype=_FLOATS)
    dims.match("w", w, "heads", "n", "k", dtype=_FLOATS)
    dims.match("y", y, "rows", "heads", "n", dtype=_FLOATS)
    dims.distinct("x", x, "y", y)
    rows, heads, n, k, columns = (dims[name] for name in ("rows", "heads", "n", "k", "head_columns"))
    dims.require(k <= columns, f"w dim 2 is {k}, expected at most head_columns={columns} (bound by x dim 2)")
    args = matmul_args(x.address, w.address, 0, y.address, columns, n * k, n, rows, n, k, heads * columns, k, heads * n)
    _launch(stream, dims, kind, (x.dtype, w.dtype, y.dtype), args, batch=heads)


def cost_matmul(x: Array, w: Array, y: Array, residual: Array | None = None) -> Cost:
    """Of `matmul` and `per_head` (whose x may have more columns than are read)."""
    k, n = w.shape[-1], w.shape[-2]
    products = x.shape[0] * (x.shape[1] if len(x.shape) == 3 else 1)
    read = products * k * x.dtype.item_bytes + w.nbytes + (0 if residual is None else residual.nbytes)
    return Cost(read + y.nbytes, 2 * products * n * k)
