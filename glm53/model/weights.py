"""Checkpoint tensors → device arrays.

Streams each tensor from its file's pages through two pinned slots to the device, where a kernel converts it into its place, so that host
memory holds at most the slots beside the arrays. Invariants: nothing is allocated before the whole size is known to fit; on any failure
everything allocated here is freed again. Knows no prompts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, NoReturn, Self

import numpy as np
from numpy.typing import NDArray

from glm53.config import SCALE_BLOCK
from glm53.errors import CheckpointError, DeviceMemoryError, HipError, human_bytes
from glm53.hip import Array, Buffer, Device, Event, HostBuffer
from glm53.hip.array import f32_from_e4m3
from glm53.model.checkpoint import Checkpoint, TensorInfo
from glm53.model.layout import ArrayPlan, Part, array_plans, format_notes
from glm53.model.names import LoadPlan, match
from glm53.ops import weights as ops
from glm53.ops.matrix import Matrix, matrix_bytes
from glm53.spec import WHOLE, DType, ModelSpec, Shard, WeightFormat

CATEGORY = "weights"
SLOT_BYTES_MAX = 16 << 20  # two slots on the host and two on the device: 64 MiB beside the model
SCAN_BYTES = 8 << 20  # of one step of the NaN scan
_ALIGN = 256
_STORED = {"F32": DType.F32, "BF16": DType.BF16, "F8_E4M3": DType.F8E4M3}

Progress = Callable[[int, int, str], None]
Item = Array | Matrix


@dataclass(frozen=True)
class IndexerWeights:
    """Of a full layer. T: the activation type; W: a weight format, as `layout.array_plans` says."""

    wq_b: Matrix  # [index_n_heads * index_head_dim, q_lora_rank] W
    wk: Matrix  # [index_head_dim, hidden] W
    k_norm_weight: Array  # [index_head_dim] T
    k_norm_bias: Array  # [index_head_dim] T
    weights_proj: Matrix  # [index_n_heads, hidden] W


@dataclass(frozen=True)
class DenseWeights:
    """A gated MLP of width I."""

    gate_up: Matrix  # [2 * I, hidden] W: gate rows, then up rows
    down: Matrix  # [hidden, I] W


@dataclass(frozen=True)
class MoeWeights:
    """Routed experts of width I, E of them, and the shared expert."""

    router: Matrix  # [E, hidden] f32
    bias: Array  # [E] f32
    gate_up: Matrix  # [E, 2 * I, hidden] W: gate rows, then up rows
    down: Matrix  # [E, hidden, I] W
    shared: DenseWeights


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer. kv_b is stored split: wk for absorbing queries, wv for expanding outputs."""

    input_norm: Array  # [hidden] T
    post_norm: Array  # [hidden] T
    q_a: Matrix  # [q_lora_rank, hidden] W
    q_a_norm: Array  # [q_lora_rank] T
    q_b: Matrix  # [heads * qk_head_dim, q_lora_rank] W
    kv_a: Matrix | None  # [kv_lora_rank + rope, hidden] W; None on the peer of a pair
    kv_a_norm: Array  # [kv_lora_rank] T
    wk: Matrix  # [heads, kv_lora_rank, nope] W
    wv: Matrix  # [heads, v, kv_lora_rank] W
    o: Matrix  # [hidden, heads * v] W
    indexer: IndexerWeights | None  # None: the layer uses the selection of the closest full layer before it
    mlp: DenseWeights | MoeWeights


@dataclass(frozen=True)
class MtpWeights:
    """The multi-token-prediction layer; embedding and output head are the model's."""

    enorm: Array  # [hidden] T
    hnorm: Array  # [hidden] T
    eh_proj: Matrix  # [hidden, 2 * hidden] W, embedding half first
    layer: LayerWeights
    norm: Array  # [hidden] T


@dataclass(frozen=True)
class Weights:
    """All weights of a model on one device, or those of one side of a pair: then heads, I and the head's vocab are the side's."""

    embed: Array  # [vocab, hidden] f32 or bf16; on a side all rows and half of the columns
    final_norm: Array  # [hidden] T
    lm_head: Matrix  # [vocab, hidden] W; if tied and not quantised, rows of the same array as embed
    layers: tuple[LayerWeights, ...]
    mtp: MtpWeights | None
    nbytes: int  # allocated on the device
    notes: tuple[str, ...]  # what the checkpoint held beside the model, and what could not be quantised
    buffers: tuple[Buffer, ...] = field(repr=False)

    def free(self) -> None:
        """Gives the device memory back. No kernel may be running on it; the arrays are dead afterwards."""
        for buffer in self.buffers:
            buffer.free()


