"""vLLM's quantization configs for packed 4-bit experts, with `mxk::moe` in place of its kernels.

Each config is vLLM's own with one answer changed: a routed-experts layer that `refusal` has no objection to gets a
method of ours, any other the stock one. A method of ours takes the parameters and loaders of the stock method as they
are; after loading, the weights stay in checkpoint order, so no second copy exists.

    gpt_oss_mxfp4        gpt-oss: interleaved gate and up rows, biases, SwiGLU-OAI
    mxfp4                GLM, DeepSeek and others: gate rows, then up rows
    compressed-tensors   INT4 pack-quantized: group 32, 64, 128 or per channel, symmetric or with zero points

The classes are at module level because vLLM pickles them into its workers. Imported by vllm.register alone.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase, RoutedExperts
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
    CompressedTensorsConfig,
)
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
    compressed_tensors_moe_wna16,
)
from vllm.model_executor.layers.quantization.mxfp4 import (
    GptOssMxfp4Config,
    GptOssMxfp4MoEMethod,
    Mxfp4Config,
    Mxfp4MoEMethod,
)
from vllm.platforms import current_platform

from mxk_compile.kernels import MoEDesc, supports
from mxk_compile.ops.formats.nibbles import unpack_rows

_logger = init_logger("vllm.mxk_compile")

# Constants of gpt-oss's activation: vLLM's own name for it has them built in.
_OAI = {"activation": "swiglu_oai", "alpha": 1.702, "limit": 7.0}
_GROUP = 32  # values that share an MXFP4 scale; sizes of a rank are rounded up to it


def _activation(moe: Any) -> dict[str, Any] | None:
    """The attributes of `mxk::moe` for the layer's activation, or None if it has none."""
    if moe.activation == MoEActivation.SWIGLUOAI:
        return _OAI
    if moe.activation == MoEActivation.SWIGLUOAI_UNINTERLEAVE and moe.swiglu_beta == 1.0:
        return {"activation": "swiglu_oai", "alpha": moe.swiglu_alpha, "limit": moe.swiglu_limit}
    if moe.activation != MoEActivation.SILU:
        return None
    if moe.swiglu_limit:
        return {"activation": "swiglu_clamp", "limit": moe.swiglu_limit}
    return {"activation": "silu"}


def refusal(layer: Any, method: type[PackedMethod], group_size: int) -> str | None:
    """None if a fused kernel runs this RoutedExperts layer by a method of ours, else the reason in one line.

    Args:
        layer: the RoutedExperts, whose sizes and routing are set and whose parameters are not yet made.
        method: which.
        group_size: values that share a scale; -1 is per channel.
    """
    moe = layer.moe_config
    activation = _activation(moe)
    if activation is None:
        return f"activation {moe.activation.value!r} has no fused kernel"
    objections = {
        "router weights that apply to the input": layer.apply_router_weight_on_input,
        "LoRA": moe.is_lora_enabled,
        "expert load balancing": moe.moe_parallel_config.enable_eplb,
        "data-parallel dispatch of tokens": moe.moe_parallel_config.use_all2all_kernels,
    }
    for name, present in objections.items():
        if present:
            return f"{name} is not supported"
    hidden_size, intermediate_size = moe.hidden_dim, moe.intermediate_size_per_partition
    if method.is_padded:
        intermediate_size += -intermediate_size % _GROUP
    per_channel = group_size == -1
    for name, size in {"hidden size": hidden_size, "intermediate size of a rank": intermediate_size}.items():
        if size % _GROUP or (not per_channel and size % group_size):
            return f"{name} {size} is not a multiple of {max(group_size, _GROUP)}"
    sizes = (hidden_size, intermediate_size) if per_channel else (group_size, group_size)
    desc = MoEDesc(
        device=current_platform.device_type,
        dtype=moe.in_dtype,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_experts=moe.num_local_experts,
        top_k=moe.experts_per_token,
        group_sizes=sizes,
        weight_format=method.weight_format,
        pack_dim="input",
        row_order=method.row_order,
        activation=activation["activation"],
        bias=moe.has_bias,
    )
    return supports(desc)


class PackedMethod(FusedMoEMethodBase):
    """What all formats share; stands before a stock method, whose parameters and loaders it keeps."""

    weight_format = "mxfp4"
    row_order = "gate_up"
    suffix = ""  # of the names of the packed weights
    is_padded = True  # to the whole scale groups in which gpt-oss's loader shards; padded rows stay zero

    def __init__(self, moe: Any) -> None:
        # Not the stock method's, which would look for a kernel of vLLM and may find none.
        FusedMoEMethodBase.__init__(self, moe)

    @property
    def is_monolithic(self) -> bool:
        return False

    @property
    def skip_forward_padding(self) -> bool:
        return False

    @property
    def has_unpadded_output(self) -> bool:
        return False

    @property
    def supports_eplb(self) -> bool:
        return False

    def maybe_roundup_sizes(
        self, hidden_size: int, intermediate_size_per_partition: int, *_: Any
    ) -> tuple[int, int]:
        """The sizes of the parameters; padded where `is_padded` says so."""
        padding = -intermediate_size_per_partition % _GROUP if self.is_padded else 0
        return hidden_size, intermediate_size_per_partition + padding

    def get_fused_moe_quant_config(self, layer: nn.Module) -> None:
        """None: there is no kernel of vLLM to describe the weights to."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """The weights stay where they were loaded, in checkpoint order."""

    def apply(
        self,
        layer: Any,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: Any,
        shared_experts_input: Tensor | None,
    ) -> Tensor:
        """x [T, K] bf16, topk_weights and topk_ids [T, k] of global experts -> [T, K]; traced into the graph."""
        if layer.expert_map is not None:
            # [global experts] -> local index, -1 on other ranks, which adds nothing.
            topk_ids = torch.where(topk_ids < 0, topk_ids, layer.expert_map[topk_ids.clamp(min=0)])
        result: Tensor = torch.ops.mxk.moe(
            x,
            topk_ids,
            topk_weights,
            getattr(layer, f"w13_weight{self.suffix}"),
            layer.w13_weight_scale,
            getattr(layer, f"w2_weight{self.suffix}"),
            layer.w2_weight_scale,
            getattr(layer, "w13_weight_zero_point", None),
            getattr(layer, "w2_weight_zero_point", None),
            getattr(layer, "w13_bias", None),
            getattr(layer, "w2_bias", None),
            weight_format=self.weight_format,
            row_order=self.row_order,
            **_activation(self.moe) or {},
        )
        return result


class GptOssMethod(PackedMethod, GptOssMxfp4MoEMethod):
    """gpt-oss's experts."""

    row_order = "interleaved"


