"""From packed weights to values: what a packed weight means, for the reference and the MXFP4 stock path."""

from __future__ import annotations

import torch

from mxk_compile.errors import CallError
from mxk_compile.ops import library
from mxk_compile.ops.formats import int4, mxfp4
from mxk_compile.variants import INT4_FORMATS, WEIGHT_FORMATS


def dequantize(
    weight: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None = None,
    *,
    weight_format: str,
    pack_dim: str = "input",
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Values of a packed weight, one row an output whatever the packing: [..., N, K] of dtype.

    "mxfp4" takes weight uint8 [..., N, K / 2] or int32 [..., N, K / 8], scale uint8 [..., N, ceil(K / 32)],
    pack_dim "input" and no zero points; the layouts of "uint4" and "int4" are in `ops.formats.int4`.
    With pack_dim "output" the result is a transposed view: its memory is [..., K, N].
    Raises CallError for names, dtypes or shapes that do not go together.
    """
    if weight_format in INT4_FORMATS:
        return int4.unpack(weight, scale, zero, weight_format=weight_format, pack_dim=pack_dim, dtype=dtype)
    if weight_format != "mxfp4":
        given = f"weight_format={weight_format!r}"
        raise CallError("dequantize", given, f"{WEIGHT_FORMATS}", "name the format")
    if pack_dim != "input" or zero is not None:
        given = f"pack_dim={pack_dim!r}" if pack_dim != "input" else "zero points"
        allowed = "pack_dim='input' and zero=None"
        raise CallError("dequantize", f"{given} with 'mxfp4'", allowed, "use an INT4 format")
    return mxfp4.unpack(weight, scale, dtype)


def mxfp4_dequant(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """`mxk::mxfp4_dequant`: bf16 [..., N, K] of uint8 [..., N, K / 2] or int32 [..., N, K / 8], scale [..., N, K / 32].

    Raises CallError for dtypes or shapes that do not go together.
    """
    return mxfp4.unpack(weight, scale, torch.bfloat16)


library.impl("mxfp4_dequant", mxfp4_dequant, "CPU")
