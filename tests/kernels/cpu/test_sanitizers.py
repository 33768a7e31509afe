"""The kernel library under the address, undefined-behaviour and thread sanitizers, driven by driver.cpp."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import scripts

COMPILER = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")


@pytest.mark.slow
@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
def test_random_calls(tmp_path: Path, sanitizer: str) -> None:
    # -O1: half the compile time; libgomp is linked here because no torch brings it.
    # The tile unit is emulated: no sanitizer sees what tile instructions read and write.
    flags = [f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all", "-O1", "-g", "-DMXK_AMX_EMULATED"]
    library = tmp_path / "libmxk_cpu.so"
    scripts.load("setup.py").build(library, tmp_path / "objects", flags)
    driver = tmp_path / "driver"
    command = [str(COMPILER), "-std=c++17", *flags, "-I", str(scripts.ROOT / "mxk_compile/kernels/cpu")]
    command += [
        str(Path(__file__).with_name("driver.cpp")),
        str(library),
        f"-Wl,-rpath,{tmp_path}",
        "-o",
        str(driver),
    ]
    subprocess.run([*command, "-Wl,--no-as-needed", "-lgomp", "-lpthread"], check=True)
    # The thread sanitizer does not see libgomp's own synchronisation: there, threads are callers at once instead.
    rounds, environment = ("40", {}) if "address" in sanitizer else ("20", {"OMP_THREAD_LIMIT": "1"})
    result = subprocess.run(
        [str(driver), rounds], capture_output=True, text=True, env={**os.environ, **environment}
    )
    assert result.stdout.strip() == "ok", result.stdout + result.stderr[-4000:]
