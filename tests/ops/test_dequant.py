from __future__ import annotations

import pytest
import torch

from mxk_compile.errors import CallError
from mxk_compile.ops.dequant import dequantize
from mxk_compile.ops.formats import int4, mxfp4

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def test_mxfp4_rows() -> None:
    packed, scale = mxfp4.quantize(torch.randn(2, 6, 64))
    values = dequantize(packed, scale, weight_format="mxfp4")
    assert (values.dtype, values.shape) == (torch.float32, (2, 6, 64))
    for column in (0, 1, 33, 63):
        code = int(packed[1, 2, column // 2]) >> (4 * (column % 2)) & 15
        value = MAGNITUDES[code & 7] * (-1 if code & 8 else 1) * 2.0 ** (int(scale[1, 2, column // 32]) - 127)
        assert values[1, 2, column].item() == value
    in_words = dequantize(packed.view(torch.int32), scale, weight_format="mxfp4", dtype=torch.bfloat16)
    assert torch.equal(in_words.float(), values)


@pytest.mark.parametrize("symmetric", [True, False])
def test_both_packings_of_int4_give_the_same_rows(symmetric: bool) -> None:
    weight = torch.randn(2, 16, 64)
    results = []
    for pack_dim in ("input", "output"):
        packed, scale, zero = int4.quantize(weight, 32, pack_dim=pack_dim, symmetric=symmetric)
        assert packed.shape == ((2, 16, 32) if pack_dim == "input" else (2, 64, 2))
        results.append(dequantize(packed, scale, zero, weight_format="uint4", pack_dim=pack_dim))
    assert results[0].shape == weight.shape
    assert torch.equal(results[0], results[1])
    assert float((results[0] - weight).norm() / weight.norm()) < 0.15


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"weight_format": "nvfp4"}, "weight_format='nvfp4'; allowed: .'mxfp4', 'uint4', 'int4'"),
        ({"weight_format": "mxfp4", "pack_dim": "output"}, "pack_dim='output' with 'mxfp4'"),
        ({"weight_format": "mxfp4", "zero": torch.zeros(1)}, "zero points with 'mxfp4'"),
    ],
)
def test_errors_name_what_does_not_go_together(options: dict[str, object], text: str) -> None:
    packed, scale = mxfp4.quantize(torch.ones(1, 32))
    with pytest.raises(CallError, match=text):
        dequantize(packed, scale, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32])
@pytest.mark.parametrize("columns", [8, 32, 72])
def test_mxfp4_dequant_is_the_format_and_a_whole_op(dtype: torch.dtype, columns: int) -> None:
    packed = torch.randint(0, 256, (3, 5, columns // 2), dtype=torch.uint8)
    scale = torch.randint(100, 140, (3, 5, -(-columns // 32)), dtype=torch.uint8)
    weight = packed.view(dtype)
    expected = dequantize(packed, scale, weight_format="mxfp4")  # fp32
    assert torch.equal(torch.ops.mxk.mxfp4_dequant(weight, scale).float(), expected)
    torch.library.opcheck(torch.ops.mxk.mxfp4_dequant.default, (weight, scale))


def test_mxfp4_dequant_says_what_is_wrong() -> None:
    weight, scale = torch.zeros(4, 16, dtype=torch.uint8), torch.zeros(4, 2, dtype=torch.uint8)
    for device in ("cpu", "meta"):
        with pytest.raises(CallError, match="give one scale byte for each 32 (values|elements) of a row"):
            torch.ops.mxk.mxfp4_dequant(weight.to(device), scale.to(device))
        with pytest.raises(CallError, match="view the packed bytes as torch.uint8"):
            torch.ops.mxk.mxfp4_dequant(weight.short().to(device), scale[:, :1].to(device))
