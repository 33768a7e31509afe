"""`mxk::project` on a GPU against the fp32 reference: formats, shapes, and every description of the routing."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from projection_calls import random_weight
from torch import Tensor

from mxk_compile.kernels.cuda import grouped
from mxk_compile.ops.project import NUM_ROUTING, experts_of_rows, reference
from mxk_compile.projections import align
from mxk_compile.testing import rel_l2

MOST_ERROR = 2.5e-3  # one bf16 rounding of the result, and of INT4's products where a scale makes them long
UNWRITTEN = -7.0
gpu = pytest.mark.gpu
project = functools.partial(grouped.project, lambda *_, **__: None)
weight_of = functools.partial(random_weight, device="cuda")


def check(
    overload: str, x: Tensor, routing: tuple[Tensor, ...], weight: Any, num_rows: int, **attributes: Any
) -> Tensor:
    """Compares with the reference; rows that are routed nowhere keep what they held."""
    shape = (num_rows, weight[0].shape[1])
    out = torch.full(shape, UNWRITTEN, dtype=torch.bfloat16, device="cuda")
    expected = torch.full(shape, UNWRITTEN, device="cuda")
    again = out.clone()
    assert len(routing) == NUM_ROUTING[overload]
    assert grouped.refusal(overload, out, x, *routing, *weight, **attributes) is None
    project(overload, out, x, *routing, *weight, **attributes)
    reference(overload, expected, x, *routing, *weight, **attributes)
    written = experts_of_rows(overload, num_rows, len(weight[0]), routing, attributes) >= 0
    assert torch.equal(out[~written].float(), expected[~written]), "other rows are not written"
    if bool(written.any()):
        assert rel_l2(out[written], expected[written]) <= MOST_ERROR
    project(overload, again, x, *routing, *weight, **attributes)
    assert torch.equal(out, again), "the same call gives the same bits"
    return out


FORMATS = [
    ("mxfp4", 32, False, None),
    *(("uint4", group, False, torch.bfloat16) for group in (32, 64, 128, None)),
    *(("uint4", 32, zero, dtype) for zero in (False, True) for dtype in (torch.float16, torch.float32)),
    ("uint4", 128, True, torch.bfloat16),
    ("int4", 32, False, torch.bfloat16),
]


@gpu
@pytest.mark.parametrize(("weight_format", "group", "zero", "dtype"), FORMATS)
def test_formats(weight_format: str, group: int | None, zero: bool, dtype: Any) -> None:
    x = torch.randn(40, 384, device="cuda").bfloat16()
    ids = torch.rand(40, 6, device="cuda").topk(3, dim=1).indices
    weight = weight_of(6, 320, 384, weight_format, group, zero, dtype)
    check("routes", x, (ids,), weight, 120, weight_format=weight_format, top_k=3)


@gpu
@pytest.mark.parametrize("outputs", [8, 100, 264, 512])
@pytest.mark.parametrize("inputs", [32, 96, 256, 736])
@pytest.mark.parametrize("weight_format", ["mxfp4", "uint4"])
def test_ragged_sizes(weight_format: str, inputs: int, outputs: int) -> None:
    x = torch.randn(50, inputs, device="cuda").bfloat16()
    ids = torch.randint(-1, 7, (25, 2), device="cuda", dtype=torch.int32)
    weight = weight_of(5, outputs, inputs, weight_format)
    check("routes", x, (ids,), weight, 50, weight_format=weight_format, top_k=1, experts_min=1)


@gpu
@pytest.mark.parametrize("block_size", [8, 16, 48, 64, 128])
@pytest.mark.parametrize("num_tokens", [1, 20, 700])
def test_sorted_lists_longer_than_what_counts(num_tokens: int, block_size: int) -> None:
    x = torch.randn(num_tokens, 256, device="cuda").bfloat16()
    ids = torch.rand(num_tokens, 24, device="cuda").topk(4, dim=1).indices
    sorted_ids, expert_ids, count = align(ids, 12, block_size, 4)
    junk = torch.full((999,), 3, dtype=torch.int32, device="cuda")
    routing = (torch.cat([sorted_ids, junk]), torch.cat([expert_ids, junk]), count)
    expert_ids[1::3] = -1  # of another rank
    weight = weight_of(12, 256, 256, "uint4")
    attributes = {"weight_format": "uint4", "top_k": 4, "block_size": block_size}
    check("sorted", x, routing, weight, 4 * num_tokens, **attributes)
    routing = (torch.cat([sorted_ids, junk]), torch.cat([expert_ids, junk]), count.reshape(()))
    check("sorted", x, routing, weight, 4 * num_tokens, **attributes)


@gpu
def test_padding_may_lie_anywhere_in_a_block() -> None:
    x = torch.randn(64, 256, device="cuda").bfloat16()
    places = torch.arange(64, dtype=torch.int32, device="cuda").repeat_interleave(2)
    places[1::2] = 64
    experts = torch.tensor([2, 2, 0, 7, 1, 1, 1, 0], dtype=torch.int32, device="cuda")
    weight = weight_of(4, 136, 256, "uint4")
    routing = (places, experts, torch.tensor([120], dtype=torch.int32, device="cuda"))
    check("sorted", x, routing, weight, 64, weight_format="uint4", top_k=1, block_size=16)


@gpu
def test_contiguous() -> None:
    counts = (128, 5, 0, 300, 128, 1)
    indices = [
        torch.nn.functional.pad(torch.full((count,), expert), (0, -count % 128), value=-1)
        for expert, count in enumerate(counts)
    ]
    m_indices = torch.cat([*indices, torch.full((128,), -1)]).int().cuda()
    x = torch.randn(len(m_indices), 512, device="cuda").bfloat16()
    weight = weight_of(6, 640, 512, "uint4")
    check("contiguous", x, (m_indices,), weight, len(m_indices), weight_format="uint4")


@gpu
@pytest.mark.parametrize("max_m", [1, 40, 256])
@pytest.mark.parametrize("flat", [False, True])
def test_masked(flat: bool, max_m: int) -> None:
    masked_m = torch.tensor([3, 0, 40, 300, 17, 1, -2], dtype=torch.int32, device="cuda")
    x = torch.randn(7, max_m, 256, device="cuda").bfloat16()
    weight = weight_of(7, 384, 256, "uint4")
    x = x.flatten(0, 1) if flat else x
    for expected in (1, 30, 200):  # by either kernel
        check("masked", x, (masked_m,), weight, 7 * max_m, weight_format="uint4", expected_m=expected)


@gpu
def test_strided_rows_and_other_dtypes_of_ids() -> None:
    wide = torch.randn(30, 2, 256, device="cuda").bfloat16()
    ids = torch.rand(30, 5, device="cuda").topk(2, dim=1).indices.to(torch.uint8)
    weight = weight_of(5, 128, 256, "int4", 64, False, torch.float16)
    for x in (wide[:, 0], wide[:, 1], wide.permute(0, 2, 1)[:, :, 0]):
        check("routes", x, (ids,), weight, 60, weight_format="int4", top_k=2)
    out = torch.full((60, 2, 128), UNWRITTEN, dtype=torch.bfloat16, device="cuda")
    project("routes", out[:, 1], wide[:, 0], ids, *weight, weight_format="int4", top_k=2)
    expected = torch.empty(60, 128, device="cuda")
    reference("routes", expected, wide[:, 0], ids, *weight, weight_format="int4", top_k=2)
    assert rel_l2(out[:, 1], expected) <= MOST_ERROR
    assert bool((out[:, 0] == UNWRITTEN).all())


@gpu
def test_a_graph_sees_new_counts() -> None:
    masked_m = torch.tensor([9, 30, 0], dtype=torch.int32, device="cuda")
    x = torch.randn(3, 64, 512, device="cuda").bfloat16()
    weight = weight_of(3, 256, 512, "uint4")
    attributes = {"weight_format": "uint4", "expected_m": 16}
    out = torch.full((192, 256), UNWRITTEN, dtype=torch.bfloat16, device="cuda")
    project("masked", out, x, masked_m, *weight, **attributes)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        project("masked", out, x, masked_m, *weight, **attributes)
    masked_m.copy_(torch.tensor([0, 64, 2]))
    x.copy_(torch.randn(x.shape))
    out.fill_(UNWRITTEN)
    graph.replay()
    expected = torch.full(out.shape, UNWRITTEN, device="cuda")
    reference("masked", expected, x, masked_m, *weight, **attributes)
    assert rel_l2(out, expected) <= MOST_ERROR
    assert torch.equal((out == UNWRITTEN).all(1), (expected == UNWRITTEN).all(1)), (
        "rows past the counts are not written"
    )


@gpu
def test_nothing_to_do() -> None:
    weight = weight_of(3, 64, 64, "uint4")
    ids = torch.empty((0, 2), dtype=torch.int32, device="cuda")
    x = torch.empty((0, 64), dtype=torch.bfloat16, device="cuda")
    check("routes", x, (ids,), weight, 0, weight_format="uint4", top_k=2)
    ids = torch.full((4, 2), 9, dtype=torch.int32, device="cuda")
    x = torch.randn(4, 64, device="cuda").bfloat16()
    check("routes", x, (ids,), weight, 8, weight_format="uint4", top_k=2)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": torch.float16}, "x is torch.float16; allowed: torch.bfloat16"),
        ({"columns": 48}, "K = 48; allowed: multiples of 32 above 0"),
        ({"num_experts": 1025}, "E = 1025; allowed: up to 1024"),
    ],
)
def test_what_the_kernel_does_not_take(changes: dict[str, Any], reason: str) -> None:
    columns, num_experts = changes.get("columns", 64), changes.get("num_experts", 2)
    x = torch.empty(4, columns, dtype=changes.get("dtype", torch.bfloat16))
    packed = torch.empty(num_experts, 8, columns // 2, dtype=torch.uint8)
    arguments = (torch.empty(4, 8), x, torch.zeros(2, 2, dtype=torch.int32), packed, packed)
    assert grouped.refusal("routes", *arguments, top_k=1) == f"CUDA kernels: {reason}"


def test_blocks_beyond_shared_memory_are_refused() -> None:
    places = torch.zeros(1 << 20, dtype=torch.int32)
    x = torch.empty(1 << 20, 64, dtype=torch.bfloat16)
    packed = torch.empty(2, 8, 32, dtype=torch.uint8)
    arguments = (torch.empty(1 << 20, 8), x, places, places, places[:1], packed, packed)
    assert grouped.refusal("sorted", *arguments, top_k=1, block_size=16) == (
        "CUDA kernels: more than 24576 blocks of rows; allowed: so many"
    )
    assert grouped.refusal("sorted", *arguments, top_k=1, block_size=64) is None
