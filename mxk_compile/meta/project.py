"""Rules of `mxk::project`: `check_project` raises CallError or returns the sizes; the fakes of its overloads."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor

from mxk_compile.errors import CallError
from mxk_compile.meta.moe import MOST_EXPERTS_MIN, check_weight
from mxk_compile.ops import library
from mxk_compile.ops.moe import is_integer
from mxk_compile.ops.project import GROUP_ROWS, NUM_ROUTING, OVERLOADS, ROUTING


@dataclasses.dataclass(frozen=True)
class ProjectSizes:
    """What `check_project` found: E, N, K, rows of out, rows of x."""

    num_experts: int
    outputs: int
    inputs: int
    num_rows: int
    num_input_rows: int


def check_project(overload: str, out: Tensor, x: Tensor, *args: Any, **attributes: Any) -> ProjectSizes:
    """Checks one call of `mxk::project`; arguments as there (ops/project.py).

    Raises:
        CallError: naming the argument, what it is, and what it may be.
    """
    refuse = _Refuse(overload)
    count = NUM_ROUTING[overload]
    routing, (weight, scale, *rest) = args[:count], args[count:]
    try:
        num_experts, outputs, inputs = check_weight(
            weight,
            scale,
            rest[0] if rest else None,
            attributes["weight_format"],
            attributes.get("pack_dim", "input"),
        )
    except CallError as error:
        raise CallError(refuse.what, error.given, error.allowed, error.advice) from None
    if x.dim() not in ((2, 3) if overload == "masked" else (2,)) or not x.is_floating_point():
        refuse("x", x, "rows of K values, floating point" + (", flat or [E, max_m, K]" * (x.dim() > 2)))
    if x.shape[-1] != inputs:
        refuse("x", x, f"K = {inputs}, as the weight")
    if out.dim() != 2 or out.shape[1] != outputs or out.dtype != x.dtype:
        refuse("out", out, f"[rows, {outputs}] {x.dtype}, as the weight's outputs and x")
    if any(stride == 0 and size > 1 for stride, size in zip(out.stride(), out.shape, strict=True)):
        refuse("out", f"expanded, strides {list(out.stride())}", "memory of its own for each row")
    named = (("x", x), ("weight", weight), *zip(ROUTING[overload], routing, strict=True))
    for name, tensor in named:
        if tensor.device != out.device:
            refuse(name, tensor, f"on {out.device}, as out")
    num_rows, num_input_rows = out.shape[0], x.shape[:-1].numel()
    top_k = attributes.get("top_k", 1)
    if top_k < 1 or num_rows != num_input_rows * top_k:
        refuse("out", out, f"top_k = {top_k} rows for each of the {num_input_rows} of x")
    _ROUTING_RULES[overload](refuse, routing, num_experts, num_rows, x, attributes)
    return ProjectSizes(num_experts, outputs, inputs, num_rows, num_input_rows)


class _Refuse:
    """Raises the CallError of one overload."""

    def __init__(self, overload: str) -> None:
        self.what = f"mxk::project.{overload}"

    def __call__(self, argument: str, given: Any, allowed: str) -> NoReturn:
        if isinstance(given, Tensor):
            given = f"{list(given.shape)} {given.dtype} on {given.device}"
        raise CallError(self.what, f"{argument} is {given}", allowed, "correct the call")


def _check_routes(
    refuse: _Refuse, routing: Any, num_experts: int, num_rows: int, x: Tensor, attributes: dict[str, Any]
) -> None:
    (topk_ids,) = routing
    if topk_ids.dim() != 2 or not is_integer(topk_ids) or topk_ids.numel() != num_rows:
        refuse("topk_ids", topk_ids, f"[T, k], an integer dtype, {num_rows} ids: one a row of out")
    if attributes["top_k"] not in (1, topk_ids.shape[1]):
        refuse(
            "top_k", attributes["top_k"], f"{topk_ids.shape[1]} for one row of x a token, 1 for one a route"
        )
    if not 0 <= attributes.get("experts_min", 0) <= MOST_EXPERTS_MIN:
        refuse("experts_min", attributes["experts_min"], "a global id, 0 to 2**62")


def _check_sorted(
    refuse: _Refuse, routing: Any, num_experts: int, num_rows: int, x: Tensor, attributes: dict[str, Any]
) -> None:
    names = ROUTING["sorted"]
    for name, tensor in zip(names, routing, strict=True):
        if tensor.dtype != torch.int32 or tensor.dim() > 1 or not (tensor.dim() or name == names[2]):
            refuse(name, tensor, "a list of int32")
    sorted_token_ids, expert_ids, num_tokens = routing
    if num_tokens.numel() != 1:
        refuse(names[2], num_tokens, "one int32")
    block_size = attributes["block_size"]
    if block_size < 1:
        refuse("block_size", block_size, "a number of at least 1")
    if len(expert_ids) < len(sorted_token_ids) // block_size:
        allowed = f"one for each block of {block_size} in sorted_token_ids ({len(sorted_token_ids)})"
        refuse("expert_ids", expert_ids, allowed)


def _check_contiguous(
    refuse: _Refuse, routing: Any, num_experts: int, num_rows: int, x: Tensor, attributes: dict[str, Any]
) -> None:
    (m_indices,) = routing
    if m_indices.dtype != torch.int32 or tuple(m_indices.shape) != (num_rows,):
        refuse("m_indices", m_indices, f"[{num_rows}] int32, one a row of x")
    if num_rows % GROUP_ROWS:
        refuse("x", x, f"a multiple of {GROUP_ROWS} rows")


def _check_masked(
    refuse: _Refuse, routing: Any, num_experts: int, num_rows: int, x: Tensor, attributes: dict[str, Any]
) -> None:
    (masked_m,) = routing
    if masked_m.dtype != torch.int32 or tuple(masked_m.shape) != (num_experts,):
        refuse("masked_m", masked_m, f"[{num_experts}] int32, one an expert")
    if num_rows % num_experts or (x.dim() == 3 and x.shape[0] != num_experts):
        refuse("x", x, f"the same number of rows for each of {num_experts} experts")
    expected_m = attributes["expected_m"]
    if type(expected_m) is not int or expected_m < 1:
        refuse("expected_m", repr(expected_m), "a positive int")


_ROUTING_RULES = {
    "routes": _check_routes,
    "sorted": _check_sorted,
    "contiguous": _check_contiguous,
    "masked": _check_masked,
}


def _fake(overload: str, out: Tensor, x: Tensor, *args: Any, **attributes: Any) -> None:
    check_project(overload, out, x, *args, **attributes)


for _overload in OVERLOADS:
    library.impl(f"project.{_overload}", partial(_fake, _overload), "Meta")
