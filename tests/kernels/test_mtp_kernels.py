"""Speculative rounds on the device against drawing one token at a time, what the kernels refuse, and whose error a record tells of."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from glm53.check import reference_sampling as reference
from glm53.check.case import Bench
from glm53.check.reference_mtp import params_of
from glm53.check.reference_sampling import Draw
from glm53.hip import Array, Device
from glm53.ops import mtp, sampling, step_state
from glm53.ops.contract import ContractError
from glm53.ops.step_state import Ring
from glm53.spec import DType

VOCAB, TOPS, RING_STEPS = 48, 3, 4
I32, F32, U8, U32 = DType.I32, DType.F32, DType.U8, DType.U32
Make = Callable[..., Array]


def logits_of(history: list[int], flat: float = 1.0) -> np.ndarray:
    """[VOCAB] f32: what a model of our own says after these tokens; it looks at the last three and at how many there are."""
    seed = [len(history), *history[-3:]]
    return (np.random.default_rng(seed).standard_normal(VOCAB) * 3 * flat).astype(np.float32)


@dataclass
class Text:
    """A session: its settings, what it has said one token at a time, and what the rounds have said."""

    draw: Draw
    prompt: list[int]
    alone: list[int]
    rounds: list[int]

    @property
    def penalises(self) -> bool:
        return self.draw.repetition_penalty != 1.0

    def history(self) -> list[int]:
        return self.prompt + self.rounds

    def marks(self, tokens: list[int]) -> np.ndarray:
        marks = np.zeros(VOCAB, np.uint8)
        marks[tokens] = 1
        return marks

    def say_alone(self, count: int) -> None:
        """Draws until there are `count` tokens, the plain way."""
        while len(self.alone) < count:
            every = self.prompt + self.alone
            row = replace(self.draw, position=len(every), seen_row=0 if self.penalises else -1)
            self.alone.append(reference.sample(logits_of(every), row, self.marks(every)[None]))


def texts_of(sessions: int, rng: np.random.Generator) -> list[Text]:
    """Greedy and drawn, with and without a penalty and filters."""
    texts = []
    for s in range(sessions):
        drawn = Draw(
            temperature=(0.0, 0.8, 1.5)[s % 3],
            top_k=(0, 12)[s % 2],
            top_p=(1.0, 0.9)[s // 2 % 2],
            repetition_penalty=(1.4, 1.0, 1.9, 1.2)[s % 4],
            seed=int(rng.integers(0, 2**63)),
            logprobs=s % (TOPS + 1),
        )
        texts.append(Text(drawn, [int(t) for t in rng.integers(0, VOCAB, 5 + s)], [], []))
    return texts


class Rounds:
    """The device side: arrays of a round, a recorded verify half, drafts. Slots of sessions are shuffled, one is free."""

    def __init__(self, bench: Bench, ring: Ring, texts: list[Text], drafts: int, rng: np.random.Generator, stack: ExitStack):
        self.bench, self.ring, self.texts, self.drafts, self.rng = bench, ring, texts, drafts, rng
        self.sessions, self.rows, self.step = len(texts), len(texts) * (drafts + 1), 0
        sessions, rows = self.sessions, self.rows
        self.slots = rng.permutation(sessions + 1)[:sessions].astype(np.int32)
        empty = {
            **dict.fromkeys(("tokens", "drawn", "positions", "front_tokens", "front_positions"), (I32, (rows,))),
            **dict.fromkeys(("accepted", "last"), (I32, (sessions,))),
            "params": (U8, (rows, sampling.ROW_BYTES)),
            "draft_params": (U8, (drafts, sessions, sampling.ROW_BYTES)),
        }
        self.round: dict[str, Any] = {name: bench.poison(dtype, shape) for name, (dtype, shape) in empty.items()} | {"slots": bench.put(self.slots)}
        marks = np.zeros((sessions + 1, VOCAB), np.uint8)
        for slot, text in zip(self.slots, texts, strict=True):
            marks[slot] = text.marks(text.prompt)
        self.seen, self.scratch = bench.put(marks), bench.poison(U8, (rows, VOCAB))
        self.logits, self.logprobs = bench.poison(F32, (rows, VOCAB)), bench.poison(F32, (rows,))
        self.tops = (bench.poison(I32, (rows, TOPS)), bench.poison(F32, (rows, TOPS)))
        self.hidden, self.ends = bench.put(np.arange(rows, dtype=np.float32)[:, None] + np.zeros(6, np.float32)), bench.poison(F32, (sessions, 6))
        self.counter, self.error = bench.put(np.zeros(1, np.uint32)), bench.put(np.zeros(1, np.uint32))
        self.padding = bench.put(np.full(1, -1, np.int32))
        self.draft_tokens, self.draft_positions = bench.poison(I32, (sessions,)), bench.poison(I32, (sessions,))
        self.draft_drawn, self.draft_logprobs = bench.poison(I32, (sessions,)), bench.poison(F32, (sessions,))
        self.sampler = sampling.SampleScratch.make(bench.device, rows, VOCAB, "check")
        stack.callback(self.sampler.free)
        self._record(stack)

    def _verify(self) -> None:
        stream, drawn = self.bench.stream, self.round["drawn"]
        mtp.mark_drafts(stream, self.seen, self.round["slots"], self.round["tokens"], self.scratch)
        sampling.sample(stream, self.sampler, self.logits, self.round["params"], self.scratch, drawn, self.logprobs, self.tops)
        kept: dict[str, Any] = {name: getattr(self, name) for name in ("seen", "logprobs", "tops", "ring", "counter", "error")}
        mtp.accept(stream, **self.round, **kept)
        mtp.move_rows(stream, [mtp.Move(self.hidden, self.ends)], self.sessions, source_index=self.round["last"])
        step_state.end(stream, self.counter, self.error, self.padding, None, None)

    def _record(self, stack: ExitStack) -> None:
        """Once for real, so that kernels are loaded, then into a graph. What the first launch leaves is overwritten by `start`."""
        self.start()
        self.logits.upload(np.zeros((self.rows, VOCAB), np.float32))
        marks = self.seen.numpy()
        self._verify()
        with self.bench.stream.capture() as capture:
            self._verify()
        self.graph = capture.graph
        stack.callback(self.graph.close)
        self.seen.upload(marks)
        self.counter.upload(np.zeros(1, np.uint32))
        self.start()

    def start(self) -> None:
        """Rows of the first round, with drafts that are nobody's."""
        width, rows = self.drafts + 1, []
        for s, text in enumerate(self.texts):
            n = len(text.prompt) - 1
            rows += [(text.draw, text.draw.seed, n + 1 + i, s * width + i if text.penalises else -1) for i in range(width)]
        positions = [len(text.prompt) - 1 + i for text in self.texts for i in range(width)]
        tokens = [token for text in self.texts for token in [text.prompt[-1], *[0] * self.drafts]]
        self.round["params"].upload(sampling.pack_rows(rows))
        self.round["positions"].upload(np.array(positions, np.int32))
        self.round["tokens"].upload(np.array(tokens, np.int32))

    def run(self) -> np.ndarray:
        """One round; returns the drafts accepted, by session. Some rows have no draft."""
        width = self.drafts + 1
        tokens = self.round["tokens"].numpy().reshape(-1, width)
        positions = self.round["positions"].numpy().reshape(-1, width)
        for s, text in enumerate(self.texts):
            every = text.history()
            assert tokens[s, 0] == every[-1]
            np.testing.assert_array_equal(positions[s], len(every) - 1 + np.arange(width))
        for cut in np.flatnonzero(self.rng.random(self.sessions) < 0.2):
            positions[cut, int(self.rng.integers(1, width)) :] = -1
        self.round["positions"].upload(positions.reshape(-1))
        self.logits.upload(
            np.stack([logits_of(t.history() + [int(x) for x in tokens[s, 1 : i + 1]]) for s, t in enumerate(self.texts) for i in range(width)])
        )
        self.graph.launch(self.bench.stream)
        record = mtp.read_record(self._done(), self.step, self.sessions, self.drafts, TOPS)
        assert (record.step, record.row_error, record.link_error) == (self.step, 0, 0)
        self.step += 1
        self._take(record, positions)
        self._draft(record.accepted)
        return record.accepted

    def _done(self) -> Ring:
        self.bench.stream.synchronize()
        return self.ring

    def _take(self, record: mtp.Record, before: np.ndarray) -> None:
        """Adds what was drawn to the texts; then front rows, parameters and marks must be those of a session that has said just that."""
        width = self.drafts + 1
        read = lambda name: self.bench.read(self.round[name])
        front_tokens, front_positions, params, drafts = (read(n) for n in ("front_tokens", "front_positions", "params", "draft_params"))
        ends, seen = self.bench.read(self.ends), self.bench.read(self.seen)
        for s, text in enumerate(self.texts):
            a = int(record.accepted[s])
            said = [int(t) for t in record.tokens[s, : a + 1]]
            for i, token in enumerate(said):
                logprobs = reference.log_probabilities(logits_of(text.history()))
                np.testing.assert_allclose(record.logprobs[s, i], logprobs[token], rtol=1e-4, atol=1e-4)
                assert record.tops is not None
                ids, _ = reference.top_logprobs(logits_of(text.history()), text.draw.logprobs or 0, TOPS)
                np.testing.assert_array_equal(record.tops[0][s, i], ids)
                text.rounds.append(token)
            n, length = int(before[s, 0]), len(text.history())
            assert np.all(before[s, : a + 1] >= 0), "a draft without a position is not accepted"
            assert [int(t) for t in front_tokens[s * width :][: a + 1]] == said
            assert [int(p) for p in front_positions[s * width :][:width]] == [n + 1 + i if i <= a else -1 for i in range(width)]
            assert np.all(ends[s] == s * width + a)
            for i in range(width):
                row = params_of(params[s * width + i])
                assert (row.position, row.seen_row, row.seed) == (length + i, s * width + i if text.penalises else -1, text.draw.seed)
            for j in range(self.drafts):
                row = params_of(drafts[j, s])
                assert (row.position, row.seen_row, row.seed) == (length + j, int(self.slots[s]) if text.penalises else -1, text.draw.seed)
            if text.penalises:
                np.testing.assert_array_equal(seen[self.slots[s]], text.marks(text.history()))

    def _draft(self, accepted: np.ndarray) -> None:
        """A draft model that is often right: the target's logits, sometimes of another history."""
        stream, guesses = self.bench.stream, [text.history() for text in self.texts]
        starts = np.array([len(guess) - 1 for guess in guesses], np.int32)
        self.draft_positions.upload(starts)
        for draft in range(1, self.drafts + 1):
            wrong = self.rng.random(self.sessions) < 0.2
            logits = self.bench.put(np.stack([logits_of([*guess, 1] if w else guess) for guess, w in zip(guesses, wrong, strict=True)]))
            params = self.round["draft_params"].slice(draft - 1, draft).reshape(self.sessions, sampling.ROW_BYTES)
            sampling.sample(stream, self.sampler, logits, params, self.seen, self.draft_drawn, self.draft_logprobs, None)
            mtp.advance(stream, self.draft_drawn, self.round["tokens"], draft, self.draft_tokens, self.draft_positions)
            np.testing.assert_array_equal(self.bench.read(self.draft_positions), starts + draft)
            for guess, token in zip(guesses, self.bench.read(self.draft_tokens), strict=True):
                guess.append(int(token))


