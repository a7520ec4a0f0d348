"""Wrappers of rows.hip refuse what their kernels do not take, before anything is launched, and do nothing where there is nothing to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from glm53.check.case import Bench
from glm53.hip import Array, Device
from glm53.mem.extents import GroupedShape
from glm53.ops import rows
from glm53.ops.contract import ContractError
from glm53.ops.hotcache import FetchList
from glm53.spec import DType, RowFormat

F32, BF16, I32, U8, U32, U64 = DType.F32, DType.BF16, DType.I32, DType.U8, DType.U32, DType.U64
Make = Callable[..., Array]


def store(make: Make, dtype: DType = F32, columns: int = 128, with_error: bool = True, refs: int = 2, **change: Any) -> None:
    given: dict[str, Any] = {"offsets": (0, 0, 0, 0), "row_format": RowFormat.Q8G64, "latent": 64, "rope": 63} | change
    x, error = make(dtype, 2, columns), make(U32, 1) if with_error else None
    rows.store_rows(x.device.default_stream, x, make(U64, refs), error=error, **given)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"with_error": False}, "error is None"),
        ({"latent": 65}, "multiple of 64, got 65"),
        ({"rope": 62}, "are 190 bytes, wanted a multiple of 16"),
        ({"rope": 65}, "latent \\+ rope is 129, expected at most columns=128"),
        ({"latent": 192, "rope": None}, "rope -64"),
        ({"dtype": BF16, "row_format": RowFormat.F32}, "no variant bf16_f32"),
        ({"dtype": I32}, "x is i32"),
        ({"refs": 3}, "refs dim 0 is 3, expected rows=2"),
        ({"offsets": (4, 0, 0, 0)}, "multiples of 16"),
    ],
)
def test_store_rows(make: Make, change: dict[str, Any], text: str) -> None:
    with pytest.raises(ContractError, match=text):
        store(make, **change)


def test_place_rows(make: Make) -> None:
    refs = make(U64, 2)
    stream = refs.device.default_stream
    wrong = [("rows is i32", make(I32, 2, 16)), ("rows have 24 bytes", make(U8, 2, 24)), ("refs dim 0 is 2, expected rows=3", make(U8, 3, 16))]
    for text, packed in wrong:
        with pytest.raises(ContractError, match=text):
            rows.place_rows(stream, packed, refs, offsets=(0, 0, 0, 0))
    with pytest.raises(ContractError, match="multiples of 16"):
        rows.place_rows(stream, make(U8, 2, 16), refs, offsets=(4, 0, 0, 0))
    assert rows.cost_place_rows(3, 656).bytes == 3 * (2 * 656 + 8)


def fetch(make: Make, starts: int = 2, entries: int = 32, with_staging: bool = True, **change: Any) -> None:
    given: dict[str, Any] = {
        "planes": range(2, 4),
        "staging_plane_first": 2,
        "hot_plane_bytes": 64,
        "staging_plane_bytes": 64,
        "row_bytes": 32,
        "k": 16,
    }
    lists = FetchList(make(U64, entries), make(U64, 32), make(I32, 32), make(I32, 1))
    round_starts, staging = make(I32, starts), make(U8, 128) if with_staging else None
    rows.fetch(round_starts.device.default_stream, lists, round_starts, staging=staging, **(given | change))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"starts": 3}, "2 rounds, expected 1 to 1"),
        ({"starts": 1}, "0 rounds"),
        ({"entries": 31}, "targets dim 0 is 32, expected entries=31"),
        ({"k": 33}, "k is 33, expected 1 to entries=32"),
        ({"planes": range(2, 2)}, "planes is range"),
        ({"planes": range(3, 1, -1)}, "planes is range"),
        ({"row_bytes": 24}, "row_bytes is 24"),
        ({"hot_plane_bytes": 8}, "plane strides"),
        ({"staging_plane_first": 3}, "staging_plane_first is 3, expected 0 to 2"),
        ({"staging_plane_bytes": 128}, "staging has 128 bytes, its last plane starts at 128"),
        ({"row_bytes": 1 << 31}, "expected below 2\\^35"),
        ({"blocks": 0}, "blocks is 0"),
    ],
)
def test_fetch(make: Make, change: dict[str, Any], text: str) -> None:
    with pytest.raises(ContractError, match=text):
        fetch(make, **change)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"length_bytes": 24}, "length 24: expected multiples of 16"),
        ({"source_plane_bytes": 8}, "plane bytes 8"),
        ({"planes": -1}, "planes -1"),
        ({"planes": 65_536}, "grid"),
    ],
)
def test_copy_planes(make: Make, change: dict[str, Any], text: str) -> None:
    memory = make(U8, 64)
    given = {"source_plane_bytes": 32, "target_plane_bytes": 32, "length_bytes": 16, "planes": 1} | change
    with pytest.raises(ContractError, match=text):
        rows.copy_planes(memory.device.default_stream, memory.address, memory.address + 16, **given)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"rows": 9}, "table_row has 2 extents, 9 rows need 3"),
        ({"rows": 7}, "linear buffer has 96 bytes, 7 rows need 112"),
        ({"rows": -1}, "rows is -1"),
        ({"row_bytes": 8}, "row_bytes is 8"),
        ({"plane_offset_bytes": 4}, "plane_offset_bytes is 4"),
        ({"stride_bytes": 24}, "stride_bytes is 24"),
        ({"stride_bytes": 0}, "stride_bytes is 0, expected 16 or more"),
        ({"row_bytes": 1 << 30, "rows": 32, "extent_rows": 32, "stride_bytes": 1 << 30}, "expected below 2\\^35"),
    ],
)
def test_gather_plane(make: Make, change: dict[str, Any], text: str) -> None:
    table, target = make(U64, 1, 2), make(U8, 96)
    given = {"plane_offset_bytes": 0, "stride_bytes": 16, "rows": 4, "extent_rows": 4, "row_bytes": 16} | change
    with pytest.raises(ContractError, match=text):
        rows.gather_plane(target.device.default_stream, table, target, **given)


def test_scatter_plane_counts_from_the_first_row(make: Make) -> None:
    table, source = make(U64, 1, 2), make(U8, 96)
    stream = source.device.default_stream
    sizes = {"plane_offset_bytes": 0, "stride_bytes": 16, "extent_rows": 4, "row_bytes": 16}
    for first, count, text in ((6, 3, "2 extents, 9 rows need 3"), (4, 3, "96 bytes, 7 rows need 112"), (-1, 1, "first -1")):
        with pytest.raises(ContractError, match=text):
            rows.scatter_plane(stream, table, source, first=first, rows=count, **sizes)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"first_row": 60, "rows": 5}, "rows \\[60, 65\\), expected within the 64 of an extent"),
        ({"first_row": -1}, "rows \\[-1, 0\\)"),
        ({"rows": -1}, "rows \\[0, -1\\)"),
        ({"source_plane_bytes": 8}, "plane bytes 8: expected multiples of 16"),
        ({"groups": 2}, "groups dim 0 is 2, expected 1"),
    ],
)
def test_copy_back(make: Make, change: dict[str, Any], text: str) -> None:
    given: dict[str, Any] = {"source_plane_bytes": 16, "first_row": 0, "rows": 1, "groups": 1} | change
    memory, groups, shape = make(U8, 64), make(U32, given.pop("groups"), 2), GroupedShape(64, 2, 16, (2,))
    with pytest.raises(ContractError, match=text):
        rows.copy_back(memory.device.default_stream, memory.address, memory.address, groups, shape, **given)


def test_nothing_to_move_launches_nothing(make: Make) -> None:
    target = make(U8, 32)
    stream = target.device.default_stream
    rows.gather_plane(stream, 0, target, plane_offset_bytes=0, stride_bytes=16, rows=0, extent_rows=4, row_bytes=16)
    groups, shape = make(U32, 1, 2), GroupedShape(64, 2, 16, (2,))
    rows.copy_back(stream, target.address, target.address, groups, shape, source_plane_bytes=16, first_row=64, rows=0)
    rows.copy_planes(stream, 0, target.address, source_plane_bytes=0, target_plane_bytes=0, length_bytes=0, planes=2)
    rows.copy_planes(stream, 0, target.address, source_plane_bytes=0, target_plane_bytes=0, length_bytes=16, planes=0)
    assert (target.numpy() == 0xFF).all()


def test_blocks_follow_the_work_and_the_device(device: Device) -> None:
    most = rows.BLOCKS_PER_UNIT * device.properties.compute_units
    assert rows.copy_blocks(device, 1, 1, 1024) == 1
    assert rows.copy_blocks(device, 1025, 1, 1024) == min(2, most)
    assert rows.copy_blocks(device, 1 << 40, 1, 1024) == most
    assert rows.copy_blocks(device, 1 << 40, 4, 1024) == most
    assert rows.copy_blocks(device, 1 << 40, 8, 1024) == device.properties.compute_units
    assert rows.copy_blocks(device, 1 << 40, 10 * most, 1024) == 1


def test_costs() -> None:
    assert rows.cost_store_rows(rows=2, width=576, item_bytes=4, row_bytes=656).bytes == 2 * (2304 + 656 + 8)
    assert rows.cost_fetch(rows=3, planes=4, row_bytes=656).bytes == 12 * (1312 + 16)
    assert rows.cost_copy_planes(length_bytes=64, planes=3).bytes == 384
    assert rows.cost_copy_back(rows=64, planes=4, row_bytes=656).bytes == 2 * 64 * 4 * 656
    assert rows.cost_gather_plane(rows=5, row_bytes=656).bytes == 6560


def test_largest_row_number_stays_in_the_error_word(device: Device) -> None:
    """Many bad rows at once: the atomic maximum keeps the last row."""
    x = np.full((300, 71), np.nan, np.float32)
    with Bench(device) as bench:
        memory, error = bench.poison(U8, (300, 80)), bench.put(np.zeros(1, np.uint32))
        refs = bench.put(np.arange(300, dtype=np.uint64) * np.uint64(80) + np.uint64(3))
        offsets = (0, 0, 0, memory.address)
        rows.store_rows(bench.stream, bench.put(x), refs, offsets=offsets, row_format=RowFormat.Q8G64, latent=64, error=error)
        assert bench.read(error)[0] == 300
