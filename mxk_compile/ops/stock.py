"""`hpu::mixture_of_experts` and `hpu::convert_from_{u}int4` where the Gaudi bridge is not installed.

The baseline of every parity and speed comparison, and what lets a model written for Gaudi run anywhere.
With the bridge (package `habana_frameworks`) on the path, or these ops defined by anybody else, this module
defines nothing. The converts are in ops/stock_convert.py.

Schemas are the published ones (gaudi-pytorch-bridge of 2026, `scripts/hpu_op.yaml`), except that of
`int4_fused_weights`, which is published nowhere: ours follows `mxfp4_fused_weights`, with what vllm-gaudi's
tests say about its operands. Match it by argument names.

Tensors (T tokens, K hidden, I intermediate, k routes a token; every list has one tensor a local expert):

    hidden_states         [T, K]  floating point
    expert_routing_table  [T, k]  any integer dtype
    router_weights        [T, k]  floating point

    overload            w12 (w1, w2: I for 2I)  its scale         w3                    its scale
    without 4 in name   [2I, K] or [K, 2I]      -                 [K, I] or [I, K]      -
    *mxfp4*             uint8 [2I, ceil(K/2)]   [2I, ceil(K/32)]  uint8 [K, ceil(I/2)]  [K, ceil(I/32)]
    int4_fused_weights  int32 [K, 2I/8]         [K/g, 2I]         int32 [I, K/8]        [I/g, K]

The second layout of plain weights is that of `permuted_weights=False`; MXFP4 exists permuted only, INT4 only
not permuted. Without bias the 2I rows are all gates, then all ups; with bias (w12_bias [2I], w3_bias [K]) they
alternate, gate first, and the activation is SwiGLU-OAI (alpha, limit). MXFP4 scales are E8M0 bytes, one for
32 values. INT4 weights are two's complement nibbles, nibble i of word w = column 8w + i, without zero point.
Result [T, K]: bf16 for mxfp4, else the dtype of hidden_states.

Numerics follow the device: the weights of each touched expert unpacked to bf16, GEMMs with bf16 result, every
step between them in bf16, the router weight after down projection and bias, the sum over experts in bf16.
Ids outside experts_min..experts_max (inclusive, compared in 64 bits) contribute nothing. Choices where the
published sources say nothing: duplicate ids of a token add, "gelu" is the erf form, an E8M0 byte of 255 is
NaN (OCP MX v1.0; the bridge's own test code makes it inf), T = 0 gives [0, K].
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from mxk_compile.ops.dequant import dequantize
from mxk_compile.ops.moe import activate, is_integer, register_no_backward
from mxk_compile.ops.stock_convert import (
    check_convert,
    convert_from_4bit,
    describe,
    dtype_name,
    refuse,
)

_ROUTED = "Tensor hidden_states, Tensor expert_routing_table, Tensor router_weights, "
_BF16_TAIL = (
    "bool permuted_weights, str activation, int experts_min, int experts_max, *, "
    "bool? recomp=True, int chunk_size=0, int total_experts=0"
)
_MXFP4_TAIL = (
    "*, int block_size, bool permuted_weights, str activation, int experts_min, int experts_max, "
    "bool is_fp4, int chunk_size=0, int total_experts=0"
)
_FUSED, _SCALES = "Tensor[] w12, Tensor[] w3, ", "Tensor[] d_scale_w12, Tensor[] d_scale_w3, "
_BIASES = "Tensor[] w12_bias, Tensor[] w3_bias, "
_OAI = "int chunk_size=0, int total_experts=0, float alpha=1.702, float limit=7.0"
_CONVERT = (
    "Tensor input, Tensor scale, Tensor? zero_point, ScalarType out_dtype, Tensor? group_index=None, *, "
    "bool disable_fp8_clipping=False"
)

SCHEMAS = {
    "mixture_of_experts": f"{_ROUTED}Tensor[] w1, Tensor[] w2, Tensor[] w3, {_BF16_TAIL}",
    "mixture_of_experts.fused_weights": _ROUTED + _FUSED + _BF16_TAIL,
    "mixture_of_experts.bias_fused_weights": (
        f"{_ROUTED}{_FUSED}{_BIASES}*, bool permuted_weights, int experts_min, int experts_max, {_OAI}"
    ),
    "mixture_of_experts.mxfp4": (
        f"{_ROUTED}Tensor[] w1, Tensor[] w2, Tensor[] w3, "
        f"Tensor[] d_scale_w1, Tensor[] d_scale_w2, Tensor[] d_scale_w3, {_MXFP4_TAIL}"
    ),
    "mixture_of_experts.mxfp4_fused_weights": _ROUTED + _FUSED + _SCALES + _MXFP4_TAIL,
    "mixture_of_experts.bias_mxfp4_fused_weights": (
        f"{_ROUTED}{_FUSED}{_BIASES}{_SCALES}*, int block_size, bool permuted_weights, int experts_min, "
        f"int experts_max, bool is_fp4, {_OAI}"
    ),
    "mixture_of_experts.int4_fused_weights": (
        f"{_ROUTED}{_FUSED}{_SCALES}*, bool permuted_weights, str activation, int experts_min, "
        "int experts_max, int chunk_size=0, int total_experts=0"
    ),
    "convert_from_uint4": _CONVERT,
    "convert_from_int4": _CONVERT,
}
"""Arguments of every op defined here, by name without `hpu::`; each returns one Tensor."""

_LISTS = {name for arguments in SCHEMAS.values() for name in re.findall(r"Tensor\[\] (\w+)", arguments)}

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "relu": functional.relu,
    "silu": functional.silu,
}


@dataclass(frozen=True)
class StockCall:
    """One call of an overload, its arguments by name; lists of the overload's absent arguments are empty."""

    name: str
    hidden_states: Tensor
    expert_routing_table: Tensor
    router_weights: Tensor
    w3: Sequence[Tensor]
    permuted_weights: bool
    experts_min: int
    experts_max: int
    w12: Sequence[Tensor] = ()
    w1: Sequence[Tensor] = ()
    w2: Sequence[Tensor] = ()
    w12_bias: Sequence[Tensor] = ()
    w3_bias: Sequence[Tensor] = ()
    d_scale_w12: Sequence[Tensor] = ()
    d_scale_w1: Sequence[Tensor] = ()
    d_scale_w2: Sequence[Tensor] = ()
    d_scale_w3: Sequence[Tensor] = ()
    activation: str = "silu"
    block_size: int = 32
    is_fp4: bool = True
    alpha: float = 1.702
    limit: float = 7.0
    # Hints of the device's scheduler, without effect on the result.
    recomp: bool | None = True
    chunk_size: int = 0
    total_experts: int = 0

    @property
    def has_bias(self) -> bool:
        """Whether this is a `bias_*` overload: interleaved rows, SwiGLU-OAI."""
        return "bias" in self.name

    @property
    def weight_format(self) -> str:
        """One of "mxfp4", "int4" and "plain"."""
        return next((name for name in ("mxfp4", "int4") if name in self.name), "plain")

    @property
    def dtype(self) -> torch.dtype:
        """Of the result, and of every step on the way to it."""
        return torch.bfloat16 if self.weight_format == "mxfp4" else self.hidden_states.dtype


