"""Python files that belong to no package (setup.py, benchmarks, examples), as modules; the command `mxk`."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[1]
MXK = [sys.executable, str(ROOT / "mxk_command.py")]
"""The command `mxk` of this checkout, in a process of its own."""


def load(path: str) -> ModuleType:
    """The file at `path` below the repository's root, run and known to imports by its own name."""
    name = Path(path).stem
    specification = importlib.util.spec_from_file_location(name, ROOT / path)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[name] = module
    specification.loader.exec_module(module)
    return module
