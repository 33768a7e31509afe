"""The functions of projections.py on a GPU: every routing, rows left alone, CUDA graphs, refusals, equal repeats."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch
from projection_calls import UNWRITTEN, Stack, activations, check, make_stack, unwritten
from torch import Tensor

from mxk_compile.bench.chord import SCENARIOS, Scenario, make_call
from mxk_compile.errors import CallError
from mxk_compile.integrations.humming.layer import HummingLayer
from mxk_compile.projections import align, contiguous, indexed, masked, prepare, routes
from mxk_compile.testing import random_case, rel_l2

pytestmark = pytest.mark.gpu


def int32(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def stack(num_experts: int = 6, outputs: int = 192, inputs: int = 256, **more: Any) -> Stack:
    return make_stack(num_experts, outputs, inputs, device="cuda", **more)


def rows(*shape: int, seed: int = 1) -> Tensor:
    return activations(*shape, seed=seed, device="cuda")


@pytest.mark.parametrize("tokens", [1, 3, 20, 150])
@pytest.mark.parametrize("top_k", [4, 1])
def test_indexed_calls_with_uneven_and_remote_experts(tokens: int, top_k: int) -> None:
    held = stack()
    generator = torch.Generator().manual_seed(tokens)
    # Expert 0 gets most, expert 4 nothing; ids from 6 on are of other ranks, -1 of none.
    ids = torch.tensor([0, 0, 0, 0, 1, 2, 3, 5, 6, 9, -1])[
        torch.randint(0, 11, (tokens, 4), generator=generator)
    ]
    x, out = rows(tokens * 4 // top_k, 256), unwritten(tokens * 4, 192, "cuda")
    routes(x, held.weight, ids.cuda(), top_k=top_k, out=out, validate_routing=True)
    expected = held.expected(x, ids.flatten().tolist(), top_k)
    check(out, expected)
    for block in (8, 16, 64):
        lists = align(ids.cuda(), 6, block)
        # Longer than any count, as servers allocate them; what lies behind the count is no route.
        longer = torch.cat([lists[0], torch.zeros(5 * block, dtype=torch.int32, device="cuda")])
        more = torch.cat([lists[1], int32([0] * 5)])
        again = unwritten(tokens * 4, 192, "cuda")
        indexed(
            x, held.weight, longer, more, lists[2], top_k=top_k, block_size=block, out=again,
            validate_routing=True,
        )  # fmt: skip
        check(again, expected)


@pytest.mark.parametrize("sentinel", [0, 1, 1 << 20, (1 << 31) - 1])
def test_any_number_beyond_the_routes_is_padding(sentinel: int) -> None:
    held = stack()
    x, out = rows(4, 256), unwritten(8, 192, "cuda")
    padding = 8 + sentinel if sentinel < 1 << 30 else sentinel
    sorted_ids = int32([7, 0, padding, padding, 3, 4, 5, padding, 1, padding, padding, padding])
    lists = (sorted_ids, int32([2, 5, -1]), int32([12]))
    indexed(x, held.weight, *lists, top_k=2, block_size=4, out=out, validate_routing=True)
    check(out, held.expected(x, [2, -1, -1, 5, 5, 5, -1, 2], 2))


def test_grouped_calls_with_uneven_and_empty_experts() -> None:
    held = stack()
    indices = [0] * 128 + [0] * 3 + [-1] * 125 + [3] * 128 + [-1] * 128 + [5] * 127 + [-1]
    x, out = rows(len(indices), 256), unwritten(len(indices), 192, "cuda")
    contiguous(x, held.weight, int32(indices), out=out, validate_routing=True)
    check(out, held.expected(x, indices))
    counts, max_m = [0, 1, 40, 17, 0, 33], 40
    x, out = rows(6, max_m, 256), unwritten(6 * max_m, 192, "cuda")
    x[1, 1:] = float("nan")
    for expected_m in (1, 20, 4096):
        masked(x, held.weight, int32(counts), expected_m, out=out, validate_routing=True)
        experts = [e if slot < counts[e] else -1 for e in range(6) for slot in range(max_m)]
        check(out, held.expected(x.flatten(0, 1), experts))


def run_all(held: Stack, x: Tensor, routing: dict[str, Any], outs: list[Tensor]) -> None:
    routes(x, held.weight, routing["ids"], top_k=2, out=outs[0])
    lists = align(routing["ids"], 6, 16)
    indexed(x, held.weight, *lists, top_k=2, block_size=16, out=outs[1])
    contiguous(x, held.weight, routing["indices"], out=outs[2])
    masked(x[:120].view(6, 20, -1), held.weight, routing["counts"], 9, out=outs[3])


def test_a_cuda_graph_sees_new_routing() -> None:
    held, x = stack(), rows(128, 256)
    generator = torch.Generator().manual_seed(3)

    def draw() -> dict[str, Tensor]:
        return {
            "ids": torch.randint(-1, 8, (128, 2), generator=generator, dtype=torch.int32),
            "indices": torch.full((128,), int(torch.randint(0, 6, (), generator=generator))).int(),
            "counts": torch.randint(0, 21, (6,), generator=generator, dtype=torch.int32),
        }

    routing = {name: tensor.cuda() for name, tensor in draw().items()}
    outs = [unwritten(n, 192, "cuda") for n in (256, 256, 128, 120)]
    run_all(held, x, routing, outs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run_all(held, x, routing, outs)
    for step in range(3):
        for name, tensor in draw().items():
            routing[name].copy_(tensor)
        x.copy_(rows(128, 256, seed=10 + step))
        for out in outs:
            out.fill_(UNWRITTEN)
        graph.replay()
        of_routes = held.expected(x, routing["ids"].flatten().tolist(), 2)
        check(outs[0], of_routes)
        check(outs[1], of_routes)
        check(outs[2], held.expected(x, routing["indices"].tolist()))
        counts = routing["counts"].tolist()
        experts = [e if slot < counts[e] else -1 for e in range(6) for slot in range(20)]
        check(outs[3], held.expected(x[:120], experts))


def test_repeats_are_equal_bit_for_bit() -> None:
    for table in ("decode EP8", "masked EP8", "contiguous EP8"):
        scenario = next(s for s in SCENARIOS if s.table == table)
        small = dataclasses.replace(scenario, num_experts=12, outputs=512, inputs=1024)
        call = make_call(small, "cuda")
        first = call.run().clone()
        for _ in range(20):
            call.out.zero_()
            assert torch.equal(call.run(), first)


# The counts stand for their tables; B300's shapes are those of decode EP8.
SHAPES = [s for s in SCENARIOS if s.table.endswith("EP8") and s.count in (20, 128, 8)]


@pytest.mark.parametrize("scenario", SHAPES, ids=str)
def test_the_published_shapes(scenario: Scenario) -> None:
    call = make_call(scenario, "cuda")
    call.run()
    assert call.rel_l2(6) <= 2.5e-3


def test_wrong_modes_and_weights_are_refused() -> None:
    held = stack(mode="masked")
    with pytest.raises(CallError, match="a weight that was prepared for 'masked'"):
        routes(rows(2, 256), held.weight, int32([0, 1]).view(2, 1), top_k=1)
    weight = stack().weight
    on_cpu = prepare(weight.weight.cpu(), weight.scale.cpu())
    with pytest.raises(CallError, match="weight is .* on cpu; allowed: on cuda"):
        routes(rows(2, 256), on_cpu, int32([0, 1]).view(2, 1), top_k=1)
    with pytest.raises(CallError, match="masked_m"):
        masked(rows(6, 256), weight, torch.ones(6, dtype=torch.int32), 1)


def test_weights_packed_along_the_outputs() -> None:
    held = stack(3, 64, pack_dim="output", zero=True)
    x, ids = rows(3, 256), int32([0, 2, 5]).view(3, 1)
    check(routes(x, held.weight, ids, top_k=1, out=unwritten(3, 64, "cuda")), held.expected(x, [0, 2, -1]))


def test_inputs_without_a_kernel_run_the_reference() -> None:
    held = stack(3, 64)
    x, ids = rows(3, 256).float(), int32([0, 2, 5]).view(3, 1)
    out = routes(x, held.weight, ids, top_k=1, out=torch.full((3, 64), UNWRITTEN, device="cuda"))
    check(out, held.expected(x, [0, 2, -1]))


@pytest.mark.parametrize("packing", ["output", "input"])
@pytest.mark.parametrize("tokens", [3, 90])
def test_a_layer_packed_along_the_outputs(packing: str, tokens: int) -> None:
    case = random_case(
        num_tokens=tokens, weight_format="uint4", zero=True, pack_dim=packing, hidden_size=256,
        intermediate_size=128, device="cuda",
    )  # fmt: skip
    result = case.fused()
    assert rel_l2(result, case.reference()) < 6e-3
    case.w2.zero_()  # in place: what was made of it is made again
    zeros = (case.w2_zero.zero_() if case.w2_zero is not None else None,)
    assert zeros[0] is not None
    assert bool((case.fused() == 0).all())


def test_a_humming_layer() -> None:
    held = stack(4, 256, 512)
    layer = HummingLayer(
        256, 512, {"quant_method": "humming", "dtype": "uint4", "group_size": 32}, num_experts=4
    )
    layer.load_from_tensors(
        {"weight": held.weight.weight.view(torch.int32), "weight_scale": held.weight.scale}
    )
    x, ids = rows(9, 512), (torch.arange(18) % 5).view(9, 2).int().cuda()
    sorted_ids, expert_ids, count = align(ids, 4, 16)
    out = layer(
        x, outputs=unwritten(18, 256, "cuda"), top_k=2, sorted_ids=sorted_ids, expert_ids=expert_ids,
        num_tokens_padded=count, compute_config=json.dumps({"gemm_type": "indexed"}),
    )  # fmt: skip
    check(out, held.expected(x, ids.flatten().tolist(), 2))
