"""What a model's own MoE layers do on this machine: time and error of each, fused beside stock, and rows for the plots.

Both are measured in one process by turns, over all layers, on what the layers receive from random token ids: quick, and
a ratio holds on a busy machine. `mxk bench` takes a process for each.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mxk_compile.bench import timing
from mxk_compile.bench.rows import Row
from mxk_compile.bench.runner import measured
from mxk_compile.integrations.stock_experts import StockExperts, stock_experts
from mxk_compile.kernels import MoEDesc, select, supports
from mxk_compile.ops import moe
from mxk_compile.parity.cases import error_of

TOKENS = (1, 4, 16, 32)
_ROUNDS, _SECONDS = 15, 1.0
# A call on a layer this small is shorter than what its threads wait for each other.
_ONE_THREAD_BYTES = 64 << 20
_SEED = 0

Call = Callable[[], Tensor]


@dataclasses.dataclass(frozen=True)
class LayerFigures:
    """One layer: error against fp32 on some tokens, and the median time of one token."""

    name: str
    stock_rel_l2: float
    fused_rel_l2: float
    stock_us: float
    fused_us: float


@dataclasses.dataclass(frozen=True)
class _Received:
    """A layer and what it received."""

    name: str
    experts: StockExperts
    inputs: tuple[Tensor, ...]

    def stock(self, num_tokens: int) -> Call:
        inputs = [tensor[:num_tokens] for tensor in self.inputs]
        return lambda: self.experts(*inputs)

    def fused(self, num_tokens: int) -> Call:
        inputs = [tensor[:num_tokens] for tensor in self.inputs]
        arguments, attributes = self.experts.fused_call()
        return lambda: torch.ops.mxk.moe(*inputs, *arguments, **attributes)


def measure(model: Any, name: str) -> tuple[list[LayerFigures], list[Row]]:
    """Figures of each layer, and two rows for each T of TOKENS that the kernels support; empty where they do not.

    name: of the model, for the rows.
    """
    num_threads = torch.get_num_threads()
    try:
        with torch.inference_mode():
            layers = _receive(model, max(TOKENS))
            if not layers or supports(_describe(layers[0])) is not None:
                return [], []
            if sum(layer.experts.w13_weight.nbytes for layer in layers) < _ONE_THREAD_BYTES:
                torch.set_num_threads(1)
            figures = [_figures(layer) for layer in layers]
            read = timing.read_bandwidth([layer.experts.w13_weight for layer in layers])
            rows = [row for num_tokens in TOKENS for row in _rows(layers, name, num_tokens, figures, read)]
    finally:
        torch.set_num_threads(num_threads)
    return figures, rows


def _receive(model: Any, num_tokens: int) -> list[_Received]:
    found: list[_Received] = []
    names = {id(module): path for path, module in stock_experts(model).items()}

    def record(module: StockExperts, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        hidden, ids, weights = inputs
        kept = hidden.to(torch.bfloat16), ids, weights.to(torch.bfloat16)
        found.append(_Received(names[id(module)], module, kept))

    handles = [module.register_forward_hook(record) for module in stock_experts(model).values()]
    generator = torch.Generator().manual_seed(_SEED)
    ids = torch.randint(0, model.config.vocab_size, (1, num_tokens), generator=generator)
    try:
        model(input_ids=ids.to(model.device), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return found


def _describe(layer: _Received) -> MoEDesc:
    arguments, attributes = layer.experts.fused_call()
    return MoEDesc.from_call(*layer.inputs, *arguments, **attributes)


def _by_turns(calls: Sequence[Call]) -> list[list[float]]:
    """Microseconds of each call in each round, after one round to warm up."""
    found: list[list[float]] = [[] for _ in calls]
    end = time.perf_counter() + _SECONDS
    for index in range(_ROUNDS + 1):
        for call, samples in zip(calls, found, strict=True):
            start = time.perf_counter()
            call()
            if index:
                samples.append((time.perf_counter() - start) * 1e6)
        if index and time.perf_counter() > end:
            break
    return found


def _figures(layer: _Received) -> LayerFigures:
    num_tokens = len(layer.inputs[0])
    arguments, attributes = layer.experts.fused_call()
    hidden, ids, weights = layer.inputs
    exact = moe.reference(hidden.float(), ids, weights, *arguments, **attributes, round_intermediate=False)
    errors = [error_of(call(), exact) for call in (layer.stock(num_tokens), layer.fused(num_tokens))]
    times = [statistics.median(samples) for samples in _by_turns([layer.stock(1), layer.fused(1)])]
    return LayerFigures(layer.name, *errors, *times)


def _rows(
    layers: list[_Received], name: str, num_tokens: int, figures: list[LayerFigures], read: float
) -> list[Row]:
    """One row each of stock and fused, over the whole stack of layers."""

    def all_layers(calls: list[Call]) -> Call:
        def run() -> Tensor:
            for call in calls:
                result = call()
            return result

        return run

    stacks = [
        all_layers([layer.stock(num_tokens) for layer in layers]),
        all_layers([layer.fused(num_tokens) for layer in layers]),
    ]
    desc = _describe(layers[0])
    experts = layers[0].experts
    weights = (experts.w13_weight, experts.w13_weight_scale, experts.w2_weight, experts.w2_weight_scale)
    of_expert = sum(weight[0].numel() * weight.element_size() for weight in weights)
    touched = statistics.mean(len(layer.inputs[1][:num_tokens].unique()) for layer in layers)
    routes = num_tokens * desc.top_k
    rows = []
    for impl, found in zip(("stock", "fused"), _by_turns(stacks), strict=True):
        method = (
            f"one process, by turns: all {len(layers)} layers, median of {len(found)}; rel_l2 of the worst"
        )
        times = timing.Times(sorted(value / len(layers) for value in found), method)
        errors = [getattr(layer, f"{impl}_rel_l2") for layer in figures]
        rows.append(
            Row(
                variant=name,
                weight_format=desc.weight_format,
                hidden_size=desc.hidden_size,
                intermediate_size=desc.intermediate_size,
                num_experts=desc.num_experts,
                all_experts=desc.num_experts,
                top_k=desc.top_k,
                num_tokens=num_tokens,
                routing="model",
                local_routes=routes,
                experts_touched=round(touched),
                seed=_SEED,
                impl=impl,
                kernel=str(select(desc)) if impl == "fused" else "hpu::mixture_of_experts",
                rotated_bytes=len(layers) * desc.num_experts * of_expert,
                rel_l2=float(f"{max(errors):.4g}"),
                **measured(desc.device, times, touched * of_expert, read),
            )
        )
    return rows
