"""Settings: read once from the environment (`MXK_*`), frozen, printable; the only reader of the environment."""

from __future__ import annotations

import dataclasses
import operator
import os
import re
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

from mxk_compile.errors import SettingsError

CPU_ISAS = ("auto", "baseline", "portable", "avx2", "avx512", "amx")


@dataclasses.dataclass(frozen=True)
class Settings:
    """Everything that changes which kernel runs, or what is written about it.

    Attributes:
        max_tokens: cap; calls of at most this many tokens may be fused. 0 fuses nothing, None is no cap.
            Default 32, as vllm-gaudi's MXFP4 decode kernels.
        cpu_isa: instruction set of the CPU kernels; "auto" takes the best this machine has.
        dump_dir: folder for numbered before/after graphs, or None.
        cache_dir: folder for compiled GPU kernels and tuned schedules; by default mxk in the user's cache folder.
        cuda_unmeasured: whether the CUDA kernels run on devices that they never ran on (kernels/cuda/devices.py).
        cuda_schedule: the CUDA kernels' schedule of every call (kernels/cuda/schedule.py), or None for the chosen one.
        vllm: whether vLLM's MoE layers run through `mxk::moe` (integrations/vllm.py).
        gaudi_lib: folder of a build of `mxk build-tpc --pt2`, for a vLLM server on Gaudi (integrations/vllm_gaudi.py).
        vllm_humming: whether `import humming` finds integrations/humming in the processes of a vLLM server.
    """

    max_tokens: int | None = 32
    cpu_isa: str = "auto"
    dump_dir: str | None = None
    cache_dir: str = os.path.join("~", ".cache", "mxk")
    cuda_schedule: str | None = None
    cuda_unmeasured: bool = False
    vllm: bool = False
    vllm_humming: bool = False
    gaudi_lib: str = "/opt/mxk/lib"

    def identity(self) -> tuple[object, ...]:
        """What of this changes a compiled graph, for cache keys."""
        return (self.max_tokens, self.cpu_isa, self.cuda_unmeasured)

    def replace(self, **changes: Any) -> Settings:
        """A copy with the given fields changed, validated like the environment; raises SettingsError."""
        parsed = {}
        for name, value in changes.items():
            if name not in _PARSERS:
                raise SettingsError(
                    "mxk option", f"{name!r}", ", ".join(sorted(_PARSERS)), "correct the name"
                )
            parsed[name] = _parse(f"mxk option {name}", name, value)
        return dataclasses.replace(self, **parsed)


def whole_number(value: Any, least: int = 0, most: int = 2**63 - 1) -> int:
    """An integer within these limits, given as one or in decimal digits; raises ValueError or TypeError for another.

    int() would also take other scripts' digits, "1_000" and true, and refuse thousands of digits in words of its own.
    """
    if isinstance(value, str):
        if not re.fullmatch(r"\s*[0-9]{1,19}\s*", value):
            raise ValueError
        value = int(value)
    if isinstance(value, bool) or not least <= operator.index(value) <= most:
        raise ValueError
    return operator.index(value)


def _max_tokens(value: Any) -> int | None:
    return None if value is None or value == "any" else whole_number(value)


def _cpu_isa(value: Any) -> str:
    if value not in CPU_ISAS:
        raise ValueError
    return str(value)


def _dump_dir(value: Any) -> str | None:
    return os.fspath(value) if value else None


def _folder(value: Any) -> str:
    if not value:
        raise ValueError
    return str(os.fspath(value))


def _cuda_schedule(value: Any) -> str | None:
    return str(value) if value else None


def _switch(value: Any) -> bool:
    return bool(("0", "1").index(value))


_PARSERS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "max_tokens": (_max_tokens, "an integer >= 0, or 'any'"),
    "cpu_isa": (_cpu_isa, ", ".join(CPU_ISAS)),
    "dump_dir": (_dump_dir, "a folder name"),
    "cache_dir": (_folder, "a folder name"),
    "cuda_schedule": (_cuda_schedule, "a schedule, as `mxk tune` prints it"),
    "cuda_unmeasured": (_switch, "0, 1"),
    "vllm": (_switch, "0, 1"),
    "vllm_humming": (_switch, "0, 1"),
    "gaudi_lib": (_folder, "a folder name"),
}
_VARIABLES = {
    "max_tokens": "MXK_MAX_TOKENS",
    "cpu_isa": "MXK_CPU_ISA",
    "dump_dir": "MXK_DUMP",
    "cache_dir": "MXK_CACHE_DIR",
    "cuda_schedule": "MXK_CUDA_SCHEDULE",
    "cuda_unmeasured": "MXK_CUDA_UNMEASURED",
    "vllm": "MXK_VLLM",
    "gaudi_lib": "MXK_GAUDI_LIB",
    "vllm_humming": "MXK_VLLM_HUMMING",
}


def _parse(source: str, name: str, value: Any) -> Any:
    parser, allowed = _PARSERS[name]
    try:
        return parser(value)
    except (ValueError, TypeError):
        raise SettingsError(source, repr(value), allowed, "correct or unset it") from None


def from_environment(environment: Mapping[str, str]) -> Settings:
    """Settings from `MXK_*` variables; raises SettingsError naming the variable and its value.

    An unknown `MXK_` variable would be a spelling mistake that silently does nothing, so it is refused too.
    """
    known = {variable: name for name, variable in _VARIABLES.items()}
    values: dict[str, Any] = {}
    if environment.get("XDG_CACHE_HOME"):  # XDG Base Directory Specification
        values["cache_dir"] = os.path.join(environment["XDG_CACHE_HOME"], "mxk")
    for variable, value in environment.items():
        if variable in known:
            values[known[variable]] = _parse(variable, known[variable], value)
        elif variable.startswith("MXK_"):
            raise SettingsError(
                variable, repr(value), ", ".join(sorted(known)), "correct the name or unset it"
            )
    return Settings(**values)


def process_environment() -> dict[str, str]:
    """A copy of all variables of this process, for checks of what other packages read (`mxk doctor`)."""
    return dict(os.environ)


def live_environment() -> MutableMapping[str, str]:
    """The environment itself, for what other packages must find there before a device opens (vllm_gaudi.py)."""
    return os.environ


settings = from_environment(os.environ)
"""The settings of this process. A wrong variable stops the import, and `mxk` with its one line (mxk_command.py)."""
