"""Eager warm registration: every op of ours that a graph uses is called once before the graph first runs.

Some runtimes register a kernel on the first eager call of its op, which a compiled graph never makes (on Gaudi: "isn't
registered in KernelRegistry"); so one tiny call is made for them, once per op and device in a process.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

from mxk_compile.passes.arguments import fake_value

_warmed: set[tuple[str, str]] = set()


def _call_moe(device: str) -> None:
    """One token, one expert, K = I = 32, all zero bytes: the smallest call of `mxk::moe`."""
    operands, attributes = _smallest_moe(device)
    torch.ops.mxk.moe(*operands, **attributes)


def _call_moe_lists(device: str) -> None:
    operands, attributes = _smallest_moe(device)
    lists = [list(weight.unbind(0)) for weight in operands[3:]]
    torch.ops.mxk.moe.lists(*operands[:3], *lists, [], [], [], [], **attributes)


def _smallest_moe(device: str) -> tuple[list[torch.Tensor], dict[str, str]]:
    shapes = ((1, 64, 16), (1, 64, 1), (1, 32, 16), (1, 32, 1))
    operands = [
        torch.zeros(1, 32, dtype=torch.bfloat16, device=device),
        torch.zeros(1, 1, dtype=torch.int32, device=device),
        torch.zeros(1, 1, dtype=torch.bfloat16, device=device),
        *(torch.zeros(shape, dtype=torch.uint8, device=device) for shape in shapes),
    ]
    return operands, {"weight_format": "mxfp4", "row_order": "gate_up", "activation": "silu"}


SMALLEST_CALLS: dict[str, Callable[[str], None]] = {"mxk::moe": _call_moe, "mxk::moe.lists": _call_moe_lists}
"""How to call each of our ops once, by qualified name."""


def warm_ops(module: fx.GraphModule) -> None:
    """Calls each op of ours in `module` and its nested graphs once eagerly, if this process has not done so yet."""
    for graph_module in module.modules():
        if not isinstance(graph_module, fx.GraphModule):
            continue
        for node in graph_module.graph.nodes:
            name = node.target.name() if isinstance(node.target, torch._ops.OpOverload) else ""
            if name not in SMALLEST_CALLS:
                continue
            key = (name, fake_value(node).device.type)
            if key not in _warmed:
                # Compilation runs under modes (fake tensors, functionalisation, inference) that must not see this call.
                with torch.utils._python_dispatch._disable_current_modes(), torch.no_grad():
                    SMALLEST_CALLS[name](key[1])
                _warmed.add(key)
