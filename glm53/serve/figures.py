"""The engine's own figures for metrics and log lines: read between two actions of the loop, and not often, since some wait for the device."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from glm53.errors import Glm53Error
from glm53.kv import HostTier
from glm53.serve.loop import Loop

READ_EVERY_S = 2.0  # a reader that comes sooner gets what the last one got
WAIT_S = 5.0  # for an action that takes long; then what was read last


@dataclass(frozen=True)
class Figures:
    """The engine's figures at one moment. memory: bytes by place and category; cache: as `Engine.cache_totals`."""

    usage: float  # share of the memory for histories that is charged to them: what they may grow to, while they run
    host_usage: float | None  # share of the page-locked host RAM that is in use; None: histories lie on the device
    pending_rows: int  # not in host RAM yet
    parks: int  # of requests that others took turns with
    drafts: int
    drafts_accepted: int
    memory: dict[str, dict[str, int]] = field(default_factory=dict)
    cache: dict[str, int] = field(default_factory=dict)

    @property
    def hit_share(self) -> float | None:
        """Rows that the device had, of those looked up; None if none was."""
        found = self.cache.get("hits", 0) + self.cache.get("recent_hits", 0)
        every = found + sum(self.cache.get(name, 0) for name in ("misses", "uncached", "duplicate_misses"))
        return found / every if every else None


def read_figures(loop: Loop) -> Figures:
    """Waits for the device. On the loop's thread."""
    engine = loop.engine
    tier, drafts = engine.tier, engine.draft_counts()
    return Figures(
        usage=loop.books.usage,
        host_usage=tier.pool.used / max(tier.pool.capacity, 1) if isinstance(tier, HostTier) else None,
        pending_rows=tier.pending_rows() if isinstance(tier, HostTier) else 0,
        parks=loop.parks,
        drafts=sum(drafts.offered),
        drafts_accepted=sum(drafts.accepted),
        memory=engine.memory_by_place(),
        cache=engine.cache_totals(),
    )


class FigureReader:
    """Reads the figures of a loop's engine for those who ask, at most once in `READ_EVERY_S`. Belongs to the event loop."""

    def __init__(self, loop: Loop):
        self._loop = loop
        self._last: Figures | None = None
        self._read_at = -READ_EVERY_S
        self._reading: asyncio.Future[Figures] | None = None

    async def read(self) -> Figures | None:
        """The newest there are; None if none could be read yet."""
        if time.monotonic() - self._read_at >= READ_EVERY_S:
            try:
                if self._reading is None:
                    self._reading = asyncio.wrap_future(self._loop.call(lambda: read_figures(self._loop)))
                await asyncio.wait({self._reading}, timeout=WAIT_S)
                if self._reading is not None and self._reading.done():
                    done, self._reading, self._read_at = self._reading, None, time.monotonic()
                    self._last = done.result()
            except Glm53Error:
                pass  # the device is lost or the loop is being closed: what was read last stays
        return self._last
