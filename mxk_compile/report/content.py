"""What stands on the pages: of a model (`mxk explain --html`) and of a run (`mxk report`)."""

from __future__ import annotations

import platform
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from mxk_compile.bench import compare
from mxk_compile.bench.rows import Row
from mxk_compile.demo import memory_line, rewrite_table
from mxk_compile.passes import Report
from mxk_compile.report import graph, layers, plots
from mxk_compile.report.page import Page
from mxk_compile.report.plots import Plot
from mxk_compile.settings import settings
from mxk_compile.testing import machine
from mxk_compile.version import __version__

_EVIDENCE = (
    "Measured: on the device named. Modelled: counted in an emulator and calibrated, never timed."
    " Published: taken from the source named."
)


def model_page(model: Any, folder: Path, tokens: Sequence[int]) -> Page:
    """The page of a loaded model: what runs for each T of `tokens`, the graph, speed and error of its layers here."""
    name = folder.resolve().name
    page = Page(f"{name}: what mxk does with it", f"mxk explain {folder} --html")
    ids = torch.zeros(1, tokens[0], dtype=torch.int64, device=model.device)
    before, _ = graph.trace(model, 0, input_ids=ids, use_cache=False)
    after, report = graph.trace(model, settings.max_tokens, input_ids=ids, use_cache=False)
    reports = {tokens[0]: report, **{more: rewrite_table(model, more) for more in tokens[1:]}}
    figures, rows = layers.measure(model, name)
    page.tiles(_model_tiles(reports, figures, rows))
    _what_runs(page, reports)
    _graphs(page, graph.neighbourhood(before), graph.neighbourhood(after), tokens[0])
    _speed(page, rows)
    if not rows:
        page.paragraph(
            "No fused kernel runs these layers here; the table above says why, so nothing was timed."
        )
    page.section("Error of each layer")
    if figures:
        page.table(
            ("layer", "stock rel_l2", "fused rel_l2", "stock µs, T = 1", "fused µs, T = 1", "speed-up"),
            [
                (
                    figure.name,
                    figure.stock_rel_l2,
                    figure.fused_rel_l2,
                    figure.stock_us,
                    figure.fused_us,
                    f"{figure.stock_us / figure.fused_us:.1f}×",
                )
                for figure in figures
            ],
            f"rel_l2 against fp32 of exactly dequantised weights, on {max(layers.TOKENS)} tokens; measured",
        )
    config = model.config
    sizes = f"{config.num_hidden_layers} layers, K = {config.hidden_size}"
    _environment(page, [("model", f"{folder} ({sizes})"), ("memory", memory_line(model)), *_here()])
    return page


def _model_tiles(
    reports: dict[int, Report], figures: Sequence[layers.LayerFigures], rows: Sequence[Row]
) -> list[tuple[str, str]]:
    fewest, report = next(iter(reports.items()))
    tiles = [(f"{report.num_fused} of {len(report.nodes)}", f"MoE layers fused at T = {fewest}")]
    if rows:
        stock, fused = rows[:2]
        tiles.append(
            (f"{stock.us / fused.us:.1f}×", f"faster than the stock op at T = {stock.num_tokens}, measured")
        )
    if figures:
        worst = max(figure.fused_rel_l2 for figure in figures)
        stock_worst = max(figure.stock_rel_l2 for figure in figures)
        tiles.append((f"{worst:.2e}", f"worst rel_l2 of a layer; stock {stock_worst:.2e}"))
        tiles.append((str(next(n.kernel for n in report.nodes)), "runs the first layer"))
    return tiles


def _what_runs(page: Page, reports: dict[int, Report]) -> None:
    page.section("What runs, and why")
    page.paragraph(
        f"A call of at most {'any number of' if settings.max_tokens is None else settings.max_tokens} tokens is fused"
        " where a kernel supports its shape (`MXK_MAX_TOKENS`); others keep the stock op.",
        soft=True,
    )
    for index, (num_tokens, report) in enumerate(reports.items()):
        title = f"T = {num_tokens}: {report.num_fused} of {len(report.nodes)} MoE layers fused"
        page.folded(title) if index else page.heading(title)
        page.table(
            ("layer", "state", "runs on, or why not", "stock op", "call", "tokens"),
            [
                (
                    node.layer,
                    node.fused,
                    str(node.kernel) if node.fused else node.reason or "",
                    node.stock_op,
                    str(node.desc or "–"),
                    node.tokens or "–",
                )
                for node in report.nodes
            ],
        )
        if index:
            page.unfold()


