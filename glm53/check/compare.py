"""One comparator for all kernel checks, and the table of tolerances.

Order of the checks: shape, NaN positions, infinities with their sign, absolute-or-relative error of each element, cosine of the whole.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from glm53.spec import DType


@dataclass(frozen=True)
class Tolerance:
    """An element holds if |got - want| <= absolute * scale + relative * |want|; the whole if 1 - cosine(got, want) <= cosine.

    scale: 1, or what the caller gives, e.g. sum |x||w| of each dot product, to which rounding errors of its sum are proportional.
    unequal: share of the elements that may differ at all (two always may): finds a rounding step that was left out.
    """

    absolute: float
    relative: float
    cosine: float
    reason: str
    unequal: float = 1.0


TOLERANCES = {
    DType.F32: Tolerance(
        4e-6, 4e-6, 1e-9, "f32 sums in another order than numpy's, and exp or division of the device within a few ulp (2^-23 = 1.2e-7 each)"
    ),
    DType.BF16: Tolerance(
        1e-5, 2**-6 * 1.001, 1e-4, "a value near a tie may round to the other neighbour: one bf16 ulp (2^-7) at the end and one before it"
    ),
}
# For kernels that round exactly where their reference does.
SAME_ROUNDING = {
    DType.F32: TOLERANCES[DType.F32],
    DType.BF16: replace(TOLERANCES[DType.BF16], unequal=0.02, reason="only a value within f32 error of a tie, about 1 in 1,000, may differ"),
}
EXACT = Tolerance(0.0, 0.0, 0.0, "integers, copies and conversions have one right answer")


class Mismatch(AssertionError):
    """A kernel's output differs from its reference; the text has count, worst coordinate and both values."""


@dataclass(frozen=True)
class Comparison:
    """A comparison that held. worst: largest |got - want| / max(scale, |want|), at coordinate `at`."""

    name: str
    count: int
    worst: float
    at: tuple[int, ...]
    got: float
    want: float
    cosine_gap: float

    def __str__(self) -> str:
        return f"{self.name}: {self.count} values, worst error {self.worst:.2e} at {list(self.at)}: got {self.got!r}, want {self.want!r}"


def worst_of(*comparisons: Comparison) -> Comparison:
    """Of several outputs of one case, the comparison with the largest error."""
    return max(comparisons, key=lambda comparison: comparison.worst)


def _first(mask: np.ndarray) -> tuple[int, ...]:
    return tuple(int(i) for i in np.unravel_index(int(np.argmax(mask)), mask.shape))


def _require_none(name: str, what: str, bad: np.ndarray, got: np.ndarray, want: np.ndarray) -> None:
    if bad.any():
        at = _first(bad)
        where = f"first at {list(at)}: got {got[at]!r}, want {want[at]!r}"
        raise Mismatch(f"{name}: {what} differ in {int(bad.sum())} of {bad.size} values, {where}")


def compare(name: str, got: np.ndarray, want: np.ndarray, tolerance: DType | Tolerance = EXACT, scale: np.ndarray | float = 1.0) -> Comparison:
    """Compares an output with its reference. Floats as float32 values, integers exactly.

    tolerance: a dtype's row of TOLERANCES, or one of the caller's own. scale: see Tolerance; broadcasts to the shape. Raises Mismatch.
    """
    limit = TOLERANCES[tolerance] if isinstance(tolerance, DType) else tolerance
    got, want = np.asarray(got), np.asarray(want)
    if got.shape != want.shape:
        raise Mismatch(f"{name}: got shape {list(got.shape)}, want {list(want.shape)}")
    if got.dtype.kind in "iub":
        _require_none(name, "integers", got != want, got, want)
        return Comparison(name, got.size, 0.0, (0,) * got.ndim, float(got.flat[0]), float(want.flat[0]), 0.0)
    _require_none(name, "NaN positions", np.isnan(got) != np.isnan(want), got, want)
    infinite = np.isinf(got) | np.isinf(want)
    _require_none(name, "infinities", infinite & (got != want), got, want)
    finite = np.isfinite(want)
    g, w = np.where(finite, got, 0).astype(np.float64), np.where(finite, want, 0).astype(np.float64)
    size = np.broadcast_to(np.asarray(scale, np.float64), w.shape)
    error = np.abs(g - w)
    bad = error > limit.absolute * size + limit.relative * np.abs(w)
    relative = error / np.maximum(np.maximum(size, np.abs(w)), np.finfo(np.float64).tiny)
    at = _first(relative == relative.max())
    norm = float(np.linalg.norm(g) * np.linalg.norm(w))
    gap = max(0.0, 1.0 - float(np.vdot(g, w)) / norm) if norm > 0 else 0.0
    values = f"got {float(got[at])!r}, want {float(want[at])!r}, error {float(error[at]):.3e}, scale {float(size[at]):.3e}"
    text = f"worst at {list(at)}: {values}"
    if bad.any():
        allowed = f"{limit.absolute:g} * scale + {limit.relative:g} * |want|"
        raise Mismatch(f"{name}: {int(bad.sum())} of {bad.size} values beyond {allowed}; {text}")
    unequal = int((error > 0).sum())
    if unequal > max(2.0, limit.unequal * error.size):
        raise Mismatch(f"{name}: {unequal} of {error.size} values differ, expected at most a share of {limit.unequal:g}; {text}")
    if gap > max(limit.cosine, 1e-15):
        raise Mismatch(f"{name}: 1 - cosine is {gap:.2e}, expected at most {limit.cosine:g}; {text}")
    return Comparison(name, got.size, float(relative[at]), at, float(got[at]), float(want[at]), gap)
