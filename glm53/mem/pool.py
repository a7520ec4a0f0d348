"""The policy of a caching device allocator: which block serves a request, and which blocks go back to the device to make room.

It decides over blocks given as (address, capacity) and never calls an allocator; the binding does what the returned values say. Long-lived
requests get a block of exactly their aligned capacity, so that no small cache, table or session buffer holds on to a large block that a
prefill left behind. Temporaries take the best fit within a bound of waste. Blocks are never split or merged.

Life of a block:

    request -> Allocate --adopt--> LENT --give_back--> CACHED --request -> Use--> LENT
                                                       CACHED --make_room, trim, Allocate.release--> LEAVING --released--> gone

Invariants (`BufferPool.check` proves them):
- addresses of distinct blocks do not overlap;
- a lent long-lived block has exactly the aligned capacity of what was asked; a lent temporary wastes at most its bound;
- allocated = lent + cached + leaving <= limit, in capacities; the ledger holds the same, cached and leaving blocks under `CACHED_CATEGORY`.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from glm53.errors import DeviceMemoryError, human_bytes
from glm53.mem import compiled
from glm53.mem.ledger import Ledger

CACHED_CATEGORY = "cached"


class Life(enum.Enum):
    """How long a buffer is held, which decides what block it may have."""

    LONG = "long-lived"  # exactly its capacity
    TEMPORARY = "temporary"  # the best fit within the waste bound


class BlockState(enum.IntEnum):
    """State of a place in the pool's block array."""

    ABSENT = compiled.BLOCK_ABSENT  # no block: the place is free for the next adopted one
    CACHED = compiled.BLOCK_CACHED  # allocated and unused: may be lent or chosen to leave
    LENT = 2  # in use: may only be given back
    LEAVING = 3  # chosen to go back to the device: may only be released; still counted as allocated


@dataclass(frozen=True)
class Block:
    """An allocated block. `index` is its place in the pool; valid until it is given back or released."""

    index: int
    address: int
    capacity: int


@dataclass(frozen=True)
class Use:
    """The request is served by a cached block, which is lent now."""

    block: Block


@dataclass(frozen=True)
class Allocate:
    """No cached block serves: release the blocks of `release`, allocate `capacity` bytes, then `adopt` the address.

    If the device refuses nevertheless, `make_room` names more blocks to release before another attempt.
    """

    capacity: int
    release: tuple[Block, ...]


