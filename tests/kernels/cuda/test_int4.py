"""`mxk::moe` with INT4 weights on a GPU against the fp32 reference, and what of the format reaches the kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mxk_compile.kernels import supports
from mxk_compile.kernels.cuda.operands import Format, Operands
from mxk_compile.kernels.desc import MoEDesc
from mxk_compile.ops import moe
from mxk_compile.ops.dequant import dequantize
from mxk_compile.ops.formats import int4
from mxk_compile.testing import MoECase, random_case, rel_l2

MOST_OF_EXPECTED = 1.1
"""Of the error that rounding weights, intermediate and result to bf16 alone makes: about 3.5e-3 in a layer."""
SIZES = {"num_experts": 6, "top_k": 3, "hidden_size": 256, "intermediate_size": 128, "device": "cuda"}


def rounded(case: MoECase, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """The reference with weights rounded to bf16, as the tensor cores take them."""

    def rounded_weights(*args: Any, **attributes: Any) -> torch.Tensor:
        return dequantize(*args, **attributes).bfloat16().float()

    with monkeypatch.context() as patch:
        patch.setattr(moe, "dequantize", rounded_weights)
        return case.reference(round_intermediate=True).bfloat16()


def check(case: MoECase, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compares with the reference, with lists of experts, and with a second run."""
    assert supports(MoEDesc.from_call(*case.routing, *case.weights, **case.attributes)) is None
    result = case.fused()
    exact = case.reference()
    expected = rel_l2(rounded(case, monkeypatch), exact)
    assert 1e-3 < expected < 1e-2
    assert rel_l2(result, exact) <= MOST_OF_EXPECTED * expected
    assert torch.equal(result, case.fused()), "the same call gives the same bits"
    assert torch.equal(result, torch.ops.mxk.moe.lists(*case.routing, *case.lists, **case.attributes))


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 9, 70])
@pytest.mark.parametrize("group_size", [32, 64, 128, None])
@pytest.mark.parametrize("zero", [False, True])
def test_groups_and_zero_points(
    zero: bool, group_size: int | None, num_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = random_case(
        weight_format="uint4", zero=zero, group_size=group_size, num_tokens=num_tokens, **SIZES
    )
    check(case, monkeypatch)


@pytest.mark.gpu
@pytest.mark.parametrize("scale_dtype", int4.FLOAT_DTYPES)
@pytest.mark.parametrize("weight_format", ["uint4", "int4"])
def test_codes_and_types_of_scales(
    weight_format: str, scale_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = random_case(
        weight_format=weight_format, num_tokens=33, bias=True, row_order="interleaved", **SIZES
    )
    case.w13_scale = (case.w13_scale * 1.003).to(scale_dtype)
    case.w2_scale = (case.w2_scale * 0.997).to(scale_dtype)
    case.w13, case.w2 = (weight.view(torch.int32) for weight in (case.w13, case.w2))
    check(case, monkeypatch)


@pytest.mark.gpu
@pytest.mark.parametrize(("hidden_size", "intermediate_size"), [(32, 96), (7168, 64), (160, 2048)])
def test_ragged_sizes(hidden_size: int, intermediate_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {**SIZES, "hidden_size": hidden_size, "intermediate_size": intermediate_size}
    check(random_case(weight_format="uint4", num_tokens=50, per_route=True, **sizes), monkeypatch)


@pytest.mark.gpu
def test_zero_points_beyond_a_nibble(monkeypatch: pytest.MonkeyPatch) -> None:
    case = random_case(weight_format="uint4", zero=True, num_tokens=8, **SIZES)
    assert case.w13_zero is not None
    case.w13_zero[:, ::3] = 200
    check(case, monkeypatch)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, Format(1, 0, 5, False, 4)),
        ({"weight_format": "int4", "group_size": 64}, Format(2, 0, 6, False, 2)),
        ({"zero": True, "group_size": None}, Format(1, 0, 31, True, 2)),
        ({"weight_format": "mxfp4"}, Format(0, 0, 5, False, 2)),
    ],
)
def test_what_the_kernel_is_told(changes: dict[str, Any], expected: Format) -> None:
    case = random_case(**{"weight_format": "uint4", "hidden_size": 192, "intermediate_size": 192, **changes})
    desc = MoEDesc.from_call(*case.routing, *case.weights, **case.attributes)
    operands = Operands.of(desc, case.weights)
    found = Format.of(desc.weight_format, operands.s13, operands.z13, desc.group_sizes[0])
    assert found == expected
    assert Format.of(desc.weight_format, operands.s2, operands.z2, desc.group_sizes[1]) == expected
