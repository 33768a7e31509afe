"""Every stock form: expected graph, numbers against the reference, and near misses that must stay stock."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor

from mxk_compile.passes import run_passes
from mxk_compile.testing import MoECase, random_case, rel_l2

stock = torch.ops.hpu.mixture_of_experts
MXFP4 = {"block_size": 32, "permuted_weights": True, "is_fp4": True}
SWIGLU_OAI = {
    "activation": "swiglu_oai",
    "alpha": 1.702,
    "limit": 7.0,
    "row_order": "interleaved",
    "bias": True,
}


def ids_range(case: MoECase) -> dict[str, int]:
    first = case.attributes["experts_min"]
    return {"experts_min": first, "experts_max": first + len(case.w2) - 1}


def packed_zero(groups: int, columns: int) -> Tensor:
    """Packed zero points, all 8, as the Gaudi WNA16 layer shares one between its experts."""
    return torch.full((groups, columns // 8), 0x88888888 - (1 << 32), dtype=torch.int32)


def mxfp4_unbind(
    x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, s13: Tensor, w2: Tensor, s2: Tensor
) -> Tensor:
    return stock.mxfp4_fused_weights(
        x, ids, weights, w13.unbind(0), w2.unbind(0), s13.unbind(0), s2.unbind(0),
        activation="silu", experts_min=0, experts_max=len(w2) - 1, **MXFP4,
    )  # fmt: skip


def mxfp4_select(
    x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, s13: Tensor, w2: Tensor, s2: Tensor
) -> Tensor:
    lists = [[stack[e] for e in range(len(w2))] for stack in (w13, w2, s13, s2)]
    return stock.mxfp4_fused_weights(
        x, ids, weights, *lists, activation="silu", experts_min=0, experts_max=len(w2) - 1, **MXFP4
    )


def wna16(
    x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, s13: Tensor, w2: Tensor, s2: Tensor, *zeros: Tensor
) -> Tensor:
    """vllm-gaudi's WNA16 layer: 2E conversions, then the bf16 overload through the packet, all keywords."""
    w12, w3 = [], []
    for e in range(len(w2)):
        w12.append(torch.ops.hpu.convert_from_uint4(w13[e], s13[e], zeros[0], torch.bfloat16, None))
        w3.append(torch.ops.hpu.convert_from_uint4(w2[e], s2[e], zeros[1], torch.bfloat16, None))
    return stock(
        hidden_states=x, expert_routing_table=ids, router_weights=weights, w12=w12, w3=w3,
        permuted_weights=False, activation="silu", experts_min=0, experts_max=len(w2) - 1,
    )  # fmt: skip


def test_mxfp4_unbind(rewrite: Callable[..., Any]) -> None:
    case = random_case(num_experts=2)
    found = rewrite(mxfp4_unbind, *case.routing, *case.weights[:4])
    assert_expected_inline(
        found.before[0],
        """\
unbind = unbind.int(arg0_1)
getitem = getitem(unbind, 0)
getitem_1 = getitem(unbind, 1)
unbind_1 = unbind.int(arg1_1)
getitem_2 = getitem(unbind_1, 0)
getitem_3 = getitem(unbind_1, 1)
unbind_2 = unbind.int(arg2_1)
getitem_4 = getitem(unbind_2, 0)
getitem_5 = getitem(unbind_2, 1)
unbind_3 = unbind.int(arg3_1)
getitem_6 = getitem(unbind_3, 0)
getitem_7 = getitem(unbind_3, 1)
mixture_of_experts = mixture_of_experts.mxfp4_fused_weights(arg4_1, arg5_1, arg6_1, [getitem, getitem_1],
    [getitem_2, getitem_3], [getitem_4, getitem_5], [getitem_6, getitem_7], block_size=32,
    permuted_weights=True, activation='silu', experts_min=0, experts_max=1, is_fp4=True)
return (mixture_of_experts,)""",
    )
    assert_expected_inline(
        found.after[0],
        """\
moe_default = moe.default(arg4_1, arg5_1, arg6_1, arg0_1, arg2_1, arg1_1, arg3_1, None, None, None, None,
    weight_format='mxfp4', row_order='gate_up', activation='silu', pack_dim='input', experts_min=0)
return (moe_default,)""",
    )
    assert torch.equal(found.result, case.fused())
    assert rel_l2(found.result, case.reference()) < 4e-3


