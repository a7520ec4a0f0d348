"""What a checkpoint is and what it costs, from its headers alone: the data behind `glm53 inspect`. Needs no device and reads no weights."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from .config import read_config
from .model.checkpoint import Checkpoint
from .model.layout import array_plans
from .model.names import SCALE_SUFFIX, ExpectedTensor, Kind, LoadPlan, expected_tensors, match, parameter_count
from .spec import DType, ModelSpec
from .tokenizer import TEMPLATE_FILE, TOKENIZER_FILE

Q8G64_ROW_GROUP = 64  # latent values that share one f16 scale


@dataclass(frozen=True)
class Share:
    """Stored tensors of one kind or type: how many, their bytes, and their numbers (scales are not counted as parameters)."""

    tensors: int
    nbytes: int
    parameters: int


@dataclass(frozen=True)
class HistoryCost:
    """Bytes one token of history costs over all main layers: MLA rows, and index keys of the full layers."""

    row_bytes: int  # of one row of one layer
    rows_bytes: int
    index_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.rows_bytes + self.index_bytes


@dataclass(frozen=True)
class Inspection:
    """A checkpoint on one page. Bytes are exact; `device_bytes` is what `load_weights` allocates without the MTP layer."""

    path: Path
    spec: ModelSpec
    tensor_count: int  # stored, scales included
    disk_bytes: int
    formats: dict[str, Share]  # by stored type
    kinds: dict[str, Share]  # by what they are for
    packed_experts: bool
    device_bytes: dict[str, int]  # by activation type: f32, bf16
    parameters: int  # stored, MTP layer included
    parameters_active: int  # read for one token by the main model: embedding row and unchosen experts not counted, output head counted
    history: dict[str, HistoryCost]  # by row format: f32, bf16, q8g64
    has_tokenizer: bool
    has_chat_template: bool
    notes: tuple[str, ...]


def inspect_checkpoint(path: str | Path) -> Inspection:
    """Reads config.json and the headers, and compares them. Raises `CheckpointError` as loading would."""
    path = Path(path)
    spec = read_config(path)
    with Checkpoint.open(path) as checkpoint:
        plan = match(checkpoint, spec)
        tensors, disk_bytes = checkpoint.tensors, checkpoint.disk_bytes
    stored = [
        (info.dtype, info.nbytes, 0 if name.endswith(SCALE_SUFFIX) else math.prod(info.shape)) for name, info in tensors.items()
    ]
    wanted = expected_tensors(plan.spec, bool(plan.spec.n_mtp_layers), plan.packed_layers)
    return Inspection(
        path=path,
        spec=plan.spec,
        tensor_count=len(tensors),
        disk_bytes=disk_bytes,
        formats=_shares(stored),
        kinds=_kinds(plan),
        packed_experts=bool(plan.packed_layers),
        device_bytes={d.label: sum(a.nbytes for a in array_plans(plan, d, mtp=False)) for d in (DType.F32, DType.BF16)},
        parameters=parameter_count(wanted),
        parameters_active=active_parameters(plan.spec),
        history=history_costs(plan.spec),
        has_tokenizer=(path / TOKENIZER_FILE).exists(),
        has_chat_template=(path / TEMPLATE_FILE).exists(),
        notes=plan.notes,
    )


def active_parameters(spec: ModelSpec) -> int:
    """Parameters that take part in computing one token's logits in the main model, MTP layer not counted."""
    idle = 1 - spec.n_experts_per_tok / spec.n_routed_experts

    def used(tensor: ExpectedTensor) -> int:
        count = math.prod(tensor.shape)
        if tensor.kind is Kind.EMBEDDING:
            return count if spec.tie_word_embeddings else spec.hidden_size
        return count - round(count * idle) if tensor.kind is Kind.ROUTED else count

    return sum(used(t) for t in expected_tensors(spec, mtp=False, packed_layers=range(spec.n_layers)))


def history_costs(spec: ModelSpec) -> dict[str, HistoryCost]:
    """Cost of one token of history by row format. q8g64: int8 latent, an f16 scale per 64 values, bf16 rotary part, bf16 index keys."""
    groups = -(-spec.kv_lora_rank // Q8G64_ROW_GROUP)
    formats = {
        "f32": (4 * spec.row_width, 4),
        "bf16": (2 * spec.row_width, 2),
        "q8g64": (spec.kv_lora_rank + 2 * groups + 2 * spec.qk_rope_head_dim, 2),
    }
    keys = len(spec.full_layers) * spec.index_head_dim
    return {name: HistoryCost(row, row * spec.n_layers, item * keys) for name, (row, item) in formats.items()}


def _shares(items: Iterable[tuple[str, int, int]]) -> dict[str, Share]:
    totals: dict[str, Share] = {}
    for key, nbytes, parameters in items:
        old = totals.get(key, Share(0, 0, 0))
        totals[key] = Share(old.tensors + 1, old.nbytes + nbytes, old.parameters + parameters)
    return totals


def _kinds(plan: LoadPlan) -> dict[str, Share]:
    items = [(t.kind.value, t.info.nbytes, math.prod(t.info.shape)) for t in plan.tensors.values()]
    items += [(Kind.SCALE.value, t.scale.nbytes, 0) for t in plan.tensors.values() if t.scale is not None]
    shares = _shares(items)
    return {kind.value: shares[kind.value] for kind in Kind if kind.value in shares}
