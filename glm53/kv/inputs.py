"""What a cache is given: rows and selections in numpy, DLPack tensors or glm53 Arrays, brought to where the kernels read them.

Device memory is read where it lies; host memory is copied piece by piece, so that the caller may change it as soon as the call returns.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from glm53.errors import InputError
from glm53.hip import Array, Device, Stream
from glm53.hip.array import bf16_from_f32, f32_from_bf16
from glm53.kv import dlpack
from glm53.kv.arrays import KvArray
from glm53.kv.passes import RowLayout
from glm53.spec import DType, RowFormat

PIECE_ROWS = 1024  # rows of one layer that are on their way from the host at once
# What a row format is written from: its own type, or either for quantised rows.
SOURCES = {RowFormat.F32: (DType.F32,), RowFormat.BF16: (DType.BF16,), RowFormat.Q8G64: (DType.F32, DType.BF16)}
Layer = Callable[[int, int, int], tuple[Array, int]]  # (layer, first row, last row + 1) -> (array [rows, columns], column of the layer's values)


def distinct(positions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """(selected [rows, k], counts [rows], index [rows, k] or None) of positions [rows, k], all int32.

    The first counts[r] of selected[r] are the distinct positions of row r in order of appearance, the others 0; positions[r, i] =
    selected[r, index[r, i]]. index None: nothing repeats, selected is positions.
    """
    count, k = positions.shape
    ordered = np.sort(positions, axis=1)
    if k < 2 or (ordered[:, 1:] != ordered[:, :-1]).all():
        return positions, np.full(count, k, np.int32), None
    selected, counts, index = np.zeros_like(positions), np.zeros(count, np.int32), np.empty_like(positions)
    for row in range(count):
        values, first, inverse = np.unique(positions[row], return_index=True, return_inverse=True)
        order = np.argsort(first)
        place = np.empty(len(order), np.int32)
        place[order] = np.arange(len(order), dtype=np.int32)
        selected[row, : len(order)], counts[row], index[row] = values[order], len(order), place[inverse.reshape(-1)]
    return selected, counts, index


class Inputs:
    """Checks inputs and holds the memory that host inputs are brought to. `make(dtype, *shape)` allocates it. Work is enqueued on `stream`."""

    def __init__(self, device: Device, stream: Stream, layout: RowLayout, query_rows_max: int, topk_max: int, make: Callable[..., Array]):
        self.device, self.layout, self._stream = device, layout, stream
        self.query_rows_max, self.topk_max = query_rows_max, topk_max
        self._piece = make(DType.F32, PIECE_ROWS * (layout.latent + layout.rope))
        self._selected, self._index = (make(DType.I32, query_rows_max * topk_max) for _ in range(2))
        self._counts = make(DType.I32, query_rows_max)

    def take(self, given: Any, name: str, keep: list[object]) -> np.ndarray | tuple[Array, tuple[int, ...]]:
        """An input: numpy (bf16 as uint16 bits) where its memory is the host's, else (memory as a 1-dimensional array, strides in elements)."""
        if isinstance(given, KvArray):
            keep.append(given)
            given = given.array
        if isinstance(given, Array):
            if given.device.index != self.device.index:
                raise InputError(f"{name}: lies on device {given.device.index}, expected device {self.device.index}; next: copy it there")
            strides = tuple(math.prod(given.shape[axis + 1 :]) for axis in range(len(given.shape)))
            keep.append(given)
            return given, strides
        if isinstance(given, (np.ndarray, list, tuple, int, np.generic)):
            return np.asarray(given)
        kind = dlpack.DEVICE_TYPES[self.device.runtime.name]
        place = (kind, 0 if kind == dlpack.CPU else self.device.index)
        tensor = dlpack.import_tensor(given, name, place, self._stream.address)
        if tensor.on_host:
            values = tensor.view()
            keep.append(tensor)
            return values
        keep.append(tensor)
        return Array.from_address(self.device, tensor.address, tensor.dtype, tensor.shape), tensor.strides

    def rows(self, given: Any, keep: list[object]) -> tuple[int, Layer]:
        """Number of rows and a reader of their layers, for rows [n, layers, latent + rope]. Raises InputError."""
        taken = self.take(given, "rows", keep)
        array, strides = taken if isinstance(taken, tuple) else (taken, ())
        width, layers = self.layout.latent + self.layout.rope, self.layout.planes
        if len(array.shape) != 3 or array.shape[1:] != (layers, width):
            raise InputError(f"rows: got shape {list(array.shape)}, expected [n, layers={layers}, latent + rope={width}]")
        if isinstance(array, np.ndarray):
            return len(array), self._host_rows(array)
        expected = SOURCES[self.layout.row_format]
        if array.dtype not in expected:
            text = " or ".join(t.label for t in expected)
            raise InputError(f"rows: got {array.dtype.label} for {self.layout.row_format.value} rows, expected {text}; next: convert them first")
        return array.shape[0], self._device_rows(array, strides)

    def _host_rows(self, values: np.ndarray) -> Layer:
        wanted = SOURCES[self.layout.row_format]
        if values.dtype == np.float32:
            dtype = wanted[0]
        elif values.dtype == np.uint16:
            dtype = wanted[-1]
        else:
            raise InputError(f"rows: got {values.dtype}, expected float32, or uint16 with bf16 bits; next: rows.astype(numpy.float32)")
        width = values.shape[2]

        def layer(index: int, first: int, last: int) -> tuple[Array, int]:
            piece = np.array(values[first:last, index], order="C")  # a copy: the caller may change its own
            if dtype is DType.BF16 and piece.dtype == np.float32:
                piece = bf16_from_f32(piece)
            elif dtype is DType.F32 and piece.dtype == np.uint16:
                piece = f32_from_bf16(piece)
            x = Array(self._piece.buffer, dtype, (last - first, width))
            x.upload(piece, self._stream)
            return x, 0

        return layer

    def _device_rows(self, array: Array, strides: tuple[int, ...]) -> Layer:
        count, layers, width = array.shape
        row_major, layer_major = (layers * width, width, 1), (width, count * width, 1)
        # A dimension of one element may have any stride.
        same = lambda order: all(size == 1 or a == b for size, a, b in zip(array.shape, strides, order, strict=True))
        if count == 0 or same(row_major):
            flat = Array(array.buffer, array.dtype, (count, layers * width), array.offset_bytes)
            return lambda index, first, last: (flat.slice(first, last), index * width)
        if same(layer_major):
            planes = Array(array.buffer, array.dtype, (layers, count, width), array.offset_bytes)
            return lambda index, first, last: (planes.slice(index, index + 1).reshape(count, width).slice(first, last), 0)
        raise InputError(f"rows: got strides {list(strides)} in device memory, expected {list(row_major)} or {list(layer_major)}; next: contiguous()")

    def selection(self, given: Any, history_rows: int, trusted: bool, keep: list[object]) -> tuple[Array, Array, Array | None]:
        """(selected [rows, k], counts [rows], index [rows, k] or None) in device memory. Raises InputError."""
        taken = self.take(given, "positions", keep)
        array, strides = taken if isinstance(taken, tuple) else (taken, ())
        if len(array.shape) != 2 or not 1 <= array.shape[0] <= self.query_rows_max or not 1 <= array.shape[1] <= self.topk_max:
            limits = f"rows 1 to query_rows_max={self.query_rows_max}, k 1 to topk_max={self.topk_max}"
            raise InputError(f"positions: got shape {list(array.shape)}, expected [rows, k] with {limits}; next: fewer at once, or a larger cache")
        count, k = (int(size) for size in array.shape)
        cut = lambda work: Array(work.buffer, work.dtype, (count, k))
        if isinstance(array, Array):
            contiguous = all(size == 1 or a == b for size, a, b in zip(array.shape, strides, (k, 1), strict=True))
            if array.dtype not in (DType.I32, DType.I64) or not contiguous or (trusted and array.dtype is not DType.I32):
                text = "i32" if trusted else "i32 or i64"
                raise InputError(f"positions: got {array.dtype.label} with strides {list(strides)} in device memory, expected contiguous {text}")
            if trusted:
                counts = self._counts.slice(0, count)
                counts.upload(np.full(count, k, np.int32), self._stream)
                return Array(array.buffer, array.dtype, (count, k), array.offset_bytes), counts, None
            array = array.numpy(self._stream)
        if array.dtype.kind not in "iu":
            raise InputError(f"positions: got {array.dtype}, expected integers")
        low, high = int(array.min()), int(array.max())
        if low < 0 or high >= history_rows:
            raise InputError(f"positions: got {low if low < 0 else high}, expected positions of the history, 0 to {history_rows - 1}")
        selected, counts_host, index = distinct(np.array(array, np.int32))
        uploads = [(cut(self._selected), selected), (self._counts.slice(0, count), counts_host)]
        if index is not None:
            uploads.append((cut(self._index), index))
        for work, values in uploads:
            work.upload(values, self._stream)
        return uploads[0][0], uploads[1][0], None if index is None else uploads[2][0]


__all__ = ["PIECE_ROWS", "Inputs", "Layer", "distinct"]