def test_mxfp4_select(rewrite: Callable[..., Any]) -> None:
    case = random_case(num_experts=4)
    found = rewrite(mxfp4_select, *case.routing, *case.weights[:4])
    assert_expected_inline(
        found.after[0],
        """\
moe_default = moe.default(arg4_1, arg5_1, arg6_1, arg1_1, arg2_1, arg0_1, arg3_1, None, None, None, None,
    weight_format='mxfp4', row_order='gate_up', activation='silu', pack_dim='input', experts_min=0)
return (moe_default,)""",
    )
    assert torch.equal(found.result, case.fused())


def test_slice_of_a_stack(rewrite: Callable[..., Any]) -> None:
    """One rank's experts, indexed out of a tensor that holds more: narrowed, not copied."""
    whole = random_case(num_experts=6, top_k=3)

    def local(x: Tensor, ids: Tensor, weights: Tensor, *stacks: Tensor) -> Tensor:
        lists = [[stack[e] for e in range(2, 5)] for stack in stacks]
        return stock.mxfp4_fused_weights(
            x, ids, weights, *lists, activation="silu", experts_min=2, experts_max=4, **MXFP4
        )

    found = rewrite(local, *whole.routing, whole.w13, whole.w2, whole.w13_scale, whole.w2_scale)
    assert_expected_inline(
        found.after[0],
        """\
slice_tensor = slice.Tensor(arg0_1, 0, 2, 5)
slice_tensor_1 = slice.Tensor(arg2_1, 0, 2, 5)
slice_tensor_2 = slice.Tensor(arg1_1, 0, 2, 5)
slice_tensor_3 = slice.Tensor(arg3_1, 0, 2, 5)
moe_default = moe.default(arg4_1, arg5_1, arg6_1, slice_tensor, slice_tensor_1, slice_tensor_2,
    slice_tensor_3, None, None, None, None, weight_format='mxfp4', row_order='gate_up', activation='silu',
    pack_dim='input', experts_min=2)
return (moe_default,)""",
    )
    stacks = [None if weight is None else weight[2:5] for weight in whole.weights]
    attributes = {**whole.attributes, "experts_min": 2}
    assert torch.equal(found.result, torch.ops.mxk.moe(*whole.routing, *stacks, **attributes))


@pytest.mark.parametrize("how", ["unbind", "select"])
def test_other_dimensions_are_no_stack(rewrite: Callable[..., Any], how: str) -> None:
    """Experts along dim 1 are views with a stride: taken as lists, never as the tensor they came from."""
    case = random_case(num_experts=2)

    def call(x: Tensor, ids: Tensor, weights: Tensor, *stacks: Tensor) -> Tensor:
        lists = [s.unbind(1) if how == "unbind" else [s[:, e] for e in range(2)] for s in stacks]
        return stock.mxfp4_fused_weights(
            x, ids, weights, *lists, activation="silu", **ids_range(case), **MXFP4
        )

    stacks = [
        weight.transpose(0, 1).contiguous() for weight in (case.w13, case.w2, case.w13_scale, case.w2_scale)
    ]
    found = rewrite(call, *case.routing, *stacks)
    assert found.report.num_fused == 1
    assert "moe.lists" in found.after[0]
    assert torch.equal(found.result, case.fused())


def test_lists_as_inputs(rewrite: Callable[..., Any]) -> None:
    case = random_case(num_experts=2, **SWIGLU_OAI)
    w13, s13, w2, s2, _, _, b13, b2 = case.lists

    def call(x: Tensor, ids: Tensor, weights: Tensor, *lists: list[Tensor]) -> Tensor:
        return stock.bias_mxfp4_fused_weights(
            x, ids, weights, *lists, alpha=1.702, limit=7.0, **ids_range(case), **MXFP4
        )

    found = rewrite(call, *case.routing, w13, w2, b13, b2, s13, s2)
    assert_expected_inline(
        found.after[0],
        """\
moe_lists = moe.lists(arg0_1, arg1_1, arg2_1, [arg3_1, arg4_1], [arg11_1, arg12_1], [arg5_1, arg6_1],
    [arg13_1, arg14_1], [], [], [arg7_1, arg8_1], [arg9_1, arg10_1], weight_format='mxfp4',
    row_order='interleaved', activation='swiglu_oai', pack_dim='input', experts_min=0, alpha=1.702, limit=7.0)
return (moe_lists,)""",
    )
    assert torch.equal(found.result, case.fused())


