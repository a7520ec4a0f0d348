"""The ledger: bytes that are allocated, per place and category.

A place is a device or the host, a category says what for ("weights", "mla rows", "cached"). The ledger counts what the allocator handed
out, not what the buffers hold: a 1 KiB table in a 1 GiB block costs 1 GiB. It owns numbers only and learns of allocations by being told.

Invariants (`Ledger.check` proves them):
- no account is negative; an account has bytes exactly if it has allocations;
- the bytes of a place are the sum of its accounts;
- a peak is never below what it is the peak of, and the peak of a place is at most the sum of the peaks of its accounts.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from glm53.errors import Glm53Error, human_bytes

HOST = "host"


def device_place(ordinal: int) -> str:
    """Place of device `ordinal`."""
    return f"device {ordinal}"


class LedgerError(Glm53Error):
    """Base of the ledger's refusals: the books and the allocations differ, so that some memory is lost or was given back twice."""


class ChargeError(LedgerError):
    """A charge of no or negative bytes."""


class ReleaseError(LedgerError):
    """More is released than the account holds, or the last allocation of an account leaves bytes behind."""


class LeakError(LedgerError):
    """Accounts differ from a snapshot. `differences` lists them."""

    def __init__(self, differences: list[Difference]):
        self.differences = differences
        super().__init__("memory is not conserved: " + "; ".join(str(difference) for difference in differences))


@dataclass(frozen=True)
class Balance:
    """Allocated bytes of one account and the number of allocations they are in."""

    byte_count: int
    allocations: int


@dataclass(frozen=True)
class Difference:
    """An account that differs from a snapshot."""

    place: str
    category: str
    before: Balance
    now: Balance

    def __str__(self) -> str:
        return (
            f"{self.place}, {self.category}: {human_bytes(self.now.byte_count)} in {self.now.allocations} allocations, "
            f"before {human_bytes(self.before.byte_count)} in {self.before.allocations}"
        )


Snapshot = dict[tuple[str, str], Balance]
_NOTHING = Balance(0, 0)


class Ledger:
    """Accounts of allocated bytes. Threads may charge and release at the same time."""

    def __init__(self) -> None:
        self._accounts: Snapshot = {}
        self._peaks: dict[tuple[str, str], int] = {}
        self._place_bytes: dict[str, int] = {}
        self._place_peaks: dict[str, int] = {}
        self._lock = threading.Lock()  # one change at a time

    def charge(self, place: str, category: str, byte_count: int) -> None:
        """Counts an allocation of `byte_count` bytes. Raises ChargeError unless that is positive."""
        if byte_count <= 0:
            raise ChargeError(f"ledger: charge of {byte_count} bytes to {place}, {category}; wanted the positive capacity of an allocation")
        with self._lock:
            held = self._accounts.get((place, category), _NOTHING)
            self._set(place, category, Balance(held.byte_count + byte_count, held.allocations + 1))

    def release(self, place: str, category: str, byte_count: int) -> None:
        """Counts an allocation of `byte_count` bytes as given back. Raises ReleaseError, with nothing changed, if the account cannot hold it."""
        with self._lock:
            self._set(place, category, self._without(place, category, byte_count))

    def count(self, device: str, in_host: bool, category: str, byte_count: int) -> None:
        """Charges the place `device`, or the host, where `byte_count` is positive, and releases where it is negative."""
        place = HOST if in_host else device
        if byte_count < 0:
            self.release(place, category, -byte_count)
        else:
            self.charge(place, category, byte_count)

    def by_place(self) -> dict[str, dict[str, int]]:
        """Bytes by place and category, places and categories sorted; those that hold nothing are left out."""
        found: dict[str, dict[str, int]] = {}
        for (place, category), held in sorted(self.snapshot().items()):
            found.setdefault(place, {})[category] = held.byte_count
        return found

    def _without(self, place: str, category: str, byte_count: int) -> Balance:
        held = self._accounts.get((place, category), _NOTHING)
        rest = Balance(held.byte_count - byte_count, held.allocations - 1)
        if byte_count <= 0 or rest.byte_count < 0 or rest.allocations < 0 or (rest.byte_count == 0) != (rest.allocations == 0):
            raise ReleaseError(
                f"ledger: release of {human_bytes(byte_count)} from {place}, {category}, which holds {human_bytes(held.byte_count)} in "
                f"{held.allocations} allocations; wanted the capacity that was charged, once"
            )
        return rest

    def _set(self, place: str, category: str, balance: Balance) -> None:
        key = (place, category)
        held = self._accounts.get(key, _NOTHING)
        if balance.allocations:
            self._accounts[key] = balance
        else:
            self._accounts.pop(key, None)
        self._peaks[key] = max(self._peaks.get(key, 0), balance.byte_count)
        total = self._place_bytes.get(place, 0) + balance.byte_count - held.byte_count
        self._place_bytes[place] = total
        self._place_peaks[place] = max(self._place_peaks.get(place, 0), total)

    @property
    def places(self) -> list[str]:
        """Places that were ever charged, sorted."""
        return sorted(self._place_bytes)

    def balance(self, place: str, category: str) -> Balance:
        """What one account holds."""
        return self._accounts.get((place, category), _NOTHING)

    def total(self, place: str | None = None) -> int:
        """Allocated bytes of a place, or of all."""
        return sum(self._place_bytes.values()) if place is None else self._place_bytes.get(place, 0)

    def peak(self, place: str, category: str | None = None) -> int:
        """Most bytes that a place, or one of its categories, held at once since the start."""
        return self._place_peaks.get(place, 0) if category is None else self._peaks.get((place, category), 0)

    def snapshot(self) -> Snapshot:
        """The accounts as they are now, for `differences` and `conserved`."""
        return dict(self._accounts)

    def differences(self, before: Snapshot) -> list[Difference]:
        """Accounts that differ from a snapshot in bytes or allocations, sorted by place and category."""
        return [
            Difference(*key, before.get(key, _NOTHING), self._accounts.get(key, _NOTHING))
            for key in sorted(before.keys() | self._accounts.keys())
            if before.get(key, _NOTHING) != self._accounts.get(key, _NOTHING)
        ]

    def conserved(self, before: Snapshot) -> None:
        """Raises LeakError, naming every account, unless all accounts are as in the snapshot."""
        differences = self.differences(before)
        if differences:
            raise LeakError(differences)

    def check(self) -> None:
        """Recomputes every derived number; AssertionError names what differs."""
        sums: dict[str, int] = dict.fromkeys(self._place_bytes, 0)
        peaks: dict[str, int] = dict.fromkeys(self._place_bytes, 0)
        for (place, category), held in self._accounts.items():
            assert held.byte_count > 0 and held.allocations > 0, f"account {place}, {category} holds {held}"
            assert self._peaks[place, category] >= held.byte_count, f"peak of {place}, {category} is below its bytes"
            sums[place] += held.byte_count
        for (place, _), peak in self._peaks.items():
            peaks[place] += peak
        assert sums == self._place_bytes, f"accounts sum to {sums}, places hold {self._place_bytes}"
        for place, total in self._place_bytes.items():
            assert total <= self._place_peaks[place] <= peaks[place], f"peak of {place}: {self._place_peaks[place]}, sum of peaks {peaks[place]}"
