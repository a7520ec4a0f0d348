"""The device of the kernel tests, two of them, the cpu runtime's controls, and arrays that end with a test."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from glm53.check.case import Bench
from glm53.hip import Array, Device, runtime


@pytest.fixture(scope="module")
def device() -> Iterator[Device]:
    device = Device(0)
    yield device
    device.close()


@pytest.fixture
def pair() -> Iterator[tuple[Device, Device]]:
    if runtime.select().device_count < 2:
        pytest.skip("needs two devices")
    devices = (Device(0), Device(1))
    yield devices
    for device in devices:
        device.close(free_buffers=True)


@pytest.fixture
def make(device: Device) -> Iterator[Callable[..., Array]]:
    """make(dtype, *shape): an array of the test, bytes 0xff."""
    with Bench(device) as bench:
        yield lambda dtype, *shape: bench.poison(dtype, shape)
