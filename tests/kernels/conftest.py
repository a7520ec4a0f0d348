"""The device of the kernel tests, and arrays that end with a test."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from glm53.check.case import Bench
from glm53.hip import Array, Device


@pytest.fixture(scope="module")
def device() -> Iterator[Device]:
    device = Device(0)
    yield device
    device.close()


@pytest.fixture
def make(device: Device) -> Iterator[Callable[..., Array]]:
    """make(dtype, *shape): an array of the test, bytes 0xff."""
    with Bench(device) as bench:
        yield lambda dtype, *shape: bench.poison(dtype, shape)
