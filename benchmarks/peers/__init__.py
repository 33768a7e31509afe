"""Public implementations of a MoE layer, as far as they are installed: `mxk bench --impl MODULE`, bench_peers.py.

Each module has `NAME`; `DEVICE`, "cpu" or "cuda"; `CAPTURABLE`, whether a CUDA graph can record it after a first call;
`version()`; `missing()`, None or why it cannot run here; and `layer(case)`, a function of hidden_states, topk_ids and
topk_weights that runs the layer of `case`, whatever copies it needs being made before; ids from E up add nothing. It
raises Unsuitable for a layer that the peer has no form of. What several of them need is here.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mxk_compile.ops.moe import split_rows
from mxk_compile.testing import MoECase

GROUP = 32


class Unsuitable(Exception):
    """The peer computes no such layer."""


class Matrix(NamedTuple):
    """One projection of all experts.

    Attributes:
        codes: [E, rows, columns / 2] uint8, the lower four bits first.
        scale: [E, rows, columns / 32], E8M0 bytes or bf16.
        bias: [E, rows] fp32, or None.
    """

    codes: Tensor
    scale: Tensor
    bias: Tensor | None


def matrices(case: MoECase) -> dict[str, Matrix]:
    """The layer as "gate", "up" and "down", rows in order; raises Unsuitable for groups, packing, zero points."""
    if case.attributes["pack_dim"] != "input" or case.w13_zero is not None or case.attributes["per_route"]:
        raise Unsuitable("layers packed along the input, without zero points, summed per token")
    if case.w2_scale.shape[2] * GROUP != case.w2.shape[2] * 2:
        raise Unsuitable(f"groups of {GROUP} values a scale")
    chosen = split_rows(torch.arange(case.w13.shape[1]), case.attributes["row_order"])

    def of(codes: Tensor, scale: Tensor, bias: Tensor | None, rows: Tensor | slice) -> Matrix:
        parts = (codes[:, rows].contiguous(), scale[:, rows].contiguous())
        return Matrix(*parts, None if bias is None else bias[:, rows].float().contiguous())

    first = (case.w13, case.w13_scale, case.w13_bias)
    return {
        "gate": of(*first, chosen[0]),
        "up": of(*first, chosen[1]),
        "down": of(case.w2, case.w2_scale, case.w2_bias, slice(None)),
    }


def need_local_routes(case: MoECase) -> None:
    """Raises Unsuitable where some of the routes are to experts held elsewhere, of which the peer knows nothing."""
    if (case.topk_ids >= len(case.w2)).any():
        raise Unsuitable("calls whose routes are all local: --routing hot")
