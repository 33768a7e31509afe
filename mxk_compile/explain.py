"""`explain(fn, *inputs)`: what the `mxk` backend would do with each MoE node, without changing `fn`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mxk_compile.backend import compile_with
from mxk_compile.passes import Report
from mxk_compile.settings import Settings, settings


def explain(
    fn: Callable[..., Any],
    *inputs: Any,
    settings: Settings = settings,
    dynamic: bool | None = None,
    **kwargs: Any,
) -> Report:
    """Compiles and runs `fn(*inputs, **kwargs)` once with the passes and an eager inner backend.

    Args:
        fn: a module or function.
        inputs, kwargs: its arguments; the call really runs.
        settings: as for the backend.
        dynamic: as for `torch.compile`.

    Returns:
        Report: per MoE node the layer, sizes, token rule, and the kernel or the reason it stays stock; `print` it.
    """
    report = Report()
    backend = compile_with(lambda module, example_inputs: module.forward, settings, report)
    # A backend of its own, so that nothing compiled before is reused and nothing stays behind for later calls.
    with torch._dynamo.config.patch(recompile_limit=256, accumulated_recompile_limit=4096):
        torch.compile(fn, backend=backend, dynamic=dynamic)(*inputs, **kwargs)
    return report
