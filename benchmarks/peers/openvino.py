"""OpenVINO's CPU plugin: a compiled model for each expert, its weights kept packed, and a loop over the hit experts.

A whole layer in the form that the plugin turns into its own expert multiplication (GatherMatmul) took longer with INT4
weights, and has MXFP4 ones unpacked to bf16. Activations stay fp32: rounded to bf16, the default, was no faster.

    pip install openvino==2026.4.1
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mxk_compile.testing import MoECase

from . import GROUP, Matrix, matrices

NAME = "openvino, a model an expert"
DEVICE, CAPTURABLE = "cpu", False


def version() -> str:
    """Of the peer."""
    return importlib.metadata.version("openvino")


def missing() -> str | None:
    """None, or why it cannot run."""
    return None if importlib.util.find_spec("openvino") else "openvino is not installed"


@functools.cache
def _core() -> Any:
    import openvino

    return openvino.Core()


def layer(case: MoECase) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """See the package."""
    parts = matrices(case)
    requests = [_expert(parts, e, case.attributes) for e in range(len(case.w2))]

    def run(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        # The models read the memory of `parts`, which lives as long as this function names it.
        num_experts = len(parts["down"].codes)
        total = torch.zeros(x.shape, dtype=torch.float32)
        rows = x.float()
        for e in ids[ids < num_experts].unique().tolist():
            token, slot = torch.where(ids == e)
            (y,) = requests[e].infer(rows[token].numpy(), share_inputs=True, share_outputs=True).values()
            total.index_add_(0, token, torch.from_numpy(y) * weights[token, slot, None].float())
        return total.bfloat16()

    return run


def _expert(parts: dict[str, Matrix], e: int, attributes: dict[str, Any]) -> Any:
    """An inference request of one expert: [tokens, K] fp32 to the same."""
    import openvino
    from openvino import opset13 as ops

    def multiply(values: Any, part: str) -> Any:
        matrix = parts[part]
        product = ops.matmul(values, _weight(matrix, e), False, True)
        return (
            product if matrix.bias is None else ops.add(product, ops.constant(matrix.bias[e].numpy()[None]))
        )

    x = ops.parameter([-1, parts["gate"].codes.shape[2] * 2], np.float32)
    gate, up = multiply(x, "gate"), multiply(x, "up")
    alpha, limit = 1.0, attributes["limit"]
    if attributes["activation"] != "silu" and limit is not None:
        gate, up = ops.minimum(gate, ops.constant(np.float32(limit))), ops.clamp(up, -limit, limit)
    if attributes["activation"] == "swiglu_oai":
        alpha, up = attributes["alpha"], ops.add(up, ops.constant(np.float32(1)))
    gated = ops.multiply(ops.swish(gate, ops.constant(np.float32(alpha))), up)
    model = openvino.Model([multiply(gated, "down")], [x])
    settings = {
        "NUM_STREAMS": "1",
        "INFERENCE_NUM_THREADS": str(torch.get_num_threads()),
        "ENABLE_CPU_PINNING": False,
        "INFERENCE_PRECISION_HINT": "f32",
    }
    return _core().compile_model(model, "CPU", settings).create_infer_request()


def _weight(matrix: Matrix, e: int) -> Any:
    """[rows, columns] fp32 as a product that the plugin recognises and leaves packed: codes times scales."""
    import openvino
    from openvino import opset13 as ops

    codes, scale = matrix.codes[e], matrix.scale[e]
    (rows, groups), kinds = scale.shape, openvino.Type

    def constant(values: Tensor, kind: Any, columns: int) -> Any:
        tensor = openvino.Tensor(values.numpy(), openvino.Shape([rows, groups, columns]), kind)
        return ops.constant(tensor)

    if scale.dtype == torch.uint8:
        values = ops.convert(constant(codes, kinds.f4e2m1, GROUP), np.float32)
        weight = ops.multiply(values, ops.convert(constant(scale, kinds.f8e8m0, 1), np.float32))
    else:
        eight = ops.constant(np.full((1, 1, 1), 8, np.float16))
        values = ops.subtract(ops.convert(constant(codes, kinds.u4, GROUP), np.float16), eight)
        weight = ops.multiply(values, ops.constant(scale.half().numpy()[..., None]))
    weight = ops.reshape(weight, ops.constant(np.array([rows, groups * GROUP])), False)
    return weight if scale.dtype == torch.uint8 else ops.convert(weight, np.float32)
