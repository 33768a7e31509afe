"""`StockExperts`: the routed experts of one layer, kept packed, as a module that calls the platform's stock op.

    packed weights                                      op, hpu::mixture_of_experts.
    MXFP4, interleaved rows, biases (gpt-oss)           bias_mxfp4_fused_weights: SwiGLU-OAI
    MXFP4, gate rows then up rows                       mxfp4_fused_weights: SiLU
    INT4, symmetric, gate rows then up rows             int4_fused_weights: SiLU; packed along the outputs

Whatever compiles the model with our passes replaces the call; everything else runs it as it stands.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from mxk_compile.checkpoint import PackedExperts
from mxk_compile.errors import CallError
from mxk_compile.ops import stock
from mxk_compile.ops.formats import int4


class StockExperts(nn.Module):
    """The routed experts of one layer, kept packed, run by `hpu::mixture_of_experts`.

    Buffers, named as in vLLM (E experts, hidden size K, intermediate I, values g that share a scale):
        MXFP4  w13_weight uint8 [E, 2I, K/2], w13_weight_scale uint8 [E, 2I, K/32],
               w2_weight uint8 [E, K, I/2], w2_weight_scale uint8 [E, K, I/32]; with biases w13_bias bf16 [E, 2I],
               w2_bias bf16 [E, K]
        INT4   w13_weight int32 [E, K, 2I/8], w13_weight_scale [E, K/g, 2I],
               w2_weight int32 [E, I, K/8], w2_weight_scale [E, I/g, K]; two's complement

    Args:
        packed: the tensors of the layer. INT4 packed along the inputs, as checkpoints have it, is packed anew.
        alpha, limit: constants of SwiGLU-OAI, for experts with biases; limit may be inf.
        device: where the buffers go.

    Raises CallError for experts that none of the ops above takes.
    """

    w13_weight: Tensor
    w13_weight_scale: Tensor
    w13_bias: Tensor | None
    w2_weight: Tensor
    w2_weight_scale: Tensor
    w2_bias: Tensor | None

    def __init__(
        self,
        packed: PackedExperts,
        alpha: float = 1.702,
        limit: float = 7.0,
        device: str | torch.device = "cpu",
    ) -> None:
        super().__init__()
        biases = (packed.w13_bias, packed.w2_bias)
        self.has_bias = packed.row_order == "interleaved"
        _check(packed, self.has_bias)
        self.weight_format = "mxfp4" if packed.weight_format == "mxfp4" else "int4"
        self.alpha, self.limit = alpha, limit
        w13, w13_scale = _in_stock_layout(packed, packed.w13, packed.w13_scale)
        w2, w2_scale = _in_stock_layout(packed, packed.w2, packed.w2_scale)
        self.num_experts, self.hidden_size = len(w2), packed_hidden_size(packed)
        for name, tensor in (
            *(("w13_weight", w13), ("w13_weight_scale", w13_scale)),
            *(("w2_weight", w2), ("w2_weight_scale", w2_scale)),
        ):
            self.register_buffer(name, tensor.to(device))
        for name, bias in zip(("w13_bias", "w2_bias"), biases, strict=True):
            self.register_buffer(name, None if bias is None else bias.to(device, torch.bfloat16))

    def forward(self, hidden_states: Tensor, router_indices: Tensor, routing_weights: Tensor) -> Tensor:
        """hidden_states [T, K] float, router_indices [T, k] integer, routing_weights [T, k] float -> [T, K]."""
        routing = (hidden_states.to(torch.bfloat16), router_indices, routing_weights.to(torch.bfloat16))
        # The op takes one tensor per expert: views of the stacked buffers, as vllm-gaudi passes them.
        stacks = (self.w13_weight, self.w13_weight_scale, self.w2_weight, self.w2_weight_scale)
        w13, w13_scale, w2, w2_scale = (stack.unbind(0) for stack in stacks)
        if self.weight_format == "int4":
            result: Tensor = torch.ops.hpu.mixture_of_experts.int4_fused_weights(
                *(*routing, w13, w2, w13_scale, w2_scale),
                **{"permuted_weights": False, "activation": "silu"},
                **{"experts_min": 0, "experts_max": self.num_experts - 1},
            )
            return result.to(hidden_states.dtype)
        biases = [bias.unbind(0) for bias in (self.w13_bias, self.w2_bias) if bias is not None]
        weights = (w13, w13_scale, w2, w2_scale, biases)
        return stock.call_mxfp4(routing, *weights, alpha=self.alpha, limit=self.limit).to(hidden_states.dtype)

    def fused_call(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of `mxk::moe` after the routing, and its attributes, for the same computation."""
        weights = (self.w13_weight, self.w13_weight_scale, self.w2_weight, self.w2_weight_scale)
        attributes: dict[str, Any] = {"weight_format": self.weight_format, "row_order": "gate_up"}
        attributes["activation"] = "silu"
        if self.has_bias:
            limit = None if math.isinf(self.limit) else self.limit
            attributes |= {"row_order": "interleaved", "activation": "swiglu_oai"}
            attributes |= {"alpha": self.alpha, "limit": limit}
        if self.weight_format == "int4":
            attributes["pack_dim"] = "output"
        return (*weights, None, None, self.w13_bias, self.w2_bias), attributes

    def extra_repr(self) -> str:
        """Sizes and constants, for printing the model."""
        rows = self.w13_weight.shape[1] if self.weight_format == "mxfp4" else self.w13_weight.shape[2] * 8
        sizes = f"E={self.num_experts}, K={self.hidden_size}, I={rows // 2}, {self.weight_format}"
        return sizes + (f", alpha={self.alpha}, limit={self.limit}" if self.has_bias else "")


