"""Checkpoint tensors into the layouts of the forward pass: dequantisation, conversion, split of kv_b. Method: weights.hip."""

from __future__ import annotations

from glm53.hip import Array, Stream
from glm53.ops.args import dequant_args, split_kv_b_args
from glm53.ops.contract import Cost, Dims, ceil_div, launch, variant
from glm53.spec import DType

SCALE_BLOCK = 128  # rows and columns that share one scale in the released FP8 checkpoints
DEQUANT_COLS = 2048  # columns a block, as in the LAUNCH lines of weights.hip
SPLIT_TILE = 32
_DEQUANT_VARIANTS = ("f8_f32", "f8_bf16", "bf16_f32", "f32_bf16", "bf16_bf16", "f32_f32")


def dequant(stream: Stream, x: Array, scale: Array | None, y: Array) -> None:
    """y[r, c] = Y(float(x[r, c]) * scale[r / 128, c / 128]); scale None: a conversion (not for e4m3, which needs its scales).

    x, y [rows, cols]; scale [ceil(rows / 128), ceil(cols / 128)] f32, the last block of a side may be ragged. X_Y: f8_f32, f8_bf16,
    bf16_f32, f32_bf16, bf16_bf16, f32_f32. x must not overlap y.
    """
    dims = Dims("dequant")
    dims.match("x", x, "rows", "cols")
    dims.match("y", y, "rows", "cols")
    dims.distinct("x", x, "y", y)
    if scale is not None:
        dims.match("scale", scale, ceil_div(dims["rows"], SCALE_BLOCK), ceil_div(dims["cols"], SCALE_BLOCK), dtype=DType.F32)
    dims.require(scale is not None or x.dtype is not DType.F8E4M3, "x is f8e4m3 and scale is None, expected its f32 scales")
    name = variant("dequant", _DEQUANT_VARIANTS, x.dtype, y.dtype)
    args = dequant_args(x.address, 0 if scale is None else scale.address, y.address, dims["rows"], dims["cols"])
    launch(stream, name, (dims["rows"], ceil_div(dims["cols"], DEQUANT_COLS), 1), args)


def cost_dequant(x: Array, scale: Array | None, y: Array) -> Cost:
    return Cost(x.nbytes + y.nbytes + (0 if scale is None else scale.nbytes), x.shape[0] * x.shape[1])


def split_kv_b(stream: Stream, kv_b: Array, wk: Array, wv: Array) -> None:
    """kv_b [heads * (nope + v), latent] -> wk [heads, latent, nope] (transposed) and wv [heads, v, latent]; all W (f32 or bf16).

    Rows of a head are its nope rows of K, then its v rows of V. Source: the absorbed form of DeepSeek-V2's MLA.
    """
    dims = Dims("split_kv_b")
    dims.match("wk", wk, "heads", "latent", "nope", dtype=(DType.F32, DType.BF16))
    dims.match("wv", wv, "heads", "v", "latent", dtype=wk.dtype)
    heads, nope, v, latent = (dims[name] for name in ("heads", "nope", "v", "latent"))
    dims.match("kv_b", kv_b, heads * (nope + v), "latent", dtype=wk.dtype)
    args = split_kv_b_args(kv_b.address, wk.address, wv.address, heads, nope, v, latent)
    grid = (ceil_div(latent, SPLIT_TILE), ceil_div(nope + v, SPLIT_TILE), heads)
    launch(stream, variant("split_kv_b", ("f32", "bf16"), wk.dtype), grid, args)


def cost_split_kv_b(kv_b: Array) -> Cost:
    return Cost(2 * kv_b.nbytes, 0)