@pytest.mark.parametrize(("sessions", "drafts"), [(1, 1), (2, 5), (7, 3), (5, 2)])
def test_rounds_say_what_single_draws_say(device: Device, sessions: int, drafts: int) -> None:
    rng = np.random.default_rng(sessions * 10 + drafts)
    texts, wanted = texts_of(sessions, rng), 150
    words = mtp.record_words(sessions, drafts, TOPS)
    with device.host_alloc(RING_STEPS * words * 4, category="test") as host, ExitStack() as stack, Bench(device) as bench:
        ring = Ring(host.array.view(np.uint32).reshape(RING_STEPS, words), host.device_address)
        rounds, counts = Rounds(bench, ring, texts, drafts, rng, stack), []
        while min(len(text.rounds) for text in texts) < wanted:
            counts.append(rounds.run())
        assert bench.read(rounds.counter)[0] == len(counts)
        device.synchronize()
    for text in texts:
        text.say_alone(len(text.rounds))
        assert text.rounds == text.alone
    found = np.concatenate(counts)
    assert set(found) == set(range(drafts + 1)), "every number of accepted drafts comes up, none and all included"
    assert found.mean() > 0.3 * drafts, "the drafts agree often"


@pytest.fixture
def ring(device: Device) -> Iterator[Ring]:
    """Of records for 2 sessions of 3 drafts and 1 token."""
    words = mtp.record_words(2, 3, 1)
    with device.host_alloc(RING_STEPS * words * 4, category="test") as host:
        yield Ring(host.array.view(np.uint32).reshape(RING_STEPS, words), host.device_address)


