"""Launches of prefill.cu and routing.cu: a layer for many tokens."""

from __future__ import annotations

import dataclasses
import functools
import struct

import torch
from torch import Tensor

from mxk_compile.kernels.cuda.build import build
from mxk_compile.kernels.cuda.driver import Kernel, Library, multiprocessors
from mxk_compile.kernels.cuda.operands import ALIGNMENT, FLOATS, OPERAND, Operands, activation
from mxk_compile.kernels.desc import MoEDesc

# Layouts of prefill.cu and routing.cu.
_GEMM = struct.Struct(f"={OPERAND * 3}4Q10i2fi4x")
_ROUTING = struct.Struct("=9Q6q15i4x")
_BLOCK, _ROW_BYTES = 64, 128  # columns of a block of activations, and its bytes a row
_ROW_STEP = 16  # an expert's rows begin at multiples of it
_GEMM_THREADS = 384
_SORT_THREADS, _GATHER_WARPS, _SUM_THREADS = 1024, 4, 256
_MOST_SIZES = 4
MOST_EXPERTS, MOST_TOP_K = 1024, 64
_CHUNK_TOKENS = 16384
"""Tokens that one run handles: bounds the workspace, at 128 rows an expert and more of any model row."""


@functools.cache
def _products(tokens: int, scales_small: bool) -> tuple[Kernel, Kernel]:
    """Gate/up and down products with tiles of at most `tokens` rows."""
    library = Library(build("prefill.cu", {"MXK_TOKENS": tokens, "MXK_SCALES_SMALL": int(scales_small)}))
    shared = library.constant("prefill_shared")
    gate_up, down = (
        Kernel(library.kernel(name), _GEMM, _GEMM_THREADS, shared, overlap=True)
        for name in ("prefill_gate_up", "prefill_down")
    )
    return gate_up, down


