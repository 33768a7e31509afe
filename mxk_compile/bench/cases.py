"""The tensors of a `Point`: copies of a layer, one routing, and the calls that walk over all of their experts.

The routing is drawn on the CPU, so that a point has one on every device. Calls after the first use other experts: the
local ids are shifted in a circle and the copies of the layer take turns, which keeps routes, hits and rows an expert.
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from mxk_compile.bench.points import Point
from mxk_compile.testing import MoECase
from mxk_compile.variants import VARIANTS, MoEVariant

_DRAWS = 400  # tries for a routing with the wanted number of local routes
_ROUTER_INPUTS = 256
_CACHES = 4  # a rotation touches this many times the last cache, where the layer's copies have as much
_MOST_CALLS = 64
_MOST_COPIES = 4


@dataclasses.dataclass(frozen=True)
class Rotation:
    """Calls of one point, to be made in turn.

    Attributes:
        layers: copies of the layer, with other weights each and the point's routing.
        calls: (index into layers, topk_ids) of each call; the first has the routing as drawn.
        experts_touched, local_routes: of one call.
        expert_bytes: packed bytes of one expert: codes, scales, zero points.
    """

    layers: list[MoECase]
    calls: list[tuple[int, Tensor]]
    experts_touched: int
    local_routes: int
    expert_bytes: int

    @property
    def num_bytes(self) -> int:
        """Packed bytes that all calls together touch, at most all there are."""
        touched = self.experts_touched * self.expert_bytes * len(self.calls)
        return min(touched, len(self.layers) * len(self.layers[0].w2) * self.expert_bytes)


def draw(point: Point) -> tuple[Tensor, Tensor, Tensor]:
    """hidden_states [T, K] bf16, topk_ids [T, k] of all experts (local ones come first), topk_weights [T, k] bf16.

    Of several draws, the first whose number of local routes is the wanted one, or else the nearest.
    """
    variant = VARIANTS[point.variant]
    top_k = point.top_k
    generator = torch.Generator().manual_seed(point.seed)
    hidden_states = torch.randn(point.num_tokens, variant.hidden_size, generator=generator).bfloat16()
    wanted = point.local_routes
    if wanted is None:
        share = 1.0 if point.all_local else point.num_experts / point.all_experts
        wanted = max(1, round(point.num_tokens * top_k * share))
    best: tuple[int, Tensor, Tensor] | None = None
    for _ in range(1 if point.all_local else _DRAWS):
        scores, ids = _logits(point, hidden_states, generator).topk(top_k, dim=1)
        missed = abs(int((ids < point.num_experts).sum()) - wanted)
        if best is None or missed < best[0]:
            best = (missed, ids, torch.softmax(scores, dim=1).bfloat16())
        if not missed:
            break
    assert best is not None
    return hidden_states, best[1], best[2]


def _logits(point: Point, hidden_states: Tensor, generator: torch.Generator) -> Tensor:
    num_experts = point.num_experts if point.all_local else point.all_experts
    if point.routing == "even":
        order = torch.arange(point.num_tokens * point.top_k).view(point.num_tokens, point.top_k) % num_experts
        scores = torch.rand(order.shape, generator=generator)
        return torch.full((point.num_tokens, num_experts), -1.0).scatter_(1, order, scores)
    if point.routing != "router":
        return torch.randn(point.num_tokens, num_experts, generator=generator)
    weight = torch.randn(num_experts, _ROUTER_INPUTS, generator=generator) / math.sqrt(_ROUTER_INPUTS)
    bias = torch.randn(num_experts, generator=generator)
    return functional.linear(hidden_states[:, :_ROUTER_INPUTS].float(), weight, bias)


def expert_bytes(layer: MoECase) -> int:
    """Packed codes and scales of one expert."""
    tensors = (layer.w13, layer.w13_scale, layer.w2, layer.w2_scale, layer.w13_zero, layer.w2_zero)
    return sum(tensor[0].numel() * tensor.element_size() for tensor in tensors if tensor is not None)


def num_bytes(point: Point, impl: str, cache_bytes: int) -> int:
    """Memory that the point's layers, activations and result take; of "unpacked" with its bf16 copies."""
    variant = VARIANTS[point.variant]
    hidden, inner = variant.hidden_size, variant.intermediate_size
    values = 3 * hidden * inner
    scale_bytes = 1 if variant.weight_format == "mxfp4" else 2
    of_expert = values // 2 + values // variant.group_size * scale_bytes
    of_expert += 2 * (2 * inner + hidden) * variant.bias + 2 * values * (impl == "unpacked")
    copies = num_copies(variant, point.num_experts, cache_bytes)
    # Activations are drawn in fp32, and kept in bf16, as the result is.
    return copies * point.num_experts * of_expert + point.num_tokens * hidden * (4 + 2 + 2)


