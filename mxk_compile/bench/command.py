"""The command line of `mxk bench`."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from mxk_compile.bench import (
    check,
    chord_rows,
    chord_tables,
    compare,
    implementations,
    modelled,
    rows,
    runner,
    timing,
)
from mxk_compile.bench import points as bench_points
from mxk_compile.bench.points import DEVICES, ROUTINGS, SUITES, Point
from mxk_compile.bench.rows import Row
from mxk_compile.errors import CallError, KernelError
from mxk_compile.variants import VARIANTS

_DEFAULT_TOKENS = [1, 2, 4, 8, 16, 32]
_ALL = "all"


def add(commands: Any, count: Callable[[str], int], counts: Callable[[str], list[int]]) -> None:
    """Adds the command to argparse's subparsers; `count` and `counts` parse numbers as the other commands do."""
    bench = commands.add_parser(
        "bench", help="time and error of one MoE layer call, fused and stock, as lines of JSON"
    )
    bench.add_argument("--device", choices=DEVICES, default="cpu", help="default: cpu")
    bench.add_argument(
        "--variant", choices=[*VARIANTS, _ALL], help="model row; default: gptoss, or all of --suite document"
    )
    bench.add_argument("--e-local", type=count, metavar="N", help="local experts, if not the row's number")
    bench.add_argument("--tokens", type=counts, metavar="T,...", help="tokens a call; default: 1,2,4,8,16,32")
    bench.add_argument(
        "--routing", type=_listed("routing", ROUTINGS), default=["random", "hot"], metavar="R,...",
        help=f"of {', '.join(ROUTINGS)}; default: random,hot (all local)",
    )  # fmt: skip
    bench.add_argument(
        "--impl", type=lambda text: text.split(","), metavar="I,...",
        help="stock, fused, unpacked or a peer of benchmarks/peers, each in a process of its own;"
        " default: stock,fused; fused alone with --suite chord",
    )  # fmt: skip
    bench.add_argument(
        "--suite", choices=SUITES, help="published calls, Chord's projections, or T from 1 to 512"
    )
    # Of a process that runs one of several implementations: the tables come when all rows are there.
    bench.add_argument("--rows-alone", action="store_true", help=argparse.SUPPRESS)
    bench.add_argument("--quick", action="store_true", help="a few calls of a layer of 8 experts")
    bench.add_argument(
        "--compare", nargs="+", type=Path, metavar="FILE", help="print the table of one or two runs instead"
    )
    bench.add_argument(
        "--check", nargs="?", const=True, metavar="FILE",
        help="compare a new run, or FILE, with benchmarks/baseline; exit status 1 if a row got worse",
    )  # fmt: skip
    bench.set_defaults(run=run)


