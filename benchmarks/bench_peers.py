"""`mxk::moe` on CPU and public peers side by side: one process, turn by turn, rel_l2 on each row.

Each line of output is one JSON object, medians in us; `of_ours` is the peer's time over ours. Every round gives each
implementation the same fresh routing on the next of its copies of the layer; `packed_gb_s` counts the packed bytes of
the experts that were touched, whatever is read. The peers are modules of benchmarks/peers; those that are not installed
say so on stderr. Instruction sets of ours besides the best one may be named. `--cpu-time` counts the CPU time of one
thread instead: on a machine that others use, its ratios hold where those of wall time do not.

    python benchmarks/bench_peers.py --variant gptoss --tokens 1,4,8,32 --isa amx,avx512,avx2,portable
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from bench_moe import EXTRA, implementation, make_case, packed_bytes, read_bandwidth, routing
from peers import Unsuitable, aten_int4, torch_bf16, vllm_cpu
from torch import Tensor

from mxk_compile.kernels import cpu
from mxk_compile.ops.moe import reference
from mxk_compile.testing import MoECase, machine, rel_l2
from mxk_compile.variants import VARIANTS

PEERS = (torch_bf16, aten_int4, vllm_cpu)
CHECKED_TOKENS = 8

Layer = Callable[[Tensor, Tensor, Tensor], Tensor]


def ours(case: MoECase, isa: str) -> Layer:
    """The fused op on one instruction set."""
    run, select = implementation("fused", case), cpu._library().mxk_cpu_select

    def call(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        select(isa.encode())
        return run(x, ids, weights)

    return call


def implementations(cases: list[MoECase], isas: list[str]) -> dict[str, list[Layer]]:
    """What takes part, by name: a function for each copy of the layer."""
    found: dict[str, list[Layer]] = {}
    for isa in isas:
        if cpu._library().mxk_cpu_select(isa.encode()):
            print(f"mxk {isa}: not here", file=sys.stderr)
        else:
            found[f"mxk {isa}"] = [ours(case, isa) for case in cases]
    for peer in PEERS:
        reason = peer.missing()
        try:
            if reason is None:
                found[peer.NAME] = [peer.layer(case) for case in cases]
        except Unsuitable as error:
            reason = f"computes only {error}"
        if reason is not None:
            print(f"{peer.NAME}: {reason}", file=sys.stderr)
    return found


def measure(
    name: str,
    layers: dict[str, list[Layer]],
    cases: list[MoECase],
    num_tokens: int,
    rounds: int,
    clock: Callable[[], float],
) -> None:
    """Prints the rows of one T."""
    generator = torch.Generator().manual_seed(num_tokens)
    x = torch.randn(num_tokens, cases[0].hidden_states.shape[1], generator=generator).bfloat16()
    ids, weights = routing(cases[0], num_tokens, generator, even=False)
    few = slice(0, CHECKED_TOKENS)
    exact = reference(
        *(x[few].float(), ids[few], weights[few], *cases[0].weights),
        **cases[0].attributes,
        round_intermediate=False,
    )
    errors = {peer: rel_l2(copies[0](x, ids, weights)[few], exact) for peer, copies in layers.items()}
    seconds: dict[str, list[float]] = {peer: [] for peer in layers}
    rates: dict[str, list[float]] = {peer: [] for peer in layers}
    bandwidth = read_bandwidth(cases)
    for step in range(rounds + 2):
        ids, weights = routing(cases[0], num_tokens, generator, even=False)
        touched = len(ids.unique()) * packed_bytes(cases[0])
        for peer, copies in layers.items():
            start = clock()
            copies[step % len(copies)](x, ids, weights)
            elapsed = clock() - start
            if step >= 2:  # the first two warm up
                seconds[peer].append(elapsed)
                rates[peer].append(touched / elapsed / 1e9)
    best = statistics.median(next(iter(seconds.values())))
    for peer, found in seconds.items():
        line: dict[str, Any] = {"peer": peer, "variant": name, "tokens": num_tokens}
        line["us"] = round(statistics.median(found) * 1e6, 1)
        line["us_p10"] = round(sorted(found)[len(found) // 10] * 1e6, 1)
        line["of_ours"] = round(statistics.median(found) / best, 2)
        line["packed_gb_s"] = round(statistics.median(rates[peer]), 2)
        line["read_gb_s"] = round(max(bandwidth, read_bandwidth(cases)), 2)
        line["rel_l2"] = float(f"{errors[peer]:.3g}")
        print(
            json.dumps(
                {
                    **line,
                    "rounds": rounds,
                    "copies": len(cases),
                    "clock": clock.__name__,
                    "machine": machine(),
                }
            ),
            flush=True,
        )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--variant", choices=(*VARIANTS, *EXTRA), default="gptoss")
    parser.add_argument("--tokens", default="1,4,8,32", help="comma list of T")
    parser.add_argument("--isa", default="auto", help="comma list of our instruction sets")
    parser.add_argument("--copies", type=int, default=2, help="layers cycled through, in each form")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--cpu-time", action="store_true", help="CPU time, one thread")
    arguments = parser.parse_args()
    torch.set_num_threads(1 if arguments.cpu_time else arguments.threads)
    clock = time.thread_time if arguments.cpu_time else time.perf_counter
    with torch.inference_mode():
        cases = [make_case(arguments.variant, seed) for seed in range(arguments.copies)]
        layers = implementations(cases, arguments.isa.split(","))
        for num_tokens in map(int, arguments.tokens.split(",")):
            measure(arguments.variant, layers, cases, num_tokens, arguments.rounds, clock)


if __name__ == "__main__":
    main()
