"""Number formats under the names that servers use: "uint4", "bfloat16", "float4e2m1", "float8e8m0", ..."""

from __future__ import annotations

import dataclasses
import re

import torch

from mxk_compile.errors import CallError

_FLOATS = {"float16": (5, 10), "bfloat16": (8, 7), "float32": (8, 23)}
_TORCH = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float32"}


@dataclasses.dataclass(frozen=True)
class DataType:
    """A number format.

    Attributes:
        name: as given to `from_str`.
        num_bits: of a value.
        is_signed: whether it has a sign.
        exponent_bits, mantissa_bits: of a floating point format, 0 in integers.
    """

    name: str
    num_bits: int
    is_signed: bool
    exponent_bits: int = 0
    mantissa_bits: int = 0

    @property
    def is_floating_point_type(self) -> bool:
        """Whether it has an exponent."""
        return self.exponent_bits > 0

    @property
    def is_integer_type(self) -> bool:
        """Whether it has none."""
        return not self.is_floating_point_type

    def __str__(self) -> str:
        return self.name

    @classmethod
    def from_str(cls, name: str) -> DataType:
        """The format of that name; raises CallError if there is none."""
        if (integer := re.fullmatch(r"(u?)int([1-9][0-9]?)", name)) is not None:
            return cls(name, int(integer[2]), not integer[1])
        if name in _FLOATS:
            exponent, mantissa = _FLOATS[name]
            return cls(name, 1 + exponent + mantissa, True, exponent, mantissa)
        if (floating := re.fullmatch(r"float([0-9]+)e([0-9]+)m([0-9]+)", name)) is not None:
            bits, exponent, mantissa = map(int, floating.groups())
            # Powers of two alone have no sign: float8e8m0.
            if exponent and bits - exponent - mantissa == (1 if mantissa else 0):
                return cls(name, bits, bits > exponent + mantissa, exponent, mantissa)
        allowed = f"intN, uintN, {', '.join(_FLOATS)}, floatNeXmY"
        raise CallError("humming dtype", f"{name!r}", allowed, "name a number format")

    @classmethod
    def from_torch_dtype(cls, dtype: torch.dtype) -> DataType:
        """The format of a torch dtype; raises CallError for others than fp16, bf16 and fp32."""
        if dtype not in _TORCH:
            raise CallError("humming dtype", f"{dtype}", ", ".join(map(str, _TORCH)), "convert the tensor")
        return cls.from_str(_TORCH[dtype])


uint4 = DataType.from_str("uint4")
int4 = DataType.from_str("int4")
float4e2m1 = DataType.from_str("float4e2m1")
float8e8m0 = DataType.from_str("float8e8m0")
float8e4m3 = DataType.from_str("float8e4m3")
float16 = DataType.from_str("float16")
bfloat16 = DataType.from_str("bfloat16")
float32 = DataType.from_str("float32")
