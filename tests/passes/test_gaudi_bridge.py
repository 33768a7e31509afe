"""The pass inside a stand-in of the bridge: both ways in, metadata and placement, settings, compile-only mode."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gaudi_stand_ins as stand_ins
import pytest
import torch
from torch import Tensor

from mxk_compile.errors import KernelError
from mxk_compile.ops import stack
from mxk_compile.passes import gaudi_bridge, warm
from mxk_compile.testing import MoECase, random_case, rel_l2


@pytest.fixture(scope="module", autouse=True)
def ops() -> Iterator[None]:
    with stand_ins.ops():
        yield


@pytest.fixture(params=["registry", "get_passes"])
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def bridge(way: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    stand_ins.cpu_counts_as_hpu(monkeypatch)
    monkeypatch.setattr(stack, "_stacks", {})
    return stand_ins.Bridge(monkeypatch, registry=way == "registry")


def layer(seed: int = 0, num_tokens: int = 3) -> tuple[MoECase, Callable[..., Tensor]]:
    """A gpt-oss call and its stock form on lists made of registered stacks."""
    case = random_case(
        num_tokens=num_tokens, num_experts=3, hidden_size=96, intermediate_size=64, seed=seed, bias=True,
        row_order="interleaved", activation="swiglu_oai", alpha=1.702, limit=7.0,
    )  # fmt: skip
    for weight in case.weights:
        if weight is not None:
            stack.register_stack(weight)
    w13, s13, w2, s2, _, _, b13, b2 = case.lists

    def call(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        y = torch.ops.hpu.mixture_of_experts.bias_mxfp4_fused_weights(
            x * 1, ids, weights, w13, w2, b13, b2, s13, s2,
            block_size=32, permuted_weights=True, experts_min=0, experts_max=2, is_fp4=True,
        )  # fmt: skip
        return y + 0

    return case, call


def targets(module: torch.fx.GraphModule) -> list[str]:
    return [
        str(node.target).removesuffix(".default") for node in module.graph.nodes if node.op == "call_function"
    ]


def test_a_server_that_names_hpu_backend_runs_the_kernels(bridge: Any, way: str) -> None:
    assert gaudi_bridge.register() == way
    case, call = layer()
    result = torch.compile(call, backend="hpu_backend")(*case.routing)
    found = targets(bridge.graphs[0])
    assert [name for name in found if "mixture" in name or "mxk" in name] == [
        *["mxk.stack"] * 6, "custom_op.mxk_w13xib", "custom_op.mxk_w2xb"
    ]  # fmt: skip
    # Bridge.run_stage has checked metadata and placement of every node; what runs eagerly reads inputs alone.
    for node in bridge.graphs[0].graph.nodes:
        if node.meta["placement"] == "eager" and node.op == "call_function":
            assert all(source.op == "placeholder" for source in node.all_input_nodes)
    assert rel_l2(result, case.reference(round_intermediate=True)) < 4e-3


def test_start_up(bridge: Any, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[Any] = []
    monkeypatch.setattr(gaudi_bridge, "load_ops", lambda *arguments: loaded.append(arguments))
    found = gaudi_bridge.start(Path("build"), device="cpu")
    assert loaded == [(Path("build"), "pt2")]
    assert found["custom_op::mxk_w13xib"] is None
    assert set(stand_ins.called) == {name.removeprefix("custom_op::") for name in found}
    assert gaudi_bridge.register() == way


def test_registering_twice_does_nothing(bridge: Any, way: str) -> None:
    assert [gaudi_bridge.register(), gaudi_bridge.register()] == [way, way]
    names = [run.__name__ for run in bridge.passes.get_passes(stand_ins.Placement.PRE_PLACEMENT)]
    expected = {
        "registry": ["pass_fake_propagation", "pass_mark_placement", "pass_mxk_moe"],
        "get_passes": ["pass_mxk_moe", "pass_fake_propagation", "pass_mark_placement"],
    }
    assert names == expected[way]
    assert bridge.passes.get_passes(stand_ins.Placement.PARTITIONER) == []


def test_the_mxk_backend_compiles_inside_the_bridge(bridge: Any) -> None:
    case, call = layer(num_tokens=6)
    inner = {"inner_backend": "hpu_backend"}
    for options, fused in (({}, True), ({"max_tokens": 5}, False)):
        torch._dynamo.reset()
        result = torch.compile(call, backend="mxk", options={**inner, **options})(*case.routing)
        assert ("custom_op.mxk_w13xib" in targets(bridge.graphs[-1])) == fused
        assert rel_l2(result, case.reference()) < 1e-2
    # The settings were those of one compilation.
    assert gaudi_bridge._settings.get().max_tokens == 32


def test_both_sides_of_the_cap(bridge: Any) -> None:
    gaudi_bridge.register()
    case, call = layer(num_tokens=40)
    run = torch.compile(call, backend="hpu_backend", dynamic=True)
    for num_tokens in (4, 32, 33, 40, 7):
        result = run(*(value[:num_tokens] for value in case.routing))
        assert rel_l2(result, case.reference()[:num_tokens]) < 1e-2
    fused = ["custom_op.mxk_w13xib" in targets(graph) for graph in bridge.graphs]
    assert fused == [True, False]


@pytest.mark.parametrize("training", [True, False])
def test_training_graphs_are_left_alone(training: bool, bridge: Any) -> None:
    case, call = layer()
    torch.compile(call, backend="hpu_backend")(*case.routing)  # before the pass is registered
    graph = bridge.graphs[0]
    flags = (training, False, False)
    context = stand_ins.OptimizerContext(graph, "g", [], *flags, stand_ins.Placement.PRE_PLACEMENT)
    assert gaudi_bridge.pass_mxk_moe(context) is not training
    assert any("mixture" in name for name in targets(graph)) == training


def test_warm_calls_run_where_the_server_only_compiles(bridge: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gaudi_bridge.register()
    case, call = layer()
    config = sys.modules["habana_frameworks.torch.internal.bridge_config"]
    with config.env_setting("PT_COMPILE_ONLY_MODE", True):
        torch.compile(call, backend="hpu_backend")(*case.routing)
        assert stand_ins.compile_only
    assert stand_ins.called == ["mxk_w13xib", "mxk_w2xb"]
    # The same without that context: the op is compiled only, and the next graph meets an empty registry.
    torch._dynamo.reset()
    stand_ins.called.clear()
    monkeypatch.setattr(warm, "_warmed", set())
    monkeypatch.setattr(warm, "_bridge_executes", torch.no_grad)
    with (
        config.env_setting("PT_COMPILE_ONLY_MODE", True),
        pytest.raises(Exception, match="mxk_w13xib isn't registered in KernelRegistry"),
    ):
        torch.compile(call, backend="hpu_backend")(*case.routing)


@pytest.mark.parametrize(
    "missing", ["OptimizationPassPlacement", "pass_fake_propagation", "get_passes", "module"]
)
def test_a_bridge_that_is_unlike_any_known_one_is_refused(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bridge = stand_ins.Bridge(monkeypatch, registry=False)
    original = bridge.passes.get_passes
    if missing == "module":
        monkeypatch.setitem(sys.modules, gaudi_bridge._PASSES, None)
    elif missing == "pass_fake_propagation":
        bridge.passes.get_passes = lambda stage: original(stage)[1:]
    else:
        delattr(bridge.passes, missing)
    with pytest.raises(KernelError) as raised:
        gaudi_bridge.register()
    assert str(raised.value).startswith("Gaudi bridge: ")
    assert str(raised.value).endswith("; use lazy mode, or keep the stock op")
    assert {"module": "cannot be imported"}.get(missing, missing) in str(raised.value)
