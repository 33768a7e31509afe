"""vllm-gaudi: the kernels in its servers, without a change on disk; `MXK_VLLM=1` is the switch.

    prepare     called by vllm.prepare, an entry point of vllm.platform_plugins, which vLLM asks in every process
                before the device opens: puts the kernel library into the environment
    register    called by vllm.register in every process: follows the model runner, whose module vLLM imports later
      load_model                   after it: op library, pass, each op called once eagerly; the stacks of the model
      _rebind_moe_expert_weights   after it, in both modules that have it: the stacks anew, for weights have moved
      warmup_model                 before it: each MXFP4 layer's own graph on both sides of the cap

In compiled mode nothing of vllm-gaudi's layers changes: its graphs go through `hpu_backend`, where our pass runs. In
lazy mode there are no graphs, so each loaded gpt-oss layer gets the call of `mxk_compile.lazy`, with the switches of
that mode (lazy/environment.py). Whatever fails is logged on one line, and the server goes on as stock.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import logging
import sys
from collections.abc import Callable, MutableMapping
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from mxk_compile import lazy
from mxk_compile.errors import KernelError
from mxk_compile.kernels.tpc.libraries import OP_LIBRARIES, read_manifest
from mxk_compile.lazy import environment
from mxk_compile.lazy.gptoss import LazyMoE
from mxk_compile.ops.stack import register_stacks
from mxk_compile.passes import gaudi_bridge
from mxk_compile.settings import live_environment, settings

_logger = logging.getLogger("vllm.mxk_compile")

VERSIONS = {
    "0.24": "known: a copy was read",
    "0.25": "supported: between two that are known",
    "0.26": "known: a copy was read; published figures are from its image",
    "0.27": "supported: the names that are followed are checked when they are met",
    "0.28": "supported, likewise",
    "0.29": "supported, likewise",
    "0.30": "known: published figures are from its image",
}
"""Releases (major.minor) of vllm-gaudi that are followed; all others are refused with the reason."""
_OLDEST, *_, _NEWEST = VERSIONS
_RUNNER, _WORKER = "vllm_gaudi.v1.worker.hpu_model_runner", "vllm_gaudi.v1.worker.hpu_worker"
_REBIND = "_rebind_moe_expert_weights"


def version() -> str | None:
    """Release of the installed vllm-gaudi, or None."""
    try:
        return metadata.version("vllm-gaudi")
    except metadata.PackageNotFoundError:
        return None


def unsupported(release: str) -> str | None:
    """None if this release of vllm-gaudi is followed, else the reason in one line."""
    parts = release.split(".")
    if ".".join(parts[:2]) in VERSIONS:
        return None
    try:
        number = (int(parts[0]), int(parts[1]))
    except (ValueError, IndexError):
        return f"vllm-gaudi {release!r} is no release; known: {_OLDEST} to {_NEWEST}"
    if number < (0, 24):
        return f"vllm-gaudi {release} keeps no experts packed as MXFP4; known: {_OLDEST} to {_NEWEST}"
    return f"vllm-gaudi {release} is not known; known: {_OLDEST} to {_NEWEST}"


def prepare(environ: MutableMapping[str, str]) -> None:
    """Puts into the environment what the kernels need before the device opens; raises nothing.

    Args:
        environ: the environment of this process; changed only if everything is in order.
    """
    release = version()
    if release is None or unsupported(release) is not None:
        return  # register says why
    try:
        if environment.is_lazy(environ):
            lazy.start(environ)
            return
        folder = Path(settings.gaudi_lib).absolute()
        manifest = read_manifest(folder)
        if OP_LIBRARIES["pt2"] not in manifest.files:
            given, advice = "a build without --pt2", "build it again, with `mxk build-tpc --pt2`"
            raise KernelError(str(folder), given, "a build for compiled mode", advice)
        variables = environment.kernel_variables(environ, folder, manifest)
        advice = "start the server with MXK_VLLM=1, before anything else opens the device"
        environment.update_before_the_device_opens(environ, variables, "vllm-gaudi", advice)
    except Exception as error:  # whatever it is, the server must go on as stock
        _stock(error)


def register() -> bool:
    """Follows the model runner of vllm-gaudi; returns whether vllm-gaudi is here at all. Idempotent, raises nothing."""
    release = version()
    if release is None:
        return False
    reason = unsupported(release)
    if reason is not None:
        _stock(reason)
    elif not any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport({_RUNNER: _follow_runner, _WORKER: _follow_worker}))
    return True


@functools.cache
def _stock(reason: object) -> None:
    """Says once why the server is as it was."""
    _logger.warning("mxk_compile: %s; MoE layers stay stock", " ".join(str(reason).split()))


class _AfterImport(importlib.abc.MetaPathFinder):
    """Calls a function with a module when somebody has imported it; at once if somebody already has."""

    def __init__(self, actions: dict[str, Callable[[ModuleType], None]]) -> None:
        self._actions = dict(actions)
        for name in list(self._actions):
            if name in sys.modules:
                self._actions.pop(name)(sys.modules[name])

    def find_spec(
        self, name: str, path: Any, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The module's own spec, its loader followed by the action; None for all other modules."""
        action = self._actions.get(name)
        if action is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return None
        del self._actions[name]
        run = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            action(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _after(owner: Any, name: str, action: Callable[..., None]) -> None:
    """Has `action` called with the arguments of each call of `owner.name`, after it; its errors are logged."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def followed(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        _try(action, *args)
        return result

    setattr(owner, name, followed)


def _before(owner: Any, name: str, action: Callable[..., None]) -> None:
    """The same, before it."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def followed(*args: Any, **kwargs: Any) -> Any:
        _try(action, *args)
        return original(*args, **kwargs)

    setattr(owner, name, followed)


def _try(action: Callable[..., None], *args: Any) -> None:
    try:
        action(*args)
    except Exception as error:  # a worker must not die of what it can do without
        _stock(error)


def _follow_runner(module: ModuleType) -> None:
    runner = getattr(module, "HPUModelRunner", None)
    if not hasattr(runner, "load_model"):
        _stock(f"vllm-gaudi {version()} has no HPUModelRunner.load_model")
        return
    _after(runner, "load_model", _loaded)
    if hasattr(runner, "warmup_model"):
        _before(runner, "warmup_model", _warm_both_sides)
    _follow_worker(module)


def _follow_worker(module: ModuleType) -> None:
    if hasattr(module, _REBIND):
        _after(module, _REBIND, _moved)


def _model(runner: Any) -> torch.nn.Module:
    model: torch.nn.Module = runner.get_model() if hasattr(runner, "get_model") else runner.model
    return model


def _loaded(runner: Any, *_: Any) -> None:
    model = _model(runner)
    if environment.is_lazy(live_environment()):
        layers: list[Any] = [module for module in model.modules() if hasattr(module, "moe_op")]
        new = [layer for layer in layers if not isinstance(layer.moe_op.forward, LazyMoE)]
        taken = sum(lazy.attach(layer) for layer in new)
        _logger.info("mxk_compile: %d of %d MoE layers have the call of lazy mode", taken, len(layers))
        return
    found = gaudi_bridge.start(settings.gaudi_lib)
    failed = [reason for reason in found.values() if reason is not None]
    count = register_stacks(model)
    _logger.info(
        "mxk_compile: pass in hpu_backend, %d ops, %d of them unusable, %d stacked weights",
        *(len(found), len(failed), count),
    )


def _moved(model: torch.nn.Module, *_: Any) -> None:
    if not environment.is_lazy(live_environment()):
        register_stacks(model)


def _warm_both_sides(runner: Any, *_: Any) -> None:
    """Runs each kind of MXFP4 layer with the cap's number of tokens and with one more.

    Its op compiles by itself when it is called eagerly. Inlined in a layer's graph it is warmed by the server's own
    buckets; those on one side of the cap alone mean that no request is ever on the other.
    """
    if environment.is_lazy(live_environment()) or not settings.max_tokens:
        return
    seen = set()
    for layer in _model(runner).modules():
        op: Any = getattr(layer, "moe_op", None)
        weight = getattr(layer, "w13_weight", None)
        if weight is None or weight.dtype != torch.uint8 or "MXFP4" not in type(op).__name__:
            continue
        num_experts, _, half = weight.shape
        top_k = min(getattr(layer, "top_k", 1), num_experts)
        if (kind := (weight.shape, top_k, weight.device)) in seen:
            continue
        seen.add(kind)
        for num_tokens in (settings.max_tokens, settings.max_tokens + 1):
            x = torch.zeros(num_tokens, 2 * half, dtype=torch.bfloat16, device=weight.device)
            ids = torch.arange(top_k, dtype=torch.int32, device=weight.device).expand(num_tokens, -1)
            op(x, ids.contiguous(), x.new_ones(num_tokens, top_k), permuted_weights=True, activation="silu")
    _logger.info(
        "mxk_compile: %d kinds of MoE layer warmed on both sides of %s tokens", len(seen), settings.max_tokens
    )
