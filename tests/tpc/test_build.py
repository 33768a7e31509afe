"""`mxk build-tpc` from end to end on stand-ins, what it refuses, and that a failure leaves nothing."""

from __future__ import annotations

import hashlib
import json
import pathlib
import shutil
import struct
import subprocess
from collections.abc import Callable
from typing import Any

import pytest

import mxk_compile
from mxk_compile.errors import KernelError
from mxk_compile.kernels.tpc import elf, tables, toolchain
from mxk_compile.kernels.tpc.build import Build, _install
from mxk_compile.kernels.tpc.libraries import Manifest, read_manifest
from mxk_compile.kernels.tpc.request import Request
from mxk_compile.kernels.tpc.toolchain import Toolchain

Mxk = Callable[..., tuple[int, str, str]]
STAND_INS = pathlib.Path(__file__).parent / "stand_ins"


def sha256(path: pathlib.Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_build_holds_its_libraries_and_says_what_is_in_them(muse: Any, image: Any) -> None:
    manifest = read_manifest(muse.folder)
    names = {"libmxk_tpc.so", "libmxk_op_lazy.so", "libmxk_op_pt2.so"}
    assert {path.name for path in muse.folder.iterdir()} == names | {"MANIFEST"}
    assert set(manifest.files) == names
    assert manifest.variant == "muse"
    assert manifest.version.startswith(f"muse-{mxk_compile.__version__}-")
    assert manifest.versions["tpc_clang"] == "tpc-clang stand-in 2.7.33"
    assert manifest.stock == {"path": str(image.stock), "sha256": sha256(image.stock)}
    assert list(manifest.kernels) == ["mxk_w13x", "mxk_w2xr"]
    # The kernels are in the library, byte for byte.
    library = (muse.folder / "libmxk_tpc.so").read_bytes()
    starts = [at for at in range(0, len(library), 64) if library[at : at + 4] == b"\x7fELF"]
    embedded = set()
    for at in starts[1:]:  # the first is the library itself
        (table,), (size, count) = (
            struct.unpack_from("<Q", library, at + 0x28),
            struct.unpack_from("<2H", library, at + 0x3A),
        )
        embedded.add(hashlib.sha256(library[at : at + table + size * count]).hexdigest())
    assert embedded == {hashes["elf_sha256"] for hashes in manifest.kernels.values()}
    assert [line for line in muse.said.splitlines() if line[0].isdigit()][-1].startswith("8. write MANIFEST")
    assert "NOT FOR A DEVICE YET" in muse.said.splitlines()[-1]
    assert not [path for path in muse.folder.parent.iterdir() if path != muse.folder], (
        "no temporary folder stays"
    )


def test_an_extra_kernel_joins_the_same_libraries(gptoss: Any, image: Any) -> None:
    manifest = read_manifest(gptoss.folder)
    assert list(manifest.kernels) == ["mxk_w13xib", "mxk_w2xb", "demo_scale"]
    assert set(manifest.files) == {"libmxk_tpc.so", "libmxk_op_lazy.so"}
    assert manifest.defines == ["MXK_FID_E2M1=123"]
    assert gptoss.said.splitlines()[-1].startswith("built ")
    node = "3 demo_scale 40490fdb f32:4x5 f32:4x5\n3 demo_scale - f32:4x5 f32:4x5\n"
    command = [str(image.graph_compiler), str(gptoss.folder / "libmxk_tpc.so")]
    listed = subprocess.run([*command, "guids", "3"], capture_output=True, text=True, check=True).stdout
    assert [line.split()[0] for line in listed.splitlines()][2:] == list(manifest.kernels)
    said = subprocess.run([*command, "node"], input=node, capture_output=True, text=True, check=True).stdout
    good, bad = said.splitlines()
    assert good.split()[:6] == ["0", "1", "1", "1", "40490fdb", "1/1"]
    assert bad.split()[0] == "8"


def compiled(source: pathlib.Path, folder: pathlib.Path) -> bytes:
    """The object that the stand-in compiler makes of a copy of `source` in `folder`."""
    folder.mkdir(parents=True)
    shutil.copy(source, folder / "kernel.c")
    command = [
        "python3",
        str(STAND_INS / "tpc_clang.py"),
        "-march=gaudi2",
        "-c",
        "kernel.c",
        "-o",
        "kernel.o",
    ]
    subprocess.run(command, cwd=folder, check=True)
    return (folder / "kernel.o").read_bytes()


def test_the_code_hash_ignores_comments_and_folders_and_nothing_else(tmp_path: pathlib.Path) -> None:
    source = tmp_path / "kernel.c"
    source.write_text("void main(tensor x) { int a = 1; }\n")
    plain = compiled(source, tmp_path / "one")
    source.write_text("// A comment.\nvoid main(tensor x) { int a = 1; }\n")
    commented = compiled(source, tmp_path / "another/folder")
    source.write_text("void main(tensor x) { int a = 2; }\n")
    changed = compiled(source, tmp_path / "three")
    assert plain != commented
    assert elf.code_sha256(plain, "k") == elf.code_sha256(commented, "k") != elf.code_sha256(changed, "k")
    # The recipe, written out.
    text, metadata = b"void main(tensor x) { int a = 1; }", bytes(index % 251 for index in range(262))
    recipe = b""
    for name, content in ((b".text", text), (b".tpc_metadata", metadata)):
        recipe += name + b"\0" + len(content).to_bytes(8, "little") + content
    assert elf.code_sha256(plain, "k") == hashlib.sha256(recipe).hexdigest()


@pytest.mark.parametrize(
    ("data", "given"),
    [(b"", "not an ELF file"), (b"\x7fELF" + bytes(60), "no .text"), (b"#!/bin/sh\n" * 9, "not an ELF file")],
)
def test_what_is_no_kernel_object(data: bytes, given: str) -> None:
    with pytest.raises(KernelError, match=rf"^k\.o: .*{given}"):
        elf.code_sha256(data, "k.o")


def test_damaged_objects_are_refused(tmp_path: pathlib.Path) -> None:
    source = tmp_path / "kernel.c"
    source.write_text("void main(tensor x) { int a = 1; }\n")
    whole = compiled(source, tmp_path / "one")
    for size in range(0, len(whole), 37):
        with pytest.raises(KernelError):
            elf.code_sha256(whole[:size], "k.o")


def test_the_kernel_library_does_not_depend_on_the_folder_it_was_built_in(
    image: Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image.enter(monkeypatch)
    found = []
    for name in ("a", "longer/folder"):
        work = tmp_path / name
        (work / "out").mkdir(parents=True)
        steps = Build(Request("muse", work / "target"), Toolchain.find(), work, None)
        for guid in steps.guids:
            (work / f"{guid}.o").write_bytes(guid.encode() * 9)
        steps.link_kernel_library()
        found.append(sha256(work / "out/libmxk_tpc.so"))
    assert found[0] == found[1]


def test_missing_parts_are_named_on_one_line_and_nothing_is_written(
    mxk: Mxk, image: Any, tmp_path: pathlib.Path
) -> None:
    bridge = image.site / "habana_frameworks/torch"
    parts = {
        "tpc-clang (PATH, /opt/habanalabs/bin/tpc-clang)": image.programs / "tpc-clang",
        "tpc_kernel_lib_interface.h (": image.root / "usr/include/habanalabs/tpc_kernel_lib_interface.h",
        "the custom-op headers hpu_custom_op*.h (": bridge / "include/hpu_custom_op.h",
        "the bridge's plugins libhabana_pytorch*": bridge / "lib/libhabana_pytorch_plugin.so",
        "the stock kernel library (": image.stock,
    }
    for text, part in parts.items():
        hidden = shutil.move(part, part.with_name("hidden"))
        try:
            code, _, error = mxk("build-tpc", str(tmp_path / "lib"))
        finally:
            shutil.move(hidden, part)
        assert code == 2
        assert error.startswith(f"mxk: error: build-tpc: not found: {text}")
        assert error.count("\n") == 1
        assert error.endswith("; run it in the serving image\n")
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--pt2", "OUT"], "--pt2 with gptoss; allowed: --pt2 with another variant;"),
        (["--variant", "glm", "--pt2", "--extra-kernel", "EXTRA", "OUT"], "--pt2 with --extra-kernel;"),
        (["--variant", "mimo", "OUT"], "invalid choice: 'mimo'"),
        (["OUT/deep/er"], "is no folder; allowed: a folder in one that exists; create it"),
        (["--extra-kernel", "NOWHERE", "OUT"], "0 files *.c; allowed: one, named as the kernel's GUID;"),
        (["--extra-kernel", "BAD", "OUT"], "the name 'mxk_w2x'; allowed: an identifier"),
        (["--extra-kernel", "BARE", "OUT"], "no glue.inc; allowed: <guid>.c, glue.inc and op.cpp;"),
        (["--extra-kernel", "EXTRA", "--extra-kernel", "EXTRA", "OUT"], "is a second kernel demo_scale;"),
        (["FULL"], "holds something else; allowed: a new folder, an empty one, or an earlier build;"),
    ],
)
def test_refused_requests(mxk: Mxk, tmp_path: pathlib.Path, arguments: list[str], said: str) -> None:
    for name, file in (("BAD", "mxk_w2x.c"), ("BARE", "k.c"), ("FULL", "thesis.txt")):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).touch()
    before = sorted(tmp_path.rglob("*"))
    places = {word: str(tmp_path / word) for word in arguments if word.split("/")[0].isupper()}
    places["EXTRA"] = str(STAND_INS / "extra")
    code, out, error = mxk("build-tpc", *(places.get(word, word) for word in arguments))
    assert (code, out) == (2, "")
    assert said in error
    assert error.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before


