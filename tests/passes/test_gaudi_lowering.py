"""Lowering for Gaudi: graphs on fake "hpu" tensors, their numbers through the stand-in ops, limits, guards, stacks."""

from __future__ import annotations

import dataclasses
import logging
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import gaudi_stand_ins as stand_ins
import pytest
import torch
from expecttest import assert_expected_inline
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from mxk_compile import errors
from mxk_compile.backend import compile_with
from mxk_compile.kernels import MoEDesc, supports, tpc
from mxk_compile.kernels.fallback import say_reference_once
from mxk_compile.kernels.select import token_range
from mxk_compile.ops import stack
from mxk_compile.ops.moe import reference
from mxk_compile.passes import Report, report, run_passes, warm
from mxk_compile.settings import Settings
from mxk_compile.testing import MoECase, random_case, rel_l2


@pytest.fixture(scope="module", autouse=True)
def ops() -> Iterator[None]:
    with stand_ins.ops():
        yield


stock = torch.ops.hpu.mixture_of_experts
MXFP4 = {"block_size": 32, "permuted_weights": True, "is_fp4": True}
OAI = {"row_order": "interleaved", "activation": "swiglu_oai", "bias": True, "alpha": 1.702, "limit": 7.0}
CASES: dict[str, dict[str, Any]] = {
    "gptoss": {**OAI, "hidden_size": 96, "intermediate_size": 160},
    "glm": {"hidden_size": 512, "intermediate_size": 512},
    "dsv41": {
        "row_order": "interleaved", "activation": "swiglu_clamp", "limit": 10.0,
        "hidden_size": 512, "intermediate_size": 256,
    },
    "muse": {"per_route": True, "hidden_size": 512, "intermediate_size": 512},
    "int4": {"weight_format": "uint4", "hidden_size": 512, "intermediate_size": 512},
    "kimi": {"hidden_size": 6656, "intermediate_size": 512, "num_experts": 2, "num_tokens": 1},
}  # fmt: skip
SLOW = pytest.mark.slow


def variant_case(variant: str, **changes: Any) -> MoECase:
    return random_case(**{"num_tokens": 3, "num_experts": 4, "top_k": 2, **CASES[variant], **changes})


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_ins.cpu_counts_as_hpu(monkeypatch)
    monkeypatch.setattr(stack, "_stacks", {})


def call_stock(case: MoECase, lists: tuple[Any, ...], *routing: Tensor) -> Tensor:
    """The stock node of a case whose weights come as lists (w13, s13, w2, s2, -, -, b13, b2)."""
    w13, s13, w2, s2, _, _, b13, b2 = lists
    first = case.attributes["experts_min"]
    ids = {"experts_min": first, "experts_max": first + len(case.w2) - 1}
    if case.w13_bias is None:
        return stock.mxfp4_fused_weights(*routing, w13, w2, s13, s2, activation="silu", **ids, **MXFP4)
    constants = {name: case.attributes[name] for name in ("alpha", "limit")}
    return stock.bias_mxfp4_fused_weights(*routing, w13, w2, b13, b2, s13, s2, **ids, **MXFP4, **constants)


