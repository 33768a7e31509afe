"""`mxk::moe` against an fp64 computation that shares no code with the package; semantics of routing and activation.

Every check runs the fp32 torch reference and the op (a fused kernel where one is built).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from mxk_compile.ops import moe
from mxk_compile.testing import MoECase, random_case, rel_l2, variant_case
from mxk_compile.variants import VARIANTS

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]


def run_reference(case: MoECase) -> Tensor:
    return moe.reference(*case.routing, *case.weights, **case.attributes)


def run_op(case: MoECase) -> Tensor:
    return case.fused()


def run_lists(case: MoECase) -> Tensor:
    result: Tensor = torch.ops.mxk.moe.lists(*case.routing, *case.lists, **case.attributes)
    return result


both = pytest.mark.parametrize("run", [run_reference, run_op], ids=["reference", "op"])
Run = Callable[[MoECase], Tensor]


def codes_of(packed: Tensor) -> Tensor:
    """4-bit codes of one matrix, along the packed (last) dimension, by shifting."""
    step, width = (2, 8) if packed.dtype == torch.uint8 else (8, 32)
    words = packed.to(torch.int64) & ((1 << width) - 1)
    return torch.stack([(words >> (4 * i)) & 15 for i in range(step)], dim=-1).flatten(-2)


def matrix(case: MoECase, name: str, expert: int) -> Tensor:
    """One expert's weight as fp64 [rows, columns]."""
    packed, scale = getattr(case, name)[expert], getattr(case, f"{name}_scale")[expert]
    zero, attributes = getattr(case, f"{name}_zero"), case.attributes
    codes = codes_of(packed)
    if attributes["weight_format"] == "mxfp4":
        values = torch.tensor(E2M1, dtype=torch.float64)[codes]
        scales = torch.pow(torch.tensor(2.0, dtype=torch.float64), scale.double() - 127)
        return values * scales.repeat_interleave(32, dim=1)[:, : values.shape[1]]
    dim = 0 if attributes["pack_dim"] == "output" else 1
    repeat = codes.shape[dim] // scale.shape[dim]
    if attributes["weight_format"] == "int4":
        codes = torch.where(codes > 7, codes - 16, codes)
    else:
        codes = codes - (
            8 if zero is None else zero[expert].to(torch.int64).repeat_interleave(repeat, dim=dim)
        )
    values = codes.double() * scale.double().repeat_interleave(repeat, dim=dim)
    return values.T if dim == 0 else values


def independent(case: MoECase) -> Tensor:
    """The layer in fp64, route by route."""
    a = case.attributes
    num_tokens, top_k = case.topk_ids.shape
    w13 = functools.cache(lambda expert: matrix(case, "w13", expert))
    w2 = functools.cache(lambda expert: matrix(case, "w2", expert))
    out = torch.zeros(num_tokens, top_k, case.hidden_states.shape[1], dtype=torch.float64)
    for token, slot in itertools.product(range(num_tokens), range(top_k)):
        expert = int(case.topk_ids[token, slot]) - a["experts_min"]
        if not 0 <= expert < len(case.w2):
            continue
        h = w13(expert) @ case.hidden_states[token].double()
        if case.w13_bias is not None:
            h = h + case.w13_bias[expert].double()
        half = len(h) // 2
        gate, up = {
            "gate_up": (h[:half], h[half:]),
            "up_gate": (h[half:], h[:half]),
            "interleaved": (h[::2], h[1::2]),
        }[a["row_order"]]
        if a["activation"] != "silu" and a["limit"] is not None:
            gate = torch.minimum(gate, torch.tensor(a["limit"]).double())
            up = torch.maximum(torch.minimum(up, torch.tensor(a["limit"])), torch.tensor(-a["limit"]))
        alpha, one = (a["alpha"], 1.0) if a["activation"] == "swiglu_oai" else (1.0, 0.0)
        hidden = gate / (1 + torch.exp(-alpha * gate)) * (up + one)
        y = w2(expert) @ hidden
        if case.w2_bias is not None:
            y = y + case.w2_bias[expert].double()
        out[token, slot] = y * case.topk_weights[token, slot].double()
    return out if a["per_route"] else out.sum(1)


@both
@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("num_tokens", [0, 1, 9])
def test_variants(run: Run, name: str, num_tokens: int) -> None:
    """Activation, bias, row order and output of every model row, at a small shape that is no power of two."""
    case = variant_case(
        VARIANTS[name], num_tokens=num_tokens, hidden_size=160, intermediate_size=96, num_experts=8, rms=2.0
    )
    result, expected = run(case), independent(case)
    assert result.shape == expected.shape
    assert result.dtype == torch.bfloat16
    if num_tokens:
        assert rel_l2(result, expected) < 3e-3


