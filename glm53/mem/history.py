"""A history: the rows of one session, as a list of extents.

Invariants (`History.check` proves them):
- rows <= reserved rows = extents * extent_rows;
- full extents may be shared; the extent that holds the next row to be written is private (reference count 1).
"""

from __future__ import annotations

from glm53.mem.extents import ExtentPool


class OutOfExtents(Exception):
    """The pool has too few free extents. `missing` says how many more are needed; nothing was taken."""

    def __init__(self, missing: int):
        self.missing = missing
        super().__init__(f"{missing} more extents are needed")


class History:
    """Rows of one token history in a pool. Addresses only through `addresses`, in order of position."""

    def __init__(self, pool: ExtentPool):
        self._pool = pool
        self._extents: list[int] = []
        self.rows = 0

    @property
    def reserved_rows(self) -> int:
        """Rows that fit without taking another extent."""
        return len(self._extents) * self._pool.shape.extent_rows

    @property
    def addresses(self) -> list[int]:
        """Extent addresses by position; valid until the next reserve, truncate or close."""
        return [self._pool.address(extent) for extent in self._extents]

    def reserve(self, rows: int) -> bool:
        """Makes room for `rows` rows in all. True if extents were taken, so that the device's table is out of date.

        Raises OutOfExtents with nothing taken.
        """
        wanted = self._pool.shape.extents_for(rows) - len(self._extents)
        if wanted <= 0:
            return False
        if wanted > self._pool.free:
            raise OutOfExtents(wanted - self._pool.free)
        for _ in range(wanted):
            extent = self._pool.take()
            assert extent is not None
            self._extents.append(extent)
        return True

    def advance(self, rows: int) -> None:
        """`rows` rows were written behind the present ones."""
        assert rows >= 0 and self.rows + rows <= self.reserved_rows, f"advance by {rows} beyond {self.reserved_rows} reserved rows"
        self.rows += rows

    def truncate(self, rows: int) -> None:
        """Keeps the first `rows` rows and gives back the extents behind them."""
        assert 0 <= rows <= self.rows, f"truncate to {rows} of {self.rows} rows"
        keep = self._pool.shape.extents_for(rows)
        while len(self._extents) > keep:
            self._pool.release(self._extents.pop())
        self.rows = rows

    def close(self) -> None:
        """Gives back every extent."""
        self.truncate(0)

    def check(self) -> None:
        assert 0 <= self.rows <= self.reserved_rows, f"{self.rows} rows in {self.reserved_rows} reserved"
        assert len(set(self._extents)) == len(self._extents), "an extent stands twice in one history"
        assert all(self._pool.references(extent) > 0 for extent in self._extents), "a history holds a free extent"
