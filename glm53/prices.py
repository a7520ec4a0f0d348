"""What histories cost an opened engine and what it has for them, as `glm53.sched.admission` wants it.

Allocated when the engine opens, and so nobody's price: weights, workspace of passes and steps, slot tables, extent tables, staging of misses, the
host memory of `host_kv_gib`. Allocated on demand: host extents, hot caches, index keys, resident rows, parked copies; these are priced. Two linear
buffers of streamed prompts and the penalty marks are there once however many histories there are: they are taken from the limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from glm53.config import EngineConfig
from glm53.kv import HostTier
from glm53.kv.host import LINEAR_STEP_ROWS
from glm53.kv.ram import available_bytes
from glm53.kv.store import SLAB_BYTES
from glm53.mem.ledger import HOST, device_place
from glm53.model.side import Side
from glm53.model.stage import Stage
from glm53.sched.admission import Books, Limit, Price
from glm53.spec import ModelSpec

SHARE = 0.9  # of free memory


class PricedEngine(Protocol):
    """What this needs of an engine."""

    config: EngineConfig
    spec: ModelSpec
    stage: Stage


def books_of(engine: PricedEngine, device_share: float = SHARE) -> Books:
    """Prices and limits of an engine that runs nothing. device_share: of the device memory that is free now, how much histories may have."""
    sides = engine.stage.sides
    prices = [price for side in sides for price in _prices(side)]
    keys = engine.stage.first.keys.shape
    prices.append(Price(HOST, "index keys while parked", False, extent_bytes=keys.planes * keys.row_bytes))
    limits = [_device_limit(engine, side, device_share) for side in sides]
    return Books(prices, [*limits, _host_limit(engine.config, sides)])


def _prices(side: Side) -> list[Price]:
    place, tier, keys = device_place(side.device.index), side.tier, side.keys.shape
    found = [Price(place, "index keys", True, 0, keys.extent_rows, keys.extent_bytes, side.shard)]
    if isinstance(tier, HostTier):
        found.append(Price(place, "hot cache", True, tier.layout.planes * tier.hot_plane_bytes))
        found.append(Price(HOST, "history rows", False, 0, tier.shape.extent_rows, tier.shape.extent_bytes))
    else:
        shape = tier.store.shape
        found.append(Price(place, "history rows", True, 0, shape.extent_rows, shape.extent_bytes))
        found.append(Price(HOST, "history rows while parked", False, extent_bytes=shape.planes * shape.row_bytes))
    return found


def _device_limit(engine: PricedEngine, side: Side, share: float) -> Limit:
    free, once = side.device.free_bytes() + _pooled(side), _once(engine, side)
    setting = f"--gpu-memory-utilization {share:g} of {free} B free behind the weights, less {once} B of staging and workspace"
    return Limit(device_place(side.device.index), max(int(free * share) - once, 0), setting)


def _pooled(side: Side) -> int:
    """Allocated already, and there for histories."""
    held = side.keys.pool.capacity * side.keys.shape.extent_bytes
    if isinstance(side.tier, HostTier):
        return held + side.tier.blocks.pool.lent_bytes + side.tier.blocks.pool.cached_bytes
    return held + side.tier.pool.capacity * side.tier.store.shape.extent_bytes


def _once(engine: PricedEngine, side: Side) -> int:
    """Allocated on demand, but once."""
    marks = (engine.config.sessions_max + (side.step.rows_max if side.drafter is not None else 0)) * engine.spec.vocab_size
    slab = min(SLAB_BYTES, side.keys.shape.extents_for(side.keys.side_rows_max) * side.keys.shape.extent_bytes)  # begun, perhaps not used
    tier = side.tier
    if not isinstance(tier, HostTier):
        return marks + 2 * slab
    rows = min(-(-tier.rows_max // LINEAR_STEP_ROWS) * LINEAR_STEP_ROWS, tier.rows_max)
    return marks + slab + 2 * rows * tier.layout.row_bytes


def _host_limit(config: EngineConfig, sides: Sequence[Side]) -> Limit:
    tiers = [side.tier for side in sides if isinstance(side.tier, HostTier)]
    locked = sum(tier.pool.capacity * tier.shape.extent_bytes for tier in tiers)
    if tiers and config.host_kv_gib:
        each = " for each device" if len(tiers) > 1 else ""
        return Limit(HOST, locked, f"--host-kv-gib {config.host_kv_gib:g}{each}, rounded up to whole pieces")
    return Limit(HOST, int(available_bytes() * SHARE) + locked, f"{SHARE:g} of the host RAM that is available; --host-kv-gib sets it")
