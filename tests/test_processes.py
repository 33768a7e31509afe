"""A17 and its kin: several processes, forked and spawned, threads; a missing or broken kernel library.

The library is built when the package is installed, so there is no compile cache that a killed process could leave
locked: what remains is to start, always, within a bounded time.
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from mxk_compile.kernels import cpu
from mxk_compile.testing import random_case

LIMIT_S = 300  # bound on every process started here, also where others have the cores

_CALL = """
    import hashlib
    import torch
    import mxk_compile
    from mxk_compile.kernels import cpu
    from mxk_compile.ops.stock import call_mxfp4
    from mxk_compile.testing import random_case

    {before}
    case = random_case(hidden_size=256, intermediate_size=160, top_k=3)
    for _ in range(3):
        result = case.fused()
    print(hashlib.sha256(repr(result.view(torch.int16).tolist()).encode()).hexdigest())
"""


def run(before: str = "", **environment: str) -> subprocess.Popen[str]:
    code = textwrap.dedent(_CALL.format(before=before))
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> tuple[str, str]:
    out, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, err
    return out.strip(), err


def test_four_processes_at_once() -> None:
    results = [finish(process)[0] for process in [run() for _ in range(4)]]
    assert len(set(results)) == 1


def test_no_compiler_at_run_time() -> None:
    """PATH without a compiler, and no writable home: nothing of ours is built or written at run time."""
    expected, _ = finish(run())
    result, err = finish(run(PATH="/nonexistent", HOME="/nonexistent", CC="/nonexistent", CXX="/nonexistent"))
    assert result == expected
    assert "mxk" not in err


@pytest.mark.parametrize(
    ("before", "text"),
    [
        ("cpu.LIBRARY = cpu.LIBRARY.with_name('absent.so')", "absent.so was not built"),
        ("import pathlib; cpu.LIBRARY = pathlib.Path(cpu.__file__)", "cannot be loaded"),
    ],
)
def test_without_library_the_reference_runs_and_says_so_once(before: str, text: str) -> None:
    _, err = finish(run(before))
    assert err.count("mxk::moe runs its torch reference") == 1
    assert text in err


def test_graph_without_library_stays_stock() -> None:
    before = """
    cpu.LIBRARY = cpu.LIBRARY.with_name('absent.so')
    c = random_case()
    def call(x, ids, w, *stacks):
        return call_mxfp4((x, ids, w), *[s.unbind(0) for s in stacks])
    report = mxk_compile.explain(call, *c.routing, *c.weights[:4])
    assert report.num_fused == 0 and "absent.so" in report.nodes[0].reason, str(report)
    """
    _, err = finish(run(before))
    assert err.count("stays stock") == 1


def test_threads() -> None:
    cases = [random_case(seed=seed, num_tokens=seed + 1, hidden_size=256) for seed in range(6)]
    expected = [case.fused() for case in cases]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(10):
            results = list(pool.map(lambda case: case.fused(), cases))
            assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))


@pytest.mark.parametrize("first_call", ["in the parent", "in the child"])
@pytest.mark.parametrize("how", ["fork", "spawn"])
def test_children(how: str, first_call: str, tmp_path: pathlib.Path) -> None:
    """A child that inherits a used thread pool (fork) or none (spawn) computes the same, and does not hang."""
    code = f"""
    import torch, torch.multiprocessing as mp
    import mxk_compile
    from mxk_compile.testing import random_case

    def child(queue, case):
        if "{how}" == "spawn":
            case = random_case(num_tokens=8, hidden_size=256)
        # tolist: torch's own parallel ops are what must not run in a forked child
        queue.put(case.fused().tolist())

    if __name__ == "__main__":
        torch.set_num_threads(2)
        torch.ones(500, 500) @ torch.ones(500, 500)  # the pool that the children do not inherit
        case = random_case(num_tokens=8, hidden_size=256)
        if "{first_call}" == "in the parent":
            case.fused()
        context = mp.get_context("{how}")
        queue = context.Queue()
        arguments = (queue, case if "{how}" == "fork" else None)
        children = [context.Process(target=child, args=arguments) for _ in range(2)]
        for c in children: c.start()
        results = [queue.get(timeout=200) for _ in children]
        for c in children: c.join(200)
        assert results == [case.fused().tolist()] * 2
    """
    script = tmp_path / "children.py"  # spawn imports it again: it must be a file
    script.write_text(textwrap.dedent(code))
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stderr


def test_library_is_built_here() -> None:
    """These tests would all pass with the reference alone: say so if the kernels are missing."""
    assert cpu.available() is None
