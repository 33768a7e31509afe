"""The stacks that servers make of compressed-tensors INT4 experts, where a checkpoint holds those.

vLLM and vllm-gaudi call them w13_weight_packed, w13_weight_scale, w13_weight_zero_point and w2_...; gate rows first.
Which dimension a word packs, and which one comes last, is read from the shapes together with the scale's:

    form        weight int32  scale         zero points int32  becomes
    output      [E, K, N/8]   [E, K/g, N]   [E, K/g, N/8]      pack_dim "output", every tensor as it is
    transposed  [E, K/8, N]   [E, K/g, N]   [E, K/g, N/8]      pack_dim "input", words and scales transposed
    input       [E, N, K/8]   [E, N, K/g]   [E, N/8, K/g]      pack_dim "input"
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mxk_compile.checkpoint_files import TensorFiles
from mxk_compile.ops.formats.int4 import FLOAT_DTYPES, GROUP_SIZES
from mxk_compile.ops.formats.nibbles import unpack_nibbles, unpack_rows

_PARTS = ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "bias")


def read_stacks(
    files: TensorFiles,
    prefix: str,
    num_experts: int | None,
    group_size: Callable[[int], int],
    symmetric: bool,
) -> dict[str, Any]:
    """Tensors and pack_dim of `PackedExperts` by name.

    Args:
        files: the checkpoint.
        prefix: of the layer's experts.
        num_experts: as the metadata says, or None.
        group_size: the declared one, for a number of inputs.
        symmetric: whether there are no zero points.

    Raises:
        CheckpointError: shapes or dtypes of no form above, or of different ones.
    """
    _check_names(files, prefix)
    tensors: dict[str, torch.Tensor | None] = {}
    forms, sizes = [], []
    for key in ("w13", "w2"):
        name = f"{prefix}.{key}_weight"
        form, experts, rows, columns, groups = _form(files, name, num_experts, group_size)
        sizes.append((experts, rows, columns))
        if key == "w2":
            wanted = (sizes[0][0], sizes[0][2], sizes[0][1] // 2)
            if (experts, rows, columns) != wanted or sizes[0][1] % 2:
                given = f"E, N, K = {[experts, rows, columns]} beside {list(sizes[0])} of w13"
                files.refuse(
                    f"{name}_packed", given, f"{list(wanted)}", "check that all files are of one checkpoint"
                )
        zero = None
        if not symmetric:
            zero = _zero(files, f"{name}_zero_point", form, experts, rows, groups)
        elif f"{name}_zero_point" in files:
            given, allowed = "zero points in a symmetric checkpoint", "none with symmetric=true"
            files.refuse(f"{name}_zero_point", given, allowed, "check config.json")
        weight, scale = files.tensor(f"{name}_packed"), files.tensor(f"{name}_scale")
        if form == "transposed":
            weight, scale = weight.transpose(1, 2).contiguous(), scale.transpose(1, 2).contiguous()
        # Words of outputs stay words, as `mxk::moe` takes them.
        tensors[key] = weight if form == "output" else weight.view(torch.uint8)
        bias = None
        if f"{prefix}.{key}_bias" in files:
            files.expect(f"{prefix}.{key}_bias", FLOAT_DTYPES, (experts, rows))
            bias = files.tensor(f"{prefix}.{key}_bias")
        tensors |= {f"{key}_scale": scale, f"{key}_zero": zero, f"{key}_bias": bias}
        forms.append(form)
    pack_dims = ["output" if form == "output" else "input" for form in forms]
    if pack_dims[0] != pack_dims[1]:
        given = f"packed along the {pack_dims[1]}s, w13 along the {pack_dims[0]}s"
        files.refuse(f"{prefix}.w2_weight_packed", given, "one dimension for both", "convert one of them")
    return {**tensors, "pack_dim": pack_dims[0]}


def _check_names(files: TensorFiles, prefix: str) -> None:
    """Refuses what would have to be known to read the weights right: an activation order, a second scale.

    Servers keep an order that there is not as a tensor without elements.
    """
    for name in files.names():
        part = name.removeprefix(f"{prefix}.")
        if part != name and part.startswith(("w13_", "w2_")) and part.partition("_")[2] not in _PARTS:
            if files.entry(name).num_bytes == 0:
                continue
            allowed = f"w13_ and w2_ with {', '.join(_PARTS)}"
            files.refuse(name, "a tensor that is not known", allowed, "quantise without activation order")


def _form(
    files: TensorFiles, name: str, num_experts: int | None, group_size: Callable[[int], int]
) -> tuple[str, int, int, int, int]:
    """Form, E, N, K and the groups of a row."""
    experts, *shape = files.expect(f"{name}_packed", (torch.int32,), (num_experts, None, None))
    _, *scale = files.expect(f"{name}_scale", FLOAT_DTYPES, (experts, None, None))
    for form, rows, columns, (scale_rows, groups) in (
        ("output", shape[1] * 8, shape[0], scale[::-1]),
        ("transposed", shape[1], shape[0] * 8, scale[::-1]),
        ("input", shape[0], shape[1] * 8, scale),
    ):
        size = group_size(columns)
        # No two forms fit: they would need groups of 8 or less.
        if rows == scale_rows and groups * size == columns and (groups == 1 or size in GROUP_SIZES):
            return form, experts, rows, columns, groups
    given = f"shape {[experts, *shape]} with scale {[experts, *scale]}"
    allowed = "[E, K, N/8] or [E, K/8, N] with [E, K/g, N], [E, N, K/8] with [E, N, K/g], g as declared: 32, 64, 128, K"
    return files.refuse(f"{name}_packed", given, allowed, "one of the two is of another checkpoint")


def _zero(files: TensorFiles, name: str, form: str, num_experts: int, rows: int, groups: int) -> torch.Tensor:
    """Zero points as `mxk::moe` takes them: words of outputs like the weight's, or one byte a group."""
    words = -(-rows // 8)
    shape = (num_experts, words, groups) if form == "input" else (num_experts, groups, words)
    files.expect(name, (torch.int32,), shape)
    packed = files.tensor(name)
    if form == "output":
        return packed
    codes = unpack_rows(packed) if form == "input" else unpack_nibbles(packed).transpose(1, 2)
    return codes[:, :rows].contiguous()
