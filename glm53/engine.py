"""The engine: a checkpoint opened on a device, and the requests that run on it.

    from glm53 import Engine, SamplingParams
    with Engine.open("models/glm53-demo") as engine:
        print(engine.generate("In the beginning", SamplingParams(temperature=0)).text)

One engine drives one device. Several threads may use it: their steps take turns, and their requests together need at most `sessions_max`
sessions. Greedy or sampled, a request's tokens depend on its prompt, its parameters, the chunk size class of its prompt rows and the weights
alone, never on the requests beside it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import cast

import numpy as np

from glm53.check import litmus
from glm53.config import EngineConfig, GenerationDefaults, check_prompt, check_widths, read_config, read_generation_config
from glm53.errors import DeviceLost, Glm53Error, InputError, LifetimeError
from glm53.hip import Array, Device, runtime
from glm53.kv import HostTier, HostTierConfig, ResidentTier, RowStore, StepRows, step_of
from glm53.mem.extents import ExtentShape
from glm53.mem.ledger import Ledger, device_place
from glm53.model.checkpoint import Checkpoint
from glm53.model.decode import Decoder, row_error_text
from glm53.model.forward import Forward, Rows, row_layout
from glm53.model.sampler import Drawn, Sampler
from glm53.model.step import StepForward
from glm53.model.weights import Weights, load_weights
from glm53.request import Batch, Chunk, Completion, Prompt, Request, TokenLogprob, fresh_seed, integers, is_single
from glm53.sampling import SamplingParams
from glm53.sched.queue import Prefill, Queue, Step
from glm53.spec import DType, ModelSpec, RowFormat
from glm53.tokenizer import StopMatcher, StreamDecoder, Tokenizer

STEP_ROWS_MIN = 8  # query rows that one step can hold, even with one session: room for draft verification

Progress = Callable[[int, int, str], None]


class Engine:
    """A model on a device. Open with `Engine.open`, close with `close` or a `with` block."""

    def __init__(
        self,
        config: EngineConfig,
        spec: ModelSpec,
        device: Device,
        weights: Weights,
        tokenizer: Tokenizer | None,
        progress: Progress | None = None,
        ledger: Ledger | None = None,
        drawn: Array | None = None,
    ):
        """drawn: positions [draws, index_topk] i32 that replace the indexer's selection in decode steps (`StepForward`)."""
        self.ledger = Ledger() if ledger is None else ledger  # of what this engine allocates
        self.config, self.spec, self.device, self.weights, self.tokenizer = config, spec, device, weights, tokenizer
        self.defaults = GenerationDefaults()
        self.dtype = DType.F32 if config.dtype == "f32" else DType.BF16
        self.context_rows_max = min(config.context_rows_max or spec.max_position_embeddings, spec.max_position_embeddings)
        self.notes: list[str] = []  # which fast paths are in use, and why
        fetch = self._fetch_method()
        # Right before the tier makes its own two: neighbouring streams get different hardware queues, so that they can overlap.
        self._stream = device.stream()
        self._passes = deque([device.event(), device.event()])  # ends of the last two passes, the last one first
        self._turn = threading.RLock()  # held for a step; re-entrant, since an abandoned stream may be collected inside a step
        self.sessions_max = config.sessions_max
        self.step_rows_max = max(self.sessions_max, STEP_ROWS_MIN)
        rows_max = max(config.prefill_chunk_rows, self.step_rows_max)
        self.tier = self._make_tier(rows_max, fetch, progress)
        key_shape = ExtentShape(config.extent_rows, len(spec.full_layers), spec.index_head_dim * self.dtype.item_bytes)
        self.keys = RowStore(device, self._stream, key_shape, self.sessions_max, self.context_rows_max, "index keys")
        flag = lambda: Array.from_numpy(device, np.zeros(1, np.uint32), category="workspace")
        self.prompt_row_error, self.step_row_error = flag(), flag()  # [1] u32: 1 + a row that could not be quantised
        self.sampler = Sampler(device, self._stream, self.step_rows_max, self.sessions_max, spec.vocab_size)
        self.step = self._make_step(drawn)
        self.forward = Forward(device, self._stream, spec, weights, self.dtype, rows_max, self.tier, self.keys, self.step.head, self.prompt_row_error)
        self.decoder = Decoder(device, self._stream, self.step, self.sampler, self.keys, graphs=self._uses_graphs())

    def _make_step(self, drawn: Array | None) -> StepForward:
        rows = StepRows.make(self.device, self.step_rows_max, self.sessions_max)
        return StepForward(
            self.device,
            self._stream,
            self.spec,
            self.weights,
            self.dtype,
            rows,
            self.sampler.tokens,
            step_of(self.tier, rows),
            self.keys,
            self.tier.layout.row_format,
            self.step_row_error,
            drawn,
        )

    def _uses_graphs(self) -> bool:
        """Whether decode steps are recorded and replayed: if asked for, and a short replay gives what launches give."""
        if not self.config.graphs:
            return False
        replay = litmus.graph_replay(self.device, nodes=64, replays=8)
        self.notes.append(
            f"decode steps are recorded and replayed as graphs ({replay.detail})"
            if replay.passed
            else f"decode steps are enqueued launch by launch, since graphs do not replay right here: {replay.detail}"
        )
        return replay.passed

    def _fetch_method(self) -> str:
        """How the host tier brings missed rows: by kernels that read host memory where the litmus loop passes, else gathered by the host."""
        if self.config.kv_tier == "resident":
            return "kernel"
        reads_host = litmus.registered_memory(self.device)
        self.notes.append(
            f"missed rows are read by kernels straight from host memory ({reads_host.detail})"
            if reads_host.passed
            else f"missed rows are gathered by the host, since kernels cannot read registered memory here: {reads_host.detail}"
        )
        return "kernel" if reads_host.passed else "copy"

    def _make_tier(self, pass_rows_max: int, fetch: str, progress: Progress | None) -> ResidentTier | HostTier:
        config = self.config
        layout = row_layout(self.spec, config.row_format(self.spec))
        if config.kv_tier == "resident":
            return ResidentTier(self.device, self._stream, layout, config.extent_rows, self.sessions_max, self.context_rows_max, pass_rows_max)
        # More hot rows than a session can have would never be used.
        hot_rows = min(config.hot_rows, -(-self.context_rows_max // 64) * 64)
        sizes = HostTierConfig(
            hot_rows=max(hot_rows, HostTierConfig.ring_rows_for(self.step_rows_max) + 64) if hot_rows < config.hot_rows else hot_rows,
            step_rows_max=self.step_rows_max,
            extent_rows=config.extent_rows,
            sessions_max=self.sessions_max,
            rows_max=self.context_rows_max,
            topk=self.spec.index_topk,
            host_bytes=int(config.host_kv_gib * 2**30),
            chunk_bytes=config.host_chunk_mib << 20,
            method=config.host_memory,
            fetch=fetch,
        )
        return HostTier(self.device, self._stream, layout, sizes, progress)

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
        check_widths(spec, config.dtype)
        tokenizer = Tokenizer.open(path) if (Path(path) / "tokenizer.json").exists() else None
        runtime.select(None if config.runtime == "auto" else config.runtime)
        ledger = Ledger()
        device = Device(config.device_index, watch=partial(ledger.count, device_place(config.device_index)))
        try:
            dtype = DType.F32 if config.dtype == "f32" else DType.BF16
            weights = load_weights(checkpoint, spec, device, dtype, progress=progress, check=config.check_weights, weights=config.weights)
            engine = cls(config, spec, device, weights, tokenizer, progress, ledger)
        except BaseException:
            device.close(free_buffers=True)
            raise
        engine.defaults = defaults
        return engine

    def close(self) -> None:
        """Waits for the device and gives all its memory and the page-locked memory of the host back. Idempotent."""
        if self.device.closed:
            return
        try:
            self.device.synchronize()
            self.decoder.close()
            self.tier.free()
        except DeviceLost:
            pass  # nothing on a lost device can be given back; the process's end does it
        finally:
            self.device.close(free_buffers=True)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def default_params(self) -> SamplingParams:
        """SamplingParams with what the checkpoint's generation_config.json sets."""
        return SamplingParams(**{name: value for name, value in asdict(self.defaults).items() if value is not None})

    def memory(self) -> dict[str, int]:
        """Allocated bytes by category, those in host memory as `host: <category>`."""
        return self.device.allocated_bytes()

    def memory_by_place(self) -> dict[str, dict[str, int]]:
        """Allocated bytes by place ("device 0", "host") and category. `ledger.peak(place)` is the most that a place held at once."""
        return self.ledger.by_place()

    def cache_counters(self) -> dict[str, int]:
        """What the hot caches did for the histories last opened in each slot: the counters of `ops.hotcache.Counter` and "bytes_from_host".

        Empty for the resident tier. Waits for the device.
        """
        if not isinstance(self.tier, HostTier):
            return {}
        return self.tier.counter_totals()

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
            Completion(tuple(r.prompt), tuple(r.tokens), "".join(texts[r.index]), r.finish_reason or "", tuple(logprobs[r.index]), r.seed)
            for r in requests
        ]
        return done[0] if single else done

    def stream(self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None) -> Iterator[Chunk]:
        """Like `generate`, step by step. Closing the iterator early ends the requests and frees their memory."""
        return self._run(self._requests(prompts, params))

    def generate_logits(self, prompt_ids: Sequence[int], new_tokens: int, forced: Sequence[int] | None = None) -> tuple[list[int], np.ndarray]:
        """Greedy tokens and all their logits: (tokens, [new_tokens, vocab] f32). With `forced`, those tokens are fed instead of the greedy ones."""
        self._check_ids(integers(prompt_ids))
        if not _is_whole(new_tokens) or new_tokens < 1:
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

    def session(self) -> Session:
        """A history of its own that the caller drives row by row: prompts, steps of several rows, truncation."""
        return Session(self)

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
        requests = []
        for index, (prompt, one) in enumerate(zip(prompts, every, strict=True)):
            ids = self.encode(prompt) if isinstance(prompt, str) else integers(prompt)
            self._check_ids(ids)
            if one.stop and self.tokenizer is None:
                raise InputError("stop strings need a tokenizer; this checkpoint has no tokenizer.json: use stop_token_ids")
            seed = one.seed if one.seed is not None else fresh_seed()
            decoder = StreamDecoder(self.tokenizer) if self.tokenizer is not None else None
            requests.append(Request(index, ids, one, seed, decoder, StopMatcher(one.stop)))
        return requests

    def encode(self, text: str) -> list[int]:
        """Token ids of a text. Raises InputError without a tokenizer."""
        if self.tokenizer is None:
            raise InputError("this checkpoint has no tokenizer.json: give the prompt as token ids")
        return self.tokenizer.encode(text)

    def _read_logits(self, count: int, row_error: Array) -> np.ndarray:
        logits = self.step.logits.slice(0, count).numpy(self._stream)
        self._check_rows(row_error)
        return logits

    def _check_rows(self, row_error: Array) -> None:
        """Raises Glm53Error if a history row could not be quantised since the last call. Waits for the stream."""
        if self.tier.layout.row_format is not RowFormat.Q8G64:
            return
        bad = int(row_error.numpy(self._stream)[0])
        if bad:
            row_error.upload(np.zeros(1, np.uint32), self._stream)
            raise Glm53Error(row_error_text(bad - 1))

    def _check_ids(self, ids: list[int], rows: int = 0) -> None:
        check_prompt(ids, self.spec, self.context_rows_max, rows)

    def _check_open(self) -> None:
        if self.device.closed:
            raise LifetimeError("the engine is used after close(); next: open it again")

    def _open_session(self) -> int:
        """A slot of tier and keys. Raises with nothing opened."""
        slot = self.tier.open()
        try:
            return self.keys.open(slot)
        except BaseException:
            self.tier.close(slot)
            raise

    def _close_sessions(self, slots: Sequence[int]) -> None:
        """Gives the sessions' memory back, of every one, also when the device refuses to be waited for. After `close` nothing is left to do."""
        if self.device.closed:
            return
        with ExitStack() as steps:  # each has its turn, the last one first
            for slot in slots:
                steps.callback(self.tier.close, slot)
                steps.callback(self.keys.release, slot)

    @contextmanager
    def _all_or_nothing(self, slot: int) -> Iterator[None]:
        """Whatever raises inside, the session has the rows that it had before."""
        rows = self.tier.rows(slot)
        try:
            yield
        except BaseException:
            if self.tier.rows(slot) > rows:
                self.tier.drop(slot, rows)
                self.keys.truncate(slot, rows)
            raise

    def _prefill_chunk(self, slot: int, ids: list[int]) -> None:
        """Computes the next prompt rows of a session; the logits of the last one stand in row 0 of the step's."""
        start = self.tier.rows(slot)
        self.keys.reserve(slot, start + len(ids))
        positions = np.arange(start, start + len(ids), dtype=np.int32)
        rows = Rows(np.array(ids, np.int32), positions, np.full(len(ids), slot, np.int32))
        self.forward.run(rows, self.step.logits.slice(0, 1))
        self.keys.advance(slot, len(ids))
        # At most two passes are queued, so that an interrupt in a long prompt waits for no more than those.
        self._passes.rotate()
        self._passes[0].synchronize()
        self._passes[0].record(self._stream)

    def _prefill(self, slot: int, ids: list[int]) -> None:
        """Prompt rows behind those that the session has, in as many passes as the tier wants. Logits of the last row in row 0 of the step's."""
        self.decoder.settle()  # the step's logits are about to be written
        done = 0
        while done < len(ids):
            count = self.tier.chunk_rows(slot, len(ids) - done)
            count = min(count, self.config.prefill_chunk_rows)
            self._prefill_chunk(slot, ids[done : done + count])
            done += count

    def _run(self, requests: list[Request]) -> Iterator[Chunk]:
        queue = Queue(self.sessions_max, self.config.prefill_chunk_rows)
        batch = Batch(queue, {queue.add(len(r.prompt)): r for r in requests})
        try:
            while (action := queue.next()) is not None:
                with self._turn:
                    chunks = self._act(action, batch)
                yield from chunks
        finally:
            with self._turn:
                self._end([r for r in requests if r.slot >= 0])

    def _end(self, requests: list[Request]) -> None:
        """Ends the requests' sessions."""
        slots = [r.slot for r in requests]
        for request in requests:
            request.slot = -1
        self._close_sessions(slots)

    def _act(self, action: Prefill | Step, batch: Batch) -> list[Chunk]:
        """Does one action of the queue; what it added to the requests that drew a token."""
        self._check_open()
        if isinstance(action, Prefill):
            request = batch.by_serial[action.serial]
            if action.start == 0:
                request.slot = self._open_session()
                self.sampler.begin(request.slot, request.prompt if request.params.penalises else None)
            self._prefill(request.slot, request.prompt[action.start : action.stop])
            if not action.last:
                return []
            drawn = [(action.serial, self.sampler.draw(self.step.logits.slice(0, 1), [request.draw_row()])[0])]
            self._check_rows(self.prompt_row_error)
        else:
            drawn = self._step(action, batch)
        chunks = [batch.by_serial[serial].accept(one, self.spec.eos_token_ids, self.context_rows_max) for serial, one in drawn]
        ended = [(serial, batch.by_serial[serial]) for serial, _ in drawn if batch.by_serial[serial].finish_reason is not None]
        for serial, _ in ended:
            batch.queue.finish(serial)
        if ended:
            self._end([r for _, r in ended])
        return chunks

    def _step(self, action: Step, batch: Batch) -> list[tuple[int, Drawn]]:
        """The tokens of one decode step, by serial. The step after it is already enqueued when this returns, unless a request ends here for sure."""
        if batch.ticket is None:
            rows = [(serial, batch.by_serial[serial].step_row()) for serial in action.serials]
            batch.serials, batch.ticket = tuple(serial for serial, _ in rows), self.decoder.launch([row for _, row in rows])
        serials, ticket = batch.serials, batch.ticket
        batch.ticket = None
        running = [batch.by_serial[serial] for serial in serials]
        if serials == action.serials and not any(r.ends_next(self.context_rows_max) for r in running):
            ahead = [row.following() for row in ticket.rows]
            if self.decoder.follows(ahead):
                batch.ticket = self.decoder.launch(ahead)
        drawn = self.decoder.collect(ticket)
        alive = set(action.serials)
        if ticket.bad_row is not None and serials[ticket.bad_row] in alive:  # one of a request that has ended was computed in vain
            raise Glm53Error(row_error_text(ticket.bad_row))
        return [(serial, one) for serial, one in zip(serials, drawn, strict=True) if serial in alive]


class Session:
    """One history driven row by row, greedy or otherwise: the caller picks the tokens. Close it, or use a `with` block.

    Prompt rows and step rows are of different classes (docs/decisions/0001-two-row-classes.md): two sessions that made the same calls have the
    same bits.
    """

    def __init__(self, engine: Engine):
        self._engine = engine
        with engine._turn:
            engine._check_open()
            self._slot: int | None = engine._open_session()

    @property
    def slot(self) -> int:
        if self._slot is None:
            raise LifetimeError("the session is used after close(); next: open another one")
        return self._slot

    @property
    def rows(self) -> int:
        """Rows of the history: tokens computed so far."""
        return self._engine.tier.rows(self.slot)

    def prefill(self, ids: Sequence[int]) -> np.ndarray:
        """Appends prompt rows; logits [vocab] f32 after the last one. If it raises, no row was appended."""
        engine, every = self._engine, integers(ids)
        engine._check_open()
        engine._check_ids(every, self.rows)
        with engine._turn, engine._all_or_nothing(self.slot):
            engine._prefill(self.slot, every)
            return engine._read_logits(1, engine.prompt_row_error)[0]

    def step(self, ids: Sequence[int]) -> np.ndarray:
        """Appends 1 to `Engine.step_rows_max` step rows, as decode or verification does; logits [len(ids), vocab] f32. If it raises, no
        row was appended."""
        engine, every = self._engine, integers(ids)
        engine._check_open()
        engine._check_ids(every, self.rows)
        if len(every) > engine.step_rows_max:
            raise InputError(f"step: got {len(every)} tokens, wanted at most {engine.step_rows_max}; use prefill for more")
        with engine._turn, engine._all_or_nothing(self.slot):
            engine.decoder.run_rows([(self.slot, len(every))], every, [self.rows])
            return engine._read_logits(len(every), engine.step_row_error)

    def truncate(self, rows: int) -> None:
        """Keeps the first `rows` rows. Raises InputError outside [0, rows]; has taken place also where it raises a HipError."""
        self._engine._check_open()
        if not _is_whole(rows) or not 0 <= rows <= self.rows:
            raise InputError(f"truncate: got {rows!r}, wanted 0 to {self.rows}, the rows of this session")
        with self._engine._turn:
            try:
                self._engine.tier.truncate(self.slot, rows)
            finally:
                self._engine.keys.truncate(self.slot, rows)

    def close(self) -> None:
        """Gives the history back. Idempotent."""
        slot, self._slot = self._slot, None
        if slot is not None and not self._engine.device.closed:
            with self._engine._turn:
                self._engine._close_sessions([slot])

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _is_whole(value: object) -> bool:
    """A whole number, numpy's included; True and False are none."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)
