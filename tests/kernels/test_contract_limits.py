"""Wrappers of selection, attention, experts and sampling refuse what their kernels do not take, before anything is launched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from glm53.check.reference_sampling import Draw
from glm53.hip import Array
from glm53.mem.extents import ExtentShape
from glm53.ops import attention, experts, hotcache, sampling, selection
from glm53.ops.contract import ContractError
from glm53.ops.matrix import Matrix
from glm53.spec import WHOLE, DType, Offsets, RowFormat, Shard, WeightFormat

F32, BF16, I32, U8, U64 = DType.F32, DType.BF16, DType.I32, DType.U8, DType.U64
Make = Callable[..., Array]


def score(
    make: Make,
    heads: int = 4,
    dim: int = 8,
    context: int = 64,
    plane: int = 0,
    row_bytes: int = 32,
    gate_heads: int | None = None,
    share: Shard = WHOLE,
) -> None:
    query, gate = make(F32, 2, heads, dim), make(F32, 2, gate_heads or heads)
    positions, shape = make(I32, 2), ExtentShape(64, 2, row_bytes)
    stream, tables, sessions, scores = query.device.default_stream, make(U64, 1, 1), make(I32, 2), make(F32, 2, 70)
    selection.index_score(stream, query, gate, tables, sessions, positions, scores, shape, plane=plane, context=context, share=share)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"heads": 65}, "heads is 65"),
        ({"dim": 132, "row_bytes": 528}, "dim 132"),
        ({"heads": 64, "dim": 128, "row_bytes": 512}, "heads \\* dim is 8192"),
        ({"row_bytes": 48}, "row_bytes is 48"),
        ({"plane": 2}, "plane is 2"),
        ({"context": 71}, "context is 71"),
        ({"context": 65}, "needs 2 extents"),
        ({"context": 199, "share": Shard(1, 2)}, "context is 199 with 71 keys, expected at least 1 and at most columns=70"),
        ({"context": 130, "share": Shard(0, 2)}, "context 130 needs 2 extents"),
        ({"gate_heads": 5}, "gate dim 1 is 5, expected heads=4"),
    ],
)
def test_index_score(make: Make, change: dict[str, Any], text: str) -> None:
    with pytest.raises(ContractError, match=text):
        score(make, **change)


@pytest.mark.parametrize(
    ("latent", "head_dim", "rope_offset", "text"),
    [
        (516, 8, 0, "latent is 516"),
        (512, 80, 0, "latent \\+ rope is 592"),
        (16, 8, 9, "rope_offset is 9"),
        (17, 8, 0, "f32 rows of latent 17 and rope 8 are 100 bytes"),
    ],
)
def test_attend(make: Make, latent: int, head_dim: int, rope_offset: int, text: str) -> None:
    q_latent = make(F32, 1, 2, latent)
    with pytest.raises(ContractError, match=text):
        attention.attend(
            q_latent.device.default_stream,
            q_latent,
            make(F32, 1, 2, head_dim),
            make(U64, 1, 4),
            make(I32, 1),
            make(F32, 1, 2, latent),
            offsets=(0, 0, 0, 0),
            row_format=RowFormat.F32,
            rope_offset=rope_offset,
            scale=1.0,
        )


@pytest.mark.parametrize(
    ("row_format", "offsets", "over_query", "text"),
    [
        (RowFormat.F32, (0, 0, 0, 0), True, "out and q_latent overlap"),
        (RowFormat.BF16, (0, 0, 0, 0), False, "no variant f32_bf16; existing: bf16_bf16, bf16_q8g64, f32_f32, f32_q8g64"),
        (RowFormat.Q8G64, (0, 0, 0, 0), False, "multiple of 64, got 16"),
        (RowFormat.F32, (0, 8, 0, 0), False, "multiples of 16"),
        (RowFormat.F32, (0, 0, 0, 1 << 64), False, "below 2\\^64"),
    ],
)
def test_attend_rows(make: Make, row_format: RowFormat, offsets: Offsets, over_query: bool, text: str) -> None:
    q_latent, q = make(F32, 1, 2, 16), make(F32, 1, 2, 16)
    out = q_latent if over_query else make(F32, 1, 2, 16)
    stream, plan, counts = q.device.default_stream, make(U64, 1, 4), make(I32, 1)
    with pytest.raises(ContractError, match=text):
        attention.attend(stream, q_latent, q, plan, counts, out, offsets=offsets, row_format=row_format, rope_offset=8, scale=1.0)


@pytest.mark.parametrize(
    ("count", "slots", "n_group", "topk_group", "text"),
    [
        (257, 2, 1, 1, "experts is 257"),
        (16, 2, 3, 1, "n_group is 3"),
        (16, 2, 4, 5, "topk_group is 5"),
        (16, 5, 4, 1, "slots is 5, expected at most 4"),
        (64, 17, 1, 1, "slots is 17, expected at most 16"),
    ],
)
def test_router(make: Make, count: int, slots: int, n_group: int, topk_group: int, text: str) -> None:
    logits = make(F32, 2, count)
    with pytest.raises(ContractError, match=text):
        experts.router(
            logits.device.default_stream,
            logits,
            make(F32, count),
            make(I32, 2, slots),
            make(F32, 2, slots),
            n_group=n_group,
            topk_group=topk_group,
            normalise=True,
            scaling=1.0,
        )


def test_expert_products_name_the_variants_that_exist(make: Make) -> None:
    x = make(BF16, 2, 8)
    with pytest.raises(ContractError, match="no variant bf16_f32; existing: bf16_bf16, "):
        experts.expert_matmul(x.device.default_stream, x, Matrix.plain(make(F32, 4, 6, 8)), make(BF16, 2, 3, 6), (make(I32, 5), make(I32, 2, 3)))


@pytest.mark.parametrize(
    ("rows", "vocab", "tops", "text"),
    [(1, 64, 33, "top ids dim 1 is 33"), (3, 64, 4, "logits dim 0 is 3, expected at most 2"), (1, 65, 4, "logits dim 1 is 65, expected 64")],
)
def test_sample(make: Make, rows: int, vocab: int, tops: int, text: str) -> None:
    logits = make(F32, rows, vocab)
    device = logits.device
    scratch = sampling.SampleScratch.make(device, 2, 64, "check")
    outputs = make(I32, rows), make(F32, rows), (make(I32, rows, tops), make(F32, rows, tops))
    with pytest.raises(ContractError, match=text):
        sampling.sample(device.default_stream, scratch, logits, make(U8, rows, sampling.ROW_BYTES), None, *outputs)
    scratch.free()


def test_sample_masks(make: Make) -> None:
    logits = make(F32, 1, 64)
    device = logits.device
    scratch = sampling.SampleScratch.make(device, 1, 64, "check")
    outputs = make(I32, 1), make(F32, 1), None
    with pytest.raises(ContractError, match="masks dim 1 is 3, expected 2"):
        sampling.sample(device.default_stream, scratch, logits, make(U8, 1, sampling.ROW_BYTES), None, *outputs, masks=make(DType.U32, 4, 3))
    scratch.free()


@pytest.mark.parametrize(("rows", "vocab", "text"), [(0, 64, "rows_max is 0"), (1, 524_289, "vocab is 524289"), (1, 0, "vocab is 0")])
def test_sample_scratch(make: Make, rows: int, vocab: int, text: str) -> None:
    device = make(F32, 1, 1).device
    with pytest.raises(ContractError, match=text):
        sampling.SampleScratch.make(device, rows, vocab, "check")


def test_packed_rows_hold_the_ends_of_every_range() -> None:
    packed = sampling.pack_rows([(Draw(top_k=2**31 - 1, logprobs=20), 2**64 - 1, 2**32 - 1, -1), (Draw(), 0, 0, 3)])
    assert packed.shape == (2, sampling.ROW_BYTES) and packed.dtype == np.uint8
    assert packed[0, :8].tolist() == [255] * 8 and packed[1, :8].tolist() == [0] * 8
    assert packed[0, 8:16].tolist() == [255] * 8
    assert packed[1, 12:16].view(np.int32)[0] == 3 and packed[:, 40:44].view(np.int32).tolist() == [[-1], [-1]]
    masked = sampling.pack_rows([(Draw(), 0, 0, 3), (Draw(), 0, 0, 3)], [-1, 5])
    assert masked[0].tobytes() == packed[1].tobytes() and masked[1, 40:44].view(np.int32)[0] == 5


def test_costs_at_the_released_widths() -> None:
    """Flops and bytes counted by hand for one row of the released model in bf16."""
    score = selection.cost_index_score(rows=1, heads=32, dim=128, context=1000, item_bytes=2)
    assert (score.bytes, score.flops) == (2 * (32 * 128 + 1000 * 128) + 4000, 2 * 1000 * 32 * 129)
    assert selection.cost_topk(rows=2, k=2048, context=10_000).bytes == 2 * 4 * 12_048
    assert hotcache.cost_plan(rows=1, k=2048).bytes == 2048 * 12 + 8
    row = attention.cost_attend(rows=1, heads=64, latent=512, rope=64, selected=2048, item_bytes=2, row_bytes=1152)
    assert (row.bytes, row.flops) == (2 * (64 * (1024 + 64) + 2048 * 576) + 8 * 2048, 2 * 64 * 2048 * (576 + 512))
    assert experts.cost_router(rows=1, experts=256, slots=8).bytes == 4 * (256 + 16 + 256)
    assert experts.cost_expert_sort(pairs=8, experts=256).bytes == 4 * (24 + 257)
    down = experts.cost_expert_matmul(pairs=8, active_experts=8, n=6144, k=2048, item_bytes=2, format=WeightFormat.BF16)
    assert (down.bytes, down.flops) == (8 * 2 * (6144 + 2048) + 8 * 2 * 6144 * 2048, 2 * 8 * 6144 * 2048)
    assert experts.cost_expert_sum(rows=1, slots=8, width=6144, item_bytes=2).bytes == 6144 * (8 * 2 + 8) + 32
    assert sampling.cost_sample(rows=1, vocab=154_880).bytes == 619_520
