"""Device memory that a tier uses again: binds the policy of `glm53.mem.pool` to a device.

An unused block stays allocated under the category `CACHED`, so that every account of the device goes on showing the bytes that are allocated. It
goes back to the device when another one is allocated in its stead, and when any allocation of the device finds no memory left.
"""

from __future__ import annotations

from contextlib import ExitStack

from glm53.hip import Buffer, Device
from glm53.mem.pool import BufferPool, Life, Use

CACHED = "cached"


class DeviceBlocks:
    """Blocks of one device for one owner, whose streams order one use of a block after the last."""

    def __init__(self, device: Device):
        self.device = device
        self.pool = BufferPool()
        self._buffers: dict[int, Buffer] = {}  # every block of the pool, by index
        device.spare.append(self.give_back_cached)

    def lend(self, byte_count: int, life: Life, category: str) -> Buffer:
        """`byte_count` bytes, or more of them for a temporary; what they hold is undefined. Raises DeviceMemoryError with nothing lent."""
        decision = self.pool.request(byte_count, life)
        if isinstance(decision, Use):
            buffer = self._buffers[decision.index]
            buffer.relabel(category)
            return buffer
        self._give_back(decision.release)
        buffer = self.device.alloc(byte_count, category=category)
        self._buffers[self.pool.adopt(byte_count, life)] = buffer
        return buffer

    def put_back(self, buffer: Buffer) -> None:
        """A lent buffer is unused: work enqueued from now on may write to it. Bookkeeping only, and it never fails."""
        index = next(index for index, held in self._buffers.items() if held is buffer)
        self.pool.give_back(index)
        buffer.relabel(CACHED)

    def give_back_cached(self) -> int:
        """Gives all unused blocks back to the device; the bytes that are."""
        byte_count = self.pool.cached_bytes
        self._give_back(self.pool.make_room(byte_count))
        return byte_count

    def _give_back(self, indices: tuple[int, ...]) -> None:
        with ExitStack() as steps:  # each has its turn, whatever another one raises
            for index in indices:
                steps.callback(self._buffers.pop(index).free)

    def check(self) -> None:
        """Invariants of the pool, and that its blocks are the buffers that the device counts."""
        self.pool.check()
        sizes = [buffer.byte_count for buffer in self._buffers.values()]
        held = self.pool.lent_bytes + self.pool.cached_bytes
        assert sum(sizes) == held, f"buffers of {sizes} bytes, the pool counts {held}"
        cached = sum(buffer.byte_count for buffer in self._buffers.values() if buffer.category == CACHED)
        assert cached == self.pool.cached_bytes, f"{cached} bytes are labelled {CACHED}, the pool counts {self.pool.cached_bytes}"

    def free(self) -> None:
        """Gives everything back, what is lent too: nobody uses it any more. Again is not an error."""
        if self.give_back_cached in self.device.spare:
            self.device.spare.remove(self.give_back_cached)
        with ExitStack() as steps:
            while self._buffers:
                steps.callback(self._buffers.popitem()[1].free)


__all__ = ["CACHED", "DeviceBlocks"]
