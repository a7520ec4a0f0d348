"""The sampler draws from the distribution it promises: chi-square of many draws against probabilities computed the plain way.

The expected probabilities come from a float64 softmax and the filters' definitions, not from the kernel's integer masses or its reference.
Seeds are fixed, so a run is the same every time; the critical values are those of one failure in a million. The host takes 0.1 ms a draw, so that
there are 100,000 a filter on a GPU and in `scripts/soak --only draws`, and a fifth of that on the host otherwise.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from glm53.check.case import Bench
from glm53.check.reference_sampling import Draw, philox4x32, random_bits
from glm53.hip import Device
from glm53.ops import sampling
from glm53.spec import DType

DRAWS, HOST_DRAWS = 102_400, 20_480
LAUNCH_ROWS = 2048
SEED = 0xC0FFEE1234567890
LOGITS = np.array([0.3, 2.1, -1.0, 1.7, 0.0, 1.2, -1.5, 2.0, 0.9, -0.5, 1.1, 0.6], np.float32)
SEEN = np.array([0, 1, 1, 0, 0, 0, 1, 1, 0, 0, 0, 1], np.uint8)

FILTERS = {
    "plain": Draw(),
    "temperature": Draw(temperature=0.7),
    "hot": Draw(temperature=20.0),
    "top-k": Draw(top_k=5),
    "top-p": Draw(top_p=0.7),
    "min-p": Draw(min_p=0.2),
    "penalty": Draw(repetition_penalty=1.8, seen_row=0),
    "all": Draw(temperature=1.4, top_k=9, top_p=0.9, min_p=0.15, repetition_penalty=1.3, seen_row=0),
}


def expected(draw: Draw) -> np.ndarray:
    """Probabilities [vocab] by the definitions of the filters, one token after the other."""
    logits = [float(x) for x in LOGITS]
    if draw.seen_row >= 0:
        logits = [(x / draw.repetition_penalty if x > 0 else x * draw.repetition_penalty) if s else x for x, s in zip(logits, SEEN, strict=True)]
    weights = [math.exp(x / draw.temperature) for x in logits]
    order = sorted(range(len(weights)), key=lambda i: (-weights[i], i))
    if draw.top_k:
        order = order[: draw.top_k]
    total, running, nucleus = sum(weights[i] for i in order), 0.0, []
    for i in order:
        nucleus.append(i)
        running += weights[i]
        if running >= draw.top_p * total:
            break
    kept = [i for i in nucleus if weights[i] >= draw.min_p * max(weights)]
    probabilities = np.zeros(len(weights))
    for i in kept:
        probabilities[i] = weights[i] / sum(weights[j] for j in kept)
    return probabilities


def draw_tokens(device: Device, draws: list[Draw]) -> np.ndarray:
    """One token for each of `draws`, all from LOGITS."""
    found = []
    with Bench(device) as bench:
        logits, seen = bench.put(np.tile(LOGITS, (LAUNCH_ROWS, 1))), bench.put(SEEN[None])
        scratch = sampling.SampleScratch.make(device, LAUNCH_ROWS, len(LOGITS), "check")
        for first in range(0, len(draws), LAUNCH_ROWS):
            some = draws[first : first + LAUNCH_ROWS]
            tokens, logprobs = bench.poison(DType.I32, (len(some),)), bench.poison(DType.F32, (len(some),))
            params = bench.put(sampling.pack_rows([(d, d.seed, d.position, d.seen_row) for d in some]))
            sampling.sample(bench.stream, scratch, logits.slice(0, len(some)), params, seen, tokens, logprobs, None, sampling.Stage.of(some))
            found.append(bench.read(tokens))
        scratch.free()
    return np.concatenate(found)


def chi_square(counts: np.ndarray, probabilities: np.ndarray) -> tuple[float, float]:
    """(statistic, critical value at 1e-6) over cells of positive probability; infinite if an impossible cell was hit."""
    possible = probabilities > 0
    if counts[~possible].any():
        return math.inf, 0.0
    want = probabilities[possible] * counts.sum()
    assert want.min() >= 5, "a cell is too rare for a chi-square: take more draws"
    freedom = int(possible.sum()) - 1
    # Wilson and Hilferty: the cube root of chi-square / freedom is nearly normal.
    critical = freedom * (1 - 2 / (9 * freedom) + 4.75 * math.sqrt(2 / (9 * freedom))) ** 3
    return float(((counts[possible] - want) ** 2 / want).sum()), critical


def count(device: Device) -> int:
    return HOST_DRAWS if device.runtime.name == "cpu" else DRAWS


@pytest.mark.parametrize("name", FILTERS)
def test_draws_follow_the_distribution(device: Device, name: str) -> None:
    check_filter(device, name, count(device))


def check_filter(device: Device, name: str, count: int) -> None:
    """Half the draws vary the position, half the seed: both must give independent numbers."""
    draw = FILTERS[name]
    half = count // 2
    draws = [replace(draw, seed=SEED, position=i) for i in range(half)] + [replace(draw, seed=SEED + i, position=7) for i in range(half)]
    tokens = draw_tokens(device, draws)
    for part in (tokens[:half], tokens[half:], tokens):
        statistic, critical = chi_square(np.bincount(part, minlength=len(LOGITS)), expected(draw))
        assert statistic < critical, f"{name}: chi-square {statistic:.1f}, critical {critical:.1f}"


def test_neighbouring_positions_and_seeds_are_independent(device: Device) -> None:
    draw, half = Draw(top_k=4), count(device) // 2
    cases = {
        "positions": [replace(draw, seed=SEED, position=i) for i in range(2 * half)],
        "seeds": [replace(draw, seed=SEED + i, position=0) for i in range(2 * half)],
    }
    single = expected(draw)
    for name, draws in cases.items():
        tokens = draw_tokens(device, draws).reshape(half, 2)
        pairs = np.bincount(tokens[:, 0] * len(LOGITS) + tokens[:, 1], minlength=len(LOGITS) ** 2)
        statistic, critical = chi_square(pairs, np.outer(single, single).reshape(-1))
        assert statistic < critical, f"{name}: chi-square of pairs {statistic:.1f}, critical {critical:.1f}"


def test_the_statistic_sees_a_wrong_distribution(device: Device) -> None:
    """A temperature 10 % off and a top-k one too large both fail, so the checks above have the power they claim."""
    tokens = draw_tokens(device, [Draw(temperature=1.1, seed=SEED, position=i) for i in range(count(device))])
    counts = np.bincount(tokens, minlength=len(LOGITS))
    for wrong in (Draw(), Draw(temperature=1.1, top_k=11)):
        statistic, critical = chi_square(counts, expected(wrong))
        assert statistic > critical


def test_same_seed_and_position_give_the_same_token(device: Device) -> None:
    draws = [Draw(seed=SEED, position=i % 64) for i in range(256)]
    tokens = draw_tokens(device, draws).reshape(4, 64)
    assert (tokens == tokens[0]).all()
    assert len(set(tokens[0].tolist())) > 3


def test_reference_philox_gives_the_published_words() -> None:
    """Known answers of Random123 1.14 (kat_vectors, philox4x32 10)."""
    ones = 0xFFFFFFFF
    assert philox4x32((0, 0, 0, 0), (0, 0)) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    assert philox4x32((ones,) * 4, (ones, ones)) == (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)
    pi = ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0))
    assert philox4x32(*pi) == (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)
    assert random_bits(0, 0) == 0xE169C58D6627E8D5
