"""Extents in page-locked host memory: the pool of a tier, the slabs behind it, and their growth ahead of need.

Slabs are added by the owner's thread only, between two steps; the thread of `SlabAhead` makes memory and touches no bookkeeping. The ids of extents
depend on the calls alone, their addresses on the system.
"""

from __future__ import annotations

import contextlib
import weakref

import numpy as np

from glm53.errors import DeviceMemoryError, human_bytes
from glm53.hip import Device
from glm53.kv.ram import available_bytes
from glm53.kv.slabs import Progress, Slab, SlabAhead, free_slabs, make_slabs
from glm53.mem.extents import ExtentPool, GroupedShape
from glm53.mem.history import History, OutOfExtents


class HostExtents:
    """A pool of group-major extents of one shape in host memory that grows by chunks of about `chunk_bytes`, at least one extent each."""

    def __init__(self, device: Device, shape: GroupedShape, chunk_bytes: int, method: str, category: str, chunk_extents_max: int):
        self.device, self.shape, self.method, self.category = device, shape, method, category
        self.pool = ExtentPool(shape)
        self.slabs: list[Slab] = []
        self._chunk_extents = max(1, min(chunk_bytes // shape.extent_bytes, chunk_extents_max))
        self._ahead = SlabAhead(self._make)
        # A tier that is dropped without `free` still unlocks its memory, at the latest when the process exits.
        self._finalizer = weakref.finalize(self, _release, device, self.slabs)

    def prepare(self, host_bytes: int, progress: Progress | None) -> None:
        """Page-locks whole chunks that hold at least `host_bytes`. Raises DeviceMemoryError with nothing added, at once where the system has less."""
        chunk = self._chunk_extents * self.shape.extent_bytes
        total, available = -(-host_bytes // chunk) * chunk, available_bytes()
        if total > available:  # the system would end this process or another one instead of refusing a page
            raise DeviceMemoryError(
                f"{self.category}: {human_bytes(total)} are wanted and {human_bytes(available)} of host RAM are available; "
                "next: lower --host-kv-gib, or end what holds the memory"
            )
        self._add(make_slabs(self.device, total, chunk, self.method, self.category, progress))

    def add(self, extents: int) -> None:
        """So many more extents, or a chunk: the one on its way, or a new one. DeviceMemoryError leaves all as it was."""
        slab = self._ahead.wait()
        self._add([slab] if slab is not None else [self._make(max(extents, self._chunk_extents) * self.shape.extent_bytes)])

    def reserve(self, history: History, row_count: int) -> bool:
        """Room for `row_count` rows of a history; True if its extents changed.

        Page-locks another chunk where none is free, or waits for the one on its way. DeviceMemoryError leaves the history as it was; it may
        tell of the chunk that was to be ready ahead of need.
        """
        while True:
            try:
                return history.reserve(row_count)
            except OutOfExtents as short:
                self.add(short.missing)

    def grow_ahead(self, extents: int) -> None:
        """`extents` may be asked for soon: starts to page-lock the next chunk in a thread if fewer are free. Takes in the one that is complete."""
        slab = self._ahead.ready()
        if slab is not None:
            self._add([slab])
        if extents > self.pool.free:
            self._ahead.start(max(extents - self.pool.free, self._chunk_extents) * self.shape.extent_bytes)

    def _make(self, byte_count: int) -> Slab:
        return make_slabs(self.device, byte_count, byte_count, self.method, self.category)[0]

    def _add(self, slabs: list[Slab]) -> None:
        for slab in slabs:
            self.slabs.append(slab)
            self.pool.add_slab(slab.device_address, slab.byte_count // self.shape.extent_bytes)

    def host_address(self, device_address: int) -> int:
        """The host's name of an address inside a slab."""
        slab, offset = self._slab_of(device_address)
        return slab.host_address + offset

    def view(self, device_address: int, byte_count: int) -> np.ndarray:
        """`byte_count` bytes of a slab as u8."""
        slab, offset = self._slab_of(device_address)
        return slab.array[offset : offset + byte_count]

    def _slab_of(self, device_address: int) -> tuple[Slab, int]:
        for slab in self.slabs:
            offset = device_address - slab.device_address
            if 0 <= offset < slab.byte_count:
                return slab, offset
        raise AssertionError(f"{device_address:#x} lies in no slab")

    def free(self) -> None:
        """Gives the memory back; no device uses it any more. Again is not an error."""
        try:
            self._ahead.close()
        finally:
            free_slabs(self.slabs)


def _release(device: Device, slabs: list[Slab]) -> None:
    """For a tier that nobody closed. Errors have nobody to go to, and the process's end does the rest."""
    if not slabs or device.closed:
        return
    with contextlib.suppress(Exception):
        device.synchronize()
        free_slabs(slabs)
