"""`mxk parity`: the quick run of every variant, as a command; what it says when a kernel is wrong."""

from __future__ import annotations

import dataclasses
import re
import subprocess

import pytest
import torch
from scripts import MXK

from mxk_compile import cli
from mxk_compile.kernels.tpc import emulate, emulated_ops
from mxk_compile.parity import cases, emulated
from mxk_compile.parity.rows import Row
from mxk_compile.variants import VARIANTS


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own: it defines `custom_op::mxk_*`, which a process can do once."""
    command = [*MXK, "parity", "--device", "tpc-emulated", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_quick_run_of_all_variants() -> None:
    done = run("--quick")
    assert done.returncode == 0, done.stdout + done.stderr
    for line in ("PARITY PASS", "SIG_DEVICE PASS", "PREFILL PASS"):
        assert line in done.stdout.splitlines()
    assert done.stdout.startswith("emulated: ")
    rows = re.findall(r"^(\w+) +(\d+) +(\d+)  (random|hot|router) ", done.stdout, re.MULTILINE)
    assert {row[0] for row in rows} == set(cases.ROWS)
    assert {row[3] for row in rows if row[0] == "gptoss"} == {"random", "hot", "router"}


@pytest.mark.slow
def test_full_run_of_all_variants() -> None:
    done = run()
    assert done.returncode == 0, done.stdout + done.stderr


def test_model_is_labelled_and_complete() -> None:
    done = run("--model", "--variant", "muse")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("modelled: ")
    assert re.search(r"^muse +1 +8 +[\d.]+ +[\d.]+ \(14\.50, 10\.50\) ", done.stdout, re.MULTILINE)


def test_unknown_variant_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        cli.main(["parity", "--device", "tpc-emulated", "--variant", "gpt5"])
    assert exited.value.code == 2
    error = capsys.readouterr().err
    assert "--variant: invalid choice: 'gpt5' (choose from " in error
    assert all(name in error for name in ("all", *cases.ROWS))
    assert error.count("\n") == 1


def test_a_wrong_result_fails_and_names_the_worst_case(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    row = Row("glm", (6144, 1024), "hot", 8, 64, 4.0, 1.9e-3, 4e-3)
    rows = [dataclasses.replace(row, kernel_rel_l2=1.6e-3, num_tokens=1), row]
    monkeypatch.setattr(emulated, "_rows", lambda name, source, quick: rows)
    monkeypatch.setattr(emulated, "source_of", lambda name, given: None)
    monkeypatch.setattr(emulated, "same_alone_and_together", lambda *arguments, **more: False)
    monkeypatch.setattr(
        emulated, "_prefill", lambda source, quick: "mxk_deq of w2, expert 1, is not the exact unpack"
    )
    monkeypatch.setattr(emulated, "_build", lambda kernels: None)
    monkeypatch.setattr(emulated_ops, "register", lambda: None)
    assert not emulated.run_parity(["glm"])
    said = capsys.readouterr().out
    assert "PARITY FAIL: worst glm hot T=8 rms=4: 1.90e-03, limit 1.8e-03\n" in said
    assert "SIG_DEVICE FAIL: in one graph other results than alone: glm\n" in said
    assert "PREFILL FAIL: mxk_deq of w2, expert 1, is not the exact unpack\n" in said


def test_nan_is_worse_than_any_number() -> None:
    assert cases.badness(float("nan")) == float("inf")


def test_no_compiler_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(Exception, match="no g\\+\\+ on PATH; allowed: g\\+\\+ 12 or newer") as raised:
        emulate.build("mxk_w2x")
    assert "\n" not in str(raised.value)


def test_hot_routing_is_all_local_and_random_is_not() -> None:
    variant = VARIANTS["muse"]
    hot, random = (cases.make_case(variant, 16, routing, 1.0).topk_ids for routing in ("hot", "random"))
    local = torch.arange(cases.FIRST_LOCAL, cases.FIRST_LOCAL + cases.LOCAL_EXPERTS)
    assert torch.isin(hot, local).all()
    assert not torch.isin(random, local).all()
