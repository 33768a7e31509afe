"""`mxk::stack`: what counts as the slices of a registered stack, and that anything else is copied."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mxk_compile.ops import stack


@pytest.fixture(autouse=True)
def empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stack, "_stacks", {})
    stack._say_once.cache_clear()


def registered(*shape: int) -> Tensor:
    tensor = torch.randint(0, 256, shape).byte()
    stack.register_stack(tensor)
    return tensor


def test_slices_share_the_memory_of_their_stack(caplog: pytest.LogCaptureFixture) -> None:
    tensor = registered(4, 6, 8)
    for experts in (list(tensor), list(tensor.unbind(0)), [tensor.data[e] for e in range(4)]):
        found = torch.ops.mxk.stack(experts)
        assert found.data_ptr() == tensor.data_ptr()
        assert torch.equal(found, tensor)
    assert not caplog.records


@pytest.mark.parametrize(
    "kind", ["swapped", "twice", "short", "copied one", "copied", "other shape", "transposed"]
)
def test_other_lists_are_copied_and_said_once(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    tensor = registered(4, 8, 8)
    a, b, c, d = tensor
    experts = {
        "swapped": [a, c, b, d],
        "twice": [a, b, b, d],
        "short": [a, b, c],
        "copied one": [a, b, c.clone(), d],
        "copied": list(tensor.clone()),
        "other shape": [value.view(4, 16) for value in tensor],
        "transposed": [value.t() for value in tensor],
    }[kind]
    for _ in range(2):
        found = torch.ops.mxk.stack(experts)
        assert torch.equal(found, torch.stack(experts))
        assert found.data_ptr() != tensor.data_ptr()
    (record,) = caplog.records
    assert f"{len(experts)} experts of shape {list(experts[0].shape)}" in record.getMessage()


def test_equal_addresses_of_another_device_prove_nothing() -> None:
    experts = list(torch.randint(0, 256, (2, 3, 4)).byte())

    class Elsewhere(Tensor):
        def data_ptr(self) -> int:
            return experts[0].data_ptr()

    other = torch.empty(2, 3, 4, dtype=torch.uint8, device="meta").as_subclass(Elsewhere)
    stack.register_stack(other)
    assert torch.equal(torch.ops.mxk.stack(experts), torch.stack(experts))


def test_stacks_are_not_kept_alive() -> None:
    tensor = registered(2, 3, 4)
    experts = [value.clone() for value in tensor]
    assert stack.is_known((2, 3, 4), torch.uint8, "cpu")
    assert not stack.is_known((2, 3, 4), torch.int32, "cpu")
    assert not stack.is_known((2, 3, 4), torch.uint8, "hpu")
    assert not stack.is_known((2, 3, 5), torch.uint8, "cpu")
    del tensor
    assert not stack.is_known((2, 3, 4), torch.uint8, "cpu")
    assert stack._stacks == {}
    assert stack.find_stack(experts) is None


def test_parameters_of_a_model() -> None:
    model = torch.nn.Module()
    model.layer = torch.nn.Linear(4, 4)  # 2 dimensions, and a bias of 1
    model.w13_weight = torch.nn.Parameter(torch.zeros(2, 4, 4), requires_grad=False)
    model.register_buffer("w13_bias", torch.zeros(2, 4))
    model.register_buffer("strided", torch.zeros(2, 4, 4).transpose(1, 2))
    assert stack.register_stacks(model) == 2
    assert stack.find_stack(list(model.w13_weight)) is model.w13_weight
    assert stack.find_stack(list(model.w13_bias)) is model.w13_bias
    assert stack.find_stack(list(model.strided)) is None  # the kernels could not read it either


def test_fake_agrees_and_empty_lists_are_refused() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        found = torch.ops.mxk.stack([torch.empty(3, 5, dtype=torch.bfloat16) for _ in range(4)])
        assert (list(found.shape), found.dtype, found.stride()) == ([4, 3, 5], torch.bfloat16, (15, 5, 1))
        with pytest.raises(Exception, match="mxk::stack: no experts"):
            torch.ops.mxk.stack([])
