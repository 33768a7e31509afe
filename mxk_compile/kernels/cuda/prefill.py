"""Launches of prefill.cu and routing.cu: a layer for many tokens."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import struct

import torch
from torch import Tensor

from mxk_compile.kernels.cuda.build import build
from mxk_compile.kernels.cuda.devices import Device, served
from mxk_compile.kernels.cuda.driver import Kernel, Library, multiprocessors
from mxk_compile.kernels.cuda.maps import MAP_BYTES
from mxk_compile.kernels.cuda.operands import OPERAND, Call, Format, Operand, activation
from mxk_compile.kernels.cuda.tiles import MOST_SIZES
from mxk_compile.kernels.desc import MoEDesc

# struct Gemm of prefill.cuh, struct Routing of routing.cu.
GEMM = struct.Struct(f"={OPERAND * 4}5Qq15i2f2i4x")
GEMM_CHANGING = ((struct.calcsize(f"={OPERAND * 4}"), struct.Struct("=5Q")),)
MAPPED_GEMM = struct.Struct(f"={MAP_BYTES}s{GEMM.size}s")
_MAPPED_CHANGING = (
    (0, struct.Struct(f"={MAP_BYTES}s")),
    *((MAP_BYTES + at, part) for at, part in GEMM_CHANGING),
)
PANELS, LISTED, IN_PLACE = range(3)  # of activations: MXK_ROWS of prefill.cuh
ALL, ROUTES, MARKED = range(3)  # enum Listed there
ROUTING = struct.Struct("=10Q6q16i")
ROUTING_CHANGING = ((0, struct.Struct("=10Q")),)
PANEL, ROW_BYTES = 64, 128  # columns of a panel of activations, and its bytes a row
ROW_STEP = 16  # an expert's rows begin at multiples of it
SORT_THREADS, GATHER_WARPS, _SUM_THREADS = 1024, 8, 256
SEGMENT = 1024  # columns of a row that a warp gathers
MOST_EXPERTS, MOST_TOP_K = 1024, 64
_CHUNK_TOKENS = 16384
"""Tokens that one run handles: bounds the workspace, at 128 rows an expert and more of any model row."""


@functools.cache
def library(
    tokens: int, weight: Format, scales_small: bool, project: bool, device: Device, rows: int = PANELS
) -> Library:
    """prefill.cu for tiles of at most `tokens` rows: its products of a layer, or the one that stands by itself."""
    macros = {"MXK_TOKENS": tokens, "MXK_PROJECT": int(project), "MXK_SCALES_SMALL": int(scales_small)}
    macros |= {"MXK_ROWS": rows} if rows else {}
    return Library(build("prefill.cu", {**macros, **weight.macros}, device))


@functools.cache
def product(
    name: str, tokens: int, weight: Format, scales_small: bool, device: Device, rows: int = PANELS
) -> tuple[Kernel, int]:
    """Kernel `name` of prefill.cu, and how many of its blocks a multiprocessor holds."""
    module = library(tokens, weight, scales_small, name == "prefill_project", device, rows)
    shared = module.constant("prefill_shared")
    layout = (MAPPED_GEMM, _MAPPED_CHANGING) if rows == IN_PLACE else (GEMM, GEMM_CHANGING)
    threads = module.constant("prefill_threads")
    kernel = Kernel(module.kernel(name), *layout, threads, shared, overlap=True)
    return kernel, module.constant("prefill_blocks")


@functools.cache
def routing(device: Device) -> tuple[Kernel, Kernel, Kernel]:
    module = Library(build("routing.cu", {}, device))
    return (
        Kernel(module.kernel("prefill_sort"), ROUTING, ROUTING_CHANGING, SORT_THREADS, overlap=True),
        Kernel(module.kernel("prefill_gather"), ROUTING, ROUTING_CHANGING, 32 * GATHER_WARPS, overlap=True),
        Kernel(module.kernel("prefill_sum"), ROUTING, ROUTING_CHANGING, _SUM_THREADS, overlap=True),
    )


def gather_blocks(num_rows: int, columns: int) -> int:
    """Blocks of a launch that gathers rows."""
    return -(-num_rows * -(-columns // SEGMENT) // GATHER_WARPS)


def offsets(*sizes: int) -> tuple[int, ...]:
    """Where parts of a workspace of so many bytes begin, each on 1024 bytes, and last its own size."""
    return tuple(itertools.accumulate((-(-size // 1024) * 1024 for size in sizes), initial=0))


@dataclasses.dataclass(frozen=True)
class _Space:
    """Offsets in bytes of one run's workspace."""

    total_rows: int
    most_tiles: int
    x: int
    h: int
    y: int
    tiles: int
    num_tiles: int
    row_of_route: int
    size: int

    @classmethod
    def of(cls, desc: MoEDesc, num_tokens: int, most_rows: int) -> _Space:
        routes = num_tokens * desc.top_k
        # Each expert that has routes is rounded up.
        total = routes + (ROW_STEP - 1) * min(desc.num_experts, routes)
        total_rows = -(-total // ROW_STEP) * ROW_STEP
        most_tiles = total_rows // most_rows + desc.num_experts
        # A tile of the last rows is read whole.
        slack = most_rows * ROW_BYTES
        x_bytes = -(-desc.hidden_size // PANEL) * total_rows * ROW_BYTES + slack
        h_bytes = -(-desc.intermediate_size // PANEL) * total_rows * ROW_BYTES + slack
        y_bytes = total_rows * desc.hidden_size * 4
        # Y overwrites X, which nobody reads any more.
        xy, h, tiles, num_tiles, row_of_route, size = offsets(
            max(x_bytes, y_bytes), h_bytes, most_tiles * 16 * MOST_SIZES, 4 * MOST_SIZES, 4 * routes
        )
        return cls(total_rows, most_tiles, xy, h, xy, tiles, num_tiles, row_of_route, size)


class _Part:
    """Arguments of the launches for up to `_CHUNK_TOKENS` tokens."""

    def __init__(self, call: Call, sizes: tuple[int, ...], num_tokens: int) -> None:
        desc, operands = call.desc, call.operands
        self.num_tokens, self.routes = num_tokens, num_tokens * desc.top_k
        self.space = space = _Space.of(desc, num_tokens, sizes[-1])
        hidden, intermediate = desc.hidden_size, desc.intermediate_size
        all_sizes = (*sizes, *(0,) * (MOST_SIZES - len(sizes)))
        self.routing = ROUTING.pack(
            *(0,) * 10,
            *(*call.ids_stride, *call.weights_stride, call.x_stride, call.experts_min),
            *(
                num_tokens,
                desc.top_k,
                desc.num_experts,
                hidden,
                space.total_rows,
                space.most_tiles,
                *all_sizes,
            ),
            *(*call.ids_type, call.weights_type, call.x_aligned, desc.per_route, desc.top_k),
        )
        gate_up = (operands.row_step, operands.gate_row, operands.up_row, operands.up_expert)
        kind = activation(desc)

        def pack(
            parts: tuple[Operand, ...], inputs: int, outputs: int, rows: tuple[int, ...], chained: bool
        ) -> bytes:
            return GEMM.pack(
                *(field for part in parts for field in part.fields),
                *(*(0,) * 11, space.total_rows, -(-inputs // PANEL), inputs, outputs, *rows),
                *(parts[3].dtype, kind, call.alpha, call.limit, chained, 0),
            )

        w13 = (operands.w13, operands.s13, operands.z13, operands.b13)
        w2 = (operands.w2, operands.s2, operands.z2, operands.b2)
        self.products = [
            [pack(w13, hidden, intermediate, gate_up, chained) for chained in (False, True)],
            [pack(w2, intermediate, hidden, (1, 0, 0, 0), chained) for chained in (False, True)],
        ]


class Prefill:
    """A call with the tile sizes to use, ready to be made.

    Args:
        call: that `supports` accepts.
        sizes: rows of a tile, at most 4, multiples of 16 up to 176, ascending.
    """

    def __init__(self, call: Call, sizes: tuple[int, ...]) -> None:
        self._call = call
        formats = call.operands.formats(call.desc)
        names = ("prefill_gate_up", "prefill_down")
        self._kind = served(call.device)
        self._kernels = [
            [product(name, size, weight, call.scales_small, self._kind) for size in sizes]
            for name, weight in zip(names, formats, strict=True)
        ]
        whole, rest = divmod(call.num_tokens, _CHUNK_TOKENS)
        counts = [_CHUNK_TOKENS] * whole + [rest] * (rest > 0)
        parts = {count: _Part(call, sizes, count) for count in set(counts)}
        self._parts = [parts[count] for count in counts]

    def __call__(self, stream: int, hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """The layer on `stream` of the call's device, which is current."""
        out = hidden_states.new_empty(self._call.out_shape)
        if len(self._parts) == 1:
            self._run(self._parts[0], stream, hidden_states, topk_ids, topk_weights, out)
            return out
        for index, part in enumerate(self._parts):
            tokens = slice(index * _CHUNK_TOKENS, index * _CHUNK_TOKENS + part.num_tokens)
            inputs = (hidden_states[tokens], topk_ids[tokens], topk_weights[tokens])
            self._run(part, stream, *inputs, out[tokens])
        return out

    def _run(self, part: _Part, stream: int, x: Tensor, ids: Tensor, weights: Tensor, out: Tensor) -> None:
        device, space = self._call.device, part.space
        workspace = torch.empty(space.size, dtype=torch.uint8, device=x.device)
        base = workspace.data_ptr()
        tiles, num_tiles = base + space.tiles, base + space.num_tiles
        addresses = (
            *(
                ids.data_ptr(),
                weights.data_ptr(),
                x.data_ptr(),
                base + space.y,
                base + space.x,
                out.data_ptr(),
            ),
            *(base + space.row_of_route, tiles, num_tiles, 0),
        )
        sort, gather, sum_slots = routing(self._kind)
        sort.launch(device, stream, 1, part.routing, addresses)
        blocks = gather_blocks(part.routes, self._call.desc.hidden_size)
        gather.launch(device, stream, blocks, part.routing, addresses)
        processors = multiprocessors(device)
        for which, rows, result in ((0, space.x, space.h), (1, space.h, space.y)):
            kernels = self._kernels[which]
            for index in range(len(kernels) - 1, -1, -1):  # the largest tiles first
                of_size = (tiles + 16 * index * space.most_tiles, num_tiles + 4 * index, 0)
                argument = part.products[which][index != len(kernels) - 1]
                kernel, blocks = kernels[index]
                kernel.launch(
                    device, stream, blocks * processors, argument, (base + rows, base + result, *of_size)
                )
        sum_slots.launch(device, stream, part.num_tokens, part.routing, addresses)
