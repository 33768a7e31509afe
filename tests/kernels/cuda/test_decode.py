"""moe_decode.cu: its schedules against the fp32 reference, what two digits keep of an activation, and the compiler."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from mxk_compile.kernels import cuda
from mxk_compile.kernels.cuda import build
from mxk_compile.kernels.cuda.schedule import Schedule
from mxk_compile.testing import MoECase, random_case, rel_l2

DIGITS_ERROR = 1.8e-3  # one bf16 rounding, of the result
EXACT_ERROR = 2.6e-3  # two: of the intermediate as well
SPLITS = (
    "warps=4,groups=2,stages=4",
    "warps=6,groups=2,stages=8",
    "warps=8,groups=1,stages=3",
    "warps=12,groups=1,stages=4,tiles13=2,tiles2=3",
    "warps=8,groups=1,stages=4,column_tiles=2",
)
Force = Callable[[str], None]


@pytest.fixture
def force(monkeypatch: pytest.MonkeyPatch) -> Force:
    """Makes every call run by one schedule of the decode kernel."""

    def apply(macros: str) -> None:
        schedule = Schedule.parse(f"decode:{macros},max_routes=256")
        monkeypatch.setattr(cuda, "choose", lambda problem: schedule)
        monkeypatch.setattr(cuda, "_prepared", {})

    return apply


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
@pytest.mark.parametrize("macros", SPLITS)
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 4, 8, 16, 32, 64])
def test_two_digits_meet_the_reference(macros: str, num_tokens: int, force: Force) -> None:
    force(macros)
    for rms in (1.0, 4.0):
        case = layer(num_tokens, seed=num_tokens, rms=rms)
        assert rel_l2(case.fused(), case.reference()) <= DIGITS_ERROR


@pytest.mark.gpu
@pytest.mark.parametrize("macros", SPLITS)
def test_large_scales_take_the_bf16_product(macros: str, force: Force) -> None:
    force(macros)
    case = layer(9, activation="silu", limit=None)
    case.w13_scale[3], case.w2_scale[5, 7] = 129, 140
    assert rel_l2(case.fused(), case.reference()) <= EXACT_ERROR


@pytest.mark.gpu
@pytest.mark.parametrize("exponent", [-100, -60, 40])
def test_magnitudes_far_from_one(exponent: int, force: Force) -> None:
    force(SPLITS[1])
    case = layer(5, activation="silu", limit=None, bias=False)
    case.hidden_states[2] *= 2.0**exponent
    # Gate and up are as small as that, so the row's result is their product: scale the router to see it.
    case.topk_weights = case.topk_weights.float()
    result, expected = case.fused(), case.reference()
    others = [0, 1, 3, 4]
    assert rel_l2(result[others], expected[others]) <= DIGITS_ERROR
    if exponent > -60:  # below, silu(gate) * up is no float
        assert rel_l2(result[2], expected[2]) <= DIGITS_ERROR


@pytest.mark.gpu
@pytest.mark.parametrize("macros", SPLITS)
def test_an_outlier_leaves_the_rest_of_its_row(macros: str, force: Force) -> None:
    force(macros)
    case = layer(4, activation="silu", limit=None, bias=False, rms=0.02)
    case.hidden_states[:, 40] = 20.0  # a thousand times the others; only its group's exponent follows it
    assert rel_l2(case.fused(), case.reference()) <= DIGITS_ERROR


@pytest.mark.gpu
def test_inf_and_nan_stay_in_their_row(force: Force) -> None:
    force(SPLITS[0])
    case = layer(6, top_k=1, num_experts=2)
    clean = case.fused()
    case.hidden_states[1, 5], case.hidden_states[4, 300] = torch.inf, torch.nan
    dirty = case.fused()
    assert torch.equal(dirty[[0, 2, 3, 5]], clean[[0, 2, 3, 5]])
    assert not dirty[[1, 4]].isfinite().any()


@pytest.mark.gpu
@pytest.mark.parametrize("macros", ["warps=6,groups=2,stages=8,few=1", "warps=8,groups=1,stages=3,few=1"])
@pytest.mark.parametrize(("num_tokens", "top_k"), [(1, 1), (1, 4), (2, 2), (4, 1)])
def test_few_routes_are_summed_by_the_block_that_owns_the_rows(
    macros: str, num_tokens: int, top_k: int, force: Force
) -> None:
    force(macros)
    case = layer(num_tokens, top_k=top_k)
    assert rel_l2(case.fused(), case.reference()) <= DIGITS_ERROR
    case.topk_ids[0, 0] = -1  # not here
    assert rel_l2(case.fused(), case.reference()) <= DIGITS_ERROR or top_k * num_tokens == 1
    case.topk_ids[:] = 5  # duplicates add
    assert rel_l2(case.fused(), case.reference()) <= DIGITS_ERROR
    case.topk_ids[:] = -1
    assert torch.equal(case.fused(), torch.zeros_like(case.hidden_states))


@pytest.mark.gpu
@pytest.mark.parametrize("macros", SPLITS)
def test_fifty_runs_give_the_same_bits(macros: str, force: Force) -> None:
    force(macros)
    case = layer(24, hidden_size=2880, intermediate_size=720)
    first = case.fused()
    assert all(torch.equal(case.fused(), first) for _ in range(50))


@pytest.mark.skipif(build.missing() is not None, reason=f"NVRTC: {build.missing()}")
@pytest.mark.parametrize(
    "macros",
    [
        {"MXK_SCALES_SMALL": 1, "MXK_WARPS": 6},
        {"MXK_SCALES_SMALL": 1, "MXK_FEW": 1, "MXK_WARPS": 8, "MXK_GROUPS": 1},
        {"MXK_HIDDEN": 4096, "MXK_INTER": 1024, "MXK_INTERLEAVED": 0, "MXK_PER_ROUTE": 1, "MXK_ALIGNED": 0},
    ],
    ids=["digits", "few", "copied by hand"],
)
def test_decode_sources_compile(macros: dict[str, int]) -> None:
    options = (*build._OPTIONS, *(f"-D{macro}={value}" for macro, value in macros.items()))
    assert build.compile_nvrtc("moe_decode.cu", options).startswith(b"\x7fELF")
