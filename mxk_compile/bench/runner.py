"""Points in, rows out: one implementation, in this process."""

from __future__ import annotations

import contextlib
import dataclasses
import platform
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from mxk_compile import kernels
from mxk_compile.bench import cases, implementations, timing
from mxk_compile.bench.patience import patience
from mxk_compile.bench.points import Point
from mxk_compile.bench.rows import Row
from mxk_compile.bench.timing import Method, Times
from mxk_compile.errors import CallError, KernelError
from mxk_compile.parity.cases import error_of
from mxk_compile.testing import MoECase, processor, random_layer
from mxk_compile.variants import VARIANTS
from mxk_compile.version import __version__

_CHECKED_TOKENS = 8

Say = Callable[[str], None]


def check_device(device: str) -> None:
    """Raises KernelError, which says how the rows of that device can be had, where this machine lacks it."""
    reason = kernels.cuda.unavailable() if device == "cuda" else None
    if reason is not None:
        allowed = "a Hopper GPU and cuda-bindings (pip install 'mxk-compile[cuda]')"
        advice = "run this command there; here --device cpu measures and --device tpc-modelled models"
        raise KernelError("mxk bench --device cuda", reason, allowed, advice)


def check_memory(points: list[Point], device: str, impl: str) -> None:
    """Raises CallError where the tensors of a point are more than the memory that is free, before one is made."""
    free, cache_bytes = cases.free_bytes(device), cases.cache_bytes(device)
    needed = {point: cases.num_bytes(point, impl, cache_bytes) for point in points}
    largest = max(points, key=lambda point: needed[point])
    if free is not None and needed[largest] > free:
        given = f"{largest} takes {needed[largest] / 1e9:.1f} GB"
        allowed = f"the {free / 1e9:.1f} GB that are free on {device}"
        raise CallError("mxk bench", given, allowed, "lower --e-local or --tokens")


def device_name(device: str) -> str | None:
    """What rows of "cpu" or "cuda" name as their device, None where it is not here."""
    if device == "cpu":
        return processor()
    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def run(points: list[Point], device: str, impl: str, method: Method, say: Say) -> Iterator[Row]:
    """Rows of the points that `impl` can run on `device`; for the others `say` hears why.

    Raises KernelError where the device is not there, or none of the points could be run; CallError where memory
    is short.
    """
    check_device(device)
    check_memory(points, device, impl)
    refused: KernelError | None = None
    done = 0
    layers: list[MoECase] = []
    held = None
    bar = tqdm(points, desc=f"{impl} on {device}", unit="row", disable=None, leave=False)
    with torch.inference_mode():
        cache_bytes = cases.cache_bytes(device)
        bandwidth = timing.read_bandwidth([torch.empty(0, device="cuda")]) if device == "cuda" else None
        for point in bar:
            bar.set_postfix_str(str(point), refresh=True)
            if held != (point.variant, point.num_experts, point.seed):
                held = (point.variant, point.num_experts, point.seed)
                layers.clear()
                layers.extend(_layers(point, device, cache_bytes))
            try:
                with (
                    contextlib.nullcontext()
                    if impl in implementations.OURS
                    else patience(f"{impl}: {point}", say)
                ):
                    row = _measure(point, layers, impl, method, cache_bytes, bandwidth)
                yield row
                done += 1
            except KernelError as error:
                refused = error
                say(f"left out: {point}: {error}")
    if refused is not None and not done:
        raise refused


def _layers(point: Point, device: str, cache_bytes: int) -> Iterable[MoECase]:
    variant = VARIANTS[point.variant]
    for copy in range(cases.num_copies(variant, point.num_experts, cache_bytes)):
        yield random_layer(variant, point.num_experts, point.seed + copy, device)


