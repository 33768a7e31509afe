"""`mxk::moe` on CPU and public peers side by side: one process, turn by turn, rel_l2 on each row.

`mxk bench` takes one process an implementation; on a machine that others use, only what took turns can be compared.
Each line of output is one JSON object, medians in us; `of_ours` is the time over that of the first of ours. Every round
gives each implementation the same routing on the next of its copies of the layer; `packed_gb_s` counts the packed bytes
of the experts that were touched, whatever is read. The peers are modules of benchmarks/peers; those that cannot run say
why on stderr. Instruction sets of ours may be named, each with the rows from which an expert takes the tile unit.
`--cpu-time` counts the CPU time of one thread: its ratios hold where those of wall time do not.

    python benchmarks/bench_peers.py --variant gptoss --tokens 1,4,8,32 --isa amx,avx512,avx2,portable
    python benchmarks/bench_peers.py --routing even --tokens 8,32,48,64,128 --isa amx:1,avx512   # the crossover
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from peers import Unsuitable, aten_int4, torch_bf16, vllm_cpu
from torch import Tensor

from mxk_compile.bench import cases, implementations, timing
from mxk_compile.bench.points import DEFAULT_VARIANT, ROUTINGS, Point
from mxk_compile.bench.runner import result_errors
from mxk_compile.kernels import cpu
from mxk_compile.settings import CPU_ISAS
from mxk_compile.testing import MoECase, machine, random_layer
from mxk_compile.variants import VARIANTS

PEERS = (torch_bf16, aten_int4, vllm_cpu)
_MOST_ROWS = 100_000

Layer = Callable[[Tensor, Tensor, Tensor], Tensor]


def ours(layers: list[MoECase], name: str) -> list[Layer]:
    """The fused op on one instruction set, as "avx512" or "amx:1"."""
    library = cpu._library()
    isa, _, rows = name.partition(":")

    def with_isa(run: Layer) -> Layer:
        def call(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
            library.mxk_cpu_select(isa.encode())
            library.mxk_cpu_matrix_rows(ctypes.c_int64(int(rows or 0)))
            return run(x, ids, weights)

        return call

    return [with_isa(run) for run in implementations.make("fused", layers).layers]


def participants(layers: list[MoECase], isas: list[str]) -> dict[str, list[Layer]]:
    """What takes part, by name: a function for each copy of the layer."""
    found: dict[str, list[Layer]] = {}
    for name in isas:
        if cpu._library().mxk_cpu_select(name.partition(":")[0].encode()):
            print(f"mxk {name}: not here", file=sys.stderr)
        else:
            found[f"mxk {name}"] = ours(layers, name)
    for peer in PEERS:
        reason = peer.missing()
        try:
            if reason is None:
                found[peer.NAME] = [peer.layer(layer) for layer in layers]
        except Unsuitable as error:
            reason = f"computes only {error}"
        if reason is not None:
            print(f"{peer.NAME}: {reason}", file=sys.stderr)
    return found


def measure(
    point: Point,
    layers: list[MoECase],
    taking_part: dict[str, list[Layer]],
    rounds: int,
    clock: Callable[[], float],
) -> None:
    """Prints the rows of one T."""
    rotation = cases.rotation(point, layers, cases.cache_bytes("cpu"), chain=1)
    first = rotation.layers[0]
    x, _, weights = first.routing
    errors = {
        name: result_errors(first, copies[0](*first.routing))[0] for name, copies in taking_part.items()
    }
    packed = [layer.w13 for layer in layers]
    bandwidth = timing.read_bandwidth(packed)
    seconds: dict[str, list[float]] = {name: [] for name in taking_part}
    for step in range(rounds + 2):
        layer, ids = rotation.calls[step % len(rotation.calls)]
        for name, copies in taking_part.items():
            start = clock()
            copies[layer](x, ids, weights)
            if step >= 2:  # the first two warm up
                seconds[name].append(clock() - start)
    bandwidth = max(bandwidth, timing.read_bandwidth(packed))
    best = statistics.median(next(iter(seconds.values())))
    touched = rotation.experts_touched * rotation.expert_bytes
    for name, found in seconds.items():
        median = statistics.median(found)
        line: dict[str, Any] = {"peer": name, "variant": point.variant, "experts": point.num_experts}
        line |= {"tokens": point.num_tokens, "routing": point.routing, "us": round(median * 1e6, 1)}
        line["us_p10"] = round(sorted(found)[len(found) // 10] * 1e6, 1)
        line["of_ours"] = round(median / best, 2)
        line["packed_gb_s"] = round(touched / median / 1e9, 2)
        line["read_gb_s"] = round(bandwidth / 1e9, 2)
        line["rel_l2"] = errors[name]
        method = {"rounds": rounds, "copies": len(layers), "clock": clock.__name__, "machine": machine()}
        print(json.dumps({**line, **method}), flush=True)


def _numbers(text: str) -> list[int]:
    values = [int(part) if part.isdecimal() else 0 for part in text.split(",")]
    if min(values) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers of at least 1, as 1,4,8")
    return values


def _isas(text: str) -> list[str]:
    for name in text.split(","):
        isa, colon, rows = name.partition(":")
        if isa not in CPU_ISAS or bool(colon) != (rows.isdecimal() and 1 <= int(rows) <= _MOST_ROWS):
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(CPU_ISAS)}, or one and :ROWS")
    return text.split(",")


def main(arguments: list[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--variant", choices=VARIANTS, default=DEFAULT_VARIANT)
    parser.add_argument("--e-local", type=_numbers, help="experts, if not the row's number")
    parser.add_argument("--routing", choices=ROUTINGS, default="hot")
    parser.add_argument("--tokens", type=_numbers, default=[1, 4, 8, 32], help="comma list of T")
    parser.add_argument("--isa", type=_isas, default=["auto"], help="comma list of our instruction sets")
    parser.add_argument("--copies", type=_numbers, default=[2], help="layers cycled through, in each form")
    parser.add_argument("--rounds", type=_numbers, default=[20])
    parser.add_argument("--threads", type=_numbers, default=[torch.get_num_threads()])
    parser.add_argument("--cpu-time", action="store_true", help="CPU time, one thread")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1 if options.cpu_time else options.threads[0])
    clock = time.thread_time if options.cpu_time else time.perf_counter
    variant = VARIANTS[options.variant]
    experts = options.e_local[0] if options.e_local else variant.num_experts
    with torch.inference_mode():
        layers = [random_layer(variant, experts, seed, "cpu") for seed in range(options.copies[0])]
        points = [Point(variant.name, experts, tokens, options.routing) for tokens in options.tokens]
        first = cases.rotation(points[0], layers, cases.cache_bytes("cpu"), chain=1)
        taking_part = participants(first.layers, options.isa)
        if not taking_part:
            parser.error("nothing of what was named runs here")
        for point in points:
            measure(point, layers, taking_part, options.rounds[0], clock)


if __name__ == "__main__":
    main()