def stock_experts(model: nn.Module) -> dict[str, StockExperts]:
    """The packed experts of a model by module name, in layer order."""
    return {name: module for name, module in model.named_modules() if isinstance(module, StockExperts)}


def packed_hidden_size(packed: PackedExperts) -> int:
    """K, from the rows of the down projection."""
    if packed.pack_dim == "output":
        return int(packed.w2_scale.shape[-1])
    return int(packed.w2.shape[1])


def _check(packed: PackedExperts, has_bias: bool) -> None:
    present = [bias is not None for bias in (packed.w13_bias, packed.w2_bias)]
    if has_bias and not all(present):
        raise CallError("StockExperts", "experts without biases", "both biases", "read a gpt-oss layer")
    given = None
    if packed.row_order not in ("interleaved", "gate_up"):
        given = f"row_order={packed.row_order!r}"
    elif any(present) and not has_bias:
        given = "biases with row_order='gate_up'"
    elif has_bias and packed.weight_format != "mxfp4":
        given = f"weight_format={packed.weight_format!r} with interleaved rows"
    elif packed.w13_zero is not None or packed.w2_zero is not None:
        given = "INT4 with zero points"
    if given is not None:
        allowed = "interleaved MXFP4 with biases, or gate_up without, MXFP4 or symmetric INT4"
        raise CallError("StockExperts", given, allowed, "call torch.ops.mxk.moe directly")


def _in_stock_layout(packed: PackedExperts, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """A weight and its scale as the op takes them: INT4 in two's complement and packed along the outputs."""
    if packed.weight_format == "mxfp4":
        return weight, scale
    if packed.pack_dim == "output":
        return (int4.rebias(weight) if packed.weight_format == "uint4" else weight), scale
    # One expert at a time into its place: codes take a byte each, and a layer of a large model is gigabytes.
    num_experts, rows, row_bytes = weight.shape
    repacked = torch.empty(num_experts, 2 * row_bytes, rows // 8, dtype=torch.int32, device=weight.device)
    for place, expert in zip(repacked, weight, strict=True):
        words = int4.pack(int4.unpack_codes(expert), "output")
        place.copy_(int4.rebias(words) if packed.weight_format == "uint4" else words)
    return repacked, scale.transpose(1, 2).contiguous()
