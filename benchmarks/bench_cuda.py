"""Time of one MoE layer on a CUDA device: `mxk::moe`, replayed from a CUDA graph over several copies of the weights.

The graph holds one call on each copy, all with one routing, so that no weight is in the L2 cache when its turn comes;
the figure is the median replay over the number of copies. The first call of each line is compared with the fp32
reference. `floor_us` is the packed bytes of the experts touched over the read bandwidth that the same process reaches,
`tflop_s` counts the products only. Each line of output is one JSON object.

    python benchmarks/bench_cuda.py --variant gptoss --experts 128 --tokens 1,8,32
    python benchmarks/bench_cuda.py --variant gptoss --experts 128 --tokens 4096 --schedule prefill:80/112/128
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from typing import Any

import torch

from mxk_compile.kernels import MoEDesc, cuda, supports
from mxk_compile.kernels.cuda import schedule
from mxk_compile.kernels.cuda.tune import Layer, attributes_of, random_layer, random_routing, replay_us
from mxk_compile.ops.moe import reference
from mxk_compile.testing import rel_l2
from mxk_compile.variants import VARIANTS, MoEVariant

CHECKED_TOKENS = 16
PROBE_BYTES = 4 << 30


def read_bandwidth() -> float:
    """Bytes a second of reading memory once: the largest value of a tensor far larger than the L2 cache."""
    data = torch.ones(PROBE_BYTES // 4, dtype=torch.int32, device="cuda")
    data.amax()
    return PROBE_BYTES / (min(replay_us(lambda: data.amax(), 5) for _ in range(2)) * 1e-6)


def measure(
    arguments: argparse.Namespace,
    variant: MoEVariant,
    layers: list[Layer],
    num_tokens: int,
    bandwidth: float,
) -> dict[str, Any]:
    """One line of results."""
    generator = torch.Generator("cuda").manual_seed(num_tokens)
    num_experts = arguments.experts or variant.num_experts
    routed = random_routing(variant, num_experts, num_tokens, arguments.rms, generator)
    attributes = attributes_of(variant)
    desc = MoEDesc.from_call(*routed, *layers[0], **attributes)
    reason = supports(desc)
    if reason is not None:
        raise SystemExit(reason)

    def run() -> None:
        for weights in layers:
            torch.ops.mxk.moe(*routed, *weights, **attributes)

    few = [part[:CHECKED_TOKENS] for part in routed]
    expected = reference(few[0].float(), *few[1:], *layers[0], **attributes, round_intermediate=False)
    error = rel_l2(torch.ops.mxk.moe(*routed, *layers[0], **attributes)[:CHECKED_TOKENS], expected)
    run()
    us = replay_us(run, arguments.samples) / len(layers)
    touched = len(routed[1].unique())
    weights_bytes = sum(part[0].numel() for part in layers[0][:4] if part is not None)
    operations = 6 * num_tokens * routed[1].shape[1] * variant.hidden_size * variant.intermediate_size
    return {
        "variant": variant.name,
        "call": str(desc),
        "tokens": num_tokens,
        "us": round(us, 1),
        "experts_touched": touched,
        "floor_us": round(touched * weights_bytes / bandwidth * 1e6, 1),
        "of_floor": round(us / (touched * weights_bytes / bandwidth * 1e6), 2),
        "tflop_s": round(operations / us / 1e6, 1),
        "read_tb_s": round(bandwidth / 1e12, 2),
        "rel_l2": float(f"{error:.3g}"),
        "schedule": str(cuda.plan(desc, num_tokens)),
        "method": f"CUDA graph, {len(layers)} copies of the weights, median of {arguments.samples}",
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [name for name, variant in VARIANTS.items() if variant.weight_format == "mxfp4"]
    parser.add_argument("--variant", choices=names, default="gptoss")
    parser.add_argument("--experts", type=int, help="local experts, instead of the variant's")
    parser.add_argument("--tokens", default="1,2,4,8,16,32", help="comma list of T")
    parser.add_argument("--copies", type=int, default=4, help="layers cycled through")
    parser.add_argument("--samples", type=int, default=30)
    parser.add_argument("--rms", type=float, default=1.0, help="of the activations")
    parser.add_argument("--schedule", help="schedule of every call, as `mxk tune` prints it")
    arguments = parser.parse_args()
    reason = cuda.unavailable()
    if reason is not None:
        parser.error(reason)
    if arguments.schedule:
        schedule.settings = schedule.settings.replace(cuda_schedule=arguments.schedule)
    variant = VARIANTS[arguments.variant]
    generator = torch.Generator("cuda").manual_seed(0)
    with torch.inference_mode():
        bandwidth = read_bandwidth()
        experts = arguments.experts or variant.num_experts
        layers = [random_layer(variant, experts, generator) for _ in range(arguments.copies)]
        for num_tokens in map(int, arguments.tokens.split(",")):
            json.dump(measure(arguments, variant, layers, num_tokens, bandwidth), sys.stdout)
            print(flush=True)


if __name__ == "__main__":
    main()
