"""Random MoE calls of every kind and the error measure: what tests, benchmarks and parity runs are made of."""

from __future__ import annotations

import dataclasses
import pathlib
import platform
from typing import Any

import torch
from torch import Tensor

from mxk_compile.ops.formats import int4
from mxk_compile.ops.moe import reference
from mxk_compile.variants import MoEVariant

_TYPICAL_SCALE_BYTES = (118, 124)  # 2^-9 .. 2^-4: weights of the size that trained layers have
_ATTRIBUTES = (
    "weight_format",
    "row_order",
    "activation",
    "alpha",
    "limit",
    "per_route",
)  # of `mxk::moe`, in a row


def rel_l2(value: Tensor, expected: Tensor) -> float:
    """||value - expected|| / ||expected||, in fp64."""
    value, expected = value.double(), expected.double()
    return float((value - expected).norm() / expected.norm())


# One rounding to bf16 of Gaussian-like values costs 1.66e-3 on average, whatever their number.
MAX_REL_L2 = 1.8e-3


def most_rel_l2(expected: Tensor) -> float:
    """Largest rel_l2 of a result that is `expected`, in fp32, rounded once to bf16.

    `MAX_REL_L2`, or what rounding these very values costs and a little more, where that is larger: the roundings of
    few values scatter, and so does what a last bit before the rounding makes of them.
    """
    slack = 1.25 if expected.numel() < 1024 else 1.08
    cost = slack * rel_l2(expected.bfloat16(), expected)
    # NaN where all are zero, infinite beyond bf16's range.
    return cost if MAX_REL_L2 < cost < float("inf") else MAX_REL_L2


def settle_vector_math() -> None:
    """Makes a process's first `exp`, `cos` and their like on the CPU as exact as the later ones.

    The MKL that torch's wheels carry picks its kernel at a function's first call. Where two threads make that call at
    once, one of them may run a kernel good to about 12 bits (pytorch issue 188792); one element has one thread.
    """
    for dtype in (torch.float32, torch.float64):
        one = torch.ones(1, dtype=dtype)
        for function in (torch.cos, torch.erf, torch.exp, torch.log, torch.sin, torch.sqrt, torch.tanh):
            function(one)


def _cpuinfo() -> list[str]:
    path = pathlib.Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


def processor() -> str:
    """The processor's name, where the system tells, and what torch uses of its instruction set."""
    names = [line for line in _cpuinfo() if line.startswith("model name")]
    name = names[0].partition(":")[2].strip() if names else platform.machine()
    return f"{name} ({torch.backends.cpu.get_cpu_capability()})"


def machine() -> str:
    """The machine that a figure was measured on: processor, threads in use, versions."""
    return f"{processor()}, {torch.get_num_threads()} thread(s), torch {torch.__version__}"


@dataclasses.dataclass
class MoECase:
    """One call of `mxk::moe`: tensors and attributes as in its schema (ops/moe.py)."""

    hidden_states: Tensor
    topk_ids: Tensor
    topk_weights: Tensor
    w13: Tensor
    w13_scale: Tensor
    w2: Tensor
    w2_scale: Tensor
    w13_zero: Tensor | None
    w2_zero: Tensor | None
    w13_bias: Tensor | None
    w2_bias: Tensor | None
    attributes: dict[str, Any]

    @property
    def routing(self) -> tuple[Tensor, Tensor, Tensor]:
        """hidden_states, topk_ids, topk_weights."""
        return self.hidden_states, self.topk_ids, self.topk_weights

    @property
    def weights(self) -> tuple[Any, ...]:
        """The eight weight arguments, stacked, in schema order; None for absent ones."""
        return (
            *(self.w13, self.w13_scale, self.w2, self.w2_scale),
            *(self.w13_zero, self.w2_zero, self.w13_bias, self.w2_bias),
        )

    @property
    def lists(self) -> tuple[list[Tensor], ...]:
        """The eight weight arguments as one tensor per expert."""
        return tuple([] if weight is None else list(weight.unbind(0)) for weight in self.weights)

    def fused(self) -> Tensor:
        """`mxk::moe` on this call."""
        result: Tensor = torch.ops.mxk.moe(*self.routing, *self.weights, **self.attributes)
        return result

    def reference(self, round_intermediate: bool = False) -> Tensor:
        """fp32 result; by default without the bf16 rounding of the intermediate: what `rel_l2` is taken against."""
        hidden_states = self.hidden_states.float()
        return reference(
            hidden_states,
            *self.routing[1:],
            *self.weights,
            **self.attributes,
            round_intermediate=round_intermediate,
        )


