"""The real compiler, where `TPC_CLANG` names one: each kernel compiles, and its chunk loop is counted in bundles."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess

import pytest

from mxk_compile.kernels.tpc import emulate
from mxk_compile.kernels.tpc.elf import CODE_SECTIONS, sections
from mxk_compile.kernels.tpc.signatures import KERNELS

COMPILER = os.environ.get("TPC_CLANG")
CHUNK_ROWS = 8  # of one turn of the loop: a pair of chunks of four rows


def loop_bundles(assembly: str) -> int:
    """VLIW bundles of the block with the most lookups.

    A bundle is `{`, its instructions, `}` on lines of their own, or one line of up to four instructions with `;`
    between them; an instruction outside braces is a bundle as well (TPCInstPrinter.cpp).
    """
    best = (0, 0)
    for block in re.split(r"^[.\w]+:", assembly, flags=re.MULTILINE):
        code = re.sub(r"//.*", "", block)
        lookups = len(re.findall(r"\blookup", code, re.IGNORECASE))
        one_line = re.sub(r"\{[^}]*\}", "\tbundle", code)
        bundles = sum(bool(re.match(r"\s+[^\s.]", line)) for line in one_line.splitlines())
        best = max(best, (lookups, bundles))
    return best[1]


def test_bundles_are_counted_in_both_formats() -> None:
    braces = (
        "main:\n\tnop\n.LBB0_1:\t// loop\n{\n\tlookup_1c %V1\n\tmac %V2\n}\n\tadd %V3\n.LBB0_2:\n\thalt\n"
    )
    lines = "main:\n\tnop; nop; nop; nop\n.LBB0_1:\n\tlookup_1c %V1; nop; mac; nop\n\t; ; add; \n\t.loc 1\n.LBB0_2:\n"
    assert loop_bundles(braces) == loop_bundles(lines) == 2


@pytest.mark.skipif(
    COMPILER is None, reason="TPC_CLANG names no tpc-clang: not compiled with the real compiler"
)
@pytest.mark.parametrize("name", KERNELS)
def test_each_kernel_compiles(name: str, tmp_path: pathlib.Path) -> None:
    assert COMPILER is not None
    command = [COMPILER, "-march=gaudi2", "-O2", str(emulate.KERNELS / f"{name}.c")]
    subprocess.run([*command, "-c", "-o", str(tmp_path / "kernel.o")], check=True)
    found = sections((tmp_path / "kernel.o").read_bytes())
    assert all(found.get(section) for section in CODE_SECTIONS)
    subprocess.run([*command, "-S", "-o", str(tmp_path / "kernel.s")], check=True)
    bundles = loop_bundles((tmp_path / "kernel.s").read_text())
    print(f"{name}: {bundles} bundles in the chunk loop, {bundles / CHUNK_ROWS:.2f} a chunk-row")
    assert bundles > 0