def test_a_failing_step_keeps_the_earlier_build(mxk: Mxk, tmp_path: pathlib.Path, gptoss: Any) -> None:
    target = tmp_path / "lib"
    shutil.copytree(gptoss.folder, target)
    before = {path.name: path.read_bytes() for path in target.iterdir()}
    code, _, error = mxk("build-tpc", "--define", "MXK_FID_INT4_PAIR=404", str(target))
    assert (code, error.count("\n")) == (2, 1)
    assert "mxk_w13xib.o: no .tpc_metadata; allowed: .text and .tpc_metadata;" in error
    extra = tmp_path / "extra"
    shutil.copytree(STAND_INS / "extra", extra)
    (extra / "demo_scale.c").write_text('#error "not today"\n')
    code, _, error = mxk("build-tpc", "--extra-kernel", str(extra), str(target))
    assert (code, error.count("\n")) == (2, 1)
    assert "tpc-clang failed (1): " in error
    assert "not today" in error
    assert {path.name: path.read_bytes() for path in target.iterdir()} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["extra", "lib"]


def test_the_target_is_replaced_at_once_or_not_at_all(tmp_path: pathlib.Path) -> None:
    for name in ("new", "target"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "MANIFEST").write_text(name)
    _install(tmp_path / "new", tmp_path / "target", tmp_path / "old")
    assert (tmp_path / "target/MANIFEST").read_text() == "new"
    with pytest.raises(FileNotFoundError):
        _install(tmp_path / "absent", tmp_path / "target", tmp_path / "older")
    assert (tmp_path / "target/MANIFEST").read_text() == "new"


