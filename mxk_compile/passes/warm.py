"""Eager warm registration: every op of ours that a graph uses is called once before the graph first runs.

A compiled graph never makes the first eager call of an op, on which Gaudi's PT2 custom ops register their kernel
("isn't registered in KernelRegistry" otherwise); so one tiny call is made here, once per op and device in a process.
On CPU it opens the kernel library before the first run.
"""

from __future__ import annotations

import torch
from torch import fx

from mxk_compile.passes.arguments import fake_value

_warmed: set[tuple[str, str]] = set()


def call_smallest(name: str, device: str) -> None:
    """Calls `mxk::moe` or `mxk::moe.lists` on one token and one expert, K = I = 32, all bytes zero."""
    routing = (
        torch.zeros(1, 32, dtype=torch.bfloat16, device=device),
        torch.zeros(1, 1, dtype=torch.int32, device=device),
        torch.zeros(1, 1, dtype=torch.bfloat16, device=device),
    )
    shapes = ((1, 64, 16), (1, 64, 1), (1, 32, 16), (1, 32, 1))
    weights = [torch.zeros(shape, dtype=torch.uint8, device=device) for shape in shapes]
    attributes = {"weight_format": "mxfp4", "row_order": "gate_up", "activation": "silu"}
    if name == "mxk::moe.lists":
        torch.ops.mxk.moe.lists(*routing, *([weight[0]] for weight in weights), [], [], [], [], **attributes)
    else:
        torch.ops.mxk.moe(*routing, *weights, **attributes)


OPS = ("mxk::moe", "mxk::moe.lists")
"""Our ops that a graph may hold, by qualified name."""


def warm_ops(module: fx.GraphModule) -> None:
    """Calls each op of ours in `module` and its nested graphs once eagerly, if this process has not done so yet."""
    for graph_module in module.modules():
        if not isinstance(graph_module, fx.GraphModule):
            continue
        for node in graph_module.graph.nodes:
            name = node.target.name() if isinstance(node.target, torch._ops.OpOverload) else ""
            if name not in OPS:
                continue
            key = (name, fake_value(node).device.type)
            if key not in _warmed:
                # Compilation runs under modes (fake tensors, functionalisation, inference) that must not see this call.
                with torch.utils._python_dispatch._disable_current_modes(), torch.no_grad():
                    call_smallest(*key)
                _warmed.add(key)
