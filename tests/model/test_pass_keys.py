"""The demo model answers pass keys the same from host RAM as from the device, through a hot cache smaller than its history."""

from __future__ import annotations

import re

import numpy as np

from glm53 import Engine
from tests.conftest import DEMO, ROOT, load_script

HOT_ROWS, CONTEXT = 300, 1024
NAMES = {"Morwen": "48213", "Tobias": "90367", "Lydia": "15528", "Rachel": "77104"}


def prompt(engine: Engine, asked: str) -> list[int]:
    """Some 1,024 tokens: facts spread over prose, then a question."""
    prose = (ROOT / "scripts" / "prose.txt").read_text()
    sentences = re.split(r"(?<=[.!?]) +", (prose + " " + prose).replace("\n", " "))
    question = f" What is the pass key of {asked}? It is"
    step = len(sentences) // (len(NAMES) + 1)
    for i, (name, key) in enumerate(NAMES.items()):
        sentences.insert(1 + i * step, f"The pass key of {name} is {key}.")
    ids = engine.encode(" ".join(sentences))[: CONTEXT - len(engine.encode(question))]
    return ids + engine.encode(question)


def test_answers_from_host_memory() -> None:
    demo = load_script(ROOT / "scripts" / "demo.py")
    settings = {"context_rows_max": 2048, "prefill_chunk_rows": 256}
    with (
        Engine.open(DEMO, kv_tier="host", hot_rows=HOT_ROWS, **settings) as host,
        Engine.open(DEMO, kv_tier="resident", **settings) as resident,
    ):
        for asked in ("Morwen", "Tobias"):
            ids = prompt(host, asked)
            assert len(ids) == CONTEXT
            tokens, logits = host.generate_logits(ids, demo.ANSWER_TOKENS)
            expected, expected_logits = resident.generate_logits(ids, demo.ANSWER_TOKENS)
            assert tokens == expected
            np.testing.assert_array_equal(logits, expected_logits)
            assert host.tokenizer.decode(tokens).strip().startswith(NAMES[asked])
        assert host.cache_counters()["bytes_from_host"] > 0
