"""Stock MoE nodes in, `mxk::moe` nodes out.

    before                                                after
      w = aten.unbind(w13); w0 = w[0]; w1 = w[1]; ...       y = mxk.moe(x, ids, weights, w13, w13_scale, w2, w2_scale,
      y = hpu.mixture_of_experts.mxfp4_fused_weights(               weight_format="mxfp4", row_order="gate_up", ...)
            x, ids, weights, [w0, w1], [...], ...)

Lists that are graph inputs go to `mxk.moe.lists` as they are; float overloads are taken where every weight comes from
`hpu.convert_from_uint4` or `convert_from_int4`. A node that does not fit stays, and the report says why.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import fx

from mxk_compile.errors import CallError
from mxk_compile.kernels import MoEDesc, supports
from mxk_compile.kernels.select import select, stacked_only, token_range
from mxk_compile.ops.moe import WEIGHTS
from mxk_compile.passes import token_rule
from mxk_compile.passes.arguments import bind, fake_arguments, mutates, overload_of
from mxk_compile.passes.context import Context
from mxk_compile.passes.inline import inherit_origin
from mxk_compile.passes.report import NodeReport
from mxk_compile.passes.stacks import RegisteredStack, Stack, find_registered, find_stack
from mxk_compile.passes.stock_forms import ANY_VALUE, FORMS, ROUTING, StockForm

Nodes = list[fx.Node]
Stacks = list[Stack | RegisteredStack | None]


class Declined(Exception):
    """The node stays stock, for the reason in the text."""


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of `mxk::moe.lists`: routing, the eight weight lists in schema order, attributes."""

    routing: list[fx.Node]
    weights: list[Nodes]
    attributes: dict[str, Any]


def fuse_moe(module: fx.GraphModule, context: Context) -> int:
    """Rewrites every stock MoE node of one graph that a fused kernel runs; returns how many."""
    count = 0
    for node in list(module.graph.nodes):
        overload = overload_of(node)
        if overload is None or overload._schema.name != "hpu::mixture_of_experts":
            continue
        report = NodeReport(context.layer_of(node), overload._overloadname)
        try:
            call = _read(overload, node)
            desc = _decide(call, report, context)
            stacks = _find_stacks(call, desc)
        except Declined as declined:
            report.reason = str(declined)
        else:
            _replace(module.graph, node, call, stacks)
            count += 1
        context.add(report)
    return count


def _read(overload: torch._ops.OpOverload, node: fx.Node) -> Call:
    """The stock node's call in terms of `mxk::moe.lists`; raises Declined."""
    form = FORMS.get(overload._overloadname)
    if form is None:
        raise Declined(f"overload {overload._overloadname!r} is not one of {', '.join(FORMS)}")
    bound = bind(overload, node)
    if bound is None:
        raise Declined("the arguments do not fit the overload's schema")
    _check_flags(form, overload, bound)
    attributes: dict[str, Any] = {
        "weight_format": form.weight_format,
        "row_order": form.row_order,
        "activation": form.activation or bound["activation"],
        "pack_dim": form.pack_dim,
        "experts_min": bound["experts_min"],
    }
    if form.activation is not None:
        attributes |= {"alpha": bound["alpha"], "limit": bound["limit"]}
    elif attributes["activation"] != "silu":
        raise Declined(f"activation {bound['activation']!r}, a fused kernel needs 'silu'")
    num_experts = bound["experts_max"] - bound["experts_min"] + 1
    lists = {name: _nodes(name, bound[name]) for name in (*form.weights, *form.scales, *form.biases)}
    for name, values in lists.items():
        if len(values) != num_experts:
            raise Declined(f"{name} lists {len(values)} experts, experts_min..experts_max are {num_experts}")

    packed = [lists[name] for name in form.weights]
    scales = [lists[name] for name in form.scales]
    zeros: list[Nodes] = [[] for _ in packed]
    if form.weight_format is None:
        _check_unchanged(packed, node)
        attributes["weight_format"], packed, scales, zeros = _read_conversions(packed)
    biases = [lists[name] for name in form.biases] or [[], []]
    # Gate and up of separate lists are one w13 list: all gates, then all ups.
    w13, w13_scale, w13_zero = ([node for nodes in v[:-1] for node in nodes] for v in (packed, scales, zeros))
    weights = [w13, w13_scale, packed[-1], scales[-1], w13_zero, zeros[-1], *biases]
    return Call([bound[name] for name in ROUTING], weights, attributes)


def _check_flags(form: StockForm, overload: torch._ops.OpOverload, bound: dict[str, Any]) -> None:
    for argument in overload._schema.arguments:
        name, value = argument.name, bound[argument.name]
        if name in (*ROUTING, *form.weights, *form.scales, *form.biases):
            continue
        if name in form.flags:
            if value != form.flags[name]:
                raise Declined(f"{name}={value!r}, a fused kernel needs {form.flags[name]!r}")
        elif name not in ANY_VALUE:
            if not argument.has_default_value() or value != argument.default_value:
                raise Declined(f"argument {name}={value!r} is not known to this version")
        elif isinstance(value, (fx.Node, torch.SymInt, torch.SymFloat)):
            raise Declined(f"{name} is computed in the graph, a fused kernel needs a constant")


def _nodes(name: str, values: Any) -> Nodes:
    if not isinstance(values, (list, tuple)) or not all(isinstance(value, fx.Node) for value in values):
        raise Declined(f"{name} is not a list of tensors in the graph")
    return list(values)


