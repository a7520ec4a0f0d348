"""Sessions of an engine to and from session files: what a file holds of a session, and when an engine may take it.

A history continues with the same bits only in the engine of the same model, weights and formats; how that engine is split over devices, where its
histories live and how it cuts them does not matter.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from glm53.config import EngineConfig
from glm53.errors import CheckpointError, InputError, SessionFileError
from glm53.hip import Device
from glm53.model.checkpoint import Checkpoint
from glm53.model.stage import Parked, Stage
from glm53.sampling import SamplingParams
from glm53.sessionfile import Header, Progress, Section, SessionFile, host_buffers, save, weights_fingerprint
from glm53.spec import DType, ModelSpec

# Of a model, what changes no bit of a history: where a text ends, and how long it may be.
_FREE_FIELDS = ("eos_token_ids", "max_position_embeddings")


def checkpoint_fingerprint(checkpoint: Checkpoint) -> str:
    """`weights_fingerprint` of all files of a checkpoint. Raises CheckpointError if one cannot be read any more."""
    files = sorted({tensor.file for tensor in checkpoint.tensors.values()})
    try:
        return weights_fingerprint(checkpoint.path, files)
    except OSError as error:
        raise CheckpointError(f"{error.filename} cannot be read: {error.strerror}; next: keep the checkpoint in place while it is open") from error


class Format:
    """What this engine's session files say of model and formats. weights: fingerprint of the files, None for weights that are of none.

    With an MTP layer the histories have its plane behind those of the main layers, and files its hidden row. It changes no token, so that a file with
    it continues in an engine without it, and the other way round, where drafts of the first tokens are then poor.
    """

    def __init__(self, config: EngineConfig, spec: ModelSpec, weights: str | None, stage: Stage):
        shape = {key: value for key, value in asdict(spec).items() if key not in _FREE_FIELDS}
        self.model = json.loads(json.dumps(shape))  # as a file gives it back: lists for tuples
        self.spec, self.weights, self.dtype = spec, weights, config.dtype
        self.weight_format = "bf16" if (config.weights, config.dtype) == ("auto", "bf16") else config.weights
        self.row_format = config.row_format(spec)
        self.mtp = stage.first.tier.layout.planes > spec.n_layers

    def sections(self, rows: int, mtp: bool) -> tuple[Section, ...]:
        """Token ids i32, history rows, index keys of a history of `rows` rows, and the MTP layer's hidden row, in the order of the file."""
        spec, item_bytes = self.spec, (DType.F32 if self.dtype == "f32" else DType.BF16).item_bytes
        hidden = (Section("mtp.hidden", 1, spec.hidden_size * item_bytes, min(rows, 1)),) if mtp else ()
        return (
            Section("tokens", 1, 4, rows),
            Section("rows", spec.n_layers + mtp, self.row_format.row_bytes(spec.kv_lora_rank, spec.qk_rope_head_dim), rows),
            Section("keys", len(spec.full_layers) + mtp, spec.index_head_dim * item_bytes, rows),
            *hidden,
        )

    def header(
        self, rows: int, params: SamplingParams | None, pending: tuple[int, ...], prompt_rows: int = 0, notes: Mapping[str, Any] | None = None
    ) -> Header:
        """See `Header`. params: sampling."""
        return Header(
            model=self.model,
            weights=self.weights,
            weight_format=self.weight_format,
            dtype=self.dtype,
            row_format=self.row_format.value,
            rows=rows,
            sections=self.sections(rows, self.mtp),
            sampling=None if params is None else asdict(params),
            pending=pending,
            prompt_rows=prompt_rows,
            notes=notes or {},
        )

    def check(self, path: Path, header: Header, context_rows_max: int) -> None:
        """Raises SessionFileError unless a file of this header continues here."""
        for key in sorted(self.model.keys() | header.model.keys()):
            got, wanted = header.model.get(key), self.model.get(key)
            if got != wanted:
                following = f"latent_norm_eps {got} (--latent-norm-eps)" if key == "latent_norm_eps" else "the model that it was saved with"
                self._refuse(path, f"its model has {key} {_short(got)}", f"{_short(wanted)}, that of the open model", following)
        if header.weights != self.weights:
            got, wanted = (one[:16] if one else "none, of no files" for one in (header.weights, self.weights))
            self._refuse(path, f"its model has weights with fingerprint {got}", wanted, "the checkpoint that it was saved with")
        for name, option, theirs, ours in (
            ("activations", "dtype", header.dtype, self.dtype),
            ("weights", "weights", header.weight_format, self.weight_format),
            ("history rows", "kv_format", header.row_format, self.row_format.value),
        ):
            if theirs != ours:
                self._refuse(path, f"its {name} are {theirs}", ours, f"{option} {theirs} (--{option.replace('_', '-')} {theirs})")
        if header.rows > context_rows_max:
            self._refuse(path, f"it has {header.rows} rows", f"at most {context_rows_max}", f"context_rows_max above {header.rows}")
        if any(token >= self.spec.vocab_size for token in header.pending):
            self._refuse(path, f"its last token is {header.pending[0]}", f"one below {self.spec.vocab_size}", "the model that it was saved with")
        wanted = self.sections(header.rows, header.section("mtp.hidden") is not None)
        if header.sections != wanted:
            self._refuse(path, f"its sections are {header.sections}", str(wanted), "the model that it was saved with")

    def _refuse(self, path: Path, got: str, wanted: str, following: str) -> None:
        raise SessionFileError(f"{path} does not continue here: {got}, wanted {wanted}; next: open the engine with {following}")


