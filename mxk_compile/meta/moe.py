"""Rules of `mxk::moe`: `check_moe` raises CallError or returns the sizes; the fakes of both overloads."""

from __future__ import annotations

import dataclasses
from typing import Any, NoReturn

import torch
from torch import Tensor

from mxk_compile.errors import CallError
from mxk_compile.ops import library
from mxk_compile.ops.formats import int4, mxfp4
from mxk_compile.ops.moe import Weights, is_integer
from mxk_compile.variants import ACTIVATIONS, PACK_DIMS, ROW_ORDERS, WEIGHT_FORMATS

_FLOAT_DTYPES = " or ".join(map(str, int4.FLOAT_DTYPES))
_VALUES_PER_ELEMENT = {torch.uint8: 2, torch.int32: 8}
MOST_EXPERTS_MIN = 1 << 62
"""From which the difference of any 64-bit id, wrapped to 64 bits, is in no range of experts unless the id is."""


@dataclasses.dataclass(frozen=True)
class MoESizes:
    """What `check_moe` found: E, K, I, k, group sizes of w13 (along K) and w2 (along I), any bias."""

    num_experts: int
    hidden_size: int
    intermediate_size: int
    top_k: int
    group_sizes: tuple[int, int]
    bias: bool


def check_moe(
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
) -> MoESizes:
    """Checks one call of `mxk::moe` or `mxk::moe.lists`; arguments as there (ops/moe.py).

    Raises:
        CallError: naming the argument, what it is, and what it may be.
    """
    _one_of("weight_format", weight_format, WEIGHT_FORMATS)
    _one_of("row_order", row_order, ROW_ORDERS)
    _one_of("activation", activation, ACTIVATIONS)
    _one_of("pack_dim", pack_dim, PACK_DIMS)
    named: dict[str, Any] = {
        "hidden_states": hidden_states,
        "topk_ids": topk_ids,
        "topk_weights": topk_weights,
    }
    named |= {"w13": w13, "w13_scale": w13_scale, "w2": w2, "w2_scale": w2_scale}
    for argument, value in named.items():
        if value is None:  # which the dispatcher lets pass
            _refuse(argument, "None", "a tensor")
    if hidden_states.dim() != 2 or not hidden_states.is_floating_point():
        _refuse("hidden_states", _text(hidden_states), "[T, K], floating point")
    if topk_ids.dim() != 2 or not is_integer(topk_ids):
        _refuse("topk_ids", _text(topk_ids), "[T, k], an integer dtype such as int64 or int32")
    if topk_weights.dim() != 2 or topk_weights.dtype not in (*int4.FLOAT_DTYPES, torch.float64):
        _refuse("topk_weights", _text(topk_weights), f"[T, k], {_FLOAT_DTYPES} or torch.float64")
    num_tokens, hidden_size = hidden_states.shape
    top_k = topk_ids.shape[1]
    if topk_ids.shape[0] != num_tokens:
        _refuse("topk_ids", _text(topk_ids), f"{num_tokens} rows, as hidden_states")
    if topk_weights.shape != topk_ids.shape:
        _refuse("topk_weights", _text(topk_weights), f"the shape of topk_ids, {list(topk_ids.shape)}")
    for name, routing in (("topk_ids", topk_ids), ("topk_weights", topk_weights)):
        if routing.device != hidden_states.device:
            _refuse(name, f"on {routing.device}", f"{hidden_states.device}, as hidden_states")
    if limit is not None and not limit >= 0:
        _refuse("limit", str(limit), "a number >= 0, or None for no clamp")
    if not 0 <= experts_min <= MOST_EXPERTS_MIN:
        _refuse("experts_min", str(experts_min), "a global id, 0 to 2**62")

    for argument, weight in (("w13", w13), ("w2", w2)):
        if isinstance(weight, Tensor) and weight.dim() != 3:
            _refuse(argument, _text(weight), "experts stacked in the first of three dimensions")
    num_experts = len(w2)
    separate = row_order == "separate"
    if separate and isinstance(w13, Tensor):
        _refuse("row_order", "'separate' with stacked weights", "'separate' only in mxk::moe.lists")
    if num_experts == 0 or len(w13) != num_experts * (2 if separate else 1):
        _refuse("w13", f"{len(w13)} experts for {num_experts} in w2", "E in both (2E in w13 if 'separate')")
    if pack_dim == "output" and weight_format == "mxfp4":
        _refuse("pack_dim", "'output' with mxfp4", "'input' for mxfp4")

    device = hidden_states.device
    w13_rows = _packed("w13", w13, hidden_size, weight_format, pack_dim, device)
    if not separate and w13_rows % 2:
        _refuse("w13", f"{w13_rows} rows", "an even number, gate and up")
    intermediate_size = w13_rows if separate else w13_rows // 2
    w2_rows = _packed("w2", w2, intermediate_size, weight_format, pack_dim, device)
    if w2_rows != hidden_size:
        _refuse("w2", f"{w2_rows} output rows", f"K = {hidden_size}, as hidden_states")

    groups, biases = [], []
    for name, weight, scale, zero, bias, rows, columns in (
        ("w13", w13, w13_scale, w13_zero, w13_bias, w13_rows, hidden_size),
        ("w2", w2, w2_scale, w2_zero, w2_bias, w2_rows, intermediate_size),
    ):
        shape, group_size = _scales(name, len(weight), scale, rows, columns, weight_format, pack_dim, device)
        groups.append(group_size)
        if zero is not None and len(zero):
            _zeros(name, len(weight), zero, shape, weight_format, pack_dim, device)
        biases.append(bias is not None and len(bias) > 0)
        if bias is not None and len(bias):
            given, dtype = _uniform(f"{name}_bias", bias, len(weight), device)
            if tuple(given) != (rows,) or dtype not in int4.FLOAT_DTYPES:
                _refuse(f"{name}_bias", f"{list(given)} {dtype} an expert", f"[{rows}], {_FLOAT_DTYPES}")
    return MoESizes(num_experts, hidden_size, intermediate_size, top_k, (groups[0], groups[1]), any(biases))


