"""Layers and Chord's projections on a Hopper GPU: ours and humming-kernels by turns in one process.

    python benchmarks/bench_hopper.py --variant gptoss --tokens 1,2,4,8,16,32,256,4096
    python benchmarks/bench_hopper.py --chord "decode EP8|masked EP8"

Of a layer ours is the whole, theirs the two products alone: routing lists are made before, activation and weighted
sum left out. `peer_us` takes of each product the faster schedule, of its own choice (`peer_own_us`) and, up to 64
tokens, small tiles of mma.sync. Graphs of a chain of calls, each with other experts, take turns; medians. Projections
are timed by triton's do_bench, mean, ours and theirs twice by turns. Lines are JSON objects, a table follows on stderr.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from mxk_compile import kernels
from mxk_compile.bench import cases, chord, implementations, runner
from mxk_compile.bench.points import DEFAULT_VARIANT, Point
from mxk_compile.kernels import MoEDesc
from mxk_compile.ops.dequant import dequantize
from mxk_compile.settings import whole_number
from mxk_compile.testing import MoECase, random_layer, rel_l2
from mxk_compile.variants import VARIANTS

PEER = "humming_kernels"
_FEW_TOKENS = 64  # decode: chains of 8 calls or more, 31 rounds; beyond, chains of 2 and 9
_MOST_CALLS = 32
_MOST_PEER_ERROR = 1e-2
_CHECKED_EXPERTS = 3
_WARM_ROUNDS = 2

Row = dict[str, Any]
Calls = list[Callable[[], object]]


def layer_rows(variant: str, num_experts: int, tokens: list[int]) -> Iterator[Row]:
    """Rows of a layer; the peer's kernels are compiled for all of them first, side by side."""
    peer = implementations.peer_on(PEER, "cuda")
    layers = [random_layer(VARIANTS[variant], num_experts, seed, "cuda") for seed in range(2)]
    points = [Point(variant, num_experts, num_tokens, "hot") for num_tokens in tokens]
    products = {name: [_product(peer, layer, name) for layer in layers] for name in ("w13", "w2")}
    wanted = [
        (copies[0], schedule)
        for point in points
        for copies in products.values()
        for schedule in _schedules(peer, copies[0], point).values()
    ]
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda job: job[0].compiled("indexed", job[1]), wanted))
    for point in tqdm(points, desc=variant, unit="row", disable=None, leave=False):
        yield _layer_row(peer, point, layers, products)


def _product(peer: Any, layer: MoECase, name: str) -> Any:
    parts = getattr(layer, name), getattr(layer, f"{name}_scale")
    return peer.Product(*parts, layer.attributes["weight_format"])


def _schedules(peer: Any, product: Any, point: Point) -> dict[str, Any]:
    rows = point.num_tokens * point.top_k
    found = {"own": product.own_schedule(rows, "indexed")}
    if point.num_tokens <= _FEW_TOKENS:
        found["small tiles"] = peer.small_tiles(rows / point.num_experts)
    return found


