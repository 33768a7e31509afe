"""Gaudi's lazy mode: the stock MXFP4 call of vllm-gaudi replaced, for gpt-oss decode.

No FX graph exists in lazy mode, so the call is replaced, not a node: `mxk gaudi install DIR` writes two hooks into a
vllm-gaudi checkout (install.py). The first runs at the top of the package's import and prepares the environment before
the device opens (`start`, environment.py); the second runs when a layer's weights are loaded (`attach`, gptoss.py).
Both keep the stock op, and say once why, wherever anything is not as expected; neither ever raises.

Nothing is shared with the passes but the kernels' table, `supports()` and the sequence of ops (kernels/tpc).
"""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from typing import Any

from mxk_compile.lazy import environment, gptoss

__all__ = ["attach", "start"]

# Below vLLM's logger, the one that a server gives a handler.
_logger = logging.getLogger("vllm.mxk_compile.lazy")

_options: environment.Options | None = None


def start(environ: MutableMapping[str, str]) -> bool:
    """Reads the switches and prepares the environment for the kernels; to be called before the device opens.

    Args:
        environ: the environment of this process; changed only if everything is in order.

    Returns:
        Whether the kernels are on. A second call with the same environment changes nothing.
    """
    global _options
    try:
        _options = environment.prepare(environ)
    except Exception as error:  # whatever it is, the server must go on as stock
        _options = None
        _logger.warning("MXFP4 TPC MoE stays off, the stock op runs: %s", error)
    if _options is None:
        return False
    _logger.info("MXFP4 TPC MoE installed: mxk_tpc %s", _options.version)
    return True


def attach(layer: Any) -> bool:
    """Lets a loaded gpt-oss layer of vllm-gaudi call the kernels where a call fits; returns whether it does."""
    return _options is not None and gptoss.attach(layer, _options)
