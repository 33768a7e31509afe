"""What every test gets: no settings of the developer's shell, no network, no compiled graph of another test."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

# Before the package is imported, which reads them once.
for _name in [name for name in os.environ if name.startswith("MXK_")]:
    del os.environ[_name]
os.environ["HF_HUB_OFFLINE"] = "1"

import pytest  # noqa: E402
import torch  # noqa: E402

from mxk_compile.testing import settle_vector_math  # noqa: E402

settle_vector_math()  # references are what torch computes at first


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Same random numbers in fixtures that several tests share, whichever test makes them."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def fresh_compiler_state() -> Iterator[None]:
    """Same random numbers in every test, and no recompilation limit reached by the tests before."""
    torch.manual_seed(0)
    yield
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


@pytest.fixture(scope="session", autouse=True)
def no_graph_caches() -> None:
    """Compiles every graph anew: a graph from the disk cache would pass without the passes having run.

    Compiled C++ is still reused. Tests of the caches run in processes of their own.
    """
    import torch._functorch.config
    import torch._inductor.config

    torch._inductor.config.fx_graph_cache = False
    torch._functorch.config.enable_autograd_cache = False
