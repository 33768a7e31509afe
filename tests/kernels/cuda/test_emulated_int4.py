"""The decode kernel's INT4 products, emulated on the CPU: numbers against the reference, bits against another order."""

from __future__ import annotations

import functools
from typing import Any
from unittest import mock

import pytest
import torch
from kernels.cuda import emulator
from kernels.cuda.int4_calls import (
    EIGHT,
    EIGHT_TWICE,
    FORMATS,
    LAID,
    LAYERS,
    SIXTEEN,
    SPLITS,
    TWICE_LAID,
    UNWRITTEN,
    infinite,
    layer,
    projections,
    weight,
)
from torch import Tensor

from mxk_compile.kernels.cuda import decode, grouped
from mxk_compile.kernels.cuda.schedule import Schedule
from mxk_compile.ops.project import experts_of_rows, reference
from mxk_compile.testing import MoECase, most_rel_l2, rel_l2

pytestmark = pytest.mark.skipif(emulator.missing() is not None, reason=f"emulator: {emulator.missing()}")

OTHER_ORDER = 7
QUICK = ("groups of 32", "zero points, ragged", "strange ids", "large")


def run(name: str, case: MoECase, seed: int, lists: bool = False) -> Tensor:
    """Result on an emulated device."""
    with emulator.use(processors=4, seed=seed):
        return emulator.fused(case, SPLITS[name], lists)


@pytest.fixture(scope="module", autouse=True)
def built(request: pytest.FixtureRequest) -> None:
    """Compiles what the layers ahead need, by two threads."""
    asked = {item.callspec.params.get("name") for item in request.session.items if hasattr(item, "callspec")}
    calls = [(split, make) for name, (split, make) in LAYERS.items() if name in asked]
    with emulator.use():
        emulator.build_ahead(
            [functools.partial(emulator.prepared, make(), SPLITS[split], False) for split, make in calls]
        )


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in LAYERS]
)
def test_layers(name: str) -> None:
    split, make = LAYERS[name]
    case = make()
    expected = case.reference(round_intermediate=True)
    result = run(split, case, 0)
    assert rel_l2(result, expected) <= most_rel_l2(expected)
    assert torch.equal(result, run(split, case, OTHER_ORDER)), "the order of threads changes no bit"
    assert bool((result[(expected == 0).all(-1)] == 0).all())


def test_scales_that_do_not_fit_the_chosen_split_get_the_next() -> None:
    """fp32 scales of groups of 32 where shared memory is short: 16 weight rows in a slot in place of 32."""
    sizes = {"num_tokens": 2, "num_experts": 4, "top_k": 2, "hidden_size": 2560, "intermediate_size": 512}
    units = {}
    for dtype in (torch.bfloat16, torch.float32):
        case = layer(dtype, **sizes)
        with (
            emulator.use(processors=4, capability=(12, 0)),
            mock.patch.object(decode, "Decode", side_effect=decode.Decode) as made,
        ):
            result = emulator.fused(case, None)
        units[dtype] = dict(made.call_args.args[1])["units"]
        expected = case.reference(round_intermediate=True)
        assert rel_l2(result, expected) <= most_rel_l2(expected)
    assert units == {torch.bfloat16: 2, torch.float32: 1}


def test_lists_give_the_bits_of_stacks() -> None:
    case = layer(num_tokens=3)
    assert torch.equal(run(EIGHT, case, 0, lists=True), run(EIGHT, case, 0))


def test_infinities_come_out_as_in_the_reference() -> None:
    case = infinite(layer(num_tokens=6, hidden_size=160, intermediate_size=288))
    result, expected = run(EIGHT, case, 0).float(), case.reference(round_intermediate=True).bfloat16().float()
    assert torch.equal(result.isnan(), expected.isnan())
    assert torch.equal(result.isinf(), expected.isinf())
    assert 0 < int(expected.isfinite().sum()) < expected.numel()


def project(split: str, out: Tensor, seed: int, overload: str, *args: Any, **attributes: Any) -> Tensor:
    """`out`, written by the decode kernel on an emulated device."""
    with emulator.use(processors=5, seed=seed), pytest.MonkeyPatch.context() as patch:
        patch.setattr(grouped, "choose_of_product", lambda product: Schedule.parse(SPLITS[split]))
        refused = grouped.project(lambda *_, **__: None, overload, out, *args, **attributes)
        assert refused is None
        assert all(call._decode is not None for call in grouped._prepared.values())
    return out


@pytest.mark.parametrize(
    ("group", "zero", "dtype"),
    [FORMATS[0], *(pytest.param(*one, marks=pytest.mark.slow) for one in FORMATS[1:])],
)
@pytest.mark.parametrize(
    "split",
    [
        EIGHT_TWICE,
        LAID,
        pytest.param(SIXTEEN, marks=pytest.mark.slow),
        pytest.param(TWICE_LAID, marks=pytest.mark.slow),
    ],
)
def test_projections(split: str, group: int, zero: bool, dtype: torch.dtype) -> None:
    held = weight(6, 80, 256, group, zero, dtype)
    for overload, x, routing, num_rows, more in projections(256):
        attributes = {"weight_format": "uint4", **more}
        out = torch.full((num_rows, 80), UNWRITTEN, dtype=torch.bfloat16)
        expected = out.float()
        reference(overload, expected, x, *routing, *held, **attributes)
        again = project(split, out.clone(), OTHER_ORDER, overload, x, *routing, *held, **attributes)
        project(split, out, 0, overload, x, *routing, *held, **attributes)
        assert torch.equal(out, again)
        written = experts_of_rows(overload, num_rows, 6, routing, attributes) >= 0
        assert bool((out[~written] == UNWRITTEN).all()), "other rows are not written"
        assert rel_l2(out[written], expected[written]) <= most_rel_l2(expected[written]), overload
