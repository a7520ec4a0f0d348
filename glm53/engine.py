"""The engine: a checkpoint opened on a device, and the requests that run on it.

    from glm53 import Engine, SamplingParams
    with Engine.open("models/glm53-demo") as engine:
        print(engine.generate("In the beginning", SamplingParams(temperature=0)).text)

One engine drives one device from one thread at a time. Greedy or sampled, a request's tokens depend on its prompt, its parameters, the chunk size
class of its prompt rows and the weights alone, never on the requests beside it.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import cast

import numpy as np

from glm53.config import EngineConfig, GenerationDefaults, read_config, read_generation_config
from glm53.errors import Glm53Error, InputError
from glm53.hip import Array, Device, runtime
from glm53.kv import RowStore
from glm53.mem.extents import ExtentShape
from glm53.model.checkpoint import Checkpoint
from glm53.model.forward import Forward, RowClass, Rows
from glm53.model.sampler import Drawn, Sampler
from glm53.model.weights import Weights, load_weights
from glm53.sampling import SamplingParams
from glm53.sched.queue import Prefill, Queue
from glm53.spec import DType, ModelSpec
from glm53.tokenizer import StopMatcher, StreamDecoder, Tokenizer

Prompt = str | Sequence[int]
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class TokenLogprob:
    """Log-probability of a token under the raw logits (natural log), and of the most probable ones."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # (token id, log-probability), most probable first


@dataclass(frozen=True)
class Chunk:
    """What one step added to one request. `text` may lag behind the tokens: it never holds half a character or a possible stop string."""

    index: int  # which of the prompts given
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: str | None  # None: goes on; "stop": end-of-sequence token or stop string; "length": max_tokens or context limit


@dataclass(frozen=True)
class Completion:
    """A finished request. Given to SamplingParams, `seed` repeats it."""

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]  # an end-of-sequence token is not part of it
    text: str
    finish_reason: str
    logprobs: tuple[TokenLogprob, ...]
    seed: int


@dataclass
class _Request:
    """One running request: its tokens and what turns them into text."""

    index: int
    prompt: list[int]
    params: SamplingParams
    seed: int
    decoder: StreamDecoder | None
    matcher: StopMatcher
    slot: int = -1  # of both stores while it runs
    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None


