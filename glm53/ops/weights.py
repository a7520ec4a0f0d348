"""Checkpoint tensors into the layouts of the forward pass: dequantisation, conversion, split of kv_b, quantisation; and weights drawn on the device.
Method: weights.hip."""

from __future__ import annotations

import math

import numpy as np

from glm53.hip import Array, Stream
from glm53.ops.args import dequant_args, fill_random_args, quantise_args, split_kv_b_args
from glm53.ops.contract import U32_LIMIT, Cost, Dims, ceil_div, launch, variant
from glm53.ops.matrix import GROUP, Matrix
from glm53.spec import DType, WeightFormat

SCALE_BLOCK = 128  # rows and columns that share one scale in the released FP8 checkpoints
DEQUANT_COLS = 2048  # columns a block, as in the LAUNCH lines of weights.hip
SPLIT_TILE = 32
BLOCK = 256
WORD_BYTES = 16
_QUANTISE_VARIANTS = tuple(f"{x}_{y}" for x in ("f8", "bf16", "f32") for y in ("q8g64", "q4g64"))
# Root mean square of uniform codes: -127..127 with -127 twice as likely, and -8..7.
_CODE_RMS = {
    WeightFormat.Q8G64: math.sqrt((127**2 + sum(q * q for q in range(-127, 128))) / 256),
    WeightFormat.Q4G64: math.sqrt(sum(q * q for q in range(-8, 8)) / 16),
}
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


def quantise(stream: Stream, x: Array, block_scale: Array | None, y: Matrix, error: Array) -> None:
    """y = x, or float(x[r, c]) * block_scale[r / 128, c / 128], in a quantised format (rules: weights.hip).

    x [rows, k] f8e4m3, bf16 or f32, 16-byte aligned; block_scale [ceil(rows / 128), ceil(k / 128)] f32, needed for f8e4m3; y [rows, k] q8g64 or
    q4g64. error [1] u32: raised to 1 + the last row that holds what is not finite or needs a scale beyond f16; such groups are stored as zeros. x
    must not overlap y. Raises ContractError.
    """
    dims = Dims("quantise")
    dims.match("x", x, "rows", "k")
    dims.match("y", y, "rows", "k")
    dims.match("error", error, 1, dtype=DType.U32)
    dims.require(x.address % WORD_BYTES == 0, f"x is at address {x.address:#x}, expected a multiple of {WORD_BYTES}")
    for array in y.arrays:
        dims.distinct("x", x, "y", array)
    if block_scale is not None:
        dims.match("block_scale", block_scale, ceil_div(dims["rows"], SCALE_BLOCK), ceil_div(dims["k"], SCALE_BLOCK), dtype=DType.F32)
    dims.require(block_scale is not None or x.dtype is not DType.F8E4M3, "x is f8e4m3 and block_scale is None, expected its f32 scales")
    name = variant("quantise", _QUANTISE_VARIANTS, x.dtype, y.format)
    groups = dims["rows"] * (dims["k"] // GROUP)
    dims.require(groups < U32_LIMIT, f"x has {groups} groups, expected fewer than {U32_LIMIT}; next: fewer rows at a time")
    args = quantise_args(
        x=x.address,
        block_scale=0 if block_scale is None else block_scale.address,
        codes=y.codes.address,
        scales=y.scales_address,
        error=error.address,
        groups=groups,
        row_groups=dims["k"] // GROUP,
    )
    launch(stream, name, (ceil_div(groups, BLOCK), 1, 1), args)


def cost_quantise(x: Array, block_scale: Array | None, y: Matrix) -> Cost:
    """Divisions count as one operation; q4g64 tries eight scales."""
    operations = 2 if y.format is WeightFormat.Q8G64 else 8 * 5 + 2
    return Cost(x.nbytes + y.nbytes + (0 if block_scale is None else block_scale.nbytes), operations * math.prod(x.shape))


def fill_random(stream: Stream, w: Matrix, seed: int, std: float, mean: float = 0.0) -> None:
    """Fills w with weights of standard deviation `std` that depend on seed and index only: the same bits on every target.

    Plain formats: uniform in mean +- sqrt(3) std. Quantised: uniform codes and one scale (its sign drawn for each group in q4g64, whose codes have a
    mean); `mean` must be 0. Any number of weights, w 16-byte aligned. Raises ContractError.
    """
    dims = Dims("fill_random")
    dims.require(0 <= seed < 1 << 64, f"seed is {seed}, expected 0 to 2^64 - 1")
    dims.require(math.isfinite(std) and std > 0, f"std is {std}, expected a finite number above 0")
    dims.require(w.codes.address % WORD_BYTES == 0, f"w is at address {w.codes.address:#x}, expected a multiple of {WORD_BYTES}")
    dims.require(mean == 0 or not w.format.quantised, f"mean is {mean}, expected 0 with format {w.format.label}")
    count = math.prod(w.shape)
    args = fill_random_args(codes=w.codes.address, scales=w.scales_address, count=count, seed=seed, mean=mean)
    if w.format.quantised:
        with np.errstate(over="ignore"):
            args.scale = int(np.float16(std / _CODE_RMS[w.format]).view(np.uint16))
        dims.require(0 < args.scale < 0x7C00, f"std is {std}, which no f16 scale of {w.format.label} gives; expected a larger or smaller one")
    else:
        args.step = std * math.sqrt(3) / (1 << (23 if w.format is WeightFormat.F32 else 15))
    name = f"fill_random_{w.format.label}"
    launch(stream, name, (ceil_div(w.codes.nbytes, WORD_BYTES * BLOCK), 1, 1), args)


def cost_fill_random(w: Matrix) -> Cost:
    return Cost(w.nbytes, 0)


def random_matrix(stream: Stream, format: WeightFormat, shape: tuple[int, ...], seed: int, std: float, category: str = "weights") -> Matrix:
    """A new matrix on the stream's device, filled by `fill_random` in the stream's order."""
    w = Matrix.empty(stream.device, format, shape, category)
    try:
        fill_random(stream, w, seed, std)
    except BaseException:
        for array in w.arrays:
            array.free()
        raise
    return w


def random_array(stream: Stream, dtype: DType, shape: tuple[int, ...], seed: int, std: float, mean: float = 0.0, category: str = "weights") -> Array:
    """A new f32 or bf16 array on the stream's device, filled likewise."""
    array = Array.empty(stream.device, dtype, shape, category)
    try:
        fill_random(stream, Matrix.plain(array), seed, std, mean)
    except BaseException:
        array.free()
        raise
    return array