@both
@pytest.mark.parametrize("pack_dim", ["input", "output"])
@pytest.mark.parametrize(("weight_format", "zero"), [("uint4", False), ("uint4", True), ("int4", False)])
@pytest.mark.parametrize("group_size", [32, 64, 128, None])
@pytest.mark.parametrize("row_order", ["gate_up", "interleaved"])
def test_int4(
    run: Run, pack_dim: str, weight_format: str, zero: bool, group_size: int | None, row_order: str
) -> None:
    case = random_case(
        hidden_size=256, intermediate_size=128, weight_format=weight_format, zero=zero, pack_dim=pack_dim,
        group_size=group_size, row_order=row_order, bias=True, num_tokens=5, top_k=3,
    )  # fmt: skip
    assert rel_l2(run(case), independent(case)) < 3e-3


@both
@pytest.mark.parametrize("row_order", ["gate_up", "up_gate", "interleaved"])
def test_row_orders_are_the_same_layer(run: Run, row_order: str) -> None:
    base = random_case(bias=True)
    half = base.w13.shape[1] // 2
    gate, up = torch.arange(half), torch.arange(half, 2 * half)
    order = {
        "gate_up": torch.cat([gate, up]),
        "up_gate": torch.cat([up, gate]),
        "interleaved": torch.stack([gate, up], dim=1).flatten(),
    }[row_order]
    assert base.w13_bias is not None
    case = dataclasses.replace(
        base,
        w13=base.w13[:, order],
        w13_scale=base.w13_scale[:, order],
        w13_bias=base.w13_bias[:, order],
        attributes={**base.attributes, "row_order": row_order},
    )
    assert torch.equal(run(case), run(base))


@both
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_bias_dtypes(run: Run, dtype: torch.dtype) -> None:
    case = random_case(bias=True, row_order="interleaved")
    assert case.w13_bias is not None
    assert case.w2_bias is not None
    typed = dataclasses.replace(case, w13_bias=case.w13_bias.to(dtype), w2_bias=case.w2_bias.to(dtype))
    assert rel_l2(run(typed), independent(typed)) < 3e-3


def test_lists_are_the_same_call() -> None:
    for attributes in ({"bias": True}, {"weight_format": "uint4", "zero": True, "pack_dim": "output"}):
        case = random_case(**attributes)  # type: ignore[arg-type]
        assert torch.equal(run_lists(case), run_op(case))


def test_separate_lists() -> None:
    case = random_case(bias=True)
    half = case.w13.shape[1] // 2
    lists = list(case.lists)
    for index in (0, 1, 6):  # w13, its scale, its bias: all gates, then all ups
        lists[index] = [w[:half] for w in lists[index]] + [w[half:] for w in lists[index]]
    attributes = {**case.attributes, "row_order": "separate"}
    assert torch.equal(torch.ops.mxk.moe.lists(*case.routing, *lists, **attributes), run_op(case))


def constant_experts(outputs: list[float], weights: list[float] | None = None) -> MoECase:
    """One token whose expert e returns outputs[e] everywhere: zero weights, w2_bias = output."""
    num = len(outputs)
    case = random_case(
        num_tokens=1, num_experts=num, top_k=num, hidden_size=32, intermediate_size=32, bias=True
    )
    assert case.w2_bias is not None
    return dataclasses.replace(
        case,
        topk_ids=torch.arange(num)[None],
        topk_weights=torch.tensor([weights or [1.0] * num]).bfloat16(),
        w2=torch.zeros_like(case.w2),
        w2_bias=torch.tensor(outputs)[:, None].expand(num, 32).contiguous(),
    )


@both
def test_sum_over_routes_is_fp32(run: Run) -> None:
    """A3: +1, 2^-9, -1: a running bf16 sum gives 0."""
    case = constant_experts([1.0, 2.0**-9, -1.0])
    assert torch.equal(run(case), torch.full((1, 32), 2.0**-9, dtype=torch.bfloat16))
    running = torch.zeros((), dtype=torch.bfloat16)
    for value in (1.0, 2.0**-9, -1.0):
        running = running + torch.tensor(value, dtype=torch.bfloat16)
    assert running == 0


