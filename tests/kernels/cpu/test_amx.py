"""What is particular to the tile unit: strips, blocks and shapes of tiles, and what it would flush or overflow."""

from __future__ import annotations

import ctypes
import dataclasses

import pytest
import torch
from torch import Tensor

from mxk_compile.kernels import MoEDesc, cpu
from mxk_compile.testing import MoECase, random_case, rel_l2

pytestmark = [
    pytest.mark.skipif(cpu.available() is not None, reason=str(cpu.available())),
    pytest.mark.usefixtures("amx"),
]

GPTOSS = {"activation": "swiglu_oai", "alpha": 1.702, "limit": 7.0, "bias": True, "row_order": "interleaved"}


def run(case: MoECase, tokens: slice = slice(None)) -> Tensor:
    routing = [tensor[tokens] for tensor in case.routing]
    desc = MoEDesc.from_call(*routing, *case.weights, **case.attributes)
    scalars = {name: case.attributes[name] for name in ("alpha", "limit", "experts_min")}
    return cpu.Prepared(desc, *routing, *case.weights, **scalars)(*routing)


def bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int16), b.view(torch.int16))


def one_expert(**changes: object) -> MoECase:
    return random_case(**{"num_experts": 2, "top_k": 1, "hot": True, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "form",
    [
        {**GPTOSS},
        {"weight_format": "uint4", "zero": True, "group_size": 64},
        {"weight_format": "int4", "group_size": None},
    ],
    ids=["mxfp4", "uint4-zero", "int4"],
)
def test_a_row_does_not_depend_on_how_many_share_its_expert(form: dict[str, object]) -> None:
    """Each shape of tiles, several blocks of groups, more strips than one call takes."""
    case = one_expert(num_tokens=210, hidden_size=384, intermediate_size=320, **form)
    whole = run(case)
    assert rel_l2(whole, case.reference()) < 1.8e-3
    for count in (4, 8, 9, 16, 17, 24, 33, 48, 49, 97, 193):
        assert bits(run(case, slice(0, count)), whole[:count]), count
        assert bits(run(case, slice(210 - count, 210)), whole[210 - count :]), count


@pytest.mark.parametrize("value", [2.0**-130, 2.0**-70, 2.0**95, float("inf"), float("nan")])
def test_tokens_that_the_unit_would_flush_or_overflow(value: float) -> None:
    case = one_expert(num_tokens=20, hidden_size=96, intermediate_size=64)
    x, w13_scale = case.hidden_states.clone(), case.w13_scale.clone()
    x[:, 32:64] = 0
    if abs(value) < 1:  # a scale that lets the small values be seen in the result
        w13_scale[:, :, 1] = min(252, 127 - int(torch.tensor(value).log2()))
    expected = run(dataclasses.replace(case, hidden_states=x, w13_scale=w13_scale))
    x[3] *= 0
    x[3, 32:64] = value
    x[17, 40] = value
    changed = dataclasses.replace(case, hidden_states=x, w13_scale=w13_scale)
    result, reference = run(changed), changed.reference()
    others = [t for t in range(20) if t not in (3, 17)]
    assert bits(result[others], expected[others])
    for t in (3, 17):
        if reference[t].isfinite().all():
            assert rel_l2(result[t], reference[t]) < 3e-3
        else:
            assert torch.equal(result[t].isnan(), reference[t].bfloat16().isnan())


def test_an_intermediate_that_the_unit_would_flush() -> None:
    """Gates and ups near 2^-62, so much of h below 2^-126, brought back by the scales of w2."""
    case = one_expert(num_tokens=19, hidden_size=64, intermediate_size=96)
    case = dataclasses.replace(case, w13_scale=case.w13_scale - 60, w2_scale=case.w2_scale + 120)
    assert rel_l2(run(case), case.reference()) < 1e-2  # bf16 has 7 bits and fewer there


@pytest.mark.parametrize("byte", [0, 1, 88, 253, 254])
def test_groups_of_zeros_may_have_any_scale(byte: int) -> None:
    case = one_expert(num_tokens=20, hidden_size=96, intermediate_size=64)
    w13, w13_scale = case.w13.clone(), case.w13_scale.clone()
    w13[:, 5, 16:32] = 0x80
    expected = run(dataclasses.replace(case, w13=w13))
    w13_scale[:, 5, 1] = byte
    assert bits(run(dataclasses.replace(case, w13=w13, w13_scale=w13_scale)), expected)


@pytest.mark.parametrize("scale", [0.0, 2.0**-130, 2.0**-60, -0.01, 2.0**121, float("inf"), float("nan")])
@pytest.mark.parametrize("zero", [False, True])
def test_every_kind_of_int4_scale(scale: float, zero: bool) -> None:
    case = one_expert(num_tokens=20, hidden_size=96, intermediate_size=64, weight_format="uint4", zero=zero)
    case = dataclasses.replace(case, hidden_states=case.hidden_states * 2.0**-20)
    for name, row in (("w13_scale", 3), ("w2_scale", 7)):
        scales = getattr(case, name).clone()
        scales[0, row, 1] = scale
        changed = dataclasses.replace(case, **{name: scales})
        result, expected = run(changed).float(), changed.reference().bfloat16().float()
        assert torch.equal(result.isnan(), expected.isnan())
        assert torch.equal(result.isinf(), expected.isinf())
        finite = expected.isfinite()
        tolerance = 2e-3 * float(torch.where(finite, expected, 0).abs().max())
        torch.testing.assert_close(result[finite], expected[finite], rtol=2**-7, atol=tolerance)


def test_int4_products_are_exact() -> None:
    """Scales of 8 significant bits times codes less zero points of up to 5: one sum of ones is the weight itself."""
    case = one_expert(
        num_tokens=16, hidden_size=64, intermediate_size=64, weight_format="uint4", zero=True, bias=True
    )
    case = dataclasses.replace(case, hidden_states=torch.zeros_like(case.hidden_states))
    bias = torch.zeros(2, 128)
    bias[:, 64:] = torch.eye(64)[9] * 2.0**-6
    bias[:, :64] = 64.0  # silu(64) = 64: h is 1 at one place
    w13_bias = bias.bfloat16()
    case = dataclasses.replace(
        case, w13_bias=w13_bias, w2_bias=torch.zeros(2, 64).bfloat16(), topk_weights=torch.ones(16, 1)
    )
    assert torch.equal(run(case), case.reference().bfloat16())


def test_experts_with_few_rows_take_the_vector_path() -> None:
    """3 and 2 routes: with 3 as the crossover, the second expert's results are those of avx512."""
    case = random_case(num_tokens=5, num_experts=2, top_k=1, hidden_size=96, intermediate_size=64)
    case = dataclasses.replace(case, topk_ids=torch.tensor([[0], [1], [0], [1], [0]]))
    unit, library = run(case), cpu._library()
    assert library.mxk_cpu_select(b"avx512") == 0
    vector = run(case)
    assert library.mxk_cpu_select(b"amx") == 0
    library.mxk_cpu_matrix_rows(ctypes.c_int64(3))
    mixed = run(case)
    assert bits(mixed[[0, 2, 4]], unit[[0, 2, 4]])
    assert bits(mixed[[1, 3]], vector[[1, 3]])


def test_scratch_is_bounded() -> None:
    """tile.h: strips waste at most one strip of tokens and one of routes for each expert."""
    case = one_expert(num_tokens=512, hidden_size=512, intermediate_size=512)
    run(case)
    assert cpu.scratch_bytes() < 512 * (6 * 512 + 4 * 512 + 200) + 64 * 1024 * 4 * 32
