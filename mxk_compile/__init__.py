"""`torch.compile(model, backend="mxk")`: 4-bit mixture-of-experts layers run fused, from their packed weights.

Importing this package defines the ops (`mxk::*`, and `hpu::*` where the Gaudi bridge is not installed); it opens no
device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mxk_compile import kernels, meta, ops
from mxk_compile.errors import MxkError
from mxk_compile.explain import explain
from mxk_compile.settings import Settings, settings
from mxk_compile.version import __version__

if TYPE_CHECKING:
    from mxk_compile.integrations.transformers import load

__all__ = ["MxkError", "Settings", "__version__", "explain", "kernels", "load", "meta", "ops", "settings"]


def __getattr__(name: str) -> Any:
    if name == "load":  # lazy: only this one needs transformers
        from mxk_compile.integrations.transformers import load

        return load
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
