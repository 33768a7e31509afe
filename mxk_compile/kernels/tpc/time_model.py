"""Time of a call on a Gaudi 2, modelled: t = a + b * routes + c * chunk_rows * (ops / 17).

Chunk-rows are those of one TPC: a route has 2I rows of ceil(K / 512) chunks and K rows of ceil(I / 512), spread over 24
TPCs. a (launches and fixed work), b (per route) and c (one chunk-row at 17 vector ops) are fitted to published
measurements of kernels of this design; `ops` is what the emulator counts for ours. A figure of this module is modelled,
never measured.

The scaling with `ops` holds while vector issue binds (the published kernels: 25 of 34 us a pass without any load). The
LOAD slot bounds it from below: with `load_cycles` above `ops`, those count.
"""

from __future__ import annotations

import dataclasses

import torch

from mxk_compile.kernels.tpc.signatures import CHUNK, NUM_TPC

PUBLISHED_OPS = 17.0
"""Vector ops a chunk-row of the kernels that were measured."""


@dataclasses.dataclass(frozen=True)
class PublishedRow:
    """One "all local" row of "MXFP4 MoE decode kernels", per-call timings on one card."""

    variant: str
    hidden_size: int
    intermediate_size: int
    routes: int
    kernel_us: float
    stock_us: float


PUBLISHED = (
    PublishedRow("gptoss, 32 experts", 2880, 2880, 4, 140.9, 523.9),
    PublishedRow("gptoss, 32 experts", 2880, 2880, 32, 968.2, 4082.0),
    PublishedRow("gptoss, 64 experts", 2880, 2880, 4, 142.4, 525.6),
    PublishedRow("gptoss, 64 experts", 2880, 2880, 32, 972.4, 4562.4),
    PublishedRow("gptoss, 128 experts", 2880, 2880, 4, 142.8, 536.4),
    PublishedRow("gptoss, 128 experts", 2880, 2880, 16, 495.9, 2416.4),
    PublishedRow("gptoss, 128 experts", 2880, 2880, 128, 3824.0, 13751.1),
    PublishedRow("kimi", 7168, 2048, 8, 398.2, 2055.2),
    PublishedRow("kimi", 7168, 2048, 64, 2976.3, 9687.8),
    PublishedRow("muse", 4096, 1024, 8, 138.7, 694.4),
    PublishedRow("muse", 4096, 1024, 32, 489.2, 2301.5),
    PublishedRow("dsv41", 5120, 2304, 6, 264.2, 1344.1),
    PublishedRow("dsv41", 5120, 2304, 48, 2007.8, 7974.2),
    PublishedRow("glm", 6144, 1024, 8, 191.9, 928.8),
    PublishedRow("glm", 6144, 1024, 64, 1397.5, 4691.9),
)


def chunk_rows(hidden_size: int, intermediate_size: int, routes: int) -> float:
    """Chunk-rows of one TPC for a call with this many local routes."""
    gate_up = 2 * intermediate_size * -(-hidden_size // CHUNK)
    down = hidden_size * -(-intermediate_size // CHUNK)
    return routes * (gate_up + down) / NUM_TPC


@dataclasses.dataclass(frozen=True)
class TimeModel:
    """Microseconds a call, a route, and a chunk-row of one TPC at 17 ops."""

    call_us: float
    route_us: float
    chunk_row_us: float

    def predict_us(
        self,
        hidden_size: int,
        intermediate_size: int,
        routes: int,
        ops: float = PUBLISHED_OPS,
        load_cycles: float = 0.0,
    ) -> float:
        """Modelled microseconds of one call: both projections.

        ops, load_cycles: VPU ops and LOAD cycles a chunk-row, as counted by the emulator.
        """
        rows = chunk_rows(hidden_size, intermediate_size, routes)
        issue = max(ops, load_cycles) / PUBLISHED_OPS
        return self.call_us + self.route_us * routes + self.chunk_row_us * rows * issue


def calibrated() -> TimeModel:
    """Least squares of the relative error over the published rows."""
    rows = [
        [1.0, row.routes, chunk_rows(row.hidden_size, row.intermediate_size, row.routes)] for row in PUBLISHED
    ]
    matrix = torch.tensor(rows, dtype=torch.float64)
    times = torch.tensor([row.kernel_us for row in PUBLISHED], dtype=torch.float64)
    solution = torch.linalg.lstsq(matrix / times[:, None], torch.ones(len(rows), 1, dtype=torch.float64))
    return TimeModel(*solution.solution.flatten().tolist())
