"""What histories may hold: the bytes that each costs, by place and purpose, and whether one more fits. Pure arithmetic on numbers of the engine.

A request is charged for the longest history that it can get before it starts and gives that back when it ends; so it never runs out of memory on the
way. In host memory a history is charged as long as it exists, on a device as long as it has a slot there. Extents that histories share are charged to
each of them.

Invariants (`Books.check` proves them):
- what is charged to a place is the sum over its holders, and never more than its limit;
- a history that fits an empty place can be charged once enough others have gone.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from glm53.errors import human_bytes
from glm53.spec import WHOLE, Shard

Cost = tuple[int, ...]  # bytes by place, in the order of the limits


@dataclass(frozen=True)
class Price:
    """What a history costs at one place for one purpose: `each` bytes whatever its length, and an extent for every `extent_rows` rows begun; of a
    pair each side has the extents of its shard. on_device: only while the history has a slot."""

    place: str
    purpose: str
    on_device: bool
    each: int = 0
    extent_rows: int = 1
    extent_bytes: int = 0
    shard: Shard = WHOLE

    def byte_count(self, rows: int) -> int:
        """Bytes of a history of `rows` rows."""
        return self.each + -(-self.shard.rows_of(rows, self.extent_rows) // self.extent_rows) * self.extent_bytes


@dataclass(frozen=True)
class Limit:
    """What histories may hold at a place. setting: what bounds it, for messages."""

    place: str
    byte_count: int
    setting: str


class Books:
    """Who holds how much. Holders are any keys; a history is charged to one holder."""

    def __init__(self, prices: Sequence[Price], limits: Sequence[Limit]):
        places = [limit.place for limit in limits]
        assert len(set(places)) == len(places) and {price.place for price in prices} <= set(places), f"prices at other places than {places}"
        self.prices, self.limits = tuple(prices), tuple(limits)
        self._by_place = [(tuple(p for p in prices if p.place == place)) for place in places]
        self._held: dict[Hashable, Cost] = {}
        self.charged: Cost = (0,) * len(places)

    def cost(self, rows: int, with_slot: bool) -> Cost:
        """Bytes by place of a history of `rows` rows."""
        return tuple(sum(p.byte_count(rows) for p in prices if with_slot or not p.on_device) for prices in self._by_place)

    def of(self, holder: Hashable) -> Cost:
        """What a holder is charged."""
        return self._held.get(holder, (0,) * len(self.limits))

    @property
    def holders(self) -> tuple[Hashable, ...]:
        """Everybody who is charged something."""
        return tuple(self._held)

    def fits(self, cost: Cost, without: Cost | None = None) -> bool:
        """Whether `cost` can be charged once `without` has been given back. What takes no more than it gives back always can."""
        free = without or (0,) * len(self.limits)
        places = zip(self.charged, free, cost, self.limits, strict=True)
        return all(more <= back or held - back + more <= limit.byte_count for held, back, more, limit in places)

    def charge(self, holder: Hashable, cost: Cost) -> None:
        """The holder has `cost` from now on, in place of what it had."""
        before = self.of(holder)
        self._held[holder] = cost
        self.charged = tuple(held - old + new for held, old, new in zip(self.charged, before, cost, strict=True))

    def release(self, holder: Hashable) -> None:
        """The holder has nothing any more."""
        before = self._held.pop(holder, None)
        if before is not None:
            self.charged = tuple(held - old for held, old in zip(self.charged, before, strict=True))

    def never(self, rows: int) -> str | None:
        """Why a history of `rows` rows does not even fit alone, purpose by purpose; None if it does."""
        for limit, prices, cost in zip(self.limits, self._by_place, self.cost(rows, True), strict=True):
            if cost > limit.byte_count:
                parts = ", ".join(f"{p.purpose} {human_bytes(p.byte_count(rows))}" for p in prices if p.byte_count(rows))
                return (
                    f"a history of {rows} rows needs {human_bytes(cost)} at {limit.place} ({parts}), at most {human_bytes(limit.byte_count)} is "
                    f"there ({limit.setting}), {f'for {self.rows_max()} rows' if self.rows_max() else 'not enough for any'}"
                )
        return None

    def rows_max(self, share: int = 1, most: int = 1 << 31) -> int:
        """Rows of the longest history of which `share` fit at once; at most `most`."""
        fits = lambda rows: all(c * share <= limit.byte_count for c, limit in zip(self.cost(rows, True), self.limits, strict=True))
        low, high = 0, most + 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low

    @property
    def usage(self) -> float:
        """Share of what histories may hold that is charged, at the place where that is most."""
        return max((held / limit.byte_count for held, limit in zip(self.charged, self.limits, strict=True) if limit.byte_count), default=0.0)

    def concurrency(self, rows: int) -> float:
        """How many histories of `rows` rows, each with a slot, the memory holds at once."""
        return min((limit.byte_count / cost for cost, limit in zip(self.cost(rows, True), self.limits, strict=True) if cost), default=float("inf"))

    def check(self) -> None:
        """AssertionError if an invariant does not hold."""
        sums = tuple(map(sum, zip(*self._held.values(), strict=True))) if self._held else (0,) * len(self.limits)
        assert sums == self.charged, f"holders sum to {sums}, {self.charged} is charged"
        assert all(min(cost, default=0) >= 0 for cost in self._held.values())
