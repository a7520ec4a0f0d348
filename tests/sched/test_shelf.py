"""Histories at rest and the books against naive twins under random events."""

from __future__ import annotations

import random

import numpy as np
import pytest

from glm53.sched.admission import Books, Limit, Price
from glm53.sched.shelf import AUTOMATIC_MAX, HEAD_ROWS, Kept, Shelf
from glm53.spec import Shard


def tokens_of(rng: random.Random) -> np.ndarray:
    """Few different heads, then a path in a small tree, so that many begin alike."""
    head = [rng.randrange(2)] * HEAD_ROWS
    return np.array(head + [rng.randrange(2) for _ in range(rng.randrange(7))], np.int32)


def shared(one: np.ndarray, other: np.ndarray) -> int:
    count = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        count += 1
    return count


@pytest.mark.parametrize("seed", range(20))
def test_a_shelf_is_its_naive_twin(seed: int) -> None:
    rng, shelf = random.Random(seed), Shelf()
    twin: list[Kept] = []  # in order of use
    key = 0
    for _ in range(400):
        move = rng.random()
        if move < 0.4:
            key += 1
            tokens = tokens_of(rng)
            entry = Kept(key, rng.choice("ab"), tokens, len(tokens) + rng.randrange(3), rng.random() < 0.2, rng.random() < 0.5)
            covered = shelf.covers(entry.owner, tokens)
            mine = [one for one in twin if not one.named and one.owner == entry.owner]
            assert covered == any(shared(one.tokens, tokens) == len(tokens) for one in mine)
            if covered and not entry.named:
                continue
            gone = [one for one in mine if shared(one.tokens, tokens) == len(one.tokens)] if not entry.named else []
            assert shelf.put(entry) == gone
            twin = [one for one in twin if one not in gone] + [entry]
        elif twin and move < 0.5:
            entry = rng.choice(twin)
            assert shelf.take(entry.key) is entry
            twin.remove(entry)
        elif twin and move < 0.6:
            entry = rng.choice(twin)
            shelf.use(entry.key)
            twin.remove(entry)
            twin.append(entry)
        elif move < 0.8:
            owner, prompt = rng.choice("ab"), tokens_of(rng)
            found, rows = shelf.longest(owner, prompt)
            best = max((shared(one.tokens, prompt) for one in twin if one.owner == owner), default=0)
            assert rows == (best if best >= HEAD_ROWS else 0)
            last = [one for one in twin if one.owner == owner and shared(one.tokens, prompt) == best]
            assert found is (last[-1] if rows else None)
        else:
            spared = rng.choice(twin).key if twin else None
            parked = shelf.to_park(spared)
            assert parked is next((one for one in twin if one.open and one.key != spared), None)
            assert shelf.to_drop(spared) == [one for one in twin if not one.named and one.key != spared]
            if parked is not None and rng.random() < 0.5:
                parked.open = False
        shelf.check()
        assert list(shelf) == twin and shelf.open_count == sum(one.open for one in twin)


def test_there_are_never_too_many() -> None:
    shelf = Shelf()
    gone: list[Kept] = []
    for key in range(AUTOMATIC_MAX + 10):
        gone += shelf.put(Kept(key, "", np.full(HEAD_ROWS, key, np.int32), HEAD_ROWS, key == 0, True))
    assert [one.key for one in gone] == list(range(1, 10)) and 0 in shelf, "the oldest ones but the named one"


def test_prices_add_up_and_refusals_name_them() -> None:
    prices = [
        Price("host", "history rows", False, extent_rows=64, extent_bytes=6400),
        Price("device 0", "hot cache", True, each=1000),
        Price("device 0", "index keys", True, extent_rows=64, extent_bytes=64, shard=Shard(0, 2)),
        Price("device 1", "index keys", True, extent_rows=64, extent_bytes=64, shard=Shard(1, 2)),
    ]
    books = Books(prices, [Limit("host", 64_000, "--host-kv-gib 1"), Limit("device 0", 5_000, "a share"), Limit("device 1", 10_000, "a share")])
    assert books.cost(1, True) == (6400, 1064, 0) and books.cost(129, True) == (19200, 1128, 64) and books.cost(129, False) == (19200, 0, 0)
    assert books.never(640) is None
    refusal = books.never(641)
    assert refusal is not None
    for part in ("641 rows", "70400 B", "at host", "history rows", "64000 B", "--host-kv-gib 1", "for 640 rows"):
        assert part in refusal, refusal
    assert books.rows_max() == 640 and books.rows_max(4) == 128 and books.rows_max(5) == 0 and books.rows_max(1, 100) == 100
    books.charge("a", books.cost(320, True))
    assert books.fits(books.cost(320, True)) and not books.fits(books.cost(321, True))
    assert books.fits(books.cost(640, True), books.of("a"))
    books.charge("a", books.cost(64, False))
    assert books.charged == (6400, 0, 0)
    books.check()
    books.release("a")
    books.release("a")
    assert books.charged == (0, 0, 0) and books.holders == ()
