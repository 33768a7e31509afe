"""The host side of a launch: what the driver reads, with a driver that only notes it; on a GPU, that nothing waits."""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from mxk_compile.errors import KernelError
from mxk_compile.kernels.cuda import build, driver
from mxk_compile.ops.moe import WEIGHTS
from mxk_compile.testing import random_case

CONFIG = struct.Struct(
    "=7I4xQQI4x"
)  # CUlaunchConfig: grid, block, shared bytes, stream, attributes, their number
ATTRIBUTE = struct.Struct("=I4xi60x")
COOPERATIVE, OVERLAP = 2, 6  # of CUlaunchAttributeID, as cuda.h numbers them
LAYOUT = struct.Struct("=Q2iQ")
CHANGING = ((0, struct.Struct("=Q")), (16, struct.Struct("=Q")))
SCHEDULES = ("decode:max_routes=64", "prefill:16/32")
Force = Callable[[str], None]


class Driver:
    """Notes configuration, kernel and argument of each launch."""

    def __init__(self, status: int = 0) -> None:
        self.status = status
        self.launches: list[tuple[Any, ...]] = []

    def cuLaunchKernelEx(self, config: Any, kernel: Any, parameters: Any, extra: None) -> int:
        *sizes, stream, attributes, count = CONFIG.unpack(ctypes.string_at(config.value, CONFIG.size))
        found = [
            ATTRIBUTE.unpack(ctypes.string_at(attributes + 72 * index, ATTRIBUTE.size))
            for index in range(count)
        ]
        argument = LAYOUT.unpack(ctypes.string_at(parameters[0], LAYOUT.size))
        self.launches.append((tuple(sizes), stream, found, kernel.value, argument))
        return self.status


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Driver:
    if build.missing() is not None:
        pytest.skip(str(build.missing()))
    fake = Driver()
    monkeypatch.setattr(driver, "_driver", lambda: fake)
    return fake


def test_the_driver_reads_what_was_asked_for(launched: Driver) -> None:
    kernel = driver.Kernel(77, LAYOUT, CHANGING, 384, 1024, overlap=True, cooperative=True)
    argument = LAYOUT.pack(0, 5, -6, 0)
    kernel.launch(0, 1234, 132, argument, (1 << 40,), (9,))
    kernel.launch(0, 1234, 132, argument, (2,), (3,))
    kernel.launch(0, 8, 7, LAYOUT.pack(0, 1, 1, 0), (4,), (5,))
    attributes = [(OVERLAP, 1), (COOPERATIVE, 1)]
    assert launched.launches == [
        ((132, 1, 1, 384, 1, 1, 1024), 1234, attributes, 77, (1 << 40, 5, -6, 9)),
        ((132, 1, 1, 384, 1, 1, 1024), 1234, attributes, 77, (2, 5, -6, 3)),
        ((7, 1, 1, 384, 1, 1, 1024), 8, attributes, 77, (4, 1, 1, 5)),
    ]


def test_a_bound_launch_is_told_the_stream_and_the_values(launched: Driver) -> None:
    kernel = driver.Kernel(77, LAYOUT, ((8, struct.Struct("=2i")),), 384, 1024, cooperative=True)
    run = kernel.bind(0, 132, LAYOUT.pack(3, 0, 0, 4))
    run(1234, 5, -6)
    run(1234, 7, 8)
    run(9, 1, 2)
    sizes = (132, 1, 1, 384, 1, 1, 1024)
    assert launched.launches == [
        (sizes, 1234, [(COOPERATIVE, 1)], 77, (3, 5, -6, 4)),
        (sizes, 1234, [(COOPERATIVE, 1)], 77, (3, 7, 8, 4)),
        (sizes, 9, [(COOPERATIVE, 1)], 77, (3, 1, 2, 4)),
    ]
    launched.status = 1
    with pytest.raises(KernelError, match="CUDA_ERROR_INVALID_VALUE"):
        run(9, 1, 2)


