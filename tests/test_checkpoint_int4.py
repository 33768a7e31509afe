"""INT4 experts against words written here nibble by nibble."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from mxk_compile.checkpoint import Checkpoint, PackedExperts
from mxk_compile.errors import CheckpointError
from mxk_compile.ops.dequant import dequantize

PREFIX = "model.layers.0.mlp.experts"
EXPERTS, HIDDEN, INTERMEDIATE = 3, 128, 64


def write(directory: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps({"num_local_experts": EXPERTS, **config}))
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors"
    )
    return directory


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

    def awq(self, name: str) -> dict[str, Tensor]:
        """AutoAWQ's "gemm": words of eight outputs, whose nibbles are outputs 0, 2, 4, 6, 1, 3, 5, 7."""

        def awq_words(values: Tensor) -> Tensor:
            order = values.unflatten(1, (-1, 8))[:, :, [0, 2, 4, 6, 1, 3, 5, 7]]
            return words(order.flatten(1), 1)

        return {
            f"{name}.qweight": awq_words(self.codes.t()),
            f"{name}.qzeros": awq_words(self.zero.t()),
            f"{name}.scales": self.scale.t(),
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


def group_config(group: Any) -> dict[str, Any]:
    method = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    return {"quantization_config": {**method, "config_groups": {"g": group}}}


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


def awq_config(group: int, symmetric: bool, **changes: Any) -> dict[str, Any]:
    config = {"bits": 4, "group_size": group or -1, "zero_point": not symmetric, "version": "gemm"}
    return {"quantization_config": {"quant_method": "awq", **config, **changes}}


def compressed(directory: Path, group: int = 32, symmetric: bool = True) -> tuple[dict[str, Linear], Path]:
    linears = layer(group, symmetric)
    tensors = {k: v for name, one in linears.items() for k, v in one.compressed(name, symmetric).items()}
    return linears, write(directory, tensors, compressed_config(group, symmetric))


def gptq_tensors(linears: dict[str, Linear], version: int) -> dict[str, Tensor]:
    return {k: v for name, one in linears.items() for k, v in one.gptq(name, version).items()}


def check_values(experts: PackedExperts, linears: dict[str, Linear], pack_dim: str = "input") -> None:
    assert (experts.weight_format, experts.row_order, experts.pack_dim) == ("uint4", "gate_up", pack_dim)
    form = {"weight_format": "uint4", "pack_dim": pack_dim}
    w13 = dequantize(experts.w13, experts.w13_scale, experts.w13_zero, **form)
    w2 = dequantize(experts.w2, experts.w2_scale, experts.w2_zero, **form)
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


def awq_tensors(linears: dict[str, Linear]) -> dict[str, Tensor]:
    return {k: v for name, one in linears.items() for k, v in one.awq(name).items()}


@pytest.mark.parametrize("group", [32, 64, 0])
@pytest.mark.parametrize("symmetric", [True, False])
def test_awq(tmp_path: Path, group: int, symmetric: bool) -> None:
    linears = layer(group, symmetric)
    path = write(tmp_path, awq_tensors(linears), awq_config(group, symmetric))
    experts = Checkpoint(path).experts(PREFIX)
    assert (experts.w13_zero is None) == symmetric
    check_values(experts, linears)


def test_awq_under_the_names_of_its_own_files_and_without_zero_points(tmp_path: Path) -> None:
    linears = layer(32, True)
    tensors = {name: value for name, value in awq_tensors(linears).items() if not name.endswith("qzeros")}
    own = {"quant_method": "awq", "w_bit": 4, "q_group_size": 32, "zero_point": False, "version": "GEMM"}
    check_values(Checkpoint(write(tmp_path, tensors, {"quantization_config": own})).experts(PREFIX), linears)


def test_awq_zero_points_that_contradict_the_metadata_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path, awq_tensors(layer(32, False)), awq_config(32, True))
    with pytest.raises(
        CheckpointError, match=r"0\.gate_proj\.qzeros: zero points 0 to 15; allowed: 8 in a symm"
    ):
        Checkpoint(path).experts(PREFIX)


