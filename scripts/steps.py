"""Decode steps of a stage, driven one by one, and the bytes that a step must read."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from stage import Stage

from glm53.engine import Engine
from glm53.model.decode import StepRow
from glm53.model.forward import Walk
from glm53.model.sampler import DrawRow
from glm53.model.weights import LayerWeights, MoeWeights
from glm53.ops.matrix import Matrix
from glm53.ops.step_parts import FetchPart
from glm53.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=1 << 30, ignore_eos=True)


@dataclass
class Run:
    """One engine with its sessions, driven step by step."""

    engine: Engine
    slots: list[int] = field(default_factory=list)
    rows: list[StepRow] = field(default_factory=list)

    def open(self, stage: Stage, count: int, history_rows: int) -> None:
        for index in range(count):
            slot = self.engine.stage.open()
            stage.fill(self.engine, slot, history_rows, seed=index)
            self.slots.append(slot)
            self.rows.append(StepRow(DrawRow(slot, GREEDY, 1, history_rows + 1), 7 + index))

    def steps(self, count: int) -> tuple[np.ndarray, float]:
        """Tokens [count, rows] of the next steps, each enqueued before the one before it was read; seconds from first launch to last token."""
        decoder, tokens = self.engine.decoder, []
        start = time.perf_counter()
        ticket = decoder.launch(self.rows)
        for index in range(count):
            following = decoder.ahead(ticket) if index + 1 < count else None
            tokens.append([drawn[0].token_id for drawn in decoder.collect(ticket)])
            if following is not None:
                ticket = following
        seconds = time.perf_counter() - start
        last = ticket.rows
        self.rows = [StepRow(row.following(1).draw, token) for row, token in zip(last, tokens[-1], strict=True)]
        return np.array(tokens), seconds

    def logits(self) -> np.ndarray:
        """Of the last step, as bits."""
        return self.engine.step.logits.slice(0, len(self.rows)).numpy(self.engine.stage.first.stream).view(np.uint32)


def matrices(layer: LayerWeights, routed: bool) -> int:
    """Bytes of a layer's weights, of its routed experts or of everything else."""
    experts = 0
    if isinstance(layer.mlp, MoeWeights):
        experts = layer.mlp.gate_up.nbytes + layer.mlp.down.nbytes
    if routed:
        return experts
    return sum(_nbytes(getattr(layer, name)) for name in layer.__dataclass_fields__) - experts


def _nbytes(value: Any) -> int:
    if value is None:
        return 0
    if isinstance(value, Matrix) or hasattr(value, "nbytes"):
        return int(value.nbytes)
    return sum(_nbytes(getattr(value, name)) for name in value.__dataclass_fields__)


def experts_hit(run: Run) -> list[int]:
    """Different experts of each layer in one more step, enqueued launch by launch."""
    step, found = run.engine.step.layers, []
    original = step._experts

    def watched(layer: LayerWeights, mlp: MoeWeights, row_count: int, part: FetchPart | None) -> Walk:
        yield from original(layer, mlp, row_count, part)
        ids = step.work.cut("expert_ids", row_count).numpy(run.engine.stage.first.stream)
        found.append(len(np.unique(ids)))

    step._experts, graphs = watched, run.engine.decoder.graphs
    run.engine.decoder.graphs = False
    try:
        run.steps(1)
    finally:
        step._experts, run.engine.decoder.graphs = original, graphs
    return found


def history_bytes(run: Run, stage: Stage) -> int:
    """Bytes of the histories that a step must read: every index key of the full layers, the selected rows of all layers."""
    engine, spec = run.engine, stage.spec
    rows = [engine.keys.rows(slot) for slot in run.slots]
    keys = sum(spec.layer_is_full) * sum(rows) * engine.keys.shape.row_bytes
    return keys + spec.n_layers * sum(min(n, spec.index_topk) for n in rows) * engine.tier.layout.row_bytes


def step_bytes(run: Run, stage: Stage) -> tuple[int, int]:
    """Bytes of weights that a step must read: of all layers together, of the experts hit only, and of the head. Takes one step."""
    layers, experts = stage.weights[0].layers, stage.spec.n_routed_experts
    hit = experts_hit(run)
    total = sum(matrices(layer, routed=False) + matrices(layer, routed=True) * n / experts for layer, n in zip(layers, hit, strict=True))
    weights = stage.weights[0]
    return int(total), _nbytes(weights.lm_head)
