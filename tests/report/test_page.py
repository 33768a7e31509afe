"""Pages: parsed as XML, hostile names, what stands where, files that are whole or not there; and in a real browser."""

from __future__ import annotations

import dataclasses
import html
import html.parser
import json
import os
import pathlib
import re
import shutil
import subprocess
import xml.etree.ElementTree as ElementTree
from typing import Any

import pytest
import torch

import mxk_compile
from mxk_compile import demo
from mxk_compile.bench.rows import Row
from mxk_compile.cli import main
from mxk_compile.errors import CallError
from mxk_compile.ops.stock import call_mxfp4
from mxk_compile.report import graph, plots, svg, write
from mxk_compile.report.content import run_page
from mxk_compile.report.page import Page

ROOT = pathlib.Path(__file__).parents[2]
MODEL = ROOT / "models" / "tiny-gptoss"
HOSTILE = "<img src=x onerror=alert(1)>\"'&</script>\x00\x1b[2J"
BASE = {
    "variant": "gptoss",
    "weight_format": "mxfp4",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_experts": 32,
    "all_experts": 128,
    "top_k": 4,
    "local_routes": 4,
    "experts_touched": 4,
    "seed": 0,
    "kernel": "cpu/cpp/avx512",
    "device": "A processor",
    "threads": 2,
    "evidence": "measured",
    "us_p10": None,
    "us_p90": None,
    "floor_us": 100.0,
    "read_gb_s": 900.0,
    "rotated_bytes": 1 << 30,
    "rel_l2": 1.6e-3,
    "rel_l2_bf16": None,
    "method": "chain of 8, median of 30",
    "versions": {"torch": "2.13.0"},
}


def rows(**changes: Any) -> list[Row]:
    made = []
    for num_tokens, stock, fused in ((1, 246.0, 51.5), (8, 2362.9, 235.8)):
        for impl, us in (("stock", stock), ("fused", fused)):
            values = {**BASE, "num_tokens": num_tokens, "routing": "random", "impl": impl, "us": us}
            made.append(Row(**{**values, "packed_gb_s": 5e4 / us, **changes}))
    return made


class Reader(html.parser.HTMLParser):
    """Tags, attributes and text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Keeps both."""
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        """Keeps it."""
        self.text += data


