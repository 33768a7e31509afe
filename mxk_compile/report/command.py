"""The command line of `mxk report`, and of `mxk explain` with a page."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from mxk_compile.report.page import Page


def add(commands: Any) -> None:
    """Adds `mxk report` to argparse's subparsers."""
    report = commands.add_parser("report", help="make a page of runs of `mxk bench`")
    report.add_argument("runs", nargs="+", type=Path, metavar="BENCH.json", help="what `mxk bench` printed")
    report.add_argument("--html", type=Path, required=True, metavar="OUT", help="file of the page")
    add_plots(report)
    report.set_defaults(run=run)


def add_plots(parser: argparse.ArgumentParser) -> None:
    """Adds the option that both commands have."""
    parser.add_argument(
        "--plots", type=Path, metavar="DIR", help="also write each plot as SVG, and PNG, there"
    )


def run(options: argparse.Namespace) -> None:
    """Runs `mxk report`."""
    from mxk_compile.bench import rows
    from mxk_compile.report.content import run_page
    from mxk_compile.report.write import target_of

    target_of(options.html)
    found = [row for path in options.runs for row in rows.read(path)]
    finish(run_page(found, [path.name for path in options.runs]), options)


def explain(options: argparse.Namespace) -> None:
    """Writes the page of a model: `mxk explain DIR --html OUT`."""
    from mxk_compile.integrations.transformers import load
    from mxk_compile.report.content import model_page
    from mxk_compile.report.write import target_of

    target_of(options.html)  # before a model is loaded and measured
    finish(model_page(load(options.model), options.model, options.tokens), options)


def finish(page: Page, options: argparse.Namespace) -> None:
    """Writes what was asked for, and says so."""
    from mxk_compile.report.write import write_page, write_plots

    write_page(page, options.html)
    print(f"page: {options.html}")
    if options.plots is not None:
        print(f"plots: {write_plots(page.plots, options.plots)}")