@pytest.mark.parametrize("bound", [False, True])
def test_threads_that_launch_at_once_have_arguments_of_their_own(
    launched: Driver, monkeypatch: pytest.MonkeyPatch, bound: bool
) -> None:
    kernel = driver.Kernel(77, LAYOUT, ((8, struct.Struct("=2i")),), 32)
    run = kernel.bind(0, 1, LAYOUT.pack(1, 0, 0, 2))
    argument = LAYOUT.pack(1, 0, 0, 2)
    barrier = threading.Barrier(2)
    note = launched.cuLaunchKernelEx

    def meet(*parameters: Any) -> int:
        if threading.current_thread() is threading.main_thread():
            return 0
        barrier.wait(20)
        status = note(*parameters)
        barrier.wait(20)
        return status

    monkeypatch.setattr(launched, "cuLaunchKernelEx", meet)
    run(0, 0, 0)  # one launch is ready to be used again
    kernel.launch(0, 0, 1, argument, (0, 0))
    threads = [
        threading.Thread(target=run, args=(n, n, -n))
        if bound
        else threading.Thread(target=kernel.launch, args=(0, n, 1, argument, (n, -n)))
        for n in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seen = sorted((stream, argument) for _, stream, _, _, argument in launched.launches)
    assert seen == [(0, (1, 0, 0, 2)), (1, (1, 1, -1, 2))]


def test_a_launch_that_fails_is_one_line(launched: Driver) -> None:
    launched.status = 1
    kernel = driver.Kernel(77, LAYOUT, (), 32)
    with pytest.raises(KernelError) as caught:
        kernel.launch(0, 0, 1, bytes(LAYOUT.size))
    text = (
        "CUDA driver: CUDA_ERROR_INVALID_VALUE; allowed: a call that succeeds; see the driver's documentation"
    )
    assert str(caught.value) == text


@pytest.mark.gpu
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_prepared_call_waits_for_nothing(name: str, force: Force) -> None:
    force(name)
    case = random_case(num_tokens=6, bias=True, device="cuda")
    lists = (*case.routing, *case.lists)
    expected = [case.fused(), torch.ops.mxk.moe.lists(*lists, **case.attributes)]
    torch.cuda.set_sync_debug_mode("error")
    try:
        results = [case.fused(), torch.ops.mxk.moe.lists(*lists, **case.attributes)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(result, value) for result, value in zip(results, expected, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("name", SCHEDULES)
def test_two_threads_on_one_stream(name: str, force: Force) -> None:
    force(name)
    cases = [random_case(num_tokens=5, seed=seed, device="cuda") for seed in range(2)]
    expected = [case.fused() for case in cases]
    stream, wrong = torch.cuda.Stream(), []
    torch.cuda.synchronize()

    def work(index: int) -> None:
        with torch.cuda.stream(stream):
            results = [cases[index].fused() for _ in range(100)]
        stream.synchronize()
        wrong.extend(result for result in results if not torch.equal(result, expected[index]))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.gpu
@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
@pytest.mark.parametrize("form", ["moe", "moe.lists"])
def test_compiled_code_calls_the_kernels_itself(form: str, mode: str | None) -> None:
    from torch._inductor.utils import run_and_get_code

    case = random_case(num_tokens=3, device="cuda")
    stacked = form == "moe"
    op = torch.ops.mxk.moe.default if stacked else torch.ops.mxk.moe.lists

    class Layer(torch.nn.Module):
        """Holds the weights, so that a CUDA graph reads them where they lie."""

        def __init__(self) -> None:
            super().__init__()
            for name in WEIGHTS:
                value = getattr(case, name)
                parts = [] if value is None else [value] if stacked else list(value)
                self.register_module(name, torch.nn.Module())
                for index, part in enumerate(parts):
                    getattr(self, name).register_buffer(str(index), part)

        def forward(self, x: Tensor, ids: Tensor, router: Tensor) -> Tensor:
            weights: list[Any] = [list(getattr(self, name).buffers()) for name in WEIGHTS]
            if stacked:
                weights = [value[0] if value else None for value in weights]
            y: Tensor = op(x * 2, ids, router, *weights, **case.attributes)
            return y + 1

    layer = Layer()
    with torch.no_grad():
        layer(*case.routing)  # lists must have been seen before a graph is captured
        compiled = torch.compile(layer, backend="mxk", mode=mode)
        _, code = run_and_get_code(compiled, *case.routing)
        for seed in range(4):
            fresh = random_case(num_tokens=3, seed=seed, device="cuda").routing
            torch.compiler.cudagraph_mark_step_begin()
            assert torch.equal(compiled(*fresh), layer(*fresh))
    assert f" = {form.replace('.', '_')}_cuda(" in code[-1]
    assert " = torch.ops.mxk" not in code[-1]
