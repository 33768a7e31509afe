"""The drawing of one MoE call before and after the passes, from the traced graph.

before   weights -> unbind -> getitem x many -> stock op          after   weights -> mxk::moe
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from mxk_compile.backend import compile_with
from mxk_compile.passes import Report
from mxk_compile.report import svg
from mxk_compile.settings import settings

_PANEL, _BOX, _STEP = 352.0, 34.0, 62.0
_DEPTH = 3
_MOE_OPS = ("hpu.", "mxk.")


@dataclasses.dataclass(frozen=True)
class Group:
    """Nodes of one kind, at one distance from the MoE call: what is drawn as one box."""

    label: str
    count: int
    names: tuple[str, ...]
    inputs: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Neighbourhood:
    """The MoE call, what feeds it and what it feeds.

    Attributes:
        levels: groups by distance, the farthest first; the last level is the call.
        consumers: operations that read the result.
        num_nodes, num_calls: nodes of the whole graph, and how many of them are MoE calls.
    """

    levels: tuple[tuple[Group, ...], ...]
    consumers: tuple[str, ...]
    num_nodes: int
    num_calls: int


def trace(
    function: Callable[..., Any], max_tokens: int | None, *inputs: Any, **kwargs: Any
) -> tuple[list[fx.Graph], Report]:
    """The graphs that reach the inner compiler, with calls of at most `max_tokens` tokens fused (0: none), and why."""
    graphs: list[fx.Graph] = []
    report = Report()

    def keep(module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        graphs.append(module.graph)
        return module.forward

    torch._dynamo.reset()
    backend = compile_with(keep, settings.replace(max_tokens=max_tokens), report)
    with torch.no_grad():
        torch.compile(function, backend=backend, dynamic=False)(*inputs, **kwargs)
    return graphs, report


def neighbourhood(graphs: Sequence[fx.Graph]) -> Neighbourhood | None:
    """Around the first MoE call; None where there is none."""
    calls = [node for graph in graphs for node in graph.nodes if _is_moe(node)]
    if not calls:
        return None
    levels: list[list[fx.Node]] = [[calls[0]]]
    seen = {calls[0]}
    while len(levels) <= _DEPTH:
        # What feeds the activations and the router goes on and on: only weights are followed further.
        start = [node for node in levels[-1] if len(levels) == 1 or _of_weights(node)]
        found = [node for each in start for node in each.all_input_nodes]
        fresh = [node for node in dict.fromkeys(found) if node not in seen]
        if not fresh:
            break
        seen.update(fresh)
        levels.append(fresh)
    consumers = tuple(dict.fromkeys(_operation(user) for user in calls[0].users))
    nodes = sum(len(graph.nodes) for graph in graphs)
    return Neighbourhood(tuple(_group(levels)), consumers, nodes, len(calls))


def _is_moe(node: fx.Node) -> bool:
    name = str(node.target)
    return node.op == "call_function" and name.startswith(_MOE_OPS) and ("moe" in name or "mixture" in name)


def _operation(node: fx.Node) -> str:
    if node.op == "placeholder":
        return "input"
    name = getattr(node.target, "__name__", None) or str(node.target)
    return str(node.target) if _is_moe(node) else str(name).partition(".")[0]


def _kind(node: fx.Node) -> str:
    """The operation; for one that only picks a part, also of what."""
    name = _operation(node)
    sources = node.all_input_nodes
    return f"{name} of {_operation(sources[0])}" if name == "getitem" and sources else name


def _of_weights(node: fx.Node) -> bool:
    """Whether a node only takes a weight apart: all that it comes from are views of inputs."""
    return _operation(node) in ("getitem", "unbind", "view", "select", "t", "transpose")


def _group(levels: list[list[fx.Node]]) -> list[tuple[Group, ...]]:
    """Groups of each level, the farthest first, with the places of their inputs one level up."""
    grouped: list[tuple[Group, ...]] = []
    above: dict[fx.Node, int] = {}
    for level in reversed(levels):
        kinds: dict[str, list[fx.Node]] = {}
        for node in level:
            kinds.setdefault(_kind(node), []).append(node)
        groups = []
        for label, nodes in kinds.items():
            inputs = sorted(
                {above[source] for node in nodes for source in node.all_input_nodes if source in above}
            )
            groups.append(Group(label, len(nodes), tuple(node.name for node in nodes), tuple(inputs)))
        above = {node: place for place, nodes in enumerate(kinds.values()) for node in nodes}
        grouped.append(tuple(groups))
    return grouped


def draw(before: Neighbourhood, after: Neighbourhood) -> str:
    """Both side by side."""
    heights = [_height(side) for side in (before, after)]
    height = max(heights) + 40
    parts: list[str] = []
    for index, (title, side) in enumerate((("before", before), ("after", after))):
        left = index * (_PANEL + 16)
        calls = f"{side.num_nodes} nodes in the graph, {side.num_calls} MoE calls"
        parts += [
            svg.rect(left, 0, _PANEL, height, "raised", radius=6),
            svg.text(left + 14, 22, title, bold=True, size=13),
            svg.text(left + 68, 22, calls, colour="soft", size=11),
        ]
        parts += _panel(side, left, height - heights[index])
    return svg.drawing(parts, 2 * _PANEL + 16, height, "the MoE call before and after")


def _height(side: Neighbourhood) -> float:
    return (len(side.levels) + 1) * _STEP


def _panel(side: Neighbourhood, left: float, top: float) -> list[str]:
    boxes: list[str] = []
    lines: list[str] = []
    places: list[tuple[float, float]] = []
    y = top
    for depth, level in enumerate(side.levels):
        width = (_PANEL - 28 - 8 * (len(level) - 1)) / len(level)
        here = []
        for place, group in enumerate(level):
            x = left + 14 + place * (width + 8)
            colour = _colour(group.label, is_call=depth == len(side.levels) - 1)
            label = group.label if group.count == 1 else f"{group.count} × {group.label}"
            shown = ", ".join(group.names[:12]) + (" …" if group.count > 12 else "")
            boxes.append(svg.rect(x, y, width, _BOX, colour, f"{label}: {shown}", radius=5))
            words = svg.fit(label.removeprefix("hpu.").removeprefix("mixture_of_experts."), width - 8)
            inside = "paper" if colour != "line" else "ink"
            boxes.append(svg.text(x + width / 2, y + 21, words, anchor="middle", colour=inside, size=11))
            lines += [
                svg.path([places[source], (x + width / 2, y)], "soft", width=1)
                for source in group.inputs
                if source < len(places)
            ]
            here.append((x + width / 2, y + _BOX))
        places = here
        y += _STEP
    reads = svg.fit("read by " + (", ".join(side.consumers) or "the output"), _PANEL - 28, 11)
    lines.append(svg.path([places[0], (places[0][0], y)], "soft", width=1))
    boxes.append(svg.text(left + _PANEL / 2, y + 16, reads, anchor="middle", colour="soft", size=11))
    return lines + boxes


def _colour(label: str, *, is_call: bool) -> str:
    if not is_call:
        return "line"
    return "fused" if label.startswith("mxk.") else "stock"