def test_separate_gate_and_up(rewrite: Callable[..., Any]) -> None:
    case = random_case(num_experts=2)
    half = case.w13.shape[1] // 2

    def call(
        x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, s13: Tensor, w2: Tensor, s2: Tensor
    ) -> Tensor:
        return stock.mxfp4(
            x, ids, weights,
            [w[:half] for w in w13], [w[half:] for w in w13], w2.unbind(0),
            [s[:half] for s in s13], [s[half:] for s in s13], s2.unbind(0),
            activation="silu", **ids_range(case), **MXFP4,
        )  # fmt: skip

    found = rewrite(call, *case.routing, *case.weights[:4])
    assert_expected_inline(
        found.after[0][found.after[0].index("moe_lists") :],
        """\
moe_lists = moe.lists(arg4_1, arg5_1, arg6_1, [slice_1, slice_2, slice_3, slice_4], [slice_5, slice_6,
    slice_7, slice_8], [getitem, getitem_1], [getitem_2, getitem_3], [], [], [], [], weight_format='mxfp4',
    row_order='separate', activation='silu', pack_dim='input', experts_min=0)
return (moe_lists,)""",
    )
    assert torch.equal(found.result, case.fused())


def test_wna16_conversions(rewrite: Callable[..., Any]) -> None:
    case = random_case(num_experts=2, weight_format="uint4", pack_dim="output")
    zeros = packed_zero(4, 128), packed_zero(2, 128)
    found = rewrite(wna16, *case.routing, *case.weights[:4], *zeros)
    assert_expected_inline(
        found.before[0],
        """\
select = select.int(arg1_1, 0, 0)
select_1 = select.int(arg2_1, 0, 0)
convert_from_uint4 = convert_from_uint4.default(select, select_1, arg3_1, torch.bfloat16)
select_2 = select.int(arg0_1, 0, 0)
select_3 = select.int(arg4_1, 0, 0)
convert_from_uint4_1 = convert_from_uint4.default(select_2, select_3, arg5_1, torch.bfloat16)
select_4 = select.int(arg1_1, 0, 1)
select_5 = select.int(arg2_1, 0, 1)
convert_from_uint4_2 = convert_from_uint4.default(select_4, select_5, arg3_1, torch.bfloat16)
select_6 = select.int(arg0_1, 0, 1)
select_7 = select.int(arg4_1, 0, 1)
convert_from_uint4_3 = convert_from_uint4.default(select_6, select_7, arg5_1, torch.bfloat16)
mixture_of_experts = mixture_of_experts.fused_weights(arg6_1, arg7_1, arg8_1, [convert_from_uint4,
    convert_from_uint4_2], [convert_from_uint4_1, convert_from_uint4_3], False, silu, 0, 1)
return (mixture_of_experts,)""",
    )
    assert_expected_inline(
        found.after[0],
        """\
unsqueeze_default = unsqueeze.default(arg3_1, 0)
expand_default = expand.default(unsqueeze_default, [2, 4, 16])
unsqueeze_default_1 = unsqueeze.default(arg5_1, 0)
expand_default_1 = expand.default(unsqueeze_default_1, [2, 2, 16])
moe_default = moe.default(arg6_1, arg7_1, arg8_1, arg1_1, arg2_1, arg0_1, arg4_1, expand_default,
    expand_default_1, None, None, weight_format='uint4', row_order='gate_up', activation='silu',
    pack_dim='output', experts_min=0)
return (moe_default,)""",
    )
    assert rel_l2(found.result, case.reference()) < 4e-3


