"""Intrinsics: what kernels use is in the manifest of public signatures, and the emulator declares it with that type."""

from __future__ import annotations

import pathlib
import re
import subprocess

from mxk_compile.kernels.tpc import emulate

_CALL = re.compile(
    r"\b((?:v|s)_(?:f32|bf16|i32|u32|i16|u16|i8|u8|convert|exp|tanh|sigmoid|reciprocal)\w*"
    r"|gen_addr|get_dim_size|get_index_space_\w+|read_lane_id_\w+|aso)\s*\("
)


def manifest() -> dict[str, tuple[str, str]]:
    """Result and parameter types of each intrinsic."""
    rows = [
        line
        for line in (emulate.EMULATOR / "intrinsics.txt").read_text().splitlines()
        if line and line[0] != "#"
    ]
    parsed = [re.fullmatch(r"(\w+): (.+?) <-\s?(.*)", row) for row in rows]
    return {match[1]: (match[2], match[3]) for match in parsed if match is not None}


def used(text: str) -> set[str]:
    """Intrinsics that a source calls, comments aside."""
    return set(_CALL.findall(re.sub(r"//.*", "", text)))


def test_kernels_use_intrinsics_of_the_manifest_only() -> None:
    sources = sorted(path for path in emulate.KERNELS.iterdir() if path.suffix in (".c", ".h"))
    assert len(sources) >= 9
    for path in sources:
        assert used(path.read_text()) <= set(manifest()), path.name


def test_names_are_recognised() -> None:
    assert used("x = v_f32_mac_b(s_i32_ld_g(gen_addr(at, t))); // v_f32_add_b(") == {
        *("v_f32_mac_b", "s_i32_ld_g", "gen_addr")
    }
    assert "v_bf16_mac_acc32_b" in manifest()


def check(rows: dict[str, tuple[str, str]], folder: pathlib.Path) -> subprocess.CompletedProcess[str]:
    """Compiles one static_assert a row."""
    lines = [
        f'static_assert(std::is_same_v<decltype(&{name}), {result} (*)({parameters})>, "{name}");'
        for name, (result, parameters) in rows.items()
    ]
    source = folder / "signatures.cpp"
    source.write_text("\n".join(['#include "tpc_emulator.h"', *lines]) + "\n")
    command = [
        emulate.compiler(),
        "-std=gnu++17",
        "-march=native",
        "-fsyntax-only",
        "-w",
        f"-I{emulate.EMULATOR}",
    ]
    return subprocess.run([*command, str(source)], capture_output=True, text=True, check=False)


def test_the_emulator_declares_them_with_these_types(tmp_path: pathlib.Path) -> None:
    rows = manifest()
    done = check(rows, tmp_path)
    assert done.returncode == 0, done.stderr
    result, parameters = rows["v_u16_shl_b"]
    wrong = {**rows, "v_u16_shl_b": (result, parameters.replace("short128, int", "ushort128, int"))}
    assert "v_u16_shl_b" in check(wrong, tmp_path).stderr
