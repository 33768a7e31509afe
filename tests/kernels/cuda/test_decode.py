"""moe_decode.cu: its schedules against the fp32 reference, and the compiler."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from mxk_compile.kernels.cuda import build
from mxk_compile.testing import MoECase, random_case, rel_l2

MOST_ERROR = 2e-3  # against the reference with the same rounding of the intermediate; one rounding is 1.7e-3
SPLITS = (
    "warps=4,groups=2,stages=4",
    "warps=6,groups=2,stages=8",
    "warps=8,groups=1,stages=3",
    "warps=12,groups=1,stages=4,tiles13=2,tiles2=3",
    "warps=8,groups=1,stages=4,column_tiles=2",
)
Force = Callable[[str], None]
SPLIT_SCHEDULES = [f"decode:{split},max_routes=256" for split in SPLITS]


def layer(num_tokens: int, seed: int = 0, **changes: object) -> MoECase:
    """Rows of 11 and 7 groups, so that no split divides them; bias and clamp as in gpt-oss."""
    sizes = {"hidden_size": 352, "intermediate_size": 224, "num_experts": 12, "top_k": 3}
    kind = {
        "row_order": "interleaved",
        "activation": "swiglu_oai",
        "alpha": 1.702,
        "limit": 7.0,
        "bias": True,
    }
    arguments = {**sizes, **kind, "device": "cuda", "seed": seed, **changes}
    return random_case(num_tokens=num_tokens, **arguments)  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.parametrize("schedule", SPLIT_SCHEDULES)
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 4, 8, 16, 32, 64])
def test_every_split_meets_the_reference(schedule: str, num_tokens: int, force: Force) -> None:
    force(schedule)
    for rms in (1.0, 4.0):
        case = layer(num_tokens, seed=num_tokens, rms=rms)
        assert rel_l2(case.fused(), case.reference(round_intermediate=True)) <= MOST_ERROR


@pytest.mark.gpu
@pytest.mark.parametrize("schedule", SPLIT_SCHEDULES)
def test_scales_above_128_take_two_multiplies(schedule: str, force: Force) -> None:
    force(schedule)
    case = layer(9, activation="silu", limit=None)
    case.w13_scale[3], case.w2_scale[5, 7] = 129, 140
    assert rel_l2(case.fused(), case.reference(round_intermediate=True)) <= MOST_ERROR


@pytest.mark.gpu
@pytest.mark.parametrize("schedule", SPLIT_SCHEDULES)
def test_fifty_runs_give_the_same_bits(schedule: str, force: Force) -> None:
    force(schedule)
    case = layer(24, hidden_size=2880, intermediate_size=720)
    first = case.fused()
    assert all(torch.equal(case.fused(), first) for _ in range(50))


@pytest.mark.skipif(build.missing() is not None, reason=f"NVRTC: {build.missing()}")
@pytest.mark.parametrize(
    "macros",
    [
        {"MXK_SCALES_SMALL": 1, "MXK_WARPS": 6},
        {"MXK_SCALES_SMALL": 0, "MXK_TILES2": 2, "MXK_WARPS": 8, "MXK_GROUPS": 1, "MXK_STAGES": 3},
        {"MXK_HIDDEN": 4096, "MXK_INTER": 1024, "MXK_INTERLEAVED": 0, "MXK_PER_ROUTE": 1, "MXK_ALIGNED": 0},
    ],
    ids=["two groups", "one group", "copied by hand"],
)
def test_decode_sources_compile(macros: dict[str, int]) -> None:
    options = (*build._OPTIONS, *(f"-D{macro}={value}" for macro, value in macros.items()))
    assert build.compile_nvrtc("moe_decode.cu", options).startswith(b"\x7fELF")