@pytest.mark.parametrize("group", [32, 64, 128, None])
@pytest.mark.parametrize("form", ["conversions", "native"])
def test_int4_groups_of_every_size(rewrite: Callable[..., Any], group: int | None, form: str) -> None:
    native = form == "native"
    case = random_case(
        num_experts=3, weight_format="int4" if native else "uint4", pack_dim="output", group_size=group,
        zero=not native, hidden_size=256, intermediate_size=128, experts_min=5,
    )  # fmt: skip
    ids = ids_range(case)

    def call(x: Tensor, topk_ids: Tensor, weights: Tensor, *stacks: Tensor) -> Tensor:
        w13, s13, w2, s2, *zeros = (stack.unbind(0) for stack in stacks)
        if native:
            return stock.int4_fused_weights(
                x, topk_ids, weights, w13, w2, s13, s2, permuted_weights=False, activation="silu", **ids
            )
        convert = torch.ops.hpu.convert_from_uint4
        lists = [
            [convert(*parts, torch.bfloat16) for parts in zip(*stack, strict=True)]
            for stack in ((w13, s13, zeros[0]), (w2, s2, zeros[1]))
        ]
        return stock.fused_weights(x, topk_ids, weights, *lists, False, "silu", *ids.values())

    # One zero point a group and expert, packed like the weights.
    zeros = [z[..., 0::2] | z[..., 1::2] << 4 for z in case.weights[4:6] if z is not None]
    words = [z.contiguous().flatten().view(torch.int32).view(*z.shape[:2], -1) for z in zeros]
    found = rewrite(call, *case.routing, *case.weights[:4], *words)
    assert found.report.num_fused == 1, str(found.report)
    assert found.after[0].count("moe.default") == 1
    assert "mixture_of_experts" not in found.after[0]
    assert "convert_from" not in found.after[0]
    assert torch.equal(found.result, case.fused())
    assert rel_l2(found.result, case.reference()) < 6e-3


@pytest.mark.parametrize("overload", ["default", "bias_fused_weights"])
def test_conversions_feed_every_float_overload(rewrite: Callable[..., Any], overload: str) -> None:
    bias = overload == "bias_fused_weights"
    case = random_case(num_experts=2, weight_format="int4", pack_dim="output", **(SWIGLU_OAI if bias else {}))
    half = case.w13.shape[2] // 2

    def convert(values: Tensor, scales: Tensor) -> list[Tensor]:
        return [
            torch.ops.hpu.convert_from_int4(v.contiguous(), s.contiguous(), None, torch.bfloat16)
            for v, s in zip(values, scales, strict=True)
        ]

    def call(
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        w13: Tensor,
        s13: Tensor,
        w2: Tensor,
        s2: Tensor,
        *biases: Tensor,
    ) -> Tensor:
        down = convert(w2, s2)
        if bias:
            lists = [convert(w13, s13), down, *(b.unbind(0) for b in biases)]
            return stock.bias_fused_weights(
                x, ids, weights, *lists, permuted_weights=False, **ids_range(case)
            )
        gate_up = (
            convert(w13[..., :half], s13[..., : 8 * half]),
            convert(w13[..., half:], s13[..., 8 * half :]),
        )
        return stock(x, ids, weights, *gate_up, down, False, "silu", *ids_range(case).values())

    biases = case.weights[6:] if bias else ()
    found = rewrite(call, *case.routing, *case.weights[:4], *biases)
    assert found.report.num_fused == 1, str(found.report)
    assert "convert_from" not in found.after[0]
    assert torch.equal(found.result, case.fused())


def test_int4_native(rewrite: Callable[..., Any]) -> None:
    case = random_case(num_experts=2, weight_format="int4", pack_dim="output")

    def call(x: Tensor, ids: Tensor, weights: Tensor, *stacks: Tensor) -> Tensor:
        lists = [stack.unbind(0) for stack in stacks]
        return stock.int4_fused_weights(
            x, ids, weights, *lists, permuted_weights=False, activation="silu", **ids_range(case)
        )

    found = rewrite(call, *case.routing, case.w13, case.w2, case.w13_scale, case.w2_scale)
    assert_expected_inline(
        found.after[0],
        """\
moe_default = moe.default(arg4_1, arg5_1, arg6_1, arg0_1, arg2_1, arg1_1, arg3_1, None, None, None, None,
    weight_format='int4', row_order='gate_up', activation='silu', pack_dim='output', experts_min=0)
return (moe_default,)""",
    )
    assert torch.equal(found.result, case.fused())


