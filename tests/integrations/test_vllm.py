"""The vLLM plugin's entry point, without vLLM: when it stays out of the way, and what it says."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

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


@pytest.mark.usefixtures("switched_on")
def test_two_copies_stay_stock(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    assert vllm.two_copies() is None
    (tmp_path / "mxk_compile").mkdir()
    (tmp_path / "mxk_compile" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(vllm, "version", lambda: "0.32.0")
    assert vllm.prepare() is None
    vllm.register()
    (record,) = caplog.records
    assert record.getMessage().startswith("mxk_compile: two copies of mxk_compile are installed, ")
    assert str(tmp_path / "mxk_compile") in record.getMessage()
    assert record.getMessage().endswith("; uninstall one; MoE layers stay stock")
    # The same one twice, through a link, is one.
    (tmp_path / "mxk_compile" / "__init__.py").unlink()
    (tmp_path / "mxk_compile").rmdir()
    (tmp_path / "mxk_compile").symlink_to(Path(vllm.__file__).parents[1])
    assert vllm.two_copies() is None


def test_the_entry_points_import_no_vllm() -> None:
    command = (
        "import sys, mxk_compile.integrations.vllm as m; m.prepare(); m.register(); "
        "sys.exit('vllm' in sys.modules or 'mxk_compile.integrations.vllm_gaudi' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", command], check=False).returncode == 0