class Mxfp4Method(PackedMethod, Mxfp4MoEMethod):
    """MXFP4 experts with gate and up projections of their own."""


class Int4Method(PackedMethod, compressed_tensors_moe_wna16.CompressedTensorsWNA16MoEMethod):
    """compressed-tensors' packed INT4 experts."""

    weight_format = "uint4"  # codes 0..15; value (code - zero point) * scale, zero point 8 if symmetric
    suffix = "_packed"
    is_padded = False  # scale groups are not split over ranks

    def __init__(self, weight_quant: Any, input_quant: Any, moe: Any) -> None:
        super().__init__(moe)
        # What the stock method's create_weights reads.
        self.weight_quant, self.input_quant = weight_quant, input_quant
        self.symmetric, self.strategy = weight_quant.symmetric, weight_quant.strategy
        self.num_bits, self.packed_factor = weight_quant.num_bits, Fraction(32, weight_quant.num_bits)
        self.group_size = weight_quant.group_size or -1
        self.is_marlin = self.is_transposed = False

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Zero points, packed along the rows, become one byte each, once; the weights stay as they are."""
        if self.symmetric:
            return
        _logger.info_once(
            "mxk_compile: zero points are unpacked to one byte each at load; weights stay as loaded"
        )
        for name in ("w13_weight_zero_point", "w2_weight_zero_point"):
            zeros = unpack_rows(getattr(layer, name).data).contiguous()
            setattr(layer, name, nn.Parameter(zeros, requires_grad=False))


def fits(layer: Any, method: type[PackedMethod], group_size: int = _GROUP) -> bool:
    """Whether a layer is routed experts that a method of ours runs; logs which, or why not.

    `group_size` is the number of values that share a scale; -1 is per channel.
    """
    if not isinstance(layer, RoutedExperts):
        return False
    reason = refusal(layer, method, group_size)
    if reason is None:
        _logger.info_once("mxk_compile: packed experts run through mxk::moe (%s)", method.weight_format)
    else:
        _logger.warning_once("mxk_compile: MoE layers stay stock: %s", reason)
    return reason is None


class GptOssConfig(GptOssMxfp4Config):
    """`gpt_oss_mxfp4`."""

    def get_quant_method(self, layer: nn.Module, prefix: str) -> Any:
        """A method of ours for routed experts where a fused kernel runs them, else vLLM's answer."""
        if fits(layer, GptOssMethod):
            return GptOssMethod(layer.moe_config)
        return super().get_quant_method(layer, prefix)


class PlainMxfp4Config(Mxfp4Config):
    """`mxfp4`."""

    def get_quant_method(self, layer: nn.Module, prefix: str) -> Any:
        """A method of ours for routed experts where a fused kernel runs them, else vLLM's answer."""
        if fits(layer, Mxfp4Method):
            return Mxfp4Method(layer.moe_config)
        return super().get_quant_method(layer, prefix)


class PackedTensorsConfig(CompressedTensorsConfig):
    """`compressed-tensors`."""

    def get_quant_method(self, layer: nn.Module, prefix: str) -> Any:
        """A method of ours for INT4 routed experts where a fused kernel runs them, else vLLM's answer."""
        scheme = self._int4_scheme(layer, prefix) if isinstance(layer, RoutedExperts) else None
        if scheme is not None and fits(layer, Int4Method, scheme["weights"].group_size or -1):
            return Int4Method(scheme["weights"], scheme.get("input_activations"), layer.moe_config)
        return super().get_quant_method(layer, prefix)

    def _int4_scheme(self, layer: Any, prefix: str) -> Any:
        """The scheme of the layer's three projections if it is one, weight-only, packed INT4; else None."""
        self._add_fused_moe_to_target_scheme_map()
        names = (layer.ckpt_gate_proj_name, layer.ckpt_up_proj_name, layer.ckpt_down_proj_name)
        schemes = [self.get_scheme_dict(layer, f"{prefix}.0.{name}") for name in names]
        scheme = schemes[0]
        if scheme is None or any(other != scheme for other in schemes):
            return None
        weights = scheme.get("weights")
        if weights is None or not self._is_wNa16_group_channel(weights, scheme.get("input_activations")):
            return None
        if weights.num_bits != 4 or weights.type != "int" or scheme.get("format") != "pack-quantized":
            return None
        return None if weights.actorder else scheme


def register() -> None:
    """Puts the three configs in the places of vLLM's; may be called again."""
    for name, config in {
        "gpt_oss_mxfp4": GptOssConfig,
        "mxfp4": PlainMxfp4Config,
        "compressed-tensors": PackedTensorsConfig,
    }.items():
        register_quantization_config(name)(config)