@pytest.mark.parametrize("form", ["output", "transposed", "input"])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group", [32, 0])
def test_stacks_of_servers(tmp_path: Path, form: str, symmetric: bool, group: int) -> None:
    linears, tensors = layer(group, symmetric), {}
    for key, names in (("w13", ("gate_proj", "up_proj")), ("w2", ("down_proj",))):
        experts = [[linears[f"{PREFIX}.{e}.{name}"] for name in names] for e in range(EXPERTS)]
        codes, scale, zero = (
            torch.stack([torch.cat([getattr(linear, part) for linear in expert]) for expert in experts])
            for part in ("codes", "scale", "zero")
        )
        name = f"{PREFIX}.{key}_weight"
        packed_zero = words(zero, 1)
        packed = words(codes, 2)
        if form != "input":
            packed = words(codes.transpose(1, 2), 2) if form == "output" else packed.transpose(1, 2)
            scale, packed_zero = scale.transpose(1, 2), packed_zero.transpose(1, 2)
        tensors |= {f"{name}_packed": packed, f"{name}_scale": scale}
        if not symmetric:
            tensors[f"{name}_zero_point"] = packed_zero
    path = write(tmp_path, tensors, compressed_config(group, symmetric))
    experts = Checkpoint(path).experts(PREFIX)
    assert experts.pack_dim == ("output" if form == "output" else "input")
    check_values(experts, linears, experts.pack_dim)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"w13_weight_scale": torch.ones(3, 8, 128)},
            "w13_weight_packed: shape [3, 128, 16] with scale [3, 8, 128]",
        ),
        ({"w2_weight_packed": None}, "missing tensor model.layers.0.mlp.experts.w2_weight_packed"),
        (
            {"w13_weight_zero_point": torch.ones(3, 4, 16).int()},
            "w13_weight_zero_point: zero points in a symmetric checkpoint; allowed: none with symmetric=true",
        ),
        (
            {"w2_weight_packed": torch.ones(3, 8, 128).int()},
            "w2_weight_packed: packed along the inputs, w13 along the outputs; allowed: one dimension for both",
        ),
        (
            {"w2_weight_packed": torch.ones(3, 128, 16).int(), "w2_weight_scale": torch.ones(3, 4, 128)},
            "w2_weight_packed: E, N, K = [3, 128, 128] beside [3, 128, 128] of w13; allowed: [3, 128, 64]",
        ),
        (
            {"w13_weight_g_idx": torch.zeros(3, 128).int()},
            "w13_weight_g_idx: a tensor that is not known; allowed: w13_ and w2_ with weight_packed",
        ),
        ({"w2_bias": torch.ones(3, 64)}, "w2_bias: shape [3, 64]; allowed: [3, 128]"),
    ],
)
def test_broken_stacks(tmp_path: Path, changes: dict[str, Tensor | None], text: str) -> None:
    tensors: dict[str, Tensor | None] = {
        "w13_weight_packed": torch.ones(3, 128, 16).int(),
        "w13_weight_scale": torch.ones(3, 4, 128),
        "w2_weight_packed": torch.ones(3, 64, 16).int(),
        "w2_weight_scale": torch.ones(3, 2, 128),
    }
    named = {f"{PREFIX}.{name}": t for name, t in (tensors | changes).items() if t is not None}
    checkpoint = Checkpoint(write(tmp_path, named, compressed_config(32, True)))
    with pytest.raises(CheckpointError, match=re.escape(text)):
        checkpoint.experts(PREFIX)


