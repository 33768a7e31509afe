"""`convert(model)`: the routed experts of a transformers 5.x model to packed weights and stock calls, in place.

    model = AutoModelForCausalLM.from_config(config)        # or from_pretrained
    mxk_compile.convert(model, "int4")                      # MXFP4 by default
    model.compile(backend="mxk")
    model.generate(ids, cache_implementation="static")

transformers keeps a layer's experts in one module with two stacked parameters; two kinds of it have a stock op:

    gpt-oss                              gate_up_proj [E, K, 2I] interleaved, down_proj [E, I, K], biases, SwiGLU-OAI
    Qwen3-MoE, Mixtral, DeepSeek, GLM    gate_up_proj [E, 2I, K] gates, then ups, down_proj [E, K, I], SiLU

What a module computes is asked of the module, not of its name: its declared layout, and its gate on a few values. So
the clamped gate of DeepSeek-V4 is seen and refused, and a family that shares the second kind needs no line here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from mxk_compile.checkpoint import PackedExperts
from mxk_compile.errors import CallError
from mxk_compile.integrations.stock_experts import StockExperts, packed_hidden_size
from mxk_compile.ops.formats import int4, mxfp4

FORMATS = ("mxfp4", "int4")
GROUP_SIZE = 32  # values that share a scale, in both formats
_WHAT = "mxk_compile.convert"


def convert(
    model: nn.Module, weight_format: str = "mxfp4", packed: Callable[[str], PackedExperts] | None = None
) -> nn.Module:
    """Replaces every module of routed experts by `StockExperts`; inference only. Returns the model.

    A layer at a time: at most one layer exists twice. Nothing is changed where an error is raised, but by `packed`.

    Args:
        model: of transformers 5.x, in memory; its experts may be on the meta device where `packed` gives them.
        weight_format: "mxfp4", or "int4" (symmetric, a scale for 32 values), to which the weights are quantised.
        packed: in place of quantising: a layer's packed weights by the name of its experts' module, as
            `Checkpoint.experts` reads them.

    Raises:
        CallError: arguments of other types, another format, no experts, experts that no stock op runs, sizes that
            differ, weights that are not finite.
    """
    if not isinstance(model, nn.Module):
        raise CallError(
            _WHAT, f"model is a {type(model).__name__}", "a torch.nn.Module", "give the model itself"
        )
    if packed is not None and not callable(packed):
        allowed = "a function of a layer's name, as Checkpoint.experts"
        raise CallError(_WHAT, f"packed is a {type(packed).__name__}", allowed, "give one, or leave it out")
    if weight_format not in FORMATS:
        raise CallError(_WHAT, f"weight_format={weight_format!r}", ", ".join(FORMATS), "choose one of them")
    found = list(routed_experts(model))
    if not found:
        allowed = "modules named experts of transformers 5.x"
        raise CallError(_WHAT, f"{type(model).__name__} without them", allowed, "convert before compiling")
    if not found[0][0]:  # the module cannot be replaced in itself
        allowed = "a model that holds experts"
        raise CallError(
            _WHAT, f"{type(model).__name__}, the experts alone", allowed, "convert what they are in"
        )
    for name, module in found:
        reason = _refusal(module, weight_format if packed is None else None)
        if reason is not None:
            allowed = "experts of gpt-oss, or SiLU-gated ones without bias"
            advice = "leave this model unconverted, or choose mxfp4"
            raise CallError(f"{_WHAT}: {name} ({type(module).__name__})", reason, allowed, advice)
    places = list(model.named_modules(remove_duplicate=False))  # layers may share one module
    for name, module in found:
        device = module.down_proj.device
        if packed is None:
            weights = _quantize(module, weight_format)
        else:
            weights, device = packed(name), _device(model)
            if not isinstance(weights, PackedExperts):
                given = f"packed gave a {type(weights).__name__}"
                raise CallError(
                    f"{_WHAT}: {name}", given, "PackedExperts", "give what Checkpoint.experts reads"
                )
            _check_sizes(name, module, weights)
        limit = getattr(module, "limit", None)
        constants = (float(getattr(module, "alpha", 1.0)), math.inf if limit is None else float(limit))
        replacement = StockExperts(weights, *constants, device=device)
        for place in (place for place, other in places if other is module):
            parent, _, attribute = place.rpartition(".")
            setattr(model.get_submodule(parent), attribute, replacement)
    return model


def routed_experts(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Name and module of all routed experts, convertible or not."""
    for name, module in model.named_modules():
        stacked = [getattr(module, part, None) for part in ("gate_up_proj", "down_proj")]
        if all(isinstance(weight, Tensor) and weight.dim() == 3 for weight in stacked):
            yield name, module


def _is_interleaved(module: Any) -> bool:
    return bool(getattr(module, "is_transposed", False))


