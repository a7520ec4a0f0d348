"""A readable whole-model reference of GLM-5.3 (glm_moe_dsa) in plain numpy; shares no code with the product.

    logits = forward(config, tensors, ids)   # [T, V]; config: config.json as a dict, tensors: name -> float array

Everything is recomputed for all T tokens, in the expanded form of MLA (per-head keys and values), so that the product's
absorbed form and its caches are checked by different arithmetic. No FP8 here: pass multiplied-out weights
(scripts/make_checkpoint.py, read_checkpoint). Experts may be named one by one or packed.

`dtype` chooses the arithmetic: "f64", "f32", or "bf16": float32 rounded to bfloat16 wherever transformers 5.24 holds a
bfloat16 tensor (a matrix product's result is rounded once; the order of summation inside is numpy's). RoPE angles are
float32 products in every mode, as in transformers. Ties go to the lowest position (and the lowest expert).

Notation: T tokens, E hidden, H heads, dn/dr/dv head widths (nope, rope, value), r latent width, J indexer heads of D.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Config = Mapping[str, Any]
LAYER_NORM_EPS = 1e-6  # of the indexer's key norm, not in config.json


@dataclass
class Trace:
    """What a forward pass saw, filled when passed to `forward`. Lists are by layer."""

    hidden: list[Array] = field(default_factory=list)  # [T, E] residual after the layer
    index_scores: list[Array | None] = field(default_factory=list)  # [T, T], -inf after the diagonal; None when shared
    selected: list[Array] = field(default_factory=list)  # [T, T] bool: row t attends column n
    experts: list[Array | None] = field(default_factory=list)  # [T, k] expert ids; None when dense
    normed: Array | None = None  # [T, E] after model.norm

    def boundary_gap(self, topk: int) -> float:
        """Smallest distance between the topk-th and the next index score over all layers and rows; inf without any."""
        gaps = [np.inf]
        for scores in self.index_scores:
            if scores is not None and len(scores) > topk:
                ordered = -np.sort(-scores[topk:], axis=1)
                gaps.append(float((ordered[:, topk - 1] - ordered[:, topk]).min()))
        return min(gaps)


# --- arithmetic ----------------------------------------------------------------------------------------------------


def bf16(x: Array) -> Array:
    """Round float32 values to the nearest bfloat16 (even on ties), kept as float32."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (rounded & np.uint32(0xFFFF0000)).view(np.float32)


@dataclass(frozen=True)
class Arithmetic:
    """The number type: `wide` holds what transformers computes in float32, `r` rounds to the model's type."""

    dtype: str

    def __post_init__(self) -> None:
        if self.dtype not in ("f64", "f32", "bf16"):
            raise ValueError(f"dtype is {self.dtype!r}, expected f64, f32 or bf16")

    def wide(self, x: Array) -> Array:
        return x.astype(np.float64 if self.dtype == "f64" else np.float32)

    def r(self, x: Array) -> Array:
        return bf16(x) if self.dtype == "bf16" else self.wide(x)


class Weights:
    """Tensors below a name prefix, in the arithmetic's type."""

    def __init__(self, tensors: Mapping[str, Array], arithmetic: Arithmetic, prefix: str = "") -> None:
        self.tensors, self.arithmetic, self.prefix = tensors, arithmetic, prefix

    def below(self, prefix: str) -> "Weights":
        return Weights(self.tensors, self.arithmetic, f"{self.prefix}{prefix}.")

    def has(self, name: str) -> bool:
        return self.prefix + name in self.tensors

    def get(self, name: str) -> Array:
        return self.arithmetic.r(self.tensors[self.prefix + name])

    def exact(self, name: str) -> Array:
        """A tensor that stays float32 in a bf16 model."""
        return self.arithmetic.wide(self.tensors[self.prefix + name])


def linear(a: Arithmetic, x: Array, w: Array) -> Array:
    """[.., out] = x [.., in] times the transpose of w [out, in]."""
    return a.r(x @ w.T)


def rms_norm(a: Arithmetic, x: Array, w: Array, eps: float) -> Array:
    """Each row of x [T, n] over its root mean square, rounded, then times w [n]."""
    return a.r(w * a.r(x / np.sqrt((x * x).mean(-1, keepdims=True) + a.wide(np.array(eps)))))


def layer_norm(a: Arithmetic, x: Array, w: Array, b: Array) -> Array:
    """LayerNorm of x [T, n] with weight and bias [n], rounded at the end."""
    centred = x - x.mean(-1, keepdims=True)
    variance = (centred * centred).mean(-1, keepdims=True)
    return a.r(centred / np.sqrt(variance + a.wide(np.array(LAYER_NORM_EPS))) * w + b)