def test_biases_of_stacks_are_read(tmp_path: Path) -> None:
    tensors = {
        "w13_weight_packed": torch.ones(3, 128, 16).int(),
        "w13_weight_scale": torch.ones(3, 4, 128),
        "w13_weight_g_idx": torch.zeros(3, 0).int(),
        "w13_bias": torch.rand(3, 128),
        "w2_weight_packed": torch.ones(3, 64, 16).int(),
        "w2_weight_scale": torch.ones(3, 2, 128),
        "w2_bias": torch.rand(3, 128),
    }
    named = {f"{PREFIX}.{name}": tensor for name, tensor in tensors.items()}
    experts = Checkpoint(write(tmp_path, named, compressed_config(32, True))).experts(PREFIX)
    assert torch.equal(experts.w13_bias, tensors["w13_bias"])
    assert torch.equal(experts.w2_bias, tensors["w2_bias"])


def test_stacks_in_groups_that_no_kernel_reads(tmp_path: Path) -> None:
    tensors = {
        f"{PREFIX}.w13_weight_packed": torch.ones(3, 128, 16).int(),
        f"{PREFIX}.w13_weight_scale": torch.ones(3, 8, 128),
    }
    path = write(tmp_path, tensors, compressed_config(16, True))
    with pytest.raises(CheckpointError, match="g as declared: 32, 64, 128, K"):
        Checkpoint(path).experts(PREFIX)


def test_gptq_with_activation_order_is_refused(tmp_path: Path) -> None:
    tensors = gptq_tensors(layer(32, True), 1)
    name = f"{PREFIX}.1.up_proj.g_idx"
    tensors[name] = tensors[name].flip(0)
    path = write(tmp_path, tensors, gptq_config(32, True, 1, desc_act=True))
    with pytest.raises(CheckpointError, match=r"1\.up_proj\.g_idx: inputs in another order; .*desc_act"):
        Checkpoint(path).experts(PREFIX)


def broken(tmp_path: Path, kind: str, **changes: Tensor | None) -> Checkpoint:
    """A checkpoint of one kind with some of its tensors (named by their last parts) changed or left out."""
    if kind == "compressed":
        linears = layer(32, True)
        tensors = {k: v for name, one in linears.items() for k, v in one.compressed(name, True).items()}
        config = compressed_config(32, True)
    else:
        tensors, config = gptq_tensors(layer(32, True), 1), gptq_config(32, True, 1)
    for name, value in changes.items():
        tensors.pop(f"{PREFIX}.{name}", None)
        if value is not None:
            tensors[f"{PREFIX}.{name}"] = value
    return Checkpoint(write(tmp_path, tensors, config))


