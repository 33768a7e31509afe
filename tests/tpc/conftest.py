"""Stand-ins for what a serving image has, made once a session: compilers, headers, libraries, the bridge."""

from __future__ import annotations

import dataclasses
import functools
import io
import os
import pathlib
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout

import pytest
import torch

import mxk_compile.kernels.tpc.toolchain as toolchain
from mxk_compile.cli import main

STAND_INS = pathlib.Path(__file__).parent / "stand_ins"
SOURCES = pathlib.Path(toolchain.__file__).parent
CXX = ("g++", "-std=c++17", "-O0", "-fPIC")


def run(*command: object, **options: object) -> str:
    """stdout of a command that must succeed."""
    done = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, check=False, **options
    )  # type: ignore[call-overload]
    assert done.returncode == 0, done.stderr
    return str(done.stdout)


@dataclasses.dataclass(frozen=True)
class Image:
    """The stand-in image: `root` holds what is below / there, `site` the bridge's package, `programs` tpc-clang."""

    root: pathlib.Path
    site: pathlib.Path
    programs: pathlib.Path
    stock: pathlib.Path
    graph_compiler: pathlib.Path

    def enter(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Makes this process, and those it starts, find the image's parts."""
        monkeypatch.setattr(toolchain, "SYSTEM", self.root)
        monkeypatch.setenv("PATH", f"{self.programs}{os.pathsep}{os.environ['PATH']}")
        monkeypatch.syspath_prepend(self.site)

    def compile_stock(self, second_guid: str) -> None:
        """Makes the stock library anew, with another second GUID."""
        compile_stock(self.stock, second_guid)


def compile_stock(target: pathlib.Path, second_guid: str = "cast_bf16_to_f32") -> pathlib.Path:
    """A stock kernel library (stand_ins/stock.cpp) whose second GUID is the given one."""
    target.parent.mkdir(parents=True, exist_ok=True)
    flags = ("-shared", "-fvisibility=hidden", f'-DSTOCK_SECOND="{second_guid}"', "-I", SOURCES / "glue/api")
    run(*CXX, *flags, STAND_INS / "stock.cpp", "-o", target)
    return target


def compile_plugin(target: pathlib.Path, *flags: str) -> pathlib.Path:
    """The bridge's plugin: the recorder."""
    include = [word for folder in (SOURCES / "oplib/api", SOURCES / "glue") for word in ("-I", folder)]
    headers = ["-isystem", pathlib.Path(torch.__path__[0]) / "include"]
    libraries = ["-L", pathlib.Path(torch.__path__[0]) / "lib", "-lc10", "-ltorch_cpu"]
    source = SOURCES / "oplib/recorder.cpp"
    run(
        *CXX,
        "-w",
        "-shared",
        f"-Wl,-soname,{target.name}",
        *flags,
        *include,
        *headers,
        source,
        "-o",
        target,
        *libraries,
    )
    return target


@pytest.fixture(scope="session")
def image(tmp_path_factory: pytest.TempPathFactory) -> Image:
    """A serving image of stand-ins."""
    if shutil.which("g++") is None:
        pytest.skip("no g++")
    folder = tmp_path_factory.mktemp("image")
    root, site, programs = folder / "root", folder / "site", folder / "bin"
    stock = compile_stock(root / "usr/lib/habanalabs/libtpc_kernels.so")
    (root / "usr/include").mkdir(parents=True)
    shutil.copytree(SOURCES / "glue/api", root / "usr/include/habanalabs")

    bridge = site / "habana_frameworks/torch"
    (bridge / "lib").mkdir(parents=True)
    shutil.copytree(SOURCES / "oplib/api", bridge / "include")
    compile_plugin(bridge / "lib/libhabana_pytorch_plugin.so", "-DMXK_LAZY")
    compile_plugin(bridge / "lib/libhabana_pytorch2_plugin.so")

    programs.mkdir()
    clang = programs / "tpc-clang"
    command = shlex.join((sys.executable, str(STAND_INS / "tpc_clang.py")))
    clang.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
    clang.chmod(0o755)
    graph_compiler = folder / "graph_compiler"
    run(*CXX, "-I", SOURCES / "glue/api", STAND_INS / "graph_compiler.cpp", "-o", graph_compiler, "-ldl")
    return Image(root, site, programs, stock, graph_compiler)


@dataclasses.dataclass(frozen=True)
class Built:
    """A build of `mxk build-tpc`: its folder, and what the command said."""

    folder: pathlib.Path
    said: str


def run_cli(image: Image, *arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of `mxk` with these arguments, in this process, inside the image."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        image.enter(patch)
        try:
            code = main(list(arguments))
        except SystemExit as error:
            code = int(str(error.code))
    return code, out.getvalue(), err.getvalue()


@pytest.fixture
def mxk(image: Image) -> Callable[..., tuple[int, str, str]]:
    """run_cli in the image."""
    return functools.partial(run_cli, image)


@pytest.fixture(scope="session")
def muse(image: Image, tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Variant muse with both op libraries."""
    folder = tmp_path_factory.mktemp("muse") / "lib"
    code, said, error = run_cli(image, "build-tpc", "--variant", "muse", "--pt2", str(folder))
    assert code == 0, error
    return Built(folder, said)


@pytest.fixture(scope="session")
def gptoss(image: Image, tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Variant gptoss with one extra kernel."""
    folder = tmp_path_factory.mktemp("gptoss") / "lib"
    extra = str(STAND_INS / "extra")
    define = "MXK_FID_E2M1=123"
    code, said, error = run_cli(image, "build-tpc", "--extra-kernel", extra, "--define", define, str(folder))
    assert code == 0, error
    return Built(folder, said)
