"""humming-kernels (0.1.20): its products, from a repacked copy, with their schedules chosen by itself.

Of a layer, its two indexed products; between and after them, activation and weighted sum are one compiled torch kernel
each. The sorted route lists, which a server makes anew for each call, are made once a routing here, before it is timed:
they are not in its figures. Of the `chord` suite, one product, indexed or grouped.

It compiles each schedule by NVRTC when it first meets it, about a second, and Inductor both torch kernels: a process's
first row takes ten seconds more than the next ones.

    pip install humming-kernels==0.1.20
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import json
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mxk_compile.bench.chord import TOP_K, Call
from mxk_compile.ops.moe import activate, split_rows
from mxk_compile.projections import align
from mxk_compile.testing import MoECase

from . import Unsuitable

NAME = "humming-kernels, two products and torch between"
DEVICE, CAPTURABLE = "cuda", True
Schedule = dict[str, Any]
_TILE = 128  # its schedules want the rows of a weight to be a multiple
_FEW_ROWS = 6  # of an expert, which seldom has more than 8 then
_GROUPED = {"masked": "grouped_masked", "contiguous": "grouped_contiguous"}
_MOST_KINDS = 64  # of layers in one process, to compile for; torch stops at 8 and runs the rest uncompiled


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


def small_tiles(rows_per_expert: float) -> Schedule:
    """Its mma.sync schedule with the fewest rows a tile, on some calls of few rows faster than what it chooses."""
    rows = 8 if rows_per_expert <= _FEW_ROWS else 16
    return {
        "mma_type": "mma",
        "block_shape": (rows, 128, 64),
        "warp_shape": (rows, 64, 32),
        "num_stages": 4,
        "num_ctas_per_sm": 4,
        "use_stream_k": True,
        "use_tma": False,
        "use_warp_spec": False,
    }


class Product:
    """One projection: [rows of its input] x the experts' weights [E, N, K] -> [rows, N]."""

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

    def indexed(
        self, ids: Tensor, num_experts: int, top_k: int, schedule: Schedule | None = None
    ) -> Callable[[Tensor], Tensor]:
        """The product for one routing; its result keeps zeros where a route is not local."""
        rows = max(int((ids < num_experts).sum()), 1)
        chosen = schedule or self.own_schedule(rows, "indexed")
        sorted_ids, expert_ids, padded = align(ids, num_experts, chosen["block_shape"][0])
        routing = {"sorted_ids": sorted_ids, "expert_ids": expert_ids, "num_tokens_padded": padded}
        return self._launcher(rows, "indexed", chosen, ids.numel(), top_k, routing)

    def grouped(self, kind: str, rows: int, counts: Tensor, num_outputs: int) -> Callable[[Tensor], Tensor]:
        """The product of rows that lie by experts, `counts` [E] of each, in a result of `num_outputs` rows."""
        layout = counts.int()
        if kind == "grouped_contiguous":  # where an expert's rows begin, and their end
            layout = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).long()
        chosen = self.own_schedule(rows, kind)
        return self._launcher(rows, kind, chosen, num_outputs, 1, {"expert_layout": layout})

    def own_schedule(self, rows: int, kind: str) -> Schedule:
        """What it chooses for that many rows of all experts together."""
        from humming.tune import get_heuristics_config

        return dict(get_heuristics_config(self._layer, shape_m=rows, gemm_type=kind, device=0))

    def compiled(self, kind: str, chosen: Schedule) -> Tensor:
        """Its handle of the kernel. The first time a process of its own compiles: threads may ask at once."""
        from humming.kernel.humming import HummingKernel

        gemm = json.dumps({"gemm_type": kind})
        handle: Tensor = HummingKernel.prepare_kernels(self._layer.to_str(), gemm, chosen, 0)
        return handle

    def _launcher(
        self,
        rows: int,
        kind: str,
        chosen: Schedule,
        num_outputs: int,
        top_k: int,
        routing: dict[str, Tensor],
    ) -> Callable[[Tensor], Tensor]:
        from humming import ops

        configs = self.compiled(kind, chosen)
        out = torch.zeros(num_outputs, self.outputs, dtype=torch.bfloat16, device=self._weight.device)

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
                **routing,
            )
            return out

        return run


@functools.cache
def _between(
    row_order: str, activation: str, alpha: float, limit: float
) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
    """Bias and activation of [routes, rows of w13], compiled once for all copies of a layer and numbers of tokens."""

    @torch.compile
    def between(h: Tensor, expert: Tensor, bias: Tensor | None) -> Tensor:
        if bias is not None:
            h = h + bias[expert]
        gate, up = split_rows(h.float(), row_order)
        return activate(gate, up, activation, alpha, limit).bfloat16()

    return between


@torch.compile
def _finish(y: Tensor, expert: Tensor, weights: Tensor, bias: Tensor | None) -> Tensor:
    if bias is not None:
        y = y + bias[expert]
    return (y.view(*weights.shape, -1).float() * weights[..., None]).sum(1).bfloat16()


def layer(case: MoECase) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """See the package."""
    kept = case.attributes
    num_experts = len(case.w2)
    if kept["per_route"] or kept["pack_dim"] != "input" or case.w13_zero is not None:
        raise Unsuitable(
            "MXFP4, or INT4 with zero point 8, packed along the input and summed over the routes"
        )
    first = Product(case.w13, case.w13_scale, kept["weight_format"])
    second = Product(case.w2, case.w2_scale, kept["weight_format"])
    between = _between(kept["row_order"], kept["activation"], kept["alpha"], kept["limit"])
    bound: dict[int, Any] = {}

    def run(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        if ids.data_ptr() not in bound:
            local = ids < num_experts
            expert = torch.where(local, ids, 0).flatten()
            share = (weights.float() * local).contiguous()
            calls = first.indexed(ids, num_experts, ids.shape[1]), second.indexed(ids, num_experts, 1)
            # The routing is kept, and with it its address.
            bound[ids.data_ptr()] = (*calls, expert, share, ids)
        product, down, expert, share, _ = bound[ids.data_ptr()]
        with torch._dynamo.config.patch(recompile_limit=_MOST_KINDS):
            a = between(_rows_vary(product(x)), _rows_vary(expert), case.w13_bias)
            return _finish(_rows_vary(down(a)), _rows_vary(expert), _rows_vary(share), case.w2_bias)

    return run


def _rows_vary(tensor: Tensor) -> Tensor:
    torch._dynamo.maybe_mark_dynamic(tensor, 0)
    return tensor


def projection(call: Call) -> Call:
    """The same call of the `chord` suite, made by the peer into a result of its own."""
    product = Product(call.weight.weight, call.weight.scale, call.weight.weight_format)
    num_experts, kind = call.weight.num_experts, call.scenario.kind
    if kind == "indexed":
        run = product.indexed(call.experts.view(-1, TOP_K), num_experts, call.top_k)
    else:
        counts = torch.bincount(call.experts[call.experts >= 0], minlength=num_experts)
        run = product.grouped(_GROUPED[kind], call.scenario.rows, counts, len(call.out))
    return dataclasses.replace(call, run=lambda: run(call.x), out=run(call.x))
