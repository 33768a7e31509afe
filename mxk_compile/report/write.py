"""Pages and plots as files; PNG through a headless browser, where there is one."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from mxk_compile.errors import CallError
from mxk_compile.report import svg
from mxk_compile.report.page import Page
from mxk_compile.report.plots import Plot

_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "msedge")
_PAGE_START = b"<!doctype html"
_SECONDS = 60
_SCALE = 2  # pixels of a PNG for one of the drawing


def browser() -> str | None:
    """A Chromium on this machine's PATH."""
    return next(filter(None, map(shutil.which, _BROWSERS)), None)


def browser_command(path: str, profile: str, *flags: str) -> list[str]:
    """A command of a headless run that looks nothing up and leaves nothing behind but `profile`."""
    kept = (
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--hide-scrollbars",
    )
    quiet = ("--disable-background-networking", "--disable-component-update", "--disable-sync")
    return [path, *kept, *quiet, f"--user-data-dir={profile}", *flags]


def target_of(path: Path) -> Path:
    """The file that a page at `path` becomes; CallError where none can be. Asked before the work that a page is."""
    if path.is_dir():
        raise CallError(str(path), "a folder", "a file to write the page to", "name a file, as page.html")
    target = path.resolve()  # a link stays one
    if not target.parent.is_dir():
        raise CallError(
            str(path), "in a folder that does not exist", "an existing one", "make it, or name another"
        )
    if target.exists() and not _is_page(target):
        allowed = "a new file, or a page to replace"
        raise CallError(str(path), "a file that is no page", allowed, "name another, as page.html")
    return target


def write_page(page: Page, path: Path) -> None:
    """Writes the page, whole or not at all; raises OSError where that cannot be, CallError as `target_of`."""
    _write(target_of(path), page.html().encode())


def _is_page(path: Path) -> bool:
    """Whether a file may be replaced by a page: rows of a run, weights and devices are not."""
    if not path.is_file():
        return False
    with open(path, "rb") as file:
        return file.read(len(_PAGE_START)).lower() in (b"", _PAGE_START)


def write_plots(plots: Sequence[Plot], folder: Path) -> str:
    """Each plot as SVG, and as PNG where a browser is found; what was written, in a line."""
    if not plots:
        raise CallError("--plots", "the page has no plots", "rows with times", "give other rows")
    folder.mkdir(parents=True, exist_ok=True)
    found = browser()
    names: dict[str, int] = {}
    for plot in plots:
        again = names[plot.name] = names.get(plot.name, 0) + 1
        path = folder / f"{plot.name}{f'-{again}' if again > 1 else ''}.svg"
        _write(path, svg.standalone(plot.svg).encode())
        if found is not None:
            _render(found, path)
    kind = "SVG and PNG" if found else "SVG; no PNG, since no Chromium was found"
    return f"{len(plots)} plots in {folder} ({kind})"


def _write(path: Path, data: bytes) -> None:
    new = path.with_name(f".{path.name}.new")
    try:
        new.write_bytes(data)
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)


def _render(program: str, path: Path) -> None:
    size = re.search(r'width="([\d.]+)" height="([\d.]+)"', path.read_text(encoding="utf-8"))
    assert size is not None  # svg.drawing writes it
    width, height = (int(float(value)) + 1 for value in size.groups())
    with tempfile.TemporaryDirectory() as folder:
        image = Path(folder) / "plot.png"
        flags = (
            f"--screenshot={image}",
            f"--window-size={width},{height}",
            f"--force-device-scale-factor={_SCALE}",
        )
        command = browser_command(program, f"{folder}/profile", *flags, path.resolve().as_uri())
        try:
            subprocess.run(command, capture_output=True, timeout=_SECONDS, check=True)
            data = image.read_bytes()
        except (OSError, subprocess.SubprocessError) as error:
            given = f"{program} made no picture ({type(error).__name__})"
            raise CallError("--plots", given, "a Chromium that runs", "take the SVG files") from error
    _write(path.with_suffix(".png"), data)
