"""The TPC emulator: calls, counters and lane rules against independent numpy models; what it refuses."""

from __future__ import annotations

import pathlib

import torch

from mxk_compile.kernels.tpc import emulate

SOURCES = pathlib.Path(__file__).parent / "emulated"


def test_a_kernel_runs_on_torch_tensors_and_is_counted() -> None:
    kernel = emulate.build(SOURCES / "scale.c")
    x = torch.randn(50, 100)
    (y,), counters = kernel.run([x], [emulate.Output((50, 100), torch.float32)], [0.5, 50, 100])
    assert torch.equal(y, x * 0.5)
    assert counters.unwritten == (0,)
    assert counters.ops["chunk"] == {"ld_tnsr": 100, "mul": 100, "st_l": 100, "ld_l": 100, "st_tnsr": 100}
    assert (counters.vlm_bytes, counters.slm_bytes, counters.vlm_limit) == (512, 4, 80 * 1024)
    assert counters.padded_lanes == counters.culled_lanes == 50 * 28
    assert counters.bytes_loaded == counters.bytes_stored == x.nbytes
