"""Lists of per-expert tensors that were taken from one stacked tensor in the graph, turned back into that tensor."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from mxk_compile.ops.stack import is_known
from mxk_compile.passes.arguments import bind, fake_value

_aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class Stack:
    """Where a list comes from: `num` slices of `base` along dim 0 from `first` on, or `base` itself `num` times."""

    base: fx.Node
    first: int | None  # None: repeated
    num: int

    def insert(self, graph: fx.Graph) -> fx.Node:
        """A node for the stacked list that copies nothing, at the graph's current point."""
        value = fake_value(self.base)
        if self.first is None:
            one = _insert(graph, _aten.unsqueeze.default, self.base, 0)
            return _insert(graph, _aten.expand.default, one, [self.num, *value.shape])
        if self.num == value.shape[0]:
            return self.base
        return _insert(graph, _aten.slice.Tensor, self.base, 0, self.first, self.first + self.num)


@dataclasses.dataclass(frozen=True)
class RegisteredStack:
    """A list that comes from outside the graph, to be looked up in each run by `mxk::stack` (ops/stack.py)."""

    nodes: tuple[fx.Node, ...]

    def insert(self, graph: fx.Graph) -> fx.Node:
        """A node for the stacked list, at the graph's current point."""
        return _insert(graph, torch.ops.mxk.stack.default, list(self.nodes))


def find_registered(nodes: Sequence[fx.Node]) -> RegisteredStack | None:
    """The stack behind a list, if one of its shape was registered when the weights were loaded."""
    value = fake_value(nodes[0])
    if value is None or not is_known((len(nodes), *value.shape), value.dtype, value.device.type):
        return None
    return RegisteredStack(tuple(nodes))


def find_stack(nodes: Sequence[fx.Node]) -> Stack | None:
    """The stack behind a list: one tensor for every expert (a shared zero point), or consecutive slices of one."""
    if len(set(nodes)) == 1 and fake_value(nodes[0]) is not None:
        return Stack(nodes[0], None, len(nodes))
    sources = [_source(node) for node in nodes]
    if not sources or sources[0] is None:
        return None
    base, first = sources[0]
    if sources != [(base, first + offset) for offset in range(len(nodes))]:
        return None
    return Stack(base, first, len(nodes))


def _source(node: fx.Node) -> tuple[fx.Node, int] | None:
    """(stacked tensor, index along dim 0) that `node` selects: from unbind, or select with a constant index."""
    index = None
    if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
        node, index = node.args[0], node.args[1]
        if node.target is not _aten.unbind.int:
            return None
    elif node.target is not _aten.select.int:
        return None
    bound = bind(node.target, node)
    if bound is None or bound["dim"] != 0 or fake_value(bound["self"]) is None:
        return None
    index, num = bound.get("index", index), fake_value(bound["self"]).shape[0]
    if not isinstance(index, int) or not isinstance(num, int):
        return None
    return bound["self"], index % num


def _insert(graph: fx.Graph, target: torch._ops.OpOverload, *args: Any) -> fx.Node:
    node = graph.call_function(target, args)
    node.meta["val"] = target(*fx.node.map_arg(args, fake_value))
    return node
