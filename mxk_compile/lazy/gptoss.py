"""The stock call of one gpt-oss layer of vllm-gaudi, with the kernels in front of it.

    layer.moe_op(x, ids, weights)     VllmMixtureOfExpertsOpMXFP4, which calls bias_mxfp4_fused_weights
      T <= cap, T*k <= 128            -> mxk_w13xib, mxk_w2xb on the layer's stacked parameters
      any other call                  -> as it was

Slices and other views of x are made in the same lazy graph as the call, weights are passed whole: a legacy op can read
wrong data through a view that an earlier graph made (published: "MXFP4 MoE decode kernels", pitfalls). The layer's own
per-expert lists are such views; they are compared with the stacks when the weights are loaded and not used after.
"""

from __future__ import annotations

import functools
import logging
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mxk_compile.errors import KernelError, MxkError
from mxk_compile.kernels import MoEDesc, tpc
from mxk_compile.kernels.tpc.libraries import load_ops
from mxk_compile.kernels.tpc.signatures import MAX_ROUTES
from mxk_compile.lazy import signature_table
from mxk_compile.lazy.environment import VARIANT, Options

_logger = logging.getLogger("vllm.mxk_compile.lazy")

_STACKS = {
    "w13_weight": ("w13_list", "weight"),
    "w13_weight_scale": ("w13_list", "scale"),
    "w2_weight": ("w2_list", "weight"),
    "w2_weight_scale": ("w2_list", "scale"),
    "w13_bias": ("w13_list", "bias"),
    "w2_bias": ("w2_list", "bias"),
}
"""The layer's parameters, and where its op keeps the experts' views of them."""


@functools.cache
def _say_once(level: int, text: str) -> None:
    _logger.log(level, "%s", text)


def _stock(reason: str) -> None:
    _say_once(logging.WARNING, f"MXFP4 TPC MoE keeps the stock op: {' '.join(reason.split())}")


@functools.cache
def _load(folder: Path) -> None:
    """The op library, once; raises KernelError if it cannot be used, or beside another op of the process."""
    load_ops(folder, "lazy")
    signature_table.check_signatures(VARIANT, signature_table.registered_ops())


def attach(layer: Any, options: Options) -> bool:
    """Puts the kernels before `layer.moe_op`; false, with the reason logged once, where the layer does not fit."""
    try:
        _load(options.folder)
        call = LazyMoE(layer, options)
    except Exception as error:  # a layer of another version may lack anything; the server must go on as stock
        _stock(str(error) if isinstance(error, MxkError) else f"{type(error).__name__}: {error}")
        return False
    layer.moe_op.forward = call
    desc = call.desc
    sizes = f"E_local={desc.num_experts} K={desc.hidden_size} I={desc.intermediate_size}"
    routes = f"<= {MAX_ROUTES} routes"
    _say_once(logging.INFO, f"MXFP4 TPC MoE enabled ({sizes}, <= {options.max_tokens} tokens, {routes})")
    return True


