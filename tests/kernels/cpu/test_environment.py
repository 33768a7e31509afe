"""The CPU kernels and what surrounds a call: floating-point state, threads, forks, memory."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from mxk_compile.kernels import MoEDesc, cpu
from mxk_compile.testing import MoECase, random_case, rel_l2

pytestmark = pytest.mark.skipif(cpu.available() is not None, reason=str(cpu.available()))

ISAS = ("baseline", "portable", "avx2", "avx512", "amx")
GPTOSS = {"activation": "swiglu_oai", "alpha": 1.702, "limit": 7.0, "bias": True, "row_order": "interleaved"}


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each instruction set in turn; settings' choice is restored."""
    if cpu._library().mxk_cpu_select(request.param.encode()):
        pytest.skip(f"no {request.param} here")
    yield request.param
    cpu._library().mxk_cpu_select(b"auto")


def run(case: MoECase) -> Tensor:
    result: Tensor = torch.ops.mxk.moe(*case.routing, *case.weights, **case.attributes)
    return result


def bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int16), b.view(torch.int16))


# ---- floating-point state ------------------------------------------------------------------------------------------


@contextlib.contextmanager
def flushing() -> Iterator[None]:
    """Flush-to-zero and denormals-are-zero, as many applications set them."""
    assert torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


@contextlib.contextmanager
def rounding(mode: int) -> Iterator[None]:
    """A rounding mode of fenv.h, in this thread."""
    libm = ctypes.CDLL(None)
    before = libm.fegetround()
    if libm.fesetround(mode):
        pytest.skip("no such rounding mode here")
    try:
        yield
    finally:
        libm.fesetround(before)


_DOWN, _UP, _TOWARDS_ZERO = (0x400, 0x800, 0xC00) if sys.platform == "linux" else (0, 0, 0)
STATES = {
    "flush": flushing,
    "down": lambda: rounding(_DOWN),
    "up": lambda: rounding(_UP),
    "towards zero": lambda: rounding(_TOWARDS_ZERO),
}
x86 = pytest.mark.skipif(os.uname().machine != "x86_64", reason="modes of x86")


def odd_cases() -> dict[str, MoECase]:
    """Calls with numbers below the normal range in each operand, brought back to size by another."""
    small = {"num_tokens": 3, "hidden_size": 64, "intermediate_size": 64, "num_experts": 3, "top_k": 2}
    plain = random_case(**small)
    tokens = dataclasses.replace(
        plain,
        hidden_states=(plain.hidden_states.double() * 2.0**-130).bfloat16(),
        w13_scale=plain.w13_scale + 125,
    )
    int4 = random_case(weight_format="uint4", zero=True, **small)
    scales = dataclasses.replace(
        int4,
        hidden_states=(int4.hidden_states.double() * 2.0**100).bfloat16(),
        w13_scale=(int4.w13_scale.double() * 2.0**-125).bfloat16(),
    )
    halves = dataclasses.replace(
        int4,
        hidden_states=int4.hidden_states * 1024,
        w13_scale=(int4.w13_scale.double() * 2.0**-12).half(),
    )
    router: dict[str, MoECase] = {}
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        down = {torch.float16: 2.0**-20, torch.bfloat16: 2.0**-127}.get(dtype, 2.0**-140)
        w2_scale = plain.w2_scale + (18 if dtype == torch.float16 else 125)
        weights = (plain.topk_weights.double() * down).to(dtype)
        router[f"router {dtype}"] = dataclasses.replace(plain, topk_weights=weights, w2_scale=w2_scale)
    outputs = dataclasses.replace(plain, w2_scale=torch.full_like(plain.w2_scale, 3))
    return {"tokens": tokens, "scales": scales, "fp16 scales": halves, **router, "outputs": outputs}


@x86
@pytest.mark.parametrize("name", odd_cases())
def test_state_of_the_caller(isa: str, name: str) -> None:
    case = odd_cases()[name]
    expected = run(case)
    reference = case.reference().double()
    assert rel_l2(expected, reference) < 6e-3
    assert reference.any()
    before = ctypes.CDLL(None).fegetround()
    for state in STATES.values():
        with state():
            result = run(case)
        assert bits(result, expected)
    assert ctypes.CDLL(None).fegetround() == before


@x86
def test_state_of_the_caller_is_given_back(isa: str) -> None:
    case = random_case()
    tiny = torch.tensor([2.0**-140])
    with flushing():
        run(case)
        assert (tiny * 1.0).item() == 0.0
    assert (tiny * 1.0).item() == 2.0**-140
    with rounding(_UP):
        run(case)
        assert ctypes.CDLL(None).fegetround() == _UP
