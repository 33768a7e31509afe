"""`mxk parity --device hpu` without a device: the same checks on the CPU, ops by the emulator; refusals."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pathlib
import re
import sys
import types
from collections.abc import Iterator, Sequence

import pytest
import scripts
import torch
from torch import Tensor

from mxk_compile.cli import main
from mxk_compile.kernels.tpc import emulated_ops
from mxk_compile.kernels.tpc.libraries import Manifest
from mxk_compile.parity import cases as parity_cases
from mxk_compile.parity import device as parity_device
from mxk_compile.parity import rows as parity_rows
from mxk_compile.testing import MoECase

CPU = torch.device("cpu")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Variants of a few chunks, and their ops."""
    variants = {
        name: dataclasses.replace(row, hidden_size=1024, intermediate_size=512, top_k=2)
        for name, row in parity_cases.ROWS.items()
        if name in ("glm", "muse")
    }
    monkeypatch.setattr(parity_rows, "ROWS", variants)
    library = emulated_ops.register()
    yield
    library._destroy()


def test_right_kernels_pass(small: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert parity_device.check(("muse",), CPU, parity_device.lazy_run, quick=True)
    said = capsys.readouterr().out
    rows = re.findall(r"^muse +1024 +512  (hot|random) +(\d) +1-(?:16|4) ", said, re.MULTILINE)
    assert rows == [("hot", "4"), ("random", "1")]
    assert said.splitlines()[-2:] == ["PARITY PASS", "SIG_DEVICE PASS"]
    assert parity_device.unpack(CPU, parity_rows.source_of("glm", {})) == ""


def test_wrong_results_fail(
    small: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(cases: Sequence[MoECase]) -> list[Tensor]:
        # A cache by input signature: the second of two calls gets the first one's result.
        results = parity_device.lazy_run(cases)
        return [results[0] * 1.01 for _ in results]

    assert not parity_device.check(("muse",), CPU, wrong, quick=True)
    parity, signature = capsys.readouterr().out.splitlines()[-2:]
    assert parity.startswith("PARITY FAIL: worst muse ")
    assert re.search(r"T=\d+ rms=[14]: 1\.0\de-02, limit 1\.8e-03$", parity)
    assert signature == "SIG_DEVICE FAIL: in one graph other results than alone: muse"
    monkeypatch.setattr(parity_cases, "_exact", lambda weight, scale: torch.ones(len(weight), 1).bfloat16())
    assert (
        parity_device.unpack(CPU, parity_rows.source_of("glm", {}))
        == "mxk_deq of w13, expert 0, is not the exact unpack"
    )


def test_an_op_that_does_not_run_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        parity_device, "self_check", lambda device: {"custom_op::mxk_w2x": "no kernel", "b": None}
    )
    assert not parity_device.check(("glm",), CPU, parity_device.lazy_run)
    assert capsys.readouterr().out == "PARITY FAIL: custom_op::mxk_w2x does not run: no kernel\n"


def test_compiled_calls_go_through_the_backend() -> None:
    row = dataclasses.replace(parity_cases.ROWS["glm"], hidden_size=256, intermediate_size=128, top_k=2)
    cases = [parity_cases.make_case(row, 3, "hot", 1.0, seed) for seed in (0, 1)]
    for case, result in zip(cases, parity_device.compiled_run("aot_eager")(cases), strict=True):
        assert parity_cases.error_of(result, case.reference(round_intermediate=True)) < 5e-3


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["--device", "hpu"],
            "--device hpu without --lib; allowed: --device hpu with --lib DIR, the others without",
        ),
        (["--device", "tpc-emulated", "--lib", "x"], "--device tpc-emulated with --lib; allowed: "),
        (["--device", "hpu", "--lib", "nowhere"], "nowhere/MANIFEST: it is not there; allowed: "),
    ],
)
def test_refused_command_lines(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["parity", *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_another_variant_and_no_bridge(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path
) -> None:
    manifest = Manifest("glm-0", "glm", [], {}, {}, {}, {})
    monkeypatch.setattr(parity_device, "read_manifest", lambda folder: manifest)
    assert main(["parity", "--device", "hpu", "--lib", str(tmp_path), "--variant", "kimi"]) == 2
    assert "variant kimi with a build of glm; allowed: variants that the build" in capsys.readouterr().err
    assert main(["parity", "--device", "hpu", "--lib", str(tmp_path)]) == 2
    assert "parity: No module named 'habana_frameworks'" in capsys.readouterr().err


def test_the_benchmark_times_a_captured_chain(
    small: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path
) -> None:
    bench = scripts.load("benchmarks/bench_gaudi.py")
    said: list[str] = []

    class Graph:
        capture_begin = staticmethod(lambda: said.append("begin"))
        capture_end = staticmethod(lambda: said.append("end"))
        replay = staticmethod(lambda: said.append("replay"))

    hpu = types.SimpleNamespace(
        HPUGraph=Graph,
        Stream=object,
        stream=contextlib.nullcontext,
        synchronize=lambda: None,
        get_device_name=lambda: "none",
    )
    manifest = Manifest("muse-0", "muse", [], {}, {}, {}, {})
    monkeypatch.setitem(sys.modules, "habana_frameworks.torch.hpu", hpu)
    monkeypatch.setattr(bench, "load_ops", lambda folder, kind: manifest)
    monkeypatch.setattr(bench, "VARIANTS", parity_rows.ROWS)
    monkeypatch.setattr(bench, "CHAIN", 1)
    files = []
    for impl in ("stock", "kernel"):
        bench.main(["--lib", "x", "--variant", "muse", "--tokens", "2", "--device", "cpu", "--impl", impl])
        lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert [(line["routing"], line["tokens"], line["impl"]) for line in lines] == [
            ("random", 2, impl),
            ("hot", 2, impl),
        ]
        assert lines[1]["local_routes"] == 4
        files.append(tmp_path / impl)
        files[-1].write_text("\n".join(json.dumps(line | {"us": 10.0 * len(impl)}) for line in lines))
    assert said == (["begin", "end"] + ["replay"] * 31) * 4
    bench.main(["--compare", *map(str, files)])
    first = capsys.readouterr().out.splitlines()[1]
    assert first == "muse     hot     T   2 routes    4  stock      50.0 us  kernel      60.0 us  0.8x"
