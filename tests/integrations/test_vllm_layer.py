"""The plugin's routed-experts layer behind an opaque op, as on NVIDIA, on a stand-in of vLLM's layer interface.

tests/serving runs the same classes in vLLM itself, on CPU; here they also run on a GPU: compiled, and in a CUDA graph.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm_stand_in as stand_in
from torch import Tensor, nn

from mxk_compile.kernels import cuda
from mxk_compile.testing import MoECase, random_case, rel_l2

if importlib.util.find_spec("vllm") is not None and not hasattr(sys.modules.get("vllm"), "is_stand_in"):
    pytest.skip("vLLM itself is here: tests/serving", allow_module_level=True)

EXPERTS, HIDDEN, INTERMEDIATE = 8, 128, 96
INT4 = SimpleNamespace(num_bits=4, type="int", group_size=32, symmetric=True, strategy="group", actorder=None)
# What vLLM's config would answer, the layer's configuration, the call that this must be.
KINDS: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "mxfp4": (stand_in.Mxfp4MoEMethod, {}, {}),
    "deepseek": (
        stand_in.Mxfp4MoEMethod,
        {"swiglu_limit": 2.0},
        {"activation": "swiglu_clamp", "limit": 2.0},
    ),
    "gptoss": (
        stand_in.GptOssMxfp4MoEMethod,
        {"activation": stand_in.MoEActivation.SWIGLUOAI, "has_bias": True},
        {
            "row_order": "interleaved",
            "activation": "swiglu_oai",
            "alpha": 1.702,
            "limit": 7.0,
            "bias": True,
        },
    ),
    "tensors_mxfp4": (stand_in.CompressedTensorsW4A4Mxfp4MoEMethod, {}, {}),
    "int4": (
        lambda moe: stand_in.CompressedTensorsWNA16MoEMethod(INT4, None, moe),
        {},
        {"weight_format": "uint4"},
    ),
}
NAMES = {"mxfp4": "Mxfp4Method", "deepseek": "Mxfp4Method", "gptoss": "GptOssMethod", "int4": "Int4Method"}

_missing = cuda.unavailable()
_gpu = [pytest.mark.gpu, pytest.mark.skipif(_missing is not None, reason=str(_missing))]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=_gpu)])
def plugin(request: pytest.FixtureRequest) -> Iterator[SimpleNamespace]:
    """The plugin's modules over the stand-in, registered, and their device; all gone afterwards."""
    ours = [f"mxk_compile.integrations.{name}" for name in ("vllm_quantization", "vllm_layer")]
    modules = stand_in.install(request.param)
    modules["vllm"].is_stand_in = True  # type: ignore[attr-defined]
    for name in ours:
        sys.modules.pop(name, None)
    quantization, layer = (importlib.import_module(name) for name in ours)
    layer.register()
    layer.register()  # again: in every process, sometimes twice
    yield SimpleNamespace(device=request.param, layer=layer, quantization=quantization)
    for name in (*modules, *ours):
        sys.modules.pop(name, None)
        parent, _, leaf = name.rpartition(".")
        vars(sys.modules.get(parent, stand_in)).pop(leaf, None)
    stand_in.op_registry_oot.clear()
    stand_in.LAYERS.clear()


