"""CUDA kernels of `mxk::moe` for Hopper: the checkpoint's MXFP4 bytes, compiled where they run.

moe_decode.cu   few rows an expert: the layer in one launch
prefill.cu      many: tensor-core products of rows sorted by routing.cu
build.py        sources to machine code; driver.py launches it; operands.py describes tensors to it
schedule.py     which of them runs a call
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from mxk_compile.errors import KernelError
from mxk_compile.kernels.cuda import build, decode, dequant, prefill, scales
from mxk_compile.kernels.cuda.operands import Operands
from mxk_compile.kernels.cuda.schedule import Problem, Schedule, choose
from mxk_compile.kernels.desc import KernelConfig, MoEDesc
from mxk_compile.meta.dequant import check_dequant
from mxk_compile.ops.formats import mxfp4

_CAPABILITY = (9, 0)


def unavailable() -> str | None:
    """None if the current device and this installation can run the kernels, else the reason."""
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    capability = torch.cuda.get_device_capability()
    if capability != _CAPABILITY:
        name = torch.cuda.get_device_name()
        return f"{name} has compute capability {capability[0]}.{capability[1]}; allowed: 9.0 (Hopper)"
    return build.missing()


def supports(desc: MoEDesc) -> str | None:
    """None if `moe` runs calls of this description here, else the reason in one line."""
    sizes = desc.hidden_size, desc.intermediate_size
    if desc.weight_format != "mxfp4":
        reason = f"weight_format is {desc.weight_format!r}; allowed: 'mxfp4'"
    elif desc.dtype != torch.bfloat16:
        reason = f"hidden_states are {desc.dtype}; allowed: torch.bfloat16"
    elif any(size == 0 or size % 32 for size in sizes):
        reason = f"K = {sizes[0]}, I = {sizes[1]}; allowed: multiples of 32 above 0"
    elif desc.num_experts > prefill.MOST_EXPERTS or not 1 <= desc.top_k <= prefill.MOST_TOP_K:
        reason = f"E = {desc.num_experts}, k = {desc.top_k}; allowed: E up to 1024, k of 1 to 64"
    else:
        missing = unavailable()
        if missing is None:
            return None
        reason = missing
    return f"CUDA kernels: {reason}"


def config(desc: MoEDesc) -> KernelConfig:
    """The kernel that runs `desc`; its schedule depends on the number of tokens."""
    return KernelConfig("cuda", "nvrtc", build.ARCHITECTURE)


def plan(desc: MoEDesc, num_tokens: int, device: int | None = None) -> Schedule:
    """What runs a call with this many tokens on a device, by default the current one."""
    sizes = (desc.num_experts, desc.intermediate_size, desc.hidden_size, desc.top_k)
    return choose(Problem(torch.cuda.get_device_name(device), desc.weight_format, *sizes, num_tokens))


class Prepared:
    """Calls of one description on one layer's weights: what was found out about them, and a runner for each schedule.

    Attributes:
        reusable: whether it may serve later calls: not where a weight had to be copied.
    """

    def __init__(
        self,
        desc: MoEDesc,
        device: int,
        weights: tuple[Any, ...],
        alpha: float,
        limit: float | None,
        experts_min: int,
    ) -> None:
        capturing = torch.cuda.is_current_stream_capturing()
        if capturing and any(isinstance(weight, (list, tuple)) and weight for weight in weights):
            given = "a first call with these lists of weights inside a CUDA graph"
            raise KernelError(
                "mxk::moe.lists", given, "a call outside before", "run the layer once before capturing"
            )
        self.desc, self.device, self._scales = desc, device, (weights[1], weights[3])
        self._operands = Operands.of(desc, weights)
        self._scalars = (alpha, math.inf if limit is None else limit, experts_min)
        self.reusable = not self._operands.copied
        self._runners: dict[tuple[Schedule, bool], decode.Decode | prefill.Prefill] = {}
        self._schedules: dict[int, Schedule] = {}

    def runner(self, num_tokens: int) -> decode.Decode | prefill.Prefill:
        """What runs a call with this many tokens; compiles it if need be."""
        chosen = self._schedules.get(num_tokens)
        if chosen is None:
            chosen = self._schedules[num_tokens] = plan(self.desc, num_tokens, self.device)
        return self.runner_of(chosen)

    def runner_of(self, chosen: Schedule) -> decode.Decode | prefill.Prefill:
        """What runs calls by a schedule; compiles it if need be."""
        small = scales.small(self._scales) is True
        runner = self._runners.get((chosen, small))
        if runner is None:
            if chosen.kernel == "decode":
                runner = decode.Decode(self.desc, self._operands, *self._scalars, small, chosen.macros)
            else:
                runner = prefill.Prefill(self.desc, self._operands, *self._scalars, small, chosen.sizes)
            self._runners[chosen, small] = runner
        return runner


_prepared: dict[Any, Prepared] = {}
_MOST_PREPARED = 4096


def _identity(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.data_ptr(), value.shape, value.stride(), value.dtype
    return (*map(Tensor.data_ptr, value), value[0].stride()) if value else None


def moe(
    desc: MoEDesc,
    hidden_states: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    *weights: Any,
    alpha: float = 1.0,
    limit: float | None = None,
    experts_min: int = 0,
) -> Tensor:
    """`mxk::moe` or `mxk::moe.lists` on a CUDA device, on torch's current stream.

    Nothing waits for the device, except that the first call with a layer's weights reads whether its scales are small.

    Args:
        desc: the call's description, which `supports` accepts; the other arguments as in ops/moe.py.

    Raises:
        KernelError: sources do not compile, a launch fails, or lists of weights are first met inside a CUDA graph.
    """
    device = hidden_states.device.index
    if hidden_states.stride(1) != 1:
        hidden_states = hidden_states.contiguous()
    if torch._C._cuda_getDevice() != device:
        with torch.cuda.device(device):
            return _run(
                device, desc, hidden_states, topk_ids, topk_weights, weights, alpha, limit, experts_min
            )
    return _run(device, desc, hidden_states, topk_ids, topk_weights, weights, alpha, limit, experts_min)


def _run(
    device: int,
    desc: MoEDesc,
    x: Tensor,
    ids: Tensor,
    router: Tensor,
    weights: tuple[Any, ...],
    *scalars: Any,
) -> Tensor:
    num_tokens = x.shape[0]
    if num_tokens == 0:
        return x.new_empty((0, desc.top_k, desc.hidden_size) if desc.per_route else (0, desc.hidden_size))
    key = (device, desc, scalars, *map(_identity, weights))
    prepared = _prepared.get(key)
    if prepared is None:
        prepared = Prepared(desc, device, (*weights, *(None,) * (8 - len(weights))), *scalars)
        if prepared.reusable:
            if len(_prepared) >= _MOST_PREPARED:
                _prepared.clear()
            _prepared[key] = prepared
    stream = torch._C._cuda_getCurrentRawStream(device)
    return prepared.runner(num_tokens)(device, stream, x, ids, router)


def mxfp4_dequant(weight: Tensor, scale: Tensor) -> Tensor:
    """`mxk::mxfp4_dequant` on a CUDA device; where the kernel cannot run, torch's table look-up of ops/formats."""
    shape = check_dequant(weight, scale)
    if shape[-1] % mxfp4.BLOCK or unavailable() is not None:
        return mxfp4.unpack(weight, scale, torch.bfloat16)
    return dequant.dequant(weight, scale)
