"""The passes: one visible, ordered list, and the function that runs it."""

from __future__ import annotations

import functools
import hashlib
import itertools
import os
import pathlib
import time

from torch import fx

from mxk_compile.passes.context import Context
from mxk_compile.passes.fuse_moe import fuse_moe
from mxk_compile.passes.lower_moe import lower_moe
from mxk_compile.passes.report import NodeReport, Report, logger
from mxk_compile.passes.verify import verify
from mxk_compile.settings import Settings, settings

__all__ = ["PASSES", "Context", "NodeReport", "Report", "run_passes", "source_hash"]

PASSES = (
    fuse_moe,  # first: it reads stock nodes and whatever makes their lists
    lower_moe,  # last: it needs the descriptions that fuse_moe made
)

_dump_numbers = itertools.count()


def run_passes(
    module: fx.GraphModule, settings: Settings = settings, *, can_guard: bool = False, nested: bool = True
) -> Report:
    """Rewrites `module` in place and returns what was decided for each MoE node.

    Args:
        module: a functional graph, at AOT or Dynamo level, with fake values in its metadata.
        settings: what changes the rewrite.
        can_guard: true only where guards on symbolic sizes are checked before each run, as under torch.compile.
        nested: also rewrite the graphs inside (branches of cond, checkpointed and nested regions).

    Raises:
        GraphError: a pass left an illegal graph.
    """
    context = Context(settings, can_guard)
    graphs = [m for m in module.modules() if isinstance(m, fx.GraphModule)] if nested else [module]
    for graph_module in graphs:
        for run in PASSES:
            _dump(graph_module, settings, f"{run.__name__}_before")
            start = time.perf_counter()
            count = run(graph_module, context)
            duration_ms = (time.perf_counter() - start) * 1e3
            logger.debug("%s: %d rewrites in %.1f ms", run.__name__, count, duration_ms)
            if count:
                graph_module.recompile()
            _dump(graph_module, settings, f"{run.__name__}_after")
        verify(graph_module)
    return context.report


@functools.cache
def source_hash() -> str:
    """Hash of this package's Python sources: part of the compile cache key, so that no edit meets an old graph."""
    package = pathlib.Path(__file__).parent.parent
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(path.relative_to(package).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _dump(module: fx.GraphModule, settings: Settings, label: str) -> None:
    if settings.dump_dir is None:
        return
    path = pathlib.Path(settings.dump_dir) / f"{os.getpid()}_{next(_dump_numbers):04d}_{label}.txt"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(module.print_readable(print_output=False))
    except OSError as error:
        logger.warning("MXK_DUMP: %s not written: %s", path, error)
