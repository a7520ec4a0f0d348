"""Wrappers of a step's attention refuse what their kernels do not take; costs counted by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from glm53.hip import Array
from glm53.ops import step_attention
from glm53.ops.contract import ContractError
from glm53.ops.matrix import Matrix
from glm53.ops.step_attention import Partials
from glm53.spec import DType, RowFormat, WeightFormat

F32, BF16, I32, U64 = DType.F32, DType.BF16, DType.I32, DType.U64
Make = Callable[..., Array]


def partials_of(make: Make, heads: int, splits: int, latent: int) -> Partials:
    return Partials(make(F32, 1, heads, splits, latent), make(F32, 1, heads, splits), make(F32, 1, heads, splits))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"latent": 520}, "latent is 520, expected at most 512"),
        ({"latent": 512, "head_dim": 80}, "latent \\+ rope is 592"),
        ({"latent": 20}, "latent is 20, expected a multiple of 8"),
        ({"rope_offset": 4}, "rope_offset is 4, expected a multiple of 8"),
        ({"rope_offset": 24}, "rope_offset is 24"),
        ({"head_dim": 12}, "head_dim is 12, expected a multiple of 8"),
        ({"k": 129}, "partials have 2 splits, expected at least 3 for k=129"),
        ({"row_format": RowFormat.BF16}, "no variant f32_bf16"),
        ({"row_format": RowFormat.Q8G64}, "q8g64 rows need a latent width that is a multiple of 64"),
        ({"latent": 64, "row_format": RowFormat.Q8G64}, "q8g64 rows of latent 64 and rope 16 are 98 bytes"),
        ({"partial_heads": 3}, "partials.partial dim 1 is 3, expected heads=2"),
    ],
)
def test_attend(make: Make, change: dict[str, object], text: str) -> None:
    given = {"latent": 16, "head_dim": 16, "rope_offset": 0, "k": 128, "row_format": RowFormat.F32, "partial_heads": 2} | change
    latent, k = int(str(given["latent"])), int(str(given["k"]))
    q_latent, q = make(F32, 1, 2, latent), make(F32, 1, 2, given["head_dim"])
    row_format = given["row_format"]
    assert isinstance(row_format, RowFormat)
    with pytest.raises(ContractError, match=text):
        step_attention.attend(
            q_latent.device.default_stream,
            q_latent,
            q,
            make(U64, 1, k),
            make(I32, 1),
            partials_of(make, int(str(given["partial_heads"])), 2, latent),
            offsets=(0, 0, 0, 0),
            row_format=row_format,
            rope_offset=int(str(given["rope_offset"])),
            scale=1.0,
        )


@pytest.mark.parametrize(
    ("latent", "columns", "splits", "text"),
    [
        (16, 24, 2, "wv dim 2 is 24, expected latent=16"),
        (520, 520, 2, "latent is 520, expected at most 512"),
        (20, 20, 2, "latent is 20, expected a multiple of 8"),
        (16, 16, 129, "partials have 129 splits, expected at most 128"),
    ],
)
def test_expand(make: Make, latent: int, columns: int, splits: int, text: str) -> None:
    wv = Matrix.plain(make(F32, 2, 24, columns))
    with pytest.raises(ContractError, match=text):
        step_attention.expand(wv.codes.device.default_stream, partials_of(make, 2, splits, latent), make(I32, 1), wv, make(BF16, 1, 2, 24))


def test_partials_hold_the_splits_of_topk(make: Make) -> None:
    device = make(F32, 1).device
    partials = Partials.make(device, rows=3, heads=2, topk=65, latent=16)
    assert (partials.partial.shape, partials.tops.shape, partials.masses.shape) == ((3, 2, 2, 16), (3, 2, 2), (3, 2, 2))
    assert partials.slice(1, 3).partial.shape == (2, 2, 2, 16)
    partials.free()


def test_costs_at_the_released_widths() -> None:
    splits = 32 * 64 * (512 + 2) * 4  # of 64 heads, written by one kernel and read by the other
    row = step_attention.cost_attend(rows=1, heads=64, latent=512, rope=64, selected=2048, item_bytes=2, row_bytes=656)
    assert (row.bytes, row.flops) == (64 * 576 * 2 + splits + 2048 * 664, 2 * 64 * 2048 * (576 + 512))
    join = step_attention.cost_expand(rows=1, heads=64, latent=512, v=256, selected=2048, item_bytes=2, weight_format=WeightFormat.Q8G64)
    assert (join.bytes, join.flops) == (splits + 64 * 256 * (512 + 16) + 64 * 256 * 2, 2 * 64 * 512 * (32 + 256))
