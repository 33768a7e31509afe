"""Stacked weights, INT4 also with values written out, and calls of `mxk::project` computed row by row in float64."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from mxk_compile.projections import PreparedWeight, prepare

UNWRITTEN = -77.0
ROUNDED_WEIGHTS = 1e-2
"""Six times what roundings of single weights, each 2^-9 / sqrt(3) of a weight, make of a sum."""


@dataclasses.dataclass(frozen=True)
class Stack:
    """A prepared weight and its values, float64 [E, N, K]."""

    weight: PreparedWeight
    values: Tensor

    def expected(self, x: Tensor, experts: Sequence[int], top_k: int = 1) -> Tensor:
        """float64 [rows, N]: each row's own product; UNWRITTEN where the expert is none."""
        of_row = torch.tensor(experts, dtype=torch.int64)
        source = x.double().cpu()[torch.arange(len(of_row)) // top_k]
        expected = torch.full((len(of_row), self.values.shape[1]), UNWRITTEN, dtype=torch.float64)
        for expert, values in enumerate(self.values):
            expected[of_row == expert] = source[of_row == expert] @ values.T
        return expected


def make_stack(
    num_experts: int = 4,
    outputs: int = 64,
    inputs: int = 128,
    group: int | None = 32,
    *,
    zero: bool = False,
    scale_dtype: torch.dtype = torch.bfloat16,
    pack_dim: str = "input",
    mode: str | None = None,
    device: str = "cpu",
    seed: int = 0,
) -> Stack:
    """Random codes; group None is one group a row."""
    generator = torch.Generator().manual_seed(seed)
    shape = (num_experts, outputs, inputs)
    groups = (num_experts, outputs, inputs // (group or inputs))
    codes = torch.randint(0, 16, shape, generator=generator)
    scale = (torch.rand(groups, generator=generator) * 0.04 + 0.005).to(scale_dtype)
    zeros = torch.randint(0, 16, groups, generator=generator) if zero else torch.full(groups, 8)
    per_value = (t.double().repeat_interleave(inputs // groups[2], dim=2) for t in (zeros, scale))
    of_zero, of_scale = per_value
    given = [scale, zeros.to(torch.uint8) if zero else None]
    if pack_dim == "output":
        given = [None if t is None else t.transpose(1, 2).contiguous() for t in given]
    tensors = [None if t is None else t.to(device) for t in (codes, *given)]
    assert tensors[0] is not None
    assert tensors[1] is not None
    weight = prepare(tensors[0], tensors[1], tensors[2], packed=False, pack_dim=pack_dim, mode=mode)
    return Stack(weight, (codes - of_zero) * of_scale)


def activations(*shape: int, seed: int = 1, device: str = "cpu") -> Tensor:
    """Normal bf16 values."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).bfloat16().to(device)


def unwritten(rows: int, columns: int, device: str = "cpu") -> Tensor:
    """An output that shows which rows were left alone."""
    return torch.full((rows, columns), UNWRITTEN, dtype=torch.bfloat16, device=device)


def check(result: Tensor, expected: Tensor) -> None:
    """Computed values are `expected` within the roundings that are allowed; other rows are as they were.

    One rounding of the result to bf16 and fp32 sums; on CUDA also one of each weight to bf16.
    """
    of_sums = ROUNDED_WEIGHTS if result.is_cuda else 1e-4
    result = result.double().cpu()
    assert result.shape == expected.shape
    idle = (expected == UNWRITTEN).all(dim=1)
    assert torch.equal(result[idle], expected[idle])
    expected = expected[~idle]
    error = (result[~idle] - expected).abs()
    # Half a unit of bf16's last place, and what sums differ by, in parts of a row's root mean square.
    allowed = 2.0**-8 * expected.abs() + of_sums * expected.square().mean(dim=1, keepdim=True).sqrt()
    assert bool((error <= allowed).all())


def random_weight(
    num_experts: int,
    outputs: int,
    inputs: int,
    weight_format: str,
    group: int | None = 32,
    zero: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    *,
    device: str = "cpu",
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Random packed weight, scale, of `dtype` unless MXFP4, and zero points; group None is one group a row."""
    generator = torch.Generator().manual_seed(outputs + inputs)
    shape = (num_experts, outputs, inputs)
    packed = torch.randint(0, 256, (*shape[:2], inputs // 2), generator=generator, dtype=torch.uint8)
    if weight_format == "mxfp4":
        scale = torch.randint(118, 124, (*shape[:2], inputs // 32), generator=generator, dtype=torch.uint8)
        return packed.to(device), scale.to(device), None
    groups = inputs // (group or inputs)
    scale = (torch.rand(*shape[:2], groups, generator=generator) * 0.04 + 0.005).to(dtype)
    zeros = torch.randint(0, 16, scale.shape, generator=generator, dtype=torch.uint8) if zero else None
    return packed.to(device), scale.to(device), None if zeros is None else zeros.to(device)
