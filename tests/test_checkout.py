"""The repository's folders, from a package that was installed out of it."""

from __future__ import annotations

import argparse
import pathlib
import subprocess

from mxk_compile.bench import command
from mxk_compile.checkout import find

ROOT = pathlib.Path(__file__).parent.parent


def test_a_package_that_was_installed_takes_the_checkout_that_it_is_called_in(tmp_path: pathlib.Path) -> None:
    assert find(ROOT, tmp_path) == ROOT
    assert find(tmp_path, ROOT) == ROOT
    # Neither: what is missing is named where an installed package would have it.
    assert find(tmp_path / "installed", tmp_path) == tmp_path / "installed"


def test_a_process_of_bench_runs_this_package_whatever_lies_in_the_working_folder(
    tmp_path: pathlib.Path,
) -> None:
    (tmp_path / "mxk_compile").mkdir()
    (tmp_path / "mxk_compile" / "__init__.py").write_text("raise SystemExit('the sources, never built')\n")
    options = argparse.Namespace(
        device="cpu", routing=["hot"], variant=None, e_local=None, tokens=None, suite=None, quick=True
    )
    start = command._child(options, "fused")
    start[start.index("bench") :] = ["--version"]
    done = subprocess.run(start, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("mxk")
