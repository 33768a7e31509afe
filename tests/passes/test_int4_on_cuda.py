"""Both forms of the stock INT4 graph on a CUDA device, of which only fake tensors are needed: one fused node each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from mxk_compile.kernels.cuda import build
from mxk_compile.passes import run_passes

stock = torch.ops.hpu.mixture_of_experts
convert = torch.ops.hpu.convert_from_uint4


def conversions(
    x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, s13: Tensor, z13: Tensor, *down: Tensor
) -> Tensor:
    lists = [
        [convert(*parts, torch.bfloat16) for parts in zip(*(t.unbind(0) for t in stacks), strict=True)]
        for stacks in ((w13, s13, z13), down)
    ]
    return stock.fused_weights(x, ids, weights, *lists, False, "silu", 0, 1)


def native(
    x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, s13: Tensor, z13: Tensor, *down: Tensor
) -> Tensor:
    lists = [t.unbind(0) for t in (w13, down[0], s13, down[1])]
    return stock.int4_fused_weights(
        x, ids, weights, *lists, permuted_weights=False, activation="silu", experts_min=0, experts_max=1
    )


@pytest.mark.parametrize(
    ("form", "overload", "weight_format"),
    [(conversions, "fused_weights", "uint4"), (native, "int4_fused_weights", "int4")],
)
def test_both_forms_become_the_fused_node(
    form: Any, overload: str, weight_format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="cuda")

    with FakeTensorMode():
        graph = make_fx(form)(
            *(empty(4, 128), empty(4, 2, dtype=torch.int64), empty(4, 2)),
            *(empty(2, 128, 16, dtype=torch.int32), empty(2, 4, 128), empty(2, 4, 16, dtype=torch.int32)),
            *(empty(2, 64, 16, dtype=torch.int32), empty(2, 2, 128), empty(2, 2, 16, dtype=torch.int32)),
        )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=None: (9, 0))
    monkeypatch.setattr(build, "missing", lambda: None)
    report = run_passes(graph)
    (node,) = report.nodes
    assert (node.reason, node.stock_op, str(node.kernel)) == (None, overload, "cuda/nvrtc/sm_90a")
    (fused,) = (n for n in graph.graph.nodes if n.op == "call_function" and "mxk" in str(n.target))
    assert fused.target is torch.ops.mxk.moe.default
    assert (fused.kwargs["weight_format"], fused.kwargs["pack_dim"]) == (weight_format, "output")
    assert fused.meta["val"].device.type == "cuda"
    assert not [n for n in graph.graph.nodes if "hpu" in str(n.target)]
