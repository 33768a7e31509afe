"""The decode kernel's INT4 products on a GPU against the reference; what is compiled of it, and when it is taken."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kernels.cuda.int4_calls import (
    EIGHT,
    FORMATS,
    LAYERS,
    SIXTEEN,
    SPLITS,
    UNWRITTEN,
    infinite,
    layer,
    projections,
    weight,
)
from torch import Tensor

from mxk_compile.kernels.cuda import build, decode_project, grouped, int4_splits, operands, schedule, tiles
from mxk_compile.kernels.cuda.devices import HOPPER
from mxk_compile.kernels.cuda.int4_splits import Split, Weight
from mxk_compile.kernels.cuda.schedule import Problem, Product, Schedule
from mxk_compile.ops.project import experts_of_rows, reference
from mxk_compile.testing import most_rel_l2, rel_l2

Force = Callable[[str], None]
MOST_ERROR = 2.5e-3  # of a layer against fp32, its intermediate not rounded
LIMIT = HOPPER.shared_bytes
KIMI = {"hidden_size": 7168, "intermediate_size": 2048, "num_experts": 4, "row_order": "gate_up"}


@pytest.fixture
def force_product(monkeypatch: pytest.MonkeyPatch) -> Force:
    """Makes every projection run by the decode kernel with the split of this name, or by prefill for an empty one."""

    def apply(name: str) -> None:
        chosen = Schedule.parse(SPLITS[name]) if name else Schedule("prefill", sizes=(16,))
        monkeypatch.setattr(grouped, "choose_of_product", lambda product: chosen)
        grouped._prepared.clear()

    return apply


@pytest.mark.gpu
@pytest.mark.parametrize("split", [None, *SPLITS])
@pytest.mark.parametrize("name", LAYERS)
def test_layers(name: str, split: str | None, force: Force) -> None:
    own, make = LAYERS[name]
    force(SPLITS[split or own])
    case = make(device="cuda")
    expected, result = case.reference(round_intermediate=True), case.fused()
    assert rel_l2(result, expected) <= most_rel_l2(expected)
    assert bool((result[(expected == 0).all(-1)] == 0).all())
    assert torch.equal(result, torch.ops.mxk.moe.lists(*case.routing, *case.lists, **case.attributes))


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 4, 6])
def test_the_shape_of_kimi(num_tokens: int) -> None:
    case = layer(num_tokens=num_tokens, device="cuda", **KIMI)
    expected, result = case.reference(round_intermediate=True), case.fused()
    assert rel_l2(result, expected) <= most_rel_l2(expected)
    assert rel_l2(result, case.reference()) <= MOST_ERROR


@pytest.mark.gpu
@pytest.mark.parametrize("split", SPLITS)
def test_infinities_come_out_as_in_the_reference(split: str, force: Force) -> None:
    force(SPLITS[split])
    case = infinite(layer(num_tokens=6, hidden_size=640, intermediate_size=288, device="cuda"))
    result, expected = case.fused().float(), case.reference(round_intermediate=True).bfloat16().float()
    assert torch.equal(result.isnan(), expected.isnan())
    assert torch.equal(result.isinf(), expected.isinf())
    assert 0 < int(expected.isfinite().sum()) < expected.numel()


@pytest.mark.gpu
@pytest.mark.parametrize("split", SPLITS)
def test_fifty_runs_give_the_same_bits(split: str, force: Force) -> None:
    force(SPLITS[split])
    case = layer(num_tokens=24, hidden_size=2816, intermediate_size=704, device="cuda")
    first = case.fused()
    assert all(torch.equal(case.fused(), first) for _ in range(50))


def run(overload: str, out: Tensor, *args: Any, **attributes: Any) -> Tensor:
    assert grouped.project(lambda *_, **__: None, overload, out, *args, **attributes) is None
    return out


@pytest.mark.gpu
@pytest.mark.parametrize(("group", "zero", "dtype"), FORMATS)
@pytest.mark.parametrize(
    ("inputs", "split"), [*((256, split) for split in SPLITS), (256, ""), (7168, EIGHT), (7168, "")]
)
def test_projections(
    inputs: int, split: str, group: int, zero: bool, dtype: torch.dtype, force_product: Force
) -> None:
    force_product(split)
    held = [part if part is None else part.cuda() for part in weight(6, 80, inputs, group, zero, dtype)]
    for overload, x, routing, num_rows, more in projections(inputs):
        attributes = {"weight_format": "uint4", **more}
        x, routing = x.cuda(), tuple(tensor.cuda() for tensor in routing)
        out = torch.full((num_rows, 80), UNWRITTEN, dtype=torch.bfloat16, device="cuda")
        expected = out.float()
        reference(overload, expected, x, *routing, *held, **attributes)
        results = [run(overload, out.clone(), x, *routing, *held, **attributes) for _ in range(20)]
        assert all(torch.equal(result, results[0]) for result in results)
        written = experts_of_rows(overload, num_rows, 6, routing, attributes) >= 0
        assert bool((results[0][~written] == UNWRITTEN).all()), "other rows are not written"
        most = most_rel_l2(expected[written]) if split else MOST_ERROR
        assert rel_l2(results[0][written], expected[written]) <= most


@pytest.mark.gpu
def test_a_cuda_graph_holds_a_projection(force_product: Force) -> None:
    force_product(SIXTEEN)
    held = [part if part is None else part.cuda() for part in weight(6, 80, 512, 32)]
    x, ids = torch.randn(9, 512, device="cuda").bfloat16(), torch.arange(18, device="cuda").view(9, 2) % 6
    out = torch.empty(18, 80, dtype=torch.bfloat16, device="cuda")
    attributes = {"weight_format": "uint4", "top_k": 2}
    expected = run("routes", out, x, ids, *held, **attributes).clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run("routes", out, x, ids, *held, **attributes)
    for _ in range(3):
        out.zero_()
        graph.replay()
        assert torch.equal(out, expected)


def product(rows: float, most_rows: int = 0, columns: int = 7168, weight_format: str = "uint4") -> Schedule:
    held = Weight.common(columns)
    routes = 48 * (most_rows or round(rows))
    return schedule.heuristic_of_product(
        Product(weight_format, 48, 4096, held, rows, False, routes, most_rows, HOPPER)
    )


def test_few_rows_an_expert_decode_and_many_prefill() -> None:
    """As measured: of K = 7168 registers hold eight rows, and shared memory eight more; of 2048 sixteen."""
    chosen = [product(rows) for rows in (3.4, 5, 8.3, 340)]
    assert [each.kernel for each in chosen] == ["decode"] * 3 + ["prefill"]
    assert [dict(each.macros).get("laid", 0) for each in chosen] == [0, 0, 1, 0]
    assert [product(rows, 256).kernel for rows in (8, 16, 64)] == ["decode", "decode", "prefill"]
    assert [product(rows, 0, 2048).kernel for rows in (3.4, 8.3, 43)] == ["decode"] * 2 + ["prefill"]
    assert [product(rows, 64, 2048).kernel for rows in (8, 16, 32)] == ["decode"] * 2 + ["prefill"]
    assert product(3, weight_format="mxfp4").kernel == "prefill"
    kinds = [
        schedule.heuristic(Problem("some device", "uint4", 48, 2048, 7168, 8, t, HOPPER)).kernel
        for t in (1, 20, 50, 1024)
    ]
    assert kinds == ["decode"] * 3 + ["prefill"]


@pytest.mark.parametrize(("rows", "best"), [(3.4, (2, 2)), (8.3, (4, 2))])
def test_an_expert_is_read_once_where_that_is_cheaper(rows: float, best: tuple[int, int]) -> None:
    chosen = dict(product(rows, columns=2048).macros)
    assert (chosen["column_tiles"], chosen["units"]) == best


def test_likelihoods_are_of_the_mean() -> None:
    for rows in (3.4, 8.3, 40):
        likely = tiles.likely_rows(rows, even=False)
        assert sum(likely.values()) == pytest.approx(1)
        assert sum(count * part for count, part in likely.items()) == pytest.approx(rows, rel=0.1)


def test_what_does_not_fit_is_left_to_prefill() -> None:
    assert int4_splits.of_layer(65536, 2048, 48, 8, LIMIT) == ()
    assert int4_splits.of_layer(7168, 2048, 48, 8, LIMIT)
    assert int4_splits.of_layer(7168, 2048, 48, 8, 64 * 1024) == ()
    assert not Split.of((("column_tiles", 3),)).fits((Weight.common(256),), 4, LIMIT), "rows come in eights"
    assert not Split(2, 4).fits((Weight.common(96),), 4, LIMIT), "a unit a warp of the epilogue"
    parts = tuple(operands.operand("weight", part, 16) for part in weight(6, 72, 256, 32))
    wanted = Schedule.parse(SPLITS[EIGHT])
    held = operands.sizes_of("uint4", 256, 32, *parts[1:])
    assert not decode_project.runs("routes", wanted, held, parts, 6, (40, 72), HOPPER)
    assert not decode_project.runs("contiguous", wanted, held, parts, 6, (40, 80), HOPPER)
    assert decode_project.runs("sorted", wanted, held, parts, 6, (40, 80), HOPPER)
    places = dict(wanted.macros)["max_routes"]  # of routes, of masked rows in column blocks
    assert decode_project.runs("sorted", wanted, held, parts, 6, (places, 80), HOPPER)
    assert not decode_project.runs("sorted", wanted, held, parts, 6, (places + 1, 80), HOPPER)
    assert decode_project.runs("masked", wanted, held, parts, 6, (6 * 64, 80), HOPPER)
    assert not decode_project.runs("masked", wanted, held, parts, 6, (6 * 4096, 80), HOPPER)


@pytest.mark.skipif(build.missing() is not None, reason=f"NVRTC: {build.missing()}")
@pytest.mark.slow
@pytest.mark.parametrize(
    "split", [Split(2, 2), Split(2, 1), Split(4, 2), Split(4, 1), Split(8, 2), Split(4, 1, chunk=56, laid=1)]
)
@pytest.mark.parametrize(("columns", "scales", "zeros"), [(7168, 0, 0), (2048, 0, 0), (2048, 2, 1)])
def test_what_is_said_to_fit_compiles(columns: int, scales: int, zeros: int, split: Split) -> None:
    """Shared memory is asserted in the source."""
    held = Weight(columns, columns // 32 * (4 if scales == 2 else 2), columns // 32 * zeros)
    for masked, room in ((False, 512), (True, 1536)):
        chosen = dataclasses.replace(split, max_routes=room)
        if not chosen.fits((held,), 48, LIMIT, masked):
            continue
        macros = {
            **{f"MXK_{name.upper()}": value for name, value in chosen.macros},
            **{"MXK_FORMAT": 1, "MXK_SCALES": scales, "MXK_ZEROS": zeros, "MXK_PROJECT": 3 if masked else 1},
            **{"MXK_HIDDEN": 4096, "MXK_INTER": columns, "MXK_EXPERTS": 48, "MXK_TOP_K": 8},
        }
        assert build.compile_nvrtc("moe_decode.cu", build.options_for(HOPPER, macros)).startswith(b"\x7fELF")
