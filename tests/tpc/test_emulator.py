"""The TPC emulator: calls, counters and lane rules against independent numpy models; what it refuses."""

from __future__ import annotations

import os
import pathlib
import tempfile
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from mxk_compile.errors import KernelError
from mxk_compile.kernels.tpc import emulate
from mxk_compile.ops.formats import mxfp4

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


def bits(values: np.ndarray) -> np.ndarray:
    """fp32 to bf16 bits, nearest even; no NaN among them."""
    u = values.astype(np.float32).view(np.uint32)
    return ((u + 0x7FFF + ((u >> 16) & 1)) >> 16).astype(np.uint16)


def test_lane_rules() -> None:
    generator = np.random.default_rng(0)
    # bf16 of moderate size: exponents around that of 1.
    x = bits(generator.standard_normal(128))
    y = bits(generator.standard_normal(128))
    control = generator.integers(0, 256, 256, dtype=np.uint8)
    words = generator.integers(0, 2**16, (1, 128)).astype(np.uint16)
    a, b = x.view(np.uint8), y.view(np.uint8)
    inputs = [torch.from_numpy(array) for array in (a, b, control, words.view(np.int16))]
    outputs = [emulate.Output((30, 256), torch.uint8), emulate.Output((1, 128), torch.int16)]
    (out, packed), _ = emulate.build(SOURCES / "lanes.c").run(inputs, outputs, invocations=1)

    wide_x, wide_y = ((v.astype(np.uint32) << 16).view(np.float32) for v in (x, y))
    product = wide_x.astype(np.float64) * wide_y  # exact
    plus = (np.tile([1.5, -0.25], 64) + product).astype(np.float32)
    minus = (np.tile([1.5, -0.25], 64) - product).astype(np.float32)
    dual, dual_b = a.reshape(4, 64), b.reshape(4, 64)
    mask = np.array([0x00FFFF0F >> k & 1 for k in range(32)], dtype=bool)
    masked = dual_b.reshape(4, 2, 32).copy()
    for group, (source, enabled) in enumerate(zip((2, 0, 3, 1), (1, 2, 0, 3), strict=True)):
        for half in range(2):
            if enabled >> half & 1:
                masked[group, half][mask] = dual.reshape(4, 2, 32)[source, half][mask]
    single = dual_b.copy()
    single[3, :32] = dual[1, :32]
    swapped = a.reshape(4, 2, 32)[:, ::-1]
    partly = b.reshape(4, 2, 32).copy()
    some = np.array([0xF0F0F0F0 >> k & 1 for k in range(32)], dtype=bool)
    for group in (1, 3):
        partly[group, 0][some] = a.reshape(4, 2, 32)[group, 1][some]

    def shuffled(source: np.ndarray, income: np.ndarray, control: np.ndarray, in_group: int) -> np.ndarray:
        result = income.copy()
        for lane, byte in enumerate(control):
            if byte & 0x80:
                start = lane // (2 * in_group) * 2 * in_group
                result[lane] = source[start + (byte >> 5 & 1) * in_group + (byte & 31)]
        return result

    elements = np.array(mxfp4.ELEMENTS, dtype=np.float32)
    nibble = x & 15
    high = x >> 8
    words_a, words_b = a.view(np.uint32), b.view(np.uint32)
    smaller = (words_a & 0x3FFFFFFF).view(np.float32) < (words_b & 0x3FFFFFFF).view(np.float32)
    expected = [
        *(wide_x[0::2], wide_x[1::2], bits(product.astype(np.float32))),
        *(plus[0::2], plus[1::2], minus[0::2], minus[1::2], bits(product)),
        *(dual[[2, 0, 3, 1]], masked, single, swapped, partly),
        shuffled(a, b, control, 32),
        shuffled(x, y, control[0::2] & 0xAF, 16),
        bits(elements[nibble]),
        bits(nibble.astype(np.float32) - 8),
        bits(np.where(nibble < 8, nibble, nibble.astype(np.int32) - 16).astype(np.float32)),
        *(bits(elements[high & 15]), bits(elements[high >> 4])),
        x >> (y & 15),
        np.where(smaller, words_a, words_b),
        # Control 0xa5 in every byte: element 5 of the upper group.
        np.repeat(words_a.reshape(4, 2, 8)[:, 1, 5], 16),
        words.reshape(2, 64).T,
    ]
    for row, value in enumerate(expected):
        given = np.ascontiguousarray(value).view(np.uint8).reshape(-1)
        assert np.array_equal(out[row].numpy(), given), f"row {row}"
    assert np.array_equal(packed.numpy().view(np.uint16)[0], x.reshape(64, 2).T.reshape(-1))


