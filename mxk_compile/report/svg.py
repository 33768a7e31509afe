"""Drawings as SVG text: what plots.py and graph.py share. Every text is escaped here.

Colours are names of PALETTE. On the page they are CSS variables, which follow light and dark; in a file of its own a
drawing carries the light ones.
"""

from __future__ import annotations

import html
import re

PALETTE = {
    "ink": ("#1f2328", "#e6e8eb"),
    "soft": ("#5f6b7a", "#9aa7b5"),
    "line": ("#d5dae1", "#39424e"),
    "paper": ("#ffffff", "#14181d"),
    "raised": ("#f4f6f9", "#1d232b"),
    "fused": ("#0b66c3", "#5aa9ff"),
    "stock": ("#9a6a00", "#e0a93b"),
    "third": ("#7a3fb0", "#c08df2"),
    "fourth": ("#0d7d5c", "#43c79b"),
    "floor": ("#c0392b", "#ff7b6b"),
}
"""Light and dark value of each colour."""
FONT = "ui-sans-serif, system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
_CHARACTER = 6.4  # width of a letter at 12 px, for what is made to fit


def escape(text: object) -> str:
    """As text of HTML or SVG and inside quoted attributes; control characters, which neither may hold, become '?'."""
    return html.escape(re.sub(r"[^\t\n\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "?", str(text)))


def number(value: float) -> str:
    """A coordinate."""
    return f"{value:.1f}".rstrip("0").rstrip(".")


def text(
    x: float,
    y: float,
    words: object,
    *,
    anchor: str = "start",
    colour: str = "ink",
    size: int = 12,
    bold: bool = False,
) -> str:
    """One line of text."""
    weight = ' font-weight="600"' if bold else ""
    place = f'x="{number(x)}" y="{number(y)}" text-anchor="{anchor}" font-size="{size}"'
    return f'<text class="{colour}" {place}{weight}>{escape(words)}</text>'


def rect(
    x: float, y: float, width: float, height: float, colour: str, title: str = "", radius: int = 2
) -> str:
    """A filled box; `title` shows when it is pointed at."""
    inside = f"<title>{escape(title)}</title>" if title else ""
    size = f'width="{number(max(width, 0))}" height="{number(height)}"'
    return f'<rect class="{colour}" x="{number(x)}" y="{number(y)}" {size} rx="{radius}">{inside}</rect>'


def path(points: list[tuple[float, float]], colour: str, *, dashed: bool = False, width: float = 1.5) -> str:
    """A line through points."""
    steps = " ".join(f"{number(x)},{number(y)}" for x, y in points)
    dash = ' stroke-dasharray="5 4"' if dashed else ""
    return f'<polyline class="stroke-{colour}" points="{steps}" stroke-width="{width}"{dash}/>'


def dot(x: float, y: float, colour: str, title: str) -> str:
    """A round mark."""
    inside = f"<title>{escape(title)}</title>"
    return f'<circle class="{colour}" cx="{number(x)}" cy="{number(y)}" r="4.5">{inside}</circle>'


def fit(words: str, width: float, size: int = 12) -> str:
    """Words cut to a width in pixels."""
    most = max(int(width / (_CHARACTER * size / 12)), 2)
    return words if len(words) <= most else words[: most - 1] + "…"


def drawing(parts: list[str], width: float, height: float, label: str) -> str:
    """An SVG element for the page."""
    box = f'viewBox="0 0 {number(width)} {number(height)}"'
    size = f'width="{number(width)}" height="{number(height)}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {box} {size} role="img" font-family="{FONT}"'
    return f'{head} aria-label="{escape(label)}">\n' + "\n".join(parts) + "\n</svg>"


def style(colours: dict[str, str]) -> str:
    """CSS of the classes above."""
    rules = [
        f".{name}{{fill:{value}}} .stroke-{name}{{stroke:{value};fill:none}}"
        for name, value in colours.items()
    ]
    return "\n".join(rules)


def standalone(svg: str) -> str:
    """The same drawing as a file: with its colours and a ground."""
    colours = {name: light for name, (light, _) in PALETTE.items()}
    head, _, rest = svg.partition(">")
    ground = f'<rect width="100%" height="100%" fill="{colours["paper"]}"/>'
    return f"{head}>\n<style>{style(colours)}</style>\n{ground}{rest}\n"
