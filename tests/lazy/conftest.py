"""A build folder as `mxk build-tpc` leaves it, and a small vllm-gaudi with the lines that the hooks rely on."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mxk_compile.lazy import gptoss

VERSION = "gptoss-v0.2.0-12345678"

INIT = '''\
import os
import sys


def register():
    """Register the platform."""
    return "vllm_gaudi.platform.HpuPlatform"


def register_ops():
    """Register ops."""
    import vllm_gaudi.ops.hpu_mxfp4  # noqa: F401
'''

MXFP4 = """\
from vllm_gaudi.extension.ops import VllmMixtureOfExpertsOpMXFP4


class GptOssMxfp4MoEMethod:
    pass


class HPUGptOssMxfp4MoEMethod(GptOssMxfp4MoEMethod):

    def process_weights_after_loading(self, layer) -> None:
        layer.moe_op = VllmMixtureOfExpertsOpMXFP4(
            len(layer.w2_weight), layer.first, has_bias=hasattr(layer, "w13_bias"))
        for expert_id in range(len(layer.w2_weight)):
            for holder, name in (("w13_list", "w13"), ("w2_list", "w2")):
                expert = getattr(layer.moe_op, holder)[expert_id]
                expert.weight = getattr(layer, name + "_weight").data[expert_id]
                expert.scale = getattr(layer, name + "_weight_scale").data[expert_id]
                if layer.moe_op.has_bias:
                    expert.bias = getattr(layer, name + "_bias").data[expert_id]

        layer.moe_op._cache_weight_lists()

    def apply_monolithic(self, layer, x, topk_ids, topk_weights):
        output = layer.moe_op(
            x,
            topk_ids,
            topk_weights,
            permuted_weights=True,
            activation="silu",
        )
        return output
"""

OPS = """\
import torch


class Expert(torch.nn.Module):
    weight = scale = bias = None


class VllmMixtureOfExpertsOpBase(torch.nn.Module):
    pass


class VllmMixtureOfExpertsOpMXFP4(VllmMixtureOfExpertsOpBase):

    def __init__(self, num_experts, first, has_bias):
        super().__init__()
        self.experts_min, self.experts_max = first, first + num_experts - 1
        self.has_bias, self.block_size, self.alpha, self.limit = has_bias, 32, 1.702, 7.0
        self.w13_list = torch.nn.ModuleList([Expert() for _ in range(num_experts)])
        self.w2_list = torch.nn.ModuleList([Expert() for _ in range(num_experts)])
        self.stock_calls = 0

    def _cache_weight_lists(self):
        pass

    def forward(self, hidden_states, expert_routing_table, router_weights, permuted_weights=True, activation="silu"):
        self.stock_calls += 1
        lists = [[getattr(expert, name) for expert in experts]
                 for name in ("weight", "bias", "scale") for experts in (self.w13_list, self.w2_list)]
        return torch.ops.hpu.mixture_of_experts.bias_mxfp4_fused_weights(
            hidden_states, expert_routing_table, router_weights, *lists, block_size=32, permuted_weights=True,
            experts_min=self.experts_min, experts_max=self.experts_max, is_fp4=True, alpha=self.alpha,
            limit=self.limit)
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with a package `vllm_gaudi`, other files in it included."""
    folder = tmp_path / "vllm-gaudi"
    for name, text in (("__init__.py", INIT), ("ops/hpu_mxfp4.py", MXFP4), ("extension/ops.py", OPS)):
        path = folder / "vllm_gaudi" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (folder / "vllm_gaudi/platform.py").write_text("# not touched\n")
    return folder


@pytest.fixture
def make_build(tmp_path: Path) -> Callable[..., Path]:
    """`make_build(**changes)`: a folder with libraries and MANIFEST; `changes` are fields of the latter."""

    def make(name: str = "lib", **changes: Any) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        stock = tmp_path / "libtpc_kernels.so"
        stock.write_bytes(b"stock")
        files = {"libmxk_tpc.so": b"kernels", "libmxk_op_lazy.so": b"ops"}
        for file, content in files.items():
            (folder / file).write_bytes(content)
        fields = {
            "version": VERSION,
            "variant": "gptoss",
            "defines": [],
            "versions": {},
            "stock": {"path": str(stock), "sha256": hashlib.sha256(b"stock").hexdigest()},
            "kernels": {},
            "files": {file: hashlib.sha256(content).hexdigest() for file, content in files.items()},
            **changes,
        }
        (folder / "MANIFEST").write_text(json.dumps(fields))
        return folder

    return make


@pytest.fixture
def environ(make_build: Callable[..., Path]) -> dict[str, str]:
    """An environment with everything in order, kernels switched on."""
    return {
        "MXFP4_TPC_MOE": "1",
        "MXFP4_TPC_MOE_LIB": str(make_build()),
        "PT_HPU_LAZY_MODE": "1",
        "HPU_MXFP4_NATIVE": "1",
    }


@pytest.fixture
def said(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[], list[str]]]:
    """`said()`: the log lines of lazy mode so far, whatever vLLM's logger is set to."""
    gptoss._say_once.cache_clear()
    logger = logging.getLogger("vllm.mxk_compile.lazy")
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    with caplog.at_level(logging.INFO, logger.name):
        yield lambda: [record.getMessage() for record in caplog.records if record.name == logger.name]
