"""The passes inside the Gaudi bridge's own compiler, `hpu_backend`.

Servers name that backend themselves, so the passes go where it runs its own: a pass that is registered for its stage
PRE_PLACEMENT. There the graph is flat, functional ATen whose nodes are described and placed already, and new nodes must
bring the same metadata. Bridges without the registry (1.19) get the pass put into the list that `get_passes` returns,
before fake propagation, which then describes the new nodes itself.

`PT_HPU_DISABLE_pass_mxk_moe=1` switches it off, as it does for any pass of the bridge. This file alone of the
passes imports the bridge, inside functions.
"""

from __future__ import annotations

import contextvars
import importlib
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from torch import Tensor, fx

from mxk_compile.errors import KernelError
from mxk_compile.kernels.tpc.libraries import load_ops
from mxk_compile.passes import run_passes
from mxk_compile.passes.warm import self_check, warm_ops
from mxk_compile.settings import Settings, settings

_logger = logging.getLogger("mxk_compile")

_PASSES = "habana_frameworks.torch.dynamo.compile_backend.passes"
_BEFORE = "pass_fake_propagation"

_settings: contextvars.ContextVar[Settings] = contextvars.ContextVar("mxk_settings", default=settings)
"""Settings of the compilation under way: those of the process, unless `compile_in_bridge` was given others."""


def pass_mxk_moe(context: Any) -> bool:
    """The pass as the bridge calls it, with its OptimizerContext; true if the graph was changed."""
    if context.is_training or context.is_backward:
        return False
    module: fx.GraphModule = context.graph_module
    known = set(module.graph.nodes)
    described = any("placement" in node.meta for node in known)
    run_passes(module, _settings.get(), can_guard=True, nested=False)
    new = [node for node in module.graph.nodes if node not in known]
    if described:
        for node in new:
            _describe(node)
    warm_ops(module)
    return bool(new)


def start(folder: Path | str, device: str = "hpu") -> dict[str, str | None]:
    """What a server does at start-up for compiled mode: op library, pass, and each op called once eagerly.

    Args:
        folder: a build of `mxk build-tpc --pt2`.
        device: where the ops are called.

    Returns:
        As `warm.self_check`: each op by qualified name, None or the error. Layers of ops with an error stay stock.

    Raises:
        KernelError: no such build, another op library in this process, or no bridge that takes the pass.
    """
    load_ops(Path(folder), "pt2")
    register()
    return self_check(device)


def register() -> str:
    """Puts the pass into the bridge, once a process; idempotent.

    Returns:
        "registry", or "get_passes" for a bridge without a registry of passes.

    Raises:
        KernelError: there is no bridge, or one whose passes are kept in neither way.
    """
    try:
        passes = importlib.import_module(_PASSES)
    except ImportError as error:
        raise _refuse(f"{_PASSES} cannot be imported: {error}") from error
    way = getattr(passes, "_mxk_registered", None)
    if way is not None:
        return str(way)
    placement: Any = getattr(passes, "OptimizationPassPlacement", None)
    if not hasattr(placement, "PRE_PLACEMENT"):
        raise _refuse("it has no OptimizationPassPlacement.PRE_PLACEMENT")
    if hasattr(passes, "register_pass_at_optimization_pass"):
        passes.register_pass_at_optimization_pass(pass_mxk_moe, placement.PRE_PLACEMENT)
        way = "registry"
    elif hasattr(passes, "get_passes"):
        _patch_get_passes(passes, placement.PRE_PLACEMENT)
        way = "get_passes"
    else:
        raise _refuse("it has neither register_pass_at_optimization_pass nor get_passes")
    passes._mxk_registered = way  # type: ignore[attr-defined]
    _logger.info("pass_mxk_moe is registered with the Gaudi bridge (%s)", way)
    return way


def _patch_get_passes(passes: Any, stage: Any) -> None:
    original: Callable[[Any], Sequence[Any]] = passes.get_passes
    names = [run.__name__ for run in original(stage)]
    if _BEFORE not in names:
        raise _refuse(f"its passes lack {_BEFORE}, before which ours must run")

    def get_passes(asked: Any) -> list[Any]:
        found = list(original(asked))
        if asked == stage:
            # Looked up anew: the list may differ from call to call.
            found.insert([run.__name__ for run in found].index(_BEFORE), pass_mxk_moe)
        return found

    passes.get_passes = get_passes  # looked up as a global of the module in each compilation


def _refuse(given: str) -> KernelError:
    allowed = "a Gaudi bridge with custom passes, or one of 1.19"
    return KernelError("Gaudi bridge", given, allowed, "use lazy mode, or keep the stock op")


def compile_in_bridge(
    module: fx.GraphModule, example_inputs: Sequence[Any], chosen: Settings, options: dict[str, Any]
) -> Callable[..., Any]:
    """Compiles Dynamo's graph with `hpu_backend`, whose compiler runs our pass with these settings."""
    from torch._dynamo import lookup_backend

    register()
    backend = cast(Callable[..., Any], lookup_backend("hpu_backend"))
    token = _settings.set(chosen)
    try:
        compiled = backend(module, example_inputs, **({"options": options} if options else {}))
        return cast(Callable[..., Any], compiled)
    finally:
        _settings.reset(token)


def _describe(node: fx.Node) -> None:
    """Gives a new node what fake propagation and placement gave the others (bridge: _helpers/helpers.py, passes.py).

    Ops of `mxk::` run eagerly between the clusters; `mxk::stack` reads inputs only and so runs before the first.
    """
    value = node.meta["val"]
    assert isinstance(value, Tensor), node.name
    namespace = getattr(node.target, "namespace", "")
    node.meta.update(
        placement="eager" if namespace == "mxk" else "hpu_cluster",
        output_device=value.device,
        output_dtypes=[value.dtype],
        output_layouts=[value.layout],
        output_shapes=[value.size()],
        output_strides=[value.stride()],
        output_contiguous=[value.is_contiguous()],
        output_offset=[value.storage_offset()],
    )
