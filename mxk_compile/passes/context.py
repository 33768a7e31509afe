"""What the passes share during one run: settings, the report, and what may be assumed about the graph."""

from __future__ import annotations

import dataclasses

from torch import fx

from mxk_compile.passes.report import NodeReport, Report, logger, say_stock_once
from mxk_compile.settings import Settings


@dataclasses.dataclass
class Context:
    """One run of the passes over one graph and the graphs nested in it.

    Attributes:
        settings: what changes the rewrite.
        can_guard: whether guards on symbolic sizes are checked before each run of this graph.
        report: every MoE node met so far.
    """

    settings: Settings
    can_guard: bool = False
    report: Report = dataclasses.field(default_factory=Report)

    def add(self, node: NodeReport) -> None:
        """Records a decision and logs it: a fused node or a call over the cap for information, other reasons once."""
        self.report.nodes.append(node)
        if node.reason is None:
            logger.info("%s: %s (%s) fused, %s", node.layer, node.stock_op, node.desc, node.tokens)
        elif node.tokens:
            logger.info("%s: %s stays stock: %s", node.layer, node.stock_op, node.reason)
        else:
            say_stock_once(node.stock_op, node.reason)

    def layer_of(self, node: fx.Node) -> str:
        """Path of the module that made the call, e.g. `model.layers.3.mlp.experts`."""
        stack = node.meta.get("nn_module_stack") or {}
        path = list(stack.values())[-1][0] if stack else ""
        path = path.replace("L['self'].", "").replace("L['self']", "").replace("L['fn'].", "")
        return path.replace("._modules['", ".").replace("']", "") or node.name
