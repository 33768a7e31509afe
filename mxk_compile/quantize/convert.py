"""The work of `mxk quantize`: layer by layer, one matrix at a time, its error beside it.

Memory is bounded by the largest matrix of one expert, in the source's dtype, and `_CHUNK` values being rounded.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from mxk_compile.checkpoint import Checkpoint
from mxk_compile.checkpoint_files import TensorFiles
from mxk_compile.errors import CallError, CheckpointError, printable
from mxk_compile.ops.formats import int4, mxfp4
from mxk_compile.quantize.layouts import (
    FORMATS,
    Layer,
    Output,
    Piece,
    dense_outputs,
    find_layers,
    is_gpt_oss,
)
from mxk_compile.quantize.shards import Shard, Workplace, check_room, writing
from mxk_compile.version import __version__

_CHUNK = 1 << 21  # values rounded at a time: their temporaries are about 40 bytes each
_DENSE_BYTES = 2 << 30  # of a shard without experts; a larger tensor has one of its own
_GPT_OSS_DENSE = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]


@dataclasses.dataclass
class Errors:
    """Sums over values w and what they became, v."""

    difference: float = 0.0  # (v - w)^2
    given: float = 0.0  # w^2
    kept: float = 0.0  # v^2
    product: float = 0.0  # v * w

    def add(self, weight: torch.Tensor, value: torch.Tensor) -> None:
        """Two float32 tensors of one shape."""

        def dot(a: torch.Tensor, b: torch.Tensor) -> float:  # in fp32 its digits would depend on the machine
            return float((a * b).sum(dtype=torch.float64))

        difference = value - weight
        self.difference += dot(difference, difference)
        self.given += dot(weight, weight)
        self.kept += dot(value, value)
        self.product += dot(weight, value)

    @property
    def rel_l2(self) -> float:
        """||v - w|| / ||w||; 0 for weights of zeros."""
        return math.sqrt(self.difference / self.given) if self.given else 0.0

    @property
    def cosine(self) -> float:
        """Of the angle between v and w; 1 for weights of zeros."""
        return self.product / math.sqrt(self.given * self.kept) if self.given and self.kept else 1.0


@dataclasses.dataclass(frozen=True)
class _Plan:
    """One shard: its name, tensors, and the layer whose experts it holds, or None."""

    name: str
    outputs: tuple[Output, ...]
    layer: Layer | None


def quantize(source: Path, target: Path, weight_format: str, say: Callable[[str], None] = print) -> None:
    """Writes `target`, a checkpoint folder with packed experts; it is there whole or not at all.

    Args:
        source: a checkpoint folder with experts in float32, bfloat16 or float16, in a layout of layouts.py.
        target: a folder that is not there yet. What is unfinished lies in `target`.partial, and a later call with the
            same arguments goes on with it.
        weight_format: one of FORMATS.
        say: takes lines: a layer's errors and sizes.

    Raises:
        CheckpointError: source or target are not as they must be, the disk is full; one line, `target` is not there.
    """
    if weight_format not in FORMATS:
        raise CallError("mxk quantize", f"format {weight_format!r}", ", ".join(FORMATS), "name one of them")
    if not source.is_dir():
        raise CheckpointError(str(source), "no such directory", "a checkpoint directory", "check the path")
    with Checkpoint(source) as files:
        _quantize(files, source, target, weight_format, say)


def _quantize(
    files: Checkpoint, source: Path, target: Path, weight_format: str, say: Callable[[str], None]
) -> None:
    if files.quantization():
        given = f"a quantised checkpoint ({files.quantization().get('quant_method')})"
        raise CheckpointError(str(source), given, "bf16 or fp16 weights", "give the original checkpoint")
    if not files.config:
        raise CheckpointError(str(source), "no config.json", "a checkpoint directory", "fetch config.json")
    layers = find_layers(files, weight_format)
    _check_count(files, layers)
    dense = dense_outputs(files, layers)
    plans = _plan(layers, dense)
    with writing(target):
        work = Workplace(target, _identity(files, weight_format))
        try:
            _run(files, plans, weight_format, work, say)
            weight_map = {output.name: plan.name for plan in plans for output in plan.outputs}
            config = files.config | {"quantization_config": _quantization(layers, dense, weight_format)}
            work.publish(weight_map, config, source)
        finally:
            work.close()
    _say_sizes(files, plans, target, say)


def _check_count(files: Checkpoint, layers: Sequence[Layer]) -> None:
    """Readers of the output take the number of experts from config.json."""
    stated = files.num_experts()
    for layer in layers:
        if stated not in (None, layer.num_experts):
            what, given = str(files.directory / "config.json"), f"{stated} experts"
            allowed = f"{layer.num_experts}, as {layer.prefix} has"
            raise CheckpointError(what, given, allowed, "check that all files are of one checkpoint")


def _identity(files: TensorFiles, weight_format: str) -> dict[str, Any]:
    """What must be the same for a run that goes on: format, version, and the source's files."""
    paths = sorted({files.entry(name).path for name in files.names()})
    stats = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    folder = str(files.directory.resolve())
    return {"source": folder, "files": stats, "format": weight_format, "version": __version__}


def _plan(layers: Sequence[Layer], dense: Sequence[Output]) -> list[_Plan]:
    """A shard for each layer's experts, and shards of up to _DENSE_BYTES for the rest."""
    parts: list[list[Output]] = []
    room = 0
    for output in dense:
        if not parts or output.num_bytes > room:
            parts.append([])
            room = _DENSE_BYTES
        parts[-1].append(output)
        room -= output.num_bytes
    groups: list[tuple[tuple[Output, ...], Layer | None]] = [(tuple(part), None) for part in parts]
    groups += [(layer.outputs, layer) for layer in layers]
    return [
        _Plan(f"model-{number:05d}-of-{len(groups):05d}.safetensors", *group)
        for number, group in enumerate(groups, 1)
    ]


