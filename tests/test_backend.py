"""The `mxk` backend: how it is found, modes, options, the token rule over many T, caches, warm registration."""

from __future__ import annotations

import copy
import os
import pathlib
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx

import mxk_compile
from mxk_compile import backend
from mxk_compile.backend import MxkPass, compile_with, mxk
from mxk_compile.errors import BackwardError, SettingsError
from mxk_compile.ops.stock import call_mxfp4
from mxk_compile.passes import Report, run_passes, warm
from mxk_compile.settings import Settings
from mxk_compile.testing import MoECase, random_case, rel_l2


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Layer(torch.nn.Module):
    """A router and packed experts that call the stock op, as a model would."""

    def __init__(self, case: MoECase) -> None:
        super().__init__()
        self.router = torch.nn.Linear(case.w2.shape[1], len(case.w2), bias=False, dtype=torch.bfloat16)
        for name, weight in zip(("w13", "s13", "w2", "s2"), case.weights, strict=False):
            self.register_buffer(name, weight)

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = torch.topk(torch.softmax(self.router(x).float(), dim=-1), 2)
        stacks = self.w13, self.s13, self.w2, self.s2
        return call_mxfp4((x, ids, weights.to(x.dtype)), *(stack.unbind(0) for stack in stacks))


@pytest.fixture(scope="module")
def layer() -> Layer:
    torch.manual_seed(0)
    return Layer(random_case())


def tokens(count: int) -> Tensor:
    return torch.randn(count, 128, generator=torch.Generator().manual_seed(count)).bfloat16()


