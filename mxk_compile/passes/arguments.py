"""Reading a node's call by its schema: positional, keyword and omitted arguments look alike afterwards."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx


def overload_of(node: fx.Node) -> torch._ops.OpOverload | None:
    """The overload that a call_function node runs, or None if it calls no torch op.

    Dynamo-level graphs hold the packet (`torch.ops.hpu.mixture_of_experts`), AOT graphs the overload; a packet is
    resolved by the argument names and count, as the overloads differ in those.
    """
    target = node.target
    if node.op != "call_function":
        return None
    if isinstance(target, torch._ops.OpOverload):
        return target
    if not isinstance(target, torch._ops.OpOverloadPacket):
        return None
    for name in target.overloads():
        overload: torch._ops.OpOverload = getattr(target, name)
        bound = bind(overload, node)
        if bound is not None and all(
            _fits(argument, bound[argument.name]) for argument in overload._schema.arguments
        ):
            return overload
    return None


def bind(overload: torch._ops.OpOverload, node: fx.Node) -> dict[str, Any] | None:
    """Arguments by schema name with defaults filled in, or None if the call does not fit the schema."""
    arguments = overload._schema.arguments
    positional = [argument for argument in arguments if not argument.kwarg_only]
    if len(node.args) > len(positional) or node.kwargs.keys() - {argument.name for argument in arguments}:
        return None
    bound = {argument.name: value for argument, value in zip(positional, node.args, strict=False)}
    if bound.keys() & node.kwargs.keys():
        return None
    bound.update(node.kwargs)
    for argument in arguments:
        if argument.name not in bound:
            if not argument.has_default_value():
                return None
            bound[argument.name] = argument.default_value
    return bound


def _fits(argument: torch._C.Argument, value: Any) -> bool:
    """Whether the kind of `value` (list, string, number, tensor) is the schema's; enough to tell overloads apart."""
    kind = str(argument.type)
    if value is None:
        return kind.startswith("Optional")
    if "List" in kind:
        return isinstance(value, (list, tuple))
    if "str" in kind:
        return isinstance(value, str)
    if "Tensor" in kind:
        return isinstance(value, fx.Node)
    return not isinstance(value, (list, tuple, str))


_IN_PLACE = {operator.setitem} | {
    getattr(operator, f"i{name}") for name in ("add", "sub", "mul", "truediv", "and", "or", "xor")
}


def mutates(node: fx.Node) -> bool:
    """Whether a node may write to a tensor: an op that says so, a method like `mul_`, an operator like `+=`."""
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.is_mutable
    if node.op == "call_method":
        return str(node.target).endswith("_")
    return node.target in _IN_PLACE


def fake_value(node: fx.Node) -> Any:
    """The fake tensor (or number) that a node stands for: `val` after AOT, `example_value` at Dynamo level, or None."""
    return node.meta.get("val", node.meta.get("example_value"))


def fake_arguments(value: Any) -> Any:
    """`value` with every node replaced by its fake value."""
    return fx.node.map_arg(value, fake_value)
