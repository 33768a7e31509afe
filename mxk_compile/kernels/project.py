"""Implementations of `mxk::project` that the dispatcher calls."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from mxk_compile.kernels import cuda
from mxk_compile.kernels.cuda import grouped, repack
from mxk_compile.kernels.fallback import say_reference_once
from mxk_compile.meta.project import check_project
from mxk_compile.ops.project import NUM_ROUTING, OVERLOADS, enter_directly, reference


def project_cpu(overload: str, out: Tensor, x: Tensor, *args: Any, **attributes: Any) -> None:
    """On CPU: the fp32 torch reference, one expert at a time. The CPU library has kernels for whole layers only."""
    check_project(overload, out, x, *args, **attributes)
    reference(overload, out, x, *args, **attributes)


def _judge(overload: str, out: Tensor, x: Tensor, *args: Any, **attributes: Any) -> str | None:
    """None if the CUDA kernels run a call, else the reason; raises CallError if the call is malformed."""
    check_project(overload, out, x, *args, **attributes)
    missing = cuda.unavailable()
    if missing is not None:
        return f"CUDA kernels: {missing}"
    return grouped.refusal(overload, out, x, *args, **attributes)


def project_cuda(overload: str, out: Tensor, x: Tensor, *args: Any, **attributes: Any) -> None:
    """On CUDA: the kernels of kernels/cuda/grouped.py, or the torch reference, which says why once."""
    if attributes.get("pack_dim") == "output":
        check_project(overload, out, x, *args, **attributes)
        count = NUM_ROUTING[overload]
        weight, scale, zero = (*args[count:], None)[:3]
        turned = repack.along_inputs((weight, scale, None, None, zero, None, None, None))
        args, attributes = (
            (*args[:count], turned[0], turned[1], turned[4]),
            {**attributes, "pack_dim": "input"},
        )
    reason = grouped.project(_judge, overload, out, x, *args, **attributes)
    if reason is not None:
        say_reference_once("mxk::project", reason)
        reference(overload, out, x, *args, **attributes)


for _overload in OVERLOADS:
    enter_directly(_overload, partial(project_cpu, _overload), "CPU")
    enter_directly(_overload, partial(project_cuda, _overload), "CUDA")
