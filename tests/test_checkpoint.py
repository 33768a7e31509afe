"""MXFP4 experts against tensors written here with safetensors' own writer, and the memory that a load takes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from mxk_compile.checkpoint import Checkpoint
from mxk_compile.errors import CheckpointError
from mxk_compile.ops.dequant import dequantize
from mxk_compile.ops.formats import mxfp4

PREFIX = "model.layers.0.mlp.experts"
EXPERTS, HIDDEN, INTERMEDIATE = 3, 128, 64


def write(directory: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps({"num_local_experts": EXPERTS, **config}))
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors"
    )
    return directory


def random_bytes(*shape: int, low: int = 0, high: int = 256) -> Tensor:
    return torch.randint(low, high, shape, dtype=torch.uint8)


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


def test_gpt_oss_experts_are_the_bytes_of_the_file(tmp_path: Path) -> None:
    tensors = gpt_oss_tensors() | {"model.norm.weight": torch.randn(HIDDEN)}
    path = write(tmp_path / "a", tensors, MXFP4_CONFIG)
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


def broken(tmp_path: Path, **changes: Tensor | None) -> Checkpoint:
    """A gpt-oss checkpoint with some of its tensors (named by their last parts) changed or left out."""
    tensors = gpt_oss_tensors()
    for name, value in changes.items():
        del tensors[f"{PREFIX}.{name}"]
        if value is not None:
            tensors[f"{PREFIX}.{name}"] = value
    return Checkpoint(write(tmp_path, tensors, MXFP4_CONFIG))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"down_proj_blocks": None}, f"missing tensor {PREFIX}.down_proj_blocks; allowed: one of"),
        ({"gate_up_proj_scales": None}, f"missing tensor {PREFIX}.gate_up_proj_scales"),
        ({"down_proj_bias": None}, f"missing tensor {PREFIX}.down_proj_bias"),
        (
            {"gate_up_proj_scales": random_bytes(EXPERTS, 128, 2)},
            "gate_up_proj_scales: shape [3, 128, 2]; allowed: [3, 128, 4]",
        ),
        (
            {"gate_up_proj_scales": torch.ones(EXPERTS, 128, 4)},
            "gate_up_proj_scales: dtype F32; allowed: uint8 or float8_e8m0fnu",
        ),
        (
            {"gate_up_proj_blocks": random_bytes(EXPERTS, 128, 64)},
            "gate_up_proj_blocks: shape [3, 128, 64]; allowed: [3, any, any, 16]",
        ),
        (
            {"down_proj_blocks": random_bytes(EXPERTS, 128, 3, 16)},
            "down_proj_blocks: shape [3, 128, 3, 16]; allowed: [3, 128, 2, 16]",
        ),
        (
            {
                "gate_up_proj_blocks": random_bytes(EXPERTS, 96, 4, 16),
                "gate_up_proj_scales": random_bytes(EXPERTS, 96, 4),
            },
            "gate_up_proj_blocks: 96 rows; allowed: a multiple of 64",
        ),
        (
            {"gate_up_proj_blocks": random_bytes(2, 128, 4, 16)},
            "gate_up_proj_blocks: shape [2, 128, 4, 16]; allowed: [3, any, any, 16]",
        ),
        (
            {"gate_up_proj_bias": torch.ones(EXPERTS, 64)},
            "gate_up_proj_bias: shape [3, 64]; allowed: [3, 128]",
        ),
    ],
)
def test_a_broken_tensor_is_named(tmp_path: Path, changes: dict[str, Any], text: str) -> None:
    with pytest.raises(CheckpointError, match=re.escape(text)) as caught:
        broken(tmp_path, **changes).experts(PREFIX)
    assert "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_an_unknown_scheme_or_layer_is_refused(tmp_path: Path) -> None:
    checkpoint = broken(tmp_path)
    with pytest.raises(
        CheckpointError, match="scheme 'nvfp4'; allowed: gpt_oss, mxfp4, compressed_tensors, gptq"
    ):
        checkpoint.experts(PREFIX, scheme="nvfp4")
    with pytest.raises(CheckpointError, match=r"missing tensor model\.layers\.7\.mlp\.experts\.gate_up_proj"):
        checkpoint.experts("model.layers.7.mlp.experts")
    with pytest.raises(CheckpointError, match="missing tensor lm_head"):
        checkpoint.tensor("lm_head")
