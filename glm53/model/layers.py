"""What a decode step does with one layer: its launches for R query rows, as walks (`forward.Walk`).

The main layers of a step, the rows that bring the MTP layer up to date and its draft rows share these (`step`, `mtp`). Which kernel does what, and
why these: docs/decisions/0004-step-graph.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from glm53.hip import Array, Device, Stream
from glm53.kv import KeyStore, StepRows, TierStep
from glm53.model.forward import INDEX_NORM_EPS, Walk, Workspace, inverse_frequencies, key_plane, layer_shapes
from glm53.model.pair import PairSide
from glm53.model.weights import DenseWeights, LayerWeights, MoeWeights
from glm53.ops import merge, step, step_attention, step_experts, step_parts, step_select
from glm53.ops.exchange import Lists, Products, Rows, Sums
from glm53.ops.halves import Halves
from glm53.ops.matrix import Matrix
from glm53.ops.step import Epilogue, Rope, Segment, SumMail
from glm53.ops.step_parts import FetchPart, RouterPart, RowsPart
from glm53.spec import DType, ModelSpec, RowFormat


class LayerSteps:
    """Work memory of at most `rows_max` query rows, and the launches of any layer for them, on one stream of one device.

    layers: the main layers of this device. rows: where the query rows stand; tier: the tier's side of steps with these rows. counter [1] u32: steps
    done. drawn: positions [draws, topk] i32 ascending that replace the indexer's selection, for benchmarks and tests. pair: what a side knows of its
    pair. work: memory of another one to use in turn with it, for `project` and `store_rows` alone.
    """

    def __init__(
        self,
        device: Device,
        stream: Stream,
        spec: ModelSpec,
        layers: Sequence[LayerWeights],
        dtype: DType,
        rows_max: int,
        step_rows: StepRows,
        tier: TierStep,
        keys: KeyStore,
        row_format: RowFormat,
        row_error: Array,
        counter: Array,
        drawn: Array | None = None,
        pair: PairSide | None = None,
        work: Workspace | None = None,
    ):
        self.stream, self.spec, self.layers, self.dtype = stream, spec, layers, dtype
        self.rows, self.tier, self.keys, self.counter = step_rows, tier, keys, counter
        self.row_format, self.row_error, self.drawn, self.pair = row_format, row_error, drawn, pair
        self.model = spec if pair is None else pair.spec  # the shape of the whole
        self.inv_freq = Array.from_numpy(device, inverse_frequencies(spec), category="workspace")
        self.halves = Halves.make(device, rows_max, spec.hidden_size) if dtype is DType.BF16 and pair is None else None
        self.router_arrivals = Array.from_numpy(device, np.zeros(1, np.uint32), category="workspace")
        if work is not None:
            self.work = work
            return
        self.work = Workspace(device, rows_max, layer_shapes(spec, dtype) | ({} if pair is None else self._pair_shapes()))
        self.partials = step_attention.Partials.make(device, rows_max, spec.n_heads, spec.index_topk, spec.kv_lora_rank, category="workspace")
        self.selector = step_select.Selector.make(device, rows_max, keys.side_rows_max, spec.index_topk, category="workspace")

    def _pair_shapes(self) -> dict[str, tuple[DType, tuple[int, ...]]]:
        """What a side needs beside: its halves of sums, the best of its index scores."""
        spec = self.spec
        return {
            "sums": (DType.F32, (spec.hidden_size,)),
            "entries": (DType.U64, (spec.index_topk,)),
            "entry_counts": (DType.I32, ()),
        }

    @property
    def _adds_in_products(self) -> bool:
        return self.pair is not None and self.pair.adds_in_products and self.dtype is DType.BF16

    @property
    def mtp_index(self) -> int:
        """Number of the MTP layer: behind the main layers."""
        return len(self.layers)

    def layer(self, index: int, layer: LayerWeights, row_count: int) -> Walk:
        """A whole layer: x of the rows becomes its output. On a full layer also the selection that the shared layers after it reuse."""
        self.project(layer, row_count)
        if layer.indexer is not None:
            yield from self.store_rows(index, layer, row_count)
            yield from self.choose(index, layer, row_count)
        yield from self.attend(index, layer, row_count)
        yield from self.mlp(layer, row_count, self._fetch_ahead(index, row_count) if self._fetches_beside_experts(layer, row_count) else None)

    def project(self, layer: LayerWeights, row_count: int) -> None:
        """What a layer makes of norm(x) first: qr, on the owner the history row, on a full layer index key and gates."""
        cut = partial(self.work.cut, rows=row_count)
        segments = [Segment(layer.q_a, cut("qr"))]
        if layer.kv_a is not None:  # the owner's rows are the peer's as well
            segments.append(Segment(layer.kv_a, cut("row")))
        if layer.indexer is not None:
            segments += [Segment(layer.indexer.wk, cut("index_key")), Segment(layer.indexer.weights_proj, cut("index_gate"), Epilogue.STORE_F32)]
        for format in dict.fromkeys(segment.weight.format for segment in segments):  # one launch but where a checkpoint mixes formats
            same = [segment for segment in segments if segment.weight.format is format]
            step.gemv(self.stream, cut("x"), same, norm=layer.input_norm, eps=self.spec.rms_norm_eps)

    def store_rows(self, index: int, layer: LayerWeights, row_count: int) -> Walk:
        """Of a full layer: the index query; beside it history rows and index keys are stored."""
        spec, indexer = self.spec, layer.indexer
        assert indexer is not None
        flat = self.work.cut("index_q", row_count, (spec.index_n_heads * spec.index_head_dim,))
        rope = Rope(spec.index_head_dim, 0, spec.qk_rope_head_dim)
        yield from self._with_rows(index, layer, [Segment(indexer.wq_b, flat, Epilogue.ROPE, rope)], row_count)

    def choose(self, index: int, layer: LayerWeights, row_count: int) -> Walk:
        """Scores every position and selects. Sides of a pair score what they hold and merge the best of both."""
        assert layer.indexer is not None
        cut, keys, plane = partial(self.work.cut, rows=row_count), self.keys, key_plane(self.spec, index)
        positions, sessions = self.rows.positions.slice(0, row_count), self.rows.sessions.slice(0, row_count)
        self.selector.score(
            self.stream, cut("index_q"), cut("index_gate"), keys.tables, sessions, positions, keys.shape, plane=plane, share=keys.shard
        )
        drawn = None if self.drawn is None else step_select.Drawn(self.drawn, self.counter)
        if self.pair is None:
            self.selector.topk(self.stream, positions, cut("selected"), cut("counts"), drawn=drawn)
            return
        lists = Lists(cut("entries"), cut("entry_counts"), positions, cut("selected"), cut("counts"), drawn)
        if self.pair.adds_in_products:

            def launch(mail: SumMail) -> None:
                merge.select(self.stream, self.selector, lists, keys.shard, keys.shape.extent_rows, mail)

            yield Products(launch, (lists.selected, lists.selected_counts))
            return
        self.selector.topk(self.stream, positions, lists.entries, lists.counts, share=keys.shard, extent_rows=keys.shape.extent_rows)
        yield lists

    def attend(self, index: int, layer: LayerWeights, row_count: int, turn: int = 0) -> Walk:
        """x += attention. A full layer has selected: its rows are looked up; any other one stores its history rows and reads by the plan there is.
        turn: how often the layer has stored rows in this step before."""
        spec, stream = self.spec, self.stream
        cut = partial(self.work.cut, rows=row_count)
        full = layer.indexer is not None
        rope = Rope(spec.qk_head_dim, spec.qk_nope_head_dim, spec.qk_rope_head_dim)
        segments = [Segment(layer.q_b, self.work.cut("q", row_count, (spec.n_heads * spec.qk_head_dim,)), Epilogue.ROPE, rope)]
        if full:
            self._from_qr(layer, segments, self.tier.plan(index, cut("selected"), cut("counts"), cut("plan")), row_count)
        else:
            yield from self._with_rows(index, layer, segments, row_count, turn)
        if full and self.tier.gathers_on_host:
            self.tier.gather(index, row_count)
        q = cut("q")
        step.per_head(stream, q, layer.wk, cut("q_latent"), part=self.tier.fetch(index, row_count) if full else None)
        partials = self.partials.slice(0, row_count)
        step_attention.attend_expand(
            stream,
            cut("q_latent"),
            q,
            cut("plan"),
            cut("counts"),
            partials,
            layer.wv,
            cut("o"),
            offsets=self.tier.offsets(index),
            row_format=self.row_format,
            rope_offset=spec.qk_nope_head_dim,
            scale=spec.softmax_scale,
        )
        heads = self.work.cut("o", row_count, (spec.n_heads * spec.v_head_dim,))
        whole_k = self.model.n_heads * spec.v_head_dim
        part = None if self._fetches_beside_experts(layer, row_count) else self._fetch_ahead(index, row_count)
        yield from self._add(heads, layer.o, row_count, whole_k, part)

    def _with_rows(self, index: int, layer: LayerWeights, segments: list[Segment], row_count: int, turn: int = 0) -> Walk:
        """Products of the normed q_a output; beside them the history rows are stored, which pass from the owner to the peer."""
        part = self._rows_part(index, layer, row_count, turn)
        shard = self.keys.shard
        if shard.index == 0:
            self._from_qr(layer, segments, part, row_count)
        if part.mail is not None:
            yield Rows(row_count, self.row_format.row_bytes(self.spec.kv_lora_rank, self.spec.qk_rope_head_dim))
        if shard.index == 1:
            self._from_qr(layer, segments, part, row_count)

    def _from_qr(self, layer: LayerWeights, segments: list[Segment], part: step_parts.Part | None, row_count: int) -> None:
        """Products of the normed q_a output, rotated."""
        step.gemv(
            self.stream,
            self.work.cut("qr", row_count),
            segments,
            norm=layer.q_a_norm,
            eps=self.spec.latent_norm_eps,
            positions=self.rows.positions.slice(0, row_count),
            inv_freq=self.inv_freq,
            part=part,
        )

    def _rows_part(self, index: int, layer: LayerWeights, row_count: int, turn: int) -> RowsPart:
        """Finishes and stores the history rows of a layer, on a full layer the index keys too."""
        spec, indexer = self.spec, layer.indexer
        cut = partial(self.work.cut, rows=row_count)
        computes = layer.kv_a is not None  # else the owner sends it packed
        return RowsPart(
            row=cut("row") if computes else None,
            row_norm=layer.kv_a_norm if computes else None,
            row_eps=spec.latent_norm_eps,
            refs=self.rows.refs.slice(0, row_count),
            offsets=self.tier.offsets(index),
            row_format=self.row_format,
            latent=spec.kv_lora_rank,
            error=self.row_error if self.row_format is RowFormat.Q8G64 else None,
            key=cut("index_key") if indexer is not None else None,
            key_norm=indexer.k_norm_weight if indexer is not None else None,
            key_bias=indexer.k_norm_bias if indexer is not None else None,
            key_eps=INDEX_NORM_EPS,
            key_tables=self.keys.tables,
            sessions=self.rows.sessions.slice(0, row_count),
            key_shape=self.keys.shape,
            key_plane=key_plane(spec, index) if indexer is not None else 0,
            key_share=self.keys.shard,
            mail=None if self.pair is None else self.pair.mail(index + turn, self.counter),
            give_follows=indexer is not None and self.tier.looks_up,
        )

    def _fetch_ahead(self, index: int, row_count: int) -> FetchPart | None:
        """The next layer's misses, where it shares this layer's selection."""
        following = index + 1
        if following >= len(self.layers) or self.layers[following].indexer is not None:
            return None
        return self.tier.fetch(following, row_count)

    def _fetches_beside_experts(self, layer: LayerWeights, row_count: int) -> bool:
        """Whether the next layer's misses come beside a layer's experts, which take longer than those of several rows do, or beside its o."""
        return row_count > 1 and isinstance(layer.mlp, MoeWeights)

    def mlp(self, layer: LayerWeights, row_count: int, part: FetchPart | None = None) -> Walk:
        """x += MLP(norm(x)); part: beside the routed experts."""
        mlp = layer.mlp
        yield from self._dense(layer, mlp, row_count) if isinstance(mlp, DenseWeights) else self._experts(layer, mlp, row_count, part)

    def _add(self, x: Array, weight: Matrix, row_count: int, whole_k: int, part: FetchPart | None = None) -> Walk:
        """x of the step += x @ weight^T, the sums of both halves of k added last. whole_k: columns of the model's weight."""
        y = self.work.cut("x", row_count)
        if self.pair is None:
            step.gemv(self.stream, x, [Segment(weight, y, Epilogue.RESIDUAL)], residual=y, halves=self.halves, part=part)
            return
        if self._adds_in_products:

            def launch(mail: SumMail) -> None:
                step.gemv(self.stream, x, [Segment(weight, y, Epilogue.RESIDUAL)], residual=y, whole_k=whole_k, mail=mail, part=part)

            yield Products(launch, (y,))
            return
        sums = self.work.cut("sums", row_count)
        step.gemv(self.stream, x, [Segment(weight, sums, Epilogue.STORE_F32)], whole_k=whole_k, part=part)
        yield Sums(sums, y, y)

    def _dense(self, layer: LayerWeights, mlp: DenseWeights, row_count: int) -> Walk:
        """x += (silu(h gate) * (h up)) down, h = norm(x)"""
        x, act = self.work.cut("x", row_count), self.work.cut("act", row_count, (mlp.down.shape[1],))
        step.gemv(self.stream, x, [Segment(mlp.gate_up, act, Epilogue.SILU)], norm=layer.post_norm, eps=self.spec.rms_norm_eps)
        yield from self._add(act, mlp.down, row_count, self.model.dense_width)

    def _experts(self, layer: LayerWeights, mlp: MoeWeights, row_count: int, part: FetchPart | None) -> Walk:
        """x += routed experts of h + shared expert of h, h = norm(x)"""
        spec, stream = self.spec, self.stream
        cut = partial(self.work.cut, rows=row_count)
        x, h, ids, weights = cut("x"), cut("h"), cut("expert_ids"), cut("expert_weights")
        shared = self.work.cut("act", row_count, (mlp.shared.down.shape[1],))
        router = RouterPart(
            bias=mlp.bias,
            ids=ids,
            weights=weights,
            arrivals=self.router_arrivals,
            n_group=spec.n_group,
            topk_group=spec.topk_group,
            normalise=spec.norm_topk_prob,
            scaling=spec.routed_scaling_factor,
        )
        segments = [Segment(mlp.router, cut("router"), Epilogue.STORE_F32), Segment(mlp.shared.gate_up, shared, Epilogue.SILU)]
        step.gemv(stream, x, segments, norm=layer.post_norm, eps=spec.rms_norm_eps, h=h, part=router)
        act = cut("expert_act")
        step_experts.experts(stream, h, ids, mlp.gate_up, act, part)
        if self.pair is None:
            step_experts.down(stream, act, ids, weights, mlp.down, shared, mlp.shared.down, x, x, self.halves)
            return
        if self._adds_in_products:

            def launch(mail: SumMail) -> None:
                step_experts.down(stream, act, ids, weights, mlp.down, shared, mlp.shared.down, x, x, mail=mail)

            yield Products(launch, (x,))
            return
        sums = cut("sums")
        step_experts.down_half(stream, act, ids, weights, mlp.down, shared, mlp.shared.down, sums)
        yield Sums(sums, x, x)
