"""What a legal graph looks like after the passes; a violation is a defect of this package, not of the model."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from mxk_compile.errors import GraphError
from mxk_compile.passes.arguments import fake_arguments, fake_value


def _is_ours(node: fx.Node) -> bool:
    """Whether a node calls an op of this package: `mxk::*`, or a Gaudi kernel's op."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target.name().startswith(
        ("mxk::moe", "mxk::stack", "custom_op::mxk_")
    )


def verify(module: fx.GraphModule) -> None:
    """Raises GraphError unless the graph lints and the metadata of every node of ours is what its fake returns."""
    module.graph.lint()
    for node in module.graph.nodes:
        if not _is_ours(node):
            continue
        value, expected = fake_value(node), node.target(*fake_arguments(node.args), **node.kwargs)
        for attribute in ("shape", "dtype", "device", "stride"):
            given, wanted = (_get(tensor, attribute) for tensor in (value, expected))
            if given != wanted:
                raise GraphError(
                    str(node.target), f"node {node.name} with {attribute} {given}", str(wanted), "report this"
                )


def _get(tensor: Any, attribute: str) -> Any:
    found = getattr(tensor, attribute, None)
    return found() if attribute == "stride" and found is not None else found
