"""Enumerations that servers name."""

from __future__ import annotations

from enum import Enum


class GemmType(str, Enum):
    """Kind of routing of a call."""

    DENSE = "dense"
    INDEXED = "indexed"
    GROUPED_CONTIGUOUS = "grouped_contiguous"
    GROUPED_MASKED = "grouped_masked"

    __str__ = str.__str__


class WeightScaleType(str, Enum):
    """What shares a scale: GROUP and CHANNEL run, the others are named to be refused."""

    GROUP = "group"
    CHANNEL = "channel"
    BLOCK = "block"
    TENSOR = "tensor"
    GROUP_TENSOR = "group_tensor"

    __str__ = str.__str__


class WeightScale2Type(str, Enum):
    """Of a second scale; only NONE runs."""

    NONE = "none"
    CHANNEL = "channel"
    TENSOR = "tensor"

    __str__ = str.__str__
