"""Host memory for histories: page-locked slabs that the device reads and writes over the link.

A slab is 2 MiB aligned, huge-page backed where the system grants it, touched by threads on the device's NUMA node before it is page-locked, never
copied to a child process, and coherent: rows are rewritten at the same address, so a device must not keep old copies. Made chunk by chunk, several
at a time; if one fails, all are given back. `SlabAhead` makes the next one in a thread before it is needed.
"""

from __future__ import annotations

import logging
import mmap
import resource
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, as_completed

import numpy as np

from glm53.errors import DeviceMemoryError, Glm53Error, HipError, human_bytes
from glm53.hip import Device
from glm53.kv import numa

HUGE_PAGE_BYTES = 2 << 20
THREADS = 4  # that touch pages, or prepare chunks at the same time
METHODS = ("register", "hostmalloc")
RELEASE_SECONDS_MAX = 60.0  # after that long, what is still page-locked at close is left to the end of the process

Progress = Callable[[int, int, str], None]

_log = logging.getLogger("glm53")
_left: list[Slab] = []  # given up at close: their pages must not be unmapped while they are locked


def advice() -> str:
    """What a person can do when host memory cannot be page-locked."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limit = "unlimited" if soft == resource.RLIM_INFINITY else human_bytes(soft)
    return (
        f"next: raise the memlock limit (ulimit -l, now {limit}), lower --host-kv-gib or --host-chunk-mib, or try the other --host-memory method; "
        "the driver caps hipHostMalloc by its page limit (amdgpu: ttm.pages_limit), and AMD advises against registering very large regions at once"
    )


class Slab:
    """One chunk of page-locked host memory. `device_address` and `host_address` name the same bytes."""

    def __init__(self, device: Device, byte_count: int, method: str, category: str, touch_threads: int = THREADS):
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
            numa.place(array, device)
            _touch(array, touch_threads)
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
        """Unlocks and unmaps. No device may use it any more. Nothing to do where the device's end has done it."""
        if not self.buffer.freed:
            self.buffer.free()
        self._mapping = None


def _touch(array: np.ndarray, threads: int) -> None:
    """Writes one byte a page, so that the pages exist before they are locked."""
    pages = array[:: mmap.PAGESIZE]
    if threads == 1:
        pages.fill(0)
        return
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda part: part.fill(0), np.array_split(pages, threads)))


def make_slabs(device: Device, total_bytes: int, chunk_bytes: int, method: str, category: str, progress: Progress | None = None) -> list[Slab]:
    """Slabs of at most `chunk_bytes` that hold `total_bytes` together, in order. progress(bytes_done, bytes_total, "host memory").

    Raises DeviceMemoryError naming the first chunk that failed; none stays then, whatever `progress` raises too.
    """
    sizes = [min(chunk_bytes, total_bytes - first) for first in range(0, total_bytes, chunk_bytes)]
    if len(sizes) == 1:
        futures = [_done(lambda: Slab(device, sizes[0], method, category))]
    else:
        with ThreadPoolExecutor(THREADS) as pool:
            futures = [pool.submit(Slab, device, size, method, category, 1) for size in sizes]
            try:
                _follow(futures, sizes, progress)
            except BaseException:
                _undo(futures)
                raise
    failed = next((index for index, future in enumerate(futures) if not future.cancelled() and future.exception()), None)
    if failed is None:
        if progress is not None and len(sizes) == 1:
            progress(total_bytes, total_bytes, "host memory")
        return [future.result() for future in futures]
    error = futures[failed].exception()
    ready = _undo(futures)
    if not isinstance(error, (HipError, OSError, MemoryError, ValueError, DeviceMemoryError)):
        assert error is not None
        raise error
    raise DeviceMemoryError(
        f"{category}: chunk {failed + 1} of {len(sizes)}, {human_bytes(sizes[failed])}, could not be page-locked by {method} ({error}); "
        f"{human_bytes(ready)} of {human_bytes(total_bytes)} were ready and have been given back; {advice()}"
    ) from error


def _done(make: Callable[[], Slab]) -> Future[Slab]:
    """The outcome of `make`, called here and now."""
    future: Future[Slab] = Future()
    try:
        future.set_result(make())
    except Exception as error:
        future.set_exception(error)
    return future


def _follow(futures: list[Future[Slab]], sizes: list[int], progress: Progress | None) -> None:
    """Reports chunks as they become ready; after a failure those that have not begun are cancelled."""
    size_of = dict(zip(futures, sizes, strict=True))
    done = 0
    for future in as_completed(futures):
        if future.cancelled():
            continue
        if future.exception():
            for other in futures:
                other.cancel()
            continue
        done += size_of[future]
        if progress is not None:
            progress(done, sum(sizes), "host memory")


def _undo(futures: list[Future[Slab]]) -> int:
    """Gives back what was made, the last first; the bytes that were ready."""
    ready = 0
    for future in reversed(futures):
        if not future.cancel() and not future.exception():
            slab = future.result()
            ready += slab.byte_count
            slab.free()
    return ready


class SlabAhead:
    """At most one slab on its way, page-locked by a thread, so that no step waits for it. Driven by one owner.

    idle --start--> coming --taken by `ready` or `wait`--> idle. A failure stays until `wait` raises it or `close` logs it; nothing is started
    meanwhile.
    """

    def __init__(self, make: Callable[[int], Slab]):
        self._make = make
        self._pool: ThreadPoolExecutor | None = None
        self._coming: Future[Slab] | None = None

    def start(self, byte_count: int) -> None:
        """Begins a slab of `byte_count` bytes, unless one is on its way."""
        if self._coming is not None:
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="glm53-host-memory")
        self._coming = self._pool.submit(self._make, byte_count)

    def ready(self) -> Slab | None:
        """The slab if it is complete. Does not wait."""
        if self._coming is None or not self._coming.done() or self._coming.exception():
            return None
        return self.wait()

    def wait(self) -> Slab | None:
        """The slab on its way, None if there is none. Raises what made it fail, once."""
        coming, self._coming = self._coming, None
        return None if coming is None else coming.result()

    def close(self) -> None:
        """Waits for the thread and gives back what it made."""
        try:
            slab = self.wait()
        except Glm53Error as error:
            _log.warning("host memory that was prepared ahead of need failed and was not needed: %s", error)
            slab = None
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None
        if slab is not None:
            slab.free()


def free_slabs(slabs: list[Slab], seconds_max: float = RELEASE_SECONDS_MAX) -> None:
    """Gives all slabs back, newest first, empties the list and logs how long it took. No device may use them any more.

    Takes at most `seconds_max` and one slab more: the rest stays page-locked until the process ends, and the log says so. The first error of a
    slab is raised when all have had their turn.
    """
    if not slabs:
        return
    started, total, kept = time.perf_counter(), sum(slab.byte_count for slab in slabs), 0
    failed: Glm53Error | None = None
    while slabs:
        slab = slabs.pop()
        if time.perf_counter() - started > seconds_max:
            kept += slab.byte_count
            _left.append(slab)
            continue
        try:
            slab.free()
        except Glm53Error as error:
            failed = failed or error
            _left.append(slab)
    seconds = time.perf_counter() - started
    if kept:
        _log.warning("%s of host memory stay page-locked until the process ends: releasing took %.1f s", human_bytes(kept), seconds)
    _log.info("released %s of host memory in %.2f s", human_bytes(total - kept), seconds)
    if failed is not None:
        raise failed


__all__ = ["HUGE_PAGE_BYTES", "METHODS", "Slab", "SlabAhead", "free_slabs", "make_slabs"]
