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


_verdicts: dict[Any, tuple[MoEDesc, str | None]] = {}
"""Description and verdict of the calls seen so far, by all but T: to find them anew costs a small call."""


def _moe(*args: Any, **attributes: Any) -> Tensor:
    hidden_states, topk_ids, topk_weights, *weights = args
    fits = hidden_states.shape[0] == topk_ids.shape[0] and topk_ids.shape == topk_weights.shape
    shapes = [None if tensor is None else (tensor.shape, tensor.dtype, tensor.device) for tensor in weights]
    key = (
        *(hidden_states.shape[1:], hidden_states.dtype, topk_ids.shape[1:], topk_ids.dtype, topk_ids.device),
        *(topk_weights.dtype, topk_weights.device, *shapes, *attributes.items()),
    )
    if not fits or key not in _verdicts:
        _verdicts[key] = _judge(*args, **attributes)
    return _run(*_verdicts[key], *args, **attributes)


def _moe_lists(*args: Any, **attributes: Any) -> Tensor:
    # Judged in every call: each expert brings its own tensors.
    return _run(*_judge(*args, **attributes), *args, **attributes)


def _judge(*args: Any, **attributes: Any) -> tuple[MoEDesc, str | None]:
    desc = MoEDesc.from_call(*args, **attributes)
    return desc, supports(desc)


def _run(desc: MoEDesc, reason: str | None, *args: Any, **attributes: Any) -> Tensor:
    """A fused kernel where one supports the call, else the fp32 torch reference, which says why once."""
    if reason is None:
        scalars = {
            name: value for name, value in attributes.items() if name in ("alpha", "limit", "experts_min")
        }
        return cpu.moe(desc, *args, **scalars)
    _say_once(reason)
    return reference(*args, **attributes)


for _key in ("CPU", "CUDA"):
    library.impl("moe", _moe, _key)
    library.impl("moe.lists", _moe_lists, _key)
