"""The CUDA sources go through NVRTC, which needs no GPU; nothing runs."""

from __future__ import annotations

import pathlib

import pytest

from mxk_compile.errors import KernelError
from mxk_compile.kernels.cuda import build
from mxk_compile.kernels.cuda.devices import DEVICES, HOPPER

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
        ("prefill.cu", {"MXK_TOKENS": 176, "MXK_FORMAT": 1, "MXK_PROJECT": 1, "MXK_ROWS": 1}),
        ("prefill.cu", {"MXK_TOKENS": 128, "MXK_ZEROS": 1, "MXK_FORMAT": 1, "MXK_PROJECT": 1, "MXK_ROWS": 2}),
        ("moe_decode.cu", {}),
    ],
)
def test_sources_compile_for_hopper(name: str, macros: dict[str, int]) -> None:
    code = build.compile_nvrtc(name, build.options_for(HOPPER, macros))
    assert code.startswith(b"\x7fELF")
    assert len(code) > 1000


@pytest.mark.parametrize(
    "capability", [capability for capability, kind in DEVICES.items() if not kind.measured]
)
@pytest.mark.parametrize(
    ("name", "macros"),
    [
        ("dequant.cu", {}),
        ("routing.cu", {}),
        ("groups.cu", {}),
        ("prefill.cu", {"MXK_TOKENS": 16, "MXK_FORMAT": 1, "MXK_SCALES": 2, "MXK_ZEROS": 1}),
        ("prefill.cu", {"MXK_TOKENS": 0, "MXK_PROJECT": 1}),
        ("moe_decode.cu", {"MXK_GROUPS": 2, "MXK_CHUNK": 16, "MXK_SCALES_SMALL": 1}),
    ],
)
def test_sources_compile_for_blackwell(
    capability: tuple[int, int], name: str, macros: dict[str, int]
) -> None:
    kind = DEVICES[capability]
    macros = {macro: value or kind.most_rows for macro, value in macros.items()}
    assert build.compile_nvrtc(name, build.options_for(kind, macros)).startswith(b"\x7fELF")


@pytest.mark.parametrize(("name", "macros"), [("prefill.cu", {"MXK_TOKENS": 176}), ("moe_decode.cu", {})])
def test_hopper_has_the_products_of_other_devices_too(name: str, macros: dict[str, int]) -> None:
    assert build.compile_nvrtc(name, build.options_for(HOPPER, {**macros, "MXK_MULTIPLY": 1}))


def test_what_does_not_fit_a_device_does_not_compile() -> None:
    with pytest.raises(KernelError, match="shared memory of a block"):
        build.compile_nvrtc("prefill.cu", build.options_for(DEVICES[12, 0], {"MXK_TOKENS": 176}))


def test_an_error_in_a_source_is_one_line(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wrong.cu").write_text('extern "C" __global__ void kernel() { nothing(); }\n')
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    with pytest.raises(KernelError) as caught:
        build.compile_nvrtc("wrong.cu", build.options_for(HOPPER, {}))
    assert str(caught.value).startswith(
        'NVRTC, wrong.cu: wrong.cu(1): error: identifier "nothing" is undefined'
    )
    assert "\n" not in str(caught.value)
