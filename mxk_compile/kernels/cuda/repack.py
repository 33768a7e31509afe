"""INT4 weights that are packed along the outputs, as Gaudi's stock op takes them, packed along the inputs instead.

The kernels' tiles are rows of inputs. Each tensor is turned once and kept, beside the one it was made of, until that
one's memory is freed or written to: a second copy, which is said in the log. Nothing is kept that is made while a CUDA
graph is being captured, whose memory belongs to the graph.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from mxk_compile.kernels.cuda.scales import version
from mxk_compile.ops.formats import int4
from mxk_compile.ops.formats.nibbles import unpack_nibbles
from mxk_compile.ops.moe import Weights

_logger = logging.getLogger("mxk_compile.kernels")
_kept: dict[Any, tuple[StorageWeakRef, int, Tensor]] = {}


def along_inputs(weights: tuple[Weights | None, ...]) -> tuple[Any, ...]:
    """The eight weight arguments of `mxk::moe` with `pack_dim` "output", as they are with "input"."""
    turns: tuple[Callable[[Tensor], Tensor] | None, ...] = (
        *(_weight, _scale, _weight, _scale),
        *(_zero, _zero, None, None),
    )
    return tuple(
        value if value is None or turn is None else _each(value, turn)
        for value, turn in zip(weights, turns, strict=True)
    )


def _each(value: Weights, turn: Callable[[Tensor], Tensor]) -> Weights:
    return _turned(value, turn) if isinstance(value, Tensor) else [_turned(tensor, turn) for tensor in value]


def _turned(tensor: Tensor, turn: Callable[[Tensor], Tensor]) -> Tensor:
    """What `turn` makes of a tensor, from before if the tensor has not changed since."""
    key = (tensor.data_ptr(), tensor.get_device(), tensor.shape, tensor.stride(), tensor.dtype)
    found = _kept.get(key)
    if found is not None and not found[0].expired() and found[1] == version(tensor):
        return found[2]
    result = turn(tensor)
    if not torch.cuda.is_available() or not torch.cuda.is_current_stream_capturing():
        for stale in [k for k, (storage, *_) in _kept.items() if storage.expired()]:
            del _kept[stale]
        _kept[key] = (StorageWeakRef(tensor.untyped_storage()), version(tensor), result)
        _say_once()
    return result


def _weight(words: Tensor) -> Tensor:
    """int32 [..., K, N/8] -> uint8 [..., N, K/2]."""
    return int4.pack(unpack_nibbles(words).transpose(-1, -2))


def _scale(scale: Tensor) -> Tensor:
    """[..., K/g, N] -> [..., N, K/g]."""
    return scale.transpose(-1, -2).contiguous()


def _zero(zero: Tensor) -> Tensor:
    """uint8 [..., K/g, N] or int32 [..., K/g, N/8] -> uint8 [..., N, K/g]."""
    return _scale(unpack_nibbles(zero) if zero.dtype == torch.int32 else zero)


@functools.cache
def _say_once() -> None:
    _logger.warning(
        "mxk::moe: INT4 weights packed along the outputs are kept a second time, packed along the inputs; store them so"
    )
