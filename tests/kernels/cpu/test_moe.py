"""The CPU kernels against fp32/fp64 arithmetic on dequantised weights, on every instruction set of this machine."""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from mxk_compile.kernels import MoEDesc, cpu
from mxk_compile.ops.dequant import dequantize
from mxk_compile.testing import MoECase, most_rel_l2, random_case, rel_l2, variant_case
from mxk_compile.variants import VARIANTS

pytestmark = pytest.mark.skipif(cpu.available() is not None, reason=str(cpu.available()))

ISAS = ("baseline", "portable", "avx2", "avx512", "amx")
GPTOSS = {"activation": "swiglu_oai", "alpha": 1.702, "limit": 7.0, "bias": True, "row_order": "interleaved"}
FORMATS: dict[str, dict[str, Any]] = {
    "mxfp4": {},
    "mxfp4-gptoss": GPTOSS,
    "mxfp4-clamp-up-gate": {"activation": "swiglu_clamp", "limit": 2.0, "row_order": "up_gate"},
    "uint4-g32": {"weight_format": "uint4"},
    "uint4-g64-zero": {"weight_format": "uint4", "group_size": 64, "zero": True, **GPTOSS},
    "uint4-channel-zero": {"weight_format": "uint4", "group_size": None, "zero": True},
    "int4-g32": {"weight_format": "int4", **GPTOSS},
    "int4-channel": {"weight_format": "int4", "group_size": None},
    "uint4-output": {"weight_format": "uint4", "pack_dim": "output"},
    "uint4-output-zero": {"weight_format": "uint4", "pack_dim": "output", "zero": True, **GPTOSS},
    "int4-output-g64": {
        "weight_format": "int4",
        "pack_dim": "output",
        "group_size": 64,
        "row_order": "up_gate",
    },
    "int4-output-channel": {"weight_format": "int4", "pack_dim": "output", "group_size": None},
}


def select(isa: str) -> bool:
    return cpu._library().mxk_cpu_select(isa.encode()) == 0


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each instruction set in turn, the tile unit emulated where there is none; settings' choice is restored."""
    if request.param == "baseline" and request.node.originalname in (
        "test_shapes",
        "test_large_shapes",
        "test_tokens",
    ):
        pytest.skip("slow, and no steps of its own in these")
    if request.param == "amx":
        request.getfixturevalue("amx")
    elif not select(request.param):
        pytest.skip(f"no {request.param} here")
    yield request.param
    select("auto")


def moe(*arguments: Any, **attributes: Any) -> Tensor:
    """The kernel itself: never the reference in its place."""
    desc = MoEDesc.from_call(*arguments, **attributes)
    assert cpu.supports(desc) is None
    scalars = {name: attributes[name] for name in ("alpha", "limit", "experts_min") if name in attributes}
    return cpu.Prepared(desc, *arguments, **scalars)(*arguments[:3])


def run(case: MoECase, **changes: Any) -> Tensor:
    return moe(*case.routing, *case.weights, **{**case.attributes, **changes})


def bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int16), b.view(torch.int16))


def check(case: MoECase) -> Tensor:
    """Runs the kernel; its error is that of the last rounding."""
    result = run(case)
    expected = case.reference()
    assert result.dtype == torch.bfloat16
    assert result.shape == expected.shape
    assert rel_l2(result, expected) <= most_rel_l2(expected)
    return result


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("num_tokens", [1, 3, 17])
def test_formats(isa: str, name: str, num_tokens: int) -> None:
    check(random_case(num_tokens=num_tokens, hidden_size=256, intermediate_size=192, **FORMATS[name]))


@pytest.mark.parametrize("hidden_size", [32, 64, 96, 130, 464, 720, 1504, 2880])
@pytest.mark.parametrize("intermediate_size", [32, 64, 96, 130, 464, 720])
def test_shapes(isa: str, hidden_size: int, intermediate_size: int) -> None:
    check(
        random_case(
            num_tokens=3,
            num_experts=3,
            top_k=2,
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            **GPTOSS,
        )
    )


@pytest.mark.parametrize("sizes", [(7168, 64), (64, 7168), (2880, 2880)])
@pytest.mark.parametrize("weight_format", ["mxfp4", "uint4"])
def test_large_shapes(isa: str, sizes: tuple[int, int], weight_format: str) -> None:
    check(
        random_case(
            num_tokens=2,
            num_experts=2,
            top_k=1,
            hidden_size=sizes[0],
            intermediate_size=sizes[1],
            weight_format=weight_format,
        )
    )


