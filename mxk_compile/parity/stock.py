"""The stock op's result of a call, in its own rounding: what parity prints beside the kernels'."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from mxk_compile.ops.dequant import dequantize
from mxk_compile.ops.formats import mxfp4
from mxk_compile.ops.moe import activate, split_rows
from mxk_compile.ops.stock import call_mxfp4
from mxk_compile.testing import MoECase


def run_stock(case: MoECase) -> Tensor:
    """The result of the stand-in of ops/stock.py, or of the bridge's op where it is there.

    No overload has the clamp without bias and `up + 1`: for that activation its steps are repeated here, each in bf16.
    Per route, it is called with one slot at a time.
    """
    ids, weights = case.topk_ids, case.topk_weights
    if case.attributes["per_route"]:
        slots = [
            dataclasses.replace(case, topk_ids=ids[:, [k]], topk_weights=weights[:, [k]])
            for k in range(ids.shape[1])
        ]
        return torch.stack([_call(slot) for slot in slots], dim=1)
    if case.attributes["activation"] == "swiglu_clamp":
        return _steps(case)
    return _call(case)


def on_bf16(case: MoECase, w13: Sequence[Tensor], w2: Sequence[Tensor]) -> Tensor:
    """The stock op for bf16 weights, on those given, one matrix an expert: prefill, and what INT4 is converted for."""
    op = torch.ops.hpu.mixture_of_experts.fused_weights
    first = case.attributes["experts_min"]
    result: Tensor = op(
        *(*case.routing, list(w13), list(w2)),
        **{"permuted_weights": True, "activation": "silu"},
        **{"experts_min": first, "experts_max": first + len(case.w2) - 1},
    )
    return result


def _call(case: MoECase) -> Tensor:
    if case.attributes["weight_format"] == "uint4":
        return on_bf16(
            case,
            _int4_values(case, case.w13, case.w13_scale, case.w13_zero),
            _int4_values(case, case.w2, case.w2_scale, case.w2_zero),
        )
    w13, w13_scale, w2, w2_scale, _, _, *biases = case.lists
    constants = {name: case.attributes[name] for name in ("experts_min", "alpha", "limit")}
    return call_mxfp4(case.routing, w13, w13_scale, w2, w2_scale, [b for b in biases if b], **constants)


def _int4_values(case: MoECase, weight: Tensor, scale: Tensor, zero: Tensor | None) -> list[Tensor]:
    """What vllm-gaudi's conversion makes of INT4, expert by expert: rows are outputs."""
    zeros = [None] * len(weight) if zero is None else list(zero)
    form: dict[str, Any] = {"weight_format": "uint4", "pack_dim": case.attributes["pack_dim"]}
    return [
        dequantize(*parts, **form, dtype=torch.bfloat16).contiguous()
        for parts in zip(weight, scale, zeros, strict=True)
    ]


def _steps(case: MoECase) -> Tensor:
    result = torch.zeros_like(case.hidden_states)
    for expert in range(len(case.w2)):
        token, slot = torch.where(case.topk_ids == case.attributes["experts_min"] + expert)
        if not len(token):
            continue
        w13 = mxfp4.unpack(case.w13[expert], case.w13_scale[expert])
        w2 = mxfp4.unpack(case.w2[expert], case.w2_scale[expert])
        halves = split_rows(functional.linear(case.hidden_states[token], w13), case.attributes["row_order"])
        a = activate(*halves, case.attributes["activation"], 1.0, case.attributes["limit"])
        result.index_add_(0, token, functional.linear(a, w2) * case.topk_weights[token, slot, None])
    return result
