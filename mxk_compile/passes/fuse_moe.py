"""Stock MoE nodes in, `mxk::moe` nodes out.

    before                                                after
      w = aten.unbind(w13); w0 = w[0]; w1 = w[1]; ...       y = mxk.moe(x, ids, weights, w13, w13_scale, w2, w2_scale,
      y = hpu.mixture_of_experts.mxfp4_fused_weights(               weight_format="mxfp4", row_order="gate_up", ...)
            x, ids, weights, [w0, w1], [...], ...)

Lists that are graph inputs go to `mxk.moe.lists` as they are; float overloads are taken where every weight comes from
`hpu.convert_from_uint4` or `convert_from_int4`. A node that does not fit stays, and the report says why.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import fx

from mxk_compile.errors import CallError
from mxk_compile.kernels import MoEDesc, supports
from mxk_compile.passes import token_rule
from mxk_compile.passes.arguments import bind, fake_arguments, overload_of
from mxk_compile.passes.context import Context
from mxk_compile.passes.report import NodeReport
from mxk_compile.passes.stacks import is_restackable, restack
from mxk_compile.passes.stock_forms import ACTIVATIONS, ANY_VALUE, FORMS, ROUTING, StockForm

_WEIGHT_ARGUMENTS = ("w13", "w13_scale", "w2", "w2_scale", "w13_zero", "w2_zero", "w13_bias", "w2_bias")


class Declined(Exception):
    """The node stays stock, for the reason in the text."""


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
            _decide(call, report, context)
        except Declined as declined:
            report.reason = str(declined)
        else:
            _replace(module.graph, node, call)
            count += 1
        context.add(report)
    return count


def _read(overload: torch._ops.OpOverload, node: fx.Node) -> dict[str, Any]:
    """The node's call as arguments of `mxk::moe.lists`; raises Declined."""
    form = FORMS.get(overload._overloadname)
    if form is None:
        raise Declined(f"overload {overload._overloadname!r} is not one of {', '.join(FORMS)}")
    bound = bind(overload, node)
    if bound is None:
        raise Declined("the arguments do not fit the overload's schema")
    _check_flags(form, overload, bound)
    lists = {name: _nodes(name, bound[name]) for name in (*form.weights, *form.scales, *form.biases)}
    weights = [lists[name] for name in form.weights]
    call: dict[str, Any] = {
        "weight_format": form.weight_format,
        "row_order": form.row_order,
        "activation": form.activation or ACTIVATIONS.get(bound["activation"]),
        "pack_dim": form.pack_dim,
        "experts_min": bound["experts_min"],
    }
    if call["activation"] is None:
        raise Declined(f"activation {bound['activation']!r} is not one of {', '.join(ACTIVATIONS)}")
    if form.activation is not None:
        call["alpha"], call["limit"] = bound["alpha"], bound["limit"]
    num_experts = bound["experts_max"] - bound["experts_min"] + 1
    for name, values in lists.items():
        if len(values) != num_experts:
            raise Declined(f"{name} lists {len(values)} experts, experts_min..experts_max are {num_experts}")

    zeros: list[list[fx.Node]] = [[] for _ in weights]
    if form.weight_format is None:
        call["weight_format"], weights, scales, zeros = _read_conversions(weights)
    else:
        scales = [lists[name] for name in form.scales]
    for suffix, (*w13, w2) in (("", weights), ("_scale", scales), ("_zero", zeros)):
        call[f"w13{suffix}"], call[f"w2{suffix}"] = list(itertools.chain(*w13)), w2
    call["w13_bias"], call["w2_bias"] = [lists[name] for name in form.biases] or [[], []]
    call["routing"] = [bound[name] for name in ROUTING]
    return call


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


def _nodes(name: str, values: Any) -> list[fx.Node]:
    if not isinstance(values, (list, tuple)) or not all(isinstance(value, fx.Node) for value in values):
        raise Declined(f"{name} is not a list of tensors in the graph")
    return list(values)


def _read_conversions(weights: list[list[fx.Node]]) -> tuple[str, list[Any], list[Any], list[Any]]:
    """Packed weights, scales and zero points behind float weights that all are conversions of one kind."""
    kinds = set()
    result: list[list[list[fx.Node]]] = [[], [], []]
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
        for target, argument in zip(result, ("input", "scale", "zero_point"), strict=True):
            target.append([bound[argument] for bound in bounds if bound[argument] is not None])
    if len(kinds) != 1:
        raise Declined("conversions of several kinds feed one call")
    weight_format, without_zero = kinds.pop()
    if without_zero != (weight_format == "int4"):
        raise Declined(f"convert_from_{weight_format} {'without' if without_zero else 'with'} zero_point")
    return weight_format, result[0], result[1], result[2]


def _arguments(call: dict[str, Any], weights: list[Any]) -> tuple[list[Any], dict[str, Any]]:
    attributes = {k: v for k, v in call.items() if k not in _WEIGHT_ARGUMENTS and k != "routing"}
    return [*call["routing"], *weights], attributes


def _decide(call: dict[str, Any], report: NodeReport, context: Context) -> None:
    """Asks the token rule and `supports`; raises Declined."""
    args, attributes = _arguments(call, [call[name] for name in _WEIGHT_ARGUMENTS])
    fakes = fake_arguments(args)
    if any(value is None for value in fakes[:3]):
        raise Declined("the graph carries no shapes (no 'val' or 'example_value' in its nodes)")
    try:
        report.desc = MoEDesc.from_call(*fakes, **attributes)
    except CallError as error:
        raise Declined(str(error)) from error
    if (reason := supports(report.desc)) is not None:
        raise Declined(reason)
    rule = token_rule.decide(fakes[0].shape[0], context.settings.max_tokens, context.can_guard)
    report.token_rule = rule.text
    if rule.reason is not None:
        raise Declined(rule.reason)


def _replace(graph: fx.Graph, node: fx.Node, call: dict[str, Any]) -> None:
    lists = [call[name] for name in _WEIGHT_ARGUMENTS]
    with graph.inserting_before(node):
        if call["row_order"] != "separate" and all(not nodes or is_restackable(nodes) for nodes in lists):
            target = torch.ops.mxk.moe.default
            weights: list[Any] = [restack(graph, nodes) if nodes else None for nodes in lists]
        else:
            target, weights = torch.ops.mxk.moe.lists, lists
        args, attributes = _arguments(call, weights)
        fused = graph.call_function(target, tuple(args), attributes)
    # `eager_input_vals` are the stock node's inputs. Without them Inductor may choose layouts: any is accepted.
    fused.meta = {key: value for key, value in node.meta.items() if key != "eager_input_vals"}
    for key in ("val", "example_value"):
        if key in node.meta:
            fused.meta[key] = target(*fake_arguments(args), **attributes)
    node.replace_all_uses_with(fused)
    _erase(graph, node)


def _erase(graph: fx.Graph, node: fx.Node) -> None:
    """Erases `node` and every node that only it needed (conversions, unbind, select)."""
    inputs = node.all_input_nodes
    graph.erase_node(node)
    for producer in reversed(inputs):
        if producer.op == "call_function" and not producer.users and not producer.is_impure():
            _erase(graph, producer)