def softmax(x: Array) -> Array:
    """Over the last axis; -inf gives 0."""
    e: Array = np.exp(x - x.max(-1, keepdims=True))
    e /= e.sum(-1, keepdims=True)
    return e


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def rope_angles(config: Config, count: int) -> Array:
    """[count, dr/2] float32 angles: position times theta^(-2i/dr).

    As torch rounds: the power to float32, its reciprocal in float32, the product in float32. The power is computed in
    float64 because numpy's float32 power is off by one unit for half of the exponents, 6e-5 rad at position 1,500.
    """
    width, theta = config["qk_rope_head_dim"], config["rope_parameters"]["rope_theta"]
    power = np.float64(theta) ** (np.arange(0, width, 2) / width)
    inverse = np.float32(1) / power.astype(np.float32)
    angles: Array = np.arange(count, dtype=np.float32)[:, None] * inverse
    return angles


def rotate(a: Arithmetic, x: Array, angles: Array) -> Array:
    """Rotate the pairs (x[2i], x[2i+1]) of x [T, .., dr] by angles [T, dr/2]."""
    shape = (len(angles),) + (1,) * (x.ndim - 2) + (-1,)
    cos, sin = (a.r(f(a.wide(angles))).reshape(shape) for f in (np.cos, np.sin))
    even, odd = x[..., 0::2], x[..., 1::2]
    out = np.empty_like(x)
    out[..., 0::2] = a.r(a.r(even * cos) - a.r(odd * sin))
    out[..., 1::2] = a.r(a.r(odd * cos) + a.r(even * sin))
    return out


# --- layers --------------------------------------------------------------------------------------------------------


def index_scores(a: Arithmetic, config: Config, w: Weights, h: Array, qr: Array, angles: Array) -> Array:
    """[T, T] scores of the lightning indexer: sum over heads of weight times relu(q . k); -inf after the diagonal.

    h [T, E] normed hidden state; qr [T, q_lora] normed query latent. RoPE turns the first dr of the D columns.
    """
    heads, width, dr, count = config["index_n_heads"], config["index_head_dim"], config["qk_rope_head_dim"], len(h)
    q = linear(a, qr, w.get("wq_b.weight")).reshape(count, heads, width)
    k = layer_norm(a, linear(a, h, w.get("wk.weight")), w.get("k_norm.weight"), w.get("k_norm.bias"))
    q = np.concatenate([rotate(a, q[..., :dr], angles), q[..., dr:]], -1)
    k = np.concatenate([rotate(a, k[..., :dr], angles), k[..., dr:]], -1)
    gate = linear(a, h, w.get("weights_proj.weight")) * a.wide(np.array(heads**-0.5))
    scale = a.wide(np.array(width**-0.5))
    scores = np.zeros((count, count), dtype=h.dtype)
    for j in range(heads):
        scores += gate[:, j : j + 1] * np.maximum(q[:, j] @ k.T * scale, 0)
    scores[np.triu_indices(count, 1)] = -np.inf
    return scores


def select(scores: Array, topk: int) -> Array:
    """[T, T] bool: the topk largest of each row, ties to the lowest position, never a masked one."""
    order = np.argsort(-scores, axis=1, kind="stable")[:, :topk]
    chosen = np.zeros(scores.shape, dtype=bool)
    np.put_along_axis(chosen, order, True, axis=1)
    return chosen & (scores > -np.inf)


def attend(a: Arithmetic, config: Config, w: Weights, q: Array, c: Array, selected: Array, eps: float) -> Array:
    """[T, E]: attention of q [T, H, dn+dr] (rotated) over c [T, r+dr] (key rope rotated), within `selected` [T, T]."""
    heads, dn, dv, rank = (config[k] for k in ("num_attention_heads", "qk_nope_head_dim", "v_head_dim", "kv_lora_rank"))
    latent = rms_norm(a, c[:, :rank], w.get("kv_a_layernorm.weight"), eps)
    kv = linear(a, latent, w.get("kv_b_proj.weight")).reshape(len(c), heads, dn + dv)
    scale = a.wide(np.array((dn + config["qk_rope_head_dim"]) ** -0.5))
    out = np.empty((len(c), heads, dv), dtype=c.dtype)
    for i in range(heads):
        key = np.concatenate([kv[:, i, :dn], c[:, rank:]], -1)
        scores = a.r(a.r(q[:, i] @ key.T) * scale)
        p = a.r(softmax(np.where(selected, scores, -np.inf)))
        out[:, i] = a.r(p @ kv[:, i, dn:])
    return linear(a, out.reshape(len(c), -1), w.get("o_proj.weight"))


def attention(
    a: Arithmetic, config: Config, w: Weights, h: Array, angles: Array, selected: Array | None, eps: float
) -> tuple[Array, Array, Array | None]:
    """One attention block on the normed h [T, E]; `selected` is None on a full layer, else the set to share.

    Returns the output [T, E], the selected set [T, T] and the index scores [T, T] (None when shared).
    """
    dn, dr, rank = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["kv_lora_rank"]
    qr = rms_norm(a, linear(a, h, w.get("q_a_proj.weight")), w.get("q_a_layernorm.weight"), eps)
    q = linear(a, qr, w.get("q_b_proj.weight")).reshape(len(h), -1, dn + dr)
    c = linear(a, h, w.get("kv_a_proj_with_mqa.weight"))
    q = np.concatenate([q[..., :dn], rotate(a, q[..., dn:], angles)], -1)
    c = np.concatenate([c[:, :rank], rotate(a, c[:, rank:], angles)], -1)
    scores = None
    if selected is None:
        scores = index_scores(a, config, w.below("indexer"), h, qr, angles)
        selected = select(scores, config["index_topk"])
    return attend(a, config, w, q, c, selected, eps), selected, scores


