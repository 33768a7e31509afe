"""Model rows: which layout, activation and sizes each supported family uses. Data only.

Sizes are per card, at the parallel layouts that the published Gaudi 2 write-up "MXFP4 MoE decode kernels" measured;
`gptoss` has the 32 experts of gpt-oss-20b on one card. The order of the tuples is the ABI of kernels/cpu/abi.h.
"""

from __future__ import annotations

import dataclasses

WEIGHT_FORMATS = ("mxfp4", "uint4", "int4")
INT4_FORMATS = WEIGHT_FORMATS[1:]
PACK_DIMS = ("input", "output")
ROW_ORDERS = ("gate_up", "up_gate", "interleaved", "separate")
STACKED_ROW_ORDERS = ROW_ORDERS[:3]
ACTIVATIONS = ("silu", "swiglu_clamp", "swiglu_oai")


@dataclasses.dataclass(frozen=True)
class MoEVariant:
    """One model family's routed experts.

    Attributes:
        name: short name, in tests and benchmarks.
        models: the checkpoints it stands for.
        weight_format, row_order, activation: as in the schema of `mxk::moe`.
        bias: whether w13 and w2 have biases.
        per_route: whether the down projection is returned per route instead of summed per token.
        hidden_size, intermediate_size, num_experts, top_k: K, I, E, k of one card.
        alpha, limit: constants of the activation; limit None is no clamp.
        group_size: values that share a scale, along the input dimension.
    """

    name: str
    models: str
    weight_format: str
    row_order: str
    activation: str
    bias: bool
    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int
    per_route: bool = False
    alpha: float = 1.0
    limit: float | None = None
    group_size: int = 32


# fmt: off
# A table: name, models, weight format, row order, activation, bias, K, I, E, k, and what differs from the defaults.
_ROWS = (
    MoEVariant("gptoss", "gpt-oss-20b, gpt-oss-120b", "mxfp4", "interleaved", "swiglu_oai", True, 2880, 2880, 32, 4,
               alpha=1.702, limit=7.0),
    MoEVariant("glm", "GLM-5.2, GLM-5.3", "mxfp4", "gate_up", "silu", False, 6144, 1024, 64, 8),
    MoEVariant("dsv41", "DeepSeek-V4.1-Flash", "mxfp4", "interleaved", "swiglu_clamp", False, 5120, 2304, 48, 6,
               limit=10.0),
    MoEVariant("muse", "Muse Spark Open", "mxfp4", "gate_up", "silu", False, 4096, 1024, 128, 8, per_route=True),
    MoEVariant("kimi", "Kimi-K2.7 (MXFP4)", "mxfp4", "gate_up", "silu", False, 7168, 2048, 48, 8),
    MoEVariant("kimi_int4", "Kimi-K2.x (INT4, group 32)", "uint4", "gate_up", "silu", False, 7168, 2048, 48, 8),
    MoEVariant("mimo", "MiMo-V2.6-Pro", "mxfp4", "gate_up", "silu", False, 6144, 2048, 48, 8),
)
# fmt: on
VARIANTS = {row.name: row for row in _ROWS}
