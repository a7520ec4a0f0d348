"""The hot cache's decisions against their twin under random events, in corners, and under other schedules.

Events are drawn from a seed as data; after each one every plan, fetch list, table, counter and state is compared (check/cases_hotcache.py).
"""

from __future__ import annotations

from collections import Counter as Tally
from dataclasses import dataclass, field

import numpy as np
import pytest

from glm53.check.case import Bench
from glm53.check.cases_hotcache import SOURCE, TAG_LAST, TierCheck, counters, draw_tables
from glm53.check.cases_step_select import StepTierCheck
from glm53.check.compare import Mismatch, compare
from glm53.hip import Array, Device, runtime
from glm53.mem.extents import GroupPlace
from glm53.ops import hotcache
from glm53.ops.contract import ContractError
from glm53.ops.hotcache import Counter
from glm53.spec import DType


@dataclass(frozen=True)
class Setting:
    """One random run. copy_rows: rows that move the boundary together, 64 in the product."""

    name: str
    slots: int
    k: int
    positions: int
    events: int
    ring_rows: int = 24
    copy_rows: int = 8
    sessions: int = 3
    groups: int = 2
    rows_max: int = 10
    tag: int = TAG_LAST - 2


SETTINGS = (
    Setting("barely-above-one-selection", slots=34, k=32, positions=600, events=250),
    Setting("several-selections", slots=200, k=32, positions=900, events=250),
    Setting("larger-than-the-history", slots=500, k=48, positions=400, events=150),
    Setting("fewer-than-a-selection", slots=11, k=32, positions=500, events=150),
    Setting("one-slot", slots=1, k=3, positions=80, events=60, sessions=1),
    Setting("no-locality-one-group", slots=700, k=96, positions=3000, events=120, groups=1, tag=1),
    Setting("more-slots-than-a-tile", slots=1100, k=300, positions=4096, events=120, ring_rows=64, copy_rows=64, sessions=2, rows_max=8),
)


@dataclass
class Life:
    """What the driver knows of a session."""

    rows: int  # logical rows
    wanted: list[int] = field(default_factory=list)  # last selection


