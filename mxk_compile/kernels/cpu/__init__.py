"""CPU kernels of `mxk::moe`: packed weights read where they lie, by the library that setup.py builds beside this file.

What is computed, and how, stands in tile.h (numbers) and moe.cpp (schedule); this file only describes tensors to it.
Importing it loads nothing: the library is opened at the first question.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import math
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mxk_compile.errors import KernelError
from mxk_compile.settings import settings
from mxk_compile.variants import ACTIVATIONS, ROW_ORDERS, WEIGHT_FORMATS

if TYPE_CHECKING:
    from mxk_compile.kernels.desc import MoEDesc

LIBRARY = Path(__file__).with_name("libmxk_cpu.so")
GROUP = 32  # kGroup of tile.h: the library's unit of scales

_logger = logging.getLogger("mxk_compile.kernels")

# Enumerations and layout of abi.h.
_INTEGERS = (
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
)
_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_DTYPES = {dtype: index for index, dtype in enumerate((*_INTEGERS, *_FLOATS))}
_FORMATS = {name: index for index, name in enumerate(WEIGHT_FORMATS)}
_ROW_ORDERS = {name: index for index, name in enumerate(ROW_ORDERS)}
_ACTIVATIONS = {name: index for index, name in enumerate(ACTIVATIONS)}
_PROJECTION_FIELDS = 15
_CALL = struct.Struct(f"={2 * _PROJECTION_FIELDS + 24}q2d")

Weights = Tensor | Sequence[Tensor]


@functools.cache
def _open() -> ctypes.CDLL | str:
    """The library with the instruction set of the settings selected, or why there is none."""
    if not LIBRARY.exists():
        return f"{LIBRARY.name} was not built; reinstall where a C++ compiler is on PATH"
    try:
        library = ctypes.CDLL(str(LIBRARY))
    except OSError as error:
        return f"{LIBRARY.name} cannot be loaded: {error}"
    library.mxk_cpu_abi.restype = ctypes.c_int64
    if library.mxk_cpu_abi() != _CALL.size:
        return f"{LIBRARY.name} was built from other sources; reinstall the package"
    library.mxk_cpu_moe.argtypes = [ctypes.c_char_p]
    library.mxk_cpu_isa.restype = library.mxk_cpu_threads.restype = ctypes.c_char_p
    library.mxk_cpu_scratch_bytes.restype = ctypes.c_int64
    if library.mxk_cpu_select(settings.cpu_isa.encode()):
        return f"MXK_CPU_ISA={settings.cpu_isa}: this machine or build lacks it"
    return library


def _library() -> ctypes.CDLL:
    library = _open()
    if isinstance(library, str):
        raise KernelError(
            "CPU kernels", library, "a built library", "run without them: the torch reference is used"
        )
    return library


def available() -> str | None:
    """None if the kernels can run here, else the reason in one line."""
    library = _open()
    return library if isinstance(library, str) else None


def isa() -> str:
    """Instruction set that runs: "avx512" or "portable". Raises KernelError if the library is missing."""
    return str(_library().mxk_cpu_isa().decode())


def threads() -> str:
    """File of the OpenMP runtime whose threads are used: torch's own; "none" if it has none."""
    return str(_library().mxk_cpu_threads().decode())


def scratch_bytes() -> int:
    """Largest scratch memory, in bytes, that calls of the current thread have taken so far; it is kept for the next."""
    return int(_library().mxk_cpu_scratch_bytes())


@functools.cache
def library_hash() -> str:
    """SHA-256 of the library file and the instruction set, for cache keys; "none" where there is no library."""
    if available() is not None:
        return "none"
    return hashlib.sha256(LIBRARY.read_bytes() + isa().encode()).hexdigest()


def supports(desc: MoEDesc) -> str | None:
    """None if `moe` runs calls of this description, else the reason in one line."""
    reason = available()
    if reason is not None:
        return f"CPU kernels: {reason}"
    if desc.dtype != torch.bfloat16:
        return f"CPU kernels: hidden_states are {desc.dtype}; allowed: torch.bfloat16"
    for name, size, group in (
        ("K", desc.hidden_size, desc.group_sizes[0]),
        ("I", desc.intermediate_size, desc.group_sizes[1]),
    ):
        if size % 2 or size == 0:
            return f"CPU kernels: {name} = {size}; allowed: even sizes"
        if group % GROUP and group < size:
            return f"CPU kernels: {group} values a scale along {name}; allowed: multiples of {GROUP}, or a scale a row"
    return None


@functools.cache
def _warn_copy(name: str) -> None:
    _logger.warning(
        "mxk::moe: %s is not dense in its last dimension and is copied in every call; store it dense", name
    )


def _dense(tensor: Tensor, name: str) -> Tensor:
    """The tensor with its last dimension dense, which all but odd views have."""
    if tensor.stride(-1) == 1 or tensor.size(-1) <= 1:
        return tensor
    _warn_copy(name)
    return tensor.contiguous()


