"""Kernels by device, and the implementations of `mxk::moe` that the dispatcher calls."""

from __future__ import annotations

import functools
import logging
import operator
from typing import Any

from torch import Tensor

from mxk_compile.kernels import cpu, cuda, project, tpc
from mxk_compile.kernels.cuda.operands import ALIGNMENT
from mxk_compile.kernels.desc import KernelConfig, MoEDesc
from mxk_compile.kernels.select import select, supports
from mxk_compile.ops import library
from mxk_compile.ops.moe import enter_directly, reference

__all__ = ["KernelConfig", "MoEDesc", "project", "select", "supports"]

_logger = logging.getLogger("mxk_compile.kernels")


@functools.cache
def _say_once(reason: str) -> None:
    _logger.warning("mxk::moe runs its torch reference: %s", reason)


_prepared: dict[Any, cpu.Prepared] = {}
"""CPU calls seen so far, by all that they hold on to: shapes, strides and dtypes, and the addresses of the weights.

It keeps nothing alive: memory that is freed and comes back in the same layout is the same call with other contents.
"""
_MOST_PREPARED = 4096


def _judge(args: tuple[Any, ...], attributes: dict[str, Any]) -> tuple[MoEDesc, str | None, dict[str, Any]]:
    """Description of a call, why no kernel runs it (or None), a kernel's other arguments."""
    desc = MoEDesc.from_call(*args, **attributes)
    scalars: dict[str, Any] = {
        name: attributes[name] for name in ("alpha", "limit", "experts_min") if name in attributes
    }
    return desc, supports(desc), scalars


def _reference(reason: str, args: tuple[Any, ...], attributes: dict[str, Any]) -> Tensor:
    """The fp32 torch reference, which says why once."""
    _say_once(reason)
    return reference(*args, **attributes)


def _prepare(
    kernels: Any, prepared: dict[Any, Any], key: Any, args: tuple[Any, ...], attributes: dict[str, Any]
) -> Tensor:
    """A call that is not among the `prepared` ones of a device: judged, and put there if it can be run again."""
    desc, reason, scalars = _judge(args, attributes)
    if reason is not None:
        return _reference(reason, args, attributes)
    call = kernels.Prepared(desc, *args, **scalars)
    if call.reusable:
        if len(prepared) >= _MOST_PREPARED:
            prepared.clear()
        prepared[key] = call
    result: Tensor = call(*args[:3])
    return result


def moe_cpu(
    x: Tensor,
    ids: Tensor,
    router: Tensor,
    w13: Tensor,
    s13: Tensor,
    w2: Tensor,
    s2: Tensor,
    *more: Any,
    **attributes: Any,
) -> Tensor:
    """`mxk::moe` on CPU. Written out, with short names: a small call costs as much as this key."""
    key = (
        *(x.shape, x.stride(), x.dtype, ids.shape, ids.stride(), ids.dtype),
        *(router.shape, router.stride(), router.dtype),
        *(w13.data_ptr(), w13.shape, w13.stride(), w13.dtype),
        *(s13.data_ptr(), s13.shape, s13.stride(), s13.dtype),
        *(w2.data_ptr(), w2.shape, w2.stride(), w2.dtype),
        *(s2.data_ptr(), s2.shape, s2.stride(), s2.dtype),
        *[None if w is None else (w.data_ptr(), w.shape, w.stride(), w.dtype) for w in more],
        *attributes.items(),
    )
    prepared = _prepared.get(key)
    if prepared is None:
        return _prepare(cpu, _prepared, key, (x, ids, router, w13, s13, w2, s2, *more), attributes)
    return prepared(x, ids, router)


_shape, _dtype = operator.attrgetter("shape"), operator.attrgetter("dtype")


