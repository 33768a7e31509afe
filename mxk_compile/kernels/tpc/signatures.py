"""The one table of the Gaudi 2 kernels: name, tensors in order, scalars, limits, and which variant holds which.

Everything else follows it: the C++ tables of the glue and of both op libraries are generated from it (build.py), the
lowering and the lazy path call by it, tests compare the kernels' own tables with it. A kernel's name is its GUID in the
kernel library and the name of its op, `torch.ops.custom_op.<name>`: no overloads, because the bridge looks an op up by
its name alone.

Shapes are in torch order (slowest dimension first; the glue sees them reversed) and written in these symbols:

    T tokens   k routes a token   R = T*k routes   K hidden   I intermediate of this card   E local experts
    KP, IP     K, I rounded up to whole chunks of 512
    N, C       rows, columns of one expert's matrix (mxk_deq)

`x` and `a` are in chunk order: per chunk of 512 values, position 128p + i holds element 4i + p (p < 4, i < 128). Their
padding is zero.

A tensor count is never used twice within one variant: with the legacy API the bridge caches a custom op by its input
signature, not by its GUID, and a second op of the same signature would return the first one's result (published:
"MXFP4 MoE decode kernels", pitfalls).
"""

from __future__ import annotations

import dataclasses
import re

import torch

CHUNK = 512
"""Values that one 256-byte load of a weight row holds."""
NUM_TPC = 24
"""Index-space points, one per TPC of a Gaudi 2; each owns a fixed slice of the output rows."""
MAX_ROUTES = 128
MAX_EXPERTS = 128
MAX_ROWS = 8168
"""Rows of one matrix of mxk_deq that a call may have; its own division by 24 (MXK_SLICE) holds further."""
MAX_COLUMNS = 8192
"""Columns of it: the largest K of a variant."""
MAX_NODE_TENSORS = 16
"""Inputs and outputs that a TPC node may have (Synapse interface: MAX_TENSORS_GAUDI)."""
DTYPES = {"u8": torch.uint8, "i32": torch.int32, "bf16": torch.bfloat16, "f32": torch.float32}
"""A kernel's dtypes by the names below."""


