"""The TPC-C kernels, emulated, stage by stage against fp64 arithmetic on weights unpacked here."""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from mxk_compile.kernels.tpc import emulate
from mxk_compile.kernels.tpc.emulate import Counters, Output
from mxk_compile.ops.formats import mxfp4
from mxk_compile.testing import MoECase, random_case, rel_l2

GPTOSS = {"activation": "swiglu_oai", "alpha": 1.702, "limit": 7.0, "bias": True, "row_order": "interleaved"}
CLAMP = {"activation": "swiglu_clamp", "limit": 2.0, "row_order": "interleaved"}
INT4 = {"weight_format": "uint4"}
PAIRS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gptoss": ("mxk_w13xib", "mxk_w2xb", GPTOSS),
    "glm": ("mxk_w13x", "mxk_w2x", {}),
    "dsv41": ("mxk_w13xi", "mxk_w2x", CLAMP),
    "muse": ("mxk_w13x", "mxk_w2xr", {"per_route": True}),
    "kimi": ("mxk_w13xt", "mxk_w2x", {}),
    "int4": ("mxk_w13i4x", "mxk_w2i4x", INT4),
    "kimi_int4": ("mxk_w13i4xt", "mxk_w2i4x", INT4),
}
# K, I: multiples of 32; whole chunks and not, odd and even numbers of them, fewer rows than TPCs have passes.
SHAPES = ((2880, 736), (96, 96), (512, 1536), (1056, 544))


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    """Builds what the quick tests use, two at a time."""
    names = {name for first, second, _ in PAIRS.values() for name in (first, second)} | {"mxk_deq"}
    names |= {"mxk_w13i4o", "mxk_w2i4o"}
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(emulate.build, sorted(names)))


