"""As much of vLLM as the plugin's layer and methods touch, for machines that cannot have vLLM: a GPU without network.

`install()` puts it into `sys.modules` under vLLM's names. Names, signatures and the order of calls are those of vLLM
0.32: a `RoutedExperts` asks for its method, lets it round sizes and make parameters, a loader fills them, the method
looks at them once, and in a call the opaque op `vllm_stand_in::moe_forward` finds the layer by name at run time,
routes, and calls `forward_modular`, as `vllm::moe_forward` does. The stock methods compute nothing: a call of one is an
error.
"""

from __future__ import annotations

import enum
import functools
import logging
import sys
import types
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

LAYERS: dict[str, Any] = {}
"""vLLM's `no_compile_layers`: the layers by name, for the opaque op."""


class MoEActivation(enum.Enum):
    SILU = "silu"
    GELU = "gelu"
    SWIGLUOAI = "swigluoai"
    SWIGLUOAI_UNINTERLEAVE = "swigluoai_uninterleave"


def init_logger(name: str) -> Any:
    """vLLM's loggers have methods that say a thing once."""
    logger, said = logging.getLogger(name), set()

    def once(say: Callable[..., None], *message: Any) -> None:
        if message not in said:
            said.add(message)
            say(*message)

    return SimpleNamespace(
        info=logger.info,
        warning=logger.warning,
        info_once=functools.partial(once, logger.info),
        warning_once=functools.partial(once, logger.warning),
    )


op_registry_oot: dict[str, type] = {}


