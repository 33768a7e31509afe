"""g++ for the emulator: the runtime, once, and each translated source; kept by content in a temporary folder."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from .translate import DEVICE, TranslationError, translate

_FLAGS = ("-std=c++20", "-fPIC", "-w", "-g1", "-ffp-contract=off", "-fwrapv", "-fno-strict-aliasing")
_OLDEST = 10  # g++ that knows C++20's short templates
_KEPT_SECONDS = 3 * 24 * 3600
_KERNEL_FLAGS = ("-shared", "-O1", "-xc++", "-")


@functools.cache
def missing() -> str | None:
    """None if kernels can be emulated here, else the reason."""
    if sys.platform != "linux":
        return f"{sys.platform}; allowed: linux"
    if shutil.which("g++") is None:
        return "g++ is not installed"
    version = _run(("g++", "-dumpversion")).strip()
    return (
        None if int(version.partition(".")[0]) >= _OLDEST else f"g++ {version}; allowed: {_OLDEST} or newer"
    )


def folder() -> Path:
    """Where what was built is kept, for a while."""
    path = Path(tempfile.gettempdir()) / f"mxk-cuda-emulator-{os.getuid()}"
    path.mkdir(mode=0o700, exist_ok=True)
    return path


def _forget_old() -> None:
    for path in folder().iterdir():
        with contextlib.suppress(OSError):
            if path.stat().st_mtime < time.time() - _KEPT_SECONDS:
                path.unlink()


def _run(command: Sequence[str | Path], given: str | None = None, cwd: Path | None = None) -> str:
    done = subprocess.run(command, input=given, capture_output=True, text=True, check=False, cwd=cwd)
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if "error" in line]
        raise TranslationError(lines[0] if lines else done.stderr.strip())
    return done.stdout


def _built(name: str, key: str, arguments: Sequence[str | Path], text: str | None = None) -> Path:
    """What g++ makes of files, or of a text, unless it is there; `key` is what it depends on beside the arguments."""
    digest = hashlib.sha256("\0".join((key, *map(str, arguments))).encode()).hexdigest()[:24]
    stem, _, suffix = name.rpartition(".")
    path = folder() / f"{stem}-{digest}.{suffix}"
    if not path.exists():
        target = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
        _run(("g++", *_FLAGS, f"-I{DEVICE}", *arguments, "-o", target), text)
        os.replace(target, path)
    return path


@functools.cache
def _device_text() -> str:
    return "\0".join(path.read_text() for path in sorted(DEVICE.iterdir()))


@functools.cache
def runtime() -> ctypes.CDLL:
    """Fibres and all that waits; kernels' libraries find its functions."""

    def part(source: Path) -> Path:
        return _built(f"{source.stem}.o", _device_text(), ("-O3", "-U_FORTIFY_SOURCE", "-c", source))

    with ThreadPoolExecutor(2) as pool:
        parts = list(pool.map(part, sorted(DEVICE.glob("*.cpp"))))
    path = _built("runtime.so", "", ("-shared", *parts))
    _forget_old()
    return ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)


def compile_source(source: Path, defines: Sequence[str]) -> Path:
    """Library of a source, with options -D as NVRTC takes them.

    Raises:
        TranslationError: it does not compile, or holds an instruction that is not emulated; with file and line.
    """
    # In its folder: no path becomes part of what was built.
    command = ("g++", "-E", "-xc++", "-std=c++20", "-D__CUDA_ARCH__=900", *defines, source.name)
    preprocessed = _run(command, cwd=source.parent)
    text = translate(preprocessed)
    return _built(f"{source.stem}.so", _device_text() + text, _KERNEL_FLAGS, text)


def inlined_at(library: str, offset: str) -> str:
    """Chain of calls at an address, innermost first, as file:line."""
    if shutil.which("addr2line") is None:
        return "? (addr2line is not installed)"
    done = subprocess.run(
        ("addr2line", "-i", "-e", library, offset), capture_output=True, text=True, check=False
    )
    names = [Path(line.split(" (discriminator")[0]).name for line in done.stdout.split("\n") if line]
    return " < ".join(name for name in names if not name.startswith(("cuda.h", "ptx.h", "?"))) or "?"
