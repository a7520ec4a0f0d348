"""A weight matrix on a device, in one of the weight formats."""

from __future__ import annotations

import math
from dataclasses import dataclass

from glm53.hip import Array, Device
from glm53.spec import DType, WeightFormat

GROUP = 64  # columns that share a scale


@dataclass(frozen=True)
class Matrix:
    """Weights [.., n, k] in a format.

    codes: F32 [.., n, k] f32; BF16 [.., n, k] bf16; Q8G64 [.., n, k] u8 (int8 bits); Q4G64 [.., n, k / 2] u8 (column 2j in the low nibble).
    scales: [.., n, k / 64] u16 (f16 bits) where the format is quantised, else None. Raises ValueError where these do not fit.
    Products of decode steps may read weights before earlier launches of the stream have ended: whoever writes them synchronises afterwards.
    """

    codes: Array
    scales: Array | None
    format: WeightFormat

    def __post_init__(self) -> None:
        dtype = (DType.F32, DType.BF16, DType.U8, DType.U8)[self.format]
        if self.codes.dtype is not dtype or (self.scales is not None) is not self.format.quantised:
            raise ValueError(f"{self.format.label} matrix: got codes {self.codes.dtype.label} and scales {self.scales}, wanted codes {dtype.label}")
        if self.scales is not None:
            wanted = (*self.shape[:-1], self.shape[-1] // GROUP)
            if self.shape[-1] % GROUP or self.scales.shape != wanted or self.scales.dtype is not DType.U16:
                raise ValueError(f"{self.format.label} matrix {list(self.shape)}: got scales {list(self.scales.shape)}, wanted {list(wanted)} u16")

    @classmethod
    def plain(cls, array: Array) -> Matrix:
        """An f32 or bf16 array as a matrix."""
        return cls(array, None, WeightFormat.F32 if array.dtype is DType.F32 else WeightFormat.BF16)

    @classmethod
    def empty(cls, device: Device, format: WeightFormat, shape: tuple[int, ...], category: str = "") -> Matrix:
        """New buffers of its own, contents undefined. Raises ValueError where a quantised format has k no multiple of 64, DeviceMemoryError."""
        *rest, k = shape
        if not format.quantised:
            return cls.plain(Array.empty(device, DType.F32 if format is WeightFormat.F32 else DType.BF16, shape, category))
        if k % GROUP:
            raise ValueError(f"{format.label} matrix {list(shape)}: k is {k}, wanted a multiple of {GROUP}")
        codes = Array.empty(device, DType.U8, (*rest, k * format.bits // 8), category)
        try:
            return cls(codes, Array.empty(device, DType.U16, (*rest, k // GROUP), category), format)
        except BaseException:
            codes.free()
            raise

    @property
    def arrays(self) -> tuple[Array, ...]:
        """Codes, and scales if there are any."""
        return (self.codes,) if self.scales is None else (self.codes, self.scales)

    @property
    def scales_address(self) -> int:
        """Of the scales; 0 without any."""
        return 0 if self.scales is None else self.scales.address

    @property
    def device(self) -> Device:
        return self.codes.device

    @property
    def dtype(self) -> DType:
        """Of the codes."""
        return self.codes.dtype

    def rows(self, start: int = 0, stop: int | None = None) -> Matrix:
        """Rows [start, stop) of all rows, as [rows, k]."""
        count = math.prod(self.shape[:-1])
        stop = count if stop is None else stop
        parts = [array.view((count, array.shape[-1])).slice(start, stop) for array in self.arrays]
        return Matrix(parts[0], parts[1] if len(parts) > 1 else None, self.format)

    @property
    def shape(self) -> tuple[int, ...]:
        """[.., n, k] in weights."""
        *rest, last = self.codes.shape
        return (*rest, last * 2 if self.format is WeightFormat.Q4G64 else last)

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return sum(array.nbytes for array in self.arrays)


def matrix_bytes(format: WeightFormat, shape: tuple[int, ...]) -> int:
    """Bytes of codes and scales of a matrix."""
    count = math.prod(shape)
    return count * format.bits // 8 + (count // GROUP * 2 if format.quantised else 0)
