"""The one question: `supports(desc)` is None, or why no kernel runs this call; `select(desc)` names the kernel."""

from __future__ import annotations

from mxk_compile.errors import KernelError
from mxk_compile.kernels import cpu
from mxk_compile.kernels.desc import KernelConfig, MoEDesc


def supports(desc: MoEDesc) -> str | None:
    """None if a fused kernel runs `desc` here, else the reason in one line.

    Asked by the passes, the eager op, `explain`, test skips and error texts alike.
    """
    if desc.device == "cpu":
        return cpu.supports(desc)
    return f"no fused kernel for device {desc.device!r} in this version"


def select(desc: MoEDesc) -> KernelConfig:
    """The kernel that runs `desc`; raises KernelError if there is none."""
    reason = supports(desc)
    if reason is not None:
        raise KernelError("mxk::moe", reason, "what supports() accepts", "keep the stock op")
    return KernelConfig("cpu", "cpp", cpu.isa())
