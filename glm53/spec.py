"""Element types and the frozen shape of a GLM-5.3 model.

Owns the vocabulary every other module shares: `DType` and `ModelSpec`. Imports nothing of this package but the errors. A model is one
`ModelSpec` value; after loading has compared every tensor with it, code uses its attributes and never looks at config.json again.
Source of every formula: config.json of the released checkpoints read by transformers 5.24.0's rules.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class DType(enum.Enum):
    """Element type of a buffer: name and bytes per element."""

    F32 = ("f32", 4)
    BF16 = ("bf16", 2)
    F8E4M3 = ("f8e4m3", 1)
    I32 = ("i32", 4)
    I64 = ("i64", 8)
    U8 = ("u8", 1)
    U16 = ("u16", 2)
    U32 = ("u32", 4)
    U64 = ("u64", 8)

    def __init__(self, label: str, item_bytes: int):
        self.label = label
        self.item_bytes = item_bytes


class RowFormat(enum.Enum):
    """How a history row [latent | rope] lies in memory, little-endian and contiguous. Sizes at latent 512, rope 64.

    F32: 2,304 B, parity. BF16: 1,152 B. Q8G64: 656 B: latent i8, one f16 scale per 64 latent values, rope bf16.
    """

    F32 = "f32"
    BF16 = "bf16"
    Q8G64 = "q8g64"

    def row_bytes(self, latent: int, rope: int) -> int:
        """Bytes of a row. Raises ValueError where the format cannot hold these widths (rows are multiples of 16 bytes)."""
        if self is RowFormat.Q8G64:
            if latent % 64:
                raise ValueError(f"q8g64 rows need a latent width that is a multiple of 64, got {latent}; use f32 or bf16 rows")
            size = latent + latent // 64 * 2 + rope * 2
        else:
            size = (latent + rope) * (4 if self is RowFormat.F32 else 2)
        if size % 16:
            raise ValueError(f"{self.value} rows of latent {latent} and rope {rope} are {size} bytes, wanted a multiple of 16")
        return size


class WeightFormat(enum.IntEnum):
    """How the values of a weight matrix [n, k] are stored (hipsrc/kernels/weight_format.h). The number is what kernels are given.

    F32, BF16: as they are. Q8G64: int8 codes, one f16 scale per row and 64 columns, 8.25 bits a weight. Q4G64: codes of 4 bits, value = (code - 8) x
    scale, 4.25 bits a weight. Quantised matrices have k a multiple of 64.
    """

    F32 = 0
    BF16 = 1
    Q8G64 = 2
    Q4G64 = 3

    @property
    def label(self) -> str:
        return self.name.lower()

    @property
    def bits(self) -> int:
        """Bits of one code."""
        return (32, 16, 8, 4)[self]

    @property
    def quantised(self) -> bool:
        return self in (WeightFormat.Q8G64, WeightFormat.Q4G64)


class Space(enum.IntEnum):
    """Where a row reference points (docs/decisions/0003-host-tier.md): bits 0 and 1 of the reference."""

    HOT = 0
    EXTENT = 1
    STAGING = 2
    LINEAR = 3


@dataclass(frozen=True)
class Shard:
    """Which side of a stage's weights (docs/decisions/0006-pair.md): the whole, or with `count` 2 that of the owner (index 0) or the peer (1).

    Raises ValueError for any other count or index.
    """

    index: int = 0
    count: int = 1

    def __post_init__(self) -> None:
        if self.count not in (1, 2) or not 0 <= self.index < self.count:
            raise ValueError(f"shard {self.index} of {self.count}, wanted 0 of 1, 0 of 2 or 1 of 2")

    def of(self, size: int, first: int) -> range:
        """This side's of `size` items, of which the owner of a pair has the first `first`."""
        return range(size) if self.count == 1 else (range(first), range(first, size))[self.index]

    def rows_of(self, rows: int, extent_rows: int) -> int:
        """How many of the first `rows` rows lie in extents of this side, which are those whose number is `index` modulo `count`."""
        if self.count == 1:
            return rows
        turns, rest = divmod(rows, extent_rows * self.count)
        return turns * extent_rows + min(max(rest - self.index * extent_rows, 0), extent_rows)


WHOLE = Shard()

Offsets = tuple[int, int, int, int]  # bytes added to the payload of a row reference, by Space


@dataclass(frozen=True)
class ModelSpec:
    """Shape of a `glm_moe_dsa` model. Widths in elements, counts in units of what they count.

    A history row is `kv_lora_rank + qk_rope_head_dim` values per token and layer; an index key is `index_head_dim` values per token and
    full layer.
    """

    vocab_size: int
    hidden_size: int
    n_layers: int  # main layers, the MTP layer not counted
    n_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    dense_width: int  # intermediate_size
    expert_width: int  # moe_intermediate_size
    n_routed_experts: int
    n_experts_per_tok: int
    n_shared_experts: int
    n_group: int
    topk_group: int
    norm_topk_prob: bool
    routed_scaling_factor: float
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    rope_theta: float
    rms_norm_eps: float
    latent_norm_eps: float  # of q_a_layernorm and kv_a_layernorm; transformers 1e-6, vLLM and SGLang 1e-5
    max_position_embeddings: int
    layer_is_full: tuple[bool, ...]  # True: the layer has an indexer; False: it uses the selection of the closest full layer before it
    layer_is_sparse: tuple[bool, ...]  # True: mixture of experts; False: dense MLP
    n_mtp_layers: int  # MTP layers in the checkpoint, 0 or 1
    eos_token_ids: tuple[int, ...]
    tie_word_embeddings: bool

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def row_width(self) -> int:
        """Values in one history row: normalised latent, then the rotated RoPE part."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        return self.qk_head_dim**-0.5

    @property
    def shared_width(self) -> int:
        return self.expert_width * self.n_shared_experts

    @property
    def full_layers(self) -> tuple[int, ...]:
        return tuple(i for i, full in enumerate(self.layer_is_full) if full)

    @property
    def index_plane(self) -> dict[int, int]:
        """Plane of each full layer in an index-key extent."""
        return {layer: plane for plane, layer in enumerate(self.full_layers)}
