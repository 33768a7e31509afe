"""The humming-shaped surface as a server uses it: alias, schemas, parameters, both projections, refusals."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from projection_calls import UNWRITTEN, Stack, activations, check, make_stack, unwritten
from torch import Tensor

from mxk_compile.errors import CallError, CheckpointError
from mxk_compile.integrations.humming import dtypes
from mxk_compile.integrations.humming.layer import HummingLayer, HummingMethod
from mxk_compile.integrations.humming.schema import (
    AWQWeightSchema,
    BaseInputSchema,
    BaseWeightSchema,
    HummingWeightSchema,
)
from mxk_compile.integrations.humming.utils.weight import quantize_weight
from mxk_compile.ops.formats import int4
from mxk_compile.ops.formats.nibbles import as_words
from mxk_compile.projections import align

CONFIG = {"quant_method": "humming", "dtype": "uint4", "group_size": 32}


class Layer(torch.nn.Module):
    """What a server has: parameters named by sublayer."""

    layer_name = "model.layers.3.mlp.experts"


def fill(layer: Layer, sublayer: str, stack: Stack, **changes: Any) -> None:
    """As a server does: parameters of the schema's attributes, filled, then prepared."""
    weight = stack.weight
    config = CONFIG | {"has_zero_point": weight.zero is not None} | changes
    schema = BaseWeightSchema.from_config(config)
    assert isinstance(schema, HummingWeightSchema)
    attributes = schema.get_padded_tensors_attrs(
        shape_n=weight.outputs,
        shape_k=weight.inputs,
        param_dtype=torch.bfloat16,
        num_experts=weight.num_experts,
        pad_n_to_multiple=256,
        pad_k_to_multiple=128,
    )
    found = {"weight": weight.weight.view(torch.int32), "weight_scale": weight.scale}
    if weight.zero is not None:
        found["zero_point"] = weight.zero
    assert found.keys() == attributes.keys()
    for name, tensor in found.items():
        assert (tuple(tensor.shape), tensor.dtype) == (attributes[name]["shape"], attributes[name]["dtype"])
        HummingMethod.may_set_param(layer, f"{sublayer}_{name}", tensor)
    HummingMethod.prepare_layer_meta(
        layer, weight.outputs, weight.inputs, schema, num_experts=weight.num_experts,
        pad_n_to_multiple=256, pad_k_to_multiple=128, sublayer_name=sublayer,
    )  # fmt: skip
    HummingMethod.transform_humming_layer(layer, sublayer_name=sublayer)


@pytest.mark.parametrize("zero", [False, True])
def test_both_projections_of_an_indexed_layer(zero: bool) -> None:
    layer, w13, w2 = Layer(), make_stack(4, 64, 128, zero=zero), make_stack(4, 128, 32, zero=zero, seed=3)
    fill(layer, "w13", w13)
    fill(layer, "w2", w2)
    x, ids = activations(3, 128), torch.tensor([[0, 3], [1, 9], [2, 2]], dtype=torch.int32)
    experts = [0, 3, 1, -1, 2, 2]
    rows = HummingMethod.get_default_tuning_configs(layer, sublayer_name="w13", use_f16_accum=False)
    (block,) = {config["block_shape"][0] for _, _, config in rows}
    sorted_ids, expert_ids, num_tokens = align(ids, 4, block)
    call = {
        "sorted_ids": sorted_ids,
        "expert_ids": expert_ids,
        "num_tokens_padded": num_tokens,
        "compute_config": json.dumps({"gemm_type": "indexed", "use_f16_accum": False}),
        "valid_shape_m": 6,
        "tuning_config": json.dumps(rows),
    }
    inputs, scale = HummingMethod.may_quant_input(
        layer=layer, inputs=x, quanted_input=None, sublayer_name="w13"
    )
    out = unwritten(6, 64)
    HummingMethod.forward_layer(
        layer=layer, inputs=inputs, input_scale=scale, outputs=out.view(3, 2, 64), top_k=2,
        sublayer_name="w13", **call,
    )  # fmt: skip
    check(out, w13.expected(x, experts, 2))
    h = out[:, :32].contiguous()
    down = HummingMethod.forward_layer(layer, h, unwritten(6, 128), top_k=1, sublayer_name="w2", **call)
    check(down, w2.expected(h, experts))


