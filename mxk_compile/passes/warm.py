"""Eager warm registration: every op of ours that a graph uses is called once before the graph first runs.

A compiled graph never makes the first eager call of an op, on which Gaudi's PT2 custom ops register their kernel
("isn't registered in KernelRegistry" otherwise); so one tiny call is made here, once per op and device in a process.
On CPU it opens the kernel library before the first run.
"""

from __future__ import annotations

import contextlib
import logging
import sys

import torch
from torch import fx

from mxk_compile.errors import KernelError
from mxk_compile.kernels import tpc
from mxk_compile.kernels.tpc.signatures import KERNELS
from mxk_compile.passes.arguments import fake_value

_logger = logging.getLogger("mxk_compile")

_warmed: set[tuple[str, str]] = set()

_GAUDI = "custom_op::"

OPS = ("mxk::moe", "mxk::moe.lists", *(_GAUDI + name for name in KERNELS))
"""Our ops that a graph may hold, by qualified name; `mxk::stack` only looks up an address."""


def call_smallest(name: str, device: str) -> None:
    """Calls one of `OPS` on one token and one expert, the smallest sizes that it takes, all bytes zero."""
    if name.startswith(_GAUDI):
        kernel = KERNELS[name.removeprefix(_GAUDI)]
        getattr(torch.ops.custom_op, kernel.name)(*tpc.smallest_arguments(kernel, device))
        return
    routing = (
        torch.zeros(1, 32, dtype=torch.bfloat16, device=device),
        torch.zeros(1, 1, dtype=torch.int32, device=device),
        torch.zeros(1, 1, dtype=torch.bfloat16, device=device),
    )
    shapes = ((1, 64, 16), (1, 64, 1), (1, 32, 16), (1, 32, 1))
    weights = [torch.zeros(shape, dtype=torch.uint8, device=device) for shape in shapes]
    attributes = {"weight_format": "mxfp4", "row_order": "gate_up", "activation": "silu"}
    if name == "mxk::moe.lists":
        torch.ops.mxk.moe.lists(*routing, *([weight[0]] for weight in weights), [], [], [], [], **attributes)
    else:
        torch.ops.mxk.moe(*routing, *weights, **attributes)


def warm_op(name: str, device: str) -> None:
    """Calls one op once eagerly, if this process has not done so yet; what it raises goes through."""
    if (name, device) in _warmed or device == "cuda":  # compiled a shape: a small one would only cost time
        return
    # Compilation runs under modes (fake tensors, functionalisation, inference) that must not see this call.
    with torch.utils._python_dispatch._disable_current_modes(), torch.no_grad(), _bridge_executes():
        call_smallest(name, device)
    _warmed.add((name, device))


def warm_ops(module: fx.GraphModule) -> None:
    """Calls each op of ours in `module` and its nested graphs once eagerly, if this process has not done so yet.

    Raises:
        KernelError: an op of the Gaudi library does not run; the start-up self-check would have said so.
    """
    for graph_module in module.modules():
        if not isinstance(graph_module, fx.GraphModule):
            continue
        for node in graph_module.graph.nodes:
            name = node.target.name() if isinstance(node.target, torch._ops.OpOverload) else ""
            if name not in OPS:
                continue
            try:
                warm_op(name, fake_value(node).device.type)
            except Exception as error:  # an op refuses a call with ValueError, the bridge may raise anything
                if not name.startswith(_GAUDI):
                    raise
                advice = "rebuild the op library in this image"
                raise KernelError(name, str(error), "ops that run eagerly", advice) from error


def self_check(device: str) -> dict[str, str | None]:
    """Calls every Gaudi op of ours that is registered once eagerly, at start-up; logs and returns what came of it.

    An op that fails is not chosen by `supports` any more, so its layers keep the stock op.

    Returns:
        For each registered op, by qualified name, None or the error in one line. Empty: no op library is loaded.
    """
    found: dict[str, str | None] = {}
    for kernel in KERNELS:
        if not hasattr(torch.ops.custom_op, kernel):
            continue
        name = _GAUDI + kernel
        try:
            warm_op(name, device)
            found[name] = None
        except Exception as error:  # whatever it is, the server must go on as stock
            reason = f"{name} failed its first eager call on {device}: {' '.join(str(error).split())}"
            tpc.mark_unusable(kernel, reason)
            found[name] = reason
            _logger.error("%s", reason)
    working = [name for name, reason in found.items() if reason is None]
    _logger.info("Gaudi ops called once eagerly on %s: %s", device, ", ".join(working) or "none")
    return found


def _bridge_executes() -> contextlib.AbstractContextManager[object]:
    """Lets the bridge run what it is given even where a server's warm-up only compiles (`PT_COMPILE_ONLY_MODE`)."""
    config = sys.modules.get("habana_frameworks.torch.internal.bridge_config")
    if config is None:
        return contextlib.nullcontext()
    context: contextlib.AbstractContextManager[object] = config.env_setting("PT_COMPILE_ONLY_MODE", False)
    return context