def case_of(kind: str, device: str, **changes: Any) -> MoECase:
    sizes = {"num_experts": EXPERTS, "hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE}
    return random_case(**{**sizes, **KINDS[kind][2], **changes}, device=device)


def loaded(kind: str, case: MoECase, name: str) -> Any:
    """A layer made as vLLM makes it, with the case's weights in checkpoint order."""
    make, changes, _ = KINDS[kind]
    device = case.hidden_states.device.type
    sizes = {"hidden_dim": HIDDEN, "intermediate_size_per_partition": INTERMEDIATE}
    moe = stand_in.moe_config(device, **{**sizes, **changes})
    layer = stand_in.RoutedExperts(name, moe, stand_in.Config(make)).to(device)
    tensors = {"w13_weight_scale": case.w13_scale, "w2_weight_scale": case.w2_scale}
    suffix = "_packed" if hasattr(layer, "w13_weight_packed") else ""
    tensors |= {f"w13_weight{suffix}": case.w13, f"w2_weight{suffix}": case.w2}
    if case.w13_bias is not None:
        tensors |= {"w13_bias": case.w13_bias, "w2_bias": case.w2_bias}
    parameters = dict(layer.named_parameters())
    assert parameters.keys() == tensors.keys()
    for key, tensor in tensors.items():
        parameters[key].data.copy_(tensor.view(parameters[key].dtype))
    layer.quant_method.process_weights_after_loading(layer)
    # In place, and nothing beside them.
    assert {key: p.data_ptr() for key, p in layer.named_parameters()} == {
        key: p.data_ptr() for key, p in parameters.items()
    }
    return layer


def skip_unless_taken(layer: Any, kind: str) -> None:
    if type(layer.quant_method).__module__.startswith("vllm_stand_in"):
        assert layer.moe_config.device == "cuda", "every kind has a kernel on CPU"
        pytest.skip(f"no CUDA kernel for {kind}: the layer stays stock")


class Model(nn.Module):
    """Two layers behind the opaque op, with other work around them."""

    def __init__(self, names: list[str], device: str) -> None:
        super().__init__()
        self.names = names
        self.routers = nn.ParameterList(torch.randn(EXPERTS, HIDDEN, device=device) for _ in names)

    def forward(self, x: Tensor) -> Tensor:
        for name, router in zip(self.names, self.routers, strict=True):
            logits = x.float() @ router.T
            x = (x + torch.ops.vllm_stand_in.moe_forward(x.clone(), logits, name)) * 0.5
        return x


def checked(model: Model, cases: list[MoECase], x: Tensor) -> Tensor:
    """The model's result, layer by layer; each layer against the fp32 reference of what goes into it.

    Against a model in fp32, a token whose routes are a near-tie would take another expert after a rounding.
    """
    for name, router, case in zip(model.names, model.routers, cases, strict=True):
        logits = x.float() @ router.T
        result = torch.ops.vllm_stand_in.moe_forward(x.clone(), logits, name)
        weights, ids = logits.softmax(-1).topk(2)
        assert rel_l2(result, case_copy(case, x.float(), ids, weights).reference()) < 0.01
        x = (x + result) * 0.5
    return x


def case_copy(case: MoECase, x: Tensor, ids: Tensor, weights: Tensor) -> MoECase:
    return MoECase(**{**vars(case), "hidden_states": x, "topk_ids": ids, "topk_weights": weights})


@pytest.fixture(params=list(KINDS))
def built(request: pytest.FixtureRequest, plugin: Any) -> tuple[Any, str, Model, list[MoECase]]:
    kind = request.param
    cases = [case_of(kind, plugin.device, seed=seed) for seed in (1, 2)]
    names = [f"model.layers.{index}.mlp.experts" for index in range(2)]
    layers = [loaded(kind, case, name) for case, name in zip(cases, names, strict=True)]
    skip_unless_taken(layers[0], kind)
    assert type(layers[0].quant_method).__name__ == NAMES.get(kind, "TensorsMxfp4Method")
    return plugin, kind, Model(names, plugin.device), cases


def test_the_compiled_model_has_one_opaque_node_a_layer_and_the_right_numbers(built: Any) -> None:
    plugin, _, model, cases = built
    graphs = []

    def record(module: Any, inputs: Any) -> Any:
        graphs.append(module.graph)
        return module.forward

    x = torch.randn(5, HIDDEN, device=plugin.device).bfloat16()
    with torch.no_grad():
        result = model(x)
        assert torch.equal(result, checked(model, cases, x))
        compiled = torch.compile(model, backend=record, fullgraph=True)
        assert torch.equal(compiled(x), result)
        # Any number of tokens, decode and prefill, through the same op.
        for num_tokens in (1, 33, 200):
            x = torch.randn(num_tokens, HIDDEN, device=plugin.device).bfloat16()
            assert torch.equal(model(x), checked(model, cases, x))
    targets = [str(node.target) for node in graphs[0].nodes if node.op == "call_function"]
    assert sum("moe_forward" in target for target in targets) == 2
    assert not [target for target in targets if "mxk" in target]


def test_experts_of_other_ranks_add_nothing(built: Any) -> None:
    plugin, _, _, cases = built
    layer = stand_in.LAYERS["model.layers.0.mlp.experts"]
    x = torch.randn(6, HIDDEN, device=plugin.device).bfloat16()
    ids = torch.randint(0, 2 * EXPERTS, (6, 2), device=plugin.device)
    weights = torch.rand(6, 2, device=plugin.device)
    # This rank has the odd ones of twice as many experts.
    layer.expert_map = torch.full((2 * EXPERTS,), -1, dtype=torch.int32, device=plugin.device)
    layer.expert_map[1::2] = torch.arange(EXPERTS, dtype=torch.int32, device=plugin.device)
    local = torch.where(ids % 2 == 1, ids // 2, -1)
    expected = case_copy(cases[0], x.float(), local, weights).reference()
    result = layer.forward_modular(x=x, topk_weights=weights, topk_ids=ids)
    assert rel_l2(result, expected) < 0.01
    assert torch.equal(result[(local < 0).all(1)], torch.zeros_like(x)[(local < 0).all(1)])


def test_cuda_graph(built: Any) -> None:
    plugin, _, model, cases = built
    if plugin.device != "cuda":
        pytest.skip("CUDA alone has CUDA graphs")
    compiled = torch.compile(model, fullgraph=True, dynamic=True)
    with torch.no_grad():
        for num_tokens in (1, 8, 64):
            x = torch.randn(num_tokens, HIDDEN, device="cuda").bfloat16()
            for run in (model, compiled):
                stream = torch.cuda.Stream()  # vLLM's order: a run outside, then the capture
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    run(x)
                torch.cuda.current_stream().wait_stream(stream)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    result = run(x)
                for seed in range(3):
                    x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)))
                    graph.replay()
                    torch.cuda.synchronize()
                    assert rel_l2(result, checked(model, cases, x)) < 0.01
                    assert torch.equal(result, run(x))


