"""Host memory for histories: page-locked slabs that the device reads and writes over the link.

A slab is 2 MiB aligned, huge-page backed where the system grants it, touched by threads before it is page-locked, never copied to a child process,
and coherent: rows are rewritten at the same address, so a device must not keep old copies. Made chunk by chunk; if chunk n fails, the chunks
before it are given back.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from glm53.errors import DeviceMemoryError, HipError, human_bytes
from glm53.hip import Device, HostBuffer

HUGE_PAGE_BYTES = 2 << 20
TOUCH_THREADS = 4
METHODS = ("register", "hostmalloc")

ADVICE = (
    "next: raise the memlock limit (ulimit -l), lower --host-kv-gib or --host-chunk-mib, or try the other --host-memory method; the driver caps "
    "hipHostMalloc by its page limit (amdgpu: ttm.pages_limit), and AMD advises against registering very large regions in one piece"
)


class Slab:
    """One chunk of page-locked host memory. `device_address` and `host_address` name the same bytes."""

    def __init__(self, device: Device, byte_count: int, method: str, category: str):
        assert method in METHODS, f"host memory method {method!r}, wanted one of {METHODS}"
        self._mapping: mmap.mmap | None = None
        if method == "register":
            # One huge page more than asked, so that an aligned start exists inside.
            self._mapping = mmap.mmap(-1, byte_count + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self._mapping.madvise(mmap.MADV_HUGEPAGE)
            self._mapping.madvise(mmap.MADV_DONTFORK)
            whole = np.frombuffer(self._mapping, np.uint8)
            start = -whole.ctypes.data % HUGE_PAGE_BYTES
            array = whole[start : start + byte_count]
            _touch(array)
            self.buffer = device.host_register(array, coherent=True, category=category)
        else:
            self.buffer = device.host_alloc(byte_count, coherent=True, category=category)

    @property
    def array(self) -> np.ndarray:
        """The bytes as numpy u8."""
        return self.buffer.array

    @property
    def device_address(self) -> int:
        return self.buffer.device_address

    @property
    def host_address(self) -> int:
        return self.buffer.host_address

    @property
    def byte_count(self) -> int:
        return self.buffer.byte_count

    def free(self) -> None:
        """Unlocks and unmaps. No device may use it any more."""
        self.buffer.free()
        self._mapping = None


def _touch(array: np.ndarray) -> None:
    """Writes one byte a page from several threads, so that the pages exist before they are locked."""
    pages = array[:: mmap.PAGESIZE]
    parts = np.array_split(pages, TOUCH_THREADS)
    with ThreadPoolExecutor(TOUCH_THREADS) as pool:
        list(pool.map(lambda part: part.fill(0), parts))


def make_slabs(
    device: Device,
    total_bytes: int,
    chunk_bytes: int,
    method: str,
    category: str,
    progress: Callable[[int, int, str], None] | None = None,
) -> list[Slab]:
    """Slabs of at most `chunk_bytes` that hold `total_bytes` together. progress(bytes_done, bytes_total, "host memory").

    Raises DeviceMemoryError naming the chunk that failed; none stays then.
    """
    slabs: list[Slab] = []
    done = 0
    try:
        while done < total_bytes:
            size = min(chunk_bytes, total_bytes - done)
            slabs.append(Slab(device, size, method, category))
            done += size
            if progress is not None:
                progress(done, total_bytes, "host memory")
    except (HipError, OSError, MemoryError, ValueError, DeviceMemoryError) as error:
        for slab in reversed(slabs):
            slab.free()
        raise DeviceMemoryError(
            f"{category}: chunk {len(slabs) + 1} of {human_bytes(min(chunk_bytes, total_bytes - done))} could not be page-locked by {method} "
            f"({error}); {human_bytes(done)} of {human_bytes(total_bytes)} were ready and have been given back; {ADVICE}"
        ) from error
    return slabs


def free_slabs(slabs: list[Slab], say: Callable[[str], None] | None = None) -> None:
    """Gives all slabs back, newest first, and says how long it took."""
    started, total = time.perf_counter(), sum(slab.byte_count for slab in slabs)
    while slabs:
        slabs.pop().free()
    if say is not None and total:
        say(f"released {human_bytes(total)} of host memory in {time.perf_counter() - started:.2f} s")


__all__ = ["HUGE_PAGE_BYTES", "METHODS", "HostBuffer", "Slab", "free_slabs", "make_slabs"]
