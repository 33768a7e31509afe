"""Implementations of `mxk::project` that the dispatcher calls."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from mxk_compile.meta.project import check_project
from mxk_compile.ops import library
from mxk_compile.ops.project import OVERLOADS, reference


def project_cpu(overload: str, out: Tensor, x: Tensor, *args: Any, **attributes: Any) -> None:
    """On CPU: the fp32 torch reference, one expert at a time. The CPU library has kernels for whole layers only."""
    check_project(overload, out, x, *args, **attributes)
    reference(overload, out, x, *args, **attributes)


for _overload in OVERLOADS:
    library.impl(f"project.{_overload}", partial(project_cpu, _overload), "CPU")
    library.impl(f"project.{_overload}", partial(project_cpu, _overload), "CUDA")
