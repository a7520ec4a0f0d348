"""Index keys of all sessions on one device: every extent, or on a side of a pair every second one (docs/decisions/0006-pair.md, Index keys)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from glm53.hip import Array, Device, Stream
from glm53.kv.passes import extent_spans
from glm53.kv.store import RowStore
from glm53.mem.extents import ExtentPool, ExtentShape
from glm53.spec import WHOLE, Shard


class KeyStore:
    """Keys of `sessions_max` sessions of at most `rows_max` rows. Rows are counted as the model does; the store below holds those of the side.

    `tables` [sessions_max, extents] u64 in device memory: the side's extents of each session, one after the other. Ordered on `stream`.
    """

    def __init__(self, device: Device, stream: Stream, shape: ExtentShape, sessions_max: int, rows_max: int, shard: Shard = WHOLE):
        self.shape, self.rows_max, self.shard = shape, rows_max, shard
        self.side_rows_max = max(self._of_side(rows_max), 1)  # of one session
        self._store = RowStore(device, stream, shape, sessions_max, self.side_rows_max, "index keys")
        self._rows: dict[int, int] = {}

    def _of_side(self, rows: int) -> int:
        return self.shard.rows_of(rows, self.shape.extent_rows)

    @property
    def tables(self) -> Array:
        return self._store.tables

    @property
    def pool(self) -> ExtentPool:
        """Extents of all sessions."""
        return self._store.pool

    @property
    def free_slots(self) -> int:
        """Sessions that may be opened beside those that are open."""
        return self.tables.shape[0] - len(self._rows)

    def open(self, slot: int) -> int:
        """A new, empty history in this slot, which it returns. Raises InputError when all are in use."""
        self._store.open(slot)
        self._rows[slot] = 0
        return slot

    def rows(self, slot: int) -> int:
        """Rows written so far, on whichever side their keys are."""
        return self._rows[slot]

    def addresses(self, slot: int) -> list[int]:
        """Device addresses of the side's extents, ascending."""
        return self._store.addresses(slot)

    def reserve(self, slot: int, rows: int) -> None:
        """Room for `rows` rows in all; errors as `RowStore.reserve`."""
        self._store.reserve(slot, self._of_side(rows))

    def advance(self, slot: int, rows: int) -> None:
        """`rows` rows were, or are in stream order about to be, written behind the present ones."""
        before = self._rows[slot]
        self._store.advance(slot, self._of_side(before + rows) - self._of_side(before))
        self._rows[slot] = before + rows

    def export(self, slot: int, first: int, target: np.ndarray) -> None:
        """Copies the side's keys of rows from `first` on into target [planes, rows, key_bytes] u8, and leaves the others as they are. Waits."""
        for row, start, count in self._side_spans(first, target.shape[1]):
            piece = np.empty((self.shape.planes, count, self.shape.row_bytes), np.uint8) if count < target.shape[1] else target
            self._store.export(slot, row, piece)
            if piece is not target:
                target[:, start : start + count] = piece

    def adopt(self, slot: int, data: np.ndarray, rows_max: int) -> None:
        """Appends keys that come from the host, data [planes, rows, key_bytes] u8 of all rows; room for `rows_max` rows in all is made first. Waits.
        If it raises, no row was added."""
        before, rows = self._rows[slot], data.shape[1]
        self.reserve(slot, max(rows_max, before + rows))
        try:
            for _, start, count in self._side_spans(before, rows):
                self._store.adopt(slot, np.ascontiguousarray(data[:, start : start + count]))
        except BaseException:
            self._store.truncate(slot, self._of_side(before))
            raise
        self._rows[slot] = before + rows

    def _side_spans(self, first: int, rows: int) -> Iterator[tuple[int, int, int]]:
        """The side's among `rows` rows from `first` on: (row as the store below counts, how many of all rows came before, count)."""
        for extent, row, count, done in extent_spans(first, rows, self.shape.extent_rows):
            turn, side = divmod(extent, self.shard.count)
            if side == self.shard.index:
                yield turn * self.shape.extent_rows + row, done, count

    def fork(self, source: int, slot: int, rows: int) -> None:
        """Keys of the first `rows` rows of another history, in the free `slot`; see `RowStore.fork`."""
        self._store.fork(source, slot, self._of_side(rows))
        self._rows[slot] = rows

    def truncate(self, slot: int, rows: int) -> None:
        """Keeps the first `rows` rows."""
        self._store.truncate(slot, self._of_side(rows))
        self._rows[slot] = rows

    def release(self, slot: int) -> None:
        """Ends a history; its extents go back to the pool."""
        del self._rows[slot]
        self._store.release(slot)

    def check(self) -> None:
        """Invariants of the store, and that it holds as many rows of each session as the side has."""
        self._store.check()
        for slot, rows in self._rows.items():
            assert self._store.rows(slot) == self._of_side(rows), f"slot {slot}: {self._store.rows(slot)} keys, {self._of_side(rows)} of {rows} rows"

    def free(self) -> None:
        """Gives all memory back."""
        self._store.free()
