"""Clocks: chains of calls on a CPU, replays of captured chains on CUDA; and the bandwidth of plain reads.

The published method is a chain of 8 calls and the median of 30 replays. A CPU, on which the stock op may take a second
a call, stops earlier where the samples have taken their time; a row's method says how many there were.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

CHAIN, REPLAYS = 8, 30
_SAMPLE_SECONDS = 20.0
_PROBE_SECONDS = 0.2
_CUDA_PROBE_BYTES = 4 << 30
_CUDA_WARM_UP = 3

Calls = list[Callable[[], object]]


@dataclasses.dataclass(frozen=True)
class Method:
    """How many: calls a sample, samples; the seconds after which a CPU takes no more samples than `fewest`."""

    chain: int = CHAIN
    replays: int = REPLAYS
    seconds: float = _SAMPLE_SECONDS
    fewest: int = 5


QUICK = Method(chain=2, replays=10, seconds=0.5, fewest=2)


@dataclasses.dataclass(frozen=True)
class Times:
    """Microseconds a call of each sample, sorted, and the method in words."""

    samples_us: list[float]
    method: str

    @property
    def median_us(self) -> float:
        """The figure of a row."""
        return statistics.median(self.samples_us)

    def percentile_us(self, percent: int) -> float:
        """Of the samples, the one at this percentage."""
        return self.samples_us[min(len(self.samples_us) * percent // 100, len(self.samples_us) - 1)]


def time_cpu(calls: Calls, method: Method) -> Times:
    """Times chains of calls, one right after the other, walking round `calls`; the first chain warms up."""
    samples: list[float] = []
    spent, step = 0.0, 0
    while len(samples) <= method.replays:
        chain = [calls[(step + index) % len(calls)] for index in range(method.chain)]
        step += method.chain
        start = time.perf_counter()
        for call in chain:
            call()
        elapsed = time.perf_counter() - start
        samples.append(elapsed / method.chain * 1e6)
        spent += elapsed
        if spent > method.seconds and len(samples) > method.fewest:
            break
    kept = sorted(samples[1:])
    return Times(kept, f"chain of {method.chain}, median of {len(kept)}")


def time_cuda(calls: Calls, method: Method, capturable: bool) -> Times:
    """Times replays of CUDA graphs of a chain each, in turn; chains of plain calls where no graph can record them."""
    chains = [calls[start : start + method.chain] for start in range(0, len(calls), method.chain)]
    for call in calls:
        call()
    torch.cuda.synchronize()
    runs = [_captured(chain) if capturable else _eager(chain) for chain in chains]
    samples: list[float] = []
    for index in range(_CUDA_WARM_UP + method.replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        runs[index % len(runs)]()
        end.record()
        end.synchronize()
        if index >= _CUDA_WARM_UP:
            samples.append(start.elapsed_time(end) * 1e3 / method.chain)
        if sum(samples) * method.chain > method.seconds * 1e6 and len(samples) > method.fewest:
            break
    kind = f"{len(chains)} CUDA graph(s)" if capturable else "no CUDA graph"
    return Times(sorted(samples), f"chain of {method.chain}, median of {len(samples)}, {kind}")


def _captured(chain: Calls) -> Callable[[], None]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in chain:
            call()
    return graph.replay


def _eager(chain: Calls) -> Callable[[], None]:
    def run() -> None:
        for call in chain:
            call()

    return run


def read_bandwidth(tensors: list[Tensor]) -> float:
    """Bytes a second of plain reads of packed weights, the best of what fits the probe's time.

    On CUDA of a tensor far larger than the cache, by replay.
    """
    if tensors[0].device.type == "cuda":
        data = torch.ones(_CUDA_PROBE_BYTES // 4, dtype=torch.int32, device="cuda")
        best_us = time_cuda([data.amax], Method(chain=1, replays=10), capturable=True).samples_us[0]
        return _CUDA_PROBE_BYTES / best_us * 1e6
    best, end = 0.0, time.perf_counter() + _PROBE_SECONDS
    while time.perf_counter() < end:
        for tensor in tensors:
            words = tensor.view(torch.int64).flatten()
            start = time.perf_counter()
            words.sum()
            best = max(best, words.numel() * 8 / (time.perf_counter() - start))
    return best
