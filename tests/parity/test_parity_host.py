"""`mxk parity --device cpu|cuda`: tables, PASS lines, what fails and how it is named; real weights; refusals."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import gptoss_checkpoint as gptoss
import int4_checkpoint
import pytest
import torch

from mxk_compile import cli
from mxk_compile.checkpoint import Checkpoint
from mxk_compile.errors import CheckpointError
from mxk_compile.ops.formats import int4, mxfp4
from mxk_compile.parity import cases, host, rows
from mxk_compile.parity.checkpoint import checkpoint_source

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of small sizes: numbers are of the same kind, and drawing large weights takes seconds."""
    sizes = {"hidden_size": 256, "intermediate_size": 128}
    small_rows = {name: dataclasses.replace(row, **sizes) for name, row in cases.ROWS.items()}
    monkeypatch.setattr(rows, "ROWS", small_rows)


def test_every_row_passes_and_says_where_it_ran(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["parity", "--quick"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("measured: ")
    for line in ("PARITY PASS", "SIG_DEVICE PASS", "PREFILL PASS"):
        assert line in said.splitlines()
    found = re.findall(
        r"^(\w+) +256 +128  (\w+) +([14]) +1-(?:32|4) +(\d+)-(\d+)  (\S+) to (\S+) ", said, re.MULTILINE
    )
    assert {row[0] for row in found} == set(cases.ROWS)
    assert {row[1] for row in found if row[0] == "gptoss"} == {"random", "hot", "router"}
    for name, routing, _, fewest, most, *errors in found:
        top_k = cases.ROWS[name].top_k
        if routing == "hot":
            assert (int(fewest), int(most)) == (top_k, 32 * top_k)
        assert 0 < float(errors[1]) < 2.2e-3


def test_the_weights_of_a_row_are_drawn_once(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    draw = cases.variant_case
    monkeypatch.setattr(
        cases, "variant_case", lambda row, **more: drawn.append(row.name) or draw(row, **more)
    )
    cases.random_source.cache_clear()
    assert host.run_on_host("cpu", ["gptoss", "glm", "muse", "kimi_int4"], quick=True)
    assert drawn == ["gptoss", "glm", "muse", "kimi_int4"]


def test_wrong_results_fail_with_the_worst_call(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fused = cases.MoECase.fused

    def wrong(case: cases.MoECase) -> torch.Tensor:
        result = fused(case)
        return result * 1.01 if len(result) == 32 and case.hidden_states.std() > 2 else result

    monkeypatch.setattr(cases.MoECase, "fused", wrong)
    assert cli.main(["parity", "--device", "cpu", "--variant", "muse", "--quick"]) == 1
    said = capsys.readouterr().out
    assert re.search(
        r"^PARITY FAIL: worst muse hot T=32 rms=4: 1\.0\de-02, limit 1\.8e-03$", said, re.MULTILINE
    )
    assert "SIG_DEVICE PASS" in said


def test_a_wrong_unpack_or_prefill_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(host, "is_exact_unpack", lambda values, weight, scale: False)
    assert cli.main(["parity", "--variant", "glm", "--quick"]) == 1
    assert (
        "PREFILL FAIL: glm: mxfp4_dequant of w13, expert 0, is not the exact unpack\n"
        in capsys.readouterr().out
    )


def test_the_exact_unpack_is_independent_and_exact() -> None:
    weight = torch.arange(256, dtype=torch.uint8).repeat(2, 1)[:, :128]
    scale = torch.tensor([[0, 1, 100, 127, 128, 200, 253, 254]] * 2, dtype=torch.uint8)
    values = mxfp4.unpack(weight, scale)
    assert cases.is_exact_unpack(values, weight, scale)
    values[1, 77] = torch.nextafter(values[1, 77], torch.tensor(9.0).bfloat16())
    assert not cases.is_exact_unpack(values, weight, scale)


def test_two_calls_with_one_result_fail(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def cached(calls: list[cases.MoECase]) -> list[torch.Tensor]:
        return [calls[0].fused()] * len(calls)

    monkeypatch.setattr(host, "compiled_run", lambda inner_backend: cached)
    assert cli.main(["parity", "--variant", "kimi_int4", "--quick"]) == 1
    assert "SIG_DEVICE FAIL: in one graph other results than alone: kimi_int4\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model"], "--model with --device cpu; allowed: --model with --device tpc-emulated; "),
        (["--device", "hpu", "--lib", "x", "--model"], "--model with --device hpu; allowed: "),
        (["--lib", "x"], "--device cpu with --lib; allowed: --device hpu with --lib DIR, the others without"),
        (["--checkpoint", "x"], "--checkpoint with --variant all; allowed: --checkpoint with one --variant"),
        (["--layer", "3"], "--layer without --checkpoint; allowed: both or none"),
        (["--checkpoint", "nowhere", "--variant", "glm"], "nowhere: no such file; allowed: "),
        (["--device", "cuda", "--variant", "glm"], "there is no CUDA device; allowed: a Hopper GPU"),
        (["--device", "cuda"], "there is no CUDA device; allowed: rows that a kernel runs here"),
    ],
)
def test_refused_command_lines(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    if "cuda" in arguments and torch.cuda.is_available():
        pytest.skip("there is one")
    assert cli.main(["parity", *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_real_weights_of_gptoss_with_their_router(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = gptoss.write(
        tmp_path / "model", gptoss.published_config(**{**gptoss.TINY, "num_local_experts": 12})
    )
    command = ["parity", "--variant", "gptoss", "--checkpoint", str(folder), "--quick"]
    assert cli.main(command) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"weights of {folder}, model.layers.1.mlp.experts\n")
    assert re.search(r"^gptoss +64 +96  router +4 +1-32 ", said, re.MULTILINE)
    source = checkpoint_source(folder, cases.ROWS["gptoss"], 0)
    with Checkpoint(folder) as files:
        packed = files.experts("model.layers.0.mlp.experts")
        router = files.tensor("model.layers.0.mlp.router.weight").float()
        bias = files.tensor("model.layers.0.mlp.router.bias").float()
    assert source.local == slice(2, 10)
    assert torch.equal(source.weights.w13, packed.w13[2:10])
    assert source.weights.w2_bias is not None
    assert packed.w2_bias is not None
    assert torch.equal(source.weights.w2_bias, packed.w2_bias[2:10])
    case = cases.make_case(source.variant, 5, "router", 1.0, source=source)
    logits = case.hidden_states.float() @ router.T + bias
    assert torch.equal(case.topk_ids, logits.topk(4, dim=1).indices)
    with pytest.raises(CheckpointError, match="layer 2 has no experts; allowed: 0, 1; "):
        checkpoint_source(folder, cases.ROWS["gptoss"], 2)
    with pytest.raises(CheckpointError, match="as row dsv41; choose another --variant"):
        checkpoint_source(folder, cases.ROWS["dsv41"])


def test_real_int4_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    int4_checkpoint.write(tmp_path)
    command = ["parity", "--variant", "int4", "--checkpoint", str(tmp_path), "--quick"]
    assert cli.main([*command, "--layer", "0"]) == 0
    assert "PARITY PASS" in capsys.readouterr().out
    assert cli.main([*command, "--layer", "4"]) == 2  # a layer with zero points
    assert "zero points for each group; allowed: symmetric INT4" in capsys.readouterr().err
    assert len(checkpoint_source(tmp_path, cases.ROWS["int4"], 0).weights.w2) == int4_checkpoint.EXPERTS


def test_shared_zero_points_are_one_tensor_of_words() -> None:
    row = dataclasses.replace(cases.ROWS["wna16"], hidden_size=64, intermediate_size=64, top_k=2)
    case = cases.make_case(row, 1, "hot", 1.0)
    assert case.w13_zero is not None
    assert (case.w13_zero.dtype, case.w13_zero.stride(0)) == (torch.int32, 0)
    values = int4.unpack(case.w13, case.w13_scale, case.w13_zero, pack_dim="output")
    assert values.shape == (8, 128, 64)