def test_blocks_of_the_size_that_the_server_used() -> None:
    layer, stack = Layer(), make_stack()
    fill(layer, "w13", stack)
    x, ids = activations(5, 128), torch.tensor([[0], [1], [1], [3], [2]])
    for block, call in (
        (4, {"tuning_config": [(0, 2, {"block_shape": [8, 1, 1]}), (2, 64, {"block_shape": [4, 1, 1]})]}),
        (2, {"block_m": 2}),
    ):
        lists = align(ids, 4, block)
        names = ("sorted_ids", "expert_ids", "num_tokens_padded")
        routing = dict(zip(names, lists, strict=True))
        out = HummingMethod.forward_layer(
            layer,
            x,
            sublayer_name="w13",
            valid_shape_m=5,
            **routing,
            **call,  # type: ignore[arg-type]
        )
        check(out, stack.expected(x, [0, 1, 1, 3, 2]))


def test_grouped_calls() -> None:
    layer, stack = Layer(), make_stack()
    fill(layer, "w2", stack)
    x = activations(10, 128)
    offsets = torch.tensor([0, 3, 3, 4, 8])  # vLLM's moe_permute: rows of an expert begin anywhere
    contiguous = json.dumps({"gemm_type": "grouped_contiguous"})
    out = HummingMethod.forward_layer(
        layer, x, unwritten(10, 64), expert_layout=offsets, compute_config=contiguous, sublayer_name="w2"
    )
    check(out, stack.expected(x, [0, 0, 0, 2, 3, 3, 3, 3, -1, -1]))
    rows, indices = activations(128, 128), torch.full((128,), 2, dtype=torch.int32)
    out = HummingMethod.forward_layer(
        layer, rows, m_indices=indices, compute_config=contiguous, sublayer_name="w2"
    )
    check(out, stack.expected(rows, [2] * 128))
    counts = torch.tensor([1, 0, 2, 2], dtype=torch.int32)
    masked = {"gemm_type": "grouped_masked"}
    out = HummingMethod.forward_layer(
        layer, x[:8], unwritten(8, 64), expert_layout=counts, compute_config=masked, valid_shape_m=5,
        sublayer_name="w2",
    )  # fmt: skip
    check(out, stack.expected(x, [0, -1, -1, -1, 2, 2, 3, 3]))


