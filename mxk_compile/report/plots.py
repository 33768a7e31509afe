"""The plots of a page: speed-up, microseconds against the floor, and packed bytes a second."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Sequence

from mxk_compile.bench import compare
from mxk_compile.bench.rows import Row
from mxk_compile.errors import CallError
from mxk_compile.report import svg

_WIDTH = 720.0
_LABEL = 150.0
_COLOURS = ("third", "fourth", "floor", "soft")
_BAR, _GAP = 16.0, 10.0


@dataclasses.dataclass(frozen=True)
class Plot:
    """A drawing with its name (for files), title and caption (what it shows, how it was had)."""

    name: str
    title: str
    svg: str
    caption: str


def colours(impls: Sequence[str]) -> dict[str, str]:
    """A colour for each implementation."""
    others = itertools.cycle(_COLOURS)
    return {impl: impl if impl in ("fused", "stock") else next(others) for impl in dict.fromkeys(impls)}


def groups(rows: Sequence[Row]) -> list[list[Row]]:
    """Rows of one layer on one device, in the order that they came."""
    found: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        key = (row.variant, row.num_experts, row.hidden_size, row.intermediate_size, row.device, row.threads)
        found.setdefault(key, []).append(row)
    return list(found.values())


def pairs(group: Sequence[Row]) -> list[tuple[Row, Row]]:
    """Each other implementation beside the fused one, where they are the same call."""
    fused = {row.key: row for row in group if row.impl == "fused"}
    found = []
    for row in group:
        if row.impl != "fused" and row.key in fused:
            try:
                found += compare.pair([row], [fused[row.key]])[0]
            except CallError:  # another draw or shape: no pair
                continue
    return found


def plots(rows: Sequence[Row]) -> list[Plot]:
    """The plots that one group of rows has something for."""
    made = (_speed_up(rows), _floor(rows), _bandwidth(rows))
    return [plot for plot in made if plot is not None]


def _label(row: Row) -> str:
    return f"T = {row.num_tokens}, {row.routing}"


def _title(rows: Sequence[Row]) -> str:
    return f"{rows[0].variant}, {rows[0].num_experts} experts"


def _name(kind: str, rows: Sequence[Row]) -> str:
    return re.sub(r"[^a-z0-9]+", "-", f"{kind} {rows[0].variant} e{rows[0].num_experts}".lower()).strip("-")[
        :80
    ]


def _how(rows: Sequence[Row]) -> str:
    evidence = " and ".join(dict.fromkeys(f"{row.impl} {row.evidence}" for row in rows))
    return f"{evidence}; {rows[0].device}"


def _speed_up(rows: Sequence[Row]) -> Plot | None:
    calls: dict[tuple[object, ...], list[tuple[Row, Row]]] = {}
    for other, fused in pairs(rows):
        calls.setdefault(fused.key, []).append((other, fused))
    others = list(dict.fromkeys(other.impl for same in calls.values() for other, _ in same))
    shown = colours(others)
    bars = [
        (
            _label(same[0][1]),
            [
                (
                    shown[other.impl],
                    other.us / fused.us,
                    f"{other.impl}: {other.us:.1f} µs against {fused.us:.1f} µs",
                )
                for other, fused in same
            ],
        )
        for same in calls.values()
    ]
    if not bars:
        return None
    one = [(impl, shown[impl]) for impl in others]
    if len(one) == 1:  # one bar a call: it is the fused op's own achievement
        bars = [(label, [("fused", value, why) for _, value, why in values]) for label, values in bars]
        one = [(f"{others[0]} µs over fused µs", "fused")]
    drawn = _bars(bars, one, reference=(1.0, "1×"), unit="×", label=f"speed-up, {_title(rows)}")
    caption = f"Times the fused op is faster than {', '.join(others)} ({_how(rows)})."
    return Plot(_name("speed-up", rows), f"Speed-up: {_title(rows)}", drawn, caption)


def _bandwidth(rows: Sequence[Row]) -> Plot | None:
    known = [row for row in rows if row.packed_gb_s is not None]
    if not known:
        return None
    shown = colours([row.impl for row in known])
    calls: dict[tuple[object, ...], list[Row]] = {}
    for row in known:
        calls.setdefault(row.key, []).append(row)
    bars = [
        (
            _label(same[0]),
            [(shown[row.impl], row.packed_gb_s or 0.0, f"{row.impl}: {row.us:.1f} µs") for row in same],
        )
        for same in calls.values()
    ]
    read = max((row.read_gb_s or 0.0) for row in known)
    reference = (read, f"read {read:.0f}") if read else None
    drawn = _bars(bars, list(shown.items()), reference, "", f"packed GB/s, {_title(rows)}")
    what = "Packed bytes of the experts touched, in 1e9 bytes a second; the line is what plain reads reach"
    caption = f"{what} ({_how(rows)})."
    return Plot(_name("gb-s", rows), f"Packed GB/s: {_title(rows)}", drawn, caption)


def _bars(
    bars: Sequence[tuple[str, list[tuple[str, float, str]]]],
    legend: Sequence[tuple[str, str]],
    reference: tuple[float, str] | None,
    unit: str,
    label: str,
) -> str:
    """Horizontal bars: (label, [(colour, value, explanation)]) from top to bottom."""
    most = max(
        [value for _, values in bars for _, value, _ in values] + ([reference[0]] if reference else [])
    )
    right = _WIDTH - 70
    scale = (right - _LABEL) / (most or 1.0)
    parts = _legend(legend, _LABEL)
    top = y = 34.0
    for name, values in bars:
        height = _BAR * len(values)
        parts.append(svg.text(_LABEL - 8, y + height / 2 + 4, svg.fit(name, _LABEL - 8), anchor="end"))
        for colour, value, why in values:
            parts.append(svg.rect(_LABEL, y + 1, value * scale, _BAR - 2, colour, f"{name}, {why}"))
            shown = f"{value:.1f}{unit}" if value < 100 else f"{value:.0f}{unit}"
            parts.append(svg.text(_LABEL + value * scale + 5, y + _BAR / 2 + 4, shown))
            y += _BAR
        y += _GAP
    if reference:
        x = _LABEL + reference[0] * scale
        parts.append(svg.path([(x, top - 4), (x, y)], "floor", dashed=True))
        anchor = "middle" if x < _WIDTH - 60 else "end"
        parts.append(svg.text(x, y + 12, reference[1], anchor=anchor, colour="floor", size=11))
    return svg.drawing(parts, _WIDTH, y + 20, label)


def _legend(entries: Sequence[tuple[str, str]], x: float) -> list[str]:
    parts = []
    for name, colour in entries:
        shown = svg.fit(name, 180)
        parts += [svg.rect(x, 8, 12, 12, colour), svg.text(x + 18, 18, shown)]
        x += 40 + 6.8 * len(shown)
    return parts


def _floor(rows: Sequence[Row]) -> Plot | None:
    """µs over packed bytes touched, both logarithmic; the floor is a line of slope one."""
    known = [row for row in rows if row.packed_gb_s and row.read_gb_s and row.packed_gb_s * row.us > 0]
    if not known:
        return None
    shown = colours([row.impl for row in known])
    read = max(row.read_gb_s or 0.0 for row in known)
    megabytes = [(row.packed_gb_s or 0.0) * row.us / 1e3 for row in known]
    floor_us = [mb / read * 1e3 for mb in megabytes]
    x_ends, y_ends = _ends(megabytes), _ends([*floor_us, *(row.us for row in known)])
    left, right, top, bottom = 90.0, _WIDTH - 24, 36.0, 320.0  # left of it: "100,000,000", or "µs a call"

    def place(mb: float, us: float) -> tuple[float, float]:
        across = math.log(mb / x_ends[0]) / math.log(x_ends[1] / x_ends[0])
        up = math.log(us / y_ends[0]) / math.log(y_ends[1] / y_ends[0])
        return left + across * (right - left), bottom - up * (bottom - top)

    parts = _legend([*shown.items(), (f"floor: read at {read:.0f} GB/s", "floor")], left)
    parts.append(svg.text(left - 6, 18, "µs a call", anchor="end", colour="soft"))
    for value in _ticks(x_ends):
        x, _ = place(value, y_ends[0])
        parts += [
            svg.path([(x, top), (x, bottom)], "line", width=1),
            svg.text(x, bottom + 16, _tick(value), anchor="middle", colour="soft", size=11),
        ]
    for value in _ticks(y_ends):
        _, y = place(x_ends[0], value)
        parts += [
            svg.path([(left, y), (right, y)], "line", width=1),
            svg.text(left - 6, y + 4, _tick(value), anchor="end", colour="soft", size=11),
        ]
    ends = [(mb, mb / read * 1e3) for mb in (max(x_ends[0], y_ends[0] * read / 1e3), x_ends[1])]
    parts.append(svg.path([place(*end) for end in ends], "floor", dashed=True, width=2))
    named: list[tuple[float, float]] = []
    for row, mb in zip(known, megabytes, strict=True):
        x, y = place(mb, row.us)
        why = f"{row.impl}, {_label(row)}: {row.us:.1f} µs, {mb:.1f} MB"
        parts.append(svg.dot(x, y, shown[row.impl], why))
        free = all(abs(x - at[0]) > 30 or abs(y - at[1]) > 14 for at in named)
        if free and (row.impl == "fused" or len(shown) == 1):
            named.append((x, y))
            parts.append(svg.text(x, y + 17, f"T={row.num_tokens}", anchor="middle", colour="soft", size=10))
    parts += [
        svg.text(
            (left + right) / 2,
            bottom + 34,
            "packed MB of the experts touched",
            anchor="middle",
            colour="soft",
        ),
    ]
    drawn = svg.drawing(parts, _WIDTH, bottom + 44, f"µs against the floor, {_title(rows)}")
    caption = (
        f"Each mark is a call; the dashed line is its packed bytes at the read bandwidth ({_how(rows)})."
    )
    return Plot(_name("floor", rows), f"µs against the floor: {_title(rows)}", drawn, caption)


def _ends(values: Sequence[float]) -> tuple[float, float]:
    """Round ends of a logarithmic axis around values."""
    low, high = min(values) / 1.3, max(values) * 1.3
    return low, high


def _ticks(ends: tuple[float, float]) -> list[float]:
    """1, 2, 5 of each decade inside; whole decades where there are many."""
    first, last = math.floor(math.log10(ends[0])), math.ceil(math.log10(ends[1]))
    steps = (1, 2, 5) if last - first <= 3 else (1,)
    found = [step * 10.0**decade for decade in range(first, last + 1) for step in steps]
    return [value for value in found if ends[0] <= value <= ends[1]]


def _tick(value: float) -> str:
    return f"{value:,.0f}" if value >= 1 else f"{value:g}"
