"""Histories at rest: those that ended requests left for others to begin with, and named sessions. Pure: decides, moves nothing.

An entry is open (it has a slot of the devices) or parked in host memory. Where a slot is wanted the open entry that was used least recently is
parked; where bytes are wanted the automatic one that was used least recently is dropped. Named ones are never dropped. "Recently" counts uses, not
seconds.

Invariants (`Shelf.check` proves them):
- every use has its own number, and entries are in order of their last use;
- no automatic entry begins with the tokens of another one of its owner: the longer one has taken its place.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int32]
HEAD_ROWS = 64  # fewer rows in common are not worth a fork
AUTOMATIC_MAX = 256  # automatic entries


def common(one: Tokens, other: Tokens) -> int:
    """How many of the first tokens are the same."""
    most = min(len(one), len(other))
    differ = np.flatnonzero(one[:most] != other[:most])
    return int(differ[0]) if differ.size else most


def head_of(tokens: Tokens) -> bytes:
    """What two texts have in common that share `HEAD_ROWS` tokens."""
    return tokens[:HEAD_ROWS].tobytes()


@dataclass
class Kept:
    """A history at rest. tokens: of its prompt rows, which others may begin with; rows: all that it has."""

    key: int
    owner: str
    tokens: Tokens
    rows: int
    named: bool
    open: bool
    used: int = 0
    stuck: bool = False  # it could not be parked: left alone until `unstick`
    head: bytes = field(init=False, repr=False)  # of the first tokens: those of histories that share enough are equal

    def __post_init__(self) -> None:
        self.head = head_of(self.tokens)


class Shelf:
    """The entries, by key. Keys come from the caller."""

    def __init__(self) -> None:
        self._entries: dict[int, Kept] = {}  # in order of last use
        self._uses = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: int) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[Kept]:
        """From the one used least recently on."""
        return iter(self._entries.values())

    def __getitem__(self, key: int) -> Kept:
        return self._entries[key]

    def get(self, key: int) -> Kept | None:
        """An entry, if there is one of this key."""
        return self._entries.get(key)

    @property
    def open_count(self) -> int:
        """Entries that have a slot."""
        return sum(entry.open for entry in self)

    def put(self, entry: Kept) -> list[Kept]:
        """Takes an entry in; the automatic ones that it replaces, and the oldest of too many, which are no longer here."""
        assert entry.key not in self._entries
        replaced: list[Kept] = []
        if not entry.named:
            rivals = [one for one in self._rivals(entry.owner, entry.head) if len(one.tokens) <= len(entry.tokens)]
            replaced = [one for one in rivals if common(one.tokens, entry.tokens) == len(one.tokens)]
        for one in replaced:
            del self._entries[one.key]
        automatic = [] if entry.named else [one for one in self if not one.named]
        for one in automatic[: max(0, len(automatic) + 1 - AUTOMATIC_MAX)]:
            replaced.append(self._entries.pop(one.key))
        self._entries[entry.key] = entry
        self.use(entry.key)
        return replaced

    def covers(self, owner: str, tokens: Tokens) -> bool:
        """Whether an automatic entry of the owner has all of these tokens."""
        rivals = self._rivals(owner, head_of(tokens))
        return any(len(one.tokens) >= len(tokens) and common(one.tokens, tokens) == len(tokens) for one in rivals)

    def _rivals(self, owner: str, head: bytes) -> list[Kept]:
        return [one for one in self if not one.named and one.owner == owner and one.head == head]

    def use(self, key: int) -> None:
        """The entry is the one used most recently."""
        entry = self._entries.pop(key)
        self._uses += 1
        entry.used = self._uses
        self._entries[key] = entry

    def unstick(self) -> None:
        """Entries that could not be parked may be tried again."""
        for entry in self:
            entry.stuck = False

    def take(self, key: int) -> Kept:
        """The entry leaves."""
        return self._entries.pop(key)

    def longest(self, owner: str, prompt: Tokens) -> tuple[Kept | None, int]:
        """The owner's entry with most rows in common with a prompt, at least `HEAD_ROWS`, and how many; of equals the one used last."""
        best: tuple[Kept | None, int] = (None, HEAD_ROWS - 1)
        head = head_of(prompt)
        for entry in reversed(self._entries.values()):
            if entry.owner == owner and entry.head == head and len(entry.tokens) > best[1] and (rows := common(entry.tokens, prompt)) > best[1]:
                best = entry, rows
        return best if best[0] is not None else (None, 0)

    def to_park(self, spared: int | None = None) -> Kept | None:
        """The open entry used least recently, but `spared`."""
        return next((one for one in self if one.open and not one.stuck and one.key != spared), None)

    def to_drop(self, spared: int | None = None) -> list[Kept]:
        """Automatic entries but `spared`, in the order in which they may go."""
        return [one for one in self if not one.named and one.key != spared]

    def check(self) -> None:
        """AssertionError if an invariant does not hold."""
        uses = [entry.used for entry in self]
        assert uses == sorted(set(uses)) and (not uses or uses[-1] <= self._uses), uses
        automatic = [entry for entry in self if not entry.named]
        for entry in automatic:
            assert HEAD_ROWS <= len(entry.tokens) <= entry.rows
            rivals = [one for one in automatic if one is not entry and one.owner == entry.owner and len(one.tokens) >= len(entry.tokens)]
            assert not any(common(one.tokens, entry.tokens) == len(entry.tokens) for one in rivals), f"entry {entry.key} is part of another one"
        for key, entry in self._entries.items():
            assert key == entry.key
