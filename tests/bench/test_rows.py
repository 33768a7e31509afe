"""Rows: written and read back, files that are none refused by name, tables, refusals, the baseline check."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Callable
from typing import Any

import pytest

from mxk_compile.bench import check, compare, rows
from mxk_compile.bench.rows import Row
from mxk_compile.cli import main
from mxk_compile.errors import CallError

ROW = Row(
    variant="gptoss",
    weight_format="mxfp4",
    hidden_size=2880,
    intermediate_size=2880,
    num_experts=32,
    all_experts=128,
    top_k=4,
    num_tokens=8,
    routing="random",
    local_routes=7,
    experts_touched=7,
    seed=0,
    impl="fused",
    kernel="cpu/cpp/avx512",
    device="A processor",
    threads=2,
    evidence="measured",
    us=235.8,
    us_p10=230.0,
    us_p90=240.0,
    floor_us=100.0,
    packed_gb_s=400.0,
    read_gb_s=900.0,
    rotated_bytes=1 << 30,
    rel_l2=1.6e-3,
    rel_l2_bf16=2.2e-3,
    method="chain of 8, median of 30",
    versions={"torch": "2.13.0"},
)
STOCK = dataclasses.replace(ROW, impl="stock", us=2362.9, rel_l2=5.1e-3)


def save(path: pathlib.Path, *found: Row) -> pathlib.Path:
    path.write_text("".join(f"{row.to_json()}\n" for row in found))
    return path


def test_rows_are_read_as_they_were_written(tmp_path: pathlib.Path) -> None:
    counted = dataclasses.replace(ROW, rel_l2=None, counts={"chunk_rows": 3.0})
    assert rows.read(save(tmp_path / "run.json", ROW, counted)) == [ROW, counted]


def changed(**values: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda line: {**line, **values}


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (changed(schema="mxk-bench-0"), "is no row of schema mxk-bench-1"),
        (lambda line: [line], "is no row of schema mxk-bench-1"),
        (changed(us="1"), "has us '1'"),
        (changed(us=0), "has us 0"),
        (changed(num_tokens=True), "has num_tokens True"),
        (changed(us_p10=-1.0), "has us_p10 -1.0"),
        (changed(device=None), "has device None"),
        (changed(versions={"torch": 2}), "has versions {'torch': 2}"),
        (changed(variant="a\x1b[2J"), "has variant 'a\\x1b[2J'"),
        (changed(method="x" * 501), f"has method 'x{'x' * 38}"),
        (changed(us=1e300), "has us 1e+300"),
        (changed(us=1e-300), "has us 1e-300"),
        (changed(seed=10**20), "has seed 100000000000000000000"),
        (changed(counts={"chunk_rows": None}), "has counts {'chunk_rows': None}"),
        (changed(evidence="guessed"), "has evidence 'guessed'"),
        (changed(extra=1), "has an unknown field 'extra'"),
        (lambda line: {k: v for k, v in line.items() if k != "seed"}, "lacks 'seed'"),
    ],
)
def test_a_line_that_is_no_row_is_refused(change: Any, fault: str, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "run.json"
    path.write_text(f"{ROW.to_json()}\n{json.dumps(change(json.loads(ROW.to_json())))}\n")
    with pytest.raises(CallError) as error:
        rows.read(path)
    assert str(error.value) == (
        f"{path}: line 2 {fault}; allowed: lines that `mxk bench` printed; run it again"
    )


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (ROW.to_json()[:200].encode(), "line 1 is no JSON, or cut off"),
        (b'{"us": NaN' + b"[" * 100_000, "line 1 is no JSON, or cut off"),
        (b"", "no rows"),
        (b"\xff\xfe\x00", "no text"),
    ],
    ids=["cut off", "deep", "empty", "no text"],
)
def test_a_file_that_is_none_of_ours_is_refused_by_name(
    content: bytes, fault: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.json"
    path.write_bytes(content)
    assert main(["bench", "--compare", str(path)]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"mxk: error: {path}: {fault}; allowed: ")
    assert said.count("\n") == 1


def test_infinite_numbers_are_refused(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "run.json"
    path.write_text(ROW.to_json().replace("235.8", "1e999"))
    with pytest.raises(CallError, match="has us inf"):
        rows.read(path)


def test_a_missing_file_is_named(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--compare", str(tmp_path / "none")]) == 2
    assert f"{tmp_path / 'none'}: No such file or directory" in capsys.readouterr().err


def test_the_published_form_of_the_table(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = dataclasses.replace(ROW, num_tokens=1, local_routes=1, us=51.5, rel_l2=None)
    first = save(tmp_path / "stock.json", dataclasses.replace(one, impl="stock", us=246.0), STOCK)
    second = save(tmp_path / "fused.json", ROW, one)
    assert main(["bench", "--compare", str(first), str(second)]) == 0
    expected = """\
