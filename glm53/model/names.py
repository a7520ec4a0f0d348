"""The tensors a `ModelSpec` calls for: names, shapes and kinds, and the match of a checkpoint with them.

Invariant: a `LoadPlan` names every tensor the model needs, each with the right shape and a type this program computes with; a matrix is FP8
if and only if it has a scale. After `match` no other code looks for a tensor by name. Knows no device. Layout of the released files: 59,585
tensors in BF16, routed experts one by one, FP8 matrices with `X.weight_scale_inv` (a multiplier) per 128 x 128 block.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from glm53.config import SCALE_BLOCK
from glm53.errors import CheckpointError
from glm53.model.checkpoint import Checkpoint, TensorInfo
from glm53.spec import ModelSpec

PROBLEMS_SHOWN = 10
SCALE_SUFFIX = "_scale_inv"


class Kind(enum.Enum):
    """What a tensor is for, in the order of `glm53 inspect`."""

    EMBEDDING = "embedding"
    ATTENTION = "attention"
    INDEXER = "indexer"
    DENSE = "dense MLP"
    ROUTED = "routed experts"
    SHARED = "shared experts"
    ROUTER = "router"
    NORM = "norms"
    HEAD = "output head"
    MTP = "MTP layer"
    SCALE = "FP8 scales"


@dataclass(frozen=True)
class ExpectedTensor:
    """A tensor the model needs, `shape` as stored ([out, in] for a matrix). Matrices may be FP8 with a scale, vectors may not."""

    name: str
    shape: tuple[int, ...]
    kind: Kind

    @property
    def scale_shape(self) -> tuple[int, ...]:
        """Of an FP8 matrix: one f32 per block of 128 rows and columns, the last ones ragged; packed experts are blocked one by one."""
        *outer, rows, cols = self.shape
        return (*outer, -(-rows // SCALE_BLOCK), -(-cols // SCALE_BLOCK))


@dataclass(frozen=True)
class PlannedTensor:
    """A stored tensor that will be loaded; `scale` exactly if it is FP8."""

    info: TensorInfo
    kind: Kind
    scale: TensorInfo | None


@dataclass(frozen=True)
class LoadPlan:
    """The match of a checkpoint with a spec. `spec.n_mtp_layers` says whether the MTP tensors are there, whatever config.json said."""

    spec: ModelSpec
    tensors: dict[str, PlannedTensor]
    packed_layers: frozenset[int]  # layers whose experts are stored as mlp.experts.gate_up_proj and mlp.experts.down_proj
    notes: tuple[str, ...]  # what was accepted and ignored, for people


def layer_prefix(layer: int) -> str:
    return f"model.layers.{layer}."


def expected_tensors(spec: ModelSpec, mtp: bool, packed_layers: Collection[int] = ()) -> list[ExpectedTensor]:
    """Every tensor of the model in model order, without scales. `mtp` adds layer `n_layers`; the names of 6.1 of the architecture notes.

    Real widths with MTP: 59,585 tensors, 753,329,921,024 parameters.
    """
    hidden, tensors = spec.hidden_size, []
    tensors.append(ExpectedTensor("model.embed_tokens.weight", (spec.vocab_size, hidden), Kind.EMBEDDING))
    for layer in range(spec.n_layers):
        tensors += _layer(spec, layer, spec.layer_is_full[layer], spec.layer_is_sparse[layer], layer in packed_layers)
    tensors.append(ExpectedTensor("model.norm.weight", (hidden,), Kind.NORM))
    if not spec.tie_word_embeddings:
        tensors.append(ExpectedTensor("lm_head.weight", (spec.vocab_size, hidden), Kind.HEAD))
    if mtp:
        base = layer_prefix(spec.n_layers)
        layer_tensors = _layer(spec, spec.n_layers, True, True, spec.n_layers in packed_layers)
        tensors += [dataclasses.replace(t, kind=Kind.MTP) for t in layer_tensors]
        tensors += [ExpectedTensor(f"{base}{name}.weight", (hidden,), Kind.MTP) for name in ("enorm", "hnorm", "shared_head.norm")]
        tensors.append(ExpectedTensor(base + "eh_proj.weight", (hidden, 2 * hidden), Kind.MTP))
    return tensors


def _layer(spec: ModelSpec, layer: int, full: bool, sparse: bool, packed: bool) -> Iterator[ExpectedTensor]:
    base, hidden = layer_prefix(layer), spec.hidden_size

    def one(kind: Kind, name: str, *shape: int) -> ExpectedTensor:
        return ExpectedTensor(base + name, shape, kind)

    yield one(Kind.NORM, "input_layernorm.weight", hidden)
    yield one(Kind.NORM, "post_attention_layernorm.weight", hidden)
    yield one(Kind.ATTENTION, "self_attn.q_a_proj.weight", spec.q_lora_rank, hidden)
    yield one(Kind.NORM, "self_attn.q_a_layernorm.weight", spec.q_lora_rank)
    yield one(Kind.ATTENTION, "self_attn.q_b_proj.weight", spec.n_heads * spec.qk_head_dim, spec.q_lora_rank)
    yield one(Kind.ATTENTION, "self_attn.kv_a_proj_with_mqa.weight", spec.row_width, hidden)
    yield one(Kind.NORM, "self_attn.kv_a_layernorm.weight", spec.kv_lora_rank)
    yield one(Kind.ATTENTION, "self_attn.kv_b_proj.weight", spec.n_heads * (spec.qk_nope_head_dim + spec.v_head_dim), spec.kv_lora_rank)
    yield one(Kind.ATTENTION, "self_attn.o_proj.weight", hidden, spec.n_heads * spec.v_head_dim)
    if full:
        yield one(Kind.INDEXER, "self_attn.indexer.wq_b.weight", spec.index_n_heads * spec.index_head_dim, spec.q_lora_rank)
        yield one(Kind.INDEXER, "self_attn.indexer.wk.weight", spec.index_head_dim, hidden)
        yield one(Kind.NORM, "self_attn.indexer.k_norm.weight", spec.index_head_dim)
        yield one(Kind.NORM, "self_attn.indexer.k_norm.bias", spec.index_head_dim)
        yield one(Kind.INDEXER, "self_attn.indexer.weights_proj.weight", spec.index_n_heads, hidden)
    if not sparse:
        yield from _mlp(base + "mlp.", hidden, spec.dense_width, Kind.DENSE)
        return
    experts, width = spec.n_routed_experts, spec.expert_width
    yield one(Kind.ROUTER, "mlp.gate.weight", experts, hidden)
    yield one(Kind.ROUTER, "mlp.gate.e_score_correction_bias", experts)
    if packed:
        yield one(Kind.ROUTED, "mlp.experts.gate_up_proj", experts, 2 * width, hidden)
        yield one(Kind.ROUTED, "mlp.experts.down_proj", experts, hidden, width)
    else:
        for expert in range(experts):
            yield from _mlp(f"{base}mlp.experts.{expert}.", hidden, width, Kind.ROUTED)
    yield from _mlp(base + "mlp.shared_experts.", hidden, spec.shared_width, Kind.SHARED)


def _mlp(base: str, hidden: int, width: int, kind: Kind) -> Iterator[ExpectedTensor]:
    yield ExpectedTensor(base + "gate_proj.weight", (width, hidden), kind)
    yield ExpectedTensor(base + "up_proj.weight", (width, hidden), kind)
    yield ExpectedTensor(base + "down_proj.weight", (hidden, width), kind)


def match(checkpoint: Checkpoint, spec: ModelSpec) -> LoadPlan:
    """Compares every tensor of the checkpoint with the spec. Raises `CheckpointError` that lists the first ten problems, worst first."""
    stored = checkpoint.tensors
    mtp_prefix = layer_prefix(spec.n_layers)
    ignored = _ignored(stored, spec)
    has_mtp = any(name.startswith(mtp_prefix) and name not in ignored for name in stored)
    packed = frozenset(i for i in range(spec.n_layers + 1) if f"{layer_prefix(i)}mlp.experts.gate_up_proj" in stored)
    missing, unexpected, wrong_shape, wrong_type = [], [], [], []
    plan: dict[str, PlannedTensor] = {}
    known = set(ignored)
    for tensor in expected_tensors(spec, has_mtp, packed):
        scale_name = tensor.name + SCALE_SUFFIX
        known.update((tensor.name, scale_name))
        info, scale = stored.get(tensor.name), stored.get(scale_name)
        if info is None:
            missing.append(f"missing: {tensor.name} {list(tensor.shape)}")
            continue
        if info.shape != tensor.shape:
            wrong_shape.append(f"shape: {tensor.name} is {list(info.shape)}, expected {list(tensor.shape)}")
        elif scale is not None and len(tensor.shape) > 1 and scale.shape != tensor.scale_shape:
            wrong_shape.append(f"shape: {scale_name} is {list(scale.shape)}, expected {list(tensor.scale_shape)}")
        if fault := _type_fault(tensor, info, scale):
            wrong_type.append(fault)
        plan[tensor.name] = PlannedTensor(info, tensor.kind, scale)
    unexpected = [f"unexpected: {name} {stored[name].dtype} {list(stored[name].shape)}" for name in sorted(stored.keys() - known)]
    problems = missing + unexpected + wrong_shape + wrong_type
    if problems:
        more = f"\n  and {len(problems) - PROBLEMS_SHOWN} more" if len(problems) > PROBLEMS_SHOWN else ""
        count = f"{len(problems)} problem{'s' if len(problems) > 1 else ''}"
        raise CheckpointError(f"{checkpoint.path}: the tensors do not fit config.json, {count}:\n  " + "\n  ".join(problems[:PROBLEMS_SHOWN]) + more)
    notes = [f"{count} tensors ignored: {reason}" for reason, count in _counts(ignored).items()]
    if has_mtp != bool(spec.n_mtp_layers):
        notes.append(f"config.json says {spec.n_mtp_layers} MTP layers, the files hold {int(has_mtp)}")
    return LoadPlan(dataclasses.replace(spec, n_mtp_layers=int(has_mtp)), plan, packed, tuple(notes))


def _type_fault(tensor: ExpectedTensor, info: TensorInfo, scale: TensorInfo | None) -> str | None:
    """Decided by whether a scale is stored, never by the skip list of quantization_config, which does not spell the tensors' names."""
    allowed = "F32, BF16 or F8_E4M3 with a scale" if len(tensor.shape) > 1 else "F32 or BF16"
    scale_name = tensor.name + SCALE_SUFFIX
    if info.dtype == "F8_E4M3" and len(tensor.shape) > 1:
        if scale is None:
            return f"type: {tensor.name} is F8_E4M3 without {scale_name}, expected {allowed}"
        return None if scale.dtype == "F32" else f"type: {scale_name} is {scale.dtype}, expected F32"
    if info.dtype not in ("F32", "BF16"):
        return f"type: {tensor.name} is {info.dtype}, expected {allowed}"
    return None if scale is None else f"type: {tensor.name} is {info.dtype} and has {scale_name}, expected a scale with F8_E4M3 only"


