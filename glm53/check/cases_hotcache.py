"""Checks of row references, plans and the hot cache's decisions: the kernels beside their twins, every table compared after every event.

No row is read or written: addresses here are numbers, so that they can be as large as real ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import numpy as np

from glm53.check.case import Bench, Case
from glm53.check.compare import Comparison, compare, worst_of
from glm53.check.reference_hotcache import HotCacheTwin, StateTwin, reference_of
from glm53.hip import Array, Device
from glm53.mem.extents import ExtentShape, GroupPlace
from glm53.ops import hotcache
from glm53.spec import DType, Space

SHAPE = ExtentShape(64, 3, 656)
SOURCE = GroupPlace(64, 656, offset_bytes=(5 << 33) + 48, stride_bytes=3 * 656)
TAG_LAST = 2**32 - 1
Rows = Sequence[Sequence[int]]


def i32(values: object) -> np.ndarray:
    return np.asarray(values, np.int32)


def draw_tables(sessions: int, positions: int) -> np.ndarray:
    """[sessions, extents] u64: 16-byte aligned addresses up to 2^47."""
    rng = np.random.default_rng(sessions * 1000 + positions)
    return rng.integers(1 << 28, 1 << 43, (sessions, SHAPE.extents_for(positions)), np.uint64) * np.uint64(16)


class TierCheck:
    """Slot tables of some sessions and groups on a device, and a twin of each; every event goes to both and is compared.

    Rows are given per session; the order of the mapping is the order of the rounds.
    """

    def __init__(self, bench: Bench, *, sessions: int, groups: int, positions: int, slots: int, ring_rows: int, k: int, rows_max: int, tag: int = 1):
        self.bench, self.groups, self.positions, self.ring_rows, self.k = bench, groups, positions, ring_rows, k
        self._fetches = 0  # of the round that was planned last
        self.hot = [(1 << 45) + (s << 40) + 4096 for s in range(sessions)]
        self.states = [StateTwin(tag=tag) for _ in range(sessions)]
        self.twins = [[HotCacheTwin(state, slots, ring_rows) for _ in range(groups)] for state in self.states]
        self.addresses = draw_tables(sessions, positions)
        self.tables = bench.put(self.addresses)
        self.device_states = bench.put(self._packed())
        u32, i32_, u64 = DType.U32, DType.I32, DType.U64
        per_slot = (sessions, groups, slots)
        self.slots = hotcache.SlotTables(
            bench.poison(i32_, (sessions, groups, positions)),
            bench.poison(i32_, per_slot),
            bench.poison(u32, per_slot),
            bench.poison(u32, per_slot),
            bench.poison(u32, (sessions, groups)),
            bench.poison(u64, (sessions, groups, hotcache.COUNTERS)),
        )
        self.plan = bench.poison(u64, (rows_max, k))
        self.fetch = hotcache.FetchList(
            bench.poison(u64, (rows_max * k,)),
            bench.poison(u64, (rows_max * k,)),
            bench.poison(i32_, (rows_max * k,)),
            bench.poison(i32_, (sessions + 1,)),
        )
        self.selected = bench.poison(i32_, (rows_max, k))
        self.rows = {name: bench.poison(i32_, (rows_max,)) for name in ("counts", "sessions")}
        self.rounds = {name: bench.poison(i32_, (sessions + 2,)) for name in ("starts", "sessions")}
        for session in range(sessions):
            self.slots.reset(bench.stream, session)
        self.compare_tables("reset")

    def _packed(self) -> np.ndarray:
        return hotcache.pack_states((hot, s.full, s.boundary, s.tag) for hot, s in zip(self.hot, self.states, strict=True))

    def set_state(self, session: int, *, full: bool, boundary: int) -> None:
        """As the host tier does between rounds when the boundary moves or the history no longer fits."""
        self.states[session].full, self.states[session].boundary = full, boundary
        self.device_states.upload(self._packed(), self.bench.stream)

    def _upload(self, array: Array, values: np.ndarray) -> Array:
        view = array.view(values.shape)
        view.upload(values, self.bench.stream)
        return view

    def launch_round(self, group: int, selected: Array, counts: Array, sessions: Array, round_starts: Array, plan: Array) -> None:
        """The kernels of one round."""
        tier = (self.tables, self.device_states, self.slots, group)
        hotcache.hot_plan(self.bench.stream, selected, counts, sessions, round_starts, *tier, plan, self.fetch, SOURCE, self.ring_rows)

    def plan_round(self, group: int, rounds: Mapping[int, Rows], padding: int = 0) -> Comparison:
        """One launch: a round per session of `rounds`, then `padding` rows without entries as a round of session 0."""
        rows = [(s, list(row)) for s, session_rows in rounds.items() for row in session_rows] + [(0, [])] * padding
        starts = np.cumsum([0] + [len(r) for r in rounds.values()] + ([padding] if padding else []))
        selected = np.full((len(rows), self.k), -1, np.int32)
        for r, (_, row) in enumerate(rows):
            selected[r, : len(row)] = row
        plan = self.plan.view(selected.shape)
        lists = (self.fetch.sources, self.fetch.targets, self.fetch.positions, self.fetch.counts)
        for array in (plan, *lists):  # what the kernel leaves out, or writes too much, shows
            self.bench.stream.fill(array.address, 0xFF, array.nbytes)
        lengths, of = (
            self._upload(self.rows["counts"], i32([len(row) for _, row in rows])),
            self._upload(self.rows["sessions"], i32([s for s, _ in rows])),
        )
        self.launch_round(group, self._upload(self.selected, selected), lengths, of, self._upload(self.rounds["starts"], i32(starts)), plan)
        want_plan = np.zeros(selected.shape, np.uint64)
        want = [np.full(array.shape, -1, np.int64).astype(np.uint64 if array.dtype is DType.U64 else np.int32) for array in lists]
        for i, session in enumerate(rounds):
            first = int(starts[i])
            self._expect(group, session, rounds[session], first, want_plan[first : starts[i + 1]], [w[first * self.k :] for w in want[:3]])
            want[3][i] = self._fetches
        if padding:
            want[3][len(rounds)] = 0
        names = ("fetch sources", "fetch targets", "fetch positions", "fetch counts")
        done = [compare("plan", self.bench.read(plan), want_plan)]
        done += [compare(name, self.bench.read(array), w) for name, array, w in zip(names, lists, want, strict=True)]
        self.compare_tables("plan")
        return worst_of(*done)

    def _expect(self, group: int, session: int, rows: Rows, first: int, plan: np.ndarray, lists: list[np.ndarray]) -> None:
        """Lets the twin plan, and writes what the kernel should into `plan` and the lists from this round's first entry on."""
        twin, hot = self.twins[session][group], self.hot[session]
        planned = twin.plan([list(row) for row in rows])
        twin.check()
        for r, places in enumerate(planned.places):
            plan[r, : len(places)] = [reference_of(place, hot, SHAPE.row_bytes, first * self.k) for place in places]
        for m, (position, target) in enumerate(planned.fetches):
            extent, row = divmod(position, SHAPE.extent_rows)
            lists[0][m] = int(self.addresses[session, extent]) + SOURCE.offset_bytes + row * SOURCE.stride_bytes
            lists[1][m] = reference_of(target, hot, SHAPE.row_bytes, first * self.k)
            lists[2][m] = position
        self._fetches = len(planned.fetches)

    def finish(self, sessions: Iterable[int]) -> None:
        chosen = list(sessions)
        hotcache.finish_round(self.bench.stream, self.device_states, self._upload(self.rounds["sessions"], i32([*chosen, -1])))
        for session in chosen:
            self.states[session].finish_round()
        self.compare_tables("finish")

    def reset(self, session: int) -> None:
        self.slots.reset(self.bench.stream, session)
        slots = self.slots.used.shape[2]
        self.twins[session] = [HotCacheTwin(self.states[session], slots, self.ring_rows) for _ in range(self.groups)]
        self.compare_tables("reset")

    def forget(self, session: int, first: int, last: int) -> None:
        hotcache.forget(self.bench.stream, self.device_states, self.slots, session, first, last)
        for twin in self.twins[session]:
            twin.forget(first, last)
        self.compare_tables("forget")

    def abandon(self, session: int, last: int) -> None:
        hotcache.abandon(self.bench.stream, self.device_states, self.slots, session, last)
        for twin in self.twins[session]:
            twin.abandon()
        self.states[session].finish_round()
        self.compare_tables("abandon")

    def seed(self, session: int, first: int, last: int, slot: int) -> None:
        hotcache.seed(self.bench.stream, self.device_states, self.slots, session, first, last, slot)
        for twin in self.twins[session]:
            twin.seed(first, last, slot)
        self.compare_tables("seed")

    def read_tables(self) -> list[np.ndarray]:
        return [self.bench.read(array) for array in (*self.slots.arrays(), self.device_states)]

    def compare_tables(self, event: str) -> None:
        """Every entry of every table and state against the twins."""
        twins = [twin for session in self.twins for twin in session]
        slot_of = np.full((len(twins), self.positions), -1, np.int32)
        for row, twin in zip(slot_of, twins, strict=True):
            row[list(twin.slot_of.keys())] = list(twin.slot_of.values())
        want = [
            slot_of,
            i32([[-1 if p is None else p for p in twin.position_of] for twin in twins]),
            np.asarray([twin.used for twin in twins], np.uint32),
            np.asarray([twin.filled for twin in twins], np.uint32),
            np.asarray([twin.hand for twin in twins], np.uint32),
            np.asarray([twin.counters for twin in twins], np.uint64),
            self._packed(),
        ]
        names = ("slot_of", "position_of", "used", "filled", "hands", "counters", "states")
        for name, got, w in zip(names, self.read_tables(), want, strict=True):
            compare(f"{name} after {event}", got.reshape(w.shape), w)


