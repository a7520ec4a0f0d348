"""A decode step: R query rows of any sessions through all layers in few launches, recorded once per R and replayed as a graph.

Which kernel does what, and why these: docs/decisions/0004-step-graph.md. All that changes between steps lies in device memory: tokens, positions,
sessions, rounds (`StepRows`), round tags and hot-cache tables (the tier), sampling parameters (the sampler). Recorded steps hold kernel nodes only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from glm53.hip import Array, Device, Graph, Stream
from glm53.kv import RowStore, StepRows, TierStep
from glm53.model.forward import INDEX_NORM_EPS, Workspace, inverse_frequencies
from glm53.model.weights import DenseWeights, LayerWeights, MoeWeights, Weights
from glm53.ops import step, step_attention, step_experts, step_select, step_state
from glm53.ops.halves import Halves
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
    indexer's selection, for benchmarks and tests.
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
        keys: RowStore,
        row_format: RowFormat,
        row_error: Array,
        drawn: Array | None = None,
    ):
        self.device, self.stream, self.spec, self.weights, self.dtype = device, stream, spec, weights, dtype
        self.rows, self.tokens, self.tier, self.keys = step_rows, tokens, tier, keys
        self.row_format, self.row_error, self.drawn = row_format, row_error, drawn
        rows_max = tokens.shape[0]
        self.rows_max = rows_max
        self.inv_freq = Array.from_numpy(device, inverse_frequencies(spec), category="workspace")
        self.counter = Array.from_numpy(device, np.zeros(1, np.uint32), category="workspace")
        self.halves = Halves.make(device, rows_max, spec.hidden_size) if dtype is DType.BF16 else None
        self.router_arrivals = Array.from_numpy(device, np.zeros(1, np.uint32), category="workspace")
        self.work = Workspace(device, rows_max, self._shapes())
        self.partials = step_attention.Partials.make(device, rows_max, spec.n_heads, spec.index_topk, spec.kv_lora_rank, category="workspace")
        self.selector = step_select.Selector.make(device, rows_max, keys.rows_max, spec.index_topk, category="workspace")
        self.logits = Array.empty(device, DType.F32, (rows_max, spec.vocab_size), category="workspace")
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

    def run(self, row_count: int, drawing: Drawing | None, graphs: bool) -> None:
        """Enqueues one step of the rows in `rows` and `tokens`; its logits, and with `drawing` its tokens and its record.

        With `graphs` the first step of a kind is enqueued launch by launch (it loads the kernels), the second is recorded, all later ones are
        replayed. The bits are the same.
        """
        key = (row_count, None if drawing is None else drawing.key)
        if not graphs:
            self.enqueue(row_count, drawing)
            return
        graph = self._graphs.get(key)
        if graph is not None:
            graph.launch(self.stream)
        elif key not in self._graphs:
            self.enqueue(row_count, drawing)
            self._graphs[key] = None
        else:
            with self.stream.capture() as capture:
                self.enqueue(row_count, drawing)
            self._graphs[key] = capture.graph
            capture.graph.launch(self.stream)

    def launches(self, row_count: int) -> int | None:
        """Kernel nodes of the recorded steps of `row_count` rows, or None if none is recorded."""
        found = [graph.kernel_count for (rows, _), graph in self._graphs.items() if rows == row_count and graph is not None]
        return max(found) if found else None

    def close(self) -> None:
        """Ends the recorded steps; those launched have finished."""
        for graph in self._graphs.values():
            if graph is not None:
                graph.close()
        self._graphs.clear()

    def enqueue(self, row_count: int, drawing: Drawing | None) -> None:
        """One step, launch by launch."""
        cut = partial(self.work.cut, rows=row_count)
        rows = self.rows
        positions, sessions, refs = (array.slice(0, row_count) for array in (rows.positions, rows.sessions, rows.refs))
        tokens = self.tokens.slice(0, row_count)
        step_state.begin(self.stream, tokens, self.weights.embed, cut("x"), positions, sessions, refs, self.tier.row_place)
        for index, layer in enumerate(self.weights.layers):
            self._attention(index, layer, row_count)
            if isinstance(layer.mlp, DenseWeights):
                self._dense(layer, layer.mlp, row_count)
            else:
                self._experts(layer, layer.mlp, row_count)
        self.head(cut("x"), self.logits.slice(0, row_count))
        draws = drawing.enqueue(row_count) if drawing is not None else None
        rounds = rows.round_sessions.slice(0, rows.rounds(row_count))
        step_state.end(self.stream, self.counter, self.row_error, rounds, self.tier.states, draws)

    def head(self, x: Array, logits: Array) -> None:
        """logits [rows, vocab] f32 of x [rows, hidden], after the final norm."""
        segment = Segment(self.weights.lm_head, logits, Epilogue.STORE_F32)
        step.gemv(self.stream, x, [segment], norm=self.weights.final_norm, eps=self.spec.rms_norm_eps)

    def _attention(self, index: int, layer: LayerWeights, row_count: int) -> None:
        """x += attention(norm(x)); on a full layer also the selection that the shared layers after it reuse."""
        spec, stream = self.spec, self.stream
        cut = partial(self.work.cut, rows=row_count)
        qr, q = cut("qr"), cut("q")
        full = layer.indexer is not None
        segments = [Segment(layer.q_a, qr), Segment(layer.kv_a, cut("row"))]
        if layer.indexer is not None:
            segments += [Segment(layer.indexer.wk, cut("index_key")), Segment(layer.indexer.weights_proj, cut("index_gate"), Epilogue.STORE_F32)]
        for format in dict.fromkeys(segment.weight.format for segment in segments):  # one launch but where a checkpoint mixes formats
            same = [segment for segment in segments if segment.weight.format is format]
            step.gemv(stream, cut("x"), same, norm=layer.input_norm, eps=spec.rms_norm_eps)
        if full:
            self._select(index, layer, row_count)
        rope = Rope(spec.qk_head_dim, spec.qk_nope_head_dim, spec.qk_rope_head_dim)
        flat = self.work.cut("q", row_count, (spec.n_heads * spec.qk_head_dim,))
        part = self.tier.plan(index, cut("selected"), cut("counts"), cut("plan")) if full else self._rows_part(index, layer, row_count)
        self._from_qr(layer, [Segment(layer.q_b, flat, Epilogue.ROPE, rope)], part, row_count)
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
        segments = [Segment(layer.o, cut("x"), Epilogue.RESIDUAL)]
        step.gemv(stream, heads, segments, residual=cut("x"), halves=self.halves, part=self._fetch_ahead(index, row_count))

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
        return RowsPart(
            row=cut("row"),
            row_norm=layer.kv_a_norm,
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
        )

    def _select(self, index: int, layer: LayerWeights, row_count: int) -> None:
        """Writes history rows and index keys, scores every position and selects."""
        spec, indexer = self.spec, layer.indexer
        assert indexer is not None
        cut = partial(self.work.cut, rows=row_count)
        positions, sessions = self.rows.positions.slice(0, row_count), self.rows.sessions.slice(0, row_count)
        flat = self.work.cut("index_q", row_count, (spec.index_n_heads * spec.index_head_dim,))
        rope = Rope(spec.index_head_dim, 0, spec.qk_rope_head_dim)
        self._from_qr(layer, [Segment(indexer.wq_b, flat, Epilogue.ROPE, rope)], self._rows_part(index, layer, row_count), row_count)
        self.selector.score(
            self.stream, cut("index_q"), cut("index_gate"), self.keys.tables, sessions, positions, self.keys.shape, plane=spec.index_plane[index]
        )
        self.selector.topk(
            self.stream,
            positions,
            cut("selected"),
            cut("counts"),
            drawn=None if self.drawn is None else step_select.Drawn(self.drawn, self.counter),
        )

    def _fetch_ahead(self, index: int, row_count: int) -> FetchPart | None:
        """The next layer's misses, where it shares this layer's selection."""
        following = index + 1
        if following >= len(self.weights.layers) or self.weights.layers[following].indexer is not None:
            return None
        return self.tier.fetch(following, row_count)

    def _dense(self, layer: LayerWeights, mlp: DenseWeights, row_count: int) -> None:
        """x += (silu(h gate) * (h up)) down, h = norm(x)"""
        x, act = self.work.cut("x", row_count), self.work.cut("act", row_count, (mlp.down.shape[1],))
        step.gemv(self.stream, x, [Segment(mlp.gate_up, act, Epilogue.SILU)], norm=layer.post_norm, eps=self.spec.rms_norm_eps)
        step.gemv(self.stream, act, [Segment(mlp.down, x, Epilogue.RESIDUAL)], residual=x, halves=self.halves)

    def _experts(self, layer: LayerWeights, mlp: MoeWeights, row_count: int) -> None:
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
        step_experts.down(stream, act, ids, weights, mlp.down, shared, mlp.shared.down, x, x, self.halves)
