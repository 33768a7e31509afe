"""The command `mxk quantize`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from mxk_compile.quantize.layouts import FORMATS


def add(commands: Any) -> None:
    """Adds the parser of the command to those of `mxk`."""
    quantize = commands.add_parser(
        "quantize", help="write a bf16 or fp16 MoE checkpoint with its experts packed to 4 bits"
    )
    quantize.add_argument(
        "source", type=Path, metavar="SRC", help="checkpoint folder: gpt-oss, Qwen3-MoE, Mixtral"
    )
    quantize.add_argument(
        "target", type=Path, metavar="DST", help="folder to make; an interrupted run goes on"
    )
    quantize.add_argument("--format", choices=FORMATS, required=True, help="int4-g32: not for gpt-oss")
    quantize.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> None:
    from tqdm import tqdm

    from mxk_compile.quantize.convert import quantize

    quantize(options.source, options.target, options.format, say=tqdm.write)  # above the progress bar
