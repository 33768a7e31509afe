"""Single projections of routed 4-bit experts, for servers that do the rest of the layer themselves: `mxk::project`.

    weight = prepare(codes, scale, packed=False)            # the layout of the checkpoint, whatever will be run with it
    gate_up = routes(x, weight, topk_ids, top_k=8)          # [T * 8, N], row lists made on the device
    gate_up = indexed(x, weight, sorted_token_ids, expert_ids, num_tokens_post_padded, top_k=8, block_size=16)
    y = contiguous(x, weight, m_indices)                    # rows of one expert after another, in groups of 128
    y = masked(x, weight, masked_m, expected_m=32)          # [E, max_m, K], a count of rows an expert

Layouts are those of ops/project.py; the whole layer in one call is `torch.ops.mxk.moe`. Rows that nothing is routed to
are not written: in a result that these functions allocate they hold anything.

`validate_routing=True` reads the routing back, which waits for the device, and raises CallError where it breaks its
rules; without it nothing is read, so that a CUDA graph can record the call.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mxk_compile.errors import CallError
from mxk_compile.meta.moe import MOST_EXPERTS_MIN, check_weight
from mxk_compile.meta.project import check_project
from mxk_compile.meta.routing import check_contiguous, check_masked, check_routes, check_sorted
from mxk_compile.ops.formats import int4
from mxk_compile.ops.moe import is_integer
from mxk_compile.ops.project import ROUTING

MODES = ("indexed", "contiguous", "masked")
_MOST = 2**63 - 1  # of an op's number


@dataclasses.dataclass(frozen=True, eq=False)
class PreparedWeight:
    """A stacked weight with its scale, checked once.

    Attributes:
        weight, scale, zero: as w13, w13_scale and w13_zero of `mxk::moe`; the given tensors, or packed from codes.
        weight_format, pack_dim: as there.
        mode: the only one of MODES that it may be used in, or None: the layout serves all of them.
        num_experts, outputs, inputs: E, N, K.
    """

    weight: Tensor
    scale: Tensor
    zero: Tensor | None
    weight_format: str
    pack_dim: str
    mode: str | None
    num_experts: int
    outputs: int
    inputs: int


def prepare(
    weight: Tensor,
    scale: Tensor,
    zero: Tensor | None = None,
    *,
    mode: str | None = None,
    packed: bool = True,
    weight_format: str = "uint4",
    pack_dim: str = "input",
) -> PreparedWeight:
    """A weight for the functions of this module; nothing is copied unless `packed` is False.

    Args:
        weight: E experts with N outputs and K inputs, packed as `mxk::moe` takes them, or codes 0..15 [E, N, K] of any
            integer dtype with packed=False.
        scale, zero: as in `mxk::moe`.
        mode: one of MODES if the weight is to be used in that one only, which is then checked in each call.
        packed: whether `weight` is packed; codes are packed in the way of `pack_dim`.
        weight_format, pack_dim: as in `mxk::moe`.

    Raises:
        CallError: naming the argument, what it is, and what it may be.
    """
    what = "projections.prepare"
    if mode is not None and mode not in MODES:
        raise CallError(what, f"mode is {mode!r}", ", ".join(MODES), "leave it out to use the weight in all")
    _check_tensors(what, weight=weight, scale=scale, **({} if zero is None else {"zero": zero}))
    if not packed:
        if not is_integer(weight) or weight.is_meta or weight.numel() == 0:
            given = f"weight is {list(weight.shape)} {weight.dtype} on {weight.device}"
            raise CallError(what, given, "codes 0..15 [E, N, K] of an integer dtype", "quantise it first")
        if weight.dtype in (torch.uint16, torch.uint32, torch.uint64):
            weight = weight.to(torch.int64)  # of the wide unsigned dtypes torch has little more than storage
        lowest, highest = (int(code) for code in weight.aminmax())
        if lowest < 0 or highest > int4.MAX_CODE:
            raise CallError(what, f"codes {lowest} to {highest}", "codes 0 to 15", "add 8 to signed codes")
        weight = int4.pack(weight, pack_dim)
    try:
        sizes = check_weight(weight, scale, zero, weight_format, pack_dim)
    except CallError as error:
        raise CallError(what, error.given, error.allowed, error.advice) from None
    return PreparedWeight(weight, scale, zero, weight_format, pack_dim, mode, *sizes)


def routes(
    x: Tensor,
    weight: PreparedWeight,
    topk_ids: Tensor,
    *,
    top_k: int,
    experts_min: int = 0,
    out: Tensor | None = None,
    validate_routing: bool = False,
) -> Tensor:
    """Projects route by route: row t * k + j of the result is expert topk_ids[t, j] on row (t * k + j) // top_k of x.

    Args:
        x: [T * k / top_k, K], bf16 for the kernels.
        weight: of mode None or "indexed".
        topk_ids: [T, k], global expert ids; those outside experts_min + [0, E) are of other ranks, and not written.
        top_k: k where x has a row a token (gate and up), 1 where it has one a route (down).
        experts_min: global id of the first expert of `weight`.
        out: [T * k, N] to write to; a new tensor by default.
        validate_routing: see the module; ids below -1 are refused.

    Raises:
        CallError: arguments that contradict each other.
    """
    _check_arguments("routes", "indexed", x, weight, (topk_ids,), top_k=top_k, experts_min=experts_min)
    validate = (lambda: check_routes(topk_ids)) if validate_routing else None
    numbers = {"top_k": top_k, "experts_min": experts_min}
    return _run("routes", x, weight, out, topk_ids.numel(), (topk_ids,), validate, **numbers)


def indexed(
    x: Tensor,
    weight: PreparedWeight,
    sorted_token_ids: Tensor,
    expert_ids: Tensor,
    num_tokens_post_padded: Tensor,
    *,
    top_k: int,
    block_size: int,
    out: Tensor | None = None,
    validate_routing: bool = False,
) -> Tensor:
    """Projects routes that were sorted into blocks of one expert each, as vLLM's `moe_align_block_size` makes them.

    Args:
        x: [R / top_k, K], bf16 for the kernels.
        weight: of mode None or "indexed".
        sorted_token_ids: int32, routes in blocks of block_size; numbers from R on are padding. May be over-allocated.
        expert_ids: int32, the expert of each block; -1: of another rank, its routes are not written.
        num_tokens_post_padded: one int32, the entries of sorted_token_ids that count.
        top_k: routes that read one row of x: k for gate and up, 1 for down.
        block_size: entries of a block.
        out: [R, N] to write to; a new tensor by default.
        validate_routing: see the module.

    Raises:
        CallError: arguments that contradict each other.
    """
    routing = (sorted_token_ids, expert_ids, num_tokens_post_padded)
    _check_arguments("sorted", "indexed", x, weight, routing, top_k=top_k, block_size=block_size)
    num_routes = x.shape[0] * top_k

    def validate() -> None:
        check_sorted(*routing, num_routes, block_size, weight.num_experts, top_k)

    numbers = {"top_k": top_k, "block_size": block_size}
    return _run(
        "sorted", x, weight, out, num_routes, routing, validate if validate_routing else None, **numbers
    )


def contiguous(
    x: Tensor,
    weight: PreparedWeight,
    m_indices: Tensor,
    *,
    out: Tensor | None = None,
    validate_routing: bool = False,
) -> Tensor:
    """Projects rows that lie expert after expert, each expert's padded to a multiple of 128.

    Args:
        x: [R, K], R a multiple of 128, bf16 for the kernels.
        weight: of mode None or "contiguous".
        m_indices: int32 [R], the row's expert, -1 for padding.
        out: [R, N] to write to; a new tensor by default.
        validate_routing: see the module.

    Raises:
        CallError: arguments that contradict each other.
    """
    _check_arguments("contiguous", "contiguous", x, weight, (m_indices,))
    validate = (lambda: check_contiguous(m_indices, weight.num_experts)) if validate_routing else None
    return _run("contiguous", x, weight, out, x.shape[0], (m_indices,), validate)


def masked(
    x: Tensor,
    weight: PreparedWeight,
    masked_m: Tensor,
    expected_m: int,
    *,
    out: Tensor | None = None,
    validate_routing: bool = False,
) -> Tensor:
    """Projects the first masked_m[e] of each expert's max_m rows.

    Args:
        x: [E, max_m, K] or [E * max_m, K], bf16 for the kernels.
        weight: of mode None or "masked".
        masked_m: int32 [E].
        expected_m: rows of an expert that the schedule is chosen for, a positive int; results differ by rounding only.
        out: [E * max_m, N] to write to; a new tensor, flat, by default.
        validate_routing: see the module.

    Raises:
        CallError: arguments that contradict each other.
    """
    if type(expected_m) is not int or not 1 <= expected_m <= _MOST:
        what, given = "mxk::project.masked", f"expected_m is {expected_m!r}"
        raise CallError(what, given, "a positive int", "estimate it on the host")
    _check_arguments("masked", "masked", x, weight, (masked_m,))
    num_rows = x.shape[:-1].numel()
    validate = (lambda: check_masked(masked_m, num_rows // weight.num_experts)) if validate_routing else None
    return _run("masked", x, weight, out, num_rows, (masked_m,), validate, expected_m=expected_m)


def align(
    topk_ids: Tensor, num_experts: int, block_size: int, experts_min: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Routes sorted into blocks of one expert each, for `indexed`, on the device of topk_ids and without reading them.

    Args:
        topk_ids: [T, k], global expert ids; others than experts_min + [0, num_experts) get no block.
        num_experts: E.
        block_size: routes of a block.
        experts_min: global id of the first local expert.

    Returns:
        sorted_token_ids (padded with T * k), expert_ids, num_tokens_post_padded [1]: int32, as large as the worst
        routing needs. Routes of a block are in ascending order.

    Raises:
        CallError: ids of no integer dtype, numbers out of range, lists that int32 cannot count.
    """
    what = "projections.align"
    _check_tensors(what, topk_ids=topk_ids)
    if not is_integer(topk_ids):
        raise CallError(what, f"topk_ids is {topk_ids.dtype}", "an integer dtype", "convert the ids")
    _check_number(what, "num_experts", num_experts, 1)
    _check_number(what, "block_size", block_size, 1)
    _check_number(what, "experts_min", experts_min, 0, MOST_EXPERTS_MIN)
    num_routes, device = topk_ids.numel(), topk_ids.device
    most = num_routes + min(num_experts, num_routes) * (block_size - 1)
    most_blocks = -(-most // block_size)
    if most_blocks * block_size >= 1 << 31:
        given = f"{num_routes} routes, block_size {block_size}"
        raise CallError(what, given, "less than 2**31 entries with padding", "choose smaller blocks")
    expert = topk_ids.flatten().to(torch.int64) - experts_min
    expert = torch.where((expert >= 0) & (expert < num_experts), expert, num_experts)
    counts = expert.new_zeros(num_experts + 1).scatter_add_(0, expert, torch.ones_like(expert))
    blocks = (counts[:num_experts] + block_size - 1) // block_size
    ends = blocks.cumsum(0)
    order = expert.argsort(stable=True)
    of_order = expert[order]
    rank = torch.arange(num_routes, device=device) - (counts.cumsum(0) - counts)[of_order]
    start = (ends - blocks)[of_order.clamp(max=num_experts - 1)] * block_size
    place = torch.where(of_order < num_experts, start + rank, most_blocks * block_size)
    padded = expert.new_full((most_blocks * block_size + 1,), num_routes)
    padded.scatter_(0, place, order)
    expert_ids = torch.searchsorted(ends, torch.arange(most_blocks, device=device), right=True)
    return padded[:-1].int(), expert_ids.int(), (ends[-1:] * block_size).int()


def _run(
    overload: str,
    x: Tensor,
    weight: PreparedWeight,
    out: Tensor | None,
    num_rows: int,
    routing: tuple[Tensor, ...],
    validate: Callable[[], None] | None,
    **attributes: Any,
) -> Tensor:
    if out is None:
        out = x.new_empty((max(num_rows, 0), weight.outputs))
    else:
        _check_tensors(f"mxk::project.{overload}", out=out)
    op: torch._ops.OpOverload = getattr(torch.ops.mxk.project, overload)
    tensors = (*routing, weight.weight, weight.scale, weight.zero)
    attributes |= {"weight_format": weight.weight_format, "pack_dim": weight.pack_dim}
    if validate is not None:
        check_project(
            overload, out, x, *tensors, **attributes
        )  # the contents are read with these shapes and dtypes
        validate()
    op(out, x, *tensors, **attributes)
    return out


def _check_arguments(
    overload: str, mode: str, x: Tensor, weight: PreparedWeight, routing: tuple[Tensor, ...], **numbers: int
) -> None:
    """What must hold before shapes can be looked at."""
    what = f"mxk::project.{overload}"
    if not isinstance(weight, PreparedWeight):
        raise CallError(
            what, f"weight is {type(weight).__name__}", "PreparedWeight", "call projections.prepare"
        )
    if weight.mode not in (None, mode):
        given = f"a weight that was prepared for {weight.mode!r}"
        raise CallError(f"projections.{mode}", given, f"mode None or {mode!r}", "prepare it without a mode")
    _check_tensors(what, x=x, **dict(zip(ROUTING[overload], routing, strict=True)))
    if x.dim() == 0:
        raise CallError(what, "x is a scalar", f"rows of {weight.inputs} values", "correct the call")
    for name, number in numbers.items():
        _check_number(what, name, number, 0)


def _check_tensors(what: str, **tensors: Any) -> None:
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise CallError(what, f"{name} is {type(tensor).__name__}", "a tensor", "correct the call")
        if tensor.layout != torch.strided or tensor.is_quantized:
            given = f"{name} is {tensor.layout} {tensor.dtype}"
            raise CallError(what, given, "a dense tensor, not quantized by torch", "convert it")


def _check_number(what: str, name: str, number: Any, least: int, most: int = _MOST) -> None:
    known = isinstance(number, (int, torch.SymInt)) and not isinstance(number, bool)
    if not known or not least <= number <= most:
        raise CallError(what, f"{name} is {number!r}", f"an int from {least} to {most}", "correct the call")
