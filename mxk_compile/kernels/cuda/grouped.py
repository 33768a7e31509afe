"""`mxk::project` on CUDA: one expert GEMM of prefill.cu, for rows that routing.cu or groups.cu bring together, or, for
INT4 and few rows an expert, the decode kernel's one launch (decode_project.py).

Three launches and one more for each further tile size: a plan (rows of each expert, tiles), a gather of x into
prefill.cu's panels, and the product, which writes each row of `out` where the caller wants it. Where that costs less
(`tiles.rows_stay`), the product reads rows of x where they lie, and nothing is gathered. Nothing is read back, so
that a CUDA graph holds it; rows of `out` that no expert has are not written.
"""

from __future__ import annotations

import dataclasses
import functools
import struct
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mxk_compile.kernels.cuda import decode_project, maps, prefill, scales
from mxk_compile.kernels.cuda.build import build
from mxk_compile.kernels.cuda.devices import HOPPER, Device, served
from mxk_compile.kernels.cuda.driver import Kernel, Library, multiprocessors
from mxk_compile.kernels.cuda.operands import ABSENT, ALIGNMENT, Format, Operand, operand, sizes_of
from mxk_compile.kernels.cuda.prefill import (
    ALL,
    IN_PLACE,
    LISTED,
    MARKED,
    PANEL,
    PANELS,
    ROUTES,
    ROW_BYTES,
    ROW_STEP,
)
from mxk_compile.kernels.cuda.schedule import Product, choose_of_product
from mxk_compile.kernels.cuda.tiles import MOST_SIZES, rows_stay, tile_sizes
from mxk_compile.kernels.empty import maker
from mxk_compile.ops.project import GROUP_ROWS, NUM_ROUTING

# struct Rows of groups.cu.
_GROUPS = struct.Struct("=9Q2q15i4x")
_ANY_LISTED = 2**31 - 1  # as most_listed: all that is not negative counts
_MOST_MAPS = 64
_GROUPS_CHANGING = ((0, struct.Struct("=9Q")),)
_KINDS = {"sorted": 0, "contiguous": 1, "masked": 2}
_MOST_BLOCKS = 24576  # whose counts fit into the 99 KB of shared memory that a block has on every device
_MOST_WORK = 2**30 - 2**20
"""Rows or places, times segments of columns: an int32 of groups.cu, less a bit that it uses and all blocks' padding."""
_MOST_AWAY = 2**35  # bf16 values to the last row that is read where it lies: eights in 32 bits
_MOST_PREPARED = 4096
_ROUTES_WEIGHTS = (0, 0)  # router weights have no part in a projection


