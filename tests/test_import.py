"""Importing the package opens no device, and loads nothing beyond torch but its own parts that define the ops."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

SCRIPT = """
import json, os, sys
import torch
before = set(sys.modules)
import mxk_compile
fds = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
opened = [os.readlink(fd) for fd in fds if os.path.exists(fd)]
print(json.dumps({
    "modules": sorted(set(sys.modules) - before),
    "opened": [path for path in opened if path.startswith("/dev/")],
    "cuda": torch.cuda.is_initialized(),
}))
"""
COMPILERS = ("torch._dynamo", "torch._inductor", "torch._functorch")
OWN = {"errors", "explain", "kernels", "meta", "ops", "settings", "variants", "version"}


@pytest.fixture(scope="module")
def imported() -> dict[str, Any]:
    """What the script saw."""
    # With a pipe for each stream, no terminal is among the opened files.
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT], stdin=subprocess.PIPE, capture_output=True, text=True, check=True
    )
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_no_other_package_and_no_compiler_is_imported(imported: dict[str, Any]) -> None:
    names = {name.partition(".")[0] for name in imported["modules"]}
    assert names - sys.stdlib_module_names - {"torch"} == {"mxk_compile"}
    assert [name for name in imported["modules"] if name.startswith(COMPILERS)] == []


def test_only_what_defines_the_ops_is_imported(imported: dict[str, Any]) -> None:
    assert {name.split(".")[1] for name in imported["modules"] if name.startswith("mxk_compile.")} == OWN


def test_no_device_is_opened(imported: dict[str, Any]) -> None:
    assert not imported["cuda"]
    assert [path for path in imported["opened"] if path not in ("/dev/null", "/dev/urandom")] == []


def test_public_names_are_what_they_say() -> None:
    # In its own process and after the submodules, whose names must not replace the functions.
    script = (
        "import mxk_compile.backend, mxk_compile.settings, mxk_compile.explain, mxk_compile as m; "
        "print([name for name in m.__all__ if name != 'load' and not hasattr(m, name)], "
        "callable(m.explain), callable(m.explain), isinstance(m.settings, m.Settings))"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout == "[] True True True\n"
