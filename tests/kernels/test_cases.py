"""Every kernel case on device 0 of the selected runtime. The same file runs under GLM53_RUNTIME=cuda or rocm."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from glm53.check.case import Case, all_cases
from glm53.check.compare import EXACT, SAME_ROUNDING, Mismatch, compare
from glm53.hip import Device, runtime
from glm53.spec import DType


@pytest.fixture(autouse=True)
def fibers(device: Device) -> Iterator[None]:
    """The kernels as they are written, work-item by work-item; test_fast_kernels.py compares the host's fast forms with them."""
    if device.runtime.name != "cpu":
        yield
        return
    runtime.control().glm53_cpu_fibers(1)
    yield
    runtime.control().glm53_cpu_fibers(0)


@pytest.mark.parametrize("case", all_cases(), ids=str)
def test_case(device: Device, case: Case) -> None:
    comparison = case.run(device)
    assert comparison.count > 0, "a case that compares nothing cannot fail"


def test_cases_leave_nothing_allocated(device: Device) -> None:
    all_cases()[0].run(device)
    assert not device.live


def test_comparator_reports_count_coordinate_and_values() -> None:
    want = np.ones((2, 3), np.float32)
    got = want.copy()
    got[1, 2] = 1.5
    with pytest.raises(Mismatch, match=r"1 of 6 values .* worst at \[1, 2\]: got 1.5, want 1.0"):
        compare("x", got, want, DType.F32)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_comparator_sees_what_is_not_finite(bad: float) -> None:
    want = np.zeros(4, np.float32)
    got = want.copy()
    got[3] = bad
    with pytest.raises(Mismatch, match=r"first at \[3\]"):
        compare("x", got, want, DType.F32)
    compare("x", got, got, DType.F32)
    with pytest.raises(Mismatch):
        compare("x", -got if np.isinf(bad) else want, got, DType.F32)


def test_comparator_sees_a_rotation_within_the_elementwise_tolerance() -> None:
    rng = np.random.default_rng(0)
    want = rng.standard_normal(1000).astype(np.float32)
    got = want + rng.standard_normal(1000).astype(np.float32) * np.float32(0.01)
    with pytest.raises(Mismatch, match="cosine"):
        compare("x", got, want, DType.F32, scale=1e6)


def test_comparator_sees_a_missing_rounding() -> None:
    want = np.ones(1000, np.float32)
    got = want.copy()
    got[:30] += np.float32(2**-7)
    compare("x", got, want, DType.BF16)
    with pytest.raises(Mismatch, match="30 of 1000 values differ"):
        compare("x", got, want, SAME_ROUNDING[DType.BF16])


def test_exact_means_exact() -> None:
    want = np.ones(2, np.float32)
    with pytest.raises(Mismatch):
        compare("x", np.nextafter(want, np.float32(2)), want, EXACT)
