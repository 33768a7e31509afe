"""The kernels on aarch64: cross-compiled, and run under emulation where both tools are at hand."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mxk_compile.kernels import MoEDesc, cpu
from mxk_compile.testing import MoECase, most_rel_l2, random_case, rel_l2

ROOT = Path(__file__).parents[3]
COMPILER, EMULATOR = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64")
GPTOSS = {"activation": "swiglu_oai", "alpha": 1.702, "limit": 7.0, "bias": True, "row_order": "interleaved"}
CASES: dict[str, dict[str, Any]] = {
    "mxfp4": {"num_tokens": 1, "hidden_size": 480, "intermediate_size": 224, **GPTOSS},
    "mxfp4 of odd sizes": {"num_tokens": 7, "hidden_size": 130, "intermediate_size": 104},
    "uint4 with zero points": {"num_tokens": 5, "weight_format": "uint4", "group_size": 64, "zero": True},
    "int4 by channel": {"num_tokens": 3, "weight_format": "int4", "group_size": None},
    "output": {"num_tokens": 3, "weight_format": "uint4", "pack_dim": "output", "zero": True},
    "many tokens": {"num_tokens": 40, "num_experts": 4, "hot": True, **GPTOSS},
}
pytestmark = [
    pytest.mark.skipif(cpu.available() is not None, reason=str(cpu.available())),
    pytest.mark.skipif(COMPILER is None, reason="no aarch64-linux-gnu-g++"),
]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """replay.cpp with every unit of the library, for the oldest aarch64."""
    folder = tmp_path_factory.mktemp("aarch64")
    sources = [
        *sorted((ROOT / "mxk_compile/kernels/cpu").glob("*.cpp")),
        Path(__file__).with_name("replay.cpp"),
    ]
    objects = []
    flags = ["-std=c++17", "-O2", "-fno-math-errno", "-fno-trapping-math", "-Wall", "-Wextra", "-Werror"]
    for source in sources:
        objects.append(str(folder / f"{source.stem}.o"))
        command = [str(COMPILER), *flags, "-I", str(ROOT / "mxk_compile/kernels/cpu"), "-c", str(source)]
        subprocess.run([*command, "-o", objects[-1]], check=True)
    target = folder / "replay"
    subprocess.run([str(COMPILER), *objects, "-static", "-o", str(target)], check=True, capture_output=True)
    return target


def serialised(case: MoECase) -> bytes:
    """What replay.cpp reads."""
    desc = MoEDesc.from_call(*case.routing, *case.weights, **case.attributes)
    scalars = {name: case.attributes[name] for name in ("alpha", "limit", "experts_min")}
    prepared = cpu.Prepared(desc, *case.routing, *case.weights, **scalars)
    fields = cpu._VARYING.pack(*(tensor.data_ptr() for tensor in case.routing), 0, 1) + prepared._fixed
    words = torch.frombuffer(bytearray(fields), dtype=torch.int64).clone()
    data = bytearray(fields)
    for tensor in (*case.routing, *case.weights):
        if tensor is not None:
            data += bytes(-len(data) % 64)
            words[words == tensor.data_ptr()] = len(data)
            data += tensor.contiguous().view(torch.uint8).numpy().tobytes()
    data[: len(fields)] = words.numpy().tobytes()
    return bytes(data)


def replay(program: Path, processor: str, isa: str, case: MoECase, folder: Path) -> Tensor:
    """The call's result on an emulated processor."""
    (folder / "call").write_bytes(serialised(case))
    command = [str(EMULATOR), "-cpu", processor, str(program), isa, str(folder / "call"), "-"]
    done = subprocess.run(command, capture_output=True, check=True, timeout=300)
    assert done.stderr.decode().strip() == isa
    return torch.frombuffer(bytearray(done.stdout), dtype=torch.bfloat16).view(case.reference().shape)


def test_it_compiles_without_warnings(program: Path) -> None:
    assert program.stat().st_size > 0


@pytest.mark.skipif(EMULATOR is None, reason="no qemu-aarch64")
@pytest.mark.parametrize("name", CASES)
def test_emulated(program: Path, tmp_path: Path, name: str) -> None:
    """The oldest processor, and one with the byte dot product: the same integers, so the same bits."""
    case = random_case(**CASES[name])
    results = [replay(program, processor, "portable", case, tmp_path) for processor in ("cortex-a53", "max")]
    assert torch.equal(results[0].view(torch.int16), results[1].view(torch.int16))
    expected = case.reference()
    assert rel_l2(results[0], expected) <= most_rel_l2(expected)