@both
def test_repeats_are_bit_equal_and_slots_may_be_permuted(run: Run) -> None:
    """A3."""
    case = random_case(num_tokens=7, top_k=4, hidden_size=96, intermediate_size=96)
    first = run(case)
    assert all(torch.equal(run(case), first) for _ in range(20))
    order = torch.tensor([2, 0, 3, 1])
    permuted = dataclasses.replace(
        case, topk_ids=case.topk_ids[:, order], topk_weights=case.topk_weights[:, order]
    )
    assert rel_l2(run(permuted), first) < 3e-3


def forced(gate: float, up: float, activation: str, alpha: float, limit: float | None) -> MoECase:
    """One token, one expert, pre-activations forced by the bias; w2 = 0.5 * identity-like rows of the first value."""
    case = random_case(
        num_tokens=1, num_experts=1, top_k=1, hidden_size=32, intermediate_size=32, bias=True,
        activation=activation, alpha=alpha, limit=limit,
    )  # fmt: skip
    w2 = torch.zeros_like(case.w2)
    w2[:, :, 0] = 1  # code 1 (0.5) at input 0
    return dataclasses.replace(
        case,
        hidden_states=torch.zeros_like(case.hidden_states),
        topk_weights=torch.tensor([[2.0]]).bfloat16(),
        w13_bias=torch.cat([torch.full((1, 32), gate), torch.full((1, 32), up)], dim=1),
        w2=w2,
        w2_scale=torch.full_like(case.w2_scale, 127),
        w2_bias=torch.zeros(1, 32),
    )


@both
@pytest.mark.parametrize(
    ("activation", "gate", "up", "alpha", "limit", "expected"),
    [
        ("swiglu_oai", -20.0, -9.0, 1.702, 7.0, 1.9e-13),  # gate has no lower clamp: -7 would give 2.8e-4
        ("swiglu_oai", 9.0, 9.0, 1.702, 7.0, 55.99963),  # both clamped to 7
        ("swiglu_oai", 9.0, 9.0, 1.0, 10.0, 89.98893),
        ("swiglu_oai", 9.0, 9.0, 1.0, 1e9, 89.98893),
        ("swiglu_oai", 9.0, 9.0, 1.0, None, 89.98893),  # no limit, no clamp
        ("swiglu_clamp", 9.0, 9.0, 1.0, 7.0, 48.95532),  # without + 1
        ("swiglu_clamp", -20.0, -9.0, 1.0, 7.0, 2.886e-7),  # -20 * sigmoid(-20) * -7
        ("swiglu_clamp", 9.0, 9.0, 1.0, None, 80.99),
        ("silu", 9.0, 9.0, 1.0, 7.0, 80.99),  # silu takes no limit
    ],
)
def test_activation_limits(
    run: Run, activation: str, gate: float, up: float, alpha: float, limit: float | None, expected: float
) -> None:
    """A4: clamps are one-sided for the gate, two-sided for up, absent without a limit."""
    result = run(forced(gate, up, activation, alpha, limit))
    assert float(result[0, 0]) == pytest.approx(expected, rel=2.0**-7)


def with_poisoned_neighbours(case: MoECase) -> MoECase:
    """The same experts inside a larger buffer whose other experts are NaN: reading any of them shows."""
    num = len(case.w2)

    def fence(weight: Tensor | None, poison: int) -> Tensor | None:
        if weight is None:
            return None
        wide = torch.full((num + 4, *weight.shape[1:]), poison, dtype=weight.dtype)
        wide[2 : num + 2] = weight
        return wide[2 : num + 2]

    names = ("w13", "w13_scale", "w2", "w2_scale")
    return dataclasses.replace(case, **{name: fence(getattr(case, name), 0xFF) for name in names})


@both
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_ids_outside_add_nothing(run: Run, dtype: torch.dtype) -> None:
    """A5: -1, ids of other ranks, and the largest int."""
    base = with_poisoned_neighbours(random_case(num_experts=4))
    ids = torch.tensor([[-1, 2], [7, 3], [4, -1], [2147483647, 0]], dtype=dtype)
    weights = torch.full((4, 2), 0.5).bfloat16()
    case = dataclasses.replace(base, topk_ids=ids, topk_weights=weights)
    kept = dataclasses.replace(
        base,
        topk_ids=torch.tensor([[2], [3], [0], [0]]),
        topk_weights=torch.tensor([[0.5], [0.5], [0.0], [0.5]]).bfloat16(),
    )
    result = run(case)
    assert torch.equal(result[[0, 1, 3]], run(kept)[[0, 1, 3]])
    assert torch.equal(result[2].view(torch.int16), torch.zeros(128, dtype=torch.int16))


