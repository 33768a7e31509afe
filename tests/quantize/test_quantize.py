"""`mxk quantize`: what it writes, who reads it, what an interruption leaves, and what is refused."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

import mxk_compile
from mxk_compile import cli
from mxk_compile.checkpoint import Checkpoint
from mxk_compile.errors import CheckpointError
from mxk_compile.ops.formats import int4, mxfp4
from mxk_compile.parity.cases import ROWS
from mxk_compile.parity.checkpoint import checkpoint_source
from mxk_compile.quantize import convert, layouts, shards
from mxk_compile.quantize.convert import quantize

transformers = pytest.importorskip("transformers")
import gptoss_checkpoint as gptoss  # noqa: E402  needs numpy, as transformers does

_SMALL = {
    "vocab_size": 320,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_experts_per_tok": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}


def _gpt_oss() -> Any:
    config = gptoss.published_config(**gptoss.TINY)
    del config["quantization_config"]
    return transformers.GptOssForCausalLM(transformers.GptOssConfig(**config))


def _qwen() -> Any:
    sizes = {"intermediate_size": 128, "moe_intermediate_size": 96, "num_experts": 4, "head_dim": 16}
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**_SMALL, **sizes))


def _mixtral() -> Any:
    sizes = {"intermediate_size": 96, "num_local_experts": 4}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**_SMALL, **sizes))


MODELS: dict[str, Callable[[], Any]] = {"gpt-oss": _gpt_oss, "qwen": _qwen, "mixtral": _mixtral}
PREFIXES = {
    "gpt-oss": "model.layers.{}.mlp.experts",
    "qwen": "model.layers.{}.mlp.experts",
    "mixtral": "model.layers.{}.block_sparse_moe.experts",
}
NAMES = {"qwen": ("gate_proj", "up_proj", "down_proj"), "mixtral": ("w1", "w3", "w2")}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A small bf16 checkpoint of each layout, as transformers writes it, in several shards."""
    folders = {}
    for name, make in MODELS.items():
        torch.manual_seed(3)
        folder = tmp_path_factory.mktemp(name)
        model = make().bfloat16()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(2.0)  # an initialisation is small: experts should be seen in the logits
        model.save_pretrained(folder, max_shard_size="200KB")
        (folder / "tokenizer.json").write_text('{"kept": true}')
        (folder / "pytorch_model.bin").write_text("not carried")
        folders[name] = folder
    return folders


def tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder, by the safetensors package."""
    return {
        name: value
        for path in sorted(folder.glob("*.safetensors"))
        for name, value in load_file(path).items()
    }


def weights(source: Path, name: str, layer: int, expert: int) -> tuple[Tensor, Tensor]:
    """Gates and ups in the output's order, and down, of one expert: fp32, rows are outputs."""
    state, prefix = tensors(source), PREFIXES[name].format(layer)
    if name == "gpt-oss":
        stacks = (state[f"{prefix}.{part}"][expert].float().T for part in ("gate_up_proj", "down_proj"))
        w13, w2 = stacks
        return w13, w2
    gate, up, down = (state[f"{prefix}.{expert}.{part}.weight"].float() for part in NAMES[name])
    return torch.cat((gate, up)), down


def nearest_mxfp4(weight: Tensor) -> Tensor:
    """By the specification's words, in fp64: scale 2^(floor(log2(max)) - 2), then the nearest element, ties to even."""
    blocks = weight.double().unflatten(-1, (-1, 32))
    largest = blocks.abs().amax(-1, keepdim=True)
    scale = torch.where(largest > 0, torch.exp2(torch.floor(torch.log2(largest)) - 2), 1.0)
    elements = torch.tensor(mxfp4.ELEMENTS[:8], dtype=torch.float64)
    distance = ((blocks / scale).abs().clamp(max=6)[..., None] - elements).abs()
    tie_to_even = distance + (torch.arange(8) % 2) * 1e-12
    return (elements[tie_to_even.argmin(-1)] * scale * blocks.sign()).flatten(-2)


