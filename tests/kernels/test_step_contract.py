"""What the products of a decode step refuse, and what their cost functions count."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from glm53.hip import Array, Device
from glm53.ops import step, step_parts
from glm53.ops.contract import ContractError
from glm53.ops.halves import Halves
from glm53.ops.history_args import fetch_args
from glm53.ops.matrix import Matrix
from glm53.ops.step import Epilogue, Rope, Segment
from glm53.ops.step_args import step_give_args
from glm53.spec import DType, RowFormat, WeightFormat

F32, BF16 = DType.F32, DType.BF16
Make = Callable[..., Array]


def quantised(make: Make, n: int, k: int) -> Matrix:
    return Matrix(make(DType.U8, n, k), make(DType.U16, n, k // 64), WeightFormat.Q8G64)


def test_segments_are_matched(device: Device, make: Make) -> None:
    stream, x = device.default_stream, make(BF16, 2, 128)
    weight, y = Matrix.plain(make(BF16, 6, 128)), make(BF16, 2, 6)
    with pytest.raises(ContractError, match="got 0 segments, expected 1 to 4"):
        step.gemv(stream, x, [])
    with pytest.raises(ContractError, match="weight 0 dim 1 is 64, expected k=128"):
        step.gemv(stream, x, [Segment(quantised(make, 6, 64), y)])
    with pytest.raises(ContractError, match=r"weight 0 dim 0 is 6, expected 12 \(bound by y 0 dim 1\)"):
        step.gemv(stream, x, [Segment(weight, y, Epilogue.SILU)])
    with pytest.raises(ContractError, match="y 0 is bf16, expected f32"):
        step.gemv(stream, x, [Segment(weight, y, Epilogue.STORE_F32)])
    with pytest.raises(ContractError, match="segment 0 is RESIDUAL and residual is None"):
        step.gemv(stream, x, [Segment(weight, y, Epilogue.RESIDUAL)])
    with pytest.raises(ContractError, match="x and y 0 overlap"):
        step.gemv(stream, x, [Segment(Matrix.plain(make(BF16, 128, 128)), x)])


def test_weights_of_a_launch_have_one_format(device: Device, make: Make) -> None:
    stream = device.default_stream
    plain, codes = Matrix.plain(make(BF16, 6, 128)), quantised(make, 6, 128)
    for dtype in (F32, BF16):
        x, y, z = make(dtype, 2, 128), make(dtype, 2, 6), make(dtype, 2, 6)
        with pytest.raises(ContractError, match="weight 1 is q8g64, expected bf16, the format of weight 0"):
            step.gemv(stream, x, [Segment(plain, y), Segment(codes, z)])
        with pytest.raises(ContractError, match="weight 0 is q4g64, expected one of"):
            nibbles = Matrix(make(DType.U8, 6, 64), make(DType.U16, 6, 2), WeightFormat.Q4G64)
            step.gemv(stream, x, [Segment(nibbles, y)])
    with pytest.raises(ContractError, match="weight 0 is f32, expected one of bf16, q8g64 beside bf16 x"):
        step.gemv(stream, make(BF16, 2, 128), [Segment(Matrix.plain(make(F32, 6, 128)), make(BF16, 2, 6))])
    for k, text in ((100, "x has rows of 100"), (56, "weight 0 has k=56")):
        with pytest.raises(ContractError, match=text):
            step.gemv(stream, make(BF16, 2, k), [Segment(Matrix.plain(make(BF16, 6, k)), make(BF16, 2, 6))])


def test_norm_and_h(device: Device, make: Make) -> None:
    stream, x = device.default_stream, make(F32, 1, 64)
    segment = Segment(quantised(make, 4, 64), make(F32, 1, 4))
    with pytest.raises(ContractError, match=r"eps is 0\.0, expected a positive number"):
        step.gemv(stream, x, [segment], norm=make(F32, 64))
    with pytest.raises(ContractError, match="h is given, expected a norm with it"):
        step.gemv(stream, x, [segment], h=make(F32, 1, 64))


def test_h_of_bf16_x_is_the_routers(device: Device, make: Make) -> None:
    stream, x, norm = device.default_stream, make(BF16, 1, 64), make(BF16, 64)
    with pytest.raises(ContractError, match="h is given beside bf16 x without a RouterPart"):
        step.gemv(stream, x, [Segment(quantised(make, 4, 64), make(BF16, 1, 4))], norm=norm, eps=1e-6, h=make(BF16, 1, 64))


def test_bf16_rows_are_read_in_16_bytes(device: Device, make: Make) -> None:
    stream, x, y = device.default_stream, make(BF16, 2, 64), make(BF16, 2, 4)
    segments = [Segment(quantised(make, 4, 64), y)]
    with pytest.raises(ContractError, match=r"x has rows of 64 at .* expected multiples of 8 and of 16"):
        step.gemv(stream, make(BF16, 136).slice(1, 129).reshape(2, 64), segments)
    with pytest.raises(ContractError, match=r"norm has rows of 64 at .* expected multiples of 8 and of 16"):
        step.gemv(stream, x, segments, norm=make(BF16, 72).slice(1, 65), eps=1e-6)
    with pytest.raises(ContractError, match=r"x has rows of 68 at .* expected multiples of 8 and of 16"):
        step.per_head(stream, make(BF16, 2, 3, 68), Matrix.plain(make(BF16, 3, 8, 64)), make(BF16, 2, 3, 8))


def test_residual_of_bf16_x_is_alone_and_has_halves(device: Device, make: Make) -> None:
    stream, x, y, z = device.default_stream, make(BF16, 9, 64), make(BF16, 9, 40), make(BF16, 9, 4)
    residual = Segment(quantised(make, 40, 64), y, Epilogue.RESIDUAL)
    with pytest.raises(ContractError, match="a RESIDUAL segment is one of 2, expected it alone"):
        step.gemv(stream, x, [residual, Segment(quantised(make, 4, 64), z)], residual=y)
    with pytest.raises(ContractError, match="halves is None, expected Halves"):
        step.gemv(stream, x, [residual], residual=y)
    with pytest.raises(ContractError, match="has no norm"):
        step.gemv(stream, x, [residual], residual=y, norm=make(BF16, 64), eps=1e-6, halves=Halves(make(F32, 1), make(DType.U32, 1)))
    with pytest.raises(ContractError, match=r"halves\.partial has 1 items, expected at least \d+ for 9 rows of 40 columns"):
        step.gemv(stream, x, [residual], residual=y, halves=Halves(make(F32, 1), make(DType.U32, 64)))


def test_rope_needs_even_numbers_and_positions(device: Device, make: Make) -> None:
    stream, x = device.default_stream, make(F32, 1, 64)
    weight, y, inv_freq, positions = quantised(make, 12, 64), make(F32, 1, 12), make(F32, 2), make(DType.I32, 1)
    with pytest.raises(ContractError, match="expected a rope exactly for ROPE"):
        step.gemv(stream, x, [Segment(weight, y, Epilogue.ROPE)])
    with pytest.raises(ContractError, match="segment 0 turns columns, expected positions and inv_freq"):
        step.gemv(stream, x, [Segment(weight, y, Epilogue.ROPE, Rope(6, 2, 4))])
    for rope, text in (
        (Rope(6, 1, 4), "expected even numbers"),
        (Rope(6, 4, 4), "columns within the head"),
        (Rope(8, 0, 4), "multiple of head_stride=8"),
    ):
        with pytest.raises(ContractError, match=text):
            step.gemv(stream, x, [Segment(weight, y, Epilogue.ROPE, rope)], positions=positions, inv_freq=inv_freq)
    with pytest.raises(ContractError, match="turns 2 columns, expected 4"):
        step.gemv(stream, x, [Segment(weight, y, Epilogue.ROPE, Rope(6, 0, 2))], positions=positions, inv_freq=inv_freq)


def test_per_head_limits(device: Device, make: Make) -> None:
    stream, x, y = device.default_stream, make(BF16, 2, 3, 40), make(BF16, 2, 3, 8)
    with pytest.raises(ContractError, match="weight dim 2 is 48, expected at most columns=40"):
        step.per_head(stream, x, Matrix.plain(make(BF16, 3, 8, 48)), y)
    with pytest.raises(ContractError, match="part is RouterPart, expected GivePart or FetchPart"):
        part = step_parts.RouterPart(make(F32, 8), make(DType.I32, 2, 2), make(F32, 2, 2), make(DType.U32, 1), 1, 1, True, 1.0)
        step.per_head(stream, x, Matrix.plain(make(BF16, 3, 8, 40)), y, part)
    with pytest.raises(ContractError, match="part has tells, expected None"):
        give = step_parts.GivePart(step_give_args(rows=2, k=8), 2, tells=make(DType.U32, 2))
        step.per_head(stream, x, Matrix.plain(make(BF16, 3, 8, 40)), y, give)


def test_parts_are_matched(device: Device, make: Make) -> None:
    stream, x = device.default_stream, make(BF16, 2, 64)
    logits, y = make(F32, 2, 8), make(BF16, 2, 8)
    router = step_parts.RouterPart(make(F32, 8), make(DType.I32, 2, 9), make(F32, 2, 9), make(DType.U32, 1), 1, 1, True, 1.0)
    with pytest.raises(ContractError, match="segment 0 is STORE, expected STORE_F32"):
        step.gemv(stream, x, [Segment(quantised(make, 8, 64), y)], part=router)
    with pytest.raises(ContractError, match="slots is 9, expected at most 8"):
        step.gemv(stream, x, [Segment(quantised(make, 8, 64), logits, Epilogue.STORE_F32)], part=router)
    router = step_parts.RouterPart(make(F32, 8), make(DType.I32, 2, 4), make(F32, 2, 4), make(DType.U32, 1), 1, 1, True, 1.0)
    with pytest.raises(ContractError, match="weight 0 is q8g64, expected f32: the router's"):
        step.gemv(stream, x, [Segment(quantised(make, 8, 64), logits, Epilogue.STORE_F32)], part=router)
    row = step_parts.RowsPart(make(BF16, 2, 72), make(BF16, 64), 1e-6, make(DType.U64, 2), (0, 0, 0, 0), RowFormat.Q8G64, 64)
    segments = [Segment(quantised(make, 8, 64), y)]
    options = {"positions": make(DType.I32, 2), "inv_freq": make(F32, 4)}
    with pytest.raises(ContractError, match="RowsPart turns columns"):
        step.gemv(stream, x, segments, part=row)
    with pytest.raises(ContractError, match="error is None"):
        step.gemv(stream, x, segments, part=row, **options)
    give = step_parts.GivePart(step_give_args(rows=2, k=8), 2, tells=make(DType.U32, 1))
    with pytest.raises(ContractError, match="tells has 1 words, expected at least 2"):
        step.gemv(stream, x, segments, part=give)
    with pytest.raises(ContractError, match="FetchPart has 0 rounds and 4 blocks, expected at least 1"):
        step.gemv(stream, x, segments, part=step_parts.FetchPart(fetch_args(), 4, 0))


def test_mail_is_matched(device: Device, make: Make) -> None:
    """A row of latent 128 and rope 6 has 36 words in q8g64."""
    stream, x, y = device.default_stream, make(BF16, 2, 64), make(BF16, 2, 8)
    segments, positions, inv_freq = [Segment(quantised(make, 8, 64), y)], make(DType.I32, 2), make(F32, 3)
    row, row_norm, error = make(BF16, 2, 134), make(BF16, 128), make(DType.U32, 1)
    mail = step_parts.RowMail(make(DType.U64, 100).address, 100, False, make(DType.U32, 1), 4, 3, make(DType.U32, 1), step_parts.Patience(1000))
    take = replace(mail, receive=True)

    def run(given: Array | None, norm: Array | None, mail: step_parts.RowMail | None) -> None:
        refs = make(DType.U64, 2)
        part = step_parts.RowsPart(given, norm, 1e-6, refs, (0, 0, 0, 0), RowFormat.Q8G64, 128, error, mail=mail)
        step.gemv(stream, x, segments, part=part, positions=positions, inv_freq=inv_freq)

    wrong: list[tuple[str, Array | None, Array | None, step_parts.RowMail | None]] = [
        ("row or row_norm is None, expected both", None, None, None),
        ("row or row_norm is None, expected both", row, None, mail),
        ("row or row_norm is given with mail to receive", row, row_norm, take),
        ("mail has room for 71 words, expected 72 for 2 rows of 144 bytes", row, row_norm, replace(mail, words_max=71)),
        ("mail has room for 71 words", None, None, replace(take, words_max=71)),
        ("mail.index is 4, expected 0 to below per_step=4", row, row_norm, replace(mail, index=4)),
        ("mail.counter dim 0 is 2, expected 1", row, row_norm, replace(mail, counter=make(DType.U32, 2))),
        ("mail.error is i32", None, None, replace(take, error=make(DType.I32, 1))),
    ]
    for text, given, norm, refused in wrong:
        with pytest.raises(ContractError, match=text):
            run(given, norm, refused)


def test_costs_count_weights_as_stored(make: Make) -> None:
    x, weight, y = make(BF16, 2, 128), quantised(make, 6, 128), make(BF16, 2, 6)
    cost = step.cost_gemv(x, [Segment(weight, y)])
    assert (cost.bytes, cost.flops) == (2 * 128 * 2 + 6 * 128 + 6 * 2 * 2 + 2 * 6 * 2, 2 * 2 * 6 * 128)
    heads = step.cost_per_head(make(BF16, 2, 3, 100), Matrix.plain(make(BF16, 3, 5, 64)), make(BF16, 2, 3, 5))
    assert (heads.bytes, heads.flops) == (2 * 3 * 64 * 2 + 3 * 5 * 64 * 2 + 2 * 3 * 5 * 2, 2 * 2 * 3 * 5 * 64)
