"""The three kinds of pass of the host tier: a step through the hot cache, a prompt that fits the hot buffer, a prompt that streams.

Making one touches no device; `start` enqueues what comes before the first layer. `finish` counts the rows, and if it fails they are not counted:
`abandon`, legal at any time and without a device call that can fail, gives back the events and sets the sessions' rows back (`HostTier.drop`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from glm53.hip import Array, Buffer, Event, Stream
from glm53.kv.passes import PassRows
from glm53.mem.extents import GroupPlace
from glm53.mem.pool import Life
from glm53.ops import hotcache, rows
from glm53.spec import DType, Offsets

if TYPE_CHECKING:
    from glm53.kv.host import HostTier, Session


class StepPass:
    """Rows of some sessions, each looked up in its hot cache; misses are fetched before the attention that needs them.

    The full layer's rows are fetched on the main stream; those of the layers that share its selection on a side stream meanwhile.
    """

    def __init__(self, tier: HostTier, pass_rows: PassRows):
        self.tier, self.rows = tier, pass_rows
        count = len(pass_rows.positions)
        assert count <= tier.config.step_rows_max, f"{count} rows in a step of at most {tier.config.step_rows_max}"
        self.runs = pass_rows.runs
        self.refs = tier.refs.slice(0, count)
        self.fetches = False
        self.leader = 0
        self.followers: Event | None = None
        self.round_starts = tier.round_starts.slice(0, len(self.runs) + 1)
        self.round_sessions = tier.round_sessions.slice(0, len(self.runs))
        self.before = {slot: tier.rows(slot) for slot, _, _ in self.runs}

    def start(self) -> None:
        tier = self.tier
        for slot, first, last in self.runs:
            session = tier.sessions[slot]
            if session.full and session.history.rows + last - first > tier.config.hot_rows:
                tier.leave_full(session)
            tier.make_room(session, last - first)
        self.fetches = any(not tier.sessions[slot].full for slot, _, _ in self.runs)
        self.round_starts.upload(np.array([0, *(last for _, _, last in self.runs)], np.int32), tier.stream)
        self.round_sessions.upload(np.array([slot for slot, _, _ in self.runs], np.int32), tier.stream)
        hotcache.place_hot(
            tier.stream,
            self.rows.device_sessions,
            self.rows.device_positions,
            tier.states,
            self.refs,
            tier.config.ring_rows,
            tier.layout.row_bytes,
        )

    def offsets(self, layer: int) -> Offsets:
        tier = self.tier
        staging = tier.staging.address + (layer - self.leader) * tier.staging_plane_bytes
        return (layer * tier.hot_plane_bytes, 0, staging, 0)

    def before_store(self, layer: int) -> None:
        pass

    def plan(self, layer: int, selected: Array, counts: Array, plan: Array) -> None:
        tier = self.tier
        self.leader = layer
        group = tier.layout.group_of(layer)
        hotcache.hot_plan(
            tier.stream,
            selected,
            counts,
            self.rows.device_sessions,
            self.round_starts,
            tier.tables,
            tier.states,
            tier.slot_tables,
            group,
            plan,
            tier.fetch_list,
            tier.shape.place(group),
            tier.config.ring_rows,
        )
        if not self.fetches:
            return
        layers = tier.layout.groups[group]
        if tier.config.fetch == "copy":
            gather_misses(tier, self.round_starts, [first for _, first, _ in self.runs], range(layer, layers[-1] + 1))
            return
        if len(layers) > 1:
            tier.order(tier.stream, tier.side_stream)
        self._fetch(tier.stream, range(layer, layer + 1))
        if len(layers) > 1:
            self._fetch(tier.side_stream, range(layer + 1, layers[-1] + 1))
            self.followers = tier.mark(tier.side_stream)

    def _fetch(self, stream: Stream, planes: range) -> None:
        fetch_misses(self.tier, stream, self.round_starts, planes, self.leader)

    def before_attention(self, layer: int) -> None:
        if layer != self.leader and self.followers is not None:
            self.tier.stream.wait(self.followers)
            self.followers.close()
            self.followers = None

    def after_attention(self, layer: int) -> None:
        pass

    def finish(self) -> None:
        tier = self.tier
        hotcache.finish_round(tier.stream, tier.states, self.round_sessions)
        for slot, first, last in self.runs:
            session = tier.sessions[slot]
            tier.next_round(session)
            tier.written(session, last - first)

    def abandon(self) -> None:
        for slot, row_count in self.before.items():
            self.tier.drop(slot, row_count)
        followers, self.followers = self.followers, None
        if followers is not None:
            followers.close()


def fetch_misses(tier: HostTier, stream: Stream, round_starts: Array, planes: range, leader: int) -> None:
    """Copies the rows of the tier's fetch list into slots and staging rows; `leader` is the first layer of their group."""
    rows.fetch(
        stream,
        tier.fetch_list,
        round_starts,
        planes=planes,
        staging=tier.staging,
        staging_plane_first=leader,
        hot_plane_bytes=tier.hot_plane_bytes,
        staging_plane_bytes=tier.staging_plane_bytes,
        row_bytes=tier.layout.row_bytes,
        k=tier.config.topk,
    )


