"""Contracts: what a wrapper refuses before it launches anything. No device: arrays and streams here only carry shapes and addresses."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from glm53.errors import InputError
from glm53.ops import basic, history, matmul, weights
from glm53.ops.contract import ContractError, Cost, Dims, variant
from glm53.ops.matrix import Matrix
from glm53.spec import DType, WeightFormat

F32, BF16 = DType.F32, DType.BF16


@dataclass
class FakeArray:
    dtype: DType
    shape: tuple[int, ...]
    address: int = 0
    device: Any = field(default_factory=lambda: SimpleNamespace(index=0))

    @property
    def nbytes(self) -> int:
        size = self.dtype.item_bytes
        for count in self.shape:
            size *= count
        return size

    def __len__(self) -> int:
        return self.shape[0]


class Recorder:
    """A stream whose device notes launches."""

    def __init__(self) -> None:
        self.launches: list[tuple[str, tuple[int, int, int]]] = []
        self.device = self

    def kernel(self, name: str) -> Any:
        return SimpleNamespace(launch=lambda stream, grid, args: self.launches.append((name, grid)))


def array(dtype: DType, *shape: int, address: int = 0, device: int = 0) -> Any:
    return FakeArray(dtype, shape, address, SimpleNamespace(index=device))


def matrix(dtype: DType, *shape: int) -> Matrix:
    return Matrix.plain(array(dtype, *shape))


def quantised(format: WeightFormat, *shape: int, address: int = 0) -> Matrix:
    *rest, k = shape
    return Matrix(array(DType.U8, *rest, k * format.bits // 8, address=address), array(DType.U16, *rest, k // 64, address=address), format)


def test_message_names_operation_array_got_expected_and_origin() -> None:
    dims = Dims("rms_norm")
    dims.match("x", array(F32, 3, 576), "rows", "width", dtype=F32)
    with pytest.raises(ContractError, match=r"^rms_norm: weight dim 0 is 512, expected width=576 \(bound by x dim 1\)$"):
        dims.match("weight", array(F32, 512), "width", dtype=F32)


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        (array(BF16, 3, 4), "y is bf16, expected f32"),
        (array(F32, 3), r"y has shape \[3\], expected 2 dims \[rows, 4\]"),
        (array(F32, 3, 5), "y dim 1 is 5, expected 4"),
        (array(F32, 0, 4), "y dim 0 is 0, expected rows of at least 1"),
        (array(F32, 3, 4, device=1), r"y is on device 1, expected device 0 \(where x is\)"),
    ],
)
def test_each_kind_of_mismatch(bad: Any, text: str) -> None:
    dims = Dims("op")
    dims.match("x", array(F32, 3), "rows")
    with pytest.raises(ContractError, match=f"^op: {text}$"):
        dims.match("y", bad, "rows", 4, dtype=F32)


def test_a_contract_error_is_bad_input_and_a_value_error() -> None:
    assert issubclass(ContractError, InputError) and issubclass(ContractError, ValueError)


def test_missing_variant_lists_those_that_exist() -> None:
    assert variant("dequant", ("f8_f32",), DType.F8E4M3, F32) == "dequant_f8_f32"
    with pytest.raises(ContractError, match="no variant f32_f32; existing: bf16_bf16, f8_f32"):
        variant("dequant", ("f8_f32", "bf16_bf16"), F32, F32)


def test_refusals_launch_nothing() -> None:
    stream: Any = Recorder()
    layout = SimpleNamespace(extent_rows=64, planes=2, row_bytes=16)
    positions = array(DType.I32, 2)
    refused = [
        lambda: basic.rms_norm(stream, array(F32, 2, 8), array(F32, 9), array(F32, 2, 8), 1e-5),
        lambda: basic.rms_norm(stream, array(F32, 2, 8), array(F32, 8), array(F32, 2, 8), 0.0),
        lambda: basic.rope(stream, array(F32, 2, 1, 64), positions, array(F32, 32), offset=1),
        lambda: basic.silu_mul(stream, array(F32, 2, 7), array(F32, 2, 4, address=1000)),
        lambda: basic.silu_mul(stream, array(F32, 2, 8), array(F32, 2, 4)),
        lambda: matmul.matmul(stream, array(F32, 2, 8), matrix(F32, 4, 8), array(BF16, 2, 4, address=1000)),
        lambda: matmul.matmul(stream, array(F32, 2, 64), quantised(WeightFormat.Q4G64, 4, 128), array(F32, 2, 4, address=1000)),
        lambda: weights.quantise(stream, array(F32, 2, 64), None, matrix(F32, 2, 64), array(DType.U32, 1)),
        lambda: weights.quantise(stream, array(F32, 2, 64, address=8), None, quantised(WeightFormat.Q8G64, 2, 64, address=4096), array(DType.U32, 1)),
        lambda: weights.quantise(stream, array(F32, 2, 64), None, quantised(WeightFormat.Q8G64, 2, 64), array(DType.U32, 1)),
        lambda: weights.quantise(stream, array(DType.F8E4M3, 2, 64), None, quantised(WeightFormat.Q4G64, 2, 64, address=4096), array(DType.U32, 1)),
        lambda: weights.fill_random(stream, matrix(F32, 2, 8), seed=-1, std=1.0),
        lambda: weights.fill_random(stream, matrix(F32, 2, 8), seed=0, std=0.0),
        lambda: weights.fill_random(stream, quantised(WeightFormat.Q4G64, 2, 64), seed=0, std=1.0, mean=1.0),
        lambda: matmul.matmul(stream, array(F32, 2, 8), matrix(F32, 4, 8), array(F32, 2, 4)),
        lambda: matmul.per_head(stream, array(F32, 2, 3, 8), matrix(F32, 3, 4, 9), array(F32, 2, 3, 4, address=1000)),
        lambda: history.append(stream, array(F32, 2, 5), array(DType.U64, 1, 4), positions, positions, layout, plane=0),
        lambda: history.append(stream, array(F32, 2, 4), array(DType.U64, 1, 4), positions, positions, layout, plane=2),
        lambda: weights.dequant(stream, array(DType.F8E4M3, 2, 2), None, array(F32, 2, 2, address=1000)),
        lambda: weights.dequant(stream, array(DType.F8E4M3, 129, 2), array(F32, 1, 1), array(F32, 129, 2, address=1000)),
    ]
    for call in refused:
        with pytest.raises(ContractError):
            call()
    assert stream.launches == []
    history.append(stream, array(F32, 2, 4), array(DType.U64, 1, 4), positions, positions, layout, plane=1)
    assert stream.launches == [("append_f32", (2, 1, 1))]


def test_grid_limits_are_refused_by_name() -> None:
    stream: Any = Recorder()
    x, w, y = array(F32, 65_536 * 64, 1), matrix(F32, 1, 1), array(F32, 65_536 * 64, 1, address=1 << 40)
    with pytest.raises(ContractError, match=r"matmul_tile_f32_f32_f32: grid .* too large"):
        matmul.matmul(stream, x, w, y)


def test_costs_count_each_operand_once() -> None:
    x, w, y = array(BF16, 3, 8), matrix(BF16, 5, 8), array(F32, 3, 5)
    assert matmul.cost_matmul(x, w, y) == Cost(bytes=2 * (24 + 40) + 4 * 15, flops=2 * 3 * 5 * 8)
    assert matmul.cost_matmul(x, w, y, residual=y).bytes == 2 * (24 + 40) + 2 * 4 * 15
    assert basic.cost_norm(array(F32, 2, 8), array(F32, 6)) == Cost(2 * 12 * 4 + 24, 48)
    assert Cost(1, 2) + Cost(3, 4) == Cost(4, 6)
