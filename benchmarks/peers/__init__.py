"""Public implementations of a MoE layer, as far as they are installed: `mxk bench --impl MODULE`, bench_peers.py.

Each module has `NAME`; `DEVICE`, "cpu" or "cuda"; `CAPTURABLE`, whether a CUDA graph can record it after a first call;
`version()`; `missing()`, None or why it cannot run here; and `layer(case)`, a function of hidden_states, topk_ids and
topk_weights that runs the layer of `case`, whatever copies it needs being made before; ids from E up add nothing. It
raises Unsuitable for a layer that the peer has no form of.
"""

from __future__ import annotations


class Unsuitable(Exception):
    """The peer computes no such layer."""
