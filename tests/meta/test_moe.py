"""`check_moe`: each rule refused in one line that names argument, given and allowed; fakes agree with real results."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from mxk_compile.errors import CallError
from mxk_compile.kernels import MoEDesc
from mxk_compile.testing import MoECase, random_case

Change = Callable[[MoECase], dict[str, Any]]


def attribute(**changes: Any) -> Change:
    return lambda case: {"attributes": {**case.attributes, **changes}}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (attribute(weight_format="fp4"), "weight_format is 'fp4'; allowed: mxfp4, uint4, int4"),
        (attribute(row_order="up"), "row_order is 'up'; allowed: gate_up, up_gate, interleaved"),
        (attribute(activation="gelu"), "activation is 'gelu'; allowed: silu, swiglu_clamp, swiglu_oai"),
        (attribute(pack_dim="rows"), "pack_dim is 'rows'; allowed: input, output"),
        (attribute(pack_dim="output"), "pack_dim is 'output' with mxfp4"),
        (attribute(row_order="separate"), "row_order is 'separate' with stacked weights"),
        (attribute(limit=float("nan")), "limit is nan; allowed: a number >= 0"),
        (attribute(limit=-2.0), r"limit is -2.0; allowed: a number >= 0"),
        (attribute(experts_min=-3), "experts_min is -3"),
        (
            lambda c: {"topk_weights": c.topk_weights.to(torch.float8_e4m3fn)},
            "topk_weights is .*float8_e4m3fn",
        ),
        (lambda c: {"hidden_states": c.hidden_states[0]}, r"hidden_states is \[128\]"),
        (lambda c: {"topk_ids": None}, "topk_ids is None; allowed: a tensor"),
        (lambda c: {"w13_scale": None}, "w13_scale is None; allowed: a tensor"),
        (lambda c: {"w13": torch.tensor(1)}, r"w13 is \[\] .*; allowed: experts stacked"),
        (lambda c: {"w2_scale": torch.tensor(1)}, "w2_scale is a scalar torch.int64; allowed: 8 experts"),
        (
            lambda c: {"hidden_states": c.hidden_states.int()},
            r"hidden_states is .*int32; allowed: .*floating point",
        ),
        (lambda c: {"hidden_states": c.hidden_states[:3]}, r"topk_ids is \[4, 2\].*; allowed: 3 rows"),
        (lambda c: {"topk_ids": c.topk_ids.bool()}, "topk_ids is .*bool; allowed: .*integer"),
        (
            lambda c: {"topk_weights": c.topk_weights[:, :1]},
            "topk_weights is .*; allowed: the shape of topk_ids",
        ),
        (lambda c: {"topk_weights": c.topk_weights.to("meta")}, "topk_weights is on meta; allowed: cpu"),
        (lambda c: {"w13": c.w13[:7]}, "w13 is 7 experts for 8 in w2"),
        (lambda c: {"w13": c.w13[..., :60]}, "w13 is .*120 input values; allowed: 128 input values"),
        (lambda c: {"w13": c.w13.float()}, "w13 is .*float32 an expert; allowed: a matrix of uint8"),
        (
            lambda c: {"w13": c.w13[:, :127], "w13_scale": c.w13_scale[:, :127]},
            "w13 is 127 rows; allowed: an even",
        ),
        (lambda c: {"w2": c.w2[:, :120]}, "w2 is 120 output rows; allowed: K = 128"),
        (
            lambda c: {"w13_scale": c.w13_scale[..., :3]},
            "w13_scale is .*; allowed: one a group of 32 for 128 outputs",
        ),
        (lambda c: {"w2_scale": c.w2_scale.to("meta")}, "w2_scale is on meta; allowed: cpu"),
        (lambda c: {"w2_scale": c.w2_scale.float()}, "w2_scale is .*float32 an expert"),
        (lambda c: {"w13_zero": c.w13_scale}, "w13_zero is given with mxfp4"),
        (lambda c: {"w2_bias": torch.zeros(8, 64)}, r"w2_bias is \[64\] .*; allowed: \[128\]"),
        (lambda c: {"w2_bias": torch.zeros(8, 128, dtype=torch.float64)}, "w2_bias is .*float64"),
        (lambda c: {"w13_bias": torch.zeros(8, 128, device="meta")}, "w13_bias is on meta"),
    ],
)
def test_refusals(change: Change, text: str) -> None:
    case = random_case()
    changed = dataclasses.replace(case, **change(case))
    with pytest.raises(CallError, match=text) as error:
        changed.fused()
    assert str(error.value).startswith("mxk::moe: ")
    assert "\n" not in str(error.value)


def test_a_known_shape_is_still_checked_for_its_tokens() -> None:
    """The verdict on a shape is kept; rows and routes that do not go together are refused all the same."""
    case = random_case()
    case.fused()
    for change in (
        {"topk_weights": case.topk_weights[:3]},
        {"topk_weights": case.topk_weights[:, :1]},
        {"topk_ids": case.topk_ids[:3], "topk_weights": case.topk_weights[:3]},
    ):
        with pytest.raises(CallError, match="topk_"):
            dataclasses.replace(case, **change).fused()


def test_sizes_of_packed_words_are_exact() -> None:
    """I = 20 in int32 words of 8: the words say 24, which is not what w13 says."""
    case = random_case(weight_format="int4", hidden_size=32, intermediate_size=32, num_experts=1, top_k=1)
    words = {"w13": case.w13.view(torch.int32)[:, :40], "w13_scale": case.w13_scale[:, :40]}
    changed = dataclasses.replace(case, **words, w2=case.w2.view(torch.int32)[..., :3])
    with pytest.raises(CallError, match="w2 is .*24 input values; allowed: 20 input values"):
        changed.fused()


@pytest.mark.parametrize("group_size", [16, 256])
def test_group_sizes(group_size: int) -> None:
    case = random_case(weight_format="int4", hidden_size=512, group_size=group_size)
    with pytest.raises(CallError, match="allowed: groups of 32, 64, 128 or one group a row"):
        case.fused()


@pytest.mark.parametrize("index", [0, 3])
def test_experts_of_a_list_must_agree(index: int) -> None:
    case = random_case(num_experts=4)
    lists = case.lists
    lists[2][index] = lists[2][index][:64]
    with pytest.raises(CallError, match=rf"w2\[{max(index, 1)}\] is|w2 is"):
        torch.ops.mxk.moe.lists(*case.routing, *lists, **case.attributes)


@pytest.mark.parametrize("per_route", [False, True])
@pytest.mark.parametrize("num_tokens", [0, 5])
def test_fake_agrees_with_real(per_route: bool, num_tokens: int) -> None:
    case = random_case(num_tokens=num_tokens, per_route=per_route, hidden_size=96)
    real = case.fused()
    with torch._subclasses.FakeTensorMode() as mode:
        operands = [None if t is None else mode.from_tensor(t) for t in (*case.routing, *case.weights)]
        fake = torch.ops.mxk.moe(*operands, **case.attributes)
    for name in ("shape", "dtype", "device"):
        assert getattr(fake, name) == getattr(real, name)
    assert fake.stride() == real.stride()


def test_description() -> None:
    case = random_case(weight_format="uint4", group_size=None, bias=True, row_order="up_gate")
    desc = MoEDesc.from_call(*case.routing, *case.weights, **case.attributes)
    assert str(desc) == "K=128 I=64 E=8 k=2 uint4/64x128 up_gate silu bias"
    assert hash(desc) == hash(dataclasses.replace(desc))
