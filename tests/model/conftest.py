"""Fixtures of the checkpoint tests: files written byte by byte, and the released configuration."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

Stored = Mapping[str, tuple[str, np.ndarray]]


@pytest.fixture
def write_safetensors() -> Callable[[Path, Stored], None]:
    """Writes name -> (stored type, array of raw elements) as one file."""

    def write(path: Path, tensors: Stored) -> None:
        header, at = {}, 0
        for name, (dtype, array) in tensors.items():
            header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [at, at + array.nbytes]}
            at += array.nbytes
        text = json.dumps(header).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(array.tobytes() for _, array in tensors.values()))

    return write


@pytest.fixture
def read_safetensors() -> Callable[[Path], dict[str, tuple[str, np.ndarray]]]:
    """All tensors of a directory's files, copied."""
    views = {"F32": "<f4", "BF16": "<u2", "F8_E4M3": "u1"}

    def read(path: Path) -> dict[str, tuple[str, np.ndarray]]:
        tensors = {}
        for file in sorted(path.glob("*.safetensors")):
            data = file.read_bytes()
            base = 8 + int.from_bytes(data[:8], "little")
            for name, entry in json.loads(data[8:base]).items():
                if name != "__metadata__":
                    first, last = (base + o for o in entry["data_offsets"])
                    array = np.frombuffer(data[first:last], views[entry["dtype"]]).reshape(entry["shape"])
                    tensors[name] = (entry["dtype"], array.copy())
        return tensors

    return read


@pytest.fixture
def rewrite(
    tmp_path: Path, write_safetensors: Callable[[Path, Stored], None], read_safetensors: Callable[[Path], dict[str, tuple[str, np.ndarray]]]
) -> Callable[..., Path]:
    """Copies a checkpoint as one file, its tensors changed by a function that edits the dict and its config by one that edits that dict."""

    Edit = Callable[[dict[str, Any]], object]

    def copy(source: Path, edit: Edit = lambda tensors: None, config: Edit = lambda values: None) -> Path:
        target = tmp_path / "rewritten"
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir()
        tensors = read_safetensors(source)
        edit(tensors)
        write_safetensors(target / "model.safetensors", tensors)
        values = json.loads((source / "config.json").read_text())
        config(values)
        (target / "config.json").write_text(json.dumps(values))
        return target

    return copy


@pytest.fixture
def release_config() -> dict[str, Any]:
    """config.json of the GLM-5.3 release, as transcribed in the architecture notes 1.1 (quantization_config shortened)."""
    full = {0, 1, 2, 6, 10, 14, 18, 22, 26, 30, 34, 38, 42, 46, 50, 54, 58, 62, 66, 70, 74}
    return {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "model_type": "glm_moe_dsa",
        "vocab_size": 154880,
        "hidden_size": 6144,
        "num_hidden_layers": 78,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "q_lora_rank": 2048,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64,
        "qk_head_dim": 256,
        "v_head_dim": 256,
        "head_dim": 192,
        "intermediate_size": 12288,
        "moe_intermediate_size": 2048,
        "first_k_dense_replace": 3,
        "moe_layer_freq": 1,
        "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 75,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "n_group": 1,
        "topk_group": 1,
        "moe_router_dtype": "float32",
        "index_n_heads": 32,
        "index_head_dim": 128,
        "index_topk": 2048,
        "index_topk_freq": 4,
        "index_skip_topk_offset": 3,
        "index_topk_pattern": None,
        "indexer_types": ["full" if i in full else "shared" for i in range(78)],
        "indexer_rope_interleave": True,
        "rope_interleave": True,
        "layer_types": ["deepseek_sparse_attention"] * 78,
        "rope_parameters": {"rope_theta": 8000000, "rope_type": "default"},
        "max_position_embeddings": 1048576,
        "rms_norm_eps": 1e-5,
        "num_nextn_predict_layers": 1,
        "index_share_for_mtp_iteration": True,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "hidden_act": "silu",
        "eos_token_id": [154820, 154827, 154829],
        "pad_token_id": 154820,
        "dtype": "bfloat16",
        "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
    }
