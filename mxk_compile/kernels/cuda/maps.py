"""Tensor maps: what bulk copies take their boxes from, of weights for the decode kernel, of rows for prefill.cu."""

from __future__ import annotations

import ctypes
import dataclasses
from typing import Any

import torch
from torch import Tensor

from mxk_compile.kernels.cuda.driver import ask, persistent
from mxk_compile.kernels.cuda.operands import Operand

MAP_BYTES = 128  # of a CUtensorMap
_MOST_WORDS = 256  # elements in a row of a box


@dataclasses.dataclass(frozen=True)
class Matrix:
    """A weight argument as matrices of bytes, one an expert, and the boxes that are copied of them.

    Attributes:
        operand: whose rows start on 16 bytes.
        experts, rows, row_bytes: its sizes.
        box_rows, box_bytes: of a box; what lies beyond a matrix reads as zeros. No bytes: nothing is copied.
    """

    operand: Operand
    experts: int
    rows: int
    row_bytes: int
    box_rows: int
    box_bytes: int

    def encode(self, address: int, experts: int) -> bytes:
        """The map of `experts` matrices from `address` on."""
        if self.box_bytes == 0:
            return bytes(MAP_BYTES)
        from cuda.bindings import driver

        _, _, expert_stride, row_stride = self.operand.fields
        if experts == 1:  # a stride that is not used must be valid all the same
            expert_stride = self.rows * row_stride
        word = 4 if self.box_bytes <= 4 * _MOST_WORDS else 8  # `Projection::WORD` of decode.cuh
        kinds = driver.CUtensorMapDataType
        kind = kinds.CU_TENSOR_MAP_DATA_TYPE_UINT32 if word == 4 else kinds.CU_TENSOR_MAP_DATA_TYPE_UINT64
        sizes, box = (self.row_bytes // word, self.rows, experts), (self.box_bytes // word, self.box_rows)
        swizzle = driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_NONE
        return _encoded(kind, address, sizes, (row_stride, expert_stride), box, swizzle)


def of_rows(address: int, sizes: tuple[int, int, int], strides: tuple[int, int], box_rows: int) -> bytes:
    """The map of bf16 rows, from which boxes of 64 columns come as WGMMA wants them, in its swizzle of 128 bytes.

    Args:
        address: on 16 bytes.
        sizes: columns, rows and matrices; what lies beyond them reads as zeros.
        strides: of rows and matrices, in bytes, multiples of 16 above 0.
        box_rows: of a box, up to 256.
    """
    from cuda.bindings import driver

    kind = driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
    swizzle = driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B
    return _encoded(kind, address, sizes, strides, (64, box_rows), swizzle)


def _encoded(
    kind: Any,
    address: int,
    sizes: tuple[int, int, int],
    strides: tuple[int, int],
    box: tuple[int, int],
    swizzle: Any,
) -> bytes:
    """A map of matrices; sizes and box, which is of one matrix, in elements of `kind`, strides in bytes."""
    from cuda.bindings import driver

    encoded = driver.cuTensorMapEncodeTiled(
        kind,
        len(sizes),
        address,
        [driver.cuuint64_t(size) for size in sizes],
        [driver.cuuint64_t(stride) for stride in strides],
        [driver.cuuint32_t(size) for size in (*box, 1)],
        [driver.cuuint32_t(1)] * len(sizes),
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        swizzle,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    return ctypes.string_at(ask(encoded).getPtr(), MAP_BYTES)


def encode(matrices: tuple[Matrix, ...], device: int) -> tuple[bytes, Tensor | None]:
    """Maps of all matrices: side by side for stacks, or with lists a table [experts, matrices, map] on the device."""
    if not any(matrix.operand.fields[1] for matrix in matrices):
        return b"".join(matrix.encode(matrix.operand.fields[0], matrix.experts) for matrix in matrices), None
    addresses = [matrix.operand.kept[-1].tolist() for matrix in matrices]
    maps = bytearray()
    for expert in range(max(map(len, addresses))):
        for matrix, of in zip(matrices, addresses, strict=True):
            maps += matrix.encode(of[expert], 1) if expert < len(of) else bytes(MAP_BYTES)
    table = torch.frombuffer(maps, dtype=torch.uint8)
    return bytes(MAP_BYTES * len(matrices)), persistent(lambda: table.to(f"cuda:{device}"), device)
