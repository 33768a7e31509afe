"""Which devices the CUDA sources serve, and what of a device they and their schedules depend on."""

from __future__ import annotations

import dataclasses

import torch

from mxk_compile.errors import KernelError
from mxk_compile.settings import settings

_MULTIPLY = {"wgmma": 0, "mma": 1, "tcgen05": 2}  # MXK_MULTIPLY of ptx.cuh


@dataclasses.dataclass(frozen=True)
class Device:
    """A kind of device: frozen and printable.

    Attributes:
        architecture: that sources are compiled for; the suffix a: with wgmma or tcgen05, and setmaxnreg.
        multiply: the tensor cores' instruction: "wgmma", "mma", or "tcgen05" for many rows and "mma" for few.
        shared_bytes: of shared memory that a block may take (CUDA C++ Programming Guide, "Compute Capabilities").
        most_rows: of the largest tile of prefill.cu, of which two stages must fit into that.
        measured: whether the kernels ran on one. Otherwise they were compiled, and emulated on a CPU.
    """

    architecture: str
    multiply: str
    shared_bytes: int
    most_rows: int
    measured: bool = False

    def __str__(self) -> str:
        standing = "measured" if self.measured else "not measured, not run"
        return f"{self.architecture}: {self.multiply}, {self.shared_bytes // 1024} KB a block, {standing}"

    @property
    def macros(self) -> dict[str, int]:
        """Macros of the sources that are not Hopper's."""
        if self == HOPPER:
            return {}
        return {"MXK_MULTIPLY": _MULTIPLY[self.multiply], "MXK_SHARED": self.shared_bytes}


HOPPER = Device("sm_90a", "wgmma", 227 * 1024, 176, measured=True)
DEVICES = {
    (9, 0): HOPPER,
    (10, 0): Device("sm_100a", "tcgen05", 227 * 1024, 176),  # B200, GB200
    (10, 3): Device("sm_103a", "tcgen05", 227 * 1024, 176),  # B300, GB300
    (12, 0): Device("sm_120a", "mma", 99 * 1024, 96),  # RTX PRO 6000 Blackwell, RTX 50
    (12, 1): Device("sm_121a", "mma", 99 * 1024, 96),  # GB10
}
"""By compute capability."""


def refusal(index: int | None = None) -> str | None:
    """None if a CUDA device, by default the current one, is served; else the reason in one line."""
    capability = torch.cuda.get_device_capability(index)
    kind = DEVICES.get(capability)
    if kind is not None and (kind.measured or settings.cuda_unmeasured):
        return None
    given = f"{torch.cuda.get_device_name(index)} has compute capability {'.'.join(map(str, capability))}"
    if kind is None:
        return f"{given}; allowed: 9.0 (Hopper)"
    return f"{given}: compiled for it, never run there; allowed: 9.0 (Hopper), or MXK_CUDA_UNMEASURED=1"


def served(index: int | None = None) -> Device:
    """The kind of a CUDA device, by default of the current one; raises KernelError if it is not served."""
    reason = refusal(index)
    if reason is not None:
        raise KernelError("CUDA kernels", reason, "a device that is served", "use the stock op there")
    return DEVICES[torch.cuda.get_device_capability(index)]
