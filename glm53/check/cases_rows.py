"""Checks of the history rows: quantiser, fetch, strided copy, gather, and the whole way device -> host -> device. Bytes are compared exactly,
those that nothing may touch included.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from glm53.check.case import Bench, Case, draw, round_to
from glm53.check.cases_selection import SPACE_OFFSETS, place_rows
from glm53.check.compare import Comparison, Mismatch, compare, worst_of
from glm53.check.reference_rows import oracle_bytes, row_bits, row_values
from glm53.hip import Array, Device
from glm53.mem.extents import GroupedShape
from glm53.ops import rows as ops
from glm53.ops.hotcache import FetchList
from glm53.spec import DType, RowFormat, Space

U64 = np.uint64


def as_u64(value: int) -> np.uint64:
    return U64(value % (1 << 64))


# Store


def store(bench: Bench, x: np.ndarray, dtype: DType, row_format: RowFormat, latent: int, rope: int, error: Array) -> tuple[np.ndarray, np.ndarray]:
    """Stores x [rows, columns] into every other slot, shuffled over slots and spaces, row 3 skipped. Returns all slots and the slot of each
    row, -1 where it was skipped."""
    row_bytes, rows = row_format.row_bytes(latent, rope), len(x)
    rng = np.random.default_rng(rows)
    memory = bench.poison(DType.U8, (2 * rows + 1, row_bytes))
    slots = rng.permutation(2 * rows + 1)[:rows]
    spaces = rng.integers(0, len(Space), rows)
    payloads = [as_u64(memory.address + int(slot) * row_bytes - SPACE_OFFSETS[space]) for slot, space in zip(slots, spaces, strict=True)]
    refs = np.array(payloads, U64) | spaces.astype(U64)
    if rows > 3:
        refs[3], slots[3] = 0, -1
    ops.store_rows(
        bench.stream,
        bench.put(x, dtype),
        bench.put(refs),
        offsets=SPACE_OFFSETS,
        row_format=row_format,
        latent=latent,
        rope=rope,
        error=error,
    )
    return bench.read(memory), slots


def compare_rows(memory: np.ndarray, slots: np.ndarray, want: np.ndarray, bad: np.ndarray) -> Comparison:
    """Every slot: the stored rows as wanted, the others untouched; rows that cannot be stored may hold anything."""
    expected = np.full_like(memory, 0xFF)
    stored = slots >= 0
    expected[slots[stored]] = want[stored]
    undefined = slots[stored & bad]
    expected[undefined] = memory[undefined]
    return compare("rows", memory, expected)


def run_store(latent: int, rope: int, extra: int, dtype: DType, row_format: RowFormat, device: Device) -> Comparison:
    """`extra` columns after the row in x: the row stride differs from the width, and x rows of odd strides lose their alignment."""
    x = draw(latent + rope, (9, latent + rope + extra), dtype, 3.0)
    x[5] = 0
    x[6] *= np.float32(2**-20)
    with Bench(device) as bench:
        error = bench.put(np.zeros(1, np.uint32))
        memory, slots = store(bench, x, dtype, row_format, latent, rope, error)
        want, bad = row_bits(x[:, : latent + rope], latent, row_format)
        return worst_of(compare("error", bench.read(error), np.zeros(1, np.uint32)), compare_rows(memory, slots, want, bad))


def corner_groups() -> np.ndarray:
    """[groups, 64] float32: where the quantiser's roundings, limits and signs show."""
    rng = np.random.default_rng(23)
    unit = np.float32(127) * np.ones(64, np.float32)  # scale exactly 1
    ties = unit.copy()
    ties[1:64] = np.arange(63, dtype=np.float32) - np.float32(31.5)  # every half: ties to even
    largest = np.float32(65504) * np.float32(127)
    below_overflow = np.nextafter(np.float32(65520) * np.float32(127), np.float32(0))
    single = np.zeros(64, np.float32)
    single[63] = np.float32(1e6)
    groups = [np.zeros(64, np.float32), np.full(64, np.float32(-0.0)), unit, -unit, ties, -ties, single, -single]
    groups += [rng.uniform(-1, 1, 64).astype(np.float32) * top for top in (largest, below_overflow)]
    for group, top in zip(groups[-2:], (largest, below_overflow), strict=True):
        group[7] = -top
    for exponent in (-149, -140, -126, -40, -32, -31, -26, -25, -24, -23, -20, -18, -17, -15, -14, -10, 0, 10):
        top = np.float32(np.ldexp(1.0, exponent))
        for factor in (1.0, 1.25, 1.4999, 1.5, 1.75):  # amax around the f16 steps, subnormal ones too
            group = rng.uniform(-1, 1, 64).astype(np.float32) * top
            group[11] = top * np.float32(factor)
            groups.append(group)
    return np.stack(groups)


