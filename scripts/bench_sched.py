#!/usr/bin/env python3
"""Time that the scheduler takes for a step of many sessions: turns, admission and histories at rest, without an engine.

    scripts/bench_sched.py --sessions 64 --steps 2000

Steady: every session decodes. Traffic: in every eighth step one request ends, leaves its prompt and another one comes, whose prompt begins with one
that is kept. Microseconds a step: median, 99th percentile, longest. A step of the traffic is everything up to the next decode step, chunks included.
"""

import statistics
import time

import click
import numpy as np

from glm53.mem.ledger import HOST, device_place
from glm53.sched.admission import Books, Limit, Price
from glm53.sched.queue import Step
from glm53.sched.scheduler import Drop, Leaving, Rest, Scheduler, Start

PROMPT_ROWS, CHUNK_ROWS = 2048, 512
FEW_BYTES = 1 << 44


def measure(sessions: int, steps: int, traffic: bool) -> list[float]:
    """Microseconds of each step."""
    prices = [Price(HOST, "history rows", False, 0, 256, 1 << 20), Price(device_place(0), "index keys", True, 1 << 20, 256, 1 << 16)]
    scheduler = Scheduler(Books(prices, [Limit(HOST, FEW_BYTES, ""), Limit(device_place(0), FEW_BYTES, "")]), sessions, CHUNK_ROWS, parked_max=8)
    rng = np.random.default_rng(1)
    texts = [rng.integers(0, 1000, PROMPT_ROWS, dtype=np.int32) for _ in range(sessions)]
    prompts = {scheduler.add(str(i % 4), text, 2 * PROMPT_ROWS): text for i, text in enumerate(texts)}
    taken: list[float] = []
    keys, began, running = iter(range(1 << 30)), time.perf_counter(), 0
    while len(taken) < steps:
        action = scheduler.next()
        if isinstance(action, Start):
            scheduler.started(action.serial, action.rows)
            running += 1
        elif isinstance(action, Step):
            now = time.perf_counter()
            if len(action.serials) == sessions or (traffic and running >= sessions):
                taken.append((now - began) * 1e6)
            if traffic and running >= sessions and len(taken) % 8 == 0:
                ended = action.serials[len(taken) % len(action.serials)]
                text = prompts.pop(ended)
                keeps = scheduler.leaves(ended, PROMPT_ROWS)
                scheduler.finish(ended, Leaving(next(keys), text, PROMPT_ROWS, False, True) if keeps else None)
                longer = np.concatenate([text, rng.integers(0, 1000, 300, dtype=np.int32)])[-4 * PROMPT_ROWS :]
                prompts[scheduler.add(str(len(taken) % 4), longer, 2 * len(longer))] = longer[:PROMPT_ROWS]
            began = time.perf_counter()
        else:
            assert action is None or not isinstance(action, Drop | Rest) or traffic
    return taken


@click.command(help=__doc__)
@click.option("--sessions", type=click.IntRange(1), default=64, show_default=True)
@click.option("--steps", type=click.IntRange(100), default=2000, show_default=True)
def main(sessions: int, steps: int) -> None:
    for traffic in (False, True):
        taken = sorted(measure(sessions, steps, traffic))
        name, high = "traffic" if traffic else "steady", taken[len(taken) * 99 // 100]
        print(f"{name}: {sessions} sessions, median {statistics.median(taken):.0f} us, 99 % {high:.0f} us, most {taken[-1]:.0f} us")


if __name__ == "__main__":
    main()
