"""`mxk build-tpc`: kernels, kernel library and op libraries of one variant, built and checked in the serving image.

Everything is made in a temporary folder beside the target, which is renamed at the end: a failure leaves nothing. The
steps of a dry run are the steps of a build, which prints its commands in place of running them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from mxk_compile.errors import KernelError
from mxk_compile.kernels.tpc import elf, gates, tables
from mxk_compile.kernels.tpc.libraries import KERNEL_LIBRARY, MANIFEST, OP_LIBRARIES, PLUGINS, Manifest
from mxk_compile.kernels.tpc.request import COMMAND, Request, extra_guid
from mxk_compile.kernels.tpc.signatures import VARIANT_LIMITS, Kernel, variant_kernels
from mxk_compile.kernels.tpc.toolchain import WITHOUT_BRIDGE, Toolchain
from mxk_compile.version import __version__

_HERE = Path(__file__).parent
_KEYS = {"lazy": ("HPU",), "pt2": ("HPU", "Meta")}
_CXX_FLAGS = ("-std=c++17", "-O1", "-fPIC", "-fvisibility=hidden")
# The C++ library would export its templates from the kernel library, beside the stock one's.
_GLUE_FLAGS = (
    "-Wall",
    "-fno-exceptions",
    "-fno-rtti",
    "-fno-threadsafe-statics",
    "-fno-asynchronous-unwind-tables",
)
# Without -fno-gnu-unique two op libraries would share the statics that keep them apart.
_OP_FLAGS = ("-w", "-fno-gnu-unique")


class Build:
    """The steps of one build, in `work`; with `say`, commands are said and not run."""

    def __init__(
        self, request: Request, tools: Toolchain, work: Path, say: Callable[[str], None] | None
    ) -> None:
        self.request, self.tools, self.work, self.say = request, tools, work, say
        self.kernels: tuple[Kernel, ...] = variant_kernels(request.variant)
        self.extra = {extra_guid(folder): folder for folder in request.extra}
        self.guids = [*(kernel.name for kernel in self.kernels), *self.extra]
        self.kinds = ["lazy"] + ["pt2"] * request.pt2
        assert tools.stock_library is not None
        self.stock = tools.stock_library

    def steps(self) -> Iterator[tuple[str, Callable[[], None]]]:
        """What is done and why, in order."""
        yield (
            f"compile the kernels {', '.join(self.guids)} for Gaudi 2; each object must have "
            f"{' and '.join(elf.CODE_SECTIONS)}",
            self.compile_kernels,
        )
        yield (
            f"link {KERNEL_LIBRARY}: the glue with the kernels inside, and a jump to the stock library for every other "
            "function that it exports",
            self.link_kernel_library,
        )
        for kind in self.kinds:
            yield (
                f"link {OP_LIBRARIES[kind]}: ops custom_op::<kernel> for "
                + ("lazy mode, legacy interface" if kind == "lazy" else "torch.compile, PT2 interface"),
                functools.partial(self.link_ops, kind),
            )
        yield (
            "gate 1: the kernel library lists the stock GUIDs unchanged, then exactly this variant's, and exports "
            "every function of the stock library",
            self.gate_kernels,
        )
        for kind in self.kinds:
            yield (
                f"gate 2: {OP_LIBRARIES[kind]} registers this variant's ops and no others, found by loading it against "
                "a recorder in the place of the bridge",
                functools.partial(self.gate_ops, kind),
            )
        yield (
            f"write {MANIFEST}: versions, sha256 of every file, code_sha256 of every kernel",
            self.write_manifest,
        )

    def compile_kernels(self) -> None:
        """<guid>.o of each kernel, in the folder of its source, named without folders."""
        self._copy(_HERE / "kernels", "kernels")
        for guid, folder in self.extra.items():
            self._copy(folder, f"extra_{guid}")
        flags = ["-march=gaudi2", "-O2", *(f"-D{define}" for define in self.request.defines)]
        for guid in self.guids:
            folder = self.work / (f"extra_{guid}" if guid in self.extra else "kernels")
            self._run([self.tools.tpc_clang, *flags, "-c", f"{guid}.c", "-o", f"{guid}.o"], folder)
            if self.say is None:
                shutil.move(folder / f"{guid}.o", self.work / f"{guid}.o")
                self._code_hash(guid)

    def link_kernel_library(self) -> None:
        """glue + embedded ELFs + stubs -> libmxk_tpc.so."""
        limits = VARIANT_LIMITS[self.request.variant]
        stock = self.stock
        symbols = self._run([self.tools.nm, "-D", "--defined-only", stock])
        self._write("kernel_table.inc", tables.glue_table(self.kernels, limits, list(self.extra), stock))
        self._write("embed.S", tables.embed_assembly([f"{guid}.o" for guid in self.guids]))
        self._write("stubs.S", tables.stub_assembly(tables.stub_functions(symbols)[0]))
        for guid, folder in self.extra.items():
            self._write(f"extra_{guid}.inc", (folder / "glue.inc").read_text())
        self._copy(_HERE / "glue", "glue")
        include = ["-I", ".", "-I", "glue", "-isystem", self.tools.kernel_headers]
        self._run(
            [self.tools.cxx, *_CXX_FLAGS, *_GLUE_FLAGS, *include, "-c", "glue/glue.cpp", "-o", "glue.o"]
        )
        for name in ("embed", "stubs"):
            self._run([self.tools.cxx, "-c", f"{name}.S", "-o", f"{name}.o"])
        link = [
            "-shared",
            "-s",
            "-Wl,-Bsymbolic",
            "-Wl,--as-needed",
            "-Wl,-z,defs",
            f"-Wl,-soname,{KERNEL_LIBRARY}",
        ]
        objects = ["glue.o", "embed.o", "stubs.o"]
        self._run([self.tools.cxx, *link, *objects, "-o", f"out/{KERNEL_LIBRARY}", "-ldl"])

    def link_ops(self, kind: str) -> None:
        """op_<kind>.cpp and the op.cpp of extra kernels -> libmxk_op_<kind>.so."""
        limits = VARIANT_LIMITS[self.request.variant]
        self._copy(_HERE / "oplib", "oplib")
        self._write("op_table.inc", tables.kernel_rows(self.kernels, limits))
        sources = {f"op_{kind}.o": f"oplib/op_{kind}.cpp"}
        sources |= {f"extra_{guid}/op.o": f"extra_{guid}/op.cpp" for guid in self.extra}
        for target, source in sources.items():
            self._compile_op(source, target)
        plugin = ["-L", self.tools.bridge_libraries, f"-l{PLUGINS[kind]}"]
        self._link_op(list(sources), f"out/{OP_LIBRARIES[kind]}", plugin)

    def gate_kernels(self) -> None:
        """Compares GUID lists and exported functions."""
        include = ["-isystem", self.tools.kernel_headers]
        self._run([self.tools.cxx, "-std=c++17", *include, "glue/list_guids.cpp", "-o", "list_guids", "-ldl"])
        libraries = [self.stock, f"out/{KERNEL_LIBRARY}"]
        stock_list, our_list = (self._run(["./list_guids", library]) for library in libraries)
        stock, ours = (self._run([self.tools.nm, "-D", "--defined-only", library]) for library in libraries)
        if self.say is None:
            gates.check_guids(stock_list, our_list, self.guids)
            gates.check_exports(stock, ours)

    def gate_ops(self, kind: str) -> None:
        """Loads the op library's objects with the recorder in a process of their own."""
        objects = [f"op_{kind}.o", *(f"extra_{guid}/op.o" for guid in self.extra)]
        self._compile_op(
            "oplib/recorder.cpp",
            f"recorder_{kind}.o",
            ["-O0", "-fvisibility=default"] + ["-DMXK_LAZY"] * (kind == "lazy"),
        )
        self._link_op([f"recorder_{kind}.o"], f"gate/lib{PLUGINS[kind]}.so", [])
        plugin = ["-L", "gate", f"-l{PLUGINS[kind]}", "-Wl,-rpath,$ORIGIN"]
        self._link_op(objects, f"gate/{OP_LIBRARIES[kind]}", plugin)
        names = [f"gate/{OP_LIBRARIES[kind]}", f"gate/lib{PLUGINS[kind]}.so"]
        listed = self._run(
            [*WITHOUT_BRIDGE, gates.LIST_OPS, *names], shown=[*WITHOUT_BRIDGE, "<list the ops of>", *names]
        )
        if self.say is None:
            gates.check_ops(listed, self.guids, OP_LIBRARIES[kind], _KEYS[kind])

    def write_manifest(self) -> None:
        """MANIFEST beside the libraries, as JSON."""
        if self.say is not None:
            return
        code = {guid: self._code_hash(guid) for guid in self.guids}
        # What a compiled recipe depends on: the kernels' code and how the glue sets them up.
        sources = [(_HERE / "glue" / name).read_bytes() for name in ("glue.cpp", "signature.h")]
        sources.append(tables.kernel_rows(self.kernels, VARIANT_LIMITS[self.request.variant]).encode())
        digest = hashlib.sha256(json.dumps(code).encode() + b"".join(sources)).hexdigest()
        manifest = Manifest(
            version=f"{self.request.variant}-{__version__}-{digest[:8]}",
            variant=self.request.variant,
            defines=list(self.request.defines),
            versions=self.tools.versions(),
            stock={"path": str(self.stock), "sha256": _sha256(self.stock)},
            kernels={
                guid: {"code_sha256": code[guid], "elf_sha256": _sha256(self.work / f"{guid}.o")}
                for guid in self.guids
            },
            files={path.name: _sha256(path) for path in sorted((self.work / "out").iterdir())},
        )
        self._write(f"out/{MANIFEST}", json.dumps(dataclasses.asdict(manifest), indent=1) + "\n")

    def _code_hash(self, guid: str) -> str:
        return elf.code_sha256((self.work / f"{guid}.o").read_bytes(), f"{COMMAND}: {guid}.o")

    def _compile_op(self, source: str, target: str, flags: Sequence[str] = ()) -> None:
        headers = Path(torch.__path__[0]) / "include"
        include = [
            f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
            "-I",
            ".",
            "-I",
            "glue",
        ]
        include += ["-I", "oplib", "-isystem", str(self.tools.bridge_headers)]
        for folder in (headers, headers / "torch/csrc/api/include"):
            include += ["-isystem", str(folder)]
        # Headers of the Gaudi software, for the op.cpp of an extra kernel.
        include += ["-isystem", str(self.tools.kernel_headers)]
        self._run([self.tools.cxx, *_CXX_FLAGS, *_OP_FLAGS, *flags, *include, "-c", source, "-o", target])

    def _link_op(self, objects: Sequence[str], target: str, libraries: Sequence[object]) -> None:
        torch_libraries = ["-L", Path(torch.__path__[0]) / "lib", "-lc10", "-ltorch_cpu"]
        flags = ["-shared", "-s", f"-Wl,-soname,{Path(target).name}"]
        self._run([self.tools.cxx, *flags, *objects, "-o", target, *libraries, *torch_libraries])

    def _run(
        self, command: Sequence[object], folder: Path | None = None, shown: Sequence[object] | None = None
    ) -> str:
        """Runs a command in the work folder and returns its stdout; raises KernelError with its first complaint."""
        words = [str(word) for word in command]
        if self.say is not None:
            self.say("    $ " + shlex.join(map(str, shown or words)))
            return ""
        folder, program = folder or self.work, Path(words[0]).name
        try:
            done = subprocess.run(
                words,
                cwd=folder,
                capture_output=True,
                text=True,
                errors="replace",
                check=False,
                stdin=subprocess.DEVNULL,
            )
        except OSError as error:
            raise _failed(words, f"{program} cannot be run: {error.strerror}") from error
        if done.returncode != 0:
            lines = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
            told = next((line for line in lines if "error" in line), (lines or ["it said nothing"])[-1])
            raise _failed(words, f"{program} failed ({done.returncode}): {told}")
        if "-o" in words and not (folder / (made := words[words.index("-o") + 1])).is_file():
            raise _failed(words, f"{program} succeeded and did not write {made}")
        return done.stdout

    def _copy(self, folder: Path, name: str) -> None:
        if self.say is None:
            shutil.copytree(
                folder, self.work / name, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True
            )

    def _write(self, name: str, text: str) -> None:
        if self.say is None:
            (self.work / name).write_text(text)


