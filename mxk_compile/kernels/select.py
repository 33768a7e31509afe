"""The one question: `supports(desc)` is None, or why no kernel runs this call; `select(desc)` names the kernel."""

from __future__ import annotations

from typing import Protocol

from mxk_compile.errors import KernelError
from mxk_compile.kernels import cpu, cuda, tpc
from mxk_compile.kernels.desc import KernelConfig, MoEDesc


class Kernels(Protocol):
    """What a device's package answers."""

    def supports(self, desc: MoEDesc) -> str | None:
        """None if a kernel runs calls of this description here, else the reason in one line."""

    def config(self, desc: MoEDesc) -> KernelConfig:
        """What runs a description that `supports` accepts."""


DEVICES: dict[str, Kernels] = {"cpu": cpu, "cuda": cuda, "hpu": tpc}
"""Kernels by device type."""


def supports(desc: MoEDesc) -> str | None:
    """None if a fused kernel runs `desc` here, else the reason in one line.

    Asked by the passes, the eager op, `explain`, test skips and error texts alike.
    """
    kernels = DEVICES.get(desc.device)
    if kernels is None:
        return f"no fused kernel for device {desc.device!r} in this version"
    return kernels.supports(desc)


def select(desc: MoEDesc) -> KernelConfig:
    """The kernel that runs `desc`; raises KernelError if there is none."""
    reason = supports(desc)
    if reason is not None:
        raise KernelError("mxk::moe", reason, "what supports() accepts", "keep the stock op")
    return DEVICES[desc.device].config(desc)


def token_range(desc: MoEDesc) -> tuple[int, int | None]:
    """Fewest and most tokens (None: any) of one call that the kernels of `desc` run."""
    return tpc.token_range(desc) if desc.device == "hpu" else (0, None)


def stacked_only(desc: MoEDesc) -> bool:
    """Whether the kernels of `desc` take stacked experts alone, and no lists."""
    return desc.device == "hpu"
