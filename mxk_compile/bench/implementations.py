"""The ways to run a layer: the fused op, the stock op, the stock op on bf16 copies, and peers in a checkout.

A peer is a module of `benchmarks/peers`; its __init__ says what it has.
"""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor

from mxk_compile import kernels
from mxk_compile.checkout import CHECKOUT
from mxk_compile.errors import CallError, KernelError
from mxk_compile.kernels import MoEDesc
from mxk_compile.ops.dequant import dequantize
from mxk_compile.ops.stock import call_mxfp4
from mxk_compile.parity.stock import run_stock
from mxk_compile.testing import MoECase

OURS = ("fused", "stock", "unpacked")
_PEERS = CHECKOUT / "benchmarks" / "peers"

Layer = Callable[[Tensor, Tensor, Tensor], Tensor]
"""hidden_states, topk_ids, topk_weights -> the layer's result."""


@dataclasses.dataclass(frozen=True)
class Implementation:
    """One way to run a layer.

    Attributes:
        kernel: what runs it, for the row.
        layers: a function for each copy of the layer.
        capturable: whether a CUDA graph can record it.
        version: of the peer, or None.
    """

    kernel: str
    layers: list[Layer]
    capturable: bool
    version: str | None = None


def names() -> list[str]:
    """What `--impl` takes: ours, and the peers of a checkout."""
    return [*OURS, *sorted(path.stem for path in _PEERS.glob("*.py") if path.stem != "__init__")]


def make(name: str, layers: list[MoECase]) -> Implementation:
    """The implementation for these copies of a layer; raises KernelError where it does not compute it."""
    if name == "fused":
        return _fused(layers)
    if name == "stock":
        return _stock(layers)
    if name == "unpacked":
        return _unpacked(layers)
    peer = peer_on(name, layers[0].w2.device.type)
    unsuitable: type[Exception] = importlib.import_module("peers").Unsuitable
    try:
        found = [peer.layer(layer) for layer in layers]
    except unsuitable as error:
        raise _refusal(name, "it computes no such layer", str(error)) from None
    return Implementation(peer.NAME, found, peer.CAPTURABLE, peer.version())


def peer_on(name: str, device: str) -> ModuleType:
    """`load_peer` of one that can run on "cpu" or "cuda" here; raises KernelError with the reason if it cannot."""
    peer = load_peer(name)
    reason = peer.missing()
    if reason is None and device != peer.DEVICE:
        reason = f"runs on {peer.DEVICE}"
    if reason is not None:
        raise _refusal(name, reason, "a peer that is installed")
    return peer


def load_peer(name: str) -> ModuleType:
    """A module of benchmarks/peers; raises CallError where there is none of that name."""
    if name not in names():
        raise CallError("mxk bench --impl", repr(name), ", ".join(names()), "choose one of them")
    if str(_PEERS.parent) not in sys.path:
        sys.path.append(str(_PEERS.parent))
    return importlib.import_module(f"peers.{name}")


def _refusal(name: str, reason: str, allowed: str) -> KernelError:
    return KernelError(f"mxk bench --impl {name}", reason, allowed, "choose another implementation or layer")


def _fused(layers: list[MoECase]) -> Implementation:
    desc = MoEDesc.from_call(*layers[0].routing, *layers[0].weights, **layers[0].attributes)
    reason = kernels.supports(desc)
    if reason is not None:
        raise _refusal("fused", reason, "what supports() accepts")

    def function(case: MoECase) -> Layer:
        weights, attributes = case.weights, case.attributes
        return lambda *routed: torch.ops.mxk.moe.default(*routed, *weights, **attributes)

    kernel = str(kernels.select(desc))
    if desc.device == "cuda":
        kernel += f" {kernels.cuda.plan(desc, len(layers[0].hidden_states))}"
    return Implementation(kernel, [function(layer) for layer in layers], True)


def _single_op(case: MoECase) -> bool:
    """Whether one stock op computes the layer."""
    kept = case.attributes
    kind = kept["row_order"], kept["activation"], case.w13_bias is not None
    return not kept["per_route"] and kind in (
        ("interleaved", "swiglu_oai", True),
        ("gate_up", "silu", False),
    )


def _stock(layers: list[MoECase]) -> Implementation:
    first = layers[0]
    if first.attributes["weight_format"] != "mxfp4" or not _single_op(first):

        def steps(case: MoECase) -> Layer:
            return lambda x, ids, weights: run_stock(
                dataclasses.replace(case, hidden_states=x, topk_ids=ids, topk_weights=weights)
            )

        return Implementation("hpu::mixture_of_experts and steps around it", [*map(steps, layers)], False)
    name = "mxfp4_fused_weights" if first.w13_bias is None else "bias_mxfp4_fused_weights"

    def function(case: MoECase) -> Layer:
        w13, w13_scale, w2, w2_scale, _, _, *both = case.lists
        weights = (w13, w13_scale, w2, w2_scale, [biases for biases in both if biases])
        constants = {name: case.attributes[name] for name in ("experts_min", "alpha", "limit")}
        return lambda *routed: call_mxfp4(routed, *weights, **constants)

    return Implementation(f"hpu::mixture_of_experts.{name}", [*map(function, layers)], False)


def _unpacked(layers: list[MoECase]) -> Implementation:
    if not _single_op(layers[0]):
        raise _refusal("unpacked", "no stock op computes this layer", "gptoss, glm, kimi, kimi_int4, mimo")
    name = "fused_weights" if layers[0].w13_bias is None else "bias_fused_weights"
    op = getattr(torch.ops.hpu.mixture_of_experts, name)

    def function(case: MoECase) -> Layer:
        copies = [
            [
                dequantize(*pair, weight_format=case.attributes["weight_format"]).bfloat16()
                for pair in zip(values, scales, strict=True)
            ]
            for values, scales in ((case.w13, case.w13_scale), (case.w2, case.w2_scale))
        ]
        biases = () if case.w13_bias is None else (list(case.w13_bias), list(case.w2_bias))  # type: ignore[arg-type]
        kept = case.attributes
        first = kept["experts_min"]
        keywords = {"permuted_weights": True, "experts_min": first, "experts_max": first + len(case.w2) - 1}
        if biases:
            keywords |= {"alpha": kept["alpha"], "limit": kept["limit"]}
        else:
            keywords["activation"] = "silu"
        return lambda *routed: op(*routed, *copies, *biases, **keywords)

    return Implementation(f"hpu::mixture_of_experts.{name}, bf16 copies", [*map(function, layers)], False)
