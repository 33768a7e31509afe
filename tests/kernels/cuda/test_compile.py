"""The CUDA sources go through NVRTC, which needs no GPU; nothing runs."""

from __future__ import annotations

import pathlib

import pytest

from mxk_compile.errors import KernelError
from mxk_compile.kernels.cuda import build

pytestmark = pytest.mark.skipif(build.missing() is not None, reason=f"NVRTC: {build.missing()}")


@pytest.mark.parametrize(
    ("name", "macros"),
    [
        ("dequant.cu", {}),
        ("routing.cu", {}),
        ("groups.cu", {}),
        ("prefill.cu", {"MXK_TOKENS": 16}),
        ("prefill.cu", {"MXK_TOKENS": 128, "MXK_FORMAT": 1, "MXK_SCALES": 2, "MXK_ZEROS": 1}),
        ("prefill.cu", {"MXK_TOKENS": 176, "MXK_FORMAT": 2, "MXK_GROUP_LOG": 31, "MXK_PROJECT": 1}),
        ("moe_decode.cu", {}),
    ],
)
def test_sources_compile_for_hopper(name: str, macros: dict[str, int]) -> None:
    options = (*build._OPTIONS, *(f"-D{macro}={value}" for macro, value in macros.items()))
    code = build.compile_nvrtc(name, options)
    assert code.startswith(b"\x7fELF")
    assert len(code) > 1000


def test_an_error_in_a_source_is_one_line(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wrong.cu").write_text('extern "C" __global__ void kernel() { nothing(); }\n')
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    with pytest.raises(KernelError) as caught:
        build.compile_nvrtc("wrong.cu", build._OPTIONS)
    assert str(caught.value).startswith(
        'NVRTC, wrong.cu: wrong.cu(1): error: identifier "nothing" is undefined'
    )
    assert "\n" not in str(caught.value)