def gather_misses(tier: HostTier, round_starts: Array, first_rows: Sequence[int], planes: range) -> None:
    """Where kernels cannot read host memory: the host gathers the missing rows of a whole group, one copy brings them, and the same kernel deals them
    out. first_rows: the first query row of each round. Waits for the device."""
    row_bytes = tier.layout.row_bytes
    counts = tier.fetch_list.counts.numpy(tier.stream)
    sources = tier.fetch_list.sources.numpy(tier.stream)
    starts = [first * tier.config.topk for first in first_rows]
    wanted = np.concatenate([np.arange(start, start + count) for start, count in zip(starts, counts, strict=False)])
    if not len(wanted):
        return
    stretch_bytes = len(planes) * row_bytes
    gathered = np.empty((len(wanted), stretch_bytes), np.uint8)
    for at, index in enumerate(wanted):
        gathered[at] = tier.host.view(int(sources[index]) + planes.start * row_bytes, stretch_bytes)
    bounce = tier.blocks.lend(gathered.nbytes, Life.TEMPORARY, "staging")
    try:
        Array(bounce, DType.U8, gathered.shape).upload(gathered, tier.stream)
        moved = np.zeros_like(sources)
        plane_0 = (bounce.address - planes.start * row_bytes) % (1 << 64)
        moved[wanted] = np.uint64(plane_0) + np.arange(len(wanted), dtype=np.uint64) * np.uint64(stretch_bytes)
        tier.fetch_list.sources.upload(moved, tier.stream)
        fetch_misses(tier, tier.stream, round_starts, planes, planes.start)
        tier.stream.synchronize()
    finally:
        tier.blocks.put_back(bounce)


class FullPass:
    """A prompt chunk of one session whose history still fits the hot buffer: row p is written to and read from slot p."""

    def __init__(self, tier: HostTier, session: Session, pass_rows: PassRows):
        self.tier, self.session, self.rows = tier, session, pass_rows
        self.refs = tier.refs.slice(0, len(pass_rows.positions))
        self.before = session.rows

    def start(self) -> None:
        hotcache.place_linear(self.tier.stream, self.rows.device_positions, self.refs, self.tier.layout.row_bytes)

    def offsets(self, layer: int) -> Offsets:
        return (0, 0, 0, self.session.hot.address + layer * self.tier.hot_plane_bytes)

    def before_store(self, layer: int) -> None:
        pass

    def plan(self, layer: int, selected: Array, counts: Array, plan: Array) -> None:
        hotcache.plan_linear(self.tier.stream, selected, counts, plan, self.tier.layout.row_bytes)

    def before_attention(self, layer: int) -> None:
        pass

    def after_attention(self, layer: int) -> None:
        pass

    def finish(self) -> None:
        self.tier.written(self.session, len(self.rows.positions))

    def abandon(self) -> None:
        self.tier.drop(self.session.slot, self.before)