@pytest.mark.parametrize("name", list(MODELS))
def test_mxfp4_is_what_the_specification_says_and_our_loader_reads_it(
    name: str, sources: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "out"
    assert cli.main(["quantize", str(sources[name]), str(target), "--format", "mxfp4"]) == 0
    said = capsys.readouterr().out.splitlines()
    how: dict[str, Any] = {} if name == "gpt-oss" else {"scheme": "mxfp4", "row_order": "gate_up"}
    for layer in (0, 1):
        prefix = PREFIXES[name].format(layer)
        with Checkpoint(target) as files:
            packed = files.experts(prefix, **how)
        assert packed.row_order == ("interleaved" if name == "gpt-oss" else "gate_up")
        given, kept = [], []
        for expert in range(len(packed.w2)):
            for weight, codes, scale in zip(
                weights(sources[name], name, layer, expert),
                (packed.w13[expert], packed.w2[expert]),
                (packed.w13_scale[expert], packed.w2_scale[expert]),
                strict=True,
            ):
                value = mxfp4.unpack(codes, scale, torch.float64)
                assert torch.equal(value.abs(), nearest_mxfp4(weight).abs())
                given.append(weight.double().flatten())
                kept.append(value.flatten())
        w, v = torch.cat(given), torch.cat(kept)
        rel_l2, cosine = (v - w).norm() / w.norm(), torch.cosine_similarity(v, w, dim=0)
        line = next(line for line in said if line.startswith(prefix))
        assert f"rel_l2 {rel_l2:.3e}  cosine {cosine:.6f}  " in line
        assert f" -> {packed.num_bytes:,} bytes (" in line
    assert said[-1].startswith(f"{target}: ")
    assert (target / "tokenizer.json").read_text() == '{"kept": true}'
    assert {path.suffix for path in target.iterdir()} == {".json", ".safetensors"}
    before, after = tensors(sources[name]), tensors(target)
    dense = [key for key in before if ".experts." not in key or key.endswith("_bias")]
    assert all(torch.equal(before[key], after[key]) for key in dense)
    index = json.loads((target / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(after)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in after.values())


@pytest.mark.parametrize("name", ["qwen", "mixtral"])
def test_int4_is_compressed_tensors_and_our_loader_reads_it(
    name: str, sources: dict[str, Path], tmp_path: Path
) -> None:
    target = tmp_path / "out"
    quantize(sources[name], target, "int4-g32")
    config = json.loads((target / "config.json").read_text())["quantization_config"]
    assert (config["quant_method"], config["format"]) == ("compressed-tensors", "pack-quantized")
    assert config["config_groups"]["group_0"]["weights"]["group_size"] == 32
    assert "lm_head" in config["ignore"]
    assert not any("experts" in module for module in config["ignore"])
    state, prefix = tensors(target), PREFIXES[name].format(1)
    with Checkpoint(target) as files:
        packed = files.experts(prefix)
    for expert in range(4):
        for part, rows in (("w13", packed.w13), ("w2", packed.w2)):
            scale = getattr(packed, f"{part}_scale")[expert]
            weight = weights(sources[name], name, 1, expert)[part == "w2"]
            groups = weight.unflatten(-1, (-1, 32))
            assert torch.equal(scale, (groups.abs().amax(-1) / 7).bfloat16())
            exact = (groups / scale.float()[..., None]).round().clamp(-8, 7) * scale.float()[..., None]
            assert torch.equal(int4.unpack(rows[expert], scale), exact.flatten(-2))
        gate = f"{prefix}.{expert}.{NAMES[name][0]}.weight"
        assert state[f"{gate}_shape"].tolist() == [96, 64]
        assert (state[f"{gate}_packed"].dtype, state[f"{gate}_packed"].shape) == (torch.int32, (96, 8))


def test_the_model_of_the_output_is_the_model_of_its_values(sources: dict[str, Path], tmp_path: Path) -> None:
    """gpt-oss: through mxk_compile.load, against transformers on the same values; and near the bf16 model."""
    target = tmp_path / "out"
    quantize(sources["gpt-oss"], target, "mxfp4")
    ids = torch.arange(2, 40)[None]
    original = transformers.GptOssForCausalLM.from_pretrained(sources["gpt-oss"], dtype=torch.float32).eval()
    plain = transformers.GptOssForCausalLM.from_pretrained(sources["gpt-oss"], dtype=torch.float32).eval()
    for layer in (0, 1):
        experts = plain.model.layers[layer].mlp.experts
        for part in (experts.gate_up_proj, experts.down_proj):
            with torch.no_grad():
                part.copy_(nearest_mxfp4(part.transpose(1, 2)).transpose(1, 2).float())
    with torch.no_grad():
        expected, far = plain(input_ids=ids).logits, original(input_ids=ids).logits
        found = mxk_compile.load(target, dtype=torch.float32)(input_ids=ids).logits
    error = float((found - expected).norm() / expected.norm())
    assert error < 2e-2  # bf16 activations into the experts
    assert error < 0.3 * float((found - far).norm() / far.norm())


def test_transformers_reads_gpt_oss_by_itself(sources: dict[str, Path], tmp_path: Path) -> None:
    """On a CPU it unpacks MXFP4 to bf16: values that ours must be, bit for bit."""
    target = tmp_path / "out"
    quantize(sources["gpt-oss"], target, "mxfp4")
    configuration = transformers.Mxfp4Config(dequantize=True)
    model = transformers.GptOssForCausalLM.from_pretrained(
        target, dtype=torch.bfloat16, quantization_config=configuration
    )
    with Checkpoint(target) as files:
        packed = files.experts("model.layers.1.mlp.experts")
    experts = model.model.layers[1].mlp.experts
    for stack, codes, scale in (
        (experts.gate_up_proj, packed.w13, packed.w13_scale),
        (experts.down_proj, packed.w2, packed.w2_scale),
    ):
        assert torch.equal(stack.detach().transpose(1, 2), mxfp4.unpack(codes, scale))


def test_the_files_are_aligned_and_other_readers_take_them(sources: dict[str, Path], tmp_path: Path) -> None:
    target = tmp_path / "out"
    target.mkdir()  # an empty folder is as good as none
    quantize(sources["qwen"], target, "int4-g32")
    for path in target.glob("*.safetensors"):
        assert int.from_bytes(path.read_bytes()[:8], "little") % 8 == 0
        with safe_open(path, "pt") as file:
            assert file.metadata() == {"format": "pt"}


def test_weights_are_rounded_in_parts_that_do_not_show(
    sources: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, folder, weight_format in (("gpt-oss", "a", "mxfp4"), ("mixtral", "b", "int4-g32")):
        quantize(sources[name], tmp_path / folder, weight_format)
        with monkeypatch.context() as patched:
            patched.setattr(convert, "_CHUNK", 64 * 7 + 1)  # seven rows at a time
            patched.setattr(convert, "_DENSE_BYTES", 20_000)
            quantize(sources[name], tmp_path / f"{folder}2", weight_format)
        one, other = tensors(tmp_path / folder), tensors(tmp_path / f"{folder}2")
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key], other[key]) for key in one)


