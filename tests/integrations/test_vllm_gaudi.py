"""vllm-gaudi's server start, on small stand-ins of the modules that the plugin follows and of the bridge.

The stand-in's files have the names, signatures and the order of calls of vllm-gaudi: a runner that loads a model whose
layers keep stacked parameters and hand out views of them, a function that makes the views anew after the weights have
moved, a warm-up, and a MoE op that compiles by itself when it is called eagerly.
"""

from __future__ import annotations

import importlib
import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gaudi_stand_ins as stand_ins
import pytest
import torch

from mxk_compile import lazy
from mxk_compile.integrations import vllm, vllm_gaudi
from mxk_compile.lazy import environment
from mxk_compile.ops import stack
from mxk_compile.passes import gaudi_bridge
from mxk_compile.settings import Settings
from mxk_compile.testing import rel_l2

RUNNER = '''
import torch

EXPERTS, HIDDEN, WIDTH = 3, 96, 64
opened = []  # what had run when the device opened


@torch.compile(backend="hpu_backend")
def call(x, ids, weights, w12, w3, b12, b3, s12, s3):
    return torch.ops.hpu.mixture_of_experts.bias_mxfp4_fused_weights(
        x * 1, ids, weights, w12, w3, b12, b3, s12, s3,
        block_size=32, permuted_weights=True, experts_min=0, experts_max=EXPERTS - 1, is_fp4=True,
    ) + 0


class VllmMixtureOfExpertsOpMXFP4(torch.nn.Module):
    def forward(self, hidden_states, expert_routing_table, router_weights, permuted_weights=True, activation="silu"):
        return call(hidden_states, expert_routing_table, router_weights, *self.lists)


class Experts(torch.nn.Module):
    NAMES = ("w13_weight", "w2_weight", "w13_bias", "w2_bias", "w13_weight_scale", "w2_weight_scale")

    def __init__(self, tensors):
        super().__init__()
        self.top_k = 2
        for name, tensor in zip(self.NAMES, tensors):
            self.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))
        self.moe_op = VllmMixtureOfExpertsOpMXFP4()
        self.rebind()

    def rebind(self):
        self.moe_op.lists = [list(getattr(self, name).data.unbind(0)) for name in self.NAMES]


class Layer(torch.nn.Module):
    """A decoder layer, compiled as a whole once the op has been met: the MoE is then inlined."""

    def __init__(self, experts):
        super().__init__()
        self.experts = experts

    def forward(self, x, ids, weights):
        return x + self.experts.moe_op(x, ids, weights)


def _rebind_moe_expert_weights(model):
    for module in model.modules():
        if isinstance(module, Experts):
            module.rebind()


class HPUModelRunner:
    def __init__(self, tensors):
        self.tensors = tensors
        self.warmed = []

    def load_model(self):
        self.model = torch.nn.ModuleList(Layer(Experts(tensors)) for tensors in self.tensors)

    def get_model(self):
        return self.model

    def warmup_model(self):
        self.warmed.append("buckets")
'''
WORKER = "from vllm_gaudi.v1.worker.hpu_model_runner import HPUModelRunner, _rebind_moe_expert_weights\n"


@pytest.fixture(scope="module", autouse=True)
def ops() -> Iterator[None]:
    with stand_ins.ops():
        yield


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """vllm-gaudi 0.26 and a bridge, nothing of either imported yet; gives the bridge."""
    worker = tmp_path / "vllm_gaudi" / "v1" / "worker"
    worker.mkdir(parents=True)
    for folder in (worker, worker.parent, worker.parent.parent):
        (folder / "__init__.py").touch()
    (worker / "hpu_model_runner.py").write_text(RUNNER)
    (worker / "hpu_worker.py").write_text(WORKER)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(vllm_gaudi, "version", lambda: "0.26.0")
    monkeypatch.setattr(vllm, "settings", Settings(vllm=True))
    monkeypatch.setattr(vllm_gaudi, "settings", Settings(vllm=True, gaudi_lib=str(tmp_path)))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(gaudi_bridge, "load_ops", lambda *_: None)
    start = gaudi_bridge.start
    monkeypatch.setattr(gaudi_bridge, "start", lambda folder: start(folder, device="cpu"))
    monkeypatch.delenv("PT_HPU_LAZY_MODE", raising=False)
    stand_ins.cpu_counts_as_hpu(monkeypatch)
    monkeypatch.setattr(stack, "_stacks", {})
    vllm_gaudi._stock.cache_clear()
    yield stand_ins.Bridge(monkeypatch, registry=True)
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm_gaudi"]:
        del sys.modules[name]


def runner_of(cases: list[Any]) -> Any:
    """The worker's way: the worker module is imported, which imports the runner's."""
    module = importlib.import_module("vllm_gaudi.v1.worker.hpu_worker")
    tensors = [
        (case.w13, case.w2, case.w13_bias, case.w2_bias, case.w13_scale, case.w2_scale) for case in cases
    ]
    return module.HPUModelRunner(tensors)