def check_weight(
    weight: Tensor, scale: Tensor, zero: Tensor | None, weight_format: str, pack_dim: str
) -> tuple[int, int, int]:
    """Checks one stacked weight with its scale and zero points; returns E, N, K. Raises CallError as check_moe does."""
    _one_of("weight_format", weight_format, WEIGHT_FORMATS)
    _one_of("pack_dim", pack_dim, PACK_DIMS)
    if pack_dim == "output" and weight_format == "mxfp4":
        _refuse("pack_dim", "'output' with mxfp4", "'input' for mxfp4")
    if weight.dim() != 3 or not len(weight):
        _refuse("weight", _text(weight), "experts stacked in the first of three dimensions")
    factor = _VALUES_PER_ELEMENT.get(weight.dtype, 0)
    columns = int(weight.shape[1]) if pack_dim == "output" else int(weight.shape[2]) * factor
    form = weight_format, pack_dim, weight.device
    rows = _packed("weight", weight, columns, *form)
    shape, _ = _scales("weight", len(weight), scale, rows, columns, *form)
    if zero is not None:
        _zeros("weight", len(weight), zero, shape, *form)
    return len(weight), rows, columns


def _refuse(argument: str, given: str, allowed: str) -> NoReturn:
    raise CallError("mxk::moe", f"{argument} is {given}", allowed, "correct the call, or keep the stock op")


