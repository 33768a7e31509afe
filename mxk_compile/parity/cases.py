"""The calls that parity runs, and what their results are held against.

Each variant runs at its per-card K and I, full size, with fewer experts than a card holds (their number changes nothing
but memory): eight of sixteen are local.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from mxk_compile.checkout import CHECKOUT
from mxk_compile.checkpoint import Checkpoint
from mxk_compile.kernels import MoEDesc, tpc
from mxk_compile.ops.formats import mxfp4
from mxk_compile.ops.formats.nibbles import as_words, pack_nibbles
from mxk_compile.testing import MoECase, rel_l2, variant_case
from mxk_compile.variants import VARIANTS, MoEVariant

LOCAL_EXPERTS, ALL_EXPERTS, FIRST_LOCAL = 8, 16, 4
_ROUTER_MODEL = CHECKOUT / "models" / "tiny-gptoss"

ROWS = {
    **VARIANTS,
    "int4": dataclasses.replace(VARIANTS["glm"], name="int4", models="INT4, group 32", weight_format="uint4"),
    "wna16": dataclasses.replace(
        VARIANTS["glm"],
        name="wna16",
        models="INT4 along the outputs",
        weight_format="uint4",
        hidden_size=4096,
    ),
}
"""What can be named: the model rows, and a row for each build of kernels that no model row has. "wna16" at a K of
Qwen3-MoE's size."""
_WEIGHTS: dict[str, dict[str, Any]] = {"wna16": {"pack_dim": "output", "zero": True}}

Run = Callable[[Sequence[MoECase]], list[Tensor]]
"""Results of some cases whose calls are in one graph."""


def kernels_of(name: str) -> str:
    """The kernels' variant (signatures.py) that runs a row."""
    return "glm" if name == "mimo" else name


@dataclasses.dataclass(frozen=True, eq=False)
class Source:
    """The weights that calls are made of.

    Attributes:
        variant: attributes and sizes; those of the weights where they are a checkpoint's.
        weights: a call with them; its activations and routes are not used.
        num_experts: experts that routes are drawn from; those of `weights` are local.
        router: logits [T, num_experts] of a router on activations [T, K], or None.
    """

    variant: MoEVariant
    weights: MoECase
    num_experts: int
    router: Callable[[Tensor], Tensor] | None = None

    @property
    def local(self) -> slice:
        """The local experts among all."""
        first = int(self.weights.attributes["experts_min"])
        return slice(first, first + len(self.weights.w2))


@functools.lru_cache(maxsize=2)
def random_source(variant: MoEVariant, seed: int = 0) -> Source:
    """Random weights of a row; kept, since a large row takes seconds to draw."""
    given = _WEIGHTS.get(variant.name, {})
    sizes = {
        "num_experts": LOCAL_EXPERTS,
        "experts_min": FIRST_LOCAL,
        "num_tokens": 1,
        "top_k": variant.top_k,
    }
    case = variant_case(variant, **sizes, **given, seed=seed)
    if (
        case.w13_zero is not None and case.w2_zero is not None
    ):  # as WNA16 has them: packed, one for all experts
        case.w13_zero, case.w2_zero = map(_shared_zero, (case.w13_zero, case.w2_zero))
    return Source(variant, case, ALL_EXPERTS, _router_logits if variant.name == "gptoss" else None)


def _shared_zero(zero: Tensor) -> Tensor:
    words = as_words(pack_nibbles(zero[0]))
    return words.expand(len(zero), *words.shape)


def make_case(
    variant: MoEVariant,
    num_tokens: int,
    routing: str,
    rms: float,
    seed: int = 0,
    source: Source | None = None,
) -> MoECase:
    """One call; the same weights for every T, routing and RMS of one seed, or those of `source`.

    routing: "random" over all experts, "hot" over the local ones, "router" by the logits of a trained router.
    """
    source = source or random_source(variant, seed)
    size = source.variant.hidden_size
    generator = torch.Generator().manual_seed(1000 + seed)
    hidden_states = (torch.randn(num_tokens, size, generator=generator) * rms).bfloat16()
    if routing == "router":
        assert source.router is not None
        logits = source.router(hidden_states)
    else:
        logits = torch.randn(num_tokens, source.num_experts, generator=generator)
        if routing == "hot":
            local = logits[:, source.local].clone()
            logits.fill_(float("-inf"))[:, source.local] = local
    scores, topk_ids = logits.topk(source.variant.top_k, dim=1)
    routing_weights = torch.softmax(scores, dim=1).bfloat16()
    return dataclasses.replace(
        source.weights, hidden_states=hidden_states, topk_ids=topk_ids, topk_weights=routing_weights
    )


