"""History memory on a device: extents of rows behind per-session tables that kernels read.

`RowStore` binds the pure bookkeeping of `glm53.mem` to one device: it allocates slabs, keeps the extent tables in device memory up to date
and says where things are. One store holds one kind of row (MLA rows, index keys) for all sessions.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import TypeVar

import numpy as np

from glm53.errors import DeviceMemoryError, InputError
from glm53.hip import Array, Buffer, Device, Stream
from glm53.kv.passes import extent_spans
from glm53.mem.extents import ExtentPool, ExtentShape
from glm53.mem.history import ExtentCopy, History, OutOfExtents
from glm53.spec import DType

T = TypeVar("T")
SLAB_BYTES = 32 << 20  # a slab is at least one extent; large enough that a long history needs few allocations


def send_table(stream: Stream, tables: Array, slot: int, history: History) -> None:
    """Sends the addresses that row `slot` of tables [sessions, extents] u64 lacks, in stream order. If it raises, the next call sends them again."""
    first = history.told
    addresses = np.array(history.addresses[first:], np.uint64)
    if addresses.size:
        stream.upload(tables.address + (slot * tables.shape[1] + first) * addresses.itemsize, addresses)
    history.table_sent()


class RowStore:
    """Rows of `sessions_max` sessions in device memory (the resident tier).

    `tables` [sessions_max, extents_max] u64 in device memory: address of each extent of each session by position. Table changes are ordered
    on `stream`, where the kernels that read them must run too.
    """

    def __init__(self, device: Device, stream: Stream, shape: ExtentShape, sessions_max: int, rows_max: int, category: str):
        self.device, self.stream, self.shape, self.category = device, stream, shape, category
        self.rows_max = rows_max
        self.extents_max = shape.extents_for(rows_max)
        self.pool = ExtentPool(shape)
        self._slabs: list[Buffer] = []
        self._histories: dict[int, History] = {}
        self._slots = list(range(sessions_max - 1, -1, -1))
        self.tables = Array.empty(device, DType.U64, (sessions_max, self.extents_max), category="tables")

    def open(self, slot: int | None = None) -> int:
        """A new, empty history; returns its row in `tables`, which is `slot` if that is given. Raises InputError when all are in use."""
        slot = self.free_slot() if slot is None else slot
        self._slots.remove(slot)
        self._histories[slot] = History(self.pool)
        return slot

    def free_slot(self) -> int:
        """The slot that a new history gets. Raises InputError when all are in use."""
        if not self._slots:
            raise InputError(f"all {len(self._histories)} sessions are in use; close one first or open the engine with a larger sessions_max")
        return self._slots[-1]

    def rows(self, slot: int) -> int:
        """Rows written so far."""
        return self._histories[slot].rows

    def addresses(self, slot: int) -> list[int]:
        """Device addresses of a history's extents, by position."""
        return list(self._histories[slot].addresses)

    def reserve(self, slot: int, rows: int) -> None:
        """Makes room for `rows` rows in all and updates the session's table. Raises DeviceMemoryError with nothing changed; after a HipError of
        the update the next call repeats it."""
        history = self._histories[slot]
        if rows > self.rows_max:
            raise InputError(f"{self.category}: {rows} rows asked, the store was opened for {self.rows_max} rows a session")
        if rows <= history.ready_rows:
            return
        self._own_tail(history)
        self._taking(lambda: history.reserve(rows))
        send_table(self.stream, self.tables, slot, history)

    def _taking(self, call: Callable[[], T]) -> T:
        """A call that takes extents; where there are too few, of a larger pool."""
        try:
            return call()
        except OutOfExtents as short:
            self._grow(short.missing)
            return call()

    def _own_tail(self, history: History) -> None:
        """Before rows are written: an extent that a truncate has left half full and that a fork shares is replaced by a copy."""
        copy = self._taking(history.private_tail)
        if copy is not None:
            self._copy_extent(copy)

    def _copy_extent(self, copy: ExtentCopy) -> None:
        """In stream order, all planes at once."""
        source, target, shape = self.pool.address(copy.source), self.pool.address(copy.target), self.shape
        self.stream.copy_2d(target, shape.plane_bytes, source, shape.plane_bytes, copy.rows * shape.row_bytes, shape.planes)

    def fork(self, source: int, slot: int, rows: int) -> None:
        """A history in the free `slot` with the first `rows` rows of another: full extents are shared, a partial one is copied in stream order.
        Raises DeviceMemoryError or HipError with nothing opened."""
        fork = self._taking(lambda: self._histories[source].fork(rows))
        self._slots.remove(slot)
        self._histories[slot] = fork.history
        try:
            if fork.copy is not None:
                self._copy_extent(fork.copy)
            self.reserve(slot, rows)
        except BaseException:
            self.release(slot)
            raise

    def _grow(self, extents: int) -> None:
        wanted = max(extents, min(SLAB_BYTES // self.shape.extent_bytes, self.extents_max))
        try:
            buffer = self.device.alloc(wanted * self.shape.extent_bytes, category=self.category)
        except DeviceMemoryError:
            if wanted == extents:
                raise
            wanted = extents
            buffer = self.device.alloc(wanted * self.shape.extent_bytes, category=self.category)
        self._slabs.append(buffer)
        self.pool.add_slab(buffer.address, wanted)

    def advance(self, slot: int, rows: int) -> None:
        """`rows` rows were (or are, in stream order, about to be) written behind the present ones."""
        self._histories[slot].advance(rows)

    def export(self, slot: int, first: int, target: np.ndarray) -> None:
        """Copies rows from `first` on to the host, after what `stream` has enqueued, and waits: target [planes, rows, row_bytes] u8, contiguous."""
        assert first + target.shape[1] <= self.rows(slot), f"export to row {first + target.shape[1]} of {self.rows(slot)}"
        self._copy(slot, first, target, to_host=True)

    def adopt(self, slot: int, data: np.ndarray) -> None:
        """Appends rows that come from the host, data [planes, rows, row_bytes] u8, contiguous, into reserved room. Waits. If it raises, no row was
        added."""
        self._copy(slot, self.rows(slot), data, to_host=False)
        self.advance(slot, data.shape[1])

    def _copy(self, slot: int, first: int, data: np.ndarray, to_host: bool) -> None:
        """Rows between extents and a contiguous array: one strided copy an extent."""
        shape, addresses = self.shape, self._histories[slot].addresses
        planes, rows, row_bytes = data.shape
        assert (planes, row_bytes) == (shape.planes, shape.row_bytes) and data.flags.c_contiguous, f"rows {data.shape} for {shape}"
        try:
            for extent, row, count, done in extent_spans(first, rows, shape.extent_rows):
                device = (addresses[extent] + row * row_bytes, shape.plane_bytes)
                host = (data.ctypes.data + done * row_bytes, rows * row_bytes)
                target, source = (host, device) if to_host else (device, host)
                self.stream.copy_2d(target[0], target[1], source[0], source[1], count * row_bytes, planes)
        finally:
            self.stream.synchronize()  # the array is the caller's again, whatever happened

    def truncate(self, slot: int, rows: int) -> None:
        """Keeps the first `rows` rows. Kernels on `stream` may still work on the rows behind: whoever gets their extents writes after them."""
        self._histories[slot].truncate(rows)

    def release(self, slot: int) -> None:
        """Ends a history; its extents go back to the pool."""
        self._histories.pop(slot).close()
        self._slots.append(slot)

    def check(self) -> None:
        """Invariants of pool and histories; every extent in use belongs to a history of this store, or to several."""
        self.pool.check()
        for history in self._histories.values():
            history.check()
        used = len({extent for history in self._histories.values() for extent in history.extents})
        assert used == self.pool.capacity - self.pool.free, f"histories hold {used} extents, the pool lent {self.pool.capacity - self.pool.free}"

    def free(self) -> None:
        """Gives all device memory back. Again is not an error."""
        for history in self._histories.values():
            history.close()
        self._histories.clear()
        with ExitStack() as steps:  # each has its turn, whatever another one raises
            if not self.tables.buffer.freed:
                steps.callback(self.tables.free)
            while self._slabs:
                steps.callback(self._slabs.pop().free)
