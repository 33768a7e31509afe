"""The built libraries: reading a MANIFEST, loading one op library into this process.

`libmxk_tpc.so` is opened by the graph compiler alone (GC_KERNEL_PATH, before the device opens); the op libraries are
opened here. A process holds one of them: the lazy library in lazy mode, the PT2 library otherwise.
"""

from __future__ import annotations

import ctypes
import dataclasses
import hashlib
import json
from pathlib import Path

from mxk_compile.errors import KernelError

KERNEL_LIBRARY = "libmxk_tpc.so"
OP_LIBRARIES = {"lazy": "libmxk_op_lazy.so", "pt2": "libmxk_op_pt2.so"}
MANIFEST = "MANIFEST"
PLUGINS = {"lazy": "habana_pytorch_plugin", "pt2": "habana_pytorch2_plugin"}
"""The bridge's own library of each kind, without lib and .so."""
_MAPS = Path("/proc/self/maps")

_loaded: dict[str, Path] = {}
"""Op libraries of this process by kind; at most one."""


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What `mxk build-tpc` writes beside the libraries, as JSON.

    Attributes:
        version: variant, package version and 8 digits over the kernels' code and the glue: recipes of two builds with
            the same version may be mixed, others not. It names recipe caches and stands in log lines.
        variant: model family.
        defines: of the kernels' preprocessor.
        versions: of the compilers, torch and the bridge.
        stock: path and sha256 of the stock library that the kernel library forwards to.
        kernels: by GUID: code_sha256 (elf.py) and elf_sha256.
        files: sha256 by name.
    """

    version: str
    variant: str
    defines: list[str]
    versions: dict[str, str]
    stock: dict[str, str]
    kernels: dict[str, dict[str, str]]
    files: dict[str, str]


def read_manifest(folder: Path) -> Manifest:
    """The MANIFEST of a build, after a check that its files are the ones that were built.

    Raises:
        KernelError: no build there, a damaged MANIFEST, a file that is missing or another.
    """
    path = Path(folder) / MANIFEST
    try:
        fields = json.loads(path.read_bytes())
        manifest = Manifest(**fields)
        files, stock = {**manifest.files}, {**manifest.stock}  # TypeError if they are none
        texts = (manifest.version, manifest.variant, *files, *files.values(), *stock.values())
        if not all(isinstance(text, str) and text.isprintable() for text in texts):
            raise TypeError("a name, version or hash is no printable text")
    except FileNotFoundError as error:
        raise _refuse(path, "it is not there", "a folder that `mxk build-tpc` made") from error
    except (OSError, ValueError, TypeError) as error:
        raise _refuse(path, f"it cannot be read: {error}", "the MANIFEST of `mxk build-tpc`") from error
    for name, expected in files.items():
        try:
            found = hashlib.sha256((path.parent / name).read_bytes()).hexdigest()
        except OSError as error:
            raise _refuse(
                path.parent / name, f"it cannot be read: {error}", "the file that was built"
            ) from error
        if found != expected:
            raise _refuse(path.parent / name, f"sha256 {found[:8]}", f"{expected[:8]}, which MANIFEST names")
    return manifest


def _refuse(path: Path, given: str, allowed: str) -> KernelError:
    return KernelError(str(path), given, allowed, "build it again, in this image")


def load_ops(folder: Path, kind: str) -> Manifest:
    """Loads the op library `kind` ("lazy" or "pt2") of a build; its ops are then at torch.ops.custom_op.

    Loading the same library again does nothing. Call it after `import habana_frameworks.torch`, whose plugin it uses.

    Raises:
        KernelError: there is no such library, this process has another one, or the bridge of the other execution mode
            is loaded.
    """
    if kind not in OP_LIBRARIES:
        raise KernelError("op library", f"kind {kind!r}", ", ".join(OP_LIBRARIES), "name one of them")
    manifest = read_manifest(folder)
    path = (Path(folder) / OP_LIBRARIES[kind]).resolve()
    if path.name not in manifest.files:
        raise _refuse(path, f"{MANIFEST} does not name it", "a build with it (--pt2 for torch.compile)")
    for other, held in _loaded.items():
        if (other, held) == (kind, path):
            return manifest
        raise _second(path, f"this process has {held} already")
    _check_plugin(path, kind)
    try:
        # Imported here: what only reads a MANIFEST needs no torch.
        import torch

        with torch._ops.dl_open_guard():
            library = ctypes.CDLL(str(path))
    except OSError as error:
        raise _refuse(
            path, f"it cannot be loaded: {error}", "a library built against this torch and bridge"
        ) from error
    library.mxk_op_refusal.restype = ctypes.c_char_p
    refused = library.mxk_op_refusal()
    if refused is not None:
        raise _second(path, refused.decode().split("; ")[0])
    _loaded[kind] = path
    return manifest


def _second(path: Path, given: str) -> KernelError:
    return KernelError(str(path), given, "one op library a process", "use a new process for this one")


def _check_plugin(path: Path, kind: str) -> None:
    """The library would pull in the plugin of its own mode beside the one that is there."""
    try:
        maps = _MAPS.read_text()
    except OSError:
        return
    for other, plugin in PLUGINS.items():
        if other != kind and f"/lib{plugin}.so" in maps:
            mode = "lazy mode" if other == "lazy" else "eager and compiled mode"
            raise KernelError(
                str(path),
                f"the bridge of {mode} is loaded",
                f"{OP_LIBRARIES[other]} in {mode}",
                "load that one, or set PT_HPU_LAZY_MODE before the bridge is imported",
            )
