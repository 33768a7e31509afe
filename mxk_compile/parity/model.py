"""`mxk parity --model`: modelled microseconds a call, at the counts that the emulator finds."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from mxk_compile.kernels import tpc
from mxk_compile.kernels.tpc import emulated_ops, time_model
from mxk_compile.parity.cases import ROWS, describe, run_case
from mxk_compile.parity.emulated import chunk_row_cycles
from mxk_compile.testing import MoECase, variant_case
from mxk_compile.variants import VARIANTS, MoEVariant

_SHARED_UNPACK = {"MXK_SHARE": 1}
"""Build flag of the kernels: a row is unpacked once for up to four routes of an expert."""


def print_model(names: Sequence[str]) -> None:
    """Modelled microseconds a call, at the counts that the emulator finds, beside the published kernels' formula."""
    model = time_model.calibrated()
    print(
        f"modelled: t = {model.call_us:.1f} + {model.route_us:.2f} * routes"
        f" + {model.chunk_row_us * 1000:.2f}e-3 * chunk-rows of a TPC * (VPU ops / 17) us"
    )
    print(f"\n{'published row':22}{'routes':>7}{'published us':>14}{'modelled us':>13}{'error':>8}")
    for row in time_model.FITTED:
        variant = VARIANTS[row.variant]
        predicted = model.predict_us(variant.hidden_size, variant.intermediate_size, row.local_routes)
        error = predicted / row.kernel_us - 1
        call = f"{row.variant}, {row.num_experts} experts"
        print(f"{call:22}{row.local_routes:7}{row.kernel_us:14.1f}{predicted:13.1f}{error:8.1%}")
    library = emulated_ops.register()
    header = f"{'variant':10}{'T':>4}{'routes':>7}{'published kernels us':>22}"
    counts = " (VPU, LOAD)"
    print("\nall local, top-k over the card's experts")
    print(f"{header}{'ours us':>10}{counts}{'shared unpack us':>18}{counts}")
    for name in names:
        if name == "wna16":
            print(
                "wna16     no formula: its kernels walk columns, and the published ones chunk-rows",
                flush=True,
            )
            continue
        variant = ROWS[name]
        for num_tokens in (1, tpc.token_range(describe(_zeros(variant, 1)))[1]):
            sizes = variant.hidden_size, variant.intermediate_size, num_tokens * variant.top_k
            columns = [f"{name:10}{num_tokens:4}{sizes[2]:7}{model.predict_us(*sizes):22.1f}"]
            for defines, width in (({}, 10), (_SHARED_UNPACK, 18)):
                if defines and variant.weight_format != "mxfp4":
                    continue  # that flag scales in bf16, which would round products of INT4
                with emulated_ops.recorded(emulated_ops.Build(defines, workers=2)) as recorder:
                    run_case(_zeros(variant, num_tokens))
                cycles = chunk_row_cycles([counters for _, counters in recorder.calls])
                columns.append(
                    f"{model.predict_us(*sizes, *cycles):{width}.1f} ({cycles[0]:.2f}, {cycles[1]:.2f})"
                )
            print("".join(columns), flush=True)
    print("modelled, from emulated counts; nothing here was measured")
    del library


def _zeros(variant: MoEVariant, num_tokens: int) -> MoECase:
    """A call with all of a card's experts, every route local, and weights of zeros: counts do not depend on them."""
    hidden, inner, experts = variant.hidden_size, variant.intermediate_size, variant.num_experts
    case = variant_case(variant, hidden_size=32, intermediate_size=32, num_tokens=num_tokens)
    zeros = functools.partial(torch.zeros, dtype=torch.uint8)
    case.hidden_states = torch.zeros(num_tokens, hidden, dtype=torch.bfloat16)
    case.w13, case.w2 = zeros(experts, 2 * inner, hidden // 2), zeros(experts, hidden, inner // 2)
    scale = case.w13_scale.dtype
    case.w13_scale = torch.zeros(experts, 2 * inner, hidden // 32, dtype=scale)
    case.w2_scale = torch.zeros(experts, hidden, inner // 32, dtype=scale)
    if variant.bias:
        case.w13_bias, case.w2_bias = torch.zeros(experts, 2 * inner), torch.zeros(experts, hidden)
    return case