def counters(check: TierCheck, session: int = 0, group: int = 0) -> list[int]:
    """hits, misses, recent hits, duplicate misses, evictions, uncached rows, as the device counted them."""
    return [int(n) for n in check.bench.read(check.slots.counters)[session, group, : len(hotcache.Counter)]]


# Row references and plans without look-up


def run_place(device: Device) -> Comparison:
    positions = i32([*range(-1, 70), 199, -1, 64, 1_048_575 % 200])
    sessions = i32([i % 3 for i in range(len(positions))])
    addresses, row_bytes, ring_rows = draw_tables(3, 200), SHAPE.row_bytes, 24
    states = [(1 << 46, True, 0, 1), ((1 << 46) + 4096, False, 50, TAG_LAST), (1 << 20, False, 0, 7)]
    want: dict[Space, list[int]] = {Space.EXTENT: [], Space.HOT: [], Space.LINEAR: []}
    for p, s in zip(positions.tolist(), sessions.tolist(), strict=True):
        hot, full = states[s][:2]
        want[Space.EXTENT].append(0 if p < 0 else int(addresses[s, p // 64]) + p % 64 * row_bytes | Space.EXTENT)
        want[Space.HOT].append(0 if p < 0 else hot + (p if full else p % ring_rows) * row_bytes)
        want[Space.LINEAR].append(0 if p < 0 else p * row_bytes | Space.LINEAR)
    with Bench(device) as bench:
        at, of = bench.put(positions), bench.put(sessions)
        refs = {space: bench.poison(DType.U64, (len(positions),)) for space in want}
        hotcache.place_extent(bench.stream, of, at, bench.put(addresses), refs[Space.EXTENT], SHAPE)
        hotcache.place_hot(bench.stream, of, at, bench.put(hotcache.pack_states(states)), refs[Space.HOT], ring_rows, row_bytes)
        hotcache.place_linear(bench.stream, at, refs[Space.LINEAR], row_bytes)
        return worst_of(*(compare(space.name, bench.read(refs[space]), np.asarray(want[space], np.uint64)) for space in want))


def run_plans(device: Device) -> Comparison:
    rng, k, row_bytes = np.random.default_rng(5), 300, SHAPE.row_bytes
    contexts, sessions, counts = (700, 65, 128), i32([0, 1, 2, 0, 1]), i32([300, 65, 128, 0, 1])
    selected = np.full((5, k), -1, np.int32)
    for r, count in enumerate(counts):
        selected[r, :count] = np.sort(rng.permutation(contexts[sessions[r]])[:count])
    selected[4, 0] = 64  # the first row of a second extent
    addresses = draw_tables(3, max(contexts))
    extent, linear = np.zeros((5, k), np.uint64), np.zeros((5, k), np.uint64)
    for r, count in enumerate(counts):
        p = selected[r, :count]
        extent[r, :count] = addresses[sessions[r], p // 64] + (p % 64 * row_bytes + Space.EXTENT).astype(np.uint64)
        linear[r, :count] = (p.astype(np.int64) * row_bytes + Space.LINEAR).astype(np.uint64)
    with Bench(device) as bench:
        plans = [bench.poison(DType.U64, (5, k)) for _ in range(2)]
        chosen, lengths = bench.put(selected), bench.put(counts)
        hotcache.plan_extent(bench.stream, chosen, lengths, bench.put(addresses), bench.put(sessions), plans[0], SHAPE)
        hotcache.plan_linear(bench.stream, chosen, lengths, plans[1], row_bytes)
        return worst_of(compare("extent", bench.read(plans[0]), extent), compare("linear", bench.read(plans[1]), linear))


# Hot cache: scenarios whose counters are known beforehand


def run_rules(device: Device) -> Comparison:
    """The rules one after the other on six slots: miss, unfindable fill, hit, pin before eviction, duplicate, eviction, overflow."""
    with Bench(device) as bench:
        check = TierCheck(bench, sessions=2, groups=2, positions=128, slots=6, ring_rows=8, k=8, rows_max=4, tag=TAG_LAST - 2)
        check.plan_round(1, {0: [[0, 5, 100]]})  # the history fits: slots by position
        check.finish([0])
        check.set_state(0, full=False, boundary=96)
        check.plan_round(1, {0: [[1, 2, 100], [2, 3, 101]]})  # three misses, one of them wanted twice, two rows of the ring
        compare("counters", i32(counters(check, 0, 1)), i32([0, 3, 5, 1, 0, 0]))
        check.finish([0])
        check.plan_round(1, {0: [[3, 10, 11, 12], [1, 2]]})  # three free slots, three hits: every slot is in use
        check.finish([0])  # the tag wraps
        check.plan_round(1, {0: [[20], [1]]})  # the hand points at the slot of 1, which is pinned before: 2 goes
        compare("counters", i32(counters(check, 0, 1)), i32([4, 7, 5, 1, 1, 0]))
        check.finish([0])
        result = check.plan_round(1, {0: [list(range(30, 38)), [30, 37, 1], [1, 38]]}, padding=1)  # 1 is pinned: 9 misses, 5 slots
        compare("counters", i32(counters(check, 0, 1)), i32([6, 12, 5, 3, 6, 4]))
        return result


def run_wide(k: int, rows: int, slots: int, device: Device) -> Comparison:
    """Selections beyond a tile of entries and of slots: all missed, all found, then half of them moved on."""
    with Bench(device) as bench:
        check = TierCheck(bench, sessions=1, groups=1, positions=8 * k + 8, slots=slots, ring_rows=64, k=k, rows_max=rows, tag=1)
        check.set_state(0, full=False, boundary=8 * k)
        for shift in (0, 0, k // 2):
            selected = [[3 * i + shift + r for i in range(k - r)] for r in range(rows)]
            result = check.plan_round(0, {0: selected})
            check.finish([0])
        return result


def _case(name: str, run: Callable[[Device], Comparison], thorough: bool = False) -> Case:
    return Case("hotcache", name, run, thorough)


CASES = [
    _case("place", run_place),
    _case("plans", run_plans),
    _case("rules", run_rules),
    _case("wide-k300", partial(run_wide, 300, 3, 2000)),
    _case("wide-k1025-overflow", partial(run_wide, 1025, 2, 1030)),
    _case("wide-k1025-one-row-overflow", partial(run_wide, 1025, 1, 700)),
    _case("wide-k2500-one-row", partial(run_wide, 2500, 1, 2300)),
    _case("wide-k2048-8-rows", partial(run_wide, 2048, 8, 32_768 - 192), thorough=True),
]
