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

from mxk_compile.kernels.tpc.published import PUBLISHED
from mxk_compile.kernels.tpc.signatures import CHUNK, NUM_TPC
from mxk_compile.variants import VARIANTS

PUBLISHED_OPS = 17.0
"""Vector ops a chunk-row of the kernels that were measured."""


FITTED = tuple(row for row in PUBLISHED if row.routing == "hot")
"""What the constants are fitted to: every route local, so that routes are not a matter of luck."""


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
    """Least squares of the relative error over the fitted rows."""
    rows = []
    for row in FITTED:
        sizes = VARIANTS[row.variant].hidden_size, VARIANTS[row.variant].intermediate_size
        rows.append([1.0, row.local_routes, chunk_rows(*sizes, row.local_routes)])
    matrix = torch.tensor(rows, dtype=torch.float64)
    times = torch.tensor([row.kernel_us for row in FITTED], dtype=torch.float64)
    solution = torch.linalg.lstsq(matrix / times[:, None], torch.ones(len(rows), 1, dtype=torch.float64))
    return TimeModel(*solution.solution.flatten().tolist())
