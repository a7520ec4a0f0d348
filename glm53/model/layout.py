"""Which device arrays the weights become, and from which rows of which stored tensors: pure planning, no device.

Invariant: the parts of an `ArrayPlan` cover its rows exactly once, in order. Fused arrays (gate and up, all experts of a layer) are filled
part by part, each converted by its own scales: those of neighbours need not meet at a multiple of 128 rows. A part of more than one row of scale
blocks starts on the first row of one.

A side of a pair (`Shard`, docs/decisions/0006-pair.md) takes rows of q_b, kv_b, gate, up and the head, and columns of o, down and the embedding; kv_a
is the owner's. Its formats are those of the whole, so that both sides together hold the whole's bytes.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from glm53.config import SCALE_BLOCK, WEIGHT_SETTINGS
from glm53.errors import InputError
from glm53.model.names import LoadPlan, PlannedTensor, layer_prefix
from glm53.ops.halves import first_half
from glm53.ops.matrix import GROUP, matrix_bytes
from glm53.spec import WHOLE, DType, ModelSpec, Shard, WeightFormat

_PLAIN_COLUMNS = 8  # columns of a side that is not quantised come in this many: 16 bytes of bf16


@dataclass(frozen=True)
class Part:
    """Rows [source_row, source_row + rows) and columns `cols` of a stored tensor, seen as [all rows, all columns].

    `scale_row` is the scale's row for source_row.
    """

    source: PlannedTensor
    source_row: int
    rows: int
    scale_row: int
    cols: range


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
    narrow_cols: int = 0  # columns of the whole, where a quantised format was asked for and they are no multiple of 64
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


@dataclass(frozen=True)
class ShardWidths:
    """What a side holds of everything that is split: heads, columns of k of each kind of down (and rows of gate and up), rows of the head,
    columns of the embedding."""

    heads: range
    dense: range
    expert: range
    shared: range
    vocab: range
    hidden: range


def shard_widths(spec: ModelSpec, shard: Shard) -> ShardWidths:
    """The side's parts of the widths of `spec`; the split of k is `ops.halves.first_half`, as on one device.

    Raises InputError that names the tensor which two devices cannot share: an odd number of heads, heads that do not end at the first half of o's
    columns, a second half of k below 64 or no multiple of 8 (of 64 where k is one), a vocabulary of one.
    """
    heads, k = spec.n_heads, spec.n_heads * spec.v_head_dim
    if shard.count > 1:
        _require(heads % 2 == 0, "self_attn.q_b_proj.weight", f"{heads} heads", "an even number")
        wanted = f"heads that end with the first half of the columns, {first_half(k)}"
        _require(k // 2 == first_half(k), "self_attn.o_proj.weight", f"{heads // 2} heads with {k // 2} of {k} columns", wanted)
        _require(spec.vocab_size > 1, "lm_head.weight", f"{spec.vocab_size} row", "at least 2")
        hidden = spec.hidden_size
        _require(hidden % 2 == 0 and hidden > _PLAIN_COLUMNS, "embed_tokens.weight", f"{hidden} columns", f"an even number above {_PLAIN_COLUMNS}")
    sparse = any(spec.layer_is_sparse) or spec.n_mtp_layers > 0
    return ShardWidths(
        heads=shard.of(heads, heads // 2),
        dense=_k_of("mlp.down_proj.weight", spec.dense_width, shard, used=not all(spec.layer_is_sparse)),
        expert=_k_of("mlp.experts.*.down_proj.weight", spec.expert_width, shard, used=sparse),
        shared=_k_of("mlp.shared_experts.down_proj.weight", spec.shared_width, shard, used=sparse),
        vocab=shard.of(spec.vocab_size, -(-spec.vocab_size // 2)),
        hidden=shard.of(spec.hidden_size, -(-spec.hidden_size // (2 * _PLAIN_COLUMNS)) * _PLAIN_COLUMNS),
    )


def shard_spec(spec: ModelSpec, shard: Shard) -> ModelSpec:
    """The shape of one side: its heads, MLP widths and vocabulary; everything else, such as the tokens that may be drawn, is the model's.

    Raises InputError as `shard_widths`, and where several shared experts do not split at a multiple of a routed expert's half.
    """
    widths = shard_widths(spec, shard)
    local = dataclasses.replace(
        spec, n_heads=len(widths.heads), dense_width=len(widths.dense), expert_width=len(widths.expert), vocab_size=len(widths.vocab)
    )
    got, wanted = f"{len(widths.shared)} of {spec.shared_width} columns on side {shard.index}", f"{spec.n_shared_experts} x {local.expert_width}"
    _require(local.shared_width == len(widths.shared), "mlp.shared_experts.down_proj.weight", got, wanted)
    return local


def _k_of(name: str, k: int, shard: Shard, used: bool) -> range:
    first = first_half(k)
    if used and shard.count > 1:
        unit = _PLAIN_COLUMNS if k % GROUP else GROUP
        got = f"{k} columns, {min(first, k)} for the first device and {max(k - first, 0)} for the second"
        wanted = f"a multiple of {unit}, at least {GROUP}, for the second"  # below a group tiles of bf16 read past the row
        _require(k - first >= GROUP and (k - first) % unit == 0, name, got, wanted)
    return shard.of(k, min(first, k))


def _require(holds: bool, name: str, got: str, wanted: str) -> None:
    if not holds:
        raise InputError(f"two devices cannot share {name}: got {got}, wanted {wanted}; run this model on one device")


def array_plans(plan: LoadPlan, dtype: DType, mtp: bool, weights: str = "auto", shard: Shard = WHOLE) -> list[ArrayPlan]:
    """Every device array of the weights, or of one side of a pair, in load order, for activations of type `dtype` (F32 or BF16).

    Vectors and norms have the activation type, router weight and bias are f32. Matrices by `weights`:
    auto: BF16 activations: bf16. F32: f32, but matrices stored as BF16 stay bf16, since their values are the same.
    bf16, f32: that type; f32 is for F32 activations.
    q8q4: routed experts q4g64, all others q8g64; bf16 where the columns are no multiple of 64. The embedding is as with auto.

    Raises InputError where the model cannot be split (`shard_widths`).
    """
    assert dtype in (DType.F32, DType.BF16) and weights in WEIGHT_SETTINGS and (weights != "f32" or dtype is DType.F32)
    spec, planner = plan.spec, _Planner(plan, dtype, weights, shard)
    planner.array("embed", "model.embed_tokens.weight", cols=planner.widths.hidden)
    for layer in range(spec.n_layers):
        planner.layer(f"layers.{layer}.", layer, spec.layer_is_full[layer], spec.layer_is_sparse[layer])
    planner.array("final_norm", "model.norm.weight")
    if not spec.tie_word_embeddings:
        planner.matrix("lm_head", "lm_head.weight", rows=(planner.widths.vocab,))
    elif weights == "q8q4" and spec.hidden_size % GROUP == 0:
        planner.matrix("lm_head", "model.embed_tokens.weight", rows=(planner.widths.vocab,))
    elif shard.count > 1:  # else it is the embedding's array
        planner.matrix("lm_head", "model.embed_tokens.weight", rows=(planner.widths.vocab,), format=planner.arrays[0].format)
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
            if item.narrow_cols:
                name = re.sub(r"^(layers\.\d+|mtp\.layer)\.", "", item.key)
                counts[name, item.narrow_cols] = counts.get((name, item.narrow_cols), 0) + 1
    return [
        f"{name} stays bf16{f' in {count} layers' if count > 1 else ''}: its {cols} columns are no multiple of {GROUP}"
        for (name, cols), count in counts.items()
    ]


class _Planner:
    def __init__(self, plan: LoadPlan, dtype: DType, weights: str, shard: Shard):
        self.plan, self.dtype, self.weights, self.shard = plan, dtype, weights, shard
        self.widths = shard_widths(plan.spec, shard)
        self.arrays: list[ArrayPlan] = []

    def array(self, key: str, *names: str, cols: range | None = None) -> None:
        """Norms, biases and the embedding; cols: the columns that are taken, None: all."""
        sources, parts, shape = self._sources(names, cols=cols)
        is_vector, setting = len(shape) == 1, "auto" if self.weights == "q8q4" else self.weights
        format = self._activation() if is_vector else self._plain(sources, setting)
        self.arrays.append(ArrayPlan(key, format, shape, parts, is_matrix=False))

    def router(self, key: str, base: str) -> None:
        _, parts, shape = self._sources((base + "weight",))
        self.arrays.append(ArrayPlan(key + "router", WeightFormat.F32, shape, parts))
        _, parts, shape = self._sources((base + "e_score_correction_bias",))
        self.arrays.append(ArrayPlan(key + "bias", WeightFormat.F32, shape, parts, is_matrix=False))

    def matrix(
        self,
        key: str,
        *names: str,
        rows: Sequence[range] | None = None,
        cols: range | None = None,
        outer: tuple[int, ...] = (),
        quantised: WeightFormat = WeightFormat.Q8G64,
        format: WeightFormat | None = None,
    ) -> None:
        """A matrix whose rows are the rows of the named tensors one after another; `outer` regroups them by leading dimensions.

        rows: of each matrix of a tensor, those that are taken. cols: of all of them. None: all. quantised: its format with q8q4. format: its
        format whatever the setting.
        """
        sources, parts, shape = self._sources(names, rows, cols)
        whole_cols = sources[0].info.shape[-1]
        if outer:
            shape = (*outer, shape[0] // math.prod(outer), shape[1])
        narrow = 0 if format is not None else self._narrow(whole_cols)
        format = format or self._format(sources, whole_cols, quantised)
        self.arrays.append(ArrayPlan(key, format, shape, parts, narrow_cols=narrow))

    def kv_b(self, key: str, name: str) -> None:
        spec, heads = self.plan.spec, self.widths.heads
        height = spec.qk_nope_head_dim + spec.v_head_dim
        sources, parts, shape = self._sources((name,), (range(heads.start * height, heads.stop * height),))
        shapes = {
            "wk": (len(heads), spec.kv_lora_rank, spec.qk_nope_head_dim),
            "wv": (len(heads), spec.v_head_dim, spec.kv_lora_rank),
        }
        halves = tuple(
            ArrayPlan(key + half, self._format(sources, of[-1], WeightFormat.Q8G64), of, (), narrow_cols=self._narrow(of[-1]))
            for half, of in shapes.items()
        )
        formats = {half.format for half in halves}
        unquantised = WeightFormat.BF16 if _stored_bf16(sources) else WeightFormat.F32
        scratch = unquantised if self.weights == "q8q4" and formats != {WeightFormat.BF16} else halves[0].format
        self.arrays.append(ArrayPlan(key + "kv_b", scratch, shape, parts, halves=halves))

    def _sources(
        self, names: Sequence[str], rows: Sequence[range] | None = None, cols: range | None = None
    ) -> tuple[list[PlannedTensor], tuple[Part, ...], tuple[int, ...]]:
        """(tensors, their parts, shape with their rows one after another)"""
        sources = [self.plan.tensors[name] for name in names]
        parts = tuple(part for source in sources for part in _parts(source, rows, cols))
        width = len(parts[0].cols)
        return sources, parts, (width,) if len(sources[0].info.shape) == 1 else (sum(part.rows for part in parts), width)

    def _activation(self) -> WeightFormat:
        return WeightFormat.F32 if self.dtype is DType.F32 else WeightFormat.BF16

    def _plain(self, sources: list[PlannedTensor], setting: str) -> WeightFormat:
        if setting == "auto":
            return WeightFormat.BF16 if _stored_bf16(sources) else self._activation()
        return WeightFormat.F32 if setting == "f32" else WeightFormat.BF16

    def _narrow(self, cols: int) -> int:
        """`ArrayPlan.narrow_cols` of a matrix whose whole has `cols` columns."""
        return cols if self.weights == "q8q4" and cols % GROUP else 0

    def _format(self, sources: list[PlannedTensor], cols: int, quantised: WeightFormat) -> WeightFormat:
        if self.weights == "q8q4" and not self._narrow(cols):
            return quantised
        return self._plain(sources, self.weights)

    def layer(self, key: str, layer: int, full: bool, sparse: bool) -> None:
        base, spec, widths = layer_prefix(layer), self.plan.spec, self.widths
        heads, attention = widths.heads, base + "self_attn."
        self.array(key + "input_norm", base + "input_layernorm.weight")
        self.array(key + "post_norm", base + "post_attention_layernorm.weight")
        self.matrix(key + "q_a", attention + "q_a_proj.weight")
        self.array(key + "q_a_norm", attention + "q_a_layernorm.weight")
        q_rows = range(heads.start * spec.qk_head_dim, heads.stop * spec.qk_head_dim)
        self.matrix(key + "q_b", attention + "q_b_proj.weight", rows=(q_rows,))
        if self.shard.index == 0:
            self.matrix(key + "kv_a", attention + "kv_a_proj_with_mqa.weight")
        self.array(key + "kv_a_norm", attention + "kv_a_layernorm.weight")
        self.kv_b(key, attention + "kv_b_proj.weight")
        self.matrix(key + "o", attention + "o_proj.weight", cols=range(heads.start * spec.v_head_dim, heads.stop * spec.v_head_dim))
        if full:
            for name in ("wq_b.weight", "wk.weight", "k_norm.weight", "k_norm.bias", "weights_proj.weight"):
                field = name.removesuffix(".weight") if "norm" not in name else name.replace(".", "_")
                add = self.array if "norm" in name else self.matrix
                add(f"{key}indexer.{field}", f"{attention}indexer.{name}")
        if not sparse:
            self.mlp(key + "mlp.", base + "mlp.", widths.dense)
            return
        self.router(key + "mlp.", base + "mlp.gate.")
        self.experts(key + "mlp.", base + "mlp.experts.", packed=layer in self.plan.packed_layers)
        self.mlp(key + "mlp.shared.", base + "mlp.shared_experts.", widths.shared)

    def mlp(self, key: str, base: str, width: range) -> None:
        self.matrix(key + "gate_up", base + "gate_proj.weight", base + "up_proj.weight", rows=(width,))
        self.matrix(key + "down", base + "down_proj.weight", cols=width)

    def experts(self, key: str, base: str, packed: bool) -> None:
        spec, side = self.plan.spec, self.widths.expert
        count, width = spec.n_routed_experts, spec.expert_width
        if packed:
            gate_up, down = [base + "gate_up_proj"], [base + "down_proj"]
            rows = [side, range(width + side.start, width + side.stop)]
        else:
            gate_up = [f"{base}{e}.{half}_proj.weight" for e in range(count) for half in ("gate", "up")]
            down = [f"{base}{e}.down_proj.weight" for e in range(count)]
            rows = [side]
        self.matrix(key + "gate_up", *gate_up, rows=rows, outer=(count,), quantised=WeightFormat.Q4G64)
        self.matrix(key + "down", *down, cols=side, outer=(count,), quantised=WeightFormat.Q4G64)


def _stored_bf16(sources: list[PlannedTensor]) -> bool:
    return all(source.info.dtype == "BF16" for source in sources)


def _parts(source: PlannedTensor, rows: Sequence[range] | None, cols: range | None) -> Iterator[Part]:
    """A tensor as parts, `rows` and `cols` of each of its matrices: one part if all rows are taken and scale blocks do not start anew inside."""
    *outer, height, width = source.info.shape if len(source.info.shape) > 1 else (1, *source.info.shape)
    cols, count, scale_height = cols or range(width), math.prod(outer), -(-height // SCALE_BLOCK)
    taken = _joined(rows or (range(height),))
    if source.scale is None and taken == [range(height)]:
        yield Part(source, 0, count * height, 0, cols)
        return
    for matrix in range(count):
        for piece in taken:
            for run in _block_runs(piece) if source.scale is not None else (piece,):
                yield Part(source, matrix * height + run.start, len(run), matrix * scale_height + run.start // SCALE_BLOCK, cols)


def _joined(rows: Sequence[range]) -> list[range]:
    """The same rows, neighbours as one range."""
    joined: list[range] = []
    for run in rows:
        if joined and joined[-1].stop == run.start:
            run = range(joined.pop().start, run.stop)
        joined.append(run)
    return joined


def _block_runs(rows: range) -> list[range]:
    """The same rows, those before the first start of a scale block on their own."""
    start = -(-rows.start // SCALE_BLOCK) * SCALE_BLOCK
    return [run for run in (range(rows.start, min(start, rows.stop)), range(max(start, rows.start), rows.stop)) if len(run)]
