"""Byte oracle: every stored byte encodes session, layer, row, its place in the row and how often the row was written; every byte read is checked."""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from glm53.check.case import Bench
from glm53.check.reference_rows import oracle_bytes, row_bits, row_values
from glm53.errors import HipError
from glm53.hip import Device, runtime
from glm53.hip.array import f32_from_bf16
from glm53.kv import HostTier, HostTierConfig, KvCache
from glm53.mem.extents import ExtentShape, GroupedShape, GroupPlace
from glm53.ops import hotcache, rows
from glm53.spec import DType, RowFormat, Space

LATENT, LAYERS, GROUPS, TOPK, RING = 128, 6, ((0, 1, 2, 3), (4, 5)), 48, 192
ROPE = {"f32": 24, "bf16": 24, "q8g64": 22}
U64 = np.uint64
on_cpu = pytest.mark.skipif("runtime.select().name != 'cpu'", reason="fault injection exists on the cpu runtime only")


def coded(session: int, layer: int, positions: np.ndarray, writes: np.ndarray, row_format: str) -> tuple[np.ndarray, np.ndarray]:
    """(input values [n, width] as `append` takes them, stored bytes [n, row_bytes]) of rows of one layer. For q8g64 the values are made from
    codes: -127 to 127 with one of full size a group, any normal f16 scale, any finite bf16, so that the stored bytes are these codes."""
    rope = ROPE[row_format]
    raw = oracle_bytes(session, layer, positions, writes, RowFormat(row_format).row_bytes(LATENT, rope))
    if row_format == "bf16":
        return raw.view(np.uint16), raw
    if row_format == "f32":
        return raw.view(np.float32), raw
    groups = LATENT // 64
    codes = raw[:, :LATENT].view(np.int8)
    codes[codes == -128] = -127
    codes[:, ::64] = np.where(codes[:, ::64] < 0, -127, 127)
    scales = np.ascontiguousarray(raw[:, LATENT : LATENT + 2 * groups]).view(np.uint16) % 0x7800 + 0x0400
    tail = np.ascontiguousarray(raw[:, LATENT + 2 * groups :]).view(np.uint16) & 0xFF7F
    raw[:, LATENT : LATENT + 2 * groups], raw[:, LATENT + 2 * groups :] = scales.view(np.uint8), tail.view(np.uint8)
    values = codes.astype(np.float32) * np.repeat(scales.view(np.float16).astype(np.float32), 64, axis=1)
    return np.concatenate([values, f32_from_bf16(tail)], axis=1), raw


class Twin:
    """A session and what it must hold."""

    def __init__(self, number: int, cache: KvCache, row_format: str, rows_max: int):
        self.number, self.session, self.row_format = number, cache.open(), row_format
        self.writes = np.zeros(rows_max, np.int64)
        self.rows = 0

    def append(self, count: int) -> None:
        positions = np.arange(self.rows, self.rows + count)
        self.writes[positions] += 1
        made = [coded(self.number, layer, positions, self.writes[positions], self.row_format)[0] for layer in range(LAYERS)]
        self.session.append(np.stack(made, axis=1))
        self.rows += count

    def truncate(self, count: int) -> None:
        self.session.truncate(count)
        self.rows = count

    def check(self, group: int, positions: np.ndarray, values: bool = False) -> None:
        got = self.session.gather_bytes(group, positions).bits()
        read = self.session.gather(group, positions, dtype="f32").numpy() if values else None
        flat = positions.reshape(-1)
        for place, layer in enumerate(self.session.cache.layout.groups[group]):
            _, want = coded(self.number, layer, flat, self.writes[flat], self.row_format)
            label = f"session {self.number}, layer {layer}"
            np.testing.assert_array_equal(got[place].reshape(want.shape), want, err_msg=label)
            if read is not None:
                exact = row_values(want, LATENT, RowFormat(self.row_format)).view(np.uint32)
                np.testing.assert_array_equal(read[place].reshape(exact.shape).view(np.uint32), exact, err_msg=label)


