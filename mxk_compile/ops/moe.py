"""`mxk::moe`: one call of a layer of routed 4-bit experts; fp32 reference, autograd rule.

Tensors (T tokens, K hidden, I intermediate, E local experts, k routes a token, g values a scale):

    hidden_states [T, K]    floating point; kernels take bf16
    topk_ids      [T, k]    any integer dtype, global expert ids
    topk_weights  [T, k]    floating point, applied after down projection and bias
    w13           gate and up rows, packed; see the table
    w2            down projection, packed
    *_zero        zero points of "uint4": uint8 in the scale's shape, or packed int32 if `pack_dim="output"`; absent = 8
    w13_bias [E, 2I], w2_bias [E, K]   bf16 or fp32, w13_bias in row order
    result        [T, K], or [T, k, K] with `per_route`, dtype of hidden_states

    pack_dim  w13                               w13_scale     w2                          w2_scale
    input     u8 [E,2I,K/2] or i32 [E,2I,K/8]   [E,2I,K/g]    u8 [E,K,I/2] or i32 I/8     [E,K,I/g]
    output    i32 [E,K,2I/8]                    [E,K/g,2I]    i32 [E,I,K/8]               [E,I/g,K]

`mxk::moe.lists` takes one tensor per expert for each of the weight arguments (empty list = absent), and one more row
order, "separate": w13 then holds 2E tensors, all gates before all ups.

Attributes:
    weight_format  "mxfp4": E2M1 codes, low nibble = even k, E8M0 scale per 32 (OCP MX v1.0)
                   "uint4": (code - zero) * scale        "int4": two's complement code * scale
    row_order      of the 2I rows: "gate_up", "up_gate", "interleaved" (even rows are gate)
    activation     "silu": silu(gate) * up
                   "swiglu_clamp": silu(min(gate, limit)) * clamp(up, -limit, limit)
                   "swiglu_oai": the same clamps, then gate * sigmoid(alpha * gate) * (up + 1)
    limit          None = no clamp
    experts_min    global id of the first local expert

Ids outside [experts_min, experts_min + E) add nothing, duplicates add, and a token without local expert is an exact
zero row whatever else the call holds. The sum over routes is fp32 in slot order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._library.autograd import Info, make_autograd_impl

from mxk_compile.errors import BackwardError
from mxk_compile.ops import library
from mxk_compile.ops.dequant import dequantize

Weights = Tensor | Sequence[Tensor]
"""One weight argument: stacked over the experts, or one tensor an expert."""
WEIGHTS = ("w13", "w13_scale", "w2", "w2_scale", "w13_zero", "w2_zero", "w13_bias", "w2_bias")
"""Names of the weight arguments, in the order of the schema."""


def activate(gate: Tensor, up: Tensor, activation: str, alpha: float, limit: float | None) -> Tensor:
    """The gated activation of `mxk::moe`; gate, up [..., I] of one dtype, result the same."""
    if activation != "silu" and limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    if activation == "swiglu_oai":
        return gate * torch.sigmoid(alpha * gate) * (up + 1)
    return torch.nn.functional.silu(gate) * up


def split_rows(w13: Tensor, row_order: str) -> tuple[Tensor, Tensor]:
    """Gate and up halves of the last dimension, [..., 2I] -> 2 x [..., I]."""
    if row_order == "interleaved":
        return w13[..., 0::2], w13[..., 1::2]
    first, second = w13.chunk(2, dim=-1)
    return (second, first) if row_order == "up_gate" else (first, second)


def is_integer(tensor: Tensor) -> bool:
    """Whether it can hold expert ids: any integer dtype."""
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)


def reference(
    hidden_states: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    w13: Weights,
    w13_scale: Weights,
    w2: Weights,
    w2_scale: Weights,
    w13_zero: Weights | None = None,
    w2_zero: Weights | None = None,
    w13_bias: Weights | None = None,
    w2_bias: Weights | None = None,
    *,
    weight_format: str,
    row_order: str,
    activation: str,
    alpha: float = 1.0,
    limit: float | None = None,
    pack_dim: str = "input",
    experts_min: int = 0,
    per_route: bool = False,
    round_intermediate: bool = True,
) -> Tensor:
    """What `mxk::moe` computes, in fp32 torch on any device, one expert at a time; see the module docstring.

    The result has the dtype of hidden_states. `round_intermediate=False` keeps the intermediate in fp32: the yardstick
    of the `rel_l2` figures. Raises CallError for packed weights and scales that do not go together.
    """
    (num_tokens, hidden_size), top_k = hidden_states.shape, topk_ids.shape[1]
    num_experts = len(w2)

    def project(x: Tensor, weight: Weights, scale: Weights, zero: Any, bias: Any, index: int) -> Tensor:
        zero = zero[index] if zero is not None and len(zero) else None
        values = dequantize(weight[index], scale[index], zero, weight_format=weight_format, pack_dim=pack_dim)
        y = x @ values.T
        return y + bias[index].float() if bias is not None and len(bias) else y

    # Integer comparison in 64 bits: 2**32 + 3 is not expert 3.
    slots = topk_ids.to(torch.int64) - experts_min
    routes = hidden_states.new_zeros((num_tokens, top_k, hidden_size), dtype=torch.float32)
    for expert in range(num_experts):
        token, slot = torch.where(slots == expert)
        if token.numel() == 0:
            continue
        x = hidden_states[token].float()
        gate_up = w13, w13_scale, w13_zero, w13_bias
        if row_order == "separate":
            gate, up = project(x, *gate_up, expert), project(x, *gate_up, expert + num_experts)
        else:
            gate, up = split_rows(project(x, *gate_up, expert), row_order)
        a = activate(gate, up, activation, alpha, limit)
        if round_intermediate:
            a = a.to(torch.bfloat16).float()
        y = project(a, w2, w2_scale, w2_zero, w2_bias, expert)
        routes[token, slot] = y * topk_weights[token, slot].float()[:, None]
    if per_route:
        return routes.to(hidden_states.dtype)
    # Slot by slot, not torch.sum: its order is not promised.
    total = routes.new_zeros((num_tokens, hidden_size))
    for index in range(top_k):
        total = total + routes[:, index]
    return total.to(hidden_states.dtype)


def _no_backward(grad: Tensor, like: Tensor, op: str) -> Tensor:
    raise BackwardError(
        op,
        "a gradient was asked of it",
        "inference only (no_grad, or inputs that need no gradient)",
        "train on the unpacked weights",
    )


library.impl("no_backward", _no_backward, "CPU")
library.impl("no_backward", _no_backward, "CUDA")
library.impl("no_backward", lambda grad, like, op: torch.empty_like(like), "Meta")


def register_no_backward(op: torch._ops.OpOverload) -> Callable[..., Any]:
    """Gives `op` a backward that can be traced and raises BackwardError when it runs, instead of silent zeros.

    Returns its kernel for the dispatcher's autograd keys, called with a keyset and the op's arguments.
    """
    name = str(op)

    def setup_context(
        ctx: Any, inputs: tuple[Any, ...], output: Any, keyword_only_inputs: Any = None
    ) -> None:
        saved: list[Tensor] = []

        def place(value: Any) -> Any:
            """Where the gradient's shape is found: an index into the saved tensors, or None for no gradient."""
            if isinstance(value, (list, tuple)):
                return [place(x) for x in value]
            if isinstance(value, Tensor) and value.requires_grad:
                saved.append(value)
                return len(saved) - 1
            return None

        ctx.places = [place(value) for value in inputs]
        ctx.save_for_backward(*saved)

    def backward(ctx: Any, grad: Tensor) -> Any:
        saved = ctx.saved_tensors

        def gradient(place: Any) -> Any:
            if isinstance(place, list):
                return [gradient(x) for x in place]
            # An op of `grad`: without it, a partitioner of the joint graph would put it into the forward.
            return None if place is None else torch.ops.mxk.no_backward(grad, saved[place], name)

        return tuple(gradient(place) for place in ctx.places)

    torch.library.register_autograd(op, backward, setup_context=setup_context)
    rule: Callable[..., Any] = make_autograd_impl(op, Info(backward, setup_context))
    return rule


autograd_rules = {
    "moe": register_no_backward(torch.ops.mxk.moe.default),
    "moe.lists": register_no_backward(torch.ops.mxk.moe.lists),
}
"""What the autograd keys run for an op, called with a keyset and the op's arguments."""
