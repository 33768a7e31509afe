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
    MAX_REL_L2,
    badness,
    error_of,
    is_exact_unpack,
    kernels_of,
    local_routes,
    make_case,
    run_case,
    same_alone_and_together,
    say,
    token_counts,
)
from mxk_compile.parity.stock import on_bf16, run_stock
from mxk_compile.testing import MoECase, rel_l2
from mxk_compile.variants import VARIANTS

_RMS = (1.0, 4.0)  # 4 drives the clamps of SwiGLU
_PREFILL_TOKENS = 256


@dataclasses.dataclass(frozen=True)
class Row:
    """One call: who, how it was routed, errors against fp32, counters of its kernels."""

    variant: str
    routing: str
    num_tokens: int
    local_routes: int
    rms: float
    kernel_rel_l2: float
    stock_rel_l2: float
    counters: tuple[tuple[str, emulate.Counters], ...]

    def __str__(self) -> str:
        return f"{self.variant} {self.routing} T={self.num_tokens} rms={self.rms:g}: {self.kernel_rel_l2:.2e}"


def run_parity(names: Sequence[str], *, quick: bool = False) -> bool:
    """Prints the tables for these variants; whether every check passed. `quick` runs the smallest and largest T."""
    print("emulated: TPC-C sources run on this CPU; nothing here ran on a Gaudi", flush=True)
    start = time.monotonic()
    library = emulated_ops.register()
    kernels = sorted({kernel for name in names for kernel in VARIANT_KERNELS[kernels_of(name)]})
    _build(kernels)
    print(f"built {len(kernels)} kernels in {time.monotonic() - start:.0f} s\n", flush=True)
    rows = _print_parity(names, quick)
    worst = max(rows, key=lambda row: badness(row.kernel_rel_l2))
    parity = badness(worst.kernel_rel_l2) <= MAX_REL_L2
    say("PARITY", parity, f"worst {worst}, limit {MAX_REL_L2:.1e}")
    passed = [parity]
    different = [
        name for name in names if not same_alone_and_together(VARIANTS[name], traced_run, torch.device("cpu"))
    ]
    passed.append(not different)
    say("SIG_DEVICE", not different, f"in one graph other results than alone: {', '.join(different)}")
    if "glm" in names:
        reason = _prefill(quick)
        passed.append(not reason)
        say("PREFILL", not reason, reason)
    del library
    print(f"emulated, in {time.monotonic() - start:.0f} s")
    return all(passed)


def _build(kernels: Sequence[str]) -> None:
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda name: emulate.build(name, workers=2), kernels))


def _print_parity(names: Sequence[str], quick: bool) -> list[Row]:
    header = f"{'variant':10}{'K':>6}{'I':>6}  {'routing':8}{'rms':>4}{'T':>7}{'routes':>8}"
    print(f"{header}  {'kernel rel_l2':21}{'stock rel_l2':21}{'VPU':>6}{'LOAD':>6}   (emulated)")
    rows: list[Row] = []
    for name in names:
        part = _rows(name, quick)
        rows += part
        for group in {(row.routing, row.rms): None for row in part}:
            print(_table_row([row for row in part if (row.routing, row.rms) == group]), flush=True)
    print()
    return rows


def _table_row(rows: Sequence[Row]) -> str:
    variant = VARIANTS[rows[0].variant]
    tokens = f"{rows[0].num_tokens}-{rows[-1].num_tokens}"
    routes = f"{min(row.local_routes for row in rows)}-{max(row.local_routes for row in rows)}"
    kernel = f"{min(row.kernel_rel_l2 for row in rows):.2e} to {max(row.kernel_rel_l2 for row in rows):.2e}"
    stock = f"{min(row.stock_rel_l2 for row in rows):.2e} to {max(row.stock_rel_l2 for row in rows):.2e}"
    vpu, load = chunk_row_cycles([counters for row in rows for _, counters in row.counters])
    left = f"{variant.name:10}{variant.hidden_size:6}{variant.intermediate_size:6}  {rows[0].routing:8}"
    return f"{left}{rows[0].rms:4g}{tokens:>7}{routes:>8}  {kernel:21}{stock:21}{vpu:6.2f}{load:6.2f}"


def chunk_row_cycles(counters: Sequence[emulate.Counters]) -> tuple[float, float]:
    """VPU and LOAD cycles of the chunk loops for each chunk-row, over several calls."""
    rows = max(sum(each.chunk_rows for each in counters), 1)
    vpu, load = (sum(each.slot_cycles(slot, "chunk") for each in counters) / rows for slot in ("vpu", "load"))
    return vpu, load


def _rows(name: str, quick: bool) -> list[Row]:
    """All calls of a variant; `quick`: fewest and most tokens, one RMS for each routing."""
    variant = VARIANTS[name]
    tokens = token_counts(make_case(variant, 1, "hot", 1.0), quick)
    calls = [("random", 1.0), ("hot", 4.0)] + [("random", 4.0), ("hot", 1.0)] * (not quick)
    if name == "gptoss":
        calls += [("router", rms) for rms in (_RMS[1:] if quick else _RMS)]
    keys = [(routing, rms, num_tokens) for routing, rms in sorted(calls) for num_tokens in tokens]
    cases = [make_case(variant, num_tokens, routing, rms) for routing, rms, num_tokens in keys]
    # Tokens do not touch one another: one call of reference and stock op unpacks each expert once for all of them.
    together = dataclasses.replace(
        cases[0],
        hidden_states=torch.cat([case.hidden_states for case in cases]),
        topk_ids=torch.cat([case.topk_ids for case in cases]),
        topk_weights=torch.cat([case.topk_weights for case in cases]),
    )
    sizes = [num_tokens for _, _, num_tokens in keys]
    references = together.reference(round_intermediate=True).split(sizes), run_stock(together).split(sizes)
    rows = []
    for (routing, rms, num_tokens), case, expected, beside in zip(keys, cases, *references, strict=True):
        with emulated_ops.recorded(emulated_ops.Build(workers=2)) as recorder:
            result = run_case(case)
        errors = error_of(result, expected), error_of(beside, expected)
        rows.append(Row(name, routing, num_tokens, local_routes(case), rms, *errors, tuple(recorder.calls)))
    return rows


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


def _prefill(quick: bool) -> str:
    """mxk_deq against the exact unpack, then the stock bf16 op on its weights beside the stock MXFP4 op.

    Returns what is wrong, or an empty string.
    """
    case = make_case(VARIANTS["glm"], 1 if quick else _PREFILL_TOKENS, "random", 1.0)
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
