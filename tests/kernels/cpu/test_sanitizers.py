"""The kernel library under the address, undefined-behaviour and thread sanitizers, driven by driver.cpp."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
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


@pytest.mark.slow
@pytest.mark.skipif(
    not COMPILER or "g++" not in COMPILER, reason="no g++, whose runtimes can be loaded first"
)
def test_the_way_from_python(tmp_path: Path) -> None:
    """call.cpp, by the tests of what calls may keep, in a process that the sanitizers' runtimes start with."""
    package = tmp_path / "mxk_compile"
    shutil.copytree(
        scripts.ROOT / "mxk_compile", package, ignore=shutil.ignore_patterns("*.so", "__pycache__")
    )
    flags = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-O1", "-g"]
    scripts.load("setup.py").build(package / "kernels/cpu/libmxk_cpu.so", tmp_path / "objects", flags)
    runtimes = [
        subprocess.run(
            [str(COMPILER), f"-print-file-name=lib{name}.so"], capture_output=True, text=True, check=True
        ).stdout.strip()
        for name in ("asan", "ubsan", "stdc++")
    ]
    environment = {
        **{"LD_PRELOAD": " ".join(runtimes), "PYTHONPATH": str(tmp_path)},
        **{"ASAN_OPTIONS": "detect_leaks=0", "PYTHONMALLOC": "malloc"},  # Python keeps much to its end
    }
    tests = [scripts.ROOT / "tests/kernels/test_dispatch.py", "-p", "no:cacheprovider", "-k", "not compiled"]
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *map(str, tests)],
        capture_output=True, text=True, env={**os.environ, **environment}, cwd=tmp_path,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
