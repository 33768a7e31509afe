"""Rules of the contents of routing tensors (ops/project.py). Each check reads them back, which waits for the device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NoReturn

import torch
from torch import Tensor

from mxk_compile.errors import CallError
from mxk_compile.ops.project import GROUP_ROWS


def _refuse(overload: str, given: str, allowed: str) -> NoReturn:
    raise CallError(f"mxk::project.{overload}", given, allowed, "correct the routing")


def _first(wrong: Tensor) -> Iterator[int]:
    """Index of the first True, or nothing."""
    return iter(wrong.nonzero()[:1, 0].tolist())


def check_routes(topk_ids: Tensor) -> None:
    """Refuses, with CallError, topk_ids [T, k] below -1."""
    if not topk_ids.dtype.is_signed:
        return
    top_k = topk_ids.shape[-1]
    for route in _first(topk_ids.flatten().to(torch.int64) < -1):
        given = (
            f"topk_ids of token {route // top_k}, slot {route % top_k} is {int(topk_ids.flatten()[route])}"
        )
        _refuse("routes", given, "a global expert id, or -1 for none")


def check_sorted(
    sorted_token_ids: Tensor,
    expert_ids: Tensor,
    num_tokens_post_padded: Tensor,
    num_routes: int,
    block_size: int,
    num_experts: int,
    top_k: int,
) -> None:
    """Refuses, with CallError, lists for "sorted" that are too short, have wrong ids, or a route twice."""
    length = int(num_tokens_post_padded)
    most = min(len(sorted_token_ids), len(expert_ids) * block_size)
    if length % block_size or not 0 <= length <= most:
        allowed = f"a multiple of block_size {block_size} up to {most}"
        _refuse("sorted", f"num_tokens_post_padded is {length}", allowed)
    expert = expert_ids[: length // block_size]
    for block in _first((expert < -1) | (expert >= num_experts)):
        _refuse(
            "sorted",
            f"expert_ids[{block}] is {int(expert[block])}",
            f"0 to {num_experts - 1}, or -1 for none",
        )
    ids = sorted_token_ids[:length].to(torch.int64)

    def name(place: int) -> str:
        route = int(ids[place])
        of_route = f" (token {route // top_k}, slot {route % top_k})" if 0 <= route < num_routes else ""
        return f"sorted_token_ids[{place}] is {route}{of_route} in a block of expert {int(expert[place // block_size])}"

    for place in _first(ids < 0):
        _refuse("sorted", name(place), f"routes 0 to {num_routes - 1}, from {num_routes} on padding")
    valid = ids < num_routes
    blocks = valid.view(-1, block_size)
    for place in _first((blocks[:, 1:] & ~blocks[:, :-1]).flatten()):
        after = place // (block_size - 1) * block_size + place % (block_size - 1) + 1
        _refuse("sorted", f"{name(after)} after padding", "padding last in its block")
    order = ids[valid].argsort(stable=True)
    places, routed = valid.nonzero()[:, 0][order], ids[valid][order]
    for repeat in _first(routed[1:] == routed[:-1]):
        _refuse("sorted", f"{name(int(places[repeat + 1]))} a second time", "each route once")


def check_contiguous(m_indices: Tensor, num_experts: int) -> None:
    """Refuses, with CallError, m_indices with wrong ids, or groups that mix experts or pad in the middle."""
    experts = m_indices.to(torch.int64)
    for row in _first((experts < -1) | (experts >= num_experts)):
        allowed = f"0 to {num_experts - 1}, or -1 for padding"
        _refuse("contiguous", f"m_indices of row {row} is {int(experts[row])}", allowed)
    groups = experts[: len(experts) // GROUP_ROWS * GROUP_ROWS].view(-1, GROUP_ROWS)
    # A row's expert is that of the group's first row, until padding starts.
    wrong = (groups >= 0) & (groups != groups[:, :1])
    wrong[:, 1:] |= (groups[:, 1:] >= 0) & (groups[:, :-1] < 0)
    for row in _first(wrong.flatten()):
        first = int(experts[row // GROUP_ROWS * GROUP_ROWS])
        given = f"m_indices of row {row} is {int(experts[row])} in a group of expert {first}"
        _refuse("contiguous", given, f"one expert in {GROUP_ROWS} rows, its padding last")


def check_masked(masked_m: Tensor, max_m: int) -> None:
    """Refuses, with CallError, counts of rows outside 0 to max_m."""
    for expert in _first((masked_m < 0) | (masked_m > max_m)):
        _refuse("masked", f"masked_m[{expert}] is {int(masked_m[expert])}", f"0 to {max_m} rows")
