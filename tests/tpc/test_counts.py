"""Work of each kernel as counted by the emulator: as documented, and not a cycle more; what a real tpc-clang says."""

from __future__ import annotations

import functools
import pathlib
import re

import pytest
import torch
from emulated_pair import run_pair

from mxk_compile.kernels.tpc import emulate, emulated_ops, time_model
from mxk_compile.kernels.tpc.signatures import KERNELS, NUM_TPC
from mxk_compile.testing import random_case

DOCUMENT = pathlib.Path(__file__).parents[2] / "docs" / "performance" / "gaudi.md"
SIZE, E, TOP_K = 1024, 2, 2  # K = I = SIZE
LATENCY = 4  # cycles of a MAC (latencies.cpp of the public compiler)
PAIRS = {
    ("mxk_w13xib", "mxk_w2xb"): {"activation": "swiglu_oai", "row_order": "interleaved", "bias": True},
    ("mxk_w13xi", "mxk_w2x"): {"activation": "swiglu_clamp", "row_order": "interleaved"},
    ("mxk_w13x", "mxk_w2xr"): {"per_route": True},
    ("mxk_w13xt", "mxk_w2x"): {},
    ("mxk_w13i4x", "mxk_w2i4x"): {"weight_format": "uint4"},
    ("mxk_w13i4xt", "mxk_w2i4x"): {"weight_format": "uint4"},
    ("mxk_w13i4o", "mxk_w2i4o"): {"weight_format": "uint4", "pack_dim": "output", "zero": True},
}


def documented() -> dict[str, tuple[float, float, float]]:
    """VPU ops and LOAD cycles a chunk-row, VPU ops of the epilogue a row and route, by kernel."""
    rows = re.findall(
        r"^\| `(mxk_\w+)` \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|", DOCUMENT.read_text(), re.MULTILINE
    )
    return {name: (float(vpu), float(load), float(epilogue)) for name, vpu, load, epilogue in rows}


@functools.cache
def counted() -> dict[str, emulate.Counters]:
    """Counters of each kernel for one call: two tokens of two routes, all local."""
    found = {}
    for pair, attributes in PAIRS.items():
        sizes = {
            "num_tokens": 2,
            "num_experts": E,
            "top_k": TOP_K,
            "hidden_size": SIZE,
            "intermediate_size": SIZE,
        }
        limits = {"alpha": 1.702, "limit": 7.0}
        case = random_case(**{**sizes, **limits, **attributes})  # type: ignore[arg-type]
        builds = emulated_ops.Build(), emulated_ops.Build()
        found.update(zip(pair, run_pair(case, pair, builds)[1], strict=True))
    weight = torch.randint(0, 256, (96, SIZE // 2), dtype=torch.uint8)
    given = {"w": weight, "s": torch.randint(1, 255, (96, SIZE // 32), dtype=torch.uint8)}
    found["mxk_deq"] = emulated_ops.call(KERNELS["mxk_deq"], given)[1]
    return found


def per_row(counters: emulate.Counters) -> float:
    """VPU ops of the epilogue for each row of weights and route."""
    return counters.slot_ops("vpu", "epilogue") * (SIZE // 512) / counters.chunk_rows


def test_every_kernel_is_documented() -> None:
    assert set(documented()) == set(KERNELS) == set(counted())


@pytest.mark.parametrize("name", KERNELS)
def test_no_kernel_does_more_than_documented(name: str) -> None:
    counters = counted()[name]
    vpu, load, epilogue = documented()[name]
    given = counters.per_chunk_row(), counters.per_chunk_row("load")
    assert given == pytest.approx((vpu, load), abs=0.005)
    assert per_row(counters) == pytest.approx(epilogue, abs=0.005)


@pytest.mark.parametrize("name", KERNELS)
def test_limits_of_the_device(name: str) -> None:
    counters = counted()[name]
    assert counters.vlm_bytes <= counters.vlm_limit
    assert counters.slm_bytes <= emulate.SLM_BYTES
    assert counters.lut_entries <= 384  # of the table cache (TPCLutCacheCounter.cpp)
    assert counters.repeated_partial_stores == 0
    assert counters.mac_distance is None or counters.mac_distance >= LATENCY
    assert counters.unwritten == (0,)
    assert counters.slot_cycles("load", "chunk") <= counters.slot_cycles("vpu", "chunk"), "vector issue binds"


def test_chunk_rows_and_bytes_follow_the_sizes() -> None:
    routes = 2 * TOP_K
    gate_up, down = counted()["mxk_w13x"], counted()["mxk_w2x"]
    assert gate_up.chunk_rows == routes * 2 * SIZE * (SIZE // 512)
    assert down.chunk_rows == routes * SIZE * (SIZE // 512)
    assert (gate_up.chunk_rows + down.chunk_rows) / NUM_TPC == time_model.chunk_rows(SIZE, SIZE, routes)
    packed = gate_up.chunk_rows * 256 + gate_up.chunk_rows * 16
    # Each weight once a route, scales in pieces of up to 256 bytes of which 32 are used, activations once a TPC.
    assert gate_up.bytes_loaded >= packed
    assert gate_up.bytes_stored == routes * SIZE * 2


def test_growth_is_seen(tmp_path: pathlib.Path) -> None:
    for path in emulate.KERNELS.iterdir():
        (tmp_path / path.name).write_text(path.read_text())
    text = (tmp_path / "mxk_deq.c").read_text()
    old = "const uchar256 packed = next_packed;"
    assert old in text
    (tmp_path / "mxk_deq.c").write_text(
        text.replace(old, "const uchar256 packed = v_u8_or_b(next_packed, 0);")
    )
    given = {"w": torch.zeros(24, 256, dtype=torch.uint8), "s": torch.zeros(24, 16, dtype=torch.uint8)}
    _, counters = emulated_ops.call(KERNELS["mxk_deq"], given, emulated_ops.Build(folder=tmp_path))
    assert counters.per_chunk_row() == documented()["mxk_deq"][0] + 1