def _run(
    files: TensorFiles,
    plans: Sequence[_Plan],
    weight_format: str,
    work: Workplace,
    say: Callable[[str], None],
) -> None:
    left = [plan for plan in plans if plan.name not in work.done]
    check_room(work.folder, sum(output.num_bytes for plan in left for output in plan.outputs))
    if len(left) < len(plans):
        say(f"goes on: {len(plans) - len(left)} of {len(plans)} shards are there")
    for plan in plans:
        before = _source_bytes(files, plan)
        if plan in left:
            work.record(plan.name, _write(files, plan, weight_format, work))
        else:
            files.skip(before)
        if plan.layer is not None:
            _say_layer(plan, before, work.done[plan.name], say)


def _source_bytes(files: TensorFiles, plan: _Plan) -> int:
    names = plan.layer.sources if plan.layer is not None else {output.name for output in plan.outputs}
    return sum(files.entry(name).num_bytes for name in names)


def _say_layer(plan: _Plan, before: int, record: dict[str, Any], say: Callable[[str], None]) -> None:
    assert plan.layer is not None
    errors, after = Errors(**record["errors"]), record["data_bytes"]
    say(
        f"{printable(plan.layer.prefix)}  rel_l2 {errors.rel_l2:.3e}  cosine {errors.cosine:.6f}  "
        f"{before:,} -> {after:,} bytes ({after / before:.3f} x)"
    )


def _write(files: TensorFiles, plan: _Plan, weight_format: str, work: Workplace) -> dict[str, Any]:
    """One shard; returns what the journal keeps of it."""
    shard, errors = Shard(work.path(plan.name), plan.outputs), Errors()
    try:
        if plan.layer is None:
            copies: Sequence[str] = [output.name for output in plan.outputs]
        else:
            copies = plan.layer.copies
            for piece in plan.layer.pieces:
                _round(files, piece, weight_format, shard, errors)
            for name, shape in plan.layer.shapes:
                shard.write(name, torch.tensor(shape, dtype=torch.int64))
        for name in copies:
            shard.write(name, files.tensor(name))
        shard.finish()
    except BaseException:
        shard.abandon()
        raise
    data_bytes = sum(output.num_bytes for output in plan.outputs)
    return {"bytes": shard.num_bytes, "data_bytes": data_bytes, "errors": vars(errors)}


def _round(files: TensorFiles, piece: Piece, weight_format: str, shard: Shard, errors: Errors) -> None:
    """One matrix, some rows at a time."""
    matrix = _read(files, piece)
    step = max(_CHUNK // piece.columns, 1)
    for start in range(0, piece.rows, step):
        weight = matrix[start : start + step].float()
        try:
            if weight_format == "mxfp4":
                packed, scale = mxfp4.quantize(weight)
                value = mxfp4.unpack(packed, scale, torch.float32)
            else:
                packed, scale, _ = int4.quantize(weight, mxfp4.BLOCK)
                value = int4.unpack(packed, scale)
        except CallError as error:
            files.refuse(piece.source, error.given, error.allowed, error.advice)
        errors.add(weight, value)
        row = piece.first_row + start
        shard.write(piece.packed, packed, row * piece.columns // 2)
        shard.write(piece.scale, scale, row * piece.columns // mxfp4.BLOCK * scale.element_size())


def _read(files: TensorFiles, piece: Piece) -> torch.Tensor:
    """[rows, columns] of one expert, in the dtype of the file."""
    if piece.expert is None:
        return files.tensor(piece.source)
    matrix = files.tensor_at(piece.source, piece.expert)
    return matrix.t() if piece.is_transposed else matrix


def _quantization(layers: list[Layer], dense: Sequence[Output], weight_format: str) -> dict[str, Any]:
    """quantization_config of the output's config.json."""
    # Linear layers that stay as they are, one by one: no pattern has to fit every model.
    linear = [
        output.name.removesuffix(".weight")
        for output in dense
        if output.name.endswith(".weight") and len(output.shape) == 2 and "embed" not in output.name
    ]
    if weight_format == "mxfp4":
        if is_gpt_oss(layers):
            return {"quant_method": "mxfp4", "modules_to_not_convert": _GPT_OSS_DENSE}
        # A name of its own: other readers of "mxfp4" expect gpt-oss, and would load nothing without a word.
        stacked = {"quant_method": "mxfp4_stacked", "row_order": "gate_up", "group_size": mxfp4.BLOCK}
        return {**stacked, "modules_to_not_convert": linear}
    weights = {
        "num_bits": 4,
        "type": "int",
        "strategy": "group",
        "group_size": mxfp4.BLOCK,
        "symmetric": True,
        "dynamic": False,
        "observer": "minmax",
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": weights, "format": "pack-quantized"},
        },
        "ignore": linear,
    }


def _say_sizes(files: TensorFiles, plans: Sequence[_Plan], target: Path, say: Callable[[str], None]) -> None:
    before = sum(files.entry(name).num_bytes for name in files.names())
    after = sum(output.num_bytes for plan in plans for output in plan.outputs)
    say(f"{target}: {before:,} -> {after:,} bytes ({after / before:.3f} x), {len(plans)} shards")
