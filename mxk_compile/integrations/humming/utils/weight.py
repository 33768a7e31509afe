"""Quantising of a float weight while a server loads it."""

from __future__ import annotations

import torch
from torch import Tensor

from mxk_compile.errors import CallError
from mxk_compile.integrations.humming import dtypes
from mxk_compile.integrations.humming.schema import SUPPORTED
from mxk_compile.ops.formats import int4, mxfp4
from mxk_compile.ops.formats.nibbles import as_words

_SCALES = {dtypes.bfloat16: torch.bfloat16, dtypes.float16: torch.float16, dtypes.float32: torch.float32}


def quantize_weight(
    weight: Tensor,
    dtype: dtypes.DataType,
    scale_dtype: dtypes.DataType,
    group_size: int = 0,
    has_zero_point: bool = False,
    has_global_scale: bool = False,
    is_fp_zero_point: bool = False,
    pack: bool = True,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Weight, scale, zero points and global scale (always None) of a float weight [..., N, K].

    Args:
        weight: finite values.
        dtype: uint4, or float4e2m1 with float8e8m0 scales for 32.
        scale_dtype: bfloat16, float16 or float32 for uint4.
        group_size: 32, 64, 128, or 0 for a row.
        has_zero_point: asymmetric uint4.
        has_global_scale, is_fp_zero_point: must be False.
        pack: int32 [..., N, K/8] if True, else codes uint8 [..., N, K].

    Raises:
        CallError: what has no kernel here, or cannot be quantised.
    """
    group = group_size or weight.shape[-1]
    is_mxfp4 = (dtype, scale_dtype, group) == (dtypes.float4e2m1, dtypes.float8e8m0, mxfp4.BLOCK)
    if has_global_scale or is_fp_zero_point or not (
        (is_mxfp4 and not has_zero_point) or (dtype == dtypes.uint4 and scale_dtype in _SCALES)
    ):  # fmt: skip
        given = f"{dtype} with {scale_dtype} for {group}, {has_zero_point=}, {has_global_scale=}, {is_fp_zero_point=}"
        raise CallError("humming.quantize_weight", given, SUPPORTED, "choose one of them")
    zero = None
    if is_mxfp4:
        packed, scale = mxfp4.quantize(weight)
        scale = scale.view(torch.float8_e8m0fnu)
    else:
        packed, scale, zero = int4.quantize(
            weight, group, symmetric=not has_zero_point, scale_dtype=_SCALES[scale_dtype]
        )
    return (as_words(packed) if pack else int4.unpack_codes(packed)), scale, zero, None
