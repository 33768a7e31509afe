"""Real weights for parity: the experts of one layer of a checkpoint, and its router."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from mxk_compile.checkpoint import Checkpoint, PackedExperts
from mxk_compile.errors import CheckpointError, printable
from mxk_compile.ops.formats.int4 import FLOAT_DTYPES
from mxk_compile.parity.cases import LOCAL_EXPERTS, Source
from mxk_compile.testing import variant_case
from mxk_compile.variants import MoEVariant

_EXPERTS = re.compile(r"(.*\blayers\.([0-9]{1,9})\.(?:.*\.)?experts)\.")
_ROUTERS = ("router", "gate")


def checkpoint_source(folder: Path, variant: MoEVariant, layer: int | None = None) -> Source:
    """The first experts of a layer's middle as the local ones of a card, at the layer's own sizes.

    Args:
        folder: a checkpoint that `mxk_compile.checkpoint` reads.
        variant: the row that the model is; attributes come from it, K, I, E and k from the checkpoint.
        layer: by default the middle one of those with experts.

    Raises:
        CheckpointError: no such checkpoint or layer, or experts of another format than the row's; one line.
    """
    with Checkpoint(folder) as files:
        prefixes = {int(match[2]): match[1] for match in map(_EXPERTS.match, files.names()) if match}
        if not prefixes:
            given = "no experts (no tensor named ...layers.N...experts...)"
            raise CheckpointError(str(folder), given, "a checkpoint of a 4-bit MoE model", "check the folder")
        number = sorted(prefixes)[len(prefixes) // 2] if layer is None else layer
        if number not in prefixes:
            given, allowed = f"layer {number} has no experts", ", ".join(map(str, sorted(prefixes)))
            raise CheckpointError(str(folder), given, allowed, "choose one of these layers")
        # MXFP4 is published in two namings; the plain one does not tell the order of gate and up.
        plain = variant.weight_format == "mxfp4" and f"{prefixes[number]}.gate_up_proj_blocks" not in files
        scheme: dict[str, Any] = {"scheme": "mxfp4", "row_order": variant.row_order} if plain else {}
        packed = files.experts(prefixes[number], **scheme)
        router = _router(files, prefixes[number], len(packed.w2), packed.w2.shape[1])
        top_k = files.config.get("num_experts_per_tok")
    print(printable(f"weights of {folder}, {prefixes[number]}"), flush=True)
    return _source(folder, variant, packed, router, top_k if isinstance(top_k, int) else variant.top_k)


def _source(
    folder: Path,
    variant: MoEVariant,
    packed: PackedExperts,
    router: Callable[[Tensor], Tensor] | None,
    top_k: int,
) -> Source:
    wanted = (variant.weight_format, variant.row_order, variant.bias)
    found = (packed.weight_format, packed.row_order, packed.w13_bias is not None)
    if found != wanted:
        given = "{}, rows {}, bias {}".format(*found)
        allowed = "{}, rows {}, bias {}".format(*wanted)
        raise CheckpointError(
            str(folder), given, f"{allowed}, as row {variant.name}", "choose another --variant"
        )
    if packed.w13_zero is not None:
        given, allowed = "zero points for each group", "symmetric INT4"
        raise CheckpointError(str(folder), given, allowed, "parity has no row for them")
    num_experts, hidden_size = packed.w2.shape[:2]
    sized = dataclasses.replace(
        variant,
        hidden_size=hidden_size,
        intermediate_size=packed.w13.shape[1] // 2,
        num_experts=num_experts,
        top_k=min(top_k, num_experts),
    )
    count = min(LOCAL_EXPERTS, num_experts)
    first = (num_experts - count) // 2
    local = slice(first, first + count)

    def part(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor[local].clone()  # the other experts' memory goes

    shell = variant_case(variant, hidden_size=32, intermediate_size=32, num_experts=1, num_tokens=1, top_k=1)
    names = ("w13", "w13_scale", "w2", "w2_scale", "w13_bias", "w2_bias")
    tensors = {name: part(getattr(packed, name)) for name in names}
    attributes = {**shell.attributes, "experts_min": first}
    case = dataclasses.replace(shell, attributes=attributes, **tensors)  # type: ignore[arg-type]
    return Source(sized, case, num_experts, router)


def _router(
    files: Checkpoint, prefix: str, num_experts: int, hidden_size: int
) -> Callable[[Tensor], Tensor] | None:
    """The layer's own router, where the checkpoint names one as gpt-oss, Qwen3-MoE or Mixtral do."""
    stem = prefix.rpartition(".")[0]
    for name in (f"{stem}.{router}.weight" for router in _ROUTERS):
        if name not in files:
            continue
        files.expect(name, FLOAT_DTYPES, (num_experts, hidden_size))
        weight = files.tensor(name).float()
        bias_name = name.removesuffix("weight") + "bias"
        bias = files.tensor(bias_name).float() if bias_name in files else torch.zeros(num_experts)
        return lambda hidden_states: functional.linear(hidden_states.float(), weight, bias)
    return None
