"""Rows of the `chord` suite: single INT4 projections (chord.py), measured, and what was published of them.

A row's hidden_size is the projection's inputs, its intermediate_size the outputs, its tokens the table's own count.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from tqdm import tqdm

from mxk_compile.bench import implementations, timing
from mxk_compile.bench.chord import SCENARIOS, TOP_K, Call, Scenario, make_call
from mxk_compile.bench.chord_tables import LAUNCHED, name
from mxk_compile.bench.patience import patience
from mxk_compile.bench.rows import Row
from mxk_compile.bench.runner import Say, base_versions, check_device, measured
from mxk_compile.bench.timing import Method
from mxk_compile.errors import KernelError

PUBLISHED = ("humming", "chord")
"""`--impl` of the published columns, in the order of `Scenario.published_us`."""
PEER = "humming_kernels"
"""`--impl` of the module of benchmarks/peers that has single products too."""
PUBLISHED_DEVICE = "NVIDIA H200"
_CHECKED_EXPERTS = 8
_QUICK_ROWS = 512


def chosen(*, quick: bool) -> list[Scenario]:
    """Scenarios of an H200's tables; `quick`: those with few rows."""
    return [
        scenario
        for scenario in SCENARIOS
        if "B300" not in scenario.table and (not quick or scenario.rows <= _QUICK_ROWS)
    ]


def run(device: str, impl: str, method: Method, *, quick: bool, say: Say) -> Iterator[Row]:
    """Rows of the scenarios; `say` hears which were left out, and why.

    Raises KernelError for an implementation that has no projections, or a device that is not there.
    """
    if impl in PUBLISHED:
        yield from _published(PUBLISHED.index(impl))
        return
    if impl not in ("fused", PEER):
        allowed = ", ".join(("fused", *PUBLISHED, PEER))
        raise KernelError("mxk bench --suite chord", f"--impl {impl}", allowed, "choose one of them")
    if device == "tpc-modelled":
        given = "--device tpc-modelled: these tables are of a GPU's projections"
        raise KernelError("mxk bench --suite chord", given, "cpu, cuda", "choose one of them")
    check_device(device)
    peer = None if impl == "fused" else implementations.peer_on(impl, device)
    with torch.inference_mode():
        bandwidth = timing.read_bandwidth([torch.empty(0, device="cuda")]) if device == "cuda" else None
        for scenario in tqdm(chosen(quick=quick), desc="chord", unit="row", disable=None, leave=False):
            try:
                call = make_call(scenario, device)
                if peer is not None:
                    with patience(f"{impl}: {scenario}", say):
                        call = peer.projection(call)
                row = _measured(call, method, bandwidth)
                if peer is not None:
                    versions = row.versions | {impl: peer.version()}
                    kernel = f"{impl}, {scenario.kind}"
                    row = dataclasses.replace(row, impl=impl, kernel=kernel, versions=versions)
                yield row
                if bandwidth is not None:
                    yield _launched(call, row, quick=quick)
            except KernelError as error:
                say(f"left out: {scenario}: {error}")


def _measured(call: Call, method: Method, bandwidth: float | None) -> Row:
    call.run()
    error = call.rel_l2(_CHECKED_EXPERTS)
    calls: timing.Calls = [call.run] * method.chain
    if bandwidth is None:
        bandwidth = timing.read_bandwidth([call.weight.weight])
        fields = measured("cpu", timing.time_cpu(calls, method), call.num_bytes, bandwidth)
    else:
        times = timing.time_cuda(calls, method, capturable=True)
        fields = measured("cuda", times, call.num_bytes, bandwidth)
        fields["floor_us"] = max(fields["floor_us"], round(call.floor_us, 3))
    fields["method"] += ", the same call"
    return Row(
        **_describe(call.scenario, call.touched),
        impl="fused",
        kernel=f"mxk::project.{call.scenario.kind}",
        rotated_bytes=call.num_bytes,
        rel_l2=float(f"{error:.4g}"),
        **fields,
    )


def _launched(call: Call, row: Row, *, quick: bool) -> Row:
    """The same call launched again and again with a cold L2, as the published tables time it: gaps count."""
    from triton.testing import do_bench  # type: ignore[import-not-found]  # comes with torch's CUDA wheels

    warm_up_ms, ms = (25, 100) if quick else (100, 1000)
    us = do_bench(call.run, warmup=warm_up_ms, rep=ms, return_mode="mean") * 1e3
    method = f"triton.testing.do_bench(warmup={warm_up_ms}, rep={ms}), mean"
    return dataclasses.replace(
        row,
        impl=LAUNCHED if row.impl == "fused" else f"{row.impl}, {LAUNCHED}",
        us=round(us, 2),
        us_p10=None,
        us_p90=None,
        packed_gb_s=round(call.num_bytes / us / 1e3, 2),
        method=method,
    )


def _published(column: int) -> Iterator[Row]:
    for scenario in chosen(quick=False):
        if scenario.published_us is None:
            continue
        yield Row(
            **_describe(scenario, scenario.num_experts),
            impl=PUBLISHED[column],
            kernel=("Humming 4351af3", "Chord 89f41c0")[column],
            device=PUBLISHED_DEVICE,
            evidence="published",
            us=scenario.published_us[column],
            method="table of novitalabs/chord, docs/performance.md",
            versions=base_versions(),
        )


def _describe(scenario: Scenario, touched: int) -> dict[str, Any]:
    return {
        "variant": name(scenario),
        "weight_format": "uint4",
        "hidden_size": scenario.inputs,
        "intermediate_size": scenario.outputs,
        "num_experts": scenario.num_experts,
        "all_experts": scenario.num_experts,
        "top_k": TOP_K,
        "num_tokens": scenario.count,
        "routing": scenario.kind,
        "local_routes": scenario.rows,
        "experts_touched": touched,
        "seed": scenario.seed,
    }
