"""Extents: the unit in which history memory is handed out.

An extent holds `extent_rows` rows of `planes` planes, plane-major on a device, group-major in host memory. Extents are cut from slabs whose addresses
the binding supplies; this module only counts. They are shared by reference counts, so that a fork or a common prefix costs no copy.

Invariants (`ExtentPool.check` proves them):
- every extent is either free (count 0, in the heap of free ids once) or in use (count >= 1, not in the heap);
- free + in use = capacity = sum of the extents of all slabs;
- no parent in the heap is larger than its children: its top is the lowest free id;
- addresses of distinct extents do not overlap, neither on the device nor on the host.

Costs: take and release O(log free) an extent, share and address O(1), add_slab linear in the capacity.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from glm53.mem import compiled

ExtentIds = npt.NDArray[np.int64]


@dataclass(frozen=True)
class ExtentSize:
    """What an extent holds, however its rows lie."""

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

    def extents_for(self, rows: int) -> int:
        """Extents that hold `rows` rows."""
        return -(-rows // self.extent_rows)


@dataclass(frozen=True)
class ExtentShape(ExtentSize):
    """A plane-major extent: row r of plane l lies at (l * extent_rows + r) * row_bytes."""

    @property
    def plane_bytes(self) -> int:
        """Distance in bytes between the same row of two neighbouring planes."""
        return self.extent_rows * self.row_bytes


@dataclass(frozen=True)
class GroupPlace:
    """The rows of one selection group in group-major extents: plane l of row p lies offset_bytes + p % extent_rows * stride_bytes + l * row_bytes
    behind the start of its extent. l counts all planes, not those of the group: offset_bytes is that of a plane 0 which may be another group's.
    """

    extent_rows: int
    row_bytes: int
    offset_bytes: int
    stride_bytes: int

    def row_offset(self, position: int, plane: int) -> int:
        """Bytes from the start of its extent to row `position` of `plane`, which is one of this group's."""
        return self.offset_bytes + position % self.extent_rows * self.stride_bytes + plane * self.row_bytes


@dataclass(frozen=True)
class GroupedShape(ExtentSize):
    """A group-major extent: the selection groups one after the other, each [extent_rows, planes of the group, row_bytes].

    What a round fetches of a position lies in one stretch. groups: planes of each, in order of the planes. A group of one plane lies as in a
    plane-major extent.
    """

    groups: tuple[int, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.groups, default=0) < 1 or sum(self.groups) != self.planes:
            raise ValueError(f"groups of {self.groups} planes, wanted at least one each and {self.planes} together")

    def first_plane(self, group: int) -> int:
        return sum(self.groups[:group])

    def place(self, group: int) -> GroupPlace:
        first = self.first_plane(group)
        # The group begins at extent_rows * first rows; its plane `first` is the first of each row.
        return GroupPlace(self.extent_rows, self.row_bytes, (self.extent_rows - 1) * first * self.row_bytes, self.groups[group] * self.row_bytes)

    def views(self, extent: npt.NDArray[np.uint8]) -> list[npt.NDArray[np.uint8]]:
        """The bytes of an extent as [extent_rows, planes, row_bytes] of each group."""
        ends = np.cumsum(self.groups)[:-1] * self.extent_rows * self.row_bytes
        parts = np.split(extent, ends)
        return [part.reshape(self.extent_rows, planes, self.row_bytes) for part, planes in zip(parts, self.groups, strict=True)]


