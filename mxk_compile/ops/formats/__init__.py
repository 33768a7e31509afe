"""Weight formats, in pure torch for any device: MXFP4 (`mxfp4`) and group-scaled INT4 (`int4`)."""

from __future__ import annotations

from mxk_compile.ops.formats import int4, mxfp4

__all__ = ["int4", "mxfp4"]
