"""Requests that may not draw every token: the same tokens on every tier, pair and depth of drafts, and nothing changes for requests beside
them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tier_scene
from tier_scene import RING, VOCAB

from glm53 import Engine, SamplingParams
from glm53.errors import Glm53Error, InputError
from glm53.hip import runtime
from glm53.request import Batch, Request
from glm53.sched.queue import Queue

MODEL: dict[str, Any] = {"layers": 5, "seed": 12, "mtp": True, "overrides": {"moe_intermediate_size": 192}}
PROMPTS = [[(i * 37 + 11) % VOCAB for i in range(150)], [5, 3, 1], [(i * 5 + 2) % VOCAB for i in range(90)]]
PARAMS = [
    SamplingParams(temperature=0.8, top_p=0.9, repetition_penalty=1.1, seed=3, max_tokens=20, logprobs=3, ignore_eos=True),
    SamplingParams(temperature=0.0, seed=1, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=1.0, top_k=40, seed=5, max_tokens=20, ignore_eos=True),
]


class Few:
    """A constraint: a few tokens that depend on all that were drawn before. ends: after so many; fails: with the token after so many."""

    def __init__(self, seed: int, ends: int = 1 << 30, fails: int = 1 << 30):
        self.seed, self.ends, self.fails, self.drawn = seed, ends, fails, list[int]()

    def allowed(self) -> np.ndarray:
        return np.random.default_rng([self.seed, *self.drawn]).choice(VOCAB, 4, replace=False)

    @property
    def mask(self) -> np.ndarray:
        bits = np.zeros(32 * -(-VOCAB // 32), np.uint8)
        bits[self.allowed()] = 1
        return np.packbits(bits, bitorder="little").view(np.uint32)

    def accept(self, token_id: int) -> bool:
        assert token_id in self.allowed()
        self.drawn.append(token_id)
        if len(self.drawn) > self.fails:
            raise InputError("too complex")
        return len(self.drawn) >= self.ends


def run(engine: Engine, requests: Sequence[Request]) -> list[Glm53Error]:
    """All of them together to their ends; the errors of those that failed."""
    queue, errors = Queue(engine.sessions_max, engine.config.prefill_chunk_rows, chunks_per_step=1), []
    batch = Batch(queue, {queue.add(len(request.prompt)): request for request in requests})
    while (action := batch.queue.next()) is not None:
        errors += [error for _, error in engine.act(action, batch).failed]
    return errors


def tokens_of(engine: Engine, constraints: Sequence[Few | None]) -> list[list[int]]:
    requests = [engine.request(p, s, i, c) for i, (p, s, c) in enumerate(zip(PROMPTS, PARAMS, constraints, strict=True))]
    assert not run(engine, requests)
    return [request.tokens for request in requests]


SETTINGS: list[tuple[str, dict[str, Any]]] = [
    ("resident", {"kv_tier": "resident"}),
    ("host", {"hot_rows": RING + 40}),
    ("launch by launch", {"kv_tier": "resident", "graphs": False}),
    ("drafts", {"hot_rows": RING + 40, "mtp": "3"}),
    ("drafts by the policy", {"kv_tier": "resident", "mtp": "auto"}),
    ("pair", {"hot_rows": RING + 40, "devices": (0, 1)}),
    ("pair by copies with drafts", {"kv_tier": "resident", "devices": (0, 1), "p2p": "off", "mtp": "2"}),
]


@pytest.mark.parametrize(("name", "changes"), SETTINGS, ids=[name for name, _ in SETTINGS])
def test_masks_hold_and_change_nothing_beside_them(name: str, changes: dict[str, Any], make_checkpoint: Callable[..., Path]) -> None:
    if "devices" in changes and runtime.select().device_count < 2:
        pytest.skip("a pair needs two devices")
    path = make_checkpoint(**MODEL)
    with tier_scene.open_resident(path) as plain:
        free = tokens_of(plain, [None, None, None])
        logits_of = lambda ids, forced: plain.generate_logits(ids, len(forced), forced)[1]
        greedy = tokens_of(plain, [None, Few(2), None])[1]
        watch = Few(2)
        for row, token in zip(logits_of(PROMPTS[1], greedy), greedy, strict=True):
            allowed = np.sort(watch.allowed())
            assert token == allowed[row[allowed].argmax()]
            watch.accept(token)
        masked = tokens_of(plain, [Few(1), None, None])[0]
    with Engine.open(path, **tier_scene.settings(**({"hot_rows": RING + 40} | changes))) as engine:
        assert tokens_of(engine, [None, Few(2), None]) == [free[0], greedy, free[2]]
        assert tokens_of(engine, [Few(1), None, None]) == [masked, free[1], free[2]]
        assert tokens_of(engine, [Few(1), Few(2), None]) == [masked, greedy, free[2]]
        assert tokens_of(engine, [None, None, None]) == free  # and what was recorded for masks is not used without
        tier_scene.assert_all_given_back(engine, name)


def test_a_constraint_ends_its_request_or_fails_it_alone(make_checkpoint: Callable[..., Path]) -> None:
    with tier_scene.open_resident(make_checkpoint(**MODEL)) as engine:
        free = tokens_of(engine, [None, None, None])
        constraints = [Few(1, ends=3), None, Few(2, fails=2)]
        requests = [engine.request(p, s, i, c) for i, (p, s, c) in enumerate(zip(PROMPTS, PARAMS, constraints, strict=True))]
        errors = run(engine, requests)
        assert [str(error) for error in errors] == ["too complex"] and requests[2].finish_reason is None
        assert len(requests[0].tokens) == 3 and requests[0].finish_reason == "stop" and requests[1].tokens == free[1]
        tier_scene.assert_all_given_back(engine, "ended")