@functools.cache
def _routing() -> tuple[Kernel, Kernel, Kernel]:
    library = Library(build("routing.cu", {}))
    return (
        Kernel(library.kernel("prefill_sort"), _ROUTING, _SORT_THREADS, overlap=True),
        Kernel(library.kernel("prefill_gather"), _ROUTING, 32 * _GATHER_WARPS, overlap=True),
        Kernel(library.kernel("prefill_sum"), _ROUTING, _SUM_THREADS, overlap=True),
    )


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
        total = routes + (_ROW_STEP - 1) * min(desc.num_experts, routes)
        total_rows = -(-total // _ROW_STEP) * _ROW_STEP
        most_tiles = total_rows // most_rows + desc.num_experts
        # A tile of the last rows is read whole.
        slack = most_rows * _ROW_BYTES
        x_bytes = -(-desc.hidden_size // _BLOCK) * total_rows * _ROW_BYTES + slack
        h_bytes = -(-desc.intermediate_size // _BLOCK) * total_rows * _ROW_BYTES + slack
        y_bytes = total_rows * desc.hidden_size * 4
        offsets, at = [], 0
        # Y overwrites X, which nobody reads any more.
        for size in (max(x_bytes, y_bytes), h_bytes, most_tiles * 16 * _MOST_SIZES, 256, 4 * routes):
            offsets.append(at)
            at += -(-size // 1024) * 1024
        xy, h, tiles, num_tiles, row_of_route = offsets
        return cls(total_rows, most_tiles, xy, h, xy, tiles, num_tiles, row_of_route, at)


class Prefill:
    """A layer's weights with the tile sizes to use, ready to be called.

    Args:
        desc: of the call, which `supports` accepts.
        operands: the weights.
        alpha, limit: of the activation; limit +inf for no clamp.
        experts_min: as in `mxk::moe`.
        scales_small: whether no scale byte of the weights is above 128.
        sizes: rows of a tile, at most 4, multiples of 16 up to 128, ascending.
    """

    def __init__(
        self,
        desc: MoEDesc,
        operands: Operands,
        alpha: float,
        limit: float,
        experts_min: int,
        scales_small: bool,
        sizes: tuple[int, ...],
    ) -> None:
        self.desc, self.sizes, self.experts_min = desc, sizes, experts_min
        hidden, intermediate = desc.hidden_size, desc.intermediate_size
        hidden_blocks, intermediate_blocks = -(-hidden // _BLOCK), -(-intermediate // _BLOCK)
        gate_up = (operands.row_step, operands.gate_row, operands.up_row, operands.up_expert)
        kind = activation(desc)
        self._gate_up_weights = (*operands.w13.fields, *operands.s13.fields, *operands.b13.fields)
        self._gate_up_scalars = (
            hidden_blocks,
            hidden // 32,
            intermediate,
            *gate_up,
            operands.b13.dtype,
            kind,
        )
        self._down_weights = (*operands.w2.fields, *operands.s2.fields, *operands.b2.fields)
        self._down_scalars = (
            intermediate_blocks,
            intermediate // 32,
            hidden,
            1,
            0,
            0,
            0,
            operands.b2.dtype,
            kind,
        )
        self._constants = (alpha, limit)
        self._all_sizes = (*sizes, *(0,) * (_MOST_SIZES - len(sizes)))
        self._products = [_products(size, scales_small) for size in sizes]

    def __call__(
        self, device: int, stream: int, hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor
    ) -> Tensor:
        """The layer on `stream` of `device`, which is current."""
        desc, num_tokens = self.desc, hidden_states.shape[0]
        shape = (num_tokens, desc.top_k) if desc.per_route else (num_tokens,)
        out = hidden_states.new_empty((*shape, desc.hidden_size))
        for first in range(0, num_tokens, _CHUNK_TOKENS):
            part = slice(first, first + _CHUNK_TOKENS)
            self._run(device, stream, hidden_states[part], topk_ids[part], topk_weights[part], out[part])
        return out

    def _run(self, device: int, stream: int, x: Tensor, ids: Tensor, weights: Tensor, out: Tensor) -> None:
        desc, num_tokens = self.desc, x.shape[0]
        space = _Space.of(desc, num_tokens, self.sizes[-1])
        workspace = torch.empty(space.size, dtype=torch.uint8, device=x.device)
        base = workspace.data_ptr()
        aligned = x.data_ptr() % ALIGNMENT == 0 and x.stride(0) * 2 % ALIGNMENT == 0
        routing = (
            *(
                ids.data_ptr(),
                weights.data_ptr(),
                x.data_ptr(),
                base + space.y,
                base + space.x,
                out.data_ptr(),
            ),
            *(base + space.row_of_route, base + space.tiles, base + space.num_tiles),
            *(*ids.stride(), *weights.stride(), x.stride(0), self.experts_min),
            *(num_tokens, desc.top_k, desc.num_experts, desc.hidden_size, space.total_rows, space.most_tiles),
            *(*self._all_sizes, ids.element_size(), ids.dtype.is_signed, FLOATS[weights.dtype], aligned),
            desc.per_route,
        )
        sort, gather, sum_slots = _routing()
        blocks = multiprocessors(device)
        sort.launch(device, stream, 1, *routing)
        gather.launch(device, stream, -(-num_tokens * desc.top_k // _GATHER_WARPS), *routing)
        self._multiply(device, stream, blocks, 0, base, space, space.x, space.h)
        self._multiply(device, stream, blocks, 1, base, space, space.h, space.y)
        sum_slots.launch(device, stream, num_tokens, *routing)

    def _multiply(
        self, device: int, stream: int, blocks: int, which: int, base: int, space: _Space, rows: int, out: int
    ) -> None:
        """One product for the tiles of every size, the largest first."""
        weights, scalars = (
            (self._gate_up_weights, self._gate_up_scalars)
            if which == 0
            else (self._down_weights, self._down_scalars)
        )
        for index in reversed(range(len(self.sizes))):
            self._products[index][which].launch(
                *(device, stream, blocks, *weights, base + rows, base + out),
                *(base + space.tiles + 16 * index * space.most_tiles, base + space.num_tiles + 4 * index),
                *(space.total_rows, *scalars, *self._constants, index != len(self.sizes) - 1),
            )
