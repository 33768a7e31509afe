"""Checks of the kernels: which run here, and why the others do not. One small call of each is compared with fp32."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import torch

from mxk_compile.doctor.finding import Finding
from mxk_compile.kernels import cpu, cuda
from mxk_compile.kernels.cuda import build
from mxk_compile.settings import CPU_ISAS, settings
from mxk_compile.testing import random_case, rel_l2

_PROC = Path("/proc")
# What each instruction set needs of /proc/cpuinfo, as setup.py compiles it.
_FLAGS = {
    "portable": ("ssse3",),
    "avx2": ("avx2", "fma", "f16c"),
    "avx512": ("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vbmi", "avx512_vnni"),
    "amx": ("amx_int8", "amx_bf16", "amx_tile"),
}
_MOST_ERROR = 2.5e-3  # of the small calls below; a wrong kernel is off by far more


def cpu_kernels() -> Iterator[Finding]:
    """The library, its instruction set and its threads."""
    name = "CPU kernels"
    reason = cpu.available()
    if reason is not None:
        found, _, fix = reason.partition("; ")
        yield Finding(
            name, "fail", f"{found}: the torch reference runs instead", fix or "reinstall the package"
        )
        return
    chosen = cpu.isa()
    better = CPU_ISAS[CPU_ISAS.index(chosen) + 1 :]
    why = [f"{isa}: {_why_not(isa)}" for isa in better]
    yield Finding(
        name, "ok", f"{chosen}, MXK_CPU_ISA={settings.cpu_isa}" + "".join(f"; not {each}" for each in why)
    )
    if cpu.threads() == "none":
        found = "one thread: this torch has no OpenMP runtime that the kernels can share"
        yield Finding(name, "warn", found, "use a torch built with OpenMP")
    errors = {kind: _error(weight_format=kind, num_tokens=4) for kind in ("mxfp4", "uint4")}
    worst = max(errors, key=lambda kind: errors[kind])
    if not errors[worst] <= _MOST_ERROR:
        found = f"{worst}: rel_l2 {errors[worst]:.1e} against fp32, limit {_MOST_ERROR:.1e}"
        yield Finding(name, "fail", found, "run mxk parity --device cpu, and report it")
        return
    yield Finding(name, "ok", "a small call of mxfp4 and uint4 agrees with fp32")


def _error(**arguments: object) -> float:
    case = random_case(**arguments)  # type: ignore[arg-type]
    with torch.no_grad():
        return rel_l2(case.fused(), case.reference())


def _why_not(isa: str) -> str:
    """Why an instruction set is not the one that runs."""
    try:
        text = (_PROC / "cpuinfo").read_text()
    except OSError:
        return "not known here"
    found = set((re.search(r"^flags\s*: (.*)$", text, re.MULTILINE) or [""])[0].split())
    missing = [flag for flag in _FLAGS.get(isa, ()) if flag not in found]
    if missing:
        return f"this processor lacks {', '.join(missing)}"
    return (
        "MXK_CPU_ISA chose another"
        if settings.cpu_isa != "auto"
        else "the kernel's call or the build lacks it"
    )


def cuda_kernels() -> Iterator[Finding]:
    """The device, torch's build, the bindings."""
    name = "CUDA kernels"
    if torch.version.cuda is None and (_PROC / "driver" / "nvidia" / "version").exists():
        found = "this machine has an NVIDIA driver, and torch is a build without CUDA"
        yield Finding(name, "warn", found, "install a CUDA build of torch and mxk-compile[cuda]")
        return
    reason = cuda.unavailable()
    if not torch.cuda.is_available():
        yield Finding(name, "ok", f"not used: {reason}")
        return
    device = f"{torch.cuda.get_device_name()}, {torch.cuda.device_count()} device(s)"
    if reason is not None:
        yield Finding(name, "warn", f"{device}: {reason}", "calls run the fp32 torch reference there")
        return
    bindings, built_for = _major("cuda-bindings"), int(str(torch.version.cuda).partition(".")[0])
    if bindings != built_for:
        found = f"{device}: cuda-bindings {bindings}, torch for CUDA {built_for}"
        yield Finding(name, "warn", found, f"pip install 'cuda-bindings>={built_for},<{built_for + 1}'")
        return
    kind = cuda.devices.served()
    if not kind.measured:
        yield Finding(
            name, "warn", f"{device}: {kind}", "MXK_CUDA_UNMEASURED is set: check results, and tell us"
        )
        return
    yield Finding(name, "ok", f"{device}, compiled at the first call of a shape into {build.cache_folder()}")


def _major(distribution: str) -> int:
    from importlib import metadata

    return int(metadata.version(distribution).partition(".")[0])
