"""Rules of `mxk::mxfp4_dequant`, and its fake."""

from __future__ import annotations

import torch
from torch import Tensor

from mxk_compile.errors import CallError
from mxk_compile.ops import library
from mxk_compile.ops.formats import mxfp4

_VALUES_PER_ELEMENT = {torch.uint8: 2, torch.int32: 8}


def check_dequant(weight: Tensor, scale: Tensor) -> tuple[int, ...]:
    """Shape of the result; raises CallError for dtypes, shapes or devices that do not go together."""
    what = "mxk::mxfp4_dequant"
    factor = _VALUES_PER_ELEMENT.get(weight.dtype)
    if factor is None or weight.dim() == 0:
        given = f"weight {list(weight.shape)} {weight.dtype}"
        raise CallError(what, given, "uint8 or int32 of rows", "view the packed bytes as torch.uint8")
    shape = (*weight.shape[:-1], weight.shape[-1] * factor)
    allowed = (*shape[:-1], -(-shape[-1] // mxfp4.BLOCK))
    if scale.shape != allowed or scale.dtype != torch.uint8 or scale.device != weight.device:
        given = f"scale {list(scale.shape)} {scale.dtype} on {scale.device}"
        wanted = f"{list(allowed)} torch.uint8 on {weight.device}"
        raise CallError(what, given, wanted, "give one scale byte for each 32 values of a row")
    return shape


def _fake(weight: Tensor, scale: Tensor) -> Tensor:
    return weight.new_empty(check_dequant(weight, scale), dtype=torch.bfloat16)


library.impl("mxfp4_dequant", _fake, "Meta")
