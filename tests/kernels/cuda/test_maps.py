"""Tensor maps of weights: what the driver is told of a stack, without a GPU. Lists are met by the GPU tests."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mxk_compile.kernels.cuda import build, maps
from mxk_compile.kernels.cuda.maps import MAP_BYTES, Matrix
from mxk_compile.kernels.cuda.operands import operand

WIDE_WORDS = 256  # of 8 bytes, in a row of the test whose box is too wide for words of 4


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Address, sizes, strides and box of each map, as the driver gets them."""
    if build.missing() is not None:
        pytest.skip(str(build.missing()))
    from cuda.bindings import driver

    calls: list[tuple[Any, ...]] = []
    made = driver.CUtensorMap()

    def encode(kind: Any, rank: int, address: int, sizes: Any, strides: Any, box: Any, *rest: Any) -> Any:
        assert kind.name == f"CU_TENSOR_MAP_DATA_TYPE_UINT{64 if int(sizes[0]) == WIDE_WORDS else 32}"
        assert rank == len(sizes) == len(strides) + 1 == len(box)
        calls.append((address, [int(x) for x in sizes], [int(x) for x in strides], [int(x) for x in box]))
        return SimpleNamespace(value=0), made

    monkeypatch.setattr(driver, "cuTensorMapEncodeTiled", encode)
    return calls


def test_a_stack_with_gaps_is_described_in_words(told: list[tuple[Any, ...]]) -> None:
    weight = torch.zeros(3, 20, 64, dtype=torch.uint8)[:, 2:18, :48]
    matrix = Matrix(operand("w13", weight, 16), 3, 16, 48, box_rows=8, box_bytes=80)
    absent = Matrix(operand("s13", weight, 16), 3, 16, 48, box_rows=8, box_bytes=0)
    encoded, table = maps.encode((matrix, absent), 0)
    assert table is None
    assert len(encoded) == 2 * MAP_BYTES
    assert told == [(weight.data_ptr(), [12, 16, 3], [64, 20 * 64], [20, 8, 1])]


def test_one_expert_has_a_stride_that_the_driver_takes(told: list[tuple[Any, ...]]) -> None:
    weight = torch.zeros(1, 16, 48, dtype=torch.uint8).as_strided((1, 16, 48), (0, 48, 1))
    maps.encode((Matrix(operand("w2", weight, 16), 1, 16, 48, box_rows=16, box_bytes=48),), 0)
    assert told[0][2] == [48, 16 * 48]


def test_wide_boxes_have_wider_elements(told: list[tuple[Any, ...]]) -> None:
    weight = torch.zeros(2, 16, 2048, dtype=torch.uint8)
    maps.encode((Matrix(operand("w2", weight, 16), 2, 16, 2048, box_rows=16, box_bytes=1040),), 0)
    assert told == [(weight.data_ptr(), [256, 16, 2], [2048, 16 * 2048], [130, 16, 1])]
