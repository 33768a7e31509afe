"""Tile sizes of the prefill kernel: a pure function of an expert's rows."""

from __future__ import annotations

import itertools

import pytest

from mxk_compile.kernels.cuda.tiles import MOST_SIZES, TILE_SIZES, likely_rows, rows_stay, tile_sizes


@pytest.mark.parametrize("rows", [0.01, 1, 8, 31, 32, 64, 100, 127, 128, 129, 200, 512, 1000, 100000])
@pytest.mark.parametrize("even", [False, True])
def test_sizes_are_what_the_kernel_takes(rows: float, even: bool) -> None:
    sizes = tile_sizes(rows, even=even)
    assert 1 <= len(sizes) <= MOST_SIZES
    assert list(sizes) == sorted(set(sizes))
    assert set(sizes) <= set(TILE_SIZES)


@pytest.mark.parametrize(("rows", "expected"), [(16, (16,)), (100, (112,)), (128, (128,)), (512, (176,))])
def test_experts_with_as_many_rows_need_one_size(rows: int, expected: tuple[int, ...]) -> None:
    assert tile_sizes(rows, even=True) == expected


@pytest.mark.parametrize("rows", [30_000.0, 1e12, 2.0**63])
def test_more_rows_than_anybody_has_cost_the_host_no_more(rows: float) -> None:
    assert len(likely_rows(rows, even=False)) < 1000
    assert tile_sizes(rows) == tile_sizes(2000.0) == (176,)
    assert tile_sizes(rows, most=96) == tile_sizes(2000.0, most=96) == (96,)


def test_more_rows_never_want_smaller_tiles_by_much() -> None:
    largest = [tile_sizes(float(rows))[-1] for rows in (2, 8, 16, 40, 80, 150)]
    assert all(more >= fewer for fewer, more in itertools.pairwise(largest))
    assert largest[0] == 16
    assert largest[-1] == 176


@pytest.mark.parametrize(
    ("outputs", "size", "ordered", "stay"),
    [
        (4096, 128, True, True),
        (7168, 176, True, False),
        (4096, 64, True, False),
        (512, 64, True, False),
        (512, 96, False, True),
        (4096, 176, False, False),
    ],
)
def test_rows_stay_where_outputs_are_few_or_rows_many(
    outputs: int, size: int, ordered: bool, stay: bool
) -> None:
    assert rows_stay(outputs, size, ordered) == stay
