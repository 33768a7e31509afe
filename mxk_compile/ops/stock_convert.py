"""`hpu::convert_from_uint4` and `hpu::convert_from_int4` in torch: grouped 4-bit codes to values.

Shape rules are those of the bridge (gaudi-pytorch-bridge of 2025, `hpu_ops/convert_from_int4.cpp`),
arithmetic that of its tests: packed zero points are subtracted as integers (without the wrap of unsigned
bytes), floating ones in the result's dtype; then comes one product with the scale. No zero point means 0 for
both ops: the device's node then has no such input.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import torch
from torch import Tensor

from mxk_compile.errors import CallError
from mxk_compile.ops.formats.nibbles import as_bytes, unpack_nibbles
from mxk_compile.ops.moe import is_integer


def check_convert(
    name: str,
    input: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    out_dtype: torch.dtype,
    group_index: Tensor | None = None,
    *,
    disable_fp8_clipping: bool = False,
) -> None:
    """Refuse, with CallError, what the bridge's own checks refuse (`hpu_ops/convert_from_int4.cpp`, 2025)."""
    if input.dtype != torch.int32 or not 1 <= input.dim() <= 4:
        refuse(name, f"input {describe(input)}", "int32 with 1 to 4 dimensions", "pack 8 codes into a word")
    shape = (*input.shape[:-1], input.shape[-1] * 8)
    parameters = {"scale": tuple(scale.shape)}
    if zero_point is not None:
        words = 8 if _is_packed(zero_point, input) else 1
        parameters["zero_point"] = (*zero_point.shape[:-1], zero_point.shape[-1] * words)
        if zero_point.dtype not in (torch.int32, scale.dtype):
            allowed = f"int32, {dtype_name(scale.dtype)}"
            refuse(name, f"zero_point {describe(zero_point)}", allowed, "use int32 or the scale's dtype")
    if group_index is not None:
        if disable_fp8_clipping or out_dtype != torch.bfloat16:
            given = f"group_index with out_dtype={dtype_name(out_dtype)}, {disable_fp8_clipping=}"
            refuse(name, given, "bfloat16, False", "leave group_index out")
        if len(shape) != 2 or group_index.shape != shape[:1] or not is_integer(group_index):
            allowed = f"integer [{shape[0]}], input with 2 dimensions"
            refuse(name, f"group_index {describe(group_index)}", allowed, "pass the group of each row")
    for argument, given_shape in parameters.items():
        groups = [(size, given) for size, given in zip(shape, given_shape, strict=False) if size != given]
        if len(given_shape) != len(shape) or len(groups) > 1 or any(n == 0 or size % n for size, n in groups):
            allowed = f"{list(shape)}, one dimension divided by the group size"
            refuse(name, f"{argument} {list(given_shape)}", allowed, "give one for each group of codes")


def _is_packed(zero_point: Tensor, input: Tensor) -> bool:
    """Whether the bridge takes it as packed: as many words in a row as the codes have."""
    return (
        zero_point.dtype == torch.int32 and zero_point.dim() > 0 and zero_point.shape[-1] == input.shape[-1]
    )


def convert_from_4bit(
    input: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    out_dtype: torch.dtype,
    group_index: Tensor | None = None,
    *,
    disable_fp8_clipping: bool = False,
    signed: bool,
) -> Tensor:
    """Compute (code - zero) * scale of packed codes; one rounding of the product, to `out_dtype`.

    Args:
        input: int32 [..., C/8], nibble i of word w = column 8w + i.
        scale: the result's shape, or one dimension divided by the group size ([R/g, C]).
        zero_point: packed like `input`, or one value a scale, int32 or the scale's dtype; None = 0.
        out_dtype: of the result [..., C]. Floating zero points are subtracted in it, packed ones as integers.
        group_index: [R], the row of scale and zero point that row r uses.
        disable_fp8_clipping: fp8 results overflow instead of saturating.
        signed: codes are two's complement, -8..7, instead of 0..15.
    """
    # The product of two numbers of 16 bits is rounded once in their dtype; anything else goes through fp32.
    dtype = out_dtype if scale.dtype == out_dtype and out_dtype.itemsize == 2 else torch.float32
    values = _codes(input, signed, dtype)
    if zero_point is not None:
        zeros = _codes(zero_point, signed, dtype) if _is_packed(zero_point, input) else zero_point.to(dtype)
        _in_place(Tensor.sub_, values, zeros, group_index)
    _in_place(Tensor.mul_, values, scale.to(dtype), group_index)
    if out_dtype.itemsize == 1 and not disable_fp8_clipping:
        limits = torch.finfo(out_dtype)
        values.clamp_(limits.min, limits.max)
    return values.to(out_dtype)


def _codes(words: Tensor, signed: bool, dtype: torch.dtype) -> Tensor:
    """Codes of int32 [..., W] as dtype [..., 8W], contiguous: 0..15, or -8..7 if `signed`."""
    byte = torch.arange(256, dtype=torch.uint8, device=words.device)
    codes = unpack_nibbles(byte[:, None]).view(torch.int8)
    codes = (codes ^ 8) - 8 if signed else codes
    # One look-up a byte, of both its values, passes over memory less often than shifts and masks do.
    pairs = codes.to(dtype).view(torch.int32 if dtype.itemsize == 2 else torch.int64).flatten()
    packed = as_bytes(words)
    return pairs.index_select(0, packed.flatten().to(torch.int32)).view(dtype).view(*packed.shape[:-1], -1)


def _in_place(
    operation: Callable[[Tensor, Tensor], Tensor],
    values: Tensor,
    parameter: Tensor,
    group_index: Tensor | None,
) -> None:
    """Apply to contiguous values a parameter that may be smaller in one dimension, by the group size."""
    if group_index is not None:
        parameter = parameter[group_index.to(torch.int64)]
    for dim, (size, groups) in enumerate(zip(values.shape, parameter.shape, strict=True)):
        if size != groups:
            values, parameter = values.unflatten(dim, (groups, -1)), parameter.unsqueeze(dim + 1)
            break
    operation(values, parameter)


def refuse(name: str, given: str, allowed: str, advice: str) -> NoReturn:
    """Raises the CallError of `hpu::name`."""
    raise CallError(f"hpu::{name}", given, allowed, advice)


def describe(tensor: Tensor) -> str:
    """Dtype and shape, for error texts."""
    return f"{dtype_name(tensor.dtype)} {list(tensor.shape)}"


def dtype_name(dtype: torch.dtype) -> str:
    """The name without "torch."."""
    return str(dtype).removeprefix("torch.")
