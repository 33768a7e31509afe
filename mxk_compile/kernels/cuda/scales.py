"""Whether all E8M0 scale bytes of a layer are at most 128, which spares a multiply a weight: asked once a tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from mxk_compile.ops.moe import Weights

SMALL = 128
"""2^(byte - 1), the factor of an E2M1 pattern at the low end of bf16, is finite up to this byte."""

_INFERENCE = -1  # version of tensors that have none, and that nothing changes outside of inference mode
_seen: dict[Any, tuple[StorageWeakRef, int, bool]] = {}
_MOST_SEEN = 65536
_expired = torch.UntypedStorage._expired


def version(tensor: Tensor) -> int:
    """Changes when a tensor is written to in place."""
    return _INFERENCE if tensor.is_inference() else tensor._version


def _known(tensor: Tensor) -> bool | None:
    entry = _seen.get((tensor.data_ptr(), tensor.shape, tensor.stride()))
    if entry is None or entry[0].expired() or entry[1] != version(tensor):
        return None
    return entry[2]


def small(tensors: list[Tensor]) -> bool | None:
    """True if no byte is above `SMALL`; None if that is not known and cannot be read now.

    Reads one number from the device when it sees a tensor, or a version of it, for the first time; never while a stream
    is being captured.
    """
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
            key = tensor.data_ptr(), tensor.shape, tensor.stride()
            _seen[key] = (StorageWeakRef(tensor.untyped_storage()), version(tensor), answer)
        known += answers
    return all(answer for answer in known if answer is not None)


class Watch:
    """Scale tensors of a call, and whether they are still what they were; it keeps none of them alive.

    Attributes:
        small: as `small` answered.
    """

    __slots__ = ("_addresses", "_stacked", "_storages", "_versions", "small")

    def __init__(self, scales: tuple[Weights, ...]) -> None:
        tensors = _flat(scales)
        self.small = small(tensors)
        self._versions = [version(tensor) for tensor in tensors]
        self._storages = [StorageWeakRef(tensor.untyped_storage()) for tensor in tensors]
        self._addresses = [storage.cdata for storage in self._storages]
        self._stacked = len(tensors) == len(scales)

    def current(self, *scales: Weights) -> bool:
        """Whether these tensors, at the addresses of those watched, have the same contents."""
        if self.small is None:
            return torch.cuda.is_current_stream_capturing()
        tensors: Any = scales if self._stacked else _flat(scales)
        for tensor, version, address in zip(tensors, self._versions, self._addresses, strict=True):
            if (version != _INFERENCE and tensor._version != version) or _expired(address):
                return False
        return True


def _flat(values: tuple[Weights, ...]) -> list[Tensor]:
    tensors: list[Tensor] = []
    for value in values:
        tensors += [value] if isinstance(value, Tensor) else value
    return tensors
