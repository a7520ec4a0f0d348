"""config.json → `ModelSpec`, and the engine's settings `EngineConfig`.

Reads the configuration by transformers 5.24.0's rules, but refuses where transformers falls back in silence: a missing rope theta, a
missing width, a schedule of the wrong length. Knows no device and no tensor.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from glm53.errors import CheckpointError, InputError
from glm53.files import CONFIG_FILE, GENERATION_FILE, check_directory, read_json_object
from glm53.spec import ModelSpec, RowFormat

MODEL_TYPE = "glm_moe_dsa"
WEIGHT_SETTINGS = ("auto", "q8q4", "bf16", "f32")
SCALE_BLOCK = 128  # rows and columns of one FP8 scale block, the only size released
# Bounds that only a damaged or foreign file exceeds. They keep products of widths inside 64 bits.
_WIDTH_MAX = 1 << 22
_LAYERS_MAX = 4096
_DSA_LAYER_TYPES = ("deepseek_sparse_attention", "indexed_attention")  # released files, save_pretrained of transformers 5.24
_FULL_SHARED = {"full": True, "shared": False, "F": True, "S": False}


class _Fields:
    """Typed look-ups in one JSON object; every failure names file, key, what it holds and what was wanted."""

    def __init__(self, values: Mapping[str, Any], source: str):
        self.values = values
        self.source = source

    def error(self, key: str, wanted: str) -> CheckpointError:
        if key in self.values:
            text = json.dumps(self.values[key])
            got = f"is {text if len(text) <= 80 else text[:77] + '...'}"
        else:
            got = "is missing"
        return CheckpointError(f"{self.source}: {key} {got}, expected {wanted}")

    def has(self, key: str) -> bool:
        return self.values.get(key) is not None

    def integer(self, key: str, low: int, high: int, default: int | None = None) -> int:
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise self.error(key, f"an integer from {low} to {high}")
        return value

    def number(self, key: str, low: float, high: float) -> float:
        value = self.values.get(key)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value) or not low <= value <= high:
            raise self.error(key, f"a number from {low:g} to {high:g}")
        return float(value)

    def boolean(self, key: str, default: bool) -> bool:
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(key, "true or false")
        return value

    def fixed(self, key: str, wanted: Any) -> None:
        """A key that may be absent but must not say anything else: the kernels implement only this value."""
        value = self.values.get(key)
        if value is not None and (value != wanted or type(value) is not type(wanted)):
            raise self.error(key, f"{json.dumps(wanted)}, the only value this program implements")

    def strings(self, key: str, allowed: Mapping[str, bool], count: int) -> tuple[bool, ...]:
        """A list (or, of one-letter names, a string) of `count` names out of `allowed`, as their booleans."""
        value = self.values[key]
        names = "/".join(allowed)
        if not isinstance(value, (list, str)) or any(not isinstance(v, str) or v not in allowed for v in value):
            raise self.error(key, f"{count} entries out of {names}")
        if len(value) != count:
            raise CheckpointError(f"{self.source}: {key} has {len(value)} entries, expected num_hidden_layers = {count}")
        return tuple(allowed[v] for v in value)


def read_config(path: str | Path, latent_norm_eps: float = 1e-6) -> ModelSpec:
    """The model's shape from config.json (and the end-of-sequence ids of generation_config.json).

    Args:
        path: a model directory, or its config.json.
        latent_norm_eps: epsilon of q_a_layernorm and kv_a_layernorm, which no released config names: 1e-6 is what transformers 5.24.0
            computes, 1e-5 what vLLM and SGLang compute.

    Raises:
        CheckpointError: key, what it holds and what was expected.
    """
    path = Path(path)
    directory, file = (path.parent, path) if path.name.endswith(".json") else (path, path / CONFIG_FILE)
    check_directory(directory)
    fields = _Fields(read_json_object(file), str(file))
    _check_model_type(fields)
    _check_fixed(fields)
    spec = _spec(fields, latent_norm_eps, _eos_ids(fields, directory))
    _check_consistency(spec, fields)
    return spec


def _check_model_type(fields: _Fields) -> None:
    value = fields.values.get("model_type")
    if value == "glm5_next":
        raise CheckpointError(
            f"{fields.source}: model_type is glm5_next, which is GLM-5.3-Flash, another model (linear attention, hyper-connections); "
            f"expected {MODEL_TYPE} (GLM-5, 5.1, 5.2, 5.3)"
        )
    if value != MODEL_TYPE:
        raise fields.error("model_type", f"{json.dumps(MODEL_TYPE)} (GLM-5, 5.1, 5.2, 5.3)")


def _check_fixed(fields: _Fields) -> None:
    fields.fixed("hidden_act", "silu")
    fields.fixed("scoring_func", "sigmoid")
    fields.fixed("topk_method", "noaux_tc")
    fields.fixed("attention_bias", False)
    fields.fixed("moe_layer_freq", 1)
    # transformers ignores these two and always interleaves; a file that says false was made for other code.
    fields.fixed("rope_interleave", True)
    fields.fixed("indexer_rope_interleave", True)
    quantisation = fields.values.get("quantization_config")
    if quantisation is None:
        return
    if not isinstance(quantisation, dict):
        raise fields.error("quantization_config", "an object")
    inner = _Fields(quantisation, f"{fields.source}: quantization_config")
    if quantisation.get("quant_method") != "fp8":
        raise inner.error("quant_method", '"fp8", the released format; other formats must be converted to BF16 first')
    inner.fixed("fmt", "e4m3")
    if quantisation.get("weight_block_size") != [SCALE_BLOCK, SCALE_BLOCK]:
        raise inner.error("weight_block_size", f"[{SCALE_BLOCK}, {SCALE_BLOCK}]")


def _rope_theta(fields: _Fields) -> float:
    parameters = fields.values.get("rope_parameters")
    if parameters is None:
        parameters = fields.values.get("rope_scaling") or {}
    if not isinstance(parameters, dict):
        raise fields.error("rope_parameters", "an object with rope_theta")
    rope = _Fields(parameters, f"{fields.source}: rope_parameters")
    for key in ("rope_type", "type"):
        if rope.has(key) and parameters[key] != "default":
            raise rope.error(key, '"default": scaled rotary embeddings are not implemented, and no released GLM-5.x uses them')
    if rope.has("rope_theta"):
        return rope.number("rope_theta", 1.0, 1e12)
    if fields.has("rope_theta"):
        return fields.number("rope_theta", 1.0, 1e12)
    raise CheckpointError(
        f"{fields.source}: neither rope_parameters.rope_theta nor rope_theta is given; there is no safe default "
        "(GLM-5 and 5.1 use 1e6, GLM-5.2 and 5.3 use 8e6)"
    )


def _layer_is_full(fields: _Fields, layers: int) -> tuple[bool, ...]:
    """True where a layer has an indexer of its own."""
    if fields.has("indexer_types"):
        full, key = fields.strings("indexer_types", {k: v for k, v in _FULL_SHARED.items() if len(k) > 1}, layers), "indexer_types"
    elif fields.has("index_topk_pattern"):
        full, key = fields.strings("index_topk_pattern", _FULL_SHARED, layers), "index_topk_pattern"
    else:
        frequency = max(fields.integer("index_topk_freq", 0, _LAYERS_MAX, default=1), 1)
        offset = fields.integer("index_skip_topk_offset", 0, _LAYERS_MAX, default=2)
        full, key = tuple(max(i - offset + 1, 0) % frequency == 0 for i in range(layers)), "index_skip_topk_offset"
    if not full[0]:
        raise fields.error(key, "a schedule whose layer 0 is full: a shared layer takes the selection of an earlier full one")
    return full


def _layer_is_sparse(fields: _Fields, layers: int) -> tuple[bool, ...]:
    """True where a layer's MLP is a mixture of experts."""
    if fields.has("mlp_layer_types"):
        return fields.strings("mlp_layer_types", {"dense": False, "sparse": True}, layers)
    dense = fields.integer("first_k_dense_replace", 0, _LAYERS_MAX)
    return tuple(i >= dense for i in range(layers))


