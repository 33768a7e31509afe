"""Points, draws and rotations: routes, hits and bytes counted anew, and the published table's sums."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest
import torch

from mxk_compile.bench import cases, points
from mxk_compile.bench.points import Point
from mxk_compile.kernels.tpc.published import PUBLISHED
from mxk_compile.testing import random_layer, variant_case
from mxk_compile.variants import VARIANTS


@pytest.mark.parametrize("point", points.document(["gptoss", "dsv41"]), ids=str)
def test_a_published_call_has_the_published_number_of_local_routes(point: Point) -> None:
    _, ids, weights = cases.draw(point)
    assert ids.shape == weights.shape == (point.num_tokens, VARIANTS[point.variant].top_k)
    assert sum(expert < point.num_experts for token in ids.tolist() for expert in token) == point.local_routes
    assert all(len(set(token)) == len(token) for token in ids.tolist())
    assert int(ids.max()) < (point.num_experts if point.routing == "hot" else point.all_experts)


def test_the_published_table_is_whole() -> None:
    assert len(PUBLISHED) == 45
    sums = sum(row.stock_us for row in PUBLISHED), sum(row.kernel_us for row in PUBLISHED)
    assert sums == pytest.approx((105487.3, 24512.9))


def test_every_model_row_has_its_number_of_all_experts() -> None:
    assert set(points.ALL_EXPERTS) == set(VARIANTS)


def test_a_router_is_less_even_than_a_random_draw() -> None:
    counts = []
    for routing in ("random", "router"):
        _, ids, _ = cases.draw(Point("gptoss", 128, 512, routing))
        counts.append(ids.flatten().bincount(minlength=128).float().std())
    assert counts[1] > 3 * counts[0]


def test_even_routing_deals_routes_in_turn() -> None:
    _, ids, _ = cases.draw(Point("gptoss", 8, 6, "even"))
    assert ids.flatten().bincount(minlength=8).tolist() == [3] * 8


@pytest.mark.parametrize("name", ["gptoss", "kimi_int4", "muse"])
def test_a_layer_looks_like_a_case_of_its_row(name: str) -> None:
    small = dataclasses.replace(VARIANTS[name], hidden_size=64, intermediate_size=32)
    layer = random_layer(small, 3, 0, "cpu")
    like = variant_case(small, num_experts=3)
    assert layer.attributes == like.attributes
    for made, expected in zip(layer.weights, like.weights, strict=True):
        assert (made is None) == (expected is None)
        if made is not None:
            assert made.dtype == expected.dtype
            assert made.shape == expected.shape
    again = random_layer(small, 3, 0, "cpu")
    assert torch.equal(layer.w13, again.w13)
    assert not torch.equal(layer.w13, random_layer(small, 3, 1, "cpu").w13)


def test_a_rotation_keeps_routes_and_hits_and_walks_over_all_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        VARIANTS, "gptoss", dataclasses.replace(VARIANTS["gptoss"], hidden_size=64, intermediate_size=32)
    )
    point = Point("gptoss", 16, 3, "random")
    layers = [random_layer(VARIANTS["gptoss"], 16, seed, "cpu") for seed in range(2)]
    of_expert = (64 * 64 + 64 * 32) // 2 + 64 * 2 + 64
    found = cases.rotation(point, layers, cache_bytes=16 * of_expert, chain=8)
    assert found.expert_bytes == of_expert
    assert len(found.calls) % 8 == 0
    first = found.calls[0][1]
    hits = set()
    for layer, ids in found.calls:
        local = ids < 16
        assert torch.equal(local, first < 16)
        assert torch.equal(ids[~local], first[~local])
        assert len(ids[local].unique()) == found.experts_touched
        hits |= {(layer, expert) for expert in ids[local].tolist()}
    assert int((first < 16).sum()) == found.local_routes > 0
    assert len(hits) * of_expert > 2 * 16 * of_expert * 0.6
    assert found.num_bytes <= 2 * 16 * of_expert


@pytest.mark.parametrize("name", VARIANTS)
def test_bytes_are_reckoned_as_they_will_be(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    variant, point = (
        dataclasses.replace(VARIANTS[name], hidden_size=96, intermediate_size=64),
        Point(name, 2, 5, "hot"),
    )
    monkeypatch.setitem(VARIANTS, name, variant)
    layer = random_layer(variant, 2, 0, "cpu").weights
    packed = 2 * sum(tensor.nbytes for tensor in layer if tensor is not None)  # two copies
    x = cases.draw(point)[0]
    assert cases.num_bytes(point, "fused", cache_bytes=0) == packed + 4 * x.nbytes
    values = 2 * 2 * 3 * variant.hidden_size * variant.intermediate_size
    assert cases.num_bytes(point, "unpacked", cache_bytes=0) == packed + 4 * x.nbytes + 2 * values


def test_free_memory_is_what_the_system_says() -> None:
    free = cases.free_bytes("cpu")
    assert free is None or 1 << 20 < free <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@pytest.mark.parametrize("version", [1, 2])
def test_free_memory_is_no_more_than_a_container_may_take(
    version: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cases, "_CONTROL_GROUPS", tmp_path)
    of_machine = cases.free_bytes("cpu")
    folder, limit, usage = tmp_path, "memory.max", "memory.current"
    if version == 1:
        folder, limit, usage = tmp_path / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        folder.mkdir()
    (folder / limit).write_text("5000000\n")
    (folder / usage).write_text("3000000\n")
    assert cases.free_bytes("cpu") == 2000000
    name = {1: "total_inactive_file", 2: "inactive_file"}[version]
    (folder / "memory.stat").write_text(f"anon 1\n{name} 500000\nactive_file 7\n")
    assert cases.free_bytes("cpu") == 2500000
    (folder / usage).write_text("6000000\n")
    assert cases.free_bytes("cpu") == 0
    (folder / limit).write_text({1: "9223372036854771712\n", 2: "max\n"}[version])
    assert of_machine is None or cases.free_bytes("cpu") > of_machine // 2


def test_copies_hold_more_than_the_caches() -> None:
    variant = VARIANTS["gptoss"]
    of_expert = 3 * 2880 * 2880 // 2
    assert cases.num_copies(variant, 128, cache_bytes=60 << 20) == 2
    copies = cases.num_copies(variant, 8, cache_bytes=60 << 20)
    assert copies * 8 * of_expert >= 4 * (60 << 20)
    assert cases.num_copies(variant, 1, cache_bytes=1 << 30) == 4
