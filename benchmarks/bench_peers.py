"""`mxk::moe` on CPU and public peers side by side: a process each, turn by turn. Method and peers: docs/bench.md.

A line of output is one JSON object: `us`, the median over the rounds of each round's median; `of_ours`, the median of
each round's ratio to the first of ours; `packed_gb_s`, packed bytes of the experts touched over that time, whatever is
read; `read_gb_s`, the best of plain reads between the rounds. Instruction sets of ours may be named, each with the rows
from which an expert takes the tile unit, and with another build of the kernel library.

    python benchmarks/bench_peers.py --variant gptoss --tokens 1,4,8,32 --isa amx,avx512,avx2,portable
    python benchmarks/bench_peers.py --peers "" --routing even --tokens 8,32,48,64,128 --isa amx:1,avx512  # crossover
    python benchmarks/bench_peers.py --peers "" --isa avx512@before/libmxk_cpu.so,avx512 --cpu-time
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from turns import OURS, Gone, Participant, Setup

from mxk_compile.bench import cases, implementations, timing
from mxk_compile.bench.points import DEFAULT_VARIANT, ROUTINGS, Point
from mxk_compile.bench.runner import checked_part
from mxk_compile.parity.cases import error_of
from mxk_compile.settings import CPU_ISAS, whole_number
from mxk_compile.testing import MoECase, machine, random_layer
from mxk_compile.variants import VARIANTS

_MOST_ROWS = 100_000
_FEWEST_ROUNDS = 3

Row = dict[str, Any]


def cpu_peers() -> list[str]:
    """Modules of benchmarks/peers for CPUs."""
    names = [name for name in implementations.names() if name not in implementations.OURS]
    return [name for name in names if implementations.load_peer(name).DEVICE == "cpu"]


def gathered(setups: Iterable[Setup]) -> list[Participant]:
    """A process for each that can take part, made one after the other; stderr hears of the others."""
    found = []
    for setup in tqdm(list(setups), desc="preparing", disable=None, leave=False):
        try:
            found.append(Participant(setup))
        except Gone as reason:
            _say(setup.name, reason)
    return found


def measure(
    point: Point, layers: list[MoECase], taking_part: list[Participant], rounds: int, limit: float
) -> list[Row]:
    """The rows of one T, after `rounds` or, once there are three, `limit` seconds; who has gone is taken out."""
    rotation = cases.rotation(point, layers, cases.cache_bytes("cpu"), chain=1)
    chosen, few = checked_part(rotation.layers[0])
    expected = few.reference()
    errors: dict[str, float] = {}
    seconds: dict[str, list[float]] = {}
    bandwidth = 0.0
    for one in [*taking_part]:
        try:
            errors[one.name] = error_of(one.first_call(point)[chosen], expected)
            seconds[one.name] = []
        except Gone as reason:
            _dismiss(one, reason, taking_part)
    end = time.perf_counter() + limit
    for done in tqdm(range(rounds), desc=str(point), unit="round", disable=None, leave=False):
        if done >= _FEWEST_ROUNDS and time.perf_counter() > end:
            break
        for one in [*taking_part]:
            try:
                seconds[one.name].append(statistics.median(one.turn()))
            except Gone as reason:
                _dismiss(one, reason, taking_part)
                seconds.pop(one.name)
        bandwidth = max(bandwidth, timing.read_bandwidth([layer.w13 for layer in layers]))
    touched = rotation.experts_touched * rotation.expert_bytes
    first = seconds[taking_part[0].name]
    found = []
    for one in taking_part:
        taken = seconds[one.name]
        median = statistics.median(taken)
        row: Row = {"peer": one.name, "variant": point.variant, "experts": point.num_experts}
        row |= {"tokens": point.num_tokens, "routing": point.routing, "us": round(median * 1e6, 1)}
        row["us_p10"] = round(sorted(taken)[len(taken) // 10] * 1e6, 1)
        row["of_ours"] = round(statistics.median(a / b for a, b in zip(taken, first, strict=True)), 2)
        row["packed_gb_s"] = round(touched / median / 1e9, 2)
        row["read_gb_s"] = round(bandwidth / 1e9, 2)
        row["rel_l2"] = float(f"{errors[one.name]:.4g}")
        row |= {"rounds": len(taken), "copies": len(layers), "version": one.version}
        found.append(row)
    return found


def table(rows: list[Row]) -> str:
    """Rows of one layer in Markdown: ms, in brackets times the first of ours; the last column is the worst rel_l2."""
    tokens = list(dict.fromkeys(row["tokens"] for row in rows))
    lines = [
        f"| {rows[0]['variant']}, {rows[0]['experts']} experts, ms | "
        + " | ".join(f"T = {t}" for t in tokens)
    ]
    lines[0] += " | rel_l2 |"
    lines.append("|---" * (len(tokens) + 2) + "|")
    for name in dict.fromkeys(row["peer"] for row in rows):
        own = {row["tokens"]: row for row in rows if row["peer"] == name}
        cells = [f"{own[t]['us'] / 1e3:.3g} ({own[t]['of_ours']:.2f})" if t in own else "-" for t in tokens]
        lines.append(f"| {name} | {' | '.join(cells)} | {max(row['rel_l2'] for row in own.values()):.2e} |")
    reads = {row["tokens"]: row["read_gb_s"] for row in rows}
    lines.append("| plain reads, GB/s | " + " | ".join(f"{reads[t]:.1f}" for t in tokens) + " | |")
    return "\n".join(lines)


def _dismiss(one: Participant, reason: Gone, taking_part: list[Participant]) -> None:
    _say(one.name, reason)
    taking_part.remove(one)
    one.close()
    if not taking_part:
        raise SystemExit("bench_peers: nothing is left that could be timed")


def _say(name: str, reason: Gone) -> None:
    print(f"{name}: {reason}", file=sys.stderr, flush=True)


def _numbers(text: str) -> list[int]:
    try:
        return [whole_number(part, 1) for part in text.split(",")]
    except ValueError:
        error = f"{text!r} is no list of numbers of at least 1, as 1,4,8"
        raise argparse.ArgumentTypeError(error) from None


def _isas(text: str) -> list[str]:
    for name in text.split(","):
        ours, at, library = name.partition("@")
        isa, colon, rows = ours.partition(":")
        try:
            known = isa in CPU_ISAS and (not colon or whole_number(rows, 1, _MOST_ROWS))
        except ValueError:
            known = False
        if not known:
            raise argparse.ArgumentTypeError(f"{ours!r} is none of {', '.join(CPU_ISAS)}, or one and :ROWS")
        if at and not Path(library).is_file():
            raise argparse.ArgumentTypeError(f"there is no library {library!r}")
    return text.split(",")


def _peers(text: str) -> list[str]:
    known, chosen = cpu_peers(), [name for name in text.split(",") if name]
    for name in chosen:
        if name not in known:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(known)}")
    return chosen


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
    parser.add_argument("--peers", type=_peers, help='comma list; "" is none; default: all for CPUs')
    parser.add_argument("--copies", type=_numbers, default=[2], help="layers cycled through, in each form")
    parser.add_argument("--rounds", type=_numbers, default=[20])
    parser.add_argument("--seconds", type=_numbers, default=[40], help="after which a T gets no more rounds")
    parser.add_argument("--threads", type=_numbers, default=[torch.get_num_threads()])
    parser.add_argument("--cpu-time", action="store_true", help="CPU time, one thread")
    options = parser.parse_args(arguments)
    threads = 1 if options.cpu_time else options.threads[0]
    torch.set_num_threads(threads)
    variant = VARIANTS[options.variant]
    experts = options.e_local[0] if options.e_local else variant.num_experts
    points = [Point(variant.name, experts, tokens, options.routing) for tokens in options.tokens]
    setup = Setup("", points[0], options.copies[0], threads, options.cpu_time)
    peers = cpu_peers() if options.peers is None else options.peers
    names = [*(f"{OURS} {isa}" for isa in options.isa), *peers]
    taking_part = gathered(dataclasses.replace(setup, name=name) for name in names)
    if not taking_part:
        parser.error("nothing of what was named runs here")
    rows: list[Row] = []
    try:
        with torch.inference_mode():
            layers = [random_layer(variant, experts, seed, "cpu") for seed in range(options.copies[0])]
            for point in points:
                found = measure(point, layers, taking_part, options.rounds[0], options.seconds[0])
                rows += found
                for row in found:
                    clock = "CPU time" if options.cpu_time else "wall time"
                    print(json.dumps({**row, "clock": clock, "machine": machine()}), flush=True)
    finally:
        for one in taking_part:
            one.close()
    print(f"\n{table(rows)}", file=sys.stderr)


if __name__ == "__main__":
    main()
