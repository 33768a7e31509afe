"""CUDA kernels of `mxk::moe` and `mxk::project`, compiled where they run: for Hopper, and not run yet, for Blackwell.

moe_decode.cu   few rows an expert: the layer, or an INT4 projection (decode_project.py), in one launch; maps.py
                describes weights to its tensor copies, int4_splits.py reckons how INT4 is divided
prefill.cu      many: tensor-core products of rows sorted by routing.cu
devices.py      which devices they serve, and how those differ: the tensor cores' instruction, shared memory
build.py        sources to machine code; driver.py launches it; operands.py describes tensors to it
grouped.py      `mxk::project`: one of those products by itself, rows brought by groups.cu
repack.py       INT4 weights that are packed along the outputs; scales.py asks scales once what their bytes are up to
schedule.py     which of them runs a call; tiles.py: prefill's tile sizes; tune.py: `mxk tune`
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import torch
from torch import Tensor

from mxk_compile.errors import KernelError
from mxk_compile.kernels.cuda import build, decode, dequant, devices, prefill, repack, scales
from mxk_compile.kernels.cuda.operands import ALIGNMENT, FLOATS, Call, Operands
from mxk_compile.kernels.cuda.schedule import Problem, Schedule, another, choose
from mxk_compile.kernels.desc import KernelConfig, MoEDesc
from mxk_compile.meta.dequant import check_dequant
from mxk_compile.ops.formats import mxfp4
from mxk_compile.ops.moe import Weights


def unavailable(device: int | None = None) -> str | None:
    """None if a device, by default the current one, and this installation can run the kernels, else the reason."""
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    if torch.version.hip is not None:  # some of whose devices say 9.0 too
        return "torch was built for ROCm; allowed: CUDA"
    return devices.refusal(device) or build.missing()


def supports(desc: MoEDesc) -> str | None:
    """None if `moe` runs calls of this description here, else the reason in one line."""
    sizes = desc.hidden_size, desc.intermediate_size
    if desc.dtype != torch.bfloat16:
        reason = f"hidden_states are {desc.dtype}; allowed: torch.bfloat16"
    elif any(size == 0 or size % 32 for size in sizes):
        reason = f"K = {sizes[0]}, I = {sizes[1]}; allowed: multiples of 32 above 0"
    elif desc.num_experts > prefill.MOST_EXPERTS or not 1 <= desc.top_k <= prefill.MOST_TOP_K:
        reason = f"E = {desc.num_experts}, k = {desc.top_k}; allowed: E up to 1024, k of 1 to 64"
    else:
        missing = unavailable(desc.device_index)
        if missing is None:
            return None
        reason = missing
    return f"CUDA kernels: {reason}"


def config(desc: MoEDesc) -> KernelConfig:
    """The kernel that runs `desc`; its schedule depends on the number of tokens."""
    return KernelConfig("cuda", "nvrtc", devices.served(desc.device_index).architecture)


def problem_of(desc: MoEDesc, num_tokens: int) -> Problem:
    """What the schedule of a call with this many tokens may depend on."""
    sizes = (desc.num_experts, desc.intermediate_size, desc.hidden_size, desc.top_k)
    name, kind = torch.cuda.get_device_name(desc.device_index), devices.served(desc.device_index)
    return Problem(name, desc.weight_format, *sizes, num_tokens, kind)


def plan(desc: MoEDesc, num_tokens: int) -> Schedule:
    """What runs a call with this many tokens."""
    return choose(problem_of(desc, num_tokens))


class Prepared:
    """A call described once: to be made again for as long as layouts, dtypes and weight addresses are the same.

    It runs on torch's current stream. Nothing waits for the device, except that the first call with a layer's weights
    reads whether its scales are small.

    Attributes:
        reusable: False where a copy of a weight was made, which holds for one call only.
    """

    __slots__ = ("_copies_x", "_device", "_out", "_runner", "_scales", "_turned", "reusable")

    def __init__(
        self,
        desc: MoEDesc,
        hidden_states: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        *weights: Any,
        alpha: float = 1.0,
        limit: float | None = None,
        experts_min: int = 0,
        schedule: Schedule | None = None,
    ) -> None:
        """Prepares a call that `supports` accepts.

        Args:
            desc: the call's description; tensors, alpha, limit and experts_min as in ops/moe.py.
            schedule: in place of the chosen one.

        Raises:
            KernelError: sources do not compile, or lists of weights are first met inside a CUDA graph.
        """
        device, num_tokens = hidden_states.get_device(), hidden_states.shape[0]
        weights = (*weights, *(None,) * (8 - len(weights)))
        with torch.cuda.device(device):
            self._turned: tuple[Any, ...] | None = None
            if desc.pack_dim == "output":
                desc = dataclasses.replace(desc, pack_dim="input")
                self._turned = weights = repack.along_inputs(weights)
            if torch.cuda.is_current_stream_capturing() and any(
                isinstance(weight, (list, tuple)) and weight for weight in weights
            ):
                given = "a first call with these lists of weights inside a CUDA graph"
                raise KernelError(
                    "mxk::moe.lists", given, "a call outside before", "run the layer once before capturing"
                )
            self._device = device
            self._copies_x = hidden_states.stride(1) != 1
            # Only MXFP4's unpacking depends on what scales hold.
            self._scales = scales.Watch((weights[1], weights[3])) if desc.weight_format == "mxfp4" else None
            x = hidden_states.contiguous() if self._copies_x else hidden_states
            self._out: tuple[int, ...] | None = None
            if num_tokens == 0:
                self._out = (0, *([desc.top_k] if desc.per_route else []), desc.hidden_size)
                self.reusable = False
                return
            call = Call(
                *(desc, Operands.of(desc, weights), alpha, math.inf if limit is None else limit, experts_min),
                *(self._scales is None or self._scales.small is True, device, num_tokens),
                *(x.stride(0), topk_ids.stride()),
                *(topk_weights.stride(), (topk_ids.element_size(), topk_ids.dtype.is_signed)),
                FLOATS[topk_weights.dtype],
                x.data_ptr() % ALIGNMENT == 0 and x.stride(0) * x.element_size() % ALIGNMENT == 0,
            )
            problem = problem_of(desc, num_tokens)
            chosen = schedule or choose(problem)
            runs = functools.partial(decode.runs, call, problem)
            room = chosen.has_room(num_tokens * desc.top_k)
            if chosen.kernel == "decode" and not (room and runs(chosen.macros)):
                chosen = another(problem, runs)
            if chosen.kernel == "decode":
                self._runner: decode.Decode | prefill.Prefill = decode.Decode(call, chosen.macros)
            else:
                self._runner = prefill.Prefill(call, chosen.sizes)
        self.reusable = not call.operands.copied and self._turned is None

    def current(self, w13_scale: Weights, w2_scale: Weights) -> bool:
        """Whether what was found out about the scales still holds: their bytes may have changed in place."""
        return self._scales is None or self._scales.current(w13_scale, w2_scale)

    def __call__(self, hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """`mxk::moe` with the layouts and weight addresses given before; raises KernelError if a launch fails."""
        if self._out is not None:
            return hidden_states.new_empty(self._out)
        device = self._device
        if self._copies_x:
            hidden_states = hidden_states.contiguous()
        if torch._C._cuda_getDevice() != device:
            with torch.cuda.device(device):
                stream = torch._C._cuda_getCurrentRawStream(device)
                return self._runner(stream, hidden_states, topk_ids, topk_weights)
        stream = torch._C._cuda_getCurrentRawStream(device)
        return self._runner(stream, hidden_states, topk_ids, topk_weights)


def mxfp4_dequant(weight: Tensor, scale: Tensor) -> Tensor:
    """`mxk::mxfp4_dequant` on a CUDA device; where the kernel cannot run, torch's table look-up of ops/formats."""
    shape = check_dequant(weight, scale)
    if shape[-1] % mxfp4.BLOCK or unavailable(weight.get_device()) is not None:
        return mxfp4.unpack(weight, scale, torch.bfloat16)
    return dequant.dequant(weight, scale)
