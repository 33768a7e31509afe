"""The CPU kernels and what surrounds a call: floating-point state, threads, forks, memory."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from mxk_compile.kernels import MoEDesc, cpu
from mxk_compile.testing import MoECase, random_case, rel_l2

pytestmark = pytest.mark.skipif(cpu.available() is not None, reason=str(cpu.available()))

ISAS = ("baseline", "portable", "avx2", "avx512", "amx")
GPTOSS = {"activation": "swiglu_oai", "alpha": 1.702, "limit": 7.0, "bias": True, "row_order": "interleaved"}


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each instruction set in turn; settings' choice is restored."""
    if cpu._library().mxk_cpu_select(request.param.encode()):
        pytest.skip(f"no {request.param} here")
    yield request.param
    cpu._library().mxk_cpu_select(b"auto")


def run(case: MoECase) -> Tensor:
    result: Tensor = torch.ops.mxk.moe(*case.routing, *case.weights, **case.attributes)
    return result


def bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int16), b.view(torch.int16))


# ---- floating-point state ------------------------------------------------------------------------------------------


@contextlib.contextmanager
def flushing() -> Iterator[None]:
    """Flush-to-zero and denormals-are-zero, as many applications set them."""
    assert torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


@contextlib.contextmanager
def rounding(mode: int) -> Iterator[None]:
    """A rounding mode of fenv.h, in this thread."""
    libm = ctypes.CDLL(None)
    before = libm.fegetround()
    if libm.fesetround(mode):
        pytest.skip("no such rounding mode here")
    try:
        yield
    finally:
        libm.fesetround(before)


_DOWN, _UP, _TOWARDS_ZERO = (0x400, 0x800, 0xC00) if sys.platform == "linux" else (0, 0, 0)
STATES = {
    "flush": flushing,
    "down": lambda: rounding(_DOWN),
    "up": lambda: rounding(_UP),
    "towards zero": lambda: rounding(_TOWARDS_ZERO),
}
x86 = pytest.mark.skipif(os.uname().machine != "x86_64", reason="modes of x86")


def odd_cases() -> dict[str, MoECase]:
    """Calls with numbers below the normal range in each operand, brought back to size by another."""
    small = {"num_tokens": 3, "hidden_size": 64, "intermediate_size": 64, "num_experts": 3, "top_k": 2}
    plain = random_case(**small)
    tokens = dataclasses.replace(
        plain,
        hidden_states=(plain.hidden_states.double() * 2.0**-130).bfloat16(),
        w13_scale=plain.w13_scale + 125,
    )
    int4 = random_case(weight_format="uint4", zero=True, **small)
    scales = dataclasses.replace(
        int4,
        hidden_states=(int4.hidden_states.double() * 2.0**100).bfloat16(),
        w13_scale=(int4.w13_scale.double() * 2.0**-125).bfloat16(),
    )
    halves = dataclasses.replace(
        int4,
        hidden_states=int4.hidden_states * 1024,
        w13_scale=(int4.w13_scale.double() * 2.0**-12).half(),
    )
    router: dict[str, MoECase] = {}
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        down = {torch.float16: 2.0**-20, torch.bfloat16: 2.0**-127}.get(dtype, 2.0**-140)
        w2_scale = plain.w2_scale + (18 if dtype == torch.float16 else 125)
        weights = (plain.topk_weights.double() * down).to(dtype)
        router[f"router {dtype}"] = dataclasses.replace(plain, topk_weights=weights, w2_scale=w2_scale)
    outputs = dataclasses.replace(plain, w2_scale=torch.full_like(plain.w2_scale, 3))
    return {"tokens": tokens, "scales": scales, "fp16 scales": halves, **router, "outputs": outputs}


