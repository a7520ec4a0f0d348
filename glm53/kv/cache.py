"""The memory system by itself: histories of rows that a program with its own model appends to and gathers from.

`KvCache` owns a tier (host RAM behind a hot cache per session, or device memory) on one device; `KvSession` is one history. Arrays come and go as
numpy, DLPack tensors, glm53 Arrays or addresses. Nothing outside is touched: the caller's current device, environment, signal and log handlers
stay as they are, and every byte is allocated here. Not thread-safe: one thread at a time per cache.

Order of work: a call with `stream` starts after the work enqueued on that stream so far, and work enqueued there later starts after the call's.
Without `stream` DLPack inputs are ready when their producer says so, glm53 Arrays must be ready, and the call returns when it has read them.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any, Self

import numpy as np

from glm53.errors import InputError, LifetimeError
from glm53.hip import Array, Device, Event, HostBuffer, Stream, runtime
from glm53.kv import dlpack
from glm53.kv.arrays import KvArray, OutputPool
from glm53.kv.host import HostTier, HostTierConfig
from glm53.kv.host_passes import StepPass
from glm53.kv.inputs import PIECE_ROWS, Inputs, Layer
from glm53.kv.passes import Pass, PassRows, RowLayout
from glm53.kv.resident import ResidentPass, ResidentTier
from glm53.ops import hotcache, rows
from glm53.spec import DType, RowFormat

PASS_ROWS_MAX = 4096  # rows of one append pass of the resident tier
FLOATS = {"f32": DType.F32, "bf16": DType.BF16}


class GatherPass(StepPass):
    """A round of the hot cache for query rows that bring no row of their own."""

    def start(self) -> None:
        tier = self.tier
        slots = [slot for slot, _, _ in self.runs]
        tier.ready(slots)
        self.fetches = any(not tier.sessions[slot].full for slot in slots)
        self.round_starts.upload(np.array([0, *(last for _, _, last in self.runs)], np.int32), tier.stream)
        self.round_sessions.upload(np.array(slots, np.int32), tier.stream)

    def finish(self) -> None:
        tier = self.tier
        hotcache.finish_round(tier.stream, tier.states, self.round_sessions)
        for slot, _, _ in self.runs:
            tier.next_round(tier.sessions[slot])


class KvCache:
    """Histories of up to `sessions_max` sessions of `rows_max` rows each, on one device.

    device: index, or a `glm53.hip.Device` that stays the caller's. runtime: auto, rocm, cuda or cpu; None: $GLM53_RUNTIME, then auto. tier: "host"
    keeps histories in host RAM behind `hot_rows` device rows per session and layer, "resident" keeps them in device memory. layers: number of
    layers. groups: the layers that share a selection, ascending, e.g. ((0, 1, 2), (3,)); None: each layer by itself. latent, rope: widths of a row.
    row_format: "q8g64", "bf16" or "f32". topk_max: rows that one query row may select. query_rows_max: query rows of one gather, and the most rows
    that an append writes through the ring. extent_rows: rows of an allocation unit, a multiple of 64. host_gib: page-locked at start, 0: grows in
    chunks of `host_chunk_mib`. host_memory: "register" or "hostmalloc". fetch: "kernel", or "copy" where kernels cannot read host memory (`glm53
    selftest` says so).

    Raises InputError for sizes that do not fit together, DeviceMemoryError where memory is not enough, with nothing left allocated.
    """

    def __init__(
        self,
        device: int | Device = 0,
        runtime: str | None = None,
        tier: str = "host",
        *,
        layers: int,
        groups: Sequence[Sequence[int]] | None = None,
        latent: int = 512,
        rope: int = 64,
        row_format: str = "q8g64",
        hot_rows: int = 32768,
        topk_max: int = 2048,
        query_rows_max: int = 8,
        sessions_max: int = 1,
        rows_max: int = 131072,
        extent_rows: int = 4096,
        host_gib: float = 0.0,
        host_chunk_mib: int = 256,
        host_memory: str = "register",
        fetch: str = "kernel",
    ):
        self.layout = _layout(layers, groups, latent, rope, row_format)
        sizes = {"topk_max": topk_max, "query_rows_max": query_rows_max, "sessions_max": sessions_max, "rows_max": rows_max}
        for name, value in {**sizes, "extent_rows": extent_rows, "host_chunk_mib": host_chunk_mib}.items():
            _require(value >= 1, name, value, "at least 1")
        _require(extent_rows % 64 == 0, "extent_rows", extent_rows, "a multiple of 64")
        _require(tier in ("host", "resident"), "tier", tier, "host or resident")
        _require(host_memory in ("register", "hostmalloc"), "host_memory", host_memory, "register or hostmalloc")
        _require(fetch in ("kernel", "copy"), "fetch", fetch, "kernel or copy")
        _require(host_gib >= 0, "host_gib", host_gib, "at least 0")
        self.topk_max, self.query_rows_max, self.rows_max = topk_max, query_rows_max, rows_max
        config = None
        if tier == "host":
            config = HostTierConfig(
                hot_rows=hot_rows,
                step_rows_max=query_rows_max,
                extent_rows=extent_rows,
                sessions_max=sessions_max,
                rows_max=rows_max,
                topk=topk_max,
                host_bytes=int(host_gib * (1 << 30)),
                chunk_bytes=host_chunk_mib << 20,
                method=host_memory,
                fetch=fetch,
            )
        self._owns_device = not isinstance(device, Device)
        self.device = _open_device(device, runtime)
        self.closed = False
        self._sessions: dict[int, KvSession] = {}
        self._inputs: deque[tuple[Event, object]] = deque()  # what work still reads, oldest first
        self._arrays: list[Array] = []
        self._tier: HostTier | ResidentTier | None = None
        self._stream = self.device.stream()
        self._outputs = OutputPool(self.device, self._end_device)
        try:
            if config is not None:
                self._tier = HostTier(self.device, self._stream, self.layout, config)
            else:
                self._tier = ResidentTier(self.device, self._stream, self.layout, extent_rows, sessions_max, rows_max, min(rows_max, PASS_ROWS_MAX))
            self._make_workspace()
        except BaseException:
            self.close()
            raise

    def _make_workspace(self) -> None:
        most = max(self.rows_max if isinstance(self._tier, HostTier) else min(self.rows_max, PASS_ROWS_MAX), self.query_rows_max)

        def make(dtype: DType, *shape: int) -> Array:
            self._arrays.append(Array.empty(self.device, dtype, shape, category="workspace"))
            return self._arrays[-1]

        self.inputs = Inputs(self.device, self._stream, self.layout, self.query_rows_max, self.topk_max, make)
        self._row_positions, self._row_sessions = make(DType.I32, most), make(DType.I32, most)
        self._plan = make(DType.U64, self.query_rows_max * self.topk_max)
        self._row_error = make(DType.U32, 1)
        self._row_error.upload(np.zeros(1, np.uint32), self._stream)

    # Public

    @property
    def tier(self) -> HostTier | ResidentTier:
        """The tier underneath. Raises LifetimeError after `close()`."""
        if self._tier is None or self.closed:
            raise LifetimeError("KvCache is used after close(); next: open another one")
        return self._tier

    def open(self) -> KvSession:
        """A new, empty history. Raises InputError when all are in use, DeviceMemoryError if its hot buffer does not fit."""
        session = KvSession(self, self.tier.open())
        self._sessions[session.slot] = session
        return session

    def ledger(self) -> dict[str, dict[str, int]]:
        """Allocated bytes by place ("device 0", "host") and category. `hot cache`, `slot maps`, `tables` and `outputs` are among them, and
        `cached`: memory of ended sessions and prompts that waits for the next one, or for any allocation of the device that needs it."""
        places: dict[str, dict[str, int]] = {f"device {self.device.index}": {}, "host": {}}
        for buffer in list(self.device.live.values()):
            place = places["host" if isinstance(buffer, HostBuffer) else f"device {self.device.index}"]
            category = buffer.category or "uncategorised"
            place[category] = place.get(category, 0) + buffer.byte_count
        return places

    def check(self) -> None:
        """Invariants of the bookkeeping; AssertionError names what differs."""
        self.tier.check()

    def close(self) -> None:
        """Waits for the device, ends all sessions and gives everything back; arrays that are still in use stay until they are let go. Idempotent."""
        if self.closed:
            return
        self.closed = True
        for session in self._sessions.values():
            session.closed = True
        self._sessions.clear()
        with ExitStack() as steps:  # each has its turn, the last one first, whatever another one raises
            steps.callback(self._outputs.close)
            steps.callback(self._stream.close)
            steps.callback(self._inputs.clear)
            for event, _ in self._inputs:
                steps.callback(event.close)
            while self._arrays:
                steps.callback(self._arrays.pop().free)
            if self._tier is not None:
                steps.callback(self._tier.free)
            self._stream.synchronize()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _end_device(self) -> None:
        """Nothing that was handed out is in use any more."""
        if self._owns_device:
            self.device.close(free_buffers=True)

    # Order with foreign streams and memory

    @contextmanager
    def ordered(self, stream: Any) -> Iterator[tuple[int | None, list[object]]]:
        """Work inside comes after that of the foreign `stream` so far, and before its later work. Gives the stream's handle and a list that keeps
        what the work inside reads; without a stream, device memory in it is waited for."""
        handle = None if stream is None else dlpack.stream_handle(stream)
        foreign = None if handle is None else Stream.adopt(self.device, handle)
        if foreign is not None:
            self._join(foreign, self._stream)
        keep: list[object] = []
        try:
            yield handle, keep
        finally:
            if foreign is not None:
                self._join(self._stream, foreign)
            if foreign is None and keep:
                self._stream.synchronize()
            elif keep:
                read = self.device.event()
                read.record(self._stream)
                self._inputs.append((read, keep))
            while self._inputs and self._inputs[0][0].query():
                self._inputs.popleft()[0].close()

    def _join(self, first: Stream, then: Stream) -> None:
        """Work enqueued on `then` from now on comes after the work on `first` so far."""
        event = self.device.event()
        try:
            event.record(first)
            then.wait(event)
        finally:
            event.close()

    # Rows in and out

    def pass_rows(self, slot: int, positions: np.ndarray) -> PassRows:
        """Rows of one session at these positions, on both sides. Negative positions: query rows that write nothing."""
        count = len(positions)
        sessions = np.full(count, slot, np.int32)
        device_positions, device_sessions = self._row_positions.slice(0, count), self._row_sessions.slice(0, count)
        device_positions.upload(positions, self._stream)
        device_sessions.upload(sessions, self._stream)
        return PassRows(positions, sessions, device_positions, device_sessions)

    def write_pass(self, slot: int, first: int, count: int, start: int, layer: Layer) -> None:
        """Writes rows [start, start + count) of a source as rows `first` and up of a session: all of them, or none if it raises."""
        tier, layout, stream = self.tier, self.layout, self._stream
        quantised = layout.row_format is RowFormat.Q8G64
        new_rows = self.pass_rows(slot, np.arange(first, first + count, dtype=np.int32))
        tier_pass: Pass = tier.begin(new_rows, prefill=count > self.query_rows_max, attend=False)
        try:
            for index in range(layout.planes):
                tier_pass.before_store(index)
                for a in range(0, count, PIECE_ROWS):
                    b = min(a + PIECE_ROWS, count)
                    x, column = layer(index, start + a, start + b)
                    rows.store_rows(
                        stream,
                        x,
                        tier_pass.refs.slice(a, b),
                        offsets=tier_pass.offsets(index),
                        row_format=layout.row_format,
                        latent=layout.latent,
                        rope=layout.rope,
                        column=column,
                        error=self._row_error if quantised else None,
                    )
                tier_pass.before_attention(index)
                tier_pass.after_attention(index)
            if quantised and self._row_error.numpy(stream)[0]:
                self._row_error.upload(np.zeros(1, np.uint32), stream)
                raise InputError(
                    f"rows: at least one of rows {start} to {start + count - 1} holds a value that q8g64 cannot store (not finite, or of a magnitude "
                    'from 65,520 * 127 on); nothing was appended; next: find it, or use row_format="bf16"'
                )
            tier_pass.finish()
        except BaseException:
            tier_pass.abandon()
            raise

    def read_round(self, slot: int, group: int, selected: Array, counts: Array, index: Array | None, out: Array, as_bytes: bool) -> None:
        """One round of the hot cache: plans the selection and reads it for every layer of the group. out [layers, rows, k, ...]."""
        tier, stream, layout = self.tier, self._stream, self.layout
        count, k = selected.shape
        plan = Array(self._plan.buffer, DType.U64, (count, k))
        query_rows = self.pass_rows(slot, np.full(count, -1, np.int32))
        tier_pass = GatherPass(tier, query_rows) if isinstance(tier, HostTier) else ResidentPass(tier, query_rows)
        try:
            if isinstance(tier_pass, GatherPass):
                tier_pass.start()
            tier_pass.plan(layout.groups[group][0], selected, counts, plan)
            for place, layer in enumerate(layout.groups[group]):
                tier_pass.before_attention(layer)
                target = out.slice(place, place + 1).reshape(*out.shape[1:])
                offsets = tier_pass.offsets(layer)
                if as_bytes:
                    rows.copy_rows(stream, plan, index, target, offsets=offsets)
                else:
                    rows.read_rows(stream, plan, index, target, offsets=offsets, row_format=layout.row_format, latent=layout.latent)
                tier_pass.after_attention(layer)
            if isinstance(tier_pass, GatherPass):  # a resident round has nothing to begin or end: it writes no rows
                tier_pass.finish()
        except BaseException:
            tier_pass.abandon()
            raise

    def output(self, dtype: DType, shape: tuple[int, ...], writer: int | None) -> KvArray:
        """Memory for a result; see `OutputPool.lend`."""
        return KvArray(self._outputs.lend(math.prod(shape) * dtype.item_bytes, writer), dtype, shape)

    def written(self, result: KvArray, writer: int | None) -> None:
        """The work that fills `result` is enqueued."""
        block = result._lease.block
        block.ready.record(self._stream)
        if writer is not None:
            block.readers.add(writer)

    def forget_session(self, slot: int) -> None:
        self._sessions.pop(slot, None)


class KvSession:
    """One history of a `KvCache`: rows 0 to `rows` - 1, each with a part for every layer. Made by `KvCache.open`."""

    def __init__(self, cache: KvCache, slot: int):
        self.cache, self.slot = cache, slot
        self.closed = False

    def _open_tier(self) -> HostTier | ResidentTier:
        if self.closed:
            raise LifetimeError("session is used after close(); next: cache.open()")
        return self.cache.tier

    @property
    def rows(self) -> int:
        """Rows appended."""
        return self._open_tier().rows(self.slot)

    @property
    def committed_rows(self) -> int:
        """Rows known to be in their permanent place (the host tier: copied to host memory, and that has completed)."""
        tier = self._open_tier()
        if isinstance(tier, ResidentTier):
            return tier.rows(self.slot)
        session = tier.sessions[self.slot]
        tier.poll(session)
        return min(session.history.committed_rows, session.rows)

    def append(self, rows: Any, stream: Any = None) -> None:
        """Appends rows [n, layers, latent + rope]: all of them, or none if it raises.

        rows: numpy float32 (uint16: bf16 bits), a glm53 Array, or any object with __dlpack__, on the host or on the device (there: f32 or bf16 as
        the row format takes it, contiguous or layer by layer, read where it lies). Up to `query_rows_max` rows go through the ring as a step does,
        more are streamed as a prompt is. stream: see the module. q8g64: waits for the device, to learn whether every value could be stored.
        Raises InputError, DeviceMemoryError.
        """
        tier, cache = self._open_tier(), self.cache
        with cache.ordered(stream) as (_, keep):
            count, layer = cache.inputs.rows(rows, keep)
            first = tier.rows(self.slot)
            if first + count > cache.rows_max:
                raise InputError(f"rows: got {count} behind {first}, expected at most rows_max={cache.rows_max} in all")
            done = 0
            try:
                while done < count:
                    part = min(tier.chunk_rows(self.slot, count - done), cache.rows_max if isinstance(tier, HostTier) else PASS_ROWS_MAX)
                    cache.write_pass(self.slot, first + done, part, done, layer)
                    done += part
            except BaseException:
                if done:
                    tier.truncate(self.slot, first)
                raise

    def _gather(self, group: int, positions: Any, trusted: bool, stream: Any, dtype: DType, item: int, as_bytes: bool) -> KvArray:
        tier, cache = self._open_tier(), self.cache
        groups = cache.layout.groups
        if not 0 <= group < len(groups):
            raise InputError(f"group: got {group}, expected 0 to {len(groups) - 1}")
        with cache.ordered(stream) as (handle, keep):
            selected, counts, index = cache.inputs.selection(positions, tier.rows(self.slot), trusted, keep)
            result = cache.output(dtype, (len(groups[group]), *selected.shape, item), handle)
            cache.read_round(self.slot, group, selected, counts, index, result.array, as_bytes)
            cache.written(result, handle)
        return result

    def gather(self, group: int, positions: Any, dtype: str | None = None, stream: Any = None, trusted: bool = False) -> KvArray:
        """Values of the selected rows: [layers of the group, rows, k, latent + rope], "f32" or "bf16" (None: f32 for f32 rows, else bf16).

        positions: [rows, k] integers on the host or the device, one selection per query row; all query rows of a call are one round of the hot
        cache. A row may name a position several times: it is looked up and fetched once. Device positions are brought to the host to be checked,
        unless `trusted`: then they are contiguous i32, distinct in each row and within the history, and no host read lies between selection and
        rows. stream: see the module. The array's memory stays until it and all DLPack tensors of it are gone. Raises InputError.
        """
        layout = self.cache.layout
        name = dtype or ("f32" if layout.row_format is RowFormat.F32 else "bf16")
        _require(name in FLOATS, "dtype", name, "f32 or bf16")
        return self._gather(group, positions, trusted, stream, FLOATS[name], layout.latent + layout.rope, as_bytes=False)

    def gather_bytes(self, group: int, positions: Any, stream: Any = None, trusted: bool = False) -> KvArray:
        """As `gather`, the stored bytes: [layers of the group, rows, k, row_bytes] u8."""
        return self._gather(group, positions, trusted, stream, DType.U8, self.cache.layout.row_bytes, as_bytes=True)

    def truncate(self, rows: int) -> None:
        """Keeps the first `rows` rows. Raises InputError if there are fewer."""
        tier = self._open_tier()
        have = tier.rows(self.slot)
        if not 0 <= rows <= have:
            raise InputError(f"truncate: got {rows} rows, expected 0 to {have}, the rows of the history")
        tier.truncate(self.slot, rows)

    def settle(self) -> None:
        """Waits until every row has its permanent place: `committed_rows` equals `rows` after."""
        self._open_tier().settle(self.slot)

    def counters(self) -> dict[str, list[int]]:
        """What the hot cache did, one number a group: hits, misses, recent_hits, duplicate_misses, evictions, uncached, bytes_from_host; and
        pending_copy_back_rows, one number. All 0 in the resident tier. Waits for the device."""
        tier, layout = self._open_tier(), self.cache.layout
        every = np.zeros((len(layout.groups), hotcache.COUNTERS), np.uint64)
        pending = 0
        if isinstance(tier, HostTier):
            every = tier.counters()[self.slot]
            pending = self.rows - self.committed_rows
        found = {counter.name.lower(): [int(n) for n in every[:, counter]] for counter in hotcache.Counter}
        fetched = [misses + uncached for misses, uncached in zip(found["misses"], found["uncached"], strict=True)]
        found["bytes_from_host"] = [n * len(group) * layout.row_bytes for n, group in zip(fetched, layout.groups, strict=True)]
        return found | {"pending_copy_back_rows": [pending]}

    def close(self) -> None:
        """Waits for the device and gives the history's memory back. Idempotent."""
        if self.closed or self.cache.closed:
            self.closed = True
            return
        self.closed = True
        self.cache.forget_session(self.slot)
        self.cache.tier.close(self.slot)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _require(holds: bool, name: str, got: object, expected: str) -> None:
    if not holds:
        raise InputError(f"{name}: got {got!r}, expected {expected}")


def _layout(layers: int, groups: Sequence[Sequence[int]] | None, latent: int, rope: int, row_format: str) -> RowLayout:
    _require(layers >= 1, "layers", layers, "at least 1")
    _require(latent >= 1, "latent", latent, "at least 1")
    _require(rope >= 0, "rope", rope, "at least 0")
    names = [kind.value for kind in RowFormat]
    _require(row_format in names, "row_format", row_format, " or ".join(names))
    made = tuple(tuple(int(layer) for layer in group) for group in groups) if groups is not None else tuple((layer,) for layer in range(layers))
    consecutive = [layer for group in made for layer in group] == list(range(layers)) and all(made)
    _require(consecutive, "groups", groups, f"layers 0 to {layers - 1} in order, cut into groups that are not empty")
    layout = RowLayout(RowFormat(row_format), latent, rope, made)
    try:
        _ = layout.row_bytes
    except ValueError as error:
        raise InputError(f"row_format: {error}") from None
    return layout


def _open_device(device: int | Device, name: str | None) -> Device:
    if isinstance(device, Device):
        return device
    runtime.select(name)
    return Device(device)


__all__ = ["KvCache", "KvSession"]
