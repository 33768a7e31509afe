"""The library on processors without the newest instructions: asked under emulation, where that is at hand."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from mxk_compile.kernels import cpu

COMPILER, EMULATOR = shutil.which("c++") or shutil.which("g++"), shutil.which("qemu-x86_64")
PROGRAM = """#include <cstdio>
extern "C" int mxk_cpu_select(const char*);
extern "C" const char* mxk_cpu_isa();
int main() { return mxk_cpu_select("auto") || std::puts(mxk_cpu_isa()) < 0; }
"""


@pytest.mark.skipif(platform.machine().lower() not in ("x86_64", "amd64"), reason="of x86-64")
@pytest.mark.skipif(EMULATOR is None or COMPILER is None, reason="no qemu-x86_64, or no compiler")
@pytest.mark.skipif(cpu.available() is not None, reason=str(cpu.available()))
@pytest.mark.parametrize(("processor", "isa"), [("Nehalem", "portable"), ("Haswell", "avx2")])
def test_the_newest_instructions_that_the_processor_has_are_chosen(
    processor: str, isa: str, tmp_path: Path
) -> None:
    """Asking executes none that it lacks: a unit's flags are for what runs after the answer."""
    (tmp_path / "ask.cpp").write_text(PROGRAM)
    command = [str(COMPILER), "ask.cpp", str(cpu.LIBRARY), f"-Wl,-rpath,{cpu.LIBRARY.parent}", "-o", "ask"]
    subprocess.run(command, cwd=tmp_path, check=True)
    asked = subprocess.run(
        [str(EMULATOR), "-cpu", processor, tmp_path / "ask"], capture_output=True, text=True
    )
    assert (asked.returncode, asked.stdout.strip()) == (0, isa), asked.stderr