def _eos_list(fields: _Fields, vocab_size: int) -> tuple[int, ...]:
    value = fields.values.get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if any(not isinstance(i, int) or isinstance(i, bool) or not 0 <= i < vocab_size for i in ids):
        raise fields.error("eos_token_id", f"a token id or a list of ids from 0 to {vocab_size - 1}")
    return tuple(ids)


def _eos_ids(fields: _Fields, directory: Path) -> tuple[int, ...]:
    """Ids that end a text: config.json's, then those only generation_config.json has. Empty: only length and stop strings end it."""
    vocab_size = fields.integer("vocab_size", 1, _WIDTH_MAX)
    ids = _eos_list(fields, vocab_size)
    extra = directory / GENERATION_FILE
    if extra.exists():
        ids += _eos_list(_Fields(read_json_object(extra), str(extra)), vocab_size)
    return tuple(dict.fromkeys(ids))


@dataclass(frozen=True)
class GenerationDefaults:
    """Sampling settings that a checkpoint's generation_config.json suggests; None where it says nothing. Temperature 0 is greedy."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


def read_generation_config(path: str | Path) -> GenerationDefaults:
    """The suggestions of generation_config.json in a model directory; all None if there is no such file. Raises `CheckpointError`."""
    file = Path(path) / GENERATION_FILE
    if not file.exists():
        return GenerationDefaults()
    fields = _Fields(read_json_object(file), str(file))
    limits = {"temperature": (0.0, 1e3), "top_p": (1e-9, 1.0), "min_p": (0.0, 1.0), "repetition_penalty": (1e-9, 1e3)}
    numbers = {key: fields.number(key, *limit) for key, limit in limits.items() if fields.has(key)}
    if fields.values.get("do_sample") is False:
        numbers["temperature"] = 0.0
    return GenerationDefaults(top_k=fields.integer("top_k", 0, _WIDTH_MAX) if fields.has("top_k") else None, **numbers)


def _spec(fields: _Fields, latent_norm_eps: float, eos_token_ids: tuple[int, ...]) -> ModelSpec:
    def width(key: str) -> int:
        return fields.integer(key, 1, _WIDTH_MAX)

    layers = fields.integer("num_hidden_layers", 1, _LAYERS_MAX)
    if fields.has("layer_types"):
        fields.strings("layer_types", dict.fromkeys(_DSA_LAYER_TYPES, True), layers)
    if fields.has("n_routed_experts") and fields.has("num_experts") and fields.values["n_routed_experts"] != fields.values["num_experts"]:
        raise fields.error("num_experts", f"n_routed_experts = {json.dumps(fields.values['n_routed_experts'])}, of which it is an alias")
    experts_key = "num_experts" if fields.has("num_experts") and not fields.has("n_routed_experts") else "n_routed_experts"
    return ModelSpec(
        vocab_size=width("vocab_size"),
        hidden_size=width("hidden_size"),
        n_layers=layers,
        n_heads=width("num_attention_heads"),
        q_lora_rank=width("q_lora_rank"),
        kv_lora_rank=width("kv_lora_rank"),
        qk_nope_head_dim=width("qk_nope_head_dim"),
        qk_rope_head_dim=width("qk_rope_head_dim"),
        v_head_dim=width("v_head_dim"),
        dense_width=width("intermediate_size"),
        expert_width=width("moe_intermediate_size"),
        n_routed_experts=width(experts_key),
        n_experts_per_tok=width("num_experts_per_tok"),
        n_shared_experts=width("n_shared_experts"),
        n_group=fields.integer("n_group", 1, _WIDTH_MAX, default=1),
        topk_group=fields.integer("topk_group", 1, _WIDTH_MAX, default=1),
        norm_topk_prob=fields.boolean("norm_topk_prob", default=True),
        routed_scaling_factor=fields.number("routed_scaling_factor", 0.0, 1e6),
        index_n_heads=width("index_n_heads"),
        index_head_dim=width("index_head_dim"),
        index_topk=width("index_topk"),
        rope_theta=_rope_theta(fields),
        rms_norm_eps=fields.number("rms_norm_eps", 0.0, 1.0),
        latent_norm_eps=latent_norm_eps,
        max_position_embeddings=fields.integer("max_position_embeddings", 1, 1 << 30),
        layer_is_full=_layer_is_full(fields, layers),
        layer_is_sparse=_layer_is_sparse(fields, layers),
        n_mtp_layers=fields.integer("num_nextn_predict_layers", 0, 1, default=0),
        eos_token_ids=eos_token_ids,
        tie_word_embeddings=fields.boolean("tie_word_embeddings", default=False),
    )


def _check_consistency(spec: ModelSpec, fields: _Fields) -> None:
    """Relations between keys that the forward pass relies on. `head_dim` is ignored, as in transformers: released files disagree on it."""
    if spec.qk_rope_head_dim % 2:
        raise fields.error("qk_rope_head_dim", "an even number: rotary embedding turns pairs")
    if spec.index_head_dim < spec.qk_rope_head_dim:
        raise fields.error("index_head_dim", f"at least qk_rope_head_dim = {spec.qk_rope_head_dim}: its first columns are rotated")
    if fields.has("qk_head_dim") and fields.values["qk_head_dim"] != spec.qk_head_dim:
        raise fields.error("qk_head_dim", f"qk_nope_head_dim + qk_rope_head_dim = {spec.qk_head_dim}")
    if fields.has("num_key_value_heads") and fields.values["num_key_value_heads"] != spec.n_heads:
        raise fields.error("num_key_value_heads", f"num_attention_heads = {spec.n_heads}")
    if spec.n_experts_per_tok > spec.n_routed_experts:
        raise fields.error("num_experts_per_tok", f"at most the number of routed experts, {spec.n_routed_experts}")
    if spec.n_routed_experts % spec.n_group:
        raise fields.error("n_group", f"a divisor of the number of routed experts, {spec.n_routed_experts}")
    if spec.topk_group > spec.n_group:
        raise fields.error("topk_group", f"at most n_group = {spec.n_group}")
    per_group = spec.n_routed_experts // spec.n_group
    if spec.n_group > 1 and per_group < 2:
        raise fields.error("n_group", "at least two experts a group: a group is scored by its two best")
    if spec.topk_group * per_group < spec.n_experts_per_tok:
        raise fields.error("topk_group", f"enough groups of {per_group} experts for num_experts_per_tok = {spec.n_experts_per_tok}")


def _setting(default: Any, text: str, **extra: Any) -> Any:
    """A field whose metadata the command line reads: `help`, and where given `unit` and `choices`."""
    return field(default=default, metadata={"help": text, **extra})


MTP_DEPTH_MAX = 5  # drafts of a step


@dataclass(frozen=True)
class EngineConfig:
    """Settings of an engine. The command line takes names, defaults, units and help from the fields. Raises `InputError` on a bad value."""

    runtime: str = _setting("auto", "HIP runtime; auto: rocm if a device answers, else cuda, else cpu.", choices=("auto", "rocm", "cuda", "cpu"))
    devices: tuple[int, ...] = _setting((0,), "Device number, as `glm53 devices` lists it; two with a comma share the model: 0,1.")
    p2p: str = _setting(
        "auto",
        "Between two devices: auto uses peer access where it passes its check, else copies through host memory.",
        choices=("auto", "on", "off"),
    )
    dtype: str = _setting("bf16", "Type of activations and history rows; f32 is for parity with transformers.", choices=("bf16", "f32"))
    weights: str = _setting(
        "auto",
        "Format of weight matrices: auto is bf16 with dtype bf16, else as stored (f32 for FP8); q8q4: routed experts 4 bits, the others 8.",
        choices=WEIGHT_SETTINGS,
    )
    latent_norm_eps: float = _setting(1e-6, "Epsilon of the two latent norms: 1e-6 as transformers, 1e-5 as vLLM and SGLang.")
    prefill_chunk_rows: int = _setting(512, "Prompt tokens computed at once.", unit="tokens")
    extent_rows: int = _setting(256, "Rows of one history extent, a multiple of 64.", unit="rows")
    context_rows_max: int = _setting(0, "Longest history of a session, prompt and output; 0: the model's limit.", unit="tokens")
    sessions_max: int = _setting(1, "Sessions that may be open at once.", unit="sessions")
    kv_tier: str = _setting(
        "host", "Where histories live: host RAM behind a hot cache on the device, or resident on the device.", choices=("host", "resident")
    )
    kv_format: str = _setting(
        "auto",
        "Format of history rows: auto is f32 with dtype f32, else q8g64 where the widths allow it, else bf16.",
        choices=("auto", "q8g64", "bf16", "f32"),
    )
    hot_rows: int = _setting(32768, "Rows per session and layer that the device keeps of a history in host RAM, its ring included.", unit="rows")
    host_kv_gib: float = _setting(
        0.0,
        "Host RAM page-locked for histories at start, for each device of a pair so much, rounded up to whole pieces (--host-chunk-mib at most); "
        "0: piece by piece as they grow.",
        unit="GiB",
    )
    host_memory: str = _setting("register", "How host RAM is page-locked: hipHostRegister or hipHostMalloc.", choices=("register", "hostmalloc"))
    host_chunk_mib: int = _setting(256, "Size of one page-locked piece of host RAM.", unit="MiB")
    mtp: str = _setting(
        "0",
        "Tokens that the checkpoint's MTP layer drafts for each step to verify, 0 to 5; auto: as many as pay, by acceptance and step times. "
        "The output is the same.",
        choices=("0", "1", "2", "3", "4", "5", "auto"),
    )
    graphs: bool = _setting(True, "Record decode steps as graphs and replay them; without, every kernel is launched. The output is the same.")
    check_pair: bool = _setting(False, "Compare what both devices of a pair hold after every exchange, for debugging; slow.")
    check_weights: bool = _setting(False, "Look for NaN and infinity in every tensor before loading.")

    def __post_init__(self) -> None:
        for item in dataclasses.fields(self):
            value, wanted = getattr(self, item.name), type(item.default)
            if item.name == "mtp" and type(value) is int:
                value = str(value)
                object.__setattr__(self, item.name, value)
            if wanted is tuple and isinstance(value, (int, list)) and not isinstance(value, bool):
                value = (value,) if isinstance(value, int) else tuple(value)
                object.__setattr__(self, item.name, value)
            if wanted is float and type(value) is int:
                object.__setattr__(self, item.name, float(value))
            elif type(value) is not wanted:
                raise InputError(f"{item.name} is {value!r} ({type(value).__name__}), expected {wanted.__name__}")
            choices = item.metadata.get("choices")
            if choices and value not in choices:
                raise InputError(f"{item.name} is {value!r}, expected one of {', '.join(choices)}")
        if self.weights == "f32" and self.dtype != "f32":
            raise InputError(f"weights is f32, expected auto, q8q4 or bf16 with dtype {self.dtype}; f32 weights need dtype f32")
        self._check_devices()
        self._range("latent_norm_eps", 1e-12, 1e-2)
        self._range("prefill_chunk_rows", 1, 1 << 16)
        self._range("extent_rows", 64, 1 << 20)
        if self.extent_rows % 64:
            raise InputError(f"extent_rows is {self.extent_rows}, expected a multiple of 64 (rows are copied in groups of 64)")
        self._range("context_rows_max", 0, 1 << 30)
        self._range("sessions_max", 1, 1 << 16)
        self._range("hot_rows", 65, 1 << 24)
        self._range("host_kv_gib", 0, 1 << 20)
        self._range("host_chunk_mib", 2, 1 << 20)
        if self.kv_format not in ("auto", "q8g64", self.dtype):
            raise InputError(f"kv_format is {self.kv_format}, expected auto, q8g64 or {self.dtype} with dtype {self.dtype}")

    @property
    def drafts_max(self) -> int:
        """Drafts of a step at most."""
        return MTP_DEPTH_MAX if self.mtp == "auto" else int(self.mtp)

    def _check_devices(self) -> None:
        numbers = all(type(index) is int and 0 <= index <= 1023 for index in self.devices)
        if not numbers or len(self.devices) not in (1, 2) or len(set(self.devices)) != len(self.devices):
            raise InputError(
                f"devices is {self.devices!r}, expected one device number or two different ones, 0 to 1,023; "
                "next: give one (--devices 0), or two that `glm53 devices` lists (--devices 0,1)"
            )
        if self.check_pair and len(self.devices) == 1:
            raise InputError("check_pair is True, expected False with one device; it compares two, devices=(0, 1)")

    def row_format(self, spec: ModelSpec) -> RowFormat:
        """Format of history rows for a model. Raises InputError where the format cannot hold its widths."""
        if self.kv_format == "auto":
            if self.dtype == "f32":
                return RowFormat.F32
            return RowFormat.BF16 if spec.kv_lora_rank % 64 or spec.kv_lora_rank // 64 * 2 % 16 else RowFormat.Q8G64
        row_format = RowFormat(self.kv_format)
        try:
            row_format.row_bytes(spec.kv_lora_rank, spec.qk_rope_head_dim)
        except ValueError as error:
            raise InputError(f"kv_format: {error}") from error
        return row_format

    def _range(self, name: str, low: float, high: float) -> None:
        value = getattr(self, name)
        if not low <= value <= high:  # also catches NaN
            raise InputError(f"{name} is {value}, expected {low:,} to {high:,}")

    @classmethod
    def of(cls, **options: Any) -> EngineConfig:
        """A configuration from named settings. Raises `InputError` on an unknown name, with the closest known one."""
        known = [item.name for item in dataclasses.fields(cls)]
        for name in options:
            if name not in known:
                close = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean {close[0]}?" if close else f"known settings: {', '.join(known)}"
                raise InputError(f"unknown engine setting {name!r}; {hint}")
        return cls(**options)


PRODUCT_WIDTH_MIN, PRODUCT_WIDTH_UNIT = 64, 8  # of bf16 rows in the decode products: hipsrc/kernels/wave_product.h


def check_widths(spec: ModelSpec, dtype: str) -> None:
    """Raises InputError where bf16 activations cannot run a model: each width that a decode product sums over is at least 64 and a multiple of 8."""
    widths = {
        "hidden_size": spec.hidden_size,
        "q_lora_rank": spec.q_lora_rank,
        "qk_nope_head_dim": spec.qk_nope_head_dim,
        "num_attention_heads * v_head_dim": spec.n_heads * spec.v_head_dim,
        "moe_intermediate_size": spec.expert_width,
        "intermediate_size": spec.dense_width,
    }
    bad = {name: width for name, width in widths.items() if width < PRODUCT_WIDTH_MIN or width % PRODUCT_WIDTH_UNIT}
    if dtype == "bf16" and bad:
        found = ", ".join(f"{name} {width}" for name, width in bad.items())
        raise InputError(
            f"dtype is bf16 and the model has {found}; expected widths of at least {PRODUCT_WIDTH_MIN} and multiples of {PRODUCT_WIDTH_UNIT}; "
            "next: dtype f32, which takes any width"
        )


def check_prompt(ids: Sequence[int], spec: ModelSpec, context_rows_max: int, rows: int = 0) -> None:
    """Raises InputError unless `ids` are token ids of the model that fit behind `rows` rows; a new prompt leaves room for one token.

    context_rows_max: rows of a session, 0: the model's limit.
    """
    limit = min(context_rows_max or spec.max_position_embeddings, spec.max_position_embeddings)
    if not ids:
        raise InputError("prompt: it is empty, wanted at least one token")
    bad = next((i for i in ids if not 0 <= i < spec.vocab_size), None)
    if bad is not None:
        raise InputError(f"prompt: token id {bad}, wanted ids in [0, {spec.vocab_size})")
    room = limit - rows - (rows == 0)
    if len(ids) > room:
        raise InputError(
            f"prompt: {len(ids)} tokens behind {rows}, wanted at most {room} (context_rows_max {limit}, the model's limit is "
            f"{spec.max_position_embeddings}); shorten it or open the engine with more context"
        )
