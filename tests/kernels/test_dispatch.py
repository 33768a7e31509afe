"""Calls kept prepared between the dispatcher and the CPU kernels: what may be used again, and what may not."""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mxk_compile import kernels
from mxk_compile.errors import CallError, KernelError
from mxk_compile.kernels import cpu
from mxk_compile.testing import MoECase, random_case, rel_l2

pytestmark = pytest.mark.skipif(cpu.available() is not None, reason=str(cpu.available()))

SMALL: dict[str, Any] = {
    "num_tokens": 2,
    "num_experts": 3,
    "top_k": 2,
    "hidden_size": 64,
    "intermediate_size": 64,
}


@pytest.fixture(autouse=True, params=["C", "Python"])
def nothing_prepared(request: pytest.FixtureRequest) -> Iterator[None]:
    """Both ways that calls are looked up by: a profiler sends them all to the one in Python."""
    kernels.prepared["CPU"].clear()
    if request.param == "C":
        yield
        return
    with torch.autograd.profiler.profile(use_kineto=False):
        yield


def run(case: MoECase, **changes: Any) -> Tensor:
    result: Tensor = torch.ops.mxk.moe(*case.routing, *case.weights, **{**case.attributes, **changes})
    return result


def check(case: MoECase, **changes: Any) -> None:
    """Against the reference, which keeps nothing."""
    expected = dataclasses.replace(case, attributes={**case.attributes, **changes}).reference()
    assert rel_l2(run(case, **changes), expected) < 2.5e-3


def test_a_second_call_is_prepared() -> None:
    case = random_case(**SMALL)
    run(case)
    (prepared,) = kernels.prepared["CPU"].values()
    check(case)
    check(dataclasses.replace(case, hidden_states=case.hidden_states + 1, topk_ids=case.topk_ids.flip(0)))
    assert list(kernels.prepared["CPU"].values()) == [prepared]


