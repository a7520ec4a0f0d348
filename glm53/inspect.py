"""What a checkpoint is and what it costs, from its headers alone: the data behind `glm53 inspect`. Needs no device and reads no weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from glm53.config import MODEL_TYPE, read_config
from glm53.errors import human_bytes
from glm53.files import TEMPLATE_FILE, TOKENIZER_FILE
from glm53.model.checkpoint import Checkpoint
from glm53.model.layout import array_plans
from glm53.model.names import ExpectedTensor, Kind, LoadPlan, expected_tensors, match, parameter_count, parameters_in
from glm53.spec import DType, ModelSpec

_DEVICE_FORMATS = {"f32": (DType.F32, "auto"), "bf16": (DType.BF16, "auto"), "q8q4": (DType.BF16, "q8q4")}
Q8G64_ROW_GROUP = 64  # latent values that share one f16 scale


@dataclass(frozen=True)
class Share:
    """Stored tensors of one kind or type: how many, their bytes, and the parameters in them (`names.parameters_in`)."""

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
    device_bytes: dict[str, int]  # by activation type: f32, bf16; and bf16 with weights q8q4
    parameters: int  # stored, MTP layer included
    parameters_active: int  # read for one token by the main model: embedding row and unchosen experts not counted, output head counted
    history: dict[str, HistoryCost]  # by row format: f32, bf16, q8g64
    has_tokenizer: bool
    has_chat_template: bool
    notes: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """The same as plain JSON values; the shape's two layer schedules as lists of layers."""
        values = dataclasses.asdict(self) | {"path": str(self.path)}
        spec = values["spec"]
        del spec["layer_is_full"], spec["layer_is_sparse"]
        spec |= {"full_layers": self.spec.full_layers, "sparse_layers": [i for i, sparse in enumerate(self.spec.layer_is_sparse) if sparse]}
        for name, cost in self.history.items():
            values["history"][name]["total_bytes"] = cost.total_bytes
        return values

    def table(self) -> str:
        """The same for people, one fact a line."""
        spec, sparse = self.spec, sum(self.spec.layer_is_sparse)
        heads = f"{spec.n_heads} heads (nope {spec.qk_nope_head_dim}, rope {spec.qk_rope_head_dim}, v {spec.v_head_dim})"
        experts = f"{spec.n_routed_experts} of width {spec.expert_width}, {spec.n_experts_per_tok} a token; {spec.n_shared_experts} shared"
        layers = f"{spec.n_layers - sparse} dense of width {spec.dense_width}, {sparse} sparse"
        index = f"{spec.index_n_heads} heads of {spec.index_head_dim}, top {spec.index_topk}"
        packed = ", experts packed" if self.packed_experts else ""
        text = "tokenizer and chat template" if self.has_chat_template else "tokenizer, no chat template"
        lines = [
            f"{self.path}: {MODEL_TYPE}, {self.parameters:,} parameters, {self.parameters_active:,} active per token",
            f"  layers      {spec.n_layers}{' and MTP' if spec.n_mtp_layers else ''}: {layers}",
            f"  experts     {experts}",
            f"  attention   hidden {spec.hidden_size}, {heads}, latents {spec.q_lora_rank} and {spec.kv_lora_rank}",
            f"  indexer     {index}, on layers {', '.join(map(str, spec.full_layers))}",
            f"  context     {spec.max_position_embeddings:,} tokens, rope theta {spec.rope_theta:g}, vocabulary {spec.vocab_size:,}",
            f"  text        {text if self.has_tokenizer else 'no tokenizer: token ids only'}",
            f"  on disk     {human_bytes(self.disk_bytes)} in {self.tensor_count:,} tensors{packed}",
        ]
        for title, shares in (("by type", self.formats), ("by kind", self.kinds)):
            lines.append(f"  {title}")
            lines += [f"    {name:<16}{share.tensors:>8,} tensors  {human_bytes(share.nbytes)}" for name, share in shares.items()]
        lines.append("  weights on the device, MTP layer not counted")
        lines += [f"    {name:<16}{human_bytes(count)}" for name, count in self.device_bytes.items()]
        lines.append("  one token of history")
        for name, cost in self.history.items():
            parts = f"{cost.rows_bytes:,} in rows of {cost.row_bytes:,}, {cost.index_bytes:,} in index keys"
            lines.append(f"    {name:<16}{cost.total_bytes:>8,} B: {parts}")
        return "\n".join(lines + [f"  note: {note}" for note in self.notes])


def inspect_checkpoint(path: str | Path) -> Inspection:
    """Reads config.json and the headers, and compares them. Raises `CheckpointError` as loading would."""
    path = Path(path)
    spec = read_config(path)
    with Checkpoint.open(path) as checkpoint:
        plan = match(checkpoint, spec)
        tensors, disk_bytes = checkpoint.tensors, checkpoint.disk_bytes
    stored = [(info.dtype, info.nbytes, parameters_in(name, info.shape)) for name, info in tensors.items()]
    wanted = expected_tensors(plan.spec, bool(plan.spec.n_mtp_layers), plan.packed_layers)
    return Inspection(
        path=path,
        spec=plan.spec,
        tensor_count=len(tensors),
        disk_bytes=disk_bytes,
        formats=_shares(stored),
        kinds=_kinds(plan),
        packed_experts=bool(plan.packed_layers),
        device_bytes={name: sum(a.nbytes for a in array_plans(plan, dtype, False, weights)) for name, (dtype, weights) in _DEVICE_FORMATS.items()},
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
        count = parameters_in(tensor.name, tensor.shape)
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
    items = [(t.kind.value, t.info.nbytes, parameters_in(name, t.info.shape)) for name, t in plan.tensors.items()]
    items += [(Kind.SCALE.value, t.scale.nbytes, 0) for t in plan.tensors.values() if t.scale is not None]
    shares = _shares(items)
    return {kind.value: shares[kind.value] for kind in Kind if kind.value in shares}
