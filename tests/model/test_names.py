"""The tensors a spec calls for, and the match of checkpoints with them: spellings accepted, faults named."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from glm53.config import read_config
from glm53.errors import CheckpointError
from glm53.model.checkpoint import Checkpoint
from glm53.model.layout import array_plans
from glm53.model.names import Kind, LoadPlan, expected_tensors, match, parameter_count
from glm53.spec import DType

Tensors = dict[str, tuple[str, np.ndarray]]
Make = Callable[..., Path]
SMALL = {"layers": 4, "vocab": 64}


def plan_of(path: Path) -> LoadPlan:
    return match(Checkpoint.open(path), read_config(path))


def test_release_has_the_known_number_of_tensors_and_parameters(tmp_path: Path, release_config: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(release_config))
    tensors = expected_tensors(read_config(tmp_path), mtp=True)
    assert len(tensors) == len({t.name for t in tensors}) == 59_585
    assert parameter_count(tensors) == 753_329_921_024
    by_name = {t.name: t for t in tensors}
    kept = ("embed", "lm_head", "mlp.gate.", "weights_proj", "eh_proj")
    quantised = [t for t in tensors if len(t.shape) > 1 and not any(part in t.name for part in kept)]
    assert len(tensors) + len(quantised) == 118_629  # the FP8 release
    assert by_name["model.layers.0.self_attn.kv_a_proj_with_mqa.weight"].scale_shape == (5, 48)
    assert by_name["model.layers.78.self_attn.indexer.wk.weight"].scale_shape == (1, 48)
    assert "model.layers.3.self_attn.indexer.wk.weight" not in by_name


@pytest.mark.parametrize("options", [{}, {"mtp": True}, {"mtp": True, "fp8": True}, {"packed_experts": True}, {"dtype": "bfloat16"}])
def test_every_stored_layout_matches(make_checkpoint: Make, options: dict[str, Any]) -> None:
    path = make_checkpoint(**SMALL, **options)
    plan = plan_of(path)
    assert plan.notes == ()
    assert plan.spec.n_mtp_layers == int(options.get("mtp", False))
    stored = Checkpoint.open(path).tensors
    planned = {t.info.name for t in plan.tensors.values()} | {t.scale.name for t in plan.tensors.values() if t.scale}
    assert planned == set(stored)
    for dtype in (DType.F32, DType.BF16):
        plans = array_plans(plan, dtype, mtp=True)
        used = [part.source.info.name for p in plans for part in p.parts]
        assert set(used) == set(plan.tensors)
        for p in plans:
            assert sum(part.rows for part in p.parts) * p.shape[-1] == math.prod(p.shape)


def test_demo_matches(demo_path: Path) -> None:
    plan = plan_of(demo_path)
    assert (plan.spec.n_mtp_layers, plan.packed_layers, plan.notes) == (1, frozenset(), ())
    assert plan.tensors["model.layers.8.eh_proj.weight"].kind is Kind.MTP


def test_files_decide_about_the_mtp_layer(make_checkpoint: Make, rewrite: Callable[..., Path]) -> None:
    with_mtp = make_checkpoint(**SMALL, mtp=True)

    def drop(tensors: Tensors) -> None:
        for name in [n for n in tensors if n.startswith("model.layers.4.")]:
            del tensors[name]

    plan = plan_of(rewrite(with_mtp, drop))
    assert plan.spec.n_mtp_layers == 0
    assert plan.notes == ("config.json says 1 MTP layers, the files hold 0",)
    assert plan_of(rewrite(with_mtp, config=lambda c: c.pop("num_nextn_predict_layers"))).spec.n_mtp_layers == 1
    refused(rewrite(with_mtp, lambda t: t.pop("model.layers.4.enorm.weight")), r"missing: model\.layers\.4\.enorm\.weight \[256\]")


def test_foreign_extras_are_ignored_and_noted(make_checkpoint: Make, rewrite: Callable[..., Path]) -> None:
    def add(tensors: Tensors) -> None:
        tensors["model.layers.4.embed_tokens.weight"] = tensors["model.embed_tokens.weight"]
        tensors["model.layers.4.shared_head.head.weight"] = tensors["lm_head.weight"]
        tensors["model.layers.3.self_attn.indexer.wk.weight"] = ("F32", np.zeros((2, 2), np.float32))
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = ("F32", np.zeros(8, np.float32))

    plan = plan_of(rewrite(make_checkpoint(**SMALL, mtp=True), add))
    assert len(plan.notes) == 3
    assert plan.notes[0].startswith("2 tensors ignored: the MTP layer's own copies")
    assert not set(plan.tensors) & {"model.layers.4.embed_tokens.weight", "model.layers.3.self_attn.indexer.wk.weight"}


def test_copies_alone_are_no_mtp_layer(make_checkpoint: Make, rewrite: Callable[..., Path]) -> None:
    def add(tensors: Tensors) -> None:
        tensors["model.layers.4.embed_tokens.weight"] = tensors["model.embed_tokens.weight"]

    assert plan_of(rewrite(make_checkpoint(**SMALL), add)).spec.n_mtp_layers == 0


def test_tied_head(make_checkpoint: Make, rewrite: Callable[..., Path]) -> None:
    def tie(config: dict[str, Any]) -> None:
        config["tie_word_embeddings"] = True

    source = make_checkpoint(**SMALL)
    assert "lm_head.weight" not in plan_of(rewrite(source, config=tie)).tensors
    assert plan_of(rewrite(source, lambda t: t.pop("lm_head.weight"), tie)).notes == ()
    refused(rewrite(source, lambda t: t.pop("lm_head.weight")), r"missing: lm_head\.weight \[64, 256\]")


def refused(path: Path, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        plan_of(path)


def test_shape_and_type_faults_are_named(make_checkpoint: Make, rewrite: Callable[..., Path]) -> None:
    source = make_checkpoint(**SMALL)

    def reshape(tensors: Tensors) -> None:
        dtype, array = tensors["model.layers.1.self_attn.o_proj.weight"]
        tensors["model.layers.1.self_attn.o_proj.weight"] = (dtype, np.ascontiguousarray(array.T))

    refused(rewrite(source, reshape), r"1 problem:\n  shape: model\.layers\.1\.self_attn\.o_proj\.weight is \[128, 256\], expected \[")
    half = ("F16", np.zeros(256, np.float16))
    refused(rewrite(source, lambda t: t.update({"model.norm.weight": half})), r"type: model\.norm\.weight is F16, expected F32 or BF16")
    extra = ("F32", np.zeros(1, np.float32))
    refused(rewrite(source, lambda t: t.update({"model.layers.9.x": extra})), r"unexpected: model\.layers\.9\.x F32 \[1\]")


def test_fp8_only_with_a_scale_and_scale_only_with_fp8(make_checkpoint: Make, rewrite: Callable[..., Path]) -> None:
    source = make_checkpoint(**SMALL, fp8=True)
    name = "model.layers.0.self_attn.q_a_proj.weight"
    scale = name + "_scale_inv"
    refused(rewrite(source, lambda t: t.pop(scale)), f"type: {name} is F8_E4M3 without {scale}")
    wide = ("BF16", np.zeros((48, 256), np.uint16))
    refused(rewrite(source, lambda t: t.update({name: wide})), f"type: {name} is BF16 and has {scale}")
    square = ("F32", np.ones((2, 2), np.float32))
    refused(rewrite(source, lambda t: t.update({scale: square})), rf"shape: {scale} is \[2, 2\], expected \[1, 2\]")
    refused(rewrite(source, lambda t: t.update({scale: ("BF16", np.ones((1, 2), np.uint16))})), f"type: {scale} is BF16, expected F32")
    codes = ("F8_E4M3", np.zeros(256, np.uint8))
    refused(rewrite(source, lambda t: t.update({"model.norm.weight": codes})), "model.norm.weight is F8_E4M3, expected F32 or BF16")


def test_first_ten_problems_are_listed(make_checkpoint: Make, rewrite: Callable[..., Path]) -> None:
    def drop(tensors: Tensors) -> None:
        for name in [n for n in tensors if ".experts." in n and "shared" not in n]:
            del tensors[name]

    with pytest.raises(CheckpointError) as caught:
        plan_of(rewrite(make_checkpoint(**SMALL), drop))
    text = str(caught.value)
    assert "96 problems" in text and text.count("missing:") == 10 and text.endswith("and 86 more")