class BufferPool:
    """Blocks of one place (a device). `limit_bytes` bounds what is allocated, 0: no bound but the device's.

    `waste_max_percent`: a temporary of n bytes may get a block of up to n * (100 + waste_max_percent) / 100 bytes. Not thread-safe.
    """

    def __init__(self, place: str, ledger: Ledger, *, limit_bytes: int = 0, alignment_bytes: int = 256, waste_max_percent: int = 25):
        if alignment_bytes <= 0 or alignment_bytes & (alignment_bytes - 1):
            raise ValueError(f"alignment_bytes: got {alignment_bytes}, wanted a power of two")
        if limit_bytes < 0 or waste_max_percent < 0:
            raise ValueError(f"limit_bytes {limit_bytes}, waste_max_percent {waste_max_percent}: wanted at least 0")
        self.place, self.ledger = place, ledger
        self.limit_bytes, self.alignment_bytes, self.waste_max_percent = limit_bytes, alignment_bytes, waste_max_percent
        self._blocks: npt.NDArray[Any] = np.zeros(16, compiled.BLOCK)
        self._categories: dict[int, tuple[str, Life]] = {}  # of lent blocks
        self._bytes = dict.fromkeys(BlockState, 0)  # capacities by state

    @property
    def allocated_bytes(self) -> int:
        """Capacities of all blocks that the device has not got back."""
        return sum(self._bytes.values())

    @property
    def lent_bytes(self) -> int:
        """Capacities of the blocks in use."""
        return self._bytes[BlockState.LENT]

    @property
    def cached_bytes(self) -> int:
        """Capacities of the unused blocks."""
        return self._bytes[BlockState.CACHED]

    @property
    def wasted_bytes(self) -> int:
        """Bytes of lent blocks that nobody asked for: alignment, and the surplus of temporaries."""
        lent = self._blocks[self._blocks["state"] == BlockState.LENT]
        return int((lent["capacity"] - lent["asked"]).sum())

    def capacity_for(self, byte_count: int) -> int:
        """`byte_count` rounded up to the alignment."""
        return -(-byte_count // self.alignment_bytes) * self.alignment_bytes

    def _capacity_max(self, byte_count: int, life: Life) -> int:
        capacity = self.capacity_for(byte_count)
        return capacity if life is Life.LONG else max(capacity, byte_count * (100 + self.waste_max_percent) // 100)

    # Requests

    def request(self, byte_count: int, life: Life, category: str) -> Use | Allocate:
        """Decides how `byte_count` bytes are served.

        Raises ValueError unless that is positive, and DeviceMemoryError, with nothing changed, if the limit is too low even with every cached
        block released.
        """
        if byte_count <= 0 or category == CACHED_CATEGORY:
            raise ValueError(f"request of {byte_count} bytes for {category!r}: wanted at least one, for a category other than {CACHED_CATEGORY!r}")
        capacity = self.capacity_for(byte_count)
        index = int(compiled.best_block(self._blocks, capacity, self._capacity_max(byte_count, life)))
        if index >= 0:
            self._lend(index, byte_count, life, category)
            return Use(self._block(index))
        excess = self.allocated_bytes + capacity - self.limit_bytes if self.limit_bytes else 0
        if excess > self.cached_bytes:
            raise DeviceMemoryError(
                f"{self.place}: {human_bytes(capacity)} for {category} do not fit: the limit is {human_bytes(self.limit_bytes)}, "
                f"{human_bytes(self.allocated_bytes - self.cached_bytes)} are in use; close sessions or raise the limit"
            )
        return Allocate(capacity, self.make_room(excess))

    def adopt(self, address: int, capacity: int, byte_count: int, life: Life, category: str) -> Block:
        """A block that the device just allocated, lent at once for `byte_count` bytes.

        Raises ValueError, with nothing changed, if it is misaligned, of a capacity that this request may not have, or overlaps another block.
        """
        if byte_count <= 0 or category == CACHED_CATEGORY:
            raise ValueError(f"block for {byte_count} bytes of {category!r}: wanted at least one, of a category other than {CACHED_CATEGORY!r}")
        wanted = self.capacity_for(byte_count)
        if address <= 0 or address % self.alignment_bytes or capacity != wanted:
            raise ValueError(
                f"block at {address:#x} of {capacity} bytes for {byte_count} bytes of {category}: "
                f"wanted an address aligned to {self.alignment_bytes} and a capacity of {wanted}"
            )
        present = self._blocks[self._blocks["state"] != BlockState.ABSENT]
        overlaps = present[(present["address"] < address + capacity) & (present["address"] + present["capacity"].astype(np.uint64) > address)]
        if len(overlaps):
            raise ValueError(f"block at {address:#x} of {capacity} bytes overlaps the block at {int(overlaps[0]['address']):#x}")
        if self.limit_bytes and self.allocated_bytes + capacity > self.limit_bytes:
            raise ValueError(f"block of {capacity} bytes: {self.allocated_bytes} of {self.limit_bytes} bytes are allocated; release first")
        free = np.flatnonzero(self._blocks["state"] == BlockState.ABSENT)
        if len(free) == 0:
            self._blocks = np.concatenate([self._blocks, np.zeros(len(self._blocks), compiled.BLOCK)])
            index = len(self._blocks) // 2
        else:
            index = int(free[0])
        self._blocks[index] = (address, capacity, 0, BlockState.CACHED)
        self._bytes[BlockState.CACHED] += capacity
        self.ledger.charge(self.place, CACHED_CATEGORY, capacity)
        self._lend(index, byte_count, life, category)
        return self._block(index)

    def give_back(self, block: Block) -> None:
        """A lent block is unused from now on (in stream order, which is the binding's business) and stays cached."""
        self._assert_state(block, BlockState.LENT, "give_back")
        category, _ = self._categories.pop(block.index)
        self._move(block.index, BlockState.CACHED)
        self._blocks["asked"][block.index] = 0
        self.ledger.move(self.place, category, CACHED_CATEGORY, block.capacity)

    # Going back to the device

    def make_room(self, byte_count: int) -> tuple[Block, ...]:
        """Cached blocks to release so that at least `byte_count` bytes go back, LEAVING from now on; all of them if they are less."""
        indices: npt.NDArray[np.int64] = np.zeros(len(self._blocks), np.int64)
        count = compiled.blocks_for_room(self._blocks, byte_count, indices)
        for index in indices[:count]:
            self._move(int(index), BlockState.LEAVING)
        return tuple(self._block(int(index)) for index in indices[:count])

    def trim(self, keep_bytes: int = 0) -> tuple[Block, ...]:
        """Cached blocks to release so that at most `keep_bytes` stay cached, LEAVING from now on."""
        return self.make_room(self.cached_bytes - keep_bytes)

    def released(self, block: Block) -> None:
        """The device has a LEAVING block back."""
        self._assert_state(block, BlockState.LEAVING, "released")
        self._move(block.index, BlockState.ABSENT)
        self._bytes[BlockState.ABSENT] = 0
        self._blocks[block.index] = (0, 0, 0, BlockState.ABSENT)
        self.ledger.release(self.place, CACHED_CATEGORY, block.capacity)

    # Transitions

    def _lend(self, index: int, byte_count: int, life: Life, category: str) -> None:
        self._move(index, BlockState.LENT)
        self._blocks["asked"][index] = byte_count
        self._categories[index] = (category, life)
        self.ledger.move(self.place, CACHED_CATEGORY, category, int(self._blocks["capacity"][index]))

    def _move(self, index: int, state: BlockState) -> None:
        capacity = int(self._blocks["capacity"][index])
        self._bytes[BlockState(int(self._blocks["state"][index]))] -= capacity
        self._bytes[state] += capacity
        self._blocks["state"][index] = state

    def _block(self, index: int) -> Block:
        address, capacity, _, _ = self._blocks[index].item()
        return Block(index, address, capacity)

    def _assert_state(self, block: Block, state: BlockState, action: str) -> None:
        assert 0 <= block.index < len(self._blocks) and self._block(block.index) == block, f"{action} of {block}, which is not in the pool"
        found = BlockState(int(self._blocks["state"][block.index]))
        assert found is state, f"{action} of {block}, which is {found.name}, wanted {state.name}"

    def check(self) -> None:
        """Recomputes every derived number, the ledger's accounts of this place included; AssertionError names what differs."""
        sums = dict.fromkeys(BlockState, 0)
        accounts: dict[str, list[int]] = {}
        for index, block in enumerate(self._blocks):
            state, capacity = BlockState(int(block["state"])), int(block["capacity"])
            sums[state] += capacity
            assert (state is BlockState.ABSENT) == (capacity == 0), f"block {index} is {state.name} with {capacity} bytes"
            assert (state is BlockState.LENT) == (index in self._categories), f"block {index} is {state.name}, its category says otherwise"
            if state is BlockState.LENT:
                category, life = self._categories[index]
                asked = int(block["asked"])
                assert self.capacity_for(asked) <= capacity <= self._capacity_max(asked, life), f"{life.value} {asked} bytes hold {capacity}"
            else:
                assert block["asked"] == 0, f"block {index} is {state.name} with {block['asked']} bytes asked"
            if state is not BlockState.ABSENT:
                accounts.setdefault(category if state is BlockState.LENT else CACHED_CATEGORY, []).append(capacity)
        assert sums == self._bytes, f"blocks sum to {sums}, the pool counts {self._bytes}"
        assert not self.limit_bytes or self.allocated_bytes <= self.limit_bytes, f"{self.allocated_bytes} bytes above the limit {self.limit_bytes}"
        present = np.sort(self._blocks[self._blocks["state"] != BlockState.ABSENT], order="address")
        ends = present["address"] + present["capacity"].astype(np.uint64)
        assert (present["address"][1:] >= ends[:-1]).all(), "blocks overlap"
        for category, capacities in accounts.items():
            held = self.ledger.balance(self.place, category)
            assert held.byte_count >= sum(capacities) and held.allocations >= len(capacities), f"ledger holds {held} for {category}"
