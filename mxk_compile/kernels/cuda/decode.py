"""Launches of moe_decode.cu: a layer for few tokens in one cooperative launch."""

from __future__ import annotations

import functools
import itertools
import struct
import threading

import torch
from torch import Tensor

from mxk_compile.kernels.cuda import maps
from mxk_compile.kernels.cuda.build import build
from mxk_compile.kernels.cuda.devices import Device, served
from mxk_compile.kernels.cuda.driver import Kernel, Library, multiprocessors, persistent
from mxk_compile.kernels.cuda.int4_splits import Split, stages_of
from mxk_compile.kernels.cuda.operands import OPERAND, Call, activation
from mxk_compile.kernels.cuda.schedule import Problem, decode_runs
from mxk_compile.kernels.empty import maker

# struct Decode of decode.cuh. From call to call only addresses change: of a layer seven, of a projection two more.
MAPS = 4 * maps.MAP_BYTES
DECODE = struct.Struct(f"={MAPS}s3Q7Q{OPERAND * 8}8q15i2f44x")  # the end fills its alignment of 64
_CHANGING = {
    "moe_decode": (struct.calcsize(f"={MAPS}s3Q"), struct.Struct("=7Q")),
    "decode_project": (struct.calcsize(f"={MAPS}sQ"), struct.Struct("=9Q")),
}
_COUNTER_BYTES = 512  # COUNTER_BYTES of decode.cuh
_MOST_COUNTERS = 4096  # of a device: one a stream, and one a launch in a CUDA graph


@functools.cache
def kernel_and_boxes(
    name: str, macros: tuple[tuple[str, int], ...], device: Device
) -> tuple[Kernel, tuple[int, int, int, int]]:
    """A kernel of moe_decode.cu, and the bytes of a row of a box: of w13, its scales, w2 and its scales; 0: no box."""
    library = Library(build("moe_decode.cu", dict(macros), device))
    constants = ("threads", "shared", "box13", "scales13", "box2", "scales2")
    threads, shared, *boxes = (library.constant(f"decode_{constant}") for constant in constants)
    cooperative = name == "moe_decode"  # its blocks wait for each other
    kernel = Kernel(
        library.kernel(name), DECODE, (_CHANGING[name],), threads, shared, cooperative=cooperative
    )
    return kernel, (boxes[0], boxes[1], boxes[2], boxes[3])


def runs(call: Call, problem: Problem, macros: tuple[tuple[str, int], ...]) -> bool:
    """Whether the decode kernel runs a call, of this problem, with the macros of a schedule: its shape must fit.

    INT4 weights must also lie as its copies want them, and be alike in both products.
    """
    desc, operands = call.desc, call.operands
    if desc.weight_format == "mxfp4":
        return decode_runs(problem, macros)
    of13, of2 = operands.formats(desc)
    if of13.macros_of_codes != of2.macros_of_codes or not operands.aligned(desc):
        return False
    limit = served(call.device).shared_bytes
    return Split.of(macros).fits(operands.sizes(desc), desc.num_experts, limit, stages=stages_of(macros))


