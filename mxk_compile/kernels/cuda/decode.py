"""Launches of moe_decode.cu: a layer for few tokens in one cooperative launch."""

from __future__ import annotations

import functools
import itertools
import struct
import threading

import torch
from torch import Tensor

from mxk_compile.kernels.cuda.build import build
from mxk_compile.kernels.cuda.driver import Kernel, Library, multiprocessors, persistent
from mxk_compile.kernels.cuda.operands import ALIGNMENT, FLOATS, OPERAND, Operands, activation
from mxk_compile.kernels.desc import MoEDesc

_DECODE = struct.Struct(f"=3Q{OPERAND * 6}4Q6q10i2f")  # struct Decode of moe_decode.cu
_COUNTER_BYTES = 256
_MOST_COUNTERS = 16384  # of a device: one a stream, and one a launch in a CUDA graph
MOST_EXPERTS = 1024


@functools.cache
def _kernel(macros: tuple[tuple[str, int], ...]) -> Kernel:
    library = Library(build("moe_decode.cu", dict(macros)))
    threads, shared = library.constant("decode_threads"), library.constant("decode_shared")
    return Kernel(library.kernel("moe_decode"), _DECODE, threads, shared, cooperative=True)


class _Counters:
    """Zeroed counters of the grid-wide barriers: launches that may overlap must not share them.

    Launches outside of graphs share those of their stream. A launch in a graph has its own for good, as the graph may
    be replayed on any stream.
    """

    def __init__(self, device: int) -> None:
        shape = (_MOST_COUNTERS, _COUNTER_BYTES)
        self._pool = persistent(lambda: torch.zeros(shape, dtype=torch.uint8, device=device), device)
        self._base = self._pool.data_ptr()
        self._next = itertools.count()
        self._of_stream: dict[int, int] = {}

    def of(self, stream: int, capturing: bool) -> int | None:
        """Address of the counters for a launch on this stream; None if there are no more."""
        address = None if capturing else self._of_stream.get(stream)
        if address is None:
            index = next(self._next)
            if index >= _MOST_COUNTERS:
                return None
            address = self._base + index * _COUNTER_BYTES
            if not capturing:
                self._of_stream[stream] = address
        return address


_counters: dict[int, _Counters] = {}
_counters_lock = threading.Lock()


def _counters_for(device: int, stream: int) -> int:
    capturing = torch.cuda.is_current_stream_capturing()
    counters = _counters.get(device)
    if counters is None and not capturing:
        with _counters_lock:
            counters = _counters.get(device)
            if counters is None:
                counters = _counters[device] = _Counters(device)
    address = counters.of(stream, capturing) if counters is not None else None
    if address is None:
        # Zeroed each time, by the graph itself where one is captured.
        return torch.zeros(_COUNTER_BYTES, dtype=torch.uint8, device=device).data_ptr()
    return address


class Decode:
    """A layer's weights with the macros of a schedule, ready to be called.

    Args:
        desc: of the call, which `supports` accepts.
        operands: the weights.
        alpha, limit: of the activation; limit +inf for no clamp.
        experts_min: as in `mxk::moe`.
        scales_small: whether no scale byte of the weights is above 128.
        macros: of the schedule, MXK_ left out.
    """

    def __init__(
        self,
        desc: MoEDesc,
        operands: Operands,
        alpha: float,
        limit: float,
        experts_min: int,
        scales_small: bool,
        macros: tuple[tuple[str, int], ...],
    ) -> None:
        self.desc, self.experts_min = desc, experts_min
        self._macros = {
            **{f"MXK_{name.upper()}": value for name, value in macros},
            "MXK_HIDDEN": desc.hidden_size,
            "MXK_INTER": desc.intermediate_size,
            "MXK_EXPERTS": desc.num_experts,
            "MXK_TOP_K": desc.top_k,
            "MXK_INTERLEAVED": int(desc.row_order == "interleaved"),
            "MXK_SCALES_SMALL": int(scales_small),
            "MXK_PER_ROUTE": int(desc.per_route),
            "MXK_ALIGNED": int(operands.aligned(desc)),
        }
        parts = (operands.w13, operands.s13, operands.b13, operands.w2, operands.s2, operands.b2)
        self._weights = tuple(field for part in parts for field in part.fields)
        self._types = (operands.b13.dtype, operands.b2.dtype, activation(desc))
        self._rows = (operands.gate_row, operands.up_row, operands.up_expert)
        self._constants = (alpha, limit)
        self._kernels: dict[bool, Kernel] = {}

    def kernel(self, x_aligned: bool) -> Kernel:
        """The kernel for rows of x on 16-byte boundaries, or not."""
        kernel = self._kernels.get(x_aligned)
        if kernel is None:
            macros = self._macros | {"MXK_X_ALIGNED": int(x_aligned)}
            kernel = self._kernels[x_aligned] = _kernel(tuple(sorted(macros.items())))
        return kernel

    def __call__(
        self, device: int, stream: int, hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor
    ) -> Tensor:
        """The layer on `stream` of `device`, which is current."""
        desc, x, num_tokens = self.desc, hidden_states, hidden_states.shape[0]
        routes = num_tokens * desc.top_k
        shape = (num_tokens, desc.top_k) if desc.per_route else (num_tokens,)
        out = x.new_empty((*shape, desc.hidden_size))
        h_bytes = -(-2 * routes * desc.intermediate_size // 256) * 256
        workspace = torch.empty(h_bytes + 4 * routes * desc.hidden_size, dtype=torch.uint8, device=x.device)
        base = workspace.data_ptr()
        x_stride = x.stride(0)
        aligned = x.data_ptr() % ALIGNMENT == 0 and x_stride * 2 % ALIGNMENT == 0
        self.kernel(aligned).launch(
            *(device, stream, multiprocessors(device)),
            *(x.data_ptr(), topk_ids.data_ptr(), topk_weights.data_ptr(), *self._weights),
            *(out.data_ptr(), base, base + h_bytes, _counters_for(device, stream)),
            *(x_stride, *topk_ids.stride(), *topk_weights.stride(), self.experts_min, num_tokens),
            *(topk_ids.element_size(), topk_ids.dtype.is_signed, FLOATS[topk_weights.dtype], *self._types),
            *(*self._rows, *self._constants),
        )
        return out