def _check_unchanged(weights: list[Nodes], node: fx.Node) -> None:
    """Declines where something is mutated after the weights were made: a fused kernel reads what they were made of.

    AOT graphs are functional up to here; exported and Dynamo-level ones need not be.
    """
    pending = {value for values in weights for value in values}
    current = node.prev
    while pending and current.op != "root":
        pending.discard(current)
        if mutates(current):
            raise Declined(f"{current.name} mutates a tensor between the weights and their use")
        current = current.prev


def _read_conversions(weights: list[Nodes]) -> tuple[str, list[Nodes], list[Nodes], list[Nodes]]:
    """Format, packed weights, scales and zero points behind float weights that all are conversions of one kind."""
    kinds = set()
    result: tuple[list[Nodes], list[Nodes], list[Nodes]] = ([], [], [])
    for values in weights:
        bounds = []
        for value in values:
            overload = overload_of(value)
            name = overload._schema.name if overload is not None else ""
            if overload is None or name not in ("hpu::convert_from_uint4", "hpu::convert_from_int4"):
                raise Declined("the weights are floating point, not packed 4-bit")
            bound = bind(overload, value)
            if bound is None or bound.get("group_index") is not None or bound["out_dtype"] != torch.bfloat16:
                raise Declined(f"{name} with a group_index or an out_dtype other than bfloat16")
            kinds.add((name.removeprefix("hpu::convert_from_"), bound["zero_point"] is None))
            bounds.append(bound)
        for found, argument in zip(result, ("input", "scale", "zero_point"), strict=True):
            found.append([bound[argument] for bound in bounds if bound[argument] is not None])
    if len(kinds) != 1:
        raise Declined("conversions of several kinds feed one call")
    weight_format, without_zero = kinds.pop()
    # Unsigned codes without a zero point are 0..15 to the stock op, -8..7 to ours; signed ones take none here.
    if without_zero != (weight_format == "int4"):
        raise Declined(f"convert_from_{weight_format} {'without' if without_zero else 'with'} zero_point")
    return weight_format, *result


def _decide(call: Call, report: NodeReport, context: Context) -> MoEDesc:
    """Asks `supports` and the token rule; raises Declined."""
    fakes = fake_arguments([*call.routing, *call.weights])
    if any(value is None for value in fakes[:3]):
        raise Declined("the graph carries no shapes (no 'val' or 'example_value' in its nodes)")
    try:
        report.desc = MoEDesc.from_call(*fakes, **call.attributes)
    except CallError as error:
        raise Declined(str(error)) from error
    if (reason := supports(report.desc)) is not None:
        raise Declined(reason)
    fewest, most = token_range(report.desc)
    caps = [cap for cap in (context.settings.max_tokens, most) if cap is not None]
    rule = token_rule.decide(fakes[0].shape[0], min(caps, default=None), context.can_guard, fewest)
    report.tokens = rule.text
    if rule.reason is not None:
        if most is None:
            raise Declined(rule.reason)
        allowed = f"{select(report.desc)}: {fewest} to {most} tokens with top_k {report.desc.top_k}"
        raise Declined(f"{rule.reason} ({allowed})")
    return report.desc


def _find_stacks(call: Call, desc: MoEDesc) -> Stacks:
    """For each weight list the stack behind it, None where there is none; raises Declined where one is needed."""
    stacks: Stacks = [find_stack(nodes) for nodes in call.weights]
    if not stacked_only(desc):
        return stacks
    for index, nodes in enumerate(call.weights):
        if nodes and stacks[index] is None:
            stacks[index] = find_registered(nodes)
            if stacks[index] is None:
                raise Declined(
                    f"{WEIGHTS[index]} is a list of {len(nodes)} tensors, the kernels of device {desc.device!r} "
                    "take stacked experts; keep them stacked, and call register_stacks(model) after loading"
                )
    return stacks


def _replace(graph: fx.Graph, node: fx.Node, call: Call, stacks: Stacks) -> None:
    with graph.inserting_before(node):
        target: torch._ops.OpOverload = torch.ops.mxk.moe.lists
        weights: list[Any] = call.weights
        if call.attributes["row_order"] != "separate" and all(
            stack or not nodes for stack, nodes in zip(stacks, call.weights, strict=True)
        ):
            target, weights = torch.ops.mxk.moe.default, [stack and stack.insert(graph) for stack in stacks]
        args: tuple[Any, ...] = (*call.routing, *weights)
        fused = graph.call_function(target, args, call.attributes)
    for weight in weights:
        if isinstance(weight, fx.Node) and weight.op == "call_function":
            inherit_origin(weight, node)
    # `eager_input_vals` are the stock node's inputs; without them Inductor may choose any layout, and any is accepted.
    fused.meta = {key: value for key, value in node.meta.items() if key != "eager_input_vals"}
    for key in ("val", "example_value"):
        if key in node.meta:
            fused.meta[key] = target(*fake_arguments(args), **call.attributes)
    node.replace_all_uses_with(fused)
    _erase(graph, node)


def _erase(graph: fx.Graph, node: fx.Node) -> None:
    """Erases `node` and every node that only it needed (conversions, unbind, select)."""
    inputs = node.all_input_nodes
    graph.erase_node(node)
    for producer in reversed(inputs):
        if producer.op == "call_function" and not producer.users and not producer.is_impure():
            _erase(graph, producer)
