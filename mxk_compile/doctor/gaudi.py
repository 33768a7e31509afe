"""Checks for Gaudi: variables that the kernels need, and the built libraries against this image."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import torch

from mxk_compile.doctor.finding import Finding
from mxk_compile.errors import MxkError
from mxk_compile.kernels.tpc.libraries import KERNEL_LIBRARY, MANIFEST, Manifest, read_manifest
from mxk_compile.lazy import environment
from mxk_compile.settings import process_environment, settings

_SWITCHES = ("MXFP4_TPC_MOE", "MXFP4_TPC_MOE_LIB", "GC_KERNEL_PATH")
_BRIDGE = "habana-torch-plugin"


def _concerned() -> bool:
    """Whether this is a Gaudi image, or set up to be one."""
    given = process_environment()
    return importlib.util.find_spec("habana_frameworks") is not None or any(map(given.get, _SWITCHES))


def variables() -> Iterator[Finding]:
    """What lazy mode's hook would say, and what device initialisation would refuse."""
    name, given = "Gaudi variables", process_environment()
    if not _concerned():
        yield Finding(name, "ok", "no Gaudi software here, nothing to check")
        return
    listed = [path for path in given.get("GC_KERNEL_PATH", "").split(":") if path]
    for path in listed:
        if not Path(path).is_file():
            yield Finding(name, "fail", f"GC_KERNEL_PATH: {path} is not there", "correct or unset it")
    recipes = given.get("PT_HPU_RECIPE_CACHE_CONFIG", "").partition(",")[0].rstrip("/")
    if len(listed) > 1 and recipes:
        found = f"GC_KERNEL_PATH lists {len(listed)} libraries with PT_HPU_RECIPE_CACHE_CONFIG set"
        yield Finding(name, "fail", found, f"list {KERNEL_LIBRARY} alone: it forwards the stock library")
    lazy, switch = environment.is_lazy(given), given.get("MXFP4_TPC_MOE", "0")
    ours = [path for path in listed if Path(path).name == KERNEL_LIBRARY]
    if ours and switch != "1":  # else the hook below sets these
        if lazy and given.get("PT_HPU_LAZY_ACC_PAR_MODE") != "0":
            found = (
                f"PT_HPU_LAZY_ACC_PAR_MODE is {given.get('PT_HPU_LAZY_ACC_PAR_MODE', 'not set')} in lazy mode"
            )
            yield Finding(
                name, "fail", found, "set it to 0: custom ops on views of the same graph fail otherwise"
            )
        if recipes and "_mxk-" not in recipes:
            found = (
                f"the recipe cache {recipes} does not name a kernel version, and its keys ignore the kernels"
            )
            yield Finding(
                name, "warn", found, f"use a folder for each build: {recipes}_mxk-<version in {MANIFEST}>"
            )
    copy = dict(given)
    try:
        options = environment.prepare(copy)
    except MxkError as error:
        yield Finding.failed(name, error)
        return
    if options is None:
        yield Finding(name, "ok", f"lazy mode's hook is off: MXFP4_TPC_MOE={switch or 0}")
        return
    changes = [f"{key}={value}" for key, value in copy.items() if given.get(key) != value]
    found = f"lazy mode's hook: {options.version}, up to {options.max_tokens} tokens"
    yield Finding(name, "ok", f"{found}; sets {', '.join(changes)}" if changes else found)


def library() -> Iterator[Finding]:
    """The build that the variables name: its files against its MANIFEST, and that against this image."""
    name, given = "Gaudi library", process_environment()
    if not _concerned():
        yield Finding(name, "ok", "no Gaudi software here, nothing to check")
        return
    folders = [
        Path(path).parent for path in given.get("GC_KERNEL_PATH", "").split(":") if KERNEL_LIBRARY in path
    ]
    if given.get("MXFP4_TPC_MOE", "0") == "1" or given.get("MXFP4_TPC_MOE_LIB"):
        folders.append(Path(given.get("MXFP4_TPC_MOE_LIB") or environment.FOLDER))
    if settings.vllm and not environment.is_lazy(
        given
    ):  # what the plugin takes in a vLLM server (integrations/vllm_gaudi.py)
        folders.append(Path(settings.gaudi_lib))
    if not folders:
        yield Finding(name, "ok", f"no variable names a {KERNEL_LIBRARY}: kernels are off")
    for folder in dict.fromkeys(folders):
        try:
            manifest = read_manifest(folder)
        except MxkError as error:
            yield Finding.failed(name, error)
            continue
        different = list(_differences(manifest))
        yield from (
            Finding(name, "fail", f"{folder}: {text}", "build it again, in this image") for text in different
        )
        if not different:
            yield Finding(
                name, "ok", f"{folder}: {manifest.version}, files and image are those of its {MANIFEST}"
            )


def _differences(manifest: Manifest) -> Iterator[str]:
    """What the image has that the build was not made with."""
    found = {"torch": str(torch.__version__)}
    try:
        found[_BRIDGE] = importlib.metadata.version(_BRIDGE)
    except importlib.metadata.PackageNotFoundError:
        found[_BRIDGE] = "unknown"
    for package, version in found.items():
        built = manifest.versions.get(package, "unknown")
        if built != version:
            yield f"built with {package} {built}, here is {version}"
    stock = Path(manifest.stock.get("path", ""))
    try:
        digest = hashlib.sha256(stock.read_bytes()).hexdigest()
    except OSError as error:
        yield f"the stock library {stock} cannot be read: {error.strerror}"
        return
    if digest != manifest.stock.get("sha256"):
        yield f"the stock library {stock} is another than the one it was built with"
