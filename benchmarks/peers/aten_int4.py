"""PyTorch's own 4-bit product, aten::_weight_int4pack_mm_for_cpu, which torchao uses too: a repacked copy, bf16
activations, one call a hit expert and matrix.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mxk_compile.ops.moe import activate, split_rows
from mxk_compile.testing import MoECase

from . import Unsuitable

NAME = "aten int4pack"
DEVICE, CAPTURABLE = "cpu", False


def version() -> str:
    """Of the peer."""
    return str(torch.__version__)


def missing() -> str | None:
    """None, or why it cannot run."""
    known = hasattr(torch.ops.aten, "_weight_int4pack_mm_for_cpu")
    return None if known else "this torch has no _weight_int4pack_mm_for_cpu"


def layer(case: MoECase) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """See the package."""
    kept = case.attributes
    if kept["weight_format"] != "uint4" or kept["pack_dim"] != "input" or case.w13_zero is not None:
        raise Unsuitable("INT4 with zero point 8, packed along the input")

    def packed(values: Tensor, scales: Tensor) -> list[tuple[Tensor, int, Tensor]]:
        result = []
        for value, scale in zip(values, scales, strict=True):
            rows = value.view(torch.uint8)
            codes = torch.stack([rows & 15, rows >> 4], -1).flatten(1).int()
            group = codes.shape[1] // scale.shape[1]
            per_group = torch.stack([scale.t(), torch.zeros_like(scale.t())], -1).bfloat16().contiguous()
            result.append((torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1), group, per_group))
        return result

    multiply = torch.ops.aten._weight_int4pack_mm_for_cpu
    w13, w2 = packed(case.w13, case.w13_scale), packed(case.w2, case.w2_scale)

    def run(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        total = torch.zeros(x.shape, dtype=torch.float32)
        for e in ids[ids < len(w2)].unique().tolist():
            token, slot = torch.where(ids == e)
            both = multiply(x[token], *w13[e])
            if case.w13_bias is not None:
                both = both + case.w13_bias[e]
            h = activate(
                *split_rows(both, kept["row_order"]), kept["activation"], kept["alpha"], kept["limit"]
            )
            y = multiply(h, *w2[e])
            if case.w2_bias is not None:
                y = y + case.w2_bias[e]
            total.index_add_(0, token, y.float() * weights[token, slot, None])
        return total.bfloat16()

    return run
