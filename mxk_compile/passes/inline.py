"""A node replaced by what a torch function traces to, with the metadata that the nodes around it have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.passes.shape_prop import _extract_tensor_metadata

from mxk_compile.passes.arguments import fake_value

_ORIGIN = ("stack_trace", "nn_module_stack", "source_fn_stack", "seq_nr", "from_node", "original_aten")
"""Metadata that says which line of the model a node stands for."""


def inherit_origin(new: fx.Node, origin: fx.Node) -> None:
    """Gives a node that was inserted for `origin` the place in the model that `origin` has."""
    for key in _ORIGIN:
        if key in origin.meta:
            new.meta.setdefault(key, origin.meta[key])


def replace_by_trace(
    graph: fx.Graph, node: fx.Node, function: Callable[..., Any], inputs: list[fx.Node]
) -> None:
    """Replaces `node` by the ATen nodes of `function(*inputs)`, traced on their fake values.

    The function returns one tensor and must not depend on sizes that are symbolic: a trace of them would be a number.
    """
    from torch.fx.experimental.proxy_tensor import make_fx

    fakes = [fake_value(value) for value in inputs]
    with torch.no_grad():
        traced = make_fx(function, tracing_mode="real")(*fakes)
    copies: dict[fx.Node, fx.Node] = {}
    given = iter(inputs)
    result: Any = None
    with graph.inserting_before(node):
        for traced_node in traced.graph.nodes:
            if traced_node.op == "placeholder":
                copies[traced_node] = next(given)
            elif traced_node.op == "output":
                result = copies[traced_node.args[0]]
            else:
                copy = graph.node_copy(traced_node, copies.__getitem__)
                copies[traced_node] = copy
                copy.meta = {"val": traced_node.meta["val"]}
                if "tensor_meta" in node.meta and isinstance(copy.meta["val"], Tensor):
                    copy.meta["tensor_meta"] = _extract_tensor_metadata(copy.meta["val"])
                inherit_origin(copy, node)
    if "example_value" in node.meta:
        result.meta["example_value"] = result.meta["val"]
    node.replace_all_uses_with(result)
    graph.erase_node(node)