def moe_lists_cpu(x: Tensor, ids: Tensor, router: Tensor, *weights: Any, **attributes: Any) -> Tensor:
    """`mxk::moe.lists` on CPU."""
    key = (
        *(x.shape, x.stride(), x.dtype, ids.shape, ids.stride(), ids.dtype),
        *(router.shape, router.stride(), router.dtype),
        # Sets: lists that run have one layout each, the others are refused or copied and never come here again.
        *[
            (*map(Tensor.data_ptr, w), *(frozenset(map(part, w)) for part in (_shape, Tensor.stride, _dtype)))
            for w in weights
        ],
        *attributes.items(),
    )
    prepared = _prepared.get(key)
    if prepared is None:
        return _prepare(cpu, _prepared, key, (x, ids, router, *weights), attributes)
    return prepared(x, ids, router)


_prepared_cuda: dict[Any, cuda.Prepared] = {}
"""CUDA calls seen so far, likewise."""


def moe_cuda(
    x: Tensor,
    ids: Tensor,
    router: Tensor,
    w13: Tensor,
    s13: Tensor,
    w2: Tensor,
    s2: Tensor,
    *more: Any,
    **attributes: Any,
) -> Tensor:
    """`mxk::moe` on CUDA."""
    key = (
        *(x.get_device(), ids.get_device(), router.get_device(), x.data_ptr() % ALIGNMENT),
        *(x.shape, x.stride(), x.dtype, ids.shape, ids.stride(), ids.dtype),
        *(router.shape, router.stride(), router.dtype),
        *(w13.data_ptr(), w13.shape, w13.stride(), w13.dtype),
        *(s13.data_ptr(), s13.shape, s13.stride(), s13.dtype),
        *(w2.data_ptr(), w2.shape, w2.stride(), w2.dtype),
        *(s2.data_ptr(), s2.shape, s2.stride(), s2.dtype),
        *[None if w is None else (w.data_ptr(), w.shape, w.stride(), w.dtype) for w in more],
        *attributes.items(),
    )
    prepared = _prepared_cuda.get(key)
    if prepared is None or not prepared.current(s13, s2):
        return _prepare(cuda, _prepared_cuda, key, (x, ids, router, w13, s13, w2, s2, *more), attributes)
    return prepared(x, ids, router)


def moe_lists_cuda(x: Tensor, ids: Tensor, router: Tensor, *weights: Any, **attributes: Any) -> Tensor:
    """`mxk::moe.lists` on CUDA."""
    key = (
        *(x.get_device(), ids.get_device(), router.get_device(), x.data_ptr() % ALIGNMENT),
        *(x.shape, x.stride(), x.dtype, ids.shape, ids.stride(), ids.dtype),
        *(router.shape, router.stride(), router.dtype),
        *[
            (*map(Tensor.data_ptr, w), *(frozenset(map(part, w)) for part in (_shape, Tensor.stride, _dtype)))
            for w in weights
        ],
        *attributes.items(),
    )
    prepared = _prepared_cuda.get(key)
    if prepared is None or not prepared.current(weights[1], weights[3]):
        return _prepare(cuda, _prepared_cuda, key, (x, ids, router, *weights), attributes)
    return prepared(x, ids, router)


def moe_hpu(*args: Any, **attributes: Any) -> Tensor:
    """`mxk::moe` and `mxk::moe.lists` on a Gaudi, called eagerly; the passes lower those of compiled graphs."""
    desc, reason, scalars = _judge(args, attributes)
    return tpc.moe(desc, *args, **scalars) if reason is None else _reference(reason, args, attributes)


enter_directly("moe", moe_cpu, "CPU")
enter_directly("moe", moe_cuda, "CUDA")
enter_directly("moe.lists", moe_lists_cpu, "CPU")
enter_directly("moe.lists", moe_lists_cuda, "CUDA")
library.impl("moe", moe_hpu, "HPU")
library.impl("moe.lists", moe_hpu, "HPU")
library.impl("mxfp4_dequant", cuda.mxfp4_dequant, "CUDA")
