"""The stock forms of a MoE call, as data: which arguments hold what, and which flag values are known to be good."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class StockForm:
    """How to read one overload of `hpu::mixture_of_experts`.

    Attributes:
        weights: argument names of the gate/up list(s), then of the down list.
        scales: argument names of their scales in the same order; empty where the weights carry none.
        biases: argument names of the w13 and w2 biases.
        weight_format: of the weights, or None where they are floating point and only a conversion in the graph
            (`hpu::convert_from_uint4`) shows that they are packed.
        flags: arguments that must have exactly this value.
        row_order: order of gate and up rows in the first list; "separate" for two lists.
        activation: of the overload, or None where an argument says it.
        pack_dim: which dimension of the weights is packed.
    """

    weights: tuple[str, ...]
    scales: tuple[str, ...] = ()
    biases: tuple[str, ...] = ()
    weight_format: str | None = None
    flags: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    row_order: str = "gate_up"
    activation: str | None = None
    pack_dim: str = "input"


_MXFP4 = {"block_size": 32, "permuted_weights": True, "is_fp4": True}
# Weights packed along the output dimension arrive as [K, 2I] and [I, K], which the stock op calls not permuted.
_OUTPUT = {"permuted_weights": False}

FORMS = {
    "default": StockForm(("w1", "w2", "w3"), flags=_OUTPUT, row_order="separate", pack_dim="output"),
    "fused_weights": StockForm(("w12", "w3"), flags=_OUTPUT, pack_dim="output"),
    "bias_fused_weights": StockForm(
        ("w12", "w3"),
        biases=("w12_bias", "w3_bias"),
        flags=_OUTPUT,
        row_order="interleaved",
        activation="swiglu_oai",
        pack_dim="output",
    ),
    "mxfp4": StockForm(
        ("w1", "w2", "w3"),
        ("d_scale_w1", "d_scale_w2", "d_scale_w3"),
        weight_format="mxfp4",
        flags=_MXFP4,
        row_order="separate",
    ),
    "mxfp4_fused_weights": StockForm(
        ("w12", "w3"), ("d_scale_w12", "d_scale_w3"), weight_format="mxfp4", flags=_MXFP4
    ),
    "bias_mxfp4_fused_weights": StockForm(
        ("w12", "w3"),
        ("d_scale_w12", "d_scale_w3"),
        ("w12_bias", "w3_bias"),
        weight_format="mxfp4",
        flags=_MXFP4,
        row_order="interleaved",
        activation="swiglu_oai",
    ),
    "int4_fused_weights": StockForm(
        ("w12", "w3"), ("d_scale_w12", "d_scale_w3"), weight_format="int4", flags=_OUTPUT, pack_dim="output"
    ),
}

ROUTING = ("hidden_states", "expert_routing_table", "router_weights")
ANY_VALUE = (
    "experts_min",
    "experts_max",
    "chunk_size",
    "total_experts",
    "recomp",
    "alpha",
    "limit",
    "activation",
)
"""Arguments that are read, or that do not change the result: tiling hints, and a training option."""
