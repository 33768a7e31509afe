"""`mxk build-tpc` where tools, folders or the user get in its way: one line, exit code 2, and the target as it was."""

from __future__ import annotations

import os
import pathlib
import shutil
from collections.abc import Callable
from typing import Any

import pytest

from mxk_compile.errors import KernelError
from mxk_compile.kernels.tpc.build import Build, _install
from mxk_compile.kernels.tpc.libraries import read_manifest
from mxk_compile.kernels.tpc.request import Request
from mxk_compile.kernels.tpc.toolchain import Toolchain

Mxk = Callable[..., tuple[int, str, str]]


def test_a_dry_run_needs_no_folder(mxk: Mxk, tmp_path: pathlib.Path) -> None:
    code, out, error = mxk("build-tpc", "--dry-run", str(tmp_path / "not/yet/lib"))
    assert (code, error) == (0, "")
    assert "gate 2" in out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("#!/bin/sh\nexit 0\n", "tpc-clang"),
        ("#!/nowhere/sh\n", "tpc-clang"),
        ("\x7fELF no program\n", "tpc-clang"),
        ("#!/bin/sh\nprintf 'error: \\377\\376 is no text\\n' >&2\nexit 3\n", "tpc-clang failed (3): error: "),
        ("#!/bin/sh\nkill -9 $$\n", "tpc-clang failed (-9)"),
        ("#!/bin/sh\nfor word; do last=$word; done\necho junk > \"$last\"\n", "mxk_w13xib.o: not an ELF file"),
    ],
)  # fmt: skip
def test_compilers_that_do_not_do_their_work(
    script: str, said: str, mxk: Mxk, image: Any, tmp_path: pathlib.Path
) -> None:
    (tmp_path / "lib").mkdir()
    clang = image.programs / "tpc-clang"
    whole = clang.read_text()
    try:
        clang.write_text(script)
        code, _, error = mxk("build-tpc", str(tmp_path / "lib"))
    finally:
        clang.write_text(whole)
    assert (code, error.count("\n")) == (2, 1), error
    assert error.startswith("mxk: error: build-tpc: ")
    assert said in error
    assert error.count("; ") >= 2  # given, allowed, what to do
    assert [path.name for path in tmp_path.rglob("*")] == ["lib"]


def test_programs_of_a_relative_path(
    image: Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image.enter(monkeypatch)
    monkeypatch.chdir(image.programs.parent)
    monkeypatch.setenv("PATH", f"bin{os.pathsep}{os.environ['PATH'].partition(os.pathsep)[2]}")
    Build(Request("gptoss", tmp_path / "x"), Toolchain.find(), tmp_path, None).compile_kernels()
    assert (tmp_path / "mxk_w2xb.o").is_file()


@pytest.mark.parametrize("before", ["build", "nothing"])
def test_a_linked_target_is_filled_where_it_leads(
    before: str, mxk: Mxk, gptoss: Any, tmp_path: pathlib.Path
) -> None:
    behind, link = tmp_path / "disk/lib of today, new", tmp_path / "lib"
    behind.parent.mkdir()
    if before == "build":
        shutil.copytree(gptoss.folder, behind)
    link.symlink_to(behind)
    code, _, error = mxk("build-tpc", "--define", "MXK_FID_E2M1=7", str(link))
    assert code == 0, error
    assert link.is_symlink()
    assert read_manifest(behind).defines == ["MXK_FID_E2M1=7"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["disk", "lib"]
    assert list(behind.parent.iterdir()) == [behind]


def test_an_interruption_brings_the_earlier_build_back(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("new", "target"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "MANIFEST").write_text(name)
    rename = pathlib.Path.rename

    def interrupted(path: pathlib.Path, to: pathlib.Path) -> pathlib.Path:
        if path.name == "new":
            raise KeyboardInterrupt
        return rename(path, to)

    monkeypatch.setattr(pathlib.Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        _install(tmp_path / "new", tmp_path / "target", tmp_path / "old")
    assert (tmp_path / "target/MANIFEST").read_text() == "target"


@pytest.mark.parametrize("define", ["", "=1", "-DX", "A B", "1A=2"])
def test_defines_that_are_none(define: str, tmp_path: pathlib.Path) -> None:
    with pytest.raises(KernelError, match=r"^mxk build-tpc: --define .*; allowed: NAME or NAME=VALUE; "):
        Request("gptoss", tmp_path / "lib", defines=(define,)).check()


def test_a_define_that_no_source_asks_for_is_refused_with_those_that_are(tmp_path: pathlib.Path) -> None:
    asked = r"MXK_FID_E2M1, .*MXK_SCALE_BF16, MXK_SHARE"
    for define in ("MXK_FID_E2M2=7", "MXK_BIAS", "MXK_COMMON_H", "NDEBUG"):
        with pytest.raises(
            KernelError, match=rf"--define '{define}', which no source asks for; allowed: {asked}"
        ):
            Request("gptoss", tmp_path / "lib", defines=(define,)).check()
    Request(
        "gptoss", tmp_path / "lib", defines=("MXK_FID_E2M1=1 -O0\n", "MXK_SHARE")
    ).check()  # words, not shell
    extra = tmp_path / "extra"
    extra.mkdir()
    for name, text in (
        ("mine.c", "#if defined(MINE) && MODE > 2\n#endif\n"),
        ("glue.inc", ""),
        ("op.cpp", ""),
    ):
        (extra / name).write_text(text)
    Request("gptoss", tmp_path / "lib", (extra,), defines=("MINE", "MODE=3")).check()