class LazyMoE:
    """Takes the place of `layer.moe_op.forward`."""

    def __init__(self, layer: Any, options: Options) -> None:
        """Checks the layer; raises MxkError or AttributeError where it is not what the kernels need."""
        op = layer.moe_op
        self.layer, self.op, self.stock, self.max_tokens = layer, op, op.forward, options.max_tokens
        for name, allowed in (("has_bias", True), ("block_size", 32)):
            if getattr(op, name) != allowed:
                raise _refuse(f"{name} is {getattr(op, name)}", str(allowed))
        self.desc = self._describe()
        variant = tpc.config(self.desc).variant
        if variant != VARIANT:
            raise _refuse(f"the layer is one of variant {variant!r}", repr(VARIANT))
        if op.experts_max - op.experts_min + 1 != self.desc.num_experts:
            given = f"experts {op.experts_min} to {op.experts_max} in {self.desc.num_experts} local ones"
            raise _refuse(given, "as many ids as experts")
        for name, (holder, attribute) in _STACKS.items():
            self._compare(name, [getattr(expert, attribute) for expert in getattr(op, holder)])
        for name in ("w13_weight_scale", "w2_weight_scale"):
            # The kernels take it for infinity, which the clamps would make an ordinary number.
            if bool((getattr(layer, name) == 255).any()):
                raise _refuse(f"{name} holds scale byte 255, which is NaN", "scale bytes 0 to 254")
        # Once, as fp32: buffers, so that they move with the layer.
        for name in ("w13_bias", "w2_bias"):
            layer.register_buffer(f"mxk_{name}", getattr(layer, name).detach().float(), persistent=False)

    def _describe(self) -> MoEDesc:
        """The description of a one-token call; raises KernelError or CallError if no kernel runs it."""
        layer = self.layer
        weight = layer.w13_weight
        x = weight.new_empty((1, layer.w2_weight.shape[1]), dtype=torch.bfloat16)
        ids = weight.new_empty((1, layer.top_k), dtype=torch.int32)
        packed = (weight, layer.w13_weight_scale, layer.w2_weight, layer.w2_weight_scale)
        desc = MoEDesc.from_call(
            *(x, ids, ids.to(torch.bfloat16)),
            *(*packed, None, None, layer.w13_bias, layer.w2_bias),
            weight_format="mxfp4",
            row_order="interleaved",
            activation="swiglu_oai",
        )
        reason = tpc.supports(desc) or tpc.misfit(desc, packed)
        if reason is not None:
            raise _refuse(reason, "the sizes of docs/gaudi.md")
        return desc

    def _compare(self, name: str, views: list[Tensor]) -> None:
        """Whether the op's list holds the slices of the layer's parameter; first, middle and last expert are read."""
        stack = getattr(self.layer, name)
        if len(views) != len(stack):
            raise _refuse(f"{len(views)} experts listed for {len(stack)} in {name}", "the layer's own slices")
        for index in sorted({0, len(stack) // 2, len(stack) - 1}):
            if not torch.equal(views[index], stack[index]):
                raise _refuse(f"expert {index} listed is not that of {name}", "the layer's own slices")

    def _misfit(self, hidden_states: Tensor, ids: Tensor, weights: Tensor) -> str | None:
        """Why a call that is small enough is not one for the kernels, or None."""
        desc = self.desc
        if hidden_states.dtype != desc.dtype or hidden_states.dim() != 2:
            return f"hidden_states are {list(hidden_states.shape)} {hidden_states.dtype}; allowed: [T, K] {desc.dtype}"
        if hidden_states.shape[1] != desc.hidden_size:
            return f"hidden_states have {hidden_states.shape[1]} values; allowed: K = {desc.hidden_size}"
        if (
            ids.dim() != 2
            or ids.shape[0] != hidden_states.shape[0]
            or ids.dtype not in (torch.int32, torch.int64)
        ):
            return f"expert_routing_table is {list(ids.shape)} {ids.dtype}; allowed: [T, k] torch.int32, torch.int64"
        if weights.shape != ids.shape or not weights.is_floating_point():
            return f"router_weights are {list(weights.shape)} {weights.dtype}; allowed: [T, k] floating point"
        return None

    def __call__(
        self,
        hidden_states: Tensor,
        expert_routing_table: Tensor,
        router_weights: Tensor,
        permuted_weights: bool = True,
        activation: Any = "silu",
    ) -> Tensor:
        """[T, K] -> [T, K]; arguments as the stock op's, whose `activation` has no meaning where there are biases."""
        num_tokens, num_routes = hidden_states.shape[0], expert_routing_table.numel()
        if 0 < num_tokens <= self.max_tokens and 0 < num_routes <= MAX_ROUTES:
            reason = self._misfit(hidden_states, expert_routing_table, router_weights)
            if reason is None and not permuted_weights:
                reason = "permuted_weights is False; allowed: True"
            if reason is None:
                return self._run(hidden_states, expert_routing_table, router_weights)
            _stock(reason)
        result: Tensor = self.stock(
            hidden_states,
            expert_routing_table,
            router_weights,
            permuted_weights=permuted_weights,
            activation=activation,
        )
        return result

    def _run(self, hidden_states: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        layer, op = self.layer, self.op
        tensors: tuple[Any, ...] = (
            *(hidden_states, ids, weights),
            *(layer.w13_weight, layer.w13_weight_scale, layer.w2_weight, layer.w2_weight_scale, None, None),
            *(layer.mxk_w13_bias, layer.mxk_w2_bias),
        )
        scalars = {"alpha": op.alpha, "limit": op.limit, "experts_min": op.experts_min}
        return tpc.sequence(self.desc, *tensors, **scalars)


def _refuse(given: str, allowed: str) -> KernelError:
    return KernelError("gpt-oss layer", given, allowed, "the stock op stays")
