"""`verify` accepts what the passes leave and refuses a graph whose metadata lies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from mxk_compile.errors import GraphError
from mxk_compile.passes import run_passes
from mxk_compile.passes.verify import verify
from mxk_compile.testing import random_case


@pytest.fixture
def fused(capture: Callable[..., fx.GraphModule]) -> tuple[fx.GraphModule, fx.Node]:
    case = random_case(num_experts=2)

    def call(x: Tensor, ids: Tensor, weights: Tensor, *stacks: Tensor) -> Tensor:
        lists = [stack.unbind(0) for stack in stacks]
        return torch.ops.hpu.mixture_of_experts.mxfp4_fused_weights(
            x, ids, weights, *lists, block_size=32, permuted_weights=True, activation="silu", experts_min=0,
            experts_max=1, is_fp4=True,
        )  # fmt: skip

    module = capture(call, *case.routing, case.w13, case.w2, case.w13_scale, case.w2_scale)
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