def num_copies(variant: MoEVariant, num_experts: int, cache_bytes: int) -> int:
    """Layers that hold more than the caches do; at least two, at most what memory allows for."""
    values = 3 * variant.hidden_size * variant.intermediate_size
    return min(_MOST_COPIES, max(2, math.ceil(_CACHES * cache_bytes / (num_experts * values // 2))))


def rotation(point: Point, layers: list[MoECase], cache_bytes: int, chain: int) -> Rotation:
    """The calls of a point over copies of its layer; their number is a multiple of `chain`."""
    device = layers[0].w2.device
    hidden_states, ids, weights = draw(point)
    local = ids < point.num_experts
    touched = len(ids[local].unique())
    size = expert_bytes(layers[0])
    wanted = math.ceil(_CACHES * cache_bytes / max(touched * size, 1))
    count = chain * math.ceil(max(chain, min(wanted, _MOST_CALLS)) / chain)
    step = max(1, point.num_experts * len(layers) // count)
    calls = []
    for index in range(count):
        shift = index // len(layers) * step
        shifted = torch.where(local, (ids + shift) % point.num_experts, ids)
        calls.append((index % len(layers), shifted.to(device)))
    routed: dict[str, Any] = {"hidden_states": hidden_states.to(device), "topk_weights": weights.to(device)}
    filled = [dataclasses.replace(layer, topk_ids=calls[0][1], **routed) for layer in layers]
    return Rotation(filled, calls, touched, int(local.sum()), size)


def free_bytes(device: str) -> int | None:
    """Memory that the device, or this process's container, can still give; None where the system does not tell."""
    if device == "cuda":
        return int(torch.cuda.mem_get_info()[0])
    found = re.search(r"^MemAvailable: +(\d+) kB$", _text(pathlib.Path("/proc/meminfo")), re.MULTILINE)
    rooms = [*([int(found[1]) << 10] if found else []), *_left_by_groups(_CONTROL_GROUPS)]
    return min(rooms, default=None)


_CONTROL_GROUPS = pathlib.Path("/sys/fs/cgroup")
# Limit, usage, and what of the usage the system can take back, of cgroup v2 and v1 (Linux's Documentation/admin-guide).
_GROUP_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
)


def _left_by_groups(root: pathlib.Path) -> Iterator[int]:
    """What memory limits of control groups leave, as containers mount them: MemAvailable is the whole machine's."""
    for limit, usage, cached in _GROUP_FILES:
        most, used = _text(root / limit).strip(), _text(root / usage).strip()
        if most.isdecimal() and used.isdecimal():  # no limit: "max"
            cache = re.search(
                rf"^{cached} (\d+)$", _text((root / usage).with_name("memory.stat")), re.MULTILINE
            )
            yield max(0, int(most) - int(used) + (int(cache[1]) if cache else 0))


def _text(path: pathlib.Path) -> str:
    try:
        return path.read_text()
    except OSError:  # not there, or not to be read
        return ""


def cache_bytes(device: str) -> int:
    """Bytes of the last cache of the device; 32 MiB where the system does not tell."""
    if device == "cuda":
        return int(torch.cuda.get_device_properties("cuda").L2_cache_size)
    sizes = [32 << 20]
    for path in pathlib.Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        if text.endswith("K") and text[:-1].isdecimal():
            sizes.append(int(text[:-1]) << 10)
    return max(sizes)