def test_a_killed_run_leaves_nothing_that_loads_and_goes_on(
    sources: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target, partial = tmp_path / "out", tmp_path / "out.partial"
    program = (
        "import sys, time, pathlib\n"
        "from mxk_compile.quantize import convert\n"
        "keep = convert._round\n"
        "def slow(files, piece, *more):\n"
        "    if 'layers.1' in piece.source and piece.expert == 3: time.sleep(600)\n"
        "    return keep(files, piece, *more)\n"
        "convert._round = slow\n"
        "convert.quantize(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), 'mxfp4')\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program, str(sources["gpt-oss"]), str(target)])
    deadline = time.monotonic() + 200
    while not list(partial.glob("model-00003*.new")) and time.monotonic() < deadline:
        time.sleep(0.05)
    with pytest.raises(
        CheckpointError, match=r"out.partial: another run is at work on it; allowed: one run; "
    ):
        quantize(sources["gpt-oss"], target, "mxfp4")
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not target.exists()
    for broken in (target, partial):
        with pytest.raises(CheckpointError):
            Checkpoint(broken)
    with pytest.raises(CheckpointError, match="unfinished output of another source, format or version"):
        quantize(sources["mixtral"], target, "mxfp4")
    written = {path.name: path.stat().st_mtime_ns for path in partial.glob("*.part")}
    assert len(written) == 2
    capsys.readouterr()
    quantize(sources["gpt-oss"], target, "mxfp4")
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "goes on: 2 of 3 shards are there"
    assert sum("rel_l2" in line for line in said) == 2  # of the layer that was done before, too
    for name, stamp in written.items():
        assert (target / name.removesuffix(".part")).stat().st_mtime_ns == stamp
    assert not partial.exists()
    quantize(sources["gpt-oss"], tmp_path / "whole", "mxfp4")
    one, other = tensors(target), tensors(tmp_path / "whole")
    assert all(torch.equal(one[key], other[key]) for key in other)


def test_a_run_that_ends_in_its_last_step_goes_on(
    sources: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "out"
    rename = Path.rename
    seen: list[str] = []

    def interrupted(path: Path, to: Path) -> Path:
        seen.append(path.name)
        if len(seen) == 2:
            raise KeyboardInterrupt
        return rename(path, to)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", interrupted)
        with pytest.raises(KeyboardInterrupt):
            quantize(sources["qwen"], target, "mxfp4")
    with pytest.raises(CheckpointError):
        Checkpoint(tmp_path / "out.partial")
    quantize(sources["qwen"], target, "mxfp4")
    assert {path.suffix for path in target.iterdir()} == {".json", ".safetensors"}


def test_a_damaged_journal_or_shard_is_not_gone_on_with(sources: dict[str, Path], tmp_path: Path) -> None:
    work = tmp_path / "out.partial"
    work.mkdir()
    (work / shards.JOURNAL).write_text("{half")
    with pytest.raises(CheckpointError, match="delete that folder, or name another"):
        quantize(sources["qwen"], tmp_path / "out", "mxfp4")
    shutil.rmtree(work)
    work.symlink_to(tmp_path)
    with pytest.raises(
        CheckpointError, match="out.partial: no folder; allowed: a name that is free; remove it"
    ):
        quantize(sources["qwen"], tmp_path / "out", "mxfp4")


def test_a_full_disk_is_one_line_and_the_run_goes_on(
    sources: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = ["quantize", str(sources["qwen"]), str(tmp_path / "out"), "--format", "mxfp4"]
    usage = shutil.disk_usage(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(shards.shutil, "disk_usage", lambda path: usage._replace(free=1000))
        assert cli.main(command) == 2
    error = capsys.readouterr().err
    assert (
        "out.partial: 1,000 bytes free; allowed: 211,200 bytes for the output; make room and start it"
        in error
    )
    assert error.count("\n") == 1
    count, pwrite = [0], os.pwrite

    def full(*arguments: Any) -> int:
        count[0] += 1
        if count[0] > 30:
            raise OSError(28, "No space left on device")
        return pwrite(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", full)
        assert cli.main(command) == 2
    error = capsys.readouterr().err
    assert (
        "No space left on device; allowed: a disk that takes it; make room and start it again: it goes on"
        in error
    )
    assert error.count("\n") == 1
    assert not list((tmp_path / "out.partial").glob("*.new"))
    assert not (tmp_path / "out").exists()
    assert cli.main(command) == 0
    assert "goes on: 1 of 3 shards are there" in capsys.readouterr().out


def test_a_shard_that_lost_its_end_is_written_again(
    sources: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As after a power cut, where the file system kept the names and not the data."""

    def interrupted(*arguments: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(shards.Workplace, "publish", interrupted)
        with pytest.raises(KeyboardInterrupt):
            quantize(sources["qwen"], tmp_path / "out", "mxfp4")
    first, *others = sorted((tmp_path / "out.partial").glob("*.part"))
    first.write_bytes(first.read_bytes()[:-1])
    quantize(sources["qwen"], tmp_path / "out", "mxfp4")
    assert f"goes on: {len(others)} of 3 shards are there" in capsys.readouterr().out
    quantize(sources["qwen"], tmp_path / "whole", "mxfp4")
    one, other = tensors(tmp_path / "out"), tensors(tmp_path / "whole")
    assert all(torch.equal(one[key], other[key]) for key in other)


def _edit(folder: Path, name: str, change: Callable[[Tensor], Tensor] | None) -> None:
    """Changes one tensor of a one-file checkpoint, or takes it out."""
    state = load_file(folder / "model.safetensors")
    value = state.pop(name)
    if change is not None:
        state[name] = change(value).contiguous()
    save_file(state, folder / "model.safetensors")


def _add(folder: Path, name: str) -> None:
    """One more tensor."""
    state = load_file(folder / "model.safetensors")
    save_file(state | {name: torch.zeros(96)}, folder / "model.safetensors")


def _poison(weight: Tensor) -> Tensor:
    weight[3, 5] = float("inf")
    return weight


EXPERT = "model.layers.0.mlp.experts.2.up_proj.weight"


@pytest.mark.parametrize(
    ("break_it", "said"),
    [
        (
            lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:-1000]),
            "truncated",
        ),
        (lambda f: (f / "config.json").unlink(), "no config.json; allowed: a checkpoint directory"),
        (lambda f: shutil.rmtree(f), "no such directory; allowed: a checkpoint directory"),
        (
            lambda f: (f / "config.json").write_text('{"quantization_config": {"quant_method": "awq"}}'),
            "a quantised checkpoint (awq); allowed: bf16 or fp16 weights; give the original checkpoint",
        ),
        (lambda f: _edit(f, EXPERT, None), f"missing tensor {EXPERT}"),
        (lambda f: _edit(f, EXPERT, lambda w: w[:64]), f"{EXPERT}: shape [64, 64]; allowed: [96, 64]"),
        (lambda f: _edit(f, EXPERT, lambda w: w.to(torch.int8)), f"{EXPERT}: dtype I8; allowed: bfloat16 or"),
        (lambda f: _edit(f, EXPERT, _poison), f"{EXPERT}: a weight with inf or NaN; allowed: finite values"),
        *[
            (
                lambda f, name=name: _add(f, f"model.layers.0.mlp.experts.{name}"),
                f"model.layers.0.mlp.experts.{name}: a tensor of experts that is not known",
            )
            for name in ("0.up_proj.bias", "gate_up_proj_scale", f"{'9' * 5000}.gate_proj.weight")
        ],
        (
            lambda f: (f / "config.json").write_text('{"num_experts": 3}'),
            "config.json: 3 experts; allowed: 4, as model.layers.0.mlp.experts has",
        ),
        (
            lambda f: save_file(
                {"model.layers.0.mlp.up_proj.weight": torch.ones(32, 32)}, f / "model.safetensors"
            ),
            "no experts that are known; allowed: experts of gpt-oss, Qwen3-MoE or Mixtral",
        ),
    ],
    ids=[
        "truncated",
        "no-config",
        "nothing",
        "quantised",
        "missing",
        "shape",
        "dtype",
        "inf",
        "bias",
        "clash",
        "digits",
        "count",
        "dense",
    ],
)
def test_a_source_that_is_not_as_it_must_be_is_one_line(
    break_it: Callable[[Path], Any],
    said: str,
    sources: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    shutil.copyfile(sources["qwen"] / "config.json", source / "config.json")
    save_file(tensors(sources["qwen"]), source / "model.safetensors")
    break_it(source)
    assert cli.main(["quantize", str(source), str(tmp_path / "out"), "--format", "mxfp4"]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_targets_that_are_refused(
    sources: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    (tmp_path / "mount").mkdir()
    monkeypatch.setattr(Path, "is_mount", lambda path: path.name == "mount")
    (tmp_path / "journal.partial").mkdir()
    (tmp_path / "journal.partial/journal.json").write_text('{"identity": {}, "done": {"a": 1}}')
    (tmp_path / "journal.partial/lock").touch()
    for name, said in (
        ("full", "it exists; allowed: a folder that is not there yet; name another"),
        ("link", "a symbolic link; allowed: a folder that is not there yet; name the folder itself"),
        ("none/out", "none: no folder; allowed: a folder that exists; create it"),
        (str(sources["qwen"]), "it exists"),
        ("/", "/: it exists"),
        ("mount", "mount: it exists"),
        ("x" * 255, "File name too long; allowed: files that can be written; name another folder"),
        ("journal", "the unfinished output of another source, format or version"),
    ):
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(CheckpointError, match=said):
            quantize(sources["qwen"], tmp_path / name, "mxfp4")
        assert sorted(tmp_path.rglob("*")) == before
    with pytest.raises(
        CheckpointError, match="int4-g32; allowed: mxfp4 for gpt-oss, whose INT4 form nothing reads"
    ):
        quantize(sources["gpt-oss"], tmp_path / "out", "int4-g32")


def test_a_folder_that_cannot_be_written_is_one_line(
    sources: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(*arguments: Any, **more: Any) -> None:
        raise PermissionError(13, "Permission denied", str(tmp_path / "out.partial"))

    monkeypatch.setattr(Path, "mkdir", denied)
    with pytest.raises(
        CheckpointError, match="out.partial: Permission denied; allowed: files that can be written; "
    ):
        quantize(sources["qwen"], tmp_path / "out", "mxfp4")


def test_linked_source_files_are_read(sources: dict[str, Path], tmp_path: Path) -> None:
    source = tmp_path / "hub"
    source.mkdir()
    for path in sources["mixtral"].iterdir():
        (source / path.name).symlink_to(path)
    quantize(source, tmp_path / "out", "mxfp4")
    assert not any(path.is_symlink() for path in (tmp_path / "out").iterdir())


def test_names_in_a_checkpoint_do_not_steer_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prefix, source = "model.\x1b[31m\r.layers.0.mlp.experts", tmp_path / "in"
    source.mkdir()
    parts = ("gate_proj", "up_proj", "down_proj")
    state = {f"{prefix}.0.{part}.weight": torch.randn(32, 32).bfloat16() for part in parts}
    save_file(state, source / "model.safetensors")
    (source / "config.json").write_text('{"model_type": "qwen3_moe"}')
    assert cli.main(["quantize", str(source), str(tmp_path / "out"), "--format", "mxfp4"]) == 0
    checkpoint_source(tmp_path / "out", ROWS["glm"])
    said = capsys.readouterr().out
    assert said.count(r"model.\x1b[31m\r.layers.0.mlp.experts") == 2
    assert said.replace("\n", "").isprintable()


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_memory_is_bounded_by_one_matrix(tmp_path: Path) -> None:
    """32 experts of 2 MB a matrix: the peak over the start is far below the 200 MB that are read."""
    experts, size = 32, 1024
    weight = (torch.randn(size, size) * 0.02).bfloat16()
    prefix = "model.layers.0.mlp.experts"
    state = {
        f"{prefix}.{expert}.{part}.weight": weight.clone()
        for expert in range(experts)
        for part in ("gate_proj", "up_proj", "down_proj")
    }
    save_file(state, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_moe"}')
    program = (
        "import pathlib, re, sys, torch\n"
        "from mxk_compile.quantize import convert\n"
        "convert._CHUNK = 1 << 18\n"
        # Not ru_maxrss: that begins with the peak of the process that started this one.
        "peak = lambda: int(re.search(r'VmHWM:\\s+(\\d+) kB', open('/proc/self/status').read())[1])\n"
        "before = peak()\n"
        "convert.quantize(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[1]) / 'out', 'mxfp4')\n"
        "print(peak() - before)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert int(done.stdout.splitlines()[-1]) < 64 * 1024  # KiB; 192 MiB of weights were read


def test_many_small_tensors_are_planned_at_once(tmp_path: Path) -> None:
    outputs = [layouts.Output(f"{number}", torch.uint8, (1,)) for number in range(100_000)]
    outputs += [layouts.Output("large", torch.uint8, (3 << 30,)), layouts.Output("last", torch.uint8, (1,))]
    plans = convert._plan([], outputs)  # sums over all that came before would take minutes
    assert [len(plan.outputs) for plan in plans] == [100_000, 1, 1]