@pytest.mark.parametrize("num_tokens", [0, 1, 2, 3, 8, 31, 32, 33, 64, 300])
@pytest.mark.parametrize("top_k", [1, 2, 5])
def test_tokens(isa: str, num_tokens: int, top_k: int) -> None:
    case = random_case(num_tokens=num_tokens, top_k=top_k, **GPTOSS)
    if num_tokens == 0:
        assert run(case).shape == (0, 128)
    else:
        check(case)


def test_more_tokens_than_a_slab(isa: str) -> None:
    check(random_case(num_tokens=4200, num_experts=2, top_k=1, hidden_size=64, intermediate_size=32))


def test_hot_expert(isa: str) -> None:
    check(random_case(num_tokens=140, hot=True))


@pytest.mark.parametrize("name", VARIANTS)
def test_variants(isa: str, name: str) -> None:
    check(variant_case(VARIANTS[name], num_tokens=4, num_experts=9, hidden_size=192, intermediate_size=96))


@pytest.mark.parametrize("name", ["mxfp4-gptoss", "uint4-channel-zero", "uint4-output-zero"])
def test_lists(isa: str, name: str) -> None:
    case = random_case(**FORMATS[name])
    assert bits(moe(*case.routing, *case.lists, **case.attributes), run(case))


def test_separate_rows(isa: str) -> None:
    case = random_case(bias=True)
    w13, w13_scale, w2, w2_scale, _, _, w13_bias, w2_bias = case.lists

    def separate(rows: list[Tensor]) -> list[Tensor]:
        return [r.chunk(2)[0].clone() for r in rows] + [r.chunk(2)[1].clone() for r in rows]

    weights = (separate(w13), separate(w13_scale), w2, w2_scale, [], [], separate(w13_bias), w2_bias)
    result = moe(*case.routing, *weights, **{**case.attributes, "row_order": "separate"})
    assert bits(result, run(case))


def test_int32_words_are_the_same_bytes(isa: str) -> None:
    case = random_case(weight_format="uint4")
    words = dataclasses.replace(case, w13=case.w13.view(torch.int32), w2=case.w2.view(torch.int32))
    assert bits(run(words), run(case))


def test_per_route(isa: str) -> None:
    check(random_case(num_tokens=9, top_k=3, per_route=True, **GPTOSS))


def test_local_experts_only(isa: str) -> None:
    case = random_case(num_tokens=6, num_experts=4, top_k=2, bias=True)
    ids = torch.tensor([[-1, 2], [7, 3], [4, -1], [2**31 - 1, 0], [2**32 + 3, -(2**63)], [9, -9]])
    weights = torch.full((6, 2), 0.5)
    result = run(dataclasses.replace(case, topk_ids=ids, topk_weights=weights))
    kept = torch.tensor([[0, 2], [0, 3], [0, 0], [0, 0], [0, 0], [0, 0]])
    zeroed = torch.tensor([[0, 0.5], [0, 0.5], [0, 0], [0, 0.5], [0, 0], [0, 0]])
    expected = dataclasses.replace(case, topk_ids=kept, topk_weights=zeroed).reference()
    assert rel_l2(result, expected) < 2.5e-3
    assert (result[[2, 4, 5]].view(torch.int16) == 0).all()