def all_positional(
    x: Tensor, ids: Tensor, weights: Tensor, w12: list, w3: list, s12: list, s3: list
) -> Tensor:
    return stock.mxfp4_fused_weights(
        x, ids, weights, w12, w3, s12, s3, block_size=32, permuted_weights=True, activation="silu",
        experts_min=0, experts_max=7, is_fp4=True, chunk_size=0, total_experts=0,
    )  # fmt: skip


def all_keywords(x: Tensor, ids: Tensor, weights: Tensor, w12: list, w3: list, s12: list, s3: list) -> Tensor:
    return stock.mxfp4_fused_weights(
        hidden_states=x, expert_routing_table=ids, router_weights=weights, w12=w12, w3=w3, d_scale_w12=s12,
        d_scale_w3=s3, experts_max=7, experts_min=0, is_fp4=True, activation="silu", permuted_weights=True,
        block_size=32,
    )  # fmt: skip


def packet(x: Tensor, ids: Tensor, weights: Tensor, w12: list, w3: list, s12: list, s3: list) -> Tensor:
    return stock(
        x, ids, weights, w12=w12, w3=w3, d_scale_w12=s12, d_scale_w3=s3, total_experts=8, chunk_size=4,
        experts_max=7, experts_min=0, is_fp4=True, activation="silu", permuted_weights=True, block_size=32,
    )  # fmt: skip


@pytest.mark.parametrize("level", ["dynamo", "aot"])
@pytest.mark.parametrize("call", [all_positional, all_keywords, packet], ids=lambda call: call.__name__)
def test_spellings_of_one_call(capture: Callable[..., Any], level: str, call: Callable[..., Tensor]) -> None:
    """A13: positional, keywords, omitted defaults and the packet are one call, at both graph levels."""
    case = random_case()
    w13, s13, w2, s2, *_ = case.lists
    module = capture(call, *case.routing, w13, w2, s13, s2, level=level)
    report = run_passes(module)
    assert report.num_fused == 1, str(report)
    fused = [node for node in module.graph.nodes if node.target is torch.ops.mxk.moe.lists]
    assert len(fused) == 1
    assert fused[0].kwargs["activation"] == "silu"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"activation": "gelu"}, "activation 'gelu', a fused kernel needs 'silu'"),
        ({"is_fp4": False}, "is_fp4=False, a fused kernel needs True"),
        ({"permuted_weights": False}, "permuted_weights=False, a fused kernel needs True"),
        ({"block_size": 16}, "block_size=16, a fused kernel needs 32"),
        ({"experts_max": 6}, "w12 lists 8 experts, experts_min..experts_max are 7"),
        ({"experts_min": 1}, "w12 lists 8 experts, experts_min..experts_max are 7"),
    ],
)
def test_flag_near_misses(capture: Callable[..., Any], changes: dict[str, Any], reason: str) -> None:
    """A flag outside the known-good set keeps the stock node, and says which."""
    case = random_case()
    module = capture(functools.partial(mxfp4_unbind), *case.routing, *case.weights[:4])
    node = next(n for n in module.graph.nodes if n.target is stock.mxfp4_fused_weights)
    node.kwargs = {**node.kwargs, **changes}
    before = str(module.graph)
    report = run_passes(module)
    assert [n.reason for n in report.nodes] == [reason]
    assert str(module.graph) == before


