"""`mxk::project` and dequantization by the CUDA kernels, emulated on the CPU."""

from __future__ import annotations

import functools
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from kernels.cuda import emulator
from projection_calls import random_weight
from torch import Tensor

from mxk_compile.kernels.cuda import build, dequant, grouped
from mxk_compile.ops.formats import mxfp4
from mxk_compile.ops.project import experts_of_rows, reference
from mxk_compile.projections import align
from mxk_compile.testing import rel_l2

pytestmark = pytest.mark.skipif(emulator.missing() is not None, reason=f"emulator: {emulator.missing()}")

MOST_ERROR = 2.5e-3  # one bf16 rounding of the result, and of INT4's products where a scale makes them long
UNWRITTEN = -7.0
project = functools.partial(grouped.project, lambda *_, **__: None)


def check(
    overload: str, x: Tensor, routing: tuple[Tensor, ...], weight: Any, num_rows: int, **attributes: Any
) -> None:
    """Compares with the reference, and with another order; rows that are routed nowhere keep what they held.

    Once with rows of x where they lie, and once gathered: `tiles.rows_stay` says neither.
    """
    for stay in (True, False):
        with mock.patch.object(grouped, "rows_stay", return_value=stay):
            check_feed(overload, x, routing, weight, num_rows, **attributes)


def check_feed(
    overload: str, x: Tensor, routing: tuple[Tensor, ...], weight: Any, num_rows: int, **attributes: Any
) -> None:
    shape = (num_rows, weight[0].shape[1])
    expected = torch.full(shape, UNWRITTEN)
    reference(overload, expected, x, *routing, *weight, **attributes)
    results = [torch.full(shape, UNWRITTEN, dtype=torch.bfloat16) for _ in range(2)]
    assert grouped.refusal(overload, results[0], x, *routing, *weight, **attributes) is None
    for seed, out in enumerate(results):
        with emulator.use(processors=3, seed=seed):
            project(overload, out, x, *routing, *weight, **attributes)
    written = experts_of_rows(overload, num_rows, len(weight[0]), routing, attributes) >= 0
    assert torch.equal(results[0][~written].float(), expected[~written]), "other rows are not written"
    assert written.any()
    assert rel_l2(results[0][written], expected[written]) <= MOST_ERROR
    assert torch.equal(*results), "the order of threads changes no bit"


@pytest.mark.parametrize(
    ("weight_format", "zero", "inputs", "outputs"),
    [
        ("mxfp4", False, 96, 100),
        ("mxfp4", False, 256, 264),
        ("uint4", False, 96, 264),
        ("uint4", True, 256, 100),
    ],
)
def test_routes(weight_format: str, zero: bool, inputs: int, outputs: int) -> None:
    x = torch.randn(13, inputs).bfloat16()
    ids = torch.randint(-1, 7, (13, 2), dtype=torch.int32)
    weight = random_weight(5, outputs, inputs, weight_format, 64 if zero else 32, zero)
    check("routes", x, (ids,), weight, 26, weight_format=weight_format, top_k=2, experts_min=1)


def test_the_next_rows_scales_are_no_part_of_a_row() -> None:
    """3 bytes of scales a row: words of 4 hold the next row's first one, here NaN."""
    weight, scale, *rest = random_weight(2, 64, 96, "mxfp4", 32, False)
    scale[:, 1::2] = 255
    out = torch.zeros(5, 64, dtype=torch.bfloat16)
    with emulator.use(processors=2):
        project(
            "routes",
            out,
            torch.randn(5, 96).bfloat16(),
            torch.zeros(5, 1, dtype=torch.int32),
            weight,
            scale,
            *rest,
            weight_format="mxfp4",
            top_k=1,
        )
    assert out[:, 0::2].isfinite().all()
    assert out[:, 1::2].isnan().all()


@pytest.mark.parametrize("block_size", [8, 48])
def test_sorted_lists_longer_than_what_counts(block_size: int) -> None:
    x = torch.randn(20, 256).bfloat16()
    sorted_ids, expert_ids, count = align(torch.rand(20, 24).topk(4, dim=1).indices, 12, block_size, 4)
    junk = torch.full((99,), 3, dtype=torch.int32)
    expert_ids[1::3] = -1  # of another rank
    routing = (torch.cat([sorted_ids, junk]), torch.cat([expert_ids, junk]), count)
    attributes = {"weight_format": "uint4", "top_k": 4, "block_size": block_size}
    check("sorted", x, routing, random_weight(12, 264, 256, "uint4"), 80, **attributes)


@pytest.mark.parametrize("block_size", [2**30, 2**31 - 1, 2**40])
@pytest.mark.parametrize("weight_format", ["mxfp4", "uint4"])
def test_blocks_of_more_places_than_there_are(block_size: int, weight_format: str) -> None:
    """More experts than blocks are no reason for places beyond an int32; of INT4 the decode kernel runs it."""
    routing = (torch.arange(6).int(), torch.tensor([1, 0, 0]).int(), torch.tensor([5]).int())
    attributes = {"weight_format": weight_format, "top_k": 1, "block_size": block_size}
    check(
        "sorted",
        torch.randn(6, 96).bfloat16(),
        routing,
        random_weight(3, 80, 96, weight_format),
        6,
        **attributes,
    )


