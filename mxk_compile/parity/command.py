"""The command `mxk parity`: its options, what may go together, and which part of this package answers."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from mxk_compile.errors import CallError, KernelError
from mxk_compile.parity.cases import ROWS
from mxk_compile.settings import whole_number

DEVICES = ("cpu", "cuda", "tpc-emulated", "hpu")
_EXIT_FAILED = 1  # a check that ran and did not hold


def add(commands: Any) -> None:
    """Adds the parser of the command to those of `mxk`."""
    parity = commands.add_parser("parity", help="check kernels of a device against fp32, beside the stock op")
    parity.add_argument(
        "--device",
        choices=DEVICES,
        default="cpu",
        help="kernels of this machine (cpu, cuda), or Gaudi kernels: their sources run on this CPU (tpc-emulated), "
        "a build on a card (hpu); default: cpu",
    )
    parity.add_argument("--lib", type=Path, metavar="DIR", help="with hpu: folder of the build")
    parity.add_argument(
        "--variant",
        choices=["all", *ROWS],
        default="all",
        help="model row, or build int4, wna16; default: all",
    )
    parity.add_argument(
        "--checkpoint", type=Path, metavar="DIR", help="real weights of one --variant, instead of random ones"
    )
    parity.add_argument(
        "--layer", type=whole_number, metavar="N", help="with --checkpoint: which layer; default: the middle"
    )
    parity.add_argument(
        "--quick", action="store_true", help="few calls of each routing: fewest and most tokens"
    )
    parity.add_argument(
        "--model",
        action="store_true",
        help="with tpc-emulated: modelled microseconds a call instead of the checks",
    )
    parity.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Runs the checks that were asked for; returns the exit code."""
    names = list(ROWS) if options.variant == "all" else [options.variant]
    _check(options)
    if options.model:
        from mxk_compile.parity.model import print_model

        print_model(names)
        return 0
    sources = {}
    if options.checkpoint is not None:
        from mxk_compile.parity.checkpoint import checkpoint_source

        sources[names[0]] = checkpoint_source(options.checkpoint, ROWS[names[0]], options.layer)
    if options.device == "hpu":
        from mxk_compile.parity.device import run_on_device

        passed = run_on_device(options.lib, names, sources, quick=options.quick)
    elif options.device == "tpc-emulated":
        from mxk_compile.parity.emulated import run_parity

        passed = run_parity(names, sources, quick=options.quick)
    else:
        from mxk_compile.parity.host import run_on_host

        passed = run_on_host(options.device, names, sources, quick=options.quick)
    return 0 if passed else _EXIT_FAILED


def _check(options: argparse.Namespace) -> None:
    """Raises CallError for options that contradict each other."""
    device = f"--device {options.device}"
    if options.model and options.device != "tpc-emulated":
        given, allowed = f"--model with {device}", "--model with --device tpc-emulated"
        raise CallError(
            "mxk parity", given, allowed, "leave --model out: it is counted by the emulator, not measured"
        )
    if (options.device == "hpu") != (options.lib is not None):
        given = f"{device} {'without' if options.lib is None else 'with'} --lib"
        allowed = "--device hpu with --lib DIR, the others without"
        raise CallError("mxk parity", given, allowed, "name the folder that `mxk build-tpc` made")
    if options.checkpoint is not None and (options.variant == "all" or options.model):
        given = f"--checkpoint with {'--model' if options.model else '--variant all'}"
        raise CallError(
            "mxk parity", given, "--checkpoint with one --variant", "name the row that the model is"
        )
    if options.layer is not None and options.checkpoint is None:
        raise CallError("mxk parity", "--layer without --checkpoint", "both or none", "name the checkpoint")
    if options.device == "cuda" and options.variant != "all":
        import torch

        if not torch.cuda.is_available():
            given, allowed = "there is no CUDA device", "a Hopper GPU and cuda-bindings"
            raise KernelError(
                "mxk parity", given, allowed, "run it where the model runs; --device cpu runs anywhere"
            )
