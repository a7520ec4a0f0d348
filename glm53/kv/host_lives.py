"""Histories of the host tier that share extents, and histories without a device: fork, detach, attach; rows to and from host memory.

A detached history is its extents in host RAM and nothing else; its hot buffer, tables and slot are other sessions'. Both a fork and a history that is
attached again begin with a cold cache and an empty ring, every row being read from its extent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from glm53.errors import DeviceLost, HipError
from glm53.kv.passes import extent_spans
from glm53.mem.history import ExtentCopy, History, OutOfExtents

if TYPE_CHECKING:
    from glm53.kv.host import HostTier, Session

T = TypeVar("T")


def taking(tier: HostTier, call: Callable[[], T]) -> T:
    """A call that takes extents; where there are too few, after more of host memory is page-locked."""
    try:
        return call()
    except OutOfExtents as short:
        tier.host.add(short.missing)
        return call()


def own_tail(tier: HostTier, session: Session) -> None:
    """Before rows are written: a partial extent that others share is replaced by a copy."""
    copy = taking(tier, session.history.private_tail)
    if copy is not None:
        _copy(tier, copy)


def _copy(tier: HostTier, copy: ExtentCopy) -> None:
    """By the host; the rows are settled, and nobody reads the target yet."""
    views = [tier.shape.views(tier.host.view(tier.pool.address(extent), tier.shape.extent_bytes)) for extent in (copy.source, copy.target)]
    for source, target in zip(*views, strict=True):
        target[: copy.rows] = source[: copy.rows]


def fork(tier: HostTier, source: int, rows: int) -> int:
    """See `Tier.fork`."""
    tier.settle(source)
    slot = tier.open()
    try:
        if rows:
            made = taking(tier, lambda: tier.sessions[source].history.fork(rows, tier.config.ring_rows))
            _put(tier, slot, made.history)
            if made.copy is not None:
                _copy(tier, made.copy)
            _tell(tier, slot)
    except BaseException:
        tier.close(slot)
        raise
    return slot


def detach(tier: HostTier, slot: int) -> History:
    """See `Tier.detach`."""
    session = tier.sessions[slot]
    assert session.history.committed_rows == session.rows, f"detach with {session.history.committed_rows} of {session.rows} rows committed"
    history, session.history = session.history, History(tier.pool, tier.config.hot_rows)
    tier.parked.append(history)
    try:
        tier.close(slot)
    except DeviceLost:
        raise
    except HipError:
        pass  # the session has ended, and the device has been waited for
    return history


def attach(tier: HostTier, history: History) -> int:
    """See `Tier.attach`."""
    slot = tier.open()
    try:
        if history.rows:
            history.move(tier.config.ring_rows)
            _put(tier, slot, history)
            _tell(tier, slot)
    except BaseException:
        tier.sessions[slot].history = History(tier.pool, tier.config.hot_rows)  # the other one stays detached
        tier.close(slot)
        raise
    tier.parked.remove(history)
    return slot


def discard(tier: HostTier, history: History) -> None:
    """See `Tier.discard`."""
    tier.parked.remove(history)
    history.close()


def new_parked(tier: HostTier) -> History:
    """See `Tier.new_parked`."""
    history = History(tier.pool, tier.config.ring_rows)
    tier.parked.append(history)
    return history


def fork_parked(tier: HostTier, history: History, rows: int) -> History:
    """See `Tier.fork_parked`."""
    made = taking(tier, lambda: history.fork(rows))
    if made.copy is not None:
        _copy(tier, made.copy)
    tier.parked.append(made.history)
    return made.history


def make_room(tier: HostTier, history: History, rows: int) -> None:
    """Page-locks what a history of `rows` rows needs beyond what is free, chunk by chunk, several at a time."""
    missing = tier.shape.extents_for(rows) - history.reserved_rows // tier.shape.extent_rows - tier.pool.free
    if missing > 0:
        tier.host.prepare(missing * tier.shape.extent_bytes, None)


def write(tier: HostTier, history: History, data: np.ndarray) -> None:
    """Appends rows [planes, rows, row_bytes] u8 to a settled history, in reserved room that is its own."""
    for extent, row, count, done in extent_spans(history.rows, data.shape[1], tier.shape.extent_rows):
        for planes, view in _planes(tier, history.addresses[extent]):
            view[:, row : row + count] = data[planes, done : done + count]
    history.bypass(data.shape[1])


def export(tier: HostTier, history: History, first: int, target: np.ndarray) -> None:
    """Committed rows from `first` on into target [planes, rows, row_bytes] u8. Uses neither device nor streams."""
    rows = target.shape[1]
    assert first + rows <= history.committed_rows, f"export to row {first + rows}, {history.committed_rows} are committed"
    for extent, row, count, done in extent_spans(first, rows, tier.shape.extent_rows):
        for planes, view in _planes(tier, history.addresses[extent]):
            target[planes, done : done + count] = view[:, row : row + count]


def _planes(tier: HostTier, address: int) -> Iterator[tuple[slice, np.ndarray]]:
    """The bytes of an extent by selection group: (planes, [planes, extent_rows, row_bytes] u8 view)."""
    for group, view in enumerate(tier.shape.views(tier.host.view(address, tier.shape.extent_bytes))):
        first = tier.shape.first_plane(group)
        yield slice(first, first + view.shape[1]), view.swapaxes(0, 1)


def _put(tier: HostTier, slot: int, history: History) -> None:
    session = tier.sessions[slot]
    session.history.close()
    session.history, session.full = history, False


def _tell(tier: HostTier, slot: int) -> None:
    session = tier.sessions[slot]
    tier.upload_table(session)
    tier.upload_states(session)
