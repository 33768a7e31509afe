"""What is said where an op runs its torch reference, because no kernel takes the call."""

from __future__ import annotations

import functools
import logging

_logger = logging.getLogger("mxk_compile.kernels")


@functools.cache
def say_reference_once(op: str, reason: str) -> None:
    """Warns once in a process for each op and reason."""
    _logger.warning("%s runs its torch reference: %s", op, reason)