def bind(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> StockCall:
    """Name and check the arguments of overload `name`, a key of `SCHEMAS`; raises CallError."""
    call = StockCall(name=name, **dict(zip(_POSITIONAL[name], args, strict=False)), **kwargs)
    _check_attributes(call)
    _check_routing(call)
    _check_lists(call)
    return call


def _positional(arguments: str) -> tuple[str, ...]:
    return tuple(part.split("=")[0].split()[-1] for part in arguments.split(", ") if part != "*")


_POSITIONAL = {name: _positional(arguments) for name, arguments in SCHEMAS.items()}


def _check_attributes(call: StockCall) -> None:
    name, permuted = call.name, call.weight_format == "mxfp4"
    if call.activation not in ACTIVATIONS:
        allowed = ", ".join(map(repr, ACTIVATIONS))
        refuse(name, f"activation={call.activation!r}", allowed, "use one of them")
    if call.block_size != 32:
        refuse(name, f"block_size={call.block_size}", "32", "MXFP4 has one scale for 32 values")
    if not call.is_fp4:
        refuse(name, "is_fp4=False", "True", "pass E2M1 codes")
    if call.weight_format != "plain" and call.permuted_weights != permuted:
        given = f"permuted_weights={call.permuted_weights}"
        refuse(name, given, f"{permuted}", "pass the weights in the layout of this overload")


def _check_routing(call: StockCall) -> None:
    hidden, ids, weights = call.hidden_states, call.expert_routing_table, call.router_weights
    if hidden.dim() != 2 or not hidden.is_floating_point():
        allowed = "floating point [T, K]"
        refuse(call.name, f"hidden_states {describe(hidden)}", allowed, "flatten the leading dimensions")
    if ids.dim() != 2 or not is_integer(ids) or ids.shape[0] != hidden.shape[0]:
        allowed = f"integer [{hidden.shape[0]}, k]"
        refuse(call.name, f"expert_routing_table {describe(ids)}", allowed, "pass the ids of top-k")
    if weights.shape != ids.shape or not weights.is_floating_point():
        allowed = f"floating point {list(ids.shape)}"
        refuse(call.name, f"router_weights {describe(weights)}", allowed, "pass one weight an expert id")


def _check_lists(call: StockCall) -> None:
    num_experts = call.experts_max - call.experts_min + 1
    lists = {name: getattr(call, name) for name in _POSITIONAL[call.name] if name in _LISTS}
    for name, tensors in lists.items():
        if len(tensors) != num_experts or num_experts < 1:
            allowed = f"{num_experts}, one for each id of {call.experts_min}..{call.experts_max}"
            advice = "pass the local experts only; both ends of the range are inclusive"
            refuse(call.name, f"{len(tensors)} tensors in {name}", allowed, advice)
    first, hidden_size = (call.w12 or call.w1)[0], call.hidden_states.shape[1]
    if first.dim() != 2:
        refuse(call.name, f"expert weight {describe(first)}", "two dimensions", "pass one matrix an expert")
    rows = first.shape[0] if call.permuted_weights else first.shape[1]
    rows = rows * 8 if call.weight_format == "int4" else rows
    intermediate_size = rows // 2 if call.w12 else rows
    for name, tensors in lists.items():
        inputs, outputs = (intermediate_size, hidden_size) if "w3" in name else (hidden_size, rows)
        shape, dtype = _expected(call, name, tensors[0], inputs, outputs)
        for expert, tensor in enumerate(tensors):
            if tensor.shape != shape or tensor.dtype != dtype:
                given, allowed = f"{name}[{expert}] {describe(tensor)}", f"{dtype_name(dtype)} {list(shape)}"
                refuse(call.name, given, allowed, "see the layouts in mxk_compile/ops/stock.py")


def _expected(
    call: StockCall, name: str, first: Tensor, inputs: int, outputs: int
) -> tuple[tuple[int, ...], torch.dtype]:
    """Shape and dtype of the tensors of list `name`; what is free follows the list's first tensor."""
    is_scale, floating = name.startswith("d_scale"), first.dtype if first.is_floating_point() else call.dtype
    if name.endswith("_bias"):
        return (outputs,), floating
    if call.weight_format == "mxfp4":
        return (outputs, (inputs + 31) // 32 if is_scale else (inputs + 1) // 2), torch.uint8
    if call.weight_format == "int4":
        if not is_scale:
            return (inputs, outputs // 8), torch.int32
        groups = first.shape[0] if first.dim() else 0
        return (groups if groups and inputs % groups == 0 else 1, outputs), floating
    return ((outputs, inputs) if call.permuted_weights else (inputs, outputs)), call.dtype


def _mixture_of_experts(name: str, *args: Any, **kwargs: Any) -> Tensor:
    call = bind(name, args, kwargs)
    # Autocast would put its own dtypes between the steps.
    with torch.autocast(call.hidden_states.device.type, enabled=False):
        return _experts(call)


def _experts(call: StockCall) -> Tensor:
    x, ids = call.hidden_states.to(call.dtype), call.expert_routing_table.to(torch.int64)
    num_experts = len(call.w3)
    local = (ids >= call.experts_min) & (ids <= call.experts_max)
    # One more column, dropped, takes the routes of other ranks.
    slots = torch.where(local, ids - call.experts_min, num_experts)
    shape = (x.shape[0], num_experts + 1)
    routed = torch.zeros(shape, dtype=torch.bool, device=x.device).scatter_(1, slots, True)[:, :-1]
    weights = x.new_zeros(shape).scatter_add_(1, slots, call.router_weights.to(call.dtype))
    tokens = routed.T.nonzero()[:, 1].split(routed.sum(0).tolist())
    result = x.new_zeros(x.shape)
    for expert, token in enumerate(tokens):
        if len(token):
            y = _expert(call, x[token], expert) * weights[token, expert, None]
            result.index_add_(0, token, y)
    return result


def _expert(call: StockCall, x: Tensor, expert: int) -> Tensor:
    """Tokens [n, K] through expert number `expert` of the lists, [n, K]; one torch op a step."""

    def project(x: Tensor, weights: str) -> Tensor:
        matrix = getattr(call, weights)[expert]
        if call.weight_format == "plain":
            return functional.linear(x, matrix) if call.permuted_weights else x @ matrix
        scale = getattr(call, f"d_scale_{weights}")[expert]
        if call.weight_format == "int4":
            return x @ convert_from_4bit(matrix, scale, None, torch.bfloat16, signed=True).to(x.dtype)
        unpacked = dequantize(matrix, scale, None, weight_format="mxfp4", pack_dim="input", dtype=x.dtype)
        return functional.linear(x, unpacked[:, : x.shape[1]])

    if call.has_bias:
        gate_up = project(x, "w12") + call.w12_bias[expert].to(x.dtype)
        gate, up = gate_up[:, 0::2], gate_up[:, 1::2]
        a = activate(gate, up, "swiglu_oai", call.alpha, call.limit)
        return project(a, "w3") + call.w3_bias[expert].to(x.dtype)
    gate, up = project(x, "w12").chunk(2, dim=1) if call.w12 else (project(x, "w1"), project(x, "w2"))
    return project(ACTIVATIONS[call.activation](gate) * up, "w3")


def _convert(name: str, *args: Any, **kwargs: Any) -> Tensor:
    check_convert(name, *args, **kwargs)
    return convert_from_4bit(*args, **kwargs, signed=name == "convert_from_int4")


def needs_stand_in() -> bool:
    """Whether `hpu::` is free: no bridge to import, and nobody else's definition of these ops."""
    if importlib.util.find_spec("habana_frameworks") is not None:
        return False
    return not any(hasattr(torch.ops.hpu, name.partition(".")[0]) for name in SCHEMAS)


def _define() -> torch.library.Library:
    # "FRAGMENT": another package may hold its own ops in this namespace.
    hpu = torch.library.Library("hpu", "FRAGMENT")
    for name, arguments in SCHEMAS.items():
        # The ids are read on the host, which no CUDA graph can record.
        hpu.define(f"{name}({arguments}) -> Tensor", tags=(torch.Tag.cudagraph_unsafe,))
    for name in SCHEMAS:
        implementation = partial(_convert if name.startswith("convert") else _mixture_of_experts, name)
        for key in ("CPU", "CUDA"):
            hpu.impl(name, implementation, key)
        packet, _, overload = name.partition(".")
        register_no_backward(getattr(getattr(torch.ops.hpu, packet), overload or "default"))
    return hpu


library: torch.library.Library | None = _define() if needs_stand_in() else None


def call_mxfp4(
    routing: Sequence[Tensor],
    w13: Sequence[Tensor],
    w13_scale: Sequence[Tensor],
    w2: Sequence[Tensor],
    w2_scale: Sequence[Tensor],
    biases: Sequence[Sequence[Tensor]] = (),
    *,
    experts_min: int = 0,
    **constants: float | None,
) -> Tensor:
    """The stock op on MXFP4 weights, whoever defines it: with both biases SwiGLU-OAI, without them silu.

    Args:
        routing: hidden_states, expert_routing_table, router_weights.
        w13, w13_scale, w2, w2_scale: one tensor an expert, as w12 and w3 above.
        biases: of w13 and w2, or none.
        experts_min: global id of the first expert.
        constants: with biases alpha and limit, where they are not gpt-oss's.
    """
    packet = torch.ops.hpu.mixture_of_experts
    op = packet.bias_mxfp4_fused_weights if biases else packet.mxfp4_fused_weights
    result: Tensor = op(
        *(*routing, w13, w2, *biases, w13_scale, w2_scale),
        **{"block_size": 32, "permuted_weights": True, "is_fp4": True},
        **{"experts_min": experts_min, "experts_max": experts_min + len(w2) - 1},
        **(constants if biases else {"activation": "silu"}),
    )
    return result
