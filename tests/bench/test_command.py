"""`mxk bench` as a user runs it: rows of tiny layers, a process an implementation, modelled rows, refusals."""

from __future__ import annotations

import dataclasses
import json
import subprocess

import pytest
import torch
from scripts import MXK

from mxk_compile.bench import cases, implementations, runner, timing
from mxk_compile.bench.points import Point
from mxk_compile.bench.rows import parse
from mxk_compile.bench.timing import Method
from mxk_compile.cli import main
from mxk_compile.ops import moe
from mxk_compile.testing import random_layer, rel_l2
from mxk_compile.variants import VARIANTS

TINY = Method(chain=2, replays=2, seconds=0.0, fewest=2)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Model rows at sizes that take no time, and caches that are full at once."""
    for name, row in VARIANTS.items():
        small = dataclasses.replace(row, hidden_size=64, intermediate_size=32, num_experts=8)
        monkeypatch.setitem(VARIANTS, name, small)
    monkeypatch.setattr(cases, "cache_bytes", lambda device: 1 << 10)
    monkeypatch.setattr(timing, "_PROBE_SECONDS", 0.001)


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize(
    ("name", "impl"),
    [(name, impl) for name in VARIANTS for impl in ("fused", "stock")]
    + [(name, "unpacked") for name in ("gptoss", "glm", "kimi_int4")],
)
def test_a_row_of_each_kind(name: str, impl: str) -> None:
    point = Point(name, 8, 5, "random")
    (row,) = runner.run([point], "cpu", impl, TINY, pytest.fail)
    assert (row.impl, row.num_tokens, row.evidence, row.seed) == (impl, 5, "measured", 0)
    assert row.rel_l2 is not None
    assert row.rel_l2 < (3e-3 if impl == "fused" else 1.2e-2)
    assert row.us > 0
    assert row.floor_us is not None
    assert row.versions["torch"] == torch.__version__
    _, ids, _ = cases.draw(point)
    assert row.local_routes == int((ids < 8).sum())
    assert parse([row.to_json()], "row") == [row]


@pytest.mark.usefixtures("tiny")
def test_the_error_of_a_row_is_that_of_its_first_call() -> None:
    point = Point("gptoss", 8, 4, "hot")
    (row,) = runner.run([point], "cpu", "fused", TINY, pytest.fail)
    layer = random_layer(VARIANTS["gptoss"], 8, 0, "cpu")
    x, ids, weights = cases.draw(point)
    exact = moe.reference(
        x.double(), ids, weights.double(), *layer.weights, **layer.attributes, round_intermediate=False
    )
    result = torch.ops.mxk.moe(x, ids, weights, *layer.weights, **layer.attributes)
    assert row.rel_l2 == pytest.approx(rel_l2(result, exact), rel=1e-2)


@pytest.mark.usefixtures("tiny")
def test_what_an_implementation_does_not_compute_is_left_out_with_the_reason() -> None:
    said: list[str] = []
    points = [Point(name, 8, 1, "hot") for name in ("dsv41", "glm")]
    (row,) = runner.run(points, "cpu", "unpacked", TINY, said.append)
    assert row.variant == "glm"
    assert len(said) == 1
    assert "dsv41 E=8 T=1 hot: mxk bench --impl unpacked: no stock op" in said[0]


def test_samples_are_of_whole_chains_and_the_first_warms_up(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    clock = iter(range(0, 10_000, 8))
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(clock) * 1e-6)
    calls: timing.Calls = [lambda i=i: made.append(i) for i in range(3)]  # type: ignore[misc]
    times = timing.time_cpu(calls, Method(chain=8, replays=4))
    assert made == [index % 3 for index in range(8 * 5)]
    assert times.samples_us == pytest.approx([1.0] * 4)
    assert times.method == "chain of 8, median of 4"
    assert times.median_us == pytest.approx(1.0)


def test_a_slow_call_stops_at_the_fewest_samples() -> None:
    times = timing.time_cpu([lambda: None], Method(chain=2, replays=30, seconds=0.0, fewest=3))
    assert len(times.samples_us) == 3


def test_impls_of_one_command_run_in_processes_of_their_own() -> None:
    command = [*MXK, "bench", "--device", "tpc-modelled", "--suite", "document"]
    done = subprocess.run([*command, "--variant", "muse"], capture_output=True, text=True, check=True)
    found = parse(done.stdout.splitlines(), "output")
    assert [row.impl for row in found] == ["stock"] * 5 + ["fused"] * 5
    assert {row.evidence for row in found[:5]} == {"published"}
    assert {row.evidence for row in found[5:]} == {"modelled"}
    assert "muse: 128 of 256 experts" in done.stderr
    assert "published and modelled, Gaudi 2" in done.stderr
    fused = {row.key: row for row in found if row.impl == "fused"}
    hot = fused[("muse", 128, 4, "hot")]
    assert hot.counts["vpu_cycles_per_chunk_row"] > 8
    assert hot.us == pytest.approx(489.2, rel=0.35)  # the published kernel's: another count of operations


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--variant", "x"], "invalid choice: 'x' (choose from"),
        (["--device", "x"], "invalid choice: 'x' (choose from"),
        (["--tokens", "x"], "'x' is not a number of at least 1"),
        (["--tokens", "1,,2"], "'' is not a number of at least 1"),
        (["--routing", "warm"], "'warm' is no routing; allowed: random, hot, router, even"),
        (["--impl", "magic"], "'magic'; allowed: fused, stock, unpacked, aten_int4"),
        (["--suite", "chord", "--impl", "stock"], "--impl stock; allowed: fused, humming, chord"),
        (["--suite", "document", "--variant", "mimo"], "of which nothing was published"),
        (["--impl", "unpacked", "--variant", "muse", "--quick", "--e-local", "1"], "no stock op computes this"),
        (["--compare", "a", "b", "c"], "3 files; allowed: one or two"),
    ],
)  # fmt: skip
def test_what_is_not_there_is_refused_with_what_is(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(["bench", *arguments])
    except SystemExit as stopped:
        code = int(stopped.code or 0)
    captured = capsys.readouterr()
    assert code == 2
    assert captured.out == ""
    assert said in captured.err.splitlines()[-1]


@pytest.mark.parametrize("more", [[], ["--impl", "fused"]])
def test_more_than_memory_is_refused_before_it_is_taken(
    more: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runner, "random_layer", pytest.fail)
    monkeypatch.setattr(subprocess, "Popen", pytest.fail)
    monkeypatch.setattr(cases, "free_bytes", lambda device: 24_000_000_000)
    assert main(["bench", "--e-local", "100000", "--routing", "hot", *more]) == 2
    assert capsys.readouterr() == (
        "",
        "mxk: error: bench: gptoss E=100000 T=32 hot takes 2647.3 GB; allowed: the 24.0 GB that are free on cpu;"
        " lower --e-local or --tokens\n",
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_missing_device_says_how_its_rows_can_be_had(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--device", "cuda"]) == 2
    assert capsys.readouterr().err == (
        "mxk: error: bench --device cuda: there is no CUDA device; allowed: a Hopper GPU and cuda-bindings"
        " (pip install 'mxk-compile[cuda]'); run this command there; here --device cpu measures and --device"
        " tpc-modelled models\n"
    )


def test_published_columns_of_chord(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--suite", "chord", "--impl", "chord"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    rows = {(line["variant"], line["num_tokens"]): line["us"] for line in lines}
    assert rows[("chord decode EP8 gate_up", 20)] == 221.9
    assert rows[("chord TP8 down", 16384)] == 1723.5
    assert {line["evidence"] for line in lines} == {"published"}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_rows_on_cuda() -> None:
    rows = list(runner.run([Point("glm", 16, 2, "random")], "cuda", "fused", Method(replays=5), pytest.fail))
    assert rows[0].rel_l2_bf16 is not None
    assert rows[0].rel_l2_bf16 < 1.8e-3
    assert "CUDA graph" in rows[0].method


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize(
    "name", [name for name in implementations.names() if name not in implementations.OURS]
)
def test_each_peer_runs_or_says_why_not(name: str) -> None:
    peer = implementations.load_peer(name)
    assert peer.DEVICE in ("cpu", "cuda")
    assert isinstance(peer.CAPTURABLE, bool)
    assert peer.NAME
    if peer.missing() is not None or peer.DEVICE == "cuda":
        pytest.skip(peer.missing() or "needs a GPU")
    variant = "kimi_int4" if name == "aten_int4" else "glm"
    # Some know of no experts held elsewhere.
    routing = "hot" if name in ("ggml", "kt_kernel", "vllm_cpu") else "random"
    (row,) = runner.run([Point(variant, 8, 3, routing)], "cpu", name, TINY, pytest.fail)
    assert row.rel_l2 is not None
    assert row.rel_l2 < 1.2e-2
    assert name in row.versions
