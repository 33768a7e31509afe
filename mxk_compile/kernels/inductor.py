"""What Inductor writes for `mxk::moe` on CPU: a call of the function itself, not through torch's dispatcher.

The dispatcher takes a call's 19 arguments apart and puts them together again: 9 us, as much as all of the rest
(docs/performance/cpu.md). A compiled graph needs nothing of what it decides.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch._C._autograd import _profiler_enabled
from torch._C._profiler import _RecordFunctionFast

from mxk_compile import kernels


def moe_in_graph(*args: Any, **attributes: Any) -> Tensor:
    """`mxk::moe` as compiled graphs call it; a profiler sees it under the op's name."""
    if _profiler_enabled():
        with _RecordFunctionFast("mxk::moe"):
            return kernels.moe_cpu(*args, **attributes)
    return kernels.moe_cpu(*args, **attributes)


def moe_lists_in_graph(*args: Any, **attributes: Any) -> Tensor:
    """The same of `mxk::moe.lists`."""
    if _profiler_enabled():
        with _RecordFunctionFast("mxk::moe"):
            return kernels.moe_lists_cpu(*args, **attributes)
    return kernels.moe_lists_cpu(*args, **attributes)


@functools.cache
def call_directly() -> None:
    """Tells Inductor of this process; C++ wrappers and other devices keep the dispatcher's call."""
    from torch._inductor import ir, lowering
    from torch._inductor.virtualized import V

    functions: dict[Any, Any] = {
        torch.ops.mxk.moe.default: moe_in_graph,
        torch.ops.mxk.moe.lists: moe_lists_in_graph,
    }

    class DirectCall(ir.FallbackKernel):
        def codegen(self, wrapper: Any) -> None:
            if not V.graph.cpp_wrapper and str(self.get_device()) == "cpu":
                name = functions[self.op_overload].__name__
                wrapper.add_import_once(f"from {__name__} import {name}")
                self.set_python_kernel_name(name)
            super().codegen(wrapper)

    for op in functions:

        def lower(*args: Any, op: torch._ops.OpOverload = op, **attributes: Any) -> Any:
            named = any(isinstance(value, (ir.IRNode, list)) for value in attributes.values())
            kernel = ir.FallbackKernel if named else DirectCall  # the functions take tensors by position
            return ir.TensorBox.create(kernel.create(op, *args, **attributes))

        # What it does for every op that it has no lowering of: inputs with the strides that tracing saw.
        lowering.add_layout_constraint(op, lowering.constrain_to_fx_strides)
        lowering.register_lowering(op, type_promotion_kind=None)(lower)
