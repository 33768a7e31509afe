"""Time of one MoE layer call: the fused op, the stock op, or the stock op on bf16 copies; one a process.

Every call takes the next of several copies of the layer and a fresh routing, so that no cache holds the experts it
needs. A sample is a chain of calls one right after the other; the figure is the median over samples.
Each line of output is one JSON object. `packed_gb_s` is packed bytes of the distinct experts touched over time,
whatever the implementation reads; `read_gb_s` is what plain reads reach in the same process, on the same pages, just
before and after. Compare ratios of lines measured one after the other; times of different machines say nothing.

    python benchmarks/bench_moe.py --impl fused --variant gptoss --tokens 1,4,8,32
"""

from __future__ import annotations

import argparse
import ctypes
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mxk_compile import kernels
from mxk_compile.kernels import MoEDesc, cpu
from mxk_compile.ops.dequant import dequantize
from mxk_compile.testing import MoECase, random_case, rel_l2, variant_case
from mxk_compile.variants import VARIANTS

# One more than the model rows: 16 local experts of the int4 layer, as public comparisons take it.
EXTRA = {
    "kimi_like": {
        "weight_format": "uint4",
        "hidden_size": 7168,
        "intermediate_size": 2048,
        "num_experts": 16,
        "top_k": 8,
    }
}
CHECKED_TOKENS = 8  # of the first call, against fp32
PROBE_SECONDS = 0.3


def make_case(name: str, seed: int) -> MoECase:
    """The layer `name` with random weights and one token."""
    if name in EXTRA:
        return random_case(**{"num_tokens": 1, "seed": seed, **EXTRA[name]})
    return variant_case(VARIANTS[name], num_tokens=1, seed=seed)


def packed_bytes(case: MoECase) -> int:
    """Packed weights and scales of one expert."""
    tensors = (case.w13, case.w13_scale, case.w2, case.w2_scale, case.w13_zero, case.w2_zero)
    return sum(tensor[0].numel() * tensor.element_size() for tensor in tensors if tensor is not None)


def unpacked(
    values: Tensor, scales: Tensor, zeros: Tensor | None, attributes: dict[str, Any]
) -> list[Tensor]:
    """A bf16 copy of each expert's matrix."""
    form = {name: attributes[name] for name in ("weight_format", "pack_dim")}
    nothing = [None] * len(values)
    return [
        dequantize(value, scale, zero, **form).bfloat16()
        for value, scale, zero in zip(values, scales, nothing if zeros is None else zeros, strict=True)
    ]


def implementation(name: str, case: MoECase) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """A function of hidden_states, topk_ids, topk_weights that runs the layer `case` describes."""
    attributes = case.attributes
    if name == "fused":
        return lambda *routed: torch.ops.mxk.moe.default(*routed, *case.weights, **attributes)
    stock = torch.ops.hpu.mixture_of_experts
    w13, w13_scale, w2, w2_scale, _, _, w13_bias, w2_bias = case.lists
    kept = {"permuted_weights": True, "experts_min": 0, "experts_max": len(w2) - 1}
    kind = attributes["row_order"], attributes["activation"], bool(w13_bias)
    if kind == ("interleaved", "swiglu_oai", True):
        kept |= {"alpha": attributes["alpha"], "limit": attributes["limit"]}
    elif kind == ("gate_up", "silu", False):
        kept |= {"activation": "silu"}
    else:
        raise SystemExit(f"no stock op computes {kind}; use --impl fused")
    biases = (w13_bias, w2_bias) if w13_bias else ()
    if name == "unpacked":
        op = stock.bias_fused_weights if biases else stock.fused_weights
        copies = (
            unpacked(case.w13, case.w13_scale, case.w13_zero, attributes),
            unpacked(case.w2, case.w2_scale, case.w2_zero, attributes),
        )
        return lambda *routed: op(*routed, *copies, *biases, **kept)
    if attributes["weight_format"] != "mxfp4":
        raise SystemExit("no single stock op takes this format; use --impl fused or unpacked")
    op = stock.bias_mxfp4_fused_weights if biases else stock.mxfp4_fused_weights
    kept |= {"block_size": 32, "is_fp4": True}
    return lambda *routed: op(*routed, w13, w2, *biases, w13_scale, w2_scale, **kept)


def routing(case: MoECase, num_tokens: int, generator: torch.Generator, even: bool) -> tuple[Tensor, Tensor]:
    """Fresh topk_ids over all experts, or dealt to them in turn, and topk_weights."""
    num_experts, top_k = len(case.w2), case.topk_ids.shape[1]
    if even:
        ids = (torch.arange(num_tokens * top_k) % num_experts).view(num_tokens, top_k)
    else:
        ids = torch.rand(num_tokens, num_experts, generator=generator).topk(top_k, dim=1).indices
    return ids, torch.softmax(torch.randn(num_tokens, top_k, generator=generator), dim=1)