def test_strides_that_nothing_takes() -> None:
    weight = random_weight(1, 80, 96, "mxfp4")
    for strides in ((2**60, 2**60, 1), (2**60, 96, 1)):
        x = torch.randn(96).bfloat16().as_strided((1, 1, 96), strides)
        check("masked", x, (torch.ones(1).int(),), weight, 1, weight_format="mxfp4", expected_m=1)
        check("routes", x[0], (torch.zeros(1, 1).int(),), weight, 1, weight_format="mxfp4", top_k=1)


@pytest.mark.parametrize(("rows", "columns", "fits"), [(2**20 * 1023, 1024, True), (2**29, 1056, False)])
def test_what_an_int32_does_not_count_is_refused(rows: int, columns: int, fits: bool) -> None:
    weight = torch.empty(4, 64, columns // 2, dtype=torch.uint8, device="meta")
    out, x = (torch.empty(rows, size, dtype=torch.bfloat16, device="meta") for size in (64, columns))
    ids = torch.empty(rows, 1, dtype=torch.int32, device="meta")
    refused = grouped.refusal("routes", out, x, ids, weight, weight_format="mxfp4", top_k=1)
    most = (2**30 - 2**20) // 2
    text = f"CUDA kernels: {rows} rows or places of lists; allowed: up to {most} with K = {columns}"
    assert refused == (None if fits else text)
    lists = torch.empty(2**30, dtype=torch.int32, device="meta")
    attributes = {"weight_format": "mxfp4", "top_k": 1, "block_size": 2**20}
    refused = grouped.refusal("sorted", out[:4], x[:4], lists, lists[:1024], lists[:1], weight, **attributes)
    assert str(refused).startswith(f"CUDA kernels: {2**30} rows or places of lists; allowed:")


def test_contiguous() -> None:
    counts = (128, 5, 0, 1)
    indices = [
        torch.nn.functional.pad(torch.full((count,), expert), (0, -count % 128), value=-1)
        for expert, count in enumerate(counts)
    ]
    m_indices = torch.cat([*indices, torch.full((128,), -1)]).int()
    x = torch.randn(len(m_indices), 96).bfloat16()
    weight = random_weight(4, 264, 96, "uint4")
    check("contiguous", x, (m_indices,), weight, len(m_indices), weight_format="uint4")


@pytest.mark.parametrize(("max_m", "expected_m"), [(1, 1), (40, 20)])
def test_masked(max_m: int, expected_m: int) -> None:
    masked_m = torch.tensor([3, 0, 40, 300, -2], dtype=torch.int32)
    x = torch.randn(5, max_m, 256).bfloat16()
    weight = random_weight(5, 264, 256, "uint4")
    check("masked", x, (masked_m,), weight, 5 * max_m, weight_format="uint4", expected_m=expected_m)


FAULTS = {
    "no proxy fence": (
        "prefill_multiply.cuh",
        "if constexpr (MXK_ROWS == LISTED) copies_to_products_fence();",
        "",
    ),
    "swizzle": ("prefill_feed.cuh", "(chunk ^ (at + first) % 8) * 16", "chunk * 16"),
    "row": ("prefill_feed.cuh", "p.share > 1 ? of[i] / p.share : of[i]", "of[i]"),
    "scales of the other group": ("prefill.cuh", "NATURAL ? selector_of(part)", "NATURAL ? selector_of(0)"),
    "byte of another lane": ("prefill.cuh", "quarter | (4 + quarter) << 4", "quarter | (5 - quarter) << 4"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_the_emulator_sees_faults_of_rows_that_stay(name: str, tmp_path: Path) -> None:
    file, old, new = FAULTS[name]
    sources = tmp_path / "sources"
    shutil.copytree(build.SOURCES, sources, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    text = (sources / file).read_text()
    assert text.count(old) == 1, "say the fault anew"
    (sources / file).write_text(text.replace(old, new))
    x, ids = torch.randn(13, 256).bfloat16(), torch.randint(0, 5, (13, 2), dtype=torch.int32)
    weight, attributes = random_weight(5, 100, 256, "mxfp4"), {"weight_format": "mxfp4", "top_k": 2}
    out, expected = torch.zeros(26, 100, dtype=torch.bfloat16), torch.zeros(26, 100)
    reference("routes", expected, x, ids, *weight, **attributes)
    with (
        mock.patch.object(grouped, "rows_stay", return_value=True),
        emulator.use(sources, processors=2, seed=1),
    ):
        try:
            project("routes", out, x, ids, *weight, **attributes)
        except emulator.EmulatorError:
            return
    assert not rel_l2(out, expected) <= MOST_ERROR, "nothing is seen"


def test_dequantized_bits() -> None:
    packed = torch.randint(0, 256, (5, 77, 48), dtype=torch.uint8)
    scale = torch.randint(0, 256, (5, 77, 3), dtype=torch.uint8)
    expected = mxfp4.unpack(packed, scale).view(torch.int16)
    for weight in (packed, packed.view(torch.int32), packed.transpose(0, 1).contiguous().transpose(0, 1)):
        with emulator.use(processors=2):
            result = dequant.dequant(weight, scale)
        nan = result.isnan()
        assert torch.equal(nan, expected.view(torch.bfloat16).isnan())
        assert torch.equal(result.view(torch.int16)[~nan], expected[~nan])
