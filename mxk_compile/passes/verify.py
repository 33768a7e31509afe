"""What a legal graph looks like after the passes; a violation is a defect of this package, not of the model."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from mxk_compile.errors import GraphError
from mxk_compile.passes.arguments import fake_arguments, fake_value

_FUSED = (torch.ops.mxk.moe.default, torch.ops.mxk.moe.lists)


def verify(module: fx.GraphModule) -> None:
    """Raises GraphError unless the graph lints and the metadata of every fused node is what its fake returns."""
    module.graph.lint()
    for node in module.graph.nodes:
        if node.target not in _FUSED:
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