def test_a_dry_run_explains_every_step_and_needs_nothing(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from mxk_compile.cli import main

    monkeypatch.setattr(toolchain, "SYSTEM", tmp_path / "empty")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["build-tpc", "--variant", "kimi", "--pt2", "--dry-run", str(tmp_path / "lib")]) == 0
    said = capsys.readouterr().out
    assert said.count("not found here") == 7
    steps = [line for line in said.splitlines() if line[0].isdigit()]
    assert [step.split(". ")[0] for step in steps] == [str(number) for number in range(1, 9)]
    for word in ("mxk_w13xt", "mxk_w2x", "libmxk_tpc.so", "libmxk_op_pt2.so", "gate 1", "gate 2", "MANIFEST"):
        assert word in said
    assert "tpc-clang -march=gaudi2 -O2 -c mxk_w13xt.c -o mxk_w13xt.o" in said
    assert list(tmp_path.iterdir()) == []


def test_defines_reach_the_kernels(
    image: Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image.enter(monkeypatch)
    hashes = []
    for index, defines in enumerate(((), ("MXK_FID_E2M1=123",))):
        work = tmp_path / str(index)
        work.mkdir()
        steps = Build(Request("gptoss", work / "x", defines=defines), Toolchain.find(), work, None)
        steps.compile_kernels()
        hashes.append(elf.code_sha256((work / "mxk_w2xb.o").read_bytes(), "k"))
    assert hashes[0] != hashes[1]


@pytest.mark.parametrize("damage", ["absent", "json", "field", "file", "library"])
def test_a_build_that_is_not_what_was_built_is_refused(
    damage: str, gptoss: Any, tmp_path: pathlib.Path
) -> None:
    folder = tmp_path / "lib"
    shutil.copytree(gptoss.folder, folder)
    manifest, library = folder / "MANIFEST", folder / "libmxk_tpc.so"
    if damage == "absent":
        manifest.unlink()
    elif damage == "json":
        manifest.write_text("{")
    elif damage == "field":
        manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"colour": "red"}))
    elif damage == "file":
        library.unlink()
    else:
        library.write_bytes(library.read_bytes() + b"\0")
    named = {"absent": "MANIFEST: it is not there", "file": "libmxk_tpc.so: it cannot be read"}
    expected = named.get(damage, "sha256" if damage == "library" else "MANIFEST: it cannot be read")
    with pytest.raises(KernelError, match=expected):
        read_manifest(folder)


def test_manifest_fields_are_those_of_the_file(gptoss: Any) -> None:
    fields = json.loads((gptoss.folder / "MANIFEST").read_text())
    assert Manifest(**fields) == read_manifest(gptoss.folder)


def test_names_that_no_assembler_takes() -> None:
    with pytest.raises(KernelError, match="the stock library exports 'a b'"):
        tables.stub_assembly(["a b"])
