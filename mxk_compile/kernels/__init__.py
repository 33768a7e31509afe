"""Kernels by device, and the implementations of `mxk::moe` that the dispatcher calls."""

from __future__ import annotations

import dataclasses
import functools
import logging
from typing import Any

from torch import Tensor

from mxk_compile.kernels.desc import KernelConfig, MoEDesc
from mxk_compile.kernels.select import DEVICES, select, supports
from mxk_compile.ops import library
from mxk_compile.ops.moe import reference

__all__ = ["KernelConfig", "MoEDesc", "select", "supports"]

_logger = logging.getLogger("mxk_compile.kernels")


@functools.cache
def _say_once(reason: str) -> None:
    _logger.warning("mxk::moe runs its torch reference: %s", reason)


@dataclasses.dataclass(frozen=True)
class _Verdict:
    """What was found out about a call: its description, why no kernel runs it (or None), a kernel's other arguments."""

    desc: MoEDesc
    reason: str | None
    scalars: dict[str, Any]


_verdicts: dict[Any, _Verdict] = {}
"""Verdicts of the calls seen so far, by all but T: to find one anew costs as much as a small call."""


def _moe(*args: Any, **attributes: Any) -> Tensor:
    hidden_states, topk_ids, topk_weights, *weights = args
    routes = topk_ids.shape
    shapes = [None if tensor is None else (tensor.shape, tensor.dtype, tensor.device) for tensor in weights]
    key = (
        *(hidden_states.shape[1:], hidden_states.dtype, routes[1:], topk_ids.dtype, topk_ids.device),
        *(topk_weights.dtype, topk_weights.device, *shapes, *attributes.items()),
    )
    verdict = _verdicts.get(key)
    if verdict is None or hidden_states.shape[0] != routes[0] or routes != topk_weights.shape:
        verdict = _verdicts[key] = _judge(*args, **attributes)
    return _run(verdict, args, attributes)


def _moe_lists(*args: Any, **attributes: Any) -> Tensor:
    # Judged in every call: each expert brings its own tensors.
    return _run(_judge(*args, **attributes), args, attributes)


def _judge(*args: Any, **attributes: Any) -> _Verdict:
    desc = MoEDesc.from_call(*args, **attributes)
    scalars: dict[str, Any] = {
        name: attributes[name] for name in ("alpha", "limit", "experts_min") if name in attributes
    }
    return _Verdict(desc, supports(desc), scalars)


def _run(verdict: _Verdict, args: tuple[Any, ...], attributes: dict[str, Any]) -> Tensor:
    """A fused kernel where one supports the call, else the fp32 torch reference, which says why once."""
    if verdict.reason is None:
        return DEVICES[verdict.desc.device].moe(verdict.desc, *args, **verdict.scalars)
    _say_once(verdict.reason)
    return reference(*args, **attributes)


for _key in ("CPU", "CUDA"):
    library.impl("moe", _moe, _key)
    library.impl("moe.lists", _moe_lists, _key)
