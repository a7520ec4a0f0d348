"""Products that a pair of devices shares: the order of one half by itself, and what the wrappers refuse. cases_halves.py has the bits of both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from glm53.check import reference_step
from glm53.check.case import Bench, draw
from glm53.check.cases_halves import columns, shard
from glm53.check.cases_step import put_matrix
from glm53.hip import Array, Device
from glm53.ops import halves, step, step_experts
from glm53.ops.contract import ContractError
from glm53.ops.matrix import Matrix
from glm53.ops.step import Epilogue, Segment, SumMail
from glm53.ops.step_parts import Patience
from glm53.spec import DType, WeightFormat

F32, BF16, Q8 = DType.F32, DType.BF16, WeightFormat.Q8G64
Make = Callable[..., Array]


@pytest.mark.parametrize("dtype", [F32, BF16], ids=lambda t: t.label)
def test_a_half_has_the_order_of_the_whole_and_not_of_its_own_k(device: Device, dtype: DType) -> None:
    k = 1984  # a first half of 1,024 is wide, a second of 960 is not by itself
    x, weights = draw(1, (2, k), dtype), reference_step.draw_weights(2, (40, k), Q8)
    part, some = columns(x, 1), shard(weights, 1)
    assert part.shape[-1] == 960
    with Bench(device) as bench:

        def sums(whole_k: int | None) -> np.ndarray:
            y = bench.poison(F32, (2, 40))
            step.gemv(bench.stream, bench.put(part, dtype), [Segment(put_matrix(bench, some), y, Epilogue.STORE_F32)], whole_k=whole_k)
            return bench.bits(y)

        def expected(wide: bool) -> np.ndarray:
            want = reference_step.sums(part, some, wide) if dtype is F32 else reference_step.tile_sums_of([(part, some)], wide)
            return want.view(np.uint32)

        np.testing.assert_array_equal(sums(k), expected(wide=True))
        np.testing.assert_array_equal(sums(None), expected(wide=False))
        assert (sums(k) != sums(None)).any(), "both orders give the same bits: the first comparison shows nothing"


def test_half_of_covers_k_once() -> None:
    for k in (1, 64, 65, 128, 131, 1984, 2048, 2049):
        (first, low), (second, high) = (halves.half_of(k, half) for half in range(2))
        assert (first, second, low + high) == (0, low, k)
        assert low % 64 == 0 or high == 0
    with pytest.raises(ValueError, match="half is 2, expected 0 or 1"):
        halves.half_of(64, 2)


def test_whole_k_is_matched(device: Device, make: Make) -> None:
    stream, x, y = device.default_stream, make(F32, 1, 128), make(F32, 1, 4)
    weight = Matrix.plain(make(F32, 4, 128))
    with pytest.raises(ContractError, match="k is 128, expected 64 or 64, a half of whole_k=128"):
        step.gemv(stream, x, [Segment(weight, y, Epilogue.STORE_F32)], whole_k=128)
    with pytest.raises(ContractError, match="whole_k is given, expected STORE_F32 segments and no norm"):
        step.gemv(stream, x, [Segment(weight, y)], whole_k=256)
    with pytest.raises(ContractError, match="whole_k is given, expected STORE_F32 segments and no norm"):
        step.gemv(stream, x, [Segment(weight, y, Epilogue.STORE_F32)], whole_k=256, norm=make(F32, 128), eps=1e-6)


def test_mail_is_for_bf16_halves(device: Device, make: Make) -> None:
    """Refused before anything is posted."""
    mail = SumMail(0, 0, 3, make(DType.U32, 1), 2, 1, make(DType.U32, 1), Patience(1))

    def refused(dtype: DType, match: str, epilogue: Epilogue = Epilogue.RESIDUAL, whole_k: int | None = 256, mail: SumMail = mail) -> None:
        x, y, weight = make(dtype, 1, 128), make(F32 if epilogue is Epilogue.STORE_F32 else dtype, 1, 4), Matrix.plain(make(dtype, 4, 128))
        with pytest.raises(ContractError, match=match):
            step.gemv(device.default_stream, x, [Segment(weight, y, epilogue)], residual=y, whole_k=whole_k, mail=mail)

    refused(F32, "mail is given beside f32 x, expected bf16")
    refused(BF16, "mail is given without whole_k", whole_k=None)
    refused(BF16, "expected RESIDUAL segments and no norm", epilogue=Epilogue.STORE_F32)
    refused(BF16, "y has 4 values, expected at most the 3 words of a mailbox")
    refused(BF16, "mail.index is 3, expected 1 to per_step=2", mail=replace(mail, words_max=4, index=3))


def test_residual_of_f32_x_is_alone_and_not_normed(device: Device, make: Make) -> None:
    stream, x, y, z = device.default_stream, make(F32, 2, 64), make(F32, 2, 4), make(F32, 2, 4)
    segment = Segment(Matrix.plain(make(F32, 4, 64)), y, Epilogue.RESIDUAL)
    with pytest.raises(ContractError, match="a RESIDUAL segment is one of 2, expected it alone"):
        step.gemv(stream, x, [segment, Segment(Matrix.plain(make(F32, 4, 64)), z)], residual=y)
    with pytest.raises(ContractError, match="a RESIDUAL segment has no norm"):
        step.gemv(stream, x, [segment], residual=y, norm=make(F32, 64), eps=1e-6)


def test_down_half_refuses_what_does_not_fit(device: Device) -> None:
    with Bench(device) as bench:
        arrays: dict[str, Any] = {
            "act": bench.poison(BF16, (2, 3, 128)),
            "ids": bench.poison(DType.I32, (2, 3)),
            "weights": bench.poison(F32, (2, 3)),
            "weight": Matrix(bench.poison(DType.U8, (4, 16, 64)), bench.poison(DType.U16, (4, 16, 2)), WeightFormat.Q4G64),
            "shared_act": bench.poison(BF16, (2, 64)),
            "shared": Matrix(bench.poison(DType.U8, (16, 64)), bench.poison(DType.U16, (16, 1)), Q8),
            "total": bench.poison(F32, (2, 16)),
        }

        def refused(match: str, **changed: Any) -> None:
            with pytest.raises(ContractError, match=match):
                step_experts.down_half(bench.stream, **(arrays | changed))

        step_experts.down_half(bench.stream, **arrays)
        refused("total is bf16, expected f32", total=bench.poison(BF16, (2, 16)))
        refused("total dim 1 is 8, expected n=16", total=bench.poison(F32, (2, 8)))
        refused("weight is f32, expected bf16 or q8g64 or q4g64", weight=Matrix.plain(bench.poison(F32, (4, 16, 128))))
        many = {"act": bench.poison(BF16, (2, 17, 128)), "ids": bench.poison(DType.I32, (2, 17)), "weights": bench.poison(F32, (2, 17))}
        refused("slots is 17, expected at most 16", **many)
        act = bench.poison(BF16, (2, 3, 128))
        refused("total and act overlap", act=act, total=Array(act.buffer, F32, (2, 16), act.offset_bytes))