def _layer_row(peer: Any, point: Point, layers: list[MoECase], products: dict[str, list[Any]]) -> Row:
    few = point.num_tokens <= _FEW_TOKENS
    rotation = cases.rotation(point, layers, cases.cache_bytes("cuda"), chain=8 if few else 2)
    calls = rotation.calls[: _MOST_CALLS if few else 2]
    first = rotation.layers[0]
    x, ids, weights = first.routing

    def ours(layer: MoECase, ids: Tensor) -> Tensor:
        y: Tensor = torch.ops.mxk.moe.default(x, ids, weights, *layer.weights, **layer.attributes)
        return y

    errors = runner.result_errors(first, ours(layers[0], ids))
    chains: dict[str, Calls] = {"ours": [lambda c=c, i=i: ours(layers[c], i) for c, i in calls]}  # type: ignore[misc]
    peer_error = 0.0
    middle = torch.randn(ids.numel(), layers[0].w2.shape[2] * 2, dtype=torch.bfloat16, device="cuda")
    for name, given, top_k in (("w13", x, point.top_k), ("w2", middle, 1)):
        for kind, schedule in _schedules(peer, products[name][0], point).items():
            runs = [products[name][c].indexed(i, point.num_experts, top_k, schedule) for c, i in calls]
            error = _product_error(runs[0](given), given, ids, top_k, layers[0], name)
            if error > _MOST_PEER_ERROR:
                raise SystemExit(f"bench_hopper: {point}: the peer's {kind} {name} is wrong: {error:.1e}")
            peer_error = max(peer_error, error)
            chains[f"{name} {kind}"] = [lambda r=r, g=given: r(g) for r in runs]  # type: ignore[misc]
    times = by_turns(chains, 31 if few else 9)
    median = {name: statistics.median(taken) for name, taken in times.items()}
    peer_us = sum(
        min(us for name, us in median.items() if name.startswith(f"{which} ")) for which in ("w13", "w2")
    )
    desc = MoEDesc.from_call(*first.routing, *layers[0].weights, **layers[0].attributes)
    return {
        **{"variant": point.variant, "experts": point.num_experts, "tokens": point.num_tokens},
        "touched": rotation.experts_touched,
        "bytes": rotation.experts_touched * rotation.expert_bytes,
        "us": round(median["ours"], 2),
        "us_p10_p90": [round(sorted(times["ours"])[len(times["ours"]) * part // 10], 2) for part in (1, 9)],
        "peer_us": round(peer_us, 2),
        "peer_own_us": round(median["w13 own"] + median["w2 own"], 2),
        "ratio": round(peer_us / median["ours"], 3),
        **{"rel_l2": errors[0], "rel_l2_bf16": errors[1], "peer_rel_l2": float(f"{peer_error:.3g}")},
        "kernel": str(kernels.cuda.plan(desc, point.num_tokens)),
        "method": f"graphs of {len(calls)} calls, {len(times['ours'])} turns, median",
    }


def _product_error(y: Tensor, x: Tensor, ids: Tensor, top_k: int, layer: MoECase, name: str) -> float:
    """Of a few experts' rows against fp32 products of exact weights."""
    found, expected = [], []
    for expert in ids.unique()[:_CHECKED_EXPERTS].tolist():
        (rows,) = torch.where(ids.flatten() == expert)
        packed, scale = getattr(layer, name)[expert], getattr(layer, f"{name}_scale")[expert]
        exact = dequantize(packed, scale, weight_format=layer.attributes["weight_format"])
        found.append(y[rows])
        expected.append(x[rows // top_k].float() @ exact.T)
    return rel_l2(torch.cat(found), torch.cat(expected))


def by_turns(chains: dict[str, Calls], rounds: int) -> dict[str, list[float]]:
    """Microseconds a call of each chain, captured as a graph, in rounds of one replay each."""
    graphs = {}
    for name, calls in chains.items():
        for call in calls:
            call()
        torch.cuda.synchronize()
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name]):
            for call in calls:
                call()
    taken: dict[str, list[float]] = {name: [] for name in chains}
    for index in range(_WARM_ROUNDS + rounds):
        for name, graph in graphs.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            if index >= _WARM_ROUNDS:
                taken[name].append(start.elapsed_time(end) * 1e3 / len(chains[name]))
    return taken


def chord_rows(pattern: str, ms: int) -> Iterator[Row]:
    """Rows of the projections whose "table count projection" the pattern is found in."""
    from triton.testing import do_bench  # type: ignore[import-not-found]  # comes with torch's CUDA wheels

    peer = implementations.peer_on(PEER, "cuda")
    chosen = [s for s in chord.SCENARIOS if "B300" not in s.table and re.search(pattern, str(s))]
    for scenario in tqdm(chosen, desc="chord", unit="row", disable=None, leave=False):
        ours = chord.make_call(scenario, "cuda")
        theirs = peer.projection(ours)
        ours.run()
        taken: dict[str, list[float]] = {"us": [], "peer_us": []}
        for turn in range(2):
            pair = (("us", ours.run), ("peer_us", theirs.run))
            for name, run in pair if turn == 0 else pair[::-1]:
                taken[name].append(do_bench(run, warmup=25, rep=ms, return_mode="mean") * 1e3)
        us, peer_us = (round(statistics.mean(times), 2) for times in taken.values())
        yield {
            **{"table": scenario.table, "count": scenario.count, "projection": scenario.projection},
            **{"us": us, "peer_us": peer_us, "ratio": round(peer_us / us, 3)},
            "floor_us": round(ours.floor_us, 1),
            "rel_l2": float(f"{ours.rel_l2(_CHECKED_EXPERTS):.4g}"),
            "peer_rel_l2": float(f"{theirs.rel_l2(_CHECKED_EXPERTS):.4g}"),
            "method": f"do_bench(warmup=25, rep={ms}) mean, twice by turns",
        }


def table(rows: list[Row]) -> str:
    """Markdown of the rows, projections of a count added up."""
    lines = ["| | peer, µs | ours, µs | peer / ours | rel_l2 |", "|---" * 5 + "|"]
    groups: dict[str, list[Row]] = {}
    for row in rows:
        key = f"{row['table']} {row['count']}" if "table" in row else f"{row['variant']}, T = {row['tokens']}"
        groups.setdefault(key, []).append(row)
    for key, found in groups.items():
        peer_us, us = (sum(row[name] for row in found) for name in ("peer_us", "us"))
        parts = " + ".join(f"{row['us']:.1f}" for row in found)
        total = f"{parts} = {us:.1f}" if len(found) > 1 else parts
        worst = max(row["rel_l2"] for row in found)
        lines.append(f"| {key} | {peer_us:.1f} | {total} | {peer_us / us:.2f} | {worst:.2e} |")
    return "\n".join(lines)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )

    def numbers(text: str) -> list[int]:
        return [whole_number(part, 1) for part in text.split(",")]

    parser.add_argument("--variant", choices=VARIANTS, default=DEFAULT_VARIANT)
    parser.add_argument("--e-local", type=numbers, help="experts, if not the row's number")
    parser.add_argument("--tokens", type=numbers, default=[1, 2, 4, 8, 16, 32], help="comma list of T")
    parser.add_argument("--chord", metavar="PATTERN", help="projections instead, as 'decode EP8 20 down'")
    parser.add_argument("--ms", type=numbers, default=[100], help="of each do_bench; default: 100")
    options = parser.parse_args()
    experts = options.e_local[0] if options.e_local else VARIANTS[options.variant].num_experts
    rows: list[Row] = []
    versions = {"torch": torch.__version__, PEER: implementations.peer_on(PEER, "cuda").version()}
    with torch.inference_mode():
        found = (
            layer_rows(options.variant, experts, options.tokens)
            if options.chord is None
            else chord_rows(options.chord, options.ms[0])
        )
        for row in found:
            rows.append(row)
            print(json.dumps({**row, "device": torch.cuda.get_device_name(), **versions}), flush=True)
    print(f"\n{table(rows)}", file=sys.stderr)


if __name__ == "__main__":
    main()
