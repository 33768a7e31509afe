"""The version, in one place: read by pyproject.toml and part of every cache key."""

from __future__ import annotations

__version__ = "0.1.0"
