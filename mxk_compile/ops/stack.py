"""`mxk::stack`: the stacked tensor behind a list of its experts, proven in every call.

A TPC node takes at most 16 tensors, while a stock call lists one tensor an expert. Servers keep the experts in one
stacked parameter and hand out its slices, but a compiled graph sees only the slices, as inputs, and one graph serves
all layers of a kind. So stacks are registered when the weights are loaded, and this op looks up, in each call, the one
whose slices it was given:

    mxk::stack(Tensor(a)[] experts) -> Tensor(a)      E x [...]  ->  [E, ...]

Addresses prove it: all of [E, ...] lies where the list lies, in the list's order, and is still alive. The result then
shares the list's memory. A list that is no registered stack is copied into one, which is right, slow, and said once.
Passes insert the op after functionalization, where nothing writes to weights any more.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from mxk_compile.ops import library

_logger = logging.getLogger("mxk_compile")

_stacks: dict[int, weakref.ref[Tensor]] = {}
"""Registered stacks by address."""


def register_stack(stack: Tensor) -> None:
    """Remembers a contiguous tensor [E, ...] whose slices along dim 0 may come as a list; held weakly."""
    _stacks[stack.data_ptr()] = weakref.ref(stack)


def register_stacks(module: torch.nn.Module) -> int:
    """Registers the parameters and buffers of a loaded model that may be stacked experts; returns how many.

    Those are all dense ones of 3 dimensions, and of 2 where the name ends in "bias". Call it again whenever weights
    were replaced or moved.
    """
    count = 0
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        is_stack = tensor.dim() == 3 or (tensor.dim() == 2 and name.endswith("bias"))
        if is_stack and tensor.is_contiguous() and tensor.numel():
            register_stack(tensor)
            count += 1
    return count


def is_known(shape: Sequence[int], dtype: torch.dtype, device: str) -> bool:
    """Whether a live stack of this shape, dtype and device type is registered: worth asking in each call."""
    for address, held in list(_stacks.items()):
        stack = held()
        if stack is None:
            if _stacks.get(address) is held:  # another thread may have been here, or registered anew
                _stacks.pop(address, None)
        elif tuple(stack.shape) == tuple(shape) and stack.dtype == dtype and stack.device.type == device:
            return True
    return False


def find_stack(experts: Sequence[Tensor]) -> Tensor | None:
    """The registered stack whose slices `experts` are, all of them in order, or None."""
    first = experts[0]
    held = _stacks.get(first.data_ptr())
    stack = held() if held is not None else None
    if stack is None or stack.shape != (len(experts), *first.shape) or stack.dtype != first.dtype:
        return None
    # Devices number their addresses each for itself.
    if any(expert.device != stack.device for expert in experts):
        return None
    start, step = stack.data_ptr(), stack.stride(0) * stack.element_size()
    if list(map(Tensor.data_ptr, experts)) != list(range(start, start + step * len(experts), step)):
        return None
    # Slices of another layout could start at the same addresses.
    strides = first.stride()
    if strides != stack.stride()[1:] or any(expert.stride() != strides for expert in experts):
        return None
    return stack


@functools.cache
def _say_once(shape: tuple[int, ...], count: int) -> None:
    _logger.warning(
        "mxk::stack: %d experts of shape %s are no slices of one registered tensor and are copied in every call; "
        "keep them stacked, and call register_stacks(model) after loading",
        count,
        list(shape),
    )


def stack_of(experts: Sequence[Tensor]) -> Tensor:
    """`find_stack`, or a copy of the list, said once. `experts` is not empty."""
    stack = find_stack(experts)
    if stack is not None:
        return stack.detach()
    _say_once(tuple(experts[0].shape), len(experts))
    return torch.stack(list(experts))


# Inference only: torch's fallback for ops without a gradient would object to a result that shares an input's memory.
library.impl("stack", torch.library.fallthrough_kernel, "Autograd")
for _key in ("CPU", "CUDA", "HPU"):
    library.impl("stack", stack_of, _key)
