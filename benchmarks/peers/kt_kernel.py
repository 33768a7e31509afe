"""kt-kernel, the CPU experts of KTransformers (0.7), with its own pool of threads, which spins between calls.

It has no biases, so not gpt-oss' layer. Which of its kernels runs is its own choice. It prints to stdout, among the
rows of `mxk bench`; bench_peers.py keeps that apart.

    pip install --no-deps kt-kernel==0.7.2 gguf   # with its dependencies it brings another torch
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mxk_compile.testing import MoECase

from . import GROUP, Unsuitable, matrices, need_local_routes

NAME = "kt-kernel"
DEVICE, CAPTURABLE = "cpu", False
_MOST_TOKENS = 512  # that its buffers are made for


def version() -> str:
    """Of the peer, and which of its builds this processor gets."""
    import kt_kernel

    return f"{importlib.metadata.version('kt-kernel')}, {kt_kernel.__cpu_variant__}"


def missing() -> str | None:
    """None, or why it cannot run."""
    for name in ("kt_kernel", "gguf"):
        if importlib.util.find_spec(name) is None:
            return f"{name.replace('_', '-')} is not installed"
    try:
        import kt_kernel  # noqa: F401
    except ImportError as error:
        return f"it does not load: {error}"
    return None


@functools.cache
def _pool(threads: int) -> Any:
    from kt_kernel import kt_kernel_ext

    config = kt_kernel_ext.WorkerPoolConfig()
    config.subpool_count, config.subpool_numa_map, config.subpool_thread_count = 1, [0], [threads]
    return kt_kernel_ext.CPUInfer(config)


def layer(case: MoECase) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """See the package."""
    from kt_kernel import kt_kernel_ext
    from kt_kernel.utils import amx

    need_local_routes(case)
    parts = matrices(case)
    if case.w13_bias is not None or case.attributes["activation"] != "silu":
        raise Unsuitable("SiLU without biases")
    num_experts, hidden_size, half = case.w2.shape
    pool, top_k = _pool(torch.get_num_threads()), case.topk_ids.shape[1]
    on_gpu = torch.zeros(num_experts, dtype=torch.bool)
    config = kt_kernel_ext.moe.MOEConfig(num_experts, top_k, hidden_size, half * 2, on_gpu.data_ptr())
    config.pool, config.max_len = pool.backend_, _MOST_TOKENS
    mxfp4 = case.attributes["weight_format"] == "mxfp4"
    scales = {}
    for name, part in parts.items():
        scales[name] = torch.exp2(part.scale.float() - 127).bfloat16() if mxfp4 else part.scale
        setattr(config, f"{name}_projs", [[codes.data_ptr() for codes in part.codes]])
        setattr(config, f"{name}_scales", [[scale.data_ptr() for scale in scales[name]]])
    config.quant_config.bits, config.quant_config.group_size, config.quant_config.zero_point = 4, GROUP, False
    kind = amx._select_mxfp4_backend() if mxfp4 else amx._select_rawint4_backend(GROUP)
    experts = kind(config)
    order = torch.arange(num_experts)
    pool.submit(experts.load_weights_task(order.data_ptr()))
    pool.sync()

    read = parts, scales, on_gpu  # by its kernels in each call: they must live as long

    def run(x: Tensor, ids: Tensor, weights: Tensor, _: Any = read) -> Tensor:
        out, count = torch.empty_like(x), torch.tensor([len(x)], dtype=torch.int32)
        chosen, factors = ids.long().contiguous(), weights.float().contiguous()
        places = (tensor.data_ptr() for tensor in (chosen, factors, x, out))
        pool.submit(experts.forward_task(count.data_ptr(), top_k, *places, False))
        pool.sync()
        return out

    return run
