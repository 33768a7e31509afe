"""Plain PyTorch: bf16 copies of the weights (3.8 x the memory), a loop over the hit experts, its body compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mxk_compile.ops.dequant import dequantize
from mxk_compile.ops.moe import activate, split_rows
from mxk_compile.testing import MoECase

NAME = "torch bf16, compiled loop"
DEVICE, CAPTURABLE = "cpu", False


def version() -> str:
    """Of the peer."""
    return str(torch.__version__)


def missing() -> str | None:
    """Torch is always there."""
    return None


def layer(case: MoECase) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """See the package."""
    kept = case.attributes
    form = {name: kept[name] for name in ("weight_format", "pack_dim")}

    def copies(values: Tensor, scales: Tensor, zeros: Tensor | None) -> list[Tensor]:
        return [
            dequantize(values[e], scales[e], None if zeros is None else zeros[e], **form).bfloat16()
            for e in range(len(values))
        ]

    w13 = copies(case.w13, case.w13_scale, case.w13_zero)
    w2 = copies(case.w2, case.w2_scale, case.w2_zero)
    nothing = [None] * len(w2)
    b13 = nothing if case.w13_bias is None else list(case.w13_bias.bfloat16())
    b2 = nothing if case.w2_bias is None else list(case.w2_bias.bfloat16())

    @torch.compile(dynamic=True)
    def expert(x: Tensor, w13: Tensor, w2: Tensor, b13: Any, b2: Any) -> Tensor:
        gate, up = split_rows(torch.nn.functional.linear(x, w13, b13), kept["row_order"])
        h = activate(gate, up, kept["activation"], kept["alpha"], kept["limit"])
        return torch.nn.functional.linear(h, w2, b2)

    def run(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        total = torch.zeros(x.shape, dtype=torch.float32)
        for e in ids[ids < len(w2)].unique().tolist():
            token, slot = torch.where(ids == e)
            y = expert(x[token], w13[e], w2[e], b13[e], b2[e])
            total.index_add_(0, token, y.float() * weights[token, slot, None])
        return total.bfloat16()

    return run
