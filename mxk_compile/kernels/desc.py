"""`MoEDesc`: one call of `mxk::moe`, as a frozen value; `KernelConfig`: what runs it."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from mxk_compile.meta.moe import check_moe


@dataclasses.dataclass(frozen=True)
class MoEDesc:
    """Everything that a decision may depend on; built from fake and real tensors alike.

    The number of tokens is not in it: one graph may serve many, so the token rule stands apart (passes/token_rule.py).

    Attributes:
        device: device type, "cpu", "cuda" or "hpu".
        dtype: of hidden_states.
        hidden_size, intermediate_size, num_experts, top_k: K, I, E, k.
        group_sizes: values that share a scale, in w13 (along K) and w2 (along I).
        weight_format, pack_dim, row_order, activation, per_route: as in the schema of `mxk::moe`.
        bias: whether w13 or w2 has a bias.
        device_index: which of the devices of that type; None where there is one, or for the current one.
    """

    device: str
    dtype: torch.dtype
    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int
    group_sizes: tuple[int, int]
    weight_format: str
    pack_dim: str
    row_order: str
    activation: str
    bias: bool = False
    per_route: bool = False
    device_index: int | None = None

    @classmethod
    def from_call(cls, hidden_states: Tensor, *args: Any, **attributes: Any) -> MoEDesc:
        """The description of a call of `mxk::moe` or `mxk::moe.lists`; raises CallError if the call is malformed."""
        return cls(
            **vars(check_moe(hidden_states, *args, **attributes)),
            device=hidden_states.device.type,
            dtype=hidden_states.dtype,
            weight_format=attributes["weight_format"],
            pack_dim=attributes.get("pack_dim", "input"),
            row_order=attributes["row_order"],
            activation=attributes["activation"],
            per_route=attributes.get("per_route", False),
            device_index=hidden_states.device.index,
        )

    def __str__(self) -> str:
        parts = [
            f"K={self.hidden_size} I={self.intermediate_size} E={self.num_experts} k={self.top_k}",
            f"{self.weight_format}/{'x'.join(map(str, sorted(set(self.group_sizes))))}",
            self.row_order,
            self.activation,
        ]
        return " ".join(parts + ["bias"] * self.bias + ["per_route"] * self.per_route)


@dataclasses.dataclass(frozen=True)
class KernelConfig:
    """The kernel that was chosen: device type, provider ("cpp": compiled C++) and variant (its instruction set)."""

    device: str
    provider: str
    variant: str

    def __str__(self) -> str:
        return f"{self.device}/{self.provider}/{self.variant}"
