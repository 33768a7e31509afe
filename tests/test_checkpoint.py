"""Expert readers against checkpoints written here, word by word, with safetensors' own writer."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from mxk_compile import checkpoint_files
from mxk_compile.checkpoint import Checkpoint, PackedExperts
from mxk_compile.errors import CheckpointError
from mxk_compile.ops.dequant import dequantize
from mxk_compile.ops.formats import mxfp4

PREFIX = "model.layers.0.mlp.experts"
EXPERTS, HIDDEN, INTERMEDIATE = 3, 128, 64
SHARD = "model-{:05d}-of-{:05d}.safetensors"
INDEX = "model.safetensors.index.json"


def write(directory: Path, tensors: dict[str, Tensor], config: dict[str, Any], num_shards: int = 1) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    config = {"num_local_experts": EXPERTS, **config}
    (directory / "config.json").write_text(json.dumps(config))
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    if num_shards == 1:
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        return directory
    weight_map = {}
    for shard in range(num_shards):
        names = list(tensors)[shard::num_shards]
        file = SHARD.format(shard + 1, num_shards)
        save_file({name: tensors[name] for name in names}, directory / file)
        weight_map |= dict.fromkeys(names, file)
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return directory


def random_bytes(*shape: int, low: int = 0, high: int = 256) -> Tensor:
    return torch.randint(low, high, shape, dtype=torch.uint8)


# -- gpt-oss ------------------------------------------------------------------------------------------------------

MXFP4_CONFIG = {"quantization_config": {"quant_method": "mxfp4"}}


def gpt_oss_tensors(prefix: str = PREFIX) -> dict[str, Tensor]:
    rows = 2 * INTERMEDIATE
    return {
        f"{prefix}.gate_up_proj_blocks": random_bytes(EXPERTS, rows, HIDDEN // 32, 16),
        f"{prefix}.gate_up_proj_scales": random_bytes(EXPERTS, rows, HIDDEN // 32),
        f"{prefix}.gate_up_proj_bias": torch.randn(EXPERTS, rows, dtype=torch.bfloat16),
        f"{prefix}.down_proj_blocks": random_bytes(EXPERTS, HIDDEN, INTERMEDIATE // 32, 16),
        f"{prefix}.down_proj_scales": random_bytes(EXPERTS, HIDDEN, INTERMEDIATE // 32),
        f"{prefix}.down_proj_bias": torch.randn(EXPERTS, HIDDEN, dtype=torch.bfloat16),
    }


@pytest.mark.parametrize("num_shards", [1, 3])
def test_gpt_oss_experts_are_the_bytes_of_the_file(tmp_path: Path, num_shards: int) -> None:
    tensors = gpt_oss_tensors() | {"model.norm.weight": torch.randn(HIDDEN)}
    path = write(tmp_path / "a", tensors, MXFP4_CONFIG, num_shards)
    checkpoint = Checkpoint(path)
    assert set(checkpoint.names()) == set(tensors)
    assert checkpoint.config["num_local_experts"] == EXPERTS
    assert torch.equal(checkpoint.tensor("model.norm.weight"), tensors["model.norm.weight"])
    experts = checkpoint.experts(PREFIX)
    assert (experts.weight_format, experts.row_order, experts.pack_dim) == ("mxfp4", "interleaved", "input")
    assert experts.w13.shape == (EXPERTS, 2 * INTERMEDIATE, HIDDEN // 2)
    assert experts.w2.shape == (EXPERTS, HIDDEN, INTERMEDIATE // 2)
    assert (experts.w13_zero, experts.w2_zero) == (None, None)
    assert experts.num_bytes == sum(tensors[name].nbytes for name in gpt_oss_tensors())
    found = {
        "gate_up_proj_blocks": experts.w13.view(EXPERTS, -1, HIDDEN // 32, 16),
        "gate_up_proj_scales": experts.w13_scale,
        "gate_up_proj_bias": experts.w13_bias,
        "down_proj_blocks": experts.w2.view(EXPERTS, -1, INTERMEDIATE // 32, 16),
        "down_proj_scales": experts.w2_scale,
        "down_proj_bias": experts.w2_bias,
    }
    again = {f"{PREFIX}.{name}": value for name, value in found.items() if value is not None}
    for name, value in again.items():
        assert torch.equal(value, tensors[name]), name
    # Every scale byte comes back as it was, through another save and load.
    once_more = Checkpoint(write(tmp_path / "b", again, MXFP4_CONFIG)).experts(PREFIX)
    assert torch.equal(once_more.w13_scale, experts.w13_scale)
    assert len(experts.w13_scale.unique()) > 200


def test_a_published_row_decodes_to_its_values(tmp_path: Path) -> None:
    """Codes 0..15 twice under scale bytes 1, 124, 127, 130 and 254, element 2i in the low nibble."""
    tensors = gpt_oss_tensors()
    bytes_of_row = torch.tensor([2 * i % 16 | (2 * i + 1) % 16 << 4 for i in range(16)], dtype=torch.uint8)
    tensors[f"{PREFIX}.gate_up_proj_blocks"][1, :5, 0] = bytes_of_row
    for row, byte in enumerate((1, 124, 127, 130, 254)):
        tensors[f"{PREFIX}.gate_up_proj_scales"][1, row, 0] = byte
    experts = Checkpoint(write(tmp_path, tensors, MXFP4_CONFIG)).experts(PREFIX)
    values = dequantize(experts.w13, experts.w13_scale, weight_format="mxfp4", dtype=torch.float64)
    elements = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    elements += [-value for value in elements]
    for row, byte in enumerate((1, 124, 127, 130, 254)):
        assert values[1, row, :32].tolist() == [value * 2.0 ** (byte - 127) for value in elements * 2]
    assert values[1, 1, 1].item() == 0.5 * 2.0**-3


def test_only_the_option_moves_scales_of_another_bias(tmp_path: Path) -> None:
    tensors = gpt_oss_tensors()
    scales = tensors[f"{PREFIX}.gate_up_proj_scales"]
    scales.clamp_(max=252)
    tensors[f"{PREFIX}.down_proj_scales"].clamp_(max=252)
    scales[0, 0, 0] = 255
    checkpoint = Checkpoint(write(tmp_path, tensors, MXFP4_CONFIG))
    assert torch.equal(checkpoint.experts(PREFIX).w13_scale, scales)
    moved = checkpoint.experts(PREFIX, scale_bias=125).w13_scale
    assert moved[0, 0, 0] == 255
    assert torch.equal(moved.flatten()[1:], scales.flatten()[1:] + 2)
    with pytest.raises(CheckpointError, match=r"scales: a scale byte that leaves 0\.\.254 when moved by 7"):
        checkpoint.experts(PREFIX, scale_bias=120)


# -- stacked MXFP4 ------------------------------------------------------------------------------------------------


def stacked_tensors(names: tuple[str, str], suffix: str = "_scale") -> dict[str, Tensor]:
    weights = (torch.randn(EXPERTS, 2 * INTERMEDIATE, HIDDEN), torch.randn(EXPERTS, HIDDEN, INTERMEDIATE))
    tensors = {}
    for name, weight in zip(names, weights, strict=True):
        packed, scale = mxfp4.quantize(weight)
        tensors |= {f"{PREFIX}.{name}": packed, f"{PREFIX}.{name}{suffix}": scale}
    return tensors


@pytest.mark.parametrize("row_order", ["gate_up", "up_gate", "interleaved"])
@pytest.mark.parametrize("names", [("gate_up_proj", "down_proj"), ("w13_weight", "w2_weight")])
@pytest.mark.parametrize("scale_dtype", [torch.uint8, torch.float8_e8m0fnu])
def test_stacked_mxfp4_has_the_row_order_that_the_caller_states(
    tmp_path: Path, names: tuple[str, str], row_order: str, scale_dtype: torch.dtype
) -> None:
    tensors = stacked_tensors(names)
    want = dict(tensors)
    tensors = {k: v.view(scale_dtype) if k.endswith("_scale") else v for k, v in tensors.items()}
    bias = torch.randn(EXPERTS, 2 * INTERMEDIATE)
    bias_names = [f"{PREFIX}.{name.removesuffix('_weight')}_bias" for name in names]
    tensors |= {bias_names[0]: bias, bias_names[1]: torch.randn(EXPERTS, HIDDEN)}
    experts = Checkpoint(write(tmp_path, tensors, {})).experts(PREFIX, scheme="mxfp4", row_order=row_order)
    assert experts.row_order == row_order
    assert torch.equal(experts.w13, want[f"{PREFIX}.{names[0]}"])
    assert experts.w13_scale.dtype == torch.uint8
    assert torch.equal(experts.w2_scale, want[f"{PREFIX}.{names[1]}_scale"])
    assert experts.w13_bias is not None
    assert torch.equal(experts.w13_bias, bias)


def test_the_row_order_is_never_guessed(tmp_path: Path) -> None:
    checkpoint = Checkpoint(write(tmp_path, stacked_tensors(("gate_up_proj", "down_proj")), {}))
    assert checkpoint.experts(PREFIX, scheme="mxfp4", row_order="gate_up").w13_bias is None
    with pytest.raises(CheckpointError, match="row_order=None for scheme 'mxfp4'; allowed: gate_up, up_gate"):
        checkpoint.experts(PREFIX, scheme="mxfp4")
    with pytest.raises(CheckpointError, match=r"row_order='gate_up' for scheme 'gpt_oss'; allowed: .* None"):
        checkpoint.experts(PREFIX, scheme="gpt_oss", row_order="gate_up")


# -- INT4, one tensor for each expert and projection ----------------------------------------------------------------


def words(codes: Tensor, dim: int) -> Tensor:
    """Eight codes 0..15 along dim in each int32, the first in the lowest nibble."""
    parts = codes.long().movedim(dim, -1).unflatten(-1, (-1, 8))
    value = sum(parts[..., i] << 4 * i for i in range(8))
    assert isinstance(value, Tensor)
    return torch.where(value >= 1 << 31, value - (1 << 32), value).to(torch.int32).movedim(-1, dim)


class Linear:
    """A random INT4 linear layer: codes [N, K], zero [N, K/g], scale [N, K/g], and its values in float64."""

    def __init__(self, rows: int, columns: int, group: int, symmetric: bool) -> None:
        self.codes = torch.randint(0, 16, (rows, columns))
        self.scale = (torch.rand(rows, columns // group) + 0.1).to(torch.bfloat16)
        shape = self.scale.shape
        self.zero = torch.full(shape, 8) if symmetric else torch.randint(0, 16, shape)
        zero, scale = (t.double().repeat_interleave(group, 1) for t in (self.zero, self.scale))
        self.values = (self.codes - zero) * scale
        self.group = group

    def compressed(self, name: str, symmetric: bool) -> dict[str, Tensor]:
        tensors = {
            f"{name}.weight_packed": words(self.codes, 1),
            f"{name}.weight_scale": self.scale,
            f"{name}.weight_shape": torch.tensor(self.codes.shape),
        }
        return tensors if symmetric else tensors | {f"{name}.weight_zero_point": words(self.zero, 0)}

    def gptq(self, name: str, version: int) -> dict[str, Tensor]:
        stored = (self.zero - 1) & 15 if version == 1 else self.zero
        return {
            f"{name}.qweight": words(self.codes.t(), 0),
            f"{name}.qzeros": words(stored.t(), 1),
            f"{name}.scales": self.scale.t(),
            f"{name}.g_idx": torch.arange(self.codes.shape[1], dtype=torch.int32) // self.group,
        }


def layer(group: int, symmetric: bool) -> dict[str, Linear]:
    """Group 0 is one group a row."""
    linears = {}
    for expert in range(EXPERTS):
        for name, rows, columns in (
            ("gate_proj", INTERMEDIATE, HIDDEN),
            ("up_proj", INTERMEDIATE, HIDDEN),
            ("down_proj", HIDDEN, INTERMEDIATE),
        ):
            linears[f"{PREFIX}.{expert}.{name}"] = Linear(rows, columns, group or columns, symmetric)
    return linears


def compressed_config(group: int, symmetric: bool, **changes: Any) -> dict[str, Any]:
    weights = {
        "num_bits": 4,
        "type": "int",
        "symmetric": symmetric,
        "strategy": "group" if group else "channel",
    }
    weights |= {"group_size": group or None} | changes
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "format": "pack-quantized"}}
    method = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    return {"quantization_config": {**method, "config_groups": groups}}


def gptq_config(group: int, symmetric: bool, version: int, **changes: Any) -> dict[str, Any]:
    config = {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": group or -1,
        "sym": symmetric,
        "desc_act": False,
    }
    return {
        "quantization_config": {**config, "checkpoint_format": {1: "gptq", 2: "gptq_v2"}[version], **changes}
    }


def compressed(directory: Path, group: int = 32, symmetric: bool = True) -> tuple[dict[str, Linear], Path]:
    linears = layer(group, symmetric)
    tensors = {k: v for name, one in linears.items() for k, v in one.compressed(name, symmetric).items()}
    return linears, write(directory, tensors, compressed_config(group, symmetric))


def gptq_tensors(linears: dict[str, Linear], version: int) -> dict[str, Tensor]:
    return {k: v for name, one in linears.items() for k, v in one.gptq(name, version).items()}


def check_values(experts: PackedExperts, linears: dict[str, Linear]) -> None:
    assert (experts.weight_format, experts.row_order, experts.pack_dim) == ("uint4", "gate_up", "input")
    w13 = dequantize(experts.w13, experts.w13_scale, experts.w13_zero, weight_format="uint4")
    w2 = dequantize(experts.w2, experts.w2_scale, experts.w2_zero, weight_format="uint4")
    for expert in range(EXPERTS):
        name = f"{PREFIX}.{expert}"
        assert torch.equal(w13[expert, :INTERMEDIATE], linears[f"{name}.gate_proj"].values.float())
        assert torch.equal(w13[expert, INTERMEDIATE:], linears[f"{name}.up_proj"].values.float())
        assert torch.equal(w2[expert], linears[f"{name}.down_proj"].values.float())


@pytest.mark.parametrize("group", [32, 64, 0])
@pytest.mark.parametrize("symmetric", [True, False])
def test_compressed_tensors(tmp_path: Path, group: int, symmetric: bool) -> None:
    linears, path = compressed(tmp_path, group, symmetric)
    experts = Checkpoint(path).experts(PREFIX)
    assert (experts.w13_zero is None) == symmetric
    assert experts.w13_scale.dtype == torch.bfloat16
    check_values(experts, linears)


def test_compressed_tensors_with_flat_metadata_and_a_group_for_experts(tmp_path: Path) -> None:
    linears, path = compressed(tmp_path)
    flat = {"num_bits": 4, "group_size": 32, "strategy": "group", "symmetric": True}
    method = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    (path / "config.json").write_text(json.dumps({"quantization_config": method | flat}))
    check_values(Checkpoint(path).experts(PREFIX), linears)
    groups = {
        "others": {"targets": ["Linear"], "weights": {**flat, "num_bits": 8}},
        "experts": {"targets": ["re:.*experts.*"], "weights": flat},
    }
    nested = {
        "text_config": {"num_experts": EXPERTS, "quantization_config": method | {"config_groups": groups}}
    }
    (path / "config.json").write_text(json.dumps(nested))
    check_values(Checkpoint(path).experts(PREFIX), linears)


def test_biases_of_single_linears_are_stacked(tmp_path: Path) -> None:
    linears = layer(32, True)
    tensors = gptq_tensors(linears, 1)
    biases = {f"{name}.bias": torch.randn(one.codes.shape[0]) for name, one in linears.items()}
    experts = Checkpoint(write(tmp_path, tensors | biases, gptq_config(32, True, 1))).experts(PREFIX)
    assert experts.w13_bias is not None
    assert torch.equal(experts.w13_bias[1, INTERMEDIATE:], biases[f"{PREFIX}.1.up_proj.bias"])
    assert experts.w2_bias is not None
    assert torch.equal(experts.w2_bias[2], biases[f"{PREFIX}.2.down_proj.bias"])
    del biases[f"{PREFIX}.1.up_proj.bias"]
    path = write(tmp_path, tensors | biases, gptq_config(32, True, 1))
    with pytest.raises(CheckpointError, match=r"missing tensor .*1\.up_proj\.bias"):
        Checkpoint(path).experts(PREFIX)


@pytest.mark.parametrize("group", [32, 64, 0])
@pytest.mark.parametrize("symmetric", [True, False])
def test_both_versions_of_gptq_give_the_same_weights(tmp_path: Path, group: int, symmetric: bool) -> None:
    linears = layer(group, symmetric)
    both = []
    for version in (1, 2):
        config = gptq_config(group, symmetric, version)
        path = write(tmp_path / str(version), gptq_tensors(linears, version), config)
        both.append(Checkpoint(path).experts(PREFIX))
        check_values(both[-1], linears)
    assert (both[0].w13_zero is None) == symmetric
    if not symmetric:  # a zero point of 0 is stored as 15 by version 1
        assert int(both[0].w13_zero.min()) == 0  # type: ignore[union-attr]
        assert torch.equal(both[0].w13_zero, both[1].w13_zero)  # type: ignore[arg-type]


@pytest.mark.parametrize(("stored", "label"), [(2, "gptq"), (1, "gptq_v2")])
@pytest.mark.parametrize("declared_symmetric", [True, False])
def test_a_gptq_label_that_contradicts_the_zero_points_is_refused(
    tmp_path: Path, stored: int, label: str, declared_symmetric: bool
) -> None:
    linears = layer(32, True)
    config = gptq_config(32, declared_symmetric, 1, checkpoint_format=label)
    path = write(tmp_path, gptq_tensors(linears, stored), config)
    wrong = {"gptq": 9, "gptq_v2": 7}[label]
    other = {"gptq": "gptq_v2", "gptq_v2": "gptq"}[label]
    with pytest.raises(
        CheckpointError,
        match=rf"0\.gate_proj\.qzeros: zero points {wrong} to {wrong} when read as '{label}'; allowed: .*"
        rf"pass gptq_format='{other}'",
    ):
        Checkpoint(path).experts(PREFIX)
    check_values(Checkpoint(path).experts(PREFIX, gptq_format=other), linears)
    if not declared_symmetric:
        taken = Checkpoint(path).experts(PREFIX, gptq_format=label)
        assert taken.w13_zero is not None
        assert taken.w13_zero.unique().tolist() == [wrong]


def test_gptq_with_activation_order_is_refused(tmp_path: Path) -> None:
    tensors = gptq_tensors(layer(32, True), 1)
    name = f"{PREFIX}.1.up_proj.g_idx"
    tensors[name] = tensors[name].flip(0)
    path = write(tmp_path, tensors, gptq_config(32, True, 1, desc_act=True))
    with pytest.raises(CheckpointError, match=r"1\.up_proj\.g_idx: inputs in another order; .*desc_act"):
        Checkpoint(path).experts(PREFIX)


# -- errors ---------------------------------------------------------------------------------------------------------


def broken(tmp_path: Path, kind: str, **changes: Tensor | None) -> Checkpoint:
    """A checkpoint of one kind with some of its tensors (named by their last parts) changed or left out."""
    if kind == "gpt_oss":
        tensors, config = gpt_oss_tensors(), MXFP4_CONFIG
    elif kind == "compressed":
        linears = layer(32, True)
        tensors = {k: v for name, one in linears.items() for k, v in one.compressed(name, True).items()}
        config = compressed_config(32, True)
    else:
        tensors, config = gptq_tensors(layer(32, True), 1), gptq_config(32, True, 1)
    for name, value in changes.items():
        full = f"{PREFIX}.{name}"
        tensors.pop(full, None)
        if value is not None:
            tensors[full] = value
    return Checkpoint(write(tmp_path, tensors, config))


def scales(groups: int) -> Tensor:
    return torch.ones(INTERMEDIATE, groups, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("kind", "changes", "text"),
    [
        ("gpt_oss", {"down_proj_blocks": None}, f"missing tensor {PREFIX}.down_proj_blocks; allowed: one of"),
        ("gpt_oss", {"gate_up_proj_scales": None}, f"missing tensor {PREFIX}.gate_up_proj_scales"),
        ("gpt_oss", {"down_proj_bias": None}, f"missing tensor {PREFIX}.down_proj_bias"),
        (
            "gpt_oss",
            {"gate_up_proj_scales": random_bytes(EXPERTS, 128, 2)},
            "gate_up_proj_scales: shape [3, 128, 2]; allowed: [3, 128, 4]",
        ),
        (
            "gpt_oss",
            {"gate_up_proj_scales": torch.ones(EXPERTS, 128, 4)},
            "gate_up_proj_scales: dtype F32; allowed: uint8 or float8_e8m0fnu",
        ),
        (
            "gpt_oss",
            {"gate_up_proj_blocks": random_bytes(EXPERTS, 128, 64)},
            "gate_up_proj_blocks: shape [3, 128, 64]; allowed: [3, any, any, 16]",
        ),
        (
            "gpt_oss",
            {"down_proj_blocks": random_bytes(EXPERTS, 128, 3, 16)},
            "down_proj_blocks: shape [3, 128, 3, 16]; allowed: [3, 128, 2, 16]",
        ),
        (
            "gpt_oss",
            {
                "gate_up_proj_blocks": random_bytes(EXPERTS, 96, 4, 16),
                "gate_up_proj_scales": random_bytes(EXPERTS, 96, 4),
            },
            "gate_up_proj_blocks: 96 rows; allowed: a multiple of 64",
        ),
        (
            "gpt_oss",
            {"gate_up_proj_blocks": random_bytes(2, 128, 4, 16)},
            "gate_up_proj_blocks: shape [2, 128, 4, 16]; allowed: [3, any, any, 16]",
        ),
        (
            "gpt_oss",
            {"gate_up_proj_bias": torch.ones(EXPERTS, 64)},
            "gate_up_proj_bias: shape [3, 64]; allowed: [3, 128]",
        ),
        (
            "compressed",
            {"2.down_proj.weight_packed": None},
            "missing tensor " + PREFIX + ".2.down_proj.weight_packed",
        ),
        (
            "compressed",
            {"1.up_proj.weight_scale": None},
            "missing tensor " + PREFIX + ".1.up_proj.weight_scale",
        ),
        (
            "compressed",
            {"0.gate_proj.weight_scale": scales(2)},
            "0.gate_proj.weight_scale: scale of shape [64, 2] for K=128; allowed: group_size 32 (config.json)",
        ),
        (
            "compressed",
            {"0.gate_proj.weight_scale": scales(3)},
            "scale of shape [64, 3] for K=128; allowed: groups of 32, 64, 128 or one group a row, group_size 32",
        ),
        (
            "compressed",
            {"1.gate_proj.weight_scale": scales(2)},
            "1.gate_proj.weight_scale: shape [64, 2]; allowed: [64, 4]",
        ),
        (
            "compressed",
            {"1.gate_proj.weight_scale": scales(4).float()},
            "1.gate_proj.weight_scale: dtype F32; allowed: bfloat16",
        ),
        (
            "compressed",
            {"0.gate_proj.weight_packed": random_bytes(64, 64)},
            "0.gate_proj.weight_packed: dtype U8; allowed: int32",
        ),
        (
            "compressed",
            {"1.up_proj.weight_shape": torch.tensor([64, 120])},
            "1.up_proj.weight_shape: [64, 120]; allowed: [64, 128]",
        ),
        (
            "compressed",
            {"0.gate_proj.weight_zero_point": torch.zeros(8, 4, dtype=torch.int32)},
            "weight_zero_point: zero points in a symmetric checkpoint; allowed: none with symmetric=true",
        ),
        (
            "compressed",
            {"3.gate_proj.weight_packed": torch.zeros(64, 16, dtype=torch.int32)},
            "3.gate_proj.weight_packed: expert 3; allowed: 3 experts (config.json)",
        ),
        ("gptq", {"0.down_proj.qzeros": None}, "missing tensor " + PREFIX + ".0.down_proj.qzeros"),
        (
            "gptq",
            {"0.gate_proj.scales": torch.ones(1, INTERMEDIATE, dtype=torch.float16)},
            "0.gate_proj.scales: scale of shape [1, 64] for K=128; allowed: group_size 32 (config.json)",
        ),
        (
            "gptq",
            {"0.gate_proj.qzeros": torch.ones(4, 7, dtype=torch.int32)},
            "0.gate_proj.qzeros: shape [4, 7]; allowed: [4, 8]",
        ),
    ],
)
def test_a_broken_tensor_is_named(tmp_path: Path, kind: str, changes: dict[str, Any], text: str) -> None:
    with pytest.raises(CheckpointError, match=re.escape(text)) as caught:
        broken(tmp_path, kind, **changes).experts(PREFIX)
    assert "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({}, "quant_method None; allowed: mxfp4, compressed-tensors, gptq; pass scheme="),
        ({"quantization_config": {"quant_method": "awq"}}, "quant_method 'awq'; allowed: mxfp4"),
        (compressed_config(32, True, num_bits=8), "8 bits; allowed: 4 bits"),
        (compressed_config(32, True, type="float"), "type 'float', strategy 'group'; allowed: type 'int'"),
        (
            compressed_config(32, True, strategy="tensor"),
            "strategy 'tensor'; allowed: type 'int', strategy 'group'",
        ),
        (
            {"quantization_config": {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}},
            "format 'nvfp4-pack-quantized'; allowed: 'pack-quantized'",
        ),
        (
            {
                "quantization_config": {
                    "quant_method": "compressed-tensors",
                    "config_groups": {"a": {"targets": ["re:.*attn.*"]}},
                }
            },
            "0 config_groups for model.layers.0.mlp.experts.0.gate_proj; allowed: one",
        ),
        (
            gptq_config(32, True, 1, checkpoint_format="marlin"),
            "checkpoint_format 'marlin'; allowed: gptq, gptq_v2",
        ),
        (gptq_config(32, True, 1, bits=8), "8 bits; allowed: 4 bits"),
    ],
)
def test_unknown_metadata_is_refused(tmp_path: Path, config: dict[str, Any], text: str) -> None:
    _, path = compressed(tmp_path)
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=re.escape(text)) as caught:
        Checkpoint(path).experts(PREFIX)
    assert "config.json: quantization_config" in str(caught.value)


def test_unknown_arguments_are_refused(tmp_path: Path) -> None:
    checkpoint = Checkpoint(compressed(tmp_path)[1])
    with pytest.raises(
        CheckpointError, match="scheme 'nvfp4'; allowed: gpt_oss, mxfp4, compressed_tensors, gptq"
    ):
        checkpoint.experts(PREFIX, scheme="nvfp4")
    with pytest.raises(CheckpointError, match="gptq_format='gptq'; allowed: gptq, gptq_v2 for scheme 'gptq'"):
        checkpoint.experts(PREFIX, gptq_format="gptq")
    with pytest.raises(
        CheckpointError, match="scale_bias=125 for scheme 'compressed_tensors'; allowed: MXFP4"
    ):
        checkpoint.experts(PREFIX, scale_bias=125)
    with pytest.raises(CheckpointError, match=r"missing tensor model\.layers\.7\.mlp\.experts\.0\.gate_proj"):
        checkpoint.experts("model.layers.7.mlp.experts")
    with pytest.raises(CheckpointError, match="missing tensor lm_head"):
        checkpoint.tensor("lm_head")


# -- files ----------------------------------------------------------------------------------------------------------


def shards(directory: Path) -> tuple[dict[str, Tensor], Path]:
    tensors = gpt_oss_tensors()
    return tensors, write(directory, tensors, MXFP4_CONFIG, num_shards=3)


def edit_index(path: Path, edit: Any) -> None:
    index = json.loads((path / INDEX).read_text())
    edit(index["weight_map"])
    (path / INDEX).write_text(json.dumps(index))


def refused(path: Path, text: str) -> None:
    with pytest.raises(CheckpointError, match=re.escape(text)) as caught:
        Checkpoint(path)
    assert "\n" not in str(caught.value)


def test_an_absent_shard_is_named(tmp_path: Path) -> None:
    _, path = shards(tmp_path)
    (path / SHARD.format(2, 3)).unlink()
    refused(path, f"{path / INDEX}: shard model-00002-of-00003.safetensors is absent (needed for {PREFIX}.")


def test_a_truncated_shard_is_named(tmp_path: Path) -> None:
    _, path = shards(tmp_path)
    shard = path / SHARD.format(1, 3)
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1])
    refused(path, f"truncated, {len(whole) - 1} bytes; allowed: at least {len(whole)} bytes")
    shard.write_bytes(whole[:100])
    refused(path, f"{shard}: 100 bytes, header of ")
    shard.write_bytes(whole[:3])
    refused(path, f"{shard}: 3 bytes, header of ")


def test_a_shard_that_shrinks_after_it_was_opened_is_refused(tmp_path: Path) -> None:
    _, path = shards(tmp_path)
    checkpoint = Checkpoint(path)
    shard = path / SHARD.format(2, 3)
    shard.write_bytes(shard.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match=r"model-00002-of-00003\.safetensors: .* bytes; allowed: "):
        checkpoint.experts(PREFIX)


def test_an_index_that_names_the_wrong_file_is_refused(tmp_path: Path) -> None:
    _, path = shards(tmp_path)
    name = f"{PREFIX}.down_proj_bias"
    edit_index(path, lambda weight_map: weight_map.update({name: SHARD.format(1, 3)}))
    refused(path, f"{path / INDEX}: no tensor {name} in model-00001-of-00003.safetensors")


@pytest.mark.parametrize(
    "shard",
    ["../other.safetensors", "/elsewhere.safetensors", "a/b.safetensors", "..", "a\\b.safetensors", 3],
)
def test_a_shard_name_cannot_leave_the_directory(tmp_path: Path, shard: Any) -> None:
    _, path = shards(tmp_path / "model")
    save_file({"x": torch.ones(1)}, tmp_path / "other.safetensors")
    edit_index(path, lambda weight_map: weight_map.update({"x": shard}))
    refused(path, f"file {shard!r} for x; allowed: the plain name of a .safetensors file")


def test_duplicate_names_are_refused(tmp_path: Path) -> None:
    tensors, path = shards(tmp_path)
    name = next(iter(tensors))
    save_file({name: tensors[name], **dict(list(tensors.items())[1::3])}, path / SHARD.format(2, 3))
    refused(
        path,
        f"duplicate tensor {name} in model-00001-of-00003.safetensors and model-00002-of-00003.safetensors",
    )
    text = (path / INDEX).read_text()
    (path / INDEX).write_text(text.replace('"weight_map": {', f'"weight_map": {{"{name}": "x.safetensors", '))
    refused(path, f"{path / INDEX}: duplicate name {name}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "text that is not JSON"),
        ("[]", "JSON list; allowed: a JSON object"),
        ("{}", "no weight_map"),
        ('{"weight_map": {}}', "no weight_map"),
    ],
)
def test_an_index_that_is_none_is_refused(tmp_path: Path, text: str, message: str) -> None:
    _, path = shards(tmp_path)
    (path / INDEX).write_text(text)
    refused(path, f"{path / INDEX}: {message}")


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (
            {"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}},
            "x: F32 [2] at bytes 0 to 4; allowed: 8 bytes",
        ),
        ({"x": {"dtype": "F32", "shape": [-1], "data_offsets": [4, 0]}}, "x: F32 [-1] at bytes 4 to 0"),
        ({"x": {"dtype": "F32", "shape": [1]}}, "x: a header entry that cannot be read"),
        ({"x": 3}, "x: a header entry that cannot be read"),
    ],
)
def test_a_header_that_lies_is_refused(tmp_path: Path, header: dict[str, Any], message: str) -> None:
    text = json.dumps(header).encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(16))
    refused(file, f"{file}: {message}")


def test_which_file_of_a_directory_is_opened(tmp_path: Path) -> None:
    refused(tmp_path / "nothing", "no such file; allowed: a file or directory that exists")
    refused(
        tmp_path,
        "0 .safetensors files and no index; allowed: model.safetensors, model.safetensors.index.json",
    )
    save_file({"x": torch.ones(2)}, tmp_path / "weights.safetensors")
    assert Checkpoint(tmp_path).tensor("x").tolist() == [1, 1]
    assert Checkpoint(tmp_path / "weights.safetensors").names() == ["x"]
    save_file({"y": torch.ones(2)}, tmp_path / "more.safetensors")
    refused(tmp_path, "2 .safetensors files and no index")


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn]
)
@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (2, 3, 4)])
def test_a_tensor_of_any_dtype_and_shape_is_read(
    tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    want = (torch.rand(shape) * 3).to(dtype)
    save_file({"a": torch.ones(3, dtype=torch.uint8), "x": want}, tmp_path / "model.safetensors")
    got = Checkpoint(tmp_path).tensor("x")
    assert (got.dtype, got.shape) == (dtype, want.shape)
    assert (
        got.view(torch.uint8).tolist() == want.view(torch.uint8).tolist()
        if shape
        else got.item() == want.item()
    )


# -- progress and memory --------------------------------------------------------------------------------------------


def test_progress_counts_the_bytes_and_is_silent_for_short_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    _, path = shards(tmp_path)
    bars: list[Any] = []

    class Bar:
        def __init__(self, **options: Any) -> None:
            self.options, self.seen, self.closed = options, 0, False
            bars.append(self)

        def update(self, count: int) -> None:
            self.seen += count

        def close(self) -> None:
            self.closed = True

    with Checkpoint(path) as checkpoint:
        checkpoint.experts(PREFIX)
    assert capfd.readouterr().err == ""
    monkeypatch.setattr(checkpoint_files, "tqdm", Bar)
    with Checkpoint(path) as checkpoint:
        experts = checkpoint.experts(PREFIX)
    assert [(bar.seen, bar.closed, bar.options["total"]) for bar in bars] == [
        (experts.num_bytes, True, experts.num_bytes)
    ]
    assert bars[0].options["disable"] is None
    assert bars[0].options["delay"] == 2.0


PEAK = """
import re, sys, torch
from mxk_compile.checkpoint import Checkpoint
def status(key):
    return int(re.search(key + r":\\s+(\\d+) kB", open("/proc/self/status").read())[1]) * 1024