def gptoss(seed: int, num_tokens: int = 4) -> Any:
    from mxk_compile.testing import random_case

    return random_case(
        num_tokens=num_tokens, num_experts=3, hidden_size=96, intermediate_size=64, seed=seed, bias=True,
        row_order="interleaved", activation="swiglu_oai", alpha=1.702, limit=7.0,
    )  # fmt: skip


def kernels(graph: Any) -> list[str]:
    names = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    return [name for name in names if "custom_op" in name or "mixture" in name]


def test_a_server_start(server: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    vllm.register()
    vllm.register()  # vLLM asks several times a process
    assert "vllm_gaudi.v1.worker.hpu_model_runner" not in sys.modules, "nothing is imported early"
    cases = [gptoss(1), gptoss(2)]
    runner = runner_of(cases)
    runner.load_model()
    messages = [record.getMessage() for record in caplog.records]
    assert (
        sum("pass in hpu_backend" in message and "12 stacked weights" in message for message in messages) == 1
    )
    # Warm-up: the MoE's own graph, fused up to the cap and stock above; then the server's own.
    runner.warmup_model()
    assert runner.warmed == ["buckets"]
    assert [kernels(graph)[0] for graph in server.graphs] == [
        "custom_op.mxk_w13xib.default",
        "hpu.mixture_of_experts.bias_mxfp4_fused_weights",
    ]
    x, ids, weights = cases[0].routing
    for layer, case in zip(runner.model, cases, strict=True):
        expected = case_on(case, x, ids, weights)
        assert rel_l2(layer.experts.moe_op(x, ids, weights), expected) < 4e-3
    # Inlined in a layer's graph; one graph serves both layers.
    count = len(server.graphs)
    run = torch.compile(lambda layer, *call: layer(*call), backend="hpu_backend")
    for layer, case in zip(runner.model, cases, strict=True):
        assert rel_l2(run(layer, x, ids, weights) - x, case_on(case, x, ids, weights)) < 6e-3
    assert len(server.graphs) > count
    assert all("mxk_w13xib" in kernels(graph)[0] for graph in server.graphs[count:])


def case_on(case: Any, *routing: torch.Tensor) -> torch.Tensor:
    names = ("hidden_states", "topk_ids", "topk_weights")
    return type(case)(**{**vars(case), **dict(zip(names, routing, strict=True))}).reference()


@pytest.mark.parametrize("module", ["hpu_model_runner", "hpu_worker"])
def test_weights_that_moved_are_found_again(
    server: Any, module: str, caplog: pytest.LogCaptureFixture
) -> None:
    vllm.register()
    case = gptoss(3)
    runner = runner_of([case])
    runner.load_model()
    experts = runner.model[0].experts
    lists = experts.moe_op.lists
    assert stack.find_stack(lists[0]) is not None
    # As `model.to(device)` does: other memory behind the same parameters; then views are cut anew.
    for parameter in experts.parameters():
        parameter.data = parameter.data.clone()
    experts.rebind()
    assert stack.find_stack(experts.moe_op.lists[0]) is None
    importlib.import_module(f"vllm_gaudi.v1.worker.{module}")._rebind_moe_expert_weights(runner.model)
    for views, name in zip(experts.moe_op.lists, experts.NAMES, strict=True):
        found = stack.find_stack(views)
        assert found is not None
        assert found.data_ptr() == getattr(experts, name).data_ptr()
    x, ids, weights = case.routing
    assert rel_l2(experts.moe_op(x, ids, weights), case.reference()) < 4e-3
    assert not [record for record in caplog.records if "copied in every call" in record.getMessage()]


def test_a_module_that_is_there_already_is_followed(server: Any) -> None:
    module = importlib.import_module("vllm_gaudi.v1.worker.hpu_model_runner")
    vllm.register()
    assert hasattr(module.HPUModelRunner.load_model, "__wrapped__")
    assert hasattr(
        importlib.import_module("vllm_gaudi.v1.worker.hpu_worker")._rebind_moe_expert_weights, "__wrapped__"
    )


def test_lazy_mode_gets_its_own_call(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    attached = []
    monkeypatch.setattr(lazy, "attach", lambda layer: attached.append(layer) or True)
    monkeypatch.setenv("PT_HPU_LAZY_MODE", "1")
    vllm.register()
    runner = runner_of([gptoss(1), gptoss(2)])
    runner.load_model()
    runner.warmup_model()
    assert attached == [layer.experts for layer in runner.model]
    assert not server.graphs


def stock_reasons(caplog: pytest.LogCaptureFixture) -> list[str]:
    messages = [record.getMessage() for record in caplog.records]
    return [message for message in messages if message.endswith("MoE layers stay stock")]


def test_a_failure_leaves_the_server_as_it_was(
    server: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("no\nlibrary")

    monkeypatch.setattr(gaudi_bridge, "load_ops", fails)
    vllm.register()
    case = gptoss(1)
    runner = runner_of([case])
    runner.load_model()
    assert stock_reasons(caplog) == ["mxk_compile: no library; MoE layers stay stock"]
    x, ids, weights = case.routing
    assert rel_l2(runner.model[0].experts.moe_op(x, ids, weights), case.reference()) < 1e-2
    assert kernels(server.graphs[-1]) == ["hpu.mixture_of_experts.bias_mxfp4_fused_weights"]


@pytest.mark.parametrize(
    ("release", "reason"),
    [
        ("0.23.1", "vllm-gaudi 0.23.1 keeps no experts packed as MXFP4; known: 0.24 to 0.30"),
        ("0.31.0", "vllm-gaudi 0.31.0 is not known; known: 0.24 to 0.30"),
        ("1.0", "vllm-gaudi 1.0 is not known; known: 0.24 to 0.30"),
        ("main", "vllm-gaudi 'main' is no release; known: 0.24 to 0.30"),
    ],
)
def test_other_releases_are_refused_with_the_reason(
    server: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, release: str, reason: str
) -> None:
    monkeypatch.setattr(vllm_gaudi, "version", lambda: release)
    vllm.prepare()
    vllm.register()
    vllm.register()
    assert stock_reasons(caplog) == [f"mxk_compile: {reason}; MoE layers stay stock"]
    assert not any(isinstance(finder, vllm_gaudi._AfterImport) for finder in sys.meta_path)


def test_the_table_of_versions() -> None:
    assert list(vllm_gaudi.VERSIONS) == [f"0.{minor}" for minor in range(24, 31)]
    assert all(vllm_gaudi.unsupported(f"{release}.2") is None for release in vllm_gaudi.VERSIONS)
    text = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()
    assert all(
        f"| {release} | {state.partition(':')[0]}" in text for release, state in vllm_gaudi.VERSIONS.items()
    )


def test_a_runner_without_the_method_is_said(server: Any, caplog: pytest.LogCaptureFixture) -> None:
    vllm.register()
    file = Path(sys.path[0]) / "vllm_gaudi" / "v1" / "worker" / "hpu_model_runner.py"
    file.write_text("def _rebind_moe_expert_weights(model): pass\nclass HPUModelRunner: pass\n")
    importlib.import_module("vllm_gaudi.v1.worker.hpu_worker")
    reason = "vllm-gaudi 0.26.0 has no HPUModelRunner.load_model"
    assert stock_reasons(caplog) == [f"mxk_compile: {reason}; MoE layers stay stock"]


def build(folder: Path, **changes: Any) -> Path:
    """A folder with a MANIFEST and empty libraries, as far as its reader looks."""
    import hashlib

    stock = folder / "libtpc_kernels.so"
    files = {"libmxk_tpc.so": b"kernels", "libmxk_op_pt2.so": b"ops"}
    for name, content in files.items():
        (folder / name).write_bytes(content)
    stock.touch()
    fields = {
        "version": "glm-v1-0",
        "variant": "glm",
        "defines": [],
        "versions": {},
        "stock": {"path": str(stock), "sha256": ""},
        "kernels": {},
        "files": {name: hashlib.sha256(content).hexdigest() for name, content in files.items()},
    }
    (folder / "MANIFEST").write_text(json.dumps({**fields, **changes}))
    return folder


def test_the_environment_is_ready_before_the_device_opens(server: Any, tmp_path: Path) -> None:
    build(tmp_path)
    environ = {"PT_HPU_RECIPE_CACHE_CONFIG": "/cache,false,100"}
    vllm_gaudi.prepare(environ)
    assert environ == {
        "GC_KERNEL_PATH": str(tmp_path / "libmxk_tpc.so"),
        "PT_HPU_RECIPE_CACHE_CONFIG": "/cache_mxk-glm-v1-0,false,100",
    }
    again = dict(environ)
    vllm_gaudi.prepare(again)
    assert again == environ


def test_an_environment_that_comes_too_late_stays(
    server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    environ: dict[str, str] = {}
    vllm_gaudi.prepare(environ)  # no build there
    build(tmp_path)
    monkeypatch.setattr(environment, "_device_is_open", lambda: True)
    vllm_gaudi.prepare(environ)
    files = json.loads((tmp_path / "MANIFEST").read_text())["files"]
    build(tmp_path, files={"libmxk_tpc.so": files["libmxk_tpc.so"]})
    vllm_gaudi.prepare(environ)
    assert environ == {}
    missing, late, lazy_only = stock_reasons(caplog)
    assert "MANIFEST" in missing
    assert "the device is open, GC_KERNEL_PATH come too late" in late
    assert "a build without --pt2; allowed: a build for compiled mode" in lazy_only