gptoss: 32 of 128 experts, K = 2880, I = 2880, top-4, mxfp4; measured, A processor, 2 threads
Tokens  Routing  Local routes        stock µs        fused µs  Speed-up    stock rel_l2    fused rel_l2
     1  random              1           246.0            51.5      4.8x               -               -
     8  random              7          2362.9           235.8     10.0x        5.10e-03        1.60e-03
"""
    assert capsys.readouterr().out == expected
    together = save(tmp_path / "both.json", *rows.read(second), *rows.read(first))
    assert main(["bench", "--compare", str(together)]) == 0
    assert {*capsys.readouterr().out.splitlines()} == {*expected.splitlines()}


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"hidden_size": 64}, "shape of gptoss E=32 T=8 random (stock) and gptoss E=32 T=8 random (fused)"),
        ({"seed": 1}, "seed of"),
        ({"device": "Another"}, "differs: device A processor and Another"),
        ({"threads": 4}, "differs: threads 2 and 4"),
        ({"local_routes": 8}, "routing of"),
    ],
)
def test_rows_of_different_calls_are_not_compared(values: dict[str, Any], said: str) -> None:
    with pytest.raises(CallError, match=r"mxk bench --compare: .*") as error:
        compare.pair([STOCK], [dataclasses.replace(ROW, **values)])
    assert said in str(error.value)


def test_runs_without_a_common_line_or_with_two_of_one_are_refused() -> None:
    with pytest.raises(CallError, match="no common line of 1 and 1 rows"):
        compare.pair([STOCK], [dataclasses.replace(ROW, num_tokens=2)])
    with pytest.raises(CallError, match="stands there twice"):
        compare.pair([STOCK, STOCK], [ROW])
    with pytest.raises(CallError, match="rows of fused; allowed: two implementations"):
        compare.split([ROW], "run.json")


def test_rows_without_a_partner_are_said() -> None:
    alone = dataclasses.replace(ROW, num_tokens=16)
    pairs, rest = compare.pair([STOCK], [ROW, alone])
    assert pairs == [(STOCK, ROW)]
    assert rest == [alone]


def baseline_folder(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch, *found: Row) -> None:
    monkeypatch.setattr(check, "FOLDER", folder / "baseline")
    (folder / "baseline").mkdir()
    if found:
        save(folder / "baseline" / "here.json", *found)


@pytest.mark.parametrize(
    ("new", "code", "said"),
    [
        ({"us": 235.8 * 1.1}, 0, "here: 1 of 1 rows compared, 0 regressed\n"),
        ({"us": 235.8 * 0.5}, 0, "here: 1 of 1 rows compared, 0 regressed\n"),
        (
            {"us": 235.8 * 2},
            1,
            "REGRESSED gptoss E=32 T=8 random (fused): us 471.6, baseline 235.8 (2.000 x)\n"
            "here: 1 of 1 rows compared, 1 regressed\n",
        ),
        (
            {"rel_l2": 2.0e-3},
            1,
            "REGRESSED gptoss E=32 T=8 random (fused): rel_l2 0.002, baseline 0.0016 (1.250 x)\n"
            "here: 1 of 1 rows compared, 1 regressed\n",
        ),
    ],
)
def test_check_names_the_rows_that_got_worse(
    new: dict[str, Any],
    code: int,
    said: str,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    baseline_folder(tmp_path, monkeypatch, ROW)
    run = save(tmp_path / "new.json", dataclasses.replace(ROW, **new))
    assert main(["bench", "--check", str(run)]) == code
    assert capsys.readouterr().out == said


def test_check_counts_exactly(tmp_path: pathlib.Path) -> None:
    before = dataclasses.replace(ROW, evidence="modelled", counts={"chunk_rows": 100.0, "bytes": 5.0})
    now = dataclasses.replace(before, counts={"chunk_rows": 101.0, "bytes": 4.0})
    compared, findings, missing = check.compare([before], [now])
    assert (compared, missing) == (1, [])
    assert [str(f) for f in findings] == [
        "gptoss E=32 T=8 random (fused): chunk_rows 101, baseline 100 (1.010 x)"
    ]


def test_check_without_anything_to_compare_is_an_error(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    baseline_folder(tmp_path, monkeypatch, ROW)
    other = save(tmp_path / "new.json", dataclasses.replace(ROW, device="Another"))
    assert main(["bench", "--check", str(other)]) == 2
    assert "no row to compare with; allowed: rows of A processor" in capsys.readouterr().err
    assert main(["bench", "--check"]) == 2
    assert "here: left out: its rows are of A processor" in capsys.readouterr().err


def test_check_without_a_baseline_is_an_error(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    baseline_folder(tmp_path, monkeypatch)
    assert main(["bench", "--check"]) == 2
    assert "no baseline; allowed: files of rows" in capsys.readouterr().err


def test_the_committed_baseline_can_be_read() -> None:
    for found in check.baselines().values():
        assert len({(row.device, row.evidence) for row in found}) == 1
        assert {row.impl for row in found} <= {"fused", "launched"}
