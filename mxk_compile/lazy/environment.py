"""The switches of lazy mode, and the environment that its kernels need before the device opens.

The hook hands the environment in, so that nothing here reads that of the process. The names are those of the published
package ("MXFP4 MoE decode kernels"), which this one can replace, hence no `MXK_*` settings:

    MXFP4_TPC_MOE             0                      1 turns the kernels on
    MXFP4_TPC_MOE_MAX_TOKENS  32                     per-call token cap, at most 32
    MXFP4_TPC_MOE_LIB         /opt/mxfp4-moe/lib     folder that `mxk build-tpc --variant gptoss` wrote

Set here, all from the same source: GC_KERNEL_PATH to one file (a list of libraries fails at device init when the recipe
cache is on), PT_HPU_LAZY_ACC_PAR_MODE=0 (the accumulation thread breaks custom ops whose input is a view made in the
same graph), and the recipe cache's folder to a sibling named after the kernel version (cache keys ignore kernels).
"""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from mxk_compile.errors import KernelError, SettingsError
from mxk_compile.kernels.tpc.libraries import KERNEL_LIBRARY, OP_LIBRARIES, Manifest, read_manifest
from mxk_compile.kernels.tpc.signatures import VARIANT_LIMITS
from mxk_compile.settings import whole_number

_logger = logging.getLogger("vllm.mxk_compile.lazy")

VARIANT = "gptoss"
FOLDER = "/opt/mxfp4-moe/lib"
"""Of the libraries, where MXFP4_TPC_MOE_LIB names none."""
MOST_TOKENS = VARIANT_LIMITS[VARIANT].max_tokens
_REQUIRED = {
    "PT_HPU_LAZY_MODE": "the hook replaces a call of lazy mode; in compiled mode the pass does it",
    "HPU_MXFP4_NATIVE": "without it vllm-gaudi unpacks the experts when it loads them",
}


@dataclasses.dataclass(frozen=True)
class Options:
    """What the hook goes by.

    Attributes:
        max_tokens: largest T of a call that the kernels take.
        folder: of the libraries.
        version: of the build, from its MANIFEST.
    """

    max_tokens: int
    folder: Path
    version: str


def is_lazy(environ: Mapping[str, str]) -> bool:
    """Whether a process of vllm-gaudi runs in lazy mode; its default is compiled mode."""
    return environ.get("PT_HPU_LAZY_MODE", "0") != "0"


def prepare(environ: MutableMapping[str, str]) -> Options | None:
    """Options, with `environ` ready for the kernels; None if they are switched off.

    Raises:
        SettingsError: a variable has a value that is not allowed, or one that the kernels need is not set.
        KernelError: the libraries are not there, or the device is open already. `environ` is then unchanged.
    """
    switch = environ.get("MXFP4_TPC_MOE", "0")
    if switch in ("", "0"):
        return None
    if switch != "1":
        raise SettingsError("MXFP4_TPC_MOE", repr(switch), "0, 1", "correct or unset it")
    max_tokens = _max_tokens(environ.get("MXFP4_TPC_MOE_MAX_TOKENS", str(MOST_TOKENS)))
    for name, why in _REQUIRED.items():
        if environ.get(name) != "1":
            raise SettingsError(name, repr(environ.get(name, "")), "1", f"set it: {why}")
    # Absolute: processes that inherit GC_KERNEL_PATH may run in another folder.
    folder = Path(environ.get("MXFP4_TPC_MOE_LIB") or FOLDER).absolute()
    if ":" in str(folder):
        given = f"{str(folder)!r}, which GC_KERNEL_PATH would split at the colon"
        raise SettingsError("MXFP4_TPC_MOE_LIB", given, "a folder without one", "rename or link it")
    manifest = _manifest(folder)
    changes = {
        **kernel_variables(environ, folder, manifest),
        "PT_HPU_LAZY_ACC_PAR_MODE": "0",
    }
    advice = "let the hook at the top of vllm_gaudi/__init__.py run first"
    update_before_the_device_opens(environ, changes, "MXFP4 TPC MoE", advice)
    return Options(max_tokens, folder, manifest.version)