def _one_of(argument: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        _refuse(argument, repr(value), ", ".join(allowed))


def _text(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {tensor.dtype}"


def _uniform(name: str, values: Weights, count: int, device: torch.device) -> tuple[Any, torch.dtype]:
    """Shape and dtype of one expert's tensor; all experts must agree, and be where hidden_states is."""
    if isinstance(values, Tensor) and values.dim() == 0:
        _refuse(name, f"a scalar {values.dtype}", f"{count} experts, as the packed weight")
    if len(values) != count:
        _refuse(name, f"{len(values)} experts", f"{count}, as the packed weight")
    if isinstance(values, Tensor):
        if values.device != device:
            _refuse(name, f"on {values.device}", f"{device}, as hidden_states")
        return values.shape[1:], values.dtype
    shape, dtype = values[0].shape, values[0].dtype
    for index, value in enumerate(values):
        if value.shape != shape or value.dtype != dtype:
            _refuse(f"{name}[{index}]", _text(value), f"{list(shape)} {dtype}, as {name}[0]")
        if value.device != device:
            _refuse(f"{name}[{index}]", f"on {value.device}", f"{device}, as hidden_states")
    return shape, dtype


def _packed(
    name: str, values: Weights, columns: int, weight_format: str, pack_dim: str, device: torch.device
) -> int:
    """Number of output rows of a packed weight whose input dimension must be `columns`."""
    shape, dtype = _uniform(name, values, len(values), device)
    factor = _VALUES_PER_ELEMENT.get(dtype)
    dtypes = (
        ("uint8",) if weight_format == "mxfp4" else ("int32",) if pack_dim == "output" else ("uint8", "int32")
    )
    if len(shape) != 2 or factor is None or str(dtype).removeprefix("torch.") not in dtypes:
        _refuse(name, f"{list(shape)} {dtype} an expert", f"a matrix of {' or '.join(dtypes)}")
    transposed = pack_dim == "output"
    given = int(shape[0]) if transposed else int(shape[1]) * factor
    if given != columns:
        _refuse(name, f"{list(shape)} {dtype} an expert, {given} input values", f"{columns} input values")
    return int(shape[1]) * factor if transposed else int(shape[0])


def _scales(
    name: str,
    count: int,
    scale: Weights,
    rows: int,
    columns: int,
    weight_format: str,
    pack_dim: str,
    device: torch.device,
) -> tuple[tuple[int, ...], int]:
    """Shape of one expert's scale, and the group size along the input dimension that it says."""
    shape, dtype = _uniform(f"{name}_scale", scale, count, device)
    groups, outputs = (shape if pack_dim == "output" else reversed(shape)) if len(shape) == 2 else (0, 0)
    if weight_format == "mxfp4":
        group_size, dtypes = mxfp4.BLOCK, "torch.uint8"
        fits = groups == -(-columns // mxfp4.BLOCK) and dtype == torch.uint8
    else:
        dtypes, fits = _FLOAT_DTYPES, dtype in int4.FLOAT_DTYPES
        group_size = int4.group_size(columns, int(groups)) if groups else 0
    if not fits or outputs != rows or not groups:
        allowed = f"one a group of {group_size or 'int4.GROUP_SIZES'} for {rows} outputs of {columns} inputs, {dtypes}"
        _refuse(f"{name}_scale", f"{list(shape)} {dtype} an expert", allowed)
    return tuple(shape), group_size


def _zeros(
    name: str,
    count: int,
    zero: Weights,
    scale_shape: tuple[int, ...],
    weight_format: str,
    pack_dim: str,
    device: torch.device,
) -> None:
    if weight_format != "uint4":
        _refuse(f"{name}_zero", f"given with {weight_format}", "zero points only with uint4")
    shape, dtype = _uniform(f"{name}_zero", zero, count, device)
    allowed = {torch.uint8: scale_shape}
    if pack_dim == "output":
        allowed[torch.int32] = (*scale_shape[:-1], scale_shape[-1] // 8)
    if tuple(shape) != allowed.get(dtype):
        texts = " or ".join(f"{list(shape)} {dtype}" for dtype, shape in allowed.items())
        _refuse(f"{name}_zero", f"{list(shape)} {dtype} an expert", texts)


def _fake_moe(
    hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor, *args: Any, **kwargs: Any
) -> Tensor:
    num_tokens, hidden_size = hidden_states.shape
    # Ahead of check_moe, which cannot branch on sizes that are known only at run time.
    for routing in (topk_ids, topk_weights):
        torch._check(routing.shape[0] == num_tokens, lambda: "mxk::moe: one row of routes for each token")
    check_moe(hidden_states, topk_ids, topk_weights, *args, **kwargs)
    if kwargs.get("per_route", False):
        return hidden_states.new_empty((num_tokens, topk_ids.shape[1], hidden_size))
    return hidden_states.new_empty((num_tokens, hidden_size))


library.impl("moe", _fake_moe, "Meta")
library.impl("moe.lists", _fake_moe, "Meta")
