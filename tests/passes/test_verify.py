"""`verify` accepts what the passes leave and refuses a graph whose metadata lies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from mxk_compile.errors import GraphError
from mxk_compile.ops.stock import call_mxfp4
from mxk_compile.passes import run_passes
from mxk_compile.passes.verify import verify
from mxk_compile.testing import random_case


@pytest.fixture
def fused(capture: Callable[..., fx.GraphModule]) -> tuple[fx.GraphModule, fx.Node]:
    case = random_case(num_experts=2)

    def call(x: Tensor, ids: Tensor, weights: Tensor, *stacks: Tensor) -> Tensor:
        return call_mxfp4((x, ids, weights), *(stack.unbind(0) for stack in stacks))

    module = capture(call, *case.routing, *case.weights[:4])
    run_passes(module)
    return module, next(n for n in module.graph.nodes if n.target is torch.ops.mxk.moe.default)


def test_accepts_what_the_passes_leave(fused: tuple[fx.GraphModule, fx.Node]) -> None:
    verify(fused[0])


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda val: None, "shape None"),
        (lambda val: val.new_empty(4, 160), r"shape torch.Size\(\[4, 160\]\)"),
        (lambda val: val.float(), "dtype torch.float32"),
        (lambda val: val.new_empty_strided((4, 128), (1, 4)), r"stride \(1, 4\)"),
    ],
)
def test_refuses_metadata_that_lies(
    fused: tuple[fx.GraphModule, fx.Node], change: Callable[[Any], Any], text: str
) -> None:
    module, node = fused
    changed = change(node.meta.pop("val"))
    if changed is not None:
        node.meta["val"] = changed
    with pytest.raises(GraphError, match=text):
        verify(module)
