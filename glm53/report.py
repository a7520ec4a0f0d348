"""What the commands print: text as it is drawn, one JSON object instead of it, summaries and progress on standard error."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from glm53.errors import short_bytes
from glm53.sampling import SamplingParams

if TYPE_CHECKING:
    from glm53.engine import Engine
    from glm53.model.decode import DraftCounts
    from glm53.request import Chunk, TokenLogprob


def report(engine: Engine, chunks: Iterator[Chunk], prompt_tokens: int, params: SamplingParams, as_json: bool, show: bool) -> dict[str, Any]:
    """Runs one request to its end: prints its text on standard output and, with `show`, the summary on standard error. With `as_json` it prints
    nothing and gives the object to be printed. params: those of the request, seed included."""
    started = time.perf_counter()
    first, reason = 0.0, None
    pieces: list[str] = []
    tokens: list[int] = []
    logprobs: list[TokenLogprob] = []
    for chunk in chunks:
        first = first or time.perf_counter()
        pieces.append(chunk.text)
        tokens += chunk.token_ids
        logprobs += chunk.logprobs
        reason = chunk.finish_reason or reason
        if not as_json:
            click.echo(chunk.text, nl=False)
    ended = time.perf_counter()
    prefill_s, decode_s = first - started, ended - first
    cache = engine.cache_counters()
    rates = {"prompt_tokens_per_s": prompt_tokens / prefill_s, "decode_tokens_per_s": (len(tokens) - 1) / decode_s if len(tokens) > 1 else 0.0}
    if as_json:
        out: dict[str, Any] = {
            "text": "".join(pieces),
            "token_ids": tokens,
            "prompt_tokens": prompt_tokens,
            "completion_tokens": len(tokens),
            "finish_reason": reason,
            "seed": params.seed,
            **{name: round(value, 3) for name, value in rates.items()},
            "runtime": engine.device.runtime.name,
            "device": engine.device.name,
            "devices": list(engine.config.devices),
            "memory_bytes": engine.memory(),
            "memory_bytes_by_place": engine.memory_by_place(),
            "kv_tier": engine.config.kv_tier,
            "kv_format": engine.tier.layout.row_format.value,
            "hot_cache": cache,
            "hot_cache_by_device": engine.cache_counters_by_device(),
            "drafts": asdict(engine.draft_counts()),
        }
        if params.logprobs is not None:
            out["logprobs"] = [{"token_id": t.token_id, "logprob": t.logprob, "top": t.top} for t in logprobs]
        return out
    click.echo()
    if show:
        click.echo(
            f"[{prompt_tokens} prompt tokens at {rates['prompt_tokens_per_s']:.1f}/s, {len(tokens)} new at {rates['decode_tokens_per_s']:.1f}/s, "
            f"{reason}, seed {params.seed}; {engine.device.runtime.name}: {' and '.join(device.name for device in engine.devices)}]",
            err=True,
        )
        click.echo(f"[{history_line(engine, cache)}]", err=True)
        if drafts := drafts_line(engine.draft_counts()):
            click.echo(f"[{drafts}]", err=True)
        for note in engine.notes:
            click.echo(f"[{note}]", err=True)
        for place, categories in engine.memory_by_place().items():
            click.echo(f"[{place}: " + ", ".join(f"{name} {short_bytes(value)}" for name, value in categories.items() if value) + "]", err=True)
    return {}


def print_json(value: dict[str, Any]) -> None:
    """One JSON object on a line of standard output."""
    click.echo(json.dumps(value, ensure_ascii=False))


def progress_line(verb: str, show: bool = True) -> ProgressLine | None:
    """A `ProgressLine` where somebody can see it."""
    return ProgressLine(verb) if show and sys.stderr is not None and sys.stderr.isatty() else None


def history_line(engine: Engine, cache: dict[str, int]) -> str:
    """Where the history lies and what the hot cache did."""
    layout = engine.tier.layout
    where = f"history {engine.config.kv_tier}, {layout.row_format.value} rows of {layout.row_bytes} B"
    if not cache:
        return where
    found, fetched = cache["hits"] + cache["recent_hits"], cache["misses"] + cache["uncached"]
    if not found + fetched:
        return where + "; no row was looked up"
    return (
        f"{where}; hot cache: {100 * found / (found + fetched + cache['duplicate_misses']):.2f} % of rows found on the device "
        f"({cache['recent_hits']} recent, {cache['hits']} hits, {cache['misses']} misses, {cache['evictions']} evictions), "
        f"{short_bytes(cache['bytes_from_host'])} read from host RAM"
    )


def drafts_line(counts: DraftCounts) -> str:
    """How many drafts of each depth were accepted; empty without drafts."""
    if not counts.rounds:
        return ""
    shares = " / ".join(f"{accepted / offered:.2f}" for accepted, offered in zip(counts.accepted, counts.offered, strict=True) if offered)
    return f"drafts: {shares or 'none'} accepted by depth, {counts.tokens / counts.rounds:.2f} tokens a round over {counts.rounds} rounds"


class ProgressLine:
    """A line on standard error that follows bytes, e.g. of weights being loaded; at most ten updates a second. verb: loading, saving."""

    def __init__(self, verb: str) -> None:
        self._verb = verb
        self._started = time.monotonic()
        self._shown = 0.0

    def __call__(self, done_bytes: int, total_bytes: int, name: str) -> None:
        now = time.monotonic()
        finished = done_bytes >= total_bytes
        if now - self._shown < 0.1 and not finished:
            return
        self._shown = now
        rate = done_bytes / max(now - self._started, 1e-9) / 2**20
        share = f"{100 * done_bytes / max(total_bytes, 1):3.0f} %"
        line = f"{self._verb} {share}  {done_bytes / 2**20:.0f} of {total_bytes / 2**20:.0f} MiB  {rate:.0f} MiB/s"
        click.echo("\r\x1b[K" + ("" if finished else line), err=True, nl=False)
