"""`HummingMethod`, through which a server prepares the projections of a layer and runs them, and `HummingLayer`.

A layer holds the tensors of each projection under `<sublayer>_weight`, `<sublayer>_weight_scale` and
`<sublayer>_zero_point`, in the checkpoint's layout (schema.py), which is what `mxk::project` reads.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import torch
from torch import Tensor

from mxk_compile import projections
from mxk_compile.errors import CallError
from mxk_compile.integrations.humming import dtypes
from mxk_compile.integrations.humming.config import GemmType
from mxk_compile.integrations.humming.schema import (
    BaseInputSchema,
    BaseWeightSchema,
    HummingInputSchema,
    HummingWeightSchema,
    refuse,
)

BLOCK_ROWS = 16
"""Routes of a block in the lists that a server sorts for us. The kernels take an expert's blocks together."""
_ANY_ROWS = (1 << 31) - 1
_REFUSED_OPTIONS = ("use_f16_accum", "use_batch_invariant")


@dataclasses.dataclass(frozen=True)
class HummingLayerMeta:
    """One prepared projection: N, K, E, the formats, and the names of its tensors."""

    shape_n: int
    shape_k: int
    num_experts: int
    weight_schema: HummingWeightSchema
    sublayer_name: str = ""
    pad_shape_n: int = 0
    pad_shape_k: int = 0
    has_bias: bool = False
    a_dtype: dtypes.DataType = dtypes.bfloat16
    c_dtype: dtypes.DataType = dtypes.bfloat16

    @property
    def b_dtype(self) -> dtypes.DataType | str:
        """Format of the weights."""
        return self.weight_schema.b_dtype

    @property
    def bs_dtype(self) -> dtypes.DataType | str | None:
        """Format of their scales."""
        return self.weight_schema.bs_dtype

    @property
    def has_zero_point(self) -> bool:
        """Whether there are zero points."""
        return self.weight_schema.has_zero_point

    @property
    def weight_scale_group_size(self) -> int:
        """Inputs that share a scale; 0: a row."""
        return self.weight_schema.weight_scale_group_size

    @property
    def weight_name(self) -> str:
        """Of the packed weight in the layer."""
        return f"{self.sublayer_name}_weight".removeprefix("_")

    @property
    def weight_scale_name(self) -> str:
        """Of the scale."""
        return f"{self.weight_name}_scale"

    @property
    def zero_point_name(self) -> str:
        """Of the zero points."""
        return f"{self.sublayer_name}_zero_point".removeprefix("_")

    @property
    def weight_nbytes(self) -> int:
        """Bytes of weights, scales and zero points over all experts."""
        attributes = self.weight_schema.get_tensors_attrs(
            self.shape_n, self.shape_k, torch.bfloat16, self.num_experts
        )
        return sum(
            torch.Size(tensor["shape"]).numel() * torch.empty((), dtype=tensor["dtype"]).element_size()
            for tensor in attributes.values()
        )

    def to_str(self) -> str:
        """As JSON."""
        names = (
            "shape_n",
            "shape_k",
            "num_experts",
            "sublayer_name",
            "pad_shape_n",
            "pad_shape_k",
            "has_bias",
        )
        values = {name: getattr(self, name) for name in names}
        values |= {name: str(getattr(self, name)) for name in ("a_dtype", "b_dtype", "bs_dtype", "c_dtype")}
        values["weight_scale_group_size"] = self.weight_scale_group_size
        return json.dumps(values | {"has_zero_point": self.has_zero_point})


