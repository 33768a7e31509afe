"""The token rule: may this call be fused, given its number of tokens? Decided so that the decision stays true."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch.fx.experimental import symbolic_shapes


@dataclasses.dataclass(frozen=True)
class TokenRule:
    """Outcome: `reason` is None if the call may be fused; `text` says what was decided, and how."""

    text: str
    reason: str | None = None


def decide(num_tokens: Any, cap: int | None, can_guard: bool, fewest: int = 0) -> TokenRule:
    """Compares T with the cap of the fused kernels, and with the fewest tokens that they take.

    A static T is compared at compile time. A symbolic T that the known bounds do not decide is compared by evaluating
    the symbolic expression, which installs a guard: the graph that was fused is never run with T > cap, nor the
    other way round. Where no guard can be installed (`can_guard` false: export, ahead-of-time compilation) or T
    depends on data, the stock node stays. The hint alone never decides.

    Args:
        num_tokens: int or SymInt.
        cap: largest T that may be fused, None for no cap.
        can_guard: whether guards of this graph's shape environment are checked before each run.
        fewest: smallest T that may be fused.
    """
    rule = _at_most(num_tokens, cap, can_guard)
    if rule.reason is None and not _holds(num_tokens >= fewest, can_guard):
        return TokenRule(rule.text, f"T may be below {fewest}, the fewest tokens of the fused kernels")
    return rule


def _at_most(num_tokens: Any, cap: int | None, can_guard: bool) -> TokenRule:
    if cap is None:
        return TokenRule("any T")
    if not isinstance(num_tokens, torch.SymInt):
        return _outcome(int(num_tokens) <= cap, f"T={num_tokens}", cap, "static")
    expression = f"T={num_tokens.node.expr}"
    if symbolic_shapes.statically_known_true(num_tokens <= cap):
        return _outcome(True, expression, cap, "bounds")
    if symbolic_shapes.statically_known_true(num_tokens > cap):
        return _outcome(False, expression, cap, "bounds")
    if symbolic_shapes.has_free_unbacked_symbols(num_tokens):
        return TokenRule(f"{expression} ? {cap}", f"{expression} depends on data: not known to be <= {cap}")
    if not can_guard:
        return TokenRule(
            f"{expression} ? {cap}", f"{expression} is symbolic and nothing here checks a guard <= {cap}"
        )
    return _outcome(bool(num_tokens <= cap), expression, cap, "guarded")


def _holds(condition: Any, can_guard: bool) -> bool:
    """Whether a condition on T is true in every run of the graph, by a guard if need be."""
    if not isinstance(condition, torch.SymBool):
        return bool(condition)
    if symbolic_shapes.statically_known_true(condition):
        return True
    if not can_guard or symbolic_shapes.has_free_unbacked_symbols(condition):
        return False
    return bool(condition)


def _outcome(fused: bool, tokens: str, cap: int, how: str) -> TokenRule:
    if fused:
        return TokenRule(f"{tokens} <= {cap} ({how})")
    return TokenRule(f"{tokens} > {cap} ({how})", f"{tokens} > {cap}, the cap of the fused kernels")