def cache_of(row_format: str, **change: Any) -> KvCache:
    sizes: dict[str, Any] = {
        "layers": LAYERS,
        "groups": GROUPS,
        "latent": LATENT,
        "rope": ROPE[row_format],
        "row_format": row_format,
        "hot_rows": RING + 40,
        "topk_max": TOPK,
        "sessions_max": 3,
        "rows_max": 1500,
        "extent_rows": 64,
        "host_chunk_mib": 2,
    }
    return KvCache(**(sizes | change))


def draw_positions(rng: np.random.Generator, rows: int) -> np.ndarray:
    """1 to 8 query rows over old, recent or few positions, with repeats within a row and between rows."""
    shape = (int(rng.integers(1, 9)), int(rng.integers(1, TOPK + 1)))
    kind = rng.integers(3)
    low = 0 if kind == 0 else max(0, rows - 150) if kind == 1 else int(rng.integers(rows))
    high = rows if kind < 2 else min(rows, low + 5)
    return rng.integers(low, high, shape)


CASES = [
    pytest.param("host", "q8g64", {}, 1, id="host-q8g64"),
    pytest.param("host", "bf16", {"hot_rows": RING + 1}, 2, id="host-bf16-one-slot"),
    pytest.param("host", "f32", {"extent_rows": 512, "hot_rows": 700}, 3, id="host-f32-large-extents"),
    pytest.param("host", "q8g64", {"fetch": "copy"}, 4, id="host-copies"),
    pytest.param("host", "bf16", {"groups": None, "hot_rows": 2048}, 5, id="host-never-misses"),
    pytest.param("resident", "q8g64", {}, 6, id="resident-q8g64"),
    pytest.param("resident", "f32", {"extent_rows": 512}, 7, id="resident-f32"),
]


def play(cache: KvCache, row_format: str, seed: int, steps: int) -> None:
    """Random appends, rollbacks, settles and gathers of three sessions, then every row of each."""
    rng, groups = np.random.default_rng(seed), cache.layout.groups
    twins = [Twin(number, cache, row_format, cache.rows_max) for number in range(3)]
    for step in range(steps):
        twin = twins[int(rng.integers(3))]
        action = rng.choice(["step", "append", "truncate", "settle", "gather"], p=[0.4, 0.1, 0.1, 0.03, 0.37])
        room = cache.rows_max - twin.rows
        if (action in ("step", "append") and room) or twin.rows == 0:
            twin.append(min(room, int(rng.integers(1, 9 if action == "step" else 200))))
        elif action == "truncate":
            twin.truncate(max(0, twin.rows - int(rng.choice([1, 7, 70, 300]))))
        elif action == "settle":
            twin.session.settle()
            assert twin.session.committed_rows == twin.rows
        else:
            twin.check(int(rng.integers(len(groups))), draw_positions(rng, twin.rows), values=step % 3 == 0)
        cache.check()
        assert twin.session.rows == twin.rows
    for twin in twins:
        for first in range(0, twin.rows, TOPK):
            for group in range(len(groups)):
                twin.check(group, np.arange(first, min(first + TOPK, twin.rows))[None, :])


@pytest.mark.parametrize(("tier", "row_format", "change", "seed"), CASES)
def test_every_byte(tier: str, row_format: str, change: dict[str, Any], seed: int) -> None:
    with cache_of(row_format, tier=tier, **change) as cache:
        play(cache, row_format, seed, steps=250)


@on_cpu
@pytest.mark.parametrize("seed", range(1, 5))
def test_every_byte_under_schedule_seeds(seed: int) -> None:
    with cache_of("q8g64") as cache:
        runtime.control().glm53_cpu_seed(ctypes.c_uint64(seed), 1)
        try:
            play(cache, "q8g64", seed, steps=80)
        finally:
            runtime.control().glm53_cpu_seed(ctypes.c_uint64(0), 0)


def test_tiers_count_evictions_and_duplicates() -> None:
    """The scenarios above would prove little if nothing was ever missed, evicted or read from staging."""
    with cache_of("q8g64") as cache:
        twin = Twin(0, cache, "q8g64", cache.rows_max)
        twin.append(600)
        for seed in range(6):
            twin.check(0, np.random.default_rng(seed).integers(0, 600, (4, TOPK)))
        counters = twin.session.counters()
        for name in ("hits", "misses", "duplicate_misses", "evictions", "uncached", "bytes_from_host"):
            assert counters[name][0] > 0, (name, counters)


