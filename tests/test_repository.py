"""Things that rot unseen: documented commands, versions, names of machines, package contents, tests that never run."""

from __future__ import annotations

import ast
import dataclasses
import importlib.metadata
import importlib.resources
import pathlib
import re
import subprocess
from collections.abc import Iterator

import pytest

import mxk_compile
from mxk_compile.settings import Settings

ROOT = pathlib.Path(__file__).parent.parent
PACKAGE = ROOT / "mxk_compile"
README = (ROOT / "README.md").read_text()

LONG_FILES: dict[str, str] = {}
"""Files that may have more than 400 lines, and why."""


def tracked_files() -> list[pathlib.Path]:
    """Files of the repository; where it is no git checkout, nothing says which those are."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    names = listed.stdout.split("\0")
    return [ROOT / name for name in names if name and (ROOT / name).is_file()]


def text_files() -> Iterator[tuple[str, str]]:
    """Path below the root and text of each tracked text file."""
    for path in tracked_files():
        if path.suffix in (".safetensors", ".png", ".pt") or path.stat().st_size > 2**20:
            continue
        yield path.relative_to(ROOT).as_posix(), path.read_text()


def commands(text: str) -> list[str]:
    """Lines of the shell blocks of a Markdown text, without comments."""
    blocks = re.findall(r"```(?:sh|bash|console)\n(.*?)```", text, re.DOTALL)
    return [line.split("  #")[0].strip() for block in blocks for line in block.splitlines() if line.strip()]


def test_documented_make_commands_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    documents = [path for path in tracked_files() if path.suffix == ".md"]
    shown = {
        line.split()[1]
        for path in documents
        for line in commands(path.read_text())
        if line.startswith("make ")
    }
    named = {target for path in documents for target in re.findall(r"`make ([a-z]+)", path.read_text())}
    assert {"demo", "test"} <= {line.split()[1] for line in commands(README) if line.startswith("make ")}
    assert shown | named <= targets
    assert " test\n" in (ROOT / ".ci/run").read_text(), "CI runs the README's test command"


def test_documented_subcommands_exist(capsys: pytest.CaptureFixture[str]) -> None:
    from mxk_compile.cli import main

    with pytest.raises(SystemExit):
        main(["--help"])
    known = re.search(r"\{(.+?)\}", capsys.readouterr().out)
    assert known is not None
    used = {name for line in commands(README) for name in re.findall(r"\bmxk ([a-z]+)", line)}
    assert used <= set(known.group(1).split(","))


def test_settings_are_documented() -> None:
    from mxk_compile.backend import _OPTIONS
    from mxk_compile.settings import _VARIABLES

    assert {field.name for field in dataclasses.fields(Settings)} == set(_VARIABLES)
    for name in (*_VARIABLES.values(), *_OPTIONS):
        assert f"`{name}`" in README, f"README.md says nothing about {name}"


def test_documented_python_names_exist() -> None:
    for name in set(re.findall(r"\bmxk_compile\.([a-z_]+)\(", README)):
        assert name in mxk_compile.__all__


def test_python_of_the_readme_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    for code, said in zip(blocks, ("6 of 6 MoE nodes fused", "1 of 1 MoE nodes fused"), strict=True):
        quick = code.replace('backend="mxk"', 'backend="mxk", options={"inner_backend": "aot_eager"}')
        assert quick != code
        exec(compile(quick, "README.md", "exec"), {})
        assert said in capsys.readouterr().out


def test_links_between_documents_lead_somewhere() -> None:
    for path in tracked_files():
        if path.suffix != ".md":
            continue
        for target in re.findall(r"\]\((?!https?:|mailto:|#)([^)#\s]+)", path.read_text()):
            assert (path.parent / target).exists(), f"{path.relative_to(ROOT)} links to {target}"


def test_tests_named_in_documents_exist() -> None:
    for path in tracked_files():
        if path.suffix != ".md":
            continue
        for file, name in re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", path.read_text()):
            assert (ROOT / file).is_file(), f"{path.name} names {file}"
            assert f"def {name}" in (ROOT / file).read_text(), f"{path.name} names {file}::{name}"


def test_version_is_in_one_place() -> None:
    version = mxk_compile.__version__
    assert importlib.metadata.version("mxk-compile") == version, (
        "installed from other sources: run `make test`"
    )
    holders = [
        name for name, text in text_files() if name.endswith((".py", ".toml")) and f'"{version}"' in text
    ]
    assert holders == ["mxk_compile/version.py"]
    assert f"[{version}]" in (ROOT / "CHANGELOG.md").read_text()


def test_no_machine_and_no_registry_is_named() -> None:
    # Written in parts, as this file is searched too.
    paths = "|".join(("work", "root", "home", "Users"))
    hosts = "|".join(("pypi", "pythonhosted", "download.pytorch", "registry.npmjs", "conda.anaconda", "ghcr"))
    named = re.compile(rf"(?<![\w.$}}])/(?:{paths})/\w|\b(?:{hosts})\.(?:org|com|io|cloud|net)\b")
    found = [f"{name}: {match.group()}" for name, text in text_files() for match in named.finditer(text)]
    assert found == []


def test_files_are_short() -> None:
    # Tests may be longer: they are lists of cases, read one at a time.
    for name, text in text_files():
        if name.endswith((".py", ".cpp", ".h")) and name not in LONG_FILES:
            assert text.count("\n") <= (700 if name.startswith("tests/") else 400), name


def test_package_holds_its_data() -> None:
    files = importlib.resources.files("mxk_compile")
    assert files.joinpath("py.typed").is_file()
    data = re.search(
        r"^mxk_compile = \[(.*?)\]", (ROOT / "pyproject.toml").read_text(), re.MULTILINE | re.DOTALL
    )
    assert data is not None
    for pattern in re.findall(r'"(.+?)"', data.group(1)):
        if not pattern.endswith(".so"):  # built, and absent where there was no compiler
            assert list(PACKAGE.glob(pattern)), f"package data {pattern} matches nothing"
    native = {
        path.suffix
        for path in PACKAGE.rglob("*")
        if path.suffix in (".cpp", ".h", ".inc", ".c", ".cu", ".cuh")
    }
    assert native <= {pathlib.PurePath(pattern).suffix for pattern in re.findall(r'"(.+?)"', data.group(1))}


def test_entry_points_resolve() -> None:
    import torch._dynamo

    assert "mxk" in torch._dynamo.list_backends()
    for group, name in (("torch_dynamo_backends", "mxk"), ("console_scripts", "mxk")):
        (entry_point,) = importlib.metadata.entry_points(group=group, name=name)
        assert callable(entry_point.load())


def test_only_settings_reads_the_environment() -> None:
    sources = {
        name: text for name, text in text_files() if name.startswith("mxk_compile/") and name.endswith(".py")
    }
    readers = {name for name, text in sources.items() if re.search(r"os\.environ|os\.getenv", text)}
    assert readers == {"mxk_compile/settings.py"}


@pytest.mark.parametrize("path", sorted((ROOT / "tests").rglob("*.py")), ids=lambda path: path.stem)
def test_every_test_is_collected(path: pathlib.Path) -> None:
    tree = ast.parse(path.read_text())
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    tests = [function for function in functions if function.name.startswith("test_")]
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name.startswith("Test")]
    if not path.name.startswith("test_"):
        assert not tests, "pytest does not collect a file of this name"
        return
    assert tests or classes, "a file without tests"
    names = [function.name for function in functions]
    assert len(names) == len(set(names)), "a later function of the same name hides an earlier one"
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    for function in functions:
        known = function in tests or function.decorator_list or function.name in used
        assert known, f"{function.name} is neither a test nor used by one"