def accept_arguments(make: Make, ring: Ring) -> dict[str, Any]:
    """What `accept` takes for 2 sessions of 3 drafts."""
    return {
        **{name: make(I32, 8) for name in ("tokens", "drawn", "positions", "front_tokens", "front_positions")},
        **{name: make(I32, 2) for name in ("accepted", "last", "slots")},
        "params": make(U8, 8, sampling.ROW_BYTES),
        "draft_params": make(U8, 3, 2, sampling.ROW_BYTES),
        "seen": make(U8, 5, 11),
        "logprobs": make(F32, 8),
        "tops": (make(I32, 8, 1), make(F32, 8, 1)),
        "ring": ring,
        "counter": make(U32, 1),
        "error": make(U32, 1),
    }


def test_a_step_end_without_draws_leaves_the_error_to_the_round(device: Device, make: Make, ring: Ring) -> None:
    arguments, stream = accept_arguments(make, ring), device.default_stream
    arguments["seen"] = None
    error, counter, rounds = arguments["error"], arguments["counter"], make(I32, 1)
    error.upload(np.array([6], np.uint32))
    counter.upload(np.array([9], np.uint32))
    step_state.end(stream, counter, error, rounds, None, None)
    assert (error.numpy()[0], counter.numpy()[0]) == (6, 10)
    mtp.accept(stream, **arguments)
    device.synchronize()
    record = mtp.read_record(ring, 10, 2, 3, 1)
    assert (record.step, record.row_error, record.link_error) == (10, 6, 0)
    assert (error.numpy()[0], counter.numpy()[0]) == (0, 10)


