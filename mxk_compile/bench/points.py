"""What is timed: a `Point` names one call; a suite is a list of them."""

from __future__ import annotations

import dataclasses

from mxk_compile.kernels.tpc.published import PUBLISHED
from mxk_compile.variants import VARIANTS

DEVICES = ("cpu", "cuda", "tpc-modelled")
ROUTINGS = ("random", "hot", "router", "even")
SUITES = ("document", "chord", "sweep")
DEFAULT_VARIANT = "gptoss"
ALL_EXPERTS = {
    "gptoss": 128,
    "glm": 256,
    "dsv41": 384,
    "muse": 256,
    "kimi": 384,
    "kimi_int4": 384,
    "mimo": 384,
}
"""Experts of a layer over all cards (the published write-up; MiMo: 48 a card at TP 8)."""
_SWEEP_TOKENS = tuple(2**n for n in range(10))
_QUICK_EXPERTS = 8
_QUICK_TOKENS = (1, 8)


@dataclasses.dataclass(frozen=True)
class Point:
    """One call of a layer.

    Attributes:
        variant: model row of variants.py.
        num_experts: local experts, E.
        num_tokens: T.
        routing: "random" over all experts of the layer, "hot" over the local ones alone, "router" by a linear router
            whose experts differ in popularity, "even" dealt to the local ones in turn.
        local_routes: routes to local experts that the draw shall have; None: as many as expected.
        seed: of weights, activations and routing.
    """

    variant: str
    num_experts: int
    num_tokens: int
    routing: str
    local_routes: int | None = None
    seed: int = 0

    @property
    def all_experts(self) -> int:
        """Experts that the routing chooses from."""
        return max(self.num_experts, ALL_EXPERTS[self.variant])

    @property
    def all_local(self) -> bool:
        """Whether every route is to be local."""
        return self.routing in ("hot", "even")

    @property
    def top_k(self) -> int:
        """Routes a token; at most the local experts where all are to be local."""
        top_k = VARIANTS[self.variant].top_k
        return min(top_k, self.num_experts) if self.all_local else top_k

    def __str__(self) -> str:
        return f"{self.variant} E={self.num_experts} T={self.num_tokens} {self.routing}"


def points(variants: list[str], experts: int | None, tokens: list[int], routings: list[str]) -> list[Point]:
    """Every combination, in that order; `experts` None: those of the model row."""
    return [
        Point(name, experts or VARIANTS[name].num_experts, num_tokens, routing)
        for name in variants
        for routing in routings
        for num_tokens in tokens
    ]


def document(variants: list[str] | None) -> list[Point]:
    """The published tables, call by call, with the published number of local routes."""
    return [
        Point(row.variant, row.num_experts, row.num_tokens, row.routing, row.local_routes)
        for row in PUBLISHED
        if variants is None or row.variant in variants
    ]


def sweep(variants: list[str] | None, experts: int | None) -> list[Point]:
    """T from 1 to 512, all routes local: where the fused kernel stops to pay, and what binds it."""
    return points(variants or [DEFAULT_VARIANT], experts, list(_SWEEP_TOKENS), ["hot"])


def quick(variants: list[str] | None, experts: int | None, tokens: list[int] | None) -> list[Point]:
    """A handful of calls of a layer with few experts."""
    chosen = variants or [DEFAULT_VARIANT]
    return points(chosen, experts or _QUICK_EXPERTS, tokens or list(_QUICK_TOKENS), ["random", "hot"])
