"""Checks of the sampler: each filter alone and together, ties across each boundary, non-finite logits, seeds and positions at their ends.

Tokens must equal the reference's exactly, log-probabilities to a tolerance.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import numpy as np

from glm53.check import reference_sampling as reference
from glm53.check.case import Bench, Case, draw
from glm53.check.compare import Comparison, Tolerance, compare, worst_of
from glm53.check.reference_sampling import Draw
from glm53.hip import Device
from glm53.ops import sampling
from glm53.spec import DType

LOGPROB = Tolerance(2e-5, 2e-6, 1e-6, "an f32 sum of up to 154,880 exponentials, its logarithm, and logits of magnitude up to about 100")
TOPS = 20  # columns of the top log-probabilities

FILTERS = (
    Draw(temperature=0.0),
    Draw(temperature=0.0, logprobs=3),
    Draw(),
    Draw(logprobs=20),
    Draw(temperature=0.7),
    Draw(temperature=1e-6),
    Draw(temperature=1e-30),
    Draw(temperature=1e30),
    Draw(top_k=1),
    Draw(top_k=2, logprobs=1),
    Draw(top_k=50),
    Draw(top_k=2**31 - 1),
    Draw(top_p=1e-6),
    Draw(top_p=0.5),
    Draw(top_p=0.95),
    Draw(top_p=0.99999994),
    Draw(min_p=1.0),
    Draw(min_p=0.05),
    Draw(min_p=1e-9),
    Draw(temperature=1.3, top_k=40, top_p=0.9, min_p=0.02, logprobs=5),
    Draw(temperature=5.0, top_k=7, top_p=0.3),
    Draw(temperature=2.0, top_p=0.8, min_p=0.5),
)
MASKS = (0.5, 0.0, 1.0, 0.01, 0.9, -1.0)  # share of tokens that may be drawn; 0: the first and the last one, -1: none at all
ENDS = tuple(
    Draw(temperature=1.5, seed=seed, position=position)
    for seed in (0, 1, 2**32 - 1, 2**32, 2**63, 2**64 - 1)
    for position in (0, 1, 2**31 - 1, 2**31, 2**32 - 1)
)


def seeded(draws: tuple[Draw, ...]) -> tuple[Draw, ...]:
    """The same settings with a seed and a position of their own for each row."""
    return tuple(replace(d, seed=0x9E3779B97F4A7C15 * (i + 1) % 2**64, position=17 * i) for i, d in enumerate(draws))


def mixed(rows: int) -> tuple[Draw, ...]:
    """Random combinations of all filters: boundaries that fall together, above and below each other."""
    rng = np.random.default_rng(rows)
    return tuple(
        Draw(
            temperature=float(rng.choice([0.5, 1.0, 3.0, 9.0])),
            top_k=int(rng.choice([0, 2, 5, 20, 60])),
            top_p=float(rng.choice([1.0, 0.9, 0.6, 0.2, 0.01])),
            min_p=float(rng.choice([0.0, 0.0, 0.1, 0.7])),
            repetition_penalty=float(rng.choice([1.0, 1.2])),
            seen_row=int(rng.integers(-1, 3)),
            seed=int(rng.integers(0, 2**63)),
            position=int(rng.integers(0, 2**32)),
            logprobs=int(rng.integers(0, TOPS + 1)),
            mask_row=int(rng.integers(-1, len(MASKS))),
        )
        for _ in range(rows)
    )


def masked(draws: tuple[Draw, ...]) -> tuple[Draw, ...]:
    """The same settings with the masks of `fill_masks` in turn, each third row without one."""
    return tuple(replace(d, mask_row=i % len(MASKS) if i % 3 else -1) for i, d in enumerate(draws))


def fill_masks(vocab: int) -> np.ndarray:
    """[MASKS, vocab] bool, in the order of `MASKS`."""
    rng = np.random.default_rng(vocab)
    masks = np.stack([rng.random(vocab) < share for share in MASKS])
    masks[MASKS.index(0.0), [0, vocab - 1]] = True, vocab > 1  # the first and the last token
    masks[-1] = False
    return masks


def pack_masks(masks: np.ndarray) -> np.ndarray:
    """[rows, mask_words(vocab)] uint32 of masks [rows, vocab] bool; bits past the end are set, which mean nothing."""
    rows, vocab = masks.shape
    words = np.ones((rows, 32 * sampling.mask_words(vocab)), np.uint8)
    words[:, :vocab] = masks
    return np.packbits(words, axis=1, bitorder="little").view(np.uint32)


def fill_logits(kind: str, rows: int, vocab: int) -> np.ndarray:
    logits = draw(vocab, (rows, vocab), spread=3.0)
    if kind == "equal":
        return np.full((rows, vocab), np.float32(-2.5))
    if kind == "steps":
        return np.round(logits).astype(np.float32)
    if kind == "flat":  # masses within a factor of two: the filters cut deep into the vocabulary
        return (logits * np.float32(0.1)).astype(np.float32)
    if kind == "signed-zeros":
        return np.where(logits > 0, np.float32(0.0), np.float32(-0.0))
    if kind == "one-hot":
        return np.where(np.arange(vocab) == vocab // 2, np.float32(50.0), np.float32(-50.0)) + np.zeros((rows, 1), np.float32)
    if kind == "non-finite":
        logits[:, ::3], logits[:, 1::7] = np.nan, -np.inf
        logits[1::4] = -np.inf  # nothing to draw
        logits[2::4] = np.nan
        logits[3::4, :: max(vocab // 3, 1)] = np.inf  # several certain tokens
    return logits


@contextmanager
def scratch_of(device: Device, rows: int, vocab: int) -> Iterator[sampling.SampleScratch]:
    """Scratch of poison, but for what the kernels expect to be 0."""
    scratch = sampling.SampleScratch.make(device, rows, vocab, "check")
    for array in (scratch.records, scratch.groups, scratch.states, scratch.masses, scratch.counts, scratch.entries):
        device.default_stream.fill(array.address, 0xFF, array.nbytes)
    try:
        yield scratch
    finally:
        device.synchronize()
        scratch.free()


def run_sample(kind: str, vocab: int, draws: tuple[Draw, ...], device: Device) -> Comparison:
    """All rows together against the reference, then some of them alone, in no more launches than they need: the same bits."""
    rows = len(draws)
    logits = fill_logits(kind, rows, vocab)
    seen = (np.random.default_rng(vocab).random((3, vocab)) < 0.4).astype(np.uint8)
    allowed = fill_masks(vocab)
    want_tokens = np.array([reference.sample(logits[r], d, seen, allowed) for r, d in enumerate(draws)], np.int32)
    want_logprobs = np.array([reference.log_probabilities(logits[r])[t] if t >= 0 else -np.inf for r, t in enumerate(want_tokens)], np.float32)
    wanted = [reference.top_logprobs(logits[r], d.logprobs or 0 if want_tokens[r] >= 0 else 0, TOPS) for r, d in enumerate(draws)]
    with Bench(device) as bench, scratch_of(device, rows, vocab) as scratch:
        marks, masks = bench.put(seen), bench.put(pack_masks(allowed))

        def run(of: slice) -> list[np.ndarray]:
            count, every = len(draws[of]), [d.mask_row for d in draws[of]]
            outputs = [
                bench.poison(DType.I32, (count,)),
                bench.poison(DType.F32, (count,)),
                bench.poison(DType.I32, (count, TOPS)),
                bench.poison(DType.F32, (count, TOPS)),
            ]
            params = bench.put(sampling.pack_rows([(d, d.seed, d.position, d.seen_row) for d in draws[of]], every))
            tops, stage = (outputs[2], outputs[3]), sampling.Stage.of(draws[of])
            given = masks if max(every) >= 0 else None  # rows without a mask have the same bits alone, where there are none
            sampling.sample(bench.stream, scratch, bench.put(logits[of]), params, marks, outputs[0], outputs[1], tops, stage, masks=given)
            return [bench.read(output) for output in outputs]

        together = run(slice(0, rows))
        for r in range(0, rows, 5):
            for label, alone, beside in zip(("token", "logprob", "top ids", "top logprobs"), run(slice(r, r + 1)), together, strict=True):
                compare(f"{label} of row {r} alone", alone.view(np.uint32), beside[r : r + 1].view(np.uint32))
    return worst_of(
        compare("tokens", together[0], want_tokens),
        compare("logprobs", together[1], want_logprobs, LOGPROB),
        compare("top ids", together[2], np.stack([ids for ids, _ in wanted])),
        compare("top logprobs", together[3], np.stack([values for _, values in wanted]), LOGPROB),
    )


def run_mark(device: Device) -> Comparison:
    """Marks of what greedy and drawn rows draw, one row of `seen` each; rows without one, and rows with nothing to draw, mark nothing."""
    rows, vocab = 12, 300
    logits = draw(8, (rows, vocab), spread=3.0)
    logits[3] = -np.inf
    draws = [Draw(temperature=float(r % 2), seed=r, seen_row=-1 if r % 5 == 4 else r, repetition_penalty=1.3 if r % 3 else 1.0) for r in range(rows)]
    marks = (np.random.default_rng(3).random((rows, vocab)) < 0.4).astype(np.uint8)
    want = marks.copy()
    for r, d in enumerate(draws):
        token = reference.sample(logits[r], d, marks)
        if token >= 0 and d.seen_row >= 0:
            want[d.seen_row, token] = 1
    with Bench(device) as bench:
        seen, params = bench.put(marks), bench.put(sampling.pack_rows([(d, d.seed, d.position, d.seen_row) for d in draws]))
        outputs = (bench.poison(DType.I32, (rows,)), bench.poison(DType.F32, (rows,)), None)
        with scratch_of(device, rows, vocab) as scratch:
            sampling.sample(bench.stream, scratch, bench.put(logits), params, seen, *outputs, marks=True)
            return compare("seen", bench.read(seen), want)


_PENALTIES = tuple(
    replace(d, repetition_penalty=penalty, seen_row=row) for d in FILTERS[::3] for penalty, row in ((1.3, 0), (0.5, 2), (1.0, 1), (7.0, -1))
)
_BROAD = tuple(replace(d, temperature=4.0) for d in FILTERS)  # hot: the draw falls all over the vocabulary

CASES = [
    *(Case("sampling", f"filters-{vocab}", partial(run_sample, "random", vocab, seeded(FILTERS))) for vocab in (1, 2, 63, 257, 2049, 4096)),
    *(
        Case("sampling", f"{kind}-{vocab}", partial(run_sample, kind, vocab, seeded(_BROAD)))
        for kind in ("equal", "steps", "flat")
        for vocab in (64, 5000)
    ),
    *(Case("sampling", kind, partial(run_sample, kind, 1000, seeded(FILTERS))) for kind in ("signed-zeros", "one-hot", "non-finite")),
    Case("sampling", "non-finite-3", partial(run_sample, "non-finite", 3, seeded(FILTERS))),
    *(Case("sampling", f"mixed-{kind}", partial(run_sample, kind, 100, mixed(400))) for kind in ("random", "steps", "flat", "equal")),
    *(Case("sampling", f"masks-{vocab}", partial(run_sample, "random", vocab, masked(seeded(FILTERS)))) for vocab in (1, 31, 33, 257, 2051, 4096)),
    *(Case("sampling", f"masks-{kind}", partial(run_sample, kind, 1000, masked(seeded(_BROAD)))) for kind in ("equal", "steps", "non-finite")),
    Case("sampling", "masks-penalties", partial(run_sample, "random", 777, masked(seeded(_PENALTIES)))),
    Case("sampling", "masks-released-vocabulary", partial(run_sample, "random", 154_880, masked(seeded(FILTERS[1::4])))),
    Case("sampling", "mixed-chunks", partial(run_sample, "flat", 6001, mixed(48))),
    Case("sampling", "mixed-chunks-aligned", partial(run_sample, "random", 6000, mixed(40))),
    Case("sampling", "seeds-and-positions", partial(run_sample, "random", 500, ENDS)),
    Case("sampling", "penalties", partial(run_sample, "random", 777, seeded(_PENALTIES))),
    Case("sampling", "released-vocabulary", partial(run_sample, "random", 154_880, seeded(FILTERS[2::4]))),
    Case("sampling", "released-vocabulary-steps", partial(run_sample, "steps", 154_880, seeded(_BROAD)), thorough=True),
    Case("sampling", "mark-seen", run_mark),
]