def load_weights(
    checkpoint: Checkpoint,
    spec: ModelSpec,
    device: Device,
    dtype: DType,
    progress: Progress | None = None,
    check: bool = False,
    load_mtp: bool = False,
    weights: str = "auto",
    shard: Shard = WHOLE,
) -> Weights:
    """Loads a checkpoint, or one side's share of it, for activations of type `dtype` (F32 or BF16).

    Args:
        progress: called after each piece with bytes done, bytes in all, and the tensor's name. With `check` the scan counts as well.
        check: look for NaN and infinity in every stored tensor first, MTP layer included.
        load_mtp: load the MTP layer too, if the checkpoint has it.
        weights: format of the matrices, auto, q8q4, bf16 or f32: `layout.array_plans`.
        shard: the side of a pair; the bytes of both together are those of the whole, each split matrix by rows or columns.

    Raises:
        InputError: the model cannot be shared by two devices (`layout.shard_widths`).
        CheckpointError: tensors that do not fit `spec`; with `check`, or where it is quantised, the tensor, count and first index of what is
            not finite.
        DeviceMemoryError: before anything is allocated, with what is needed and what is free.
    """
    plan = match(checkpoint, spec)
    plans = array_plans(plan, dtype, load_mtp, weights, shard)
    report = _Report(progress, _load_bytes(plans) + (_scan_bytes(plan) if check else 0))
    if check:
        check_finite(checkpoint, plan, report.add)
    slot_bytes = _slot_bytes(plans)
    scratch_bytes = max(p.scratch_bytes for p in plans)
    nbytes = sum(p.nbytes for p in plans)
    needed, free = nbytes + scratch_bytes + 2 * slot_bytes + _ALIGN, device.free_bytes()
    if needed > free:
        raise DeviceMemoryError(
            f"{CATEGORY}: {human_bytes(needed)} needed on device {device.name} ({human_bytes(nbytes)} of weights, the rest for loading), "
            f"{human_bytes(free)} free; close what else uses the device, or choose a device with more memory"
        )
    with _Loader(checkpoint, device, slot_bytes, scratch_bytes, report.add) as loader:
        for array_plan in plans:
            loader.load(array_plan)
        return assemble(loader.items, plan.spec, (*plan.notes, *format_notes(plans)))


def check_finite(checkpoint: Checkpoint, plan: LoadPlan, add: Callable[[int, str], None]) -> None:
    """Raises `CheckpointError` at the first tensor with a NaN or an infinity (F8_E4M3: the NaN codes 0x7f and 0xff)."""
    for planned in plan.tensors.values():
        for info in (planned.info, planned.scale):
            if info is not None:
                _check_tensor(checkpoint, info, add)


def _check_tensor(checkpoint: Checkpoint, info: TensorInfo, add: Callable[[int, str], None]) -> None:
    flat = checkpoint.view(info.name).reshape(-1)
    step, count, first = SCAN_BYTES // flat.itemsize, 0, -1
    for start in range(0, flat.size, step):
        values = flat[start : start + step]
        if info.dtype == "F8_E4M3":
            bad = (values & 0x7F) == 0x7F
        elif info.dtype == "BF16":
            bad = (values & 0x7F80) == 0x7F80
        else:
            bad = ~np.isfinite(values)
        found = int(np.count_nonzero(bad))
        if found and first < 0:
            first = start + int(np.argmax(bad))
        count += found
        done = values.size * flat.itemsize
        checkpoint.release(info, start * flat.itemsize, start * flat.itemsize + done)
        add(done, info.name)
    if count:
        index = [int(i) for i in np.unravel_index(first, info.shape)]
        raise CheckpointError(
            f"{checkpoint.path}: {info.name} ({info.dtype} {list(info.shape)}) holds {count} values that are NaN or infinite, the first at "
            f"{index}, expected none; fetch {info.file} again"
        )


class _Report:
    """Adds up progress."""

    def __init__(self, progress: Progress | None, total: int):
        self.progress, self.total, self.done = progress, total, 0

    def add(self, count: int, name: str) -> None:
        self.done += count
        if self.progress is not None:
            self.progress(self.done, self.total, name)


def _scaled_on_host(part: Part) -> bool:
    """Whether an FP8 part's columns start inside a scale block: kernels count blocks from the first column they are given."""
    return part.source.scale is not None and part.cols.start % SCALE_BLOCK != 0


def _staged_type(part: Part) -> DType:
    return DType.F32 if _scaled_on_host(part) else _STORED[part.source.info.dtype]