@x86
@pytest.mark.parametrize("name", odd_cases())
def test_state_of_the_caller(isa: str, name: str) -> None:
    case = odd_cases()[name]
    expected = run(case)
    reference = case.reference().double()
    assert rel_l2(expected, reference) < 6e-3
    assert reference.any()
    before = ctypes.CDLL(None).fegetround()
    for state in STATES.values():
        with state():
            result = run(case)
        assert bits(result, expected)
    assert ctypes.CDLL(None).fegetround() == before


@x86
def test_state_of_the_caller_is_given_back(isa: str) -> None:
    case = random_case()
    tiny = torch.tensor([2.0**-140])
    with flushing():
        run(case)
        assert (tiny * 1.0).item() == 0.0
    assert (tiny * 1.0).item() == 2.0**-140
    with rounding(_UP):
        run(case)
        assert ctypes.CDLL(None).fegetround() == _UP


# ---- threads -------------------------------------------------------------------------------------------------------

_COUNTING = """
import json, os, sys
import torch
from mxk_compile.kernels import cpu
from mxk_compile.testing import random_case

def tasks():
    return sorted(os.listdir("/proc/self/task"), key=int)

def affinities():
    return sorted({tuple(sorted(os.sched_getaffinity(int(task)))) for task in tasks()})

threads = torch.get_num_threads() if sys.argv[1] == "default" else int(sys.argv[1])
torch.set_num_threads(1)
case = random_case(num_tokens=9, hidden_size=480, intermediate_size=224)
run = lambda: torch.ops.mxk.moe(*case.routing, *case.weights, **case.attributes)
at_first = len(tasks())
torch.set_num_threads(threads)
if sys.argv[2] == "torch first":
    torch.randn(2048, 2048).sum(), torch.randn(1 << 22).exp()
    after_torch = len(tasks())
    result = run()
    after_ours = len(tasks())
else:
    result = run()
    after_ours = len(tasks())
    torch.randn(1 << 22).exp()
    after_torch = len(tasks())
print(json.dumps({"first": at_first, "torch": after_torch, "ours": after_ours, "affinities": affinities(),
                  "runtime": cpu.threads(), "bits": result.view(torch.int16).flatten().tolist()}))
"""


def counted(threads: str, order: str, **environment: str) -> dict[str, Any]:
    """What a fresh process counts."""
    command = [sys.executable, "-c", textwrap.dedent(_COUNTING), threads, order]
    done = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="needs /proc")
def test_threads_are_torchs_own_and_as_many() -> None:
    """No second pool beside torch's, none above torch.set_num_threads or OMP_NUM_THREADS, all where they may run."""
    torch_first = counted("3", "torch first")
    assert "gomp" in torch_first["runtime"] or "omp" in torch_first["runtime"]
    assert torch_first["ours"] == torch_first["torch"]
    ours_first = counted("3", "ours first")
    assert ours_first["ours"] == ours_first["first"] + 2
    one = counted("1", "ours first")
    assert one["ours"] == one["first"]
    limited = counted("default", "ours first", OMP_NUM_THREADS="1")
    assert limited["ours"] == limited["first"]
    first_core = sorted(os.sched_getaffinity(0))[0]
    bound = counted("2", "ours first", GOMP_CPU_AFFINITY=str(first_core))
    assert [first_core] in bound["affinities"]
    assert len({tuple(found["bits"]) for found in (torch_first, ours_first, one, limited, bound)}) == 1


def test_nested_in_a_parallel_region(isa: str) -> None:
    """Called by the threads of a region of torch's pool, each call runs on its own thread."""
    case = random_case(num_tokens=9, hidden_size=480, intermediate_size=224)
    desc = MoEDesc.from_call(*case.routing, *case.weights, **case.attributes)
    expected = cpu.Prepared(desc, *case.routing, *case.weights)(*case.routing)
    results: list[Tensor] = []
    names: set[int] = set()

    def body(_: object) -> None:
        names.add(threading.get_native_id())
        results.append(cpu.Prepared(desc, *case.routing, *case.weights)(*case.routing))

    callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(body)
    ctypes.CDLL(cpu.threads()).GOMP_parallel(callback, None, 2, 0)
    assert len(results) == len(names) == 2
    assert all(bits(result, expected) for result in results)