def read_bandwidth(cases: list[MoECase]) -> float:
    """GB/s of summing the packed weights themselves, the best of what fits the probe's time."""
    best, end = 0.0, time.perf_counter() + PROBE_SECONDS
    while time.perf_counter() < end:
        for case in cases:
            words = case.w13.view(torch.int64).flatten()
            start = time.perf_counter()
            words.sum()
            best = max(best, words.numel() * 8 / (time.perf_counter() - start) / 1e9)
    return best


def measure(arguments: argparse.Namespace, cases: list[MoECase], num_tokens: int) -> dict[str, Any]:
    """One line of results."""
    generator = torch.Generator().manual_seed(num_tokens)
    runs = [implementation(arguments.impl, case) for case in cases]
    x = torch.randn(num_tokens, cases[0].hidden_states.shape[1], generator=generator).bfloat16()

    ids, weights = routing(cases[0], num_tokens, generator, arguments.even)
    few = slice(0, CHECKED_TOKENS)
    checked = MoECase(x[few], ids[few], weights[few], *cases[0].weights, attributes=cases[0].attributes)
    error = rel_l2(runs[0](x, ids, weights)[few], checked.reference())

    step, samples, rates = 0, [], []
    bandwidth = read_bandwidth(cases)
    for sample in range(arguments.samples + 1):
        fresh = [routing(cases[0], num_tokens, generator, arguments.even) for _ in range(arguments.chain)]
        start = time.perf_counter()
        for ids, weights in fresh:
            runs[step % len(runs)](x, ids, weights)
            step += 1
        elapsed = time.perf_counter() - start
        touched = sum(len(ids.unique()) for ids, _ in fresh) * packed_bytes(cases[0])
        if sample:  # the first warms up
            samples.append(elapsed / arguments.chain)
            rates.append(touched / elapsed / 1e9)
    bandwidth = max(bandwidth, read_bandwidth(cases))
    ordered = sorted(samples)
    desc = MoEDesc.from_call(x, ids, weights, *cases[0].weights, **cases[0].attributes)
    return {
        "impl": arguments.impl,
        "variant": arguments.variant,
        "call": str(desc),
        "tokens": num_tokens,
        "us": round(statistics.median(samples) * 1e6, 1),
        "us_p10": round(ordered[len(ordered) // 10] * 1e6, 1),
        "us_p90": round(ordered[len(ordered) * 9 // 10] * 1e6, 1),
        "packed_gb_s": round(statistics.median(rates), 2),
        "read_gb_s": round(bandwidth, 2),
        "of_read": round(statistics.median(rates) / bandwidth, 3),
        "rel_l2": float(f"{error:.3g}"),
        "kernel": str(kernels.select(desc)) if arguments.impl == "fused" else "torch",
        "threads": torch.get_num_threads(),
        "scratch_bytes": cpu.scratch_bytes() if arguments.impl == "fused" else None,
        "method": f"median of {arguments.samples} chains of {arguments.chain}, {len(cases)} copies, fresh routing",
        "machine": processor(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def processor() -> str:
    """Model name of the processor, where the system tells."""
    try:
        with open("/proc/cpuinfo") as file:
            names = [line.split(":")[1].strip() for line in file if line.startswith("model name")]
        return f"{names[0]} x {len(names)}" if names else platform.machine()
    except OSError:
        return platform.machine()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--impl", choices=("fused", "stock", "unpacked"), default="fused")
    parser.add_argument("--variant", choices=(*VARIANTS, *EXTRA), default="gptoss")
    parser.add_argument("--tokens", default="1,4,8,32", help="comma list of T")
    parser.add_argument("--copies", type=int, default=3, help="layers cycled through")
    parser.add_argument("--chain", type=int, default=8, help="calls a sample")
    parser.add_argument("--samples", type=int, default=30)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--even", action="store_true", help="as many rows for each expert: T k / E")
    parser.add_argument(
        "--matrix-rows",
        type=int,
        default=0,
        help="rows from which an expert takes the tile unit; 0: as built",
    )
    parser.add_argument("--quick", action="store_true", help="2 copies, 5 samples of 2 calls")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.copies, arguments.chain, arguments.samples = 2, 2, 5
    torch.set_num_threads(arguments.threads)
    if arguments.matrix_rows:
        cpu._library().mxk_cpu_matrix_rows(ctypes.c_int64(arguments.matrix_rows))
    with torch.inference_mode():
        cases = [make_case(arguments.variant, seed) for seed in range(arguments.copies)]
        for num_tokens in map(int, arguments.tokens.split(",")):
            json.dump(measure(arguments, cases, num_tokens), sys.stdout)
            print(flush=True)


if __name__ == "__main__":
    main()
