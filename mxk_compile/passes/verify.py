"""What a legal graph looks like after the passes; a violation is a defect of this package, not of the model."""

from __future__ import annotations

import torch
from torch import fx

from mxk_compile.errors import GraphError
from mxk_compile.passes.arguments import fake_arguments, fake_value

_FUSED = (torch.ops.mxk.moe.default, torch.ops.mxk.moe.lists)


def verify(module: fx.GraphModule) -> None:
    """Raises GraphError unless the graph lints, every fused node is used, and its metadata is what its fake returns."""
    module.graph.lint()
    for node in module.graph.nodes:
        if node.target not in _FUSED:
            continue
        value = fake_value(node)
        if value is None:
            raise GraphError(
                str(node.target), f"node {node.name} without metadata", "a fake value", "report this"
            )
        expected = node.target(*fake_arguments(node.args), **fake_arguments(node.kwargs))
        for attribute in ("shape", "dtype", "device"):
            given, wanted = getattr(value, attribute), getattr(expected, attribute)
            if given != wanted:
                given_text = f"node {node.name} with {attribute} {given}"
                raise GraphError(str(node.target), given_text, str(wanted), "report this")
        if value.stride() != expected.stride():
            raise GraphError(
                str(node.target), f"stride {value.stride()}", str(expected.stride()), "report this"
            )
