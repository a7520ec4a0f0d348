"""Histories of the host tier that share extents, and histories without a device: fork, detach, attach.

A detached history is its extents in host RAM and nothing else; its hot buffer, tables and slot are other sessions'. Both a fork and a history that is
attached again begin with a cold cache and an empty ring, every row being read from its extent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from glm53.errors import DeviceLost, HipError
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


def own_tail(tier: HostTier, session: Session) -> bool:
    """Before rows are written: a partial extent that others share is replaced by a copy. True if the session's table is out of date."""
    copy = taking(tier, session.history.private_tail)
    if copy is not None:
        _copy(tier, copy)
    return copy is not None


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


def _put(tier: HostTier, slot: int, history: History) -> None:
    session = tier.sessions[slot]
    session.history.close()
    session.history, session.full = history, False


def _tell(tier: HostTier, slot: int) -> None:
    session = tier.sessions[slot]
    tier.upload_table(session)
    tier.upload_states(session)
