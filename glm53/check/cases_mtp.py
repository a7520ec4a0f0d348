"""Cases of the kernels between the passes of speculative decoding: every way a draft can be refused, padding, marks, records, rows of any width.

Everything but the norms is integers and copies, compared exactly; the joined norms are compared bit by bit with `basic.rms_norm` as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from glm53.check import reference_mtp as reference
from glm53.check.case import Bench, Case, draw
from glm53.check.compare import SAME_ROUNDING, Comparison, compare, worst_of
from glm53.check.reference_mtp import Round
from glm53.check.reference_sampling import Draw
from glm53.hip import Array, Device
from glm53.ops import basic, mtp, sampling
from glm53.ops.step_state import Ring
from glm53.spec import DType

EPS = 1e-5
RING_STEPS = 4


def run_join(rows: int, n: int, dtype: DType, device: Device) -> Comparison:
    x, hidden = draw(1, (rows, n), dtype), draw(2, (rows, n), dtype, 30.0)
    x_norm, hidden_norm = draw(3, (n,), dtype), draw(4, (n,), dtype)
    with Bench(device) as bench:
        dx, dh, dxn, dhn = (bench.put(values, dtype) for values in (x, hidden, x_norm, hidden_norm))
        y, alone = bench.poison(dtype, (rows, 2 * n)), [bench.poison(dtype, (rows, n)) for _ in range(2)]
        mtp.join_inputs(bench.stream, dx, dh, dxn, dhn, y, EPS)
        basic.rms_norm(bench.stream, dx, dxn, alone[0], EPS)
        basic.rms_norm(bench.stream, dh, dhn, alone[1], EPS)
        compare("bits of rms_norm", bench.bits(y), np.concatenate([bench.bits(half) for half in alone], axis=1))
        return compare("y", bench.read(y), reference.join_inputs(x, hidden, x_norm, hidden_norm, EPS, dtype), SAME_ROUNDING[dtype])


@dataclass(frozen=True)
class Accept:
    """kind: "mixed", each draft its own fate; "all" and "none" accepted. tops: None or how many most probable tokens are kept."""

    sessions: int
    drafts: int
    kind: str = "mixed"
    vocab: int = 97
    tops: int | None = None
    marks: bool = True
    link_error: int | None = None


def draw_round(case: Accept, rng: np.random.Generator) -> Round:
    """A round at random. The drafts of "mixed" sessions are refused by another token, by none drawn, by having no position, or not at all; every
    seventh session is none."""
    sessions, rows = case.sessions, case.drafts + 1
    drawn = rng.integers(0, case.vocab, (sessions, rows)).astype(np.int32)
    tokens = np.concatenate([rng.integers(0, case.vocab, (sessions, 1)), drawn[:, :-1]], axis=1).astype(np.int32)
    positions = (rng.integers(0, 1 << 20, (sessions, 1)) + np.arange(rows)).astype(np.int32)
    for s in range(sessions):
        for i in range(1, rows) if case.kind == "mixed" else ():
            fate = rng.integers(0, 10)
            if fate == 0:
                positions[s, i:] = -1
            if fate == 1:
                drawn[s, i - 1] = tokens[s, i] = -1
            if fate in (2, 3):
                tokens[s, i] = (drawn[s, i - 1] + 1) % case.vocab
        if case.kind == "none":
            tokens[s, 1] = (drawn[s, 0] + 1) % case.vocab
        if case.kind == "mixed" and s % 7 == 6:
            positions[s] = -1
    settings = [
        Draw(0.5 + s, 3 * s, 0.9, 0.01, 1.1, seed=(7 << 40) + s, position=0, seen_row=-1 if s % 3 == 2 else s * rows, logprobs=s % 5)
        for s in range(sessions)
    ]
    packed = [(d, d.seed + i, int(positions[s, i]) + 1 if i else 5, d.seen_row) for s, d in enumerate(settings) for i in range(rows)]
    slots = rng.permutation(sessions + 2)[:sessions].astype(np.int32)
    slots[4::5] = -1
    poison = lambda *shape: np.full(shape, -1, np.int32)
    return Round(
        tokens,
        drawn,
        positions,
        sampling.pack_rows(packed).reshape(sessions, rows, -1),
        slots,
        (rng.random((sessions + 2, case.vocab)) < 0.2).astype(np.uint8) if case.marks else None,
        reference.blank_params((case.drafts, sessions)),
        poison(sessions),
        poison(sessions, rows),
        poison(sessions, rows),
        poison(sessions),
    )


class DeviceRound:
    """The arrays of a round on a device, flat as the kernels take them, and what goes with them into the record."""

    FLAT = ("tokens", "drawn", "positions", "front_tokens", "front_positions")

    def __init__(self, bench: Bench, before: Round):
        self.bench, self.before = bench, before
        flat = {name: getattr(before, name).reshape(-1) for name in self.FLAT}
        rest = {name: getattr(before, name) for name in ("draft_params", "accepted", "last", "slots")}
        values = flat | rest | {"params": before.params.reshape(-1, before.params.shape[-1])}
        self.arrays: dict[str, Array] = {name: bench.put(array) for name, array in values.items()}
        self.seen = None if before.seen is None else bench.put(before.seen)

    def compare(self, want: Round) -> Comparison:
        """All arrays with those of a round."""
        found = [compare(name, self.bench.read(array), getattr(want, name).reshape(array.shape)) for name, array in self.arrays.items()]
        if self.seen is not None and want.seen is not None:
            found.append(compare("seen", self.bench.read(self.seen), want.seen))
        return worst_of(*found)


def compare_record(record: mtp.Record, head: tuple[int, int, int], want: Round, logprobs: np.ndarray, tops: tuple[np.ndarray, ...]) -> Comparison:
    """A record with what a round was given; logprobs [S, k + 1] f32, tops () or (ids, logprobs) [S, k + 1, n]."""
    compare("record head", np.array([record.step, record.row_error, record.link_error]), np.array(head))
    compare("record accepted", record.accepted, want.accepted)
    compare("record logprobs", record.logprobs.view(np.uint32), logprobs.view(np.uint32))
    for got, expected in zip(record.tops or (), tops, strict=True):
        compare("record tops", got.view(np.uint32), expected.view(np.uint32))
    return compare("record tokens", record.tokens, want.drawn)


def run_accept(case: Accept, device: Device) -> Comparison:
    """Two rounds one after the other on the same memory, the second at the next step and without an error of a row."""
    rng = np.random.default_rng(case.sessions * 100 + case.drafts)
    shape, step = (case.sessions, case.drafts + 1), 2**32 - 2
    logprobs = draw(5, shape)
    tops = () if case.tops is None else (rng.integers(-1, case.vocab, (*shape, case.tops)).astype(np.int32), draw(6, (*shape, case.tops)))
    words = mtp.record_words(case.sessions, case.drafts, case.tops or 0) + 3
    with Bench(device) as bench, device.host_alloc(RING_STEPS * words * 4, category="check") as host:
        ring = Ring(host.array.view(np.uint32).reshape(RING_STEPS, words), host.device_address)
        ring.words[:] = 0xFFFFFFFF
        error, found = bench.put(np.array([7], np.uint32)), []
        link_error = None if case.link_error is None else bench.put(np.array([case.link_error], np.uint32))
        device_logprobs = bench.put(logprobs.reshape(-1))
        device_tops = (bench.put(tops[0].reshape(-1, case.tops or 0)), bench.put(tops[1].reshape(-1, case.tops or 0))) if tops else None
        for row_error in (7, 0):
            before = draw_round(case, rng)
            arrays = DeviceRound(bench, before)
            counter = bench.put(np.array([step], np.uint32))
            mtp.accept(
                bench.stream,
                **arrays.arrays,
                seen=arrays.seen,
                logprobs=device_logprobs,
                tops=device_tops,
                ring=ring,
                counter=counter,
                error=error,
                link_error=link_error,
            )
            want = reference.accept(before)
            found.append(arrays.compare(want))
            compare("error", bench.read(error), np.zeros(1, np.uint32))
            compare("counter", bench.read(counter), np.array([step], np.uint32))
            record = mtp.read_record(ring, step, case.sessions, case.drafts, case.tops or 0)
            found.append(compare_record(record, (step, row_error, case.link_error or 0), want, logprobs, tops))
            compare("words past the record", ring.words[step % RING_STEPS, -3:], np.full(3, 0xFFFFFFFF, np.uint32))
            step += 1
        compare("other records", ring.words[[0, 1]], np.full((2, words), 0xFFFFFFFF, np.uint32))
        return worst_of(*found)


@dataclass(frozen=True)
class Rows:
    """Moves of `count` rows; shapes: a row of each move with its type. holes: some indices are negative."""

    name: str
    count: int
    shapes: tuple[tuple[DType, tuple[int, ...]], ...]
    source: bool = True
    target: bool = True
    holes: bool = True
    offset: int = 0  # elements before the first row, where the first move starts


def draw_index(rng: np.random.Generator, rows: int, count: int, holes: bool) -> np.ndarray:
    index = rng.permutation(rows)[:count].astype(np.int32)
    if holes:
        index[1::4] = -1
    return index


def run_rows(case: Rows, device: Device) -> Comparison:
    rng = np.random.default_rng(len(case.name))
    rows = case.count + 3
    source_index = draw_index(rng, rows, case.count, case.holes) if case.source else None
    target_index = draw_index(rng, rows, case.count, False) if case.target else None
    with Bench(device) as bench:
        moves, values = [], []
        for m, (dtype, shape) in enumerate(case.shapes):
            row = int(np.prod(shape, dtype=np.int64)) * dtype.item_bytes
            raw = [rng.integers(0, 256, (rows, row)).astype(np.uint8) for _ in range(2)]
            before = case.offset * dtype.item_bytes if m == 0 else 0
            held = [bench.put(np.concatenate([np.zeros(before, np.uint8), side.reshape(-1)])) for side in raw]
            moves.append(mtp.Move(*(Array(array.buffer, dtype, (rows, *shape), before) for array in held)))
            values.append((raw[0], raw[1]))
        indices = [None if index is None else bench.put(index) for index in (source_index, target_index)]
        mtp.move_rows(bench.stream, moves, case.count, *indices)
        want = reference.move_rows(values, case.count, source_index, target_index)
        raw_of = lambda array: bench.read(Array(array.buffer, DType.U8, (rows, array.nbytes // rows), array.offset_bytes))
        found = [compare(f"source {m}", raw_of(move.source), values[m][0]) for m, move in enumerate(moves)]
        return worst_of(*found, *(compare(f"target {m}", raw_of(move.target), want[m]) for m, move in enumerate(moves)))


def run_advance(sessions: int, drafts: int, device: Device) -> Comparison:
    """All drafts of a round, one after the other, into the same rows."""
    rng = np.random.default_rng(sessions)
    tokens, positions = np.full((sessions, drafts + 1), 77, np.int32), rng.integers(-2, 1000, sessions).astype(np.int32)
    found = []
    with Bench(device) as bench:
        rows, draft_tokens, draft_positions = bench.put(tokens.reshape(-1)), bench.poison(DType.I32, (sessions,)), bench.put(positions)
        for draft in range(1, drafts + 1):
            drawn = rng.integers(-1, 5000, sessions).astype(np.int32)
            mtp.advance(bench.stream, bench.put(drawn), rows, draft, draft_tokens, draft_positions)
            tokens[:, draft] = np.maximum(drawn, 0)
            positions += positions >= 0
            found.append(compare("draft tokens", bench.read(draft_tokens), tokens[:, draft]))
            found.append(compare("draft positions", bench.read(draft_positions), positions))
            found.append(compare("tokens", bench.read(rows), tokens.reshape(-1)))
    return worst_of(*found)


def run_mark(sessions: int, drafts: int, vocab: int, offset: int, device: Device) -> Comparison:
    """offset: bytes before the first row of marks, so that 16 bytes are not aligned."""
    rng = np.random.default_rng(vocab)
    seen = (rng.random((sessions + 1, vocab)) < 0.2).astype(np.uint8)
    slots = rng.permutation(sessions + 1)[:sessions].astype(np.int32)
    slots[3::4] = -1
    tokens = rng.integers(-1, vocab + 2, (sessions, drafts + 1)).astype(np.int32)
    tokens[0, 1], tokens[0, -1], tokens[-1, 1] = vocab - 1, 0, min(4096, vocab - 1)
    scratch = np.full((sessions, drafts + 1, vocab), 0xFF, np.uint8)
    with Bench(device) as bench:
        held = bench.put(np.concatenate([np.zeros(offset, np.uint8), seen.reshape(-1)]))
        marks, out = Array(held.buffer, DType.U8, seen.shape, offset), bench.put(scratch.reshape(-1, vocab))
        mtp.mark_drafts(bench.stream, marks, bench.put(slots), bench.put(tokens.reshape(-1)), out)
        compare("seen", bench.read(marks), seen)
        return compare("scratch", bench.read(out), reference.mark_drafts(seen, slots, tokens, scratch).reshape(-1, vocab))


_F32, _BF16, _U8 = DType.F32, DType.BF16, DType.U8
_ACCEPTS = (
    *(Accept(3, drafts, kind) for drafts in (1, 2, 5) for kind in ("mixed", "all", "none")),
    Accept(1, 5),
    Accept(40, 3, tops=20, link_error=5),
    Accept(15, 5, tops=32, vocab=154_880),
    Accept(7, 4, marks=False, tops=1),
    Accept(1, 1, link_error=9),
    Accept(300, 5),
)
_STATE = ((_BF16, (6144,)), (DType.I32, (2048,)), (DType.I32, ()), (DType.U64, (2048,)), (_F32, (3,)), (_U8, (40,)))
_ROWS = (
    Rows("six", 9, _STATE),
    Rows("gather", 5, _STATE[:2], target=False),
    Rows("scatter", 5, _STATE[2:], source=False),
    Rows("plain", 6, _STATE[:3], source=False, target=False),
    Rows("narrow", 200, ((DType.I32, ()),)),
    Rows("unaligned", 6, ((_BF16, (6144,)), (_F32, (1027,))), offset=2),
    Rows("ragged", 4, ((_F32, (1,)), (_F32, (1025,)), (_F32, (4100,)), (_BF16, (2, 3, 34)), (_U8, (4,)), (_F32, (1024,)))),
    Rows("released", 90, ((_F32, (6144,)), (_BF16, (6144,)))),
)
_MARKS = ((2, 3, 512, 0), (1, 1, 1, 0), (3, 5, 37, 0), (5, 2, 4096, 0), (2, 5, 4112, 0), (2, 4, 8192, 3), (1, 5, 154_880, 0), (4, 1, 4097, 0))

CASES = [
    *(Case("mtp", f"join-{t.label}-{rows}x{n}", partial(run_join, rows, n, t)) for t in (_F32, _BF16) for rows, n in ((1, 1), (5, 576), (3, 6144))),
    *(
        Case(
            "mtp",
            f"accept-{c.sessions}x{c.drafts}-{c.kind}{'' if c.tops is None else f'-{c.tops}'}{'' if c.marks else '-unmarked'}",
            partial(run_accept, c),
        )
        for c in _ACCEPTS
    ),
    *(Case("mtp", f"move-{case.name}", partial(run_rows, case)) for case in _ROWS),
    *(Case("mtp", f"advance-{s}x{k}", partial(run_advance, s, k)) for s, k in ((1, 1), (3, 5), (300, 2))),
    *(Case("mtp", f"mark-{s}x{k}x{vocab}{'+' * (offset > 0)}", partial(run_mark, s, k, vocab, offset)) for s, k, vocab, offset in _MARKS),
]
