"""Switches, defaults, log lines, and what the environment is turned into: all of it, or nothing."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest

from mxk_compile import lazy
from mxk_compile.errors import KernelError, SettingsError
from mxk_compile.lazy.environment import Options, prepare

VERSION = "gptoss-v0.2.0-12345678"


def test_off_by_default() -> None:
    for switch in ({}, {"MXFP4_TPC_MOE": "0"}, {"MXFP4_TPC_MOE": ""}):
        environ = {"PT_HPU_RECIPE_CACHE_CONFIG": "/cache,true,1024", **switch}
        before = dict(environ)
        assert prepare(environ) is None
        assert environ == before


def test_what_is_set(environ: dict[str, str]) -> None:
    environ |= {"PT_HPU_RECIPE_CACHE_CONFIG": "/tmp/recipes/,false,16384", "PT_HPU_LAZY_ACC_PAR_MODE": "1"}
    folder = Path(environ["MXFP4_TPC_MOE_LIB"])
    before = dict(environ)
    assert prepare(environ) == Options(32, folder, VERSION)
    assert {name: value for name, value in environ.items() if before.get(name) != value} == {
        "GC_KERNEL_PATH": str(folder / "libmxk_tpc.so"),
        "PT_HPU_LAZY_ACC_PAR_MODE": "0",
        "PT_HPU_RECIPE_CACHE_CONFIG": f"/tmp/recipes_mxk-{VERSION},false,16384",
    }


def test_a_child_process_changes_nothing_more(environ: dict[str, str], said: Callable[[], list[str]]) -> None:
    environ["PT_HPU_RECIPE_CACHE_CONFIG"] = "/tmp/recipes"
    prepare(environ)
    once = dict(environ)
    prepare(environ)
    assert environ == once
    assert environ["PT_HPU_RECIPE_CACHE_CONFIG"] == f"/tmp/recipes_mxk-{VERSION}"
    assert said() == []


@pytest.mark.parametrize(("given", "most"), [("1", 1), ("32", 32), ("7", 7)])
def test_token_cap(given: str, most: int, environ: dict[str, str]) -> None:
    options = prepare({**environ, "MXFP4_TPC_MOE_MAX_TOKENS": given})
    assert options is not None
    assert options.max_tokens == most


def test_listed_libraries(environ: dict[str, str], said: Callable[[], list[str]]) -> None:
    folder = Path(environ["MXFP4_TPC_MOE_LIB"])
    stock = folder.parent / "libtpc_kernels.so"
    environ["GC_KERNEL_PATH"] = f"{stock}:/opt/other/libcustom.so:"
    prepare(environ)
    assert environ["GC_KERNEL_PATH"] == str(folder / "libmxk_tpc.so")
    assert said() == [
        f"GC_KERNEL_PATH listed /opt/other/libcustom.so: not forwarded, only the stock library {stock} is; "
        "unset MXFP4_TPC_MOE to use them"
    ]


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("MXFP4_TPC_MOE", "on", "MXFP4_TPC_MOE: 'on'; allowed: 0, 1; correct or unset it"),
        ("MXFP4_TPC_MOE_MAX_TOKENS", "33", "MXFP4_TPC_MOE_MAX_TOKENS: '33'; allowed: 1 to 32; correct or unset it"),
        ("MXFP4_TPC_MOE_MAX_TOKENS", "0", "MXFP4_TPC_MOE_MAX_TOKENS: '0'; allowed: 1 to 32; correct or unset it"),
        ("MXFP4_TPC_MOE_MAX_TOKENS", "x", "MXFP4_TPC_MOE_MAX_TOKENS: 'x'; allowed: 1 to 32; correct or unset it"),
        ("MXFP4_TPC_MOE_MAX_TOKENS", "٣", "MXFP4_TPC_MOE_MAX_TOKENS: '٣'; allowed: 1 to 32; correct or unset it"),
        (
            "PT_HPU_LAZY_MODE", "0",
            "PT_HPU_LAZY_MODE: '0'; allowed: 1; set it: the hook replaces a call of lazy mode; "
            "in compiled mode the pass does it",
        ),
        (
            "HPU_MXFP4_NATIVE", None,
            "HPU_MXFP4_NATIVE: ''; allowed: 1; set it: without it vllm-gaudi unpacks the experts when it loads them",
        ),
    ],
)  # fmt: skip
def test_wrong_values(name: str, value: str | None, error: str, environ: dict[str, str]) -> None:
    if value is None:
        del environ[name]
    else:
        environ[name] = value
    before = dict(environ)
    with pytest.raises(SettingsError) as raised:
        prepare(environ)
    assert str(raised.value) == error
    assert environ == before


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"variant": "glm"}, "a build of variant 'glm'; allowed: 'gptoss'; build that variant"),
        ({"files": {}}, "MANIFEST lacks libmxk_tpc.so; allowed: a complete build; build it again"),
        ({"files": {"libmxk_tpc.so": "0" * 64}}, "sha256"),
        ({"files": {"libmxk_tpc.so": 7}}, "cannot be read: a name, version or hash is no printable text"),
        ({"version": 1}, "cannot be read: a name, version or hash is no printable text"),
        ({"version": "1\x1b[31m"}, "cannot be read: a name, version or hash is no printable text"),
        ({"stock": []}, "cannot be read"),
        ({"stock": {}}, "a build that forwards to '', which is not there"),
        (
            {"stock": {"path": "/no/libtpc_kernels.so"}},
            "forwards to '/no/libtpc_kernels.so', which is not there",
        ),
    ],
)
def test_builds_that_do_not_do(
    changes: dict[str, object], error: str, environ: dict[str, str], make_build: Callable[..., Path]
) -> None:
    environ["MXFP4_TPC_MOE_LIB"] = str(make_build("other", **changes))
    before = dict(environ)
    with pytest.raises(KernelError) as raised:
        prepare(environ)
    assert error in str(raised.value)
    assert environ == before


def test_default_folder(environ: dict[str, str]) -> None:
    del environ["MXFP4_TPC_MOE_LIB"]
    with pytest.raises(KernelError, match=r"^/opt/mxfp4-moe/lib/MANIFEST: it is not there"):
        prepare(environ)


def test_a_relative_folder_holds_for_processes_of_other_folders(
    environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(environ["MXFP4_TPC_MOE_LIB"])
    monkeypatch.chdir(folder.parent)
    environ["MXFP4_TPC_MOE_LIB"] = folder.name
    options = prepare(environ)
    assert options is not None
    assert options.folder == folder
    assert environ["GC_KERNEL_PATH"] == str(folder / "libmxk_tpc.so")


def test_a_folder_that_would_be_two_paths(environ: dict[str, str], make_build: Callable[..., Path]) -> None:
    environ["MXFP4_TPC_MOE_LIB"] = str(make_build("lib:new"))
    before = dict(environ)
    with pytest.raises(
        SettingsError, match="MXFP4_TPC_MOE_LIB: .*split at the colon; allowed: a folder without one"
    ):
        prepare(environ)
    assert environ == before


def test_an_open_device_is_too_late(environ: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("torch.hpu")
    module.is_initialized = lambda: True  # type: ignore[attr-defined]
    prepared = dict(environ)
    prepare(prepared)
    monkeypatch.setitem(sys.modules, "torch.hpu", module)
    before = dict(environ)
    with pytest.raises(
        KernelError, match="the device is open, GC_KERNEL_PATH, PT_HPU_LAZY_ACC_PAR_MODE come too late"
    ):
        prepare(environ)
    assert environ == before
    assert prepare(prepared) is not None  # nothing is left to change


def test_start_never_raises_and_says_why(
    environ: dict[str, str], said: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lazy, "_options", None)
    assert not lazy.start({})
    assert lazy.start(environ)
    assert not lazy.start({**environ, "MXFP4_TPC_MOE": "yes"})
    assert not lazy.attach(object())
    assert said() == [
        f"MXFP4 TPC MoE installed: mxk_tpc {VERSION}",
        "MXFP4 TPC MoE stays off, the stock op runs: MXFP4_TPC_MOE: 'yes'; allowed: 0, 1; correct or unset it",
    ]