class RoutedExperts(nn.Module):
    """vLLM's PluggableLayer of that name."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return super().__new__(op_registry_oot.get(cls.__name__, cls))

    @classmethod
    def register_oot(cls, layer: type) -> type:
        assert cls.__name__ not in op_registry_oot, f"Duplicate layer name: {cls.__name__}"
        op_registry_oot[cls.__name__] = layer
        return layer

    def __init__(self, layer_name: str, moe_config: Any, quant_config: Any) -> None:
        super().__init__()
        self.layer_name, self.moe_config, self.quant_config = layer_name, moe_config, quant_config
        self.apply_router_weight_on_input = False
        self.expert_map: Tensor | None = None
        self.ckpt_gate_proj_name, self.ckpt_up_proj_name, self.ckpt_down_proj_name = "gate", "up", "down"
        self.quant_method = self._get_quant_method(layer_name, quant_config, moe_config)
        moe_config.hidden_dim, moe_config.intermediate_size_per_partition = (
            self.quant_method.maybe_roundup_sizes(
                moe_config.hidden_dim, moe_config.intermediate_size_per_partition, moe_config.in_dtype, None
            )
        )
        self.quant_method.create_weights(
            layer=self,
            num_experts=moe_config.num_local_experts,
            hidden_size=moe_config.hidden_dim,
            intermediate_size_per_partition=moe_config.intermediate_size_per_partition,
            params_dtype=moe_config.in_dtype,
        )
        LAYERS[layer_name] = self

    def _get_quant_method(self, prefix: str, quant_config: Any, moe_config: Any) -> Any:
        return quant_config.get_quant_method(self, prefix)

    def forward_modular(self, x: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Any:
        assert not self.quant_method.is_monolithic
        return self.quant_method.apply(
            layer=self,
            x=x,
            topk_weights=topk_weights,
            topk_ids=topk_ids,
            shared_experts=None,
            shared_experts_input=None,
        )


class FusedMoEMethodBase:
    is_monolithic = True  # as vLLM's default on Hopper for gpt-oss

    def __init__(self, moe: Any) -> None:
        self.moe = moe
        self.moe_kernel = self.moe_quant_config = None

    def maybe_roundup_sizes(self, hidden_size: int, intermediate_size: int, *_: Any) -> tuple[int, int]:
        return hidden_size + -hidden_size % 256, intermediate_size + -intermediate_size % 128

    def process_weights_after_loading(self, layer: Any) -> None:
        raise AssertionError("a stock method permutes the weights here")

    def apply(self, **arguments: Any) -> Any:
        raise AssertionError("a stock kernel runs here")


def _parameter(layer: Any, name: str, *shape: int, dtype: torch.dtype) -> None:
    layer.register_parameter(name, nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False))


class Mxfp4MoEMethod(FusedMoEMethodBase):
    suffix = ""

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **_: Any,
    ) -> None:
        experts, hidden, width = num_experts, hidden_size, intermediate_size_per_partition
        name = "weight_packed" if "Tensors" in type(self).__name__ else "weight"
        _parameter(layer, f"w13_{name}", experts, 2 * width, hidden // 2, dtype=torch.uint8)
        _parameter(layer, "w13_weight_scale", experts, 2 * width, hidden // 32, dtype=torch.uint8)
        _parameter(layer, f"w2_{name}", experts, hidden, width // 2, dtype=torch.uint8)
        _parameter(layer, "w2_weight_scale", experts, hidden, width // 32, dtype=torch.uint8)
        if self.moe.has_bias:
            _parameter(layer, "w13_bias", experts, 2 * width, dtype=torch.bfloat16)
            _parameter(layer, "w2_bias", experts, hidden, dtype=torch.bfloat16)


class GptOssMxfp4MoEMethod(Mxfp4MoEMethod):
    pass


class CompressedTensorsW4A4Mxfp4MoEMethod(Mxfp4MoEMethod):
    pass


class CompressedTensorsWNA16MoEMethod(FusedMoEMethodBase):
    def __init__(self, weight_quant: Any, input_quant: Any, moe: Any) -> None:
        super().__init__(moe)
        self.weight_quant, self.input_quant = weight_quant, input_quant

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **_: Any,
    ) -> None:
        experts, hidden, width = num_experts, hidden_size, intermediate_size_per_partition
        group = self.weight_quant.group_size
        _parameter(layer, "w13_weight_packed", experts, 2 * width, hidden // 8, dtype=torch.int32)
        _parameter(layer, "w13_weight_scale", experts, 2 * width, hidden // group, dtype=params_dtype)
        _parameter(layer, "w2_weight_packed", experts, hidden, width // 8, dtype=torch.int32)
        _parameter(layer, "w2_weight_scale", experts, hidden, width // group, dtype=params_dtype)


class Config:
    """A quantization config whose answer is the stock method that it was made with."""

    def __init__(self, make: Callable[[Any], Any] | None = None) -> None:
        self.make = make

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        assert self.make is not None
        return self.make(layer.moe_config)


class Mxfp4Config(Config):
    def __init__(self) -> None:
        super().__init__(Mxfp4MoEMethod)


class GptOssMxfp4Config(Config):
    def __init__(self) -> None:
        super().__init__(GptOssMxfp4MoEMethod)


class CompressedTensorsConfig(Config):
    pass


def moe_config(device: str, **changes: Any) -> Any:
    """A FusedMoEConfig as far as anything here reads it."""
    parallel = SimpleNamespace(enable_eplb=False, use_all2all_kernels=False)
    fields: dict[str, Any] = {
        "activation": MoEActivation.SILU,
        "is_lora_enabled": False,
        "moe_parallel_config": parallel,
        "hidden_dim": 64,
        "intermediate_size_per_partition": 64,
        "in_dtype": torch.bfloat16,
        "num_local_experts": 8,
        "experts_per_token": 2,
        "has_bias": False,
        "swiglu_limit": None,
        "swiglu_alpha": None,
        "swiglu_beta": None,
        "device": device,
    }
    return SimpleNamespace(**fields | changes)


def _moe_forward(hidden_states: Tensor, router_logits: Tensor, layer_name: str) -> Tensor:
    layer = LAYERS[layer_name]
    weights, ids = router_logits.float().softmax(-1).topk(layer.moe_config.experts_per_token)
    result: Tensor = layer.forward_modular(x=hidden_states, topk_weights=weights, topk_ids=ids.int())
    return result


_library = torch.library.Library("vllm_stand_in", "FRAGMENT")
if not hasattr(torch.ops.vllm_stand_in, "moe_forward"):
    # The schema of vLLM's op: it says that it mutates its first argument, so that it is no pure node of the graph.
    _library.define("moe_forward(Tensor(a0!) hidden_states, Tensor router_logits, str layer_name) -> Tensor")
    for _key in ("CPU", "CUDA"):
        _library.impl("moe_forward", _moe_forward, _key)
    _library.impl("moe_forward", lambda hidden_states, *_: torch.empty_like(hidden_states), "Meta")


def install(device: str) -> dict[str, types.ModuleType]:
    """The modules by name, to be put into `sys.modules`."""
    configs: dict[str, type] = {}

    def register_quantization_config(name: str) -> Callable[[type], type]:
        return lambda config: configs.setdefault(name, config)

    layers = "vllm.model_executor.layers"
    tensors = f"{layers}.quantization.compressed_tensors"
    contents: dict[str, dict[str, Any]] = {
        "vllm": {},
        "vllm.logger": {"init_logger": init_logger},
        "vllm.platforms": {"current_platform": SimpleNamespace(device_type=device)},
        "vllm.model_executor": {},
        "vllm.model_executor.custom_op": {"op_registry_oot": op_registry_oot},
        layers: {},
        f"{layers}.fused_moe": {"FusedMoEMethodBase": FusedMoEMethodBase, "RoutedExperts": RoutedExperts},
        f"{layers}.fused_moe.activation": {"MoEActivation": MoEActivation},
        f"{layers}.quantization": {
            "register_quantization_config": register_quantization_config,
            "configs": configs,
        },
        f"{layers}.quantization.mxfp4": {
            "GptOssMxfp4Config": GptOssMxfp4Config,
            "GptOssMxfp4MoEMethod": GptOssMxfp4MoEMethod,
            "Mxfp4Config": Mxfp4Config,
            "Mxfp4MoEMethod": Mxfp4MoEMethod,
        },
        tensors: {},
        f"{tensors}.compressed_tensors": {"CompressedTensorsConfig": CompressedTensorsConfig},
        f"{tensors}.compressed_tensors_moe": {},
        f"{tensors}.compressed_tensors_moe.compressed_tensors_moe_wna16": {
            "CompressedTensorsWNA16MoEMethod": CompressedTensorsWNA16MoEMethod
        },
        f"{tensors}.compressed_tensors_moe.compressed_tensors_moe_w4a4_mxfp4": {
            "CompressedTensorsW4A4Mxfp4MoEMethod": CompressedTensorsW4A4Mxfp4MoEMethod
        },
    }
    modules = {}
    for name, attributes in contents.items():
        module = types.ModuleType(name)
        vars(module).update(attributes)
        modules[name] = module
        parent, _, leaf = name.rpartition(".")
        if parent:
            setattr(modules[parent], leaf, module)
    sys.modules.update(modules)
    return modules