class Recorder:
    """The backend with Inductor or an eager inner, counting compilations and collecting what the passes decided."""

    def __init__(self, inner: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.inner, self.num_compiles, self.report = inner, 0, Report()

        def spy(*args: Any, **kwargs: Any) -> Report:
            found = run_passes(*args, **kwargs)
            self.report.nodes.extend(found.nodes)
            return found

        monkeypatch.setattr(backend, "run_passes", spy)

    def __call__(self, module: fx.GraphModule, example_inputs: Any, **kwargs: Any) -> Callable[..., Any]:
        self.num_compiles += 1
        options = {"inner_backend": self.inner}
        if self.inner == "inductor":  # a cached graph would be taken without running the passes
            options["inner_options"] = {"force_disable_caches": True}
        return mxk(module, example_inputs, options=options, **kwargs)


@pytest.fixture(params=["aot_eager", "inductor"])
def recorder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Recorder:
    return Recorder(request.param, monkeypatch)


def test_found_by_name(layer: Layer) -> None:
    assert "mxk" in torch._dynamo.list_backends()
    x = tokens(4)
    with torch.no_grad():
        expected = layer(x)
        assert 0 < rel_l2(torch.compile(layer, backend="mxk")(x), expected) < 1e-2


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode", "grad", "autocast"])
@pytest.mark.parametrize("fullgraph", [True, False])
def test_modes(layer: Layer, recorder: Recorder, mode: str, fullgraph: bool) -> None:
    contexts = {
        "no_grad": torch.no_grad,
        "inference_mode": torch.inference_mode,
        "grad": torch.enable_grad,
        "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    }
    if recorder.inner == "inductor" and not fullgraph:
        pytest.skip("the graph is the same; Inductor's compilations are the slow part of these tests")
    x = tokens(4)
    with contexts[mode]():
        result = torch.compile(layer, backend=recorder, fullgraph=fullgraph)(x)
        assert recorder.report.num_fused == 1, str(recorder.report)
        assert 0 < rel_l2(result.detach(), layer(x).detach()) < 1e-2
    assert result.requires_grad == (mode in ("grad", "autocast"))


def test_gradient_is_an_error_not_zeros(layer: Layer, recorder: Recorder) -> None:
    result = torch.compile(layer, backend=recorder)(tokens(4))
    with pytest.raises(BackwardError, match=r"a gradient was asked of it"):
        result.sum().backward()


@pytest.mark.parametrize("dynamic", [True, False])
def test_dynamic(layer: Layer, recorder: Recorder, dynamic: bool) -> None:
    compiled = torch.compile(layer, backend=recorder, dynamic=dynamic)
    with torch.no_grad():
        for count in (4, 9, 40):
            assert rel_l2(compiled(tokens(count)), layer(tokens(count))) < 1e-2
    assert [node.fused for node in recorder.report.nodes] == (
        [True, False] if dynamic else [True, True, False]
    )


def test_lists_that_are_inputs(recorder: Recorder) -> None:
    case = random_case(num_experts=2)

    def call(x: Tensor, ids: Tensor, weights: Tensor, *lists: list[Tensor]) -> Tensor:
        return call_mxfp4((x, ids, weights), *lists)

    assert torch.equal(torch.compile(call, backend=recorder)(*case.routing, *case.lists[:4]), case.fused())
    assert recorder.report.num_fused == 1


def test_reduce_overhead(layer: Layer, recorder: Recorder) -> None:
    if recorder.inner != "inductor":
        module, options = fx.symbolic_trace(torch.nn.Identity()), {"inner_backend": "eager"}
        with pytest.raises(SettingsError, match="mode='reduce-overhead'"):
            mxk(module, [], mode="reduce-overhead", options=options)
        return
    compiled = torch.compile(layer, backend=lambda *a: recorder(*a, mode="reduce-overhead"))
    with torch.no_grad():
        assert rel_l2(compiled(tokens(4)), layer(tokens(4))) < 1e-2
    assert recorder.report.num_fused == 1


def test_alternating_calls_add_no_compiles(layer: Layer, recorder: Recorder) -> None:
    compiled = torch.compile(layer, backend=recorder, dynamic=True)
    with torch.no_grad():
        for count in (4, 40):
            compiled(tokens(count))
        compiles = recorder.num_compiles
        for count in (5, 50) * 10:
            compiled(tokens(count))
    assert recorder.num_compiles == compiles == 2


def test_token_rule_over_many_sizes(layer: Layer, recorder: Recorder) -> None:
    """A15: 32 fused, 33 stock, at most three compilations over all T, whatever the order."""
    compiled = torch.compile(layer, backend=recorder)
    fused = {}
    with torch.no_grad():
        for count in (2, 8, 32, 33, 64, 1, 3, 17, 33):
            x = tokens(count)
            if count > 1:
                torch._dynamo.mark_dynamic(x, 0)
            result, expected = compiled(x), layer(x)
            assert rel_l2(result, expected) < 1e-2
            # The stock op itself, or the fused one, which differs from it by roundings.
            fused[count] = not torch.equal(result, expected)
    assert recorder.num_compiles <= 3
    assert fused == {2: True, 8: True, 32: True, 33: False, 64: False, 1: True, 3: True, 17: True}


def test_zero_tokens(layer: Layer, recorder: Recorder) -> None:
    """A7: no tokens, before and after a compilation for some."""
    with torch.no_grad():
        for first, second in ((4, 0), (0, 4)):
            torch._dynamo.reset()
            compiled = torch.compile(layer, backend=recorder)
            for count in (first, second):
                result = compiled(tokens(count))
                assert result.shape == (count, 128)
                assert result.dtype == torch.bfloat16


@pytest.mark.parametrize(("top", "reason"), [(32, None), (64, "nothing here checks a guard <= 32")])
def test_export(layer: Layer, top: int, reason: str | None) -> None:
    """An exported graph has bounds but no guards: only what the bounds decide is fused."""
    dim = torch.export.Dim("T", min=0, max=top)
    with torch.no_grad():
        program = torch.export.export(layer, (tokens(4),), dynamic_shapes=({0: dim},))
    module = program.module()
    report = run_passes(module)
    assert len(report.nodes) == 1
    assert (report.nodes[0].reason is None) == (reason is None)
    assert reason is None or reason in str(report.nodes[0].reason)
    with torch.no_grad():
        for count in (0, 4, top):
            assert module(tokens(count)).shape == (count, 128)
        assert rel_l2(module(tokens(4)), layer(tokens(4))) < 1e-2


@pytest.mark.parametrize("hidden_size", [2880, 96, 1504])
def test_padded_views_with_size_asserts(recorder: Recorder, hidden_size: int) -> None:
    """A12: fake and real kernels agree on shape and stride, for an input that is a view of a wider buffer."""
    case = random_case(hidden_size=hidden_size, intermediate_size=96, num_experts=2)

    def call(wide: Tensor, ids: Tensor, weights: Tensor, *stacks: Tensor) -> Tensor:
        x = wide[:, :hidden_size]
        return call_mxfp4((x, ids, weights), *(stack.unbind(0) for stack in stacks)).T.contiguous()

    wide = torch.full((4, hidden_size + 192), float("nan"), dtype=torch.bfloat16)
    wide[:, :hidden_size] = case.hidden_states
    with torch._inductor.config.patch(size_asserts=True, nan_asserts=False):
        result = torch.compile(call, backend=recorder)(wide, *case.routing[1:], *case.weights[:4])
    assert recorder.report.num_fused == 1
    assert torch.equal(result, case.fused().T)


def test_options_are_checked(layer: Layer) -> None:
    for options, text in (
        ({"max_token": 3}, r"'max_token'; allowed: inner_backend, inner_options, max_tokens, dump_dir"),
        ({"max_tokens": -1}, r"-1; allowed: an integer >= 0, or 'any'"),
        ({"inner_backend": "inductr"}, r"'inductr'; allowed: .*inductor"),
        ({"inner_backend": 3}, r"option inner_backend: 3; allowed: a name or a function"),
        ({"inner_options": 3}, r"option inner_options: 3; allowed: a dict"),
        ({"inner_backend": "eager", "inner_options": {"x": 1}}, r"{'x': 1}; allowed: none with eager"),
        ({"inner_options": {"no_such_option": 1}}, r"'no_such_option'; allowed: Inductor's config names"),
    ):
        with pytest.raises(SettingsError, match=text):
            mxk(fx.symbolic_trace(torch.nn.Identity()), [], options=options)


def test_cap_by_option(layer: Layer) -> None:
    x = tokens(40)
    with torch.no_grad():
        for cap, fused in ((0, False), (39, False), (40, True), ("any", True)):
            torch._dynamo.reset()
            result = torch.compile(
                layer, backend="mxk", options={"inner_backend": "aot_eager", "max_tokens": cap}
            )(x)
            assert torch.equal(result, layer(x)) != fused


def test_dump(layer: Layer, tmp_path: pathlib.Path) -> None:
    options = {"inner_backend": "aot_eager", "dump_dir": str(tmp_path / "graphs")}
    with torch.no_grad():
        torch.compile(layer, backend="mxk", options=options)(tokens(4))
    names = sorted(path.name.split("_", 2)[2] for path in (tmp_path / "graphs").iterdir())
    assert names == [
        "fuse_moe_after.txt",
        "fuse_moe_before.txt",
        "lower_moe_after.txt",
        "lower_moe_before.txt",
    ]
    texts = {path.name.split("_", 2)[2]: path.read_text() for path in (tmp_path / "graphs").iterdir()}
    assert "hpu.mixture_of_experts" in texts["fuse_moe_before.txt"]
    assert "mxk.moe" in texts["fuse_moe_after.txt"]


def test_pass_alone_in_inductor(layer: Layer) -> None:
    """The same pass, set by hand, with another pass behind it."""
    seen: list[str] = []

    class Following(torch._inductor.custom_graph_pass.CustomGraphPass):
        def __call__(self, graph: fx.Graph) -> None:
            seen.append(str(graph))

        def uuid(self) -> str:
            return "following"

    config = {"post_grad_custom_pre_pass": MxkPass(following=Following()), "force_disable_caches": True}
    with torch._inductor.config.patch(config), torch.no_grad():
        torch.compile(layer, backend="inductor")(tokens(4))
    assert len(seen) == 1
    assert "mxk.moe" in seen[0]


def test_a_pass_that_was_set_before_still_runs(layer: Layer) -> None:
    seen: list[str] = []

    class Before(torch._inductor.custom_graph_pass.CustomGraphPass):
        def __call__(self, graph: fx.Graph) -> None:
            seen.append(str(graph))

        def uuid(self) -> str:
            return "before"

    with (
        torch._inductor.config.patch(post_grad_custom_pre_pass=Before(), force_disable_caches=True),
        torch.no_grad(),
    ):
        torch.compile(layer, backend="mxk")(tokens(4))
    assert len(seen) == 1


def test_cache_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    """Version, sources, kernel library, settings and a following pass all change the pass's uuid; nothing else does."""
    uuids = [MxkPass().uuid(), MxkPass(Settings(max_tokens=31)).uuid(), MxkPass(following=MxkPass()).uuid()]
    assert MxkPass(Settings(dump_dir="graphs")).uuid() is None  # a cached graph would write nothing
    for name, value in (("__version__", "2"), ("source_hash", lambda: "2")):
        with monkeypatch.context() as patch:
            patch.setattr(backend, name, value)
            uuids.append(MxkPass().uuid())
    monkeypatch.setattr(backend.cpu, "library_hash", lambda: "2")
    uuids.append(MxkPass().uuid())
    assert len(set(uuids)) == len(uuids)


_CACHED = """
    import sys
    import torch
    import mxk_compile
    from mxk_compile import backend
    from mxk_compile.ops.stock import call_mxfp4
    from mxk_compile.testing import random_case

    backend.__version__ = sys.argv[1]
    real = backend.run_passes

    def spy(*args, **kwargs):
        print("passes of", sys.argv[1])
        return real(*args, **kwargs)

    backend.run_passes = spy
    case = random_case(num_tokens=5)  # unlike any size of the weights: equal sizes share a symbol

    def call(x, ids, weights, *stacks):
        return call_mxfp4((x, ids, weights), *(stack.unbind(0) for stack in stacks))

    stacks = case.weights[:4]
    compiled = torch.compile(call, backend="mxk", dynamic=True)
    for count in (5, 3):
        routing = [tensor[:count].clone() for tensor in case.routing]
        assert torch.equal(compiled(*routing, *stacks), case.fused()[:count])
    wide = random_case(num_tokens=64)
    assert torch.equal(compiled(*wide.routing, *stacks), call(*wide.routing, *stacks)), "the guard was lost"
"""


def test_cache_between_processes(tmp_path: pathlib.Path) -> None:
    """A14: a second process with another pass version rebuilds, a third with the same one takes the cached graph,
    and the guard on T comes back with it.
    """

    def run(version: str) -> int:
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
        command = [sys.executable, "-c", textwrap.dedent(_CACHED), version]
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.count(f"passes of {version}")

    assert [run("1"), run("2"), run("2")] == [2, 2, 0]


def test_warm_registration(layer: Layer, monkeypatch: pytest.MonkeyPatch) -> None:
    """An inner backend that refuses ops whose eager kernel was never called: ours was, once, before the first run."""
    monkeypatch.setattr(warm, "_warmed", set())
    registered: list[str] = []
    real = torch.ops.mxk.moe.default

    def call(name: str, device: str) -> None:
        registered.append(name)
        call_smallest(name, device)

    call_smallest = warm.call_smallest
    monkeypatch.setattr(warm, "call_smallest", call)

    def refusing(module: fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            for node in module.graph.nodes:
                if node.target is real and "mxk::moe" not in registered:
                    raise RuntimeError("mxk::moe isn't registered in KernelRegistry")
            return module.forward(*args)

        return run

    compiled = torch.compile(layer, backend=compile_with(refusing, Settings()), dynamic=False)
    with torch.no_grad():
        for count in (4, 5, 4):
            compiled(tokens(count))
    assert registered == ["mxk::moe"]


def test_every_op_of_ours_can_be_warmed() -> None:
    for name in ("mxk::moe", "mxk::moe.lists"):  # those of Gaudi: tests/passes/test_gaudi_lowering.py
        assert name in warm.OPS
        warm.call_smallest(name, "cpu")


def test_explain(layer: Layer) -> None:
    with torch.no_grad():
        report = mxk_compile.explain(layer, tokens(4))
        assert report.num_fused == 1
        assert "T=4 <= 32 (static)" in str(report)
        assert str(report).endswith("1 of 1 MoE nodes fused")
        report = mxk_compile.explain(layer, tokens(33))
        assert report.nodes[0].reason == "T=33 > 32, the cap of the fused kernels"


def test_explain_of_a_module_that_was_compiled_in_place(layer: Layer) -> None:
    layer = copy.deepcopy(layer)  # the other tests' layer stays as it is
    layer.compile(backend="mxk", options={"inner_backend": "eager"})
    with torch.no_grad():
        assert mxk_compile.explain(layer, tokens(4)).num_fused == 1
    assert layer._compiled_call_impl is not None