def test_ranks_sum_to_the_whole(isa: str) -> None:
    case = random_case(num_tokens=5, num_experts=16, top_k=4)
    total = torch.zeros(5, 128)
    for first in range(0, 16, 4):
        mine = {
            field: getattr(case, field)[first : first + 4] for field in ("w13", "w13_scale", "w2", "w2_scale")
        }
        total += run(dataclasses.replace(case, **mine), experts_min=first).float()
    assert rel_l2(total, case.reference()) < 4e-3


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.int8, torch.uint8])
def test_id_dtypes(isa: str, dtype: torch.dtype) -> None:
    case = random_case()
    assert bits(run(dataclasses.replace(case, topk_ids=case.topk_ids.to(dtype))), run(case))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_router_weight_dtypes(isa: str, dtype: torch.dtype) -> None:
    case = random_case()
    weights = (case.topk_weights.float() * 64).round() / 64  # exact in all
    expected = run(dataclasses.replace(case, topk_weights=weights.bfloat16()))
    assert bits(run(dataclasses.replace(case, topk_weights=weights.to(dtype))), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("pack_dim", ["input", "output"])
def test_scale_dtypes(isa: str, dtype: torch.dtype, pack_dim: str) -> None:
    case = random_case(weight_format="uint4", pack_dim=pack_dim)
    coarse = [scale.half().bfloat16() for scale in (case.w13_scale, case.w2_scale)]
    scales = {"w13_scale": coarse[0].to(dtype), "w2_scale": coarse[1].to(dtype)}
    same = {"w13_scale": coarse[0], "w2_scale": coarse[1]}
    assert bits(run(dataclasses.replace(case, **scales)), run(dataclasses.replace(case, **same)))


def test_packed_zero_points(isa: str) -> None:
    case = random_case(weight_format="uint4", pack_dim="output", zero=True)
    packed = {}
    for name in ("w13_zero", "w2_zero"):
        zero = getattr(case, name)
        nibbles = zero.view(*zero.shape[:2], -1, 2)
        packed[name] = (nibbles[..., 0] | nibbles[..., 1] << 4).contiguous().view(torch.int32)
    assert bits(run(dataclasses.replace(case, **packed)), run(case))


def test_strides(isa: str) -> None:
    case = random_case(num_tokens=5, top_k=3, hidden_size=128, **GPTOSS)
    x, ids, weights = case.routing
    wide = torch.full((5, 256), float("nan"), dtype=torch.bfloat16)
    wide[:, :128] = x
    offset = torch.cat([torch.zeros(3, dtype=torch.bfloat16), x.flatten()])[3:].view(5, 128)
    expected = run(case)
    for view in (wide[:, :128], x.t().contiguous().t(), offset):
        assert bits(run(dataclasses.replace(case, hidden_states=view)), expected)
    wider_ids = torch.cat([ids, torch.full_like(ids, 99)], 1)[:, :3]
    changed = dataclasses.replace(case, topk_ids=wider_ids, topk_weights=weights.t().contiguous().t())
    assert bits(run(changed), expected)
    row = dataclasses.replace(case, hidden_states=x[:1].expand(5, 128))
    assert bits(run(row), run(dataclasses.replace(case, hidden_states=x[:1].repeat(5, 1))))


@pytest.mark.parametrize("fill", [0x00, 0x7F, 0xFF])
def test_padding_is_never_read(isa: str, fill: int) -> None:
    """K = 1504 has 47 groups; the scale rows live in 64 columns, packed rows in 800 bytes."""
    case = random_case(num_tokens=2, num_experts=2, hidden_size=1504, intermediate_size=96, **GPTOSS)
    padded = {}
    for name, columns in (("w13", 800), ("w13_scale", 64), ("w2", 64), ("w2_scale", 5)):
        value = getattr(case, name)
        buffer = torch.full((*value.shape[:2], columns), fill, dtype=torch.uint8)
        buffer[..., : value.shape[2]] = value
        padded[name] = buffer[..., : value.shape[2]]
    result = run(dataclasses.replace(case, **padded))
    assert bits(result, run(case))
    assert result.isfinite().all()


def test_threads_agree_bit_by_bit(isa: str) -> None:
    case = random_case(num_tokens=40, hidden_size=480, intermediate_size=224, num_experts=4, **GPTOSS)
    before = torch.get_num_threads()
    try:
        results = []
        for count in (1, 2, 8):
            torch.set_num_threads(count)
            results += [run(case) for _ in range(5)]
    finally:
        torch.set_num_threads(before)
    assert all(bits(result, results[0]) for result in results)


def test_a_token_does_not_depend_on_its_batch(isa: str) -> None:
    case = random_case(num_tokens=40, **GPTOSS)
    whole = run(case)
    for t in (0, 13, 39):
        single = [tensor[t : t + 1] for tensor in case.routing]
        assert bits(moe(*single, *case.weights, **case.attributes), whole[t : t + 1])


def test_python_threads(isa: str) -> None:
    cases = [random_case(num_tokens=n, hidden_size=480, intermediate_size=224, seed=n) for n in (1, 7, 40)]
    expected = [run(case) for case in cases]
    wrong: list[int] = []

    def work(index: int) -> None:
        for _ in range(20):
            if not bits(run(cases[index]), expected[index]):
                wrong.append(index)

    workers = [threading.Thread(target=work, args=(index,)) for index in (0, 1, 2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


def test_forked_child(isa: str) -> None:
    case = random_case(num_tokens=9, hidden_size=480, intermediate_size=224)
    expected = run(case)
    child = os.fork()
    if child == 0:
        os._exit(0 if bits(run(case), expected) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_poisoned_experts_and_tokens_stay_apart(isa: str) -> None:
    case = random_case(num_tokens=4, num_experts=3, top_k=1, bias=True)
    ids = torch.tensor([[0], [1], [1], [5]])
    good = run(dataclasses.replace(case, topk_ids=ids))
    x = case.hidden_states.clone()
    x[2], x[3] = float("nan"), float("inf")
    w13_scale, w2_scale, w2_bias = case.w13_scale.clone(), case.w2_scale.clone(), case.w2_bias.clone()
    w13_scale[2], w2_scale[2], w2_bias[2] = 255, 255, float("nan")  # no token goes there
    poisoned = dataclasses.replace(
        case, topk_ids=ids, hidden_states=x, w13_scale=w13_scale, w2_scale=w2_scale, w2_bias=w2_bias
    )
    result = run(poisoned)
    assert bits(result[[0, 1]], good[[0, 1]])
    assert result[2].isnan().all()
    assert (result[3].view(torch.int16) == 0).all()


def scaled(case: MoECase, factor: float) -> MoECase:
    return dataclasses.replace(case, hidden_states=(case.hidden_states.double() * factor).bfloat16())


@pytest.mark.parametrize("factor", [2.0**-100, 2.0**-130, 2.0**60, 2.0**100])
def test_extreme_activations(isa: str, factor: float) -> None:
    """bf16 subnormals and huge values, brought back to ordinary size by the scales."""
    case = random_case(num_tokens=3, hidden_size=64, intermediate_size=64)
    shift = -int(torch.tensor(factor).log2())
    w13_scale = (case.w13_scale.int() + shift).clamp(1, 252).to(torch.uint8)
    changed = scaled(dataclasses.replace(case, w13_scale=w13_scale), factor)
    assert rel_l2(run(changed), changed.reference()) < 2.5e-3


def test_flush_to_zero_of_the_caller_changes_nothing(isa: str) -> None:
    case = scaled(random_case(num_tokens=3, hidden_size=64, intermediate_size=64), 2.0**-130)
    case = dataclasses.replace(case, w13_scale=case.w13_scale + 125)
    expected = run(case)
    try:
        torch.set_flush_denormal(True)
        assert bits(run(case), expected)
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize("byte", [0, 1, 2, 126, 252, 253, 254, 255])
def test_every_kind_of_e8m0_byte(isa: str, byte: int) -> None:
    """One odd scale byte in w13 and one in w2: same numbers, infinities and NaN as fp64 says."""
    case = random_case(num_tokens=5, num_experts=2, top_k=1, hidden_size=96, intermediate_size=64, hot=True)
    if byte > 200:  # infinite weights there are, but no sum that overflows in one order of addition only
        case = scaled(case, 2.0**-40)
    for name, row in (("w13_scale", 3), ("w2_scale", 7)):
        scale = getattr(case, name).clone()
        scale[0, row, 1] = byte
        changed = dataclasses.replace(case, **{name: scale})
        result, expected = run(changed).float(), changed.reference().bfloat16().float()
        assert torch.equal(result.isnan(), expected.isnan())
        assert torch.equal(result.isinf(), expected.isinf())
        finite = torch.where(expected.isfinite(), expected, 0)
        tolerance = 2e-3 * float(finite.abs().max())
        torch.testing.assert_close(
            torch.where(expected.isfinite(), result, 0), finite, rtol=2**-7, atol=tolerance
        )


def test_single_products_are_exact(isa: str) -> None:
    """Every code with every ordinary scale, through w2: y[row] = h[0] * weight, h[0] a power of two."""
    rows = 256 * 16
    codes = torch.arange(16, dtype=torch.uint8).repeat(256)
    w2 = torch.zeros(1, rows, 16, dtype=torch.uint8)
    w2[0, :, 0] = codes
    w2_scale = torch.arange(256, dtype=torch.int32).repeat_interleave(16).to(torch.uint8).view(1, rows, 1)
    x = torch.zeros(1, rows, dtype=torch.bfloat16)
    w13 = torch.zeros(1, 64, rows // 2, dtype=torch.uint8)
    w13_scale = torch.full((1, 64, rows // 32), 127, dtype=torch.uint8)
    # swiglu_oai of gate = large, up = 0: h = gate * sigmoid = 16 from the bias alone, in row 0
    bias = torch.zeros(1, 64)
    bias[0, 0] = 64.0
    result = moe(
        x, torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1), w13, w13_scale, w2, w2_scale, None, None, bias, None,
        weight_format="mxfp4", row_order="gate_up", activation="swiglu_oai", alpha=4.0,
    )  # fmt: skip
    expected = (
        64.0 * dequantize(w2[0], w2_scale[0], None, weight_format="mxfp4", pack_dim="input")[:, 0].float()
    )
    assert torch.equal(
        result[0].float().nan_to_num(nan=12345.0), expected.bfloat16().float().nan_to_num(nan=12345.0)
    )


def test_small_terms_survive_the_sum_over_routes(isa: str) -> None:
    """Expert outputs +1, 2^-9, -1: a running bf16 sum loses the middle one."""
    case = random_case(num_tokens=1, num_experts=3, top_k=3, bias=True)
    bias = torch.tensor([1.0, 2.0**-9, -1.0])[:, None].expand(3, 128).contiguous()
    case = dataclasses.replace(
        case,
        w2=torch.zeros_like(case.w2),
        w2_bias=bias,
        topk_ids=torch.tensor([[0, 1, 2]]),
        topk_weights=torch.ones(1, 3),
    )
    assert (run(case) == 2.0**-9).all()


@pytest.mark.parametrize(
    ("gate", "up", "limit", "expected"),
    [
        (-20.0, -9.0, 7.0, None),
        (9.0, 9.0, 7.0, 56.0),
        (-3.0, 0.5, None, None),
        (200.0, 1.0, None, 400.0),
        (-200.0, 1.0, 7.0, 0.0),
    ],
)
def test_activation_limits(
    isa: str, gate: float, up: float, limit: float | None, expected: float | None
) -> None:
    case = random_case(num_tokens=1, num_experts=1, top_k=1, hidden_size=64, intermediate_size=32)
    bias = torch.cat([torch.full((1, 32), gate), torch.full((1, 32), up)], 1)
    w2 = torch.zeros_like(case.w2)
    w2[:, :, 0] = 2  # code of 1.0, times 2^0
    case = dataclasses.replace(
        case,
        w13=torch.zeros_like(case.w13),
        w13_bias=bias,
        w2=w2,
        w2_scale=torch.full_like(case.w2_scale, 127),
        topk_weights=torch.ones(1, 1),
    )
    result = run(case, activation="swiglu_oai", alpha=1.702, limit=limit)
    g, u = torch.tensor(gate).double(), torch.tensor(up).double()
    if limit is not None:
        g, u = g.clamp(max=limit), u.clamp(-limit, limit)
    exact = g * torch.sigmoid(1.702 * g) * (u + 1)
    torch.testing.assert_close(result.double(), exact.expand(1, 64), rtol=2**-8, atol=1e-37)
    if expected is not None:
        assert result[0, 0].item() == pytest.approx(expected, rel=2**-8)


def test_inputs_are_left_alone(isa: str) -> None:
    case = random_case(num_tokens=4, **GPTOSS)
    tensors = [tensor for tensor in (*case.routing, *case.weights) if tensor is not None]
    copies = [tensor.clone() for tensor in tensors]
    run(case)
    assert all(torch.equal(a, b) for a, b in zip(tensors, copies, strict=True))


def test_heavy_tails_keep_their_accuracy(isa: str) -> None:
    """Outliers a thousand times the rest in every group: 16-bit digits would lose the rest, so a third is taken."""
    case = random_case(num_tokens=4, hidden_size=512, intermediate_size=256)
    x = case.hidden_states.clone()
    x[:, ::32] *= 1000
    w13 = case.w13.clone()
    w13[..., ::16] &= 0xF0  # code 0 (value +0) for the outliers: only the small values count
    changed = dataclasses.replace(case, hidden_states=x, w13=w13)
    assert rel_l2(run(changed), changed.reference()) < 1.9e-3