def test_a_known_call_is_run_without_python(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = random_case(bias=True, **SMALL)
    stacks, lists = (*case.routing, *case.weights), (*case.routing, *case.lists)
    ways: list[tuple[Any, tuple[Any, ...]]] = [(torch.ops.mxk.moe.default, stacks), (kernels.moe_cpu, stacks)]
    ways += [(torch.ops.mxk.moe.lists, lists), (kernels.moe_lists_cpu, lists)]
    expected = [function(*tensors, **case.attributes) for function, tensors in ways]
    assert all(torch.equal(result, expected[0]) for result in expected)
    monkeypatch.setattr(cpu.Prepared, "__call__", lambda *_: torch.empty(0))
    in_c = "[C]" in request.node.name and hasattr(Tensor, "__dlpack_c_exchange_api__")
    for context in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        for function, tensors in ways:
            with context():
                result = function(*tensors, **case.attributes)
            assert torch.equal(result, expected[0] if in_c else torch.empty(0))


def test_a_known_call_that_fails() -> None:
    case = random_case(**SMALL)
    run(case)
    (prepared,) = kernels.prepared["CPU"].values()
    failing = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(lambda _: 1)
    prepared._function, prepared._address = failing, ctypes.cast(failing, ctypes.c_void_p).value
    with pytest.raises(KernelError, match="scratch memory could not be had"):
        run(case)
    assert run(dataclasses.replace(case, hidden_states=case.hidden_states[:1], topk_ids=case.topk_ids[:1],
                                   topk_weights=case.topk_weights[:1])).shape[0] == 1  # fmt: skip


@pytest.mark.parametrize("place", [0, 1, 3, 8])
def test_what_is_no_tensor_is_refused(place: int) -> None:
    case = random_case(**SMALL)
    for function, weights in ((kernels.moe_cpu, case.weights), (kernels.moe_lists_cpu, case.lists)):
        tensors: list[Any] = [*case.routing, *weights]
        function(*tensors, **case.attributes)
        tensors[place] = 3
        with pytest.raises((AttributeError, TypeError)):
            function(*tensors, **case.attributes)
        with pytest.raises(TypeError):
            function(*tensors[:2], **case.attributes)


def test_references_are_given_back() -> None:
    case = random_case(bias=True, **SMALL)
    lists = (*case.routing, *case.lists)
    wrong = [*lists[:-1], [*lists[-1][:-1], 3]]
    kernels.moe_lists_cpu(*lists, **case.attributes)
    held = [*case.routing, *lists, *lists[3], *kernels.prepared["CPU"].values(), *case.attributes, None]
    before = [sys.getrefcount(thing) for thing in held]
    for _ in range(1000):
        kernels.moe_lists_cpu(*lists, **case.attributes)
    for _ in range(20):
        with pytest.raises((AttributeError, TypeError)):
            kernels.moe_lists_cpu(*wrong, **case.attributes)
    after = [sys.getrefcount(thing) for thing in held]
    assert all(abs(a - b) < 100 for a, b in zip(after, before, strict=True))  # None is everywhere


def test_lists_that_are_longer_than_a_key() -> None:
    case = random_case(num_tokens=2, num_experts=2500, top_k=2, hidden_size=32, intermediate_size=32)
    expected = case.reference()
    for _ in range(3):
        result = torch.ops.mxk.moe.lists(*case.routing, *case.lists, **case.attributes)
        assert rel_l2(result, expected) < 2.5e-3


def test_weights_changed_in_place() -> None:
    case = random_case(**SMALL)
    run(case)
    case.w13.bitwise_xor_(0x35)
    case.w2_scale.add_(1)
    check(case)


def test_nothing_is_kept_alive() -> None:
    case = random_case(bias=True, **SMALL)
    run(case)
    torch.ops.mxk.moe.lists(*case.routing, *case.lists, **case.attributes)
    alive = [weakref.ref(tensor) for tensor in (*case.routing, *case.weights) if tensor is not None]
    del case
    gc.collect()
    assert not any(ref() is not None for ref in alive)


def scales_at(memory: Tensor, like: Tensor, dtype: torch.dtype) -> Tensor:
    """`like` as `dtype`, in `memory`."""
    place = memory.view(dtype)[: like.numel()].view(like.shape)
    return place.copy_(like)


def test_memory_used_again_with_another_dtype() -> None:
    """The allocator may give the address of a freed scale to one of another dtype; here it surely does."""
    case = random_case(weight_format="uint4", **SMALL)
    memory = torch.zeros(case.w13_scale.numel() * 2, dtype=torch.int16)
    for dtype in (torch.bfloat16, torch.float16, torch.bfloat16):
        check(dataclasses.replace(case, w13_scale=scales_at(memory, case.w13_scale, dtype)))


def test_memory_used_again_with_another_group_size() -> None:
    memory = torch.zeros(4096, dtype=torch.int16)
    for group_size in (32, 64, 32):
        case = random_case(weight_format="uint4", group_size=group_size, **SMALL)
        check(dataclasses.replace(case, w2_scale=scales_at(memory, case.w2_scale, torch.bfloat16)))


def test_memory_used_again_with_other_strides() -> None:
    case = random_case(**SMALL)
    memory = torch.zeros(case.w13.numel() * 2, dtype=torch.uint8)
    dense = memory[: case.w13.numel()].view(case.w13.shape)
    wide = memory.view(*case.w13.shape[:2], -1)[..., : case.w13.shape[2]]
    for view in (dense, wide, dense):
        check(dataclasses.replace(case, w13=view.copy_(case.w13)))


@pytest.mark.parametrize(
    "change",
    [
        lambda w13, other: w13.set_(other),
        lambda w13, other: setattr(w13, "data", other),
        lambda w13, other: torch.utils.swap_tensors(w13, other),
        lambda w13, other: w13.as_strided_(other.shape, (0, other.stride(1), 1)),
    ],
    ids=["set_", "data", "swap_tensors", "as_strided_"],
)
def test_one_object_that_becomes_other_memory(change: Callable[[Tensor, Tensor], object]) -> None:
    case = random_case(**SMALL)
    other = random_case(seed=1, **SMALL).w13
    run(case)
    change(case.w13, other)
    check(case)


def test_an_object_that_becomes_malformed() -> None:
    case = random_case(**SMALL)
    run(case)
    case.w13.transpose_(1, 2)
    with pytest.raises(CallError):
        run(case)
    case.w13.transpose_(1, 2)
    check(case)
    with pytest.raises(CallError):
        run(dataclasses.replace(case, topk_weights=case.topk_weights[:1]))
    with pytest.raises(CallError):
        run(dataclasses.replace(case, w13=case.w13.view(torch.int8)))


def test_fewer_experts_at_the_same_addresses() -> None:
    case = random_case(**SMALL)
    run(case)
    first_two = {name: getattr(case, name)[:2] for name in ("w13", "w13_scale", "w2", "w2_scale")}
    check(dataclasses.replace(case, **first_two))
    for name, tensor in first_two.items():
        with pytest.raises(CallError):
            run(dataclasses.replace(case, **{name: tensor}))


def test_every_attribute_counts() -> None:
    case = random_case(activation="swiglu_oai", alpha=1.702, limit=7.0, **SMALL)
    for changes in (
        {"limit": 0.25},
        {"limit": None},
        {"alpha": 0.5},
        {"experts_min": 1},
        {"per_route": True},
        {"row_order": "up_gate"},
        {"activation": "silu"},
        {},
    ):
        check(case, **changes)
    assert len(kernels.prepared["CPU"]) == 8


@pytest.mark.parametrize("stride", [1, 2])
def test_lists_whose_second_tensor_changes_its_strides(stride: int) -> None:
    case = random_case(**SMALL)
    lists = case.lists
    memory = torch.zeros(case.w13[0].numel() * 2, dtype=torch.uint8)
    lists[0][1] = memory[: case.w13[1].numel()].view(case.w13[1].shape).copy_(case.w13[1])
    torch.ops.mxk.moe.lists(*case.routing, *lists, **case.attributes)
    wide = memory.view(case.w13.shape[1], -1)[:, : case.w13.shape[2] * stride : stride]
    lists[0][1] = wide.copy_(case.w13[1])
    for _ in range(2):
        result = torch.ops.mxk.moe.lists(*case.routing, *lists, **case.attributes)
        assert rel_l2(result, case.reference()) < 2.5e-3


def test_lists_are_checked_when_prepared() -> None:
    case = random_case(**SMALL)
    lists = case.lists
    torch.ops.mxk.moe.lists(*case.routing, *lists, **case.attributes)
    assert len(kernels.prepared["CPU"]) == 1
    lists[1][2] = lists[1][2].view(torch.int8)
    with pytest.raises(CallError, match=r"w13_scale\[2\]"):
        torch.ops.mxk.moe.lists(*case.routing, *lists, **case.attributes)


def test_new_views_of_the_same_memory_are_the_same_lists() -> None:
    case = random_case(bias=True, **SMALL)
    for _ in range(3):
        torch.ops.mxk.moe.lists(*case.routing, *case.lists, **case.attributes)
    assert len(kernels.prepared["CPU"]) == 1


def test_lists_changed_in_place() -> None:
    case = random_case(**SMALL)
    lists = [list(map(Tensor.clone, weight)) for weight in case.lists]
    torch.ops.mxk.moe.lists(*case.routing, *lists, **case.attributes)
    other = random_case(seed=1, **SMALL)
    for weight, values in zip(lists, other.lists, strict=True):
        for tensor, value in zip(weight, values, strict=True):
            tensor.data = value  # other memory
    result = torch.ops.mxk.moe.lists(*other.routing, *lists, **case.attributes)
    assert rel_l2(result, other.reference()) < 2.5e-3
    for tensor in lists[0]:
        tensor.data = tensor.data.t()  # other strides
    with pytest.raises(CallError):
        torch.ops.mxk.moe.lists(*other.routing, *lists, **case.attributes)


def test_odd_views_are_copied_in_every_call() -> None:
    case = random_case(**SMALL)
    odd = torch.zeros(*case.w2.shape, 2, dtype=torch.uint8)[..., 0].copy_(case.w2)
    odd_states = case.hidden_states.t().contiguous().t()
    for changed in (dataclasses.replace(case, w2=odd), dataclasses.replace(case, hidden_states=odd_states)):
        check(changed)
        changed.w2.bitwise_xor_(0x11)
        changed.hidden_states.mul_(0.5)
        check(changed)
    assert not kernels.prepared["CPU"]


def test_a_full_table_is_emptied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_MOST_PREPARED", 2)
    cases = [random_case(**{**SMALL, "num_tokens": count}) for count in (1, 2, 3, 4)]
    for case in cases + cases:
        check(case)
        assert len(kernels.prepared["CPU"]) <= 2


class Seen(TorchDispatchMode):
    """Records what passes through the dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.append(str(function))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("context", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_modes_still_see_the_op(context: Callable[[], Any]) -> None:
    """A call without gradients goes to the kernel at once, but not past a mode."""
    case = random_case(**SMALL)
    with context(), Seen() as seen:
        result = run(case)
    assert seen.ops == ["mxk.moe.default"]
    with context():
        assert torch.equal(run(case), result)
    with torch._subclasses.FakeTensorMode() as mode, context():
        fake = [tensor if tensor is None else mode.from_tensor(tensor) for tensor in case.weights]
        routing = [mode.from_tensor(tensor) for tensor in case.routing]
        assert type(torch.ops.mxk.moe(*routing, *fake, **case.attributes)).__name__ == "FakeTensor"


@pytest.mark.parametrize("nothing_prepared", ["C"], indirect=True)  # torch 2.10 takes no profiler in another
@pytest.mark.parametrize("form", ["moe", "moe.lists"])
def test_a_compiled_graph_calls_the_kernel_itself(form: str) -> None:
    from torch._inductor.utils import run_and_get_code

    case = random_case(**SMALL)
    weights = case.weights if form == "moe" else case.lists
    op = torch.ops.mxk.moe.default if form == "moe" else torch.ops.mxk.moe.lists

    def step(x: Tensor, ids: Tensor, router: Tensor, *weights: Any) -> Tensor:
        y: Tensor = op(x * 2, ids, router, *weights, **case.attributes)
        return y + 1

    compiled = torch.compile(step, backend="mxk")
    with torch.no_grad():
        result, code = run_and_get_code(compiled, *case.routing, *weights)
        assert f" = {form.replace('.', '_')}_cpu(" in code[-1]
        assert " = torch.ops.mxk" not in code[-1]
        expected = step(*case.routing, *weights)
        assert rel_l2(result, expected) < 1e-6
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            compiled(*case.routing, *weights)
    assert [event.name for event in profiler.events() if event.name.startswith("mxk::")] == ["mxk::moe"]
