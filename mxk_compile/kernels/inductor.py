"""What Inductor writes for `mxk::moe` on CPU and CUDA: a call of the function itself, not through torch's dispatcher.

The dispatcher takes a call's 19 arguments apart and puts them together again: 9 us, as much as all of the rest
(docs/performance/cpu.md). A compiled graph needs nothing of what it decides.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

FUNCTIONS: dict[tuple[Any, str], str] = {
    (torch.ops.mxk.moe.default, "cpu"): "moe_cpu",
    (torch.ops.mxk.moe.default, "cuda"): "moe_cuda",
    (torch.ops.mxk.moe.lists, "cpu"): "moe_lists_cpu",
    (torch.ops.mxk.moe.lists, "cuda"): "moe_lists_cuda",
}
"""Names in mxk_compile.kernels, by op and device type."""


@functools.cache
def call_directly() -> None:
    """Tells Inductor of this process; C++ wrappers keep the dispatcher's call."""
    from torch._inductor import ir, lowering
    from torch._inductor.virtualized import V

    class DirectCall(ir.FallbackKernel):
        def codegen(self, wrapper: Any) -> None:
            device = self.get_device()
            name = FUNCTIONS.get((self.op_overload, device.type if device is not None else ""))
            if name is not None and not V.graph.cpp_wrapper:
                wrapper.add_import_once(f"from mxk_compile.kernels import {name}")
                self.set_python_kernel_name(name)
            super().codegen(wrapper)

    for op in dict.fromkeys(op for op, _ in FUNCTIONS):

        def lower(*args: Any, op: torch._ops.OpOverload = op, **attributes: Any) -> Any:
            named = any(isinstance(value, (ir.IRNode, list)) for value in attributes.values())
            kernel = ir.FallbackKernel if named else DirectCall  # the functions take tensors by position
            return ir.TensorBox.create(kernel.create(op, *args, **attributes))

        # What it does for every op that it has no lowering of: inputs with the strides that tracing saw.
        lowering.add_layout_constraint(op, lowering.constrain_to_fx_strides)
        lowering.register_lowering(op, type_promotion_kind=None)(lower)
