"""The MTP layer of one device: it drafts tokens that the next step verifies (docs/decisions/0007-mtp.md).

Its row at position p is made of the token at p and of the main model's hidden state, after the final norm, at p - 1. So it has a plane of the history
and one of the index keys like any full layer, and its row at p can be stored as soon as the token at p is known: `store` after a pass of given rows,
`round` after each verification. Drafts of depth 2 and more read by the plan of the first one and store no index key.

Source: vLLM 0.33 `deepseek_mtp.py` and `v1/spec_decode`, by the reference's section 5; the draft is drawn with the target's random numbers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from glm53.hip import Array, Device, Stream
from glm53.kv import KeyStore, Runs, StepRows, TierStep
from glm53.model.forward import Walk
from glm53.model.layers import LayerSteps
from glm53.model.pair import PairSide
from glm53.model.sampler import DrawKind, DrawRow, Sampler
from glm53.model.step import StepForward
from glm53.model.weights import MtpWeights
from glm53.ops import basic, mtp, sampling, step
from glm53.ops.mtp import Move
from glm53.ops.sampling import ROW_BYTES
from glm53.ops.step import Segment
from glm53.ops.step_state import Ring
from glm53.spec import DType, ModelSpec, RowFormat


class Drafter:
    """Drafts for up to `sessions_max` sessions, up to `depth_max` each, on one stream of one device, beside the steps of `main`.

    terminal [sessions, hidden] T: the main model's hidden state of each session's last row, zeros where it is not known.
    """

    def __init__(
        self,
        device: Device,
        stream: Stream,
        spec: ModelSpec,
        weights: MtpWeights,
        dtype: DType,
        main: StepForward,
        sampler: Sampler,
        keys: KeyStore,
        tier_of: Callable[[StepRows], TierStep],
        row_format: RowFormat,
        sessions_max: int,
        depth_max: int,
        pair: PairSide | None,
    ):
        self.stream, self.spec, self.weights, self.main, self.sampler, self.pair = stream, spec, weights, main, sampler, pair
        rows_max, hidden = main.rows_max, spec.hidden_size
        make = lambda dtype, *shape: Array.empty(device, dtype, shape, category="drafts")
        self.terminal = make(dtype, sessions_max, hidden)
        self.hidden, self.joined = make(dtype, rows_max + 1, hidden), make(dtype, rows_max, 2 * hidden)
        self.drafted = make(dtype, sessions_max, hidden)  # hidden states of the drafts
        for rows in (self.terminal, self.hidden, self.drafted):  # rows that no session has are read too, and the same on both sides of a pair
            stream.fill(rows.address, 0, rows.nbytes)
        common = (device, stream, spec, main.weights.layers, dtype)
        last = (keys, row_format, main.row_error, main.counter)
        self.front_rows, self.draft_rows = (StepRows.make(device, count, sessions_max) for count in (rows_max, sessions_max))
        self.front_tier, self.draft_tier = tier_of(self.front_rows), tier_of(self.draft_rows)
        self.front = LayerSteps(*common, rows_max, self.front_rows, self.front_tier, *last, pair=pair, work=main.work)
        self.drafts = LayerSteps(*common, sessions_max, self.draft_rows, self.draft_tier, *last, pair=pair)
        self.front_tokens, self.draft_tokens = make(DType.I32, rows_max), make(DType.I32, sessions_max)
        self.last, self.accepted, self.slots, self.firsts = (make(DType.I32, sessions_max) for _ in range(4))
        self.logits = make(DType.F32, sessions_max, main.logits.shape[1])
        self.drawn, self.logprobs = make(DType.I32, sessions_max), make(DType.F32, sessions_max)
        self.params = make(DType.U8, depth_max * sessions_max, ROW_BYTES)
        self.scratch = sampling.SampleScratch.make(device, sessions_max, main.logits.shape[1], category="drafts")
        self._device = device
        self._seen: Array | None = None  # [rows, vocab] u8: marks of each verified row, made when first needed
        self._later = dataclasses.replace(weights.layer, indexer=None)

    # Rows that are given

    def store(self, count: int) -> Walk:
        """After a step of `count` given rows of one session: their rows of the MTP layer; the hidden state of the last one is kept."""
        hidden, slot = self._final(count), self.main.rows.sessions.slice(0, 1)
        mtp.move_rows(self.stream, [Move(self.terminal, self.hidden.slice(0, 1))], 1, source_index=slot)
        yield from self._store(count, self.hidden.slice(0, count))
        mtp.move_rows(self.stream, [Move(hidden.slice(count - 1, count), self.terminal)], 1, target_index=slot)

    def store_each(self, count: int) -> Walk:
        """As `store`, after a step of one row each of `count` sessions. Then the tokens drawn take the place of the step's."""
        hidden, slots, before = self._final(count), self.main.rows.sessions.slice(0, count), self.drafted.slice(0, count)
        mtp.move_rows(self.stream, [Move(self.terminal, before)], count, source_index=slots)
        yield from self._store(count, before)
        mtp.move_rows(self.stream, [Move(hidden, self.terminal)], count, target_index=slots)
        mtp.move_rows(self.stream, [Move(self.sampler.tokens.slice(0, count), self.main.tokens.slice(0, count))], count)

    def _store(self, count: int, before: Array) -> Walk:
        """Rows of the MTP layer for the step's rows; before [count, hidden]: the hidden state before each."""
        main = self.main
        x = main.work.cut("x", count)
        yield from main.embed(main.tokens.slice(0, count), main.rows, main.tier, x)
        self._join(x, before, x)
        main.layers.project(self.weights.layer, count)
        yield from main.layers.store_rows(main.layers.mtp_index, self.weights.layer, count)

    # Rounds

    def upload(self, runs: Runs, positions: Sequence[int], tokens: Sequence[int], draws: Sequence[DrawRow], depth: int) -> None:
        """A first round, which `start` drafts for: `runs` of (session, depth + 1), position and token of each session's first row, how each draws."""
        count, width = len(runs), depth + 1
        slots = np.array([slot for slot, _ in runs], np.int32)
        firsts = np.arange(count, dtype=np.int32) * width
        self.front_rows.upload(runs, positions, self.stream)
        self.draft_rows.upload([(int(slot), 1) for slot in slots], positions, self.stream)
        front_positions, front_tokens = np.full(count * width, -1, np.int32), np.zeros(count * width, np.int32)
        front_positions[firsts], front_tokens[firsts] = positions, tokens
        for array, values in (
            (self.front_rows.positions, front_positions), (self.front_tokens, front_tokens),
            (self.slots, slots), (self.last, firsts), (self.firsts, firsts),
        ):  # fmt: skip
            array.slice(0, len(values)).upload(values, self.stream)
        # Draft j stands at the position of the token drawn first, j further.
        packed = sampling.pack_rows([(d.params, d.seed, d.position + j, d.slot if d.params.penalises else -1) for j in range(depth) for d in draws])
        self.params.slice(0, len(packed)).upload(packed, self.stream)

    def start(self, sessions: int, depth: int, kind: DrawKind) -> Walk:
        """The drafts of a first round: nothing is verified, each session's newest token is the only row that the MTP layer lacks."""
        cut = lambda array: array.slice(0, sessions)
        hidden = self.hidden.slice(1, self.hidden.shape[0])
        mtp.move_rows(self.stream, [Move(self.terminal, hidden)], sessions, source_index=cut(self.slots), target_index=cut(self.firsts))
        yield from self._draft(sessions, depth, kind)

    def round(self, sessions: int, depth: int, kind: DrawKind, ring: Ring) -> Walk:
        """After the logits of the verified rows: draws the target's tokens, accepts the drafts that equal them, drafts for the next round."""
        main, sampler, count = self.main, self.sampler, sessions * (depth + 1)
        rows, few = (lambda array: array.slice(0, count)), (lambda array: array.slice(0, sessions))
        hidden = self._final(count)
        tokens = rows(main.tokens)
        seen = None
        if kind.penalises:
            assert sampler.seen is not None
            seen = self._marks().slice(0, count)
            mtp.mark_drafts(self.stream, sampler.seen, few(self.slots), tokens, seen)
        tops = sampler.tops(count, kind)
        outputs = (rows(sampler.tokens), rows(sampler.logprobs), tops)
        sampling.sample(self.stream, sampler.scratch, rows(main.logits), rows(sampler.params), seen, *outputs, stage=kind.stage)
        mtp.accept(
            self.stream,
            tokens=tokens,
            drawn=rows(sampler.tokens),
            positions=rows(main.rows.positions),
            params=rows(sampler.params),
            draft_params=self._params(sessions, depth),
            accepted=few(self.accepted),
            front_tokens=rows(self.front_tokens),
            front_positions=rows(self.front_rows.positions),
            last=few(self.last),
            slots=few(self.slots),
            seen=sampler.seen if kind.penalises else None,
            ring=ring,
            counter=main.counter,
            error=main.row_error,
            link_error=None if self.pair is None else self.pair.error,
            logprobs=rows(sampler.logprobs),
            tops=tops,
        )
        mtp.move_rows(self.stream, [Move(hidden, self.terminal)], sessions, source_index=few(self.last), target_index=few(self.slots))
        yield from self._draft(sessions, depth, kind)

    def _draft(self, sessions: int, depth: int, kind: DrawKind) -> Walk:
        """Rows of the MTP layer for the front rows, whose hidden states are given, and drafts behind the last of each session."""
        main, layer, index = self.main, self.weights.layer, self.main.layers.mtp_index
        count, few = sessions * (depth + 1), lambda array: array.slice(0, sessions)
        x = main.work.cut("x", count)
        yield from main.embed(self.front_tokens.slice(0, count), self.front_rows, self.front_tier, x)
        self._join(x, self.hidden.slice(1, count + 1), x)
        self.front.project(layer, count)
        yield from self.front.store_rows(index, layer, count)
        work = self.drafts.work
        moves = [Move(main.work.cut(name, count), work.cut(name, sessions)) for name in ("x", "qr", "index_q", "index_gate")]
        moves.append(Move(self.front_rows.positions.slice(0, count), few(self.draft_rows.positions)))
        mtp.move_rows(self.stream, moves, sessions, source_index=few(self.last))
        yield from self.drafts.choose(index, layer, sessions)
        yield from self.drafts.attend(index, layer, sessions)
        yield from self._finish(1, sessions, depth, kind)
        for draft in range(2, depth + 1):
            x = work.cut("x", sessions)
            yield from main.embed(few(self.draft_tokens), self.draft_rows, self.draft_tier, x)
            self._join(x, few(self.drafted), x)
            self.drafts.project(self._later, sessions)
            yield from self.drafts.attend(index, self._later, sessions, turn=draft - 1)
            yield from self._finish(draft, sessions, depth, kind)

    def _finish(self, draft: int, sessions: int, depth: int, kind: DrawKind) -> Walk:
        """Draws draft number `draft`, from 1, as the target will draw the token of its position."""
        few = lambda array: array.slice(0, sessions)
        yield from self.drafts.mlp(self.weights.layer, sessions)
        basic.rms_norm(self.stream, self.drafts.work.cut("x", sessions), self.weights.norm, few(self.drafted), self.spec.rms_norm_eps)
        yield from self.main.head(few(self.drafted), few(self.logits), normed=True)
        params = self._params(sessions, depth).slice(draft - 1, draft).reshape(sessions, ROW_BYTES)
        seen = self.sampler.seen if kind.penalises else None
        sampling.sample(self.stream, self.scratch, few(self.logits), params, seen, few(self.drawn), few(self.logprobs), None, stage=kind.stage)
        tokens = self.main.tokens.slice(0, sessions * (depth + 1))
        mtp.advance(self.stream, few(self.drawn), tokens, draft, few(self.draft_tokens), few(self.draft_rows.positions))

    def _params(self, sessions: int, depth: int) -> Array:
        return Array(self.params.buffer, DType.U8, (depth, sessions, ROW_BYTES))

    def _final(self, count: int) -> Array:
        """The main model's hidden states of the step's rows, after the final norm: rows 1 and up of `hidden`."""
        hidden = self.hidden.slice(1, count + 1)
        basic.rms_norm(self.stream, self.main.work.cut("x", count), self.main.weights.final_norm, hidden, self.spec.rms_norm_eps)
        return hidden

    def _join(self, x: Array, hidden: Array, y: Array) -> None:
        """y = eh_proj of both inputs, normed; y may be x."""
        joined = self.joined.slice(0, x.shape[0])
        mtp.join_inputs(self.stream, x, hidden, self.weights.enorm, self.weights.hnorm, joined, self.spec.rms_norm_eps)
        step.gemv(self.stream, joined, [Segment(self.weights.eh_proj, y)])

    def _marks(self) -> Array:
        if self._seen is None:
            self._seen = Array.empty(self._device, DType.U8, (self.main.rows_max, self.main.logits.shape[1]), category="drafts")
        return self._seen

    def abandon(self, rows: Mapping[int, int]) -> None:
        """A step failed on the way: what its kernels count in is as before the first one."""
        for tier in (self.front_tier, self.draft_tier):
            tier.abandon(rows)

    def forget(self, slot: int) -> None:
        """The hidden state before the next row of a session is not known: it was cut, or it has just begun."""
        row = self.terminal.slice(slot, slot + 1)
        self.stream.fill(row.address, 0, row.nbytes)

    def fork(self, source: int | None, slot: int) -> None:
        """A session begins with another one's rows; source: whose hidden state is its own, None: it is not known."""
        if source is None:
            self.forget(slot)
            return
        target, held = (self.terminal.slice(index, index + 1) for index in (slot, source))
        self.stream.copy(target.address, held.address, target.nbytes)

    def state(self, slot: int) -> np.ndarray:
        """[hidden] as raw elements: the hidden state of a session's last row. Waits."""
        return self.terminal.slice(slot, slot + 1).bits(self.stream)[0].copy()

    def set_state(self, slot: int, state: np.ndarray | None) -> None:
        """What `state` gave, for a session that begins with those rows; None: it is not known."""
        if state is None:
            self.forget(slot)
            return
        self.terminal.slice(slot, slot + 1).upload(np.ascontiguousarray(state[None, :]), self.stream)