def test_unknown_argument_stays_stock(capture: Callable[..., Any]) -> None:
    """A later bridge adds an argument: with its default the call is known, with another value it is not."""
    library = torch.library.Library("mxk_later_bridge", "DEF")
    schema = str(stock.mxfp4_fused_weights._schema).replace("hpu::mixture_of_experts.", "")
    library.define(schema.replace(") -> Tensor", ", float swiglu_beta=1.0) -> Tensor"))
    later = torch.ops.mxk_later_bridge.mxfp4_fused_weights.default
    from mxk_compile.passes.fuse_moe import Declined, _check_flags
    from mxk_compile.passes.stock_forms import FORMS

    case = random_case()
    module = capture(mxfp4_unbind, *case.routing, *case.weights[:4])
    node = next(n for n in module.graph.nodes if n.target is stock.mxfp4_fused_weights)
    from mxk_compile.passes.arguments import bind

    bound = bind(later, node)
    assert bound is not None
    form = FORMS["mxfp4_fused_weights"]
    _check_flags(form, later, bound)
    with pytest.raises(Declined, match=r"swiglu_beta=0.5 is not known"):
        _check_flags(form, later, {**bound, "swiglu_beta": 0.5})


def test_float_weights_stay_stock(rewrite: Callable[..., Any]) -> None:
    x = torch.randn(4, 64).bfloat16()
    ids, weights = torch.tensor([[0, 1]] * 4), torch.ones(4, 2).bfloat16()
    w12 = [torch.randn(128, 64).bfloat16() for _ in range(2)]
    w3 = [torch.randn(64, 64).bfloat16() for _ in range(2)]
    found = rewrite(lambda *a: stock.fused_weights(*a, True, "silu", 0, 1), x, ids, weights, w12, w3)
    assert found.reasons == ["permuted_weights=True, a fused kernel needs False"]
    found = rewrite(
        lambda *a: stock.fused_weights(*a, False, "silu", 0, 1),
        x,
        ids,
        weights,
        [w.T for w in w12],
        [w.T for w in w3],
    )
    assert found.reasons == ["the weights are floating point, not packed 4-bit"]


def test_one_converted_list_is_not_enough(rewrite: Callable[..., Any]) -> None:
    """Near miss of the conversion pattern: one expert's weight comes from elsewhere."""
    case = random_case(num_experts=2, weight_format="uint4", pack_dim="output")
    zeros = packed_zero(4, 128), packed_zero(2, 128)

    def call(
        x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, s13: Tensor, w2: Tensor, s2: Tensor, *z: Tensor
    ) -> Tensor:
        w12 = [torch.ops.hpu.convert_from_uint4(w13[e], s13[e], z[0], torch.bfloat16) for e in range(2)]
        w3 = [torch.ops.hpu.convert_from_uint4(w2[e], s2[e], z[1], torch.bfloat16) for e in range(2)]
        return stock.fused_weights(x, ids, weights, [w12[0], w12[1] * 2], w3, False, "silu", 0, 1)

    found = rewrite(call, *case.routing, *case.weights[:4], *zeros)
    assert found.reasons == ["the weights are floating point, not packed 4-bit"]
    assert found.after == found.before


def test_conversion_without_zero_point_stays_stock(rewrite: Callable[..., Any]) -> None:
    """What an unsigned code means without a zero point is published nowhere."""
    case = random_case(num_experts=1, top_k=1, weight_format="uint4", pack_dim="output")

    def call(x: Tensor, ids: Tensor, weights: Tensor, *stacks: Tensor) -> Tensor:
        w13, s13, w2, s2 = (stack[0] for stack in stacks)
        converted = [
            [torch.ops.hpu.convert_from_uint4(w, s, None, torch.bfloat16)] for w, s in ((w13, s13), (w2, s2))
        ]
        return stock.fused_weights(x, ids, weights, *converted, False, "silu", 0, 0)

    found = rewrite(call, *case.routing, *case.weights[:4])
    assert found.reasons == ["convert_from_uint4 without zero_point"]


def test_conversion_used_elsewhere_is_kept(rewrite: Callable[..., Any]) -> None:
    case = random_case(num_experts=1, top_k=1, weight_format="int4", pack_dim="output")

    def call(x: Tensor, ids: Tensor, weights: Tensor, *stacks: Tensor) -> tuple[Tensor, Tensor]:
        w13, s13, w2, s2 = (stack[0] for stack in stacks)
        up, down = (
            torch.ops.hpu.convert_from_int4(w, s, None, torch.bfloat16) for w, s in ((w13, s13), (w2, s2))
        )
        return stock.fused_weights(x, ids, weights, [up], [down], False, "silu", 0, 0), down.sum()

    found = rewrite(call, *case.routing, *case.weights[:4])
    assert found.report.num_fused == 1
    assert found.after[0].count("convert_from_int4.default") == 1


