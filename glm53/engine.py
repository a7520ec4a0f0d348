"""The engine: a checkpoint opened on a device, and the requests that run on it.

    from glm53 import Engine, SamplingParams
    with Engine.open("models/glm53-demo") as engine:
        print(engine.generate("In the beginning", SamplingParams(temperature=0)).text)

One engine drives one device, or two that share a model's layers between them (`devices=(0, 1)`). Several threads may use it: their steps take
turns, and their requests together need at most `sessions_max` sessions; those of one call wait for the ones that were free when it began. Greedy or
sampled, a request's tokens depend on its prompt, its parameters, the chunk size class of its prompt rows and the weights alone, never on the requests
beside it or on the number of devices.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import cast

import numpy as np

from glm53 import paths, persist
from glm53.config import EngineConfig, GenerationDefaults, check_prompt, check_widths, read_config, read_generation_config
from glm53.errors import DeviceLost, DeviceMemoryError, Glm53Error, InputError, LifetimeError
from glm53.hip import Array, Device, runtime
from glm53.kv import HostTier, KeyStore, ResidentTier
from glm53.mem.ledger import Ledger, device_place
from glm53.model.checkpoint import Checkpoint
from glm53.model.decode import Decoder, DraftCounts, Ticket, row_error_text
from glm53.model.forward import row_layout
from glm53.model.pair import SIDES, Pair
from glm53.model.sampler import Drawn
from glm53.model.side import Side, context_rows_max, step_rows_max
from glm53.model.stage import Stage
from glm53.model.step import StepForward
from glm53.model.weights import Weights, load_weights
from glm53.request import Batch, Chunk, Completion, Constraint, Outcome, Prompt, Request, TokenLogprob, fresh_seed, integers, is_single
from glm53.sampling import SamplingParams
from glm53.sched.drafts import LoadPolicy
from glm53.sched.queue import Prefill, Queue, Step
from glm53.sched.sessions import SessionState
from glm53.session import Session, is_whole
from glm53.sessionfile import SessionFile
from glm53.spec import WHOLE, DType, ModelSpec
from glm53.tokenizer import StopMatcher, StreamDecoder, Tokenizer

Progress = Callable[[int, int, str], None]
REUSED_ROWS_MIN = 64  # rows that are worth a fork


class Engine:
    """A model on a device or on a pair of them. Open with `Engine.open`, close with `close` or a `with` block."""

    def __init__(
        self,
        config: EngineConfig,
        spec: ModelSpec,
        devices: Sequence[Device],
        weights: Sequence[Weights],
        tokenizer: Tokenizer | None,
        progress: Progress | None = None,
        ledger: Ledger | None = None,
        drawn: Sequence[Array] | None = None,
    ):
        """devices, weights: one, or the two sides of a pair. drawn: on each device positions [draws, index_topk] i32 that replace the indexer's
        selection in decode steps (`StepForward`)."""
        self.ledger = Ledger() if ledger is None else ledger  # of what this engine allocates
        self.config, self.spec, self.devices, self.tokenizer = config, spec, tuple(devices), tokenizer
        self.defaults = GenerationDefaults()
        self.fingerprint: str | None = None  # of the checkpoint's weights; None: weights of no checkpoint
        self.context_rows_max = context_rows_max(config, spec)
        self.sessions_max, self.step_rows_max = config.sessions_max, step_rows_max(config)
        self.notes: list[str] = []  # which fast paths are in use, and why
        self._turn = threading.RLock()  # held for a step; re-entrant, since an abandoned stream may be collected inside a step
        fetch = paths.fetch_method(devices, config, self.notes)
        graphs = paths.replays_graphs(devices, config, self.notes)
        pair = self._make_pair() if len(self.devices) == 2 else None
        try:
            sides = [
                Side(
                    device,
                    config,
                    spec,
                    weights[index],
                    fetch,
                    progress,
                    None if drawn is None else drawn[index],
                    None if pair is None else pair.side(index),
                )
                for index, device in enumerate(devices)
            ]
        except BaseException:
            if pair is not None:
                pair.close()
            raise
        self.stage = Stage(sides, pair)
        self.decoder = Decoder(self.stage, graphs, config.drafts_max)
        self._sessions: weakref.WeakSet[Session] = weakref.WeakSet()  # open or parked, as far as somebody holds them
        self._policy = LoadPolicy(config.drafts_max) if config.mtp == "auto" else None
        self._read_at, self._read_kind = 0.0, (-1, -1)  # when and what the step read last was

    def _make_pair(self) -> Pair:
        config, spec = self.config, self.spec
        link, fast = paths.pair_link(self.devices, config, self.notes)
        chunk_rows_max = max(config.prefill_chunk_rows, self.step_rows_max)
        try:
            return Pair(link, spec, fast, config.check_pair, self.step_rows_max, chunk_rows_max, row_layout(spec, config.row_format(spec)).row_bytes)
        except BaseException:
            link.close()
            raise

    # Of the single device, or of a pair's owner

    @property
    def device(self) -> Device:
        return self.devices[0]

    @property
    def weights(self) -> Weights:
        return self.stage.first.weights

    @property
    def tier(self) -> ResidentTier | HostTier:
        return self.stage.first.tier

    @property
    def keys(self) -> KeyStore:
        return self.stage.first.keys

    @property
    def step(self) -> StepForward:
        return self.stage.first.step

    @classmethod
    def open(cls, path: str | Path, config: EngineConfig | None = None, progress: Progress | None = None, **settings: object) -> Engine:
        """Opens a Hugging Face checkpoint directory on a device.

        settings: fields of EngineConfig, e.g. dtype="f32". progress(bytes_done, bytes_total, tensor_name) is called while weights load.
        Raises CheckpointError, InputError, RuntimeUnavailable, DeviceMemoryError; nothing stays allocated then.
        """
        if config is not None and settings:
            raise InputError("Engine.open: give either config or single settings, not both")
        if config is not None and not isinstance(config, EngineConfig):
            raise InputError(f"Engine.open: config is {type(config).__name__}, wanted an EngineConfig, or single settings such as dtype='f32'")
        config = config or EngineConfig.of(**settings)
        spec = read_config(path, latent_norm_eps=config.latent_norm_eps)
        defaults = read_generation_config(path)
        checkpoint = Checkpoint.open(path)
        fingerprint = persist.checkpoint_fingerprint(checkpoint)
        check_widths(spec, config.dtype)
        if config.drafts_max and not spec.n_mtp_layers:
            raise InputError(f"mtp is {config.mtp} and {path} has no MTP layer, expected 0")
        tokenizer = Tokenizer.open(path) if (Path(path) / "tokenizer.json").exists() else None
        runtime.select(None if config.runtime == "auto" else config.runtime)
        ledger, devices = Ledger(), []
        try:
            for index in config.devices:
                devices.append(Device(index, watch=partial(ledger.count, device_place(index))))
            dtype = DType.F32 if config.dtype == "f32" else DType.BF16
            shards = SIDES if len(devices) == 2 else (WHOLE,)
            weights = [
                load_weights(
                    checkpoint,
                    spec,
                    device,
                    dtype,
                    progress=progress,
                    check=check,
                    load_mtp=config.drafts_max > 0,
                    weights=config.weights,
                    shard=shard,
                )
                for device, shard, check in zip(devices, shards, (config.check_weights, False), strict=False)
            ]
            engine = cls(config, spec, devices, weights, tokenizer, progress, ledger)
        except BaseException:
            for device in devices:
                device.close(free_buffers=True)
            raise
        engine.defaults, engine.fingerprint = defaults, fingerprint
        return engine

    def close(self) -> None:
        """Waits for the devices and gives all their memory and the page-locked memory of the host back. Idempotent."""
        if self.device.closed:
            return
        with ExitStack() as steps:  # each has its turn, the last one first
            for device in self.devices:
                steps.callback(device.close, free_buffers=True)
            steps.callback(self._free)

    def _free(self) -> None:
        try:
            self.stage.free()
            self.decoder.close()
        except DeviceLost:
            pass  # nothing on a lost device can be given back; the process's end does it

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def default_params(self) -> SamplingParams:
        """SamplingParams with what the checkpoint's generation_config.json sets."""
        return SamplingParams(**{name: value for name, value in asdict(self.defaults).items() if value is not None})

    def memory(self) -> dict[str, int]:
        """Allocated bytes by category, of all devices together, those in host memory as `host: <category>`."""
        totals: dict[str, int] = {}
        for device in self.devices:
            for category, byte_count in device.allocated_bytes().items():
                totals[category] = totals.get(category, 0) + byte_count
        return totals

    def memory_by_place(self) -> dict[str, dict[str, int]]:
        """Allocated bytes by place ("device 0", "host") and category. `ledger.peak(place)` is the most that a place held at once."""
        return self.ledger.by_place()

    def cache_counters(self) -> dict[str, int]:
        """What the hot caches did for the histories last opened in each slot: the counters of `ops.hotcache.Counter` and "bytes_from_host".

        Of a pair the owner's, which the peer's equal (`cache_counters_by_device`). Empty for the resident tier. Waits for the device.
        """
        return self.cache_counters_by_device()[self.device.index]

    def cache_counters_by_device(self) -> dict[int, dict[str, int]]:
        """`cache_counters` of each device, by its number."""
        return {side.device.index: side.tier.counter_totals() if isinstance(side.tier, HostTier) else {} for side in self.stage.sides}

    def cache_totals(self) -> dict[str, int]:
        """As `cache_counters`, of every history since the engine was opened: these only grow. Waits for the device."""
        return self.tier.counter_totals_since_start() if isinstance(self.tier, HostTier) else {}

    def draft_counts(self) -> DraftCounts:
        """Drafts verified and accepted since the engine was opened."""
        return self.decoder.drafts

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> Completion | list[Completion]:
        """Runs one prompt (text or token ids) or a list of prompts to the end; a list runs as one batch and gives a list.

        params: one for all, or one per prompt; None: `default_params()`. Raises InputError before anything runs.
        """
        single = is_single(prompts)
        requests = self._requests(prompts, params)
        texts: dict[int, list[str]] = {r.index: [] for r in requests}
        logprobs: dict[int, list[TokenLogprob]] = {r.index: [] for r in requests}
        for chunk in self._run(requests):
            texts[chunk.index].append(chunk.text)
            logprobs[chunk.index] += chunk.logprobs
        done = [
            Completion(
                tuple(r.prompt), tuple(r.tokens), "".join(texts[r.index]), r.finish_reason or "", tuple(logprobs[r.index]), r.seed, r.reused_rows
            )
            for r in requests
        ]
        return done[0] if single else done

    def stream(self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None) -> Iterator[Chunk]:
        """Like `generate`, step by step. Closing the iterator early ends the requests and frees their memory."""
        return self._run(self._requests(prompts, params))

    def generate_logits(self, prompt_ids: Sequence[int], new_tokens: int, forced: Sequence[int] | None = None) -> tuple[list[int], np.ndarray]:
        """Greedy tokens and all their logits: (tokens, [new_tokens, vocab] f32). With `forced`, those tokens are fed instead of the greedy ones."""
        self._check_ids(integers(prompt_ids))
        if not is_whole(new_tokens) or new_tokens < 1:
            raise InputError(f"new_tokens: got {new_tokens!r}, wanted at least 1")
        if forced is not None and len(forced) < new_tokens - 1:
            raise InputError(f"forced: got {len(forced)} tokens, wanted at least {new_tokens - 1}, one less than new_tokens")
        logits = np.empty((new_tokens, self.spec.vocab_size), np.float32)
        tokens: list[int] = []
        with self.session() as session:
            logits[0] = session.prefill(prompt_ids)
            for i in range(new_tokens):
                tokens.append(int(logits[i].argmax()))
                if i + 1 < new_tokens:
                    logits[i + 1] = session.step([forced[i] if forced is not None else tokens[-1]])[0]
        return tokens, logits

    def session(self, parked: bool = False) -> Session:
        """A history of its own that the caller drives row by row: prompts, steps of several rows, truncation. parked: without a slot, until a call
        needs one."""
        with self._turn:
            self._check_open()
            return self._held(Session(self, parked=self.stage.new_parked(0) if parked else None))

    def sessions(self) -> list[Session]:
        """Those that are open or parked, and held by somebody, from the oldest on."""
        with self._turn:
            return sorted(self._sessions, key=lambda session: session.serial)

    def _held(self, session: Session) -> Session:
        """Prompts may start from its rows as long as it is open."""
        with self._turn:
            self._sessions.add(session)
        return session

    def restore(self, path: str | Path, progress: Progress | None = None, parked: bool = False) -> Session:
        """A session as `Session.save` wrote it, which every call continues with the same bits as the one that was saved.

        The engine may be on one device or a pair, with histories in either tier and extents of any size. Every checksum of the file is compared while
        it is read. progress(bytes_done, bytes_total, section). Raises SessionFileError if the file is truncated, damaged, of another model, other
        weights or formats, or has more rows than `context_rows_max`; InputError when all sessions are in use; DeviceMemoryError, HipError. No
        session stays open then. parked: the session is parked, and no slot is needed.
        """
        self._check_open()
        with SessionFile(path) as file:
            persist.Format(self.config, self.spec, self.fingerprint, self.stage).check(file.path, file.header, self.context_rows_max)
            with self._turn:
                held = self.stage.new_parked(file.header.rows) if parked else None
                session = Session(self, parked=held)
            try:
                if held is None:
                    session._life.go(SessionState.RESTORING, "restore")
                session._tokens = persist.restore_session(self.stage, self._turn, self._check_open, file, held or session.slot, progress)
                if held is None:
                    session._life.rest(session.rows)
                session.sampling, session._pending = persist.sampling_of(file), list(file.header.pending)
                session._prompt_rows, session.notes = file.header.prompt_rows, file.header.notes
            except BaseException:
                session.close()
                raise
        return self._held(session)

    def _requests(self, given: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None) -> list[Request]:
        prompts = [cast(Prompt, given)] if is_single(given) else list(cast(Sequence[Prompt], given))
        if not prompts:
            raise InputError("prompts: got an empty list, wanted at least one prompt")
        shared = self.default_params() if params is None else params
        every = list(shared) if isinstance(shared, (list, tuple)) else [cast(SamplingParams, shared)] * len(prompts)
        wrong = next((one for one in every if not isinstance(one, SamplingParams)), None)
        if wrong is not None:
            raise InputError(f"params: got {type(wrong).__name__}, wanted SamplingParams")
        if len(every) != len(prompts):
            raise InputError(f"params: got {len(every)}, wanted one or {len(prompts)}, as many as prompts")
        return [self.request(prompt, one, index) for index, (prompt, one) in enumerate(zip(prompts, every, strict=True))]

    def _request(self, index: int, ids: list[int], params: SamplingParams, constraint: Constraint | None = None) -> Request:
        if params.stop and self.tokenizer is None:
            raise InputError("stop strings need a tokenizer; this checkpoint has no tokenizer.json: use stop_token_ids")
        seed = params.seed if params.seed is not None else fresh_seed()
        decoder = StreamDecoder(self.tokenizer) if self.tokenizer is not None else None
        return Request(index, ids, params, seed, decoder, StopMatcher(params.stop), constraint)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text. Raises InputError without a tokenizer."""
        if self.tokenizer is None:
            raise InputError("this checkpoint has no tokenizer.json: give the prompt as token ids")
        return self.tokenizer.encode(text)

    def _read_logits(self, count: int, row_error: Array) -> np.ndarray:
        logits = self.step.logits.slice(0, count).numpy(self.stage.first.stream)
        self.stage.raise_silent()
        self._check_rows(row_error)
        return logits

    def _check_rows(self, row_error: Array) -> None:
        """Raises Glm53Error if a history row could not be quantised since the last call. Waits for the stream."""
        bad = self.stage.first.row_error(row_error)
        if bad:
            raise Glm53Error(row_error_text(bad - 1))

    def _check_ids(self, ids: list[int], rows: int = 0) -> None:
        check_prompt(ids, self.spec, self.context_rows_max, rows)

    def _check_open(self) -> None:
        if self.device.closed:
            raise LifetimeError("the engine is used after close(); next: open it again")

    def _close_sessions(self, slots: Sequence[int]) -> None:
        """Gives the sessions' memory back. After `close` nothing is left to do."""
        if not self.device.closed:
            self.decoder.forget(slots)
            self.stage.close(slots)

    def _prefill(self, slot: int, ids: list[int]) -> None:
        """Prompt rows behind those that the session has, in as many passes as the tier wants. Logits of the last row in row 0 of the step's."""
        self.decoder.settle()  # the step's logits are about to be written
        done = 0
        while done < len(ids):
            count = min(self.stage.chunk_rows(slot, len(ids) - done), self.config.prefill_chunk_rows)
            self.stage.prefill(slot, ids[done : done + count])
            done += count

    def _run(self, requests: list[Request]) -> Iterator[Chunk]:
        queue = Queue(max(1, self.stage.first.keys.free_slots), self.config.prefill_chunk_rows)  # beside its callers' own sessions
        batch = Batch(queue, {queue.add(len(request.prompt)): request for request in requests})
        try:
            while (action := queue.next()) is not None:
                done = self.act(action, batch)
                yield from (chunk for _, chunk in done.chunks)
                error = done.failed[0][1] if done.failed else done.error
                if error is not None:
                    raise error
        finally:
            with self._turn:
                self._end([r for r in requests if r.slot >= 0])

    def request(self, prompt: Prompt, params: SamplingParams, index: int = 0, constraint: Constraint | None = None) -> Request:
        """A request for a `Batch` of its caller's; constraint: what it may draw, of this request alone. Raises InputError if it could never run: bad
        token ids, a prompt beyond the context."""
        self._check_open()
        ids = self.encode(prompt) if isinstance(prompt, str) else integers(prompt)
        self._check_ids(ids)
        return self._request(index, ids, params, constraint)

    def drop(self, serials: Sequence[int], batch: Batch) -> None:
        """Ends requests of a batch at any moment between two actions and gives their memory back; a step in flight goes on without them.

        Raises HipError if the device refuses to be waited for; the requests have ended all the same.
        """
        requests = [(serial, batch.by_serial.pop(serial)) for serial in serials]
        with self._turn, ExitStack() as steps:  # each has its turn, the last one first
            ending: list[Request] = []
            steps.callback(lambda: self._end([r for r in ending if r.slot >= 0]))
            for serial, request in requests:
                steps.callback(_finish, batch, serial, request, ending)

    def _end(self, requests: list[Request]) -> None:
        """Ends the requests' histories."""
        slots = [r.slot for r in requests]
        for request in requests:
            request.slot = -1
        self._close_sessions(slots)

    def act(self, action: Prefill | Step, batch: Batch) -> Outcome:
        """Does one action of a batch's queue: what it added to the requests that drew a token; those that have ended have left the batch.

        Raises where the action as a whole failed, with its requests still in the batch: of a prefill one, of a step all of them and those of
        `Batch.serials`. End them with `drop`; the others go on, unless it is DeviceLost or LinkStuck. After DeviceMemoryError of a step it is enough
        to end some of its requests: no row was added.
        """
        with self._turn:
            self._check_open()
            done = Outcome()
            return self._deliver(self._prompt(action, batch) if isinstance(action, Prefill) else self._step(action, batch, done), batch, done)

    def collect(self, batch: Batch) -> Outcome:
        """What the step in flight drew, if there is one, without another one behind it. Raises as `act` of a step."""
        with self._turn:
            self._check_open()
            done = Outcome()
            return self._deliver([] if batch.ticket is None else self._collect(batch, done, ahead=False), batch, done)

    def _deliver(self, drawn: list[tuple[int, list[Drawn]]], batch: Batch, done: Outcome) -> Outcome:
        """Tokens to their requests; those that end leave the batch."""
        ended: list[int] = []
        for serial, tokens in drawn:
            request = batch.by_serial[serial]
            try:
                for one in tokens:  # those behind its last one are dropped
                    if request.finish_reason is None:
                        done.chunks.append((serial, request.accept(one, self.spec.eos_token_ids, self.context_rows_max)))
            except Glm53Error as error:
                done.failed.append((serial, error))
            if request.finish_reason is not None:
                ended.append(serial)
        for serial, _ in done.failed:
            batch.by_serial[serial].spoiled = True
            ended.append(serial)
        try:
            self.drop(ended, batch)
        except Glm53Error as error:
            done.error = error
        return done

    def _prompt(self, action: Prefill, batch: Batch) -> list[tuple[int, list[Drawn]]]:
        """A chunk of a prompt, and after the last one the first token."""
        request = batch.by_serial[action.serial]
        self._read_kind = (-1, -1)  # the time until the next step is read has this chunk in it
        if request.slot < 0:
            self._start(request)
        with self.stage.all_or_nothing(request.slot):
            self._prefill(request.slot, request.prompt[max(action.start, request.reused_rows) : action.stop])
        return [(action.serial, [self._draw_first(request)])] if action.last else []

    def _start(self, request: Request) -> None:
        """A history for a request: a fork of the session whose prompt rows begin with most of the request's tokens, or a new one.

        Rows of prompts alone are taken, since their bits are those that the request would compute: its text does not depend on what is reused.
        """
        source, rows = self._longest_prefix(request)
        if source is None:
            request.slot = self.stage.open()
        else:
            self.decoder.settle()
            request.slot, request.reused_rows = source.branch(rows), rows
        self._mark_prompt(request)

    def _longest_prefix(self, request: Request) -> tuple[Session | None, int]:
        """The owner's session, open or parked, with most prompt rows in common, and how many; at least one token is left to compute."""
        best: tuple[Session | None, int] = (None, REUSED_ROWS_MIN - 1)
        for session in (one for one in self.sessions() if one.owner == request.owner):
            rows = session.common_prompt_rows(request.prompt[:-1])
            if rows > best[1]:
                best = session, rows
        return best if best[0] is not None else (None, 0)

    def _mark_prompt(self, request: Request) -> None:
        """Before a request's first draw in its slot: the repetition penalty, if it has one, counts its tokens so far."""
        for side in self.stage.sides:
            side.sampler.begin(request.slot, [*request.prompt, *request.tokens] if request.params.penalises else None)

    def _draw_first(self, request: Request) -> Drawn:
        """The token behind the last prompt row, whose logits stand in row 0 of every side's step. Each side draws it itself."""
        every = [side.sampler.draw(side.step.logits.slice(0, 1), [request.draw_row()])[0] for side in self.stage.sides]
        self._check_rows(self.stage.first.prompt_row_error)
        return every[0]

    def _step(self, action: Step, batch: Batch, done: Outcome) -> list[tuple[int, list[Drawn]]]:
        """The tokens of one decode step, by serial; a request whose row could not be stored goes to `done.failed`.

        The step after it is already enqueued when this returns, unless a request ends here for sure. A step that was enqueued for other requests than
        those of the action comes first: its rows are computed, so its tokens are the next ones of its requests.
        """
        if batch.ticket is None:
            rows = [(serial, batch.by_serial[serial].step_row()) for serial in action.serials]
            launched = self.decoder.launch([row for _, row in rows], self._depth(batch, action.serials))
            batch.serials, batch.ticket = tuple(serial for serial, _ in rows), launched
        return self._collect(batch, done, ahead=batch.serials == action.serials)

    def _collect(self, batch: Batch, done: Outcome, ahead: bool) -> list[tuple[int, list[Drawn]]]:
        """What the step in flight drew; `ahead`: the next one is enqueued before that is read, where it may be."""
        serials, ticket = batch.serials, batch.ticket
        assert ticket is not None
        batch.ticket = None
        if ahead and not any(batch.by_serial[serial].ends_next(self.context_rows_max) for serial in serials):
            with suppress(DeviceMemoryError):  # no row was added; the next action asks again, when requests may have ended
                batch.ticket = self.decoder.ahead(ticket) if ticket.depth == self._depth(batch, serials) else None
        drawn = self.decoder.collect(ticket)
        self._time_round(ticket)
        if ticket.bad_row is not None and serials[ticket.bad_row] in batch.by_serial:  # one of a request that has ended was computed in vain
            done.failed.append((serials[ticket.bad_row], Glm53Error(row_error_text(ticket.bad_row))))
        failed = {serial for serial, _ in done.failed}
        return [(serial, one) for serial, one in zip(serials, drawn, strict=True) if serial in batch.by_serial and serial not in failed]

    def _depth(self, batch: Batch, serials: Sequence[int]) -> int:
        """Drafts of the next step: none beside a constrained request, whose mask is known for one token."""
        if any(batch.by_serial[serial].constraint is not None for serial in serials):
            return 0
        return self.config.drafts_max if self._policy is None else self._policy.of(len(serials)).depth()

    def _time_round(self, ticket: Ticket) -> None:
        """Tells the policy what a step's drafts were worth. Its time is that since the step before was read, if both are of one kind."""
        if self._policy is None or ticket.drawn is None:
            return
        if any(row.draw.mask is not None for row in ticket.rows):  # its time says nothing of other steps
            self._read_kind = (-1, -1)
            return
        now, kind = time.perf_counter(), (ticket.depth, len(ticket.rows))
        step_us = (now - self._read_at) * 1e6 if kind == self._read_kind else None
        self._read_at, self._read_kind = now, kind
        self._policy.of(len(ticket.rows)).add(ticket.depth, [len(drawn) - 1 for drawn in ticket.drawn], step_us)


def _finish(batch: Batch, serial: int, request: Request, ending: list[Request]) -> None:
    if batch.finish(serial, request):
        ending.append(request)