FAULTS = {
    1: "access outside tensor 0 at (0, 4, 0, 0, 0) of size (128, 4, 1, 1, 1)",
    2: "load outside tensor 0 at (-1, 0, 0, 0, 0)",
    3: "load outside tensor 0 at (256, 0, 0, 0, 0)",
    4: "store to input tensor 0 at (0, 0, 0, 0, 0)",
    5: "v_f32_add_b: operand was never written",
    6: "local memory: operand was never written",
    7: "v_f32_shuffle_b: control bytes of one element differ",
    8: "v_f32_add_b: switches 0x80 are not modelled",
    9: "load without aso from output tensor 2 at (0, 0, 0, 0, 0)",
    10: "element written by two invocations in tensor 2 at (0, 0, 0, 0, 0)",
    11: "gen_addr outside tensor 1 at (3, 2, 0, 0, 0) of size (3, 2, 1, 1, 1)",
    12: "s_i32_ld_g: address outside every tensor",
    13: "v_bf16_lookup_1c: this form needs SW_BV16",
    14: "v_bf16_lookup_1c: index of at least 16 in a table of 16",
    15: "v_bf16_lookup_1c: no table of function id 77",
    16: "v_u8_ld_tnsr_b: elements of 1 bytes, tensor 0 has elements of 4",
    17: "v_u32_shl_b: shift count outside 0..31",
    18: "store outside tensor 2 at (256,",
    19: "v_f32_shuffle_b: source element beyond the group",
    20: "index 4 outside an array",
    21: "v_f32_st_tnsr_partial: lanes 61..64 of 64",
    22: "get_dim_size(3, 0)",
    23: "index -1515870811 outside an array",  # never written: poison 0xa5a5a5a5
    24: "access to no memory",
}


@pytest.mark.parametrize("which", FAULTS)
def test_what_the_device_does_not_do_ends_the_run(which: int) -> None:
    kernel = emulate.build(SOURCES / "faults.c")
    x, ids = torch.ones(4, 128), torch.zeros(2, 3, dtype=torch.int32)
    outputs = [emulate.Output((4, 128), torch.float32)]
    kernel.run([x, ids], outputs, [0])
    with pytest.raises(KernelError) as raised:
        kernel.run([x, ids], outputs, [which])
    assert f"faults, invocation {emulate.invocation_order(24, 0)[which == 10]}: {FAULTS[which]}" in str(
        raised.value
    )
    kernel.run([x, ids], outputs, [0])  # the next call is not hurt


def test_threads_take_turns() -> None:
    """A kernel's local memory is static: two calls at once would mix."""
    inputs = [torch.randn(2000, 100) for _ in range(4)]

    def scale(x: torch.Tensor) -> torch.Tensor:
        kernel = emulate.build(SOURCES / "scale.c")
        return kernel.run([x], [emulate.Output((2000, 100), torch.float32)], [0.5, 2000, 100])[0][0]

    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            for x, y in zip(inputs, pool.map(scale, inputs), strict=True):
                assert torch.equal(y, x * 0.5)


def test_a_cache_folder_behind_a_link_is_refused(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").mkdir(mode=0o700)
    (tmp_path / f"mxk-tpc-emulator-{os.getuid()}").symlink_to(tmp_path / "mine")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(KernelError, match="is not this user's own"):
        emulate.cache_folder()
