"""The cache of compiled kernels, with a compiler that only notes its calls."""

from __future__ import annotations

import multiprocessing
import os
import pathlib
import threading
import time

import pytest

from mxk_compile.kernels.cuda import build as building
from mxk_compile.kernels.cuda.build import build
from mxk_compile.kernels.cuda.devices import DEVICES, HOPPER


class Compiler:
    """Says what it was asked for; slow enough that callers meet."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[str, ...]]] = []

    def __call__(self, name: str, options: tuple[str, ...]) -> bytes:
        self.calls.append((name, options))
        time.sleep(0.02)
        return f"{name} {options}".encode() * 1000


@pytest.fixture(autouse=True)
def folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """A cache folder of its own, and nothing built yet."""
    monkeypatch.setattr(building, "cache_folder", lambda: tmp_path / "cuda")
    monkeypatch.setattr(building, "_built", {})
    return tmp_path / "cuda"


def make(compiler: Compiler, version: str = "13.0", **defines: int) -> bytes:
    return build("dequant.cu", defines, HOPPER, compiler, lambda: version)


def forget() -> None:
    """As a new process: nothing in memory."""
    building._built.clear()


def test_one_compilation_serves_this_process_and_the_next(folder: pathlib.Path) -> None:
    compiler = Compiler()
    first = make(compiler, A=1)
    assert make(compiler, A=1) == first
    forget()
    assert make(compiler, A=1) == first
    assert len(compiler.calls) == 1
    assert [path.suffix for path in folder.iterdir()] == [".cubin"]
    name, options = compiler.calls[0]
    assert name == "dequant.cu"
    assert "--gpu-architecture=sm_90a" in options
    assert "-DA=1" in options


def test_macros_version_and_sources_are_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = Compiler()
    made = [make(compiler, A=1), make(compiler, A=2), make(compiler, A=1, B=1), make(compiler, "12.9", A=1)]
    assert len(compiler.calls) == 4
    monkeypatch.setattr(building, "_sources_hash", lambda name: "other")
    made.append(make(compiler, A=1))
    assert len(compiler.calls) == 5
    assert make(compiler, B=1, A=1) == build("dequant.cu", {"A": 1, "B": 1}, HOPPER, compiler, lambda: "13.0")
    assert len(compiler.calls) == 6, "the order of macros is nothing"
    made.append(build("dequant.cu", {"A": 1}, DEVICES[10, 0], compiler, lambda: "13.0"))
    options = compiler.calls[6][1]
    assert {"--gpu-architecture=sm_100a", "-DMXK_MULTIPLY=2", "-DA=1"} < set(options)
    assert len(made) == 6


def test_sources_hash_depends_on_every_included_file(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("kernel.cu", "part.cuh", "other.cu"):
        (tmp_path / name).write_text("before")
    monkeypatch.setattr(building, "SOURCES", tmp_path)
    undecorated = building._sources_hash.__wrapped__
    before = undecorated("kernel.cu")
    (tmp_path / "other.cu").write_text("after")
    assert undecorated("kernel.cu") == before
    for name in ("part.cuh", "kernel.cu"):
        (tmp_path / name).write_text("after")
        assert undecorated("kernel.cu") != before
        before = undecorated("kernel.cu")


@pytest.mark.parametrize("damage", [b"", b"short", b"x" * 1000])
def test_a_damaged_file_is_compiled_again(folder: pathlib.Path, damage: bytes) -> None:
    compiler = Compiler()
    expected = make(compiler)
    (file,) = folder.iterdir()
    file.write_bytes(damage)
    forget()
    assert make(compiler) == expected
    forget()
    assert make(compiler) == expected
    assert len(compiler.calls) == 2


def test_a_read_only_home_falls_back_to_memory(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A file where the folder should be: refused to root as well.
    folder.write_text("in the way")
    compiler = Compiler()
    assert make(compiler) == make(compiler)
    assert len(compiler.calls) == 1
    forget()
    make(compiler)
    assert len(compiler.calls) == 2


def test_leftovers_of_killed_writers_do_no_harm(folder: pathlib.Path) -> None:
    folder.mkdir()
    (folder / ".new-abc").write_bytes(b"half")
    compiler = Compiler()
    make(compiler)
    forget()
    make(compiler)
    assert len(compiler.calls) == 1


def test_threads_that_ask_at_once_get_one_compilation() -> None:
    compiler, results = Compiler(), []
    threads = [threading.Thread(target=lambda: results.append(make(compiler))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(compiler.calls) == 1
    assert len(set(results)) == 1


def _race(folder: str, barrier: threading.Barrier) -> int:
    building.cache_folder = lambda: pathlib.Path(folder)
    building._built.clear()
    barrier.wait(200)
    return len(make(Compiler()))


def test_processes_that_write_at_once_leave_one_whole_file(folder: pathlib.Path) -> None:
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(4)
    processes = [context.Process(target=_race, args=(os.fspath(folder), barrier)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(200)
        assert process.exitcode == 0
    compiler = Compiler()
    make(compiler)
    assert compiler.calls == []
    assert [path.suffix for path in folder.iterdir()] == [".cubin"]
