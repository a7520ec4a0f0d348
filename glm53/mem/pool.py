"""The policy of a caching device allocator: which unused block serves a request, and which ones go back to the device.

It decides over capacities and never calls an allocator; `glm53.kv.blocks` does what it says. A long-lived buffer gets a block of exactly its bytes,
so that no session holds on to a large block that a prefill left behind. A temporary takes the best fit within a bound of waste. Blocks are neither
split nor merged.

Life of a block: request -> Allocate -> adopt -> LENT -> give_back -> CACHED -> request -> LENT, or CACHED -> make_room or Allocate.release -> gone.

Invariants (`BufferPool.check` proves them):
- a lent long-lived block has exactly the bytes that were asked; a lent temporary wastes at most its bound;
- allocated = lent + cached <= the most that was ever lent at once.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from glm53.mem import compiled

WASTE_MAX_PERCENT = 25  # of a temporary, in percent of its bytes


class Life(enum.Enum):
    """How long a buffer is held, which decides what block it may have."""

    LONG = "long-lived"  # exactly its bytes
    TEMPORARY = "temporary"  # the best fit within the waste bound

    def capacity_max(self, byte_count: int) -> int:
        """Bytes of the largest block that a buffer of `byte_count` bytes may have."""
        return byte_count if self is Life.LONG else byte_count * (100 + WASTE_MAX_PERCENT) // 100


class BlockState(enum.IntEnum):
    """State of a place in the pool's block array."""

    ABSENT = compiled.BLOCK_ABSENT  # no block: the place is free for the next adopted one
    CACHED = compiled.BLOCK_CACHED  # allocated and unused: may be lent or leave
    LENT = 2  # in use: may only be given back


@dataclass(frozen=True)
class Use:
    """The request is served by the cached block at `index`, which is lent now."""

    index: int


@dataclass(frozen=True)
class Allocate:
    """No cached block serves. The blocks at `release` have left the pool: give them back to the device, then allocate and `adopt`."""

    release: tuple[int, ...]


class BufferPool:
    """Blocks of one device, each known by its index, which is valid until the block leaves. Not thread-safe."""

    def __init__(self) -> None:
        self._blocks: npt.NDArray[Any] = np.zeros(16, compiled.BLOCK)
        self._lives: dict[int, Life] = {}  # of lent blocks
        self.lent_bytes = self.cached_bytes = self.lent_bytes_peak = 0

    def request(self, byte_count: int, life: Life) -> Use | Allocate:
        """Decides how `byte_count` bytes are served. Raises ValueError, with nothing changed, unless that is positive."""
        if byte_count <= 0:
            raise ValueError(f"request of {byte_count} bytes: wanted at least one")
        index = int(compiled.best_block(self._blocks, byte_count, life.capacity_max(byte_count)))
        if index >= 0:
            self.cached_bytes -= int(self._blocks["capacity"][index])
            self._lend(index, byte_count, life)
            return Use(index)
        # A device without a pool would hold as much at some time: caching must not cost more than that.
        excess = self.lent_bytes + self.cached_bytes + byte_count - max(self.lent_bytes_peak, self.lent_bytes + byte_count)
        return Allocate(self.make_room(excess))

    def adopt(self, byte_count: int, life: Life) -> int:
        """Index of a block of exactly `byte_count` > 0 bytes that the device just allocated and that is lent at once."""
        free = np.flatnonzero(self._blocks["state"] == BlockState.ABSENT)
        if len(free):
            index = int(free[0])
        else:
            index = len(self._blocks)
            self._blocks = np.concatenate([self._blocks, np.zeros(index, compiled.BLOCK)])
        self._blocks["capacity"][index] = byte_count
        self._lend(index, byte_count, life)
        return index

    def give_back(self, index: int) -> None:
        """A lent block is unused from now on, in stream order, which is the caller's business. It stays cached."""
        found = self._blocks["state"][index]
        assert found == BlockState.LENT, f"block {index} is given back and {BlockState(found).name}, wanted LENT"
        del self._lives[index]
        capacity = int(self._blocks["capacity"][index])
        self._blocks[index] = (capacity, 0, BlockState.CACHED)
        self.lent_bytes -= capacity
        self.cached_bytes += capacity

    def make_room(self, byte_count: int) -> tuple[int, ...]:
        """Cached blocks, no longer of the pool, to give back to the device: at least `byte_count` bytes, or all of them if they are less."""
        indices: npt.NDArray[np.int64] = np.zeros(len(self._blocks), np.int64)
        chosen = indices[: compiled.blocks_for_room(self._blocks, byte_count, indices)]
        self.cached_bytes -= int(self._blocks["capacity"][chosen].sum())
        self._blocks[chosen] = (0, 0, BlockState.ABSENT)
        return tuple(chosen.tolist())

    def _lend(self, index: int, byte_count: int, life: Life) -> None:
        capacity = int(self._blocks["capacity"][index])
        self._blocks[index] = (capacity, byte_count, BlockState.LENT)
        self._lives[index] = life
        self.lent_bytes += capacity
        self.lent_bytes_peak = max(self.lent_bytes_peak, self.lent_bytes)

    def check(self) -> None:
        """Recomputes every derived number; AssertionError names what differs."""
        sums = dict.fromkeys(BlockState, 0)
        for index, block in enumerate(self._blocks):
            state, capacity, asked = BlockState(int(block["state"])), int(block["capacity"]), int(block["asked"])
            sums[state] += capacity
            assert (state is BlockState.ABSENT) == (capacity == 0), f"block {index} is {state.name} with {capacity} bytes"
            assert (state is BlockState.LENT) == (index in self._lives), f"block {index} is {state.name}, its life says otherwise"
            if state is BlockState.LENT:
                life = self._lives[index]
                assert asked <= capacity <= life.capacity_max(asked), f"{life.value} {asked} bytes hold {capacity}"
            else:
                assert asked == 0, f"block {index} is {state.name} with {asked} bytes asked"
        found = sums[BlockState.LENT], sums[BlockState.CACHED]
        assert found == (self.lent_bytes, self.cached_bytes), f"blocks sum to {found}, the pool counts {self.lent_bytes, self.cached_bytes}"
        assert sum(found) <= self.lent_bytes_peak, f"{sum(found)} bytes are allocated, at most {self.lent_bytes_peak} were lent at once"
