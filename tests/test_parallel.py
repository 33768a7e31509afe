"""Ranks' parts of a layer: what they hold, and that the results of all ranks sum to the whole layer's."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from mxk_compile.checkpoint import PackedExperts
from mxk_compile.errors import CallError
from mxk_compile.parallel import expert_shard, tensor_shard
from mxk_compile.testing import MoECase, random_case, rel_l2

CASES: list[dict[str, Any]] = [
    {"row_order": "interleaved", "activation": "swiglu_oai", "alpha": 1.702, "limit": 7.0, "bias": True},
    {"row_order": "up_gate", "bias": True},
    {"weight_format": "uint4", "group_size": 32, "zero": True},
    {"weight_format": "uint4", "group_size": None},
    {"weight_format": "int4", "group_size": 64, "row_order": "interleaved"},
]


def packed(case: MoECase) -> PackedExperts:
    names = ("w13", "w13_scale", "w2", "w2_scale", "w13_zero", "w2_zero", "w13_bias", "w2_bias")
    attributes = case.attributes
    return PackedExperts(
        **dict(zip(names, case.weights, strict=True)),
        weight_format=attributes["weight_format"],
        row_order=attributes["row_order"],
    )


def run(case: MoECase, experts: PackedExperts, experts_min: int = 0) -> torch.Tensor:
    weights = (experts.w13, experts.w13_scale, experts.w2, experts.w2_scale)
    rest = (experts.w13_zero, experts.w2_zero, experts.w13_bias, experts.w2_bias)
    attributes = {**case.attributes, "experts_min": experts_min}
    return torch.ops.mxk.moe(*case.routing, *weights, *rest, **attributes)


@pytest.mark.parametrize("num_ranks", [2, 3, 5])
@pytest.mark.parametrize("changes", CASES, ids=str)
def test_results_of_the_ranks_sum_to_the_layers(changes: dict[str, Any], num_ranks: int) -> None:
    # 5 groups of 32 or 64 for 2, 3 or 5 ranks, 7 experts: shares are uneven.
    intermediate_size = 5 * (changes.get("group_size") or 32)
    case = random_case(num_tokens=6, num_experts=7, intermediate_size=intermediate_size, **changes)
    whole, expected = packed(case), case.reference()
    parts = [run(case, tensor_shard(whole, rank, num_ranks)) for rank in range(num_ranks)]
    # One bf16 rounding for each rank where the whole has one; the parts are larger than their sum.
    assert rel_l2(sum(part.float() for part in parts), expected) < 6e-3
    shards = [expert_shard(whole, rank, num_ranks) for rank in range(num_ranks)]
    assert sum(len(experts.w2) for experts, _ in shards) == 7
    total = sum(run(case, experts, first).float() for experts, first in shards)
    assert rel_l2(total, expected) < 4e-3


@pytest.mark.parametrize(
    ("num_ranks", "sizes"), [(2, [1440, 1440]), (4, [736, 736, 704, 704]), (8, [384, 384, *[352] * 6])]
)
def test_sizes_of_gptoss(num_ranks: int, sizes: list[int]) -> None:
    case = random_case(num_experts=1, top_k=1, hidden_size=64, intermediate_size=2880, bias=True)
    shards = [tensor_shard(packed(case), rank, num_ranks) for rank in range(num_ranks)]
    assert [shard.w13.shape[1] // 2 for shard in shards] == sizes
    assert [shard.w2.shape[-1] * 2 for shard in shards] == sizes
    assert [shard.w2_scale.shape[-1] * 32 for shard in shards] == sizes
    # Every byte is on one rank.
    assert sum(shard.w13.nbytes + shard.w2.nbytes for shard in shards) == case.w13.nbytes + case.w2.nbytes
    assert case.w2_bias is not None
    assert sum(shard.w2_bias.float() for shard in shards).equal(case.w2_bias.float())


@pytest.mark.parametrize(
    ("intermediate_size", "num_ranks", "sizes"),
    [
        (2880, 2, {1440}),
        (2880, 4, {736, 704}),
        (2880, 8, {384, 352}),
        (1440, 2, {736, 704}),
        (720, 1, {720}),  # the last scale group is half a group
        (720, 2, {384, 336}),
    ],
)
def test_ranks_whose_size_is_no_multiple_of_64(
    intermediate_size: int, num_ranks: int, sizes: set[int]
) -> None:
    case = random_case(num_tokens=5, hidden_size=64, intermediate_size=intermediate_size, **CASES[0])
    shards = [tensor_shard(packed(case), rank, num_ranks) for rank in range(num_ranks)]
    assert {2 * shard.w2.shape[-1] for shard in shards} == sizes
    total = sum(run(case, shard).float() for shard in shards)
    assert rel_l2(total, case.reference()) < 6e-3


def test_720_columns_a_rank_where_a_row_has_one_scale() -> None:
    """What whole scale groups do not allow, one scale a row does: two equal ranks of 1440 columns."""
    case = random_case(
        num_tokens=5, hidden_size=64, intermediate_size=1440, weight_format="uint4", group_size=None
    )
    whole = packed(case)
    total = torch.zeros(5, 64)
    for rank in range(2):
        rows = torch.cat([torch.arange(720) + 720 * rank, torch.arange(720) + 1440 + 720 * rank])
        part = dataclasses.replace(
            whole,
            w13=whole.w13[:, rows],
            w13_scale=whole.w13_scale[:, rows],
            w2=whole.w2[..., 360 * rank : 360 * (rank + 1)].clone(),
        )
        total += run(case, part).float()
    assert rel_l2(total, case.reference()) < 6e-3


def test_experts_and_columns_both_split() -> None:
    case = random_case(num_tokens=6, num_experts=7, hidden_size=64, intermediate_size=160, **CASES[0])
    total = torch.zeros(6, 64)
    for rank in range(4):
        experts, first = expert_shard(packed(case), rank // 2, 2)
        total += run(case, tensor_shard(experts, rank % 2, 2), first).float()
    assert rel_l2(total, case.reference()) < 6e-3


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda whole: expert_shard(whole, 2, 2),
            "expert_shard: rank 2 of 2; allowed: 0 <= rank < num_ranks",
        ),
        (lambda whole: expert_shard(whole, 0, 9), "expert_shard: 9 ranks for 8 experts; allowed: at most 8"),
        (lambda whole: tensor_shard(whole, -1, 2), "tensor_shard: rank -1 of 2; allowed: 0 <= rank"),
        (
            lambda whole: tensor_shard(whole, 0, 3),
            "tensor_shard: 3 ranks for 2 scale groups of the intermediate size; allowed: at most 2",
        ),
        (
            lambda whole: tensor_shard(dataclasses.replace(whole, pack_dim="output"), 0, 2),
            "tensor_shard: pack_dim='output'; allowed: 'input'",
        ),
    ],
)
def test_wrong_ranks_are_refused(call: Any, message: str) -> None:
    with pytest.raises(CallError) as caught:
        call(packed(random_case()))
    assert str(caught.value).startswith(message)


def _rank(rank: int, num_ranks: int, address: str, answer: str, backend: str) -> None:
    device = "cpu"
    if backend == "nccl":
        device = f"cuda:{rank}"
        torch.cuda.set_device(rank)
    torch.distributed.init_process_group(backend, init_method=address, rank=rank, world_size=num_ranks)
    torch.set_num_threads(1)
    case = random_case(num_tokens=6, num_experts=7, intermediate_size=2880, device=device, **CASES[0])
    whole = packed(case)
    experts, first = expert_shard(whole, rank, num_ranks)
    results = [run(case, experts, first).float(), run(case, tensor_shard(whole, rank, num_ranks)).float()]
    for result in results:
        torch.distributed.all_reduce(result)
    if rank == 0:
        torch.save([*results, case.reference()], answer)
    torch.distributed.destroy_process_group()


def _run_ranks(backend: str, num_ranks: int, folder: Path) -> None:
    answer, address = folder / "answer.pt", f"file://{folder / 'rendezvous'}"
    torch.multiprocessing.spawn(_rank, args=(num_ranks, address, str(answer), backend), nprocs=num_ranks)
    *results, expected = torch.load(answer, map_location="cpu")
    for result in results:
        assert rel_l2(result, expected) < 6e-3


def test_four_processes(tmp_path: Path) -> None:
    _run_ranks("gloo", 4, tmp_path)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two devices")
def test_two_devices(tmp_path: Path) -> None:
    _run_ranks("nccl", 2, tmp_path)
