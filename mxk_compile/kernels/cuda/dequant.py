"""Launch of dequant.cu: `mxk::mxfp4_dequant` on a CUDA device."""

from __future__ import annotations

import functools
import struct

import torch
from torch import Tensor

from mxk_compile.kernels.cuda.build import build
from mxk_compile.kernels.cuda.devices import Device, served
from mxk_compile.kernels.cuda.driver import Kernel, Library

_DEQUANT = struct.Struct("=3Qq")  # struct Dequant of dequant.cu
_THREADS, _WORDS = 256, 8
_WORD_BYTES = 4


@functools.cache
def _kernel(device: Device) -> Kernel:
    return Kernel(Library(build("dequant.cu", {}, device)).kernel("mxfp4_dequant"), _DEQUANT, (), _THREADS)


def dequant(weight: Tensor, scale: Tensor) -> Tensor:
    """bf16 [..., K] of uint8 [..., K / 2] or int32 [..., K / 8] and uint8 scales [..., K / 32], K a multiple of 32."""
    device = weight.device.index
    packed, scales = weight.contiguous(), scale.contiguous()
    if packed.data_ptr() % _WORD_BYTES:
        packed = packed.clone()
    values = 2 * packed.element_size()
    out = torch.empty(
        (*weight.shape[:-1], weight.shape[-1] * values), dtype=torch.bfloat16, device=weight.device
    )
    count = packed.numel() * packed.element_size() // _WORD_BYTES
    if count:
        with torch.cuda.device(device):
            stream = torch._C._cuda_getCurrentRawStream(device)
            blocks = -(-count // (_THREADS * _WORDS))
            argument = _DEQUANT.pack(packed.data_ptr(), scales.data_ptr(), out.data_ptr(), count)
            _kernel(served(device)).launch(device, stream, blocks, argument)
    return out
