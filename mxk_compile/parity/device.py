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
    Run,
    Source,
    is_exact_unpack,
    kernels_of,
    run_case,
    same_alone_and_together,
    say,
)
from mxk_compile.parity.rows import TITLES, judge, measure, print_rows, source_of
from mxk_compile.passes.warm import self_check
from mxk_compile.testing import MoECase


def run_on_device(
    folder: Path, names: Sequence[str], sources: dict[str, Source] | None = None, *, quick: bool = False
) -> bool:
    """Opens the bridge and the build in `folder`, checks those of `names` that it has kernels for; whether all passed.

    `sources`: real weights by row of cases.py; random ones for the others.

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
    run = lazy_run if lazy else compiled_run("hpu_backend")
    return check(known, torch.device("hpu"), run, sources, quick=quick)


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
        # Each row has shapes of its own, and none of them may fall back to eager calls.
        with torch._dynamo.config.patch(recompile_limit=256, accumulated_recompile_limit=4096):
            return list(compiled[key](groups))

    return run


def check(
    names: Sequence[str],
    device: torch.device,
    run: Run,
    sources: dict[str, Source] | None = None,
    *,
    quick: bool = False,
) -> bool:
    """The checks themselves, with ops that are registered for `device`; prints, and says whether all passed."""
    broken = {op: reason for op, reason in self_check(device.type).items() if reason is not None}
    if broken:
        say("PARITY", False, "; ".join(f"{op} does not run: {why}" for op, why in broken.items()))
        return False
    given = sources or {}
    print(TITLES)
    rows, different = [], []
    for name in names:
        source = source_of(name, given)
        part = measure(name, source, run, device, quick=quick)
        print_rows(part)
        rows += part
        if not same_alone_and_together(source.variant, run, device, source=given.get(name)):
            different.append(name)
    passed = [judge(rows), not different]
    say("SIG_DEVICE", not different, f"in one graph other results than alone: {', '.join(different)}")
    if "glm" in names:
        wrong = unpack(device, source_of("glm", given))
        passed.append(not wrong)
        say("PREFILL", not wrong, wrong)
    return all(passed)


def unpack(device: torch.device, source: Source) -> str:
    """mxk_deq of the first, middle and last expert against the exact unpack; what is wrong, or an empty string."""
    case = source.weights
    for name, weight, scale in (("w13", case.w13, case.w13_scale), ("w2", case.w2, case.w2_scale)):
        placed = weight.to(device), scale.to(device)
        for expert in (0, len(weight) // 2, len(weight) - 1):
            # Views in the graph of the call: a legacy op can read wrong data through those of an earlier graph.
            values = torch.ops.custom_op.mxk_deq(*(tensor[expert] for tensor in placed)).cpu()
            if not is_exact_unpack(values, weight[expert], scale[expert]):
                return f"mxk_deq of {name}, expert {expert}, is not the exact unpack"
    return ""
