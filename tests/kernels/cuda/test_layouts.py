"""Structs that are declared in C++ and packed in Python: their sizes, as NVRTC and as g++ have them."""

from __future__ import annotations

import re
import struct

import pytest
from kernels.cuda import emulator

from mxk_compile.kernels.cuda import build, decode, dequant, driver, grouped, prefill
from mxk_compile.kernels.cuda.devices import HOPPER
from mxk_compile.kernels.tpc.elf import sections

BEFORE_ARGUMENTS = 0x210  # bytes of the constant bank of sm_90 ahead of a kernel's arguments
ALIGNMENT = {"moe_decode.cu": 64}  # of arguments that hold tensor maps
LAYOUTS = {
    "dequant.cu": dequant._DEQUANT,
    "groups.cu": grouped._GROUPS,
    "moe_decode.cu": decode.DECODE,
    "prefill.cu": prefill.GEMM,
    "routing.cu": prefill.ROUTING,
}


def test_every_source_is_here() -> None:
    assert sorted(LAYOUTS) == sorted(path.name for path in build.SOURCES.glob("*.cu"))


def argument_sizes(name: str, macros: dict[str, int], alignment: int) -> set[int]:
    """Of the kernels of a source, as compiled."""
    before = -(-BEFORE_ARGUMENTS // alignment) * alignment
    code = build.compile_nvrtc(name, build.options_for(HOPPER, macros))
    return {
        len(content) - before
        for section, content in sections(code).items()
        if section.startswith(".nv.constant0.")
    }


@pytest.mark.skipif(build.missing() is not None, reason=f"NVRTC: {build.missing()}")
@pytest.mark.parametrize("name", LAYOUTS)
def test_compiled_arguments_have_the_size_that_is_packed(name: str) -> None:
    assert argument_sizes(name, {}, ALIGNMENT.get(name, 8)) == {LAYOUTS[name].size}


@pytest.mark.skipif(build.missing() is not None, reason=f"NVRTC: {build.missing()}")
def test_rows_in_place_have_their_map_ahead_of_the_argument() -> None:
    macros = {"MXK_PROJECT": 1, "MXK_ROWS": prefill.IN_PLACE}
    assert argument_sizes("prefill.cu", macros, 64) == {prefill.MAPPED_GEMM.size}


@pytest.mark.skipif(emulator.missing() is not None, reason=f"emulator: {emulator.missing()}")
@pytest.mark.parametrize("name", LAYOUTS)
def test_emulated_arguments_have_the_size_that_is_packed(name: str) -> None:
    layout: struct.Struct = LAYOUTS[name]
    kernels = re.findall(r'extern "C" __global__ .*?(\w+)\(const', (build.SOURCES / name).read_text())
    assert kernels
    with emulator.use() as machine:
        library = driver.Library(build.build(name, {}, HOPPER, build.compile_nvrtc, lambda: ""))
        # Of two the first kernel is there with MXK_PROJECT only.
        for kernel in kernels[1:] if name in ("prefill.cu", "moe_decode.cu") else kernels:
            library.kernel(kernel)
        sizes = {machine.argument_bytes(address) for _, address in machine.kernels}
    assert sizes == {layout.size}
