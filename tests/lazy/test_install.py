"""`mxk gaudi install` and `uninstall`: all anchors or nothing, byte-identical removal, and the hooks at work."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mxk_compile.cli import main
from mxk_compile.lazy import install

TESTS = Path(__file__).parents[1]
HOOKED = [target.path for target in install.TARGETS if target.hook is not None]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def run(*arguments: object) -> int:
    return main(["gaudi", *map(str, arguments)])


def test_install_and_uninstall(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = contents(checkout)
    modes = {name: (checkout / name).stat().st_mode for name in before}
    assert run("install", checkout) == 0
    package = (checkout / "vllm_gaudi").resolve()
    assert capsys.readouterr().out == f"{package}: hooks written to __init__.py, ops/hpu_mxfp4.py\n"
    after = contents(checkout)
    assert {name for name in before if before[name] != after[name]} == {
        f"vllm_gaudi/{name}" for name in HOOKED
    }
    assert after["vllm_gaudi/__init__.py"].startswith(b"# mxk-compile: begin")
    compile(after["vllm_gaudi/ops/hpu_mxfp4.py"], "hpu_mxfp4.py", "exec")

    assert run("install", checkout) == 0
    assert capsys.readouterr().out == f"{package}: the hooks are there already\n"
    assert contents(checkout) == after

    assert run("uninstall", checkout) == 0
    assert contents(checkout) == before
    assert {name: (checkout / name).stat().st_mode for name in before} == modes
    assert run("uninstall", checkout / "vllm_gaudi") == 0
    assert capsys.readouterr().out.endswith(f"{package}: there are no hooks\n")


def test_there_are_as_many_anchors_as_published() -> None:
    assert sum(len(target.anchors) for target in install.TARGETS) == 11


@pytest.mark.parametrize("newline", ["\r\n", "\n"])
@pytest.mark.parametrize("at_end", ["", "\n", "# no newline after this"])
def test_odd_files_come_back_byte_for_byte(newline: str, at_end: str, checkout: Path) -> None:
    for name in HOOKED:
        path = checkout / "vllm_gaudi" / name
        path.write_bytes((path.read_text() + at_end + "\x0c\x85\u2028").replace("\n", newline).encode())
    before = contents(checkout)
    assert run("install", checkout) == 0
    hooked = contents(checkout)[f"vllm_gaudi/{HOOKED[0]}"]
    assert (b"\n" in hooked.replace(b"\r\n", b"")) == (newline == "\n")
    assert run("uninstall", checkout) == 0
    assert contents(checkout) == before


@pytest.mark.parametrize(
    ("path", "anchor"), [(target.path, anchor) for target in install.TARGETS for anchor in target.anchors]
)
def test_one_missing_anchor(
    path: str, anchor: str, checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = checkout / "vllm_gaudi" / path
    lines = file.read_text().splitlines(keepends=True)
    kept = [line for line in lines if not line.strip().startswith(anchor)]
    assert len(kept) < len(lines)
    file.write_text("".join(kept))
    before = contents(checkout)
    assert run("install", checkout) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert f"1 of 11 anchors are missing ({path}: {anchor})" in said.err
    assert said.err.endswith("allowed: vllm-gaudi 0.24 to 0.26; nothing was written; the stock op stays\n")
    assert said.err.count("\n") == 1
    assert contents(checkout) == before


def test_all_missing_anchors_are_listed(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (checkout / "vllm_gaudi/extension/ops.py").unlink()
    (checkout / "vllm_gaudi/ops/hpu_mxfp4.py").write_text("class HPUGptOssMxfp4MoEMethod:\n    pass\n")
    assert run("install", checkout) == 1
    said = capsys.readouterr().err
    assert "7 of 11 anchors are missing" in said
    for target in install.TARGETS[1:]:
        assert all(f"{target.path}: {anchor}" in said for anchor in target.anchors)


def test_anchors_out_of_order_are_missing(checkout: Path) -> None:
    file = checkout / "vllm_gaudi/__init__.py"
    file.write_text(
        "def register_ops():\n    pass\n" + file.read_text().replace("def register_ops", "def other")
    )
    assert run("install", checkout) == 1


@pytest.mark.parametrize("name", HOOKED)
@pytest.mark.parametrize("action", ["install", "uninstall"])
def test_read_only_files(name: str, action: str, checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if action == "uninstall":
        run("install", checkout)
    (checkout / "vllm_gaudi" / name).chmod(0o444)
    before = contents(checkout)
    assert run(action, checkout) == 1
    path = (checkout / "vllm_gaudi" / name).resolve()
    assert capsys.readouterr().err == (
        f"mxk: error: {path}: it cannot be written: the file is read-only; allowed: files that may be written; "
        "nothing was changed; make them writable and run it again\n"
    )
    assert contents(checkout) == before


def test_a_failure_half_way_is_undone(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, replace, calls = contents(checkout), os.replace, []

    def fail_second(source: str, target: str) -> None:
        calls.append(target)
        if len(calls) == 2:
            raise OSError(28, "No space left on device", str(target))
        replace(source, target)

    monkeypatch.setattr(os, "replace", fail_second)
    assert run("install", checkout) == 1
    assert len(calls) == 2
    assert contents(checkout) == before


def test_an_older_hook_is_replaced_and_a_cut_one_refused(
    checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(checkout)
    run("install", checkout)
    file = checkout / "vllm_gaudi/__init__.py"
    current = file.read_text()
    file.write_text(current.replace("_mxk_start(_mxk_environ)", "_mxk_start()"))
    assert run("install", checkout) == 0
    assert file.read_text() == current
    file.write_text(current.replace("# mxk-compile: end\n", ""))
    cut = contents(checkout)
    for action in ("install", "uninstall"):
        assert run(action, checkout) == 1
    assert "'# mxk-compile: begin' without '# mxk-compile: end'" in capsys.readouterr().err
    assert contents(checkout) == cut
    file.write_text(current)
    run("uninstall", checkout)
    assert contents(checkout) == before


def test_a_hook_without_its_first_line_is_refused(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("install", checkout)
    file = checkout / "vllm_gaudi/__init__.py"
    file.write_text(file.read_text().partition("\n")[2])
    cut = contents(checkout)
    for action in ("install", "uninstall"):
        assert run(action, checkout) == 1
        assert "'# mxk-compile: end' without '# mxk-compile: begin'" in capsys.readouterr().err
    assert contents(checkout) == cut


def test_an_interruption_half_way_is_undone(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, replace, calls = contents(checkout), os.replace, []

    def interrupt_second(source: str, target: str) -> None:
        replace(source, target)
        calls.append(target)
        if len(calls) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupt_second)
    assert run("install", checkout) == 130
    assert contents(checkout) == before


def test_a_link_stays_a_link(checkout: Path, tmp_path: Path) -> None:
    file, behind = checkout / "vllm_gaudi/ops/hpu_mxfp4.py", tmp_path / "elsewhere.py"
    before = file.read_bytes()
    file.rename(behind)
    file.symlink_to(behind)
    assert run("install", checkout) == 0
    assert file.is_symlink()
    assert b"mxk_compile.lazy" in behind.read_bytes()
    assert run("uninstall", checkout) == 0
    assert file.is_symlink()
    assert behind.read_bytes() == before


@pytest.mark.parametrize("below", ["vllm_gaudi", "vllm_gaudi/ops"])
def test_a_folder_named_from_inside(below: str, checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(checkout / below)
    assert run("install", Path("." if below == "vllm_gaudi" else "..")) == 0


@pytest.mark.parametrize(
    ("name", "line", "instead"),
    [
        ("__init__.py", "import os\n", "try:\n    import os\nexcept ImportError:\n    raise\n"),
        ("__init__.py", "import os\n", '"""Notes.\nimport os\n"""\nimport os\n'),
        (
            "ops/hpu_mxfp4.py",
            "        layer.moe_op._cache_weight_lists()\n",
            "        for layer in [layer]:\n            layer.moe_op._cache_weight_lists()\n            last = 1\n",
        ),
    ],
)
def test_hooks_run_where_their_anchor_does(name: str, line: str, instead: str, checkout: Path) -> None:
    """An anchor that is indented otherwise takes its hook along; text of a string is none."""
    file = checkout / "vllm_gaudi" / name
    assert line in file.read_text()
    file.write_text(file.read_text().replace(line, instead, 1))
    assert run("install", checkout) == 0
    blocks = [
        block for node in ast.walk(ast.parse(file.read_text())) if (block := getattr(node, "body", None))
    ]
    texts = [[ast.unparse(inner) for inner in block] for block in blocks if isinstance(block, list)]
    anchor, step, hook = {
        "__init__.py": ("import os", -2, "from os import environ as _mxk_environ"),
        "ops/hpu_mxfp4.py": ("layer.moe_op._cache_weight_lists()", 1, "import sys as _mxk_sys"),
    }[name]
    (block,) = [block for block in texts if anchor in block]
    assert block[block.index(anchor) + step] == hook
    assert ("last = 1" in block) == ("last" in instead)


def test_other_folders_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("install", tmp_path) == 1
    assert run("uninstall", tmp_path / "none") == 1
    assert (
        capsys.readouterr().err.count("no vllm_gaudi/__init__.py there; allowed: a vllm-gaudi checkout") == 2
    )


SERVER = """
import json, logging, os, sys
logging.basicConfig(stream=sys.stderr, format="%(message)s", level=logging.INFO)
before = dict(os.environ)
import vllm_gaudi
early = "mxk_compile" in sys.modules
changed = {name: value for name, value in os.environ.items() if before.get(name) != value}

