"""`mxk parity --device cpu|cuda`: `mxk::moe` on this machine against fp32, beside the stock op.

Measured where it runs: the same calls, limits and PASS lines as for a Gaudi. SIG_DEVICE compares two calls in one
compiled graph with the same calls alone; PREFILL is a call of many tokens, and the unpack of whole experts bit for bit.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from mxk_compile.errors import KernelError
from mxk_compile.kernels import select, supports
from mxk_compile.parity.cases import (
    Source,
    badness,
    describe,
    error_of,
    is_exact_unpack,
    make_case,
    on_device,
    same_alone_and_together,
    say,
)
from mxk_compile.parity.device import compiled_run
from mxk_compile.parity.rows import TITLES, Row, judge, measure, print_rows, references, source_of
from mxk_compile.settings import Settings
from mxk_compile.testing import MoECase, machine, most_rel_l2

_MOST_TOKENS = Settings().max_tokens  # the default cap of a graph's decode calls; the kernels have none
_PREFILL_TOKENS = {False: 256, True: 64}  # by `quick`; above that cap


def run_on_host(
    device_type: str, names: Sequence[str], sources: dict[str, Source] | None = None, *, quick: bool = False
) -> bool:
    """Prints tables and PASS lines for these rows; whether every check passed.

    Args:
        device_type: "cpu" or "cuda".
        names: rows of cases.py.
        sources: real weights by row; random ones for the others.
        quick: fewest and most tokens, one RMS for each routing.

    Raises:
        KernelError: no kernel of this device runs any of the rows; one line.
    """
    start, device, given = time.monotonic(), torch.device(device_type), sources or {}
    if device_type == "cuda" and not torch.cuda.is_available():
        raise _refusal(names, device, "there is no CUDA device")
    # The CPU kernels keep the intermediate in more bits than bf16 has (docs/performance/cpu.md).
    round_intermediate = device_type != "cpu"
    title = (
        f"measured: {_machine(device)}\n"
        f"against fp32, intermediate {'rounded to bf16' if round_intermediate else 'not rounded'}\n{TITLES}"
    )
    left_out: dict[str, str] = {}
    rows: list[Row] = []
    different, reasons = [], []
    for name in names:  # all checks of a row while its weights are there: drawing them takes seconds
        source = source_of(name, given)
        refused = supports(
            describe(on_device(make_case(source.variant, 1, "hot", 1.0, source=source), device))
        )
        if refused:
            left_out[name] = refused
            continue
        if not rows:
            print(title, flush=True)
        part = measure(
            name,
            source,
            _eager,
            device,
            quick=quick,
            most=_MOST_TOKENS,
            round_intermediate=round_intermediate,
        )
        print_rows(part)
        rows += part
        if not _same(source, device):
            different.append(name)
        reason = _prefill(name, source, device, quick, round_intermediate)
        reasons += [reason] if reason else []
    if not rows:
        raise _refusal(names, device, next(iter(left_out.values())))
    for name, reason in left_out.items():
        print(f"{name:10} left out: {reason}")
    print()
    passed = [judge(rows), not different, not reasons]
    say("SIG_DEVICE", passed[1], f"in one graph other results than alone: {', '.join(different)}")
    say("PREFILL", passed[2], "; ".join(reasons))
    print(f"measured, in {time.monotonic() - start:.0f} s")
    return all(passed)


def _refusal(names: Sequence[str], device: torch.device, reason: str) -> KernelError:
    given = f"{', '.join(names)} on {device}: {reason}"
    return KernelError("mxk parity", given, "rows that a kernel runs here", "see mxk doctor")


def _machine(device: torch.device) -> str:
    if device.type == "cuda":
        name, version = torch.cuda.get_device_name(device), torch.version.cuda
        return f"{name}, CUDA {version}, torch {torch.__version__}"
    return machine()


def _eager(cases: Sequence[MoECase]) -> list[Tensor]:
    return [case.fused() for case in cases]


def _same(source: Source, device: torch.device) -> bool:
    """Two calls in one compiled graph, and the same calls eagerly; on CUDA the graph is a stream's, in order."""
    compiled = compiled_run("aot_eager")
    return same_alone_and_together(source.variant, compiled, device, source=source, alone=_eager)


def _prefill(name: str, source: Source, device: torch.device, quick: bool, round_intermediate: bool) -> str:
    """What is wrong with a call of many tokens, or with the unpack of first, middle and last expert; else nothing."""
    num_tokens = _PREFILL_TOKENS[quick]
    case = make_case(source.variant, num_tokens, "random", 1.0, source=source)
    ((expected, beside),) = references([case], device, round_intermediate)
    placed = on_device(case, device)
    error = error_of(placed.fused().cpu(), expected)
    stock = beside if isinstance(beside, str) else f"{error_of(beside, expected):.2e}"
    print(
        f"{name:10} prefill, T={num_tokens}: {select(describe(placed))} {error:.2e}, stock {stock}",
        flush=True,
    )
    if badness(error) > (limit := most_rel_l2(expected)):
        return f"{name} T={num_tokens}: rel_l2 {error:.2e}, limit {limit:.1e}"
    if case.attributes["weight_format"] != "mxfp4":
        return ""
    for part, weight, scale in (("w13", case.w13, case.w13_scale), ("w2", case.w2, case.w2_scale)):
        for expert in sorted({0, len(weight) // 2, len(weight) - 1}):
            values = torch.ops.mxk.mxfp4_dequant(weight[expert].to(device), scale[expert].to(device)).cpu()
            if not is_exact_unpack(values, weight[expert], scale[expert]):
                return f"{name}: mxfp4_dequant of {part}, expert {expert}, is not the exact unpack"
    return ""
