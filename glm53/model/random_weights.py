"""Weights of a model whose checkpoint is not at hand, drawn on the device: for benchmarks on real widths.

Each matrix has the deviation that keeps rows of unit mean square at unit mean square (1 / sqrt(k)); what is added to the residual stream is smaller
by the root of the number of additions, so that activations stay finite through any number of layers. Norm weights are close to 1, the router's
bias is small, so that natural routing is spread over all experts. A side of a pair has its rows and columns of what is drawn for the whole.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator

import numpy as np

from glm53.errors import HipError
from glm53.hip import Array, Device, Stream
from glm53.model.checkpoint import TensorInfo
from glm53.model.layout import ArrayPlan, array_plans, shard_widths
from glm53.model.names import LoadPlan, PlannedTensor, expected_tensors
from glm53.model.weights import CATEGORY, Item, Weights, assemble
from glm53.ops import weights as ops
from glm53.ops.contract import GRID_YZ_MAX
from glm53.ops.matrix import Matrix
from glm53.ops.rows import copy_planes
from glm53.spec import WHOLE, DType, ModelSpec, Shard

NORM_STD = 0.05
BIAS_STD = 0.01
_COPY_BYTES = 16  # unit of copy_planes
_ADDED = ("o", "down")  # matrices whose products are added to the residual stream


def array_plans_of(spec: ModelSpec, dtype: DType, weights: str, shard: Shard = WHOLE) -> list[ArrayPlan]:
    """The arrays of a model of this shape, or of one side, as if its checkpoint stored everything in BF16. MTP layer left out."""
    sparse = frozenset(layer for layer in range(spec.n_layers) if spec.layer_is_sparse[layer])
    expected = expected_tensors(spec, mtp=False, packed_layers=sparse)
    tensors = {t.name: PlannedTensor(TensorInfo(t.name, "BF16", t.shape, "", 0, 0), t.kind, None) for t in expected}
    return array_plans(LoadPlan(spec, tensors, sparse, ()), dtype, mtp=False, weights=weights, shard=shard)


def random_weights_bytes(spec: ModelSpec, dtype: DType, weights: str = "q8q4", shard: Shard = WHOLE) -> int:
    """Device memory that `random_weights` takes; while it draws a side, the largest split matrix of the whole as well."""
    return sum(plan.nbytes for plan in array_plans_of(spec, dtype, weights, shard))


def random_weights(device: Device, spec: ModelSpec, dtype: DType, weights: str = "q8q4", seed: int = 0, shard: Shard = WHOLE) -> Weights:
    """All layers of `spec`, or one side of them, for activations of type `dtype`; weights: format of the matrices as in `layout.array_plans`.

    The values depend on seed, spec and formats only: those of both sides together are those of the whole. On an error everything is freed again.
    Raises DeviceMemoryError; InputError as `layout.shard_widths`.
    """
    items: dict[str, Item] = {}
    heads, stream = shard_widths(spec, shard).heads, device.stream()
    try:
        wholes = {whole.key: whole for whole in array_plans_of(spec, dtype, weights)}
        for plan in array_plans_of(spec, dtype, weights, shard):
            whole = wholes.get(plan.key, wholes["embed"])  # a tied head has no array of its own in the whole
            for i, part in enumerate(plan.halves or (plan,)):
                matrix = Matrix.empty(device, part.format, part.shape, CATEGORY)
                items[part.key] = matrix if part.is_matrix else matrix.codes
                of = (whole.halves or (whole,))[i]
                key_seed = int.from_bytes(hashlib.sha256(f"{seed} {of.key}".encode()).digest()[:8], "little")
                if part.shape == of.shape:
                    ops.fill_random(stream, matrix, key_seed, *_moments(of, spec))
                    continue
                drawn = ops.random_matrix(stream, of.format, of.shape, key_seed, _moments(of, spec)[0], "loading")
                try:
                    for row, rows, cols, at in _taken(plan, whole, part, heads):
                        _copy(stream, drawn.rows(row, row + rows), cols, matrix.rows(at, at + rows))
                    stream.synchronize()
                finally:
                    for array in drawn.arrays:
                        array.free()
        stream.synchronize()
    except BaseException:
        for item in items.values():
            for array in item.arrays if isinstance(item, Matrix) else (item,):
                with contextlib.suppress(HipError):  # the first error is the one to report
                    array.free()
        raise
    finally:
        stream.close()
    return assemble(items, spec, ())


def _taken(plan: ArrayPlan, whole: ArrayPlan, part: ArrayPlan, heads: range) -> Iterator[tuple[int, int, range, int]]:
    """(row of the whole, rows, columns, row of the side) of what a side has of a matrix; `part` is `plan` or one of the halves of kv_b."""
    if plan.halves:
        height = part.shape[1]
        yield heads.start * height, len(heads) * height, range(part.cols), 0
        return
    first_rows, at = {}, 0
    for source in whole.parts:
        first_rows[source.source.info.name] = at
        at += source.rows
    at = 0
    for piece in plan.parts:
        yield first_rows[piece.source.info.name] + piece.source_row, piece.rows, piece.cols, at
        at += piece.rows


def _copy(stream: Stream, source: Matrix, cols: range, target: Matrix) -> None:
    """target [rows, len(cols)] = columns `cols` of source, codes and scales."""
    for array, into in zip(source.arrays, target.arrays, strict=True):
        row_bytes, length = array.nbytes // array.shape[0], into.nbytes // into.shape[0]
        offset = row_bytes * cols.start // source.shape[-1]
        if length == row_bytes:
            stream.copy(into.address, array.address, into.nbytes)
        elif any(n % _COPY_BYTES for n in (row_bytes, length, offset, array.address, into.address)):
            _copy_by_host(stream, array, offset, into)
        else:
            for row in range(0, array.shape[0], GRID_YZ_MAX):
                addresses = array.address + row * row_bytes + offset, into.address + row * length
                planes = min(GRID_YZ_MAX, array.shape[0] - row)
                copy_planes(stream, *addresses, source_plane_bytes=row_bytes, target_plane_bytes=length, length_bytes=length, planes=planes)


def _copy_by_host(stream: Stream, source: Array, offset_bytes: int, target: Array) -> None:
    """For rows of few columns, such as the scales of small models."""
    values, first = source.bits(stream), offset_bytes // source.dtype.item_bytes
    target.upload(np.ascontiguousarray(values[:, first : first + target.shape[1]]), stream)


def _moments(plan: ArrayPlan, spec: ModelSpec) -> tuple[float, float]:
    """(deviation, mean) of an array of the model."""
    name = plan.key.rsplit(".", 1)[-1]
    if len(plan.shape) == 1:
        return (BIAS_STD, 0.0) if name.endswith("bias") else (NORM_STD, 1.0)
    if name == "embed":
        return 1.0, 0.0
    if name in ("wk", "wv") and "indexer" not in plan.key:  # of kv_b, whose columns are the latent
        return spec.kv_lora_rank**-0.5, 0.0
    return (plan.shape[-1] * (2 * spec.n_layers if name in _ADDED else 1)) ** -0.5, 0.0
