"""CUDA kernels of `mxk::moe` for Hopper."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mxk_compile.errors import KernelError
from mxk_compile.kernels.desc import KernelConfig, MoEDesc


def supports(desc: MoEDesc) -> str | None:
    """None if `moe` runs calls of this description here, else the reason in one line."""
    return f"no fused kernel for device {desc.device!r} in this version"


def config(desc: MoEDesc) -> KernelConfig:
    """The kernel that runs `desc`."""
    return KernelConfig("cuda", "nvrtc", "sm_90a")


def moe(desc: MoEDesc, *tensors: Any, **scalars: Any) -> Tensor:
    """`mxk::moe` or `mxk::moe.lists` on a CUDA device."""
    raise KernelError("CUDA kernels", str(supports(desc)), "what supports() accepts", "keep the stock op")
