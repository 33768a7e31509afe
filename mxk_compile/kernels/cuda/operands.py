"""How a call's tensors reach the kernels: struct Operand of call.cuh, enumerations, and strides."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from typing import Any

import torch
from torch import Tensor

from mxk_compile.kernels.cuda.driver import persistent
from mxk_compile.kernels.cuda.int4_splits import Weight
from mxk_compile.kernels.desc import MoEDesc
from mxk_compile.ops.moe import Weights
from mxk_compile.variants import ACTIVATIONS

OPERAND = "QQqq"  # struct Operand: base, table, expert stride, row stride
FLOATS = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2, torch.float64: 3}  # enum Dtype
ALIGNMENT = 16  # of addresses and strides that the kernels' wide loads and bulk copies want, in bytes

_logger = logging.getLogger("mxk_compile.kernels")


@functools.cache
def _say_copied(name: str, why: str) -> None:
    _logger.warning("mxk::moe: %s is %s and is copied in every call; store it so", name, why)


@dataclasses.dataclass(frozen=True)
class Operand:
    """One weight argument as the kernels see it.

    Attributes:
        fields: of struct Operand.
        dtype: of enum Dtype, 0 for packed bytes and absent arguments.
        kept: what must live as long as this: tables of addresses, copies.
        copied: whether a copy was made, which must not outlive the call.
    """

    fields: tuple[int, int, int, int]
    dtype: int
    kept: tuple[Tensor, ...] = ()
    copied: bool = False

    @property
    def _alignment_of_experts(self) -> int:
        base, table, expert_stride, _ = self.fields
        return math.gcd(ALIGNMENT, *(self.kept[-1].tolist() if table else (base, expert_stride)))

    @property
    def alignment(self) -> int:
        """Bytes, a power of two up to `ALIGNMENT`, that every row's start is a multiple of."""
        return math.gcd(self._alignment_of_experts, self.fields[3])

    def aligned(self, dense_bytes: int) -> bool:
        """Whether every expert starts on `ALIGNMENT` bytes and its rows are dense, `dense_bytes` apart."""
        return self.fields[3] == dense_bytes and self._alignment_of_experts == ALIGNMENT


ABSENT = Operand((0, 0, 0, 0), 0)


@dataclasses.dataclass(frozen=True)
class Format:
    """What a packed weight is, to formats.cuh.

    Attributes:
        code: 0 MXFP4, 1 "uint4", 2 "int4".
        scales: dtype of INT4's scales, of enum Dtype.
        group_log: log2 of the columns that share a scale, 31 for a whole row.
        zeros: whether there are zero points.
        scale_alignment: bytes that rows of scales start on.
    """

    code: int
    scales: int
    group_log: int
    zeros: bool
    scale_alignment: int

    @classmethod
    def of(cls, weight_format: str, scale: Operand, zero: Operand, group_size: int) -> Format:
        """From a weight's arguments; group_size is that of `MoEDesc.group_sizes`."""
        code = ("mxfp4", "uint4", "int4").index(weight_format)
        group_log = _GROUP_LOGS.get(group_size, _WHOLE_ROW)
        # No copy of scales is wider than 16 bytes, or 8 for MXFP4's.
        alignment = min(scale.alignment, 16 if code else 8)
        return cls(code, scale.dtype if code else 0, group_log, zero is not ABSENT, alignment)

    @property
    def macros_of_codes(self) -> dict[str, int]:
        """Of formats.cuh."""
        return {
            "MXK_FORMAT": self.code,
            "MXK_SCALES": self.scales,
            "MXK_GROUP_LOG": self.group_log,
            "MXK_ZEROS": int(self.zeros),
        }

    @property
    def macros(self) -> dict[str, int]:
        """Of formats.cuh and prefill.cuh."""
        return {**self.macros_of_codes, "MXK_SCALE_ALIGNMENT": self.scale_alignment}


_GROUP_LOGS = {32: 5, 64: 6, 128: 7}
_WHOLE_ROW = 31


_SCALE_BYTES = (2, 2, 4)  # by enum Dtype


def sizes_of(weight_format: str, columns: int, group_size: int, scale: Operand, zero: Operand) -> Weight:
    """Of a weight's rows, of their scales and zero points."""
    groups = columns // group_size
    scale_bytes = 1 if weight_format == "mxfp4" else _SCALE_BYTES[scale.dtype]
    return Weight(columns, groups * scale_bytes, groups * (zero is not ABSENT))


