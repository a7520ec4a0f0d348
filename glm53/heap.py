"""The Python heap of a program that serves steps."""

from __future__ import annotations

import gc


def settle() -> None:
    """Keeps what is alive now out of later collections, for programs of our own once their engine is open.

    A full collection goes through some 120,000 objects, tens of milliseconds in which no step is launched. Cycles that are garbage later and were
    alive at this call are never freed, so a library does not do it.
    """
    gc.collect()
    gc.freeze()