def test_no_session_keeps_its_rows(device: Device, make: Make, ring: Ring) -> None:
    """Bytes 0xff all over: every position is -1, so nothing is accepted, marked or moved on."""
    arguments = accept_arguments(make, ring)
    arguments["slots"].upload(np.array([0, 1], np.int32))
    arguments["counter"].upload(np.zeros(1, np.uint32))
    arguments["seen"].upload(np.zeros((5, 11), np.uint8))
    mtp.accept(device.default_stream, **arguments)
    device.synchronize()
    assert list(arguments["accepted"].numpy()) == [0, 0]
    assert list(arguments["positions"].numpy()) == [-1] * 8 == list(arguments["front_positions"].numpy())
    assert np.all(arguments["params"].numpy() == 0xFF)
    assert not arguments["seen"].numpy().any()


@pytest.mark.parametrize(
    ("name", "shape", "text"),
    [
        ("tokens", (7,), r"tokens dim 0 is 7, expected rows=8 \(bound by sessions \* \(drafts \+ 1\)\)"),
        ("last", (3,), r"last dim 0 is 3, expected sessions=2 \(bound by draft_params dim 1\)"),
        ("draft_params", (6, 2, sampling.ROW_BYTES), "drafts is 6, expected 1 to 5"),
        ("draft_params", (3, 2, 8), f"draft_params dim 2 is 8, expected {sampling.ROW_BYTES}"),
        ("counter", (2,), "counter dim 0 is 2, expected 1"),
    ],
)
def test_accept_matches_its_arrays(device: Device, make: Make, ring: Ring, name: str, shape: tuple[int, ...], text: str) -> None:
    arguments = accept_arguments(make, ring)
    arguments[name] = make(arguments[name].dtype, *shape)
    with pytest.raises(ContractError, match=text):
        mtp.accept(device.default_stream, **arguments)


def test_accept_needs_room_for_the_record(device: Device, make: Make, ring: Ring) -> None:
    arguments = accept_arguments(make, ring)
    arguments["tops"] = (make(I32, 8, 2), make(F32, 8, 2))
    text = f"ring records have {mtp.record_words(2, 3, 1)} words, expected at least {mtp.record_words(2, 3, 2)} for 2 sessions, 3 drafts and 2 tops"
    with pytest.raises(ContractError, match=text):
        mtp.accept(device.default_stream, **arguments)
    arguments["tops"] = (make(I32, 8, 1), make(F32, 8, 2))
    with pytest.raises(ContractError, match=r"top logprobs dim 1 is 2, expected tops=1"):
        mtp.accept(device.default_stream, **arguments)