def chunk_order(x: Tensor) -> Tensor:
    """Per 512 values, position 128 p + i = element 4 i + p; zero beyond the row."""
    rows, columns = x.shape
    padded = x.new_zeros(rows, -(-columns // 512) * 512)
    padded[:, :columns] = x
    return padded.view(rows, -1, 128, 4).transpose(2, 3).reshape(padded.shape).contiguous()


def natural_order(x: Tensor) -> Tensor:
    """Inverse of `chunk_order`, padding included."""
    return x.view(x.shape[0], -1, 4, 128).transpose(2, 3).reshape(x.shape)


def unpacked(packed: Tensor, scale: Tensor) -> Tensor:
    """fp64 values of MXFP4, or of INT4 with floating-point scales, [..., rows, columns]."""
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2).to(torch.int64)
    if scale.dtype == torch.uint8:
        magnitudes = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
        table = torch.tensor([*magnitudes, *(-m for m in magnitudes)], dtype=torch.float64)
        return table[codes] * (2.0 ** (scale.double() - 127)).repeat_interleave(32, -1)
    return (codes - 8) * scale.double().repeat_interleave(32, -1)


def local_routes(case: MoECase) -> list[tuple[int, int, int, int]]:
    """(route, token, slot, local expert) of the routes that belong to this card."""
    first, count = case.attributes["experts_min"], case.w2.shape[0]
    top_k = case.topk_ids.shape[1]
    routes = (
        (t, k, int(case.topk_ids[t, k]) - first) for t in range(len(case.topk_ids)) for k in range(top_k)
    )
    return [(t * top_k + k, t, k, e) for t, k, e in routes if 0 <= e < count]


def expected_intermediate(case: MoECase) -> dict[int, Tensor]:
    """fp64 activations [I] of each local route."""
    attributes, weights = case.attributes, unpacked(case.w13, case.w13_scale)
    found = {}
    for route, token, _, expert in local_routes(case):
        rows = weights[expert] @ case.hidden_states[token].double()
        if case.w13_bias is not None:
            rows = rows + case.w13_bias[expert].double()
        gate, up = (rows[0::2], rows[1::2]) if attributes["row_order"] == "interleaved" else rows.chunk(2)
        if attributes["activation"] != "silu":
            gate = torch.minimum(gate, torch.tensor(attributes["limit"]))
            up = up.clamp(-attributes["limit"], attributes["limit"])
        if attributes["activation"] == "swiglu_oai":
            found[route] = gate / (1 + torch.exp(-attributes["alpha"] * gate)) * (up + 1)
        else:
            found[route] = gate / (1 + torch.exp(-gate)) * up
    return found


def expected_output(case: MoECase, intermediate: Tensor) -> Tensor:
    """fp64 [T, k, K] from activations [R, I]: weighted rows, zero for routes that are not local."""
    weights = unpacked(case.w2, case.w2_scale)
    rows = torch.zeros(*case.topk_ids.shape, case.hidden_states.shape[1], dtype=torch.float64)
    for route, token, slot, expert in local_routes(case):
        row = weights[expert] @ intermediate[route].double()
        if case.w2_bias is not None:
            row = row + case.w2_bias[expert].double()
        rows[token, slot] = row * case.topk_weights[token, slot].double()
    return rows


@dataclasses.dataclass
class Result:
    """Both stages of a call; the intermediate in natural order, [R, IP]."""

    intermediate: Tensor
    output: Tensor
    first: Counters
    second: Counters


def run(
    case: MoECase, first: str, second: str, defines: dict[str, int] | None = None, seed: int = 0
) -> Result:
    """Runs the gate/up and the down kernel on a call."""
    attributes = case.attributes
    num_tokens, hidden_size = case.hidden_states.shape
    top_k, intermediate_size = case.topk_ids.shape[1], case.w2.shape[2] * 2
    padded_size = -(-intermediate_size // 512) * 512
    ids = case.topk_ids.to(torch.int32).contiguous()
    inputs = [chunk_order(case.hidden_states), ids, case.w13, case.w13_scale]
    scalars: list[int | float] = [attributes["experts_min"]]
    if case.w13_bias is not None:
        inputs.append(case.w13_bias.float())
        scalars.append(attributes["alpha"])
    if attributes["activation"] != "silu":
        scalars.append(attributes["limit"])
    outputs = [Output((num_tokens * top_k, padded_size), torch.bfloat16)]
    (a,), counters = emulate.build(first, defines).run(inputs, outputs, scalars, seed=seed)

    inputs = [a, ids, case.topk_weights.float().contiguous(), case.w2, case.w2_scale]
    if case.w2_bias is not None:
        inputs.append(case.w2_bias.float())
    shape = (num_tokens, top_k, hidden_size) if attributes["per_route"] else (num_tokens, hidden_size)
    kernel = emulate.build(second, defines)
    (y,), counters2 = kernel.run(inputs, [Output(shape, torch.bfloat16)], scalars[:1], seed=seed)
    return Result(natural_order(a), y, counters, counters2)


def check_rounded(given: Tensor, expected: Tensor, terms: float) -> None:
    """bf16 `given` is fp64 `expected` rounded once, but for fp32 errors of sums with terms of the size `terms`."""
    error = (given.double() - expected).abs()
    allowed = expected.abs() * 2.0**-8 + 2e-6 * terms
    assert bool((error <= allowed).all()), f"error {float((error / allowed).max()):.3g} of the allowed one"


def check(case: MoECase, first: str, second: str, defines: dict[str, int] | None = None) -> Result:
    """Runs a call and compares both stages; what is not written, or twice, or beyond, is an error."""
    result = run(case, first, second, defines)
    routes, size = local_routes(case), case.w2.shape[2] * 2
    # The largest sum of magnitudes is at most about sqrt(K) times the largest sum.
    for route, expected in expected_intermediate(case).items():
        terms = float(expected.abs().max()) * case.hidden_states.shape[1] ** 0.5
        check_rounded(result.intermediate[route, :size], expected, terms)
        assert bool((result.intermediate[route, size:] == 0).all())
    rows = expected_output(case, result.intermediate[:, :size])
    terms = float(rows.abs().max()) * size**0.5
    check_rounded(result.output, rows if case.attributes["per_route"] else rows.sum(1), terms)

    away = case.topk_ids.numel() - len(routes)
    assert result.first.unwritten == (away * result.intermediate.shape[1],)
    assert result.second.unwritten == (0,)
    for counters in (result.first, result.second):
        assert counters.repeated_partial_stores == 0
        assert counters.vlm_bytes <= counters.vlm_limit
        assert counters.slm_bytes <= emulate.SLM_BYTES
    without = sorted(set(range(len(case.topk_ids))) - {token for _, token, _, _ in routes})
    assert bool((result.output[without].view(torch.int16) == 0).all())  # +0
    return result


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_both_stages(pair: str, shape: tuple[int, int]) -> None:
    first, second, attributes = PAIRS[pair]
    # rms 8: both clamps are met.
    case = random_case(
        num_tokens=5,
        num_experts=4,
        top_k=3,
        hidden_size=shape[0],
        intermediate_size=shape[1],
        rms=8.0,
        **attributes,
    )
    case.topk_ids[1] = -1
    case.topk_ids[2] = 2  # three routes of one token to one expert
    case.topk_ids[3, 0] = 4
    case.hidden_states[1] = torch.nan  # nobody reads it
    check(case, first, second)


@pytest.mark.parametrize("pair", ["kimi", "kimi_int4"])
@pytest.mark.parametrize("hidden_size", [6144, 6656, 7168, 8192])
def test_activations_beyond_local_memory(pair: str, hidden_size: int) -> None:
    first, second, attributes = PAIRS[pair]
    check(
        random_case(num_tokens=2, hidden_size=hidden_size, intermediate_size=96, **attributes), first, second
    )


@pytest.mark.parametrize("shape", [(64, 32), (2880, 736), (1056, 544), (512, 3072), (7168, 96)], ids=str)
@pytest.mark.parametrize("symmetric", [True, False])
def test_int4_packed_along_the_output(shape: tuple[int, int], symmetric: bool) -> None:
    hidden_size, intermediate_size = shape
    layout = {"pack_dim": "output", "weight_format": "uint4", "zero": True}
    sizes = {"hidden_size": hidden_size, "intermediate_size": intermediate_size}
    case = random_case(num_tokens=3, num_experts=4, top_k=3, rms=3.0, **layout, **sizes)
    case.topk_ids[1] = torch.tensor([-1, 2, 2])
    case.topk_ids[2] = 4
    zeros = []
    for zero in (case.w13_zero, case.w2_zero):
        assert zero is not None
        zero.copy_(torch.full_like(zero[0], 8) if symmetric else zero[0].clone())  # all experts share them
        zeros.append(
            (zero[0, :, 0::2] | (zero[0, :, 1::2] << 4))
            .contiguous()
            .reshape(-1)
            .view(torch.int32)
            .view(len(zero[0]), -1)
        )
    ids, routes = case.topk_ids.to(torch.int32), local_routes(case)
    padded_size = -(-intermediate_size // 512) * 512
    inputs = [chunk_order(case.hidden_states), ids, case.w13, case.w13_scale, zeros[0]]
    (a,), first = emulate.build("mxk_w13i4o").run(inputs, [Output((9, padded_size), torch.bfloat16)], [0])
    inputs = [a, ids, case.topk_weights.float(), case.w2, case.w2_scale, zeros[1]]
    (y,), second = emulate.build("mxk_w2i4o").run(inputs, [Output((3, hidden_size), torch.bfloat16)], [0])

    def values(packed: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
        """[E, outputs, inputs]."""
        assert zero is not None
        raw = packed.view(torch.uint8)
        codes = torch.stack((raw & 15, raw >> 4), dim=-1).flatten(-2).double()
        groups = [tensor.double().repeat_interleave(32, 1) for tensor in (zero, scale)]
        return ((codes - groups[0]) * groups[1]).transpose(1, 2)

    gate_up = values(case.w13, case.w13_scale, case.w13_zero)
    down = values(case.w2, case.w2_scale, case.w2_zero)
    intermediate = natural_order(a)
    expected = torch.zeros(3, hidden_size, dtype=torch.float64)
    for route, token, slot, expert in routes:
        gate, up = (gate_up[expert] @ case.hidden_states[token].double()).chunk(2)
        act = gate / (1 + torch.exp(-gate)) * up
        given = intermediate[route, :intermediate_size]
        check_rounded(given, act, float(act.abs().max()) * hidden_size**0.5)
        weight = case.topk_weights[token, slot].double()
        expected[token] += down[expert] @ given.double() * weight
        assert bool((intermediate[route, intermediate_size:] == 0).all())
    check_rounded(y, expected, float(expected.abs().max()) * intermediate_size**0.5)
    assert not y[2].view(torch.int16).any()
    assert first.unwritten == ((9 - len(routes)) * padded_size,)
    assert second.unwritten == (0,)
    for counters in (first, second):
        assert counters.per_chunk_row() == 21.375
        assert counters.mac_distance is not None
        assert counters.mac_distance >= 4
        assert counters.repeated_partial_stores == 0
        assert counters.vlm_bytes <= counters.vlm_limit


@pytest.mark.parametrize(("num_tokens", "top_k"), [(1, 1), (1, 128), (16, 8), (32, 4), (31, 1)])
def test_up_to_128_routes(num_tokens: int, top_k: int) -> None:
    case = random_case(
        num_tokens=num_tokens, num_experts=128, top_k=top_k, hidden_size=192, intermediate_size=64
    )
    check(case, "mxk_w13x", "mxk_w2x")


def test_all_routes_to_one_expert() -> None:
    case = random_case(num_tokens=8, top_k=4, hidden_size=544, intermediate_size=160, hot=True, experts_min=3)
    check(case, "mxk_w13x", "mxk_w2x")


def test_no_local_route() -> None:
    case = random_case(num_tokens=3, hidden_size=96, intermediate_size=64)
    case.topk_ids.fill_(100)
    result = check(case, "mxk_w13x", "mxk_w2x")
    assert not result.output.view(torch.int16).any()
    case.attributes["per_route"] = True
    assert not check(case, "mxk_w13x", "mxk_w2xr").output.view(torch.int16).any()


ids = st.one_of(st.integers(-(2**31), 2**31 - 1), st.integers(-2, 12))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    routing=st.integers(1, 6).flatmap(
        lambda top_k: st.lists(st.lists(ids, min_size=top_k, max_size=top_k), min_size=1, max_size=20)
    ),
    experts_min=st.sampled_from([0, 1, 5, 2**31 - 6]),
    per_route=st.booleans(),
)
def test_any_routing(routing: list[list[int]], experts_min: int, per_route: bool) -> None:
    case = random_case(
        num_tokens=len(routing), num_experts=5, hidden_size=64, intermediate_size=32, experts_min=experts_min
    )
    case.topk_ids = torch.tensor(routing)
    case.topk_weights = torch.rand(case.topk_ids.shape, generator=torch.Generator().manual_seed(0))
    case.attributes["per_route"] = per_route
    check(case, "mxk_w13x", "mxk_w2xr" if per_route else "mxk_w2x")


def test_bits_do_not_depend_on_the_order_of_invocations() -> None:
    case = random_case(hidden_size=1056, intermediate_size=96)
    first, second = (run(case, "mxk_w13x", "mxk_w2x", seed=seed) for seed in (0, 1))
    assert torch.equal(first.intermediate, second.intermediate)
    assert torch.equal(first.output, second.output)


@pytest.mark.parametrize("pair", ["glm", "gptoss", "dsv41"])
def test_nan_and_infinity_stay(pair: str) -> None:
    first, second, attributes = PAIRS[pair]
    case = random_case(num_tokens=3, hidden_size=64, intermediate_size=32, **attributes)
    case.hidden_states[1, 5] = torch.nan
    result = run(case, first, second)
    assert bool(result.output[1].isnan().all())
    assert bool(result.output[[0, 2]].isfinite().all())


def test_scale_bytes_0_and_255_as_documented() -> None:
    case = random_case(num_tokens=1, num_experts=1, top_k=1, hidden_size=64, intermediate_size=32)
    case.w13_scale.fill_(0)
    assert not run(case, "mxk_w13x", "mxk_w2x").intermediate.any()
    case.w13.fill_(0x22)
    case.w13_scale.fill_(255)
    case.hidden_states.fill_(1)
    assert bool((run(case, "mxk_w13x", "mxk_w2x").intermediate[:, :32] == torch.inf).all())


@pytest.mark.parametrize("shape", [(256, 512), (50, 2880), (7, 96), (31, 1056)], ids=str)
def test_unpack_is_exact_for_all_codes_and_scales(shape: tuple[int, int]) -> None:
    rows, columns = shape
    generator = torch.Generator().manual_seed(1)
    packed = torch.randint(0, 256, (rows, columns // 2), generator=generator, dtype=torch.uint8)
    scale = torch.randint(0, 256, (rows, columns // 32), generator=generator, dtype=torch.uint8)
    if shape == (256, 512):  # each byte under each scale
        packed = torch.arange(256).to(torch.uint8).expand(256, 256).contiguous()
        scale = torch.arange(256).to(torch.uint8).view(256, 1).expand(256, 16).contiguous()
    (values,), counters = emulate.build("mxk_deq").run([packed, scale], [Output(shape, torch.bfloat16)])
    assert torch.equal(values.view(torch.int16), mxfp4.unpack(packed, scale).view(torch.int16))
    finite = (scale > 0) & (scale < 253)
    exact = unpacked(packed, scale)[finite.repeat_interleave(32, -1)]
    assert torch.equal(values[finite.repeat_interleave(32, -1)].double(), exact)
    assert counters.unwritten == (0,)
    assert counters.repeated_partial_stores == 0


# VPU ops of the chunk loop for each chunk-row, as mxk_dot.h states them; of the rest, for each pass of four rows.
VPU_OPS = {"mxk_w13x": 14.5, "mxk_w13xi": 14.5, "mxk_w13xib": 14.5, "mxk_w13xt": 14.5, "mxk_w13i4x": 13.5}
VPU_OPS |= {"mxk_w13i4xt": 13.5, "mxk_w2x": 14.5, "mxk_w2xb": 14.5, "mxk_w2xr": 14.5, "mxk_w2i4x": 13.5}


@pytest.mark.parametrize("pair", PAIRS)
def test_operations(pair: str) -> None:
    first, second, attributes = PAIRS[pair]
    result = run(random_case(hidden_size=3072, intermediate_size=1024, **attributes), first, second)
    for name, counters in ((first, result.first), (second, result.second)):
        assert counters.per_chunk_row() == VPU_OPS[name]
        assert counters.per_chunk_row("load") <= 11.5
        assert counters.mac_distance is not None
        assert counters.mac_distance >= 4
    chunks = {first: 6, second: 2}
    for name, counters in ((first, result.first), (second, result.second)):
        passes = counters.chunk_rows / chunks[name] / 4
        assert counters.slot_ops("vpu", "epilogue") / passes <= 27


def test_operations_of_the_unpack() -> None:
    inputs = [torch.zeros(24, 256, dtype=torch.uint8), torch.full((24, 16), 127, dtype=torch.uint8)]
    _, counters = emulate.build("mxk_deq").run(inputs, [Output((24, 512), torch.bfloat16)])
    assert counters.per_chunk_row() == 41


FLAGS = {
    "MXK_SCALE_BF16": (16.5, ("glm", "gptoss")),
    "MXK_PAIR_LOOKUP": (10.5, ("glm", "kimi")),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flag", "pair"), [(flag, pair) for flag, (_, pairs) in FLAGS.items() for pair in pairs]
)
def test_build_flags(flag: str, pair: str) -> None:
    first, second, attributes = PAIRS[pair]
    for hidden_size, intermediate_size in SHAPES:
        sizes = {"hidden_size": hidden_size, "intermediate_size": intermediate_size}
        check(random_case(num_tokens=3, rms=4.0, **sizes, **attributes), first, second, {flag: 1})
    result = run(
        random_case(hidden_size=2048, intermediate_size=1024, **attributes), first, second, {flag: 1}
    )
    for counters in (result.first, result.second):
        assert counters.per_chunk_row() == FLAGS[flag][0]
        assert counters.mac_distance is not None
        assert counters.mac_distance >= 4


@pytest.mark.slow
@pytest.mark.parametrize("pair", ["glm", "gptoss", "muse"])
def test_shared_unpack(pair: str) -> None:
    first, second, attributes = PAIRS[pair]
    flag = {"MXK_SHARE": 1}
    for hidden_size, intermediate_size in SHAPES:
        for num_tokens, top_k in ((4, 1), (5, 2), (9, 1)):
            sizes = {"hidden_size": hidden_size, "intermediate_size": intermediate_size}
            routing = {"num_tokens": num_tokens, "top_k": top_k, "num_experts": 3}
            check(random_case(rms=4.0, **sizes, **routing, **attributes), first, second, flag)
    for size, operations in ((4, 7.125), (3, 9.5), (2, 14.25)):
        case = random_case(
            num_tokens=size, top_k=1, hidden_size=1024, intermediate_size=1024, hot=True, **attributes
        )
        result = run(case, first, second, flag)
        assert result.first.per_chunk_row() == operations
        assert result.second.per_chunk_row() == operations


@pytest.mark.slow
def test_scaling_after_the_macs_is_no_less_exact() -> None:
    case = random_case(num_tokens=16, num_experts=4, hidden_size=2880, intermediate_size=736, rms=2.0)
    exact = expected_intermediate(case)
    off = {}
    for defines in ({}, {"MXK_SCALE_BF16": 1}):
        given = run(case, "mxk_w13x", "mxk_w2x", defines).intermediate
        # Elements that are not the nearest bf16 of the fp64 value.
        off[bool(defines)] = sum(
            int((given[r, :736] != value.bfloat16()).sum()) for r, value in exact.items()
        )
    assert off[False] <= off[True] <= 0.002 * 736 * len(exact)


@pytest.mark.slow
@pytest.mark.parametrize("pair", PAIRS)
def test_parity(pair: str) -> None:
    first, second, attributes = PAIRS[pair]
    sizes = {
        "hidden_size": 7168 if "kimi" in pair else 2880,
        "intermediate_size": 2048 if "kimi" in pair else 2880,
    }
    for rms in (1.0, 4.0):
        case = random_case(num_tokens=2, num_experts=4, top_k=2, rms=rms, **sizes, **attributes)
        assert rel_l2(run(case, first, second).output, case.reference(round_intermediate=True)) <= 1.8e-3
