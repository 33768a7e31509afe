"""One rank's part of a layer's packed experts, for tensor and expert parallelism.

The results of `mxk::moe` on the parts of all ranks sum to the result on the whole: an all-reduce over the ranks makes
it. Expert parallelism splits the experts (call with `experts_min` of the part), tensor parallelism the intermediate
size, in whole scale groups, because a group's scale belongs to one rank.

    part, experts_min = expert_shard(experts, rank, num_ranks)
    out = torch.ops.mxk.moe(..., experts_min=experts_min)
    torch.distributed.all_reduce(out)
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from mxk_compile.checkpoint import PackedExperts
from mxk_compile.errors import CallError
from mxk_compile.ops.formats import mxfp4
from mxk_compile.ops.moe import WEIGHTS


def _check(what: str, rank: int, num_ranks: int, parts: int, of: str) -> None:
    if not 0 <= rank < num_ranks:
        raise CallError(what, f"rank {rank} of {num_ranks}", "0 <= rank < num_ranks", "correct the rank")
    if num_ranks > parts:
        raise CallError(what, f"{num_ranks} ranks for {parts} {of}", f"at most {parts}", "use fewer ranks")


def _span(parts: int, rank: int, num_ranks: int) -> tuple[int, int]:
    """Begin and end of a rank's share, sizes differing by at most one, larger ones first."""
    share, rest = divmod(parts, num_ranks)
    begin = rank * share + min(rank, rest)
    return begin, begin + share + (rank < rest)


def expert_shard(experts: PackedExperts, rank: int, num_ranks: int) -> tuple[PackedExperts, int]:
    """The experts of `rank`, as views, and the global id of the first: `experts_min` of the call.

    Shares differ by at most one expert. Raises CallError for a rank out of range and for more ranks than experts.
    """
    num_experts = len(experts.w2)
    _check("expert_shard", rank, num_ranks, num_experts, "experts")
    begin, end = _span(num_experts, rank, num_ranks)
    tensors = {name: getattr(experts, name) for name in WEIGHTS}
    part: dict[str, Any] = {name: t if t is None else t[begin:end] for name, t in tensors.items()}
    return dataclasses.replace(experts, **part), begin


def tensor_shard(experts: PackedExperts, rank: int, num_ranks: int) -> PackedExperts:
    """The slice of the intermediate size that `rank` has: gate and up rows of w13, columns of w2; copies.

    Shares are whole scale groups of w2 (whole bytes, where a row has one scale) and differ by at most one: 2880 in 4
    parts is 736, 736, 704, 704. The bias of w2 is on rank 0 and zero on the others, so that it is added once.

    Raises CallError for a rank out of range, more ranks than groups, and weights packed along the outputs.
    """
    if experts.pack_dim != "input":
        raise CallError("tensor_shard", f"pack_dim={experts.pack_dim!r}", "'input'", "shard before repacking")
    intermediate_size, num_groups = experts.w13.shape[1] // 2, experts.w2_scale.shape[-1]
    # A last MXFP4 group may be shorter. Where one group is the whole row, any even number of columns may be cut from
    # it: 32 at a time, as kernels take them.
    per_row = num_groups == 1 or experts.weight_format == "mxfp4"
    group = mxfp4.BLOCK if per_row else intermediate_size // num_groups
    parts = -(-intermediate_size // group)
    _check("tensor_shard", rank, num_ranks, parts, "scale groups of the intermediate size")
    begin, end = (bound * group for bound in _span(parts, rank, num_ranks))
    end = min(end, intermediate_size)

    def rows(tensor: Tensor | None) -> Any:
        if tensor is None:
            return None
        if experts.row_order == "interleaved":
            return tensor[:, 2 * begin : 2 * end].clone()
        first, second = tensor.chunk(2, dim=1)
        return torch.cat([first[:, begin:end], second[:, begin:end]], dim=1)

    def groups(tensor: Tensor | None) -> Any:
        if tensor is None:
            return None
        return tensor[..., begin // group : -(-end // group)].clone() if num_groups > 1 else tensor

    w2_bias = experts.w2_bias
    return dataclasses.replace(
        experts,
        w13=rows(experts.w13),
        w13_scale=rows(experts.w13_scale),
        w13_zero=rows(experts.w13_zero),
        w13_bias=rows(experts.w13_bias),
        w2=experts.w2[..., begin // 2 : end // 2].clone(),
        w2_scale=groups(experts.w2_scale),
        w2_zero=groups(experts.w2_zero),
        w2_bias=w2_bias if w2_bias is None or rank == 0 else torch.zeros_like(w2_bias),
    )