class Engine:
    """A model on a device. Open with `Engine.open`, close with `close` or a `with` block."""

    def __init__(self, config: EngineConfig, spec: ModelSpec, device: Device, weights: Weights, tokenizer: Tokenizer | None):
        self.config, self.spec, self.device, self.weights, self.tokenizer = config, spec, device, weights, tokenizer
        self.defaults = GenerationDefaults()
        self.dtype = DType.F32 if config.dtype == "f32" else DType.BF16
        self.context_rows_max = min(config.context_rows_max or spec.max_position_embeddings, spec.max_position_embeddings)
        self._stream = device.stream()
        self.sessions_max = config.sessions_max
        item = self.dtype.item_bytes
        shapes = [
            (ExtentShape(config.extent_rows, spec.n_layers, spec.row_width * item), "history"),
            (ExtentShape(config.extent_rows, len(spec.full_layers), spec.index_head_dim * item), "index keys"),
        ]
        self.rows, self.keys = (RowStore(device, self._stream, shape, self.sessions_max, self.context_rows_max, name) for shape, name in shapes)
        rows_max = max(config.prefill_chunk_rows, self.sessions_max)
        self.forward = Forward(device, self._stream, spec, weights, self.dtype, rows_max, self.rows, self.keys)
        self.sampler = Sampler(device, self._stream, self.sessions_max, spec.vocab_size)
        self.logits = Array.empty(device, DType.F32, (self.sessions_max, spec.vocab_size), category="workspace")

    @classmethod
    def open(cls, path: str | Path, config: EngineConfig | None = None, progress: Progress | None = None, **settings: object) -> Engine:
        """Opens a Hugging Face checkpoint directory on a device.

        settings: fields of EngineConfig, e.g. dtype="f32". progress(bytes_done, bytes_total, tensor_name) is called while weights load.
        Raises CheckpointError, InputError, RuntimeUnavailable, DeviceMemoryError; nothing stays allocated then.
        """
        if config is not None and settings:
            raise InputError("Engine.open: give either config or single settings, not both")
        config = config or EngineConfig.of(**settings)
        spec = read_config(path, latent_norm_eps=config.latent_norm_eps)
        checkpoint = Checkpoint.open(path)
        tokenizer = Tokenizer.open(path) if (Path(path) / "tokenizer.json").exists() else None
        runtime.select(None if config.runtime == "auto" else config.runtime)
        device = Device(config.device_index)
        try:
            dtype = DType.F32 if config.dtype == "f32" else DType.BF16
            weights = load_weights(checkpoint, spec, device, dtype, progress=progress, check=config.check_weights)
            engine = cls(config, spec, device, weights, tokenizer)
        except BaseException:
            device.close(free_buffers=True)
            raise
        engine.defaults = read_generation_config(path)
        return engine

    def close(self) -> None:
        """Waits for the device and gives all its memory back. Idempotent."""
        if not self.device.closed:
            self.device.close(free_buffers=True)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def default_params(self) -> SamplingParams:
        """SamplingParams with what the checkpoint's generation_config.json sets."""
        return SamplingParams(**{name: value for name, value in asdict(self.defaults).items() if value is not None})

    def memory(self) -> dict[str, int]:
        """Allocated device bytes by category."""
        return self.device.allocated_bytes()

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> Completion | list[Completion]:
        """Runs one prompt (text or token ids) or a list of prompts to the end; a list runs as one batch and gives a list.

        params: one for all, or one per prompt; None: `default_params()`. Raises InputError before anything runs.
        """
        single = _is_single(prompts)
        requests = self._requests(_listed(prompts), params)
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
        return self._run(self._requests(_listed(prompts), params))

    def generate_logits(self, prompt_ids: Sequence[int], new_tokens: int, forced: Sequence[int] | None = None) -> tuple[list[int], np.ndarray]:
        """Greedy tokens and all their logits: (tokens, [new_tokens, vocab] f32). With `forced`, those tokens are fed instead of the greedy ones."""
        self._check_ids(list(prompt_ids))
        slot = self._open_session()
        logits = np.empty((new_tokens, self.spec.vocab_size), np.float32)
        tokens: list[int] = []
        try:
            out = self.logits.slice(0, 1)
            for start in range(0, len(prompt_ids), self.config.prefill_chunk_rows):
                chunk = list(prompt_ids[start : start + self.config.prefill_chunk_rows])
                self._pass([(slot, chunk)], RowClass.PREFILL, out)
            for i in range(new_tokens):
                logits[i] = out.numpy(self._stream)[0]
                tokens.append(int(logits[i].argmax()))
                if i + 1 < new_tokens:
                    self._pass([(slot, [forced[i] if forced is not None else tokens[-1]])], RowClass.STEP, out)
        finally:
            self._close_session(slot)
        return tokens, logits

    def _requests(self, prompts: list[Prompt], params: SamplingParams | Sequence[SamplingParams] | None) -> list[_Request]:
        if not prompts:
            raise InputError("prompts: got an empty list, wanted at least one prompt")
        shared = self.default_params() if params is None else params
        every = [shared] * len(prompts) if isinstance(shared, SamplingParams) else list(shared)
        if len(every) != len(prompts):
            raise InputError(f"params: got {len(every)}, wanted one or {len(prompts)}, as many as prompts")
        requests = []
        for index, (prompt, one) in enumerate(zip(prompts, every, strict=True)):
            ids = self.encode(prompt) if isinstance(prompt, str) else [int(i) for i in prompt]
            self._check_ids(ids)
            if one.stop and self.tokenizer is None:
                raise InputError("stop strings need a tokenizer; this checkpoint has no tokenizer.json: use stop_token_ids")
            seed = one.seed if one.seed is not None else fresh_seed()
            decoder = StreamDecoder(self.tokenizer) if self.tokenizer is not None else None
            requests.append(_Request(index, ids, one, seed, decoder, StopMatcher(one.stop)))
        return requests

    def encode(self, text: str) -> list[int]:
        """Token ids of a text. Raises InputError without a tokenizer."""
        if self.tokenizer is None:
            raise InputError("this checkpoint has no tokenizer.json: give the prompt as token ids")
        return self.tokenizer.encode(text)

    def _check_ids(self, ids: list[int]) -> None:
        if not ids:
            raise InputError("prompt: it is empty, wanted at least one token")
        bad = next((i for i in ids if not 0 <= i < self.spec.vocab_size), None)
        if bad is not None:
            raise InputError(f"prompt: token id {bad}, wanted ids in [0, {self.spec.vocab_size})")
        if len(ids) >= self.context_rows_max:
            raise InputError(
                f"prompt: {len(ids)} tokens, wanted at most {self.context_rows_max - 1} so that one can follow "
                f"(context_rows_max {self.context_rows_max}, the model's limit is {self.spec.max_position_embeddings}); "
                "shorten it or open the engine with more context"
            )

    def _open_session(self) -> int:
        slot = self.rows.open()
        assert self.keys.open() == slot
        return slot

    def _close_session(self, slot: int) -> None:
        self._stream.synchronize()  # no kernel may still read rows that the next session overwrites
        self.rows.release(slot)
        self.keys.release(slot)

    def _pass(self, work: list[tuple[int, list[int]]], kind: RowClass, logits: Array) -> None:
        """Computes the next rows of some sessions: (slot, tokens) each. Logits of the last len(logits) rows."""
        tokens: list[int] = []
        positions: list[int] = []
        sessions: list[int] = []
        for slot, ids in work:
            start = self.rows.rows(slot)
            for store in (self.rows, self.keys):
                store.reserve(slot, start + len(ids))
            tokens += ids
            positions += range(start, start + len(ids))
            sessions += [slot] * len(ids)
        batch = Rows(np.array(tokens, np.int32), np.array(positions, np.int32), np.array(sessions, np.int32))
        self.forward.run(batch, kind, logits)
        for slot, ids in work:
            for store in (self.rows, self.keys):
                store.advance(slot, len(ids))

    def _run(self, requests: list[_Request]) -> Iterator[Chunk]:
        queue = Queue(self.sessions_max, self.config.prefill_chunk_rows)
        by_serial = {queue.add(len(r.prompt)): r for r in requests}
        try:
            while (action := queue.next()) is not None:
                if isinstance(action, Prefill):
                    request = by_serial[action.serial]
                    if action.start == 0:
                        request.slot = self._open_session()
                        self.sampler.begin(request.slot, request.prompt if request.params.penalises else None)
                    ids = request.prompt[action.start : action.stop]
                    self._pass([(request.slot, ids)], RowClass.PREFILL, self.logits.slice(0, 1))
                    active = [(action.serial, request)] if action.last else []
                else:
                    active = [(serial, by_serial[serial]) for serial in action.serials]
                    work = [(r.slot, r.tokens[-1:]) for _, r in active]
                    self._pass(work, RowClass.STEP, self.logits.slice(0, len(active)))
                if not active:
                    continue
                drawn = self.sampler.draw(
                    self.logits.slice(0, len(active)),
                    [(r.slot, r.params, r.seed, len(r.prompt) + len(r.tokens)) for _, r in active],
                )
                for (serial, request), one in zip(active, drawn, strict=True):
                    chunk = self._accept(request, one)
                    if chunk.finish_reason is not None:
                        queue.finish(serial)
                        self._close_session(request.slot)
                        request.slot = -1
                    yield chunk
        finally:
            for request in requests:
                if request.slot >= 0:
                    self._close_session(request.slot)
                    request.slot = -1

    def _accept(self, request: _Request, drawn: Drawn) -> Chunk:
        """Takes a drawn token into the request and says what it adds."""
        token, params = drawn.token_id, request.params
        if token < 0:
            raise Glm53Error(
                f"the logits for position {len(request.prompt) + len(request.tokens)} hold no finite number; check the weights (--check-weights), "
                "then the device (glm53 selftest)"
            )
        ends = token in params.stop_token_ids or (token in self.spec.eos_token_ids and not params.ignore_eos)
        text = ""
        if not ends:
            request.tokens.append(token)
            text = request.matcher.push(request.decoder.push(token)) if request.decoder else ""
        if ends or request.matcher.stopped:
            request.finish_reason = "stop"
        elif len(request.tokens) >= params.max_tokens or len(request.prompt) + len(request.tokens) >= self.context_rows_max:
            request.finish_reason = "length"
        if request.finish_reason and request.decoder and not request.matcher.stopped:
            text += request.matcher.push(request.decoder.finish()) + request.matcher.finish()
        logprobs: tuple[TokenLogprob, ...] = ()
        if params.logprobs is not None and not ends:
            logprobs = (TokenLogprob(token, drawn.logprob, drawn.top[: params.logprobs]),)
        return Chunk(request.index, text, () if ends else (token,), logprobs, request.finish_reason)


def fresh_seed() -> int:
    """A seed from the system's entropy."""
    return secrets.randbits(64)


def _is_single(prompts: Prompt | Sequence[Prompt]) -> bool:
    if isinstance(prompts, str):
        return True
    return bool(prompts) and all(isinstance(p, (int, np.integer)) for p in prompts)


def _listed(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """The prompts as a list; a single one becomes a list of one."""
    return [cast(Prompt, prompts)] if _is_single(prompts) else list(cast(Sequence[Prompt], prompts))
