"""What a call of `mxk::moe` costs the host beside the kernel: the smallest layer (K = I = 32, T = 1), one thread.

Each line is one JSON object, medians in us of 8 calls in a row (CUDA: 64, which nothing waits for). The rows take
turns, so that a busy moment hits all. A row's `beside_us` is its time less that of "library": on CPU the C function
alone, on CUDA the driver's launch. "graph" is one of 8 layers in a graph that `torch.compile(backend="mxk")` made,
less a graph without layers. "empty op" is an op of the same schema that does nothing: torch's own share of a call
through the dispatcher. The `32 lists` rows have 32 experts and biases, so that 192 tensors are passed one by one.

    python benchmarks/bench_dispatch.py
    python benchmarks/bench_dispatch.py --device cuda
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from mxk_compile import kernels
from mxk_compile.kernels import cpu, cuda
from mxk_compile.kernels.cuda import driver
from mxk_compile.testing import MoECase, machine, random_case

LAYERS = 8
WARM_UP = 20  # rounds
CALLS = {"cpu": LAYERS, "cuda": 64}  # in a row; after a wait for the GPU the first ones find cold caches
_nothing = torch.library.Library("mxk_bench", "DEF")  # its ops live as long as it does
SMALLEST = {"num_tokens": 1, "top_k": 1, "hidden_size": 32, "intermediate_size": 32}


def call(op: Any, case: MoECase, weights: Any) -> Callable[[], Tensor]:
    """One call of the op, its arguments at hand."""
    tensors, attributes = (*case.routing, *weights), case.attributes
    return lambda: op(*tensors, **attributes)


def graphs(case: MoECase, op: Any, weights: Any) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """A compiled graph of LAYERS layers, and one of none with the same inputs."""

    def layers(x: Tensor, ids: Tensor, router: Tensor, *weights: Any) -> Tensor:
        for _ in range(LAYERS):
            x = op(x, ids, router, *weights, **case.attributes)
        return x

    def none(x: Tensor, ids: Tensor, router: Tensor, *weights: Any) -> Tensor:
        return torch.empty_like(x) if len(weights) else x

    many, empty = (torch.compile(function, backend="mxk") for function in (layers, none))
    tensors = (*case.routing, *weights)
    return lambda: many(*tensors), lambda: empty(*tensors)


def library(device: str, case: MoECase) -> Callable[[], Any]:
    """What a prepared call of this case calls in the end."""
    known = kernels.prepared[device.upper()]
    known.clear()
    if device == "cuda":
        real, given = driver._driver(), []

        def note(*parameters: Any) -> int:
            given.append(parameters)
            return real.cuLaunchKernelEx(*parameters)

        driver._driver = lambda: SimpleNamespace(cuLaunchKernelEx=note)
        call(torch.ops.mxk.moe.default, case, case.weights)()
        driver._driver = lambda: real
        known.clear()
        return lambda: real.cuLaunchKernelEx(*given[-1])
    call(torch.ops.mxk.moe.default, case, case.weights)()
    (prepared,) = known.values()
    out = torch.empty_like(case.hidden_states)
    addresses = [tensor.data_ptr() for tensor in (*case.routing, out)]
    described = cpu._VARYING.pack(*addresses, torch.get_num_threads()) + prepared._fixed
    return lambda: (prepared._function(described), out)


def rows(device: str) -> dict[str, Callable[[], Any]]:
    """What is timed, by name."""
    case = random_case(num_experts=4, device=device, **SMALLEST)
    lists = random_case(num_experts=32, bias=True, device=device, **SMALLEST)
    op, list_op = torch.ops.mxk.moe.default, torch.ops.mxk.moe.lists

    for name in ("moe", "moe.lists"):
        schema = str((list_op if name.endswith("lists") else op)._schema)
        _nothing.define(name + schema[schema.index("(") :])
        _nothing.impl(name, lambda x, *_, **__: x, device.upper())
    empty = torch.ops.mxk_bench.moe
    eager, list_weights = call(op, case, case.weights), lists.lists
    graph, no_graph = graphs(case, op, case.weights)
    list_graph, no_list_graph = graphs(lists, list_op, list_weights)

    def inference() -> Tensor:
        with torch.inference_mode():
            return eager()

    return {
        "library": library(device, case),
        "op": eager,
        "op, inference mode": inference,
        "empty op": call(empty.default, case, case.weights),
        "graph": graph,
        "no graph": no_graph,
        "32 lists": call(list_op, lists, list_weights),
        "32 lists, empty op": call(empty.lists, lists, list_weights),
        "32 lists, graph": list_graph,
        "32 lists, no graph": no_list_graph,
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    arguments = parser.parse_args()
    reason = cuda.unavailable() if arguments.device == "cuda" else cpu.available()
    if reason is not None:
        parser.error(reason)
    wait = torch.cuda.synchronize if arguments.device == "cuda" else lambda: None
    torch.set_num_threads(1)
    functions = rows(arguments.device)
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    with torch.no_grad():
        for _ in range(WARM_UP + arguments.rounds):
            for name, function in functions.items():
                calls = CALLS[arguments.device] // (LAYERS if name.endswith("graph") else 1)
                wait()
                start = time.perf_counter()
                for _ in range(calls):
                    function()
                seconds[name].append((time.perf_counter() - start) / calls)
    us = {name: statistics.median(found[WARM_UP:]) * 1e6 for name, found in seconds.items()}
    for name in ("", "32 lists, "):
        us[f"{name}graph"] = (us[f"{name}graph"] - us.pop(f"{name}no graph")) / LAYERS
    for name, value in us.items():
        line = {"row": name, "us": round(value, 1), "beside_us": round(value - us["library"], 1)}
        print(json.dumps({**line, "rounds": arguments.rounds, "machine": machine()}), flush=True)


if __name__ == "__main__":
    main()
