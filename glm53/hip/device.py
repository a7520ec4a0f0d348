"""A device: its memory, streams, events and kernels. Each call that needs the device current makes it so and restores the caller's."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

import numpy as np

from glm53.errors import DeviceLost, DeviceMemoryError, HipError, InputError, LifetimeError, human_bytes
from glm53.hip import calls, literals, runtime
from glm53.hip.buffer import Buffer, HostBuffer, MemoryKind
from glm53.hip.module import Kernel, Module
from glm53.hip.stream import Event, Stream

Watch = Callable[[bool, str, int], None]  # (in host memory, category, bytes): allocated where positive, given back where negative


def list_devices() -> list[dict[str, Any]]:
    """One row per device of the runtime in use (chosen by default rules if none is): index, name, arch, total_bytes, free_bytes,
    pci_bus."""
    rows: list[dict[str, Any]] = []
    for index in range(runtime.select().device_count):
        device = Device(index)
        rows.append(
            {
                "index": index,
                "name": device.name,
                "arch": device.arch,
                "total_bytes": device.total_bytes,
                "free_bytes": device.free_bytes(),
                "pci_bus": device.properties.pci_bus,
            }
        )
    return rows


class Current:
    """A context manager, see `Device.current`. To be entered once."""

    def __init__(self, index: int):
        self._index = self._previous = index

    def __enter__(self) -> None:
        self._previous = calls.current_device()
        if self._previous != self._index:
            calls.set_device(self._index)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._previous != self._index:
            calls.set_device(self._previous)


def _malloc(byte_count: int, kind: MemoryKind) -> int:
    if kind is MemoryKind.DEVICE:
        return calls.malloc(byte_count)
    return calls.malloc_with_flags(byte_count, literals.MALLOC_UNCACHED if kind is MemoryKind.UNCACHED else literals.MALLOC_FINEGRAINED)


class Device:
    """Device `index` of the selected runtime (selected by default rules if nothing was).

    index, name, arch ("gfx1100", "sm_90", "host"), total_bytes, properties, runtime (RuntimeInfo); `live` holds the buffers not yet
    freed; `watch` is told of every allocation and its end, in whatever thread that happens; `spare`: calls that give unused device memory back and
    return the bytes, made before an allocation fails for want of memory. Objects of one Device may be used from several threads, each stream by one
    at a time. Several Device objects of one index are independent.
    """

    def __init__(self, index: int = 0, watch: Watch | None = None):
        self.runtime = runtime.select()
        self._watch = watch
        if not 0 <= index < self.runtime.device_count:
            count = self.runtime.device_count
            raise InputError(f"device {index} does not exist: the {self.runtime.name} runtime has {count} device(s), numbered from 0")
        self.index = index
        self.properties = calls.device_properties(index)
        self.name = self.properties.name
        self.arch = self.properties.arch
        self.total_bytes = self.properties.total_bytes
        self.live: dict[int, Buffer | HostBuffer] = {}
        self.spare: list[Callable[[], int]] = []
        self.events: set[Event] = set()  # those not closed; `Event` adds and removes itself
        self._streams: list[Stream] = []
        self._default_stream: Stream | None = None
        self._module: Module | None = None
        self._loading = threading.Lock()
        self.closed = False

    def current(self) -> Current:
        """Makes this device the calling thread's current one inside, and restores the caller's after. A thread that works on one device
        holds this around its work to spare two calls per operation."""
        return Current(self.index)

    # Memory

    def free_bytes(self) -> int:
        with self.current():
            return calls.memory_info()[0]

    def alloc(self, byte_count: int, category: str = "", kind: MemoryKind = MemoryKind.DEVICE) -> Buffer:
        """Allocates `byte_count` > 0 bytes, contents undefined. Raises DeviceMemoryError with category, asked and free bytes."""
        if byte_count <= 0:
            raise ValueError(f"alloc {category!r}: got {byte_count} bytes, expected at least 1")
        with self.current():
            try:
                address = self._address(byte_count, kind)
            except HipError as error:
                if error.code != literals.ERROR_OUT_OF_MEMORY:
                    raise
                free, total = calls.memory_info()
                raise DeviceMemoryError(
                    f"device {self.index} ({self.name}) has not enough memory for {category or 'a buffer'}: "
                    f"asked {human_bytes(byte_count)}, "
                    f"free {human_bytes(free)} of {human_bytes(total)}; live here: {self.live_text()}; "
                    "next: a smaller context, prefill chunk or model, or a device with more memory"
                ) from None
        return Buffer(self, address, byte_count, category, kind)

    def _address(self, byte_count: int, kind: MemoryKind) -> int:
        """Memory of the current device; where there is none left, what `spare` gives back makes room for a second attempt."""
        try:
            return _malloc(byte_count, kind)
        except HipError as error:
            if error.code != literals.ERROR_OUT_OF_MEMORY or not sum([give_back() for give_back in self.spare]):
                raise
            return _malloc(byte_count, kind)

    def host_alloc(self, byte_count: int, coherent: bool = True, category: str = "") -> HostBuffer:
        """Page-locked host memory, visible to all devices. coherent: not cached by devices. Raises DeviceMemoryError if the host has not
        enough."""
        if byte_count <= 0:
            raise ValueError(f"host_alloc {category!r}: got {byte_count} bytes, expected at least 1")
        try:
            return HostBuffer.allocate(self, byte_count, coherent, category)
        except HipError as error:
            if error.code != literals.ERROR_OUT_OF_MEMORY:
                raise
            raise DeviceMemoryError(
                f"the host cannot page-lock memory for {category or 'a buffer'}: asked {human_bytes(byte_count)}; "
                "next: a smaller history, or raise the limit of locked memory (ulimit -l)"
            ) from None

    def host_register(self, array: np.ndarray, coherent: bool = True, category: str = "") -> HostBuffer:
        """Page-locks the memory of a contiguous array, in place. The array must outlive the HostBuffer, which keeps a reference."""
        return HostBuffer.register(self, array, coherent, category)

    def hold(self, buffer: Buffer | HostBuffer) -> None:
        """Called by a buffer when its memory has been allocated."""
        self.live[id(buffer)] = buffer
        if self._watch is not None:
            self._watch(isinstance(buffer, HostBuffer), buffer.category or "uncategorised", buffer.byte_count)

    def drop(self, buffer: Buffer | HostBuffer) -> None:
        """Called by a buffer when its memory is given back."""
        del self.live[id(buffer)]
        if self._watch is not None:
            self._watch(isinstance(buffer, HostBuffer), buffer.category or "uncategorised", -buffer.byte_count)

    def allocated_bytes(self) -> dict[str, int]:
        """Bytes of buffers not yet freed, by category; host buffers as `host: <category>`."""
        total: Counter[str] = Counter()
        for buffer in list(self.live.values()):
            label = buffer.category or "uncategorised"
            total[f"host: {label}" if isinstance(buffer, HostBuffer) else label] += buffer.byte_count
        return dict(total)

    def live_text(self) -> str:
        return ", ".join(f"{category} {human_bytes(count)}" for category, count in sorted(self.allocated_bytes().items())) or "nothing"

    # Work

    def stream(self) -> Stream:
        stream = Stream(self)
        self._streams.append(stream)
        return stream

    @property
    def default_stream(self) -> Stream:
        """One stream for callers that need no order of their own. Non-blocking like the others, not HIP's null stream."""
        if self._default_stream is None:
            self._default_stream = self.stream()
        return self._default_stream

    def forget_stream(self, stream: Stream) -> None:
        """Called by `Stream.close`."""
        self._streams.remove(stream)
        if stream is self._default_stream:
            self._default_stream = None

    def event(self, timing: bool = False, system_fence: bool = True) -> Event:
        return Event(self, timing, system_fence)

    @property
    def module(self) -> Module:
        """The code object for this device's arch, loaded on first use. Raises RuntimeUnavailable naming those that exist."""
        with self._loading:
            if self._module is None:
                self._module = Module(self)
            return self._module

    def kernel(self, name: str) -> Kernel:
        return self.module.kernel(name)

    def synchronize(self) -> None:
        """Waits until all work of the device has finished. Raises DeviceLost if it faulted."""
        with self.current():
            calls.device_synchronize()

    # Peers

    def can_access(self, peer: Device) -> bool:
        """True if kernels here can be given access to `peer`'s memory."""
        return peer.index != self.index and calls.can_access_peer(self.index, peer.index)

    def enable_peer(self, peer: Device) -> bool:
        """Lets kernels here read and write `peer`'s memory; False if they could already, which is not an error."""
        with self.current():
            return calls.enable_peer(peer.index)

    def disable_peer(self, peer: Device) -> None:
        """Ends the access of all kernels here to `peer`'s memory. No work that uses it may be under way."""
        with self.current():
            calls.disable_peer(peer.index)

    # End

    def close(self, free_buffers: bool = False) -> None:
        """Ends streams, events and the module; again is not an error. Raises LifetimeError listing live buffers by category; free_buffers=True
        frees them instead."""
        if self.live and not free_buffers:
            raise LifetimeError(f"device {self.index} is closed with live buffers: {self.live_text()}; next: free them, or close(free_buffers=True)")
        self.closed = True
        try:
            with ExitStack() as stack:  # each has its turn, last entered first, whatever another one raises
                if self._module is not None:
                    module, self._module = self._module, None
                    stack.callback(module.close)
                for buffer in reversed(list(self.live.values())):
                    stack.callback(buffer.free)
                for event in list(self.events):
                    stack.callback(event.close)
                for stream in reversed(list(self._streams)):
                    stack.callback(stream.close)
        except DeviceLost:
            # Nothing on a lost device can be given back; the process's end does it.
            self.live.clear()
            self._streams.clear()
            self.events.clear()
            self._default_stream = self._module = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close(free_buffers=kind is not None)

    def __repr__(self) -> str:
        return f"Device({self.index}, {self.name}, {self.arch}, {self.runtime.name})"
