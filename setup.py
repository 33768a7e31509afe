"""Builds the CPU kernel library: plain C++, a C interface, no Python or torch headers, one unit per instruction set.

The library is optional: where no C++ compiler works, the install still succeeds and the package runs its torch
reference. CXX and CXXFLAGS are respected.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

SOURCES = Path("mxk_compile/kernels/cpu")
LIBRARY = "libmxk_cpu.so"
FLAGS = [
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-Wall",
]
# avx512: vpermb and vpdpbusd: Ice Lake and later, Zen 4 and later.
AVX512 = [f"-mavx512{part}" for part in ("f", "bw", "vl", "dq", "vbmi", "vnni")]
# GCC 12 takes the undefined operands of its own intrinsics for mistakes.
VECTOR = [*AVX512, "-mfma", "-mf16c", "-Wno-uninitialized", "-Wno-maybe-uninitialized"]
UNIT_FLAGS = {
    "isa_portable.cpp": ["-mssse3"],
    "isa_avx2.cpp": ["-mavx2", "-mfma", "-mf16c"],
    "isa_avx512.cpp": VECTOR,
    "isa_amx.cpp": VECTOR,  # its tile instructions are assembly
}


def compiler() -> list[str]:
    """The C++ compiler as a command; raises RuntimeError if there is none."""
    if os.environ.get("CXX"):
        return shlex.split(os.environ["CXX"])
    for name in ("c++", "g++", "clang++"):
        if shutil.which(name):
            return [name]
    raise RuntimeError("no C++ compiler: none of c++, g++, clang++ is on PATH")


def build(target: Path, objects: Path, extra: list[str] | None = None) -> None:
    """Compiles every unit into `objects` and links them to `target`."""
    command = [*compiler(), *FLAGS, *shlex.split(os.environ.get("CXXFLAGS", "")), *(extra or [])]
    objects.mkdir(parents=True, exist_ok=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    sources = sorted((Path(__file__).parent / SOURCES).glob("*.cpp"))
    units = [str(objects / source.with_suffix(".o").name) for source in sources]

    def compile_unit(source: Path, unit: str) -> None:
        unit_flags = UNIT_FLAGS.get(source.name, []) if x86 else []
        subprocess.run([*command, *unit_flags, "-c", str(source), "-o", unit], check=True)

    with ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1)) as pool:
        list(pool.map(compile_unit, sources, units))
    partial = target.with_name(f"{target.name}.{os.getpid()}")
    subprocess.run([*command, "-shared", *units, "-o", str(partial), "-ldl", "-lpthread"], check=True)
    partial.replace(target)  # a process that has the old library open keeps it


class BuildLibrary(build_ext):
    """One shared library beside the Python files, named without a Python version: any interpreter loads it."""

    def get_ext_filename(self, fullname: str) -> str:
        """The library's place in the package, or its name alone, as `fullname` is dotted or not."""
        return str(Path(*fullname.split(".")[:-1], LIBRARY))

    def build_extension(self, ext: Extension) -> None:
        """Compiles and links; a failure is a message, not an error."""
        target = Path(self.get_ext_fullpath(ext.name))
        try:
            build(target, Path(self.build_temp) / "mxk_cpu")
        except (OSError, RuntimeError, subprocess.CalledProcessError) as error:
            target.unlink(missing_ok=True)
            self.warn(
                f"the CPU kernels were not built ({error}); mxk_compile will run its torch reference on CPU"
            )


if __name__ == "__main__":
    extension = Extension("mxk_compile.kernels.cpu.libmxk_cpu", sources=[], optional=True)
    setup(ext_modules=[extension], cmdclass={"build_ext": BuildLibrary})
