"""Stand-ins for what only a Gaudi machine has: the kernels' ops in plain torch, device "hpu" for fakes, the bridge.

The CPU implementations of `custom_op::mxk_*` work in the kernels' own layout (x and a in chunk order, padding,
routes), decode MXFP4 by a table of their own, and write NaN wherever a kernel promises nothing, so that a lowering
which reads such places shows.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, fx

from mxk_compile.kernels import MoEDesc
from mxk_compile.kernels.tpc import emulated_ops
from mxk_compile.kernels.tpc.signatures import DTYPES, KERNELS, Kernel
from mxk_compile.passes import warm

_CHUNK = 512
_E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)

called: list[str] = []
"""Ops whose CPU implementation ran, by name, in order."""

emulate = False
"""Whether the CPU implementations run the kernels' own TPC-C sources under the emulator."""

compile_only = False
"""Whether ops are only compiled, as under the bridge's PT_COMPILE_ONLY_MODE; they then leave no trace in `called`."""


def _positions(size: int) -> Tensor:
    """Where the elements of a row go: 4i + p of a chunk to position 128p + i."""
    elements = torch.arange(size)
    inside = elements % _CHUNK
    return elements - inside + 128 * (inside % 4) + inside // 4


def to_chunk_order(plain: Tensor) -> Tensor:
    """[N, C] -> [N, C padded to 512s with zeros], in chunk order."""
    count, size = plain.shape
    result = plain.new_zeros(count, -(-size // _CHUNK) * _CHUNK)
    result[:, _positions(size)] = plain
    return result


def from_chunk_order(permuted: Tensor, size: int) -> Tensor:
    """The inverse of `to_chunk_order` for the first `size` elements."""
    return permuted[:, _positions(size)]


def decode(weight: Tensor, scale: Tensor) -> Tensor:
    """u8 [R, C/2] -> fp64 [R, C], low nibble = even column: E2M1 with u8 scales (255 = NaN), codes - 8 with bf16."""
    codes = torch.stack([weight & 15, weight >> 4], dim=-1).flatten(-2).long()
    if scale.dtype == torch.bfloat16:
        return (codes - 8).double() * scale.double().repeat_interleave(32, dim=-1)
    factor = torch.exp2(scale.to(torch.float64) - 127)
    factor[scale == 255] = float("nan")
    return _E2M1[codes] * factor.repeat_interleave(32, dim=-1)


def _matrix(given: dict[str, Any], name: str) -> tuple[int, int, int, Callable[[int], Tensor]]:
    """Experts, outputs, inputs of w13 or w2, and an expert's fp64 [outputs, inputs], from either packing."""
    weight, scale, zero = given[name], given["s" + name[1:]], given.get("z" + name[1:])
    if zero is None:
        num_experts, outputs, half = weight.shape
        return num_experts, outputs, 2 * half, lambda expert: decode(weight[expert], scale[expert])

    def columns(packed: Tensor) -> Tensor:
        return torch.stack([packed >> 4 * nibble & 15 for nibble in range(8)], dim=-1).flatten(-2).double()

    def value(expert: int) -> Tensor:
        steps = [group.double().repeat_interleave(32, 0) for group in (columns(zero), scale[expert])]
        return ((columns(weight[expert]) - steps[0]) * steps[1]).T

    num_experts, inputs, words = weight.shape
    return num_experts, 8 * words, inputs, value


def _local(ids: Tensor, experts_min: int, num_experts: int) -> Iterator[tuple[int, int, int, int]]:
    """(route, token, slot, expert) of each local route."""
    for token, row in enumerate(ids.tolist()):
        for slot, expert in enumerate(row):
            if experts_min <= expert < experts_min + num_experts:
                yield token * len(row) + slot, token, slot, expert - experts_min


def _gate_up(kernel: Kernel, given: dict[str, Any]) -> Tensor:
    ids = given["ids"]
    num_experts, rows, columns, decoded = _matrix(given, "w13")
    x = from_chunk_order(given["x"], columns).double()
    assert (from_chunk_order(given["x"], given["x"].shape[1])[:, columns:] == 0).all(), (
        "x is not padded by zeros"
    )
    result = torch.full((ids.numel(), rows // 2), float("nan"), dtype=torch.bfloat16)
    values: dict[int, Tensor] = {}
    for route, token, _, expert in _local(ids, given["experts_min"], num_experts):
        if expert not in values:
            values[expert] = decoded(expert)
        y = values[expert] @ x[token]
        if "b13" in given:
            y = y + given["b13"][expert].double()
        interleaved = kernel.name in ("mxk_w13xi", "mxk_w13xib")
        gate, up = (y[0::2], y[1::2]) if interleaved else y.chunk(2)
        if "limit" in given:
            gate, up = gate.clamp(max=given["limit"]), up.clamp(-given["limit"], given["limit"])
        if "alpha" in given:
            result[route] = (gate * torch.sigmoid(given["alpha"] * gate) * (up + 1)).bfloat16()
        else:
            result[route] = (gate * torch.sigmoid(gate) * up).bfloat16()
    return to_chunk_order(result)


def _down(kernel: Kernel, given: dict[str, Any]) -> Tensor:
    ids = given["ids"]
    num_experts, hidden_size, columns, decoded = _matrix(given, "w2")
    a = from_chunk_order(given["a"], columns).double()
    routes = torch.zeros(*ids.shape, hidden_size, dtype=torch.float64)
    values: dict[int, Tensor] = {}
    for route, token, slot, expert in _local(ids, given["experts_min"], num_experts):
        if expert not in values:
            values[expert] = decoded(expert)
        y = values[expert] @ a[route]
        if "b2" in given:
            y = y + given["b2"][expert].double()
        routes[token, slot] = y * given["rw"][token, slot].double()
    return (routes if kernel.name.endswith("r") else routes.sum(1)).bfloat16()


def _implementation(kernel: Kernel) -> Callable[..., Tensor]:
    compute = _down if "w2" in kernel.name else _gate_up

    def run(*arguments: Any) -> Tensor:
        if not compile_only:
            called.append(kernel.name)
        given = dict(zip(kernel.arguments, arguments, strict=True))
        check_arguments(kernel, given)
        return emulated_ops.call(kernel, given)[0] if emulate else compute(kernel, given)

    return run


def check_arguments(kernel: Kernel, given: dict[str, Any]) -> dict[str, Any]:
    """What the glue checks: dtypes and shapes by the table; returns the value of each symbol."""
    sizes: dict[str, Any] = {}
    for tensor in kernel.inputs:
        value = given[tensor.name]
        assert value.dtype == DTYPES[tensor.dtype], f"{kernel.name}: {tensor.name} is {value.dtype}"
        assert value.dim() == len(tensor.shape), f"{kernel.name}: {tensor.name} is {list(value.shape)}"
        assert value.is_contiguous(), f"{kernel.name}: {tensor.name} is not contiguous"
        for size, dimension in zip(value.shape, tensor.shape, strict=True):
            symbol = size * dimension.divide // dimension.times
            known = sizes.setdefault(dimension.symbol, symbol)
            assert known == symbol, (
                f"{kernel.name}: {tensor.name} is {list(value.shape)}, {dimension} is {known}"
            )
    return sizes


def _fake(kernel: Kernel) -> Callable[..., Tensor]:
    def run(*arguments: Any) -> Tensor:
        given = dict(zip(kernel.arguments, arguments, strict=True))
        sizes = check_arguments(kernel, given)
        if "R" not in sizes:
            sizes["R"] = sizes["T"] * sizes["k"]
        for padded, plain in (("KP", "K"), ("IP", "I")):
            if padded not in sizes and plain in sizes:
                sizes[padded] = -(-sizes[plain] // _CHUNK) * _CHUNK
        shape = [dimension.size(sizes) for dimension in kernel.output.shape]
        return arguments[0].new_empty(shape, dtype=DTYPES[kernel.output.dtype])

    return run


@contextlib.contextmanager
def ops() -> Iterator[None]:
    """Defines `custom_op::mxk_*` for CPU and fake tensors, before whatever another test has defined."""
    library = torch.library.Library("custom_op", "FRAGMENT")
    for kernel in KERNELS.values():
        if kernel.output.name == "d":  # the prefill unpack is no part of a lowered call
            continue
        if not hasattr(torch.ops.custom_op, kernel.name):
            library.define(kernel.schema)
        library.impl(kernel.name, _implementation(kernel), "CPU", allow_override=True)
        library.impl(kernel.name, _fake(kernel), "Meta", allow_override=True)
    try:
        yield
    finally:
        library._destroy()


def hpu_module() -> types.ModuleType:
    """What torch asks of `torch.hpu` when fake tensors of that device are made."""
    module = types.ModuleType("torch.hpu")
    module.current_device = lambda: 0  # type: ignore[attr-defined]
    module.is_available = lambda: True  # type: ignore[attr-defined]
    module.device_count = lambda: 1  # type: ignore[attr-defined]
    module.is_initialized = lambda: False  # type: ignore[attr-defined]
    return module


def install_hpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes fake tensors on "hpu" possible; real ones stay impossible."""
    module = hpu_module()
    monkeypatch.setitem(sys.modules, "torch.hpu", module)
    monkeypatch.setattr(torch, "hpu", module, raising=False)


def cpu_counts_as_hpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test's switch of device: every call is described as one on "hpu", and runs on the CPU stand-ins above."""
    describe = MoEDesc.from_call.__func__  # type: ignore[attr-defined]

    def from_call(cls: type[MoEDesc], *args: Any, **kwargs: Any) -> MoEDesc:
        return dataclasses.replace(describe(cls, *args, **kwargs), device="hpu")

    monkeypatch.setattr(MoEDesc, "from_call", classmethod(from_call))
    monkeypatch.setattr(warm, "_warmed", set())
    called.clear()


class Placement(enum.Enum):
    """The bridge's `OptimizationPassPlacement`."""

    PRE_PLACEMENT = 1
    PRE_PARTITIONER = 2
    PARTITIONER = 3
    POST_PARTITIONER = 4


@dataclasses.dataclass
class OptimizerContext:
    """The fields of the bridge's context that a pass may read."""

    graph_module: fx.GraphModule
    graph_name: str
    example_inputs: list[Any]
    is_training: bool
    is_backward: bool
    is_dynamic: bool
    stage: Placement


class Bridge:
    """`habana_frameworks...compile_backend.passes` in small, with or without the registry of custom passes.

    `backend` is its `hpu_backend`: the graph goes through the stages' passes, every node must end with the bridge's
    metadata and a placement, and clusters refuse ops that never were called eagerly.
    """

    METADATA = (
        "output_dtypes",
        "output_layouts",
        "output_shapes",
        "output_strides",
        "output_contiguous",
        "output_offset",
    )

    def __init__(self, monkeypatch: pytest.MonkeyPatch, registry: bool) -> None:
        self.graphs: list[fx.GraphModule] = []
        bridges.append(self)
        passes = types.ModuleType("passes")
        self.passes = passes
        passes.OptimizationPassPlacement = Placement  # type: ignore[attr-defined]
        custom: dict[Placement, list[Callable[..., bool]]] = {stage: [] for stage in Placement}
        self.custom = custom

        def pass_fake_propagation(context: OptimizerContext) -> bool:
            for node in context.graph_module.graph.nodes:
                self.describe(node)
            return True

        def pass_mark_placement(context: OptimizerContext) -> bool:
            for node in context.graph_module.graph.nodes:
                node.meta["placement"] = self.placement(node)
            return True

        def get_passes(stage: Placement) -> list[Callable[..., bool]]:
            built_in = {Placement.PRE_PLACEMENT: [pass_fake_propagation, pass_mark_placement]}.get(stage, [])
            return [*built_in, *custom[stage]]

        passes.get_passes = get_passes  # type: ignore[attr-defined]
        if registry:
            passes.register_pass_at_optimization_pass = (  # type: ignore[attr-defined]
                lambda custom_pass, stage: custom[stage].append(custom_pass)
            )
        config = types.ModuleType("bridge_config")
        config.env_setting = self._env_setting  # type: ignore[attr-defined]
        name = "habana_frameworks"
        for part in ("", ".torch", ".torch.dynamo", ".torch.dynamo.compile_backend", ".torch.internal"):
            package = types.ModuleType(name + part)
            package.__path__ = []
            monkeypatch.setitem(sys.modules, name + part, package)
        monkeypatch.setitem(sys.modules, f"{name}.torch.dynamo.compile_backend.passes", passes)
        sys.modules[f"{name}.torch.dynamo.compile_backend"].passes = passes  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, f"{name}.torch.internal.bridge_config", config)

    @contextlib.contextmanager
    def _env_setting(self, name: str, value: bool) -> Iterator[None]:
        global compile_only
        assert name == "PT_COMPILE_ONLY_MODE"
        before, compile_only = compile_only, value
        try:
            yield
        finally:
            compile_only = before

    def placement(self, node: fx.Node) -> str:
        """Where the bridge would run a node: "custom_op" always in a cluster, other foreign namespaces never."""
        if node.op != "call_function":
            return "eager"
        namespace = getattr(node.target, "namespace", "aten")
        return "hpu_cluster" if namespace in ("aten", "custom_op", "hpu", "prims") else "eager"

    def describe(self, node: fx.Node) -> None:
        """Fills the bridge's metadata from the node's fake value, and asserts on a contradiction, as it does."""
        value = node.meta.get("val")
        if not isinstance(value, Tensor):
            return
        found = {
            "output_device": value.device,
            "output_dtypes": [value.dtype],
            "output_layouts": [value.layout],
            "output_shapes": [value.size()],
            "output_strides": [value.stride()],
            "output_contiguous": [value.is_contiguous()],
            "output_offset": [value.storage_offset()],
        }
        for key, expected in found.items():
            assert node.meta.setdefault(key, expected) == expected, f"{node.name}: {key}"

    def run_stage(self, module: fx.GraphModule, example_inputs: list[Any]) -> None:
        """What the bridge's `optimize_graph` does at PRE_PLACEMENT, then what its later stages rely on."""
        context = OptimizerContext(module, "g", example_inputs, False, False, False, Placement.PRE_PLACEMENT)
        for run in self.passes.get_passes(Placement.PRE_PLACEMENT):
            run(context)
        module.graph.lint()
        for node in module.graph.nodes:
            assert node.meta.get("placement") == self.placement(node), (
                f"{node.name}: {node.meta.get('placement')}"
            )
            if isinstance(node.meta.get("val"), Tensor):
                missing = [key for key in (*self.METADATA, "output_device") if key not in node.meta]
                assert not missing, f"{node.name} lacks {missing}"
                self.describe(node)

    def backend(self, module: fx.GraphModule, example_inputs: list[Any], **_: Any) -> Callable[..., Any]:
        """`hpu_backend`."""
        from torch._dynamo.backends.common import aot_autograd
        from torch._functorch.aot_autograd import make_boxed_func

        def compile_inner(graph_module: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
            self.run_stage(graph_module, inputs)
            self.graphs.append(graph_module)
            refuse_unregistered(graph_module)
            return make_boxed_func(graph_module.forward)

        return aot_autograd(fw_compiler=compile_inner)(module, example_inputs)


bridges: list[Bridge] = []
"""The bridge of the current test is the last one."""


@torch._dynamo.register_backend(name="hpu_backend")
def hpu_backend(module: fx.GraphModule, example_inputs: list[Any], **options: Any) -> Callable[..., Any]:
    """What the bridge registers under this name."""
    return bridges[-1].backend(module, example_inputs, **options)


def refuse_unregistered(module: fx.GraphModule) -> None:
    """Raises as the bridge does when a compiled graph holds a custom op that was never called eagerly."""
    for node in module.graph.nodes:
        if getattr(node.target, "namespace", "") == "custom_op":
            name = node.target.name()
            if name.removeprefix("custom_op::") not in called:
                raise RuntimeError(f"{name} isn't registered in KernelRegistry")