def _tensor(value: Weights | None, name: str, keep: list[object]) -> tuple[int, int, int, int]:
    """Address (of the stack or of an array of pointers), strides in bytes of expert and line, and dtype."""
    if value is None or len(value) == 0:
        return 0, 0, 0, 0
    if isinstance(value, Tensor):
        value = _dense(value, name)
        keep.append(value)
        size, strides = value.element_size(), value.stride()
        return value.data_ptr(), strides[0] * size, strides[1] * size, _DTYPES[value.dtype]
    tensors = [_dense(tensor, name) for tensor in value]
    strides = tensors[0].stride()
    if any(tensor.stride() != strides for tensor in tensors):
        tensors = [tensor.contiguous() for tensor in tensors]
        strides = tensors[0].stride()
    pointers = struct.pack(f"={len(tensors)}q", *map(Tensor.data_ptr, tensors))
    buffer = ctypes.create_string_buffer(pointers, len(pointers))
    keep.append((tensors, buffer))
    return ctypes.addressof(buffer), 0, strides[0] * tensors[0].element_size(), _DTYPES[tensors[0].dtype]


def _projection(
    name: str,
    weight: Weights,
    scale: Weights,
    zero: Weights | None,
    bias: Weights | None,
    group: int,
    keep: list[object],
) -> tuple[int, ...]:
    """The fields of MxkProjection."""
    weights, weight_expert, weight_line, _ = _tensor(weight, name, keep)
    scales, scale_expert, scale_line, scale_dtype = _tensor(scale, f"{name}_scale", keep)
    zeros, zero_expert, zero_line, zero_dtype = _tensor(zero, f"{name}_zero", keep)
    biases, bias_expert, _, bias_dtype = _tensor(bias, f"{name}_bias", keep)
    return (
        *(weights, scales, zeros, biases, weight_expert, weight_line, scale_expert, scale_line, scale_dtype),
        *(zero_expert, zero_line, zero_dtype, bias_expert, bias_dtype, group),
    )


def moe(
    hidden_states: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    w13: Weights,
    w13_scale: Weights,
    w2: Weights,
    w2_scale: Weights,
    w13_zero: Weights | None = None,
    w2_zero: Weights | None = None,
    w13_bias: Weights | None = None,
    w2_bias: Weights | None = None,
    *,
    weight_format: str,
    row_order: str,
    activation: str,
    alpha: float = 1.0,
    limit: float | None = None,
    pack_dim: str = "input",
    experts_min: int = 0,
    per_route: bool = False,
) -> Tensor:
    """`mxk::moe` or `mxk::moe.lists` on CPU: a new bf16 tensor, [T, K] or with `per_route` [T, k, K].

    Arguments as in ops/moe.py, already checked by `check_moe`, and of a description that `supports` accepts.

    Raises:
        KernelError: the library is missing, or scratch memory could not be had.
    """
    num_tokens, hidden_size = hidden_states.shape
    top_k = topk_ids.shape[1]
    output_packed = pack_dim == "output"
    lists = not isinstance(w2, Tensor)
    first, first_scale = w2[0], w2_scale[0]
    intermediate_size = (
        first.shape[0] if output_packed else first.shape[1] * (2 if first.dtype == torch.uint8 else 8)
    )
    groups = w13_scale[0].shape[0 if output_packed else 1], first_scale.shape[0 if output_packed else 1]
    if weight_format == "mxfp4":
        group_sizes = GROUP, GROUP
    else:
        group_sizes = hidden_size // groups[0], intermediate_size // groups[1]

    hidden_states = _dense(hidden_states, "hidden_states")
    shape = (num_tokens, top_k, hidden_size) if per_route else (num_tokens, hidden_size)
    out = torch.empty(shape, dtype=torch.bfloat16)
    keep: list[object] = []
    ids_size, weights_size = topk_ids.element_size(), topk_weights.element_size()
    ids_strides, weights_strides = topk_ids.stride(), topk_weights.stride()
    call = _CALL.pack(
        *_projection("w13", w13, w13_scale, w13_zero, w13_bias, group_sizes[0], keep),
        *_projection("w2", w2, w2_scale, w2_zero, w2_bias, group_sizes[1], keep),
        *(hidden_states.data_ptr(), topk_ids.data_ptr(), topk_weights.data_ptr(), out.data_ptr()),
        hidden_states.stride(0) * 2,
        *(_DTYPES[topk_ids.dtype], ids_strides[0] * ids_size, ids_strides[1] * ids_size),
        *(_DTYPES[topk_weights.dtype], weights_strides[0] * weights_size, weights_strides[1] * weights_size),
        *(num_tokens, top_k, hidden_size, intermediate_size, len(w2), experts_min),
        *(
            _FORMATS[weight_format],
            output_packed,
            _ROW_ORDERS[row_order],
            _ACTIVATIONS[activation],
            per_route,
            lists,
        ),
        torch.get_num_threads(),
        alpha,
        math.inf if limit is None else limit,
    )
    if _library().mxk_cpu_moe(call):
        raise KernelError(
            "CPU kernels", "scratch memory could not be had", "a call that fits memory", "use fewer tokens"
        )
    return out