@both
def test_token_without_local_expert_is_zero_beside_nan(run: Run) -> None:
    """Exact +0, though another token and another expert hold NaN and inf."""
    case = random_case(num_tokens=3, num_experts=4)
    case.hidden_states[0] = float("nan")
    case.hidden_states[1] = float("inf")
    case.w13_scale[1] = 255
    case.topk_ids[:] = torch.tensor([[0, 1], [1, 2], [-5, 99]])
    result = run(case)
    assert torch.equal(result[2].view(torch.int16), torch.zeros(128, dtype=torch.int16))
    assert result[:2].isnan().all()


@both
def test_four_ranks_sum_to_the_whole(run: Run) -> None:
    """A6: ids are global, both ends of the range belong to the rank."""
    whole = random_case(num_experts=16, top_k=4, num_tokens=9)
    parts = []
    for first in (0, 4, 8, 12):
        stacks = {
            name: getattr(whole, name)[first : first + 4] for name in ("w13", "w13_scale", "w2", "w2_scale")
        }
        rank = dataclasses.replace(whole, **stacks, attributes={**whole.attributes, "experts_min": first})
        shifted = dataclasses.replace(rank, topk_ids=whole.topk_ids - first, attributes=whole.attributes)
        assert torch.equal(run(rank), run(shifted))
        parts.append(run(rank).float())
    assert rel_l2(sum(parts), independent(whole)) < 3e-3  # type: ignore[arg-type]


@both
def test_id_dtypes(run: Run) -> None:
    """A8: every integer dtype, no wrap of 2^32 + 3, floats refused."""
    case = random_case(num_tokens=6)
    expected = run(case)
    unsigned = (torch.uint8, torch.uint16, torch.uint32, torch.uint64)
    for dtype in (torch.int64, torch.int32, torch.int16, torch.int8, *unsigned):
        assert torch.equal(run(dataclasses.replace(case, topk_ids=case.topk_ids.to(dtype))), expected)
    ids = case.topk_ids.clone()
    ids[0, 0] = 2**32 + 3
    dropped = case.topk_ids.clone()
    dropped[0, 0] = -1
    assert torch.equal(
        run(dataclasses.replace(case, topk_ids=ids)), run(dataclasses.replace(case, topk_ids=dropped))
    )


def test_float_ids_are_refused() -> None:
    case = random_case()
    with pytest.raises(ValueError, match="topk_ids is .*float32; allowed: .*integer"):
        run_op(dataclasses.replace(case, topk_ids=case.topk_ids.float()))


@both
@pytest.mark.parametrize("top_k", [1, 2, 3, 4, 5])
def test_strided_inputs(run: Run, top_k: int) -> None:
    """A9: any strides, inputs unchanged."""
    case = random_case(num_tokens=5, top_k=top_k)
    size, expected = 128, run(case)
    wide = torch.full((5, 2 * size), float("nan"), dtype=torch.bfloat16)
    wide[:, :size] = case.hidden_states
    offset = torch.empty(5 * size + 3, dtype=torch.bfloat16)[3:].view(5, size).copy_(case.hidden_states)
    wide_ids = torch.full((5, 2 * top_k + 1), 3)
    wide_ids[:, :top_k] = case.topk_ids
    changes: list[dict[str, Any]] = [
        {"hidden_states": wide[:, :size]},
        {"hidden_states": case.hidden_states.t().contiguous().t()},
        {"hidden_states": offset},
        {"topk_ids": wide_ids[:, :top_k]},
        {"topk_ids": case.topk_ids.t().contiguous().t()},
        {"topk_weights": case.topk_weights.t().contiguous().t()},
    ]
    for change in changes:
        version = next(iter(change.values()))._version
        assert torch.equal(run(dataclasses.replace(case, **change)), expected)
        assert next(iter(change.values()))._version == version
    broadcast = case.hidden_states[:1].expand(5, size)
    expected = run(dataclasses.replace(case, hidden_states=broadcast.contiguous()))
    assert torch.equal(run(dataclasses.replace(case, hidden_states=broadcast)), expected)