def sampling_of(file: SessionFile) -> SamplingParams | None:
    """The sampling parameters of a file. Raises SessionFileError if they are none."""
    value = file.header.sampling
    try:
        return None if value is None else SamplingParams(**value)
    except (TypeError, InputError) as error:
        raise SessionFileError(f"{file.path} has sampling parameters that cannot be used: {error}; next: use the glm53 that wrote it") from error


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


@contextmanager
def _pinned(device: Device, byte_count: int) -> Iterator[np.ndarray]:
    """`host_buffers` that are page-locked, so that copies to and from the device run at the link's speed, and ordinary memory as well, since not
    every system reads files straight into what `host_alloc` gives."""
    buffers = host_buffers(byte_count)
    registered = device.host_register(buffers.reshape(-1), coherent=True, category="session file")
    try:
        yield buffers
    finally:
        registered.free()


def save_session(
    stage: Stage,
    turn: threading.RLock,
    check_open: Callable[[], None],
    header: Header,
    slot: int | Parked,
    tokens: Sequence[int],
    hidden: np.ndarray | None,
    path: str | Path,
    progress: Progress | None,
) -> int:
    """Writes the first `header.rows` rows of a session, which are settled, with their `tokens` and the MTP layer's state behind the last of them
    (`Stage.hidden_state`); bytes of the file.

    `turn` is held for a piece at a time, so that other sessions go on; this one may be appended to, not truncated or closed.
    """
    ids = np.array(tokens, "<i4").view(np.uint8).reshape(1, header.rows, 4)

    def read(section: Section, first: int, target: np.ndarray) -> None:
        if section.name == "tokens":
            target[:] = ids[:, first : first + target.shape[1]]
            return
        if section.name == "mtp.hidden":
            target[:] = 0 if hidden is None else hidden.view(np.uint8).reshape(target.shape)
            return
        with turn:
            check_open()
            stage.export(slot, section.name, first, target)

    with _pinned(stage.first.device, header.piece_bytes) as buffers:
        return save(path, header, read, progress, buffers)


def restore_session(
    stage: Stage,
    turn: threading.RLock,
    check_open: Callable[[], None],
    file: SessionFile,
    slot: int | Parked,
    progress: Progress | None,
) -> list[int]:
    """Brings the rows of a file, whose header has been checked, into the empty session `slot`, or a parked one with room; their tokens. Raises
    SessionFileError for what is damaged, and what a full device raises; the session is then good for `close` alone."""
    tokens: list[int] = []
    vocab_size = file.header.model["vocab_size"]
    file.check_complete()
    with _pinned(stage.first.device, file.header.piece_bytes) as buffers:
        for section, first, data in file.pieces(buffers, progress):
            if section.name == "tokens":
                ids = data.reshape(-1).view("<i4")
                if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
                    raise SessionFileError(
                        f"{file.path} has token ids {ids.min()} to {ids.max()}, wanted 0 to {vocab_size - 1}; next: use another file"
                    )
                tokens += ids.tolist()
            else:
                with turn:
                    check_open()
                    stage.adopt(slot, section.name, first, data, file.header.rows)
    return tokens
