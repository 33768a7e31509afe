"""INT4 experts of a checkpoint: compressed-tensors, GPTQ, AWQ, one tensor for each expert and projection; or stacks.

They become "uint4" stacks packed along the input dimension. compressed-tensors words are in that order already and are
read into their place; a GPTQ word holds eight inputs of one output, so that a transpose of words gives the same order;
an AWQ word holds eight outputs of one input, in an order of its own, and is packed anew. Zero points are unpacked to
one byte a group. Stacks are read by checkpoint_stacks.py.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from mxk_compile.checkpoint_files import TensorFiles
from mxk_compile.checkpoint_stacks import read_stacks
from mxk_compile.errors import CallError, CheckpointError
from mxk_compile.ops.formats import int4
from mxk_compile.ops.formats.int4 import FLOAT_DTYPES
from mxk_compile.ops.formats.nibbles import unpack_nibbles

# What a stored zero point lacks: version 1 stores (zero - 1) & 15, version 2 the zero.
GPTQ_FORMATS = {"gptq": 1, "gptq_v2": 0}


@dataclass(frozen=True)
class _Parts:
    """What a scheme calls the tensors of one linear layer with N outputs and K inputs.

    inputs_first: scale [K/g, N], zero int32 [K/g, N/8], else scale [N, K/g], zero int32 [N/8, K/g]. The weight is int32
    [K, N/8] if packs_outputs, [K/8, N] if only inputs_first, else [N, K/8]. A word holds eight codes 0..15, nibble i
    (from the low one) that of element `order[i]`.
    """

    weight: str
    scale: str
    zero: str
    group_index: str
    inputs_first: bool
    packs_outputs: bool = False
    order: tuple[int, ...] = tuple(range(8))

    def shape(self, rows: int, columns: int) -> tuple[int, int]:
        """Shape in the file of what is [rows, columns] with outputs first."""
        return (columns, rows) if self.inputs_first else (rows, columns)

    def weight_shape(self, rows: int, columns: int) -> tuple[int, int]:
        """Of the packed weight with so many outputs and inputs."""
        return (columns, rows // 8) if self.packs_outputs else self.shape(rows, columns // 8)

    def unpack(self, words: torch.Tensor) -> torch.Tensor:
        """Codes uint8 [..., 8n] of int32 [..., n]."""
        places = [self.order.index(element) for element in range(8)]
        codes: torch.Tensor = unpack_nibbles(words).unflatten(-1, (-1, 8))
        return codes[..., places].flatten(-2)


_PARTS = {
    "compressed_tensors": _Parts("weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx", False),
    "gptq": _Parts("qweight", "scales", "qzeros", "g_idx", True),
    # AutoAWQ's "gemm" packing, awq/utils/packing_utils.py
    "awq": _Parts("qweight", "scales", "qzeros", "g_idx", True, True, (0, 2, 4, 6, 1, 3, 5, 7)),
}


class Int4Layer:
    """The experts of one layer. Raises CheckpointError for a configuration that is not understood."""

    def __init__(
        self,
        files: TensorFiles,
        prefix: str,
        scheme: str,
        quantization: dict[str, Any],
        gptq_format: str | None,
    ) -> None:
        self.files, self.prefix, self.parts = files, prefix, _PARTS[scheme]
        is_mixtral = self._name(0, "w1", self.parts.weight) in files
        self.projections = ("w1", "w3", "w2") if is_mixtral else ("gate_proj", "up_proj", "down_proj")
        is_gptq = scheme == "gptq"
        config = self._compressed_config(quantization) if scheme == "compressed_tensors" else quantization
        if scheme == "awq":
            config = self._awq_config(quantization)
        num_bits = config.get("bits" if is_gptq else "num_bits")
        if num_bits != 4:
            self._refuse_config(f"{num_bits!r} bits", "4 bits", "choose a 4-bit checkpoint")
        self.group_size = config.get("group_size")  # None or -1: one group a row
        self.gptq_format: str | None = None
        self.label_is_given = gptq_format is not None
        self.symmetric = config.get("sym" if is_gptq else "symmetric") is True
        if is_gptq:
            self.gptq_format = gptq_format or config.get("checkpoint_format") or "gptq"
            if self.gptq_format not in tuple(GPTQ_FORMATS):
                given = f"checkpoint_format {self.gptq_format!r}"
                self._refuse_config(given, ", ".join(GPTQ_FORMATS), "convert the checkpoint")
        self.stores_zero = is_gptq or not self.symmetric

    def read(self, num_experts: int | None) -> dict[str, Any]:
        """Tensors of `PackedExperts` by name; num_experts None counts the experts in the file."""
        if f"{self.prefix}.w13_weight_packed" in self.files:
            return read_stacks(self.files, self.prefix, num_experts, self._declared, self.symmetric)
        num_experts = self._count(num_experts)
        first = self._name(0, self.projections[0], self.parts.weight)
        rows, columns = self.files.expect(first, (torch.int32,), (None, None))
        if self.parts.packs_outputs:
            rows, columns = columns * 8, rows
        else:
            rows, words = self.parts.shape(rows, columns)
            columns = words * 8
        w13 = self._stack("w13", num_experts, self.projections[:2], rows, columns)
        return w13 | self._stack("w2", num_experts, self.projections[2:], columns, rows)

    def _declared(self, columns: int) -> int:
        """Group size of the metadata, for a row of so many inputs."""
        size = columns if self.group_size in (None, -1) else self.group_size
        return size if isinstance(size, int) else 0

    def _stack(
        self, key: str, num_experts: int, projections: tuple[str, ...], rows: int, columns: int
    ) -> dict[str, torch.Tensor | None]:
        """Weight, scale, zero points and bias of projections one below the other: [E, P * rows, ...]."""
        linears = [
            (expert, slice(place * rows, (place + 1) * rows), self._name(expert, projection, ""))
            for expert in range(num_experts)
            for place, projection in enumerate(projections)
        ]
        first = linears[0][2]
        if self.parts.packs_outputs:
            if rows % 8:
                self.files.refuse(
                    first + self.parts.weight, f"{rows} outputs", "a multiple of 8", "check the file"
                )
            # Writers of symmetric AWQ differ in whether they store what all zero points are.
            self.stores_zero = not self.symmetric or first + self.parts.zero in self.files
        num_groups = self._num_groups(first + self.parts.scale, rows, columns)
        scale_dtype = self.files.entry(first + self.parts.scale).dtype
        bias_dtype = self.files.entry(first + "bias").dtype if first + "bias" in self.files else None
        for _, _, name in linears:  # all headers before any data
            self._check(name, rows, columns, num_groups, scale_dtype, bias_dtype)
        lead = (num_experts, len(projections) * rows)
        weight = torch.empty(*lead, columns // 2, dtype=torch.uint8)
        scale = torch.empty(*lead, num_groups, dtype=scale_dtype)
        zero = None if self.symmetric else torch.empty(*lead, num_groups, dtype=torch.uint8)
        bias = torch.empty(lead, dtype=bias_dtype) if bias_dtype is not None else None
        for expert, at, name in linears:
            if self.parts.packs_outputs:
                codes = self.parts.unpack(self.files.tensor(name + self.parts.weight))
                weight[expert, at] = int4.pack(codes.t())
            else:
                self._copy(name + self.parts.weight, weight[expert, at].view(torch.int32))
            self._copy(name + self.parts.scale, scale[expert, at])
            if self.stores_zero:
                of_linear = self._zero(name + self.parts.zero)[:rows]
                if zero is None:
                    self._check_zero(name + self.parts.zero, of_linear)
                else:
                    zero[expert, at] = of_linear
            if bias is not None:
                self.files.read_into(name + "bias", bias[expert, at])
        if zero is not None:
            self._check_zero(first + self.parts.zero, zero)
        return {key: weight, f"{key}_scale": scale, f"{key}_zero": zero, f"{key}_bias": bias}

    def _name(self, expert: int | str, projection: str, part: str) -> str:
        return f"{self.prefix}.{expert}.{projection}.{part}"

    def _count(self, num_experts: int | None) -> int:
        """The number of experts, each of which the file names; so what is built for each is bounded by the file."""
        pattern = re.compile(re.escape(self.prefix) + r"\.(\d+)\.")
        found = {match[1] for match in map(pattern.match, self.files.names()) if match}
        if num_experts is None:
            num_experts = max(len(found), 1)
        for expert in range(num_experts):
            if str(expert) not in found:
                self.files.entry(
                    self._name(expert, self.projections[0], self.parts.weight)
                )  # raises: there is none
        more = found.difference(map(str, range(num_experts)))
        if more:
            last = max(more, key=lambda digits: (len(digits), digits))
            name = self._name(last, self.projections[0], self.parts.weight)
            self.files.refuse(
                name, f"expert {last}", f"{num_experts} experts (config.json)", "check the file"
            )
        return num_experts

    def _num_groups(self, name: str, rows: int, columns: int) -> int:
        """Groups of a row, from the scale's shape; they must be what the metadata declares."""
        shape = self.files.expect(name, FLOAT_DTYPES, (None, None))
        num_groups = self.parts.shape(*shape)[1]
        declared = self._declared(columns)
        given = f"scale of shape {list(shape)} for K={columns}"
        allowed = f"group_size {declared} (config.json)"
        try:
            size = int4.group_size(columns, num_groups)
        except CallError as error:
            allowed = f"{error.allowed}, {allowed}"
            size = None
        if size != declared:
            self.files.refuse(name, given, allowed, "one of the two is of another checkpoint")
        return num_groups

    def _check(
        self,
        name: str,
        rows: int,
        columns: int,
        num_groups: int,
        scale_dtype: torch.dtype | None,
        bias_dtype: torch.dtype | None,
    ) -> None:
        """Check the headers of one linear layer, and the two small tensors that say how to read it."""
        files, parts = self.files, self.parts
        assert scale_dtype is not None
        files.expect(name + parts.weight, (torch.int32,), parts.weight_shape(rows, columns))
        files.expect(name + parts.scale, (scale_dtype,), parts.shape(rows, num_groups))
        if self.stores_zero:
            words = -(-rows // 8)
            files.expect(name + parts.zero, (torch.int32,), parts.shape(words, num_groups))
        elif name + parts.zero in files:
            given = "zero points in a symmetric checkpoint"
            files.refuse(name + parts.zero, given, "none with symmetric=true", "check config.json")
        if bias_dtype is not None:
            files.expect(name + "bias", FLOAT_DTYPES, (rows,))
            files.expect(name + "bias", (bias_dtype,), (rows,))
        if name + "weight_shape" in files:
            files.expect(name + "weight_shape", (torch.int32, torch.int64), (2,))
            shape = files.tensor(name + "weight_shape").tolist()
            if shape != [rows, columns]:
                files.refuse(
                    name + "weight_shape", f"{shape}", f"{[rows, columns]}", "rows must not be padded"
                )
        if name + parts.group_index in files:
            files.expect(name + parts.group_index, (torch.int32, torch.int64), (columns,))
            index = files.tensor(name + parts.group_index)
            if not torch.equal(index.long(), torch.arange(columns) // (columns // num_groups)):
                allowed = "inputs in the order of their groups"
                advice = "quantise without activation order (desc_act, actorder)"
                files.refuse(name + parts.group_index, "inputs in another order", allowed, advice)

    def _copy(self, name: str, out: torch.Tensor) -> None:
        if self.parts.inputs_first:
            out.copy_(self.files.tensor(name).t())
        else:
            self.files.read_into(name, out)

    def _zero(self, name: str) -> torch.Tensor:
        """Zero points of one linear layer, uint8 [rows, groups] (rows rounded up to whole words)."""
        words = self.files.tensor(name)
        stored = self.parts.unpack(words if self.parts.inputs_first else words.t()).t()
        if self.gptq_format is None:
            return stored
        # A writer of version 1 stores (zero - 1) in four bits: 15 stands for 0.
        return (stored + GPTQ_FORMATS[self.gptq_format]) & 15

    def _check_zero(self, name: str, zero: torch.Tensor) -> None:
        """Refuse zero points that contradict the metadata.

        Symmetric weights mean 8. A whole layer that means 9 or 7 is GPTQ read with the wrong version of the two.
        """
        lowest, highest = (int(value) for value in zero.aminmax())
        wrong = {"gptq": 9, "gptq_v2": 7}.get(self.gptq_format or "")
        mislabelled = lowest == highest == wrong and not self.label_is_given
        if mislabelled or (self.symmetric and (lowest, highest) != (8, 8)):
            if self.gptq_format is None:
                given, advice = f"zero points {lowest} to {highest}", "check config.json"
                self.files.refuse(name, given, "8 in a symmetric checkpoint", advice)
            given = f"zero points {lowest} to {highest} when read as {self.gptq_format!r}"
            allowed = "8 with sym=true" if self.symmetric else "zero points that agree with checkpoint_format"
            other = next(label for label in GPTQ_FORMATS if label != self.gptq_format)
            advice = f"the label looks wrong: pass gptq_format={other!r} if it is"
            self.files.refuse(name, given, allowed, advice)

    def _awq_config(self, quantization: dict[str, Any]) -> dict[str, Any]:
        """AWQ's metadata, under the names that compressed-tensors uses; AutoAWQ's own files say w_bit, q_group_size."""
        version = str(quantization.get("version") or "gemm").lower()
        if version != "gemm":
            self._refuse_config(f"AWQ version {version!r}", "'gemm'", "convert the checkpoint")
        return {
            "num_bits": quantization.get("bits", quantization.get("w_bit")),
            "group_size": quantization.get("group_size", quantization.get("q_group_size")),
            # A missing `zero_point` means there are some.
            "symmetric": quantization.get("zero_point") is False,
        }

    def _compressed_config(self, quantization: dict[str, Any]) -> dict[str, Any]:
        """The `weights` arguments that compressed-tensors metadata gives to the experts of this layer."""
        module = self._name(0, self.projections[0], "").removesuffix(".")
        scheme: dict[str, Any] = quantization
        if quantization.get("config_groups") is not None:
            groups = [
                self._object(group, f"config group {name}")
                for name, group in self._object(quantization["config_groups"], "config_groups").items()
            ]
            by_name = [group for group in groups if self._targets(group, module)]
            by_class = [group for group in groups if "Linear" in (group.get("targets") or ())]
            matching = by_name or by_class
            if len(matching) != 1:
                given = f"{len(matching)} config_groups for {module}"
                self._refuse_config(given, "one", "check quantization_config")
            scheme = matching[0]
        packing = scheme.get("format") or quantization.get("format")
        if packing != "pack-quantized":
            self._refuse_config(f"format {packing!r}", "'pack-quantized'", "convert the checkpoint")
        weights = self._object(scheme.get("weights") or scheme, "weights")
        size = weights.get("group_size")
        kind = weights.get("type", "int")
        strategy = weights.get("strategy", "channel" if size in (None, -1) else "group")
        if kind != "int" or strategy not in ("group", "channel"):
            given = f"type {kind!r}, strategy {strategy!r}"
            self._refuse_config(given, "type 'int', strategy 'group' or 'channel'", "convert the checkpoint")
        # A missing `symmetric` means symmetric.
        symmetric = weights.get("symmetric") is not False
        return {**weights, "symmetric": symmetric, "group_size": size if strategy == "group" else None}

    def _targets(self, group: dict[str, Any], module: str) -> bool:
        """Whether a config group names this module, exactly or by a regular expression."""
        targets = group.get("targets") or []
        if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
            self._refuse_config(f"targets {targets!r}", "a list of strings", "repair quantization_config")
        try:
            return any(
                re.match(target[3:], module) if target.startswith("re:") else target == module
                for target in targets
            )
        except (re.error, OverflowError, RecursionError) as error:
            self._refuse_config(
                f"targets {targets!r} ({error})", "regular expressions", "repair quantization_config"
            )

    def _object(self, value: Any, name: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            self._refuse_config(f"{name} {value!r}", "a JSON object", "repair quantization_config")
        return value

    def _refuse_config(self, given: str, allowed: str, advice: str) -> NoReturn:
        what = f"{self.files.directory / 'config.json'}: quantization_config of {self.prefix}"
        raise CheckpointError(what, given, allowed, advice)