@pytest.mark.parametrize(
    ("kind", "changes", "reason"),
    [
        ("mxfp4", {"is_lora_enabled": True}, "LoRA is not supported"),
        ("mxfp4", {"activation": stand_in.MoEActivation.GELU}, "activation 'gelu' has no fused kernel"),
        ("int4", {"intermediate_size_per_partition": 48}, "intermediate size of a rank 48 is not a multiple"),
        ("tensors_mxfp4", {"intermediate_size_per_partition": 48}, "intermediate size of a rank 48"),
    ],
)
def test_other_layers_are_vllms_in_every_respect(
    plugin: Any, caplog: pytest.LogCaptureFixture, kind: str, changes: dict[str, Any], reason: str
) -> None:
    make = KINDS[kind][0]
    with caplog.at_level(logging.INFO):
        moe = stand_in.moe_config(plugin.device, **changes)
        layer = stand_in.RoutedExperts("a", moe, stand_in.Config(make))
    assert type(layer) is plugin.layer.PackedRoutedExperts
    assert type(layer.quant_method).__module__ == "vllm_stand_in"
    assert layer.moe_config.hidden_dim == 256  # padded for a kernel of vLLM's
    messages = [record.getMessage() for record in caplog.records]
    assert any(reason in message and "stay stock" in message for message in messages), messages


def test_subclasses_of_vllms_methods_have_their_own_reasons(plugin: Any) -> None:
    class Other(stand_in.Mxfp4MoEMethod):
        pass

    moe = stand_in.moe_config(plugin.device)
    assert type(stand_in.RoutedExperts("a", moe, stand_in.Config(Other)).quant_method) is Other


def test_another_package_keeps_its_layer(plugin: Any, caplog: pytest.LogCaptureFixture) -> None:
    class Theirs(stand_in.RoutedExperts):
        pass

    stand_in.op_registry_oot["RoutedExperts"] = Theirs
    plugin.layer.register()
    assert stand_in.op_registry_oot == {"RoutedExperts": Theirs}
    (record,) = caplog.records
    assert record.getMessage().endswith(f"stay stock: {Theirs.__module__} replaces it")
