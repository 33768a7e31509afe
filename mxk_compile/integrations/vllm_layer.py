"""vLLM's routed-experts layer, out of tree: MXFP4 and INT4 experts whose quantization config is not one of ours.

vLLM makes every layer of routed experts through `RoutedExperts`, a class that a plugin may replace by its public hook
`RoutedExperts.register_oot`. On NVIDIA such a layer is one opaque node without weights in the compiled graph
(`vllm.moe_forward`), so this is where a kernel can be chosen: when the layer is built, before its parameters are made.

    vLLM's method                         reached through                                     ours
    Mxfp4MoEMethod                        deepseek_v4_fp8 (DeepSeek-V4), fp8 with MXFP4 stores    Mxfp4Method
    GptOssMxfp4MoEMethod                  configs made from gpt_oss_mxfp4                     GptOssMethod
    CompressedTensorsW4A4Mxfp4MoEMethod   compressed-tensors mxfp4-pack-quantized             TensorsMxfp4Method
    CompressedTensorsWNA16MoEMethod       configs made from compressed-tensors, 4 bit         Int4Method

Subclasses of these methods have reasons of their own and are left alone. A layer that is taken keeps its parameters in
checkpoint order, since vLLM has permuted nothing yet; any other layer is vLLM's in every respect. Whatever a method of
ours does in a call is one op of fixed shape: it can be captured in a CUDA graph.
"""

from __future__ import annotations

from typing import Any

from vllm.logger import init_logger
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
    compressed_tensors_moe_w4a4_mxfp4 as w4a4_mxfp4,
)
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
    compressed_tensors_moe_wna16 as wna16,
)
from vllm.model_executor.layers.quantization.mxfp4 import GptOssMxfp4MoEMethod, Mxfp4MoEMethod

from mxk_compile.integrations.vllm_quantization import (
    GptOssMethod,
    Int4Method,
    Mxfp4Method,
    PackedMethod,
    fits,
)

_logger = init_logger("vllm.mxk_compile")


class TensorsMxfp4Method(PackedMethod, w4a4_mxfp4.CompressedTensorsW4A4Mxfp4MoEMethod):
    """compressed-tensors' MXFP4 experts, with activations in bf16, as vLLM runs them on Hopper."""

    suffix = "_packed"
    group_size = 32
    is_padded = False  # its parameters are not zeros before they are loaded


class PackedRoutedExperts(RoutedExperts):
    """`RoutedExperts` that asks for a method of ours where a fused kernel runs the layer."""

    def _get_quant_method(self, prefix: str, quant_config: Any, moe_config: Any) -> Any:
        stock = super()._get_quant_method(prefix, quant_config, moe_config)
        kind = type(stock)
        if kind is Mxfp4MoEMethod and fits(self, Mxfp4Method):
            return Mxfp4Method(moe_config)
        if kind is GptOssMxfp4MoEMethod and fits(self, GptOssMethod):
            return GptOssMethod(moe_config)
        if kind is w4a4_mxfp4.CompressedTensorsW4A4Mxfp4MoEMethod and fits(self, TensorsMxfp4Method):
            return TensorsMxfp4Method(moe_config)
        if kind is wna16.CompressedTensorsWNA16MoEMethod:
            weights = stock.weight_quant
            is_int4 = weights.num_bits == 4 and weights.type == "int" and not weights.actorder
            if is_int4 and fits(self, Int4Method, weights.group_size or -1):
                return Int4Method(weights, stock.input_quant, moe_config)
        return stock


def register() -> None:
    """Puts the layer in the place of vLLM's, unless another package has; may be called again."""
    taken = op_registry_oot.get("RoutedExperts")
    if taken is PackedRoutedExperts:
        return
    if taken is not None or not hasattr(RoutedExperts, "_get_quant_method"):
        other = f"{taken.__module__} replaces it" if taken is not None else "vLLM builds it in another way"
        _logger.warning("mxk_compile: layers of other quantization configs stay stock: %s", other)
        return
    RoutedExperts.register_oot(PackedRoutedExperts)
