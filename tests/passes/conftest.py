"""Graphs as the passes meet them, run through the passes, and rendered short enough to read as an expectation."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import fx
from torch._dynamo.backends.common import aot_autograd

from mxk_compile.backend import compile_with
from mxk_compile.passes import Report
from mxk_compile.settings import Settings


@dataclasses.dataclass
class Rewrite:
    """What one compiled call showed: graphs before and after as text, the report, and the result."""

    before: list[str]
    after: list[str]
    report: Report
    result: Any

    @property
    def reasons(self) -> list[str | None]:
        return [node.reason for node in self.report.nodes]


def render_graph(module: fx.GraphModule) -> str:
    """One line a node that is not an input: name, target, arguments."""
    lines = []
    for node in module.graph.nodes:
        if node.op == "placeholder":
            continue
        if node.op == "output":
            lines.append(f"return {node.args[0]}")
            continue
        arguments = [str(a) for a in node.args] + [f"{k}={v!r}" for k, v in node.kwargs.items()]
        target = getattr(node.target, "__name__", str(node.target))
        line = f"{node.name} = {target}({', '.join(arguments)})"
        lines.append(textwrap.fill(line, 110, subsequent_indent="    ", break_long_words=False))
    return "\n".join(lines)


def record_graphs(keep: Callable[[fx.GraphModule], None]) -> Callable[..., Any]:
    """An eager Dynamo backend that shows each AOT forward graph to `keep`."""

    def compile_forward(module: fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
        keep(module)
        return make_boxed_func(module.forward)

    return aot_autograd(fw_compiler=compile_forward)


def compile_and_run(
    backend: Callable[..., Any], fn: Callable[..., Any], *inputs: Any, dynamic: bool | None = None
) -> Any:
    torch._dynamo.reset()
    return torch.compile(fn, backend=backend, dynamic=dynamic)(*inputs)


@pytest.fixture
def rewrite() -> Callable[..., Rewrite]:
    """`rewrite(fn, *inputs)`: compiles and runs `fn` with the passes, an eager inner backend, and a fresh Dynamo."""

    def run(
        fn: Callable[..., Any], *inputs: Any, dynamic: bool | None = None, max_tokens: int | None = 32
    ) -> Rewrite:
        before: list[str] = []
        after: list[str] = []
        report = Report()

        def inner(module: fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
            after.append(render_graph(module))
            return module.forward

        backend = compile_with(inner, Settings(max_tokens=max_tokens), report)
        result = compile_and_run(backend, fn, *inputs, dynamic=dynamic)
        compile_and_run(record_graphs(lambda m: before.append(render_graph(m))), fn, *inputs, dynamic=dynamic)
        return Rewrite(before, after, report, result)

    return run


@pytest.fixture
def capture() -> Callable[..., fx.GraphModule]:
    """`capture(fn, *inputs, level="aot")`: the graph of one call, at "aot" or "dynamo" level, before any pass."""

    def run(fn: Callable[..., Any], *inputs: Any, level: str = "aot") -> fx.GraphModule:
        captured: list[fx.GraphModule] = []

        def keep_dynamo(module: fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
            captured.append(module)
            return module.forward

        compile_and_run(keep_dynamo if level == "dynamo" else record_graphs(captured.append), fn, *inputs)
        return captured[0]

    return run
