"""Scenarios of the chord suite: the published shapes and sums, and calls of all kinds at small sizes."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from mxk_compile.bench.chord import SCENARIOS, TABLES, TARGETS_US, Scenario, draw_routes, make_call


def find(table: str, projection: str, count: int) -> Scenario:
    (found,) = (s for s in SCENARIOS if (s.table, s.projection, s.count) == (table, projection, count))
    return found


@pytest.mark.parametrize(
    ("table", "count", "shape", "rows", "seeds", "chord_sum"),
    [
        ("prefill EP8", 2048, (48, 4096, 7168), 2048, (20260901, 20260906), 587.9),
        ("TP8", 8192, (384, 512, 7168), 65536, (20260923, 20260928), 1862.3),
        ("decode EP8", 20, (48, 4096, 7168), 160, (20260940, 20260944), 333.8),
        ("decode EP8 B300", 20, (48, 4096, 7168), 160, (20260980, 20260984), 229.8),
        ("contiguous EP8", 128, (48, 4096, 7168), 6144, None, 917.5),
        ("masked EP8", 32, (48, 4096, 7168), 1536, None, 493.4),
    ],
)
def test_published_rows(
    table: str,
    count: int,
    shape: tuple[int, int, int],
    rows: int,
    seeds: tuple[int, int] | None,
    chord_sum: float,
) -> None:
    gate_up, down = find(table, "gate_up", count), find(table, "down", count)
    experts, outputs, inputs = shape
    assert (gate_up.num_experts, gate_up.outputs, gate_up.inputs) == shape
    assert (down.num_experts, down.outputs, down.inputs) == (experts, inputs, outputs // 2)
    assert gate_up.rows == down.rows == rows
    assert seeds is None or (gate_up.seed, down.seed) == seeds
    assert gate_up.published_us is not None
    assert down.published_us is not None
    # The document's summary has one decimal of the sum of two that have one.
    assert gate_up.published_us[1] + down.published_us[1] == pytest.approx(chord_sum, abs=0.11)


def test_every_table_has_both_projections_of_each_count() -> None:
    for table in TABLES:
        counts = [
            [s.count for s in SCENARIOS if (s.table, s.projection) == (table, p)] for p in ("gate_up", "down")
        ]
        assert counts[0] == counts[1]
        assert len(TARGETS_US.get(table, counts[0])) == len(counts[0])
    assert {s.num_experts for s in SCENARIOS if "EP16" in s.table} == {24}
    assert {s.num_experts for s in SCENARIOS if "EP32" in s.table} == {12}


def test_routes_are_drawn_by_the_number_of_tokens() -> None:
    scores = torch.randn(20, 48, generator=torch.Generator().manual_seed(20))
    assert torch.equal(draw_routes(20, 48, "cpu").long(), scores.topk(8, dim=1).indices)


@pytest.mark.parametrize("table", ["decode EP8", "TP8", "contiguous EP8", "masked EP8"])
@pytest.mark.parametrize("projection", ["gate_up", "down"])
def test_small_calls(table: str, projection: str) -> None:
    scenario = next(s for s in SCENARIOS if (s.table, s.projection) == (table, projection))
    small = dataclasses.replace(
        scenario, num_experts=9, outputs=32, inputs=64, num_tokens=min(scenario.num_tokens, 5)
    )
    call = make_call(small, "cpu")
    assert call.run() is call.out
    assert call.rel_l2() < 2.5e-3
    assert call.touched == len([e for e in call.experts.unique() if e >= 0])
    assert call.flops == 2 * small.rows * 32 * 64
    weights = call.touched * (32 * 64 // 2 + 32 * 64 // 32 * 2)
    assert call.num_bytes == weights + 2 * (small.rows // call.top_k * 64 + small.rows * 32)
    # The second expert's rows alone are wrong: seen over all experts, not in a sample that leaves it out.
    call.out[call.experts == 1] = 0
    assert call.rel_l2() > 0.1
