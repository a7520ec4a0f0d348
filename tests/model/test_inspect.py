"""`inspect_checkpoint` against counts known from elsewhere."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from glm53.config import read_config
from glm53.errors import CheckpointError
from glm53.inspect import active_parameters, history_costs, inspect_checkpoint


def test_released_model_costs(tmp_path: Path, release_config: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(release_config))
    spec = read_config(tmp_path)
    costs = history_costs(spec)
    assert (costs["bf16"].rows_bytes, costs["bf16"].index_bytes) == (89_856, 5_376)
    assert costs["q8g64"].row_bytes == 656 and costs["q8g64"].total_bytes == 656 * 78 + 5_376
    assert costs["f32"].row_bytes == 2_304
    assert active_parameters(spec) == pytest.approx(40.3e9, rel=0.01)


def test_demo_model(demo_path: Path) -> None:
    result = inspect_checkpoint(demo_path)
    assert result.tensor_count == 572
    assert result.parameters == 21_154_176  # 21.15 M in its README
    assert sum(share.nbytes for share in result.kinds.values()) == 23_455_232
    assert sum(share.parameters for share in result.kinds.values()) == result.parameters
    assert {name: share.tensors for name, share in result.formats.items()} == {"F32": 257, "F8_E4M3": 250, "BF16": 65}
    assert sum(share.parameters for share in result.formats.values()) == result.parameters
    assert result.kinds["FP8 scales"].tensors == 250
    assert result.kinds["routed experts"].parameters == 6 * 8 * 3 * 128 * 256
    assert (result.has_tokenizer, result.has_chat_template, result.packed_experts) == (True, True, False)
    assert result.history["bf16"].rows_bytes == 8 * 1152 and result.history["f32"].index_bytes == 4 * 128 * 4
    main = result.parameters - result.kinds["MTP layer"].parameters
    router = result.kinds["router"].parameters
    assert result.device_bytes["bf16"] == 2 * (main - router) + 4 * (router + 6 * 8)  # correction biases are no parameters, but are stored


@pytest.mark.parametrize(("options", "items"), [({}, {"f32": 4, "bf16": 2}), ({"packed_experts": True}, {"f32": 4, "bf16": 2})])
def test_device_bytes_of_f32_files(make_checkpoint: Callable[..., Path], options: dict[str, Any], items: dict[str, int]) -> None:
    result = inspect_checkpoint(make_checkpoint(layers=4, vocab=64, **options))
    router = result.kinds["router"].parameters
    for name, item_bytes in items.items():
        assert result.device_bytes[name] == item_bytes * (result.parameters - router) + 4 * (router + 2 * 16)
    assert result.packed_experts == bool(options)
    assert result.history["f32"].rows_bytes == 4 * 4 * (40 + 16)


def test_bf16_matrices_keep_their_size_in_an_f32_run(make_checkpoint: Callable[..., Path]) -> None:
    result = inspect_checkpoint(make_checkpoint(layers=4, vocab=64, dtype="bfloat16"))
    vectors = result.kinds["norms"].parameters
    assert result.device_bytes["f32"] == result.device_bytes["bf16"] + 2 * vectors


def test_active_parameters_of_a_small_model(make_checkpoint: Callable[..., Path]) -> None:
    result = inspect_checkpoint(make_checkpoint(layers=4, vocab=64))
    spec = result.spec
    expert = 3 * spec.expert_width * spec.hidden_size
    idle = 2 * (spec.n_routed_experts - spec.n_experts_per_tok) * expert + math.prod((spec.vocab_size - 1, spec.hidden_size))
    assert result.parameters_active == result.parameters - idle


def test_text_and_json_say_the_same(demo_path: Path) -> None:
    result = inspect_checkpoint(demo_path)
    values = json.loads(json.dumps(result.as_dict()))
    assert values["spec"]["full_layers"] == [0, 1, 2, 6] and values["spec"]["sparse_layers"] == [2, 3, 4, 5, 6, 7]
    assert values["history"]["q8g64"] == {"row_bytes": 656, "rows_bytes": 5248, "index_bytes": 1024, "total_bytes": 6272}
    text = result.table()
    facts = ("21,154,176 parameters", "37229248 B", "6,272 B: 5,248 in rows of 656, 1,024", "top 256, on layers 0, 1, 2, 6", "23521168 B")
    for fact in facts:
        assert fact in text
    assert all(kind in text for kind in values["kinds"])


def test_bad_directory(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        inspect_checkpoint(tmp_path / "nowhere")
