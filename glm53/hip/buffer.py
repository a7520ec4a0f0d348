"""Memory of a device and host memory that devices can reach.

Invariants: a buffer is freed exactly once, by whoever allocated it; it knows its device and is on that device's list of live buffers from
allocation to free; adopted memory is never freed here.
"""

from __future__ import annotations

import ctypes
import enum
from typing import TYPE_CHECKING, Self

import numpy as np

from glm53.errors import LifetimeError
from glm53.hip import calls, literals

if TYPE_CHECKING:
    from glm53.hip.device import Device


class MemoryKind(enum.Enum):
    """How others see stores to device memory while a kernel runs."""

    DEVICE = "device"  # cached; visible to others when the kernel has ended
    UNCACHED = "uncached"  # for mailboxes: stores reach peers at once
    FINE = "fine"  # fine-grained: coherent with the host and peers at system scope


class Buffer:
    """`byte_count` bytes of one device's memory at `address`. Made by `Device.alloc`; `adopt` wraps memory that someone else owns."""

    def __init__(self, device: Device, address: int, byte_count: int, category: str, kind: MemoryKind, owned: bool = True):
        self.device = device
        self.address = address
        self.byte_count = byte_count
        self.category = category
        self.kind = kind
        self._owned = owned
        self._freed = False
        if owned:
            device.hold(self)

    @classmethod
    def adopt(cls, device: Device, address: int, byte_count: int, category: str = "adopted") -> Buffer:
        """Memory of `device` that the caller owns and keeps alive; `free()` only ends the use."""
        return cls(device, address, byte_count, category, MemoryKind.DEVICE, owned=False)

    @property
    def freed(self) -> bool:
        return self._freed

    def relabel(self, category: str) -> None:
        """The memory is used for something else from now on: `Device.live` and its watch count it there."""
        self.device.drop(self)
        self.category = category
        self.device.hold(self)

    def free(self) -> None:
        """Gives the memory back. The runtime waits for work that uses it. Raises LifetimeError the second time."""
        if self._freed:
            raise LifetimeError(f"buffer {self.category!r} at {self.address:#x} ({self.byte_count} B) is freed twice")
        self._freed = True
        if not self._owned:
            return
        self.device.drop(self)
        with self.device.current():
            calls.free(self.address)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        if not self._freed:
            self.free()

    def __repr__(self) -> str:
        state = "freed" if self._freed else self.kind.value
        return f"Buffer({self.category!r}, {self.byte_count} B at {self.address:#x}, {self.device}, {state})"


class HostBuffer:
    """Page-locked host memory that `device` (and, being portable, every other device) reads and writes over the link.

    array: numpy u8 view [byte_count]; host_address and device_address are two names of the same bytes, and may differ.
    coherent: the device does not cache it, so that both sides see stores while a kernel runs.
    Made by `Device.host_alloc` and `Device.host_register`.
    """

    def __init__(self, device: Device, array: np.ndarray, host_address: int, category: str, registered: bool):
        self.device = device
        self.array = array
        self.host_address = host_address
        self.byte_count = array.nbytes
        self.category = category
        self._registered = registered
        self._freed = False
        self.device_address = calls.host_device_pointer(host_address)
        device.hold(self)

    @classmethod
    def allocate(cls, device: Device, byte_count: int, coherent: bool, category: str) -> HostBuffer:
        flags = literals.HOST_MALLOC_PORTABLE | literals.HOST_MALLOC_MAPPED
        flags |= literals.HOST_MALLOC_COHERENT if coherent else literals.HOST_MALLOC_NON_COHERENT
        with device.current():
            address = calls.host_malloc(byte_count, flags)
            array = np.ctypeslib.as_array((ctypes.c_uint8 * byte_count).from_address(address))
            try:
                return cls(device, array, address, category, registered=False)
            except BaseException:
                calls.host_free(address)
                raise

    @classmethod
    def register(cls, device: Device, array: np.ndarray, coherent: bool, category: str) -> HostBuffer:
        if not array.flags.c_contiguous or array.nbytes == 0:
            raise ValueError(f"host_register: got shape {array.shape}, strides {array.strides}; expected a contiguous, non-empty array")
        flags = literals.HOST_REGISTER_PORTABLE | literals.HOST_REGISTER_MAPPED
        flags |= 0 if coherent else literals.HOST_REGISTER_COARSE_GRAINED
        view = array.reshape(-1).view(np.uint8)
        with device.current():
            calls.host_register(view.ctypes.data, view.nbytes, flags)
            try:
                return cls(device, view, view.ctypes.data, category, registered=True)
            except BaseException:
                calls.host_unregister(view.ctypes.data)
                raise

    @property
    def freed(self) -> bool:
        return self._freed

    def free(self) -> None:
        """Unlocks (registered) or frees (allocated) the memory; `array` must not be used after. Raises LifetimeError the second time."""
        if self._freed:
            raise LifetimeError(f"host buffer {self.category!r} at {self.host_address:#x} ({self.byte_count} B) is freed twice")
        self._freed = True
        self.device.drop(self)
        with self.device.current():
            (calls.host_unregister if self._registered else calls.host_free)(self.host_address)
        # Only now: the reference kept registered pages from being unmapped before they are unlocked.
        self.array = np.empty(0, np.uint8)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        if not self._freed:
            self.free()
