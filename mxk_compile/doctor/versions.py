"""Checks of versions, against what README's table says was run."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import re
import sys
from collections.abc import Iterator

from mxk_compile.doctor.finding import Finding
from mxk_compile.settings import Settings, settings


@dataclasses.dataclass(frozen=True)
class Versions:
    """Versions [lowest, end) that are supported, and the ones the tests ran on; each as (major, minor)."""

    lowest: tuple[int, int]
    end: tuple[int, int]
    ran: tuple[tuple[int, int], ...]

    def judge(self, name: str, text: str) -> Finding:
        """The finding about one version."""
        numbers = [int(number) for number in re.findall(r"\d+", text)[:2]]
        version = (numbers[0], numbers[1]) if len(numbers) == 2 else (0, 0)
        allowed = f"{self.lowest[0]}.{self.lowest[1]} up to, not including, {self.end[0]}.{self.end[1]}"
        if not self.lowest <= version < self.end:
            return Finding(name, "fail", f"{text}; supported: {allowed}", "install a supported version")
        if version not in self.ran:
            known = ", ".join(f"{major}.{minor}" for major, minor in self.ran)
            return Finding(name, "ok", f"{text}: supported, not run by us; run: {known}")
        return Finding(name, "ok", text)


PYTHON = Versions((3, 10), (3, 14), ((3, 11), (3, 12)))
TORCH = Versions((2, 10), (2, 15), ((2, 11), (2, 13), (2, 14)))
TRANSFORMERS = Versions((5, 10), (6, 0), ((5, 10), (5, 17), (5, 23), (5, 24)))


def settings_line() -> Iterator[Finding]:
    """The settings that are not at their default."""
    changed = [
        f"{field.name}={getattr(settings, field.name)!r}"
        for field in dataclasses.fields(Settings)
        if getattr(settings, field.name) != field.default
    ]
    yield Finding("settings", "ok", ", ".join(changed) or "all at their defaults")


def python() -> Iterator[Finding]:
    """The interpreter."""
    yield PYTHON.judge("python", sys.version.split()[0])


def torch_version() -> Iterator[Finding]:
    """torch, and what it was built for."""
    import torch

    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU"
    if torch.version.hip is not None:
        build = f"ROCm {torch.version.hip}"
    found = TORCH.judge("torch", torch.__version__)
    yield dataclasses.replace(found, found=f"{found.found} (built for {build})")


def transformers() -> Iterator[Finding]:
    """transformers, which only some commands need."""
    try:
        version = importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        found = "not installed: mxk_compile.load and mxk demo, generate, explain need it"
        yield Finding(
            "transformers", "warn", found, "pip install 'mxk-compile[transformers]', if you use these"
        )
        return
    yield TRANSFORMERS.judge("transformers", version)
