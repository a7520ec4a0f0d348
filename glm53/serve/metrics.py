"""What a server counts, in the text format of Prometheus: requests and their times as clients see them, and the engine's own figures.

Names are those of vLLM with the prefix `glm53:`, so that dashboards need a search and replace; what vLLM has no name for begins with `glm53:kv_` or
`glm53:memory_`. Labels take values from short fixed lists alone: nothing that a client sends becomes one. Belongs to one thread, that of the event
loop; the engine's figures are read elsewhere and handed in as a value.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from glm53.request import Chunk
from glm53.serve.figures import Figures
from glm53.serve.loop import Cancelled, Event, Load, Started, Stopped

PREFIX = "glm53:"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
METHODS = ("GET", "HEAD", "POST", "DELETE", "OPTIONS")  # those that get a label of their own
REASONS = ("stop", "length", "abort", "error")
FIRST_TOKEN_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0)
BETWEEN_TOKENS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0)
WHOLE_S = (0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0)
# Hot caches, by the names of `Engine.cache_totals`.
CACHE_COUNTERS = {
    "hits": ("kv_hot_hits", "History rows found in a slot of the hot cache."),
    "recent_hits": ("kv_recent_hits", "History rows found in the ring, or while the device holds the whole history."),
    "misses": ("kv_hot_misses", "History rows fetched from host RAM into the hot cache."),
    "uncached": ("kv_uncached", "History rows fetched from host RAM for one round alone, since every slot was in use."),
    "duplicate_misses": ("kv_duplicate_misses", "History rows that another row of the same round had fetched."),
    "evictions": ("kv_evictions", "History rows that lost their slot of the hot cache."),
    "bytes_from_host": ("kv_host_to_device_bytes", "Bytes of history read from host RAM."),
}


@dataclass
class Totals:
    """Since the start."""

    prompt_tokens: int = 0  # of requests that got a token
    generation_tokens: int = 0
    prefix_queries: int = 0  # prompt tokens of requests that started
    prefix_hits: int = 0  # of these, those that were not computed again
    ended: dict[str, int] = field(default_factory=lambda: dict.fromkeys(REASONS, 0))


class Metrics:
    """Instruments of one server. model: the value of the label model_name."""

    def __init__(self, model: str):
        self.model, self.totals = model, Totals()
        self.load: Load | None = None  # these two as last handed in, for `text`
        self.figures: Figures | None = None
        self._registry = CollectorRegistry()
        self._registry.register(_State(self))
        self.first_token = self._histogram("time_to_first_token_seconds", "From a request's arrival to its first token.", FIRST_TOKEN_S)
        self.between = self._histogram("inter_token_latency_seconds", "Between two tokens of a request.", BETWEEN_TOKENS_S)
        self.per_token = self._histogram("request_time_per_output_token_seconds", "Mean time between the tokens of a request.", BETWEEN_TOKENS_S)
        self.whole = self._histogram("e2e_request_latency_seconds", "From a request's arrival to its last token.", WHOLE_S)
        self.queued = self._histogram("request_queue_time_seconds", "From a request's arrival to its first prompt row.", WHOLE_S)
        self._http = Counter(
            PREFIX + "http_requests", "Answers by route, method and status.", ["handler", "method", "status"], registry=self._registry
        )

    def _histogram(self, name: str, text: str, bounds: tuple[float, ...]) -> Any:
        return Histogram(PREFIX + name, text, ["model_name"], buckets=bounds, registry=self._registry).labels(self.model)

    def answered(self, route: str | None, method: str, status: int) -> None:
        """An answer has begun. route: as it is declared, None for a path that is none."""
        self._http.labels(route or "none", method if method in METHODS else "other", str(status)).inc()

    def meter(self, prompt_tokens: int) -> Meter:
        """For a request that has just arrived."""
        return Meter(self, prompt_tokens)

    def text(self) -> bytes:
        """Everything, in the text format."""
        return generate_latest(self._registry)


class Meter:
    """Follows one request through its events."""

    def __init__(self, metrics: Metrics, prompt_tokens: int):
        self._metrics, self._prompt_tokens = metrics, prompt_tokens
        self._arrived = time.monotonic()
        self._first_at = self._last_at = 0.0
        self._tokens = 0

    def take(self, event: Event) -> None:
        """An event has reached the one who answers the client."""
        metrics, now = self._metrics, time.monotonic()
        if isinstance(event, Started):
            metrics.queued.observe(now - self._arrived)
            metrics.totals.prefix_queries += self._prompt_tokens
            metrics.totals.prefix_hits += event.reused_rows
        elif isinstance(event, Chunk):
            self._take_tokens(len(event.token_ids) + (event.finish_reason == "stop" and not event.token_ids), now)  # an end token too
            if event.finish_reason is not None:
                self._end(event.finish_reason, now)
        else:
            metrics.totals.ended["abort" if isinstance(event.error, Cancelled | Stopped) else "error"] += 1

    def _take_tokens(self, count: int, now: float) -> None:
        metrics = self._metrics
        if not self._first_at:
            self._first_at = now
            metrics.first_token.observe(now - self._arrived)
            metrics.totals.prompt_tokens += self._prompt_tokens
        elif count:
            metrics.between.observe(now - self._last_at)
        self._last_at = now
        self._tokens += count
        metrics.totals.generation_tokens += count

    def _end(self, reason: str, now: float) -> None:
        metrics = self._metrics
        metrics.totals.ended[reason] += 1
        metrics.whole.observe(now - self._arrived)
        if self._tokens > 1:
            metrics.per_token.observe((now - self._first_at) / (self._tokens - 1))


class _State(Collector):
    """What is read when it is asked for."""

    def __init__(self, metrics: Metrics):
        self._metrics = metrics

    def describe(self) -> Iterator[Metric]:
        return iter(())

    def collect(self) -> Iterator[Metric]:
        totals, load, figures = self._metrics.totals, self._metrics.load, self._metrics.figures
        yield self._counter("prompt_tokens", "Prompt tokens of requests that got a token.", totals.prompt_tokens)
        yield self._counter("generation_tokens", "Tokens drawn.", totals.generation_tokens)
        yield self._counter("prefix_cache_queries", "Prompt tokens that were looked for among the histories at hand.", totals.prefix_queries)
        yield self._counter("prefix_cache_hits", "Prompt tokens that were found there and not computed again.", totals.prefix_hits)
        ended = CounterMetricFamily(PREFIX + "request_success", "Requests that have ended.", labels=["model_name", "finished_reason"])
        for reason, count in totals.ended.items():
            ended.add_metric([self._metrics.model, reason], count)
        yield ended
        if load is not None:
            yield self._gauge("num_requests_running", "Requests that hold a session.", load.running)
            yield self._gauge("num_requests_waiting", "Requests that wait for one.", load.waiting)
        if figures is not None:
            yield from self._figures(figures)

    def _figures(self, figures: Figures) -> Iterator[Metric]:
        text = "Memory for histories that is charged to requests, at their longest, sessions and kept prompts; 1 is all."
        yield self._gauge("kv_cache_usage_perc", text, figures.usage)
        yield self._counter("num_preemptions", "Requests that were parked so that others got their turn.", figures.parks)
        if figures.host_usage is not None:
            yield self._gauge("kv_host_usage_perc", "Page-locked host RAM in use by histories; 1 is all that is page-locked.", figures.host_usage)
            yield self._gauge("kv_pending_rows", "History rows that are not in host RAM yet.", figures.pending_rows)
        yield self._counter("spec_decode_num_draft_tokens", "Drafts verified.", figures.drafts)
        yield self._counter("spec_decode_num_accepted_tokens", "Drafts accepted.", figures.drafts_accepted)
        for key, (name, text) in CACHE_COUNTERS.items():
            if key in figures.cache:
                yield self._counter(name, text, figures.cache[key])
        memory = GaugeMetricFamily(PREFIX + "memory_bytes", "Allocated bytes.", labels=["model_name", "place", "category"])
        for place, categories in figures.memory.items():
            for category, byte_count in categories.items():
                memory.add_metric([self._metrics.model, place, category], byte_count)
        yield memory

    def _counter(self, name: str, text: str, value: float) -> Metric:
        made = CounterMetricFamily(PREFIX + name, text, labels=["model_name"])
        made.add_metric([self._metrics.model], value)
        return made

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        made = GaugeMetricFamily(PREFIX + name, text, labels=["model_name"])
        made.add_metric([self._metrics.model], value)
        return made