def run_quantise(groups: np.ndarray, device: Device) -> Comparison:
    """Rows of 8 groups from these, exact."""
    latent, rope = 512, 8
    padded = np.concatenate([groups, np.zeros((-len(groups) % 8, 64), np.float32)]).reshape(-1, latent)
    x = np.concatenate([padded, draw(29, (len(padded), rope))], axis=1)
    with Bench(device) as bench:
        error = bench.put(np.zeros(1, np.uint32))
        memory, slots = store(bench, x, DType.F32, RowFormat.Q8G64, latent, rope, error)
        want, bad = row_bits(x, latent, RowFormat.Q8G64)
        return worst_of(compare("error", bench.read(error), np.zeros(1, np.uint32)), compare_rows(memory, slots, want, bad))


def scale_ties() -> np.ndarray:
    """[31743, 64]: a group for every midpoint between two neighbours among the finite f16 >= 0; amax / 127 is that midpoint exactly."""
    codes = np.arange(0x7BFF, dtype=np.uint16)
    low, high = codes.view(np.float16).astype(np.float64), (codes + np.uint16(1)).view(np.float16).astype(np.float64)
    groups = np.zeros((len(codes), 64), np.float32)
    groups[:, 0] = (low + high) / 2 * 127  # 12 bits times 7 bits: exact
    groups[:, 1] = groups[:, 0] * np.float32(-0.37)
    return groups


def run_errors(dtype: DType, device: Device) -> Comparison:
    """Values that are not finite, and scales beyond f16: reported, the largest row number stays, all other rows are right."""
    latent, rope, rows = 128, 6, 12
    results = []
    kinds: list[tuple[int, float]] = [(0, np.nan), (77, np.inf), (127, -np.inf), (130, np.nan), (133, np.inf), (64, 65536.0 * 127)]
    if dtype is DType.F32:
        kinds += [(128, 3.4e38), (5, 65520.0 * 127)]  # finite, but not as bf16; the smallest magnitude whose scale rounds to infinity
    with Bench(device) as bench:
        for column, value in kinds:
            x = draw(31, (rows, latent + rope), dtype)
            for row in (2, 8, 1):
                x[row, column] = value
            error = bench.put(np.zeros(1, np.uint32))
            memory, slots = store(bench, x, dtype, RowFormat.Q8G64, latent, rope, error)
            want, bad = row_bits(x, latent, RowFormat.Q8G64)
            if list(np.flatnonzero(bad)) != [1, 2, 8]:
                raise Mismatch(f"reference: rows {np.flatnonzero(bad)} are bad, expected 1, 2 and 8")
            results.append(compare_rows(memory, slots, want, bad))
            results.append(compare(f"error of {value} in column {column}", bench.read(error), np.array([9], np.uint32)))
            store(bench, x[:3], dtype, RowFormat.Q8G64, latent, rope, error)  # rows 1 and 2 are bad: 9 stays
            results.append(compare("error later", bench.read(error), np.array([9], np.uint32)))
    return worst_of(*results)


