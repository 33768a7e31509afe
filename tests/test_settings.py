"""Settings: what each variable and option accepts, what it refuses, and how it says so."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest
from scripts import MXK

from mxk_compile.errors import SettingsError
from mxk_compile.settings import CPU_ISAS, Settings, from_environment

GOOD = [
    ("MXK_MAX_TOKENS", "max_tokens", "0", 0),
    ("MXK_MAX_TOKENS", "max_tokens", " 64 ", 64),
    ("MXK_MAX_TOKENS", "max_tokens", "any", None),
    *(("MXK_CPU_ISA", "cpu_isa", isa, isa) for isa in CPU_ISAS),
    ("MXK_DUMP", "dump_dir", "graphs/of this", "graphs/of this"),
    ("MXK_DUMP", "dump_dir", "", None),
    ("MXK_CACHE_DIR", "cache_dir", "~/kernels", "~/kernels"),
    ("MXK_CUDA_SCHEDULE", "cuda_schedule", "prefill:64/128", "prefill:64/128"),
    ("MXK_CUDA_SCHEDULE", "cuda_schedule", "", None),
    ("MXK_VLLM", "vllm", "1", True),
    ("MXK_VLLM", "vllm", "0", False),
    ("MXK_VLLM_HUMMING", "vllm_humming", "1", True),
]
BAD = [
    *(("MXK_MAX_TOKENS", "max_tokens", value) for value in ("-1", "", "1.5", "1e3", "none", "32 tokens")),
    *(("MXK_MAX_TOKENS", "max_tokens", value) for value in ("٣٢", "1_0", "+8", "9" * 5000)),
    *(("MXK_CPU_ISA", "cpu_isa", value) for value in ("AVX2", "avx1024", "")),
    *(("MXK_VLLM", "vllm", value) for value in ("yes", "", "01")),
]


def test_defaults() -> None:
    assert from_environment({}) == Settings() == Settings(max_tokens=32, cpu_isa="auto", dump_dir=None)


def test_cache_folder_is_where_the_user_keeps_caches() -> None:
    assert from_environment({"XDG_CACHE_HOME": "/caches"}).cache_dir == "/caches/mxk"
    assert from_environment({"XDG_CACHE_HOME": "/caches", "MXK_CACHE_DIR": "/mine"}).cache_dir == "/mine"
    assert from_environment({"XDG_CACHE_HOME": ""}).cache_dir == "~/.cache/mxk"


@pytest.mark.parametrize(("variable", "name", "value", "expected"), GOOD)
def test_good_values(variable: str, name: str, value: str, expected: Any) -> None:
    from_variable = from_environment({variable: value, "PATH": "/usr/bin"})
    assert getattr(from_variable, name) == expected
    assert from_variable == Settings().replace(**{name: value})


@pytest.mark.parametrize(("variable", "name", "value"), BAD)
def test_bad_values_name_the_variable_and_the_value(variable: str, name: str, value: str) -> None:
    with pytest.raises(SettingsError) as caught:
        from_environment({variable: value})
    text = str(caught.value)
    assert text.startswith(f"{variable}: {value!r}; allowed: ")
    assert "\n" not in text
    with pytest.raises(SettingsError, match=f"^mxk option {name}: "):
        Settings().replace(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [("max_tokens", True), ("max_tokens", 1.5), ("max_tokens", [32]), ("cpu_isa", None), ("dump_dir", 5)],
)
def test_options_of_a_wrong_type_are_refused(name: str, value: Any) -> None:
    with pytest.raises(SettingsError, match=f"^mxk option {name}: "):
        Settings().replace(**{name: value})


def test_options_take_python_values() -> None:
    changed = Settings().replace(max_tokens=8, dump_dir=pathlib.Path("graphs"))
    assert changed == Settings(max_tokens=8, dump_dir="graphs")
    assert Settings().replace(max_tokens=None).max_tokens is None


def test_unknown_names_are_refused_with_the_known_ones() -> None:
    with pytest.raises(
        SettingsError, match=r"^MXK_MAX_TOKEN: '8'; allowed: .*MXK_MAX_TOKENS.*; correct the name"
    ):
        from_environment({"MXK_MAX_TOKEN": "8"})
    with pytest.raises(
        SettingsError, match=r"^mxk option: 'max_token'; allowed: .*max_tokens.*; correct the name"
    ):
        Settings().replace(max_token=8)


def test_variables_of_others_are_ignored() -> None:
    assert from_environment({"MXK": "1", "MXKMAX": "1", "mxk_dump": "x"}) == Settings()


def test_settings_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Settings().max_tokens = 8  # type: ignore[misc]


def test_identity_holds_what_changes_a_graph() -> None:
    unrelated = Settings(
        dump_dir="graphs",
        vllm=True,
        vllm_humming=True,
        gaudi_lib="lib",
        cache_dir="kernels",
        cuda_schedule="prefill:64",
    )
    assert Settings().identity() == unrelated.identity()
    different = (
        *(Settings(), Settings(max_tokens=8), Settings(max_tokens=None), Settings(cpu_isa="avx2")),
        Settings(cuda_unmeasured=True),
    )
    assert len({settings.identity() for settings in different}) == 5
    covered = {"max_tokens", "cpu_isa", "dump_dir", "cache_dir", "cuda_schedule", "vllm", "vllm_humming"}
    covered |= {"gaudi_lib", "cuda_unmeasured"}
    assert {field.name for field in dataclasses.fields(Settings)} == covered, (
        "decide whether the new one is part of it"
    )


def test_wrong_environment_stops_the_import_with_the_reason() -> None:
    command = [sys.executable, "-c", "import mxk_compile"]
    result = subprocess.run(
        command, env={**os.environ, "MXK_MAX_TOKENS": "many"}, capture_output=True, text=True, check=False
    )
    assert result.returncode != 0
    assert result.stderr.splitlines()[-1].endswith(
        "SettingsError: MXK_MAX_TOKENS: 'many'; allowed: an integer >= 0, or 'any'; correct or unset it"
    )


@pytest.mark.parametrize(
    ("variable", "said"),
    [
        ("MXK_MAX_TOKENS", "MXK_MAX_TOKENS: 'many'; allowed: an integer >= 0, or 'any'; correct or unset it"),
        ("MXK_NO_SUCH", "MXK_NO_SUCH: 'many'; allowed: "),
    ],
)
def test_a_wrong_variable_is_one_line_of_the_command(variable: str, said: str) -> None:
    run = subprocess.run(
        [*MXK, "explain", "nowhere"],
        env={**os.environ, variable: "many"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr.startswith(f"mxk: error: {said}")
    assert run.stderr.count("\n") == 1
