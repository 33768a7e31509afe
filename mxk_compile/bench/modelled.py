"""`--device tpc-modelled`: microseconds on a Gaudi 2, modelled from what the emulator counts in each call.

The kernels' sources run on this CPU at the call's full sizes with weights of zeros, which the counts do not depend on;
kernels/tpc/time_model.py makes a time of the counts. The stock op has no model: its rows are the published ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from tqdm import tqdm

from mxk_compile.bench import cases
from mxk_compile.bench.points import Point
from mxk_compile.bench.rows import Row
from mxk_compile.bench.runner import Say, base_versions, describe
from mxk_compile.errors import KernelError
from mxk_compile.kernels import tpc
from mxk_compile.kernels.tpc import emulated_ops, published, time_model
from mxk_compile.ops.moe import WEIGHTS
from mxk_compile.parity.cases import describe as describe_call
from mxk_compile.parity.cases import run_case
from mxk_compile.parity.emulated import chunk_row_cycles
from mxk_compile.testing import MoECase, random_layer
from mxk_compile.variants import VARIANTS, MoEVariant

_METHOD = "time model of kernels/tpc/time_model.py at the emulator's counts"
_PUBLISHED_METHOD = 'table of "MXFP4 MoE decode kernels": HPU graph, chain of 8, median of 30'


def run(points: list[Point], impl: str, say: Say) -> Iterator[Row]:
    """Rows of the points that Gaudi's kernels take (impl "fused"), or that were published ("stock").

    Raises KernelError where none of them could be had.
    """
    done = 0
    reason = f"nothing is known of {impl!r} on a Gaudi 2"
    library = emulated_ops.register() if impl == "fused" else None
    for point in tqdm(points, desc=f"{impl}, modelled", unit="row", disable=None, leave=False):
        row: Row | None = None
        if impl == "fused":
            reason = _refusal(point) or ""
            row = None if reason else _modelled(point)
        elif impl == "stock":
            reason = "the stock op's time is known for the published calls only"
            row = _published(point)
        if row is None:
            say(f"left out: {point}: {reason}")
            continue
        done += 1
        yield row
    del library
    if not done:
        advice = "choose --impl fused, or --suite document for the published rows of the stock op"
        raise KernelError(f"mxk bench --device tpc-modelled --impl {impl}", reason, "fused, stock", advice)


def _refusal(point: Point) -> str | None:
    case = zeros(point)
    desc = describe_call(case)
    reason = tpc.supports(desc)
    if reason is not None:
        return reason
    fewest, most = tpc.token_range(desc)
    if fewest <= point.num_tokens <= most:
        return None
    return f"T = {point.num_tokens}; allowed: {fewest} to {most} tokens a call"


def zeros(point: Point) -> MoECase:
    """The call of a point with the experts that its routing touches, their weights zeros of full size."""
    variant: MoEVariant = VARIANTS[point.variant]
    hidden_states, ids, weights = cases.draw(point)
    used, renumbered = ids[ids < point.num_experts].unique(return_inverse=True)
    new_ids = torch.full_like(ids, len(used))
    new_ids[ids < point.num_experts] = renumbered
    num_experts = max(len(used), 1)
    layer = random_layer(variant, 1, 0, "cpu")
    weights_of_zeros: dict[str, Any] = {
        name: None if weight is None else torch.zeros(num_experts, *weight.shape[1:], dtype=weight.dtype)
        for name, weight in zip(WEIGHTS, layer.weights, strict=True)
    }
    return MoECase(hidden_states, new_ids, weights, **weights_of_zeros, attributes=layer.attributes)


def _modelled(point: Point) -> Row:
    case = zeros(point)
    variant = VARIANTS[point.variant]
    with emulated_ops.recorded(emulated_ops.Build(workers=2)) as recorder:
        run_case(case)
    counters = [counters for _, counters in recorder.calls]
    vpu, load = chunk_row_cycles(counters)
    routes = int((case.topk_ids < len(case.w2)).sum())
    us = time_model.calibrated().predict_us(variant.hidden_size, variant.intermediate_size, routes, vpu, load)
    counts = {
        "vpu_cycles_per_chunk_row": round(vpu, 4),
        "load_cycles_per_chunk_row": round(load, 4),
        "chunk_rows": float(sum(each.chunk_rows for each in counters)),
        "bytes_loaded": float(sum(each.bytes_loaded for each in counters)),
        "bytes_stored": float(sum(each.bytes_stored for each in counters)),
    }
    kernels = "+".join(name for name, _ in recorder.calls)
    return _row(point, case, "fused", kernels, us, "modelled", _METHOD, counts)


def _published(point: Point) -> Row | None:
    for row in published.PUBLISHED:
        if (row.variant, row.num_experts, row.num_tokens, row.routing) == (
            point.variant,
            point.num_experts,
            point.num_tokens,
            point.routing,
        ) and point.local_routes in (None, row.local_routes):
            case = zeros(point)
            return _row(point, case, "stock", "stock op", row.stock_us, "published", _PUBLISHED_METHOD, {})
    return None


def _row(
    point: Point,
    case: MoECase,
    impl: str,
    kernel: str,
    us: float,
    evidence: str,
    method: str,
    counts: dict[str, float],
) -> Row:
    local = case.topk_ids < len(case.w2)
    touched = len(case.topk_ids[local].unique())
    num_bytes = touched * cases.expert_bytes(case)
    return Row(
        **describe(point),
        local_routes=int(local.sum()),
        experts_touched=touched,
        impl=impl,
        kernel=kernel,
        device=published.DEVICE,
        evidence=evidence,
        us=round(us, 2),
        floor_us=round(num_bytes / published.READ_BYTES_A_SECOND * 1e6, 2),
        packed_gb_s=round(num_bytes / us / 1e3, 2),
        read_gb_s=published.READ_BYTES_A_SECOND / 1e9,
        method=method,
        versions=base_versions(),
        counts=counts,
    )
