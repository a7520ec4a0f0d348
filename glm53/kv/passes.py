"""What a tier does for one pass of the forward: where new rows go, which addresses attention reads, what moves in between.

A pass is made by a tier's `begin`, lives until `finish` (or `abandon`), and only enqueues work. The order of calls, for each layer: `before_store`,
the rows are written to `refs`, on a full layer `plan`, then `before_attention`, the attention reads through the plan, `after_attention`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from glm53.hip import Array
from glm53.mem.extents import ExtentShape, GroupedShape
from glm53.spec import Offsets, RowFormat


@dataclass(frozen=True)
class RowLayout:
    """Rows of a model's history: format, widths, layers, and which layers share a selection."""

    row_format: RowFormat
    latent: int
    rope: int
    groups: tuple[tuple[int, ...], ...]  # layers of each selection group, ascending; the first is the full layer that selects

    @property
    def row_bytes(self) -> int:
        return self.row_format.row_bytes(self.latent, self.rope)

    @property
    def planes(self) -> int:
        return sum(len(group) for group in self.groups)

    def extent_shape(self, extent_rows: int) -> ExtentShape:
        """Extents of device memory."""
        return ExtentShape(extent_rows, self.planes, self.row_bytes)

    def host_shape(self, extent_rows: int) -> GroupedShape:
        """Extents of host memory."""
        return GroupedShape(extent_rows, self.planes, self.row_bytes, tuple(len(group) for group in self.groups))

    def group_of(self, layer: int) -> int:
        """Index of the group that a layer belongs to."""
        return next(index for index, group in enumerate(self.groups) if layer in group)


@dataclass(frozen=True)
class PassRows:
    """The rows of a pass: on the host, and the same on the device. Rows of one session stand together, positions ascending."""

    positions: np.ndarray  # [rows] int32
    sessions: np.ndarray  # [rows] int32, slots of the tier
    device_positions: Array
    device_sessions: Array

    @property
    def runs(self) -> list[tuple[int, int, int]]:
        """(session, first row, last row + 1) of each session, in order."""
        bounds = [0, *(np.flatnonzero(np.diff(self.sessions)) + 1).tolist(), len(self.sessions)]
        return [(int(self.sessions[a]), a, b) for a, b in itertools.pairwise(bounds)]


class Pass(Protocol):
    """See the module's docstring for the order of calls."""

    refs: Array  # [rows] u64 references of the rows to be written

    def offsets(self, layer: int) -> Offsets:
        """What to add to a reference's payload, by space, for one layer."""

    def before_store(self, layer: int) -> None: ...

    def plan(self, layer: int, selected: Array, counts: Array, plan: Array) -> None:
        """References of the selected rows, for the group whose full layer is `layer`. selected [rows, k] i32, plan [rows, k] u64."""

    def before_attention(self, layer: int) -> None: ...

    def after_attention(self, layer: int) -> None: ...

    def finish(self) -> None:
        """All layers are enqueued: the rows now belong to their sessions. If it raises, none of them do."""

    def abandon(self) -> None:
        """The pass failed, in `finish` at the latest: its rows are dropped and nothing it brought in is ever found."""


def extent_spans(first: int, count: int, extent_rows: int) -> Iterator[tuple[int, int, int, int]]:
    """Rows [first, first + count) extent by extent: (extent, first row in it, rows, how many rows came before)."""
    done = 0
    while done < count:
        extent, row = divmod(first + done, extent_rows)
        rows = min(extent_rows - row, count - done)
        yield extent, row, rows, done
        done += rows


class Tier(Protocol):
    """Where the histories of sessions live. Slots are small numbers handed out by `open`."""

    layout: RowLayout
    rows_max: int  # rows a session may have

    def open(self) -> int: ...

    def close(self, slot: int) -> None: ...

    def rows(self, slot: int) -> int: ...

    def chunk_rows(self, slot: int, wanted: int) -> int:
        """How many of `wanted` prompt rows the next pass may hold."""

    def begin(self, rows: PassRows, prefill: bool, attend: bool = True) -> Pass:
        """A pass for these rows. attend: False if nothing is read through a plan, so that earlier rows need not be brought in."""

    def export(self, slot: int, first: int, target: np.ndarray) -> None:
        """Copies settled rows from `first` on to the host: target [planes, rows, row_bytes] u8, contiguous."""

    def adopt(self, slot: int, data: np.ndarray, rows_max: int) -> None:
        """Appends rows that come from elsewhere, data [planes, rows, row_bytes] u8, contiguous; they are settled when this returns. The history is
        settled, and will have `rows_max` rows in the end, for which there is room after the first call. If it raises, no row was added."""

    def fork(self, source: int, rows: int) -> int:
        """A new history with the first `rows` rows of another one, which share full extents; its slot. Raises with nothing opened."""

    def host_copy(self, slot: int) -> Any:
        """What `detach` needs of a settled history: its rows in host memory, where they are not there anyway. Changes nothing."""

    def detach(self, slot: int, host_copy: Any) -> Any:
        """Ends a settled history on the device and keeps it in host memory: what `attach` takes, once, or `discard`. Fails with the device alone."""

    def attach(self, parked: Any) -> int:
        """The history again, its caches cold; its slot. Raises with nothing opened, and can be tried again."""

    def discard(self, parked: Any) -> None:
        """Gives up a history that was detached."""

    def new_parked(self, rows: int) -> Any:
        """A history as `detach` gives it, empty, for up to `rows` rows. Raises with nothing taken."""

    def adopt_parked(self, parked: Any, first: int, data: np.ndarray) -> None:
        """Rows [first, ..) of a detached history, data [planes, rows, row_bytes] u8; they come in order. Raises DeviceMemoryError with none added."""

    def export_parked(self, parked: Any, first: int, target: np.ndarray) -> None:
        """As `export`, of a detached history. Uses neither device nor streams."""

    def fork_parked(self, parked: Any, rows: int) -> Any:
        """Another detached history with the first `rows` rows of one; full extents are shared. Raises with nothing taken."""

    def truncate_parked(self, parked: Any, rows: int) -> Any:
        """The detached history with its first `rows` rows alone. Takes no device memory."""

    def truncate(self, slot: int, rows: int) -> None:
        """Keeps the first `rows` rows, also where it raises."""

    def drop(self, slot: int, rows: int) -> None:
        """A call failed on the way: the session has its first `rows` rows again. Bookkeeping only, and it never fails."""

    def settle(self, slot: int) -> None:
        """Waits until every row of the session has its permanent place."""

    def check(self) -> None: ...

    def free(self) -> None: ...
