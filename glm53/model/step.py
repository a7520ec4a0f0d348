"""A decode step: R query rows of any sessions through all layers in few launches, recorded once per R and replayed as a graph.

Which kernel does what, and why these: docs/decisions/0004-step-graph.md. All that changes between steps lies in device memory: tokens, positions,
sessions, rounds (`StepRows`), round tags and hot-cache tables (the tier), sampling parameters (the sampler). Recorded steps hold kernel nodes only.

A step is a walk (`forward.Walk`): on a side of a pair it gives what has to pass between both sides before it goes on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from glm53.hip import Array, Device, Graph, Stream
from glm53.kv import KeyStore, StepRows, TierStep
from glm53.model.forward import INDEX_NORM_EPS, Walk, Workspace, inverse_frequencies
from glm53.model.pair import PairSide, numbered
from glm53.model.weights import DenseWeights, LayerWeights, MoeWeights, Weights
from glm53.ops import step, step_attention, step_experts, step_select, step_state
from glm53.ops.exchange import Lists, Parts, Rows, Sums
from glm53.ops.halves import Halves
from glm53.ops.matrix import Matrix
from glm53.ops.step import Epilogue, FetchPart, Rope, RouterPart, RowsPart, Segment
from glm53.ops.step_state import Draws
from glm53.spec import DType, ModelSpec, RowFormat


@dataclass(frozen=True)
class Drawing:
    """How a step draws its tokens: `enqueue(rows)` launches the sampler on the step's logits and says what it drew. `key` names what is recorded."""

    key: tuple[object, ...]
    enqueue: Callable[[int], Draws]


