"""Which tensors of a checkpoint are its experts, and what the output holds instead.

    gpt-oss    ...mlp.experts.gate_up_proj [E, K, 2I] (columns gate, up, gate, ...), down_proj [E, I, K], their _bias
    Qwen3-MoE  ...mlp.experts.{e}.gate_proj.weight [I, K], up_proj, down_proj [K, I]
    Mixtral    ...block_sparse_moe.experts.{e}.w1.weight (gate) [I, K], w3 (up), w2 (down) [K, I]

Outputs, with E experts, K hidden and I intermediate size:

    mxfp4, gpt-oss      gate_up_proj_blocks u8 [E, 2I, K/32, 16], gate_up_proj_scales u8 [E, 2I, K/32], down_proj_*: as
                        openai/gpt-oss-20b is published
    mxfp4, the others   gate_up_proj u8 [E, 2I, K/2] (gates, then ups), gate_up_proj_scale u8 [E, 2I, K/32], down_proj,
                        down_proj_scale: scheme "mxfp4" of checkpoint.py, row_order "gate_up"
    int4-g32            {e}.{projection}.weight_packed i32 [N, K/8], weight_scale bf16 [N, K/32], weight_shape:
                        "pack-quantized" of compressed-tensors
"""

from __future__ import annotations

import dataclasses
import re

import torch

from mxk_compile.checkpoint_files import TensorFiles
from mxk_compile.errors import CheckpointError
from mxk_compile.ops.formats.int4 import FLOAT_DTYPES
from mxk_compile.ops.formats.mxfp4 import BLOCK, BLOCK_BYTES

FORMATS = ("mxfp4", "int4-g32")
_STACKED = re.compile(r"(.*\.experts)\.gate_up_proj$")
_SINGLE = re.compile(r"(.*\.experts)\.([0-9]{1,9})\.(gate_proj|w1)\.weight$")
_NAMES = {"gate_proj": ("gate_proj", "up_proj", "down_proj"), "w1": ("w1", "w3", "w2")}
_LAYOUTS = "experts of gpt-oss, Qwen3-MoE or Mixtral (mxk_compile/quantize/layouts.py)"


@dataclasses.dataclass(frozen=True)
class Output:
    """One tensor of the output."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Of its data."""
        return self.dtype.itemsize * torch.Size(self.shape).numel()


@dataclasses.dataclass(frozen=True)
class Piece:
    """One matrix [rows, columns] of one expert, and where it goes.

    Attributes:
        source: tensor that holds it.
        expert: its place in a stack, None where the tensor is the matrix.
        is_transposed: whether it lies as [columns, rows].
        rows, columns: outputs and inputs.
        packed, scale: tensors of the output.
        first_row: of it in these.
    """

    source: str
    expert: int | None
    is_transposed: bool
    rows: int
    columns: int
    packed: str
    scale: str
    first_row: int = 0


@dataclasses.dataclass(frozen=True)
class Layer:
    """The experts of one layer.

    Attributes:
        prefix: of their names.
        num_experts: E.
        outputs: what is made of `pieces`, and `copies`.
        pieces: what is rounded.
        copies: tensors that go on as they are: biases.
        shapes: weight_shape tensors of the output.
    """

    prefix: str
    num_experts: int
    outputs: tuple[Output, ...]
    pieces: tuple[Piece, ...]
    copies: tuple[str, ...] = ()
    shapes: tuple[tuple[str, tuple[int, int]], ...] = ()

    @property
    def sources(self) -> set[str]:
        """Tensors of the checkpoint that this layer uses up."""
        return {piece.source for piece in self.pieces} | set(self.copies)


def find_layers(files: TensorFiles, weight_format: str) -> list[Layer]:
    """The layers with experts, in the order of the files. Raises CheckpointError for none, or shapes that disagree."""
    layers: dict[str, Layer] = {}
    for name in files.names():
        if match := _STACKED.match(name):
            layers[match[1]] = _gpt_oss(files, match[1], weight_format)
        elif (match := _SINGLE.match(name)) and match[1] not in layers:
            layers[match[1]] = _separate(files, match[1], _NAMES[match[3]], weight_format)
    if not layers:
        given = "no experts that are known"
        raise CheckpointError(str(files.path), given, _LAYOUTS, "give such a checkpoint in bf16 or fp16")
    return list(layers.values())


def is_gpt_oss(layers: list[Layer]) -> bool:
    """Whether the output is in the naming of gpt-oss."""
    return any(output.name.endswith("_blocks") for output in layers[0].outputs)