import torch
import mxk_compile
import gaudi_stand_ins as stand_ins
from mxk_compile.testing import random_case, rel_l2
from mxk_compile.lazy import gptoss, signature_table
gptoss.load_ops = lambda folder, kind: None
signature_table.registered_ops = dict
from vllm_gaudi.ops.hpu_mxfp4 import HPUGptOssMxfp4MoEMethod

case = random_case(num_tokens=3, num_experts=2, hidden_size=64, intermediate_size=32, bias=True,
                   row_order="interleaved", activation="swiglu_oai", alpha=1.702, limit=7.0)
layer = torch.nn.Module()
names = ("w13_weight", "w13_weight_scale", "w2_weight", "w2_weight_scale", "", "", "w13_bias", "w2_bias")
for name, weight in zip(names, case.weights):
    if weight is not None:
        setattr(layer, name, torch.nn.Parameter(weight, requires_grad=False))
layer.top_k, layer.first = 2, 0
with stand_ins.ops():
    method = HPUGptOssMxfp4MoEMethod()
    method.process_weights_after_loading(layer)
    result = method.apply_monolithic(layer, *case.routing)
print(json.dumps([early, changed, stand_ins.called, rel_l2(result, case.reference())]))
"""


@pytest.mark.parametrize("switch", ["0", "1", "wrong"])
def test_the_hooks_at_work(switch: str, checkout: Path, environ: dict[str, str]) -> None:
    """A server process with the hooks: off they are inert, on they replace the call, and nothing wrong stops it."""
    run("install", checkout)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("MXFP4_")}
    environment = {
        **inherited,
        **environ,
        "MXFP4_TPC_MOE": switch,
        "PYTHONPATH": f"{checkout}{os.pathsep}{TESTS}",
    }
    command = [sys.executable, "-c", SERVER]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    early, changed, called, error = json.loads(done.stdout)
    on = switch == "1"
    assert early == (switch != "0")
    assert sorted(changed) == (["GC_KERNEL_PATH", "PT_HPU_LAZY_ACC_PAR_MODE"] if on else [])
    assert called == (["mxk_w13xib", "mxk_w2xb"] if on else [])
    assert error < (4e-3 if on else 1e-2)
    said = [line for line in done.stderr.splitlines() if line.startswith("MXFP4 TPC MoE")]
    assert (
        said
        == {
            "0": [],
            "1": [
                "MXFP4 TPC MoE installed: mxk_tpc gptoss-v0.2.0-12345678",
                "MXFP4 TPC MoE enabled (E_local=2 K=64 I=32, <= 32 tokens, <= 128 routes)",
            ],
            "wrong": [
                "MXFP4 TPC MoE stays off, the stock op runs: MXFP4_TPC_MOE: 'wrong'; allowed: 0, 1; correct or unset it"
            ],
        }[switch]
    )
