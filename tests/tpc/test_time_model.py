"""The time model against the published rows that it is fitted to."""

from __future__ import annotations

import dataclasses

import pytest

from mxk_compile.kernels.tpc import time_model
from mxk_compile.kernels.tpc.published import PublishedRow
from mxk_compile.kernels.tpc.time_model import FITTED
from mxk_compile.variants import VARIANTS

MODEL = time_model.calibrated()


@pytest.mark.parametrize("row", FITTED, ids=lambda row: f"{row.variant}-{row.num_experts}-{row.local_routes}")
def test_every_published_row_within_five_percent(row: PublishedRow) -> None:
    variant = VARIANTS[row.variant]
    predicted = MODEL.predict_us(variant.hidden_size, variant.intermediate_size, row.local_routes)
    assert predicted == pytest.approx(row.kernel_us, rel=0.05)


def test_constants() -> None:
    assert dataclasses.astuple(MODEL) == pytest.approx((23.3, 1.33, 0.01299), rel=0.01)


def test_chunk_rows_of_the_published_route() -> None:
    # gpt-oss: 5760 rows of 6 chunks, 2880 rows of 6 chunks, on 24 TPCs.
    assert time_model.chunk_rows(2880, 2880, 1) == (5760 * 6 + 2880 * 6) / 24
    # dsv41: I = 2304 is four and a half chunks.
    assert time_model.chunk_rows(5120, 2304, 2) == 2 * (4608 * 10 + 5120 * 5) / 24


def test_fewer_ops_take_less_until_the_load_slot_binds() -> None:
    sizes = 6144, 1024, 64
    rows = time_model.chunk_rows(*sizes) * MODEL.chunk_row_us
    whole = MODEL.predict_us(*sizes)
    assert whole - MODEL.predict_us(*sizes, 8.5) == pytest.approx(rows / 2)
    assert MODEL.predict_us(*sizes, 8.5, 10.5) == MODEL.predict_us(*sizes, 10.5)