def _refusal(module: Any, weight_format: str | None) -> str | None:
    """Why the module is none of the two kinds, or cannot be quantised to the format (None: is not quantised)."""
    declared = ("is_transposed", "is_concatenated", "has_bias", "has_gate", "has_post_expert_norm")
    layout = tuple(bool(getattr(module, name, name == "has_gate")) for name in declared)
    names = sorted(name for name, _ in module.named_parameters())
    if layout == (True, False, True, True, False):
        wanted = ["down_proj", "down_proj_bias", "gate_up_proj", "gate_up_proj_bias"]
        if weight_format == "int4":
            return "biases and SwiGLU-OAI, which no stock op has for int4"
    elif layout == (False, True, False, True, False):
        wanted = ["down_proj", "gate_up_proj"]
    else:
        shown = ", ".join(f"{name}={value}" for name, value in zip(declared, layout, strict=True))
        return f"layout {shown}"
    if names != wanted:
        return f"parameters {', '.join(names)}"
    if not _gate_is_known(module):
        return "a gate that is neither SiLU nor SwiGLU-OAI"
    if weight_format is None:
        return None
    for weight in (module.down_proj, module.gate_up_proj):
        if weight.is_meta:
            return "weights on the meta device, which hold no values"
        if weight.dtype not in (*int4.FLOAT_DTYPES, torch.float64):
            return f"weights of {weight.dtype}"
    columns = [module.down_proj.shape[-1], module.gate_up_proj.shape[-1]]
    if _is_interleaved(module):
        columns = [weight.shape[1] for weight in (module.down_proj, module.gate_up_proj)]
    if any(size % GROUP_SIZE for size in columns):
        return f"K and I of {columns[1]} and {columns[0]}, not multiples of {GROUP_SIZE}"
    for name in ("down_proj", "gate_up_proj"):
        if not all(bool(torch.isfinite(expert).all()) for expert in getattr(module, name)):
            return f"{name} with inf or NaN"
    return None


def _gate_is_known(module: Any) -> bool:
    """Whether the module's gate, on values from -20 to 20, is the one that the stock op of its kind has."""
    values = torch.linspace(-20, 20, 41)
    gate, up = (part.flatten() for part in torch.meshgrid(values, values, indexing="ij"))
    if _is_interleaved(module):
        joined, limit = torch.stack((gate, up), dim=-1).flatten(), module.limit
        gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
        expected = (up + 1) * gate * torch.sigmoid(module.alpha * gate)
    else:
        joined, expected = torch.cat((gate, up)), torch.nn.functional.silu(gate) * up
    with torch.no_grad():
        return torch.allclose(module._apply_gate(joined[None])[0], expected, rtol=1e-4, atol=1e-5)


def _quantize(module: Any, weight_format: str) -> PackedExperts:
    """A module's weights, an expert at a time."""
    rows_first = (lambda weight: weight.T) if _is_interleaved(module) else (lambda weight: weight)
    tensors: dict[str, Any] = {"w13_zero": None, "w2_zero": None}
    for name, weight in (("w13", module.gate_up_proj), ("w2", module.down_proj)):
        parts = []
        for expert in weight.detach().unbind(0):
            rows = rows_first(expert)
            if weight_format == "mxfp4":
                parts.append(mxfp4.quantize(rows))
            else:
                parts.append(int4.quantize(rows, GROUP_SIZE, weight_format="int4", pack_dim="output")[:2])
        tensors[name], tensors[f"{name}_scale"] = (torch.stack(part) for part in zip(*parts, strict=True))
    for name, bias in (("w13_bias", "gate_up_proj_bias"), ("w2_bias", "down_proj_bias")):
        tensors[name] = module.get_parameter(bias).detach() if _is_interleaved(module) else None
    return PackedExperts(
        **tensors,
        weight_format=weight_format,
        row_order="interleaved" if _is_interleaved(module) else "gate_up",
        pack_dim="input" if weight_format == "mxfp4" else "output",
    )


def _check_sizes(name: str, module: Any, packed: PackedExperts) -> None:
    kind = "interleaved" if _is_interleaved(module) else "gate_up"
    num_experts, *sizes = module.down_proj.shape  # [E, I, K] or [E, K, I]
    wanted = (kind, num_experts, *(sizes[::-1] if _is_interleaved(module) else sizes))
    rows = packed.w13_scale.shape[2 if packed.pack_dim == "output" else 1]
    given = (packed.row_order, len(packed.w2), packed_hidden_size(packed), rows // 2)
    if wanted != given:
        allowed, advice = f"row order, E, K, I = {wanted}", "check the names, and config.json"
        raise CallError(f"{_WHAT}: {name}", f"packed {given}", allowed, advice)


def _device(model: nn.Module) -> torch.device:
    return next((p.device for p in model.parameters() if not p.is_meta), torch.device("cpu"))
