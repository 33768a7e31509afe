"""The import surface of `humming` in front of `mxk::project`, for servers that look for a backend of that shape.

It is the surface that vLLM's humming backend had before its functional API (vLLM #49610, July 2026), and that Chord
answers to: humming.dtypes, .config, .layer, .schema, .utils.weight. Weights stay in the checkpoint's layout, whatever
the kind of routing; indexed, grouped-contiguous and grouped-masked calls run, on CUDA by kernels, on CPU by the torch
reference.

Nothing here is installed under that name. `enable()` makes the alias for the running process; the plugin calls it in
every process of a server where `MXK_VLLM_HUMMING=1` (integrations/vllm.py).
"""

from __future__ import annotations

import importlib
import importlib.util
import sys

from mxk_compile.errors import InstallError

NAME = "humming"
MODULES = ("", ".dtypes", ".config", ".layer", ".schema", ".utils", ".utils.weight")


def enable() -> None:
    """Makes `import humming`, in this process, find this package; a second call changes nothing.

    Raises:
        InstallError: another `humming` is installed or imported.
    """
    loaded = sys.modules.get(NAME)
    if loaded is sys.modules[__name__]:
        return
    found = loaded if loaded is not None else importlib.util.find_spec(NAME)
    if found is not None:
        where = getattr(found, "origin", None) or getattr(found, "__file__", None) or "this process"
        given, allowed = f"a package {NAME!r} is there already ({where})", "an environment without it"
        raise InstallError("humming alias", given, allowed, "use that one, or uninstall it")
    for module in MODULES:
        sys.modules[NAME + module] = importlib.import_module(__name__ + module)
