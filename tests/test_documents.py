"""Command blocks of the documents: each ```bash block runs, as it stands there, in a folder with the shipped model.

Other fences are not run: `sh` needs what a test has not (make's own environments, a GPU, a server), `text` is output.
"""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys

import pytest

pytest.importorskip("transformers")

ROOT = pathlib.Path(__file__).parent.parent
_BLOCK = re.compile(r"^```bash\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LIMIT_SECONDS = 600
BLOCKS = [
    pytest.param(block, id=f"{path.relative_to(ROOT)}:{number}")
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    for number, block in enumerate(_BLOCK.findall(path.read_text()), 1)
]


@pytest.mark.parametrize("block", BLOCKS)
def test_a_documented_block_runs(block: str, tmp_path: pathlib.Path) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    # The command of this checkout, and the interpreter that runs the tests, whatever is installed.
    for name, arguments in (("mxk", [str(ROOT / "mxk_command.py")]), ("python", [])):
        line = " ".join(f'"{word}"' for word in (sys.executable, *arguments))
        (programs / name).write_text(f'#!/bin/sh\nexec {line} "$@"\n')
        (programs / name).chmod(0o755)
    (tmp_path / "models").symlink_to(ROOT / "models")
    environment = {
        **os.environ,
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=_LIMIT_SECONDS,
        check=False,
    )
    assert done.returncode == 0, f"{block}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"


def test_the_blocks_are_there() -> None:
    documents = {str(param.id).partition(":")[0] for param in BLOCKS}
    assert {"README.md", "docs/verify.md", "docs/quantize.md"} <= documents
    commands = "\n".join(str(param.values[0]) for param in BLOCKS)
    for name in ("doctor", "parity", "explain", "quantize"):
        assert f"mxk {name} " in commands
