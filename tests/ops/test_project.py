"""`mxk::project`: every overload against products written out in float64, rows left alone, opcheck, gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from projection_calls import UNWRITTEN, activations, check, make_stack, unwritten
from torch import Tensor

from mxk_compile.errors import BackwardError, CallError
from mxk_compile.projections import align

project = torch.ops.mxk.project


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("top_k", [3, 1])
@pytest.mark.parametrize(
    "form",
    [
        {},
        {"group": 64, "zero": True},
        {"group": 128, "scale_dtype": torch.float16},
        {"group": None, "scale_dtype": torch.float32, "zero": True},
        {"pack_dim": "output", "zero": True},
    ],
)
def test_routes(form: dict[str, Any], top_k: int) -> None:
    stack = make_stack(**form)
    ids = torch.tensor([[12, 10, 10], [9, 13, 14], [-1, 2**32 + 11, 11]])
    x, out = activations(9 // top_k, 128), unwritten(9, 64)
    weight = stack.weight
    project.routes(
        out, x, ids, weight.weight, weight.scale, weight.zero,
        weight_format="uint4", pack_dim=weight.pack_dim, top_k=top_k, experts_min=10,
    )  # fmt: skip
    check(out, stack.expected(x, (ids - 10).flatten().tolist(), top_k))


def run_sorted(stack: Any, x: Tensor, out: Tensor, lists: tuple[Tensor, ...], top_k: int, block: int) -> None:
    weight = stack.weight
    project.sorted(
        out, x, *lists, weight.weight, weight.scale,
        weight_format="uint4", top_k=top_k, block_size=block,
    )  # fmt: skip


def test_sorted_lists_longer_than_their_count() -> None:
    stack, top_k = make_stack(), 2
    x, out = activations(3, 128), unwritten(6, 64)
    # Blocks of 2: expert 3 has routes 5 and 0, expert 1 route 2; routes 1 and 4 are of another rank, 3 of none.
    sorted_ids = int32(5, 0, 2, 6, 1, 4, 3, 3, 3)
    run_sorted(
        stack, x, out, (sorted_ids, int32(3, 1, -1, 0, 0), torch.tensor(6, dtype=torch.int32)), top_k, 2
    )
    check(out, stack.expected(x, [3, -1, 1, -1, -1, 3], top_k))


@given(data=st.data())
@settings(max_examples=60, deadline=None, derandomize=True)
def test_aligned_routes_are_the_plain_ones(data: st.DataObject) -> None:
    num_experts = data.draw(st.integers(1, 6))
    top_k, tokens = data.draw(st.integers(1, 4)), data.draw(st.integers(0, 9))
    first, block = data.draw(st.integers(0, 3)), data.draw(st.sampled_from([1, 2, 3, 8, 16]))
    ids = torch.tensor(
        data.draw(
            st.lists(st.integers(-1, num_experts + 4), min_size=tokens * top_k, max_size=tokens * top_k)
        ),
        dtype=torch.int32,
    ).view(tokens, top_k)
    lists = align(ids, num_experts, block, first)
    sorted_ids, expert_ids, count = lists
    assert len(sorted_ids) == len(expert_ids) * block
    flat = ids.flatten() - first
    per_expert = [int((flat == expert).sum()) for expert in range(num_experts)]
    assert int(count) == sum(-(-rows // block) * block for rows in per_expert) <= len(sorted_ids)
    found = {}
    for place, route in enumerate(sorted_ids.tolist()):
        expert = int(expert_ids[place // block])
        if place >= int(count) or route >= ids.numel():
            assert route == ids.numel()
            continue
        assert route not in found
        found[route] = expert
    local = {r: int(e) - first for r, e in enumerate(ids.flatten()) if first <= e < first + num_experts}
    assert found == local
    stack = make_stack(num_experts, 8, 32)
    x = activations(tokens, 32)
    both = unwritten(ids.numel(), 8), unwritten(ids.numel(), 8)
    run_sorted(stack, x, both[0], lists, top_k, block)
    weight = stack.weight
    project.routes(
        both[1], x, ids, weight.weight, weight.scale, weight_format="uint4", top_k=top_k, experts_min=first
    )
    assert torch.equal(*both)
    check(both[0], stack.expected(x, (ids - first).flatten().tolist(), top_k))


def test_contiguous_groups_with_padding_and_an_empty_expert() -> None:
    stack = make_stack()
    indices = [2] * 128 + [0] * 128 + [0] * 5 + [-1] * 123 + [-1] * 128 + [3] * 1 + [-1] * 127
    x, out = activations(len(indices), 128), unwritten(len(indices), 64)
    weight = stack.weight
    project.contiguous(out, x, int32(*indices), weight.weight, weight.scale, weight_format="uint4")
    check(out, stack.expected(x, indices))


@pytest.mark.parametrize("flat", [False, True])
def test_masked_rows_past_the_count_are_left_alone(flat: bool) -> None:
    stack = make_stack(4)
    counts, max_m = [3, 0, 6, 1], 6
    x, out = activations(4, max_m, 128), unwritten(24, 64)
    x[0, 3:] = float("nan")
    weight = stack.weight
    project.masked(
        out, x.flatten(0, 1) if flat else x, int32(*counts), weight.weight, weight.scale,
        weight_format="uint4", expected_m=2,
    )  # fmt: skip
    experts = [e if slot < counts[e] else -1 for e in range(4) for slot in range(max_m)]
    check(out, stack.expected(x.flatten(0, 1), experts))


def test_mxfp4_weights_share_the_op() -> None:
    from mxk_compile.testing import random_case

    case = random_case(num_tokens=3, num_experts=4, top_k=2)
    out = unwritten(6, 128)
    project.routes(
        out, case.hidden_states, case.topk_ids, case.w13, case.w13_scale, weight_format="mxfp4", top_k=2
    )
    # One half of what mxk::moe computes, with the activation left out: gate rows against its own reference.
    from mxk_compile.ops.dequant import dequantize

    for route, expert in enumerate(case.topk_ids.flatten().tolist()):
        values = dequantize(
            case.w13[expert], case.w13_scale[expert], weight_format="mxfp4", dtype=torch.float64
        )
        expected = values @ case.hidden_states[route // 2].double()
        assert (out[route].double() - expected).norm() <= 2.5e-3 * expected.norm()


@pytest.mark.parametrize("overload", ["routes", "sorted", "contiguous", "masked"])
def test_opcheck(overload: str) -> None:
    stack = make_stack(4, 16, 32)
    routing: dict[str, tuple[Any, ...]] = {
        "routes": (torch.tensor([[0, 3], [2, 2]]),),
        "sorted": align(torch.tensor([[0, 3], [2, 2]]), 4, 2),
        "contiguous": (torch.ones(128, dtype=torch.int32),),
        "masked": (int32(1, 0, 2, 1),),
    }
    rows = {"contiguous": 128, "masked": 8}.get(overload, 4)
    top_k = 2 if overload in ("routes", "sorted") else 1
    attributes: dict[str, Any] = {"weight_format": "uint4"}
    attributes |= {"routes": {"top_k": 2}, "sorted": {"top_k": 2, "block_size": 2}}.get(overload, {})
    attributes |= {"expected_m": 1} if overload == "masked" else {}
    args = (
        unwritten(rows, 16), activations(rows // top_k, 32), *routing[overload],
        stack.weight.weight, stack.weight.scale,
    )  # fmt: skip
    torch.library.opcheck(getattr(project, overload), args, attributes)


def test_a_compiled_call_writes_into_its_output() -> None:
    stack = make_stack(4, 16, 32)

    def run(x: Tensor, ids: Tensor) -> Tensor:
        out = x.new_zeros(ids.numel(), 16)
        weight = stack.weight
        project.routes(out, x, ids, weight.weight, weight.scale, weight_format="uint4", top_k=2)
        return out + 1

    x, ids = activations(3, 32), torch.tensor([[0, 1], [2, 9], [3, 3]])
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x, ids), run(x, ids))


def test_a_gradient_is_refused_when_the_op_is_called() -> None:
    stack = make_stack(4, 16, 32)
    x = activations(2, 32).requires_grad_()
    args = (unwritten(2, 16), x, torch.tensor([[0], [1]]), stack.weight.weight, stack.weight.scale)
    with pytest.raises(BackwardError, match=r"mxk::project.routes: a call that needs a gradient; .*no_grad"):
        project.routes(*args, weight_format="uint4", top_k=1)
    with torch.no_grad():
        project.routes(*args, weight_format="uint4", top_k=1)


def test_the_write_is_counted() -> None:
    stack = make_stack(4, 16, 32)
    out = unwritten(2, 16)
    saved = (out.float().requires_grad_() * out).sum()
    args = (activations(2, 32), torch.tensor([[0], [1]]), stack.weight.weight, stack.weight.scale)
    project.routes(out, *args, weight_format="uint4", top_k=1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.backward()
    before = out._version
    nobody = (args[0], torch.tensor([[9], [9]]), *args[2:])
    project.routes(out, *nobody, weight_format="uint4", top_k=1)
    assert out._version > before, "also where no row is written: nobody reads the routing to know"
    with torch.inference_mode():
        project.routes(unwritten(2, 16), *args, weight_format="uint4", top_k=1)


def test_an_output_that_overlaps_what_is_read_is_refused() -> None:
    stack = make_stack(4, 32, 32)
    weight, ids = stack.weight, torch.tensor([[0], [1], [9], [3]])
    memory = activations(12, 32)

    def run(out: Tensor, x: Tensor, ids: Tensor = ids, weight: Tensor = weight.weight) -> Tensor:
        project.routes(out, x, ids, weight, stack.weight.scale, weight_format="uint4", top_k=1)
        return out

    before = memory.clone()
    for out in (memory[:4], memory[3:7], memory.view(6, 64)[1:5, 32:]):
        with pytest.raises(CallError) as caught:
            run(out, memory[:4])
        assert str(caught.value) == (
            "mxk::project.routes: out overlaps x; allowed: memory of its own; write to another tensor"
        )
        assert torch.equal(memory, before)
    for out in (memory[4:8], memory.view(6, 64)[2:, 32:]):
        run(out, memory[:4])
    # Rows side by side in one wider tensor share none; shifted by a column they do.
    wide = activations(4, 80)
    expected = run(unwritten(4, 32), wide[:, :32].clone())
    wide[2] = UNWRITTEN
    assert torch.equal(run(wide[:, 32:64], wide[:, :32]), expected)
    assert torch.equal(run(wide[:, 48:], wide[:, :32]), expected)
    for shift in (0, 16, 31):
        with pytest.raises(CallError, match="out overlaps x; "):
            run(wide[:, shift : shift + 32], wide[:, :32])
    # A dimension of one element has a stride that means nothing.
    counts = torch.ones(4, dtype=torch.int32)
    for x in (wide[:, :32], wide[:, :32].unsqueeze(1)):
        out = wide[:, 32:64].fill_(UNWRITTEN)
        attributes: dict[str, Any] = {"weight_format": "uint4", "expected_m": 1}
        project.masked(out, x, counts, weight.weight, stack.weight.scale, **attributes)
        in_order = torch.arange(4)[:, None]
        assert torch.equal(out, run(unwritten(4, 32), wide[:, :32].clone(), in_order))
    # Elements between the rows that are written, of another size.
    wide[2] = UNWRITTEN
    between = wide.view(torch.int64)[:, 16:17].copy_(ids)
    assert torch.equal(run(wide[:, 32:64], wide[:, :32], between), expected)
    with pytest.raises(CallError, match="out overlaps topk_ids; "):
        run(wide[:, 40:72], wide[:, :32], between)
    # Whatever it is that is read.
    with pytest.raises(CallError, match="out overlaps weight; "):
        run(weight.weight.view(torch.bfloat16).view(-1)[:128].view(4, 32), memory[:4])
    bits = torch.zeros(128, dtype=torch.bfloat16)
    with pytest.raises(CallError, match="out overlaps topk_ids; "):
        run(bits.view(4, 32), memory[:4], bits[8:24].view(torch.int64).view(4, 1))
    # Shapes alone have no memory that could be shared.
    with torch._subclasses.FakeTensorMode() as mode:
        fake = mode.from_tensor(memory)
        arguments = (mode.from_tensor(t) for t in (ids, weight.weight, stack.weight.scale))
        project.routes(fake[:4], fake[:4], *arguments, weight_format="uint4", top_k=1)
