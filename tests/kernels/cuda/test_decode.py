"""moe_decode.cu: its schedules against the fp32 reference, and the compiler."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from mxk_compile.kernels.cuda import build
from mxk_compile.kernels.cuda.devices import HOPPER
from mxk_compile.testing import MoECase, random_case, rel_l2

MOST_ERROR = 2e-3  # against the reference with the same rounding of the intermediate; one rounding is 1.7e-3
SPLITS = (
    "groups=3",
    "groups=2,stages=2,buffers=1",
    "groups=3,chunk=5,stages=6,buffers=2",
    "groups=2,column_tiles=2",
    "groups=3,column_tiles=3",
    "groups=2,column_tiles=4",
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
def test_scales_above_128_scale_each_group_for_itself(schedule: str, force: Force) -> None:
    force(schedule)
    case = layer(9, activation="silu", limit=None)
    small = case.fused()
    case.w13_scale[3], case.w2_scale[5, 7] = 129, 140
    large = case.fused()
    assert rel_l2(large, case.reference(round_intermediate=True)) <= MOST_ERROR
    others = ~(case.topk_ids.unsqueeze(-1) == torch.tensor([3, 5], device="cuda")).any(-1).any(-1)
    assert others.any()
    assert torch.equal(large[others], small[others]), "the same bits by either way"


@pytest.mark.gpu
@pytest.mark.parametrize("schedule", [SPLIT_SCHEDULES[0], SPLIT_SCHEDULES[3]])
@pytest.mark.parametrize("row_order", ["interleaved", "gate_up", "up_gate"])
@pytest.mark.parametrize(("hidden_size", "intermediate_size"), [(512, 1024), (1536, 2880), (4096, 256)])
def test_scales_that_are_padded(
    hidden_size: int, intermediate_size: int, row_order: str, schedule: str, force: Force
) -> None:
    """Sixteen groups and their multiples lie apart in shared memory, other numbers as in memory."""
    force(schedule)
    sizes = {"hidden_size": hidden_size, "intermediate_size": intermediate_size, "num_experts": 3}
    case = layer(5, row_order=row_order, **sizes)
    assert rel_l2(case.fused(), case.reference(round_intermediate=True)) <= MOST_ERROR


@pytest.mark.gpu
@pytest.mark.parametrize("schedule", SPLIT_SCHEDULES)
@pytest.mark.parametrize(("exponent", "scale"), [(-10, 126), (0, 120), (60, 60)])
def test_values_far_below_their_rows_largest_are_exact(
    exponent: int, scale: int, schedule: str, force: Force
) -> None:
    """Powers of two down to 2^-13 of the largest; all weights are zero but those of the smallest."""
    force(schedule)
    case = layer(4, activation="silu", limit=None, bias=False)
    steps = torch.arange(case.hidden_states.shape[1], device="cuda") % 14
    case.hidden_states = (2.0 ** (exponent - steps)).expand(4, -1).bfloat16()
    bytes_ = torch.arange(case.w13.shape[-1], device="cuda")
    case.w13 &= torch.where(bytes_ % 7 == 6, 0xF0, 0).to(torch.uint8)
    case.w13_scale[:] = scale + 8
    assert rel_l2(case.fused(), case.reference(round_intermediate=True)) <= MOST_ERROR


@pytest.mark.gpu
@pytest.mark.parametrize("schedule", SPLIT_SCHEDULES)
def test_infinities_come_out_as_in_the_reference(schedule: str, force: Force) -> None:
    force(schedule)
    case = layer(6, activation="silu", limit=None, bias=False)
    case.hidden_states[1, 7], case.hidden_states[2, 9] = torch.inf, -torch.inf
    case.hidden_states[4, 3], case.hidden_states[4, 5] = torch.nan, torch.inf
    result, expected = case.fused().float(), case.reference(round_intermediate=True).bfloat16().float()
    assert torch.equal(result.isnan(), expected.isnan())
    assert torch.equal(result.isinf(), expected.isinf())
    assert result[[0, 3, 5]].isfinite().all()


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
        {"MXK_SCALES_SMALL": 1},
        {"MXK_GROUPS": 2, "MXK_COLUMN_TILES": 2, "MXK_PER_ROUTE": 1},
        {"MXK_HIDDEN": 4096, "MXK_INTER": 1024, "MXK_INTERLEAVED": 0, "MXK_COLUMN_TILES": 3},
        {"MXK_INTERLEAVED": 0, "MXK_ALIGNED": 0, "MXK_X_ALIGNED": 0, "MXK_COLUMN_TILES": 4, "MXK_GROUPS": 2},
        {"MXK_FORMAT": 2, "MXK_COLUMN_TILES": 2, "MXK_GROUPS": 2, "MXK_SCALES": 1},
        {"MXK_FORMAT": 1, "MXK_COLUMN_TILES": 4, "MXK_GROUPS": 2, "MXK_PROJECT": 3, "MXK_UNITS": 2},
    ],
    ids=["small scales", "2 groups", "padded scales", "copied by hand", "INT4", "a projection"],
)
def test_decode_sources_compile(macros: dict[str, int]) -> None:
    assert build.compile_nvrtc("moe_decode.cu", build.options_for(HOPPER, macros)).startswith(b"\x7fELF")