def run_place(row_bytes: int, device: Device) -> Comparison:
    """Packed rows to references in shuffled slots and spaces, one of them skipped; all slots compared."""
    rows, rng = 7, np.random.default_rng(row_bytes)
    packed = rng.integers(0, 255, (rows, row_bytes)).astype(np.uint8)
    with Bench(device) as bench:
        memory = bench.poison(DType.U8, (2 * rows, row_bytes))
        slots, spaces = rng.permutation(2 * rows)[:rows], rng.integers(0, len(Space), rows)
        payloads = [as_u64(memory.address + int(slot) * row_bytes - SPACE_OFFSETS[space]) for slot, space in zip(slots, spaces, strict=True)]
        refs = np.array(payloads, U64) | spaces.astype(U64)
        refs[4] = 0
        ops.place_rows(bench.stream, bench.put(packed), bench.put(refs), offsets=SPACE_OFFSETS)
        want = np.full((2 * rows, row_bytes), 0xFF, np.uint8)
        want[np.delete(slots, 4)] = np.delete(packed, 4, axis=0)
        return compare("rows", bench.read(memory), want)


# Fetch


def run_fetch(row_bytes: int, counts: tuple[int, ...], planes: range, blocks: int | None, device: Device) -> Comparison:
    """Rounds of these sizes, targets half hot and half staging; hot and staging memory compared as a whole."""
    k, hot_rows, source_rows, layers = 16, 80, 90, planes.stop
    rng = np.random.default_rng(row_bytes)
    starts = np.concatenate([[0], np.cumsum([max(1, -(-count // k)) for count in counts])]).astype(np.int32)
    history = rng.integers(0, 255, (source_rows, layers, row_bytes)).astype(np.uint8)
    hot_want, staging_want = (np.full((n, hot_rows, row_bytes), 0xFF, np.uint8) for n in (layers, len(planes)))
    with Bench(device) as bench, device.host_alloc(history.nbytes, category="check") as host:
        host.array[:] = history.reshape(-1)
        hot, staging = bench.poison(DType.U8, hot_want.shape), bench.poison(DType.U8, staging_want.shape)
        sources, targets = np.full(int(starts[-1]) * k, 0xDEAD, U64), np.full(int(starts[-1]) * k, 0xDEAD, U64)
        free = {Space.HOT: list(rng.permutation(hot_rows)), Space.STAGING: list(rng.permutation(hot_rows))}
        for i, count in enumerate(counts):
            for entry in range(int(starts[i]) * k, int(starts[i]) * k + count):
                row, space = int(rng.integers(source_rows)), Space(2 * int(rng.integers(2)))
                slot = int(free[space].pop())
                sources[entry] = host.device_address + row * layers * row_bytes
                targets[entry] = slot * row_bytes + (hot.address if space is Space.HOT else 0) + space
                of = slice(planes.start, planes.stop)
                if space is Space.HOT:
                    hot_want[of, slot] = history[row, of]
                else:
                    staging_want[:, slot] = history[row, of]
        fetch = FetchList(bench.put(sources), bench.put(targets), bench.put(np.zeros(1, np.int32)), bench.put(np.array(counts, np.int32)))
        ops.fetch(
            bench.stream,
            fetch,
            bench.put(starts),
            planes=planes,
            staging=staging,
            staging_plane_first=planes.start,
            hot_plane_bytes=hot_rows * row_bytes,
            staging_plane_bytes=hot_rows * row_bytes,
            row_bytes=row_bytes,
            k=k,
            blocks=blocks,
        )
        return worst_of(compare("hot", bench.read(hot), hot_want), compare("staging", bench.read(staging), staging_want))


def run_fetch_far(device: Device) -> Comparison:
    """Plane strides beyond 2^32 bytes and backwards: the first plane fetched is plane 3, the bases lie 3 strides away."""
    row_bytes, k, rows = 656, 5, 5
    strides = ((3 << 32) + 16, -(7 << 31))  # hot, staging
    data = np.random.default_rng(2).integers(0, 255, (rows, row_bytes)).astype(np.uint8)
    with Bench(device) as bench:
        source, hot, staging = bench.put(data), bench.poison(DType.U8, data.shape), bench.poison(DType.U8, data.shape)
        at = np.arange(rows) * row_bytes
        sources = np.array([as_u64(source.address - 3 * row_bytes + int(o)) for o in at], U64)
        targets = np.array([as_u64(hot.address - 3 * strides[0] + int(o)) for o in at], U64)
        targets[3:] = at[3:].astype(U64) + U64(Space.STAGING)
        fetch = FetchList(bench.put(sources), bench.put(targets), bench.put(np.zeros(1, np.int32)), bench.put(np.array([rows], np.int32)))
        ops.fetch(
            bench.stream,
            fetch,
            bench.put(np.array([0, 1], np.int32)),
            planes=range(3, 4),
            staging=staging,
            staging_plane_first=3,
            hot_plane_bytes=strides[0],
            staging_plane_bytes=strides[1],
            row_bytes=row_bytes,
            k=k,
        )
        hot_want, staging_want = np.full_like(data, 0xFF), np.full_like(data, 0xFF)
        hot_want[:3], staging_want[3:] = data[:3], data[3:]
        return worst_of(compare("hot", bench.read(hot), hot_want), compare("staging", bench.read(staging), staging_want))


# Copy-back, strided copy and gather


def run_copy_back(groups: tuple[int, ...], extent_rows: int, first_row: int, rows: int, row_bytes: int, device: Device) -> Comparison:
    """Rows of a plane-major buffer in the middle of a group-major extent; every byte of the extent compared, and of its neighbours."""
    planes, hot_rows = sum(groups), rows + 5
    shape = GroupedShape(extent_rows, planes, row_bytes, groups)
    source = np.random.default_rng(rows).integers(0, 255, (planes, hot_rows, row_bytes)).astype(np.uint8)
    want = np.full((3, shape.extent_bytes), 0xFF, np.uint8)
    for group, count in enumerate(groups):
        first = sum(groups[:group])
        block = want[1, first * extent_rows * row_bytes :][: count * extent_rows * row_bytes].reshape(extent_rows, count, row_bytes)
        for plane in range(count):
            block[first_row : first_row + rows, plane] = source[first + plane, 2 : 2 + rows]
    with Bench(device) as bench, device.host_alloc(want.nbytes, category="check") as host:
        host.array[:] = 0xFF
        table = bench.put(np.array([(sum(groups[:group]), count) for group, count in enumerate(groups)], np.uint32))
        ops.copy_back(
            bench.stream,
            bench.put(source).address + 2 * row_bytes,
            host.device_address + shape.extent_bytes,
            table,
            shape,
            source_plane_bytes=hot_rows * row_bytes,
            first_row=first_row,
            rows=rows,
        )
        bench.stream.synchronize()
        return compare("extents", host.array.reshape(want.shape).copy(), want)


def run_copy_planes(length_bytes: int, planes: int, gap_bytes: int, device: Device) -> Comparison:
    """Device to host memory: stretches of planes that are `gap_bytes` longer than the stretch on the source side, twice that on the other."""
    rng = np.random.default_rng(length_bytes)
    source = rng.integers(0, 255, (planes, length_bytes + gap_bytes)).astype(np.uint8)
    want = np.full((planes, length_bytes + 2 * gap_bytes), 0xFF, np.uint8)
    want[:, gap_bytes : gap_bytes + length_bytes] = source[:, :length_bytes]
    with Bench(device) as bench, device.host_alloc(want.nbytes, category="check") as host:
        host.array[:] = 0xFF
        ops.copy_planes(
            bench.stream,
            bench.put(source).address,
            host.device_address + gap_bytes,
            source_plane_bytes=source.shape[1],
            target_plane_bytes=want.shape[1],
            length_bytes=length_bytes,
            planes=planes,
        )
        bench.stream.synchronize()
        return compare("planes", host.array.reshape(want.shape).copy(), want)


def run_copy_planes_far(device: Device) -> Comparison:
    """Two planes in separate allocations: a stride is the distance between them, forwards and backwards."""
    data = np.random.default_rng(4).integers(0, 255, (2, 48)).astype(np.uint8)
    with Bench(device) as bench:
        sources = [bench.put(part) for part in data]
        bench.poison(DType.U8, (1 << 20,))
        targets = [bench.poison(DType.U8, (48,)) for _ in data]
        ops.copy_planes(
            bench.stream,
            sources[1].address,
            targets[0].address,
            source_plane_bytes=sources[0].address - sources[1].address,
            target_plane_bytes=targets[1].address - targets[0].address,
            length_bytes=48,
            planes=2,
        )
        return compare("planes", np.stack([bench.read(target) for target in targets]), data[::-1])


def run_gather(rows: int, extent_rows: int, row_bytes: int, planes: int, plane_offset: int, device: Device) -> Comparison:
    """The last plane of a group, extents in shuffled order; plane_offset may be beyond 2^32 or negative: so far are the table's addresses."""
    extents, stride = -(-rows // extent_rows), planes * row_bytes
    rng = np.random.default_rng(rows)
    data = rng.integers(0, 255, (extents, extent_rows, planes, row_bytes)).astype(np.uint8)
    order = rng.permutation(extents)
    want = np.full((rows + 1, row_bytes), 0xFF, np.uint8)
    want[:rows] = data[order, :, -1].reshape(-1, row_bytes)[:rows]
    with Bench(device) as bench:
        memory, target = bench.put(data), bench.poison(DType.U8, want.shape)
        last_plane = memory.address + stride - row_bytes
        table = np.array([as_u64(last_plane + int(e) * extent_rows * stride - plane_offset) for e in order], U64)
        sizes = {"plane_offset_bytes": plane_offset, "stride_bytes": stride, "extent_rows": extent_rows, "row_bytes": row_bytes}
        ops.gather_plane(bench.stream, bench.put(table), target, rows=rows, **sizes)
        gathered = compare("target", bench.read(target), want)
        # Back, its rows from `first` on turned into others.
        first, linear = rows // 3, ~want
        ops.scatter_plane(bench.stream, bench.put(table), bench.put(linear), first=first, rows=rows - first, **sizes)
        data[order[np.arange(rows) // extent_rows][first:], np.arange(rows)[first:] % extent_rows, -1] ^= 0xFF
        return worst_of(gathered, compare("extents", bench.read(memory), data))


# Planned rows


def planned(bench: Bench, raw: np.ndarray, rows: int, plan_k: int) -> tuple[Array, np.ndarray]:
    """A plan [rows, plan_k] over rows [n, row_bytes] u8 that lie in all four spaces, and the row of each entry, -1 for references of 0."""
    rng = np.random.default_rng(len(raw))
    refs, chosen = place_rows(bench, raw), rng.integers(0, len(raw), (rows, plan_k))
    plan = refs[rng.integers(0, len(Space), chosen.shape), chosen]
    nothing = rng.random(chosen.shape) < 0.1
    plan[nothing], chosen[nothing] = 0, -1
    return bench.put(plan), chosen


def run_read(latent: int, rope: int, row_format: RowFormat, dtype: DType, rows: int, k: int, indexed: bool, device: Device) -> Comparison:
    """Values and bytes of planned rows: through an index with repeats or one to one; a reference of 0 gives zeros."""
    raw, _ = row_bits(draw(latent, (40, latent + rope), DType.BF16, 3.0), latent, row_format)
    plan_k = k + 3 if indexed else k
    index = np.random.default_rng(k).integers(0, plan_k, (rows, k)).astype(np.int32)
    with Bench(device) as bench:
        plan, chosen = planned(bench, raw, rows, plan_k)
        place = np.take_along_axis(chosen, index, axis=1) if indexed else chosen
        device_index = bench.put(index) if indexed else None
        values, data = bench.poison(dtype, (rows, k, latent + rope)), bench.poison(DType.U8, (rows, k, raw.shape[1]))
        ops.read_rows(bench.stream, plan, device_index, values, offsets=SPACE_OFFSETS, row_format=row_format, latent=latent)
        ops.copy_rows(bench.stream, plan, device_index, data, offsets=SPACE_OFFSETS)
        there = (place >= 0)[:, :, None]
        want = np.where(there, round_to(row_values(raw, latent, row_format), dtype)[place], np.float32(0))
        return worst_of(compare("values", bench.read(values), want), compare("bytes", bench.read(data), np.where(there, raw[place], np.uint8(0))))


def run_store_column(device: Device) -> Comparison:
    """Rows that are a middle part of wider rows, with and without the alignment of whole words."""
    latent, rope, results = 64, 16, []
    x = draw(5, (6, 3 * (latent + rope) + 1))
    with Bench(device) as bench:
        source = bench.put(x)
        for column in (0, latent + rope, 2 * (latent + rope) + 1):
            memory = bench.poison(DType.U8, (6, 4 * (latent + rope)))
            refs = bench.put(np.array([memory.address + r * memory.shape[1] for r in range(6)], U64))
            ops.store_rows(bench.stream, source, refs, offsets=(0, 0, 0, 0), row_format=RowFormat.F32, latent=latent, rope=rope, column=column)
            want, _ = row_bits(x[:, column : column + latent + rope], latent, RowFormat.F32)
            results.append(compare(f"column {column}", bench.read(memory), want))
    return worst_of(*results)


# The whole way


class RoundTrip:
    """Two sessions, hot buffers on the device, extents in host memory, every byte from the oracle."""

    GROUPS, PLANES, HOT_ROWS, EXTENT_ROWS, EXTENTS, BATCH = (2, 1), 3, 128, 128, 2, 64
    POSITIONS = EXTENT_ROWS * EXTENTS

    def __init__(self, bench: Bench, host: np.ndarray, host_address: int, row_bytes: int):
        self.bench, self.row_bytes = bench, row_bytes
        self.hot = [bench.poison(DType.U8, (self.PLANES, self.HOT_ROWS, row_bytes)) for _ in range(2)]
        self.rewrites = np.zeros((2, self.POSITIONS), np.int64)
        self.shape = GroupedShape(self.EXTENT_ROWS, self.PLANES, row_bytes, self.GROUPS)
        self.groups = bench.put(np.array([(self.shape.first_plane(group), planes) for group, planes in enumerate(self.GROUPS)], np.uint32))
        host[:] = 0xFF
        order = np.random.default_rng(6).permutation(2 * self.EXTENTS)
        self.tables = (host_address + order * self.shape.extent_bytes).astype(U64).reshape(2, self.EXTENTS)

    def rows(self, session: int, layer: int, positions: np.ndarray) -> np.ndarray:
        return oracle_bytes(session, layer, positions, self.rewrites[session, positions], self.row_bytes)

    def write(self, session: int, first: int) -> None:
        """A batch of rows into the ring (row p at slot p mod hot rows), then by one launch into its extent."""
        positions = np.arange(first, first + self.BATCH)
        self.rewrites[session, positions] += 1
        slot, plane_bytes = first % self.HOT_ROWS, self.HOT_ROWS * self.row_bytes
        hot = self.hot[session]
        for layer in range(self.PLANES):
            at = layer * plane_bytes + slot * self.row_bytes
            flat = Array(hot.buffer, DType.U8, (self.BATCH, self.row_bytes), hot.offset_bytes + at)
            flat.upload(self.rows(session, layer, positions))
        ops.copy_back(
            self.bench.stream,
            hot.address + slot * self.row_bytes,
            int(self.tables[session, first // self.EXTENT_ROWS]),
            self.groups,
            self.shape,
            source_plane_bytes=plane_bytes,
            first_row=first % self.EXTENT_ROWS,
            rows=self.BATCH,
        )

    def fetched(self, session: int, positions: np.ndarray) -> np.ndarray:
        """[planes, n, row_bytes]: the rows as one `fetch` a group brings them into hot slots 0 and up."""
        n, target = len(positions), self.bench.poison(DType.U8, (self.PLANES, len(positions), self.row_bytes))
        targets = U64(target.address) + np.arange(n, dtype=U64) * U64(self.row_bytes)
        put = self.bench.put
        for group, planes in enumerate(self.GROUPS):
            place, first = self.shape.place(group), self.shape.first_plane(group)
            rows = positions % self.EXTENT_ROWS * place.stride_bytes + place.offset_bytes
            sources = self.tables[session, positions // self.EXTENT_ROWS] + rows.astype(U64)
            ops.fetch(
                self.bench.stream,
                FetchList(put(sources), put(targets), put(positions.astype(np.int32)), put(np.array([n], np.int32))),
                put(np.array([0, 1], np.int32)),
                planes=range(first, first + planes),
                staging=None,
                staging_plane_first=0,
                hot_plane_bytes=n * self.row_bytes,
                staging_plane_bytes=0,
                row_bytes=self.row_bytes,
                k=n,
            )
        return self.bench.read(target)

    def gathered(self, session: int, layer: int, rows: int) -> np.ndarray:
        target = self.bench.poison(DType.U8, (rows, self.row_bytes))
        place = self.shape.place(0 if layer < self.GROUPS[0] else 1)
        ops.gather_plane(
            self.bench.stream,
            self.bench.put(self.tables[session]),
            target.address,
            plane_offset_bytes=place.row_offset(0, layer),
            stride_bytes=place.stride_bytes,
            rows=rows,
            extent_rows=self.EXTENT_ROWS,
            row_bytes=self.row_bytes,
        )
        return self.bench.read(target)


def run_round_trip(row_bytes: int, device: Device) -> Comparison:
    """Two sessions fill two extents each through rings of half that size; batches are rewritten; then every row comes back twice."""
    rng = np.random.default_rng(row_bytes)
    size = 2 * RoundTrip.EXTENTS * RoundTrip.EXTENT_ROWS * RoundTrip.PLANES * row_bytes
    results = []
    with Bench(device) as bench, device.host_alloc(size, category="check") as host:
        trip = RoundTrip(bench, host.array, host.device_address, row_bytes)
        firsts = list(range(0, RoundTrip.POSITIONS, RoundTrip.BATCH))
        for session, first in [(s, f) for f in firsts for s in (0, 1)] + [(0, firsts[1]), (1, firsts[-1]), (0, firsts[1])]:
            trip.write(session, first)
        for session in (0, 1):
            positions = rng.integers(0, RoundTrip.POSITIONS, 300)  # duplicates too
            got = trip.fetched(session, positions)
            for layer in range(RoundTrip.PLANES):
                results.append(compare(f"fetch, session {session}, layer {layer}", got[layer], trip.rows(session, layer, positions)))
                every = np.arange(RoundTrip.POSITIONS - 3)
                gathered = trip.gathered(session, layer, len(every))
                results.append(compare(f"gather, session {session}, layer {layer}", gathered, trip.rows(session, layer, every)))
    return worst_of(*results)


# Latent, rope, further columns of x. q8g64 rows are whole 16 bytes where rope + latent / 64 is a multiple of 8.
_PLAIN_SHAPES = ((512, 64, 0), (40, 16, 0), (64, 16, 8), (128, 24, 1), (8, 0, 3))
_Q8_SHAPES = ((512, 64, 0), (512, 16, 3), (64, 23, 0), (64, 63, 8), (256, 12, 1), (320, 59, 0), (1088, 23, 2))
_VARIANTS = (
    (DType.F32, RowFormat.F32, _PLAIN_SHAPES),
    (DType.BF16, RowFormat.BF16, _PLAIN_SHAPES),
    (DType.F32, RowFormat.Q8G64, _Q8_SHAPES),
    (DType.BF16, RowFormat.Q8G64, _Q8_SHAPES),
)
_ROW_BYTES = (656, 1152, 2304)
_READ_SHAPES = {
    RowFormat.F32: ((512, 64), (8, 0), (40, 16), (64, 4)),
    RowFormat.BF16: ((512, 64), (8, 0), (40, 16), (64, 8)),
    RowFormat.Q8G64: ((512, 64), (64, 23), (256, 12), (320, 59)),
}


def _case(name: str, run: Callable[[Device], Comparison]) -> Case:
    return Case("rows", name, run)


CASES = [
    *(
        _case(f"store-{dtype.label}-{row_format.value}-{latent}-{rope}-{extra}", partial(run_store, latent, rope, extra, dtype, row_format))
        for dtype, row_format, shapes in _VARIANTS
        for latent, rope, extra in shapes
    ),
    _case("store-q8g64-corners", partial(run_quantise, corner_groups())),
    _case("store-q8g64-scale-ties", lambda device: run_quantise(scale_ties(), device)),
    *(_case(f"store-q8g64-errors-{dtype.label}", partial(run_errors, dtype)) for dtype in (DType.F32, DType.BF16)),
    *(_case(f"fetch-{size}", partial(run_fetch, size, (37, 0, 16, 1), range(1, 4), None)) for size in (16, 48, *_ROW_BYTES)),
    *(_case(f"place-{size}", partial(run_place, size)) for size in (16, *_ROW_BYTES)),
    _case("fetch-one-block", partial(run_fetch, 656, (60, 5), range(2), 1)),
    _case("fetch-more-blocks-than-work", partial(run_fetch, 656, (0, 5), range(2), 7)),
    _case("fetch-nothing", partial(run_fetch, 1152, (0, 0, 0), range(1), None)),
    _case("fetch-far", run_fetch_far),
    *(_case(f"copy-planes-{size}", partial(run_copy_planes, size, 5, 32)) for size in (16, 64 * 656, 16 * 1024, 16 * 1025, 16 * 5000)),
    _case("copy-planes-one", partial(run_copy_planes, 16 * 3000, 1, 0)),
    _case("copy-planes-far", run_copy_planes_far),
    _case("gather-plane-partial", partial(run_gather, 150, 64, 656, 4, 0)),
    _case("gather-plane-whole", partial(run_gather, 192, 64, 1152, 1, 5 << 31)),
    _case("gather-plane-within-one", partial(run_gather, 3, 128, 2304, 2, -(9 << 32) - 48)),
    _case("gather-plane-many", partial(run_gather, 64 * 20 + 1, 64, 48, 3, 3 << 31)),
    _case("copy-back-batch", partial(run_copy_back, (4, 1, 3), 128, 64, 64, 656)),
    _case("copy-back-whole", partial(run_copy_back, (1, 1), 64, 0, 64, 1152)),
    _case("copy-back-one-row", partial(run_copy_back, (2,), 64, 63, 1, 2304)),
    _case("copy-back-words", partial(run_copy_back, (5, 2), 64, 7, 3, 16)),
    *(
        _case(f"read-{row_format.value}-{dtype.label}-{latent}-{rope}-{k}", partial(run_read, latent, rope, row_format, dtype, rows, k, indexed))
        for row_format, shapes in _READ_SHAPES.items()
        for dtype in (DType.F32, DType.BF16)
        for (latent, rope), (rows, k, indexed) in zip(shapes, ((3, 70, True), (1, 1, False), (2, 5, True), (5, 33, False)), strict=True)
    ),
    _case("store-column", run_store_column),
    *(_case(f"round-trip-{size}", partial(run_round_trip, size)) for size in _ROW_BYTES),
]
