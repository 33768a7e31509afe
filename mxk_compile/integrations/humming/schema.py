"""What a server says about a layer's weights and inputs before it has their tensors.

Two weight schemas run: `HummingWeightSchema` ("humming": uint4 with group or channel scales and optional zero points,
or float4e2m1 with float8e8m0 for 32) and `CompressedTensorsWeightSchema` (pack-quantized INT4). Every other one is
refused when it is made from a configuration, so that no layer is loaded that would not run.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor

from mxk_compile.errors import CheckpointError
from mxk_compile.integrations.humming import dtypes
from mxk_compile.integrations.humming.config import WeightScale2Type, WeightScaleType
from mxk_compile.ops.formats import int4
from mxk_compile.ops.formats.nibbles import unpack_rows

SUPPORTED = (
    "humming (uint4 in groups of 32, 64, 128 or a row; float4e2m1 with float8e8m0 for 32), "
    "compressed-tensors (pack-quantized INT4)"
)
_NO_KERNEL = "a scheme without a kernel here"
_Attributes = dict[str, dict[str, Any]]


def refuse(scheme: str, given: str, layer: str = "") -> NoReturn:
    """Raises CheckpointError for a scheme, naming the layer where it is known."""
    what = f"humming scheme {scheme!r}" + (f" of {layer}" if layer else "")
    raise CheckpointError(what, given, SUPPORTED, "convert the checkpoint, or serve it with another backend")


def _made(cls: Any, config: dict[str, Any], base: type, schemas: dict[str, Any], unknown: str) -> Any:
    """A schema from a configuration: of the class that `quant_method` names if `cls` is their base, else of `cls`.

    Its fields are taken from whichever of their names they go under. Raises CheckpointError for a scheme that is not
    among the base's, which `unknown` says more of.
    """
    if cls is base:
        method = config.get("quant_method")
        if method not in tuple(schemas):
            refuse(str(method), unknown)
        return schemas[str(method)].from_config(config)
    found = {}
    for field in dataclasses.fields(cls):
        for name in (field.name, *cls.KWARGS_ALIAS.get(field.name, ())):
            if name in config:
                found[field.name] = config[name]
                break
    return cls(**found)


@dataclasses.dataclass(kw_only=True)
class BaseWeightSchema:
    """Weights of a projection with N outputs and K inputs."""

    quant_method: str
    WEIGHT_SCHEMA_MAP: ClassVar[dict[str, type[BaseWeightSchema]]] = {}
    KWARGS_ALIAS: ClassVar[dict[str, tuple[str, ...]]] = {}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> BaseWeightSchema:
        """The schema that `quant_method` of a configuration names; raises CheckpointError if it is not supported."""
        schema: BaseWeightSchema = _made(cls, config, BaseWeightSchema, cls.WEIGHT_SCHEMA_MAP, _NO_KERNEL)
        return schema

    def get_tensors_attrs(
        self,
        shape_n: int,
        shape_k: int,
        param_dtype: torch.dtype,
        num_experts: int | None = None,
        has_bias: bool = False,
        stack_size: int = 1,
    ) -> _Attributes:
        """Shape, dtype and loader attributes of the tensors to make, by name."""
        raise NotImplementedError

    def get_padded_tensors_attrs(self, *args: Any, **kwargs: Any) -> _Attributes:
        """As `get_tensors_attrs`: no size is padded."""
        for name in ("pad_n_to_multiple", "pad_k_to_multiple"):
            kwargs.pop(name, None)
        return self.get_tensors_attrs(*args, **kwargs)

    def process_loaded_weight(self, tensor: Tensor, name: str) -> Tensor:
        """A tensor of the checkpoint on its way into a parameter: as it is."""
        return tensor

    def convert_humming(
        self,
        tensors: dict[str, Tensor],
        shape_n_stacks: list[int],
        shape_k_stacks: list[int],
        param_dtype: torch.dtype,
        num_experts: int | None = None,
    ) -> tuple[HummingWeightSchema, dict[str, Tensor]]:
        """The schema and tensors `HummingMethod` takes."""
        raise NotImplementedError


@dataclasses.dataclass(kw_only=True)
class HummingWeightSchema(BaseWeightSchema):
    """Tensors: weight int32 [E, N, K/8], low nibble first; weight_scale [E, N, K/g]; zero_point uint8 as the scale."""

    quant_method: str = "humming"
    b_dtype: dtypes.DataType | str
    bs_dtype: dtypes.DataType | str | None = None
    weight_scale_group_size: int = 0
    weight_scale_group_size_n: int = 0
    weight_scale_type: WeightScaleType | str | None = None
    weight_scale_2_type: WeightScale2Type | str | None = None
    has_zero_point: bool = False
    is_fp_zero_point: bool = False
    hadamard_block_size: int = 0

    KWARGS_ALIAS: ClassVar[dict[str, tuple[str, ...]]] = {
        "b_dtype": ("weight_dtype", "dtype"),
        "bs_dtype": ("weight_scale_dtype", "scale_dtype"),
        "weight_scale_group_size": ("group_size",),
        "weight_scale_group_size_n": ("group_size_n",),
        "weight_scale_type": ("scale_type",),
        "weight_scale_2_type": ("scale_2_type",),
    }

    def __post_init__(self) -> None:
        if isinstance(self.b_dtype, str):
            self.b_dtype = dtypes.DataType.from_str(self.b_dtype)
        if isinstance(self.bs_dtype, str):
            self.bs_dtype = dtypes.DataType.from_str(self.bs_dtype)
        if self.weight_scale_type is None:
            grouped = self.weight_scale_group_size > 0
            self.weight_scale_type = WeightScaleType.GROUP if grouped else WeightScaleType.CHANNEL
        self.weight_scale_type = WeightScaleType(self.weight_scale_type)
        self.weight_scale_2_type = WeightScale2Type(self.weight_scale_2_type or "none")
        if self.bs_dtype is None:
            self.bs_dtype = dtypes.float8e8m0 if self.is_mxfp4 else dtypes.bfloat16
        self.check()

    @property
    def is_mxfp4(self) -> bool:
        """Whether the weights are E2M1."""
        return self.b_dtype == dtypes.float4e2m1

    @property
    def weight_format(self) -> str:
        """As in `mxk::moe`."""
        return "mxfp4" if self.is_mxfp4 else "uint4"

    def check(self, layer: str = "") -> None:
        """Raises CheckpointError, which names the layer, for weights that no kernel reads."""
        size = self.weight_scale_group_size
        if self.is_mxfp4:
            fits = (size, self.bs_dtype, self.has_zero_point) == (32, dtypes.float8e8m0, False)
        else:
            floats = (dtypes.bfloat16, dtypes.float16, dtypes.float32)
            fits = self.b_dtype == dtypes.uint4 and self.bs_dtype in floats and size in (0, *int4.GROUP_SIZES)
        if self.weight_scale_group_size_n > 1 or self.weight_scale_2_type != WeightScale2Type.NONE:
            fits = False
        grouped = WeightScaleType.GROUP if size else WeightScaleType.CHANNEL
        if (
            not fits
            or self.weight_scale_type != grouped
            or self.is_fp_zero_point
            or self.hadamard_block_size > 1
        ):
            given = f"{self.b_dtype} with {self.bs_dtype} for {size or 'a row'}, {self.weight_scale_type}"
            more = (
                f", {name}={value}"
                for name in ("weight_scale_group_size_n", "weight_scale_2_type", "has_zero_point",
                             "is_fp_zero_point", "hadamard_block_size")
                if (value := getattr(self, name)) not in (0, 1, False, WeightScale2Type.NONE)
                or value is True
            )  # fmt: skip
            refuse(self.quant_method, given + "".join(more), layer)

    def get_tensors_attrs(
        self,
        shape_n: int,
        shape_k: int,
        param_dtype: torch.dtype,
        num_experts: int | None = None,
        has_bias: bool = False,
        stack_size: int = 1,
    ) -> _Attributes:
        """Shape, dtype and loader attributes of weight, weight_scale, zero_point and bias."""
        groups = shape_k // (self.weight_scale_group_size or shape_k)
        scale_dtype = torch.float8_e8m0fnu if self.is_mxfp4 else param_dtype
        first = 0 if not num_experts else 1
        lead = () if not num_experts else (num_experts,)
        dims = {"output_dim": first, "input_dim": first + 1}
        packed = {**dims, "packed_dim": first + 1, "packed_factor": 8}
        scale = {**dims, "scale_type": str(self.weight_scale_type)}
        tensors: _Attributes = {
            "weight": {"shape": (*lead, shape_n, shape_k // 8), "dtype": torch.int32, "extra_attrs": packed},
            "weight_scale": {"shape": (*lead, shape_n, groups), "dtype": scale_dtype, "extra_attrs": scale},
        }
        if self.has_zero_point:
            tensors["zero_point"] = {
                "shape": (*lead, shape_n, groups),
                "dtype": torch.uint8,
                "extra_attrs": dict(dims),
            }
        if has_bias:
            bias = {"output_dim": first}
            tensors["bias"] = {"shape": (*lead, shape_n), "dtype": param_dtype, "extra_attrs": bias}
        return tensors

    def infer_shape(self, tensors: dict[str, Tensor]) -> tuple[int, int, int | None, bool]:
        """N, K, E (None: not stacked) and whether there is a bias."""
        weight = tensors["weight"]
        experts = len(weight) if weight.dim() == 3 else None
        return weight.shape[-2], weight.shape[-1] * 8, experts, "bias" in tensors

    def convert_humming(
        self,
        tensors: dict[str, Tensor],
        shape_n_stacks: list[int],
        shape_k_stacks: list[int],
        param_dtype: torch.dtype,
        num_experts: int | None = None,
    ) -> tuple[HummingWeightSchema, dict[str, Tensor]]:
        """The schema and tensors as they are."""
        return dataclasses.replace(self), tensors


@dataclasses.dataclass(kw_only=True)
class CompressedTensorsWeightSchema(BaseWeightSchema):
    """Tensors: weight_packed int32 [E, N, K/8], weight_scale [E, N, K/g], weight_zero_point int32 [E, N/8, K/g]."""

    quant_method: str = "compressed-tensors"
    format: str = "pack-quantized"
    num_bits: int = 4
    type: str = "int"
    strategy: str | None = None
    group_size: int | None = None
    symmetric: bool | None = True

    def __post_init__(self) -> None:
        if self.strategy is None:
            self.strategy = "channel" if self.group_size in (None, -1) else "group"
        if (self.format, self.num_bits, self.type) != ("pack-quantized", 4, "int") or self.strategy not in (
            "group",
            "channel",
        ):
            given = f"format {self.format!r}, {self.num_bits} bits, type {self.type!r}, strategy {self.strategy!r}"
            refuse(self.quant_method, given)
        self._humming()

    def _humming(self) -> HummingWeightSchema:
        size = self.group_size if self.strategy == "group" else 0
        return HummingWeightSchema(
            quant_method=self.quant_method,
            b_dtype=dtypes.uint4,
            weight_scale_group_size=size or 0,
            has_zero_point=self.symmetric is False,
        )

    def get_tensors_attrs(
        self,
        shape_n: int,
        shape_k: int,
        param_dtype: torch.dtype,
        num_experts: int | None = None,
        has_bias: bool = False,
        stack_size: int = 1,
    ) -> _Attributes:
        """Those of `HummingWeightSchema` under the checkpoint's names, and weight_shape, which is read and dropped."""
        tensors = self._humming().get_tensors_attrs(
            shape_n, shape_k, param_dtype, num_experts, has_bias, stack_size
        )
        tensors["weight_packed"] = tensors.pop("weight")
        lead = () if not num_experts else (num_experts,)
        if (zero := tensors.pop("zero_point", None)) is not None:
            *_, groups = zero["shape"]
            dim = zero["extra_attrs"]["output_dim"]
            zero |= {"shape": (*lead, -(-shape_n // 8), groups), "dtype": torch.int32}
            zero["extra_attrs"] |= {"packed_dim": dim, "packed_factor": 8}
            tensors["weight_zero_point"] = zero
        tensors["weight_shape"] = {"shape": (*lead, 2), "dtype": torch.int64, "extra_attrs": {}}
        return tensors

    def convert_humming(
        self,
        tensors: dict[str, Tensor],
        shape_n_stacks: list[int],
        shape_k_stacks: list[int],
        param_dtype: torch.dtype,
        num_experts: int | None = None,
    ) -> tuple[HummingWeightSchema, dict[str, Tensor]]:
        """The tensors under humming's names; zero points are unpacked to a byte a group, nothing else is copied."""
        found = {"weight": tensors["weight_packed"], "weight_scale": tensors["weight_scale"]}
        if (packed := tensors.get("weight_zero_point")) is not None:
            found["zero_point"] = unpack_rows(packed)[..., : sum(shape_n_stacks), :].contiguous()
        if "bias" in tensors:
            found["bias"] = tensors["bias"]
        return self._humming(), found


BaseWeightSchema.WEIGHT_SCHEMA_MAP = {
    "humming": HummingWeightSchema,
    "compressed-tensors": CompressedTensorsWeightSchema,
}


@dataclasses.dataclass(kw_only=True)
class BaseInputSchema:
    """Inputs of a projection."""

    quant_method: str
    INPUT_SCHEMA_MAP: ClassVar[dict[str, type[BaseInputSchema]]] = {}
    KWARGS_ALIAS: ClassVar[dict[str, tuple[str, ...]]] = {}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> BaseInputSchema:
        """The schema that `quant_method` names; raises CheckpointError for inputs other than 16-bit ones."""
        schema: BaseInputSchema = _made(
            cls, config, BaseInputSchema, cls.INPUT_SCHEMA_MAP, "quantized activations"
        )
        return schema

    def get_tensors_attrs(self, *args: Any, **kwargs: Any) -> _Attributes:
        """No tensors belong to inputs."""
        return {}

    def convert_humming(self, *args: Any, **kwargs: Any) -> tuple[BaseInputSchema, dict[str, Tensor]]:
        """Itself."""
        return self, {}

    def get_activation_bits(self) -> int:
        """Bits of a value."""
        return 16


@dataclasses.dataclass(kw_only=True)
class HummingInputSchema(BaseInputSchema):
    """Activations in bf16, as they come."""

    quant_method: str = "humming"
    a_dtype: dtypes.DataType | str | None = None
    input_scale_group_size: int = 0

    KWARGS_ALIAS: ClassVar[dict[str, tuple[str, ...]]] = {
        "a_dtype": ("input_dtype", "dtype"),
        "input_scale_group_size": ("group_size",),
    }

    def __post_init__(self) -> None:
        if isinstance(self.a_dtype, str):
            self.a_dtype = dtypes.DataType.from_str(self.a_dtype)
        if self.a_dtype not in (None, dtypes.bfloat16) or self.input_scale_group_size:
            refuse(self.quant_method, f"activations of {self.a_dtype}")


BaseInputSchema.INPUT_SCHEMA_MAP = {"humming": HummingInputSchema}


def _refused(method: str) -> type[BaseWeightSchema]:
    """A class that servers import by name, and that cannot be made."""

    class Refused(BaseWeightSchema):
        """Refused when it is made."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            refuse(method, _NO_KERNEL)

        @classmethod
        def from_config(cls, config: dict[str, Any]) -> BaseWeightSchema:
            """Raises CheckpointError."""
            return cls()

    return Refused


AWQWeightSchema = _refused("awq")
GPTQWeightSchema = _refused("gptq")
AutoRoundWeightSchema = _refused("auto-round")
BitnetWeightSchema = _refused("bitnet")
Fp8WeightSchema = _refused("fp8")
ModeloptWeightSchema = _refused("modelopt")
Mxfp4WeightSchema = _refused("mxfp4")
GptOssMxfp4WeightSchema = _refused("gpt_oss_mxfp4")
Fp8InputSchema = _refused("fp8 activations")
