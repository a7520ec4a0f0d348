#!/usr/bin/env python3
"""Write (and read back) small random checkpoints of the GLM-5.3 architecture with numpy alone.

The directory looks like a release: config.json, generation_config.json, sharded safetensors, index. Tensor names and
shapes follow from the configuration, so `overrides` may change any of its keys (hidden_size, n_group, ...).

Weights are the same bits on every machine and numpy version: each tensor has its own Philox stream, keyed by SHA-256 of
"seed:name"; the top 24 bits of each 64-bit word become an odd integer m in (-2^24, 2^24), and the value is m times one
float32 constant: one IEEE rounding. They are uniform with these standard deviations (fan = columns, s = `scale`):

    embed_tokens 1     lm_head 3 s / sqrt(fan)     eh_proj 1 / sqrt(fan)     other matrices 1.3 s / sqrt(fan)
    norm weights 0.2, around 1                     k_norm.bias and e_score_correction_bias 0.1, around 0
"""

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import click
import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
BLOCK = 128  # rows and columns of an FP8 scale block
E4M3_MAX = 448.0
BYTES = {"F32": 4, "BF16": 2, "F8_E4M3": 1}
# Two sets of head widths. The tiny one keeps every pair that could be confused distinct; the other is the released one
# (with a q_lora_rank of 256 instead of 2048). Both have 32 indexer heads: with few, equal index scores become common.
HEAD_KEYS = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
WIDTH_KEYS = (*HEAD_KEYS, "kv_lora_rank", "q_lora_rank", "index_head_dim", "index_n_heads")
TINY_WIDTHS = (24, 16, 32, 40, 48, 32, 32)
REAL_WIDTHS = (192, 64, 256, 512, 256, 128, 32)


@dataclass(frozen=True)
class Tensor:
    """One stored tensor before it has bytes. `source` names the random tensors stacked in it (packed experts)."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # safetensors spelling: F32, BF16, F8_E4M3
    source: tuple[str, ...] = ()
    scale_of: str = ""  # set on X.weight_scale_inv: the name of X.weight

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * BYTES[self.dtype]


# --- numbers -------------------------------------------------------------------------------------------------------


def raw_words(key: str, count: int) -> NDArray[np.uint64]:
    """[count] 64-bit words of the Philox stream named `key`."""
    digest = hashlib.sha256(key.encode()).digest()
    words = np.frombuffer(digest[:16], dtype="<u8").astype(np.uint64)
    return np.random.Philox(key=words).random_raw(count).astype(np.uint64, copy=False)


def random_token_ids(seed: int, count: int, vocab: int) -> list[int]:
    """`count` prompt ids in [0, vocab), from the stream "prompt:seed:count"."""
    return [int(w) for w in raw_words(f"prompt:{seed}:{count}", count) % np.uint64(vocab)]


def uniform(key: str, shape: tuple[int, ...], std: float) -> F32:
    """Uniform float32 values of standard deviation `std` around 0, exact as described at the top."""
    top = (raw_words(key, math.prod(shape)) >> np.uint64(40)).astype(np.int64)
    odd = (2 * top + 1 - (1 << 24)).astype(np.float32)
    return (odd * np.float32(std * math.sqrt(3.0) / (1 << 24))).reshape(shape)


def random_weight(seed: int, name: str, shape: tuple[int, ...], scale: float) -> F32:
    """The float32 values of the tensor `name` before any rounding to its stored type."""
    key = f"{seed}:{name}"
    if name.endswith(("e_score_correction_bias", "k_norm.bias")):
        return uniform(key, shape, 0.1)
    if "norm" in name:
        return np.float32(1.0) + uniform(key, shape, 0.2)
    root = math.sqrt(shape[-1])
    if "embed_tokens" in name:
        return uniform(key, shape, 1.0)
    if "lm_head" in name:
        return uniform(key, shape, scale * 3.0 / root)
    if "eh_proj" in name:
        return uniform(key, shape, 1.0 / root)
    return uniform(key, shape, scale * 1.3 / root)


def to_bf16(x: F32) -> NDArray[np.uint16]:
    """bfloat16 bits of finite float32 values, round to nearest even."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    return ((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)).astype(np.uint16)


