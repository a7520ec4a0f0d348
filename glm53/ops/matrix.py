"""A weight matrix on a device, in one of the weight formats."""

from __future__ import annotations

from dataclasses import dataclass

from glm53.hip import Array
from glm53.spec import DType, WeightFormat

GROUP = 64  # columns that share a scale


@dataclass(frozen=True)
class Matrix:
    """Weights [.., n, k] in a format.

    codes: F32 [.., n, k] f32; BF16 [.., n, k] bf16; Q8G64 [.., n, k] u8 (int8 bits); Q4G64 [.., n, k / 2] u8 (column 2j in the low nibble).
    scales: [.., n, k / 64] u16 (f16 bits) where the format is quantised, else None. Raises ValueError where these do not fit.
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

    @property
    def shape(self) -> tuple[int, ...]:
        """[.., n, k] in weights."""
        *rest, last = self.codes.shape
        return (*rest, last * 2 if self.format is WeightFormat.Q4G64 else last)

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return self.codes.nbytes + (0 if self.scales is None else self.scales.nbytes)
