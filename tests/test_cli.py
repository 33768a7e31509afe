"""The command `mxk`: what it prints, its exit codes, and its one-line errors."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gptoss_checkpoint as gptoss
import pytest
import torch
from scripts import MXK

import mxk_compile
from mxk_compile import cli
from mxk_compile.integrations.stock_experts import stock_experts

pytest.importorskip("transformers")
from mxk_compile import demo
from mxk_compile.integrations import transformers as models


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gptoss.write_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def without_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine without a C++ compiler; the backend with Inductor has its own tests."""
    monkeypatch.setattr(demo, "_has_compiler", lambda: False)


def mxk(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*MXK, *map(str, arguments)], capture_output=True, text=True, timeout=300, check=False
    )


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        cli.main(["--version"])
    assert exited.value.code == 0
    assert capsys.readouterr().out == f"mxk {mxk_compile.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "required: {demo,generate,explain,bench,report,tune,build-tpc,gaudi,parity,quantize,doctor}"),
        (["train"], "'train' (choose from"),
        (["generate", "--model", "x"], "--prompt"),
        (["explain", "x", "--tokens", "1,0"], "'0' is not a number of at least 1"),
        (["demo", "--new-tokens", "many"], "'many' is not a number"),
        (["demo", "--new-tokens", "٣"], "'٣' is not a number of at least 1"),
        (["parity", "--layer", "٣"], "--layer: invalid whole_number value: '٣'"),
        (["parity", "--layer", "-1"], "--layer: invalid whole_number value: '-1'"),
        (["demo", "--speed"], "--speed"),
        (["demo", "--new-tokens", "1000001"], "'1000001' is not a number of at least 1 and at most 1000000"),
        (["explain", "x", "--tokens", "9" * 5000], "is not a number of at least 1 and at most 1000000"),
        (["generate", "--model", "x", "--prompt", "x", "--max-new-tokens", "10000000000000"], "at most"),
    ],
)
def test_a_wrong_command_line_is_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exited:
        cli.main(arguments)
    assert exited.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ["explain", "nowhere"],
        ["generate", "--model", "nowhere", "--prompt", "a"],
        ["demo", "--model", "nowhere"],
    ],
)
def test_a_model_that_is_not_there_is_one_line(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(
        "mxk: error: nowhere: no such directory (nothing is downloaded); allowed: "
    )
    assert captured.err.count("\n") == 1


def test_a_file_as_model_is_called_a_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", str(folder / "config.json")]) == 2
    assert "config.json: a file, not a directory; allowed: a checkpoint directory" in capsys.readouterr().err


def test_a_prompt_that_is_no_text_is_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generate", "--model", str(folder), "--prompt", "a\udcff", "--stock"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("mxk: error: prompt: no UTF-8 text")
    assert error.count("\n") == 1


class _Full(io.RawIOBase):
    """As /dev/full."""

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        raise OSError(28, "No space left on device")


@pytest.mark.parametrize(
    ("stdout", "message"),
    [
        (lambda: None, "stdout is closed"),
        (lambda: io.TextIOWrapper(io.BufferedWriter(_Full())), "No space left on device"),
    ],
)
def test_a_stdout_that_takes_nothing_is_one_line(
    stdout: Any, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "_explain", lambda options: print("text"))
    monkeypatch.setattr(sys, "stdout", stdout())
    assert cli.main(["explain", "x"]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_character_that_stdout_cannot_write_is_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(cli, "_explain", lambda options: print("é€"))
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    assert cli.main(["explain", "x"]) == 0
    assert written.getvalue() == b"\\xe9\\u20ac\n"


def test_memory_that_is_not_there_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "_explain", lambda options: torch.empty(2**60, dtype=torch.uint8))
    assert cli.main(["explain", "x"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("mxk: error: not enough memory (")
    assert error.count("\n") == 1


def test_the_demo_says_where_the_shipped_model_should_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "SHIPPED_MODEL", tmp_path / "models")
    assert cli.main(["demo"]) == 2
    assert re.search(r"models: .*not there.*or name a model", capsys.readouterr().err)


def test_another_architecture_fails_in_a_process_without_traceback(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    (tmp_path / "config.json").write_text(
        json.dumps({"architectures": ["MambaForCausalLM"], "model_type": "mamba"})
    )
    run = mxk("explain", tmp_path)
    assert (run.returncode, run.stdout) == (2, "")
    assert "MambaForCausalLM" in run.stderr
    assert "GptOssForCausalLM" in run.stderr
    assert "Traceback" not in run.stderr


def test_explain_prints_a_table_for_each_number_of_tokens(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["explain", str(folder), "--tokens", "2,40"]) == 0
    small, large = capsys.readouterr().out.split("T = ")[1:]
    assert small.startswith("2\n")
    assert "2 of 2 MoE nodes fused" in small
    assert large.startswith("40\n")
    assert "0 of 2 MoE nodes fused" in large
    assert large.count("T=40 > 32, the cap of the fused kernels") == 2


class _Bytes:
    """A tokenizer whose ids are bytes."""

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode(errors="replace")


def test_text_is_streamed_token_by_token_and_never_within_a_character() -> None:
    events: list[str] = []

    def tokens() -> Iterator[int]:
        for byte in "aé€𝄞b".encode():
            events.append(f"{byte:02x}")
            yield byte

    for piece in cli._pieces(_Bytes(), tokens()):
        events.append(piece)
    assert events == [
        "61",
        "a",
        "c3",
        "a9",
        "é",
        "e2",
        "82",
        "ac",
        "€",
        "f0",
        "9d",
        "84",
        "9e",
        "𝄞",
        "62",
        "b",
    ]
    # Bytes that never become a character are not held back for ever, nor lost at the end.
    assert list(cli._pieces(_Bytes(), iter([0xFF] * 6))) == ["\ufffd" * 5, "\ufffd"]


def test_generate_writes_each_token_before_it_computes_the_next(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrived = io.BytesIO()
    seen: list[int] = []
    feed = models.Session.feed

    def recording(self: Any, tokens: Any) -> torch.Tensor:
        seen.append(arrived.getvalue().count(b"<"))
        return feed(self, tokens)

    monkeypatch.setattr(models.Session, "feed", recording)
    monkeypatch.setattr(cli, "_pieces", lambda tokenizer, tokens: (f"<{token}>" for token in tokens))
    monkeypatch.setattr(models, "stop_tokens", lambda model: ())
    # Buffers like a pipe: only what was flushed arrives.
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(arrived))
    command = ["generate", "--model", str(folder), "--prompt", "hello", "--max-new-tokens", "4", "--stock"]
    assert cli.main(command) == 0
    assert [*seen, arrived.getvalue().count(b"<")] == [0, 1, 2, 3, 4]


def test_generate_with_the_backend_says_what_stock_says(
    folder: Path, without_inductor: None, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = []
    for extra in ([], ["--stock"]):
        command = ["generate", "--model", str(folder), "--prompt", "hello", "--max-new-tokens", "3", *extra]
        assert cli.main(command) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]


def test_a_reader_that_leaves_early_is_no_error(folder: Path) -> None:
    command = [*MXK, "generate", "--model", folder, "--prompt", "hello", "--stock"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    error = process.stderr.read()
    process.stderr.close()
    assert process.wait(timeout=300) == 141
    assert error == ""


def test_an_interrupt_ends_without_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(path: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(models, "load", interrupt)
    assert cli.main(["explain", "x"]) == 130
    assert capsys.readouterr().err == ""


def test_an_interrupt_while_torch_is_imported_ends_without_traceback(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise KeyboardInterrupt\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([*MXK, "explain"], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_the_module_behind_the_command_is_no_program() -> None:
    """It would be a second way in, without what `mxk` says where the package cannot be imported."""
    command = [sys.executable, "-m", "mxk_compile.cli", "doctor"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "mxk: error: mxk_compile.cli is no program; run mxk, or python -m mxk_command\n"


def test_the_demo_prints_every_comparison(
    folder: Path, without_inductor: None, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["demo", "--model", str(folder), "--prompt", "hello", "--new-tokens", "6", "--profile"]
    assert cli.main(command) == 0
    out = capsys.readouterr().out
    decode = out.partition("rewrite table, decode")[2]
    assert "2 of 2 MoE nodes fused" in decode
    assert re.search(r"--- stock: [\d.]+ tokens/s", out)
    assert re.search(r"--- mxk: [\d.]+ tokens/s", out)
    # 4.25 bits a weight and the biases, against 16.
    weights, biases = 2 * 8 * 3 * 64 * 96, 2 * 8 * (192 + 64)
    packed, plain = weights * 17 // 32 + 2 * biases, 2 * weights + 2 * biases
    assert f"experts {packed:,} bytes packed, {plain:,} as bf16" in out
    assert re.search(r"greedy +outputs (are the same|part at token)", out)
    errors = {
        name: float(value)
        for name, value in re.findall(r"(stock|mxk) (\d\.\d\de-\d\d)", out.partition("MoE op alone")[2])
    }
    assert errors["mxk"] <= 1.8e-3 < errors["stock"]
    shares = [float(share) for share in re.findall(r" ms +(-?[\d.]+)%", out)]
    assert sum(shares) == pytest.approx(100, abs=0.5)
    for row in ("MoE kernels", "MoE overhead that is ours", "attention with its projections", "rest"):
        assert re.search(rf"^  {row} +-?[\d.]+ ms", out, re.MULTILINE), row


def test_the_fp32_reference_is_the_unpacked_fp32_model(folder: Path) -> None:
    from safetensors.torch import load_file
    from transformers import GptOssConfig, GptOssForCausalLM

    from mxk_compile.ops.formats import mxfp4

    model = mxk_compile.load(folder)
    reference = demo.reference_model(model)
    weights = load_file(folder / "model.safetensors")
    for name in [name for name in weights if name.endswith("_blocks")]:
        stem = name.removesuffix("_blocks")
        values = mxfp4.unpack(weights.pop(name).flatten(-2), weights.pop(f"{stem}_scales"), torch.float32)
        weights[stem] = values.transpose(1, 2)
    plain = GptOssForCausalLM(GptOssConfig.from_pretrained(folder)).eval()
    plain.load_state_dict(weights)
    ids = torch.arange(2, 42)[None]
    with torch.no_grad():
        exact, found = plain.float()(input_ids=ids).logits, reference(input_ids=ids, use_cache=False).logits
    assert demo.rel_l2(found, exact) < 1e-5
    # The loaded model is as it was, and shares its packed bytes.
    assert model.lm_head.weight.dtype == torch.bfloat16
    first = next(iter(stock_experts(model).values()))
    assert reference.model.layers[0].mlp.experts.experts.w13_weight is first.w13_weight


def test_where_greedy_outputs_part() -> None:
    logits = [torch.tensor([3.0, 2.5, 0.0]), torch.tensor([1.0, 1.25, 0.0])]
    first = demo.Run("stock", [0, 1], logits, [0.1])
    second = demo.Run("mxk", [0, 0], [logits[0], torch.tensor([1.5, 1.0, 0.0])], [0.1])

    class Letters:
        def decode(self, ids: list[int]) -> str:
            return "abc"[ids[0]]

    line = demo.parting_line(first, second, Letters())
    assert (
        line
        == "outputs part at token 2 of 2: 'b' against 'a'; top-1 over top-2 logit: stock 0.250, mxk 0.500"
    )
    assert demo.parting_line(first, first, Letters()) == "outputs are the same for all 2 tokens"


def test_scores_by_hand() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.25, 0.25], [0.125, 0.375, 0.5]]))
    # Predicted: token 1 with 1/4, then token 0 with 1/8.
    assert demo.perplexity(logits, [2, 1, 0]) == pytest.approx((1 / (0.25 * 0.125)) ** 0.5)
    assert demo.rel_l2(torch.tensor([3.0, 5.0]), torch.tensor([3.0, 4.0])) == pytest.approx(0.2)


def test_tune_without_a_gpu_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert cli.main(["tune", "--variant", "glm", "--experts", "32", "--tokens", "1,2"]) == 2
    text = "mxk: error: tune: there is no CUDA device; allowed: a Hopper GPU and cuda-bindings; "
    assert capsys.readouterr().err == text + "run it where the model runs\n"