def _failed(words: Sequence[str], given: str) -> KernelError:
    return KernelError(COMMAND, given, "a command that succeeds", f"run {shlex.join(words)[:200]}")


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def build(request: Request, say: Callable[[str], None], dry_run: bool = False) -> None:
    """Builds `request.target`, or explains how it would be built.

    Args:
        request: what to build.
        say: takes each line of the report.
        dry_run: says each step and its commands; needs none of the tools and writes nothing.

    Raises:
        KernelError: something is missing or wrong, on one line; the target is as it was.
    """
    request.check()
    tools = Toolchain.find(request.pt2)
    if dry_run:
        for name, value in vars(tools).items():
            say(f"{name:<17} {value if value is not None else 'not found here'}")
        _walk(Build(request, tools.with_names(), Path("<work>"), say), say)
        say(f"then rename the folder to {request.target}; a failure in any step leaves nothing there")
        return
    request.check_target()
    tools.require_all()
    target = request.target.resolve()
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as folder:
        work = Path(folder)
        for name in ("out", "gate"):
            (work / name).mkdir()
        _walk(Build(request, tools, work, None), say)
        _install(work / "out", target, work / "replaced")
    say(f"built {target}: {', '.join(sorted(path.name for path in target.iterdir()))}")
    table = "MXK_FID_INT4" if request.variant.endswith("int4") else "MXK_FID_E2M1"
    if not any(define.split("=")[0] == table for define in request.defines):
        say(
            f"NOT FOR A DEVICE YET: the kernels look codes up in a table whose number is a placeholder; give it with "
            f"--define {table}=<number> (docs/gaudi.md)"
        )


def _walk(steps: Build, say: Callable[[str], None]) -> None:
    for number, (text, step) in enumerate(steps.steps(), 1):
        say(f"{number}. {text}")
        step()


def _install(new: Path, target: Path, replaced: Path) -> None:
    """Renames `new` to `target`; an earlier build there comes back if that fails."""
    try:
        if target.exists():
            target.rename(replaced)
        new.rename(target)
    except BaseException:  # an interruption too
        if not target.exists():
            with contextlib.suppress(OSError):
                replaced.rename(target)
        raise