def kernel_variables(environ: MutableMapping[str, str], folder: Path, manifest: Manifest) -> dict[str, str]:
    """What a build needs in either mode: GC_KERNEL_PATH, and the recipe cache's folder where there is one."""
    path = _kernel_path(environ, folder / KERNEL_LIBRARY, manifest)
    return {"GC_KERNEL_PATH": path, **_recipe_cache(environ, manifest.version)}


def update_before_the_device_opens(
    environ: MutableMapping[str, str], values: dict[str, str], what: str, advice: str
) -> None:
    """Sets what is not yet so in `environ`; raises KernelError, and sets nothing, if the device is open already."""
    changes = {name: value for name, value in values.items() if environ.get(name) != value}
    if changes and _device_is_open():
        given = f"the device is open, {', '.join(sorted(changes))} come too late"
        raise KernelError(what, given, "a start before the first device op", advice)
    environ.update(changes)


def _max_tokens(text: str) -> int:
    try:
        return whole_number(text, 1, MOST_TOKENS)
    except ValueError:
        raise SettingsError(
            "MXFP4_TPC_MOE_MAX_TOKENS", repr(text), f"1 to {MOST_TOKENS}", "correct or unset it"
        ) from None


def _manifest(folder: Path) -> Manifest:
    manifest = read_manifest(folder)
    if manifest.variant != VARIANT:
        raise KernelError(
            str(folder), f"a build of variant {manifest.variant!r}", repr(VARIANT), "build that variant"
        )
    for name in (KERNEL_LIBRARY, OP_LIBRARIES["lazy"]):
        if name not in manifest.files:
            raise KernelError(str(folder), f"MANIFEST lacks {name}", "a complete build", "build it again")
    stock = manifest.stock.get("path", "")
    if not os.path.isfile(stock):  # the device would come up without any kernel
        given = f"a build that forwards to {stock!r}, which is not there"
        raise KernelError(
            str(folder), given, "the stock library of this image", "build it again, in this image"
        )
    return manifest


def _kernel_path(environ: MutableMapping[str, str], own: Path, manifest: Manifest) -> str:
    """The one library for GC_KERNEL_PATH; says which of those that were listed it does not forward."""
    listed = [path for path in environ.get("GC_KERNEL_PATH", "").split(":") if path]
    stock = manifest.stock.get("path", "")
    forwarded = {os.path.realpath(path) for path in (str(own), stock)}
    dropped = [path for path in listed if os.path.realpath(path) not in forwarded]
    if dropped:
        _logger.warning(
            "GC_KERNEL_PATH listed %s: not forwarded, only the stock library %s is; unset MXFP4_TPC_MOE to use them",
            ", ".join(dropped),
            stock,
        )
    return str(own)


def _recipe_cache(environ: MutableMapping[str, str], version: str) -> dict[str, str]:
    """PT_HPU_RECIPE_CACHE_CONFIG ("folder,delete on init,size in MB") with the folder moved; nothing if it is unset."""
    folder, comma, rest = environ.get("PT_HPU_RECIPE_CACHE_CONFIG", "").partition(",")
    folder, suffix = folder.rstrip("/"), f"_mxk-{version}"
    if not folder:
        return {}
    moved = folder if folder.endswith(suffix) else folder + suffix
    return {"PT_HPU_RECIPE_CACHE_CONFIG": moved + comma + rest}


def _device_is_open() -> bool:
    # Asked of the module only if somebody has imported it: the import would load the bridge.
    hpu = sys.modules.get("habana_frameworks.torch.hpu") or sys.modules.get("torch.hpu")
    return hpu is not None and bool(hpu.is_initialized())
