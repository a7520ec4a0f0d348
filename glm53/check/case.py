"""A check of one kernel on one device: what a case is, where all cases come from, and the arrays a case works with."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import numpy as np

import glm53.check
from glm53.check.compare import Comparison
from glm53.hip import Array, Device, Stream
from glm53.hip.array import bf16_from_f32, f32_from_bf16
from glm53.spec import DType


@dataclass(frozen=True)
class Case:
    """One check. run: computes on the device, compares with the reference, raises `Mismatch`. thorough: left out of the quick self-test."""

    family: str
    name: str
    run: Callable[[Device], Comparison]
    thorough: bool = False

    def __str__(self) -> str:
        return f"{self.family}-{self.name}"


def all_cases() -> list[Case]:
    """Cases of every module `glm53/check/cases_*.py` (its list `CASES`), in order of module and definition. Names are unique."""
    modules = sorted(m.name for m in pkgutil.iter_modules(glm53.check.__path__) if m.name.startswith("cases_"))
    cases: list[Case] = []
    for module in modules:
        cases += importlib.import_module(f"glm53.check.{module}").CASES
    names = [str(case) for case in cases]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise ValueError(f"two cases of one name: {', '.join(sorted(twice))}")
    return cases


class Bench:
    """Arrays and the stream of one case, freed at its end.

    with Bench(device) as bench: x = bench.put(values, DType.BF16); y = bench.poison(DType.F32, (4, 8)); ...; bench.read(y)
    """

    def __init__(self, device: Device):
        self.device = device
        self.stream: Stream = device.default_stream
        self._arrays: list[Array] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            self.device.synchronize()
        for array in reversed(self._arrays):
            array.free()

    def put(self, values: np.ndarray, dtype: DType | None = None) -> Array:
        """A device array with these values; float32 is rounded for BF16, F8E4M3 takes uint8 codes."""
        array = Array.from_numpy(self.device, np.ascontiguousarray(values), dtype, category="check")
        self._arrays.append(array)
        return array

    def keep(self, *arrays: Array) -> None:
        """Frees these with the others."""
        self._arrays += arrays

    def poison(self, dtype: DType, shape: tuple[int, ...]) -> Array:
        """A device array of bytes 0xff: NaN as a float, -1 as an integer. What a kernel leaves out shows."""
        array = Array.empty(self.device, dtype, shape, category="check")
        self._arrays.append(array)
        raw = np.full(max(array.nbytes, 1), 0xFF, np.uint8)
        Array(array.buffer, DType.U8, raw.shape, array.offset_bytes).upload(raw)
        return array

    def read(self, array: Array) -> np.ndarray:
        """The values after all enqueued work; bf16 as float32."""
        return array.numpy(self.stream)

    def bits(self, array: Array) -> np.ndarray:
        """The raw elements after all enqueued work: for comparisons bit by bit."""
        bits = array.bits(self.stream)
        return bits.view(np.uint32) if bits.dtype == np.float32 else bits


def round_to(values: np.ndarray, dtype: DType) -> np.ndarray:
    """float32 values as they are after a store and a load in `dtype`."""
    values = np.asarray(values, np.float32)
    return f32_from_bf16(bf16_from_f32(values)) if dtype is DType.BF16 else values


def draw(seed: int, shape: tuple[int, ...], dtype: DType = DType.F32, spread: float = 1.0) -> np.ndarray:
    """Normal values of standard deviation `spread`, float32, already representable in `dtype`."""
    return round_to(np.random.default_rng(seed).standard_normal(shape).astype(np.float32) * np.float32(spread), dtype)
