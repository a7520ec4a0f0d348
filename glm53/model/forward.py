"""The forward pass of prompt rows: which kernel runs after which for a chunk of rows. Decode and verify rows: `step`.

A pass is a walk: an iterator that enqueues launches and gives what has to pass between the two sides of a pair before it may go on
(docs/decisions/0006-pair.md); on a single device it gives nothing.

The two classes of rows have reduction orders of their own (docs/decisions/0001-two-row-classes.md); within a class the bits of a row depend on
nothing beside it.
Formulas and names: transformers 5.24.0 `glm_moe_dsa`, absorbed form of MLA attention.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial

import numpy as np

from glm53.hip import Array, Device, Stream
from glm53.kv import KeyStore, Pass, PassRows, RowLayout, Tier
from glm53.model.pair import Packed, Passed
from glm53.model.weights import DenseWeights, IndexerWeights, LayerWeights, MoeWeights, Weights
from glm53.ops import attention, basic, experts, history, matmul, rows, selection
from glm53.ops.exchange import Lists, Parts, Sums
from glm53.ops.halves import join
from glm53.ops.mtp import join_inputs
from glm53.spec import DType, ModelSpec, Offsets, RowFormat, Space

# Of the workspaces, what both sides of a pair compute alike.
REPLICATED = ("x", "h", "qr", "index_q", "index_key", "index_gate", "selected", "counts", "router", "expert_ids", "expert_weights")
MTP_SHAPES = (("hidden", 1), ("u", 1), ("joined", 2))  # multiples of the hidden size
INDEX_NORM_EPS = 1e-6  # of the indexer's LayerNorm; fixed in every implementation
Walk = Generator[Passed, None, None]
SCORE_BYTES_MAX = 64 << 20  # scores of one tile of query rows; bounds the indexer's memory whatever the context


@dataclass(frozen=True)
class PromptRows:
    """Rows of one pass, host side. Rows of one session stand together, positions ascending."""

    tokens: np.ndarray  # [rows] int32
    positions: np.ndarray  # [rows] int32
    sessions: np.ndarray  # [rows] int32, slots of tier and key store


def layer_shapes(spec: ModelSpec, dtype: DType) -> dict[str, tuple[DType, tuple[int, ...]]]:
    """Name, dtype and shape of a row of what a layer computes, prompt rows and step rows alike."""
    slots = spec.n_experts_per_tok
    return {
        "x": (dtype, (spec.hidden_size,)),
        "h": (dtype, (spec.hidden_size,)),
        "qr": (dtype, (spec.q_lora_rank,)),
        "q": (dtype, (spec.n_heads, spec.qk_head_dim)),
        "row": (dtype, (spec.row_width,)),
        "q_latent": (dtype, (spec.n_heads, spec.kv_lora_rank)),
        "o": (dtype, (spec.n_heads, spec.v_head_dim)),
        "index_q": (dtype, (spec.index_n_heads, spec.index_head_dim)),
        "index_key": (dtype, (spec.index_head_dim,)),
        "index_gate": (DType.F32, (spec.index_n_heads,)),
        "selected": (DType.I32, (spec.index_topk,)),
        "counts": (DType.I32, ()),
        "plan": (DType.U64, (spec.index_topk,)),
        "act": (dtype, (max(spec.dense_width, spec.shared_width),)),
        "router": (DType.F32, (spec.n_routed_experts,)),
        "expert_ids": (DType.I32, (slots,)),
        "expert_weights": (DType.F32, (slots,)),
        "expert_act": (dtype, (slots, spec.expert_width)),
    }


class Workspace:
    """Named scratch arrays for at most `rows_max` rows, allocated once and cut to the rows of each pass."""

    def __init__(self, device: Device, rows_max: int, shapes: dict[str, tuple[DType, tuple[int, ...]]]):
        self._arrays = {name: Array.empty(device, dtype, (rows_max, *shape), category="workspace") for name, (dtype, shape) in shapes.items()}

    def cut(self, name: str, rows: int, shape: tuple[int, ...] | None = None) -> Array:
        """The first `rows` rows of an array; with `shape`, the same memory as [rows, *shape] of at most that many values."""
        array = self._arrays[name]
        if shape is None:
            return array.slice(0, rows)
        return Array(array.buffer, array.dtype, (rows, *shape))

    def clear(self, stream: Stream) -> None:
        """Fills everything with zeros."""
        for array in self._arrays.values():
            stream.fill(array.address, 0, array.nbytes)


def inverse_frequencies(spec: ModelSpec) -> np.ndarray:
    """[rope / 2] f32: 1 / f32(theta^(2 i / rope)), the power in f64: the bits that torch gives (numpy's f32 power differs in some)."""
    exponent = np.arange(0, spec.qk_rope_head_dim, 2) / spec.qk_rope_head_dim
    return np.float32(1.0) / (np.float64(spec.rope_theta) ** exponent).astype(np.float32)


class Forward:
    """Runs the main layers for a batch of rows, on one stream of one device.

    spec: of this device: a side of a pair has its heads, widths and vocabulary. weights: likewise. head(x, logits): a walk that writes the logits of
    all the model's vocabulary. row_error [1] u32: raised by the row quantiser, of a pair the owner's. terminal [sessions, hidden] T: hidden state of
    each session's last row, where the weights have an MTP layer: its rows are stored as well (`mtp`).
    """

    def __init__(
        self,
        device: Device,
        stream: Stream,
        spec: ModelSpec,
        weights: Weights,
        dtype: DType,
        rows_max: int,
        tier: Tier,
        keys: KeyStore,
        head: Callable[[Array, Array], Walk],
        row_error: Array,
        terminal: Array | None = None,
    ):
        self.device, self.stream, self.spec, self.weights, self.dtype = device, stream, spec, weights, dtype
        self.tier, self.key_store, self.shard = tier, keys, keys.shard
        self.head, self.row_error = head, row_error
        self.rows_max = rows_max
        self.inv_freq = Array.from_numpy(device, inverse_frequencies(spec), category="workspace")
        self.work = Workspace(device, rows_max, self._shapes() | (self._pair_shapes() if self.shard.count > 1 else {}))
        self.expert_offsets = Array.empty(device, DType.I32, (spec.n_routed_experts + 1,), category="workspace")
        columns = keys.side_rows_max
        self.score_rows = max(1, min(rows_max, SCORE_BYTES_MAX // (4 * columns)))
        self.scores = Array.empty(device, DType.F32, (self.score_rows, columns), category="workspace")
        self.terminal = terminal
        if terminal is not None:
            self.mtp_work = Workspace(device, rows_max + 1, {name: (dtype, (spec.hidden_size * width,)) for name, width in MTP_SHAPES})
        if self.shard.count > 1:
            row_bytes = tier.layout.row_bytes
            packed_refs = np.arange(rows_max, dtype=np.uint64) * np.uint64(row_bytes) | np.uint64(Space.LINEAR)
            self.packed_refs = Array.from_numpy(device, packed_refs, category="workspace")

    def _shapes(self) -> dict[str, tuple[DType, tuple[int, ...]]]:
        spec, dtype = self.spec, self.dtype
        return layer_shapes(spec, dtype) | {
            "tokens": (DType.I32, ()),
            "positions": (DType.I32, ()),
            "sessions": (DType.I32, ()),
            "o_latent": (dtype, (spec.n_heads, spec.kv_lora_rank)),
            "gate_up": (dtype, (2 * max(spec.dense_width, spec.shared_width),)),
            "low": (DType.F32, (spec.hidden_size,)),
            "high": (DType.F32, (spec.hidden_size,)),
            "sorted_pairs": (DType.I32, (spec.n_experts_per_tok,)),
            "expert_gate_up": (dtype, (spec.n_experts_per_tok, 2 * spec.expert_width)),
            "expert_out": (dtype, (spec.n_experts_per_tok, spec.hidden_size)),
        }

    def _pair_shapes(self) -> dict[str, tuple[DType, tuple[int, ...]]]:
        """What a side needs beside: its columns of the embedding, packed history rows, the best of its index scores."""
        return {
            "x_part": (self.dtype, (self.weights.embed.shape[1],)),
            "packed": (DType.U8, (self.tier.layout.row_bytes,)),
            "entries": (DType.U64, (self.spec.index_topk,)),
            "entry_counts": (DType.I32, ()),
        }

    def walk(self, batch: PromptRows, logits: Array) -> Walk:
        """Computes all rows, appends them to their history and writes the logits [1, vocab] f32 of the last one.

        Everything is enqueued on the stream. If anything raises, or the walk is closed before its end, the tier has dropped the rows.
        """
        count = len(batch.tokens)
        assert 0 < count <= self.rows_max, f"{count} rows in a pass of at most {self.rows_max}"
        cut = partial(self.work.cut, rows=count)
        for name in ("tokens", "positions", "sessions"):
            cut(name).upload(np.ascontiguousarray(getattr(batch, name), np.int32), self.stream)
        pass_rows = PassRows(batch.positions, batch.sessions, cut("positions"), cut("sessions"))
        tier_pass = self.tier.begin(pass_rows, prefill=True)
        try:
            yield from self._layers(tier_pass, count, context=int(batch.positions.max()) + 1)
            if self.terminal is not None:
                yield from self._mtp_rows(tier_pass, self.terminal.slice(*(int(batch.sessions[0]) + i for i in (0, 1))), count)
            yield from self.head(cut("x").slice(count - 1, count), logits)
            tier_pass.finish()
        except BaseException:
            tier_pass.abandon()
            raise

    def _layers(self, tier_pass: Pass, count: int, context: int) -> Walk:
        x, h = self.work.cut("x", count), self.work.cut("h", count)
        yield from self._embed(x)
        for index, layer in enumerate(self.weights.layers):
            yield from self._attention(tier_pass, index, layer, count, context)
            basic.rms_norm(self.stream, x, layer.post_norm, h, self.spec.rms_norm_eps)
            yield from self._dense(layer.mlp, count) if isinstance(layer.mlp, DenseWeights) else self._experts(layer.mlp, count)

    def _embed(self, x: Array) -> Walk:
        """x [rows, hidden] of the pass's tokens."""
        count = x.shape[0]
        y = x if self.shard.count == 1 else self.work.cut("x_part", count)
        basic.embed(self.stream, self.work.cut("tokens", count), self.weights.embed, y)
        if self.shard.count > 1:
            yield Parts(y, x)

    def _mtp_rows(self, tier_pass: Pass, terminal: Array, count: int) -> Walk:
        """Rows of the MTP layer, which nobody reads before a draft: history rows and index keys of each token and the hidden state before it.
        terminal [1, hidden]: of the row before the pass; then of its last one."""
        stream, spec, mtp, layer = self.stream, self.spec, self.weights.mtp, len(self.weights.layers)
        assert mtp is not None and mtp.layer.indexer is not None
        hidden, u, joined = (self.mtp_work.cut(name, rows) for name, rows in (("hidden", count + 1), ("u", count), ("joined", count)))
        basic.rms_norm(stream, self.work.cut("x", count), self.weights.final_norm, hidden.slice(1, count + 1), spec.rms_norm_eps)
        stream.copy(hidden.address, terminal.address, terminal.nbytes)
        stream.copy(terminal.address, hidden.slice(count, count + 1).address, terminal.nbytes)
        yield from self._embed(u)
        join_inputs(stream, u, hidden.slice(0, count), mtp.enorm, mtp.hnorm, joined, spec.rms_norm_eps)
        matmul.matmul(stream, joined, mtp.eh_proj, u)
        basic.rms_norm(stream, u, mtp.layer.input_norm, self.work.cut("h", count), spec.rms_norm_eps)
        yield from self._store(tier_pass, layer, mtp.layer, count)
        self._append_keys(layer, mtp.layer.indexer, count)
        tier_pass.before_attention(layer)
        tier_pass.after_attention(layer)

    def _attention(self, tier_pass: Pass, index: int, layer: LayerWeights, count: int, context: int) -> Walk:
        """x += attention(norm(x)); on a full layer computes the selection that the shared layers after it reuse."""
        spec, stream, layout = self.spec, self.stream, self.tier.layout
        cut = partial(self.work.cut, rows=count)
        x, h, qr, q = cut("x"), cut("h"), cut("qr"), cut("q")
        positions = cut("positions")
        basic.rms_norm(stream, x, layer.input_norm, h, spec.rms_norm_eps)
        matmul.matmul(stream, h, layer.q_a, qr)
        basic.rms_norm(stream, qr, layer.q_a_norm, qr, spec.latent_norm_eps)
        matmul.matmul(stream, qr, layer.q_b, cut("q", shape=(spec.n_heads * spec.qk_head_dim,)))
        basic.rope(stream, q, positions, self.inv_freq, offset=spec.qk_nope_head_dim)
        yield from self._store(tier_pass, index, layer, count)
        if layer.indexer is not None:
            yield from self._select(index, layer.indexer, count, context)
            tier_pass.plan(index, cut("selected"), cut("counts"), cut("plan"))
        matmul.per_head(stream, q, layer.wk, cut("q_latent"))
        tier_pass.before_attention(index)
        attention.attend(
            stream,
            cut("q_latent"),
            q,
            cut("plan"),
            cut("counts"),
            cut("o_latent"),
            offsets=tier_pass.offsets(index),
            row_format=layout.row_format,
            rope_offset=spec.qk_nope_head_dim,
            scale=spec.softmax_scale,
        )
        tier_pass.after_attention(index)
        matmul.per_head(stream, cut("o_latent"), layer.wv, cut("o"))
        heads = cut("o", shape=(spec.n_heads * spec.v_head_dim,))
        yield from self._add_halves(count, lambda half, total: matmul.matmul_half(stream, heads, layer.o, half, total))

    def _add_halves(self, count: int, product: Callable[[int | None, Array], None]) -> Walk:
        """x += both halves of a product, of which product(half, total) computes one in f32; None: all of what a side has, which is one half."""
        x, low = self.work.cut("x", count), self.work.cut("low", count)
        if self.shard.count > 1:
            product(None, low)
            yield Sums(low, x, x)
            return
        high = self.work.cut("high", count)
        for half, total in enumerate((low, high)):
            product(half, total)
        join(self.stream, low, high, x, x)

    def _store(self, tier_pass: Pass, index: int, layer: LayerWeights, count: int) -> Walk:
        """The rows of the history. The owner of a pair computes and packs them once; both sides store the same bytes."""
        layout, stream = self.tier.layout, self.stream
        if layer.kv_a is not None:
            row = self.work.cut("row", count)
            matmul.matmul(stream, self.work.cut("h", count), layer.kv_a, row)
            basic.rms_norm(stream, row, layer.kv_a_norm, row, self.spec.latent_norm_eps)
            basic.rope(stream, row.reshape(count, 1, self.spec.row_width), self.work.cut("positions", count), self.inv_freq, offset=layout.latent)
        if self.shard.count == 1:
            tier_pass.before_store(index)
            self._store_rows(tier_pass.refs, tier_pass.offsets(index), count)
            return
        packed = self.work.cut("packed", count)
        if self.shard.index == 0:
            self._store_rows(self.packed_refs.slice(0, count), (0, 0, 0, packed.address), count)
        yield Packed(packed)
        tier_pass.before_store(index)
        rows.place_rows(stream, packed, tier_pass.refs, offsets=tier_pass.offsets(index))

    def _store_rows(self, refs: Array, offsets: Offsets, count: int) -> None:
        layout = self.tier.layout
        error = self.row_error if layout.row_format is RowFormat.Q8G64 else None
        row = self.work.cut("row", count)
        rows.store_rows(self.stream, row, refs, offsets=offsets, row_format=layout.row_format, latent=layout.latent, error=error)

    def _select(self, index: int, indexer: IndexerWeights, count: int, context: int) -> Walk:
        """Writes the rows' index keys, then the selection: positions, ascending. Sides of a pair score what they hold and merge the best of both."""
        spec, stream = self.spec, self.stream
        cut = partial(self.work.cut, rows=count)
        positions, sessions = cut("positions"), cut("sessions")
        self._append_keys(index, indexer, count)
        plane = spec.index_plane[index]
        scored = context > spec.index_topk  # below that every causal position is selected and no score is read
        query, gate = cut("index_q"), cut("index_gate")
        if scored:
            matmul.matmul(stream, cut("qr"), indexer.wq_b, cut("index_q", shape=(spec.index_n_heads * spec.index_head_dim,)))
            basic.rope(stream, query, positions, self.inv_freq, offset=0)
            matmul.matmul(stream, cut("h"), indexer.weights_proj, gate)
        for start in range(0, count, self.score_rows):
            stop = min(start + self.score_rows, count)
            tile = lambda array, start=start, stop=stop: array.slice(start, stop)
            scores = self.scores.slice(0, stop - start)
            if scored:
                selection.index_score(
                    stream,
                    tile(query),
                    tile(gate),
                    self.key_store.tables,
                    tile(sessions),
                    tile(positions),
                    scores,
                    self.key_store.shape,
                    plane=plane,
                    context=context,
                    share=self.shard,
                )
            if scored and self.shard.count > 1:
                lists = tile(cut("entries")), tile(cut("entry_counts"))
                selection.topk(stream, scores, tile(positions), *lists, share=self.shard, extent_rows=self.key_store.shape.extent_rows)
            else:
                selection.topk(stream, scores, tile(positions), tile(cut("selected")), tile(cut("counts")))
        if scored and self.shard.count > 1:
            yield Lists(cut("entries"), cut("entry_counts"), positions, cut("selected"), cut("counts"))

    def _append_keys(self, index: int, indexer: IndexerWeights, count: int) -> None:
        """Index keys of the rows whose normed hidden states stand in h."""
        stream, spec, cut = self.stream, self.spec, partial(self.work.cut, rows=count)
        positions, key = cut("positions"), cut("index_key")
        matmul.matmul(stream, cut("h"), indexer.wk, key)
        basic.layer_norm(stream, key, indexer.k_norm_weight, indexer.k_norm_bias, key, INDEX_NORM_EPS)
        basic.rope(stream, key.reshape(count, 1, spec.index_head_dim), positions, self.inv_freq, offset=0)
        plane, store = key_plane(spec, index), self.key_store
        history.append(stream, key, store.tables, cut("sessions"), positions, store.shape, plane=plane, share=self.shard)

    def _activate(self, mlp: DenseWeights, count: int) -> Array:
        """silu(h gate) * (h up)"""
        width = mlp.down.shape[1]
        gate_up = self.work.cut("gate_up", count, (2 * width,))
        act = self.work.cut("act", count, (width,))
        matmul.matmul(self.stream, self.work.cut("h", count), mlp.gate_up, gate_up)
        basic.silu_mul(self.stream, gate_up, act)
        return act

    def _dense(self, mlp: DenseWeights, count: int) -> Walk:
        """x += (silu(h gate) * (h up)) down"""
        act = self._activate(mlp, count)
        yield from self._add_halves(count, lambda half, total: matmul.matmul_half(self.stream, act, mlp.down, half, total))

    def _experts(self, mlp: MoeWeights, count: int) -> Walk:
        """x += routed experts of h + shared expert of h"""
        spec, stream = self.spec, self.stream
        cut = partial(self.work.cut, rows=count)
        h, ids, weights = cut("h"), cut("expert_ids"), cut("expert_weights")
        matmul.matmul(stream, h, mlp.router, cut("router"))
        experts.router(
            stream,
            cut("router"),
            mlp.bias,
            ids,
            weights,
            n_group=spec.n_group,
            topk_group=spec.topk_group,
            normalise=spec.norm_topk_prob,
            scaling=spec.routed_scaling_factor,
        )
        order = (self.expert_offsets, cut("sorted_pairs"))
        experts.expert_sort(stream, ids, *order)
        experts.expert_matmul(stream, h, mlp.gate_up, cut("expert_gate_up"), order)
        pairs = count * spec.n_experts_per_tok
        gate_up = self.work.cut("expert_gate_up", pairs, (2 * spec.expert_width,))
        basic.silu_mul(stream, gate_up, self.work.cut("expert_act", pairs, (spec.expert_width,)))
        act = self._activate(mlp.shared, count)

        def down(half: int | None, total: Array) -> None:
            matmul.matmul_half(stream, act, mlp.shared.down, half, total)
            experts.expert_matmul(stream, cut("expert_act"), mlp.down, cut("expert_out"), order, half)
            experts.expert_sum(stream, cut("expert_out"), weights, total)

        yield from self._add_halves(count, down)


def key_plane(spec: ModelSpec, layer: int) -> int:
    """Plane of a full layer's index keys; that of the MTP layer, which has the number behind the main layers', is the last."""
    return spec.index_plane.get(layer, len(spec.full_layers))


def row_layout(spec: ModelSpec, row_format: RowFormat, mtp: bool = False) -> RowLayout:
    """Layout of the history rows: each full layer starts a selection group; with `mtp` the MTP layer is the last plane and a group of its own."""
    starts = [*spec.full_layers, spec.n_layers]
    groups = tuple(tuple(range(a, b)) for a, b in itertools.pairwise(starts)) + (((spec.n_layers,),) if mtp else ())
    return RowLayout(row_format, spec.kv_lora_rank, spec.qk_rope_head_dim, groups)
