"""Waiting for a peer: what is said meanwhile, and that a wait has an end."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from mxk_compile.bench import patience as module
from mxk_compile.bench.patience import patience

WAITS_FOR_EVER = """
import sys, time
from mxk_compile.bench import patience
patience._SAY_SECONDS, patience._END_SECONDS = 0.05, 0.2
print("a row", flush=True)
with patience.patience("peer: a call", lambda line: print(line, file=sys.stderr)):
    time.sleep(60)
"""


def test_it_says_that_it_waits_until_the_block_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SAY_SECONDS", 0.05)
    said: list[str] = []
    with patience("peer: a call", said.append):
        deadline = time.monotonic() + 10
        while len(said) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
    count = len(said)
    assert count >= 2
    assert said[0] == "peer: a call: since 0 s; a peer repacks and compiles at its first call"
    time.sleep(0.2)
    assert len(said) == count
    with pytest.raises(ZeroDivisionError), patience("peer", said.append):
        _ = 1 / 0


def test_what_never_ends_is_given_up() -> None:
    done = subprocess.run([sys.executable, "-c", WAITS_FOR_EVER], capture_output=True, text=True, timeout=50)
    assert (done.returncode, done.stdout) == (1, "a row\n")
    assert done.stderr.splitlines()[-1] == "peer: a call: no row within 0 s, given up; rows so far stand"
