"""Kernels by device, and what runs `mxk::moe`: for the dispatcher, and for compiled graphs."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._C._autograd import _profiler_enabled
from torch._C._profiler import _RecordFunctionFast

from mxk_compile.kernels import cpu, cuda, project, tpc
from mxk_compile.kernels.cuda.operands import ALIGNMENT
from mxk_compile.kernels.desc import KernelConfig, MoEDesc
from mxk_compile.kernels.fallback import say_reference_once
from mxk_compile.kernels.select import select, supports
from mxk_compile.ops import library
from mxk_compile.ops.moe import autograd_rules, reference

__all__ = ["KernelConfig", "MoEDesc", "project", "select", "supports"]


prepared: dict[str, dict[Any, Any]] = {"CPU": {}, "CUDA": {}}
"""Calls seen so far, by device and all that they hold on to: shapes, strides, dtypes, and addresses of the weights.

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
    say_reference_once("mxk::moe", reason)
    return reference(*args, **attributes)


def _prepare(
    kernels: Any, known: dict[Any, Any], key: Any, args: tuple[Any, ...], attributes: dict[str, Any]
) -> Tensor:
    """A call that is not `known`: judged, and put there if it can be run again."""
    desc, reason, scalars = _judge(args, attributes)
    if reason is not None:
        return _reference(reason, args, attributes)
    call = kernels.Prepared(desc, *args, **scalars)
    if call.reusable:
        if len(known) >= _MOST_PREPARED:
            known.clear()
        known[key] = call
    result: Tensor = call(*args[:3])
    return result


_shape, _dtype = operator.attrgetter("shape"), operator.attrgetter("dtype")


def _members(weights: tuple[list[Tensor], ...]) -> Iterator[tuple[Any, ...]]:
    """What tells lists of weights apart: addresses and layouts."""
    for w in weights:
        # Sets: lists that run have one layout each, the others are refused or copied and never come here again.
        yield *map(Tensor.data_ptr, w), *(frozenset(map(part, w)) for part in (_shape, Tensor.stride, _dtype))


def _enter(op: str, device: str, kernels: Any) -> Callable[..., Tensor]:
    """Registers what runs `mxk::<op>` on a device; returns it for compiled graphs, which need no dispatcher.

    Calls that need no gradient enter from the autograd key, if the device is next (no mode, subclass or transform in
    between): that saves the dispatcher's second round.
    """
    known, on_cuda, stacked = prepared[device], device == "CUDA", op == "moe"
    find, rule = known.get, autograd_rules[op]
    own = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, device))
    below, plain = torch._C._after_autograd_keyset.raw_repr(), own.raw_repr()

    def run(
        keyset: torch._C.DispatchKeySet | None,
        x: Tensor,
        ids: Tensor,
        router: Tensor,
        w13: Any,
        s13: Any,
        w2: Any,
        s2: Any,
        *more: Any,
        **attributes: Any,
    ) -> Any:
        if keyset is None:
            if _profiler_enabled():  # which sees calls of the dispatcher by itself
                with _RecordFunctionFast("mxk::moe"):
                    return run(own, x, ids, router, w13, s13, w2, s2, *more, **attributes)
        elif keyset is not own and (
            keyset.raw_repr() & below != plain
            or (
                torch.is_grad_enabled()
                and torch._C._any_requires_grad(x, ids, router, w13, s13, w2, s2, *more)
            )
        ):
            return rule(keyset, x, ids, router, w13, s13, w2, s2, *more, **attributes)
        # Written out, without a function or tuples inside, and with short names: the key is half of what a call costs.
        if stacked:
            key = (
                x.shape, x.stride(), x.dtype, ids.shape, ids.stride(), ids.dtype,
                router.shape, router.stride(), router.dtype,
                w13.data_ptr(), w13.shape, w13.stride(), w13.dtype, s13.data_ptr(), s13.shape, s13.stride(), s13.dtype,
                w2.data_ptr(), w2.shape, w2.stride(), w2.dtype, s2.data_ptr(), s2.shape, s2.stride(), s2.dtype,
                *[w if w is None else (w.data_ptr(), w.shape, w.stride(), w.dtype) for w in more],
                *attributes, *attributes.values(),
            )  # fmt: skip
        else:
            key = (
                x.shape, x.stride(), x.dtype, ids.shape, ids.stride(), ids.dtype,
                router.shape, router.stride(), router.dtype,
                *_members((w13, s13, w2, s2, *more)), *attributes, *attributes.values(),
            )  # fmt: skip
        if on_cuda:
            key += x.get_device(), ids.get_device(), router.get_device(), x.data_ptr() % ALIGNMENT
        call = find(key)
        # The bytes of scales may have changed in place.
        if call is None or (on_cuda and not call.current(s13, s2)):
            return _prepare(kernels, known, key, (x, ids, router, w13, s13, w2, s2, *more), attributes)
        return call(x, ids, router)

    def learn(key: Any, *args: Any, **attributes: Any) -> Tensor:
        return _prepare(kernels, known, key, args, attributes)

    def entry(general: Callable[..., Tensor], keysets: Any = None) -> Callable[..., Tensor]:
        return general if on_cuda else cpu.entry(known, learn, general, keysets, lists=not stacked)

    library.impl(op, entry(functools.partial(run, own)), device)
    with_gradients = entry(run, (below, plain, torch._C._any_requires_grad))
    library.impl(op, with_gradients, f"Autograd{device}", with_keyset=True)
    return entry(functools.partial(run, None))


moe_cpu = _enter("moe", "CPU", cpu)
moe_cuda = _enter("moe", "CUDA", cuda)
moe_lists_cpu = _enter("moe.lists", "CPU", cpu)
moe_lists_cuda = _enter("moe.lists", "CUDA", cuda)


def moe_hpu(*args: Any, **attributes: Any) -> Tensor:
    """`mxk::moe` and `mxk::moe.lists` on a Gaudi, called eagerly; the passes lower those of compiled graphs."""
    desc, reason, scalars = _judge(args, attributes)
    return tpc.moe(desc, *args, **scalars) if reason is None else _reference(reason, args, attributes)


library.impl("moe", moe_hpu, "HPU")
library.impl("moe.lists", moe_hpu, "HPU")
library.impl("mxfp4_dequant", cuda.mxfp4_dequant, "CUDA")