class HummingMethod:
    """Class methods that take the server's layer."""

    @classmethod
    def prepare_layer_meta(
        cls,
        layer: Any,
        shape_n: int,
        shape_k: int,
        weight_schema: HummingWeightSchema,
        input_schema: BaseInputSchema | None = None,
        num_experts: int | None = None,
        pad_n_to_multiple: int = 1,
        pad_k_to_multiple: int = 1,
        has_bias: bool = False,
        torch_dtype: torch.dtype = torch.bfloat16,
        sublayer_name: str = "",
        **more: Any,
    ) -> HummingLayerMeta:
        """Keeps the description of a projection in `layer.humming_metas`; raises CheckpointError if it cannot run.

        Nothing is padded, whatever the multiples; `num_experts` None is a single matrix.
        """
        name = getattr(layer, "layer_name", None) or type(layer).__name__
        where = f"{name}, {sublayer_name or 'weight'}"
        if not isinstance(weight_schema, HummingWeightSchema):
            refuse(str(getattr(weight_schema, "quant_method", weight_schema)), "an unconverted schema", where)
        weight_schema.check(where)
        if torch_dtype != torch.bfloat16:
            refuse(weight_schema.quant_method, f"activations of {torch_dtype}, torch.bfloat16 runs", where)
        if has_bias:
            refuse(weight_schema.quant_method, "a bias, which servers must add themselves", where)
        meta = HummingLayerMeta(shape_n, shape_k, num_experts or 1, weight_schema, sublayer_name)
        if not hasattr(layer, "humming_metas"):
            layer.humming_metas = {}
        layer.humming_metas[sublayer_name] = meta
        return meta

    @classmethod
    def transform_humming_layer(cls, layer: Any, sublayer_name: str = "", **more: Any) -> Any:
        """Checks the tensors of a prepared projection, which stay as they are; returns the layer. Raises CallError."""
        cls._weight(layer, sublayer_name)
        return layer

    @classmethod
    def may_set_param(cls, layer: torch.nn.Module, name: str, tensor: Tensor | None) -> None:
        """Sets a parameter without gradient, unless the tensor is None."""
        if tensor is not None:
            setattr(layer, name, torch.nn.Parameter(tensor, requires_grad=False))

    @classmethod
    def may_quant_input(
        cls, layer: Any, inputs: Tensor, input_scale: Tensor | None = None, **more: Any
    ) -> tuple[Tensor, None]:
        """The inputs as they are; raises CallError for a scale."""
        if input_scale is not None:
            raise CallError("humming input", "an input scale", "bf16 inputs", "do not quantise activations")
        return inputs, None

    @classmethod
    def get_default_tuning_configs(
        cls, layer: Any = None, sublayer_name: str = "", gemm_type: Any = "indexed", **options: Any
    ) -> list[tuple[int, int, dict[str, Any]]]:
        """(rows above, rows up to, configuration) for a server to align lists by; kernels choose their own tiles."""
        _check_options(options)
        return [(0, _ANY_ROWS, {"block_shape": (BLOCK_ROWS, 128, 64)})]

    @classmethod
    def forward_layer(
        cls,
        layer: Any,
        inputs: Tensor,
        outputs: Tensor | None = None,
        input_scale: Tensor | None = None,
        sorted_ids: Tensor | None = None,
        expert_ids: Tensor | None = None,
        num_tokens_padded: Tensor | None = None,
        expert_layout: Tensor | None = None,
        m_indices: Tensor | None = None,
        top_k: int = 1,
        valid_shape_m: int = 0,
        compute_config: Any = None,
        tuning_config: Any = None,
        sublayer_name: str = "",
        block_m: int | None = None,
        validate_routing: bool = False,
        **more: Any,
    ) -> Tensor:
        """Runs a projection; which kind, `compute_config`'s gemm_type says ("indexed" without one).

        Args:
            layer: with a prepared projection.
            inputs: [rows, K] bf16; for "grouped_masked" E times the same number of rows.
            outputs: to write to; a new tensor by default.
            input_scale: must be None.
            sorted_ids, expert_ids, num_tokens_padded, top_k: "indexed", as in `mxk::project.sorted`.
            expert_layout: "grouped_contiguous": E + 1 offsets of experts' rows; "grouped_masked": int32 [E], counts.
            m_indices: "grouped_contiguous", in place of expert_layout: as in `mxk::project.contiguous`.
            valid_shape_m: rows that are expected, for a schedule, and to find block_m by.
            compute_config: dict or JSON: gemm_type, use_f16_accum, use_batch_invariant; the last two must be off.
            tuning_config: rows of `get_default_tuning_configs` or JSON of them.
            sublayer_name: which projection.
            block_m: rows of a block in sorted_ids; by default that of tuning_config.
            validate_routing: reads the routing back and checks it.

        Raises:
            CallError: an option that is not supported, or arguments that contradict each other.
        """
        options = json.loads(compute_config) if isinstance(compute_config, str) else compute_config or {}
        _check_options(options)
        cls.may_quant_input(layer, inputs, input_scale)
        weight = cls._weight(layer, sublayer_name)
        out = None if outputs is None else outputs.view(-1, weight.outputs)
        given: dict[str, Any] = {"out": out, "validate_routing": validate_routing}
        kind = str(options.get("gemm_type", GemmType.INDEXED))
        lists: Any = (sorted_ids, expert_ids, num_tokens_padded)
        if kind == GemmType.INDEXED and all(tensor is not None for tensor in lists):
            block = block_m or _block_rows(tuning_config, valid_shape_m)
            return projections.indexed(inputs, weight, *lists, top_k=top_k, block_size=block, **given)
        if kind == GemmType.GROUPED_CONTIGUOUS and m_indices is not None:
            return projections.contiguous(inputs, weight, m_indices, **given)
        if kind == GemmType.GROUPED_CONTIGUOUS and expert_layout is not None:
            # Rows of an expert begin anywhere: each is a route of its own. Past the last offset there is no expert.
            rows = torch.arange(len(inputs), device=inputs.device, dtype=expert_layout.dtype)
            experts = torch.searchsorted(expert_layout, rows, right=True) - 1
            return projections.routes(inputs, weight, experts[:, None], top_k=1, **given)
        if kind == GemmType.GROUPED_MASKED and expert_layout is not None:
            expected_m = max(1, valid_shape_m // weight.num_experts)
            return projections.masked(inputs, weight, expert_layout, expected_m, **given)
        allowed = (
            "indexed with sorted_ids, expert_ids, num_tokens_padded; grouped_contiguous with m_indices or "
            "expert_layout; grouped_masked with expert_layout"
        )
        raise CallError(
            "humming.forward_layer", f"gemm_type {kind!r} and its tensors", allowed, "correct the call"
        )

    @classmethod
    def _weight(cls, layer: Any, sublayer_name: str) -> projections.PreparedWeight:
        """The prepared weight of a projection, made again where the layer's tensors are others than before."""
        meta = getattr(layer, "humming_metas", {}).get(sublayer_name)
        if meta is None:
            given, allowed = f"no description of {sublayer_name!r}", "a prepared projection"
            raise CallError("humming layer", given, allowed, "call HummingMethod.prepare_layer_meta first")
        names = (meta.weight_name, meta.weight_scale_name, meta.zero_point_name)
        tensors = tuple(getattr(layer, name, None) for name in names)
        kept = layer.__dict__.setdefault("_mxk_weights", {})
        if sublayer_name not in kept or any(
            a is not b for a, b in zip(kept[sublayer_name][0], tensors, strict=True)
        ):
            kept[sublayer_name] = (tensors, _prepare(meta, tensors))
        prepared: projections.PreparedWeight = kept[sublayer_name][1]
        return prepared


def _prepare(meta: HummingLayerMeta, tensors: tuple[Tensor | None, ...]) -> projections.PreparedWeight:
    weight, scale, zero = (None if t is None else t.detach() for t in tensors)
    if weight is None or scale is None or (zero is None) == meta.has_zero_point:
        given = f"{meta.weight_name}, {meta.weight_scale_name}, {meta.zero_point_name} are not all there"
        raise CallError("humming layer", given, "the tensors of the schema", "load the layer first")
    if weight.dim() == 2:
        weight, scale, zero = weight[None], scale[None], None if zero is None else zero[None]
    if meta.weight_schema.is_mxfp4:
        weight, scale = weight.view(torch.uint8), scale.view(torch.uint8)
    prepared = projections.prepare(weight, scale, zero, weight_format=meta.weight_schema.weight_format)
    sizes = (prepared.num_experts, prepared.outputs, prepared.inputs)
    if sizes != (meta.num_experts, meta.shape_n, meta.shape_k):
        given = f"{meta.weight_name} of E, N, K = {sizes}"
        allowed = f"{(meta.num_experts, meta.shape_n, meta.shape_k)}"
        raise CallError("humming layer", given, allowed, "load the tensors of this layer")
    return prepared


def _check_options(options: dict[str, Any]) -> None:
    for name in _REFUSED_OPTIONS:
        if options.get(name):
            raise CallError("humming options", f"{name}=True", f"{name}=False", "turn it off in the server")


def _block_rows(tuning_config: Any, valid_shape_m: int) -> int:
    """Rows of a block that a server aligned its lists to."""
    rows = json.loads(tuning_config) if isinstance(tuning_config, str) else tuning_config
    for above, up_to, config in rows or ():
        if above < max(valid_shape_m, 1) <= up_to:
            return int(config["block_shape"][0])
    return BLOCK_ROWS


class HummingLayer(torch.nn.Module):
    """One projection as a module: tensors of a schema, checked, then run by `HummingMethod.forward_layer`."""

    humming_metas: dict[str, HummingLayerMeta]

    def __init__(
        self,
        shape_n: int,
        shape_k: int,
        weight_config: BaseWeightSchema | dict[str, Any],
        input_config: BaseInputSchema | dict[str, Any] | None = None,
        num_experts: int | None = None,
        has_bias: bool = False,
        torch_dtype: torch.dtype = torch.bfloat16,
        **more: Any,
    ) -> None:
        """A layer without tensors; raises CheckpointError for a scheme that has no kernel."""
        super().__init__()
        schema = (
            BaseWeightSchema.from_config(weight_config) if isinstance(weight_config, dict) else weight_config
        )
        self._source = schema
        if isinstance(input_config, dict):
            input_config = BaseInputSchema.from_config(input_config)
        self.input_schema = input_config or HummingInputSchema()
        self.sizes = (shape_n, shape_k, num_experts)
        self._more: dict[str, Any] = {"has_bias": has_bias, "torch_dtype": torch_dtype}

    def load_from_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Takes the tensors of the checkpoint, named as the schema names them; raises CallError if they do not fit."""
        shape_n, shape_k, num_experts = self.sizes
        schema, converted = self._source.convert_humming(
            tensors, [shape_n], [shape_k], torch.bfloat16, num_experts
        )
        HummingMethod.prepare_layer_meta(
            self, shape_n, shape_k, schema, self.input_schema, num_experts, **self._more
        )
        for name, tensor in converted.items():
            HummingMethod.may_set_param(self, name, tensor)
        HummingMethod.transform_humming_layer(self)

    def transform(self) -> None:
        """Checks the tensors again."""
        HummingMethod.transform_humming_layer(self)

    def forward(self, inputs: Tensor, **routing: Any) -> Tensor:
        """`HummingMethod.forward_layer`."""
        return HummingMethod.forward_layer(self, inputs, **routing)
