"""Row-major arrays in device memory, and their way to and from numpy. Little-endian on both sides.

numpy has no bf16 and no e4m3: `bits()` gives them as unsigned integers, `numpy()` as the float32 values they stand for.
"""

from __future__ import annotations

import math
import sys

import numpy as np

from glm53.errors import LifetimeError
from glm53.hip import calls
from glm53.hip.buffer import Buffer
from glm53.hip.device import Device
from glm53.hip.stream import Stream
from glm53.spec import DType

if sys.byteorder != "little":
    raise ImportError("glm53 needs a little-endian host")

# numpy's type for the raw elements of each DType.
_NUMPY: dict[DType, np.dtype] = {
    DType.F32: np.dtype(np.float32),
    DType.BF16: np.dtype(np.uint16),
    DType.F8E4M3: np.dtype(np.uint8),
    DType.I32: np.dtype(np.int32),
    DType.I64: np.dtype(np.int64),
    DType.U8: np.dtype(np.uint8),
    DType.U16: np.dtype(np.uint16),
    DType.U32: np.dtype(np.uint32),
    DType.U64: np.dtype(np.uint64),
}
_FROM_NUMPY: dict[np.dtype, DType] = {numpy_type: dtype for dtype, numpy_type in _NUMPY.items() if dtype not in (DType.BF16, DType.F8E4M3)}


