"""The adapter of humming-kernels: what it hands over, by a stand-in that computes just that, in fp32."""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from scripts import ROOT
from torch import Tensor

from mxk_compile.bench import implementations
from mxk_compile.bench.chord import SCENARIOS, make_call
from mxk_compile.ops.dequant import dequantize
from mxk_compile.testing import random_case, rel_l2

BLOCK_ROWS = 8
launches: list[dict[str, Any]] = []


class Layer:
    """What humming's layer configuration is asked for."""

    def __init__(self, *, shape_n: int, shape_k: int, pad_n_to_multiple: int, **rest: Any) -> None:
        self.pad_shape_n, self.pad_shape_k = -shape_n % pad_n_to_multiple, 0
        self.outputs, self.weight_format = shape_n, rest["weight_schema"]

    def to_str(self) -> str:
        return self.weight_format


def launch(*, configs: tuple[str, str], inputs: Tensor, outputs: Tensor, top_k: int, **given: Any) -> None:
    """Rows of a product, one expert after another, as the routing of its kind says."""
    weight_format, kind = configs
    launches.append(given | {"kind": kind})
    values = dequantize(
        given["weight"], given["weight_scale"].view(torch.uint8), weight_format=weight_format
    ) if weight_format == "mxfp4" else dequantize(
        given["weight"], given["weight_scale"], weight_format=weight_format
    )  # fmt: skip
    values = values[:, : outputs.shape[1]]
    if kind == "indexed":
        padded = int(given["num_tokens_padded"])
        for block, expert in enumerate(given["expert_ids"][: padded // BLOCK_ROWS].tolist()):
            rows = given["sorted_ids"][block * BLOCK_ROWS : (block + 1) * BLOCK_ROWS].long()
            rows = rows[rows < len(outputs)]
            outputs[rows] = (inputs[rows // top_k].float() @ values[expert].T).bfloat16()
        return
    layout = given["expert_layout"].tolist()
    for expert, matrix in enumerate(values):
        if kind == "grouped_masked":
            begin = expert * len(outputs) // len(values)
            rows = torch.arange(begin, begin + layout[expert])
        else:
            rows = torch.arange(layout[expert], layout[expert + 1])
        outputs[rows] = (inputs[rows].float() @ matrix.T).bfloat16()


@pytest.fixture
def peer(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The adapter, on the stand-in."""
    launches.clear()
    contents: dict[str, dict[str, Any]] = {
        "humming": {},
        "humming.dtypes": {"float4e2m1": "mxfp4", "float8e8m0": "e8m0", "uint4": "uint4"},
        "humming.schema": {"HummingWeightSchema": lambda b_dtype, **rest: b_dtype},
        "humming.transform": {
            "prepare_layer_config": Layer,
            "transform_humming_tensors": lambda layer, tensors, already_padded: tensors,
        },
        "humming.tune": {"get_heuristics_config": lambda *a, **k: {"block_shape": (BLOCK_ROWS, 1, 1)}},
        "humming.kernel": {},
        "humming.kernel.humming": {
            "HummingKernel": SimpleNamespace(
                prepare_kernels=lambda layer, gemm, *rest: (layer, json.loads(gemm)["gemm_type"])
            )
        },
        "humming.ops": {"launch_kernel": launch},
    }
    for name, members in contents.items():
        module = ModuleType(name)
        module.__dict__.update(members)
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
    return implementations.load_peer("humming_kernels")


@pytest.mark.parametrize(
    "changes",
    [
        {"row_order": "interleaved", "activation": "swiglu_oai", "alpha": 1.702, "limit": 7.0, "bias": True},
        {"row_order": "gate_up"},
        {"row_order": "up_gate", "bias": True, "weight_format": "uint4"},
    ],
    ids=str,
)
def test_a_layer(peer: ModuleType, changes: dict[str, Any]) -> None:
    case = random_case(num_tokens=7, num_experts=5, hidden_size=160, intermediate_size=96, **changes)
    case.topk_ids[1, 0] = case.topk_ids[4, 1] = 5  # another card's
    run = peer.layer(case)
    for few in (7, 1, 3):
        x, ids, weights = (tensor[:few] for tensor in case.routing)
        part = dataclasses.replace(case, hidden_states=x, topk_ids=ids.clone(), topk_weights=weights)
        for _ in range(2):  # the second time the routing is known
            assert rel_l2(run(*part.routing), part.reference()) < 8e-3
    assert len(launches) == 12
    assert all(len(given["weight"][0]) % 128 == 0 for given in launches)


@pytest.mark.parametrize("table", ["decode EP8", "TP8", "masked EP8", "contiguous EP8"])
@pytest.mark.parametrize("projection", ["gate_up", "down"])
def test_a_projection_of_the_chord_suite(peer: ModuleType, table: str, projection: str) -> None:
    scenario = next(s for s in SCENARIOS if (s.table, s.projection) == (table, projection))
    num_tokens = min(scenario.num_tokens, 20)
    call = make_call(
        dataclasses.replace(scenario, num_experts=9, outputs=24, inputs=64, num_tokens=num_tokens), "cpu"
    )
    theirs = peer.projection(call)
    assert theirs.out.data_ptr() != call.out.data_ptr()
    theirs.out.zero_()
    theirs.run()
    assert theirs.rel_l2() < 2.5e-3
    (rows,) = torch.where(call.experts < 0)
    assert not theirs.out[rows].any()


@pytest.fixture
def bench_hopper(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script benchmarks/bench_hopper.py."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("bench_hopper")


@pytest.mark.parametrize(("name", "top_k"), [("w13", 2), ("w2", 1)])
def test_the_peers_product_is_held_against_fp32(
    peer: ModuleType, bench_hopper: ModuleType, name: str, top_k: int
) -> None:
    case = random_case(num_tokens=9, top_k=2, hidden_size=160, intermediate_size=96)
    case.topk_ids[:] %= 4
    product = peer.Product(getattr(case, name), getattr(case, f"{name}_scale"), "mxfp4")
    columns = getattr(case, name).shape[2] * 2
    x = torch.randn(18 // top_k, columns).bfloat16()
    y = product.indexed(case.topk_ids, len(case.w2), top_k)(x)
    arguments = (x, case.topk_ids, top_k, case, name)
    assert bench_hopper._product_error(y, *arguments) < 2.5e-3
    assert bench_hopper._product_error(y.roll(1, 0), *arguments) > 0.5


def test_rows_of_both_kinds_make_a_table(bench_hopper: ModuleType) -> None:
    common = {"rel_l2": 2e-3, "peer_us": 30.0}
    rows = [{"variant": "glm", "tokens": 8, "us": 20.0, **common}]
    chord = {"table": "TP8", "count": 1024, **common}
    rows += [{**chord, "us": 10.0}, {**chord, "us": 30.0, "rel_l2": 3e-3}]
    assert bench_hopper.table(rows).splitlines()[2:] == [
        "| glm, T = 8 | 30.0 | 20.0 | 1.50 | 2.00e-03 |",
        "| TP8 1024 | 60.0 | 10.0 + 30.0 = 40.0 | 1.50 | 3.00e-03 |",
    ]
