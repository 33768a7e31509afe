"""`mxk bench --check`: a new run against the rows of benchmarks/baseline, as ratios with a tolerance."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from mxk_compile.bench import rows as bench_rows
from mxk_compile.bench.points import Point
from mxk_compile.bench.rows import Row
from mxk_compile.checkout import CHECKOUT
from mxk_compile.errors import CallError

FOLDER = CHECKOUT / "benchmarks" / "baseline"
TOLERANCE = {"measured": 0.12, "modelled": 0.001}
"""Largest growth of a time, by evidence: 0.12 covers what two runs on one H200 differed by (docs/bench.md)."""
_ERROR_TOLERANCE = 0.10
"""Of rel_l2: the same kernel on other random weights."""
_COUNT_TOLERANCE = 1e-6  # of counts, which are the same on every machine


@dataclasses.dataclass(frozen=True)
class Finding:
    """One quantity of one row that grew beyond its tolerance."""

    row: Row
    quantity: str
    before: float
    now: float

    def __str__(self) -> str:
        ratio = self.now / self.before if self.before else float("inf")
        return f"{self.row.name}: {self.quantity} {self.now:g}, baseline {self.before:g} ({ratio:.3f} x)"


def baselines(folder: Path | None = None) -> dict[str, list[Row]]:
    """The committed rows by file name; raises CallError where there are none, or one is not what bench printed."""
    folder = folder or FOLDER
    found = {path.stem: bench_rows.read(path) for path in sorted(folder.glob("*.json"))}
    if not found:
        raise CallError(
            str(folder),
            "no baseline",
            "files of rows, as in a checkout",
            "run in a checkout of the repository",
        )
    return found


def points_of(rows: Sequence[Row]) -> dict[str, list[Point]]:
    """The calls to be made again, by implementation."""
    found: dict[str, list[Point]] = {}
    for row in rows:
        if row.evidence != "published":
            point = Point(
                row.variant, row.num_experts, row.num_tokens, row.routing, row.local_routes, row.seed
            )
            found.setdefault(row.impl, []).append(point)
    return found


def compare(baseline: Sequence[Row], new: Sequence[Row]) -> tuple[int, list[Finding], list[Row]]:
    """How many baseline rows have a partner in `new`, what grew, and the rows without one."""
    current = {(row.key, row.impl, row.device, row.threads): row for row in new}
    findings: list[Finding] = []
    missing = []
    compared = 0
    for before in baseline:
        now = current.get((before.key, before.impl, before.device, before.threads))
        if before.evidence == "published":
            continue
        if now is None or now.local_routes != before.local_routes:
            missing.append(before)
            continue
        compared += 1
        findings += _findings(before, now)
    return compared, findings, missing


def _findings(before: Row, now: Row) -> list[Finding]:
    found = []
    if now.us > before.us * (1 + TOLERANCE[before.evidence]):
        found.append(Finding(now, "us", before.us, now.us))
    for name in ("rel_l2", "rel_l2_bf16"):
        old, new = getattr(before, name), getattr(now, name)
        if old is not None and (new is None or new > old * (1 + _ERROR_TOLERANCE)):
            found.append(Finding(now, name, old, float("inf") if new is None else new))
    for name, count in before.counts.items():
        new_count = now.counts.get(name, float("inf"))
        if new_count > count * (1 + _COUNT_TOLERANCE):
            found.append(Finding(now, name, count, new_count))
    return found
