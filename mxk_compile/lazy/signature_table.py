"""Which custom ops of this process could be taken for one another in lazy mode.

Legacy custom ops are cached by their input signature, not by their GUID: a second op with the same inputs returns,
silently, the first one's result (published: "MXFP4 MoE decode kernels", pitfalls). What a signature holds beyond the
tensors is not public for current bridges, so two ops are told apart by the number of their tensor inputs alone.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from mxk_compile.errors import KernelError
from mxk_compile.kernels.tpc.signatures import variant_kernels

_NAMESPACE = "custom_op::"


class SignatureTable:
    """Tensor inputs of each op that may run in this process."""

    def __init__(self) -> None:
        self._ops: dict[int, str] = {}

    def claim(self, op: str, tensors: int) -> None:
        """Enters an op; raises KernelError, which names both, if another one has as many tensor inputs."""
        holder = self._ops.setdefault(tensors, op)
        if holder != op:
            given = f"{tensors} tensor inputs, as {holder}: lazy mode would return one's result for the other"
            raise KernelError(
                op, given, "a number that no other custom op of the process has", "use one of them"
            )


def registered_ops() -> dict[str, int]:
    """Tensor inputs of every op in namespace `custom_op` that this process knows."""
    found = {}
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith(_NAMESPACE):
            plain, _, overload = name.partition(".")
            for schema in torch._C._jit_get_schemas_for_operator(plain):
                if schema.overload_name == overload:
                    found[name] = sum("Tensor" in str(argument.type) for argument in schema.arguments)
    return found


def check_signatures(variant: str, others: Mapping[str, int]) -> SignatureTable:
    """The table of a variant's kernels; raises KernelError where one of `others` could be taken for one of them."""
    own = {_NAMESPACE + kernel.name: len(kernel.inputs) for kernel in variant_kernels(variant)}
    table = SignatureTable()
    for name, tensors in own.items():
        table.claim(name, tensors)
    for name, tensors in sorted(others.items()):
        # Two foreign ops of one signature are not for us to judge.
        if tensors in own.values() and name not in own:
            table.claim(name, tensors)
    return table
