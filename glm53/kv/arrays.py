"""Arrays that a cache hands out: device memory that lives until its last user, in Python or behind DLPack, lets it go, and is then used again.

A block is reused at once by whoever asks for its size. Its readers may still work: those on streams that the next writer waits for anyway need no
more; for any other reader the device is waited for first.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np

from glm53.errors import LifetimeError
from glm53.hip import Array, Buffer, Device, Event, Stream
from glm53.kv import dlpack
from glm53.spec import DType

KEPT_BLOCKS = 8  # idle blocks that stay allocated


class Block:
    """Memory of one output. `readers`: handles of foreign streams whose work may read it."""

    def __init__(self, buffer: Buffer, ready: Event):
        self.buffer, self.ready = buffer, ready
        self.readers: set[int] = set()


class Lease:
    """A block in use. The array and every DLPack tensor of it hold one; when the last is gone, the block goes back."""

    def __init__(self, block: Block, give_back: Callable[[Block], None]):
        self.block = block
        weakref.finalize(self, give_back, block).atexit = False


class OutputPool:
    """Blocks of one device. Leases may end in any thread, also after `close`, which frees what is idle and the rest when it comes back."""

    def __init__(self, device: Device, closed: Callable[[], None]):
        self.device, self._closed = device, closed
        self._idle: list[Block] = []
        self._lent = 0
        self._open = True
        self._lock = threading.RLock()  # garbage collection may end a lease inside

    def lend(self, byte_count: int, writer: int | None) -> Lease:
        """Memory of `byte_count` bytes. writer: handle of the foreign stream that the writing work waits for. Raises DeviceMemoryError."""
        with self._lock:
            fitting = [block for block in self._idle if block.buffer.byte_count == byte_count]
            block = fitting[-1] if fitting else None
            if block is not None:
                self._idle.remove(block)
            self._lent += 1
        try:
            if block is None:
                buffer = self.device.alloc(byte_count, category="outputs")
                try:
                    block = Block(buffer, self.device.event())
                except BaseException:
                    buffer.free()
                    raise
            elif block.readers - {writer}:
                self.device.synchronize()
            block.readers.clear()
        except BaseException:
            with self._lock:
                self._lent -= 1
            raise
        return Lease(block, self._give_back)

    def _give_back(self, block: Block) -> None:
        with self._lock:
            self._lent -= 1
            self._idle.append(block)
            surplus_count = max(0, len(self._idle) - (KEPT_BLOCKS if self._open else 0))
            surplus, self._idle = self._idle[:surplus_count], self._idle[surplus_count:]
            last = not self._open and self._lent == 0
        for old in surplus:
            self._free(old)
        if last:
            self._closed()

    def _free(self, block: Block) -> None:
        try:
            block.ready.close()
        finally:
            block.buffer.free()  # waits for the device's work

    def close(self) -> None:
        """Frees idle blocks. `closed` is called when the last block is back, which may be now."""
        with self._lock:
            self._open = False
            idle, self._idle = self._idle, []
            last = self._lent == 0
        with ExitStack() as steps:  # each has its turn, the last one first
            if last:
                steps.callback(self._closed)
            for block in idle:
                steps.callback(self._free, block)


class KvArray:
    """A row-major array in device memory, e.g. gathered rows; `array` is its view for other users of `glm53.hip`.

    Speaks DLPack, so that torch.from_dlpack, cupy.from_dlpack and, on the cpu runtime, numpy.from_dlpack take it without a copy. The memory stays
    until this object and all tensors made from it are gone, also after the cache is closed.
    """

    def __init__(self, lease: Lease, dtype: DType, shape: tuple[int, ...]):
        self._lease = lease
        self.array = Array(lease.block.buffer, dtype, shape)

    @property
    def device(self) -> Device:
        return self.array.device

    @property
    def dtype(self) -> DType:
        return self.array.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def address(self) -> int:
        """Device address, for foreign kernels; their stream must be the one given to the call that made the array, or wait for it."""
        return self.array.address

    def __repr__(self) -> str:
        return f"KvArray({self.dtype.label}{list(self.shape)} on device {self.device.index})"

    def numpy(self) -> np.ndarray:
        """A copy on the host, after the work that fills the array; bf16 as the float32 values it stands for."""
        self._lease.block.ready.synchronize()
        return self.array.numpy(self.device.default_stream)

    def bits(self) -> np.ndarray:
        """As `numpy`, raw elements: bf16 as uint16."""
        self._lease.block.ready.synchronize()
        return self.array.bits(self.device.default_stream)

    def __dlpack_device__(self) -> tuple[int, int]:
        kind = dlpack.DEVICE_TYPES[self.device.runtime.name]
        return kind, 0 if kind == dlpack.CPU else self.device.index

    def __dlpack__(
        self,
        *,
        stream: Any = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """A capsule, versioned where the consumer takes 1.0. stream: the consumer's, as the array API standard has it (None: the default stream, 1
        and 2 CUDA's legacy and per-thread ones, -1: no waiting); its work from now on comes after the work that fills the array.

        Raises BufferError where a copy or another device is asked for.
        """
        if copy:
            raise BufferError("DLPack: a copy was asked for, and only the memory itself can be exported; next: copy=None, then clone")
        if dl_device is not None and tuple(dl_device) != self.__dlpack_device__():
            raise BufferError(f"DLPack: device {tuple(dl_device)} was asked for, the array lies on {self.__dlpack_device__()}")
        block = self._lease.block
        if block.buffer.freed:
            raise LifetimeError(f"{self!r} is used after its device was closed")
        kind, _ = self.__dlpack_device__()
        if kind == dlpack.CPU:
            block.ready.synchronize()
        elif stream != -1:
            handle = 0 if stream is None or (kind == dlpack.CUDA and stream == 1) else dlpack.stream_handle(stream)
            Stream.adopt(self.device, handle).wait(block.ready)
            block.readers.add(handle)
        else:
            block.readers.add(-1)  # unknown: no writer's
        versioned = max_version is not None and tuple(max_version) >= dlpack.VERSION
        return dlpack.export(self.address, self.dtype, self.shape, self.__dlpack_device__(), self._lease, versioned)


__all__ = ["KvArray", "Lease", "OutputPool"]
