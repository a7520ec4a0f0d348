"""Which device arrays the weights become, and from which rows of which stored tensors: pure planning, no device.

Invariant: the parts of an `ArrayPlan` cover its rows exactly once, in order. Fused arrays (gate and up, all experts of a layer) are filled
part by part, each converted by its own scales: those of neighbours need not meet at a multiple of 128 rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from glm53.config import SCALE_BLOCK
from glm53.model.names import LoadPlan, PlannedTensor, layer_prefix
from glm53.spec import DType


@dataclass(frozen=True)
class Part:
    """Rows [source_row, source_row + rows) of a stored tensor, seen as [all rows, cols]. `scale_row` is the scale's row for source_row."""

    source: PlannedTensor
    source_row: int
    rows: int
    scale_row: int = 0


@dataclass(frozen=True)
class ArrayPlan:
    """One device array [rows, cols] or [.., rows, cols], filled by `parts` from row 0 on. `key` names it: `layers.3.mlp.gate_up`."""

    key: str
    dtype: DType
    shape: tuple[int, ...]
    parts: tuple[Part, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.item_bytes

    @property
    def cols(self) -> int:
        return self.shape[-1]


def array_plans(plan: LoadPlan, dtype: DType, mtp: bool) -> list[ArrayPlan]:
    """Every device array of the weights in load order, for activations of type `dtype` (F32 or BF16).

    BF16: everything bf16 but router weight and bias. F32: vectors, F32 and FP8 matrices f32; matrices stored as BF16 stay bf16, since the
    product kernels read them so and their values are the same. `kv_b` stands for the two arrays it is split into: wk and wv.
    """
    assert dtype in (DType.F32, DType.BF16)
    spec, planner = plan.spec, _Planner(plan, dtype)
    planner.add("embed", "model.embed_tokens.weight")
    for layer in range(spec.n_layers):
        planner.layer(f"layers.{layer}.", layer, spec.layer_is_full[layer], spec.layer_is_sparse[layer])
    planner.add("final_norm", "model.norm.weight")
    if not spec.tie_word_embeddings:
        planner.add("lm_head", "lm_head.weight")
    if mtp and spec.n_mtp_layers:
        base = layer_prefix(spec.n_layers)
        planner.add("mtp.enorm", base + "enorm.weight")
        planner.add("mtp.hnorm", base + "hnorm.weight")
        planner.add("mtp.eh_proj", base + "eh_proj.weight")
        planner.layer("mtp.layer.", spec.n_layers, True, True)
        planner.add("mtp.norm", base + "shared_head.norm.weight")
    return planner.arrays


class _Planner:
    def __init__(self, plan: LoadPlan, dtype: DType):
        self.plan, self.dtype = plan, dtype
        self.arrays: list[ArrayPlan] = []

    def add(self, key: str, *names: str, shape: tuple[int, ...] | None = None, keep_f32: bool = False) -> None:
        """An array whose rows are the rows of the named tensors one after another; `shape` regroups them."""
        sources = [self.plan.tensors[name] for name in names]
        parts = [part for source in sources for part in _parts(source)]
        first = sources[0].info.shape
        rows = sum(part.rows for part in parts)
        shape = shape or (first if len(first) == 1 else (rows, first[-1]))
        stays_bf16 = len(first) > 1 and all(source.info.dtype == "BF16" for source in sources)
        dtype = DType.F32 if keep_f32 or (self.dtype is DType.F32 and not stays_bf16) else DType.BF16
        self.arrays.append(ArrayPlan(key, dtype, shape, tuple(parts)))

    def layer(self, key: str, layer: int, full: bool, sparse: bool) -> None:
        base = layer_prefix(layer)
        attention = base + "self_attn."
        self.add(key + "input_norm", base + "input_layernorm.weight")
        self.add(key + "post_norm", base + "post_attention_layernorm.weight")
        self.add(key + "q_a", attention + "q_a_proj.weight")
        self.add(key + "q_a_norm", attention + "q_a_layernorm.weight")
        self.add(key + "q_b", attention + "q_b_proj.weight")
        self.add(key + "kv_a", attention + "kv_a_proj_with_mqa.weight")
        self.add(key + "kv_a_norm", attention + "kv_a_layernorm.weight")
        self.add(key + "kv_b", attention + "kv_b_proj.weight")
        self.add(key + "o", attention + "o_proj.weight")
        if full:
            for name in ("wq_b.weight", "wk.weight", "k_norm.weight", "k_norm.bias", "weights_proj.weight"):
                field = name.removesuffix(".weight") if "norm" not in name else name.replace(".", "_")
                self.add(f"{key}indexer.{field}", f"{attention}indexer.{name}")
        if not sparse:
            self.mlp(key + "mlp.", base + "mlp.")
            return
        self.add(key + "mlp.router", base + "mlp.gate.weight", keep_f32=True)
        self.add(key + "mlp.bias", base + "mlp.gate.e_score_correction_bias", keep_f32=True)
        self.experts(key + "mlp.", base + "mlp.experts.", packed=layer in self.plan.packed_layers)
        self.mlp(key + "mlp.shared.", base + "mlp.shared_experts.")

    def mlp(self, key: str, base: str) -> None:
        self.add(key + "gate_up", base + "gate_proj.weight", base + "up_proj.weight")
        self.add(key + "down", base + "down_proj.weight")

    def experts(self, key: str, base: str, packed: bool) -> None:
        spec = self.plan.spec
        count, width, hidden = spec.n_routed_experts, spec.expert_width, spec.hidden_size
        if packed:
            gate_up, down = [base + "gate_up_proj"], [base + "down_proj"]
        else:
            gate_up = [f"{base}{e}.{half}_proj.weight" for e in range(count) for half in ("gate", "up")]
            down = [f"{base}{e}.down_proj.weight" for e in range(count)]
        self.add(key + "gate_up", *gate_up, shape=(count, 2 * width, hidden))
        self.add(key + "down", *down, shape=(count, hidden, width))


def _parts(source: PlannedTensor) -> list[Part]:
    """A tensor as parts: one, but for packed FP8 experts, whose scale blocks start anew with each expert."""
    shape = source.info.shape
    if source.scale is None or len(shape) < 3:
        rows = 1 if len(shape) == 1 else math.prod(shape[:-1])
        return [Part(source, 0, rows)]
    rows, scale_rows = shape[1], -(-shape[1] // SCALE_BLOCK)
    return [Part(source, i * rows, rows, i * scale_rows) for i in range(shape[0])]
