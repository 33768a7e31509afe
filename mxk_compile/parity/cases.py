"""The calls that parity runs, and what their results are held against.

Each variant runs at its per-card K and I, full size, with fewer experts than a card holds (their number changes nothing
but memory): eight of sixteen are local.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from mxk_compile.checkpoint import Checkpoint
from mxk_compile.kernels import MoEDesc, tpc
from mxk_compile.ops.formats import mxfp4
from mxk_compile.testing import MoECase, rel_l2, variant_case
from mxk_compile.variants import MoEVariant

MAX_REL_L2 = 1.8e-3
"""Of a kernel against fp32 with a bf16 intermediate; the rounding of the bf16 result alone is 1.66e-3."""
LOCAL_EXPERTS, ALL_EXPERTS, FIRST_LOCAL = 8, 16, 4
_ROUTER_MODEL = pathlib.Path(__file__).parents[2] / "models" / "tiny-gptoss"

Run = Callable[[Sequence[MoECase]], list[Tensor]]
"""Results of some cases whose calls are in one graph."""


def kernels_of(name: str) -> str:
    """The kernels' variant (signatures.py) that runs a model row."""
    return "glm" if name == "mimo" else name


def make_case(variant: MoEVariant, num_tokens: int, routing: str, rms: float, seed: int = 0) -> MoECase:
    """The same weights for every T, routing and RMS of one seed.

    routing: "random" over all experts, "hot" over the local ones, "router" by the logits of a trained router.
    """
    sizes = {
        "num_experts": LOCAL_EXPERTS,
        "experts_min": FIRST_LOCAL,
        "num_tokens": 1,
        "top_k": variant.top_k,
    }
    case = variant_case(variant, **sizes, seed=seed)
    generator = torch.Generator().manual_seed(1000 + seed)
    case.hidden_states = (torch.randn(num_tokens, variant.hidden_size, generator=generator) * rms).bfloat16()
    if routing == "router":
        logits = _router_logits(case.hidden_states)
    else:
        logits = torch.randn(num_tokens, ALL_EXPERTS, generator=generator)
        if routing == "hot":
            logits[:, :FIRST_LOCAL] = logits[:, FIRST_LOCAL + LOCAL_EXPERTS :] = float("-inf")
    scores, case.topk_ids = logits.topk(variant.top_k, dim=1)
    case.topk_weights = torch.softmax(scores, dim=1).bfloat16()
    return case


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
    return int(((case.topk_ids >= FIRST_LOCAL) & (case.topk_ids < FIRST_LOCAL + LOCAL_EXPERTS)).sum())


def describe(case: MoECase) -> MoEDesc:
    """What `supports` and `token_range` are asked."""
    return MoEDesc.from_call(*case.routing, *case.weights, **case.attributes)


def token_counts(case: MoECase, quick: bool) -> list[int]:
    """Powers of two up to the most tokens of a call like `case`; `quick`: fewest and most."""
    most = tpc.token_range(describe(case))[1]
    return [1, most] if quick else [2**n for n in range(most.bit_length())]


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


def same_alone_and_together(variant: MoEVariant, run: Run, device: torch.device) -> bool:
    """Two calls of equal shapes in one graph: each has the result that it has alone, and they differ."""
    cases = [on_device(make_case(variant, 2, "hot", 1.0, seed), device) for seed in (0, 1)]
    alone = [run([case])[0].cpu() for case in cases]
    together = run(cases)  # read only now, when both are in the graph
    same = all(torch.equal(a, b.cpu()) for a, b in zip(alone, together, strict=True))
    return same and not torch.equal(*alone)


def is_exact_unpack(values: Tensor, weight: Tensor, scale: Tensor) -> bool:
    """Whether `mxk_deq` made of one expert's MXFP4 matrix what it means, bit for bit."""
    return torch.equal(values.view(torch.int16), mxfp4.unpack(weight, scale).view(torch.int16))


def say(check: str, passed: bool, otherwise: str) -> None:
    """The line of one check."""
    print(f"{check} PASS" if passed else f"{check} FAIL: {otherwise}", flush=True)
