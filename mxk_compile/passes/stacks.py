"""Lists of per-expert tensors that were taken from one stacked tensor in the graph, turned back into that tensor."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from mxk_compile.passes.arguments import bind, fake_value

_aten = torch.ops.aten


def _source(node: fx.Node) -> tuple[fx.Node, int] | None:
    """(stacked tensor, index along dim 0) that `node` selects: from unbind, or select with a constant index."""
    if node.op != "call_function":
        return None
    if node.target is operator.getitem:
        parent, index = node.args
        if isinstance(parent, fx.Node) and parent.target is _aten.unbind.int and isinstance(index, int):
            bound = bind(_aten.unbind.int, parent)
            if bound is not None and bound["dim"] == 0:
                return bound["self"], index
    if node.target is _aten.select.int:
        bound = bind(_aten.select.int, node)
        if bound is not None and bound["dim"] == 0 and isinstance(bound["index"], int):
            return bound["self"], bound["index"]
    return None


def stacked(nodes: Sequence[fx.Node]) -> tuple[fx.Node, int] | None:
    """(stacked tensor, first index) if `nodes` are its consecutive slices along dim 0, else None."""
    sources = [_source(node) for node in nodes]
    if not sources or sources[0] is None:
        return None
    base, first = sources[0]
    value = fake_value(base)
    if value is None or not isinstance(value.shape[0], int):
        return None
    if first < 0:
        first += value.shape[0]
    for offset, source in enumerate(sources):
        if source is None or source[0] is not base or source[1] % value.shape[0] != first + offset:
            return None
    return base, first


def restack(graph: fx.Graph, nodes: Sequence[fx.Node]) -> fx.Node | None:
    """A node for `nodes` stacked along dim 0 that copies nothing, inserted at the current point, or None.

    Besides slices of a stacked tensor, one tensor repeated for every expert is recognised (a shared zero point).
    """
    if len(set(nodes)) == 1:
        value = fake_value(nodes[0])
        return _insert(
            graph,
            _aten.expand.default,
            _insert(graph, _aten.unsqueeze.default, nodes[0], 0),
            [len(nodes), *value.shape],
        )
    found = stacked(nodes)
    if found is None:
        return None
    base, first = found
    if len(nodes) == fake_value(base).shape[0]:
        return base
    return _insert(graph, _aten.slice.Tensor, base, 0, first, first + len(nodes))


def is_restackable(nodes: Sequence[fx.Node]) -> bool:
    """Whether `restack` would succeed."""
    return (len(set(nodes)) == 1 and fake_value(nodes[0]) is not None) or stacked(nodes) is not None


def _insert(graph: fx.Graph, target: torch._ops.OpOverload, *args: Any) -> fx.Node:
    node = graph.call_function(target, args)
    node.meta["val"] = target(*fx.node.map_arg(args, fake_value))
    return node
