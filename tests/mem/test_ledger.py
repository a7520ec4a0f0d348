"""The ledger against a list of live allocations, and what it refuses."""

from __future__ import annotations

import collections

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm53.errors import Glm53Error
from glm53.mem.ledger import HOST, Balance, ChargeError, LeakError, Ledger, ReleaseError, device_place

PLACES = [HOST, device_place(0), device_place(1)]
CATEGORIES = ["weights", "rows"]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(PLACES), st.sampled_from(CATEGORIES), st.integers(1, 100), st.integers(0, 9)), max_size=60))
def test_random_operations_match_a_list_of_allocations(events: list[tuple[str, str, int, int]]) -> None:
    ledger, live, peaks = Ledger(), [], collections.Counter[str]()  # type: ignore[var-annotated]
    for place, category, size, choice in events:
        if choice < 6 or not live:
            ledger.charge(place, category, size)
            live.append((place, category, size))
        else:
            old_place, old_category, old_size = live.pop(size % len(live))
            ledger.release(old_place, old_category, old_size)
        ledger.check()
        for each in PLACES:
            total = sum(size for at, _, size in live if at == each)
            peaks[each] = max(peaks[each], total)
            assert ledger.total(each) == total and ledger.peak(each) == peaks[each]
            for kind in CATEGORIES:
                sizes = [size for at, what, size in live if (at, what) == (each, kind)]
                assert ledger.balance(each, kind) == Balance(sum(sizes), len(sizes))
        assert ledger.total() == sum(size for _, _, size in live)
    for place, category, size in live:
        ledger.release(place, category, size)
    ledger.conserved({})


def test_refusals_name_the_account_and_change_nothing() -> None:
    ledger = Ledger()
    ledger.charge("device 0", "rows", 2048)
    ledger.charge("device 0", "rows", 1024)
    before = ledger.snapshot()
    for size in (0, -1):
        with pytest.raises(ChargeError, match="device 0, rows"):
            ledger.charge("device 0", "rows", size)
    for place, category, size in [
        ("device 0", "rows", 4096),
        ("device 0", "rows", 3072),
        ("device 0", "rows", 0),
        ("host", "rows", 1),
        ("device 0", "x", 1),
    ]:
        with pytest.raises(ReleaseError, match=f"{place}, {category}"):
            ledger.release(place, category, size)
    ledger.release("device 0", "rows", 2048)
    with pytest.raises(ReleaseError, match=r"release of 1 B from device 0, rows, which holds 1024 B \(1.0 KiB\) in 1"):
        ledger.release("device 0", "rows", 1)
    ledger.charge("device 0", "rows", 2048)
    ledger.conserved(before)
    ledger.check()
    assert issubclass(ReleaseError, Glm53Error)


def test_leak_lists_every_account_that_differs() -> None:
    ledger = Ledger()
    ledger.charge(HOST, "rows", 100)
    before = ledger.snapshot()
    ledger.charge(HOST, "rows", 2048)
    ledger.charge("device 1", "tables", 7)
    with pytest.raises(LeakError, match=r"device 1, tables: 7 B in 1 allocations, before 0 B in 0; host, rows: 2148 B \(2.1 KiB\) in 2") as leak:
        ledger.conserved(before)
    assert [(d.place, d.now.byte_count - d.before.byte_count) for d in leak.value.differences] == [("device 1", 7), ("host", 2048)]
    ledger.release("device 1", "tables", 7)
    ledger.release(HOST, "rows", 2048)
    ledger.conserved(before)


def test_accounts_by_place_and_peaks_of_emptied_ones() -> None:
    ledger = Ledger()
    for in_host, category, size in [(False, "tables", 10), (True, "rows", 300), (False, "cached", 50), (False, "cached", -50)]:
        ledger.count("device 0", in_host, category, size)
    assert ledger.by_place() == {"device 0": {"tables": 10}, HOST: {"rows": 300}}
    assert ledger.peak("device 0") == 60 and ledger.peak("device 0", "cached") == 50 and ledger.places == ["device 0", HOST]
    ledger.check()


def test_check_finds_a_corrupted_sum() -> None:
    ledger = Ledger()
    ledger.charge(HOST, "rows", 100)
    ledger._place_bytes[HOST] = 99
    with pytest.raises(AssertionError, match="accounts sum"):
        ledger.check()
