"""g++ for the emulator: the runtime, once, and each translated source; kept by content in a temporary folder."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from .translate import DEVICE, TranslationError, translate

_FLAGS = (
    "-std=c++20",
    "-fPIC",
    "-shared",
    "-w",
    "-g1",
    "-ffp-contract=off",
    "-fwrapv",
    "-fno-strict-aliasing",
)
_RUNTIME_FLAGS = (*_FLAGS, "-O3", "-U_FORTIFY_SOURCE")
_KERNEL_FLAGS = (*_FLAGS, "-O1")
_RUNTIME = ("fibers.cpp", "sync.cpp", "copies.cpp", "wgmma.cpp", "numbers.cpp")


def missing() -> str | None:
    """None if kernels can be emulated here, else the reason."""
    return None if shutil.which("g++") else "g++ is not installed"


def folder() -> Path:
    """Where what was built is kept."""
    path = Path(tempfile.gettempdir()) / f"mxk-cuda-emulator-{os.getuid()}"
    path.mkdir(mode=0o700, exist_ok=True)
    return path


def _run(command: Sequence[str | Path], given: str | None = None) -> str:
    done = subprocess.run(command, input=given, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if "error" in line]
        raise TranslationError(lines[0] if lines else done.stderr.strip())
    return done.stdout


def _library(name: str, key: str, flags: tuple[str, ...], sources: Sequence[Path], text: str | None) -> Path:
    """Shared library of sources, or of a text; built unless it is there."""
    digest = hashlib.sha256("\0".join((key, *flags)).encode()).hexdigest()[:24]
    path = folder() / f"{name}-{digest}.so"
    if not path.exists():
        target = path.with_suffix(f".{os.getpid()}-{id(path)}.new")
        _run(("g++", *flags, f"-I{DEVICE}", "-o", target, *(sources or ("-xc++", "-"))), text)
        os.replace(target, path)
    return path


@functools.cache
def _device_text() -> str:
    return "\0".join(path.read_text() for path in sorted(DEVICE.iterdir()))


@functools.cache
def runtime() -> ctypes.CDLL:
    """Fibres and all that waits; kernels' libraries find its functions."""
    sources = [DEVICE / name for name in _RUNTIME]
    path = _library("runtime", _device_text(), _RUNTIME_FLAGS, sources, None)
    return ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)


def compile_source(source: Path, defines: Sequence[str]) -> Path:
    """Library of a source, with options -D as NVRTC takes them.

    Raises:
        TranslationError: it does not compile, or holds an instruction that is not emulated; with file and line.
    """
    preprocessed = _run(("g++", "-E", "-xc++", "-std=c++20", "-D__CUDA_ARCH__=900", *defines, source))
    text = translate(preprocessed)
    return _library(source.stem, _device_text() + text, _KERNEL_FLAGS, (), text)


def inlined_at(library: str, offset: str) -> str:
    """Chain of calls at an address, innermost first, as file:line."""
    done = subprocess.run(
        ("addr2line", "-i", "-e", library, offset), capture_output=True, text=True, check=False
    )
    names = [Path(line.split(" ")[0]).name for line in done.stdout.split("\n") if line]
    return " < ".join(name for name in names if not name.startswith(("cuda.h", "ptx.h", "?"))) or "?"