def _router_logits(hidden_states: Tensor) -> Tensor:
    """Logits [T, 16] of a trained router, that of the repository's small model, on the first 256 values of each row.

    Without the model (an installed wheel), of random weights with a spread of one per expert: skewed likewise.
    """
    if _ROUTER_MODEL.is_dir():
        with Checkpoint(_ROUTER_MODEL) as files:
            weight, bias = (
                files.tensor(f"model.layers.3.mlp.router.{part}").float() for part in ("weight", "bias")
            )
    else:
        generator = torch.Generator().manual_seed(0)
        weight = torch.randn(ALL_EXPERTS, 256, generator=generator) / 16
        bias = torch.randn(ALL_EXPERTS, generator=generator)
    return functional.linear(hidden_states[:, : weight.shape[1]].float(), weight, bias)


def on_device(case: MoECase, device: torch.device) -> MoECase:
    """The same case with its tensors on `device`."""
    moved: dict[str, Any] = {
        name: value.to(device) for name, value in vars(case).items() if isinstance(value, Tensor)
    }
    return dataclasses.replace(case, **moved)


def local_routes(case: MoECase) -> int:
    """Routes of a case to experts that are local."""
    ids = case.topk_ids - case.attributes["experts_min"]
    return int(((ids >= 0) & (ids < len(case.w2))).sum())


def describe(case: MoECase) -> MoEDesc:
    """What `supports` and `token_range` are asked."""
    return MoEDesc.from_call(*case.routing, *case.weights, **case.attributes)


def run_case(case: MoECase) -> Tensor:
    """The call as a graph on a Gaudi makes it: `custom_op::mxk_*` in sequence."""
    scalars = {name: case.attributes[name] for name in ("alpha", "limit", "experts_min")}
    return tpc.sequence(describe(case), *case.routing, *case.weights, **scalars)


def error_of(value: Tensor, expected: Tensor) -> float:
    """rel_l2, also where the call had no local route."""
    if not expected.any():
        return 0.0 if not value.any() else float("inf")
    return rel_l2(value, expected)


def badness(error: float) -> float:
    """An error to be compared: NaN is the worst."""
    return error if error == error else float("inf")


def same_alone_and_together(
    variant: MoEVariant,
    run: Run,
    device: torch.device,
    *,
    source: Source | None = None,
    alone: Run | None = None,
    num_tokens: int = 2,
) -> bool:
    """Two calls of equal shapes in one graph: each has the result that it has alone, and they differ.

    What is alone runs by `alone`, or `run`. Without a `source` they have different weights.
    """
    cases = [on_device(make_case(variant, num_tokens, "hot", 1.0, seed, source), device) for seed in (0, 1)]
    apart = [(alone or run)([case])[0].cpu() for case in cases]
    together = run(cases)  # read only now, when both are in the graph
    same = all(torch.equal(a, b.cpu()) for a, b in zip(apart, together, strict=True))
    return same and not torch.equal(*apart)


def is_exact_unpack(values: Tensor, weight: Tensor, scale: Tensor) -> bool:
    """Whether `values` are what one expert's MXFP4 matrix means, bit for bit: products in fp64, which has them all."""
    return torch.equal(values.view(torch.int16), _exact(weight, scale).view(torch.int16))


def _exact(weight: Tensor, scale: Tensor) -> Tensor:
    elements = torch.tensor(mxfp4.ELEMENTS, dtype=torch.float64)[mxfp4.unpack_codes(weight).long()]
    factors = torch.exp2(scale.double() - mxfp4.SCALE_BIAS).repeat_interleave(mxfp4.BLOCK, dim=-1)
    return (elements * factors[..., : elements.shape[-1]]).bfloat16()


def say(check: str, passed: bool, otherwise: str) -> None:
    """The line of one check."""
    print(f"{check} PASS" if passed else f"{check} FAIL: {otherwise}", flush=True)
