"""The `hpu::` stand-ins against fp64 computations that share no code with them."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd

import mxk_compile
from mxk_compile.errors import BackwardError, CallError

moe = torch.ops.hpu.mixture_of_experts
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
OVERLOADS = ("default", "fused_weights", "bias_fused_weights", "mxfp4", "mxfp4_fused_weights")
OVERLOADS += ("bias_mxfp4_fused_weights", "int4_fused_weights")
P = "Tensor hidden_states, Tensor expert_routing_table, Tensor router_weights, "
SCHEMAS = {
    "default": P + "Tensor[] w1, Tensor[] w2, Tensor[] w3, bool permuted_weights, str activation, "
    "int experts_min, int experts_max, *, bool? recomp=True, int chunk_size=0, int total_experts=0",
    "fused_weights": P + "Tensor[] w12, Tensor[] w3, bool permuted_weights, str activation, "
    "int experts_min, int experts_max, *, bool? recomp=True, int chunk_size=0, int total_experts=0",
    "bias_fused_weights": P + "Tensor[] w12, Tensor[] w3, Tensor[] w12_bias, Tensor[] w3_bias, *, "
    "bool permuted_weights, int experts_min, int experts_max, int chunk_size=0, int total_experts=0, "
    "float alpha=1.702, float limit=7.",
    "mxfp4": P + "Tensor[] w1, Tensor[] w2, Tensor[] w3, Tensor[] d_scale_w1, Tensor[] d_scale_w2, "
    "Tensor[] d_scale_w3, *, int block_size, bool permuted_weights, str activation, int experts_min, "
    "int experts_max, bool is_fp4, int chunk_size=0, int total_experts=0",
    "mxfp4_fused_weights": P + "Tensor[] w12, Tensor[] w3, Tensor[] d_scale_w12, Tensor[] d_scale_w3, *, "
    "int block_size, bool permuted_weights, str activation, int experts_min, int experts_max, "
    "bool is_fp4, int chunk_size=0, int total_experts=0",
    "bias_mxfp4_fused_weights": P + "Tensor[] w12, Tensor[] w3, Tensor[] w12_bias, Tensor[] w3_bias, "
    "Tensor[] d_scale_w12, Tensor[] d_scale_w3, *, int block_size, bool permuted_weights, "
    "int experts_min, int experts_max, bool is_fp4, int chunk_size=0, int total_experts=0, "
    "float alpha=1.702, float limit=7.",
    "int4_fused_weights": P + "Tensor[] w12, Tensor[] w3, Tensor[] d_scale_w12, Tensor[] d_scale_w3, *, "
    "bool permuted_weights, str activation, int experts_min, int experts_max, int chunk_size=0, "
    "int total_experts=0",
}
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)


def unpack_mxfp4(packed: Tensor, scale: Tensor, columns: int) -> Tensor:
    codes = torch.empty(packed.shape[0], 2 * packed.shape[1], dtype=torch.int64)
    codes[:, 0::2], codes[:, 1::2] = packed.long() % 16, packed.long() // 16
    factors = torch.exp2(scale.double() - 127).repeat_interleave(32, dim=1)
    return E2M1[codes][:, :columns] * factors[:, :columns]


def nibbles(words: Tensor) -> Tensor:
    unsigned = words.long() % 2**32
    return torch.stack([unsigned // 16**i % 16 for i in range(8)], dim=-1).flatten(-2)


def signed_nibbles(words: Tensor) -> Tensor:
    codes = nibbles(words)
    return torch.where(codes > 7, codes - 16, codes)


def words_like(*shape: int) -> Tensor:
    return torch.randint(-(2**31), 2**31, shape, dtype=torch.int64).to(torch.int32)


class Layer:
    """Random experts of one overload: its list arguments, and their values in fp64."""

    def __init__(self, overload: str, experts: int = 4, hidden: int = 128, inner: int = 64) -> None:
        self.overload, self.experts, self.hidden, self.inner = overload, experts, hidden, inner
        self.lists: dict[str, list[Tensor]] = {}
        self.flags: dict[str, Any] = {"permuted_weights": True}
        separate = overload in ("default", "mxfp4")
        if "mxfp4" in overload:
            self.flags |= {"block_size": 32, "is_fp4": True}
        if "int4" in overload:
            self.flags["permuted_weights"] = False
        if "bias" not in overload:
            self.flags["activation"] = "silu"
        self.values = {
            name: [self._matrix(name, outputs, inputs) for _ in range(experts)]
            for name, outputs, inputs in (
                [("w1", inner, hidden), ("w2", inner, hidden)] if separate else [("w12", 2 * inner, hidden)]
            )
            + [("w3", hidden, inner)]
        }
        self.biases: dict[str, list[Tensor]] = {}
        if "bias" in overload:
            for name, size in (("w12_bias", 2 * inner), ("w3_bias", hidden)):
                self.biases[name] = [torch.randn(size).bfloat16() for _ in range(experts)]
        self.lists |= self.biases

    def _matrix(self, name: str, outputs: int, inputs: int) -> Tensor:
        """One expert's matrix, put into `lists`; returns its values [outputs, inputs]."""
        scales = self.lists.setdefault(f"d_scale_{name}", []) if "4" in self.overload else []
        stored = self.lists.setdefault(name, [])
        if "mxfp4" in self.overload:
            stored.append(torch.randint(0, 256, (outputs, math.ceil(inputs / 2)), dtype=torch.uint8))
            shape = (outputs, math.ceil(inputs / 32))
            scales.append(torch.randint(121, 125, shape, dtype=torch.uint8))
            return unpack_mxfp4(stored[-1], scales[-1], inputs)
        if "int4" in self.overload:
            stored.append(words_like(inputs, outputs // 8))
            scales.append((torch.rand(inputs // 32, outputs) * 0.02).bfloat16())
            values = signed_nibbles(stored[-1]) * scales[-1].double().repeat_interleave(32, dim=0)
            return values.T
        stored.append((torch.randn(outputs, inputs) * 0.1).bfloat16())
        return stored[-1].double()

    def __call__(
        self, x: Tensor, ids: Tensor, weights: Tensor, first: int = 0, count: int | None = None, **other: Any
    ) -> Tensor:
        """The packet called by names, with `count` of the experts, the first of which is `first`."""
        count = self.experts if count is None else count
        lists = {name: [t.to(x.device) for t in ts[first : first + count]] for name, ts in self.lists.items()}
        ends = {"experts_min": first, "experts_max": first + count - 1}
        call = {**lists, **self.flags, **ends, **other}
        result: Tensor = moe(hidden_states=x, expert_routing_table=ids, router_weights=weights, **call)
        return result

    def expected(self, x: Tensor, ids: Tensor, weights: Tensor, activation: str = "silu") -> Tensor:
        """The same in fp64, a route at a time, without any rounding."""
        result = torch.zeros(x.shape, dtype=torch.float64)
        for token in range(ids.shape[0]):
            for slot in range(ids.shape[1]):
                expert = int(ids[token, slot])
                if 0 <= expert < self.experts:
                    y = self._route(x[token].double().cpu(), expert, activation)
                    result[token] += y * weights[token, slot].double().cpu()
        return result

    def _route(self, x: Tensor, expert: int, activation: str) -> Tensor:
        down = self.values["w3"][expert]
        if self.biases:
            h = self.values["w12"][expert] @ x + self.biases["w12_bias"][expert].double()
            gate, up = h[0::2].clamp(max=7.0), h[1::2].clamp(-7.0, 7.0)
            a = gate / (1 + torch.exp(-1.702 * gate)) * (up + 1)
            return down @ a + self.biases["w3_bias"][expert].double()
        if "w12" in self.values:
            h = self.values["w12"][expert] @ x
            gate, up = h[: self.inner], h[self.inner :]
        else:
            gate, up = self.values["w1"][expert] @ x, self.values["w2"][expert] @ x
        if activation == "silu":
            gate = gate / (1 + torch.exp(-gate))
        elif activation == "relu":
            gate = gate.clamp(min=0)
        else:
            gate = gate * 0.5 * (1 + torch.erf(gate / math.sqrt(2)))
        return down @ (gate * up)


def tokens(
    num_tokens: int, hidden: int = 128, experts: int = 4, top_k: int = 2
) -> tuple[Tensor, Tensor, Tensor]:
    """hidden_states, distinct ids, router weights."""
    x = torch.randn(num_tokens, hidden).bfloat16()
    ids = torch.rand(num_tokens, experts).argsort(dim=1)[:, :top_k].contiguous()
    return x, ids, torch.rand(num_tokens, top_k).bfloat16()


def rel_l2(result: Tensor, expected: Tensor) -> float:
    return float((result.double().cpu() - expected).norm() / expected.norm())


def op(overload: str) -> torch._ops.OpOverload:
    return getattr(moe, overload)


# Schemas


def test_every_published_schema_is_defined_word_for_word() -> None:
    assert set(moe.overloads()) == set(OVERLOADS)
    for overload, arguments in SCHEMAS.items():
        name = "" if overload == "default" else f".{overload}"
        assert str(op(overload)._schema) == f"hpu::mixture_of_experts{name}({arguments}) -> Tensor"
    for name in ("convert_from_uint4", "convert_from_int4"):
        assert str(getattr(torch.ops.hpu, name).default._schema) == (
            f"hpu::{name}(Tensor input, Tensor scale, Tensor? zero_point, ScalarType out_dtype, "
            "Tensor? group_index=None, *, bool disable_fp8_clipping=False) -> Tensor"
        )


BRIDGE = """
import sys, torch
from mxk_compile.ops import stock
import mxk_compile
assert not stock.needs_stand_in() and stock.library is None
assert not hasattr(torch.ops.hpu, "mixture_of_experts") and not hasattr(torch.ops.hpu, "convert_from_int4")
assert "habana_frameworks" not in sys.modules
"""
OTHERS = """
import torch
other = torch.library.Library("hpu", "FRAGMENT")
other.define("mixture_of_experts.fused_weights(Tensor x) -> Tensor")
from mxk_compile.ops import stock
import mxk_compile
assert stock.library is None and torch.ops.hpu.mixture_of_experts.overloads() == ["fused_weights"]
assert not hasattr(torch.ops.hpu, "convert_from_int4")
"""


@pytest.mark.parametrize("script", [BRIDGE, OTHERS], ids=["bridge on the path", "ops defined by others"])
def test_hpu_is_left_alone(script: str, tmp_path: Path) -> None:
    if script is BRIDGE:
        (tmp_path / "habana_frameworks").mkdir()
        (tmp_path / "habana_frameworks" / "__init__.py").write_text("raise ImportError('no device')\n")
    root = str(Path(mxk_compile.__file__).parents[1])
    path = f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {root!r}]\n"
    run = subprocess.run([sys.executable, "-c", path + script], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


# Numbers


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("overload", OVERLOADS)
def test_values(overload: str, device: str) -> None:
    layer, (x, ids, weights) = Layer(overload), tokens(9)
    result = layer(x.to(device), ids.to(device), weights.to(device))
    assert result.dtype == torch.bfloat16
    assert result.is_contiguous()
    # Eight roundings to bf16 (2^-9 each) one after the other.
    assert 1e-4 < rel_l2(result, layer.expected(x, ids, weights)) < 8e-3


@pytest.mark.parametrize("overload", ["mxfp4", "mxfp4_fused_weights", "bias_mxfp4_fused_weights"])
@pytest.mark.parametrize(("hidden", "inner"), [(48, 80), (32, 48), (48, 64), (130, 46), (33, 31)])
def test_mxfp4_of_any_size(overload: str, hidden: int, inner: int) -> None:
    layer, (x, ids, weights) = Layer(overload, hidden=hidden, inner=inner), tokens(5, hidden)
    assert rel_l2(layer(x, ids, weights), layer.expected(x, ids, weights)) < 8e-3


@pytest.mark.parametrize("activation", ["gelu", "relu", "silu"])
@pytest.mark.parametrize("overload", ["default", "mxfp4_fused_weights"])
def test_activations(overload: str, activation: str) -> None:
    layer, (x, ids, weights) = Layer(overload), tokens(5)
    result = layer(x, ids, weights, activation=activation)
    assert rel_l2(result, layer.expected(x, ids, weights, activation)) < 8e-3


@pytest.mark.parametrize("overload", ["default", "fused_weights", "bias_fused_weights"])
def test_plain_weights_not_permuted(overload: str) -> None:
    layer, (x, ids, weights) = Layer(overload), tokens(5)
    for name in set(layer.lists) - set(layer.biases):
        layer.lists[name] = [t.T.contiguous() for t in layer.lists[name]]
    result = layer(x, ids, weights, permuted_weights=False)
    assert rel_l2(result, layer.expected(x, ids, weights)) < 8e-3


def test_fp32_hidden_states_stay_fp32_also_under_autocast() -> None:
    layer, (x, ids, weights) = Layer("fused_weights"), tokens(5)
    layer.lists = {name: [t.float() for t in tensors] for name, tensors in layer.lists.items()}
    result = layer(x.float(), ids, weights.float())
    assert rel_l2(result, layer.expected(x, ids, weights)) < 1e-6
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(layer(x.float(), ids, weights.float()), result)


@pytest.mark.parametrize("overload", ["fused_weights", "bias_mxfp4_fused_weights"])
def test_every_step_is_rounded_to_bf16(overload: str) -> None:
    layer = Layer(overload, experts=1)
    x, ids, weights = tokens(3, experts=1, top_k=1)
    w12, w3 = layer.values["w12"][0].bfloat16(), layer.values["w3"][0].bfloat16()
    h = x @ w12.T
    if layer.biases:
        h = h + layer.biases["w12_bias"][0]
        gate, up = h[:, 0::2].clamp(max=7.0), h[:, 1::2].clamp(-7.0, 7.0)
        a = gate * torch.sigmoid(1.702 * gate) * (up + 1)
        y = a @ w3.T + layer.biases["w3_bias"][0]
    else:
        y = (torch.nn.functional.silu(h[:, :64]) * h[:, 64:]) @ w3.T
    assert torch.equal(layer(x, ids, weights), y * weights)


def constant_layer(gates: list[float], ups: list[float]) -> Layer:
    """One expert a gate: the first inner value comes from the biases alone, and is the first output."""
    layer = Layer("bias_mxfp4_fused_weights", experts=len(gates), inner=32, hidden=32)
    layer.lists["w12"] = [torch.zeros(64, 16, dtype=torch.uint8) for _ in gates]
    layer.lists["w3"] = [torch.zeros(32, 16, dtype=torch.uint8) for _ in gates]
    for expert, (gate, up) in enumerate(zip(gates, ups, strict=True)):
        layer.lists["w3"][expert][0, 0] = 2  # code of 1.0 for inner value 0
        layer.lists["d_scale_w3"][expert].fill_(127)
        layer.lists["w12_bias"][expert] = torch.zeros(64).bfloat16()
        layer.lists["w12_bias"][expert][:2] = torch.tensor([gate, up])
        layer.lists["w3_bias"][expert].zero_()
    return layer


@pytest.mark.parametrize(
    ("gate", "up", "constants", "expected"),
    [
        (-20.0, -9.0, {}, -20 / (1 + math.exp(1.702 * 20)) * -6),  # 2e-13; clamping the gate below: 2.8e-4
        (9.0, 9.0, {}, 7 / (1 + math.exp(-1.702 * 7)) * 8),
        (9.0, 9.0, {"limit": 10.0}, 9 / (1 + math.exp(-1.702 * 9)) * 10),
        (9.0, 9.0, {"limit": 1e9, "alpha": 0.125}, 9 / (1 + math.exp(-0.125 * 9)) * 10),
    ],
)
def test_swiglu_oai_clamps_the_gate_above_only(
    gate: float, up: float, constants: dict[str, float], expected: float
) -> None:
    layer, ones = constant_layer([gate], [up]), torch.ones(1, 1).bfloat16()
    result = layer(torch.zeros(1, 32).bfloat16(), torch.zeros(1, 1, dtype=torch.int64), ones, **constants)
    assert result[0, 0].item() == pytest.approx(expected, rel=2e-2)
    assert not result[0, 1:].any()


def test_the_sum_over_experts_is_a_running_bf16_sum() -> None:
    layer = constant_layer([0.0] * 3, [0.0] * 3)
    for expert, value in enumerate([1.0, 2.0**-9, -1.0]):
        layer.lists["w3_bias"][expert][0] = value
    x, ids = torch.zeros(1, 32).bfloat16(), torch.tensor([[0, 1, 2]])
    # In fp32 it would be 2^-9.
    assert layer(x, ids, torch.ones(1, 3).bfloat16())[0, 0] == 0


def test_scale_byte_255_is_nan_for_the_tokens_of_that_expert_only() -> None:
    layer = Layer("mxfp4_fused_weights")
    layer.lists["d_scale_w12"][1][3, 0] = 255
    x, _, weights = tokens(2)
    result = layer(x, torch.tensor([[0, 1], [2, 3]]), weights)
    assert result[0].isnan().all()
    assert result[1].isfinite().all()


# Routing


@pytest.mark.parametrize("device", DEVICES)
def test_ids_of_other_ranks_add_nothing(device: str) -> None:
    layer = Layer("bias_mxfp4_fused_weights")
    layer.lists["d_scale_w12"][1].fill_(255)  # NaN for whoever touches expert 1
    x, _, weights = (t.to(device) for t in tokens(4))
    ids = torch.tensor([[-1, 2], [7, 3], [4, -1], [2147483647, 0]], device=device)
    result = layer(x, ids, weights.fill_(0.5))
    local = layer(x, torch.tensor([[2], [3], [0], [0]], device=device), weights[:, :1].contiguous())
    assert torch.equal(result[[0, 1, 3]], local[[0, 1, 3]])
    assert torch.equal(result[2].view(torch.int16).cpu(), torch.zeros(128, dtype=torch.int16))


@pytest.mark.parametrize("overload", OVERLOADS)
def test_four_ranks_sum_to_the_whole(overload: str) -> None:
    layer = Layer(overload, experts=16)
    x, ids, weights = tokens(8, experts=16, top_k=4)
    parts = [layer(x, ids, weights, first=rank * 4, count=4) for rank in range(4)]
    assert all(part.any() for part in parts)
    assert rel_l2(torch.stack(parts).double().sum(0), layer.expected(x, ids, weights)) < 8e-3
    last = {name: tensors[12:] for name, tensors in layer.lists.items()}
    shifted = moe(x, ids - 12, weights, **last, **layer.flags, experts_min=0, experts_max=3)
    assert torch.equal(parts[3], shifted)


def test_no_token() -> None:
    layer, (x, ids, weights) = Layer("bias_mxfp4_fused_weights"), tokens(4)
    call = torch.compile(layer, backend="aot_eager", fullgraph=True)
    for run in (layer, call):
        assert run(x, ids, weights).shape == (4, 128)
        empty = run(x[:0], ids[:0], weights[:0])
        assert (empty.shape, empty.dtype) == ((0, 128), torch.bfloat16)


def test_ids_of_any_integer_dtype() -> None:
    layer, (x, ids, weights) = Layer("mxfp4_fused_weights"), tokens(4)
    expected = layer(x, ids, weights)
    unsigned = (torch.uint8, torch.uint16, torch.uint32, torch.uint64)
    for dtype in (torch.int8, torch.int16, torch.int32, *unsigned):
        assert torch.equal(layer(x, ids.to(dtype), weights), expected)
    ids[0] = torch.tensor([2**32 + 3, 1])
    local = layer(x[:1], torch.tensor([[1]]), weights[:1, 1:].contiguous())
    assert torch.equal(layer(x, ids, weights)[:1], local)


def test_duplicate_ids_add() -> None:
    layer, (x, _, weights) = Layer("int4_fused_weights"), tokens(2)
    ids = torch.tensor([[2, 2], [1, 1]])
    assert rel_l2(layer(x, ids, weights), layer.expected(x, ids, weights)) < 8e-3


def test_strided_inputs_are_read_where_they_lie() -> None:
    layer, (x, ids, weights) = Layer("bias_mxfp4_fused_weights"), tokens(4)
    expected = layer(x, ids, weights)
    wide = torch.full((4, 256), float("nan")).bfloat16()
    wide[:, :128] = x
    columns = (ids.T.contiguous().T, weights.T.contiguous().T)
    assert torch.equal(layer(wide[:, :128], *columns), expected)
    assert torch.equal(layer(x.T.contiguous().T, *columns), expected)
    assert torch.equal(layer(x[:1].expand(4, 128), ids, weights)[:1], expected[:1])


# Errors


@pytest.mark.parametrize(
    ("overload", "other", "text"),
    [
        (
            "fused_weights",
            {"activation": "gelu_tanh"},
            "activation='gelu_tanh'; allowed: 'gelu', 'relu', 'silu'",
        ),
        ("mxfp4", {"block_size": 16}, "block_size=16; allowed: 32"),
        ("mxfp4_fused_weights", {"is_fp4": False}, "is_fp4=False; allowed: True"),
        ("bias_mxfp4_fused_weights", {"permuted_weights": False}, "permuted_weights=False; allowed: True"),
        ("int4_fused_weights", {"permuted_weights": True}, "permuted_weights=True; allowed: False"),
        ("fused_weights", {"experts_max": 2}, "4 tensors in w12; allowed: 3, one for each id of 0..2"),
        ("mxfp4", {"d_scale_w2": []}, "0 tensors in d_scale_w2; allowed: 4, one for each id of 0..3"),
        (
            "fused_weights",
            {"w3": [torch.zeros(128, 32).bfloat16()] * 4},
            "w3[0] bfloat16 [128, 32]; allowed: bfl",
        ),
        (
            "fused_weights",
            {"w3": [torch.zeros(128, 64)] * 4},
            "w3[0] float32 [128, 64]; allowed: bfloat16 [128, 64]",
        ),
        (
            "int4_fused_weights",
            {"d_scale_w3": [torch.ones(3, 128)] * 4},
            "d_scale_w3[0] float32 [3, 128]; allowed",
        ),
    ],
)
def test_refused_calls(overload: str, other: dict[str, Any], text: str) -> None:
    layer, routed = Layer(overload), tokens(4)
    with pytest.raises(CallError) as error:
        layer(*routed, **other)
    name = "" if overload == "default" else f".{overload}"
    assert str(error.value).startswith(f"hpu::mixture_of_experts{name}: {text}")
    assert "\n" not in str(error.value)


def test_refused_routing() -> None:
    layer, (x, ids, weights) = Layer("mxfp4_fused_weights"), tokens(4)
    with pytest.raises(CallError, match=r"expert_routing_table float32 \[4, 2\]; allowed: integer \[4, k\]"):
        layer(x, ids.float(), weights)
    with pytest.raises(CallError, match=r"expert_routing_table int64 \[3, 2\]; allowed: integer \[4, k\]"):
        layer(x, ids[:3], weights[:3])
    with pytest.raises(
        CallError, match=r"router_weights bfloat16 \[4, 1\]; allowed: floating point \[4, 2\]"
    ):
        layer(x, ids, weights[:, :1])
    with pytest.raises(
        CallError, match=r"hidden_states bfloat16 \[1, 4, 128\]; allowed: floating point \[T, K\]"
    ):
        layer(x[None], ids, weights)


# Graphs and gradients


@pytest.mark.parametrize("overload", OVERLOADS)
def test_one_node_in_the_graph_for_packet_and_overload(overload: str) -> None:
    layer, routed = Layer(overload), tokens(4)
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        graphs.append(graph)
        return graph.forward

    def dotted(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        result: Tensor = op(overload)(
            x, ids, weights, **layer.lists, **layer.flags, experts_min=0, experts_max=3, chunk_size=0
        )
        return result

    expected = layer(*routed)
    assert torch.equal(dotted(*routed), expected)
    for function in (layer, dotted) if overload == "bias_mxfp4_fused_weights" else (layer,):
        compiled = torch.compile(
            function, backend=aot_autograd(fw_compiler=keep), fullgraph=True, dynamic=True
        )
        with torch.no_grad():
            assert torch.equal(compiled(*routed), expected)
        calls = [node for node in graphs[-1].graph.nodes if node.op == "call_function"]
        calls = [node for node in calls if "sym_size" not in str(node.target)]
        assert [node.target for node in calls] == [op(overload)]
        value = calls[0].meta["val"]
        assert (value.dtype, tuple(value.stride())) == (torch.bfloat16, (128, 1))


@pytest.mark.parametrize("overload", ["default", "bias_mxfp4_fused_weights", "int4_fused_weights"])
def test_opcheck(overload: str) -> None:
    layer, routed = Layer(overload, experts=2), tokens(3, experts=2)
    arguments = {**layer.lists, **layer.flags, "experts_min": 0, "experts_max": 1}
    positional = [a.name for a in op(overload)._schema.arguments if not a.kwarg_only][3:]
    args = (*routed, *(arguments.pop(name) for name in positional))
    torch.library.opcheck(op(overload), args, arguments)


def test_export_with_any_number_of_tokens() -> None:
    class Model(torch.nn.Module):
        layer = Layer("mxfp4_fused_weights")

        def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
            return self.layer(x, ids, weights)

    num_tokens = torch.export.Dim("T", min=0, max=64)
    dynamic = ({0: num_tokens},) * 3
    exported = torch.export.export(Model(), tokens(4), dynamic_shapes=dynamic).module()
    for count in (0, 1, 64):
        routed = tokens(count)
        assert torch.equal(exported(*routed), Model()(*routed))


@pytest.mark.parametrize("overload", OVERLOADS)
def test_a_gradient_is_refused_when_it_is_asked_for(overload: str) -> None:
    layer, (x, ids, weights) = Layer(overload), tokens(4)
    expected = layer(x, ids, weights)
    result = layer(x.requires_grad_(), ids, weights)
    assert torch.equal(result, expected)
    with pytest.raises(BackwardError, match=f"hpu.mixture_of_experts.{overload}: a gradient was asked"):
        result.sum().backward()


def test_a_gradient_of_a_list_is_refused_too() -> None:
    layer, routed = Layer("fused_weights"), tokens(4)
    expected = layer(*routed)
    layer.lists["w3"] = [w.requires_grad_() for w in layer.lists["w3"]]
    # Compiled, the forward must run although the joint graph holds the refusal.
    for run in (
        layer,
        *(torch.compile(layer, backend=name, fullgraph=True) for name in ("aot_eager", "inductor")),
    ):
        result = run(*routed)
        assert torch.equal(result, expected)
        with pytest.raises(BackwardError):
            result.sum().backward()


# convert_from_uint4, convert_from_int4


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["convert_from_uint4", "convert_from_int4"])
@pytest.mark.parametrize("zero", ["none", "packed", "int32", "floating"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_convert_values(name: str, zero: str, dtype: torch.dtype, device: str) -> None:
    words, scale = words_like(64, 4), torch.rand(2, 32).to(dtype)
    codes = (nibbles if "uint4" in name else signed_nibbles)(words)
    zero_point, offset = None, torch.zeros(2, 32, dtype=torch.float64)
    if zero == "packed":
        zero_point = words_like(2, 4)
        offset = (nibbles if "uint4" in name else signed_nibbles)(zero_point).double()
    elif zero != "none":
        zero_point = torch.randint(0, 16, (2, 32)).to(torch.int32 if zero == "int32" else dtype)
        offset = zero_point.double()
    operands = [None if t is None else t.to(device) for t in (words, scale, zero_point)]
    result = getattr(torch.ops.hpu, name)(*operands, dtype)
    grouped = (codes - offset.repeat_interleave(32, 0)) * scale.double().repeat_interleave(32, 0)
    # Codes and zero points are exact: one rounding, that of the product.
    assert result.dtype == dtype
    assert torch.equal(result.cpu(), grouped.to(dtype))


def test_vllm_gaudi_symmetric_codes() -> None:
    """One shared word of eights a layer, codes 0..15: the values are those of the signed codes."""
    signed, scale = words_like(64, 4), torch.rand(2, 32).bfloat16()
    eights = torch.full((2, 4), 0x88888888 - 2**32, dtype=torch.int32)
    codes = signed ^ (0x88888888 - 2**32)
    unsigned = torch.ops.hpu.convert_from_uint4(codes, scale, eights, torch.bfloat16)
    assert torch.equal(unsigned, torch.ops.hpu.convert_from_int4(signed, scale, None, torch.bfloat16))


def test_convert_shapes_that_the_bridge_takes() -> None:
    convert = torch.ops.hpu.convert_from_uint4
    line = words_like(10)
    assert torch.equal(convert(line, torch.full((80,), 2.0), None, torch.float32), 2.0 * nibbles(line))
    cube, scale = words_like(4, 6, 4), torch.rand(4, 6, 8)
    expected = nibbles(cube).float() * scale.repeat_interleave(4, dim=2)
    assert torch.equal(convert(cube, scale, None, torch.float32), expected)
    turned = words_like(4, 8).T
    assert torch.equal(convert(turned, torch.ones(8, 32), None, torch.float32), nibbles(turned).float())


def test_group_index_names_the_group_of_each_row() -> None:
    words, scale, zero = words_like(8, 2), torch.rand(4, 16).bfloat16(), words_like(4, 2)
    order = torch.tensor([3, 0, 1, 2, 2, 3, 0, 1], dtype=torch.int32)
    result = torch.ops.hpu.convert_from_uint4(words, scale, zero, torch.bfloat16, order)
    expected = (nibbles(words) - nibbles(zero)[order.long()]) * scale.double()[order.long()]
    assert torch.equal(result, expected.bfloat16())


def test_fp8_results_saturate_unless_told_otherwise() -> None:
    words, scale = torch.full((1, 1), 0x77777777, dtype=torch.int32), torch.full((1, 8), 1e6)
    convert = torch.ops.hpu.convert_from_int4
    assert (convert(words, scale, None, torch.float8_e5m2).float() == 57344).all()
    overflow = convert(words, scale, None, torch.float8_e5m2, disable_fp8_clipping=True)
    assert not overflow.float().isfinite().any()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"input": torch.zeros(8, 2, dtype=torch.int64)}, "input int64 [8, 2]; allowed: int32 with 1 to 4"),
        ({"scale": torch.ones(3, 16)}, "scale [3, 16]; allowed: [8, 16], one dimension divided by the group"),
        ({"scale": torch.ones(2, 8)}, "scale [2, 8]; allowed: [8, 16]"),
        ({"zero_point": torch.ones(2, 16).half()}, "zero_point float16 [2, 16]; allowed: int32, float32"),
        ({"zero_point": torch.ones(2, 5)}, "zero_point [2, 5]; allowed: [8, 16]"),
        (
            {"group_index": torch.zeros(8).long()},
            "group_index with out_dtype=float32, disable_fp8_clipping=False",
        ),
        (
            {"group_index": torch.zeros(7).long(), "out_dtype": torch.bfloat16},
            "group_index int64 [7]; allowed: integer [8]",
        ),
    ],
)
def test_refused_converts(change: dict[str, Any], text: str) -> None:
    call = {
        "input": words_like(8, 2),
        "scale": torch.ones(2, 16),
        "zero_point": None,
        "out_dtype": torch.float32,
    }
    with pytest.raises(CallError) as error:
        torch.ops.hpu.convert_from_uint4(**{**call, **change})
    assert str(error.value).startswith(f"hpu::convert_from_uint4: {text}")


@pytest.mark.parametrize("name", ["convert_from_uint4", "convert_from_int4"])
def test_convert_opcheck(name: str) -> None:
    op = getattr(torch.ops.hpu, name).default
    torch.library.opcheck(op, (words_like(8, 2), torch.rand(2, 16), words_like(2, 2), torch.bfloat16))
    order = torch.tensor([1, 0, 1, 0, 1, 0, 1, 0])
    torch.library.opcheck(op, (words_like(8, 2), torch.rand(2, 16), None, torch.bfloat16, order))
