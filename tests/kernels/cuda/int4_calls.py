"""Calls of the decode kernel's INT4 products, for tests on a GPU and for the emulator."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from mxk_compile.ops.formats import int4
from mxk_compile.testing import MoECase, random_case

GPT_OSS = {"row_order": "interleaved", "activation": "swiglu_oai", "alpha": 1.702, "limit": 7.0, "bias": True}
SPLITS = {
    "8 rows": "decode:groups=2,column_tiles=2,max_routes=128",
    "8 rows, 2 units": "decode:groups=2,column_tiles=2,units=2,max_routes=128",
    "16 rows, 3 warpgroups": "decode:groups=3,column_tiles=4,max_routes=128",
    "16 rows, 2 units": "decode:groups=2,column_tiles=4,units=2,max_routes=128",
    "16 rows, 8 in shared memory": "decode:groups=2,column_tiles=4,laid=1,max_routes=128",
    "24 rows, 16 in shared memory": "decode:groups=2,column_tiles=6,laid=2,chunk=5,max_routes=128",
    "32 rows, short chunks": "decode:groups=2,column_tiles=8,units=2,chunk=5,max_routes=128",
}
UNWRITTEN = -7.0


def layer(scale_dtype: torch.dtype = torch.bfloat16, **arguments: Any) -> MoECase:
    """A small layer; scales are no short numbers."""
    sizes = {"num_tokens": 7, "num_experts": 5, "top_k": 3, "hidden_size": 384, "intermediate_size": 224}
    case = random_case(**{"weight_format": "uint4", **sizes, **arguments})  # type: ignore[arg-type]
    case.w13_scale = (case.w13_scale * 1.003).to(scale_dtype)
    case.w2_scale = (case.w2_scale * 0.997).to(scale_dtype)
    return case


def strange_ids(case: MoECase) -> MoECase:
    """Not here, duplicate, and beyond 32 bits; token 2 has no expert at all."""
    case.topk_ids[0] = case.topk_ids[0, 0]
    case.topk_ids[1, 0], case.topk_ids[3, 0] = -1, 2**32 + 3
    case.topk_ids[2] = -(2**63)
    return case


def infinite(case: MoECase) -> MoECase:
    """Activations and scales that no finite sum is made of; tokens 0, 3 and 5 have finite activations."""
    case.w13_scale[1, 5, 0], case.w2_scale[2, 4, 0] = (
        torch.nan,
        torch.inf,
    )  # first of a row: others must not see it
    case.hidden_states[1, 7], case.hidden_states[2, 9] = torch.inf, -torch.inf
    case.hidden_states[4, 3], case.hidden_states[4, 5] = torch.nan, torch.inf
    return case


def as_large_as(exponent: int, case: MoECase) -> MoECase:
    """Activations times a power of two that the scales of w13 take back."""
    case.hidden_states = (case.hidden_states.float() * 2.0**exponent).bfloat16()
    case.w13_scale = (case.w13_scale.float() * 2.0**-exponent).bfloat16()
    return case


EIGHT, EIGHT_TWICE, SIXTEEN, SIXTEEN_TWICE, LAID, TWICE_LAID, THIRTY_TWO = SPLITS
LAYERS: dict[str, tuple[str, Callable[..., MoECase]]] = {
    "groups of 32": (EIGHT, layer),
    "groups of 64": (SIXTEEN, functools.partial(layer, group_size=64, intermediate_size=192, **GPT_OSS)),
    "groups of 128": (
        EIGHT_TWICE,
        functools.partial(layer, torch.float16, group_size=128, intermediate_size=256),
    ),
    "a row": (SIXTEEN_TWICE, functools.partial(layer, torch.float32, group_size=None, row_order="up_gate")),
    "zero points": (EIGHT_TWICE, functools.partial(layer, zero=True, row_order="interleaved")),
    "zero points of a row": (THIRTY_TWO, functools.partial(layer, torch.float32, zero=True, group_size=None)),
    "zero points, fp16": (
        SIXTEEN,
        functools.partial(layer, torch.float16, zero=True, row_order="up_gate"),
    ),
    "zero points, ragged": (LAID, functools.partial(layer, zero=True, hidden_size=352, row_order="gate_up")),
    "two's complement": (EIGHT, functools.partial(layer, weight_format="int4", hidden_size=352, **GPT_OSS)),
    "many rows": (
        THIRTY_TWO,
        functools.partial(layer, num_tokens=40, num_experts=2, top_k=2, hidden_size=320),
    ),
    "one token": (SIXTEEN_TWICE, functools.partial(layer, num_tokens=1, per_route=True)),
    "strange ids": (
        SIXTEEN,
        lambda **more: strange_ids(layer(num_tokens=9, experts_min=2, top_k=5, **more)),
    ),
    "large": (EIGHT, lambda **more: as_large_as(60, layer(hidden_size=96, intermediate_size=64, **more))),
    "small": (EIGHT, lambda **more: as_large_as(-90, layer(hidden_size=96, intermediate_size=64, **more))),
}
"""Name in SPLITS, and what makes the case; it may be told a device."""
FORMATS = [
    *((32, False, torch.bfloat16), (32, True, torch.float16)),
    *((64, False, torch.float32), (0, True, torch.bfloat16)),  # 0: a row
]


def weight(
    num_experts: int,
    outputs: int,
    inputs: int,
    group: int,
    zero: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Random packed words, scales and zero points of a projection."""
    group = group or inputs
    generator = torch.Generator().manual_seed(outputs + inputs + group)
    codes = torch.randint(0, 16, (num_experts, outputs, inputs), generator=generator, dtype=torch.uint8)
    scale = torch.rand(num_experts, outputs, inputs // group, generator=generator) * 0.04 + 0.005
    zeros = torch.randint(0, 16, scale.shape, generator=generator, dtype=torch.uint8) if zero else None
    return int4.pack(codes).view(torch.int32), scale.to(dtype), zeros


def projections(
    inputs: int, num_experts: int = 6
) -> Iterator[tuple[str, Tensor, tuple[Tensor, ...], int, dict[str, Any]]]:
    """Overload, x, routing, rows of the result and attributes of calls with empty, remote and uneven experts."""
    generator = torch.Generator().manual_seed(inputs)

    def x(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).bfloat16()

    ids = torch.tensor([0, 0, 0, 1, 2, 3, 5, 6, 9, -1])[torch.randint(0, 10, (13, 4), generator=generator)]
    yield "routes", x(13, inputs), (ids,), 52, {"top_k": 4}
    yield "routes", x(52, inputs + 3)[:, :-3], (ids.int(),), 52, {"top_k": 1, "experts_min": 1}
    counts = torch.tensor([0, 1, 12, 9, 0, 20], dtype=torch.int32)
    yield "masked", x(num_experts, 12, inputs), (counts,), 12 * num_experts, {"expected_m": 8}
    yield "masked", x(12 * num_experts, inputs + 8)[:, :-8], (counts,), 12 * num_experts, {"expected_m": 8}
    # Longer than what counts; places of two blocks hold nothing, and one block is of another rank.
    places = torch.tensor([7, 0, 99, 99, 3, 4, 5, 1 << 30, 1, 99, 99, 99, *[2] * 20], dtype=torch.int32)
    blocks, used = torch.tensor([2, 5, -1, 0, 0], dtype=torch.int32), torch.tensor([12], dtype=torch.int32)
    yield "sorted", x(4, inputs), (places, blocks, used), 8, {"top_k": 2, "block_size": 4}