@both
@pytest.mark.parametrize("hidden_size", [32, 256])
@pytest.mark.parametrize(
    ("outlier", "small"),
    [(4.0, 0.02), (8.0, 0.01), (8.0, 1e-4), (100.0, 0.01), (1e4, 0.01), (1e20, 1.0), (1e30, 1.0)],
)
def test_outliers_do_not_drown_their_group(run: Run, hidden_size: int, outlier: float, small: float) -> None:
    """Weights that are zero but for the small values beside one large one: what a shared exponent would lose."""
    case = random_case(num_tokens=1, num_experts=1, top_k=1, hidden_size=hidden_size)
    case.w13[..., 16:] = 0
    case.w13[..., 0] &= 0xF0  # the first code is 0
    case.hidden_states[:, :32] *= small
    case.hidden_states[:, 0] = outlier
    assert rel_l2(run(case), independent(case)) < 8e-3


@both
def test_padding_is_never_read(run: Run) -> None:
    """A1: bytes behind the last group of a row, in wider scale and weight buffers, do not matter."""
    case = random_case(hidden_size=1504, intermediate_size=1504, num_experts=2)
    results = []
    for padding in (0x00, 0x7F, 0xFF):
        changes = {}
        for name in ("w13", "w13_scale", "w2", "w2_scale"):
            weight = getattr(case, name)
            wide = torch.full((*weight.shape[:-1], weight.shape[-1] + 17), padding, dtype=torch.uint8)
            wide[..., : weight.shape[-1]] = weight
            changes[name] = wide[..., : weight.shape[-1]]
        results.append(run(dataclasses.replace(case, **changes)))
    assert torch.equal(results[0], run(case))
    assert all(torch.equal(result, results[0]) for result in results)
    assert results[0].isfinite().all()


@both
@pytest.mark.parametrize("intermediate_size", [32, 96, 130, 464, 720])
@pytest.mark.parametrize("hidden_size", [32, 96, 256])
def test_unaligned_sizes(run: Run, hidden_size: int, intermediate_size: int) -> None:
    """A10: exact, for any I, also where the last group is short."""
    case = random_case(
        hidden_size=hidden_size, intermediate_size=intermediate_size, num_experts=2, num_tokens=3, bias=True
    )
    assert rel_l2(run(case), independent(case)) < 3e-3


@both
def test_tensor_parallel_shards_sum_to_the_whole(run: Run) -> None:
    """A10: shard edges at groups; I = 192 over 3 ranks."""
    whole = random_case(intermediate_size=192, num_experts=2)
    parts = []
    for rank in range(3):
        rows, groups = slice(64 * rank, 64 * (rank + 1)), slice(2 * rank, 2 * (rank + 1))
        both_halves = torch.cat([torch.arange(192)[rows], 192 + torch.arange(192)[rows]])
        shard = dataclasses.replace(
            whole,
            w13=whole.w13[:, both_halves],
            w13_scale=whole.w13_scale[:, both_halves],
            w2=whole.w2[:, :, 32 * rank : 32 * (rank + 1)],
            w2_scale=whole.w2_scale[:, :, groups],
        )
        parts.append(run(shard).float())
    assert rel_l2(sum(parts), independent(whole)) < 3e-3  # type: ignore[arg-type]


@both
def test_duplicates_add(run: Run) -> None:
    case = random_case(num_tokens=4)
    case.topk_ids[:, 1] = case.topk_ids[:, 0]
    once = dataclasses.replace(
        case, topk_ids=case.topk_ids[:, :1], topk_weights=case.topk_weights.sum(1, keepdim=True).float()
    )
    assert rel_l2(run(case), independent(case)) < 3e-3
    assert rel_l2(run(case), run(once)) < 5e-3


@pytest.mark.parametrize("per_route", [False, True])
@pytest.mark.parametrize("weight_format", ["mxfp4", "uint4"])
def test_opcheck(per_route: bool, weight_format: str) -> None:
    case = random_case(per_route=per_route, weight_format=weight_format, bias=True)
    torch.library.opcheck(torch.ops.mxk.moe.default, (*case.routing, *case.weights), case.attributes)
    torch.library.opcheck(torch.ops.mxk.moe.lists, (*case.routing, *case.lists), case.attributes)


def test_gradient_is_an_error() -> None:
    case = random_case()
    for name in ("hidden_states", "topk_weights"):
        tensor = getattr(case, name).clone().requires_grad_()
        with pytest.raises(ValueError, match=r"mxk.moe.default: a gradient was asked of it"):
            run_op(dataclasses.replace(case, **{name: tensor})).sum().backward()


def test_other_float_dtypes_run_the_reference() -> None:
    case = random_case()
    for dtype in (torch.float32, torch.float16):
        typed = dataclasses.replace(case, hidden_states=case.hidden_states.to(dtype))
        result = run_op(typed)
        assert result.dtype == dtype
        assert rel_l2(result, independent(case)) < 3e-3
