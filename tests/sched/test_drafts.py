"""The depth policy against a world whose acceptance and step times are known: it finds the best depth and follows a change."""

from __future__ import annotations

import random

import pytest

from glm53.sched.drafts import TRIAL_ROUNDS, DepthPolicy, LoadPolicy


def play(policy: DepthPolicy, rates: list[float], base_us: float, draft_us: float, rounds: int, seed: int) -> list[int]:
    """Depths that the policy gave while drafts were accepted by these rates and a round took base + depth * draft."""
    rng, given, last = random.Random(seed), [], -1
    for _ in range(rounds):
        depth = policy.depth()
        accepted = 0
        while accepted < depth and rng.random() < rates[accepted]:
            accepted += 1
        noise = rng.uniform(0.97, 1.03)
        policy.add(depth, [accepted], (base_us + depth * draft_us) * noise if depth == last else None)
        policy.check()
        last = depth
        given.append(depth)
    return given


def best_of(rates: list[float], base_us: float, draft_us: float) -> int:
    def rate(depth: int) -> float:
        total, chance = 1.0, 1.0
        for place in range(depth):
            chance *= rates[place]
            total += chance
        return total / (base_us + depth * draft_us)

    return max(range(len(rates) + 1), key=rate)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("rates", "draft_us"),
    [([0.9, 0.9, 0.85, 0.8, 0.8], 50.0), ([0.75, 0.7, 0.8, 0.5, 0.4], 150.0), ([0.3, 0.2, 0.2, 0.2, 0.2], 300.0), ([0.02] * 5, 400.0)],
)
def test_finds_the_best_depth(rates: list[float], draft_us: float, seed: int) -> None:
    given = play(DepthPolicy(5), rates, 1000.0, draft_us, 1200, seed)
    wanted, late = best_of(rates, 1000.0, draft_us), given[-400:]
    assert sum(abs(depth - wanted) <= 1 for depth in late) > 0.75 * len(late), (wanted, late)


def test_follows_a_change() -> None:
    policy = DepthPolicy(5)
    play(policy, [0.9] * 5, 1000.0, 60.0, 500, 1)
    assert policy.depth() >= 4
    given = play(policy, [0.05] * 5, 1000.0, 300.0, 6 * TRIAL_ROUNDS, 2)
    assert sum(depth == 0 for depth in given[-TRIAL_ROUNDS:]) > TRIAL_ROUNDS // 2


def test_tries_other_depths_now_and_then() -> None:
    given = play(DepthPolicy(4), [0.5] * 4, 1000.0, 200.0, 8 * TRIAL_ROUNDS, 3)
    assert set(given) == {0, 1, 2, 3, 4}


@pytest.mark.parametrize("depth_max", [0, -1])
def test_refused(depth_max: int) -> None:
    with pytest.raises(ValueError, match="depth_max"):
        DepthPolicy(depth_max)


def test_steps_of_many_rows_have_a_depth_of_their_own() -> None:
    """Drafts cost next to nothing for one row, and more than they bring for many."""
    load = LoadPolicy(5)
    rates = [0.6] * 5
    one = play(load.of(1), rates, 1000.0, 10.0, 600, 1)
    many = play(load.of(12), rates, 1000.0, 900.0, 600, 2)
    assert sum(one[-100:]) / 100 > 3 and sum(many[-100:]) / 100 < 1
    assert load.of(9) is load.of(16) is not load.of(17) and load.of(1) is not load.of(2)
    again = play(load.of(1), rates, 1000.0, 10.0, 100, 3)
    assert sum(again) / 100 > 3, "what was found for many rows is none of one row's business"
    fresh = LoadPolicy(5)
    play(fresh.of(1), [0.1] * 5, 1000.0, 10.0, 100, 4)
    assert fresh.of(8).tokens(1) == fresh.of(1).tokens(1) < 1.5, "what is accepted does not depend on the rows"
