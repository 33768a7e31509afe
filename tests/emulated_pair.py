"""One MoE call through a gate/up and a down kernel on the emulator, without torch's dispatcher."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mxk_compile.kernels import tpc
from mxk_compile.kernels.tpc import emulate, emulated_ops
from mxk_compile.kernels.tpc.signatures import KERNELS
from mxk_compile.ops.formats.nibbles import as_words, pack_nibbles
from mxk_compile.testing import MoECase


def run_pair(
    case: MoECase, kernels: tuple[str, str], builds: tuple[emulated_ops.Build, emulated_ops.Build]
) -> tuple[Tensor, tuple[emulate.Counters, emulate.Counters]]:
    """Result of the down kernel and the counters of both; raises KernelError as the emulator does."""
    arguments: dict[str, Any] = {
        "x": tpc.chunk_order(case.hidden_states),
        "ids": case.topk_ids.to(torch.int32),
        "rw": case.topk_weights.float(),
        "w13": case.w13,
        "s13": case.w13_scale,
        "w2": case.w2,
        "s2": case.w2_scale,
        **{name: case.attributes[name] for name in ("experts_min", "alpha", "limit")},
    }
    if case.w13_bias is not None and case.w2_bias is not None:
        arguments |= {"b13": case.w13_bias.float(), "b2": case.w2_bias.float()}
    if case.w13_zero is not None and case.w2_zero is not None:  # the first expert's, for all
        arguments |= {"z13": as_words(pack_nibbles(case.w13_zero[0]))}
        arguments |= {"z2": as_words(pack_nibbles(case.w2_zero[0]))}
    first, second = (KERNELS[name] for name in kernels)
    arguments["a"], gate_up = emulated_ops.call(first, arguments, builds[0])
    result, down = emulated_ops.call(second, arguments, builds[1])
    return result, (gate_up, down)