def random_case(
    *,
    num_tokens: int = 4,
    num_experts: int = 8,
    top_k: int = 2,
    hidden_size: int = 128,
    intermediate_size: int = 64,
    weight_format: str = "mxfp4",
    group_size: int | None = 32,
    row_order: str = "gate_up",
    activation: str = "silu",
    alpha: float = 1.0,
    limit: float | None = None,
    bias: bool = False,
    zero: bool = False,
    pack_dim: str = "input",
    per_route: bool = False,
    experts_min: int = 0,
    hot: bool = False,
    rms: float = 1.0,
    seed: int = 0,
    device: str = "cpu",
) -> MoECase:
    """A call with random packed weights; `group_size` None is one group a row, `hot` sends every route to one expert.

    Sizes are T, E, k, K, I of ops/moe.py; `rms` is that of hidden_states. The same arguments give the same call.
    """
    generator = torch.Generator().manual_seed(seed)

    def integers(low: int, high: int, *shape: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        return torch.randint(low, high, shape, generator=generator, dtype=torch.int64).to(dtype)

    def weight(rows: int, columns: int) -> tuple[Tensor, Tensor, Tensor | None]:
        shape = (num_experts, rows, columns)
        if weight_format == "mxfp4":
            packed = integers(0, 256, *shape[:2], columns // 2)
            return packed, integers(*_TYPICAL_SCALE_BYTES, *shape[:2], -(-columns // 32)), None
        num_groups = columns // (group_size or columns)
        scale = (torch.rand(num_experts, rows, num_groups, generator=generator) * 0.01 + 0.002).bfloat16()
        zeros = integers(0, 16, num_experts, rows, num_groups) if zero else None
        codes = integers(0, 16, *shape)
        if pack_dim == "output":
            scale = scale.transpose(1, 2).contiguous()
            zeros = zeros.transpose(1, 2).contiguous() if zeros is not None else None
        return int4.pack(codes, pack_dim), scale, zeros

    w13, w13_scale, w13_zero = weight(2 * intermediate_size, hidden_size)
    w2, w2_scale, w2_zero = weight(hidden_size, intermediate_size)
    routed = (
        torch.rand(num_tokens, num_experts, generator=generator).topk(min(top_k, num_experts), dim=1).indices
    )
    topk_ids = (torch.zeros_like(routed) if hot else routed) + experts_min

    def floats(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    tensors = {
        "hidden_states": (floats(num_tokens, hidden_size) * rms).bfloat16(),
        "topk_ids": topk_ids,
        "topk_weights": torch.softmax(floats(*topk_ids.shape), dim=1).bfloat16(),
        "w13": w13,
        "w13_scale": w13_scale,
        "w2": w2,
        "w2_scale": w2_scale,
        "w13_zero": w13_zero,
        "w2_zero": w2_zero,
        "w13_bias": floats(num_experts, 2 * intermediate_size).bfloat16() if bias else None,
        "w2_bias": floats(num_experts, hidden_size).bfloat16() if bias else None,
    }
    attributes = {
        "weight_format": weight_format,
        "row_order": row_order,
        "activation": activation,
        "alpha": alpha,
        "limit": limit,
        "pack_dim": pack_dim,
        "experts_min": experts_min,
        "per_route": per_route,
    }
    on_device = {name: tensor if tensor is None else tensor.to(device) for name, tensor in tensors.items()}
    return MoECase(**on_device, attributes=attributes)  # type: ignore[arg-type]


def variant_case(variant: MoEVariant, **changes: Any) -> MoECase:
    """A random call of a model row, with any argument of `random_case` changed."""
    arguments = {
        field.name: getattr(variant, field.name)
        for field in dataclasses.fields(variant)
        if field.name not in ("name", "models")
    }
    return random_case(**{**arguments, **changes})


def random_layer(variant: MoEVariant, num_experts: int, seed: int, device: str) -> MoECase:
    """Random weights of a model row on `device`, the same for one seed and device, with an empty routing."""
    generator = torch.Generator(device).manual_seed(seed)

    def integers(low: int, high: int, shape: tuple[int, ...]) -> Tensor:
        return torch.randint(low, high, shape, dtype=torch.uint8, device=device, generator=generator)

    def weight(rows: int, columns: int) -> tuple[Tensor, Tensor]:
        shape = (num_experts, rows)
        groups = (*shape, columns // variant.group_size)
        if variant.weight_format == "mxfp4":
            scale = integers(*_TYPICAL_SCALE_BYTES, groups)
        else:
            scale = (torch.rand(groups, device=device, generator=generator) * 0.01 + 0.002).bfloat16()
        return integers(0, 256, (*shape, columns // 2)), scale

    def bias(columns: int) -> Tensor | None:
        if not variant.bias:
            return None
        return torch.randn(num_experts, columns, device=device, generator=generator).bfloat16()

    w13, w13_scale = weight(2 * variant.intermediate_size, variant.hidden_size)
    w2, w2_scale = weight(variant.hidden_size, variant.intermediate_size)
    return MoECase(
        hidden_states=torch.empty(0, variant.hidden_size, dtype=torch.bfloat16, device=device),
        topk_ids=torch.empty(0, variant.top_k, dtype=torch.int64, device=device),
        topk_weights=torch.empty(0, variant.top_k, dtype=torch.bfloat16, device=device),
        w13=w13,
        w13_scale=w13_scale,
        w2=w2,
        w2_scale=w2_scale,
        w13_zero=None,
        w2_zero=None,
        w13_bias=bias(2 * variant.intermediate_size),
        w2_bias=bias(variant.hidden_size),
        attributes={
            **{name: getattr(variant, name) for name in _ATTRIBUTES},
            "pack_dim": "input",
            "experts_min": 0,
        },
    )
