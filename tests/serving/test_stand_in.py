"""The stand-in that stands for vLLM where vLLM cannot be (tests/vllm_stand_in.py) has vLLM's interface."""

from __future__ import annotations

import importlib
import importlib.util
import inspect

import pytest
import torch

if importlib.util.find_spec("vllm") is None:
    pytest.skip(
        "vLLM is not installed; `make test-vllm` makes an environment with it", allow_module_level=True
    )

import vllm_stand_in as stand_in

LAYERS = "vllm.model_executor.layers"
TENSORS = f"{LAYERS}.quantization.compressed_tensors.compressed_tensors_moe"
CLASSES = {
    "FusedMoEMethodBase": f"{LAYERS}.fused_moe",
    "RoutedExperts": f"{LAYERS}.fused_moe",
    "Mxfp4MoEMethod": f"{LAYERS}.quantization.mxfp4",
    "GptOssMxfp4MoEMethod": f"{LAYERS}.quantization.mxfp4",
    "CompressedTensorsW4A4Mxfp4MoEMethod": f"{TENSORS}.compressed_tensors_moe_w4a4_mxfp4",
    "CompressedTensorsWNA16MoEMethod": f"{TENSORS}.compressed_tensors_moe_wna16",
}


@pytest.mark.parametrize("name", CLASSES)
def test_methods_take_vllms_arguments(name: str) -> None:
    ours, theirs = getattr(stand_in, name), getattr(importlib.import_module(CLASSES[name]), name)
    methods = ["_get_quant_method", "maybe_roundup_sizes", "create_weights", "process_weights_after_loading"]
    for method in methods:
        if not hasattr(ours, method):
            continue
        given = inspect.signature(getattr(ours, method)).parameters
        wanted = inspect.signature(getattr(theirs, method)).parameters
        named = [p.name for p in given.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
        if method != "maybe_roundup_sizes":  # called by position
            assert list(wanted)[: len(named)] == named, method
        assert len(named) <= len(wanted)


def test_a_call_of_a_layer_is_vllms() -> None:
    from vllm.model_executor.layers.fused_moe import RoutedExperts
    from vllm.model_executor.layers.quantization.mxfp4 import Mxfp4MoEMethod

    wanted = inspect.signature(RoutedExperts.forward_modular).parameters
    assert list(wanted)[:4] == list(inspect.signature(stand_in.RoutedExperts.forward_modular).parameters)
    arguments = ["self", "layer", "x", "topk_weights", "topk_ids", "shared_experts", "shared_experts_input"]
    assert list(inspect.signature(Mxfp4MoEMethod.apply).parameters) == arguments


def test_the_opaque_op_says_that_it_mutates_its_first_argument_as_vllms_does() -> None:
    importlib.import_module(f"{LAYERS}.fused_moe.runner.moe_runner")
    for op in (torch.ops.vllm.moe_forward, torch.ops.vllm_stand_in.moe_forward):
        first, *rest = op.default._schema.arguments
        assert first.name == "hidden_states"
        assert first.alias_info is not None
        assert first.alias_info.is_write
        assert not any(argument.alias_info is not None and argument.alias_info.is_write for argument in rest)
        names = [argument.name for argument in rest]
        assert names[0] == "router_logits"
        assert "layer_name" in names
    for member in stand_in.MoEActivation:
        activation = importlib.import_module(f"{LAYERS}.fused_moe.activation").MoEActivation
        assert activation[member.name].value == member.value