def compiled(
    function: Callable[..., Any], found: Report, graphs: list[fx.GraphModule] | None = None, **options: Any
) -> Callable[..., Any]:
    """`function` under the passes; the inner backend refuses Gaudi ops that were never called eagerly."""

    def inner(module: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        stand_ins.refuse_unregistered(module)
        if graphs is not None:
            graphs.append(module)
        return module.forward

    torch._dynamo.reset()
    return torch.compile(function, backend=compile_with(inner, Settings(), found), **options)


def targets(module: fx.GraphModule) -> list[str]:
    return [str(node.target) for node in module.graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize("variant", CASES)
def test_each_variant_runs_on_its_kernels(variant: str, on_cpu: None) -> None:
    case = variant_case(variant, experts_min=8)
    graphs: list[fx.GraphModule] = []

    def model(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return torch.ops.mxk.moe(x, ids, weights, *case.weights, **case.attributes)

    result = compiled(model, Report(), graphs)(*case.routing)
    expected = {
        "gptoss": ["mxk_w13xib", "mxk_w2xb"],
        "glm": ["mxk_w13x", "mxk_w2x"],
        "dsv41": ["mxk_w13xi", "mxk_w2x"],
        "muse": ["mxk_w13x", "mxk_w2xr"],
        "int4": ["mxk_w13i4x", "mxk_w2i4x"],
        "kimi": ["mxk_w13xt", "mxk_w2x"],
    }[variant]
    ours = [name for name in targets(graphs[0]) if name.startswith(("custom_op", "mxk"))]
    assert ours == [f"custom_op.{name}.default" for name in expected]
    assert result.shape == case.reference().shape
    assert rel_l2(result, case.reference(round_intermediate=True)) < 2e-3
    assert rel_l2(result, case.reference()) < 4e-3


@pytest.mark.parametrize("variant", ["gptoss", "glm"])
def test_stock_calls_are_fused_and_lowered(variant: str, on_cpu: None) -> None:
    case = variant_case(variant)

    def model(*routing: Tensor) -> Tensor:
        return call_stock(case, case.lists, *routing)

    found = Report()
    result = compiled(model, found)(*case.routing)
    assert [node.reason for node in found.nodes] == [None]
    assert str(found.nodes[0].kernel) == f"hpu/tpc/{variant}"
    assert rel_l2(result, case.reference(round_intermediate=True)) < 2e-3
    # The wrong kernel, nibble order or a lost bias would be far off.
    assert rel_l2(result, torch.zeros_like(result) + 1e-9) > 1


@pytest.mark.skipif(shutil.which("g++") is None, reason="the emulator needs g++")
@pytest.mark.parametrize(
    "variant", ["gptoss", pytest.param("glm", marks=SLOW), pytest.param("dsv41", marks=SLOW)]
)
def test_lowered_graph_on_emulated_kernels(
    variant: str, on_cpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernels' own sources in the graph: order of tensors and scalars, chunk order, padding."""
    monkeypatch.setattr(stand_ins, "emulate", True)
    case = variant_case(variant, experts_min=4, num_tokens=5)

    def model(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return torch.ops.mxk.moe(x, ids, weights, *case.weights, **case.attributes)

    ids = case.topk_ids.clone()
    ids[0, 0], ids[1, 1], ids[2] = -1, 4 + 4, 5
    result = compiled(model, Report())(case.hidden_states, ids, case.topk_weights)
    arguments = (case.hidden_states.float(), ids, case.topk_weights, *case.weights)
    assert rel_l2(result, reference(*arguments, **case.attributes, round_intermediate=False)) < 4e-3


def test_expected_graph(rewrite: Callable[..., Any], on_cpu: None) -> None:
    case = variant_case("gptoss", num_experts=2)

    def model(x: Tensor, ids: Tensor, weights: Tensor, *stacks: Tensor) -> Tensor:
        w13, s13, w2, s2, b13, b2 = (value.unbind(0) for value in stacks)
        return call_stock(case, (w13, s13, w2, s2, [], [], b13, b2), x, ids, weights)

    found = rewrite(model, *case.routing, *(weight for weight in case.weights if weight is not None))
    assert_expected_inline(
        found.after[0],
        """\
constant_pad_nd = constant_pad_nd.default(arg6_1, [0, 416], 0.0)
view = view.default(constant_pad_nd, [-1, 1, 128, 4])
permute = permute.default(view, [0, 1, 3, 2])
clone = clone.default(permute, memory_format=torch.contiguous_format)
view_1 = view.default(clone, [-1, 512])
clamp = clamp.default(arg7_1, -1, 2)
_to_copy = _to_copy.default(clamp, dtype=torch.int32)
_to_copy_1 = _to_copy.default(arg8_1, dtype=torch.float32)
_to_copy_2 = _to_copy.default(arg4_1, dtype=torch.float32)
_to_copy_3 = _to_copy.default(arg5_1, dtype=torch.float32)
mxk_w13xib = mxk_w13xib.default(view_1, _to_copy, arg0_1, arg1_1, _to_copy_2, 0, 1.702, 7.0)
mxk_w2xb = mxk_w2xb.default(mxk_w13xib, _to_copy, _to_copy_1, arg2_1, arg3_1, _to_copy_3, 0)
return (mxk_w2xb,)""",
    )


def hpu_graph(case: MoECase, monkeypatch: pytest.MonkeyPatch) -> fx.GraphModule:
    """A stock graph on fake "hpu" tensors, as the bridge's compiler receives it."""
    stand_ins.install_hpu(monkeypatch)
    mode = FakeTensorMode()

    def fake(value: Tensor) -> Tensor:
        return torch.empty(value.shape, dtype=value.dtype, device="hpu")

    def model(x: Tensor, ids: Tensor, weights: Tensor, *stacks: Tensor) -> Tensor:
        lists = [value.unbind(0) for value in stacks]
        return call_stock(case, (*lists[:4], [], [], *lists[4:]), x, ids, weights)

    present = [weight for weight in case.weights if weight is not None]
    with mode:
        inputs = [fake(value) for value in (*case.routing, *present)]
        module = make_fx(model, tracing_mode="real")(*inputs)
    for node in module.graph.nodes:
        if "mixture" in node.name:
            node.meta["stack_trace"] = "File model.py, line 7"
            node.meta["nn_module_stack"] = {"m": ("model.layers.3.mlp", torch.nn.Module)}
    return module


def test_hpu_graph_has_full_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    case = variant_case("gptoss")
    module = hpu_graph(case, monkeypatch)
    before = {node.name for node in module.graph.nodes}
    found = run_passes(module, Settings(), can_guard=True)
    assert str(found).splitlines()[1].startswith("model.layers.3.mlp  bias_mxfp4_fused_weights")
    assert "hpu/tpc/gptoss" in str(found)
    new = [node for node in module.graph.nodes if node.name not in before]
    assert len(new) == 12
    for node in new:
        value = node.meta["val"]
        assert value.device == torch.device("hpu", 0)
        assert node.meta["tensor_meta"].shape == value.shape
        assert node.meta["stack_trace"] == "File model.py, line 7"
        # Functional: nothing of ours writes to an input.
        assert not node.target._schema.is_mutable
    result = module.graph.output_node().args[0]
    assert isinstance(result, fx.Node)
    assert list(result.meta["val"].shape) == [3, 96]
    assert result.meta["val"].dtype == torch.bfloat16
    assert "unbind" not in module.code


def test_tokens_are_guarded(on_cpu: None) -> None:
    case = variant_case("gptoss", num_tokens=48)
    graphs: list[fx.GraphModule] = []
    found = Report()
    run = compiled(lambda *routing: call_stock(case, case.lists, *routing), found, graphs, dynamic=True)
    expected = case.reference(round_intermediate=True)
    fused = {}
    for num_tokens in (7, 32, 33, 48, 2, 1, 3, 40):
        before = len(graphs)
        result = run(*(value[:num_tokens] for value in case.routing))
        assert rel_l2(result, expected[:num_tokens]) < 8e-3, num_tokens
        new = targets(graphs[-1]) if len(graphs) > before else None
        fused[num_tokens] = None if new is None else "custom_op.mxk_w13xib.default" in new
    # T <= 32, T > 32 and torch.compile's own graph for T = 1; nothing else compiles.
    assert fused == {7: True, 32: None, 33: False, 48: None, 2: None, 1: True, 3: None, 40: None}
    assert found.nodes[0].tokens.endswith("<= 32 (guarded)")


def test_routes_bound_the_tokens(on_cpu: None) -> None:
    desc = MoEDesc.from_call(
        *variant_case("gptoss").routing, *variant_case("gptoss").weights, **variant_case("gptoss").attributes
    )
    assert token_range(desc) == (1, 32)
    assert token_range(dataclasses.replace(desc, top_k=4)) == (1, 32)
    assert token_range(dataclasses.replace(desc, top_k=5)) == (1, 25)
    assert token_range(dataclasses.replace(desc, top_k=128)) == (1, 1)
    assert token_range(dataclasses.replace(desc, device="cpu")) == (0, None)


@pytest.mark.parametrize("num_tokens", [0, 17])
def test_tokens_out_of_range_stay_stock(num_tokens: int, on_cpu: None) -> None:
    case = variant_case("glm", num_tokens=num_tokens)
    found = Report()
    compiled(lambda *routing: call_stock(case, case.lists, *routing), found)(*case.routing)
    reason = {
        0: "T may be below 1, the fewest tokens of the fused kernels",
        17: "T=17 > 16, the cap of the fused kernels",
    }[num_tokens]
    assert found.nodes[0].reason == f"{reason} (hpu/tpc/glm: 1 to 16 tokens with top_k 2)"


DESC = MoEDesc("hpu", torch.bfloat16, 512, 512, 4, 2, (32, 32), "mxfp4", "input", "gate_up", "silu")
OAI_DESC = dataclasses.replace(DESC, row_order="interleaved", activation="swiglu_oai", bias=True)


@pytest.mark.parametrize(
    ("desc", "reason"),
    [
        (dataclasses.replace(DESC, hidden_size=520), "kimi: K is 520, allowed: a multiple of 512, 1 to 8192"),
        (dataclasses.replace(DESC, hidden_size=8704), "kimi: K is 8704, allowed: a multiple of 512, 1 to 8192"),
        (dataclasses.replace(DESC, intermediate_size=768), "kimi: I is 768, allowed: a multiple of 512, 1 to 3072"),
        (dataclasses.replace(DESC, num_experts=129), "kimi: E is 129, allowed: 1 to 128"),
        (dataclasses.replace(DESC, top_k=129), "kimi: top_k is 129, allowed: 1 to 128"),
        (dataclasses.replace(OAI_DESC, hidden_size=3104), "gptoss: K is 3104, allowed: a multiple of 32, 1 to 3072"),
        (dataclasses.replace(OAI_DESC, intermediate_size=48), "gptoss: I is 48, allowed: a multiple of 32, 1 to 3072"),
        (
            dataclasses.replace(DESC, per_route=True, hidden_size=6656),
            "muse: K is 6656, allowed: a multiple of 512, 1 to 6144",
        ),
        (dataclasses.replace(DESC, dtype=torch.float16), "hidden_states are torch.float16; allowed: torch.bfloat16"),
        (
            dataclasses.replace(DESC, row_order="up_gate"),
            "no kernel for K=512 I=512 E=4 k=2 mxfp4/32 up_gate silu; allowed: mxfp4 interleaved swiglu_oai bias;",
        ),
    ],
)  # fmt: skip
def test_limits(desc: MoEDesc, reason: str) -> None:
    given = supports(desc)
    assert given is not None
    assert given.startswith(f"Gaudi kernels: {reason}")
    with pytest.raises(errors.KernelError, match="what supports"):
        tpc.config(desc)


@pytest.mark.parametrize("desc", [DESC, OAI_DESC, dataclasses.replace(DESC, hidden_size=8192)])
def test_what_is_within_the_limits_is_accepted(desc: MoEDesc) -> None:
    assert supports(desc) is None


def test_refusals_are_said_once(on_cpu: None, caplog: pytest.LogCaptureFixture) -> None:
    report.say_stock_once.cache_clear()
    case = variant_case("glm", hidden_size=544)
    with caplog.at_level(logging.INFO, "mxk_compile"):
        for _ in range(2):
            compiled(lambda *routing: call_stock(case, case.lists, *routing), Report())(*case.routing)
    said = [record.getMessage() for record in caplog.records if "stays stock" in record.getMessage()]
    assert said == [
        "mxfp4_fused_weights stays stock: Gaudi kernels: kimi: K is 544, allowed: a multiple of 512, 1 to 8192"
    ]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"zero": True}, "zero points are given; allowed: none, which makes code 8 zero"),
        ({"scale": torch.float32}, "s13 is torch.float32; allowed: torch.bfloat16"),
    ],
)
def test_int4_operands_that_the_kernels_do_not_read(
    changes: dict[str, Any], reason: str, on_cpu: None
) -> None:
    report.say_stock_once.cache_clear()
    say_reference_once.cache_clear()
    case = variant_case("int4", zero=changes.get("zero", False))
    if "scale" in changes:
        case.w13_scale = case.w13_scale.to(changes["scale"])
    graphs: list[fx.GraphModule] = []

    def model(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return torch.ops.mxk.moe(x, ids, weights, *case.weights, **case.attributes)

    result = compiled(model, Report(), graphs)(*case.routing)
    assert targets(graphs[0]) == ["mxk.moe.default"]
    assert rel_l2(result, case.reference()) < 4e-3
    desc = MoEDesc.from_call(*case.routing, *case.weights, **case.attributes)
    assert tpc.misfit(desc, case.weights) == tpc.misfit(desc, case.lists) == f"Gaudi kernels: {reason}"
    assert rel_l2(tpc.moe(desc, *case.routing, *case.weights), case.reference()) < 4e-3
    assert stand_ins.called == []


@pytest.mark.parametrize(("shared", "emulate"), [(True, True), (True, False), (False, False)])
def test_wna16_nodes_run_on_the_layout_they_hold(
    shared: bool, emulate: bool, on_cpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stock WNA16 graph: conversions of weights packed along the output dimension, one zero point for all."""
    monkeypatch.setattr(stand_ins, "emulate", emulate)
    sizes = {"num_tokens": 3, "num_experts": 4, "top_k": 2, "hidden_size": 96, "intermediate_size": 160}
    case = random_case(weight_format="uint4", pack_dim="output", experts_min=8, **sizes)
    zero = [torch.full((size // 32, columns // 8), 0x88888888 - 2**32, dtype=torch.int32)
            for size, columns in ((96, 320), (160, 96))]  # fmt: skip

    def model(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        def converted(packed: Tensor, scale: Tensor, zero: Tensor) -> list[Tensor]:
            return [
                torch.ops.hpu.convert_from_uint4(
                    packed[e], scale[e], zero if shared else zero.clone(), torch.bfloat16
                )
                for e in range(4)
            ]

        w13 = converted(case.w13, case.w13_scale, zero[0])
        w2 = converted(case.w2, case.w2_scale, zero[1])
        return stock.fused_weights(x, ids, weights, w13, w2, False, "silu", 8, 11)

    found, graphs = Report(), []  # type: ignore[var-annotated]
    result = compiled(model, found, graphs)(*case.routing)
    ours = [name for name in targets(graphs[0]) if name.startswith(("custom_op", "mxk"))]
    assert ours == (["custom_op.mxk_w13i4o.default", "custom_op.mxk_w2i4o.default"] if shared else [])
    assert rel_l2(result, case.reference(round_intermediate=True)) < (2e-3 if shared else 1e-2)
    if shared:
        desc = MoEDesc.from_call(*case.routing, *case.weights, **case.attributes)
        zeros = [tensor.expand(4, *tensor.shape) for tensor in zero]
        weights = [*case.weights[:4], *zeros]
        assert rel_l2(tpc.moe(desc, *case.routing, *weights, experts_min=8), result) < 1e-3


def test_missing_op_library_is_named() -> None:
    reason = tpc.usable("mxk_not_built")
    assert (
        reason
        == "op custom_op::mxk_not_built is not registered; load the op library of `mxk build-tpc` before compiling"
    )


class Layer(torch.nn.Module):
    """A layer that keeps stacked parameters, and hands out views that it made once, as vllm-gaudi's does."""

    def __init__(self, case: MoECase) -> None:
        super().__init__()
        self.case = case
        names = (
            "w13_weight",
            "w13_weight_scale",
            "w2_weight",
            "w2_weight_scale",
            "_",
            "_",
            "w13_bias",
            "w2_bias",
        )
        for name, weight in zip(names, case.weights, strict=True):
            if weight is not None:
                self.register_parameter(name, torch.nn.Parameter(weight, requires_grad=False))
        self.views = tuple(() if weight is None else tuple(weight) for weight in case.weights)

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return call_stock(self.case, self.views, x, ids, weights)


def test_lists_of_unknown_origin_stay_stock(on_cpu: None) -> None:
    case, found = variant_case("gptoss"), Report()
    compiled(Layer(case), found)(*case.routing)
    assert found.nodes[0].reason == (
        "w13 is a list of 4 tensors, the kernels of device 'hpu' take stacked experts; keep them stacked, and call "
        "register_stacks(model) after loading"
    )


def test_registered_stacks_are_found_in_each_call(on_cpu: None, caplog: pytest.LogCaptureFixture) -> None:
    case, other = variant_case("gptoss"), variant_case("gptoss", seed=1)
    layers = [Layer(case), Layer(other)]
    assert [stack.register_stacks(layer) for layer in layers] == [6, 6]
    found, graphs = Report(), []
    run = compiled(lambda layer, *routing: layer(*routing), found, graphs)
    for layer, of in zip(layers, (case, other), strict=True):
        assert rel_l2(run(layer, *case.routing), reference_of(of, case)) < 2e-3
    assert found.num_fused == len(found.nodes)
    assert targets(graphs[0]).count("mxk.stack.default") == 6
    assert not [record for record in caplog.records if record.name.startswith("mxk_compile")]
    # The same graph with slices of no registered stack: right all the same, and said once.
    stack._say_once.cache_clear()
    changed = tuple(tuple(view.clone() for view in views) for views in layers[1].views)
    layers[1].views = changed
    assert rel_l2(run(layers[1], *case.routing), reference_of(other, case)) < 2e-3
    assert len([record for record in caplog.records if "copied in every call" in record.getMessage()]) == 6


def reference_of(weights: MoECase, routing: MoECase) -> Tensor:
    return reference(
        routing.hidden_states.float(), *routing.routing[1:], *weights.weights, **weights.attributes
    )


def test_without_the_warm_call_the_bridge_refuses(on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    case = variant_case("glm")
    monkeypatch.setattr("mxk_compile.backend.warm_ops", lambda module: None)
    with pytest.raises(Exception, match="custom_op::mxk_w13x isn't registered in KernelRegistry"):
        compiled(lambda *routing: call_stock(case, case.lists, *routing), Report())(*case.routing)


def test_warm_calls_are_legal_and_made_once(on_cpu: None) -> None:
    names = [name for name in warm.OPS if name.startswith("custom_op::") and not name.endswith("deq")]
    for name in [*names, *names]:
        warm.warm_op(name, "cpu")
    # The stand-ins check shapes and dtypes by the kernels' table, as the glue does.
    assert stand_ins.called == [name.removeprefix("custom_op::") for name in names]


@pytest.mark.parametrize("kind", [RuntimeError, ValueError])  # the latter from an op that refuses its call
def test_self_check_reports_and_keeps_broken_ops_out(
    kind: type[Exception],
    on_cpu: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(tpc, "_unusable", {})

    def fail(*arguments: Any) -> Tensor:
        raise kind("kernel\nis not there")

    monkeypatch.setattr(torch.ops.custom_op, "mxk_w13xi", fail)
    monkeypatch.delattr(torch.ops.custom_op, "mxk_deq", raising=False)
    with caplog.at_level(logging.INFO, "mxk_compile"):
        found = warm.self_check("cpu")
    reason = "custom_op::mxk_w13xi failed its first eager call on cpu: kernel is not there"
    assert {name: why for name, why in found.items() if why} == {"custom_op::mxk_w13xi": reason}
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == [reason]
    clamped = dataclasses.replace(DESC, row_order="interleaved", activation="swiglu_clamp")
    assert supports(clamped) == f"Gaudi kernels: dsv41: {reason}"
    assert supports(DESC) is None


ROUTED = variant_case("gptoss", num_tokens=8, num_experts=3, experts_min=6)
ROUTER = torch.rand(8, 4, generator=torch.Generator().manual_seed(0))


@given(
    num_tokens=st.integers(1, 8),
    top_k=st.integers(1, 4),
    ids=st.lists(
        st.sampled_from([-1, 0, 5, 6, 7, 8, 9, 2**31 - 1, 2**32 + 7, -(2**40)]), min_size=32, max_size=32
    ),
    dtype=st.sampled_from([torch.int64, torch.int32, torch.int16, torch.uint8, torch.uint64]),
    router_dtype=st.sampled_from([torch.bfloat16, torch.float32]),
)
@settings(max_examples=40, deadline=None)
def test_routing(
    num_tokens: int, top_k: int, ids: list[int], dtype: torch.dtype, router_dtype: torch.dtype
) -> None:
    """Foreign, negative, huge and repeated ids in any integer dtype, against the fp32 reference."""
    wrapped = torch.tensor(ids).to(dtype) if dtype is not torch.uint64 else torch.tensor(ids).view(dtype)
    topk_ids = wrapped[: num_tokens * top_k].reshape(num_tokens, top_k)
    router = ROUTER[:num_tokens, :top_k].to(router_dtype)
    x = ROUTED.hidden_states[:num_tokens]
    desc = dataclasses.replace(
        MoEDesc.from_call(x, topk_ids, router, *ROUTED.weights, **ROUTED.attributes), device="hpu"
    )
    scalars = {name: ROUTED.attributes[name] for name in ("alpha", "limit", "experts_min")}
    result = tpc.moe(desc, x, topk_ids, router, *ROUTED.weights, **scalars)
    as_signed = topk_ids.view(torch.int64) if dtype is torch.uint64 else topk_ids
    expected = reference(x, as_signed, router, *ROUTED.weights, **ROUTED.attributes)
    local = ((as_signed.long() >= 6) & (as_signed.long() < 9)).any(1)
    assert (result[~local] == 0).all()
    assert torch.allclose(result.float(), expected.float(), rtol=2e-2, atol=2e-2)


@given(
    num_tokens=st.sampled_from([0, 1, 2, 32, 33]),
    num_experts=st.sampled_from([1, 2, 129]),
    top_k=st.integers(1, 6),
    hidden_size=st.sampled_from([32, 48, 64, 3104]),
    intermediate_size=st.sampled_from([32, 40, 64, 96]),
    dtype=st.sampled_from([torch.bfloat16, torch.bfloat16, torch.float32, torch.float16]),
    row_order=st.sampled_from(["interleaved", "interleaved", "gate_up", "up_gate"]),
    bias=st.sampled_from([True, True, False]),
)
@settings(max_examples=60, deadline=None)
def test_any_call_runs_right_or_is_refused_before_a_kernel_runs(
    num_tokens: int, num_experts: int, top_k: int, hidden_size: int, intermediate_size: int, dtype: torch.dtype,
    row_order: str, bias: bool,
) -> None:  # fmt: skip
    num_experts = num_experts if hidden_size < 1000 else 1  # for the tests' sake
    case = random_case(
        num_tokens=num_tokens, num_experts=num_experts, top_k=1, hidden_size=hidden_size,
        intermediate_size=intermediate_size, row_order=row_order, activation="swiglu_oai", alpha=1.702, limit=7.0,
        bias=bias,
    )  # fmt: skip
    case.topk_ids = case.topk_ids.repeat(1, top_k)
    case.topk_weights = case.topk_weights.repeat(1, top_k) / top_k
    case.hidden_states = case.hidden_states.to(dtype)
    desc = MoEDesc.from_call(*case.routing, *case.weights, **case.attributes)
    desc = dataclasses.replace(desc, device="hpu")
    scalars = {name: case.attributes[name] for name in ("alpha", "limit", "experts_min")}
    allowed = (
        dtype is torch.bfloat16 and row_order == "interleaved" and bias and num_experts <= 128
        and 0 < hidden_size <= 3072 and hidden_size % 32 == 0 and intermediate_size % 32 == 0
    )  # fmt: skip
    stand_ins.called.clear()
    if not allowed:
        assert supports(desc) is not None
        with pytest.raises(errors.KernelError, match=r"^Gaudi kernels: [^\n]*; keep the stock op$"):
            tpc.moe(desc, *case.routing, *case.weights, **scalars)
        assert stand_ins.called == []
        return
    assert supports(desc) is None
    result = tpc.moe(desc, *case.routing, *case.weights, **scalars)
    fits = 1 <= num_tokens <= 32 and num_tokens * top_k <= 128
    assert stand_ins.called == (["mxk_w13xib", "mxk_w2xb"] if fits else [])
    assert torch.allclose(result.float(), case.reference().float(), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("num_tokens", [0, 32, 33])
def test_eager_calls_at_the_edges_of_t(num_tokens: int, caplog: pytest.LogCaptureFixture) -> None:
    say_reference_once.cache_clear()
    stand_ins.called.clear()
    case = variant_case("gptoss", num_tokens=num_tokens)
    desc = dataclasses.replace(
        MoEDesc.from_call(*case.routing, *case.weights, **case.attributes), device="hpu"
    )
    scalars = {name: case.attributes[name] for name in ("alpha", "limit", "experts_min")}
    for weights in (case.weights, case.lists):
        result = tpc.moe(desc, *case.routing, *weights, **scalars)
        assert result.shape == case.hidden_states.shape
        assert num_tokens == 0 or rel_l2(result, case.reference()) < 4e-3
    said = f"Gaudi kernels: {num_tokens} tokens; allowed: 1 to 32 with top_k 2"
    assert any(said in record.getMessage() for record in caplog.records) == (num_tokens != 32)
    assert bool(stand_ins.called) == (num_tokens == 32)


@pytest.mark.parametrize("lists", [False, True])
def test_strided_weights_stay_off_the_kernels(lists: bool, on_cpu: None) -> None:
    case = variant_case("glm")
    case.w2 = case.w2.transpose(1, 2).contiguous().transpose(1, 2)

    def model(*routing: Tensor) -> Tensor:
        if lists:
            return call_stock(case, case.lists, *routing)
        return torch.ops.mxk.moe(*routing, *case.weights, **case.attributes)

    result = compiled(model, Report())(*case.routing)
    assert rel_l2(result, case.reference()) < 1e-2
    assert stand_ins.called == []


def test_strided_inputs(on_cpu: None) -> None:
    case = variant_case("glm", num_tokens=4)
    wide = torch.zeros(4, 1024, dtype=torch.bfloat16)
    wide[:, 512:] = case.hidden_states
    ids = case.topk_ids.t().contiguous().t()
    weights = case.topk_weights.repeat_interleave(2, dim=1)[:, ::2]
    run = compiled(lambda *routing: call_stock(case, case.lists, *routing), Report())
    result = run(wide[:, 512:], ids, weights)
    assert torch.equal(result, run(*case.routing))
    assert rel_l2(result, case.reference()) < 4e-3