def _measure(
    point: Point,
    layers: list[MoECase],
    impl: str,
    method: Method,
    cache_bytes: int,
    bandwidth: float | None,
) -> Row:
    rotation = cases.rotation(point, layers, cache_bytes, method.chain)
    implementation = implementations.make(impl, rotation.layers)
    first = rotation.layers[0]
    errors = result_errors(first, implementation.layers[0](*first.routing))
    x, _, weights = first.routing
    calls: timing.Calls = [
        partial(implementation.layers[layer], x, ids, weights) for layer, ids in rotation.calls
    ]
    packed = [layer.w13 for layer in layers]
    if bandwidth is None:
        bandwidth = timing.read_bandwidth(packed)
        times = timing.time_cpu(calls, method)
        bandwidth = max(bandwidth, timing.read_bandwidth(packed))
    else:
        times = timing.time_cuda(calls, method, implementation.capturable)
    touched_bytes = rotation.experts_touched * rotation.expert_bytes
    fields = measured(first.w2.device.type, times, touched_bytes, bandwidth)
    if implementation.version is not None:
        fields["versions"][impl] = implementation.version
    fields["method"] += f", {len(rotation.calls)} calls with other experts over {len(layers)} layers"
    return Row(
        **describe(point),
        local_routes=rotation.local_routes,
        experts_touched=rotation.experts_touched,
        impl=impl,
        kernel=implementation.kernel,
        rotated_bytes=rotation.num_bytes,
        rel_l2=errors[0],
        rel_l2_bf16=errors[1],
        **fields,
    )


def measured(device: str, times: Times, num_bytes: float, bandwidth: float) -> dict[str, Any]:
    """The fields of a row that a measurement on "cpu" or "cuda" gives, of calls that touch so many packed bytes.

    bandwidth: of plain reads there, in bytes a second.
    """
    versions = base_versions() | ({} if device == "cpu" else {"cuda": str(torch.version.cuda)})
    return {
        "device": device_name(device) or device,
        "threads": torch.get_num_threads() if device == "cpu" else 0,
        "evidence": "measured",
        "us": round(times.median_us, 2),
        "us_p10": round(times.percentile_us(10), 2),
        "us_p90": round(times.percentile_us(90), 2),
        "floor_us": round(num_bytes / bandwidth * 1e6, 3),
        "packed_gb_s": round(num_bytes / times.median_us / 1e3, 3),
        "read_gb_s": round(bandwidth / 1e9, 2),
        "method": times.method,
        "versions": versions,
    }


def describe(point: Point) -> dict[str, Any]:
    """The fields of a row that a point and its model row give."""
    variant = VARIANTS[point.variant]
    return {
        "variant": point.variant,
        "weight_format": variant.weight_format,
        "hidden_size": variant.hidden_size,
        "intermediate_size": variant.intermediate_size,
        "num_experts": point.num_experts,
        "all_experts": point.all_experts,
        "top_k": point.top_k,
        "num_tokens": point.num_tokens,
        "routing": point.routing,
        "seed": point.seed,
    }


def base_versions() -> dict[str, str]:
    """Versions that every row names."""
    return {"mxk": __version__, "torch": torch.__version__, "python": platform.python_version()}


def checked_part(case: MoECase) -> tuple[Tensor, MoECase]:
    """The first tokens that have a local route, by index, and the call of those alone: what is held against fp32."""
    local = (case.topk_ids < len(case.w2)).any(dim=1)
    chosen = torch.where(local)[0][:_CHECKED_TOKENS]
    if not len(chosen):
        chosen = torch.arange(1, device=local.device)
    return chosen, dataclasses.replace(
        case,
        hidden_states=case.hidden_states[chosen],
        topk_ids=case.topk_ids[chosen],
        topk_weights=case.topk_weights[chosen],
    )


def result_errors(case: MoECase, result: Tensor) -> list[float]:
    """Against fp32, and fp32 with a bf16 intermediate, on the first tokens that have a local route."""
    chosen, few = checked_part(case)
    return [
        float(f"{error_of(result[chosen], few.reference(round_intermediate=rounded)):.4g}")
        for rounded in (False, True)
    ]
