"""The CUDA kernels as Blackwell would run them, emulated: tcgen05 and mma.sync in place of WGMMA, less shared memory.

Nothing of this ran on such a device (kernels/cuda/devices.py). The instructions are emulated from the PTX ISA's text.
"""

from __future__ import annotations

import dataclasses
import pathlib
import re
import shutil
from collections.abc import Iterator

import pytest
import torch
from kernels.cuda import emulator
from kernels.cuda.test_emulated import DECODE, INT4, PREFILL, Call
from torch import Tensor

from mxk_compile.kernels.cuda import build, grouped
from mxk_compile.ops import moe
from mxk_compile.ops.dequant import dequantize
from mxk_compile.ops.project import reference
from mxk_compile.testing import most_rel_l2, rel_l2

pytestmark = pytest.mark.skipif(emulator.missing() is not None, reason=f"emulator: {emulator.missing()}")

B200, RTX = (10, 0), (12, 0)
SEEDS = (0, 3)


def limited(call: Call) -> Call:
    """With tiles that RTX has room for."""
    return dataclasses.replace(call, schedule=re.sub("144|176", "96", call.schedule))


CALLS = {
    "decode, gpt-oss": (RTX, DECODE["gpt-oss"]),
    "decode, ragged": (RTX, DECODE["ragged"]),
    "decode, four tiles": (B200, DECODE["four tiles"]),
    "decode, large scales": (B200, DECODE["large scales"]),
    "tcgen05, two sizes": (B200, PREFILL["two sizes"]),
    "tcgen05, large tiles": (B200, PREFILL["large tiles"]),
    "tcgen05, strange ids": (B200, PREFILL["strange ids"]),
    "tcgen05, a row": (B200, INT4["a row"]),
    "tcgen05, int4": (B200, INT4["int4"]),
    "mma, two sizes": (RTX, PREFILL["two sizes"]),
    "mma, large tiles": (RTX, limited(PREFILL["large tiles"])),
    "mma, groups of 32": (RTX, INT4["groups of 32"]),
    "mma, fp32 scales": (RTX, INT4["fp32 scales"]),
}


@pytest.fixture(scope="module", autouse=True)
def built() -> Iterator[None]:
    """Compiles what the tests need, by two threads."""
    for device in (B200, RTX):
        with emulator.use(capability=device):
            emulator.build_ahead([call.build for of, call in CALLS.values() if of == device])
    return


def results(device: tuple[int, int], call: Call, sources: pathlib.Path | None = None) -> list[Tensor]:
    """Of a call, in several orders of threads."""
    found = []
    for seed in SEEDS:
        with emulator.use(sources, call.processors, seed, device):
            found.append(emulator.fused(call.case(), call.schedule, call.lists))
    return found


@pytest.mark.parametrize("name", CALLS)
def test_layers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    device, call = CALLS[name]
    with monkeypatch.context() as patch:
        if call.arguments.get("weight_format", "mxfp4") != "mxfp4":  # rounded as the tensor cores take them
            patch.setattr(
                moe, "dequantize", lambda *given, **more: dequantize(*given, **more).bfloat16().float()
            )
        expected = call.case().reference(round_intermediate=True)
    first, second = results(device, call)
    assert rel_l2(first, expected) <= most_rel_l2(expected)
    assert torch.equal(first, second), "the order of threads changes no bit"


@pytest.mark.parametrize("device", [B200, RTX])
def test_projections(device: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(3, 40, 96, generator=generator).bfloat16()
    rows = torch.tensor([40, 0, 17], dtype=torch.int32)
    packed = torch.randint(0, 256, (3, 264, 48), generator=generator, dtype=torch.uint8)
    weight = (packed, torch.rand(3, 264, 3, generator=generator).bfloat16(), None)
    attributes = {"weight_format": "uint4", "expected_m": 40}
    out, expected = torch.full((120, 264), -7.0, dtype=torch.bfloat16), torch.full((120, 264), -7.0)
    reference("masked", expected, x, rows, *weight, **attributes)
    with emulator.use(processors=3, capability=device):
        assert grouped.project(lambda *_, **__: None, "masked", out, x, rows, *weight, **attributes) is None
    assert rel_l2(out, expected) <= 2.5e-3


@pytest.mark.parametrize(
    ("kept", "left_out", "error"),
    [
        (
            "void sync() const {\n    tensor_fence_before();",
            "void sync() const {",
            "without wait::st and fence::before",
        ),
        (
            "{ barrier_wait(done + turn % 2 * 8, turn / 2 % 2 ^ 1); }",
            "{}",
            "tcgen05.st where a product is under way",
        ),
    ],
    ids=["fence before", "wait for a buffer"],
)
def test_what_tcgen05_needs_is_missed(tmp_path: pathlib.Path, kept: str, left_out: str, error: str) -> None:
    sources = tmp_path / "cuda"
    shutil.copytree(build.SOURCES, sources, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    file = sources / "prefill_tcgen05.cuh"
    text = file.read_text()
    assert kept in text
    file.write_text(text.replace(kept, left_out))
    with pytest.raises(emulator.EmulatorError, match=error):
        results(B200, PREFILL["ragged"], sources)
