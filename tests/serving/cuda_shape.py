"""What vLLM does on NVIDIA, done on CPU: the MoE layer as an opaque node, VLLM_COMPILE, compile ranges, the AOT cache.

`install()` changes vLLM in this process before an engine is made; `calls` then counts the layer's calls by number of
tokens, those on real tensors only: traced into a graph it would see fake ones.
"""

from __future__ import annotations

import collections
from typing import Any

import torch
from torch._subclasses import FakeTensor

calls: collections.Counter[int] = collections.Counter()
"""Calls of our layers at run time, by number of tokens."""

COMPILATION = {"mode": 3, "compile_ranges_endpoints": [32], "compile_sizes": []}
"""Two graphs, for up to 32 tokens and for more."""


def install() -> None:
    """Restores what vLLM's CPU platform turns off; the plugin is registered by vLLM itself, later."""
    from vllm.compilation.passes.utility.fix_functionalization import FixFunctionalizationPass
    from vllm.config import CompilationMode
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
    from vllm.platforms.cpu import CpuPlatform

    from mxk_compile.integrations import vllm_quantization

    check = CpuPlatform.check_and_update_config.__func__  # type: ignore[attr-defined]

    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        compilation = vllm_config.compilation_config
        asked = compilation.mode
        check(cls, vllm_config)
        compilation.mode, compilation.backend = asked, "inductor"
        assert asked == CompilationMode.VLLM_COMPILE

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)  # type: ignore[assignment]
    MoERunner._select_forward = lambda self: (
        torch.ops.vllm.moe_forward if self._shared_experts is None else torch.ops.vllm.moe_forward_shared
    )
    FixFunctionalizationPass.__call__ = lambda self, graph: None  # asks for ops that the CPU build lacks

    apply = vllm_quantization.PackedMethod.apply

    def counted(self: Any, layer: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(x, FakeTensor) and not torch.compiler.is_compiling():
            calls[x.shape[0]] += 1
        return apply(self, layer, x, *args, **kwargs)

    vllm_quantization.PackedMethod.apply = counted
