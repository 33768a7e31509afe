"""`torch.compile(model, backend="mxk")`: 4-bit mixture-of-experts layers run fused, from their packed weights.

Importing this package defines the ops (`mxk::*`, and `hpu::*` where the Gaudi bridge is not installed); it opens no
device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mxk_compile.errors import MxkError
from mxk_compile.settings import Settings, settings  # first: a wrong variable stops here, with no op defined

# isort: split
from mxk_compile import kernels, meta, ops
from mxk_compile.explain import explain
from mxk_compile.version import __version__

if TYPE_CHECKING:
    from mxk_compile.integrations.convert import convert
    from mxk_compile.integrations.transformers import load

__all__ = [
    "MxkError",
    "Settings",
    "__version__",
    "convert",
    "explain",
    "kernels",
    "load",
    "meta",
    "ops",
    "settings",
]


def __getattr__(name: str) -> Any:
    if name == "load":  # lazy, as `convert`: only these two are for transformers
        from mxk_compile.integrations.transformers import load

        return load
    if name == "convert":
        from mxk_compile.integrations.convert import convert

        return convert
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
