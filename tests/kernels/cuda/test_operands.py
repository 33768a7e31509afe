"""How weights are described to the kernels: addresses and strides, and what must be copied."""

from __future__ import annotations

import pytest
import torch

from mxk_compile.kernels.cuda import scales
from mxk_compile.kernels.cuda.operands import ABSENT, Operands, operand
from mxk_compile.kernels.desc import MoEDesc
from mxk_compile.testing import MoECase, random_case


def stacked(case: MoECase) -> Operands:
    return Operands.of(MoEDesc.from_call(*case.routing, *case.weights, **case.attributes), case.weights)


def test_a_stack_is_an_address_and_two_strides() -> None:
    weight = torch.zeros(3, 8, 48, dtype=torch.uint8)
    described = operand("w13", weight, 16)
    assert described.fields == (weight.data_ptr(), 0, 8 * 48, 48)
    assert not described.copied
    words = weight.view(torch.int32)
    assert operand("w13", words, 16).fields == described.fields, "int32 words are the same bytes"


def test_a_view_with_a_gap_is_read_in_place() -> None:
    whole = torch.zeros(3, 12, 64, dtype=torch.uint8)
    view = whole[:, 2:10, 16:48]
    described = operand("w13", view, 16)
    assert described.fields == (whole.data_ptr() + 2 * 64 + 16, 0, 12 * 64, 64)
    assert not described.copied


@pytest.mark.parametrize("step", ["columns", "address"])
def test_what_the_loads_cannot_take_is_copied(step: str) -> None:
    whole = torch.arange(3 * 8 * 128, dtype=torch.int64).to(torch.uint8).view(3, 8, 128)
    view = whole[..., ::2] if step == "columns" else whole[..., 8:72]
    described = operand("w13", view, 16)
    assert described.copied
    (copy,) = described.kept
    assert torch.equal(copy, view)
    assert described.fields == (copy.data_ptr(), 0, 8 * 64, 64)


def test_a_list_is_a_table_of_addresses() -> None:
    tensors = [torch.zeros(8, 48, dtype=torch.uint8) for _ in range(3)]
    described = operand("w2", tensors, 16)
    base, table, expert_stride, row_stride = described.fields
    assert (base, expert_stride, row_stride) == (0, 0, 48)
    assert table == described.kept[0].data_ptr()
    assert described.kept[0].tolist() == [tensor.data_ptr() for tensor in tensors]


def test_a_list_of_unlike_strides_is_copied() -> None:
    tensors = [torch.zeros(8, 48, dtype=torch.uint8), torch.zeros(8, 96, dtype=torch.uint8)[:, :48]]
    described = operand("w2", tensors, 16)
    assert described.copied
    assert described.fields[3] == 48


def test_absent_arguments() -> None:
    assert operand("w13_bias", None, 1) == operand("w13_bias", [], 1) == ABSENT


@pytest.mark.parametrize(
    ("row_order", "expected"),
    [("gate_up", (1, 0, 64, 0)), ("up_gate", (1, 64, 0, 0)), ("interleaved", (2, 0, 1, 0))],
)
def test_where_gate_and_up_rows_are(row_order: str, expected: tuple[int, ...]) -> None:
    found = stacked(random_case(row_order=row_order))
    assert (found.row_step, found.gate_row, found.up_row, found.up_expert) == expected


def test_separate_stacks_are_an_expert_further() -> None:
    case = random_case(num_experts=4)
    w13, s13, w2, s2, *_ = case.lists
    halves = [part[:64] for part in w13] + [part[64:] for part in w13]
    scale_halves = [part[:64] for part in s13] + [part[64:] for part in s13]
    weights = (halves, scale_halves, w2, s2, [], [], [], [])
    attributes = {**case.attributes, "row_order": "separate"}
    found = Operands.of(MoEDesc.from_call(*case.routing, *weights, **attributes), weights)
    assert (found.row_step, found.gate_row, found.up_row, found.up_expert) == (1, 0, 0, 4)


def test_alignment_is_that_of_every_expert() -> None:
    case = random_case(hidden_size=96, intermediate_size=64)
    desc = MoEDesc.from_call(*case.routing, *case.weights, **case.attributes)
    assert stacked(case).aligned(desc)
    # One more byte in front of the scales of each expert.
    wide = torch.zeros(8, 128 * 3 + 1, dtype=torch.uint8)
    case.w13_scale = wide[:, 1:].unflatten(1, (128, 3))
    assert not stacked(case).aligned(desc)


def test_scales_are_asked_once_a_version() -> None:
    small, large = torch.full((2, 4), 128, dtype=torch.uint8), torch.full((2, 4), 129, dtype=torch.uint8)
    assert scales.small([small]) is True
    assert scales.small([small, large]) is False
    assert scales.small(list(small)) is True
    small[1, 2] = 255
    assert scales.small([small]) is False
    with torch.inference_mode():
        assert scales.small([torch.full((2, 4), 7, dtype=torch.uint8)]) is True


def test_a_watch_sees_changes_in_place_and_other_storages() -> None:
    first, second = torch.full((2, 4), 100, dtype=torch.uint8), torch.full((8,), 100, dtype=torch.uint8)
    watch = scales.Watch((first, list(second.split(4))))
    assert watch.small is True
    assert watch.current(first, list(second.split(4)))
    assert watch.current(first.view(2, 4), list(second.split(4))), "another view of the same memory"
    second[3] = 200
    assert not watch.current(first, list(second.split(4)))
    watch = scales.Watch((first, [second]))
    assert watch.small is False
    del first
    assert not watch.current(torch.full((2, 4), 100, dtype=torch.uint8), [second])


def test_rows_that_lie_too_far_apart_to_be_counted_in_32_bits_are_copied() -> None:
    for apart, copied in ((1 << 24, False), ((1 << 24) + 16, True)):
        stack = torch.empty_strided((1, 3, 4), (4 * apart, apart, 1), dtype=torch.uint8, device="meta")
        assert operand("w13_scale", stack, 1).copied == copied
