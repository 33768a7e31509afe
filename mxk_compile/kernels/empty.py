"""New tensors, in half the time of torch.empty."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor


def maker(device: str, shape: tuple[int, ...], dtype: torch.dtype) -> Callable[[], Tensor]:
    """Makes dense tensors with any content on "cpu", or for "cuda" on the current device, as Inductor's code does."""
    strides = torch.empty(shape, device="meta").stride()
    empty = vars(torch._C._dynamo.guards)[f"_empty_strided_{device}"]
    return functools.partial(empty, tuple(shape), strides, dtype)