def test_accept_reads_parameters_of_8_bytes(device: Device, make: Make, ring: Ring) -> None:
    arguments = accept_arguments(make, ring)
    held = make(U8, 9 * sampling.ROW_BYTES)
    arguments["params"] = Array(held.buffer, U8, (8, sampling.ROW_BYTES), held.offset_bytes + 4)
    with pytest.raises(ContractError, match=r"params is at address .* expected a multiple of 8"):
        mtp.accept(device.default_stream, **arguments)


def test_join_inputs_matches(device: Device, make: Make) -> None:
    stream, x, norm, y = device.default_stream, make(F32, 2, 8), make(F32, 8), make(F32, 2, 16)
    with pytest.raises(ContractError, match="y dim 1 is 8, expected 16"):
        mtp.join_inputs(stream, x, x, norm, norm, make(F32, 2, 8), 1e-5)
    with pytest.raises(ContractError, match="hidden is bf16, expected f32"):
        mtp.join_inputs(stream, x, make(DType.BF16, 2, 8), norm, norm, y, 1e-5)
    with pytest.raises(ContractError, match="hidden and y overlap"):
        mtp.join_inputs(stream, x, y.view((2, 8)), norm, norm, y, 1e-5)
    with pytest.raises(ContractError, match="eps is 0, expected a positive number"):
        mtp.join_inputs(stream, x, x, norm, norm, y, 0)


def test_moves_are_of_equal_rows_apart_from_each_other(device: Device, make: Make) -> None:
    stream, source, target = device.default_stream, make(F32, 6, 8), make(F32, 6, 8)
    move = mtp.Move(source, target)
    for moves, count, text in (
        ([], 1, "got 0 moves, expected 1 to 6"),
        ([move] * 7, 1, "got 7 moves, expected 1 to 6"),
        ([move], 7, "source 0 dim 0 is 6, expected at least count=7"),
        ([mtp.Move(source, make(F32, 6, 4))], 2, "target 0 has rows of 16 bytes, expected 32, as source 0"),
        ([mtp.Move(make(U8, 4, 6), make(U8, 4, 6))], 2, "source 0 has rows of 6 bytes, expected a multiple of 4"),
        ([mtp.Move(source, source.slice(2, 4))], 2, "target 0 and source 0 overlap"),
        ([move, mtp.Move(target, make(F32, 6, 8))], 2, "target 0 and source 1 overlap"),
        ([move, mtp.Move(source, target)], 2, "target 1 and target 0 overlap"),
    ):
        with pytest.raises(ContractError, match=text):
            mtp.move_rows(stream, moves, count)
    with pytest.raises(ContractError, match="target 0 dim 0 is 6, expected at least count=7"):
        mtp.move_rows(stream, [move], 7, source_index=make(I32, 7))
    with pytest.raises(ContractError, match="target_index dim 0 is 3, expected count=2"):
        mtp.move_rows(stream, [move], 2, target_index=make(I32, 3))


def test_rows_are_whole_sessions(device: Device, make: Make) -> None:
    stream, few = device.default_stream, make(I32, 2)
    for rows in (2, 7):
        with pytest.raises(ContractError, match=f"tokens dim 0 is {rows}, expected a multiple of sessions=2, and at least twice it"):
            mtp.advance(stream, few, make(I32, rows), 1, few, few)
    for draft in (0, 4):
        with pytest.raises(ContractError, match=f"draft is {draft}, expected 1 to 3"):
            mtp.advance(stream, few, make(I32, 8), draft, few, few)
    seen = make(U8, 4, 16)
    with pytest.raises(ContractError, match="drafts is 6, expected 1 to 5"):
        mtp.mark_drafts(stream, seen, few, make(I32, 14), make(U8, 14, 16))
    with pytest.raises(ContractError, match=r"scratch dim 0 is 7, expected rows=8"):
        mtp.mark_drafts(stream, seen, few, make(I32, 8), make(U8, 7, 16))
    with pytest.raises(ContractError, match="seen and scratch overlap"):
        mtp.mark_drafts(stream, seen, make(I32, 1), few, seen.slice(1, 3))


def test_costs_count_what_must_move(make: Make) -> None:
    x = make(DType.BF16, 3, 64)
    assert mtp.cost_join_inputs(x).bytes == 4 * 3 * 64 * 2 + 2 * 64 * 2
    assert mtp.cost_move_rows([mtp.Move(x, x), mtp.Move(make(I32, 3), make(I32, 3))], 2).bytes == 2 * 2 * (128 + 4)
    assert mtp.cost_mark_drafts(make(U8, 8, 100), 2).bytes == 800 + 200