class StreamPass:
    """A prompt chunk of one session, one layer at a time: earlier rows come from host memory into one of two linear buffers while the layer before
    is computed in the other; new rows are appended there, go to their extents, and the last ones seed the hot cache.

    Device memory is bounded by two layers of the session. Without `attend` nobody reads the earlier rows, and they stay where they are.
    """

    def __init__(self, tier: HostTier, session: Session, pass_rows: PassRows, attend: bool):
        self.tier, self.session, self.rows, self.attend = tier, session, pass_rows, attend
        count = len(pass_rows.positions)
        self.start_row = int(pass_rows.positions[0])
        self.stop = self.start_row + count
        self.refs = tier.refs.slice(0, count)
        self.buffers: list[Buffer] = []
        self.seeds: list[tuple[int, int, int]] = []
        self.ready: list[Event | None] = [None, None]  # the buffer holds its layer's earlier rows, and nothing of the layer before leaves it any more

    def start(self) -> None:
        tier, session = self.tier, self.session
        if session.full:
            tier.leave_full(session)
        tier.bring_home(session)
        while len(self.buffers) < 2:
            self.buffers.append(tier.linear_buffer(self.stop))
        hotcache.place_linear(tier.stream, self.rows.device_positions, self.refs, tier.layout.row_bytes)
        self.seeds = self._seed_pieces(self.stop - self.start_row)
        tier.order(tier.stream, tier.side_stream)
        for layer in range(min(2, tier.layout.planes)):
            self._bring(layer)

    def _seed_pieces(self, count: int) -> list[tuple[int, int, int]]:
        """(first position, last position + 1, cache slot): the last rows of the chunk, behind the slots seeded before, in at most two pieces."""
        slots = self.tier.config.slots
        first = self.stop - min(count, slots)
        pieces, slot = [], self.session.seed_slot
        while first < self.stop:
            length = min(self.stop - first, slots - slot)
            pieces.append((first, first + length, slot))
            first, slot = first + length, (slot + length) % slots
        return pieces

    def _bring(self, layer: int) -> None:
        """Enqueues the earlier rows of a layer into its buffer, on the side stream, behind what the layer before moves out of it."""
        tier = self.tier
        brings = self.attend and self.start_row > 0
        if brings and tier.config.fetch == "copy":
            self._bring_by_copies(layer)
        elif brings:
            rows.gather_plane(tier.side_stream, self._table, self.buffers[layer % 2], rows=self.start_row, **self._plane(layer))
        self.ready[layer % 2] = tier.mark(tier.side_stream)

    def _place(self, layer: int) -> GroupPlace:
        return self.tier.shape.place(self.tier.layout.group_of(layer))

    @property
    def _table(self) -> Array:
        return self.tier.tables.slice(self.session.slot, self.session.slot + 1)

    def _plane(self, layer: int) -> dict[str, int]:
        """Where a layer's rows lie in extents, as the kernels take it."""
        place = self._place(layer)
        return {
            "plane_offset_bytes": place.row_offset(0, layer),
            "stride_bytes": place.stride_bytes,
            "extent_rows": place.extent_rows,
            "row_bytes": place.row_bytes,
        }

    def _bring_by_copies(self, layer: int) -> None:
        """One strided copy an extent, where kernels cannot read host memory."""
        tier, place, buffer = self.tier, self._place(layer), self.buffers[layer % 2].address
        for first, last, home in self._pieces(layer, 0, self.start_row):
            tier.side_stream.copy_2d(buffer + first * place.row_bytes, place.row_bytes, home, place.stride_bytes, place.row_bytes, last - first)

    def _pieces(self, layer: int, first: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """(first row, last row + 1, host address of its first row) of each extent that holds rows [first, stop) of a layer."""
        place, addresses = self._place(layer), self.session.history.addresses
        while first < stop:
            index = first // place.extent_rows
            last = min(stop, (index + 1) * place.extent_rows)
            yield first, last, self.tier.host.host_address(addresses[index] + place.row_offset(first, layer))
            first = last

    def offsets(self, layer: int) -> Offsets:
        return (0, 0, 0, self.buffers[layer % 2].address)

    def before_store(self, layer: int) -> None:
        event = self.ready[layer % 2]
        if event is not None:
            self.tier.stream.wait(event)
            event.close()
            self.ready[layer % 2] = None

    def plan(self, layer: int, selected: Array, counts: Array, plan: Array) -> None:
        hotcache.plan_linear(self.tier.stream, selected, counts, plan, self.tier.layout.row_bytes)

    def before_attention(self, layer: int) -> None:
        pass

    def after_attention(self, layer: int) -> None:
        tier, buffer, row_bytes = self.tier, self.buffers[layer % 2].address, self.tier.layout.row_bytes
        for first, last, slot in self.seeds:
            target = self.session.hot.address + layer * tier.hot_plane_bytes + (tier.config.ring_rows + slot) * row_bytes
            tier.stream.copy(target, buffer + first * row_bytes, (last - first) * row_bytes)
        tier.order(tier.stream, tier.side_stream)
        if tier.config.copies_by_kernel:
            count = self.stop - self.start_row
            rows.scatter_plane(tier.side_stream, self._table, self.buffers[layer % 2], first=self.start_row, rows=count, **self._plane(layer))
        else:
            stride = self._place(layer).stride_bytes
            for first, last, home in self._pieces(layer, self.start_row, self.stop):
                tier.side_stream.copy_2d(home, stride, buffer + first * row_bytes, row_bytes, row_bytes, last - first)
        if layer + 2 < tier.layout.planes:
            self._bring(layer + 2)

    def finish(self) -> None:
        """Waits until the rows are in host memory: a large append is settled when it ends."""
        tier, session = self.tier, self.session
        tier.side_stream.synchronize()
        session.history.bypass(self.stop - self.start_row)
        for first, last, slot in self.seeds:
            hotcache.seed(tier.stream, tier.states, tier.slot_tables, session.slot, first, last, slot)
            session.seed_slot = (slot + last - first) % tier.config.slots
        tier.upload_states(session)
        self._put_back()

    def _put_back(self) -> None:
        """The next user's work is enqueued behind this pass's on the main stream, or after a drain where the pass failed."""
        while self.buffers:
            self.tier.blocks.put_back(self.buffers.pop())

    def abandon(self) -> None:
        """Seeded slots may have been overwritten without their tables: what they held is forgotten."""
        self.session.cold = True
        self.tier.drop(self.session.slot, self.start_row)
        self._put_back()
        ready, self.ready = self.ready, [None, None]
        for event in ready:
            if event is not None:
                event.close()
