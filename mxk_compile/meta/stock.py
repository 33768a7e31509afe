"""Fakes of the `hpu::` stand-ins in ops/stock.py; nothing is registered where the bridge brings its own."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from mxk_compile.ops import stock
from mxk_compile.ops.stock_convert import check_convert


def mixture_of_experts(name: str, *args: Any, **kwargs: Any) -> Tensor:
    """Give the result [T, K] of overload `name`, checked like the real call."""
    tensors: tuple[Tensor, Tensor, Tensor] = args[:3]
    hidden_states, expert_routing_table, router_weights = tensors
    # Ahead of the comparisons in bind(), which cannot branch on sizes that are known only at run time.
    num_tokens = hidden_states.shape[0]
    for routing in (expert_routing_table, router_weights):
        torch._check(routing.shape[0] == num_tokens, lambda: f"hpu::{name}: one row of routes for each token")
    call = stock.bind(name, args, kwargs)
    return hidden_states.new_empty(hidden_states.shape, dtype=call.dtype)


def convert_from_4bit(name: str, *args: Any, **kwargs: Any) -> Tensor:
    """Give the result [..., C] of packed [..., C/8]."""
    check_convert(name, *args, **kwargs)
    packed: Tensor = args[0]
    out_dtype: torch.dtype = args[3]
    return packed.new_empty((*packed.shape[:-1], packed.shape[-1] * 8), dtype=out_dtype)


if stock.library is not None:
    for _name in stock.SCHEMAS:
        _fake = convert_from_4bit if _name.startswith("convert") else mixture_of_experts
        stock.library.impl(_name, partial(_fake, _name), "Meta")
