"""Prepared weights, the functions around `mxk::project`, and what they refuse."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from projection_calls import activations, check, make_stack, unwritten
from torch import Tensor

from mxk_compile.errors import CallError
from mxk_compile.projections import align, contiguous, indexed, masked, prepare, routes


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def refused(text: str) -> Any:
    return pytest.raises(CallError, match="^" + re.escape(text))


def test_gate_up_then_down() -> None:
    gate_up, down = make_stack(4, 64, 128), make_stack(4, 128, 32, seed=5)
    x, ids = activations(3, 128), torch.tensor([[0, 3], [1, 9], [2, 2]])
    experts = [0, 3, 1, -1, 2, 2]
    out = routes(x, gate_up.weight, ids, top_k=2, out=unwritten(6, 64), validate_routing=True)
    check(out, gate_up.expected(x, experts, 2))
    h = out[:, :32].contiguous()
    check(routes(h, down.weight, ids, top_k=1, out=unwritten(6, 128)), down.expected(h, experts))
    lists = align(ids, 4, 8)
    both = [f(h, down.weight, *r, top_k=1, **more)[:3] for f, r, more in (
        (routes, (ids,), {}), (indexed, lists, {"block_size": 8, "validate_routing": True}),
    )]  # fmt: skip
    assert torch.equal(*both)


def test_grouped_results_are_flat() -> None:
    stack = make_stack()
    counts = int32(2, 0, 1, 2)
    x = activations(4, 2, 128)
    out = masked(x, stack.weight, counts, 1, validate_routing=True)
    assert out.shape == (8, 64)
    assert torch.equal(out[:2], masked(x.flatten(0, 1), stack.weight, counts, 256)[:2])
    rows = activations(128, 128)
    indices = int32(*[1] * 128)
    check(
        contiguous(rows, stack.weight, indices, validate_routing=True), stack.expected(rows, indices.tolist())
    )


@pytest.mark.parametrize("mode", ["indexed", "contiguous", "masked"])
def test_a_weight_prepared_for_one_mode_is_refused_in_the_others(mode: str) -> None:
    weight = make_stack(mode=mode).weight
    x = activations(128, 128)
    calls = {
        "indexed": lambda: routes(x, weight, torch.zeros(128, 1, dtype=torch.int64), top_k=1),
        "contiguous": lambda: contiguous(x, weight, torch.zeros(128, dtype=torch.int32)),
        "masked": lambda: masked(x, weight, int32(1, 1, 1, 1), 1),
    }
    for name, call in calls.items():
        if name == mode:
            call()
            continue
        with refused(
            f"projections.{name}: a weight that was prepared for {mode!r}; allowed: mode None or {name!r}; "
            "prepare it without a mode"
        ):
            call()


def test_packed_weights_are_used_where_they_lie() -> None:
    stack = make_stack()
    words = stack.weight.weight.view(torch.int32)
    weight = prepare(words, stack.weight.scale)
    assert weight.weight is words
    x, ids = activations(2, 128), torch.tensor([[0], [3]])
    check(routes(x, weight, ids, top_k=1), stack.expected(x, [0, 3]))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"mode": "grouped"}, "mode is 'grouped'; allowed: indexed, contiguous, masked"),
        ({"weight": torch.full((2, 4, 32), 16)}, "codes 16 to 16; allowed: codes 0 to 15; add 8"),
        (
            {"weight": torch.ones(2, 4, 32)},
            "weight is [2, 4, 32] torch.float32 on cpu; allowed: codes 0..15 [E, N, K]",
        ),
        ({"weight": torch.ones(2, 4, 32).to(torch.complex64)}, "weight is [2, 4, 32] torch.complex64 on cpu"),
        ({"weight": torch.ones(2, 4, 32).int().to("meta")}, "weight is [2, 4, 32] torch.int32 on meta"),
        ({"weight": torch.full((2, 4, 32), 99).to(torch.uint64)}, "codes 99 to 99; allowed: codes 0 to 15"),
        ({"weight": [1]}, "weight is list; allowed: a tensor"),
        ({"scale": None}, "scale is NoneType; allowed: a tensor"),
        ({"weight": torch.ones(4, 32).int()}, "weight is [4, 16] torch.uint8; allowed: experts stacked"),
        ({"scale": torch.ones(2, 4, 2)}, "2 scales for 32 columns; allowed: groups of 32, 64, 128"),
        (
            {"scale": torch.ones(2, 5, 1)},
            "weight_scale is [5, 1] torch.float32 an expert; allowed: one a group",
        ),
        ({"scale": torch.ones(2, 4, 1).double()}, "weight_scale is [4, 1] torch.float64 an expert"),
        ({"zero": torch.ones(2, 4, 1).int()}, "weight_zero is [4, 1] torch.int32 an expert; allowed: [4, 1]"),
        ({"weight_format": "fp8"}, "weight_format is 'fp8'; allowed: mxfp4, uint4, int4"),
        ({"pack_dim": "rows"}, "pack_dim='rows'; allowed: ('input', 'output')"),
    ],
)
def test_prepare_refuses(changes: dict[str, Any], text: str) -> None:
    arguments = {
        "weight": torch.ones(2, 4, 32).int(),
        "scale": torch.ones(2, 4, 1),
        "packed": False,
    } | changes
    with pytest.raises(CallError, match=re.escape(text)):
        prepare(**arguments)


X = activations(4, 128)
IDS = torch.zeros(2, 2, dtype=torch.int64)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda w: routes(X[:, :64], w, IDS, top_k=1), "mxk::project.routes: x is [4, 64]"),
        (lambda w: routes(X, w, IDS, top_k=3), "mxk::project.routes: out is [4, 64] torch.bfloat16 on cpu"),
        (
            lambda w: routes(X, w, IDS.float(), top_k=1),
            "mxk::project.routes: topk_ids is [2, 2] torch.float32",
        ),
        (
            lambda w: routes(X, w, IDS.view(4, 1), top_k=2, out=unwritten(8, 64)),
            "mxk::project.routes: topk_ids is [4, 1] torch.int64 on cpu; allowed: [T, k], an integer dtype, 8 ids",
        ),
        (
            lambda w: routes(X[:1], w, IDS.view(1, 4), top_k=2, out=unwritten(2, 64)),
            "mxk::project.routes: topk_ids",
        ),
        (
            lambda w: routes(X[:1], w, IDS, top_k=4),
            "mxk::project.routes: top_k is 4; allowed: 2 for one row of x a token, 1 for one a route",
        ),
        (lambda w: routes(X, w, IDS, top_k=1, out=unwritten(4, 32)), "mxk::project.routes: out is [4, 32]"),
        (lambda w: routes(X, w, IDS, top_k=1, out=torch.ones(4, 64)), "mxk::project.routes: out is [4, 64]"),
        (lambda w: routes(X, w, IDS, top_k=1, experts_min=-1), "mxk::project.routes: experts_min is -1"),
        (
            lambda w: indexed(X, w, IDS.flatten(), int32(0), int32(4), top_k=1, block_size=4),
            "mxk::project.sorted: sorted_token_ids is [4] torch.int64 on cpu; allowed: a list of int32",
        ),
        (
            lambda w: indexed(X, w, int32(0, 1, 2, 3), int32(0), int32(4), top_k=1, block_size=2),
            "mxk::project.sorted: expert_ids is [1] torch.int32 on cpu; allowed: one for each block of 2",
        ),
        (
            lambda w: indexed(X, w, int32(0, 1, 2, 3), int32(0), int32(4, 4), top_k=1, block_size=4),
            "mxk::project.sorted: num_tokens_post_padded is [2] torch.int32 on cpu; allowed: one int32",
        ),
        (
            lambda w: indexed(X, w, int32(0, 1, 2, 3), int32(0), int32(4), top_k=1, block_size=0),
            "mxk::project.sorted: block_size is 0; allowed: a number of at least 1",
        ),
        (
            lambda w: contiguous(X, w, int32(0, 0, 0, 0)),
            "mxk::project.contiguous: x is [4, 128] torch.bfloat16 on cpu; allowed: a multiple of 128 rows",
        ),
        (lambda w: contiguous(X, w, IDS.flatten()), "mxk::project.contiguous: m_indices is [4] torch.int64"),
        (lambda w: masked(X, w, int32(1, 1, 1), 1), "mxk::project.masked: masked_m is [3] torch.int32"),
        (lambda w: masked(X[:3], w, int32(1, 1, 1, 1), 1), "mxk::project.masked: x is [3, 128]"),
        (
            lambda w: masked(X, w, int32(1, 1, 1, 1), 0),
            "mxk::project.masked: expected_m is 0; allowed: a positive int",
        ),
        (lambda w: masked(X, w, int32(1, 1, 1, 1), True), "mxk::project.masked: expected_m is True"),
        (lambda w: masked(X, w, int32(1, 1, 1, 1), 1.5), "mxk::project.masked: expected_m is 1.5"),
        (lambda w: masked(X, w, int32(1, 1, 1, 1), 2**64), "mxk::project.masked: expected_m is 1844"),
        (
            lambda w: routes(X, w, IDS, top_k=2.0),
            "mxk::project.routes: top_k is 2.0; allowed: an int from 0 to",
        ),
        (lambda w: routes(X, w, IDS, top_k=-2), "mxk::project.routes: top_k is -2"),
        (lambda w: routes(X, w, IDS, top_k=1, experts_min=2**63), "mxk::project.routes: experts_min is 9223"),
        (
            lambda w: routes(X, w, IDS, top_k=1, experts_min=2**63 - 1),
            "mxk::project.routes: experts_min is 9223",
        ),
        (lambda w: routes(None, w, IDS, top_k=1), "mxk::project.routes: x is NoneType; allowed: a tensor"),
        (
            lambda w: routes(X, w.weight, IDS, top_k=1),
            "mxk::project.routes: weight is Tensor; allowed: Prepared",
        ),
        (
            lambda w: routes(X[0, 0], w, IDS, top_k=1),
            "mxk::project.routes: x is a scalar; allowed: rows of 128",
        ),
        (lambda w: routes(X, w, [[0]], top_k=1), "mxk::project.routes: topk_ids is list; allowed: a tensor"),
        (
            lambda w: routes(X, w, IDS, top_k=1, out=unwritten(1, 64).expand(4, 64)),
            "mxk::project.routes: out is expanded, strides [0, 1]; allowed: memory of its own for each row",
        ),
        (
            lambda w: routes(X[:1], w, IDS[0, 0], top_k=1, validate_routing=True),
            "mxk::project.routes: topk_ids is [] torch.int64",
        ),
        (
            lambda w: indexed(X, w, *align(IDS, 4, 4), top_k=-1, block_size=4),
            "mxk::project.sorted: top_k is -1",
        ),
        (
            lambda w: indexed(
                X, w, int32(0), int32(0), int32(0), top_k=1, block_size=0, validate_routing=True
            ),
            "mxk::project.sorted: block_size is 0; allowed: a number of at least 1",
        ),
        (
            lambda w: indexed(
                X, w, int32(0), int32(0), int32(0, 0), top_k=1, block_size=1, validate_routing=True
            ),
            "mxk::project.sorted: num_tokens_post_padded is [2]",
        ),
        (
            lambda w: contiguous(X, w, int32(0)[0], validate_routing=True),
            "mxk::project.contiguous: m_indices is [] torch.int32",
        ),
        (
            lambda w: align(IDS.float(), 4, 4),
            "projections.align: topk_ids is torch.float32; allowed: an integer",
        ),
        (lambda w: align(IDS, 0, 4), "projections.align: num_experts is 0; allowed: an int from 1"),
        (lambda w: align(IDS, 4, 0), "projections.align: block_size is 0; allowed: an int from 1"),
        (lambda w: align(IDS, 4, 4, -1), "projections.align: experts_min is -1; allowed: an int from 0"),
        (lambda w: align(IDS, 4, True), "projections.align: block_size is True; allowed: an int from 1"),
        (
            lambda w: routes(torch.zeros(4, 64), w, IDS.to_sparse(), top_k=1),
            "mxk::project.routes: topk_ids is torch.sparse_coo torch.int64; allowed: a dense tensor",
        ),
        (
            lambda w: routes(torch.zeros(4, 64), w, IDS, top_k=1, out=[]),
            "mxk::project.routes: out is list; allowed: a tensor; correct the call",
        ),
        (
            lambda w: align(IDS, 4, 2**31),
            "projections.align: 4 routes, block_size 2147483648; allowed: less than",
        ),
    ],
)
def test_contradicting_arguments(call: Any, text: str) -> None:
    with refused(text) as caught:
        call(make_stack().weight)
    assert "\n" not in str(caught.value)


def sorted_call(ids: Tensor, experts: Tensor, count: int, block: int = 2) -> Any:
    return lambda w: indexed(
        X[:2], w, ids, experts, int32(count), top_k=2, block_size=block, validate_routing=True
    )


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda w: routes(X, w, torch.tensor([[0, 99], [-1, -2]]), top_k=1, validate_routing=True),
            "mxk::project.routes: topk_ids of token 1, slot 1 is -2; allowed: a global expert id, or -1 for none",
        ),
        (
            sorted_call(int32(0, 1, 2, 3), int32(0, 4), 4),
            "mxk::project.sorted: expert_ids[1] is 4; allowed: 0 to 3, or -1 for none",
        ),
        (
            sorted_call(int32(0, 1, -5, 3), int32(0, 2), 4),
            "mxk::project.sorted: sorted_token_ids[2] is -5 in a block of expert 2; allowed: routes 0 to 3, from 4",
        ),
        (
            sorted_call(int32(0, 1, 9, 3), int32(0, 2), 4),
            "mxk::project.sorted: sorted_token_ids[3] is 3 (token 1, slot 1) in a block of expert 2 after padding",
        ),
        (
            sorted_call(int32(0, 3, 3, 4), int32(0, 2), 4),
            "mxk::project.sorted: sorted_token_ids[2] is 3 (token 1, slot 1) in a block of expert 2 a second time",
        ),
        (
            sorted_call(int32(0, 1, 2, 3), int32(0, 2), 6),
            "mxk::project.sorted: num_tokens_post_padded is 6; allowed: a multiple of block_size 2 up to 4",
        ),
        (sorted_call(int32(0, 1, 2, 3), int32(0, 2), 3), "mxk::project.sorted: num_tokens_post_padded is 3"),
        (
            lambda w: contiguous(activations(128, 128), w, int32(*[1] * 127, 4), validate_routing=True),
            "mxk::project.contiguous: m_indices of row 127 is 4; allowed: 0 to 3, or -1 for padding",
        ),
        (
            lambda w: contiguous(
                activations(256, 128), w, int32(*[1] * 128, *[2] * 5, *[3] * 123), validate_routing=True
            ),
            "mxk::project.contiguous: m_indices of row 133 is 3 in a group of expert 2; allowed: one expert in 128",
        ),
        (
            lambda w: contiguous(activations(128, 128), w, int32(1, -1, *[1] * 126), validate_routing=True),
            "mxk::project.contiguous: m_indices of row 2 is 1 in a group of expert 1; allowed: one expert in 128",
        ),
        (
            lambda w: masked(X, w, int32(1, 0, 2, 1), 1, validate_routing=True),
            "mxk::project.masked: masked_m[2] is 2; allowed: 0 to 1 rows",
        ),
    ],
)
def test_validated_routing_names_what_is_wrong(call: Any, text: str) -> None:
    with refused(text):
        call(make_stack().weight)


def test_extreme_ids_and_wide_unsigned_dtypes() -> None:
    stack = make_stack()
    x = activations(1, 128)
    for ids, experts in (
        (torch.tensor([[-(2**63), 2**63 - 1, 1]]), [-1, -1, 1]),
        (torch.tensor([[2**63, 2**64 - 1, 1]], dtype=torch.uint64), [-1, -1, 1]),
    ):
        out = routes(
            x, stack.weight, ids, top_k=3, out=unwritten(3, 64), validate_routing=ids.dtype.is_signed is False
        )
        check(out, stack.expected(x, experts, 3))
        _, expert_ids, count = align(ids, 4, 2)
        assert (expert_ids[:1].tolist(), count.tolist()) == ([1], [2])
    least = torch.tensor([[-(2**63)]])
    assert align(least, 4, 2, 2**62)[2].tolist() == [0]
    codes = torch.arange(16).repeat(2, 2, 4)
    expected = prepare(codes, torch.ones(2, 2, 2), packed=False).weight
    for dtype in (torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.uint64):
        assert torch.equal(prepare(codes.to(dtype), torch.ones(2, 2, 2), packed=False).weight, expected)


def test_sound_routing_passes_validation() -> None:
    weight = make_stack().weight
    sorted_call(int32(2, 7, 0, 4, 9, 9), int32(3, -1, 9), 4)(weight)
    x = activations(256, 128)
    contiguous(x, weight, int32(*[1] * 128, *[2] * 5, *[-1] * 123), validate_routing=True)