def from_bf16(bits: NDArray[np.uint16]) -> F32:
    """float32 values of bfloat16 bits."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def e4m3_values() -> F32:
    """[256] value of every e4m3 code (1 sign, 4 exponent of bias 7, 3 mantissa bits, no infinity; 0x7f is NaN)."""
    code = np.arange(256)
    exponent, mantissa = (code >> 3) & 15, code & 7
    magnitude = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    magnitude[(code & 127) == 127] = np.nan
    return np.where(code < 128, magnitude, -magnitude).astype(np.float32)


def to_e4m3(x: F32) -> NDArray[np.uint8]:
    """e4m3 codes of finite float32 values, round to nearest even, saturating at 448."""
    magnitude = np.minimum(np.abs(x).astype(np.float64), E4M3_MAX)
    exponent = np.maximum(np.frexp(magnitude)[1] - 1, -6)
    quantum = np.ldexp(1.0, exponent - 3)
    value = np.minimum(np.rint(magnitude / quantum) * quantum, E4M3_MAX)
    code: NDArray[np.uint8] = np.searchsorted(e4m3_values()[:127], value.astype(np.float32)).astype(np.uint8)
    code[np.signbit(x)] |= np.uint8(128)
    return code


def block_scales(w: F32) -> F32:
    """[ceil(R/128), ceil(C/128)] scales of a matrix [R, C]: the block's largest magnitude over 448."""
    rows, cols = (range(0, n, BLOCK) for n in w.shape)
    amax = [[np.abs(w[r : r + BLOCK, c : c + BLOCK]).max() for c in cols] for r in rows]
    scales: F32 = np.maximum(np.array(amax, dtype=np.float32) / np.float32(E4M3_MAX), np.float32(1e-12))
    return scales


def expand_scales(scales: F32, shape: tuple[int, ...]) -> F32:
    """The scale of every element of a matrix of `shape` [R, C]; the last blocks may be ragged."""
    full = np.repeat(np.repeat(scales, BLOCK, axis=0), BLOCK, axis=1)
    return full[: shape[0], : shape[1]]


# --- configuration and tensor list ---------------------------------------------------------------------------------


def make_config(
    *,
    dtype: str,
    real_widths: bool,
    mtp: bool,
    layers: int,
    topk: int,
    heads: int,
    vocab: int,
    overrides: Mapping[str, Any],
) -> dict[str, Any]:
    """The config.json dictionary, keys as in the release. Schedule: full at 0, 1, 2, then every fourth layer."""
    widths = dict(zip(WIDTH_KEYS, REAL_WIDTHS if real_widths else TINY_WIDTHS, strict=True))
    eos = [vocab - 3, vocab - 2, vocab - 1]
    config: dict[str, Any] = {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "model_type": "glm_moe_dsa",
        "dtype": dtype,
        "vocab_size": vocab,
        "hidden_size": 256,
        "intermediate_size": 320,
        "moe_intermediate_size": 64,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "n_shared_experts": 1,
        "n_routed_experts": 16,
        "num_experts_per_tok": 4,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 2,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        "rope_parameters": {"rope_theta": 8000000, "rope_type": "default"},
        "index_topk": topk,
        "index_topk_freq": 4,
        "index_topk_pattern": None,
        "index_skip_topk_offset": 3,
        "index_share_for_mtp_iteration": True,
        "indexer_types": ["full" if max(i - 2, 0) % 4 == 0 else "shared" for i in range(layers)],
        "indexer_rope_interleave": True,
        "rope_interleave": True,
        "layer_types": ["deepseek_sparse_attention"] * layers,
        "mlp_layer_types": ["dense" if i < 2 else "sparse" for i in range(layers)],
        "num_nextn_predict_layers": int(mtp),
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_layer_freq": 1,
        "moe_router_dtype": "float32",
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "ep_size": 1,
        "pretraining_tp": 1,
        "tie_word_embeddings": False,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": eos,
        "pad_token_id": eos[0],
        "transformers_version": "5.24.0",
    }
    config |= widths | dict(overrides)
    config.setdefault("head_dim", config["qk_rope_head_dim"])
    config.setdefault("qk_head_dim", config["qk_nope_head_dim"] + config["qk_rope_head_dim"])
    return config


