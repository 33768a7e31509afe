"""`mxk tune`: times candidate schedules of a layer on this device and stores the fastest, by problem (schedule.py)."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from mxk_compile.errors import KernelError
from mxk_compile.kernels.cuda import Prepared, problem_of
from mxk_compile.kernels.cuda import schedule as schedules
from mxk_compile.kernels.cuda.build import cache_folder
from mxk_compile.kernels.cuda.schedule import (
    DECODE_SPLITS,
    Problem,
    Schedule,
    decode_macros,
    heuristic,
    splits_of,
)
from mxk_compile.kernels.cuda.tiles import tile_sizes
from mxk_compile.kernels.desc import MoEDesc
from mxk_compile.kernels.select import supports
from mxk_compile.ops.moe import reference
from mxk_compile.testing import random_layer, rel_l2
from mxk_compile.variants import INT4_FORMATS, MoEVariant

_WARM_UP = 3
_MOST_ERROR = 4e-3  # rel_l2 of a right result; see docs/performance/h200.md
_CHECKED_TOKENS = 16


def random_routing(
    variant: MoEVariant, num_experts: int, num_tokens: int, rms: float, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """hidden_states, topk_ids over all local experts, topk_weights."""
    x = torch.randn(num_tokens, variant.hidden_size, device="cuda", generator=generator) * rms
    scores = torch.rand(num_tokens, num_experts, device="cuda", generator=generator)
    ids = scores.topk(min(variant.top_k, num_experts), dim=1).indices
    weights = torch.softmax(torch.randn(ids.shape, device="cuda", generator=generator), dim=1)
    return x.bfloat16(), ids, weights


def replay_us(run: Callable[[], object], samples: int) -> float:
    """Median time of a CUDA graph of `run`, which was called before."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times: list[float] = []
    for sample in range(_WARM_UP + samples):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        if sample >= _WARM_UP:
            times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times)


def candidates(problem: Problem) -> Iterator[Schedule]:
    """Schedules worth timing for a problem, without repetition; the untuned one comes first."""
    rows = problem.rows_per_expert
    found = [heuristic(problem)]
    for split in DECODE_SPLITS if problem.weight_format == "mxfp4" else ():
        macros = decode_macros(problem, *split)
        if macros is not None:
            found.append(Schedule("decode", macros))
    if problem.weight_format in INT4_FORMATS:
        found += [Schedule("decode", split.macros) for split in splits_of(problem)]
    if rows >= 4:
        most = problem.kind.most_rows
        best = tile_sizes(rows, most=most)
        for sizes in (best, (128,), (176,), (96, 176), (128, 176), (64, 128), (32,), (16, 32)):
            if sizes[-1] <= most:
                found.append(Schedule("prefill", sizes=sizes))
    yield from dict.fromkeys(found)


def tune(
    variant: MoEVariant,
    num_experts: int,
    num_tokens: int,
    copies: int = 3,
    samples: int = 15,
    say: Callable[[str], None] = print,
) -> Schedule:
    """Times the candidates for one call of a model row, says each, stores and returns the fastest right one.

    Args:
        copies: layers cycled through, so that the L2 cache does not hold the weights.
        samples: of the median.

    Raises:
        KernelError: the device or the row has no kernel, or the cache folder takes no file.
    """
    generator = torch.Generator("cuda").manual_seed(0)
    layers = [random_layer(variant, num_experts, seed, "cuda") for seed in range(copies)]
    routing = random_routing(variant, num_experts, num_tokens, 1.0, generator)
    weights, attributes = layers[0].weights, layers[0].attributes
    desc = MoEDesc.from_call(*routing, *weights, **attributes)
    reason = supports(desc)
    if reason is not None:
        raise KernelError("mxk tune", reason, "what supports() accepts", "choose another variant")
    few = [part[:_CHECKED_TOKENS] for part in routing]
    expected = reference(few[0].float(), *few[1:], *weights, **attributes, round_intermediate=False)
    problem = problem_of(desc, num_tokens)

    def prepared(candidate: Schedule) -> list[Prepared]:
        return [
            Prepared(
                desc, *routing, *layer.weights, alpha=variant.alpha, limit=variant.limit, schedule=candidate
            )
            for layer in layers
        ]

    best: tuple[float, Schedule] | None = None
    for candidate in candidates(problem):
        try:
            us = _time(prepared(candidate), routing, candidate, expected, samples)
        except KernelError as error:
            say(f"{'-':>10}  {candidate}  {error}")
            continue
        say(f"{us:8.1f} us  {candidate}")
        if best is None or us < best[0]:
            best = (us, candidate)
    if best is None:
        raise KernelError("mxk tune", "no candidate ran", "at least one", "see what each said")
    if not schedules.store(problem.device_name, {problem.key: best[1]}):
        folder = str(cache_folder())
        raise KernelError("mxk tune", f"{folder} takes no file", "a folder to write to", "set MXK_CACHE_DIR")
    return best[1]


def _time(
    prepared: list[Prepared],
    routing: tuple[Tensor, Tensor, Tensor],
    candidate: Schedule,
    expected: Tensor,
    samples: int,
) -> float:
    """Time of a call in µs; raises KernelError if the result is wrong."""

    def run() -> None:
        for call in prepared:
            call(*routing)

    error = rel_l2(prepared[0](*routing)[:_CHECKED_TOKENS], expected)
    if not error <= _MOST_ERROR:
        raise KernelError(str(candidate), f"rel_l2 {error:.1e}", f"at most {_MOST_ERROR:.0e}", "report it")
    run()
    return replay_us(run, samples) / len(prepared)