def _gpt_oss(files: TensorFiles, prefix: str, weight_format: str) -> Layer:
    if weight_format != "mxfp4":
        allowed = "mxfp4 for gpt-oss, whose INT4 form nothing reads"
        raise CheckpointError(f"{files.path}: {prefix}", f"--format {weight_format}", allowed, "choose mxfp4")
    names = [f"{prefix}.{part}" for part in ("gate_up_proj", "down_proj")]
    experts, hidden, double = files.expect(names[0], FLOAT_DTYPES, (None, None, None))
    inner = double // 2
    if double % 2:
        files.refuse(names[0], f"{double} columns", "gates and ups, an even number", "check the model")
    files.expect(names[1], FLOAT_DTYPES, (experts, inner, hidden))
    copies = tuple(f"{name}_bias" for name in names)
    for name, rows in zip(copies, (double, hidden), strict=True):
        files.expect(name, FLOAT_DTYPES, (experts, rows))
    outputs: list[Output] = []
    pieces: list[Piece] = []
    for name, rows, columns in ((names[0], double, hidden), (names[1], hidden, inner)):
        _check_columns(files, name, columns)
        packed = Output(f"{name}_blocks", torch.uint8, (experts, rows, columns // BLOCK, BLOCK_BYTES))
        scale = Output(f"{name}_scales", torch.uint8, (experts, rows, columns // BLOCK))
        outputs += [packed, scale]
        pieces += [
            Piece(name, expert, True, rows, columns, packed.name, scale.name, expert * rows)
            for expert in range(experts)
        ]
    outputs += [_like(files, name) for name in copies]
    return Layer(prefix, experts, tuple(outputs), tuple(pieces), copies)


def _separate(files: TensorFiles, prefix: str, names: tuple[str, ...], weight_format: str) -> Layer:
    """Qwen3-MoE and Mixtral: three matrices an expert."""
    experts = _count(files, prefix)
    gate = f"{prefix}.0.{names[0]}.weight"
    inner, hidden = files.expect(gate, FLOAT_DTYPES, (None, None))
    shapes = dict(zip(names, ((inner, hidden), (inner, hidden), (hidden, inner)), strict=True))
    for name, (_, columns) in shapes.items():
        _check_columns(files, f"{prefix}.0.{name}.weight", columns)
        for expert in range(experts):
            files.expect(f"{prefix}.{expert}.{name}.weight", FLOAT_DTYPES, shapes[name])
    if weight_format == "mxfp4":
        return _plain_mxfp4(prefix, experts, shapes)
    outputs, pieces, shape_tensors = [], [], []
    for expert in range(experts):
        for name, (rows, columns) in shapes.items():
            stem = f"{prefix}.{expert}.{name}.weight"
            packed = Output(f"{stem}_packed", torch.int32, (rows, columns // 8))
            scale = Output(f"{stem}_scale", torch.bfloat16, (rows, columns // BLOCK))
            outputs += [packed, scale, Output(f"{stem}_shape", torch.int64, (2,))]
            shape_tensors.append((f"{stem}_shape", (rows, columns)))
            pieces.append(Piece(stem, None, False, rows, columns, packed.name, scale.name))
    return Layer(prefix, experts, tuple(outputs), tuple(pieces), (), tuple(shape_tensors))


def _plain_mxfp4(prefix: str, experts: int, shapes: dict[str, tuple[int, int]]) -> Layer:
    gate, up, down = shapes
    inner, hidden = shapes[gate]
    outputs, pieces = [], []
    for stack, rows, columns, parts in (
        ("gate_up_proj", 2 * inner, hidden, (gate, up)),
        ("down_proj", hidden, inner, (down,)),
    ):
        packed = Output(f"{prefix}.{stack}", torch.uint8, (experts, rows, columns // 2))
        scale = Output(f"{prefix}.{stack}_scale", torch.uint8, (experts, rows, columns // BLOCK))
        outputs += [packed, scale]
        pieces += [
            Piece(
                f"{prefix}.{expert}.{part}.weight",
                None,
                False,
                rows // len(parts),
                columns,
                packed.name,
                scale.name,
                expert * rows + place * (rows // len(parts)),
            )
            for expert in range(experts)
            for place, part in enumerate(parts)
        ]
    return Layer(prefix, experts, tuple(outputs), tuple(pieces))


def _count(files: TensorFiles, prefix: str) -> int:
    """Experts 0, 1, ... of a layer; raises CheckpointError for a gap."""
    pattern = re.compile(re.escape(prefix) + r"\.([0-9]{1,9})\.")
    found = {int(match[1]) for match in map(pattern.match, files.names()) if match}
    if found != set(range(len(found))):
        missing = min(set(range(len(found))) - found)
        allowed = f"experts 0 to {len(found) - 1}"
        raise CheckpointError(
            str(files.path), f"{prefix}: no expert {missing}", allowed, "fetch the missing shard"
        )
    return len(found)


def _check_columns(files: TensorFiles, name: str, columns: int) -> None:
    if columns % BLOCK:
        files.refuse(name, f"{columns} inputs", f"a multiple of {BLOCK}", "this layer cannot be packed")


def _like(files: TensorFiles, name: str) -> Output:
    """A tensor that goes on as it is."""
    entry = files.entry(name)
    if entry.dtype is None:
        files.refuse(name, f"dtype {entry.dtype_name}", "a dtype that torch has", "convert it")
    return Output(name, entry.dtype, entry.shape)


def dense_outputs(files: TensorFiles, layers: list[Layer]) -> list[Output]:
    """Everything that is no expert, in the order of the files.

    Raises CheckpointError for tensors of experts that the output has no place for, as biases of Qwen3-MoE: beside
    packed weights no reader would look at them.
    """
    used = set().union(*(layer.sources for layer in layers))
    prefixes = {layer.prefix for layer in layers}
    rest = [name for name in files.names() if name not in used]
    for name in rest:
        before, marker, _ = name.rpartition(".experts.")
        if before + marker[:-1] in prefixes:
            files.refuse(
                name, "a tensor of experts that is not known", _LAYOUTS, "take it out, if it is not needed"
            )
    return [_like(files, name) for name in rest]
