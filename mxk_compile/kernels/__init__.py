"""Kernels by device, and the implementations of `mxk::moe` that the dispatcher calls."""

from __future__ import annotations

import functools
import logging
from typing import Any

from torch import Tensor

from mxk_compile.kernels import cpu
from mxk_compile.kernels.desc import KernelConfig, MoEDesc
from mxk_compile.kernels.select import select, supports
from mxk_compile.ops import library
from mxk_compile.ops.moe import reference

__all__ = ["KernelConfig", "MoEDesc", "select", "supports"]

_logger = logging.getLogger("mxk_compile.kernels")


@functools.cache
def _say_once(reason: str) -> None:
    _logger.warning("mxk::moe runs its torch reference: %s", reason)


def _moe(*args: Any, **attributes: Any) -> Tensor:
    """A fused kernel where one supports the call, else the fp32 torch reference, which says why once."""
    desc = MoEDesc.from_call(*args, **attributes)
    reason = supports(desc)
    if reason is None:
        return cpu.moe(*args, **attributes)
    _say_once(reason)
    return reference(*args, **attributes)


for _key in ("CPU", "CUDA"):
    library.impl("moe", _moe, _key)
    library.impl("moe.lists", _moe, _key)
