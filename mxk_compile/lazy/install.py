"""`mxk gaudi install DIR` and `uninstall DIR`: two hooks in vllm-gaudi, all or nothing, undone byte for byte.

Every anchor, a line of vllm-gaudi that the hooks and the replaced call rely on, must be there, in order; else nothing
is written. They are lines of vllm-gaudi 0.24 to 0.26, and of its main branch of August 2026.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import os
import tempfile
import textwrap
from pathlib import Path

from mxk_compile.errors import InstallError

_BEGIN, _END = b"# mxk-compile: begin", b"# mxk-compile: end"

_START = """\
# mxk-compile: begin, written by `mxk gaudi install`, removed by `mxk gaudi uninstall`
from os import environ as _mxk_environ

if _mxk_environ.get("MXFP4_TPC_MOE", "0") not in ("", "0"):
    # Before the first device op: the graph compiler reads GC_KERNEL_PATH when the device opens.
    try:
        from mxk_compile.lazy import start as _mxk_start
    except Exception as _mxk_error:
        print(f"MXFP4 TPC MoE stays off, mxk_compile is not usable: {_mxk_error}")
    else:
        _mxk_start(_mxk_environ)
# mxk-compile: end
"""
_ATTACH = """\
# mxk-compile: begin, written by `mxk gaudi install`, removed by `mxk gaudi uninstall`
import sys as _mxk_sys

if "mxk_compile.lazy" in _mxk_sys.modules:
    _mxk_sys.modules["mxk_compile.lazy"].attach(layer)
# mxk-compile: end
"""


@dataclasses.dataclass(frozen=True)
class Target:
    """One file of vllm-gaudi.

    Attributes:
        path: below the package.
        anchors: how lines begin that must be there, in this order.
        hook: what is inserted, indented as the anchor beside it; None for a file that is only relied on.
        before: the anchor that the hook stands before, or None: it stands after `after`.
        after: the anchor that the hook stands after.
    """

    path: str
    anchors: tuple[str, ...]
    hook: str | None = None
    before: str | None = None
    after: str | None = None


TARGETS = (
    Target(
        "__init__.py",
        ("import os", "def register():", 'return "vllm_gaudi.platform.HpuPlatform"', "def register_ops():"),
        hook=_START,
        before="import os",
    ),
    Target(
        "ops/hpu_mxfp4.py",
        (
            "class HPUGptOssMxfp4MoEMethod(GptOssMxfp4MoEMethod):",
            "def process_weights_after_loading(self, layer) -> None:",
            "layer.moe_op = VllmMixtureOfExpertsOpMXFP4(",
            "layer.moe_op._cache_weight_lists()",
            "output = layer.moe_op(",
        ),
        hook=_ATTACH,
        after="layer.moe_op._cache_weight_lists()",
    ),
    Target(
        "extension/ops.py",
        (
            "class VllmMixtureOfExpertsOpMXFP4(VllmMixtureOfExpertsOpBase):",
            "def forward(self, hidden_states, expert_routing_table, router_weights, permuted_weights=True,",
        ),
    ),
)


def install(folder: Path) -> str:
    """Writes the hooks; returns what was done, in one line. A second run changes nothing.

    Args:
        folder: a vllm-gaudi checkout, or the installed package `vllm_gaudi`.

    Raises:
        InstallError: no vllm-gaudi there, anchors missing (all of them named), or a file that cannot be written.
    """
    package = _package(folder)
    missing: list[str] = []
    changes: dict[str, bytes] = {}
    for target in TARGETS:
        path = package / target.path
        try:
            found = path.read_bytes()
        except OSError:
            missing += [f"{target.path}: {anchor}" for anchor in target.anchors]
            continue
        clean = _without_hook(path, found)
        lines = clean.splitlines(keepends=True)
        places = _places(lines, target.anchors, _statements(clean))
        missing += [f"{target.path}: {anchor}" for anchor, place in places.items() if place is None]
        if target.hook is None or None in places.values():
            continue
        place = places[target.before] if target.before is not None else places[target.after or ""]
        assert place is not None
        newline = b"\r\n" if lines[place].endswith(b"\r\n") else b"\n"
        indent = lines[place][: -len(lines[place].lstrip())].decode()
        hook = textwrap.indent(target.hook, indent).encode().replace(b"\n", newline)
        at = place if target.before is not None else place + 1
        hooked = b"".join([*lines[:at], hook, *lines[at:]])
        if hooked != found:
            changes[target.path] = hooked
    if missing:
        count = sum(len(target.anchors) for target in TARGETS)
        raise InstallError(
            str(package),
            f"{len(missing)} of {count} anchors are missing ({'; '.join(missing)})",
            "vllm-gaudi 0.24 to 0.26",
            "nothing was written; the stock op stays",
        )
    if not changes:
        return f"{package}: the hooks are there already"
    _write(package, changes)
    return f"{package}: hooks written to {', '.join(changes)}"


def uninstall(folder: Path) -> str:
    """Takes the hooks out, which leaves the bytes of before; returns what was done, in one line.

    Raises:
        InstallError: no vllm-gaudi there, a hook that was cut, or a file that cannot be written.
    """
    package = _package(folder)
    changes: dict[str, bytes] = {}
    for target in TARGETS:
        path = package / target.path
        if target.hook is None or not path.is_file():
            continue
        found = path.read_bytes()
        clean = _without_hook(path, found)
        if clean != found:
            changes[target.path] = clean
    if not changes:
        return f"{package}: there are no hooks"
    _write(package, changes)
    return f"{package}: hooks taken out of {', '.join(changes)}"


def _package(folder: Path) -> Path:
    for package in (folder / "vllm_gaudi", folder.absolute(), folder.resolve()):
        if package.name == "vllm_gaudi" and (package / "__init__.py").is_file():
            return package.resolve()
    raise InstallError(
        str(folder),
        "no vllm_gaudi/__init__.py there",
        "a vllm-gaudi checkout, or its package",
        "name that folder",
    )


def _statements(source: bytes) -> set[int] | None:
    """Lines, from 0 on, that begin a statement, so that no text of a string counts; None if that cannot be told."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return None
    return {node.lineno - 1 for node in ast.walk(tree) if isinstance(node, ast.stmt)}


