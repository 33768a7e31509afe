"""`mxk::moe` nodes to what runs them on their device.

cpu, cuda   the node stays, and calls the kernels of kernels/<device> at run time
hpu         the node becomes the sequence of kernels/tpc: a bridge compiles only ops that it knows into its clusters

    before                                      after (K = 2880)
      y = mxk.moe(x, ids, weights, w13,           p = constant_pad_nd(x, [0, 192], 0.0); v = view(p, [-1, 6, 128, 4])
            s13, w2, s2, None, None, b13, b2,     c = clone(permute(v, [0, 1, 3, 2])); xp = view(c, [-1, 3072])
            row_order="interleaved", ...)         rw = _to_copy(weights, dtype=float32); b13, b2 likewise
                                                  a = custom_op.mxk_w13xib(xp, ids, w13, s13, b13, 0, 1.702, 7.0)
                                                  y = custom_op.mxk_w2xb(a, ids, rw, w2, s2, b2, 0)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from mxk_compile.errors import CallError
from mxk_compile.kernels import MoEDesc, select, supports, tpc
from mxk_compile.kernels.select import token_range
from mxk_compile.passes import token_rule
from mxk_compile.passes.arguments import fake_arguments, fake_value
from mxk_compile.passes.context import Context
from mxk_compile.passes.inline import replace_by_trace
from mxk_compile.passes.report import say_stock_once


def lower_moe(module: fx.GraphModule, context: Context) -> int:
    """Names the kernel of every fused node in the report; returns how many nodes it lowered, which is none off hpu."""
    for report in context.report.nodes:
        if report.fused and report.kernel is None:
            assert report.desc is not None  # fuse_moe describes what it fuses
            report.kernel = select(report.desc)
    nodes = [node for node in module.graph.nodes if node.target is torch.ops.mxk.moe.default]
    return sum(_lower(module.graph, node, context) for node in nodes)


def _lower(graph: fx.Graph, node: fx.Node, context: Context) -> bool:
    """Lowers one node that the Gaudi kernels run; others stay, and run eagerly there."""
    if fake_value(node) is None:
        return False
    try:
        kwargs: dict[str, Any] = dict(node.kwargs)
        desc = MoEDesc.from_call(*fake_arguments(node.args), **kwargs)
    except CallError:  # a node of the model's own; it raises when it runs
        return False
    if desc.device != "hpu" or supports(desc) is not None:
        return False
    if (reason := tpc.misfit(desc, fake_arguments(node.args[3:]))) is not None:
        say_stock_once("mxk::moe", reason)
        return False
    # Asked again for nodes that the model holds itself; of those from fuse_moe, T is known to fit by now.
    fewest, most = token_range(desc)
    num_tokens = fake_arguments(node.args[0]).shape[0]
    if token_rule.decide(num_tokens, most, context.can_guard, fewest).reason is not None:
        return False
    scalars = {name: kwargs[name] for name in ("alpha", "limit", "experts_min") if name in kwargs}
    inputs = [value for value in node.args if isinstance(value, fx.Node)]
    # The tensors of the call in order; absent ones are None in the node too.
    present = [isinstance(value, fx.Node) for value in node.args]

    def call(*tensors: Tensor) -> Tensor:
        given = iter(tensors)
        arguments: list[Any] = [next(given) if is_there else None for is_there in present]
        return tpc.sequence(desc, *arguments, **scalars)

    replace_by_trace(graph, node, call, inputs)
    return True