checkpoint = Checkpoint(sys.argv[1])
checkpoint.tensor("warm")
torch.empty(2048, 2048).copy_(torch.ones(2048, 2048).t())  # starts the thread pool
open("/proc/self/clear_refs", "w").write("5")  # VmHWM starts again at the present size
before = status("VmRSS")
experts = checkpoint.experts("e")
print(status("VmHWM") - before, experts.num_bytes)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize("scheme", ["gpt_oss", "compressed_tensors", "gptq"])
def test_a_load_takes_the_packed_bytes_and_one_tensor(tmp_path: Path, scheme: str) -> None:
    experts, hidden, intermediate = 8, 2048, 2048
    linears = [
        ("gate_proj", intermediate, hidden),
        ("up_proj", intermediate, hidden),
        ("down_proj", hidden, intermediate),
    ]
    tensors: dict[str, Tensor] = {"warm": torch.zeros(1)}
    for name, rows, columns in linears if scheme != "gpt_oss" else ():
        for expert in range(experts):
            packed, scale = torch.ones(rows, columns // 8, dtype=torch.int32), torch.ones(rows, columns // 32)
            zero = torch.full((columns // 32, rows // 8), 0x77777777, dtype=torch.int32)
            if scheme == "gptq":
                parts = {"qweight": packed.t(), "scales": scale.half().t(), "qzeros": zero}
            else:
                parts = {"weight_packed": packed, "weight_scale": scale.half()}
            tensors |= {f"e.{expert}.{name}.{part}": value for part, value in parts.items()}
    for name, rows, columns in (
        (("gate_up_proj", 2 * intermediate, hidden), linears[2]) if scheme == "gpt_oss" else ()
    ):
        tensors[f"e.{name}_blocks"] = random_bytes(experts, rows, columns // 32, 16)
        tensors[f"e.{name}_scales"] = random_bytes(experts, rows, columns // 32)
        tensors[f"e.{name}_bias"] = torch.ones(experts, rows)
    config = {
        "gpt_oss": MXFP4_CONFIG,
        "compressed_tensors": compressed_config(32, True),
        "gptq": gptq_config(32, True, 1),
    }[scheme]
    path = write(tmp_path, tensors, {**config, "num_local_experts": experts})
    done = subprocess.run([sys.executable, "-c", PEAK, str(path)], capture_output=True, text=True, check=True)
    peak, packed_bytes = (int(word) for word in done.stdout.split())
    largest = max(tensor.nbytes for tensor in tensors.values()) if scheme != "gpt_oss" else 0
    slack = 10 << 20  # allocator, and the code pages of kernels that run for the first time
    assert packed_bytes > 50 << 20
    assert packed_bytes * 0.9 < peak <= packed_bytes + largest + slack
