"""The command `mxk`. Errors are one line on stderr with exit code 2, or 1 where `mxk gaudi` changed nothing.

`mxk parity` exits 1 where a check fails.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import mxk_compile
from mxk_compile.bench import command as bench_command
from mxk_compile.checkout import CHECKOUT
from mxk_compile.errors import CallError, CheckpointError, InstallError, KernelError, MxkError
from mxk_compile.kernels.tpc.signatures import VARIANT_KERNELS
from mxk_compile.parity import command as parity
from mxk_compile.quantize import command as quantize
from mxk_compile.report import command as report_command
from mxk_compile.settings import whole_number
from mxk_compile.variants import VARIANTS

SHIPPED_MODEL = CHECKOUT / "models" / "tiny-gptoss"
"""The trained model of the repository; there in a checkout, not in an installed wheel."""
_MAX_COUNT = 1_000_000  # of tokens
_DEFAULT_PROMPT = "And it came to pass"
_EXIT_UNCHANGED = 1
_EXIT_ERROR = 2
_EXIT_INTERRUPTED, _EXIT_PIPE = 130, 141  # 128 + signal, as shells report them


class _Parser(argparse.ArgumentParser):
    """Says what is wrong on one line, where argparse prints the usage first."""

    def error(self, message: str) -> NoReturn:
        self.exit(_EXIT_ERROR, f"{self.prog}: error: {message}; see {self.prog} --help\n")


def main(arguments: Sequence[str] | None = None, *, refused: Sequence[str] = ()) -> int:
    """Runs one command line; returns the exit code. `refused`: wrong settings that `mxk doctor` is to report."""
    if sys.stdout is None:
        return _fail("stdout is closed; open it, or send it to a file")
    try:
        # A character that the encoding of stdout lacks is written as its escape.
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")
        try:
            options = _parser().parse_args(arguments)
            options.refused = refused
            code = options.run(options)
        finally:
            sys.stdout.flush()
    except MxkError as error:
        return _fail(str(error), _EXIT_UNCHANGED if isinstance(error, InstallError) else _EXIT_ERROR)
    except KeyboardInterrupt:
        return _EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader is gone: `mxk generate | head`
        _drop_stdout()
        return _EXIT_PIPE
    except OSError as error:
        _drop_stdout()
        return _fail(str(error))
    except (MemoryError, RuntimeError) as error:
        # torch reports memory that it does not get as a plain RuntimeError.
        if isinstance(error, RuntimeError) and "allocate memory" not in str(error):
            raise
        return _fail(f"not enough memory ({' '.join(str(error).split())}); ask for fewer tokens")
    return int(code or 0)


def _fail(message: str, code: int = _EXIT_ERROR) -> int:
    print(f"mxk: error: {message.removeprefix('mxk ')}", file=sys.stderr)
    return code


def _drop_stdout() -> None:
    """What stdout does not take goes nowhere: Python would complain again when it flushes at exit."""
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    with contextlib.suppress(OSError):  # no file: a test's stdout
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="mxk", description="Fused 4-bit mixture-of-experts layers for torch.compile.")
    parser.add_argument("--version", action="version", version=f"mxk {mxk_compile.__version__}")
    commands = parser.add_subparsers(dest="command", required=True)

    demo = commands.add_parser(
        "demo", help="generate with the stock op and with the mxk backend, and compare"
    )
    demo.add_argument(
        "--model", type=Path, help="checkpoint directory (default: the small model of the repository)"
    )
    demo.add_argument("--prompt", default=_DEFAULT_PROMPT)
    demo.add_argument("--new-tokens", type=_count, default=64, metavar="N")
    demo.add_argument("--profile", action="store_true", help="also show where a decode step spends its time")
    demo.set_defaults(run=_demo)

    generate = commands.add_parser(
        "generate", help="print the continuation of a prompt, greedily, token by token"
    )
    generate.add_argument("--model", type=Path, required=True, help="checkpoint directory")
    generate.add_argument("--prompt", required=True)
    generate.add_argument("--max-new-tokens", type=_count, default=128, metavar="N")
    generate.add_argument("--stock", action="store_true", help="without the mxk backend, not compiled")
    generate.set_defaults(run=_generate)

    explain = commands.add_parser("explain", help="show what becomes of each MoE layer")
    explain.add_argument(
        "model",
        nargs="?",
        type=Path,
        help="checkpoint directory (default: the small model of the repository)",
    )
    explain.add_argument(
        "--tokens",
        type=_counts,
        default=[1, 32, 64],
        metavar="T,...",
        help="tokens a call to show; default: 1,32,64",
    )
    explain.add_argument(
        "--html", type=Path, metavar="OUT", help="write a page instead: layers, graph, speed and error here"
    )
    report_command.add_plots(explain)
    explain.set_defaults(run=_explain)

    bench_command.add(commands, _count, _counts)
    report_command.add(commands)

    tune = commands.add_parser("tune", help="CUDA: time kernel schedules for a layer, and keep the fastest")
    tune.add_argument(
        "--variant",
        choices=[name for name, row in VARIANTS.items() if row.weight_format == "mxfp4"],
        default="gptoss",
        help="model row; default: gptoss",
    )
    tune.add_argument(
        "--experts", type=_count, metavar="E", help="experts on this device, if not the row's number"
    )
    tune.add_argument(
        "--tokens", type=_counts, default=[1, 8, 32], metavar="T,...", help="tokens a call; default: 1,8,32"
    )
    tune.set_defaults(run=_tune)

    build = commands.add_parser(
        "build-tpc", help="build the Gaudi 2 kernel and op libraries of a model family, in the serving image"
    )
    build.add_argument("--variant", choices=list(VARIANT_KERNELS), default="gptoss")
    build.add_argument(
        "--extra-kernel",
        type=Path,
        action="append",
        default=[],
        metavar="DIR",
        help="one more kernel for the same libraries: <guid>.c, glue.inc, op.cpp",
    )
    build.add_argument("--pt2", action="store_true", help="also build the op library for torch.compile")
    build.add_argument(
        "--define",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="for the kernels' preprocessor, as MXK_FID_E2M1=<number of the device's lookup table>",
    )
    build.add_argument("--dry-run", action="store_true", help="say each step, build nothing")
    build.add_argument("target", type=Path, metavar="OUT", help="folder of the build, made or replaced")
    build.set_defaults(run=_build_tpc)

    gaudi = commands.add_parser("gaudi", help="lazy mode: write or take out the hooks in vllm-gaudi")
    gaudi.add_argument("action", choices=["install", "uninstall"])
    gaudi.add_argument("folder", type=Path, metavar="DIR", help="vllm-gaudi checkout, or its package")
    gaudi.set_defaults(run=_gaudi)

    parity.add(commands)
    quantize.add(commands)

    doctor = commands.add_parser(
        "doctor", help="check this installation: one line a check, and how to mend it"
    )
    doctor.add_argument("--json", action="store_true", help="the same as one JSON object")
    doctor.set_defaults(run=_doctor)
    commands.metavar = f"{{{','.join(commands.choices)}}}"  # for the message that one is required
    return parser


def _count(text: str) -> int:
    try:
        return whole_number(text, 1, _MAX_COUNT)
    except ValueError:
        allowed = f"a number of at least 1 and at most {_MAX_COUNT}"
        raise argparse.ArgumentTypeError(f"{text!r} is not {allowed}") from None


def _counts(text: str) -> list[int]:
    return [_count(part) for part in text.split(",")]


def _demo(options: argparse.Namespace) -> None:
    from mxk_compile.demo import run_demo

    run_demo(options.model or _shipped_model(), options.prompt, options.new_tokens, options.profile)


def _shipped_model() -> Path:
    if not SHIPPED_MODEL.is_dir():
        given = "the small model is not there"
        raise CheckpointError(
            str(SHIPPED_MODEL), given, "a checkout of the repository", "run in one, or name a model"
        )
    return SHIPPED_MODEL


def _generate(options: argparse.Namespace) -> None:
    from mxk_compile import demo
    from mxk_compile.integrations import transformers as models

    model = models.load(options.model)
    tokenizer = models.load_tokenizer(options.model)
    prompt = demo.prompt_tokens(tokenizer, options.prompt)
    forward = None if options.stock else demo.compiled(model, "mxk")
    session = models.Session(model, len(prompt) + options.max_new_tokens, forward)
    tokens = (
        token
        for token, _ in models.greedy(session, prompt, options.max_new_tokens, models.stop_tokens(model))
    )
    for piece in _pieces(tokenizer, tokens):
        print(piece, end="", flush=True)
    print()


def _pieces(tokenizer: Any, tokens: Iterator[int]) -> Iterator[str]:
    """Text as soon as it is complete: a character may be split over several tokens."""
    pending: list[int] = []
    for token in tokens:
        pending.append(token)
        text = tokenizer.decode(pending)
        # No character has more than 4 bytes.
        if not text.endswith("\N{REPLACEMENT CHARACTER}") or len(pending) > 4:
            yield text
            pending = []
    if pending:
        yield tokenizer.decode(pending)


def _explain(options: argparse.Namespace) -> None:
    from mxk_compile.demo import rewrite_table
    from mxk_compile.integrations.transformers import load

    options.model = options.model or _shipped_model()
    if options.plots is not None and options.html is None:
        raise CallError("mxk explain", "--plots without --html", "both", "name the page's file too")
    if options.html is not None:
        report_command.explain(options)
        return
    model = load(options.model)
    for num_tokens in options.tokens:
        print(f"T = {num_tokens}", rewrite_table(model, num_tokens), "", sep="\n", flush=True)


def _doctor(options: argparse.Namespace) -> int:
    from mxk_compile.doctor import run

    return run(options.refused, options.json)


def _gaudi(options: argparse.Namespace) -> None:
    from mxk_compile.lazy import install

    run = install.install if options.action == "install" else install.uninstall
    print(run(options.folder))


def _build_tpc(options: argparse.Namespace) -> None:
    from mxk_compile.kernels.tpc.build import build
    from mxk_compile.kernels.tpc.request import Request

    request = Request(
        options.variant, options.target, tuple(options.extra_kernel), options.pt2, tuple(options.define)
    )
    build(request, lambda line: print(line, flush=True), options.dry_run)


def _tune(options: argparse.Namespace) -> None:
    import torch

    from mxk_compile.kernels.cuda import unavailable
    from mxk_compile.kernels.cuda.tune import tune

    reason = unavailable()
    if reason is not None:
        raise KernelError("mxk tune", reason, "a Hopper GPU and cuda-bindings", "run it where the model runs")
    variant = VARIANTS[options.variant]
    experts = options.experts or variant.num_experts
    with torch.inference_mode():
        for num_tokens in options.tokens:
            print(f"{variant.name}, E = {experts}, T = {num_tokens}", flush=True)
            print(f"kept: {tune(variant, experts, num_tokens)}", flush=True)


if __name__ == "__main__":  # the package was imported before: too late to say on one line why that failed
    sys.exit("mxk: error: mxk_compile.cli is no program; run mxk, or python -m mxk_command")