class StepForward:
    """Steps of at most `rows_max` rows on one stream of one device.

    `logits` [rows_max, vocab] f32 are those of every row after a step. `drawn`: positions [draws, topk] i32 ascending that replace the
    indexer's selection, for benchmarks and tests. spec, weights: of this device. pair: what a side knows of its pair.
    """

    def __init__(
        self,
        device: Device,
        stream: Stream,
        spec: ModelSpec,
        weights: Weights,
        dtype: DType,
        step_rows: StepRows,
        tokens: Array,
        tier: TierStep,
        keys: KeyStore,
        row_format: RowFormat,
        row_error: Array,
        drawn: Array | None = None,
        pair: PairSide | None = None,
    ):
        self.device, self.stream, self.spec, self.weights, self.dtype = device, stream, spec, weights, dtype
        self.rows, self.tokens, self.tier, self.keys = step_rows, tokens, tier, keys
        self.row_format, self.row_error, self.drawn, self.pair = row_format, row_error, drawn, pair
        self.model = spec if pair is None else pair.spec  # the shape of the whole
        rows_max = tokens.shape[0]
        self.rows_max = rows_max
        self.inv_freq = Array.from_numpy(device, inverse_frequencies(spec), category="workspace")
        self.counter = Array.from_numpy(device, np.zeros(1, np.uint32), category="workspace")
        self.halves = Halves.make(device, rows_max, spec.hidden_size) if dtype is DType.BF16 and pair is None else None
        self.router_arrivals = Array.from_numpy(device, np.zeros(1, np.uint32), category="workspace")
        self.work = Workspace(device, rows_max, self._shapes() | ({} if pair is None else self._pair_shapes()))
        self.partials = step_attention.Partials.make(device, rows_max, spec.n_heads, spec.index_topk, spec.kv_lora_rank, category="workspace")
        self.selector = step_select.Selector.make(device, rows_max, keys.side_rows_max, spec.index_topk, category="workspace")
        self.logits = Array.empty(device, DType.F32, (rows_max, self.model.vocab_size), category="workspace")
        # Of a step: two sums a layer, the selection of each full layer, the embedding and the logits. Numbers count on from step to step.
        self.exchanges = 2 * len(weights.layers) + sum(layer.indexer is not None for layer in weights.layers) + 2
        self._graphs: dict[tuple[object, ...], Graph | None] = {}

    def _shapes(self) -> dict[str, tuple[DType, tuple[int, ...]]]:
        spec, dtype = self.spec, self.dtype
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

    def _pair_shapes(self) -> dict[str, tuple[DType, tuple[int, ...]]]:
        """What a side needs beside: its columns of the embedding and of the logits, its halves of sums, the best of its index scores."""
        spec = self.spec
        return {
            "x_part": (self.dtype, (self.weights.embed.shape[1],)),
            "logits_part": (DType.F32, (spec.vocab_size,)),
            "sums": (DType.F32, (spec.hidden_size,)),
            "entries": (DType.U64, (spec.index_topk,)),
            "entry_counts": (DType.I32, ()),
        }

    def graph(self, row_count: int, drawing: Drawing | None) -> Graph | None:
        """The recorded step of this kind, or None the first time: then it is to be enqueued launch by launch, which loads the kernels."""
        key = (row_count, None if drawing is None else drawing.key)
        graph = self._graphs.get(key)
        if graph is None and key in self._graphs:
            with self.stream.capture() as capture:
                for index, request in numbered(self.walk(row_count, drawing)):
                    assert self.pair is not None
                    self.pair.enqueue(self.stream, request, self.counter, self.exchanges, index)
            graph = capture.graph
        self._graphs[key] = graph
        return graph

    def launches(self, row_count: int) -> int | None:
        """Kernel nodes of the recorded steps of `row_count` rows, or None if none is recorded."""
        found = [graph.kernel_count for (rows, _), graph in self._graphs.items() if rows == row_count and graph is not None]
        return max(found) if found else None

    def restart(self, number: int) -> None:
        """The next step is `number`; nothing runs on the device."""
        self.counter.upload(np.array([number], np.uint32), self.stream)

    def close(self) -> None:
        """Ends the recorded steps; those launched have finished."""
        for graph in self._graphs.values():
            if graph is not None:
                graph.close()
        self._graphs.clear()

    def walk(self, row_count: int, drawing: Drawing | None) -> Walk:
        """Enqueues one step of the rows in `rows` and `tokens`, launch by launch; its logits, and with `drawing` its tokens and its record."""
        cut = partial(self.work.cut, rows=row_count)
        rows, pair = self.rows, self.pair
        positions, sessions, refs = (array.slice(0, row_count) for array in (rows.positions, rows.sessions, rows.refs))
        tokens, x = self.tokens.slice(0, row_count), cut("x" if pair is None else "x_part")
        step_state.begin(self.stream, tokens, self.weights.embed, x, positions, sessions, refs, self.tier.row_place)
        if pair is not None:
            yield Parts(x, cut("x"))
        for index, layer in enumerate(self.weights.layers):
            yield from self._attention(index, layer, row_count)
            if isinstance(layer.mlp, DenseWeights):
                yield from self._dense(layer, layer.mlp, row_count)
            else:
                yield from self._experts(layer, layer.mlp, row_count)
        yield from self.head(cut("x"), self.logits.slice(0, row_count))
        draws = drawing.enqueue(row_count) if drawing is not None else None
        rounds = rows.round_sessions.slice(0, rows.rounds(row_count))
        link_error = None if pair is None else pair.error
        step_state.end(self.stream, self.counter, self.row_error, rounds, self.tier.states, draws, link_error)

    def head(self, x: Array, logits: Array) -> Walk:
        """logits [rows, vocab] f32 of x [rows, hidden], after the final norm."""
        y = logits if self.pair is None else self.work.cut("logits_part", x.shape[0])
        step.gemv(self.stream, x, [Segment(self.weights.lm_head, y, Epilogue.STORE_F32)], norm=self.weights.final_norm, eps=self.spec.rms_norm_eps)
        if self.pair is not None:
            yield Parts(y, logits)

    def _add(self, x: Array, weight: Matrix, row_count: int, whole_k: int, part: FetchPart | None = None) -> Walk:
        """x of the step += x @ weight^T, the sums of both halves of k added last. whole_k: columns of the model's weight."""
        y = self.work.cut("x", row_count)
        if self.pair is None:
            step.gemv(self.stream, x, [Segment(weight, y, Epilogue.RESIDUAL)], residual=y, halves=self.halves, part=part)
            return
        sums = self.work.cut("sums", row_count)
        step.gemv(self.stream, x, [Segment(weight, sums, Epilogue.STORE_F32)], whole_k=whole_k, part=part)
        yield Sums(sums, y, y)

    def _attention(self, index: int, layer: LayerWeights, row_count: int) -> Walk:
        """x += attention(norm(x)); on a full layer also the selection that the shared layers after it reuse."""
        spec, stream = self.spec, self.stream
        cut = partial(self.work.cut, rows=row_count)
        qr, q = cut("qr"), cut("q")
        full = layer.indexer is not None
        segments = [Segment(layer.q_a, qr)]
        if layer.kv_a is not None:  # the owner's rows are the peer's as well
            segments.append(Segment(layer.kv_a, cut("row")))
        if layer.indexer is not None:
            segments += [Segment(layer.indexer.wk, cut("index_key")), Segment(layer.indexer.weights_proj, cut("index_gate"), Epilogue.STORE_F32)]
        for format in dict.fromkeys(segment.weight.format for segment in segments):  # one launch but where a checkpoint mixes formats
            same = [segment for segment in segments if segment.weight.format is format]
            step.gemv(stream, cut("x"), same, norm=layer.input_norm, eps=spec.rms_norm_eps)
        if full:
            yield from self._select(index, layer, row_count)
        rope = Rope(spec.qk_head_dim, spec.qk_nope_head_dim, spec.qk_rope_head_dim)
        flat = self.work.cut("q", row_count, (spec.n_heads * spec.qk_head_dim,))
        segments = [Segment(layer.q_b, flat, Epilogue.ROPE, rope)]
        if full:
            self._from_qr(layer, segments, self.tier.plan(index, cut("selected"), cut("counts"), cut("plan")), row_count)
        else:
            yield from self._with_rows(index, layer, segments, row_count)
        if full and self.tier.gathers_on_host:
            self.tier.gather(index, row_count)
        step.per_head(stream, q, layer.wk, cut("q_latent"), part=self.tier.fetch(index, row_count) if full else None)
        partials = self.partials.slice(0, row_count)
        step_attention.attend(
            stream,
            cut("q_latent"),
            q,
            cut("plan"),
            cut("counts"),
            partials,
            offsets=self.tier.offsets(index),
            row_format=self.row_format,
            rope_offset=spec.qk_nope_head_dim,
            scale=spec.softmax_scale,
        )
        step_attention.expand(stream, partials, cut("counts"), layer.wv, cut("o"))
        heads = self.work.cut("o", row_count, (spec.n_heads * spec.v_head_dim,))
        whole_k = self.model.n_heads * spec.v_head_dim
        yield from self._add(heads, layer.o, row_count, whole_k, self._fetch_ahead(index, row_count))

    def _with_rows(self, index: int, layer: LayerWeights, segments: list[Segment], row_count: int) -> Walk:
        """Products of the normed q_a output; beside them the history rows are stored, which pass from the owner to the peer."""
        part = self._rows_part(index, layer, row_count)
        shard = self.keys.shard
        if shard.index == 0:
            self._from_qr(layer, segments, part, row_count)
        if part.mail is not None:
            yield Rows(row_count, self.row_format.row_bytes(self.spec.kv_lora_rank, self.spec.qk_rope_head_dim))
        if shard.index == 1:
            self._from_qr(layer, segments, part, row_count)

    def _from_qr(self, layer: LayerWeights, segments: list[Segment], part: step.Part | None, row_count: int) -> None:
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

    def _rows_part(self, index: int, layer: LayerWeights, row_count: int) -> RowsPart:
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
            key_plane=spec.index_plane[index] if indexer is not None else 0,
            key_share=self.keys.shard,
            mail=None if self.pair is None else self.pair.mail(index, self.counter),
        )

    def _select(self, index: int, layer: LayerWeights, row_count: int) -> Walk:
        """Writes history rows and index keys, scores every position and selects. Sides of a pair score what they hold and merge the best of both."""
        spec, indexer = self.spec, layer.indexer
        assert indexer is not None
        cut = partial(self.work.cut, rows=row_count)
        positions, sessions = self.rows.positions.slice(0, row_count), self.rows.sessions.slice(0, row_count)
        flat = self.work.cut("index_q", row_count, (spec.index_n_heads * spec.index_head_dim,))
        rope = Rope(spec.index_head_dim, 0, spec.qk_rope_head_dim)
        yield from self._with_rows(index, layer, [Segment(indexer.wq_b, flat, Epilogue.ROPE, rope)], row_count)
        keys, plane = self.keys, spec.index_plane[index]
        self.selector.score(
            self.stream, cut("index_q"), cut("index_gate"), keys.tables, sessions, positions, keys.shape, plane=plane, share=keys.shard
        )
        drawn = None if self.drawn is None else step_select.Drawn(self.drawn, self.counter)
        if self.pair is None:
            self.selector.topk(self.stream, positions, cut("selected"), cut("counts"), drawn=drawn)
            return
        lists = cut("entries"), cut("entry_counts")
        self.selector.topk(self.stream, positions, *lists, share=keys.shard, extent_rows=keys.shape.extent_rows)
        yield Lists(*lists, positions, cut("selected"), cut("counts"), drawn)

    def _fetch_ahead(self, index: int, row_count: int) -> FetchPart | None:
        """The next layer's misses, where it shares this layer's selection."""
        following = index + 1
        if following >= len(self.weights.layers) or self.weights.layers[following].indexer is not None:
            return None
        return self.tier.fetch(following, row_count)

    def _dense(self, layer: LayerWeights, mlp: DenseWeights, row_count: int) -> Walk:
        """x += (silu(h gate) * (h up)) down, h = norm(x)"""
        x, act = self.work.cut("x", row_count), self.work.cut("act", row_count, (mlp.down.shape[1],))
        step.gemv(self.stream, x, [Segment(mlp.gate_up, act, Epilogue.SILU)], norm=layer.post_norm, eps=self.spec.rms_norm_eps)
        yield from self._add(act, mlp.down, row_count, self.model.dense_width)

    def _experts(self, layer: LayerWeights, mlp: MoeWeights, row_count: int) -> Walk:
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
        step_experts.experts(stream, h, ids, mlp.gate_up, act)
        if self.pair is None:
            step_experts.down(stream, act, ids, weights, mlp.down, shared, mlp.shared.down, x, x, self.halves)
            return
        sums = cut("sums")
        step_experts.down_half(stream, act, ids, weights, mlp.down, shared, mlp.shared.down, sums)
        yield Sums(sums, x, x)