def test_a_page_of_rows_has_its_tables_and_plots(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, page = tmp_path / "run.json", tmp_path / "page.html"
    run.write_text("\n".join(row.to_json() for row in rows()))
    assert main(["report", str(run), "--html", str(page)]) == 0
    assert capsys.readouterr().out == f"page: {page}\n"
    reader = Reader(page.read_text())
    assert reader.tags.count("svg") == 3
    assert "script" not in reader.tags
    for words in ("4.8×", "10.0×", "2,362.9", "1.60e-03", "A processor", "2.13.0", "measured"):
        assert words in reader.text, words
    names = {value for name, value in reader.attributes if name == "id"}
    assert names == {"speed-up-gptoss-e32", "floor-gptoss-e32", "gb-s-gptoss-e32"}
    assert sorted(tmp_path.iterdir()) == [page, run]


def test_nothing_is_fetched_and_nothing_can_run() -> None:
    text = run_page(rows(), ["run.json"]).html()
    assert "default-src &#x27;none&#x27;; style-src &#x27;unsafe-inline&#x27;" in text
    assert not re.findall(r"(?:src|href)=[\"'](?!data:,)", text)
    assert set(re.findall(r"https?://[^\"' ]+", text)) == {"http://www.w3.org/2000/svg"}
    assert 'name="viewport" content="width=device-width' in text
    assert "prefers-color-scheme:dark" in text


@pytest.mark.parametrize("field", ["variant", "device", "impl", "kernel", "method", "routing"])
def test_hostile_text_stays_text(field: str) -> None:
    page = run_page(rows(**{field: HOSTILE}), [HOSTILE])
    page.table((HOSTILE,), [(HOSTILE,)], HOSTILE)
    page.paragraph(HOSTILE)
    text = page.html()
    reader = Reader(text)
    assert "img" not in reader.tags
    assert not any(name.startswith("on") for name, _ in reader.attributes)
    assert "<img" in reader.text
    assert not re.search(r"[\x00-\x08\x0b-\x1f]", text)
    for plot in page.plots:
        ElementTree.fromstring(svg.standalone(plot.svg))
        assert re.fullmatch(r"[a-z0-9-]+", plot.name)


def test_drawings_are_xml_and_show_every_row() -> None:
    made = plots.plots(rows())
    assert [plot.name.split("-gptoss")[0] for plot in made] == ["speed-up", "floor", "gb-s"]
    for plot in made:
        tree = ElementTree.fromstring(svg.standalone(plot.svg))
        assert "var(" not in svg.standalone(plot.svg)
        titles = [element.text or "" for element in tree.iter("{http://www.w3.org/2000/svg}title")]
        assert len(titles) == (2 if "speed-up" in plot.name else 4)


def test_bars_are_as_long_as_their_values() -> None:
    (speed_up, _, _) = plots.plots(rows())
    widths = [
        float(width)
        for width in re.findall(r'<rect class="fused" [^>]*width="([\d.]+)" height="14"', speed_up.svg)
    ]
    assert widths[1] / widths[0] == pytest.approx((2362.9 / 235.8) / (246.0 / 51.5), rel=0.01)


def test_the_floor_passes_through_a_call_that_reads_at_full_speed() -> None:
    exact = [dataclasses.replace(row, us=500.0, packed_gb_s=900.0) for row in rows()[1:2]]
    (floor, _) = plots.plots(exact)
    line = re.search(r'stroke-floor" points="([\d.]+),([\d.]+) ([\d.]+),([\d.]+)"', floor.svg)
    mark = re.search(r'cx="([\d.]+)" cy="([\d.]+)"', floor.svg)
    assert line is not None
    assert mark is not None
    x0, y0, x1, y1 = map(float, line.groups())
    x, y = map(float, mark.groups())
    assert y == pytest.approx(y0 + (y1 - y0) * (x - x0) / (x1 - x0), abs=0.3)


def test_one_implementation_alone_has_no_speed_up() -> None:
    page = run_page([row for row in rows() if row.impl == "fused"], ["run.json"])
    assert [plot.name.split("-gptoss")[0] for plot in page.plots] == ["floor", "gb-s"]
    published = rows(floor_us=None, packed_gb_s=None, read_gb_s=None, rel_l2=None, evidence="published")
    text = run_page(published, ["run.json"]).html()
    assert "Nothing ran, so there is no error" in text
    assert "stock published" in text


def test_rows_of_different_calls_make_no_pair() -> None:
    mixed = [row if row.impl == "fused" else dataclasses.replace(row, seed=1) for row in rows()]
    assert "10.0×" not in Reader(run_page(mixed, ["run.json"]).html()).text


def test_the_graph_of_a_call_before_and_after() -> None:
    e, k, i = 4, 64, 32
    w13, s13 = torch.zeros(e, 2 * i, k // 2).byte(), torch.full((e, 2 * i, k // 32), 120).byte()
    w2, s2 = torch.zeros(e, k, i // 2).byte(), torch.full((e, k, i // 32), 120).byte()

    def layer(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return call_mxfp4((x * 2, ids, weights), *(part.unbind() for part in (w13, s13, w2, s2))) + 1

    given = torch.zeros(2, k).bfloat16(), torch.zeros(2, 2).long(), torch.zeros(2, 2).bfloat16()
    sides = [graph.neighbourhood(graph.trace(layer, cap, *given)[0]) for cap in (0, 32)]
    assert sides[0] is not None
    assert sides[1] is not None
    labels = [{(group.label, group.count) for level in side.levels for group in level} for side in sides]
    assert ("hpu.mixture_of_experts.mxfp4_fused_weights", 1) in labels[0]
    assert ("getitem of unbind", 4 * e) in labels[0]
    assert ("unbind", 4) in labels[0]
    assert ("mxk.moe.default", 1) in labels[1]
    assert not any("unbind" in label for label, _ in labels[1])
    assert [side.consumers for side in sides] == [("add",), ("add",)]
    assert sides[0].num_nodes > sides[1].num_nodes
    assert sides[0].num_calls == sides[1].num_calls == 1
    ElementTree.fromstring(svg.standalone(graph.draw(sides[0], sides[1])))


def test_a_graph_without_a_call_has_no_drawing() -> None:
    assert graph.neighbourhood(graph.trace(torch.sin, 0, torch.zeros(1))[0]) is None


def test_pages_are_written_whole_or_not_at_all(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = Page("title", "subtitle")
    with pytest.raises(CallError, match="a folder; allowed: a file to write the page to"):
        write.write_page(page, tmp_path)
    with pytest.raises(CallError, match="in a folder that does not exist; allowed: an existing one"):
        write.write_page(page, tmp_path / "none" / "page.html")
    target = tmp_path / "page.html"
    target.write_text("<!doctype html>before")
    monkeypatch.setattr(pathlib.Path, "replace", lambda *_: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        write.write_page(page, target)
    assert target.read_text() == "<!doctype html>before"
    assert list(tmp_path.iterdir()) == [target]


def test_a_page_replaces_pages_alone(tmp_path: pathlib.Path) -> None:
    page = Page("title", "subtitle")
    run, device = tmp_path / "run.json", tmp_path / "pipe"
    run.write_text("{}")
    os.mkfifo(device)
    for path in (run, device):
        with pytest.raises(
            CallError, match="a file that is no page; allowed: a new file, or a page to replace"
        ):
            write.write_page(page, path)
    assert run.read_text() == "{}"
    assert device.is_fifo()
    link, target = tmp_path / "link.html", tmp_path / "page.html"
    target.touch()
    link.symlink_to(target)
    for _ in range(2):
        write.write_page(page, link)
        assert link.is_symlink()
        assert target.read_text() == page.html()


def test_plots_as_files(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write, "browser", lambda: None)
    two = [*plots.plots(rows()), *plots.plots(rows())]
    assert write.write_plots(two, tmp_path / "plots").startswith(
        f"6 plots in {tmp_path / 'plots'} (SVG; no PNG"
    )
    names = sorted(path.name for path in (tmp_path / "plots").iterdir())
    assert len(names) == 6
    assert "floor-gptoss-e32-2.svg" in names
    with pytest.raises(CallError, match="the page has no plots"):
        write.write_plots([], tmp_path)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["report", "RUN", "--html", "OUT"], "RUN: line 1 is no JSON, or cut off; allowed: lines that"),
        (["report", "/none", "--html", "OUT"], "/none: No such file or directory"),
        (["report", "/none", "--html", "/none/OUT"], "/none/OUT: in a folder that does not exist"),
        (["explain", "/none", "--html", "/none/OUT"], "/none/OUT: in a folder that does not exist"),
        (["explain", str(MODEL), "--plots", "OUT"], "explain: --plots without --html; allowed: both"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str], said: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out = tmp_path / "run.json", tmp_path / "out"
    run.write_text("no rows")
    named = [{"RUN": str(run), "OUT": str(out)}.get(argument, argument) for argument in arguments]
    assert main(named) == 2
    captured = capsys.readouterr()
    assert said.replace("RUN", str(run)) in captured.err
    assert captured.err.count("\n") == 1
    assert not out.exists()


@pytest.fixture(scope="module")
def model_page(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The page of the shipped model, made as a user makes it."""
    pytest.importorskip("transformers")
    path = tmp_path_factory.mktemp("page") / "page.html"
    assert main(["explain", str(MODEL), "--html", str(path)]) == 0
    return path


def test_the_page_of_the_shipped_model(model_page: pathlib.Path) -> None:
    reader = Reader(model_page.read_text())
    for words in (
        *(
            "6 of 6",
            "T = 64: 0 of 6 MoE layers fused",
            "model.layers.5.mlp.experts",
            "bias_mxfp4_fused_weights",
        ),
        *("96 × getitem", "mxk.moe.default", "tiny-gptoss", torch.__version__, mxk_compile.__version__),
    ):
        assert words in reader.text, words
    assert {value for name, value in reader.attributes if name == "id"} == {
        *("graph", "speed-up-tiny-gptoss-e16", "floor-tiny-gptoss-e16", "gb-s-tiny-gptoss-e16")
    }
    table = str(demo.rewrite_table(mxk_compile.load(MODEL), 64)).splitlines()
    reason = table[1].split("stock: ")[1]
    assert reason in reader.text
    errors = [float(value) for value in re.findall(r"\d\.\d\de-03", reader.text)]
    assert len(errors) >= 12
    assert min(errors) > 1.4e-3
    assert max(errors) < 8e-3


def chromium(tmp_path: pathlib.Path, page: pathlib.Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """A headless run of the browser on a page."""
    found = write.browser()
    if found is None:
        pytest.skip("no Chromium on PATH (Debian: apt-get install chromium)")
    command = write.browser_command(found, str(tmp_path / "profile"), "--enable-logging=stderr", *flags)
    done = subprocess.run([*command, page.as_uri()], capture_output=True, text=True, check=False, timeout=300)
    if done.returncode != 0:
        pytest.skip(f"Chromium does not run here: {done.stderr[-200:]}")
    return done


_PROBE = """
<script>addEventListener("load", () => {
  const boxes = [...document.querySelectorAll("figure svg")].map(e => e.getBoundingClientRect());
  const wide = [...document.body.querySelectorAll("*")].filter(e => !e.closest(".scroll") &&
    e.getBoundingClientRect().right > innerWidth + 1).map(e => e.tagName);
  const facts = {plots: boxes.filter(b => b.width > 300 && b.height > 60).length, wide,
    scrolls: document.documentElement.scrollWidth > innerWidth, height: document.body.scrollHeight,
    paper: getComputedStyle(document.body).backgroundColor, width: innerWidth,
    bars: [...document.querySelectorAll("rect.fused")].filter(e => e.getBBox().width > 0).length};
  document.documentElement.setAttribute("data-facts", JSON.stringify(facts));
})</script>
"""
"""Only in the test's copy of a page, whose policy allows it."""


@pytest.mark.parametrize("width", [500, 1200])
def test_the_page_in_a_real_browser(model_page: pathlib.Path, tmp_path: pathlib.Path, width: int) -> None:
    probed = tmp_path / "probed.html"
    text = model_page.read_text().replace("default-src", "script-src 'unsafe-inline'; default-src")
    probed.write_text(text.replace("</body>", f"{_PROBE}</body>"))
    done = chromium(
        tmp_path, probed, "--dump-dom", f"--window-size={width},900", "--virtual-time-budget=3000"
    )
    found = re.search(r'data-facts="([^"]+)"', done.stdout)
    assert found is not None, done.stderr[-500:]
    facts = json.loads(html.unescape(found.group(1)))
    assert facts["bars"] >= 4
    assert facts["height"] > 1500
    seen = {name: facts[name] for name in ("plots", "width", "scrolls", "wide")}
    assert seen == {"plots": 4, "width": width, "scrolls": False, "wide": []}
    assert "CONSOLE" not in done.stderr, done.stderr


def test_no_console_errors_and_png_plots(
    model_page: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write, "_SECONDS", 300)  # others may have the cores
    done = chromium(tmp_path, model_page, "--dump-dom")
    assert "CONSOLE" not in done.stderr
    assert done.stdout.count("</svg>") == 4
    said = write.write_plots(plots.plots(rows())[:1], tmp_path / "plots")
    assert said.endswith("(SVG and PNG)")
    (image,) = (tmp_path / "plots").glob("*.png")
    data = image.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert int.from_bytes(data[16:20], "big") == 2 * 721


def test_the_browser_is_looked_for_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}" if name == "google-chrome" else None)
    assert write.browser() == "/bin/google-chrome"
