"""The token rule by itself: how a size was decided, and that undecidable sizes stay stock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StrictMinMaxConstraint
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.value_ranges import ValueRanges

from mxk_compile.ops.stock import call_mxfp4
from mxk_compile.passes import run_passes, token_rule
from mxk_compile.testing import random_case


def symbol(hint: int, low: int = 2, high: int | None = None) -> torch.SymInt:
    """A backed symbolic size with bounds, as Dynamo makes them."""
    environment = ShapeEnv()
    source = ConstantSource("T")
    bounds = StrictMinMaxConstraint(vr=ValueRanges(low, int_oo if high is None else high), warn_only=False)
    may_be_0_or_1 = {"positive": None, "do_not_specialize_zero_one": True} if low < 2 else {}
    expression = environment.create_symbol(
        hint, source, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=bounds, **may_be_0_or_1
    )
    size = environment.create_symintnode(expression, hint=hint, source=source)
    assert isinstance(size, torch.SymInt)
    return size


@pytest.mark.parametrize(
    ("num_tokens", "cap", "fused"),
    [(0, 32, True), (32, 32, True), (33, 32, False), (1, 0, False), (10**9, None, True)],
)
def test_static(num_tokens: int, cap: int | None, fused: bool) -> None:
    rule = token_rule.decide(num_tokens, cap, can_guard=False)
    assert (rule.reason is None) == fused
    assert str(num_tokens) in rule.text or cap is None


@pytest.mark.parametrize(("hint", "fused"), [(8, True), (64, False)])
def test_symbolic_installs_a_guard(hint: int, fused: bool) -> None:
    size = symbol(hint)
    environment = size.node.shape_env
    assert not environment.guards
    rule = token_rule.decide(size, 32, can_guard=True)
    assert (rule.reason is None) == fused
    assert "(guarded)" in rule.text
    expected = size.node.expr <= 32 if fused else size.node.expr > 32
    assert [guard.expr for guard in environment.guards] == [expected]


@pytest.mark.parametrize(("low", "high", "fused"), [(2, 32, True), (33, 100, False)])
def test_bounds_decide_without_a_guard(low: int, high: int, fused: bool) -> None:
    size = symbol(low, low, high)
    rule = token_rule.decide(size, 32, can_guard=False)
    assert (rule.reason is None) == fused
    assert "(bounds)" in rule.text
    assert not size.node.shape_env.guards


def test_hint_alone_never_decides() -> None:
    size = symbol(8)
    rule = token_rule.decide(size, 32, can_guard=False)
    assert rule.reason is not None
    assert rule.reason.endswith("nothing here checks a guard <= 32")
    assert not size.node.shape_env.guards


def test_size_that_depends_on_data() -> None:
    size = ShapeEnv().create_unbacked_symint()
    rule = token_rule.decide(size, 32, can_guard=True)
    assert rule.reason is not None
    assert "depends on data" in rule.reason


@pytest.mark.parametrize(("total", "fused"), [(64, False), (32, True)])
def test_graph_whose_tokens_depend_on_data(rewrite: Callable[..., Any], total: int, fused: bool) -> None:
    """Tokens picked by a mask: T is known to be at most the mask's length, and nothing is specialised."""
    case = random_case(num_tokens=total)

    def call(mask: Tensor, x: Tensor, ids: Tensor, weights: Tensor, *stacks: Tensor) -> Tensor:
        index = mask.nonzero()[:, 0]
        routing = x[index], ids[index], weights[index]
        return call_mxfp4(routing, *(stack.unbind(0) for stack in stacks))

    mask = torch.zeros(total)
    mask[[0, 2, 3]] = 1
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        found = rewrite(call, mask, *case.routing, *case.weights[:4])
    assert found.result.shape == (3, 128)
    assert [node.fused for node in found.report.nodes] == [fused]
    assert fused or "depends on data" in str(found.reasons[0])


def test_graph_without_shapes_stays_stock() -> None:
    """A bare traced graph carries no fake values: nothing can be known, so nothing is rewritten."""
    case = random_case(num_experts=2)

    def call(
        x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, s13: Tensor, w2: Tensor, s2: Tensor
    ) -> Tensor:
        return call_mxfp4((x, ids, weights), *([stack[0], stack[1]] for stack in (w13, s13, w2, s2)))

    module = fx.symbolic_trace(call)
    report = run_passes(module)
    assert [node.reason for node in report.nodes] == [
        "the graph carries no shapes (no 'val' or 'example_value' in its nodes)"
    ]
    inputs = *case.routing, *case.weights[:4]
    assert torch.equal(module(*inputs), call(*inputs))


@pytest.mark.parametrize(
    ("low", "can_guard", "fused", "guards"), [(0, True, True, 1), (0, False, False, 0), (1, False, True, 0)]
)
def test_fewest_tokens(low: int, can_guard: bool, fused: bool, guards: int) -> None:
    """T = 0 must never reach a kernel that needs a token: by bounds, else by a guard, else not at all."""
    size = symbol(8, low, 16)
    rule = token_rule.decide(size, 32, can_guard, fewest=1)
    assert (rule.reason is None) == fused
    assert len(size.node.shape_env.guards) == guards
    if not fused:
        assert rule.reason == "T may be below 1, the fewest tokens of the fused kernels"


def test_fewest_tokens_static() -> None:
    assert token_rule.decide(0, 32, True, fewest=1).reason is not None
    assert token_rule.decide(1, 32, True, fewest=1).reason is None
    assert token_rule.decide(0, 32, True).reason is None
