"""`mxk doctor`: one line a check, what is wrong and how it is mended; it fails only where it finds something.

finding.py is a line; versions.py, kernels.py, plugins.py and gaudi.py are the checks. Each runs in a thread of its own
with a time limit, so that nothing that is broken, slow or hanging keeps the others from being said.
"""

from __future__ import annotations

import importlib
import json
import threading
from collections.abc import Callable, Iterable, Sequence

from mxk_compile.doctor.finding import Finding
from mxk_compile.version import __version__

LIMIT_SECONDS = 120.0
"""Longest that one check may take: the slowest takes two seconds, and forty on one core with a dozen others at work."""


def _of(module: str, name: str) -> Callable[[], Iterable[Finding]]:
    """A check whose module is imported when it runs: what it stands on may be what is broken."""

    def check() -> Iterable[Finding]:
        found: Iterable[Finding] = getattr(importlib.import_module(f"{__name__}.{module}"), name)()
        return found

    return check


CHECKS: tuple[tuple[str, Callable[[], Iterable[Finding]]], ...] = (
    ("python", _of("versions", "python")),
    ("torch", _of("versions", "torch_version")),
    ("transformers", _of("versions", "transformers")),
    ("CPU kernels", _of("kernels", "cpu_kernels")),
    ("CUDA kernels", _of("kernels", "cuda_kernels")),
    ("backend", _of("plugins", "backend")),
    ("compile caches", _of("plugins", "caches")),
    ("vLLM plugin", _of("plugins", "vllm_plugin")),
    ("Gaudi variables", _of("gaudi", "variables")),
    ("Gaudi library", _of("gaudi", "library")),
    ("copies", _of("plugins", "copies")),
    ("loaded libraries", _of("plugins", "loaded")),
)
"""In the order of the lines: what the others stand on comes first."""


def diagnose(refused: Sequence[str] = ()) -> list[Finding]:
    """All findings; `refused` are settings that were wrong and are at their default now. Raises nothing."""
    findings = [Finding("settings", "fail", *_split(text)) for text in refused]
    findings = findings or _isolated("settings", _of("versions", "settings_line"))
    for name, check in CHECKS:
        findings += _isolated(name, check)
    return findings


def run(refused: Sequence[str] = (), as_json: bool = False) -> int:
    """Prints every finding; returns the exit code: 1 if one of them is "fail"."""
    findings = diagnose(refused)
    failed = any(finding.state == "fail" for finding in findings)
    if as_json:
        print(
            json.dumps(
                {"passed": not failed, "version": __version__, "checks": [vars(each) for each in findings]},
                indent=2,
            )
        )
    else:
        for finding in findings:
            print(finding)
    return int(failed)


def _split(text: str) -> tuple[str, str]:
    """The text of one of our errors as what was found and what to do."""
    found, _, fix = text.rpartition("; ")
    return found, fix


def _isolated(name: str, check: Callable[[], Iterable[Finding]]) -> list[Finding]:
    """What a check finds before it ends, fails or runs out of time; how it failed is one more finding."""
    found: list[Finding] = []
    broken: list[BaseException] = []

    def work() -> None:
        try:
            for finding in check():
                found.append(finding)
        except BaseException as error:  # a plugin's sys.exit() too
            broken.append(error)

    thread = threading.Thread(target=work, name=f"mxk doctor: {name}", daemon=True)
    thread.start()
    thread.join(LIMIT_SECONDS)
    results = list(found)
    if broken:
        text = " ".join(f"{type(broken[0]).__name__}: {broken[0]}".split())
        results.append(Finding(name, "fail", f"the check itself broke: {text[:300]}", "report this line"))
    elif thread.is_alive():
        text = f"no answer within {LIMIT_SECONDS:g} s"
        results.append(Finding(name, "warn", text, "try again when the machine is idle; else report it"))
    return results