def scales(groups: int) -> Tensor:
    return torch.ones(INTERMEDIATE, groups, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("kind", "changes", "text"),
    [
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
            {"0.gate_proj.weight_packed": torch.zeros(64, 64, dtype=torch.uint8)},
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
        (
            {},
            "config.json: quantization_config of model.layers.0.mlp.experts: quant_method None; "
            "allowed: mxfp4, mxfp4_stacked, compressed-tensors, gptq, awq; pass scheme=",
        ),
        ({"quantization_config": {"quant_method": "bitnet"}}, "quant_method 'bitnet'; allowed: mxfp4"),
        (awq_config(32, False, version="gemv"), "AWQ version 'gemv'; allowed: 'gemm'"),
        (awq_config(32, False, bits=8), "8 bits; allowed: 4 bits"),
        (compressed_config(32, True, num_bits=8), "8 bits; allowed: 4 bits"),
        (compressed_config(32, True, type="float"), "type 'float', strategy 'group'; allowed: type 'int'"),
        (compressed_config(32, True, strategy="tensor"), "strategy 'tensor'; allowed: type 'int', strategy"),
        (
            {"quantization_config": {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}},
            "format 'nvfp4-pack-quantized'; allowed: 'pack-quantized'",
        ),
        (
            group_config({"targets": ["re:.*attn.*"]}),
            "0 config_groups for " + PREFIX + ".0.gate_proj; allowed: one",
        ),
        (gptq_config(32, True, 1, checkpoint_format="marlin"), "'marlin'; allowed: gptq, gptq_v2"),
        (gptq_config(32, True, 1, bits=8), "8 bits; allowed: 4 bits"),
        (compressed_config(32, True, num_bits="4"), "'4' bits; allowed: 4 bits"),
        (gptq_config(32, True, 1, checkpoint_format=["x"]), "checkpoint_format ['x']; allowed: gptq"),
        ({"quantization_config": {"quant_method": ["x"]}}, "quant_method ['x']; allowed: mxfp4"),
        (group_config("x"), "config group g 'x'; allowed: a JSON object"),
        (group_config(None), "config group g None; allowed: a JSON object"),
        (group_config({"targets": ["Linear"], "weights": "x"}), "weights 'x'; allowed: a JSON object"),
        (group_config({"targets": "Linear"}), "targets 'Linear'; allowed: a list of strings"),
        (group_config({"targets": 5}), "targets 5; allowed: a list of strings"),
        (group_config({"targets": [5]}), "targets [5]; allowed: a list of strings"),
        (group_config({"targets": ["re:("]}), "targets ['re:('] (missing ), unterminated subpattern"),
        (group_config({"targets": ["re:a{99999999999}"]}), "allowed: regular expressions"),
    ],
)
def test_unknown_metadata_is_refused(tmp_path: Path, config: dict[str, Any], text: str) -> None:
    _, path = compressed(tmp_path)
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=re.escape(text)) as caught:
        Checkpoint(path).experts(PREFIX)
    assert "config.json: quantization_config" in str(caught.value)


@pytest.mark.parametrize(
    ("config", "text"),
    [
        *(
            ({"num_local_experts": given}, f"num_local_experts {given!r}; ")
            for given in (0, -1, True, "3", [3])
        ),
        ({"num_local_experts": 10**12}, f"missing tensor {PREFIX}.3.gate_proj.weight_packed"),
        ({"quantization_config": "x"}, "quantization_config 'x'; allowed: a JSON object"),
    ],
)
def test_a_number_of_experts_is_bounded_by_the_file(
    tmp_path: Path, config: dict[str, Any], text: str
) -> None:
    _, path = compressed(tmp_path)
    values = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(values | config))
    with pytest.raises(CheckpointError, match=re.escape(text)):
        Checkpoint(path).experts(PREFIX)


def test_a_number_in_a_name_is_no_number_of_experts(tmp_path: Path) -> None:
    for number in ("999999999", "9" * 5000):
        checkpoint = broken(tmp_path, "compressed", **{f"{number}.x": torch.ones(1)})
        with pytest.raises(CheckpointError, match=rf"expert {number}; allowed: 3 experts"):
            checkpoint.experts(PREFIX)
        del checkpoint.config["num_local_experts"]
        with pytest.raises(CheckpointError, match=r"missing tensor .*\.3\.gate_proj"):
            checkpoint.experts(PREFIX)


def test_options_of_other_schemes_are_refused(tmp_path: Path) -> None:
    checkpoint = Checkpoint(compressed(tmp_path)[1])
    with pytest.raises(CheckpointError, match="gptq_format='gptq'; allowed: gptq, gptq_v2 for scheme 'gptq'"):
        checkpoint.experts(PREFIX, gptq_format="gptq")
    with pytest.raises(
        CheckpointError, match="scale_bias=125 for scheme 'compressed_tensors'; allowed: MXFP4"
    ):
        checkpoint.experts(PREFIX, scale_bias=125)
    for bias in (10**9, -1, 255, True):
        with pytest.raises(CheckpointError, match=f"scale_bias={bias}; allowed: 0 to 254"):
            checkpoint.experts(PREFIX, scale_bias=bias)
    with pytest.raises(CheckpointError, match=r"missing tensor model\.layers\.7\.mlp\.experts\.0\.gate_proj"):
        checkpoint.experts("model.layers.7.mlp.experts")
