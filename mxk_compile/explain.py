"""`explain(fn, *inputs)`: what the `mxk` backend would do with each MoE node, without changing `fn`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from mxk_compile.settings import Settings, settings

if TYPE_CHECKING:
    from mxk_compile.passes import Report


def explain(
    fn: Callable[..., Any], *inputs: Any, settings: Settings = settings, dynamic: bool = False, **kwargs: Any
) -> Report:
    """Compiles and runs `fn(*inputs, **kwargs)` once with the passes and an eager inner backend.

    Args:
        fn: a module or function.
        inputs, kwargs: its arguments; the call really runs.
        settings: as for the backend.
        dynamic: as for `torch.compile`; the default describes the sizes of these inputs alone.

    Returns:
        Report: per MoE node the layer, sizes, token rule, and the kernel or the reason it stays stock; `print` it.
    """
    # Here, not above: the package offers this function, and importing the package must not load the compiler.
    import torch

    from mxk_compile.backend import compile_with
    from mxk_compile.passes import Report

    report = Report()
    backend = compile_with(lambda module, example_inputs: module.forward, settings, report)
    # A backend of its own, so that nothing compiled before is reused; it must not count towards fn's own limit.
    with (
        _not_in_place(fn),
        torch._dynamo.config.patch(recompile_limit=256, accumulated_recompile_limit=4096),
    ):
        torch.compile(fn, backend=backend, dynamic=dynamic)(*inputs, **kwargs)
    return report


@contextlib.contextmanager
def _not_in_place(fn: Callable[..., Any]) -> Iterator[None]:
    """Sets aside what `fn.compile()` made: a call would run that, with its own backend, and nothing would be seen."""
    made = vars(fn).pop("_compiled_call_impl", None) if hasattr(fn, "__dict__") else None
    try:
        yield
    finally:
        if made is not None:
            vars(fn)["_compiled_call_impl"] = made
