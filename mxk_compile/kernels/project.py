"""Implementations of `mxk::project` that the dispatcher calls."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from mxk_compile.errors import CallError
from mxk_compile.kernels import cuda
from mxk_compile.kernels.cuda import grouped, repack
from mxk_compile.kernels.fallback import say_reference_once
from mxk_compile.meta.project import check_project
from mxk_compile.ops.project import NUM_ROUTING, OVERLOADS, ROUTING, enter_directly, reference


def project_cpu(overload: str, out: Tensor, x: Tensor, *args: Any, **attributes: Any) -> None:
    """On CPU: the fp32 torch reference, one expert at a time. The CPU library has kernels for whole layers only."""
    _check_apart(overload, out, x, *args)
    check_project(overload, out, x, *args, **attributes)
    reference(overload, out, x, *args, **attributes)


def _check_apart(overload: str, out: Tensor, x: Tensor, *args: Any) -> None:
    """Raises CallError where `out` shares memory with what is read: some of it would be read after it was written."""
    memory = out.untyped_storage().data_ptr()
    names = ("x", *ROUTING[overload], "weight", "scale", "zero")
    for name, tensor in zip(names, (x, *args), strict=False):  # zero may be left out
        if tensor is None or tensor.untyped_storage().data_ptr() != memory:
            continue
        if _overlap(out, tensor):
            advice = "write to another tensor"
            raise CallError(f"mxk::project.{overload}", f"out overlaps {name}", "memory of its own", advice)


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two views of one storage may have bytes in common.

    They have none if some period parts them: what each takes of every period, between its first and its last byte, is
    beside the other's. Rows of one wider tensor are parted by its row; all of memory is a period too.
    """
    if not a.numel() or not b.numel():
        return False
    steps = [
        [
            (size - 1, t.itemsize * stride)
            for size, stride in zip(t.shape, t.stride(), strict=True)
            if size > 1
        ]
        for t in (a, b)
    ]

    def apart(period: int) -> bool:
        spans = [
            t.itemsize + sum(count * step for count, step in of_t if step % period)
            for t, of_t in zip((a, b), steps, strict=True)
        ]
        distance = (b.data_ptr() - a.data_ptr()) % period
        return spans[0] <= distance <= period - spans[1]

    return not any(map(apart, {1 << 64, *(step for of_t in steps for _, step in of_t if step)}))


def _judge(overload: str, out: Tensor, x: Tensor, *args: Any, **attributes: Any) -> str | None:
    """None if the CUDA kernels run a call, else the reason; raises CallError if the call is malformed."""
    check_project(overload, out, x, *args, **attributes)
    missing = cuda.unavailable(out.get_device())
    if missing is not None:
        return f"CUDA kernels: {missing}"
    return grouped.refusal(overload, out, x, *args, **attributes)


def project_cuda(overload: str, out: Tensor, x: Tensor, *args: Any, **attributes: Any) -> None:
    """On CUDA: the kernels of kernels/cuda/grouped.py, or the torch reference, which says why once."""
    _check_apart(overload, out, x, *args)
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
