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
    text = "any T"
    if cap is not None:
        tokens = f"T={num_tokens.node.expr if isinstance(num_tokens, torch.SymInt) else num_tokens}"
        fits, how = _ask(num_tokens <= cap, can_guard)
        if fits is None:
            return TokenRule(f"{tokens} ? {cap}", f"{tokens} {how} <= {cap}")
        text = f"{tokens} {'<=' if fits else '>'} {cap} ({how})"
        if not fits:
            return TokenRule(text, f"{tokens} > {cap}, the cap of the fused kernels")
    if not _ask(num_tokens >= fewest, can_guard)[0]:
        return TokenRule(text, f"T may be below {fewest}, the fewest tokens of the fused kernels")
    return TokenRule(text)


def _ask(condition: Any, can_guard: bool) -> tuple[bool | None, str]:
    """Whether a condition on T holds in every run of the graph, and how that is known; None, and why it is not."""
    if not isinstance(condition, torch.SymBool):
        return bool(condition), "static"
    if symbolic_shapes.statically_known_true(condition):
        return True, "bounds"
    if symbolic_shapes.statically_known_true(torch.sym_not(condition)):
        return False, "bounds"
    if symbolic_shapes.has_free_unbacked_symbols(condition):
        return None, "depends on data: not known to be"
    if not can_guard:
        return None, "is symbolic and nothing here checks a guard"
    return bool(condition), "guarded"
