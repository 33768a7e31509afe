"""The `mxk` backend: AOT graph -> passes -> inner backend.

    torch.compile(model, backend="mxk")
    torch.compile(model, backend="mxk", options={"inner_backend": "aot_eager", "max_tokens": 16})

With Inductor as the inner backend the passes run as its `post_grad_custom_pre_pass`, so that its own caches,
decompositions and modes (`reduce-overhead`, ...) work as always; `MxkPass` is that pass, usable alone. Likewise they
run inside Gaudi's `hpu_backend` (passes/gaudi_bridge.py). Any other inner backend receives the rewritten AOT graph.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.custom_graph_pass import CustomGraphPass

from mxk_compile.errors import SettingsError
from mxk_compile.kernels import cpu
from mxk_compile.kernels.inductor import call_directly
from mxk_compile.passes import Report, run_passes, source_hash
from mxk_compile.passes.gaudi_bridge import compile_in_bridge
from mxk_compile.passes.warm import warm_ops
from mxk_compile.settings import Settings, settings
from mxk_compile.version import __version__

Backend = Callable[..., Any]
_OPTIONS = ("inner_backend", "inner_options", "max_tokens", "dump_dir")


def mxk(
    module: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
) -> Callable[..., Any]:
    """The backend function that `torch.compile(backend="mxk")` finds through its entry point.

    Args:
        module: Dynamo's graph.
        example_inputs: its fake or real inputs.
        mode: a `torch.compile` mode, passed to Inductor.
        options: `inner_backend`: a backend name or function; `inner_options`: its own options (a dict);
            `max_tokens`, `dump_dir`: as in Settings, for this compilation alone.

    Returns:
        What runs the graph, as every Dynamo backend returns it.

    Raises:
        SettingsError: unknown option, or a value that is not allowed.
    """
    options = dict(options or {})
    for name in options:
        if name not in _OPTIONS:
            raise SettingsError("backend 'mxk' options", repr(name), ", ".join(_OPTIONS), "correct the name")
    inner = options.pop("inner_backend", None) or _default_inner(module, example_inputs)
    inner_options = options.pop("inner_options", None) or {}
    if not (isinstance(inner, str) or callable(inner)):
        raise SettingsError("option inner_backend", repr(inner), "a name or a function", "correct or drop it")
    if not isinstance(inner_options, Mapping):
        raise SettingsError("option inner_options", repr(inner_options), "a dict", "correct or drop it")
    inner_options = dict(inner_options)
    chosen = settings.replace(**options)
    if inner == "inductor":
        return _compile_with_inductor(module, example_inputs, chosen, mode, inner_options)
    if mode is not None:
        raise SettingsError("backend 'mxk'", f"mode={mode!r}", "modes with Inductor only", "drop the mode")
    if inner == "hpu_backend":
        return compile_in_bridge(module, example_inputs, chosen, inner_options)
    backend = compile_with(_resolve(inner, inner_options), chosen)
    return cast(Callable[..., Any], backend(module, example_inputs))


def compile_with(inner: Backend, settings: Settings, report: Report | None = None) -> Backend:
    """A Dynamo backend: AOT graph, passes, then `inner(graph_module, example_inputs)`, which runs forward graphs.

    Args:
        inner: receives the rewritten ATen graph and returns a callable.
        settings: what changes the rewrite.
        report: collects the decisions, where given.
    """

    def compile_forward(module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        found = run_passes(module, settings, can_guard=True)
        if report is not None:
            report.nodes.extend(found.nodes)
        warm_ops(module)
        return _boxed(inner(module, example_inputs))

    def compile_backward(module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        return _boxed(inner(module, example_inputs))

    backend: Backend = aot_autograd(fw_compiler=compile_forward, bw_compiler=compile_backward)
    return backend


class MxkPass(CustomGraphPass):
    """The passes as one Inductor pass: `torch._inductor.config.post_grad_custom_pre_pass = MxkPass()`.

    Args:
        settings: what changes the rewrite.
        following: a pass that runs afterwards (the one that was set before, say).
    """

    def __init__(self, settings: Settings = settings, following: CustomGraphPass | None = None) -> None:
        self.settings = settings
        self.following = following

    def __call__(self, graph: fx.Graph) -> None:
        """Rewrites one graph in place; Inductor calls it for nested graphs too, one by one."""
        module = graph.owning_module
        assert module is not None  # Inductor's graphs have one
        # Ahead-of-time compilation has no guards: nobody would check what was assumed about T.
        aot = getattr(torch._inductor.virtualized.V, "aot_compilation", False) is True
        run_passes(module, self.settings, can_guard=not aot, nested=False)
        warm_ops(module)
        call_directly()
        if self.following is not None:
            self.following(graph)

    def uuid(self) -> str | None:
        """Identity for Inductor's caches: version, sources, kernel library, settings, following pass.

        None, which keeps a graph out of the caches, where graphs are to be dumped, or the following pass says so.
        """
        following = self.following.uuid() if self.following is not None else ""
        if following is None or self.settings.dump_dir is not None:
            return None
        identity = (__version__, source_hash(), cpu.library_hash(), self.settings.identity(), following)
        return hashlib.sha256(repr(identity).encode()).hexdigest()


def _compile_with_inductor(
    module: fx.GraphModule,
    example_inputs: Sequence[Any],
    settings: Settings,
    mode: str | None,
    patches: dict[str, Any],
) -> Callable[..., Any]:
    from torch._inductor import config, list_mode_options
    from torch._inductor.compile_fx import compile_fx

    unknown = [name for name in patches if not hasattr(config, name)]
    if unknown:
        raise SettingsError(
            "option inner_options", repr(unknown[0]), "Inductor's config names", "correct the name"
        )
    patches = {**(list_mode_options(mode) if mode else {}), **patches}
    following = patches.get("post_grad_custom_pre_pass", config.post_grad_custom_pre_pass)
    patches["post_grad_custom_pre_pass"] = MxkPass(settings, following)
    return cast(Callable[..., Any], compile_fx(module, example_inputs, config_patches=patches))


def _default_inner(module: fx.GraphModule, example_inputs: Sequence[Any]) -> str:
    tensors = [*example_inputs, *module.parameters(), *module.buffers()]
    devices = {tensor.device.type for tensor in tensors if isinstance(tensor, torch.Tensor)}
    return "hpu_backend" if "hpu" in devices else "inductor"


def _resolve(inner: str | Backend, options: dict[str, Any]) -> Backend:
    if inner in ("aot_eager", "eager"):
        if options:
            raise SettingsError("option inner_options", repr(options), f"none with {inner}", "drop them")
        return lambda module, example_inputs: module.forward
    if isinstance(inner, str):
        from torch._dynamo import list_backends, lookup_backend

        names = sorted(set(list_backends(exclude_tags=())) - {"mxk"})
        if inner not in names:
            raise SettingsError(
                "option inner_backend", repr(inner), ", ".join(names), "name one, or pass a function"
            )
        inner = cast(Backend, lookup_backend(inner))
    return functools.partial(inner, options=options) if options else inner


def _boxed(compiled: Callable[..., Any]) -> Callable[..., Any]:
    from functorch.compile import make_boxed_func

    if getattr(compiled, "_boxed_call", False):
        return compiled
    boxed: Callable[..., Any] = make_boxed_func(compiled)
    return boxed
