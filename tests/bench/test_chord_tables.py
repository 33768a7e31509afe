"""The chord suite's tables: published sums, and measured rows with their errors in the right places."""

from __future__ import annotations

import dataclasses
import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from mxk_compile.bench import chord_rows
from mxk_compile.bench.chord import SCENARIOS, Call, make_call
from mxk_compile.bench.chord_tables import LAUNCHED, tables
from mxk_compile.bench.rows import Row
from mxk_compile.bench.timing import Method


def lines(text: str, table: str) -> list[list[str]]:
    """Cells of the rows of a table."""
    body = text.split(f"### {table}\n\n")[1].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in body]


def test_published_sums_stand_without_a_measurement() -> None:
    text = tables([])
    assert text.count("### ") == 6
    assert lines(text, "decode EP8")[0] == ["20", *[""] * 7, "285", "413.8", "333.8"]
    assert lines(text, "decode EP8 B300")[0] == ["20", *[""] * 8, "493.9", "229.8"]
    assert [line[8] for line in lines(text, "TP8")] == ["370", "470", "760", "1400", "2750"]


def test_measured_rows() -> None:
    rows: list[Row] = []
    for place, scenario in enumerate(s for s in SCENARIOS if s.table in ("masked EP8", "contiguous EP32")):
        small = dataclasses.replace(scenario, num_experts=8, outputs=8, inputs=32)
        row = chord_rows._measured(make_call(small, "cpu"), Method(chain=1, replays=1, seconds=0.1), None)
        assert row.rel_l2 is not None
        assert row.rel_l2 < 2.5e-3
        rows.append(dataclasses.replace(row, us=100.0 + place, floor_us=50.0, rel_l2=2e-3))
        rows.append(dataclasses.replace(rows[-1], impl=LAUNCHED, us=200.0))
    text = tables(rows)
    assert text.count("### ") == 7
    masked = ["8", "100.0", "2.0e-03", "104.0", "2.0e-03", "204.0", "400.0", "100.0", "310", "475.3", "381.3"]
    assert lines(text, "masked EP8")[0] == masked
    assert lines(text, "contiguous EP32")[0][5:] == ["219.0", "400.0", "100.0", "", "", ""]
    # One of two projections alone makes no sum.
    assert lines(tables(rows[:2]), "masked EP8")[0][3:7] == ["", "", "", ""]


def test_what_else_was_measured_stands_in_columns_of_its_own() -> None:
    scenario = next(s for s in SCENARIOS if s.table == "masked EP16")
    small = dataclasses.replace(scenario, num_experts=8, outputs=8, inputs=32)
    row = chord_rows._measured(make_call(small, "cpu"), Method(chain=1, replays=1, seconds=0.1), None)
    peer = dataclasses.replace(row, impl="a peer", us=30.0)
    rows = [peer, dataclasses.replace(peer, impl=f"a peer, {LAUNCHED}", us=40.0)]
    rows += [dataclasses.replace(r, variant=r.variant.replace("gate_up", "down")) for r in rows]
    published = list(chord_rows.run("cpu", "humming", Method(), quick=True, say=pytest.fail))
    text = tables([*rows, *published])
    assert "| Humming | Chord | a peer | a peer, launched |" in text
    assert lines(text, "masked EP16")[0] == ["8", *[""] * 10, "60.0", "80.0"]
    assert lines(text, "masked EP8")[0][8:] == ["310", "475.3", "381.3", "", ""]


def test_a_peer_is_held_against_fp32_by_its_own_result(monkeypatch: pytest.MonkeyPatch) -> None:
    peer = ModuleType("a peer")
    wrong: list[bool] = []

    def projection(call: Call) -> Call:
        out = torch.empty_like(call.out)

        def run() -> torch.Tensor:
            call.run()
            return out.copy_(call.out * 1.5 if wrong else call.out)

        return dataclasses.replace(call, run=run, out=out)

    peer.projection, peer.version = projection, lambda: "7"  # type: ignore[attr-defined]
    monkeypatch.setattr(chord_rows.implementations, "peer_on", lambda name, device: peer)
    scenario = next(s for s in SCENARIOS if s.table == "masked EP8")
    small = dataclasses.replace(scenario, num_experts=8, outputs=8, inputs=32)
    monkeypatch.setattr(chord_rows, "chosen", lambda quick: [small])
    for expected in (2e-3, 0.5):
        (row,) = chord_rows.run("cpu", chord_rows.PEER, Method(1, 1, 0.1), quick=True, say=pytest.fail)
        assert (row.impl, row.versions[row.impl]) == (chord_rows.PEER, "7")
        assert row.rel_l2 == pytest.approx(expected, rel=0.25)
        wrong.append(True)


def test_launched_rows_are_timed_as_the_published_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    testing = ModuleType("triton.testing")
    given: list[dict[str, Any]] = []

    def do_bench(run: object, **options: Any) -> float:
        given.append(options)
        return 0.25  # milliseconds

    testing.do_bench = do_bench  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "triton", ModuleType("triton"))
    monkeypatch.setitem(sys.modules, "triton.testing", testing)
    scenario = next(s for s in SCENARIOS if s.table == "masked EP8")
    call = make_call(dataclasses.replace(scenario, num_experts=8, outputs=8, inputs=32), "cpu")
    row = chord_rows._measured(call, Method(chain=1, replays=1, seconds=0.1), None)
    launched = chord_rows._launched(call, row, quick=False)
    assert (launched.us, launched.impl, launched.rel_l2) == (250.0, LAUNCHED, row.rel_l2)
    assert given == [{"warmup": 100, "rep": 1000, "return_mode": "mean"}]
