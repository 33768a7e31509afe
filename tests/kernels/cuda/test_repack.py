"""Weights packed along the outputs, turned once: values, and what is kept for how long. Runs without a GPU."""

from __future__ import annotations

import gc

import pytest
import torch

from mxk_compile.kernels.cuda import repack
from mxk_compile.ops.dequant import dequantize
from mxk_compile.testing import random_case


@pytest.mark.parametrize("packed_zero", [False, True])
@pytest.mark.parametrize("lists", [False, True])
def test_values_are_the_same(packed_zero: bool, lists: bool) -> None:
    case = random_case(weight_format="uint4", zero=True, pack_dim="output", num_experts=3)
    weights = [*case.weights]
    assert case.w13_zero is not None
    assert case.w2_zero is not None
    if packed_zero:
        for place in (4, 5):
            nibbles = weights[place]
            words = nibbles[..., 0::2] | nibbles[..., 1::2] << 4
            weights[place] = words.view(torch.int32)
    given = [None if w is None else list(w) if lists else w for w in weights]
    turned = repack.along_inputs(tuple(given))
    for weight, scale, zero in ((0, 1, 4), (2, 3, 5)):
        now = [torch.stack(turned[i]) if lists else turned[i] for i in (weight, scale, zero)]
        values = dequantize(*now, weight_format="uint4")
        before = (weights[i] for i in (weight, scale, zero))
        assert torch.equal(values, dequantize(*before, weight_format="uint4", pack_dim="output"))
    assert turned[6:] == (None, None)


def test_what_is_kept_and_for_how_long() -> None:
    case = random_case(weight_format="int4", pack_dim="output", num_experts=2)
    first = repack.along_inputs(case.weights)
    assert repack.along_inputs(case.weights)[0] is first[0]
    case.w13.bitwise_not_()
    again = repack.along_inputs(case.weights)
    assert again[2] is first[2]
    assert torch.equal(again[0], ~first[0])
    key = next(k for k, (_, _, result) in repack._kept.items() if result is again[0])
    del case
    gc.collect()
    other = random_case(weight_format="int4", pack_dim="output", num_experts=2, seed=5)
    repack.along_inputs(other.weights)
    assert key not in repack._kept or repack._kept[key][2] is not again[0]
