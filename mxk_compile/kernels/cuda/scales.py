"""Whether all E8M0 scale bytes of a layer are at most 128, which spares a multiply a weight: asked once a tensor."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from mxk_compile.ops.moe import Weights

SMALL = 128
"""2^(byte - 1), the factor of an E2M1 pattern at the low end of bf16, is finite up to this byte."""

_seen: dict[int, tuple[weakref.ref[Tensor], int, bool]] = {}
_MOST_SEEN = 65536


def _version(tensor: Tensor) -> int:
    # A tensor of inference mode has no version, and is not changed outside of it.
    return -1 if tensor.is_inference() else tensor._version


def _known(tensor: Tensor) -> bool | None:
    entry = _seen.get(id(tensor))
    if entry is None or entry[0]() is not tensor or entry[1] != _version(tensor):
        return None
    return entry[2]


def small(scales: tuple[Weights, ...]) -> bool | None:
    """True if no byte is above `SMALL`; None if that is not known and cannot be read now.

    Reads one number from the device when it sees a tensor, or a version of it, for the first time; never while a stream
    is being captured.
    """
    tensors: list[Any] = []
    for value in scales:
        tensors += [value] if isinstance(value, Tensor) else value
    known = [_known(tensor) for tensor in tensors]
    unknown = [tensor for tensor, answer in zip(tensors, known, strict=True) if answer is None]
    if unknown:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return None
        # NaN, 255, is above as well.
        largest = torch.stack(
            [tensor.max() if tensor.numel() else tensor.new_zeros(()) for tensor in unknown]
        )
        answers = (largest <= SMALL).tolist()
        if len(_seen) + len(unknown) > _MOST_SEEN:
            _seen.clear()
        for tensor, answer in zip(unknown, answers, strict=True):
            _seen[id(tensor)] = (weakref.ref(tensor), _version(tensor), answer)
        known += answers
    return all(answer for answer in known if answer is not None)
