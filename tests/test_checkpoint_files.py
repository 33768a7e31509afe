"""One file or shards with an index: what is read, and what is refused when it is opened."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from mxk_compile import checkpoint_files
from mxk_compile.checkpoint import Checkpoint
from mxk_compile.checkpoint_files import TensorFiles
from mxk_compile.errors import CheckpointError

SHARD = "model-{:05d}-of-{:05d}.safetensors"
INDEX = "model.safetensors.index.json"
U8 = {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}
TENSORS = {f"layer.{i}": torch.arange(10 + i, dtype=torch.float32) for i in range(7)}


def shards(directory: Path) -> Path:
    """Seven tensors in three files with an index."""
    directory.mkdir(parents=True, exist_ok=True)
    weight_map = {}
    for shard in range(3):
        names = list(TENSORS)[shard::3]
        file = SHARD.format(shard + 1, 3)
        save_file({name: TENSORS[name] for name in names}, directory / file)
        weight_map |= dict.fromkeys(names, file)
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return directory


def test_shards_are_one_set_of_tensors(tmp_path: Path) -> None:
    for path in (shards(tmp_path), tmp_path / INDEX):
        files = TensorFiles(path)
        assert set(files.names()) == set(TENSORS)
        assert "layer.3" in files
        assert "layer.7" not in files
        assert all(torch.equal(files.tensor(name), tensor) for name, tensor in TENSORS.items())
    assert files.config == {}


def edit_index(path: Path, edit: Any) -> None:
    index = json.loads((path / INDEX).read_text())
    edit(index["weight_map"])
    (path / INDEX).write_text(json.dumps(index))


def refused(path: Path, text: str) -> None:
    with pytest.raises(CheckpointError, match=re.escape(text)) as caught:
        TensorFiles(path)
    assert "\n" not in str(caught.value)


def test_an_absent_shard_is_named(tmp_path: Path) -> None:
    path = shards(tmp_path)
    (path / SHARD.format(2, 3)).unlink()
    refused(path, f"{path / INDEX}: shard model-00002-of-00003.safetensors is absent (needed for layer.1)")


def test_a_truncated_shard_is_named(tmp_path: Path) -> None:
    path = shards(tmp_path)
    shard = path / SHARD.format(1, 3)
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1])
    refused(path, f"truncated, {len(whole) - 1} bytes; allowed: at least {len(whole)} bytes")
    shard.write_bytes(whole[:100])
    refused(path, f"{shard}: 100 bytes, header of ")
    shard.write_bytes(whole[:3])
    refused(path, f"{shard}: 3 bytes, header of ")


def test_a_shard_that_shrinks_after_it_was_opened_is_refused(tmp_path: Path) -> None:
    path = shards(tmp_path)
    checkpoint = TensorFiles(path)
    shard = path / SHARD.format(2, 3)
    shard.write_bytes(shard.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match=r"model-00002-of-00003\.safetensors: .* bytes; allowed: "):
        [checkpoint.tensor(name) for name in TENSORS]


def test_an_index_that_names_the_wrong_file_is_refused(tmp_path: Path) -> None:
    path = shards(tmp_path)
    name = "layer.2"
    edit_index(path, lambda weight_map: weight_map.update({name: SHARD.format(1, 3)}))
    refused(path, f"{path / INDEX}: no tensor {name} in model-00001-of-00003.safetensors")


@pytest.mark.parametrize(
    "shard",
    ["../other.safetensors", "/elsewhere.safetensors", "a/b.safetensors", "..", "a\\b.safetensors", 3],
)
def test_a_shard_name_cannot_leave_the_directory(tmp_path: Path, shard: Any) -> None:
    path = shards(tmp_path / "model")
    save_file({"x": torch.ones(1)}, tmp_path / "other.safetensors")
    edit_index(path, lambda weight_map: weight_map.update({"x": shard}))
    refused(path, f"file {shard!r} for x; allowed: the plain name of a .safetensors file")


def test_what_the_system_refuses_is_one_line(tmp_path: Path) -> None:
    path = shards(tmp_path)
    for edit in ("a" * 5000 + ".safetensors", "a\0.safetensors", "\ud800.safetensors"):
        edit_index(path, lambda weight_map, edit=edit: weight_map.update({"x": edit}))
        refused(path, ": ")
    refused(tmp_path / ("a" * 5000), "File name too long; allowed: a file that can be read")
    refused(Path("a\0b"), "no such file")


def test_duplicate_names_are_refused(tmp_path: Path) -> None:
    path = shards(tmp_path)
    name = "layer.0"
    save_file({name: TENSORS[name], **dict(list(TENSORS.items())[1::3])}, path / SHARD.format(2, 3))
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
        ('{"x": ' + "9" * 5000 + "}", "text that is not JSON"),
        ("[" * 100_000, "text that is not JSON"),
        ("\0\x80", "text that is not JSON"),
        ("[]", "JSON list; allowed: a JSON object"),
        ("{}", "no weight_map"),
        ('{"weight_map": {}}', "no weight_map"),
    ],
)
def test_an_index_that_is_none_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = shards(tmp_path)
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
        (U8 | {"shape": [0, 2**62, 8], "data_offsets": [0, 0]}, "x: U8 [0, 4611686018427387904, 8] at"),
        ({"dtype": "F4", "shape": [4], "data_offsets": [4, 0]}, "x: F4 [4] at bytes 4 to 0"),
        *(
            (U8 | change, "x: a header entry that cannot be read; allowed: dtype, shape, data_offsets")
            for change in (
                *(
                    {"shape": shape}
                    for shape in ("4", {"4": 1}, 4, None, [4.9], [True, 4], ["4"], [math.inf])
                ),
                *({"shape": shape, "data_offsets": [0, 0]} for shape in ([0, 2**70], [0] * 65)),
                *(
                    {"data_offsets": offsets}
                    for offsets in ([0, math.inf], [0, 4, 8], [2**64, 2**64 + 4], "04")
                ),
                {"dtype": ["U8"]},
            )
        ),
    ],
)
def test_a_header_that_lies_is_refused(tmp_path: Path, header: dict[str, Any], message: str) -> None:
    text = json.dumps(header if "x" in header else {"x": header}).encode()
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
    assert TensorFiles(tmp_path).tensor("x").tolist() == [1, 1]
    assert TensorFiles(tmp_path / "weights.safetensors").names() == ["x"]
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
    got = TensorFiles(tmp_path).tensor("x")
    assert (got.dtype, got.shape) == (dtype, want.shape)
    assert (
        got.view(torch.uint8).tolist() == want.view(torch.uint8).tolist()
        if shape
        else got.item() == want.item()
    )


def test_progress_counts_the_bytes_and_is_silent_for_short_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    path = shards(tmp_path)
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
        checkpoint.tensor("layer.0")
    assert capfd.readouterr().err == ""
    monkeypatch.setattr(checkpoint_files, "tqdm", Bar)
    with Checkpoint(path) as checkpoint:
        for name in TENSORS:
            checkpoint.tensor(name)
    num_bytes = sum(tensor.nbytes for tensor in TENSORS.values())
    assert [(bar.seen, bar.closed, bar.options["total"]) for bar in bars] == [(num_bytes, True, num_bytes)]
    assert bars[0].options["disable"] is None
    assert bars[0].options["delay"] == 2.0