def _places(
    lines: list[bytes], anchors: tuple[str, ...], statements: set[int] | None
) -> dict[str, int | None]:
    """Line of each anchor, each after the one before; None where it is missing."""
    places: dict[str, int | None] = {}
    start = 0
    for anchor in anchors:
        matches = (
            i
            for i in range(start, len(lines))
            if lines[i].strip().startswith(anchor.encode()) and (statements is None or i in statements)
        )
        place = places[anchor] = next(matches, None)
        if place is not None:
            start = place + 1
    return places


def _without_hook(path: Path, text: bytes) -> bytes:
    """The file without what `install` of any version wrote."""
    kept: list[bytes] = []
    inside = False
    for line in text.splitlines(keepends=True):
        if line.strip().startswith(_BEGIN):
            if inside:
                raise _cut(path, _BEGIN, _END)
            inside = True
        ends = line.strip().startswith(_END)
        if ends and not inside:
            raise _cut(path, _END, _BEGIN)
        if not inside:
            kept.append(line)
        elif ends:
            inside = False
    if inside:
        raise _cut(path, _BEGIN, _END)
    return b"".join(kept)


def _cut(path: Path, there: bytes, missing: bytes) -> InstallError:
    given = f"{there.decode()!r} without {missing.decode()!r}"
    return InstallError(str(path), given, "whole hooks", "restore the file from its source")


def _write(package: Path, changes: dict[str, bytes]) -> None:
    """Writes all files or none: new files beside the old ones first, then they change places."""
    # Of a link, the file behind it changes: the link itself would be lost.
    files = {(package / name).resolve(): text for name, text in changes.items()}
    before = {path: path.read_bytes() for path in files}
    staged: dict[Path, Path] = {}
    try:
        for path, text in files.items():
            mode = path.stat().st_mode
            if not mode & 0o222:  # a superuser could write it all the same
                raise PermissionError(13, "the file is read-only", str(path))
            handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
            staged[path] = Path(name)
            with os.fdopen(handle, "wb") as file:
                file.write(text)
            os.chmod(name, mode & 0o7777)
        for path, new in staged.items():
            os.replace(new, path)
    except BaseException as error:  # an interruption too leaves none of them
        for path, new in staged.items():
            if not new.exists():  # it has changed places
                path.write_bytes(before[path])
        if not isinstance(error, OSError):
            raise
        raise InstallError(
            str(error.filename or next(iter(files))),
            f"it cannot be written: {error.strerror}",
            "files that may be written",
            "nothing was changed; make them writable and run it again",
        ) from error
    finally:
        for new in staged.values():
            with contextlib.suppress(FileNotFoundError):
                new.unlink()
