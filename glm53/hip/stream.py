"""Streams and events: order of work on a device, and between devices and the host."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

from glm53.errors import LifetimeError
from glm53.hip import calls, literals

if TYPE_CHECKING:
    from glm53.hip.device import Device
    from glm53.hip.graph import Capture


class Event:
    """A point in a stream's order. timing: keep a time stamp, for `elapsed_us`. system_fence False: other devices and the host may not
    see the stores before it (cheaper; only for order within one device)."""

    def __init__(self, device: Device, timing: bool = False, system_fence: bool = True):
        flags = 0 if timing else literals.EVENT_DISABLE_TIMING
        if not system_fence:
            flags |= literals.EVENT_DISABLE_SYSTEM_FENCE
        self.device = device
        self.timing = timing
        with device.current():
            self._handle: Any = calls.event_create(flags)
        device.events.add(self)

    @property
    def handle(self) -> Any:
        """hip-python's event object, for other HIP code. Raises LifetimeError after `close()`."""
        if self._handle is None:
            raise LifetimeError("event is used after close()")
        return self._handle

    def record(self, stream: Stream) -> None:
        """The event happens when all work enqueued on `stream` so far has finished. The stream must be of the event's device."""
        with self.device.current():
            calls.event_record(self.handle, stream.handle)

    def synchronize(self) -> None:
        calls.event_synchronize(self.handle)

    def query(self) -> bool:
        """True when the event has happened, or was never recorded."""
        return calls.event_query(self.handle)

    def elapsed_us(self, earlier: Event) -> float:
        """Microseconds from `earlier` to this event; both must be made with timing=True and have happened."""
        if not (self.timing and earlier.timing):
            raise ValueError("elapsed_us: got an event without time stamp, expected device.event(timing=True) for both")
        return calls.event_elapsed_ms(earlier.handle, self.handle) * 1000.0

    def close(self) -> None:
        if self._handle is not None:
            handle, self._handle = self._handle, None
            self.device.events.discard(self)
            calls.event_destroy(handle)


class Stream:
    """An in-order queue of a device, without implicit order towards others (non-blocking). Made by `Device.stream`."""

    def __init__(self, device: Device):
        self.device = device
        self.capturing: Capture | None = None
        self._kept: deque[tuple[Event, object]] = deque()
        self._unmarked: list[object] = []  # memory of copies whose end no event tells: kept until the stream is known to be empty
        self._owned = True
        with device.current():
            self._handle: Any = calls.stream_create()

    @classmethod
    def adopt(cls, device: Device, handle: int) -> Stream:
        """A stream of `device` that the caller owns and keeps alive: hipStream_t (cudaStream_t, CUstream) as a number, 0 the null stream.
        `close()` ends the use and neither waits nor destroys."""
        stream = cls.__new__(cls)
        stream.device, stream.capturing, stream._kept, stream._owned, stream._handle = device, None, deque(), False, handle
        stream._unmarked = []
        return stream

    @property
    def handle(self) -> Any:
        """hip-python's stream object, for other HIP code. Raises LifetimeError after `close()`."""
        if self._handle is None:
            raise LifetimeError("stream is used after close()")
        return self._handle

    @property
    def address(self) -> int:
        """hipStream_t as a number, e.g. for DLPack."""
        return int(self.handle)

    def synchronize(self) -> None:
        """Waits on the host until all work enqueued so far has finished."""
        calls.stream_synchronize(self.handle)
        self._unmarked.clear()
        while self._kept and self._kept[0][0].query():
            self._kept.popleft()[0].close()

    def query(self) -> bool:
        """True when all work enqueued so far has finished."""
        return calls.stream_query(self.handle)

    def wait(self, event: Event) -> None:
        """Work enqueued from now on starts after `event`, which may be of another device."""
        with self.device.current():
            calls.stream_wait_event(self.handle, event.handle)

    def copy(self, target_address: int, source_address: int, byte_count: int) -> None:
        """Enqueues a copy between any device, pinned or pageable addresses. Pageable memory must stay alive until the stream got there."""
        with self.device.current():
            calls.copy_async(target_address, source_address, byte_count, self.handle)

    def copy_2d(self, target_address: int, target_pitch: int, source_address: int, source_pitch: int, width: int, height: int) -> None:
        """Enqueues a copy of `height` rows of `width` bytes; pitches in bytes, each at least `width`."""
        with self.device.current():
            calls.copy_2d_async(target_address, target_pitch, source_address, source_pitch, width, height, self.handle)

    def copy_peer(self, target_address: int, target_device: Device, source_address: int, source_device: Device, byte_count: int) -> None:
        """Enqueues a copy between two devices, with or without peer access."""
        with self.device.current():
            calls.copy_peer_async(target_address, target_device.index, source_address, source_device.index, byte_count, self.handle)

    def fill(self, address: int, value: int, byte_count: int) -> None:
        """Enqueues a store of the byte `value` to `byte_count` bytes."""
        with self.device.current():
            calls.fill_async(address, value, byte_count, self.handle)

    def upload(self, target_address: int, source: np.ndarray) -> None:
        """Enqueues a copy of a contiguous array to the device and keeps the array alive until it is done; the caller must not change it
        before.

        Raises LifetimeError during a capture: a graph would read the array at each replay.
        """
        if self.capturing is not None:
            raise LifetimeError("upload during a capture: the array would be read at each replay; next: upload before the capture")
        done = Event(self.device)
        try:
            self.copy(target_address, source.ctypes.data, source.nbytes)
            self._unmarked.append(source)
            done.record(self)
        except BaseException:
            done.close()
            raise
        self._kept.append((done, self._unmarked.pop()))
        while self._kept[0][0] is not done and self._kept[0][0].query():
            self._kept.popleft()[0].close()

    def download(self, target: np.ndarray, source_address: int) -> None:
        """Fills a contiguous array from device memory and waits for it. If the wait fails, the array is kept alive as long as the copy may run."""
        self._unmarked.append(target)
        self.copy(target.ctypes.data, source_address, target.nbytes)
        self.synchronize()

    def capture(self) -> Capture:
        """`with stream.capture() as capture: ...launches...` records instead of running; then `capture.graph`."""
        from glm53.hip.graph import Capture

        return Capture(self)

    def close(self) -> None:
        """Waits for the stream's work and destroys it, also where the wait is refused; an adopted stream is only let go."""
        if self._handle is None:
            return
        if not self._owned:
            self._handle = None
            return
        try:
            self.synchronize()
        finally:
            handle, self._handle = self._handle, None
            self.device.forget_stream(self)
            with self.device.current():
                calls.stream_destroy(handle)
