"""What was decided for each MoE node: the value that `explain`, the log and the tests read."""

from __future__ import annotations

import dataclasses
import functools
import logging

from mxk_compile.kernels.desc import KernelConfig, MoEDesc

logger = logging.getLogger("mxk_compile")


@dataclasses.dataclass
class NodeReport:
    """One MoE node.

    Attributes:
        layer: module path of the call, or the node's name where the graph knows no modules.
        stock_op: the overload that the model called.
        desc: the call's description, where it could be read.
        tokens: what was decided about T, and how.
        reason: why the stock node stayed, None if it was fused.
        kernel: what runs it, if fused.
    """

    layer: str
    stock_op: str
    desc: MoEDesc | None = None
    tokens: str = ""
    reason: str | None = None
    kernel: KernelConfig | None = None

    @property
    def fused(self) -> bool:
        """Whether the node was replaced."""
        return self.reason is None


@dataclasses.dataclass
class Report:
    """Every MoE node that the passes met, in graph order; printable as the rewrite table."""

    nodes: list[NodeReport] = dataclasses.field(default_factory=list)

    @property
    def num_fused(self) -> int:
        """How many nodes were replaced."""
        return sum(node.fused for node in self.nodes)

    def __str__(self) -> str:
        header = ("layer", "stock op", "call", "tokens", "runs on")
        rows = [header]
        for node in self.nodes:
            runs_on = str(node.kernel) if node.fused else f"stock: {node.reason}"
            rows.append((node.layer, node.stock_op, str(node.desc or "-"), node.tokens or "-", runs_on))
        widths = [max(len(row[column]) for row in rows) for column in range(len(header) - 1)]
        lines = [
            "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]])
            for row in rows
        ]
        return "\n".join([*lines, f"{self.num_fused} of {len(self.nodes)} MoE nodes fused"])


@functools.cache
def say_stock_once(stock_op: str, reason: str) -> None:
    """Logs, once a process, why a kind of node keeps the stock op."""
    logger.warning("%s stays stock: %s", stock_op, reason)