def lie_as_copied(parts: tuple[Operand, ...], sizes: Weight) -> bool:
    """Whether a weight, its scales and its zero points, `parts`, lie as the decode kernel's bulk copies want them."""
    weight, scale, zero = parts
    return (
        weight.aligned(sizes.columns // 2)
        and scale.aligned(sizes.scale_bytes)
        and (zero is ABSENT or zero.aligned(sizes.zero_bytes))
    )


_MOST_APART = 1 << 24
"""Bytes from row to row: kernels count those of a unit of rows in 32 bits."""


def operand(name: str, value: Weights | None, alignment: int) -> Operand:
    """Describes one weight argument; rows that are not dense, not on `alignment` bytes or far apart are copied.

    Args:
        name: of the argument, for what is said about copies.
        value: [E, rows, ...], a list of E tensors [rows, ...], or None or an empty list for an absent argument.
        alignment: bytes that each row's start must be a multiple of.
    """
    if value is None or len(value) == 0:
        return ABSENT
    tensors = [value] if isinstance(value, Tensor) else list(value)
    size = tensors[0].element_size()
    copied = False
    rows = int(isinstance(value, Tensor))  # their dimension

    def row_stride(tensor: Tensor) -> int:
        return tensor.stride(rows) * size if tensor.dim() > rows + 1 else 0

    def fits(tensor: Tensor) -> bool:
        outer = [
            stride * size
            for stride, length in zip(tensor.stride(), tensor.shape[:-1], strict=False)
            if length > 1
        ]
        return (
            (tensor.stride(-1) == 1 or tensor.shape[-1] <= 1)
            and all(number % alignment == 0 for number in (tensor.data_ptr(), *outer))
            and row_stride(tensor) <= _MOST_APART
            and tensor.stride() == tensors[0].stride()
        )

    if not all(map(fits, tensors)):
        _say_copied(name, f"not dense, not on {alignment} bytes, or more than {_MOST_APART} bytes apart")
        tensors, copied = [tensor.contiguous() for tensor in tensors], True
        # contiguous() returns odd addresses of dense views as they are
        tensors = [tensor if tensor.data_ptr() % alignment == 0 else tensor.clone() for tensor in tensors]
    first = tensors[0]
    dtype = FLOATS.get(first.dtype, 0)
    if isinstance(value, Tensor):
        fields = (first.data_ptr(), 0, first.stride(0) * size, row_stride(first))
        return Operand(fields, dtype, tuple(tensors) if copied else (), copied)
    addresses = torch.tensor([tensor.data_ptr() for tensor in tensors], dtype=torch.int64)
    table = persistent(lambda: addresses.to(first.device), first.device.index) if first.is_cuda else addresses
    kept = (*(tensors if copied else ()), table, addresses)
    return Operand((0, table.data_ptr(), 0, row_stride(first)), dtype, kept, copied)


@dataclasses.dataclass(frozen=True)
class Operands:
    """The weights of a layer, and where gate and up rows lie in w13."""

    w13: Operand
    s13: Operand
    b13: Operand
    w2: Operand
    s2: Operand
    b2: Operand
    z13: Operand
    z2: Operand
    row_step: int
    gate_row: int
    up_row: int
    up_expert: int

    @classmethod
    def of(cls, desc: MoEDesc, weights: tuple[Any, ...]) -> Operands:
        """From the eight weight arguments of `mxk::moe` or `mxk::moe.lists`."""
        w13, s13, w2, s2, z13, z2, b13, b2 = weights
        up_row = {"gate_up": desc.intermediate_size, "interleaved": 1}.get(desc.row_order, 0)
        return cls(
            *(operand("w13", w13, ALIGNMENT), operand("w13_scale", s13, 1), operand("w13_bias", b13, 1)),
            *(operand("w2", w2, ALIGNMENT), operand("w2_scale", s2, 1), operand("w2_bias", b2, 1)),
            *(operand("w13_zero", z13, 1), operand("w2_zero", z2, 1)),
            row_step=2 if desc.row_order == "interleaved" else 1,
            gate_row=desc.intermediate_size if desc.row_order == "up_gate" else 0,
            up_row=up_row,
            up_expert=desc.num_experts if desc.row_order == "separate" else 0,
        )

    @property
    def copied(self) -> bool:
        """Whether any of the weights had to be copied for this call."""
        parts = (self.w13, self.s13, self.b13, self.w2, self.s2, self.b2, self.z13, self.z2)
        return any(part.copied for part in parts)

    def formats(self, desc: MoEDesc) -> tuple[Format, Format]:
        """Of w13 and w2."""
        of13, of2 = desc.group_sizes
        return (
            Format.of(desc.weight_format, self.s13, self.z13, of13),
            Format.of(desc.weight_format, self.s2, self.z2, of2),
        )

    def sizes(self, desc: MoEDesc) -> tuple[Weight, Weight]:
        """Of w13 and w2."""
        of13, of2 = desc.group_sizes
        return (
            sizes_of(desc.weight_format, desc.hidden_size, of13, self.s13, self.z13),
            sizes_of(desc.weight_format, desc.intermediate_size, of2, self.s2, self.z2),
        )

    def aligned(self, desc: MoEDesc) -> bool:
        """Whether rows and scales lie as the bulk copies of the decode kernel want them."""
        of13, of2 = self.sizes(desc)
        return lie_as_copied((self.w13, self.s13, self.z13), of13) and lie_as_copied(
            (self.w2, self.s2, self.z2), of2
        )


def activation(desc: MoEDesc) -> int:
    """Of enum Activation."""
    return ACTIVATIONS.index(desc.activation)


@dataclasses.dataclass(frozen=True)
class Call:
    """What of a call stays the same for as long as layouts and weights do.

    Attributes:
        desc: what `supports` accepted.
        operands: the weights.
        alpha, limit, experts_min: as in `mxk::moe`; limit +inf for no clamp.
        scales_small: whether no scale byte of the weights is above 128.
        device: index of the device.
        num_tokens: T.
        x_stride, ids_stride, weights_stride: of the inputs, in elements.
        ids_type: bytes of an id, and whether it is signed.
        weights_type: of topk_weights, of enum Dtype.
        x_aligned: whether rows of hidden_states start on `ALIGNMENT` bytes.
    """

    desc: MoEDesc
    operands: Operands
    alpha: float
    limit: float
    experts_min: int
    scales_small: bool
    device: int
    num_tokens: int
    x_stride: int
    ids_stride: tuple[int, ...]
    weights_stride: tuple[int, ...]
    ids_type: tuple[int, bool]
    weights_type: int
    x_aligned: bool

    @property
    def out_shape(self) -> tuple[int, ...]:
        """Of the result."""
        desc = self.desc
        return (self.num_tokens, *([desc.top_k] if desc.per_route else []), desc.hidden_size)
