"""What q8q4 weights cost the demo model: logits of prose against those with bf16 weights, and a pass key found through the selection."""

from __future__ import annotations

import numpy as np
import pytest

from glm53 import Engine
from tests.conftest import DEMO, ROOT, load_script

# Measured: 1.3 and 0.92 over 256 rows, docs/decisions/0005-weight-formats.md.
MEDIAN_MAX, AGREEMENT_MIN = 2.0, 0.8
PROSE_ROWS, FORCED = 96, 48


def forced_logits(engine: Engine, ids: list[int], count: int) -> np.ndarray:
    """[count, vocab]: after each of the last `count` prefixes of ids, all rows of the prefill class."""
    with engine.session() as session:
        first = len(ids) - count + 1
        rows = [session.prefill(ids[:first])]
        return np.stack(rows + [session.prefill(ids[i : i + 1]) for i in range(first, len(ids))])


@pytest.fixture(scope="module")
def found() -> dict[str, tuple[np.ndarray, list[int], list[int]]]:
    """By setting: logits of prose, the tokens that answer the question when the right ones are fed, and the right ones."""
    demo = load_script(ROOT / "scripts" / "demo.py")
    prose, results = (ROOT / "scripts" / "prose.txt").read_text(encoding="utf-8"), {}
    for setting in ("bf16", "q8q4"):
        with Engine.open(DEMO, weights=setting, context_rows_max=1024, kv_tier="resident") as engine:
            logits = forced_logits(engine, engine.encode(prose)[:PROSE_ROWS], FORCED)
            key = engine.encode(" " + demo.KEYS[demo.ASKED])
            answer = forced_logits(engine, engine.encode(demo.pass_key_prompt(prose)) + key[:-1], len(key))
            results[setting] = logits, [int(row.argmax()) for row in answer], key
    return results


def test_logits_stay_close(found: dict[str, tuple[np.ndarray, list[int], list[int]]]) -> None:
    plain, quantised = found["bf16"][0], found["q8q4"][0]
    median = float(np.median(np.abs(plain - quantised).max(axis=1)))
    agreement = float((plain.argmax(axis=1) == quantised.argmax(axis=1)).mean())
    print(f"\nq8q4 against bf16 weights: median row maximum {median:.3f}, argmax agreement {agreement:.3f}")
    assert 0.1 < median <= MEDIAN_MAX, "close to 0 would mean that nothing was quantised"
    assert agreement >= AGREEMENT_MIN


@pytest.mark.parametrize("setting", ["bf16", "q8q4"])
def test_pass_key_is_found(found: dict[str, tuple[np.ndarray, list[int], list[int]]], setting: str) -> None:
    _, answer, key = found[setting]
    assert answer == key