def attention_shapes(c: Mapping[str, Any], full: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names below `self_attn.` with their shapes; `full` adds the indexer."""
    hidden, heads, q_rank, kv_rank = c["hidden_size"], c["num_attention_heads"], c["q_lora_rank"], c["kv_lora_rank"]
    nope, rope, value = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
    yield "q_a_proj.weight", (q_rank, hidden)
    yield "q_a_layernorm.weight", (q_rank,)
    yield "q_b_proj.weight", (heads * (nope + rope), q_rank)
    yield "kv_a_proj_with_mqa.weight", (kv_rank + rope, hidden)
    yield "kv_a_layernorm.weight", (kv_rank,)
    yield "kv_b_proj.weight", (heads * (nope + value), kv_rank)
    yield "o_proj.weight", (hidden, heads * value)
    if full:
        yield "indexer.wq_b.weight", (c["index_n_heads"] * c["index_head_dim"], q_rank)
        yield "indexer.wk.weight", (c["index_head_dim"], hidden)
        yield "indexer.k_norm.weight", (c["index_head_dim"],)
        yield "indexer.k_norm.bias", (c["index_head_dim"],)
        yield "indexer.weights_proj.weight", (c["index_n_heads"], hidden)


def mlp_shapes(hidden: int, width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """A gated MLP's three matrices."""
    yield "gate_proj.weight", (width, hidden)
    yield "up_proj.weight", (width, hidden)
    yield "down_proj.weight", (hidden, width)


def model_shapes(c: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(name, shape) of every tensor, experts one by one, in model order; the MTP layer follows the last layer."""
    hidden, layers = c["hidden_size"], c["num_hidden_layers"]
    yield "model.embed_tokens.weight", (c["vocab_size"], hidden)
    for i in range(layers + c["num_nextn_predict_layers"]):
        base, is_mtp = f"model.layers.{i}.", i >= layers
        yield base + "input_layernorm.weight", (hidden,)
        yield base + "post_attention_layernorm.weight", (hidden,)
        for name, shape in attention_shapes(c, is_mtp or c["indexer_types"][i] == "full"):
            yield f"{base}self_attn.{name}", shape
        if not is_mtp and c["mlp_layer_types"][i] == "dense":
            for name, shape in mlp_shapes(hidden, c["intermediate_size"]):
                yield f"{base}mlp.{name}", shape
            continue
        width = c["moe_intermediate_size"]
        yield base + "mlp.gate.weight", (c["n_routed_experts"], hidden)
        yield base + "mlp.gate.e_score_correction_bias", (c["n_routed_experts"],)
        for expert in range(c["n_routed_experts"]):
            for name, shape in mlp_shapes(hidden, width):
                yield f"{base}mlp.experts.{expert}.{name}", shape
        for name, shape in mlp_shapes(hidden, width * c["n_shared_experts"]):
            yield f"{base}mlp.shared_experts.{name}", shape
        if is_mtp:
            for name in ("enorm", "hnorm", "shared_head.norm"):
                yield f"{base}{name}.weight", (hidden,)
            yield base + "eh_proj.weight", (hidden, 2 * hidden)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (c["vocab_size"], hidden)


def is_quantised(name: str, shape: tuple[int, ...]) -> bool:
    """Whether the FP8 release stores this matrix as e4m3."""
    kept = ("norm", "lm_head", "embed_tokens", "mlp.gate.", "weights_proj", "eh_proj")
    return len(shape) == 2 and not any(part in name for part in kept)


def plan_tensors(config: Mapping[str, Any], dtype: str, fp8: bool, packed: bool) -> list[Tensor]:
    """Every stored tensor, a scale right after its matrix. `packed`: one gate_up_proj and down_proj per MoE layer."""
    plain = "F32" if dtype == "float32" else "BF16"
    shapes = dict(model_shapes(config))
    experts, width, hidden = config["n_routed_experts"], config["moe_intermediate_size"], config["hidden_size"]
    plan = []
    for name, shape in shapes.items():
        if packed and ".mlp.experts." in name:
            if not name.endswith(".experts.0.gate_proj.weight"):
                continue
            base = name.removesuffix("0.gate_proj.weight")
            gate_up = tuple(f"{base}{e}.{m}_proj.weight" for e in range(experts) for m in ("gate", "up"))
            down = tuple(f"{base}{e}.down_proj.weight" for e in range(experts))
            plan.append(Tensor(base + "gate_up_proj", (experts, 2 * width, hidden), plain, gate_up))
            plan.append(Tensor(base + "down_proj", (experts, hidden, width), plain, down))
        elif name.endswith("e_score_correction_bias"):
            plan.append(Tensor(name, shape, "F32"))
        elif fp8 and is_quantised(name, shape):
            blocks = (-(-shape[0] // BLOCK), -(-shape[1] // BLOCK))
            plan.append(Tensor(name, shape, "F8_E4M3"))
            plan.append(Tensor(name + "_scale_inv", blocks, "F32", scale_of=name))
        else:
            plan.append(Tensor(name, shape, plain))
    return plan


def quantization_config(plan: list[Tensor]) -> dict[str, Any]:
    """As released, with its spelling `indexers_proj` for `indexer.weights_proj` in the skip list."""
    kept = {t.name.removesuffix(".weight") for t in plan if t.dtype != "F8_E4M3" and not t.scale_of}
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": sorted(n.replace("indexer.weights_proj", "indexers_proj") for n in kept),
    }


# --- files ---------------------------------------------------------------------------------------------------------


def split_shards(plan: list[Tensor], count: int) -> list[list[Tensor]]:
    """Cut the plan into at most `count` runs of about equal bytes; a scale stays with its matrix."""
    total, done = sum(t.nbytes for t in plan), 0
    shards: list[list[Tensor]] = [[] for _ in range(count)]
    current = 0
    for tensor in plan:
        if not tensor.scale_of:
            current = min(count - 1, done * count // total)
        shards[current].append(tensor)
        done += tensor.nbytes
    return [shard for shard in shards if shard]


def encode(tensor: Tensor, seed: int, scale: float, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, bytes]:
    """The bytes of a tensor, and of its scale if it is FP8, by name."""
    names = tensor.source or (tensor.name,)
    parts = [random_weight(seed, name, shapes[name], scale) for name in names]
    values = parts[0] if not tensor.source else np.concatenate(parts).reshape(tensor.shape)
    if tensor.dtype == "BF16":
        return {tensor.name: to_bf16(values).astype("<u2").tobytes()}
    if tensor.dtype == "F32":
        return {tensor.name: values.astype("<f4").tobytes()}
    scales = block_scales(values)
    codes = to_e4m3(values / expand_scales(scales, values.shape))
    return {tensor.name: codes.tobytes(), tensor.name + "_scale_inv": scales.astype("<f4").tobytes()}


def write_header(file: BinaryIO, tensors: list[Tensor]) -> dict[str, int]:
    """Write a safetensors header; widest types first so that all are aligned. Returns each tensor's file offset."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at, offsets = 0, {}
    for t in sorted(tensors, key=lambda t: (-BYTES[t.dtype], t.name)):
        header[t.name] = {"dtype": t.dtype, "shape": list(t.shape), "data_offsets": [at, at + t.nbytes]}
        offsets[t.name] = at
        at += t.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    return {name: 8 + len(text) + offset for name, offset in offsets.items()}


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def make_checkpoint(
    path: str | Path,
    *,
    dtype: str = "float32",
    real_widths: bool = False,
    mtp: bool = False,
    layers: int = 8,
    topk: int = 64,
    seed: int = 0,
    shards: int = 1,
    scale: float = 1.0,
    heads: int = 4,
    vocab: int = 512,
    packed_experts: bool = False,
    fp8: bool = False,
    overrides: Mapping[str, Any] | None = None,
) -> None:
    """Write a checkpoint directory. `dtype` is float32 or bfloat16; `fp8` stores everything else as bfloat16.

    `overrides` replaces config.json keys before the tensor list is drawn up. Never holds more than one tensor (a
    packed expert tensor counts as one).
    """
    if dtype not in ("float32", "bfloat16"):
        raise ValueError(f"dtype is {dtype!r}, expected 'float32' or 'bfloat16'")
    if fp8 and packed_experts:
        raise ValueError("fp8 stores experts one by one; drop packed_experts")
    if shards < 1:
        raise ValueError(f"shards is {shards}, expected at least 1")
    dtype = "bfloat16" if fp8 else dtype
    config = make_config(
        dtype=dtype,
        real_widths=real_widths,
        mtp=mtp,
        layers=layers,
        topk=topk,
        heads=heads,
        vocab=vocab,
        overrides=overrides or {},
    )
    plan, shapes = plan_tensors(config, dtype, fp8, packed_experts), dict(model_shapes(config))
    if fp8:
        config["quantization_config"] = quantization_config(plan)
    out = Path(path)
    out.mkdir(parents=True, exist_ok=True)
    parts = split_shards(plan, shards)
    weight_map: dict[str, str] = {}
    for number, part in enumerate(parts, 1):
        single = len(parts) == 1
        name = "model.safetensors" if single else f"model-{number:05}-of-{len(parts):05}.safetensors"
        weight_map |= {t.name: name for t in part}
        with (out / name).open("wb") as file:
            offsets = write_header(file, part)
            for tensor in (t for t in part if not t.scale_of):
                for key, data in encode(tensor, seed, scale, shapes).items():
                    file.seek(offsets[key])
                    file.write(data)
    if len(parts) > 1:
        index = {"metadata": {"total_size": sum(t.nbytes for t in plan)}, "weight_map": weight_map}
        write_json(out / "model.safetensors.index.json", index)
    write_json(out / "config.json", config)
    special = {key: config[key] for key in ("eos_token_id", "pad_token_id")}
    write_json(out / "generation_config.json", special | {"transformers_version": "5.24.0"})


def read_stored(path: str | Path) -> dict[str, tuple[str, NDArray[Any]]]:
    """name -> (stored dtype, array) of all shards, memory-mapped; BF16 as uint16 bits, F8_E4M3 as uint8 codes."""
    views = {"F32": "<f4", "BF16": "<u2", "F8_E4M3": "u1"}
    stored: dict[str, tuple[str, NDArray[Any]]] = {}
    for file in sorted(Path(path).glob("*.safetensors")):
        data = np.memmap(file, dtype=np.uint8, mode="r")
        end = 8 + int.from_bytes(data[:8].tobytes(), "little")
        for name, entry in json.loads(data[8:end].tobytes()).items():
            if name != "__metadata__":
                first, last = entry["data_offsets"]
                array = data[end + first : end + last].view(views[entry["dtype"]]).reshape(entry["shape"])
                stored[name] = (entry["dtype"], array)
    return stored


def read_checkpoint(path: str | Path) -> dict[str, F32]:
    """Every weight as float32; FP8 matrices multiplied out by their block scales (in float32), scales left out."""
    stored, table = read_stored(path), e4m3_values()
    weights: dict[str, F32] = {}
    for name, (dtype, array) in stored.items():
        if name.endswith("_scale_inv"):
            continue
        if dtype == "F8_E4M3":
            scales = np.asarray(stored[name + "_scale_inv"][1])
            weights[name] = table[array] * expand_scales(scales, array.shape)
        else:
            weights[name] = from_bf16(array) if dtype == "BF16" else np.asarray(array)
    return weights


def write_dequantised(source: str | Path, target: str | Path) -> None:
    """Copy a checkpoint as one float32 shard without quantization_config, FP8 multiplied out in numpy."""
    out = Path(target)
    out.mkdir(parents=True, exist_ok=True)
    config = json.loads((Path(source) / "config.json").read_text())
    config.pop("quantization_config", None)
    write_json(out / "config.json", config | {"dtype": "float32"})
    weights = read_checkpoint(source)
    with (out / "model.safetensors").open("wb") as file:
        offsets = write_header(file, [Tensor(name, w.shape, "F32") for name, w in weights.items()])
        for name, values in weights.items():
            file.seek(offsets[name])
            file.write(values.astype("<f4").tobytes())


@click.command(context_settings={"show_default": True})
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), default="float32", help="Stored type.")
@click.option("--real-widths", is_flag=True, help="Per-head widths of the release (rows of 512 + 64 values).")
@click.option("--mtp", is_flag=True, help="Add the multi-token-prediction layer after the last one.")
@click.option("--layers", default=8, type=click.IntRange(1), help="Decoder layers without the MTP layer.")
@click.option("--topk", default=64, type=click.IntRange(1), help="index_topk, in positions.")
@click.option("--seed", default=0, type=int, help="Seed of the weights.")
@click.option("--shards", default=1, type=click.IntRange(1), help="Safetensors files.")
@click.option("--scale", default=1.0, type=float, help="Factor on the matrices; 0.5 calms bf16 runs.")
@click.option("--heads", default=4, type=click.IntRange(1), help="Attention heads.")
@click.option("--vocab", default=512, type=click.IntRange(4), help="Vocabulary rows; the last three are eos ids.")
@click.option("--packed-experts", is_flag=True, help="One gate_up_proj and down_proj per MoE layer.")
@click.option("--fp8", is_flag=True, help="Released FP8 layout: e4m3 with a float32 scale per 128 x 128 block.")
def main(path: Path, **options: Any) -> None:
    """Write a random GLM-5.3 checkpoint to PATH. Example: make_checkpoint.py /tmp/tiny --mtp --fp8"""
    make_checkpoint(path, **options)
    stored = read_stored(path)
    size = sum(array.nbytes for _, array in stored.values())
    click.echo(f"{path}: {len(stored)} tensors, {size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
