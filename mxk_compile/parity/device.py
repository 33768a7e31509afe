"""`mxk parity --device hpu`: the kernels of a build on a Gaudi, against fp32 and beside the stock op.

Cases, limits and PASS lines are those of the emulated parity. What runs is what serves: in lazy mode the kernels' ops
as calls of one lazy graph, else `mxk::moe` compiled by the `mxk` backend with `hpu_backend` inside. This module has run
on stand-ins only.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mxk_compile.errors import KernelError
from mxk_compile.kernels.tpc.libraries import load_ops, read_manifest
from mxk_compile.parity.cases import (
    MAX_REL_L2,
    Run,
    badness,
    error_of,
    is_exact_unpack,
    kernels_of,
    make_case,
    on_device,
    run_case,
    same_alone_and_together,
    say,
    token_counts,
)
from mxk_compile.parity.stock import run_stock
from mxk_compile.passes.warm import self_check
from mxk_compile.testing import MoECase
from mxk_compile.variants import VARIANTS


def run_on_device(folder: Path, names: Sequence[str], *, quick: bool = False) -> bool:
    """Opens the bridge and the build in `folder`, checks those of `names` that it has kernels for; whether all passed.

    Raises:
        KernelError: no usable build, one of other variants, or no bridge; one line.
    """
    manifest = read_manifest(folder)
    known = [name for name in names if kernels_of(name) == manifest.variant]
    if not known:
        raise KernelError(
            "mxk parity",
            f"variant {', '.join(names)} with a build of {manifest.variant}",
            "variants that the build has kernels for",
            "build that variant, or leave --variant out",
        )
    try:
        internal = importlib.import_module("habana_frameworks.torch.utils.internal")
        device = importlib.import_module("habana_frameworks.torch.hpu")
    except ImportError as error:
        advice = "run it in the serving image, on a card"
        raise KernelError("mxk parity", str(error), "habana_frameworks.torch", advice) from error
    lazy = bool(internal.is_lazy())
    load_ops(folder, "lazy" if lazy else "pt2")
    mode = "lazy mode" if lazy else "torch.compile, hpu_backend"
    print(f"{manifest.version} on {device.get_device_name()}, {mode}", flush=True)
    return check(known, torch.device("hpu"), lazy_run if lazy else compiled_run("hpu_backend"), quick=quick)


def lazy_run(cases: Sequence[MoECase]) -> list[Tensor]:
    """The kernels' ops, called; in lazy mode nothing executes before a result is read."""
    return [run_case(case) for case in cases]


def compiled_run(inner_backend: str) -> Run:
    """`mxk::moe` under torch.compile, one graph for all cases."""
    compiled: dict[str, Any] = {}

    def run(cases: Sequence[MoECase]) -> list[Tensor]:
        attributes = [case.attributes for case in cases]
        groups = [[*case.routing, *case.weights] for case in cases]

        def function(groups: list[list[Any]]) -> list[Tensor]:
            return [
                torch.ops.mxk.moe(*group, **values) for group, values in zip(groups, attributes, strict=True)
            ]

        key = str(attributes)
        if key not in compiled:
            options: Any = {"inner_backend": inner_backend}
            compiled[key] = torch.compile(function, backend="mxk", dynamic=False, options=options)
        return list(compiled[key](groups))

    return run


def check(names: Sequence[str], device: torch.device, run: Run, *, quick: bool = False) -> bool:
    """The checks themselves, with ops that are registered for `device`; prints, and says whether all passed."""
    broken = {op: reason for op, reason in self_check(device.type).items() if reason is not None}
    if broken:
        say("PARITY", False, "; ".join(f"{op} does not run: {why}" for op, why in broken.items()))
        return False
    worst = max((_variant(name, device, run, quick) for name in names), key=badness)
    passed = [badness(worst) <= MAX_REL_L2]
    say("PARITY", passed[0], f"worst rel_l2 {worst:.2e}, limit {MAX_REL_L2:.1e}")
    different = [name for name in names if not same_alone_and_together(VARIANTS[name], run, device)]
    passed.append(not different)
    say("SIG_DEVICE", not different, f"in one graph other results than alone: {', '.join(different)}")
    if "glm" in names:
        wrong = unpack(device)
        passed.append(not wrong)
        say("PREFILL", not wrong, wrong)
    return all(passed)


def _variant(name: str, device: torch.device, run: Run, quick: bool) -> float:
    """Prints a line for each call; the worst rel_l2 of one variant."""
    errors = []
    counts = token_counts(on_device(make_case(VARIANTS[name], 1, "hot", 1.0), device), quick)
    for routing in ("random", "hot"):
        for rms in (1.0, 4.0):
            for num_tokens in counts:
                case = make_case(VARIANTS[name], num_tokens, routing, rms)
                expected = case.reference(round_intermediate=True)
                placed = on_device(case, device)
                errors.append(error_of(run([placed])[0].cpu(), expected))
                beside = _stock_error(placed, expected)
                call = f"{name:8} {routing:7} rms {rms:g} T {num_tokens:3}"
                print(f"{call}  kernel {errors[-1]:.2e}  stock {beside}", flush=True)
    return max(errors, key=badness)


def _stock_error(case: MoECase, expected: Tensor) -> str:
    try:
        return f"{error_of(run_stock(case).cpu(), expected):.2e}"
    except RuntimeError as error:  # the bridge runs its MXFP4 ops in graphs only: it is shown, not required
        return f"not run ({str(error).splitlines()[0][:60]})"


def unpack(device: torch.device) -> str:
    """mxk_deq of the first, middle and last expert against the exact unpack; what is wrong, or an empty string."""
    case = make_case(VARIANTS["glm"], 1, "hot", 1.0)
    for name, weight, scale in (("w13", case.w13, case.w13_scale), ("w2", case.w2, case.w2_scale)):
        placed = weight.to(device), scale.to(device)
        for expert in (0, len(weight) // 2, len(weight) - 1):
            # Views in the graph of the call: a legacy op can read wrong data through those of an earlier graph.
            values = torch.ops.custom_op.mxk_deq(*(tensor[expert] for tensor in placed)).cpu()
            if not is_exact_unpack(values, weight[expert], scale[expert]):
                return f"mxk_deq of {name}, expert {expert}, is not the exact unpack"
    return ""
