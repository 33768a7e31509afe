"""Which of vLLM's layers are taken, and why others are not: `refusal` on layers that are never built."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest
import torch

if importlib.util.find_spec("vllm") is None:
    pytest.skip(
        "vLLM is not installed; `make test-vllm` makes an environment with it", allow_module_level=True
    )

from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm_stand_in import moe_config

from mxk_compile.integrations import vllm_quantization
from mxk_compile.integrations.vllm_quantization import refusal


def layer(**changes: Any) -> Any:
    """A RoutedExperts as far as `refusal` reads it."""
    on_input = changes.pop("apply_router_weight_on_input", False)
    parallel = {name: changes.pop(name) for name in ("enable_eplb", "use_all2all_kernels") if name in changes}
    config = moe_config(
        "cpu",
        **{
            "activation": MoEActivation.SILU,
            "hidden_dim": 256,
            "intermediate_size_per_partition": 128,
            **changes,
        },
    )
    vars(config.moe_parallel_config).update(parallel)
    return SimpleNamespace(moe_config=config, apply_router_weight_on_input=on_input)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"activation": MoEActivation.SWIGLUOAI},
        {"activation": MoEActivation.SWIGLUOAI_UNINTERLEAVE, "swiglu_alpha": 1.7, "swiglu_beta": 1.0},
        {"swiglu_limit": 10.0},
        {"intermediate_size_per_partition": 720},  # gpt-oss over 4 ranks: padded to 736
    ],
)
def test_taken(changes: dict[str, Any]) -> None:
    assert refusal(layer(**changes), vllm_quantization.Mxfp4Method, 32) is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"activation": MoEActivation.GELU}, "activation 'gelu' has no fused kernel"),
        (
            {"activation": MoEActivation.SWIGLUOAI_UNINTERLEAVE, "swiglu_beta": 0.5},
            "activation 'swigluoai_uninterleave' has no fused kernel",
        ),
        ({"apply_router_weight_on_input": True}, "router weights that apply to the input is not supported"),
        ({"is_lora_enabled": True}, "LoRA is not supported"),
        ({"enable_eplb": True}, "expert load balancing is not supported"),
        ({"use_all2all_kernels": True}, "data-parallel dispatch of tokens is not supported"),
        ({"hidden_dim": 250}, "hidden size 250 is not a multiple of 32"),
        (
            {"in_dtype": torch.float16},
            "CPU kernels: hidden_states are torch.float16; allowed: torch.bfloat16",
        ),
    ],
)
def test_left_stock(changes: dict[str, Any], reason: str) -> None:
    assert refusal(layer(**changes), vllm_quantization.Mxfp4Method, 32) == reason


def test_without_a_usable_kernel_layers_stay_stock(monkeypatch: pytest.MonkeyPatch) -> None:
    from mxk_compile.kernels import cpu

    monkeypatch.setattr(cpu, "available", lambda: "libmxk_cpu.so was not built; reinstall")
    reason = refusal(layer(), vllm_quantization.Mxfp4Method, 32)
    assert reason == "CPU kernels: libmxk_cpu.so was not built; reinstall"


@pytest.mark.parametrize(
    "scheme",
    [
        None,  # not quantised
        {"weights": None},
        {"weights": {"num_bits": 8}},
        {"weights": {"type": "float"}},
        {"weights": {"actorder": "group"}},
        {"format": "unheard-of"},
        {"input_activations": object()},
        "differs",
    ],
    ids=str,
)
def test_other_compressed_tensors_schemes_are_vllms(scheme: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"num_bits": 4, "type": "int", "group_size": 32, "symmetric": True, "actorder": None}
    known |= {"strategy": "group", "dynamic": False}

    def scheme_of(changes: Any) -> Any:
        if changes is None:
            return None
        weights = changes.get("weights", {})
        weights = weights if weights is None else SimpleNamespace(**known | weights)
        return {"format": "pack-quantized", "input_activations": None, **changes, "weights": weights}

    config = object.__new__(vllm_quantization.PackedTensorsConfig)
    monkeypatch.setattr(config, "_add_fused_moe_to_target_scheme_map", lambda: None, raising=False)
    names = SimpleNamespace(ckpt_gate_proj_name="gate", ckpt_up_proj_name="up", ckpt_down_proj_name="down")
    found = {"gate": scheme_of({}), "up": scheme_of({}), "down": scheme_of({})}
    by_name = lambda layer, name: found[name.rpartition(".")[2]]  # noqa: E731
    monkeypatch.setattr(config, "get_scheme_dict", by_name, raising=False)
    found["up"] = found["down"] = found["gate"]
    assert config._int4_scheme(names, "a") is found["gate"]
    if scheme == "differs":
        found["down"] = scheme_of({"weights": {"group_size": 64}})
    else:
        found.update(dict.fromkeys(found, scheme_of(scheme)))
    assert config._int4_scheme(names, "a") is None


def test_int4_ranks_hold_whole_groups() -> None:
    sizes = {"intermediate_size_per_partition": 96}
    assert refusal(layer(**sizes), vllm_quantization.Int4Method, 32) is None
    assert refusal(layer(**sizes), vllm_quantization.Int4Method, -1) is None
    reason = refusal(layer(**sizes), vllm_quantization.Int4Method, 64)
    assert reason == "intermediate size of a rank 96 is not a multiple of 64"


def test_registered_configs_are_found_and_registering_again_changes_nothing() -> None:
    from vllm.model_executor.layers.quantization import get_quantization_config

    for _ in range(2):
        vllm_quantization.register()
        assert get_quantization_config("gpt_oss_mxfp4") is vllm_quantization.GptOssConfig
        assert get_quantization_config("mxfp4") is vllm_quantization.PlainMxfp4Config
        assert get_quantization_config("compressed-tensors") is vllm_quantization.PackedTensorsConfig


def test_the_layer_is_vllms_by_its_public_hook() -> None:
    from vllm.model_executor.custom_op import op_registry_oot
    from vllm.model_executor.layers.fused_moe import RoutedExperts

    from mxk_compile.integrations import vllm_layer

    for _ in range(2):
        vllm_layer.register()
        assert op_registry_oot["RoutedExperts"] is vllm_layer.PackedRoutedExperts
    assert type(RoutedExperts.__new__(RoutedExperts)) is vllm_layer.PackedRoutedExperts
