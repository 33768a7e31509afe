"""The `chord` suite: single projections of Kimi-K2.x experts in INT4, as the published tables of Chord time them.

Source: "vLLM x Novita AI: Kernel MoE Chord W4A16 INT4 para Kimi K2.x" and novitalabs/chord, docs/shapes.md and
docs/benchmarking.md. 384 experts, top-8, hidden 7168, intermediate 2048; codes 0..15, bf16 scale for 32 inputs. Six
tables: prefill EP8, TP8, decode EP8, decode EP8 on B300 (published only), contiguous EP8, masked EP8; contiguous and
masked also for EP16 and EP32, of which nothing is published.

All draws are as there: the routing's generator, on the device, is seeded with the number of tokens and takes the top 8
of normal scores over the local experts; activations are normal, codes uniform, scales uniform in 0.005 .. 0.045. Codes
are drawn two to a byte here. A call touches several times the H200's L2, so that replays of it find nothing there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from mxk_compile.ops.dequant import dequantize
from mxk_compile.ops.project import experts_of_rows
from mxk_compile.projections import PreparedWeight, contiguous, masked, prepare, routes

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, GROUP = 7168, 2048, 384, 8, 32
MAX_M = 256  # rows of an expert's budget in "masked"
READ_BYTES_PER_US, FLOPS_PER_US = 4.3e6, 790e6
"""One H200: bytes that a plain kernel reads, and bf16 operations that cuBLAS reaches; the published floors' figures."""
_PROJECTIONS = ("gate_up", "down")


@dataclasses.dataclass(frozen=True)
class Scenario:
    """One timed call.

    Attributes:
        table: "prefill EP8", "TP8", "decode EP8", "contiguous EP8", "masked EP8"; also EP16, EP32.
        projection: "gate_up", "down".
        count: tokens or rows an expert, in the table's own unit.
        num_tokens: T of the call; 0 for grouped ones.
        num_experts, outputs, inputs: E, N, K.
        seed: of weights and activations.
        published_us: Humming 4351af3 and Chord 89f41c0 on an H200, or None. Published, never measured here.
    """

    table: str
    projection: str
    count: int
    num_tokens: int
    num_experts: int
    outputs: int
    inputs: int
    seed: int
    published_us: tuple[float, float] | None

    @property
    def kind(self) -> str:
        """One of projections.MODES."""
        kind = self.table.split()[0]
        return kind if kind in ("contiguous", "masked") else "indexed"

    @property
    def rows(self) -> int:
        """Rows that are computed."""
        return self.num_tokens * TOP_K if self.kind == "indexed" else self.num_experts * self.count

    def __str__(self) -> str:
        return f"{self.table} {self.count} {self.projection}"


# Table, seed of its first row, counts, published µs: gate_up of Humming and Chord, down of Humming and Chord.
_TABLES: dict[str, tuple[int, tuple[int, ...], tuple[tuple[float, ...], ...]]] = {
    "prefill EP8": (
        20260900,
        (1024, 2048, 4096, 8192, 16384),
        (
            (375.0, 466.3, 608.4, 1085.7, 1903.0),
            (313.5, 383.4, 545.8, 997.7, 1743.1),
            (195.9, 235.1, 337.4, 606.4, 1059.4),
            (162.9, 204.5, 293.2, 533.4, 937.3),
        ),
    ),
    "TP8": (
        20260920,
        (1024, 2048, 4096, 8192, 16384),
        (
            (399.0, 476.4, 655.0, 1206.2, 2066.1),
            (365.5, 414.6, 567.9, 1014.5, 1842.7),
            (336.2, 429.6, 604.6, 1277.2, 2187.7),
            (265.3, 327.1, 469.8, 847.8, 1723.5),
        ),
    ),
    "decode EP8": (
        20260940,
        (20, 30, 40, 50),
        (
            (267.6, 281.3, 284.0, 296.4),
            (221.9, 245.6, 253.7, 259.9),
            (146.2, 152.2, 153.3, 156.3),
            (111.9, 116.8, 123.0, 126.4),
        ),
    ),
    "decode EP8 B300": (
        20260980,
        (20, 30, 40, 50),
        (
            (319.1, 320.4, 320.6, 320.9),
            (146.0, 162.3, 175.2, 182.9),
            (174.8, 181.3, 181.4, 182.5),
            (83.8, 91.3, 91.9, 95.1),
        ),
    ),
    "contiguous EP8": (
        0,
        (128, 256, 512),
        (
            (777.2, 1393.2, 2265.0),
            (607.1, 1186.9, 2318.2),
            (426.8, 751.3, 1261.7),
            (310.4, 604.4, 1196.1),
        ),
    ),
    "masked EP8": (
        0,
        (8, 16, 32, 64),
        (
            (308.8, 329.7, 452.3, 508.0),
            (248.8, 266.5, 329.2, 435.2),
            (166.5, 176.2, 214.0, 269.5),
            (132.5, 138.7, 164.2, 233.0),
        ),
    ),
    "contiguous EP16": (0, (128, 256, 512), ()),
    "masked EP16": (0, (8, 16, 32, 64), ()),
    "contiguous EP32": (0, (128, 256, 512), ()),
    "masked EP32": (0, (8, 16, 32, 64), ()),
}
TABLES = tuple(_TABLES)
TARGETS_US: dict[str, tuple[float, ...]] = {
    "decode EP8": (285, 300, 305, 310),
    "prefill EP8": (350, 420, 650, 1230, 2350),
    "TP8": (370, 470, 760, 1400, 2750),
    "masked EP8": (310, 330, 390, 540),
    "contiguous EP8": (850, 1650, 3050),
}
"""What gate_up and down shall take together on one H200, by table and count."""