def _encoded_maps(call: Call, boxes: tuple[int, int, int, int]) -> tuple[bytes, Tensor | None]:
    """Of w13, its scales, w2 and its scales, as `maps.encode` has them; boxes: as `kernel_and_boxes` has them."""
    desc, operands = call.desc, call.operands
    if not operands.aligned(desc):
        return bytes(MAPS), None
    hidden, intermediate, experts = desc.hidden_size, desc.intermediate_size, desc.num_experts
    apart = 2 if desc.row_order == "separate" else 1  # matrices of an expert
    sizes13, sizes2 = (experts * apart, 2 * intermediate // apart), (experts, hidden)
    box13 = 16 if desc.row_order == "interleaved" else 8  # gate and up rows that lie apart are copied apart
    of13, of2 = operands.sizes(desc)
    matrices = (
        maps.Matrix(operands.w13, *sizes13, hidden // 2, box13, boxes[0]),
        maps.Matrix(operands.s13, *sizes13, of13.scale_bytes, box13, boxes[1]),
        maps.Matrix(operands.w2, *sizes2, intermediate // 2, 16, boxes[2]),
        maps.Matrix(operands.s2, *sizes2, of2.scale_bytes, 16, boxes[3]),
    )
    return maps.encode(matrices, call.device)


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
        self._of_stream = _of_stream(device)

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


@functools.cache
def _of_stream(device: int) -> dict[int, int]:
    """Counters of a device's streams, for launches outside of graphs."""
    return {}


_counters: dict[int, _Counters] = {}
_counters_lock = threading.Lock()


def _counters_for(device: int, stream: int) -> int:
    capturing = torch._C._cuda_isCurrentStreamCapturing()
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
    """A call with the macros of a schedule, ready to be made.

    Args:
        call: that `supports` accepts and `runs` takes.
        macros: of the schedule, MXK_ left out.
    """

    def __init__(self, call: Call, macros: tuple[tuple[str, int], ...]) -> None:
        desc, operands = call.desc, call.operands
        self._call = call
        routes = call.num_tokens * desc.top_k
        chosen = {f"MXK_{name.upper()}": value for name, value in macros}
        settled = {
            "MXK_HIDDEN": desc.hidden_size,
            "MXK_INTER": desc.intermediate_size,
            "MXK_EXPERTS": desc.num_experts,
            "MXK_TOP_K": desc.top_k,
            "MXK_INTERLEAVED": int(desc.row_order == "interleaved"),
            "MXK_SCALES_SMALL": int(call.scales_small and desc.weight_format == "mxfp4"),
            "MXK_PER_ROUTE": int(desc.per_route),
            "MXK_ALIGNED": int(operands.aligned(desc)),
            "MXK_X_ALIGNED": int(call.x_aligned),
            **(operands.formats(desc)[0].macros_of_codes if desc.weight_format != "mxfp4" else {}),
        }
        given = tuple(sorted((chosen | settled).items()))
        kernel, boxes = kernel_and_boxes("moe_decode", given, served(call.device))
        encoded, self._maps = _encoded_maps(call, boxes)
        parts = (
            operands.w13,
            operands.s13,
            operands.b13,
            operands.w2,
            operands.s2,
            operands.b2,
            operands.z13,
            operands.z2,
        )
        argument = DECODE.pack(
            *(encoded, 0 if self._maps is None else self._maps.data_ptr()),
            *[0] * 9,
            *(field for part in parts for field in part.fields),
            *(call.x_stride, 0, 0, *call.ids_stride, *call.weights_stride, call.experts_min, call.num_tokens),
            *(*call.ids_type, call.weights_type, operands.b13.dtype, operands.b2.dtype, activation(desc)),
            *(operands.gate_row, operands.up_row, operands.up_expert, *[0] * 5, call.alpha, call.limit),
        )
        self._h_bytes = -(-2 * routes * desc.intermediate_size // 256) * 256
        self._new_scratch = maker("cuda", (self._h_bytes + 4 * routes * desc.hidden_size,), torch.uint8)
        self._new_out = maker("cuda", call.out_shape, torch.bfloat16)
        self._launch = kernel.bind(call.device, multiprocessors(call.device), argument)
        self._of_stream = _of_stream(call.device)

    def __call__(self, stream: int, hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """The layer on `stream` of the call's device, which is current."""
        out = self._new_out()
        # Held until the launch: counters that are allocated for it must lie elsewhere.
        scratch = self._new_scratch()
        counters = None if torch._C._cuda_isCurrentStreamCapturing() else self._of_stream.get(stream)
        if counters is None:
            counters = _counters_for(self._call.device, stream)
        base = scratch.data_ptr()
        self._launch(
            *(stream, hidden_states.data_ptr(), topk_ids.data_ptr(), topk_weights.data_ptr()),
            *(out.data_ptr(), base, base + self._h_bytes, counters),
        )
        return out
