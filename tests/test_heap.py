"""What is alive when a server is ready is not gone through again."""

import gc

from glm53 import heap


def test_settle() -> None:
    kept = [[index] for index in range(1000)]
    try:
        heap.settle()
        assert gc.get_freeze_count() > len(kept)
        assert not any(thing is kept for thing in gc.get_objects())
        loop: list[object] = []
        loop.append(loop)
        del loop
        assert gc.collect() >= 1, "what comes later is still collected"
    finally:
        gc.unfreeze()
