"""numpy reference of the sampler, exact: the same integer masses, so tokens must be equal, not near.

`exp_mass` repeats the kernel's exponential step by step. A fused multiply-add of float32 is a float64 product (exact, 48 bits) and sum,
rounded to float32; the second rounding changes the result in about 1 of 2^29 cases.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

_F32 = np.float32
_WORD = (1 << 32) - 1


@dataclass(frozen=True)
class Draw:
    """Settings of one row, as `glm53.ops.sampling.pack_rows` takes them, with the seed, position and rows of `seen` and of the masks."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    position: int = 0
    seen_row: int = -1
    logprobs: int | None = None
    mask_row: int = -1


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox 4x32-10 of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (b >> 32) ^ c1 ^ k0, b & _WORD, (a >> 32) ^ c3 ^ k1, a & _WORD
        k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
    return c0, c1, c2, c3


def random_bits(seed: int, position: int) -> int:
    """64 bits: the first two words at key = seed, counter = (position, 0, 0, 0)."""
    low, high, _, _ = philox4x32((position, 0, 0, 0), (seed & _WORD, seed >> 32))
    return (high << 32) | low


def _fma(a: np.ndarray, b: np.ndarray | float, c: np.ndarray | float) -> np.ndarray:
    return (a.astype(np.float64) * np.asarray(b, _F32).astype(np.float64) + np.asarray(c, _F32).astype(np.float64)).astype(_F32)


def exp_mass(d: np.ndarray) -> np.ndarray:
    """floor(2^32 * exp(d)) as uint64 for float32 d <= 0; 0 below 2^-32."""
    live = d > _F32(-22.25)
    x = np.where(live, d, _F32(0)).astype(_F32)
    k = np.rint(x * _F32(1.44269504088896341)).astype(_F32)
    r = _fma(k, 2.12194440e-4, _fma(k, -0.693359375, x))
    p = _fma(np.full_like(r, _F32(1.9875691500e-4)), r, 1.3981999507e-3)
    for coefficient in (8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = _fma(p, r, coefficient)
    p = (_fma(p, (r * r).astype(_F32), r) + _F32(1)).astype(_F32)
    mass = np.floor(np.ldexp(p.astype(np.float64), 32 + k.astype(np.int32))).astype(np.uint64)
    return np.where(live, mass, np.uint64(0))


def share_of(share: float, total: int) -> int:
    """The least whole mass of at least `share` (rounded to float32) of the total, and at least 1."""
    exact = float(_F32(share)) * float(total)
    whole = int(exact)
    return min(max(whole + (whole < exact), 1), total)


def adjusted(logits: np.ndarray, draw: Draw, seen: np.ndarray | None, masks: np.ndarray | None = None) -> np.ndarray:
    """Logits after the repetition penalty; NaN is -inf, and so are those that the mask [rows, vocab] bool leaves out."""
    values = logits.astype(_F32).copy()
    if seen is not None and draw.seen_row >= 0 and draw.repetition_penalty != 1.0:
        penalty, marked = _F32(draw.repetition_penalty), seen[draw.seen_row] != 0
        with np.errstate(over="ignore", invalid="ignore"):
            values = np.where(marked, np.where(values > 0, values / penalty, values * penalty), values).astype(_F32)
    dropped = np.isnan(values) if masks is None or draw.mask_row < 0 else np.isnan(values) | ~masks[draw.mask_row]
    return np.where(dropped, _F32(-np.inf), values)


def masses(values: np.ndarray, draw: Draw) -> np.ndarray:
    """uint64 mass of every token after all filters; 0 for what they drop. values: from `adjusted`, at least one above -inf."""
    top = values.max()
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        d = np.where(values == top, _F32(0), (values - top) / _F32(draw.temperature)).astype(_F32)
    mass = exp_mass(d)
    kept = np.argsort(-values, kind="stable")  # the most probable first, equal ones in token order
    if 0 < draw.top_k < len(kept):
        kept = kept[: draw.top_k]
    if _F32(draw.top_p) < 1:
        running = np.cumsum(mass[kept])
        kept = kept[: int(np.searchsorted(running, np.uint64(share_of(draw.top_p, int(running[-1]))))) + 1]
    if draw.min_p > 0:
        kept = kept[mass[kept] >= np.uint64(share_of(draw.min_p, 1 << 32))]
    filtered = np.zeros_like(mass)
    filtered[kept] = mass[kept]
    return filtered


def sample(logits: np.ndarray, draw: Draw, seen: np.ndarray | None = None, masks: np.ndarray | None = None) -> int:
    """The token of one row: logits [vocab] f32, seen [sessions, vocab] or None, masks [rows, vocab] bool or None. -1 if no logit that may be drawn
    is above -inf."""
    values = adjusted(logits, draw, seen, masks)
    if values.max() == -np.inf:
        return -1
    if draw.temperature == 0:
        return int(np.argmax(values))
    running = np.cumsum(masses(values, draw))
    point = (random_bits(draw.seed, draw.position) * int(running[-1])) >> 64
    return int(np.searchsorted(running, np.uint64(point), side="right"))


def log_probabilities(logits: np.ndarray) -> np.ndarray:
    """log-softmax of the raw logits [vocab] in float64; NaN counts as -inf, +inf as the only candidates."""
    values = np.where(np.isnan(logits), -np.inf, logits.astype(np.float64))
    top = values.max()
    if top == -np.inf:
        return values
    with np.errstate(invalid="ignore"):
        d = np.where(values == top, 0.0, values - top)
    return d - np.log(np.exp(d).sum())


def top_logprobs(logits: np.ndarray, wanted: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """(ids [width] i32, log-probabilities [width] f32) of the `wanted` most probable tokens, ties to the lowest; then -1 and -inf."""
    ids, values = np.full(width, -1, np.int32), np.full(width, -np.inf, np.float32)
    logprobs = log_probabilities(logits)
    if logprobs.max() > -np.inf:
        best = np.argsort(-np.where(np.isnan(logits), -np.inf, logits), kind="stable")[:wanted]
        ids[: len(best)], values[: len(best)] = best, logprobs[best]
    return ids, values