def _listed(what: str, allowed: Sequence[str]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        names = text.split(",")
        for name in names:
            if name not in allowed:
                raise argparse.ArgumentTypeError(f"{name!r} is no {what}; allowed: {', '.join(allowed)}")
        return names

    return parse


def run(options: argparse.Namespace) -> int:
    """Runs the command; exit status 1 where --check found a row that got worse."""
    if options.compare:
        print(_comparison(options.compare))
        return 0
    if options.check:
        return _check(None if options.check is True else Path(options.check))
    options.impl = options.impl or (["fused"] if options.suite == "chord" else ["stock", "fused"])
    _check_names(options)
    if len(options.impl) > 1:
        return _each_in_a_process(options)
    done: list[Row] = []
    for row in _rows(options, options.impl[0]):
        print(row.to_json(), flush=True)
        done.append(row)
    if options.suite == "chord" and not options.rows_alone:
        print(f"\n{chord_tables.tables(done)}", file=sys.stderr)
    return 0


def _say(line: str) -> None:
    print(f"mxk bench: {line}", file=sys.stderr, flush=True)


def _check_names(options: argparse.Namespace) -> None:
    known = [*implementations.names(), *(chord_rows.PUBLISHED if options.suite == "chord" else ())]
    for name in options.impl:
        if name not in known:
            raise CallError("mxk bench --impl", repr(name), ", ".join(known), "choose among them")


def _rows(options: argparse.Namespace, impl: str) -> Iterator[Row]:
    method = timing.QUICK if options.quick else timing.Method()
    if options.suite == "chord":
        return chord_rows.run(options.device, impl, method, quick=options.quick, say=_say)
    points = _points(options)
    if options.device == "tpc-modelled":
        return modelled.run(points, impl, _say)
    return runner.run(points, options.device, impl, method, _say)


def _points(options: argparse.Namespace) -> list[Point]:
    names = list(VARIANTS) if options.variant == _ALL else [options.variant] if options.variant else None
    if options.suite == "document":
        found = bench_points.document(names)
        if not found:
            given = f"--variant {options.variant}, of which nothing was published"
            raise CallError(
                "mxk bench --suite document", given, "gptoss, kimi, muse, dsv41, glm", "choose one"
            )
        return found
    if options.suite == "sweep":
        return bench_points.sweep(names, options.e_local)
    if options.quick:
        return bench_points.quick(names, options.e_local, options.tokens)
    chosen = names or [bench_points.DEFAULT_VARIANT]
    return bench_points.points(chosen, options.e_local, options.tokens or _DEFAULT_TOKENS, options.routing)


def _each_in_a_process(options: argparse.Namespace) -> int:
    """One process an implementation, so that none meets what another left in caches, pools and clocks."""
    runner.check_device(options.device)
    if options.suite != "chord":  # refused here, not in each process
        points = _points(options)
        if options.device == "cpu":  # a GPU is opened by the children alone
            for impl in options.impl:
                runner.check_memory(points, options.device, impl)
    lines: list[str] = []
    for impl in options.impl:
        with subprocess.Popen(_child(options, impl), stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            for line in child.stdout:
                lines.append(line)
                print(line, end="", flush=True)
        if child.returncode != 0:
            return child.returncode if child.returncode > 0 else 128 - child.returncode
    found = rows.parse(lines, "mxk bench")
    if options.suite == "chord":
        print(f"\n{chord_tables.tables(found)}", file=sys.stderr)
    elif len(options.impl) == 2:
        pairs, _ = compare.pair(*compare.split(found, "mxk bench"))
        print(f"\n{compare.table(pairs)}", file=sys.stderr)
    return 0


def _child(options: argparse.Namespace, impl: str) -> list[str]:
    # `-c` and `-m` put the working folder first: in a checkout its sources would hide the installed package.
    start = f"import sys; sys.path[:] = {sys.path!r}; from mxk_compile.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", start, "bench", "--device", options.device, "--impl", impl]
    command += ["--routing", ",".join(options.routing)]
    for flag, value in (
        ("--variant", options.variant),
        ("--e-local", options.e_local),
        ("--tokens", options.tokens and ",".join(map(str, options.tokens))),
        ("--suite", options.suite),
    ):
        command += [flag, str(value)] if value else []
    return [*command, "--rows-alone", *["--quick"] * options.quick]


def _comparison(paths: list[Path]) -> str:
    if len(paths) > 2:
        raise CallError("mxk bench --compare", f"{len(paths)} files", "one or two", "give two runs")
    tables = [rows.read(path) for path in paths]
    sides = compare.split(tables[0], str(paths[0])) if len(tables) == 1 else (tables[0], tables[1])
    pairs, alone = compare.pair(*sides)
    for row in alone:
        _say(f"only in one run: {row.name}")
    return compare.table(pairs)


def _check(path: Path | None) -> int:
    given = rows.read(path) if path is not None else None
    compared, worse = 0, 0
    for name, baseline in check.baselines().items():
        new = [row for row in given if row.device == baseline[0].device] if given else _again(name, baseline)
        if not new:
            continue
        number, findings, missing = check.compare(baseline, new)
        for row in missing:
            _say(f"{name}: not in the run: {row.name}")
        for finding in findings:
            print(f"REGRESSED {finding}")
        print(
            f"{name}: {number} of {len(baseline)} rows compared, {len({f.row.name for f in findings})} regressed"
        )
        compared, worse = compared + number, worse + len(findings)
    if not compared:
        allowed = ", ".join(sorted({row.device for rows in check.baselines().values() for row in rows}))
        raise KernelError("mxk bench --check", "no row to compare with", f"rows of {allowed}", "run it there")
    return 1 if worse else 0


def _again(name: str, baseline: list[Row]) -> list[Row]:
    """The baseline's calls, made here; none where its device is not."""
    here = runner.device_name("cuda")
    if baseline[0].evidence == "measured" and here != baseline[0].device:
        _say(f"{name}: left out: its rows are of {baseline[0].device}; here is {here or 'no CUDA device'}")
        return []
    if baseline[0].variant not in VARIANTS:
        return list(chord_rows.run("cuda", "fused", timing.Method(), quick=True, say=_say))
    found: list[Row] = []
    for impl, points in check.points_of(baseline).items():
        if baseline[0].evidence == "modelled":
            found += modelled.run(points, impl, _say)
        else:
            found += runner.run(points, "cuda", impl, timing.Method(), _say)
    return found