def gated(a: Arithmetic, x: Array, gate: Array, up: Array, down: Array) -> Array:
    """silu(x gate) * (x up), times down; x [T, E], gate and up [I, E], down [E, I]."""
    g = linear(a, x, gate)
    return linear(a, a.r(a.r(g * sigmoid(g)) * linear(a, x, up)), down)


def mlp(a: Arithmetic, w: Weights, x: Array) -> Array:
    return gated(a, x, *(w.get(f"{part}_proj.weight") for part in ("gate", "up", "down")))


def expert(w: Weights, number: int) -> tuple[Array, Array, Array]:
    """gate, up and down of one routed expert, from either naming."""
    if w.has("experts.gate_up_proj"):
        gate_up = w.tensors[w.prefix + "experts.gate_up_proj"][number]
        down = w.tensors[w.prefix + "experts.down_proj"][number]
        gate, up = np.split(w.arithmetic.r(gate_up), 2)
        return gate, up, w.arithmetic.r(down)
    e = w.below(f"experts.{number}")
    return e.get("gate_proj.weight"), e.get("up_proj.weight"), e.get("down_proj.weight")


def route(a: Arithmetic, config: Config, w: Weights, x: Array) -> tuple[Array, Array]:
    """Expert ids [T, k] and their weights [T, k]; chosen by biased scores, weighted by the plain ones."""
    score = sigmoid(x @ w.exact("gate.weight").T)
    biased = score + w.exact("gate.e_score_correction_bias")
    groups, keep = config["n_group"], config["topk_group"]
    if groups > 1:
        by_group = biased.reshape(len(x), groups, -1)
        best = np.sort(by_group, axis=-1)[..., -2:].sum(-1)
        dropped = np.argsort(-best, axis=-1, kind="stable")[:, keep:]
        np.put_along_axis(by_group, dropped[..., None], -np.inf, axis=1)
        biased = by_group.reshape(biased.shape)
    ids = np.argsort(-biased, axis=-1, kind="stable")[:, : config["num_experts_per_tok"]]
    weights = np.take_along_axis(score, ids, axis=-1)
    if config["norm_topk_prob"]:
        weights = weights / (weights.sum(-1, keepdims=True) + a.wide(np.array(1e-20)))
    return ids, weights * a.wide(np.array(config["routed_scaling_factor"]))


def moe(a: Arithmetic, config: Config, w: Weights, x: Array) -> tuple[Array, Array]:
    """[T, E] routed experts plus the shared one, and the expert ids [T, k]. The routed sum is rounded once."""
    ids, weights = route(a, config, w, x)
    total = np.zeros_like(x)
    for number in np.unique(ids):
        rows, slots = np.nonzero(ids == number)
        total[rows] += gated(a, x[rows], *expert(w, number)) * weights[rows, slots, None]
    return a.r(a.r(total) + mlp(a, w.below("shared_experts"), x)), ids


def forward(
    config: Config,
    tensors: Mapping[str, Array],
    ids: Sequence[int],
    *,
    dtype: str = "f64",
    latent_eps: float = 1e-6,
    last_rows: int | None = None,
    trace: Trace | None = None,
) -> Array:
    """Logits [T, V] of one sequence, or of its `last_rows` rows. `latent_eps` is that of the two MLA latent norms."""
    a = Arithmetic(dtype)
    w, eps, trace = Weights(tensors, a), config["rms_norm_eps"], trace or Trace()
    angles = rope_angles(config, len(ids))
    x = a.r(np.asarray(tensors["model.embed_tokens.weight"])[np.asarray(ids)])
    selected: Array | None = None
    for i in range(config["num_hidden_layers"]):
        layer = w.below(f"model.layers.{i}")
        share = selected if config["indexer_types"][i] == "shared" else None
        h = rms_norm(a, x, layer.get("input_layernorm.weight"), eps)
        y, selected, scores = attention(a, config, layer.below("self_attn"), h, angles, share, latent_eps)
        x = a.r(x + y)
        h = rms_norm(a, x, layer.get("post_attention_layernorm.weight"), eps)
        experts = None
        if config["mlp_layer_types"][i] == "dense":
            y = mlp(a, layer.below("mlp"), h)
        else:
            y, experts = moe(a, config, layer.below("mlp"), h)
        x = a.r(x + y)
        trace.hidden.append(x)
        trace.index_scores.append(scores)
        trace.selected.append(selected)
        trace.experts.append(experts)
    trace.normed = rms_norm(a, x, w.get("model.norm.weight"), eps)
    rows = trace.normed if last_rows is None else trace.normed[-last_rows:]
    return linear(a, rows, w.get("lm_head.weight"))