def _ignored(stored: Collection[str], spec: ModelSpec) -> dict[str, str]:
    """Tensors that other programs write and this model does not use: name -> reason."""
    result = {}
    mtp_base = layer_prefix(spec.n_layers)
    copies = {mtp_base + "embed_tokens.weight", mtp_base + "shared_head.head.weight"}
    shared = tuple(f"{layer_prefix(i)}self_attn.indexer." for i, full in enumerate(spec.layer_is_full) if not full)
    for name in stored:
        weight = name.removesuffix(SCALE_SUFFIX)
        if weight in copies:
            result[name] = "the MTP layer's own copies of embedding and output head"
        elif spec.tie_word_embeddings and weight == "lm_head.weight":
            result[name] = "the output head, tied to the embedding"
        elif name.startswith(shared):
            result[name] = "indexer of layers that use an earlier layer's selection"
        elif name.endswith("rotary_emb.inv_freq"):
            result[name] = "rotary frequencies, computed here"
    return result


def _counts(ignored: dict[str, str]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for reason in ignored.values():
        counts[reason] = counts.get(reason, 0) + 1
    return counts


def parameters_in(name: str, shape: tuple[int, ...]) -> int:
    """Parameters a stored tensor holds: its numbers, but none for FP8 scales and the router's correction bias, which is a buffer in
    transformers and not among the published counts."""
    return 0 if name.endswith((SCALE_SUFFIX, "e_score_correction_bias")) else math.prod(shape)


def parameter_count(tensors: Collection[ExpectedTensor]) -> int:
    return sum(parameters_in(t.name, t.shape) for t in tensors)
