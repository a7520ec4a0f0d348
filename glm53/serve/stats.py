"""Lines of a server's log: what there is room for, what it did in the last seconds, and in all."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from copy import deepcopy

from glm53.errors import short_bytes
from glm53.serve.figures import Figures
from glm53.serve.loop import Load, Loop
from glm53.serve.metrics import Metrics

EVERY_S = 10.0
log = logging.getLogger("glm53.serve")


def room_lines(loop: Loop) -> list[str]:
    """What histories may hold, and how many of the longest fit at once."""
    books, engine = loop.books, loop.engine
    limits = ", ".join(f"{limit.place} {short_bytes(limit.byte_count)} ({limit.setting})" for limit in books.limits)
    rows = engine.context_rows_max
    return [
        f"room for histories: {limits}",
        f"maximum concurrency for {rows} tokens: {books.concurrency(rows):.2f}x by memory, {engine.sessions_max} in slots",
    ]


class StatsLog:
    """Says what a server does every `EVERY_S` seconds in which it does something. Belongs to the event loop."""

    def __init__(self, metrics: Metrics, load: Callable[[], Load], figures: Callable[[], Awaitable[Figures | None]]):
        self._metrics, self._load, self._figures = metrics, load, figures
        self._last, self._at = deepcopy(metrics.totals), time.monotonic()
        self._started = self._at

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            await asyncio.sleep(EVERY_S)
            line = await self.line()
            if line is not None:
                log.info(line)

    async def line(self) -> str | None:
        """What was done since the last line; None if nothing was and nothing is."""
        now, load, totals = time.monotonic(), self._load(), deepcopy(self._metrics.totals)
        last, seconds = self._last, max(now - self._at, 1e-9)
        self._last, self._at = totals, now
        if totals == last and not load.running and not load.waiting:
            return None
        prompt, drawn = totals.prompt_tokens - last.prompt_tokens, totals.generation_tokens - last.generation_tokens
        parts = [
            f"running {load.running}, waiting {load.waiting}",
            f"prompt {prompt / seconds:.1f} tokens/s, generation {drawn / seconds:.1f} tokens/s",
            f"prefix cache hits {_percent(totals.prefix_hits, totals.prefix_queries)}",
        ]
        figures = await self._figures()
        if figures is not None:
            parts.insert(2, f"memory for histories {100 * figures.usage:.1f} %")
            if figures.hit_share is not None:
                parts.append(f"hot cache hits {100 * figures.hit_share:.1f} %")
            if figures.drafts:
                parts.append(f"drafts accepted {_percent(figures.drafts_accepted, figures.drafts)}")
        return "; ".join(parts)

    def last_line(self) -> str:
        """What was done in all."""
        totals = self._metrics.totals
        ended = ", ".join(f"{reason} {count}" for reason, count in totals.ended.items())
        return (
            f"{sum(totals.ended.values())} requests in {time.monotonic() - self._started:.0f} s ({ended}); "
            f"{totals.prompt_tokens} prompt tokens, {totals.generation_tokens} drawn"
        )


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "none asked"
