"""CPU kernels of `mxk::moe`: packed weights read where they lie, by the library that setup.py builds beside this file.

What is computed, and how, stands in tile.h (numbers) and moe.cpp (schedule); this file only describes tensors to it.
Importing it loads the library, which then watches for forks; it is asked nothing before the first question.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import logging
import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._C._autograd import _profiler_enabled
from torch._C._profiler import _RecordFunctionFast

from mxk_compile.errors import KernelError
from mxk_compile.kernels.desc import KernelConfig, MoEDesc
from mxk_compile.kernels.empty import maker
from mxk_compile.ops.moe import Weights
from mxk_compile.settings import settings
from mxk_compile.variants import ACTIVATIONS, ROW_ORDERS, WEIGHT_FORMATS

LIBRARY = Path(__file__).with_name("libmxk_cpu.so")

_logger = logging.getLogger("mxk_compile.kernels")

# Enumerations, layout and revision of abi.h.
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
_REVISION = 1
_PROJECTION = struct.Struct("=15q")
_VARYING = struct.Struct("=5q")
_FIXED = struct.Struct("=19q2d")


with contextlib.suppress(OSError):  # `available` says what is wrong
    ctypes.CDLL(str(LIBRARY))


def _load(kind: type[ctypes.CDLL]) -> ctypes.CDLL | str:
    """The library, or why there is none."""
    if not LIBRARY.exists():
        # The folder: Python started in a checkout imports its sources, and not what was installed elsewhere.
        folder = LIBRARY.parents[2]
        return f"{LIBRARY.name} was not built in {folder}; reinstall that where a C++ compiler is on PATH"
    try:
        library = kind(str(LIBRARY))
    except OSError as error:
        return f"{LIBRARY.name} cannot be loaded: {error}"
    library.mxk_cpu_abi.restype = ctypes.c_int64
    if library.mxk_cpu_abi() != (_VARYING.size + 2 * _PROJECTION.size + _FIXED.size) << 8 | _REVISION:
        return f"{LIBRARY.name} was built from other sources; reinstall the package"
    return library


@functools.cache
def _open() -> ctypes.CDLL | str:
    """The library with the instruction set of the settings selected, or why there is none."""
    library = _load(ctypes.CDLL)
    if isinstance(library, str):
        return library
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
    """Instruction set that runs, one of settings.CPU_ISAS. Raises KernelError if the library is missing."""
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


def config(desc: MoEDesc) -> KernelConfig:
    """What runs a description that `supports` accepts."""
    return KernelConfig("cpu", "cpp", isa())


def supports(desc: MoEDesc) -> str | None:
    """None if `Prepared` runs calls of this description, else the reason in one line."""
    reason = available()
    if reason is not None:
        return f"CPU kernels: {reason}"
    if desc.dtype != torch.bfloat16:
        return f"CPU kernels: hidden_states are {desc.dtype}; allowed: torch.bfloat16"
    if desc.hidden_size == 0 or desc.intermediate_size == 0:
        return f"CPU kernels: K = {desc.hidden_size}, I = {desc.intermediate_size}; allowed: sizes above 0"
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


class _Keep:
    """What must live as long as the addresses in a call: arrays of pointers; copies, whose contents grow old."""

    def __init__(self) -> None:
        self.arrays: list[object] = []
        self.copies: list[Tensor] = []


def _tensor(value: Weights | None, name: str, keep: _Keep) -> tuple[int, int, int, int]:
    """Address (of the stack, or of an array of pointers), strides in bytes of expert and line, and dtype."""
    if isinstance(value, Tensor):
        dense = _dense(value, name)
        if dense is not value:
            keep.copies.append(dense)
        size, strides = dense.element_size(), dense.stride()
        return dense.data_ptr(), strides[0] * size, strides[1] * size, _DTYPES[dense.dtype]
    if not value:
        return 0, 0, 0, 0
    tensors = [_dense(tensor, name) for tensor in value]
    if any(tensor.stride() != tensors[0].stride() for tensor in tensors):
        _warn_copy(name)
        tensors = [tensor.contiguous() for tensor in tensors]
    keep.copies += [dense for dense, tensor in zip(tensors, value, strict=True) if dense is not tensor]
    first = tensors[0]
    pointers = struct.pack(f"={len(tensors)}q", *map(Tensor.data_ptr, tensors))
    buffer = ctypes.create_string_buffer(pointers, len(pointers))
    keep.arrays.append(buffer)
    return ctypes.addressof(buffer), 0, first.stride(0) * first.element_size(), _DTYPES[first.dtype]


def _projection(
    name: str,
    weight: Weights,
    scale: Weights,
    zero: Weights | None,
    bias: Weights | None,
    group: int,
    keep: _Keep,
) -> bytes:
    """MxkProjection."""
    weights, weight_expert, weight_line, _ = _tensor(weight, name, keep)
    scales, scale_expert, scale_line, scale_dtype = _tensor(scale, f"{name}_scale", keep)
    zeros, zero_expert, zero_line, zero_dtype = _tensor(zero, f"{name}_zero", keep)
    biases, bias_expert, _, bias_dtype = _tensor(bias, f"{name}_bias", keep)
    return _PROJECTION.pack(
        *(weights, scales, zeros, biases, weight_expert, weight_line, scale_expert, scale_line, scale_dtype),
        *(zero_expert, zero_line, zero_dtype, bias_expert, bias_dtype, group),
    )


def entry(
    known: dict[Any, Any],
    learn: Callable[..., Tensor],
    general: Callable[..., Tensor],
    keysets: tuple[int, int, Callable[..., bool]] | None = None,
    *,
    lists: bool,
) -> Callable[..., Tensor]:
    """What runs calls that are `known` in a third of the time of `general`, and all else through it (call.cpp).

    `general` itself without the library or with a torch that cannot tell C where a tensor is.
    """
    exchange = getattr(Tensor, "__dlpack_c_exchange_api__", None)  # torch 2.10 and later
    library = _load(ctypes.PyDLL)
    if exchange is None or isinstance(library, str):
        return general
    library.mxk_cpu_entry.restype = ctypes.py_object
    library.mxk_cpu_entry.argtypes = [ctypes.py_object, ctypes.c_int, ctypes.py_object]
    given = (
        *(known, learn, general, keysets, torch._C.DispatchKeySet.raw_repr, torch.is_grad_enabled),
        *(_profiler_enabled, torch.get_num_threads, ("_fixed", "_new_out", "_address"), None),
    )
    function: Callable[..., Tensor] | None = library.mxk_cpu_entry(exchange, lists, given)
    return function or general


class Prepared:
    """A described call of `mxk::moe` or `mxk::moe.lists`, run while layouts, dtypes and weight addresses stay the same.

    Attributes:
        reusable: False where a copy of an argument was made, which holds for one call only.
    """

    __slots__ = ("_address", "_fixed", "_function", "_keep", "_new_out", "reusable")

    def __init__(
        self,
        desc: MoEDesc,
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
        alpha: float = 1.0,
        limit: float | None = None,
        experts_min: int = 0,
    ) -> None:
        """As the op's (ops/moe.py), of a call that `supports` accepts; raises KernelError if the library is missing."""
        dense = _dense(hidden_states, "hidden_states")
        self._keep = keep = _Keep()
        ids_size, weights_size = topk_ids.element_size(), topk_weights.element_size()
        ids_strides, weights_strides = topk_ids.stride(), topk_weights.stride()
        fixed = _projection("w13", w13, w13_scale, w13_zero, w13_bias, desc.group_sizes[0], keep)
        fixed += _projection("w2", w2, w2_scale, w2_zero, w2_bias, desc.group_sizes[1], keep)
        self._fixed = fixed + _FIXED.pack(
            *(hidden_states.shape[0], dense.stride(0) * 2),
            *(_DTYPES[topk_ids.dtype], ids_strides[0] * ids_size, ids_strides[1] * ids_size),
            *(
                _DTYPES[topk_weights.dtype],
                weights_strides[0] * weights_size,
                weights_strides[1] * weights_size,
            ),
            *(desc.top_k, desc.hidden_size, desc.intermediate_size, desc.num_experts, experts_min),
            *(_FORMATS[desc.weight_format], desc.pack_dim == "output", _ROW_ORDERS[desc.row_order]),
            *(_ACTIVATIONS[desc.activation], desc.per_route, not isinstance(w2, Tensor)),
            alpha,
            math.inf if limit is None else limit,
        )
        self._function = _library().mxk_cpu_moe
        self._address = ctypes.cast(self._function, ctypes.c_void_p).value
        rows = topk_ids.shape if desc.per_route else topk_ids.shape[:1]
        self._new_out = maker("cpu", (*rows, desc.hidden_size), torch.bfloat16)
        self.reusable = dense is hidden_states and not keep.copies

    def __call__(self, hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """A new bf16 tensor, [T, K] or with `per_route` [T, k, K], from routing with the layouts given before.

        Raises KernelError if scratch memory could not be had.
        """
        if not self.reusable:
            hidden_states = _dense(hidden_states, "hidden_states")
        out = self._new_out()
        varying = _VARYING.pack(
            *(hidden_states.data_ptr(), topk_ids.data_ptr(), topk_weights.data_ptr(), out.data_ptr()),
            torch.get_num_threads(),
        )
        if _profiler_enabled():
            with _RecordFunctionFast("mxk kernel"):
                failed = self._function(varying + self._fixed)
        else:
            failed = self._function(varying + self._fixed)
        if failed:
            given, allowed = "scratch memory could not be had", "a call that fits memory"
            raise KernelError("CPU kernels", given, allowed, "use fewer tokens")
        return out
