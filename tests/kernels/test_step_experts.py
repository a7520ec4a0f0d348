"""Experts of a decode step: what the wrappers refuse, what they cost, and bits that do not depend on how columns fall into blocks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from glm53.check.case import Bench, draw
from glm53.check.cases_step import put_halves, put_matrix
from glm53.check.cases_step_experts import ROUTED
from glm53.check.reference_step import Weights
from glm53.check.reference_step_experts import draw_weights
from glm53.hip import Device
from glm53.ops import step_experts
from glm53.ops.contract import ContractError
from glm53.ops.history_args import fetch_args
from glm53.ops.matrix import Matrix
from glm53.ops.step_parts import FetchPart
from glm53.spec import DType, WeightFormat

Q4, Q8, PLAIN = WeightFormat.Q4G64, WeightFormat.Q8G64, WeightFormat.BF16


@pytest.mark.parametrize("weight_format", ROUTED[DType.BF16], ids=lambda f: f.label)
@pytest.mark.parametrize("k", [192, 1088])
def test_act_of_a_column_is_the_same_in_any_block(device: Device, k: int, weight_format: WeightFormat) -> None:
    n, few = 36, 5
    weights = draw_weights(1, (2, 2, n, k), weight_format)
    with Bench(device) as bench:
        x, ids = bench.put(draw(2, (1, k), DType.BF16), DType.BF16), bench.put(np.array([[1, 0]], np.int32))

        def act(count: int) -> np.ndarray:
            scales = None if weights.scales is None else weights.scales[:, :, :count].reshape(2, 2 * count, -1)
            some = Weights(weights.codes[:, :, :count].reshape(2, 2 * count, -1), scales, weight_format)
            out = bench.poison(DType.BF16, (1, 2, count))
            step_experts.experts(bench.stream, x, ids, put_matrix(bench, some), out)
            return bench.bits(out)

        np.testing.assert_array_equal(act(few), act(n)[:, :, :few])


@pytest.mark.parametrize("weight_format", ROUTED[DType.BF16], ids=lambda f: f.label)
@pytest.mark.parametrize("k", [192, 1088])
def test_y_of_a_column_is_the_same_in_any_block(device: Device, k: int, weight_format: WeightFormat) -> None:
    n, few = 45, 37
    shared_format = PLAIN if weight_format is PLAIN else Q8
    routed, shared = draw_weights(1, (3, n, k), weight_format), draw_weights(2, (n, k), shared_format)
    with Bench(device) as bench:
        act, shared_act = bench.put(draw(3, (1, 2, k), DType.BF16), DType.BF16), bench.put(draw(4, (1, k), DType.BF16), DType.BF16)
        ids, weights = bench.put(np.array([[2, 0]], np.int32)), bench.put(np.array([[0.75, 0.5]], np.float32))
        residual, halves = draw(5, (1, n), DType.BF16), put_halves(bench, 1, n)

        def first_columns(w: Weights, count: int) -> Matrix:
            return put_matrix(bench, Weights(w.codes[..., :count, :], None if w.scales is None else w.scales[..., :count, :], w.format))

        def y(count: int) -> np.ndarray:
            out = bench.poison(DType.BF16, (1, count))
            held = bench.put(residual[:, :count], DType.BF16)
            few_routed, few_shared = first_columns(routed, count), first_columns(shared, count)
            step_experts.down(bench.stream, act, ids, weights, few_routed, shared_act, few_shared, held, out, halves)
            return bench.bits(out)

        np.testing.assert_array_equal(y(few), y(n)[:, :few])


def down_arrays(bench: Bench, **changed: Any) -> dict[str, Any]:
    arrays: dict[str, Any] = {
        "act": bench.poison(DType.BF16, (2, 3, 128)),
        "ids": bench.poison(DType.I32, (2, 3)),
        "weights": bench.poison(DType.F32, (2, 3)),
        "weight": Matrix(bench.poison(DType.U8, (4, 16, 64)), bench.poison(DType.U16, (4, 16, 2)), Q4),
        "shared_act": bench.poison(DType.BF16, (2, 64)),
        "shared": Matrix(bench.poison(DType.U8, (16, 64)), bench.poison(DType.U16, (16, 1)), Q8),
        "residual": bench.poison(DType.BF16, (2, 16)),
        "y": bench.poison(DType.BF16, (2, 16)),
        "halves": put_halves(bench, 2, 16),
    }
    return arrays | changed


def test_down_refuses_what_does_not_fit(device: Device) -> None:
    with Bench(device) as bench:

        def refused(match: str, **changed: Any) -> None:
            with pytest.raises(ContractError, match=match):
                step_experts.down(bench.stream, **down_arrays(bench, **changed))

        step_experts.down(bench.stream, **down_arrays(bench))
        refused("shared dim 0 is 8, expected n=16", shared=Matrix.plain(bench.poison(DType.BF16, (8, 64))))
        refused("weight dim 2 is 64, expected k=128", weight=Matrix.plain(bench.poison(DType.BF16, (4, 16, 64))))
        refused("shared_act is f32", shared_act=bench.poison(DType.F32, (2, 64)))
        plain = Matrix.plain
        refused("shared is f32, expected bf16 or q8g64 with activations in bf16", shared=plain(bench.poison(DType.F32, (16, 64))))
        refused("weight is f32, expected bf16 or q8g64 or q4g64", weight=plain(bench.poison(DType.F32, (4, 16, 128))))
        refused("ids dim 1 is 2, expected slots=3", ids=bench.poison(DType.I32, (2, 2)))
        many = {
            "act": bench.poison(DType.BF16, (2, 17, 128)),
            "ids": bench.poison(DType.I32, (2, 17)),
            "weights": bench.poison(DType.F32, (2, 17)),
        }
        refused("slots is 17, expected at most 16", **many)
        odd = bench.poison(DType.BF16, (1 + 2 * 64,)).slice(1, 129).reshape(2, 64)
        refused("shared_act is at address .* expected a multiple of 16", shared_act=odd)
        refused("halves is None, expected Halves beside bf16 act", halves=None)
        refused("halves.arrivals has 1 items, expected at least 2", halves=replace(put_halves(bench, 2, 16), arrivals=bench.poison(DType.U32, (1,))))
        thin = {"shared": plain(bench.poison(DType.BF16, (16, 60))), "shared_act": bench.poison(DType.BF16, (2, 60))}
        refused("shared has k=60, expected a multiple of 8, at least 64", **thin)
        act = bench.poison(DType.BF16, (2, 3, 128))
        refused("y and act overlap", act=act, y=act.view((2, 16)))


def test_experts_refuses_what_does_not_fit(device: Device) -> None:
    with Bench(device) as bench:
        x, ids, plain = bench.poison(DType.BF16, (2, 128)), bench.poison(DType.I32, (2, 3)), Matrix.plain

        def refused(match: str, weight: Matrix, act: Any = None) -> None:
            with pytest.raises(ContractError, match=match):
                step_experts.experts(bench.stream, x, ids, weight, act or bench.poison(DType.BF16, (2, 3, 16)))

        weight = Matrix(bench.poison(DType.U8, (4, 32, 64)), bench.poison(DType.U16, (4, 32, 2)), Q4)
        step_experts.experts(bench.stream, x, ids, weight, bench.poison(DType.BF16, (2, 3, 16)))
        refused("an even number", Matrix.plain(bench.poison(DType.BF16, (4, 33, 128))))
        refused("weight is f32, expected bf16 or q8g64 or q4g64", Matrix.plain(bench.poison(DType.F32, (4, 32, 128))))
        refused("act dim 2 is 16, expected n=8", Matrix.plain(bench.poison(DType.BF16, (4, 16, 128))))
        refused("weight dim 2 is 64, expected k=128", Matrix.plain(bench.poison(DType.BF16, (4, 32, 64))))
        refused("act is f32", weight, bench.poison(DType.F32, (2, 3, 16)))
        x = bench.poison(DType.BF16, (2, 132))
        refused("weight has k=132, expected a multiple of 8, at least 64", plain(bench.poison(DType.BF16, (4, 32, 132))))
        x = bench.poison(DType.BF16, (2 * 128 + 1,)).slice(1, 257).reshape(2, 128)
        refused("x is at address .* expected a multiple of 16", plain(bench.poison(DType.BF16, (4, 32, 128))))
        x = bench.poison(DType.BF16, (2, 128))
        codes = bench.poison(DType.U8, (4 * 32 * 64 + 8,)).slice(8, 8 + 4 * 32 * 64).reshape(4, 32, 64)
        refused("codes is at address .* expected a multiple of 16", Matrix(codes, bench.poison(DType.U16, (4, 32, 2)), Q4))


def test_experts_refuses_a_part_that_it_cannot_run(device: Device) -> None:
    with Bench(device) as bench:
        weight = Matrix(bench.poison(DType.U8, (4, 32, 64)), bench.poison(DType.U16, (4, 32, 2)), Q4)
        part = FetchPart(fetch_args(), 2, 1)

        def refused(match: str, rows: int, part: FetchPart) -> None:
            x, ids, act = bench.poison(DType.BF16, (rows, 128)), bench.poison(DType.I32, (rows, 3)), bench.poison(DType.BF16, (rows, 3, 16))
            with pytest.raises(ContractError, match=match):
                step_experts.experts(bench.stream, x, ids, weight, act, part)

        refused("beside one row of x, expected None", 1, part)
        refused("1 rounds and 0 blocks, expected at least 1", 2, replace(part, blocks=0))
        refused("part has awaits, expected None", 2, replace(part, awaits=bench.poison(DType.U32, (2,))))


def test_cost_is_the_bytes_of_the_arrays() -> None:
    n, k = 2048, 6144
    experts = step_experts.cost_experts(1, 8, 8, n, k, 2, Q4)
    weights = 8 * 2 * n * (k // 2 + k // 64 * 2)
    assert experts.bytes == weights + k * 2 + 8 * n * 2 + 8 * 4
    assert experts.flops == 8 * (4 * n * k + 5 * n)
    down = step_experts.cost_down(2, 8, 11, k, n, n, 2, Q4, PLAIN)
    assert down.bytes == 11 * k * (n // 2 + n // 64 * 2) + k * n * 2 + 2 * (8 * (n * 2 + 8) + n * 2 + 2 * k * 2)
