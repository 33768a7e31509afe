"""A small set of CUDA calls for compute-sanitizer, which is too slow for whole tests.

    compute-sanitizer --tool memcheck python tests/kernels/cuda/sanitizer_calls.py
    compute-sanitizer --tool racecheck python tests/kernels/cuda/sanitizer_calls.py

Each kernel with ragged sizes, biases, ids that are not here, strided inputs and lists. The caching allocator is off, so
that memcheck sees each tensor's end. Arguments are schedules, instead of all. Prints how many calls were right; a wrong
result is an error too.
"""

from __future__ import annotations

import itertools
import os
import sys
from typing import Any

os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"

import torch

from mxk_compile import kernels
from mxk_compile.kernels import cuda
from mxk_compile.kernels.cuda.schedule import Schedule
from mxk_compile.ops.project import reference
from mxk_compile.testing import random_case, rel_l2

SIZES: dict[str, Any] = {"hidden_size": 160, "intermediate_size": 96, "num_experts": 5}
OF_INT4 = "decode:groups=2,column_tiles=2,max_routes=64"
SCHEDULES = ("prefill:16/32", "prefill:48/128", "decode:max_routes=64", OF_INT4)
MOST_ERROR = 5e-3  # INT4's weights are rounded too


def project() -> int:
    """Runs one projection of groups with ragged counts; 1 if it is wrong."""
    case = random_case(weight_format="uint4", device="cuda", **SIZES)
    counts = torch.tensor([3, 0, 17, 1, 40], dtype=torch.int32, device="cuda")
    x = torch.randn(5, 17, 160, device="cuda").bfloat16()
    out, expected = (torch.zeros(85, 192, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    arguments = (x, counts, case.w13, case.w13_scale)
    attributes = {"weight_format": "uint4", "expected_m": 9}
    torch.ops.mxk.project.masked(out, *arguments, **attributes)
    reference("masked", expected, *arguments, **attributes)
    return int(not rel_l2(out, expected) <= MOST_ERROR)


def main() -> int:
    """Runs the calls; the exit code is the number of wrong ones."""
    wrong = calls = 0
    for text in sys.argv[1:] or SCHEDULES:
        schedule = Schedule.parse(text)
        cuda.choose = lambda problem, chosen=schedule: chosen
        kernels.prepared["CUDA"].clear()
        of_decode = ("uint4",) if text == OF_INT4 else ("mxfp4",)
        formats = ("mxfp4", "uint4") if schedule.kernel == "prefill" else of_decode
        for weight_format, (num_tokens, row_order, bias) in itertools.product(
            formats, ((1, "interleaved", True), (13, "gate_up", False))
        ):
            case = random_case(
                num_tokens=num_tokens,
                row_order=row_order,
                bias=bias,
                weight_format=weight_format,
                device="cuda",
                **SIZES,
            )
            case.topk_ids[0, 0] = -1
            results = (
                case.fused(),
                torch.ops.mxk.moe.lists(*case.routing, *case.lists, **case.attributes),
            )
            expected = case.reference()
            errors = [rel_l2(result, expected) for result in results]
            calls += len(errors)
            wrong += sum(not error <= MOST_ERROR for error in errors)
    case = random_case(device="cuda", **SIZES)
    values = torch.ops.mxk.mxfp4_dequant(case.w13, case.w13_scale)
    wrong += not bool(torch.isfinite(values).all())
    calls, wrong = calls + 1, wrong + project()
    torch.cuda.synchronize()
    print(f"{calls + 1} calls, {wrong} wrong")
    return wrong


if __name__ == "__main__":
    sys.exit(main())