def _graphs(
    page: Page, before: graph.Neighbourhood | None, after: graph.Neighbourhood | None, num_tokens: int
) -> None:
    if before is None or after is None:
        return
    page.section("The graph, before and after")
    caption = (
        f"The first MoE call with T = {num_tokens}, as the inner compiler receives it without and with the passes:"
        " boxes are operations of one kind, lines their inputs."
    )
    page.plot(Plot("graph", "First MoE call", graph.draw(before, after), caption))


def run_page(rows: Sequence[Row], sources: Sequence[str]) -> Page:
    """The page of rows of `mxk bench`; `sources` are the files that they came from."""
    devices = list(dict.fromkeys(row.device for row in rows))
    page = Page("mxk bench: " + ", ".join(devices), f"mxk report {' '.join(sources)} --html")
    page.tiles(_run_tiles(rows))
    _speed(page, rows)
    page.section("Error against fp32")
    with_error = [row for row in rows if row.rel_l2 is not None]
    if with_error:
        page.table(
            ("call", "implementation", "runs on", "rel_l2", "rel_l2, bf16 intermediate"),
            [(row.call, row.impl, row.kernel, row.rel_l2, row.rel_l2_bf16) for row in with_error],
            "rel_l2 = ||result - fp32|| / ||fp32||; the last column rounds the reference's intermediate once to bf16",
        )
    else:
        page.paragraph("Nothing ran, so there is no error: these rows are modelled or published.")
    versions = dict(item for row in rows for item in row.versions.items())
    methods = [(f"method, {row.impl}", row.method) for row in {row.impl: row for row in rows}.values()]
    kept = [(f"version of {name}", version) for name, version in versions.items()]
    _environment(page, [("device", ", ".join(devices)), *kept, *methods, ("rows", ", ".join(sources))])
    return page


def _run_tiles(rows: Sequence[Row]) -> list[tuple[str, str]]:
    tiles = [
        (str(len(rows)), "rows: " + ", ".join(dict.fromkeys(f"{row.impl} {row.evidence}" for row in rows)))
    ]
    ratios = [
        other.us / fused.us
        for group in plots.groups(rows)
        for other, fused in plots.pairs(group)
        if other.impl == "stock"
    ]
    if ratios:
        tiles.append(
            (
                f"{statistics.median(ratios):.1f}×",
                f"median speed-up over stock; {min(ratios):.1f} to {max(ratios):.1f}",
            )
        )
    errors = [row.rel_l2 for row in rows if row.impl == "fused" and row.rel_l2 is not None]
    if errors:
        tiles.append((f"{max(errors):.2e}", "worst rel_l2 of the fused op"))
    shares = [row.floor_us / row.us for row in rows if row.impl == "fused" and row.floor_us]
    if shares:
        tiles.append((f"{max(shares):.0%}", "of the read bandwidth, best fused row"))
    return tiles


def _speed(page: Page, rows: Sequence[Row]) -> None:
    if not rows:
        return
    page.section("Speed")
    page.paragraph(_EVIDENCE, soft=True)
    for group in plots.groups(rows):
        first = group[0]
        page.heading(compare.caption((first, group[-1])))
        pairs = plots.pairs(group)
        header = ("tokens", "routing", "local routes")
        if pairs:
            page.table(
                (*header, "compared with", "its µs", "fused µs", "floor µs", "speed-up"),
                [
                    (
                        *(fused.num_tokens, fused.routing, fused.local_routes, other.impl),
                        *(other.us, fused.us, fused.floor_us, f"{other.us / fused.us:.1f}×"),
                    )
                    for other, fused in pairs
                ],
            )
        alone = [row for row in group if not any(row in pair for pair in pairs)]
        if alone:
            page.table(
                (*header, "implementation", "µs", "floor µs", "packed GB/s"),
                [
                    (
                        *(row.num_tokens, row.routing, row.local_routes, row.impl),
                        *(row.us, row.floor_us, row.packed_gb_s),
                    )
                    for row in alone
                ],
            )
        for plot in plots.plots(group):
            page.plot(plot)


def _here() -> list[tuple[str, str]]:
    return [
        ("machine", machine()),
        ("python", platform.python_version()),
        ("mxk_compile", __version__),
        ("settings", str(settings)),
    ]


def _environment(page: Page, lines: Sequence[tuple[str, str]]) -> None:
    page.section("Environment")
    page.table(("what", "value"), lines)
