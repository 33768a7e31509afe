"""Gaudi 2 kernels of `mxk::moe`: which of them run a call, and the call as a sequence of their ops.

    x [T,K] -> pad to 512s, chunk order -> custom_op::mxk_w13* -> a [T*k, I padded] -> custom_op::mxk_w2* -> y

`moe` is that sequence in plain torch: eager and lazy calls run it, passes/lower_moe.py traces it into the graph. Names,
tensors and limits of the kernels stand in signatures.py. Nothing here has run on a Gaudi.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mxk_compile.errors import KernelError
from mxk_compile.kernels.fallback import say_reference_once
from mxk_compile.kernels.tpc.signatures import (
    CHUNK,
    DTYPES,
    KERNELS,
    MAX_ROUTES,
    VARIANT_KERNELS,
    VARIANT_LIMITS,
    Kernel,
    padded,
)
from mxk_compile.ops.formats import mxfp4
from mxk_compile.ops.moe import Weights, reference
from mxk_compile.ops.stack import stack_of

if TYPE_CHECKING:
    from mxk_compile.kernels.desc import KernelConfig, MoEDesc


@dataclasses.dataclass(frozen=True)
class _Calls:
    """What the kernels of one variant compute: attributes of `mxk::moe`."""

    row_order: str
    activation: str
    bias: bool = False
    per_route: bool = False
    weight_format: str = "mxfp4"
    pack_dim: str = "input"


_CALLS = {
    "gptoss": _Calls("interleaved", "swiglu_oai", bias=True),
    "glm": _Calls("gate_up", "silu"),
    "kimi": _Calls("gate_up", "silu"),  # after glm, which is the cheaper one where K allows both
    "dsv41": _Calls("interleaved", "swiglu_clamp"),
    "muse": _Calls("gate_up", "silu", per_route=True),
    "int4": _Calls("gate_up", "silu", weight_format="uint4"),
    "kimi_int4": _Calls("gate_up", "silu", weight_format="uint4"),
    "wna16": _Calls("gate_up", "silu", weight_format="uint4", pack_dim="output"),
}

_unusable: dict[str, str] = {}
"""Ops that failed their first eager call, and why: filled by the start-up self-check (passes/warm.py)."""


def usable(name: str) -> str | None:
    """None if `custom_op::name` is there to be called, else the reason in one line."""
    if not hasattr(torch.ops.custom_op, name):
        return (
            f"op custom_op::{name} is not registered; load the op library of `mxk build-tpc` before compiling"
        )
    return _unusable.get(name)


def mark_unusable(name: str, reason: str) -> None:
    """Keeps `supports` from choosing an op that failed its first eager call."""
    _unusable[name] = reason


def _choose(desc: MoEDesc) -> tuple[str | None, str]:
    """(variant, "") whose kernels run `desc` here, or (None, why there is none)."""
    if desc.dtype != torch.bfloat16:
        return None, f"hidden_states are {desc.dtype}; allowed: torch.bfloat16"
    attributes = desc.row_order, desc.activation, desc.bias, desc.per_route, desc.weight_format
    call = _Calls(*attributes, desc.pack_dim)
    variants = [variant for variant, computes in _CALLS.items() if computes == call]
    if not variants:
        return None, f"no kernel for {desc}; allowed: {'; '.join(_described(c) for c in _CALLS.values())}"
    if desc.group_sizes != (mxfp4.BLOCK, mxfp4.BLOCK):
        return None, f"group sizes {desc.group_sizes}; allowed: {mxfp4.BLOCK}"
    reason = ""
    for variant in variants:
        sizes = (-1, desc.top_k, desc.hidden_size, desc.intermediate_size, desc.num_experts)
        refused = VARIANT_LIMITS[variant].refuse(*sizes)
        if refused is not None:
            # Of several variants, the last has the widest limits.
            reason = f"{variant}: {refused}"
            continue
        missing = [why for kernel in _kernels(variant) if (why := usable(kernel.name)) is not None]
        if not missing:
            return variant, ""
        reason = f"{variant}: {missing[0]}"
        break
    return None, reason


def _described(call: _Calls) -> str:
    parts = [call.weight_format, call.row_order, call.activation]
    packed = [f"pack_dim={call.pack_dim}"] * (call.pack_dim != "input")
    return " ".join(parts + packed + ["bias"] * call.bias + ["per_route"] * call.per_route)


def _kernels(variant: str) -> tuple[Kernel, Kernel]:
    """The gate/up and the down kernel of a variant."""
    first, second = VARIANT_KERNELS[variant][:2]
    return KERNELS[first], KERNELS[second]


def supports(desc: MoEDesc) -> str | None:
    """None if `moe` runs calls of this description here, else the reason in one line."""
    variant, reason = _choose(desc)
    return None if variant is not None else f"Gaudi kernels: {reason}"


def _variant(desc: MoEDesc) -> str:
    variant, reason = _choose(desc)
    if variant is None:
        raise KernelError("Gaudi kernels", reason, "what supports() accepts", "keep the stock op")
    return variant


def misfit(desc: MoEDesc, weights: Sequence[Any]) -> str | None:
    """Why weights of a description that `supports` accepts are none for its kernels, or None.

    Args:
        desc: of the call.
        weights: the weight arguments of `mxk::moe` in order, stacked or as lists; `desc` does not tell all of them.
    """
    *packed, w13_zero, w2_zero = (*weights, None, None)[:6]
    given = dict(zip(("w13", "s13", "w2", "s2"), packed, strict=True))
    zeros = [zero for zero in (w13_zero, w2_zero) if zero is not None and len(zero)]
    if desc.pack_dim == "output":
        if len(zeros) != 2 or any(_shared(zero) is None for zero in zeros):
            return "Gaudi kernels: zero points are not one tensor for all experts; allowed: one for w13, one for w2"
        given |= {"z13": _shared(zeros[0]), "z2": _shared(zeros[1])}
    elif zeros:
        return "Gaudi kernels: zero points are given; allowed: none, which makes code 8 zero"
    for kernel in _kernels(_variant(desc)):
        for tensor in kernel.inputs:
            if (value := given.get(tensor.name)) is None:
                continue
            dtype = value.dtype if isinstance(value, Tensor) else value[0].dtype
            if dtype != DTYPES[tensor.dtype]:
                return f"Gaudi kernels: {tensor.name} is {dtype}; allowed: {DTYPES[tensor.dtype]}"
    # Not copied here: that would be all experts in every call. Zero points are small, and lists are stacked anyway.
    for name, value in zip(("w13", "s13", "w2", "s2"), packed, strict=True):
        if isinstance(value, Tensor) and not value.is_contiguous():
            return f"Gaudi kernels: {name} has strides {tuple(value.stride())}; allowed: dense tensors"
    return None


def _shared(zero: Weights) -> Tensor | None:
    """The one tensor behind zero points that all experts share, a list or a tensor repeated along dim 0; else None."""
    first = zero[0]
    if isinstance(zero, Tensor):
        return first if zero.stride(0) == 0 or len(zero) == 1 else None
    return first if all(other is first for other in zero) else None


def config(desc: MoEDesc) -> KernelConfig:
    """The kernels that run a description which `supports` accepts; raises KernelError for another."""
    from mxk_compile.kernels.desc import KernelConfig  # select.py imports this module first

    return KernelConfig("hpu", "tpc", _variant(desc))


def token_range(desc: MoEDesc) -> tuple[int, int]:
    """Fewest and most tokens of one call: the variant's cap, and 128 routes. Raises KernelError as `config`."""
    return 1, min(VARIANT_LIMITS[_variant(desc)].max_tokens, MAX_ROUTES // desc.top_k)


def chunk_order(values: Tensor) -> Tensor:
    """[T, K] -> [T, K padded to 512s with zeros], each chunk in the order that the kernels' nibble planes have.

    Position 128p + i of a chunk holds element 4i + p. Sizes of T never enter the ops' arguments, so that the traced
    form holds for every T.
    """
    aten = torch.ops.aten
    size = values.shape[-1]
    values = values.contiguous()
    if padded(size) != size:
        values = aten.constant_pad_nd.default(values, [0, padded(size) - size], 0.0)
    lanes = aten.view.default(values, [-1, padded(size) // CHUNK, CHUNK // 4, 4])
    planes = aten.permute.default(lanes, [0, 1, 3, 2])
    dense = aten.clone.default(planes, memory_format=torch.contiguous_format)
    result: Tensor = aten.view.default(dense, [-1, padded(size)])
    return result


def narrow_ids(ids: Tensor, experts_min: int, num_experts: int) -> Tensor:
    """Expert ids as int32, ids of other cards mapped to neighbours that no card of this range holds."""
    if ids.dtype == torch.int32:
        return ids.contiguous()
    if ids.dtype in (torch.uint32, torch.uint64):
        # Ids from 2**63 on turn negative, which is just as far from being local.
        ids = ids.to(torch.int64)
    if ids.dtype == torch.int64:
        # Before the cast: 2**32 + 3 is not expert 3.
        ids = ids.clamp(experts_min - 1, experts_min + num_experts)
    return ids.to(torch.int32).contiguous()


def call_kernel(kernel: Kernel, arguments: dict[str, Any]) -> Tensor:
    """Calls `custom_op::<kernel>` with those of `arguments` that it takes, in its order."""
    op = getattr(torch.ops.custom_op, kernel.name).default
    result: Tensor = op(*(arguments[name] for name in kernel.arguments))
    return result


def sequence(
    desc: MoEDesc,
    hidden_states: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    w13: Tensor,
    w13_scale: Tensor,
    w2: Tensor,
    w2_scale: Tensor,
    w13_zero: Weights | None = None,
    w2_zero: Weights | None = None,
    w13_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
    *,
    alpha: float = 1.0,
    limit: float | None = None,
    experts_min: int = 0,
) -> Tensor:
    """The two kernels on stacked weights, as in ops/moe.py; what passes and lazy mode put into a graph.

    Of zero points, which all experts share (`misfit`), those of the first are taken.

    The caller has asked `supports` and keeps T within `token_range`; raises KernelError as `config`.
    """

    def bias(given: Tensor | None, rows: int) -> Tensor:
        if given is None:
            return hidden_states.new_zeros((desc.num_experts, rows), dtype=torch.float32)
        return given.to(torch.float32).contiguous()

    arguments: dict[str, Any] = {
        "x": chunk_order(hidden_states),
        "ids": narrow_ids(topk_ids, experts_min, desc.num_experts),
        "rw": topk_weights.to(torch.float32).contiguous(),
        "w13": w13,
        "s13": w13_scale,
        "w2": w2,
        "s2": w2_scale,
        "alpha": alpha,
        "limit": math.inf if limit is None else limit,
        "experts_min": experts_min,
    }
    if desc.bias:
        arguments["b13"] = bias(w13_bias, 2 * desc.intermediate_size)
        arguments["b2"] = bias(w2_bias, desc.hidden_size)
    if desc.pack_dim == "output":
        assert w13_zero is not None
        assert w2_zero is not None
        arguments |= {"z13": w13_zero[0].contiguous(), "z2": w2_zero[0].contiguous()}
    first, second = _kernels(_variant(desc))
    arguments["a"] = call_kernel(first, arguments)
    return call_kernel(second, arguments)


def moe(
    desc: MoEDesc,
    hidden_states: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    *weights: Any,
    **scalars: Any,
) -> Tensor:
    """`mxk::moe` or `mxk::moe.lists` called eagerly; the torch reference for T or weights that the kernels do not take.

    Args:
        desc: the call's description, which `supports` accepts; the tensors as in ops/moe.py.
        scalars: alpha, limit, experts_min.
    """
    fewest, most = token_range(desc)
    num_tokens = hidden_states.shape[0]
    reason = misfit(desc, weights)
    if not fewest <= num_tokens <= most:
        reason = f"Gaudi kernels: {num_tokens} tokens; allowed: {fewest} to {most} with top_k {desc.top_k}"
    if reason is not None:
        say_reference_once("mxk::moe", reason)
        attributes: dict[str, Any] = {
            "weight_format": desc.weight_format,
            "row_order": desc.row_order,
            "activation": desc.activation,
            "pack_dim": desc.pack_dim,
            "per_route": desc.per_route,
        }
        return reference(hidden_states, topk_ids, topk_weights, *weights, **{**attributes, **scalars})
    packed, zeros, biases = map(_stacked, weights[:4]), weights[4:6], map(_stacked, weights[6:])
    return sequence(desc, hidden_states, topk_ids, topk_weights, *packed, *zeros, *biases, **scalars)


def _stacked(weight: Weights | None) -> Any:
    if weight is None or isinstance(weight, Tensor):
        return None if weight is None else weight.contiguous()
    return stack_of(weight).contiguous() if len(weight) else None


def smallest_arguments(kernel: Kernel, device: str) -> list[Any]:
    """Arguments of the smallest call that every build with this kernel accepts: one token, route and expert; zeros."""
    limits = [VARIANT_LIMITS[variant] for variant, names in VARIANT_KERNELS.items() if kernel.name in names]
    hidden = max(limit.hidden_multiple for limit in limits)
    intermediate = max(limit.intermediate_multiple for limit in limits)
    sizes = {"T": 1, "k": 1, "R": 1, "E": 1, "K": hidden, "I": intermediate, "N": 1, "C": CHUNK}
    sizes |= {"KP": padded(hidden), "IP": padded(intermediate)}
    tensors = [
        torch.zeros([d.size(sizes) for d in tensor.shape], dtype=DTYPES[tensor.dtype], device=device)
        for tensor in kernel.inputs
    ]
    return [*tensors, *(0 if scalar.kind == "int" else 1.0 for scalar in kernel.scalars)]
