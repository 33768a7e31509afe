"""Structs that are declared in C++ and packed in Python: their sizes, as the compiled kernels hold them."""

from __future__ import annotations

import struct

import pytest

from mxk_compile.kernels.cuda import build, decode, dequant, grouped, prefill
from mxk_compile.kernels.cuda.devices import HOPPER
from mxk_compile.kernels.tpc.elf import sections

pytestmark = pytest.mark.skipif(build.missing() is not None, reason=f"NVRTC: {build.missing()}")

BEFORE_ARGUMENTS = 0x210  # bytes of the constant bank of sm_90 ahead of a kernel's arguments
ALIGNMENT = {"moe_decode.cu": 64}  # of arguments that hold tensor maps
LAYOUTS = {
    "dequant.cu": dequant._DEQUANT,
    "groups.cu": grouped._GROUPS,
    "moe_decode.cu": decode._DECODE,
    "prefill.cu": prefill.GEMM,
    "routing.cu": prefill.ROUTING,
}


def test_every_source_is_here() -> None:
    assert sorted(LAYOUTS) == sorted(path.name for path in build.SOURCES.glob("*.cu"))


@pytest.mark.parametrize("name", LAYOUTS)
def test_arguments_have_the_size_that_is_packed(name: str) -> None:
    layout: struct.Struct = LAYOUTS[name]
    alignment = ALIGNMENT.get(name, 8)
    before = -(-BEFORE_ARGUMENTS // alignment) * alignment
    banks = {
        section.removeprefix(".nv.constant0."): len(content) - before
        for section, content in sections(build.compile_nvrtc(name, build.options_for(HOPPER, {}))).items()
        if section.startswith(".nv.constant0.")
    }
    assert banks
    assert set(banks.values()) == {layout.size}, banks
