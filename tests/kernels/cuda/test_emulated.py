"""`mxk::moe` by the CUDA kernels, emulated on the CPU: numbers against the fp32 reference, bits against another order.

The kernels' own sources and host code run here without a GPU (emulator/__init__.py says how, and what it cannot show).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kernels.cuda import emulator
from torch import Tensor

from mxk_compile.ops import moe
from mxk_compile.ops.dequant import dequantize
from mxk_compile.testing import MoECase, most_rel_l2, random_case, rel_l2

pytestmark = pytest.mark.skipif(emulator.missing() is not None, reason=f"emulator: {emulator.missing()}")

OTHER_ORDER = 7
GPT_OSS = {
    "row_order": "interleaved",
    "activation": "swiglu_oai",
    "alpha": 1.702,
    "limit": 7.0,
    "bias": True,
}


@dataclasses.dataclass(frozen=True)
class Call:
    """A random call, its schedule, and the size of the device."""

    schedule: str
    arguments: dict[str, Any]
    processors: int = 3
    change: Callable[[MoECase], None] = lambda case: None
    lists: bool = False

    def case(self) -> MoECase:
        """The same each time."""
        sizes = {"num_tokens": 4, "num_experts": 5, "top_k": 2, "hidden_size": 96, "intermediate_size": 64}
        case = random_case(**{**sizes, **self.arguments})  # type: ignore[arg-type]
        self.change(case)
        return case

    def run(self, seed: int) -> Tensor:
        """Result on an emulated device."""
        with emulator.use(processors=self.processors, seed=seed):
            return emulator.fused(self.case(), self.schedule, self.lists)

    def build(self) -> None:
        """Compiles, and runs nothing."""
        emulator.prepared(self.case(), self.schedule, self.lists)


def strange_ids(case: MoECase) -> None:
    """Not here, duplicate, and beyond 32 bits; token 2 has no expert at all."""
    case.topk_ids[0] = case.topk_ids[0, 0]
    case.topk_ids[1, 0], case.topk_ids[3, 0] = -1, 2**32 + 3
    case.topk_ids[2, :2] = torch.tensor([1, 2**63 - 1])
    case.topk_ids[2, 2:] = -(2**63)


def large_scales(case: MoECase) -> None:
    """Above 128: each group is scaled for itself."""
    case.w13_scale[1, ::3], case.w2_scale[2, 5] = 129, 140


def with_gaps(case: MoECase) -> None:
    """Rows of weights, scales and x that no bulk copy takes."""
    case.w2 = torch.nn.functional.pad(case.w2, (0, 16))[..., :-16]
    case.w13_scale = torch.nn.functional.pad(case.w13_scale, (0, 3))[..., :-3]
    case.hidden_states = torch.nn.functional.pad(case.hidden_states, (0, 3))[:, :-3]
    case.topk_ids = case.topk_ids.to(torch.int8).t().contiguous().t()
    case.topk_weights = case.topk_weights.float()


def small_ids(case: MoECase) -> None:
    case.topk_ids = case.topk_ids.to(torch.uint8)
    case.topk_weights = case.topk_weights.half()


def nobody_here(case: MoECase) -> None:
    case.topk_ids[:] = 5


DECODE = {
    "one token": Call("decode:groups=3,max_routes=64", {"num_tokens": 1}, processors=2),
    "gpt-oss": Call("decode:groups=2,max_routes=64", {**GPT_OSS, "num_tokens": 5, "hidden_size": 160}, 5),
    "ragged": Call(
        "decode:groups=3,chunk=5,stages=4,buffers=2,max_routes=64",
        {
            "num_tokens": 3,
            "hidden_size": 736,
            "intermediate_size": 480,
            "num_experts": 3,
            "row_order": "up_gate",
        },
        processors=6,
    ),
    "padded scales": Call(
        "decode:groups=2,stages=2,buffers=1,max_routes=64",
        {**GPT_OSS, "row_order": "gate_up", "hidden_size": 512, "intermediate_size": 1024, "num_experts": 2},
        processors=8,
    ),
    "padded, interleaved": Call(
        "decode:groups=3,max_routes=64",
        {**GPT_OSS, "hidden_size": 1024, "intermediate_size": 96},
        processors=4,
    ),
    "many rows": Call(
        "decode:groups=2,column_tiles=2,max_routes=256",
        {"num_tokens": 30, "num_experts": 3, "hot": True, "activation": "swiglu_clamp", "limit": 0.3},
    ),
    "four tiles": Call(
        "decode:groups=3,column_tiles=4,max_routes=256",
        {**GPT_OSS, "num_tokens": 40, "num_experts": 6},
        processors=7,
    ),
    "three tiles a route": Call(
        "decode:groups=2,column_tiles=3,max_routes=64",
        {"num_tokens": 13, "per_route": True, "experts_min": 2, "bias": True},
        change=strange_ids,
    ),
    "strange ids": Call(
        "decode:groups=3,max_routes=64", {"num_tokens": 6, "top_k": 5, "experts_min": 2}, change=strange_ids
    ),
    "large scales": Call("decode:groups=2,max_routes=64", {"num_tokens": 7}, change=large_scales),
    "gaps": Call("decode:groups=2,max_routes=64", {**GPT_OSS, "hidden_size": 160}, change=with_gaps),
    "lists": Call(
        "decode:groups=2,max_routes=64", {"row_order": "up_gate", "bias": True}, 5, small_ids, lists=True
    ),
    "nobody here": Call("decode:groups=2,max_routes=64", {}, change=nobody_here),
}

PREFILL = {
    "gpt-oss": Call("prefill:16", {**GPT_OSS, "num_tokens": 9, "hidden_size": 160}, processors=2),
    "two sizes": Call(
        "prefill:16/48", {"num_tokens": 40, "num_experts": 3, "row_order": "up_gate", "bias": True}
    ),
    "ragged": Call(
        "prefill:80", {"num_tokens": 33, "hidden_size": 736, "intermediate_size": 480, "num_experts": 2}
    ),
    "large tiles": Call(
        "prefill:176", {"num_tokens": 60, "num_experts": 2, "activation": "swiglu_clamp", "limit": 0.3}
    ),
    "strange ids": Call(
        "prefill:32", {"num_tokens": 6, "top_k": 5, "experts_min": 2, "per_route": True}, change=strange_ids
    ),
    "part of a stage": Call(
        "prefill:32", {"num_tokens": 40, "hidden_size": 352, "intermediate_size": 288, "num_experts": 2}
    ),
    "large scales": Call("prefill:16", {"num_tokens": 7}, change=large_scales),
    "gaps": Call("prefill:16", {**GPT_OSS, "hidden_size": 160}, change=with_gaps),
    "lists": Call("prefill:16", {"row_order": "gate_up", "bias": True}, 5, small_ids, lists=True),
}


def alone(case: MoECase) -> None:
    case.topk_ids[:, 0] = torch.tensor([0, 1, 2, 0, 1, 2, 0, 1, 2, -1])


def not_a_number(case: MoECase) -> None:
    """In a token, and in the scales of two experts."""
    alone(case)
    case.hidden_states[3] = torch.nan
    case.w13_scale[1], case.w2_scale[3] = 255, 255


LONELY = {
    schedule: Call(schedule, {"num_tokens": 10, "top_k": 1}, change=alone)
    for schedule in ("decode:groups=2,max_routes=64", "prefill:16")
}


def int4(schedule: str, scale_dtype: torch.dtype = torch.bfloat16, **arguments: Any) -> Call:
    """A call with INT4 weights; scales are no short numbers."""

    def change(case: MoECase) -> None:
        case.w13_scale = (case.w13_scale * 1.003).to(scale_dtype)
        case.w2_scale = (case.w2_scale * 0.997).to(scale_dtype)

    sizes = {"hidden_size": 256, "intermediate_size": 128, "num_experts": 3, "num_tokens": 21}
    return Call(schedule, {"weight_format": "uint4", **sizes, **arguments}, 3, change)


INT4 = {
    "groups of 32": int4("prefill:16/32"),
    "groups of 64": int4("prefill:16", group_size=64, bias=True),
    "groups of 128": int4("prefill:16", torch.float16, group_size=128, zero=True),
    "a row": int4("prefill:32", group_size=None, zero=True, row_order="interleaved"),
    "int4": int4("prefill:144", torch.float16, weight_format="int4", num_tokens=90, num_experts=2),
    "fp32 scales": int4("prefill:64", torch.float32, weight_format="int4", num_tokens=50, per_route=True),
    "along outputs": int4("prefill:16", pack_dim="output", zero=True),
}


TABLES = {"decode": DECODE, "prefill": PREFILL, "packed": INT4, "lonely": LONELY}


@pytest.fixture(scope="module", autouse=True)
def built(request: pytest.FixtureRequest) -> None:
    """Compiles what the chosen tests need, by two threads."""
    items = [item for item in request.session.items if item.path == request.path]
    chosen = [item.callspec.params for item in items if hasattr(item, "callspec")]
    calls = [
        TABLES[name][key]
        for params in chosen
        for name, key in params.items()
        if name in TABLES and key in TABLES[name]
    ]
    with emulator.use():
        emulator.build_ahead([call.build for call in calls])


def check(call: Call, expected: Tensor) -> Tensor:
    """The result, after comparing it with what is expected, and its bits with those of another order."""
    result = call.run(seed=0)
    if bool((expected != 0).any()):
        assert rel_l2(result, expected) <= most_rel_l2(expected)
    assert torch.equal(result, call.run(seed=OTHER_ORDER)), "the order of threads changes no bit"
    return result


@pytest.mark.parametrize("decode", DECODE)
def test_decode(decode: str) -> None:
    call = DECODE[decode]
    expected = call.case().reference(round_intermediate=True)
    result = check(call, expected)
    none = (expected == 0).all(-1)
    assert torch.equal(result[none].view(torch.int16), torch.zeros_like(result[none].view(torch.int16)))


@pytest.mark.parametrize("prefill", PREFILL)
def test_prefill(prefill: str) -> None:
    call = PREFILL[prefill]
    check(call, call.case().reference(round_intermediate=True))


@pytest.mark.parametrize("packed", INT4)
def test_prefill_of_int4(packed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def rounded(*args: Any, **attributes: Any) -> Tensor:  # as the tensor cores take them
        return dequantize(*args, **attributes).bfloat16().float()

    call = INT4[packed]
    with monkeypatch.context() as patch:
        patch.setattr(moe, "dequantize", rounded)
        expected = call.case().reference(round_intermediate=True)
    check(call, expected)


@pytest.mark.parametrize("lonely", LONELY)
def test_a_token_knows_nothing_of_other_tokens_and_experts(lonely: str) -> None:
    call = LONELY[lonely]
    clean = call.run(seed=0)
    dirty = dataclasses.replace(call, change=not_a_number).run(seed=0)
    kept = [0, 2, 5, 6, 8, 9]
    assert torch.equal(dirty[kept], clean[kept])
    assert dirty[[1, 3, 4, 7]].isnan().all()
    assert torch.equal(dirty[9].view(torch.int16), torch.zeros(96, dtype=torch.int16))


def test_infinities_come_out_of_decode_as_in_the_reference() -> None:
    def change(case: MoECase) -> None:
        case.hidden_states[1, 7], case.hidden_states[2, 9] = torch.inf, -torch.inf
        case.hidden_states[4, 3], case.hidden_states[4, 5] = torch.nan, torch.inf

    call = Call("decode:groups=2,max_routes=64", {"num_tokens": 7}, change=change)
    result, expected = call.run(seed=0), call.case().reference(round_intermediate=True)
    assert torch.equal(result.isnan(), expected.isnan())
    assert torch.equal(result.isinf(), expected.isinf())
    assert result[[0, 3, 5, 6]].isfinite().all()


def tiny_values(case: MoECase) -> None:
    """Powers of two down to 2^-13 of the largest; all weights are zero but those of the smallest."""
    columns = torch.arange(96)
    case.hidden_states = (2.0 ** -(columns % 14)).expand(4, -1).bfloat16()
    case.w13 &= torch.where(torch.arange(48) % 7 == 6, 0xF0, 0).to(torch.uint8)
    case.w13_scale[:] = 128


def every_scale(case: MoECase) -> None:
    """Each byte scales a row of an expert that one token has."""
    case.topk_ids[:, 0] = torch.arange(8)
    case.w2_scale[:] = torch.arange(256).to(torch.uint8).view(8, 32, 1)


def test_values_far_below_their_rows_largest_are_exact() -> None:
    call = dataclasses.replace(DECODE["one token"], arguments={"num_tokens": 4}, change=tiny_values)
    check(call, call.case().reference(round_intermediate=True))


@pytest.mark.parametrize("schedule", ["decode:groups=2,max_routes=64", "prefill:16"])
def test_every_scale_byte(schedule: str) -> None:
    sizes = {"num_tokens": 8, "num_experts": 8, "top_k": 1, "hidden_size": 32, "intermediate_size": 32}
    call = Call(schedule, sizes, change=every_scale)
    result, expected = (
        call.run(seed=0).float(),
        call.case().reference(round_intermediate=True).bfloat16().float(),
    )
    assert torch.equal(result.isnan(), expected.isnan())
    assert torch.equal(result.isinf(), expected.isinf())
    finite = expected.isfinite() & (expected.abs() > 1e-36)
    assert ((result - expected)[finite].abs() <= 2**-6 * expected[finite].abs()).all()


def test_scales_that_change_in_place_are_another_call() -> None:
    call = DECODE["one token"]
    with emulator.use():
        case = call.case()
        prepared = emulator.prepared(case, call.schedule)
        assert prepared.current(case.w13_scale, case.w2_scale)
        case.w13_scale[0, 0] = 140
        assert not prepared.current(case.w13_scale, case.w2_scale)
