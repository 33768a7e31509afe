"""Where the GPU tests run, and what memory holds before each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from mxk_compile import kernels
from mxk_compile.kernels import cuda
from mxk_compile.kernels.cuda.schedule import Schedule

Force = Callable[[str], None]


@pytest.fixture(autouse=True)
def poisoned_memory(request: pytest.FixtureRequest) -> Iterator[None]:
    """GPU tests: skipped without a Hopper GPU; what the allocator hands out holds NaN, so unwritten outputs show."""
    if request.node.get_closest_marker("gpu") is None:
        yield
        return
    reason = cuda.unavailable()
    if reason is not None:
        pytest.skip(reason)
    torch.cuda.empty_cache()
    blocks = [torch.full((size,), 0xFF, dtype=torch.uint8, device="cuda") for size in (1 << 28, 1 << 19)]
    del blocks
    yield
    torch.cuda.synchronize()


@pytest.fixture
def force(monkeypatch: pytest.MonkeyPatch) -> Force:
    """Makes every call run by the schedule that prints as the text it is given."""

    def apply(text: str) -> None:
        monkeypatch.setattr(cuda, "choose", lambda problem: Schedule.parse(text))
        kernels.prepared["CUDA"].clear()

    return apply