class Calls(torch.utils.data.Dataset[Tensor]):
    """Results of the op, computed where the item is asked for."""

    def __init__(self, cases: list[MoECase]) -> None:
        self.cases = cases

    def __len__(self) -> int:
        return len(self.cases)

    def __getitem__(self, index: int) -> Tensor:
        return run(self.cases[index])


def test_data_loader_workers() -> None:
    """Forked from a process whose pool has run: every worker computes the same, alone, and ends."""
    cases = [random_case(num_tokens=count, hidden_size=480, intermediate_size=224) for count in (1, 9, 3, 5)]
    expected = [run(case) for case in cases]
    loader = torch.utils.data.DataLoader(Calls(cases), batch_size=None, num_workers=2, timeout=200)
    for _ in range(2):
        assert all(bits(result, other) for result, other in zip(loader, expected, strict=True))


def test_thread_counts_agree_and_may_change_between_calls(isa: str) -> None:
    """More threads than cores, than rows and than tokens too."""
    case = random_case(num_tokens=3, hidden_size=64, intermediate_size=32, num_experts=2, top_k=1, **GPTOSS)
    before = torch.get_num_threads()
    try:
        results = []
        for count in (1, 2, 3, 16, 2, 1):
            torch.set_num_threads(count)
            results.append(run(case))
    finally:
        torch.set_num_threads(before)
    assert all(bits(result, results[0]) for result in results)


# ---- memory --------------------------------------------------------------------------------------------------------


def scratch(case: MoECase, threads: int) -> int:
    """Bytes that a call takes on a thread that never made one."""
    found: list[int] = []

    def work() -> None:
        torch.set_num_threads(threads)
        run(case)
        found.append(cpu.scratch_bytes())
        run(case)
        found.append(cpu.scratch_bytes())

    before = torch.get_num_threads()
    worker = threading.Thread(target=work)
    worker.start()
    worker.join()
    torch.set_num_threads(before)
    assert found[0] == found[1]  # kept, and not grown
    return found[0]


@pytest.mark.parametrize(("top_k", "most_of_issue_bound"), [(1, 1.0), (4, 1.5)])
def test_scratch_is_bounded(top_k: int, most_of_issue_bound: float) -> None:
    """fp32 rows of tokens and of routes, 256 bytes a route and thread pair, and a constant; the same again from 4096
    routes on.
    """
    if cpu._library().mxk_cpu_select(b"avx2"):
        pytest.skip("no avx2 here")
    try:
        size, threads = 992, 2
        layer = random_case(
            num_tokens=1, num_experts=5, top_k=top_k, hidden_size=size, intermediate_size=size
        )
        seen = {}
        for num_tokens in (1, 32, 256):
            more = random_case(
                num_tokens=num_tokens, num_experts=5, top_k=top_k, hidden_size=size, intermediate_size=32
            )
            case = dataclasses.replace(
                layer,
                hidden_states=more.hidden_states,
                topk_ids=more.topk_ids,
                topk_weights=more.topk_weights,
            )
            row = 4 * (size + 160)  # rounded up to steps of 128 values, and an odd number of cache lines
            rows = num_tokens * (1 + top_k) * row + num_tokens * top_k * threads * 192
            seen[num_tokens] = scratch(case, threads)
            assert seen[num_tokens] <= rows + (16 << 10) + threads * (100 << 10)
        assert seen[256] <= most_of_issue_bound * 256 * 2 * size * 8
        tiny = random_case(
            num_tokens=5000 // top_k, num_experts=5, top_k=top_k, hidden_size=32, intermediate_size=32
        )
        tall = random_case(
            num_tokens=9000 // top_k, num_experts=5, top_k=top_k, hidden_size=32, intermediate_size=32
        )
        assert scratch(tiny, threads) == scratch(tall, threads)
    finally:
        cpu._library().mxk_cpu_select(b"auto")
