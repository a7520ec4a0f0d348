"""The resident tier: histories in device memory, extent by extent. The baseline that the host tier must equal bit for bit."""

from __future__ import annotations

import numpy as np

from glm53.hip import Array, Device, Stream
from glm53.kv.passes import PassRows, RowLayout
from glm53.kv.store import RowStore
from glm53.mem.extents import ExtentPool
from glm53.ops import hotcache
from glm53.spec import DType, Offsets


class ResidentTier:
    """Rows of `sessions_max` sessions in extents of device memory. All work runs on `stream`."""

    def __init__(self, device: Device, stream: Stream, layout: RowLayout, extent_rows: int, sessions_max: int, rows_max: int, pass_rows_max: int):
        self.layout, self.rows_max, self.stream = layout, rows_max, stream
        self.store = RowStore(device, stream, layout.extent_shape(extent_rows), sessions_max, rows_max, "history")
        self.refs = Array.empty(device, DType.U64, (pass_rows_max,), category="workspace")

    @property
    def pool(self) -> ExtentPool:
        """Extents of all histories."""
        return self.store.pool

    def open(self) -> int:
        return self.store.open()

    def close(self, slot: int) -> None:
        self.store.release(slot)

    def rows(self, slot: int) -> int:
        return self.store.rows(slot)

    def chunk_rows(self, slot: int, wanted: int) -> int:
        return wanted

    def begin(self, rows: PassRows, prefill: bool, attend: bool = True) -> ResidentPass:
        for session, first, last in rows.runs:
            self.store.reserve(session, int(rows.positions[first]) + last - first)
        made = ResidentPass(self, rows)
        made.start()
        return made

    def export(self, slot: int, first: int, target: np.ndarray) -> None:
        self.store.export(slot, first, target)

    def adopt(self, slot: int, data: np.ndarray, rows_max: int) -> None:
        self.store.reserve(slot, max(rows_max, self.store.rows(slot) + data.shape[1]))
        self.store.adopt(slot, data)

    def fork(self, source: int, rows: int) -> int:
        slot = self.store.free_slot()
        self.store.fork(source, slot, rows)
        return slot

    def host_copy(self, slot: int) -> np.ndarray:
        shape = self.store.shape
        data = np.empty((shape.planes, self.store.rows(slot), shape.row_bytes), np.uint8)
        if data.size:
            self.store.export(slot, 0, data)
        return data

    def detach(self, slot: int, host_copy: np.ndarray) -> np.ndarray:
        self.store.release(slot)
        return host_copy

    def attach(self, parked: np.ndarray) -> int:
        slot = self.open()
        try:
            self.adopt(slot, parked, parked.shape[1])
        except BaseException:
            self.close(slot)
            raise
        return slot

    def discard(self, parked: np.ndarray) -> None:
        pass

    def new_parked(self, rows: int) -> np.ndarray:
        return np.empty((self.store.shape.planes, rows, self.store.shape.row_bytes), np.uint8)

    def adopt_parked(self, parked: np.ndarray, first: int, data: np.ndarray) -> None:
        parked[:, first : first + data.shape[1]] = data

    def export_parked(self, parked: np.ndarray, first: int, target: np.ndarray) -> None:
        target[:] = parked[:, first : first + target.shape[1]]

    def fork_parked(self, parked: np.ndarray, rows: int) -> np.ndarray:
        return parked[:, :rows].copy()

    def truncate_parked(self, parked: np.ndarray, rows: int) -> np.ndarray:
        return parked[:, :rows].copy()

    def truncate(self, slot: int, rows: int) -> None:
        self.store.truncate(slot, rows)

    def drop(self, slot: int, rows: int) -> None:
        self.store.truncate(slot, rows)

    def settle(self, slot: int) -> None:
        self.stream.synchronize()

    def check(self) -> None:
        self.store.check()

    def free(self) -> None:
        try:
            self.store.free()
        finally:
            if not self.refs.buffer.freed:
                self.refs.free()


class ResidentPass:
    """Rows go to their extents and are read from there; nothing moves."""

    def __init__(self, tier: ResidentTier, rows: PassRows):
        self.tier, self.rows = tier, rows
        self.refs = tier.refs.slice(0, len(rows.positions))

    def start(self) -> None:
        store, rows = self.tier.store, self.rows
        hotcache.place_extent(self.tier.stream, rows.device_sessions, rows.device_positions, store.tables, self.refs, store.shape)

    def offsets(self, layer: int) -> Offsets:
        return (0, layer * self.tier.store.shape.plane_bytes, 0, 0)

    def before_store(self, layer: int) -> None:
        pass

    def plan(self, layer: int, selected: Array, counts: Array, plan: Array) -> None:
        store = self.tier.store
        hotcache.plan_extent(self.tier.stream, selected, counts, store.tables, self.rows.device_sessions, plan, store.shape)

    def before_attention(self, layer: int) -> None:
        pass

    def after_attention(self, layer: int) -> None:
        pass

    def finish(self) -> None:
        for session, first, last in self.rows.runs:
            self.tier.store.advance(session, last - first)

    def abandon(self) -> None:
        pass  # rows that no history counts are overwritten by the next pass
