"""`weight`: quantising."""

from __future__ import annotations

from mxk_compile.integrations.humming.utils import weight

__all__ = ["weight"]
