"""What `mxk build-tpc` needs of the serving image, and where it is looked for."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import torch

from mxk_compile.errors import KernelError
from mxk_compile.kernels.tpc.libraries import PLUGINS

SYSTEM = Path("/")
"""Folder below which Gaudi software is looked for."""
_HEADERS = "usr/include/habanalabs"
_STOCK = "usr/lib/habanalabs/libtpc_kernels.so"
_CLANG = "opt/habanalabs/bin/tpc-clang"
WITHOUT_BRIDGE = ("env", "TORCH_DEVICE_BACKEND_AUTOLOAD=0", sys.executable, "-c")
"""Runs a Python program in which `import torch` does not open a device."""


@dataclasses.dataclass(frozen=True)
class Toolchain:
    """Programs, headers and libraries of a build; None is what was not found.

    Attributes:
        tpc_clang, cxx, nm: programs.
        kernel_headers: folder of tpc_kernel_lib_interface.h.
        bridge_headers: folder of the custom-op headers of habana_frameworks.torch.
        bridge_libraries: folder of its plugins.
        stock_library: libtpc_kernels.so of the image.
    """

    tpc_clang: Path | None
    cxx: Path | None
    nm: Path | None
    kernel_headers: Path | None
    bridge_headers: Path | None
    bridge_libraries: Path | None
    stock_library: Path | None

    @classmethod
    def find(cls, pt2: bool = False) -> Toolchain:
        """Looks in PATH, below `SYSTEM` and in habana_frameworks.

        Args:
            pt2: whether header and plugin of the PT2 interface are needed too.
        """
        bridge = _bridge()
        headers = ["hpu_custom_op.h"] + ["hpu_custom_op_pt2.h"] * pt2
        plugins = [f"lib{PLUGINS[kind]}.so" for kind in ["lazy"] + ["pt2"] * pt2]
        return cls(
            tpc_clang=_program("tpc-clang") or _file(SYSTEM / _CLANG),
            cxx=_program("g++"),
            nm=_program("nm"),
            kernel_headers=_folder(SYSTEM / _HEADERS, ["tpc_kernel_lib_interface.h"]),
            bridge_headers=_folder(bridge and bridge / "include", headers),
            bridge_libraries=_folder(bridge and bridge / "lib", plugins),
            stock_library=_file(SYSTEM / _STOCK),
        )

    def require_all(self) -> None:
        """Raises KernelError, one line that names everything that is missing."""
        missing = [_NAMES[name] for name, value in vars(self).items() if value is None]
        if missing:
            raise KernelError(
                "mxk build-tpc",
                f"not found: {', '.join(missing)}",
                "an image with the Gaudi software and its PyTorch bridge",
                "run it in the serving image",
            )

    def with_names(self) -> Toolchain:
        """The same, with names in the place of what was not found: for a dry run."""
        missing = {name: _STANDARD[name] for name, value in vars(self).items() if value is None}
        return dataclasses.replace(self, **missing)

    def versions(self) -> dict[str, str]:
        """Of the compilers, torch and the bridge, for the MANIFEST."""
        found = {"python": sys.version.split()[0], "torch": torch.__version__}
        for name, program in (("tpc_clang", self.tpc_clang), ("cxx", self.cxx)):
            said = subprocess.run([str(program), "--version"], capture_output=True, text=True, check=False)
            found[name] = (said.stdout.splitlines() or ["unknown"])[0].strip()
        for package in ("habana-torch-plugin", "habana-media-loader"):
            try:
                found[package] = importlib.metadata.version(package)
            except importlib.metadata.PackageNotFoundError:
                found[package] = "unknown"
        return found


_NAMES = {
    "tpc_clang": f"tpc-clang (PATH, /{_CLANG})",
    "cxx": "g++ (PATH)",
    "nm": "nm (PATH)",
    "kernel_headers": f"tpc_kernel_lib_interface.h (/{_HEADERS})",
    "bridge_headers": "the custom-op headers hpu_custom_op*.h (habana_frameworks.torch)",
    "bridge_libraries": "the bridge's plugins libhabana_pytorch*_plugin.so (habana_frameworks.torch)",
    "stock_library": f"the stock kernel library (/{_STOCK})",
}

_STANDARD = {
    "tpc_clang": SYSTEM / _CLANG,
    "cxx": Path("g++"),
    "nm": Path("nm"),
    "kernel_headers": SYSTEM / _HEADERS,
    "bridge_headers": Path("<habana_frameworks.torch>/include"),
    "bridge_libraries": Path("<habana_frameworks.torch>/lib"),
    "stock_library": SYSTEM / _STOCK,
}


def _program(name: str) -> Path | None:
    found = shutil.which(name)
    # PATH may be relative to the caller's folder; the build runs in its own.
    return Path(found).absolute() if found else None


def _file(path: Path) -> Path | None:
    return path if path.is_file() else None


def _folder(path: Path | None, files: list[str]) -> Path | None:
    return path if path is not None and all((path / file).is_file() for file in files) else None


def _bridge() -> Path | None:
    """Folder of habana_frameworks.torch, which is not imported: that may open a device."""
    spec = importlib.util.find_spec("habana_frameworks")
    folders = [Path(location) / "torch" for location in (spec and spec.submodule_search_locations) or ()]
    return next((folder for folder in folders if folder.is_dir()), None)
