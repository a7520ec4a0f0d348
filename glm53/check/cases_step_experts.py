"""Checks of the experts of a decode step: every format and type, odd sizes, both divisions of k, ids outside the range, alone against batched."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import numpy as np

from glm53.check import reference_step_experts as reference
from glm53.check.case import Bench, Case, draw
from glm53.check.cases_experts import expert_ids
from glm53.check.cases_step import TILE_ARCHS, put_halves, put_matrix
from glm53.check.compare import EXACT, SAME_ROUNDING, Comparison, Tolerance, compare
from glm53.hip import Array, Device
from glm53.ops import step_experts
from glm53.spec import DType, WeightFormat

F32, BF16, Q8, Q4 = WeightFormat.F32, WeightFormat.BF16, WeightFormat.Q8G64, WeightFormat.Q4G64

# Where matrix tiles add in an order of their own: a sum on a tie that rounds the other way moves act by an ulp of the sum, which is small beside
# sum |x||w| but not beside act.
_OTHER_ORDER = replace(SAME_ROUNDING[DType.BF16], absolute=1e-3)
# Against float64: half an ulp of bf16, and errors of f32 sums.
_ROUNDED = Tolerance(4e-6, 2.0**-8, 1e-4, "one rounding to bf16 of an f32 sum")


def _same_order(device: Device, *formats: WeightFormat) -> bool:
    return all(f.quantised for f in formats) or not device.arch.startswith(TILE_ARCHS)


def _tolerance(dtype: DType, device: Device, weight_format: WeightFormat) -> Tolerance:
    return SAME_ROUNDING[dtype] if dtype is DType.F32 or _same_order(device, weight_format) else _OTHER_ORDER


@dataclass(frozen=True)
class Experts:
    name: str
    rows: int
    slots: int
    experts: int
    n: int
    k: int
    dtype: DType
    format: WeightFormat
    kind: str = "random"  # of expert_ids, or outside: some ids outside [0, experts)


@dataclass(frozen=True)
class Down(Experts):
    shared_k: int = 64
    shared_format: WeightFormat = Q8
    in_place: bool = False


_Kind = TypeVar("_Kind", Experts, Down)


def step_ids(case: Experts) -> np.ndarray:
    if case.kind != "outside":
        return expert_ids(case.kind, case.rows, case.slots, case.experts)
    ids = expert_ids("random", case.rows, case.slots, case.experts)
    flat = ids.reshape(-1)
    flat[::3], flat[1::6] = -1, case.experts
    return ids


def check_rows(bench: Bench, rows: int, call: Callable[[slice], Array]) -> Array:
    """The output of all rows together, after the bits of each row have been compared with those of a call with that row alone."""
    together = call(slice(0, rows))
    bits = bench.bits(together)
    for row in range(rows if rows > 1 else 0):
        compare(f"row {row} alone", bench.bits(call(slice(row, row + 1)))[0], bits[row])
    return together


def run_experts(case: Experts, device: Device) -> Comparison:
    x, ids = draw(51, (case.rows, case.k), case.dtype), step_ids(case)
    weights = reference.draw_weights(52, (case.experts, 2 * case.n, case.k), case.format)
    want, scale = reference.experts(x, weights, ids, case.dtype)
    with Bench(device) as bench:
        weight = put_matrix(bench, weights)

        def call(of: slice) -> Array:
            act = bench.poison(case.dtype, (of.stop - of.start, case.slots, case.n))
            step_experts.experts(bench.stream, bench.put(x[of], case.dtype), bench.put(ids[of]), weight, act)
            return act

        return compare("act", bench.read(check_rows(bench, case.rows, call)), want, _tolerance(case.dtype, device, case.format), scale)


def draw_down(case: Down) -> reference.DownInputs:
    return reference.DownInputs(
        act=draw(61, (case.rows, case.slots, case.k), case.dtype),
        weights=reference.draw_weights(65, (case.experts, case.n, case.k), case.format),
        ids=step_ids(case),
        mix=np.abs(draw(62, (case.rows, case.slots))),
        shared_act=draw(63, (case.rows, case.shared_k), case.dtype),
        shared=reference.draw_weights(66, (case.n, case.shared_k), case.shared_format),
        residual=draw(64, (case.rows, case.n), case.dtype),
    )


def _compare_down(case: Down, i: reference.DownInputs, y: np.ndarray, device: Device) -> Comparison:
    exact, scale = reference.down_exact(i)
    if case.dtype is DType.F32:
        return compare("y", y, reference.down_f32(i), SAME_ROUNDING[DType.F32], scale)
    compare("y against float64", y, exact.astype(np.float32), _ROUNDED, scale + reference.down_slack(i) / _ROUNDED.absolute)
    same = _same_order(device, case.format, case.shared_format)
    return compare("y", y, reference.down_bf16(i), EXACT if same else SAME_ROUNDING[DType.BF16], scale)


def run_down(case: Down, device: Device) -> Comparison:
    i = draw_down(case)
    with Bench(device) as bench:
        weight, shared = put_matrix(bench, i.weights), put_matrix(bench, i.shared)
        halves = put_halves(bench, case.rows, case.n) if case.dtype is DType.BF16 else None

        def call(of: slice) -> Array:
            held = bench.put(i.residual[of], case.dtype)
            y = held if case.in_place else bench.poison(case.dtype, held.shape)
            step_experts.down(
                bench.stream,
                bench.put(i.act[of], case.dtype),
                bench.put(i.ids[of]),
                bench.put(i.mix[of]),
                weight,
                bench.put(i.shared_act[of], case.dtype),
                shared,
                held,
                y,
                halves,
            )
            return y

        return _compare_down(case, i, bench.read(check_rows(bench, case.rows, call)), device)


# Formats of the routed weights that each type has kernels for.
ROUTED = {DType.F32: (F32, BF16, Q4), DType.BF16: (BF16, Q8, Q4)}
SHARED = {DType.F32: (F32, BF16, Q8), DType.BF16: (BF16, Q8)}


def _each(formats: Mapping[DType, tuple[WeightFormat, ...]], make: Callable[[str, DType, WeightFormat], _Kind]) -> list[_Kind]:
    return [make(f"{t.label}-{f.label}", t, f) for t, some in formats.items() for f in some]


# k below 1,024 (not divided among waves) and from there on; n that fills no block; k in several runs of all waves; k that fills no group;
# experts with one, two, four, eight and more pairs, which share a block.
_EXPERTS = (
    *_each(ROUTED, lambda name, t, f: Experts(f"short-{name}", 3, 2, 4, 33, 192, t, f)),
    *_each(ROUTED, lambda name, t, f: Experts(f"long-{name}", 2, 2, 3, 39, 1088, t, f)),
    *_each(ROUTED, lambda name, t, f: Experts(f"spans-{name}", 9, 1, 2, 5, 2176, t, f, kind="one")),
    Experts("one", 1, 1, 1, 1, 1, DType.F32, F32),
    Experts("one-bf16", 1, 1, 1, 1, 64, DType.BF16, BF16),
    Experts("odd-f32", 2, 3, 4, 5, 17, DType.F32, F32),
    Experts("odd-bf16", 2, 3, 4, 5, 1032, DType.BF16, BF16),
    Experts("odd-short-bf16", 3, 1, 2, 17, 136, DType.BF16, BF16),
    Experts("odd-long-f32", 2, 1, 2, 3, 1025, DType.F32, F32),
    Experts("four-rows", 4, 4, 16, 64, 64, DType.BF16, Q4),
    Experts("eight-rows", 8, 8, 16, 32, 1024, DType.BF16, Q4),
    Experts("eight-rows-few-experts", 8, 8, 9, 16, 4160, DType.BF16, Q4),
    Experts("sixteen-rows", 16, 2, 6, 32, 1024, DType.BF16, Q8),
    Experts("sixteen-rows-of-eight", 16, 8, 12, 16, 1024, DType.BF16, Q4),
    Experts("all-on-one", 4, 1, 5, 36, 1152, DType.BF16, Q4, kind="one"),
    Experts("nineteen-on-one", 19, 1, 2, 16, 1024, DType.BF16, Q4, kind="one"),
    Experts("outside", 3, 4, 5, 40, 1024, DType.BF16, Q4, kind="outside"),
    Experts("outside-short", 3, 4, 5, 40, 128, DType.F32, Q4, kind="outside"),
    Experts("real-k", 1, 2, 2, 32, 6144, DType.BF16, Q4),
    Experts("beyond-the-stage", 1, 2, 2, 5, 6208, DType.BF16, Q4),
    Experts("beyond-the-stage-bf16", 2, 1, 2, 3, 8200, DType.BF16, BF16, kind="one"),
)
_DOWN = (
    *_each(ROUTED, lambda name, t, f: Down(f"short-{name}", 3, 2, 4, 21, 192, t, f, shared_k=128, shared_format=BF16)),
    *_each(ROUTED, lambda name, t, f: Down(f"long-{name}", 2, 2, 3, 37, 1088, t, f, shared_k=1152, shared_format=Q8)),
    *_each(SHARED, lambda name, t, f: Down(f"mixed-{name}", 1, 4, 4, 16, 1024, t, Q4, shared_k=320, shared_format=f)),
    *_each(SHARED, lambda name, t, f: Down(f"spans-{name}", 2, 2, 3, 5, 4160, t, Q4, shared_k=2112, shared_format=f)),
    Down("one", 1, 1, 1, 1, 1, DType.F32, F32, shared_k=1, shared_format=F32),
    Down("one-bf16", 1, 1, 1, 1, 64, DType.BF16, BF16, shared_k=64, shared_format=BF16),
    Down("odd", 2, 3, 4, 5, 17, DType.F32, F32, shared_k=1025, shared_format=F32),
    Down("odd-bf16", 2, 3, 4, 11, 1032, DType.BF16, BF16, shared_k=136, shared_format=BF16),
    Down("odd-shared-bf16", 2, 3, 4, 33, 136, DType.BF16, BF16, shared_k=2056, shared_format=BF16),
    Down("four-rows-in-place", 4, 4, 16, 64, 64, DType.BF16, Q4, shared_k=64, shared_format=Q8, in_place=True),
    Down("eight-rows", 8, 8, 16, 24, 2048, DType.BF16, Q4, shared_k=2048, shared_format=Q8),
    Down("sixteen-rows", 16, 2, 6, 16, 1024, DType.BF16, Q8, shared_k=64, shared_format=Q8, kind="one"),
    Down("most-slots", 2, 16, 17, 16, 1024, DType.BF16, Q4, shared_k=1024, shared_format=Q8),
    Down("most-slots-spans", 1, 11, 12, 16, 2112, DType.BF16, Q4, shared_k=1024, shared_format=Q8),
    Down("nine-slots", 2, 9, 9, 12, 128, DType.F32, Q4, shared_k=64, shared_format=Q8),
    Down("outside", 3, 4, 5, 13, 1024, DType.BF16, Q4, kind="outside", shared_k=1024, shared_format=Q8),
)

CASES = [
    *(Case("step-experts", case.name, partial(run_experts, case)) for case in _EXPERTS),
    *(Case("step-down", case.name, partial(run_down, case)) for case in _DOWN),
]
