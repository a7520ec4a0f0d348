"""Which device arrays the weights become, and from which rows of which stored tensors: pure planning, no device.

Invariant: the parts of an `ArrayPlan` cover its rows exactly once, in order. Fused arrays (gate and up, all experts of a layer) are filled
part by part, each converted by its own scales: those of neighbours need not meet at a multiple of 128 rows.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from glm53.config import SCALE_BLOCK, WEIGHT_SETTINGS
from glm53.model.names import LoadPlan, PlannedTensor, layer_prefix
from glm53.ops.matrix import GROUP, matrix_bytes
from glm53.spec import DType, WeightFormat


@dataclass(frozen=True)
class Part:
    """Rows [source_row, source_row + rows) of a stored tensor, seen as [all rows, cols]. `scale_row` is the scale's row for source_row."""

    source: PlannedTensor
    source_row: int
    rows: int
    scale_row: int = 0


@dataclass(frozen=True)
class ArrayPlan:
    """One device array or matrix [.., rows, cols], filled by `parts` from row 0 on. `key` names it: `layers.3.mlp.gate_up`.

    kv_b is not kept: `halves` are the two matrices it is split into, and `format` is that of the scratch memory it is split from.
    """

    key: str
    format: WeightFormat
    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    is_matrix: bool = True  # False: an array, which is F32 or BF16
    too_narrow: bool = False  # a quantised format was asked for, but the columns are no multiple of 64
    halves: tuple[ArrayPlan, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes that stay on the device."""
        return sum(half.nbytes for half in self.halves) if self.halves else matrix_bytes(self.format, self.shape)

    @property
    def scratch_bytes(self) -> int:
        """Bytes needed while it is loaded, beside the staging memory: kv_b, and the halves that are converted after the split."""
        if not self.halves:
            return 0
        return sum(matrix_bytes(self.format, p.shape) for p in (self, *self.halves) if p is self or p.format is not self.format)

    @property
    def cols(self) -> int:
        return self.shape[-1]


def array_plans(plan: LoadPlan, dtype: DType, mtp: bool, weights: str = "auto") -> list[ArrayPlan]:
    """Every device array of the weights in load order, for activations of type `dtype` (F32 or BF16).

    Vectors and norms have the activation type, router weight and bias are f32. Matrices by `weights`:
    auto: BF16 activations: bf16. F32: f32, but matrices stored as BF16 stay bf16, since their values are the same.
    bf16, f32: that type; f32 is for F32 activations.
    q8q4: routed experts q4g64, all others q8g64; bf16 where the columns are no multiple of 64. The embedding is as with auto.
    """
    assert dtype in (DType.F32, DType.BF16) and weights in WEIGHT_SETTINGS and (weights != "f32" or dtype is DType.F32)
    spec, planner = plan.spec, _Planner(plan, dtype, weights)
    planner.array("embed", "model.embed_tokens.weight")
    for layer in range(spec.n_layers):
        planner.layer(f"layers.{layer}.", layer, spec.layer_is_full[layer], spec.layer_is_sparse[layer])
    planner.array("final_norm", "model.norm.weight")
    if not spec.tie_word_embeddings:
        planner.matrix("lm_head", "lm_head.weight")
    elif weights == "q8q4" and spec.hidden_size % GROUP == 0:  # else it is the embedding's array
        planner.matrix("lm_head", "model.embed_tokens.weight")
    if mtp and spec.n_mtp_layers:
        base = layer_prefix(spec.n_layers)
        planner.array("mtp.enorm", base + "enorm.weight")
        planner.array("mtp.hnorm", base + "hnorm.weight")
        planner.matrix("mtp.eh_proj", base + "eh_proj.weight")
        planner.layer("mtp.layer.", spec.n_layers, True, True)
        planner.array("mtp.norm", base + "shared_head.norm.weight")
    return planner.arrays


def format_notes(plans: list[ArrayPlan]) -> list[str]:
    """Which matrices could not be quantised as asked, a line for each name and width."""
    counts: dict[tuple[str, int], int] = {}
    for plan in plans:
        for item in plan.halves or (plan,):
            if item.too_narrow:
                name = re.sub(r"^(layers\.\d+|mtp\.layer)\.", "", item.key)
                counts[name, item.cols] = counts.get((name, item.cols), 0) + 1
    return [
        f"{name} stays bf16{f' in {count} layers' if count > 1 else ''}: its {cols} columns are no multiple of {GROUP}"
        for (name, cols), count in counts.items()
    ]


class _Planner:
    def __init__(self, plan: LoadPlan, dtype: DType, weights: str):
        self.plan, self.dtype, self.weights = plan, dtype, weights
        self.arrays: list[ArrayPlan] = []

    def array(self, key: str, *names: str) -> None:
        """Norms, biases and the embedding."""
        sources, parts, shape = self._sources(names)
        is_vector, setting = len(shape) == 1, "auto" if self.weights == "q8q4" else self.weights
        format = self._activation() if is_vector else self._plain(sources, setting)
        self.arrays.append(ArrayPlan(key, format, shape, parts, is_matrix=False))

    def router(self, key: str, base: str) -> None:
        _, parts, shape = self._sources((base + "weight",))
        self.arrays.append(ArrayPlan(key + "router", WeightFormat.F32, shape, parts))
        _, parts, shape = self._sources((base + "e_score_correction_bias",))
        self.arrays.append(ArrayPlan(key + "bias", WeightFormat.F32, shape, parts, is_matrix=False))

    def matrix(self, key: str, *names: str, shape: tuple[int, ...] | None = None, quantised: WeightFormat = WeightFormat.Q8G64) -> None:
        """A matrix whose rows are the rows of the named tensors one after another; `shape` regroups them. quantised: its format with q8q4."""
        sources, parts, flat = self._sources(names)
        shape = shape or flat
        format = self._format(sources, shape, quantised)
        self.arrays.append(ArrayPlan(key, format, shape, parts, too_narrow=self._too_narrow(shape)))

    def kv_b(self, key: str, name: str) -> None:
        spec, (sources, parts, shape) = self.plan.spec, self._sources((name,))
        shapes = {
            "wk": (spec.n_heads, spec.kv_lora_rank, spec.qk_nope_head_dim),
            "wv": (spec.n_heads, spec.v_head_dim, spec.kv_lora_rank),
        }
        halves = tuple(
            ArrayPlan(key + half, self._format(sources, of, WeightFormat.Q8G64), of, (), too_narrow=self._too_narrow(of))
            for half, of in shapes.items()
        )
        formats = {half.format for half in halves}
        unquantised = WeightFormat.BF16 if _stored_bf16(sources) else WeightFormat.F32
        scratch = unquantised if self.weights == "q8q4" and formats != {WeightFormat.BF16} else halves[0].format
        self.arrays.append(ArrayPlan(key + "kv_b", scratch, shape, parts, halves=halves))

    def _sources(self, names: Sequence[str]) -> tuple[list[PlannedTensor], tuple[Part, ...], tuple[int, ...]]:
        """(tensors, their parts, shape with their rows one after another)"""
        sources = [self.plan.tensors[name] for name in names]
        parts = tuple(part for source in sources for part in _parts(source))
        first = sources[0].info.shape
        return sources, parts, first if len(first) == 1 else (sum(part.rows for part in parts), first[-1])

    def _activation(self) -> WeightFormat:
        return WeightFormat.F32 if self.dtype is DType.F32 else WeightFormat.BF16

    def _plain(self, sources: list[PlannedTensor], setting: str) -> WeightFormat:
        if setting == "auto":
            return WeightFormat.BF16 if _stored_bf16(sources) else self._activation()
        return WeightFormat.F32 if setting == "f32" else WeightFormat.BF16

    def _too_narrow(self, shape: tuple[int, ...]) -> bool:
        return self.weights == "q8q4" and shape[-1] % GROUP != 0

    def _format(self, sources: list[PlannedTensor], shape: tuple[int, ...], quantised: WeightFormat) -> WeightFormat:
        if self.weights == "q8q4" and not self._too_narrow(shape):
            return quantised
        return self._plain(sources, self.weights)

    def layer(self, key: str, layer: int, full: bool, sparse: bool) -> None:
        base = layer_prefix(layer)
        attention = base + "self_attn."
        self.array(key + "input_norm", base + "input_layernorm.weight")
        self.array(key + "post_norm", base + "post_attention_layernorm.weight")
        self.matrix(key + "q_a", attention + "q_a_proj.weight")
        self.array(key + "q_a_norm", attention + "q_a_layernorm.weight")
        self.matrix(key + "q_b", attention + "q_b_proj.weight")
        self.matrix(key + "kv_a", attention + "kv_a_proj_with_mqa.weight")
        self.array(key + "kv_a_norm", attention + "kv_a_layernorm.weight")
        self.kv_b(key, attention + "kv_b_proj.weight")
        self.matrix(key + "o", attention + "o_proj.weight")
        if full:
            for name in ("wq_b.weight", "wk.weight", "k_norm.weight", "k_norm.bias", "weights_proj.weight"):
                field = name.removesuffix(".weight") if "norm" not in name else name.replace(".", "_")
                add = self.array if "norm" in name else self.matrix
                add(f"{key}indexer.{field}", f"{attention}indexer.{name}")
        if not sparse:
            self.mlp(key + "mlp.", base + "mlp.")
            return
        self.router(key + "mlp.", base + "mlp.gate.")
        self.experts(key + "mlp.", base + "mlp.experts.", packed=layer in self.plan.packed_layers)
        self.mlp(key + "mlp.shared.", base + "mlp.shared_experts.")

    def mlp(self, key: str, base: str) -> None:
        self.matrix(key + "gate_up", base + "gate_proj.weight", base + "up_proj.weight")
        self.matrix(key + "down", base + "down_proj.weight")

    def experts(self, key: str, base: str, packed: bool) -> None:
        spec = self.plan.spec
        count, width, hidden = spec.n_routed_experts, spec.expert_width, spec.hidden_size
        if packed:
            gate_up, down = [base + "gate_up_proj"], [base + "down_proj"]
        else:
            gate_up = [f"{base}{e}.{half}_proj.weight" for e in range(count) for half in ("gate", "up")]
            down = [f"{base}{e}.down_proj.weight" for e in range(count)]
        self.matrix(key + "gate_up", *gate_up, shape=(count, 2 * width, hidden), quantised=WeightFormat.Q4G64)
        self.matrix(key + "down", *down, shape=(count, hidden, width), quantised=WeightFormat.Q4G64)


def _stored_bf16(sources: list[PlannedTensor]) -> bool:
    return all(source.info.dtype == "BF16" for source in sources)


def _parts(source: PlannedTensor) -> list[Part]:
    """A tensor as parts: one, but for packed FP8 experts, whose scale blocks start anew with each expert."""
    shape = source.info.shape
    if source.scale is None or len(shape) < 3:
        rows = 1 if len(shape) == 1 else math.prod(shape[:-1])
        return [Part(source, 0, rows)]
    rows, scale_rows = shape[1], -(-shape[1] // SCALE_BLOCK)
    return [Part(source, i * rows, rows, i * scale_rows) for i in range(shape[0])]
