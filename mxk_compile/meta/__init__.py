"""Fakes: shape, dtype and device rules of every op, and the `check_*` functions that eager calls share with them."""

from __future__ import annotations

from mxk_compile.meta import dequant, moe, project, stack, stock

__all__ = ["dequant", "moe", "project", "stack", "stock"]