def _scenarios() -> Iterator[Scenario]:
    for table, (seed, counts, published) in _TABLES.items():
        tensor_parallel = table == "TP8"
        share = 1 if tensor_parallel else int(table.split()[1].removeprefix("EP"))
        intermediate = INTERMEDIATE // 8 if tensor_parallel else INTERMEDIATE
        sizes = {"gate_up": (2 * intermediate, HIDDEN), "down": (HIDDEN, intermediate)}
        for place, projection in enumerate(_PROJECTIONS):
            for index, count in enumerate(counts):
                # An EP8 rank has an eighth of a prefill's routes: T tokens of the system are T routes here.
                num_tokens = count // TOP_K if table.startswith("prefill") else count
                yield Scenario(
                    *(table, projection, count),
                    0 if table.startswith(("contiguous", "masked")) else num_tokens,
                    *(EXPERTS // share, *sizes[projection]),
                    seed + place * len(counts) + index,
                    (published[2 * place][index], published[2 * place + 1][index]) if published else None,
                )


SCENARIOS = tuple(_scenarios())


@dataclasses.dataclass(frozen=True)
class Call:
    """The tensors of a scenario, and the call.

    Attributes:
        run: makes the call; gives `out`.
        out: [rows, N] bf16; of "masked" [E * MAX_M, N].
        experts: int64, the expert of each row of `out`, -1 for rows that are not computed.
        top_k: rows of `out` that read one row of x.
        touched: experts that have rows.
    """

    scenario: Scenario
    run: Callable[[], Tensor]
    x: Tensor
    weight: PreparedWeight
    out: Tensor
    experts: Tensor
    top_k: int
    touched: int

    @property
    def num_bytes(self) -> int:
        """Weights and scales of touched experts, activations in and out."""
        of_expert = self.weight.weight[0].nbytes + self.weight.scale[0].nbytes
        rows = self.scenario.rows
        return self.touched * of_expert + 2 * (
            rows // self.top_k * self.weight.inputs + rows * self.weight.outputs
        )

    @property
    def flops(self) -> float:
        """Operations of the products."""
        return 2.0 * self.scenario.rows * self.weight.outputs * self.weight.inputs

    @property
    def floor_us(self) -> float:
        """The least time that one H200's memory and tensor cores allow."""
        return max(self.num_bytes / READ_BYTES_PER_US, self.flops / FLOPS_PER_US)

    def rel_l2(self, most_experts: int = EXPERTS) -> float:
        """Error of `out` against fp32 products of exactly dequantised weights, on at most so many experts."""
        wrong = norm = 0.0
        held = self.experts.unique().tolist()
        held = [expert for expert in held if expert >= 0]
        for expert in held[:: -(-len(held) // most_experts)]:
            (rows,) = torch.where(self.experts == expert)
            values = dequantize(self.weight.weight[expert], self.weight.scale[expert], weight_format="uint4")
            expected = self.x[rows // self.top_k].float() @ values.T
            wrong += float((self.out[rows].float() - expected).square().sum(dtype=torch.float64))
            norm += float(expected.square().sum(dtype=torch.float64))
        return float((wrong / norm) ** 0.5)


def make_weight(scenario: Scenario, device: str) -> PreparedWeight:
    """Random INT4 weights of the scenario's shape, group 32, bf16 scales; the same for one seed and device."""
    generator = torch.Generator(device).manual_seed(scenario.seed)
    shape = (scenario.num_experts, scenario.outputs)
    size = (*shape, scenario.inputs // 2)
    packed = torch.randint(0, 256, size, dtype=torch.uint8, device=device, generator=generator)
    scale = torch.rand((*shape, scenario.inputs // GROUP), device=device, generator=generator) * 0.04 + 0.005
    return prepare(packed.view(torch.int32), scale.bfloat16())


def draw_routes(num_tokens: int, num_experts: int, device: str) -> Tensor:
    """topk_ids int32 [T, 8] over `num_experts` local experts, seeded with the number of tokens."""
    generator = torch.Generator(device).manual_seed(num_tokens)
    scores = torch.randn(num_tokens, num_experts, device=device, generator=generator)
    return scores.topk(TOP_K, dim=1).indices.int()


def make_call(scenario: Scenario, device: str) -> Call:
    """The tensors and the call of a scenario, one of SCENARIOS or with smaller sizes, on "cuda" or "cpu".

    An indexed call gets topk_ids and makes its row lists itself; in Chord's tables they are made before.
    """
    weight = make_weight(scenario, device)
    generator = torch.Generator(device).manual_seed(scenario.seed)
    num_experts, count, kind = scenario.num_experts, scenario.count, scenario.kind
    top_k = TOP_K if kind == "indexed" and scenario.projection == "gate_up" else 1
    num_rows = num_experts * MAX_M if kind == "masked" else scenario.rows
    size = (num_rows // top_k, weight.inputs)
    x = torch.randn(size, dtype=torch.bfloat16, device=device, generator=generator)
    out = torch.zeros(num_rows, weight.outputs, dtype=torch.bfloat16, device=device)
    overload = kind
    run: Callable[[], Tensor]
    if kind == "contiguous":
        routing = torch.arange(num_experts, dtype=torch.int32, device=device).repeat_interleave(count)
        run = partial(contiguous, x, weight, routing, out=out)
    elif kind == "masked":
        routing = torch.full((num_experts,), count, dtype=torch.int32, device=device)
        run = partial(masked, x, weight, routing, count, out=out)
    else:
        overload, routing = "routes", draw_routes(scenario.num_tokens, num_experts, device)
        run = partial(routes, x, weight, routing, top_k=top_k, out=out)
    experts = experts_of_rows(overload, num_rows, num_experts, (routing,), {})
    touched = int((experts.unique() >= 0).sum())
    return Call(scenario, run, x, weight, out, experts, top_k, touched)
