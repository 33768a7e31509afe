"""`mxk parity --device tpc-emulated`: the kernels' sources run on this CPU; prints tables and PASS lines.

What runs is the code that a graph holds, kernels/tpc `sequence`, on `custom_op::mxk_*` executed by the emulator.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from mxk_compile.kernels.tpc import emulate, emulated_ops
from mxk_compile.kernels.tpc.signatures import KERNELS, VARIANT_KERNELS
from mxk_compile.parity.cases import (
    ROWS,
    Source,
    is_exact_unpack,
    kernels_of,
    make_case,
    run_case,
    same_alone_and_together,
    say,
)
from mxk_compile.parity.rows import TITLES, Row, grouped, judge, line_of, measure, source_of
from mxk_compile.parity.stock import on_bf16, run_stock
from mxk_compile.testing import MoECase, rel_l2

_PREFILL_TOKENS = 256


def run_parity(
    names: Sequence[str], sources: dict[str, Source] | None = None, *, quick: bool = False
) -> bool:
    """Prints the tables for these rows of cases.py; whether every check passed.

    `sources`: real weights by row, random ones for the others; `quick` runs the smallest and largest T.
    """
    print("emulated: TPC-C sources run on this CPU; nothing here ran on a Gaudi", flush=True)
    start, given = time.monotonic(), sources or {}
    library = emulated_ops.register()
    kernels = sorted({kernel for name in names for kernel in VARIANT_KERNELS[kernels_of(name)]})
    _build(kernels)
    print(
        f"built {len(kernels)} kernels in {time.monotonic() - start:.0f} s\n{TITLES:86}{'VPU':>6}{'LOAD':>6}"
    )
    rows, different, reason = [], [], ""
    for name in names:  # all checks of a row while its weights are there
        part = _rows(name, source_of(name, given), quick)
        _print_rows(part)
        rows += part
        if not same_alone_and_together(
            ROWS[name],
            traced_run,
            torch.device("cpu"),
            source=given.get(name),
            alone=_eager,
            num_tokens=1 if quick else 2,
        ):
            different.append(name)
        if name == "glm":
            reason = _prefill(source_of(name, given), quick)
    print()
    passed = [judge(rows), not different, not reason]
    say("SIG_DEVICE", not different, f"in one graph other results than alone: {', '.join(different)}")
    if "glm" in names:
        say("PREFILL", not reason, reason)
    del library
    print(f"emulated, in {time.monotonic() - start:.0f} s")
    return all(passed)


def _build(kernels: Sequence[str]) -> None:
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda name: emulate.build(name, workers=2), kernels))


def _print_rows(rows: Sequence[Row]) -> None:
    """A line for each routing and RMS, with the cycles of the chunk loops."""
    for group in grouped(rows):
        vpu, load = chunk_row_cycles([counters for row in group for _, counters in row.counters])
        print(f"{line_of(group):86}{vpu:6.2f}{load:6.2f}", flush=True)


def chunk_row_cycles(counters: Sequence[emulate.Counters]) -> tuple[float, float]:
    """VPU and LOAD cycles of the chunk loops for each chunk-row, over several calls."""
    rows = max(sum(each.chunk_rows for each in counters), 1)
    vpu, load = (sum(each.slot_cycles(slot, "chunk") for each in counters) / rows for slot in ("vpu", "load"))
    return vpu, load


def _rows(name: str, source: Source, quick: bool) -> list[Row]:
    """All calls of a variant, each with the counters of its kernels."""
    counted: list[tuple[tuple[str, emulate.Counters], ...]] = []

    def run(cases: Sequence[MoECase]) -> list[Tensor]:
        with emulated_ops.recorded(emulated_ops.Build(workers=2)) as recorder:
            results = [run_case(case) for case in cases]
        counted.append(tuple(recorder.calls))
        return results

    rows = measure(name, source, run, torch.device("cpu"), quick=quick)
    return [dataclasses.replace(row, counters=calls) for row, calls in zip(rows, counted, strict=True)]


def _eager(cases: Sequence[MoECase]) -> list[Tensor]:
    """Results of calls that are in no graph."""
    with emulated_ops.recorded(emulated_ops.Build(workers=2)):
        return [run_case(case) for case in cases]


def traced_run(cases: Sequence[MoECase]) -> list[Tensor]:
    """Results of some cases whose calls are in one traced graph."""
    given = [
        {name: value for name, value in vars(case).items() if isinstance(value, Tensor)} for case in cases
    ]

    def calls(given: list[dict[str, Any]]) -> list[Tensor]:
        return [run_case(dataclasses.replace(case, **part)) for case, part in zip(cases, given, strict=True)]

    with emulated_ops.recorded(emulated_ops.Build(workers=2)):
        results: list[Tensor] = make_fx(calls)(given)(given)
    return results


def _prefill(source: Source, quick: bool) -> str:
    """mxk_deq against the exact unpack, then the stock bf16 op on its weights beside the stock MXFP4 op.

    Returns what is wrong, or an empty string.
    """
    case = make_case(source.variant, 1 if quick else _PREFILL_TOKENS, "random", 1.0, source=source)
    unpacked: dict[str, list[Tensor]] = {"w13": [], "w2": []}
    build = emulated_ops.Build(workers=2)
    for name, weight, scale in (("w13", case.w13, case.w13_scale), ("w2", case.w2, case.w2_scale)):
        for expert in range(len(weight)):
            given = {"w": weight[expert].contiguous(), "s": scale[expert].contiguous()}
            values, _ = emulated_ops.call(KERNELS["mxk_deq"], given, build)
            if not is_exact_unpack(values, given["w"], given["s"]):
                return f"mxk_deq of {name}, expert {expert}, is not the exact unpack"
            unpacked[name].append(values)
    expected = case.reference(round_intermediate=True)
    prefill, fused = (
        rel_l2(result, expected)
        for result in (on_bf16(case, unpacked["w13"], unpacked["w2"]), run_stock(case))
    )
    tokens = len(case.hidden_states)
    print(
        f"prefill  glm, T={tokens}: mxk_deq + stock bf16 op {prefill:.2e}, stock MXFP4 op {fused:.2e} (emulated)"
    )
    return "" if prefill <= 1.05 * fused else f"rel_l2 {prefill:.2e}, stock MXFP4 op {fused:.2e}"
