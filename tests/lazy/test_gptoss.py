"""The call hook on a layer like vllm-gaudi's: which calls run on the kernels, which stay stock, and what is said."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gaudi_stand_ins as stand_ins
import pytest
import torch
from torch import Tensor

from mxk_compile.errors import KernelError
from mxk_compile.lazy import gptoss, signature_table
from mxk_compile.lazy.environment import Options
from mxk_compile.testing import MoECase, random_case, rel_l2

OPTIONS = Options(32, Path("lib"), "gptoss-v0-0")


@pytest.fixture(scope="module", autouse=True)
def ops() -> Iterator[None]:
    with stand_ins.ops():
        yield


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    """The op library counts as loaded, and holds the ops of gptoss alone."""
    monkeypatch.setattr(gptoss, "load_ops", lambda folder, kind: None)
    monkeypatch.setattr(signature_table, "registered_ops", dict)
    gptoss._load.cache_clear()
    stand_ins.called.clear()


@pytest.fixture
def make_layer(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """`make_layer(case)`: a layer of the small vllm-gaudi, its weights loaded, without hooks."""
    monkeypatch.syspath_prepend(checkout)

    def make(case: MoECase, **changes: Any) -> Any:
        from vllm_gaudi.ops.hpu_mxfp4 import HPUGptOssMxfp4MoEMethod

        layer: Any = torch.nn.Module()
        names = (
            "w13_weight",
            "w13_weight_scale",
            "w2_weight",
            "w2_weight_scale",
            "",
            "",
            "w13_bias",
            "w2_bias",
        )
        for name, weight in zip(names, case.weights, strict=True):
            if weight is not None:
                setattr(layer, name, torch.nn.Parameter(changes.get(name, weight), requires_grad=False))
        layer.top_k, layer.first = case.topk_ids.shape[1], case.attributes["experts_min"]
        HPUGptOssMxfp4MoEMethod().process_weights_after_loading(layer)
        return layer

    yield make
    for name in [name for name in sys.modules if name.split(".")[0] == "vllm_gaudi"]:
        del sys.modules[name]


def gptoss_case(**changes: Any) -> MoECase:
    arguments = {
        "num_tokens": 40, "num_experts": 4, "top_k": 3, "hidden_size": 96, "intermediate_size": 64, "bias": True,
        "row_order": "interleaved", "activation": "swiglu_oai", "alpha": 1.702, "limit": 7.0,
    }  # fmt: skip
    return random_case(**{**arguments, **changes})


def call(layer: Any, case: MoECase, num_tokens: int, **changes: Tensor) -> Tensor:
    x, ids, weights = (value[:num_tokens] for value in case.routing)
    result: Tensor = layer.moe_op(
        changes.get("x", x), changes.get("ids", ids.int()), changes.get("weights", weights)
    )
    return result


def test_calls_by_tokens(make_layer: Callable[..., Any], said: Callable[[], list[str]]) -> None:
    case = gptoss_case(experts_min=8)
    layer = make_layer(case)
    assert gptoss.attach(layer, OPTIONS)
    expected = case.reference()
    for num_tokens, stock_calls in ((1, 0), (8, 0), (32, 0), (33, 1), (40, 2), (0, 3)):
        result = call(layer, case, num_tokens)
        assert layer.moe_op.stock_calls == stock_calls, num_tokens
        assert result.shape == (num_tokens, 96)
        assert num_tokens == 0 or rel_l2(result, expected[:num_tokens]) < (1e-2 if stock_calls else 4e-3)
    assert stand_ins.called == ["mxk_w13xib", "mxk_w2xb"] * 3
    assert said() == ["MXFP4 TPC MoE enabled (E_local=4 K=96 I=64, <= 32 tokens, <= 128 routes)"]


def test_lower_cap_and_routes(make_layer: Callable[..., Any]) -> None:
    case = gptoss_case(num_experts=8, top_k=8)
    layer = make_layer(case)
    gptoss.attach(layer, OPTIONS)
    call(layer, case, 16)
    assert layer.moe_op.stock_calls == 0
    call(layer, case, 17)  # 136 routes
    assert layer.moe_op.stock_calls == 1
    other = make_layer(case)
    gptoss.attach(other, Options(4, Path("lib"), "v"))
    call(other, case, 5)
    assert other.moe_op.stock_calls == 1


def test_views_are_made_in_the_call(make_layer: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    case = gptoss_case()
    layer = make_layer(case)
    gptoss.attach(layer, OPTIONS)
    seen: list[tuple[Tensor, ...]] = []
    first = torch.ops.custom_op.mxk_w13xib

    class Spy:
        def default(self, *arguments: Any) -> Tensor:
            seen.append(arguments)
            return first.default(*arguments)

    monkeypatch.setattr(torch.ops.custom_op, "mxk_w13xib", Spy())
    for _ in range(2):
        call(layer, case, 4)
    for x, ids, w13, s13, b13, *_ in seen:
        # Whole parameters, not slices of them; what is a view was made in this call.
        assert w13 is layer.w13_weight
        assert s13 is layer.w13_weight_scale
        assert b13 is layer.mxk_w13_bias
        assert ids.shape == (4, 3)
        assert x.shape == (4, 512)
    assert seen[0][0].data_ptr() != seen[1][0].data_ptr()


def test_moved_and_replaced_weights_are_followed(make_layer: Callable[..., Any]) -> None:
    case, other = gptoss_case(), gptoss_case(seed=7)
    layer = make_layer(case)
    gptoss.attach(layer, OPTIONS)
    layer.w13_weight = torch.nn.Parameter(other.w13, requires_grad=False)
    result = call(layer, case, 3)
    assert rel_l2(result, case.reference()[:3]) > 0.1
    buffers = dict(layer.named_buffers())
    assert buffers["mxk_w13_bias"].dtype == torch.float32
    assert not any(name.startswith("mxk_") for name in layer.state_dict())


def test_calls_without_routes_stay_stock(make_layer: Callable[..., Any]) -> None:
    case = gptoss_case()
    layer = make_layer(case)
    gptoss.attach(layer, OPTIONS)
    layer.moe_op.forward.stock = lambda x, *rest, **options: x
    x, ids, weights = (value[:2] for value in case.routing)
    layer.moe_op(x, ids[:, :0].int(), weights[:, :0])
    assert stand_ins.called == []


def test_weights_that_are_not_dense_stay_stock(
    make_layer: Callable[..., Any], said: Callable[[], list[str]]
) -> None:
    case = gptoss_case()
    layer = make_layer(case, w2_weight=case.w2.transpose(1, 2).contiguous().transpose(1, 2))
    assert not gptoss.attach(layer, OPTIONS)
    assert "w2 has strides (3072, 1, 96); allowed: dense tensors" in said()[0]


@pytest.mark.parametrize("name", ["w13", "w2"])
def test_scales_that_are_nan_stay_stock(
    name: str, make_layer: Callable[..., Any], said: Callable[[], list[str]]
) -> None:
    case = gptoss_case()
    getattr(case, f"{name}_scale")[2, 5, 1] = 255
    assert not gptoss.attach(make_layer(case), OPTIONS)
    (line,) = said()
    assert f"{name}_weight_scale holds scale byte 255, which is NaN; allowed: scale bytes 0 to 254" in line


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("has_bias", "has_bias is False; allowed: True"),
        ("block_size", "block_size is 64; allowed: 32"),
        ("experts_max", "experts 0 to 4 in 4 local ones; allowed: as many ids as experts"),
        ("list", "expert 2 listed is not that of w2_weight; allowed: the layer's own slices"),
        ("short", "3 experts listed for 4 in w13_weight; allowed: the layer's own slices"),
        ("top_k", "AttributeError: 'Module' object has no attribute 'top_k'"),
        ("w2_bias", "AttributeError: 'Module' object has no attribute 'w2_bias'"),
    ],
)  # fmt: skip
def test_layers_that_are_not_as_expected(
    change: str, reason: str, make_layer: Callable[..., Any], said: Callable[[], list[str]]
) -> None:
    layers = [make_layer(gptoss_case()) for _ in range(2)]
    for layer in layers:
        op = layer.moe_op
        if change == "list":
            op.w2_list[2].weight = op.w2_list[1].weight
        elif change == "short":
            del op.w13_list[3]
        elif hasattr(op, change):
            setattr(op, change, {"has_bias": False, "block_size": 64, "experts_max": 4}[change])
        else:
            delattr(layer, change)
        assert not gptoss.attach(layer, OPTIONS)
        assert "forward" not in vars(op)
    if not reason.startswith("AttributeError"):
        reason = f"gpt-oss layer: {reason}; the stock op stays"
    assert said() == [f"MXFP4 TPC MoE keeps the stock op: {reason}"]


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ({"intermediate_size": 48}, "gptoss: I is 48, allowed: a multiple of 32, 1 to 3072"),
        ({"hidden_size": 3104, "num_experts": 1}, "gptoss: K is 3104, allowed: a multiple of 32, 1 to 3072"),
        ({"num_experts": 129}, "gptoss: E is 129, allowed: 1 to 128"),
    ],
)
def test_sizes_beyond_the_kernels(
    sizes: dict[str, int], reason: str, make_layer: Callable[..., Any], said: Callable[[], list[str]]
) -> None:
    case = gptoss_case(num_tokens=1, top_k=1, **sizes)
    layer = make_layer(case)
    assert not gptoss.attach(layer, OPTIONS)
    assert said() == [
        f"MXFP4 TPC MoE keeps the stock op: gpt-oss layer: Gaudi kernels: {reason}; "
        "allowed: the sizes of docs/gaudi.md; the stock op stays"
    ]
    assert call(layer, case, 1).shape == case.hidden_states.shape


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"x": torch.zeros(2, 96)},
            "hidden_states are [2, 96] torch.float32; allowed: [T, K] torch.bfloat16",
        ),
        (
            {"ids": torch.zeros(2, 3, dtype=torch.int16)},
            "expert_routing_table is [2, 3] torch.int16; allowed: [T, k] torch.int32, torch.int64",
        ),
        (
            {"weights": torch.ones(2, 3, dtype=torch.int32)},
            "router_weights are [2, 3] torch.int32; allowed: [T, k] floating point",
        ),
    ],
)
def test_unexpected_calls_stay_stock(
    changes: dict[str, Tensor], reason: str, make_layer: Callable[..., Any], said: Callable[[], list[str]]
) -> None:
    case = gptoss_case()
    layer = make_layer(case)
    gptoss.attach(layer, OPTIONS)
    for _ in range(2):
        with contextlib.suppress(Exception):  # the stock op has its own opinion of it
            call(layer, case, 2, **changes)
    assert layer.moe_op.stock_calls == 2
    assert stand_ins.called == []
    assert said()[1:] == [f"MXFP4 TPC MoE keeps the stock op: {reason}"]


def test_a_colliding_op_keeps_the_stock_op(
    make_layer: Callable[..., Any], said: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signature_table, "registered_ops", lambda: {"custom_op::sinkhorn": 6})
    assert not gptoss.attach(make_layer(gptoss_case()), OPTIONS)
    assert said() == [
        "MXFP4 TPC MoE keeps the stock op: custom_op::sinkhorn: 6 tensor inputs, as custom_op::mxk_w2xb: lazy mode "
        "would return one's result for the other; allowed: a number that no other custom op of the process has; "
        "use one of them"
    ]


def test_the_library_is_loaded_once_and_named_if_it_fails(
    make_layer: Callable[..., Any], said: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []

    def load(folder: Path, kind: str) -> None:
        calls.append((folder, kind))
        if len(calls) < 3:
            raise KernelError("lib/libmxk_op_lazy.so", "it is not there", "a build", "build it again")

    monkeypatch.setattr(gptoss, "load_ops", load)
    assert [gptoss.attach(make_layer(gptoss_case()), OPTIONS) for _ in range(4)] == [False, False, True, True]
    assert calls == [(Path("lib"), "lazy")] * 3
    assert said()[:1] == [
        "MXFP4 TPC MoE keeps the stock op: lib/libmxk_op_lazy.so: it is not there; allowed: a build; build it again"
    ]
    assert len(said()) == 2


@pytest.mark.parametrize("ids", [[-1, 3, 99], [2, 2, 2], [-1, -1, 7], [0, 1, 2]])
def test_routing(ids: list[int], make_layer: Callable[..., Any]) -> None:
    case = gptoss_case(num_tokens=2)
    layer = make_layer(case)
    gptoss.attach(layer, OPTIONS)
    case.topk_ids = torch.tensor([ids, [1, 0, 3]])
    result = call(layer, case, 2)
    assert rel_l2(result, case.reference()) < 4e-3
    if ids == [-1, -1, 7]:
        assert (result[0] == 0).all()