def refusal(overload: str, out: Tensor, x: Tensor, *args: Any, **attributes: Any) -> str | None:
    """None if `project` runs a call that `check_project` accepts on a device that runs the kernels, else the reason.

    Its weights are packed along the inputs.
    """
    routing, (weight, *_) = args[: NUM_ROUTING[overload]], args[NUM_ROUTING[overload] :]
    num_experts, columns = weight.shape[0], x.shape[-1]
    places = max(out.shape[0], len(routing[0]) if overload == "sorted" else 0)
    if x.dtype != torch.bfloat16:
        reason = f"x is {x.dtype}; allowed: torch.bfloat16"
    elif columns == 0 or columns % 32:
        reason = f"K = {columns}; allowed: multiples of 32 above 0"
    elif num_experts > prefill.MOST_EXPERTS:
        reason = f"E = {num_experts}; allowed: up to {prefill.MOST_EXPERTS}"
    elif overload != "routes" and _blocks(overload, num_experts, routing, attributes)[2] > _MOST_BLOCKS:
        reason = f"more than {_MOST_BLOCKS} blocks of rows; allowed: so many"
    elif places > (most := _MOST_WORK // -(-columns // prefill.SEGMENT)):
        reason = f"{places} rows or places of lists; allowed: up to {most} with K = {columns}"
    else:
        return None
    return f"CUDA kernels: {reason}"


def _blocks(
    overload: str, num_experts: int, routing: tuple[Tensor, ...], attributes: dict[str, Any]
) -> tuple[int, int, int]:
    """Places, places of a block, and blocks of groups.cu; the first two are 0 for "masked": they are rows of out."""
    if overload == "masked":
        return 0, 0, num_experts
    places = len(routing[0])
    if overload == "contiguous":
        return places, GROUP_ROWS, places // GROUP_ROWS
    # A block of more places than there are ends with them: the end of the last stays an int32.
    size = min(attributes["block_size"], max(places, 1))
    return places, size, min(-(-places // size), len(routing[1]))


def project(
    judge: Callable[..., str | None], overload: str, out: Tensor, x: Tensor, *args: Any, **attributes: Any
) -> str | None:
    """`mxk::project` on torch's current stream; None, or why it did not run.

    Args:
        judge: asked, with the arguments that follow, about a call that was not seen before: why it is not run here.
        overload: of OVERLOADS in ops/project.py.
        out: [R, N] bf16, any row stride.
        x: bf16 rows as the overload says, any stride.
        args: routing tensors of the overload, then weight, scale and zero, as in ops/project.py.
        attributes: as in the schema.

    Raises:
        KernelError: sources do not compile, or a launch fails.
    """
    count = NUM_ROUTING[overload]
    routing, weights = args[:count], args[count:]
    key = (
        *(overload, out.get_device(), out.shape, out.stride(), out.dtype, out.data_ptr() % ALIGNMENT),
        *(x.get_device(), x.shape, x.stride(), x.dtype, x.data_ptr() % ALIGNMENT),
        *((tensor.get_device(), tensor.shape, tensor.stride(), tensor.dtype) for tensor in routing),
        *(None if w is None else (w.data_ptr(), w.shape, w.stride(), w.dtype) for w in weights),
        *attributes.items(),
    )
    call = _prepared.get(key)
    if call is None or not call.current(weights[1]):
        reason = judge(overload, out, x, *args, **attributes)
        if reason is not None:
            return reason
        call = _Projection(overload, out, x, routing, weights, attributes)
        if call.reusable:
            if len(_prepared) >= _MOST_PREPARED:
                _prepared.clear()
            _prepared[key] = call
    call(out, x, routing)
    return None


_prepared: dict[Any, _Projection] = {}
"""Calls seen so far, by all that they hold on to."""


@functools.cache
def _groups(device: Device) -> tuple[Kernel, Kernel]:
    module = Library(build("groups.cu", {}, device))
    plan, gather = (
        Kernel(module.kernel(name), _GROUPS, _GROUPS_CHANGING, threads, shared, overlap=True)
        for name, threads, shared in (
            ("groups_plan", prefill.SORT_THREADS, 4 * _MOST_BLOCKS),
            ("groups_gather", 32 * prefill.GATHER_WARPS, 0),
        )
    )
    return plan, gather


@dataclasses.dataclass(frozen=True)
class _Space:
    """Offsets in bytes of a call's workspace."""

    total_rows: int
    most_tiles: int
    x: int
    of_blocks: int
    target: int
    tiles: int
    num_tiles: int
    size: int

    @classmethod
    def of(cls, rows: int, runs: int, block_bytes: int, columns: int, most_rows: int) -> _Space:
        """For so many rows with padding, runs of rows of an expert, and bytes about blocks or routes, at most."""
        total_rows = -(-rows // ROW_STEP) * ROW_STEP
        most_tiles = total_rows // most_rows + runs
        # A tile of the last rows is read whole.
        x_bytes = -(-columns // PANEL) * total_rows * ROW_BYTES + most_rows * ROW_BYTES
        target_bytes, tiles_bytes = 4 * (total_rows + most_rows), most_tiles * 16 * MOST_SIZES
        parts = prefill.offsets(x_bytes, block_bytes, target_bytes, tiles_bytes, 4 * MOST_SIZES)
        return cls(total_rows, most_tiles, *parts)


class _Projection:
    """A call described once, for as long as layouts and weight addresses are the same."""

    def __init__(
        self,
        overload: str,
        out: Tensor,
        x: Tensor,
        routing: tuple[Tensor, ...],
        weights: tuple[Any, ...],
        attributes: dict[str, Any],
    ) -> None:
        weight, scale, *rest = weights
        zero = rest[0] if rest else None
        device = out.get_device()
        weight_format = attributes["weight_format"]
        self._device, self._overload = device, overload
        self._decode: decode_project.DecodeProjection | None = None
        self._scales = scales.Watch((scale,)) if weight_format == "mxfp4" else None
        num_experts, columns, (num_rows, outputs) = len(weight), x.shape[-1], out.shape
        self._copies_x, self._copies_out = x.stride(-1) != 1, out.stride(1) != 1
        self._empty = out.numel() == 0 or x.numel() == 0
        self._parts: tuple[Operand, ...] = (
            operand("weight", weight, ALIGNMENT),
            operand("scale", scale, 1),
            operand("zero", zero, 1),
        )
        self.reusable = not any(part.copied for part in self._parts)
        if self._empty:
            return
        top_k = attributes.get("top_k", 1)
        mean = attributes["expected_m"] if overload == "masked" else num_rows / num_experts
        self._kind = served(device)
        group_size, scaling = columns // scale.shape[-1], self._parts[1:]
        format_ = Format.of(weight_format, *scaling, group_size)
        of_weight = sizes_of(weight_format, columns, group_size, *scaling)
        most_rows = num_rows // num_experts if overload == "masked" else 0
        of_product = (num_experts, outputs, of_weight, mean, overload == "contiguous", num_rows, most_rows)
        schedule = choose_of_product(Product(weight_format, *of_product, self._kind))
        x_stride, x_outer = x.stride(-2), x.stride(0) if x.dim() == 3 else 0
        if self._copies_x:
            x_stride, x_outer = columns, columns * (x.shape[1] if x.dim() == 3 else 0)
        aligned = self._copies_x or (
            x.data_ptr() % ALIGNMENT == 0 and all(stride % 8 == 0 for stride in (x_stride, x_outer))
        )
        out_stride = outputs if self._copies_out else out.stride(0)
        if weight_format != "mxfp4" and decode_project.runs(
            overload, schedule, of_weight, self._parts, num_experts, (num_rows, outputs), self._kind
        ):
            if overload == "masked":
                strides = (x_outer if x.dim() == 3 else most_rows * x_stride, x_stride, out_stride)
            else:
                strides = (x_stride, 0, out_stride)
            divided: Sequence[int] = (most_rows, num_experts)  # masked
            if overload == "sorted":
                _, *divided = _blocks(overload, num_experts, routing, attributes)
            with torch.cuda.device(device):
                self._decode = decode_project.DecodeProjection(
                    *(overload, out, x, routing, attributes, divided, self._parts, format_, of_weight),
                    *(num_experts, schedule, strides, aligned),
                )
            return
        sizes = schedule.sizes or tile_sizes(mean, even=overload == "contiguous", most=self._kind.most_rows)
        ordered = overload in ("contiguous", "masked")
        # The tensor maps want strides, and at least a box.
        mappable = columns >= PANEL and x_stride > 0 and (x_outer > 0 or x.dim() == 2)
        near = max(x.shape[-2] * x_stride, x_outer) < _MOST_AWAY
        stays = aligned and near and self._kind == HOPPER and rows_stay(outputs, sizes[-1], ordered)
        feed = PANELS if not stays else LISTED if not ordered else IN_PLACE if mappable else PANELS
        self._feed, self._sizes = feed, sizes
        with torch.cuda.device(device):
            small = self._scales is None or self._scales.small is True
            self._kernels = [
                prefill.product("prefill_project", size, format_, small, self._kind, feed) for size in sizes
            ]
        all_sizes = (*sizes, *(0,) * (MOST_SIZES - len(sizes)))
        expert_places = 0
        listed = (ROUTES, 1, _ANY_LISTED)  # what the gather has found
        if overload == "routes":
            self._places = num_rows
            runs = min(num_experts, num_rows)
            rows = num_rows + (ROW_STEP - 1) * runs
            self._space = space = _Space.of(
                rows, runs, 4 * num_rows, columns if feed == PANELS else 0, sizes[-1]
            )
            (ids,) = routing
            if feed == LISTED:
                listed = (ROUTES, top_k, num_rows)
            self._rows = prefill.ROUTING.pack(
                *(0,) * 10,
                *(*ids.stride(), *_ROUTES_WEIGHTS, x_stride, attributes.get("experts_min", 0)),
                *(*ids.shape, num_experts, columns, space.total_rows, space.most_tiles, *all_sizes),
                *(ids.element_size(), ids.dtype.is_signed, 0, aligned, 0, top_k),
            )
        else:
            places, block_size, blocks = _blocks(overload, num_experts, routing, attributes)
            if overload == "masked":
                places, block_size = num_rows, num_rows // num_experts
                if x.dim() == 2:
                    x_outer = block_size * x_stride
                expert_places = block_size
            if feed != PANELS:
                listed = {
                    "sorted": (ROUTES, top_k, num_rows),
                    "contiguous": (MARKED, 1, num_experts),
                    "masked": (ALL, 1, 0),
                }[overload]
            # Of x: columns, rows, matrices; strides in bytes.
            shape = (columns, expert_places, num_experts) if expert_places else (columns, num_rows, 1)
            self._of_maps = shape, (2 * x_stride, 2 * (x_outer or num_rows * x_stride))
            self._places = places
            # Each block may be rounded up, where it does not end on a whole step.
            rows = places + (ROW_STEP - 1) * (blocks if block_size % ROW_STEP else 0)
            self._space = space = _Space.of(
                rows, blocks, 8 * blocks, columns if feed == PANELS else 0, sizes[-1]
            )
            self._rows = _GROUPS.pack(
                *(0,) * 9,
                *(x_stride, x_outer, _KINDS[overload], places, block_size, blocks, num_experts),
                *(num_rows, top_k, columns, space.total_rows, space.most_tiles, *all_sizes, aligned),
            )
        self._gather_blocks = prefill.gather_blocks(self._places, columns) if feed == PANELS else 0
        if feed == IN_PLACE:
            self._maps = functools.lru_cache(_MOST_MAPS)(self._encode_maps)
        wide = self._copies_out or out.data_ptr() % ALIGNMENT == 0
        self._products = [
            prefill.GEMM.pack(
                *(field for part in (*self._parts, ABSENT) for field in part.fields),
                *(*(0,) * 5, out_stride, *listed, x_stride // 8 if feed == LISTED else 0),
                *(expert_places, space.total_rows),
                *(-(-columns // PANEL), columns, outputs),
                *(1, 0, 0, 0, 0, 0, 0.0, 0.0, chained, wide and out_stride % 8 == 0),
            )
            for chained in (False, True)
        ]
        self._new_workspace = maker("cuda", (space.size,), torch.uint8)

    def current(self, scale: Tensor) -> bool:
        """Whether what was found out about the scales still holds: their bytes may have changed in place."""
        return self._scales is None or self._scales.current(scale)

    def _encode_maps(self, address: int) -> tuple[bytes, ...]:
        """Of x, by tile size."""
        return tuple(maps.of_rows(address, *self._of_maps, size) for size in self._sizes)

    def __call__(self, out: Tensor, x: Tensor, routing: tuple[Tensor, ...]) -> None:
        """Writes `out`; layouts are those given before."""
        if self._empty:
            return
        if torch._C._cuda_getDevice() == self._device:
            return self._run(out, x, routing)
        with torch.cuda.device(self._device):
            self._run(out, x, routing)

    def _run(self, out: Tensor, x: Tensor, routing: tuple[Tensor, ...]) -> None:
        device = self._device
        stream = torch._C._cuda_getCurrentRawStream(device)
        x = x.contiguous() if self._copies_x else x
        result = out.contiguous() if self._copies_out else out  # with what it holds: not every row is written
        if self._overload != "routes":
            routing = tuple(tensor.contiguous() for tensor in routing)
        if self._decode is not None:
            self._decode(stream, result, x, routing)
            if self._copies_out:
                out.copy_(result)
            return
        workspace, space = self._new_workspace(), self._space
        base = workspace.data_ptr()
        tiles, num_tiles, target = base + space.tiles, base + space.num_tiles, base + space.target
        in_panels = self._feed == PANELS
        rows = base + space.x if in_panels else x.data_ptr()
        of_blocks = base + space.of_blocks
        first = listed = routing[0].data_ptr()
        if self._overload == "routes":
            plan, gather, _ = prefill.routing(self._kind)
            listed = target
            where: tuple[int, ...] = (
                first,
                first,
                x.data_ptr(),
                0,
                rows,
                0,
                of_blocks,
                tiles,
                num_tiles,
                target,
            )
        else:
            plan, gather = _groups(self._kind)
            more = [tensor.data_ptr() for tensor in routing[1:]] or [0, 0]
            where = (
                first,
                *more,
                x.data_ptr(),
                rows,
                of_blocks if in_panels else 0,
                target,
                tiles,
                num_tiles,
            )
        plan.launch(device, stream, 1, self._rows, where)
        if in_panels:
            gather.launch(device, stream, self._gather_blocks, self._rows, where)
            listed = target
        processors = multiprocessors(device)
        for index in range(len(self._kernels) - 1, -1, -1):  # the largest tiles first
            kernel, blocks = self._kernels[index]
            of_size = (tiles + 16 * index * space.most_tiles, num_tiles + 4 * index, listed)
            argument = self._products[index != len(self._kernels) - 1]
            changes: tuple[tuple[Any, ...], ...] = ((rows, result.data_ptr(), *of_size),)
            if self._feed == IN_PLACE:
                argument = bytes(maps.MAP_BYTES) + argument
                changes = ((self._maps(rows)[index],), *changes)
            kernel.launch(device, stream, blocks * processors, argument, *changes)
        if self._copies_out:
            out.copy_(result)
