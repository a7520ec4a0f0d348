"""Contracts of the kernels: arrays matched against named dimensions, element types against the variants that exist.

A wrapper makes one `Dims`, matches its arrays and launches. Every violation is a `ContractError` that names the operation, the array, what
it got, what was expected and which array said so. Knows nothing of any model.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from glm53.errors import InputError
from glm53.spec import DType, WeightFormat

if TYPE_CHECKING:
    import ctypes

    from glm53.hip import Array, Stream
    from glm53.ops.matrix import Matrix

GRID_YZ_MAX = 65_535  # blocks along y and z; HIP's and CUDA's common limit
U32_LIMIT = 1 << 32


class ContractError(InputError, ValueError):
    """Arrays or parameters that a kernel does not take. Next step: the shapes in the docstring of the operation named."""


@dataclass(frozen=True)
class Cost:
    """What one call moves between memory and registers at least (each operand once), and its floating-point operations."""

    bytes: int
    flops: int

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.bytes + other.bytes, self.flops + other.flops)


class Dims:
    """Named dimensions of one call. `dims["rows"]` is the size bound by the first array that has it."""

    def __init__(self, op: str):
        self.op = op
        self._sizes: dict[str, int] = {}
        self._origins: dict[str, str] = {}
        self._device: tuple[str, int] | None = None

    def __getitem__(self, dim: str) -> int:
        return self._sizes[dim]

    def fail(self, text: str) -> NoReturn:
        raise ContractError(f"{self.op}: {text}")

    def require(self, holds: bool, text: str) -> None:
        """Raises with `text` (what, got, wanted) unless `holds`."""
        if not holds:
            self.fail(text)

    def bind(self, dim: str, size: int, origin: str) -> None:
        """Gives a dimension its size, or compares with the size it has. Sizes are at least 1."""
        if size < 1:
            self.fail(f"{origin} is {size}, expected {dim} of at least 1")
        known = self._sizes.setdefault(dim, size)
        self._origins.setdefault(dim, origin)
        if known != size:
            self.fail(f"{origin} is {size}, expected {dim}={known} (bound by {self._origins[dim]})")

    def match(self, name: str, array: Array | Matrix, *shape: str | int | None, dtype: DType | Collection[DType] | None = None) -> None:
        """Compares an array with a shape of dimension names (bound or compared), exact sizes, or None (any size >= 1), and with its types.

        All arrays of a call must lie on one device.
        """
        if dtype is not None:
            wanted = {dtype} if isinstance(dtype, DType) else set(dtype)
            if array.dtype not in wanted:
                self.fail(f"{name} is {array.dtype.label}, expected {' or '.join(sorted(t.label for t in wanted))}")
        if len(array.shape) != len(shape):
            text = ", ".join("any" if s is None else str(s) for s in shape)
            self.fail(f"{name} has shape {list(array.shape)}, expected {len(shape)} dims [{text}]")
        for axis, (size, expected) in enumerate(zip(array.shape, shape, strict=True)):
            origin = f"{name} dim {axis}"
            if isinstance(expected, str):
                self.bind(expected, size, origin)
            elif size < 1 or (expected is not None and size != expected):
                self.fail(f"{origin} is {size}, expected {'at least 1' if expected is None else expected}")
        device = self._device or (name, array.device.index)
        self._device = device
        if array.device.index != device[1]:
            self.fail(f"{name} is on device {array.device.index}, expected device {device[1]} (where {device[0]} is)")

    def distinct(self, name: str, array: Array, other_name: str, other: Array) -> None:
        """Raises if two arrays that a kernel must not alias share bytes."""
        if array.address < other.address + other.nbytes and other.address < array.address + array.nbytes:
            self.fail(f"{name} and {other_name} overlap in memory, expected separate arrays")


def variant(op: str, existing: Collection[str], *dtypes: DType | WeightFormat) -> str:
    """Kernel name `op_T1_T2..`. Raises ContractError naming the variants that exist. `existing`: their suffixes, e.g. "f32_bf16"."""
    suffix = "_".join("f8" if dtype is DType.F8E4M3 else dtype.label for dtype in dtypes)
    if suffix not in existing:
        raise ContractError(f"{op}: no variant {suffix}; existing: {', '.join(sorted(existing))}")
    return f"{op}_{suffix}"


def launch(stream: Stream, name: str, grid: tuple[int, int, int], args: ctypes.Structure) -> None:
    """Enqueues kernel `name` of the stream's device. Raises ContractError if the grid is beyond what every runtime takes."""
    if grid[1] > GRID_YZ_MAX or grid[2] > GRID_YZ_MAX:
        raise ContractError(f"{name}: grid {grid} is too large, expected at most {GRID_YZ_MAX} blocks along y and z; next: fewer rows")
    stream.device.kernel(name).launch(stream, grid, args)


def ceil_div(count: int, size: int) -> int:
    return -(-count // size)


def require_index(d: Dims, name: str, index: int, per_step: int) -> None:
    """Number of an exchange: from 1, of `per_step` in each step; per_step 1: the counter counts exchanges, of which a step may have any number."""
    fits = 1 <= index < U32_LIMIT and 1 <= per_step < U32_LIMIT and (per_step == 1 or index <= per_step)
    d.require(fits, f"{name} is {index}, expected 1 to per_step={per_step}")


def on_sm(stream: Stream) -> bool:
    """Whether kernels have the shapes of sm_90, where blocks with more work keep rings of weights full."""
    return stream.device.arch.startswith("sm_")
