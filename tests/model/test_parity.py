"""Greedy tokens and logits against transformers 5.24.0 in f32 (`tests/golden`, format in its README; `scripts/parity` repeats it live)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from glm53 import Engine
from tests.conftest import DEMO, ROOT, load_script

GOLDEN = ROOT / "tests" / "golden"
CASES = sorted(path.stem for path in GOLDEN.glob("*.json"))
LOGIT_DIFFERENCE_MAX = 1e-3
INDEX_GAP_MIN = 1e-6  # below it two correct f32 programs may select differently: a tie, not a result


def golden(case: str) -> dict[str, Any]:
    return json.loads((GOLDEN / f"{case}.json").read_text())


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest, make_checkpoint: Callable[..., Path]) -> tuple[dict[str, Any], Path]:
    data = golden(request.param)
    path = DEMO if data["model"] else make_checkpoint(**data["checkpoint"])
    return data, path


def test_there_are_enough_cases() -> None:
    assert len(CASES) >= 8 and {"demo", "tiny-0", "real-0"} <= set(CASES)


def test_checkpoint_is_the_one_transformers_saw(case: tuple[dict[str, Any], Path]) -> None:
    data, path = case
    digest = hashlib.sha256()
    for file in sorted(path.glob("*.safetensors")):
        digest.update(file.read_bytes())
    assert digest.hexdigest() == data["provenance"]["checkpoint_sha256"]


def test_tokens_and_logits(case: tuple[dict[str, Any], Path]) -> None:
    data, path = case
    fixed_ids = data["fixed_ids"]
    with Engine.open(path, dtype="f32", prefill_chunk_rows=64, context_rows_max=2048) as engine:
        for prompt in data["prompts"]:
            gap = prompt["margins"]["index_gap"]
            assert gap is None or gap >= INDEX_GAP_MIN, f"a tie at the top-k boundary: gap {gap}"
            tokens, logits = engine.generate_logits(prompt["ids"], len(prompt["tokens"]))
            assert tokens == prompt["tokens"], f"prompt of {prompt['length']} tokens"
            top = np.take_along_axis(logits, np.array(prompt["top_ids"]), axis=1)
            difference = max(
                np.abs(top - np.array(prompt["top_logits"], np.float32)).max(),
                np.abs(logits[:, fixed_ids] - np.array(prompt["fixed_logits"], np.float32)).max(),
            )
            assert difference <= LOGIT_DIFFERENCE_MAX, f"prompt of {prompt['length']} tokens: {difference}"


@pytest.mark.parametrize("chunk_rows", [1, 7, 700])
@pytest.mark.parametrize("name", ["tiny-0", "real-0"])
def test_any_chunk_size_gives_the_same_tokens(name: str, chunk_rows: int, make_checkpoint: Callable[..., Path]) -> None:
    data = golden(name)
    prompt = next(p for p in data["prompts"] if p["length"] == (200 if chunk_rows == 1 else 700))
    with Engine.open(make_checkpoint(**data["checkpoint"]), dtype="f32", prefill_chunk_rows=chunk_rows, context_rows_max=1024) as engine:
        assert engine.generate_logits(prompt["ids"], 32)[0] == prompt["tokens"]


@pytest.mark.parametrize("real_widths", [False, True])
def test_fp8_equals_the_offline_dequantised_run(real_widths: bool, make_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """Every bit of the logits: dequantising on the device is exact. Weights in one format, since the order of additions depends on it."""
    source = make_checkpoint(fp8=True, real_widths=real_widths, seed=6)
    load_script(ROOT / "scripts" / "make_checkpoint.py").write_dequantised(source, tmp_path / "dequantised")
    ids = [(i * 29 + 7) % 512 for i in range(120)]
    found = []
    for path in (source, tmp_path / "dequantised"):
        with Engine.open(path, dtype="f32", weights="f32", context_rows_max=256) as engine:
            found.append(engine.generate_logits(ids, 8))
    assert found[0][0] == found[1][0]
    np.testing.assert_array_equal(found[0][1], found[1][1])


def test_packed_experts_and_shards_change_no_bit(make_checkpoint: Callable[..., Path]) -> None:
    ids = [(i * 29 + 7) % 512 for i in range(100)]
    found = []
    for options in ({}, {"packed_experts": True}, {"shards": 3}, {"mtp": True}):
        with Engine.open(make_checkpoint(seed=8, **options), dtype="f32", context_rows_max=256) as engine:
            found.append(engine.generate_logits(ids, 4)[1])
    for other in found[1:]:
        np.testing.assert_array_equal(found[0], other)
