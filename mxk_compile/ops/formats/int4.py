"""Group-scaled INT4: value = (code - zero) * scale, one scale for 32, 64 or 128 elements or for a whole row.

Two code sets, by `weight_format`:
    "uint4"  codes 0..15; the zero is 8, or one zero point 0..15 for each group (asymmetric)
    "int4"   two's complement nibbles -8..7, the zero is 0; `rebias` turns symmetric codes into the other set
Two packings of a weight with N outputs and K inputs, by `pack_dim`:
    "input"   packed uint8 [..., N, K / 2] or int32 [..., N, K / 8]; scale [..., N, K / g]
    "output"  packed int32 [..., K, N / 8] or uint8 [..., K, N / 2]; scale [..., K / g, N]
Zero points are uint8 of the scale's shape; for "output" also packed like the weight, [..., K / g, N / 8].
Nibbles are in element order, low nibble first, in both packings.
"""

from __future__ import annotations

import torch

from mxk_compile.errors import CallError
from mxk_compile.ops.formats.nibbles import as_words, pack_nibbles, unpack_nibbles
from mxk_compile.variants import INT4_FORMATS, PACK_DIMS

GROUP_SIZES = (32, 64, 128)  # and one group for the whole row
SYMMETRIC_ZERO = 8  # the code that means 0 in "uint4" without zero points
MAX_CODE = 15
FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)  # of scales, and of biases beside them
_REBIAS = {torch.uint8: 0x88, torch.int32: 0x88888888 - (1 << 32)}  # bit 3 of every nibble


def group_size(num_columns: int, num_groups: int) -> int:
    """Elements of a row that share a scale, from the row's length K and the number of its scales.

    Raises CallError unless that is 32, 64, 128 or the whole row.
    """
    size = num_columns // num_groups if num_groups > 0 else 0
    if size * num_groups != num_columns or (num_groups > 1 and size not in GROUP_SIZES):
        given = f"{num_groups} scales for {num_columns} columns"
        allowed = "groups of 32, 64, 128 or one group a row"
        raise CallError("int4 group size", given, allowed, "check that the scale belongs to this weight")
    return size


def rebias(packed: torch.Tensor) -> torch.Tensor:
    """Symmetric "uint4" codes to "int4" or back: nibble ^ 8, uint8 or int32, any shape; its own inverse."""
    if packed.dtype not in _REBIAS:
        raise CallError("int4.rebias", f"{packed.dtype}", "uint8 or int32", "view the bytes as torch.uint8")
    return packed ^ _REBIAS[packed.dtype]


def pack(codes: torch.Tensor, pack_dim: str = "input") -> torch.Tensor:
    """Codes [..., N, K], any integer dtype, to uint8 [..., N, K / 2] or, for "output", int32 [..., K, N / 8].

    Raises CallError when the packed dimension is no multiple of 2 or 8.
    """
    if _check_pack_dim("int4.pack", pack_dim) == "input":
        return pack_nibbles(codes)
    return as_words(pack_nibbles(codes.transpose(-1, -2)))


def unpack_codes(packed: torch.Tensor, pack_dim: str = "input") -> torch.Tensor:
    """Packed weight to codes 0..15, uint8 [..., N, K] (a transposed view for "output")."""
    codes = unpack_nibbles(packed)
    return codes if _check_pack_dim("int4.unpack_codes", pack_dim) == "input" else codes.transpose(-1, -2)


