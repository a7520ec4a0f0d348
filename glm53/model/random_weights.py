"""Weights of a model whose checkpoint is not at hand, drawn on the device: for benchmarks on real widths.

Each matrix has the deviation that keeps rows of unit mean square at unit mean square (1 / sqrt(k)); what is added to the residual stream is smaller
by the root of the number of additions, so that activations stay finite through any number of layers. Norm weights are close to 1, the router's
bias is small, so that natural routing is spread over all experts.
"""

from __future__ import annotations

import contextlib
import hashlib

from glm53.errors import HipError
from glm53.hip import Device
from glm53.model.checkpoint import TensorInfo
from glm53.model.layout import ArrayPlan, array_plans
from glm53.model.names import LoadPlan, PlannedTensor, expected_tensors
from glm53.model.weights import CATEGORY, Item, Weights, assemble
from glm53.ops import weights as ops
from glm53.ops.matrix import Matrix
from glm53.spec import DType, ModelSpec

NORM_STD = 0.05
BIAS_STD = 0.01
_ADDED = ("o", "down")  # matrices whose products are added to the residual stream


def array_plans_of(spec: ModelSpec, dtype: DType, weights: str) -> list[ArrayPlan]:
    """The arrays of a model of this shape, as if its checkpoint stored everything in BF16. MTP layer left out."""
    sparse = frozenset(layer for layer in range(spec.n_layers) if spec.layer_is_sparse[layer])
    expected = expected_tensors(spec, mtp=False, packed_layers=sparse)
    tensors = {t.name: PlannedTensor(TensorInfo(t.name, "BF16", t.shape, "", 0, 0), t.kind, None) for t in expected}
    return array_plans(LoadPlan(spec, tensors, sparse, ()), dtype, mtp=False, weights=weights)


def random_weights_bytes(spec: ModelSpec, dtype: DType, weights: str = "q8q4") -> int:
    """Device memory that `random_weights` takes."""
    return sum(plan.nbytes for plan in array_plans_of(spec, dtype, weights))


def random_weights(device: Device, spec: ModelSpec, dtype: DType, weights: str = "q8q4", seed: int = 0) -> Weights:
    """All layers of `spec` for activations of type `dtype`; weights: format of the matrices as in `layout.array_plans`.

    The values depend on seed, spec and formats only. On an error everything is freed again. Raises DeviceMemoryError.
    """
    items: dict[str, Item] = {}
    stream = device.stream()
    try:
        for plan in array_plans_of(spec, dtype, weights):
            for part in plan.halves or (plan,):
                matrix = Matrix.empty(device, part.format, part.shape, CATEGORY)
                items[part.key] = matrix if part.is_matrix else matrix.codes
                key_seed = int.from_bytes(hashlib.sha256(f"{seed} {part.key}".encode()).digest()[:8], "little")
                ops.fill_random(stream, matrix, key_seed, *_moments(part, spec))
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
