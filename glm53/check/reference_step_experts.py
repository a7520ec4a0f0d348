"""numpy references of the experts of a decode step, and weights in each format for the checks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from glm53.check import reference_step
from glm53.check.case import round_to
from glm53.check.reference_step import Weights
from glm53.spec import DType, WeightFormat

GROUP = 64


def draw_weights(seed: int, shape: tuple[int, ...], weight_format: WeightFormat) -> Weights:
    """A random matrix [.., n, k]. Codes take every value of their range; scales of both signs, among them 0 and a subnormal f16."""
    rng = np.random.default_rng(seed)
    if not weight_format.quantised:
        dtype = DType.F32 if weight_format is WeightFormat.F32 else DType.BF16
        return Weights(round_to(rng.standard_normal(shape).astype(np.float32) * np.float32(0.1), dtype), None, weight_format)
    *rest, k = shape
    scales = (rng.standard_normal((*rest, k // GROUP)) * 0.02).astype(np.float16)
    flat = scales.reshape(-1)
    flat[:: max(1, flat.size // 7)] = 0
    flat[1 :: max(2, flat.size // 5)] = np.float16(3e-6)
    low = -127 if weight_format is WeightFormat.Q8G64 else -8
    return Weights(rng.integers(low, -low if low == -8 else 128, shape).astype(np.float32), scales.astype(np.float32), weight_format)


def expert_of(weights: Weights, expert: int) -> Weights:
    """The matrix of one expert."""
    return Weights(weights.codes[expert], None if weights.scales is None else weights.scales[expert], weights.format)


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
        below = np.exp(-gate.astype(np.float64)).astype(np.float32)  # infinite where that of f32 is
        active = round_to(gate / (np.float32(1) + below), dtype)
    return round_to(active * up, dtype)


def gate_up(x: np.ndarray, weights: Weights, ids: np.ndarray) -> np.ndarray:
    """Sums [rows, slots, 2 n] of bf16 x [rows, k] in the order of the wave product; zeros where an id is outside."""
    sums = np.zeros((*ids.shape, weights.codes.shape[1]), np.float32)
    for (row, slot), expert in np.ndenumerate(ids):
        if 0 <= expert < len(weights.codes):
            sums[row, slot] = reference_step.tile_sums(x[row : row + 1], expert_of(weights, expert))[0]
    return sums


def experts(x: np.ndarray, weights: Weights, ids: np.ndarray, dtype: DType) -> tuple[np.ndarray, np.ndarray]:
    """act [rows, slots, n] in T and its error scale: that of gate and up through the product.

    x [rows, k], weights [experts, 2 n, k]. bf16: sums in the order of the wave product.
    """
    per_slot = np.repeat(x[:, None, :], ids.shape[1], axis=1)
    sums, size = products(per_slot, weights.values, ids)
    if dtype is DType.BF16:
        sums = gate_up(x, weights, ids)
    n = sums.shape[-1] // 2
    gate, up = round_to(sums[..., :n].astype(np.float32), dtype), round_to(sums[..., n:].astype(np.float32), dtype)
    # |d silu| <= 1.1, so errors of gate pass on times |up|, those of up times |silu| <= |gate|.
    scale = 1.1 * size[..., :n] * np.abs(up) + size[..., n:] * np.abs(gate) + 1e-3
    return silu_mul(gate, up, dtype), scale


@dataclass(frozen=True)
class DownInputs:
    """act [rows, slots, k], weights [experts, n, k], ids and mix [rows, slots], shared_act [rows, shared_k], shared [n, shared_k], residual
    [rows, n]."""

    act: np.ndarray
    weights: Weights
    ids: np.ndarray
    mix: np.ndarray
    shared_act: np.ndarray
    shared: Weights
    residual: np.ndarray

    @property
    def mixed(self) -> np.ndarray:
        """x of the routed products: mix * act in f32, zeros where an id is outside."""
        inside = (self.ids >= 0) & (self.ids < len(self.weights.codes))
        return self.mix[..., None] * self.act * inside[..., None].astype(np.float32)


def down_exact(i: DownInputs) -> tuple[np.ndarray, np.ndarray]:
    """(residual + routed + shared sums in float64 [rows, n], sum |x||w| + |residual|)."""
    sums, size = products(i.act, i.weights.values, i.ids)
    shared = i.shared.values
    y = np.einsum("rs,rsn->rn", i.mix.astype(np.float64), sums) + i.shared_act.astype(np.float64) @ shared.T + i.residual
    scale = np.einsum("rs,rsn->rn", np.abs(i.mix).astype(np.float64), size) + np.abs(i.shared_act).astype(np.float64) @ np.abs(shared).T
    return y, scale + np.abs(i.residual)


def down_f32(i: DownInputs) -> np.ndarray:
    """y [rows, n] of f32 activations: of each half of k the sum of a slot, times its weight, slots ascending, and the shared expert's."""
    halves = []
    for (act, weights), shared in zip(reference_step.halves_of(i.act, i.weights), reference_step.halves_of(i.shared_act, i.shared), strict=True):
        sums, _ = products(act, weights.values, i.ids)
        total = np.zeros_like(i.residual)
        for slot in range(i.ids.shape[1]):
            mixed = i.mix[:, slot, None].astype(np.float64) * sums[:, slot].astype(np.float32).astype(np.float64)
            total = (mixed + total).astype(np.float32)
        common = shared[0].astype(np.float64) @ shared[1].values.T
        halves.append(total + common.astype(np.float32))
    return i.residual + (halves[0] + halves[1])


def down_bf16(i: DownInputs) -> np.ndarray:
    """y [rows, n] of bf16 activations, in the order of the wave product: for each half of k the slots as one long k, and the shared expert."""
    x, y = i.mixed, np.zeros_like(i.residual)
    if not i.weights.format.quantised:
        x = round_to(x, DType.BF16)
    for row, ids in enumerate(i.ids):
        experts = [expert_of(i.weights, expert if 0 <= expert < len(i.weights.codes) else 0) for expert in ids]
        routed = [reference_step.halves_of(x[row, slot][None], w) for slot, w in enumerate(experts)]
        shared = reference_step.halves_of(i.shared_act[row][None], i.shared)
        low, high = (_wide_sum([halves[half] for halves in routed]) + _wide_sum([shared[half]]) for half in range(2))
        y[row] = round_to(i.residual[row] + (low + high)[0], DType.BF16)
    return y


def _wide_sum(products: list[tuple[np.ndarray, Weights]]) -> np.ndarray:
    return reference_step.tile_sums_of(products, True) if products[0][0].shape[-1] else np.zeros((1, len(products[0][1].codes)), np.float32)


def down_slack(i: DownInputs) -> np.ndarray:
    """[rows, n]: at most what the kernel loses of mix * act and shared_act: integers beside scaled formats, else a rounding of mix * act to bf16."""
    x, slack = i.mixed, reference_step.quantisation_error(i.shared_act, i.shared)
    for (row, slot), expert in np.ndenumerate(i.ids):
        if not 0 <= expert < len(i.weights.codes):
            continue
        weights = expert_of(i.weights, expert)
        if i.weights.format.quantised:
            slack[row] += reference_step.quantisation_error(x[row, slot][None], weights)[0]
        else:
            slack[row] += 2.0**-8 * (np.abs(x[row, slot]) @ np.abs(weights.values).T)
    return slack
