"""`mxk::project`: one projection of routed 4-bit experts, y = W[expert] x, under four descriptions of the routing.

Tensors (E local experts, N outputs, K inputs; weight, scale and zero as w13, w13_scale and w13_zero of ops/moe.py):

    out     [R, N]          dtype of x; rows that nothing is routed to are left as they were; it shares no memory with
                            what is read
    x       [R', K]         floating point; kernels take bf16

    overload     R          R'             routing
    routes       T * k      T * k / top_k  topk_ids [T, k], any integer dtype: global expert ids
    sorted       any        R / top_k      sorted_token_ids [P], expert_ids [B], num_tokens_post_padded [1] or []: int32
    contiguous   any        R              m_indices [R] int32
    masked       E * max_m  as out         masked_m [E] int32; x may be [E, max_m, K]

    routes       row t * k + j is of expert topk_ids[t, j] - experts_min
    sorted       sorted_token_ids has rows of `out` in blocks of block_size; block b is of expert expert_ids[b]. Its
                 padding is any number >= R. The first num_tokens_post_padded entries count: the lists may be longer.
    contiguous   row r is of expert m_indices[r], -1 for padding. Each group of 128 rows is of one expert, padding last.
    masked       row e * max_m + j is of expert e if j < masked_m[e]. expected_m, about how many rows an expert has, is
                 for choosing a schedule, on which results depend by rounding.

An expert outside [0, E) is none: such rows are of other ranks.
Row r of `out` reads row r // top_k of x: top_k is k for gate and up, 1 for down, whose input is one row a route.
All routing tensors stay on the device: nothing of them is read back.

Sums are fp32, and `out` is rounded once. On CUDA, INT4 weights are rounded to bf16 before the products where experts
have many rows; with few, and with other weights, products are exact.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mxk_compile.errors import BackwardError
from mxk_compile.ops import library
from mxk_compile.ops.dequant import dequantize

OVERLOADS = ("routes", "sorted", "contiguous", "masked")
GROUP_ROWS = 128
"""Rows that share an expert in "contiguous"."""
ROUTING = {
    "routes": ("topk_ids",),
    "sorted": ("sorted_token_ids", "expert_ids", "num_tokens_post_padded"),
    "contiguous": ("m_indices",),
    "masked": ("masked_m",),
}
"""Routing tensors of an overload; they stand between x and the weight."""
NUM_ROUTING = {overload: len(names) for overload, names in ROUTING.items()}


def experts_of_rows(
    overload: str, num_rows: int, num_experts: int, routing: tuple[Tensor, ...], attributes: dict[str, Any]
) -> Tensor:
    """Local expert of each row of `out`, int64 [R], -1 for none; nothing is read back from the device."""
    first = routing[0].to(torch.int64)
    if overload == "contiguous":
        experts = first
    elif overload == "routes":
        experts = first.flatten() - attributes.get("experts_min", 0)
    elif overload == "masked":
        slot = torch.arange(num_rows, device=first.device)
        max_m = num_rows // num_experts
        expert = slot // max(max_m, 1)
        experts = torch.where(slot - expert * max_m < first[expert], expert, -1)
    else:
        place = torch.arange(len(first), device=first.device)
        block = place // attributes["block_size"]
        counts = (place < routing[2].to(torch.int64)) & (block < len(routing[1])) & (first < num_rows)
        of_place = routing[1].to(torch.int64)[block.clamp(max=len(routing[1]) - 1)]
        # One more row takes what does not count.
        experts = first.new_full((num_rows + 1,), -1)
        experts.scatter_(0, torch.where(counts & (first >= 0), first, num_rows), of_place)
        experts = experts[:num_rows]
    return torch.where((experts >= 0) & (experts < num_experts), experts, -1)


def reference(overload: str, out: Tensor, x: Tensor, *args: Any, **attributes: Any) -> None:
    """What `mxk::project` computes, in fp32 torch on any device, one expert at a time; arguments as in the schema.

    It waits for the device. Raises CallError for packed weights and scales that do not go together.
    """
    count = NUM_ROUTING[overload]
    routing, (weight, scale, *rest) = args[:count], args[count:]
    zero = rest[0] if rest else None
    packing = {"weight_format": attributes["weight_format"], "pack_dim": attributes.get("pack_dim", "input")}
    experts = experts_of_rows(overload, len(out), len(weight), routing, attributes)
    x, top_k = x.reshape(-1, x.shape[-1]), attributes.get("top_k", 1)
    for expert in experts.unique().tolist():
        if expert < 0:
            continue
        (rows,) = torch.where(experts == expert)
        values = dequantize(weight[expert], scale[expert], None if zero is None else zero[expert], **packing)
        out[rows] = (x[rows // top_k].float() @ values.T).to(out.dtype)


def enter_directly(overload: str, implementation: Callable[..., None], device: str) -> None:
    """Registers an implementation of an overload for "CPU" or "CUDA", and the autograd rule in front of it.

    The rule: an op that writes into its argument has no gradient, and says so instead of giving zeros. It also counts
    the write, by which saved tensors notice that they have changed. Where the device is next (no mode, subclass or
    transform in between) it calls the implementation itself, which saves the dispatcher's second round.
    """
    op: torch._ops.OpOverload = getattr(torch.ops.mxk.project, overload)
    below = torch._C._after_autograd_keyset
    plain = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, device)).raw_repr()

    def rule(keyset: torch._C.DispatchKeySet, out: Tensor, *args: Any, **attributes: Any) -> None:
        if torch.is_grad_enabled() and torch._C._any_requires_grad(out, *args):
            given, advice = "a call that needs a gradient", "call it in torch.no_grad()"
            raise BackwardError(f"mxk::project.{overload}", given, "tensors that need no gradient", advice)
        keyset &= below
        if keyset.raw_repr() == plain:
            implementation(out, *args, **attributes)
        else:
            op.redispatch(keyset, out, *args, **attributes)
        torch.autograd.graph.increment_version(out)

    library.impl(f"project.{overload}", implementation, device)
    library.impl(f"project.{overload}", rule, f"Autograd{device}", with_keyset=True)