def _row_bytes(part: Part) -> int:
    """Bytes of one staged row; a vector is one row."""
    return len(part.cols) * _staged_type(part).item_bytes


def _scale_cols(part: Part) -> range:
    """Columns of the scale that belong to the part's; none without a scale."""
    return range(0) if part.source.scale is None else range(part.cols.start // SCALE_BLOCK, -(-part.cols.stop // SCALE_BLOCK))


def _scale_bytes(part: Part, rows: int) -> int:
    """Bytes of the staged scales of `rows` rows that start with a scale block."""
    return 0 if _scaled_on_host(part) else -(-rows // SCALE_BLOCK) * len(_scale_cols(part)) * 4


def _load_bytes(plans: list[ArrayPlan]) -> int:
    return sum(part.rows * _row_bytes(part) + _scale_bytes(part, part.rows) for plan in plans for part in plan.parts)


def _scan_bytes(plan: LoadPlan) -> int:
    return sum(t.info.nbytes + (t.scale.nbytes if t.scale else 0) for t in plan.tensors.values())


def _align(count: int) -> int:
    return -(-count // _ALIGN) * _ALIGN


def _slot_bytes(plans: list[ArrayPlan]) -> int:
    """Size of a staging slot: the largest part if that is small, and never less than one row of scale blocks (or one row) of any part."""
    largest = least = 0
    for part in (part for plan in plans for part in plan.parts):
        rows = 1 if part.source.scale is None else min(part.rows, SCALE_BLOCK)
        least = max(least, _align(rows * _row_bytes(part)) + _align(_scale_bytes(part, rows)))
        largest = max(largest, _align(part.rows * _row_bytes(part)) + _align(_scale_bytes(part, part.rows)))
    return max(least, min(largest, SLOT_BYTES_MAX))


class _Slot:
    """Half of the staging memory: a piece is copied from the file to `host`, from there to `device`, and converted from there."""

    def __init__(self, host: HostBuffer, device: Buffer, offset: int, slot_bytes: int, event: Event):
        self.array = host.array[offset : offset + slot_bytes]
        self.host_address = host.host_address + offset
        self.device_buffer, self.device_offset = device, offset
        self.event = event
        self.busy = False


class _Loader:
    """Fills device arrays one after another. As a context manager: on an error everything is freed, else only the staging memory."""

    def __init__(self, checkpoint: Checkpoint, device: Device, slot_bytes: int, scratch_bytes: int, add: Callable[[int, str], None]):
        self.checkpoint, self.device, self.add = checkpoint, device, add
        self.slot_bytes, self.scratch_bytes = slot_bytes, scratch_bytes
        self.items: dict[str, Item] = {}
        self.scratch: list[Buffer | HostBuffer] = []
        self.split_buffer: Buffer | None = None  # kv_b before it is split, and what comes of that; the same for all layers
        self.slots: list[_Slot] = []
        self.turn = 0
        self.stream = device.stream()

    def __enter__(self) -> Self:
        try:
            host = self.device.host_alloc(2 * self.slot_bytes, category="loading")
            self.scratch.append(host)
            staging = self.device.alloc(2 * self.slot_bytes + _ALIGN, "loading")
            self.scratch.append(staging)
            self.error = Array(staging, DType.U32, (1,), 2 * self.slot_bytes)
            self.error.upload(np.zeros(1, np.uint32))
            for i in range(2):
                self.slots.append(_Slot(host, staging, i * self.slot_bytes, self.slot_bytes, self.device.event()))
        except BaseException:
            self._run(self._ends() + self._frees())
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        error = self._run([self.device.synchronize, *self._ends()])
        if kind is not None or error is not None:
            self._run(self._frees())
        if kind is None and error is not None:
            raise error  # after a failure the device may refuse these steps as well: the first error is the one to report

    def _ends(self) -> list[Callable[[], None]]:
        return [slot.event.close for slot in self.slots] + [buffer.free for buffer in self.scratch] + [self.stream.close]

    def _frees(self) -> list[Callable[[], None]]:
        return [buffer.free for buffer in _buffers(self.items)]

    @staticmethod
    def _run(steps: list[Callable[[], None]]) -> HipError | None:
        """Runs every step, whatever the others do; the first error, if any."""
        first: HipError | None = None
        for step in steps:
            try:
                step()
            except HipError as error:
                first = first or error
        return first

    def load(self, plan: ArrayPlan) -> None:
        """Allocates the array(s) of a plan and enqueues everything that fills them. Waits for what is quantised, to see whether it could be."""
        if plan.halves:
            self._load_split(plan)
        else:
            self._fill(plan, self._allocate(plan))
        if any(p.format.quantised for p in plan.halves or (plan,)) and self.error.numpy(self.stream)[0]:
            self._refuse(plan)

    def _allocate(self, plan: ArrayPlan) -> Matrix:
        matrix = Matrix.empty(self.device, plan.format, plan.shape, CATEGORY)
        self.items[plan.key] = matrix if plan.is_matrix else matrix.codes
        return matrix

    def _load_split(self, plan: ArrayPlan) -> None:
        """kv_b into scratch memory, split from there: into place, or into more of it and converted from that."""
        targets = [self._allocate(half) for half in plan.halves]
        if self.split_buffer is None:
            self.split_buffer = self.device.alloc(self.scratch_bytes, "loading")
            self.scratch.append(self.split_buffer)
        dtype = DType.F32 if plan.format is WeightFormat.F32 else DType.BF16
        kv_b, end = Array(self.split_buffer, dtype, plan.shape), plan.scratch_bytes
        self._fill(plan, Matrix.plain(kv_b))
        halves = []
        for target in targets:
            if target.format is plan.format:
                halves.append(target.codes)
                continue
            end -= matrix_bytes(plan.format, target.shape)
            halves.append(Array(self.split_buffer, dtype, target.shape, end))
        ops.split_kv_b(self.stream, kv_b, *halves)
        for target, half in zip(targets, halves, strict=True):
            if target.format is not plan.format:
                self._convert(half.reshape(-1, half.shape[-1]), None, target.rows())

    def _convert(self, source: Array, scale: Array | None, target: Matrix) -> None:
        """target [rows, cols] = source [rows, cols] on the device, times its block scales."""
        if target.format.quantised:
            ops.quantise(self.stream, source, scale, target, self.error)
        else:
            ops.dequant(self.stream, source, scale, target.codes)

    def _refuse(self, plan: ArrayPlan) -> NoReturn:
        for part in plan.parts:
            for info in (part.source.info, part.source.scale):
                if info is not None:
                    _check_tensor(self.checkpoint, info, lambda _count, _name: None)
        names = sorted({part.source.info.name for part in plan.parts})
        more = f" (one of {len(names)} tensors)" if len(names) > 1 else ""
        raise CheckpointError(
            f"{self.checkpoint.path}: {names[0]}{more} holds values too large for the f16 scales of {plan.format.label}, expected at most "
            f"{65504 * (8 if plan.format is WeightFormat.Q4G64 else 127):,}; load it with weights auto or bf16"
        )

    def _fill(self, plan: ArrayPlan, target: Matrix) -> None:
        rows, at = target.rows(), 0
        for part in plan.parts:
            self._fill_part(part, rows.rows(at, at + part.rows))
            at += part.rows
        assert at == rows.shape[0]

    def _fill_part(self, part: Part, target: Matrix) -> None:
        """Copies and converts a part into `target` [part.rows, cols], in pieces that fit a slot; scaled ones are whole scale blocks."""
        unit = SCALE_BLOCK if part.source.scale is not None else 1
        step = max(1, (self.slot_bytes - 2 * _ALIGN) // (unit * _row_bytes(part) + _scale_bytes(part, unit))) * unit
        for row in range(0, part.rows, step):
            rows = min(step, part.rows - row)
            self._piece(part, row, target.rows(row, row + rows))
            self.add(rows * _row_bytes(part) + _scale_bytes(part, rows), part.source.info.name)

    def _piece(self, part: Part, row: int, target: Matrix) -> None:
        """Rows of the part from `row` on into `target` [rows, cols], by way of the next slot."""
        slot = self.slots[self.turn]
        self.turn = 1 - self.turn
        if slot.busy:
            slot.event.synchronize()  # the device still reads the slot's host half until then
        rows = target.shape[0]
        value_bytes, scale_bytes = rows * _row_bytes(part), _scale_bytes(part, rows)
        values = slot.array[:value_bytes]
        if _scaled_on_host(part):
            self._stage_scaled(part, row, values.view(np.float32).reshape(rows, -1))
        else:
            self._stage(part.source.info, part.source_row + row, part.cols, values.reshape(rows, -1))
        staged, scale = _staged_type(part), None
        if not scale_bytes and staged is target.dtype:
            self.stream.copy(target.codes.address, slot.host_address, value_bytes)
        else:
            used = value_bytes
            if scale_bytes:
                assert part.source.scale is not None
                at, blocks = _align(value_bytes), -(-rows // SCALE_BLOCK)
                used = at + scale_bytes
                staged_scale = slot.array[at:used].reshape(blocks, -1)
                self._stage(part.source.scale, part.scale_row + row // SCALE_BLOCK, _scale_cols(part), staged_scale)
                scale = Array(slot.device_buffer, DType.F32, (blocks, len(_scale_cols(part))), slot.device_offset + at)
            self.stream.copy(slot.device_buffer.address + slot.device_offset, slot.host_address, used)
            self._convert(Array(slot.device_buffer, staged, target.shape, slot.device_offset), scale, target)
        slot.event.record(self.stream)
        slot.busy = True

    def _stage(self, info: TensorInfo, row: int, cols: range, target: NDArray[np.uint8]) -> None:
        """target [rows, bytes] = columns `cols` of a tensor's rows from `row` on."""
        item_bytes = _STORED[info.dtype].item_bytes
        row_bytes, rows = info.shape[-1] * item_bytes, target.shape[0]
        start, stop = row * row_bytes, (row + rows) * row_bytes
        stored = self.checkpoint.bytes_of(info, start, stop).reshape(rows, row_bytes)
        np.copyto(target, stored[:, cols.start * item_bytes : cols.stop * item_bytes])
        self.checkpoint.release(info, start, stop)

    def _stage_scaled(self, part: Part, row: int, target: NDArray[np.float32]) -> None:
        """target [rows, cols] = the values times their block scales: the f32 product that the kernels take."""
        assert part.source.scale is not None
        rows, cols, blocks = target.shape[0], part.cols, _scale_cols(part)
        codes = np.empty((rows, len(cols)), np.uint8)
        self._stage(part.source.info, part.source_row + row, cols, codes)
        scales = np.empty((-(-rows // SCALE_BLOCK), len(blocks)), np.float32)
        self._stage(part.source.scale, part.scale_row + row // SCALE_BLOCK, blocks, scales.view(np.uint8))
        of_rows = np.arange(rows)[:, None] // SCALE_BLOCK
        of_cols = np.arange(cols.start, cols.stop) // SCALE_BLOCK - blocks.start
        with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is reported by the device, or by `check`
            np.multiply(f32_from_e4m3(codes), scales[of_rows, of_cols], out=target)


def _buffers(items: dict[str, Item]) -> list[Buffer]:
    return [array.buffer for item in items.values() for array in (item.arrays if isinstance(item, Matrix) else (item,))]


def assemble(items: dict[str, Item], spec: ModelSpec, notes: tuple[str, ...]) -> Weights:
    """The arrays and matrices of `layout.array_plans`, by key, as `Weights`. Each has buffers of its own. spec: of the whole model."""
    values: dict[str, Any] = items
    head = values["lm_head"] if "lm_head" in values else Matrix.plain(values["embed"])
    mtp = None
    if "mtp.enorm" in values:
        own = {name: values[f"mtp.{name}"] for name in ("enorm", "hnorm", "eh_proj", "norm")}
        mtp = MtpWeights(layer=_layer(values, "mtp.layer."), **own)
    return Weights(
        embed=values["embed"],
        final_norm=values["final_norm"],
        lm_head=head,
        layers=tuple(_layer(values, f"layers.{i}.") for i in range(spec.n_layers)),
        mtp=mtp,
        nbytes=sum(item.nbytes for item in items.values()),
        notes=notes,
        buffers=tuple(_buffers(items)),
    )


def _layer(arrays: dict[str, Any], base: str) -> LayerWeights:
    def group(kind: Any, key: str, *names: str) -> Any:
        return kind(**{name: arrays[f"{base}{key}.{name}"] for name in names})

    indexer = None
    if f"{base}indexer.wk" in arrays:
        indexer = group(IndexerWeights, "indexer", "wq_b", "wk", "k_norm_weight", "k_norm_bias", "weights_proj")
    mlp: DenseWeights | MoeWeights
    if f"{base}mlp.router" in arrays:
        shared = group(DenseWeights, "mlp.shared", "gate_up", "down")
        mlp = MoeWeights(shared=shared, **{name: arrays[f"{base}mlp.{name}"] for name in ("router", "bias", "gate_up", "down")})
    else:
        mlp = group(DenseWeights, "mlp", "gate_up", "down")
    own = ("input_norm", "post_norm", "q_a", "q_a_norm", "q_b", "kv_a_norm", "wk", "wv", "o")
    return LayerWeights(indexer=indexer, mlp=mlp, kv_a=arrays.get(f"{base}kv_a"), **{name: arrays[base + name] for name in own})
