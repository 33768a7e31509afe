"""Time of one MoE layer call on a Gaudi 2, inside an HPU graph: the kernels of a build, or the stock op; one a process.

The published way ("MXFP4 MoE decode kernels"): a chain of 8 calls in one graph, the median of 30 replays, over the
chain's length. Lazy mode. Has run on stand-ins only. Each line of output is one JSON object; the second form puts the
lines of two runs side by side.

    export GC_KERNEL_PATH=DIR/libmxk_tpc.so PT_HPU_LAZY_MODE=1 PT_HPU_LAZY_ACC_PAR_MODE=0
    python benchmarks/bench_gaudi.py --lib DIR --variant gptoss --impl kernel > kernel.json
    python benchmarks/bench_gaudi.py --lib DIR --variant gptoss --impl stock > stock.json
    python benchmarks/bench_gaudi.py --compare stock.json kernel.json
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from mxk_compile.kernels.tpc.libraries import load_ops
from mxk_compile.parity.cases import local_routes, make_case, on_device, run_case
from mxk_compile.parity.stock import run_stock
from mxk_compile.variants import VARIANTS

CHAIN, REPLAYS = 8, 30


def measure_us(hpu: Any, call: Any, case: Any) -> float:
    """Microseconds a call: a chain of calls captured once, replayed, each replay waited for."""
    graph, stream = hpu.HPUGraph(), hpu.Stream()
    with hpu.stream(stream):
        graph.capture_begin()
        results = [call(case) for _ in range(CHAIN)]
        graph.capture_end()
    samples = []
    for _ in range(REPLAYS + 1):
        hpu.synchronize()
        start = time.perf_counter()
        graph.replay()
        hpu.synchronize()
        samples.append((time.perf_counter() - start) * 1e6 / CHAIN)
    del results  # the graph's outputs, which must outlive it
    return statistics.median(samples[1:])


def bench(arguments: argparse.Namespace) -> None:
    """One line for each number of tokens and routing."""
    manifest = load_ops(arguments.lib, "lazy")
    hpu = importlib.import_module("habana_frameworks.torch.hpu")
    call = run_case if arguments.impl == "kernel" else run_stock
    for routing in ("random", "hot"):
        for num_tokens in map(int, arguments.tokens.split(",")):
            case = make_case(VARIANTS[arguments.variant], num_tokens, routing, 1.0)
            line = {
                "variant": arguments.variant,
                "routing": routing,
                "tokens": num_tokens,
                "local_routes": local_routes(case),
                "impl": arguments.impl,
                "us": round(measure_us(hpu, call, on_device(case, torch.device(arguments.device))), 1),
                "build": manifest.version,
                "device": hpu.get_device_name(),
            }
            print(json.dumps(line), flush=True)


def compare(first: Path, second: Path) -> None:
    """The rows that both files have, and how many times faster the second is."""
    rows: list[dict[tuple[Any, ...], Any]] = [
        {
            tuple(line[key] for key in ("variant", "routing", "tokens", "local_routes")): line
            for line in map(json.loads, path.read_text().splitlines())
        }
        for path in (first, second)
    ]
    for key in [key for key in rows[0] if key in rows[1]]:
        a, b = (row[key] for row in rows)
        print(
            f"{key[0]:8} {key[1]:7} T {key[2]:3} routes {key[3]:4}  {a['impl']} {a['us']:9.1f} us"
            f"  {b['impl']} {b['us']:9.1f} us  {a['us'] / b['us']:.1f}x"
        )


def main(arguments: list[str] | None = None) -> None:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--lib", type=Path, help="folder of a build")
    parser.add_argument("--variant", choices=list(VARIANTS), default="gptoss")
    parser.add_argument("--impl", choices=("kernel", "stock"), default="kernel")
    parser.add_argument("--tokens", default="1,2,4,8,16", help="comma list of T")
    parser.add_argument("--device", default="hpu", help=argparse.SUPPRESS)
    parser.add_argument("--compare", nargs=2, type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    if options.compare:
        compare(*options.compare)
    elif options.lib is None:
        parser.error("--lib DIR, or --compare FILE FILE")
    else:
        bench(options)


if __name__ == "__main__":
    sys.exit(main())
