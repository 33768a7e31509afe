"""One self-contained page: sections of text, tables and drawings; no script, nothing fetched.

Wide tables and drawings scroll inside their own box, so that the page fits a phone; colours follow the reader's system.
"""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Iterable, Sequence

from mxk_compile.report import svg
from mxk_compile.report.plots import Plot
from mxk_compile.report.svg import escape

Cell = object
_WIDE_CELL = 44  # letters from which a cell's text is set on several lines

_CSS = """
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);font:16px/1.5 FONT}
main{max-width:1080px;margin:0 auto;padding:20px 16px 48px}
h1{font-size:1.55rem;line-height:1.2;margin:8px 0 2px;overflow-wrap:anywhere}
h2{font-size:1.15rem;margin:40px 0 8px;padding-top:12px;border-top:1px solid var(--line)}
h3{font-size:1rem;margin:24px 0 6px;overflow-wrap:anywhere}
p{margin:6px 0;max-width:74ch;overflow-wrap:anywhere}
.soft,figcaption,caption{color:var(--soft);font-size:.875rem}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:10px;margin:18px 0}
.tile{background:var(--raised);border-radius:8px;padding:12px 14px;min-width:0}
.tile b{display:block;font-size:1.5rem;line-height:1.25;font-variant-numeric:tabular-nums;overflow-wrap:anywhere}
.tile b.long{font-size:1.05rem;line-height:1.9}
.tile span{color:var(--soft);font-size:.875rem}
.scroll{overflow-x:auto;margin:8px 0;-webkit-overflow-scrolling:touch}
table{border-collapse:collapse;font-size:.875rem;min-width:100%}
caption{text-align:left;padding:4px 0;caption-side:bottom}
th,td{padding:5px 12px 5px 0;text-align:left;vertical-align:top;border-bottom:1px solid var(--line)}
th{color:var(--soft);font-weight:600;white-space:nowrap}
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
td{white-space:nowrap}
td.w{white-space:normal;min-width:30ch;max-width:60ch;overflow-wrap:anywhere}
figure{margin:14px 0 22px}
figure .scroll svg{display:block;max-width:none}
@media (min-width:800px){figure .scroll svg{max-width:100%;height:auto}}
code{font:13px/1.4 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;overflow-wrap:anywhere}
details>summary{cursor:pointer;margin:12px 0}
.yes{color:var(--fused);font-weight:600}.no{color:var(--stock);font-weight:600}
@media print{details>*{display:block}}
"""


@dataclasses.dataclass
class Page:
    """A page under construction; `html()` is the whole of it."""

    title: str
    subtitle: str
    parts: list[str] = dataclasses.field(default_factory=list)
    plots: list[Plot] = dataclasses.field(default_factory=list)

    def section(self, title: str) -> None:
        """A heading."""
        self.parts.append(f"<h2>{escape(title)}</h2>")

    def heading(self, title: str) -> None:
        """A smaller heading."""
        self.parts.append(f"<h3>{escape(title)}</h3>")

    def paragraph(self, text: str, *, soft: bool = False) -> None:
        """Plain text; what stands between backquotes is code."""
        pieces = [
            f"<code>{escape(piece)}</code>" if index % 2 else escape(piece)
            for index, piece in enumerate(text.split("`"))
        ]
        self.parts.append(f"<p{' class=soft' if soft else ''}>{''.join(pieces)}</p>")

    def tiles(self, tiles: Iterable[tuple[str, str]]) -> None:
        """Figures with what they mean."""
        boxes = "".join(
            f'<div class="tile"><b{_long(value)}>{escape(value)}</b><span>{escape(what)}</span></div>'
            for value, what in tiles
        )
        self.parts.append(f'<div class="tiles">{boxes}</div>')

    def table(self, header: Sequence[str], rows: Iterable[Sequence[Cell]], caption: str = "") -> None:
        """A table; numbers are set right."""
        body = []
        numeric = [False] * len(header)
        for row in rows:
            cells = []
            for column, cell in enumerate(row):
                right = isinstance(cell, (int, float))
                numeric[column] |= right
                mark = ' class="n"' if right else ' class="w"' if len(str(cell)) > _WIDE_CELL else ""
                cells.append(f"<td{mark}>{_cell(cell)}</td>")
            body.append(f"<tr>{''.join(cells)}</tr>")
        heads = "".join(
            f'<th scope="col"{" class=n" if right else ""}>{escape(name)}</th>'
            for name, right in zip(header, numeric, strict=True)
        )
        below = f"<caption>{escape(caption)}</caption>" if caption else ""
        table = f"<table>{below}<thead><tr>{heads}</tr></thead><tbody>{''.join(body)}</tbody></table>"
        self.parts.append(f'<div class="scroll" tabindex="0">{table}</div>')

    def plot(self, plot: Plot) -> None:
        """A drawing with its caption; it can be exported, too."""
        self.plots.append(plot)
        scroll = f'<div class="scroll" tabindex="0">{plot.svg}</div>'
        caption = f"<figcaption>{escape(plot.caption)}</figcaption>"
        self.parts.append(
            f'<figure id="{escape(plot.name)}"><h3>{escape(plot.title)}</h3>{scroll}{caption}</figure>'
        )

    def folded(self, summary: str) -> None:
        """What follows, up to `unfold`, shows when asked for."""
        self.parts.append(f"<details><summary>{escape(summary)}</summary>")

    def unfold(self) -> None:
        """Ends `folded`."""
        self.parts.append("</details>")

    def html(self) -> str:
        """The document."""
        light, dark = (
            ";".join(f"--{name}:{pair[index]}" for name, pair in svg.PALETTE.items()) for index in (0, 1)
        )
        variables = {name: f"var(--{name})" for name in svg.PALETTE}
        css = (
            f":root{{color-scheme:light dark;{light}}}\n"
            f"@media (prefers-color-scheme:dark){{:root{{{dark}}}}}\n"
            f"{_CSS.replace('FONT', svg.FONT)}{svg.style(variables)}"
        )
        # Nothing may be fetched or run, whatever a checkpoint's names hold.
        policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
        day = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
        head = (
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
            f'<meta http-equiv="Content-Security-Policy" content="{escape(policy)}">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f'<link rel="icon" href="data:,"><title>{escape(self.title)}</title>\n<style>{css}</style></head>'
        )
        intro = f'<h1>{escape(self.title)}</h1><p class="soft">{escape(self.subtitle)} · made {day}</p>'
        body = "\n".join(self.parts)
        return f"{head}\n<body><main>\n{intro}\n{body}\n</main></body></html>\n"


def _long(value: str) -> str:
    return " class=long" if len(value) > 10 else ""


def _cell(cell: Cell) -> str:
    if isinstance(cell, bool) or cell is None:
        return {True: '<span class="yes">fused</span>', False: '<span class="no">stock</span>', None: "–"}[
            cell
        ]
    if isinstance(cell, float):
        return escape(f"{cell:.2e}" if cell and abs(cell) < 0.01 else f"{cell:,.1f}")
    return escape(f"{cell:,}" if isinstance(cell, int) else cell)
