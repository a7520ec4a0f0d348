"""config.json by the rules of transformers 5.24.0, and every way in which a file is refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from glm53.config import EngineConfig, GenerationDefaults, read_config, read_generation_config
from glm53.errors import CheckpointError, InputError
from glm53.spec import ModelSpec

Config = dict[str, Any]
FULL = (0, 1, 2, 6, 10, 14, 18, 22, 26, 30, 34, 38, 42, 46, 50, 54, 58, 62, 66, 70, 74)
REMOVED = object()


def read(tmp_path: Path, config: Config, **changes: Any) -> ModelSpec:
    values = {key: value for key, value in (config | changes).items() if value is not REMOVED}
    (tmp_path / "config.json").write_text(json.dumps(values))
    return read_config(tmp_path)


def test_released_file(tmp_path: Path, release_config: Config) -> None:
    spec = read(tmp_path, release_config)
    assert spec.full_layers == FULL
    assert spec.layer_is_sparse == (False,) * 3 + (True,) * 75
    assert (spec.row_width, spec.qk_head_dim, spec.softmax_scale, spec.rope_theta) == (576, 256, 1 / 16, 8e6)
    assert (spec.latent_norm_eps, spec.rms_norm_eps) == (1e-6, 1e-5)
    assert spec.eos_token_ids == (154820, 154827, 154829)
    assert read_config(tmp_path / "config.json", latent_norm_eps=1e-5).latent_norm_eps == 1e-5


def test_three_ways_to_say_the_schedule_agree(tmp_path: Path, release_config: Config) -> None:
    letters = "".join("F" if i in FULL else "S" for i in range(78))
    words = ["full" if i in FULL else "shared" for i in range(78)]
    for pattern in (letters, list(letters), words, None):
        assert read(tmp_path, release_config, indexer_types=REMOVED, index_topk_pattern=pattern).full_layers == FULL


def test_indexer_types_wins_over_the_pattern(tmp_path: Path, release_config: Config) -> None:
    assert read(tmp_path, release_config, index_topk_pattern="F" * 78).full_layers == FULL


def test_schedule_absent_means_every_layer_is_full(tmp_path: Path, release_config: Config) -> None:
    bare = {"indexer_types": REMOVED, "index_topk_pattern": REMOVED, "index_topk_freq": REMOVED, "index_skip_topk_offset": REMOVED}
    assert read(tmp_path, release_config, **bare).full_layers == tuple(range(78))


@pytest.mark.parametrize(("frequency", "offset", "full"), [(4, None, (0, 1, 5, 9)), (3, 0, (2, 5, 8)), (0, 5, tuple(range(10)))])
def test_frequency_and_offset(tmp_path: Path, release_config: Config, frequency: int, offset: int | None, full: tuple[int, ...]) -> None:
    small = {"num_hidden_layers": 10, "layer_types": REMOVED, "mlp_layer_types": REMOVED, "indexer_types": REMOVED}
    changes = small | {"index_topk_freq": frequency, "index_skip_topk_offset": offset}
    if 0 not in full:
        with pytest.raises(CheckpointError, match="layer 0 is full"):
            read(tmp_path, release_config, **changes)
    else:
        assert read(tmp_path, release_config, **changes).full_layers == full


def test_accepted_spellings(tmp_path: Path, release_config: Config) -> None:
    spec = read(tmp_path, release_config)
    assert read(tmp_path, release_config, head_dim=64) == spec  # ignored
    assert read(tmp_path, release_config, n_routed_experts=REMOVED, num_experts=256) == spec
    assert read(tmp_path, release_config, layer_types=["indexed_attention"] * 78) == spec
    assert read(tmp_path, release_config, mlp_layer_types=REMOVED) == spec
    assert read(tmp_path, release_config, rope_parameters=REMOVED, rope_theta=8e6) == spec
    assert read(tmp_path, release_config, eos_token_id=7).eos_token_ids == (7,)
    assert read(tmp_path, release_config, num_nextn_predict_layers=REMOVED).n_mtp_layers == 0


def test_generation_config_adds_eos_ids_and_suggests_sampling(tmp_path: Path, release_config: Config) -> None:
    assert read_generation_config(tmp_path) == GenerationDefaults()
    suggestion = {"eos_token_id": [5, 154820], "temperature": 1.0, "top_p": 0.95, "top_k": 40}
    (tmp_path / "generation_config.json").write_text(json.dumps(suggestion))
    assert read(tmp_path, release_config).eos_token_ids == (154820, 154827, 154829, 5)
    assert read_generation_config(tmp_path) == GenerationDefaults(temperature=1.0, top_p=0.95, top_k=40)
    (tmp_path / "generation_config.json").write_text(json.dumps(suggestion | {"do_sample": False}))
    assert read_generation_config(tmp_path).temperature == 0.0
    (tmp_path / "generation_config.json").write_text('{"top_p": 2}')
    with pytest.raises(CheckpointError, match="top_p is 2"):
        read_generation_config(tmp_path)


REFUSED: list[tuple[Config, str]] = [
    ({"model_type": "glm5_next"}, "GLM-5.3-Flash, another model"),
    ({"model_type": "llama"}, 'model_type is "llama", expected "glm_moe_dsa"'),
    ({"model_type": REMOVED}, "model_type is missing"),
    ({"rope_parameters": REMOVED}, "neither rope_parameters.rope_theta nor rope_theta"),
    ({"rope_parameters": {"rope_type": "default"}}, "neither rope_parameters.rope_theta nor rope_theta"),
    ({"rope_parameters": {"rope_theta": 8e6, "rope_type": "yarn"}}, 'rope_type is "yarn"'),
    ({"rope_scaling": {"type": "yarn"}, "rope_parameters": REMOVED, "rope_theta": 8e6}, 'type is "yarn"'),
    ({"rope_parameters": {"rope_theta": -1}}, "rope_theta is -1"),
    ({"rope_parameters": [1]}, "rope_parameters is"),
    ({"hidden_size": REMOVED}, "hidden_size is missing, expected an integer"),
    ({"hidden_size": "6144"}, 'hidden_size is "6144", expected an integer'),
    ({"hidden_size": 6144.0}, "hidden_size is 6144.0, expected an integer"),
    ({"hidden_size": True}, "hidden_size is true, expected an integer"),
    ({"num_hidden_layers": -1}, "num_hidden_layers is -1, expected an integer from 1"),
    ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, expected"),
    ({"n_routed_experts": REMOVED}, "n_routed_experts is missing"),
    ({"num_experts": 128}, "num_experts is 128, expected n_routed_experts = 256"),
    ({"layer_types": ["full_attention"] * 78}, "layer_types is"),
    ({"layer_types": ["indexed_attention"] * 77}, "layer_types has 77 entries, expected num_hidden_layers = 78"),
    ({"indexer_types": ["full"] * 77}, "indexer_types has 77 entries"),
    ({"indexer_types": ["shared"] * 78}, "layer 0 is full"),
    ({"indexer_types": ["F"] * 78}, "indexer_types is"),
    ({"indexer_types": REMOVED, "index_topk_pattern": "FX" * 39}, "index_topk_pattern is"),
    ({"mlp_layer_types": ["dense"] * 3}, "mlp_layer_types has 3 entries"),
    ({"mlp_layer_types": REMOVED, "first_k_dense_replace": REMOVED}, "first_k_dense_replace is missing"),
    ({"hidden_act": "gelu"}, 'hidden_act is "gelu", expected "silu"'),
    ({"scoring_func": "softmax"}, "scoring_func is"),
    ({"topk_method": "greedy"}, "topk_method is"),
    ({"attention_bias": True}, "attention_bias is true, expected false"),
    ({"moe_layer_freq": 2}, "moe_layer_freq is 2, expected 1"),
    ({"indexer_rope_interleave": False}, "indexer_rope_interleave is false"),
    ({"num_nextn_predict_layers": 3}, "num_nextn_predict_layers is 3"),
    ({"eos_token_id": 154880}, "eos_token_id is 154880"),
    ({"eos_token_id": [1, "x"]}, "eos_token_id is"),
    ({"norm_topk_prob": 1}, "norm_topk_prob is 1, expected true or false"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps is NaN"),
    ({"qk_rope_head_dim": 63, "qk_head_dim": 255}, "qk_rope_head_dim is 63, expected an even number"),
    ({"qk_head_dim": 128}, "qk_head_dim is 128"),
    ({"index_head_dim": 32}, "index_head_dim is 32, expected at least"),
    ({"num_key_value_heads": 8}, "num_key_value_heads is 8"),
    ({"num_experts_per_tok": 257}, "num_experts_per_tok is 257"),
    ({"n_group": 3}, "n_group is 3, expected a divisor"),
    ({"n_group": 4, "topk_group": 5}, "topk_group is 5"),
    ({"n_group": 256, "topk_group": 8}, "n_group is 256"),
    ({"n_group": 128, "topk_group": 3}, "topk_group is 3"),
    ({"quantization_config": {"quant_method": "awq"}}, 'quant_method is "awq"'),
    ({"quantization_config": {"quant_method": "fp8", "fmt": "e5m2", "weight_block_size": [128, 128]}}, 'fmt is "e5m2"'),
    ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 128]}}, r"weight_block_size is \[64, 128\], expected"),
    ({"quantization_config": {"quant_method": "fp8"}}, "weight_block_size is missing"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_refused(tmp_path: Path, release_config: Config, changes: Config, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read(tmp_path, release_config, **changes)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b'{"vocab_size": 1,}', "not JSON"),
        (b"[1]", "holds a JSON list, expected an object"),
        (b"\xff{}", "byte 0 .0xff. is not UTF-8"),
        (b"[" * 100_000, "not usable JSON"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n", "git-lfs pointer"),
    ],
)
def test_damaged_file(tmp_path: Path, text: bytes, message: str) -> None:
    (tmp_path / "config.json").write_bytes(text)
    with pytest.raises(CheckpointError, match=message):
        read_config(tmp_path)


def test_missing_file_and_directory(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json does not exist"):
        read_config(tmp_path)
    with pytest.raises(CheckpointError, match="nowhere does not exist, expected a model directory"):
        read_config(tmp_path / "nowhere")


def test_engine_settings_have_help_and_bounds() -> None:
    assert all(item.metadata["help"].endswith(".") for item in dataclasses.fields(EngineConfig))
    assert EngineConfig.of(dtype="f32", latent_norm_eps=1e-5, extent_rows=128).extent_rows == 128
    with pytest.raises(InputError, match="unknown engine setting 'dtyp'; did you mean dtype"):
        EngineConfig.of(dtyp="f32")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("runtime", "hip"),
        ("dtype", "f16"),
        ("devices", -1),
        ("devices", "0"),
        ("devices", True),
        ("devices", (0, 0)),
        ("devices", (0, 1, 2)),
        ("devices", ()),
        ("devices", (0, True)),
        ("p2p", "yes"),
        ("check_pair", True),
        ("latent_norm_eps", 0.0),
        ("latent_norm_eps", float("nan")),
        ("prefill_chunk_rows", 0),
        ("extent_rows", 100),
        ("extent_rows", 0),
        ("context_rows_max", -1),
        ("sessions_max", 0),
        ("check_weights", 1),
    ],
)
def test_engine_setting_refused(name: str, value: object) -> None:
    with pytest.raises(InputError, match=f"{name} is "):
        EngineConfig.of(**{name: value})
