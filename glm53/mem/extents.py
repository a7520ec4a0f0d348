"""Extents: the unit in which history memory is handed out.

An extent holds `extent_rows` rows of `planes` planes, plane-major. Extents are cut from slabs whose addresses the binding supplies;
this module only counts. They are shared by reference counts, so that a fork or a common prefix costs no copy.

Invariants (`ExtentPool.check` proves them):
- every extent is either free (count 0, on the free list once) or in use (count >= 1, not on the free list);
- free + in use = capacity = sum of the extents of all slabs;
- addresses of distinct extents do not overlap.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass


@dataclass(frozen=True)
class ExtentShape:
    """Layout of one extent: row r of plane l lies at (l * extent_rows + r) * row_bytes."""

    extent_rows: int
    planes: int
    row_bytes: int

    def __post_init__(self) -> None:
        if self.extent_rows <= 0 or self.extent_rows % 64:
            raise ValueError(f"extent_rows: got {self.extent_rows}, wanted a positive multiple of 64")
        if self.planes <= 0 or self.row_bytes <= 0 or self.row_bytes % 16:
            raise ValueError(f"planes {self.planes}, row_bytes {self.row_bytes}: wanted positive, rows a multiple of 16 bytes")

    @property
    def extent_bytes(self) -> int:
        return self.extent_rows * self.planes * self.row_bytes

    @property
    def plane_bytes(self) -> int:
        """Distance in bytes between the same row of two neighbouring planes."""
        return self.extent_rows * self.row_bytes

    def extents_for(self, rows: int) -> int:
        """Extents that hold `rows` rows."""
        return -(-rows // self.extent_rows)


class ExtentPool:
    """Hands out extents of one shape, lowest id first, so that the same calls give the same addresses on every run."""

    def __init__(self, shape: ExtentShape):
        self.shape = shape
        self._address: list[int] = []
        self._count: list[int] = []
        self._free: list[int] = []  # descending, so that pop() yields the lowest id
        self._slabs: list[tuple[int, int]] = []

    @property
    def capacity(self) -> int:
        """Extents in all slabs."""
        return len(self._address)

    @property
    def free(self) -> int:
        """Extents that `take` can hand out."""
        return len(self._free)

    def add_slab(self, address: int, extents: int) -> None:
        """Adds `extents` extents that lie one after the other from `address` on.

        Raises ValueError if the slab is empty, misaligned (16 bytes) or overlaps one already added.
        """
        end = address + extents * self.shape.extent_bytes
        if extents <= 0 or address <= 0 or address % 16:
            raise ValueError(f"slab at {address:#x} with {extents} extents: wanted a positive, 16-byte aligned address and at least one extent")
        for other, other_extents in self._slabs:
            if address < other + other_extents * self.shape.extent_bytes and other < end:
                raise ValueError(f"slab [{address:#x}, {end:#x}) overlaps the slab at {other:#x}")
        first = self.capacity
        self._slabs.append((address, extents))
        self._address += [address + i * self.shape.extent_bytes for i in range(extents)]
        self._count += [0] * extents
        self._free = sorted(self._free + list(range(first, first + extents)), reverse=True)

    def address(self, extent: int) -> int:
        """Device address of plane 0, row 0 of an extent in use."""
        assert self._count[extent] > 0, f"extent {extent} is free"
        return self._address[extent]

    def references(self, extent: int) -> int:
        return self._count[extent]

    def take(self) -> int | None:
        """An extent with one reference, or None if all are in use (the caller then adds a slab or refuses)."""
        if not self._free:
            return None
        extent = self._free.pop()
        self._count[extent] = 1
        return extent

    def share(self, extent: int) -> None:
        """Adds a reference to an extent in use."""
        assert self._count[extent] > 0, f"share of extent {extent}, which is free"
        self._count[extent] += 1

    def release(self, extent: int) -> bool:
        """Drops one reference; True if the extent became free."""
        assert self._count[extent] > 0, f"release of extent {extent}, which is free"
        self._count[extent] -= 1
        if self._count[extent]:
            return False
        low, high = 0, len(self._free)
        while low < high:  # keeps the free list descending
            middle = (low + high) // 2
            if self._free[middle] > extent:
                low = middle + 1
            else:
                high = middle
        self._free.insert(low, extent)
        return True

    def check(self) -> None:
        """Recomputes every derived number; AssertionError names what differs."""
        assert len(self._address) == len(self._count) == sum(extents for _, extents in self._slabs), "capacity differs from the slabs"
        assert self._free == sorted(set(self._free), reverse=True), "free list is not strictly descending"
        assert set(self._free) == {i for i, count in enumerate(self._count) if count == 0}, "free list differs from the zero counts"
        spans = sorted(self._address)
        assert all(b - a >= self.shape.extent_bytes for a, b in itertools.pairwise(spans)), "extents overlap"
