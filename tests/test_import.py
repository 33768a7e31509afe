"""Importing the package opens no device, loads nothing heavy, and costs little beyond torch."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

# Counted in CPU seconds, not on the wall clock: other work on the machine does not change them.
SCRIPT = """
import json, os, sys, time
import torch
before, start = set(sys.modules), time.process_time()
import mxk_compile
cpu_s = time.process_time() - start
fds = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
opened = [os.readlink(fd) for fd in fds if os.path.exists(fd)]
print(json.dumps({
    "cpu_s": cpu_s,
    "modules": sorted(set(sys.modules) - before),
    "opened": [path for path in opened if path.startswith("/dev/")],
    "cuda": torch.cuda.is_initialized(),
}))
"""
HEAVY = (
    *("transformers", "vllm", "triton", "safetensors", "sympy"),
    *("torch._dynamo", "torch._inductor", "torch._functorch"),
)


@pytest.fixture(scope="module")
def imported() -> dict[str, Any]:
    """What the script saw: the best of three processes in `cpu_s`, the first one's for the rest."""
    runs = []
    for _ in range(3):
        # With a pipe for each stream, no terminal is among the opened files.
        result = subprocess.run(
            [sys.executable, "-c", SCRIPT], stdin=subprocess.PIPE, capture_output=True, text=True, check=True
        )
        runs.append(json.loads(result.stdout))
    return {**runs[0], "cpu_s": min(run["cpu_s"] for run in runs)}


def test_nothing_heavy_is_imported(imported: dict[str, Any]) -> None:
    heavy = [name for name in imported["modules"] if name.startswith(HEAVY)]
    assert heavy == []
    assert "mxk_compile.ops.moe" in imported["modules"]


def test_no_device_is_opened(imported: dict[str, Any]) -> None:
    assert not imported["cuda"]
    assert [path for path in imported["opened"] if path not in ("/dev/null", "/dev/urandom")] == []


def test_import_takes_less_than_300_ms_beyond_torch(imported: dict[str, Any]) -> None:
    print(f"import mxk_compile after torch: {imported['cpu_s'] * 1e3:.0f} ms of CPU time")
    assert imported["cpu_s"] < 0.3


def test_public_names_are_what_they_say() -> None:
    # In its own process and after the submodules, whose names must not replace the functions.
    script = (
        "import mxk_compile.backend, mxk_compile.settings, mxk_compile.explain, mxk_compile as m; "
        "print([name for name in m.__all__ if name != 'load' and not hasattr(m, name)], "
        "callable(m.explain), callable(m.explain), isinstance(m.settings, m.Settings))"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout == "[] True True True\n"