class Driver:
    """Draws events that the host tier could bring about, and some it should not."""

    def __init__(self, setting: Setting, bench: Bench, seed: int, kind: type[TierCheck] = TierCheck):
        self.setting, self.rng = setting, np.random.default_rng(seed)
        s = setting
        shape = {"sessions": s.sessions, "groups": s.groups, "positions": s.positions, "slots": s.slots, "ring_rows": s.ring_rows}
        self.check = kind(bench, **shape, k=s.k, rows_max=s.rows_max, tag=s.tag)
        self.lives = [Life(int(self.rng.integers(1, s.ring_rows))) for _ in range(s.sessions)]
        self.kinds: Tally[str] = Tally()

    def below(self, count: int) -> int:
        return int(self.rng.integers(count))

    def select(self, life: Life, position: int) -> list[int]:
        """min(k, position + 1) different positions up to `position`, ascending: what was wanted before, recent rows, and chance."""
        rng, count = self.rng, min(self.setting.k, position + 1)
        if rng.random() < 0.05:
            count = self.below(count + 1)
        kept = [p for p in life.wanted if p <= position and rng.random() < 0.8]
        recent = range(max(0, position - 2 * self.setting.copy_rows), position + 1)
        pool = dict.fromkeys([*rng.permutation(kept)[: int(count * rng.random())].tolist(), *rng.permutation(recent)[: count // 3].tolist()])
        pool |= dict.fromkeys(rng.permutation(position + 1).tolist())
        return sorted(int(p) for p in list(pool)[:count])

    def step(self) -> None:
        """A round of some sessions and all groups, then its end: finished, abandoned, or planned once more before."""
        s, chosen = self.setting, [int(i) for i in self.rng.permutation(self.setting.sessions)[: 1 + self.below(self.setting.sessions)]]
        left, rounds = s.rows_max - 1, {}
        for session in chosen:
            count = min(1 + self.below(8), left, self.room(session))
            if count <= 0:
                continue
            left -= count
            rounds[session] = count
        if not rounds:
            self.move_boundary()
            return self.roll_back()
        for session, count in rounds.items():
            self.lives[session].rows += count
        for group in range(s.groups):
            planned = {session: self.selections(session, count) for session, count in rounds.items()}
            self.check.plan_round(group, planned, padding=self.below(2))
            if self.rng.random() < 0.05:
                self.kinds["planned again"] += 1
                self.check.plan_round(group, planned)
        if self.rng.random() < 0.15:
            for session, count in rounds.items():
                self.kinds["abandon"] += 1
                self.lives[session].rows -= count
                self.check.abandon(session, self.lives[session].rows + count)
        else:
            self.check.finish(rounds)

    def selections(self, session: int, count: int) -> list[list[int]]:
        life = self.lives[session]
        rows = [self.select(life, life.rows - count + t) for t in range(count)]
        life.wanted = rows[-1]
        return rows

    def room(self, session: int) -> int:
        """Rows that may be appended before the boundary has to move."""
        s, state, life = self.setting, self.check.states[session], self.lives[session]
        hot_rows = s.slots + s.ring_rows
        return min(s.positions - life.rows, (hot_rows - life.rows) if state.full else s.ring_rows - (life.rows - state.boundary))

    def move_boundary(self) -> None:
        """Leaves the full phase (the rows that lie in cache slots stay there) or moves rows from the ring to RAM."""
        for session, life in enumerate(self.lives):
            state, s = self.check.states[session], self.setting
            if state.full:
                if self.room(session) > 8 and self.rng.random() < 0.8:
                    continue
                self.kinds["no longer full"] += 1
                boundary = max(0, life.rows - s.ring_rows // 2)
                self.check.set_state(session, full=False, boundary=boundary)
                cached = min(boundary, s.slots + s.ring_rows)
                if cached > s.ring_rows:
                    self.check.seed(session, s.ring_rows, cached, 0)
            elif life.rows - state.boundary >= s.copy_rows:
                self.kinds["boundary"] += 1
                self.check.set_state(session, full=False, boundary=state.boundary + s.copy_rows)

    def roll_back(self) -> None:
        self.kinds["roll back"] += 1
        session = self.below(self.setting.sessions)
        life, state = self.lives[session], self.check.states[session]
        at_end = self.setting.positions - life.rows < self.setting.k
        life.rows -= self.below(life.rows if at_end else min(life.rows, 2 * self.setting.ring_rows) + 1)
        self.check.forget(session, life.rows, self.setting.positions)
        self.check.set_state(session, full=state.full, boundary=min(state.boundary, life.rows))

    def forget(self) -> None:
        self.kinds["forget"] += 1
        first = self.below(self.setting.positions)
        self.check.forget(self.below(self.setting.sessions), first, first + self.below(self.setting.positions - first + 1))

    def seed(self) -> None:
        self.kinds["seed"] += 1
        count = self.below(min(self.setting.slots, self.setting.positions) + 1)
        first, slot = self.below(self.setting.positions - count + 1), self.below(self.setting.slots - count + 1)
        self.check.seed(self.below(self.setting.sessions), first, first + count, slot)

    def jump(self) -> None:
        """A long prefill: many rows at once, all of them in RAM but the last few."""
        self.kinds["jump"] += 1
        session = self.below(self.setting.sessions)
        life = self.lives[session]
        life.rows += self.below((self.setting.positions - life.rows) // 2 + 1)
        self.check.set_state(session, full=False, boundary=max(0, life.rows - self.below(self.setting.copy_rows)))

    def run(self) -> list[np.ndarray]:
        events = (self.step, self.move_boundary, self.roll_back, self.forget, self.seed, self.jump)
        for _ in range(self.setting.events):
            events[int(self.rng.choice(len(events), p=(0.68, 0.2, 0.03, 0.03, 0.03, 0.03)))]()
        return self.check.read_tables()


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_random_events_leave_what_the_twin_has(device: Device, setting: Setting, seed: int) -> None:
    with Bench(device) as bench:
        driver = Driver(setting, bench, seed)
        driver.run()
        total = np.sum([counters(driver.check, s, g) for s in range(setting.sessions) for g in range(setting.groups)], axis=0)
    seen = {counter.name: int(total[counter]) for counter in Counter}
    rare = {"DUPLICATE_MISSES", "UNCACHED"} if setting.slots > 2 * setting.k else set()
    assert all(count > 0 for name, count in seen.items() if name not in rare), f"some counter never moved: {seen}"
    assert len(driver.kinds) >= 5, f"too few kinds of events came: {driver.kinds}"


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_a_decode_step_decides_as_the_twin(device: Device, setting: Setting) -> None:
    """The same events with rounds of step_topk and part GIVE: plans, lists, tables and counters of every round."""
    with Bench(device) as bench:
        driver = Driver(setting, bench, 5, StepTierCheck)
        assert isinstance(driver.check, StepTierCheck)
        try:
            driver.run()
        finally:
            driver.check.close()
        misses = sum(counters(driver.check, s, g)[Counter.MISSES] for s in range(setting.sessions) for g in range(setting.groups))
    assert misses > 0 and driver.kinds["planned again"] + driver.kinds["abandon"] > 0, f"too little happened: {driver.kinds}"


def test_no_schedule_changes_an_entry(device: Device) -> None:
    if runtime.select().name != "cpu":
        pytest.skip("schedules are the cpu runtime's to choose")
    control = runtime.control()
    setting = Setting("schedules", slots=40, k=24, positions=300, events=40)
    with Bench(device) as bench:
        expected = Driver(setting, bench, seed=9).run()
    for seed in (1, 2, 3):
        control.glm53_cpu_seed(seed, 1)
        try:
            with Bench(device) as bench:
                found = Driver(setting, bench, seed=9).run()
        finally:
            control.glm53_cpu_seed(0, 0)
        for got, want in zip(found, expected, strict=True):
            np.testing.assert_array_equal(got, want, err_msg=f"schedule {seed}")


# Corners


def tier(bench: Bench, **other: int) -> TierCheck:
    check = TierCheck(bench, **({"sessions": 2, "groups": 2, "positions": 128, "slots": 8, "ring_rows": 8, "k": 4, "rows_max": 8} | other))
    check.set_state(0, full=False, boundary=100)
    return check


def test_full_history_touches_no_table(device: Device) -> None:
    with Bench(device) as bench:
        check = tier(bench)
        check.set_state(1, full=True, boundary=0)
        check.plan_round(0, {1: [[0, 7, 8, 15], [], [15]]})
        assert counters(check, 1) == [0, 0, 5, 0, 0, 0]


def test_a_hit_of_the_last_row_survives_misses_of_the_first(device: Device) -> None:
    """Eight slots in use, the hand at position 0's: the first row misses four, the last row finds 0 and 1, so that 2 to 5 go."""
    with Bench(device) as bench:
        check = tier(bench)
        check.plan_round(0, {0: [[0, 1, 2, 3], [4, 5, 6, 7]]})
        check.finish([0])
        check.plan_round(0, {0: [[20, 21, 22, 23], [0, 1]]})
        held = bench.read(check.slots.position_of)[0, 0].tolist()
        assert held == [0, 1, 20, 21, 22, 23, 6, 7]
        assert counters(check) == [2, 12, 0, 0, 4, 0]


def test_a_fill_is_found_in_the_next_round_only(device: Device) -> None:
    with Bench(device) as bench:
        check = tier(bench)
        check.plan_round(0, {0: [[5]]})
        check.plan_round(0, {0: [[5]]})
        assert counters(check) == [0, 2, 0, 0, 0, 0]
        check.finish([0])
        check.plan_round(0, {0: [[5]]})
        assert counters(check) == [1, 2, 0, 0, 0, 0]


def test_an_abandoned_round_is_fetched_again(device: Device) -> None:
    with Bench(device) as bench:
        check = tier(bench, tag=TAG_LAST)
        check.plan_round(0, {0: [[5, 6]]})
        check.finish([0])
        check.plan_round(0, {0: [[5, 7]]})
        check.abandon(0, 100)
        check.plan_round(0, {0: [[5, 6, 7]]})
        assert counters(check) == [3, 4, 0, 0, 0, 0]


def test_abandon_drops_claims_of_a_failed_launch(device: Device) -> None:
    with Bench(device) as bench:
        check = tier(bench)
        claims = np.full((2, 2, 128), -1, np.int32)
        claims[0, :, [3, 99]] = [[-2], [-2051]]
        check.slots.slot_of.upload(claims, bench.stream)
        check.abandon(0, 100)


def test_seed_moves_positions_between_slots_of_its_own_range(device: Device) -> None:
    with Bench(device) as bench:
        check = tier(bench)
        check.seed(0, 10, 18, 0)
        check.seed(0, 12, 16, 3)  # to the right by one: overlaps what it leaves
        check.seed(0, 15, 20, 2)
        check.seed(0, 0, 0, 8)  # nothing
        check.plan_round(0, {0: [[12, 15, 16, 19]]})


def test_other_sessions_and_groups_stay_as_they_are(device: Device) -> None:
    with Bench(device) as bench:
        check = tier(bench)
        check.set_state(1, full=False, boundary=128)
        for group in (0, 1):
            check.plan_round(group, {0: [[1, 2]], 1: [[2, 3], [4]]})
        check.finish([1, 0])
        check.forget(0, 0, 128)
        check.abandon(1, 128)
        check.reset(0)


def test_a_failure_to_compare_is_seen(device: Device) -> None:
    """The comparison of the tables itself: one entry changed behind its back."""
    with Bench(device) as bench:
        check = tier(bench)
        check.twins[1][1].used[3] = 1
        with pytest.raises(Mismatch, match="used after forget"):
            check.forget(0, 0, 1)


def test_large_indices_of_sessions_and_groups(device: Device) -> None:
    """Session 2 of 3 with 2^18 positions in 21 groups: offsets of several MiB, positions in the last extent."""
    last = (1 << 18) - 1
    with Bench(device) as bench:
        check = TierCheck(bench, sessions=3, groups=21, positions=last + 1, slots=4, ring_rows=8, k=4, rows_max=2)
        check.set_state(2, full=False, boundary=last)
        check.plan_round(20, {2: [[0, last - 1, last], [last - 1]]})
        offset = np.uint64(SOURCE.offset_bytes + 62 * SOURCE.stride_bytes)
        compare("source", bench.read(check.fetch.sources)[1:2], draw_tables(3, last + 1)[2, -1:] + offset)
        assert counters(check, 2, 20) == [0, 2, 1, 1, 0, 0]


# Contracts


def test_made_tables_and_lists_are_freed(device: Device) -> None:
    tables = hotcache.SlotTables.make(device, 2, 3, 100, 10, "slot tables")
    fetch = hotcache.FetchList.make(device, 4, 8, 2, "fetch list")
    assert sum(array.nbytes for array in tables.arrays()) == 2 * 3 * (4 * 100 + 12 * 10 + 4 + 64)
    assert (fetch.sources.shape, fetch.positions.shape, fetch.counts.shape) == ((32,), (32,), (2,))
    with pytest.raises(ValueError, match="session is 2, wanted 0 to 1"):
        tables.reset(device.default_stream, 2)
    tables.free()
    fetch.free()
    assert not device.live


def test_packed_states_have_the_layout_of_the_struct() -> None:
    packed = hotcache.pack_states([(2**47, True, 5, TAG_LAST), (16, False, 0, 1)])
    assert packed.shape == (2, hotcache.STATE_BYTES) and packed.dtype == np.uint8
    assert packed[0].view(np.uint64)[0] == 2**47 and packed[0].view(np.uint32)[2:].tolist() == [1, 5, TAG_LAST, 0]
    assert hotcache.pack_states([]).shape == (0, hotcache.STATE_BYTES)
    for tag in (0, 2**32):
        with pytest.raises(ValueError, match=rf"round is {tag}"):
            hotcache.pack_states([(16, False, 0, tag)])


def test_wrappers_refuse_what_the_kernels_do_not_take(device: Device) -> None:
    with Bench(device) as bench:
        check = tier(bench)

        def array(dtype: DType, *shape: int) -> Array:
            return bench.poison(dtype, shape)

        def plan(group: int = 0, k: int = 4, starts: int = 2, ring_rows: int = 8, entries: int = 32, source: GroupPlace = SOURCE) -> None:
            fetch = hotcache.FetchList(array(DType.U64, entries), array(DType.U64, entries), array(DType.I32, entries), array(DType.I32, 1))
            hotcache.hot_plan(
                bench.stream,
                array(DType.I32, 8, k),
                array(DType.I32, 8),
                array(DType.I32, 8),
                array(DType.I32, starts),
                check.tables,
                check.device_states,
                check.slots,
                group,
                array(DType.U64, 8, k),
                fetch,
                source,
                ring_rows,
            )

        for wrong, text in (
            ({"group": 2}, "group is 2, expected 0 to 1"),
            ({"k": 5}, r"fetch.sources dim 0 is 32, expected at least rows \* k = 40"),
            ({"starts": 1}, "round_starts dim 0 is 1, expected at least 2"),
            ({"starts": 3}, "fetch.counts dim 0 is 1, expected at least rounds=2"),
            ({"ring_rows": 0}, "ring_rows is 0"),
            ({"source": GroupPlace(64, 656, 8, 656)}, "rows 656 bytes apart from 8 on"),
            ({"source": GroupPlace(64, 656, 0, 1000)}, "rows 1000 bytes apart"),
            ({"source": GroupPlace(64, 24, 0, 24)}, "row_bytes is 24"),
        ):
            with pytest.raises(ContractError, match=text):
                plan(**wrong)
        states, slots = check.device_states, check.slots
        with pytest.raises(ContractError, match=r"slots \[5, 9\), expected within \[0, 8\)"):
            hotcache.seed(bench.stream, states, slots, 0, 10, 14, 5)
        with pytest.raises(ContractError, match="session is 2, expected 0 to 1"):
            hotcache.forget(bench.stream, states, slots, 2, 0, 1)
        with pytest.raises(ContractError, match=r"positions \[0, 129\)"):
            hotcache.abandon(bench.stream, states, slots, 0, 129)
        with pytest.raises(ContractError, match="row_bytes is 24, expected a positive multiple of 16"):
            hotcache.place_linear(bench.stream, array(DType.I32, 3), array(DType.U64, 3), 24)
        with pytest.raises(ContractError, match="states dim 1 is 23, expected 24"):
            hotcache.finish_round(bench.stream, array(DType.U8, 2, 23), array(DType.I32, 1))


def test_costs_counted_by_hand() -> None:
    assert hotcache.cost_hot_plan(rows=2, k=2048, misses=10, slots_examined=1024).bytes == 2 * (24 * 2048 + 8) + 600 + 4096
