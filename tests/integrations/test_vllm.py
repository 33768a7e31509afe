"""The vLLM plugin's entry point, without vLLM: when it stays out of the way, and what it says."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest

from mxk_compile.integrations import vllm
from mxk_compile.settings import Settings


@pytest.fixture
def switched_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "settings", Settings(vllm=True))


def test_off_by_default(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(vllm, "version", lambda: pytest.fail("asked for the version"))
    vllm.register()
    assert not caplog.records


@pytest.mark.usefixtures("switched_on")
@pytest.mark.parametrize(
    ("release", "reason"),
    [
        (None, "vLLM is not installed"),
        ("0.31.4", "vLLM 0.31.4 is not known; known: 0.32.x"),
        ("1.0.0", "vLLM 1.0.0 is not known; known: 0.32.x"),
    ],
)
def test_other_releases_stay_stock(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, release: str | None, reason: str
) -> None:
    monkeypatch.setattr(vllm, "version", lambda: release)
    with caplog.at_level(logging.WARNING):
        vllm.register()
    assert [record.getMessage() for record in caplog.records] == [
        f"mxk_compile: {reason}; MoE layers stay stock"
    ]


@pytest.mark.usefixtures("switched_on")
def test_a_vllm_without_the_interfaces_stays_stock(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(vllm, "version", lambda: "0.32.0")
    monkeypatch.setitem(sys.modules, "vllm", None)  # importing it raises ImportError
    with caplog.at_level(logging.WARNING):
        vllm.register()
    (record,) = caplog.records
    assert record.getMessage().startswith("mxk_compile: vLLM 0.32.0 lacks what the plugin builds on: ")


def test_the_entry_point_imports_no_vllm() -> None:
    command = "import sys, mxk_compile.integrations.vllm as m; m.register(); sys.exit('vllm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", command], check=False).returncode == 0
