"""CUDA C++ to machine code: NVRTC through NVIDIA's bindings, and a cache of the results in the user's cache folder.

No nvcc and no host compiler are needed: the sources include only what lies beside them. A cached file is named by
the SHA-256 of all that its content depends on, holds its own checksum, and appears by a rename: readers see a whole
file or none, writers of the same name write the same bytes, and there is no lock to grow stale. Where the folder
cannot be written, machine code lives as long as the process.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mxk_compile.errors import KernelError
from mxk_compile.kernels.cuda.devices import Device
from mxk_compile.settings import settings

SOURCES = Path(__file__).parent
_CHECKSUM_BYTES = hashlib.sha256().digest_size

_logger = logging.getLogger("mxk_compile.kernels")
_built: dict[str, bytes] = {}
_lock = threading.Lock()


def missing() -> str | None:
    """None if sources can be compiled here, else the reason in one line."""
    try:
        from cuda.bindings import nvrtc
    except ImportError:
        return "the package cuda-bindings is missing; install mxk-compile[cuda]"
    try:
        error, *_ = nvrtc.nvrtcVersion()
    except RuntimeError as error_of_loading:
        return (
            f"NVRTC cannot be loaded ({' '.join(str(error_of_loading).split())}); install nvidia-cuda-nvrtc"
        )
    return None if error.value == 0 else f"NVRTC answers {error.name}"


def compile_nvrtc(name: str, options: tuple[str, ...]) -> bytes:
    """Machine code of source file `name`; raises KernelError with the compiler's first error."""
    from cuda.bindings import nvrtc

    def ask(result: tuple[Any, ...]) -> Any:
        if result[0].value != 0:
            raise KernelError("NVRTC", result[0].name, "a working compiler", "check the installation of CUDA")
        return result[1] if len(result) > 1 else None

    headers = sorted(SOURCES.glob("*.cuh"))
    texts, names = [path.read_bytes() for path in headers], [path.name.encode() for path in headers]
    source = (SOURCES / name).read_bytes()
    program = ask(nvrtc.nvrtcCreateProgram(source, name.encode(), len(headers), texts, names))
    try:
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        if status.value != 0:
            log = b" " * ask(nvrtc.nvrtcGetProgramLogSize(program))
            ask(nvrtc.nvrtcGetProgramLog(program, log))
            lines = [line for line in log.decode(errors="replace").splitlines() if "error" in line]
            given = lines[0] if lines else status.name
            raise KernelError(f"NVRTC, {name}", given, "sources that compile", "report it with this line")
        code: bytes = b" " * ask(nvrtc.nvrtcGetCUBINSize(program))
        ask(nvrtc.nvrtcGetCUBIN(program, code))
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return code


@functools.cache
def _compiler_version() -> str:
    from cuda.bindings import nvrtc

    return ".".join(map(str, nvrtc.nvrtcVersion()[1:]))


@functools.cache
def _sources_hash(name: str) -> str:
    digest = hashlib.sha256()
    for path in (SOURCES / name, *sorted(SOURCES.glob("*.cuh"))):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def options_for(device: Device, defines: Mapping[str, int]) -> tuple[str, ...]:
    """NVRTC's options for a kind of device and macros."""
    macros = sorted({**device.macros, **defines}.items())
    language = (f"--gpu-architecture={device.architecture}", "--std=c++17", "-default-device")
    return (*language, *(f"-D{macro}={value}" for macro, value in macros))


def build(
    name: str,
    defines: Mapping[str, int],
    device: Device,
    compiler: Callable[[str, tuple[str, ...]], bytes] = compile_nvrtc,
    version: Callable[[], str] = _compiler_version,
) -> bytes:
    """Machine code of `name` for a device and macros: from this process, the cache folder, or the compiler.

    Raises:
        KernelError: the sources do not compile, or there is no compiler.
    """
    options = options_for(device, defines)
    text = "\0".join((name, _sources_hash(name), *options, version()))
    key = hashlib.sha256(text.encode()).hexdigest()
    with _lock:  # one compilation at a time: they need cores, and threads often ask for the same one
        if key not in _built:
            path = cache_folder() / f"{name.removesuffix('.cu')}-{key[:32]}.cubin"
            code = read_cached(path)
            if code is None:
                code = compiler(name, options)
                _write(path, code)
            _built[key] = code
        return _built[key]


def cache_folder() -> Path:
    """Folder of compiled kernels and of what `mxk tune` found."""
    return Path(settings.cache_dir).expanduser() / "cuda"


def read_cached(path: Path) -> bytes | None:
    """Machine code behind a right checksum, else None."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    checksum, code = data[:_CHECKSUM_BYTES], data[_CHECKSUM_BYTES:]
    return code if hashlib.sha256(code).digest() == checksum else None


def _write(path: Path, code: bytes) -> None:
    if not write_whole(path, hashlib.sha256(code).digest() + code):
        _say_read_only(str(path.parent))


def write_whole(path: Path, data: bytes) -> bool:
    """Writes a file that others see whole or not at all; False if the folder takes none."""
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=".new-")
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        os.replace(temporary, path)
    except OSError:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        return False
    return True


@functools.cache
def _say_read_only(folder: str) -> None:
    _logger.warning("%s cannot be written: kernels are compiled anew in each process", folder)
