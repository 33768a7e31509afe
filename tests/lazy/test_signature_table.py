"""Two custom ops that lazy mode could take for one another are refused by name."""

from __future__ import annotations

import pytest
import torch

from mxk_compile.errors import KernelError
from mxk_compile.kernels.tpc.signatures import VARIANT_KERNELS
from mxk_compile.lazy.signature_table import SignatureTable, check_signatures, registered_ops


@pytest.mark.parametrize("variant", VARIANT_KERNELS)
def test_a_variant_alone_is_fine(variant: str) -> None:
    check_signatures(variant, {})


def test_collision_names_both_ops() -> None:
    with pytest.raises(KernelError) as raised:
        check_signatures("gptoss", {"custom_op::sinkhorn": 5, "custom_op::harmless": 3})
    assert str(raised.value) == (
        "custom_op::sinkhorn: 5 tensor inputs, as custom_op::mxk_w13xib: lazy mode would return one's result for the "
        "other; allowed: a number that no other custom op of the process has; use one of them"
    )
    # Own ops are found again among those of the process; two foreign ones of one number are none of our business.
    check_signatures(
        "gptoss", {"custom_op::mxk_w13xib": 5, "custom_op::mxk_w2xb": 6, "custom_op::a": 2, "custom_op::b": 2}
    )


def test_claiming_twice_is_fine() -> None:
    table = SignatureTable()
    table.claim("custom_op::f", 4)
    table.claim("custom_op::f", 4)
    with pytest.raises(KernelError, match=r"^custom_op::g: 4 tensor inputs, as custom_op::f"):
        table.claim("custom_op::g", 4)


def test_ops_of_the_process_are_found() -> None:
    library = torch.library.Library("custom_op", "FRAGMENT")
    try:
        library.define("mxk_test_probe(Tensor x, Tensor[] list, Tensor? maybe, int n, str s) -> Tensor")
        assert registered_ops()["custom_op::mxk_test_probe"] == 3
    finally:
        library._destroy()