@pytest.mark.parametrize("cut", [(6,), (4, 2), (1, 3, 2), (1,) * 6], ids=str)
@pytest.mark.parametrize("by_kernel", [True, False], ids=["kernel", "copy2d"])
def test_rows_lie_in_host_memory_as_documented(by_kernel: bool, cut: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Host extents read by the host: group after group, each [extent rows, planes, row bytes], whether rows came through the ring or were streamed;
    memory behind the last row is as it was."""
    monkeypatch.setattr(HostTierConfig, "copies_by_kernel", by_kernel)
    firsts, extent_rows = np.cumsum((0, *cut)).tolist(), 128
    groups = [range(a, b) for a, b in itertools.pairwise(firsts)]
    with cache_of("q8g64", groups=groups, extent_rows=extent_rows) as cache:
        twin = Twin(1, cache, "q8g64", cache.rows_max)
        for count in (150, 8, 3, 300, 1, 8, 64, 7):  # into the hot buffer, through the ring, streamed, through the ring
            twin.append(count)
        twin.session.settle()
        tier = cache.tier
        assert isinstance(tier, HostTier)
        row_bytes = tier.layout.row_bytes
        addresses = tier.sessions[twin.session.slot].history.addresses
        assert len(addresses) > 3
        for extent, address in enumerate(addresses):
            held = tier.host.view(address, LAYERS * extent_rows * row_bytes)
            positions = np.arange(extent * extent_rows, (extent + 1) * extent_rows)
            for group in groups:
                begin, end = (plane * extent_rows * row_bytes for plane in (group[0], group[-1] + 1))
                block = held[begin:end].reshape(extent_rows, len(group), row_bytes)
                for place, layer in enumerate(group):
                    _, want = coded(1, layer, positions, twin.writes[positions], "q8g64")
                    want[positions >= twin.rows] = 0
                    np.testing.assert_array_equal(block[:, place], want, err_msg=f"extent {extent}, layer {layer}")


@pytest.mark.parametrize("wrong", ["plane", "group", "row"])
def test_the_oracle_sees_rows_at_wrong_places(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads that miss by a plane, a group or a row: every byte belongs to somebody, so only the oracle can tell."""
    right = GroupedShape.place

    def place(shape: GroupedShape, group: int) -> GroupPlace:
        found = right(shape, group)
        if wrong == "group":
            return right(shape, 1 - group)
        off = found.row_bytes if wrong == "plane" else found.stride_bytes
        return dataclasses.replace(found, offset_bytes=found.offset_bytes + off)

    monkeypatch.setattr(GroupedShape, "place", place)
    with cache_of("q8g64", groups=((0, 1, 2), (3, 4, 5))) as cache:
        twin = Twin(0, cache, "q8g64", cache.rows_max)
        for _ in range(75):
            twin.append(8)
        twin.session.settle()
        with pytest.raises(AssertionError, match="layer"):
            twin.check(0, np.arange(TOPK)[None, :] + 100)


# A launch that fails


@contextmanager
def failing_launch(nth: int) -> Iterator[None]:
    control = runtime.control()
    control.glm53_cpu_fail(b"hipModuleLaunchKernel", nth, 1)
    try:
        yield
    finally:
        control.glm53_cpu_fail(b"hipModuleLaunchKernel", 0, 0)


@on_cpu
@pytest.mark.parametrize("tier", ["host", "resident"])
def test_failed_gather_leaves_nothing_stale(tier: str) -> None:
    """The n-th launch of a gather fails, for every n (the fetch of the layers behind the first one among them); the same selection again is right,
    and so is another session."""
    with cache_of("q8g64", tier=tier) as cache:
        one, other = (Twin(number, cache, "q8g64", cache.rows_max) for number in range(2))
        one.append(500)
        other.append(300)
        failed = 0
        for nth in range(1, 20):
            positions = np.random.default_rng(nth).integers(0, 500, (3, TOPK))
            try:
                with failing_launch(nth):
                    one.session.gather_bytes(0, positions)
            except HipError as error:
                failed += 1
                assert "hipModuleLaunchKernel" in str(error)
            one.check(0, positions, values=True)
            other.check(0, positions % 300)
            cache.check()
        assert 5 <= failed < 19, f"{failed} launches failed: a gather has at least a plan and a read per layer"


@on_cpu
@pytest.mark.parametrize("count", [3, 40, 200])
def test_failed_append_appends_nothing(count: int) -> None:
    with cache_of("bf16") as cache:
        twin = Twin(0, cache, "bf16", cache.rows_max)
        twin.append(330)
        for nth in (1, 2, 4, 7):
            before = twin.writes.copy()
            try:
                with failing_launch(nth):
                    twin.append(count)
            except HipError:
                twin.writes = before
            else:
                twin.truncate(twin.rows - count)
            assert twin.session.rows == twin.rows == 330
            twin.check(1, np.random.default_rng(nth).integers(0, 330, (2, TOPK)))
            cache.check()


# Addresses


@pytest.fixture(scope="module")
def device() -> Iterator[Device]:
    device = Device(0)
    yield device
    device.close()


FAR_ROWS, FAR_COUNT = 1 << 23, 40  # rows of an extent, of which the last ones exist but for 7


def far_selection(row_bytes: int) -> tuple[int, np.ndarray]:
    """(first position that exists, [2, n] i32 positions in any order)"""
    first, rng = FAR_ROWS - FAR_COUNT - 7, np.random.default_rng(row_bytes)
    return first, np.stack([rng.permutation(FAR_COUNT) for _ in range(2)]).astype(np.int32) + np.int32(first)


def far_rows(planes: int, row_bytes: int) -> np.ndarray:
    """[planes, n, row_bytes] u8"""
    nothing = np.zeros(FAR_COUNT, np.int64)
    return np.stack([oracle_bytes(1, layer, np.arange(FAR_COUNT), nothing, row_bytes) for layer in range(planes)])


@pytest.mark.parametrize("row_bytes", [656, 2304])
def test_device_extents_beyond_two_to_the_31(row_bytes: int, device: Device) -> None:
    """One extent of 2^23 rows: positions lie up to 18 GiB, and 2^32 f32 elements, behind its base, planes further still. Bases are set back by as
    much, so that the sums must be right to the last bit to meet the memory that is there."""
    planes, n = 3, FAR_COUNT
    shape = ExtentShape(FAR_ROWS, planes, row_bytes)
    first, selected = far_selection(row_bytes)
    data = far_rows(planes, row_bytes)
    with Bench(device) as bench, device.host_alloc(data.nbytes, category="check") as host:
        host.array[:] = data.reshape(-1)
        put, stream = bench.put, bench.stream
        counts, sessions, positions = put(np.full(2, n, np.int32)), put(np.zeros(2, np.int32)), put(selected)
        for layer in range(planes):
            here = host.device_address + layer * n * row_bytes
            base = (here - first * row_bytes - layer * shape.plane_bytes) % (1 << 64)
            plan, out = bench.poison(DType.U64, (2, n)), bench.poison(DType.U8, (2, n, row_bytes))
            hotcache.plan_extent(stream, positions, counts, put(np.array([[base]], U64)), sessions, plan, shape)
            rows.copy_rows(stream, plan, None, out, offsets=(0, layer * shape.plane_bytes, 0, 0))
            np.testing.assert_array_equal(bench.read(out), data[layer][selected - first], err_msg=f"plan_extent, plane {layer}")


@pytest.mark.parametrize("row_bytes", [656, 2304])
def test_host_extents_beyond_two_to_the_31(row_bytes: int, device: Device) -> None:
    """The same of group-major extents, for the decision, the fetch of a group's planes at once, the gather of a plane and copy-back."""
    cut, n = (1, 3), FAR_COUNT
    shape = GroupedShape(FAR_ROWS, sum(cut), row_bytes, cut)
    first, selected = far_selection(row_bytes)
    data = far_rows(sum(cut), row_bytes)
    with Bench(device) as bench, device.host_alloc(data.nbytes, category="check") as host:
        put, stream = bench.put, bench.stream
        counts, sessions, positions = put(np.full(2, n, np.int32)), put(np.zeros(2, np.int32)), put(selected)
        hot, ring = bench.poison(DType.U8, (sum(cut), 256, row_bytes)), put(data)
        planes = put(np.array([(0, 1), (1, 3)], np.uint32))
        for group, layers in enumerate((range(1), range(1, 4))):
            # Rows `first` and up of this group alone lie in `host`; copy-back moves them there in one launch of one group.
            here, place = host.device_address, shape.place(group)
            base = (here - (FAR_ROWS * layers[0] + first * len(layers)) * row_bytes) % (1 << 64)
            args = {"source_plane_bytes": n * row_bytes, "first_row": first, "rows": n}
            only = GroupedShape(FAR_ROWS, len(layers), row_bytes, (len(layers),))
            rows.copy_back(stream, ring.address, base, planes.slice(group, group + 1), only, **args)
            tables = put(np.array([[base]], U64))
            plan, out = bench.poison(DType.U64, (2, n)), bench.poison(DType.U8, (2, n, row_bytes))
            states = put(hotcache.pack_states([(hot.address, False, FAR_ROWS, 1)]))
            slots = hotcache.SlotTables.make(device, 1, 1, FAR_ROWS, 64, category="check")
            fetch = hotcache.FetchList.make(device, 2, n, 1, category="check")
            slots.reset(stream, 0)
            starts = put(np.array([0, 2], np.int32))
            hotcache.hot_plan(stream, positions, counts, sessions, starts, tables, states, slots, 0, plan, fetch, place, 128)
            sizes = {"hot_plane_bytes": 256 * row_bytes, "staging_plane_bytes": 0, "row_bytes": row_bytes, "k": n}
            rows.fetch(stream, fetch, starts, planes=layers, staging=None, staging_plane_first=0, **sizes)
            for layer in layers:
                rows.copy_rows(stream, plan, None, out, offsets=(layer * 256 * row_bytes, 0, 0, 0))
                np.testing.assert_array_equal(bench.read(out), data[layer][selected - first], err_msg=f"fetch, plane {layer}")
                # The gather begins at row 0, so its extent is one that begins where these rows do.
                linear, offset = bench.poison(DType.U8, (n, row_bytes)), place.row_offset(0, layer)
                far = (base + place.row_offset(first, layer) - offset) % (1 << 64)
                lie = {"plane_offset_bytes": offset, "stride_bytes": place.stride_bytes, "extent_rows": FAR_ROWS, "row_bytes": row_bytes}
                rows.gather_plane(stream, put(np.array([far], U64)), linear, rows=n, **lie)
                np.testing.assert_array_equal(bench.read(linear), data[layer], err_msg=f"gather, plane {layer}")
            fetch.free()
            slots.free()


def test_rows_are_stored_beyond_two_to_the_31(device: Device) -> None:
    shape = ExtentShape(1 << 23, 2, 2304)
    positions = np.array([shape.extent_rows - 1, shape.extent_rows - 3, shape.extent_rows - 2], np.int32)
    x = np.random.default_rng(1).standard_normal((3, 576)).astype(np.float32)
    with Bench(device) as bench:
        memory = bench.poison(DType.U8, (3, 2304))
        offset = shape.plane_bytes
        base = (memory.address - (shape.extent_rows - 3) * 2304 - offset) % (1 << 64)
        refs = bench.poison(DType.U64, (3,))
        hotcache.place_extent(bench.stream, bench.put(np.zeros(3, np.int32)), bench.put(positions), bench.put(np.array([[base]], U64)), refs, shape)
        assert (bench.read(refs) % 16 == Space.EXTENT).all()
        rows.store_rows(bench.stream, bench.put(x), refs, offsets=(0, offset, 0, 0), row_format=RowFormat.F32, latent=512)
        want, _ = row_bits(x[[1, 2, 0]], 512, RowFormat.F32)
        np.testing.assert_array_equal(bench.read(memory), want)


def test_the_oracle_is_stored_as_it_is() -> None:
    """The codes of q8g64 survive the quantiser of the reference too."""
    positions, writes = np.arange(50), np.arange(50) % 3
    values, raw = coded(2, 1, positions, writes, "q8g64")
    stored, bad = row_bits(values, LATENT, RowFormat.Q8G64)
    assert not bad.any()
    np.testing.assert_array_equal(stored, raw)