@pytest.mark.parametrize("strategy", ["group", "channel"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_compressed_tensors_become_a_layer(strategy: str, symmetric: bool) -> None:
    group = 32 if strategy == "group" else None
    stack = make_stack(3, 20, 64, group, zero=not symmetric)
    weight = stack.weight
    config = {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "num_bits": 4, "type": "int",
        "strategy": strategy, "group_size": group, "symmetric": symmetric,
    }  # fmt: skip
    layer = HummingLayer(20, 64, config, {"quant_method": "humming", "dtype": "bfloat16"}, num_experts=3)
    tensors = {"weight_packed": weight.weight.view(torch.int32), "weight_scale": weight.scale}
    if weight.zero is not None:
        rows = torch.nn.functional.pad(weight.zero, (0, 0, 0, 4))  # whole words of eight outputs
        tensors["weight_zero_point"] = as_words(int4.pack(rows.transpose(1, 2))).transpose(1, 2)
    attributes = BaseWeightSchema.from_config(config).get_tensors_attrs(20, 64, torch.bfloat16, 3)
    assert {name: tuple(t.shape) for name, t in tensors.items()} == {
        name: value["shape"] for name, value in attributes.items() if name != "weight_shape"
    }
    layer.load_from_tensors(tensors)
    layer.transform()
    x, ids = activations(2, 64), torch.tensor([[0, 2], [1, 5]])
    names = ("sorted_ids", "expert_ids", "num_tokens_padded")
    out = layer(x, outputs=unwritten(4, 20), top_k=2, **dict(zip(names, align(ids, 3, 16), strict=True)))
    check(out, stack.expected(x, [0, 2, 1, -1], 2))
    meta = layer.humming_metas[""]
    assert meta.weight_nbytes == sum(
        t.nbytes for t in (weight.weight, weight.scale, weight.zero) if t is not None
    )
    assert json.loads(meta.to_str())["shape_n"] == 20


def test_a_reloaded_parameter_is_seen() -> None:
    layer, first, second = Layer(), make_stack(), make_stack(seed=9)
    fill(layer, "w13", first)
    routing = {
        "expert_layout": torch.tensor([0, 2, 2, 2, 2]),
        "compute_config": {"gemm_type": "grouped_contiguous"},
    }
    x = activations(2, 128)
    check(HummingMethod.forward_layer(layer, x, sublayer_name="w13", **routing), first.expected(x, [0, 0]))
    fill(layer, "w13", second)
    check(HummingMethod.forward_layer(layer, x, sublayer_name="w13", **routing), second.expected(x, [0, 0]))


def test_mxfp4_and_quantising() -> None:
    values = torch.randn(2, 48, 64)
    codes, scale, zero, _ = quantize_weight(values, dtypes.float4e2m1, dtypes.float8e8m0, 32)
    config = {"quant_method": "humming", "dtype": "float4e2m1", "scale_dtype": "float8e8m0", "group_size": 32}
    layer = HummingLayer(48, 64, config, num_experts=2)
    layer.load_from_tensors({"weight": codes, "weight_scale": scale})
    assert zero is None
    x = activations(4, 64)
    routing = {
        "expert_layout": torch.tensor([0, 1, 4]),
        "compute_config": {"gemm_type": "grouped_contiguous"},
    }
    exact = torch.cat([x[:1].float() @ values[0].T, x[1:].float() @ values[1].T])
    assert (layer(x, **routing).float() - exact).norm() < 0.2 * exact.norm()  # four bits
    packed, scale, zero, _ = quantize_weight(values, dtypes.uint4, dtypes.float16, 32, has_zero_point=True)
    loose, *_ = quantize_weight(values, dtypes.uint4, dtypes.float16, 32, has_zero_point=True, pack=False)
    assert torch.equal(int4.unpack_codes(packed), loose)
    assert (int4.unpack(packed, scale, zero) - values).norm() < 0.2 * values.norm()


@pytest.mark.parametrize(
    ("config", "given"),
    [
        (
            {"quant_method": "awq"},
            "humming scheme 'awq': a scheme without a kernel here; allowed: humming (uint4",
        ),
        ({"quant_method": "fp8"}, "humming scheme 'fp8': "),
        (
            CONFIG | {"dtype": "uint3"},
            "humming scheme 'humming': uint3 with bfloat16 for 32, group; allowed:",
        ),
        (CONFIG | {"group_size": 16}, "uint4 with bfloat16 for 16, group"),
        (CONFIG | {"scale_dtype": "float8e4m3"}, "uint4 with float8e4m3 for 32, group"),
        (CONFIG | {"scale_type": "tensor"}, "uint4 with bfloat16 for 32, tensor"),
        (CONFIG | {"scale_2_type": "tensor"}, "for 32, group, weight_scale_2_type=tensor"),
        (CONFIG | {"is_fp_zero_point": True}, "for 32, group, is_fp_zero_point=True"),
        (CONFIG | {"hadamard_block_size": 64}, "for 32, group, hadamard_block_size=64"),
        (
            {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"},
            "format 'nvfp4-pack-quantized'",
        ),
        ({"quant_method": "compressed-tensors", "group_size": 32, "num_bits": 8}, "8 bits"),
    ],
)
def test_schemes_without_a_kernel_are_refused_when_they_are_read(config: dict[str, Any], given: str) -> None:
    with pytest.raises(CheckpointError, match=re.escape(given)) as caught:
        BaseWeightSchema.from_config(config)
    assert "allowed: humming (uint4 in groups of 32, 64, 128 or a row" in str(caught.value)


def test_more_refusals() -> None:
    with pytest.raises(CheckpointError, match="humming scheme 'awq'"):
        AWQWeightSchema()
    with pytest.raises(CheckpointError, match="activations of float8e4m3"):
        BaseInputSchema.from_config({"quant_method": "humming", "dtype": "float8e4m3"})
    layer, stack = Layer(), make_stack()
    fill(layer, "w13", stack)
    schema = BaseWeightSchema.from_config(CONFIG)
    for changes, text in (
        ({"has_bias": True}, "of model.layers.3.mlp.experts, w13: a bias"),
        ({"torch_dtype": torch.float16}, "w13: activations of torch.float16"),
        ({"weight_schema": object()}, "w13: an unconverted schema"),
    ):
        arguments: dict[str, Any] = {"weight_schema": schema, "sublayer_name": "w13"} | changes
        with pytest.raises(CheckpointError, match=re.escape(text)):
            HummingMethod.prepare_layer_meta(layer, 64, 128, num_experts=4, **arguments)
    x = activations(4, 128)
    for call, text in (
        ({"input_scale": torch.ones(1)}, "humming input: an input scale"),
        ({"compute_config": {"use_f16_accum": True}}, "use_f16_accum=True; allowed: use_f16_accum=False"),
        ({"compute_config": {"use_batch_invariant": True}}, "use_batch_invariant=True"),
        (
            {"compute_config": {"gemm_type": "dense"}},
            "gemm_type 'dense' and its tensors; allowed: indexed with",
        ),
        ({}, "gemm_type 'indexed' and its tensors"),
        ({"sublayer_name": "w2"}, "no description of 'w2'"),
    ):
        named: dict[str, Any] = {"sublayer_name": "w13"} | call
        with pytest.raises(CallError, match=re.escape(text)):
            HummingMethod.forward_layer(layer, x, **named)
    layer.w13_weight_scale = None
    with pytest.raises(CallError, match="w13_weight, w13_weight_scale, w13_zero_point are not all there"):
        HummingMethod.transform_humming_layer(layer, "w13")
    fill(layer, "w13", stack)
    layer.humming_metas["w13"] = HummingMethod.prepare_layer_meta(
        layer,
        32,
        128,
        schema,
        num_experts=4,
        sublayer_name="w13",  # type: ignore[arg-type]
    )
    layer.w13_weight = torch.nn.Parameter(layer.w13_weight.clone(), requires_grad=False)
    with pytest.raises(
        CallError, match=re.escape("w13_weight of E, N, K = (4, 64, 128); allowed: (4, 32, 128)")
    ):
        HummingMethod.transform_humming_layer(layer, "w13")


@pytest.mark.parametrize(
    ("name", "bits", "signed", "floating"),
    [
        ("uint4", 4, False, False),
        ("int8", 8, True, False),
        ("bfloat16", 16, True, True),
        ("float8e8m0", 8, False, True),
        ("float4e2m1", 4, True, True),
    ],
)
def test_dtypes(name: str, bits: int, signed: bool, floating: bool) -> None:
    found = dtypes.DataType.from_str(name)
    assert (str(found), found.num_bits, found.is_signed, found.is_floating_point_type) == (
        name, bits, signed, floating,
    )  # fmt: skip


@pytest.mark.parametrize("name", ["uint", "float8e4m4", "float16e5m11", "text", "uint04"])
def test_unknown_dtypes(name: str) -> None:
    with pytest.raises(CallError, match="humming dtype"):
        dtypes.DataType.from_str(name)
    with pytest.raises(CallError, match="torch.int8"):
        dtypes.DataType.from_torch_dtype(torch.int8)


def run(code: str, *, path: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    import os

    environment = {**os.environ, **variables}
    if path is not None:
        environment["PYTHONPATH"] = f"{path}{os.pathsep}{environment.get('PYTHONPATH', '')}"
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False
    )


ALIAS = """
from mxk_compile.integrations import humming as ours
ours.enable(); ours.enable()
import humming.dtypes, humming.layer
from humming.config import GemmType
from humming.schema import BaseWeightSchema
from humming.utils.weight import quantize_weight
assert humming is ours and humming.dtypes.uint4.num_bits == 4 and GemmType("indexed")
print(BaseWeightSchema.__module__)
"""


def test_the_alias_is_made_at_run_time_only() -> None:
    done = run(ALIAS)
    assert done.stdout == "mxk_compile.integrations.humming.schema\n", done.stderr
    assert "No module named 'humming'" in run("import mxk_compile, humming").stderr


def test_another_humming_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "humming").mkdir()
    (tmp_path / "humming" / "__init__.py").write_text("")
    for code in (ALIAS, "import humming" + ALIAS):
        done = run(code, path=tmp_path)
        assert f"InstallError: humming alias: a package 'humming' is there already ({tmp_path}" in done.stderr


@pytest.mark.parametrize(("value", "found"), [("1", True), ("0", False)])
def test_the_plugin_makes_the_alias(value: str, found: bool) -> None:
    code = "from mxk_compile.integrations import vllm; vllm.register(); import sys; print('humming' in sys.modules)"
    done = run(code, MXK_VLLM_HUMMING=value)
    assert done.stdout == f"{found}\n", done.stderr


def test_the_plugin_says_why_it_makes_none(tmp_path: Path) -> None:
    (tmp_path / "humming.py").write_text("")
    code = (
        "from mxk_compile.integrations import vllm; vllm.register(); import humming; print(humming.__file__)"
    )
    done = run(code, path=tmp_path, MXK_VLLM_HUMMING="1")
    assert done.stdout == f"{tmp_path / 'humming.py'}\n"
    assert "a package 'humming' is there already" in done.stderr


def test_rows_of_nobody_stay_as_they_were() -> None:
    layer, stack = Layer(), make_stack()
    fill(layer, "w13", stack)
    out = unwritten(2, 64)
    empty = torch.zeros(5, dtype=torch.int64)
    config = {"gemm_type": "grouped_contiguous"}
    HummingMethod.forward_layer(
        layer, activations(2, 128), out, expert_layout=empty, compute_config=config, sublayer_name="w13"
    )
    assert isinstance(out, Tensor)
    assert bool((out == UNWRITTEN).all())
