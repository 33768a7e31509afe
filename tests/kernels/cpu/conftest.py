"""The tile unit for every expert: this machine's, or the kernel library with one that is emulated in plain C++."""

from __future__ import annotations

import ctypes
import os
import shutil
from collections.abc import Iterator

import pytest
import scripts

from mxk_compile.kernels import cpu


@pytest.fixture
def amx(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Selects "amx" and sends experts of any number of rows to the unit; the settings' choice is restored."""
    if cpu._library().mxk_cpu_select(b"amx"):
        emulated = request.getfixturevalue("emulated_amx")
        monkeypatch.setattr(cpu, "_open", lambda: emulated)
    cpu._library().mxk_cpu_matrix_rows(ctypes.c_int64(1))
    yield
    cpu._library().mxk_cpu_matrix_rows(ctypes.c_int64(0))
    cpu._library().mxk_cpu_select(b"auto")


@pytest.fixture(scope="session")
def emulated_amx(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The same sources with MXK_AMX_EMULATED, opened beside the library in use; needs a compiler and AVX-512."""
    if not (os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")):
        pytest.skip("no C++ compiler")
    folder = tmp_path_factory.mktemp("emulated_amx")
    path = folder / "libmxk_cpu_emulated.so"
    scripts.load("setup.py").build(path, folder / "objects", ["-DMXK_AMX_EMULATED"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "LIBRARY", path)
        library = cpu._open.__wrapped__()
    assert isinstance(library, ctypes.CDLL), library
    if library.mxk_cpu_select(b"amx"):
        pytest.skip("no AVX-512 here")
    return library
