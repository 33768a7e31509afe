"""Where those folders of the repository lie that an installed package has not: models/ and benchmarks/."""

from __future__ import annotations

from pathlib import Path


def find(parent: Path, working: Path) -> Path:
    """The package's own parent folder; of a package installed elsewhere, the working folder if that is a checkout."""
    is_installed = not (parent / "pyproject.toml").is_file()
    return working if is_installed and (working / "mxk_compile" / Path(__file__).name).is_file() else parent


CHECKOUT = find(Path(__file__).resolve().parents[1], Path())  # relative: a working folder may be gone