def bf16_from_f32(values: np.ndarray) -> np.ndarray:
    """float32 -> bf16 bits (uint16), round to nearest even, overflow to infinity; a NaN stays a (quiet) NaN. As f32_to_bf16 on the
    device."""
    words = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = ((words + (np.uint32(0x7FFF) + ((words >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)).astype(np.uint16)
    is_nan = (words & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    if is_nan.any():
        rounded[is_nan] = ((words[is_nan] >> np.uint32(16)) | np.uint32(0x40)).astype(np.uint16)
    return rounded.reshape(values.shape)


def f32_from_bf16(bits: np.ndarray) -> np.ndarray:
    """bf16 bits (uint16) -> float32, exact."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32).reshape(bits.shape)


def f32_from_e4m3(bits: np.ndarray) -> np.ndarray:
    """e4m3 (OCP, finite, bias 7; 0x7f and 0xff are NaN) bits (uint8) -> float32, exact."""
    codes = np.arange(256, dtype=np.int32)
    exponent, mantissa = (codes >> 3) & 15, (codes & 7).astype(np.float32)
    table = np.where(exponent == 0, np.ldexp(mantissa, -9), np.ldexp(8 + mantissa, exponent - 10)).astype(np.float32)
    table[0x7F] = np.nan
    table[128:] = -table[:128]
    return table[bits]


def numpy_type(dtype: DType) -> np.dtype:
    """numpy's type for the raw elements: uint16 for bf16, uint8 for e4m3."""
    return _NUMPY[dtype]


class Array:
    """`shape` elements of `dtype` at `offset_bytes` in `buffer`, row-major, dense. A view: it never owns more than a reference to its
    buffer; `free()` frees that buffer for all views of it."""

    def __init__(self, buffer: Buffer, dtype: DType, shape: tuple[int, ...], offset_bytes: int = 0):
        shape = tuple(int(n) for n in shape)
        nbytes = math.prod(shape) * dtype.item_bytes
        if min(shape, default=0) < 0 or offset_bytes < 0 or offset_bytes + nbytes > buffer.byte_count:
            raise ValueError(
                f"array {dtype.label}{list(shape)} at offset {offset_bytes} needs {nbytes} bytes, but {buffer.category!r} has {buffer.byte_count}"
            )
        if (buffer.address + offset_bytes) % dtype.item_bytes:
            address = buffer.address + offset_bytes
            raise ValueError(f"array of {dtype.label} at address {address:#x} is not aligned to {dtype.item_bytes} bytes")
        self.buffer = buffer
        self.dtype = dtype
        self.shape = shape
        self.offset_bytes = offset_bytes
        self.nbytes = nbytes
        self.address = buffer.address + offset_bytes

    @classmethod
    def empty(cls, device: Device, dtype: DType, shape: tuple[int, ...], category: str = "") -> Array:
        """A new buffer of its own, contents undefined. An array without elements takes one element of memory, so that it has an address."""
        byte_count = max(math.prod(shape) * dtype.item_bytes, dtype.item_bytes)
        return cls(device.alloc(byte_count, category), dtype, shape)

    @classmethod
    def from_numpy(cls, device: Device, values: np.ndarray, dtype: DType | None = None, category: str = "") -> Array:
        """A new buffer with `values`. dtype None: numpy's own; BF16 takes float32 (rounded to nearest even) or uint16 bits, F8E4M3 uint8
        bits."""
        values = np.asarray(values)
        if dtype is None:
            if values.dtype not in _FROM_NUMPY:
                raise TypeError(f"from_numpy: got {values.dtype}, expected one of {', '.join(str(t) for t in _FROM_NUMPY)}, or give dtype")
            dtype = _FROM_NUMPY[values.dtype]
        array = cls.empty(device, dtype, values.shape, category)
        try:
            array.upload(values)
        except BaseException:
            array.free()
            raise
        return array

    @classmethod
    def from_address(cls, device: Device, address: int, dtype: DType, shape: tuple[int, ...], category: str = "adopted") -> Array:
        """Adopts memory of `device` that the caller owns and keeps alive."""
        return cls(Buffer.adopt(device, address, math.prod(shape) * dtype.item_bytes, category), dtype, shape)

    @property
    def device(self) -> Device:
        return self.buffer.device

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        return f"Array({self.dtype.label}{list(self.shape)} in {self.buffer.category!r} of device {self.device.index})"

    # Views

    def view(self, shape: tuple[int, ...], dtype: DType | None = None) -> Array:
        """The first elements of the same memory under another shape (and type); it may be smaller, never larger."""
        other = Array(self.buffer, dtype or self.dtype, shape, self.offset_bytes)
        if other.nbytes > self.nbytes:
            raise ValueError(f"view: {other!r} has {other.nbytes} bytes, more than the {self.nbytes} of {self!r}")
        return other

    def reshape(self, *shape: int) -> Array:
        """All elements under another shape; one dimension may be -1."""
        dims = list(shape)
        if dims.count(-1) == 1:
            rest = math.prod(n for n in dims if n != -1)
            dims[dims.index(-1)] = math.prod(self.shape) // rest if rest else 0
        if min(dims, default=0) < 0 or math.prod(dims) != math.prod(self.shape):
            raise ValueError(f"reshape: {list(self.shape)} has {math.prod(self.shape)} elements, {list(shape)} asks for another number")
        return Array(self.buffer, self.dtype, tuple(dims), self.offset_bytes)

    def slice(self, start: int, stop: int) -> Array:
        """Rows [start, stop) of axis 0."""
        if not self.shape or not 0 <= start <= stop <= self.shape[0]:
            raise ValueError(f"slice [{start}, {stop}) is outside axis 0 of {list(self.shape)}")
        row_bytes = math.prod(self.shape[1:]) * self.dtype.item_bytes
        return Array(self.buffer, self.dtype, (stop - start, *self.shape[1:]), self.offset_bytes + start * row_bytes)

    # Transfers

    def _raw(self, values: np.ndarray) -> np.ndarray:
        """`values` as contiguous raw elements of this array; converts float32 to bf16 and nothing else."""
        if values.shape != self.shape:
            raise ValueError(f"upload: got shape {list(values.shape)}, expected {list(self.shape)}")
        if self.dtype is DType.BF16 and values.dtype == np.float32:
            return bf16_from_f32(values)
        if values.dtype != _NUMPY[self.dtype]:
            raise TypeError(f"upload: got {values.dtype}, expected {_NUMPY[self.dtype]}{' or float32' if self.dtype is DType.BF16 else ''}")
        return np.ascontiguousarray(values)

    def _alive(self) -> None:
        if self.buffer.freed:
            raise LifetimeError(f"{self!r} is used after its buffer was freed")

    def upload(self, values: np.ndarray, stream: Stream | None = None) -> None:
        """Stores `values`. Without a stream: after all earlier work of the device, done on return. With one: in its order, and `values`
        must not change until then (a converted copy is ours). Raises TypeError or ValueError if dtype or shape differ."""
        self._alive()
        raw = self._raw(values)
        if raw.nbytes == 0:
            return
        if stream is not None:
            stream.upload(self.address, raw)
            return
        self.device.synchronize()
        with self.device.current():
            calls.copy(self.address, raw.ctypes.data, raw.nbytes)

    def bits(self, stream: Stream | None = None) -> np.ndarray:
        """The raw elements: uint16 for bf16, uint8 for e4m3, else as `numpy()`. Without a stream it waits for all earlier work of the
        device, with one for that stream's."""
        self._alive()
        raw = np.empty(self.shape, _NUMPY[self.dtype])
        if raw.nbytes == 0:
            return raw
        if stream is not None:
            stream.download(raw, self.address)
            return raw
        self.device.synchronize()
        with self.device.current():
            calls.copy(raw.ctypes.data, self.address, raw.nbytes)
        return raw

    def numpy(self, stream: Stream | None = None) -> np.ndarray:
        """The values; bf16 and e4m3 as the float32 they stand for. Waits as `bits()` does."""
        raw = self.bits(stream)
        if self.dtype is DType.BF16:
            return f32_from_bf16(raw)
        if self.dtype is DType.F8E4M3:
            return f32_from_e4m3(raw)
        return raw

    def free(self) -> None:
        """Frees the whole buffer, for all views of it."""
        self.buffer.free()
