"""Public CPU implementations of a MoE layer, as far as they are installed, behind one form for bench_peers.py.

Each module has `NAME`; `missing()`, None or why it cannot run here; and `layer(case)`, a function of hidden_states,
topk_ids and topk_weights that runs the layer of `case`, whatever copies it needs being made before. It raises
Unsuitable for a layer that the peer has no form of.
"""

from __future__ import annotations


class Unsuitable(Exception):
    """The peer computes no such layer."""