@pytest.mark.parametrize("when", ["before", "between", "after"])
def test_scales_mutated_in_an_exported_graph(when: str) -> None:
    """An exported graph is not functional: what is written after the conversions must not reach the fused call."""
    case = random_case(num_experts=2, weight_format="int4", pack_dim="output")

    class Model(torch.nn.Module):
        def forward(
            self, x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, s13: Tensor, w2: Tensor, s2: Tensor
        ):
            scale = s13.clone()
            if when == "before":
                scale.mul_(2.0)
            w12 = [torch.ops.hpu.convert_from_int4(w13[e], scale[e], None, torch.bfloat16) for e in range(2)]
            w3 = [torch.ops.hpu.convert_from_int4(w2[e], s2[e], None, torch.bfloat16) for e in range(2)]
            if when == "between":
                scale.mul_(2.0)
            y = stock.fused_weights(x, ids, weights, w12, w3, False, "silu", 0, 1)
            if when == "after":
                scale.mul_(2.0)
            return y

    inputs = (*case.routing, *case.weights[:4])
    module = torch.export.export(Model(), inputs).module()
    expected = module(*inputs)
    report = run_passes(module)
    assert report.num_fused == (when != "between")
    assert rel_l2(module(*inputs), expected) < 1e-2


def test_cond_branches(rewrite: Callable[..., Any]) -> None:
    case = random_case()

    def call(flag: Tensor, *inputs: Tensor) -> Tensor:
        return torch.cond(
            flag.sum() > 0, lambda *a: mxfp4_unbind(*a), lambda *a: mxfp4_unbind(*a) * 2, inputs
        )

    found = rewrite(call, torch.ones(1), *case.routing, *case.weights[:4])
    assert found.report.num_fused == 2
    assert torch.equal(found.result, case.fused())


def test_checkpointed_and_nested_regions(rewrite: Callable[..., Any]) -> None:
    case = random_case()

    @torch.compiler.nested_compile_region
    def region(*inputs: Tensor) -> Tensor:
        return mxfp4_unbind(*inputs)

    def call(*inputs: Tensor) -> Tensor:
        checkpointed = torch.utils.checkpoint.checkpoint(mxfp4_unbind, *inputs, use_reentrant=False)
        return region(*inputs) + checkpointed

    found = rewrite(call, *case.routing, *case.weights[:4])
    assert found.report.num_fused == 2, str(found.report)
    assert torch.equal(found.result, case.fused() * 2)


def test_two_layers_keep_their_names_and_metadata(capture: Callable[..., Any]) -> None:
    class Layer(torch.nn.Module):
        def __init__(self, seed: int) -> None:
            super().__init__()
            for name, weight in zip(("w13", "s13", "w2", "s2"), random_case(seed=seed).weights, strict=False):
                self.register_buffer(name, weight)

        def forward(self, *routing: Tensor) -> Tensor:
            return mxfp4_unbind(*routing, self.w13, self.s13, self.w2, self.s2)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(Layer(seed) for seed in range(2))

        def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
            for layer in self.layers:
                x = x + layer(x, ids, weights)
            return x

    module = capture(Model(), *random_case().routing)
    stock_meta = [dict(n.meta) for n in module.graph.nodes if n.target is stock.mxfp4_fused_weights]
    report = run_passes(module)
    assert [node.layer for node in report.nodes] == ["layers.0", "layers.1"]
    for node, meta in zip(
        (n for n in module.graph.nodes if n.target is torch.ops.mxk.moe.default), stock_meta, strict=True
    ):
        assert set(node.meta) == set(meta) - {"eager_input_vals"}
        assert node.meta["val"].shape == meta["val"].shape
        assert node.meta["val"].stride() == meta["val"].stride()
        assert node.meta["val"].dtype == meta["val"].dtype
        assert node.meta["stack_trace"] == meta["stack_trace"]
