"""numpy references of the experts of a decode step, and weights in each format for the checks."""

from __future__ import annotations

import numpy as np

from glm53.check.case import round_to
from glm53.check.reference_experts import expert_sum
from glm53.spec import DType, WeightFormat

GROUP = 64


def draw_weights(seed: int, shape: tuple[int, ...], weight_format: WeightFormat) -> tuple[np.ndarray, np.ndarray | None, np.ndarray]:
    """(codes, scales, values) of a random matrix [.., n, k]: codes and scales as `Matrix` holds them, values f32 as they are meant.

    Codes take every value of their range; scales of both signs, among them 0 and a subnormal f16.
    """
    rng = np.random.default_rng(seed)
    if not weight_format.quantised:
        dtype = DType.F32 if weight_format is WeightFormat.F32 else DType.BF16
        values = round_to(rng.standard_normal(shape).astype(np.float32) * np.float32(0.1), dtype)
        return values, None, values
    *rest, k = shape
    scales = (rng.standard_normal((*rest, k // GROUP)) * 0.02).astype(np.float16)
    flat = scales.reshape(-1)
    flat[:: max(1, flat.size // 7)] = 0
    flat[1 :: max(2, flat.size // 5)] = np.float16(3e-6)
    codes: np.ndarray
    whole: np.ndarray
    if weight_format is WeightFormat.Q8G64:
        signed = rng.integers(-127, 128, shape, dtype=np.int8)
        codes, whole = signed.view(np.uint8), signed.astype(np.float32)
    else:
        nibbles = rng.integers(0, 16, shape, dtype=np.uint8)
        codes, whole = nibbles[..., 0::2] | (nibbles[..., 1::2] << 4), nibbles.astype(np.float32) - 8
    return np.ascontiguousarray(codes), scales.view(np.uint16), whole * np.repeat(scales.astype(np.float32), GROUP, axis=-1)


def products(x: np.ndarray, values: np.ndarray, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """x[r, s] @ values[ids[r, s]]^T as float64 and sum |x||w|; zeros where an id is outside [0, experts).

    x [rows, slots, k], values [experts, n, k], ids [rows, slots].
    """
    inside = (ids >= 0) & (ids < len(values))
    w = values.astype(np.float64)[np.where(inside, ids, 0)] * inside[..., None, None]
    return np.einsum("rsk,rsnk->rsn", x.astype(np.float64), w), np.einsum("rsk,rsnk->rsn", np.abs(x).astype(np.float64), np.abs(w))


def silu_mul(gate: np.ndarray, up: np.ndarray, dtype: DType) -> np.ndarray:
    """T(T(silu(gate)) * up) of values in T."""
    with np.errstate(over="ignore"):
        active = round_to((gate.astype(np.float64) / (1 + np.exp(-gate.astype(np.float64)))).astype(np.float32), dtype)
    return round_to(active * up, dtype)


def experts(x: np.ndarray, values: np.ndarray, ids: np.ndarray, dtype: DType) -> tuple[np.ndarray, np.ndarray]:
    """act [rows, slots, n] in T and its error scale: that of gate and up through the product.

    x [rows, k], values [experts, 2 n, k].
    """
    per_slot = np.repeat(x[:, None, :], ids.shape[1], axis=1)
    sums, size = products(per_slot, values, ids)
    n = sums.shape[-1] // 2
    gate, up = round_to(sums[..., :n].astype(np.float32), dtype), round_to(sums[..., n:].astype(np.float32), dtype)
    # |d silu| <= 1.1, so errors of gate pass on times |up|, those of up times |silu| <= |gate|.
    scale = 1.1 * size[..., :n] * np.abs(up) + size[..., n:] * np.abs(gate) + 1e-3
    return silu_mul(gate, up, dtype), scale


def down(
    act: np.ndarray,
    values: np.ndarray,
    ids: np.ndarray,
    weights: np.ndarray,
    shared_act: np.ndarray,
    shared: np.ndarray,
    residual: np.ndarray,
    dtype: DType,
) -> tuple[np.ndarray, np.ndarray]:
    """y [rows, n] in T and its error scale. act [rows, slots, k], values [experts, n, k], shared [n, shared_k]."""
    sums, size = products(act, values, ids)
    common = shared_act.astype(np.float64) @ shared.astype(np.float64).T
    common_size = np.abs(shared_act).astype(np.float64) @ np.abs(shared).astype(np.float64).T
    y = expert_sum(round_to(sums.astype(np.float32), dtype), weights, round_to(common.astype(np.float32), dtype), residual, dtype)
    return y, np.einsum("rs,rsn->rn", np.abs(weights).astype(np.float64), size) + common_size + np.abs(residual)
