"""Any call that the op accepts, drawn by hypothesis, on every instruction set: the kernel against the fp32 reference.

Codes are raw bytes. Finite numbers are compared by rel_l2, as a whole and by row; NaN and infinities by their places.
No sum of finite values comes near fp32's largest number, so that those places do not depend on the order of addition.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mxk_compile.kernels import MoEDesc, cpu
from mxk_compile.ops.moe import reference

pytestmark = pytest.mark.skipif(cpu.available() is not None, reason=str(cpu.available()))

ISAS = ("baseline", "portable", "avx2", "avx512", "amx")
ID_DTYPES = (
    *(
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.uint16,
        torch.uint32,
        torch.uint64,
    ),
)
FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# bf16 bits that are no ordinary numbers: NaN of both kinds and signs, infinities, subnormals, zeros.
ODD_BF16 = (0x7FC0, 0xFF81, 0x7F80, 0xFF80, 0x0001, 0x807F, 0x0000, 0x8000)
ODD_E8M0 = (255, 0, 1)  # NaN, 2^-127, 2^-126


def sizes(draw: st.DrawFn, multiple: int) -> int:
    """Small ones around the steps of every kernel (32, 64, 128 columns; 16, 32 rows), multiples of `multiple`."""
    return draw(st.sampled_from((32, 64, 96, 128, 160, 192, 288, 464))) + draw(st.sampled_from((0, multiple)))


class Call(NamedTuple):
    """Tensors and attributes of a call of `mxk::moe`; prints as their layouts."""

    tensors: tuple[Tensor | None, ...]
    attributes: dict[str, Any]

    def __repr__(self) -> str:
        layouts = [None if t is None else (list(t.shape), str(t.dtype)) for t in self.tensors]
        return f"{layouts} {self.attributes}"


@st.composite
def calls(draw: st.DrawFn) -> Call:
    """Any call."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    odd = draw(st.booleans())
    weight_format = draw(st.sampled_from(("mxfp4", "uint4", "int4")))
    pack_dim = "input" if weight_format == "mxfp4" else draw(st.sampled_from(("input", "output")))
    # K and I: any multiple of 32, and what the layout allows besides.
    hidden_size, intermediate_size = sizes(draw, 8), sizes(draw, 8)
    num_tokens = draw(st.one_of(st.integers(0, 5), st.sampled_from((16, 33, 70))))
    num_experts, top_k = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    has_zero = weight_format == "uint4" and draw(st.booleans())
    scale_dtype, bias_dtype = (
        draw(st.sampled_from(FLOAT_DTYPES)),
        draw(st.sampled_from((None, *FLOAT_DTYPES))),
    )

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator)

    def chosen(shape: tuple[int, ...], share: float) -> Tensor:
        return torch.rand(shape, generator=generator) < share

    def projection(rows: int, columns: int) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        groups = -(-columns // 32)
        if weight_format != "mxfp4":
            fitting = [g for g in (32, 64, 128) if columns % g == 0]
            groups = columns // draw(st.sampled_from((*fitting, columns)))
        if pack_dim == "output":
            words = integers(-(2**31), 2**31, num_experts, columns, rows // 8).to(torch.int32)
            scale_shape = (num_experts, groups, rows)
        else:
            words = integers(0, 256, num_experts, rows, columns // 2).to(torch.uint8)
            scale_shape = (num_experts, rows, groups)
            if weight_format != "mxfp4" and columns % 8 == 0 and draw(st.booleans()):
                words = words.view(torch.int32)
        if weight_format == "mxfp4":
            scale = integers(118, 125, *scale_shape)
            wild = torch.tensor(ODD_E8M0)[integers(0, len(ODD_E8M0), *scale_shape)]
            scale = torch.where(chosen(scale_shape, 0.002) & odd, wild, scale).to(torch.uint8)
        else:
            sign = torch.where(chosen(scale_shape, 0.1), -1.0, 1.0)
            scale = (torch.rand(scale_shape, generator=generator) * 0.01 + 0.002) * sign
            wild = torch.tensor((float("nan"), float("inf"), -0.0, 2.0**-20, 2.0**-140))[
                integers(0, 5, *scale_shape)
            ]
            scale = torch.where(chosen(scale_shape, 0.002) & odd, wild, scale).to(scale_dtype)
        zero = None
        if has_zero:
            zero = integers(0, 16, *scale_shape).to(torch.uint8)
            if pack_dim == "output" and draw(st.booleans()):
                pairs = zero.view(*scale_shape[:2], -1, 2)
                zero = (pairs[..., 0] | pairs[..., 1] << 4).contiguous().view(torch.int32)
        bias = torch.randn(num_experts, rows, generator=generator)
        return words, scale, zero, None if bias_dtype is None else bias.to(bias_dtype)

    w13, w13_scale, w13_zero, w13_bias = projection(2 * intermediate_size, hidden_size)
    w2, w2_scale, w2_zero, w2_bias = projection(hidden_size, intermediate_size)

    x = torch.randn(num_tokens, hidden_size, generator=generator).bfloat16()
    # A token is ordinary, has a few odd values, or is of an odd size altogether.
    kinds = integers(0, 4, num_tokens, 1)
    wild = torch.tensor(ODD_BF16)[integers(0, len(ODD_BF16), *x.shape)].to(torch.int16).view(torch.bfloat16)
    x = torch.where((kinds == 1) & chosen(tuple(x.shape), 0.01) & odd, wild, x)
    x = torch.where(
        (kinds == 2) & odd, (x.double() * 2.0 ** draw(st.sampled_from((-130, -60, 8)))).bfloat16(), x
    )

    dtype = draw(st.sampled_from(ID_DTYPES))
    experts_min = draw(st.sampled_from((0, 0, 3, 100)))
    ids = integers(-2, num_experts + 2, num_tokens, top_k) + experts_min  # duplicates and strangers
    far = integers(-(2**62), 2**62, num_tokens, top_k) * 2
    ids = torch.where(chosen(tuple(ids.shape), 0.1), far, ids).to(dtype)
    router = torch.randn(num_tokens, top_k, generator=generator).to(
        draw(st.sampled_from((*FLOAT_DTYPES, torch.float64)))
    )
    activation = draw(st.sampled_from(("silu", "swiglu_clamp", "swiglu_oai")))
    attributes = {
        "weight_format": weight_format,
        "pack_dim": pack_dim,
        "row_order": draw(st.sampled_from(("gate_up", "up_gate", "interleaved"))),
        "activation": activation,
        "alpha": draw(st.sampled_from((1.0, 1.702))),
        "limit": draw(st.sampled_from((None, 0.5, 7.0))),
        "experts_min": experts_min,
        "per_route": draw(st.booleans()),
    }
    tensors = (x, ids, router, w13, w13_scale, w2, w2_scale, w13_zero, w2_zero, w13_bias, w2_bias)
    return Call(tensors, attributes)


def agrees(tensors: tuple[Tensor | None, ...], attributes: dict[str, Any], threads: int) -> None:
    """Kernel and reference give the same, and the kernel the same again from lists and with other threads."""
    desc = MoEDesc.from_call(*tensors, **attributes)
    assert cpu.supports(desc) is None
    scalars = {name: attributes[name] for name in ("alpha", "limit", "experts_min")}
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        result = cpu.Prepared(desc, *tensors, **scalars)(*tensors[:3])
        torch.set_num_threads(3 - threads)
        again = torch.ops.mxk.moe.lists(
            *tensors[:3], *([] if tensor is None else list(tensor) for tensor in tensors[3:]), **attributes
        )
    finally:
        torch.set_num_threads(before)
    assert torch.equal(result.view(torch.int16), again.view(torch.int16))

    x, *rest = tensors
    assert x is not None
    expected = reference(x.float(), *rest, **attributes, round_intermediate=False)
    rounded = expected.bfloat16()  # what is too large for bf16 is infinite in it
    result = result.float()
    assert torch.equal(result.isnan(), rounded.isnan())
    assert torch.equal(result.isinf(), rounded.isinf())
    finite = rounded.isfinite()
    result, expected = torch.where(finite, result, 0), torch.where(finite, expected, 0)
    rows = zip(result.reshape(-1, x.shape[1]), expected.reshape(-1, x.shape[1]), strict=True)
    for got, exact, most in ((result, expected, 2.2e-3), *((*row, 4e-3) for row in rows)):
        # Subnormal results have few bits: one of bf16's lowest is allowed a value.
        error = float((got.double() - exact.double()).norm())
        assert error <= most * float(exact.double().norm()) + 2.0**-133 * exact.numel() ** 0.5
    local = (rest[0].to(torch.int64) - attributes["experts_min"]) if rest[0] is not None else None
    assert local is not None
    inside = (local >= 0) & (local < len(w2) if (w2 := tensors[5]) is not None else 0)
    nothing = ~inside if attributes["per_route"] else ~inside.any(1)
    assert not result[nothing].any()
    assert not result[nothing].signbit().any()


@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=30, deadline=None, derandomize=True)
@given(call=calls(), threads=st.sampled_from((1, 2)))
def test_any_call(isa: str, call: Call, threads: int) -> None:
    if cpu._library().mxk_cpu_select(isa.encode()):
        pytest.skip(f"no {isa} here")
    try:
        agrees(*call, threads)
    finally:
        cpu._library().mxk_cpu_select(b"auto")


@pytest.mark.slow
@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=2000, deadline=None)
@given(call=calls(), threads=st.sampled_from((1, 2)))
def test_many_calls(isa: str, call: Call, threads: int) -> None:
    test_any_call.hypothesis.inner_test(isa, call, threads)  # type: ignore[attr-defined]