class ExtentPool:
    """Hands out extents of one shape, lowest id first, so that the same calls give the same addresses on every run."""

    def __init__(self, shape: ExtentSize):
        self.shape = shape
        self._extents: npt.NDArray[Any] = np.zeros(0, compiled.EXTENT)
        self._heap: ExtentIds = np.zeros(0, np.int64)  # as long as there are extents; the first `_free` are the free ids
        self._free = 0
        self._slabs: list[tuple[int, int]] = []  # [begin, end) of each on the device, ascending
        self._host_slabs: list[tuple[int, int]] = []

    @property
    def capacity(self) -> int:
        """Extents in all slabs."""
        return len(self._extents)

    @property
    def free(self) -> int:
        """Extents that `take` can hand out."""
        return self._free

    @property
    def used(self) -> int:
        """Extents with at least one reference."""
        return self.capacity - self._free

    def add_slab(self, address: int, extents: int, host_address: int = 0) -> None:
        """Adds `extents` extents that lie one after the other from `address` on.

        `address` is what kernels use; `host_address` is where the host finds the same bytes, 0 for memory that only the device reaches.
        Raises ValueError if the slab is empty, misaligned (16 bytes) or overlaps one already added; nothing is changed then.
        """
        if extents <= 0 or address <= 0 or address % 16 or host_address < 0 or host_address % 16:
            raise ValueError(
                f"slab at {address:#x} (host {host_address:#x}) with {extents} extents: "
                "wanted positive, 16-byte aligned addresses and at least one extent"
            )
        slab_bytes = extents * self.shape.extent_bytes
        place = _free_place(self._slabs, address, slab_bytes)
        if host_address:
            host_place = _free_place(self._host_slabs, host_address, slab_bytes)
            self._host_slabs.insert(host_place, (host_address, host_address + slab_bytes))
        self._slabs.insert(place, (address, address + slab_bytes))
        ids = np.arange(self.capacity, self.capacity + extents, dtype=np.int64)
        added = np.zeros(extents, compiled.EXTENT)
        offsets = np.arange(extents, dtype=np.uint64) * np.uint64(self.shape.extent_bytes)
        added["address"] = offsets + np.uint64(address)
        if host_address:
            added["host_address"] = offsets + np.uint64(host_address)
        self._extents = np.concatenate([self._extents, added])
        self._heap = np.concatenate([self._heap[: self._free], ids, np.zeros(self.capacity - self._free - extents, np.int64)])
        self._free += extents  # the new ids are above all others: appending them keeps the heap's order

    def address(self, extent: int) -> int:
        """Device address of an extent in use."""
        return int(self.addresses(_one(extent))[0])

    def addresses(self, extents: ExtentIds) -> npt.NDArray[np.uint64]:
        """Device addresses of extents in use, in the order given."""
        self._assert_used(extents, "address")
        found: npt.NDArray[np.uint64] = self._extents["address"][extents]
        return found

    def host_address(self, extent: int) -> int:
        """Host address of an extent in use; 0 if its slab has none."""
        self._assert_used(_one(extent), "host address")
        return int(self._extents[extent]["host_address"])

    def references(self, extent: int) -> int:
        """References to an extent, 0 if it is free."""
        assert 0 <= extent < self.capacity, f"extent {extent} of {self.capacity}"
        return int(self._extents[extent]["references"])

    def reference_counts(self, extents: ExtentIds) -> npt.NDArray[np.int64]:
        """References to each of `extents`, in the order given."""
        found: npt.NDArray[np.int64] = self._extents["references"][extents]
        return found

    def take(self) -> int | None:
        """An extent with one reference, or None if all are in use (the caller then adds a slab or refuses)."""
        taken = self.take_many(1)
        return None if taken is None else int(taken[0])

    def take_many(self, count: int) -> ExtentIds | None:
        """`count` extents with one reference each, ascending; None, and nothing taken, if fewer are free."""
        assert count >= 0, f"take of {count} extents"
        if count > self._free:
            return None
        taken: ExtentIds = np.empty(count, np.int64)
        compiled.extents_take(self._extents, self._heap, self._free, taken)
        self._free -= count
        return taken

    def share(self, extent: int) -> None:
        """Adds a reference to an extent in use."""
        self.share_many(_one(extent))

    def share_many(self, extents: ExtentIds) -> None:
        """Adds a reference to each of `extents`, all distinct and in use."""
        self._assert_used(extents, "share")
        self._extents["references"][extents] += 1

    def release(self, extent: int) -> bool:
        """Drops one reference; True if the extent became free."""
        return self.release_many(_one(extent)) == 1

    def release_many(self, extents: ExtentIds) -> int:
        """Drops one reference of each of `extents`, all distinct and in use; returns how many became free."""
        self._assert_used(extents, "release")
        freed = int(compiled.extents_release(self._extents, self._heap, self._free, extents))
        self._free += freed
        return freed

    def _assert_used(self, extents: ExtentIds, action: str) -> None:
        place = compiled.first_unused(self._extents, extents)
        assert place < 0, f"{action} of extent {extents[place]}, which is free or outside [0, {self.capacity})"

    def check(self) -> None:
        """Recomputes every derived number; AssertionError names what differs."""
        size = self.shape.extent_bytes
        assert self.capacity == sum((end - begin) // size for begin, end in self._slabs), "capacity differs from the slabs"
        assert len(self._heap) == self.capacity and 0 <= self._free <= self.capacity, "free count outside the heap"
        heap = self._heap[: self._free]
        assert (heap[(np.arange(1, self._free) - 1) // 2] < heap[1:]).all(), "the heap of free ids is out of order"
        counts = self._extents["references"]
        assert (counts >= 0).all(), "an extent has a negative count"
        assert np.array_equal(np.sort(heap), np.flatnonzero(counts == 0)), "the free ids differ from the zero counts"
        for name in ("address", "host_address"):
            spans = np.sort(self._extents[name][self._extents[name] != 0])
            assert (np.diff(spans) >= size).all(), f"extents overlap ({name})"


def _one(extent: int) -> ExtentIds:
    return np.array([extent], np.int64)


def _free_place(slabs: Sequence[tuple[int, int]], begin: int, byte_count: int) -> int:
    """Index at which [begin, begin + byte_count) belongs among ascending, disjoint spans. Raises ValueError where it overlaps one."""
    end = begin + byte_count
    place = bisect.bisect_left(slabs, (begin, end))
    for other, other_end in slabs[max(place - 1, 0) : place + 1]:
        if begin < other_end and other < end:
            raise ValueError(f"slab [{begin:#x}, {end:#x}) overlaps the slab at {other:#x}")
    return place