def padded(size: int) -> int:
    """K or I rounded up to whole chunks."""
    return -(-size // CHUNK) * CHUNK


_DIMENSION = re.compile(r"(\d*)([A-Za-z]+)(?:/(\d+))?")


@dataclasses.dataclass(frozen=True)
class Dimension:
    """One size, `times * symbol / divide`."""

    symbol: str
    times: int = 1
    divide: int = 1

    @classmethod
    def parse(cls, text: str) -> Dimension:
        """Reads "K", "2I", "K/32"; raises ValueError for anything else."""
        match = _DIMENSION.fullmatch(text)
        if match is None:
            raise ValueError(text)
        return cls(match[2], int(match[1] or 1), int(match[3] or 1))

    def __str__(self) -> str:
        times = str(self.times) if self.times > 1 else ""
        return f"{times}{self.symbol}" + (f"/{self.divide}" if self.divide > 1 else "")

    def size(self, sizes: dict[str, int]) -> int:
        """The number, given a value for each symbol."""
        return sizes[self.symbol] * self.times // self.divide


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One tensor of a kernel: name, dtype ("u8", "i32", "bf16", "f32") and shape, slowest dimension first."""

    name: str
    dtype: str
    shape: tuple[Dimension, ...]

    @property
    def text(self) -> str:
        """The shape in symbols, as in this file."""
        return f"[{', '.join(map(str, self.shape))}]"


@dataclasses.dataclass(frozen=True)
class Scalar:
    """One scalar of a kernel, "int" or "float" (32 bits each); it is also the op's argument of that name."""

    name: str
    kind: str


@dataclasses.dataclass(frozen=True)
class Limits:
    """Sizes that a kernel runs: multiples and maxima of K and I, most tokens a call."""

    hidden_multiple: int
    hidden_max: int
    intermediate_multiple: int
    intermediate_max: int
    max_tokens: int

    def refuse(self, num_tokens: int, top_k: int, hidden: int, intermediate: int, experts: int) -> str | None:
        """None if a call of these sizes runs, else the reason in one line. Negative `num_tokens`: not known yet."""
        for name, given, multiple, most in (
            ("K", hidden, self.hidden_multiple, self.hidden_max),
            ("I", intermediate, self.intermediate_multiple, self.intermediate_max),
            ("E", experts, 1, MAX_EXPERTS),
            ("top_k", top_k, 1, MAX_ROUTES),
        ):
            if given <= 0 or given % multiple or given > most:
                kind = f"a multiple of {multiple}, " if multiple > 1 else ""
                return f"{name} is {given}, allowed: {kind}1 to {most}"
        if num_tokens == 0 or num_tokens > self.max_tokens:
            return f"{num_tokens} tokens, allowed: 1 to {self.max_tokens}"
        if num_tokens * top_k > MAX_ROUTES:
            return f"{num_tokens * top_k} routes, allowed: 1 to {MAX_ROUTES}"
        return None


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One TPC kernel and its op.

    Attributes:
        name: GUID, and name of the op in namespace `custom_op`.
        inputs, output: tensors in the order of the kernel's `main`.
        scalars: after the tensors, in the order of the kernel's `main`.
    """

    name: str
    inputs: tuple[Tensor, ...]
    output: Tensor
    scalars: tuple[Scalar, ...] = ()

    @property
    def arguments(self) -> list[str]:
        """Names of the op's arguments: inputs, then scalars."""
        return [tensor.name for tensor in self.inputs] + [scalar.name for scalar in self.scalars]

    @property
    def schema(self) -> str:
        """What TORCH_LIBRARY_FRAGMENT(custom_op, m) defines."""
        arguments = [f"Tensor {tensor.name}" for tensor in self.inputs]
        arguments += [f"{scalar.kind} {scalar.name}" for scalar in self.scalars]
        return f"{self.name}({', '.join(arguments)}) -> Tensor"


def _tensor(text: str) -> Tensor:
    name, dtype, shape = text.split(" ", 2)
    return Tensor(name, dtype, tuple(Dimension.parse(part.strip()) for part in shape.strip("[]").split(",")))


def _kernel(name: str, inputs: str, output: str, scalars: str = "") -> Kernel:
    parsed = tuple(Scalar(word.split(":")[0], word.split(":")[1]) for word in scalars.split())
    return Kernel(name, tuple(map(_tensor, inputs.split("; "))), _tensor(output), parsed)


_W13 = "x bf16 [T,KP]; ids i32 [T,k]; w13 u8 [E,2I,K/2]; s13 u8 [E,2I,K/32]"
_W2 = "a bf16 [R,IP]; ids i32 [T,k]; rw f32 [T,k]; w2 u8 [E,K,I/2]; s2 u8 [E,K,I/32]"
_W13_INT4 = "x bf16 [T,KP]; ids i32 [T,k]; w13 u8 [E,2I,K/2]; s13 bf16 [E,2I,K/32]"
_W2_INT4 = "a bf16 [R,IP]; ids i32 [T,k]; rw f32 [T,k]; w2 u8 [E,K,I/2]; s2 bf16 [E,K,I/32]"
_W13_OUTPUT = "x bf16 [T,KP]; ids i32 [T,k]; w13 i32 [E,K,2I/8]; s13 bf16 [E,K/32,2I]; z13 i32 [K/32,2I/8]"
_W2_OUTPUT = (
    "a bf16 [R,IP]; ids i32 [T,k]; rw f32 [T,k]; w2 i32 [E,I,K/8]; s2 bf16 [E,I/32,K]; z2 i32 [I/32,K/8]"
)
_A = "a bf16 [R,IP]"

# fmt: off
_ROWS = (
    _kernel("mxk_w13xib", _W13 + "; b13 f32 [E,2I]", _A, "experts_min:int alpha:float limit:float"),
    _kernel("mxk_w13x", _W13, _A, "experts_min:int"),
    _kernel("mxk_w13xi", _W13, _A, "experts_min:int limit:float"),
    _kernel("mxk_w13xt", _W13, _A, "experts_min:int"),
    _kernel("mxk_w2x", _W2, "y bf16 [T,K]", "experts_min:int"),
    _kernel("mxk_w2xb", _W2 + "; b2 f32 [E,K]", "y bf16 [T,K]", "experts_min:int"),
    _kernel("mxk_w2xr", _W2, "y bf16 [T,k,K]", "experts_min:int"),
    _kernel("mxk_deq", "w u8 [N,C/2]; s u8 [N,C/32]", "d bf16 [N,C]"),
    # Codes minus 8, bf16 scales: beyond the published kernels, in builds of their own.
    _kernel("mxk_w13i4x", _W13_INT4, _A, "experts_min:int"),
    _kernel("mxk_w13i4xt", _W13_INT4, _A, "experts_min:int"),
    _kernel("mxk_w2i4x", _W2_INT4, "y bf16 [T,K]", "experts_min:int"),
    # The same packed along the output dimension, zero points shared by the experts: the stock WNA16 graph's layout.
    _kernel("mxk_w13i4o", _W13_OUTPUT, _A, "experts_min:int"),
    _kernel("mxk_w2i4o", _W2_OUTPUT, "y bf16 [T,K]", "experts_min:int"),
)
# fmt: on
KERNELS = {kernel.name: kernel for kernel in _ROWS}

VARIANT_KERNELS = {
    "gptoss": ("mxk_w13xib", "mxk_w2xb"),
    "glm": ("mxk_w13x", "mxk_w2x", "mxk_deq"),
    "dsv41": ("mxk_w13xi", "mxk_w2x"),
    "muse": ("mxk_w13x", "mxk_w2xr"),
    "kimi": ("mxk_w13xt", "mxk_w2x"),
    "int4": ("mxk_w13i4x", "mxk_w2i4x"),
    "kimi_int4": ("mxk_w13i4xt", "mxk_w2i4x"),
    "wna16": ("mxk_w13i4o", "mxk_w2i4o"),
}
"""Kernels that a build of this variant holds, in the order of its GUID list. MiMo-V2.6-Pro runs the build of glm."""

VARIANT_LIMITS = {
    "gptoss": Limits(32, 3072, 32, 3072, 32),
    "glm": Limits(512, 6144, 512, 3072, 16),
    "dsv41": Limits(512, 6144, 256, 3072, 16),
    "muse": Limits(512, 6144, 512, 3072, 16),
    "kimi": Limits(512, 8192, 512, 3072, 16),
    "int4": Limits(512, 6144, 512, 3072, 16),
    "kimi_int4": Limits(512, 8192, 512, 3072, 16),
    "wna16": Limits(32, 7168, 32, 3072, 16),
}
"""Of one call; the first five published with the same kernels ("MXFP4 MoE decode kernels", limitations)."""


def variant_kernels(variant: str) -> tuple[Kernel, ...]:
    """The kernels of one variant; raises KeyError for a name that is none."""
    return tuple(KERNELS[name] for name in VARIANT_KERNELS[variant])
