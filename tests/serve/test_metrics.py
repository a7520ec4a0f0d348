"""What /metrics says, before and after requests whose figures are known, and the log lines made of it."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from serve_scene import NAME, Served, running

from glm53.serve import figures
from glm53.serve.loop import Load
from glm53.serve.stats import StatsLog, room_lines

COMPLETIONS = "/v1/completions"
PROMPT = "In the beginning"
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def scrape(served: Served) -> Samples:
    status, headers, raw = served.request("GET", "/metrics")
    assert status == 200 and headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    families = list(text_string_to_metric_families(raw.decode()))
    assert all(family.documentation for family in families)
    return {(one.name, tuple(sorted(one.labels.items()))): one.value for family in families for one in family.samples}


def read(samples: Samples, name: str, **labels: str) -> float:
    """The sum of the samples of a name that have these labels."""
    found = [value for (given, have), value in samples.items() if given == f"glm53:{name}" and labels.items() <= dict(have).items()]
    assert found or labels, f"no {name}"
    return sum(found)


@pytest.fixture
def fresh_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every reader gets figures of its own."""
    monkeypatch.setattr(figures, "READ_EVERY_S", 0.0)


def test_two_scrapes_differ_by_what_was_asked_between_them(served: Served, fresh_figures: None) -> None:
    before = scrape(served)
    asked = [{"prompt": PROMPT, "max_tokens": 9, "n": 2, "seed": 4}, {"prompt": PROMPT * 3, "max_tokens": 5, "ignore_eos": True, "seed": 1}]
    answers = [served.request("POST", COMPLETIONS, body)[2] for body in asked]
    events = served.events("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 7, "seed": 2})
    assert served.request("POST", COMPLETIONS, {"prompt": []})[0] == 400 and served.request("GET", "/nothing/at/all")[0] == 404
    after = scrape(served)

    def grown(name: str, **labels: str) -> float:
        return read(after, name, **labels) - read(before, name, **labels)

    chat_prompt = served.request("POST", "/tokenize", {"messages": [{"role": "user", "content": "Hello"}]})[2]["count"]
    prompts = [answers[0]["usage"]["prompt_tokens"]] * 2 + [answers[1]["usage"]["prompt_tokens"], chat_prompt]
    assert grown("prompt_tokens_total", model_name=NAME) == sum(prompts)
    assert grown("prefix_cache_queries_total") == sum(prompts)
    drawn = sum(answer["usage"]["completion_tokens"] for answer in answers)
    assert drawn < grown("generation_tokens_total") <= drawn + 7 and len(events) > 2
    reasons = [choice["finish_reason"] for answer in answers for choice in answer["choices"]]
    assert grown("request_success_total") == 4
    assert grown("request_success_total", finished_reason="length") >= reasons.count("length") >= 1
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds"):
        assert grown(f"{name}_count") == 4 and 0 < grown(f"{name}_sum") < 30
    assert grown("inter_token_latency_seconds_count") >= drawn - 3
    assert grown("http_requests_total", handler=COMPLETIONS, method="POST", status="200") == 2
    assert grown("http_requests_total", handler=COMPLETIONS, status="400") == 1
    assert grown("http_requests_total", handler="none", status="404") == 1 and not any("nothing" in str(key) for key in after)
    assert grown("kv_recent_hits_total") > 0 and all(grown(f"kv_{name}_total") >= 0 for name in ("hot_hits", "hot_misses", "host_to_device_bytes"))
    assert read(after, "num_requests_running") == read(after, "num_requests_waiting") == 0
    held = served.engine.memory_by_place()
    assert {(dict(key)["place"], dict(key)["category"]) for name, key in after if name == "glm53:memory_bytes"} == {
        (place, category) for place, categories in held.items() for category in categories
    }
    assert read(after, "memory_bytes", place="device 0", category="weights") == held["device 0"]["weights"]


def test_what_runs_is_seen_and_what_is_left_is_an_abort(served: Served, fresh_figures: None) -> None:
    before = scrape(served)
    socks = [served.open(COMPLETIONS, {"prompt": PROMPT, "max_tokens": 400, "ignore_eos": True, "seed": 1, "stream": True}) for _ in range(4)]
    served.wait_for(Load(3, 1))
    until = time.monotonic() + 5
    while read(during := scrape(served), "kv_recent_hits_total") <= read(before, "kv_recent_hits_total"):
        assert time.monotonic() < until, during
    assert (read(during, "num_requests_running"), read(during, "num_requests_waiting")) == (3, 1)
    assert 0 < read(during, "kv_cache_usage_perc") <= 1 and 0 < read(during, "kv_host_usage_perc") <= 1
    for sock in socks:
        sock.close()
    served.wait_for(Load(0, 0))
    until = time.monotonic() + 5
    while read(after := scrape(served), "request_success_total", finished_reason="abort") < 4:
        assert time.monotonic() < until, after
    aborted = read(after, "request_success_total", finished_reason="abort") - read(before, "request_success_total", finished_reason="abort")
    assert aborted == 4 and read(after, "kv_cache_usage_perc") < read(during, "kv_cache_usage_perc")
    hits = [read(one, "kv_recent_hits_total") for one in (before, during, after)]
    assert hits[0] <= hits[1] <= hits[2] > hits[0]


def test_metrics_need_no_key_and_no_model(serve_with: Callable[..., Any]) -> None:
    with serve_with(api_keys=("one",)) as served:
        assert served.request("GET", "/v1/models")[0] == 401
        assert read(scrape(served), "http_requests_total", status="401") == 1
    with running(None) as served:
        assert read(scrape(served), "prompt_tokens_total") == 0


def test_log_lines(served: Served, fresh_figures: None) -> None:
    """A line for the time since the one before, none where nothing was done."""
    stats = StatsLog(served.api.metrics, served.loop.load, served.api.figures)
    line = lambda: asyncio.run(stats.line())
    assert line() is None
    time.sleep(0.2)
    used = served.request("POST", COMPLETIONS, {"prompt": PROMPT * 30, "max_tokens": 20, "ignore_eos": True, "seed": 1})[2]["usage"]
    said = line()
    assert said is not None and said.startswith("running 0, waiting 0; prompt ")
    rates = re.search(r"prompt ([0-9.]+) tokens/s, generation ([0-9.]+) tokens/s; memory for histories ([0-9.]+) %; prefix cache hits", said)
    assert rates is not None and float(rates[2]) > 0, said
    assert float(rates[1]) / float(rates[2]) == pytest.approx(used["prompt_tokens"] / 20, rel=0.05)
    assert line() is None
    assert re.match(r"[1-9][0-9]* requests in \d+ s \(stop \d+, length [1-9]", stats.last_line())
    room = room_lines(served.loop)
    assert "device 0" in room[0] and "host" in room[0]
    found = re.match(r"maximum concurrency for 512 tokens: ([0-9.]+)x by memory, 3 in slots", room[1])
    assert found is not None
    books = served.loop.books
    every = [limit.byte_count / cost for limit, cost in zip(books.limits, books.cost(512, True), strict=True)]
    assert float(found[1]) == pytest.approx(min(every), abs=0.01)