def unpack(
    packed: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None = None,
    *,
    weight_format: str = "uint4",
    pack_dim: str = "input",
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Values [..., N, K] of dtype; the product is formed in float32 and rounded once.

    Raises CallError for an unknown name, for shapes that disagree (the text has both), for a scale that is
    not bfloat16, float16 or float32, and for zero points with "int4".
    """
    codes = unpack_codes(packed, pack_dim)
    scale, zero = _rows_first(codes, scale, zero, weight_format, pack_dim)
    groups: torch.Tensor = codes.unflatten(-1, (scale.shape[-1], -1))
    if weight_format == "int4":
        signed = (groups ^ SYMMETRIC_ZERO).to(torch.int8) - SYMMETRIC_ZERO
    elif zero is None:
        signed = groups.to(torch.int8) - SYMMETRIC_ZERO
    else:
        signed = groups.to(torch.int16) - zero.to(torch.int16).unsqueeze(-1)  # a byte may hold more than 15
    return (signed * scale.to(torch.float32).unsqueeze(-1)).to(dtype).flatten(-2)


def quantize(
    weight: torch.Tensor,
    group: int,
    *,
    weight_format: str = "uint4",
    pack_dim: str = "input",
    symmetric: bool = True,
    scale_dtype: torch.dtype = torch.bfloat16,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """INT4 of a float weight [..., N, K]: packed weight, scale, and zero points unless symmetric.

    group: 32, 64, 128, or K for one group a row. Symmetric: scale = largest magnitude / 7, codes mean -7..7.
    Asymmetric ("uint4" only): scale = (max - min) / 15 over the group's values and 0; zero uint8 like scale.
    A code is the nearest one (ties to even) for the scale as stored, in scale_dtype.
    Raises CallError for a group that does not divide K, inf or NaN, unknown names, and asymmetric "int4".
    """
    what = "int4.quantize"
    _check_names(what, weight_format, pack_dim, scale_dtype)
    num_columns = weight.shape[-1]
    if group <= 0 or num_columns % group:
        raise CallError(what, f"group {group} for K={num_columns}", "a divisor of K", "choose another group")
    group_size(num_columns, num_columns // group)
    if weight_format == "int4" and not symmetric:
        raise CallError(what, "symmetric=False with 'int4'", "'uint4'", "use weight_format='uint4'")
    if not bool(torch.isfinite(weight).all()):
        raise CallError(what, "a weight with inf or NaN", "finite values", "repair the weight first")
    groups: torch.Tensor = weight.to(torch.float32).unflatten(-1, (-1, group))
    zero = None
    if symmetric:
        scale = (groups.abs().amax(-1) / 7).to(scale_dtype)
        offset: torch.Tensor | int = SYMMETRIC_ZERO
    else:
        lowest = groups.amin(-1).clamp(max=0)
        scale = ((groups.amax(-1).clamp(min=0) - lowest) / MAX_CODE).to(scale_dtype)
        zero = (-lowest / _divisor(scale)).round().clamp(0, MAX_CODE).to(torch.uint8)
        offset = zero.unsqueeze(-1)
    nearest = (groups / _divisor(scale).unsqueeze(-1)).round() + offset
    codes = nearest.clamp(0, MAX_CODE).to(torch.uint8).flatten(-2)
    packed = pack(codes ^ SYMMETRIC_ZERO if weight_format == "int4" else codes, pack_dim)
    if pack_dim == "output":
        scale = scale.transpose(-1, -2).contiguous()
        zero = None if zero is None else zero.transpose(-1, -2).contiguous()
    return packed, scale, zero


def _divisor(scale: torch.Tensor) -> torch.Tensor:
    """Give the scale in float32 with 1 for 0: a group of zeros has scale 0 and codes that mean 0."""
    scale = scale.to(torch.float32)
    return torch.where(scale == 0, 1.0, scale)


def _rows_first(
    codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None, weight_format: str, pack_dim: str
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Scale and zero points as [..., N, K / g], checked against the codes [..., N, K]."""
    what = "int4.unpack"
    _check_names(what, weight_format, pack_dim, scale.dtype)
    if zero is not None:
        if weight_format == "int4":
            raise CallError(what, "zero points with 'int4'", "zero=None", "use weight_format='uint4'")
        if zero.dtype == torch.int32 and pack_dim == "output":
            zero = unpack_nibbles(zero)
        if zero.dtype != torch.uint8 or zero.shape != scale.shape:
            given = f"zero {zero.dtype} {tuple(zero.shape)} for scale {tuple(scale.shape)}"
            allowed = "uint8 of the scale's shape, or packed int32 with pack_dim='output'"
            raise CallError(what, given, allowed, "unpack the zero points to one byte a group")
    if pack_dim == "output":
        scale, zero = scale.transpose(-1, -2), None if zero is None else zero.transpose(-1, -2)
    if scale.dim() != codes.dim() or scale.shape[:-1] != codes.shape[:-1]:
        given = f"scale for rows {tuple(scale.shape[:-1])}, weight with rows {tuple(codes.shape[:-1])}"
        raise CallError(what, given, "the same rows", "check pack_dim and that the scale is this weight's")
    group_size(codes.shape[-1], scale.shape[-1])
    return scale, zero


def _check_names(what: str, weight_format: str, pack_dim: str, scale_dtype: torch.dtype) -> None:
    if weight_format not in INT4_FORMATS:
        raise CallError(what, f"weight_format={weight_format!r}", f"{INT4_FORMATS}", "name the code set")
    if scale_dtype not in FLOAT_DTYPES:
        raise CallError(what, f"scale of {scale_dtype}", "bfloat16, float16, float32", "convert the scale")
    _check_pack_dim(what, pack_dim)


def _check_pack_dim(what: str, pack_dim: str) -> str:
    if pack_dim not in PACK_DIMS:
        raise CallError(what, f"pack_dim={pack_dim!r}", f"{PACK_DIMS}", "name the packed dimension")
    return pack_dim
