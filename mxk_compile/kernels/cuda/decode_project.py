"""Launches of decode_project, in moe_decode.cu: one INT4 projection of few rows an expert, in one launch.

Rows are sorted by every block for itself; nothing is read back, and rows of `out` that no expert has are not written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from mxk_compile.kernels.cuda import maps
from mxk_compile.kernels.cuda.decode import DECODE, MAPS, kernel_and_boxes
from mxk_compile.kernels.cuda.devices import Device, served
from mxk_compile.kernels.cuda.driver import multiprocessors
from mxk_compile.kernels.cuda.int4_splits import Split, Weight, stages_of
from mxk_compile.kernels.cuda.operands import ABSENT, Format, Operand, lie_as_copied
from mxk_compile.kernels.cuda.schedule import Schedule

_KINDS = {"routes": 1, "sorted": 2, "masked": 3}  # MXK_PROJECT


def runs(
    overload: str,
    schedule: Schedule,
    weight: Weight,
    parts: tuple[Operand, ...],
    num_experts: int,
    shape: tuple[int, int],
    device: Device,
) -> bool:
    """Whether the decode kernel runs a projection of INT4 weights with this schedule; shape: of the result."""
    if schedule.kernel != "decode" or overload not in _KINDS or shape[1] % 16:
        return False
    split = Split.of(schedule.macros)
    places = split.places(num_experts, shape[0] // num_experts) if overload == "masked" else shape[0]
    return (
        lie_as_copied(parts, weight)
        and places <= split.max_routes
        and split.fits(
            *((weight,), num_experts, device.shared_bytes, overload == "masked"), stages_of(schedule.macros)
        )
    )


class DecodeProjection:
    """A call described once, for as long as layouts and weight addresses are the same.

    Args:
        overload, out, x, routing, attributes: of the call, which `runs` takes; x has dense rows, out too.
        blocks: places of a block, and blocks, of "sorted"; of "masked" rows of an expert, and experts.
        parts: weight, scale, zero.
        format_, weight, num_experts: of them.
        strides: of x: from row to row, or of "masked" from expert to expert, and there from row to row; then of out.
        x_aligned: whether rows of x start on 16 bytes.
    """

    def __init__(
        self,
        overload: str,
        out: Tensor,
        x: Tensor,
        routing: tuple[Tensor, ...],
        attributes: dict[str, Any],
        blocks: Sequence[int],
        parts: tuple[Operand, ...],
        format_: Format,
        weight: Weight,
        num_experts: int,
        schedule: Schedule,
        strides: tuple[int, int, int],
        x_aligned: bool,
    ) -> None:
        device = out.get_device()
        num_rows, outputs = out.shape
        first = routing[0]
        given = {
            **{f"MXK_{name.upper()}": value for name, value in schedule.macros},
            **format_.macros_of_codes,
            "MXK_PROJECT": _KINDS[overload],
            "MXK_HIDDEN": outputs,
            "MXK_INTER": weight.columns,
            "MXK_EXPERTS": num_experts,
            "MXK_TOP_K": first.shape[1] if overload == "routes" else 1,
            "MXK_X_ALIGNED": int(x_aligned),
        }
        macros = tuple(sorted(given.items()))
        kernel, (*_, box, scale_box) = kernel_and_boxes("decode_project", macros, served(device))
        matrices = (
            maps.Matrix(parts[0], num_experts, outputs, weight.columns // 2, 16, box),
            maps.Matrix(parts[1], num_experts, outputs, weight.scale_bytes, 16, scale_box),
        )
        encoded, _ = maps.encode(matrices, device)
        x_stride, x_inner, out_stride = strides
        x_rows = num_rows // num_experts if overload == "masked" else attributes.get("top_k", 1)
        absent = ABSENT.fields * 3
        argument = DECODE.pack(
            *(bytes(MAPS // 2) + encoded, 0),
            *[0] * 9,
            *(*absent, *parts[0].fields, *parts[1].fields, *ABSENT.fields, *ABSENT.fields, *parts[2].fields),
            *(x_stride, x_inner, out_stride),
            *(*(first.stride() if overload == "routes" else (0, 0)), 0, 0, attributes.get("experts_min", 0)),
            *(first.shape[0] if overload == "routes" else 0, first.element_size(), first.dtype.is_signed),
            *(0, 0, 0, 0, 0, 0, 0),
            *(x_rows, num_rows, first.shape[0], *blocks, 0.0, 0.0),
        )
        self._launch = kernel.bind(device, multiprocessors(device), argument)

    def __call__(self, stream: int, out: Tensor, x: Tensor, routing: tuple[Tensor, ...]) -> None:
        """Writes `out` on `stream` of the call's device, which is current."""
        first, *rest = (tensor.data_ptr() for tensor in routing)
        more = rest or (0, 0)
        self._launch(stream, *more, x.data_ptr(), first, 0, out.data_ptr(), 0, 0, 0)
