"""The life of a session: its states, and which may follow which. Pure.

                       +-----------------------------------------------+
                       v                                               |
    CREATED --prefill--> PREFILLING --+                                |
       |                              |          +--decode--> DECODING +
       |                              v          |                     |
       +--restore--> RESTORING ---> READY -------+--settle--> SETTLING +--park--> PARKED --resume--> READY
                                      |          |                                  |
                                      |          +--save----> SAVING --(READY)      |
                                      |                                             |
    from any state but FAILED:  close --> CLOSED  <---------------------------------+
    from any state at work:     the device is lost --> FAILED --close--> CLOSED

A session at work (PREFILLING, DECODING, SETTLING, SAVING, RESTORING) returns to where it rested, CREATED while it has no row, also after a call that
failed: such a call has added no row. A save runs beside the other work of its session; SAVING is seen where there is none.
"""

from __future__ import annotations

import enum

from glm53.errors import LifetimeError


class SessionState(enum.Enum):
    """See the module."""

    CREATED = "created"  # no row yet
    PREFILLING = "prefilling"  # prompt rows are being computed
    DECODING = "decoding"  # tokens are being drawn, or given rows computed as steps
    READY = "ready"  # has rows, nothing is under way
    SETTLING = "settling"  # its rows are being brought to their permanent place
    SAVING = "saving"  # a file of it is being written
    RESTORING = "restoring"  # it is being read from a file
    PARKED = "parked"  # in host memory alone
    FAILED = "failed"  # its device is lost
    CLOSED = "closed"


_REST = (SessionState.CREATED, SessionState.READY)
_WORK = (SessionState.PREFILLING, SessionState.DECODING, SessionState.SETTLING, SessionState.SAVING, SessionState.RESTORING)
_FOLLOW: dict[SessionState, tuple[SessionState, ...]] = {
    SessionState.CREATED: (*_WORK, SessionState.READY, SessionState.PARKED, SessionState.CLOSED),
    SessionState.READY: (
        SessionState.CREATED,  # truncated to nothing
        SessionState.PREFILLING,
        SessionState.DECODING,
        SessionState.SETTLING,
        SessionState.SAVING,
        SessionState.PARKED,
        SessionState.CLOSED,
    ),
    **dict.fromkeys(_WORK, (*_REST, SessionState.FAILED, SessionState.CLOSED)),
    SessionState.PARKED: (*_REST, SessionState.CLOSED),
    SessionState.FAILED: (SessionState.CLOSED,),
    SessionState.CLOSED: (),
}


class Life:
    """State of one session."""

    def __init__(self) -> None:
        self.state = SessionState.CREATED

    def go(self, state: SessionState, call: str) -> None:
        """Raises LifetimeError, naming the call, where this state does not follow; the state stays then."""
        self.check(state, call)
        self.state = state

    def check(self, state: SessionState, call: str) -> None:
        """Raises LifetimeError where `go` would."""
        if state not in _FOLLOW[self.state]:
            after = {SessionState.CLOSED: "open another one", SessionState.FAILED: "close it and open the engine again"}.get(
                self.state, "wait for it"
            )
            raise LifetimeError(f"{call}: the session is {self.state.value}; next: {after}")

    def rest(self, rows: int) -> None:
        """Work has ended, the session has so many rows."""
        if self.state in _WORK or self.state in _REST or self.state is SessionState.PARKED:
            self.state = SessionState.READY if rows else SessionState.CREATED
