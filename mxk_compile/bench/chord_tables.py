"""The published tables with what was measured beside them: both projections of each count, their errors and sums."""

from __future__ import annotations

from collections.abc import Iterable

from mxk_compile.bench.chord import SCENARIOS, TABLES, TARGETS_US, Scenario
from mxk_compile.bench.rows import Row

LAUNCHED = "launched"
"""`Row.impl` of calls that are launched one by one; "fused" are replays of CUDA graphs, or calls on a CPU."""
_HEAD = (
    "count",
    "gate_up",
    "rel_l2",
    "down",
    "rel_l2",
    "sum",
    LAUNCHED,
    "floor",
    "target",
    "Humming",
    "Chord",
)


def name(scenario: Scenario) -> str:
    """`Row.variant` of a scenario."""
    return f"chord {scenario.table} {scenario.projection}"


def tables(rows: Iterable[Row]) -> str:
    """Markdown: a table for each published one, and for each other that has rows; microseconds.

    Columns "target" is what one H200 shall take for both projections; Humming and Chord are published sums. Sums of
    other implementations that were measured, and of theirs launched one by one, stand in columns of their own.
    """
    found = {(row.variant, row.num_tokens, row.impl): row for row in rows}
    measured = dict.fromkeys(row.impl for row in found.values() if row.evidence == "measured")
    others = [impl for impl in measured if impl not in ("fused", LAUNCHED)]
    head = (*_HEAD, *others)
    text = []
    for table in TABLES:
        lines = [_line(table, index, count, found, others) for index, count in enumerate(_counts(table))]
        if "EP8" in table or table == "TP8" or any(line[1] or any(line[len(_HEAD) :]) for line in lines):
            text += [f"### {table}", "", _row(head), _row(("---:",) * len(head)), *map(_row, lines), ""]
    return "\n".join(text)


def _counts(table: str) -> list[int]:
    return [s.count for s in SCENARIOS if (s.table, s.projection) == (table, "down")]


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _line(
    table: str, index: int, count: int, found: dict[tuple[str, int, str], Row], others: list[str]
) -> list[str]:
    pair = [s for s in SCENARIOS if (s.table, s.count) == (table, count)]

    def of(impl: str) -> list[Row | None]:
        return [found.get((name(s), count, impl)) for s in pair]

    measured = of("fused")
    cells = [str(count)]
    for row in measured:
        cells += ["", ""] if row is None else [f"{row.us:.1f}", f"{row.rel_l2 or 0:.1e}"]
    cells += [_total(rows) for rows in (measured, of(LAUNCHED))]
    cells.append(_sum(None if r is None else r.floor_us for r in measured))
    targets = TARGETS_US.get(table)
    cells.append(f"{targets[index]:.0f}" if targets else "")
    published = [s.published_us or (None, None) for s in pair]
    cells += [_sum(us[column] for us in published) for column in (0, 1)]
    return cells + [_total(of(impl)) for impl in others]


def _total(rows: list[Row | None]) -> str:
    return _sum(None if row is None else row.us for row in rows)


def _sum(values: Iterable[float | None]) -> str:
    found = list(values)
    return "" if None in found else f"{sum(value for value in found if value is not None):.1f}"
