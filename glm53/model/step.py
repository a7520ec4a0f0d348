"""A decode step: R query rows of any sessions through all layers in few launches, recorded once per R and replayed as a graph.

What happens in a layer is in `layers`. All that changes between steps lies in device memory: tokens, positions,
sessions, rounds (`StepRows`), round tags and hot-cache tables (the tier), sampling parameters (the sampler). Recorded steps hold kernel nodes only.

A step is a walk (`forward.Walk`): on a side of a pair it gives what has to pass between both sides before it goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial

import numpy as np

from glm53.hip import Array, Device, Graph, Stream
from glm53.kv import KeyStore, StepRows, TierStep
from glm53.model.forward import Walk
from glm53.model.layers import LayerSteps
from glm53.model.pair import PairSide, Passed, numbered
from glm53.model.weights import Weights
from glm53.ops import step, step_state
from glm53.ops.exchange import Parts, Products, Rows
from glm53.ops.step import Epilogue, Segment
from glm53.ops.step_state import Draws, Half
from glm53.spec import DType, ModelSpec, RowFormat


@dataclass(frozen=True)
class Drawing:
    """What a step does after its logits: `walk(rows)` draws tokens, and gives what `step_end` writes down, or None. `key` names what is recorded.

    alone: the step has no rows and no logits, but this.
    """

    key: tuple[object, ...]
    walk: Callable[[int], Generator[Passed, None, Draws | None]]
    alone: bool = False


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
        self.stream, self.spec, self.weights = stream, spec, weights
        self.rows, self.tokens, self.tier, self.row_error, self.pair = step_rows, tokens, tier, row_error, pair
        self.rows_max = rows_max = tokens.shape[0]
        self.counter = Array.from_numpy(device, np.zeros(1, np.uint32), category="workspace")
        main = weights.layers
        self.exchanged = Array.from_numpy(device, np.zeros(1, np.uint32), category="workspace")  # exchanges of a pair done
        self.layers = LayerSteps(device, stream, spec, main, dtype, rows_max, step_rows, tier, keys, row_format, row_error, self.counter, drawn, pair)
        self.work = self.layers.work
        vocab = spec.vocab_size if pair is None else pair.spec.vocab_size
        self.logits = Array.empty(device, DType.F32, (rows_max, vocab), category="workspace")
        if pair is not None:
            self._x_part = Array.empty(device, dtype, (rows_max, weights.embed.shape[1]), category="workspace")
            self._logits_part = Array.empty(device, DType.F32, (rows_max, spec.vocab_size), category="workspace")
        self._graphs: dict[tuple[object, ...], Graph | None] = {}

    def graph(self, row_count: int, drawing: Drawing | None) -> Graph | None:
        """The recorded step of this kind, or None the first time: then it is to be enqueued launch by launch, which loads the kernels."""
        key = (row_count, None if drawing is None else drawing.key)
        graph = self._graphs.get(key)
        if graph is not None:
            return graph
        if key in self._graphs:
            with self.stream.capture() as capture:
                for index, request in numbered(self.walk(row_count, drawing)):
                    assert self.pair is not None
                    self.pair.enqueue(self.stream, request, self.exchanged, index)
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
        self.exchanged.upload(np.zeros(1, np.uint32), self.stream)

    def close(self) -> None:
        """Ends the recorded steps; those launched have finished."""
        for graph in self._graphs.values():
            if graph is not None:
                graph.close()
        self._graphs.clear()

    def walk(self, row_count: int, drawing: Drawing | None) -> Walk:
        """Enqueues one step of the rows in `rows` and `tokens`, launch by launch; its logits, and with `drawing` its tokens and its record."""
        rows, count = self.rows, 0
        walk = self._walk(row_count, drawing)
        while True:
            try:
                request = next(walk)
            except StopIteration as stopped:
                draws = stopped.value
                break
            count += not isinstance(request, Rows)
            yield request
        rounds = rows.round_sessions.slice(0, rows.rounds(row_count))
        link_error, exchanged = (None, None) if self.pair is None else (self.pair.error, (self.exchanged, count))
        step_state.end(self.stream, self.counter, self.row_error, rounds, self.tier.states, draws, link_error, exchanged)

    def _walk(self, row_count: int, drawing: Drawing | None) -> Generator[Passed, None, Draws | None]:
        """`walk` without what ends the step; gives what was drawn."""
        x, rows = self.work.cut("x", row_count), self.rows
        if drawing is None or not drawing.alone:
            yield from self.embed(self.tokens.slice(0, row_count), rows, self.tier, x)
            for index, layer in enumerate(self.weights.layers):
                yield from self.layers.layer(index, layer, row_count)
            yield from self.head(x, self.logits.slice(0, row_count))
        return None if drawing is None else (yield from drawing.walk(row_count))

    def embed(self, tokens: Array, rows: StepRows, tier: TierStep, x: Array) -> Walk:
        """x [n, hidden] of tokens [n], and where the history rows of these n query rows go."""
        count = x.shape[0]
        positions, sessions, refs = (array.slice(0, count) for array in (rows.positions, rows.sessions, rows.refs))
        begin = partial(
            step_state.begin, self.stream, tokens, self.weights.embed, positions=positions, sessions=sessions, refs=refs, place=tier.row_place
        )
        if self.pair is None:
            begin(x)
            return
        if self.pair.adds_in_products:
            side = self.pair.shard.index
            yield Products(lambda mail: begin(x, half=Half(side, mail)), (x,))
            return
        y = self._x_part.slice(0, count)
        begin(y)
        yield Parts(y, x)

    def head(self, x: Array, logits: Array, normed: bool = False) -> Walk:
        """logits [rows, vocab] f32 of x [rows, hidden], after the final norm; normed: x has it already."""
        y = logits if self.pair is None else self._logits_part.slice(0, x.shape[0])
        norm = None if normed else self.weights.final_norm
        step.gemv(self.stream, x, [Segment(self.weights.lm_head, y, Epilogue.STORE_F32)], norm=norm, eps=self.spec.rms_norm_eps)
        if self.pair is not None:
            yield Parts(y, logits)
