"""One device's part of an engine: its weights, the histories and index keys of all sessions, and the launches of prompt rows and of steps.

A single device is a side that has everything. The two sides of a pair (docs/decisions/0006-pair.md) hold the same sessions in the same slots.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from glm53.hip import Array, Device
from glm53.kv import HostTier, HostTierConfig, KeyStore, ResidentTier, StepRows, step_of
from glm53.mem.extents import ExtentShape
from glm53.model.forward import Forward, row_layout
from glm53.model.layout import shard_spec
from glm53.model.mtp import Drafter
from glm53.model.sampler import Sampler
from glm53.model.step import StepForward
from glm53.spec import WHOLE, DType, ModelSpec, RowFormat

if TYPE_CHECKING:
    from glm53.config import EngineConfig
    from glm53.model.pair import PairSide
    from glm53.model.weights import Weights

STEP_ROWS_MIN = 8  # query rows that one step can hold, even with one session: room for draft verification


def step_rows_max(config: EngineConfig) -> int:
    """Query rows of one step: of every session the newest token and its drafts."""
    return max(config.sessions_max * (config.drafts_max + 1), STEP_ROWS_MIN)


def rows_ahead(depth: int) -> int:
    """Rows behind the accepted ones that a round of `depth` drafts may write: the verified rows, and the drafts' of the MTP layer."""
    return 2 * depth + 1


def context_rows_max(config: EngineConfig, spec: ModelSpec) -> int:
    """Rows of one session."""
    return min(config.context_rows_max or spec.max_position_embeddings, spec.max_position_embeddings)


class Side:
    """See the module. spec: of the whole model; `fetch`: how the host tier brings missed rows, kernel or copy; drawn: see `StepForward`.

    Attributes: device, stream, weights, tier, keys, sampler, step, forward, drafter (None without MTP); prompt_row_error and step_row_error [1] u32:
    1 + a row that could not
    be quantised, of a pair on the owner alone; passes: events after the last two passes of prompt rows.
    """

    def __init__(
        self,
        device: Device,
        config: EngineConfig,
        spec: ModelSpec,
        weights: Weights,
        fetch: str,
        progress: Callable[[int, int, str], None] | None = None,
        drawn: Array | None = None,
        pair: PairSide | None = None,
    ):
        shard = WHOLE if pair is None else pair.shard
        own = shard_spec(spec, shard)
        dtype = DType.F32 if config.dtype == "f32" else DType.BF16
        # A round that runs ahead of the host, and the one before it, may write so many rows past the last one that a session may have.
        drafts = config.drafts_max
        rows_max, context = step_rows_max(config), context_rows_max(config, spec) + (rows_ahead(drafts) + drafts + 1 if drafts else 0)
        chunk_rows_max = max(config.prefill_chunk_rows, rows_max)
        self.device, self.weights, self.shard = device, weights, shard
        # Right before the tier makes its own two: neighbouring streams get different hardware queues, so that they can overlap.
        self.stream = device.stream()
        self.passes = deque([device.event(), device.event()])
        self.tier = self._make_tier(config, spec, context, chunk_rows_max, fetch, progress)
        key_planes = len(spec.full_layers) + (1 if drafts else 0)
        key_shape = ExtentShape(config.extent_rows, key_planes, spec.index_head_dim * dtype.item_bytes)
        self.keys = KeyStore(device, self.stream, key_shape, config.sessions_max, context, shard)
        flag = lambda: Array.from_numpy(device, np.zeros(1, np.uint32), category="workspace")
        self.prompt_row_error, self.step_row_error = flag(), flag()
        self.sampler = Sampler(device, self.stream, rows_max, config.sessions_max, spec.vocab_size)
        rows = StepRows.make(device, rows_max, config.sessions_max)
        self.step = StepForward(
            device,
            self.stream,
            own,
            weights,
            dtype,
            rows,
            Array.empty(device, DType.I32, (rows_max,), category="workspace") if drafts else self.sampler.tokens,
            step_of(self.tier, rows),
            self.keys,
            self.tier.layout.row_format,
            self.step_row_error,
            drawn,
            pair,
        )
        self.drafter = self._make_drafter(device, config, own, dtype, pair) if drafts else None
        terminal = None if self.drafter is None else self.drafter.terminal
        self.forward = Forward(
            device, self.stream, own, weights, dtype, chunk_rows_max, self.tier, self.keys, self.step.head, self.prompt_row_error, terminal
        )

    def reset_selections(self) -> None:
        """After scores whose selection was never enqueued: what both hand on is 0 again, in stream order."""
        for layers in [self.step.layers] if self.drafter is None else [self.step.layers, self.drafter.drafts]:
            layers.selector.reset(self.stream)

    def _make_drafter(self, device: Device, config: EngineConfig, own: ModelSpec, dtype: DType, pair: PairSide | None) -> Drafter:
        assert self.weights.mtp is not None, "drafts without an MTP layer"
        row_format, tier_of = self.tier.layout.row_format, partial(step_of, self.tier)
        common = (device, self.stream, own, self.weights.mtp, dtype, self.step, self.sampler, self.keys, tier_of, row_format)
        return Drafter(*common, config.sessions_max, config.drafts_max, pair)

    def _make_tier(
        self, config: EngineConfig, spec: ModelSpec, context: int, pass_rows_max: int, fetch: str, progress: Callable[[int, int, str], None] | None
    ) -> ResidentTier | HostTier:
        layout = row_layout(spec, config.row_format(spec), mtp=config.drafts_max > 0)
        if config.kv_tier == "resident":
            return ResidentTier(self.device, self.stream, layout, config.extent_rows, config.sessions_max, context, pass_rows_max)
        rows_max = step_rows_max(config)
        # More hot rows than a session can have would never be used.
        hot_rows = min(config.hot_rows, -(-context // 64) * 64)
        sizes = HostTierConfig(
            hot_rows=max(hot_rows, HostTierConfig.ring_rows_for(rows_max) + 64) if hot_rows < config.hot_rows else hot_rows,
            step_rows_max=rows_max,
            extent_rows=config.extent_rows,
            sessions_max=config.sessions_max,
            rows_max=context,
            topk=spec.index_topk,
            host_bytes=int(config.host_kv_gib * 2**30),
            chunk_bytes=config.host_chunk_mib << 20,
            method=config.host_memory,
            fetch=fetch,
        )
        return HostTier(self.device, self.stream, layout, sizes, progress)

    def upload_step(self, runs: list[tuple[int, int]], first_positions: list[int], tokens: np.ndarray) -> None:
        """Rows of the next step: `runs` of (session, rows), the first row of each at first_positions, tokens [rows] i32."""
        self.step.rows.upload(runs, first_positions, self.stream)
        self.step.tokens.slice(0, len(tokens)).upload(tokens, self.stream)

    def row_error(self, flag: Array) -> int:
        """Takes a flag of this side: 1 + a row that could not be quantised, or 0. Waits for the stream."""
        if self.tier.layout.row_format is not RowFormat.Q8G64:
            return 0
        bad = int(flag.numpy(self.stream)[0])
        if bad:
            flag.upload(np.zeros(1, np.uint32), self.stream)
        return bad
